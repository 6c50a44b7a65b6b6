//! JSON for the customers of an application: what the portal shows and does, through the same functions.

use std::sync::LazyLock;
use std::time::SystemTime;

use diesel_outbox::admin::{Bulked, Place};
use diesel_outbox::endpoints::{
    Delivery as Delivered, DeliveryCount, DeliveryDetails, Endpoint as Row, EndpointAnswer,
    EndpointError, FailedAttempt, TestAnswer,
};
use diesel_outbox::program::{DISABLE, ENABLE, REMOVE};
use http::StatusCode;
use schemars::JsonSchema;
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::deliveries::{find, search, send_again as resend};
use super::endpoints::{
    self, Written, ask, hold, new_secret, page, register, release, send_example, send_missed,
    send_waiting, write,
};
use super::own::{Many, Own};
use super::session::{Session, Unopened};
use super::words::Words;
use super::{Language, Portal, Refusal, Topic, deliveries, feeds};
use crate::api::feed::{Feed, Token};
use crate::api::{
    self, Caller, DONE, Done, Json, Listed, Nothing, Problem, Route, Time, document, millis, route,
    time, view,
};
use crate::request::Request;
use crate::response::Response;
use crate::text::without_user;
use crate::visitor::Needs;

type Call<'a> = api::Call<'a, Portal, Session>;
type Found<T> = Result<T, Problem>;

/// All routes.
pub(super) static ROUTES: LazyLock<Vec<Route<Portal, Session>>> = LazyLock::new(|| {
    vec![
        route!(GET "/openapi.json", Look, "This document.", openapi => Json),
        route!(GET "/topics", Look, "Topics to choose from.", list_topics => Listed<Offered>),
        route!(GET "/endpoints", Look, "Endpoints.", list_endpoints => Listed<Endpoint>, is_list: true),
        route!(POST "/endpoints", Act, "Add an endpoint.", add_endpoint <- Written => Added, status: StatusCode::CREATED),
        route!(GET "/endpoints/{name}", Look, "An endpoint.", get_endpoint => Endpoint),
        route!(PATCH "/endpoints/{name}", Act, "Change an endpoint.", change_endpoint <- Written => Endpoint),
        route!(DELETE "/endpoints/{name}", Act, "Remove an endpoint; events that wait for it are given up. With `dry_run=true`, only says how many.", remove_endpoint <- Nothing => Removed, query: &["dry_run"]),
        route!(POST "/endpoints/{name}/enable", Act, "Send events again. An endpoint that an operator has disabled stays disabled: 409.", enable_endpoint <- Nothing => Done),
        route!(POST "/endpoints/{name}/disable", Act, "New events are not for the endpoint; those that it has already wait.", disable_endpoint <- Nothing => Done),
        route!(POST "/endpoints/{name}/pause", Act, "New events are for the endpoint, and wait.", pause_endpoint <- Hold => Done),
        route!(POST "/endpoints/{name}/resume", Act, "Send waiting events again. The pause of an operator stays: 409.", resume_endpoint <- Nothing => Done),
        route!(POST "/endpoints/{name}/verify", Act, "Ask the endpoint whether it wants events.", verify_endpoint <- Nothing => Verified, lasts: true),
        route!(POST "/endpoints/{name}/retry", Act, "Send waiting events now.", retry_endpoint <- Nothing => Count, lasts: true),
        route!(POST "/endpoints/{name}/rotate", Secrets, "Make a new secret. The old one also signs for 24 hours.", rotate_secret <- Nothing => Secret),
        route!(POST "/endpoints/{name}/test", Act, "Send an example of an event now.", test_endpoint <- Example => Tested, lasts: true),
        route!(POST "/endpoints/{name}/recover", Act, "Send failed events again, and what was missed.", recover_endpoint <- Recovery => Count, lasts: true),
        route!(GET "/endpoints/{name}/counts", Look, "Deliveries of the last 24 hours in steps of 30 minutes, oldest first.", list_counts => Listed<Step>),
        route!(GET "/endpoints/{name}/deliveries", Look, "Deliveries, latest first.", list_deliveries => Listed<Delivery>, query: &["topic", "state", "since", "until"], is_list: true),
        route!(GET "/endpoints/{name}/deliveries/{id}", Look, "A delivery, by message id.", get_delivery => Details),
        route!(POST "/endpoints/{name}/deliveries/{id}/send-again", Act, "Send an event again.", send_again <- Nothing => Done),
        route!(GET "/feeds/{name}", Look, "How far a feed is read.", get_feed => Feed),
        route!(POST "/feeds/{name}/token", Secrets, "Make a token for the readers of a feed. Older ones end after 24 hours.", make_token <- Nothing => Token),
    ]
});

/// The answer to a request for JSON.
pub(super) fn answer(portal: &Portal, request: &Request, path: &str) -> Response {
    let admit = |route: &Route<Portal, Session>| {
        let session = portal
            .session(request)
            .map_err(|why| unopened(request, why))?;
        if !session.rights.meet(route.needs) {
            return Err(Problem::from(Refusal::NotAllowed).into());
        }
        if route.needs != Needs::Look && !request.is_of_program() {
            let given = request.header("x-form-token").unwrap_or_default();
            let checked = session.check_form(portal, request, given);
            checked.map_err(|refusal| Response::from(Problem::from(refusal)))?;
        }
        Ok(session)
    };
    api::answer(&ROUTES, portal, request, path, admit, |portal, session| {
        Caller {
            database: &portal.changes,
            name: session.party(),
            rights: session.rights,
        }
    })
}

/// The refusal of a visitor who is not let in.
pub(super) fn unopened(request: &Request, why: Unopened) -> Response {
    let (status, why) = match why {
        Unopened::Missing if request.visitor.identity.is_some() => {
            (StatusCode::FORBIDDEN, "the portal is for customers")
        }
        Unopened::Missing => (
            StatusCode::UNAUTHORIZED,
            "this request needs a token: send Authorization: Bearer …",
        ),
        Unopened::Expired => (StatusCode::UNAUTHORIZED, "the token has expired"),
        Unopened::Invalid => (StatusCode::UNAUTHORIZED, "the token is not valid"),
    };
    Problem::new(status, why).into()
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        let (status, words) = refusal.words(words(), "/api/v1");
        match &refusal {
            Refusal::Error(error) => {
                let problem = Self::new(status, error.public_error());
                match error {
                    EndpointError::Invalid(error) => problem.of_setting(error),
                    _ => problem,
                }
            }
            Refusal::Wrong(field, _) => Self::new(status, words).of_field(*field),
            _ => Self::new(status, words),
        }
    }
}

/// Programs read English.
fn words() -> &'static Words {
    Language::English.words()
}

view! {
    /// A topic that endpoints can choose.
    Offered of (one: &Topic) {
        topic: String = one.topic.clone(),
        description: String = one.description.clone(),
        /// A payload; null: none.
        example: Json = Json::of(&one.example.to_string()),
    }
}

view! {
    /// An endpoint.
    Endpoint of (one: &Row) {
        name: String = one.name.clone(),
        /// `webhook`: events are sent to its URL; `feed`: they are fetched.
        kind: String = one.kind.to_string(),
        /// Empty: a feed.
        url: String = without_user(&one.url),
        description: Option<String> = one.description.clone(),
        topics: Vec<String> = one.topics.clone(),
        /// A filter that events match; null: all events.
        filter: Option<Json> = one.filter.as_ref().map(|filter| Json::of(&filter.to_string())),
        /// `disabled`, `unverified`, `paused`, `failing`, `unread` or `active`.
        state: String = one.state.to_string(),
        /// Whose act the state is: `owner`, `operator`, `relay` or `receiver`.
        state_by: Option<String> = one.state_by.map(|by| by.to_string()),
        /// The end of a pause. Null: until it is resumed.
        state_until: Option<Time> = one.state_until.map(Time::from),
        /// What the owner has written.
        state_reason: Option<String> = endpoints::reason(one),
        /// What to do about the state; empty: nothing.
        hint: &'static str = endpoints::hint(one, words()),
        /// Of an unread feed: since when nobody has read it.
        failing_since: Option<Time> = one.failing_since.map(Time::from),
        verification_error: Option<String> = one.public_verification_error(),
        old_secret_until: Option<Time> = one.old_secrets_until.filter(|until| *until > SystemTime::now()).map(Time::from),
        created_at: Option<Time> = one.created_at.map(Time::from),
    }
}

view! {
    /// An event for an endpoint.
    Delivery of (row: &Delivered) {
        message_id: Uuid = row.message_id,
        topic: String = row.topic.clone(),
        state: String = row.state.to_string(),
        attempts: i32 = row.attempts,
        http_status: Option<i32> = row.http_status,
        error: Option<String> = row.public_error(),
        next_attempt_at: Option<Time> = time(&row.next_attempt_at),
        /// Why the event is not sent yet.
        waits: Option<String> = row.waits.as_ref().map(|reason| deliveries::waits(words(), reason)),
        /// The kind of the reason, as one word.
        wait_reason: Option<String> = row.waits.as_ref().map(|reason| reason.as_str().to_owned()),
        settled_at: Option<Time> = time(&row.settled_at),
        created_at: Time = (&row.created_at).into(),
        can_be_sent_again: bool = row.can_be_sent_again,
    }
}

view! {
    /// What was sent, and what came back. Null: not kept, or the visitor may not see it.
    Details of (details: &DeliveryDetails, own: Own<'_>) {
        delivery: Delivery = Delivery::of(&details.delivery),
        payload: Option<Json> = details.payload.as_deref().filter(|_| own.session.rights.payloads).map(Json::of),
        headers: Option<Json> = details.headers.as_deref().filter(|_| own.session.rights.payloads).map(Json::of),
        response: Option<String> = details.response.clone().filter(|_| own.shows_responses()),
        failed_attempts: Vec<Attempt> = details.failed.iter().map(|one| Attempt::of(one, own)).collect(),
    }
}

view! {
    /// An attempt that has failed.
    Attempt of (one: &FailedAttempt, own: Own<'_>) {
        attempt: Option<i32> = one.attempt,
        happened_at: Time = (&one.happened_at).into(),
        took_ms: Option<u64> = one.took.map(millis),
        http_status: Option<i32> = one.http_status,
        error: Option<String> = one.public_error(),
        response: Option<String> = one.response.clone().filter(|_| own.shows_responses()),
    }
}

view! {
    /// The answer of an endpoint.
    Verified of (answer: &EndpointAnswer) {
        is_verified: bool = answer.is_verified,
        error: Option<String> = answer.public_error(),
        took_ms: u64 = millis(answer.took),
    }
}

view! {
    /// The answer to an example.
    Tested of (answer: &TestAnswer, own: Own<'_>) {
        message_id: Uuid = answer.message_id,
        accepted: bool = answer.went_well,
        http_status: Option<u16> = answer.http_status,
        error: Option<String> = answer.public_error(),
        response: Option<String> = answer.body.clone().filter(|_| own.shows_responses()),
        took_ms: u64 = millis(answer.took),
    }
}

view! {
    /// Deliveries of half an hour. Null: not known.
    Step of (count: &Option<DeliveryCount>) {
        delivered: Option<u64> = count.as_ref().map(|count| count.delivered),
        dead: Option<u64> = count.as_ref().map(|count| count.dead),
    }
}

view! {
    /// How many events will be sent, or would be.
    Count of (done: &Bulked, is_cut: bool) {
        changed: u64 = done.changed,
        /// Events that are no longer kept.
        without_payload: u64 = done.without_payload,
        /// `true`: there was no time for all. The same request continues; a dry run counts no more.
        more: bool = is_cut,
    }
}

/// A signing secret, which is shown only now.
#[derive(Serialize, JsonSchema)]
struct Secret {
    /// Null: it was shown before.
    secret: Option<String>,
}

/// A new endpoint and its secret, which is shown only now.
#[derive(Serialize, JsonSchema)]
struct Added {
    endpoint: Endpoint,
    /// Null: the visitor may not see it, or it was shown before.
    secret: Option<String>,
}

/// An endpoint that was removed.
#[derive(Serialize, JsonSchema)]
struct Removed {
    /// `false`: a dry run.
    done: bool,
    /// How many events wait for it, in a dry run. Null: too many to count.
    waiting: Option<u64>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Example {
    /// One of `GET /topics`; absent: `outbox.test`.
    #[serde(default)]
    topic: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Recovery {
    /// RFC 3339, or a duration before now such as `24h`.
    since: String,
    /// Also what the endpoint missed.
    #[serde(default)]
    missing: bool,
    /// Only count.
    #[serde(default)]
    dry_run: bool,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Hold {
    /// A duration such as `2h`; absent: until it is resumed.
    #[serde(default, rename = "for")]
    lasts: String,
    /// For those who read it later.
    #[serde(default)]
    reason: String,
}

fn own<'a>(call: &'a Call<'_>) -> Own<'a> {
    Own::of(call.site, call.visitor, call.act)
}

fn openapi(call: &Call<'_>) -> Found<Json> {
    let title = call.site.name.as_deref().unwrap_or(words().title);
    let document = document(&ROUTES, title, &call.site.base);
    Ok(Json::of(&document.to_string()))
}

fn list_topics(call: &Call<'_>) -> Found<Listed<Offered>> {
    Ok(Listed::new(&call.site.topics, Offered::of, None))
}

fn list_endpoints(call: &Call<'_>) -> Found<Listed<Endpoint>> {
    let (found, next) = page(own(call), call.cursor()?, call.limit()?)?;
    Ok(Listed::new(&found, Endpoint::of, next))
}

fn get_endpoint(call: &Call<'_>) -> Found<Endpoint> {
    let found = endpoints::get(own(call), call.part("name"))?;
    Ok(Endpoint::of(&found))
}

fn add_endpoint(call: &Call<'_>, written: Written) -> Found<Added> {
    let (name, secret) = register(own(call), written)?;
    let found = endpoints::get(own(call), &name)?;
    Ok(Added {
        endpoint: Endpoint::of(&found),
        secret: secret.map(|secret| secret.written().expose_secret().to_owned()),
    })
}

fn change_endpoint(call: &Call<'_>, written: Written) -> Found<Endpoint> {
    write(own(call), call.part("name"), written)?;
    get_endpoint(call)
}

fn remove_endpoint(call: &Call<'_>, _: Nothing) -> Found<Removed> {
    let (own, name) = (own(call), call.part("name"));
    let dry_run = call.flag("dry_run")?;
    let waiting = match dry_run {
        true => own.preview(&REMOVE, name)?.waiting,
        false => {
            own.change_state(&REMOVE, name)?;
            None
        }
    };
    Ok(Removed {
        done: !dry_run,
        waiting,
    })
}

fn enable_endpoint(call: &Call<'_>, _: Nothing) -> Found<Done> {
    own(call).change_state(&ENABLE, call.part("name"))?;
    Ok(DONE)
}

fn disable_endpoint(call: &Call<'_>, _: Nothing) -> Found<Done> {
    own(call).change_state(&DISABLE, call.part("name"))?;
    Ok(DONE)
}

fn pause_endpoint(call: &Call<'_>, given: Hold) -> Found<Done> {
    hold(own(call), call.part("name"), &given.lasts, &given.reason)?;
    Ok(DONE)
}

fn resume_endpoint(call: &Call<'_>, _: Nothing) -> Found<Done> {
    release(own(call), call.part("name"))?;
    Ok(DONE)
}

fn retry_endpoint(call: &Call<'_>, _: Nothing) -> Found<Count> {
    let (done, is_cut) = send_waiting(own(call), call.part("name"))?;
    Ok(Count::of(&done, is_cut))
}

fn verify_endpoint(call: &Call<'_>, _: Nothing) -> Found<Verified> {
    let answer = ask(own(call), call.part("name"))?;
    Ok(Verified::of(&answer))
}

fn rotate_secret(call: &Call<'_>, _: Nothing) -> Found<Secret> {
    let secret = new_secret(own(call), call.part("name"))?;
    let secret = secret.written().expose_secret().to_owned();
    Ok(Secret {
        secret: Some(secret),
    })
}

fn test_endpoint(call: &Call<'_>, given: Example) -> Found<Tested> {
    let answer = send_example(own(call), call.part("name"), &given.topic)?;
    Ok(Tested::of(&answer, own(call)))
}

fn recover_endpoint(call: &Call<'_>, given: Recovery) -> Found<Count> {
    let many = match given.dry_run {
        true => Many::Count,
        false => Many::Make,
    };
    let what = (given.since.as_str(), given.missing);
    let (done, is_cut) = send_missed(own(call), call.part("name"), what, many)?;
    Ok(Count::of(&done, is_cut))
}

fn list_counts(call: &Call<'_>) -> Found<Listed<Step>> {
    let counts = endpoints::counts(own(call), call.part("name"))?;
    Ok(Listed::new(&counts, Step::of, None))
}

fn list_deliveries(call: &Call<'_>) -> Found<Listed<Delivery>> {
    let filter = deliveries::filter(|name| call.asked(name));
    let filter = filter.map_err(|(name, refusal)| Problem::from(refusal).of_field(name))?;
    let filter = filter.after(call.cursor::<Place>()?);
    let (_, found) = search(own(call), call.part("name"), &filter, call.limit()?)?;
    let next = found.next.map(|place| place.to_string());
    Ok(Listed {
        is_complete: found.is_complete,
        ..Listed::new(&found.rows, Delivery::of, next)
    })
}

fn get_delivery(call: &Call<'_>) -> Found<Details> {
    let (_, details) = find(own(call), call.part("name"), call.parsed("id")?)?;
    Ok(Details::of(&details, own(call)))
}

fn get_feed(call: &Call<'_>) -> Found<Feed> {
    let found = feeds::get(own(call), call.part("name"))?;
    Ok(Feed::of(&found))
}

fn make_token(call: &Call<'_>, _: Nothing) -> Found<Token> {
    let made = feeds::new_token(own(call), call.part("name"))?;
    Ok(made.into())
}

fn send_again(call: &Call<'_>, _: Nothing) -> Found<Done> {
    resend(own(call), call.part("name"), call.parsed("id")?)?;
    Ok(DONE)
}
