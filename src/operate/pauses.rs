//! Pauses of destinations and topics.

use std::time::Duration;

use diesel::PgConnection;
use diesel::result::Error::DeserializationError;

use crate::engine::send::sql::pause::{self, Pausable};
use crate::error::DatabaseError;
use crate::hand::Hand;
use crate::name::OutboxName;
use crate::sql::pinned::pinned;
use crate::words::UnknownWord;

/// A paused destination or topic.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pause {
    /// What is paused.
    pub kind: Pausable,
    /// The name of the destination or the topic.
    pub name: String,
    /// Why: a reason code of the relay, `BREAKER_OPEN`, or the text of an operator.
    pub reason: String,
    /// Whose pause it is. A destination may be paused by several hands: each is a pause of its own.
    pub by: Hand,
    /// The time left. Zero: the pause has ended, and one message is tried next. `None`: until it is resumed.
    pub left: Option<Duration>,
}

/// The destinations and topics that are paused now: by an operator, by the owner of an endpoint, by a receiver's
/// request, or by a circuit breaker.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn show(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     for pause in admin::pauses(conn, outbox)? {
///         let until = match pause.left {
///             Some(left) => format!("for {} s", left.as_secs()),
///             None => "until it is resumed".to_owned(),
///         };
///         println!("{} {} is paused {until}: {}", pause.kind.as_str(), pause.name, pause.reason);
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn pauses(conn: &mut PgConnection, name: &OutboxName) -> Result<Vec<Pause>, DatabaseError> {
    let is_on =
        |row: &pause::Paused| row.left != Some(Duration::ZERO) || row.reason == pause::BREAKER_OPEN;
    let rows = pinned(conn, name, pause::all)?.into_iter().filter(is_on);
    let pause = |row: pause::Paused| {
        let kind = row.kind.parse();
        Ok(Pause {
            kind: kind.map_err(|error: UnknownWord| DeserializationError(error.into()))?,
            name: row.name,
            reason: row.reason,
            by: row.by,
            left: row.left,
        })
    };
    rows.map(pause).collect()
}

/// Pauses a destination or a topic as an operator, until it is resumed or for a time. Its messages wait and use no attempts.
/// Relays notice the pause within a second. Messages of a topic that are already claimed are still sent.
/// The reason `BREAKER_OPEN` is reserved for relays.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::admin::{self, Pausable};
/// use std::time::Duration;
///
/// # let outbox = diesel_outbox::OutboxName::default();
/// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// // While billing is upgraded.
/// let time = Some(Duration::from_secs(600));
/// admin::pause(&mut conn, &outbox, Pausable::Destination, "billing", "upgrade", time)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
    Ok(pinned(conn, name, |conn, name| {
        let by = (Hand::Operator, reason);
        pause::pause(conn, name, kind, which, by, duration, 0).map(drop)
    })?)
}

/// Ends the pauses of operators, of the circuit breaker and of the receiver. If there are none, ends the pause of the owner of
/// an endpoint. Returns `false` if there was no pause.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::admin::{self, Pausable};
///
/// # let outbox = diesel_outbox::OutboxName::default();
/// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// if !admin::resume(&mut conn, &outbox, Pausable::Topic, "order.paid")? {
///     println!("the topic was not paused");
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn resume(
    conn: &mut PgConnection,
    name: &OutboxName,
    kind: Pausable,
    which: &str,
) -> Result<bool, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        pause::resume(conn, name, kind, which)
    })?)
}
