//! Server processes that hang: they never answer. New ones do.

use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::ground::alone;
use crate::page::Page;
use crate::support::{Database, Receiver, eventually};

/// The server's processes that serve relays, stopped until this value is dropped.
struct Stopped(Vec<String>);

impl Stopped {
    /// Waits for the heartbeat, which has the shortest limit, to have asked for its lease. A stop while it connects would
    /// count against the limit of a connect, which is much longer.
    fn of(database: &Database) -> Self {
        let beats = "SELECT count(*) FROM pg_stat_activity
                      WHERE application_name = 'diesel-outbox heartbeat'
                        AND state = 'idle' AND query LIKE '%outbox_lease%'";
        eventually("the heartbeat beats", || database.number(beats) == 1);
        let processes = database
            .text(
                "SELECT string_agg(pid::text, ' ') FROM pg_stat_activity
                  WHERE application_name LIKE 'diesel-outbox%'",
            )
            .expect("a relay is connected");
        let stopped = Self(processes.split(' ').map(str::to_owned).collect());
        stopped.signal("-STOP");
        stopped
    }

    fn signal(&self, signal: &str) {
        let mut kill = Command::new("kill");
        let status = kill.arg(signal).args(&self.0).status().expect("kill runs");
        assert!(status.success(), "kill {signal} {:?}", self.0);
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // If a process has ended meanwhile, the others still continue.
        let _ = Command::new("kill").arg("-CONT").args(&self.0).status();
    }
}

#[test]
fn a_relay_whose_server_processes_hang_takes_others_and_continues() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database.relay().poll_interval(Duration::from_secs(1));
    let relay = relay.url(&receiver.url()).start().expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually("the relay delivers", || {
        relay.stats().delivered == 1 && relay.is_healthy()
    });
    let connected = "SELECT count(*) FROM pg_stat_activity
                      WHERE application_name LIKE 'diesel-outbox%'";
    eventually("all threads are connected", || {
        database.number(connected) == 5
    });

    let stopped = Stopped::of(&database);
    eventually("the relay notices", || !relay.is_healthy());
    database.enqueue("order.paid", json!(2));
    receiver.wait_for(2);
    eventually("the relay delivers", || relay.stats().delivered == 2);
    eventually("the relay is healthy again", || relay.is_healthy());
    // What was sent to the processes takes effect now, too late for the relay.
    drop(stopped);
    database.enqueue("order.paid", json!(3));
    eventually("the relay delivers", || relay.stats().delivered == 3);
    relay
        .shutdown(Duration::from_secs(10))
        .expect("a clean shutdown");
    assert_eq!(receiver.count(), 3);
}

/// How a probe, Prometheus and a browser see server processes that hang.
#[test]
fn page_and_probes_work_while_server_processes_hang() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut command = database.binary(&["run"]);
    command.env("OUTBOX_URL", receiver.url());
    let page = Page::start(command);
    eventually("the relay is ready", || page.get("/readyz").status == 200);
    assert_eq!(page.get("/").status, 200);
    let _stopped = Stopped::of(&database);
    eventually("a probe sees that the relay cannot work", || {
        page.get("/readyz").status == 503
    });
    // The page takes another connection.
    assert_eq!(page.get("/messages").status, 200);
    eventually("the relay is ready again", || {
        page.get("/readyz").status == 200
    });
    // A restart would not help.
    let alive = page.get("/livez");
    assert_eq!(alive.status, 200, "{alive:?}");
    let metrics = page.get("/metrics").body;
    assert!(
        metrics.contains("problem=\"database_stuck\"} 0"),
        "{metrics}"
    );
    database.enqueue("order.paid", json!(1));
    receiver.wait_for(1);
}
