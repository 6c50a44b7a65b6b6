//! The number of dead letters.
//!
//! Text: one count for sources that Diesel cannot express: a sample (TABLESAMPLE), and a subquery in FROM.

use std::collections::BTreeMap;

use diesel::result::QueryResult;
use diesel::{PgConnection, RunQueryDsl};

use super::{COUNTED_PAGES, DeadDepth, Lane, sample};
use crate::name::OutboxName;
use crate::store::catalogue;
use crate::store::statement::unprepared_statement;

/// Of a large table, this many of the latest dead letters are counted exactly: a new failure shows there before a
/// sample shows it.
const LATEST: i64 = 1_000;

pub(super) fn depths(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<DeadDepth>> {
    let pages = catalogue::pages(conn, &name.dead())?;
    if pages <= COUNTED_PAGES {
        return count(conn, &name.dead());
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

pub(super) fn count(conn: &mut PgConnection, from: &str) -> QueryResult<Vec<DeadDepth>> {
    unprepared_statement(format!(
        "SELECT topic, destination, count(*) AS count, false AS is_estimate FROM {from}
          GROUP BY 1, 2 ORDER BY topic COLLATE \"C\", destination COLLATE \"C\""
    ))
    .load(conn)
}
