//! Child processes of a bench: receivers, whose cost must not count as the cost of the relay, and several relays.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail, ensure};

use super::ground::Ground;
use super::relay_process::Done;

/// A process that ends when its standard input is closed, and is killed when dropped.
struct Process {
    child: Child,
}

impl Process {
    fn start(mut command: Command) -> Result<(Self, BufReader<ChildStdout>)> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a process")?;
        let out = child.stdout.take().context("the process has no output")?;
        Ok((Self { child }, BufReader::new(out)))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Closing standard input also ends the process; killing is faster.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A receiver in its own process.
pub(super) struct Receiver {
    _process: Process,
    pub(super) url: String,
}

impl Receiver {
    /// Starts a receiver that responds to every request with this status.
    pub(super) fn start(status: u16) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["receive", "--status", &status.to_string()]);
        let (process, mut out) = Process::start(command)?;
        let mut url = String::new();
        out.read_line(&mut url)?;
        ensure!(!url.is_empty(), "the receiver printed no URL");
        Ok(Self {
            _process: process,
            url: url.trim().to_owned(),
        })
    }
}

/// A relay in its own process, with the outbox and the settings of the ground.
pub(super) struct RelayProcess {
    process: Process,
    done: Arc<Mutex<Done>>,
    reader: JoinHandle<()>,
}

impl RelayProcess {
    /// Starts the process; the relay in it waits for `begin`.
    pub(super) fn start(ground: &Ground) -> Result<Self> {
        Self::start_with(ground, None)
    }

    /// As [`Self::start`], with more settings.
    pub(super) fn start_with(
        ground: &Ground,
        more: impl IntoIterator<Item = (&'static str, String)>,
    ) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", "relay-process"]);
        for (variable, value) in ground.variables().into_iter().chain(more) {
            command.env(variable, value);
            // With both variables, a setting would be given twice.
            command.env_remove(format!("{variable}_FILE"));
        }
        let (process, mut out) = Process::start(command)?;
        let mut line = String::new();
        out.read_line(&mut line)?;
        ensure!(!line.is_empty(), "a relay process ended at once");
        let done = Arc::new(Mutex::new(Done::default()));
        let latest = Arc::clone(&done);
        let reader = std::thread::Builder::new()
            .name("relay-output".to_owned())
            .spawn(move || {
                for line in out.lines().map_while(Result::ok) {
                    if let Ok(said) = serde_json::from_str(&line) {
                        *latest.lock().unwrap_or_else(PoisonError::into_inner) = said;
                    }
                }
            })?;
        Ok(Self {
            process,
            done,
            reader,
        })
    }

    pub(super) fn begin(&mut self) -> Result<()> {
        let input = self.process.child.stdin.as_mut();
        input
            .context("a relay process has no input")?
            .write_all(b"begin\n")
            .context("a relay process has ended")
    }

    /// The latest counts that the relay reported.
    pub(super) fn done(&mut self) -> Result<Done> {
        if let Some(status) = self.process.child.try_wait()? {
            bail!("a relay process ended unexpectedly: {status}");
        }
        Ok(*self.done.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends the process, and returns its final counts.
    pub(super) fn finish(mut self) -> Result<Done> {
        drop(self.process.child.stdin.take());
        let status = self.process.child.wait()?;
        ensure!(status.success(), "a relay process failed: {status}");
        // The reader ends at the end of the output.
        ensure!(
            self.reader.join().is_ok(),
            "the output of a relay process was not read"
        );
        Ok(*self.done.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
