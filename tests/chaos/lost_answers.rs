//! A statement commits, but the connection breaks before the client receives the server's answer.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use url::Url;

use crate::ground::{
    all_are_delivered, all_have_arrived, alone, attempts, duplicates, enqueue, lines_with, relay,
};
use crate::support::{Database, Receiver, Running, eventually};

/// Text that is in every claim and in no other statement.
pub(crate) const CLAIM: &str =
    "SET \"locked_by\" = $1, \"locked_at\" = pg_catalog.clock_timestamp()";
/// Text of the statement that settles deliveries.
const DELIVERED: &str = "g.tenant_id, 'delivered'";
/// Text of the statement that settles failed attempts.
const RETRY: &str = "expires_at = least(o.expires_at, o.available_at";
/// Text of the statement that releases unsent messages.
const RELEASE: &str = "SET \"locked_by\" = $1, \"locked_at\" = $2";

/// A proxy between a relay and PostgreSQL that loses the answer to one statement, or resets all connections.
pub(crate) struct Proxy {
    address: SocketAddr,
    state: Arc<ProxyState>,
}

#[derive(Default)]
struct ProxyState {
    /// The proxy loses the answer to the next statement that contains this text and changes something.
    victim: Mutex<Option<&'static str>>,
    lost: AtomicUsize,
    /// The silence before the connection breaks.
    silence: Mutex<Duration>,
    /// While set, the proxy closes every connection at once.
    is_cut_off: AtomicBool,
    links: Mutex<Vec<Weak<Link>>>,
}

impl Proxy {
    pub(crate) fn new(database: &Database) -> Self {
        let url = Url::parse(&database.url).expect("DATABASE_URL is a URL");
        let host = url.host_str().expect("DATABASE_URL has a host").to_owned();
        let port = url.port().unwrap_or(5432);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(ProxyState::default());
        let shared = Arc::clone(&state);
        // The thread and its connections end with the process.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect((host.as_str(), port)) else {
                    continue;
                };
                if !shared.is_cut_off.load(Ordering::Acquire) {
                    Link::start(&shared, client, server);
                }
            }
        });
        Self { address, state }
    }

    pub(crate) fn lose_the_answer_to(&self, statement: &'static str) {
        *self.state.victim() = Some(statement);
    }

    /// Resets all connections and refuses new ones.
    pub(crate) fn cut_off(&self) {
        self.state.is_cut_off.store(true, Ordering::Release);
        let links = self.state.links.lock().expect("no panic");
        for link in links.iter().filter_map(Weak::upgrade) {
            link.end();
        }
    }

    pub(crate) fn restore(&self) {
        self.state.is_cut_off.store(false, Ordering::Release);
    }

    pub(crate) fn lost(&self) -> usize {
        self.state.lost.load(Ordering::Acquire)
    }

    /// Leads the command through this proxy.
    pub(crate) fn between(&self, database: &Database, mut command: Command) -> Command {
        command.env("DATABASE_URL", self.url(database));
        command
    }

    /// The URL of the database through this proxy.
    pub(crate) fn url(&self, database: &Database) -> String {
        let mut url = Url::parse(&database.url).expect("DATABASE_URL is a URL");
        url.set_ip_host(self.address.ip())
            .expect("a URL with a host");
        url.set_port(Some(self.address.port()))
            .expect("a URL with a port");
        url.query_pairs_mut().append_pair("sslmode", "disable");
        url.into()
    }
}

impl ProxyState {
    fn victim(&self) -> MutexGuard<'_, Option<&'static str>> {
        self.victim.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection through the proxy.
struct Link {
    proxy: Arc<ProxyState>,
    client: TcpStream,
    server: TcpStream,
    /// While set, the proxy inspects answers before it forwards them.
    is_held: AtomicBool,
}

impl Link {
    fn start(proxy: &Arc<ProxyState>, client: TcpStream, server: TcpStream) {
        let link = Arc::new(Self {
            proxy: Arc::clone(proxy),
            client,
            server,
            is_held: AtomicBool::new(false),
        });
        let mut links = proxy.links.lock().expect("no panic");
        links.push(Arc::downgrade(&link));
        drop(links);
        let other = Arc::clone(&link);
        std::thread::spawn(move || {
            let _ = other.statements();
            other.end();
        });
        std::thread::spawn(move || {
            let _ = link.answers();
            link.end();
        });
    }

    fn end(&self) {
        // Either side may already be closed.
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }

    /// Diesel sends an uncached statement, its parameters and the request to execute it together. It sends the text
    /// of a cached statement once, and only its name from then on.
    fn statements(&self) -> std::io::Result<()> {
        let mut buffer = vec![0; 1 << 20];
        let mut kept: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
        loop {
            let length = (&self.client).read(&mut buffer)?;
            if length == 0 {
                return Ok(());
            }
            let message = &buffer[..length];
            let text = match message[0] {
                b'P' if name(message, 0).is_empty() => Some(message),
                b'P' => {
                    kept.insert(name(message, 0).to_vec(), message.to_vec());
                    None
                }
                // The statement's name follows the name of a portal.
                b'B' => kept.get(name(message, 1)).map(Vec::as_slice),
                _ => None,
            };
            let victim = *self.proxy.victim();
            let is_victim =
                |text: &[u8]| victim.is_some_and(|victim| contains(text, victim.as_bytes()));
            if text.is_some_and(is_victim) {
                self.is_held.store(true, Ordering::Release);
            }
            (&self.server).write_all(message)?;
        }
    }

    /// Loses the answer to a statement that has committed, alone or with its transaction.
    fn answers(&self) -> std::io::Result<()> {
        /// `ReadyForQuery`, without its last byte, which tells whether a transaction is open.
        const READY: &[u8] = b"Z\0\0\0\x05";
        let mut buffer = vec![0; 1 << 20];
        let mut kept = Vec::new();
        let mut has_worked = false;
        loop {
            let length = (&self.server).read(&mut buffer)?;
            if length == 0 {
                return Ok(());
            }
            if !self.is_held.load(Ordering::Acquire) {
                (&self.client).write_all(&buffer[..length])?;
                continue;
            }
            kept.extend_from_slice(&buffer[..length]);
            let Some((status, answer)) = kept.split_last() else {
                continue;
            };
            if !answer.ends_with(READY) {
                continue;
            }
            has_worked |= has_rows(&kept);
            let is_committed = *status == b'I';
            if is_committed && has_worked && self.proxy.victim().take().is_some() {
                self.proxy.lost.fetch_add(1, Ordering::AcqRel);
                let silence = *self.proxy.silence.lock().expect("no panic");
                std::thread::sleep(silence);
                return Ok(());
            }
            if is_committed || !has_worked {
                // Reset before the client receives the answer and sends the next statement.
                self.is_held.store(false, Ordering::Release);
                has_worked = false;
            }
            (&self.client).write_all(&kept)?;
            kept.clear();
        }
    }
}

/// The n-th name at the start of a message.
fn name(message: &[u8], n: usize) -> &[u8] {
    let names = message.get(5..).unwrap_or_default();
    names.split(|byte| *byte == 0).nth(n).unwrap_or_default()
}

/// Whether a `DataRow` is among the messages.
fn has_rows(mut messages: &[u8]) -> bool {
    while let [kind, a, b, c, d, ..] = *messages {
        if kind == b'D' {
            return true;
        }
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        messages = messages.get(1 + length..).unwrap_or_default();
    }
    false
}

fn contains(message: &[u8], text: &[u8]) -> bool {
    message.windows(text.len()).any(|window| window == text)
}

#[test]
fn a_claim_whose_answer_was_lost_strands_no_message() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    let proxy = Proxy::new(&database);
    let mut relay = Running::start(proxy.between(&database, relay(&database, &receiver, &[])));
    relay.wait_for_log("event=relay_started");
    proxy.lose_the_answer_to(CLAIM);
    enqueue(&database, 1, 20);
    eventually("an answer is lost", || proxy.lost() == 1);
    eventually("all messages are settled", || {
        database.count("delivered") == 20
    });
    // A shutdown before the claim is undone would leave the lease behind.
    relay.wait_for_log("event=claim_undone");
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    all_are_delivered(&database, 20);
    all_have_arrived(&database, &[&receiver]);
    assert_eq!(duplicates(&[&receiver]), 0);
    assert!(attempts(&database).values().all(|made| *made == 1));
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

#[test]
fn a_claim_whose_answer_was_lost_before_a_shutdown_strands_no_message() {
    let _alone = alone();
    let database = Database::new();
    let (held, gate) = Receiver::held();
    let quick = Receiver::ok();
    let proxy = Proxy::new(&database);
    let settings = [("OUTBOX_LEASE", "60s")];
    // The other relay's janitor has already checked for abandoned leases and will not check again soon. The relay is
    // stopped until the first relay has ended.
    let mut other = Running::start(relay(&database, &quick, &settings));
    eventually("the other relay has polled", || {
        database.number(
            "SELECT count(*) FROM pg_stat_activity
              WHERE application_name IN ('diesel-outbox janitor', 'diesel-outbox claimer')
                AND state = 'idle'",
        ) == 2
    });
    other.stop();

    let mut first = Running::start(proxy.between(
        &database,
        relay(
            &database,
            &held,
            &[
                ("OUTBOX_BATCH", "4"),
                ("OUTBOX_CONCURRENCY", "1"),
                ("OUTBOX_LEASE", "4s"),
                ("OUTBOX_SEND_TIMEOUT", "1500ms"),
            ],
        ),
    ));
    first.wait_for_log("event=relay_started");
    enqueue(&database, 1, 1);
    held.wait_for(1);
    proxy.lose_the_answer_to(CLAIM);
    enqueue(&database, 2, 5);
    eventually("an answer is lost", || proxy.lost() == 1);
    first.signal("TERM");
    first.wait_for_log("event=signal");
    gate.open();
    let code = first.wait().code();
    assert_eq!(code, Some(0), "{}", first.log());
    other.signal("CONT");
    eventually("the other relay delivers the rest", || {
        database.count("delivered") == 5
    });
    other.signal("TERM");
    assert_eq!(other.wait().code(), Some(0), "{}", other.log());
    all_are_delivered(&database, 5);
    all_have_arrived(&database, &[&held, &quick]);
}

#[test]
fn a_delivery_whose_settle_was_not_answered_is_settled_once_and_not_sent_again() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    let proxy = Proxy::new(&database);
    let mut relay = Running::start(proxy.between(&database, relay(&database, &receiver, &[])));
    relay.wait_for_log("event=relay_started");
    proxy.lose_the_answer_to(DELIVERED);
    enqueue(&database, 1, 50);
    eventually("an answer is lost", || proxy.lost() == 1);
    eventually("all messages are settled", || {
        database.count("delivered") == 50
    });
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    assert_eq!(lines_with(&relay, "event=conflict"), 0, "{}", relay.log());
    all_are_delivered(&database, 50);
    all_have_arrived(&database, &[&receiver]);
    assert_eq!(duplicates(&[&receiver]), 0);
    assert!(attempts(&database).values().all(|made| *made == 1));
}

#[test]
fn a_failed_attempt_whose_settle_was_not_answered_is_counted_once() {
    let _alone = alone();
    let database = Database::new();
    // The first attempt fails. The second takes so long that a repeated settle of the first would arrive in the
    // middle of it.
    let receiver = Receiver::start(|request, stream| {
        if request.header("outbox-attempt") == Some("1") {
            return stream.write_all(&crate::support::status(500));
        }
        std::thread::sleep(Duration::from_millis(500));
        stream.write_all(&crate::support::status(200))
    });
    let proxy = Proxy::new(&database);
    let settings = [
        ("OUTBOX_BACKOFF", "1ms"),
        ("OUTBOX_POLL_INTERVAL", "5ms"),
        ("OUTBOX_CONCURRENCY", "4"),
    ];
    let mut relay =
        Running::start(proxy.between(&database, relay(&database, &receiver, &settings)));
    relay.wait_for_log("event=relay_started");
    proxy.lose_the_answer_to(RETRY);
    enqueue(&database, 1, 4);
    eventually("an answer is lost", || proxy.lost() == 1);
    eventually("all messages are settled", || {
        database.count("delivered") == 4
    });
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    all_are_delivered(&database, 4);
    let attempts = attempts(&database);
    assert!(attempts.values().all(|made| *made == 2), "{attempts:?}");
    let arrivals = receiver.arrivals();
    assert!(arrivals.values().all(|times| *times == 2), "{arrivals:?}");
}

#[test]
fn a_release_that_was_not_answered_ends_the_relay_cleanly() {
    let _alone = alone();
    let database = Database::new();
    let (held, gate) = Receiver::held();
    enqueue(&database, 1, 50);
    let proxy = Proxy::new(&database);
    let mut relay = Running::start(proxy.between(
        &database,
        relay(
            &database,
            &held,
            &[
                ("OUTBOX_CONCURRENCY", "4"),
                ("OUTBOX_LEASE", "60s"),
                ("OUTBOX_SEND_TIMEOUT", "20s"),
            ],
        ),
    ));
    held.wait_for(4);
    eventually("all messages are claimed", || {
        database.count("sending") == 50
    });
    proxy.lose_the_answer_to(RELEASE);
    relay.signal("TERM");
    relay.wait_for_log("event=signal");
    gate.open();
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    assert_eq!(proxy.lost(), 1);
    let sent = i64::try_from(held.count()).expect("a small number");
    assert_eq!(database.count("delivered"), sent);
    assert_eq!(database.count("pending"), 50 - sent);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
    assert_eq!(lines_with(&relay, "event=conflict"), 0, "{}", relay.log());
}

#[test]
fn a_release_without_an_answer_does_not_free_messages_claimed_again() {
    let _alone = alone();
    let database = Database::new();
    let is_first = AtomicBool::new(true);
    // The receiver asks the relay to back off for a second. The later sends take longer than the proxy's silence.
    let receiver = Receiver::start(move |_, stream| {
        if is_first.swap(false, Ordering::SeqCst) {
            return stream
                .write_all(b"HTTP/1.1 429 Slow\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n");
        }
        std::thread::sleep(Duration::from_secs(4));
        stream.write_all(&crate::support::status(200))
    });
    let proxy = Proxy::new(&database);
    let settings = [
        ("OUTBOX_POLL_INTERVAL", "20ms"),
        ("OUTBOX_CONCURRENCY", "8"),
        ("OUTBOX_SEND_TIMEOUT", "10s"),
        ("OUTBOX_LEASE", "60s"),
    ];
    *proxy.state.silence.lock().expect("no panic") = Duration::from_secs(3);
    enqueue(&database, 1, 4);
    proxy.lose_the_answer_to(RELEASE);
    let mut relay =
        Running::start(proxy.between(&database, relay(&database, &receiver, &settings)));
    eventually("an answer is lost", || proxy.lost() == 1);
    eventually("all messages are settled", || {
        database.count("delivered") == 4
    });
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    let mut arrivals: Vec<usize> = receiver.arrivals().into_values().collect();
    arrivals.sort_unstable();
    assert_eq!(
        arrivals,
        [1, 1, 1, 2],
        "one message was asked to wait, each other message was sent once"
    );
}
