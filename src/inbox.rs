//! The inbox handles each message once, in a Diesel transaction.
//!
//! Delivery is at least once, so a message may arrive again. [`once`] records the message in the table
//! `outbox_inbox`, in the transaction that handles the message: both are committed, or neither. The inbox
//! works for every kind of receiver: an HTTP receiver of this crate's relay (see
//! [`receive`](crate::receive)) or of other webhooks, a handler in the process, or the consumer of a queue.
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
//!         Once::Duplicate => println!("handled before"),
//!     }
//!     Ok(())
//! }
//! ```
//!
//! The crate's migrations ([`migrate`](crate::migrate)) create the table. In a database without an outbox,
//! call [`create`], or put [`migration_sql`] into a migration of your own. A database has one inbox, which
//! PostgreSQL finds by the search path. Handling messages needs `INSERT` on the table; cleaning needs
//! `SELECT` and `DELETE`.
//!
//! The table grows by one row for each message. Call [`clean`] regularly, or let a relay do it
//! ([`inbox_retention`](crate::config::Config::inbox_retention)). Keep a row for as long as its message may
//! arrive again: until its last attempt, and longer if an operator may requeue its dead letter.

#[cfg(feature = "relay")]
pub(crate) mod cleaning;
pub(crate) mod sql;

use std::fmt::Display;
use std::time::Duration;

use diesel::PgConnection;
use diesel::result::{Error, QueryResult};

use self::sql::{self as inbox, ForgettingHandled};
use crate::migrations::Direction;
use crate::outbox::sql::whole::{check_transaction, transaction};
use crate::setup::sql::migrate;

/// The maximum length of a source or a message id, in bytes. The table has the same limit.
pub const MAX_KEY_BYTES: usize = 1024;
/// The maximum number of rows that one statement removes.
const CLEAN_BATCH: i64 = 1000;

/// The result of [`once`].
///
/// Most receivers give the same response in both cases, and can ignore the result.
///
/// ```
/// use diesel_outbox::inbox::Once;
///
/// fn log(done: Once<usize>) {
///     if done.is_duplicate() {
///         println!("the message arrived again");
///     }
///     println!("{} rows", done.handled().unwrap_or(0));
/// }
/// # log(Once::Handled(1));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Once<T> {
    /// The handler was called, and returned this value.
    Handled(T),
    /// The message was handled before. The handler was not called.
    Duplicate,
}

impl<T> Once<T> {
    /// Whether the message was handled before.
    #[must_use]
    pub fn is_duplicate(&self) -> bool {
        matches!(self, Self::Duplicate)
    }

    /// The value that the handler returned; `None` for a duplicate.
    #[must_use]
    pub fn handled(self) -> Option<T> {
        match self {
            Self::Handled(value) => Some(value),
            Self::Duplicate => None,
        }
    }
}

/// A source or a message id that the inbox cannot store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the {field} of the message {reason}")]
struct BadKey {
    /// `source` or `id`.
    field: &'static str,
    reason: &'static str,
}

/// Handles a message unless it was handled before.
///
/// `once` begins a transaction (a savepoint inside an open transaction), records `(source, message_id)`
/// and calls `handle` with the connection. The changes that `handle` makes on the connection are committed
/// together with the record. If `handle` fails, both are rolled back, and the message can be handled again.
///
/// `source` names the sender that assigns the ids: the event's source, or a name of your own (`"billing"`)
/// if all messages come from one sender. Use a name of your own also for requests in binary mode over an
/// untrusted network: the header `ce-source` is not signed, so a replay with another source would pass as
/// another message. `message_id` is the event's id, a [`Uuid`](uuid::Uuid) or a text.
///
/// # Concurrency
/// If another transaction is handling the same message, `once` waits for that transaction to end. If it
/// commits, the message is a duplicate; if it rolls back, the message is handled here. Two transactions that
/// handle the same messages in different orders can deadlock. PostgreSQL then aborts one of them, and it can
/// be retried. To avoid deadlocks, handle each message in a transaction of its own.
///
/// This applies to `READ COMMITTED`, the default. In `REPEATABLE READ` and `SERIALIZABLE`, a message that
/// another transaction has committed since this transaction began is an error
/// ([`SerializationFailure`](diesel::result::DatabaseErrorKind::SerializationFailure)), like any row
/// that both write. Run the transaction again: the message is then a duplicate.
///
/// # Errors
/// - The error that `handle` returns.
/// - Diesel's error if the database fails or the table is missing. Also if a statement in `handle` failed and
///   `handle` ignored the error: after a failed statement, PostgreSQL commits nothing.
/// - [`Error::QueryBuilderError`] if the source or the id is empty, is longer than
///   [`MAX_KEY_BYTES`], or contains NUL. An open transaction stays usable.
///
/// # Panics
/// Only if `handle` panics. Its changes and the record are rolled back, and an open transaction stays usable.
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

/// [`once`] with a lock timeout, which applies to the wait for another transaction that handles the message, and
/// to every lock that `handle` takes.
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
    transaction(conn, |conn| {
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
        text if text.contains('\0') => "contains NUL",
        _ => return Ok(()),
    };
    Err(BadKey { field, reason })
}

/// Removes the records of messages that were handled longer than `age` ago, and returns how many. Each
/// statement removes at most 1,000 rows. A message that arrives after its record was removed is handled again.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::inbox;
/// use std::time::Duration;
///
/// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// let removed = inbox::clean(&mut conn, Duration::from_secs(30 * 24 * 3600))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Diesel's error if the database fails. Rows that were already removed stay removed, unless the caller has a
/// transaction open.
pub fn clean(conn: &mut PgConnection, age: Duration) -> QueryResult<usize> {
    let mut old = ForgettingHandled::new(inbox::TABLE.to_owned(), age);
    let mut removed = 0;
    loop {
        let rows = old.step(conn, CLEAN_BATCH)?;
        removed += rows;
        if rows == 0 {
            return Ok(removed);
        }
    }
}

/// Creates the inbox if it is missing, in a database without an outbox, with the positions of consumers of
/// feeds (`feed::consume`). Safe to run again, and by two
/// processes at once. If the database gets an outbox later, [`migrate`](crate::migrate) keeps this inbox.
///
/// ```no_run
/// # use diesel::prelude::*;
/// # let mut conn = PgConnection::establish("postgres://localhost/billing")?;
/// diesel_outbox::inbox::create(&mut conn)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Diesel's error if the database fails. Nothing was changed.
pub fn create(conn: &mut PgConnection) -> QueryResult<()> {
    migrate::create_inbox(conn)
}

/// The SQL that creates the inbox, or drops it, for a migration of the application.
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
            assert!(error.starts_with("the id of the message "), "{error}");
        }
    }

    #[test]
    fn the_result_of_a_handled_message_is_returned() {
        assert_eq!(Once::Handled(7).handled(), Some(7));
        assert!(!Once::Handled(7).is_duplicate());
        assert_eq!(Once::<i32>::Duplicate.handled(), None);
        assert!(Once::<i32>::Duplicate.is_duplicate());
    }
}
