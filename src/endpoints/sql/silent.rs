//! Relays whose heartbeat has stopped.

use std::collections::HashMap;
use std::fmt;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Text};
use diesel::{PgConnection, RunQueryDsl};

use crate::name::OutboxName;
use crate::sql::statement::unprepared_statement;

/// A relay whose lease is still valid, but whose heartbeat has stopped: the relay was killed, its machine hangs, or it has lost
/// its database. Its lease expires, and other relays take its messages over.
///
/// ```
/// let reason = diesel_outbox::admin::WaitReason::NoRelay {
///     disabled: None,
///     silent: Some(diesel_outbox::admin::SilentRelay { relay: "shop/7".to_owned(), seconds: 25 }),
/// };
/// assert_eq!(reason.to_string(), "no relay: the heartbeat of shop/7 has stopped: the last one was 25 s ago");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SilentRelay {
    /// The name of the relay.
    pub relay: String,
    /// Seconds since its last heartbeat.
    pub seconds: u64,
}

impl fmt::Display for SilentRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { relay, seconds } = self;
        write!(
            f,
            "the heartbeat of {relay} has stopped: the last one was {seconds} s ago"
        )
    }
}

/// The valid leases of silent relays: the lease has missed two renewals, or nobody holds its lock. A standby server does not
/// see the locks.
///
/// Text: PostgreSQL's catalogue, and the arithmetic of times.
pub(crate) fn silent(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<HashMap<i64, SilentRelay>> {
    let rows: Vec<(i64, String, i64)> = unprepared_statement(format!(
        "SELECT l.id, l.relay, extract(epoch FROM clock_timestamp() - l.renewed_at)::bigint
           FROM {lease} l
          WHERE NOT l.ended AND l.expires_at > clock_timestamp()
            AND (l.expires_at < clock_timestamp() + (clock_timestamp() - l.renewed_at) / 2
                 OR (l.takeover_after IS NOT NULL AND NOT pg_is_in_recovery() AND l.id NOT IN (
                     SELECT k.classid::bigint << 32 | k.objid::bigint FROM pg_locks k
                      WHERE k.locktype = 'advisory' AND k.objsubid = 1 AND k.granted
                        AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database()))))",
        lease = name.lease()
    ))
    .giving::<(BigInt, Text, BigInt)>()
    .load(conn)?;
    let silent = rows.into_iter().map(|(id, relay, seconds)| {
        let seconds = u64::try_from(seconds).unwrap_or(0);
        (id, SilentRelay { relay, seconds })
    });
    Ok(silent.collect())
}
