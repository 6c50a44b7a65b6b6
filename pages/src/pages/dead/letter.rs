//! The page of one dead letter.

use diesel_outbox::admin::LetterId;
use diesel_outbox::program::{self, MessageRecord};
use maud::{Markup, html};

use crate::Guest;
use crate::labels::Labels;
use crate::pages::layout::act;
use crate::pages::overview::name_of;
use crate::pages::timeline::{Step, timeline};
use crate::pages::{Refusal, Visit, content, link, missing, words};
use crate::response::Response;

/// A sequence, and the message id if the path has it: `42` or `42.0198b2f1-…`. A sequence may be used again.
pub(in crate::pages) type Which = (i64, Option<LetterId>);

pub(in crate::pages) fn which(path: &str) -> Option<Which> {
    let letter: Option<LetterId> = path.parse().ok();
    match letter {
        Some(letter) => Some((letter.sequence.0, Some(letter))),
        None => Some((path.parse().ok()?, None)),
    }
}

/// The dead letters of this sequence, or only this one, with their payloads.
pub(in crate::pages) fn find(
    visit: &Visit<'_>,
    (sequence, letter): Which,
) -> anyhow::Result<Vec<MessageRecord>> {
    let found = visit.run(&visit.site.database, |conn, outbox| {
        program::dead_letters_at(conn, outbox, sequence)
    });
    let is_meant = |one: &MessageRecord| letter.is_none_or(|letter| one.id() == letter);
    found.map(|found| found.into_iter().filter(is_meant).collect())
}

pub(in crate::pages) fn show(
    visit: &Visit<'_>,
    (sequence, letter): Which,
) -> Result<Response, Refusal> {
    let letters = find(visit, (sequence, letter))?;
    let letter = match letters.as_slice() {
        [letter] => letter,
        [_, ..] => {
            let words = format!("Several dead letters have the sequence {sequence}.");
            let each = letters.iter();
            let more = html! {
                ul { @for one in each { li { a href={ "/dead/" (one.id()) } { (one.message_id) } " " (one.topic) } } }
            };
            return Ok(missing(visit, &words, &more));
        }
        [] => {
            let words = format!(
                "There is no dead letter {sequence}: it was requeued, was discarded, or never existed."
            );
            let messages = format!("/messages?q={sequence}");
            let more = html! { p { a href=(messages) { "Find message " (sequence) } } };
            return Ok(missing(visit, &words, &more));
        }
    };
    let title = format!("Dead letter {sequence}");
    let labels = Labels::of(visit, std::iter::once(letter.destination.as_str()))?;
    let body = html! {
        div.title {
            h1 { "Dead letter " span.key { "#" (sequence) } }
            p { a href="/dead" { "All dead letters" } }
        }
        @if visit.guest.rights.act { (actions(visit.guest, letter)) }
        div.columns {
            (facts(letter, &labels))
            (history(visit.guest, letter))
        }
        (contents(visit.guest, letter))
    };
    Ok(visit.page(&title).answer(&body))
}

fn facts(letter: &MessageRecord, labels: &Labels) -> Markup {
    let messages = |q: &str| link("/messages", &[("q", q)]);
    let id = letter.message_id.to_string();
    html! {
        section.panel aria-labelledby="facts" {
            div.head { h2 id="facts" { "The message" } }
            div.body {
                dl.facts {
                    dt { "Topic" } dd { (name_of(&letter.topic, &letter.destination, labels)) }
                    dt { "Reason" } dd { span.badge.bad { (letter.reason.as_deref().unwrap_or_default()) } }
                    dt { "Last error" } dd { (letter.last_error.as_deref().unwrap_or("none")) }
                    @if let Some(status) = letter.http_status { dt { "Response" } dd { "HTTP " (status) } }
                    dt { "Message id" } dd { a.key href=(messages(&id)) { (id) } }
                    dt { "Idempotency key" }
                    dd { a.key href=(messages(&letter.idempotency_key)) { (letter.idempotency_key) } }
                    @if let Some(key) = &letter.ordering_key {
                        dt { "Ordering key" }
                        dd { a.key href=(link("/keys", &[("key", key)])) { (key) } }
                    }
                    @if let Some(time) = &letter.occurred_at { dt { "Occurred" } dd { (words::moment(time)) } }
                }
            }
        }
    }
}

fn history(guest: &Guest, letter: &MessageRecord) -> Markup {
    let mut steps = vec![Step::new(
        "idle",
        "Enqueued",
        Some(&letter.created_at),
        String::new(),
    )];
    if letter.attempts > 0 {
        let attempts = words::counted(i64::from(letter.attempts), "attempt", "attempts");
        let error = letter.last_error.clone().unwrap_or_default();
        steps.push(Step::new(
            "wait",
            &format!("{attempts} failed"),
            None,
            error,
        ));
    }
    let end = format!(
        "Dead-lettered: {}",
        letter.reason.as_deref().unwrap_or_default()
    );
    steps.push(Step::new(
        "bad",
        &end,
        letter.settled_at.as_deref(),
        String::new(),
    ));
    html! {
        section.panel aria-labelledby="history" {
            div.head { h2 id="history" { "History" } }
            div.body {
                (timeline(&steps))
                @if let Some(response) = &letter.response {
                    h3 { "Start of the last response" }
                    (content::text(guest, response))
                }
            }
        }
    }
}

fn contents(guest: &Guest, letter: &MessageRecord) -> Markup {
    html! {
        section.panel aria-labelledby="payload" {
            div.head {
                h2 id="payload" { "Payload" }
                (content::hint(guest))
            }
            div.body {
                (content::json(guest, "Payload", letter.payload.as_deref().unwrap_or_default()))
                @if let Some(headers) = &letter.headers {
                    h3 { "Headers" }
                    (content::json(guest, "Headers", headers))
                }
            }
        }
    }
}

fn actions(guest: &Guest, letter: &MessageRecord) -> Markup {
    let id = letter.id().to_string();
    let about = [
        ("letter", id.as_str()),
        ("message", &letter.idempotency_key),
    ];
    let buttons = html! {
        button { "Requeue" }
        button.danger formaction="/dead/discard" { "Discard…" }
        span.quiet { "Requeueing makes the message due at once and resets its attempts." }
    };
    act(guest, "/dead/requeue", &about, &buttons)
}
