//! How the admin page's server handles requests that are too large, too slow or malformed.

use std::io::Write;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::admin_access::{open, with_token};
use crate::page::{SOON, read};
use crate::support::Database;

#[test]
fn too_large_requests_are_refused() {
    let database = Database::new();
    let page = open(&database);
    let long = "a".repeat(20_000);
    let many: String = (0..80).map(|number| format!("h{number}: 1\r\n")).collect();
    for (request, status) in [
        (format!("GET /{long} HTTP/1.1\r\nhost: localhost\r\n\r\n"), 431),
        (format!("GET / HTTP/1.1\r\nhost: localhost\r\nx: {long}\r\n\r\n"), 431),
        (format!("GET / HTTP/1.1\r\nhost: localhost\r\n{many}\r\n"), 431),
        ("POST /pause HTTP/1.1\r\nhost: localhost\r\ncontent-length: 262145\r\n\r\n".to_owned(), 413),
        ("POST /pause HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999\r\n\r\n".to_owned(), 400),
    ] {
        let answer = page.raw(request.as_bytes());
        assert_eq!(answer.status, status, "{}", &request[..60.min(request.len())]);
    }
    // The server discards the rest of the body: the response arrives, and the next request is served.
    let body = "a".repeat(3_000_000);
    let request =
        format!("POST /pause HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n\r\n{body}");
    let mut stream = page.connect();
    let _ = stream.write_all(request.as_bytes());
    assert_eq!(page.get("/livez").status, 200);
}

#[test]
fn an_invalid_request_gets_a_response_that_says_so() {
    let database = Database::new();
    let page = open(&database);
    for (request, status) in [
        (
            "GET http://127.0.0.1/ HTTP/1.1\r\nhost: localhost\r\n\r\n",
            400,
        ),
        ("OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
        ("DELETE / HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
        ("TRACE / HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
        ("GET / HTTP/9.9\r\n\r\n", 400),
        ("\u{1}\u{2}\u{3}\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nhost", 400),
        (
            "GET / HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
            400,
        ),
        (
            "GET / HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
            400,
        ),
        (
            "POST /pause HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
            400,
        ),
        (
            "POST /pause HTTP/1.1\r\nhost: localhost\r\ncontent-length: +5\r\n\r\nabcde",
            400,
        ),
        (
            "POST /pause HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nabc",
            400,
        ),
        (
            "POST /pause HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            501,
        ),
        (
            "POST /pause HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
            400,
        ),
        (
            "POST /pause HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcdefg\r\n0\r\n\r\n",
            400,
        ),
        (
            "POST /pause HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc",
            400,
        ),
        (
            "POST /pause HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nffffffffffff\r\nabc",
            413,
        ),
    ] {
        assert_eq!(page.raw(request.as_bytes()).status, status, "{request}");
    }
}

/// RFC 9112, 7.1: as .NET sends JSON.
#[test]
fn a_body_in_chunks_is_read_like_one_with_a_length() {
    let database = Database::new();
    let page = open(&database);
    let ask = |rest: &str| {
        let head = "POST /pause HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-www-form-urlencoded\r\n";
        let answer = page.raw(format!("{head}{rest}").as_bytes());
        (answer.status, answer.body)
    };
    let plain = ask("content-length: 16\r\n\r\nkind=topic&name=");
    for chunks in [
        "10\r\nkind=topic&name=\r\n0\r\n\r\n",
        "5\r\nkind=\r\n5;a=\"b\"\r\ntopic\r\n6\r\n&name=\r\n0\r\nx: y\r\n\r\n",
        "05\r\nkind=\r\n0b\r\ntopic&name=\r\n000\r\n\r\n",
    ] {
        let chunked = ask(&format!("Transfer-Encoding: Chunked\r\n\r\n{chunks}"));
        assert_eq!(chunked, plain, "{chunks}");
    }
    assert!(!matches!(plain.0, 411 | 501), "{plain:?}");
}

#[test]
fn any_bytes_get_a_whole_answer_and_do_no_harm() {
    let database = Database::new();
    let page = with_token(&database);
    let nearly = "(GET|POST|HEAD|PUT) [/a-z%?=&.]{0,20} HTTP/1\\.[01]\r\n((host|cookie|origin|content-length|expect): [!-~]{0,12}\r\n){0,6}\r\n[ -~]{0,30}";
    let bytes = prop_oneof![
        vec(any::<u8>(), 1..400),
        nearly.prop_map(String::into_bytes)
    ];
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 300,
        ..ProptestConfig::default()
    });
    let tried = runner.run(&bytes, |bytes| {
        let answer = page.raw(&bytes);
        prop_assert!((200..500).contains(&answer.status), "{:?}", answer);
        Ok(())
    });
    tried.expect("every request gets a response");
}

#[test]
fn tricks_with_paths_lead_nowhere() {
    let database = Database::new();
    let page = open(&database);
    for path in [
        "//",
        "/../",
        "/..%2f..%2fetc/passwd",
        "/assets/../../etc/passwd",
        "/assets/%2e%2e/Cargo.toml",
        "/assets/",
        "/%00",
        "/dead/../",
        "/dead/-1",
        "/dead/99999999999999999999",
        "/dead/1'%20OR%201=1",
        "/DEAD",
        "/livez/",
        "/metrics/",
        "/;/metrics",
    ] {
        let answer = page.get(path);
        assert_eq!(answer.status, 404, "{path}");
        assert!(!answer.body.contains("root:"), "{path}");
    }
}

// --- Slow ones ----------------------------------------------------------------------------

#[test]
fn slow_clients_hold_up_no_others() {
    let database = Database::new();
    let page = open(&database);
    // More clients than the server serves at a time. Each has sent part of a request, and some never read a response.
    let mut slow: Vec<_> = (0..200).map(|_| page.connect()).collect();
    for (number, stream) in slow.iter_mut().enumerate() {
        let part = if number % 2 == 0 {
            "GET / HTTP/1.1\r\nhost: "
        } else {
            ""
        };
        // The server may have closed the connection in favour of a later one.
        let _ = stream.write_all(part.as_bytes());
    }
    for _ in 0..5 {
        let asked = Instant::now();
        assert_eq!(page.get("/livez").status, 200);
        assert!(asked.elapsed() < SOON, "{:?}", asked.elapsed());
    }
}

#[test]
fn a_request_that_never_ends_is_ended() {
    let database = Database::new();
    let page = open(&database);
    let mut stream = page.connect();
    let began = Instant::now();
    stream
        .write_all(b"GET / HTTP/1.1\r\n")
        .expect("the page listens");
    let mut writer = stream.try_clone().expect("a socket");
    // A header now and then does not extend the connection's time.
    let trickle = std::thread::spawn(move || {
        while writer.write_all(b"x: 1\r\n").is_ok() && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    let answer = read(stream);
    assert_eq!(answer.status, 408);
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
    trickle.join().expect("the writer ends");
}
