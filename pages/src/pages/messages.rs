//! The list of waiting messages, and everything known about one message, found by id, idempotency key or sequence.

pub(super) mod change;
mod history;
pub(super) mod waiting;

use std::time::{Duration, Instant};

use diesel_outbox::Status as MessageStatus;
use diesel_outbox::admin::WaitReason;
use diesel_outbox::program::{self, HistoryEntry, KeptIn, MessageKey, MessageRecord, Searched};
use http::StatusCode;
use maud::{Markup, html};

use self::history::{Part, steps};
use super::layout::section;
use super::overview::name_of;
use super::table::{Column, Kind, table};
use super::timeline::timeline;
use super::{Refusal, Visit, content, link, words};
use crate::Guest;
use crate::labels::Labels;
use crate::response::Response;

/// Rows whose payloads are shown: the rows of a fan-out share one payload.
const MOST_PAYLOADS: usize = 3;
/// Rows that can be changed on this page; others are found by their own sequence.
const MOST_CHANGED: usize = 10;
/// A slower search scans tables, so an open page does not repeat it.
pub(super) const QUICK: Duration = Duration::from_millis(500);

/// Everything known about a message.
pub(super) struct Found {
    pub(super) records: Searched<MessageRecord>,
    /// Why each record is not sent.
    pub(super) waits: Vec<Option<WaitReason>>,
    pub(super) history: Vec<HistoryEntry>,
}

/// Finds a message by id, idempotency key or sequence.
pub(super) fn find(visit: &Visit<'_>, q: &str) -> anyhow::Result<Found> {
    let key = MessageKey::Text(q.to_owned());
    visit.run(&visit.site.searches, |conn, outbox| {
        let records = program::message(conn, outbox, &key)?;
        Ok(Found {
            waits: program::wait_reasons_of(conn, outbox, &records.rows)?,
            history: program::history_of(conn, outbox, q, &records.rows)?,
            records,
        })
    })
}

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let q = visit.get("q");
    let mut page = visit.page("Messages");
    if q.is_empty() {
        let list = waiting::show(visit)?;
        if list.is_err() {
            page = page.status(StatusCode::BAD_REQUEST);
        }
        let content = html! {
            h1 { "Messages" }
            (form(q))
            p.quiet { "Find a message by its id (the id of the event at the receiver), its idempotency key or its sequence." }
            @match list {
                Ok(list) => (list),
                Err(error) => p.refused role="alert" { (error) },
            }
        };
        return Ok(page.answer(&content));
    }
    let began = Instant::now();
    let Found {
        records: found,
        waits,
        history,
    } = find(visit, q)?;
    let content = html! {
        h1 { "Messages" }
        (form(q))
        @if !found.is_complete {
            p.refused role="status" { "The search timed out: there may be more rows. A search by idempotency key is fast." }
        }
        @if found.rows.is_empty() && !history.is_empty() {
            section.panel aria-labelledby="history" {
                div.head { h2 id="history" { "History" } }
                div.body { (timeline(&steps(&[], &history))) }
            }
        } @else if found.rows.is_empty() {
            p role="status" { "No message found for " strong.key { (q) } ": it was never in this outbox, or its ledger row has expired." }
        } @else {
            (all(visit, &found.rows, &waits, &history)?)
        }
    };
    Ok(page.live(began.elapsed() < QUICK).answer(&content))
}

fn form(q: &str) -> Markup {
    html! {
        form.panel.filter method="get" action="/messages" role="search" aria-label="Find a message" {
            label.field.wide { "Message id, idempotency key or sequence" input name="q" value=(q) required; }
            div.do { button { "Find" } }
        }
    }
}

fn all(
    visit: &Visit<'_>,
    records: &[MessageRecord],
    waits: &[Option<WaitReason>],
    history: &[HistoryEntry],
) -> anyhow::Result<Markup> {
    let guest = visit.guest;
    let shown = records.iter().zip(waits);
    let shown = shown.filter(|(one, _)| !crate::message::is_said_by_a_dead_letter(one, records));
    let (records, waits): (Vec<&MessageRecord>, Vec<&Option<WaitReason>>) = shown.unzip();
    let parts: Vec<Part> = records
        .iter()
        .copied()
        .map(|one| Part::of(one, history))
        .collect();
    let payloads = records.iter().filter(|record| record.payload.is_some());
    let labels = Labels::of(visit, records.iter().map(|one| one.destination.as_str()))?;
    let rows = records.iter().zip(waits);
    let rows = rows.map(|(record, waits)| row(record, waits, &labels));
    Ok(html! {
        (section("rows", "Current state", &table("Current state", &COLUMNS, rows)))
        div.columns {
            @if let Some(first) = records.first() { (facts(first)) }
            section.panel aria-labelledby="history" {
                div.head { h2 id="history" { "History" } }
                div.body { (timeline(&steps(&parts, history))) }
            }
        }
        @if guest.rights.act {
            @for record in records.iter().take(MOST_CHANGED) { (change::actions(guest, record)) }
        }
        @for record in payloads.take(MOST_PAYLOADS) { (payload(guest, record)) }
    })
}

fn facts(record: &MessageRecord) -> Markup {
    html! {
        section.panel aria-labelledby="facts" {
            div.head { h2 id="facts" { "The message" } }
            div.body {
                dl.facts {
                    dt { "Topic" } dd.key { (record.topic) }
                    dt { "Message id" } dd.key { (record.message_id) }
                    dt { "Idempotency key" } dd.key { (record.idempotency_key) }
                    @if let Some(key) = &record.ordering_key {
                        dt { "Ordering key" }
                        dd { a.key href=(link("/keys", &[("key", key)])) { (key) } }
                    }
                    @if let Some(tenant) = record.tenant_id { dt { "Tenant" } dd { (words::tenant(tenant)) } }
                    dt { "Enqueued" } dd { (words::moment(&record.created_at)) }
                    @if let Some(time) = &record.occurred_at { dt { "Occurred" } dd { (words::moment(time)) } }
                    @if let Some(expires) = &record.expires_at { dt { "Expires" } dd { (words::time(expires)) } }
                }
            }
        }
    }
}

const COLUMNS: [Column; 6] = [
    Column("Message", Kind::Text),
    Column("Status", Kind::Plain),
    Column("Stored in", Kind::Short),
    Column("Attempts", Kind::Number),
    Column("Response", Kind::Text),
    Column("Settled", Kind::Short),
];

fn row(record: &MessageRecord, waits: &Option<WaitReason>, labels: &Labels) -> Vec<Markup> {
    let sequence = record.sequence;
    let reason = besides(record.status, record.reason.as_deref());
    vec![
        html! {
            @if record.kept_in == KeptIn::Dead { (words::sequence(&format!("/dead/{sequence}"), sequence)) }
            @else { span.short { "#" (sequence) } }
            @if let Some(whole) = record.split_from { span.quiet { ", fanned out from #" (whole) } }
            @if record.replay_of().is_some() { span.quiet { ", a replay" } }
            " " (name_of(&record.topic, &record.destination, labels))
        },
        html! {
            (badge(record.status))
            @if let Some(waits) = waits { " " span.quiet { (words::with_times(&waits.to_string())) } }
        },
        html! { (kept_in(record.kept_in)) },
        html! { (record.attempts) },
        html! {
            @if let Some(status) = record.http_status { "HTTP " (status) " " }
            @if let Some(reason) = reason { span.short { (reason) } " " }
            @if let Some(error) = &record.last_error { span.error { (words::shortened(error, 160)) } }
            @if record.http_status.is_none() && reason.is_none() && record.last_error.is_none() { "–" }
        },
        html! { @match &record.settled_at { Some(at) => (words::ago(at)), None => "–" } },
    ]
}

fn kept_in(table: KeptIn) -> &'static str {
    match table {
        KeptIn::Live => "the outbox",
        KeptIn::Dead => "dead letters",
        KeptIn::Ledger => "the ledger",
    }
}

/// A status with its colour.
pub(super) fn badge(status: MessageStatus) -> Markup {
    let class = match status {
        MessageStatus::Delivered => "badge good",
        MessageStatus::Dead => "badge bad",
        MessageStatus::Retrying | MessageStatus::NoSubscriber => "badge wait",
        _ => "badge",
    };
    html! { span class=(class) { (status) } }
}

/// A reason that says more than the status.
fn besides(status: MessageStatus, reason: Option<&str>) -> Option<&str> {
    reason.filter(|reason| !reason.eq_ignore_ascii_case(status.as_str()))
}

/// A status with its colour, and the reason.
pub(super) fn outcome(status: MessageStatus, reason: Option<&str>) -> Markup {
    html! {
        (badge(status))
        @if let Some(reason) = besides(status, reason) { " " span.short { (reason) } }
    }
}

fn payload(guest: &Guest, record: &MessageRecord) -> Markup {
    let name = match record.destination.as_str() {
        "" => format!("Payload of #{}", record.sequence),
        destination => format!("Payload of #{} to {destination}", record.sequence),
    };
    html! {
        section.panel {
            div.head {
                h2 { (name) }
                (content::hint(guest))
            }
            div.body {
                (content::json(guest, &name, record.payload.as_deref().unwrap_or_default()))
                @if let Some(headers) = &record.headers {
                    h3 { "Headers" }
                    (content::json(guest, "Headers", headers))
                }
                @if let Some(response) = &record.response {
                    h3 { "Start of the last response" }
                    (content::text(guest, response))
                }
            }
        }
    }
}
