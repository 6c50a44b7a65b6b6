//! What the result of a send means for its destination.

use std::time::{Duration, Instant};

use super::{Gate, GateNews, GateState, Pass, Phase, UNUSED_PROBE};
use crate::clock;
use crate::dispatch::Pause;
use crate::engine::send::breaker::Sign;
use crate::log;
use crate::status::ReasonCode;

/// A pause that extends the current one by less than this is not recorded.
const SAME: Duration = Duration::from_secs(1);

impl GateState {
    pub(super) fn pause(
        &mut self,
        pause: Pause,
        code: ReasonCode,
        now: Instant,
    ) -> Option<GateNews> {
        let until = match pause {
            Pause::UntilResumed => None,
            Pause::For(duration) => Some(clock::after(now, duration)),
        };
        // The current pause is longer and stays.
        if let Phase::Closed { until: before, .. } = self.phase
            && (before.is_none() || until.is_some_and(|until| before >= Some(until)))
        {
            return None;
        }
        // Many senders get the same response at once, each a moment later than the one before.
        let is_the_same = matches!((self.phase, until), (Phase::Closed { until: Some(before), .. }, Some(until))
            if until < before + SAME);
        self.close(until, false);
        (!is_the_same).then_some(GateNews::Paused(code, until))
    }

    pub(super) fn count(&mut self, pass: &Pass, sign: Sign, now: Instant) -> Option<GateNews> {
        match (self.phase, sign) {
            // A send that began before the gate closed.
            (Phase::Closed { .. } | Phase::Held { .. } | Phase::Refused, _) => None,
            (Phase::Probing { .. }, Sign::Good) => {
                self.phase = Phase::Flowing;
                self.openings = 0;
                self.clear();
                Some(GateNews::Recovered)
            }
            (Phase::Probing { .. }, Sign::None) => {
                self.phase = UNUSED_PROBE;
                None
            }
            (Phase::Probing { .. }, Sign::Bad | Sign::NoWay) => {
                pass.is_first.then(|| self.trip(now)).flatten()
            }
            (Phase::Trying(_) | Phase::Flowing, sign) => {
                if pass.is_first {
                    self.phase = Phase::Flowing;
                }
                let opens = match (sign, &mut self.window) {
                    (Sign::None, _) | (_, None) => false,
                    (Sign::Good, Some(window)) => {
                        window.count_good(1, now);
                        self.openings = 0;
                        false
                    }
                    (Sign::Bad, Some(window)) => window.count_failure(now),
                    (Sign::NoWay, Some(_)) => true,
                };
                opens.then(|| self.trip(now)).flatten()
            }
        }
    }

    /// The breaker opens.
    fn trip(&mut self, now: Instant) -> Option<GateNews> {
        let Some(window) = &self.window else {
            self.phase = Phase::Flowing;
            return None;
        };
        self.openings = self.openings.saturating_add(1);
        let until = clock::after(now, window.open_time(self.openings));
        self.close(Some(until), true);
        Some(GateNews::Opened(until, self.openings))
    }
}

impl Gate {
    /// Logs the change that a send has caused.
    pub(super) fn say(&self, news: GateNews, sign: Sign, now: Instant) {
        let (name, seconds) = (&self.name, |until: Instant| {
            until.saturating_duration_since(now).as_secs_f64()
        });
        match news {
            GateNews::Paused(code, Some(until)) => {
                log::warn!(event = "destination_parked", destination:% = name, reason = code.as_str(), seconds = seconds(until); "{name} asked to back off for {:.0?} ({code}): holding its messages, no attempts used", until.saturating_duration_since(now));
            }
            GateNews::Paused(code, None) => {
                log::error!(event = "destination_paused", destination:% = name, reason = code.as_str(); "paused {name} ({code}): holding its messages, no attempts used, until it is resumed (`diesel-outbox resume destination {name}`)");
            }
            GateNews::Opened(until, openings) => {
                let why = match sign {
                    Sign::NoWay => "cannot be reached",
                    _ => "fails too often",
                };
                log::warn!(event = "breaker_opened", destination:% = name, seconds = seconds(until), in_a_row = openings; "circuit breaker opened: {name} {why}; holding its messages for {:.0?}, no attempts used, then sending one as a probe", until.saturating_duration_since(now));
            }
            GateNews::Recovered => {
                log::info!(event = "breaker_closed", destination:% = name; "circuit breaker closed: {name} accepts messages again");
            }
        }
    }
}
