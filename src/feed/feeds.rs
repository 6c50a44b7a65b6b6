//! What the program and its pages ask and do.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use diesel::PgConnection;
use secrecy::SecretString;
use uuid::Uuid;

use super::cursor::Cursor;
#[cfg(feature = "http")]
use super::document;
use super::page::{self, After, Discontinued, FeedPage};
use super::sql::read::{self, FeedRow};
use super::sql::state::{self, FeedState, WhichFeeds};
use super::sql::token;
use crate::config::Config;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::setup::sql::inspect::has_feeds;
use crate::sql::pinned::pinned;

/// Who reads a feed.
#[derive(Debug, Clone, Copy)]
pub enum FeedAccess<'a> {
    /// Whoever has this token, if it is one of the feed.
    Token(&'a str),
    /// This tenant its own.
    Tenant(Uuid),
    /// Whoever may see what is in the outbox.
    All,
}

/// What a request asks of a feed.
#[derive(Debug, Clone, Copy)]
pub struct FeedQuery {
    /// Where its page begins.
    pub after: After,
    /// The most events.
    pub limit: u32,
    /// Whether it waits, if there are none.
    pub waits: bool,
    /// It has waited for what follows this cursor: not the end of now, but that of then.
    pub waited: Option<Cursor>,
}

impl FeedQuery {
    /// At most so many events, at once.
    pub fn now(after: After, limit: u32) -> Self {
        Self {
            after,
            limit,
            waits: false,
            waited: None,
        }
    }
}

/// A feed, and what it has behind a cursor.
pub type FoundPage = (FeedRow, Result<FeedPage, Discontinued>);

/// The feeds of an outbox, for the program and its pages. An outbox without their tables has none.
#[derive(Debug, Clone, Copy)]
pub struct Feeds<'a> {
    name: &'a OutboxName,
}

impl<'a> Feeds<'a> {
    /// Those of this outbox.
    pub fn of(name: &'a OutboxName) -> Self {
        Self { name }
    }

    /// Whether the outbox has the tables of feeds.
    ///
    /// # Errors
    /// If the database fails.
    pub fn are_offered(self, conn: &mut PgConnection) -> Result<bool, DatabaseError> {
        pinned(conn, self.name, |conn, name| Ok(has_feeds(conn, name)?))
    }

    /// The feed of this name: of the settings of a relay, or of an endpoint that is there.
    ///
    /// # Errors
    /// If the database fails.
    pub fn get(
        self,
        conn: &mut PgConnection,
        feed: &str,
    ) -> Result<Option<FeedRow>, DatabaseError> {
        pinned(conn, self.name, |conn, name| match has_feeds(conn, name)? {
            true => Ok(read::feed(conn, name, feed)?),
            false => Ok(None),
        })
    }

    /// These of the feeds, and how far they are read.
    ///
    /// # Errors
    /// If the database fails.
    pub fn states(
        self,
        conn: &mut PgConnection,
        which: WhichFeeds<'_>,
    ) -> Result<Vec<FeedState>, DatabaseError> {
        pinned(conn, self.name, |conn, name| match has_feeds(conn, name)? {
            true => Ok(state::states(conn, name, which)?),
            false => Ok(Vec::new()),
        })
    }

    /// Events of the feed of this name, and the feed; `None`: there is none that `access` may read. Notes how far a reader
    /// with a token is: whoever asks for what follows a cursor has all before it.
    ///
    /// # Errors
    /// If the database fails.
    pub fn read(
        self,
        conn: &mut PgConnection,
        access: FeedAccess<'_>,
        feed: &str,
        asked: FeedQuery,
    ) -> Result<Option<FoundPage>, DatabaseError> {
        pinned(conn, self.name, |conn, name| {
            if !has_feeds(conn, name)? {
                return Ok(None);
            }
            let Some(found) = read::feed(conn, name, feed)? else {
                return Ok(None);
            };
            // A token ends with its registration: if it is valid after the feed was read, it is one of this registration.
            let may_read = match access {
                FeedAccess::Token(given) => token::is_valid(conn, name, feed, given)?,
                FeedAccess::Tenant(tenant) => found.tenant_id == Some(tenant),
                FeedAccess::All => true,
            };
            if !may_read {
                return Ok(None);
            }
            let from = asked.waited.map_or(asked.after, After::Cursor);
            let page = page::page((&mut *conn, name), &found, from, asked.limit.into())?;
            if let (FeedAccess::Token(given), After::Cursor(cursor), Ok(page)) =
                (access, asked.after, &page)
            {
                // The last answer of a reader that stops.
                let has_all = page.events.is_empty() && !asked.waits;
                if has_all || asked.waited.is_none() {
                    token::note(conn, name, (feed, given), cursor.position(), has_all)?;
                }
            }
            Ok(Some((found, page)))
        })
    }

    /// Those of these feeds that have events behind these positions, or are gone.
    ///
    /// # Errors
    /// If the database fails.
    pub fn changed(
        self,
        conn: &mut PgConnection,
        waiting: &[(&str, i64)],
    ) -> Result<Vec<(String, i64)>, DatabaseError> {
        pinned(conn, self.name, |conn, name| {
            Ok(read::changed(conn, name, waiting)?)
        })
    }
}

/// A token that nobody guesses: 256 random bits.
pub(crate) fn new_token() -> SecretString {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).expect("the system has random bytes");
    format!("feed_{}", URL_SAFE_NO_PAD.encode(bytes)).into()
}

/// The events of a page as `application/cloudevents-batch+json`.
#[cfg(feature = "http")]
pub fn as_batch(config: &Config, page: &FeedPage) -> String {
    document::batch(config, &page.events)
}
