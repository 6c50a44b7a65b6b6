//! Authentication that receivers ask for: OAuth 2.0 tokens, and signatures in a header of their own. The tests of
//! `receivers` show the same with servers and libraries of others.

use std::io::{Cursor, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use diesel_outbox::config::{Auth, Breaker, Config, Mode, Proxy, SecretKeys};
use diesel_outbox::endpoints::{DeliveryFilter, Endpoint};
use diesel_outbox::{Destination, HttpDispatcher, RelayBuilder, RelayHandle};
use secrecy::ExposeSecret;
use serde_json::{Value, json};

use crate::support::{
    Database, File, Finished, Receiver, Request, Running, end, eventually, finish,
};

/// Answers the first request with the token `t1`, the second with `t2`, and so on.
fn token_server(life_seconds: u32) -> Receiver {
    let count = AtomicUsize::new(0);
    answering(move |_| {
        let number = count.fetch_add(1, Ordering::SeqCst) + 1;
        let token = format!("t{number}");
        let answer =
            json!({ "access_token": token, "token_type": "bearer", "expires_in": life_seconds });
        (200, answer)
    })
}

fn answering(answer: impl Fn(&Request) -> (u16, Value) + Send + Sync + 'static) -> Receiver {
    Receiver::start(move |request, stream| {
        let (status, body) = answer(request);
        let body = body.to_string();
        let length = body.len();
        write!(
            stream,
            "HTTP/1.1 {status} Reason\r\ncontent-length: {length}\r\n\r\n{body}"
        )
    })
}

/// The settings of a client at this token server.
fn oauth2(server: &Receiver) -> Value {
    json!({
        "type": "oauth2",
        "token_url": format!("http://{}/token", server.address),
        "client_id": "shop:1",
        "client_secret": "hunter2 %&ü",
    })
}

fn auth(settings: &Value) -> Auth {
    settings.to_string().parse().expect("authentication")
}

fn destination(receiver: &Receiver, settings: &Value) -> Destination {
    let destination = Destination::new("billing", &receiver.url()).expect("a URL");
    destination.configure(|destination| destination.auth = Some(auth(settings)))
}

fn relay(database: &Database, destination: Destination) -> RelayHandle {
    let relay = database.relay().destination(destination);
    relay.route("*", "billing").start().expect("a relay")
}

fn form(request: &Request) -> Vec<(String, String)> {
    let pairs = url::form_urlencoded::parse(&request.body).into_owned();
    pairs.collect()
}

fn authorization(request: &Request) -> &str {
    request.header("authorization").unwrap_or_default()
}

/// R59
#[test]
fn r59_one_token_is_requested_and_sent_with_every_message() {
    let (database, receiver, server) = (Database::new(), Receiver::ok(), token_server(3600));
    let mut settings = oauth2(&server);
    settings["scope"] = json!("events:write a");
    settings["audience"] = json!("https://billing.example");
    let relay = relay(&database, destination(&receiver, &settings));
    database.enqueue_many(50);
    let requests = receiver.wait_for(50);
    eventually("all are delivered", || database.count("delivered") == 50);
    end(&relay);
    assert!(requests.iter().all(|one| authorization(one) == "Bearer t1"));
    let [asked] = server.requests().try_into().expect("one request");
    assert_eq!(asked.line, "POST /token HTTP/1.1");
    let content_type = asked.header("content-type");
    assert_eq!(content_type, Some("application/x-www-form-urlencoded"));
    let basic = authorization(&asked).strip_prefix("Basic ").expect("Basic");
    let basic = BASE64_STANDARD.decode(basic).expect("base64");
    assert_eq!(basic, b"shop%3A1:hunter2+%25%26%C3%BC");
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(
        form(&asked),
        [
            pair("grant_type", "client_credentials"),
            pair("scope", "events:write a"),
            pair("audience", "https://billing.example"),
        ]
    );
}

/// R59
#[test]
fn r59_the_secret_is_in_the_body_where_the_server_wants_it_there() {
    let (database, receiver, server) = (Database::new(), Receiver::ok(), token_server(3600));
    let mut settings = oauth2(&server);
    settings["method"] = json!("client_secret_post");
    let relay = relay(&database, destination(&receiver, &settings));
    database.enqueue_many(1);
    receiver.wait_for(1);
    end(&relay);
    let asked = server.requests().remove(0);
    assert_eq!(asked.header("authorization"), None);
    let pairs = form(&asked);
    assert_eq!(pairs[1].1, "shop:1");
    assert_eq!(pairs[2].1, "hunter2 %&ü");
}

/// R59
#[test]
fn r59_a_refused_token_is_replaced_once_and_costs_no_attempt() {
    let (database, server) = (Database::new(), token_server(3600));
    let receiver = Receiver::answering(|request| {
        match (authorization(request), request.json()["n"].as_u64()) {
            // As if the server had revoked the token.
            ("Bearer t1", Some(1..)) => 401,
            _ => 200,
        }
    });
    let relay = relay(&database, destination(&receiver, &oauth2(&server)));
    for n in 0..3 {
        database.enqueue("order.paid", json!({ "n": n }));
        let delivered = n + 1;
        eventually("it is delivered", || {
            database.count("delivered") == delivered
        });
    }
    end(&relay);
    let sent = receiver.requests();
    let tokens: Vec<&str> = sent.iter().map(authorization).collect();
    assert_eq!(tokens, ["Bearer t1", "Bearer t1", "Bearer t2", "Bearer t2"]);
    assert_eq!(server.count(), 2);
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}_attempt"), 0);
}

/// R59
#[test]
fn r59_a_receiver_that_refuses_every_token_fails_each_attempt() {
    let (database, server) = (Database::new(), token_server(3600));
    let receiver = Receiver::answering(|_| 401);
    let destination = destination(&receiver, &oauth2(&server))
        .configure(|destination| destination.policy.max_attempts = Some(3));
    let relay = relay(&database, destination);
    database.enqueue("order.paid", json!({}));
    eventually("it is dead-lettered", || database.count("dead") == 1);
    end(&relay);
    let dead =
        database.text("SELECT reason || ' ' || attempts || ' ' || http_status FROM {o}_dead");
    assert_eq!(dead.as_deref(), Some("CLIENT_ERROR 3 401"));
    let sent = receiver.requests();
    let tokens: Vec<&str> = sent.iter().map(authorization).collect();
    // A token that the send has requested itself is not replaced.
    let expected = ["t1", "t1", "t2", "t2", "t3"].map(|token| format!("Bearer {token}"));
    assert_eq!(tokens, expected);
}

/// R59
#[test]
fn r59_a_token_server_that_issues_no_token_is_the_destinations_failure() {
    let answers: [(u16, Value, &str); 6] = [
        (
            401,
            json!({ "error": "invalid_client", "error_description": "hunter2" }),
            "answered 401 (invalid_client)",
        ),
        (503, json!("away"), "answered 503"),
        (307, json!({}), "answered 307"),
        (
            200,
            json!({ "token": "hunter2" }),
            "answered 200, but the answer holds no access_token",
        ),
        (
            200,
            json!({ "access_token": "hunter2", "token_type": "mac" }),
            "answered 200, but the token is of another type than Bearer",
        ),
        (
            200,
            json!({ "access_token": "hunter2\r\na: b" }),
            "answered 200, but the token cannot be sent in a header",
        ),
    ];
    for (status, body, answered) in answers {
        let (database, receiver) = (Database::new(), Receiver::ok());
        let server = answering(move |_| (status, body.clone()));
        let relay = relay(
            &database,
            destination(&receiver, &oauth2(&server))
                .configure(|destination| destination.policy.max_attempts = Some(2)),
        );
        database.enqueue("order.paid", json!({}));
        eventually("it is dead-lettered", || database.count("dead") == 1);
        end(&relay);
        let dead =
            database.text("SELECT reason || ' ' || attempts || ' ' || last_error FROM {o}_dead");
        let expected = format!("TOKEN_SERVER 2 token server: {answered}");
        assert_eq!(dead, Some(expected));
        assert_eq!((receiver.count(), server.count()), (0, 2));
    }
}

/// R59
#[test]
fn r59_a_silent_token_server_takes_the_time_of_the_send_and_opens_the_breaker() {
    let (database, receiver) = (Database::new(), Receiver::ok());
    let (server, _gate) = Receiver::held();
    let mut breaker = Breaker::default();
    breaker.min_sends = 2;
    let destination = destination(&receiver, &oauth2(&server)).configure(|destination| {
        destination.policy.timeout = Some(Duration::from_millis(200));
        destination.policy.breaker = Some(breaker);
    });
    let relay = relay(&database, destination);
    database.enqueue_many(20);
    eventually("the breaker opens", || {
        database.number("SELECT count(*) FROM {o}_pause WHERE reason = 'BREAKER_OPEN'") == 1
    });
    end(&relay);
    let error = database.text("SELECT min(last_error) FROM {o} WHERE last_error IS NOT NULL");
    let error = error.expect("an error");
    assert_eq!(error, "token server: TIMEOUT: no response within 200 ms");
    assert_eq!(receiver.count(), 0);
}

/// R59
#[test]
fn r59_the_url_of_the_token_server_is_checked_like_that_of_the_destination() {
    let mut config = Config::default();
    config.destinations =
        vec![Destination::new("billing", "https://billing.example/").expect("a URL")];
    let of = |token_url: &str| {
        auth(&json!({
            "type": "oauth2", "token_url": token_url, "client_id": "a", "client_secret": "b",
        }))
    };
    config.destinations[0].auth = Some(of("http://169.254.169.254/token"));
    let error = HttpDispatcher::new(&config).expect_err("a metadata address");
    assert_eq!(error.key(), "destinations.billing.auth.token_url");
    assert!(error.reason().contains("blocked address"), "{error}");
    config.https_only = true;
    config.destinations[0].auth = Some(of("http://login.example/token"));
    let error = config.validate().expect_err("no https");
    assert_eq!(error.key(), "destinations.billing.auth.token_url");

    // An endpoint is not disabled: another relay may be allowed to send.
    let (database, receiver) = (Database::new(), Receiver::ok());
    let hook = Endpoint::new("acme", receiver.url());
    put(
        &database,
        &SecretKeys::default(),
        &hook.configure(|hook| hook.auth = Some(of("https://10.0.0.7/token"))),
    );
    let started = registered(&database).configure(|config| config.endpoint_https_only = true);
    let started = started.start().expect("a relay");
    eventually("it is refused", || {
        problem(&database).contains("must be https")
    });
    end(&started);
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_endpoint WHERE enabled"),
        1
    );
}

fn problem(database: &Database) -> String {
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let found = outbox.endpoints().get(conn, "acme").expect("an answer");
    found.and_then(|one| one.problem).unwrap_or_default()
}

/// R59
#[test]
fn r59_a_token_is_requested_through_the_proxy_of_the_destination() {
    let database = Database::new();
    // The proxy answers for both.
    let proxy = answering(|_| (200, json!({ "access_token": "t1" })));
    let mut destination =
        Destination::new("billing", "http://billing.example/events").expect("a URL");
    let url = format!("http://{}", proxy.address);
    destination.proxy = Some(Proxy::Via(url.parse().expect("a URL")));
    destination.auth = Some(auth(&json!({
        "type": "oauth2", "token_url": "http://login.example/token", "client_id": "a", "client_secret": "b",
    })));
    let relay = relay(&database, destination);
    database.enqueue_many(1);
    let requests = proxy.wait_for(2);
    end(&relay);
    assert_eq!(requests[0].line, "POST http://login.example/token HTTP/1.1");
    assert_eq!(
        requests[1].line,
        "POST http://billing.example/events HTTP/1.1"
    );
    assert_eq!(authorization(&requests[1]), "Bearer t1");
}

/// R59
#[test]
fn r59_a_signature_in_another_header_stands_beside_those_of_standard_webhooks() {
    for mode in [Mode::Binary, Mode::Batched] {
        let (database, receiver) = (Database::new(), Receiver::ok());
        let settings = json!({
            "type": "header",
            "name": "Stripe-Signature",
            "secret": "hunter2",
            "value": "t={timestamp},v1={signature},id={id}",
            "content": "{timestamp}.{body}",
        });
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let destination = destination(&receiver, &settings)
            .configure(|destination| destination.policy.mode = Some(mode));
        let relay = relay(
            &database,
            destination.secret(secret.parse().expect("a secret")),
        );
        database.enqueue_many(1);
        let request = receiver.wait_for(1).remove(0);
        end(&relay);
        let header = |name: &str| request.header(name).expect(name).to_owned();
        assert!(header("webhook-signature").starts_with("v1,"));
        let timestamp = header("webhook-timestamp");
        let content = [timestamp.as_bytes(), b".", &request.body].concat();
        let signature = hmac_by_openssl(&content);
        let expected = format!("t={timestamp},v1={signature},id={}", header("webhook-id"));
        assert_eq!(header("stripe-signature"), expected);
    }
}

fn hmac_by_openssl(content: &[u8]) -> String {
    let mut openssl = Command::new("openssl");
    openssl.args(["dgst", "-sha256", "-hmac", "hunter2"]);
    let finished = with_input(openssl, content).code(0);
    let (_, hex) = finished.stdout.rsplit_once(' ').expect("a digest");
    hex.trim().to_owned()
}

/// The output of a command that reads this input.
fn with_input(mut command: Command, input: &[u8]) -> Finished {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut stdin = child.stdin.take().expect("piped");
    std::io::copy(&mut Cursor::new(input), &mut stdin).expect("the command reads");
    drop(stdin);
    let output = child.wait_with_output().expect("the command ends");
    Finished {
        status: output.status,
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

// --- Endpoints --------------------------------------------------------------

fn registered(database: &Database) -> RelayBuilder {
    database.relay().endpoint_threads(4)
}

fn put(database: &Database, keys: &SecretKeys, hook: &Endpoint) {
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let destinations = outbox.endpoints().with_keys(keys);
    destinations.put(conn, hook).expect("put");
}

fn stored(database: &Database) -> String {
    let auth = database.text("SELECT auth FROM {o}_endpoint WHERE name = 'acme'");
    auth.expect("authentication")
}

fn text(keys: &SecretKeys) -> String {
    keys.written().expose_secret().to_owned()
}

/// R59
#[test]
fn r59_authentication_is_encrypted_at_rest_like_the_secrets() {
    let (database, receiver, server) = (Database::new(), Receiver::ok(), token_server(3600));
    let (old, new, none) = (
        SecretKeys::random(),
        SecretKeys::random(),
        SecretKeys::default(),
    );
    let hook = Endpoint::new("acme", receiver.url())
        .configure(|hook| hook.auth = Some(auth(&oauth2(&server))));
    put(&database, &none, &hook);
    assert!(stored(&database).contains("hunter2"));
    put(&database, &old, &hook);
    let sealed = stored(&database);
    assert!(sealed.starts_with("sealed1_"), "{sealed}");

    // Whoever lacks the key keeps it.
    let outbox = database.outbox();
    let get = |keys: &SecretKeys| {
        let destinations = outbox.endpoints().with_keys(keys);
        let found = destinations.get(&mut database.connect(), "acme");
        found.expect("an answer").expect("it is there")
    };
    let locked = get(&none);
    assert_eq!(
        locked.auth.as_ref().expect("it is there").to_string(),
        "encrypted"
    );
    put(
        &database,
        &none,
        &locked.configure(|hook| hook.description = Some("a shop".into())),
    );
    assert_eq!(stored(&database), sealed);
    let shown = get(&old).auth.expect("it is there").to_string();
    assert!(shown.starts_with("oauth2, token_url "), "{shown}");
    let problem = get(&new).problem.expect("another key");
    assert!(
        problem.contains("no key of OUTBOX_SECRET_KEY decrypts"),
        "{problem}"
    );

    let both: SecretKeys = format!("{} {}", text(&new), text(&old))
        .parse()
        .expect("keys");
    let destinations = outbox.endpoints().with_keys(&both);
    let before = destinations
        .encrypt(&mut database.connect())
        .expect("encrypted");
    // The signing secret is plain: it is older than the key.
    assert_eq!((before.plain, before.older, before.newest), (1, 0, 0));
    assert_ne!(stored(&database), sealed);
    assert_eq!(get(&new).problem, None);

    let without = registered(&database).start().expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("it is refused", || {
        get(&none)
            .problem
            .is_some_and(|problem| problem.contains("encrypted"))
    });
    assert_eq!((receiver.count(), server.count()), (0, 0));
    let with = registered(&database).secret_keys(new);
    let with = with.start().expect("a relay");
    let request = receiver.wait_for(1).remove(0);
    assert_eq!(authorization(&request), "Bearer t1");
    eventually("it is delivered", || database.count("delivered") == 1);
    end(&without);
    end(&with);
}

/// R59
#[test]
fn r59_commands_set_test_and_show_authentication_and_the_log_shows_no_secret() {
    let (database, receiver, server) = (Database::new(), Receiver::ok(), token_server(3600));
    let command = |arguments: &[&str]| {
        let mut command = database.binary(arguments);
        command
            .env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false")
            .env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false")
            .env("OUTBOX_ENDPOINT_THREADS", "4")
            .env("RUST_LOG", "trace");
        command
    };
    let (url, settings) = (receiver.url(), oauth2(&server).to_string());
    let file = File::new(&settings);
    for given in [
        settings.clone(),
        format!("@{}", file.path()),
        "-".to_owned(),
    ] {
        let put = command(&["endpoint", "put", "acme", &url, "--auth", &given, "--json"]);
        let shown = with_input(put, settings.as_bytes()).code(0);
        let output = format!("{} {}", shown.stdout, shown.stderr);
        assert!(!output.contains("hunter2"), "{output}");
        let expected = json!({
            "type": "oauth2", "token_url": format!("http://{}/token", server.address), "client_id": "shop:1",
        });
        assert_eq!(shown.json()["auth"], expected);
        finish(command(&["endpoint", "put", "acme", "--clear", "auth"])).code(0);
        assert_eq!(
            database.number("SELECT count(*) FROM {o}_endpoint WHERE auth IS NULL"),
            1
        );
    }
    let refused = command(&["endpoint", "put", "acme", "--auth", "{\"type\": hunter2"]);
    let refused = finish(refused).code(2).stderr;
    assert!(
        refused.contains("auth: not JSON") && !refused.contains("hunter2"),
        "{refused}"
    );

    // A forgotten @.
    let refused = command(&["endpoint", "put", "acme", "--auth", "acme.json"]);
    let refused = finish(refused).code(2).stderr;
    assert!(refused.contains("@FILE"), "{refused}");

    finish(command(&["endpoint", "put", "acme", "--auth", &settings])).code(0);
    let tested = finish(command(&["endpoint", "test", "acme", "--json"])).code(0);
    assert_eq!(tested.json()["went_well"], true, "{}", tested.stdout);
    let mut relay = Running::start(command(&["run"]));
    database.enqueue("order.paid", json!({}));
    eventually("it is delivered", || database.count("delivered") == 1);
    relay.signal("TERM");
    assert!(relay.wait().success(), "{}", relay.log());
    let log = relay.log();
    let shown = finish(command(&["endpoint", "show", "acme"]))
        .code(0)
        .stdout;
    assert!(shown.contains("client_id shop:1"), "{shown}");
    for output in [log, shown, tested.stderr] {
        for secret in ["hunter2", "Bearer t", "c2hvcCUzQTE6"] {
            let has_secret = output.lines().any(|line| line.contains(secret));
            assert!(!has_secret, "{secret} in {output}");
        }
    }
    let sent = receiver.requests();
    let tokens: Vec<&str> = sent.iter().map(authorization).collect();
    assert_eq!(tokens, ["Bearer t1", "Bearer t2"]);
}

/// R59
#[test]
fn r59_a_customer_reads_what_to_mend_at_the_token_server() {
    let (database, receiver) = (Database::new(), Receiver::ok());
    let server = answering(|_| (401, json!({ "error": "invalid_client" })));
    let hook = Endpoint::new("acme", receiver.url()).configure(|hook| {
        hook.auth = Some(auth(&oauth2(&server)));
        hook.policy.max_attempts = Some(1);
    });
    put(&database, &SecretKeys::default(), &hook);
    let relay = registered(&database).start().expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("it is dead-lettered", || database.count("dead") == 1);
    end(&relay);
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let page = outbox
        .endpoints()
        .deliveries(conn, "acme", &DeliveryFilter::default(), 10);
    let row = &page.expect("an answer").rows[0];
    // The code of the error is for customers, too, if only public addresses are connected to.
    let error = "token server: answered 401; only for operators: (invalid_client)";
    assert_eq!(row.error.as_deref(), Some(error));
    let expected = "your token server answered 401";
    assert_eq!(row.public_error().as_deref(), Some(expected));
}

/// R59
#[test]
fn r59_a_row_that_no_relay_can_use_is_disabled_with_the_reason() {
    let (database, receiver) = (Database::new(), Receiver::ok());
    put(
        &database,
        &SecretKeys::default(),
        &Endpoint::new("acme", receiver.url()),
    );
    database.execute(
        "UPDATE {o}_endpoint SET auth = '{\"type\": \"kerberos\", \"secret\": \"hunter2\"}'",
    );
    let relay = registered(&database).start().expect("a relay");
    let reason = || database.text("SELECT disabled_reason FROM {o}_endpoint");
    eventually("it is disabled", || reason().is_some());
    end(&relay);
    let reason = reason().expect("a reason");
    assert!(
        reason.contains("auth.type: expected oauth2 or header"),
        "{reason}"
    );
}
