//! The feeds of a tenant: how far they are read, tokens for their readers, and their events.

use std::time::Duration;

use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::program::{self, Act, Cost, FeedState, Feeds, WhichFeeds};
use http::StatusCode;
use maud::{Markup, html};
use secrecy::{ExposeSecret, SecretString};

use super::own::Own;
use super::{Asked, Portal, Refusal, endpoint_page, with_time};
use crate::Visitor;
use crate::feeds::{self, Answer, FeedSite, events_url, is_feed};
use crate::request::Request;
use crate::response::Response;
use crate::text::without_user;

/// How long older tokens hold beside a new one.
const OVERLAP: Duration = Duration::from_secs(24 * 3600);

/// What an endpoint is called: the URL, or the name of a feed.
pub(super) fn label(one: &Endpoint) -> String {
    match is_feed(one) {
        true => one.name.clone(),
        false => without_user(&one.url),
    }
}

/// Whether the outbox has feeds.
pub(super) fn are_offered(own: Own<'_>) -> Result<bool, Refusal> {
    let table = &own.portal.config.table;
    own.read(|conn, _| Ok(Feeds::of(table).are_offered(conn)?))
}

/// The feed of the tenant with this name.
pub(super) fn get(own: Own<'_>, name: &str) -> Result<FeedState, Refusal> {
    let table = &own.portal.config.table;
    let found = own.read(|conn, own| match own.get(conn, name)? {
        Some(one) if is_feed(&one) => Ok(Feeds::of(table)
            .states(conn, WhichFeeds::named(&[name]))?
            .pop()),
        _ => Ok(None),
    })?;
    found.ok_or(Refusal::NotFound)
}

/// Makes a token for the readers of a feed. Older ones hold for a day, too.
pub(super) fn new_token(own: Own<'_>, name: &str) -> Result<SecretString, Refusal> {
    let table = &own.portal.config.table;
    let mut made = None;
    own.perform(Act::MakeFeedToken, name, Cost::Change, |conn, own, note| {
        if own.get(conn, name)?.is_some_and(|one| is_feed(&one)) {
            made = program::make_feed_token(conn, table, name, OVERLAP, note)?;
        }
        Ok(made.is_some())
    })?;
    made.ok_or(Refusal::NotFound)
}

/// How far a feed is read.
pub(super) fn facts(asked: &Asked<'_>, state: &FeedState) -> Markup {
    let words = asked.words;
    let number = |position: i64| words.number(u64::try_from(position).unwrap_or(0));
    html! {
        dt { (words.address) } dd.key { (events_url(asked.request, &asked.portal.base, &state.name)) }
        dt { (words.position) } dd { (number(state.last_position)) }
        dt { (words.not_fetched) }
        dd {
            @match state.lag {
                Some(lag) => { (words.lag_events.replace("{}", &words.number(state.unread()))) ", " (words.duration(lag)) }
                None => (words.all_fetched),
            }
            div.quiet { (words.fetched_hint) }
        }
        dt { (words.last_fetched) }
        dd {
            @match state.last_read_at() {
                Some(at) => (with_time("{}", &humantime::format_rfc3339_seconds(at).to_string())),
                None => (words.never),
            }
        }
    }
}

/// Makes a token, and shows it.
pub(super) fn token(asked: &Asked<'_>) -> Result<Response, Refusal> {
    let name = asked.get("name");
    let token = new_token(asked.own(), name)?;
    let (words, token) = (asked.words, token.expose_secret());
    let url = events_url(asked.request, &asked.portal.base, name);
    let command = format!("curl -i -H \"Authorization: Bearer {token}\" \"{url}?after=begin\"");
    let content = html! {
        p { (words.token_hint) }
        p { code id="secret" { (token) } }
        p.refused role="status" { (words.token_once) }
        p { (words.fetch_hint) }
        pre tabindex="0" role="region" aria-label=(words.request) { (command) }
        p.quiet { (words.next_hint) }
        p { a.button href=(endpoint_page(name)) { (words.back) } }
    };
    Ok(asked.dialog(StatusCode::OK, words.token, &content))
}

impl Portal {
    fn feeds(&self) -> FeedSite<'_> {
        FeedSite {
            config: &self.config,
            feeds: &self.feeds,
            access: None,
        }
    }

    /// The events of a feed, for its tenant or for a reader with a token of the feed. A wait occupies the caller's thread.
    pub(super) fn events(&self, mut request: Request, name: &str) -> Response {
        match self.session(&request) {
            Ok(session) => {
                request.visitor = Visitor::of_tenant(session.tenant, session.who, session.rights);
            }
            Err(why) if request.visitor.identity.is_some() => {
                return why.refusal(&request);
            }
            // The token may be that of the feed.
            Err(_) => {}
        }
        let site = self.feeds();
        match feeds::ask(&site, &request, name) {
            Answer::Now(response) => response,
            Answer::Later(waiting) => feeds::blocking(&site, &request, &waiting, &self.waiters),
        }
    }
}
