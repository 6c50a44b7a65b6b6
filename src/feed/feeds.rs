//! What the program and its pages ask and do.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use diesel::PgConnection;
use secrecy::SecretString;

#[cfg(feature = "http")]
use super::document;
use super::page::{self, After, Discontinued, FeedPage};
use super::sql::read::{self, FeedRow};
use super::sql::state::{self, FeedState, Which};
use super::sql::token;
use crate::config::Config;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::setup::sql::inspect::has_feeds;
use crate::sql::pinned::pinned;

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

    /// At most `limit` events of the feed.
    ///
    /// # Errors
    /// If the database fails.
    pub fn page(
        self,
        conn: &mut PgConnection,
        feed: &FeedRow,
        after: After,
        limit: u32,
    ) -> Result<Result<FeedPage, Discontinued>, DatabaseError> {
        pinned(conn, self.name, |conn, name| {
            Ok(page::page((conn, name), feed, after, limit.into())?)
        })
    }

    /// All feeds, and how far they are read.
    ///
    /// # Errors
    /// If the database fails.
    pub fn states(self, conn: &mut PgConnection) -> Result<Vec<FeedState>, DatabaseError> {
        self.states_of(conn, Which::default())
    }

    /// The same of the feeds with these names.
    ///
    /// # Errors
    /// If the database fails.
    pub fn named(
        self,
        conn: &mut PgConnection,
        names: &[&str],
    ) -> Result<Vec<FeedState>, DatabaseError> {
        let which = Which {
            names: Some(names),
            ..Which::default()
        };
        self.states_of(conn, which)
    }

    /// At most so many of all, behind this name.
    ///
    /// # Errors
    /// If the database fails.
    pub fn list(
        self,
        conn: &mut PgConnection,
        after: Option<&str>,
        most: usize,
    ) -> Result<Vec<FeedState>, DatabaseError> {
        let which = Which {
            after,
            most: i64::try_from(most).ok(),
            ..Which::default()
        };
        self.states_of(conn, which)
    }

    fn states_of(
        self,
        conn: &mut PgConnection,
        which: Which<'_>,
    ) -> Result<Vec<FeedState>, DatabaseError> {
        pinned(conn, self.name, |conn, name| match has_feeds(conn, name)? {
            true => Ok(state::states(conn, name, which)?),
            false => Ok(Vec::new()),
        })
    }

    /// Whether this token of a reader is valid for the feed.
    ///
    /// # Errors
    /// If the database fails.
    pub fn is_valid(
        self,
        conn: &mut PgConnection,
        feed: &str,
        token: &str,
    ) -> Result<bool, DatabaseError> {
        pinned(conn, self.name, |conn, name| match has_feeds(conn, name)? {
            true => Ok(token::is_valid(conn, name, feed, token)?),
            false => Ok(false),
        })
    }

    /// Notes that the reader with this token has all events up to this one; at most once a minute.
    ///
    /// # Errors
    /// If the database fails.
    pub fn note(
        self,
        conn: &mut PgConnection,
        feed: &str,
        token: &str,
        position: i64,
    ) -> Result<(), DatabaseError> {
        pinned(conn, self.name, |conn, name| {
            Ok(token::note(conn, name, feed, token, position)?)
        })
    }

    /// The position of the last event of each of these feeds.
    ///
    /// # Errors
    /// If the database fails.
    pub fn last_positions(
        self,
        conn: &mut PgConnection,
        feeds: &[&str],
    ) -> Result<Vec<(String, i64)>, DatabaseError> {
        pinned(conn, self.name, |conn, name| {
            Ok(read::last_positions(conn, name, feeds)?)
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
