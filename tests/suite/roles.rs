//! Roles with least privilege: the printed SQL grants each role exactly what it needs.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::admin::{Bulk, Note};
use diesel_outbox::config::{Mode, SigningSecret};
use diesel_outbox::endpoints::{DeliveryFilter, Endpoint, EndpointFilter};
use diesel_outbox::program;
use diesel_outbox::{
    Answer, Backoff, Destination, Due, EnqueueError, MessageRef, NewMessage, Outbox, Relay,
    RelayBuilder, Sequence, StartError, inbox,
};
use secrecy::ExposeSecret;
use serde_json::json;
use url::Url;
use uuid::Uuid;

use crate::fresh::FreshDatabase;
use crate::support::{Finished, Receiver, binary, end, eventually, finish};

const KINDS: [&str; 6] = [
    "enqueuer",
    "canceller",
    "registrar",
    "relay",
    "reader",
    "receiver",
];
const NEVER: Duration = Duration::from_secs(600);

/// A database with an outbox, a table of the application, and a login for each role. The fields drop in this order,
/// because a role can be dropped only when nothing refers to it.
struct Ground {
    database: FreshDatabase,
    roles: Roles,
    outbox: String,
}

/// Roles belong to the server, so each test has its own.
struct Roles(String);

impl Drop for Roles {
    fn drop(&mut self) {
        let url = crate::support::database_url();
        if let Ok(mut conn) = PgConnection::establish(&url) {
            for kind in KINDS {
                let (role, login) = (self.role(kind), self.login(kind));
                let _ = conn.batch_execute(&format!("DROP ROLE {login}; DROP ROLE {role}"));
            }
        }
    }
}

impl Roles {
    fn role(&self, kind: &str) -> String {
        format!("{}_{kind}", self.0)
    }

    fn login(&self, kind: &str) -> String {
        format!("{}_{kind}_login", self.0)
    }
}

impl Ground {
    fn new() -> Self {
        Self::with_outbox("outbox")
    }

    fn with_outbox(outbox: &str) -> Self {
        let database = FreshDatabase::new();
        let ground = Self {
            roles: Roles(format!("r_{}", uuid::Uuid::now_v7().simple())),
            outbox: outbox.to_owned(),
            database,
        };
        let (roles, database) = (&ground.roles, &ground.database);
        if let Some((schema, _)) = outbox.split_once('.') {
            database.execute(&format!("CREATE SCHEMA {schema}"));
        }
        // As on a hardened server.
        database.execute("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC");
        let print = ["migrate", "--print", "--table", outbox];
        database.execute(&finish(binary(&print)).code(0).stdout);
        database.execute(&ground.printed());
        // The printed SQL cannot take away what every role of the server may do; a careful operator does.
        database.execute(&format!(
            "REVOKE TEMPORARY ON DATABASE {} FROM PUBLIC;
             CREATE TABLE orders (id int PRIMARY KEY, paid bool NOT NULL DEFAULT false);
             INSERT INTO orders VALUES (7)",
            database.name
        ));
        for kind in KINDS {
            let (role, login) = (roles.role(kind), roles.login(kind));
            database.execute(&format!(
                "CREATE ROLE {login} LOGIN PASSWORD '{login}' IN ROLE {role}"
            ));
        }
        database.execute(&format!(
            "GRANT SELECT, UPDATE ON orders TO {}",
            roles.login("enqueuer")
        ));
        ground
    }

    /// The SQL of the roles, with this test's names.
    fn printed(&self) -> String {
        let print = ["migrate", "--print", "--roles", "--table", &self.outbox];
        let printed = finish(binary(&print)).code(0).stdout;
        assert!(printed.contains("CREATE ROLE outbox_relay;"), "{printed}");
        KINDS.iter().fold(printed, |sql, kind| {
            sql.replace(&format!("outbox_{kind}"), &self.roles.role(kind))
        })
    }

    fn url(&self, kind: &str) -> String {
        let mut url = Url::parse(&self.database.url).expect("a URL");
        let login = self.roles.login(kind);
        url.set_username(&login).expect("a user");
        url.set_password(Some(&login)).expect("a password");
        url.into()
    }

    fn connect(&self, kind: &str) -> PgConnection {
        PgConnection::establish(&self.url(kind)).expect("the role logs in")
    }

    fn relay(&self) -> RelayBuilder {
        Relay::builder(self.url("relay"))
            .outbox(&self.outbox)
            .concurrency(4)
            .send_timeout(Duration::from_secs(1))
            .lease(Duration::from_secs(6))
            .backoff(Backoff::Table(vec![Duration::from_millis(50)]))
    }

    /// A command run as one of the roles.
    fn run(&self, kind: &str, arguments: &[&str]) -> Finished {
        let mut command = binary(arguments);
        command
            .env("DATABASE_URL", self.url(kind))
            .env("OUTBOX_TABLE", &self.outbox)
            .env("OUTBOX_URL", "http://127.0.0.1:9/");
        finish(command)
    }

    /// Enqueues as the application does, in its own transaction.
    fn enqueue(&self, message: NewMessage) -> i64 {
        let outbox = Outbox::new(&self.outbox).expect("a name");
        self.connect("enqueuer")
            .transaction(|conn| {
                sql_query("UPDATE orders SET paid = true WHERE id = 7").execute(conn)?;
                outbox.enqueue(conn, message)
            })
            .expect("enqueued")
            .sequence
            .0
    }

    fn count(&self, status: &str) -> i64 {
        self.database.number(&format!(
            "SELECT count(*) FROM {}_messages WHERE status = '{status}'",
            self.outbox
        ))
    }

    /// Fails unless the role gets the SQLSTATE 42501 (insufficient_privilege) for this statement.
    fn refuses(&self, kind: &str, statement: &str) {
        let statement = statement.replace("{o}", &self.outbox);
        self.connect(kind)
            .batch_execute(&format!(
                "DO $do$ BEGIN
                    EXECUTE $statement${statement}$statement$;
                    RAISE EXCEPTION 'it is allowed';
                 EXCEPTION WHEN insufficient_privilege THEN NULL;
                 END $do$"
            ))
            .unwrap_or_else(|error| panic!("{kind}: {statement}: {error}"));
    }
}

fn message(topic: &str, n: i32) -> NewMessage {
    NewMessage::new(topic, &json!({ "n": n })).expect("JSON")
}

fn messages_alone() -> Outbox {
    let outbox = Outbox::new("outbox").expect("a name");
    outbox.allow_outside_transaction()
}

// --- Enough ---------------------------------------------------------------------------------

#[test]
fn an_enqueuer_enqueues_in_every_way() {
    let ground = Ground::new();
    let conn = &mut ground.connect("enqueuer");
    let outbox = messages_alone();
    let whole = message("order.paid", 1)
        .destination("billing")
        .header("x-shop", "berlin")
        .ordering_key("order-7")
        .idempotency_key("order-7-paid")
        .tenant_id(uuid::Uuid::now_v7())
        .delay(Duration::from_secs(1))
        .expires_after(Duration::from_secs(100));
    let first = outbox.enqueue(conn, whole.clone()).expect("enqueued");
    let again = outbox.enqueue(conn, whole.clone()).expect("enqueued");
    assert_eq!((again.sequence, again.is_new), (first.sequence, false));
    let other = message("order.paid", 2)
        .destination("billing")
        .idempotency_key("order-7-paid");
    let error = outbox.enqueue(conn, other).expect_err("a conflict");
    assert!(matches!(error, EnqueueError::Conflict { .. }), "{error:?}");
    let batch = [whole.clone(), message("t", 3), message("t", 4)];
    let enqueued = outbox.enqueue_batch(conn, batch).expect("enqueued");
    let new: Vec<bool> = enqueued.iter().map(|one| one.is_new).collect();
    assert_eq!(new, [false, true, true]);
    let bulk = [message("t", 5), whole];
    assert_eq!(outbox.enqueue_bulk(conn, bulk).expect("enqueued"), 1);
    let keyed = message("t", 8).idempotency_key("inserted");
    let insert = |message| outbox.insert(message).expect("a query");
    let inserted = insert(keyed.clone()).get_result::<Sequence>(conn);
    inserted.expect("inserted");
    assert_eq!(insert(keyed).execute(conn), Ok(0));
    assert_eq!(insert(message("t", 9)).execute(conn), Ok(1));
    conn.batch_execute(
        "INSERT INTO outbox (topic, payload) VALUES ('t', '6');
         INSERT INTO outbox (topic, payload, idempotency_key) VALUES ('t', '7', 'plain')
         ON CONFLICT DO NOTHING",
    )
    .expect("inserted");
    assert_eq!(ground.count("pending"), 8);
}

/// R39
#[test]
fn a_canceller_cancels_and_reschedules_in_every_way() {
    let ground = Ground::new();
    let outbox = Outbox::new("outbox").expect("a name");
    let keyed = |n| message("t", n).ordering_key("k");
    let first = ground.enqueue(keyed(1).idempotency_key("first"));
    let second = ground.enqueue(keyed(2));
    ground.database.execute(
        "INSERT INTO outbox (topic, payload, idempotency_key) VALUES ('t', '1', 'without a digest')",
    );
    let conn = &mut ground.connect("canceller");
    let hour = Due::After(Duration::from_secs(3600));
    let first = MessageRef::from(Sequence(first));
    let changed = outbox.reschedule(conn, first.clone(), hour);
    assert_eq!(changed.expect("an answer").answer(), Answer::Done);
    for (which, expected) in [
        (first.clone(), Answer::Done),
        (first, Answer::Cancelled),
        (MessageRef::from(Sequence(second)), Answer::Done),
        (MessageRef::key("without a digest"), Answer::Done),
        (MessageRef::key("nothing"), Answer::Unknown),
        (uuid::Uuid::now_v7().into(), Answer::Unknown),
    ] {
        let changed = outbox.cancel(conn, which).expect("an answer");
        assert_eq!(changed.answer(), expected);
    }
    assert_eq!(ground.count("dead"), 3);
}

/// A plain insert leaves no digest, and computing the digest requires reading the payload. The printed SQL says so.
#[test]
fn an_enqueuer_whose_key_a_plain_insert_wrote_needs_one_right_more() {
    let ground = Ground::new();
    let conn = &mut ground.connect("enqueuer");
    conn.batch_execute(
        "INSERT INTO outbox (topic, payload, idempotency_key) VALUES ('t', '{\"n\":1}', 'k')",
    )
    .expect("inserted");
    let outbox = messages_alone();
    let same = message("t", 1).idempotency_key("k");
    let error = outbox.enqueue(conn, same.clone()).expect_err("not allowed");
    assert!(error.to_string().contains("permission denied"), "{error}");
    ground.database.execute(&format!(
        "GRANT SELECT (topic, payload) ON outbox TO {}",
        ground.roles.role("enqueuer")
    ));
    let found = outbox.enqueue(conn, same).expect("enqueued");
    assert!(!found.is_new);
    let other = message("t", 2).idempotency_key("k");
    let error = outbox.enqueue(conn, other).expect_err("a conflict");
    assert!(matches!(error, EnqueueError::Conflict { .. }), "{error:?}");
}

/// R30: a setting that changes how the server writes the names of types and columns.
#[test]
fn a_relay_works_for_a_role_whose_identifiers_are_all_quoted() {
    let ground = Ground::new();
    let receiver = Receiver::ok();
    ground.database.execute(&format!(
        "ALTER ROLE {} SET quote_all_identifiers = on;
         ALTER DATABASE {} SET quote_all_identifiers = on",
        ground.roles.login("relay"),
        ground.database.name
    ));
    let relay = ground.relay().url(&receiver.url()).start();
    let relay = relay.expect("the relay starts");
    ground.enqueue(message("order.paid", 1));
    receiver.wait_for(1);
    end(&relay);
    let mut check = binary(&["check", "--json", "--url", "http://127.0.0.1:9/"]);
    check.env("DATABASE_URL", &ground.database.url);
    let checked = finish(check).code(0).stdout;
    assert!(!checked.contains("\"problem\""), "{checked}");
    assert!(!checked.contains("changed by hand"), "{checked}");
    let migrated = finish({
        let mut migrate = binary(&["migrate"]);
        migrate.env("DATABASE_URL", &ground.database.url);
        migrate
    });
    migrated.code(0);
}

/// Everything that a relay does: notifications, fan-out, retries, dead letters, pauses, order, cleaning.
#[test]
fn a_relay_works_with_its_role() {
    let ground = Ground::with_outbox("hrm.events");
    let receiver = Receiver::answering(|request| {
        let is_first = request.header("outbox-attempt") == Some("1");
        match request.json()["n"].as_u64() {
            Some(2) if is_first => 500,
            Some(3) => 400,
            _ => 200,
        }
    });
    let gone = Receiver::answering(|_| 410);
    let mut audit = Destination::new("audit", &receiver.url()).expect("a URL");
    audit.policy.mode = Some(Mode::Structured);
    let relay = ground
        .relay()
        .poll_interval(NEVER)
        .retention(Some(Duration::from_secs(3600)))
        .destination(Destination::new("billing", &receiver.url()).expect("a URL"))
        .destination(audit)
        .destination(Destination::new("gone", &gone.url()).expect("a URL"))
        .route_to_each("order.*", &["billing", "audit"])
        .route("gone", "gone")
        .route("*", "billing")
        .start()
        .expect("the relay starts");
    assert!(relay.wait_until_idle(Duration::from_secs(10)));
    // Woken by the notification: the next poll is ten minutes away.
    ground.enqueue(message("order.paid", 1));
    receiver.wait_for(2);
    let keyed = |n| message("t", n).ordering_key("key");
    for n in [2, 3, 4, 5] {
        ground.enqueue(keyed(n));
    }
    ground.enqueue(message("gone", 6));
    eventually("all messages are settled", || {
        relay.wake();
        ground.count("delivered") == 5 && ground.count("dead") == 1
    });
    eventually("the destination is paused", || {
        relay.wake();
        let pauses =
            "SELECT count(*) FROM hrm.events_pause WHERE name = 'gone' AND reason = 'GONE'";
        ground.database.number(pauses) == 1
    });
    end(&relay);
    assert_eq!(
        ground
            .database
            .number("SELECT count(*) FROM hrm.events_lease"),
        0
    );

    ground.database.execute(
        "INSERT INTO hrm.events_ledger (part, idempotency_key, destination, sequence, message_id, topic,
             digest, status, attempts, created_at, settled_at)
         VALUES (1, 'old', '', 0, gen_random_uuid(), 't', '', 'delivered', 1, now(), now() - interval '2 h');
         SELECT hrm.events_rotate('30 days');
         UPDATE hrm.events_part SET opened_at = now() - interval '3 h', closed_at = now() - interval '2 h'
          WHERE part = 1",
    );
    // The cleaner runs when the relay starts.
    let relay = ground
        .relay()
        .retention(Some(Duration::from_secs(3600)))
        .url("http://127.0.0.1:9/")
        .start()
        .expect("the relay starts");
    eventually("the old row is removed", || {
        let old = "SELECT count(*) FROM hrm.events_ledger WHERE idempotency_key = 'old'";
        ground.database.number(old) == 0
    });
    drop(relay);

    // The commands that an operator runs.
    let check = ground.run("relay", &["check"]);
    assert!(check.stdout.contains("ok      rights"), "{}", check.stdout);
    ground.run("relay", &["status", "--json"]).code(0);
    let dead = ground.run("relay", &["dead", "list", "--json"]).code(0);
    let id = dead.json()[0]["id"].to_string();
    ground.run("relay", &["dead", "show", &id]).code(0);
    ground.run("relay", &["dead", "requeue", &id]).code(0);
    assert_eq!(ground.count("dead"), 0);
    ground.run("relay", &["pause", "topic", "t"]).code(0);
    ground.run("relay", &["pause", "list"]).code(0);
    ground.run("relay", &["resume", "topic", "t"]).code(0);
    ground
        .run("relay", &["resume", "destination", "gone"])
        .code(0);
    ground
        .run(
            "relay",
            &[
                "drain",
                "--single-active",
                "true",
                "--quiet",
                "--max-attempts",
                "1",
                "--concurrency",
                "1",
            ],
        )
        .code(1);
    eventually("the undeliverable message is dead-lettered", || {
        ground.count("dead") > 0
    });
    ground
        .run("relay", &["dead", "discard", "--all", "--yes"])
        .code(0);
    assert_eq!(ground.count("dead"), 0);
    ground
        .database
        .execute("UPDATE hrm.events_ledger SET payload = '7' WHERE topic = 'order.paid'");
    let replay = ["replay", "--since", "1h", "--run", "again", "--yes"];
    ground.run("relay", &replay).code(0);
    let replayed = ground.run("relay", &["message", "list", "--json"]).code(0);
    let sequence = replayed.json()["messages"][0]["sequence"].to_string();
    let cancel = ["cancel", &sequence, "--destination", "audit"];
    let never = ["--destination", "billing", "--never", "--why", "no"];
    let settle = [["settle", &sequence].as_slice(), &never].concat();
    for change in [cancel.as_slice(), &settle] {
        let message = [["message"].as_slice(), change].concat();
        ground.run("relay", &message).code(0);
    }
    assert_eq!(ground.count("pending"), 0);
}

#[test]
fn a_reader_looks_and_sees_no_payload() {
    let ground = Ground::new();
    ground.enqueue(message("order.paid", 1));
    ground.database.execute(
        "INSERT INTO outbox_dead (sequence, message_id, topic, destination, payload, idempotency_key,
             available_at, created_at, attempts, reason)
         VALUES (0, gen_random_uuid(), 't', '', '1', 'k', now(), now(), 1, 'REJECTED')",
    );
    for arguments in [
        ["status", "--json"].as_slice(),
        &["dead", "list", "--json"],
        &["pause", "list"],
    ] {
        ground.run("reader", arguments).code(0);
    }
    for arguments in [
        ["dead", "show", "0"].as_slice(),
        &["dead", "requeue", "0"],
        &["dead", "discard", "0"],
        &["pause", "topic", "t"],
        &["tail"],
    ] {
        let refused = ground.run("reader", arguments).code(1);
        assert!(
            refused.stderr.contains("permission denied"),
            "{}",
            refused.stderr
        );
    }
    let checked = ground.run("reader", &["check"]).code(1).stdout;
    assert!(
        checked.contains("-> GRANT the role outbox_relay"),
        "{checked}"
    );
}

/// Removing content takes more rights than any of these roles has: only the owner may do it.
#[test]
fn only_the_owner_forgets_a_tenant_and_removes_the_content_of_a_message() {
    let ground = Ground::new();
    let tenant = uuid::Uuid::now_v7();
    ground.enqueue(message("order.paid", 1).tenant_id(tenant));
    let forget = ["forget", "--yes", "--tenant", &tenant.to_string()];
    let id = uuid::Uuid::now_v7().to_string();
    let expunge = ["message", "expunge", &id, "--yes", "--why", "a test"];
    for kind in ["relay", "canceller", "enqueuer"] {
        for arguments in [&forget[..], &expunge[..]] {
            let refused = ground.run(kind, arguments).code(1).stderr;
            assert!(refused.contains("the owner of the outbox"), "{refused}");
            assert!(refused.contains("UPDATE on"), "{refused}");
        }
    }
    assert_eq!(ground.count("pending"), 1);
    let mut owner = binary(&forget);
    owner.env("DATABASE_URL", &ground.database.url);
    finish(owner).code(0);
    assert_eq!(ground.count("pending"), 0);
}

#[test]
fn a_migration_by_another_role_than_the_owner_names_the_owner() {
    let ground = Ground::new();
    let mut owner = binary(&["migrate"]);
    owner.env("DATABASE_URL", &ground.database.url);
    finish(owner).code(0);
    let refused = ground.run("relay", &["migrate"]).code(1).stderr;
    assert!(
        refused.contains("the role that owns the outbox"),
        "{refused}"
    );
}

#[test]
fn a_receiver_handles_each_message_once_and_a_relay_cleans_the_inbox() {
    let ground = Ground::new();
    let conn = &mut ground.connect("receiver");
    let mut once = || inbox::once(conn, "shop", "1", |_| Ok::<(), diesel::result::Error>(()));
    assert_eq!(once().expect("handled"), inbox::Once::Handled(()));
    assert_eq!(once().expect("seen"), inbox::Once::Duplicate);
    let mut relay = ground.connect("relay");
    let removed = inbox::clean(&mut relay, Duration::ZERO).expect("cleaned");
    assert_eq!(removed, 1);
}

#[test]
fn a_registrar_registers_destinations_in_every_way() {
    let ground = Ground::new();
    let outbox = Outbox::new("outbox").expect("a name");
    let (destinations, conn) = (outbox.endpoints(), &mut ground.connect("registrar"));
    let one = Endpoint::new("acme", "https://acme.example/hooks");
    destinations.put(conn, &one).expect("registered");
    destinations.put(conn, &one).expect("replaced");
    let day = Duration::from_secs(24 * 3600);
    let new = destinations.rotate(conn, "acme", day).expect("rotated");
    let secret = destinations.secret(conn, "acme").expect("an answer");
    let written =
        |secret: Option<SigningSecret>| secret.map(|one| one.written().expose_secret().to_owned());
    assert_eq!(written(new), written(secret));
    let all = EndpointFilter::default();
    assert_eq!(destinations.list(conn, &all, 10).expect("a list").len(), 1);
    assert!(destinations.disable(conn, "acme", "why").expect("disabled"));
    // A delivery and a dead letter of the destination.
    let mut owner = PgConnection::establish(&ground.database.url).expect("a connection");
    let ids = [Uuid::now_v7(), Uuid::now_v7()];
    owner
        .batch_execute(&format!(
            "INSERT INTO outbox_ledger (part, sequence, message_id, topic, destination, status, attempts, payload, created_at)
             VALUES (0, 1001, '{}', 'order.paid', 'acme', 'delivered', 1, '1', now());
             INSERT INTO outbox_dead (sequence, message_id, topic, destination, payload, available_at, created_at, attempts, reason)
             VALUES (1002, '{}', 'order.paid', 'acme', '1', now(), now(), 1, 'TIMEOUT')",
            ids[0], ids[1]
        ))
        .expect("inserted");
    let any = DeliveryFilter::default();
    let deliveries = |conn: &mut PgConnection| {
        let page = destinations.deliveries(conn, "acme", &any, 10);
        page.expect("deliveries").rows.len()
    };
    assert_eq!(deliveries(conn), 2);
    for id in ids {
        assert!(destinations.send_again(conn, "acme", id).expect("sent"));
    }
    assert_eq!(deliveries(conn), 3);
    owner
        .batch_execute("UPDATE outbox SET attempts = 1, available_at = now() + interval '1 h'")
        .expect("delayed");
    let note = Note::new("acme", "our server works again");
    let sent = destinations.retry(conn, "acme", Bulk::new(&note));
    assert_eq!(sent.expect("retried").map(|sent| sent.changed), Some(2));
    assert!(destinations.remove(conn, "acme").expect("removed"));
    conn.batch_execute("INSERT INTO outbox_endpoint (name, url) VALUES ('b', 'https://b.example')")
        .expect("inserted");
}

// --- No more --------------------------------------------------------------------------------

#[test]
fn rights_that_a_role_does_not_need_are_refused() {
    let ground = Ground::new();
    ground.enqueue(message("order.paid", 1));
    for (kinds, statement) in [
        // Content that the role must not read.
        ("enqueuer reader", "SELECT payload FROM {o}"),
        ("enqueuer reader", "SELECT * FROM {o}"),
        ("enqueuer", "SELECT topic FROM {o}"),
        ("enqueuer", "SELECT FROM {o}_messages"),
        ("enqueuer reader", "SELECT FROM {o}_ledger"),
        ("enqueuer", "SELECT FROM {o}_dead"),
        ("reader", "SELECT payload FROM {o}_dead"),
        ("reader", "SELECT headers FROM {o}_dead"),
        ("enqueuer canceller", "SELECT FROM {o}_endpoint"),
        ("reader", "SELECT secret FROM {o}_endpoint"),
        ("reader", "SELECT headers FROM {o}_endpoint"),
        ("reader", "SELECT url FROM {o}_endpoint"),
        ("registrar", "SELECT payload FROM {o}"),
        ("registrar", "DELETE FROM {o}"),
        ("registrar", "UPDATE {o} SET attempts = 0"),
        ("registrar", "UPDATE {o}_dead SET payload = '1'"),
        ("registrar", "DELETE FROM {o}_ledger"),
        ("registrar relay", "SELECT outbox_endpoint_limit('{o}', 5000)"),
        ("enqueuer canceller", "SELECT FROM {o}_lease"),
        ("enqueuer canceller", "SELECT FROM {o}_pause"),
        ("canceller", "UPDATE {o} SET payload = '1'"),
        ("canceller relay", "DELETE FROM {o}_ledger"),
        ("canceller relay", "UPDATE {o}_ledger SET attempts = 0"),
        ("enqueuer reader", "SELECT FROM {o}_attempt"),
        ("relay", "DELETE FROM {o}_attempt"),
        ("relay", "UPDATE {o}_part SET closed_at = now()"),
        ("enqueuer canceller reader", "SELECT {o}_rotate('1 day')"),
        ("canceller", "DELETE FROM {o}_dead"),
        (
            "canceller",
            "INSERT INTO {o} (topic, payload) VALUES ('t', '1')",
        ),
        // Forged columns that only the relay writes.
        (
            "enqueuer",
            "INSERT INTO {o} (topic, payload, attempts) VALUES ('t', '1', 19)",
        ),
        (
            "enqueuer relay",
            "INSERT INTO {o} (topic, payload, locked_by) VALUES ('t', '1', 1)",
        ),
        (
            "enqueuer",
            "INSERT INTO {o} (topic, payload, created_at) VALUES ('t', '1', now())",
        ),
        (
            "enqueuer",
            "INSERT INTO {o} (topic, payload, split_from) VALUES ('t', '1', 1)",
        ),
        (
            "enqueuer",
            "INSERT INTO {o} (sequence, topic, payload) OVERRIDING SYSTEM VALUE VALUES (1, 't', '1')",
        ),
        (
            "enqueuer",
            "INSERT INTO {o} (topic, payload, idempotency_key) VALUES ('t', '1', 'k')
                      ON CONFLICT (idempotency_key, destination) WHERE idempotency_key IS NOT NULL DO UPDATE SET payload = '2'",
        ),
        (
            "reader",
            "INSERT INTO {o} (topic, payload) VALUES ('t', '1')",
        ),
        // Changes to existing rows.
        ("enqueuer reader", "UPDATE {o} SET available_at = now()"),
        ("enqueuer reader", "DELETE FROM {o}"),
        ("enqueuer reader", "SELECT sequence FROM {o} FOR UPDATE"),
        ("relay", "UPDATE {o} SET payload = '1'"),
        ("relay", "UPDATE {o} SET topic = 't'"),
        ("relay", "UPDATE {o} SET idempotency_key = 'k'"),
        ("relay", "UPDATE {o} SET ordering_key = 'k'"),
        ("relay", "UPDATE {o}_dead SET payload = '1'"),
        ("enqueuer reader", "DELETE FROM {o}_dead"),
        (
            "enqueuer reader",
            "INSERT INTO {o}_pause (kind, name, reason) VALUES ('topic', 't', 'r')",
        ),
        ("enqueuer reader", "DELETE FROM {o}_pause"),
        ("enqueuer reader", "UPDATE {o}_lease SET expires_at = now()"),
        (
            "enqueuer reader",
            "INSERT INTO {o}_ledger SELECT FROM {o}_ledger",
        ),
        ("enqueuer relay reader", "TRUNCATE {o}"),
        ("enqueuer relay reader", "TRUNCATE {o}_ledger"),
        // The inbox.
        ("receiver enqueuer reader", "SELECT FROM outbox_inbox"),
        ("receiver enqueuer reader", "DELETE FROM outbox_inbox"),
        (
            "receiver",
            "INSERT INTO outbox_inbox VALUES ('s', '1', 'infinity')",
        ),
        (
            "enqueuer relay reader",
            "INSERT INTO outbox_inbox (source, message_id) VALUES ('s', '1')",
        ),
        ("receiver", "SELECT FROM {o}"),
        (
            "receiver",
            "INSERT INTO {o} (topic, payload) VALUES ('t', '1')",
        ),
        // The application's tables, and its schema.
        ("relay reader", "SELECT FROM orders"),
        ("relay reader", "UPDATE orders SET paid = false"),
        ("relay reader", "DELETE FROM orders"),
        ("enqueuer relay reader", "CREATE TABLE mine (id int)"),
        (
            "enqueuer relay reader",
            "CREATE TEMPORARY TABLE mine (id int)",
        ),
        ("enqueuer relay reader", "CREATE SCHEMA mine"),
        (
            "enqueuer relay reader",
            "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        ),
        ("enqueuer relay reader", "DROP TABLE {o}"),
        ("enqueuer relay reader", "DROP TRIGGER outbox_wake ON {o}"),
        (
            "enqueuer relay reader",
            "ALTER TABLE {o} DISABLE TRIGGER outbox_wake",
        ),
        ("enqueuer relay reader", "SELECT outbox_create('mine')"),
        ("enqueuer relay reader", "SELECT outbox_drop('outbox')"),
        ("enqueuer relay reader", "CREATE ROLE mine"),
        (
            "enqueuer relay reader",
            "SELECT pg_read_file('/etc/passwd')",
        ),
        ("enqueuer relay reader", "COPY (SELECT 1) TO PROGRAM 'true'"),
    ] {
        for kind in kinds.split(' ') {
            ground.refuses(kind, statement);
        }
    }
    assert_eq!(ground.count("pending"), 1);
}

/// Every column right of an enqueuer is necessary: enqueueing fails without it.
#[test]
fn an_enqueuer_has_no_right_that_enqueueing_does_not_need() {
    let ground = Ground::new();
    let role = ground.roles.role("enqueuer");
    let outbox = messages_alone();
    let mut count = 0;
    for (privilege, columns) in [
        (
            "INSERT",
            "message_id topic destination payload headers ordering_key idempotency_key digest tenant_id available_at expires_at occurred_at",
        ),
        (
            "SELECT",
            "sequence message_id destination idempotency_key digest",
        ),
    ] {
        for column in columns.split(' ') {
            let right = format!("{privilege} ({column}) ON outbox");
            ground
                .database
                .execute(&format!("REVOKE {right} FROM {role}"));
            outbox
                .enqueue(
                    &mut ground.connect("enqueuer"),
                    message("t", 1).idempotency_key(column),
                )
                .expect_err(column);
            ground.database.execute(&format!("GRANT {right} TO {role}"));
            count += 1;
        }
    }
    let granted = ground.database.number(&format!(
        "SELECT count(*) FROM information_schema.column_privileges WHERE grantee = '{role}'"
    ));
    assert_eq!(granted, count, "every right was tried");
    ground.enqueue(message("t", 1));
}

// --- Missing rights are reported -------------------------------------------------------------

#[test]
fn a_right_that_is_missing_is_named_with_what_grants_it() {
    let ground = Ground::with_outbox("hrm.outbox");
    let (role, login) = (ground.roles.role("relay"), ground.roles.login("relay"));
    for (right, table) in [
        ("INSERT", "outbox_ledger"),
        ("DELETE", "outbox"),
        ("UPDATE (locked_by, locked_at)", "outbox"),
        ("UPDATE (blocks_key)", "outbox_dead"),
        ("SELECT", "outbox_part"),
        ("SELECT", "outbox_messages"),
        ("SELECT, INSERT, UPDATE, DELETE", "outbox_lease"),
        ("SELECT, INSERT, UPDATE", "outbox_lock"),
    ] {
        ground
            .database
            .execute(&format!("REVOKE {right} ON hrm.{table} FROM {role}"));
        let grant = format!("GRANT {right} ON \"hrm\".\"{table}\" TO {login}");
        let check = ground.run("relay", &["check"]).code(1);
        assert!(check.stdout.contains(&grant), "{right}: {}", check.stdout);
        for command in ["run", "drain"] {
            let url = "http://127.0.0.1:9/";
            let refused = ground.run("relay", &[command, "--url", url]).code(1);
            assert!(refused.stderr.contains(&grant), "{}", refused.stderr);
        }
        let relay = ground.relay().url("http://127.0.0.1:9/");
        let error = relay.start().expect_err("the role lacks a right");
        assert!(matches!(error, StartError::Database(_)), "{error:?}");
        // The advice of the error helps.
        ground.database.execute(&grant);
        let missing = program::missing_rights(
            &mut ground.connect("relay"),
            &"hrm.outbox".parse().expect("a name"),
        );
        assert_eq!(missing.expect("the server answers"), Vec::<String>::new());
    }
    ground
        .database
        .execute(&format!("REVOKE USAGE ON SCHEMA hrm FROM {role}"));
    let check = ground.run("relay", &["check"]).code(1);
    assert!(
        check.stdout.contains("permission denied for schema hrm"),
        "{}",
        check.stdout
    );
}

/// An owner needs no grants.
#[test]
fn who_owns_the_tables_lacks_nothing() {
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    let name = "outbox".parse().expect("a name");
    diesel_outbox::migrate(conn, &name).expect("migrated");
    let missing = program::missing_rights(conn, &name).expect("the server answers");
    assert_eq!(missing, Vec::<String>::new());
}
