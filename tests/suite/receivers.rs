//! Receivers of every kind: what each response, or a missing response, means for the message. No receiver harms the
//! relay or the next message.

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

// --- Answers that are not HTTP ------------------------------------------------------------

#[test]
fn an_answer_that_is_not_http_is_a_protocol_failure() {
    is_dead_lettered_for("PROTOCOL", |stream| {
        stream.write_all(b"220 mail.example ESMTP ready\r\n\r\n")
    });
}

#[test]
fn an_answer_as_of_http_0_9_is_a_protocol_failure() {
    is_dead_lettered_for("PROTOCOL", |stream| {
        stream.write_all(b"<html>ok</html>\n")?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

// --- Answers with 200 and something wrong with the rest of the head ------------------------

/// Sends a message to a receiver that writes `answer` and closes the connection, and then another message.
#[track_caller]
fn is_delivered_by(answer: impl Into<Vec<u8>>) {
    let answer = answer.into();
    is_delivered(move |stream| {
        stream.write_all(&answer)?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

#[test]
fn a_head_that_ends_in_the_middle_is_a_delivery() {
    is_delivered_by("HTTP/1.1 200 OK\r\ncontent-le");
}

#[test]
fn odd_lines_in_a_head_are_a_delivery() {
    let lines = "x-a: 1\r\n folded\r\nx-b : 2\r\nx-c: \u{1}\r\nno colon\r\n";
    is_delivered_by(format!(
        "HTTP/1.1 200 OK\r\n{lines}content-length: 2\r\n\r\nok"
    ));
}

#[test]
fn many_headers_or_a_long_one_are_a_delivery() {
    let many = "x-a: 1\r\n".repeat(150);
    let long = format!("x-b: {}\r\n", "b".repeat(70_000));
    is_delivered_by(format!(
        "HTTP/1.1 200 OK\r\n{many}{long}content-length: 2\r\n\r\nok"
    ));
}

#[test]
fn an_interim_answer_with_headers_is_passed_over() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 100 Continue\r\nx-a: 1\r\n\r\n")?;
        stream.write_all(&status(200))
    });
}

#[test]
fn endless_headers_are_a_delivery() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\n")?;
        loop {
            stream.write_all(b"x-and-so-on: and so on and so on and so on\r\n")?;
        }
    });
}

#[test]
fn one_endless_header_is_a_delivery() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nx-a: ")?;
        loop {
            stream.write_all(&[b'a'; 4096])?;
        }
    });
}

// --- Answers with 200 and something wrong with the body -----------------------------------

const TEN_MEGABYTES: usize = 10_000_000;

#[test]
fn an_answer_of_ten_megabytes_with_a_length_is_a_delivery() {
    is_delivered(|stream| {
        stream.write_all(
            format!("HTTP/1.1 200 OK\r\ncontent-length: {TEN_MEGABYTES}\r\n\r\n").as_bytes(),
        )?;
        stream.write_all(&vec![b'x'; TEN_MEGABYTES])
    });
}

#[test]
fn an_answer_of_ten_megabytes_without_a_length_is_a_delivery() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
        stream.write_all(&vec![b'x'; TEN_MEGABYTES])?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

#[test]
fn of_an_endless_body_a_bounded_part_is_read_and_kept() {
    let database = Database::new();
    let (sender, written) = mpsc::channel();
    let sender = Mutex::new(sender);
    let receiver = Receiver::start(move |_, stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
        let chunk = [b"10000\r\n".as_slice(), &[b'x'; 0x10000], b"\r\n"].concat();
        let mut count = 0;
        while stream.write_all(&chunk).is_ok() {
            count += chunk.len();
        }
        let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = sender.send(count);
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
    // Long enough for the relay, not its timeout, to end the connection.
    let relay = database
        .relay()
        .send_timeout(Duration::from_secs(100))
        .lease(Duration::from_secs(300))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    let written = written
        .recv_timeout(Duration::from_secs(30))
        .expect("the relay has closed the connection");
    // At most the system's buffers.
    assert!(written < 32 * 1024 * 1024, "{written} bytes were taken");
    assert_eq!(
        database.number("SELECT octet_length(response) FROM {o}_ledger"),
        2048
    );
    end(&relay);
}

#[test]
fn a_content_length_that_is_too_long_does_not_matter() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nok")?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

#[test]
fn a_content_length_that_is_too_long_on_an_open_connection_does_not_matter() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nok")?;
        until_it_goes(stream)
    });
}

#[test]
fn a_content_length_that_is_too_short_does_not_matter() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok, thanks")
    });
}

#[test]
fn a_body_in_wrong_chunks_does_not_matter() {
    is_delivered(|stream| {
        stream.write_all(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nwhat?\r\nok\r\n0\r\n\r\n",
        )
    });
}

#[test]
fn a_body_that_is_not_utf_8_does_not_matter() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n\xff\xfe\0\x1b\x80")
    });
}

#[test]
fn a_204_is_a_delivery() {
    is_delivered(|stream| stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n"));
}

#[test]
fn an_answer_of_http_1_0_is_a_delivery() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nok")?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

#[test]
fn interim_answers_before_the_200_are_passed_over() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        stream.write_all(b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>; rel=preload\r\n\r\n")?;
        stream.write_all(&status(200))
    });
}

#[test]
fn an_interim_answer_and_nothing_after_it_is_no_delivery() {
    is_dead_lettered_for("TIMEOUT", |stream| {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        until_it_goes(stream)
    });
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

// --- What a request looks like ------------------------------------------------------------

/// Reads one request as raw bytes: the lines of its head, and its body.
fn read_raw(stream: &mut TcpStream) -> (Vec<String>, Vec<u8>) {
    let mut reader = BufReader::new(stream);
    let head: Vec<String> = (&mut reader)
        .lines()
        .map(|line| line.expect("a line"))
        .take_while(|line| !line.is_empty())
        .collect();
    let length = head
        .iter()
        .find_map(|line| {
            line.to_lowercase()
                .strip_prefix("content-length:")
                .map(str::to_owned)
        })
        .expect("a length");
    let mut body = vec![0; length.trim().parse().expect("a number")];
    reader.read_exact(&mut body).expect("a body");
    (head, body)
}

#[test]
fn a_request_has_these_headers_and_no_others() {
    let database = Database::new();
    let (sender, requests) = mpsc::channel();
    let sender = Mutex::new(sender);
    let address = listen(move |mut stream| {
        let request = read_raw(&mut stream);
        let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
        sender.send(request).expect("the test waits");
        let _ = stream.write_all(&status(200));
    });
    let message = NewMessage::new("order.paid", &json!({ "n": 1 }))
        .expect("JSON")
        .idempotency_key("order \"7\"\\ä")
        .ordering_key("Straße 7")
        .header("X-Shop", "Berlin")
        .header("ce-region", "eu")
        .header("authorization", "Bearer t")
        .trace_context(
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            Some("vendor=1"),
        );
    let id = message.message_id().to_string();
    let before = SystemTime::now();
    let sequence = database.enqueue_message(message);
    let relay = relay(&database)
        .url(&format!("http://{address}/hooks/in?a=b"))
        .start()
        .expect("a relay");
    let (head, body) = requests
        .recv_timeout(Duration::from_secs(30))
        .expect("a request");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);

    assert_eq!(head[0], "POST /hooks/in?a=b HTTP/1.1");
    assert_eq!(body, br#"{"n":1}"#);
    let mut headers: HashMap<&str, &str> = HashMap::new();
    for line in &head[1..] {
        let (name, value) = line.split_once(": ").expect("a header");
        assert_eq!(
            headers.insert(name, value),
            None,
            "the header {name} repeats"
        );
    }
    let mut take = |name: &str| headers.remove(name).unwrap_or_else(|| panic!("no {name}"));

    // Times by the clock of one machine: this attempt's in Unix seconds, the message's in RFC 3339.
    let unix = |time: SystemTime| {
        time.duration_since(UNIX_EPOCH)
            .expect("after 1970")
            .as_secs()
    };
    let timestamp: u64 = take("webhook-timestamp").parse().expect("Unix seconds");
    assert!((unix(before)..=unix(SystemTime::now())).contains(&timestamp));
    let time = take("ce-time");
    assert!(
        database.number(&format!(
            "SELECT count(*) FROM {{o}}_ledger WHERE created_at = '{time}'::timestamptz"
        )) == 1,
        "{time} is the time of the enqueue"
    );
    assert!(time.ends_with('Z') && time.contains('T'), "{time}");

    // The same trace and flags, and a new span for this attempt.
    let traceparent = take("traceparent");
    assert_eq!(traceparent[..36], *"00-0af7651916cd43dd8448eb211c80319c-");
    assert_ne!(traceparent[36..52], *"b7ad6b7169203331");
    assert_eq!(traceparent[52..], *"-01");

    let sequence = sequence.to_string();
    let source = format!("diesel-outbox/{}", database.name());
    let agent = format!("diesel-outbox/{}", env!("CARGO_PKG_VERSION"));
    let host = address.to_string();
    for (name, expected) in [
        ("host", host.as_str()),
        ("content-type", "application/json"),
        ("content-length", "7"),
        ("webhook-id", &id),
        ("idempotency-key", r#""order \"7\"\\%C3%A4""#),
        ("outbox-attempt", "1"),
        ("user-agent", &agent),
        ("ce-specversion", "1.0"),
        ("ce-id", &id),
        ("ce-source", &source),
        ("ce-type", "order.paid"),
        ("ce-sequence", &sequence),
        ("ce-partitionkey", "Stra%C3%9Fe%207"),
        ("ce-region", "eu"),
        ("x-shop", "Berlin"),
        ("authorization", "Bearer t"),
        ("tracestate", "vendor=1"),
        ("accept", "*/*"),
    ] {
        assert_eq!(take(name), expected, "{name}");
    }
    assert_eq!(headers, HashMap::new(), "unexpected headers");
}

#[test]
fn the_body_is_what_was_stored_byte_for_byte() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let payload = " { \"b\" : 1.0e+2 ,\t\"a\":[ ],\n\r\n \"b\": \"\\u00e4\u{e4}\\/ \u{1f600}\" } ";
    database.execute(&format!(
        "INSERT INTO {{o}} (topic, payload) VALUES ('order.paid', '{payload}')"
    ));
    // A timeout would be retried sooner.
    let relay = relay(&database)
        .lease(Duration::from_secs(120))
        .send_timeout(Duration::from_secs(30))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    assert_eq!(
        String::from_utf8(receiver.requests()[0].body.clone()).as_deref(),
        Ok(payload)
    );
}

#[test]
fn a_topic_and_keys_in_any_language_arrive_percent_encoded() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, idempotency_key)
         VALUES ('заказ.100%', '1', '東京', 'ключ')",
    );
    let relay = relay(&database)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    let request: &Request = &receiver.requests()[0];
    assert_eq!(
        request.header("ce-type"),
        Some("%D0%B7%D0%B0%D0%BA%D0%B0%D0%B7.100%25")
    );
    assert_eq!(
        request.header("ce-partitionkey"),
        Some("%E6%9D%B1%E4%BA%AC")
    );
    assert_eq!(
        request.header("idempotency-key"),
        Some("\"%D0%BA%D0%BB%D1%8E%D1%87\"")
    );
}

#[test]
fn a_repeat_has_the_same_ids_and_the_next_attempts_number() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.header("outbox-attempt") {
        Some("1") => 500,
        _ => 200,
    });
    database.enqueue("order.paid", json!(1));
    let relay = relay(&database)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    let requests = receiver.requests();
    for name in [
        "webhook-id",
        "ce-id",
        "ce-time",
        "ce-sequence",
        "idempotency-key",
    ] {
        assert_eq!(requests[0].header(name), requests[1].header(name), "{name}");
    }
    assert_eq!(requests[1].header("outbox-attempt"), Some("2"));
}

#[test]
fn stored_headers_that_cannot_be_sent_kill_the_message_unsent() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for headers in [
        r#"{"webhook-id": "1"}"#,
        r#"{"Content-Length": "1"}"#,
        r#"{"CE-Type": "other"}"#,
        r#"{"outbox-attempt": "1"}"#,
        r#"{"x-a": "1\r\nx-b: 2"}"#,
        r#"{"x a": "1"}"#,
        r#"{"x-a": 1}"#,
    ] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, headers) VALUES ('order.paid', '1', '{headers}')"
        ));
    }
    let relay = relay(&database)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("all messages are dead-lettered", || {
        database.count("dead") == 7
    });
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_dead WHERE reason = 'INVALID_HEADER'"),
        7
    );
    assert_eq!(receiver.count(), 0);
    database.execute(
        r#"INSERT INTO {o} (topic, payload, headers) VALUES ('order.paid', '1', '{"X-A": "1"}')"#,
    );
    eventually("the next message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(receiver.requests()[0].header("x-a"), Some("1"));
    end(&relay);
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

/// Responses that are nearly HTTP, made from a seed: parts of a real response, cut, repeated, swapped and mixed with
/// noise.
fn odd_answer(seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let parts: [&[u8]; 16] = [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 429 Slow\r\n",
        b"HTTP/1.0 503 \r\n",
        b"HTTP/9.9 99999 ?\r\n",
        b"retry-after: 99999999999999999999\r\n",
        b"retry-after: Sun, 06 Nov 9994 08:49:37 GMT\r\n",
        b"retry-after: \xff\xfe\r\n",
        b"content-length: 18446744073709551616\r\n",
        b"content-length: 5\r\n",
        b"transfer-encoding: chunked\r\n",
        b"content-encoding: gzip\r\n",
        b"fffffffffffffffff\r\n",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"\r\n",
        b": \r\n",
        b"\0\x1b[2J\x7f\r\r\n\n",
    ];
    let mut answer = Vec::new();
    if random.bool() {
        // Starts with a valid part.
        answer.extend_from_slice(parts[random.usize(..3)]);
    }
    for _ in 0..random.usize(0..8) {
        let part = parts[random.usize(..parts.len())];
        let end = if random.u8(..4) == 0 {
            random.usize(..=part.len())
        } else {
            part.len()
        };
        answer.extend_from_slice(&part[..end]);
        if random.u8(..8) == 0 {
            answer.extend(std::iter::repeat_with(|| random.u8(..)).take(20));
        }
    }
    if random.bool() {
        answer.extend_from_slice(b"\r\n\r\n\x1b[2J\0 body");
    }
    answer
}

#[test]
fn any_bytes_that_a_receiver_answers_have_an_outcome() {
    const ANSWERS: usize = 300;
    let database = Database::new();
    let receiver = Receiver::start(|request, stream| {
        let seed = request.json()["n"].as_u64().expect("a number");
        stream.write_all(&odd_answer(seed))?;
        // Closing the connection ends the response.
        Err(std::io::ErrorKind::Other.into())
    });
    database.enqueue_many(ANSWERS);
    let mut destination = Destination::new("odd", &receiver.url()).expect("a URL");
    destination.policy.breaker = None;
    destination.policy.retry_after_cap = Duration::from_millis(10);
    let relay = relay(&database)
        .max_attempts(1)
        .destination(destination)
        .route("*", "odd")
        .start()
        .expect("a relay");
    eventually("all messages are settled", || {
        usize::try_from(database.count("delivered") + database.count("dead")) == Ok(ANSWERS)
    });
    end(&relay);
    // The responses are of many kinds, and what is stored of them has no control characters.
    assert!(database.count("delivered") > 0 && database.count("dead") > 0);
    assert!(database.number("SELECT count(DISTINCT reason) FROM {o}_dead") >= 3);
    assert_eq!(
        database.number(
            "SELECT count(*) FROM {o}_ledger
              WHERE coalesce(response, '') || coalesce(error, '') ~ '[\\x01-\\x08\\x0b-\\x1f\\x7f]'"
        ),
        0
    );
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
