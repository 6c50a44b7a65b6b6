//! Registered destinations: a searchable list, and a page for each destination with its deliveries.

pub(super) mod change;
pub(super) mod edit;

use std::time::{Duration, Instant, SystemTime};

use diesel::PgConnection;
use diesel_outbox::admin::{Pausable, Place};
use diesel_outbox::config::{PolicyOption, Verification};
use diesel_outbox::destinations::{
    Deliveries, Delivery, DeliveryCount, DeliveryFilter, DestinationError, DestinationFilter,
    Destinations, RegisteredDestination,
};
use diesel_outbox::program;
use diesel_outbox::{DatabaseError, Outbox, OutboxName};
use http::StatusCode;
use maud::{Markup, html};

use super::layout::{Page, token};
use super::messages::{QUICK, badge};
use super::overview::{held, left};
use super::sparkline::{a_minute, sparkline};
use super::table::{Column, Kind, table};
use super::{Refusal, link, next_page, plain, words};
use crate::database::Database;
use crate::request::Form;
use crate::text;
use crate::{Guest, Request, Response, Site};

/// Rows per page.
const PAGE: usize = 50;
/// Deliveries of the last hour are counted in `WINDOWS` steps of this length.
const WINDOW: Duration = Duration::from_secs(120);
const WINDOWS: usize = 30;

/// The address of the page of a destination.
fn page_of(name: &str) -> String {
    link("/destinations", &[("name", name)])
}

/// Runs work on registered destinations. The outer error is a failure of the database; the inner error is for the
/// caller to handle.
pub(super) fn with<T>(
    site: &Site,
    outbox: &OutboxName,
    work: impl FnOnce(Destinations<'_>) -> Result<T, DestinationError>,
) -> Result<Result<T, DestinationError>, DatabaseError> {
    let outbox = Outbox::from(outbox.clone());
    let destinations = outbox.destinations().with_keys(&site.config.secret_keys);
    match work(destinations) {
        Err(DestinationError::Database(error)) => Err(error.into()),
        done => Ok(done),
    }
}

/// Runs work on registered destinations with one of these connections.
pub(super) fn on<T>(
    site: &Site,
    database: &Database,
    work: impl FnOnce(&mut PgConnection, &OutboxName, Destinations<'_>) -> Result<T, DestinationError>,
) -> Result<T, Refusal> {
    let done = database.run(|conn, outbox| {
        with(site, outbox, |destinations| {
            work(conn, outbox, destinations)
        })
    });
    done?.map_err(Refusal::Destination)
}

fn no_destination(name: &str) -> Refusal {
    Refusal::Missing(format!("There is no registered destination {name:?}."))
}

pub(super) fn get(site: &Site, name: &str) -> Result<RegisteredDestination, Refusal> {
    let found = on(site, &site.searches, |conn, _, destinations| {
        destinations.get(conn, name)
    })?;
    found.ok_or_else(|| no_destination(name))
}

pub(super) fn show(site: &Site, guest: &Guest, request: &Request) -> Response {
    match request.query.get("name") {
        Some(name) => one(site, guest, request, name),
        None => all(site, guest, request),
    }
}

/// The filter, as entered in the form.
pub(super) struct Asked<'a> {
    q: &'a str,
    tenant: &'a str,
    state: &'a str,
}

impl<'a> Asked<'a> {
    pub(super) fn of(form: &'a Form) -> Self {
        let value = |name| form.get(name).unwrap_or_default().trim();
        Self {
            q: value("q"),
            tenant: value("tenant"),
            state: value("state"),
        }
    }

    /// Whether the guest sees the text of the search in this destination.
    fn is_seen_in(&self, guest: &Guest, one: &RegisteredDestination) -> bool {
        let description = one.description.as_deref().unwrap_or_default();
        let seen = [one.name.as_str(), description, &url(guest, one)];
        let q = self.q.to_lowercase();
        seen.iter().any(|text| text.to_lowercase().contains(&q))
    }

    fn pairs(&self) -> [(&'static str, &'a str); 3] {
        [
            ("q", self.q),
            ("tenant", self.tenant),
            ("state", self.state),
        ]
    }

    fn filter(&self, after: Option<&str>) -> Result<DestinationFilter, String> {
        let enabled = match self.state {
            "" => None,
            "enabled" => Some(true),
            "disabled" => Some(false),
            "failing" => Some(true),
            other => {
                return Err(format!(
                    "{other:?} is not a state: expected enabled, failing or disabled"
                ));
            }
        };
        Ok(DestinationFilter::default()
            .search((!self.q.is_empty()).then(|| self.q.to_owned()))
            .tenant_id(super::tenant(self.tenant)?)
            .enabled(enabled)
            .failing((self.state == "failing").then_some(true))
            .after(after.map(str::to_owned)))
    }
}

/// A page of the destinations that the guest asks for, and the name after which the next page begins.
pub(super) fn search(
    site: &Site,
    guest: &Guest,
    asked: &Asked<'_>,
    after: Option<&str>,
    limit: usize,
) -> Result<(Vec<RegisteredDestination>, Option<String>), Refusal> {
    let filter = asked.filter(after).map_err(Refusal::Invalid)?;
    let mut found = on(site, &site.searches, |conn, _, destinations| {
        destinations.list(conn, &filter, limit + 1)
    })?;
    let next = next_page(&mut found, limit, |last| last.name.clone());
    // Otherwise a search would find out what the page hides of a URL.
    found.retain(|one| asked.is_seen_in(guest, one));
    Ok((found, next))
}

fn all(site: &Site, guest: &Guest, request: &Request) -> Response {
    let asked = Asked::of(&request.query);
    let after = request.query.get("after");
    let (found, next) = match search(site, guest, &asked, after, PAGE) {
        Ok(found) => found,
        Err(refusal) => return refusal.page(site, guest, request),
    };
    let content = html! {
        div.title {
            h1 { "Registered destinations" }
            p.quiet { "Rows of " code { (site.config.table) "_destination" } ", such as webhooks registered by customers." }
            @if guest.rights.act { p { a href="/destinations/edit" { "Register a destination" } } }
        }
        (filter_form(&asked))
        section.panel aria-labelledby="rows" {
            div.head {
                h2 id="rows" { "Sorted by name" }
                @if after.is_some() { a href=(link("/destinations", &asked.pairs())) { "Back to the first page" } }
            }
            @if found.is_empty() { p.none role="status" { "No registered destination matches." } }
            @else { (rows(site, guest, &found)) }
            @if let Some(last) = next {
                div.actions {
                    a.button.second href=(link("/destinations", &[asked.pairs().as_slice(), &[("after", &last)]].concat())) { "Next" }
                }
            }
        }
    };
    let page = plain(site, guest, request, "Destinations");
    page.answer(StatusCode::OK, &content)
}

fn filter_form(asked: &Asked<'_>) -> Markup {
    html! {
        form.panel.filter method="get" action="/destinations" role="search" aria-label="Search destinations" {
            label.field.wide { "Part of the name, URL or description" input name="q" value=(asked.q); }
            label.field { "Tenant" input name="tenant" value=(asked.tenant); }
            label.field { "State"
                select name="state" {
                    option value="" { "any" }
                    @for state in ["enabled", "failing", "disabled"] {
                        option value=(state) selected[asked.state == state] { (state) }
                    }
                }
            }
            div.do {
                button { "Search" }
                @if asked.pairs().iter().any(|(_, value)| !value.is_empty()) { a href="/destinations" { "Show all" } }
            }
        }
    }
}

pub(super) fn rows(site: &Site, guest: &Guest, found: &[RegisteredDestination]) -> Markup {
    let columns = [
        Column("Name", Kind::Text),
        Column("URL", Kind::Plain),
        Column("Topics", Kind::Plain),
        Column("State", Kind::Plain),
    ];
    let rows: Vec<Vec<Markup>> = found
        .iter()
        .map(|one| {
            vec![
                html! { a.key href=(page_of(&one.name)) { (words::name(&one.name)) } },
                html! {
                    span.key { (words::shortened(&url(guest, one), 80)) }
                    @if let Some(description) = &one.description {
                        " " span.quiet { (words::shortened(description, 80)) }
                    }
                },
                html! { (words::shortened(&one.topics.join(", "), 60)) },
                state(site, one),
            ]
        })
        .collect();
    table("Registered destinations", &columns, &rows)
}

/// The URL, without most of its path if payloads are masked.
pub(super) fn url(guest: &Guest, one: &RegisteredDestination) -> String {
    match guest.rights.payloads {
        true => text::without_user(&one.url),
        false => text::without_secrets(&one.url),
    }
}

fn state(site: &Site, one: &RegisteredDestination) -> Markup {
    let why = site
        .relay
        .as_ref()
        .and_then(|relay| program::held(relay, &one.name));
    html! {
        @match (one.enabled, one.failing) {
            (false, _) => span.badge.bad { "disabled" },
            (true, _) if !one.is_verified() => span.badge.wait { "not verified" },
            (true, true) => span.badge.bad { "failing" },
            (true, false) => span.badge.good { "enabled" },
        }
        @if let Some(since) = one.failing_since.filter(|_| one.enabled) {
            " " span.quiet { "no success since " (words::moment(&humantime::format_rfc3339_seconds(since).to_string())) }
        }
        @if let Some(reason) = &one.disabled_reason { " " (words::shortened(reason, 200)) }
        @if let Some(error) = &one.verification_error { " " (words::shortened(error, 200)) }
        @if let Some(problem) = &one.problem { span.error { (words::shortened(problem, 200)) } }
        " " (held(why.as_deref()))
    }
}

/// A destination, a page of its deliveries, and their counts in so many windows.
pub(super) fn deliveries(
    site: &Site,
    name: &str,
    after: Option<&str>,
    limit: usize,
    windows: usize,
) -> Result<
    (
        RegisteredDestination,
        Deliveries,
        Vec<Option<DeliveryCount>>,
    ),
    Refusal,
> {
    let after: Option<Place> = after
        .map(str::parse)
        .transpose()
        .map_err(|_| Refusal::Invalid("The position to continue from is invalid.".to_owned()))?;
    let filter = DeliveryFilter::default().after(after);
    let found = on(site, &site.searches, |conn, _, destinations| {
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
    found.ok_or_else(|| no_destination(name))
}

fn one(site: &Site, guest: &Guest, request: &Request, name: &str) -> Response {
    let after = request.query.get("after");
    let windows = if after.is_none() { WINDOWS } else { 0 };
    let began = Instant::now();
    let (found, deliveries, counts) = match deliveries(site, name, after, PAGE, windows) {
        Ok(found) => found,
        Err(refusal) => return refusal.page(site, guest, request),
    };
    let title = format!("Destination {name}");
    let page = Page {
        // Do not repeat a slow search.
        is_live: after.is_none() && began.elapsed() < QUICK,
        ..plain(site, guest, request, &title)
    };
    let can_change = guest.rights.act;
    let content = html! {
        div.title {
            h1 { "Destination " span.key { (words::name(name)) } }
            p { a href="/destinations" { "All registered destinations" } }
        }
        @if can_change { (actions(guest, &found)) }
        (facts(site, guest, &found))
        @if after.is_none() { (curves(&counts)) }
        (deliveries_of(guest, name, &deliveries, after.is_some(), can_change))
    };
    page.answer(StatusCode::OK, &content)
}

/// Delivered and dead-lettered messages of the last hour.
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
                span.parts { "in the last " (humantime::format_duration(span)) }
                (sparkline(name, title, span, &values(of), a_minute))
            }
        }
    };
    html! {
        ul.figures aria-label="The last hour" {
            (figure("delivered", "Delivered", "Delivered messages", |count| count.delivered))
            (figure("died", "Dead-lettered", "Dead-lettered messages", |count| count.dead))
        }
    }
}

fn facts(site: &Site, guest: &Guest, one: &RegisteredDestination) -> Markup {
    let headers: Vec<&str> = one.headers.iter().map(|(name, _)| name.as_str()).collect();
    let (glance, _) = site.glance();
    let pause = glance.as_ref().and_then(|glance| {
        let mut pauses = glance.pauses.iter();
        pauses.find(|pause| pause.kind == Pausable::Destination && pause.name == one.name)
    });
    html! {
        section.panel aria-labelledby="facts" {
            div.head { h2 id="facts" { "Details" } }
            div.body {
                dl.facts {
                    dt { "State" }
                    dd {
                        (state(site, one))
                        @if let Some(pause) = pause {
                            " " span.badge.wait { (if pause.reason == "BREAKER_OPEN" { "breaker open" } else { "paused" }) }
                            " " (words::shortened(&pause.reason, 200)) " " span.quiet { (left(pause)) }
                        }
                    }
                    dt { "URL" } dd { span.key { (url(guest, one)) } }
                    @if let Some(text) = &one.description { dt { "Description" } dd { (text) } }
                    dt { "Topics" } dd { (one.topics.join(", ")) }
                    @if let Some(tenant) = one.tenant_id { dt { "Tenant" } dd { (words::tenant(tenant)) } }
                    @if let Some(filter) = &one.filter { dt { "Filter" } dd { code { (filter) } } }
                    @for option in PolicyOption::of_registered() {
                        @if let Some(text) = option.text(&one.policy) {
                            dt title=(option.help) { (heading(option)) } dd { (text) }
                        }
                    }
                    @if one.verification != Verification::None {
                        dt { "Verification" } dd { (one.verification) }
                    }
                    @if let Some(rate) = one.allowed_rate { dt { "Allowed rate" } dd { (rate) } }
                    @if !headers.is_empty() { dt { "Headers" } dd { (headers.join(", ")) } }
                    @if let Some(auth) = &one.auth { dt { "Authentication" } dd { (auth) } }
                    @for (name, time) in [("Registered", one.created_at), ("Changed", one.updated_at), ("Verified", one.verified_at), ("Failing since", one.failing_since), ("Older secrets sign until", one.old_secrets_until.filter(|until| *until > SystemTime::now()))] {
                        @if let Some(time) = time {
                            dt { (name) } dd { (words::moment(&humantime::format_rfc3339_seconds(time).to_string())) }
                        }
                    }
                }
            }
        }
    }
}

/// `Max attempts` for `max_attempts`.
fn heading(option: &PolicyOption) -> String {
    let mut heading = option.name.replace('_', " ");
    if let Some(first) = heading.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    heading
}

fn actions(guest: &Guest, one: &RegisteredDestination) -> Markup {
    let meant = html! {
        (token(guest))
        input type="hidden" name="name" value=(one.name);
    };
    html! {
        section.panel {
            div.head { h2 { "Actions" } }
            div.body {
                @if one.enabled {
                    form.do method="post" action="/destination/disable" {
                        (meant)
                        label.field { "Why" input name="reason" maxlength="200" required; }
                        button.danger { "Disable" }
                        span.quiet { "Messages for the destination wait until it is enabled." }
                    }
                } @else {
                    form.do method="post" action="/destination/enable" { (meant) button { "Enable" } }
                }
                p { a href=(link("/destinations/edit", &[("name", &one.name)])) { "Change" } }
                form.do method="post" action="/destination/test" {
                    (meant)
                    button.second { "Send a test event" }
                    span.quiet { code { "outbox.test" } ", sent at once, even to a disabled destination." }
                }
                @if one.verification != Verification::None {
                    form.do method="post" action="/destination/verify" {
                        (meant)
                        button.second { "Verify" }
                        span.quiet { "Asks the endpoint now whether it wants messages." }
                    }
                }
                form.do method="post" action="/destination/rotate" {
                    (meant)
                    label.field { "Older secrets also sign for" input name="keep" value="24h" required; }
                    button.second { "New secret" }
                }
                (recover_forms(guest, &one.name))
                form.do method="post" action="/destination/remove" {
                    (meant)
                    button.danger { "Remove…" }
                }
            }
        }
    }
}

/// The forms that send a destination what it did not get.
fn recover_forms(guest: &Guest, name: &str) -> Markup {
    let meant = html! {
        (token(guest))
        input type="hidden" name="name" value=(name);
        label.field { "Since" input name="since" value="24h" required; }
        label.field { "Why" input name="reason" maxlength="400"; }
    };
    html! {
        form.do method="post" action="/destination/recover" {
            (meant)
            label { input type="checkbox" name="missing" value="yes"; " also what it missed" }
            button.second { "Recover…" }
            span.quiet { "Dead letters since this time are sent again, oldest first." }
        }
        form.do method="post" action="/destination/backfill" {
            (meant)
            button.second { "Backfill…" }
            span.quiet { "For a new destination: what it would have got since this time." }
        }
    }
}

fn deliveries_of(
    guest: &Guest,
    name: &str,
    deliveries: &Deliveries,
    is_later_page: bool,
    can_change: bool,
) -> Markup {
    let columns = [
        Column("Message", Kind::Text),
        Column("State", Kind::Plain),
        Column("Attempts", Kind::Number),
        Column("When", Kind::Short),
        Column("Send again", Kind::Control),
    ];
    let rows: Vec<Vec<Markup>> = deliveries
        .rows
        .iter()
        .map(|row| delivery(guest, name, row, can_change))
        .collect();
    html! {
        section.panel aria-labelledby="deliveries" {
            div.head {
                h2 id="deliveries" { "Deliveries, latest first" }
                @if is_later_page { a href=(page_of(name)) { "Back to the first page" } }
            }
            @if !deliveries.is_complete {
                p.none role="status" { "Many rows are being written: some deliveries may be missing." }
            }
            @if rows.is_empty() {
                p.none role="status" {
                    @if deliveries.next.is_some() { "No deliveries found yet: the search stopped after 2 s." } @else { "No deliveries." }
                }
            }
            @else { (table("Deliveries", &columns, &rows)) }
            @if let Some(next) = deliveries.next {
                div.actions {
                    a.button.second href=(link("/destinations", &[("name", name), ("after", &next.to_string())])) { "Older" }
                }
            }
        }
    }
}

fn delivery(guest: &Guest, name: &str, row: &Delivery, can_change: bool) -> Vec<Markup> {
    let id = row.message_id.to_string();
    vec![
        html! {
            a.key href=(link("/messages", &[("q", &id)])) { (id) }
            " " span.quiet { (words::name(&row.topic)) }
        },
        html! {
            (badge(row.state))
            @if let Some(status) = row.http_status { " HTTP " (status) }
            @if let Some(reason) = &row.reason { " " (reason) }
            @if let Some(error) = &row.error { span.error { (words::shortened(error, 160)) } }
        },
        html! { (row.attempts) },
        html! {
            @if let Some(time) = &row.settled_at { (words::ago(time)) }
            @else if let Some(time) = &row.next_attempt_at { span.quiet { "due " } (words::time(time)) }
        },
        html! {
            @if can_change && row.can_be_sent_again {
                form method="post" action="/destination/send-again" {
                    (token(guest))
                    input type="hidden" name="name" value=(name);
                    input type="hidden" name="message" value=(id);
                    button.second aria-label={ "Send " (id) " again" } { "Send again" }
                }
            }
        },
    ]
}
