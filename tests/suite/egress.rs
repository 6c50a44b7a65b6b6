//! Addresses that a destination must not have, in every spelling, through every name, and whenever a name resolves to
//! them.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use diesel_outbox::config::Config;
use diesel_outbox::{Backoff, Destination, HttpDispatcher, Relay, RelayHandle};
use ipnet::IpNet;
use serde_json::json;

use crate::support::{Database, Receiver, end, eventually};

/// Settings for this outbox with short times.
fn config(database: &Database) -> Config {
    let mut config = Config::default();
    for (variable, value) in [
        ("DATABASE_URL", database.url.as_str()),
        ("OUTBOX_TABLE", &database.name()),
        ("OUTBOX_POLL_INTERVAL", "20ms"),
        ("OUTBOX_SEND_TIMEOUT", "1s"),
        ("OUTBOX_LEASE", "3s"),
        ("OUTBOX_CONCURRENCY", "2"),
        ("OUTBOX_MAX_ATTEMPTS", "3"),
    ] {
        config.set(variable, value).expect("a good value");
    }
    config.backoff = Backoff::Table(vec![Duration::from_millis(50)]);
    config
}

fn destination(name: &str, url: &str) -> Destination {
    Destination::new(name, url).expect("a URL")
}

fn public_only(database: &Database) -> Config {
    let mut config = config(database);
    config.public_only = true;
    config
}

/// A relay that resolves names with `lookup`.
fn relay_with(
    config: Config,
    lookup: impl Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
) -> RelayHandle {
    let dispatcher = HttpDispatcher::with_lookup(&config, lookup).expect("a dispatcher");
    Relay::from_config(config)
        .dispatcher(dispatcher)
        .start()
        .expect("a relay")
}

fn last_error(database: &Database) -> String {
    let error = database.text("SELECT last_error FROM {o}_dead");
    error.expect("a dead message with an error")
}

#[test]
fn a_name_that_leads_to_a_family_of_addresses_beside_the_public_ones_is_never_connected() {
    const FAMILIES: [(&str, &str); 22] = [
        ("0.0.0.0", "unspecified"),
        ("::", "unspecified"),
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("169.254.169.254", "link-local"),
        ("fe80::1", "link-local"),
        ("168.63.129.16", "cloud metadata"),
        ("fd00:ec2::254", "cloud metadata"),
        ("10.0.0.1", "private"),
        ("172.16.0.1", "private"),
        ("192.168.0.1", "private"),
        ("100.64.0.1", "carrier-grade NAT"),
        ("224.0.0.1", "multicast"),
        ("255.255.255.255", "broadcast"),
        ("240.0.0.1", "reserved"),
        ("198.18.0.1", "benchmarking"),
        ("192.0.2.1", "documentation"),
        ("fc00::1", "unique local"),
        ("::ffff:10.0.0.1", "v4-mapped"),
        ("2002:a00:1::", "6to4"),
        ("64:ff9b::a00:1", "NAT64"),
        ("2001::1", "Teredo"),
    ];
    let database = Database::new();
    let mut config = public_only(&database);
    for number in 0..FAMILIES.len() {
        let name = format!("d{number}");
        let url = format!("http://{number}.example/");
        config.destinations.push(destination(&name, &url));
    }
    let relay = relay_with(config, |host, port| {
        let number = host.split('.').next().and_then(|n| n.parse::<usize>().ok());
        let (address, _) = FAMILIES[number.expect("a number")];
        Ok(vec![
            (
                address.parse::<std::net::IpAddr>().expect("an address"),
                port,
            )
                .into(),
        ])
    });
    for number in 0..FAMILIES.len() {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, destination) VALUES ('order.paid', '1', 'd{number}')"
        ));
    }
    let all = i64::try_from(FAMILIES.len()).expect("few");
    eventually("all messages are dead-lettered", || {
        database.count("dead") == all
    });
    assert_eq!(
        database.number(
            "SELECT count(*) FROM {o}_dead WHERE reason = 'BLOCKED_ADDRESS' AND attempts = 3"
        ),
        all
    );
    for (number, (address, family)) in FAMILIES.iter().enumerate() {
        let error = database.text(&format!(
            "SELECT last_error FROM {{o}}_dead WHERE destination = 'd{number}'"
        ));
        let error = error.expect("an error");
        let start = format!("blocked address {address} ({family}) of {number}.example");
        assert!(error.starts_with(&start), "{error}");
    }
    end(&relay);
}

#[test]
fn a_url_with_such_an_address_is_an_error_at_start_in_every_spelling() {
    for host in [
        "127.0.0.1",
        "127.0.0.1.",
        "127.1",
        "0x7f.1",
        "0X7F000001",
        "2130706433",
        "0177.0.0.1",
        "%31%32%37.0.0.1",
        "１２７.0.0.1",
        "0",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::FFFF:7f00:1]",
        "[::127.0.0.1]",
        "[2002:7f00:1::]",
        "[64:ff9b::7f00:1]",
        "10.1.2.3",
        "169.254.169.254",
    ] {
        let mut config = Config::default();
        config.public_only = true;
        let url = format!("http://{host}:8080/events");
        config.set("OUTBOX_URL", &url).expect(host);
        let error = HttpDispatcher::new(&config).expect_err(host);
        assert_eq!(error.key(), "OUTBOX_URL", "{host}");
        assert!(error.to_string().contains("blocked address"), "{error}");

        config.url = None;
        config.destinations = vec![destination("billing", &url)];
        let error = HttpDispatcher::new(&config).expect_err(host);
        assert_eq!(error.key(), "destinations.billing.url", "{host}");
        config.destinations[0].internal = Some(true);
        HttpDispatcher::new(&config).expect("internal destinations are allowed");
    }
}

#[test]
fn without_any_setting_only_link_local_and_metadata_addresses_are_refused() {
    for host in [
        "169.254.169.254",
        "0xa9fea9fe",
        "2852039166",
        "0251.0376.0251.0376",
        "169.254.169.254.",
        "[::ffff:169.254.169.254]",
        "[::ffff:a9fe:a9fe]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:a9fe:a9fe::]",
        "[fe80::1]",
        "[fd00:ec2::254]",
    ] {
        let mut config = Config::default();
        let url = format!("http://{host}/latest/meta-data");
        config.destinations = vec![destination("billing", &url)];
        let error = HttpDispatcher::new(&config).expect_err(host);
        assert_eq!(error.key(), "destinations.billing.url", "{host}");
        config.destinations[0].internal = Some(true);
        HttpDispatcher::new(&config).expect("internal destinations are allowed");
    }
    for host in ["127.0.0.1", "[::1]", "10.0.0.1", "192.168.1.1", "[fd00::1]"] {
        let mut config = Config::default();
        config.destinations = vec![destination("billing", &format!("http://{host}/"))];
        HttpDispatcher::new(&config).expect("private addresses are allowed by default");
    }
}

#[test]
fn localhost_is_refused_where_only_public_addresses_are_reached() {
    for host in ["localhost", "LOCALHOST", "localhost."] {
        let database = Database::new();
        let receiver = Receiver::ok();
        let mut config = public_only(&database);
        let url = format!("http://{host}:{}/", receiver.address.port());
        config.set("OUTBOX_URL", &url).expect("a URL");
        let relay = Relay::from_config(config).start().expect("a relay");
        database.enqueue("order.paid", json!(1));
        eventually("the message is dead-lettered", || {
            database.count("dead") == 1
        });
        let error = last_error(&database);
        assert!(error.contains("(loopback) of localhost"), "{error}");
        assert_eq!(database.number("SELECT attempts FROM {o}_dead"), 3);
        assert_eq!(receiver.count(), 0);
        end(&relay);
    }
}

#[test]
fn a_metadata_name_is_refused_without_any_setting() {
    let database = Database::new();
    let mut config = config(&database);
    config
        .set("OUTBOX_URL", "http://metadata.example/")
        .expect("a URL");
    let relay = relay_with(config, |_, port| {
        Ok(vec![([169, 254, 169, 254], port).into()])
    });
    database.enqueue("order.paid", json!(1));
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    let error = last_error(&database);
    assert!(
        error.contains("internal = true"),
        "the error names the setting: {error}"
    );
    end(&relay);
}

#[test]
fn allowed_networks_and_internal_destinations_are_reached() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut config = public_only(&database);
    let mut allowed = destination("allowed", &receiver.url());
    let networks = ["10.0.0.0/8", "127.0.0.0/8"];
    allowed.allow = networks
        .map(|net| net.parse::<IpNet>().expect("a network"))
        .to_vec();
    let mut internal = destination("internal", &receiver.url());
    internal.internal = Some(true);
    config.destinations = vec![allowed, internal];
    let relay = Relay::from_config(config).start().expect("a relay");
    for name in ["allowed", "internal"] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, destination) VALUES ('order.paid', '1', '{name}')"
        ));
    }
    eventually("both messages are delivered", || {
        database.count("delivered") == 2
    });
    end(&relay);
}

#[test]
fn an_allow_list_refuses_the_others_and_so_does_internal_false() {
    let receiver = Receiver::ok();
    let mut config = Config::default();
    config.destinations = vec![destination("billing", &receiver.url())];
    HttpDispatcher::new(&config).expect("allowed without a list");
    config.destinations[0].internal = Some(false);
    HttpDispatcher::new(&config).expect_err("the address is not public");
    config.destinations[0].internal = None;
    config.destinations[0].allow = vec!["10.0.0.0/8".parse().expect("a network")];
    HttpDispatcher::new(&config).expect_err("the address is outside the list");
}

#[test]
fn of_several_addresses_only_the_good_ones_are_dialled() {
    let database = Database::new();
    let good = Receiver::ok();
    let mut config = public_only(&database);
    let url = format!("http://both.example:{}/", good.address.port());
    let mut both = destination("both", &url);
    both.allow = vec!["127.0.0.1/32".parse().expect("a network")];
    config.destinations = vec![both];
    config.routes = vec![diesel_outbox::Route::new("*", "both")];
    // A listener on the bad address: a connection to it would succeed and be seen.
    let bad = std::net::TcpListener::bind(("127.0.0.2", good.address.port())).expect("a port");
    bad.set_nonblocking(true).expect("a listener");
    let relay = relay_with(config, |_, port| {
        let bad = SocketAddr::from(([127, 0, 0, 2], port));
        Ok(vec![bad, ([127, 0, 0, 1], port).into(), bad])
    });
    database.enqueue("order.paid", json!(1));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    let accepted = bad.accept().expect_err("no connection");
    assert_eq!(accepted.kind(), io::ErrorKind::WouldBlock);
    end(&relay);
}

/// DNS rebinding: a name resolves to a good address when it is checked, and to another address the next time. The
/// relay resolves the name only once.
#[test]
fn the_judged_address_is_dialled() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut config = public_only(&database);
    let url = format!("http://rebound.example:{}/", receiver.address.port());
    let mut rebound = destination("rebound", &url);
    rebound.allow = vec!["127.0.0.1/32".parse().expect("a network")];
    config.destinations = vec![rebound];
    config.routes = vec![diesel_outbox::Route::new("*", "rebound")];
    let lookups = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&lookups);
    let relay = relay_with(config, move |_, port| {
        let last = match counted.fetch_add(1, Ordering::Relaxed) {
            0 => 1,
            _ => 2,
        };
        Ok(vec![([127, 0, 0, last], port).into()])
    });
    database.enqueue("order.paid", json!(1));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(lookups.load(Ordering::Relaxed), 1);
    assert_eq!(receiver.count(), 1);
    end(&relay);
}

#[test]
fn a_redirect_to_an_internal_address_is_not_even_looked_up() {
    let database = Database::new();
    let internal = Receiver::ok();
    let port = internal.address.port();
    let outside = Receiver::start(move |request, stream| {
        let location = match request.json()["to"].as_str() {
            Some("name") => format!("http://internal.example:{port}/"),
            _ => format!("http://127.0.0.1:{port}/"),
        };
        io::Write::write_all(
            stream,
            format!("HTTP/1.1 307 Elsewhere\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n")
                .as_bytes(),
        )
    });
    let mut config = config(&database);
    let url = format!("http://outside.example:{}/", outside.address.port());
    config.set("OUTBOX_URL", &url).expect("a URL");
    let asked = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&asked);
    let relay = relay_with(config, move |host, port| {
        notes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(host.to_owned());
        Ok(vec![([127, 0, 0, 1], port).into()])
    });
    database.enqueue("order.paid", json!({ "to": "name" }));
    database.enqueue("order.paid", json!({ "to": "address" }));
    eventually("both messages are dead-lettered", || {
        database.count("dead") == 2
    });
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_dead WHERE reason = 'REDIRECT'"),
        2
    );
    assert_eq!(internal.count(), 0, "the redirect was followed");
    let asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(
        asked.iter().all(|host| host == "outside.example"),
        "{asked:?}"
    );
    drop(asked);
    end(&relay);
}

#[test]
fn a_name_that_is_away_for_a_while_costs_attempts_and_no_message() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut config = config(&database);
    config.set("OUTBOX_MAX_ATTEMPTS", "50").expect("a number");
    config
        .set("OUTBOX_URL", "http://moving.example/")
        .expect("a URL");
    let address = receiver.address;
    let lookups = AtomicUsize::new(0);
    // A lookup may return another port than the URL's.
    let relay = relay_with(config, move |_, _| {
        match lookups.fetch_add(1, Ordering::Relaxed) {
            0 => Err(io::Error::other("the name server is away")),
            _ => Ok(vec![address]),
        }
    });
    database.enqueue("order.paid", json!(1));
    eventually("the message waits for its next attempt", || {
        database.number("SELECT count(*) FROM {o} WHERE last_error LIKE '%is away'") == 1
    });
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(
        receiver.requests()[0].header("host"),
        Some("moving.example")
    );
    end(&relay);
}

/// R50: a resolver that answers with `0.0.0.0` or a private address for a while decides about no message.
#[test]
fn a_name_that_leads_inside_for_a_while_costs_attempts_and_no_message() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut config = public_only(&database);
    config
        .set("OUTBOX_MAX_ATTEMPTS", "100000")
        .expect("a number");
    let mut moving = destination("moving", "http://moving.example/");
    let network: IpNet = "127.0.0.0/8".parse().expect("a network");
    moving.allow = vec![network];
    config.destinations.push(moving);
    config.routes.push(diesel_outbox::Route::new("*", "moving"));
    let address = Arc::new(Mutex::new(SocketAddr::from(([0, 0, 0, 0], 80))));
    let leads_to = Arc::clone(&address);
    let relay = relay_with(config, move |_, _| {
        Ok(vec![
            *leads_to.lock().unwrap_or_else(PoisonError::into_inner),
        ])
    });
    for n in 0..20 {
        database.enqueue("order.paid", json!(n));
    }
    eventually(
        "each message was refused more often than it takes to give up",
        || {
            database.number(
            "SELECT count(*) FROM {o} WHERE attempts > 8 AND last_error_code = 'BLOCKED_ADDRESS'",
        ) == 20
        },
    );
    assert_eq!((database.count("dead"), receiver.count()), (0, 0));
    *address.lock().unwrap_or_else(PoisonError::into_inner) = receiver.address;
    eventually("all messages are delivered", || {
        database.count("delivered") == 20
    });
    end(&relay);
}
