//! A server that hangs: it accepts connections and never answers.

use std::process::Command;
use std::time::Duration;

use diesel_outbox::{ProblemKind, RelayHandle};
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

fn has(relay: &RelayHandle, kind: ProblemKind) -> bool {
    let health = relay.health();
    health.problems().iter().any(|problem| problem.kind == kind)
}

#[test]
fn a_relay_whose_server_hangs_is_not_live_and_continues_with_the_server() {
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
    eventually("the relay reports that the database hangs", || {
        has(&relay, ProblemKind::DatabaseStuck)
    });
    let health = relay.health();
    assert!(!health.is_live(), "{health}");
    assert!(
        health.to_string().contains("the heartbeat has waited"),
        "{health}"
    );
    for kind in [
        ProblemKind::NoDatabase,
        ProblemKind::SendersStuck,
        ProblemKind::Schema,
    ] {
        assert!(!has(&relay, kind), "{health}");
    }
    drop(stopped);
    eventually("the relay is healthy again", || relay.is_healthy());
    database.enqueue("order.paid", json!(2));
    eventually("the relay delivers", || relay.stats().delivered == 2);
    relay
        .shutdown(Duration::from_secs(10))
        .expect("a clean shutdown");
}

/// How a probe, Prometheus and a browser see a server that hangs.
#[test]
fn the_page_answers_while_the_server_hangs_and_says_so() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut command = database.binary(&["run"]);
    command.env("OUTBOX_URL", receiver.url());
    let page = Page::start(command);
    eventually("the relay is ready", || page.get("/readyz").status == 200);
    let gauge = |problem: &str, value: u8| {
        let line = format!("problem=\"{problem}\"}} {value}");
        page.get("/metrics").body.contains(&line)
    };
    eventually("nothing is stuck", || gauge("database_stuck", 0));
    assert_eq!(page.get("/").status, 200);
    let stopped = Stopped::of(&database);
    let alive = page.get("/livez");
    assert_eq!(
        alive.status, 200,
        "the relay has not waited for long yet: {alive:?}"
    );
    // Until then the page shows the state that it read a moment ago.
    eventually("the page answers and reports the database", || {
        page.get("/").body.contains("database")
    });
    eventually("a probe sees the problem", || {
        page.get("/livez").status == 503
    });
    let alive = page.get("/livez");
    assert!(
        alive
            .body
            .contains("database_stuck: the heartbeat has waited"),
        "{alive:?}"
    );
    eventually("Prometheus sees the problem", || gauge("database_stuck", 1));
    assert!(gauge("senders_stuck", 0) && gauge("no_database", 0) && gauge("listener_down", 0));
    drop(stopped);
    eventually("the relay is healthy again", || {
        page.get("/livez").status == 200 && page.get("/readyz").status == 200
    });
    eventually("the page shows the outbox again", || {
        page.get("/").status == 200
    });
    database.enqueue("order.paid", json!(1));
    receiver.wait_for(1);
}
