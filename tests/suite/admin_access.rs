//! Who may see and change the admin page, and how the page withstands attacks. Malformed requests are in
//! `admin_requests`, the content of the pages in `admin_pages`.

use crate::commands::{With, refused};
use crate::page::{Page, TOKEN};
use crate::support::{Database, File, Running, eventually, finish};

/// The page of a process without a relay, so that tests exercise only the page.
pub(super) fn open(database: &Database) -> Page {
    Page::start(database.binary(&["admin"]))
}

pub(super) fn with_token(database: &Database) -> Page {
    Page::start(
        database
            .binary(&["admin"])
            .with("OUTBOX_ADMIN_TOKEN", TOKEN),
    )
}

// --- Where the page may listen -----------------------------------------------------------

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
    let command = command.with("OUTBOX_URL", "http://127.0.0.1:9/");
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
        "/audit",
        "/tenant",
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

/// Probes learn what is wrong; only a client with the token learns where the database is.
#[test]
fn health_names_no_database_without_the_token() {
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
    assert!(
        !cookie.contains("Secure"),
        "Secure although the login came without TLS: {cookie}"
    );
    let cookie = answer.cookie().to_owned();
    let header = format!("cookie: other=1; {cookie}; more=2");
    assert_eq!(page.request("GET /", &[&header], "").status, 200);
    assert_eq!(page.request("GET /metrics", &[&header], "").status, 200);
    page.process.wait_for_log("admin_login");
    page.process.wait_for_log("\"who\":\"ann\"");
    // A foreign cookie is no session, and neither is half of a cookie.
    let forged = format!("cookie: {}", &cookie[..cookie.len() - 1]);
    assert_eq!(page.request("GET /", &[&forged], "").status, 303);
    assert_eq!(page.post("/logout", &cookie, "").status, 303);
    assert_eq!(page.request("GET /", &[&header], "").status, 303);
}

/// R60: two processes behind one address.
#[test]
fn processes_with_the_same_token_accept_each_others_sessions() {
    let database = Database::new();
    let pages = [with_token(&database), with_token(&database)];
    let cookie = pages[0].log_in();
    let header = format!("cookie: {cookie}");
    let token = pages[0].request("GET /", &[&header], "").form_token();
    let body = format!("form_token={token}&kind=topic&name=order.paid&reason=stop");
    assert_eq!(pages[1].post("/pause", &cookie, &body).status, 303);
    pages[1].process.wait_for_log("\"who\":\"ann\"");
    let other = "another-token-of-32-characters-or-more";
    let command = database.binary(&["admin"]);
    let stranger = Page::start(command.with("OUTBOX_ADMIN_TOKEN", other));
    let answer = stranger.request("GET /", &[&header], "");
    assert_eq!(answer.status, 303, "the cookie has another name there");
    let renamed = stranger.post("/login", "", &format!("token={other}"));
    let (name, _) = renamed.cookie().split_once('=').expect("a cookie");
    let (_, session) = cookie.split_once('=').expect("a cookie");
    let forged = format!("cookie: {name}={session}");
    assert_eq!(stranger.request("GET /", &[&forged], "").status, 303);
}

/// R60: behind a proxy that keeps the path, and behind one that removes it.
#[test]
fn below_a_path_all_links_and_forms_lead_below_it() {
    const BASE: &str = "/ops/outbox";
    let database = Database::new();
    database.execute(
        "INSERT INTO {o}_endpoint (name, url) VALUES ('acme', 'https://a.example/?q=%22%20href=%22/x')",
    );
    database.enqueue("order.paid", serde_json::json!({ "text": " href=\"/x" }));
    let command = database
        .binary(&["admin"])
        .with("OUTBOX_ADMIN_TOKEN", TOKEN);
    let page = Page::start(command.with("OUTBOX_ADMIN_BASE", "/ops/outbox/"));
    page.process.wait_for_log("/ops/outbox/");
    let answer = page.get(&format!("{BASE}/dead?topic=a"));
    let login = answer.header("location").expect("a location");
    assert_eq!(login, "/ops/outbox/login?next=%2Fdead%3Ftopic%3Da");
    let body = format!("token={TOKEN}&name=ann&next=%2Fdead%3Ftopic%3Da");
    let answer = page.post(&format!("{BASE}/login"), "", &body);
    assert_eq!(answer.header("location"), Some("/ops/outbox/dead?topic=a"));
    assert!(
        answer
            .header("set-cookie")
            .is_some_and(|set| set.contains("Path=/ops/outbox;"))
    );
    let cookie = format!("cookie: {}", answer.cookie());
    let mut to_read: Vec<String> = vec![BASE.to_owned()];
    let mut read = std::collections::BTreeSet::new();
    while let Some(path) = to_read.pop() {
        if read.len() > 60 || !read.insert(path.clone()) {
            continue;
        }
        let answer = page.request(&format!("GET {path}"), &[&cookie], "");
        assert_eq!(answer.status, 200, "{path}");
        let inner = path.strip_prefix(BASE).filter(|inner| !inner.is_empty());
        let removed = page.request(&format!("GET {}", inner.unwrap_or("/")), &[&cookie], "");
        assert_eq!(removed.status, 200, "{path}");
        if !answer.head.contains("text/html") {
            continue;
        }
        for attribute in ["href", "src", "action", "formaction"] {
            let mark = format!(" {attribute}=\"");
            for (index, _) in answer.body.match_indices(&mark) {
                let rest = &answer.body[index + mark.len()..];
                let address = rest
                    .split('"')
                    .next()
                    .expect("the end")
                    .replace("&amp;", "&");
                if address.starts_with('#') {
                    continue;
                }
                assert!(address.starts_with(BASE), "{path}: {address}");
                if matches!(attribute, "href" | "src") {
                    to_read.push(address);
                }
            }
        }
    }
    assert!(read.len() > 12, "{read:?}");
    assert_eq!(page.get("/livez").status, 200);
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
        "/%09/evil.example",
        "/%C3%A9/evil.example",
    ] {
        let answer = page.post("/login", "", &format!("token={TOKEN}&next={next}"));
        let to = answer.header("location").expect("a location");
        assert_eq!(to, "/", "{next}");
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
    // A proxy with TLS that puts the server's address into Host.
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
fn wrong_tokens_must_wait_and_the_right_one_is_always_accepted() {
    let database = Database::new();
    let page = with_token(&database);
    for number in 0..10 {
        let header = format!("authorization: Bearer guess-{number}");
        assert_eq!(page.request("GET /metrics", &[&header], "").status, 401);
    }
    let answer = page.request("GET /metrics", &["authorization: Bearer guess-10"], "");
    assert_eq!(answer.status, 429);
    let seconds: u64 = answer
        .header("retry-after")
        .and_then(|text| text.parse().ok())
        .expect("seconds");
    assert!((1..=61).contains(&seconds), "{seconds}");
    assert_eq!(page.post("/login", "", "token=guess-11").status, 429);
    let bearer = format!("authorization: Bearer {TOKEN}");
    assert_eq!(page.request("GET /metrics", &[&bearer], "").status, 200);
    let login = page.post("/login", "", &format!("token={TOKEN}"));
    assert_eq!(login.status, 303);
    let answer = page.request("GET /metrics", &["authorization: Bearer guess-12"], "");
    assert_eq!(
        answer.status, 429,
        "the right token does not reset the count of wrong tokens"
    );
    assert_eq!(page.get("/livez").status, 200);
    eventually("the guesses are in the log", || {
        page.process.log().matches("admin_refused").count() == 10
    });
    assert!(
        !page.process.log().contains("guess-"),
        "a guess may be nearly right"
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
    // A probe may use any host name; it gets only health.
    assert_eq!(page.request("GET /livez", &["host: pod"], "").status, 200);
    assert_eq!(page.raw(b"GET / HTTP/1.0\r\n\r\n").status, 421);
}

/// Anybody who reaches the address can send forms without a token.
#[test]
fn forms_of_another_site_do_not_fill_the_log() {
    let database = Database::new();
    let page = with_token(&database);
    let origin = format!("origin: http://{}.example", "e".repeat(1_000));
    for _ in 0..30 {
        assert_eq!(page.request("POST /login", &[&origin], "").status, 403);
    }
    eventually("the first forms are in the log", || {
        page.process.log().matches("admin_cross_site").count() >= 10
    });
    let log = page.process.log();
    assert_eq!(log.matches("admin_cross_site").count(), 10, "{log}");
    assert!(!log.contains(&"e".repeat(101)), "{log}");
    let login = page.post("/login", "", &format!("token={TOKEN}"));
    assert_eq!(login.status, 303);
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
    page.process.wait_for_log("\"who\":\"token\"");
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
