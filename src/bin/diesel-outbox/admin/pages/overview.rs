//! The first page: whether messages flow, and if not, why.

mod verdict;

use std::sync::Arc;

use diesel_outbox::admin::{Pausable, Pause, Rates};
use maud::{Markup, html};

use self::verdict::Verdict;
use super::layout::{Page, token};
use super::sparkline::{a_minute, sparkline};
use super::table::{Column, Kind, number, table};
use super::{relays, words};
use crate::admin::history::Glance;
use crate::admin::http::Status;
use crate::admin::{Request, Response, Site, Visitor};

/// Topics that are listed, the ones with the most trouble first.
const MOST_LANES: usize = 100;

pub(super) fn show(site: &Site, visitor: &Visitor, request: &Request) -> Response {
    let (glance, error) = site.glance();
    let rates = glance
        .as_ref()
        .and_then(|glance| site.history.rates(glance));
    let verdict = Verdict::of(site, glance.as_deref(), rates, error.as_deref());
    let page = Page {
        site,
        visitor,
        request,
        title: verdict.state.as_str(),
        is_live: true,
    };
    let status = if error.is_some() {
        Status::Unavailable
    } else {
        Status::Ok
    };
    let content = html! {
        (verdict.shown())
        @if let Some(glance) = &glance {
            (figures(site, glance, rates))
            (lanes(glance))
            (destinations(site, visitor, glance))
            (relays::panel(&glance.leases))
        }
    };
    page.answer(status, &content)
}

/// Numbers and curves.
fn figures(site: &Site, glance: &Arc<Glance>, rates: Option<Rates>) -> Markup {
    let depths = &glance.depths;
    let curves = site.history.curves();
    let shown = |rate: Option<f64>| rate.map_or("–".to_owned(), words::per_minute);
    let number = |count: i64| words::count(count, depths.is_estimate);
    let oldest = glance.oldest_due_seconds();
    let dead = depths.dead_letters();
    let plain = |value: f64| words::amount(value);
    html! {
        ul.figures aria-label="Numbers" {
            li.panel.figure {
                span.label { "Came in" }
                span.value { (shown(rates.map(|rates| rates.enqueued))) " " small { "/ min" } }
                span.parts { "enqueued and requeued" }
                (sparkline("in", "Messages that came in", curves.span, &curves.enqueued, a_minute))
            }
            li.panel.figure {
                span.label { "Settled" }
                span.value { (shown(rates.map(|rates| rates.settled))) " " small { "/ min" } }
                span.parts { (shown(rates.map(|rates| (rates.settled - rates.died).max(0.0)))) " delivered a minute" }
                (sparkline("out", "Messages that were settled", curves.span, &curves.settled, a_minute))
            }
            li.panel.figure {
                span.label { "Waiting" }
                span.value { (number(depths.pending() + depths.retrying())) }
                span.parts {
                    (number(depths.pending())) " pending, " (number(depths.sending())) " sending, "
                    (number(depths.retrying())) " retrying"
                }
                (sparkline("waiting", "Messages that waited", curves.span, &curves.waiting, plain))
            }
            li.panel.figure.alarm[oldest.is_some_and(|seconds| seconds > verdict::LATE_SECONDS)] {
                span.label { "Oldest due" }
                span.value { (oldest.map_or("–".to_owned(), words::duration)) }
                span.parts { @if oldest.is_some() { "due, and not claimed" } @else { "nothing is due" } }
                (sparkline("oldest", "Age of the oldest due message", curves.span, &curves.oldest_due_seconds, words::duration))
            }
            li.panel.figure.alarm[dead > 0] {
                span.label { "Dead letters" }
                span.value { @if dead > 0 { a href="/dead" { (number(dead)) } } @else { "0" } }
                span.parts { (shown(rates.map(|rates| rates.died))) " died a minute" }
                (sparkline("dead", "Messages that died", curves.span, &curves.died, a_minute))
            }
        }
    }
}

/// Everything that waits, by topic and destination.
fn lanes(glance: &Glance) -> Markup {
    let depths = &glance.depths;
    let dead_of = |topic: &str, destination: &str| {
        let same = |dead: &&diesel_outbox::admin::DeadDepth| {
            dead.topic == topic && dead.destination == destination
        };
        depths.dead.iter().find(same)
    };
    let mut rows: Vec<(f64, i64, Vec<Markup>)> = Vec::new();
    for lane in &depths.lanes {
        let shown = |count: i64| words::count(count, lane.is_estimate);
        let dead = dead_of(&lane.topic, &lane.destination);
        let oldest = lane.oldest_due_seconds;
        rows.push((
            oldest.unwrap_or(-1.0),
            lane.pending + lane.retrying,
            vec![
                name_of(&lane.topic, &lane.destination),
                number(&shown(lane.pending)),
                number(&shown(lane.sending)),
                number(&shown(lane.retrying)),
                dead_count(
                    &lane.topic,
                    &lane.destination,
                    dead.map(|dead| (dead.count, dead.is_estimate)),
                ),
                number(&oldest.map_or("–".to_owned(), words::duration)),
            ],
        ));
    }
    for dead in &depths.dead {
        let is_live = |lane: &diesel_outbox::admin::LaneDepth| {
            lane.topic == dead.topic && lane.destination == dead.destination
        };
        if !depths.lanes.iter().any(is_live) {
            rows.push((
                -2.0,
                dead.count,
                vec![
                    name_of(&dead.topic, &dead.destination),
                    number("0"),
                    number("0"),
                    number("0"),
                    dead_count(
                        &dead.topic,
                        &dead.destination,
                        Some((dead.count, dead.is_estimate)),
                    ),
                    number("–"),
                ],
            ));
        }
    }
    rows.sort_by(|one, other| other.0.total_cmp(&one.0).then(other.1.cmp(&one.1)));
    let more = rows.len().saturating_sub(MOST_LANES);
    let rows: Vec<Vec<Markup>> = rows.into_iter().map(|row| row.2).take(MOST_LANES).collect();
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
                @if depths.is_estimate { p.quiet { "~ marks estimates: there is much" } }
            }
            @if rows.is_empty() { p.none { "Nothing waits, and nothing is dead." } }
            @else { (table("Topics", &columns, &rows)) }
            @if more > 0 { p.none { "and " (words::counted(more as i64, "other topic", "other topics")) " with less trouble" } }
        }
    }
}

/// A topic, and the destination that its messages name.
pub(super) fn name_of(topic: &str, destination: &str) -> Markup {
    html! {
        span.key { (topic) }
        @if !destination.is_empty() { " " span.quiet { "to " (destination) } }
    }
}

fn dead_count(topic: &str, destination: &str, count: Option<(i64, bool)>) -> Markup {
    match count {
        None | Some((0, _)) => number("0"),
        Some((count, is_estimate)) => html! {
            a href=(super::link("/dead", &[("topic", topic), ("destination", destination)])) {
                (words::count(count, is_estimate)) span.unseen { " dead letters of " (topic) }
            }
        },
    }
}

/// A destination, or a topic that is paused, as the table shows it.
struct Place {
    kind: Pausable,
    name: String,
    /// Busy and all threads, and how many messages wait for one; of this process.
    work: Option<(usize, usize, usize)>,
    state: &'static str,
}

fn destinations(site: &Site, visitor: &Visitor, glance: &Glance) -> Markup {
    let can_change = !site.config.admin.read_only;
    let places = places(site, &glance.pauses);
    let mut columns = vec![
        Column("Destination", Kind::Text),
        Column("State", Kind::Text),
        Column("Threads busy", Kind::Number),
        Column("Queued", Kind::Number),
    ];
    if can_change {
        columns.push(Column("Pause or resume", Kind::Control));
    }
    let rows: Vec<Vec<Markup>> = places
        .iter()
        .map(|place| {
            let pause = find(&glance.pauses, place.kind, &place.name);
            let mut row = vec![
                html! {
                    @if place.kind == Pausable::Topic { span.quiet { "topic " } }
                    span.key { (place.name) }
                },
                state(place, pause),
                number(&place.work.map_or("–".to_owned(), |(busy, threads, _)| {
                    format!("{busy} of {threads}")
                })),
                number(&place.work.map_or("–".to_owned(), |(_, _, queued)| {
                    words::count(queued as i64, false)
                })),
            ];
            if can_change {
                row.push(match pause {
                    Some(_) => resume_form(visitor, place),
                    None => pause_form(visitor, place),
                });
            }
            row
        })
        .collect();
    html! {
        section.panel aria-labelledby="destinations" {
            div.head {
                h2 id="destinations" { "Destinations" }
                @if site.relay.is_some() { p.quiet { "threads of this process" } }
            }
            @if rows.is_empty() { p.none { "This process has no destinations: they are set where the relay runs." } }
            @else { (table("Destinations", &columns, &rows)) }
            @if can_change { (pause_by_name(visitor)) }
        }
    }
}

/// What is set or paused: destinations of the relay's or of the settings, then whatever else is paused.
fn places(site: &Site, pauses: &[Pause]) -> Vec<Place> {
    let place = |kind, name: &str| Place {
        kind,
        name: name.to_owned(),
        work: None,
        state: "flowing",
    };
    let mut places: Vec<Place> = match &site.relay {
        Some(relay) => relay
            .destinations()
            .into_iter()
            // The one without a name is for what nothing serves.
            .filter(|one| !one.name.is_empty())
            .map(|one| Place {
                kind: Pausable::Destination,
                work: Some((one.busy, one.threads, one.queued)),
                state: one.state,
                name: one.name,
            })
            .collect(),
        None => {
            let all = site.config.all_destinations();
            all.iter()
                .map(|one| place(Pausable::Destination, &one.name))
                .collect()
        }
    };
    for pause in pauses {
        let kind = match pause.kind.as_str() {
            "topic" => Pausable::Topic,
            _ => Pausable::Destination,
        };
        if !places
            .iter()
            .any(|place| place.kind == kind && place.name == pause.name)
        {
            places.push(place(kind, &pause.name));
        }
    }
    places
}

fn find<'a>(pauses: &'a [Pause], kind: Pausable, name: &str) -> Option<&'a Pause> {
    crate::pauses::find(pauses, kind, name)
}

fn state(place: &Place, pause: Option<&Pause>) -> Markup {
    let Some(pause) = pause else {
        return match place.state {
            "flowing" => html! { span.badge.good { "open" } },
            other => html! { span.badge.wait { (other.replace('_', " ")) } },
        };
    };
    let is_breaker = pause.reason == "BREAKER_OPEN";
    html! {
        @if is_breaker { span.badge.bad { "breaker open" } }
        @else { span.badge.wait { "paused" } " " (words::shortened(&pause.reason, 200)) }
        " " span.quiet { (left(pause)) }
    }
}

/// For how long a pause lasts.
pub(super) fn left(pause: &Pause) -> String {
    match pause.left {
        None => "until it is resumed".to_owned(),
        Some(left) if left.is_zero() => "one message is tried next".to_owned(),
        Some(left) => format!("for another {}", words::duration(left.as_secs_f64().ceil())),
    }
}

fn resume_form(visitor: &Visitor, place: &Place) -> Markup {
    html! {
        form method="post" action="/resume" {
            (token(visitor))
            input type="hidden" name="kind" value=(place.kind.as_str());
            input type="hidden" name="name" value=(place.name);
            button.second { "Resume" span.unseen { " " (place.name) } }
        }
    }
}

fn pause_form(visitor: &Visitor, place: &Place) -> Markup {
    html! {
        details.inline {
            summary { "Pause" span.unseen { " " (place.name) } "…" }
            form method="post" action="/pause" {
                (token(visitor))
                input type="hidden" name="kind" value=(place.kind.as_str());
                input type="hidden" name="name" value=(place.name);
                (how())
                button { "Pause" span.unseen { " " (place.name) } }
            }
        }
    }
}

/// Why, and for how long.
fn how() -> Markup {
    html! {
        label.field { "Why" input name="reason" maxlength="200" placeholder="OPERATOR"; }
        label.field { "For how long" input name="for" maxlength="40" placeholder="until it is resumed; or 10min, 2h"; }
    }
}

fn pause_by_name(visitor: &Visitor) -> Markup {
    html! {
        div.actions {
            details.inline {
                summary { "Pause a topic, or a destination by its name…" }
                form method="post" action="/pause" {
                    (token(visitor))
                    label.field { "What"
                        select name="kind" {
                            option value="topic" { "Topic" }
                            option value="destination" { "Destination" }
                        }
                    }
                    label.field { "Its name" input name="name" maxlength="255" required; }
                    (how())
                    button { "Pause" }
                }
            }
        }
    }
}
