//! Messages that an endpoint has missed: it wants them, but was disabled or not there when they were fanned
//! out. The outbox has those that still wait for another endpoint; the ledger has the others, if it keeps payloads.
//!
//! A missed message is placed as the part that the fan-out would have placed: same id, key, content and times, and the
//! place of the original message in its ordering key (`split_from`). So no table records what is done: a message is
//! missed as long as the endpoint has neither a live message, nor a dead letter, nor a ledger entry of it.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods, OptionalExtension,
    QueryDsl, Queryable, RunQueryDsl,
};
use diesel::result::Error::QueryBuilderError;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Nullable, Text, Timestamptz, Uuid as SqlUuid};
use diesel::{PgConnection, select};
use uuid::Uuid;

use super::rows::EndpointRow;
use crate::endpoints::endpoint::Endpoint;
use crate::engine::serves::routes::matches_any;
use crate::filter::{Filter, FilterOutcome, evaluate};
use crate::name::OutboxName;
use crate::schema::values::{as_micros, from_micros};
use crate::sql::absent::all_endpoints;
use crate::sql::functions::{JsonText, MaybeJson, all_of, clock_timestamp, coalesce, given};
use crate::sql::looking::{looking, looking_briefly};
use crate::sql::open_part;
use crate::sql::statement::{unprepared, unprepared_statement};
use crate::sql::table::{endpoint, ledger, outbox};

/// The most messages that one search finds.
pub(crate) const LOOK: usize = 100_000;
/// Messages whose payloads are in memory at once while a filter is evaluated. A payload has at most 1 MiB.
const PAYLOADS: usize = 100;

/// What an endpoint wants, of a time.
#[derive(Debug)]
pub(crate) struct Wanted {
    name: String,
    registration: Uuid,
    tenant_id: Option<Uuid>,
    filter: Option<Filter>,
    /// The topics in the outbox and the ledger that the endpoint subscribes to.
    topics: Vec<String>,
    since: PgTimestamp,
    until: PgTimestamp,
}

/// A message that the endpoint has missed.
#[derive(Debug, Clone, Queryable)]
pub(crate) struct Missed {
    message_id: Uuid,
    /// The sequence of the original message: its place in its ordering key.
    place: i64,
    has_payload: bool,
}

impl Missed {
    /// The search continues after this message.
    pub(crate) fn place(&self) -> (i64, Uuid) {
        (self.place, self.message_id)
    }
}

/// What a bulk change has done, or would do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bulked {
    /// Messages that were changed, or would be.
    pub changed: u64,
    /// Messages that were left: their idempotency key is in the outbox again, or another operator or run was faster.
    pub skipped: u64,
    /// Messages that cannot be sent, because the ledger has no payload of them (`OUTBOX_LEDGER_PAYLOAD`).
    pub without_payload: u64,
}

impl Bulked {
    /// Of so many messages, so many were changed.
    pub(crate) fn of(messages: usize, changed: usize) -> Self {
        Self {
            changed: changed as u64,
            skipped: (messages - changed) as u64,
            without_payload: 0,
        }
    }
}

/// What the endpoint wants of the messages that were enqueued since this time, and are fanned out now. `None`: there was
/// no time `left`.
pub(crate) fn wanted(
    conn: &mut PgConnection,
    name: &OutboxName,
    EndpointRow { row, id, .. }: &EndpointRow,
    since: SystemTime,
    left: Option<Duration>,
) -> QueryResult<Option<Wanted>> {
    let until: PgTimestamp = select(clock_timestamp()).get_result(conn)?;
    let since = from_micros(as_micros(since));
    let settled = ledger::table(name.ledger())
        .filter(ledger::settled_at.ge(since))
        .filter(all_of([given(row.tenant_id, |id| {
            ledger::tenant_id.assume_not_null().eq(id)
        })]))
        .select(ledger::topic)
        .distinct();
    let waiting = outbox::table(name.outbox())
        .filter(outbox::created_at.ge(since))
        .filter(outbox::destination.ne(""))
        .filter(all_of([given(row.tenant_id, |id| {
            outbox::tenant_id.assume_not_null().eq(id)
        })]))
        .select(outbox::topic)
        .distinct();
    let topics = looking_for(conn, left, |conn| {
        let mut topics: Vec<String> = unprepared(settled).load(conn)?;
        topics.extend(unprepared(waiting).load::<String>(conn)?);
        Ok(topics)
    })?;
    let Some(mut topics) = topics else {
        return Ok(None);
    };
    topics.sort_unstable();
    topics.dedup();
    topics.retain(|topic| matches_any(&row.topics, topic));
    let filter = row.filter.as_ref().map(Filter::new).transpose();
    let filter = filter.map_err(|error| QueryBuilderError(format!("filter: {error}").into()))?;
    let Endpoint {
        name, tenant_id, ..
    } = row.clone();
    Ok(Some(Wanted {
        name,
        registration: *id,
        tenant_id,
        filter,
        topics,
        since,
        until,
    }))
}

/// Whether the endpoint $1, in its registration $2, has nothing of the message `l`. A fan-out that is not finished still
/// brings its part, unless it has passed the name: parts are placed in the order of the names' bytes.
///
/// Each is a probe of an index. `OFFSET 0` and `IS TRUE` keep the planner from a join of all rows of the endpoint, for
/// which its statistics may be very wrong: a recovered endpoint has just lost its dead letters, or got many messages.
fn is_missed(name: &OutboxName) -> String {
    let is_its = "e.message_id = l.message_id AND (e.destination = $1) IS TRUE";
    format!(
        "NOT EXISTS (SELECT FROM {ledger} e WHERE {is_its} AND coalesce(e.registration = $2, true) OFFSET 0)
         AND NOT EXISTS (SELECT FROM {dead} e WHERE {is_its} AND coalesce(e.registration = $2, true) OFFSET 0)
         AND NOT EXISTS (SELECT FROM {outbox} e WHERE e.split_from = l.place AND {is_its} OFFSET 0)
         AND NOT EXISTS (SELECT FROM {outbox} e WHERE e.sequence = l.place AND e.message_id = l.message_id
                            AND (e.destination = $1 OR e.destination = '' AND coalesce(e.split_to < $1 COLLATE \"C\", true))
                            OFFSET 0)",
        ledger = name.ledger(),
        dead = name.dead(),
        outbox = name.outbox(),
    )
}

/// What was fanned out, from the ledger and from the outbox: messages that named no endpoint, or of which this cannot
/// be told. A retried message names its endpoint from then on, so it looks like a message that always did:
/// it counts as missed. `settled`: a condition for entries of the ledger.
fn fanned_out(name: &OutboxName, settled: &str) -> String {
    let content = "message_id, topic, payload, headers, ordering_key, idempotency_key, digest, tenant_id, created_at, occurred_at";
    format!(
        "(SELECT {content}, coalesce(split_from, sequence) AS place, NULL::timestamptz AS expires_at
            FROM {ledger}
           WHERE {settled}
             AND (named_destination = '' OR split_from IS NOT NULL OR (registration IS NOT NULL AND attempts > 1))
             AND (status <> 'dead' OR coalesce(reason, '') NOT IN ('CANCELLED', 'EXPIRED'))
           UNION ALL
          SELECT {content}, split_from, expires_at FROM {outbox} WHERE split_from IS NOT NULL
           UNION ALL
          SELECT {content}, sequence, expires_at FROM {outbox}
           WHERE split_from IS NULL AND destination <> '' AND registration IS NOT NULL AND attempts > 0)",
        ledger = name.ledger(),
        outbox = name.outbox(),
    )
}

/// The next missed messages after this place, in the order in which they were enqueued, at most [`LOOK`]. `None`: there was
/// no time `left`.
///
/// Text: Diesel correlates no subqueries over several of our tables, and has no DISTINCT ON a union.
pub(crate) fn look(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &Wanted,
    after: Option<(i64, Uuid)>,
    left: Option<Duration>,
) -> QueryResult<Option<Vec<Missed>>> {
    let (place, message_id) = after.unwrap_or((i64::MIN, Uuid::nil()));
    let missed = unprepared_statement(format!(
        "SELECT DISTINCT ON (l.place, l.message_id) l.message_id, l.place, l.payload IS NOT NULL
           FROM {fanned_out} l
          WHERE l.created_at >= $3 AND l.topic = ANY($5) AND ($6 IS NULL OR l.tenant_id = $6)
            AND (l.place, l.message_id) > ($7, $8)
            AND (l.expires_at > now() OR l.expires_at IS NULL)
            AND coalesce(l.idempotency_key, '') NOT LIKE '%#replay-%'
            AND {is_missed}
          ORDER BY l.place, l.message_id, l.payload IS NULL LIMIT {LOOK}",
        fanned_out = fanned_out(name, "settled_at >= $3 AND settled_at < $4"),
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
    .giving::<(SqlUuid, BigInt, Bool)>();
    looking_for(conn, left, |conn| missed.load(conn))
}

/// Places these messages for the endpoint, in their order, and records who did. Without `operator`, only counts.
/// `None`: the endpoint is gone, or is another registration by now.
///
/// The row of the endpoint is locked, so that two runs place no message twice.
pub(crate) fn step(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &Wanted,
    missed: &[Missed],
    operator: Option<&str>,
) -> QueryResult<Option<Bulked>> {
    let with_payload: Vec<&Missed> = missed.iter().filter(|one| one.has_payload).collect();
    let matching = match &wanted.filter {
        Some(filter) => matching(conn, name, filter, &with_payload)?,
        None => with_payload.clone(),
    };
    let found = all_endpoints(name)
        .filter(endpoint::name.eq(&wanted.name))
        .filter(endpoint::id.eq(wanted.registration))
        .select(endpoint::id);
    let placed = match operator {
        None => matching.len(),
        Some(operator) => {
            let is_there = found.for_no_key_update().get_result::<Uuid>(conn);
            if is_there.optional()?.is_none() {
                return Ok(None);
            }
            place(conn, name, wanted, &matching, operator)?
        }
    };
    Ok(Some(Bulked {
        without_payload: (missed.len() - with_payload.len()) as u64,
        ..Bulked::of(matching.len(), placed)
    }))
}

/// A place in an ordering key, a message, and what filters read of it.
type MissedRow = (i64, Uuid, String, MaybeJson, JsonText);

/// Those of these messages that the filter matches. One that needs too many steps does not match, as at a relay (where
/// other filters may have left it fewer).
fn matching<'m>(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &Filter,
    missed: &[&'m Missed],
) -> QueryResult<Vec<&'m Missed>> {
    let mut matching = Vec::new();
    for missed in missed.chunks(PAYLOADS) {
        let matches: HashMap<(i64, Uuid), bool> = (kept(conn, name, missed)?.into_iter())
            .map(|(place, id, topic, headers, payload)| {
                let (headers, payload) = (Option::from(headers), String::from(payload));
                let headers: Option<String> = headers;
                let outcomes = evaluate(&[filter], &topic, headers.as_deref(), &payload);
                ((place, id), outcomes == [FilterOutcome::Matches])
            })
            .collect();
        let is_it = |one: &&&'m Missed| matches.get(&one.place()) == Some(&true);
        matching.extend(missed.iter().filter(is_it).copied());
    }
    Ok(matching)
}

/// What is kept of these messages, once for all their parts.
fn kept(
    conn: &mut PgConnection,
    name: &OutboxName,
    missed: &[&Missed],
) -> QueryResult<Vec<MissedRow>> {
    let ids: Vec<_> = missed.iter().map(|one| one.message_id).collect();
    let places: Vec<_> = missed.iter().map(|one| one.place).collect();
    let settled = ledger::table(name.ledger())
        .filter(ledger::message_id.eq_any(&ids))
        .filter(ledger::payload.is_not_null())
        .distinct_on((
            coalesce(ledger::split_from, ledger::sequence),
            ledger::message_id,
        ))
        .select((
            coalesce(ledger::split_from, ledger::sequence),
            ledger::message_id,
            ledger::topic,
            ledger::headers,
            ledger::payload.assume_not_null(),
        ));
    let of_parts = outbox::split_from.eq_any(&places).assume_not_null();
    let waiting = outbox::table(name.outbox())
        .filter(of_parts.or(outbox::sequence.eq_any(&places)))
        .distinct_on((
            coalesce(outbox::split_from, outbox::sequence),
            outbox::message_id,
        ))
        .select((
            coalesce(outbox::split_from, outbox::sequence),
            outbox::message_id,
            outbox::topic,
            outbox::headers,
            outbox::payload,
        ));
    looking(conn, None, |conn| {
        let mut kept: Vec<MissedRow> = unprepared(settled).load(conn)?;
        kept.extend(unprepared(waiting).load::<MissedRow>(conn)?);
        Ok(kept)
    })
}

/// Places parts, and a history entry for each. If an earlier registration of the name has got the message, the key is
/// that of a replay: otherwise the claim would settle the part as delivered before.
///
/// Text: `unnest`, LATERAL and WITH.
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
                idempotency_key, digest, tenant_id, created_at, occurred_at, expires_at, split_from, registration)
            SELECT l.message_id, l.topic, $1, l.payload, l.headers, l.ordering_key,
                   CASE WHEN EXISTS (SELECT FROM {ledger} e
                                      WHERE e.idempotency_key = l.idempotency_key AND e.named_destination = $1)
                        THEN l.idempotency_key || '#replay-' || left($2::text, 8) ELSE l.idempotency_key END,
                   l.digest, l.tenant_id, l.created_at, l.occurred_at, l.expires_at, l.place, $2
              FROM unnest($3::uuid[], $4::bigint[]) WITH ORDINALITY AS m(message_id, place, n)
              CROSS JOIN LATERAL (SELECT * FROM {fanned_out} l
                                   WHERE l.message_id = m.message_id AND l.place = m.place AND l.payload IS NOT NULL
                                   LIMIT 1) l
             WHERE {is_missed}
             ORDER BY m.n
            ON CONFLICT (idempotency_key, destination) WHERE idempotency_key IS NOT NULL DO NOTHING
            RETURNING sequence, message_id, topic, destination, tenant_id
         )
         INSERT INTO {attempt} (part, sequence, message_id, topic, destination, tenant_id, event, operator)
         SELECT {part}, sequence, message_id, topic, destination, tenant_id, 'replayed', $5 FROM placed",
        outbox = name.outbox(),
        ledger = name.ledger(),
        attempt = name.attempt(),
        part = open_part(name),
        fanned_out = fanned_out(name, "true"),
        is_missed = is_missed(name),
    ))
    .bind::<Text, _>(&wanted.name)
    .bind::<SqlUuid, _>(wanted.registration)
    .bind::<Array<SqlUuid>, _>(missed.iter().map(|one| one.message_id).collect::<Vec<_>>())
    .bind::<Array<BigInt>, _>(missed.iter().map(|one| one.place).collect::<Vec<_>>())
    .bind::<Text, _>(operator)
    .execute(conn)
}

/// Runs read-only statements for at most the time that is left; `None`: without a limit.
pub(crate) fn looking_for<T>(
    conn: &mut PgConnection,
    left: Option<Duration>,
    look: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<Option<T>> {
    match left {
        Some(left) => looking_briefly(conn, left, look),
        None => looking(conn, None, look).map(Some),
    }
}
