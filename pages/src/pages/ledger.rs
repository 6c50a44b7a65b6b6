//! Search in the ledger, which records the outcome of each message.

use std::time::{Duration, SystemTime};

use diesel_outbox::program::{self, LedgerFilter, LedgerRow, Searched};
use diesel_outbox::{ReasonCode, Status as MessageStatus};
use http::StatusCode;
use maud::{Markup, html};

use super::messages::badge;
use super::overview::name_of;
use super::table::{Column, Kind, table};
use super::{as_limit, database_away, link, next_page, plain, words};
use crate::request::Form;
use crate::{Guest, Request, Response, Site};

/// Rows per page.
const PAGE: usize = 50;

/// The filter, as entered in the form.
pub(super) struct Asked<'a> {
    topic: &'a str,
    destination: &'a str,
    status: &'a str,
    reason: &'a str,
    key: &'a str,
    tenant: &'a str,
    since: &'a str,
    until: &'a str,
}

impl<'a> Asked<'a> {
    pub(super) fn of(form: &'a Form) -> Self {
        let value = |name| form.get(name).unwrap_or_default().trim();
        Self {
            topic: value("topic"),
            destination: value("destination"),
            status: value("status"),
            reason: value("reason"),
            key: value("key"),
            tenant: value("tenant"),
            since: value("since"),
            until: value("until"),
        }
    }

    fn pairs(&self) -> [(&'static str, &'a str); 8] {
        [
            ("topic", self.topic),
            ("destination", self.destination),
            ("status", self.status),
            ("reason", self.reason),
            ("key", self.key),
            ("tenant", self.tenant),
            ("since", self.since),
            ("until", self.until),
        ]
    }

    pub(super) fn filter(&self) -> Result<LedgerFilter, String> {
        let given = |value: &str| (!value.is_empty()).then(|| value.to_owned());
        let status = given(self.status).map(|status| status.parse::<MessageStatus>());
        let reason = given(self.reason).map(|reason| reason.to_uppercase().parse::<ReasonCode>());
        Ok(LedgerFilter {
            topic: given(self.topic),
            destination: given(self.destination),
            ordering_key: given(self.key),
            tenant_id: super::tenant(self.tenant)?,
            status: status.transpose().map_err(|error| error.to_string())?,
            reason: reason.transpose().map_err(|error| error.to_string())?,
            since: time(self.since)?,
            until: time(self.until)?,
            ..LedgerFilter::default()
        })
    }
}

/// Parses a time in UTC, as browser fields or people write it, or a duration before now.
fn time(text: &str) -> Result<Option<SystemTime>, String> {
    if text.is_empty() {
        return Ok(None);
    }
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
    site: &Site,
    filter: &LedgerFilter,
    limit: usize,
) -> anyhow::Result<(Searched<LedgerRow>, Option<String>)> {
    let mut found = site
        .searches
        .run(|conn, outbox| program::ledger(conn, outbox, filter, as_limit(limit) + 1))?;
    let next = next_page(&mut found.rows, limit, |last| last.place().to_string());
    Ok((found, next))
}

pub(super) fn show(site: &Site, guest: &Guest, request: &Request) -> Response {
    let asked = Asked::of(&request.query);
    let before = request
        .query
        .get("before")
        .and_then(|place| place.parse().ok());
    let page = plain(site, guest, request, "Ledger");
    let mut filter = match asked.filter() {
        Ok(filter) => filter,
        Err(error) => {
            let content =
                html! { h1 { "Ledger" } p.refused role="alert" { (error) } (form(&asked)) };
            return page.answer(StatusCode::BAD_REQUEST, &content);
        }
    };
    filter.before = before;
    let began = SystemTime::now();
    let (found, next) = match search(site, &filter, PAGE) {
        Ok(found) => found,
        Err(error) => return database_away(site, guest, request, &format!("{error:#}")),
    };
    let took = began.elapsed().unwrap_or(Duration::ZERO);
    let content = html! {
        div.title {
            h1 { "Ledger" }
            p.quiet { "The outcome of each settled message, kept for the retention period." }
        }
        (form(&asked))
        section.panel aria-labelledby="rows" {
            div.head {
                h2 id="rows" { "Settled messages, latest first" }
                @if before.is_some() { a href=(link("/ledger", &asked.pairs())) { "Back to the first page" } }
            }
            @if !found.is_complete {
                p.none role="status" {
                    "Results may be incomplete: the search stopped after " (words::duration(took.as_secs_f64()))
                    ", or many rows are being written. A time range makes the search faster."
                }
            }
            @if found.rows.is_empty() { p.none role="status" { "No messages match." } }
            @else { (rows(&found.rows)) }
            @if let Some(next) = next {
                div.actions {
                    a.button.second href=(link("/ledger", &[asked.pairs().as_slice(), &[("before", &next)]].concat())) { "Older" }
                }
            }
        }
    };
    page.answer(StatusCode::OK, &content)
}

fn form(asked: &Asked<'_>) -> Markup {
    html! {
        form.panel.filter method="get" action="/ledger" role="search" aria-label="Search the ledger" {
            label.field { "Topic" input name="topic" value=(asked.topic); }
            label.field { "Destination" input name="destination" value=(asked.destination); }
            label.field { "Status"
                select name="status" {
                    option value="" { "any" }
                    @for status in ["delivered", "no_subscriber", "dead"] {
                        option value=(status) selected[asked.status == status] { (status) }
                    }
                }
            }
            label.field { "Reason" input name="reason" value=(asked.reason) placeholder="of dead letters"; }
            label.field { "Ordering key" input name="key" value=(asked.key); }
            label.field { "Tenant" input name="tenant" value=(asked.tenant); }
            label.field { "Since, UTC" input name="since" value=(asked.since) placeholder="2h, or 2026-01-31T12:00"; }
            label.field { "Until, UTC" input name="until" value=(asked.until) placeholder="1h, or 2026-01-31T13:00"; }
            div.do {
                button { "Search" }
                @if asked.pairs().iter().any(|(_, value)| !value.is_empty()) { a href="/ledger" { "Show all" } }
            }
        }
    }
}

fn rows(rows: &[LedgerRow]) -> Markup {
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
            let took = words::seconds_between(&row.created_at, &row.settled_at);
            vec![
                html! {
                    a.key href=(link("/messages", &[("q", &row.idempotency_key)])) {
                        (words::shortened(&row.idempotency_key, 60))
                    }
                },
                name_of(&row.topic, &row.destination),
                html! {
                    (badge(row.status))
                    @if let Some(reason) = &row.reason { " " (reason) }
                    @if let Some(error) = &row.error { span.error { (words::shortened(error, 160)) } }
                },
                html! { (row.attempts) },
                html! { (took.map_or("–".to_owned(), words::duration)) },
                words::ago(&row.settled_at),
            ]
        })
        .collect();
    table("Settled messages", &columns, &rows)
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
        assert_eq!(time(""), Ok(None));
        for bad in ["yesterday", "2026", "<b>", "31.1.2026", "12:00"] {
            assert!(time(bad).is_err(), "{bad}: {:?}", time(bad));
        }
    }
}
