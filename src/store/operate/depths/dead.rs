//! How many dead letters there are.
//!
//! Text: one count for what Diesel has no words for, a sample (TABLESAMPLE) and a subquery in FROM.

use std::collections::BTreeMap;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};

use super::{COUNTED_PAGES, DeadDepth, Lane, sample};
use crate::name::OutboxName;
use crate::store::catalogue;

/// Of a large table, so many of the latest messages are looked at one by one: what has begun to die is
/// there, when a sample does not show it yet.
const LATEST: i64 = 1_000;

#[derive(diesel::QueryableByName)]
struct LaneCount {
    #[diesel(sql_type = Text)]
    topic: String,
    #[diesel(sql_type = Text)]
    destination: String,
    #[diesel(sql_type = BigInt)]
    count: i64,
}

pub(super) fn depths(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<DeadDepth>> {
    let pages = catalogue::pages(conn, &name.dead())?;
    if pages <= COUNTED_PAGES {
        return counted(conn, name);
    }
    let (sample, factor) = sample::of(pages);
    let sampled = count(conn, &format!("{} {sample}", name.dead()))?;
    let latest = count(
        conn,
        &format!(
            "(SELECT topic, destination FROM {} ORDER BY sequence DESC LIMIT {LATEST}) d",
            name.dead()
        ),
    )?;
    let mut lanes: BTreeMap<Lane, i64> = BTreeMap::new();
    for row in sampled {
        let estimate = sample::times(row.count, factor);
        lanes.insert((row.topic, row.destination), estimate);
    }
    for row in latest {
        let count = lanes.entry((row.topic, row.destination)).or_default();
        *count = row.count.max(*count);
    }
    Ok(lanes
        .into_iter()
        .map(|((topic, destination), count)| DeadDepth {
            topic,
            destination,
            count,
            is_estimate: true,
        })
        .collect())
}

pub(super) fn counted(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<DeadDepth>> {
    let rows = count(conn, &name.dead())?;
    Ok(rows
        .into_iter()
        .map(|row| DeadDepth {
            topic: row.topic,
            destination: row.destination,
            count: row.count,
            is_estimate: false,
        })
        .collect())
}

fn count(conn: &mut PgConnection, from: &str) -> QueryResult<Vec<LaneCount>> {
    sql_query(format!(
        "SELECT topic, destination, count(*) AS count FROM {from}
          GROUP BY 1, 2 ORDER BY topic COLLATE \"C\", destination COLLATE \"C\""
    ))
    .load(conn)
}
