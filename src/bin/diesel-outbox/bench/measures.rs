//! What the database and the system say of a run.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use diesel::sql_types::{BigInt, Double, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::Stats;

/// Between two looks.
const TICK: Duration = Duration::from_millis(100);
/// Clock ticks per second in /proc: fixed by Linux's ABI.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(diesel::QueryableByName)]
struct NumberRow {
    #[diesel(sql_type = Double)]
    number: f64,
}

pub(super) fn wal_position(conn: &mut PgConnection) -> Result<f64> {
    Ok(
        sql_query("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8 AS number")
            .get_result::<NumberRow>(conn)?
            .number,
    )
}

#[derive(diesel::QueryableByName)]
struct UpdatesRow {
    #[diesel(sql_type = BigInt)]
    updates: i64,
    #[diesel(sql_type = BigInt)]
    hot: i64,
}

/// The share of updates that touched no index. Backends report what they did with a delay.
pub(super) fn hot_share(conn: &mut PgConnection, schema: &str, stats: Stats) -> Result<f64> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        sql_query("SELECT pg_stat_clear_snapshot()").execute(conn)?;
        let row: UpdatesRow = sql_query(
            "SELECT n_tup_upd AS updates, n_tup_hot_upd AS hot FROM pg_stat_all_tables
              WHERE schemaname = $1 AND relname = 'outbox'",
        )
        .bind::<Text, _>(schema)
        .get_result(conn)?;
        let is_complete = u64::try_from(row.updates).unwrap_or(0) >= stats.claimed;
        if is_complete || Instant::now() >= until {
            return Ok(row.hot as f64 / row.updates.max(1) as f64);
        }
        std::thread::sleep(TICK);
    }
}

/// User and system time of this process.
pub(super) fn cpu_seconds() -> Result<f64> {
    let stat =
        std::fs::read_to_string("/proc/self/stat").context("no /proc: CPU cannot be measured")?;
    // The name, in brackets, may hold spaces; the 14th and 15th fields are the times.
    let after = stat.rsplit_once(')').context("/proc/self/stat is odd")?.1;
    let ticks: f64 = after
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<f64>().unwrap_or_default())
        .sum();
    Ok(ticks / TICKS_PER_SECOND)
}

pub(super) fn peak_memory_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")
        .context("no /proc: memory cannot be measured")?;
    let kib: f64 = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.split_whitespace().next())
        .context("/proc/self/status has no VmHWM")?
        .parse()?;
    Ok(kib / 1024.0)
}
