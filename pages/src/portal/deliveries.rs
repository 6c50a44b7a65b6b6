//! What was sent to an endpoint, and what it answered.

use diesel_outbox::Status;
use diesel_outbox::admin::{Place, WaitReason};
use diesel_outbox::endpoints::{
    Deliveries, Delivery, DeliveryDetails, DeliveryFilter, Endpoint, EndpointFilter, FailedAttempt,
    Hand,
};
use diesel_outbox::program::{self, Act, Cost};
use http::StatusCode;
use maud::{Markup, html};
use uuid::Uuid;

use super::feeds::label;
use super::own::Own;
use super::words::Words;
use super::{Asked, ENDPOINTS, Refusal, endpoint_page, with_time};
use crate::feeds::is_feed;
use crate::pages::content::cut;
use crate::pages::link;
use crate::pages::mask::indented;
use crate::pages::table::{Column, Kind, table, table_or};
use crate::pages::words::{self as shown, in_seconds, shortened};
use crate::response::Response;

/// Deliveries per page.
const PAGE: usize = 50;
/// The states of a filter.
const STATES: [Status; 5] = [
    Status::Pending,
    Status::Sending,
    Status::Retrying,
    Status::Delivered,
    Status::Dead,
];

fn name_of(words: &Words, one: &Endpoint, state: Status) -> &'static str {
    match state {
        Status::Pending => words.pending,
        Status::Sending => words.sending,
        Status::Retrying => words.retrying,
        Status::Delivered => arrived(words, one),
        Status::Dead => words.dead,
        other => other.as_str(),
    }
}

/// What is said of an event that has reached the endpoint. A feed is not called.
pub(super) fn arrived(words: &Words, one: &Endpoint) -> &'static str {
    match is_feed(one) {
        true => words.in_feed,
        false => words.delivered,
    }
}

fn badge(words: &Words, one: &Endpoint, state: Status) -> Markup {
    let kind = match state {
        Status::Delivered => "good",
        Status::Dead => "bad",
        Status::Retrying => "wait",
        _ => "idle",
    };
    html! { span class={ "badge " (kind) } { (name_of(words, one, state)) } }
}

/// The filter that these values of parameters choose. The error names the parameter.
pub(super) fn filter<'a>(
    value: impl Fn(&str) -> Option<&'a str>,
) -> Result<DeliveryFilter, (&'static str, Refusal)> {
    let read = |name| {
        let time = value(name).map(program::parse_time).transpose();
        time.map_err(|_| (name, Refusal::Invalid(|words| words.invalid_time)))
    };
    let topic = value("topic").filter(|topic| !topic.is_empty());
    let state = value("state").map(str::parse).transpose();
    let state = state.map_err(|_| ("state", Refusal::Invalid(|words| words.invalid_value)))?;
    Ok(DeliveryFilter::default()
        .topic(topic.map(str::to_owned))
        .state(state)
        .since(read("since")?)
        .until(read("until")?))
}

/// An endpoint, and a page of its deliveries.
pub(super) fn search(
    own: Own<'_>,
    name: &str,
    filter: &DeliveryFilter,
    limit: usize,
) -> Result<(Endpoint, Deliveries), Refusal> {
    let found = own.read(|conn, own| match own.get(conn, name)? {
        Some(one) => {
            let deliveries = own.deliveries(conn, name, filter, limit)?;
            Ok(Some((one, deliveries)))
        }
        None => Ok(None),
    })?;
    found.ok_or(Refusal::NotFound)
}

pub(super) fn list(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let words = asked.words;
    let (name, topic, state) = (asked.get("name"), asked.get("topic"), asked.get("state"));
    let filter = filter(|name| asked.given(name)).map_err(|(_, refusal)| refusal)?;
    let after = asked.given("after").map(str::parse::<Place>).transpose();
    let filter = filter.after(after.map_err(|_| Refusal::Invalid(|words| words.invalid_value))?);
    let own = asked.own();
    let all = EndpointFilter::default();
    let mut endpoints = own.read(|conn, own| own.list(conn, &all, ENDPOINTS))?;
    let name = match (name, endpoints.first()) {
        ("", Some(first)) => first.name.clone(),
        ("", None) => return Ok(Response::see_other("/")),
        (name, _) => name.to_owned(),
    };
    let (chosen, deliveries) = search(own, &name, &filter, PAGE)?;
    if !endpoints.iter().any(|one| one.name == chosen.name) {
        endpoints.push(chosen.clone());
    }
    let times = ["since", "until"].map(|time| (time, asked.get(time)));
    let pairs = [
        ("name", chosen.name.as_str()),
        ("topic", topic),
        ("state", state),
    ];
    let pairs = [pairs.as_slice(), &times].concat();
    let content = html! {
        h1 { (words.deliveries) }
        form.panel.filter method="get" action="/deliveries" {
            label.field.wide { (words.endpoint)
                select name="name" {
                    @for one in &endpoints {
                        option value=(one.name) selected[one.name == chosen.name] { (shortened(&label(one), 80)) }
                    }
                }
            }
            label.field { (words.topic)
                input name="topic" value=(topic) list="topics";
                datalist id="topics" { @for topic in &asked.portal.topics { option value=(topic.topic) {} } }
            }
            label.field { (words.state)
                select name="state" {
                    option value="" { (words.any) }
                    @for one in STATES {
                        option value=(one.as_str()) selected[one.as_str() == state] { (name_of(words, &chosen, one)) }
                    }
                }
            }
            label.field.wide { (words.since) input type="datetime-local" name="since" value=(asked.get("since")); }
            label.field.wide { (words.until) input type="datetime-local" name="until" value=(asked.get("until")); }
            div.do { button { (words.search) } }
        }
        section.panel {
            @if asked.given("after").is_some() {
                div.head { a href=(link("/deliveries", &pairs)) { (words.first_page) } }
            }
            (rows(asked, &chosen, &deliveries))
            @if let Some(next) = deliveries.next {
                div.actions {
                    a.button.second href=(link("/deliveries", &[pairs.as_slice(), &[("after", &next.to_string())]].concat())) { (words.older) }
                }
            }
        }
    };
    Ok(asked.page(StatusCode::OK, words.deliveries, &content))
}

/// The rows of a list.
pub(super) fn rows(asked: &Asked<'_>, one: &Endpoint, found: &Deliveries) -> Markup {
    let words = asked.words;
    let columns = [
        Column(words.topic, Kind::Text),
        Column(words.state, Kind::Plain),
        Column(words.attempts, Kind::Number),
        Column(words.when, Kind::When),
        Column(words.details, Kind::Control),
    ];
    let row = |row: &Delivery| {
        let id = row.message_id.to_string();
        vec![
            html! { (shortened(&row.topic, 80)) div.quiet.key { (id) } },
            outcome(words, one, row),
            html! { (row.attempts) },
            html! {
                @if let Some(time) = &row.settled_at { (shown::time(time)) }
                @else if let Some(reason) = &row.waits { span.quiet { (waiting(words, reason)) } }
            },
            html! { a href=(page_of(&one.name, &id)) aria-label={ (words.details) ": " (id) } { (words.details) } },
        ]
    };
    html! {
        @if !found.is_complete { p.none role="status" { (words.incomplete) } }
        (table_or(words.no_deliveries, words.deliveries, &columns, found.rows.iter().map(row)))
    }
}

fn outcome(words: &Words, one: &Endpoint, row: &Delivery) -> Markup {
    html! {
        (badge(words, one, row.state))
        @if let Some(status) = row.http_status { " HTTP " (status) }
        @if let Some(error) = row.public_error() { span.error { (words.failure(&error)) } }
    }
}

/// Why an event is not sent yet, in words for customers.
pub(super) fn waits(words: &Words, reason: &WaitReason) -> String {
    let (text, until) = why(words, reason);
    let until = until.map_or_else(String::new, in_seconds);
    text.replace("{}", &until)
}

/// The same on a page.
fn waiting(words: &Words, reason: &WaitReason) -> Markup {
    match why(words, reason) {
        (text, Some(until)) => with_time(&text, until),
        (text, None) => html! { (text) },
    }
}

/// Why an event is not sent yet, and until when: the time is the `{}` of the text.
fn why<'a>(words: &Words, reason: &'a WaitReason) -> (String, Option<&'a str>) {
    let until = |text: &str, until: &'a Option<String>| match until.as_deref() {
        Some(time) => (format!("{text} {}", words.until_time), Some(time)),
        None => (text.to_owned(), None),
    };
    let text = match reason {
        WaitReason::NotDue { until: Some(time) } => {
            return (words.due_at.to_owned(), Some(time));
        }
        WaitReason::TopicPaused { until: end, .. } => return until(words.waits_by_us, end),
        WaitReason::DestinationPaused { by, until: end, .. } => {
            let text = match by {
                Hand::Owner => words.waits_paused,
                Hand::Receiver => words.waits_receiver,
                _ => words.waits_by_us,
            };
            return until(text, end);
        }
        WaitReason::BreakerOpen { until: end, .. } => return until(words.waits_breaker, end),
        WaitReason::BehindKey { .. } => words.waits_key,
        WaitReason::DestinationDisabled { .. } => words.waits_disabled,
        WaitReason::NotVerified { .. } => words.waits_not_verified,
        WaitReason::NoRoom { .. } => words.waits_room,
        WaitReason::Expired { .. } => words.waits_expired,
        WaitReason::Sending { .. } => words.sending,
        _ => words.waits_for_us,
    };
    (text.to_owned(), None)
}

fn page_of(name: &str, id: &str) -> String {
    link("/delivery", &[("name", name), ("id", id)])
}

/// A delivery, and the endpoint that got it.
pub(super) fn find(
    own: Own<'_>,
    name: &str,
    id: Uuid,
) -> Result<(Endpoint, DeliveryDetails), Refusal> {
    let found = own.read(|conn, own| {
        let one = own.get(conn, name)?;
        Ok(one.zip(own.delivery(conn, name, id)?))
    })?;
    found.ok_or(Refusal::NotFound)
}

pub(super) fn show(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let (name, id) = (asked.get("name"), asked.id()?);
    let (one, details) = find(asked.own(), name, id)?;
    let DeliveryDetails { delivery, .. } = &details;
    let words = asked.words;
    let content = html! {
        div.title {
            h1 { (delivery.topic) }
            p { a href=(endpoint_page(name)) { (words.back) } }
        }
        section.panel aria-labelledby="delivery" {
            div.head { h2 id="delivery" { (words.topic) } }
            div.body {
                dl.facts {
                    dt { (words.message) } dd.key { (delivery.message_id) }
                    dt { (words.endpoint) } dd.key { (label(&one)) }
                    dt { (words.state) } dd { (outcome(words, &one, delivery)) }
                    dt { (words.attempts) } dd { (delivery.attempts) }
                    dt { (words.enqueued) } dd { (shown::time(&delivery.created_at)) }
                    @if let Some(time) = &delivery.settled_at { dt { (words.when) } dd { (shown::time(time)) } }
                    @if let Some(reason) = &delivery.waits { dt { (words.when) } dd { (waiting(words, reason)) } }
                }
                @if delivery.can_be_sent_again && asked.may().act {
                    form.do method="post" action="/delivery/again" {
                        (asked.token())
                        input type="hidden" name="name" value=(name);
                        input type="hidden" name="id" value=(id);
                        button { (words.send_again) }
                    }
                }
            }
        }
        section.panel aria-labelledby="request" {
            div.head { h2 id="request" { (words.request) } }
            div.body { (request(asked, &details)) }
        }
        @if let Some(response) = details.response.as_ref().filter(|_| asked.shows_responses()) {
            section.panel {
                div.head { h2 { (words.response) } }
                div.body { pre tabindex="0" role="region" aria-label=(words.response) { (cut(response)) } }
            }
        }
        @if !details.failed.is_empty() { (failed(asked, &details.failed)) }
    };
    Ok(asked.page(StatusCode::OK, &delivery.topic, &content))
}

fn request(asked: &Asked<'_>, details: &DeliveryDetails) -> Markup {
    let words = asked.words;
    let json = |name: &str, text: &str| {
        html! {
            h3 { (name) }
            pre tabindex="0" role="region" aria-label=(name) { (indented(cut(text))) }
        }
    };
    html! {
        @if !asked.may().payloads { p.quiet { (words.payload_hidden) } }
        @else {
            @if let Some(headers) = &details.headers { (json(words.headers, headers)) }
            @match &details.payload {
                Some(payload) => (json(words.payload, payload)),
                None => p.quiet { (words.not_kept) }
            }
        }
    }
}

fn failed(asked: &Asked<'_>, all: &[FailedAttempt]) -> Markup {
    let words = asked.words;
    let columns = [
        Column(words.when, Kind::Short),
        Column(words.attempt, Kind::Number),
        Column(words.took, Kind::Number),
        Column(words.error, Kind::Plain),
    ];
    let row = |one: &FailedAttempt| {
        let response = one.response.as_ref().filter(|_| asked.shows_responses());
        vec![
            shown::time(&one.happened_at),
            html! { @if let Some(number) = one.attempt { (number) } },
            html! { @if let Some(took) = one.took { (words.duration(took)) } },
            html! {
                @if let Some(status) = one.http_status { "HTTP " (status) ": " }
                @if let Some(error) = one.public_error() { (words.failure(&error)) }
                @if let Some(text) = response { span.error { (shortened(text, 400)) } }
            },
        ]
    };
    html! {
        section.panel aria-labelledby="failed" {
            div.head { h2 id="failed" { (words.failed_attempts) } }
            (table(words.failed_attempts, &columns, all.iter().map(row)))
        }
    }
}

pub(super) fn send_again(own: Own<'_>, name: &str, id: Uuid) -> Result<(), Refusal> {
    own.perform(Act::SendAgain, name, Cost::Request, |conn, own, note| {
        program::send_again(conn, own, name, id, note)
    })
}

pub(super) fn again(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let (name, id) = (asked.get("name"), asked.id()?);
    send_again(asked.own(), name, id)?;
    let back = [("name", name), ("done", "again")];
    Ok(Response::see_other(&link("/endpoint", &back)))
}
