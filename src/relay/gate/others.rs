//! What a gate hears from other relays and operators by the table of pauses, and what it tells them.

use std::time::Instant;

use super::{Gate, News, Phase, later};
use crate::store::relay::pause::{BREAKER_OPEN, Paused};

impl Gate {
    /// Learns what the table says. Where the table has not been told the news yet, it is wrong.
    pub(crate) fn learn(&self, row: Option<&Paused>, now: Instant) {
        let mut state = self.lock();
        if state.news.is_some() {
            return;
        }
        let is_probing = matches!(state.phase, Phase::Probing { .. });
        let is_breaker = row.is_some_and(|row| row.reason == BREAKER_OPEN);
        // That of a relay with other settings: it has taken the place of what closed this gate.
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
        // The time of a probe is its relay's own.
        if is_probing && is_breaker {
            return;
        }
        state.close(row.left.map(|left| later(now, left)), is_breaker);
        self.changed(&state);
        drop(state);
        if !was_closed {
            log::info!(event = "destination_closed", destination:% = self.name, reason = row.reason; "{} is paused ({}): holding its messages, no attempts used", self.name, row.reason);
        }
    }

    /// What the table has to be told, once.
    pub(crate) fn take_news(&self) -> Option<News> {
        self.lock().news.take()
    }

    /// The table could not be told.
    pub(crate) fn keep_news(&self, news: News) {
        self.lock().news.get_or_insert(news);
    }

    /// Makes all who wait look again.
    pub(crate) fn wake(&self) {
        // With the lock, so that nobody is between its look and its wait.
        let _state = self.lock();
        self.changed.notify_all();
    }
}
