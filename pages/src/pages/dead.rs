//! Dead letters: their causes, and a list to select from.

pub(super) mod change;
pub(super) mod letter;

use std::sync::Arc;
use std::time::Instant;

use diesel_outbox::admin::{DeadFilter, Place};
use diesel_outbox::program::{self, DeadGroup, DeadLetter, MessageKey};
use diesel_outbox::{ReasonCode, Sequence};
use http::StatusCode;
use maud::{Markup, html};
use uuid::Uuid;

use super::layout::{Page, token};
use super::messages::QUICK;
use super::overview::name_of;
use super::table::{Column, Kind, table};
use super::{plain, words};
use crate::request::Form;
use crate::{Guest, Request, Response, Site};

/// Dead letters per page.
const PAGE: usize = 50;
const MOST_GROUPS: i64 = 50;

/// The filter, as entered in the form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) topic: String,
    pub(crate) destination: String,
    pub(crate) tenant: String,
    pub(crate) reason: String,
    /// A message id, an idempotency key or a sequence.
    pub(crate) q: String,
}

impl Asked {
    pub(super) fn of(form: &Form) -> Self {
        let value = |name| form.get(name).unwrap_or_default().trim().to_owned();
        Self {
            topic: value("topic"),
            destination: value("destination"),
            tenant: value("tenant"),
            reason: value("reason"),
            q: value("q"),
        }
    }

    pub(super) fn pairs(&self) -> [(&'static str, &str); 5] {
        [
            ("topic", &self.topic),
            ("destination", &self.destination),
            ("tenant", &self.tenant),
            ("reason", &self.reason),
            ("q", &self.q),
        ]
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The filter in words, for a sentence about the matching dead letters.
    pub(super) fn words(&self) -> String {
        let given = self.pairs();
        let parts: Vec<String> = given
            .iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| match *name {
                "q" => format!("message {value}"),
                name => format!("{name} {value}"),
            })
            .collect();
        match parts.is_empty() {
            true => "all dead letters".to_owned(),
            false => parts.join(", "),
        }
    }

    /// The filter for the database. The error is a message for the guest.
    pub(super) fn filter(&self) -> Result<DeadFilter, String> {
        let given = |value: &String| (!value.is_empty()).then(|| value.clone());
        let reason = given(&self.reason).map(|reason| reason.to_uppercase().parse::<ReasonCode>());
        Ok(DeadFilter::default()
            .topic(given(&self.topic))
            .destination(given(&self.destination))
            .tenant_id(super::tenant(&self.tenant)?)
            .reason(reason.transpose().map_err(|error| error.to_string())?))
    }
}

/// The contents of a page: at most one dead letter more than fits, to show that there are more.
#[derive(Default)]
pub(crate) struct DeadList {
    letters: Vec<DeadLetter>,
    groups: Vec<DeadGroup>,
}

pub(super) fn show(site: &Site, guest: &Guest, request: &Request) -> Response {
    let asked = Asked::of(&request.query);
    let before = request
        .query
        .get("before")
        .and_then(|place| place.parse().ok());
    let mut page = Page {
        is_live: before.is_none(),
        ..plain(site, guest, request, "Dead letters")
    };
    let filter = match asked.filter() {
        Ok(filter) => filter,
        Err(error) => {
            let content =
                html! { h1 { "Dead letters" } p.refused { (error) } (filter_form(&asked)) };
            return page.answer(StatusCode::BAD_REQUEST, &content);
        }
    };
    let began = Instant::now();
    let list = match load(site, &asked, &filter, before) {
        Ok(list) => list,
        Err(error) => return super::database_away(site, guest, request, &format!("{error:#}")),
    };
    page.is_live &= asked.q.is_empty() || began.elapsed() < QUICK;
    let content = html! {
        div.title {
            h1 { "Dead letters" }
            p.quiet { "Messages that could not be delivered. They stay until an operator requeues or discards them." }
        }
        (filter_form(&asked))
        @if asked.q.is_empty() && before.is_none() { (groups(&asked, &list.groups)) }
        (letters(guest, &asked, before.is_some(), &list.letters))
    };
    page.answer(StatusCode::OK, &content)
}

/// The list from a place on, or from its begin.
fn load(
    site: &Site,
    asked: &Asked,
    filter: &DeadFilter,
    before: Option<Place>,
) -> anyhow::Result<Arc<DeadList>> {
    const LIMIT: i64 = PAGE as i64 + 1;
    if !asked.q.is_empty() || before.is_some() {
        let letters = search(site, asked, filter, before, LIMIT)?;
        let groups = Vec::new();
        return Ok(Arc::new(DeadList { letters, groups }));
    }
    // Only the first page reloads, so only its list is cached.
    site.dead.get(asked, || {
        let list = site.database.run(|conn, outbox| {
            Ok(DeadList {
                letters: program::dead_letters(conn, outbox, filter, LIMIT)?,
                groups: program::dead_groups(conn, outbox, filter, MOST_GROUPS)?,
            })
        });
        list.map(Arc::new)
    })
}

/// The dead letters from a place on, without payloads, latest first.
pub(super) fn search(
    site: &Site,
    asked: &Asked,
    filter: &DeadFilter,
    before: Option<Place>,
    limit: i64,
) -> anyhow::Result<Vec<DeadLetter>> {
    if !asked.q.is_empty() {
        return find(site, &asked.q, filter);
    }
    let filter = &filter.clone().before(before);
    site.database
        .run(|conn, outbox| program::dead_letters(conn, outbox, filter, limit))
}

/// The matching dead letters of a message, found by id, idempotency key or sequence.
pub(super) fn find(site: &Site, q: &str, filter: &DeadFilter) -> anyhow::Result<Vec<DeadLetter>> {
    let key = MessageKey::Text(q.to_owned());
    site.searches.run(|conn, outbox| {
        let found = program::message(conn, outbox, &key)?.rows;
        let dead: Vec<(Sequence, Uuid)> = found
            .iter()
            .filter(|record| record.kept_in == "dead")
            .map(|record| (record.sequence, record.message_id))
            .collect();
        let sequences: Vec<i64> = dead.iter().map(|(sequence, _)| sequence.0).collect();
        let filter = filter.clone().sequences(sequences);
        if dead.is_empty() {
            return Ok(Vec::new());
        }
        let mut letters = program::dead_letters(conn, outbox, &filter, PAGE as i64 + 1)?;
        letters.retain(|letter| dead.contains(&(letter.sequence, letter.message_id)));
        Ok(letters)
    })
}

fn filter_form(asked: &Asked) -> Markup {
    html! {
        form.panel.filter method="get" action="/dead" role="search" aria-label="Filter dead letters" {
            label.field { "Topic" input name="topic" value=(asked.topic); }
            label.field { "Destination" input name="destination" value=(asked.destination); }
            label.field { "Tenant" input name="tenant" value=(asked.tenant); }
            label.field { "Reason"
                select name="reason" {
                    option value="" { "any" }
                    @for reason in ReasonCode::ALL {
                        option value=(reason.as_str()) selected[asked.reason.eq_ignore_ascii_case(reason.as_str())] {
                            (reason.as_str())
                        }
                    }
                }
            }
            label.field { "Message id, key or sequence" input name="q" value=(asked.q); }
            div.do {
                button { "Filter" }
                @if !asked.is_empty() { a href="/dead" { "Show all" } }
            }
        }
    }
}

/// The causes, most frequent first.
fn groups(asked: &Asked, groups: &[DeadGroup]) -> Markup {
    if groups.len() < 2 {
        return html! {};
    }
    let columns = [
        Column("Reason", Kind::Plain),
        Column("Count", Kind::Number),
        Column("Latest", Kind::Short),
        Column("Topic", Kind::Plain),
        Column("Example", Kind::Plain),
    ];
    let rows: Vec<Vec<Markup>> = groups
        .iter()
        .map(|group| {
            let link = super::link(
                "/dead",
                &[
                    ("topic", &group.topic),
                    ("destination", &group.destination),
                    ("reason", &group.reason),
                    ("q", &asked.q),
                ],
            );
            vec![
                html! { a href=(link) { (group.reason) } },
                html! { (words::count(group.count, false)) },
                words::ago(&group.latest_dead_lettered_at),
                name_of(&group.topic, &group.destination),
                html! {
                    a href={ "/dead/" (group.example_sequence) } { "#" (group.example_sequence) } " "
                    @if let Some(error) = &group.example_error { span.quiet { (words::shortened(error, 120)) } }
                },
            ]
        })
        .collect();
    html! {
        section.panel aria-labelledby="groups" {
            div.head { h2 id="groups" { "Causes" } }
            (table("Causes", &columns, &rows))
        }
    }
}

fn letters(guest: &Guest, asked: &Asked, is_later_page: bool, letters: &[DeadLetter]) -> Markup {
    let has_more = letters.len() > PAGE;
    let letters = letters.get(..PAGE).unwrap_or(letters);
    let next = letters
        .last()
        .filter(|_| has_more)
        .map(|last| last.place().to_string());
    let can_change = guest.rights.act;
    html! {
        section.panel aria-labelledby="letters" {
            div.head {
                h2 id="letters" { "Dead letters, latest first" }
                @if is_later_page { a href=(super::link("/dead", &asked.pairs())) { "Back to the first page" } }
            }
            @if letters.is_empty() {
                p.none role="status" { "No dead letters" @if !asked.is_empty() { " match" } "." }
            } @else if can_change {
                form method="post" action="/dead/requeue" {
                    (token(guest))
                    @for (name, value) in asked.pairs() { input type="hidden" name=(name) value=(value); }
                    (rows(letters, true))
                    div.actions.fixed {
                        label.pick hidden { input type="checkbox" data-all aria-label="Select all on this page"; }
                        button { "Requeue selected" }
                        button.danger formaction="/dead/discard" { "Discard selected" }
                        span.more.do {
                            button.second name="all" value="yes" { "Requeue all matching…" }
                            button.danger name="all" value="yes" formaction="/dead/discard" { "Discard all matching…" }
                        }
                    }
                }
            } @else {
                (rows(letters, false))
            }
            @if let Some(next) = next {
                div.actions {
                    a.button.second href=(super::link("/dead", &[asked.pairs().as_slice(), &[("before", &next)]].concat())) { "Older" }
                }
            }
        }
    }
}

pub(super) fn rows(letters: &[DeadLetter], can_change: bool) -> Markup {
    let mut columns = vec![
        Column("Dead letter", Kind::Text),
        Column("Topic", Kind::Plain),
        Column("Reason", Kind::Plain),
        Column("Attempts", Kind::Number),
        Column("Dead-lettered", Kind::Short),
    ];
    if can_change {
        columns.insert(0, Column("Select", Kind::Control));
    }
    let rows: Vec<Vec<Markup>> = letters
        .iter()
        .map(|letter| {
            let mut row = vec![
                html! { a href={ "/dead/" (letter.sequence) } { "#" (letter.sequence) } },
                name_of(&letter.topic, &letter.destination),
                html! {
                    span.badge.bad { (letter.reason) }
                    @if let Some(error) = &letter.last_error { span.error { (words::shortened(error, 160)) } }
                },
                html! { (letter.attempts) },
                words::ago(&letter.dead_lettered_at),
            ];
            if can_change {
                row.insert(
                    0,
                    html! {
                        label.pick {
                            input type="checkbox" name="letter" value=(letter.id())
                                aria-label={ "Select dead letter " (letter.sequence) };
                        }
                    },
                );
            }
            row
        })
        .collect();
    table("Dead letters", &columns, &rows)
}
