//! What a tenant has: its destinations, and its messages that are not delivered.

use http::StatusCode;
use maud::{Markup, html};

use super::messages::waiting;
use super::{Refusal, as_limit, dead, link, plain, registered};
use crate::request::Form;
use crate::{Guest, Request, Response, Site};

/// Rows of each list. The rest is behind its link.
const ROWS: usize = 20;

pub(super) fn show(site: &Site, guest: &Guest, request: &Request) -> Response {
    match content(site, guest, &request.query) {
        Ok(content) => plain(site, guest, request, "Tenant").answer(StatusCode::OK, &content),
        Err(refusal) => refusal.page(site, guest, request),
    }
}

fn content(site: &Site, guest: &Guest, query: &Form) -> Result<Markup, Refusal> {
    let id = query.get("tenant").unwrap_or_default().trim();
    if id.is_empty() {
        return Err(Refusal::Invalid("Which tenant?".to_owned()));
    }
    let asked = registered::Asked::of(query);
    let (destinations, _) = registered::search(site, guest, &asked, None, ROWS)?;
    let asked = waiting::Asked::of(query).filter();
    let (waiting, waits, _) = waiting::search(site, &asked.map_err(Refusal::Invalid)?, ROWS)?;
    let asked = dead::Asked::of(query);
    let filter = asked.filter().map_err(Refusal::Invalid)?;
    let letters = dead::search(site, &asked, &filter, None, as_limit(ROWS))?;
    Ok(html! {
        div.title {
            h1 { "Tenant" }
            p.key { (id) }
        }
        (panel("Registered destinations", "/destinations", id, destinations.is_empty(), &registered::rows(site, guest, &destinations)))
        (panel("Dead letters, latest first", "/dead", id, letters.is_empty(), &dead::rows(&letters, false)))
        (panel("Waiting messages, next due first", "/messages", id, waiting.rows.is_empty(), &waiting::rows(&waiting.rows, &waits)))
        @if !waiting.is_complete { p.none { "The search of waiting messages stopped after 2 s." } }
        p { a href=(link("/ledger", &[("tenant", id)])) { "Settled messages" } }
    })
}

/// A list with at most [`ROWS`] rows, and a link to the whole.
fn panel(heading: &str, list: &str, tenant: &str, is_empty: bool, rows: &Markup) -> Markup {
    let anchor = list.trim_start_matches('/');
    html! {
        section.panel aria-labelledby=(anchor) {
            div.head {
                h2 id=(anchor) { (heading) }
                a href=(link(list, &[("tenant", tenant)])) { "All" }
            }
            @if is_empty { p.none { "None." } } @else { (rows) }
        }
    }
}
