//! `/metrics` of the binary, read by Prometheus, its Python library and promtool, all independent of this project.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::commands::With;
use crate::page::Page;
use crate::support::{Database, File, Receiver, Running, eventually};

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
    let rows = include_str!("../../docs/watch.md").lines();
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
        // Of the process, which may serve several outboxes.
        .filter(|sample| sample.name != "diesel_outbox_log_lines_dropped_total")
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

/// A Prometheus that reads a relay's metrics and evaluates the alert rules of `deploy`. It keeps its data in a folder.
struct Prometheus {
    process: Running,
    url: String,
    data: PathBuf,
}

impl Prometheus {
    fn of(page: &Page) -> Self {
        let rules = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../deploy/prometheus/diesel-outbox.rules.yml"
        );
        // JSON is YAML, too.
        let settings = File::new(
            &json!({
                "global": {
                    "scrape_interval": "1s",
                    "scrape_timeout": "1s",
                    "evaluation_interval": "1s"
                },
                "rule_files": [rules],
                "scrape_configs": [{
                    "job_name": "relays",
                    "static_configs": [{ "targets": [page.address.to_string()] }]
                }]
            })
            .to_string(),
        );
        let data = PathBuf::from(format!("{}.data", settings.path()));
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", settings.path()))
            .arg(format!("--storage.tsdb.path={}", data.display()))
            .arg("--web.listen-address=127.0.0.1:0");
        let process = Running::start(command);
        process.wait_for_log("Server is ready to receive web requests");
        let log = process.log();
        let address = log
            .lines()
            .find(|line| line.contains("Listening on"))
            .and_then(|line| line.split("address=").nth(1)?.split_whitespace().next())
            .expect("the log says where Prometheus listens");
        Self {
            url: format!("http://{address}/api/v1"),
            process,
            data,
        }
    }

    /// The values that an expression has now, one for each series.
    fn values(&self, expression: &str) -> Vec<f64> {
        let mut answer = ureq::post(format!("{}/query", self.url))
            .send_form([("query", expression)])
            .unwrap_or_else(|error| panic!("{expression}: {error}"));
        let body = answer.body_mut().read_to_string().expect("text");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        let series = body["data"]["result"].as_array().expect("series");
        series
            .iter()
            .filter_map(|one| one["value"][1].as_str()?.parse().ok())
            .collect()
    }

    /// The alert rules, each as the API shows it.
    fn rules(&self) -> Vec<Value> {
        let mut answer = ureq::get(format!("{}/rules", self.url))
            .call()
            .expect("rules");
        let body = answer.body_mut().read_to_string().expect("text");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        let groups = body["data"]["groups"].as_array().expect("groups");
        let rules = groups.iter().filter_map(|group| group["rules"].as_array());
        rules.flatten().cloned().collect()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        self.process.signal("KILL");
        self.process.wait();
        let _ = std::fs::remove_dir_all(&self.data);
    }
}

/// The expressions of the dashboard, as Grafana sends them with all jobs, outboxes and destinations selected.
fn expressions_of_the_dashboard() -> Vec<(String, String)> {
    let dashboard: Value =
        serde_json::from_str(include_str!("../../deploy/grafana/diesel-outbox.json"))
            .expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut expressions = Vec::new();
    for panel in panels {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let mut expression = target["expr"].as_str().expect("an expression").to_owned();
            for (variable, value) in [
                ("$__rate_interval", "10s"),
                ("$__range", "1m"),
                ("$job", ".*"),
                ("$outbox", ".*"),
                ("$destination", ".*"),
            ] {
                expression = expression.replace(variable, value);
            }
            assert!(!expression.contains('$'), "{expression}");
            let title = panel["title"].as_str().expect("a title");
            expressions.push((title.to_owned(), expression));
        }
    }
    expressions
}

/// R29: each panel of the dashboard has data while a relay works, and Prometheus evaluates each alert rule.
#[test]
fn prometheus_evaluates_the_dashboard_and_the_alerts() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.header("ce-type") {
        Some("order.bad") => 422,
        Some("order.late") => 503,
        _ => 204,
    });
    let relay = database.binary(&["run"]);
    let page = Page::start(relay.with("OUTBOX_URL", &receiver.url()));
    let prometheus = Prometheus::of(&page);
    let mut expressions = expressions_of_the_dashboard();
    assert!(expressions.len() > 30, "{}", expressions.len());
    // The first metrics are those of an application, and the relay has no problem.
    expressions.retain(|(title, expression)| {
        !expression.contains("diesel_outbox_enqueue") && title != "Problems"
    });
    let mut rounds = 0;
    eventually("each expression of the dashboard has a value", || {
        database.enqueue("order.paid", json!({}));
        database.enqueue("order.bad", json!({}));
        // Few failures, because a breaker would stop the deliveries.
        if rounds % 10 == 0 {
            database.enqueue("order.late", json!({}));
            eprintln!("without a value after {rounds} rounds: {expressions:?}");
        }
        rounds += 1;
        expressions.retain(|(_, expression)| {
            let mut values = prometheus.values(expression).into_iter();
            !values.any(f64::is_finite)
        });
        expressions.is_empty()
    });
    eventually("each alert rule is evaluated, and one fires", || {
        let rules = prometheus.rules();
        for rule in &rules {
            assert_ne!(rule["health"], "err", "{rule}");
            assert!(!rule.to_string().contains("error expanding"), "{rule}");
        }
        let dead = format!("new dead letters in {}, topic order.bad", database.name());
        rules.iter().all(|rule| rule["health"] == "ok")
            && rules.iter().any(|rule| {
                let alert = &rule["alerts"][0];
                let summary = alert["annotations"]["summary"].as_str();
                alert["state"] == "firing" && summary.is_some_and(|words| words.contains(&dead))
            })
    });
}
