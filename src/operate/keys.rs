//! Blocked ordering keys, and the leases of relays.

use diesel::PgConnection;

use super::sql::blocked::{self, BlockedKey};
use super::sql::status::{self, LeaseRow};
use crate::endpoints::sql::served::{self, RefusedEndpoint};
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::pinned::pinned;

/// Ordering keys whose messages wait for a retry, a delayed message or an operator: the keys with the most
/// messages first, at most `limit`. Fast for any number of waiting messages: of the messages that could hold a
/// key, the query reads at most 2,000 that are due soonest, and at most 2,000 dead letters.
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

/// The leases of relays, oldest first, including expired leases.
///
/// # Errors
/// A [`DatabaseError`].
pub fn leases(conn: &mut PgConnection, name: &OutboxName) -> Result<Vec<LeaseRow>, DatabaseError> {
    Ok(pinned(conn, name, status::leases)?)
}

/// The endpoints that the settings of an active relay refuse: an URL that is not https, a port, an address
/// in the URL that is not public, a secret for which the relay has no key. Their messages wait for a relay that serves
/// them.
///
/// # Errors
/// A [`DatabaseError`].
pub fn refused_destinations(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<Vec<RefusedEndpoint>, DatabaseError> {
    Ok(pinned(conn, name, served::refused)?)
}
