//! Receivers of every kind: what each response, or a missing response, means for the message. No receiver harms the
//! relay or the next message.

mod answers;
mod requests;

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel_outbox::{Destination, NewMessage, RelayBuilder, RelayHandle};
use serde_json::json;

use crate::support::{Database, Receiver, Request, eventually, finish, status};

type Io = std::io::Result<()>;

/// A relay that gives up after two attempts, so that a test sees both the reason and a repeat.
fn relay(database: &Database) -> RelayBuilder {
    database.relay().max_attempts(2)
}

fn end(relay: &RelayHandle) {
    assert!(relay.is_healthy(), "the relay is still healthy");
    relay
        .shutdown(Duration::from_secs(10))
        .expect("a clean shutdown");
}

/// Handles every attempt of the first message with `answer`, and responds to others with 200.
fn receiver_of(answer: impl Fn(&mut TcpStream) -> Io + Send + Sync + 'static) -> Receiver {
    Receiver::start(move |request, stream| {
        if request.json()["n"] == 1 {
            answer(stream)
        } else {
            stream.write_all(&status(200))
        }
    })
}

/// Sends a message to a receiver that handles it with `answer`, and then another message. The first must be
/// dead-lettered after two attempts with `reason`; the second must be delivered.
#[track_caller]
fn is_dead_lettered_for(
    reason: &str,
    answer: impl Fn(&mut TcpStream) -> Io + Send + Sync + 'static,
) {
    let database = Database::new();
    let receiver = receiver_of(answer);
    let relay = relay(&database)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("the first message is dead-lettered", || {
        database.count("dead") == 1
    });
    assert_eq!(
        database.text("SELECT reason FROM {o}_dead").as_deref(),
        Some(reason),
        "{:?}",
        database.text("SELECT last_error FROM {o}_dead")
    );
    assert_eq!(database.number("SELECT attempts FROM {o}_dead"), 2);
    let attempts: Vec<_> = receiver
        .requests()
        .iter()
        .map(|request| request.header("outbox-attempt").map(str::to_owned))
        .collect();
    assert_eq!(attempts, [Some("1".to_owned()), Some("2".to_owned())]);
    assert_eq!(receiver.ids().len(), 1, "both attempts have the same id");

    database.enqueue("order.paid", json!({ "n": 2 }));
    eventually("the second message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
}

/// Sends a message to a receiver that handles it with `answer`, and then another message. Both must be delivered, the
/// first by its first attempt.
#[track_caller]
fn is_delivered(answer: impl Fn(&mut TcpStream) -> Io + Send + Sync + 'static) {
    let database = Database::new();
    let receiver = receiver_of(answer);
    // With one sender, the second message would meet leftovers of the first response on the connection.
    let relay = relay(&database)
        .concurrency(1)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    let first = database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("the first message is settled", || {
        database.number("SELECT count(*) FROM {o}_ledger") == 1
    });
    assert_eq!(
        database.count("delivered"),
        1,
        "the first message is not dead"
    );
    let attempts = |sequence: i64| {
        database.number(&format!(
            "SELECT attempts FROM {{o}}_ledger WHERE sequence = {sequence}"
        ))
    };
    assert_eq!(attempts(first), 1);
    let second = database.enqueue("order.paid", json!({ "n": 2 }));
    eventually("the second message is delivered", || {
        database.count("delivered") == 2
    });
    assert_eq!(
        attempts(second),
        1,
        "leftovers of the first response cost the second message an attempt"
    );
    assert_eq!(receiver.count(), 2);
    end(&relay);
}

/// Sends nothing until the client closes the connection.
fn until_it_goes(stream: &mut TcpStream) -> Io {
    // The client's end of the connection: end of file or an error.
    let _ = stream.read(&mut [0]);
    Err(std::io::ErrorKind::ConnectionAborted.into())
}

/// Writes one byte after another, slowly, forever.
fn drip(stream: &mut TcpStream, text: &[u8]) -> Io {
    for byte in text.iter().cycle() {
        stream.write_all(&[*byte])?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

// --- Receivers that do not answer ---------------------------------------------------------

/// R15.
#[test]
fn a_receiver_that_hangs_costs_its_message_an_attempt_by_timeout() {
    is_dead_lettered_for("TIMEOUT", until_it_goes);
}

#[test]
fn a_receiver_that_stops_in_its_status_costs_its_message_an_attempt_by_timeout() {
    is_dead_lettered_for("TIMEOUT", |stream| {
        stream.write_all(b"HTTP/1.1 20")?;
        until_it_goes(stream)
    });
}

#[test]
fn a_receiver_that_drips_its_head_has_the_message() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nx-a: ")?;
        drip(stream, b"a")
    });
}

#[test]
fn a_receiver_that_drips_its_body_for_ever_has_the_message() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
        drip(stream, b"body ")
    });
}

#[test]
fn a_receiver_that_closes_before_it_answers_is_tried_again() {
    is_dead_lettered_for("CONNECTION_LOST", |_| {
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

#[test]
fn a_receiver_that_closes_in_the_middle_of_its_status_is_tried_again() {
    is_dead_lettered_for("CONNECTION_LOST", |stream| {
        stream.write_all(b"HTTP/1.1 20")?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

/// Accepts connections and handles each with `serve` in its own thread, until the test ends.
fn listen(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let serve = Arc::new(serve);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = Arc::clone(&serve);
            std::thread::spawn(move || serve(stream));
        }
    });
    address
}

/// Sends a message to `url`, where it must be dead-lettered with `reason`, and a message of another topic to a good
/// receiver.
#[track_caller]
fn is_dead_lettered_at(
    url: &str,
    reason: &str,
    payload: &serde_json::Value,
    timeout: Duration,
) -> String {
    let database = Database::new();
    let good = Receiver::ok();
    let relay = relay(&database)
        .send_timeout(timeout)
        .lease(3 * timeout)
        .url(url)
        .destination(Destination::new("good", &good.url()).expect("a URL"))
        .route("order.shipped", "good")
        .start()
        .expect("a relay");
    database.enqueue("order.paid", payload.clone());
    eventually("the first message is dead-lettered", || {
        database.count("dead") == 1
    });
    let error = database
        .text("SELECT last_error FROM {o}_dead")
        .expect("an error");
    assert_eq!(
        database.text("SELECT reason FROM {o}_dead").as_deref(),
        Some(reason),
        "{error}"
    );
    assert_eq!(database.number("SELECT attempts FROM {o}_dead"), 2);
    database.enqueue("order.shipped", json!(2));
    eventually("the second message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    error
}

/// Larger than the buffers of a connection, so the writer notices a reader that stops.
fn large_payload() -> serde_json::Value {
    json!("x".repeat(1_000_000))
}

#[test]
fn a_receiver_that_closes_after_half_of_the_request_is_tried_again() {
    let address = listen(|mut stream| {
        let mut half = vec![0; 100_000];
        let _ = stream.read_exact(&mut half);
        let _ = stream.shutdown(Shutdown::Both);
    });
    is_dead_lettered_at(
        &format!("http://{address}/"),
        "CONNECTION_LOST",
        &large_payload(),
        Duration::from_secs(1),
    );
}

#[test]
fn a_receiver_that_resets_is_tried_again() {
    // Closing a connection with unread bytes resets it.
    let address = listen(|mut stream| {
        let _ = stream.read_exact(&mut [0]);
    });
    is_dead_lettered_at(
        &format!("http://{address}/"),
        "CONNECTION_LOST",
        &json!(1),
        Duration::from_secs(1),
    );
}

#[test]
fn a_refused_connection_is_tried_again() {
    // A port that was free a moment ago: no process listens there.
    let address = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port");
    is_dead_lettered_at(
        &format!("http://{address}/"),
        "CONNECT",
        &json!(1),
        Duration::from_secs(1),
    );
}

#[test]
fn an_unknown_host_name_is_tried_again() {
    // A resolver without a network needs time to fail.
    let error = is_dead_lettered_at(
        "http://receiver.invalid/",
        "DNS",
        &json!(1),
        Duration::from_secs(25),
    );
    assert!(error.contains("receiver.invalid"), "{error}");
}

// --- TLS ----------------------------------------------------------------------------------

#[test]
fn tls_with_a_receiver_that_speaks_plain_http_fails_as_tls() {
    let address = listen(|mut stream| {
        let _ = stream.read(&mut [0; 1024]);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n");
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.read(&mut [0; 1024]);
    });
    is_dead_lettered_at(
        &format!("https://{address}/"),
        "TLS",
        &json!(1),
        Duration::from_secs(1),
    );
}

/// `openssl s_server` with a self-signed certificate, killed when dropped.
struct SelfSigned {
    server: Child,
    port: u16,
}

impl SelfSigned {
    fn start() -> Self {
        let folder = std::env::temp_dir().join(format!("outbox-tls-{}", uuid::Uuid::now_v7()));
        std::fs::create_dir(&folder).expect("a folder");
        let (key, certificate) = (folder.join("key.pem"), folder.join("certificate.pem"));
        let made = Command::new("openssl")
            .args([
                "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
            ])
            .args([
                "-subj",
                "/CN=localhost",
                "-addext",
                "subjectAltName=DNS:localhost",
            ])
            .arg("-keyout")
            .arg(&key)
            .arg("-out")
            .arg(&certificate)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .expect("openssl is there: `make test` installs it");
        assert!(made.success(), "openssl makes a certificate");
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("a port")
            .port();
        let mut server = Command::new("openssl")
            .args(["s_server", "-www", "-accept", &port.to_string()])
            .arg("-key")
            .arg(&key)
            .arg("-cert")
            .arg(&certificate)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("openssl runs");
        let stdout = server.stdout.take().expect("piped");
        let accepts = BufReader::new(stdout)
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains("ACCEPT"));
        std::fs::remove_dir_all(&folder).expect("our folder");
        assert!(accepts, "openssl listens on {port}");
        Self { server, port }
    }
}

impl Drop for SelfSigned {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
fn a_certificate_without_a_known_signer_is_refused() {
    let receiver = SelfSigned::start();
    is_dead_lettered_at(
        &format!("https://localhost:{}/", receiver.port),
        "TLS",
        &json!(1),
        Duration::from_secs(2),
    );
}

// --- Statuses -----------------------------------------------------------------------------

#[test]
fn a_redirect_is_a_failed_attempt_and_never_followed() {
    let database = Database::new();
    let target = Receiver::ok();
    let location = target.url();
    let receiver = Receiver::start(move |request, stream| {
        let status = request.json()["status"].clone();
        if status == 200 {
            return stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
        }
        stream.write_all(
            format!(
                "HTTP/1.1 {status} Elsewhere\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n"
            )
            .as_bytes(),
        )
    });
    let relay = relay(&database)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    for status in [301, 302, 303, 307, 308] {
        database.enqueue("order.paid", json!({ "status": status }));
    }
    eventually("all messages are dead-lettered", || {
        database.count("dead") == 5
    });
    assert_eq!(
        database.number(
            "SELECT count(*) FROM {o}_dead WHERE reason = 'REDIRECT' AND attempts = 2
               AND http_status = (payload->>'status')::int"
        ),
        5
    );
    assert_eq!(receiver.count(), 10);
    assert_eq!(target.count(), 0, "the redirect was followed");
    database.enqueue("order.paid", json!({ "status": 200 }));
    eventually("the next message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
}

/// R22.
#[test]
fn a_refusal_for_good_kills_the_message_at_once_and_others_are_tried_again() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| {
        let status = request.json()["status"].as_u64().expect("a status");
        u16::try_from(status).expect("a status")
    });
    let relay = relay(&database)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    let cases = [
        (400, "REJECTED", 1),
        (413, "REJECTED", 1),
        (415, "REJECTED", 1),
        (422, "REJECTED", 1),
        (401, "CLIENT_ERROR", 2),
        (403, "CLIENT_ERROR", 2),
        (404, "CLIENT_ERROR", 2),
        (409, "CLIENT_ERROR", 2),
        (429, "RATE_LIMITED", 2),
        (500, "SERVER_ERROR", 2),
        (503, "SERVER_ERROR", 2),
    ];
    for (status, _, _) in cases {
        database.enqueue("order.paid", json!({ "status": status }));
    }
    eventually("all messages are dead-lettered", || {
        usize::try_from(database.count("dead")) == Ok(cases.len())
    });
    for (status, reason, attempts) in cases {
        let found = database.text(&format!(
            "SELECT reason || ' ' || attempts || ' ' || http_status FROM {{o}}_dead
              WHERE payload->>'status' = '{status}'"
        ));
        assert_eq!(found, Some(format!("{reason} {attempts} {status}")));
        let sent = receiver
            .requests()
            .iter()
            .filter(|request| request.json()["status"] == status)
            .count();
        assert_eq!(sent, attempts, "{status}");
    }
    database.enqueue("order.paid", json!({ "status": 200 }));
    eventually("the next message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
}

#[test]
fn the_next_attempt_is_not_before_what_retry_after_says_in_either_form() {
    let database = Database::new();
    let not_before: Arc<Mutex<HashMap<String, SystemTime>>> = Arc::default();
    let (early, told) = (mpsc::channel(), Arc::clone(&not_before));
    let (early, was_early) = (Mutex::new(early.0), early.1);
    let receiver = Receiver::start(move |request, stream| {
        let now = SystemTime::now();
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(not_before) = told.get(&request.id()) {
            if now < *not_before {
                let early = early.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = early.send(request.json());
            }
            return stream.write_all(&status(200));
        }
        let (value, until) = if request.json()["form"] == "date" {
            // A date has no fractions of a second.
            let seconds = now
                .duration_since(UNIX_EPOCH)
                .expect("after 1970")
                .as_secs();
            let until = UNIX_EPOCH + Duration::from_secs(seconds + 2);
            (httpdate::fmt_http_date(until), until)
        } else if request.json()["form"] == "odd" {
            ("0.5, 0.5".to_owned(), now + Duration::from_secs(1))
        } else {
            ("1".to_owned(), now + Duration::from_secs(1))
        };
        told.insert(request.id(), until);
        let status = &request.json()["status"];
        stream.write_all(
            format!("HTTP/1.1 {status} Later\r\nretry-after: {value}\r\ncontent-length: 0\r\n\r\n")
                .as_bytes(),
        )
    });
    // A send that times out would rightly be repeated early.
    let relay = relay(&database)
        .send_timeout(Duration::from_secs(20))
        .lease(Duration::from_secs(60))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    for status in [408, 425, 429, 503] {
        for form in ["seconds", "odd", "date"] {
            database.enqueue("order.paid", json!({ "status": status, "form": form }));
        }
    }
    eventually("all messages are delivered", || {
        database.count("delivered") == 12
    });
    assert_eq!(
        was_early.try_iter().collect::<Vec<_>>(),
        Vec::<serde_json::Value>::new(),
        "these messages came too early"
    );
    assert_eq!(receiver.count(), 24);
    end(&relay);
}

// --- Connections --------------------------------------------------------------------------

#[test]
fn many_messages_share_few_connections() {
    let database = Database::new();
    let peers: Arc<Mutex<HashSet<SocketAddr>>> = Arc::default();
    let seen = Arc::clone(&peers);
    let receiver = Receiver::start(move |_, stream| {
        let peer = stream.peer_addr()?;
        seen.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(peer);
        stream.write_all(&status(200))
    });
    database.enqueue_many(500);
    let relay = relay(&database)
        .concurrency(4)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 500
    });
    let peers = peers.lock().unwrap_or_else(PoisonError::into_inner).len();
    assert!(peers <= 4, "{peers} connections for four senders");
    end(&relay);
}

#[test]
fn a_receiver_that_closes_idle_connections_loses_nothing() {
    let database = Database::new();
    let receiver = Receiver::start(|_, stream| {
        // The response does not announce the close.
        stream.write_all(&status(200))?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
    let relay = database
        .relay()
        .concurrency(2)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    for n in 0..20 {
        database.enqueue("order.paid", json!({ "n": n }));
        eventually("the message is delivered", || {
            database.count("delivered") == n + 1
        });
    }
    assert_eq!(receiver.ids().len(), 20);
    end(&relay);
}

#[test]
fn a_receiver_that_closes_soon_after_each_answer_costs_no_attempt() {
    const MESSAGES: usize = 400;
    let database = Database::new();
    let waits = Mutex::new(fastrand::Rng::with_seed(18));
    let receiver = Receiver::start(move |_, stream| {
        stream.write_all(&status(200))?;
        let wait = waits
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .u64(..5_000);
        std::thread::sleep(Duration::from_micros(wait));
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
    database.enqueue_many(MESSAGES);
    let relay = database
        .relay()
        .concurrency(4)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("all messages are delivered", || {
        usize::try_from(database.count("delivered")) == Ok(MESSAGES)
    });
    end(&relay);
    assert_eq!(
        database.number("SELECT max(attempts) FROM {o}_ledger"),
        1,
        "{:?}",
        database.text("SELECT string_agg(DISTINCT error, ', ') FROM {o}_ledger")
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}_pause"), 0);
}

#[test]
fn no_proxy_is_taken_from_the_environment() {
    let database = Database::new();
    let proxy = Receiver::ok();
    let receiver = Receiver::ok();
    database.enqueue("order.paid", json!(1));
    let mut drain = database.binary(&["drain"]);
    drain.env("OUTBOX_URL", receiver.url());
    for variable in [
        "HTTP_PROXY",
        "http_proxy",
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
    ] {
        drain.env(variable, format!("http://{}", proxy.address));
    }
    drain.env_remove("NO_PROXY").env_remove("no_proxy");
    finish(drain).code(0);
    assert_eq!(receiver.count(), 1);
    assert_eq!(proxy.count(), 0);
    assert_eq!(database.count("delivered"), 1);
}

#[test]
fn one_bad_receiver_does_not_hold_up_another() {
    let database = Database::new();
    let (bad, gate) = Receiver::held();
    let good = Receiver::ok();
    database
        .execute("INSERT INTO {o} (topic, payload) SELECT 'slow', '1' FROM generate_series(1, 2)");
    let relay = database
        .relay()
        .send_timeout(Duration::from_secs(100))
        .lease(Duration::from_secs(300))
        .url(&bad.url())
        .destination(Destination::new("good", &good.url()).expect("a URL"))
        .route("order.*", "good")
        .start()
        .expect("a relay");
    bad.wait_for(2);
    database.enqueue_many(50);
    eventually("the other messages are delivered", || {
        database.count("delivered") == 50
    });
    assert_eq!(database.count("sending"), 2);
    gate.open();
    eventually("the two messages are delivered", || {
        database.count("delivered") == 52
    });
    end(&relay);
}

/// An operator sees where the relay could not connect to, without the secrets of the URL.
#[test]
fn a_connection_error_names_the_address_and_no_secret() {
    let database = Database::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let url = format!("http://ada:hunter2@localhost:{port}/hook?token=hunter3");
    let relay = relay(&database)
        .max_attempts(1)
        .url(&url)
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    end(&relay);
    let error = database
        .text("SELECT last_error FROM {o}_dead")
        .expect("an error");
    let place = format!("cannot connect to localhost:{port} (");
    assert!(error.starts_with(&place), "{error}");
    assert!(error.contains("127.0.0.1"), "{error}");
    assert!(!error.contains("hunter"), "{error}");
}
