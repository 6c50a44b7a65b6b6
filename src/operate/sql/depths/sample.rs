//! Samples: some pages of a table instead of all pages.
//!
//! Text: TABLESAMPLE.

use super::{COUNTED_PAGES, Care};

/// About how many pages a sample reads.
const PAGES: f64 = 1_000.0;

/// `TABLESAMPLE` of a table with this many pages, and how many rows each sampled row represents. The sample has the
/// same pages as long as the table has this size: a graph shows changes of the table, not of the sample.
pub(crate) fn of(pages: i64) -> (String, f64) {
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
pub(crate) fn times(count: i64, factor: f64) -> i64 {
    (count as f64 * factor).round() as i64
}

/// What to read of this table of so many pages. If that is a sample: how many rows each sampled row represents.
pub(crate) fn source(table: &str, pages: i64, care: Care) -> (String, Option<f64>) {
    if care == Care::Exact || pages <= COUNTED_PAGES {
        return (table.to_owned(), None);
    }
    let (sample, factor) = of(pages);
    (format!("{table} {sample}"), Some(factor))
}
