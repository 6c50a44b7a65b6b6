//! A consumer of a feed: its position and its work are in one transaction of its own database.

use std::error::Error as StdError;
use std::time::Duration;

use diesel::PgConnection;
use diesel::result::{Error, QueryResult};

use super::page::After;
use super::reader::{Page, ReadError, Reader, cursor_of, pause};
use super::sql::position::{self, PositionKey};
use crate::log;
use crate::outbox::sql::whole::{check_transaction, depth, transaction};
use crate::receive::CloudEvent;

/// How long a consumer waits whose position another process has locked or moved.
const BEHIND_ANOTHER: Duration = Duration::from_secs(1);

/// Why a consumer has ended. Its position is behind the last event whose work is committed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsumeError {
    /// The feed cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The database of the consumer fails.
    #[error("the position of the consumer cannot be kept: {0}")]
    Database(#[from] Error),
    /// The work failed, and was rolled back. The next start begins with this event.
    #[error("the work of the event at position {position} failed: {source}")]
    Work {
        /// The position of the event; of the first one of a page.
        position: i64,
        /// The error of the work.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The position in the table is none: somebody else has written it.
    #[error("{0:?} in outbox_feed_position is not a position")]
    BadPosition(String),
}

/// Reads a feed and does the work of each event once, in the order of the feed, until it is not to `keep_going`.
///
/// Each event has a transaction of its own on `conn`: it locks the position of the consumer, calls `work`, and writes the
/// position of the event. All of it is committed, or nothing. So an event has its effect once, whenever the process is
/// killed, as long as the effect is made through `conn`. A message can become an event again, with the same id: if somebody
/// sends it again, and after [`ReadError::Changed`]. [`inbox::once`](crate::inbox::once) around the work, from the first event
/// on, handles each message once.
///
/// `consumer` names the consumer within its database. The table `outbox_feed_position` keeps the position under this name
/// and [that of the feed](Reader::name); [`migrate`](crate::migrate) creates the table, and
/// [`inbox::create`](crate::inbox::create) in a database without an outbox. A consumer without a position begins at
/// [`Reader::begin`].
///
/// ```no_run
/// use diesel::prelude::*;
/// use diesel_outbox::feed::{self, Reader};
/// use diesel_outbox::inbox;
///
/// let url = "https://shop.example/api/v1/feeds/crm/events";
/// let reader = Reader::new(url, std::fs::read_to_string("token")?.trim().into())?;
/// let mut conn = PgConnection::establish("postgres://localhost/crm")?;
/// feed::consume(&mut conn, &reader, "crm", || true, |conn, event| {
///     inbox::once(conn, "shop", &event.id, |conn| {
///         if event.event_type == "order.paid" {
///             diesel::sql_query("UPDATE figures SET orders = orders + 1").execute(conn)?;
///         }
///         QueryResult::Ok(())
///     })
///     .map(drop)
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Stopping
/// `keep_going` is asked before each request and each transaction, and several times a second while a retry is waited for:
/// return `false` after a signal, for example from an [`AtomicBool`](std::sync::atomic::AtomicBool). A long poll ends
/// first: it takes at most [`Reader::wait`].
///
/// # Two processes
/// Processes with the same `consumer` share its position, and only one works at a time. The others find the position
/// locked or moved, and look again every second: they stand by, and take over when the first one ends. No process waits
/// for a lock of another.
///
/// # Errors
/// A [`ConsumeError`], after which nothing of the last event is committed. If a start would meet the same error again, the
/// consumer stands still: for an event that it cannot handle, let `work` write the event elsewhere and return `Ok`. After
/// [`ReadError::Expired`] and [`ReadError::Changed`], see [`set_position`].
///
/// It is an error to call it in an open transaction: nothing would be committed.
pub fn consume<E>(
    conn: &mut PgConnection,
    reader: &Reader,
    consumer: &str,
    keep_going: impl FnMut() -> bool,
    mut work: impl FnMut(&mut PgConnection, &CloudEvent<'_>) -> Result<(), E>,
) -> Result<(), ConsumeError>
where
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    let work = |conn: &mut PgConnection, events: &[CloudEvent<'_>]| {
        events.iter().try_for_each(|event| work(conn, event))
    };
    run(conn, reader, consumer, 1, keep_going, work)
}

/// As [`consume`], with a transaction for each page: faster, because a commit is what takes most of the time. If one event
/// fails, the work of its page is rolled back.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::feed::{self, Reader};
///
/// # fn consume(conn: &mut PgConnection, reader: &Reader) -> Result<(), feed::ConsumeError> {
/// feed::consume_pages(conn, reader, "crm", || true, |conn, events| {
///     let orders = i64::try_from(events.len()).unwrap_or(0);
///     diesel::sql_query("UPDATE figures SET orders = orders + $1")
///         .bind::<diesel::sql_types::BigInt, _>(orders)
///         .execute(conn)
///         .map(drop)
/// })
/// # }
/// ```
///
/// # Errors
/// As [`consume`].
pub fn consume_pages<E>(
    conn: &mut PgConnection,
    reader: &Reader,
    consumer: &str,
    keep_going: impl FnMut() -> bool,
    work: impl FnMut(&mut PgConnection, &[CloudEvent<'_>]) -> Result<(), E>,
) -> Result<(), ConsumeError>
where
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    run(conn, reader, consumer, usize::MAX, keep_going, work)
}

/// Sets where a consumer continues, such as after [`ReadError::Expired`] (with [`After::Begin`], once what is missing was
/// fetched in another way) or [`ReadError::Changed`] (with [`After::Time`]: events come again then; their work was done in
/// [`inbox::once`](crate::inbox::once)).
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::feed::{self, After, Reader};
///
/// # fn begin_again(conn: &mut PgConnection, reader: &Reader) -> QueryResult<()> {
/// feed::set_position(conn, reader, "crm", After::Begin)
/// # }
/// ```
///
/// # Errors
/// Diesel's error if the database fails.
pub fn set_position(
    conn: &mut PgConnection,
    reader: &Reader,
    consumer: &str,
    after: After,
) -> QueryResult<()> {
    let of = PositionKey {
        consumer,
        feed: reader.feed(),
    };
    position::write(conn, of, &after.to_string())
}

/// What has become of the events of a transaction.
enum Done {
    Committed,
    /// The position is locked by another process, or another one.
    ByAnother,
}

/// `most`: the events of a transaction.
fn run<E>(
    conn: &mut PgConnection,
    reader: &Reader,
    consumer: &str,
    most: usize,
    mut keep_going: impl FnMut() -> bool,
    mut work: impl FnMut(&mut PgConnection, &[CloudEvent<'_>]) -> Result<(), E>,
) -> Result<(), ConsumeError>
where
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    if depth(conn)? > 0 {
        return Err(Error::AlreadyInTransaction.into());
    }
    let of = PositionKey {
        consumer,
        feed: reader.feed(),
    };
    let begin = reader.beginning().to_string();
    let mut at = read(position::found_or(conn, of, &begin)?)?;
    'pages: while let Some(page) = reader.page_while(at, &mut keep_going)? {
        for (events, next) in parts(&page, most)? {
            if !keep_going() {
                return Ok(());
            }
            if next == at {
                continue;
            }
            let done = in_transaction(conn, of, at, next, |conn| {
                let Some(first) = events.first() else {
                    return Ok(());
                };
                work(conn, events).map_err(|error| ConsumeError::Work {
                    position: first.position().unwrap_or_default(),
                    source: error.into(),
                })
            })?;
            if let Done::ByAnother = done {
                log::debug!(event = "feed_position_moved", consumer = consumer, feed = of.feed; "another process works as the consumer {consumer:?}: standing by");
                pause(BEHIND_ANOTHER, &mut keep_going);
                at = read(position::found_or(conn, of, &begin)?)?;
                continue 'pages;
            }
            at = next;
        }
    }
    Ok(())
}

/// The events of each transaction, and where the consumer is after it. A page without events moves the position, too: from
/// `end` to a cursor.
fn parts(page: &Page, most: usize) -> Result<Vec<(&[CloudEvent<'static>], After)>, ReadError> {
    if page.events.is_empty() {
        return Ok(vec![(&[], After::Cursor(page.next))]);
    }
    let parts = page.events.chunks(most).map(|events| {
        let next = events.last().map_or(Ok(page.next), cursor_of)?;
        Ok((events, After::Cursor(next)))
    });
    parts.collect()
}

/// Works in the transaction that moves the position from `at` to `next`.
fn in_transaction(
    conn: &mut PgConnection,
    of: PositionKey<'_>,
    at: After,
    next: After,
    work: impl FnOnce(&mut PgConnection) -> Result<(), ConsumeError>,
) -> Result<Done, ConsumeError> {
    transaction(conn, |conn| {
        match position::locked(conn, of)? {
            Some(cursor) if read(cursor.clone())? == at => {}
            _ => return Ok(Done::ByAnother),
        }
        work(conn)?;
        // A failed statement that the work has ignored would roll all of it back, and look committed.
        check_transaction(conn)?;
        position::write(conn, of, &next.to_string())?;
        Ok(Done::Committed)
    })
}

fn read(cursor: String) -> Result<After, ConsumeError> {
    cursor
        .parse()
        .map_err(|_| ConsumeError::BadPosition(cursor))
}
