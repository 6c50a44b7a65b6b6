//! Samples: some pages of a table instead of all pages.
//!
//! Text: TABLESAMPLE.

use diesel::result::QueryResult;
use diesel::{PgConnection, RunQueryDsl};

use super::{COUNTS, LaneColumns, LaneRow};
use crate::name::OutboxName;
use crate::store::statement::unprepared_statement;

/// About how many pages a sample reads.
const PAGES: f64 = 1_000.0;

/// `TABLESAMPLE` of a table with this many pages, and how many rows each sampled row represents. The sample has the
/// same pages as long as the table has this size: a graph shows changes of the table, not of the sample.
pub(in crate::store) fn of(pages: i64) -> (String, f64) {
    #[allow(clippy::cast_precision_loss, reason = "a share")]
    let share = (PAGES / pages.max(1) as f64).min(1.0);
    let sample = format!("TABLESAMPLE SYSTEM ({}) REPEATABLE (1)", share * 100.0);
    (sample, 1.0 / share)
}

/// The number of rows in a table, from the number in a sample. `factor`: how many rows each sampled row represents.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "an estimate"
)]
pub(in crate::store) fn times(count: i64, factor: f64) -> i64 {
    (count as f64 * factor).round() as i64
}

/// The lanes in the sampled pages, and how many messages each sampled message represents.
pub(super) fn lanes(
    conn: &mut PgConnection,
    name: &OutboxName,
    pages: i64,
) -> QueryResult<(Vec<LaneRow>, f64)> {
    let (sample, factor) = of(pages);
    let rows = unprepared_statement(format!(
        "SELECT topic, destination, {COUNTS}, true AS is_cut, 0::bigint AS later FROM {} {sample}
          GROUP BY 1, 2",
        name.outbox()
    ))
    .giving::<LaneColumns>()
    .load(conn)?;
    Ok((rows, factor))
}
