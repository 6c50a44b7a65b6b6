//! Ordering keys that wait, and the relays that are at work.

use diesel::PgConnection;

use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::operate::blocked::{self, BlockedKey};
use crate::store::operate::status::{self, LeaseRow};
use crate::store::pinned::pinned;

/// Ordering keys whose messages wait for a retry, for a delayed message or for an operator: those with
/// the most messages first, `limit` at most. Fast, however many wait: at most 2,000 of the messages that
/// could hold a key are looked at, those that are due soonest, and as many dead letters.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn show(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     for key in admin::blocked_keys(conn, outbox, 20)? {
///         let more = if key.waiting_is_capped { "+" } else { "" };
///         println!("{}: {}{more} wait for {}", key.ordering_key, key.waiting, key.sequence);
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn blocked_keys(
    conn: &mut PgConnection,
    name: &OutboxName,
    limit: i64,
) -> Result<Vec<BlockedKey>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        blocked::blocked_keys(conn, name, limit)
    })?)
}

/// The relays that are, or were, at work: by their leases, the oldest first.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn is_served(conn: &mut PgConnection, outbox: &OutboxName) -> Result<bool, DatabaseError> {
///     Ok(admin::leases(conn, outbox)?.iter().any(|lease| lease.seconds_left > 0.0))
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn leases(conn: &mut PgConnection, name: &OutboxName) -> Result<Vec<LeaseRow>, DatabaseError> {
    Ok(pinned(conn, name, status::leases)?)
}
