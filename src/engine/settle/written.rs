//! Settles many messages of one kind by one statement.

use std::collections::{HashMap, HashSet};

use diesel::result::{Error, QueryResult};
use diesel::{Connection, PgConnection};

use super::settlement::{Kind, Settlement, delivered, failed};
use super::sql::into_feeds;
use super::sql::settle::{self, Claim, Delivered, Failed, Written};
use super::sql::split::{self, Piece, Split};
use crate::engine::claim::sql::claim::{Batch, Claimant};
use crate::engine::host::settings::Settings;
use crate::engine::keys::sql::ordered::{self, Key};
use crate::engine::send::bulkhead::Bulkhead;
use crate::message::Message;
use crate::status::Status;

/// Settlements of one kind and lease, and the keys whose next messages are claimed with them.
pub(crate) struct Settle<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) bulkheads: &'a [Bulkhead],
    /// Who settles, and claims the next messages.
    pub(crate) claimant: Claimant<'a>,
    pub(crate) kind: Kind,
    pub(crate) group: &'a [Settlement],
    /// The keys whose next messages are claimed, by the sequences of the finished messages.
    pub(crate) keys: &'a HashMap<i64, Key>,
    /// The topics of which no message is claimed.
    pub(crate) closed: &'a [String],
    /// How much of a fan-out is done at once.
    pub(crate) piece: Piece,
}

impl Settle<'_> {
    /// Whether some settlements are of several delivered messages.
    pub(crate) fn has_runs(&self) -> bool {
        self.group.iter().any(|one| !one.behind.is_empty())
    }
}

/// Records the results of messages of one kind.
pub(crate) fn write_down(conn: &mut PgConnection, settle: &Settle<'_>) -> QueryResult<Written> {
    let (settings, bulkheads) = (settle.settings, settle.bulkheads);
    let (name, lease, group) = (&settings.table, settle.claimant.lease, settle.group);
    let broken = release_broken(conn, settle)?;
    let is_whole = |one: &&Settlement| !broken.contains(&one.sequence());
    let each = || group.iter().filter(is_whole).flat_map(Settlement::each);
    let claims = || each().map(Settlement::claim).collect::<Vec<_>>();
    let failures = || {
        let failed = each().filter_map(|one| failed(one, bulkheads));
        failed.collect::<Vec<Failed>>()
    };
    let changed = match settle.kind {
        Kind::Delivered | Kind::NoSubscriber => {
            let status = match settle.kind {
                Kind::NoSubscriber => Status::NoSubscriber,
                _ => Status::Delivered,
            };
            let delivered: Vec<Delivered> =
                each().filter_map(|one| delivered(one, bulkheads)).collect();
            let keeps = settings.ledger_payload.is_kept();
            settle::delivered(conn, name, lease, &delivered, status, keeps)
        }
        Kind::Stored => {
            let log = settings
                .log
                .ok_or_else(|| Error::QueryBuilderError("this relay has no feeds".into()))?;
            let delivered: Vec<Delivered> =
                each().filter_map(|one| delivered(one, bulkheads)).collect();
            let keeps = settings.ledger_payload.is_kept();
            into_feeds::store(conn, (name, lease), &delivered, keeps, log)
        }
        Kind::Deduplicated => {
            let repeats: Vec<(Claim, i64)> = each().filter_map(Settlement::repeat_of).collect();
            settle::deduplicated(conn, name, lease, &repeats)
        }
        Kind::Retry | Kind::Waiting => settle::retry(conn, name, lease, &failures()),
        Kind::Dead | Kind::Cancelled => bury(conn, settle, &failures()),
        Kind::Split => {
            // All destinations: the row says which of them have their parts. A standby that took over may have forgotten
            // the last piece.
            let messages = group.iter();
            let messages = messages.filter_map(|one| Some((one.claim(), one.parts()?)));
            let messages: Vec<Split> = messages.collect();
            let mut written = split::split(conn, name, lease, &messages, settle.piece)?;
            let in_conflict = std::mem::take(&mut written.in_conflict);
            // If another message has the same key at one of the destinations, an operator must decide: the message is
            // dead-lettered.
            let in_conflict = |one: &&Settlement| in_conflict.contains(&one.sequence());
            let dead = group.iter().filter(in_conflict);
            let dead = dead.filter_map(|one| failed(&one.in_conflict(), bulkheads));
            let dead: Vec<Failed> = dead.collect();
            if !dead.is_empty() {
                written.in_conflict = bury(conn, settle, &dead)?;
                written.changed.extend_from_slice(&written.in_conflict);
            }
            return Ok(written);
        }
        Kind::Released => settle::release(conn, name, lease, &claims()),
    }?;
    Ok(Written {
        changed,
        ..Written::default()
    })
}

/// Records delivered messages and claims the next ones of their keys with one statement, if that is possible.
pub(crate) fn deliver_and_continue(
    conn: &mut PgConnection,
    settle: &Settle<'_>,
) -> QueryResult<Option<(Written, Batch)>> {
    let claimant = settle.claimant;
    let ordering_keys = settle.keys.values().map(|key| &key.ordering_key);
    let are_apart = ordering_keys.collect::<HashSet<_>>().len() == settle.keys.len();
    if settle.kind != Kind::Delivered
        || settle.has_runs()
        || claimant.runs.is_some()
        || !claimant.has_space_for_any(settle.keys.len())
        || !are_apart
    {
        return Ok(None);
    }
    let (settings, bulkheads) = (settle.settings, settle.bulkheads);
    let delivered: Vec<Delivered> = (settle.group.iter())
        .filter_map(|one| delivered(one, bulkheads))
        .collect();
    let (changed, next) = ordered::deliver_and_claim_next(
        conn,
        &settings.table,
        claimant,
        (&delivered, settings.ledger_payload.is_kept()),
        settle.keys,
        settle.closed,
    )?;
    let written = Written {
        changed,
        ..Written::default()
    };
    Ok(Some((written, next)))
}

/// Releases the messages of runs of which another relay has taken over a part, or the server has lost one. A run is
/// recorded as delivered as a whole or not at all: otherwise one of its messages might be sent again alone. Returns the
/// first messages of these runs. A run needs a transaction.
// Why: docs/decisions.md#runs
fn release_broken(conn: &mut PgConnection, settle: &Settle<'_>) -> QueryResult<HashSet<i64>> {
    if !settle.has_runs() {
        return Ok(HashSet::new());
    }
    let (name, lease) = (&settle.settings.table, settle.claimant.lease);
    let claims = |of: &[&Settlement]| -> Vec<Claim> {
        let each = of.iter().flat_map(|one| one.each());
        each.map(Settlement::claim).collect()
    };
    let runs = settle.group.iter().filter(|one| !one.behind.is_empty());
    let runs: Vec<&Settlement> = runs.collect();
    let held = settle::hold(conn, name, lease, &claims(&runs))?;
    let held: HashSet<i64> = held.into_iter().collect();
    let is_broken = |one: &&Settlement| one.each().any(|one| !held.contains(&one.sequence()));
    let broken: Vec<&Settlement> = runs.into_iter().filter(is_broken).collect();
    if !broken.is_empty() {
        settle::release(conn, name, lease, &claims(&broken))?;
    }
    Ok(broken.iter().map(|one| one.sequence()).collect())
}

/// Dead-letters messages, and lets the witness write that down.
fn bury(conn: &mut PgConnection, settle: &Settle<'_>, dead: &[Failed]) -> QueryResult<Vec<i64>> {
    let (settings, lease) = (settle.settings, settle.claimant.lease);
    let name = &settings.table;
    let keeps = settings.ledger_payload.is_kept();
    let bury = |conn: &mut PgConnection| settle::dead(conn, name, lease, dead, keeps);
    let Some(witness) = settings.witness else {
        return bury(conn);
    };
    conn.transaction(|conn| {
        let buried = bury(conn)?;
        let messages = settle.group.iter().map(|one| &*one.message);
        let messages: Vec<&Message> = messages.collect();
        witness.buried(conn, name, &messages, dead, &buried)?;
        Ok(buried)
    })
}
