//! `diesel-outbox bench`: every scenario measures something, and leaves nothing behind.

use serde_json::Value;

use crate::fresh::FreshDatabase;
use crate::support::{Finished, Receiver, Running, binary, eventually, finish};

/// Runs the bench in an empty database, so that every leftover is the bench's.
struct Bench {
    database: FreshDatabase,
}

impl Bench {
    fn new() -> Self {
        Self {
            database: FreshDatabase::new(),
        }
    }

    /// The report of a successful bench, with the keys that all reports have.
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
        assert_eq!(self.schemas(), 0, "{arguments:?} left a schema behind");
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

/// Fails unless each of these keys has a number above zero.
#[track_caller]
fn assert_measured(report: &Value, keys: &[&str]) {
    for key in keys {
        let number = report[key].as_f64();
        assert!(number.is_some_and(|n| n > 0.0), "{key}: {report:#}");
    }
}

/// The runs of a report, identified by their values under `key`.
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
        "--messages=3000",
        "--rate=50",
        "--paced-seconds=1",
        "--behind-dead=100",
    ]);
    assert_eq!(report["scenario"], "all");
    assert_measured(&report, &OF_A_DRAIN);
    assert_eq!(report["messages"], 3000);
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
    let report = Bench::new().report(&["drain", "--messages=3000"]);
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
    let report = Bench::new().report(&[
        "backlog",
        "--messages=300",
        "--waiting=1_000,50",
        "--rounds=2",
    ]);
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
                "claim_max_ms",
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
fn a_held_snapshot_is_held_by_a_reader_and_by_a_writer() {
    let report = Bench::new().report(&["held-snapshot", "--settled=1000", "--messages=6000"]);
    let holders = ["nobody", "old_reader", "idle_writer"].map(Value::from);
    for run in runs(&report, "holder", &holders) {
        assert_measured(
            run,
            &[
                "messages_per_second",
                "ratio_without_holder",
                "messages_per_second_after_start",
                "ratio_without_holder_after_start",
                "claim_ms",
                "claim_p99_ms",
                "claim_max_ms",
            ],
        );
    }
    assert_eq!(report["runs"][0]["ratio_without_holder"], 1.0);
}

#[test]
fn a_steady_load_beside_an_open_transaction_is_delivered_minute_by_minute() {
    let report = Bench::new().report(&["pinned", "--minutes=2", "--seconds=3", "--rate=100"]);
    for run in runs(&report, "minute", &[1.into(), 2.into()]) {
        assert_measured(
            run,
            &[
                "committed_per_second",
                "messages_per_second",
                "own_cpu_us_per_message",
                "claim_ms",
                "table_mib",
            ],
        );
    }
    let dead = |minute: usize| report["runs"][minute]["dead_versions"].as_f64();
    assert!(dead(1) > dead(0), "vacuum removes them: {report:#}");
}

#[test]
fn an_aged_outbox_has_delivered_its_past_and_takes_turns_with_others() {
    for (arguments, keys, outboxes) in [
        ([].as_slice(), Value::Null, ["fresh", "aged"].as_slice()),
        (
            &["--keys=ordered", "--forget-after=1ms"],
            Value::from("ordered"),
            &["fresh", "aged", "forgetful"],
        ),
    ] {
        // Each relay checks the parts of the ring when it starts: one relay closes a part, the next relay empties it.
        let common = ["aged", "--past=1500", "--messages=700", "--rounds=4"];
        let report = Bench::new().report(&[common.as_slice(), arguments].concat());
        assert_eq!(report["keys"], keys);
        assert_eq!(report["past"], 1500);
        let outboxes: Vec<Value> = outboxes.iter().copied().map(Value::from).collect();
        let runs = runs(&report, "outbox", &outboxes);
        for run in runs {
            assert_measured(
                run,
                &[
                    "messages_per_second",
                    "rate_ratio",
                    "wal_bytes_per_message",
                    "wal_ratio",
                    "claim_ms",
                ],
            );
            // At least the row itself.
            assert!(run["wal_bytes_per_message"].as_f64() > Some(250.0), "{run}");
            // Null before PostgreSQL 15. After a checkpoint, each page of each index is written once as a whole.
            let images = run["full_page_images_per_message"].as_f64();
            assert!(images.is_none_or(|n| (0.0..20.0).contains(&n)), "{run}");
        }
        assert_eq!(runs[0]["rate_ratio"], 1.0);
        assert_eq!(runs[0]["wal_ratio"], 1.0);
        assert_ne!(runs[1]["rate_ratio"], 1.0);
        if let Some(forgetful) = runs.get(2) {
            assert_measured(forgetful, &["forgotten_share"]);
        }
    }
}

#[test]
fn a_retention_that_never_ends_measures_nothing() {
    let arguments = [
        "aged",
        "--past=5",
        "--messages=5",
        "--rounds=1",
        "--forget-after=1h",
    ];
    let finished = Bench::new().finish(&arguments).code(1);
    assert!(
        finished.stderr.contains("--forget-after"),
        "{}",
        finished.stderr
    );
}

#[test]
fn ordered_finds_the_order_of_each_key_kept() {
    let report = Bench::new().report(&[
        "ordered",
        "--messages=300",
        "--keys=10,50",
        "--zipf-keys=20",
        "--hot-messages=20",
        "--key-run=1,5",
    ]);
    let shapes = ["uniform", "uniform", "zipf", "hot"];
    let shapes = shapes.map(|shape| [shape, shape].map(Value::from)).concat();
    let runs = runs(&report, "shape", &shapes);
    for run in runs {
        assert_measured(
            run,
            &[
                "messages_per_second",
                "unordered_messages_per_second",
                "ratio_to_unordered",
                "claim_ms",
                "claim_p99_ms",
                "messages_per_claim",
                "continued_share",
            ],
        );
        assert_eq!(
            (&run["misorders"], &run["overlaps"]),
            (&0.into(), &0.into())
        );
    }
    let messages: Vec<&Value> = runs.iter().map(|run| &run["messages"]).collect();
    assert_eq!(messages, [300, 300, 500, 500, 300, 300, 20, 20]);
    let key_runs: Vec<&Value> = runs.iter().map(|run| &run["key_run"]).collect();
    assert_eq!(key_runs, [1, 5, 1, 5, 1, 5, 1, 5]);
    assert_eq!(report["misorders"], 0);
    assert_eq!(report["overlaps"], 0);
}

#[test]
fn relays_share_the_work() {
    let report = Bench::new().report(&["relays", "--messages=3000", "--processes=1,2"]);
    let runs = runs(&report, "processes", &[1.into(), 2.into()]);
    for run in runs {
        assert_measured(
            run,
            &[
                "messages_per_second",
                "ratio_to_fewest",
                "most_share",
                "messages_per_claim",
                "claim_ms",
            ],
        );
        let shares = run["shares"].as_array().expect("shares").iter();
        let sum: f64 = shares.filter_map(Value::as_f64).sum();
        assert!((sum - 1.0).abs() < 1e-9, "{run}");
        assert_eq!(run["conflicts"], 0);
    }
    assert_eq!(runs[1]["shares"].as_array().map(Vec::len), Some(2));
    assert_eq!(runs[0]["ratio_to_fewest"], 1.0);
}

#[test]
fn enqueue_compares_the_functions_for_it() {
    let report = Bench::new().report(&["enqueue", "--messages=2500", "--rounds=1"]);
    let by = ["enqueue", "enqueue_batch", "enqueue_bulk"].map(Value::from);
    for run in runs(&report, "by", &by) {
        assert_measured(run, &["messages_per_second"]);
        // At least the row itself.
        assert!(run["wal_bytes_per_message"].as_f64() > Some(250.0), "{run}");
    }
}

#[test]
fn producers_commit_in_every_situation() {
    let report = Bench::new().report(&["producers", "--clients=2", "--seconds=1", "--rounds=1"]);
    let situations = [
        "no_trigger",
        "relay_absent",
        "relay_asleep",
        "relay_busy_no_trigger",
        "relay_busy",
        "relay_busy_three_stand_by",
        "relay_keeps_up",
        "four_relays_keep_up",
    ];
    for run in runs(&report, "situation", &situations.map(Value::from)) {
        assert_measured(run, &["commits_per_second", "ratio"]);
        let sends_nothing = run["compared_with"] == "no_trigger";
        let delivered = run["relay_messages_per_second"].as_f64();
        assert_eq!(!sends_nothing, delivered > Some(0.0), "{run}");
    }
}

#[test]
fn a_relay_that_runs_dry_measures_nothing() {
    let finished = Bench::new()
        .finish(&["producers", "--clients=1", "--seconds=1", "--backlog=1"])
        .code(1);
    assert!(finished.stderr.contains("--backlog"), "{}", finished.stderr);
}

#[test]
fn a_receiver_that_refuses_is_named() {
    let receiver = Receiver::answering(|_| 500);
    let bench = Bench::new();
    let mut command = bench.command(&["drain", "--messages=5", "--json"]);
    command.env("OUTBOX_URL", receiver.url());
    let finished = finish(command).code(1);
    assert!(
        finished.stderr.contains("0 of 5 messages were delivered"),
        "{}",
        finished.stderr
    );
    assert_eq!(bench.schemas(), 0);
}

#[test]
fn a_table_is_for_people() {
    let bench = Bench::new();
    let shown = finish(bench.command(&["latency", "--rate=20", "--paced-seconds=1"]))
        .code(0)
        .stdout;
    assert!(shown.contains("commit to response"), "{shown}");
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
    running.wait_for_log("interrupted");
}

#[test]
fn page_loads_every_page_beside_a_relay() {
    let bench = Bench::new();
    let report = bench.report(&[
        "page",
        "--messages=300",
        "--waiting=3000",
        "--dead=20",
        "--rounds=1",
    ]);
    let pages = report["pages"].as_array().expect("pages");
    assert!(pages.len() >= 10, "{report}");
    for page in pages {
        assert!(
            page["loads"].as_u64() >= Some(1) && page["max_ms"].as_f64() > Some(0.0),
            "{page}"
        );
    }
    let runs = report["runs"].as_array().expect("runs");
    assert!(
        runs.iter()
            .all(|run| run["messages_per_second"].as_f64() > Some(0.0)),
        "{report}"
    );
    assert_eq!(bench.schemas(), 0);
}

#[test]
fn endpoints_are_measured_beside_hanging_busy_and_changing_ones() {
    let report = Bench::new().report(&[
        "registered",
        "--destinations=20",
        "--messages=2000",
        "--filters=10",
        "--rounds=1",
        "--backlogged=4",
        "--paced=20",
        "--hanging=1",
        "--waiting=200",
        "--changes=200",
        "--rate=100",
        "--seconds=1",
    ]);
    let what: Vec<&str> = report["runs"]
        .as_array()
        .expect("runs")
        .iter()
        .map(|run| run["what"].as_str().expect("a name"))
        .collect();
    assert_eq!(
        what,
        [
            "one_configured",
            "registered",
            "registered_with_filters",
            "paced",
            "paced_beside_hanging",
            "paced_beside_waiting",
            "paced_beside_changes"
        ]
    );
    for run in report["runs"].as_array().expect("runs") {
        let rate = run["messages_per_second"].as_f64().expect("a rate");
        assert!(rate > 0.0, "{run}");
    }
    let fairness = report["fairness"].as_f64().expect("an index");
    assert!((0.0..=1.0001).contains(&fairness), "{fairness}");
}

#[test]
fn the_help_says_how_long_each_scenario_takes() {
    let help = finish(binary(&["bench", "-h"])).code(0).stdout;
    for scenario in [
        "drain",
        "latency",
        "backlog",
        "held-snapshot",
        "pinned",
        "aged",
        "ordered",
        "failing",
        "registered",
        "relays",
        "page",
        "enqueue",
        "producers",
    ] {
        let line = help
            .lines()
            .find(|line| line.starts_with(&format!("  {scenario} ")))
            .expect("a line for each scenario");
        let takes = line.rsplit_once('(').expect("the duration, in brackets").1;
        assert!(takes.contains(" s") || takes.contains(" min"), "{line}");
        let own = finish(binary(&["bench", scenario, "--help"])).code(0);
        assert!(own.stdout.contains("--json"), "{}", own.stdout);
    }
    assert!(!help.contains("relay-process"), "{help}");
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
