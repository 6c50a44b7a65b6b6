//! Exchanging pauses with other relays and operators through the table of pauses.

use std::time::Instant;

use super::{Gate, GateNews, LOCKED_ROW, Phase};
use crate::clock;
use crate::engine::send::sql::pause::{BREAKER_OPEN, Paused};
use crate::log;

impl Gate {
    /// Learns the state of the table: the pauses of this destination, one of each hand. Of several, the gate learns the one
    /// that ends last. The table is outdated while the gate has news that is not recorded yet.
    pub(crate) fn learn<'a>(&self, rows: impl IntoIterator<Item = &'a Paused>, now: Instant) {
        let mut state = self.lock();
        if state.news.is_some() || state.phase == Phase::Refused {
            return;
        }
        let is_probing = state.is_probing();
        let is_breaker = |row: &Paused| row.reason == BREAKER_OPEN;
        // A gate without a breaker ignores that of a relay with other settings.
        let has_breaker = state.window.is_some();
        let is_meant = |row: &&Paused| match is_breaker(row) {
            true => has_breaker,
            false => row.is_on(),
        };
        let was_closed = matches!(state.phase, Phase::Closed { .. });
        let meant = rows.into_iter().filter(is_meant);
        let Some(row) = meant.max_by_key(|row| row.length()) else {
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
        if is_probing && is_breaker(row) {
            return;
        }
        let left = row.left.map(|left| clock::after(now, left));
        state.close(left, is_breaker(row));
        self.changed(&state);
        drop(state);
        if !was_closed {
            log::info!(event = "destination_closed", destination:% = self.name, reason = row.reason; "{} is paused ({}): holding its messages, no attempts used", self.name, row.reason);
        }
    }

    /// Takes the change to record in the table.
    pub(crate) fn take_news(&self) -> Option<GateNews> {
        self.lock().news.take()
    }

    /// Keeps a change that could not be recorded.
    pub(crate) fn keep_news(&self, news: GateNews) {
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
