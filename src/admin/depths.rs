//! How much is in an outbox, and how much goes through it.

use diesel::PgConnection;

use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::operate::activity::{self, Activity};
use crate::store::operate::depths::{self, Depths};
use crate::store::pinned::pinned;

/// How many messages wait and how many are dead, by topic and destination, at a cost that does not grow
/// with their number: for metrics and pages that are looked at every few seconds. Small outboxes are
/// counted; of large ones the short lanes are exact and the long ones estimated.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn show(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     for lane in admin::depths(conn, outbox)?.lanes {
///         let about = if lane.is_estimate { "~" } else { "" };
///         println!("{}: {about}{} wait", lane.topic, lane.pending + lane.retrying);
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn depths(conn: &mut PgConnection, name: &OutboxName) -> Result<Depths, DatabaseError> {
    Ok(pinned(conn, name, depths::depths)?)
}

/// The same by counting every message, however many there are: seconds where there are millions.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn is_drained(conn: &mut PgConnection, outbox: &OutboxName) -> Result<bool, DatabaseError> {
///     Ok(admin::count_all(conn, outbox)?.lanes.is_empty())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn count_all(conn: &mut PgConnection, name: &OutboxName) -> Result<Depths, DatabaseError> {
    Ok(pinned(conn, name, depths::exact_depths)?)
}

/// What has gone through the outbox since the database's statistics began, without reading a table: two
/// of these make a rate ([`Activity::since`]). In an open transaction it always is the same.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn show(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     let activity = admin::activity(conn, outbox)?;
///     println!("{} came in, {} were settled", activity.enqueued, activity.settled);
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn activity(conn: &mut PgConnection, name: &OutboxName) -> Result<Activity, DatabaseError> {
    Ok(pinned(conn, name, activity::activity)?)
}
