//! The endpoints of a tenant: endpoints, and what their owner may do with them.

use std::time::{Duration, SystemTime};

use diesel_outbox::admin::Bulked;
use diesel_outbox::config::{SigningSecret, Verification};
use diesel_outbox::endpoints::{
    DeliveryCount, DeliveryFilter, Endpoint, EndpointAnswer, EndpointError, EndpointFilter,
    EndpointKind, EndpointState, Hand, TestAnswer,
};
use diesel_outbox::program::{
    Act, Cost, DISABLE, ENABLE, Feeds, RECOVER, REMOVE, WhichFeeds, check_pause_reason, kept_for,
};
use http::StatusCode;
use maud::{Markup, html};
use schemars::JsonSchema;
use secrecy::ExposeSecret;
use serde::Deserialize;
use serde_json::{Map, Value};
use uuid::Uuid;

use super::conditions::{self, Condition, OPERATORS, Word};
use super::deliveries;
use super::feeds::{self, label};
use super::own::{Many, Own, PORTAL};
use super::words::Words;
use super::{Asked, ENDPOINTS, Refusal, endpoint_page, with_time};
use crate::api::given;
use crate::feeds::is_feed;
use crate::pages::sparkline::curve;
use crate::pages::table::{Column, Kind, table, table_or};
use crate::pages::words::shortened;
use crate::pages::{link, next_page};
use crate::response::Response;
use crate::text::{with_user_of, without_user};

/// Deliveries on the page of an endpoint.
const LATEST: usize = 10;
const LONGEST_DESCRIPTION: usize = 200;
/// Empty rows below the conditions of a filter.
const EMPTY_CONDITIONS: usize = 3;
/// The most characters of a URL in the title of a page.
const LONGEST_TITLE: usize = 60;
/// How long the old secret signs beside a new one.
const OVERLAP: Duration = Duration::from_secs(24 * 3600);
/// Deliveries of the last day are counted in steps of this length.
const WINDOW: Duration = Duration::from_secs(1800);
const WINDOWS: usize = 48;
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(366 * 24 * 3600);
/// The topic of a test without an example.
const TEST: &str = "outbox.test";

fn done(name: &str, done: &str) -> Result<Response, Refusal> {
    let place = link("/endpoint", &[("name", name), ("done", done)]);
    Ok(Response::see_other(&place))
}

/// A page of endpoints, and the name after which the next one begins.
pub(super) fn page(
    own: Own<'_>,
    after: Option<String>,
    limit: usize,
) -> Result<(Vec<Endpoint>, Option<String>), Refusal> {
    let filter = EndpointFilter::default().after(after);
    let mut found = own.read(|conn, own| own.list(conn, &filter, limit + 1))?;
    let next = next_page(&mut found, limit, |last| last.name.clone());
    Ok((found, next))
}

pub(super) fn get(own: Own<'_>, name: &str) -> Result<Endpoint, Refusal> {
    let found = own.read(|conn, own| own.get(conn, name))?;
    found.ok_or(Refusal::NotFound)
}

/// Deliveries of the last day, in steps.
pub(super) fn counts(own: Own<'_>, name: &str) -> Result<Vec<Option<DeliveryCount>>, Refusal> {
    let found = own.read(|conn, own| match own.get(conn, name)? {
        Some(_) => own.delivery_counts(conn, name, WINDOW, WINDOWS).map(Some),
        None => Ok(None),
    })?;
    found.ok_or(Refusal::NotFound)
}

pub(super) fn list(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let words = asked.words;
    let after = asked.given("after").map(str::to_owned);
    let (shown, next) = page(asked.own(), after, ENDPOINTS)?;
    let columns = [
        Column(words.url, Kind::Text),
        Column(words.topics, Kind::Plain),
        Column(words.state, Kind::Plain),
    ];
    let rows = shown.iter().map(|one| {
        vec![
            html! {
                a.key href=(endpoint_page(&one.name)) { (shortened(&label(one), 100)) }
                @if is_feed(one) { div.quiet { (words.you_fetch) } }
                @if let Some(text) = &one.description { div.quiet { (shortened(text, 100)) } }
            },
            html! { (shortened(&topics(asked, one), 80)) },
            state(asked, one),
        ]
    });
    let content = html! {
        div.title {
            h1 { (words.endpoints) }
            @if asked.may().act { a.button href="/endpoints/new" { (words.add_endpoint) } }
        }
        section.panel {
            (table_or(words.no_endpoints, words.endpoints, &columns, rows))
            @if let Some(last) = next {
                div.actions { a.button.second href=(link("/", &[("after", &last)])) { (words.more) } }
            }
        }
    };
    Ok(asked.page(StatusCode::OK, words.endpoints, &content))
}

fn topics(asked: &Asked<'_>, one: &Endpoint) -> String {
    match one.topics.iter().any(|topic| topic == "*") {
        true => asked.words.all_topics.to_owned(),
        false => one.topics.join(", "),
    }
}

/// What the owner of an endpoint can do about its state. Empty: nothing.
pub(super) fn hint(one: &Endpoint, words: &Words) -> &'static str {
    match (one.state, one.state_by) {
        (EndpointState::Disabled, _) => why_disabled(one, words),
        _ if one.problem.is_some() => words.why_unusable,
        (EndpointState::Unverified, _) => words.why_not_verified,
        (EndpointState::Paused, Some(Hand::Owner)) => words.why_paused_here,
        (EndpointState::Paused, Some(Hand::Relay)) => words.why_paused_breaker,
        (EndpointState::Paused, Some(Hand::Receiver)) => words.why_paused_receiver,
        (EndpointState::Paused, _) => words.why_paused_by_us,
        (EndpointState::Failing, _) => words.why_failing,
        (EndpointState::Unread, _) => words.why_unread,
        _ => "",
    }
}

fn why_disabled(one: &Endpoint, words: &Words) -> &'static str {
    match (
        one.state_by,
        one.state_reason.as_deref().unwrap_or_default(),
    ) {
        (Some(Hand::Owner), _) => words.why_disabled_here,
        (Some(Hand::Receiver), _) => words.why_disabled_gone,
        (Some(Hand::Relay), reason) if reason.starts_with("has failed for ") => {
            words.why_disabled_failing
        }
        (Some(Hand::Relay), reason) if reason.starts_with("NOT_VERIFIED") => {
            words.why_disabled_not_verified
        }
        (Some(Hand::Relay), _) => words.why_unusable,
        _ => words.why_disabled_other,
    }
}

/// Why the endpoint is in its state, for its owner: what the owner has written.
pub(super) fn reason(one: &Endpoint) -> Option<String> {
    let is_own = one.state_by == Some(Hand::Owner);
    one.state_reason.clone().filter(|_| is_own)
}

/// Whether an operator has disabled or paused the endpoint.
fn is_of_operator(one: &Endpoint) -> bool {
    one.state_by == Some(Hand::Operator)
}

fn state(asked: &Asked<'_>, one: &Endpoint) -> Markup {
    let words = asked.words;
    let (class, name) = match one.state {
        EndpointState::Disabled => ("badge bad", words.disabled),
        _ if one.problem.is_some() => ("badge bad", words.unusable),
        EndpointState::Unverified => ("badge wait", words.not_verified),
        EndpointState::Paused => ("badge wait", words.paused),
        EndpointState::Failing => ("badge bad", words.failing),
        EndpointState::Unread => ("badge bad", words.unread),
        _ => ("badge good", words.active),
    };
    let why = hint(one, words);
    let error = one.public_verification_error();
    let moment = |sentence, time| with_time(sentence, &rfc3339(time));
    let since = one.failing_since.filter(|_| one.enabled);
    html! {
        span class=(class) { (name) }
        @if let Some(until) = one.state_until { " " (moment(words.until_time, until)) }
        @if let Some(reason) = reason(one).filter(|reason| reason != PORTAL) { ": " (shortened(&reason, 200)) }
        @if !why.is_empty() { span.why { (why) } }
        @if let Some(error) = error.filter(|_| !one.is_verified()) { span.error { (words.failure(&error)) } }
        @if let Some(since) = since { span.why.quiet { (moment(if is_feed(one) { words.not_fetched_since } else { words.no_success_since }, since)) } }
    }
}

fn rfc3339(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

pub(super) fn show(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let (name, table) = (asked.get("name"), &asked.portal.config.table);
    let found = asked.own().read(|conn, own| {
        let Some(found) = own.get(conn, name)? else {
            return Ok(None);
        };
        let feed = match is_feed(&found) {
            true => Feeds::of(table)
                .states(conn, WhichFeeds::named(&[name]))?
                .pop(),
            false => None,
        };
        let counts = own.delivery_counts(conn, name, WINDOW, WINDOWS)?;
        let latest = own.deliveries(conn, name, &DeliveryFilter::default(), LATEST)?;
        Ok(Some((found, feed, counts, latest)))
    })?;
    let (one, feed, counts, latest) = found.ok_or(Refusal::NotFound)?;
    let label = label(&one);
    let words = asked.words;
    let content = html! {
        div.title {
            h1 { (shortened(&label, LONGEST_TITLE)) }
            @if asked.may().act { a.button.second href=(link("/endpoint/edit", &[("name", name)])) { (words.change) } }
        }
        section.panel aria-labelledby="endpoint" {
            div.head { h2 id="endpoint" { (words.endpoint) } }
            div.body {
                dl.facts {
                    dt { (words.state) } dd { (state(asked, &one)) }
                    @if is_feed(&one) { dt { (words.you_fetch) } dd { (words.you_fetch_hint) } }
                    @else { dt { (words.url) } dd.key { (label) } }
                    @if let Some(feed) = &feed { (feeds::facts(asked, feed)) }
                    @if let Some(text) = &one.description { dt { (words.description) } dd { (text) } }
                    dt { (words.topics) } dd { (topics(asked, &one)) }
                    @if let Some(filter) = &one.filter { dt { (words.filter) } dd { (shown_filter(words, filter)) } }
                    @if let Some(until) = one.old_secrets_until.filter(|until| *until > SystemTime::now()) {
                        dt { (words.secret) }
                        dd { (with_time(words.old_secrets_until, &rfc3339(until))) }
                    }
                }
                @if asked.may().act { (first_aid(asked, &one)) }
            }
        }
        (curves(asked, &one, &counts))
        section.panel aria-labelledby="deliveries" {
            div.head {
                h2 id="deliveries" { (words.deliveries) }
                a href=(link("/deliveries", &[("name", name)])) { (words.filter) }
            }
            (deliveries::rows(asked, &one, &latest))
        }
        @if asked.may().act { (actions(asked, &one)) }
    };
    Ok(asked.page(StatusCode::OK, &label, &content))
}

fn shown_filter(words: &Words, filter: &Value) -> Markup {
    let Some(conditions) = conditions::conditions(filter) else {
        return html! { pre tabindex="0" { (format!("{filter:#}")) } };
    };
    html! {
        @for one in conditions {
            div {
                code { (one.field) }
                @if let Some(operator) = one.operator() { " " (operator(words)) }
                " " (one.values().collect::<Vec<_>>().join(", "))
            }
        }
    }
}

fn curves(asked: &Asked<'_>, one: &Endpoint, counts: &[Option<DeliveryCount>]) -> Markup {
    let words = asked.words;
    let figure = |name: &str, label: &str, of: fn(&DeliveryCount) -> u64| {
        #[allow(clippy::cast_precision_loss, reason = "only drawn")]
        let value = |count: &Option<DeliveryCount>| count.as_ref().map(|count| of(count) as f64);
        let values: Vec<Option<f64>> = counts.iter().map(value).collect();
        let known = || counts.iter().flatten().map(of);
        let range = match known().max() {
            Some(0) => words.last_day.to_owned(),
            Some(highest) => {
                let highest = words.highest.replace("{}", &words.number(highest));
                format!("{}, {highest}", words.last_day)
            }
            None => format!("{}, {}", words.last_day, words.no_data),
        };
        html! {
            li.panel.figure {
                span.label { (label) }
                span.value { (words.number(known().sum())) }
                (curve(name, &format!("{label}, {}", words.last_day), &range, &values))
                p.range { (range) }
            }
        }
    };
    html! {
        ul.figures aria-label=(words.last_day) {
            (figure("delivered", deliveries::arrived(words, one), |count| count.delivered))
            (figure("dead", words.dead_lettered, |count| count.dead))
        }
    }
}

/// A form with one act of the endpoint.
fn act(asked: &Asked<'_>, name: &str, path: &str, content: &Markup) -> Markup {
    html! {
        form.do method="post" action=(path) {
            (asked.token())
            input type="hidden" name="name" value=(name);
            (content)
        }
    }
}

/// What brings the endpoint back into work.
fn first_aid(asked: &Asked<'_>, one: &Endpoint) -> Markup {
    let words = asked.words;
    let button = |path, label: &str| act(asked, &one.name, path, &html! { button { (label) } });
    html! {
        @if !one.is_verified() { (button("/endpoint/verify", words.verify)) }
        @if one.state == EndpointState::Paused && !is_of_operator(one) { (button("/endpoint/resume", words.resume)) }
        @if !one.enabled && !is_of_operator(one) { (button("/endpoint/enable", words.enable)) }
    }
}

/// All other acts, each kind in a panel of its own.
fn actions(asked: &Asked<'_>, one: &Endpoint) -> Markup {
    let words = asked.words;
    let form = |path, content: &Markup| act(asked, &one.name, path, content);
    let panel = |heading: &str, content: &Markup| {
        html! { section.panel { div.head { h2 { (heading) } } div.body { (content) } } }
    };
    let is_paused = one.state == EndpointState::Paused;
    // Every other pause would hold the events.
    let is_held = is_paused && one.state_by != Some(Hand::Relay);
    html! {
        div.acts {
            @if asked.may().secrets && is_feed(one) {
                (panel(words.token, &form("/feed/token", &html! {
                    button.second { (words.make_token) }
                    span.quiet { (words.token_hint) }
                })))
            }
            @if !is_feed(one) { (panel(words.example_event, &form("/endpoint/test", &html! {
                label.field { (words.topic)
                    select name="topic" {
                        @for topic in &asked.portal.topics { option value=(topic.topic) { (topic.topic) } }
                        option value=(TEST) { (TEST) }
                    }
                }
                button.second { (words.send_example) }
                span.quiet { (words.send_example_hint) }
            }))) }
            (panel(words.again, &html! {
                (form("/endpoint/recover", &html! {
                    label.field { (words.since) input type="datetime-local" name="since" required; }
                    @if kept_for(&asked.portal.config).is_some() {
                        label { input type="checkbox" name="missing" value="yes"; " " (words.missing_too) }
                    }
                    button.second { (words.recover) }
                    span.quiet { (words.recover_hint) }
                }))
                @if one.enabled && !is_held { (form("/endpoint/retry", &html! { button.second { (words.send_waiting) } })) }
            }))
            @if one.enabled {
                (panel(words.pause_or_disable, &html! {
                    @if !is_paused {
                        (form("/endpoint/pause", &html! {
                            label.field { (words.pause_for) input name="for" placeholder="2h"; }
                            label.field { (words.reason) input name="reason" maxlength="200"; }
                            button.second { (words.pause) }
                            span.quiet { (words.while_paused) }
                        }))
                    }
                    (form("/endpoint/disable", &html! {
                        button.second { (words.disable) }
                        span.quiet { (asked.own().while_disabled(words)) }
                    }))
                }))
            }
            @if asked.may().secrets && !is_feed(one) {
                (panel(words.secret, &form("/endpoint/rotate", &html! {
                    button.second { (words.rotate) }
                    span.quiet { (words.rotate_hint) }
                })))
            }
            (panel(words.remove, &form("/endpoint/remove", &html! { button.danger { (words.remove) "…" } })))
        }
    }
}

pub(super) fn new(asked: &Asked<'_>) -> Result<Response, Refusal> {
    form(asked, None, &Written::default(), None)
}

pub(super) fn edit(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let one = get(asked.own(), asked.get("name"))?;
    let written = Written {
        url: Some(without_user(&one.url)),
        description: one.description.clone(),
        topics: Some(one.topics.clone()),
        ..Written::default()
    };
    let written = written.with_filter_of(Some(&one));
    form(asked, Some(&one), &written, None)
}

/// The form once more, with what was written and why it was refused, if the visitor can mend it.
fn again(asked: &Asked<'_>, one: Option<&Endpoint>, refusal: Refusal) -> Result<Response, Refusal> {
    let written = Written::of(asked);
    let written = match refusal {
        Refusal::FilterChanged | Refusal::Error(EndpointError::SetByOperator(_)) => {
            written.with_filter_of(one)
        }
        Refusal::Invalid(_) | Refusal::Wrong(..) | Refusal::Condition(..) | Refusal::Error(_) => {
            written
        }
        _ => return Err(refusal),
    };
    form(asked, one, &written, Some(&refusal))
}

/// The form with the same values, and room for more conditions.
fn more(asked: &Asked<'_>, one: Option<&Endpoint>) -> Result<Response, Refusal> {
    form(asked, one, &Written::of(asked), None)
}

/// The form for a new endpoint, or for a change of one, with these values. `refusal`: why they were not saved.
fn form(
    asked: &Asked<'_>,
    one: Option<&Endpoint>,
    written: &Written,
    refusal: Option<&Refusal>,
) -> Result<Response, Refusal> {
    let words = asked.words;
    let refused = refusal.map(|refusal| refusal.words(words, &asked.request.path));
    let status = refused
        .as_ref()
        .map_or(StatusCode::OK, |(status, _)| *status);
    let (title, action, back) = match one {
        None => (words.add_endpoint, "/endpoints/add", "/".to_owned()),
        Some(one) => (words.change, "/endpoint/change", endpoint_page(&one.name)),
    };
    let catalogue = &asked.portal.topics;
    // Patterns that the application has given the endpoint.
    let is_listed = |pattern: &String| catalogue.iter().any(|topic| topic.topic == *pattern);
    let others = one
        .iter()
        .flat_map(|one| &one.topics)
        .filter(|topic| !is_listed(topic));
    let has = |topic: &str| {
        let written = written.topics.as_ref();
        written.is_none_or(|all| all.iter().any(|own| own == topic || own == "*"))
    };
    let may_be_feed = one.is_none() && feeds::are_offered(asked.own())?;
    let is_new_feed = written.kind.as_deref() == Some(EndpointKind::Feed.as_str());
    let content = html! {
        @if let Some((_, why)) = refused { p.refused role="alert" { (why) } }
        form.stack method="post" action=(action) {
            (asked.token())
            @if let Some(one) = one { input type="hidden" name="name" value=(one.name); }
            @if may_be_feed {
                fieldset {
                    legend { (words.way) }
                    @for (kind, name, hint) in [(EndpointKind::Webhook, words.we_call_you, words.we_call_you_hint), (EndpointKind::Feed, words.you_fetch, words.you_fetch_hint)] {
                        label {
                            input type="radio" name="kind" value=(kind) checked[(kind == EndpointKind::Feed) == is_new_feed];
                            " " strong { (name) } " " span.quiet { (hint) }
                        }
                    }
                }
            }
            @if !one.is_some_and(is_feed) { label.field.of-webhook { (words.url)
                input type="url" name="url" maxlength="2048" required[one.is_some()] value=(written.url.as_deref().unwrap_or_default()) placeholder="https://";
            } }
            label.field { (words.description)
                input name="description" maxlength=(LONGEST_DESCRIPTION) value=(written.description.as_deref().unwrap_or_default());
            }
            @if !catalogue.is_empty() {
                fieldset {
                    legend { (words.topics) }
                    @for topic in catalogue {
                        div {
                            label {
                                input type="checkbox" name="topic" value=(topic.topic) checked[has(&topic.topic)];
                                " " strong { (topic.topic) } " " span.quiet { (topic.description) }
                            }
                            @if !topic.example.is_null() {
                                details { summary { (words.example) } pre tabindex="0" { (format!("{:#}", topic.example)) } }
                            }
                        }
                    }
                    @for pattern in others {
                        div { label { input type="checkbox" name="topic" value=(pattern) checked[has(pattern)]; " " strong { (pattern) } } }
                    }
                }
            }
            fieldset {
                legend { (words.filter) }
                (filter(words, one, written, refusal))
            }
            // Enter presses the first button.
            div.do {
                button { (words.save) }
                button.second name="more" value="yes" formnovalidate { (words.more_conditions) }
                a.button.second href=(back) { (words.cancel) }
            }
        }
    };
    Ok(asked.dialog(status, title, &content))
}

/// The conditions of an endpoint, and some empty ones; or its filter as JSON.
fn filter(
    words: &Words,
    one: Option<&Endpoint>,
    written: &Written,
    refusal: Option<&Refusal>,
) -> Markup {
    let is_ours = one.is_some_and(|one| one.set_by.get("filter") == Some(&Hand::Operator));
    let present = one.and_then(|one| one.filter.as_ref());
    let json = |filter: &Value| html! { pre tabindex="0" { (format!("{filter:#}")) } };
    let shown = html! { input type="hidden" name="shown" value=(written.shown.as_deref().unwrap_or_default()); };
    let known = match (present, &written.conditions) {
        (Some(present), _) if is_ours => {
            return html! { p.quiet { (words.set_by_us) } (json(present)) };
        }
        (Some(present), None) => {
            return html! {
                p.quiet { (words.filter_as_json) }
                (json(present))
                (shown)
                label { input type="checkbox" name="filter" value="none" checked[written.filter.is_some()]; " " (words.remove_filter) }
            };
        }
        (_, known) => known.as_deref().unwrap_or_default(),
    };
    let empty = std::iter::repeat_n(Condition::default(), EMPTY_CONDITIONS);
    let help = |of: &[Word], meaning: &str| {
        let of: Vec<&str> = of.iter().map(|word| word(words)).collect();
        vec![html! { (of.join(", ")) }, html! { (meaning) }]
    };
    let operators = OPERATORS.map(|(_, word)| word);
    let columns = [
        Column(words.condition, Kind::Plain),
        Column(words.details, Kind::Plain),
    ];
    let why_wrong = |row: usize| match refusal {
        Some(Refusal::Condition(number, why)) if *number == row => Some(why(words)),
        _ => None,
    };
    html! {
        p.quiet { (words.filter_hint) }
        (shown)
        @for (number, condition) in known.iter().cloned().chain(empty).enumerate() {
            (row(words, &condition, why_wrong(number)))
        }
        details {
            summary { (words.filter_help) }
            (table(words.filter_help, &columns, [
                help(&operators[..2], words.help_is),
                help(&operators[2..5], words.help_text),
                help(&operators[5..9], words.help_number),
                help(&operators[9..], words.help_exists),
            ]))
            p.quiet { (words.help_lists) " " (words.filter_limits) }
        }
    }
}

fn row(words: &Words, condition: &Condition, why: Option<&str>) -> Markup {
    let lines = condition.values.lines().count().clamp(1, 8);
    html! {
        div.filter.condition {
            label.field { (words.condition_field)
                input name="field" value=(condition.field) placeholder="customer.tier" aria-invalid=[why.map(|_| "true")] aria-describedby=[why.map(|_| "wrong")];
            }
            label.field { (words.condition)
                select name="operator" {
                    @for (name, word) in OPERATORS { option value=(name) selected[name == condition.operator] { (word(words)) } }
                }
            }
            label.field.wide { (words.condition_values) textarea name="value" rows=(lines) { (condition.values) } }
            @if let Some(why) = why { p.refused id="wrong" { (why) } }
        }
    }
}

/// What a customer writes of an endpoint. Absent: as it is.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Written {
    /// Of a new endpoint: `webhook` (events are sent to `url`) or `feed` (they are fetched). Absent or empty: `webhook`.
    kind: Option<String>,
    pub(super) url: Option<String>,
    /// Empty: none.
    pub(super) description: Option<String>,
    /// Some of `GET /topics`.
    pub(super) topics: Option<Vec<String>>,
    /// A filter that events match; null: all events.
    #[serde(default, deserialize_with = "given")]
    #[schemars(with = "Option<Map<String, Value>>")]
    filter: Option<Value>,
    /// The filter, as the form has it.
    #[serde(skip)]
    conditions: Option<Vec<Condition>>,
    /// The filter that the form has shown, as [`text`]; `None`: this is no form.
    #[serde(skip)]
    shown: Option<String>,
}

/// A filter as a form sends it back; empty: none.
fn text(filter: Option<&Value>) -> String {
    filter.map(Value::to_string).unwrap_or_default()
}

impl Written {
    fn of(asked: &Asked<'_>) -> Self {
        let kind = asked.given("kind").map(str::to_owned);
        let is_feed = kind.as_deref() == Some(EndpointKind::Feed.as_str());
        Self {
            // The form of a new endpoint has a field for the URL, also if this is a feed.
            url: Some(asked.get("url").to_owned()).filter(|_| !is_feed),
            kind,
            description: Some(asked.get("description").to_owned()),
            topics: Some(asked.all("topic").map(str::to_owned).collect()),
            // Only the form of a filter that conditions cannot show has this box.
            filter: asked.given("filter").map(|_| Value::Null),
            conditions: asked.all("field").next().map(|_| typed(asked)),
            shown: Some(asked.get("shown").to_owned()),
        }
    }

    /// The same with the filter that the endpoint has now.
    fn with_filter_of(self, one: Option<&Endpoint>) -> Self {
        let present = one.and_then(|one| one.filter.as_ref());
        Self {
            filter: None,
            conditions: present.and_then(conditions::conditions),
            shown: Some(text(present)),
            ..self
        }
    }

    fn kind(&self) -> Result<Option<EndpointKind>, Refusal> {
        let kind = self.kind.as_deref().filter(|kind| !kind.is_empty());
        let kind = kind.map(str::parse).transpose();
        kind.map_err(|_| Refusal::Wrong("kind", |words| words.invalid_value))
    }

    fn write(self, own: Own<'_>, one: &mut Endpoint) -> Result<(), Refusal> {
        if self.kind()?.is_some_and(|kind| kind != one.kind) {
            return Err(Refusal::Wrong("kind", |words| words.invalid_value));
        }
        if let Some(text) = self.description {
            if text.chars().count() > LONGEST_DESCRIPTION {
                return Err(Refusal::Wrong("description", |words| {
                    words.description_too_long
                }));
            }
            one.description = Some(text).filter(|text| !text.is_empty());
        }
        let catalogue = &own.portal.topics;
        if !catalogue.is_empty() {
            let is_offered = |topic: &String| {
                let mut listed = catalogue.iter();
                listed.any(|one| one.topic == *topic) || one.topics.contains(topic)
            };
            if let Some(mut topics) = self.topics {
                topics.retain(|topic| !topic.is_empty());
                if !topics.iter().all(is_offered) {
                    return Err(Refusal::Wrong("topics", |words| words.unknown_topic));
                }
                one.topics = topics;
            }
            if one.topics.is_empty() {
                return Err(Refusal::Wrong("topics", |words| words.choose_topic));
            }
        }
        let changes_filter = self.conditions.is_some() || self.filter.is_some();
        if let Some(shown) = self.shown.filter(|_| changes_filter) {
            // The customer has not seen the present filter.
            if shown != text(one.filter.as_ref()) {
                return Err(Refusal::FilterChanged);
            }
        }
        if let Some(conditions) = self.conditions {
            let filter = conditions::pattern(&conditions, one.filter.as_ref());
            one.filter = filter.map_err(|(number, why)| Refusal::Condition(number, why))?;
        }
        if let Some(filter) = self.filter {
            one.filter = Some(filter).filter(|filter| !filter.is_null());
        }
        if let Some(url) = self.url {
            one.url = with_user_of(url, &one.url);
        }
        Ok(())
    }
}

/// The conditions of the form that are filled in.
fn typed(asked: &Asked<'_>) -> Vec<Condition> {
    let (fields, operators) = (asked.all("field"), asked.all("operator"));
    let rows = fields.zip(operators).zip(asked.all("value"));
    let rows = rows.map(|((field, operator), values)| Condition {
        field: field.to_owned(),
        operator: operator.to_owned(),
        values: values.to_owned(),
    });
    rows.filter(|row| !row.is_empty()).collect()
}

/// A relay asks an endpoint that must be verified once its URL has changed.
fn cost_of(one: &Endpoint) -> Cost {
    match one.verification {
        Verification::None => Cost::Change,
        _ => Cost::Request,
    }
}

/// A new endpoint: its name and its secret.
pub(super) fn register(
    own: Own<'_>,
    written: Written,
) -> Result<(String, Option<SigningSecret>), Refusal> {
    // The endpoints of all tenants share one table, so no owner chooses names.
    let name = Uuid::now_v7().to_string();
    let mut one = match written.kind()? {
        Some(EndpointKind::Feed) => Endpoint::feed(&name),
        _ => Endpoint::new(&name, "").configure(|hook| {
            hook.verification = own.portal.config.endpoint_verification;
        }),
    };
    // Otherwise every topic would count as chosen before.
    one.topics = match own.portal.topics.is_empty() {
        true => vec!["*".to_owned()],
        false => Vec::new(),
    };
    written.write(own, &mut one)?;
    let mut secret = None;
    own.change(Act::PutEndpoint, &name, cost_of(&one), |conn, to| {
        to.put(conn, &one)?;
        if is_feed(&one) {
            return Ok(true);
        }
        secret = to.secret(conn, &name)?;
        // Only what a relay would use.
        to.test(conn, &name, &own.portal.config).map(|_| true)
    })?;
    let secret = secret.filter(|_| own.session.rights.secrets);
    Ok((name, secret))
}

pub(super) fn add(asked: &Asked<'_>) -> Result<Response, Refusal> {
    if asked.given("more").is_some() {
        return more(asked, None);
    }
    let (name, secret) = match register(asked.own(), Written::of(asked)) {
        Ok(added) => added,
        Err(refusal) => return again(asked, None, refusal),
    };
    match secret {
        Some(secret) => Ok(show_secret(
            asked,
            &name,
            secret.written().expose_secret(),
            asked.words.done_added,
        )),
        None => done(&name, "added"),
    }
}

pub(super) fn write(own: Own<'_>, name: &str, written: Written) -> Result<(), Refusal> {
    let mut refused = None;
    let one = get(own, name)?;
    let cost = cost_of(&one);
    let done = own.change(Act::PutEndpoint, name, cost, |conn, to| {
        let is_there = to.change(conn, name, |row| {
            let mut changed = row.clone();
            match written.write(own, &mut changed) {
                Ok(()) => *row = changed,
                Err(refusal) => refused = Some(refusal),
            }
        })?;
        if !is_there || refused.is_some() {
            return Ok(false);
        }
        if is_feed(&one) {
            return Ok(true);
        }
        let is_there = to.test(conn, name, &own.portal.config)?;
        Ok(is_there.is_some())
    });
    match refused {
        Some(refusal) => Err(refusal),
        None => done,
    }
}

pub(super) fn change(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    if asked.given("more").is_some() {
        return more(asked, Some(&get(asked.own(), name)?));
    }
    match write(asked.own(), name, Written::of(asked)) {
        Ok(()) => done(name, "changed"),
        Err(refusal) => again(asked, Some(&get(asked.own(), name)?), refusal),
    }
}

/// Makes a new secret. The old one signs for a day, too.
pub(super) fn new_secret(own: Own<'_>, name: &str) -> Result<SigningSecret, Refusal> {
    let mut secret = None;
    own.change(Act::RotateEndpoint, name, Cost::Change, |conn, own| {
        secret = own.rotate(conn, name, OVERLAP)?;
        Ok(secret.is_some())
    })?;
    secret.ok_or(Refusal::NotFound)
}

pub(super) fn rotate(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    let secret = new_secret(asked.own(), name)?;
    let hint = asked.words.rotate_hint;
    Ok(show_secret(
        asked,
        name,
        secret.written().expose_secret(),
        hint,
    ))
}

/// The only page that shows a secret.
fn show_secret(asked: &Asked<'_>, name: &str, secret: &str, hint: &str) -> Response {
    let words = asked.words;
    let content = html! {
        p { (hint) }
        p { code id="secret" { (secret) } }
        p.refused role="status" { (words.secret_once) }
        p { a.button href=(endpoint_page(name)) { (words.back) } }
    };
    asked.dialog(StatusCode::OK, words.secret, &content)
}

pub(super) fn enable(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    asked.own().change_state(&ENABLE, name)?;
    done(name, "enabled")
}

pub(super) fn disable(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    asked.own().change_state(&DISABLE, name)?;
    done(name, "disabled")
}

/// Pauses the endpoint for a time such as `2h`; empty: until it is resumed.
pub(super) fn hold(own: Own<'_>, name: &str, lasts: &str, reason: &str) -> Result<(), Refusal> {
    let lasts = match lasts {
        "" => None,
        text => match humantime::parse_duration(text) {
            Ok(time) if !time.is_zero() && time <= LONGEST_PAUSE => Some(time),
            _ => return Err(Refusal::Wrong("for", |words| words.invalid_duration)),
        },
    };
    let reason = match reason.trim() {
        "" => PORTAL,
        given => given,
    };
    if check_pause_reason(reason).is_err() {
        return Err(Refusal::Wrong("reason", |words| words.invalid_value));
    }
    own.change(Act::Pause, name, Cost::Change, |conn, own| {
        own.pause(conn, name, reason, lasts)
    })
}

pub(super) fn pause(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    hold(asked.own(), name, asked.get("for"), asked.get("reason"))?;
    done(name, "paused")
}

pub(super) fn release(own: Own<'_>, name: &str) -> Result<(), Refusal> {
    own.change(Act::Resume, name, Cost::Change, |conn, own| {
        own.resume(conn, name)
    })
}

pub(super) fn resume(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    release(asked.own(), name)?;
    done(name, "resumed")
}

/// Says how many events end with the endpoint, and asks.
fn ask_to_remove(asked: &Asked<'_>, name: &str) -> Result<Response, Refusal> {
    let (words, found) = (asked.words, asked.own().preview(&REMOVE, name)?);
    let feed = match feeds::get(asked.own(), name) {
        Ok(feed) => Some(feed),
        Err(Refusal::NotFound) => None,
        Err(refusal) => return Err(refusal),
    };
    let sure = match feed {
        Some(_) => words.remove_sure_of_feed,
        None => words.remove_sure,
    };
    let content = html! {
        @if let Some(waiting) = found.waiting {
            p { (words.remove_waiting.replace("{}", &words.number(waiting))) }
        }
        @if let Some(feed) = feed {
            p { (words.remove_unread.replace("{}", &words.number(feed.unread()))) }
        }
        (act(asked, name, "/endpoint/remove", &html! {
            label { input type="checkbox" name="sure" value="yes" required; " " (sure) }
            button.danger { (words.remove) }
            a.button.second href=(endpoint_page(name)) { (words.cancel) }
        }))
    };
    Ok(asked.dialog(StatusCode::OK, words.remove, &content))
}

pub(super) fn remove(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    if asked.given("sure").is_none() {
        return ask_to_remove(asked, name);
    }
    asked.own().change_state(&REMOVE, name)?;
    Ok(Response::see_other(&link("/", &[("done", "removed")])))
}

/// Asks the endpoint whether it wants messages. No connection is held meanwhile.
pub(super) fn ask(own: Own<'_>, name: &str) -> Result<EndpointAnswer, Refusal> {
    let config = &own.portal.config;
    let check = own.send(Act::VerifyEndpoint, name, |conn, own| {
        own.verify(conn, name, config)
    })?;
    let answer = check.ask();
    own.record(|conn, own| own.record(conn, &answer))?;
    Ok(answer)
}

pub(super) fn verify(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    match ask(asked.own(), name)?.is_verified {
        true => done(name, "verified"),
        false => Ok(Response::see_other(&endpoint_page(name))),
    }
}

/// Sends an example of a topic. No connection is held meanwhile.
pub(super) fn send_example(own: Own<'_>, name: &str, topic: &str) -> Result<TestAnswer, Refusal> {
    let config = &own.portal.config;
    let mut listed = own.portal.topics.iter();
    let example = listed.find(|one| one.topic == topic);
    if example.is_none() && !["", TEST].contains(&topic) {
        return Err(Refusal::Wrong("topic", |words| words.unknown_topic));
    }
    let test = own.send(Act::TestEndpoint, name, |conn, own| {
        own.test(conn, name, config)
    })?;
    let test = match example {
        Some(one) => test.event(&one.topic, &one.example),
        None => test,
    };
    let answer = test.send();
    own.record(|conn, own| own.record_test(conn, &answer))?;
    Ok(answer)
}

/// Sends an example, and shows the answer.
pub(super) fn test(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let (name, topic) = (asked.get("name"), asked.get("topic"));
    let answer = send_example(asked.own(), name, topic)?;
    let words = asked.words;
    let body = answer.body.as_ref().filter(|_| asked.shows_responses());
    let content = html! {
        p {
            @if answer.went_well { span.badge.good { (words.delivered) } " " (words.test_accepted) }
            @else { span.badge.bad { (words.error) } " " (words.test_failed) }
        }
        dl.facts {
            dt { (words.status_code) }
            dd { @if let Some(status) = answer.http_status { "HTTP " (status) } @else { (words.no_response) } }
            @if let Some(error) = answer.public_error() { dt { (words.error) } dd { (words.failure(&error)) } }
            dt { (words.took) } dd { (words.duration(answer.took)) }
            dt { (words.message) } dd.key { (answer.message_id) }
        }
        @if let Some(body) = body { pre tabindex="0" { (body) } }
        p { a.button.second href=(endpoint_page(name)) { (words.back) } }
    };
    Ok(asked.dialog(StatusCode::OK, words.example_event, &content))
}

/// Sends events now that wait for a retry. `true`: the time was too short for all.
pub(super) fn send_waiting(own: Own<'_>, name: &str) -> Result<(Bulked, bool), Refusal> {
    own.make_many(Act::RetryMessage, name, Many::Make, |conn, own, bulk| {
        own.retry(conn, name, bulk)
    })
}

pub(super) fn retry(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    let (sent, _) = send_waiting(asked.own(), name)?;
    let sent = sent.changed.to_string();
    let done = [("name", name), ("done", "retried"), ("count", &sent)];
    Ok(Response::see_other(&link("/endpoint", &done)))
}

/// Sends what the endpoint did not get since this time, or only counts it. `true`: the time was too short for all.
pub(super) fn send_missed(
    own: Own<'_>,
    name: &str,
    (since, missing): (&str, bool),
    many: Many,
) -> Result<(Bulked, bool), Refusal> {
    let sending = RECOVER.read(since, missing);
    let sending = sending.map_err(|_| Refusal::Wrong("since", |words| words.invalid_time))?;
    own.make_many(RECOVER.act, name, many, |conn, own, bulk| {
        (RECOVER.send)(own, conn, name, sending, bulk)
    })
}

pub(super) fn recover(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    let what = (asked.get("since"), asked.given("missing").is_some());
    let (sent, is_cut) = send_missed(asked.own(), name, what, Many::Make)?;
    let sent = sent.changed.to_string();
    let done = if is_cut { "recovering" } else { "recovered" };
    let done = [("name", name), ("done", done), ("count", &sent)];
    Ok(Response::see_other(&link("/endpoint", &done)))
}
