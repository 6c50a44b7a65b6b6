//! A receiver of `examples/receivers` as a process: what it printed, refused and stored.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use crate::support::{Database, Finished, Running, eventually, finish};

pub(crate) const OLD_SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
pub(crate) const NEW_SECRET: &str = "whsec_QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE=";

/// The language whose libraries the receiver uses.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Library {
    Python,
    Node,
}

/// A receiver process, killed when dropped.
pub(crate) struct Example {
    library: Library,
    folder: PathBuf,
    variables: Vec<(&'static str, String)>,
    port: u16,
    child: Child,
    lines: Arc<Mutex<Lines>>,
}

/// Everything that the receiver has printed, also before restarts.
#[derive(Default)]
struct Lines {
    listening: Option<u16>,
    events: Vec<Value>,
    errors: Vec<String>,
}

impl Example {
    /// A receiver that accepts these secrets, ready for requests.
    pub(crate) fn start(library: Library, secrets: &str) -> Self {
        Self::with(library, &[("WEBHOOK_SECRET", secrets)])
    }

    /// A receiver with these environment variables.
    pub(crate) fn with(library: Library, variables: &[(&'static str, &str)]) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("receiver-{}", uuid::Uuid::now_v7().simple()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let lines = Arc::default();
        let variables: Vec<_> = variables
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect();
        let child = spawn(library, &folder, &variables, 0, &lines);
        let mut example = Self {
            library,
            folder,
            variables,
            port: 0,
            child,
            lines,
        };
        example.wait_until_it_listens();
        example
    }

    /// Kills the receiver and starts it again with these secrets on the same port and store.
    pub(crate) fn restart(&mut self, secrets: &str) {
        self.kill();
        self.variables.retain(|(name, _)| *name != "WEBHOOK_SECRET");
        self.variables.push(("WEBHOOK_SECRET", secrets.to_owned()));
        self.lock().listening = None;
        self.child = self.spawn();
        self.wait_until_it_listens();
    }

    fn spawn(&self) -> Child {
        spawn(
            self.library,
            &self.folder,
            &self.variables,
            self.port,
            &self.lines,
        )
    }

    fn wait_until_it_listens(&mut self) {
        eventually("the receiver listens", || {
            let listening = self.lock().listening;
            if let Some(port) = listening {
                self.port = port;
                return true;
            }
            // An outgoing connection of another process may have taken the port while the receiver was down.
            if let Some(status) = self.child.try_wait().expect("our child") {
                let errors = self.errors();
                assert!(
                    errors.contains("in use"),
                    "the receiver ended, {status}: {errors}"
                );
                self.child = self.spawn();
            }
            false
        });
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/events", self.port)
    }

    /// The file that records the handled events.
    pub(crate) fn inbox(&self) -> PathBuf {
        inbox(&self.folder)
    }

    /// The events that the receiver reports as handled, in the order of their sequences.
    pub(crate) fn handled(&self) -> Vec<Value> {
        let mut events: Vec<Value> = self
            .lock()
            .events
            .iter()
            .filter(|event| event.get("duplicate").is_none())
            .cloned()
            .collect();
        events.sort_by_key(sequence);
        events
    }

    /// Waits until the receiver reports `count` handled events.
    pub(crate) fn wait_for(&self, count: usize) -> Vec<Value> {
        eventually(&format!("{count} events are handled"), || {
            self.handled().len() >= count
        });
        self.handled()
    }

    /// The ids of the events that the receiver recognised as duplicates.
    pub(crate) fn duplicates(&self) -> Vec<String> {
        self.lock()
            .events
            .iter()
            .filter_map(|event| Some(event.get("duplicate")?.as_str()?.to_owned()))
            .collect()
    }

    /// The number of requests that the receiver refused with this status.
    pub(crate) fn refusals(&self, status: u16) -> usize {
        let beginning = format!("{status} ");
        self.lock()
            .errors
            .iter()
            .filter(|line| line.starts_with(&beginning))
            .count()
    }

    /// Everything that the receiver has logged.
    pub(crate) fn errors(&self) -> String {
        self.lock().errors.join("\n")
    }

    /// How often each event's work is in the store.
    pub(crate) fn stored(&self) -> BTreeMap<String, usize> {
        let text = match self.library {
            Library::Node => std::fs::read_to_string(self.inbox()).expect("the inbox"),
            Library::Python => {
                let script = "import sqlite3, sys\n\
                     for [event] in sqlite3.connect(sys.argv[1]).execute('SELECT event FROM events'):\n\
                     \x20   print(event)";
                let mut command = Command::new(installed("receivers/venv/bin/python"));
                command.args(["-c", script]).arg(self.inbox());
                finish(command).code(0).stdout
            }
        };
        let mut stored = BTreeMap::new();
        for line in text.lines() {
            let event: Value = serde_json::from_str(line).expect("JSON");
            let id = event["id"].as_str().expect("an id").to_owned();
            *stored.entry(id).or_default() += 1;
        }
        stored
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("the receiver has logged:\n{}", self.errors());
        }
        // The folder is in the build folder: leftovers do no harm.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Runs a receiver that is expected to end at once, with these variables.
pub(crate) fn run(library: Library, variables: &[(&str, &str)]) -> Finished {
    let mut command = command(library);
    command.envs(variables.iter().copied());
    finish(command)
}

/// The relay's binary with this receiver or proxy as its destination. The relay never gives up on a message.
pub(crate) fn relay(
    database: &Database,
    command: &str,
    url: &str,
    mode: &str,
    secrets: &str,
) -> Command {
    let mut relay = database.binary(&[command]);
    relay
        .env("OUTBOX_URL", url)
        .env("OUTBOX_MODE", mode)
        .env("OUTBOX_SECRET", secrets)
        .env("OUTBOX_MAX_ATTEMPTS", "1000");
    relay
}

/// A relay that runs until it is stopped.
pub(crate) fn running(database: &Database, url: &str, mode: &str, secrets: &str) -> Running {
    Running::start(relay(database, "run", url, mode, secrets))
}

/// Stops a relay as an operator does.
pub(crate) fn stop(mut relay: Running) {
    relay.signal("TERM");
    assert!(relay.wait().success(), "{}", relay.log());
}

fn sequence(event: &Value) -> i64 {
    let text = event["sequence"].as_str().expect("a sequence, as a string");
    text.parse().expect("a number")
}

fn inbox(folder: &Path) -> PathBuf {
    folder.join("inbox.store")
}

/// A path in a folder that `scripts/install-receivers` fills.
pub(crate) fn installed(path: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("tmp is in the build's folder");
    let path = target.join(path);
    assert!(
        path.exists(),
        "{} is missing: run `make test`, or scripts/install-receivers",
        path.display()
    );
    path
}

fn command(library: Library) -> Command {
    let sources = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("examples/receivers");
    let mut command = match library {
        Library::Python => {
            let mut command = Command::new(installed("receivers/venv/bin/python"));
            command.arg("-B").arg(sources.join("python/receiver.py"));
            command
        }
        Library::Node => {
            let mut command = Command::new("node");
            command
                .arg(sources.join("node/receiver.js"))
                .env("NODE_PATH", installed("receivers/node_modules"));
            command
        }
    };
    command.env_remove("WEBHOOK_SECRET");
    command
}

fn spawn(
    library: Library,
    folder: &Path,
    variables: &[(&'static str, String)],
    port: u16,
    lines: &Arc<Mutex<Lines>>,
) -> Child {
    let mut child = command(library)
        .env("PORT", port.to_string())
        .env("INBOX", inbox(folder))
        .envs(variables.iter().map(|(name, value)| (*name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the receiver starts");
    read(child.stdout.take().expect("piped"), lines, |lines, line| {
        if let Some(url) = line.strip_prefix("listening on http://127.0.0.1:") {
            lines.listening = url.trim_end_matches('/').parse().ok();
        } else if let Ok(event) = serde_json::from_str(&line) {
            lines.events.push(event);
        } else {
            // A killed receiver may have printed only the start of a line.
            lines.errors.push(line);
        }
    });
    read(child.stderr.take().expect("piped"), lines, |lines, line| {
        lines.errors.push(line);
    });
    child
}

/// Reads lines until the process has ended.
fn read(
    from: impl Read + Send + 'static,
    lines: &Arc<Mutex<Lines>>,
    take: impl Fn(&mut Lines, String) + Send + 'static,
) {
    let lines = Arc::clone(lines);
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            take(
                &mut lines.lock().unwrap_or_else(PoisonError::into_inner),
                line,
            );
        }
    });
}
