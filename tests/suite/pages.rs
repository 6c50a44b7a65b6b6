//! The pages as a function from request to response: no server, no socket.

use std::net::{IpAddr, Ipv4Addr};

use diesel_outbox::admin;
use diesel_outbox::config::Config;
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox_pages::{Pages, PagesError, Rights, Visitor, operator_pages};
use http::{Request, Response, StatusCode};
use secrecy::ExposeSecret;
use serde_json::json;
use uuid::Uuid;

use crate::support::{Database, Receiver};
use crate::tenants::two;

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
    Pages::operators(&config(database), &database.secret_url(), None).expect("pages")
}

fn ask(pages: &Pages, request: http::request::Builder) -> Response<Vec<u8>> {
    pages.respond(
        request.body(Vec::new()).expect("a request"),
        Visitor::unknown(CLIENT),
    )
}

fn get(pages: &Pages, path: &str) -> Response<Vec<u8>> {
    ask(pages, Request::get(path).header("host", "localhost"))
}

/// A page as this visitor sees it.
fn shown_to(pages: &Pages, visitor: Visitor, path: &str) -> Response<Vec<u8>> {
    let request = Request::get(path).header("host", "shop.example.com");
    pages.respond(request.body(Vec::new()).expect("a request"), visitor)
}

/// The response to a form that this visitor sends from a page of this host.
fn send(pages: &Pages, visitor: Visitor, host: &str, path: &str, form: &str) -> Response<Vec<u8>> {
    let request = Request::post(path)
        .header("host", host)
        .header("origin", format!("https://{host}"));
    pages.respond(request.body(form.into()).expect("a request"), visitor)
}

/// The token that the forms of a page send.
fn form_token(page: &Response<Vec<u8>>) -> String {
    let rest = text(page).split_once("name=\"form_token\" value=\"");
    let (token, _) = rest
        .and_then(|(_, rest)| rest.split_once('"'))
        .expect("a form");
    format!("form_token={token}")
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
        "/topics",
        "/endpoints",
        "/relays",
        "/audit",
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
    let mut acme = Endpoint::new("acme", "https://a.test/hooks/T024");
    acme.topics = vec!["*".to_owned()];
    let conn = &mut database.connect();
    database.outbox().endpoints().put(conn, &acme).expect("put");
    database.execute("UPDATE {o}_endpoint SET url = 'https://ann:hunter2@a.test/hooks/T024'");
    for (payloads, shown) in [
        ("true", "https://***@a.test/hooks/T024"),
        ("false", "https://***@a.test/hooks/***"),
    ] {
        let mut config = config(&database);
        config
            .set("OUTBOX_ADMIN_PAYLOADS", payloads)
            .expect("a switch");
        let pages = Pages::operators(&config, &database.secret_url(), None).expect("pages");
        for path in ["/endpoints", "/endpoints?name=acme"] {
            let page = get(&pages, path);
            assert!(!text(&page).contains("hunter2"), "{path}: {}", text(&page));
            assert!(text(&page).contains(shown), "{path}: {}", text(&page));
        }
    }
}

/// Pages that an application serves as `shop.example.com`, with its own login.
fn mounted(database: &Database) -> Pages {
    let mut config = config(database);
    config
        .set("OUTBOX_ADMIN_HOSTS", "shop.example.com")
        .expect("a host name");
    let pages = Pages::operators(&config, &database.secret_url(), None).expect("pages");
    pages.key([7; 32]).expect("a key")
}

/// R60: the application has logged the visitor in.
#[test]
fn a_known_visitor_meets_no_login_and_only_forms_of_the_visitors_own_pages_count() {
    let database = Database::new();
    let pages = mounted(&database);
    let ann = || Visitor::known("ann", Rights::all());
    let page = shown_to(&pages, ann(), "/");
    assert_eq!(page.status(), StatusCode::OK, "{}", text(&page));
    assert!(!text(&page).contains("/logout"));
    for (path, form) in [("/login", "token=x"), ("/logout", "")] {
        let form = format!("{form}&{}", form_token(&page));
        let missing = send(&pages, ann(), "shop.example.com", path, &form);
        assert_eq!(missing.status(), StatusCode::NOT_FOUND, "{path}");
    }
    let pause = |pages: &Pages, visitor, host, token: &str| {
        let form = format!("kind=destination&name=a&reason=maintenance&for=1h&{token}");
        send(pages, visitor, host, "/pause", &form).status()
    };
    let pauses = || {
        let pauses = admin::pauses(&mut database.connect(), &database.outbox_name());
        pauses.expect("pauses").len()
    };
    let (own, bob) = (form_token(&page), || Visitor::known("bob", Rights::all()));
    for (visitor, host, token, status) in [
        (ann(), "shop.example.com", "", StatusCode::FORBIDDEN),
        (
            bob(),
            "shop.example.com",
            own.as_str(),
            StatusCode::FORBIDDEN,
        ),
        (
            ann(),
            "evil.example",
            own.as_str(),
            StatusCode::MISDIRECTED_REQUEST,
        ),
    ] {
        assert_eq!(
            pause(&pages, visitor, host, token),
            status,
            "{host} {token}"
        );
        assert_eq!(pauses(), 0);
    }
    // Another process with the same key.
    let other = mounted(&database);
    assert_eq!(
        pause(&other, ann(), "shop.example.com", &own),
        StatusCode::SEE_OTHER
    );
    assert_eq!(pauses(), 1);
    let short = Pages::operators(&config(&database), &database.secret_url(), None).expect("pages");
    assert!(matches!(short.key("short"), Err(PagesError::ShortKey(5))));
}

/// R60: the pages of operators show all tenants.
#[test]
fn a_visitor_of_a_tenant_sees_no_page_of_operators() {
    let database = Database::new();
    let pages = mounted(&database).metrics(String::new);
    let customer = || Visitor::of_tenant(Uuid::from_u128(1), "ann", Rights::all());
    for path in ["/", "/dead", "/messages?q=1", "/metrics", "/nothing"] {
        let page = shown_to(&pages, customer(), path);
        assert_eq!(page.status(), StatusCode::FORBIDDEN, "{path}");
    }
    let change = send(&pages, customer(), "shop.example.com", "/pause", "");
    assert_eq!(change.status(), StatusCode::FORBIDDEN);
}

/// R60: without the right, a secret is on no page, also not on that of the act that made it.
#[test]
fn a_destination_is_registered_changed_and_verified_and_its_secret_is_shown_once() {
    let database = Database::new();
    let mut config = config(&database);
    for (variable, value) in [
        ("OUTBOX_ENDPOINT_HTTPS_ONLY", "false"),
        ("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false"),
    ] {
        config.set(variable, value).expect(variable);
    }
    let pages = Pages::operators(&config, &database.secret_url(), None).expect("pages");
    let ann = || Visitor::known("ann", Rights::all());
    let bob = || Visitor::known("bob", Rights::all().with_secrets(false));
    let act = |visitor: fn() -> Visitor, path: &str, form: &str| {
        let token = form_token(&shown_to(&pages, visitor(), "/endpoints/edit"));
        send(
            &pages,
            visitor(),
            "localhost",
            path,
            &format!("{form}&{token}"),
        )
    };
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let secret = |conn: &mut _| {
        let secret = outbox.endpoints().secret(conn, "acme").expect("read");
        let secret = secret.expect("a secret");
        secret.written().expose_secret().to_owned()
    };

    let receiver = Receiver::answering(|_| 404);
    let new = format!("name=acme&url={}&topics=order.*", receiver.url());
    let registered = act(ann, "/endpoint/put", &new);
    assert_eq!(registered.status(), StatusCode::OK, "{}", text(&registered));
    let first = secret(conn);
    assert!(text(&registered).contains(&first));
    for path in ["/endpoints", "/endpoints?name=acme", "/audit"] {
        assert!(
            !text(&shown_to(&pages, ann(), path)).contains(&first),
            "{path}"
        );
    }
    let again = act(ann, "/endpoint/put", &new);
    assert_eq!(again.status(), StatusCode::BAD_REQUEST);
    let unknown = act(ann, "/endpoint/put", "name=b&is=known&topics=*");
    assert_eq!(unknown.status(), StatusCode::NOT_FOUND);

    let change = "name=acme&is=known&url=&topics=order.*%0Amember.*&verification=challenge";
    let changed = act(ann, "/endpoint/put", change);
    assert_eq!(
        changed.status(),
        StatusCode::SEE_OTHER,
        "{}",
        text(&changed)
    );
    let acme = outbox.endpoints().get(conn, "acme").expect("read");
    let acme = acme.expect("a destination");
    assert_eq!(acme.url, receiver.url());
    assert_eq!(acme.topics, ["order.*", "member.*"]);
    assert_eq!(secret(conn), first);
    for (filter, why) in [
        ("%7B%22euro%22: 5%7D", "filter: euro: expected an array"),
        ("%7Beuro", "filter: not JSON: "),
    ] {
        let refused = act(ann, "/endpoint/put", &format!("{change}&filter={filter}"));
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
        assert!(text(&refused).contains(why), "{}", text(&refused));
    }
    let filtered = format!("{change}&filter=%7B%22euro%22:[5]%7D");
    act(ann, "/endpoint/put", &filtered);
    let form = shown_to(&pages, ann(), "/endpoints/edit?name=acme");
    let json = "{&quot;euro&quot;:[5]}</textarea>";
    assert!(text(&form).contains(json), "{}", text(&form));
    act(ann, "/endpoint/put", change);
    let acme = outbox.endpoints().get(conn, "acme").expect("read");
    assert_eq!(acme.expect("a destination").filter, None);

    let verified = act(ann, "/endpoint/verify", "name=acme");
    assert_eq!(verified.status(), StatusCode::OK, "{}", text(&verified));
    assert!(
        text(&verified).contains("not verified"),
        "{}",
        text(&verified)
    );

    let rotated = act(bob, "/endpoint/rotate", "name=acme&keep=1h");
    assert_eq!(rotated.status(), StatusCode::OK, "{}", text(&rotated));
    assert_ne!(secret(conn), first);
    assert!(!text(&rotated).contains("whsec_"), "{}", text(&rotated));
    let nobody = act(ann, "/endpoint/rotate", "name=b&keep=1h");
    let location = nobody.headers()["location"].to_str().expect("a path");
    assert!(location.ends_with("done=no_endpoint"), "{location}");

    let look = Visitor::known("eve", Rights::look());
    let edit = shown_to(&pages, look, "/endpoints/edit?name=acme");
    assert_eq!(edit.status(), StatusCode::FORBIDDEN);
    let acts = |q| {
        let page = shown_to(&pages, ann(), &format!("/audit?q={q}"));
        text(&page).matches("<code>endpoint ").count()
    };
    assert_eq!(
        (acts(""), acts("Bob"), acts("acme"), acts("%25")),
        (6, 1, 6, 0)
    );
}

/// R60
#[test]
fn without_the_right_payloads_are_on_no_page_and_in_no_search() {
    let database = Database::new();
    let sequence = database.enqueue("order.paid", json!({ "name": "Ada Lovelace" }));
    let message = format!("/messages?q={sequence}");
    let acme = Endpoint::new("acme", "https://a.test/hooks/T024/Byron");
    let conn = &mut database.connect();
    let put = database.outbox().endpoints().put(conn, &acme);
    put.expect("put");
    let pages = pages(&database);
    let shown = |rights, path: &str| {
        let page = shown_to(&pages, Visitor::known("ann", rights), path);
        text(&page).to_owned()
    };
    let masked = Rights::all().with_payloads(false);
    let search = "/endpoints?q=byron";
    for (path, secret) in [
        (message.as_str(), "Ada"),
        ("/endpoints?name=acme", "Byron"),
        (search, "?name=acme"),
    ] {
        assert!(!shown(masked, path).contains(secret), "{path}");
        assert!(shown(Rights::all(), path).contains(secret), "{path}");
    }
    assert!(shown(masked, "/endpoints?q=a.test").contains("?name=acme"));
}

/// R60: over every page.
#[test]
fn without_the_rights_no_page_shows_content_a_form_or_a_secret() {
    let (database, acme, _) = two();
    database.execute("UPDATE {o}_endpoint SET url = url || '/hunter2'");
    let letter = database
        .text("SELECT sequence || '.' || message_id FROM {o}_dead WHERE topic = 'acme.event'");
    let letter = format!("/dead/{}", letter.expect("a letter"));
    let (dead, tenant) = (acme.dead, acme.id);
    let config = crate::tenants::config(&database);
    let pages = Pages::operators(&config, &database.secret_url(), None).expect("pages");
    let seen = |rights: Rights| {
        let paths = operator_pages().map(str::to_owned).chain([letter.clone()]);
        let queries = [
            String::new(),
            format!("?q={dead}&tenant={tenant}"),
            format!("?name={}&tenant={tenant}", acme.endpoint),
        ];
        let asked = paths.flat_map(|path| queries.each_ref().map(|query| format!("{path}{query}")));
        let shown = asked
            .map(|path| text(&shown_to(&pages, Visitor::known("ann", rights), &path)).to_owned());
        shown.collect::<String>()
    };
    let (all, look) = (seen(Rights::all()), seen(Rights::look()));
    for hidden in ["&quot;bad&quot;", "says so", "hunter2", "method=\"post\""] {
        assert!(all.contains(hidden) && !look.contains(hidden), "{hidden}");
    }
    // What an act shows.
    let bob = || Visitor::known("bob", Rights::look().with_act(true));
    let token = form_token(&shown_to(&pages, bob(), "/endpoints/edit"));
    let url = acme.receiver.url();
    for (path, form) in [
        ("/endpoint/test", "name=acme-hook".to_owned()),
        ("/endpoint/rotate", "name=acme-hook&keep=1h".to_owned()),
        ("/endpoint/put", format!("name=new&url={url}&topics=*")),
    ] {
        let done = send(&pages, bob(), "localhost", path, &format!("{form}&{token}"));
        assert_eq!(done.status(), StatusCode::OK, "{path}: {}", text(&done));
        for hidden in ["says so", "whsec_"] {
            assert!(!text(&done).contains(hidden), "{path}: {}", text(&done));
        }
    }
}
