//! An outbox without the tables of endpoints, which `outbox_create` alone makes: everything else works, and what needs the
//! tables says so.

use std::net::Ipv4Addr;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection};
use diesel_outbox::admin::{self, Note, Selection};
use diesel_outbox::config::Config;
use diesel_outbox::endpoints::{Endpoint, EndpointError, EndpointFilter};
use diesel_outbox::program::{self, EndpointTables};
use diesel_outbox::{Destination, Direction, Relay, RelayBuilder, RelayHandle};
use diesel_outbox_pages::{Pages, Rights, Visitor, operator_pages, portal_routes};
use http::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::fresh::FreshDatabase;
use crate::page::TOKEN;
use crate::support::{Database, Receiver, binary, database_url, end, eventually, finish, message};

/// What each refusal names.
const CURE: &str = "diesel-outbox migrate --with endpoints";

fn relay(database: &Database, billing: &Receiver, audit: &Receiver) -> RelayBuilder {
    database
        .relay()
        .destination(Destination::new("billing", &billing.url()).expect("a URL"))
        .destination(Destination::new("audit", &audit.url()).expect("a URL"))
        .route("invoice.*", "billing")
        .route_to_each("order.*", &["billing", "audit"])
        .endpoint_threads(2)
        .max_attempts(3)
}

fn register(database: &Database, name: &str, receiver: &Receiver) {
    let hook = Endpoint::new(name, receiver.url());
    let conn = &mut database.connect();
    database.outbox().endpoints().put(conn, &hook).expect("put");
}

fn is_healthy(relay: &RelayHandle) -> bool {
    relay.health().problems().is_empty()
}

/// R70: retries, dead letters, fan-out, keys and requeued messages, with a relay that has threads for endpoints.
#[test]
fn an_outbox_without_endpoints_delivers_to_configured_destinations() {
    let database = Database::without_endpoints();
    let audit = Receiver::ok();
    let billing = Receiver::answering(|request| match request.json()["n"].as_i64() {
        Some(422) => 422,
        _ => 200,
    });
    let failing_once = std::sync::atomic::AtomicBool::new(true);
    let flaky = Receiver::answering(move |_| {
        match failing_once.swap(false, std::sync::atomic::Ordering::SeqCst) {
            true => 500,
            false => 200,
        }
    });
    let relay = relay(&database, &billing, &audit)
        .destination(Destination::new("flaky", &flaky.url()).expect("a URL"))
        .route("retry.*", "flaky")
        .start()
        .expect("a relay");
    database.enqueue_message(message("order.paid"));
    database.enqueue_message(message("retry.once"));
    for _ in 0..20 {
        database.enqueue_message(message("invoice.made").ordering_key("customer-1"));
    }
    database.enqueue_message(message("unrouted").destination("audit"));
    database.enqueue("invoice.bad", json!({ "n": 422 }));
    eventually("everything is settled", || {
        database.count("delivered") == 24 && database.count("dead") == 1
    });
    assert_eq!(flaky.count(), 2, "a retry");
    assert_eq!(audit.count(), 2);
    let (conn, name) = (&mut database.connect(), &database.outbox_name());
    let letters = admin::matching_dead_letters(conn, name, &Selection::default());
    let letters = letters.expect("letters");
    let requeued = admin::requeue(conn, name, &letters, &Note::new("alice", "a test"));
    assert_eq!(requeued.expect("requeued"), 1);
    eventually("the message is dead again", || {
        billing.count() == 23 && database.count("dead") == 1
    });
    // A topic without a route waits.
    database.enqueue("nobody.asked", json!(1));
    eventually("the relay reports the topic", || {
        relay.health().to_string().contains("nobody.asked")
    });
    end(&relay);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 1);
}

/// R70, R57: nothing that is committed together with the tables, or after them, passes by an endpoint.
#[test]
fn a_running_relay_notices_endpoints_that_are_created_later() {
    for _ in 0..3 {
        let database = Database::without_endpoints();
        let (billing, audit, hook) = (Receiver::ok(), Receiver::ok(), Receiver::ok());
        let relay = relay(&database, &billing, &audit).start().expect("a relay");
        database.enqueue_message(message("invoice.made"));
        billing.wait_for(1);
        assert!(is_healthy(&relay), "{}", relay.health());
        database.execute(&format!(
            "DO $$ BEGIN
                PERFORM public.outbox_create_endpoints('{{o}}');
                INSERT INTO {{o}}_endpoint (name, url) VALUES ('hook', '{}');
                INSERT INTO {{o}} (topic, payload) VALUES ('for.all', '1');
                INSERT INTO {{o}} (topic, destination, payload) VALUES ('for.one', 'hook', '2');
             END $$",
            hook.url()
        ));
        database.enqueue_message(message("order.paid"));
        hook.wait_for(3);
        eventually("everything is settled", || database.count("delivered") == 6);
        // The next one, too: the relay reads changes of rows now.
        let other = Receiver::ok();
        register(&database, "other", &other);
        database.enqueue_message(message("for.all"));
        other.wait_for(1);
        eventually("everything is settled", || database.count("delivered") == 8);
        let mut conn = database.connect();
        let endpoints = database.outbox();
        let endpoints = endpoints.endpoints();
        assert!(endpoints.remove(&mut conn, "hook").expect("removed"));
        end(&relay);
        assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    }
}

/// R70: tables that a relay has used are not left out, but lost.
#[test]
fn a_relay_whose_tables_of_endpoints_are_dropped_names_them() {
    let database = Database::new();
    let (billing, audit) = (Receiver::ok(), Receiver::ok());
    let relay = relay(&database, &billing, &audit).start().expect("a relay");
    database.execute("DROP TABLE {o}_endpoint, {o}_registration");
    eventually("the relay names a table", || {
        relay.health().to_string().contains("is damaged: the table")
    });
    database.execute("DROP TRIGGER outbox_address ON {o}");
    database.execute("DROP FUNCTION {o}_address(), {o}_endpoint_state(text)");
    database.execute("SELECT public.outbox_create_endpoints('{o}')");
    database.enqueue_message(message("invoice.made"));
    billing.wait_for(1);
    end(&relay);
}

/// R70: what a role with the rights of an outbox without endpoints sees.
#[test]
fn the_library_names_what_is_missing() {
    let database = Database::without_endpoints();
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let endpoints = outbox.endpoints();
    let hook = Endpoint::new("acme", "https://acme.example/hooks");
    let refused = |error: EndpointError| {
        assert!(matches!(error, EndpointError::NoTables(_)), "{error}");
        let said = error.to_string();
        let call = format!("SELECT outbox_create_endpoints('{}')", database.name());
        assert!(said.contains(CURE) && said.contains(&call), "{said}");
        assert!(!error.public_error().contains("migrate"));
    };
    refused(endpoints.put(conn, &hook).expect_err("no tables"));
    let all = EndpointFilter::default();
    refused(endpoints.list(conn, &all, 10).expect_err("no tables"));
    refused(endpoints.get(conn, "acme").expect_err("no tables"));
    refused(endpoints.remove(conn, "acme").expect_err("no tables"));
    refused(endpoints.encryption(conn).expect_err("no tables"));
    admin::check_schema(conn, &database.outbox_name()).expect("nothing is damaged");
    let missing = program::missing_rights(conn, &database.outbox_name());
    assert_eq!(missing.expect("rights"), Vec::<String>::new());
    // One table without the other is damage.
    database.execute("SELECT public.outbox_create_endpoints('{o}')");
    database.execute("DROP TABLE {o}_registration");
    let error = admin::check_schema(conn, &database.outbox_name()).expect_err("damaged");
    assert!(
        error.to_string().contains("outbox_registration is missing"),
        "{error}"
    );
}

/// R70: commands that need the tables say so, all others work.
#[test]
fn each_command_works_without_endpoints_or_names_what_is_missing() {
    let database = Database::without_endpoints();
    database.execute(
        "INSERT INTO {o} (topic, payload, tenant_id) VALUES ('order.paid', '1', gen_random_uuid())",
    );
    let tenant = Uuid::now_v7().to_string();
    let run = |arguments: &[&str]| {
        let mut command = database.binary(arguments);
        command.env("OUTBOX_URL", "http://127.0.0.1:9/");
        finish(command)
    };
    for arguments in [
        &["endpoint", "list"] as &[&str],
        &["endpoint", "show", "acme"],
        &["endpoint", "put", "acme", "https://acme.example/"],
        &["endpoint", "disable", "acme"],
        &["endpoint", "enable", "acme"],
        &["endpoint", "remove", "acme", "--yes"],
        &["endpoint", "rotate", "acme"],
        &["endpoint", "test", "acme"],
        &["endpoint", "verify", "acme"],
        &["endpoint", "deliveries", "acme"],
        &["endpoint", "recover", "acme", "--since", "1h", "--yes"],
        &["endpoint", "backfill", "acme", "--since", "1h", "--yes"],
    ] {
        let refused = run(arguments);
        assert_ne!(
            refused.status.code(),
            Some(0),
            "{arguments:?}: {}",
            refused.stdout
        );
        assert!(
            refused.stderr.contains(CURE),
            "{arguments:?}: {}",
            refused.stderr
        );
    }
    for arguments in [
        &["migrate"] as &[&str],
        &["status"],
        &["status", "--json"],
        &["check", "--json"],
        &["message", "list"],
        &["keys"],
        &["leases"],
        &["topics", "list"],
        &["topics", "declare", "order.*"],
        &["pause", "list"],
        &["pause", "destination", "default"],
        &["resume", "destination", "default"],
        &["pause", "tenant", &tenant],
        &["resume", "tenant", &tenant],
        &["dead", "list"],
        &["forget", "--tenant", &tenant, "--yes"],
        &["message", "retry", "--topic", "order.paid", "--yes"],
    ] {
        let done = run(arguments);
        assert_eq!(
            done.status.code(),
            Some(0),
            "{arguments:?}: {} {}",
            done.stdout,
            done.stderr
        );
    }
    let check = run(&["check", "--json"]).code(0);
    let said = check.json().to_string();
    assert!(said.contains(CURE), "{said}");
    for bad in ["\"warning\"", "\"error\"", "damaged"] {
        assert!(!said.contains(bad), "{said}");
    }
    // `drain` asks what there is to do.
    let receiver = Receiver::ok();
    let mut drain = database.binary(&["drain"]);
    drain.env("OUTBOX_URL", receiver.url());
    finish(drain).code(0);
    assert_eq!(database.count("delivered"), 1);
}

/// R70: only the migration that says so adds the tables.
#[test]
fn migrate_leaves_out_and_adds_the_tables_of_endpoints() {
    let database = FreshDatabase::new();
    let migrate = |arguments: &[&str]| {
        let mut command = binary(&[&["migrate"], arguments].concat());
        command.env("DATABASE_URL", &database.url);
        finish(command).code(0).stdout
    };
    let tables =
        "SELECT count(*) FROM pg_class WHERE relname IN ('outbox_endpoint', 'outbox_registration')";
    let said = migrate(&["--without", "endpoints,feeds"]);
    assert!(said.contains("left out the tables of endpoints"), "{said}");
    assert_eq!(database.number(tables), 0);
    for again in [&[] as &[&str], &["--without", "endpoints"]] {
        let said = migrate(again);
        assert!(said.contains("is up to date"), "{said}");
    }
    assert_eq!(database.number(tables), 0);
    let said = migrate(&["--with", "endpoints"]);
    assert!(
        said.contains("created the tables of endpoints of outbox"),
        "{said}"
    );
    assert_eq!(database.number(tables), 2);
    let said = migrate(&["--with", "endpoints"]);
    assert!(said.contains("is up to date"), "{said}");
    let said = migrate(&["--without", "endpoints"]);
    assert!(said.contains("they stay"), "{said}");
    assert_eq!(database.number(tables), 2);
    // Another name, with all parts at once.
    migrate(&["--with", "endpoints", "--table", "other"]);
    migrate(&["--without", "endpoints", "--table", "third"]);
    let of =
        |name: &str| format!("SELECT count(*) FROM pg_class WHERE relname = '{name}_endpoint'");
    assert_eq!(
        (database.number(&of("other")), database.number(&of("third"))),
        (1, 0)
    );
}

/// R70: the printed SQL, and the rights of an outbox without endpoints and of one that gets them later.
#[test]
fn sql_and_rights_are_printed_by_part() {
    let (roles, others) = (Roles::new(), Roles::new());
    let database = FreshDatabase::new();
    let sql = print(&["--without", "endpoints"]);
    assert!(sql.contains("SELECT outbox_create('outbox');"));
    assert!(!sql.contains("SELECT outbox_create_endpoints('outbox');"));
    database.execute(&sql);
    let without = roles.named(&print(&["--roles", "--without", "endpoints"]));
    assert!(
        !without.contains("_endpoint") && !without.contains("_registrar"),
        "{without}"
    );
    database.execute(&without);
    let name = "outbox".parse().expect("a name");
    let missing = |role: &str| {
        let mut conn = database.connect();
        conn.batch_execute(&format!("SET ROLE {role}"))
            .expect("a role");
        program::missing_rights(&mut conn, &name).expect("rights")
    };
    let relay = roles.named("outbox_relay");
    assert_eq!(missing(&relay), Vec::<String>::new());
    let with = print(&["--with", "endpoints"]);
    assert_eq!(with.trim(), "SELECT outbox_create_endpoints('outbox');");
    database.execute(&with);
    assert_eq!(missing(&relay).len(), 2, "{:?}", missing(&relay));
    database.execute(&roles.named(&print(&["--roles", "--with", "endpoints"])));
    assert_eq!(missing(&relay), Vec::<String>::new());
    let with = print(&["--with", "feeds"]);
    assert_eq!(with.trim(), "SELECT outbox_create_feeds('outbox');");
    database.execute(&with);
    assert_eq!(missing(&relay).len(), 5, "{:?}", missing(&relay));
    database.execute(&roles.named(&print(&["--roles", "--with", "feeds"])));
    assert_eq!(missing(&relay), Vec::<String>::new());
    // As if all had been there from the beginning.
    let all = "SELECT count(*) FROM information_schema.role_table_grants WHERE grantee LIKE '";
    let granted = database.number(&format!("{all}{}%'", roles.0));
    let whole = FreshDatabase::new();
    whole.execute(&print(&[]));
    whole.execute(&others.named(&print(&["--roles"])));
    assert_eq!(granted, whole.number(&format!("{all}{}%'", others.0)));
    let name = "outbox".parse().expect("a name");
    let up = program::migration_sql(Direction::Up, &name, EndpointTables::WithOutbox);
    assert_eq!(up, admin::migration_sql(Direction::Up, &name));
}

const KINDS: [&str; 6] = [
    "enqueuer",
    "canceller",
    "registrar",
    "relay",
    "reader",
    "receiver",
];

/// Roles belong to the server, so each test has its own. They are dropped after the database: declared before it.
struct Roles(String);

impl Roles {
    fn new() -> Self {
        Self(format!("r_{}", Uuid::now_v7().simple()))
    }

    /// SQL with this test's names of the roles.
    fn named(&self, sql: &str) -> String {
        KINDS.iter().fold(sql.to_owned(), |sql, kind| {
            sql.replace(&format!("outbox_{kind}"), &format!("{}_{kind}", self.0))
        })
    }
}

impl Drop for Roles {
    fn drop(&mut self) {
        if let Ok(mut conn) = PgConnection::establish(&database_url()) {
            for kind in [&["login"], KINDS.as_slice()].concat() {
                let _ = conn.batch_execute(&format!("DROP ROLE IF EXISTS {}_{kind}", self.0));
            }
        }
    }
}

/// The printed SQL of a migration.
fn print(arguments: &[&str]) -> String {
    finish(binary(&[&["migrate", "--print"], arguments].concat()))
        .code(0)
        .stdout
}

/// R70: an outbox without endpoints may stand beside tables of the application that have the names of its parts.
#[test]
fn tables_of_the_application_are_not_taken_for_those_of_endpoints() {
    let database = FreshDatabase::new();
    database.execute(&print(&["--without", "endpoints"]));
    database.execute(
        "CREATE TABLE outbox_endpoint (mine text); CREATE VIEW outbox_registration AS SELECT 1 one",
    );
    let name = "outbox".parse().expect("a name");
    let found = admin::check_schema(&mut database.connect(), &name);
    found.expect("an outbox without endpoints");
    database.execute("DROP VIEW outbox_registration; SELECT outbox_drop('outbox')");
    assert_eq!(database.number("SELECT count(*) FROM outbox_endpoint"), 0);
}

/// R70: the endpoints of an outbox that stands behind the first schema of the path belong to that outbox.
#[test]
fn endpoints_are_added_to_the_outbox_that_the_name_finds() {
    let database = FreshDatabase::new();
    database.execute(&print(&["--without", "endpoints"]));
    database.execute(
        "CREATE SCHEMA first; SET search_path = first, public; SELECT outbox_create_endpoints('outbox')",
    );
    assert_eq!(
        database.number("SELECT count(*) FROM public.outbox_endpoint"),
        0
    );
}

/// R70: no message is decided without rows that the relay may not read.
#[test]
fn a_running_relay_without_rights_on_new_tables_names_them_and_waits() {
    let roles = Roles::new();
    let database = FreshDatabase::new();
    database.execute(&print(&["--without", "endpoints"]));
    database.execute(&roles.named(&print(&["--roles", "--without", "endpoints"])));
    let login = format!("{}_login", roles.0);
    database.execute(&roles.named(&format!(
        "CREATE ROLE {login} LOGIN PASSWORD '{login}' IN ROLE outbox_relay"
    )));
    let mut url = url::Url::parse(&database.url).expect("a URL");
    url.set_username(&login).expect("a user");
    url.set_password(Some(&login)).expect("a password");
    let (receiver, hook) = (Receiver::ok(), Receiver::ok());
    let relay = Relay::builder(url.as_str())
        .url(&receiver.url())
        .poll_interval(Duration::from_millis(20))
        .endpoint_threads(2)
        .configure(|config| config.endpoint_https_only = false)
        .configure(|config| config.endpoint_public_only = false)
        .start()
        .expect("a relay");
    database.execute("INSERT INTO outbox (topic, payload) VALUES ('a', '1')");
    receiver.wait_for(1);
    database.execute(&format!(
        "SELECT outbox_create_endpoints('outbox');
         INSERT INTO outbox_endpoint (name, url) VALUES ('hook', '{}');
         INSERT INTO outbox (topic, payload) VALUES ('a', '2')",
        hook.url()
    ));
    eventually("the relay names the right", || {
        let said = relay.health().to_string();
        said.contains("GRANT SELECT") && said.contains("outbox_endpoint")
    });
    assert_eq!((receiver.count(), hook.count()), (1, 0));
    database.execute(&roles.named(&print(&["--roles", "--with", "endpoints"])));
    receiver.wait_for(2);
    hook.wait_for(1);
    end(&relay);
}

fn config(database: &Database) -> Config {
    let mut config = Config::default();
    config
        .set("DATABASE_URL", &database.url)
        .expect("a database");
    config.table = database.outbox_name();
    config
}

fn text(response: &Response<Vec<u8>>) -> &str {
    std::str::from_utf8(response.body()).expect("UTF-8")
}

/// R70: pages and JSON of operators.
#[test]
fn each_page_answers_without_endpoints() {
    let database = Database::without_endpoints();
    database.execute("INSERT INTO {o} (topic, payload) VALUES ('order.paid', '1')");
    let mut config = config(&database);
    config.set("OUTBOX_ADMIN_TOKEN", TOKEN).expect("a token");
    let pages = Pages::operators(&config, &database.secret_url(), None).expect("pages");
    let ask = |method: &str, path: &str, body: &str| {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .header("authorization", format!("Bearer {TOKEN}"));
        let request = request.body(body.as_bytes().to_vec()).expect("a request");
        pages.respond(request, Visitor::unknown(Ipv4Addr::LOCALHOST.into()))
    };
    for path in operator_pages() {
        let response = ask("GET", &format!("{path}?tenant={}", Uuid::nil()), "");
        let said = text(&response);
        assert!(
            said.contains("<h1")
                && matches!(response.status(), StatusCode::OK | StatusCode::NOT_FOUND),
            "{path}: {} {said}",
            response.status()
        );
        let is_of_endpoints = path.starts_with("/endpoints");
        assert_eq!(
            said.contains("outbox_create_endpoints"),
            is_of_endpoints,
            "{path}: {said}"
        );
    }
    let document = ask("GET", "/api/v1/openapi.json", "");
    let document: Value = serde_json::from_str(text(&document)).expect("JSON");
    for (path, operations) in document["paths"].as_object().expect("paths") {
        if operations.get("get").is_none() {
            continue;
        }
        let of = path
            .replace("{name}", "acme")
            .replace("{kind}", "topic")
            .replace("{sequence}", "1")
            .replace("{tenant}", &Uuid::now_v7().to_string())
            .replace("{id}", &Uuid::now_v7().to_string());
        let response = ask("GET", &format!("/api/v1{of}"), "");
        let (status, said) = (response.status(), text(&response));
        if path.ends_with("/events") {
            assert_eq!(status, StatusCode::FORBIDDEN, "these pages show no content");
        } else if path.starts_with("/endpoints") {
            assert_eq!(status, StatusCode::NOT_IMPLEMENTED, "{path}: {said}");
            assert!(said.contains(CURE), "{path}: {said}");
        } else {
            assert!(
                status.is_success() || status == StatusCode::NOT_FOUND,
                "{path}: {status} {said}"
            );
        }
    }
    let new = json!({ "name": "acme", "endpoint": { "url": "https://acme.example/" } }).to_string();
    let response = ask("POST", "/api/v1/endpoints", &new);
    assert_eq!(
        response.status(),
        StatusCode::NOT_IMPLEMENTED,
        "{}",
        text(&response)
    );
    let paused = ask(
        "POST",
        "/api/v1/pauses",
        r#"{"kind": "topic", "name": "order.paid", "reason": "a test"}"#,
    );
    assert!(paused.status().is_success(), "{}", text(&paused));
}

/// R70: customers learn no command.
#[test]
fn the_portal_says_that_it_is_not_set_up() {
    let database = Database::without_endpoints();
    let config = config(&database);
    let url = config.database_url().expect("a database");
    let portal = Pages::portal(&config, url).expect("a portal");
    let portal = portal.key([7; 32]).expect("a key");
    let portal = portal.topic("order.paid", "An order was paid.", json!({}));
    let tenant = Uuid::now_v7();
    let visitor = Visitor::of_tenant(tenant, "someone", Rights::all());
    for (method, path, _) in portal_routes().filter(|(method, ..)| method == Method::GET) {
        let request = Request::builder()
            .method(method)
            .uri(format!("{path}?name=acme&id={}", Uuid::nil()))
            .header("host", "shop.example");
        let response = portal.respond(
            request.body(Vec::new()).expect("a request"),
            visitor.clone(),
        );
        let (status, said) = (response.status(), text(&response));
        assert!(
            [
                StatusCode::OK,
                StatusCode::NOT_FOUND,
                StatusCode::NOT_IMPLEMENTED
            ]
            .contains(&status),
            "{path}: {status} {said}"
        );
        let is_missing = said.contains("Webhooks are not set up here yet.");
        assert_eq!(
            is_missing,
            status == StatusCode::NOT_IMPLEMENTED,
            "{path}: {said}"
        );
        assert!(!said.contains("migrate"), "{path}: {said}");
    }
    let token = portal.token(tenant, Duration::from_secs(60), Rights::all());
    let request = Request::get("/api/v1/endpoints")
        .header("host", "shop.example")
        .header("authorization", format!("Bearer {token}"));
    let stranger = Visitor::unknown(Ipv4Addr::LOCALHOST.into());
    let response = portal.respond(request.body(Vec::new()).expect("a request"), stranger);
    assert_eq!(
        response.status(),
        StatusCode::NOT_IMPLEMENTED,
        "{}",
        text(&response)
    );
    assert!(text(&response).contains("endpoints are not available here"));
}
