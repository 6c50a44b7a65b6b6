//! The number of dead letters.
//!
//! Text: one count for sources that Diesel cannot express: a sample (TABLESAMPLE), and a subquery in FROM.

use std::collections::BTreeMap;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Text};
use diesel::{PgConnection, RunQueryDsl};

use super::{DeadDepth, DepthLane, sample};
use crate::name::OutboxName;
use crate::sql::statement::unprepared_statement;

/// Of a large table, this many of the latest dead letters are counted exactly: a new failure shows there before a
/// sample shows it.
const LATEST: i64 = 1_000;

/// `from`: the table, or a sample of it, each of whose rows then represents `factor` rows.
pub(super) fn depths(
    conn: &mut PgConnection,
    name: &OutboxName,
    from: &str,
    factor: Option<f64>,
) -> QueryResult<Vec<DeadDepth>> {
    let counted = count(conn, from)?;
    let depth = |((topic, destination), count)| DeadDepth {
        topic,
        destination,
        count,
        is_estimate: factor.is_some(),
    };
    let Some(factor) = factor else {
        return Ok(counted.into_iter().map(depth).collect());
    };
    let latest = count(
        conn,
        &format!(
            "(SELECT topic, destination FROM {} ORDER BY sequence DESC LIMIT {LATEST}) d",
            name.dead()
        ),
    )?;
    let mut lanes: BTreeMap<DepthLane, i64> = BTreeMap::new();
    for (lane, count) in counted {
        lanes.insert(lane, sample::times(count, factor));
    }
    for (lane, exactly) in latest {
        let count = lanes.entry(lane).or_default();
        *count = exactly.max(*count);
    }
    Ok(lanes.into_iter().map(depth).collect())
}

fn count(conn: &mut PgConnection, from: &str) -> QueryResult<Vec<(DepthLane, i64)>> {
    let rows = unprepared_statement(format!(
        "SELECT topic, destination, count(*) FROM {from}
          GROUP BY 1, 2 ORDER BY topic COLLATE \"C\", destination COLLATE \"C\""
    ))
    .giving::<(Text, Text, BigInt)>()
    .load(conn)?;
    let of_lane = |(topic, destination, count)| ((topic, destination), count);
    Ok(rows.into_iter().map(of_lane).collect())
}
