//! Replays: what was delivered, as new messages.

use std::time::SystemTime;

use diesel::dsl::{self, count_star, min};
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl,
    Queryable, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Nullable, Text, Timestamptz, Uuid as SqlUuid};
use diesel::{PgConnection, select};
use uuid::Uuid;

pub(crate) use super::replay_keys::LONGEST_RUN;

use super::replay_keys::replayed;
use crate::name::OutboxName;
use crate::status::Status;
use crate::store::digest_of;
use crate::store::looking::looking;
use crate::store::open_part;
use crate::store::place::{Place, as_micros, from_micros, rfc3339, to_micros};
use crate::store::sql::{On, TimeAndSequence, all_of, clock_timestamp, given, shown_key};
use crate::store::statement::{planned_anew, statement_anew};
use crate::store::table::ledger;

/// Messages that one statement replays.
pub(crate) const BATCH: i64 = 1_000;

/// Which delivered messages are replayed. Everything given has to hold.
#[derive(Debug, Clone, Default)]
pub struct ReplayFilter {
    /// Delivered then or later.
    pub since: Option<SystemTime>,
    /// Delivered before then; never later than when the replay begins, so it never meets itself.
    pub until: Option<SystemTime>,
    /// This topic only.
    pub topic: Option<String>,
    /// Only what was delivered to this destination: it goes there again, wherever the routes of today lead. Empty:
    /// what named none.
    pub destination: Option<String>,
    /// This tenant only.
    pub tenant_id: Option<Uuid>,
    /// Only these idempotency keys; empty: any.
    pub idempotency_keys: Vec<String>,
}

/// Which message ids the replayed messages have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReplayIds {
    /// The same: receivers that know which ids they have handled leave them alone.
    #[default]
    Same,
    /// New ones: receivers handle them again.
    New,
}

/// What a replay would find, or has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Replayed {
    /// Delivered messages with a payload: what is, or would be, replayed.
    pub replayed: u64,
    /// Delivered messages whose payload the ledger has not kept (`OUTBOX_LEDGER_PAYLOAD`).
    pub without_payload: u64,
    /// Messages that this run has replayed before, or whose replay stands for two of them.
    pub skipped: u64,
}

#[derive(Queryable)]
struct FoundRow {
    message_id: Uuid,
    /// The key that is shown.
    key: String,
    has_payload: bool,
    settled_at: PgTimestamp,
    sequence: i64,
}

/// A replay under way: where it is in the ledger, and where it ends.
#[derive(Debug)]
pub(crate) struct Walk {
    /// What names this run, in the keys of its messages.
    pub(crate) run: String,
    /// The last row that was seen.
    place: Place,
    end: i64,
    /// Microseconds that are read at once.
    window: i64,
}

/// What one step has done; `None`: the walk is at its end.
pub(crate) type Step = Option<Replayed>;

/// Begins. Without a `run` it gets a name by the database's time.
pub(crate) fn begin(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &ReplayFilter,
    run: Option<&str>,
) -> QueryResult<Walk> {
    let now: PgTimestamp = select(clock_timestamp()).get_result(conn)?;
    let since = match filter.since {
        Some(since) => Some(as_micros(since)),
        None if filter.idempotency_keys.is_empty() => oldest(conn, name)?.map(to_micros),
        None => None,
    };
    let until = filter.until.map_or(i64::MAX, as_micros);
    Ok(Walk {
        run: run.map_or_else(|| run_of(now), str::to_owned),
        place: Place::before(since.unwrap_or(i64::MIN)),
        end: until.min(to_micros(now).saturating_add(1)),
        window: 1_000_000,
    })
}

/// When the first row of the ledger was settled.
fn oldest(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Option<PgTimestamp>> {
    let first = ledger::table(name.ledger()).select(min(ledger::settled_at));
    looking(conn, None, |conn| planned_anew(first).get_result(conn))
}

/// `20261121T101500-5f3a9c`: the time, to the second, and a number of no meaning.
fn run_of(now: PgTimestamp) -> String {
    let time = rfc3339(now);
    let seconds = time.split('.').next().unwrap_or_default();
    let time: String = seconds
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect();
    format!("{time}-{:06x}", fastrand::u32(0..1 << 24))
}

/// The filter means this row of the ledger, and it was settled from the first time on and before the second.
fn is_meant(filter: &ReplayFilter, from: i64, to: i64) -> On<'_, ledger::table> {
    let keys = &filter.idempotency_keys;
    let ids: Vec<Uuid> = keys.iter().filter_map(|key| key.parse().ok()).collect();
    let key = ledger::idempotency_key;
    let has_id = key.is_null().and(ledger::message_id.eq_any(ids));
    let has_key = key.assume_not_null().eq_any(keys).or(has_id);
    let is_of_time = ledger::settled_at
        .ge(from_micros(from))
        .and(ledger::settled_at.lt(from_micros(to)));
    all_of([
        given(filter.topic.as_ref(), |topic| ledger::topic.eq(topic)),
        given(filter.destination.as_deref(), went_to),
        given(filter.tenant_id, |id| {
            ledger::tenant_id.assume_not_null().eq(id)
        }),
        given((!keys.is_empty()).then_some(has_key), |it| it),
        Some(Box::new(is_of_time.and(ledger::status.eq("delivered")))),
    ])
}

/// It was delivered to this destination; where that is empty: it has named none.
fn went_to(destination: &str) -> On<'_, ledger::table> {
    match destination {
        "" => Box::new(ledger::named_destination.eq("")),
        used => Box::new(ledger::destination.eq(used)),
    }
}

/// How many there are to replay, from the walk's place on.
pub(crate) fn count(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &ReplayFilter,
    walk: &Walk,
) -> QueryResult<Replayed> {
    let (with_payload, all): (i64, i64) = looking(conn, None, |conn| {
        let counts = ledger::table(name.ledger())
            .filter(is_meant(filter, walk.place.micros, walk.end))
            .select((dsl::count(ledger::payload), count_star()));
        planned_anew(counts).get_result(conn)
    })?;
    Ok(Replayed {
        replayed: u64::try_from(with_payload).unwrap_or(0),
        without_payload: u64::try_from(all - with_payload).unwrap_or(0),
        skipped: 0,
    })
}

/// Replays the next ones, a thousand at most, in one statement. `operator`: who and why.
pub(crate) fn step(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &ReplayFilter,
    ids: ReplayIds,
    walk: &mut Walk,
    operator: &str,
) -> QueryResult<Step> {
    let rows = loop {
        if walk.place.micros >= walk.end {
            return Ok(None);
        }
        let rows = next(conn, name, filter, walk)?;
        if !rows.is_empty() {
            break rows;
        }
    };
    let with_payload: Vec<&FoundRow> = rows.iter().filter(|row| row.has_payload).collect();
    let asked = filter.destination.as_deref().unwrap_or_default();
    let inserted = insert(conn, name, ids, asked, &walk.run, &with_payload, operator)?;
    Ok(Some(Replayed {
        replayed: inserted as u64,
        without_payload: (rows.len() - with_payload.len()) as u64,
        skipped: (with_payload.len() - inserted) as u64,
    }))
}

/// The next rows in the order in which they were settled, and the walk's place behind them. A window of
/// time is read, which grows and shrinks until it holds about a batch.
fn next(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &ReplayFilter,
    walk: &mut Walk,
) -> QueryResult<Vec<FoundRow>> {
    // Keys are found by their index, all at once.
    if !filter.idempotency_keys.is_empty() {
        walk.window = i64::MAX;
    }
    let to = match walk.window {
        i64::MAX => walk.end,
        window => walk.place.micros.saturating_add(window).min(walk.end),
    };
    let rows: Vec<FoundRow> = looking(conn, None, |conn| {
        let when = (ledger::settled_at, ledger::sequence).into_sql::<TimeAndSequence>();
        let rows = ledger::table(name.ledger())
            .filter(is_meant(filter, walk.place.micros, to))
            .filter(when.gt(walk.place.of_row()))
            .order((ledger::settled_at, ledger::sequence))
            .limit(BATCH)
            .select((
                ledger::message_id,
                shown_key!(ledger),
                ledger::payload.is_not_null(),
                ledger::settled_at,
                ledger::sequence,
            ));
        planned_anew(rows).load(conn)
    })?;
    let number = i64::try_from(rows.len()).unwrap_or(BATCH);
    walk.place = match rows.last() {
        Some(last) if number >= BATCH => Place {
            micros: to_micros(last.settled_at),
            sequence: last.sequence,
        },
        _ => Place::before(to),
    };
    if number >= BATCH {
        walk.window = (walk.window / 2).max(1_000);
    } else if number < BATCH / 2 {
        walk.window = walk.window.saturating_mul(4);
    }
    Ok(rows)
}

/// Replays one message to a destination that has got it. `None`: the ledger knows of none.
pub(crate) fn once_more(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
    message_id: Uuid,
    operator: &str,
) -> QueryResult<Option<Replayed>> {
    let delivered = ledger::table(name.ledger())
        .filter(ledger::message_id.eq(message_id))
        .filter(ledger::destination.eq(destination))
        .filter(ledger::status.eq(Status::Delivered.as_str()))
        .order(ledger::settled_at.desc())
        .select((
            ledger::message_id,
            shown_key!(ledger),
            ledger::payload.is_not_null(),
            ledger::settled_at,
            ledger::sequence,
        ));
    let rows: Vec<FoundRow> = planned_anew(delivered).load(conn)?;
    if rows.is_empty() {
        return Ok(None);
    }
    let mut done = Replayed::default();
    let Some(row) = rows.iter().find(|row| row.has_payload) else {
        done.without_payload = 1;
        return Ok(Some(done));
    };
    let now: PgTimestamp = select(clock_timestamp()).get_result(conn)?;
    let run = run_of(now);
    let same = ReplayIds::Same;
    let inserted = insert(conn, name, same, destination, &run, &[row], operator)?;
    done.replayed = inserted as u64;
    Ok(Some(done))
}

/// New messages of these rows, in their order, and an entry of the history for each. What this run has
/// inserted before stays alone. `asked`: the destination of those that name none; empty: today's routes say.
///
/// Text: Diesel has no `unnest`, and no WITH.
fn insert(
    conn: &mut PgConnection,
    name: &OutboxName,
    ids: ReplayIds,
    asked: &str,
    run: &str,
    rows: &[&FoundRow],
    operator: &str,
) -> QueryResult<usize> {
    let message_ids: Vec<Uuid> = rows.iter().map(|row| row.message_id).collect();
    let sequences: Vec<i64> = rows.iter().map(|row| row.sequence).collect();
    let settled_at: Vec<PgTimestamp> = rows.iter().map(|row| row.settled_at).collect();
    let keys: Vec<String> = rows.iter().map(|row| replayed(&row.key, run)).collect();
    let new_ids: Vec<Option<Uuid>> = match ids {
        ReplayIds::Same => rows.iter().map(|_| None).collect(),
        ReplayIds::New => rows.iter().map(|_| Some(Uuid::now_v7())).collect(),
    };
    statement_anew(format!(
        "WITH replayed AS (
            INSERT INTO {outbox} (message_id, topic, destination, payload, ordering_key,
                idempotency_key, digest, tenant_id, occurred_at)
            SELECT coalesce(r.new_id, l.message_id), l.topic, {goes_to}, l.payload, l.ordering_key,
                   r.key, {digest}, l.tenant_id, l.occurred_at
              FROM unnest($1::uuid[], $2::bigint[], $3::timestamptz[], $4::uuid[], $5::text[])
                   WITH ORDINALITY AS r(message_id, sequence, settled_at, new_id, key, n)
              JOIN {ledger} l ON l.message_id = r.message_id AND l.sequence = r.sequence
                             AND l.settled_at = r.settled_at
             WHERE l.status = 'delivered' AND l.payload IS NOT NULL
               AND NOT EXISTS (SELECT FROM {ledger} e
                                WHERE e.idempotency_key = r.key AND e.named_destination = {goes_to})
             ORDER BY r.n
            ON CONFLICT (idempotency_key, destination) WHERE idempotency_key IS NOT NULL DO NOTHING
            RETURNING sequence, message_id, topic, destination, tenant_id
         )
         INSERT INTO {attempt} (part, sequence, message_id, topic, destination, tenant_id, event, operator)
         SELECT {part}, sequence, message_id, topic, destination, tenant_id, 'replayed', $6 FROM replayed",
        outbox = name.outbox(),
        ledger = name.ledger(),
        attempt = name.attempt(),
        goes_to = "coalesce(nullif(l.named_destination, ''), $7)",
        part = open_part(name),
        digest = digest_of("l"),
    ))
    .bind::<Array<SqlUuid>, _>(message_ids)
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Array<Timestamptz>, _>(settled_at)
    .bind::<Array<Nullable<SqlUuid>>, _>(new_ids)
    .bind::<Array<Text>, _>(keys)
    .bind::<Text, _>(operator)
    .bind::<Text, _>(asked)
    .execute(conn)
}
