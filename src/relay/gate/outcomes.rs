//! What follows for a destination from what came of a send.

use std::time::Instant;

use super::{Gate, News, Pass, Phase, State, later};
use crate::dispatch::{Failure, Pause};
use crate::relay::breaker::{Sign, open_time};

impl Gate {
    pub(super) fn pause(&self, state: &mut State, pause: Pause, failure: &Failure, now: Instant) {
        let code = failure.code;
        let until = match pause {
            Pause::UntilResumed => None,
            Pause::For(duration) => Some(later(now, duration)),
        };
        // A longer pause stays; the answers of many senders come at once.
        if let Phase::Closed { until: before, .. } = state.phase
            && (before.is_none() || until.is_some_and(|until| before >= Some(until)))
        {
            return;
        }
        state.close(until, false);
        let duration = until.map(|until| until.saturating_duration_since(now));
        state.news = Some(News::Paused(code, until));
        match duration {
            Some(duration) => {
                log::warn!(event = "destination_parked", destination:% = self.name, reason = code.as_str(), seconds = duration.as_secs_f64(); "{} wants to be left alone: its messages wait, at no cost", self.name);
            }
            None => {
                log::error!(event = "destination_paused", destination:% = self.name, reason = code.as_str(); "{0} is paused until an operator resumes it (diesel-outbox resume destination {0}): its messages wait, at no cost", self.name);
            }
        }
    }

    pub(super) fn count(&self, state: &mut State, pass: &Pass, sign: Sign, now: Instant) {
        match (state.phase, sign) {
            // A send that began before.
            (Phase::Closed { .. }, _) => {}
            (Phase::Trying { is_probe: true, .. }, Sign::Good) => {
                state.flow();
                state.openings = 0;
                state.news = Some(News::Recovered);
                log::info!(event = "breaker_closed", destination:% = self.name; "{} works again", self.name);
            }
            (Phase::Trying { is_probe: true, .. }, Sign::None) => {
                state.phase = Phase::Trying {
                    began: None,
                    is_probe: true,
                };
            }
            (Phase::Trying { is_probe: true, .. }, Sign::Bad | Sign::NoWay) => {
                if pass.is_first {
                    self.trip(state, sign, now);
                }
            }
            (Phase::Trying { .. } | Phase::Flowing, sign) => {
                if pass.is_first {
                    state.phase = Phase::Flowing;
                }
                let is_over = match (sign, &mut state.window) {
                    (Sign::None, _) | (_, None) => false,
                    (Sign::Good, Some(window)) => {
                        window.count_good(1, now);
                        state.openings = 0;
                        false
                    }
                    (Sign::Bad, Some(window)) => window.count_failure(now),
                    (Sign::NoWay, Some(_)) => true,
                };
                if is_over {
                    self.trip(state, sign, now);
                }
            }
        }
    }

    /// The breaker opens.
    fn trip(&self, state: &mut State, sign: Sign, now: Instant) {
        let Some(settings) = &self.breaker else {
            state.phase = Phase::Flowing;
            return;
        };
        state.openings = state.openings.saturating_add(1);
        let duration = open_time(settings, state.openings);
        let until = later(now, duration);
        let why = if sign == Sign::NoWay {
            "there is no way to"
        } else {
            "too many sends fail to"
        };
        state.close(Some(until), true);
        state.news = Some(News::Opened(until, state.openings));
        log::warn!(event = "breaker_opened", destination:% = self.name, seconds = duration.as_secs_f64(), in_a_row = state.openings; "{why} {}: its messages wait, at no cost, then one is tried", self.name);
    }
}
