//! Feeds: how far they are read, and tokens for their readers.

use std::collections::HashMap;
use std::time::SystemTime;

use diesel_outbox::admin::Note;
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::program::{self, FeedState, Feeds, ReaderState, WhichFeeds};
use http::StatusCode;
use maud::{Markup, html};
use secrecy::{ExposeSecret, SecretString};

use super::change::nobody;
use super::edit::overlap;
use super::page_of;
use crate::AUDIT;
use crate::feeds::{events_url, is_feed};
use crate::pages::layout::dialog;
use crate::pages::{Refusal, Visit, next_page, words};
use crate::response::Response;

/// The feeds among these endpoints, by name.
pub(super) fn of(
    visit: &Visit<'_>,
    endpoints: &[Endpoint],
) -> Result<HashMap<String, FeedState>, Refusal> {
    let names = endpoints.iter().filter(|one| is_feed(one));
    let names: Vec<&str> = names.map(|one| one.name.as_str()).collect();
    if names.is_empty() {
        return Ok(HashMap::new());
    }
    let found = visit.run(&visit.site.searches, |conn, outbox| {
        Feeds::of(outbox).states(conn, WhichFeeds::named(&names))
    })?;
    Ok(found
        .into_iter()
        .map(|one| (one.name.clone(), one))
        .collect())
}

/// A page of all feeds, and the name after which the next page begins.
pub(in crate::pages) fn list(
    visit: &Visit<'_>,
    after: Option<&str>,
    limit: usize,
) -> Result<(Vec<FeedState>, Option<String>), Refusal> {
    let mut found = visit.run(&visit.site.searches, |conn, outbox| {
        let which = WhichFeeds {
            after,
            most: u32::try_from(limit + 1).ok(),
            ..WhichFeeds::default()
        };
        Feeds::of(outbox).states(conn, which)
    })?;
    let next = next_page(&mut found, limit, |last| last.name.clone());
    Ok((found, next))
}

/// The feed of this name, also one of the settings.
pub(in crate::pages) fn get(visit: &Visit<'_>, name: &str) -> Result<FeedState, Refusal> {
    let found = visit.run(&visit.site.searches, |conn, outbox| {
        Feeds::of(outbox).states(conn, WhichFeeds::named(&[name]))
    })?;
    let found = found.into_iter().next();
    found.ok_or_else(|| Refusal::Missing(format!("There is no feed {name:?}.")))
}

/// Makes a token. Older ones end after this time. `None`: there is no such feed.
pub(in crate::pages) fn new_token(
    visit: &Visit<'_>,
    name: &str,
    keep: &str,
    why: &str,
) -> Result<Option<SecretString>, Refusal> {
    let keep = overlap(keep)?;
    let note = Note::new(&visit.guest.who, why);
    let made = visit.run(&visit.site.changes, |conn, outbox| {
        program::make_feed_token(conn, outbox, name, keep, &note)
    })?;
    if made.is_some() {
        let name = name.to_owned();
        visit.log(move |who, peer| log::info!(target: AUDIT, event = "admin_feed", who = who, peer:% = peer, destination = name, what = "token"; "{who:?} made a token for the feed {name:?} on the admin page"));
    }
    Ok(made)
}

/// Makes a token, and shows it to those who may see secrets: for others it would only end the older ones.
pub(in crate::pages) fn token(visit: &Visit<'_>) -> Result<Response, Refusal> {
    if !visit.guest.rights.secrets {
        let why = "you may not see secrets, so you get no token\n";
        return Ok(Response::text(StatusCode::FORBIDDEN, why));
    }
    let name = visit.get("name");
    let Some(token) = new_token(visit, name, visit.get("keep"), visit.get("why"))? else {
        return Ok(nobody(name));
    };
    let token = token.expose_secret();
    let url = events_url(visit.request, &visit.site.access.admin.base, name);
    let content = html! {
        p { "A reader of the feed sends this token with each request. No page shows it again." }
        pre tabindex="0" role="region" aria-label="Token" { (token) }
        p { "This command reads the first events:" }
        pre tabindex="0" role="region" aria-label="Command" {
            "curl -H \"Authorization: Bearer " (token) "\" \"" (url) "?after=begin\""
        }
        p { a.button href=(page_of(name)) { "To the endpoint" } }
    };
    let title = format!("{name} has a new token");
    Ok(visit.page(&title).answer(&dialog(&title, &content)))
}

fn moment(time: SystemTime) -> Markup {
    words::moment(&humantime::format_rfc3339_seconds(time).to_string())
}

/// What no reader with a token has read, and for how long.
pub(super) fn lag(state: &FeedState) -> Markup {
    let events = i64::try_from(state.unread()).unwrap_or(i64::MAX);
    html! {
        @match state.lag {
            Some(lag) => { (words::counted(events, "event", "events")) " not read for " (words::duration(lag.as_secs_f64())) }
            None => "all events are read",
        }
    }
}

pub(super) fn last_read(state: &FeedState) -> Markup {
    match state.last_read_at() {
        Some(at) => moment(at),
        None => html! { "never" },
    }
}

/// The facts of a feed.
pub(super) fn facts(state: &FeedState) -> Markup {
    html! {
        dt { "Last position" } dd { (words::count(state.last_position, false)) }
        dt { "Lag" } dd { (lag(state)) }
        dt { "Last read" } dd { (last_read(state)) }
        dt { "Tokens" }
        dd {
            @if state.readers.is_empty() { "none" }
            @for one in &state.readers { div { (reader(one)) } }
        }
    }
}

fn reader(one: &ReaderState) -> Markup {
    html! {
        "of " (moment(one.created_at))
        @if let Some(until) = one.valid_until { ", valid until " (moment(until)) }
        @if let Some(position) = one.last_position { ", has read up to " (words::count(position, false)) }
    }
}
