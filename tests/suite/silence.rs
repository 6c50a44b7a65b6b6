//! Connections to PostgreSQL that stay open and lead nowhere: behind a proxy that swallows all, or because the server
//! hangs. New connections work. Keep-alive notices nothing: the proxy's machine acknowledges every packet.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;
use url::Url;

use crate::databases::File;
use crate::fresh::FreshDatabase;
use crate::page::Page;
use crate::support::{Database, Receiver, Running, eventually};

/// A wait that is no wait for the database.
const SOON: Duration = Duration::from_secs(10);

/// A proxy in front of PostgreSQL whose connections can fall silent.
struct Proxy {
    address: SocketAddr,
    links: Arc<Mutex<Vec<Arc<Mutex<Link>>>>>,
}

/// A connection through the proxy.
#[derive(Default)]
struct Link {
    is_silenced: bool,
    /// A question, or a transaction, has no end yet. It comes to its end before the silence: the server would close a
    /// session in a transaction that hears nothing more, and the silence would be over.
    is_busy: bool,
    /// A question or an answer was swallowed.
    is_waited_for: bool,
}

impl Link {
    /// Whether what a client (or else the server) says is passed on.
    fn passes(&mut self, is_client: bool, ends: bool) -> bool {
        if self.is_silenced && !self.is_busy {
            self.is_waited_for = true;
            return false;
        }
        self.is_busy = is_client || (self.is_busy && !ends);
        true
    }
}

impl Proxy {
    fn new(url: &str) -> Self {
        let url = Url::parse(url).expect("a URL");
        let host = url.host_str().expect("a host").to_owned();
        let port = url.port().unwrap_or(5432);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let links = Arc::new(Mutex::new(Vec::new()));
        let proxy = Self { address, links };
        let links = Arc::clone(&proxy.links);
        // The threads end with the process.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect((host.as_str(), port)) else {
                    continue;
                };
                let link = Arc::<Mutex<Link>>::default();
                lock(&links).push(Arc::clone(&link));
                let (to_client, to_server) = (again(&client), again(&server));
                let of_answers = Arc::clone(&link);
                std::thread::spawn(move || {
                    pass(client, to_server, &link, true);
                });
                std::thread::spawn(move || {
                    pass(server, to_client, &of_answers, false);
                });
            }
        });
        proxy
    }

    /// The URL of the database through the proxy.
    fn url(&self, of: &str) -> String {
        let mut url = Url::parse(of).expect("a URL");
        url.set_ip_host(self.address.ip()).expect("a host");
        url.set_port(Some(self.address.port())).expect("a port");
        url.query_pairs_mut().append_pair("sslmode", "disable");
        url.into()
    }

    fn between(&self, database: &Database, mut command: Command) -> Command {
        command.env("DATABASE_URL", self.url(&database.url));
        command
    }

    /// Every connection that is open now is silent from now on, or from the end of its transaction.
    fn silence(&self) {
        for link in lock(&self.links).iter() {
            lock(link).is_silenced = true;
        }
    }

    /// Waits until so many connections, of all that were silenced, have swallowed something.
    fn wait_for_waits(&self, count: usize) {
        let waits = |link: &&Arc<Mutex<Link>>| lock(link).is_waited_for;
        eventually("clients wait for an answer", || {
            lock(&self.links).iter().filter(waits).count() >= count
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn again(stream: &TcpStream) -> TcpStream {
    stream.try_clone().expect("a descriptor")
}

/// The server's word that it waits for a question, outside of a transaction: `ReadyForQuery`, at the end of an answer.
const READY: &[u8] = b"Z\0\0\0\x05I";

/// Passes everything on, or swallows it, until one side closes.
fn pass(mut from: TcpStream, mut to: TcpStream, link: &Mutex<Link>, is_client: bool) {
    let mut buffer = vec![0; 1 << 16];
    let mut last = Vec::new();
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        let said = &buffer[..length];
        last.extend_from_slice(&said[length.saturating_sub(READY.len())..]);
        last.drain(..last.len().saturating_sub(READY.len()));
        let passes = lock(link).passes(is_client, last == READY);
        if passes && to.write_all(said).is_err() {
            break;
        }
    }
    // Either side may already be closed.
    let _ = from.shutdown(std::net::Shutdown::Both);
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// A command whose output is in its log.
fn shown(database: &Database, proxy: &Proxy, arguments: &[&str]) -> Running {
    let binary = proxy.between(database, database.binary(&[]));
    let mut command = Command::new("sh");
    command.args(["-c", r#"exec "$0" "$@" >&2"#]);
    command.arg(binary.get_program()).args(arguments);
    let set = binary.get_envs();
    command.envs(set.filter_map(|(name, value)| Some((name, value?))));
    Running::start(command)
}

/// A relay that has delivered a message, and whose connections lead nowhere since.
fn silenced(setting: (&str, &str)) -> (Database, Receiver, Proxy, Running) {
    let (database, receiver) = (Database::new(), Receiver::ok());
    let proxy = Proxy::new(&database.url);
    let mut command = proxy.between(&database, database.binary(&["run"]));
    command.env("OUTBOX_URL", receiver.url());
    command.env(setting.0, setting.1);
    let process = Running::start(command);
    database.enqueue("order.paid", json!(1));
    eventually("it is settled", || database.count("delivered") == 1);
    proxy.silence();
    (database, receiver, proxy, process)
}

/// Nothing restarts the relay, and no probe looks.
#[test]
fn a_relay_whose_connections_lead_nowhere_opens_others_and_continues() {
    let (database, receiver, _proxy, mut process) = silenced(("RUST_LOG", "diesel_outbox=info"));
    database.enqueue("order.paid", json!(2));
    process.wait_for_log("event=db_error");
    let log = process.log();
    assert!(log.contains("answer within"), "{log}");
    receiver.wait_for(2);
    eventually("it is settled", || database.count("delivered") == 2);
    process.wait_for_log("the database is back");
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
}

/// Threads that still wait for an answer are not back: the heartbeat, whose limit is short, says nothing for the claimer.
#[test]
fn the_database_is_not_back_while_a_thread_waits_for_its_answer() {
    let (database, _receiver, _proxy, mut process) = silenced(("RUST_LOG", "diesel_outbox=debug"));
    database.enqueue("order.paid", json!(2));
    let (of_heartbeat, of_claimer) = ("in the heartbeat thread", "in the claimer thread");
    process.wait_for_log(of_claimer);
    let log = process.log();
    let (before, _) = log.split_once(of_claimer).expect("the log says so");
    assert!(before.contains(of_heartbeat), "{before}");
    assert!(!before.contains("the database is back"), "{before}");
    process.wait_for_log("the database is back");
    process.signal("TERM");
    process.wait();
}

#[test]
fn a_shutdown_does_not_wait_for_connections_that_lead_nowhere() {
    let (_database, _receiver, proxy, mut process) = silenced(("OUTBOX_SHUTDOWN_TIMEOUT", "3s"));
    proxy.wait_for_waits(2);
    let began = Instant::now();
    process.signal("TERM");
    process.wait();
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

#[test]
fn a_drain_whose_connections_lead_nowhere_ends_with_all_delivered() {
    let (database, (receiver, gate)) = (Database::new(), Receiver::held());
    let proxy = Proxy::new(&database.url);
    database.enqueue_many(3);
    let mut command = proxy.between(&database, database.binary(&["drain", "--quiet"]));
    command.env("OUTBOX_URL", receiver.url());
    let mut process = Running::start(command);
    receiver.wait_for(1);
    proxy.silence();
    gate.open();
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
    assert_eq!(database.count("delivered"), 3);
}

#[test]
fn tail_says_that_it_tries_again_and_follows_on() {
    let (database, receiver) = (Database::new(), Receiver::ok());
    let proxy = Proxy::new(&database.url);
    let relay = database.relay().url(&receiver.url());
    let relay = relay.start().expect("a relay");
    let mut tail = shown(&database, &proxy, &["tail"]);
    tail.wait_for_log("following the ledger of ");
    proxy.silence();
    tail.wait_for_log("trying again: no answer within 20 s");
    database.enqueue("order.paid", json!(1));
    tail.wait_for_log("order.paid");
    proxy.silence();
    proxy.wait_for_waits(2);
    let began = Instant::now();
    tail.signal("INT");
    assert_eq!(tail.wait().code(), Some(0), "{}", tail.log());
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    crate::support::end(&relay);
}

#[test]
fn a_watched_status_says_that_it_tries_again_and_continues() {
    let database = Database::new();
    let proxy = Proxy::new(&database.url);
    let mut watch = shown(&database, &proxy, &["status", "--watch=0.1"]);
    watch.wait_for_log("pending 0");
    proxy.silence();
    watch.wait_for_log("trying again: no answer within 20 s");
    database.enqueue("order.paid", json!(1));
    watch.wait_for_log("pending 1");
    proxy.silence();
    proxy.wait_for_waits(2);
    let began = Instant::now();
    watch.signal("INT");
    assert_eq!(watch.wait().code(), Some(0), "{}", watch.log());
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

#[test]
fn one_of_many_databases_whose_connection_leads_nowhere_is_served_again() {
    let database = FreshDatabase::new();
    let outbox = diesel_outbox::Outbox::default();
    diesel_outbox::migrate(&mut database.connect(), outbox.name()).expect("migrated");
    let receiver = Receiver::ok();
    let proxy = Proxy::new(&database.url);
    let file = File::of(&[("shop", &proxy.url(&database.url))]);
    let mut process = Running::start(file.run(&receiver, &[]));
    let watched = "SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND query !~ '^(SET.*)?$'
                      AND application_name = 'diesel-outbox databases'";
    // The first look closes its connection for a first relay.
    process.wait_for_log("event=relay_stopped");
    eventually("the database is watched", || database.number(watched) == 1);

    proxy.silence();
    process.wait_for_log("event=database_failed");
    let log = process.log();
    assert!(log.contains("no answer within 10 s"), "{log}");
    let message = "INSERT INTO outbox (topic, payload) VALUES ('t', '1')";
    database.execute(message);
    receiver.wait_for(1);
    process.wait_for_log("event=database_recovered");
    let settled = "SELECT count(*) FROM outbox_messages WHERE status = 'delivered'";
    eventually("it is settled", || database.number(settled) == 1);
    eventually("its relay has ended", || database.number(watched) == 1);

    proxy.silence();
    proxy.wait_for_waits(2);
    let began = Instant::now();
    process.signal("TERM");
    process.wait();
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

#[test]
fn a_page_takes_another_connection_if_its_own_lead_nowhere_or_are_closed() {
    let database = Database::new();
    let proxy = Proxy::new(&database.url);
    let page = Page::start(proxy.between(&database, database.binary(&["admin"])));
    let looks = || {
        let began = Instant::now();
        let answer = page.get("/messages");
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    };
    // More often than there are connections.
    (0..8).for_each(|_| looks());
    proxy.silence();
    (0..8).for_each(|_| looks());
    // As a restart of the server does.
    database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
          WHERE application_name LIKE 'diesel-outbox admin%'",
    );
    (0..8).for_each(|_| looks());
}
