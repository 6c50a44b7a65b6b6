//! What operators have done.

use diesel_outbox::admin::Place;
use diesel_outbox::program::{self, OperatorAct};
use maud::html;

use super::asked::Asked;
use super::layout::section;
use super::table::{Column, Kind, table_or};
use super::{Refusal, Visit, words};
use crate::response::Response;

/// Acts on the page.
const MOST: i64 = 200;

const COLUMNS: [Column; 5] = [
    Column("When", Kind::Short),
    Column("Who", Kind::Text),
    Column("Act", Kind::Text),
    Column("On what", Kind::Text),
    Column("Why", Kind::Text),
];

/// The latest acts that a text finds, from before this place.
pub(super) fn search(
    visit: &Visit<'_>,
    q: &str,
    before: Option<Place>,
    limit: i64,
) -> anyhow::Result<Vec<(OperatorAct, Place)>> {
    visit.run(&visit.site.searches, |conn, outbox| {
        program::acts(conn, outbox, q, before, limit)
    })
}

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let asked = Asked::of(visit.form, &["q"]);
    let acts = search(visit, asked.get("q"), None, MOST)?;
    let is_full = i64::try_from(acts.len()).is_ok_and(|count| count >= MOST);
    let row = |(one, _): &(OperatorAct, Place)| {
        vec![
            words::moment(&one.at),
            html! { (one.who) },
            html! { code { (one.act) } },
            html! { (words::shortened(&one.target, 200)) },
            html! { (words::shortened(&one.why, 400)) },
        ]
    };
    let rows: Vec<_> = acts.iter().map(row).collect();
    let fields = html! { label.field.wide { "Part of who, act or on what" input name="q" value=(asked.get("q")); } };
    let list = html! {
        (table_or("No act matches.", "Acts", &COLUMNS, &rows))
        @if is_full { p.none { "The latest " (MOST) ": search for older ones." } }
    };
    let content = html! {
        div.title {
            h1 { "Acts of operators" }
            p.quiet { "With commands and on these pages: rows of " code { (visit.site.config.table) "_audit" } "." }
        }
        (asked.form("/audit", "Search acts", "Search", &fields))
        (section("acts", "Latest first", &list))
    };
    Ok(visit.page("Acts").answer(&content))
}
