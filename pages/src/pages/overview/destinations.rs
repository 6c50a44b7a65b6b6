//! Destinations and pauses, with buttons to pause and resume.

use diesel_outbox::admin::{Pausable, Pause};
use diesel_outbox::program;
use maud::{Markup, html};

use crate::history::Glance;
use crate::pages::layout::token;
use crate::pages::table::{Column, Kind, number, table};
use crate::pages::{Visit, words};
use crate::pause::{find, in_words};
use crate::{Guest, Site};

/// Rows of the table.
const MOST: usize = 100;

/// A row of the table: a destination, or a paused topic.
struct Place {
    kind: Pausable,
    name: String,
    /// Busy threads, all threads, and messages queued for a thread, in this process.
    work: Option<(usize, usize, usize)>,
    state: &'static str,
    /// Why the relay in this process cannot send, for a reason of its own.
    held: Option<String>,
}

pub(super) fn panel(visit: &Visit<'_>, glance: &Glance) -> Markup {
    let can_change = visit.guest.rights.act;
    let places = places(visit.site, &glance.pauses);
    let mut columns = vec![
        Column("Destination", Kind::Text),
        Column("State", Kind::Plain),
        Column("Busy threads", Kind::Number),
        Column("Queued", Kind::Number),
    ];
    if can_change {
        columns.push(Column("Pause or resume", Kind::Control));
    }
    let more = words::counted(
        i64::try_from(places.len().saturating_sub(MOST)).unwrap_or(i64::MAX),
        "other is paused",
        "others are paused",
    );
    let rows = places.iter().take(MOST).map(|place| {
        let pause = find(&glance.pauses, place.kind, &place.name);
        let mut row = vec![
            name(place, glance),
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
                Some(_) => resume_form(visit.guest, place),
                None => pause_form(visit.guest, place),
            });
        }
        row
    });
    html! {
        section.panel aria-labelledby="destinations" {
            div.head {
                h2 id="destinations" { "Destinations" }
                @if visit.site.relay.is_some() { p.quiet { "threads in this process" } }
            }
            @if places.is_empty() { p.none { "No destinations are configured in this process. The process of the relay has them." } }
            @else { (table("Destinations", &columns, rows)) }
            @if places.len() > MOST { p.none { "and " (more) } }
            @if can_change { (pause_by_name(visit.guest)) }
        }
    }
}

/// Destinations of the relay or of the settings, then all other paused destinations and topics.
fn places(site: &Site, pauses: &[Pause]) -> Vec<Place> {
    let place = |kind, name: &str| Place {
        kind,
        name: name.to_owned(),
        work: None,
        state: "flowing",
        held: None,
    };
    let mut places: Vec<Place> = match &site.relay {
        Some(relay) => program::destination_states(relay)
            .into_iter()
            // The destination without a name holds messages without a route.
            .filter(|one| !one.name.is_empty())
            .map(|one| Place {
                kind: Pausable::Destination,
                work: Some((one.busy, one.threads, one.queued)),
                state: one.state,
                held: program::held(relay, &one.name),
                name: one.name,
            })
            .collect(),
        None => {
            let all = program::all_destinations(&site.config);
            all.iter()
                .map(|one| place(Pausable::Destination, &one.name))
                .collect()
        }
    };
    for pause in pauses {
        let is_it = |place: &Place| place.kind == pause.kind && place.name == pause.name;
        if !places.iter().any(is_it) {
            places.push(place(pause.kind, &pause.name));
        }
    }
    places
}

/// The name, with the kind of what is no destination.
fn name(place: &Place, glance: &Glance) -> Markup {
    let tenant = || place.name.parse().ok().map(words::tenant);
    html! {
        @match (place.kind, tenant()) {
            (Pausable::Destination, _) => (glance.labels.shown(&place.name)),
            (Pausable::Tenant, Some(tenant)) => { span.quiet { "tenant " } (tenant) }
            (kind, _) => { span.quiet { (kind) " " } span.key { (words::name(&place.name)) } }
        }
    }
}

fn state(place: &Place, pause: Option<&Pause>) -> Markup {
    let Some(pause) = pause else {
        return match place.state {
            "flowing" if place.work.is_some() => html! { span.badge.good { "flowing" } },
            // Only the process of the relay knows whether messages are sent.
            "flowing" => html! { span.badge { "not paused" } },
            "trying" => {
                html! { span.badge { "ready" } " " span.quiet { "one trial message goes first" } }
            }
            _ if place.held.is_some() => held(place.held.as_deref()),
            other => html! { span.badge.wait { (other.replace('_', " ")) } },
        };
    };
    let is_breaker = pause.reason == "BREAKER_OPEN";
    html! {
        @if is_breaker { span.badge.bad { "breaker open" } }
        @else { span.badge.wait { "paused" } }
        " " (left(pause))
        @if !is_breaker { ": " (words::shortened(&in_words(&pause.reason), 200)) }
    }
}

/// Why the relay in this process cannot send to a destination. The destination itself has not failed.
pub(in crate::pages) fn held(why: Option<&str>) -> Markup {
    html! {
        @if let Some(why) = why {
            span.badge.wait { "held" } " " span.quiet { (words::shortened(why, 200)) }
        }
    }
}

/// How long a pause lasts, as the end of a sentence.
pub(super) fn left(pause: &Pause) -> String {
    match pause.left {
        None => "until resumed".to_owned(),
        Some(left) if left.is_zero() => "until the next trial message".to_owned(),
        Some(left) => format!("for another {}", words::duration(left.as_secs_f64().ceil())),
    }
}

fn resume_form(guest: &Guest, place: &Place) -> Markup {
    html! {
        form method="post" action="/resume" {
            (token(guest))
            input type="hidden" name="kind" value=(place.kind.as_str());
            input type="hidden" name="name" value=(place.name);
            button.second { "Resume" span.unseen { " " (place.name) } }
        }
    }
}

fn pause_form(guest: &Guest, place: &Place) -> Markup {
    html! {
        details.inline {
            summary { "Pause" span.unseen { " " (place.name) } "…" }
            form method="post" action="/pause" {
                (token(guest))
                input type="hidden" name="kind" value=(place.kind.as_str());
                input type="hidden" name="name" value=(place.name);
                (how())
                button { "Pause" span.unseen { " " (place.name) } }
            }
        }
    }
}

/// The fields for the reason and the duration.
fn how() -> Markup {
    html! {
        label.field { "Why" input name="reason" maxlength="200" placeholder="OPERATOR"; }
        label.field { "For how long" input name="for" maxlength="40" placeholder="10min or 2h; empty: until resumed"; }
    }
}

fn pause_by_name(guest: &Guest) -> Markup {
    html! {
        div.actions {
            details.inline {
                summary { "Pause a topic or destination by name…" }
                form method="post" action="/pause" {
                    (token(guest))
                    label.field { "Kind"
                        select name="kind" {
                            option value="topic" { "Topic" }
                            option value="destination" { "Destination" }
                        }
                    }
                    label.field { "Name" input name="name" maxlength="255" required; }
                    (how())
                    button { "Pause" }
                }
            }
        }
    }
}
