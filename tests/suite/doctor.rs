//! The doctor: each finding is provoked, reported with its fix, and gone after the fix.

use std::process::Command;

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection};
use serde_json::{Value, json};

use crate::fresh::FreshDatabase;
use crate::support::{Database, Finished, binary, eventually, finish};

fn checked(command: Command) -> (Finished, Vec<Value>) {
    let finished = finish(command);
    let findings = finished.json()["findings"]
        .as_array()
        .expect("an array")
        .clone();
    (finished, findings)
}

fn check(db: &Database, lease: &str) -> Command {
    let mut command = db.binary(&["check", "--json", "--url", "http://127.0.0.1:9/"]);
    command
        .env("OUTBOX_LEASE", lease)
        .env("OUTBOX_SEND_TIMEOUT", "100ms");
    command
}

/// The level and the advice of the finding of this check that contains this text.
fn level<'a>(findings: &'a [Value], check: &str, text: &str) -> Option<(&'a str, &'a str)> {
    let finding = findings.iter().find(|finding| {
        let detail = finding["detail"].as_str().unwrap_or_default();
        finding["what"] == json!(check) && detail.contains(text)
    })?;
    let advice = finding["advice"].as_str().unwrap_or_default();
    Some((finding["level"].as_str()?, advice))
}

/// Provokes a finding by SQL, checks its level, and fixes it by the finding's advice, or by `mend`.
#[track_caller]
fn provoked(sql: &str, of: &str, text: &str, expected: &str, mend: Option<&str>) {
    let db = Database::new();
    let schema = db.schema();
    db.connect()
        .batch_execute(&sql.replace("{o}", &db.name()).replace("{s}", schema))
        .expect("provoked");
    let (finished, findings) = checked(check(&db, "60s"));
    let (found, advice) = level(&findings, of, text)
        .unwrap_or_else(|| panic!("no finding of {of} contains {text:?}: {findings:#?}"));
    assert_eq!(found, expected, "{findings:#?}");
    assert!(!advice.is_empty());
    let is_problem = expected == "problem";
    assert_eq!(
        finished.status.code(),
        Some(i32::from(is_problem)),
        "{findings:#?}"
    );
    let mend = mend.map_or_else(|| advice.to_owned(), str::to_owned);
    let mend = mend.replace("{o}", &db.name()).replace("{s}", schema);
    // A function named without its schema is found through the search path.
    db.connect()
        .batch_execute(&mend)
        .unwrap_or_else(|error| panic!("{mend}: {error}"));
    let (finished, findings) = checked(check(&db, "60s"));
    assert_eq!(level(&findings, of, text), None);
    finished.code(0);
}

/// R46: a bad row is never skipped silently.
#[test]
fn a_disabled_destination_is_a_warning_with_its_reason() {
    provoked(
        "INSERT INTO {o}_endpoint (name, url, enabled, disabled_reason)
         VALUES ('acme', 'https://a.example/', false, 'rate: often is no rate')",
        "endpoints",
        "acme is disabled and gets no new messages: rate: often is no rate",
        "warning",
        Some("UPDATE {o}_endpoint SET enabled = true, disabled_reason = NULL"),
    );
}

/// R58, R59.
#[test]
fn failing_and_unverified_destinations_are_warnings() {
    provoked(
        "INSERT INTO {o}_endpoint (name, url, failing_since, failing)
         VALUES ('acme', 'https://a.example/', now(), true)",
        "endpoints",
        "the endpoint acme is failing",
        "warning",
        Some("UPDATE {o}_endpoint SET failing = false"),
    );
    provoked(
        "INSERT INTO {o}_endpoint (name, url, verification, verification_error)
         VALUES ('acme', 'https://a.example/', 'challenge', 'TIMEOUT: no response within 15000 ms')",
        "endpoints",
        "the endpoint acme is not verified, and nothing is sent to it: TIMEOUT: no response within 15000 ms",
        "warning",
        Some("UPDATE {o}_endpoint SET verified_at = now()"),
    );
}

/// A new outbox has no findings.
#[test]
fn nothing_is_wrong_with_a_new_outbox() {
    let db = Database::new();
    let (finished, findings) = checked(check(&db, "60s"));
    for of in [
        "drift",
        "indexes",
        "vacuum",
        "sequence",
        "inserts",
        "leases",
        "ledger",
        "endpoints",
        "inbox",
        "clock",
        "wraparound",
        "connections",
        "settings",
        "pooler",
    ] {
        assert_eq!(
            level(&findings, of, "").map(|found| found.0),
            Some("ok"),
            "{of}: {findings:#?}"
        );
    }
    finished.code(0);
    let schemas =
        db.number("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'outbox_compared%'");
    assert_eq!(schemas, 0, "the comparison leaves no schema behind");
}

/// Differences in the schema's name alone are no drift.
#[test]
fn nothing_is_wrong_with_an_outbox_in_a_schema_that_is_quoted() {
    let fresh = FreshDatabase::new();
    let mut conn = fresh.connect();
    diesel_outbox::migrate(&mut conn, &"outbox".parse().expect("a name")).expect("migrated");
    conn.batch_execute("CREATE SCHEMA \"Shop\"; SELECT outbox_create('Shop.Order-Events'); SELECT outbox_create_endpoints('Shop.Order-Events')")
        .expect("an outbox");
    let mut command = binary(&["check", "--json", "--url", "http://127.0.0.1:9/"]);
    command
        .env("DATABASE_URL", &fresh.url)
        .env("OUTBOX_TABLE", "Shop.Order-Events");
    let (finished, findings) = checked(command);
    let drift = level(&findings, "drift", "").map(|found| found.0);
    assert_eq!(drift, Some("ok"), "{findings:#?}");
    finished.code(0);
}

#[test]
fn a_missing_index_is_reported_with_its_statement() {
    provoked(
        "DROP INDEX {o}_claim",
        "drift",
        "index outbox_claim of",
        "problem",
        None,
    );
    provoked(
        "DROP INDEX {o}_ordering",
        "drift",
        "index outbox_ordering of",
        "problem",
        None,
    );
    provoked(
        "DROP INDEX {o}_ledger_settled",
        "drift",
        "index outbox_ledger_settled",
        "problem",
        None,
    );
    provoked(
        "DROP INDEX {o}_dead_blocks",
        "drift",
        "index outbox_dead_blocks",
        "problem",
        None,
    );
}

#[test]
fn an_invalid_index_is_reported() {
    provoked(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{o}_tenant'::regclass",
        "indexes",
        "is not valid",
        "problem",
        None,
    );
}

#[test]
fn an_index_that_slows_every_claim_is_reported() {
    provoked(
        "CREATE INDEX mine ON {o} (locked_by)",
        "drift",
        "the index mine has a column that every claim changes",
        "warning",
        None,
    );
}

#[test]
fn drift_of_tables_is_reported() {
    let text = "is UNLOGGED";
    provoked(
        "ALTER TABLE {o}_ledger_3 SET UNLOGGED",
        "drift",
        text,
        "problem",
        None,
    );
    let text = "has fillfactor = 100 instead of 45";
    provoked(
        "ALTER TABLE {o} SET (fillfactor = 100)",
        "drift",
        text,
        "warning",
        None,
    );
    let text = "has no autovacuum_vacuum_cost_limit";
    provoked(
        "ALTER TABLE {o} RESET (autovacuum_vacuum_cost_limit)",
        "drift",
        text,
        "warning",
        None,
    );
    provoked(
        "ALTER TABLE {o}_endpoint DROP CONSTRAINT outbox_endpoint_name_is_1_to_255_bytes_without_spaces",
        "drift",
        "constraint outbox_endpoint_name_is_1_to_255_bytes_without_spaces",
        "warning",
        None,
    );
    provoked(
        "DROP TRIGGER outbox_topic_is_1_to_255_bytes_without_spaces ON {o}",
        "drift",
        "has no trigger outbox_topic_is_1_to_255_bytes_without_spaces: messages that break this rule are not refused",
        "warning",
        None,
    );
    provoked(
        "ALTER TABLE {o} ALTER COLUMN created_at DROP DEFAULT",
        "drift",
        "the column created_at",
        "warning",
        Some("ALTER TABLE {o} ALTER COLUMN created_at SET DEFAULT now()"),
    );
    provoked(
        "ALTER TABLE {o} DISABLE TRIGGER outbox_wake",
        "drift",
        "is disabled",
        "warning",
        None,
    );
    provoked(
        "DROP TRIGGER outbox_wake ON {o}",
        "drift",
        "has no trigger outbox_wake",
        "warning",
        None,
    );
    for trigger in [
        "changes",
        "wake",
        "gone",
        "emptied",
        "there",
        "changed",
        "most",
        "most_moved",
    ] {
        provoked(
            &format!("DROP TRIGGER outbox_endpoint_{trigger} ON {{o}}_endpoint"),
            "drift",
            &format!("has no trigger outbox_endpoint_{trigger}: "),
            "warning",
            None,
        );
    }
    provoked(
        "ALTER TABLE {o}_endpoint DISABLE TRIGGER outbox_endpoint_gone",
        "drift",
        "is disabled: messages of a removed endpoint stay in the outbox",
        "warning",
        None,
    );
    provoked(
        "ALTER TABLE {o} ENABLE ROW LEVEL SECURITY",
        "drift",
        "has row-level security",
        "warning",
        None,
    );
    provoked(
        "CREATE OR REPLACE VIEW {o}_messages AS SELECT sequence, message_id, topic, destination,
            'pending'::text AS status, ordering_key, message_id::text COLLATE \"C\" AS idempotency_key, tenant_id, created_at, occurred_at,
            available_at, expires_at, attempts, locked_by, locked_at, last_attempt_at, last_error_code,
            last_error, NULL::integer AS http_status, NULL::timestamptz AS settled_at FROM {o}",
        "drift",
        "the view outbox_messages",
        "warning",
        Some("DROP SCHEMA {s} CASCADE; CREATE SCHEMA {s}; SELECT outbox_create('{o}'); SELECT outbox_create_endpoints('{o}')"),
    );
}

/// The owner sets how many destinations a tenant may register.
#[test]
fn a_limit_that_was_changed_is_no_drift() {
    let db = Database::new();
    let limit = format!("SELECT public.outbox_endpoint_limit('{}', 5)", db.name());
    db.execute(&limit);
    let (_, findings) = checked(check(&db, "60s"));
    let drift = level(&findings, "drift", "").map(|found| found.0);
    assert_eq!(drift, Some("ok"), "{findings:#?}");
    db.execute("DROP TRIGGER outbox_endpoint_most ON {o}_endpoint");
    let (_, findings) = checked(check(&db, "60s"));
    let found = level(&findings, "drift", "outbox_endpoint_most").map(|found| found.0);
    assert_eq!(found, Some("warning"), "{findings:#?}");
}

#[test]
fn functions_of_another_version_are_reported() {
    let fresh = FreshDatabase::new();
    let mut conn = fresh.connect();
    diesel_outbox::migrate(&mut conn, &"outbox".parse().expect("a name")).expect("migrated");
    conn.batch_execute(
        "CREATE OR REPLACE FUNCTION outbox_drop(name text) RETURNS void LANGUAGE sql AS 'SELECT';
         CREATE OR REPLACE FUNCTION outbox_endpoint_gone() RETURNS trigger LANGUAGE plpgsql
             AS 'BEGIN RETURN NULL; END'",
    )
    .expect("replaced");
    let mut command = binary(&["check", "--json", "--url", "http://127.0.0.1:9/"]);
    command.env("DATABASE_URL", fresh.url.clone());
    let (finished, findings) = checked(command);
    for function in ["outbox_drop", "outbox_endpoint_gone"] {
        let found = level(
            &findings,
            "drift",
            &format!("the function {function} differs"),
        );
        assert_eq!(found.map(|found| found.0), Some("warning"), "{findings:#?}");
    }
    finished.code(0);
}

#[test]
fn autovacuum_that_is_off_or_lags_is_reported() {
    let off = "ALTER TABLE {o}_ledger_3 SET (autovacuum_enabled = false)";
    provoked(off, "vacuum", "autovacuum is off for", "problem", None);
    // A held snapshot keeps autovacuum from removing the dead rows meanwhile.
    let db = Database::new();
    db.execute("INSERT INTO {o} (topic, payload) SELECT 't', '1' FROM generate_series(1, 120000)");
    let mut holder = db.connect();
    holder
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM pg_class LIMIT 1")
        .expect("held");
    // Before PostgreSQL 15, a session that becomes idle tells its last numbers when it ends.
    let delete = format!("DELETE FROM {}", db.name());
    db.connect().batch_execute(&delete).expect("deleted");
    eventually("the dead rows are reported", || {
        let (_, findings) = checked(check(&db, "60s"));
        level(&findings, "vacuum", "dead rows").is_some_and(|(level, _)| level == "warning")
    });
    holder.batch_execute("ROLLBACK").expect("released");
    eventually("a vacuum fixes the finding", || {
        db.execute("VACUUM {o}");
        let (_, findings) = checked(check(&db, "60s"));
        level(&findings, "vacuum", "dead rows").is_none()
    });
}

/// A session that holds a snapshot is reported with the SQL that ends it.
#[test]
fn a_held_snapshot_is_reported_with_its_holder() {
    let db = Database::new();
    let mut holder = db.connect();
    holder
        .batch_execute(
            "SET application_name = 'a report';
             BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM pg_class LIMIT 1",
        )
        .expect("held");
    eventually("the holder is reported", || {
        let (_, findings) = checked(check(&db, "1s"));
        level(&findings, "snapshots", "application a report").is_some_and(|(level, advice)| {
            assert_eq!(level, "warning");
            advice.contains("pg_terminate_backend(")
        })
    });
    let (_, findings) = checked(check(&db, "60s"));
    assert_eq!(
        level(&findings, "snapshots", "application a report"),
        None,
        "the snapshot is still young"
    );
    let (_, findings) = checked(check(&db, "1s"));
    let (_, advice) = level(&findings, "snapshots", "application a report").expect("reported");
    let (_, sql) = advice.split_once(", or ").expect("SQL");
    db.connect().batch_execute(sql).expect("ended");
    eventually("the finding is gone", || {
        let (_, findings) = checked(check(&db, "1s"));
        level(&findings, "snapshots", "application a report").is_none()
    });
}

/// The identity sequence of an outbox near its end.
#[test]
fn a_sequence_near_its_end_is_reported() {
    let set = |share: &str| {
        format!(
            "SELECT setval(pg_get_serial_sequence('{{o}}', 'sequence'), (9223372036854775807 * {share})::bigint)"
        )
    };
    let mend = set("0.01");
    provoked(&set("0.6"), "sequence", "60.0 %", "warning", Some(&mend));
    provoked(&set("0.95"), "sequence", "95.0 %", "problem", Some(&mend));
    provoked(
        "ALTER SEQUENCE {o}_sequence_seq CYCLE",
        "sequence",
        "restarts at its end",
        "problem",
        None,
    );
}

/// After logical replication, or a RESTART: inserts fail, or repeat the numbers of dead letters.
#[test]
fn a_sequence_behind_its_rows_is_reported_with_the_fix() {
    let dead = "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, available_at, created_at, attempts, reason)
        VALUES (1000, gen_random_uuid(), 't', '', '1', now(), now(), 1, 'REJECTED')";
    let live = "INSERT INTO {o} (topic, payload, available_at) VALUES ('t', '1', 'infinity'), ('t', '1', 'infinity');
        ALTER TABLE {o} ALTER COLUMN sequence RESTART";
    let set = "INSERT INTO {o} (topic, payload, available_at)
        SELECT 't', '1', 'infinity' FROM generate_series(1, 7); SELECT setval('{o}_sequence_seq', 3)";
    for sql in [dead, live, set] {
        provoked(sql, "sequence", "inserts fail", "problem", None);
    }
}

/// Hardened servers revoke EXECUTE from PUBLIC.
#[test]
fn a_role_that_cannot_call_the_default_of_its_inserts_is_reported() {
    let own = Own::new();
    let role = format!("few_{}", uuid::Uuid::now_v7().simple());
    own.fresh.execute(&format!(
        "CREATE ROLE {role}; GRANT INSERT (topic, payload) ON outbox TO {role};
         REVOKE EXECUTE ON FUNCTION outbox_message_id() FROM PUBLIC"
    ));
    let (finished, findings) = own.check(&own.fresh.url);
    let (found, advice) = level(&findings, "inserts", &role).expect("reported");
    assert_eq!(found, "problem");
    finished.code(1);
    own.fresh.execute(advice);
    own.fresh.execute(&format!(
        "SET ROLE {role}; INSERT INTO outbox (topic, payload) VALUES ('t', '1')"
    ));
    let (finished, findings) = own.check(&own.fresh.url);
    assert_eq!(level(&findings, "inserts", &role), None);
    finished.code(0);
    own.fresh
        .execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

#[test]
fn messages_of_a_lease_without_a_row_are_reported() {
    provoked(
        "INSERT INTO {o} (topic, payload, locked_by, locked_at) VALUES ('t', '1', 7, now())",
        "leases",
        "the lease 7 locks messages (1)",
        "warning",
        Some("DELETE FROM {o}"),
    );
}

/// A role needs no right to take an advisory lock.
#[test]
fn a_stranger_that_holds_the_lock_of_a_sleeping_relay_is_named() {
    let db = Database::new();
    let mut stranger = db.connect();
    stranger
        .batch_execute(&format!(
            "SET application_name = 'a stranger';
             SELECT pg_advisory_lock('{}'::regclass::oid::bigint::bit(32)::integer, 1)",
            db.name()
        ))
        .expect("locked");
    eventually("the stranger is named", || {
        let (finished, findings) = checked(check(&db, "60s"));
        level(&findings, "leases", "application a stranger").is_some_and(|(found, advice)| {
            assert_eq!(found, "warning");
            finished.code(0);
            db.execute(advice);
            true
        })
    });
    eventually("nobody holds the lock", || !db.is_relay_asleep());
    let relay = db.sleeper(db.relay().url("http://127.0.0.1:9/"));
    let (_, findings) = checked(check(&db, "60s"));
    assert_eq!(level(&findings, "leases", "holds the lock"), None);
    crate::support::end(&relay);
}

#[test]
fn an_expired_lease_is_reported_when_no_relay_is_alive() {
    provoked(
        "WITH lease AS (
            INSERT INTO {o}_lease (relay, expires_at) VALUES ('host/7', now() - interval '1 min') RETURNING id
         )
         INSERT INTO {o} (topic, payload, locked_by, locked_at) SELECT 't', '1', id, now() FROM lease",
        "leases",
        "no relay is alive",
        "warning",
        Some(
            "INSERT INTO {o}_lease (relay, expires_at, serves) VALUES ('host/8', now() + interval '1 hour', '{}')",
        ),
    );
}

#[test]
fn a_ledger_that_is_not_cleaned_is_reported() {
    provoked(
        "INSERT INTO {o}_ledger (part, idempotency_key, destination, sequence, message_id, topic, digest,
            status, attempts, created_at, settled_at)
         VALUES (0, 'a', '', 1, gen_random_uuid(), 't', '', 'delivered', 1, now(), now() - interval '9 days')",
        "ledger",
        "older than OUTBOX_RETENTION",
        "warning",
        Some("TRUNCATE {o}_ledger"),
    );
}

/// A separate database whose settings a test may change.
struct Own {
    fresh: FreshDatabase,
}

impl Own {
    fn new() -> Self {
        let fresh = FreshDatabase::new();
        let mut conn = fresh.connect();
        diesel_outbox::migrate(&mut conn, &"outbox".parse().expect("a name")).expect("migrated");
        Self { fresh }
    }

    fn check(&self, url: &str) -> (Finished, Vec<Value>) {
        let mut command = binary(&["check", "--json", "--url", "http://127.0.0.1:9/"]);
        command.env("DATABASE_URL", url);
        checked(command)
    }
}

/// Settings that a role or a database applies to its sessions.
#[test]
fn surprising_settings_are_reported() {
    let own = Own::new();
    let url = own.fresh.url.clone();
    let database = url::Url::parse(&url)
        .expect("a URL")
        .path()
        .trim_start_matches('/')
        .to_owned();
    let mut admin = PgConnection::establish(&crate::support::database_url()).expect("a connection");
    for (setting, value, expected) in [
        ("default_transaction_read_only", "on", "problem"),
        ("synchronous_commit", "off", "warning"),
        ("idle_session_timeout", "'1min'", "warning"),
    ] {
        let known = format!("SELECT count(*) FROM pg_settings WHERE name = '{setting}'");
        if own.fresh.number(&known) == 0 {
            // The server is older than the setting.
            continue;
        }
        admin
            .batch_execute(&format!(
                "ALTER DATABASE {database} SET {setting} = {value}"
            ))
            .expect("set");
        let (finished, findings) = own.check(&url);
        let found = level(&findings, "settings", setting);
        assert_eq!(found.map(|found| found.0), Some(expected), "{findings:#?}");
        finished.code(i32::from(expected == "problem"));
        admin
            .batch_execute(&format!("ALTER DATABASE {database} RESET {setting}"))
            .expect("reset");
        let (_, findings) = own.check(&url);
        assert_eq!(
            level(&findings, "settings", "no unusual role or server settings").map(|found| found.0),
            Some("ok")
        );
    }
}

/// A check that lacks a right says so and does not fail. A check with too few connections fails.
#[test]
fn a_role_with_few_rights_and_connections() {
    let own = Own::new();
    let mut admin = own.fresh.connect();
    let role = format!("few_{}", uuid::Uuid::now_v7().simple());
    let url = url::Url::parse(&own.fresh.url.clone()).expect("a URL");
    let database = url.path().trim_start_matches('/').to_owned();
    admin
        .batch_execute(&format!(
            "CREATE ROLE {role} LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO {role};
             GRANT EXECUTE ON FUNCTION outbox_rotate(interval), outbox_blank(timestamptz, timestamptz, integer), outbox_feed_rotate(interval, bigint) TO {role}"
        ))
        .expect("a role");
    let mut url = url;
    url.set_username(&role).expect("a user");
    let (finished, findings) = own.check(url.as_str());
    assert_eq!(
        level(&findings, "drift", "were not compared").map(|found| found.0),
        Some("skipped"),
        "{findings:#?}"
    );
    finished.code(0);
    admin
        .batch_execute("DROP INDEX outbox_claim_keyed")
        .expect("dropped");
    let (finished, findings) = own.check(url.as_str());
    assert_eq!(
        level(&findings, "indexes", "outbox_claim_keyed").map(|found| found.0),
        Some("problem"),
        "{findings:#?}"
    );
    finished.code(1);
    admin
        .batch_execute(&format!("ALTER ROLE {role} CONNECTION LIMIT 4"))
        .expect("limited");
    let (_, findings) = own.check(url.as_str());
    let (found, advice) = level(&findings, "connections", "of the role").expect("reported");
    assert_eq!(found, "problem");
    admin.batch_execute(advice).expect("mended");
    let (_, findings) = own.check(url.as_str());
    assert_eq!(
        level(&findings, "connections", "are free").map(|found| found.0),
        Some("ok")
    );
    admin
        .batch_execute(&format!(
            "REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {role};
             REVOKE ALL ON FUNCTION outbox_rotate(interval), outbox_blank(timestamptz, timestamptz, integer), outbox_feed_rotate(interval, bigint) FROM {role}; REVOKE ALL ON DATABASE {database} FROM {role}; DROP ROLE {role}"
        ))
        .expect("dropped");
}
