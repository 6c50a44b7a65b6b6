//! Shared by the tests of the examples with brokers: a database, and a relay as a process.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_outbox::{NewMessage, Outbox};

const PATIENCE: Duration = Duration::from_secs(90);
const KEYS: usize = 8;

/// Waits until `condition` holds. Fails with `what`.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process, killed when dropped.
pub struct Process(Child);

impl Process {
    /// A relay for this database, which is running.
    pub fn relay(mut command: Command, database: &Database) -> Self {
        let mut child = command
            .env("DATABASE_URL", &database.url)
            .env("OUTBOX_BACKOFF", "100ms")
            .env("OUTBOX_MAX_ATTEMPTS", "1000")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the relay starts");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut lines = stdout.lines().map_while(Result::ok);
        let first = lines.next();
        assert_eq!(first.as_deref(), Some("the relay is running"));
        Self(child)
    }

    pub fn start(command: &mut Command) -> Self {
        Self(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .expect("it starts"),
        )
    }

    /// Kills the process: it can do nothing more.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// An empty database on the server of DATABASE_URL, removed when dropped.
pub struct Database {
    server: String,
    name: String,
    pub url: String,
}

impl Database {
    pub fn new(test: &str) -> Self {
        let server = std::env::var("DATABASE_URL").expect("run this with scripts/with-postgres");
        let name = format!("{test}_{}", std::process::id());
        let (base, _) = server.rsplit_once('/').expect("a URL");
        let url = format!("{base}/{name}");
        let database = Self { server, name, url };
        database.on_server(&format!("CREATE DATABASE {}", database.name));
        database
    }

    pub fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url).expect("PostgreSQL is reachable")
    }

    fn on_server(&self, sql: &str) {
        PgConnection::establish(&self.server)
            .expect("PostgreSQL is reachable")
            .batch_execute(sql)
            .expect(sql);
    }

    /// Enqueues these numbers, in turn for each key.
    pub fn enqueue(&self, numbers: std::ops::Range<usize>) {
        let outbox = Outbox::new("outbox")
            .expect("a name")
            .allow_outside_transaction();
        let messages = numbers.map(|n| {
            let message = NewMessage::new("order.paid", &n).expect("JSON");
            message.ordering_key(format!("order-{}", n % KEYS))
        });
        let messages: Vec<NewMessage> = messages.collect();
        outbox
            .enqueue_batch(&mut self.connect(), messages)
            .expect("enqueued");
    }

    pub fn delivered(&self) -> usize {
        self.count("SELECT count(*) FROM outbox_ledger WHERE status = 'delivered'")
    }

    pub fn count(&self, select: &str) -> usize {
        #[derive(QueryableByName)]
        struct Count {
            #[diesel(sql_type = BigInt)]
            count: i64,
        }
        let count: Count = diesel::sql_query(select)
            .get_result(&mut self.connect())
            .expect("a count");
        usize::try_from(count.count).expect("a count")
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        self.on_server(&format!(
            "DROP DATABASE IF EXISTS {} WITH (FORCE)",
            self.name
        ));
    }
}

/// Fails unless all numbers below `all` have arrived, first in the order of their keys. Returns the number of repeats.
pub fn repeats(arrived: &[(String, usize)], all: usize) -> usize {
    let mut next: HashMap<&str, usize> = HashMap::new();
    let mut first = 0;
    for (key, number) in arrived {
        let expected = next.entry(key).or_insert(number % KEYS);
        assert!(number <= expected, "{key}: {number} instead of {expected}");
        if number == expected {
            *expected += KEYS;
            first += 1;
        }
    }
    assert_eq!(first, all);
    arrived.len() - first
}
