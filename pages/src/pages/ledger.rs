//! Search in the ledger, which records the outcome of each message.

use std::time::{Duration, SystemTime};

use diesel_outbox::admin::Selection;
use diesel_outbox::program::{self, Chosen, MessageRecord, Searched};
use maud::{Markup, html};

use super::asked::Asked;
use super::layout::list;
use super::messages::outcome;
use super::overview::name_of;
use super::table::{Column, Kind, table_or};
use super::{Refusal, Visit, as_limit, link, next_page, words};
use crate::labels::Labels;
use crate::response::Response;

/// Rows per page.
const PAGE: usize = 50;

/// The fields of the filter.
pub(super) const NAMES: &[&str] = Chosen::NAMES;

/// A page of the ledger, and the place before which the next one ends.
pub(super) fn search(
    visit: &Visit<'_>,
    selection: &Selection,
    limit: usize,
) -> anyhow::Result<(Searched<MessageRecord>, Option<String>)> {
    let mut found = visit.run(&visit.site.searches, |conn, outbox| {
        program::ledger(conn, outbox, selection, as_limit(limit) + 1)
    })?;
    let next = next_page(&mut found.rows, limit, |last| last.place().to_string());
    Ok((found, next))
}

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let asked = Asked::of(visit.form, NAMES);
    let before = visit
        .form
        .get("before")
        .and_then(|place| place.parse().ok());
    let page = visit.page("Ledger");
    let selection = match asked.selection() {
        Ok(selection) => selection,
        Err(error) => return Ok(page.refused(&error.what, &form(asked))),
    };
    let selection = program::behind(selection, before);
    let began = SystemTime::now();
    let (found, next) = search(visit, &selection, PAGE)?;
    let took = began.elapsed().unwrap_or(Duration::ZERO);
    let labels = Labels::of(visit, found.rows.iter().map(|row| row.destination.as_str()))?;
    let rows = html! {
        @if !found.is_complete {
            p.none role="status" {
                "Results may be incomplete: the search stopped after " (words::duration(took.as_secs_f64()))
                ", or many rows are being written. A time range makes the search faster."
            }
        }
        (rows(&found.rows, &labels))
    };
    let content = html! {
        div.title {
            h1 { "Ledger" }
            p.quiet { "The outcome of each settled message, kept for the retention period." }
        }
        (form(asked))
        (list(
            ("rows", "Settled messages, latest first"),
            before.map(|_| asked.link("/ledger", &[])),
            &rows,
            next.map(|next| ("Older", asked.link("/ledger", &[("before", &next)]))),
        ))
    };
    Ok(page.answer(&content))
}

fn form(asked: Asked<'_>) -> Markup {
    let fields = html! {
        (asked.field("Topic", "topic"))
        (asked.field("Destination", "destination"))
        (asked.choice("Status", "status", ["delivered", "no_subscriber", "dead"]))
        label.field { "Reason" input name="reason" value=(asked.get("reason")) placeholder="of dead letters"; }
        (asked.field("Ordering key", "key"))
        (asked.field("Tenant", "tenant"))
        label.field { "Since, UTC" input name="since" value=(asked.get("since")) placeholder="2h or 2026-01-31"; }
        label.field { "Until, UTC" input name="until" value=(asked.get("until")) placeholder="1h or 2026-01-31"; }
    };
    asked.form("/ledger", "Search the ledger", "Search", &fields)
}

fn rows(rows: &[MessageRecord], labels: &Labels) -> Markup {
    let columns = [
        Column("Message", Kind::Text),
        Column("Topic", Kind::Plain),
        Column("Status", Kind::Plain),
        Column("Attempts", Kind::Number),
        Column("Took", Kind::Number),
        Column("Settled", Kind::Short),
    ];
    let rows = rows.iter().map(|row| {
        let settled_at = row.settled_at.as_deref().unwrap_or_default();
        let took = words::seconds_between(&row.created_at, settled_at);
        vec![
            html! {
                a.key href=(link("/messages", &[("q", &row.idempotency_key)])) {
                    (words::shortened(&row.idempotency_key, 60))
                }
            },
            name_of(&row.topic, &row.destination, labels),
            html! {
                (outcome(row.status, row.reason.as_deref()))
                @if let Some(error) = &row.last_error { span.error { (words::shortened(error, 160)) } }
            },
            html! { (row.attempts) },
            html! { (took.map_or("–".to_owned(), words::duration)) },
            words::ago(settled_at),
        ]
    });
    table_or("No messages match.", "Settled messages", &columns, rows)
}
