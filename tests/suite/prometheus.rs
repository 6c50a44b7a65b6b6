//! `/metrics` of the binary, read by Prometheus' Python library and by promtool, both independent of this project.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::json;

use crate::commands::With;
use crate::page::Page;
use crate::support::{Database, Receiver, eventually};

/// A sample as the Python library reads it.
#[derive(Debug, Deserialize)]
struct Sample {
    family: String,
    #[serde(rename = "type")]
    kind: String,
    help: String,
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// The samples that Prometheus' library reads from this text.
fn samples_of(text: &str) -> Vec<Sample> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
    let python = target
        .expect("tmp is in the build's folder")
        .join("prometheus/venv/bin/python");
    assert!(
        python.exists(),
        "{} is missing: run `make test`",
        python.display()
    );
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/prometheus/read.py");
    let mut command = Command::new(python);
    let read = fed(command.args(["-B", script]), text);
    serde_json::from_str(&read).expect("JSON")
}

/// Feeds this text to a command and returns its output. Fails if the command fails or warns.
fn fed(command: &mut Command, text: &str) -> String {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}; run `make test`"));
    let mut input = child.stdin.take().expect("piped");
    input
        .write_all(text.as_bytes())
        .expect("the command reads its input");
    drop(input);
    let output = child.wait_with_output().expect("the command ends");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && errors.is_empty(),
        "{command:?} says {errors}about {text}"
    );
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The sum of the samples with this name and these labels.
fn sum(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    samples
        .iter()
        .filter(|sample| sample.name == name)
        .filter(|sample| {
            labels
                .iter()
                .all(|(label, value)| sample.labels.get(*label).is_some_and(|own| own == value))
        })
        .map(|sample| sample.value)
        .sum()
}

/// Kinds and labels of each metric, according to the guide.
fn metrics_of_the_guide() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    let rows = include_str!("../../docs/operating.md").lines();
    rows.filter_map(|line| line.strip_prefix("| `diesel_outbox_").map(|_| line))
        .map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let name = cells[1].trim_matches('`');
            let (labels, remark) = cells[2].split_once('(').unwrap_or((cells[2], ""));
            let mut labels: BTreeSet<_> = labels.split(',').map(str::trim).collect();
            labels.remove("");
            if !remark.contains("no outbox") {
                labels.insert("outbox");
            }
            (name, labels)
        })
        .collect()
}

/// A relay that has delivered five messages and dead-lettered one.
fn busy(database: &Database) -> (Receiver, Page) {
    let receiver =
        Receiver::answering(
            |request| match request.header("ce-type") == Some("order.bad") {
                true => 422,
                false => 204,
            },
        );
    let relay = database.binary(&["run"]);
    let page = Page::start(relay.with("OUTBOX_URL", &receiver.url()));
    for n in 0..5 {
        database.enqueue("order.paid", json!({ "n": n }));
    }
    database.enqueue("order.bad", json!({}));
    eventually("all messages are settled", || {
        database.count("delivered") == 5 && database.count("dead") == 1
    });
    (receiver, page)
}

/// R29: another language's library for Prometheus reads the relay's metrics, and promtool reports no problem.
#[test]
fn prometheus_reads_what_the_relay_did() {
    let database = Database::new();
    let (_receiver, page) = busy(&database);
    let mut text = String::new();
    eventually("the gauges are up to date", || {
        let answer = page.get("/metrics");
        assert_eq!(answer.status, 200);
        let kind = answer.header("content-type").expect("a content type");
        assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
        text = answer.body;
        let samples = samples_of(&text);
        sum(&samples, "diesel_outbox_messages", &[("status", "dead")]) == 1.0
            && sum(&samples, "diesel_outbox_in_flight", &[]) == 0.0
    });
    fed(Command::new("promtool").args(["check", "metrics"]), &text);

    let samples = samples_of(&text);
    let default = ("destination", "default");
    for (name, labels, value) in [
        ("settled_total", [default, ("outcome", "delivered")], 5.0),
        ("settled_total", [default, ("outcome", "dead")], 1.0),
        ("dead_total", [default, ("reason", "REJECTED")], 1.0),
        (
            "messages",
            [("topic", "order.bad"), ("status", "dead")],
            1.0,
        ),
        (
            "messages",
            [("topic", "order.paid"), ("status", "dead")],
            0.0,
        ),
        ("send_seconds_count", [default, default], 6.0),
        ("delivery_seconds_count", [default, default], 5.0),
        ("delivery_seconds_bucket", [default, ("le", "+Inf")], 5.0),
        ("paused", [default, default], 0.0),
        ("breaker_open", [default, default], 0.0),
    ] {
        let name = format!("diesel_outbox_{name}");
        assert_eq!(sum(&samples, &name, &labels), value, "{name} {labels:?}");
    }
    for (name, value) in [("claimed_total", 6.0), ("live", 1.0), ("ready", 1.0)] {
        let name = format!("diesel_outbox_{name}");
        assert_eq!(sum(&samples, &name, &[]), value, "{name}");
    }
    let outbox = database.name();
    let others = samples
        .iter()
        .filter(|sample| sample.name != "diesel_outbox_build_info")
        .find(|sample| sample.labels.get("outbox") != Some(&outbox));
    assert!(others.is_none(), "{others:?}");
    has_the_names_and_labels_of_the_guide(&samples);
}

fn has_the_names_and_labels_of_the_guide(samples: &[Sample]) {
    let guide = metrics_of_the_guide();
    for sample in samples {
        assert!(!sample.help.is_empty(), "{sample:?}");
        let family = match sample.kind.as_str() {
            // The library strips this suffix from the name.
            "counter" => format!("{}_total", sample.family),
            "gauge" | "histogram" => sample.family.clone(),
            other => panic!("{other}: {sample:?}"),
        };
        let mut labels: BTreeSet<_> = sample.labels.keys().map(String::as_str).collect();
        labels.remove("le");
        let documented = guide.get(family.as_str());
        assert_eq!(documented, Some(&labels), "{sample:?}");
    }
}
