//! Migrations, names, and the required properties of the tables.

use std::process::Stdio;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::sql_types::{BigInt, Text};
use diesel::{Connection, QueryableByName, RunQueryDsl, sql_query};
use diesel_outbox::Direction;
use diesel_outbox::admin;
use diesel_outbox::program;
use diesel_outbox::{DatabaseError, NewMessage, Outbox, Relay, StartError, inbox};
use serde_json::json;

use crate::fresh::FreshDatabase;
use crate::support::{Database, Gate, Receiver, binary, end, eventually, finish};

/// The binary with this database.
fn command(database: &FreshDatabase, arguments: &[&str]) -> std::process::Command {
    let mut command = binary(arguments);
    command.env("DATABASE_URL", &database.url);
    command
}

/// Enqueues with the library and delivers with the library's relay, in the outbox with this name.
#[track_caller]
fn works(database: &FreshDatabase, name: &str) {
    let receiver = Receiver::ok();
    let outbox = Outbox::new(name).expect("a name");
    let message = NewMessage::new("order.paid", &json!({ "n": 1 })).expect("JSON");
    database
        .connect()
        .transaction(|conn| outbox.enqueue(conn, message))
        .expect("enqueued");
    let relay = Relay::builder(&database.url)
        .outbox(name)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    receiver.wait_for(1);
    end(&relay);
    assert_eq!(relay.stats().delivered, 1);
}

// --- Migrations ---------------------------------------------------------------------------

#[test]
fn migrating_again_changes_nothing() {
    let database = FreshDatabase::new();
    let name = "outbox".parse().expect("a name");
    let mut conn = database.connect();
    let done = diesel_outbox::migrate(&mut conn, &name).expect("migrations run");
    assert!(!done.is_empty());
    database.execute("INSERT INTO outbox (topic, payload) VALUES ('t', '1')");
    let objects = database.objects();
    let done = diesel_outbox::migrate(&mut conn, &name).expect("migrations run");
    assert_eq!(done, Vec::<String>::new());
    let migrate = finish(command(&database, &["migrate"])).code(0);
    assert!(migrate.stdout.contains("up to date"), "{}", migrate.stdout);
    assert_eq!(database.objects(), objects);
    assert_eq!(database.number("SELECT count(*) FROM outbox"), 1);
}

#[test]
fn eight_migrations_at_once_make_one_outbox() {
    let database = FreshDatabase::new();
    let migrations: Vec<_> = (0..8)
        .map(|_| {
            command(&database, &["migrate"])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("the binary starts")
        })
        .collect();
    let mut created = 0;
    for migration in migrations {
        let output = migration.wait_with_output().expect("our child");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        if !String::from_utf8_lossy(&output.stdout).contains("up to date") {
            created += 1;
        }
    }
    assert_eq!(created, 1, "exactly one migration created the outbox");
    works(&database, "outbox");
}

#[test]
fn eight_processes_at_once_create_one_inbox() {
    let database = FreshDatabase::new();
    let barrier = std::sync::Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut conn = database.connect();
                barrier.wait();
                inbox::create(&mut conn).expect("the inbox is there");
            });
        }
    });
    assert_eq!(database.number("SELECT count(*) FROM outbox_inbox"), 0);
}

/// R50: a role that may only connect can hold any advisory lock, so a migration must wait for none.
#[test]
fn a_migration_takes_no_lock_that_any_role_may_hold() {
    let database = FreshDatabase::new();
    let name = "outbox".parse().expect("a name");
    let mut conn = database.connect();
    let advisory = conn.test_transaction(|conn| {
        inbox::create(conn).expect("the inbox is there");
        diesel_outbox::migrate(conn, &name).expect("migrations run");
        program::revert_migrations(conn).expect("migrations are reverted");
        diesel::select(sql::<BigInt>(
            "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())",
        ))
        .get_result::<i64>(conn)
    });
    assert_eq!(advisory, 0);
}

#[test]
fn migrations_are_recorded_apart_from_the_applications_own() {
    let database = FreshDatabase::new();
    database.execute(
        "CREATE TABLE __diesel_schema_migrations (version varchar(50) PRIMARY KEY, run_on timestamp NOT NULL DEFAULT now());
         INSERT INTO __diesel_schema_migrations VALUES ('20260101000000')",
    );
    finish(command(&database, &["migrate"])).code(0);
    assert_eq!(
        database.number("SELECT count(*) FROM __diesel_schema_migrations"),
        1
    );
    assert_eq!(
        database.number("SELECT count(*) FROM outbox_migrations WHERE version LIKE '2026-%'"),
        database.number("SELECT count(*) FROM outbox_migrations")
    );
    assert!(database.number("SELECT count(*) FROM outbox_migrations") > 0);
}

/// A database from before the inbox existed.
#[test]
fn a_database_that_has_the_older_migrations_gets_the_newer_ones() {
    const OLDER: [(&str, &str); 2] = [
        (
            "2026-11-20-000001_outbox_functions",
            include_str!("../../migrations/2026-11-20-000001_outbox_functions/up.sql"),
        ),
        (
            "2026-11-20-000002_first_outbox",
            include_str!("../../migrations/2026-11-20-000002_first_outbox/up.sql"),
        ),
    ];
    let database = FreshDatabase::new();
    let before = database.objects();
    database.execute("CREATE TABLE outbox_migrations (version text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())");
    for (version, up) in OLDER {
        database.execute(up);
        database.execute(&format!(
            "INSERT INTO outbox_migrations (version) VALUES ('{version}')"
        ));
    }
    // A current relay works on the old schema.
    works(&database, "outbox");
    let name = "outbox".parse().expect("a name");
    let mut conn = database.connect();
    let done = diesel_outbox::migrate(&mut conn, &name).expect("migrations run");
    assert_eq!(done, ["applied 2026-11-21-000003_inbox"]);
    works(&database, "outbox");
    program::revert_migrations(&mut conn).expect("reverted");
    assert_eq!(database.objects(), before);
}

#[test]
fn reverting_leaves_nothing_and_migrating_after_it_works() {
    let database = FreshDatabase::new();
    let name = "outbox".parse().expect("a name");
    let before = database.objects();
    let mut conn = database.connect();
    diesel_outbox::migrate(&mut conn, &name).expect("migrations run");
    assert!(database.objects() > before);
    program::revert_migrations(&mut conn).expect("reverted");
    assert_eq!(database.objects(), before);
    diesel_outbox::migrate(&mut conn, &name).expect("migrations run");
    works(&database, "outbox");
}

#[test]
fn a_table_of_the_applications_that_has_our_name_is_not_taken_for_ours_nor_dropped() {
    let database = FreshDatabase::new();
    let mut conn = database.connect();
    conn.batch_execute("CREATE TABLE outbox (precious text); INSERT INTO outbox VALUES ('a')")
        .expect("a table of its own");
    // The name is taken: migrate changes nothing.
    let default = "outbox".parse().expect("a name");
    let error = diesel_outbox::migrate(&mut conn, &default).expect_err("the name is taken");
    assert!(
        error.to_string().contains("a table of this name already"),
        "{error}"
    );
    conn.batch_execute("CREATE SCHEMA hrm").expect("a schema");
    let name = "hrm.outbox".parse().expect("a name");
    diesel_outbox::migrate(&mut conn, &name).expect("migrations run");
    works(&database, "hrm.outbox");
    conn.batch_execute("SELECT outbox_drop('hrm.outbox')")
        .expect("dropped");
    program::revert_migrations(&mut conn).expect("reverted");
    assert_eq!(database.number("SELECT count(*) FROM outbox"), 1);
}

#[test]
fn the_printed_sql_makes_a_working_outbox_and_the_printed_down_undoes_it() {
    let database = FreshDatabase::new();
    let before = database.objects();
    // Printing needs no database.
    let up = finish(binary(&["migrate", "--print"])).code(0).stdout;
    let down = finish(binary(&["migrate", "--print", "--down"]))
        .code(0)
        .stdout;
    assert_eq!(
        up.trim_end(),
        admin::migration_sql(Direction::Up, &"outbox".parse().expect("a name")).trim_end()
    );
    database.execute(&up);
    works(&database, "outbox");
    finish(command(&database, &["status"])).code(0);
    database.execute(&down);
    assert_eq!(database.objects(), before);
}

#[test]
fn printed_sql_is_for_the_outbox_that_is_set() {
    let database = FreshDatabase::new();
    database.execute("CREATE SCHEMA hrm");
    let before = database.objects();
    let printed = |arguments: &[&str]| finish(binary(arguments)).code(0).stdout;
    let up = printed(&["migrate", "--print", "--table", "hrm.outbox"]);
    let down = printed(&["migrate", "--print", "--down", "--table", "hrm.outbox"]);
    database.execute(&up);
    works(&database, "hrm.outbox");
    let elsewhere = "SELECT count(*) FROM pg_class WHERE relname = 'outbox' AND relnamespace = 'public'::regnamespace";
    assert_eq!(database.number(elsewhere), 0);
    database.execute(&down);
    assert_eq!(database.objects(), before);
}

#[test]
fn an_outbox_of_an_applications_own_migration_is_adopted() {
    let database = FreshDatabase::new();
    database.execute(&finish(binary(&["migrate", "--print"])).code(0).stdout);
    let first = finish(command(&database, &["migrate"])).code(0).stdout;
    assert!(first.contains("by a migration of yours"), "{first}");
    let again = finish(command(&database, &["migrate"])).code(0).stdout;
    assert!(again.contains("up to date"), "{again}");
    works(&database, "outbox");
}

#[test]
fn migrating_for_another_outbox_makes_no_outbox_besides() {
    let database = FreshDatabase::new();
    database.execute("CREATE SCHEMA hrm");
    finish(command(&database, &["migrate", "--table", "hrm.outbox"])).code(0);
    assert_eq!(
        database.number("SELECT count(*) FROM pg_class WHERE relname = 'outbox'"),
        1
    );
    works(&database, "hrm.outbox");
    finish(command(&database, &["migrate"])).code(0);
    works(&database, "outbox");
}

#[test]
fn an_outbox_that_cannot_be_created_is_named_in_one_sentence() {
    let database = FreshDatabase::new();
    finish(command(&database, &["migrate"])).code(0);
    for (name, said) in [
        ("outbox", "a table of this name already exists"),
        ("nowhere.outbox", "there is no schema nowhere"),
    ] {
        let error = database
            .connect()
            .batch_execute(&format!("SELECT outbox_create('{name}')"))
            .expect_err(name)
            .to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn endpoints_are_a_part_that_is_added_once_to_an_outbox_that_is_there() {
    let database = FreshDatabase::new();
    finish(command(&database, &["migrate"])).code(0);
    let refused = |name: &str, said: &str| {
        let error = database
            .connect()
            .batch_execute(&format!("SELECT outbox_create_endpoints('{name}')"))
            .expect_err(name)
            .to_string();
        assert!(error.contains(said), "{error}");
    };
    refused("outbox", "the table outbox_endpoint already exists");
    refused("later", "there is no outbox later in the schema public");
    let before = database.objects();
    database.execute("SELECT outbox_create('later')");
    let limit = "SELECT outbox_endpoint_limit('later', 10)";
    let error = database
        .connect()
        .batch_execute(limit)
        .expect_err("no tables");
    assert!(
        error.to_string().contains("outbox_create_endpoints"),
        "{error}"
    );
    // Enqueueing needs no endpoints, even for a destination that the message names.
    database.execute("INSERT INTO later (topic, destination, payload) VALUES ('a', 'b', '1')");
    database.execute("SELECT outbox_create_endpoints('later'); DELETE FROM later");
    works(&database, "later");
    // An outbox without the part is dropped, too.
    database.execute("SELECT outbox_drop('later')");
    database.execute("SELECT outbox_create('later')");
    database.execute("SELECT outbox_drop('later')");
    assert_eq!(database.objects(), before);
}

#[test]
fn psql_runs_the_printed_sql() {
    let database = FreshDatabase::new();
    let psql = |arguments: &[&str]| {
        std::process::Command::new("psql")
            .args(["--no-psqlrc", "--set=ON_ERROR_STOP=1", "--quiet"])
            .arg(format!("--dbname={}", database.url))
            .args(arguments)
            .stdin(Stdio::null())
            .output()
    };
    for arguments in [
        ["migrate", "--print"].as_slice(),
        &["migrate", "--print", "--down"],
        &["migrate", "--print"],
    ] {
        let sql = finish(binary(arguments)).code(0).stdout;
        let output = psql(&["-c", &sql]).expect("psql is there: `make test` installs it");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
    }
    works(&database, "outbox");
}

// --- Names --------------------------------------------------------------------------------

/// R3.
#[test]
fn outboxes_of_any_good_name_work_beside_each_other() {
    let database = FreshDatabase::new();
    database.execute("CREATE SCHEMA hrm; CREATE SCHEMA \"Select\"");
    let receiver = Receiver::ok();
    let names = [
        "outbox",
        "org_outbox",
        "hrm.outbox",
        "Select.Table",
        "Order-Events",
        "order",
        "select",
        "_x$1",
    ];
    for name in names {
        let migrate = finish({
            let mut migrate = command(&database, &["migrate"]);
            migrate.env("OUTBOX_TABLE", name);
            migrate
        })
        .code(0);
        assert!(migrate.stdout.contains(name), "{}", migrate.stdout);
        works(&database, name);

        // The same with the binary and with plain SQL.
        let quoted = name.replace('.', "\".\"");
        database.execute(&format!(
            "INSERT INTO \"{quoted}\" (topic, payload) VALUES ('order.paid', '\"{name}\"')"
        ));
        for arguments in [
            ["drain", "--json"],
            ["status", "--json"],
            ["check", "--json"],
        ] {
            let mut command = command(&database, &arguments);
            command
                .env("OUTBOX_TABLE", name)
                .env("OUTBOX_URL", receiver.url());
            let shown = finish(command).code(0).json();
            match arguments[0] {
                "drain" => assert_eq!(shown["delivered"], 1, "{name}"),
                "status" => assert_eq!(shown["counts"]["delivered"], 2, "{name}"),
                _ => assert_eq!(shown["ok"], true, "{name}"),
            }
        }
        let requests = receiver.requests();
        let last = requests.last().expect("a request");
        assert_eq!(last.json(), json!(name));
        assert_eq!(
            last.header("ce-source"),
            Some(format!("diesel-outbox/{name}").as_str())
        );
    }
    assert_eq!(receiver.count(), names.len(), "the outboxes are separate");
}

#[test]
fn a_name_that_is_not_one_never_reaches_sql() {
    let database = FreshDatabase::new();
    finish(command(&database, &["migrate"])).code(0);
    let objects = database.objects();
    let long = "x".repeat(49);
    for name in [
        "",
        ".",
        "a.",
        "a.b.c",
        "1a",
        "a b",
        "a\"b",
        "a'b",
        "outbox; DROP TABLE outbox",
        "tabelle_ä",
        "a\nb",
        &long,
    ] {
        assert!(Outbox::new(name).is_err(), "{name:?}");
        let error = Relay::builder(&database.url)
            .outbox(name)
            .start()
            .expect_err("not a name");
        assert!(matches!(error, StartError::Config(_)), "{error:?}");
        for arguments in [["migrate"], ["status"]] {
            let mut command = command(&database, &arguments);
            command.env("OUTBOX_TABLE", name);
            let refused = finish(command).code(2);
            assert!(
                refused.stderr.contains("OUTBOX_TABLE"),
                "{}",
                refused.stderr
            );
        }
        let literal = name.replace('\'', "''");
        for function in ["outbox_create", "outbox_create_endpoints", "outbox_drop"] {
            let error = diesel::connection::SimpleConnection::batch_execute(
                &mut database.connect(),
                &format!("SELECT {function}('{literal}')"),
            )
            .expect_err("not a name");
            assert!(error.to_string().contains("bad outbox name"), "{error}");
        }
    }
    assert_eq!(database.objects(), objects);
}

#[test]
fn outbox_drop_removes_everything_of_its_outbox_and_nothing_else() {
    let database = FreshDatabase::new();
    database.execute("CREATE SCHEMA hrm");
    finish(command(&database, &["migrate"])).code(0);
    let before = database.objects();
    database.execute("SELECT outbox_create('hrm.Events'), outbox_create_endpoints('hrm.Events')");
    assert!(database.objects() > before);
    works(&database, "hrm.Events");
    database.execute("SELECT outbox_drop('hrm.Events')");
    assert_eq!(database.objects(), before);
    works(&database, "outbox");
}

// --- The tables ---------------------------------------------------------------------------

#[test]
fn no_index_and_no_index_predicate_names_what_a_claim_changes() {
    let database = Database::new();
    assert!(
        database.number(
            "SELECT count(*) FROM pg_index WHERE indrelid = '{o}'::regclass AND indisvalid"
        ) >= 3
    );
    assert_eq!(
        database.number(
            "SELECT count(*) FROM pg_index
              WHERE indrelid = '{o}'::regclass
                AND pg_get_indexdef(indexrelid) ~ 'locked_by|locked_at|attempts|last_error'"
        ),
        0
    );
}

#[test]
fn a_claim_is_a_hot_update() {
    let database = Database::new();
    database.enqueue_many(500);
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 500
    });
    end(&relay);
    let updates = |column: &str| {
        database.number(&format!(
            "SELECT {column} FROM pg_stat_all_tables WHERE relid = '{{o}}'::regclass"
        ))
    };
    eventually("the updates are counted", || updates("n_tup_upd") >= 500);
    assert_eq!(updates("n_tup_hot_upd"), updates("n_tup_upd"));
}

#[test]
fn the_view_shows_every_state() {
    let database = Database::new();
    let (gate, pass) = Gate::new();
    let receiver = Receiver::start(move |request, stream| {
        let status = match request.json().as_str() {
            Some("sending") => {
                pass();
                200
            }
            Some("dead") => 400,
            Some("retrying") => 500,
            _ => 200,
        };
        std::io::Write::write_all(stream, &crate::support::status(status))
    });
    for state in ["delivered", "dead", "retrying", "sending"] {
        database.enqueue("order.paid", json!(state));
    }
    database.execute(
        "INSERT INTO {o} (topic, payload, available_at)
         VALUES ('order.paid', '\"pending\"', now() + interval '1 day')",
    );
    let relay = database
        .relay()
        .send_timeout(Duration::from_secs(100))
        .lease(Duration::from_secs(300))
        .backoff("1h".parse().expect("a backoff"))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    receiver.wait_for(4);
    eventually("three messages are settled", || {
        ["delivered", "dead", "retrying"]
            .iter()
            .all(|state| database.count(state) == 1)
    });
    assert_eq!(
        database
            .text("SELECT string_agg(status, ' ' ORDER BY status) FROM {o}_messages")
            .as_deref(),
        Some("dead delivered pending retrying sending")
    );
    gate.open();
    eventually("the message is delivered", || {
        database.count("delivered") == 2
    });
    end(&relay);
}

#[test]
fn a_table_that_is_not_as_needed_is_named_and_nothing_starts() {
    for (change, named) in [
        ("ALTER TABLE {o} DROP COLUMN digest", "no column digest"),
        (
            "ALTER TABLE {o}_ledger DROP COLUMN response",
            "no column response",
        ),
        (
            "ALTER TABLE {o} ALTER COLUMN digest TYPE text",
            "column digest",
        ),
        ("DROP TABLE {o}_pause", "_pause"),
        ("DROP VIEW {o}_messages", "_messages"),
        ("DROP INDEX {o}_idempotency", "no unique index"),
        ("SELECT public.outbox_drop('{o}')", "there is no outbox"),
    ] {
        let database = Database::new();
        database.execute(change);
        let relay = database.relay().url("http://127.0.0.1:9/");
        let error = relay.start().expect_err(change);
        assert!(
            matches!(&error, StartError::Database(DatabaseError::Schema(text)) if text.contains(named)),
            "{change}: {error:?}"
        );
        for arguments in [["run"], ["drain"], ["status"], ["check"]] {
            let mut command = database.binary(&arguments);
            command.env("OUTBOX_URL", "http://127.0.0.1:9/");
            let failed = finish(command).code(1);
            let shown = failed.stdout + &failed.stderr;
            assert!(shown.contains(named), "{change}: {shown}");
        }
    }
}

#[test]
fn a_damaged_outbox_is_reported_with_sql_that_repairs_it() {
    for suffix in ["_pause", "_lock", "_lease", "_dead"] {
        let database = FreshDatabase::new();
        finish(command(&database, &["migrate"])).code(0);
        database.execute(&format!("DROP TABLE outbox{suffix} CASCADE"));
        for arguments in [&["migrate"] as &[&str], &["status"]] {
            let failed = finish(command(&database, arguments)).code(1);
            let damaged =
                format!("the outbox outbox is damaged: the table outbox{suffix} is missing");
            assert!(failed.stderr.contains(&damaged), "{}", failed.stderr);
            assert!(
                !failed.stderr.contains("run `diesel-outbox migrate`"),
                "{}",
                failed.stderr
            );
            let (_, repair) = failed
                .stderr
                .split_once("create an empty one: ")
                .expect("a repair");
            if arguments == ["status"] {
                database.execute(repair.trim());
            }
        }
        // Dropping some of these tables also dropped the view.
        let shown = finish(command(&database, &["migrate"]));
        if shown.status.code() == Some(0) {
            works(&database, "outbox");
        } else {
            assert!(
                shown.stderr.contains("the view outbox_messages is missing"),
                "{}",
                shown.stderr
            );
        }
    }
}

#[test]
fn a_migration_that_finds_a_column_missing_says_how_to_restore_the_column() {
    let database = FreshDatabase::new();
    finish(command(&database, &["migrate"])).code(0);
    database.execute("ALTER TABLE outbox DROP COLUMN digest");
    let failed = finish(command(&database, &["migrate"])).code(1);
    let (told, repair) = failed
        .stderr
        .split_once(": ALTER TABLE ")
        .expect("a repair");
    assert!(
        told.contains("has no column digest, although all migrations are applied"),
        "{told}"
    );
    assert!(!told.contains("run `diesel-outbox migrate`"), "{told}");
    database.execute(&format!("ALTER TABLE {}", repair.trim()));
    finish(command(&database, &["migrate"])).code(0);
    works(&database, "outbox");

    database.execute("DROP VIEW outbox_messages");
    database.execute("CREATE VIEW outbox_messages AS SELECT sequence FROM outbox");
    let failed = finish(command(&database, &["migrate"])).code(1);
    assert!(
        failed
            .stderr
            .contains("although all migrations are applied")
            && failed.stderr.contains("CREATE VIEW"),
        "{}",
        failed.stderr
    );
}

/// Relays write into a ring of parts. A missing part may be noticed only when its turn comes, days later.
#[test]
fn missing_parts_of_the_ring_are_reported_with_sql_that_repairs_it() {
    let database = FreshDatabase::new();
    finish(command(&database, &["migrate"])).code(0);
    for (damage, lost) in [
        (
            "DROP TABLE outbox_ledger_3, outbox_attempt_0",
            "\"outbox_ledger_3\" is missing",
        ),
        (
            "ALTER TABLE outbox_attempt DETACH PARTITION outbox_attempt_7",
            "\"outbox_attempt_7\" is detached",
        ),
        (
            "DROP TABLE outbox_feed_event_5",
            "\"outbox_feed_event_5\" is missing",
        ),
        (
            "ALTER TABLE outbox_feed_event DETACH PARTITION outbox_feed_event_2",
            "\"outbox_feed_event_2\" is detached",
        ),
    ] {
        database.execute(damage);
        let mut cure = String::new();
        for arguments in ["migrate", "status", "check", "run"] {
            let mut command = command(&database, &[arguments]);
            command.env("OUTBOX_URL", "http://127.0.0.1:9/");
            let failed = finish(command).code(1);
            let shown = failed.stdout + &failed.stderr;
            assert!(
                shown.contains("the outbox outbox is damaged: ") && shown.contains(lost),
                "{arguments}: {shown}"
            );
            let (_, told) = shown.split_once("fixes this with: ").expect("a repair");
            cure = told.lines().next().expect("SQL").to_owned();
        }
        database.execute(&cure);
        works(&database, "outbox");
    }
    // Nothing differs from a new outbox: parts of events have the index of their positions again.
    let mut check = command(&database, &["check"]);
    check.env("OUTBOX_URL", "http://127.0.0.1:9/");
    let checked = finish(check);
    let shown = checked.stdout + &checked.stderr;
    assert!(!shown.contains("outbox_feed_pos_5"), "{shown}");
    let index = "SELECT count(*) FROM pg_index WHERE indrelid = 'outbox_feed_event_5'::regclass AND indisunique";
    assert_eq!(database.number(index), 1);
}

/// Each claim of keyed messages asks, for each message, whether a dead letter blocks its key.
#[test]
fn dead_letters_that_keep_a_key_back_are_found_by_their_index() {
    let database = Database::new();
    let conn = &mut database.connect();
    let plan: Vec<PlanRow> = conn
        .batch_execute("SET enable_seqscan = off; SET enable_bitmapscan = off")
        .and_then(|()| {
            sql_query(
                "EXPLAIN SELECT (SELECT 1 FROM {o}_dead d
                                  WHERE d.blocks_key AND d.ordering_key = o.ordering_key LIMIT 1)
                   FROM {o} o"
                    .replace("{o}", &database.name()),
            )
            .load(conn)
        })
        .expect("a plan");
    let plan: Vec<String> = plan.into_iter().map(|row| row.line).collect();
    assert!(
        plan.iter()
            .any(|line| line.contains("Index Cond: (ordering_key = o.ordering_key)")),
        "{plan:#?}"
    );
}

#[derive(QueryableByName)]
struct PlanRow {
    #[diesel(sql_type = Text, column_name = "QUERY PLAN")]
    line: String,
}

#[derive(QueryableByName)]
struct JsonPlanRow {
    #[diesel(sql_type = diesel::sql_types::Json, column_name = "QUERY PLAN")]
    plan: serde_json::Value,
}

/// R43: no index of the ledger has values in random order. Otherwise each entry would change a page of its own, which
/// is written whole after each checkpoint.
#[test]
fn an_entry_of_the_ledger_writes_no_more_beside_a_past() {
    let database = Database::new();
    let bytes = |count: i32| {
        database.execute("CHECKPOINT");
        let plan: JsonPlanRow = sql_query(format!(
            "EXPLAIN (ANALYZE, WAL, FORMAT JSON)
             INSERT INTO {}_ledger (part, sequence, message_id, topic, destination, status, attempts, created_at)
             SELECT 0, n, outbox_message_id(), 't', '', 'delivered', 1, now() FROM generate_series(1, {count}) n",
            database.name(),
        ))
        .get_result(&mut database.connect())
        .expect("a plan");
        let bytes = plan.plan[0]["Plan"]["WAL Bytes"]
            .as_f64()
            .expect("a number");
        bytes / f64::from(count)
    };
    let fresh = bytes(2_000);
    bytes(100_000);
    let aged = bytes(2_000);
    assert!(
        aged < 1.2 * fresh,
        "{aged} bytes for each entry, {fresh} at first"
    );
}
