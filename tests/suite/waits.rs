//! No thread that notices, records or stops waits for somebody outside without a bound: not for the reader of the log,
//! not for a file, not for the application's logger.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use diesel::PgConnection;
use diesel::r2d2::{ConnectionManager, ManageConnection};
use diesel_outbox::{Relay, RelayHandle};
use serde_json::json;

use crate::handle::in_a_process_of_its_own;
use crate::page::Page;
use crate::support::{Database, File, Gate, PATIENCE, Receiver, end, eventually};

// --- The log ------------------------------------------------------------------------------

/// A process whose standard error nobody reads.
struct Unread(Child);

impl Unread {
    fn start(mut command: Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        Self(child.expect("the binary starts"))
    }

    fn ends(&mut self) -> std::process::ExitStatus {
        eventually("the process ends", || {
            self.0.try_wait().expect("our child").is_some()
        });
        self.0.wait().expect("our child")
    }

    fn terminate(&self) {
        let pid = self.0.id().to_string();
        let killed = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(killed.expect("kill runs").success());
    }

    /// Reads from now on, until the process ends: the lines so far, and the thread.
    fn read(&mut self) -> (Arc<Mutex<String>>, std::thread::JoinHandle<()>) {
        let stderr: ChildStderr = self.0.stderr.take().expect("piped");
        let log = Arc::new(Mutex::new(String::new()));
        let read = Arc::clone(&log);
        let reads = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines() {
                let mut read = read.lock().expect("no panic");
                read.push_str(&line.expect("UTF-8"));
                read.push('\n');
            }
        });
        (log, reads)
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A free port, for a process whose log says nothing.
fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

fn get(port: u16, path: &str) -> String {
    let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", port)) else {
        return String::new();
    };
    let request = format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n");
    let mut answer = String::new();
    let sent = stream.write_all(request.as_bytes());
    // The process may end meanwhile.
    let _ = sent.and_then(|()| stream.read_to_string(&mut answer));
    answer
}

/// R30, G6: a pipe holds 64 KiB, and the log of these messages is far longer than the queue, too.
#[test]
fn an_unread_log_holds_up_nothing_and_loses_only_lines() {
    const MESSAGES: usize = 4_000;
    let database = Database::new();
    let receiver = Receiver::ok();
    let port = free_port();
    let mut command = database.binary(&["run"]);
    command
        .env("OUTBOX_URL", receiver.url())
        .env("OUTBOX_CONCURRENCY", "8")
        .env("OUTBOX_ADMIN_ADDR", format!("127.0.0.1:{port}"))
        .env("RUST_LOG", "trace");
    // Each line of the log about a message has the topic.
    let outbox = database.outbox();
    let messages = (0..MESSAGES).map(|n| {
        let topic = format!("order.{}", "x".repeat(240));
        diesel_outbox::NewMessage::new(topic, &n).expect("JSON")
    });
    outbox
        .enqueue_bulk(&mut database.connect(), messages)
        .expect("enqueued");
    let mut relay = Unread::start(command);
    eventually("all messages are delivered", || {
        database.count("delivered") == MESSAGES as i64
    });
    assert_eq!(receiver.count(), MESSAGES, "each was sent once");
    assert!(get(port, "/livez").starts_with("HTTP/1.1 200"));
    let dropped = |text: &str| -> Option<u64> {
        let line = "diesel_outbox_log_lines_dropped_total ";
        let line = text.lines().find_map(|one| one.strip_prefix(line));
        line?.trim().parse().ok()
    };
    let metrics = get(port, "/metrics");
    assert!(dropped(&metrics) > Some(0), "{metrics}");
    let (log, reads) = relay.read();
    // Behind it the queue has room for further lines.
    eventually("the log says what is missing", || {
        log.lock().expect("no panic").contains("event=log_dropped")
    });
    relay.terminate();
    assert_eq!(relay.ends().code(), Some(0));
    reads.join().expect("no panic");
    let log = log.lock().expect("no panic");
    assert!(
        log.contains("event=relay_stopped"),
        "the last lines are written"
    );
}

#[test]
fn a_relay_with_an_unread_log_ends_on_sigterm() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 400);
    let mut command = database.binary(&["run"]);
    command
        .env("OUTBOX_URL", receiver.url())
        .env("RUST_LOG", "trace");
    database.enqueue_many(1_000);
    let mut relay = Unread::start(command);
    eventually("all messages are dead-lettered", || {
        database.count("dead") == 1_000
    });
    relay.terminate();
    assert_eq!(relay.ends().code(), Some(0));
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

// --- Signals ------------------------------------------------------------------------------

/// R47: the file of the settings is a FIFO that nobody writes.
#[test]
fn health_says_that_a_relay_waits_for_its_settings_and_sigterm_ends_it() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let file = File::new(&format!("url = \"{}\"\n", receiver.url()));
    let mut command = database.binary(&["run"]);
    command.env("OUTBOX_CONFIG", file.path());
    let mut page = Page::start(command);
    std::fs::remove_file(file.path()).expect("removed");
    let made = Command::new("mkfifo").arg(file.path()).status();
    assert!(made.expect("mkfifo runs").success());
    page.process.signal("HUP");
    // Returns once the relay has opened the file to read it.
    let writer = std::fs::OpenOptions::new().write(true).open(file.path());
    let writer = writer.expect("a reader");
    eventually("health says that the settings are still being read", || {
        let problems = page.get("/readyz").body;
        problems.contains("reload_failed") && problems.contains("have been read for")
    });
    page.process.signal("TERM");
    assert_eq!(page.process.wait().code(), Some(0));
    drop(writer);
}

/// R47: the shutdown ends both relays of the reload.
#[test]
fn sigterm_during_a_reload_is_obeyed_at_once() {
    let database = Database::new();
    let (held, gate) = Receiver::held();
    let after = Receiver::ok();
    let to = |url: &str| format!("url = \"{url}\"\n");
    let file = File::new(&to(&held.url()));
    let mut command = database.binary(&["run"]);
    command
        .env("OUTBOX_CONFIG", file.path())
        .env("OUTBOX_SEND_TIMEOUT", "60s")
        .env("OUTBOX_LEASE", "120s")
        .env("OUTBOX_SHUTDOWN_TIMEOUT", "60s");
    let mut page = Page::start(command);
    database.enqueue("order.paid", json!({}));
    held.wait_for(1);
    std::fs::write(file.path(), to(&after.url())).expect("written");
    page.process.signal("HUP");
    eventually("the new relay works while the old relay sends", || {
        database.enqueue("order.paid", json!({}));
        after.count() > 0
    });
    page.process.signal("TERM");
    eventually("the relay shuts down", || {
        page.get("/readyz").body.contains("shutting down")
    });
    let at_the_end = after.count();
    database.enqueue_many(50);
    gate.open();
    assert_eq!(page.process.wait().code(), Some(0));
    // One send may have begun before the shutdown.
    assert!(
        after.count() <= at_the_end + 4,
        "messages of later are sent"
    );
    assert_eq!(database.count("sending"), 0);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

/// R47: the relay that is replaced has messages, too.
#[test]
fn a_shutdown_during_a_reload_covers_the_relay_that_is_replaced() {
    let database = Database::new();
    let (held, gate) = Receiver::held();
    let after = Receiver::ok();
    let relay = database.relay().url(&held.url());
    let relay = relay
        .send_timeout(PATIENCE)
        .lease(3 * PATIENCE)
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    held.wait_for(1);
    std::thread::scope(|scope| {
        let next = database.relay().url(&after.url());
        let reload = scope.spawn(|| relay.reload(next, PATIENCE));
        eventually("the new relay works while the old relay sends", || {
            database.enqueue("order.paid", json!({}));
            after.count() > 0
        });
        let error = relay.shutdown(Duration::from_millis(500));
        error.expect_err("a message is in flight");
        gate.open();
        relay.shutdown(PATIENCE).expect("a clean shutdown");
        assert_eq!(database.count("sending"), 0);
        assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
        reload.join().expect("no panic").expect("reloaded");
    });
}

/// Connects once the gate is open.
struct Gated<F>(ConnectionManager<PgConnection>, F);

impl<F: Fn() + Send + Sync + 'static> ManageConnection for Gated<F> {
    type Connection = PgConnection;
    type Error = diesel::r2d2::Error;

    fn connect(&self) -> Result<PgConnection, Self::Error> {
        (self.1)();
        self.0.connect()
    }

    fn is_valid(&self, conn: &mut PgConnection) -> Result<(), Self::Error> {
        self.0.is_valid(conn)
    }

    fn has_broken(&self, conn: &mut PgConnection) -> bool {
        self.0.has_broken(conn)
    }
}

/// R47.
#[test]
fn a_relay_that_was_shut_down_while_its_successor_connected_sends_nothing_more() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database.relay().url(&receiver.url()).start();
    let relay = relay.expect("a relay");
    let (gate, pass) = Gate::new();
    let manager = Gated(ConnectionManager::new(&database.url), pass);
    std::thread::scope(|scope| {
        let next = database.relay().url(&receiver.url()).manager(manager);
        let reload = scope.spawn(|| relay.reload(next, PATIENCE));
        eventually("the next relay connects", || gate.came() > 0);
        end(&relay);
        database.enqueue_many(50);
        gate.open();
        reload
            .join()
            .expect("no panic")
            .expect("the relay stays down");
    });
    assert_eq!(receiver.count(), 0);
    assert_eq!(database.count("pending"), 50);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

// --- The application's logger -------------------------------------------------------------

/// Asks the relay about itself with each line.
struct Curious;

static RELAY: OnceLock<Arc<RelayHandle>> = OnceLock::new();
static LINES: AtomicUsize = AtomicUsize::new(0);

impl log::Log for Curious {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if !record.target().starts_with("diesel_outbox") {
            return;
        }
        if let Some(relay) = RELAY.get() {
            relay.health();
            relay.stats();
            relay.record_metrics();
            relay.stands_by();
            relay.wake();
            relay.has_failed();
            LINES.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn flush(&self) {}
}

/// Fails if the work takes too long.
fn returns(what: &str, work: impl FnOnce() + Send + 'static) {
    let (done, is_done) = bounded(1);
    std::thread::spawn(move || {
        work();
        done.send(()).expect("a reader");
    });
    is_done.recv_timeout(PATIENCE).expect(what);
}

#[test]
fn a_logger_may_ask_the_relay_about_itself() {
    if !in_a_process_of_its_own("waits::a_logger_may_ask_the_relay_about_itself") {
        return;
    }
    log::set_logger(&Curious).expect("no other logger is set");
    log::set_max_level(log::LevelFilter::Trace);
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.header("ce-type") {
        Some("order.refused") => 400,
        Some("order.paused") => 503,
        _ => 200,
    });
    let relay = || {
        let relay = database.relay().url(&receiver.url());
        // Nobody listens there.
        let proxied = diesel_outbox::Destination::new("proxied", "http://proxied.example");
        let proxied = proxied.expect("a URL");
        relay.destination(proxied).route("proxied", "proxied")
    };
    let with_proxy = || {
        relay().configure(|config| {
            config
                .set("OUTBOX_PROXY", "http://127.0.0.1:1")
                .expect("a setting");
        })
    };
    let running = Arc::new(with_proxy().start().expect("a relay"));
    assert!(RELAY.set(Arc::clone(&running)).is_ok());
    database.enqueue("proxied", json!({}));
    eventually("the proxy is a problem", || {
        running.health().to_string().contains("proxy")
    });
    let next = relay();
    let reloading = Arc::clone(&running);
    returns("the reload returns", move || {
        reloading.reload(next, PATIENCE).expect("reloaded");
    });
    for topic in ["order.paid", "order.refused", "order.paused"] {
        database.enqueue(topic, json!({}));
    }
    eventually("all are tried", || receiver.count() >= 3);
    returns("the shutdown returns", move || {
        running.shutdown(PATIENCE).expect("a clean shutdown");
    });
    assert!(LINES.load(Ordering::SeqCst) > 3);
}

/// Waits at a gate with each line of a relay.
struct Hanging(OnceLock<Box<dyn Fn() + Send + Sync>>);

static HANGING: Hanging = Hanging(OnceLock::new());

impl log::Log for Hanging {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if let Some(pass) = self.0.get()
            && record.target().starts_with("diesel_outbox")
        {
            pass();
        }
    }

    fn flush(&self) {}
}

/// The messages are recorded, the lease is renewed, and the relay can be shut down.
#[test]
fn a_logger_that_hangs_holds_up_no_relay() {
    if !in_a_process_of_its_own("waits::a_logger_that_hangs_holds_up_no_relay") {
        return;
    }
    log::set_logger(&HANGING).expect("no other logger is set");
    log::set_max_level(log::LevelFilter::Trace);
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.header("ce-type") {
        Some("order.refused") => 400,
        _ => 200,
    });
    let relay = database.relay().url(&receiver.url()).start();
    let relay = relay.expect("a relay");
    let (gate, pass) = Gate::new();
    assert!(HANGING.0.set(Box::new(pass)).is_ok());
    for n in 0..200 {
        database.enqueue("order.paid", json!(n));
        database.enqueue("order.refused", json!(n));
    }
    eventually("all messages are settled", || {
        database.count("delivered") == 200 && database.count("dead") == 200
    });
    assert_eq!(receiver.count(), 400, "each was sent once");
    assert!(gate.came() > 0, "a line waits");
    let lease = "SELECT max(id) FROM {o}_lease";
    let first = database.number(lease);
    database.execute("UPDATE {o}_lease SET expires_at = now() - interval '1 minute'");
    eventually("the relay has a new lease", || {
        database.number(lease) > first
    });
    let began = Instant::now();
    returns("the shutdown returns", move || {
        relay.shutdown(PATIENCE).expect("a clean shutdown");
    });
    assert!(began.elapsed() < PATIENCE / 2, "the log is not waited for");
    let left = format!("SELECT count(*) FROM {{o}}_lease WHERE id > {first}");
    assert_eq!(database.number(&left), 0);
    gate.open();
}

// --- A forked process ---------------------------------------------------------------------

/// A fork has the memory of the process, and none of the threads.
#[test]
#[allow(unsafe_code, reason = "only libc forks")]
fn a_forked_process_that_drops_the_handle_continues_and_the_relay_works() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn _exit(code: i32) -> !;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    }
    const NO_HANG: i32 = 1;
    let name = "waits::a_forked_process_that_drops_the_handle_continues_and_the_relay_works";
    if !in_a_process_of_its_own(name) {
        return;
    }
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .configure(|config| {
            config.share_connection = true;
            config.shutdown_timeout = 10 * PATIENCE;
        })
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    receiver.wait_for(1);
    // SAFETY: the child only drops the handle, and ends.
    let child = unsafe { fork() };
    if child == 0 {
        let is_refused = relay.shutdown(Duration::MAX).is_err();
        drop(relay);
        // SAFETY: ends the process.
        unsafe { _exit(if is_refused { 7 } else { 8 }) };
    }
    let mut status = 0;
    eventually("the child has ended", || {
        // SAFETY: the status is ours.
        unsafe { waitpid(child, &mut status, NO_HANG) == child }
    });
    assert_eq!(status, 7 << 8, "the child has exited with 7");
    database.enqueue("order.paid", json!({}));
    receiver.wait_for(2);
    end(&relay);
    assert_eq!(database.count("delivered"), 2);
}

// --- Logging in ---------------------------------------------------------------------------

/// Refuses connections while it is told to.
struct Refusing {
    inner: ConnectionManager<PgConnection>,
    refuses: Arc<AtomicUsize>,
    asked: Arc<Mutex<Vec<Instant>>>,
}

impl ManageConnection for Refusing {
    type Connection = PgConnection;
    type Error = diesel::r2d2::Error;

    fn connect(&self) -> Result<PgConnection, Self::Error> {
        if self.refuses.load(Ordering::SeqCst) == 0 {
            return self.inner.connect();
        }
        self.asked.lock().expect("no panic").push(Instant::now());
        let error = "FATAL: password authentication failed".to_owned();
        Err(diesel::r2d2::Error::ConnectionError(
            diesel::ConnectionError::BadConnection(error),
        ))
    }

    fn is_valid(&self, conn: &mut PgConnection) -> Result<(), Self::Error> {
        self.inner.is_valid(conn)
    }

    fn has_broken(&self, conn: &mut PgConnection) -> bool {
        self.inner.has_broken(conn)
    }
}

/// All threads of the relay have lost their connections.
#[test]
fn a_relay_that_cannot_log_in_tries_as_a_whole_and_less_and_less_often() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let (refuses, asked) = (Arc::new(AtomicUsize::new(0)), Arc::default());
    let manager = Refusing {
        inner: ConnectionManager::new(&database.url),
        refuses: Arc::clone(&refuses),
        asked: Arc::clone(&asked),
    };
    let relay = Relay::managed(manager)
        .outbox(&database.name())
        .lease(Duration::from_secs(120))
        .poll_interval(Duration::from_millis(20))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    receiver.wait_for(1);
    refuses.store(1, Ordering::SeqCst);
    database.number(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
          WHERE application_name LIKE 'diesel-outbox %' AND query LIKE '%{o}%'
            AND pid <> pg_backend_pid()",
    );
    let tries = || asked.lock().expect("no panic").clone();
    let mut few = Vec::new();
    eventually("the last tries are far apart", || {
        few = tries();
        let mut last = few.windows(2).rev().take(3).map(|pair| pair[1] - pair[0]);
        few.len() > 3 && last.all(|wait| wait >= Duration::from_millis(400))
    });
    assert!(few.len() <= 35, "{few:?}");
    refuses.store(0, Ordering::SeqCst);
    database.enqueue("order.paid", json!({}));
    receiver.wait_for(2);
    end(&relay);
}
