//! The binary: exit codes, output, the sources of settings, and what its logs never show.

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

// --- dead ---------------------------------------------------------------------------------

/// Inserts dead letters: two of the topic `a` with the reason `REJECTED`, one of `b` with `REJECTED` and one of `b`
/// with `CLIENT_ERROR`. Returns their ids.
fn dead_letters(database: &Database) -> [i64; 4] {
    let receiver = Receiver::answering(|request| match request.json().as_str() {
        Some("gone") => 404,
        _ => 400,
    });
    let ids = [
        database.enqueue("a", json!("bad")),
        database.enqueue("a", json!("bad")),
        database.enqueue("b", json!("bad")),
        database.enqueue("b", json!("gone")),
    ];
    finish(
        database
            .binary(&["drain"])
            .with("OUTBOX_MAX_ATTEMPTS", "1")
            .with("OUTBOX_URL", &receiver.url()),
    )
    .code(1);
    assert_eq!(database.count("dead"), 4);
    ids
}

fn dead(database: &Database, arguments: &[&str]) -> Finished {
    finish(database.binary(&[&["dead"], arguments].concat()))
}

/// The dead letters that are left.
fn left(database: &Database) -> Vec<i64> {
    let ids = database
        .text("SELECT string_agg(sequence::text, ' ' ORDER BY sequence) FROM {o}_dead")
        .unwrap_or_default();
    ids.split_whitespace()
        .map(|id| id.parse().expect("a number"))
        .collect()
}

#[test]
fn dead_letters_are_listed_by_id_topic_and_reason() {
    let database = Database::new();
    let [a1, a2, b1, b2] = dead_letters(&database);
    let list = |arguments: &[&str]| -> Vec<i64> {
        let shown = dead(&database, &[&["list", "--json"], arguments].concat())
            .code(0)
            .json();
        let mut ids: Vec<i64> = shown
            .as_array()
            .expect("an array")
            .iter()
            .map(|letter| letter["id"].as_i64().expect("an id"))
            .collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(list(&[]), [a1, a2, b1, b2]);
    assert_eq!(list(&["--topic", "a"]), [a1, a2]);
    assert_eq!(list(&["--reason", "CLIENT_ERROR"]), [b2]);
    assert_eq!(list(&["--reason", "rejected", "--topic", "b"]), [b1]);
    assert_eq!(list(&[&a2.to_string(), &b2.to_string()]), [a2, b2]);
    assert_eq!(list(&["--topic", "c"]), Vec::<i64>::new());
    assert_eq!(list(&["--limit", "3"]).len(), 3);
    let text = dead(&database, &["list"]).code(0).stdout;
    for part in ["REJECTED", "CLIENT_ERROR", &a1.to_string()] {
        assert!(text.contains(part), "{text}");
    }
    let unknown = dead(&database, &["list", "--reason", "TIRED"]).code(2);
    assert!(unknown.stderr.contains("TIRED"), "{}", unknown.stderr);
}

#[test]
fn a_dead_letter_is_shown_whole() {
    let database = Database::new();
    let [_, _, _, gone] = dead_letters(&database);
    let id = gone.to_string();
    let tenant = "0198c5a1-7b1e-7000-8000-000000000001";
    database.execute(&format!(
        "UPDATE {{o}}_dead SET tenant_id = '{tenant}' WHERE sequence = {id}"
    ));
    let shown = dead(&database, &["show", &id, "--json"]).code(0).json();
    assert_eq!(shown["id"], gone);
    assert_eq!(shown["payload"], "gone");
    assert_eq!(shown["reason"], "CLIENT_ERROR");
    assert_eq!(shown["http_status"], 404);
    assert_eq!(shown["tenant_id"], tenant);
    let text = dead(&database, &["show", &id]).code(0).stdout;
    assert!(text.contains(tenant), "{text}");
    assert!(
        text.contains("CLIENT_ERROR") && text.contains("\"gone\""),
        "{text}"
    );
    let missing = dead(&database, &["show", "999999"]).code(1);
    assert!(missing.stderr.contains("999999"), "{}", missing.stderr);
    dead(&database, &["show", "first"]).code(2);
}

/// R25.
#[test]
fn dead_letters_are_requeued_by_id_topic_and_reason() {
    let database = Database::new();
    let [a1, a2, b1, b2] = dead_letters(&database);
    dead(&database, &["requeue", &a1.to_string()]).code(0);
    assert_eq!(left(&database), [a2, b1, b2]);
    let shown = dead(
        &database,
        &["requeue", "--reason", "CLIENT_ERROR", "--yes", "--json"],
    )
    .code(0)
    .json();
    assert_eq!(
        (&shown["matched"], &shown["changed"]),
        (&json!(1), &json!(1))
    );
    assert_eq!(left(&database), [a2, b1]);
    let text = dead(&database, &["requeue", "--topic", "a", "--yes"]);
    assert_eq!(text.code(0).stdout, "requeued 1 dead letter\n");
    assert_eq!(left(&database), [b1]);
    assert_eq!(database.count("pending"), 3);
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE attempts = 0 AND available_at <= now()"),
        3
    );
}

/// R25: a misspelled topic or reason is reported; it does not look like one without dead letters.
#[test]
fn an_unknown_topic_and_an_unknown_reason_are_reported() {
    let database = Database::new();
    dead_letters(&database);
    let requeue = |arguments: &[&str]| dead(&database, &[&["requeue"], arguments].concat());
    let text = requeue(&["--topic", "aa"]).code(0).stdout;
    assert!(
        text.starts_with("requeued 0 dead letters: ")
            && text.contains("topic aa: check the spelling"),
        "{text}"
    );
    let text = requeue(&["--topic", "a*", "--dry-run"]).code(0).stdout;
    assert!(text.contains("2 dead letters would"), "{text}");
    database.enqueue("live", json!(1));
    let text = requeue(&["--topic", "live"]).code(0).stdout;
    assert_eq!(text, "requeued 0 dead letters: none matches\n");
    let text = requeue(&["--topic", "a", "--reason", "DNS"]).code(0).stdout;
    assert!(text.contains("none matches"), "{text}");
    let refused = requeue(&["--reason", "SERVER"]).code(2).stderr;
    for name in ["--reason", "\"SERVER\"", "SERVER_ERROR", "TIMEOUT"] {
        assert!(refused.contains(name), "{name}: {refused}");
    }
}

/// R25.
#[test]
fn dead_letters_are_discarded_by_id_topic_and_reason() {
    let database = Database::new();
    let [a1, a2, b1, b2] = dead_letters(&database);
    dead(&database, &["discard", &a1.to_string(), &a2.to_string()]).code(0);
    assert_eq!(left(&database), [b1, b2]);
    dead(
        &database,
        &[
            "discard",
            "--topic",
            "b",
            "--reason",
            "CLIENT_ERROR",
            "--yes",
        ],
    )
    .code(0);
    assert_eq!(left(&database), [b1]);
    let text = dead(&database, &["discard", "--topic", "b", "--yes"]);
    assert_eq!(text.code(0).stdout, "discarded 1 dead letter\n");
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE status = 'dead'"),
        4,
        "the ledger keeps the dead entries"
    );
}

#[test]
fn an_id_that_is_not_there_changes_nothing() {
    let database = Database::new();
    let ids = dead_letters(&database);
    for verb in ["requeue", "discard"] {
        let failed = dead(&database, &[verb, &ids[0].to_string(), "999999"]).code(1);
        assert!(failed.stderr.contains("999999"), "{}", failed.stderr);
    }
    assert_eq!(left(&database), ids);
}

#[test]
fn all_has_to_be_said_and_without_a_terminal_confirmed_beforehand() {
    let database = Database::new();
    let ids = dead_letters(&database);
    for verb in ["requeue", "discard"] {
        // No selection.
        dead(&database, &[verb]).code(2);
        // Two selections.
        dead(&database, &[verb, "--all", "--topic", "a", "--yes"]).code(2);
        // No confirmation.
        let failed = dead(&database, &[verb, "--all"]).code(1);
        assert!(failed.stderr.contains("--yes"), "{}", failed.stderr);
        assert!(failed.stderr.contains("nothing was changed"));
        assert_eq!(left(&database), ids);
    }
    let text = dead(&database, &["requeue", "--all", "--yes"])
        .code(0)
        .stdout;
    assert_eq!(text, "requeued 4 dead letters\n");
    assert_eq!(left(&database), Vec::<i64>::new());
    assert_eq!(database.count("pending"), 4);
    // Without dead letters there is nothing to confirm.
    let text = dead(&database, &["discard", "--all"]).code(0).stdout;
    assert_eq!(text, "discarded 0 dead letters: none matches\n");
    assert_eq!(database.count("pending"), 4);
}

#[test]
fn discard_all_with_yes_leaves_no_dead_letter() {
    let database = Database::new();
    dead_letters(&database);
    let shown = dead(&database, &["discard", "--all", "--yes", "--json"])
        .code(0)
        .json();
    assert_eq!(
        (&shown["matched"], &shown["changed"]),
        (&json!(4), &json!(4))
    );
    assert_eq!(left(&database), Vec::<i64>::new());
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let database = Database::new();
    let ids = dead_letters(&database);
    for arguments in [
        ["dead", "list"].as_slice(),
        &["dead", "list", "--json"],
        &["dead", "show", &ids[0].to_string()],
        &["status"],
        &["migrate", "--print"],
        &["--help"],
    ] {
        let mut child = database
            .binary(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        // The reader closes the pipe before the command writes anything, or soon after.
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("our child");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("panicked"), "{arguments:?}: {stderr}");
    }
}

// --- drain --------------------------------------------------------------------------------

/// Two delivered messages, one that waits for its next attempt, one dead letter.
fn four_messages(database: &Database) -> Receiver {
    for status in [200, 200, 500, 400] {
        database.enqueue("order.paid", json!(status));
    }
    Receiver::answering(|request| {
        let status = request.json().as_u64().expect("a status");
        u16::try_from(status).expect("a status")
    })
}

fn drain(database: &Database, receiver: &Receiver, arguments: &[&str]) -> Finished {
    finish(
        database
            .binary(&[&["drain"], arguments].concat())
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_BACKOFF", "1h"),
    )
}

/// R11.
#[test]
fn drain_says_what_it_did() {
    let database = Database::new();
    let receiver = four_messages(&database);
    let text = drain(&database, &receiver, &[]).code(0).stdout;
    assert!(
        text.starts_with("processed 4, failed 2 (1 will be retried, 1 dead), "),
        "{text}"
    );
    assert!(text.contains(" messages/s in "), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let text = drain(&database, &receiver, &[]).code(0).stdout;
    assert!(text.starts_with("processed 0, failed 0 "), "{text}");
}

#[test]
fn drain_says_what_it_did_as_json() {
    let database = Database::new();
    let receiver = four_messages(&database);
    let shown = drain(&database, &receiver, &["--json"]).code(0).json();
    for (key, count) in [
        ("processed", 4),
        ("delivered", 2),
        ("deduplicated", 0),
        ("failed", 2),
        ("retrying", 1),
        ("dead", 1),
    ] {
        assert_eq!(shown[key], count, "{key}: {shown}");
    }
    assert!(shown["seconds"].as_f64().is_some_and(|s| s > 0.0));
    assert!(
        shown["messages_per_second"]
            .as_f64()
            .is_some_and(|m| m > 0.0)
    );
}

/// R11.
#[test]
fn drain_stops_after_max_messages_and_leaves_the_others() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.enqueue_many(10);
    for (most, left) in [("3", 7), ("0", 7), ("7", 0)] {
        let shown = drain(&database, &receiver, &["--max-messages", most, "--json"])
            .code(0)
            .json();
        assert_eq!(shown["processed"].to_string(), most);
        assert_eq!(database.count("pending"), left);
    }
    assert_eq!(receiver.count(), 10);
    database.enqueue_many(1);
    for n in 0..3 {
        let keyed = NewMessage::new("order.paid", &n).expect("JSON");
        database.enqueue_message(keyed.ordering_key("k"));
    }
    let text = drain(&database, &receiver, &["--max-messages", "0"])
        .code(0)
        .stdout;
    for line in [
        "4 due messages are left",
        "2 behind another message of the same ordering key",
        "2 held back by a pause, --max-messages or a signal",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}: {text}");
    }
}

/// R40: a job for some topics claims, counts and reports only these.
#[test]
fn drain_of_a_topic_leaves_the_others() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for topic in ["order.paid", "invoice.sent", "invoice.late", "mail"] {
        database.enqueue(topic, json!(1));
        database.enqueue_message(
            NewMessage::new(topic, &2)
                .expect("JSON")
                .ordering_key(format!("key of {topic}")),
        );
    }
    let topics = ["--topic", "invoice.*", "--topic", "mail"];
    let shown = drain(
        &database,
        &receiver,
        &[&topics, ["--json"].as_slice()].concat(),
    );
    let shown = shown.code(0).json();
    assert_eq!(
        (&shown["processed"], &shown["left_due"]),
        (&json!(6), &json!(0))
    );
    assert_eq!(shown["left"], json!([]));
    assert_eq!(
        database.text("SELECT string_agg(topic || attempts, ' ') FROM {o}"),
        Some("order.paid0 order.paid0".to_owned())
    );
    let shown = drain(&database, &receiver, &["--topic", "order.piad"]);
    assert!(shown.code(0).stdout.starts_with("processed 0, "));
    refused(database.binary(&["drain", "--topic", ""]), &["--topic"]);
    let shown = drain(&database, &receiver, &["--json"]).code(0).json();
    assert_eq!(shown["processed"], 2);
}

/// R10, R40: otherwise the drain would wait as long as the other relay lives.
#[test]
fn drain_beside_an_active_relay_says_so_and_ends() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let single = |arguments: &[&str]| {
        database
            .binary(arguments)
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_SINGLE_ACTIVE", "true")
    };
    let mut active = Running::start(single(&["run"]));
    active.wait_for_log("relay started");
    for arguments in [["drain"].as_slice(), &["drain", "--max-messages", "0"]] {
        let finished = finish(single(arguments)).code(1);
        for part in ["another relay", "is active", "nothing was drained"] {
            assert!(finished.stderr.contains(part), "{}", finished.stderr);
        }
    }
    active.signal("TERM");
    active.wait();
    database.enqueue("order.paid", json!(1));
    let text = finish(single(&["drain"])).code(0).stdout;
    assert!(text.starts_with("processed 1, "), "{text}");
}

/// R11: a job that delivered nothing and failed at something has not done its work.
#[test]
fn a_drain_of_which_every_send_failed_ends_with_1() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    database.enqueue_many(2);
    let finished = drain(&database, &receiver, &[]).code(1);
    assert!(finished.stdout.starts_with("processed 2, failed 2 "));
    assert!(finished.stderr.contains("no message was delivered"));
    // No message is due any more: nothing has failed in this run.
    drain(&database, &receiver, &[]).code(0);
}

/// R11, R16: the drain reports which messages it leaves, and why.
#[test]
fn drain_reports_messages_without_a_route_and_messages_that_wait_for_their_key() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    for n in 0..3 {
        let message = NewMessage::new("order.paid", &n).expect("JSON");
        database.enqueue_message(message.ordering_key("k"));
        let unrouted = NewMessage::new("member.joined", &n).expect("JSON");
        database.enqueue_message(unrouted.ordering_key("member"));
    }
    let file = File::new(&format!(
        "[destinations.billing]\nurl = '{}'\n[[routes]]\ntopic = 'order.*'\nto = 'billing'\n",
        receiver.url()
    ));
    let drain = |arguments: &[&str]| {
        finish(
            database
                .binary(&[&["drain"], arguments].concat())
                .with("OUTBOX_CONFIG", file.path())
                .with("OUTBOX_BACKOFF", "1h"),
        )
    };
    let text = drain(&[]).code(1).stdout;
    for line in [
        "5 due messages are left",
        "3 of member.joined: NO_ROUTE, no relay serves them",
        "2 behind another message of the same ordering key",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}: {text}");
    }
    assert!(!text.contains("held back"), "{text}");
    let shown = drain(&["--json"]).code(0).json();
    assert_eq!(
        shown["left"],
        json!([
            { "topic": "member.joined", "destination": "", "due": 3, "behind_their_key": 2, "no_route": true,
              "unserved": "no active relay has a route or a handler for this topic" },
            { "topic": "order.paid", "destination": "", "due": 2, "behind_their_key": 2, "no_route": false,
              "unserved": null },
        ])
    );
}

#[test]
fn drain_does_not_wait_for_messages_that_are_not_due() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let later = NewMessage::new("order.paid", &1)
        .expect("JSON")
        .delay(Duration::from_secs(3600));
    database.enqueue_message(later);
    database.enqueue("order.paid", json!(2));
    let shown = drain(&database, &receiver, &["--json"]).code(0).json();
    assert_eq!(shown["delivered"], 1);
    assert_eq!(database.count("pending"), 1);
}

/// R27.
#[test]
fn a_relay_that_is_not_enabled_sends_nothing() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.enqueue("order.paid", json!(1));
    let disabled = |arguments: &[&str]| {
        database
            .binary(arguments)
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_ENABLED", "false")
    };
    let text = finish(disabled(&["drain"])).code(0).stdout;
    assert!(text.contains("OUTBOX_ENABLED is false"), "{text}");

    let mut relay = Running::start(disabled(&["run"]));
    relay.wait_for_log("relay_disabled");
    // The relay runs and has polled many times: it renews its lease after a second and polls every 50 ms.
    eventually("the relay has renewed its lease", || {
        database.number("SELECT count(*) FROM {o}_lease WHERE renewed_at > started_at") == 1
    });
    for command in ["leases", "status"] {
        let text = finish(database.binary(&[command])).code(0).stdout;
        assert!(text.contains("switched off"), "{text}");
    }
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0));
    assert_eq!(receiver.count(), 0);
    assert_eq!(database.count("pending"), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

// --- Signals ------------------------------------------------------------------------------

/// A relay with a send in flight that ends only when the gate is opened.
fn sending(database: &Database, shutdown_timeout: &str) -> (Running, Receiver, Gate) {
    let (receiver, gate) = Receiver::held();
    database.enqueue("order.paid", json!(1));
    let relay = Running::start(
        database
            .binary(&["run"])
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_SEND_TIMEOUT", "100s")
            .with("OUTBOX_LEASE", "300s")
            .with("OUTBOX_SHUTDOWN_TIMEOUT", shutdown_timeout),
    );
    receiver.wait_for(1);
    (relay, receiver, gate)
}

#[test]
fn the_first_signal_lets_sends_finish() {
    for signal in ["TERM", "INT"] {
        let database = Database::new();
        let (mut relay, _receiver, gate) = sending(&database, "100s");
        relay.signal(signal);
        relay.wait_for_log("event=signal");
        assert!(relay.is_running());
        gate.open();
        assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
        assert_eq!(database.count("delivered"), 1);
        relay.wait_for_log("relay_stopped");
    }
}

#[test]
fn the_second_signal_ends_it_at_once() {
    let database = Database::new();
    let (mut relay, _receiver, _gate) = sending(&database, "100s");
    relay.signal("TERM");
    relay.wait_for_log("event=signal");
    let began = Instant::now();
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(1), "{}", relay.log());
    assert!(
        began.elapsed() < Duration::from_secs(30),
        "the relay did not wait for the send"
    );
    assert_eq!(database.count("sending"), 1);
}

#[test]
fn a_shutdown_that_does_not_come_to_its_end_in_time_is_a_failure() {
    let database = Database::new();
    let (mut relay, _receiver, _gate) = sending(&database, "300ms");
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(1), "{}", relay.log());
    assert!(
        relay.log().contains("1 messages were not settled"),
        "{}",
        relay.log()
    );
}

// --- Logs ---------------------------------------------------------------------------------

/// R30, R36, R37.
#[test]
fn json_logs_carry_the_event_names_and_never_what_is_private() {
    let database = Database::new();
    let (gate, pass) = Gate::new();
    let receiver = Receiver::start(move |request, stream| {
        let is_first = request.header("outbox-attempt") == Some("1");
        let code = match request.json()["case"].as_str() {
            Some("retry") if is_first => 500,
            Some("dead") => 400,
            Some("conflict") => {
                // Until the test has assigned the message to another lease.
                pass();
                200
            }
            _ => 200,
        };
        stream.write_all(&status(code))
    });
    let mut database_url = url::Url::parse(&database.url).expect("a URL");
    database_url
        .set_password(Some("sauce-database"))
        .expect("a URL with a host");
    let url = receiver
        .url()
        .replace("http://", "http://shop:sauce-password@")
        + "/services/T0/sauce-path?t=sauce-query";
    let mut relay = Running::start(
        database
            .binary(&["run"])
            .with("DATABASE_URL", database_url.as_str())
            .with("OUTBOX_URL", &url)
            .with("OUTBOX_LOG_FORMAT", "json")
            .with("OUTBOX_SEND_TIMEOUT", "50s")
            .with("OUTBOX_LEASE", "150s")
            .with("RUST_LOG", "debug"),
    );
    let message = |case: &str, key: &str| {
        let payload = json!({ "case": case, "private": "sauce-payload" });
        NewMessage::new("order.paid", &payload)
            .expect("JSON")
            .idempotency_key(key)
            .tenant_id(uuid::Uuid::from_u128(7))
            .header("x-token", "sauce-header")
    };
    for case in ["delivered", "retry", "dead"] {
        database.enqueue_message(message(case, &format!("sauce-key-{case}")));
    }
    eventually("the messages are settled", || {
        database.count("delivered") == 2 && database.count("dead") == 1
    });
    database.enqueue_message(message("delivered", "sauce-key-delivered"));
    relay.wait_for_log("\"event\":\"dedup_hit\"");
    database.enqueue_message(message("conflict", "sauce-key-conflict"));
    receiver.wait_for(5);
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('other:1', now() + interval '1 h')",
    );
    database.execute("UPDATE {o} SET locked_by = (SELECT max(id) FROM {o}_lease)");
    gate.open();
    relay.wait_for_log("\"event\":\"conflict\"");
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    eventually("the log is read to its end", || {
        relay.log().contains("relay_stopped")
    });

    let log = relay.log();
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    for event in [
        "relay_started",
        "delivered",
        "retry",
        "dead",
        "dedup_hit",
        "conflict",
        "signal",
        "relay_stopped",
    ] {
        assert!(
            lines.iter().any(|line| line["event"] == event),
            "{event}: {log}"
        );
    }
    for line in &lines {
        for key in ["time", "level", "message", "target"] {
            assert!(line[key].is_string(), "{line}");
        }
        // Only our own lines have an event.
        let is_ours = line["target"]
            .as_str()
            .is_some_and(|target| target.starts_with("diesel_outbox"));
        let is_event = line["event"].as_str().is_some_and(|event| {
            event
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        });
        assert_eq!(is_ours, is_event, "{line}");
    }
    let line = |event: &str| {
        lines
            .iter()
            .find(|line| line["event"] == event)
            .expect("it is there")
    };
    assert_eq!(line("delivered")["status"], "delivered");
    assert_eq!(line("delivered")["topic"], "order.paid");
    assert_eq!(line("delivered")["attempts"], 1);
    assert_eq!(line("delivered")["key"].as_str().map(str::len), Some(16));
    assert_eq!(line("retry")["reason"], "SERVER_ERROR");
    assert_eq!(line("retry")["status"], "retrying");
    assert_eq!(line("dead")["reason"], "REJECTED");
    assert_eq!(line("dead")["status"], "dead");
    // R36.
    for event in ["delivered", "retry", "dead", "dedup_hit", "conflict"] {
        let tenant = &line(event)["tenant"];
        assert_eq!(tenant, "00000000-0000-0000-0000-000000000007", "{event}");
    }
    // R37: the lease that holds the message now.
    let conflict = line("conflict");
    for (name, value) in [
        ("destination", json!("default")),
        ("outcome", json!("delivered")),
        ("status", json!("sending")),
        ("attempts", json!(0)),
        ("holder", json!("other:1")),
    ] {
        assert_eq!(conflict[name], value, "{conflict}");
    }
    assert!(conflict["holder_lease"].as_i64() > conflict["lease"].as_i64());
    assert_eq!(conflict["message_id"].as_str().map(str::len), Some(36));
    let private: Vec<&Value> = lines
        .iter()
        .filter(|line| line.to_string().contains("sauce"))
        .collect();
    assert!(private.is_empty(), "private values in the log: {private:?}");
}

/// R30. Only an operator holds a lock for so long: the relay reports that its statement was too slow.
#[test]
fn a_statement_that_takes_too_long_is_a_db_timeout() {
    let database = Database::new();
    let relay = Running::start(
        database
            .binary(&["run"])
            .with("OUTBOX_URL", "http://127.0.0.1:9/")
            .with("RUST_LOG", "diesel_outbox=debug"),
    );
    relay.wait_for_log("event=relay_started");
    let mut conn = database.connect();
    let lock = format!("BEGIN; LOCK TABLE {}", database.name());
    conn.batch_execute(&lock).expect("locked");
    relay.wait_for_log("event=db_timeout");
    conn.batch_execute("ROLLBACK").expect("unlocked");
    relay.wait_for_log("event=db_recovered");
    assert!(!relay.log().contains("event=db_error"), "{}", relay.log());
    // An error that only quotes a timeout, raised by a trigger, does not count.
    database.execute(
        "CREATE FUNCTION {o}_refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE 'canceling statement due to lock timeout'; END $$",
    );
    database.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON {o} FOR EACH ROW EXECUTE FUNCTION {o}_refuse()",
    );
    let before = relay.log().matches("event=db_timeout").count();
    database.enqueue("order.paid", json!(1));
    relay.wait_for_log("event=db_error");
    assert_eq!(relay.log().matches("event=db_timeout").count(), before);
}

#[test]
fn text_logs_have_one_line_for_each_event() {
    let database = Database::new();
    // The receiver's response tries to forge a log line.
    let receiver = Receiver::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 500 No\r\ncontent-length: 22\r\n\r\n\nforged event=delivered")
    });
    database.enqueue("order.paid", json!(1));
    let relay = Running::start(
        database
            .binary(&["run"])
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_BACKOFF", "1h"),
    );
    relay.wait_for_log("event=retry");
    let log = relay.log();
    assert!(
        log.lines().all(|line| line.contains(" event=")),
        "a line without an event: {log}"
    );
    assert!(!log.contains("event=delivered"), "{log}");
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
