//! What operators have done.

use diesel_outbox::admin::Place;
use diesel_outbox::program::{self, OperatorAct};
use maud::html;

use super::asked::Asked;
use super::layout::list;
use super::table::{Column, Kind, table_or};
use super::{Refusal, Visit, as_limit, next_page, words};
use crate::labels::Labels;
use crate::response::Response;

/// Acts on a page.
const PAGE: usize = 200;

const COLUMNS: [Column; 5] = [
    Column("When", Kind::Text),
    Column("Who", Kind::Text),
    Column("Act", Kind::Text),
    Column("On what", Kind::Text),
    Column("Why", Kind::Text),
];

/// The latest acts that a text finds, from before this place, and the place of the next page.
pub(super) fn search(
    visit: &Visit<'_>,
    q: &str,
    before: Option<Place>,
    limit: usize,
) -> anyhow::Result<(Vec<OperatorAct>, Option<String>)> {
    let mut found = visit.run(&visit.site.searches, |conn, outbox| {
        program::acts(conn, outbox, q, before, as_limit(limit) + 1)
    })?;
    let next = next_page(&mut found, limit, |(_, place)| place.to_string());
    Ok((found.into_iter().map(|(act, _)| act).collect(), next))
}

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let asked = Asked::of(visit.form, &["q"]);
    let before = visit.form.get("before");
    let place = before.map(str::parse).transpose();
    let place = place.map_err(|_| Refusal::Invalid("This is no place in the list.".to_owned()))?;
    let (acts, next) = search(visit, asked.get("q"), place, PAGE)?;
    let labels = Labels::of(visit, acts.iter().map(|one| one.target.as_str()))?;
    let row = |one: &OperatorAct| {
        vec![
            words::moment(&one.at),
            html! { (one.who) },
            html! { code { (one.act) } },
            html! {
                @if labels.has(&one.target) { (labels.shown(&one.target)) }
                @else { (words::shortened(&one.target, 200)) }
            },
            html! { @if one.why.is_empty() { "–" } @else { (words::shortened(&one.why, 400)) } },
        ]
    };
    let fields = html! { label.field.wide { "Part of who, act or on what" input name="q" value=(asked.get("q")); } };
    let content = html! {
        div.title {
            h1 { "Acts of operators" }
            p.quiet { "With commands and on these pages: rows of " code { (visit.site.config.table) "_audit" } "." }
        }
        (asked.form("/audit", "Search acts", "Search", &fields))
        (list(
            ("acts", "Latest first"),
            before.map(|_| asked.link("/audit", &[])),
            &table_or("No act matches.", "Acts", &COLUMNS, acts.iter().map(row)),
            next.map(|last| ("Older", asked.link("/audit", &[("before", &last)]))),
        ))
    };
    Ok(visit.page("Acts").answer(&content))
}
