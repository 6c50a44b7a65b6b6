//! Runs the shop as a process, with a real PostgreSQL and a real receiver.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::connection::{Connection, SimpleConnection};
use diesel_outbox::receive::{Headers, Verifier};
use rouille::{Response, Server};

const PATIENCE: Duration = Duration::from_secs(60);
/// `acme:one` and `globex:two`, as browsers log in.
const ACME: &str = "Basic YWNtZTpvbmU=";
const GLOBEX: &str = "Basic Z2xvYmV4OnR3bw==";

#[test]
fn customers_register_webhooks_see_their_deliveries_and_send_again() {
    let (database, receiver) = (Database::new(), Receiver::start());
    let open = [
        ("OUTBOX_REGISTERED_HTTPS_ONLY", "false"),
        ("OUTBOX_REGISTERED_PUBLIC_ONLY", "false"),
    ];
    let shop = Shop::start(&database, &open);
    let url = format!("http://{}/<b>", receiver.address);
    let form = [
        ("url", url.as_str()),
        ("description", "<script>alert('me')</script>"),
        ("topics", "order.placed"),
        ("from_euro", "40"),
    ];
    let hook = shop.post(ACME, "/webhooks", &form).location();
    let events = shop.get(ACME, "/events").ok();
    assert!(
        events.contains("## order.placed\n\nAn order was placed."),
        "{events}"
    );
    // Both pages show all input as text.
    for path in ["/", &hook] {
        let page = shop.get(ACME, path).ok();
        assert!(
            page.contains("&lt;script&gt;alert(") && !page.contains("<script"),
            "{page}"
        );
        assert!(!page.contains("<b>"), "{page}");
    }
    let secret = |page: &str| {
        let (_, rest) = page.split_once("id=\"secret\">").expect("the secret");
        rest.split_once('<')
            .expect("the end of the secret")
            .0
            .to_owned()
    };
    let first = secret(&shop.get(ACME, &hook).ok());

    // Only orders of this customer, from 40 euro.
    for (customer, euro) in [(ACME, "39"), (GLOBEX, "50"), (ACME, "42")] {
        shop.post(customer, "/orders", &[("euro", euro), ("is_paid", "on")])
            .location();
    }
    let request = receiver.wait_for(1).remove(0);
    assert!(request.is_of(&first));
    let body = String::from_utf8_lossy(&request.body);
    assert!(
        body.ends_with(r#""type":"order.placed","data":{"order_id":3,"euro":42}}"#),
        "{body}"
    );
    shop.wait_for(&hook, "delivered");

    // Other customers cannot see or change the webhook.
    let again = [("message_id", request.id())];
    assert_eq!(shop.get(GLOBEX, &hook).status, 404);
    for action in ["again", "test", "rotate", "remove"] {
        assert_eq!(
            shop.post(GLOBEX, &format!("{hook}/{action}"), &again)
                .status,
            404
        );
    }
    assert_eq!(shop.get("Basic bm9ib2R5Og==", "/").status, 401);
    assert_eq!(
        shop.post_from("http://evil.example", &format!("{hook}/remove"))
            .status,
        403
    );

    shop.post(ACME, &format!("{hook}/again"), &again).location();
    let second = receiver.wait_for(2).remove(1);
    assert_eq!(second.id(), request.id());

    // Both secrets sign for a day.
    shop.post(ACME, &format!("{hook}/rotate"), &[]).location();
    let new = secret(&shop.get(ACME, &hook).ok());
    assert_ne!(new, first);
    let page = shop.post(ACME, &format!("{hook}/test"), &[]).ok();
    assert!(
        page.contains("Your server responded with 200") && page.contains("The event was accepted"),
        "{page}"
    );
    let test = receiver.wait_for(3).remove(2);
    let body = String::from_utf8_lossy(&test.body);
    assert!(body.contains(r#""type":"outbox.test""#), "{body}");
    assert!(test.is_of(&first) && test.is_of(&new));

    // A message that the server refuses becomes a dead letter, and is sent again once the server accepts it.
    receiver.status.store(422, Ordering::SeqCst);
    shop.post(ACME, "/orders", &[("euro", "77")]).location();
    let page = shop.wait_for(&hook, "dead");
    assert!(
        page.contains("422 your endpoint refused the request"),
        "{page}"
    );
    receiver.status.store(200, Ordering::SeqCst);
    let dead = receiver.wait_for(4).remove(3);
    shop.post(ACME, &format!("{hook}/again"), &[("message_id", dead.id())])
        .location();
    assert_eq!(receiver.wait_for(5)[4].id(), dead.id());

    shop.post(ACME, &format!("{hook}/disable"), &[]).location();
    assert!(
        shop.get(ACME, &hook)
            .ok()
            .contains("disabled by the customer")
    );
    shop.post(ACME, &format!("{hook}/remove"), &[]).location();
    assert_eq!(shop.get(ACME, &hook).status, 404);
    drop(shop);

    // With the default settings.
    let shop = Shop::start(&database, &[]);
    let register = |url: &str, topic: &str| {
        let form = [("url", url), ("description", ""), ("topics", topic)];
        shop.post(ACME, "/webhooks", &form)
    };
    let inside = [
        "http://acme.example/",
        "https://10.0.0.7/",
        "https://[::1]/",
        "ftp://acme.example",
        "none",
    ];
    for url in inside {
        assert_eq!(register(url, "order.placed").status, 422, "{url}");
    }
    assert_eq!(register("https://acme.example/", "outbox.test").status, 422);
    for _ in 0..10 {
        register("https://acme.example/", "order.paid").location();
    }
    assert_eq!(register("https://acme.example/", "order.paid").status, 422);
    assert!(
        register("https://globex.example/", "order.paid")
            .body
            .contains("remove one")
    );
}

/// A running shop, killed when dropped.
struct Shop {
    child: Child,
    url: String,
    client: ureq::Agent,
}

struct Answer {
    status: u16,
    location: Option<String>,
    body: String,
}

impl Answer {
    fn ok(self) -> String {
        assert_eq!(self.status, 200, "{}", self.body);
        self.body
    }

    fn location(self) -> String {
        assert_eq!(self.status, 303, "{}", self.body);
        self.location.expect("a location")
    }
}

impl Shop {
    fn start(database: &Database, settings: &[(&str, &str)]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_webhooks"))
            .env("DATABASE_URL", &database.url)
            .env("CUSTOMERS", "acme:one,globex:two")
            .env("PORT", "0")
            .envs(settings.iter().copied())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the shop starts");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let line = stdout.lines().next().expect("a line").expect("text");
        let url = line
            .split_once("launched from ")
            .expect("the address")
            .1
            .to_owned();
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_idle_connections(0);
        let client = config.timeout_global(Some(PATIENCE)).build().new_agent();
        Self { child, url, client }
    }

    fn get(&self, login: &str, path: &str) -> Answer {
        let request = self.client.get(format!("{}{path}", self.url));
        answer(request.header("authorization", login).call())
    }

    fn post(&self, login: &str, path: &str, form: &[(&str, &str)]) -> Answer {
        let request = self.client.post(format!("{}{path}", self.url));
        let request = request
            .header("authorization", login)
            .header("origin", &self.url);
        answer(
            request
                .content_type("application/x-www-form-urlencoded")
                .send(encoded(form)),
        )
    }

    fn post_from(&self, origin: &str, path: &str) -> Answer {
        let request = self.client.post(format!("{}{path}", self.url));
        answer(
            request
                .header("authorization", ACME)
                .header("origin", origin)
                .send(""),
        )
    }

    /// The page of the webhook, once it shows a delivery in this state.
    fn wait_for(&self, hook: &str, state: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let page = self.get(ACME, hook).ok();
            if page.contains(&format!("<td>{state}</td>")) {
                return page;
            }
            assert!(Instant::now() < until, "{page}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn encoded(form: &[(&str, &str)]) -> String {
    let escape =
        |text: &str| -> String { text.bytes().map(|byte| format!("%{byte:02x}")).collect() };
    let pairs: Vec<String> = form
        .iter()
        .map(|(name, value)| format!("{name}={}", escape(value)))
        .collect();
    pairs.join("&")
}

fn answer(response: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Answer {
    let mut response = response.expect("a response");
    let location = response
        .headers()
        .get("location")
        .and_then(|value| value.to_str().ok())
        .map(str::to_owned);
    let body = response.body_mut().read_to_string().expect("text");
    Answer {
        status: response.status().as_u16(),
        location,
        body,
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The server of a customer.
struct Receiver {
    address: SocketAddr,
    status: Arc<AtomicU16>,
    requests: Arc<Mutex<Vec<Received>>>,
}

#[derive(Clone)]
struct Received {
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Received {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(own, _)| own.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    fn id(&self) -> &str {
        self.header("webhook-id").expect("an id")
    }

    /// Whether the request is signed with this secret.
    fn is_of(&self, secret: &str) -> bool {
        let verifier = Verifier::new(&[secret.parse().expect("a secret")]).expect("a verifier");
        let headers = self
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()));
        verifier.verify(&Headers::new(headers), &self.body).is_ok()
    }
}

impl Receiver {
    fn start() -> Self {
        let (status, requests) = (
            Arc::new(AtomicU16::new(200)),
            Arc::<Mutex<Vec<Received>>>::default(),
        );
        let (answer, seen) = (Arc::clone(&status), Arc::clone(&requests));
        let server = Server::new("127.0.0.1:0", move |request| {
            let mut body = Vec::new();
            request
                .data()
                .expect("a body")
                .read_to_end(&mut body)
                .expect("read");
            let headers = request
                .headers()
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect();
            seen.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(Received { headers, body });
            Response::text("thank you").with_status_code(answer.load(Ordering::SeqCst))
        });
        let server = server.expect("a receiver");
        let address = server.server_addr();
        std::thread::spawn(move || server.run());
        Self {
            address,
            status,
            requests,
        }
    }

    fn wait_for(&self, count: usize) -> Vec<Received> {
        let until = Instant::now() + PATIENCE;
        loop {
            let requests = self
                .requests
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            if requests.len() >= count {
                return requests;
            }
            assert!(
                Instant::now() < until,
                "{} of {count} requests arrived",
                requests.len()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
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
        let name = format!("webhooks_{}", std::process::id());
        let (base, _) = server.rsplit_once('/').expect("a URL");
        let url = format!("{base}/{name}");
        let database = Self { server, name, url };
        database.on_server(&format!("CREATE DATABASE {}", database.name));
        database
    }

    fn on_server(&self, sql: &str) {
        let mut conn = PgConnection::establish(&self.server).expect("PostgreSQL is reachable");
        conn.batch_execute(sql).expect(sql);
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
