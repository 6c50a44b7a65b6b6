//! What a settle needs to know of feeds: destinations that are read instead of sent to. Their tables are not the engine's.

use std::collections::BTreeSet;
use std::fmt::Debug;

use diesel::PgConnection;
use diesel::result::QueryResult;
use uuid::Uuid;

use super::settle::{self, Claim, Delivered};
use crate::engine::lease::sql::lease::LeaseId;
use crate::name::OutboxName;

/// Writes events of feeds, as parts of the settle's statement.
pub(crate) trait Log: Debug + Send + Sync {
    /// A query that locks the feeds that `outcome` names as destinations, in one order for all settles, and gives the
    /// `name` and the `registration` of each.
    fn locks(&self, name: &OutboxName) -> String;

    /// An INSERT of an event for each row of `gone` and its `outcome`, behind the last one of a feed that is `held`.
    fn stores(&self, name: &OutboxName) -> String;

    /// Those of these feeds into which no settle can store, because another session has locked their rows. Waits for no row.
    fn locked(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        feeds: &[&str],
    ) -> QueryResult<Vec<String>>;

    /// Makes what a settle into these feeds lacks, each with its registration.
    ///
    /// # Errors
    /// A refusal of the database: a feed of the relay's settings belongs to a member.
    fn mend(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        feeds: &[(&str, Option<Uuid>)],
    ) -> QueryResult<()>;
}

/// The log, if the library is built with feeds.
pub(crate) type OwnLog = Option<&'static dyn Log>;

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
