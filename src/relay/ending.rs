//! How a relay ends.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::heartbeat::Ending;
use super::running::{HEARTBEAT, Running};
use super::threads::State;
use super::{Incarnation, ShutdownError, monitor};

impl Incarnation {
    /// As [`RelayHandle::shutdown`](super::RelayHandle::shutdown).
    pub(super) fn shutdown(&self, deadline: Duration) -> Result<(), ShutdownError> {
        let until = Instant::now().checked_add(deadline);
        self.shared.begin_stop();
        let (back, running) = &self.running;
        let running = match until {
            Some(until) => running.recv_deadline(until).ok(),
            None => running.recv().ok(),
        };
        let Some(mut running) = running else {
            return Err(ShutdownError::Deadline {
                messages: self.shared.unsettled(),
                threads: "one that shuts the relay down, too".to_owned(),
            });
        };
        let ended = self.end(&mut running, deadline, until);
        // It has its place there.
        let _ = back.try_send(running);
        ended
    }

    fn end(
        &self,
        running: &mut Running,
        deadline: Duration,
        until: Option<Instant>,
    ) -> Result<(), ShutdownError> {
        let threads = &self.shared.threads;
        running.stop = None;
        // A part of the time is kept for the last settle to notice that it has to give up.
        let reserve = (deadline / 10).min(Duration::from_millis(500));
        let at = until.and_then(|until| until.checked_sub(reserve));
        threads.wait_for_ends(at, Some(HEARTBEAT));
        running.abandon = None;
        let has_stopped = threads.wait_for_ends(until, Some(HEARTBEAT));
        // A claim under way may still work: then the lease has to be there, or its messages name
        // one that nobody looks for. Asked first: what it claims until then counts as left.
        let left = self.shared.unsettled();
        // Whatever the lease may hold that nobody here knows of: others find it when the lease expires.
        let is_in_doubt = self.shared.doubt().is_some();
        let has_panicked = threads.state().panicked().is_some();
        let ending = if left == 0 && !has_panicked && has_stopped && !is_in_doubt {
            Ending::Clean
        } else {
            Ending::LeaveLease
        };
        // Full: it was told before.
        let _ = running.ending.try_send(ending);
        threads.wait_for_ends(until, None);
        let state = threads.state();
        running.join_ended(&state);
        monitor::record(&self.shared);
        self.report(running, &state, left)
    }

    fn report(&self, running: &Running, state: &State, left: usize) -> Result<(), ShutdownError> {
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
        log::info!(event = "relay_stopped", outbox:% = self.shared.config.table; "relay stopped ({})", self.shared.config.table);
        Ok(())
    }
}

impl Drop for Incarnation {
    fn drop(&mut self) {
        // Nobody else can have it now.
        let is_over = self.running.1.try_recv().is_ok_and(|running| {
            let is_over = running.stop.is_none();
            let _ = self.running.0.try_send(running);
            is_over
        });
        if !is_over && let Err(error) = self.shutdown(self.shared.config.shutdown_timeout) {
            log::error!(event = "shutdown_failed", error:% = error; "the relay was dropped and did not shut down cleanly: {error}");
        }
    }
}

/// A channel with `running` in it: whoever takes it from there has it alone, and others can wait for it
/// for as long as they like.
pub(super) fn held(running: Running) -> (Sender<Running>, Receiver<Running>) {
    let (back, held) = bounded(1);
    // It has its place there.
    let _ = back.try_send(running);
    (back, held)
}
