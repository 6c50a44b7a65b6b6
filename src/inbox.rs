//! The inbox: handling each message once, in a Diesel transaction.
//!
//! Delivery is at least once, so a message may come again. [`once`] remembers in the table
//! `outbox_inbox` what was handled, in the transaction that does the work: both are committed, or
//! neither. It serves whoever receives: an HTTP receiver of messages of this crate's relay (see
//! [`receive`](crate::receive)) or of anybody's webhooks, a handler in the process, or a reader of a
//! queue.
//!
//! ```no_run
//! use diesel::prelude::*;
//! use diesel_outbox::inbox::{self, Once};
//! use diesel_outbox::receive::CloudEvent;
//!
//! fn book(conn: &mut PgConnection, event: &CloudEvent<'_>) -> QueryResult<()> {
//!     let done = inbox::once(conn, &event.source, &event.id, |conn| {
//!         diesel::sql_query("UPDATE accounts SET euro = euro + 42 WHERE id = 7").execute(conn)
//!     })?;
//!     match done {
//!         Once::Handled(accounts) => println!("{accounts} accounts changed"),
//!         Once::Duplicate => println!("done before"),
//!     }
//!     Ok(())
//! }
//! ```
//!
//! The table comes with the crate's migrations ([`migrate`](crate::migrate)); where the database has no
//! outbox, [`create`] makes it, or [`migration_sql`] in a migration of the application's own. It is one
//! for the database, found by the search path. Who handles messages needs `INSERT` on it; who cleans it,
//! `SELECT` and `DELETE`.
//!
//! It grows by a row for each message: call [`clean`] now and then, or let a relay do it
//! ([`inbox_retention`](crate::RelayBuilder::inbox_retention)). Keep rows for longer than a message can
//! come again: all its attempts, and dead letters that somebody requeues.

use std::fmt::Display;
use std::time::Duration;

use diesel::result::{Error, QueryResult};
use diesel::{Connection, PgConnection};

use crate::migrations::Direction;
use crate::store::check_transaction;
use crate::store::setup::migrate;
use crate::store::write::inbox;
use crate::store::write::inbox::Forgetting;

/// Bytes that a source or a message's id may have. The table has the same limit.
pub const MAX_KEY_BYTES: usize = 1024;
/// Rows removed by one statement.
const CLEAN_BATCH: i64 = 1000;

/// What became of a message.
///
/// Ignoring it is fine where, as in most receivers, the answer is the same for both.
///
/// ```
/// use diesel_outbox::inbox::Once;
///
/// fn log(done: Once<usize>) {
///     if done.is_duplicate() {
///         println!("it came again");
///     }
///     println!("{} rows", done.handled().unwrap_or(0));
/// }
/// # log(Once::Handled(1));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Once<T> {
    /// It was handled just now; this is what the handler returned.
    Handled(T),
    /// It was handled before. The handler was not called.
    Duplicate,
}

impl<T> Once<T> {
    /// Whether it was handled before.
    #[must_use]
    pub fn is_duplicate(&self) -> bool {
        matches!(self, Self::Duplicate)
    }

    /// What the handler returned, where it was called.
    #[must_use]
    pub fn handled(self) -> Option<T> {
        match self {
            Self::Handled(value) => Some(value),
            Self::Duplicate => None,
        }
    }
}

/// A source or a message's id that the inbox cannot hold. Nothing was sent to the database.
///
/// [`once`] returns it inside of Diesel's [`QueryBuilderError`](Error::QueryBuilderError).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the {field} of a message {reason}")]
#[non_exhaustive]
pub struct BadKey {
    /// Which of the two: `source` or `id`.
    pub field: &'static str,
    /// What is wrong with it.
    pub reason: &'static str,
}

/// Handles a message unless it was handled before.
///
/// In one transaction, or a savepoint where `conn` has a transaction open, it remembers
/// `(source, message_id)` and calls `handle` with the connection. What `handle` does on the connection is
/// committed with it. When `handle` fails, both are rolled back, and the message can be handled again.
///
/// `source` says who gives the ids: the event's source, or a name of your own (`"billing"`) where all
/// messages come from one sender. Take your own also where requests are in binary mode and come over a
/// network that is not yours: the header `ce-source` is not signed, and another one makes it another
/// message. `message_id` is the event's id, a [`Uuid`](uuid::Uuid) or a text.
///
/// # At the same time
/// When another transaction is handling the same message, this waits for its end: it is a duplicate when
/// that commits, and handled here when that rolls back. A transaction that handles several messages
/// takes them in an order of its own, and may meet another one that has them the other way round: the
/// database then ends one of the two (a deadlock), which can be tried again. A transaction for each
/// message avoids it.
///
/// This is so in `READ COMMITTED`, the default. In `REPEATABLE READ` and `SERIALIZABLE` a message that
/// another transaction has committed since the own one began is an error
/// ([`SerializationFailure`](diesel::result::DatabaseErrorKind::SerializationFailure)), as with every row
/// that both write: run the transaction again, and it is a duplicate.
///
/// # Errors
/// What `handle` returns; and what Diesel returns when the database fails, or the table is not there, or
/// when a statement has failed of which `handle` says nothing: PostgreSQL commits nothing after it. A
/// [`BadKey`], inside of [`Error::QueryBuilderError`], when the source or the id is empty, longer than
/// [`MAX_KEY_BYTES`] or holds NUL; a transaction that is open stays usable then.
///
/// # Panics
/// Only when `handle` does. As with Diesel's own transactions, the connection is then of no more use.
pub fn once<T, E>(
    conn: &mut PgConnection,
    source: &str,
    message_id: impl Display,
    handle: impl FnOnce(&mut PgConnection) -> Result<T, E>,
) -> Result<Once<T>, E>
where
    E: From<Error>,
{
    once_within(conn, source, message_id, None, handle)
}

/// [`once`], which waits for no lock longer than this: not for another one that handles the message, and
/// not in `handle`.
pub(crate) fn once_within<T, E>(
    conn: &mut PgConnection,
    source: &str,
    message_id: impl Display,
    patience: Option<Duration>,
    handle: impl FnOnce(&mut PgConnection) -> Result<T, E>,
) -> Result<Once<T>, E>
where
    E: From<Error>,
{
    let message_id = message_id.to_string();
    for (field, value) in [("source", source), ("id", &message_id)] {
        check(field, value).map_err(|bad| E::from(Error::QueryBuilderError(Box::new(bad))))?;
    }
    conn.transaction(|conn| {
        if let Some(patience) = patience {
            inbox::limit_lock_timeout(conn, patience)?;
        }
        if !inbox::insert(conn, source, &message_id)? {
            return Ok(Once::Duplicate);
        }
        let value = handle(conn)?;
        check_transaction(conn)?;
        Ok(Once::Handled(value))
    })
}

fn check(field: &'static str, value: &str) -> Result<(), BadKey> {
    let reason = match value {
        "" => "is empty",
        long if long.len() > MAX_KEY_BYTES => "is longer than 1024 bytes",
        text if text.contains('\0') => "holds NUL",
        _ => return Ok(()),
    };
    Err(BadKey { field, reason })
}

/// Forgets messages that were handled longer than `age` ago, a thousand by a statement, and returns how
/// many. What comes again after that is handled again; younger ones stay.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::inbox;
/// use std::time::Duration;
///
/// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// let forgotten = inbox::clean(&mut conn, Duration::from_secs(30 * 24 * 3600))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// An error of Diesel's; what was removed before it stays so, unless a transaction of the caller's was
/// open.
pub fn clean(conn: &mut PgConnection, age: Duration) -> QueryResult<usize> {
    let mut old = Forgetting::new(inbox::TABLE, age);
    let mut removed = 0;
    loop {
        let rows = old.step(conn, CLEAN_BATCH)?;
        removed += rows;
        if rows == 0 {
            return Ok(removed);
        }
    }
}

/// Creates the inbox where it is missing, and nothing else: for a database without an outbox. Safe to
/// run again, and by two processes at once. When the database gets an outbox later,
/// [`migrate`](crate::migrate) takes this inbox over.
///
/// ```no_run
/// # use diesel::prelude::*;
/// # let mut conn = PgConnection::establish("postgres://localhost/billing")?;
/// diesel_outbox::inbox::create(&mut conn)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// An error of Diesel's; then nothing was changed.
pub fn create(conn: &mut PgConnection) -> QueryResult<()> {
    migrate::create_inbox(conn)
}

/// The SQL that creates the inbox, or undoes it, to be put into a migration of the application's own.
///
/// ```
/// use diesel_outbox::Direction;
/// use diesel_outbox::inbox;
///
/// let up = inbox::migration_sql(Direction::Up);
/// assert!(up.contains("CREATE TABLE outbox_inbox"));
/// ```
pub fn migration_sql(direction: Direction) -> &'static str {
    match direction {
        Direction::Up => migrate::INBOX.up,
        Direction::Down => migrate::INBOX.down,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_a_text_that_the_table_takes() {
        let longest = "ä".repeat(MAX_KEY_BYTES / 2);
        for good in ["a", " ", "diesel-outbox/outbox", &longest] {
            assert_eq!(check("id", good), Ok(()), "{good}");
        }
        for bad in ["", "a\0b", &format!("{longest}a")] {
            let error = check("id", bad).expect_err(bad).to_string();
            assert!(error.starts_with("the id of a message "), "{error}");
        }
    }

    #[test]
    fn what_was_handled_is_at_hand() {
        assert_eq!(Once::Handled(7).handled(), Some(7));
        assert!(!Once::Handled(7).is_duplicate());
        assert_eq!(Once::<i32>::Duplicate.handled(), None);
        assert!(Once::<i32>::Duplicate.is_duplicate());
    }
}
