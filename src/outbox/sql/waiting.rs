//! Changes to waiting messages by an application or an operator: cancel, reschedule, or settle (record the result).
//!
//! A message that a relay holds is in flight and stays unchanged: no function waits for its row lock. Every function
//! runs in a transaction: the caller's if one is open.

mod refs;

use std::collections::BTreeSet;

use diesel::dsl::{array, not};
use diesel::prelude::{
    Connection, ExpressionMethods, NullableExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Nullable, Text, Uuid as SqlUuid};
use diesel::{PgConnection, update};
use uuid::Uuid;

pub use self::refs::{Answer, Changed, MessageRef, Part, PartState};

use self::refs::{Identity, Matches, find};
use super::enqueue::{absolute, relative};
use crate::message::Due;
use crate::name::OutboxName;
use crate::sql::functions::{clock_timestamp, latest};
use crate::sql::statement::{Statement, unprepared, unprepared_statement};
use crate::sql::table::{candidate, lease, outbox};
use crate::sql::{NOTIFY, OUTBOX_NUMBER, expired, kept_digest, open_part};
use crate::status::ReasonCode;

/// How an application or an operator ends a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The message was delivered by other means.
    Delivered,
    /// The message must not be sent.
    Cancelled,
}

impl End {
    fn status(self) -> &'static str {
        match self {
            Self::Delivered => "delivered",
            Self::Cancelled => "dead",
        }
    }

    fn reason(self) -> ReasonCode {
        match self {
            Self::Delivered => ReasonCode::ByHand,
            Self::Cancelled => ReasonCode::Cancelled,
        }
    }
}

/// Which messages are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Only waiting messages.
    Waiting,
    /// Also messages held under expired leases, which are ended, and dead letters.
    Everything,
}

/// Ends the messages that `which` names, and records in the ledger how and why.
pub(crate) fn end(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &MessageRef,
    end: End,
    note: Option<&str>,
    reach: Reach,
) -> QueryResult<Changed> {
    conn.transaction(|conn| {
        let found = find(conn, name, which, reach)?;
        if found.is_ambiguous() {
            return Ok(found.told(&[]));
        }
        let live = found.live();
        let expired = match reach {
            Reach::Waiting => Vec::new(),
            Reach::Everything => over(conn, name, &live)?,
        };
        let mut ended = end_live(conn, name, &live, &expired, end, note)?;
        if reach == Reach::Everything {
            ended.extend(end_dead(conn, name, &found.dead(), end, note)?);
        }
        free(
            conn,
            name,
            ended
                .iter()
                .filter_map(|(_, ordering_key)| ordering_key.clone()),
        )?;
        let done: Vec<Identity> = ended.into_iter().map(|(identity, _)| identity).collect();
        told(conn, name, which, found, &done)
    })
}

/// Changes when waiting messages are due, never to a time before now.
pub(crate) fn reschedule(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &MessageRef,
    due: Due,
) -> QueryResult<Changed> {
    conn.transaction(|conn| {
        let found = find(conn, name, which, Reach::Waiting)?;
        if found.is_ambiguous() {
            return Ok(found.told(&[]));
        }
        let done = set_due(conn, name, found.live(), due)?;
        told(conn, name, which, found, &done)
    })
}

/// Changes when these messages are due, except messages that a relay or another transaction holds. Returns the changed
/// messages.
pub(crate) fn set_due(
    conn: &mut PgConnection,
    name: &OutboxName,
    live: Vec<i64>,
    due: Due,
) -> QueryResult<Vec<Identity>> {
    // An earlier time becomes the current time: a relay's lanes have already passed earlier positions.
    let waiting = candidate::table(name.outbox())
        .filter(candidate::sequence.eq_any(live))
        .filter(candidate::locked_by.is_null())
        .order(candidate::sequence)
        .select(candidate::sequence)
        .for_no_key_update()
        .skip_locked();
    let delayed = clock_timestamp().nullable() + relative(due);
    let change = update(outbox::table(name.outbox()))
        .filter(outbox::sequence.eq_any(array::<BigInt, _>(waiting)))
        .set(outbox::available_at.eq(latest(clock_timestamp(), absolute(due), delayed)))
        .returning((outbox::sequence, outbox::message_id));
    let done: Vec<Identity> = unprepared(change).load(conn)?;
    if !done.is_empty() {
        wake(conn, name)?;
    }
    Ok(done)
}

/// The result for each part. A live part that was not changed may have ended meanwhile, so it is read again.
fn told(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &MessageRef,
    found: Matches,
    done: &[Identity],
) -> QueryResult<Changed> {
    if found
        .live()
        .iter()
        .all(|live| done.iter().any(|(sequence, _)| sequence == live))
    {
        return Ok(found.told(done));
    }
    let again = find(conn, name, which, Reach::Waiting)?;
    Ok(found.and_now(again).told(done))
}

/// A message that has ended, and its ordering key.
type EndedRow = (Identity, Option<String>);

/// The ended leases that hold any of these messages.
///
/// An expired lease counts only once its row says that it has ended: a renewal that has not committed yet would make it
/// valid again, and its relay may be sending.
fn over(conn: &mut PgConnection, name: &OutboxName, live: &[i64]) -> QueryResult<Vec<i64>> {
    let holders = outbox::table(name.outbox())
        .filter(outbox::sequence.eq_any(live))
        .filter(outbox::locked_by.is_not_null())
        .select(outbox::locked_by.assume_not_null())
        .distinct();
    let mut holders: Vec<i64> = unprepared(holders).load(conn)?;
    if holders.is_empty() {
        return Ok(holders);
    }
    expired::ended(conn, name)?;
    let valid = lease::table(name.lease())
        .filter(lease::id.eq_any(&holders))
        .filter(not(lease::ended))
        .select(lease::id);
    let valid: Vec<i64> = unprepared(valid).load(conn)?;
    holders.retain(|holder| !valid.contains(holder));
    Ok(holders)
}

/// Cancels the live messages that are not held under a valid lease. Returns how many.
#[cfg(feature = "relay")]
pub(crate) fn cancel_waiting(
    conn: &mut PgConnection,
    name: &OutboxName,
    live: &[i64],
    note: Option<&str>,
) -> QueryResult<usize> {
    let expired = over(conn, name, live)?;
    let ended = end_live(conn, name, live, &expired, End::Cancelled, note)?;
    let count = ended.len();
    free(conn, name, ended.into_iter().filter_map(|(_, key)| key))?;
    Ok(count)
}

/// Text: like [`recorded`].
fn end_live(
    conn: &mut PgConnection,
    name: &OutboxName,
    live: &[i64],
    expired: &[i64],
    end: End,
    note: Option<&str>,
) -> QueryResult<Vec<EndedRow>> {
    if live.is_empty() {
        return Ok(Vec::new());
    }
    let outbox = name.outbox();
    let gone = format!(
        "DELETE FROM {outbox} o
          WHERE o.sequence = ANY(ARRAY(
                    SELECT w.sequence FROM {outbox} w
                     WHERE w.sequence = ANY($1)
                       AND (w.locked_by IS NULL OR w.locked_by = ANY($5))
                     ORDER BY w.sequence FOR UPDATE SKIP LOCKED))
        RETURNING {}",
        columns("o", "o.destination")
    );
    recorded(name, &gone, live, end, note)
        .bind::<Array<BigInt>, _>(expired)
        .giving::<((BigInt, SqlUuid), Nullable<Text>)>()
        .load(conn)
}

/// Text: like [`recorded`].
fn end_dead(
    conn: &mut PgConnection,
    name: &OutboxName,
    dead: &[Identity],
    end: End,
    note: Option<&str>,
) -> QueryResult<Vec<EndedRow>> {
    if dead.is_empty() {
        return Ok(Vec::new());
    }
    let (sequences, ids): (Vec<i64>, Vec<Uuid>) = dead.iter().copied().unzip();
    let gone = format!(
        "DELETE FROM {} d
          WHERE d.sequence = ANY($1)
            AND (d.sequence, d.message_id) IN (SELECT * FROM unnest($1::bigint[], $5::uuid[]))
        RETURNING {}",
        name.dead(),
        columns("d", "d.named_destination")
    );
    recorded(name, &gone, &sequences, end, note)
        .bind::<Array<SqlUuid>, _>(ids)
        .giving::<((BigInt, SqlUuid), Nullable<Text>)>()
        .load(conn)
}

/// The columns of a message that the ledger keeps. `named`: the destination that the message names.
fn columns(row: &str, named: &str) -> String {
    format!(
        "{row}.sequence, {row}.message_id, {row}.topic, {row}.destination, {named} AS named_destination,
         {row}.ordering_key, {row}.idempotency_key, {row}.tenant_id, {row}.attempts, {row}.created_at,
         {row}.occurred_at, {row}.split_from, {row}.registration, {digest} AS digest",
        digest = kept_digest(row),
    )
}

/// Runs the statement `gone`, which removes messages ($1), and records in the ledger how and why they ended.
///
/// Text: Diesel has no WITH, so no DELETE can feed an INSERT.
fn recorded<'a>(
    name: &OutboxName,
    gone: &str,
    sequences: &'a [i64],
    end: End,
    note: Option<&'a str>,
) -> Statement<'a> {
    unprepared_statement(format!(
        "WITH gone AS ({gone}), recorded AS (
            INSERT INTO {ledger} (part, sequence, message_id, topic, destination, named_destination,
                ordering_key, idempotency_key, digest, tenant_id, status, reason, error, attempts,
                created_at, occurred_at, split_from, registration)
            SELECT {part}, g.sequence, g.message_id, g.topic, g.destination, g.named_destination,
                   g.ordering_key, g.idempotency_key, g.digest, g.tenant_id, $2, $3, $4, g.attempts,
                   g.created_at, g.occurred_at, g.split_from, g.registration
              FROM gone g
         )
         SELECT sequence, message_id, ordering_key FROM gone",
        ledger = name.ledger(),
        part = open_part(name),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Text, _>(end.status())
    .bind::<Text, _>(end.reason().as_str())
    .bind::<Nullable<Text>, _>(note)
}

/// Unblocks ordering keys whose messages waited for a message that is gone.
pub(crate) fn free(
    conn: &mut PgConnection,
    name: &OutboxName,
    keys: impl Iterator<Item = String>,
) -> QueryResult<()> {
    let keys: BTreeSet<String> = keys.collect();
    for key in &keys {
        continues(conn, name, key)?;
    }
    match keys.is_empty() {
        true => Ok(()),
        false => wake(conn, name),
    }
}

/// Sets the due time of a key's first message at each destination to now, if the message is due. The message then
/// comes after the position that a relay's lanes have reached, like a new message. A relay's walk over all keys would
/// also find the message, but later.
///
/// Text: a loose index scan is recursive (WITH RECURSIVE).
fn continues(conn: &mut PgConnection, name: &OutboxName, ordering_key: &str) -> QueryResult<()> {
    let outbox = name.outbox();
    let first = |behind: &str| {
        format!(
            "SELECT o.sequence, o.destination FROM {outbox} o
              WHERE o.ordering_key = $1 {behind}
              ORDER BY o.ordering_key, o.destination, coalesce(o.split_from, o.sequence) LIMIT 1"
        )
    };
    unprepared_statement(format!(
        "WITH RECURSIVE first AS (
            ({first})
            UNION ALL
            (SELECT n.* FROM first f CROSS JOIN LATERAL ({next}) n)
         )
         UPDATE {outbox} o SET available_at = clock_timestamp()
          WHERE o.sequence = ANY(ARRAY(
                    SELECT w.sequence FROM {outbox} w
                     WHERE w.sequence = ANY(ARRAY(SELECT sequence FROM first))
                       AND w.locked_by IS NULL AND w.available_at <= clock_timestamp()
                     ORDER BY w.sequence FOR NO KEY UPDATE SKIP LOCKED))",
        first = first(""),
        next = first("AND o.destination > f.destination"),
    ))
    .bind::<Text, _>(ordering_key)
    .execute(conn)
    .map(drop)
}

/// Wakes sleeping relays, as the trigger `outbox_wake` does after an insert.
///
/// Text: it takes an advisory lock.
fn wake(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<()> {
    unprepared_statement(format!(
        "SELECT CASE WHEN NOT pg_try_advisory_xact_lock_shared({OUTBOX_NUMBER}, 1)
                     THEN {NOTIFY} END"
    ))
    .bind::<Text, _>(name.outbox())
    .execute(conn)
    .map(drop)
}
