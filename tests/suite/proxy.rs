//! An HTTP proxy between relay and destination. A failure of the proxy costs no attempt, a failure of the destination
//! does.

use std::collections::HashSet;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use diesel_outbox::config::{Breaker, Config, Proxy, Verification};
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::{Destination, HttpDispatcher, ProblemKind, RelayBuilder};
use serde_json::json;

use crate::support::{Database, Receiver, Running, end, eventually};

/// A proxy on a real socket. `treat` gets the head of the request and the connection, whose next byte is the
/// first after the head.
pub(crate) struct ConnectProxy {
    address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
}

type Treat = dyn Fn(&str, TcpStream) -> io::Result<()> + Send + Sync;

impl ConnectProxy {
    fn like_squid() -> Self {
        Self::treating(forward_or_tunnel)
    }

    /// Writes this response instead of opening a tunnel, and closes the connection.
    pub(crate) fn answering(answer: &'static str) -> Self {
        Self::treating(move |_, mut stream| stream.write_all(answer.as_bytes()))
    }

    pub(crate) fn treating(
        treat: impl Fn(&str, TcpStream) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        Self::on(listener, Arc::new(treat))
    }

    fn on(listener: TcpListener, treat: Arc<Treat>) -> Self {
        let address = listener.local_addr().expect("an address");
        let heads = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&heads);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (noted, treat) = (Arc::clone(&noted), Arc::clone(&treat));
                std::thread::spawn(move || {
                    let mut head = String::new();
                    let mut reader = BufReader::with_capacity(1, &stream);
                    while !head.ends_with("\r\n\r\n") {
                        if !matches!(reader.read_line(&mut head), Ok(1..)) {
                            return;
                        }
                    }
                    noted
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(head.clone());
                    // Either side may close a connection; that is no error of the proxy.
                    let _ = treat(&head, stream);
                });
            }
        });
        Self { address, heads }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn heads(&self) -> Vec<String> {
        let heads = self.heads.lock().unwrap_or_else(PoisonError::into_inner);
        heads.clone()
    }
}

/// Connects to the requested port on this machine and forwards bytes both ways.
pub(crate) fn tunnel(head: &str, mut client: TcpStream) -> io::Result<()> {
    let target = head.split(' ').nth(1).expect("CONNECT host:port");
    let (_, port) = target.rsplit_once(':').expect("a port");
    let server = TcpStream::connect(("127.0.0.1", port.parse().expect("a port")))?;
    client.write_all(b"HTTP/1.1 200 Connection established\r\nvia: test\r\n\r\n")?;
    carry(client, server)
}

/// Does what curl needs, and opens tunnels to port 443 only, as Squid does by default.
fn forward_or_tunnel(head: &str, mut client: TcpStream) -> io::Result<()> {
    match head.starts_with("CONNECT ") {
        true if !head.contains(":443 ") => {
            client.write_all(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        }
        true => tunnel(head, client),
        false => forward(head, client),
    }
}

/// Carries bytes both ways.
fn carry(mut client: TcpStream, mut server: TcpStream) -> io::Result<()> {
    let (mut from_server, mut to_client) = (server.try_clone()?, client.try_clone()?);
    std::thread::spawn(move || {
        let _ = io::copy(&mut from_server, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
    });
    let copied = io::copy(&mut client, &mut server);
    server.shutdown(Shutdown::Both)?;
    copied.map(|_| ())
}

/// Forwards a request with the whole URL, and what follows, to the requested port on this machine.
fn forward(head: &str, client: TcpStream) -> io::Result<()> {
    let (method, rest) = head.split_once(" http://").expect("the whole URL");
    let (authority, rest) = rest.split_once('/').expect("a path");
    let (_, port) = authority.rsplit_once(':').expect("a port");
    let mut server = TcpStream::connect(("127.0.0.1", port.parse().expect("a port")))?;
    write!(server, "{method} /{rest}")?;
    carry(client, server)
}

/// The URL of a receiver that needs a tunnel. No test comes as far as its TLS.
fn secure(receiver: &Receiver) -> String {
    format!("https://{}/", receiver.address)
}

/// A destination behind a proxy, with short delays between attempts.
fn behind(proxy: &str, url: &str) -> Destination {
    let mut destination = Destination::new("shop", url).expect("a URL");
    destination.proxy = Some(Proxy::Via(proxy.parse().expect("a URL")));
    let mut breaker = Breaker::default();
    breaker.open = Duration::from_millis(50);
    breaker.open_cap = Duration::from_millis(100);
    destination.policy.breaker = Some(breaker);
    destination
}

fn relay(database: &Database, destination: Destination) -> RelayBuilder {
    database
        .relay()
        .max_attempts(3)
        .destination(destination)
        .route("*", "shop")
}

fn last_error(database: &Database) -> Option<String> {
    database.text("SELECT last_error FROM {o}")
}

/// R50
#[test]
fn messages_to_plain_http_pass_a_proxy_that_opens_tunnels_to_port_443_only() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let proxy = ConnectProxy::like_squid();
    // Only the proxy can resolve this name.
    let authority = format!("shop.invalid:{}", receiver.address.port());
    let url = format!("http://{authority}/events?a=b");
    let with_password = format!("http://relay:p%40ss@{}", proxy.address);
    let mut shop = behind(&with_password, &url);
    // The proxy's own address is one that the destination must not have.
    shop.internal = Some(false);
    let relay = relay(&database, shop)
        .concurrency(1)
        .start()
        .expect("a relay");
    database.enqueue_many(5);
    eventually("all messages are delivered", || {
        database.count("delivered") == 5
    });
    let requests = receiver.requests();
    assert_eq!(requests[0].line, "POST /events?a=b HTTP/1.1");
    assert_eq!(requests[0].header("host"), Some(authority.as_str()));
    let heads = proxy.heads();
    assert_eq!(heads.len(), 1, "one connection carries all messages");
    let start = format!("POST {url} HTTP/1.1\r\n");
    assert!(heads[0].starts_with(&start), "{}", heads[0]);
    // relay:p@ss
    let credentials = "\r\nproxy-authorization: Basic cmVsYXk6cEBzcw==\r\n";
    assert!(heads[0].contains(credentials), "{}", heads[0]);
    for request in &requests[1..] {
        assert_eq!(request.line, format!("POST {url} HTTP/1.1"));
    }
    end(&relay);
}

#[test]
fn while_the_proxy_is_down_messages_wait_and_no_attempt_is_counted() {
    let database = Database::new();
    let receiver = Receiver::ok();
    // No other test listens on this address, so no other process takes the port meanwhile.
    let listener = TcpListener::bind("127.0.77.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    let relay = relay(
        &database,
        behind(&format!("http://{address}"), &receiver.url()),
    )
    .start()
    .expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually("the message waits", || last_error(&database).is_some());
    let error = last_error(&database).expect("an error");
    assert!(
        error.starts_with(&format!("proxy {address} cannot be reached")),
        "{error}"
    );
    // More tries than the message has attempts.
    let mut tries = HashSet::new();
    eventually("the message was tried ten times", || {
        tries.extend(database.text("SELECT available_at FROM {o}"));
        tries.len() >= 10
    });
    assert_eq!(database.number("SELECT attempts FROM {o}"), 0);

    let listener = TcpListener::bind(address).expect("the port is ours");
    let proxy = ConnectProxy::on(listener, Arc::new(forward));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 1);
    assert_eq!(receiver.count(), 1);
    assert!(!proxy.heads().is_empty());
    end(&relay);
}

/// R50
#[test]
fn a_proxy_that_refuses_the_credentials_or_is_none_costs_no_attempt() {
    for (answer, reason) in [
        (
            "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=a\r\n\r\n",
            "refused the credentials: it returned 407",
        ),
        (
            "HTTP/1.0 405\r\n\r\n",
            "opens no tunnels: it returned 405 to CONNECT",
        ),
        ("SSH-2.0-OpenSSH_9\r\n\r\n", "the response is not HTTP"),
        ("", "the proxy closed the connection"),
        ("HTTP/1.1 200 OK\r\nvia:", "the proxy closed the connection"),
    ] {
        let database = Database::new();
        let receiver = Receiver::ok();
        let proxy = ConnectProxy::answering(answer);
        let relay = relay(&database, behind(&proxy.url(), &secure(&receiver)))
            .start()
            .expect("a relay");
        database.enqueue("order.paid", json!(1));
        eventually(
            "the message was tried more often than it has attempts",
            || proxy.heads().len() > 4,
        );
        let error = last_error(&database).expect("an error");
        assert!(error.contains(reason), "{error}");
        assert_eq!(database.number("SELECT attempts FROM {o}"), 0, "{answer}");
        assert_eq!(receiver.count(), 0);
        end(&relay);
    }
}

/// R50
#[test]
fn a_forwarding_proxy_that_refuses_the_credentials_costs_no_attempt() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let challenge =
        "HTTP/1.1 407 No\r\nproxy-authenticate: Basic realm=a\r\ncontent-length: 0\r\n\r\n";
    let proxy = ConnectProxy::answering(challenge);
    let relay = relay(&database, behind(&proxy.url(), &receiver.url()))
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually(
        "the message was tried more often than it has attempts",
        || proxy.heads().len() > 4,
    );
    let error = last_error(&database).expect("an error");
    assert!(
        error.ends_with("refused the credentials: it returned 407"),
        "{error}"
    );
    assert_eq!(database.number("SELECT attempts FROM {o}"), 0);
    end(&relay);
}

/// R50: a receiver can answer as a proxy does that wants other credentials. Only the answer to CONNECT is the proxy's.
#[test]
fn a_receiver_that_asks_for_credentials_of_a_proxy_fails_while_another_passes() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let proxy = ConnectProxy::treating(|head, mut client| {
        match head.starts_with("CONNECT ") || !head.contains("//asks.invalid") {
            true => forward_or_tunnel(head, client),
            false => client.write_all(
                b"HTTP/1.1 407 No\r\nproxy-authenticate: Basic realm=a\r\ncontent-length: 0\r\n\r\n",
            ),
        }
    });
    let mut asks = behind(&proxy.url(), "http://asks.invalid/");
    asks.name = "asks".to_owned();
    let relay = relay(&database, behind(&proxy.url(), &receiver.url()))
        .destination(asks)
        .route("asks.*", "asks")
        .start()
        .expect("a relay");
    database.enqueue("asks.order", json!(1));
    database.enqueue("order.paid", json!(1));
    eventually("one message is delivered and the other dead", || {
        database.count("dead") == 1 && database.count("delivered") == 1
    });
    let error = database.text("SELECT reason || ' ' || last_error FROM {o}_dead");
    let expected = "CLIENT_ERROR the receiver returned 407";
    assert_eq!(error.as_deref(), Some(expected));
    assert_eq!(database.number("SELECT attempts FROM {o}_dead"), 3);
    let asked = proxy.heads();
    let tunnel = |head: &&String| head.starts_with("CONNECT asks.invalid:443 ");
    assert_eq!(asked.iter().filter(tunnel).count(), 3, "{asked:?}");
    end(&relay);
}

/// R50
#[test]
fn a_destination_that_the_proxy_denies_fails_while_another_passes() {
    for denial in ["403 Forbidden", "407 No", "400 Bad Request", "429 Slow"] {
        let proxy =
            ConnectProxy::treating(
                move |head, mut client| match head.contains("denied.invalid") {
                    true => write!(client, "HTTP/1.1 {denial}\r\ncontent-length: 0\r\n\r\n"),
                    false => forward(head, client),
                },
            );
        let database = Database::new();
        let receiver = Receiver::ok();
        let mut denied = behind(&proxy.url(), "https://denied.invalid/");
        denied.name = "denied".to_owned();
        let relay = relay(&database, behind(&proxy.url(), &receiver.url()))
            .destination(denied)
            .route("denied.*", "denied")
            .start()
            .expect("a relay");
        database.enqueue("denied.order", json!(1));
        database.enqueue("order.paid", json!(1));
        eventually("one message is delivered and the other dead", || {
            database.count("dead") == 1 && database.count("delivered") == 1
        });
        let error = database.text("SELECT reason || ' ' || last_error FROM {o}_dead");
        let error = error.expect("an error");
        let (status, _) = denial.split_once(' ').expect("a status");
        assert!(error.starts_with("CONNECT proxy "), "{error}");
        let end = format!("does not allow the destination: it returned {status} to CONNECT");
        assert!(error.ends_with(&end), "{error}");
        assert_eq!(database.number("SELECT attempts FROM {o}_dead"), 3);
        crate::support::end(&relay);
    }
}

#[test]
fn a_proxy_whose_name_is_unknown_is_the_proxys_fault() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = relay(
        &database,
        behind("http://proxy.invalid:3128", &receiver.url()),
    )
    .send_timeout(Duration::from_secs(20))
    .lease(Duration::from_secs(60))
    .start()
    .expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually("the message waits", || last_error(&database).is_some());
    let error = last_error(&database).expect("an error");
    assert!(
        error.starts_with("proxy proxy.invalid:3128 cannot be reached: cannot resolve"),
        "{error}"
    );
    assert_eq!(database.number("SELECT attempts FROM {o}"), 0);
    end(&relay);
}

/// Sends a message through a proxy. Fails unless the message is dead-lettered after three attempts.
fn is_dead_lettered_behind(proxy: &ConnectProxy, reason: &str) -> String {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = relay(&database, behind(&proxy.url(), &secure(&receiver)))
        .send_timeout(Duration::from_millis(300))
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    let error = database
        .text("SELECT last_error FROM {o}_dead")
        .expect("an error");
    let found = database.text("SELECT reason FROM {o}_dead");
    assert_eq!(found.as_deref(), Some(reason), "{error}");
    assert_eq!(database.number("SELECT attempts FROM {o}_dead"), 3);
    assert_eq!(receiver.count(), 0);
    end(&relay);
    error
}

#[test]
fn a_destination_that_the_proxy_cannot_reach_costs_attempts() {
    for status in [500, 502, 503, 504] {
        let proxy = ConnectProxy::treating(move |_, mut stream| {
            write!(stream, "HTTP/1.1 {status} Reason\r\n\r\n")
        });
        let error = is_dead_lettered_behind(&proxy, "CONNECT");
        let end = format!("cannot reach the destination: it returned {status}");
        assert!(error.ends_with(&end), "{error}");
    }
}

#[test]
fn a_proxy_that_answers_but_opens_no_tunnel_costs_attempts() {
    let slow = ConnectProxy::treating(|head, mut stream| {
        if !head.starts_with("CONNECT ") {
            return stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n");
        }
        let _ = stream.read(&mut [0]);
        Ok(())
    });
    let error = is_dead_lettered_behind(&slow, "TIMEOUT");
    assert!(
        error.ends_with("opened no tunnel to the destination in time"),
        "{error}"
    );
}

/// R50: a customer would read that the endpoint did not answer in time, and it was never asked.
#[test]
fn a_proxy_that_answers_nothing_costs_no_attempt() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let hangs = ConnectProxy::treating(|_, mut stream| {
        let _ = stream.read(&mut [0]);
        Ok(())
    });
    let relay = relay(&database, behind(&hangs.url(), &secure(&receiver)))
        .send_timeout(Duration::from_millis(100))
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!(1));
    let connects = || {
        let heads = hangs.heads();
        heads
            .iter()
            .filter(|head| head.starts_with("CONNECT "))
            .count()
    };
    eventually("it was tried more often than it has attempts", || {
        connects() > 4
    });
    let error = last_error(&database).expect("an error");
    assert!(error.ends_with("answers nothing"), "{error}");
    assert_eq!(database.number("SELECT attempts FROM {o}"), 0);
    let health = relay.health();
    let mut problems = health.problems().iter();
    assert!(
        problems.any(|one| one.kind == ProblemKind::Proxy),
        "{health}"
    );
    end(&relay);
}

/// R50: RFC 9112, 2.2.
#[test]
fn a_tunnel_is_opened_by_an_answer_that_ends_its_lines_with_a_line_feed_alone() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&seen);
    let proxy = ConnectProxy::treating(move |_, mut stream| {
        stream.write_all(b"HTTP/1.1 200 Connection established\nvia: test\n\n")?;
        let mut first = [0; 3];
        stream.read_exact(&mut first)?;
        noted
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(first);
        Ok(())
    });
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = relay(&database, behind(&proxy.url(), &secure(&receiver)))
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!(1));
    // The record of a TLS handshake (RFC 8446, 5.1).
    eventually("TLS begins in the tunnel", || {
        let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().any(|first| first[..2] == [0x16, 0x03])
    });
    end(&relay);
}

/// R46: the customer sees responses, and the proxy may reach servers that the customer must not read.
#[test]
fn a_response_that_came_through_a_proxy_to_an_endpoint_is_not_kept() {
    let database = Database::new();
    let proxy = ConnectProxy::like_squid();
    let inner = Receiver::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 500 No\r\ncontent-length: 6\r\n\r\nsecret")
    });
    let hook = Endpoint::new("hook", inner.url());
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    outbox.endpoints().put(conn, &hook).expect("put");
    let through = |via: &str| {
        let via = via.to_owned();
        (database.relay())
            .endpoint_threads(4)
            .configure(move |config| {
                let proxy = config.set("OUTBOX_ENDPOINT_PROXY", &via);
                proxy.expect("a URL");
            })
            .start()
            .expect("a relay")
    };
    let responses = "SELECT count(response) FROM {o}_attempt";
    let attempts = "SELECT count(*) FROM {o}_attempt WHERE http_status = 500";
    let relay = through(&proxy.url());
    database.enqueue("order.paid", json!(1));
    eventually("an attempt has failed", || database.number(attempts) > 0);
    end(&relay);
    assert_eq!(database.number(responses), 0);
    let mut config = Config::default();
    (config.endpoint_https_only, config.endpoint_public_only) = (false, false);
    let proxied = config.set("OUTBOX_ENDPOINT_PROXY", &proxy.url());
    proxied.expect("a URL");
    let test = outbox.endpoints().test(conn, "hook", &config);
    let answer = test.expect("ready").expect("it is there").send();
    assert_eq!((answer.http_status, answer.body), (Some(500), None));

    database.execute("UPDATE {o} SET available_at = now()");
    let relay = through("direct");
    eventually("a response that came directly is kept", || {
        database.number(responses) > 0
    });
    end(&relay);
}

/// R46: what any text for the customer says of a response, besides its status, is said only if the address was checked.
#[test]
fn no_text_for_customers_quotes_a_server_of_an_unchecked_address() {
    let database = Database::new();
    let proxy = ConnectProxy::like_squid();
    let inner = Receiver::start(|request, stream| match request.line.contains("/token") {
        true => stream
            .write_all(b"HTTP/1.1 401 No\r\ncontent-length: 20\r\n\r\n{\"error\":\"internal\"}"),
        false => stream.write_all(
            b"HTTP/1.1 302 Found\r\nlocation: http://internal/\r\ncontent-length: 0\r\n\r\n",
        ),
    });
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let hook = Endpoint::new("hook", inner.url());
    let auth = json!({
        "type": "oauth2",
        "token_url": format!("http://{}/token", inner.address),
        "client_id": "a",
        "client_secret": "b",
    });
    let with_token = Endpoint::new("with-token", inner.url());
    let with_token = with_token.configure(|hook| {
        let auth = auth.to_string().parse();
        hook.auth = Some(auth.expect("authentication"));
    });
    for hook in [&hook, &with_token] {
        outbox.endpoints().put(conn, hook).expect("put");
    }
    for via in [proxy.url().as_str(), "direct"] {
        let mut config = Config::default();
        (config.endpoint_https_only, config.endpoint_public_only) = (false, false);
        let proxied = config.set("OUTBOX_ENDPOINT_PROXY", via);
        proxied.expect("a proxy");
        for (name, words) in [
            (
                "hook",
                "your endpoint redirects, and redirects are not followed",
            ),
            ("with-token", "your token server answered 401"),
        ] {
            let test = outbox.endpoints().test(conn, name, &config);
            let answer = test.expect("ready").expect("it is there").send();
            assert_eq!(answer.public_error().as_deref(), Some(words), "{via}");
            let error = answer.error.expect("an error");
            assert!(error.contains("internal"), "for operators: {error}");
        }
    }
}

#[test]
fn a_proxy_that_drips_its_answer_holds_no_sender_longer_than_a_send_may_take() {
    let drips = ConnectProxy::treating(|_, mut stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nx: ")?;
        loop {
            stream.write_all(b"a")?;
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let started = Instant::now();
    is_dead_lettered_behind(&drips, "TIMEOUT");
    // Three sends of 300 ms, with a margin for a busy machine.
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_receiver_behind_a_proxy_fails_like_any_other() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 503);
    let proxy = ConnectProxy::like_squid();
    let relay = relay(&database, behind(&proxy.url(), &receiver.url()))
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    let reason = database.text("SELECT reason FROM {o}_dead");
    assert_eq!(reason.as_deref(), Some("SERVER_ERROR"));
    assert_eq!(receiver.count(), 3);
    end(&relay);
}

#[test]
fn hosts_of_no_proxy_and_destinations_that_say_so_are_reached_directly() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let proxy = ConnectProxy::like_squid();
    let port = receiver.address.port();
    for (topic, host) in [("a", "127.0.0.1"), ("b", "localhost"), ("c", "localhost")] {
        let sequence = database.enqueue(topic, json!(1));
        let mut drain = database.binary(&["drain"]);
        drain
            .env("OUTBOX_URL", format!("http://{host}:{port}/"))
            .env("OUTBOX_PROXY", proxy.url());
        match topic {
            "a" => drain.env("OUTBOX_NO_PROXY", "shop.example,127.0.0.0/8"),
            "b" => drain.env("OUTBOX_NO_PROXY", ".localhost"),
            _ => &mut drain,
        };
        crate::support::finish(drain).code(0);
        assert_eq!(
            database.number(&format!(
                "SELECT count(*) FROM {{o}}_ledger WHERE sequence = {sequence}"
            )),
            1
        );
    }
    assert_eq!(receiver.count(), 3);
    assert_eq!(
        proxy.heads().len(),
        1,
        "only the last message went through the proxy"
    );

    let mut direct = behind(&proxy.url(), &receiver.url());
    direct.proxy = Some(Proxy::Direct);
    let relay = relay(&database, direct).start().expect("a relay");
    database.enqueue("d", json!(1));
    eventually("the message is delivered", || {
        database.count("delivered") == 4
    });
    assert_eq!(proxy.heads().len(), 1);
    end(&relay);
}

/// R59: the first question to an endpoint takes the same way.
#[test]
fn endpoints_have_a_proxy_of_their_own() {
    let database = Database::new();
    let proxy = ConnectProxy::like_squid();
    let receiver = Receiver::start(|_, stream| {
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nwebhook-allowed-origin: *\r\ncontent-length: 0\r\n\r\n")
    });
    let hook = Endpoint::new("hook", receiver.url());
    let hook = hook.configure(|hook| hook.verification = Verification::CloudEvents);
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    outbox.endpoints().put(conn, &hook).expect("put");
    database.enqueue("order.paid", json!(1));
    let mut run = database.binary(&["run"]);
    run.env("OUTBOX_ENDPOINT_THREADS", "4")
        .env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false")
        .env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false")
        .env("OUTBOX_ENDPOINT_PROXY", proxy.url());
    let run = Running::start(run);
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    run.stop();
    // The message takes the same connection.
    assert!(proxy.heads()[0].starts_with("OPTIONS http://"));
    let requests = receiver.requests();
    let methods: Vec<&str> = (requests.iter())
        .filter_map(|one| one.line.split(' ').next())
        .collect();
    assert_eq!(methods, ["OPTIONS", "POST"]);

    let mut config = diesel_outbox::config::Config::default();
    let proxy = config.set("OUTBOX_ENDPOINT_PROXY", "https://proxy:3128");
    proxy.expect("a URL");
    let error = HttpDispatcher::new(&config).expect_err("TLS to the proxy");
    assert_eq!(error.key(), "OUTBOX_ENDPOINT_PROXY");
}

/// The proxy resolves names, so the relay cannot check where they lead. The relay still checks addresses.
#[test]
fn an_address_in_a_url_is_judged_behind_a_proxy_as_well_and_the_proxys_own_is_not() {
    let mut config = diesel_outbox::config::Config::default();
    config.public_only = true;
    config
        .set("OUTBOX_PROXY", "http://127.0.0.1:3128")
        .expect("a URL");
    config
        .set("OUTBOX_URL", "http://169.254.169.254/")
        .expect("a URL");
    let error = HttpDispatcher::new(&config).expect_err("an address that is refused");
    assert_eq!(error.key(), "OUTBOX_URL");
    config
        .set("OUTBOX_URL", "http://shop.example/")
        .expect("a URL");
    HttpDispatcher::new(&config).expect("the operator may choose the proxy's address");
}

#[test]
fn a_proxy_that_cannot_be_used_is_an_error_at_start() {
    let mut config = diesel_outbox::config::Config::default();
    config
        .set("OUTBOX_URL", "http://shop.example/")
        .expect("a URL");
    config
        .set("OUTBOX_PROXY", "https://proxy:3128")
        .expect("a URL");
    let error = HttpDispatcher::new(&config).expect_err("TLS to the proxy is not supported");
    assert_eq!(error.key(), "OUTBOX_PROXY");
    config.proxy = Proxy::Direct;
    config.destinations = vec![behind("http://proxy:3128/path", "http://shop.example/")];
    let error = HttpDispatcher::new(&config).expect_err("a path");
    assert_eq!(error.key(), "destinations.shop.proxy");
    config.destinations.clear();
    config
        .set("OUTBOX_PROXY", "http://proxy:3128")
        .expect("a URL");
    config
        .set("OUTBOX_NO_PROXY", "*.example")
        .expect("read later");
    let error = HttpDispatcher::new(&config).expect_err("no such pattern");
    assert_eq!(error.key(), "OUTBOX_NO_PROXY");
}
