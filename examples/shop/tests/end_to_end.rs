//! Runs a shop as a process with real HTTP: orders arrive as shipments, and a shutdown loses none. Tests this shop
//! and the shop on Rocket, which behave the same.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::BigInt;

/// The shop that this test was built for.
const PROGRAM: &str = match (
    option_env!("CARGO_BIN_EXE_shop"),
    option_env!("CARGO_BIN_EXE_rocket-shop"),
) {
    (Some(path), _) | (None, Some(path)) => path,
    (None, None) => panic!("cargo sets the path of the program"),
};
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn every_order_is_shipped_once_also_after_a_stop() {
    let database = Database::new();
    let shop = Shop::start(&database);
    let first = shop.order().expect("an order");
    shop.wait_for_shipments(&[first]);

    // Stop the shop while customers order and messages are in flight.
    let accepted = Mutex::new(Vec::new());
    std::thread::scope(|customers| {
        for _ in 0..4 {
            customers.spawn(|| {
                let until = Instant::now() + PATIENCE;
                while Instant::now() < until {
                    match shop.order() {
                        Ok(order) => lock(&accepted).push(order),
                        // The order may have been placed without a response.
                        Err(ureq::Error::Timeout(_)) => {}
                        Err(_) => break,
                    }
                }
            });
        }
        eventually("100 orders were accepted", || lock(&accepted).len() >= 100);
        shop.terminate();
    });
    let status = shop.wait();
    assert!(status.success(), "{status}");
    // The relay has ended its lease and released its messages.
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

#[test]
fn the_pages_of_the_outbox_are_for_staff_of_the_shop() {
    let database = Database::new();
    let shop = Shop::start(&database);
    // ann:secret, ann:guess
    let (staff, other) = ("Basic YW5uOnNlY3JldA==", "Basic YW5uOmd1ZXNz");
    assert_eq!(shop.page("/admin/outbox", other).0, 401);
    for path in [
        "/admin/outbox",
        "/admin/outbox/",
        "/admin/outbox/dead?topic=a",
    ] {
        let (status, page) = shop.page(path, staff);
        assert_eq!(status, 200, "{path}: {page}");
        assert!(page.contains("href=\"/admin/outbox/messages\""), "{page}");
        assert!(!page.contains("href=\"/messages\""), "{page}");
    }
    let (_, page) = shop.page("/admin/outbox", staff);
    let (_, rest) = page
        .split_once("name=\"form_token\" value=\"")
        .expect("a form");
    let (token, _) = rest.split_once('"').expect("a value");
    let pause = |origin: &str, token: &str| {
        let response = shop
            .client
            .post(format!("{}/admin/outbox/pause", shop.url))
            .config()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .build()
            .header("authorization", staff)
            .header("origin", origin)
            .content_type("application/x-www-form-urlencoded")
            .send(format!("kind=topic&name=order.paid&form_token={token}"));
        let response = response.expect("a response");
        let location = response.headers().get("location");
        let location = location.map(|to| to.to_str().expect("a path").to_owned());
        (response.status().as_u16(), location)
    };
    assert_eq!(pause("http://evil.example", token), (403, None));
    assert_eq!(pause(&shop.url, "guess"), (403, None));
    let done = Some("/admin/outbox/?done=paused".to_owned());
    assert_eq!(pause(&shop.url, token), (303, done));
    let audit = "SELECT count(*) FROM outbox_audit WHERE who = 'ann' AND act = 'pause'";
    assert_eq!(database.numbers(audit), [1]);
}

#[test]
fn a_customer_with_a_link_has_webhooks_which_get_the_customers_orders() {
    let database = Database::new();
    let shop = Shop::start(&database);
    let (customer, other) = (
        "0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c",
        "0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3d",
    );
    assert_eq!(shop.link(customer, "Basic YW5uOmd1ZXNz").0, 401);
    assert_eq!(shop.visit("/webhooks/", "").0, 403);
    let (mine, others) = (shop.open(customer), shop.open(other));
    let (address, requests) = endpoint();
    let (status, page) = shop.visit("/webhooks/endpoints/new", &mine);
    assert_eq!(status, 200, "{page}");
    let (_, rest) = page
        .split_once("name=\"form_token\" value=\"")
        .expect("a form");
    let (token, _) = rest.split_once('"').expect("a value");
    let add = shop
        .client
        .post(format!("{}/webhooks/endpoints/add", shop.url))
        .header("cookie", &mine)
        .header("origin", &shop.url)
        .content_type("application/x-www-form-urlencoded")
        .send(format!("url=http://{address}/&form_token={token}"));
    let page = add.expect("added").body_mut().read_to_string();
    assert!(page.expect("a page").contains("id=\"secret\""));

    // Only orders of this customer, while the shop ships all.
    let of = |customer: &str| {
        let order = format!(r#"{{"euro": 42, "customer": "{customer}"}}"#);
        shop.order_as(&order).expect("an order")
    };
    let orders = [of(other), shop.order().expect("an order"), of(customer)];
    let request = requests.recv_timeout(PATIENCE).expect("a request");
    let order = format!(r#"{{"order_id":{},"euro":42}}"#, orders[2]);
    assert!(request.contains(&order), "{request}");
    shop.wait_for_shipments(&orders);
    assert_eq!(requests.try_recv(), Err(TryRecvError::Empty));
    let (_, page) = shop.visit("/webhooks/", &mine);
    let (_, rest) = page
        .split_once("href=\"/webhooks/endpoint?name=")
        .expect("the endpoint");
    let (name, _) = rest.split_once('"').expect("its name");
    let path = format!("/webhooks/endpoint?name={name}");
    eventually("the delivery is listed", || {
        shop.visit(&path, &mine)
            .1
            .contains("badge good\">delivered")
    });
    assert_eq!(shop.visit(&path, &others).0, 404);
    assert!(!shop.visit("/webhooks/", &others).1.contains(name));
}

/// The server of a customer: its address, and the requests that it has accepted.
fn endpoint() -> (SocketAddr, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let (sender, requests) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.expect("a connection"));
            let mut request = String::new();
            while !request.ends_with("\r\n\r\n") {
                assert_ne!(stream.read_line(&mut request).expect("a head"), 0);
            }
            let length = request
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "))
                .map_or(0, |length| length.parse().expect("a number"));
            let mut body = stream.by_ref().take(length);
            body.read_to_string(&mut request).expect("a body");
            let answer = b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n";
            stream.get_mut().write_all(answer).expect("an answer");
            if sender.send(request).is_err() {
                break;
            }
        }
    });
    (address, requests)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `condition` holds. Fails with `what`.
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Status and content of a response.
fn text(response: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> (u16, String) {
    let mut response = response.expect("a response");
    let text = response.body_mut().read_to_string().expect("a text");
    (response.status().as_u16(), text)
}

/// A running shop, killed when dropped.
struct Shop {
    child: Child,
    url: String,
    client: ureq::Agent,
}

/// The server under rouille (tiny_http 0.12) may leave a connection in its queue while all of its threads wait for
/// the next request of the relay, because two simultaneous connections count one free thread twice. Therefore
/// clients time out and retry.
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
            .env("ADMIN_PASSWORD", "secret")
            .env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false")
            .env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false")
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
            .expect("the shop prints its address");
        // A full pipe would block the shop.
        std::thread::spawn(move || lines.for_each(drop));
        Self {
            child,
            url,
            client: client(),
        }
    }

    /// Places an order and returns its number.
    fn order(&self) -> Result<i64, ureq::Error> {
        self.order_as(r#"{"euro": 42}"#)
    }

    fn order_as(&self, order: &str) -> Result<i64, ureq::Error> {
        let mut response = self
            .client
            .post(format!("{}/orders", self.url))
            .content_type("application/json")
            .send(order)?;
        let placed: HashMap<String, i64> = response.body_mut().read_json()?;
        Ok(placed["order_id"])
    }

    /// Status and content of a page that somebody with this login asks for.
    fn page(&self, path: &str, login: &str) -> (u16, String) {
        self.get(path, "authorization", login)
    }

    /// Status and content of a page that a browser with this cookie asks for.
    fn visit(&self, path: &str, cookie: &str) -> (u16, String) {
        self.get(path, "cookie", cookie)
    }

    fn get(&self, path: &str, header: &str, value: &str) -> (u16, String) {
        let request = self.client.get(format!("{}{path}", self.url));
        let request = request.config().http_status_as_error(false).build();
        text(request.header(header, value).call())
    }

    /// The link that somebody with this login gets for this customer.
    fn link(&self, customer: &str, login: &str) -> (u16, String) {
        let url = format!("{}/customers/{customer}/webhooks", self.url);
        let request = self.client.post(url);
        let request = request.config().http_status_as_error(false).build();
        text(request.header("authorization", login).send_empty())
    }

    /// The cookie of a customer who has opened a link of the staff.
    fn open(&self, customer: &str) -> String {
        let (status, link) = self.link(customer, "Basic YW5uOnNlY3JldA==");
        assert_eq!(status, 200, "{link}");
        let request = self.client.get(format!("{}{link}", self.url));
        let request = request.config().max_redirects(0);
        let request = request.max_redirects_will_error(false).build();
        let response = request.call().expect("a response");
        assert_eq!(response.status(), 303);
        let cookie = response.headers()["set-cookie"].to_str().expect("a text");
        cookie.split(';').next().expect("a cookie").to_owned()
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

    /// Sends SIGTERM, as a service manager does.
    fn terminate(&self) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(sent.expect("kill runs").success());
    }

    fn wait(mut self) -> ExitStatus {
        eventually("the shop ends", || {
            self.child
                .try_wait()
                .expect("a child of this process")
                .is_some()
        });
        self.child.wait().expect("a child of this process")
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An empty database on the server of DATABASE_URL, removed when dropped.
struct Database {
    server: String,
    name: String,
    url: String,
}

impl Database {
    fn new() -> Self {
        let server = std::env::var("DATABASE_URL").expect("run this with scripts/with-postgres");
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("shop_{}_{number}", std::process::id());
        let (base, _) = server.rsplit_once('/').expect("a URL");
        let url = format!("{base}/{name}");
        let database = Self { server, name, url };
        database.on_server(&format!("CREATE DATABASE {}", database.name));
        database
    }

    fn numbers(&self, select: &str) -> Vec<i64> {
        let mut conn = PgConnection::establish(&self.url).expect("PostgreSQL is reachable");
        let rows: Vec<Number> = diesel::sql_query(format!(
            "SELECT number::bigint FROM ({select}) AS rows (number)"
        ))
        .load(&mut conn)
        .expect(select);
        rows.into_iter().map(|row| row.number).collect()
    }

    fn on_server(&self, sql: &str) {
        PgConnection::establish(&self.server)
            .expect("PostgreSQL is reachable")
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
