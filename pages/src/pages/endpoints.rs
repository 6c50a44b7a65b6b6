//! Endpoints: a searchable list, and a page for each endpoint with its deliveries.

pub(super) mod change;
pub(super) mod edit;
pub(super) mod feed;
pub(super) mod send;

use std::time::{Duration, Instant, SystemTime};

use diesel::PgConnection;
use diesel_outbox::admin::Place;
use diesel_outbox::config::Verification;
use diesel_outbox::endpoints::{
    Deliveries, Delivery, DeliveryCount, DeliveryFilter, Endpoint, EndpointError, EndpointFilter,
    EndpointState, Endpoints,
};
use diesel_outbox::program::{self, FeedState, PolicyOption, SENDING_ACTS, while_disabled};
use diesel_outbox::{Outbox, OutboxName};
use maud::{Markup, html};

use super::acts::capital;
use super::asked::{Asked, Wrong};
use super::layout::{act, hidden, list, token};
use super::messages::{QUICK, outcome};
use super::overview::held;
use super::sparkline::{a_minute, sparkline};
use super::table::{Column, Kind, table_or};
use super::{Refusal, Visit, link, next_page, words};
use crate::database::Database;
use crate::feeds::is_feed;
use crate::pause::{WHILE_PAUSED, hand_in_words, in_words};
use crate::response::Response;
use crate::{Guest, Site, text};

/// Rows per page.
const PAGE: usize = 50;
/// Endpoints that a page reads to find a text, if parts of them are hidden from the guest. The next page continues.
const MOST_READ: usize = 10_000;
/// Deliveries of the last hour are counted in `WINDOWS` steps of this length.
const WINDOW: Duration = Duration::from_secs(120);
const WINDOWS: usize = 30;

/// The address of the page of an endpoint.
fn page_of(name: &str) -> String {
    link("/endpoints", &[("name", name)])
}

/// Runs work on endpoints with one of these connections.
pub(super) fn on<T>(
    visit: &Visit<'_>,
    database: &Database,
    work: impl FnOnce(&mut PgConnection, &OutboxName, Endpoints<'_>) -> Result<T, EndpointError>,
) -> Result<T, Refusal> {
    let done = visit.run(database, |conn, name| {
        let outbox = Outbox::from(name.clone());
        let destinations = outbox.endpoints();
        match work(
            conn,
            name,
            destinations.with_keys(&visit.site.config.secret_keys),
        ) {
            Err(EndpointError::Database(error)) => Err(error.into()),
            done => Ok(done),
        }
    });
    done?.map_err(Refusal::Endpoint)
}

/// The same, whose steps are transactions of their own.
pub(super) fn in_steps<T>(
    visit: &Visit<'_>,
    database: &Database,
    act: impl FnOnce(&mut PgConnection, Endpoints<'_>) -> Result<T, EndpointError>,
) -> Result<T, Refusal> {
    let done = database.in_steps(&visit.request.path, |conn, name| {
        let outbox = Outbox::from(name.clone());
        let endpoints = outbox.endpoints();
        match act(conn, endpoints.with_keys(&visit.site.config.secret_keys)) {
            Err(EndpointError::Database(error)) => Err(error.into()),
            done => Ok(done),
        }
    });
    done?.map_err(Refusal::Endpoint)
}

fn no_endpoint(name: &str) -> Refusal {
    Refusal::Missing(format!("There is no endpoint {name:?}."))
}

pub(super) fn get(visit: &Visit<'_>, name: &str) -> Result<Endpoint, Refusal> {
    let found = on(visit, &visit.site.searches, |conn, _, destinations| {
        destinations.get(conn, name)
    })?;
    found.ok_or_else(|| no_endpoint(name))
}

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    match visit.form.get("name") {
        Some(name) => one(visit, name),
        None => all(visit),
    }
}

/// The fields of the filter.
pub(super) const NAMES: &[&str] = &["q", "tenant", "state"];

fn filter(asked: Asked<'_>, after: Option<&str>) -> Result<EndpointFilter, Wrong> {
    let state = asked.read("state", |word| match word.parse() {
        Ok(state) => Ok(Some(state)),
        Err(_) => Err(format!(
            "{word:?} is not a state: expected active, unread, failing, paused, unverified or disabled"
        )),
    })?;
    Ok(EndpointFilter::default()
        .search(asked.given("q"))
        .tenant_id(asked.tenant()?)
        .state(state)
        .after(after.map(str::to_owned)))
}

/// Whether the guest sees the text in this endpoint.
fn is_seen(guest: &Guest, text: &str, one: &Endpoint) -> bool {
    let description = one.description.as_deref().unwrap_or_default();
    let url = url(guest, one);
    let mut seen = [one.name.as_str(), description, &url].into_iter();
    seen.any(|seen| seen.to_lowercase().contains(text))
}

/// A page of the endpoints that the guest asks for, and the name after which the next page begins. Only what the guest
/// sees of an endpoint counts: neither the rows nor the next page tell what is hidden of a URL.
pub(super) fn search(
    visit: &Visit<'_>,
    asked: Asked<'_>,
    after: Option<&str>,
    limit: usize,
) -> Result<(Vec<Endpoint>, Option<String>), Refusal> {
    let filter = filter(asked, after)?;
    let text = asked.get("q").to_lowercase();
    // The database would find what is hidden, too.
    let (filter, most) = match text.is_empty() || visit.guest.rights.payloads {
        true => (filter, limit + 1),
        false => (filter.search(None::<String>), MOST_READ),
    };
    let mut found = on(visit, &visit.site.searches, |conn, _, destinations| {
        destinations.list(conn, &filter, most)
    })?;
    let last = found.get(most - 1).map(|last| last.name.clone());
    found.retain(|one| is_seen(visit.guest, &text, one));
    let next = next_page(&mut found, limit, |last| last.name.clone());
    Ok((found, next.or(last)))
}

fn all(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let asked = Asked::of(visit.form, NAMES);
    let after = visit.form.get("after");
    let (found, next) = search(visit, asked, after, PAGE)?;
    let fields = html! {
        label.field.wide { "Part of the name, URL or description" input name="q" value=(asked.get("q")); }
        (asked.field("Tenant", "tenant"))
        (asked.choice("State", "state", ["active", "unread", "failing", "paused", "unverified", "disabled"]))
    };
    let content = html! {
        div.title {
            h1 { "Endpoints" }
            @if visit.guest.rights.act { a.button href="/endpoints/edit" { "Register an endpoint" } }
        }
        (asked.form("/endpoints", "Search endpoints", "Search", &fields))
        (list(
            ("rows", "Sorted by name"),
            after.map(|_| asked.link("/endpoints", &[])),
            &rows(visit, &found)?,
            next.map(|last| ("Next", asked.link("/endpoints", &[("after", &last)]))),
        ))
    };
    Ok(visit.page("Endpoints").answer(&content))
}

pub(super) fn rows(visit: &Visit<'_>, found: &[Endpoint]) -> Result<Markup, Refusal> {
    let feeds = feed::of(visit, found)?;
    let columns = [
        Column("Name, URL and description", Kind::Text),
        Column("Topics", Kind::Plain),
        Column("State", Kind::Plain),
    ];
    let rows = found.iter().map(|one| {
        vec![
            html! {
                a.key href=(page_of(&one.name)) { (words::name(&one.name)) }
                @if is_feed(one) {
                    div.quiet {
                        "Feed"
                        @if let Some(state) = feeds.get(&one.name) { ": " (feed::lag(state)) "; last read " (feed::last_read(state)) }
                    }
                } @else {
                    div.quiet.key { (words::shortened(&url(visit.guest, one), 80)) }
                }
                @if let Some(description) = &one.description {
                    div.quiet { (words::shortened(description, 80)) }
                }
            },
            html! { (words::shortened(&one.topics.join(", "), 60)) },
            state(visit.site, one),
        ]
    });
    Ok(table_or(
        "No endpoint matches.",
        "Endpoints",
        &columns,
        rows,
    ))
}

/// The URL, without most of its path if payloads are masked. Empty: a feed.
pub(super) fn url(guest: &Guest, one: &Endpoint) -> String {
    if is_feed(one) {
        return String::new();
    }
    match guest.rights.payloads {
        true => text::without_user(&one.url),
        false => text::without_secrets(&one.url),
    }
}

fn state(site: &Site, one: &Endpoint) -> Markup {
    let why = site
        .relay
        .as_ref()
        .and_then(|relay| program::held(relay, &one.name));
    let badge = match one.state {
        EndpointState::Active => "badge good",
        EndpointState::Paused | EndpointState::Unverified => "badge wait",
        _ => "badge bad",
    };
    let moment = |time| words::moment(&humantime::format_rfc3339_seconds(time).to_string());
    html! {
        span class=(badge) { (one.state) }
        @if let Some(by) = one.state_by { " by " (hand_in_words(by)) }
        @if let Some(until) = one.state_until { " until " (moment(until)) }
        @if let Some(reason) = &one.state_reason {
            @if one.state_by.is_some() { ":" } " " (words::shortened(&in_words(reason), 200))
        }
        @if let Some(since) = one.failing_since.filter(|_| one.enabled) {
            div.quiet { (if is_feed(one) { "Not read since " } else { "No success since " }) (moment(since)) }
        }
        @if let Some(problem) = &one.problem { span.error { (words::shortened(problem, 200)) } }
        " " (held(why.as_deref()))
    }
}

/// An endpoint, a page of its deliveries, and their counts in so many windows.
pub(super) fn deliveries(
    visit: &Visit<'_>,
    name: &str,
    after: Option<&str>,
    limit: usize,
    windows: usize,
) -> Result<(Endpoint, Deliveries, Vec<Option<DeliveryCount>>), Refusal> {
    let after: Option<Place> = after
        .map(str::parse)
        .transpose()
        .map_err(|_| Refusal::Invalid("The position to continue from is invalid.".to_owned()))?;
    let filter = DeliveryFilter::default().after(after);
    let found = on(visit, &visit.site.searches, |conn, _, destinations| {
        let Some(found) = destinations.get(conn, name)? else {
            return Ok(None);
        };
        let deliveries = destinations.deliveries(conn, name, &filter, limit)?;
        let counts = match windows {
            0 => Vec::new(),
            _ => destinations.delivery_counts(conn, name, WINDOW, windows)?,
        };
        Ok(Some((found, deliveries, counts)))
    })?;
    found.ok_or_else(|| no_endpoint(name))
}

/// Why a relay with the settings of this page would not send to the endpoint.
pub(super) fn refusal(visit: &Visit<'_>, name: &str) -> Result<Option<String>, Refusal> {
    on(visit, &visit.site.searches, |conn, _, endpoints| {
        program::refusal(conn, endpoints, name, &visit.site.config)
    })
}

fn one(visit: &Visit<'_>, name: &str) -> Result<Response, Refusal> {
    let after = visit.form.get("after");
    let windows = if after.is_none() { WINDOWS } else { 0 };
    let began = Instant::now();
    let (found, deliveries, counts) = deliveries(visit, name, after, PAGE, windows)?;
    let feed = feed::of(visit, std::slice::from_ref(&found))?.remove(name);
    // Do not repeat a slow search.
    let is_live = after.is_none() && began.elapsed() < QUICK;
    let content = html! {
        div.title {
            h1 { "Endpoint " span.key { (words::name(name)) } }
            p { a href="/endpoints" { "All endpoints" } }
        }
        @if let Some(why) = refusal(visit, name)? {
            p.refused role="status" {
                "A relay with the settings of this page would not send to this endpoint: " (why)
                ". Its messages wait, unless another relay has settings that allow it."
            }
        }
        (facts(visit, &found, feed.as_ref()))
        @if after.is_none() { (curves(&counts)) }
        @if visit.guest.rights.act { (actions(visit, &found)) }
        (deliveries_of(visit.guest, name, &deliveries, after.is_some()))
    };
    let title = format!("Endpoint {name}");
    Ok(visit.page(&title).live(is_live).answer(&content))
}

/// Messages of the last hour that were delivered, and that were given up.
fn curves(counts: &[Option<DeliveryCount>]) -> Markup {
    #[allow(clippy::cast_precision_loss, reason = "only drawn")]
    let per_second = |count: u64| count as f64 / WINDOW.as_secs_f64();
    let values = |of: fn(&DeliveryCount) -> u64| -> Vec<Option<f64>> {
        let counts = counts.iter().map(Option::as_ref);
        counts.map(|count| count.map(of).map(per_second)).collect()
    };
    let sum = |of: fn(&DeliveryCount) -> u64| counts.iter().flatten().map(of).sum::<u64>();
    let span = WINDOW * u32::try_from(counts.iter().flatten().count()).unwrap_or(0);
    let figure = |name: &str, label: &str, title: &str, of: fn(&DeliveryCount) -> u64| {
        html! {
            li.panel.figure {
                span.label { (label) }
                span.value { (words::count(i64::try_from(sum(of)).unwrap_or(i64::MAX), false)) }
                (sparkline(name, title, span, &values(of), a_minute))
            }
        }
    };
    html! {
        ul.figures aria-label="The last hour" {
            (figure("delivered", "Delivered", "Delivered messages", |count| count.delivered))
            (figure("dead", "Given up", "Messages given up (dead-lettered, expired or cancelled)", |count| count.dead))
        }
    }
}

fn facts(visit: &Visit<'_>, one: &Endpoint, feed: Option<&FeedState>) -> Markup {
    let headers: Vec<&str> = one.headers.iter().map(|(name, _)| name.as_str()).collect();
    html! {
        section.panel aria-labelledby="facts" {
            div.head {
                h2 id="facts" { "Details" }
                @if visit.guest.rights.act { a.button.second href=(link("/endpoints/edit", &[("name", &one.name)])) { "Change" } }
            }
            div.body {
                dl.facts {
                    dt { "State" }
                    dd {
                        (state(visit.site, one))
                    }
                    dt { "Kind" } dd { (one.kind) }
                    @if !is_feed(one) { dt { "URL" } dd { span.key { (url(visit.guest, one)) } } }
                    @if let Some(feed) = feed { (feed::facts(feed)) }
                    @if let Some(text) = &one.description { dt { "Description" } dd { (text) } }
                    dt { "Topics" } dd { (one.topics.join(", ")) }
                    @if let Some(tenant) = one.tenant_id { dt { "Tenant" } dd { (words::tenant(tenant)) } }
                    @if let Some(filter) = &one.filter { dt { "Filter" } dd { code { (filter) } } }
                    @for option in PolicyOption::of_endpoints() {
                        @if let Some(text) = option.text(&one.policy) {
                            dt title=(option.help) { (capital(&option.name.replace('_', " "))) } dd { (text) }
                        }
                    }
                    @if one.verification != Verification::None {
                        dt { "Verification" } dd { (one.verification) }
                    }
                    @if let Some(rate) = one.allowed_rate { dt { "Allowed rate" } dd { (rate) } }
                    @if !headers.is_empty() { dt { "Headers" } dd { (headers.join(", ")) } }
                    @if let Some(auth) = &one.auth { dt { "Authentication" } dd { (auth) } }
                    @for (name, time) in [("Registered", one.created_at), ("Changed", one.updated_at), ("Verified", one.verified_at), (if is_feed(one) { "Unread since" } else { "Failing since" }, one.failing_since), ("Older secrets sign until", one.old_secrets_until.filter(|until| *until > SystemTime::now()))] {
                        @if let Some(time) = time {
                            dt { (name) } dd { (words::moment(&humantime::format_rfc3339_seconds(time).to_string())) }
                        }
                    }
                }
                @if visit.guest.rights.act { (first_aid(visit.guest, one)) }
            }
        }
    }
}

/// What brings the endpoint back into work.
fn first_aid(guest: &Guest, one: &Endpoint) -> Markup {
    let about = [("name", one.name.as_str())];
    let paused = [("kind", "destination"), about[0]];
    let button = |words: &str| html! { button { (words) } };
    html! {
        @if one.state == EndpointState::Paused { (act(guest, "/resume", &paused, &button("Resume"))) }
        @if !one.enabled { (act(guest, "/endpoint/enable", &about, &button("Enable"))) }
        @if one.verification != Verification::None {
            (act(guest, "/endpoint/verify", &about, &html! {
                button.second { "Verify" }
                span.quiet { "Asks the endpoint now whether it wants messages." }
            }))
        }
    }
}

/// All other acts, each kind in a panel of its own.
fn actions(visit: &Visit<'_>, one: &Endpoint) -> Markup {
    let guest = visit.guest;
    let form = |path: &str, content: &Markup| act(guest, path, &[("name", &one.name)], content);
    let kind = [("kind", "destination"), ("name", one.name.as_str())];
    let panel = |heading: &str, content: &Markup| {
        html! { section.panel { div.head { h2 { (heading) } } div.body { (content) } } }
    };
    html! {
        div.acts {
            @if !is_feed(one) { (panel("Test", &form("/endpoint/test", &html! {
                button.second { "Send a test event" }
                span.quiet { code { "outbox.test" } ", sent at once, even to a disabled endpoint." }
            }))) }
            (panel("Failed and missed messages", &html! {
                @for act in SENDING_ACTS {
                    (form(&format!("/endpoint/{}", act.name), &html! {
                        label.field { "Since" input name="since" value="24h" required; }
                        label.field { "Why" input name="why" maxlength="400"; }
                        @if let Some(missing) = act.missing { label { input type="checkbox" name="missing" value="yes"; " " (missing) } }
                        button.second { (capital(act.name)) "…" }
                        span.quiet { (act.about) "." }
                    }))
                }
            }))
            (panel("Pause or disable", &html! {
                @if one.state != EndpointState::Paused {
                    (act(guest, "/pause", &kind, &html! {
                        label.field { "For (empty: until resumed)" input name="for" placeholder="2h"; }
                        label.field { "Why" input name="reason" maxlength="200"; }
                        button.second { "Pause" }
                        span.quiet { (WHILE_PAUSED) }
                    }))
                }
                @if one.enabled {
                    (form("/endpoint/disable", &html! {
                        label.field { "Why" input name="reason" maxlength="200"; }
                        button.danger { "Disable" }
                        span.quiet { (while_disabled(&visit.site.config)) }
                    }))
                }
            }))
            @if !is_feed(one) {
                (panel("Signing secret", &form("/endpoint/rotate", &html! {
                    label.field { "Older secrets also sign for" input name="keep" value="24h" required; }
                    button.second { "New secret" }
                })))
            } @else if guest.rights.secrets {
                (panel("Token", &form("/feed/token", &html! {
                    label.field { "Older tokens end after" input name="keep" value="24h" required; }
                    button.second { "Make a token" }
                })))
            }
            (panel("Remove", &form("/endpoint/remove", &html! { button.danger { "Remove…" } })))
        }
    }
}

fn deliveries_of(guest: &Guest, name: &str, found: &Deliveries, is_later_page: bool) -> Markup {
    let columns = [
        Column("Message", Kind::Text),
        Column("State", Kind::Plain),
        Column("Attempts", Kind::Number),
        Column("When", Kind::When),
        Column("Send again", Kind::Control),
    ];
    let rows = found.rows.iter().map(|row| delivery(guest, name, row));
    let none = match found.next {
        Some(_) => "No deliveries found yet: the search stopped after 2 s.",
        None => "No deliveries.",
    };
    let content = html! {
        @if !found.is_complete {
            p.none role="status" { "Many rows are being written: some deliveries may be missing." }
        }
        (table_or(none, "Deliveries", &columns, rows))
    };
    let older = |next: Place| {
        link(
            "/endpoints",
            &[("name", name), ("after", &next.to_string())],
        )
    };
    list(
        ("deliveries", "Deliveries, latest first"),
        is_later_page.then(|| page_of(name)),
        &content,
        found.next.map(|next| ("Older", older(next))),
    )
}

fn delivery(guest: &Guest, name: &str, row: &Delivery) -> Vec<Markup> {
    let id = row.message_id.to_string();
    vec![
        html! {
            (words::name(&row.topic))
            div { a.key href=(link("/messages", &[("q", &id)])) { (id) } }
        },
        html! {
            (outcome(row.state, row.reason.as_deref()))
            @if let Some(status) = row.http_status { " HTTP " (status) }
            @if let Some(error) = &row.error { span.error { (words::shortened(error, 160)) } }
        },
        html! { (row.attempts) },
        html! {
            @if let Some(time) = &row.settled_at { (words::ago(time)) }
            @else if let Some(time) = &row.next_attempt_at { span.quiet { "due " } (words::time(time)) }
            @else if let Some(reason) = &row.waits { span.quiet { (words::with_times(&words::shortened(&reason.to_string(), 200))) } }
        },
        html! {
            @if guest.rights.act && row.can_be_sent_again {
                form method="post" action="/endpoint/send-again" {
                    (token(guest)) (hidden(&[("name", name), ("message", &id)]))
                    button.second aria-label={ "Send again: " (id) } { "Send again" }
                }
            }
        },
    ]
}
