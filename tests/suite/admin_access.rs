//! Who may see and change the admin page, and what attacks on it meet. What the pages show is in
//! `admin_pages`.

use std::io::Write;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::commands::{File, With, refused};
use crate::page::{Page, SOON, TOKEN, read};
use crate::support::{Database, Running, eventually, finish};

/// A page beside no relay, so that nothing but the page is tested.
fn open(database: &Database) -> Page {
    Page::start(database.binary(&["admin"]))
}

fn with_token(database: &Database) -> Page {
    Page::start(
        database
            .binary(&["admin"])
            .with("OUTBOX_ADMIN_TOKEN", TOKEN),
    )
}

// --- Where it may listen ------------------------------------------------------------------

#[test]
fn beyond_the_loopback_it_does_not_start_without_a_token() {
    let database = Database::new();
    for (command, addr) in [
        ("run", "0.0.0.0:0"),
        ("admin", "[::]:0"),
        ("run", "192.0.2.1:8687"),
    ] {
        refused(
            database.binary(&[command]).with("OUTBOX_ADMIN_ADDR", addr),
            &["OUTBOX_ADMIN_ADDR", "OUTBOX_ADMIN_TOKEN"],
        );
    }
    for (variable, value) in [
        ("OUTBOX_ADMIN_ADDR", "true"),
        ("OUTBOX_ADMIN_TOKEN", "short"),
        ("OUTBOX_ADMIN_HOSTS", "http://outbox"),
        ("OUTBOX_ADMIN_PAYLOADS", "some"),
        ("OUTBOX_ADMIN_READ_ONLY", "1"),
    ] {
        refused(database.binary(&["run"]).with(variable, value), &[variable]);
    }
}

#[test]
fn the_token_may_stand_in_a_file_and_is_never_shown() {
    let database = Database::new();
    let file = File::new(&format!("{TOKEN}\n"));
    let command = database.binary(&["run"]);
    let page = Page::start(command.with("OUTBOX_ADMIN_TOKEN_FILE", file.path()));
    let bearer = format!("authorization: Bearer {TOKEN}");
    assert_eq!(page.request("GET /metrics", &[&bearer], "").status, 200);
    assert_eq!(page.request("GET /", &[&bearer], "").status, 200);
    let log = page.process.log();
    assert!(log.contains("admin=127.0.0.1:0,token"), "{log}");
    assert!(!log.contains(TOKEN), "{log}");
}

#[test]
fn a_port_that_is_taken_is_named() {
    let database = Database::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = taken.local_addr().expect("an address").to_string();
    for command in ["run", "admin"] {
        let finished = finish(database.binary(&[command]).with("OUTBOX_ADMIN_ADDR", &addr));
        let finished = finished.code(1);
        assert!(finished.stderr.contains(&addr), "{}", finished.stderr);
    }
}

#[test]
fn without_an_address_nothing_listens() {
    let database = Database::new();
    let process = Running::start(
        database
            .binary(&["run"])
            .with("OUTBOX_URL", "http://127.0.0.1:9"),
    );
    process.wait_for_log("relay started");
    let sockets = std::process::Command::new("ls")
        .arg("-l")
        .arg(format!("/proc/{}/fd", process.pid()))
        .output()
        .expect("ls runs");
    let listening = std::fs::read_to_string("/proc/net/tcp").expect("Linux");
    let sockets = String::from_utf8_lossy(&sockets.stdout);
    for line in listening.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // State 0A is LISTEN.
        assert!(
            fields[3] != "0A" || !sockets.contains(&format!("socket:[{}]", fields[9])),
            "{line}"
        );
    }
}

// --- Tokens and sessions ------------------------------------------------------------------

#[test]
fn with_a_token_nothing_but_health_and_login_is_seen_without_it() {
    let database = Database::new();
    let page = with_token(&database);
    for path in ["/livez", "/readyz", "/login", "/assets/style.css"] {
        assert_eq!(page.get(path).status, 200, "{path}");
    }
    for path in [
        "/",
        "/dead",
        "/dead/1",
        "/messages?q=1",
        "/ledger",
        "/keys",
        "/relays",
        "/no-such",
    ] {
        let answer = page.get(path);
        assert_eq!(answer.status, 303, "{path}");
        let to = answer.header("location").expect("a location");
        assert!(to.starts_with("/login?next=%2F"), "{to}");
    }
    let answer = page.get("/metrics");
    assert_eq!(
        (answer.status, answer.header("www-authenticate")),
        (401, Some("Bearer"))
    );
    for path in ["/dead/requeue", "/dead/discard", "/pause", "/resume"] {
        assert_eq!(
            page.post(path, "", "kind=topic&name=a").status,
            401,
            "{path}"
        );
    }
    for wrong in ["Bearer", "Bearer ", "Basic abc", "Bearer wrong", TOKEN] {
        let header = format!("authorization: {wrong}");
        assert_eq!(page.request("GET /", &[&header], "").status, 401, "{wrong}");
    }
}

/// R29: probes learn what is wrong, and only whoever has the token learns where the database is.
#[test]
fn health_tells_the_database_to_nobody_without_the_token() {
    let database = Database::new();
    let page = with_token(&database);
    database.execute("DROP TABLE {o}_pause");
    let bearer = format!("authorization: Bearer {TOKEN}");
    let told = page.get("/readyz");
    assert_eq!(
        (told.status, told.body.contains(database.schema())),
        (503, false),
        "{told:?}"
    );
    let told = page.request("GET /readyz", &[&bearer], "");
    assert_eq!(
        (told.status, told.body.contains(database.schema())),
        (503, true),
        "{told:?}"
    );
    assert_eq!(page.get("/livez").status, 200);
}

#[test]
fn a_session_begins_with_the_token_and_ends_with_logout() {
    let database = Database::new();
    let page = with_token(&database);
    let answer = page.post("/login", "", &format!("token={TOKEN}&name=ann&next=/dead"));
    assert_eq!(
        (answer.status, answer.header("location")),
        (303, Some("/dead"))
    );
    let cookie = answer.header("set-cookie").expect("a cookie");
    for part in ["HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=43200"] {
        assert!(cookie.contains(part), "{cookie}");
    }
    assert!(!cookie.contains("Secure"), "it came without TLS: {cookie}");
    let cookie = answer.cookie().to_owned();
    let header = format!("cookie: other=1; {cookie}; more=2");
    assert_eq!(page.request("GET /", &[&header], "").status, 200);
    assert_eq!(page.request("GET /metrics", &[&header], "").status, 200);
    page.process.wait_for_log("admin_login");
    assert!(page.process.log().contains("\"who\":\"ann\""));
    // Somebody else's cookie is no session, nor is half of one.
    let forged = format!("cookie: {}", &cookie[..cookie.len() - 1]);
    assert_eq!(page.request("GET /", &[&forged], "").status, 303);
    assert_eq!(page.post("/logout", &cookie, "").status, 303);
    assert_eq!(page.request("GET /", &[&header], "").status, 303);
}

#[test]
fn a_login_leads_to_no_other_site() {
    let database = Database::new();
    let page = with_token(&database);
    for next in [
        "//evil.example/",
        "https://evil.example/",
        "/\\evil.example",
        "evil",
        "/%0d%0aset-cookie:a=b",
    ] {
        let answer = page.post("/login", "", &format!("token={TOKEN}&next={next}"));
        let to = answer.header("location").expect("a location");
        assert!(to == "/" || to.starts_with("/set-cookie"), "{next}: {to}");
        assert_eq!(
            answer.head.matches("set-cookie: ").count(),
            1,
            "{}",
            answer.head
        );
    }
    let answer = page.get("/login?next=%22%3E%3Cscript%3E");
    assert!(!answer.body.contains("<script>"), "{}", answer.body);
}

#[test]
fn a_cookie_that_came_by_tls_stays_there() {
    let database = Database::new();
    let command = database
        .binary(&["admin"])
        .with("OUTBOX_ADMIN_TOKEN", TOKEN);
    let page = Page::start(command.with("OUTBOX_ADMIN_HOSTS", "outbox.example.com"));
    // A proxy with TLS, which puts the server's address into Host.
    let headers = [
        "origin: https://outbox.example.com",
        "sec-fetch-site: same-origin",
    ];
    let answer = page.request("POST /login", &headers, &format!("token={TOKEN}"));
    assert!(
        answer
            .header("set-cookie")
            .expect("a cookie")
            .ends_with("; Secure")
    );
}

#[test]
fn guessing_the_token_is_slowed_down() {
    let database = Database::new();
    let page = with_token(&database);
    for number in 0..10 {
        let header = format!("authorization: Bearer guess-{number}");
        assert_eq!(page.request("GET /metrics", &[&header], "").status, 401);
    }
    let bearer = format!("authorization: Bearer {TOKEN}");
    let answer = page.request("GET /metrics", &[&bearer], "");
    assert_eq!(answer.status, 429, "even the right one is not looked at");
    let seconds: u64 = answer
        .header("retry-after")
        .and_then(|text| text.parse().ok())
        .expect("seconds");
    assert!((1..=61).contains(&seconds), "{seconds}");
    assert_eq!(
        page.post("/login", "", &format!("token={TOKEN}")).status,
        429
    );
    assert_eq!(page.get("/livez").status, 200);
    eventually("the guesses are in the log", || {
        page.process.log().matches("admin_refused").count() == 10
    });
    assert!(
        !page.process.log().contains("guess-"),
        "what was guessed may be nearly right"
    );
}

// --- Hosts, origins, forms ----------------------------------------------------------------

#[test]
fn a_name_that_is_not_its_own_is_refused() {
    let database = Database::new();
    let command = database.binary(&["admin"]);
    let page = Page::start(command.with("OUTBOX_ADMIN_HOSTS", "Outbox.example.com"));
    for host in [
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1",
        "[::1]:80",
        "10.1.2.3:8687",
        "outbox.example.com",
    ] {
        let header = format!("host: {host}");
        assert_eq!(page.request("GET /", &[&header], "").status, 200, "{host}");
    }
    for host in [
        "evil.example",
        "evil.example:8687",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "outbox.example.com.evil.example",
        "evil.example@127.0.0.1",
        "",
    ] {
        let header = format!("host: {host}");
        for path in ["/", "/metrics", "/dead", "/login", "/assets/style.css"] {
            let answer = page.request(&format!("GET {path}"), &[&header], "");
            assert_eq!(answer.status, 421, "{host} {path}");
        }
    }
    // A probe's host may be anything; it is told nothing else.
    assert_eq!(page.request("GET /livez", &["host: pod"], "").status, 200);
    assert_eq!(page.raw(b"GET / HTTP/1.0\r\n\r\n").status, 421);
}

#[test]
fn a_form_of_another_site_changes_nothing() {
    let database = Database::new();
    let page = open(&database);
    let own = format!("origin: http://{}", page.address);
    let token = page.get("/").form_token();
    let good = format!("form_token={token}&kind=topic&name=order.paid&reason=stop");
    let pauses = || database.number("SELECT count(*) FROM {o}_pause");
    for headers in [
        vec!["origin: https://evil.example"],
        vec!["origin: null"],
        vec!["origin: http://127.0.0.1:1"],
        vec![],
        vec![own.as_str(), "sec-fetch-site: cross-site"],
        vec![own.as_str(), "sec-fetch-site: same-site"],
        vec![own.as_str(), "sec-fetch-site: none"],
    ] {
        let answer = page.request("POST /pause", &headers, &good);
        assert_eq!(answer.status, 403, "{headers:?}");
    }
    for body in [
        "kind=topic&name=order.paid&reason=stop",
        "form_token=&kind=topic&name=order.paid&reason=stop",
        "form_token=0000&kind=topic&name=order.paid&reason=stop",
    ] {
        assert_eq!(
            page.request("POST /pause", &[&own], body).status,
            403,
            "{body}"
        );
    }
    assert_eq!(
        page.get(&format!("/pause?{good}")).status,
        404,
        "GET changes nothing"
    );
    assert_eq!(pauses(), 0);
    assert_eq!(page.request("POST /pause", &[&own], &good).status, 303);
    assert_eq!(pauses(), 1);
    page.process.wait_for_log("admin_pause");
}

#[test]
fn the_form_of_one_session_is_no_form_of_another() {
    let database = Database::new();
    let page = with_token(&database);
    let (ann, ben) = (page.log_in(), page.log_in());
    let token = page
        .request("GET /", &[&format!("cookie: {ann}")], "")
        .form_token();
    let body = format!("form_token={token}&kind=topic&name=order.paid&reason=stop");
    assert_eq!(page.post("/pause", &ben, &body).status, 403);
    assert_eq!(page.post("/pause", &ann, &body).status, 303);
}

#[test]
fn a_script_needs_its_token_and_no_form() {
    let database = Database::new();
    let page = with_token(&database);
    let bearer = format!("authorization: Bearer {TOKEN}");
    let answer = page.request("POST /pause", &[&bearer], "kind=topic&name=a&reason=stop");
    assert_eq!(answer.status, 303, "{answer:?}");
    assert_eq!(database.number("SELECT count(*) FROM {o}_pause"), 1);
    assert!(page.process.log().contains("\"who\":\"token\""));
}

#[test]
fn a_page_that_is_read_only_changes_nothing_and_has_no_buttons() {
    let database = Database::new();
    let command = database
        .binary(&["admin"])
        .with("OUTBOX_ADMIN_TOKEN", TOKEN);
    let page = Page::start(command.with("OUTBOX_ADMIN_READ_ONLY", "true"));
    let bearer = format!("authorization: Bearer {TOKEN}");
    for path in ["/pause", "/resume", "/dead/requeue", "/dead/discard"] {
        let answer = page.request(
            &format!("POST {path}"),
            &[&bearer],
            "kind=topic&name=a&sequence=1",
        );
        assert_eq!(answer.status, 403, "{path}");
        assert!(
            answer.body.contains("OUTBOX_ADMIN_READ_ONLY"),
            "{}",
            answer.body
        );
    }
    let cookie = page.log_in();
    let shown = page
        .request("GET /", &[&format!("cookie: {cookie}")], "")
        .body;
    assert!(!shown.contains("action=\"/pause\""), "{shown}");
    assert_eq!(page.post("/logout", &cookie, "").status, 303);
}

#[test]
fn every_answer_has_the_headers_that_keep_others_out() {
    let database = Database::new();
    let page = with_token(&database);
    for path in [
        "/",
        "/login",
        "/livez",
        "/metrics",
        "/assets/style.css",
        "/no-such",
    ] {
        let answer = page.get(path);
        let policy = answer.header("content-security-policy").expect("a policy");
        assert!(policy.starts_with("default-src 'none'"), "{policy}");
        assert!(
            !policy.contains("unsafe") && !policy.contains('*'),
            "{policy}"
        );
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("x-frame-options", "DENY"),
            ("referrer-policy", "same-origin"),
            ("cache-control", "no-store"),
            ("cross-origin-resource-policy", "same-origin"),
        ] {
            assert_eq!(answer.header(name), Some(value), "{path}");
        }
    }
}

// --- Requests that are none ---------------------------------------------------------------

#[test]
fn what_is_too_large_is_refused() {
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
    // What it sends all the same is not kept: the answer comes, and the next one is served.
    let body = "a".repeat(3_000_000);
    let request =
        format!("POST /pause HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n\r\n{body}");
    let mut stream = page.connect();
    let _ = stream.write_all(request.as_bytes());
    assert_eq!(page.get("/livez").status, 200);
}

#[test]
fn what_is_no_request_gets_an_answer_that_says_so() {
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
            "POST /pause HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            411,
        ),
    ] {
        assert_eq!(page.raw(request.as_bytes()).status, status, "{request}");
    }
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
    tried.expect("each gets an answer");
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
fn slow_clients_hold_nobody_up() {
    let database = Database::new();
    let page = open(&database);
    // More than it serves at a time: each has sent a part of a request, and some read no answer.
    let mut slow: Vec<_> = (0..200).map(|_| page.connect()).collect();
    for (number, stream) in slow.iter_mut().enumerate() {
        let part = if number % 2 == 0 {
            "GET / HTTP/1.1\r\nhost: "
        } else {
            ""
        };
        // It may have been closed in favour of a later one.
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
    stream.write_all(b"GET / HTTP/1.1\r\n").expect("it listens");
    let mut writer = stream.try_clone().expect("a socket");
    // A header now and then keeps no connection beyond its time.
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
    trickle.join().expect("it ends");
}
