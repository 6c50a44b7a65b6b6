//! The depth and the throughput of an outbox.

use diesel::PgConnection;

use super::sql::activity::{self, Activity};
use super::sql::depths::{self, Care, Depths};
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::pinned::pinned;

/// The numbers of waiting messages and dead letters, by topic and destination. The cost does not grow with the
/// number of messages, so metrics and pages may query every few seconds. A small outbox is counted. In a large
/// outbox, short lanes (a lane is one topic and destination) are exact, and long lanes are estimates.
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
    Ok(pinned(conn, name, |conn, name| {
        depths::depths(conn, name, Care::Cheap)
    })?)
}

/// The messages written since PostgreSQL's statistics began. Reads no table. Two readings give a rate
/// ([`Activity::since`]). Within one open transaction, all readings are the same.
///
/// # Errors
/// A [`DatabaseError`].
pub fn activity(conn: &mut PgConnection, name: &OutboxName) -> Result<Activity, DatabaseError> {
    Ok(pinned(conn, name, activity::activity)?)
}
