//! `outbox.toml` through the binary: what `check` reports, and how the settings affect messages.

use std::process::Command;

use serde_json::{Value, json};

use crate::commands::{With, refused};
use crate::support::{Database, File, Finished, Receiver, finish};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OLD_SECRET: &str = "whsec_Zm9vYmFyZm9vYmFyZm9vYmFyZm9vYmFyZm8=";
/// A part of each secret in [`everything`].
const PARTS: [&str; 3] = ["MfKQ", "Zm9v", "hunter2"];

/// A file with every key, except client certificates, which have their own tests.
fn everything(secrets: &File, token: &File) -> File {
    let (secrets, token) = (secrets.path(), token.path());
    File::new(&format!(
        r#"
url = "https://u:hunter2@rest.example/?key=hunter2"
public_only = true
[destinations.billing]
url = "https://billing.example/events?key=hunter2"
secret = ["{SECRET}", "{OLD_SECRET}"]
mode = "structured"
timeout = "1s"
concurrency = 8
rate = 50
burst = 7
max_attempts = 5
backoff = "1s,2s"
on_dead = "block"
key_run = 50
retry_after_cap = "10m"
max_payload = "64KiB"
allow = ["10.0.0.0/8", "::1"]
https_only = true
proxy = "http://u:hunter2@proxy.example:3128"
[destinations.billing.headers]
authorization = "Bearer hunter2"
x-key = {{ file = "{token}" }}
[destinations.billing.breaker]
failure_ratio = 0.25
min_sends = 20
window = "1m"
open = "2s"
open_cap = "2m"
[destinations.billing.classes]
404 = "dead"
[destinations.billing.tls]
roots = "bundled"
min_version = "1.3"

[destinations.audit]
url = "http://audit.internal/"
secret_file = "{secrets}"
mode = "batched"
batch_size = 10
batch_linger = "20ms"
internal = true
breaker = false
rate = 0.5

[[routes]]
topic = "order.*"
to = "audit"
[[routes]]
topic = "order.paid"
to = ["billing", "audit"]
"#
    ))
}

fn check(database: &Database, file: &File, arguments: &[&str]) -> Command {
    let arguments = [&["check", "--config", file.path()], arguments].concat();
    database.binary(&arguments)
}

#[test]
fn check_shows_where_each_topic_goes_and_each_destination_in_a_line() {
    let database = Database::new();
    let secrets = File::new(&format!("{SECRET}\n{OLD_SECRET}\n"));
    let token = File::new("hunter2\n");
    let file = everything(&secrets, &token);
    database.enqueue("order.paid", json!(1));
    let text = finish(check(&database, &file, &[])).code(0).stdout;
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    let expected = [
        "ok route order.paid -> billing and audit",
        "ok route order.* -> audit",
        "ok route every other topic -> default",
        "ok destination audit: http://audit.internal/, batched (up to 10 in 20ms), \
         signed with 2 secrets, 16 threads, 0.5/s (burst 1), no breaker, \
         internal (any address), \
         no TLS, no proxy",
        "ok destination billing: https://billing.example/events?***, structured, \
         signed with 2 secrets, 8 threads, 50/s (burst 7), breaker opens if 25 % of at least 20 sends in \
         1m fail, timeout 1s, max_attempts 5, backoff 1s,2s, on_dead block, key_run 50, classes 404=dead, \
         retry_after_cap 10m, public addresses and 10.0.0.0/8 ::1/128 only, TLS from 1.3 with bundled roots, \
         proxy http://***@proxy.example:3128/",
        "ok destination default: https://***@rest.example/?***, binary, unsigned, 16 threads, \
         no rate limit, breaker opens if 50 % of at least 50 sends in 30s fail, public addresses only, \
         TLS from 1.2 with bundled roots, no proxy",
    ];
    for (line, expected) in lines[1..].iter().zip(expected) {
        assert_eq!(line, expected);
    }
    let topic = "ok topic order.paid -> billing and audit";
    assert!(lines.iter().any(|line| line == topic), "{text}");
    let shown = finish(check(&database, &file, &["--json"])).code(0);
    for part in PARTS {
        assert!(!text.contains(part), "{text}");
        assert!(!shown.stdout.contains(part), "{}", shown.stdout);
    }
    let shown = shown.json();
    assert_eq!(
        shown["routes"],
        json!([
            { "topic": "order.paid", "to": ["billing", "audit"] },
            { "topic": "order.*", "to": ["audit"] },
            { "topic": "*", "to": ["default"] },
        ])
    );
    let billing = &shown["destinations"][1];
    assert_eq!(billing["name"], "billing");
    assert_eq!(billing["mode"], "structured");
    assert_eq!(billing["secrets"], 2);
    assert_eq!(billing["rate"], json!({ "per_second": 50.0, "burst": 7 }));
    assert_eq!(
        (&billing["policy"]["on_dead"], &billing["policy"]["key_run"]),
        (&json!("block"), &json!(50))
    );
    assert_eq!(billing["routed"], true);
}

#[test]
fn a_probable_mistake_is_a_warning_and_no_problem() {
    let database = Database::new();
    let file = File::new(&format!(
        "secret = '{SECRET}'
         [destinations.open]\nurl = 'http://open.example/'\nmode = 'structured'
         [destinations.near]\nurl = 'http://10.0.0.7/'
         [destinations.lonely]\nurl = 'https://lonely.example/'\nmode = 'structured'
         [[routes]]\ntopic = '*'\nto = ['open', 'near']"
    ));
    let shown = finish(check(&database, &file, &["--json"])).code(0).json();
    let warnings: Vec<(&str, &Value)> = shown["destinations"]
        .as_array()
        .expect("an array")
        .iter()
        .map(|d| (d["name"].as_str().expect("a name"), &d["warnings"]))
        .collect();
    assert_eq!(
        warnings,
        [
            (
                "lonely",
                &json!([
                    "no route leads to this destination: only messages that name it are sent there"
                ])
            ),
            (
                "near",
                &json!(["headers are not signed: consider structured mode"])
            ),
            (
                "open",
                &json!([
                    "requests are signed, but http:// to a public host is not private: use https://"
                ])
            ),
        ]
    );
    assert_eq!(shown["ok"], true);
    let text = finish(check(&database, &file, &[])).code(0).stdout;
    assert_eq!(text.matches("\nwarning destination ").count(), 3, "{text}");
    let shared = "\nwarning secret      OUTBOX_SECRET is shared by 3 hosts (10.0.0.7, lonely.example, open.example)";
    assert!(text.contains(shared), "{text}");
}

#[test]
fn a_bad_key_ends_with_exit_code_2_and_its_whole_name() {
    let database = Database::new();
    for (lines, named) in [
        (
            "timeuot = '5s'",
            ["destinations.a.timeuot", "did you mean timeout?"],
        ),
        (
            "headers.host = 'x'",
            ["destinations.a.headers.host", "reserved"],
        ),
        ("https_only = true", ["destinations.a.url", "https"]),
        (
            "tls.client_cert_file = '/x'",
            ["destinations.a.tls", "go together"],
        ),
        (
            "tls.roots = '/nowhere/roots.pem'",
            ["destinations.a.tls.roots", "/nowhere/roots.pem"],
        ),
    ] {
        let file = File::new(&format!(
            "[destinations.a]\nurl = 'http://a.example/'\n{lines}"
        ));
        let named = [&[file.path()], named.as_slice()].concat();
        // Conflicts between keys, and headers, are checked after the file is read.
        let is_of_all = lines.starts_with("headers") || lines.starts_with("https_only");
        let is_of_all = is_of_all || lines.starts_with("tls.roots");
        let named = if is_of_all { &named[1..] } else { &named };
        refused(check(&database, &file, &[]), named);
    }
}

#[test]
fn files_of_secrets_are_read_from_the_working_directory() {
    let database = Database::new();
    let url = File::new(&database.url);
    let secret = File::new(&format!("{SECRET}\n"));
    let name = |file: &File| {
        let (folder, name) = file.path().rsplit_once('/').expect("a folder");
        (folder.to_owned(), name.to_owned())
    };
    let (folder, url) = name(&url);
    let (_, secret) = name(&secret);
    let file = File::new(&format!(
        "database_url_file = '{url}'\nsecret_file = '{secret}'\nmode = 'structured'\nurl = 'http://a.internal/'"
    ));
    let mut command = check(&database, &file, &[]);
    command.env_remove("DATABASE_URL").current_dir(folder);
    let text = finish(command).code(0).stdout;
    assert!(text.contains("signed with 1 secret"), "{text}");
    assert!(text.contains("connected to PostgreSQL"), "{text}");
}

#[test]
fn receivers_get_the_settings_of_the_file() {
    let database = Database::new();
    let billing = Receiver::answering(|_| 404);
    let audit = Receiver::ok();
    let token = File::new("token-of-file\n");
    let audit_url = File::new(&format!("{}\n", audit.url()));
    let file = File::new(&format!(
        "[destinations.billing]
url = '{}'
secret = ['{SECRET}', '{OLD_SECRET}']
mode = 'structured'
headers = {{ x-plain = 'plain', x-token = {{ file = '{}' }} }}
classes = {{ 404 = 'dead' }}
[destinations.audit]
url_file = '{}'
[[routes]]
topic = 'order.*'
to = ['billing', 'audit']
",
        billing.url(),
        token.path(),
        audit_url.path()
    ));
    database.enqueue("order.paid", json!({ "n": 7 }));
    let drain = database
        .binary(&["drain", "--quiet"])
        .with("OUTBOX_CONFIG", file.path());
    finish(drain).code(0);

    let [request] = &billing.requests()[..] else {
        panic!(
            "expected one request, the message is dead at once: {}",
            billing.count()
        );
    };
    assert_eq!(request.header("x-plain"), Some("plain"));
    assert_eq!(request.header("x-token"), Some("token-of-file"));
    let content_type = request.header("content-type");
    assert_eq!(content_type, Some("application/cloudevents+json"));
    let signatures = request.header("webhook-signature").expect("signed");
    assert_eq!(signatures.split(' ').count(), 2);
    assert_eq!(request.json()["data"], json!({ "n": 7 }));
    let [request] = &audit.requests()[..] else {
        panic!("expected one request: {}", audit.count());
    };
    assert_eq!(request.header("webhook-signature"), None);
    assert_eq!(request.json(), json!({ "n": 7 }));
    assert_eq!(database.count("dead"), 1);
    assert_eq!(database.count("delivered"), 1);
}

/// Webhooks of Slack and Discord have their secret in the path. The first receiver refuses the message, and no server
/// listens at the second destination. Neither error shows the path.
#[test]
fn a_token_in_the_path_of_a_url_is_sent_and_never_shown() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    let url = File::new(&format!("{}/T0/sekret-a\n", receiver.url()));
    let file = File::new(
        "[destinations.nobody]
url = 'http://127.0.0.1:9/services/T0/sekret-b'
[[routes]]
topic = 'lost.*'
to = 'nobody'
",
    );
    database.enqueue("order.paid", json!(1));
    database.enqueue("lost.found", json!(1));
    let command = |arguments: &[&str]| {
        database
            .binary(arguments)
            .with("OUTBOX_CONFIG", file.path())
            .with("OUTBOX_URL_FILE", url.path())
            .with("OUTBOX_BACKOFF", "1h")
            .with("RUST_LOG", "trace")
    };
    for arguments in [
        ["drain", "--quiet"].as_slice(),
        &["check"],
        &["check", "--json"],
        &["status", "--json"],
    ] {
        let Finished { stdout, stderr, .. } = finish(command(arguments));
        let shown = stdout + &stderr;
        assert!(!shown.contains("sekret"), "{arguments:?}: {shown}");
    }
    let check = finish(command(&["check"])).stdout;
    assert!(check.contains("/events/***,"), "{check}");
    assert!(
        check.contains("http://127.0.0.1:9/services/***,"),
        "{check}"
    );
    let line = &receiver.requests()[0].line;
    assert!(line.contains(" /events/T0/sekret-a "), "{line}");
    let errors = database.text("SELECT string_agg(last_error, ' ') AS t FROM {o}");
    assert!(!errors.expect("errors").contains("sekret"));
    // Both ways at once.
    refused(
        command(&["check"]).with("OUTBOX_URL", "http://127.0.0.1:9/"),
        &["OUTBOX_URL_FILE", "OUTBOX_URL is also set"],
    );
}

/// An error about a setting made in code names the method, not an environment variable that was never set.
#[test]
fn errors_of_the_builder_name_its_methods_and_those_of_the_environment_its_variables() {
    use diesel_outbox::config::Config;
    use diesel_outbox::{Backoff, Relay};
    use std::time::Duration;

    let builder = || Relay::builder("postgres://nobody@localhost/nothing");
    let bad_backoff = "exponential(5s, 1h)".parse::<Backoff>().expect("a backoff");
    for (relay, key) in [
        (Relay::builder("nonsense"), "Relay::builder: "),
        (builder().outbox("a b"), "RelayBuilder::outbox: "),
        (builder().url("ftp://receiver"), "RelayBuilder::url: "),
        (builder().concurrency(0), "RelayBuilder::concurrency: "),
        (builder().batch(0), "RelayBuilder::batch: "),
        (builder().max_attempts(0), "RelayBuilder::max_attempts: "),
        (
            builder().backoff(bad_backoff).poll_interval(Duration::ZERO),
            "RelayBuilder::poll_interval: ",
        ),
        (builder().lease(Duration::ZERO), "RelayBuilder::lease: "),
        (
            builder().send_timeout(Duration::ZERO),
            "RelayBuilder::send_timeout: ",
        ),
        (
            builder().retention(Some(Duration::ZERO)),
            "RelayBuilder::retention: ",
        ),
        (
            builder().configure(|config| config.inbox_retention = Some(Duration::ZERO)),
            "Config::inbox_retention: ",
        ),
    ] {
        let error = relay.start().expect_err(key).to_string();
        assert!(error.contains(key), "{key} {error}");
        let allowed = error.replace("OUTBOX_CLEANER=false", "");
        assert!(!allowed.contains("OUTBOX_"), "{error}");
    }
    // The lease and the send timeout contradict each other.
    let short = builder().lease(Duration::from_secs(10));
    let error = short.send_timeout(Duration::from_secs(40)).start();
    let error = error.expect_err("too long").to_string();
    assert!(error.contains("RelayBuilder::lease: "), "{error}");
    assert!(error.contains("RelayBuilder::send_timeout"), "{error}");

    let mut config = Config::default();
    config
        .set("DATABASE_URL", "postgres://nobody@localhost/nothing")
        .expect("a URL");
    config.set("OUTBOX_SEND_TIMEOUT", "40s").expect("a time");
    config.set("OUTBOX_LEASE", "10s").expect("a time");
    let error = Relay::from_config(config.clone()).start();
    let error = error.expect_err("too long").to_string();
    assert!(error.contains("OUTBOX_LEASE: "), "{error}");
    let error = Relay::from_config(config).lease(Duration::from_secs(11));
    let error = error.start().expect_err("too long").to_string();
    assert!(error.contains("RelayBuilder::lease: "), "{error}");
    assert!(error.contains("(OUTBOX_SEND_TIMEOUT"), "{error}");
}
