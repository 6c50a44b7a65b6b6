//! Exchanging pauses with other relays and operators through the table of pauses.

use std::time::Instant;

use super::{Gate, LOCKED_ROW, News, Phase};
use crate::clock;
use crate::log;
use crate::store::relay::pause::{BREAKER_OPEN, Paused};

impl Gate {
    /// Learns the state of the table. The table is outdated while the gate has news that is not recorded yet.
    pub(crate) fn learn(&self, row: Option<&Paused>, now: Instant) {
        let mut state = self.lock();
        if state.news.is_some() || state.phase == Phase::Refused {
            return;
        }
        let is_probing = matches!(
            state.phase,
            Phase::Probing { .. }
                | Phase::Held {
                    then_probe: true,
                    ..
                }
        );
        let is_breaker = row.is_some_and(|row| row.reason == BREAKER_OPEN);
        // The breaker of a relay with other settings: its row has replaced the reason that closed this gate.
        let is_of_others = is_breaker && state.window.is_none();
        let was_closed = matches!(state.phase, Phase::Closed { .. });
        let has_own_end = matches!(state.phase, Phase::Closed { until: Some(_), .. });
        if is_of_others && has_own_end {
            return;
        }
        let is_on = |row: &&Paused| {
            !is_of_others && (is_breaker || row.left.is_none_or(|left| !left.is_zero()))
        };
        let Some(row) = row.filter(is_on) else {
            if was_closed || is_probing {
                state.openings = 0;
                self.turn(&mut state, Phase::Trying(None));
                drop(state);
                log::info!(event = "destination_resumed", destination:% = self.name; "resumed {}", self.name);
            }
            return;
        };
        state.openings = state.openings.max(row.openings);
        // The probing relay itself decides when its probe ends.
        if is_probing && is_breaker {
            return;
        }
        state.close(row.left.map(|left| clock::after(now, left)), is_breaker);
        self.changed(&state);
        drop(state);
        if !was_closed {
            log::info!(event = "destination_closed", destination:% = self.name, reason = row.reason; "{} is paused ({}): holding its messages, no attempts used", self.name, row.reason);
        }
    }

    /// Takes the change to record in the table.
    pub(crate) fn take_news(&self) -> Option<News> {
        self.lock().news.take()
    }

    /// Keeps a change that could not be recorded.
    pub(crate) fn keep_news(&self, news: News) {
        self.lock().news.get_or_insert(news);
    }

    /// Another session has locked a row of this destination: tries again later.
    pub(crate) fn wait_for_row(&self, now: Instant) {
        self.lock().row_wanted_at = Some(clock::after(now, LOCKED_ROW));
    }

    /// Whether it is too early to try again to change a row of this destination.
    pub(crate) fn waits_for_row(&self, now: Instant) -> bool {
        let mut state = self.lock();
        state.row_wanted_at = state.row_wanted_at.filter(|at| now < *at);
        state.row_wanted_at.is_some()
    }

    /// Wakes all waiting senders, so that they check again.
    pub(crate) fn wake(&self) {
        // With the lock, so that no sender is between its check and its wait.
        let _state = self.lock();
        self.changed.notify_all();
    }
}
