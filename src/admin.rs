//! What operators do: migrate, look, requeue, discard, pause. The binary's commands are made of this.
//!
//! The functions work on the caller's connection and on the outbox that is named, and commit what they
//! do unless a transaction of the caller's is open. After an outage of a receiver, for example:
//!
//! ```no_run
//! use diesel_outbox::admin::{self, DeadFilter, Pausable};
//! use diesel_outbox::{OutboxName, ReasonCode};
//! use std::time::Duration;
//!
//! let outbox: OutboxName = "outbox".parse()?;
//! let url = std::env::var("DATABASE_URL")?.into();
//! let mut conn = admin::connect(&url, "requeue", Duration::from_secs(30))?;
//!
//! // What its 5xx answers have killed is tried again …
//! let filter = DeadFilter {
//!     topic: Some("order.paid".to_owned()),
//!     reason: Some(ReasonCode::ServerError),
//!     ..DeadFilter::default()
//! };
//! let sequences = admin::matching_dead_letters(&mut conn, &outbox, &filter)?;
//! let requeued = admin::requeue(&mut conn, &outbox, &sequences)?;
//! println!("{requeued} of {} dead letters are due again", sequences.len());
//!
//! // … and the destination gets messages again.
//! admin::resume(&mut conn, &outbox, Pausable::Destination, "billing")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod dead_letters;
mod depths;
mod diagnose;
mod keys;
mod messages;
mod migrations;
mod pauses;
mod replay;

use std::time::Duration;

use diesel::PgConnection;
use secrecy::SecretString;

use crate::config::Config;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::status::Status;
use crate::store::notifications::Listener;
use crate::store::streams::streams;
use crate::store::troubles::{self, Care};
use crate::store::{blocked, connection, depths as counting, inspect};

pub use self::dead_letters::{
    dead_groups, dead_letter, dead_letters, dead_letters_of, discard, matching_dead_letters,
    requeue,
};
pub use self::depths::{activity, count_all, depths};
pub use self::diagnose::{Finding, Severity, diagnose};
pub use self::keys::{blocked_keys, leases};
pub use self::messages::{key_messages, ledger, message};
pub use self::migrations::{
    check_schema, migrate, migration_sql, missing_rights, revert_migrations, roles_sql,
};
pub use self::pauses::{Pause, pause, pauses, resume};
pub use self::replay::{ReplayRun, count_replayable, replay};
pub use crate::relay::DepthGauges;
pub use crate::store::activity::{Activity, Rates};
pub use crate::store::blocked::BlockedKey;
pub use crate::store::dead::{DeadFilter, DeadGroup, DeadLetter};
pub use crate::store::depths::{DeadDepth, Depths, LaneDepth};
pub use crate::store::inspect::LeaseRow;
pub use crate::store::ledger::{LedgerFilter, LedgerRow};
pub use crate::store::messages::{MessageKey, MessageRecord};
pub use crate::store::migrate::Direction;
pub use crate::store::pause::Pausable;
pub use crate::store::place::Place;
pub use crate::store::replay::{ReplayFilter, ReplayIds, Replayed};
pub use crate::store::searched::Searched;
pub use crate::store::troubles::{StatusCount, TroubleCount};

/// Blocked keys that an overview shows.
const MOST_KEYS: i64 = 100;

/// Connects with a limit on each statement, and notices soon when the server is gone. (Behind a pooler
/// in transaction mode there is no limit: others would have it, too.)
///
/// `purpose`, a word or two without quotes, becomes a part of the connection's `application_name`. Any
/// other [`PgConnection`] serves the functions here as well.
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

/// An outbox at a glance.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Overview {
    /// Messages by state, states without any left out; those delivered for as long as the ledger
    /// remembers them.
    pub counts: Vec<StatusCount>,
    /// The same by topic and destination, without those delivered.
    pub depths: Depths,
    /// What waiting messages wait for and dead ones died of: by state, then the most frequent first,
    /// a hundred at most.
    pub troubles: Vec<TroubleCount>,
    /// Ordering keys whose messages wait for a retry, for a delayed message or for an operator, a
    /// hundred at most; those with the most messages first.
    pub blocked_keys: Vec<BlockedKey>,
    /// Seconds since the oldest unclaimed due message became due; `None`: none is due.
    pub oldest_due_seconds: Option<f64>,
    /// Relays, by their leases.
    pub leases: Vec<LeaseRow>,
}

/// What is in an outbox, what is wrong with it, and which relays work on it, at a cost that does not grow
/// with it: numbers of large outboxes are estimates, and say so.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// /// What is worth an alarm.
/// fn alarms(conn: &mut PgConnection, outbox: &OutboxName) -> Result<Vec<String>, DatabaseError> {
///     let overview = admin::overview(conn, outbox)?;
///     let mut alarms = Vec::new();
///     if overview.leases.iter().all(|lease| lease.seconds_left < 0.0) {
///         alarms.push("no relay is alive".to_owned());
///     }
///     if let Some(seconds) = overview.oldest_due_seconds.filter(|seconds| *seconds > 60.0) {
///         alarms.push(format!("a message has been due for {seconds:.0} s"));
///     }
///     Ok(alarms)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn overview(conn: &mut PgConnection, name: &OutboxName) -> Result<Overview, DatabaseError> {
    look(conn, name, Care::Cheap)
}

/// The same with every message counted: seconds where there are millions.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn show(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     for row in admin::exact_overview(conn, outbox)?.counts {
///         println!("{}: {}", row.status, row.count);
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn exact_overview(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<Overview, DatabaseError> {
    look(conn, name, Care::Exact)
}

fn look(conn: &mut PgConnection, name: &OutboxName, care: Care) -> Result<Overview, DatabaseError> {
    let depths = match care {
        Care::Cheap => counting::depths(conn, name)?,
        Care::Exact => counting::exact_depths(conn, name)?,
    };
    let live_is_estimate = depths.lanes.iter().any(|lane| lane.is_estimate);
    let dead_is_estimate = depths.dead.iter().any(|lane| lane.is_estimate);
    let count = |status: Status, count, is_estimate| StatusCount {
        status: status.to_string(),
        count,
        is_estimate,
    };
    let mut counts = vec![
        count(Status::Pending, depths.pending(), live_is_estimate),
        count(Status::Sending, depths.sending(), live_is_estimate),
        count(Status::Retrying, depths.retrying(), live_is_estimate),
        troubles::delivered(conn, name, care, depths.dead_letters())?,
        count(Status::Dead, depths.dead_letters(), dead_is_estimate),
    ];
    counts.retain(|row| row.count > 0);
    Ok(Overview {
        counts,
        troubles: troubles::troubles(conn, name, care)?,
        blocked_keys: blocked::blocked_keys(conn, name, MOST_KEYS)?,
        oldest_due_seconds: depths.oldest_due_seconds(),
        leases: inspect::leases(conn, name)?,
        depths,
    })
}

/// How many messages are due and not claimed, those of paused destinations and topics included.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// /// For an autoscaler: one relay for each ten thousand messages that wait.
/// fn relays(conn: &mut PgConnection, outbox: &OutboxName) -> Result<u64, DatabaseError> {
///     Ok(1 + admin::count_due(conn, outbox)? / 10_000)
/// }
/// ```
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

/// The topics of live messages, sorted, each once for each destination that its messages name.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, HttpDispatcher, OutboxName, admin};
/// /// Topics whose messages would find no destination.
/// fn unrouted(
///     conn: &mut PgConnection,
///     outbox: &OutboxName,
///     dispatcher: &HttpDispatcher,
/// ) -> Result<Vec<String>, DatabaseError> {
///     let live = admin::topics(conn, outbox)?.into_iter();
///     let lost = live.filter(|one| dispatcher.destinations_of(&one.topic, &one.destination).is_empty());
///     Ok(lost.map(|one| one.topic).collect())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn topics(conn: &mut PgConnection, name: &OutboxName) -> Result<Vec<LiveTopic>, DatabaseError> {
    let mut topics: Vec<LiveTopic> = streams(conn, name)?
        .into_iter()
        .map(|found| LiveTopic {
            topic: found.stream.topic.topic,
            destination: found.stream.topic.destination,
        })
        .collect();
    topics.sort();
    topics.dedup();
    Ok(topics)
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

/// How a relay with these settings hears of new messages: found out by connecting as it would.
///
/// ```no_run
/// use diesel_outbox::admin::{self, WakeUp};
///
/// let config = diesel_outbox::config::from_env()?;
/// # let mut conn = admin::connect(config.database_url()?, "check", config.send_timeout)?;
/// if admin::wake_up(&mut conn, &config)? == WakeUp::Pooled {
///     println!("set OUTBOX_LISTENER_URL to reach PostgreSQL without the pooler");
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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

/// The server's version, as it says it: `18.1 (Debian 18.1-1)`.
///
/// ```no_run
/// # use diesel::prelude::*;
/// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// println!("PostgreSQL {}", diesel_outbox::admin::server_version(&mut conn)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn server_version(conn: &mut PgConnection) -> Result<String, DatabaseError> {
    Ok(inspect::setting(conn, "server_version")?)
}
