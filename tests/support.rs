//! Shared by all tests: a PostgreSQL schema for each test, receivers on real sockets, the binary, and waiting for
//! conditions instead of sleeping.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses a part of it"
)]

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use diesel::connection::SimpleConnection;
use diesel::pg::Pg;
use diesel::sql_types::{BigInt, Nullable, Text};
use diesel::{Connection, PgConnection, QueryableByName, RunQueryDsl, sql_query};
use diesel_outbox::config::{Config, Mode};
use diesel_outbox::{
    Backoff, Dispatcher, Message, NewMessage, Outbox, OutboxName, Outcome, Relay, RelayBuilder,
    RelayHandle, Response,
};

/// The limit for a condition. Far longer than any test needs, because machines differ.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` holds. Fails with `what`.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(
            Instant::now() < until,
            "this did not happen within {PATIENCE:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Shuts a relay down. Fails unless the shutdown is clean.
#[track_caller]
pub fn end(relay: &RelayHandle) {
    relay
        .shutdown(Duration::from_secs(20))
        .expect("a clean shutdown");
}

/// The database that `scripts/with-postgres` has started.
pub fn database_url() -> String {
    std::env::var("DATABASE_URL").unwrap_or_else(|_| {
        panic!("DATABASE_URL is not set: run `make test`, or `scripts/with-postgres cargo test`")
    })
}

/// On PostgreSQL 13 and 14, the doctor reports the default of `public` as a problem.
pub const AS_POSTGRESQL_15: &str = "REVOKE CREATE ON SCHEMA public FROM PUBLIC";

/// An outbox in its own schema, removed when dropped.
pub struct Database {
    pub url: String,
    schema: String,
    /// A connection that is kept, because each new one costs the server a process. Nothing sets anything in its session.
    kept: Mutex<Option<PgConnection>>,
}

impl Database {
    pub fn new() -> Self {
        Self::at(&database_url())
    }

    /// In the database at `url`.
    pub fn at(url: &str) -> Self {
        Self::in_schema(url, &format!("t_{}", uuid::Uuid::now_v7().simple()))
    }

    /// In a schema of this name, which must not exist yet.
    pub fn in_schema(url: &str, schema: &str) -> Self {
        let database = Self::bare(url, schema);
        database.execute("SELECT public.outbox_create_endpoints('{o}')");
        database.execute("SELECT public.outbox_create_feeds('{o}')");
        database
    }

    /// Without the tables of endpoints.
    pub fn without_endpoints() -> Self {
        Self::bare(
            &database_url(),
            &format!("t_{}", uuid::Uuid::now_v7().simple()),
        )
    }

    fn bare(url: &str, schema: &str) -> Self {
        static MIGRATED: Once = Once::new();
        let mut conn = PgConnection::establish(url).expect("PostgreSQL is there");
        if url == database_url() {
            MIGRATED.call_once(|| {
                let mut conn = PgConnection::establish(url).expect("PostgreSQL is there");
                diesel_outbox::migrate(&mut conn, &"outbox".parse().expect("a name"))
                    .expect("migrations run");
                conn.batch_execute(AS_POSTGRESQL_15).expect("revoked");
            });
        } else {
            diesel_outbox::migrate(&mut conn, &"outbox".parse().expect("a name"))
                .expect("migrations run");
        }
        conn.batch_execute(&format!(
            "CREATE SCHEMA {schema}; SELECT public.outbox_create('{schema}.outbox')"
        ))
        .expect("an outbox");
        Self {
            url: url.to_owned(),
            schema: schema.to_owned(),
            kept: Mutex::new(None),
        }
    }

    pub fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url).expect("PostgreSQL is there")
    }

    /// For pages with connections of their own.
    pub fn secret_url(&self) -> secrecy::SecretString {
        self.url.clone().into()
    }

    /// `schema.outbox`
    pub fn name(&self) -> String {
        format!("{}.outbox", self.schema)
    }

    pub fn outbox_name(&self) -> OutboxName {
        self.name().parse().expect("a name")
    }

    pub fn schema(&self) -> &str {
        &self.schema
    }

    /// Most tests write only messages, so a transaction is not required.
    pub fn outbox(&self) -> Outbox {
        let outbox = Outbox::new(&self.name()).expect("a name");
        outbox.allow_outside_transaction()
    }

    /// A relay with short times, so that tests are quick, which follows URLs of endpoints to receivers of tests.
    pub fn relay(&self) -> RelayBuilder {
        self.strict_relay()
            .configure(|config| config.endpoint_https_only = false)
            .configure(|config| config.endpoint_public_only = false)
    }

    /// The same with the default rules for URLs of endpoints.
    pub fn strict_relay(&self) -> RelayBuilder {
        Relay::builder(&self.url)
            .outbox(&self.name())
            .concurrency(4)
            .poll_interval(Duration::from_millis(20))
            .send_timeout(Duration::from_millis(1000))
            .lease(Duration::from_secs(3))
            .backoff(Backoff::Table(vec![Duration::from_millis(50)]))
            .configure(|config| {
                config.endpoint_backoff = Backoff::Table(vec![Duration::from_millis(50)])
            })
            .configure(|config| config.endpoint_mode = Mode::Binary)
            .configure(|config| config.endpoint_timeout = Duration::from_millis(1000))
    }

    /// A relay of endpoints whose ledger keeps payloads.
    pub fn keeping_relay(&self) -> RelayBuilder {
        let mut config = Config::default();
        for (setting, value) in [
            ("DATABASE_URL", self.url.as_str()),
            ("OUTBOX_TABLE", &self.name()),
            ("OUTBOX_LEDGER_PAYLOAD", "true"),
            ("OUTBOX_ENDPOINT_THREADS", "4"),
            ("OUTBOX_ENDPOINT_HTTPS_ONLY", "false"),
            ("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false"),
            ("OUTBOX_ENDPOINT_MAX_ATTEMPTS", "1"),
            ("OUTBOX_ENDPOINT_MODE", "binary"),
            ("OUTBOX_POLL_INTERVAL", "20ms"),
        ] {
            config.set(setting, value).expect(setting);
        }
        Relay::from_config(config)
    }

    /// The binary with settings for this outbox and short times.
    pub fn binary(&self, arguments: &[&str]) -> Command {
        let mut command = binary(arguments);
        command
            .env("DATABASE_URL", &self.url)
            .env("OUTBOX_TABLE", self.name())
            .env("OUTBOX_POLL_INTERVAL", "50ms")
            .env("OUTBOX_SEND_TIMEOUT", "1s")
            .env("OUTBOX_LEASE", "3s")
            .env("OUTBOX_BACKOFF", "100ms")
            .env("OUTBOX_ENDPOINT_BACKOFF", "100ms")
            .env("OUTBOX_ENDPOINT_MODE", "binary")
            .env("OUTBOX_ENDPOINT_TIMEOUT", "1s");
        command
    }

    /// Drops a trigger of the ledger. `DROP TRIGGER` locks the parts of a table before the table, an INSERT locks the
    /// table before a part: together they may deadlock.
    pub fn drop_trigger_of_ledger(&self, trigger: &str) {
        self.execute(&format!(
            "DO $$ BEGIN LOCK TABLE {{o}}_ledger; DROP TRIGGER {trigger} ON {{o}}_ledger; END $$"
        ));
    }

    /// Runs SQL in which `{o}` is the name of the outbox: `SELECT … FROM {o}_ledger`.
    pub fn execute(&self, sql: &str) -> usize {
        let query = sql_query(sql.replace("{o}", &self.name()));
        self.with(|conn| query.execute(conn))
            .unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// The error of SQL that must fail.
    pub fn refused(&self, sql: &str) -> String {
        sql_query(sql.replace("{o}", &self.name()))
            .execute(&mut self.connect())
            .expect_err(sql)
            .to_string()
    }

    /// One number, for example from `SELECT count(*) FROM {o}`.
    pub fn number(&self, select: &str) -> i64 {
        self.ask::<NumberRow>(select, "bigint").value
    }

    /// One text, or `None` for NULL.
    pub fn text(&self, select: &str) -> Option<String> {
        self.ask::<TextRow>(select, "text").value
    }

    fn ask<R: QueryableByName<Pg> + 'static>(&self, select: &str, sql_type: &str) -> R {
        let select = select.replace("{o}", &self.name());
        let query = sql_query(format!("SELECT ({select})::{sql_type} AS value"));
        self.with(|conn| query.get_result(conn))
            .unwrap_or_else(|error| panic!("{select}: {error}"))
    }

    /// Ends the kept connection: the server counts what a session has read when it ends.
    pub fn disconnect(&self) {
        drop(self.kept.lock().expect("no panic while it is held").take());
    }

    /// Runs statements on the kept connection, or on a new one while another thread uses it.
    fn with<T>(&self, work: impl FnOnce(&mut PgConnection) -> T) -> T {
        let lock = || self.kept.lock().expect("no panic while it is held");
        let kept = lock().take();
        // The server may have been restarted, or have ended the session.
        let kept = kept.and_then(|mut conn| {
            let is_alive = sql_query("SELECT").execute(&mut conn).is_ok();
            is_alive.then_some(conn)
        });
        let mut conn = kept.unwrap_or_else(|| self.connect());
        let done = work(&mut conn);
        *lock() = Some(conn);
        done
    }

    /// The number of messages in this state, according to the view.
    pub fn count(&self, status: &str) -> i64 {
        self.number(&format!(
            "SELECT count(*) FROM {{o}}_messages WHERE status = '{status}'"
        ))
    }

    /// Whether a relay sleeps, so that enqueuers notify it.
    pub fn is_relay_asleep(&self) -> bool {
        self.number(
            "SELECT count(*) FROM pg_locks
              WHERE locktype = 'advisory' AND classid = '{o}'::regclass::oid AND objid = 1
                AND objsubid = 2 AND mode = 'ExclusiveLock' AND granted",
        ) > 0
    }

    /// Starts a relay that never polls, and returns when the relay sleeps: it finds a message only when notified.
    pub fn sleeper(&self, relay: RelayBuilder) -> RelayHandle {
        let relay = relay.poll_interval(Duration::from_secs(600)).start();
        let relay = relay.expect("the relay starts");
        eventually("the relay sleeps", || self.is_relay_asleep());
        relay
    }

    /// Enqueues one message in its own transaction. Returns its sequence.
    pub fn enqueue(&self, topic: &str, payload: serde_json::Value) -> i64 {
        self.enqueue_message(NewMessage::new(topic, &payload).expect("JSON"))
    }

    pub fn enqueue_message(&self, message: NewMessage) -> i64 {
        let outbox = self.outbox();
        self.with(|conn| conn.transaction(|conn| outbox.enqueue(conn, message)))
            .expect("enqueued")
            .sequence
            .0
    }

    /// Enqueues `count` messages with the topic `order.paid`: `{"n":0}`, `{"n":1}`, …
    pub fn enqueue_many(&self, count: usize) {
        let outbox = self.outbox();
        let mut conn = self.connect();
        let numbers: Vec<usize> = (0..count).collect();
        for chunk in numbers.chunks(1000) {
            let batch = chunk.iter().map(|n| {
                NewMessage::new("order.paid", &serde_json::json!({ "n": n })).expect("JSON")
            });
            outbox.enqueue_batch(&mut conn, batch).expect("enqueued");
        }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // A test that stopped the server has nothing to clean up.
        if let Ok(mut conn) = PgConnection::establish(&self.url) {
            let _ = conn.batch_execute(&format!("DROP SCHEMA {} CASCADE", self.schema));
        }
    }
}

#[derive(QueryableByName)]
struct NumberRow {
    #[diesel(sql_type = BigInt)]
    value: i64,
}

#[derive(QueryableByName)]
struct TextRow {
    #[diesel(sql_type = Nullable<Text>)]
    value: Option<String>,
}

/// Holds every caller until the gate is opened or dropped.
pub struct Gate {
    closed: Cell<Option<Sender<()>>>,
    came: Arc<AtomicUsize>,
}

impl Gate {
    /// A closed gate, and the function that waits at it.
    pub fn new() -> (Self, impl Fn() + Clone + Send + Sync + 'static) {
        let (closed, open) = bounded::<()>(0);
        let came = Arc::new(AtomicUsize::new(0));
        let gate = Self {
            closed: Cell::new(Some(closed)),
            came: Arc::clone(&came),
        };
        let pass = move || {
            came.fetch_add(1, Ordering::SeqCst);
            // Nothing is ever sent: `recv` returns when the sender is dropped.
            let _ = open.recv();
        };
        (gate, pass)
    }

    /// The number of callers that have reached the gate.
    pub fn came(&self) -> usize {
        self.came.load(Ordering::SeqCst)
    }

    pub fn open(&self) {
        drop(self.closed.take());
    }
}

/// A dispatcher made of a closure.
pub struct Dispatch<F>(pub F);

impl<F: Fn(&Message) -> Outcome + Send + Sync + 'static> Dispatcher for Dispatch<F> {
    fn dispatch(&self, message: &Message) -> Outcome {
        (self.0)(message)
    }
}

/// A message of a topic, when nothing else matters.
pub fn message(topic: &str) -> NewMessage {
    NewMessage::new(topic, &serde_json::json!({ "n": 1 })).expect("JSON")
}

pub fn delivered() -> Outcome {
    Outcome::Delivered(Response::default())
}

/// A file with this text, removed when dropped.
pub struct File(PathBuf);

impl File {
    pub fn new(text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("outbox-test-{}", uuid::Uuid::now_v7()));
        std::fs::write(&path, text).expect("a file");
        Self(path)
    }

    pub fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A request that a receiver got.
#[derive(Debug, Clone)]
pub struct Request {
    /// Method, target and version.
    pub line: String,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub at: Instant,
}

impl Request {
    /// The value of the header with this lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// All headers with lower-case names.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        let headers = self.headers.iter();
        headers.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    pub fn id(&self) -> String {
        self.header("webhook-id")
            .expect("every request has an id")
            .to_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }
}

/// An HTTP receiver on a real socket. It writes exactly the bytes that `answer` writes.
pub struct Receiver {
    pub address: SocketAddr,
    state: Arc<ReceiverState>,
}

type Answer = dyn Fn(&Request, &mut TcpStream) -> std::io::Result<()> + Send + Sync;

struct ReceiverState {
    requests: Mutex<Vec<Request>>,
    arrived: Condvar,
    stopping: AtomicBool,
    answer: Box<Answer>,
}

/// The bytes of a response without a body.
pub fn status(code: u16) -> Vec<u8> {
    format!("HTTP/1.1 {code} Reason\r\ncontent-length: 0\r\n\r\n").into_bytes()
}

impl Receiver {
    /// Responds to each request with a status.
    pub fn answering(status_of: impl Fn(&Request) -> u16 + Send + Sync + 'static) -> Self {
        Self::start(move |request, stream| stream.write_all(&status(status_of(request))))
    }

    pub fn ok() -> Self {
        Self::answering(|_| 200)
    }

    /// Responds with 200 once the gate is open.
    pub fn held() -> (Self, Gate) {
        let (gate, pass) = Gate::new();
        let receiver = Self::start(move |_, stream| {
            pass();
            stream.write_all(&status(200))
        });
        (receiver, gate)
    }

    /// Responds by writing to the connection, which stays open unless `answer` fails.
    pub fn start(
        answer: impl Fn(&Request, &mut TcpStream) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(ReceiverState {
            requests: Mutex::default(),
            arrived: Condvar::new(),
            stopping: AtomicBool::new(false),
            answer: Box::new(answer),
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if shared.stopping.load(Ordering::Acquire) {
                    return;
                }
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || {
                    // Either side may close a connection; that is no error of the receiver.
                    let _ = shared.serve(stream);
                });
            }
        });
        Self { address, state }
    }

    pub fn url(&self) -> String {
        format!("http://{}/events", self.address)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Request>> {
        self.state
            .requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.lock().clone()
    }

    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// The distinct ids that arrived.
    pub fn ids(&self) -> HashSet<String> {
        self.lock().iter().map(Request::id).collect()
    }

    /// The number of arrivals of each id.
    pub fn arrivals(&self) -> HashMap<String, usize> {
        let mut arrivals = HashMap::new();
        for request in self.lock().iter() {
            *arrivals.entry(request.id()).or_default() += 1;
        }
        arrivals
    }

    /// Waits until `count` requests have arrived.
    pub fn wait_for(&self, count: usize) -> Vec<Request> {
        let requests = self.lock();
        let (requests, timeout) = self
            .state
            .arrived
            .wait_timeout_while(requests, PATIENCE, |requests| requests.len() < count)
            .unwrap_or_else(PoisonError::into_inner);
        assert!(
            !timeout.timed_out(),
            "{} of {count} requests arrived within {PATIENCE:?}",
            requests.len()
        );
        requests.clone()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.state.stopping.store(true, Ordering::Release);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

impl ReceiverState {
    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        while let Some(request) = read_request(&mut reader)? {
            let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
            requests.push(request.clone());
            drop(requests);
            self.arrived.notify_all();
            (self.answer)(&request, &mut stream)?;
        }
        Ok(())
    }
}

fn read_request(reader: &mut BufReader<TcpStream>) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut headers = Vec::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        let Some((name, value)) = header.trim_end().split_once(':') else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let length = headers
        .iter()
        .find(|(name, _)| name == "content-length")
        .map_or(0, |(_, value)| value.parse().expect("a length"));
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some(Request {
        line: line.trim_end().to_owned(),
        headers,
        body,
        at: Instant::now(),
    }))
}

/// The program of the package that the test belongs to: `diesel-outbox`, or `outbox-lab`.
pub const PROGRAM: &str = match (
    option_env!("CARGO_BIN_EXE_diesel-outbox"),
    option_env!("CARGO_BIN_EXE_outbox-lab"),
) {
    (Some(program), _) | (None, Some(program)) => program,
    (None, None) => panic!("the package of this test has no program"),
};

/// The binary, without this process's environment variables that would affect it.
pub fn binary(arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    for (variable, _) in std::env::vars() {
        if variable.starts_with("OUTBOX_")
            || variable.starts_with("DATABASE_URL")
            || variable == "RUST_LOG"
        {
            command.env_remove(variable);
        }
    }
    command.args(arguments);
    command
}

/// The output of a finished command.
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

pub fn finish(mut command: Command) -> Finished {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .stdin(Stdio::null())
        .output()
        .expect("the binary runs");
    Finished {
        status,
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

impl Finished {
    /// Fails unless the exit code is this one.
    #[track_caller]
    pub fn code(self, code: i32) -> Self {
        assert_eq!(
            self.status.code(),
            Some(code),
            "stdout: {}\nstderr: {}",
            self.stdout,
            self.stderr
        );
        self
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }
}

/// A running binary, killed when dropped. Its log is collected.
pub struct Running {
    child: Child,
    log: Arc<Mutex<String>>,
    reads: std::thread::JoinHandle<()>,
}

impl Running {
    pub fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let log = Arc::new(Mutex::new(String::new()));
        let stderr = child.stderr.take().expect("piped");
        let gathered = Arc::clone(&log);
        let reads = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut log = gathered.lock().unwrap_or_else(PoisonError::into_inner);
                log.push_str(&line);
                log.push('\n');
            }
        });
        Self { child, log, reads }
    }

    pub fn log(&self) -> String {
        self.log
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub fn wait_for_log(&self, text: &str) {
        eventually(
            &format!("the log says {text:?}; it says {}", self.log()),
            || self.log().contains(text),
        );
    }

    /// Sends a signal by name: `TERM`, `STOP`, `CONT`, `KILL`.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([format!("-{name}"), self.child.id().to_string()])
            .status()
            .expect("kill runs");
        assert!(status.success(), "kill -{name} failed");
    }

    /// Stops the process, and returns once all its threads have stopped, some time after the signal.
    pub fn stop(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.pid());
        eventually("all threads have stopped", || {
            std::fs::read_dir(&tasks)
                .expect("the process is there")
                .flatten()
                .filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok())
                .all(|status| status.contains("\nState:\tT"))
        });
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The CPU time used, in hundredths of a second.
    pub fn cpu(&self) -> u64 {
        let stat = format!("/proc/{}/stat", self.pid());
        let stat = std::fs::read_to_string(stat).expect("the process is there");
        // The name, in brackets, may contain spaces; the 14th and 15th fields are the times.
        let (_, after) = stat.rsplit_once(')').expect("a name");
        let times = after.split_whitespace().skip(11).take(2);
        times.map(|time| time.parse::<u64>().expect("a time")).sum()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("our child").is_none()
    }

    /// Waits until the process has ended, and its log has been read to the end.
    pub fn wait(&mut self) -> ExitStatus {
        let ended = self.wait_for_end();
        eventually("its log ends", || self.reads.is_finished());
        ended
    }

    fn wait_for_end(&mut self) -> ExitStatus {
        eventually("the process ends", || {
            self.child.try_wait().expect("our child").is_some()
        });
        self.child.wait().expect("our child")
    }

    /// Processes that this one has started may still write its log.
    pub fn kill(mut self) {
        self.signal("KILL");
        self.wait_for_end();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("process {} has logged:\n{}", self.pid(), self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
