//! Situations that once kept messages forever, or kept the relay busy for nothing.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::{Destination, Relay};
use serde_json::json;

use crate::support::{
    Database, Gate, PATIENCE, Receiver, Running, end, eventually, finish, status,
};

/// PostgreSQL behind a connection that delays each direction by `one_way`.
fn far_away(database_url: &str, one_way: Duration) -> String {
    let mut url = url::Url::parse(database_url).expect("a URL");
    let host = url.host_str().expect("a host").to_owned();
    let port = url.port().unwrap_or(5432);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let server = TcpStream::connect((host.as_str(), port)).expect("PostgreSQL is there");
            let again = |stream: &TcpStream| stream.try_clone().expect("a socket");
            for (from, to) in [(again(&client), again(&server)), (server, client)] {
                std::thread::spawn(move || delay(from, to, one_way));
            }
        }
    });
    url.set_ip_host(address.ip()).expect("a host");
    url.set_port(Some(address.port())).expect("a port");
    url.query_pairs_mut().append_pair("sslmode", "disable");
    url.to_string()
}

/// Forwards bytes with the delay, until either side closes.
fn delay(mut from: TcpStream, mut to: TcpStream, one_way: Duration) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        // The simulated distance.
        std::thread::sleep(one_way);
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

#[test]
fn a_look_at_many_topics_that_takes_longer_than_a_survey_is_good_for_comes_to_its_end() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.execute(
        "INSERT INTO {o} (topic, payload, available_at)
         SELECT 'tenant-' || n, '1', now() + interval '1 h' FROM generate_series(1, 2000) n",
    );
    database.execute("ANALYZE {o}");
    database.enqueue("order.paid", json!(1));
    let relay = Relay::builder(far_away(&database.url, Duration::from_millis(8)))
        .outbox(&database.name())
        .url(&receiver.url())
        .start()
        .expect("a relay");
    assert!(relay.wait_until_idle(PATIENCE));
    assert_eq!(database.count("delivered"), 1);
    end(&relay);
}

#[test]
fn a_drain_beside_many_topics_that_wait_ends() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.execute(
        "INSERT INTO {o} (topic, payload, available_at)
         SELECT 'tenant-' || n, '1', now() + interval '1 h' FROM generate_series(1, 5000) n",
    );
    database.execute("ANALYZE {o}");
    database.enqueue("order.paid", json!(1));
    let mut command = database.binary(&["drain", "--quiet"]);
    command.env("OUTBOX_URL", receiver.url());
    let mut drain = Running::start(command);
    assert_eq!(drain.wait().code(), Some(0), "{}", drain.log());
    assert_eq!(database.count("delivered"), 1);
}

#[test]
fn a_drain_tries_a_destination_whose_breaker_has_been_open_for_long_enough() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.enqueue("order.paid", json!(1));
    database.execute(
        "INSERT INTO {o}_pause (kind, name, reason, openings, paused_until)
         VALUES ('destination', 'default', 'BREAKER_OPEN', 3, clock_timestamp() - interval '9 s')",
    );
    let mut command = database.binary(&["drain", "--quiet"]);
    command.env("OUTBOX_URL", receiver.url());
    let mut drain = Running::start(command);
    assert_eq!(drain.wait().code(), Some(0), "{}", drain.log());
    assert_eq!(database.count("delivered"), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}_pause"), 0);
}

#[test]
fn a_drain_says_what_it_leaves_behind_a_pause() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 410);
    database.enqueue_many(3);
    let drain = |arguments: &[&str]| {
        let mut command = database.binary(arguments);
        command.env("OUTBOX_URL", receiver.url());
        finish(command)
    };
    drain(&["drain", "--quiet"]).code(1);
    let left = drain(&["drain", "--json"]).code(0).json();
    assert_eq!(left["processed"], 0);
    assert_eq!(left["pauses"][0]["reason"], "GONE");
    let due = left["left_due"].as_u64().expect("a number");
    assert!((2..=3).contains(&due), "{due}");
    let text = drain(&["drain", "--quiet"]).code(0).stdout;
    for part in [
        "due messages are left",
        "destination default is paused by its receiver: GONE",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_right_to_probe_that_a_drain_did_not_need_is_released() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.execute(
        "INSERT INTO {o}_pause (kind, name, reason, openings, paused_until)
         VALUES ('destination', 'default', 'BREAKER_OPEN', 3, clock_timestamp() - interval '9 s')",
    );
    let mut command = database.binary(&["drain", "--quiet"]);
    command.env("OUTBOX_URL", receiver.url());
    let mut drain = Running::start(command);
    assert_eq!(drain.wait().code(), Some(0), "{}", drain.log());
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_pause WHERE paused_until <= clock_timestamp()"),
        1
    );
}

#[test]
fn a_limited_job_counts_what_is_sent_and_not_what_is_split() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.enqueue_many(5);
    let destination = |name: &str| Destination::new(name, &receiver.url()).expect("a URL");
    let relay = database
        .relay()
        .destination(destination("a"))
        .destination(destination("b"))
        .route_to_each("*", &["a", "b"])
        .limit(3)
        .start()
        .expect("a relay");
    assert!(relay.wait_until_idle(PATIENCE));
    end(&relay);
    assert_eq!(database.count("delivered"), 3);
}

#[test]
fn a_receiver_that_asks_to_wait_for_no_time_parks_nothing() {
    let database = Database::new();
    let left = AtomicUsize::new(20);
    let receiver = Receiver::start(move |_, stream| {
        let is_first = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if is_first.is_ok() {
            return stream
                .write_all(b"HTTP/1.1 429 Slow\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n");
        }
        stream.write_all(&status(200))
    });
    database.enqueue_many(2000);
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 2000
    });
    end(&relay);
    assert_eq!(relay.stats().released, 0);
}

#[test]
fn a_destination_without_a_breaker_passes_over_the_breakers_of_other_relays() {
    let database = Database::new();
    let phase = Arc::new(AtomicUsize::new(0));
    let now = Arc::clone(&phase);
    let receiver = Receiver::start(move |_, stream| match now.load(Ordering::SeqCst) {
        0 => stream.write_all(b"HTTP/1.1 429 Slow\r\nretry-after: 2\r\ncontent-length: 0\r\n\r\n"),
        1 => stream.write_all(&status(500)),
        _ => stream.write_all(&status(200)),
    });
    let mut destination = Destination::new("billing", &receiver.url()).expect("a URL");
    destination.policy.breaker = None;
    database.execute(
        "INSERT INTO {o} (topic, payload) SELECT 'billing', '1' FROM generate_series(1, 10)",
    );
    let relay = database
        .relay()
        .destination(destination)
        .route("billing", "billing")
        .start()
        .expect("a relay");
    eventually("the destination is paused", || {
        database.number("SELECT count(*) FROM {o}_pause") == 1
    });
    phase.store(1, Ordering::SeqCst);
    // Another relay, whose settings have a breaker, opens the breaker.
    database.execute(
        "UPDATE {o}_pause SET reason = 'BREAKER_OPEN', openings = 1,
                paused_until = clock_timestamp() + interval '3 s'",
    );
    receiver.wait_for(2);
    phase.store(2, Ordering::SeqCst);
    eventually("all messages are delivered", || {
        database.count("delivered") == 10
    });
    end(&relay);
}

/// G6.
#[test]
fn messages_of_a_paused_destination_that_the_settings_do_not_have_wait_at_no_cost() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let outbox = database.outbox_name();
    let mut conn = database.connect();
    admin::pause(
        &mut conn,
        &outbox,
        Pausable::Destination,
        "billing",
        "OPERATOR",
        None,
    )
    .expect("SQL works");
    database.execute(
        "INSERT INTO {o} (topic, destination, payload) VALUES ('order.paid', 'billing', '1')",
    );
    let relay = database
        .relay()
        .url(&receiver.url())
        .max_attempts(1)
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually("the other message is delivered", || {
        database.count("delivered") == 1
    });
    assert!(relay.wait_until_idle(PATIENCE));
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE attempts = 0 AND locked_by IS NULL"),
        1
    );
    admin::resume(&mut conn, &outbox, Pausable::Destination, "billing").expect("SQL works");
    assert!(relay.wait_until_idle(PATIENCE));
    eventually(
        "the relay reports that no relay serves the destination",
        || relay.health().to_string().contains("\"billing\""),
    );
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE attempts = 0 AND locked_by IS NULL"),
        1
    );
    end(&relay);
}

#[test]
fn a_pause_that_the_last_send_of_a_shutdown_brings_is_written_down() {
    let database = Database::new();
    let (gate, pass) = Gate::new();
    let receiver = Receiver::start(move |_, stream| {
        pass();
        stream.write_all(&status(410))
    });
    database.enqueue("order.paid", json!(1));
    let relay = database
        .relay()
        .send_timeout(Duration::from_secs(20))
        .lease(Duration::from_secs(60))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    receiver.wait_for(1);
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| end(&relay));
        eventually("the relay is stopping", || !relay.is_healthy());
        gate.open();
        ending.join().expect("a clean shutdown");
    });
    assert_eq!(
        database.text("SELECT reason FROM {o}_pause").as_deref(),
        Some("GONE")
    );
    assert_eq!(database.number("SELECT attempts FROM {o}"), 1);
}
