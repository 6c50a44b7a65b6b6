//! JSON for operators: what the pages show and do, through the same functions.

use std::sync::LazyLock;
use std::time::SystemTime;

use diesel_outbox::admin::{DeadDepth, LaneDepth, LetterId, Pause};
use diesel_outbox::config::SigningSecret;
use diesel_outbox::endpoints::{
    Delivery as Delivered, Endpoint as Row, EndpointAnswer, TestAnswer,
};
use diesel_outbox::program::{
    self, ACTS, BlockedKey, CANCEL, Choice, Chosen, ENDPOINT_ACTS, EndpointAct, HistoryEntry,
    KnownTopic, LeaseRow, LiveTopic, ManyAct, MessageAct, MessageRecord, OperatorAct, RESCHEDULE,
    SENDING_ACTS, SETTLE, SendingAct, SentMessages, WrongChoice,
};
use diesel_outbox::{Answer, Changed, MessageRef, Sequence};
use http::{Method, StatusCode};
use schemars::JsonSchema;
use secrecy::ExposeSecret;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::asked::{Asked, Wrong};
use super::endpoints::change::{self, test as send_test};
use super::endpoints::edit::{self, Written, ask, new_secret, write};
use super::endpoints::{self, feed, search, send, url};
use super::messages::{self, waiting};
use super::{Refusal, Visit, acts, audit, dead, keys, ledger, pauses, topics};
use crate::api::feed::{Feed, Token};
use crate::api::{
    self, Caller, DONE, Done, Json, Listed, Nothing, Problem, Route, Time, document, millis, route,
    time, view,
};
use crate::request::Request;
use crate::response::Response;
use crate::visitor::Needs;
use crate::{Guest, Site};

type Call<'a> = api::Call<'a, Site, Guest>;
type Found<T> = Result<T, Problem>;

impl api::Call<'_, Site, Guest> {
    fn visit(&self) -> Visit<'_> {
        Visit {
            site: self.site,
            guest: self.visitor,
            request: self.request,
            form: &self.request.query,
            act: self.act,
        }
    }

    fn filter(&self, names: &'static [&'static str]) -> Asked<'_> {
        Asked::of(&self.request.query, names)
    }
}

/// How long older secrets sign, and older tokens hold, beside a new one, if the request does not say.
const OVERLAP: &str = "24h";

/// All routes.
static ROUTES: LazyLock<Vec<Route<Site, Guest>>> = LazyLock::new(|| {
    let mut routes = vec![
        route!(GET "/openapi.json", Look, "This document.", openapi => Json),
        route!(GET "/endpoints", Look, "Endpoints, by name.", list_endpoints => Listed<Endpoint>, query: endpoints::NAMES, is_list: true),
        route!(POST "/endpoints", Act, "Register an endpoint.", register_endpoint <- Registration => RegisteredEndpoint, status: StatusCode::CREATED),
        route!(GET "/endpoints/{name}", Look, "An endpoint.", get_endpoint => Endpoint),
        route!(PATCH "/endpoints/{name}", Act, "Change an endpoint.", change_endpoint <- Written => Endpoint),
        route!(POST "/endpoints/{name}/verify", Act, "Ask the endpoint whether it wants messages.", verify_endpoint <- Because => Verified, lasts: true),
        route!(POST "/endpoints/{name}/rotate", Act, "Make a new secret.", rotate_secret <- Rotation => Secret),
        route!(POST "/endpoints/{name}/test", Act, "Send a test event now.", test_endpoint <- Because => Tested, lasts: true),
        route!(GET "/endpoints/{name}/deliveries", Look, "Deliveries, latest first.", list_deliveries => Listed<Delivery>, is_list: true),
        route!(POST "/endpoints/{name}/deliveries/{id}/send-again", Act, "Send a message to the endpoint again.", send_again <- Because => Done),
        route!(GET "/feeds", Look, "Feeds, by name, and how far they are read.", list_feeds => Listed<Feed>, is_list: true),
        route!(GET "/feeds/{name}", Look, "How far a feed is read.", get_feed => Feed),
        route!(POST "/feeds/{name}/token", Secrets, "Make a token for the readers of a feed.", make_token <- Rotation => Token),
        route!(GET "/messages", Look, "Waiting messages, next due first.", list_messages => Listed<Message>, query: waiting::NAMES, is_list: true),
        route!(GET "/messages/{key}", Look, "A message, by id, idempotency key or sequence.", get_message => Known),
        route!(POST CANCEL.path, Act, CANCEL.about, cancel_message <- One => Became),
        route!(POST RESCHEDULE.path, Act, RESCHEDULE.about, reschedule_message <- Reschedule => Became),
        route!(POST SETTLE.path, Act, SETTLE.about, settle_message <- Settle => Became),
        route!(GET "/ledger", Look, "Settled messages, latest first.", list_ledger => Listed<Entry>, query: ledger::NAMES, is_list: true),
        route!(GET "/dead", Look, "Dead letters, latest first.", list_dead => Listed<DeadLetter>, query: dead::NAMES, is_list: true),
        route!(GET "/dead/{letter}", Look, "A dead letter, by `id`.", get_dead => DeadLetter),
        route!(GET "/pauses", Look, "Paused destinations and topics.", list_pauses => Listed<Paused>),
        route!(POST "/pauses", Act, "Pause a destination or a topic.", pause <- PauseAsked => PauseTold, status: StatusCode::CREATED),
        route!(DELETE "/pauses/{kind}/{name}", Act, "End a pause.", resume <- Nothing => Done, query: &["why"]),
        route!(GET "/depths", Look, "Numbers of waiting messages, by topic and destination.", list_depths => Listed<Lane>),
        route!(GET "/depths/dead", Look, "Numbers of dead letters, by topic and destination.", list_dead_depths => Listed<Dead>),
        route!(GET "/keys", Look, "Ordering keys whose messages wait, those with most messages first. At most 100.", list_keys => Listed<Blocked>),
        route!(GET "/topics", Look, "Topics of live messages, and the relays that serve them.", list_topics => Listed<Live>),
        route!(GET "/topics/served", Look, "Topics that relays have ever served.", list_served => Listed<Pattern>),
        route!(GET "/relays", Look, "Relays and their leases.", list_relays => Listed<Relay>),
        route!(GET "/audit", Look, "Acts of operators, latest first.", list_acts => Listed<Acted>, query: &["q"], is_list: true),
    ];
    routes.extend(ENDPOINT_ACTS.iter().map(|act| of_endpoint(act)));
    routes.extend(SENDING_ACTS.iter().map(|act| sending(act)));
    routes.extend(ACTS.iter().map(|act| many(*act)));
    routes
});

/// The answer to a request for JSON.
pub(crate) fn answer(site: &Site, request: &Request, path: &str) -> Response {
    let admit = |route: &Route<Site, Guest>| {
        site.access.check_host(request)?;
        let mut guest = site.access.script(request)?;
        if route.needs != Needs::Look {
            guest.is_script |= request.is_of_program();
            let form_token = request.header("x-form-token").unwrap_or_default();
            site.access.check_change(request, &guest, form_token)?;
        }
        if !guest.rights.meet(route.needs) {
            return Err(Response::text(
                StatusCode::FORBIDDEN,
                "you may not see secrets\n",
            ));
        }
        Ok(guest)
    };
    let admit = |route: &Route<Site, Guest>| admit(route).map_err(Problem::of);
    let response = api::answer(&ROUTES, site, request, path, admit, |site, guest| Caller {
        database: &site.changes,
        name: format!("operator {}", guest.who),
        rights: guest.rights,
    });
    if !matches!(request.method, Method::GET | Method::HEAD) {
        site.forget();
    }
    response
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        use diesel_outbox::endpoints::EndpointError::{Invalid, NoTables, TooMany};
        match refusal {
            Refusal::Missing(words) => Self::new(StatusCode::NOT_FOUND, words),
            Refusal::Taken(words) => Self::new(StatusCode::CONFLICT, words),
            Refusal::Invalid(words) => Self::invalid(words),
            Refusal::Wrong(Wrong { field, what }) => Self::invalid(what).of_field(field),
            Refusal::Endpoint(Invalid(error)) => Self::invalid(error.reason()).of_setting(&error),
            Refusal::Endpoint(error @ TooMany(_)) => {
                Self::new(StatusCode::CONFLICT, error.to_string())
            }
            Refusal::Endpoint(error @ NoTables(_)) => {
                Self::new(StatusCode::NOT_IMPLEMENTED, error.to_string())
            }
            Refusal::Endpoint(error) => Self::invalid(error.to_string()),
            Refusal::Away(error) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, format!("{error:#}"))
            }
        }
    }
}

impl From<anyhow::Error> for Problem {
    fn from(error: anyhow::Error) -> Self {
        Refusal::Away(error).into()
    }
}

/// When a message was settled, in lists that have only settled ones.
fn settled(row: &MessageRecord) -> Time {
    Time::from(&row.settled_at.clone().unwrap_or_default())
}

/// Content, for a visitor who may see it.
fn seen(guest: &Guest, text: &Option<String>) -> Option<Json> {
    let text = text.as_deref().filter(|_| guest.rights.payloads);
    text.map(Json::of)
}

fn policy(one: &Row) -> Map<String, Value> {
    match json!(one.policy) {
        Value::Object(options) => options,
        _ => Map::new(),
    }
}

view! {
    /// An endpoint.
    Endpoint of (one: &Row, guest: &Guest, refused: Option<String>) {
        name: String = one.name.clone(),
        /// `webhook` or `feed`.
        kind: String = one.kind.to_string(),
        /// Without most of the path, if the visitor may not see payloads. Empty: a feed.
        url: String = url(guest, one),
        topics: Vec<String> = one.topics.clone(),
        tenant: Option<Uuid> = one.tenant_id,
        /// A filter that messages match.
        filter: Option<Json> = one.filter.as_ref().map(|filter| Json::of(&filter.to_string())),
        description: Option<String> = one.description.clone(),
        /// `disabled`, `unverified`, `paused`, `failing`, `unread` or `active`.
        state: String = one.state.to_string(),
        /// Whose act the state is: `owner`, `operator`, `relay` or `receiver`.
        state_by: Option<String> = one.state_by.map(|by| by.to_string()),
        state_until: Option<Time> = one.state_until.map(Time::from),
        state_reason: Option<String> = one.state_reason.clone(),
        enabled: bool = one.enabled,
        disabled_reason: Option<String> = one.disabled_reason.clone(),
        /// Why a relay with the settings of this server would not send to it. Null in lists.
        refused: Option<String> = refused,
        /// Why no relay uses the destination.
        problem: Option<String> = one.problem.clone(),
        failing: bool = one.failing,
        /// Of an unread feed: since when nobody has read it.
        failing_since: Option<Time> = one.failing_since.map(Time::from),
        verification: String = one.verification.to_string(),
        verified_at: Option<Time> = one.verified_at.map(Time::from),
        verification_error: Option<String> = one.verification_error.clone(),
        /// The options that it has itself, as in `outbox.toml`. The settings of the relay hold for the others.
        policy: Map<String, Value> = policy(one),
        /// Names of headers of each request.
        headers: Vec<String> = one.headers.iter().map(|(name, _)| name.clone()).collect(),
        old_secrets_until: Option<Time> = one.old_secrets_until.filter(|until| *until > SystemTime::now()).map(Time::from),
        created_at: Option<Time> = one.created_at.map(Time::from),
        updated_at: Option<Time> = one.updated_at.map(Time::from),
    }
}

view! {
    /// A message for a destination.
    Delivery of (row: &Delivered) {
        message_id: Uuid = row.message_id,
        topic: String = row.topic.clone(),
        tenant: Option<Uuid> = row.tenant_id,
        state: String = row.state.to_string(),
        attempts: i32 = row.attempts,
        http_status: Option<i32> = row.http_status,
        reason: Option<String> = row.reason.clone(),
        error: Option<String> = row.error.clone(),
        next_attempt_at: Option<Time> = time(&row.next_attempt_at),
        /// Why the message is not sent yet.
        waits: Option<String> = row.waits.as_ref().map(ToString::to_string),
        /// The kind of the reason, as one word.
        wait_reason: Option<String> = row.waits.as_ref().map(|reason| reason.as_str().to_owned()),
        settled_at: Option<Time> = time(&row.settled_at),
        created_at: Time = (&row.created_at).into(),
        can_be_sent_again: bool = row.can_be_sent_again,
    }
}

view! {
    /// A message: one row of it, for one destination.
    Message of (row: &MessageRecord, waits: Option<String>, guest: &Guest) {
        sequence: i64 = row.sequence.0,
        message_id: Uuid = row.message_id,
        /// `live`, `dead` or `ledger`.
        kept_in: String = row.kept_in.to_string(),
        topic: String = row.topic.clone(),
        /// Empty: the topic decides.
        destination: String = row.destination.clone(),
        idempotency_key: String = row.idempotency_key.clone(),
        ordering_key: Option<String> = row.ordering_key.clone(),
        tenant: Option<Uuid> = row.tenant_id,
        status: String = row.status.to_string(),
        /// Why the message is not sent now.
        waits: Option<String> = waits,
        attempts: i32 = row.attempts,
        reason: Option<String> = row.reason.clone(),
        error: Option<String> = row.last_error.clone(),
        http_status: Option<i32> = row.http_status,
        created_at: Time = (&row.created_at).into(),
        due_at: Option<Time> = time(&row.available_at),
        expires_at: Option<Time> = time(&row.expires_at),
        settled_at: Option<Time> = time(&row.settled_at),
        /// Null in lists, where it is not kept, and for a visitor who may not see it; as are `headers` and `response`.
        payload: Option<Json> = seen(guest, &row.payload),
        headers: Option<Json> = seen(guest, &row.headers),
        response: Option<String> = row.response.clone().filter(|_| guest.rights.payloads),
    }
}

view! {
    /// A failed attempt, or an act of an operator.
    Event of (entry: &HistoryEntry, guest: &Guest) {
        happened_at: Time = (&entry.happened_at).into(),
        event: String = entry.event.clone(),
        sequence: i64 = entry.sequence.0,
        destination: String = entry.destination.clone(),
        attempt: Option<i32> = entry.attempt,
        reason: Option<String> = entry.reason.clone(),
        error: Option<String> = entry.error.clone(),
        http_status: Option<i32> = entry.http_status,
        response: Option<String> = entry.response.clone().filter(|_| guest.rights.payloads),
        took_ms: Option<u64> = entry.took.map(millis),
        relay: Option<String> = entry.relay.clone(),
        operator: Option<String> = entry.operator.clone(),
    }
}

view! {
    /// How a message was settled.
    Entry of (row: &MessageRecord) {
        sequence: i64 = row.sequence.0,
        message_id: Uuid = row.message_id,
        topic: String = row.topic.clone(),
        destination: String = row.destination.clone(),
        status: String = row.status.to_string(),
        idempotency_key: String = row.idempotency_key.clone(),
        ordering_key: Option<String> = row.ordering_key.clone(),
        tenant: Option<Uuid> = row.tenant_id,
        reason: Option<String> = row.reason.clone(),
        error: Option<String> = row.last_error.clone(),
        http_status: Option<i32> = row.http_status,
        attempts: i32 = row.attempts,
        created_at: Time = (&row.created_at).into(),
        settled_at: Time = settled(row),
    }
}

view! {
    /// A message that was given up.
    DeadLetter of (row: &MessageRecord, guest: &Guest) {
        id: String = row.id().to_string(),
        sequence: i64 = row.sequence.0,
        message_id: Uuid = row.message_id,
        topic: String = row.topic.clone(),
        destination: String = row.destination.clone(),
        idempotency_key: String = row.idempotency_key.clone(),
        ordering_key: Option<String> = row.ordering_key.clone(),
        tenant: Option<Uuid> = row.tenant_id,
        reason: String = row.reason.clone().unwrap_or_default(),
        error: Option<String> = row.last_error.clone(),
        http_status: Option<i32> = row.http_status,
        attempts: i32 = row.attempts,
        created_at: Time = (&row.created_at).into(),
        dead_lettered_at: Time = settled(row),
        /// Null in lists, and for a visitor who may not see it; as are `headers` and `response`.
        payload: Option<Json> = seen(guest, &row.payload),
        headers: Option<Json> = seen(guest, &row.headers),
        response: Option<String> = row.response.clone().filter(|_| guest.rights.payloads),
    }
}

view! {
    /// A pause.
    Paused of (pause: &Pause) {
        /// `destination` or `topic`.
        kind: String = pause.kind.as_str().to_owned(),
        name: String = pause.name.clone(),
        reason: String = pause.reason.clone(),
        /// Null: until it is resumed.
        seconds_left: Option<u64> = pause.left.map(|left| left.as_secs()),
    }
}

view! {
    /// The waiting messages of a topic, for one destination.
    Lane of (lane: &LaneDepth) {
        topic: String = lane.topic.clone(),
        /// That the messages name; empty: the topic decides.
        destination: String = lane.destination.clone(),
        pending: i64 = lane.pending,
        sending: i64 = lane.sending,
        retrying: i64 = lane.retrying,
        /// Whether the numbers are estimates.
        is_estimate: bool = lane.is_estimate,
        /// Null: no message is due.
        oldest_due_seconds: Option<f64> = lane.oldest_due_seconds,
    }
}

view! {
    /// The dead letters of a topic, of one destination.
    Dead of (dead: &DeadDepth) {
        topic: String = dead.topic.clone(),
        /// Empty: none was used.
        destination: String = dead.destination.clone(),
        dead: i64 = dead.count,
        /// Whether the number is an estimate.
        is_estimate: bool = dead.is_estimate,
    }
}

view! {
    /// An ordering key whose messages wait for one of them.
    Blocked of (key: &BlockedKey) {
        ordering_key: String = key.ordering_key.clone(),
        /// Empty: the topic decides.
        destination: String = key.destination.clone(),
        /// The message that the others wait for.
        sequence: i64 = key.sequence.0,
        status: String = key.status.to_string(),
        reason: Option<String> = key.reason.clone(),
        /// Why the message is not sent now, although it is due.
        waits: Option<String> = key.waits.clone(),
        /// Until the message is due.
        seconds_left: Option<f64> = key.seconds_left,
        /// How many messages wait behind it.
        waiting: i64 = key.waiting,
        /// More messages wait: counting stopped.
        waiting_is_capped: bool = key.waiting_is_capped,
    }
}

view! {
    /// A topic of live messages.
    Live of (one: &LiveTopic) {
        topic: String = one.topic.clone(),
        /// That the messages name; empty: the topic decides.
        destination: String = one.destination.clone(),
        /// Names of relays. Empty: the messages wait.
        served_by: Vec<String> = one.served_by.clone(),
        /// Messages that no relay has claimed.
        waiting: i64 = one.waiting,
        /// Why no active relay serves the messages.
        unserved: Option<String> = one.unserved.as_ref().map(ToString::to_string),
        next_step: Option<String> = one.unserved.as_ref().map(|why| program::next_step(why, one.waiting)),
    }
}

view! {
    /// A topic that a relay has served, or that is declared.
    Pattern of (one: &KnownTopic) {
        pattern: String = one.pattern.clone(),
        /// `route`, `handler`, `declared` or `no_subscriber`.
        kind: String = one.kind.clone(),
        first_served: Time = (&one.first_served).into(),
        last_served: Time = (&one.last_served).into(),
    }
}

view! {
    /// A relay that is or was running.
    Relay of (row: &LeaseRow) {
        lease: i64 = row.id,
        relay: String = row.relay.clone(),
        enabled: bool = row.enabled,
        stands_by: bool = row.stands_by,
        started_seconds_ago: f64 = row.started_seconds_ago,
        renewed_seconds_ago: f64 = row.renewed_seconds_ago,
        /// Negative: the lease has expired.
        seconds_left: f64 = row.seconds_left,
        /// The heartbeat has stopped, and the lease will expire.
        silent: bool = row.silent,
        destinations: Vec<String> = row.destinations.clone(),
        /// Whether the relay sends to endpoints.
        endpoints: bool = row.endpoints,
    }
}

view! {
    /// What an operator has done.
    Acted of (act: &OperatorAct) {
        at: Time = (&act.at).into(),
        who: String = act.who.clone(),
        act: String = act.act.clone(),
        target: String = act.target.clone(),
        why: String = act.why.clone(),
    }
}

view! {
    /// How many messages were sent, or would be.
    Count of (sent: SentMessages, is_cut: bool, name: &str) {
        changed: u64 = sent.messages.changed,
        /// Messages that were left, because another was faster or the key is in the outbox again.
        skipped: u64 = sent.messages.skipped,
        /// Messages that cannot be sent, because the ledger has no payload of them.
        without_payload: u64 = sent.messages.without_payload,
        /// `true`: there was no time for all. The same request continues.
        more: bool = is_cut,
        /// Other messages that wait for their next attempt at the endpoint, and keep their time. Null: they were not counted.
        retrying: Option<u64> = sent.retrying,
        /// What is not sent, and why.
        leaves: Vec<String> = sent.leaves(name),
        /// What becomes of the messages.
        becomes: &'static str = SendingAct::BECOMES,
        undo: &'static str = SendingAct::UNDO,
    }
}

view! {
    /// The answer of an endpoint.
    Verified of (answer: &EndpointAnswer) {
        is_verified: bool = answer.is_verified,
        reason: Option<String> = answer.reason.map(|reason| reason.as_str().to_owned()),
        error: Option<String> = answer.error.clone(),
        allowed_rate: Option<String> = answer.allowed_rate.map(|rate| rate.to_string()),
        took_ms: u64 = millis(answer.took),
    }
}

view! {
    /// The answer to a test.
    Tested of (answer: &TestAnswer, guest: &Guest) {
        message_id: Uuid = answer.message_id,
        accepted: bool = answer.went_well,
        http_status: Option<u16> = answer.http_status,
        reason: Option<String> = answer.reason.map(|reason| reason.as_str().to_owned()),
        error: Option<String> = answer.error.clone(),
        response: Option<String> = answer.body.clone().filter(|_| guest.rights.payloads),
        took_ms: u64 = millis(answer.took),
    }
}

/// A signing secret, which is shown only now.
#[derive(Serialize, JsonSchema)]
struct Secret {
    /// Null: the visitor may not see it, or it was shown before.
    secret: Option<String>,
}

impl Secret {
    fn of(secret: &SigningSecret, guest: &Guest) -> Self {
        let written = secret.written();
        let secret = guest.rights.secrets.then(|| written.expose_secret().into());
        Self { secret }
    }
}

/// A new destination and its secret, which is shown only now.
#[derive(Serialize, JsonSchema)]
struct RegisteredEndpoint {
    endpoint: Endpoint,
    /// Null: the visitor may not see it, or it was shown before.
    secret: Option<String>,
}

/// Everything known about a message.
#[derive(Serialize, JsonSchema)]
struct Known {
    rows: Vec<Message>,
    history: Vec<Event>,
    /// `false`: the search ran out of time, so there may be more.
    is_complete: bool,
}

/// What became of a message.
#[derive(Serialize, JsonSchema)]
struct Became {
    /// `cancelled`, `rescheduled`, `settled_delivered` or `settled_cancelled`.
    became: String,
}

/// A new endpoint.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Registration {
    name: String,
    /// `webhook` (messages are posted to its URL) or `feed` (consumers read it); absent: `webhook`.
    #[serde(default)]
    kind: String,
    #[serde(default)]
    endpoint: Written,
}

/// An act, with its reason.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Because {
    /// Recorded with the act.
    #[serde(default)]
    why: String,
}

/// An act on an endpoint.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OfEndpoint {
    /// Recorded with the act.
    #[serde(default)]
    why: String,
    /// Only says what the act would do.
    #[serde(default)]
    dry_run: bool,
}

/// What an act on an endpoint has done, or would do.
#[derive(Serialize, JsonSchema)]
struct EndpointDone {
    /// `false`: a dry run.
    done: bool,
    /// How many messages waited for the endpoint before. Null: too many to count.
    waiting: Option<u64>,
    /// What becomes of its messages.
    becomes: String,
    /// How to undo it.
    undo: &'static str,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Rotation {
    /// How long older secrets also sign, or older tokens hold (24h).
    keep: Option<String>,
    /// Recorded with the act.
    #[serde(default)]
    why: String,
}

/// What an endpoint did not get.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Recovery {
    /// RFC 3339, or a duration before now such as `24h`.
    since: String,
    /// Of a recovery: also what the endpoint missed.
    #[serde(default)]
    missing: bool,
    /// Only count.
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    why: String,
}

/// The messages are those with these ids, or those that the parameters of the query choose, or all.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Many {
    /// The `id` of each dead letter, or of waiting messages their sequences, message ids or idempotency keys.
    #[serde(default)]
    ids: Vec<String>,
    /// All of them: neither ids nor a parameter of the query.
    #[serde(default)]
    all: bool,
    /// Only count.
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    why: String,
}

/// What was done, or would be.
#[derive(Serialize, JsonSchema)]
struct ManyDone {
    /// The messages that matched.
    matched: u64,
    changed: u64,
    /// Messages that were left, because another was faster or the key is in the outbox again.
    skipped: u64,
    /// Messages that the act had no time for: the same request continues with them.
    left: u64,
    /// The sequence of the first message.
    first: Option<i64>,
    /// What was chosen, and stays, and why.
    leaves: Vec<String>,
    /// What becomes of the messages.
    becomes: &'static str,
    undo: &'static str,
    /// Of waiting messages that were named by ids: what became of each.
    messages: Vec<NamedMessage>,
}

#[derive(Serialize, JsonSchema)]
struct NamedMessage {
    id: String,
    /// `done`, `partly`, `in_flight`, `delivered`, `cancelled`, `dead`, `ambiguous` or `unknown`.
    answer: &'static str,
}

impl NamedMessage {
    fn of((id, changed): &(String, Changed)) -> Self {
        let answer = changed.answer().as_str();
        let id = id.clone();
        Self { id, answer }
    }
}

/// Which row of the message.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct One {
    #[serde(default)]
    destination: String,
    message_id: Option<Uuid>,
    #[serde(default)]
    why: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Reschedule {
    /// A duration such as `2h`; absent: now.
    r#in: Option<String>,
    #[serde(default)]
    destination: String,
    message_id: Option<Uuid>,
    /// Recorded with the act.
    #[serde(default)]
    why: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Settle {
    verdict: Outcome,
    why: String,
    #[serde(default)]
    destination: String,
    message_id: Option<Uuid>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Delivered,
    Never,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PauseAsked {
    /// `destination` or `topic`.
    kind: String,
    name: String,
    #[serde(default)]
    reason: String,
    /// A duration such as `2h`; absent: until resumed.
    r#for: Option<String>,
    /// Also a destination that neither the settings nor a relay, an endpoint or a waiting message names.
    #[serde(default)]
    force: bool,
}

/// The pause that holds now.
#[derive(Serialize, JsonSchema)]
struct PauseTold {
    /// `false`: a pause at least as long was there, and stays.
    changed: bool,
    /// `true`: nobody knows this name, so it may be misspelt.
    unknown: bool,
    pause: Paused,
}

fn openapi(call: &Call<'_>) -> Found<Json> {
    let base = &call.site.access.admin.base;
    let document = document(&ROUTES, "Outbox, for operators", base);
    Ok(Json::of(&document.to_string()))
}

fn list_endpoints(call: &Call<'_>) -> Found<Listed<Endpoint>> {
    let asked = call.filter(endpoints::NAMES);
    let after: Option<String> = call.cursor()?;
    let (found, next) = search(&call.visit(), asked, after.as_deref(), call.limit()?)?;
    let view = |one: &Row| Endpoint::of(one, call.visitor, None);
    Ok(Listed::new(&found, view, next))
}

fn get_endpoint(call: &Call<'_>) -> Found<Endpoint> {
    let (visit, name) = (&call.visit(), call.part("name"));
    let found = endpoints::get(visit, name)?;
    Ok(Endpoint::of(
        &found,
        call.visitor,
        endpoints::refusal(visit, name)?,
    ))
}

fn register_endpoint(call: &Call<'_>, new: Registration) -> Found<RegisteredEndpoint> {
    let (visit, guest) = (&call.visit(), call.visitor);
    let kind = edit::kind(&new.kind).map_err(|refusal| Problem::from(refusal).of_field("kind"))?;
    let secret = write(visit, &new.name, Some(kind), new.endpoint)?;
    let found = endpoints::get(visit, &new.name)?;
    Ok(RegisteredEndpoint {
        endpoint: Endpoint::of(&found, guest, endpoints::refusal(visit, &new.name)?),
        secret: secret.and_then(|secret| Secret::of(&secret, guest).secret),
    })
}

fn change_endpoint(call: &Call<'_>, written: Written) -> Found<Endpoint> {
    write(&call.visit(), call.part("name"), None, written)?;
    get_endpoint(call)
}

/// The route of an act that the library lists.
fn listed<I: DeserializeOwned + JsonSchema, T: Serialize + JsonSchema>(
    id: String,
    (path, summary): (&'static str, &'static str),
    act: impl Fn(&Call<'_>, I) -> Found<T> + Send + Sync + 'static,
) -> Route<Site, Guest> {
    Route {
        id: id.into(),
        method: Method::POST,
        path,
        needs: Needs::Act,
        summary,
        query: &[],
        is_list: false,
        lasts: true,
        status: StatusCode::OK,
        input: Some(|generator| generator.subschema_for::<I>()),
        output: |generator| generator.subschema_for::<T>(),
        answer: Box::new(move |call| Ok(api::text(&act(call, call.input()?)?))),
    }
}

/// The route of an act on an endpoint. A request to delete has no body.
fn of_endpoint(act: &'static EndpointAct) -> Route<Site, Guest> {
    let (method, path) = act.route;
    let (id, about) = (format!("{}_endpoint", act.name), (path, act.about));
    match method {
        "DELETE" => Route {
            method: Method::DELETE,
            query: &["why", "dry_run"],
            lasts: false,
            input: None,
            ..listed(id, about, move |call, _: Nothing| {
                let why = call.asked("why").unwrap_or_default();
                act_on_endpoint(call, act, why, call.flag("dry_run")?)
            })
        },
        _ => Route {
            lasts: false,
            ..listed(id, about, move |call, given: OfEndpoint| {
                act_on_endpoint(call, act, &given.why, given.dry_run)
            })
        },
    }
}

fn act_on_endpoint(
    call: &Call<'_>,
    act: &'static EndpointAct,
    why: &str,
    dry_run: bool,
) -> Found<EndpointDone> {
    let (visit, name) = (&call.visit(), call.part("name"));
    let found = change::preview(visit, act, name)?.ok_or_else(Problem::missing)?;
    let done = !dry_run;
    if done && !change::perform(visit, act, name, why)? {
        return Err(Problem::missing());
    }
    Ok(EndpointDone {
        done,
        waiting: found.waiting,
        becomes: found.becomes,
        undo: act.undo,
    })
}

fn send_again(call: &Call<'_>, given: Because) -> Found<Done> {
    match change::send_again(
        &call.visit(),
        call.part("name"),
        call.parsed("id")?,
        &given.why,
    )? {
        true => Ok(DONE),
        false => Err(Problem::missing()),
    }
}

fn verify_endpoint(call: &Call<'_>, given: Because) -> Found<Verified> {
    let answer = ask(&call.visit(), call.part("name"), &given.why)?;
    Ok(Verified::of(&answer.ok_or_else(Problem::missing)?))
}

fn rotate_secret(call: &Call<'_>, given: Rotation) -> Found<Secret> {
    let keep = given.keep.as_deref().unwrap_or(OVERLAP);
    let secret = new_secret(&call.visit(), call.part("name"), keep, &given.why)?;
    let secret = secret.ok_or_else(Problem::missing)?;
    Ok(Secret::of(&secret, call.visitor))
}

fn test_endpoint(call: &Call<'_>, given: Because) -> Found<Tested> {
    let answer = send_test(&call.visit(), call.part("name"), &given.why)?;
    let answer = answer.ok_or_else(Problem::missing)?;
    Ok(Tested::of(&answer, call.visitor))
}

/// The route of an act that sends an endpoint many messages.
fn sending(act: &'static SendingAct) -> Route<Site, Guest> {
    let (id, about) = (format!("{}_endpoint", act.name), (act.path, act.about));
    listed(id, about, move |call, given| send_many(call, act, &given))
}

fn send_many(call: &Call<'_>, act: &'static SendingAct, given: &Recovery) -> Found<Count> {
    let (visit, name) = (&call.visit(), call.part("name"));
    let sending = act.read(&given.since, given.missing);
    let sending = sending.map_err(|wrong| Refusal::Wrong(wrong.into()))?;
    let how = (given.why.as_str(), given.dry_run);
    let sent = send::perform(visit, act, name, sending, how)?;
    let (sent, is_cut) = sent.ok_or_else(Problem::missing)?;
    Ok(Count::of(sent, is_cut, name))
}

fn list_deliveries(call: &Call<'_>) -> Found<Listed<Delivery>> {
    let after: Option<String> = call.cursor()?;
    let name = call.part("name");
    let (_, found, _) =
        endpoints::deliveries(&call.visit(), name, after.as_deref(), call.limit()?, 0)?;
    let next = found.next.map(|place| place.to_string());
    Ok(Listed {
        is_complete: found.is_complete,
        ..Listed::new(&found.rows, Delivery::of, next)
    })
}

fn list_feeds(call: &Call<'_>) -> Found<Listed<Feed>> {
    let after: Option<String> = call.cursor()?;
    let (found, next) = feed::list(&call.visit(), after.as_deref(), call.limit()?)?;
    Ok(Listed::new(&found, Feed::of, next))
}

fn get_feed(call: &Call<'_>) -> Found<Feed> {
    let found = feed::get(&call.visit(), call.part("name"))?;
    Ok(Feed::of(&found))
}

fn make_token(call: &Call<'_>, given: Rotation) -> Found<Token> {
    let keep = given.keep.as_deref().unwrap_or(OVERLAP);
    let made = feed::new_token(&call.visit(), call.part("name"), keep, &given.why)?;
    Ok(made.ok_or_else(Problem::missing)?.into())
}

fn list_messages(call: &Call<'_>) -> Found<Listed<Message>> {
    let filter = program::behind(waiting_of(call)?, call.cursor()?);
    let (found, waits, next) = waiting::search(&call.visit(), &filter, call.limit()?)?;
    Ok(Listed {
        data: records(call.visitor, &found.rows, &waits),
        next,
        is_complete: found.is_complete,
    })
}

fn records<W: ToString>(
    guest: &Guest,
    rows: &[MessageRecord],
    waits: &[Option<W>],
) -> Vec<Message> {
    let view = |(row, waits): (_, &Option<W>)| {
        Message::of(row, waits.as_ref().map(ToString::to_string), guest)
    };
    rows.iter().zip(waits).map(view).collect()
}

fn waiting_of(call: &Call<'_>) -> Found<diesel_outbox::admin::Selection> {
    let filter = waiting::selection(&call.request.query);
    filter.map_err(|wrong| Refusal::Wrong(wrong).into())
}

fn get_message(call: &Call<'_>) -> Found<Known> {
    let guest = call.visitor;
    let found = messages::find(&call.visit(), call.part("key"))?;
    if found.records.rows.is_empty() && found.history.is_empty() {
        return Err(Problem::missing());
    }
    let event = |entry| Event::of(entry, guest);
    Ok(Known {
        rows: records(guest, &found.records.rows, &found.waits),
        history: found.history.iter().map(event).collect(),
        is_complete: found.records.is_complete,
    })
}

fn change_message(
    call: &Call<'_>,
    act: Result<MessageAct, WrongChoice>,
    (destination, message_id): (&str, Option<Uuid>),
    why: &str,
) -> Found<Became> {
    let act = act.map_err(|wrong| Refusal::Wrong(wrong.into()))?;
    let sequence = call.parsed("sequence")?;
    let mut which = MessageRef::from(Sequence(sequence)).at(destination);
    if let Some(id) = message_id {
        which = program::with_id(which, id);
    }
    let answer = messages::change::perform(&call.visit(), act, &which, sequence, why)?;
    let became = act.became(answer);
    match answer {
        Answer::Done => Ok(Became { became }),
        Answer::Unknown | Answer::Ambiguous => Err(Problem::missing()),
        _ => Err(Problem::new(StatusCode::CONFLICT, became)),
    }
}

fn cancel_message(call: &Call<'_>, given: One) -> Found<Became> {
    let which = (given.destination.as_str(), given.message_id);
    change_message(call, Ok(MessageAct::Cancel), which, &given.why)
}

fn reschedule_message(call: &Call<'_>, given: Reschedule) -> Found<Became> {
    let which = (given.destination.as_str(), given.message_id);
    let act = MessageAct::reschedule(given.r#in.as_deref(), None);
    change_message(call, act, which, &given.why)
}

fn settle_message(call: &Call<'_>, given: Settle) -> Found<Became> {
    let which = (given.destination.as_str(), given.message_id);
    let verdict = match given.verdict {
        Outcome::Delivered => "delivered",
        Outcome::Never => "never",
    };
    let why = given.why.trim();
    change_message(call, MessageAct::settle(verdict, why), which, why)
}

fn list_ledger(call: &Call<'_>) -> Found<Listed<Entry>> {
    let selection = call.filter(ledger::NAMES).selection();
    let selection = selection.map_err(Refusal::Wrong)?;
    let selection = program::behind(selection, call.cursor()?);
    let (found, next) = ledger::search(&call.visit(), &selection, call.limit()?)?;
    Ok(Listed {
        is_complete: found.is_complete,
        ..Listed::new(&found.rows, Entry::of, next)
    })
}

fn list_dead(call: &Call<'_>) -> Found<Listed<DeadLetter>> {
    let asked = call.filter(dead::NAMES);
    let (found, next) = dead::search(&call.visit(), asked, call.cursor()?, call.limit()?)?;
    let view = |one: &MessageRecord| DeadLetter::of(one, call.visitor);
    Ok(Listed::new(&found, view, next))
}

fn get_dead(call: &Call<'_>) -> Found<DeadLetter> {
    let letter: LetterId = call.parsed("letter")?;
    let found = dead::letter::find(&call.visit(), (letter.sequence.0, Some(letter)))?;
    let found = found.first().ok_or_else(Problem::missing)?;
    Ok(DeadLetter::of(found, call.visitor))
}

/// The route of an act on many messages.
fn many(act: &'static dyn ManyAct) -> Route<Site, Guest> {
    let words = act.words();
    let list = words.path.split('/').nth(1).unwrap_or_default();
    let (id, about) = (format!("{}_{list}", words.name), (words.path, words.about));
    Route {
        query: Chosen::NAMES,
        ..listed(id, about, move |call, given| act_on_many(call, act, given))
    }
}

fn act_on_many(call: &Call<'_>, act: &'static dyn ManyAct, given: Many) -> Found<ManyDone> {
    // A variable of a script that is empty would choose more.
    let is_empty = |name: &&&str| {
        let mut given = call.request.query.all(name);
        given.any(|value| value.trim().is_empty())
    };
    if let Some(name) = Chosen::NAMES.iter().find(is_empty) {
        return Err(Problem::invalid("is empty").of_field(*name));
    }
    let chosen = Chosen::of(|name| call.request.query.get(name));
    let which = Choice::new(act, given.ids, &chosen, given.all);
    let which = which.map_err(|wrong| Refusal::Wrong(wrong.into()))?;
    let which = match call.since {
        Some(since) => which.counted_at(since),
        None => which,
    };
    let visit = &call.visit();
    let found = acts::preview(visit, act, &which)?;
    let words = act.words();
    let mut answer = ManyDone {
        matched: found.count,
        changed: 0,
        skipped: 0,
        left: 0,
        first: found.first.as_ref().map(|first| first.sequence.0),
        leaves: found.leaves.clone(),
        becomes: words.becomes,
        undo: words.undo,
        messages: Vec::new(),
    };
    if !given.dry_run {
        let which = which.counted_at(found.counted_at);
        let done = acts::perform(visit, act, &which, &found, &given.why)?;
        let bulked = done.performed.bulked;
        (answer.changed, answer.skipped) = (bulked.changed, bulked.skipped);
        answer.left = done.left;
        answer.messages = done.performed.parts.iter().map(NamedMessage::of).collect();
    }
    Ok(answer)
}

fn list_pauses(call: &Call<'_>) -> Found<Listed<Paused>> {
    let glance = call.site.glance_now()?;
    Ok(Listed::new(&glance.pauses, Paused::of, None))
}

fn pause(call: &Call<'_>, given: PauseAsked) -> Found<PauseTold> {
    let which = pauses::Which::named(&given.kind, &given.name).map_err(Problem::invalid)?;
    let time = given.r#for.as_deref();
    let answer = which.pause(&call.visit(), &given.reason, time, given.force)?;
    Ok(PauseTold {
        changed: answer.has_changed,
        unknown: answer.is_unknown,
        pause: Paused::of(&answer.pause),
    })
}

fn resume(call: &Call<'_>, _: Nothing) -> Found<Done> {
    let which = pauses::Which::named(call.part("kind"), call.part("name"));
    let which = which.map_err(|_| Problem::missing())?;
    match which.resume(&call.visit(), call.asked("why").unwrap_or_default())? {
        true => Ok(DONE),
        false => Err(Problem::missing()),
    }
}

fn list_depths(call: &Call<'_>) -> Found<Listed<Lane>> {
    let glance = call.site.glance_now()?;
    Ok(Listed::new(&glance.depths.lanes, Lane::of, None))
}

fn list_dead_depths(call: &Call<'_>) -> Found<Listed<Dead>> {
    let glance = call.site.glance_now()?;
    Ok(Listed::new(&glance.depths.dead, Dead::of, None))
}

fn list_keys(call: &Call<'_>) -> Found<Listed<Blocked>> {
    Ok(Listed::new(
        &keys::blocked(&call.visit())?,
        Blocked::of,
        None,
    ))
}

fn list_topics(call: &Call<'_>) -> Found<Listed<Live>> {
    Ok(Listed::new(&topics::live(&call.visit())?, Live::of, None))
}

fn list_served(call: &Call<'_>) -> Found<Listed<Pattern>> {
    Ok(Listed::new(
        &topics::served(&call.visit())?,
        Pattern::of,
        None,
    ))
}

fn list_relays(call: &Call<'_>) -> Found<Listed<Relay>> {
    let glance = call.site.glance_now()?;
    Ok(Listed::new(&glance.leases, Relay::of, None))
}

fn list_acts(call: &Call<'_>) -> Found<Listed<Acted>> {
    let q = call.asked("q").unwrap_or_default();
    let (acts, next) = audit::search(&call.visit(), q, call.cursor()?, call.limit()?)?;
    Ok(Listed::new(&acts, Acted::of, next))
}
