//! Behind a real PgBouncer in transaction mode.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::{Connection, PgConnection};
use diesel_outbox::config::Config;
use diesel_outbox::{NewMessage, Relay, RelayHandle};
use serde_json::json;
use url::Url;

use crate::page::Page;
use crate::support::{Database, Receiver, Running, database_url, end, eventually, finish};

/// A PgBouncer in front of the tests' server, ended when dropped.
struct Pooler {
    process: Child,
    url: String,
    folder: std::path::PathBuf,
}

/// The program may be outside the user's search path.
const PROGRAMS: &[&str] = &["pgbouncer", "/usr/sbin/pgbouncer"];

impl Pooler {
    fn start() -> Self {
        Self::with("")
    }

    /// With one more line of settings.
    fn with(setting: &str) -> Self {
        let server = Url::parse(&database_url()).expect("a URL");
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|free| free.local_addr())
            .expect("a port")
            .port();
        let folder = std::env::temp_dir().join(format!("outbox-pooler-{port}"));
        std::fs::create_dir_all(&folder).expect("a folder");
        let settings = folder.join("pgbouncer.ini");
        let content = format!(
            "[databases]
             * = host={} port={} user={}
             [pgbouncer]
             listen_addr = 127.0.0.1
             listen_port = {port}
             unix_socket_dir =
             auth_type = any
             pool_mode = transaction
             default_pool_size = 3
             max_client_conn = 200
             {setting}
            ",
            server.host_str().expect("a host"),
            server.port().unwrap_or(5432),
            server.username(),
        );
        let content: String = content
            .lines()
            .map(|l| l.trim().to_owned() + "\n")
            .collect();
        std::fs::write(&settings, content).expect("written");
        let mut url = server;
        url.set_port(Some(port)).expect("a port");
        let process = PROGRAMS
            .iter()
            .find_map(|program| {
                let mut command = Command::new(program);
                // PgBouncer refuses to run as root.
                if is_root() {
                    command.args(["-u", "nobody"]);
                }
                command.arg("-q").arg(&settings).stdin(Stdio::null());
                command.spawn().ok()
            })
            .expect(
                "pgbouncer is installed: run `make test`, or `scripts/install-package pgbouncer`",
            );
        let pooler = Self {
            process,
            url: url.to_string(),
            folder,
        };
        eventually("the pooler listens", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        pooler
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().expect("id runs");
    id.stdout.starts_with(b"0\n")
}

fn relay(
    database: &Database,
    pooler: &Pooler,
    receiver: &Receiver,
    more: &[(&str, &str)],
) -> RelayHandle {
    let mut config = Config::default();
    let (table, url) = (database.name(), receiver.url());
    let settings = [
        ("DATABASE_URL", pooler.url.as_str()),
        ("OUTBOX_TABLE", &table),
        ("OUTBOX_URL", &url),
        ("OUTBOX_CONCURRENCY", "4"),
    ];
    for (variable, value) in settings.iter().chain(more) {
        config.set(variable, value).expect("a good setting");
    }
    Relay::from_config(config)
        .start()
        .expect("the relay starts")
}

/// Enqueues through the pooler, plain and keyed messages in turn.
fn enqueue(database: &Database, pooler: &Pooler, count: usize) {
    let outbox = database.outbox();
    let mut conn = PgConnection::establish(&pooler.url).expect("the pooler is there");
    // As any Diesel application must, unless the pooler supports prepared statements.
    conn.set_prepared_statement_cache_size(CacheSize::Disabled);
    for n in 0..count {
        conn.transaction(|conn| {
            let mut message = NewMessage::new("t", &json!({ "n": n })).expect("JSON");
            if n % 2 == 0 {
                message = message.ordering_key(format!("key-{}", n % 6));
            }
            outbox.enqueue(conn, message)
        })
        .expect("enqueued");
    }
}

/// R9: the relay works through the pooler, except the listener, which has a direct URL.
#[test]
fn a_relay_works_through_a_pooler_and_listens_beside_it() {
    let database = Database::new();
    let pooler = Pooler::start();
    let receiver = Receiver::answering(|request| {
        // Some messages fail, so that every kind of settle occurs.
        let is_first = request.header("outbox-attempt") == Some("1");
        match request.json()["n"].as_u64().expect("a number") % 10 {
            3 if is_first => 500,
            7 => 422,
            _ => 200,
        }
    });
    let more = [
        ("OUTBOX_LISTENER_URL", database.url.as_str()),
        ("OUTBOX_POLL_INTERVAL", "600s"),
        ("OUTBOX_BACKOFF", "10ms"),
        ("OUTBOX_LEASE", "60s"),
    ];
    let relay = relay(&database, &pooler, &receiver, &more);
    assert!(relay.wait_until_idle(Duration::from_secs(30)));
    for round in 1..=3_i64 {
        enqueue(&database, &pooler, 40);
        // Nothing notifies of retries: the relay finds them when it polls.
        eventually("all messages are settled", || {
            relay.wake();
            database.count("delivered") == 36 * round && database.count("dead") == 4 * round
        });
    }
    enqueue(&database, &pooler, 1);
    eventually("the last message came by notification", || {
        database.count("delivered") == 109
    });
    // The sessions belong to the pooler and outlive the relay.
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_lease WHERE takeover_after IS NULL"),
        1
    );
    end(&relay);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

/// R9: without a direct URL the relay polls, reports that once, and leaves the pooler's connections unchanged for
/// other clients.
#[test]
fn without_a_direct_connection_a_relay_behind_a_pooler_polls_and_says_so() {
    let database = Database::new();
    let pooler = Pooler::start();
    let receiver = Receiver::ok();
    let mut command = database.binary(&["run", "--url", &receiver.url()]);
    command.env("DATABASE_URL", &pooler.url);
    let relay = Running::start(command);
    enqueue(&database, &pooler, 30);
    receiver.wait_for(30);
    relay.wait_for_log("the database is behind a pooler");
    enqueue(&database, &pooler, 30);
    receiver.wait_for(60);
    assert_eq!(relay.log().matches("is behind a pooler").count(), 1);
    expect_untouched(&pooler);
    let status = database
        .binary(&["status", "--json"])
        .env("DATABASE_URL", &pooler.url)
        .output()
        .expect("the command runs");
    assert!(status.status.success(), "{status:?}");
    drop(relay);
    let mut check = database.binary(&["check", "--url", &receiver.url()]);
    check.env("DATABASE_URL", &pooler.url);
    let checked = finish(check).code(0).stdout;
    assert!(
        checked.contains("the connection leads through a pooler"),
        "{checked}"
    );
    let told = "DATABASE_URL leads through a pooler";
    assert!(checked.contains(told), "{checked}");
    let direct = finish(database.binary(&["check", "--url", &receiver.url()]))
        .code(0)
        .stdout;
    assert!(!direct.contains(told), "{direct}");
}

/// The sessions that an application gets from the pooler have no setting of a relay or a command.
fn expect_untouched(pooler: &Pooler) {
    // At once, so that the pooler uses all its connections.
    let mut through: Vec<PgConnection> = (0..3)
        .map(|_| {
            let mut conn = PgConnection::establish(&pooler.url).expect("the pooler is there");
            conn.set_prepared_statement_cache_size(CacheSize::Disabled);
            conn.batch_execute("BEGIN").expect("the pooler answers");
            conn
        })
        .collect();
    for conn in &mut through {
        for (name, value) in [
            ("statement_timeout", "0"),
            ("lock_timeout", "0"),
            ("enable_seqscan", "on"),
            ("search_path", "\"$user\", public"),
            ("row_security", "on"),
        ] {
            assert_eq!(setting(conn, name), value, "{name}");
        }
        conn.batch_execute("ROLLBACK").expect("the pooler answers");
    }
}

/// R9, R50: a pooler that drops `options` shares sessions all the same.
#[test]
fn options_in_the_url_do_not_make_a_pooler_a_direct_connection() {
    let database = Database::new();
    let pooler = Pooler::with("ignore_startup_parameters = extra_float_digits,options");
    let receiver = Receiver::ok();
    let with_options = format!("{}?options=-c%20geqo%3Doff", pooler.url);
    for url in [&with_options, &pooler.url] {
        let mut command = database.binary(&["run", "--url", &receiver.url()]);
        command.env("DATABASE_URL", url);
        let relay = Running::start(command);
        enqueue(&database, &pooler, 30);
        eventually("all messages are settled", || {
            database.number("SELECT count(*) FROM {o}") == 0
        });
        expect_untouched(&pooler);
        let mut status = database.binary(&["status"]);
        status.env("DATABASE_URL", url);
        finish(status).code(0);
        expect_untouched(&pooler);
        drop(relay);
    }
    assert_eq!(database.count("delivered"), 60);
}

/// R50: the relay and the commands read the schema that the application reads.
#[test]
fn options_of_the_environment_are_kept() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.execute("INSERT INTO {o} (topic, payload) VALUES ('t', '1')");
    let mut drain = database.binary(&["drain", "--table", "outbox", "--url", &receiver.url()]);
    drain.env("PGOPTIONS", format!("-c search_path={}", database.schema()));
    finish(drain).code(0);
    assert_eq!(database.count("delivered"), 1);
}

/// R9: a listener URL that leads through the pooler as well.
#[test]
fn a_listener_that_is_led_through_the_pooler_says_so() {
    let database = Database::new();
    let pooler = Pooler::start();
    let receiver = Receiver::ok();
    let mut command = database.binary(&["run", "--url", &receiver.url()]);
    command.env("DATABASE_URL", &pooler.url);
    command.env("OUTBOX_LISTENER_URL", &pooler.url);
    let relay = Running::start(command);
    relay.wait_for_log("OUTBOX_LISTENER_URL seems to lead to a pooler");
    enqueue(&database, &pooler, 10);
    receiver.wait_for(10);
}

fn setting(conn: &mut PgConnection, name: &str) -> String {
    #[derive(diesel::QueryableByName)]
    struct Row {
        #[diesel(sql_type = diesel::sql_types::Text)]
        value: String,
    }
    diesel::RunQueryDsl::get_result::<Row>(
        diesel::sql_query(format!("SELECT current_setting('{name}') AS value")),
        conn,
    )
    .expect("a setting")
    .value
}

/// A page that waits for a lock gives up in time and leaves no statement behind in the server.
#[test]
fn the_admin_pages_statements_end_behind_a_pooler() {
    let database = Database::new();
    let pooler = Pooler::start();
    let mut command = database.binary(&["admin"]);
    command.env("DATABASE_URL", &pooler.url);
    let page = Page::start(command);
    let name = database.name();
    let mut conn = database.connect();
    let waiting = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{}%'",
        database.schema()
    );
    conn.transaction::<_, diesel::result::Error, _>(|conn| {
        conn.batch_execute(&format!("LOCK TABLE {name}_dead"))?;
        let answer = page.get("/dead/1");
        assert_eq!(answer.status, 503, "{answer:?}");
        assert!(answer.body.contains("timeout"), "{}", answer.body);
        eventually("no statement waits for the lock", || {
            database.number(&waiting) == 0
        });
        Ok(())
    })
    .expect("the lock was held");
    assert_eq!(page.get("/dead/1").status, 404, "the page answers again");
}
