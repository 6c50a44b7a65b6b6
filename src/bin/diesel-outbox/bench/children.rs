//! Processes that a bench starts, so that what they cost is not counted as the relay's.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// A receiver in a process of its own.
pub(super) struct Receiver {
    process: Child,
    pub(super) url: String,
}

impl Receiver {
    /// One that answers every request with this status.
    pub(super) fn start(status: u16) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["receive", "--status", &status.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a receiver")?;
        let out = process
            .stdout
            .take()
            .context("the receiver has no output")?;
        let mut receiver = Self {
            process,
            url: String::new(),
        };
        let mut url = String::new();
        BufReader::new(out).read_line(&mut url)?;
        ensure!(!url.is_empty(), "the receiver did not say where it listens");
        url.trim().clone_into(&mut receiver.url);
        Ok(receiver)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // It ends by itself when its standard input is closed; this is faster.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
