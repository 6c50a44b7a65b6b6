//! A shop as a process, with real HTTP: orders arrive as shipments, and a stop loses none. A test of
//! this shop and of the one on Rocket, which do the same.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::BigInt;

/// Whichever of the two this test was built with.
const PROGRAM: &str = match (
    option_env!("CARGO_BIN_EXE_shop"),
    option_env!("CARGO_BIN_EXE_rocket-shop"),
) {
    (Some(path), _) | (None, Some(path)) => path,
    (None, None) => panic!("cargo tells where the program is"),
};
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn every_order_is_shipped_once_also_after_a_stop() {
    let database = Database::new();
    let shop = Shop::start(&database);
    let first = shop.order().expect("an order");
    shop.wait_for_shipments(&[first]);

    // The stop comes while customers order and messages are on their way.
    let accepted = Mutex::new(Vec::new());
    std::thread::scope(|customers| {
        for _ in 0..4 {
            customers.spawn(|| {
                let until = Instant::now() + PATIENCE;
                while Instant::now() < until {
                    match shop.order() {
                        Ok(order) => lock(&accepted).push(order),
                        // It may have been placed: nobody was told so.
                        Err(ureq::Error::Timeout(_)) => {}
                        Err(_) => break,
                    }
                }
            });
        }
        eventually("100 orders are accepted", || lock(&accepted).len() >= 100);
        shop.terminate();
    });
    let status = shop.wait();
    assert!(status.success(), "{status}");
    // Its relay has ended its lease, and kept no message.
    let leases = database.numbers("SELECT id FROM outbox_lease");
    assert!(leases.is_empty(), "{leases:?}");
    let claimed = database.numbers("SELECT sequence FROM outbox WHERE locked_by IS NOT NULL");
    assert!(claimed.is_empty(), "{claimed:?}");

    let orders = database.numbers("SELECT id FROM orders ORDER BY id");
    for order in lock(&accepted).iter() {
        assert!(orders.contains(order), "order {order} was accepted");
    }
    let shop = Shop::start(&database);
    shop.wait_for_shipments(&orders);
    shop.terminate();
    assert!(shop.wait().success());
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `condition` holds. Fails with `what`.
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "this did not happen: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A running shop, killed when dropped.
struct Shop {
    child: Child,
    url: String,
    client: ureq::Agent,
}

/// The server under rouille (tiny_http 0.12) may leave a connection in its queue while all of its threads wait for
/// the relay's next request: two connections that come at once count one free thread twice. So clients give up
/// and try again.
fn client() -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(Duration::from_secs(5)))
        .max_idle_connections(0);
    config.build().new_agent()
}

impl Shop {
    fn start(database: &Database) -> Self {
        let mut child = Command::new(PROGRAM)
            .env("DATABASE_URL", &database.url)
            .env("WEBHOOK_SECRET", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
            .env("PORT", "0")
            .env("ROCKET_PORT", "0")
            .env("ROCKET_CLI_COLORS", "false")
            .env("ROCKET_LOG_LEVEL", "critical")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the shop starts");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut lines = stdout.lines().map_while(Result::ok);
        let url = lines
            .find_map(|line| Some(line.split_once("launched from ")?.1.trim().to_owned()))
            .expect("it says where it listens");
        // A full pipe would stop it.
        std::thread::spawn(move || lines.for_each(drop));
        Self {
            child,
            url,
            client: client(),
        }
    }

    /// Places an order and returns its number.
    fn order(&self) -> Result<i64, ureq::Error> {
        let mut response = self
            .client
            .post(format!("{}/orders", self.url))
            .content_type("application/json")
            .send(r#"{"euro": 42}"#)?;
        let placed: HashMap<String, i64> = response.body_mut().read_json()?;
        Ok(placed["order_id"])
    }

    fn wait_for_shipments(&self, orders: &[i64]) {
        eventually("every order is shipped once", || {
            let response = self.client.get(format!("{}/shipments", self.url)).call();
            let Ok(mut response) = response else {
                return false;
            };
            let shipments: Vec<i64> = response.body_mut().read_json().expect("JSON");
            shipments == orders
        });
    }

    /// Tells it to end, as a service manager does.
    fn terminate(&self) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(sent.expect("kill runs").success());
    }

    fn wait(mut self) -> ExitStatus {
        eventually("the shop ends", || {
            self.child.try_wait().expect("our child").is_some()
        });
        self.child.wait().expect("our child")
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An empty database beside the one that DATABASE_URL names, removed when dropped.
struct Database {
    server: String,
    name: String,
    url: String,
}

impl Database {
    fn new() -> Self {
        let server = std::env::var("DATABASE_URL").expect("run this by scripts/with-postgres");
        let name = format!("shop_{}", std::process::id());
        let (base, _) = server.rsplit_once('/').expect("a URL");
        let url = format!("{base}/{name}");
        let database = Self { server, name, url };
        database.on_server(&format!("CREATE DATABASE {}", database.name));
        database
    }

    fn numbers(&self, select: &str) -> Vec<i64> {
        let mut conn = PgConnection::establish(&self.url).expect("PostgreSQL is there");
        let rows: Vec<Number> = diesel::sql_query(format!(
            "SELECT number::bigint FROM ({select}) AS rows (number)"
        ))
        .load(&mut conn)
        .expect(select);
        rows.into_iter().map(|row| row.number).collect()
    }

    fn on_server(&self, sql: &str) {
        PgConnection::establish(&self.server)
            .expect("PostgreSQL is there")
            .batch_execute(sql)
            .expect(sql);
    }
}

#[derive(QueryableByName)]
struct Number {
    #[diesel(sql_type = BigInt)]
    number: i64,
}

impl Drop for Database {
    fn drop(&mut self) {
        self.on_server(&format!(
            "DROP DATABASE IF EXISTS {} WITH (FORCE)",
            self.name
        ));
    }
}
