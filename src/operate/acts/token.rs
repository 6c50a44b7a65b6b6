//! Readers of a feed get a new token.

use std::time::Duration;

use diesel::{Connection, PgConnection};
use secrecy::{ExposeSecret, SecretString};

use crate::error::DatabaseError;
use crate::feed::feeds::{Feeds, new_token};
use crate::feed::sql::token;
use crate::name::OutboxName;
use crate::operate::sql::audit::Act;
use crate::operate::waiting::Note;
use crate::sql::pinned::pinned;

/// Makes a token for readers of the feed, which is shown once. Older ones end after this time. `None`: there is no such feed.
///
/// # Errors
/// If the database fails.
pub fn make_feed_token(
    conn: &mut PgConnection,
    name: &OutboxName,
    feed: &str,
    keep: Duration,
    note: &Note,
) -> Result<Option<SecretString>, DatabaseError> {
    conn.transaction(|conn| {
        if Feeds::of(name).get(conn, feed)?.is_none() {
            return Ok(None);
        }
        let made = new_token();
        pinned(conn, name, |conn, name| {
            token::add(conn, name, feed, made.expose_secret(), keep)?;
            note.audit(conn, name, Act::MakeFeedToken, feed)
        })?;
        Ok(Some(made))
    })
}
