//! The pages: HTML rendered on the server. They work without JavaScript.
//!
//! `maud` escapes every value; no page bypasses it.

mod acts;
pub(crate) mod api;
mod asked;
mod audit;
pub(crate) mod content;
mod dead;
mod endpoints;
mod keys;
mod labels;
pub(crate) mod layout;
mod ledger;
mod login;
pub(crate) mod mask;
mod messages;
mod overview;
mod pauses;
mod relays;
pub(crate) mod sparkline;
pub(crate) mod table;
mod tenants;
mod timeline;
mod topics;
pub(crate) mod words;

use std::net::IpAddr;

use diesel_outbox::endpoints::EndpointError;
use http::{Method, StatusCode};
use maud::{Markup, html};

pub(super) use self::login::{login, refused};

use diesel::PgConnection;
use diesel_outbox::{DatabaseError, OutboxName};

use self::asked::Wrong;
use self::layout::Page;
use super::{Guest, Site};
use crate::database::{Act as Together, Database};
use crate::request::{Form, Request};
use crate::response::Response;

pub(super) use self::dead::DeadList;

/// Why an operator does not get what was asked for.
pub(crate) enum Refusal {
    /// There is no such thing.
    Missing(String),
    /// There is already such a thing.
    Taken(String),
    /// What the operator must mend.
    Invalid(String),
    /// The same for a value of a form.
    Wrong(Wrong),
    /// The same for a destination.
    Endpoint(EndpointError),
    /// The database failed.
    Away(anyhow::Error),
}

impl From<anyhow::Error> for Refusal {
    fn from(error: anyhow::Error) -> Self {
        Self::Away(error)
    }
}

impl From<Wrong> for Refusal {
    fn from(wrong: Wrong) -> Self {
        Self::Wrong(wrong)
    }
}

impl Refusal {
    fn page(&self, visit: &Visit<'_>) -> Response {
        match self {
            Self::Missing(words) => missing(visit, words, &html! {}),
            Self::Taken(words) | Self::Invalid(words) | Self::Wrong(Wrong { what: words, .. }) => {
                bad_request(visit, words)
            }
            Self::Endpoint(error @ EndpointError::NoTables(_)) => {
                without_endpoints(visit, &error.to_string())
            }
            Self::Endpoint(error) => bad_request(visit, &format!("{error}.")),
            Self::Away(error) => database_away(visit, &format!("{error:#}")),
        }
    }
}

/// A request of a guest whom the pages have let in.
#[derive(Clone, Copy)]
pub(crate) struct Visit<'a> {
    pub(crate) site: &'a Site,
    pub(crate) guest: &'a Guest,
    pub(crate) request: &'a Request,
    /// The query of a page, or the form of an act.
    pub(crate) form: &'a Form,
    /// All that the request does is one transaction.
    pub(crate) act: Option<Together<'a>>,
}

impl<'a> Visit<'a> {
    /// The value of a field; empty: none was given.
    fn get(&self, name: &str) -> &'a str {
        self.form.get(name).unwrap_or_default().trim()
    }

    fn run<T>(
        &self,
        database: &Database,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> Result<T, DatabaseError>,
    ) -> anyhow::Result<T> {
        database.within(self.act, &self.request.path, statements)
    }

    /// Writes a line of the audit log: now, or after the transaction that the request is.
    fn log(&self, line: impl FnOnce(&str, IpAddr) + 'static) {
        let (who, peer) = (self.guest.who.clone(), self.guest.peer);
        let line = move || line(&who, peer);
        match self.act {
            Some(act) => act.after(Box::new(line)),
            None => line(),
        }
    }

    fn page(&self, title: &'a str) -> Page<'a> {
        Page::new(*self, title)
    }
}

fn as_limit(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

/// Cuts rows, of which one more than the limit was read, to a page. Returns the place after which the next one begins.
pub(crate) fn next_page<T>(
    rows: &mut Vec<T>,
    limit: usize,
    place: impl Fn(&T) -> String,
) -> Option<String> {
    let has_more = rows.len() > limit;
    rows.truncate(limit);
    rows.last().filter(|_| has_more).map(place)
}

/// The tenant in a form field, if given. The error is a message for the guest.
fn tenant(text: &str) -> Result<Option<uuid::Uuid>, String> {
    let tenant = (!text.is_empty()).then(|| text.parse());
    let why = |_| format!("{text:?} is not a tenant: expected a UUID");
    tenant.transpose().map_err(why)
}

/// A static file of the pages.
pub(super) fn asset(path: &str) -> Option<Response> {
    let (kind, text) = match path {
        "/assets/style.css" => ("text/css; charset=utf-8", include_str!("pages/style.css")),
        "/assets/script.js" => (
            "text/javascript; charset=utf-8",
            include_str!("pages/script.js"),
        ),
        "/assets/icon.svg" => return Some(icon()),
        _ => return None,
    };
    Some(Response::asset(kind, text))
}

pub(crate) fn icon() -> Response {
    Response::asset("image/svg+xml", include_str!("pages/icon.svg"))
}

/// What the visitor asks for: a page, or a change by a guest who has the right to act.
pub(super) fn answer(visit: &Visit<'_>) -> Response {
    let done = match visit.request.method {
        Method::POST => change(visit),
        _ => show(visit),
    };
    done.unwrap_or_else(|refusal| refusal.page(visit))
}

/// A page or, for a guest who has the right to act, a change.
type Answer = fn(&Visit<'_>) -> Result<Response, Refusal>;

/// All pages, but those of single dead letters.
pub(super) const PAGES: &[(&str, Answer)] = &[
    ("/", overview::show),
    ("/audit", audit::show),
    ("/dead", dead::show),
    ("/endpoints", endpoints::show),
    ("/endpoints/edit", endpoints::edit::show),
    ("/keys", keys::show),
    ("/ledger", ledger::show),
    ("/messages", messages::show),
    ("/relays", relays::show),
    ("/tenant", tenants::show),
    ("/topics", topics::show),
];

fn at(all: &[(&str, Answer)], path: &str) -> Option<Answer> {
    let found = all.iter().find(|(own, _)| *own == path);
    found.map(|(_, answer)| *answer)
}

fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let path = visit.request.path.as_str();
    let letter = path.strip_prefix("/dead/").and_then(dead::letter::which);
    match (at(PAGES, path), letter) {
        (Some(page), _) => page(visit),
        (None, Some(letter)) => dead::letter::show(visit, letter),
        (None, None) => Ok(missing(visit, "This page does not exist.", &html! {})),
    }
}

/// Everything else than acts on many messages that changes something.
const ACTS: &[(&str, Answer)] = &[
    ("/message/cancel", messages::change::answer),
    ("/message/reschedule", messages::change::answer),
    ("/message/settle", messages::change::answer),
    ("/endpoint/recover", endpoints::send::answer),
    ("/endpoint/backfill", endpoints::send::answer),
    ("/endpoint/disable", endpoints::change::answer),
    ("/endpoint/enable", endpoints::change::answer),
    ("/endpoint/put", endpoints::edit::put),
    ("/endpoint/remove", endpoints::change::answer),
    ("/endpoint/rotate", endpoints::edit::rotate),
    ("/endpoint/send-again", endpoints::change::answer),
    ("/endpoint/test", endpoints::change::tested),
    ("/endpoint/verify", endpoints::edit::verify),
    ("/feed/token", endpoints::feed::token),
    ("/pause", pauses::pause),
    ("/resume", pauses::resume),
];

/// The path of each change.
#[cfg(test)]
pub(super) fn changes() -> impl Iterator<Item = &'static str> {
    let many = diesel_outbox::program::ACTS.iter();
    let many = many.map(|act| act.words().path);
    ACTS.iter().map(|(path, _)| *path).chain(many)
}

fn change(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let path = visit.request.path.as_str();
    let many = acts::at(path).map(|_| acts::answer as Answer);
    let Some(act) = many.or_else(|| at(ACTS, path)) else {
        return Ok(missing(visit, "This action does not exist.", &html! {}));
    };
    let done = act(visit);
    visit.site.forget();
    done
}

/// A link with these query values; empty values are omitted.
pub(crate) fn link(path: &str, pairs: &[(&str, &str)]) -> String {
    let given = pairs.iter().filter(|(_, value)| !value.is_empty());
    let query = url::form_urlencoded::Serializer::new(String::new())
        .extend_pairs(given)
        .finish();
    match query.is_empty() {
        true => path.to_owned(),
        false => format!("{path}?{query}"),
    }
}

fn missing(visit: &Visit<'_>, words: &str, more: &Markup) -> Response {
    let content = html! { h1 { "Not found" } p { (words) } (more) };
    let page = visit.page("Not found").status(StatusCode::NOT_FOUND);
    page.answer(&content)
}

fn bad_request(visit: &Visit<'_>, words: &str) -> Response {
    let content = html! { h1 { "Invalid request" } p.refused { (words) } };
    let page = visit.page("Invalid request");
    page.status(StatusCode::BAD_REQUEST).answer(&content)
}

/// The page for an outbox that has no endpoints, and how it gets them.
fn without_endpoints(visit: &Visit<'_>, why: &str) -> Response {
    let content = html! { h1 { "Endpoints" } p { "There are no endpoints here: " (why) "." } };
    let page = visit.page("Endpoints");
    match visit.request.method {
        Method::POST => page.status(StatusCode::NOT_IMPLEMENTED).answer(&content),
        _ => page.answer(&content),
    }
}

/// The page for a failed database, with its error.
fn database_away(visit: &Visit<'_>, error: &str) -> Response {
    let content = html! {
        h1 { "The database is unavailable" }
        p.refused role="alert" { (error) }
        p { "The " a href="/" { "overview" } " shows the last known state." }
    };
    let page = visit.page("Database unavailable").live(true);
    page.status(StatusCode::SERVICE_UNAVAILABLE)
        .answer(&content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_has_what_is_given_and_is_encoded() {
        assert_eq!(link("/dead", &[("topic", ""), ("q", "")]), "/dead");
        let one = link("/dead", &[("topic", "a&b=<\"'\r\n"), ("reason", "GONE")]);
        assert_eq!(one, "/dead?topic=a%26b%3D%3C%22%27%0D%0A&reason=GONE");
    }
}
