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
        ("OUTBOX_ENDPOINT_HTTPS_ONLY", "false"),
        ("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false"),
    ];
    let shop = Shop::start(&database, &open);
    let url = format!("http://{}/<b>", receiver.address);
    let form = [
        ("url", url.as_str()),
        ("description", "<script>alert('me')</script>"),
        ("topic", "order.placed"),
    ];
    let added = shop.form(ACME, "/webhooks/endpoints/add", &form).ok();
    let first = secret(&added);
    let events = shop.get(ACME, "/events").ok();
    assert!(
        events.contains("## order.placed\n\nAn order was placed."),
        "{events}"
    );
    let list = shop.get(ACME, "/webhooks/").ok();
    let (_, rest) = list
        .split_once("/webhooks/endpoint?name=")
        .expect("the webhook");
    let name = rest.split('"').next().expect("its name");
    let hook = format!("/webhooks/endpoint?name={name}");
    // Both pages show all input as text.
    for page in [list.clone(), shop.get(ACME, &hook).ok()] {
        assert!(
            page.contains("&lt;script&gt;alert(") && !page.contains("<script"),
            "{page}"
        );
        assert!(!page.contains("<b>"), "{page}");
    }

    // Only orders of this customer.
    for (customer, euro) in [(GLOBEX, "50"), (ACME, "42")] {
        shop.post(customer, "/orders", &[("euro", euro), ("is_paid", "on")])
            .location();
    }
    let request = receiver.wait_for(1).remove(0);
    assert!(request.is_of(&first));
    let body = String::from_utf8_lossy(&request.body);
    assert!(
        body.ends_with(r#""type":"order.placed","data":{"order_id":2,"euro":42}}"#),
        "{body}"
    );
    shop.wait_for(&hook, "badge good\">delivered");

    // Other customers cannot see or change the webhook.
    let again = [("name", name), ("id", request.id()), ("sure", "yes")];
    assert_eq!(shop.get(GLOBEX, &hook).status, 404);
    for act in [
        "endpoint/test",
        "endpoint/rotate",
        "endpoint/remove",
        "delivery/again",
    ] {
        let answer = shop.form(GLOBEX, &format!("/webhooks/{act}"), &again);
        assert_eq!(answer.status, 404, "{act}");
        // A form of another site has no token.
        let foreign = shop.post(ACME, &format!("/webhooks/{act}"), &again);
        assert_eq!(foreign.status, 403, "{act}");
    }
    assert_eq!(shop.get("Basic bm9ib2R5Og==", "/webhooks/").status, 401);
    let foreign = shop.post_from("http://evil.example", "/orders");
    assert_eq!(foreign.status, 403);

    shop.form(ACME, "/webhooks/delivery/again", &again)
        .location();
    let second = receiver.wait_for(2).remove(1);
    assert_eq!(second.id(), request.id());

    // Both secrets sign for a day.
    let new = secret(&shop.form(ACME, "/webhooks/endpoint/rotate", &again).ok());
    assert_ne!(new, first);
    let example = [("name", name), ("topic", "order.placed")];
    let page = shop.form(ACME, "/webhooks/endpoint/test", &example).ok();
    assert!(
        page.contains("HTTP 200") && page.contains("Your endpoint accepted the event"),
        "{page}"
    );
    let test = receiver.wait_for(3).remove(2);
    let body = String::from_utf8_lossy(&test.body);
    assert!(body.contains(r#""type":"order.placed""#), "{body}");
    assert!(test.is_of(&first) && test.is_of(&new));

    // A message that the server refuses becomes a dead letter, and is sent again once the server accepts it.
    receiver.status.store(422, Ordering::SeqCst);
    shop.post(ACME, "/orders", &[("euro", "77")]).location();
    let page = shop.wait_for(&hook, "badge bad\">given up");
    assert!(page.contains("your endpoint refused the request"), "{page}");
    receiver.status.store(200, Ordering::SeqCst);
    let dead = receiver.wait_for(4).remove(3);
    let again = [("name", name), ("id", dead.id())];
    shop.form(ACME, "/webhooks/delivery/again", &again)
        .location();
    assert_eq!(receiver.wait_for(5)[4].id(), dead.id());
    drop(shop);

    // With the default settings.
    let shop = Shop::start(&database, &[]);
    let register = |url: &str, topic: &str| {
        shop.form(
            ACME,
            "/webhooks/endpoints/add",
            &[("url", url), ("topic", topic)],
        )
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
    // The first webhook is still there.
    for _ in 1..10 {
        register("https://acme.example/", "order.paid").ok();
    }
    let refused = register("https://acme.example/", "order.paid");
    assert!(
        refused.body.contains("remove one first"),
        "{}",
        refused.body
    );
}

/// Word for word: a program of a customer has no login.
#[test]
fn customers_fetch_events_with_the_command_that_the_portal_shows() {
    let database = Database::new();
    let shop = Shop::start(&database, &[]);
    let form = [("kind", "feed"), ("topic", "order.placed")];
    let added = shop.form(ACME, "/webhooks/endpoints/add", &form).location();
    let (_, rest) = added.split_once("name=").expect("the page of the feed");
    let name = rest.split('&').next().expect("its name");
    for (customer, euro) in [(GLOBEX, "50"), (ACME, "42")] {
        shop.post(customer, "/orders", &[("euro", euro)]).location();
    }
    let form = [("name", name)];
    let made = shop.form(ACME, "/webhooks/feed/token", &form).ok();
    let (_, rest) = made.split_once(">curl ").expect("the command");
    let (rest, _) = rest.split_once('<').expect("the end of the command");
    let command = format!(
        "curl {}",
        rest.replace("&quot;", "\"").replace("&amp;", "&")
    );
    let until = Instant::now() + PATIENCE;
    let answer = loop {
        let ran = Command::new("sh").args(["-c", &command]).output();
        let answer = String::from_utf8(ran.expect("sh runs").stdout).expect("UTF-8");
        if answer.contains("order.placed") {
            break answer;
        }
        assert!(
            answer.starts_with("HTTP/1.1 200") && Instant::now() < until,
            "{command}: {answer}"
        );
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(answer.contains("outbox-feed-next: 1."), "{answer}");
    assert!(
        answer.contains("\"euro\":42") && !answer.contains("50}"),
        "{answer}"
    );
}

/// The secret that a page shows.
fn secret(page: &str) -> String {
    let (_, rest) = page.split_once("id=\"secret\">").expect("the secret");
    let (secret, _) = rest.split_once('<').expect("the end of the secret");
    secret.to_owned()
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

    /// Sends a form of the customer's own pages.
    fn form(&self, login: &str, path: &str, form: &[(&str, &str)]) -> Answer {
        let page = self.get(login, "/webhooks/endpoints/new").ok();
        let (_, rest) = page
            .split_once("name=\"form_token\" value=\"")
            .expect("a form");
        let token = rest.split('"').next().expect("a token");
        self.post(login, path, &[form, &[("form_token", token)]].concat())
    }

    /// The page of the webhook, once it shows a delivery with the badge of this state.
    fn wait_for(&self, hook: &str, state: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let page = self.get(ACME, hook).ok();
            if page.contains(state) {
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
        static NUMBER: AtomicU16 = AtomicU16::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("webhooks_{}_{number}", std::process::id());
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
