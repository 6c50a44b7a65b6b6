//! The throughput of an outbox, from PostgreSQL's own statistics.

use diesel::result::QueryResult;
use diesel::{
    ExpressionMethods, NullableExpressionMethods, PgConnection, QueryDsl, RunQueryDsl, select,
};

use crate::name::OutboxName;
use crate::setup::sql::catalogue::{
    pg_inherits, pg_stat_get_tuples_deleted, pg_stat_get_tuples_inserted,
};
use crate::sql::functions::{clock_timestamp, date_part, to_regclass};

/// Rows that all relays and applications have written since PostgreSQL's statistics began. The numbers are
/// about a second old, and include rows that were rolled back. Before PostgreSQL 15, they lack the last rows of sessions
/// that have become idle. No table is read.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Activity {
    /// Messages that came in, counted once for each destination: enqueued, requeued, replayed. A message that is fanned
    /// out counts as its parts, so that the number compares with `settled`.
    pub enqueued: i64,
    /// Messages settled: delivered or dead.
    pub settled: i64,
    /// Messages dead-lettered.
    pub dead_lettered: i64,
    /// When this was read, by the database's clock, in seconds since 1970.
    pub read_at: f64,
}

/// Messages per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct Rates {
    /// Messages that came in.
    pub enqueued: f64,
    /// Messages settled: delivered or dead.
    pub settled: f64,
    /// Messages dead-lettered.
    pub dead_lettered: f64,
}

impl Activity {
    /// The rates since `earlier`. `None`: no time has passed, or the counters were reset.
    pub fn since(&self, earlier: &Self) -> Option<Rates> {
        let seconds = self.read_at - earlier.read_at;
        let has_restarted = self.enqueued < earlier.enqueued
            || self.settled < earlier.settled
            || self.dead_lettered < earlier.dead_lettered;
        if seconds <= 0.0 || has_restarted {
            return None;
        }
        #[allow(clippy::cast_precision_loss, reason = "a rate")]
        let rate = |now: i64, then: i64| (now - then) as f64 / seconds;
        Some(Rates {
            enqueued: rate(self.enqueued, earlier.enqueued),
            settled: rate(self.settled, earlier.settled),
            dead_lettered: rate(self.dead_lettered, earlier.dead_lettered),
        })
    }
}

pub(crate) fn activity(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Activity> {
    let into = |table: String| pg_stat_get_tuples_inserted(to_regclass(table));
    let (enqueued, removed, dead_lettered, read_at): (Option<i64>, Option<i64>, Option<i64>, f64) =
        select((
            into(name.outbox()),
            pg_stat_get_tuples_deleted(to_regclass(name.outbox())),
            into(name.dead()),
            date_part("epoch", clock_timestamp()),
        ))
        .get_result(conn)?;
    let settled: Vec<Option<i64>> = pg_inherits::table
        .filter(
            pg_inherits::inhparent
                .nullable()
                .eq(to_regclass(name.ledger())),
        )
        .select(pg_stat_get_tuples_inserted(
            pg_inherits::inhrelid.nullable(),
        ))
        .load(conn)?;
    let settled: i64 = settled.into_iter().flatten().sum();
    // A fan-out replaces a row by its parts, and writes nothing into the ledger.
    let fanned_out = (removed.unwrap_or(0) - settled).max(0);
    Ok(Activity {
        enqueued: enqueued.unwrap_or(0) - fanned_out,
        settled,
        dead_lettered: dead_lettered.unwrap_or(0),
        read_at,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_per_second_and_absent_after_a_reset_of_the_counters() {
        let at = |read_at: f64, enqueued: i64| Activity {
            enqueued,
            settled: 10,
            dead_lettered: 0,
            read_at,
        };
        let rates = at(12.0, 50).since(&at(10.0, 10)).expect("time has passed");
        assert!((rates.enqueued - 20.0).abs() < 1e-9 && rates.settled.abs() < 1e-9);
        assert_eq!(at(12.0, 5).since(&at(10.0, 10)), None);
        assert_eq!(at(12.0, 5).since(&at(12.0, 5)), None);
    }
}
