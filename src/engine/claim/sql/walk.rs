//! The first message of each key.
//!
//! Text: a loose index scan is recursive (WITH RECURSIVE), and has a subquery for each row (LATERAL).

use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Text};
use diesel::{PgConnection, RunQueryDsl};

use super::claim::as_bigint;
use super::page::{ColumnsSql, Free, PAGE, Page, SearchPlace};
use crate::engine::keys::sql::ordered::Key;
use crate::name::OutboxName;
use crate::sql::statement::statement;

/// The first message of a key, whether it is free, and the number of its key.
type KeyHead = (Free, bool, i64);
type HeadSql = (ColumnsSql, Bool, BigInt);

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
            "SELECT {HEAD} FROM {outbox} o
              WHERE o.ordering_key IS NOT NULL AND (o.ordering_key, o.destination) {from}
              ORDER BY o.ordering_key, o.destination, {PLACE} LIMIT 1",
            outbox = name.outbox(),
        )
    };
    let heads: Vec<KeyHead> = statement(format!(
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
    .giving::<HeadSql>()
    .load(conn)?;
    let last = heads.iter().find(|(.., n)| *n >= as_bigint(PAGE));
    let next = last.and_then(|(last, ..)| last.key()).map(SearchPlace::Key);
    Ok(page(heads, next))
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
    let heads = statement(format!(
        "SELECT first.*, 0::bigint AS n
           FROM unnest($2::text[], $3::text[]) AS k(ordering_key, destination)
          CROSS JOIN LATERAL (
            SELECT {HEAD} FROM {outbox} o
             WHERE o.ordering_key = k.ordering_key AND o.destination = k.destination
             ORDER BY {PLACE} LIMIT 1
          ) first",
        outbox = name.outbox(),
    ))
    .bind::<Array<BigInt>, _>(expired)
    .bind::<Array<Text>, _>(ordering_keys)
    .bind::<Array<Text>, _>(destinations)
    .giving::<HeadSql>()
    .load(conn)?;
    Ok(page(heads, None))
}

/// A message's place in the order of its key.
const PLACE: &str = "coalesce(o.split_from, o.sequence)";

/// The columns of a [`Free`], and whether it is free. $1: expired leases.
const HEAD: &str =
    "o.sequence, o.topic, o.destination, o.ordering_key, o.available_at, o.registration,
    (o.available_at <= now() AND (o.locked_by IS NULL OR o.locked_by = ANY($1))) AS is_free";

fn page(heads: Vec<KeyHead>, next: Option<SearchPlace>) -> Page {
    let free = heads.into_iter().filter(|(_, is_free, _)| *is_free);
    Page {
        found: free.map(|(free, ..)| free).collect(),
        next,
        moment: None,
    }
}
