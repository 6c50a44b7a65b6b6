//! Measurements by the database and the operating system.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use diesel::sql_types::{BigInt, Double, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::Stats;

/// The interval between two checks of [`until`].
const TICK: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(10);
/// Clock ticks per second in /proc: fixed by Linux's ABI.
const TICKS_PER_SECOND: f64 = 100.0;

/// The `number` of a query's only row.
pub(super) fn number(conn: &mut PgConnection, query: &str) -> Result<f64> {
    #[derive(diesel::QueryableByName)]
    struct Row {
        #[diesel(sql_type = Double)]
        number: f64,
    }
    Ok(sql_query(query).get_result::<Row>(conn)?.number)
}

pub(super) fn wal_position(conn: &mut PgConnection) -> Result<f64> {
    let position = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8 AS number";
    number(conn, position)
}

/// The WAL that the server has written since its start.
pub(super) struct Wal {
    pub(super) bytes: f64,
    /// Full-page images: pages written whole at their first change after a checkpoint. Needs PostgreSQL 15, because
    /// version 14 does not show when its count is complete.
    pub(super) full_page_images: Option<f64>,
}

impl Wal {
    /// The current totals, including relays that were shut down.
    pub(super) fn now(conn: &mut PgConnection) -> Result<Self> {
        let bytes = wal_position(conn)?;
        let counts_at_once =
            "SELECT count(to_regproc('pg_stat_force_next_flush'))::float8 AS number";
        if number(conn, counts_at_once)? < 1.0 {
            let full_page_images = None;
            return Ok(Self {
                bytes,
                full_page_images,
            });
        }
        // Other sessions report their counts when they end, and this session when it is told to.
        let others = "SELECT count(*)::float8 AS number
              FROM pg_stat_activity AS own JOIN pg_stat_activity AS relay USING (datname)
             WHERE own.pid = pg_backend_pid() AND relay.application_name LIKE 'diesel-outbox%'
               AND relay.backend_start > own.backend_start";
        until(|| Ok(number(conn, others)? < 1.0))?;
        sql_query("SELECT pg_stat_force_next_flush()").execute(conn)?;
        let images = "SELECT wal_fpi::float8 AS number FROM pg_stat_wal";
        Ok(Self {
            bytes,
            full_page_images: Some(number(conn, images)?),
        })
    }

    pub(super) fn since(&self, before: &Self) -> Self {
        let both = self.full_page_images.zip(before.full_page_images);
        Self {
            bytes: self.bytes - before.bytes,
            full_page_images: both.map(|(now, then)| now - then),
        }
    }
}

#[derive(diesel::QueryableByName)]
struct UpdatesRow {
    #[diesel(sql_type = BigInt)]
    updates: i64,
    #[diesel(sql_type = BigInt)]
    hot: i64,
}

/// The share of updates that touched no index (HOT). Backends report their counts with a delay.
pub(super) fn hot_share(conn: &mut PgConnection, schema: &str, stats: Stats) -> Result<f64> {
    let mut share = 0.0;
    until(|| {
        sql_query("SELECT pg_stat_clear_snapshot()").execute(conn)?;
        let row: UpdatesRow = sql_query(
            "SELECT n_tup_upd AS updates, n_tup_hot_upd AS hot FROM pg_stat_all_tables
              WHERE schemaname = $1 AND relname = 'outbox'",
        )
        .bind::<Text, _>(schema)
        .get_result(conn)?;
        share = row.hot as f64 / row.updates.max(1) as f64;
        Ok(u64::try_from(row.updates).unwrap_or(0) >= stats.claimed)
    })?;
    Ok(share)
}

/// Waits until the server is done after a run. After [`PATIENCE`], the state is measured as it is.
fn until(mut is_done: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !is_done()? && Instant::now() < end {
        std::thread::sleep(TICK);
    }
    Ok(())
}

/// The number of rows of a table.
pub(super) fn count(conn: &mut PgConnection, table: &str) -> Result<u64> {
    let count = format!("SELECT count(*)::float8 AS number FROM {table}");
    Ok(number(conn, &count)? as u64)
}

/// The name of this process in /proc.
const SELF: &str = "self";

/// User and system time of this process, in seconds.
pub(super) fn cpu_seconds() -> Result<f64> {
    cpu_seconds_of(SELF)
}

/// User and system time of a process, in seconds.
pub(super) fn cpu_seconds_of(process: &str) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))
        .context("cannot measure CPU time: there is no /proc")?;
    // The process name, in parentheses, may contain spaces. The 14th and 15th fields are the times.
    let after = stat
        .rsplit_once(')')
        .context("its stat has an unexpected format")?
        .1;
    let ticks: f64 = after
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<f64>().unwrap_or_default())
        .sum();
    Ok(ticks / TICKS_PER_SECOND)
}

pub(super) fn peak_memory_mib() -> Result<f64> {
    Ok(status(SELF, "VmHWM:")? / 1024.0)
}

/// The memory that a process uses now.
pub(super) fn memory_mib_of(process: &str) -> Result<f64> {
    Ok(status(process, "VmRSS:")? / 1024.0)
}

/// The number of threads of this process.
pub(super) fn threads() -> Result<f64> {
    threads_of(SELF)
}

pub(super) fn threads_of(process: &str) -> Result<f64> {
    status(process, "Threads:")
}

fn status(process: &str, line: &str) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))
        .context("cannot measure memory and threads: there is no /proc")?;
    let number = status
        .lines()
        .find_map(|one| one.strip_prefix(line))
        .and_then(|rest| rest.split_whitespace().next());
    Ok(number
        .with_context(|| format!("the status of the process has no {line}"))?
        .parse()?)
}
