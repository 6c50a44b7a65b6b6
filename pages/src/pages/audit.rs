//! What operators have done.

use diesel_outbox::admin::Place;
use diesel_outbox::program::{self, OperatorAct};
use http::StatusCode;
use maud::html;

use super::table::{Column, Kind, table};
use super::{database_away, plain, words};
use crate::{Guest, Request, Response, Site};

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
    site: &Site,
    q: &str,
    before: Option<Place>,
    limit: i64,
) -> anyhow::Result<Vec<(OperatorAct, Place)>> {
    site.searches
        .run(|conn, outbox| program::acts(conn, outbox, q, before, limit))
}

pub(super) fn show(site: &Site, guest: &Guest, request: &Request) -> Response {
    let q = request.query.get("q").unwrap_or_default().trim();
    let acts = match search(site, q, None, MOST) {
        Ok(acts) => acts,
        Err(error) => return database_away(site, guest, request, &format!("{error:#}")),
    };
    let is_full = i64::try_from(acts.len()).is_ok_and(|count| count >= MOST);
    let rows: Vec<_> = acts
        .iter()
        .map(|(one, _)| {
            vec![
                words::moment(&one.at),
                html! { (one.who) },
                html! { code { (one.act) } },
                html! { (words::shortened(&one.target, 200)) },
                html! { (words::shortened(&one.why, 400)) },
            ]
        })
        .collect();
    let content = html! {
        div.title {
            h1 { "Acts of operators" }
            p.quiet { "With commands and on these pages: rows of " code { (site.config.table) "_audit" } "." }
        }
        form.panel.filter method="get" action="/audit" role="search" aria-label="Search acts" {
            label.field.wide { "Part of who, act or on what" input name="q" value=(q); }
            div.do { button { "Search" } @if !q.is_empty() { a href="/audit" { "Show all" } } }
        }
        section.panel aria-labelledby="acts" {
            div.head { h2 id="acts" { "Latest first" } }
            @if rows.is_empty() { p.none role="status" { "No act matches." } }
            @else { (table("Acts", &COLUMNS, &rows)) }
            @if is_full { p.none { "The latest " (MOST) ": search for older ones." } }
        }
    };
    plain(site, guest, request, "Acts").answer(StatusCode::OK, &content)
}
