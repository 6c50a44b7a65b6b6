//! The number of dead letters.
//!
//! Text: one count for sources that Diesel cannot express: a sample (TABLESAMPLE), and a subquery in FROM.

use std::collections::BTreeMap;

use diesel::result::QueryResult;
use diesel::{PgConnection, RunQueryDsl};

use super::{Care, DeadDepth, Lane, sample};
use crate::name::OutboxName;
use crate::store::statement::unprepared_statement;

/// Of a large table, this many of the latest dead letters are counted exactly: a new failure shows there before a
/// sample shows it.
const LATEST: i64 = 1_000;

pub(super) fn depths(
    conn: &mut PgConnection,
    name: &OutboxName,
    care: Care,
) -> QueryResult<Vec<DeadDepth>> {
    let (from, factor) = sample::source(conn, &name.dead(), care)?;
    let counted = count(conn, &from)?;
    let Some(factor) = factor else {
        return Ok(counted);
    };
    let latest = count(
        conn,
        &format!(
            "(SELECT topic, destination FROM {} ORDER BY sequence DESC LIMIT {LATEST}) d",
            name.dead()
        ),
    )?;
    let mut lanes: BTreeMap<Lane, i64> = BTreeMap::new();
    for row in counted {
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

fn count(conn: &mut PgConnection, from: &str) -> QueryResult<Vec<DeadDepth>> {
    unprepared_statement(format!(
        "SELECT topic, destination, count(*) AS count, false AS is_estimate FROM {from}
          GROUP BY 1, 2 ORDER BY topic COLLATE \"C\", destination COLLATE \"C\""
    ))
    .load(conn)
}
