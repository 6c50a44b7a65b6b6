//! Functions for operators: migrate, inspect, cancel, settle, requeue, discard, replay, pause, forget. The commands of
//! the binary call these functions.
//!
//! Each function takes the caller's connection and the name of an outbox. Each function commits, unless the caller has
//! a transaction open. For example, after an outage of a receiver:
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
//! // Requeue the messages that were dead-lettered because of 5xx responses …
//! let filter = DeadFilter {
//!     topic: Some("order.paid".to_owned()),
//!     reason: Some(ReasonCode::ServerError),
//!     ..DeadFilter::default()
//! };
//! let sequences = admin::matching_dead_letters(&mut conn, &outbox, &filter)?;
//! let note = admin::Note::new("alice", "the receiver is fixed");
//! let requeued = admin::requeue(&mut conn, &outbox, &sequences, &note)?;
//! println!("{requeued} of {} dead letters are due again", sequences.len());
//!
//! // … and resume the destination.
//! admin::resume(&mut conn, &outbox, Pausable::Destination, "billing")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod dead_letters;
mod depths;
mod diagnose;
mod forget;
mod keys;
mod messages;
mod migrations;
mod pauses;
mod replay;
mod topics;
mod waiting;

use std::collections::HashMap;
use std::time::Duration;

use diesel::PgConnection;
use diesel::result::QueryResult;
use secrecy::SecretString;

use crate::config::Config;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::routes::matches_any;
use crate::status::{ReasonCode, Status};
use crate::store::operate::troubles::{self, Care};
use crate::store::operate::{blocked, depths as counting, why};
use crate::store::pinned::pinned;
use crate::store::relay::claim::Topic;
use crate::store::relay::connection;
use crate::store::relay::notifications::Listener;
use crate::store::relay::served::served;
use crate::store::relay::streams::streams;
use crate::store::setup::inspect;

pub use self::dead_letters::{
    dead_groups, dead_letters, dead_letters_at, dead_letters_of, discard, matching_dead_letters,
    requeue,
};
pub use self::depths::{activity, count_all, depths};
pub use self::diagnose::{Finding, Severity, diagnose};
pub use self::forget::{Forgotten, forget};
pub use self::keys::{blocked_keys, leases, refused_destinations};
pub use self::messages::{history, key_messages, ledger, message};
pub use self::migrations::{
    check_schema, migration_sql, missing_rights, revert_migrations, roles_sql,
};
pub use self::pauses::{Pause, pause, pauses, resume};
pub use self::replay::{ReplayRun, count_replayable, replay};
pub use self::topics::{ForgetTopicError, forget_topic, served_topics};
pub use self::waiting::{Note, Verdict, cancel, reschedule, settle, wait_reasons, waiting};
pub use crate::migrations::{Direction, migrate};
pub use crate::relay::DepthGauges;
pub use crate::store::operate::activity::{Activity, Rates};
pub use crate::store::operate::blocked::BlockedKey;
pub use crate::store::operate::dead::{DeadFilter, DeadGroup, DeadLetter, LetterId};
pub use crate::store::operate::depths::{DeadDepth, Depths, LaneDepth};
pub use crate::store::operate::history::HistoryEntry;
pub use crate::store::operate::ledger::{LedgerFilter, LedgerRow};
pub use crate::store::operate::messages::MessageRecord;
pub use crate::store::operate::replay::{ReplayFilter, ReplayIds, Replayed};
pub use crate::store::operate::status::LeaseRow;
use crate::store::operate::status::{self, DueRow};
pub use crate::store::operate::troubles::{StatusCount, TroubleCount};
pub use crate::store::operate::waiting::WaitingFilter;
pub use crate::store::operate::why::{Blocker, WaitReason};
pub use crate::store::place::Place;
pub use crate::store::relay::pause::Pausable;
pub use crate::store::relay::served::{RefusedDestination, Unserved};
pub use crate::store::relay::topics::ServedTopic;
pub use crate::store::searched::Searched;
pub use crate::store::seek::MessageKey;

/// The most blocked keys in an overview.
const MOST_KEYS: i64 = 100;

/// Opens a connection that limits the time of each statement, and quickly detects a lost server. Behind a
/// pooler in transaction mode, statements have no limit, because it would also apply to other clients.
///
/// `purpose` is a word or two without quotes, and becomes part of the connection's `application_name`. The
/// functions here also accept any other [`PgConnection`].
///
/// # Errors
/// [`DatabaseError::Connect`]; the text omits the password of the URL.
pub fn connect(
    database_url: &SecretString,
    purpose: &str,
    statement_timeout: Duration,
) -> Result<PgConnection, DatabaseError> {
    let limits = connection::Limits::of_caller(statement_timeout);
    Ok(connection::connect(database_url, purpose, limits)?.conn)
}

/// An outbox at a glance.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Overview {
    /// The number of messages in each state; empty states are left out. Delivered messages count for as
    /// long as the ledger keeps them.
    pub counts: Vec<StatusCount>,
    /// Live messages and dead letters by topic and destination.
    pub depths: Depths,
    /// Why messages wait or were dead-lettered: by state, then the most frequent reason first, at most
    /// 100.
    pub troubles: Vec<TroubleCount>,
    /// Ordering keys whose messages wait for a retry, a delayed message or an operator: the keys with the
    /// most messages first, at most 100.
    pub blocked_keys: Vec<BlockedKey>,
    /// Seconds since the oldest due, unclaimed message became due. `None`: no message is due.
    pub oldest_due_seconds: Option<f64>,
    /// The leases of the relays.
    pub leases: Vec<LeaseRow>,
}

/// The contents, the troubles and the relays of an outbox. The cost does not grow with the outbox: the numbers
/// of a large outbox are estimates, and marked as estimates.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// /// The reasons to raise an alarm.
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
    pinned(conn, name, |conn, name| look(conn, name, Care::Cheap))
}

/// The same as [`overview`], but counts every message. Takes seconds if there are millions of messages.
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
    pinned(conn, name, |conn, name| look(conn, name, Care::Exact))
}

fn look(conn: &mut PgConnection, name: &OutboxName, care: Care) -> Result<Overview, DatabaseError> {
    let depths = match care {
        Care::Cheap => counting::depths(conn, name)?,
        Care::Exact => counting::exact_depths(conn, name)?,
    };
    let live_is_estimate = depths.lanes.iter().any(|lane| lane.is_estimate);
    let dead_is_estimate = depths.dead.iter().any(|lane| lane.is_estimate);
    let count = |status: Status, count, is_estimate| StatusCount {
        status,
        count,
        is_estimate,
    };
    let mut counts = vec![
        count(Status::Pending, depths.pending(), live_is_estimate),
        count(Status::Sending, depths.sending(), live_is_estimate),
        count(Status::Retrying, depths.retrying(), live_is_estimate),
    ];
    counts.extend(troubles::settled(conn, name, care, depths.dead_letters())?);
    counts.push(count(Status::Dead, depths.dead_letters(), dead_is_estimate));
    counts.retain(|row| row.count > 0);
    let mut all_troubles: Vec<TroubleCount> = depths.unrouted().filter_map(unrouted).collect();
    all_troubles.extend(disabled(&depths, &why::of_disabled(conn, name)?));
    // The last error of messages that no relay serves is not why they wait.
    let is_unserved = |topic: &str| {
        let mut lanes = depths.lanes.iter().filter(|lane| lane.topic == topic);
        lanes.clone().next().is_some() && lanes.all(|lane| lane.unserved.is_some())
    };
    let is_reason = |one: &TroubleCount| one.status != Status::Pending || !is_unserved(&one.topic);
    let others = troubles::troubles(conn, name, care)?.into_iter();
    all_troubles.extend(others.filter(is_reason));
    all_troubles.truncate(troubles::MOST);
    Ok(Overview {
        counts,
        troubles: all_troubles,
        blocked_keys: blocked::blocked_keys(conn, name, MOST_KEYS)?,
        oldest_due_seconds: depths.oldest_due_seconds(),
        leases: status::leases(conn, name)?,
        depths,
    })
}

/// Messages that wait because no active relay serves them.
fn unrouted(lane: &LaneDepth) -> Option<TroubleCount> {
    let why = lane.unserved.as_ref()?;
    Some(TroubleCount {
        status: Status::Pending,
        topic: lane.topic.clone(),
        reason: ReasonCode::NoRoute.to_string(),
        count: lane.pending + lane.retrying,
        example: Some(format!(
            "{why}: messages wait and use no attempts; {}",
            why.next_step()
        )),
        is_estimate: lane.is_estimate,
    })
}

/// Due messages of disabled registered destinations.
fn disabled(depths: &Depths, reasons: &HashMap<String, String>) -> Vec<TroubleCount> {
    let lanes = depths.lanes.iter();
    let due = lanes.filter(|lane| lane.oldest_due_seconds.is_some());
    let row = |lane: &LaneDepth| {
        let (destination, reason) = reasons.get_key_value(&lane.destination)?;
        let why = WaitReason::DestinationDisabled {
            destination: destination.clone(),
            reason: reason.clone(),
        };
        Some(TroubleCount {
            status: Status::Pending,
            topic: lane.topic.clone(),
            reason: "DISABLED".to_owned(),
            count: lane.pending + lane.retrying,
            example: Some(why.to_string()),
            is_estimate: lane.is_estimate,
        })
    };
    due.filter_map(row).collect()
}

/// The number of due, unclaimed messages, including messages of paused destinations and topics.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// /// For an autoscaler: one relay, and one more for every 10,000 due messages.
/// fn relays(conn: &mut PgConnection, outbox: &OutboxName) -> Result<u64, DatabaseError> {
///     Ok(1 + admin::count_due(conn, outbox)? / 10_000)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn count_due(conn: &mut PgConnection, name: &OutboxName) -> Result<u64, DatabaseError> {
    Ok(u64::try_from(pinned(conn, name, status::count_due)?).unwrap_or(0))
}

/// The due, unclaimed messages of one topic and destination.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DueTopic {
    /// The topic.
    pub topic: String,
    /// The destination that the messages name; empty if they name none.
    pub destination: String,
    /// The number of messages.
    pub count: u64,
    /// The number of these messages that wait for another message, or a dead letter, of their ordering key.
    pub behind: u64,
    /// `NO_ROUTE`: relays are active, but no relay serves these messages.
    pub no_route: bool,
}

/// The due, unclaimed messages by topic and destination, including paused topics and destinations. `topics` are
/// patterns, as in routes; an empty slice selects all topics. Counts every message.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn show(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     for due in admin::due(conn, outbox, &["order.*".to_owned()])? {
///         println!("{}: {}, of which {} wait for an earlier message", due.topic, due.count, due.behind);
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn due(
    conn: &mut PgConnection,
    name: &OutboxName,
    topics: &[String],
) -> Result<Vec<DueTopic>, DatabaseError> {
    let (served, mut rows) = pinned(conn, name, |conn, name| {
        QueryResult::Ok((served(conn, name)?, status::due(conn, name)?))
    })?;
    rows.retain(|row| topics.is_empty() || matches_any(topics, &row.topic));
    let due = |row: DueRow| DueTopic {
        count: u64::try_from(row.count).unwrap_or(0),
        behind: u64::try_from(row.behind).unwrap_or(0),
        no_route: served.unserved(&row.topic, &row.destination).is_some(),
        topic: row.topic,
        destination: row.destination,
    };
    Ok(rows.into_iter().map(due).collect())
}

/// A topic with live messages, for one destination.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct LiveTopic {
    /// The topic.
    pub topic: String,
    /// The destination that the messages name; empty if they name none.
    pub destination: String,
    /// The names of the active relays that have a route, a handler or a destination for these messages.
    pub served_by: Vec<String>,
    /// Why relays are active, but none serves these messages.
    pub unserved: Option<Unserved>,
}

/// The topics of live messages, sorted: one entry for each topic and destination.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, HttpDispatcher, OutboxName, admin};
/// /// Topics that neither these settings nor an active relay serves.
/// fn unrouted(
///     conn: &mut PgConnection,
///     outbox: &OutboxName,
///     dispatcher: &HttpDispatcher,
/// ) -> Result<Vec<String>, DatabaseError> {
///     let mut live = admin::topics(conn, outbox)?;
///     live.retain(|one| {
///         let here = dispatcher.destinations_of(&one.topic, &one.destination);
///         here.is_empty() && one.served_by.is_empty()
///     });
///     Ok(live.into_iter().map(|one| one.topic).collect())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn topics(conn: &mut PgConnection, name: &OutboxName) -> Result<Vec<LiveTopic>, DatabaseError> {
    let (served, streams) = pinned(conn, name, |conn, name| {
        QueryResult::Ok((served(conn, name)?, streams(conn, name)?))
    })?;
    let mut topics: Vec<LiveTopic> = streams
        .into_iter()
        .map(|found| {
            let Topic { topic, destination } = found.stream.topic;
            let by = served.by(&topic, &destination).map(str::to_owned);
            LiveTopic {
                served_by: by.collect(),
                unserved: served.unserved(&topic, &destination),
                topic,
                destination,
            }
        })
        .collect();
    topics.sort();
    topics.dedup();
    Ok(topics)
}

/// How a relay with these settings learns of new messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WakeUp {
    /// By notification.
    Listening,
    /// By polling: the settings turn the listener off.
    Off,
    /// By polling: a pooler in front of the database delivers no notifications.
    Pooled,
    /// By polling: the trigger `outbox_wake` is missing or disabled.
    NoTrigger,
}

/// Determines how a relay with these settings learns of new messages, by connecting as the relay would.
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
/// A [`DatabaseError`], for example if the listener cannot connect.
pub fn wake_up(conn: &mut PgConnection, config: &Config) -> Result<WakeUp, DatabaseError> {
    if !config.listener {
        return Ok(WakeUp::Off);
    }
    if !pinned(conn, &config.table, inspect::has_trigger)? {
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

/// The version of the server as PostgreSQL reports it, such as `18.1 (Debian 18.1-1)`.
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
