//! What a tenant has: its endpoints, and its messages that are not delivered.

use diesel_outbox::endpoints::EndpointError;
use maud::{Markup, html};

use super::asked::Asked;
use super::messages::waiting;
use super::{Refusal, Visit, dead, endpoints, link};
use crate::response::Response;

/// Rows of each list. The rest is behind its link.
const ROWS: usize = 20;

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let id = visit.get("tenant");
    if id.is_empty() {
        return Err(Refusal::Invalid("Which tenant?".to_owned()));
    }
    let asked = Asked::of(visit.form, endpoints::NAMES);
    let destinations = match endpoints::search(visit, asked, None, ROWS) {
        // Messages have tenants without endpoints, too.
        Err(Refusal::Endpoint(EndpointError::NoTables(_))) => Vec::new(),
        found => found?.0,
    };
    let selection = waiting::selection(visit.form)?;
    let (waiting, waits, _) = waiting::search(visit, &selection, ROWS)?;
    let asked = Asked::of(visit.form, dead::NAMES);
    let (letters, _) = dead::search(visit, asked, None, ROWS)?;
    let content = html! {
        div.title {
            h1 { "Tenant" }
            p.key { (id) }
        }
        (panel("Endpoints", "/endpoints", id, destinations.is_empty(), &endpoints::rows(visit, &destinations)?))
        (panel("Dead letters, latest first", "/dead", id, letters.is_empty(), &dead::rows(visit, &letters, false)?))
        (panel("Waiting messages, next due first", "/messages", id, waiting.rows.is_empty(), &waiting::rows(visit, &waiting.rows, &waits)?))
        @if !waiting.is_complete { p.none { "The search of waiting messages stopped after 2 s." } }
        p { a href=(link("/ledger", &[("tenant", id)])) { "Settled messages" } }
    };
    Ok(visit.page("Tenant").answer(&content))
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
