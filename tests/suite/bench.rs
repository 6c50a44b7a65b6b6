//! `diesel-outbox bench`: every scenario measures something, and nothing of it stays behind.

use serde_json::Value;

use crate::fresh::FreshDatabase;
use crate::support::{Finished, Running, binary, eventually, finish};

/// Runs the bench in an empty database: what is left in it, the bench has left.
struct Bench {
    database: FreshDatabase,
}

impl Bench {
    fn new() -> Self {
        Self {
            database: FreshDatabase::new(),
        }
    }

    /// The report of a bench that worked, with the keys that all of them have.
    fn report(&self, arguments: &[&str]) -> Value {
        let report = self.finish(arguments).code(0).json();
        assert_eq!(report["payload_bytes"], 250, "{report}");
        assert_eq!(report["senders"], 4, "{report}");
        assert_eq!(report["batch"], 500, "{report}");
        assert_eq!(report["mode"], "binary", "{report}");
        report
    }

    fn finish(&self, arguments: &[&str]) -> Finished {
        let finished = finish(self.command(&[arguments, &["--json"]].concat()));
        assert_eq!(self.schemas(), 0, "a schema is left of {arguments:?}");
        finished
    }

    fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = binary(&[["bench"].as_slice(), arguments, &["--senders", "4"]].concat());
        command
            .env("DATABASE_URL", &self.database.url)
            .env("OUTBOX_POLL_INTERVAL", "50ms");
        command
    }

    fn schemas(&self) -> i64 {
        self.database
            .number("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'diesel_outbox_bench%'")
    }
}

/// Each of these is a number above zero.
#[track_caller]
fn assert_measured(report: &Value, keys: &[&str]) {
    for key in keys {
        let number = report[key].as_f64();
        assert!(number.is_some_and(|n| n > 0.0), "{key}: {report:#}");
    }
}

/// The runs of a report, each told by the value that it has under `key`.
#[track_caller]
fn runs<'a>(report: &'a Value, key: &str, expected: &[Value]) -> &'a [Value] {
    let runs = report["runs"].as_array().expect("runs");
    let found: Vec<&Value> = runs.iter().map(|run| &run[key]).collect();
    assert_eq!(found, expected.iter().collect::<Vec<_>>(), "{report:#}");
    runs
}

const OF_A_DRAIN: [&str; 11] = [
    "messages",
    "enqueued_per_second",
    "seconds",
    "messages_per_second",
    "own_cpu_us_per_message",
    "wal_bytes_per_message",
    "messages_per_claim",
    "messages_per_settle",
    "claim_ms",
    "claim_p99_ms",
    "peak_memory_mib",
];

#[test]
fn without_a_scenario_it_drains_and_paces() {
    let report = Bench::new().report(&[
        "--messages=500",
        "--rate=50",
        "--paced-seconds=1",
        "--behind-dead=100",
    ]);
    assert_eq!(report["scenario"], "all");
    assert_measured(&report, &OF_A_DRAIN);
    assert_eq!(report["messages"], 500);
    let share = report["hot_update_share"].as_f64().expect("a share");
    assert!((0.0..=1.0).contains(&share), "{report}");
    assert_eq!(report["beside_dead"]["waiting"], 100);
    assert_measured(
        &report["beside_dead"],
        &["messages_per_second", "share_of_rate_alone", "claim_ms"],
    );
    assert_eq!(report["paced"]["messages"], 50);
    assert_measured(&report["paced"], &["p50_ms", "p90_ms", "p99_ms", "max_ms"]);
}

#[test]
fn without_a_rate_nothing_is_paced() {
    let report = Bench::new().report(&["--messages=20", "--rate=0"]);
    assert!(report["paced"].is_null(), "{report}");
}

#[test]
fn drain_measures_a_drain() {
    let report = Bench::new().report(&["drain", "--messages=500"]);
    assert_eq!(report["scenario"], "drain");
    assert_measured(&report, &OF_A_DRAIN);
    assert!(report["paced"].is_null() && report["beside_dead"].is_null());
}

#[test]
fn latency_measures_from_commit_to_answer() {
    let report = Bench::new().report(&["latency", "--rate=100", "--paced-seconds=1"]);
    assert_eq!(report["scenario"], "latency");
    assert_eq!(report["messages"], 100);
    assert_eq!(report["per_second"], 100);
    assert_measured(&report, &["p50_ms", "p90_ms", "p99_ms", "max_ms"]);
    assert!(report["p50_ms"].as_f64() <= report["max_ms"].as_f64());
}

#[test]
fn backlog_compares_with_the_smallest() {
    let report = Bench::new().report(&["backlog", "--messages=300", "--waiting=1_000,50"]);
    let runs = runs(&report, "waiting", &[1000.into(), 50.into()]);
    for run in runs {
        assert_measured(
            run,
            &[
                "messages_per_second",
                "rate_ratio_to_smallest",
                "claim_ms",
                "claim_ratio_to_smallest",
                "claim_p99_ms",
                "own_cpu_us_per_message",
            ],
        );
    }
    assert_eq!(runs[1]["rate_ratio_to_smallest"], 1.0);
    assert_ne!(runs[0]["rate_ratio_to_smallest"], 1.0);
}

#[test]
fn failing_messages_fail_and_the_others_arrive() {
    let report = Bench::new().report(&["failing", "--messages=700", "--rounds=1"]);
    let runs = runs(&report, "what", &["alone".into(), "beside_failing".into()]);
    for run in runs {
        assert_measured(run, &["messages_per_second", "ratio"]);
    }
    assert_eq!(report["failing_percent"], 30);
    assert_eq!(runs[0]["failed_attempts"], 0);
    assert_measured(&runs[1], &["failed_attempts"]);
}

#[test]
fn a_table_is_for_people() {
    let bench = Bench::new();
    let shown = finish(bench.command(&["latency", "--rate=20", "--paced-seconds=1"]))
        .code(0)
        .stdout;
    assert!(shown.contains("commit to answer"), "{shown}");
    assert!(shown.contains("4 senders"), "{shown}");
}

#[test]
fn an_interrupted_bench_leaves_nothing_behind() {
    let bench = Bench::new();
    let mut running = Running::start(bench.command(&["latency", "--paced-seconds=600"]));
    eventually("the bench makes its schema", || bench.schemas() == 1);
    running.signal("INT");
    assert_eq!(running.wait().code(), Some(1));
    assert_eq!(bench.schemas(), 0);
    assert!(running.log().contains("interrupted"), "{}", running.log());
}

#[test]
fn options_of_another_scenario_are_refused() {
    let bench = Bench::new();
    for arguments in [
        ["latency", "--messages=5"].as_slice(),
        &["backlog", "--rate=5"],
        &["backlog", "--waiting=many"],
        &["drain", "--messages=0"],
        &["--messages=5", "drain"],
        &["fly"],
    ] {
        let refused = bench.finish(arguments).code(2);
        assert!(!refused.stderr.is_empty());
    }
}
