//! The topics that relays have served.

use diesel::PgConnection;

use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::pinned::pinned;
use crate::store::relay::topics::{self, ServedTopic};

/// The topics that a route or a handler of any relay has ever served, by pattern. A message that names no destination
/// and whose topic meets one of them waits for such a relay. Only a message that meets none, and that no registered
/// destination wants, is settled without a send ([`Status::NoSubscriber`](crate::Status::NoSubscriber)).
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn show(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     for one in admin::served_topics(conn, outbox)? {
///         println!("{} ({}), last served {}", one.pattern, one.kind, one.last_served);
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn served_topics(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<Vec<ServedTopic>, DatabaseError> {
    Ok(pinned(conn, name, topics::list)?)
}

/// Forgets topics that no relay will serve again: a pattern exactly as [`served_topics`] shows it, of this kind (`route` or
/// `handler`) or of any. A relay that serves them records them again when it starts. Returns the number of forgotten
/// rows.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn retire(conn: &mut PgConnection, outbox: &OutboxName) -> Result<bool, DatabaseError> {
///     Ok(admin::forget_topic(conn, outbox, "legacy.*", None)? > 0)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn forget_topic(
    conn: &mut PgConnection,
    name: &OutboxName,
    pattern: &str,
    kind: Option<&str>,
) -> Result<usize, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        topics::forget(conn, name, pattern, kind)
    })?)
}
