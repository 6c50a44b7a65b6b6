//! Settles many messages of one kind by one statement.

use std::collections::HashMap;

use diesel::result::QueryResult;
use diesel::{Connection, PgConnection};

use super::bulkhead::Bulkhead;
use super::settlement::{Kind, Settlement, delivered, failed};
use crate::config::Config;
use crate::status::Status;
use crate::store::relay::lease::LeaseId;
use crate::store::relay::ordered::Key;
use crate::store::relay::own;
use crate::store::relay::settle::{self, Delivered, Failed};
use crate::store::relay::split::{self, Piece, Split};

/// Settlements of one kind and lease, and the keys whose next messages are claimed with them.
pub(super) struct Settle<'a> {
    pub(super) config: &'a Config,
    pub(super) bulkheads: &'a [Bulkhead],
    pub(super) lease: LeaseId,
    pub(super) kind: Kind,
    pub(super) group: &'a [Settlement],
    /// The keys whose next messages are claimed, by the sequences of the finished messages.
    pub(super) keys: &'a HashMap<i64, Key>,
    /// The topics of which no message is claimed.
    pub(super) closed: &'a [String],
    /// The most bytes of the claimed messages.
    pub(super) bytes: usize,
    /// How much of a fan-out is done at once.
    pub(super) piece: Piece,
}

/// The result of a settle, as sequences.
pub(super) struct Written {
    /// All settled messages.
    pub(super) changed: Vec<i64>,
    /// The settled messages that were dead-lettered instead of fanned out.
    pub(super) in_conflict: Vec<i64>,
    /// The messages whose fan-out is not finished, and the last destination that has its part.
    pub(super) unfinished: Vec<(i64, Option<String>)>,
}

/// Records the results of messages of one kind.
pub(super) fn write_down(conn: &mut PgConnection, settle: &Settle<'_>) -> QueryResult<Written> {
    let (config, bulkheads) = (settle.config, settle.bulkheads);
    let (name, lease, group) = (&config.table, settle.lease, settle.group);
    let claims = || group.iter().map(Settlement::claim).collect::<Vec<_>>();
    let failures = || {
        let failed = group.iter().filter_map(|one| failed(one, bulkheads));
        failed.collect::<Vec<Failed>>()
    };
    let changed = match settle.kind {
        Kind::Delivered | Kind::NoSubscriber => {
            let status = match settle.kind {
                Kind::NoSubscriber => Status::NoSubscriber,
                _ => Status::Delivered,
            };
            let delivered: Vec<Delivered> = group
                .iter()
                .filter_map(|one| delivered(one, bulkheads))
                .collect();
            let keeps = config.ledger_payload.is_kept();
            settle::delivered(conn, name, lease, &delivered, status, keeps)
        }
        Kind::Deduplicated => settle::deduplicated(conn, name, lease, &claims()),
        Kind::Retry => settle::retry(conn, name, lease, &failures()),
        Kind::Dead => bury(conn, settle, &failures()),
        Kind::Split => {
            // All destinations: the row says which of them have their parts. A standby that took over may have forgotten
            // the last piece.
            let messages = group.iter();
            let messages = messages.filter_map(|one| Some((one.claim(), one.parts()?)));
            let messages: Vec<Split> = messages.collect();
            let done = split::split(conn, name, lease, &messages, settle.piece)?;
            let mut written = Written {
                changed: done.split,
                in_conflict: Vec::new(),
                unfinished: done.unfinished,
            };
            // If another message has the same key at one of the destinations, an operator must decide: the message is
            // dead-lettered.
            let in_conflict = |one: &&Settlement| done.in_conflict.contains(&one.sequence());
            let died = group.iter().filter(in_conflict);
            let died = died.filter_map(|one| failed(&one.in_conflict(), bulkheads));
            let died: Vec<Failed> = died.collect();
            if !died.is_empty() {
                written.in_conflict = bury(conn, settle, &died)?;
                written.changed.extend_from_slice(&written.in_conflict);
            }
            return Ok(written);
        }
        Kind::Released => settle::release(conn, name, lease, &claims()),
    }?;
    Ok(Written {
        changed,
        in_conflict: Vec::new(),
        unfinished: Vec::new(),
    })
}

/// Dead-letters messages, and writes the relay's own events about them if `own_events` is set.
fn bury(conn: &mut PgConnection, settle: &Settle<'_>, dead: &[Failed]) -> QueryResult<Vec<i64>> {
    let (config, lease) = (settle.config, settle.lease);
    let name = &config.table;
    let keeps = config.ledger_payload.is_kept();
    let bury = |conn: &mut PgConnection| settle::dead(conn, name, lease, dead, keeps);
    if !config.own_events {
        return bury(conn);
    }
    conn.transaction(|conn| {
        let buried = bury(conn)?;
        let messages = settle.group.iter().map(|one| &*one.message);
        own::count_dead(conn, name, messages, dead, &buried)?;
        Ok(buried)
    })
}
