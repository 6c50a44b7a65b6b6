//! Settling: recording the results of claimed messages. Every settle is fenced: it changes a message only if the lease
//! and the time of the claim still match.
//!
//! Each function settles many messages with one statement and returns the sequences that it changed. A message whose
//! sequence is missing was no longer held by that claim. A call must not contain a sequence twice.
//!
//! Text: a DELETE or an UPDATE that feeds an INSERT (WITH), and `unnest`.

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use diesel::dsl::{Eq, not};
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, IntoSql, NullableExpressionMethods,
    PgArrayExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{
    Array, BigInt, Bool, Integer, Nullable, Text, Timestamptz, Uuid as SqlUuid,
};
use diesel::{PgConnection, insert_into, update};
use uuid::Uuid;

use super::log::Log;
use crate::engine::lease::sql::lease::{LeaseId, leases};
use crate::message::Message;
use crate::name::OutboxName;
use crate::sql::functions::{LONGEST, On, width_bucket};
use crate::sql::range::Range;
use crate::sql::statement::{Statement, kept, statement};
use crate::sql::table::{attempt, lease, ledger, outbox};
use crate::sql::{kept_digest, millis, open_part, open_part_now};
use crate::status::{ReasonCode, Status};

/// A claim of a message, without the lease. A sequence may be given twice: by a new primary that lacks the last
/// inserts, or after `TRUNCATE … RESTART IDENTITY`. The time of the claim tells the messages apart.
// Why: docs/decisions.md#fence
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Claim {
    pub(crate) sequence: i64,
    /// The row's `locked_at`, in PostgreSQL's microseconds (since 2000).
    pub(crate) at: i64,
}

impl Claim {
    /// The claim of a claimed message.
    pub(crate) fn of(message: &Message) -> Self {
        Self {
            sequence: message.sequence.0,
            at: message.claimed_at,
        }
    }
}

/// A delivered message.
#[derive(Debug, Clone)]
pub(crate) struct Delivered {
    pub(crate) claim: Claim,
    /// The destination that has the message.
    pub(crate) destination: Arc<str>,
    /// The registration of the destination, if it is registered.
    pub(crate) registration: Option<Uuid>,
    pub(crate) http_status: Option<i32>,
    pub(crate) response: Option<String>,
}

/// Whether a failure counts as an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    Counted = 1,
    /// Nothing was sent, or the failure is not the message's.
    NotCounted = 0,
}

/// A failed attempt.
#[derive(Debug, Clone)]
pub(crate) struct Failed {
    pub(crate) claim: Claim,
    /// The destination of the attempt; empty if no destination serves the message.
    pub(crate) destination: Arc<str>,
    /// The destination that the message names from now on; empty: none.
    pub(crate) names: Arc<str>,
    /// The registration of the destination, if it is registered and the message was for it.
    pub(crate) registration: Option<Uuid>,
    pub(crate) code: ReasonCode,
    pub(crate) error: String,
    pub(crate) http_status: Option<i32>,
    pub(crate) response: Option<String>,
    /// The duration of the send.
    pub(crate) took: Duration,
    /// The time until the next attempt. Unused if the message is dead-lettered.
    pub(crate) delay: Duration,
    pub(crate) attempt: Attempt,
    /// How long after it became due the message expires. Unused if the message is dead-lettered.
    pub(crate) expires_after: Option<Duration>,
    /// Whether the dead letter blocks its ordering key.
    pub(crate) blocks_key: bool,
}

impl Failed {
    /// Whether the message, if it is not retried, becomes a dead letter. One whose destination was removed does not.
    pub(crate) fn is_dead_letter(&self) -> bool {
        self.code != ReasonCode::DestinationRemoved
    }
}

/// The result of a settle, as sequences. Messages in no list were no longer held under the lease.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// All settled messages. Of a fan-out: replaced by their parts.
    pub(crate) changed: Vec<i64>,
    /// The messages that cannot be fanned out: the outbox has another message with the same key for one of the
    /// destinations. They are settled as dead letters.
    pub(crate) in_conflict: Vec<i64>,
    /// The messages whose fan-out is not finished, and the last destination that has its part.
    pub(crate) unfinished: Vec<(i64, Option<String>)>,
}

/// Removes the messages from the outbox and records them in the ledger, all with this status: they were delivered, or
/// have no subscriber.
pub(crate) fn delivered(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Delivered],
    status: Status,
    keep_payload: bool,
) -> QueryResult<Vec<i64>> {
    let statement = delivering(name, lease, messages, status, keep_payload);
    statement
        .and(" SELECT sequence FROM gone")
        .giving::<BigInt>()
        .load(conn)
}

/// Moves messages from the outbox into the feeds that are their destinations, and records them in the ledger as delivered.
/// Those whose feed has no row stay.
pub(crate) fn stored(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Delivered],
    keep_payload: bool,
    log: &dyn Log,
) -> QueryResult<Vec<i64>> {
    let locks = format!("held AS MATERIALIZED ({}), ", log.locks(name));
    // An array, because the server knows it, and holds the feeds, before it touches a message.
    let these = "ARRAY(SELECT t.sequence FROM outcome t JOIN held h ON h.name = t.destination
                        WHERE h.registration IS NOT DISTINCT FROM t.registration)";
    let only = (locks.as_str(), these);
    let statement = removing(name, lease, messages, Status::Delivered, keep_payload, only);
    statement
        .and(&format!(
            ", stored AS ({}) SELECT sequence FROM gone",
            log.stores(name)
        ))
        .giving::<BigInt>()
        .load(conn)
}

/// A statement that continues after `gone`, the messages that it has removed, with its values $1 to $9.
pub(crate) fn delivering<'a>(
    name: &OutboxName,
    lease: LeaseId,
    messages: &'a [Delivered],
    status: Status,
    keep_payload: bool,
) -> Statement<'a> {
    removing(name, lease, messages, status, keep_payload, ("", "$1"))
}

/// The same, after a query of its own, for those of the messages whose sequences are in this array.
fn removing<'a>(
    name: &OutboxName,
    lease: LeaseId,
    messages: &'a [Delivered],
    status: Status,
    keep_payload: bool,
    (before, these): (&str, &str),
) -> Statement<'a> {
    let (messages, sequences, claimed_at) = in_order(messages, |m| m.claim);
    let statuses: Vec<Option<i32>> = messages.iter().map(|m| m.http_status).collect();
    let responses: Vec<Option<&str>> = messages.iter().map(|m| m.response.as_deref()).collect();
    // No attempt is counted then.
    let is_unwanted = status == Status::NoSubscriber;
    let code = is_unwanted.then_some(ReasonCode::NoSubscriber.as_str());
    let registrations: Vec<Option<Uuid>> = messages.iter().map(|m| m.registration).collect();
    statement(format!(
        "WITH outcome AS (
            SELECT *, NULL AS error, CASE WHEN code IS NULL THEN 1 ELSE 0 END AS counted
              FROM unnest($1::bigint[], $2::int[], $3::text[], $7::text[], $8::text[], $9::uuid[])
                AS t(sequence, http_status, response, destination, code, registration)
        ), {before}{gone}, recorded AS ({recorded})",
        gone = gone_of(name, "$4", "$6", these),
        recorded = record(name, status, "$5"),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Array<Nullable<Integer>>, _>(statuses)
    .bind::<Array<Nullable<Text>>, _>(responses)
    .bind::<BigInt, _>(lease.0)
    .bind::<Bool, _>(keep_payload)
    .bind::<Array<Timestamptz>, _>(claimed_at)
    .bind::<Array<Text>, _>(messages.iter().map(|m| &*m.destination).collect::<Vec<_>>())
    .bind::<Array<Nullable<Text>>, _>(vec![code; messages.len()])
    .bind::<Array<Nullable<SqlUuid>>, _>(registrations)
}

/// Removes messages that the ledger already has as delivered. The history names the delivered message of each, which
/// comes with it here as its sequence.
pub(crate) fn deduplicated(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[(Claim, i64)],
) -> QueryResult<Vec<i64>> {
    let (messages, sequences, claimed_at) = in_order(messages, |(claim, _)| *claim);
    statement(format!(
        "WITH {gone}, noted AS (
            INSERT INTO {table} (part, sequence, message_id, topic, destination, tenant_id, event, error, relay)
            SELECT {part}, g.sequence, g.message_id, g.topic, g.destination, g.tenant_id, 'repeated',
                   'delivered before as ' || {first}, (SELECT relay FROM {lease} WHERE id = $2)
              FROM gone g)
         SELECT sequence FROM gone",
        gone = gone(name, "$2", "$3"),
        table = name.attempt(),
        part = open_part(name),
        first = "($4::bigint[])[width_bucket(g.sequence, $1::bigint[])]",
        lease = name.lease(),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<BigInt, _>(lease.0)
    .bind::<Array<Timestamptz>, _>(claimed_at)
    .bind::<Array<BigInt>, _>(messages.iter().map(|(_, first)| *first).collect::<Vec<_>>())
    .giving::<BigInt>()
    .load(conn)
}

/// A result that changed nothing, because the lease no longer held the message.
#[derive(Debug, Clone)]
pub(crate) struct Discarded<'a> {
    pub(crate) message: &'a Message,
    pub(crate) destination: Arc<str>,
    /// The result, and the state of the message when it was discarded.
    pub(crate) error: String,
    pub(crate) lease: LeaseId,
}

/// Records results that changed nothing in the history.
pub(crate) fn note_conflicts(
    conn: &mut PgConnection,
    name: &OutboxName,
    discarded: &[Discarded<'_>],
) -> QueryResult<()> {
    let open = open_part_now(conn, name)?;
    for one in discarded {
        let relay = leases(name)
            .filter(lease::id.eq(one.lease.0))
            .select(lease::relay);
        insert_into(attempt::table(name.attempt()))
            .values((
                attempt::part.eq(open),
                attempt::sequence.eq(one.message.sequence.0),
                attempt::message_id.eq(one.message.message_id),
                attempt::topic.eq(&one.message.topic),
                attempt::destination.eq(&*one.destination),
                attempt::tenant_id.eq(one.message.tenant_id),
                attempt::event.eq("conflict"),
                attempt::error.eq(&one.error),
                attempt::relay.eq(relay.single_value()),
            ))
            .execute(conn)?;
    }
    Ok(())
}

/// Locks those of these messages that the lease still holds. Returns their sequences.
pub(crate) fn hold(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Claim],
) -> QueryResult<Vec<i64>> {
    outbox::table(name.outbox())
        .filter(are_held(lease, messages))
        .order(outbox::sequence)
        .select(outbox::sequence)
        .for_update()
        .load(conn)
}

/// Counts the attempts and schedules the next ones.
///
/// A call is repeated if the database's answer was lost. If the same lease has claimed a message again meanwhile, the
/// repeat leaves the message unchanged.
pub(crate) fn retry(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Failed],
) -> QueryResult<Vec<i64>> {
    let (messages, sequences, claimed_at) = in_order(messages, |m| m.claim);
    // A time that is out of range would fail the statement, for all its messages.
    let until = |time: Duration| millis(time.min(LONGEST));
    let delays: Vec<i64> = messages.iter().map(|m| until(m.delay)).collect();
    let ends: Vec<Option<i64>> = messages
        .iter()
        .map(|m| m.expires_after.map(until))
        .collect();
    let changed = format!(
        "UPDATE {outbox} o
            SET available_at = clock_timestamp() + {delay} * interval '1 millisecond',
                expires_at = least(o.expires_at, o.available_at + {expires_after} * interval '1 millisecond'),
                attempts = {attempts} + {counted}, last_attempt_at = clock_timestamp(),
                last_error_code = {code}, last_error = {error}, destination = {names},
                registration = coalesce({registration}, o.registration),
                locked_by = NULL, locked_at = NULL
          WHERE o.sequence = ANY($1) AND o.locked_by = $2
            AND o.locked_at = {claimed_at}
        RETURNING o.*",
        outbox = name.outbox(),
        delay = of_row("$12::bigint[]", "$1"),
        expires_after = of_row("$14::bigint[]", "$1"),
        attempts = attempts_of("o"),
        counted = of_row("$3::int[]", "$1"),
        code = of_row("$4::text[]", "$1"),
        error = of_row("$5::text[]", "$1"),
        registration = of_row("$10::uuid[]", "$1"),
        claimed_at = of_row("$11::timestamptz[]", "$1"),
        names = of_row("$13::text[]", "$1"),
    );
    statement(format!(
        "WITH {OUTCOME}, changed AS ({changed}), noted AS ({noted}) SELECT sequence FROM changed",
        noted = note_attempts(name, "changed", "g.attempts"),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<BigInt, _>(lease.0)
    .bind_failures(&messages)
    .bind::<Array<Timestamptz>, _>(claimed_at)
    .bind::<Array<BigInt>, _>(delays)
    .bind::<Array<Text>, _>(names(&messages))
    .bind::<Array<Nullable<BigInt>>, _>(ends)
    .giving::<BigInt>()
    .load(conn)
}

/// The destinations that the messages name from now on.
fn names<'a>(messages: &[&'a Failed]) -> Vec<&'a str> {
    messages.iter().map(|message| &*message.names).collect()
}

/// The failures as rows: $1 and the values of [`Statement::bind_failures`].
const OUTCOME: &str = "outcome AS (
    SELECT * FROM unnest($1::bigint[], $3::int[], $4::text[], $5::text[], $6::int[], $7::text[], $8::text[],
                         $9::bigint[], $10::uuid[])
        AS t(sequence, counted, code, error, http_status, response, destination, took, registration)
)";

impl<'a> Statement<'a> {
    /// Binds $3 to $10.
    fn bind_failures(self, messages: &[&'a Failed]) -> Self {
        fn each<'a, T>(messages: &[&'a Failed], value: impl Fn(&'a Failed) -> T) -> Vec<T> {
            messages.iter().map(|&message| value(message)).collect()
        }
        self.bind::<Array<Integer>, _>(each(messages, |m| m.attempt as i32))
            .bind::<Array<Text>, _>(each(messages, |m| m.code.as_str()))
            .bind::<Array<Text>, _>(each(messages, |m| m.error.as_str()))
            .bind::<Array<Nullable<Integer>>, _>(each(messages, |m| m.http_status))
            .bind::<Array<Nullable<Text>>, _>(each(messages, |m| m.response.as_deref()))
            .bind::<Array<Text>, _>(each(messages, |m| &*m.destination))
            .bind::<Array<BigInt>, _>(each(messages, |m| millis(m.took)))
            .bind::<Array<Nullable<SqlUuid>>, _>(each(messages, |m| m.registration))
    }
}

/// Records the failed attempts of `rows`, from `outcome`, for the lease $2. `attempt` is the number of the attempt.
/// The attempt's time is earlier than the time of a dead letter from the same statement.
fn note_attempts(name: &OutboxName, rows: &str, attempt: &str) -> String {
    format!(
        "INSERT INTO {table} (part, sequence, message_id, topic, destination, tenant_id, event, attempt,
             reason, error, http_status, response, took, relay, happened_at)
         SELECT {part}, g.sequence, g.message_id, g.topic, o.destination, g.tenant_id, 'failed', {attempt},
                o.code, o.error, o.http_status, o.response, o.took * interval '1 millisecond',
                (SELECT relay FROM {lease} WHERE id = $2), statement_timestamp()
           FROM {rows} g JOIN outcome o USING (sequence)
          WHERE o.counted > 0",
        table = name.attempt(),
        part = open_part(name),
        lease = name.lease(),
    )
}

/// Moves the messages to the dead letters and records them in the ledger.
///
/// A message is its sequence and its id. If an old dead letter has both, because an emptied outbox was filled once more
/// with the same rows, that letter stays: otherwise the message could never be settled, and would be sent for ever.
///
/// A message whose destination was removed ends as a cancelled one does, in the ledger only: nobody could
/// requeue it, and who adds and removes destinations would fill the table of dead letters.
///
/// A call is repeated if the database's answer was lost. If an operator has requeued a message and the same lease has
/// claimed it again meanwhile, the repeat leaves the message unchanged.
pub(crate) fn dead(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Failed],
    keep_payload: bool,
) -> QueryResult<Vec<i64>> {
    let (messages, sequences, claimed_at) = in_order(messages, |m| m.claim);
    let blocking: Vec<i64> = messages
        .iter()
        .filter(|m| m.blocks_key)
        .map(|m| m.claim.sequence)
        .collect();
    statement(format!(
        "WITH {OUTCOME}, {gone}, buried AS (
            INSERT INTO {dead} (sequence, message_id, topic, destination, named_destination, payload,
                headers, ordering_key, idempotency_key, digest, tenant_id, available_at, expires_at,
                created_at, occurred_at, attempts, reason, last_error, http_status, response,
                split_from, split_to, blocks_key, registration)
            SELECT g.sequence, g.message_id, g.topic, o.destination, {names}, g.payload,
                   g.headers, g.ordering_key, g.idempotency_key, g.digest, g.tenant_id, g.available_at,
                   g.expires_at, g.created_at, g.occurred_at, {attempts} + o.counted, o.code, o.error,
                   o.http_status, o.response, g.split_from, g.split_to,
                   g.sequence = ANY($13) AND g.ordering_key IS NOT NULL,
                   coalesce(o.registration, g.registration)
              FROM gone g JOIN outcome o USING (sequence) WHERE o.code <> '{removed}'
            ON CONFLICT (sequence, message_id) DO NOTHING
        ), recorded AS ({recorded}), noted AS ({noted})
        SELECT sequence FROM gone",
        gone = gone(name, "$2", "$11"),
        dead = name.dead(),
        recorded = record(name, Status::Dead, "$12"),
        attempts = attempts_of("g"),
        noted = note_attempts(name, "gone", &format!("{} + o.counted", attempts_of("g"))),
        names = "($14::text[])[width_bucket(g.sequence, $1::bigint[])]",
        removed = ReasonCode::DestinationRemoved.as_str(),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<BigInt, _>(lease.0)
    .bind_failures(&messages)
    .bind::<Array<Timestamptz>, _>(claimed_at)
    .bind::<Bool, _>(keep_payload)
    .bind::<Array<BigInt>, _>(blocking)
    .bind::<Array<Text>, _>(names(&messages))
    .giving::<BigInt>()
    .load(conn)
}

/// Removes the messages $1 from the outbox if `lease` has held them since these times.
fn gone(name: &OutboxName, lease: &str, claimed_at: &str) -> String {
    gone_of(name, lease, claimed_at, "$1")
}

/// The same, of those whose sequences are in this array.
fn gone_of(name: &OutboxName, lease: &str, claimed_at: &str, these: &str) -> String {
    format!(
        "gone AS (
            DELETE FROM {outbox} o
             WHERE o.sequence = ANY({these}) AND o.locked_by = {lease} AND o.locked_at = {claimed_at}
            RETURNING o.*
        )",
        outbox = name.outbox(),
        claimed_at = of_row(&format!("{claimed_at}::timestamptz[]"), "$1"),
    )
}

/// Records the rows of `gone` in the ledger, with their `outcome`.
fn record(name: &OutboxName, status: Status, keep_payload: &str) -> String {
    format!(
        "INSERT INTO {ledger} (part, sequence, message_id, topic, destination, named_destination,
             ordering_key, idempotency_key, digest, tenant_id, status, reason, error, http_status, response,
             attempts, payload, headers, created_at, occurred_at, split_from, registration)
         SELECT {part}, g.sequence, g.message_id, g.topic, o.destination, g.destination, g.ordering_key,
                g.idempotency_key, {digest}, g.tenant_id, '{status}', o.code, o.error, o.http_status,
                o.response, {attempts} + o.counted, CASE WHEN {keep_payload} THEN g.payload END,
                CASE WHEN {keep_payload} THEN g.headers END, g.created_at, g.occurred_at, g.split_from,
                coalesce(o.registration, g.registration)
           FROM gone g JOIN outcome o USING (sequence)",
        ledger = name.ledger(),
        part = open_part(name),
        attempts = attempts_of("g"),
        digest = kept_digest("g"),
    )
}

/// A new message has at most so many attempts: the rule `attempts_is_a_count`.
pub(crate) const MOST_ATTEMPTS: i32 = 1_000_000_000;

/// The attempts of a row of the outbox. An UPDATE may have written any number; one more must not be out of range.
pub(super) fn attempts_of(row: &str) -> String {
    format!("least(greatest({row}.attempts, 0), {MOST_ATTEMPTS})")
}

/// Releases messages unsent. Counts no attempt, and is a HOT update.
///
/// A call is repeated if the database's answer was lost. If the same lease has claimed a message again meanwhile, the
/// repeat leaves the message unchanged.
pub(crate) fn release(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Claim],
) -> QueryResult<Vec<i64>> {
    let change = update(outbox::table(name.outbox()))
        .filter(are_held(lease, messages))
        .set(is_free())
        .returning(outbox::sequence);
    kept(change).load(conn)
}

/// The messages of a range that were released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Released {
    pub(crate) messages: usize,
    /// Whether some messages were left because other sessions have locked them.
    pub(crate) are_some_locked: bool,
}

/// Releases the messages that a lease holds in this range, except `known`: for a relay that knows of no other message
/// of the lease there, and claims none meanwhile. Compares claims, not only sequences: a server that has forgotten a
/// settle may hold messages that this lease has claimed again since. Reads the whole range. Waits for no row.
///
/// In the caller's transaction: without it, a statement whose answer was lost could come late, and release what was
/// claimed since.
pub(crate) fn release_unknown(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    known: &[Claim],
    range: Range,
) -> QueryResult<Released> {
    let unknown: Vec<i64> = outbox::table(name.outbox())
        .filter(outbox::sequence.gt(range.after))
        .filter(outbox::sequence.le(range.upto))
        .filter(outbox::locked_by.eq(lease.0))
        .filter(not(are_held(lease, known)))
        .select(outbox::sequence)
        .load(conn)?;
    let mut released: Vec<i64> = Vec::new();
    if !unknown.is_empty() {
        let free = outbox::table(name.outbox())
            .filter(outbox::sequence.eq_any(&unknown))
            .filter(outbox::locked_by.eq(lease.0))
            .select(outbox::sequence)
            .for_no_key_update()
            .skip_locked();
        released = free.load(conn)?;
        update(outbox::table(name.outbox()))
            .filter(outbox::sequence.eq_any(&released))
            .set(is_free())
            .execute(conn)?;
    }
    Ok(Released {
        messages: released.len(),
        are_some_locked: released.len() < unknown.len(),
    })
}

type IsFree = (
    Eq<outbox::locked_by, Option<i64>>,
    Eq<outbox::locked_at, Option<PgTimestamp>>,
);

fn is_free() -> IsFree {
    (outbox::locked_by.eq(None), outbox::locked_at.eq(None))
}

/// The row is one of these messages, and the lease has held it since the time of its claim.
// Why: docs/decisions.md#late-settle
fn are_held(lease: LeaseId, messages: &[Claim]) -> On<'static, outbox::table> {
    let (_, sequences, claimed_at) = in_order(messages, |claim| *claim);
    // The same lookup as `of_row`.
    let claimed_at = claimed_at
        .into_sql::<Array<Timestamptz>>()
        .index(width_bucket(outbox::sequence, sequences.clone()));
    let holder = outbox::locked_by.assume_not_null();
    let is_held = holder
        .eq(lease.0)
        .and(outbox::locked_at.assume_not_null().eq(claimed_at));
    Box::new(outbox::sequence.eq_any(sequences).and(is_held))
}

/// The trace that a successful settle leaves in the ledger.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trace {
    pub(crate) claim: Claim,
    pub(crate) message_id: Uuid,
}

/// The sequences of the messages that the ledger has as settled since their claim. Queried after a settle was
/// repeated because its answer was lost: the first call may have succeeded, or another relay may have the messages.
pub(crate) fn settled(
    conn: &mut PgConnection,
    name: &OutboxName,
    traces: &[Trace],
) -> QueryResult<Vec<i64>> {
    let ids: Vec<Uuid> = traces.iter().map(|trace| trace.message_id).collect();
    let entries: Vec<(Uuid, i64, PgTimestamp)> = ledger::table(name.ledger())
        .filter(ledger::message_id.eq_any(ids))
        .select((ledger::message_id, ledger::sequence, ledger::settled_at))
        .load(conn)?;
    let is_left = |trace: &&Trace| {
        entries.iter().any(|(id, sequence, at)| {
            *id == trace.message_id && *sequence == trace.claim.sequence && at.0 >= trace.claim.at
        })
    };
    let left = traces.iter().filter(is_left);
    Ok(left.map(|trace| trace.claim.sequence).collect())
}

/// Those of these messages that another session has locked, or has removed just now.
pub(crate) fn locked(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
) -> QueryResult<Vec<i64>> {
    let these = || {
        outbox::table(name.outbox())
            .filter(outbox::sequence.eq_any(sequences))
            .select(outbox::sequence)
    };
    let mut all: Vec<i64> = these().load(conn)?;
    let free: HashSet<i64> = (these().for_update().skip_locked().load(conn)?)
        .into_iter()
        .collect();
    all.retain(|sequence| !free.contains(sequence));
    Ok(all)
}

/// SQL for the element of `array` that belongs to the row `o`: a binary search for the row's sequence in `sequences`,
/// which are in ascending order. In a plan for all values, a join with the arrays would be a nested loop and compare
/// each row with each element.
pub(super) fn of_row(array: &str, sequences: &str) -> String {
    format!("({array})[width_bucket(o.sequence, {sequences}::bigint[])]")
}

/// The messages in the order that [`of_row`] needs, and the sequences and times of their claims as parameters.
pub(super) fn in_order<T>(
    messages: &[T],
    claim: impl Fn(&T) -> Claim,
) -> (Vec<&T>, Vec<i64>, Vec<PgTimestamp>) {
    let mut messages: Vec<&T> = messages.iter().collect();
    messages.sort_unstable_by_key(|message| claim(message));
    let claims = messages.iter().map(|message| claim(message));
    let (sequences, claimed_at) = claims
        .map(|claim| (claim.sequence, PgTimestamp(claim.at)))
        .unzip();
    (messages, sequences, claimed_at)
}
