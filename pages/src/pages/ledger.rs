//! Search in the ledger, which records the outcome of each message.

use std::time::{Duration, SystemTime};

use diesel_outbox::program::{self, LedgerFilter, MessageRecord, Searched};
use maud::{Markup, html};

use super::asked::{Asked, Wrong};
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
pub(super) const NAMES: &[&str] = &[
    "topic",
    "destination",
    "status",
    "reason",
    "key",
    "tenant",
    "since",
    "until",
];

pub(super) fn filter(asked: Asked<'_>) -> Result<LedgerFilter, Wrong> {
    Ok(LedgerFilter {
        topic: asked.given("topic"),
        destination: asked.given("destination"),
        ordering_key: asked.given("key"),
        tenant_id: asked.tenant()?,
        status: asked.parsed("status")?,
        reason: asked.reason()?,
        since: asked.read("since", time)?,
        until: asked.read("until", time)?,
        ..LedgerFilter::default()
    })
}

/// Parses a time in UTC, as browser fields or people write it, or a duration before now.
fn time(text: &str) -> Result<Option<SystemTime>, String> {
    if let Ok(ago) = humantime::parse_duration(text) {
        return Ok(SystemTime::now().checked_sub(ago));
    }
    let zoned = text.trim_end_matches('Z');
    // Browser fields omit seconds that are zero.
    let seconds = if zoned.matches(':').count() == 1 {
        ":00"
    } else {
        ""
    };
    let days = if zoned.contains(':') { "" } else { "T00:00:00" };
    humantime::parse_rfc3339_weak(&format!("{zoned}{seconds}{days}"))
        .map(Some)
        .map_err(|_| {
            format!(
                "{text:?} is neither a time such as 2026-01-31T12:00 (UTC) nor a duration such as 2h"
            )
        })
}

/// A page of the ledger, and the place before which the next one ends.
pub(super) fn search(
    visit: &Visit<'_>,
    filter: &LedgerFilter,
    limit: usize,
) -> anyhow::Result<(Searched<MessageRecord>, Option<String>)> {
    let mut found = visit.run(&visit.site.searches, |conn, outbox| {
        program::ledger(conn, outbox, filter, as_limit(limit) + 1)
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
    let mut filter = match filter(asked) {
        Ok(filter) => filter,
        Err(error) => return Ok(page.refused(&error.what, &form(asked))),
    };
    filter.before = before;
    let began = SystemTime::now();
    let (found, next) = search(visit, &filter, PAGE)?;
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
    let rows: Vec<Vec<Markup>> = rows
        .iter()
        .map(|row| {
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
        })
        .collect();
    table_or("No messages match.", "Settled messages", &columns, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_and_browsers_write_them() {
        let read = |text: &str| time(text).expect("a time").expect("one is given");
        let noon = humantime::parse_rfc3339("2026-01-31T12:00:00Z").expect("a time");
        for text in [
            "2026-01-31T12:00",
            "2026-01-31T12:00:00",
            "2026-01-31 12:00:00Z",
        ] {
            assert_eq!(read(text), noon, "{text}");
        }
        assert_eq!(read("2026-01-31"), noon - Duration::from_secs(12 * 3600));
        let hours = read("2h").elapsed().expect("it is past").as_secs();
        assert!((7200..7260).contains(&hours), "{hours}");
        for bad in ["yesterday", "2026", "<b>", "31.1.2026", "12:00"] {
            assert!(time(bad).is_err(), "{bad}: {:?}", time(bad));
        }
    }
}
