//! Messages that a registered destination has missed: it wants them, but was disabled or not there when they were fanned
//! out. The ledger has them, if it keeps payloads.
//!
//! A missed message is placed as the part that the fan-out would have placed: same id, key, content and times, and the
//! place of the original message in its ordering key (`split_from`). So no table records what is done: a message is
//! missed as long as the destination has neither a live message, nor a dead letter, nor a ledger entry of it.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    ExpressionMethods, NullableExpressionMethods, OptionalExtension, QueryDsl, Queryable,
    RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Nullable, Text, Timestamptz, Uuid as SqlUuid};
use diesel::{PgConnection, select};
use uuid::Uuid;

use crate::name::OutboxName;
use crate::registered_destination::RegisteredDestination;
use crate::routes::matches_any;
use crate::store::destinations::Registered;
use crate::store::filters::{Evaluated, Pairs, evaluate};
use crate::store::looking::looking;
use crate::store::open_part;
use crate::store::place::{as_micros, from_micros};
use crate::store::sql::{JsonText, all_of, clock_timestamp, given};
use crate::store::statement::{unprepared, unprepared_statement};
use crate::store::table::{destination, ledger};

/// The most messages that one search finds.
pub(crate) const LOOK: usize = 100_000;
/// Payloads in memory at once while a filter is evaluated. A payload has at most 1 MiB.
const PAYLOADS: usize = 100;
/// How long one evaluation of a filter may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a destination wants, of a time.
#[derive(Debug)]
pub(crate) struct Wanted {
    name: String,
    registration: Uuid,
    tenant_id: Option<Uuid>,
    filter: Option<String>,
    /// The topics in the ledger that the destination subscribes to.
    topics: Vec<String>,
    since: PgTimestamp,
    until: PgTimestamp,
}

/// A message in the ledger that the destination has missed.
#[derive(Debug, Clone, Queryable)]
pub(crate) struct Missed {
    message_id: Uuid,
    sequence: i64,
    settled_at: PgTimestamp,
    has_payload: bool,
    /// The sequence of the original message: its place in its ordering key.
    place: i64,
}

impl Missed {
    /// The search continues after this message.
    pub(crate) fn place(&self) -> (i64, Uuid) {
        (self.place, self.message_id)
    }
}

/// What a step has done, or would do.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Step {
    pub(crate) placed: usize,
    pub(crate) skipped: usize,
    pub(crate) without_payload: usize,
}

/// What the destination wants of the messages that were enqueued since this time and are settled now.
pub(crate) fn wanted(
    conn: &mut PgConnection,
    name: &OutboxName,
    Registered { row, id, .. }: &Registered,
    since: SystemTime,
) -> QueryResult<Wanted> {
    let until: PgTimestamp = select(clock_timestamp()).get_result(conn)?;
    let since = from_micros(as_micros(since));
    let topics = ledger::table(name.ledger())
        .filter(ledger::settled_at.ge(since))
        .filter(all_of([given(row.tenant_id, |id| {
            ledger::tenant_id.assume_not_null().eq(id)
        })]))
        .select(ledger::topic)
        .distinct();
    let mut topics: Vec<String> = looking(conn, None, |conn| unprepared(topics).load(conn))?;
    topics.retain(|topic| matches_any(&row.topics, topic));
    let RegisteredDestination {
        name,
        tenant_id,
        filter,
        ..
    } = row.clone();
    Ok(Wanted {
        name,
        registration: *id,
        tenant_id,
        filter,
        topics,
        since,
        until,
    })
}

/// Whether the destination $1, in its registration $2, has nothing of the ledger's message `l`. A message whose fan-out
/// is not finished may still get its part.
///
/// Each is a probe of an index. `OFFSET 0` and `IS TRUE` keep the planner from a join of all rows of the destination, for
/// which its statistics may be very wrong: a recovered destination has just lost its dead letters, or got many messages.
fn is_missed(name: &OutboxName) -> String {
    let is_its = "e.message_id = l.message_id AND (e.destination = $1) IS TRUE";
    format!(
        "NOT EXISTS (SELECT FROM {ledger} e WHERE {is_its} AND coalesce(e.registration = $2, true) OFFSET 0)
         AND NOT EXISTS (SELECT FROM {dead} e WHERE {is_its} AND coalesce(e.registration = $2, true) OFFSET 0)
         AND NOT EXISTS (SELECT FROM {outbox} e WHERE e.split_from = {PLACE} AND {is_its} OFFSET 0)
         AND NOT EXISTS (SELECT FROM {outbox} e WHERE e.sequence = {PLACE} AND e.message_id = l.message_id
                            AND e.destination IN ('', $1) OFFSET 0)",
        ledger = name.ledger(),
        dead = name.dead(),
        outbox = name.outbox(),
    )
}

/// The place of the ledger's message `l` in its ordering key.
const PLACE: &str = "coalesce(l.split_from, l.sequence)";

/// The next missed messages after this place, in the order in which they were enqueued, at most [`LOOK`].
///
/// Messages that named another destination are for that destination only. A retried message names its registered
/// destination from then on, so the ledger cannot tell it from a message that always did: it counts as missed.
///
/// Text: Diesel correlates no subqueries over several of our tables.
pub(crate) fn look(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &Wanted,
    after: Option<(i64, Uuid)>,
) -> QueryResult<Vec<Missed>> {
    let (place, message_id) = after.unwrap_or((i64::MIN, Uuid::nil()));
    let missed = unprepared_statement(format!(
        "SELECT DISTINCT ON ({PLACE}, l.message_id)
                l.message_id, l.sequence, l.settled_at, l.payload IS NOT NULL, {PLACE}
           FROM {ledger} l
          WHERE l.settled_at >= $3 AND l.settled_at < $4 AND l.created_at >= $3
            AND l.topic = ANY($5) AND ($6 IS NULL OR l.tenant_id = $6)
            AND ({PLACE}, l.message_id) > ($7, $8)
            AND (l.named_destination = '' OR l.split_from IS NOT NULL
                 OR (l.registration IS NOT NULL AND l.attempts > 1))
            AND (l.status <> 'dead' OR coalesce(l.reason, '') NOT IN ('CANCELLED', 'EXPIRED'))
            AND coalesce(l.idempotency_key, '') NOT LIKE '%#replay-%'
            AND {is_missed}
          ORDER BY {PLACE}, l.message_id, l.payload IS NULL LIMIT {LOOK}",
        ledger = name.ledger(),
        is_missed = is_missed(name),
    ))
    .bind::<Text, _>(&wanted.name)
    .bind::<SqlUuid, _>(wanted.registration)
    .bind::<Timestamptz, _>(wanted.since)
    .bind::<Timestamptz, _>(wanted.until)
    .bind::<Array<Text>, _>(&wanted.topics)
    .bind::<Nullable<SqlUuid>, _>(wanted.tenant_id)
    .bind::<BigInt, _>(place)
    .bind::<SqlUuid, _>(message_id)
    .giving::<(SqlUuid, BigInt, Timestamptz, Bool, BigInt)>();
    looking(conn, None, |conn| missed.load(conn))
}

/// The result of a step. `None`: the destination is gone, or is another registration by now.
pub(crate) type Stepped = Option<Step>;

/// Places these messages for the destination, in their order, and records who did. Without `operator`, only counts.
///
/// The row of the destination is locked, so that two runs place no message twice.
pub(crate) fn step(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &Wanted,
    missed: &[Missed],
    operator: Option<&str>,
) -> QueryResult<Stepped> {
    let with_payload: Vec<&Missed> = missed.iter().filter(|one| one.has_payload).collect();
    let matching = match &wanted.filter {
        Some(filter) => matching(conn, name, filter, &with_payload)?,
        None => with_payload.clone(),
    };
    let found = destination::table(name.destination())
        .filter(destination::name.eq(&wanted.name))
        .filter(destination::id.eq(wanted.registration))
        .select(destination::id);
    let placed = match operator {
        None => Some(matching.len()),
        Some(operator) => {
            let is_there = found.for_no_key_update().get_result::<Uuid>(conn);
            match is_there.optional()? {
                Some(_) => Some(place(conn, name, wanted, &matching, operator)?),
                None => None,
            }
        }
    };
    Ok(placed.map(|placed| Step {
        placed,
        skipped: matching.len() - placed,
        without_payload: missed.len() - with_payload.len(),
    }))
}

#[derive(Queryable)]
struct Kept {
    message_id: Uuid,
    settled_at: PgTimestamp,
    #[diesel(deserialize_as = JsonText)]
    payload: String,
}

/// The messages whose payloads match the filter, as relays evaluate it.
fn matching<'m>(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &str,
    missed: &[&'m Missed],
) -> QueryResult<Vec<&'m Missed>> {
    let mut matching = Vec::new();
    for missed in missed.chunks(PAYLOADS) {
        let kept = ledger::table(name.ledger())
            .filter(ledger::message_id.eq_any(missed.iter().map(|one| one.message_id)))
            .filter(ledger::settled_at.eq_any(missed.iter().map(|one| one.settled_at)))
            .filter(ledger::payload.is_not_null())
            .select((
                ledger::message_id,
                ledger::settled_at,
                ledger::payload.assume_not_null(),
            ));
        let kept: Vec<Kept> = looking(conn, None, |conn| unprepared(kept).load(conn))?;
        let payloads: HashMap<_, _> = (kept.iter())
            .map(|one| ((one.message_id, one.settled_at.0), one.payload.as_str()))
            .collect();
        let of = |one: &&'m Missed| {
            let payload = payloads.get(&(one.message_id, one.settled_at.0))?;
            Some((*one, *payload))
        };
        let mut rest: Vec<(&Missed, &str)> = missed.iter().filter_map(of).collect();
        while !rest.is_empty() {
            let pairs = Pairs {
                payloads: rest.iter().map(|(_, payload)| *payload).collect(),
                filters: vec![filter],
                pairs: (0..rest.len()).map(|payload| (payload, 0)).collect(),
            };
            // The evaluation sets a time limit, which ends with `looking`.
            let answers = looking(conn, None, |conn| evaluate(conn, &pairs, PATIENCE))?;
            for (answer, (one, _)) in answers.iter().zip(&rest) {
                match answer {
                    Evaluated::Matches => matching.push(*one),
                    // As at a relay, a filter that errs does not match.
                    Evaluated::DoesNot | Evaluated::Failed(_) => {}
                    Evaluated::Unfinished(_) => {
                        return Err(diesel::result::Error::QueryBuilderError(
                            format!(
                                "evaluating the filter of the destination for the message {} was cancelled after {PATIENCE:?}",
                                one.message_id
                            )
                            .into(),
                        ));
                    }
                }
            }
            rest.drain(..answers.len());
        }
    }
    Ok(matching)
}

/// Places parts, and a history entry for each. If an earlier registration of the name has got the message, the key is
/// that of a replay: otherwise the claim would settle the part as delivered before.
///
/// Text: `unnest`, and WITH.
fn place(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &Wanted,
    missed: &[&Missed],
    operator: &str,
) -> QueryResult<usize> {
    unprepared_statement(format!(
        "WITH placed AS (
            INSERT INTO {outbox} (message_id, topic, destination, payload, headers, ordering_key,
                idempotency_key, digest, tenant_id, created_at, occurred_at, split_from, registration)
            SELECT l.message_id, l.topic, $1, l.payload, l.headers, l.ordering_key,
                   CASE WHEN EXISTS (SELECT FROM {ledger} e
                                      WHERE e.idempotency_key = l.idempotency_key AND e.named_destination = $1)
                        THEN l.idempotency_key || '#replay-' || left($2::text, 8) ELSE l.idempotency_key END,
                   l.digest, l.tenant_id, l.created_at, l.occurred_at, {PLACE}, $2
              FROM unnest($3::uuid[], $4::bigint[], $5::timestamptz[])
                   WITH ORDINALITY AS m(message_id, sequence, settled_at, n)
              JOIN {ledger} l ON l.message_id = m.message_id AND l.sequence = m.sequence
                             AND l.settled_at = m.settled_at
             WHERE l.payload IS NOT NULL AND {is_missed}
             ORDER BY m.n
            ON CONFLICT (idempotency_key, destination) WHERE idempotency_key IS NOT NULL DO NOTHING
            RETURNING sequence, message_id, topic, destination, tenant_id
         )
         INSERT INTO {attempt} (part, sequence, message_id, topic, destination, tenant_id, event, operator)
         SELECT {part}, sequence, message_id, topic, destination, tenant_id, 'replayed', $6 FROM placed",
        outbox = name.outbox(),
        ledger = name.ledger(),
        attempt = name.attempt(),
        part = open_part(name),
        is_missed = is_missed(name),
    ))
    .bind::<Text, _>(&wanted.name)
    .bind::<SqlUuid, _>(wanted.registration)
    .bind::<Array<SqlUuid>, _>(missed.iter().map(|one| one.message_id).collect::<Vec<_>>())
    .bind::<Array<BigInt>, _>(missed.iter().map(|one| one.sequence).collect::<Vec<_>>())
    .bind::<Array<Timestamptz>, _>(missed.iter().map(|one| one.settled_at).collect::<Vec<_>>())
    .bind::<Text, _>(operator)
    .execute(conn)
}
