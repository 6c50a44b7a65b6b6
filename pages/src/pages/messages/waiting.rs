//! The list of waiting messages.

use diesel_outbox::Status as MessageStatus;
use diesel_outbox::admin::WaitReason;
use diesel_outbox::admin::WaitingFilter;
use diesel_outbox::program::{self, MessageRecord, Searched};
use maud::{Markup, html};

use super::badge;
use crate::pages::layout::token;
use crate::pages::overview::name_of;
use crate::pages::table::{Column, Kind, table};
use crate::pages::{as_limit, link, next_page, words};
use crate::request::Form;
use crate::{Guest, Site};

/// Messages per page.
const PAGE: usize = 50;
const STATES: [MessageStatus; 3] = [
    MessageStatus::Pending,
    MessageStatus::Sending,
    MessageStatus::Retrying,
];

/// The filter, as entered in the form.
pub(in crate::pages) struct Asked<'a> {
    topic: &'a str,
    destination: &'a str,
    tenant: &'a str,
    key: &'a str,
    status: &'a str,
    after: &'a str,
}

impl<'a> Asked<'a> {
    pub(in crate::pages) fn of(form: &'a Form) -> Self {
        let value = |name| form.get(name).unwrap_or_default().trim();
        Self {
            topic: value("topic"),
            destination: value("destination"),
            tenant: value("tenant"),
            key: value("key"),
            status: value("status"),
            after: value("after"),
        }
    }

    /// From this place on.
    pub(in crate::pages) fn after(self, after: &'a str) -> Self {
        Self { after, ..self }
    }

    pub(in crate::pages) fn pairs(&self) -> [(&'static str, &'a str); 5] {
        [
            ("topic", self.topic),
            ("destination", self.destination),
            ("tenant", self.tenant),
            ("key", self.key),
            ("status", self.status),
        ]
    }

    pub(in crate::pages) fn filter(&self) -> Result<WaitingFilter, String> {
        let given = |value: &str| (!value.is_empty()).then(|| value.to_owned());
        let status = STATES
            .into_iter()
            .find(|status| status.as_str() == self.status);
        if status.is_none() && !self.status.is_empty() {
            return Err(format!(
                "{:?} is not a status of a waiting message",
                self.status
            ));
        }
        let after = given(self.after).map(|place| place.parse());
        let after = after
            .transpose()
            .map_err(|error: diesel_outbox::UnknownWord| error.to_string())?;
        Ok(WaitingFilter::default()
            .topic(given(self.topic))
            .destination(given(self.destination))
            .tenant_id(super::super::tenant(self.tenant)?)
            .ordering_key(given(self.key))
            .status(status)
            .after(after))
    }
}

/// Waiting messages, why each is not sent, and the place after which the next page begins.
type Waiting = (
    Searched<MessageRecord>,
    Vec<Option<WaitReason>>,
    Option<String>,
);

pub(in crate::pages) fn search(
    site: &Site,
    filter: &WaitingFilter,
    limit: usize,
) -> anyhow::Result<Waiting> {
    site.searches.run(|conn, outbox| {
        let mut found = program::waiting(conn, outbox, filter, as_limit(limit) + 1)?;
        let next = next_page(&mut found.rows, limit, |last| last.place().to_string());
        let waits = program::wait_reasons_of(conn, outbox, &found.rows)?;
        Ok((found, waits, next))
    })
}

pub(super) fn list(
    site: &Site,
    asked: &Asked<'_>,
    filter: &WaitingFilter,
) -> anyhow::Result<Markup> {
    let (found, waits, next) = search(site, filter, PAGE)?;
    Ok(html! {
        (form(asked))
        section.panel aria-labelledby="waiting" {
            div.head {
                h2 id="waiting" { "Waiting messages, next due first" }
                @if !asked.after.is_empty() { a href=(link("/messages", &asked.pairs())) { "Back to the first page" } }
            }
            @if !found.is_complete {
                p.none role="status" { "The search stopped after 2 s: few messages match. Filter by topic, destination or ordering key." }
            } @else if found.rows.is_empty() {
                p.none role="status" { "No waiting messages match." }
            } @else {
                (rows(&found.rows, &waits))
            }
            @if let Some(next) = next {
                div.actions {
                    a.button.second href=(link("/messages", &[asked.pairs().as_slice(), &[("after", &next)]].concat())) { "Later" }
                }
            }
        }
    })
}

fn form(asked: &Asked<'_>) -> Markup {
    html! {
        form.panel.filter method="get" action="/messages" role="search" aria-label="List waiting messages" {
            label.field { "Topic" input name="topic" value=(asked.topic); }
            label.field { "Destination" input name="destination" value=(asked.destination); }
            label.field { "Tenant" input name="tenant" value=(asked.tenant); }
            label.field { "Ordering key" input name="key" value=(asked.key); }
            label.field { "Status"
                select name="status" {
                    option value="" { "any" }
                    @for status in STATES.map(MessageStatus::as_str) {
                        option value=(status) selected[asked.status == status] { (status) }
                    }
                }
            }
            div.do {
                button { "List" }
                @if asked.pairs().iter().any(|(_, value)| !value.is_empty()) { a href="/messages" { "Show all" } }
            }
        }
    }
}

/// The forms that change all messages of the list of waiting messages.
pub(super) fn change_all(guest: &Guest, asked: &Asked<'_>) -> Markup {
    let meant = html! {
        (token(guest))
        @for (name, value) in asked.pairs() { input type="hidden" name=(name) value=(value); }
        label.field { "Why" input name="reason" maxlength="400"; }
    };
    html! {
        section.panel {
            div.head { h2 { "Change all that match" } }
            div.body {
                form.do method="post" action="/messages/retry" {
                    (meant) button.second { "Retry…" }
                    span.quiet { "Messages that wait after a failed attempt become due at once." }
                }
                form.do method="post" action="/messages/cancel" { (meant) button.danger { "Cancel…" } }
            }
        }
    }
}

pub(in crate::pages) fn rows(records: &[MessageRecord], waits: &[Option<WaitReason>]) -> Markup {
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
                a.key href=(link("/messages", &[("q", &sequence)])) { "#" (sequence) }
                @if let Some(key) = &record.ordering_key { " " span.quiet { "key " (words::shortened(key, 60)) } }
            },
            name_of(&record.topic, &record.destination),
            html! {
                (badge(record.status))
                @if let Some(waits) = waits { " " span.quiet { (waits.to_string()) } }
                @if let Some(reason) = &record.reason { " " (reason) }
                @if let Some(error) = &record.last_error { " " span.error { (words::shortened(error, 160)) } }
            },
            html! { (record.attempts) },
            html! { @match &record.available_at { Some(at) => (words::time(at)), None => "–" } },
        ]
    };
    let rows: Vec<Vec<Markup>> = records.iter().zip(waits).map(row).collect();
    table("Waiting messages", &columns, &rows)
}
