//! The binary: exit codes, output, the sources of settings, and what its logs never show.

mod dead;
mod drain;
mod running;

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_outbox::NewMessage;
use serde_json::{Value, json};

use crate::support::{
    Database, File, Finished, Gate, Receiver, Running, binary, database_url, end, eventually,
    finish, status,
};

/// Commands that need settings and a database, each with its required arguments.
const COMMANDS: &[&[&str]] = &[
    &["migrate"],
    &["run"],
    &["drain"],
    &["status"],
    &["dead", "list"],
    &["pause", "list"],
    &["resume", "topic", "order.paid"],
    &["check"],
];

pub(super) trait With {
    fn with(self, variable: &str, value: &str) -> Self;
}

impl With for Command {
    fn with(mut self, variable: &str, value: &str) -> Self {
        self.env(variable, value);
        self
    }
}

/// Fails unless the command ends with exit code 2 and its error names everything in `named`.
#[track_caller]
pub(super) fn refused(command: Command, named: &[&str]) {
    let finished = finish(command).code(2);
    for name in named {
        assert!(
            finished.stderr.contains(name),
            "the error does not name {name}: {}",
            finished.stderr
        );
    }
    assert_eq!(finished.stdout, "");
}

// --- Settings -----------------------------------------------------------------------------

#[test]
fn an_unknown_setting_is_named_wherever_it_stands() {
    let database = Database::new();
    for arguments in COMMANDS {
        refused(
            database.binary(arguments).with("OUTBOX_FOO", "1"),
            &["OUTBOX_FOO"],
        );
        refused(
            database.binary(arguments).with("OUTBOX_BACTH", "1"),
            &["OUTBOX_BACTH", "OUTBOX_BATCH"],
        );
        refused(
            database.binary(&[arguments, ["--foo"].as_slice()].concat()),
            &["--foo"],
        );
        let file = File::new("batch = 5\nfoo = 1\n");
        refused(
            database
                .binary(arguments)
                .with("OUTBOX_CONFIG", file.path()),
            &[file.path(), "foo"],
        );
    }
}

#[test]
fn links_that_a_cluster_sets_for_a_service_called_outbox_are_no_settings() {
    let database = Database::new();
    let status = database
        .binary(&["status"])
        .with("OUTBOX_SERVICE_HOST", "10.0.0.1")
        .with("OUTBOX_PORT", "tcp://10.0.0.1:80")
        .with("OUTBOX_PORT_80_TCP_ADDR", "10.0.0.1");
    finish(status).code(0);
}

#[test]
fn a_bad_value_is_named_wherever_it_stands() {
    let database = Database::new();
    for (variable, value) in [
        ("OUTBOX_LEASE", "soon"),
        ("OUTBOX_LEASE", "60"),
        ("OUTBOX_POLL_INTERVAL", "-1s"),
        ("OUTBOX_SEND_TIMEOUT", ""),
        ("OUTBOX_RETENTION", "1000000y"),
        ("OUTBOX_BACKOFF", "exponential(5s)"),
        ("OUTBOX_BATCH", "0"),
        ("OUTBOX_BATCH", "1e9"),
        ("OUTBOX_CONCURRENCY", "many"),
        ("OUTBOX_MAX_ATTEMPTS", "0"),
        ("OUTBOX_ENABLED", "yes"),
        ("OUTBOX_URL", "receiver.example"),
        ("OUTBOX_URL", "ftp://receiver.example"),
        ("OUTBOX_LOG_FORMAT", "xml"),
        ("OUTBOX_MODE", "chunked"),
        ("DATABASE_URL", ""),
    ] {
        refused(
            database.binary(&["status"]).with(variable, value),
            &[variable],
        );
        let key = variable.to_lowercase();
        let key = key.strip_prefix("outbox_").unwrap_or(&key);
        let file = File::new(&format!("{key} = '{value}'"));
        let mut from_file = binary(&["status"]);
        from_file.env("OUTBOX_CONFIG", file.path());
        refused(from_file, &[file.path(), key]);
        let flag = format!("--{}={value}", key.replace('_', "-"));
        let flag_name = format!("--{}", key.replace('_', "-"));
        refused(database.binary(&["status", &flag]), &[&flag_name]);
    }
}

#[test]
fn a_duration_of_nothing_is_refused() {
    let database = Database::new();
    for variable in [
        "OUTBOX_POLL_INTERVAL",
        "OUTBOX_LEASE",
        "OUTBOX_SEND_TIMEOUT",
    ] {
        refused(database.binary(&["run"]).with(variable, "0s"), &[variable]);
    }
}

#[test]
fn a_lease_too_short_for_two_sends_is_refused() {
    let database = Database::new();
    let command = |lease: &str| {
        database
            .binary(&["check"])
            .with("OUTBOX_URL", "http://127.0.0.1:9/")
            .with("OUTBOX_SEND_TIMEOUT", "2s")
            .with("OUTBOX_LEASE", lease)
    };
    refused(command("4s"), &["OUTBOX_LEASE", "OUTBOX_SEND_TIMEOUT"]);
    finish(command("5s")).code(0);
    // A destination's own limit counts as well. A longer lease does not limit sends: they are closed.
    let file = File::new("[destinations.slow]\nurl = 'http://127.0.0.1:9/'\ntimeout = '20s'");
    refused(
        command("11s").with("OUTBOX_CONFIG", file.path()),
        &["OUTBOX_LEASE", "20s"],
    );
    finish(command("12s").with("OUTBOX_CONFIG", file.path())).code(0);
    refused(
        command("1h").with("OUTBOX_SEND_TIMEOUT", "301s"),
        &["OUTBOX_SEND_TIMEOUT", "5 minutes"],
    );
}

#[test]
fn malformed_toml_is_named_by_file_line_and_key() {
    let database = Database::new();
    let file = File::new("batch = 5\n\nlease = = 60\n");
    refused(
        database
            .binary(&["status"])
            .with("OUTBOX_CONFIG", file.path()),
        &[file.path(), "line 3", "the key lease"],
    );
}

#[test]
fn routes_that_lead_nowhere_are_refused() {
    let database = Database::new();
    for (text, named) in [
        (
            "[[routes]]\ntopic = 'a'\nto = 'nobody'",
            "unknown destination \"nobody\": no destination exists",
        ),
        (
            "[destinations.a]\nurl = 'http://127.0.0.1:9/'\n[[routes]]\ntopic = 'x'\nto = 'nobody'",
            "routes[0].to: unknown destination \"nobody\": existing destinations are a",
        ),
        (
            "[destinations.a]\nurl = 'http://127.0.0.1:9/'\n[[routes]]\ntopic = 'x'\nto = 'a'\n[[routes]]\ntopic = 'x'\nto = 'a'",
            "routes[1].topic",
        ),
        ("[destinations.a]\nurl = 'no url'", "destinations.a.url"),
    ] {
        let file = File::new(text);
        refused(
            database
                .binary(&["status"])
                .with("OUTBOX_CONFIG", file.path()),
            &[named],
        );
    }
}

#[test]
fn a_config_file_that_is_not_there_is_named() {
    let database = Database::new();
    let missing = "/nowhere/outbox.toml";
    refused(
        database.binary(&["run"]).with("OUTBOX_CONFIG", missing),
        &["OUTBOX_CONFIG", missing],
    );
    refused(
        database.binary(&["run", "--config", missing]),
        &["OUTBOX_CONFIG", missing],
    );
}

#[test]
fn a_flag_wins_over_the_environment_over_the_file_over_the_default() {
    let database = Database::new();
    let file = File::new("batch = 7\nconcurrency = 7\nmax_attempts = 7\n");
    let shown = finish(
        database
            .binary(&["check", "--json", "--batch", "9"])
            .with("OUTBOX_URL", "http://127.0.0.1:9/")
            .with("OUTBOX_CONFIG", file.path())
            .with("OUTBOX_BATCH", "8")
            .with("OUTBOX_CONCURRENCY", "8"),
    )
    .code(0)
    .json();
    let settings = shown["findings"][0]["detail"].as_str().expect("a text");
    for expected in [
        "batch=9",
        "concurrency=8",
        "max_attempts=7",
        "shutdown_timeout=30s",
    ] {
        assert!(
            settings.split(' ').any(|pair| pair == expected),
            "{settings}"
        );
    }

    // The same holds for the path of the file and for the outbox name.
    let other = File::new("batch = 6\n");
    let shown = finish(
        database
            .binary(&[
                "--config",
                other.path(),
                "check",
                "--json",
                "--table",
                "other",
            ])
            .with("OUTBOX_URL", "http://127.0.0.1:9/")
            .with("OUTBOX_CONFIG", file.path()),
    )
    .code(1)
    .json();
    let settings = shown["findings"][0]["detail"].as_str().expect("a text");
    assert!(
        settings.contains("batch=6") && settings.contains("table=other "),
        "{settings}"
    );
}

// --- The database -------------------------------------------------------------------------

#[test]
fn without_a_database_url_nothing_begins() {
    for arguments in COMMANDS {
        let command = binary(arguments).with("OUTBOX_URL", "http://127.0.0.1:9/");
        refused(command, &["DATABASE_URL"]);
    }
}

#[test]
fn the_database_url_may_stand_in_a_file() {
    let database = Database::new();
    let file = File::new(&format!("{}\n", database.url));
    let status = binary(&["status"])
        .with("DATABASE_URL_FILE", file.path())
        .with("OUTBOX_TABLE", &database.name());
    finish(status).code(0);
    let missing = "/nowhere/database-url";
    refused(
        binary(&["status"]).with("DATABASE_URL_FILE", missing),
        &["DATABASE_URL_FILE", missing],
    );
}

#[test]
fn a_database_that_cannot_be_reached_is_a_failure_without_the_password() {
    for url in [
        "postgres://shop:sekret@127.0.0.1:1/shop",
        "host=127.0.0.1 port=1 user=shop password=sekret",
        // Malformed, or with a password that is not percent-encoded.
        "postgres://shop:sekret@[::1/shop",
        "postgres://shop:sek%ret@127.0.0.1/shop",
        "postgres://shop:sekret/x@127.0.0.1/shop",
        "postgres://shop:x@sekret@127.0.0.1:1/shop",
        "host=127.0.0.1 password=x sekret",
        "postgres://shop:1/sekret@127.0.0.1/shop",
        "host=127.0.0.1 port=1 password='x user=sekret'",
        "postgres://127.0.0.1:1/shop?password=sek%ret",
    ] {
        for arguments in COMMANDS {
            let command = binary(arguments)
                .with("DATABASE_URL", url)
                .with("OUTBOX_URL", "http://127.0.0.1:9/")
                .with("RUST_LOG", "debug");
            let Finished { stdout, stderr, .. } = finish(command).code(1);
            let shown = stdout + &stderr;
            assert!(shown.contains("cannot connect to the database"), "{shown}");
            for part in ["sekret", "sek%ret"] {
                assert!(!shown.contains(part), "{url}: {shown}");
            }
        }
    }
}

#[test]
fn a_database_that_does_not_exist_is_named() {
    let mut url = url::Url::parse(&database_url()).expect("a URL");
    url.set_path("no_such_database");
    for arguments in COMMANDS {
        let command = binary(arguments)
            .with("DATABASE_URL", url.as_str())
            .with("OUTBOX_URL", "http://127.0.0.1:9/");
        let Finished { stdout, stderr, .. } = finish(command).code(1);
        assert!((stdout + &stderr).contains("no_such_database"));
    }
}

// --- status and check ---------------------------------------------------------------------

/// R46: a relay may have only endpoints.
#[test]
fn check_accepts_a_relay_of_endpoints_alone() {
    let database = Database::new();
    let mut command = database.binary(&["check"]);
    command.env("OUTBOX_ENDPOINT_THREADS", "8");
    let found = finish(command).code(0).stdout;
    let route = "every topic -> the endpoints that subscribe to it";
    assert!(found.contains(route), "{found}");
}

/// R32: an application has the relay in its process, and an operator only DATABASE_URL.
#[test]
fn check_without_destinations_judges_the_database_and_the_running_relays() {
    let database = Database::new();
    let check = || finish(database.binary(&["check"]));
    let unknown = "these settings name no destination";
    let found = check().code(0).stdout;
    assert!(found.contains(unknown), "{found}");
    database.execute(
        "INSERT INTO {o} (topic, payload, available_at) VALUES ('order.paid', '1', now() + interval '1 h')",
    );
    let found = check().code(0).stdout;
    assert!(
        found.contains("order.paid waits for a relay: none is running"),
        "{found}"
    );

    let receiver = Receiver::ok();
    let destination = diesel_outbox::Destination::new("billing", &receiver.url()).expect("a URL");
    let relay = database
        .relay()
        .destination(destination)
        .route("order.*", "billing")
        .start()
        .expect("a relay");
    let found = check().code(0).stdout;
    assert!(found.contains("order.paid is served by"), "{found}");
    database.execute(
        "INSERT INTO {o} (topic, payload, available_at) VALUES ('invoice.sent', '1', now() + interval '1 h')",
    );
    let found = check().code(1).stdout;
    assert!(found.contains("invoice.sent waits (NO_ROUTE)"), "{found}");
    end(&relay);
}

/// R16.
#[test]
fn a_topic_without_a_route_is_visible_at_once() {
    let database = Database::new();
    database.enqueue("order.paid", json!(1));
    let file = File::new(
        "[destinations.billing]\nurl = 'http://127.0.0.1:9/'\n[[routes]]\ntopic = 'invoice.*'\nto = 'billing'\n",
    );
    // The check sees the topic before any relay does.
    let mut check = database.binary(&["check"]);
    check.env("OUTBOX_CONFIG", file.path());
    let check = finish(check).code(1);
    assert!(check.stdout.contains("NO_ROUTE"), "{}", check.stdout);
    let mut relay = Running::start(
        database
            .binary(&["run"])
            .with("OUTBOX_CONFIG", file.path())
            .with("OUTBOX_LOG_FORMAT", "json"),
    );
    relay.wait_for_log("\"event\":\"no_route\"");

    let shown = finish(database.binary(&["status", "--json"]))
        .code(0)
        .json();
    assert_eq!(shown["counts"]["pending"], 1);
    assert_eq!(shown["troubles"][0]["reason"], "NO_ROUTE");
    assert_eq!(shown["troubles"][0]["topic"], "order.paid");
    assert_eq!(shown["troubles"][0]["count"], 1);
    assert_eq!(shown["relays"][0]["expired"], false);
    let shown = finish(database.binary(&["status"])).code(0).stdout;
    for part in ["pending", "NO_ROUTE", "order.paid", "alive"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0));
    let shown = finish(database.binary(&["status"])).code(0).stdout;
    assert!(shown.contains("no relay is registered"), "{shown}");
}

/// R32.
#[test]
fn status_and_leases_say_that_no_relay_runs_if_all_leases_have_expired() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('killed', now() - interval '1 hour')",
    );
    for command in ["status", "leases"] {
        let shown = finish(database.binary(&[command])).code(0).stdout;
        assert!(shown.contains("killed"), "{shown}");
        assert!(shown.contains("no relay is running"), "{shown}");
    }
}

/// R32, R54.
#[test]
fn status_says_that_the_row_of_a_lease_that_holds_messages_is_gone() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, locked_by, locked_at) VALUES ('order.paid', '1', 7, now())",
    );
    let shown = finish(database.binary(&["status", "--json"]));
    let shown = shown.code(0).json();
    assert_eq!(shown["troubles"][0]["reason"], "LEASE_REMOVED");
    assert_eq!(shown["troubles"][0]["status"], "sending");
    assert_eq!(shown["troubles"][0]["count"], 1);
    let shown = finish(database.binary(&["status"])).code(0).stdout;
    assert!(shown.contains("the lease 7,"), "{shown}");
}

/// R32.
#[test]
fn status_counts_every_state() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.json().as_str() {
        Some("dead") => 400,
        Some("retrying") => 500,
        _ => 200,
    });
    for state in ["dead", "retrying", "delivered", "delivered"] {
        database.enqueue("order.paid", json!(state));
    }
    finish(
        database
            .binary(&["drain"])
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_BACKOFF", "1h"),
    )
    .code(0);
    database.enqueue("order.paid", json!("pending"));
    let shown = finish(database.binary(&["status", "--json"]))
        .code(0)
        .json();
    assert_eq!(
        shown["counts"],
        json!({ "pending": 1, "sending": 0, "retrying": 1, "delivered": 2, "no_subscriber": 0, "dead": 1 })
    );
    assert!(shown["oldest_due_seconds"].as_f64().is_some());
    assert_eq!(shown["relays"], json!([]), "the drain has ended its lease");
}

#[test]
fn check_says_what_run_would_do() {
    let database = Database::new();
    database.enqueue("order.paid", json!(1));
    database.enqueue("invoice.sent", json!(1));
    let file = File::new(
        "[destinations.billing]\nurl = 'http://127.0.0.1:9/'\n[[routes]]\ntopic = 'invoice.*'\nto = 'billing'\n",
    );
    let check = |json: &[&str]| {
        database
            .binary(&[&["check"], json].concat())
            .with("OUTBOX_CONFIG", file.path())
    };
    // One topic has no route: the command fails, and still reports everything else.
    let text = finish(check(&[])).code(1);
    assert!(
        text.stdout.contains("invoice.sent -> billing"),
        "{}",
        text.stdout
    );
    let shown = finish(check(&["--json"])).code(1).json();
    assert_eq!(shown["ok"], false);
    let bad: Vec<&Value> = shown["findings"]
        .as_array()
        .expect("an array")
        .iter()
        .filter(|finding| finding["ok"] == false)
        .collect();
    assert_eq!(bad.len(), 1);
    assert!(
        bad[0]["detail"]
            .as_str()
            .expect("a text")
            .contains("order.paid")
    );

    let url = "http://shop:sauce@127.0.0.1:9/services/sauce/sauce?token=sauce";
    let good = finish(check(&["--json"]).with("OUTBOX_URL", url)).code(0);
    assert_eq!(good.json()["ok"], true);
    let text = finish(check(&[]).with("OUTBOX_URL", url)).code(0);
    assert!(
        text.stdout.contains("order.paid -> default"),
        "{}",
        text.stdout
    );
    assert!(!(good.stdout + &text.stdout).contains("sauce"));
    assert_eq!(database.count("pending"), 2, "check changed nothing");
}

// --- Help ---------------------------------------------------------------------------------

#[test]
fn the_help_of_each_command_mentions_its_options() {
    let which = ["--topic", "--reason", "--json"];
    for (arguments, options) in [
        (["migrate"].as_slice(), ["--print", "--down"].as_slice()),
        (&["run"], &[]),
        (
            &["drain"],
            &["--topic", "--max-messages", "--json", "--quiet"],
        ),
        (&["status"], &["--json", "--watch", "--exact"]),
        (&["message", "show"], &["--json"]),
        (&["keys"], &["--json", "--limit"]),
        (&["keys", "show"], &["--json", "--limit"]),
        (&["leases"], &["--json"]),
        (
            &["replay"],
            &["--since", "--until", "--dry-run", "--new-ids", "--yes"],
        ),
        (&["dead", "groups"], &which),
        (&["check"], &["--json"]),
        (
            &["pause", "destination"],
            &["--for", "--reason", "--force", "--json"],
        ),
        (&["pause", "topic"], &["--for", "--reason", "--json"]),
        (&["pause", "list"], &["--json"]),
        (&["resume", "destination"], &["--json"]),
        (&["resume", "topic"], &["--json"]),
        (
            &["dead", "list"],
            &[which.as_slice(), &["--limit", "--before"]].concat(),
        ),
        (&["dead", "show"], &["--json"]),
        (
            &["dead", "requeue"],
            &[which.as_slice(), &["--all", "--yes"]].concat(),
        ),
        (
            &["dead", "discard"],
            &[which.as_slice(), &["--all", "--yes"]].concat(),
        ),
    ] {
        let help = finish(binary(&[arguments, ["--help"].as_slice()].concat()))
            .code(0)
            .stdout;
        for option in options {
            assert!(help.contains(option), "{arguments:?} {option}: {help}");
        }
        assert!(
            help.contains("help settings") && !help.contains("OUTBOX_BATCH"),
            "{help}"
        );
    }
    let help = finish(binary(&["--help"])).code(0).stdout;
    for command in [
        "migrate", "run", "drain", "demo", "bench", "status", "dead", "pause", "resume", "check",
    ] {
        assert!(help.contains(&format!("  {command} ")), "{command}: {help}");
    }
    assert!(
        help.contains("Exit codes: 0 success; 1 failure while running; 2 bad settings or usage")
    );
}

#[test]
fn bad_usage_is_exit_code_2() {
    for arguments in [
        [].as_slice(),
        &["fly"],
        &["dead"],
        &["dead", "revive"],
        &["pause", "destination"],
        &["resume"],
        &["migrate", "--down"],
        &["drain", "--max-messages", "-1"],
    ] {
        let usage = finish(binary(arguments)).code(2);
        assert!(!usage.stderr.is_empty());
    }
    let version = finish(binary(&["--version"])).code(0).stdout;
    assert!(version.contains(env!("CARGO_PKG_VERSION")), "{version}");
}
