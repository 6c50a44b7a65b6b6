//! Messages whose destinations are feeds.

use std::collections::BTreeSet;

use diesel::PgConnection;
use diesel::result::QueryResult;
use uuid::Uuid;

use super::log::Log;
use super::settle::{self, Claim, Delivered};
use crate::engine::lease::sql::lease::LeaseId;
use crate::name::OutboxName;

/// Moves messages into their feeds, and returns the sequences of stored messages. A feed that has no row yet
/// gets one. The others are released, if they are still held: messages for an earlier registration of a member, of which
/// another claim finds out.
pub(crate) fn store(
    conn: &mut PgConnection,
    (name, lease): (&OutboxName, LeaseId),
    messages: &[Delivered],
    keep_payload: bool,
    log: &dyn Log,
) -> QueryResult<Vec<i64>> {
    let mut stored = settle::stored(conn, name, lease, messages, keep_payload, log)?;
    let left = |stored: &[i64]| -> Vec<Delivered> {
        let is_left = |one: &&Delivered| !stored.contains(&one.claim.sequence);
        messages.iter().filter(is_left).cloned().collect()
    };
    let again = left(&stored);
    if again.is_empty() {
        return Ok(stored);
    }
    let feeds = again
        .iter()
        .map(|one| (&*one.destination, one.registration));
    let feeds: Vec<(&str, Option<Uuid>)> = feeds.collect::<BTreeSet<_>>().into_iter().collect();
    log.mend(conn, name, &feeds)?;
    // Also if nothing was mended: another relay may have done so meanwhile.
    stored.extend(settle::stored(
        conn,
        name,
        lease,
        &again,
        keep_payload,
        log,
    )?);
    let claims: Vec<Claim> = left(&stored).iter().map(|one| one.claim).collect();
    if !claims.is_empty() {
        settle::release(conn, name, lease, &claims)?;
    }
    Ok(stored)
}
