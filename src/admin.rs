//! What operators do: migrate, look, requeue, discard. The binary's commands are made of this.

use std::time::Duration;

use diesel::PgConnection;
use secrecy::SecretString;

use crate::config::Config;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::notifications::Listener;
use crate::store::{claim, connection, dead, inspect, migrate as migrations, pause, rights};

pub use crate::store::dead::{DeadFilter, DeadLetter};
pub use crate::store::inspect::{BlockedKey, LeaseRow, StatusCount, TroubleCount};
pub use crate::store::migrate::Direction;
pub use crate::store::pause::Pausable;

/// Blocked keys that an overview shows.
const MOST_KEYS: i64 = 100;
/// Dead letters moved by one statement.
const BATCH: usize = 1000;

/// Connects with a limit on each statement, and notices soon when the server is gone.
///
/// # Errors
/// [`DatabaseError::Connect`], without the URL's password.
pub fn connect(
    database_url: &SecretString,
    purpose: &str,
    statement_timeout: Duration,
) -> Result<PgConnection, DatabaseError> {
    let plans = connection::Plans::Any;
    Ok(connection::connect(database_url, purpose, statement_timeout, plans)?.conn)
}

/// Brings the database up to date and creates the outbox where it is missing. Safe to run again,
/// and by two processes at once. What was applied is recorded in the table `outbox_migrations`.
/// Returns what was done, in words.
///
/// # Errors
/// A [`DatabaseError`]; then nothing was changed.
pub fn migrate(conn: &mut PgConnection, name: &OutboxName) -> Result<Vec<String>, DatabaseError> {
    migrations::migrate(conn, name)
}

/// Undoes all migrations, and with them the first outbox and the inbox and what is in them.
///
/// # Errors
/// A [`DatabaseError`]; then nothing was changed.
pub fn revert_migrations(conn: &mut PgConnection) -> Result<(), DatabaseError> {
    migrations::revert(conn)
}

/// The migrations as SQL, for the outbox `name`, to be put into a migration of the application's
/// own.
pub fn migration_sql(direction: Direction, name: &OutboxName) -> String {
    migrations::printed(direction, name)
}

/// Roles with the least that they need, as SQL: one that enqueues into the outbox `name`, one for its
/// relays, one that looks, and one that handles messages by the [`inbox`](crate::inbox).
pub fn roles_sql(name: &OutboxName) -> String {
    rights::printed(name)
}

/// What a relay needs in the outbox `name` and the connection's role may not do, as the `GRANT`
/// statements that are missing.
///
/// # Errors
/// A [`DatabaseError`].
pub fn missing_rights(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<Vec<String>, DatabaseError> {
    rights::missing(conn, name)
}

/// Whether the outbox is there and as this version needs it.
///
/// # Errors
/// [`DatabaseError::Schema`] says what is missing and what to do.
pub fn check_schema(conn: &mut PgConnection, name: &OutboxName) -> Result<(), DatabaseError> {
    inspect::check(conn, name)
}

/// An outbox at a glance.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Overview {
    /// Messages by state.
    pub counts: Vec<StatusCount>,
    /// What retrying messages wait for and dead ones died of, the most frequent first.
    pub troubles: Vec<TroubleCount>,
    /// Ordering keys whose messages wait for a retry, for a delayed message or for an operator, a
    /// hundred at most; those with the most messages first.
    pub blocked_keys: Vec<BlockedKey>,
    /// Seconds since the oldest unclaimed due message became due.
    pub oldest_due_seconds: Option<f64>,
    /// Relays, by their leases.
    pub leases: Vec<LeaseRow>,
}

/// Looks at an outbox.
///
/// # Errors
/// A [`DatabaseError`].
pub fn overview(conn: &mut PgConnection, name: &OutboxName) -> Result<Overview, DatabaseError> {
    Ok(Overview {
        counts: inspect::counts(conn, name)?,
        troubles: inspect::troubles(conn, name)?,
        blocked_keys: inspect::blocked_keys(conn, name, MOST_KEYS)?,
        oldest_due_seconds: inspect::oldest_due_seconds(conn, name)?,
        leases: inspect::leases(conn, name)?,
    })
}

/// Dead letters without payloads, the latest first, `limit` at most.
///
/// # Errors
/// A [`DatabaseError`].
pub fn dead_letters(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &DeadFilter,
    limit: i64,
) -> Result<Vec<DeadLetter>, DatabaseError> {
    Ok(dead::list(conn, name, filter, limit)?)
}

/// One dead letter with its payload.
///
/// # Errors
/// A [`DatabaseError`].
pub fn dead_letter(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequence: i64,
) -> Result<Option<DeadLetter>, DatabaseError> {
    Ok(dead::find(conn, name, sequence)?)
}

/// The dead letters of a message, by its id: one for each destination that did not get it.
///
/// # Errors
/// A [`DatabaseError`].
pub fn dead_letters_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: uuid::Uuid,
) -> Result<Vec<DeadLetter>, DatabaseError> {
    Ok(dead::find_by_message_id(conn, name, message_id)?)
}

/// The sequences of the dead letters that match, the oldest first.
///
/// # Errors
/// A [`DatabaseError`].
pub fn matching_dead_letters(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &DeadFilter,
) -> Result<Vec<i64>, DatabaseError> {
    Ok(dead::matching(conn, name, filter)?)
}

/// Puts dead letters back into the outbox, due at once, with no attempts. One whose key is in
/// the outbox again stays dead. Returns how many were requeued.
///
/// # Errors
/// A [`DatabaseError`]; what was requeued before it stays so.
pub fn requeue(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
) -> Result<usize, DatabaseError> {
    let mut requeued = 0;
    for batch in sequences.chunks(BATCH) {
        requeued += dead::requeue(conn, name, batch)?;
    }
    Ok(requeued)
}

/// Removes dead letters for good. Returns how many.
///
/// # Errors
/// A [`DatabaseError`]; what was discarded before it stays so.
pub fn discard(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
) -> Result<usize, DatabaseError> {
    let mut discarded = 0;
    for batch in sequences.chunks(BATCH) {
        discarded += dead::discard(conn, name, batch)?;
    }
    Ok(discarded)
}

/// How many messages are due and not claimed.
///
/// # Errors
/// A [`DatabaseError`].
pub fn count_due(conn: &mut PgConnection, name: &OutboxName) -> Result<u64, DatabaseError> {
    Ok(u64::try_from(inspect::count_due(conn, name)?).unwrap_or(0))
}

/// A topic that has live messages.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct LiveTopic {
    /// The topic.
    pub topic: String,
    /// The destination that they name; empty where they name none.
    pub destination: String,
}

/// The topics of live messages.
///
/// # Errors
/// A [`DatabaseError`].
pub fn topics(conn: &mut PgConnection, name: &OutboxName) -> Result<Vec<LiveTopic>, DatabaseError> {
    let streams = claim::streams(conn, name)?;
    let mut topics: Vec<LiveTopic> = streams
        .into_iter()
        .map(|stream| LiveTopic {
            topic: stream.topic.topic,
            destination: stream.topic.destination,
        })
        .collect();
    topics.sort();
    topics.dedup();
    Ok(topics)
}

/// A destination or a topic whose messages wait.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pause {
    /// `destination` or `topic`.
    pub kind: String,
    /// Which one.
    pub name: String,
    /// Why: a reason code of the relay's, `BREAKER_OPEN`, or an operator's words.
    pub reason: String,
    /// For how long; zero: it is over, and one message is tried next; `None`: until it is resumed.
    pub left: Option<Duration>,
}

/// What is paused now: by an operator, by a receiver's wish or by a circuit breaker.
///
/// # Errors
/// A [`DatabaseError`].
pub fn pauses(conn: &mut PgConnection, name: &OutboxName) -> Result<Vec<Pause>, DatabaseError> {
    let is_on =
        |row: &pause::Paused| row.left != Some(Duration::ZERO) || row.reason == pause::BREAKER_OPEN;
    Ok(pause::all(conn, name)?
        .into_iter()
        .filter(is_on)
        .map(|row| Pause {
            kind: row.kind,
            name: row.name,
            reason: row.reason,
            left: row.left,
        })
        .collect())
}

/// Pauses a destination or a topic, until it is resumed or for a time. Its messages wait at no cost.
/// Relays learn of it within a second; what they have claimed of a topic is still sent.
///
/// # Errors
/// A [`DatabaseError`].
pub fn pause(
    conn: &mut PgConnection,
    name: &OutboxName,
    kind: Pausable,
    which: &str,
    reason: &str,
    duration: Option<Duration>,
) -> Result<(), DatabaseError> {
    Ok(pause::pause(conn, name, kind, which, reason, duration, 0)?)
}

/// Ends a pause, whatever its reason. `false`: there was none.
///
/// # Errors
/// A [`DatabaseError`].
pub fn resume(
    conn: &mut PgConnection,
    name: &OutboxName,
    kind: Pausable,
    which: &str,
) -> Result<bool, DatabaseError> {
    Ok(pause::resume(conn, name, kind, which)?)
}

/// How a relay with these settings hears of new messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WakeUp {
    /// By notification.
    Listening,
    /// By polling: it is told not to listen.
    Off,
    /// By polling: a pooler stands before the database, through which nothing is heard.
    Pooled,
    /// By polling: the outbox has no trigger `outbox_wake`, or it is off.
    NoTrigger,
}

/// How a relay with these settings hears of new messages.
///
/// # Errors
/// A [`DatabaseError`], for example where the listener cannot connect.
pub fn wake_up(conn: &mut PgConnection, config: &Config) -> Result<WakeUp, DatabaseError> {
    if !config.listener {
        return Ok(WakeUp::Off);
    }
    if !inspect::has_trigger(conn, &config.table)? {
        return Ok(WakeUp::NoTrigger);
    }
    let Some(url) = config
        .listener_url
        .as_ref()
        .or(config.database_url.as_ref())
    else {
        return Ok(WakeUp::Off);
    };
    let is_direct = config.listener_url.is_some();
    let timeout = Duration::from_secs(10);
    let listener = Listener::connect(url, &config.table, timeout, is_direct)?;
    Ok(listener.map_or(WakeUp::Pooled, |_| WakeUp::Listening))
}

/// The server's version, as it says it.
///
/// # Errors
/// A [`DatabaseError`].
pub fn server_version(conn: &mut PgConnection) -> Result<String, DatabaseError> {
    Ok(inspect::setting(conn, "server_version")?)
}
