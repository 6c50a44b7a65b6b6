//! Replays: what was delivered, as new messages.

use std::time::SystemTime;

use diesel::dsl::{self, count_star};
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{BoolExpressionMethods, ExpressionMethods, QueryDsl, Queryable, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Nullable, Text, Uuid as SqlUuid};
use diesel::{PgConnection, sql_query};
use uuid::Uuid;

use super::ledger::as_micros;
use super::looking::looking;
use super::place::{from_micros, micros, to_micros};
use super::sql::{On, all_of};
use super::statement::planned_anew;
use super::table::ledger;
use crate::name::OutboxName;

/// What stands between the key of a message and the name of the run that has replayed it.
pub(super) const MARK: &str = "#replay-";

/// A key has 255 bytes at most; mark and run take 30.
const LONGEST_KEY: usize = 220;

/// Characters of a run's name.
pub(crate) const LONGEST_RUN: usize = 22;

/// Messages that one statement replays.
pub(crate) const BATCH: i64 = 1_000;

/// The first text behind all that begin with [`MARK`].
pub(super) fn after_mark() -> String {
    // '.' follows '-'.
    format!("{}.", MARK.trim_end_matches('-'))
}

/// The SQL of a key that has room for the mark and the name of a run behind it: a long one is cut, and
/// stays one of its own by its hash.
pub(super) fn cut_key(key: &str) -> String {
    format!(
        "CASE WHEN octet_length({key}) <= {LONGEST_KEY} THEN {key}
              ELSE left({key}, 40) || '~' || md5({key}) END"
    )
}

/// The SQL of the key that a message has in a replay: the replay of a replay is one of the first message.
fn replayed_key(key: &str, run: &str) -> String {
    let base = format!("regexp_replace({key}, '{MARK}[A-Za-z0-9-]{{1,{LONGEST_RUN}}}$', '')");
    format!("({} || '{MARK}' || {run})", cut_key(&base))
}

/// Which delivered messages are replayed. Everything given has to hold.
#[derive(Debug, Clone, Default)]
pub struct ReplayFilter {
    /// Delivered then or later.
    pub since: Option<SystemTime>,
    /// Delivered before then; never later than when the replay begins, so it never meets itself.
    pub until: Option<SystemTime>,
    /// This topic only.
    pub topic: Option<String>,
    /// Only what was delivered for this destination; empty: what named none.
    pub destination: Option<String>,
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
    idempotency_key: String,
    destination: String,
    has_payload: bool,
    settled_at: PgTimestamp,
    sequence: i64,
}

#[derive(diesel::QueryableByName)]
struct BeginRow {
    #[diesel(sql_type = Nullable<BigInt>)]
    micros: Option<i64>,
    #[diesel(sql_type = BigInt)]
    now: i64,
    #[diesel(sql_type = Text)]
    run: String,
}

/// A replay under way: where it is in the ledger, and where it ends.
#[derive(Debug)]
pub(crate) struct Walk {
    /// What names this run, in the keys of its messages.
    pub(crate) run: String,
    /// The last row that was seen, in microseconds and by its sequence.
    place: (i64, i64),
    end: i64,
    /// Microseconds that are read at once.
    window: i64,
}

/// What one step has done; `None`: the walk is at its end.
pub(crate) type Step = Option<Replayed>;

/// Begins. Without a `run` it gets a name by the database's time.
///
/// Text: the database writes that name.
pub(crate) fn begin(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &ReplayFilter,
    run: Option<&str>,
) -> QueryResult<Walk> {
    let oldest = match (filter.since, filter.idempotency_keys.is_empty()) {
        (None, true) => format!("(SELECT min(settled_at) FROM {})", name.ledger()),
        _ => "NULL::timestamptz".to_owned(),
    };
    let row: BeginRow = looking(conn, None, |conn| {
        sql_query(format!(
            "SELECT CASE WHEN o.at IS NOT NULL THEN {} END AS micros, {} + 1 AS now,
                    to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYYMMDD\"T\"HH24MISS') AS run
               FROM (SELECT {oldest} AS at) o",
            micros("o.at"),
            micros("clock_timestamp()"),
        ))
        .get_result(conn)
    })?;
    let since = filter.since.map(as_micros).or(row.micros);
    let until = filter.until.map_or(i64::MAX, as_micros);
    let random = || format!("{}-{:06x}", row.run, fastrand::u32(0..1 << 24));
    Ok(Walk {
        run: run.map_or_else(random, str::to_owned),
        place: (since.unwrap_or(i64::MIN), i64::MIN),
        end: until.min(row.now),
        window: 1_000_000,
    })
}

/// The filter means this row of the ledger, and it was settled from the first time on and before the second.
fn is_meant(filter: &ReplayFilter, from: i64, to: i64) -> On<'_, ledger::table> {
    let mut conditions: Vec<On<'_, ledger::table>> = vec![
        Box::new(ledger::status.eq("delivered")),
        Box::new(ledger::settled_at.ge(from_micros(from))),
        Box::new(ledger::settled_at.lt(from_micros(to))),
    ];
    if let Some(topic) = &filter.topic {
        conditions.push(Box::new(ledger::topic.eq(topic)));
    }
    if let Some(destination) = &filter.destination {
        conditions.push(Box::new(ledger::destination.eq(destination)));
    }
    if !filter.idempotency_keys.is_empty() {
        let keys = &filter.idempotency_keys;
        conditions.push(Box::new(ledger::idempotency_key.eq_any(keys)));
    }
    all_of(conditions)
}

fn was_settled_after((micros, sequence): (i64, i64)) -> On<'static, ledger::table> {
    let time = from_micros(micros);
    let at_that_time = ledger::settled_at
        .eq(time)
        .and(ledger::sequence.gt(sequence));
    Box::new(ledger::settled_at.gt(time).or(at_that_time))
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
            .filter(is_meant(filter, walk.place.0, walk.end))
            .select((dsl::count(ledger::payload), count_star()));
        planned_anew(counts).get_result(conn)
    })?;
    Ok(Replayed {
        replayed: u64::try_from(with_payload).unwrap_or(0),
        without_payload: u64::try_from(all - with_payload).unwrap_or(0),
        skipped: 0,
    })
}

/// Replays the next ones, a thousand at most, in one statement.
pub(crate) fn step(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &ReplayFilter,
    ids: ReplayIds,
    walk: &mut Walk,
) -> QueryResult<Step> {
    let rows = loop {
        if walk.place.0 >= walk.end {
            return Ok(None);
        }
        let rows = next(conn, name, filter, walk)?;
        if !rows.is_empty() {
            break rows;
        }
    };
    let with_payload: Vec<&FoundRow> = rows.iter().filter(|row| row.has_payload).collect();
    let inserted = insert(conn, name, ids, &walk.run, &with_payload)?;
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
    let to = walk.place.0.saturating_add(walk.window);
    let to = if walk.window == i64::MAX {
        walk.end
    } else {
        to.min(walk.end)
    };
    let rows: Vec<FoundRow> = looking(conn, None, |conn| {
        let rows = ledger::table(name.ledger())
            .filter(is_meant(filter, walk.place.0, to))
            .filter(was_settled_after(walk.place))
            .order((ledger::settled_at, ledger::sequence))
            .limit(BATCH)
            .select((
                ledger::idempotency_key,
                ledger::destination,
                ledger::payload.is_not_null(),
                ledger::settled_at,
                ledger::sequence,
            ));
        planned_anew(rows).load(conn)
    })?;
    let number = i64::try_from(rows.len()).unwrap_or(BATCH);
    walk.place = match rows.last() {
        Some(last) if number >= BATCH => (to_micros(last.settled_at), last.sequence),
        _ => (to, i64::MIN),
    };
    if number >= BATCH {
        walk.window = (walk.window / 2).max(1_000);
    } else if number < BATCH / 2 {
        walk.window = walk.window.saturating_mul(4);
    }
    Ok(rows)
}

/// New messages of these rows, in their order. What this run has inserted before stays alone.
///
/// Text: Diesel has no `unnest`, and selects from no row of a parameter.
fn insert(
    conn: &mut PgConnection,
    name: &OutboxName,
    ids: ReplayIds,
    run: &str,
    rows: &[&FoundRow],
) -> QueryResult<usize> {
    let keys: Vec<&str> = rows
        .iter()
        .map(|row| row.idempotency_key.as_str())
        .collect();
    let destinations: Vec<&str> = rows.iter().map(|row| row.destination.as_str()).collect();
    let new_ids: Vec<Option<Uuid>> = match ids {
        ReplayIds::Same => rows.iter().map(|_| None).collect(),
        ReplayIds::New => rows.iter().map(|_| Some(Uuid::now_v7())).collect(),
    };
    sql_query(format!(
        "INSERT INTO {outbox} (message_id, topic, destination, payload, ordering_key,
            idempotency_key, digest, tenant_id, occurred_at)
         SELECT coalesce(r.new_id, l.message_id), l.topic, l.destination, l.payload, l.ordering_key,
                {key}, l.digest, l.tenant_id, l.occurred_at
           FROM unnest($1::text[], $2::text[], $3::uuid[]) WITH ORDINALITY
                AS r(idempotency_key, destination, new_id, n)
           JOIN {ledger} l ON l.idempotency_key = r.idempotency_key AND l.destination = r.destination
          WHERE l.status = 'delivered' AND l.payload IS NOT NULL
            AND NOT EXISTS (SELECT FROM {ledger} e
                             WHERE e.idempotency_key = {key} AND e.destination = l.destination)
          ORDER BY r.n
         ON CONFLICT (idempotency_key, destination) DO NOTHING",
        outbox = name.outbox(),
        ledger = name.ledger(),
        key = replayed_key("l.idempotency_key", "$4"),
    ))
    .bind::<Array<Text>, _>(keys)
    .bind::<Array<Text>, _>(destinations)
    .bind::<Array<Nullable<SqlUuid>>, _>(new_ids)
    .bind::<Text, _>(run)
    .execute(conn)
}
