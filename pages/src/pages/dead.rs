//! Dead letters: their causes, and a list to select from.

pub(super) mod letter;

use std::sync::Arc;
use std::time::Instant;

use diesel_outbox::admin::{Place, Selection};
use diesel_outbox::program::{self, DeadGroup, KeptIn, MessageKey, MessageRecord};
use diesel_outbox::{ReasonCode, Sequence};
use maud::{Markup, html};
use uuid::Uuid;

use super::asked::Asked;
use super::layout::{self, section, token};
use super::messages::QUICK;
use super::overview::name_of;
use super::table::{Column, Kind, table};
use super::{Refusal, Visit, as_limit, next_page, words};
use crate::labels::Labels;
use crate::response::Response;

/// Dead letters per page.
const PAGE: usize = 50;
const MOST_GROUPS: i64 = 50;

/// The fields of the filter; `q`: a message id, an idempotency key or a sequence.
pub(super) const NAMES: &[&str] = &[
    "topic",
    "destination",
    "tenant",
    "key",
    "reason",
    "since",
    "until",
    "q",
];

/// The contents of the first page.
#[derive(Default)]
pub(crate) struct DeadList {
    letters: Vec<MessageRecord>,
    next: Option<String>,
    groups: Vec<DeadGroup>,
}

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let asked = Asked::of(visit.form, NAMES);
    let before = visit
        .form
        .get("before")
        .and_then(|place| place.parse().ok());
    let page = visit.page("Dead letters");
    if let Err(error) = asked.selection() {
        return Ok(page.refused(&error.what, &filter_form(asked)));
    }
    let began = Instant::now();
    let list = load(visit, asked, before)?;
    let is_quick = asked.get("q").is_empty() || began.elapsed() < QUICK;
    let content = html! {
        div.title {
            h1 { "Dead letters" }
            p.quiet { "Messages that could not be delivered. They stay until an operator requeues or discards them." }
        }
        (filter_form(asked))
        (groups(visit, asked, &list.groups)?)
        (letters(visit, asked, before.is_some(), &list)?)
    };
    Ok(page.live(before.is_none() && is_quick).answer(&content))
}

/// The list from a place on, or from its begin.
fn load(
    visit: &Visit<'_>,
    asked: Asked<'_>,
    before: Option<Place>,
) -> Result<Arc<DeadList>, Refusal> {
    let look = || {
        let (letters, next) = search(visit, asked, before, PAGE)?;
        Ok(DeadList {
            letters,
            next,
            groups: Vec::new(),
        })
    };
    if !asked.get("q").is_empty() || before.is_some() {
        return look().map(Arc::new);
    }
    // Only the first page reloads, so only its list is cached.
    visit.site.dead.get(&asked.link("", &[]), || {
        let selection = asked.selection()?;
        let groups = visit.run(&visit.site.database, |conn, outbox| {
            program::dead_groups(conn, outbox, &selection, MOST_GROUPS)
        })?;
        look().map(|list| Arc::new(DeadList { groups, ..list }))
    })
}

/// The dead letters from a place on, without payloads, latest first, and the place of the next page.
pub(super) fn search(
    visit: &Visit<'_>,
    asked: Asked<'_>,
    before: Option<Place>,
    limit: usize,
) -> Result<(Vec<MessageRecord>, Option<String>), Refusal> {
    let selection = asked.selection()?;
    let mut found = match asked.get("q") {
        "" => visit.run(&visit.site.database, |conn, outbox| {
            program::dead_letters(
                conn,
                outbox,
                &program::behind(selection, before),
                as_limit(limit) + 1,
            )
        })?,
        q => find(visit, q, &selection)?,
    };
    let next = next_page(&mut found, limit, |last| last.place().to_string());
    Ok((found, next))
}

/// The matching dead letters of a message, found by id, idempotency key or sequence.
pub(super) fn find(
    visit: &Visit<'_>,
    q: &str,
    selection: &Selection,
) -> anyhow::Result<Vec<MessageRecord>> {
    let key = MessageKey::Text(q.to_owned());
    visit.run(&visit.site.searches, |conn, outbox| {
        let found = program::message(conn, outbox, &key)?.rows;
        let dead: Vec<(Sequence, Uuid)> = found
            .iter()
            .filter(|record| record.kept_in == KeptIn::Dead)
            .map(|record| (record.sequence, record.message_id))
            .collect();
        let sequences: Vec<i64> = dead.iter().map(|(sequence, _)| sequence.0).collect();
        let selection = selection.clone().sequences(sequences);
        if dead.is_empty() {
            return Ok(Vec::new());
        }
        let mut letters = program::dead_letters(conn, outbox, &selection, PAGE as i64 + 1)?;
        letters.retain(|letter| dead.contains(&(letter.sequence, letter.message_id)));
        Ok(letters)
    })
}

fn filter_form(asked: Asked<'_>) -> Markup {
    let fields = html! {
        (asked.field("Topic", "topic"))
        (asked.field("Destination", "destination"))
        (asked.field("Tenant", "tenant"))
        (asked.choice("Reason", "reason", ReasonCode::ALL.iter().map(|reason| reason.as_str())))
        (asked.field("Ordering key", "key"))
        (asked.field("Dead since", "since"))
        (asked.field("Dead before", "until"))
        (asked.field("Message id, key or sequence", "q"))
    };
    asked.form("/dead", "Filter dead letters", "Filter", &fields)
}

/// The causes, most frequent first.
fn groups(visit: &Visit<'_>, asked: Asked<'_>, groups: &[DeadGroup]) -> anyhow::Result<Markup> {
    if groups.len() < 2 {
        return Ok(html! {});
    }
    let labels = Labels::of(visit, groups.iter().map(|group| group.destination.as_str()))?;
    let columns = [
        Column("Reason", Kind::Short),
        Column("Count", Kind::Number),
        Column("Latest", Kind::Short),
        Column("Topic", Kind::Plain),
        Column("Example", Kind::Plain),
    ];
    let rows = groups.iter().map(|group| {
        let link = super::link(
            "/dead",
            &[
                ("topic", &group.topic),
                ("destination", &group.destination),
                ("reason", &group.reason),
                ("q", asked.get("q")),
            ],
        );
        vec![
            html! { a href=(link) { (group.reason) } },
            html! { (words::count(group.count, false)) },
            words::ago(&group.latest_dead_lettered_at),
            name_of(&group.topic, &group.destination, &labels),
            html! {
                (words::sequence(&format!("/dead/{}", group.example_sequence), group.example_sequence)) " "
                @if let Some(error) = &group.example_error { span.quiet { (words::shortened(error, 120)) } }
            },
        ]
    });
    let causes = table("Causes", &columns, rows);
    Ok(section("groups", "Causes", &causes))
}

fn letters(
    visit: &Visit<'_>,
    asked: Asked<'_>,
    is_later_page: bool,
    list: &DeadList,
) -> anyhow::Result<Markup> {
    let guest = visit.guest;
    let letters = &list.letters;
    let content = html! {
        @if letters.is_empty() {
            p.none role="status" { "No dead letters" @if !asked.is_empty() { " match" } "." }
        } @else if guest.rights.act {
            form method="post" action="/dead/requeue" {
                (token(guest))
                (asked.hidden())
                (rows(visit, letters, true)?)
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
            (rows(visit, letters, false)?)
        }
    };
    let next = list.next.as_deref();
    Ok(layout::list(
        ("letters", "Dead letters, latest first"),
        is_later_page.then(|| asked.link("/dead", &[])),
        &content,
        next.map(|next| ("Older", asked.link("/dead", &[("before", next)]))),
    ))
}

pub(super) fn rows(
    visit: &Visit<'_>,
    letters: &[MessageRecord],
    can_change: bool,
) -> anyhow::Result<Markup> {
    let labels = Labels::of(visit, letters.iter().map(|one| one.destination.as_str()))?;
    let mut columns = vec![
        Column("Dead letter", Kind::Short),
        Column("Topic", Kind::Plain),
        Column("Reason", Kind::Plain),
        Column("Attempts", Kind::Number),
        Column("Dead-lettered", Kind::Short),
    ];
    if can_change {
        columns.insert(0, Column("Select", Kind::Control));
    }
    let rows = letters.iter().map(|letter| {
        let mut row = vec![
            html! { a href={ "/dead/" (letter.sequence) } { "#" (letter.sequence) } },
            name_of(&letter.topic, &letter.destination, &labels),
            html! {
                span.badge.bad { (letter.reason.as_deref().unwrap_or_default()) }
                @if let Some(error) = &letter.last_error { span.error { (words::shortened(error, 160)) } }
            },
            html! { (letter.attempts) },
            words::ago(letter.settled_at.as_deref().unwrap_or_default()),
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
    });
    Ok(table("Dead letters", &columns, rows))
}
