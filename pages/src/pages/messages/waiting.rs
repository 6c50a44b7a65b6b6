//! The list of waiting messages.

use diesel_outbox::admin::{Selection, WaitReason};
use diesel_outbox::program::{self, Chosen, MessageRecord, Searched};
use diesel_outbox::{ReasonCode, Status as MessageStatus};
use maud::{Markup, html};

use super::outcome;
use crate::Guest;
use crate::labels::Labels;
use crate::pages::asked::{Asked, Wrong};
use crate::pages::layout::{act, list};
use crate::pages::overview::name_of;
use crate::pages::table::{Column, Kind, table_or};
use crate::pages::{Refusal, Visit, as_limit, link, next_page, words};
use crate::request::Form;

/// Messages per page.
const PAGE: usize = 50;
const STATES: [MessageStatus; 3] = [
    MessageStatus::Pending,
    MessageStatus::Sending,
    MessageStatus::Retrying,
];

/// The fields of the filter.
pub(in crate::pages) const NAMES: &[&str] = Chosen::NAMES;

pub(in crate::pages) fn selection(form: &Form) -> Result<Selection, Wrong> {
    Asked::of(form, NAMES).of_waiting()
}

/// Waiting messages, why each is not sent, and the place after which the next page begins.
type Waiting = (
    Searched<MessageRecord>,
    Vec<Option<WaitReason>>,
    Option<String>,
);

pub(in crate::pages) fn search(
    visit: &Visit<'_>,
    selection: &Selection,
    limit: usize,
) -> anyhow::Result<Waiting> {
    visit.run(&visit.site.searches, |conn, outbox| {
        let mut found = program::waiting(conn, outbox, selection, as_limit(limit) + 1)?;
        let next = next_page(&mut found.rows, limit, |last| last.place().to_string());
        let waits = program::wait_reasons_of(conn, outbox, &found.rows)?;
        Ok((found, waits, next))
    })
}

/// The list, and the error of a wrong filter.
pub(super) fn show(visit: &Visit<'_>) -> Result<Result<Markup, String>, Refusal> {
    let (asked, after) = (
        Asked::of(visit.form, NAMES),
        Asked::of(visit.form, &["after"]),
    );
    let selection = selection(visit.form)
        .and_then(|selection| Ok(program::behind(selection, after.parsed("after")?)));
    let selection = match selection {
        Ok(selection) => selection,
        Err(wrong) => return Ok(Err(wrong.what)),
    };
    let (found, waits, next) = search(visit, &selection, PAGE)?;
    let content = match found.is_complete {
        false => {
            let why = "The search stopped after 2 s: few messages match. Filter by topic, destination or ordering key.";
            html! { p.none role="status" { (why) } }
        }
        true => rows(visit, &found.rows, &waits)?,
    };
    let fields = html! {
        (asked.field("Topic", "topic"))
        (asked.field("Destination", "destination"))
        (asked.field("Tenant", "tenant"))
        (asked.field("Ordering key", "key"))
        (asked.choice("Status", "status", STATES.map(MessageStatus::as_str)))
        (asked.choice("Last error", "reason", ReasonCode::ALL.iter().map(|reason| reason.as_str())))
        (asked.field("Enqueued since", "since"))
        (asked.field("Enqueued before", "until"))
    };
    Ok(Ok(html! {
        (asked.form("/messages", "List waiting messages", "List", &fields))
        (list(
            ("waiting", "Waiting messages, next due first"),
            (!after.is_empty()).then(|| asked.link("/messages", &[])),
            &content,
            next.map(|next| ("Later", asked.link("/messages", &[("after", &next)]))),
        ))
        @if visit.guest.rights.act { (change_all(visit.guest, asked)) }
    }))
}

/// The forms that change all messages of the list.
fn change_all(guest: &Guest, asked: Asked<'_>) -> Markup {
    let why = html! { label.field { "Why" input name="why" maxlength="400"; } };
    let retry = html! {
        (why) button.second { "Retry…" }
        span.quiet { "Messages that wait after a failed attempt become due at once." }
    };
    let cancel = html! { (why) button.danger { "Cancel…" } };
    html! {
        section.panel {
            div.head { h2 { "Change all that match" } }
            div.body {
                (act(guest, "/messages/retry", &asked.pairs(), &retry))
                (act(guest, "/messages/cancel", &asked.pairs(), &cancel))
            }
        }
    }
}

pub(in crate::pages) fn rows(
    visit: &Visit<'_>,
    records: &[MessageRecord],
    waits: &[Option<WaitReason>],
) -> anyhow::Result<Markup> {
    let labels = Labels::of(visit, records.iter().map(|row| row.destination.as_str()))?;
    let columns = [
        Column("Message", Kind::Text),
        Column("Topic", Kind::Plain),
        Column("Status", Kind::Plain),
        Column("Attempts", Kind::Number),
        Column("Due", Kind::Short),
    ];
    let row = |(record, waits): (&MessageRecord, &Option<WaitReason>)| {
        let sequence = record.sequence.to_string();
        vec![
            html! {
                (words::sequence(&link("/messages", &[("q", &sequence)]), &sequence))
                @if let Some(key) = &record.ordering_key { " " span.quiet { "key " (words::shortened(key, 60)) } }
            },
            name_of(&record.topic, &record.destination, &labels),
            html! {
                (outcome(record.status, record.reason.as_deref()))
                // The last column says when it is due.
                @if let Some(waits) = waits.as_ref().filter(|waits| !matches!(waits, WaitReason::NotDue { .. })) {
                    " " span.quiet { (words::with_times(&waits.to_string())) }
                }
                @if let Some(error) = &record.last_error { " " span.error { (words::shortened(error, 160)) } }
            },
            html! { (record.attempts) },
            html! { @match &record.available_at { Some(at) => (words::time(at)), None => "–" } },
        ]
    };
    let rows = records.iter().zip(waits).map(row);
    let none = "No waiting messages match.";
    Ok(table_or(none, "Waiting messages", &columns, rows))
}
