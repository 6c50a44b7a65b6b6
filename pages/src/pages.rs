//! The pages: HTML rendered on the server. They work without JavaScript.
//!
//! `maud` escapes every value; no page bypasses it.

pub(crate) mod api;
mod audit;
mod bulk;
pub(crate) mod content;
mod dead;
mod keys;
pub(crate) mod layout;
mod ledger;
mod login;
pub(crate) mod mask;
mod messages;
mod overview;
mod pauses;
mod registered;
mod relays;
pub(crate) mod sparkline;
pub(crate) mod table;
mod tenants;
mod timeline;
pub(crate) mod words;

use diesel_outbox::destinations::DestinationError;
use http::StatusCode;
use maud::{Markup, html};

pub(super) use self::login::{login, refused};

use self::layout::Page;
use super::{Guest, Site};
use crate::{Request, Response};

pub(super) use self::dead::{Asked, DeadList};

/// Why an operator does not get what was asked for.
pub(crate) enum Refusal {
    /// There is no such thing.
    Missing(String),
    /// There is already such a thing.
    Taken(String),
    /// What the operator must mend.
    Invalid(String),
    /// The same for a destination.
    Destination(DestinationError),
    /// The database failed.
    Away(anyhow::Error),
}

impl From<anyhow::Error> for Refusal {
    fn from(error: anyhow::Error) -> Self {
        Self::Away(error)
    }
}

impl Refusal {
    fn page(&self, site: &Site, guest: &Guest, request: &Request) -> Response {
        match self {
            Self::Missing(words) => missing(site, guest, request, words, &html! {}),
            Self::Taken(words) | Self::Invalid(words) => bad_request(site, guest, request, words),
            Self::Destination(error) => bad_request(site, guest, request, &format!("{error}.")),
            Self::Away(error) => database_away(site, guest, request, &format!("{error:#}")),
        }
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

/// A page requested by GET.
pub(super) fn show(site: &Site, guest: &Guest, request: &Request) -> Response {
    match request.path.as_str() {
        "/" => overview::show(site, guest, request),
        "/audit" => audit::show(site, guest, request),
        "/dead" => dead::show(site, guest, request),
        "/destinations" => registered::show(site, guest, request),
        "/destinations/edit" => registered::edit::show(site, guest, request),
        "/keys" => keys::show(site, guest, request),
        "/ledger" => ledger::show(site, guest, request),
        "/messages" => messages::show(site, guest, request),
        "/relays" => relays::show(site, guest, request),
        "/tenant" => tenants::show(site, guest, request),
        path => match path.strip_prefix("/dead/").map(dead::letter::which) {
            Some(Some(which)) => dead::letter::show(site, guest, request, which),
            _ => missing(site, guest, request, "This page does not exist.", &html! {}),
        },
    }
}

/// Carries out a change, for a guest who has the right to act.
type Act = fn(&Site, &Guest, &Request) -> Response;

/// Everything that changes something.
pub(super) const ACTS: &[(&str, Act)] = &[
    ("/dead/requeue", dead::change::requeue),
    ("/dead/discard", dead::change::discard),
    ("/message/cancel", messages::change::answer),
    ("/message/reschedule", messages::change::answer),
    ("/message/settle", messages::change::answer),
    ("/messages/retry", bulk::answer),
    ("/messages/cancel", bulk::answer),
    ("/destination/recover", bulk::answer),
    ("/destination/backfill", bulk::answer),
    ("/destination/disable", registered::change::answer),
    ("/destination/enable", registered::change::answer),
    ("/destination/put", registered::edit::put),
    ("/destination/remove", registered::change::answer),
    ("/destination/rotate", registered::edit::rotate),
    ("/destination/send-again", registered::change::answer),
    ("/destination/test", registered::change::answer),
    ("/destination/verify", registered::edit::verify),
    ("/pause", pauses::pause),
    ("/resume", pauses::resume),
];

/// A change requested by a guest who has the right to act.
pub(super) fn change(site: &Site, guest: &Guest, request: &Request) -> Response {
    match ACTS.iter().find(|(path, _)| *path == request.path) {
        Some((_, act)) => act(site, guest, request),
        None => missing(
            site,
            guest,
            request,
            "This action does not exist.",
            &html! {},
        ),
    }
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

fn missing(site: &Site, guest: &Guest, request: &Request, words: &str, more: &Markup) -> Response {
    let content = html! { h1 { "Not found" } p { (words) } (more) };
    plain(site, guest, request, "Not found").answer(StatusCode::NOT_FOUND, &content)
}

fn bad_request(site: &Site, guest: &Guest, request: &Request, words: &str) -> Response {
    let content = html! { h1 { "Invalid request" } p.refused { (words) } };
    plain(site, guest, request, "Invalid request").answer(StatusCode::BAD_REQUEST, &content)
}

/// The page for a failed database, with its error.
fn database_away(site: &Site, guest: &Guest, request: &Request, error: &str) -> Response {
    let content = html! {
        h1 { "The database is unavailable" }
        p.refused role="alert" { (error) }
        p { "The " a href="/" { "overview" } " shows the last known state." }
    };
    let page = Page {
        is_live: true,
        ..plain(site, guest, request, "Database unavailable")
    };
    page.answer(StatusCode::SERVICE_UNAVAILABLE, &content)
}

fn plain<'a>(site: &'a Site, guest: &'a Guest, request: &'a Request, title: &'a str) -> Page<'a> {
    Page {
        site,
        guest,
        request,
        title,
        is_live: false,
    }
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
