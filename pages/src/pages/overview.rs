//! The first page: whether messages are being delivered, and if not, why.

mod destinations;
mod verdict;

use std::sync::Arc;

use diesel_outbox::admin::{DeadDepth, FeedLag};
use diesel_outbox::program::Rates;
use http::StatusCode;
use maud::{Markup, html};

pub(super) use self::destinations::held;
use self::verdict::Verdict;
use super::sparkline::{a_minute, sparkline};
use super::table::{Column, Kind, number, table};
use super::{Refusal, Visit, relays, words};
use crate::Site;
use crate::history::Glance;
use crate::labels::Labels;
use crate::response::Response;

/// Topics listed, longest delay first.
const MOST_LANES: usize = 100;

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let site = visit.site;
    let (glance, error) = site.glance();
    let rates = glance.as_ref();
    let rates = rates.and_then(|glance| site.history.rates(glance));
    let verdict = Verdict::of(site, glance.as_deref(), rates, error.as_deref());
    let status = match error {
        Some(_) => StatusCode::SERVICE_UNAVAILABLE,
        None => StatusCode::OK,
    };
    let content = html! {
        (verdict.shown())
        @if let Some(glance) = &glance {
            (figures(site, glance, rates))
            (lanes(glance))
            (destinations::panel(visit, glance))
            (feeds(glance))
            (relays::panel(&glance.leases))
        }
    };
    let page = visit.page(verdict.state.as_str()).live(true);
    Ok(page.status(status).answer(&content))
}

/// The key figures with their curves.
fn figures(site: &Site, glance: &Arc<Glance>, rates: Option<Rates>) -> Markup {
    let depths = &glance.depths;
    let curves = site.history.curves();
    let shown = |rate: Option<f64>| rate.map_or("–".to_owned(), words::per_minute);
    let is_estimate = depths.lanes.iter().any(|lane| lane.is_estimate);
    let number = |count: i64| words::count(count, is_estimate);
    let dead_is_estimate = depths.dead.iter().any(|dead| dead.is_estimate);
    let oldest = glance.oldest_due_seconds();
    let dead = depths.dead_letters();
    let plain = |value: f64| words::amount(value);
    html! {
        ul.figures aria-label="Numbers" {
            li.panel.figure {
                span.label { "Incoming" }
                span.value { (shown(rates.map(|rates| rates.enqueued))) " " small { "/ min" } }
                span.parts { "enqueued and requeued" }
                (sparkline("in", "Incoming messages", curves.span, &curves.enqueued, a_minute))
            }
            li.panel.figure {
                span.label { "Settled" }
                span.value { (shown(rates.map(|rates| rates.settled))) " " small { "/ min" } }
                span.parts { (shown(rates.map(|rates| (rates.settled - rates.dead_lettered).max(0.0)))) " delivered per minute" }
                (sparkline("out", "Settled messages", curves.span, &curves.settled, a_minute))
            }
            li.panel.figure {
                span.label { "Waiting" }
                span.value { (number(depths.pending() + depths.retrying())) }
                span.parts {
                    (number(depths.pending())) " pending, " (number(depths.sending())) " sending, "
                    (number(depths.retrying())) " retrying"
                }
                (sparkline("waiting", "Waiting messages", curves.span, &curves.waiting, plain))
            }
            li.panel.figure.alarm[oldest.is_some_and(|seconds| seconds > verdict::LATE_SECONDS)] {
                span.label { "Oldest due" }
                span.value { (oldest.map_or("–".to_owned(), words::duration)) }
                span.parts { @if oldest.is_some() { "due but not claimed" } @else { "nothing is due" } }
                (sparkline("oldest", "Age of the oldest due message", curves.span, &curves.oldest_due_seconds, words::duration))
            }
            li.panel.figure.alarm[dead > 0] {
                span.label { "Dead letters" }
                span.value { @if dead > 0 { a href="/dead" { (words::count(dead, dead_is_estimate)) } } @else { "0" } }
                span.parts { (shown(rates.map(|rates| rates.dead_lettered))) " dead-lettered per minute" }
                (sparkline("dead", "Dead-lettered messages", curves.span, &curves.dead_lettered, a_minute))
            }
        }
    }
}

/// Waiting and dead messages by topic and destination.
fn lanes(glance: &Glance) -> Markup {
    let depths = &glance.depths;
    let mut rows: Vec<(f64, i64, Vec<Markup>)> = Vec::new();
    for lane in &depths.lanes {
        let shown = |count: i64| number(&words::count(count, lane.is_estimate));
        let is_of_lane = |dead: &&DeadDepth| {
            (&dead.topic, &dead.destination) == (&lane.topic, &lane.destination)
        };
        let dead = depths.dead.iter().find(is_of_lane);
        let oldest = lane.oldest_due_seconds;
        let row = vec![
            name_of(&lane.topic, &lane.destination, &glance.labels),
            shown(lane.pending),
            shown(lane.sending),
            shown(lane.retrying),
            dead.map_or_else(|| number("0"), dead_count),
            number(&oldest.map_or("–".to_owned(), words::duration)),
        ];
        rows.push((oldest.unwrap_or(-1.0), lane.pending + lane.retrying, row));
    }
    for dead in &depths.dead {
        let mut lanes = depths.lanes.iter();
        let name = (&dead.topic, &dead.destination);
        if !lanes.any(|lane| (&lane.topic, &lane.destination) == name) {
            let mut row = vec![name_of(&dead.topic, &dead.destination, &glance.labels)];
            row.extend(["0", "0", "0"].map(number));
            row.extend([dead_count(dead), number("–")]);
            rows.push((-2.0, dead.count, row));
        }
    }
    rows.sort_by(|one, other| other.0.total_cmp(&one.0).then(other.1.cmp(&one.1)));
    let more = rows.len().saturating_sub(MOST_LANES);
    let columns = [
        Column("Topic", Kind::Text),
        Column("Pending", Kind::Number),
        Column("Sending", Kind::Number),
        Column("Retrying", Kind::Number),
        Column("Dead", Kind::Number),
        Column("Oldest due", Kind::Number),
    ];
    html! {
        section.panel aria-labelledby="lanes" {
            div.head {
                h2 id="lanes" { "Topics" }
                @if depths.is_estimate { p.quiet { "~ marks estimates" } }
            }
            @if rows.is_empty() { p.none { "No waiting messages and no dead letters." } }
            @else { (table("Topics", &columns, rows.into_iter().map(|row| row.2).take(MOST_LANES))) }
            @if more > 0 { p.none { "and " (words::counted(more as i64, "other topic", "other topics")) " with less delay" } }
        }
    }
}

/// Feeds with events that nobody has read, those with most first.
fn feeds(glance: &Glance) -> Markup {
    let lags = glance.depths.feeds.iter();
    let mut lags = lags.filter(|feed| feed.events > 0).peekable();
    let row = |feed: &FeedLag| {
        vec![
            html! { span.key { (words::name(&feed.name)) } },
            number(&words::count(feed.events, false)),
            number(&words::duration(feed.seconds)),
        ]
    };
    let columns = [
        Column("Feed", Kind::Text),
        Column("Events not read", Kind::Number),
        Column("For", Kind::Number),
    ];
    html! {
        @if lags.peek().is_some() {
            section.panel aria-labelledby="feeds" {
                div.head { h2 id="feeds" { "Feeds" } }
                (table("Feeds", &columns, lags.take(MOST_LANES).map(row)))
            }
        }
    }
}

/// A topic, and the destination that its messages name, if any.
pub(super) fn name_of(topic: &str, destination: &str, labels: &Labels) -> Markup {
    html! {
        span.key { (words::name(topic)) }
        @if !destination.is_empty() { " " span.quiet { "to " (labels.shown(destination)) } }
    }
}

fn dead_count(dead: &DeadDepth) -> Markup {
    if dead.count == 0 {
        return number("0");
    }
    let of = [
        ("topic", dead.topic.as_str()),
        ("destination", &dead.destination),
    ];
    html! {
        a href=(super::link("/dead", &of)) {
            (words::count(dead.count, dead.is_estimate)) span.unseen { " dead letters of " (dead.topic) }
        }
    }
}
