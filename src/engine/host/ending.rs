//! The shutdown of a relay.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::running::{HEARTBEAT, Running};
use super::threads::ThreadsState;
use super::{Incarnation, ShutdownError};
use crate::engine::lease::heartbeat::Ending;
use crate::engine::observe::monitor;
use crate::log;

impl Incarnation {
    /// See [`RelayHandle::shutdown`](super::RelayHandle::shutdown).
    pub(super) fn shutdown(&self, deadline: Duration) -> Result<(), ShutdownError> {
        let until = Instant::now().checked_add(deadline);
        self.shared.begin_stop();
        let (back, running) = &*self.running;
        let running = match until {
            Some(until) => running.recv_deadline(until).ok(),
            None => running.recv().ok(),
        };
        let Some(mut running) = running else {
            return Err(ShutdownError::Deadline {
                messages: self.shared.custody.unsettled(),
                threads: "another thread that shuts the relay down".to_owned(),
            });
        };
        let _log = self.shared.log.enter();
        let ended = self.end(&mut running, deadline, until);
        if ended.is_ok() {
            log::info!(event = "relay_stopped", outbox:% = self.shared.settings.table; "relay stopped ({})", self.shared.settings.table);
        }
        if running.threads.is_empty() {
            running.end_log(&self.shared, until);
        }
        // Never full: the channel has one place, and `running` was taken from it.
        let _ = back.try_send(running);
        ended
    }

    /// Whether this process is a fork of the relay's, which has the threads.
    pub(super) fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    fn end(
        &self,
        running: &mut Running,
        deadline: Duration,
        until: Option<Instant>,
    ) -> Result<(), ShutdownError> {
        let threads = &self.shared.threads;
        running.stop = None;
        // Reserves time for the last settle to notice that it must give up.
        let reserve = (deadline / 10).min(Duration::from_millis(500));
        let at = until.and_then(|until| until.checked_sub(reserve));
        threads.wait_for_ends(at, Some(HEARTBEAT));
        running.abandon = None;
        let has_stopped = threads.wait_for_ends(until, Some(HEARTBEAT));
        // A claim in progress may still succeed. Its messages then need the lease row for a takeover. `unsettled` is
        // read after the wait, so messages that were claimed before the end of the wait count as left.
        let left = self.shared.custody.unsettled();
        // The lease may hold messages unknown to this relay. Other relays take them over when the lease expires.
        let is_in_doubt = self.shared.custody.doubt().is_some();
        let has_panicked = threads.state().panicked().is_some();
        let ending = if left == 0 && !has_panicked && has_stopped && !is_in_doubt {
            Ending::Clean
        } else {
            Ending::LeaveLease
        };
        // Full: the heartbeat was told before.
        let _ = running.ending.try_send(ending);
        threads.wait_for_ends(until, None);
        let state = threads.state();
        running.join_ended(&state);
        if running.threads.is_empty() {
            self.shared.close_connection();
        }
        monitor::record(&self.shared);
        self.report(running, &state, left)
    }

    fn report(
        &self,
        running: &Running,
        state: &ThreadsState,
        left: usize,
    ) -> Result<(), ShutdownError> {
        if let Some(thread) = state.panicked() {
            return Err(ShutdownError::Panic {
                thread: thread.to_owned(),
            });
        }
        if left > 0 || !running.threads.is_empty() {
            let threads = running.threads.iter().map(|(name, _)| &**name);
            let threads: Vec<&str> = threads.collect();
            return Err(ShutdownError::Deadline {
                messages: left,
                threads: threads.join(" "),
            });
        }
        Ok(())
    }
}

impl Drop for Incarnation {
    fn drop(&mut self) {
        if self.is_forked() {
            // The threads, their channels and their connections belong to the other process.
            std::mem::forget(Arc::clone(&self.running));
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let (back, running) = &*self.running;
        // No other thread can hold `running` now.
        let has_ended = running.try_recv().is_ok_and(|running| {
            let has_ended = running.stop.is_none();
            let _ = back.try_send(running);
            has_ended
        });
        let _log = self.shared.log.enter();
        if !has_ended && let Err(error) = self.shutdown(self.shared.settings.shutdown_timeout) {
            log::error!(event = "shutdown_failed", error:% = error; "the relay was dropped, but did not shut down cleanly: {error}");
        }
    }
}
