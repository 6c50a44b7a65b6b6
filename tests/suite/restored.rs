//! What `pg_dump` writes can be restored: as a whole, and the data alone into an outbox that was just created.

use std::process::{Command, Stdio};

use diesel::RunQueryDsl;
use diesel::connection::SimpleConnection;
use serde_json::{Value, json};

use crate::fresh::FreshDatabase;
use crate::support::{Receiver, binary, end, eventually, finish};

/// Runs a program of PostgreSQL's client to its end.
fn run(program: &str, arguments: &[&str]) {
    let done = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program} of PostgreSQL's client is installed: {error}"));
    let told = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program} {arguments:?}: {told}");
}

/// Whether the installed `pg_dump` is as new as the server, which it has to be.
fn can_dump(database: &FreshDatabase) -> bool {
    let version = Command::new("pg_dump").arg("--version").output();
    let version = version.expect("pg_dump of PostgreSQL's client is installed");
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let words = version.split_whitespace();
    let mut majors = words.filter_map(|word| word.split('.').next()?.parse::<i64>().ok());
    let client = majors.next().expect("pg_dump names its version");
    let server = "SELECT current_setting('server_version_num')::int / 10000";
    let server = database.number(server);
    if client < server {
        eprintln!("not run: pg_dump {client} cannot dump from PostgreSQL {server}");
    }
    client >= server
}

/// A database whose outbox has something in each table, in several parts of the ledger.
fn used() -> FreshDatabase {
    let database = migrated();
    let receiver = Receiver::answering(|request| match request.json()["n"].as_i64() {
        Some(1) => 400,
        _ => 200,
    });
    let relay = || with_feed(&database, &receiver).start().expect("a relay");
    let send = |n: i64| {
        database.execute(&format!(
            "INSERT INTO outbox (topic, payload) VALUES ('order.paid', '{{\"n\": {n}}}')"
        ));
        eventually("the message is settled", || {
            database.number("SELECT count(*) FROM outbox") == 0
        });
    };
    let first = relay();
    send(1);
    send(2);
    end(&first);
    // The next part is opened.
    database.execute(
        "UPDATE outbox_part SET opened_at = now() - interval '1 year' WHERE part = 0;
         SELECT outbox_rotate('2 years'); SELECT outbox_rotate('2 years')",
    );
    let second = relay();
    send(3);
    end(&second);
    database.execute(
        "INSERT INTO outbox_endpoint (name, url) VALUES ('acme', 'https://a.example/'), ('gone', 'https://a.example/');
         INSERT INTO outbox_endpoint (name, kind, topics) VALUES ('crm', 'feed', '{nothing}');
         INSERT INTO outbox_feed (name, registration, base, base_id) SELECT name, id, 7, gen_random_uuid() FROM outbox_endpoint WHERE name = 'crm';
         INSERT INTO outbox_feed_reader (feed, token_digest, last_position) VALUES ('crm', 'a digest', 7);
         DELETE FROM outbox_endpoint WHERE name = 'gone';
         INSERT INTO outbox (topic, payload, available_at) VALUES ('order.paid', '{\"n\": 4}', 'infinity')",
    );
    database
}

/// A relay of a webhook and of a feed, which get all messages.
fn with_feed(database: &FreshDatabase, receiver: &Receiver) -> diesel_outbox::RelayBuilder {
    diesel_outbox::Relay::builder(&database.url)
        .url(&receiver.url())
        .feed("audit")
        .route_to_each("*", &["default", "audit"])
}

fn migrated() -> FreshDatabase {
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    diesel_outbox::migrate(conn, &"outbox".parse().expect("a name")).expect("migrated");
    database
}

/// The findings of `check` that are not good, besides those of messages.
fn findings(database: &FreshDatabase) -> Vec<Value> {
    let mut check = binary(&["check", "--json", "--url", "http://127.0.0.1:9/"]);
    check.env("DATABASE_URL", &database.url);
    let found = finish(check).code(0).json();
    let found = found["findings"].as_array().expect("an array").clone();
    let bad = |finding: &Value| finding["level"] != json!("ok");
    found.into_iter().filter(bad).collect()
}

/// All rows of the outbox, of its ring, and the next number.
fn content(database: &FreshDatabase) -> String {
    let tables = [
        "outbox",
        "outbox_part",
        "outbox_ledger",
        "outbox_attempt",
        "outbox_dead",
        "outbox_lease",
        "outbox_pause",
        "outbox_endpoint",
        "outbox_inbox",
        "outbox_feed",
        "outbox_feed_event",
        "outbox_feed_part",
        "outbox_feed_reader",
        "outbox_feed_position",
        "(SELECT last_value FROM outbox_sequence_seq)",
    ];
    let rows = tables.map(|table| {
        let select = format!(
            "(SELECT coalesce(string_agg(r::text, E'\\n' ORDER BY r::text), '') FROM {table} r)"
        );
        diesel::select(diesel::dsl::sql::<diesel::sql_types::Text>(&select))
            .get_result::<String>(&mut database.connect())
            .unwrap_or_else(|error| panic!("{table}: {error}"))
    });
    rows.join("\n")
}

/// R32: constraints, indexes, triggers, view and functions are those of this version.
#[test]
fn a_restored_outbox_is_equal_and_works() {
    let (from, to) = (used(), FreshDatabase::new());
    if !can_dump(&from) {
        return;
    }
    let file = tempfile();
    run("pg_dump", &["--format=custom", "--file", &file, &from.url]);
    run(
        "pg_restore",
        &[
            "--exit-on-error",
            "--clean",
            "--if-exists",
            "--no-owner",
            "--dbname",
            &to.url,
            &file,
        ],
    );
    std::fs::remove_file(&file).expect("removed");
    assert_eq!(content(&to), content(&from));
    assert_eq!(findings(&to), Vec::<Value>::new());
    works(&to);
}

/// R26: with an application that migrates before its data is restored.
#[test]
fn restored_data_fits_a_new_outbox() {
    let from = used();
    if !can_dump(&from) {
        return;
    }
    for format in [
        &["--format=custom"][..],
        &["--format=custom", "--rows-per-insert=1"],
    ] {
        let (to, file) = (migrated(), tempfile());
        let dump = ["--data-only", "--file", &file, &from.url];
        run("pg_dump", &[format, &dump].concat());
        run(
            "pg_restore",
            &[
                "--data-only",
                "--single-transaction",
                "--dbname",
                &to.url,
                &file,
            ],
        );
        std::fs::remove_file(&file).expect("removed");
        assert_eq!(content(&to), content(&from), "{format:?}");
        assert_eq!(findings(&to), Vec::<Value>::new());
        // The recorded migrations still count.
        let name = "outbox".parse().expect("a name");
        let again = diesel_outbox::migrate(&mut to.connect(), &name);
        assert_eq!(again.expect("migrated"), Vec::<String>::new());
        works(&to);
    }
}

fn tempfile() -> String {
    let name = format!("outbox-{}.dump", uuid::Uuid::now_v7().simple());
    let path = std::env::temp_dir().join(name);
    path.to_str().expect("UTF-8").to_owned()
}

fn works(database: &FreshDatabase) {
    let receiver = Receiver::ok();
    let relay = with_feed(database, &receiver).start().expect("a relay");
    database
        .connect()
        .batch_execute("INSERT INTO outbox (topic, payload) VALUES ('order.paid', '{}')")
        .expect("inserted");
    receiver.wait_for(1);
    end(&relay);
}

/// What a consumer of the feed gets after this cursor: the number of events and the next cursor, or the error.
fn read(database: &FreshDatabase, after: &str) -> Result<(usize, String), String> {
    let mut read = binary(&["feed", "read", "audit", "--after", after]);
    read.env("DATABASE_URL", &database.url);
    let read = finish(read);
    let next = read
        .stderr
        .lines()
        .find_map(|line| line.strip_prefix("next: "));
    match next {
        Some(next) => Ok((read.stdout.lines().count(), next.to_owned())),
        None => Err(read.stderr.clone()),
    }
}

/// R73: a consumer whose cursor is of events that the restored database has never had is told, also when other events have
/// their positions by now.
#[test]
fn r73_a_consumer_of_a_restored_feed_learns_of_it() {
    let (from, to) = (used(), FreshDatabase::new());
    if !can_dump(&from) {
        return;
    }
    let file = tempfile();
    run("pg_dump", &["--format=custom", "--file", &file, &from.url]);
    let dumped = read(&from, "begin").expect("events");
    assert_eq!(dumped.0, 3);
    works(&from);
    let (more, lost) = read(&from, &dumped.1).expect("an event that the dump lacks");
    assert_eq!(more, 1);
    let restore = ["--exit-on-error", "--no-owner", "--dbname", &to.url, &file];
    run("pg_restore", &restore);
    std::fs::remove_file(&file).expect("removed");
    let told = |why: &str| {
        let error = read(&to, &lost).expect_err("the cursor is of another feed");
        assert!(
            error.contains("was restored") && error.contains(why),
            "{error}"
        );
    };
    told("last position is 3");
    assert_eq!(read(&to, &dumped.1), Ok((0, dumped.1.clone())));
    // Another event at the same position.
    works(&to);
    told("last position is 4");
    assert_eq!(read(&to, &dumped.1).expect("it continues").0, 1);
}
