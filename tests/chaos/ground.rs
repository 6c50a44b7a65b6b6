//! Shared by the tests of this binary: one test at a time, many messages at once, the control of the server, and the
//! checks that must hold at the end.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::support::{Database, Receiver, Running};

/// A lock that each test holds while it runs.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // A failed test leaves nothing that affects the next test.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Enqueues messages with the keys `key-<from>` to `key-<to>` in one statement.
pub(crate) fn enqueue(database: &Database, from: usize, to: usize) {
    let enqueued = database.execute(&format!(
        "INSERT INTO {{o}} (topic, payload, idempotency_key)
         SELECT 'order.paid', json_build_object('n', n), 'key-' || n
           FROM generate_series({from}, {to}) AS n ORDER BY n"
    ));
    assert_eq!(enqueued, to + 1 - from);
}

/// `run` with these settings, and with retries soon enough for a test to wait for them.
pub(crate) fn relay(
    database: &Database,
    receiver: &Receiver,
    settings: &[(&str, &str)],
) -> Command {
    let mut command = database.binary(&["run"]);
    command
        .env("OUTBOX_URL", receiver.url())
        .envs(settings.iter().copied());
    command
}

/// The ids of the leases that this process holds now.
pub(crate) fn leases_of(database: &Database, process: u32) -> String {
    let leases = database
        .text(&format!(
            "SELECT string_agg(id::text, ',') FROM {{o}}_lease WHERE relay LIKE '%:{process}'"
        ))
        .unwrap_or_default();
    format!("'{{{leases}}}'::bigint[]")
}

/// The number of log lines that contain this text.
pub(crate) fn lines_with(relay: &Running, text: &str) -> usize {
    relay
        .log()
        .lines()
        .filter(|line| line.contains(text))
        .count()
}

/// Fails unless the outbox is empty and the ledger has exactly the keys `key-1` to `key-<count>`, each delivered.
#[track_caller]
pub(crate) fn all_are_delivered(database: &Database, count: usize) {
    let count = i64::try_from(count).expect("a small number");
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    assert_eq!(database.number("SELECT count(*) FROM {o}_dead"), 0);
    assert_eq!(database.number("SELECT count(*) FROM {o}_ledger"), count);
    let with_keys = format!(
        "SELECT count(*) FROM generate_series(1, {count}) AS n
           JOIN {{o}}_ledger ON idempotency_key = 'key-' || n WHERE status = 'delivered'"
    );
    assert_eq!(database.number(&with_keys), count);
}

/// The attempts in the ledger, by message id.
pub(crate) fn attempts(database: &Database) -> HashMap<String, usize> {
    let rows = database
        .text("SELECT string_agg(message_id || ' ' || attempts, E'\\n') FROM {o}_ledger")
        .unwrap_or_default();
    rows.lines()
        .map(|row| {
            let (id, attempts) = row.split_once(' ').expect("two words");
            (id.to_owned(), attempts.parse().expect("a number"))
        })
        .collect()
}

/// Fails unless exactly the messages of the ledger have arrived.
#[track_caller]
pub(crate) fn all_have_arrived(database: &Database, receivers: &[&Receiver]) {
    let arrived: HashSet<String> = receivers
        .iter()
        .flat_map(|receiver| receiver.ids())
        .collect();
    let settled: HashSet<String> = attempts(database).into_keys().collect();
    let lost: Vec<_> = settled.difference(&arrived).take(3).collect();
    assert!(lost.is_empty(), "never arrived: {lost:?} and maybe more");
    assert_eq!(
        arrived.len(),
        settled.len(),
        "more messages arrived than were settled"
    );
}

/// The number of requests beyond the first request of each message.
pub(crate) fn duplicates(receivers: &[&Receiver]) -> usize {
    let mut ids = HashSet::new();
    let mut requests = 0;
    for receiver in receivers {
        requests += receiver.count();
        ids.extend(receiver.ids());
    }
    requests - ids.len()
}

/// The server that `scripts/with-postgres` has started. The server runs again when this value is dropped.
pub(crate) struct Server {
    pg_ctl: PathBuf,
    data: PathBuf,
}

impl Server {
    pub(crate) fn new() -> Self {
        let folder = |variable| {
            PathBuf::from(std::env::var_os(variable).unwrap_or_else(|| {
                panic!("{variable} is not set: this test restarts the server; run it with scripts/with-postgres")
            }))
        };
        Self {
            pg_ctl: folder("PG_BINDIR").join("pg_ctl"),
            data: folder("PGDATA"),
        }
    }

    /// One whose data are here.
    pub(crate) fn at(data: &Path) -> Self {
        let mut server = Self::new();
        data.clone_into(&mut server.data);
        server
    }

    pub(crate) fn data(&self) -> &Path {
        &self.data
    }

    /// Runs `pg_ctl` without its output: a started server would keep the pipe open.
    fn pg_ctl(&self, arguments: &[&str]) -> bool {
        Command::new(&self.pg_ctl)
            .arg("-D")
            .arg(&self.data)
            .args(["-w", "-t", "60"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .expect("pg_ctl runs")
            .success()
    }

    pub(crate) fn restart(&self, mode: &str) {
        assert!(self.pg_ctl(&["restart", "-m", mode]), "restart -m {mode}");
    }

    pub(crate) fn stop(&self, mode: &str) {
        assert!(self.pg_ctl(&["stop", "-m", mode]), "stop -m {mode}");
    }

    /// Stops it, if it runs, for ever.
    pub(crate) fn give_up(&self) {
        self.pg_ctl(&["stop", "-m", "immediate"]);
        let _ = std::fs::remove_dir_all(&self.data);
    }

    pub(crate) fn start(&self) {
        assert!(self.pg_ctl(&["start"]), "start");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.pg_ctl(&["status"]) {
            // If the start fails, the next test reports the failure.
            self.pg_ctl(&["start"]);
        }
    }
}

/// Sleeps while nothing may happen. Tests sleep only where time itself is tested, such as a lease that expires.
pub(crate) fn let_pass(time: Duration) {
    std::thread::sleep(time);
}
