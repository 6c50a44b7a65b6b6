//! The first message of each key.
//!
//! Text: a loose index scan is recursive (WITH RECURSIVE), and has a subquery for each row (LATERAL).

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Nullable, Text, Timestamptz, Uuid};
use diesel::{PgConnection, RunQueryDsl};

use super::claim::as_bigint;
use super::page::{Free, PAGE, Page, Place};
use crate::engine::keys::sql::ordered::Key;
use crate::name::OutboxName;
use crate::sql::statement::statement;

#[derive(diesel::QueryableByName)]
struct HeadRow {
    #[diesel(sql_type = Text)]
    ordering_key: String,
    #[diesel(sql_type = Text)]
    destination: String,
    #[diesel(sql_type = Text)]
    topic: String,
    #[diesel(sql_type = BigInt)]
    sequence: i64,
    #[diesel(sql_type = Timestamptz)]
    available_at: PgTimestamp,
    #[diesel(sql_type = Nullable<Uuid>)]
    registration: Option<uuid::Uuid>,
    #[diesel(sql_type = Bool)]
    is_free: bool,
    #[diesel(sql_type = BigInt)]
    n: i64,
}

/// The first message of each of the next [`PAGE`] keys, starting at `from`, by a loose index scan: one probe for each
/// key, however many messages wait in the key.
pub(crate) fn walk(
    conn: &mut PgConnection,
    name: &OutboxName,
    expired: &[i64],
    from: &Key,
) -> QueryResult<Page> {
    let step = |from: &str| {
        format!(
            "SELECT o.ordering_key, o.destination, o.topic, o.sequence, o.available_at, o.registration, {IS_FREE} AS is_free
               FROM {outbox} o
              WHERE o.ordering_key IS NOT NULL AND (o.ordering_key, o.destination) {from}
              ORDER BY o.ordering_key, o.destination, {PLACE} LIMIT 1",
            outbox = name.outbox(),
        )
    };
    let rows: Vec<HeadRow> = statement(format!(
        "WITH RECURSIVE walk AS (
            (SELECT first.*, 1::bigint AS n FROM ({first}) first)
            UNION ALL
            (SELECT next.*, walk.n + 1 FROM walk CROSS JOIN LATERAL ({next}) next WHERE walk.n < $4)
         )
         SELECT * FROM walk WHERE is_free OR n = $4",
        first = step(">= ($2, $3)"),
        next = step("> (walk.ordering_key, walk.destination)"),
    ))
    .bind::<Array<BigInt>, _>(expired)
    .bind::<Text, _>(&from.ordering_key)
    .bind::<Text, _>(&from.destination)
    .bind::<BigInt, _>(as_bigint(PAGE))
    .load(conn)?;
    let last = rows.iter().find(|row| row.n >= as_bigint(PAGE));
    let next = last.map(HeadRow::key).map(Place::Key);
    Ok(page(rows, next))
}

/// The first message of each of these keys.
pub(crate) fn first_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    expired: &[i64],
    keys: &[Key],
) -> QueryResult<Page> {
    let (ordering_keys, destinations): (Vec<&str>, Vec<&str>) = keys
        .iter()
        .map(|key| (key.ordering_key.as_str(), key.destination.as_str()))
        .unzip();
    let rows: Vec<HeadRow> = statement(format!(
        "SELECT first.*, 0::bigint AS n
           FROM unnest($2::text[], $3::text[]) AS k(ordering_key, destination)
          CROSS JOIN LATERAL (
            SELECT o.ordering_key, o.destination, o.topic, o.sequence, o.available_at, o.registration, {IS_FREE} AS is_free
              FROM {outbox} o
             WHERE o.ordering_key = k.ordering_key AND o.destination = k.destination
             ORDER BY {PLACE} LIMIT 1
          ) first",
        outbox = name.outbox(),
    ))
    .bind::<Array<BigInt>, _>(expired)
    .bind::<Array<Text>, _>(ordering_keys)
    .bind::<Array<Text>, _>(destinations)
    .load(conn)?;
    Ok(page(rows, None))
}

/// A message's place in the order of its key.
const PLACE: &str = "coalesce(o.split_from, o.sequence)";

/// $1: expired leases.
const IS_FREE: &str =
    "(o.available_at <= now() AND (o.locked_by IS NULL OR o.locked_by = ANY($1)))";

impl HeadRow {
    fn key(&self) -> Key {
        Key {
            ordering_key: self.ordering_key.clone(),
            destination: self.destination.clone(),
        }
    }
}

fn page(rows: Vec<HeadRow>, next: Option<Place>) -> Page {
    let free = |row: HeadRow| Free {
        sequence: row.sequence,
        topic: row.topic,
        destination: row.destination,
        ordering_key: Some(row.ordering_key),
        available_at: row.available_at,
        registration: row.registration,
    };
    let found = rows.into_iter().filter(|row| row.is_free).map(free);
    Page {
        found: found.collect(),
        next,
        moment: None,
    }
}
