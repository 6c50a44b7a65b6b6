//! Some pages of a table instead of all.
//!
//! Text: TABLESAMPLE.

use diesel::result::QueryResult;
use diesel::{PgConnection, RunQueryDsl};

use super::{COUNTS, LaneColumns, LaneRow};
use crate::name::OutboxName;
use crate::store::statement::statement_anew;

/// Pages that a sample reads, about.
const PAGES: f64 = 1_000.0;

/// `TABLESAMPLE` of a table with so many pages, and how many rows each row of it stands for. Always the
/// same pages while the table has this size: a graph shows how the table changes and not how samples do.
pub(in crate::store) fn of(pages: i64) -> (String, f64) {
    #[allow(clippy::cast_precision_loss, reason = "a share")]
    let share = (PAGES / pages.max(1) as f64).min(1.0);
    let sample = format!("TABLESAMPLE SYSTEM ({}) REPEATABLE (1)", share * 100.0);
    (sample, 1.0 / share)
}

/// How many rows a table has of which a sample has so many. `factor`: what each row of the sample stands for.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "an estimate"
)]
pub(in crate::store) fn times(count: i64, factor: f64) -> i64 {
    (count as f64 * factor).round() as i64
}

/// The lanes of some pages, and how many messages each one of them stands for.
pub(super) fn lanes(
    conn: &mut PgConnection,
    name: &OutboxName,
    pages: i64,
) -> QueryResult<(Vec<LaneRow>, f64)> {
    let (sample, factor) = of(pages);
    let rows = statement_anew(format!(
        "SELECT topic, destination, {COUNTS}, true AS is_cut, 0::bigint AS later FROM {} {sample}
          GROUP BY 1, 2",
        name.outbox()
    ))
    .giving::<LaneColumns>()
    .load(conn)?;
    Ok((rows, factor))
}
