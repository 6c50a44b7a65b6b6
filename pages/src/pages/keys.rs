//! Ordering keys: the blocked keys, and the messages of one key in order.

use diesel_outbox::Status as MessageStatus;
use diesel_outbox::program::{self, BlockedKey, KeptIn, MessageRecord};
use maud::{Markup, html};

use super::layout::section;
use super::messages::outcome;
use super::overview::name_of;
use super::table::{Column, Kind, table_or};
use super::{Refusal, Visit, link, words};
use crate::labels::Labels;
use crate::response::Response;

const MOST_KEYS: i64 = 100;
const MOST_MESSAGES: i64 = 200;

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let key = visit.form.get("key");
    let found = match key {
        Some(key) => one(visit, key)?,
        None => all(visit)?,
    };
    let content = html! {
        div.title {
            h1 { "Ordering keys" }
            p.quiet { "Messages with the same key are delivered one after another." }
        }
        form.panel.filter method="get" action="/keys" role="search" aria-label="Find an ordering key" {
            label.field.wide { "Ordering key" input name="key" value=(key.unwrap_or_default()); }
            div.do {
                button { "Show messages" }
                @if key.is_some() { a href="/keys" { "All blocked keys" } }
            }
        }
        (found)
    };
    Ok(visit.page("Keys").live(true).answer(&content))
}

/// The blocked keys with the most messages.
pub(super) fn blocked(visit: &Visit<'_>) -> anyhow::Result<Vec<BlockedKey>> {
    visit.run(&visit.site.searches, |conn, outbox| {
        program::blocked_keys(conn, outbox, MOST_KEYS)
    })
}

fn all(visit: &Visit<'_>) -> anyhow::Result<Markup> {
    let keys = blocked(visit)?;
    let columns = [
        Column("Key", Kind::Text),
        Column("Blocked by", Kind::Short),
        Column("Status", Kind::Plain),
        Column("Due in", Kind::Number),
        Column("Waiting", Kind::Number),
    ];
    let labels = Labels::of(visit, keys.iter().map(|key| key.destination.as_str()))?;
    let rows = keys.iter().map(|key| row(key, &labels));
    let list = html! {
        (table_or("No keys are blocked.", "Blocked keys", &columns, rows))
        @if keys.len() as i64 >= MOST_KEYS { p.none { "Only the " (MOST_KEYS) " keys with the most waiting messages are shown." } }
    };
    Ok(section("blocked", "Blocked keys", &list))
}

fn row(key: &BlockedKey, labels: &Labels) -> Vec<Markup> {
    let sequence = key.sequence;
    vec![
        html! {
            a.key href=(link("/keys", &[("key", &key.ordering_key)])) { (words::name(&key.ordering_key)) }
            @if !key.destination.is_empty() { " " span.quiet { "to " (labels.shown(&key.destination)) } }
        },
        html! {
            @if key.status == MessageStatus::Dead { a href={ "/dead/" (sequence) } { "#" (sequence) } }
            @else { a href={ "/messages?q=" (sequence) } { "#" (sequence) } }
        },
        html! {
            (outcome(key.status, key.reason.as_deref()))
            @if let Some(waits) = &key.waits { " " span.quiet { (words::with_times(waits)) } }
        },
        html! { (key.seconds_left.map_or("–".to_owned(), words::duration)) },
        html! { (words::count(key.waiting, false)) @if key.waiting_is_capped { "+" } },
    ]
}

fn one(visit: &Visit<'_>, key: &str) -> anyhow::Result<Markup> {
    let messages = visit.run(&visit.site.searches, |conn, outbox| {
        program::key_messages(conn, outbox, key, MOST_MESSAGES)
    })?;
    let columns = [
        Column("Message", Kind::Text),
        Column("Topic", Kind::Plain),
        Column("Status", Kind::Plain),
        Column("Attempts", Kind::Number),
        Column("Enqueued", Kind::Short),
    ];
    let labels = Labels::of(visit, messages.iter().map(|one| one.destination.as_str()))?;
    let rows = messages.iter().map(|one| message(one, &labels));
    Ok(html! {
        section.panel aria-labelledby="messages" {
            div.head { h2 id="messages" { "Messages of " span.key { (key) } ", in order" } }
            (table_or("This key has no waiting messages and no dead letters.", "Messages of the key", &columns, rows))
            @if messages.len() as i64 >= MOST_MESSAGES { p.none { "Only the first " (MOST_MESSAGES) " messages are shown." } }
        }
    })
}

fn message(record: &MessageRecord, labels: &Labels) -> Vec<Markup> {
    let sequence = record.sequence;
    vec![
        html! {
            @if record.kept_in == KeptIn::Dead { (words::sequence(&format!("/dead/{sequence}"), sequence)) }
            @else { (words::sequence(&link("/messages", &[("q", &record.idempotency_key)]), sequence)) }
        },
        name_of(&record.topic, &record.destination, labels),
        html! {
            (outcome(record.status, record.reason.as_deref()))
            @if record.blocks_key { " " span.badge.bad { "blocks its key" } }
        },
        html! { (record.attempts) },
        words::ago(&record.created_at),
    ]
}
