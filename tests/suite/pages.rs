//! The pages as a function from request to response: no server, no socket.

use std::net::{IpAddr, Ipv4Addr};

use diesel_outbox::config::Config;
use diesel_outbox::destinations::RegisteredDestination;
use diesel_outbox_pages::Pages;
use http::{Request, Response, StatusCode};

use crate::support::Database;

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn config(database: &Database) -> Config {
    let mut config = Config::default();
    config
        .set("DATABASE_URL", &database.url)
        .expect("a database");
    config.table = database.outbox_name();
    config
}

fn pages(database: &Database) -> Pages {
    Pages::new(&config(database), None).expect("pages")
}

fn ask(pages: &Pages, request: http::request::Builder) -> Response<Vec<u8>> {
    pages.respond(request.body(Vec::new()).expect("a request"), CLIENT)
}

fn get(pages: &Pages, path: &str) -> Response<Vec<u8>> {
    ask(pages, Request::get(path).header("host", "localhost"))
}

fn text(response: &Response<Vec<u8>>) -> &str {
    std::str::from_utf8(response.body()).expect("UTF-8")
}

#[test]
fn each_page_is_a_response_with_headers_against_misuse() {
    let database = Database::new();
    let pages = pages(&database);
    for path in [
        "/",
        "/dead",
        "/messages",
        "/ledger",
        "/keys",
        "/destinations",
        "/relays",
    ] {
        let page = get(&pages, path);
        assert_eq!(page.status(), StatusCode::OK, "{path}: {}", text(&page));
        assert!(text(&page).contains(&database.name()), "{path}");
        for (name, value) in [
            ("content-type", "text/html; charset=utf-8"),
            ("cache-control", "no-store"),
            ("x-frame-options", "DENY"),
        ] {
            assert_eq!(page.headers()[name], value, "{path}");
        }
        let policy = page.headers()["content-security-policy"].to_str();
        assert!(policy.is_ok_and(|policy| policy.starts_with("default-src 'none'")));
    }
    assert_eq!(get(&pages, "/nothing").status(), StatusCode::NOT_FOUND);
    assert_eq!(get(&pages, "/readyz").status(), StatusCode::OK);
}

/// Whatever server reads the request.
#[test]
fn a_request_that_no_server_has_checked_is_checked() {
    let database = Database::new();
    let pages = pages(&database);
    let twice = Request::get("/").header("host", "localhost");
    let twice = twice.header("host", "evil.example");
    assert_eq!(ask(&pages, twice).status(), StatusCode::BAD_REQUEST);
    let foreign = Request::get("/").header("host", "evil.example");
    assert_eq!(
        ask(&pages, foreign).status(),
        StatusCode::MISDIRECTED_REQUEST
    );
    let method = Request::delete("/").header("host", "localhost");
    let refused = ask(&pages, method);
    assert_eq!(refused.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(refused.headers()["allow"], "GET, HEAD, POST");
    // A form of another site.
    let form = Request::post("/pause").header("host", "localhost");
    let form = form.header("origin", "http://evil.example");
    assert_eq!(ask(&pages, form).status(), StatusCode::FORBIDDEN);
}

#[test]
fn metrics_are_the_text_of_the_applications_recorder() {
    let database = Database::new();
    let without = pages(&database);
    assert_eq!(get(&without, "/metrics").status(), StatusCode::NOT_FOUND);
    let with = without.metrics(|| "outbox_up 1\n".to_owned());
    let metrics = get(&with, "/metrics");
    assert_eq!(metrics.status(), StatusCode::OK);
    assert_eq!(text(&metrics), "outbox_up 1\n");
}

#[test]
fn no_page_shows_user_and_password_of_a_url() {
    let database = Database::new();
    let mut acme = RegisteredDestination::new("acme", "https://a.test/hooks/T024");
    acme.topics = vec!["*".to_owned()];
    let conn = &mut database.connect();
    database
        .outbox()
        .destinations()
        .put(conn, &acme)
        .expect("put");
    database.execute("UPDATE {o}_destination SET url = 'https://ann:hunter2@a.test/hooks/T024'");
    for (payloads, shown) in [
        ("true", "https://***@a.test/hooks/T024"),
        ("false", "https://***@a.test/hooks/***"),
    ] {
        let mut config = config(&database);
        config
            .set("OUTBOX_ADMIN_PAYLOADS", payloads)
            .expect("a switch");
        let pages = Pages::new(&config, None).expect("pages");
        for path in ["/destinations", "/destinations?name=acme"] {
            let page = get(&pages, path);
            assert!(!text(&page).contains("hunter2"), "{path}: {}", text(&page));
            assert!(text(&page).contains(shown), "{path}: {}", text(&page));
        }
    }
}
