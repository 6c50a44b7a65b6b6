//! An outbox at a glance.

use std::collections::{BTreeSet, HashMap};

use diesel::PgConnection;

use super::sql::blocked::{self, BlockedKey};
use super::sql::depths::{self as counting, Care, Depths, LaneDepth};
use super::sql::status::{self, LeaseRow};
use super::sql::troubles::{self, StatusCount, TroubleCount};
use super::sql::why::{self, WaitReason};
use crate::endpoints::sql::served::served;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::pinned::pinned;
use crate::status::{ReasonCode, Status};

/// The most blocked keys in an overview.
const MOST_KEYS: i64 = 100;

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
/// # Errors
/// A [`DatabaseError`].
pub fn overview(conn: &mut PgConnection, name: &OutboxName) -> Result<Overview, DatabaseError> {
    pinned(conn, name, |conn, name| look(conn, name, Care::Cheap))
}

/// The same as [`overview`], but counts every message. Takes seconds if there are millions of messages.
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
    let depths = counting::depths(conn, name, care)?;
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
    all_troubles.extend(stopped(&depths, &why::stopped(conn, name, None)?));
    // The last error of messages that no relay serves is not why they wait.
    let is_unserved = |topic: &str| {
        let mut lanes = depths.lanes.iter().filter(|lane| lane.topic == topic);
        lanes.clone().next().is_some() && lanes.all(|lane| lane.unserved.is_some())
    };
    let is_reason = |one: &TroubleCount| one.status != Status::Pending || !is_unserved(&one.topic);
    let others = troubles::troubles(conn, name, care)?.into_iter();
    all_troubles.extend(others.filter(is_reason));
    all_troubles.truncate(troubles::MOST);
    if all_troubles.iter().any(|one| one.destination.is_empty()) {
        let served = served(conn, name, &BTreeSet::new())?;
        let unnamed = all_troubles
            .iter_mut()
            .filter(|one| one.destination.is_empty());
        for one in unnamed {
            let routed = served.only_destination(&one.topic).unwrap_or_default();
            routed.clone_into(&mut one.destination);
        }
    }
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
        destination: lane.destination.clone(),
        reason: why.code().to_string(),
        count: lane.pending + lane.retrying,
        example: Some(format!(
            "{why}: messages wait and use no attempts; {}",
            why.next_step(lane.pending + lane.retrying)
        )),
        is_estimate: lane.is_estimate,
    })
}

/// Due messages of endpoints to which nothing is sent.
fn stopped(depths: &Depths, reasons: &HashMap<String, WaitReason>) -> Vec<TroubleCount> {
    let lanes = depths.lanes.iter();
    let due = lanes.filter(|lane| lane.oldest_due_seconds.is_some());
    let row = |lane: &LaneDepth| {
        let why = reasons.get(&lane.destination)?;
        Some(TroubleCount {
            status: Status::Pending,
            topic: lane.topic.clone(),
            destination: lane.destination.clone(),
            reason: match why {
                WaitReason::NotVerified { .. } => ReasonCode::NotVerified.to_string(),
                _ => "DISABLED".to_owned(),
            },
            count: lane.pending + lane.retrying,
            example: Some(why.to_string()),
            is_estimate: lane.is_estimate,
        })
    };
    due.filter_map(row).collect()
}
