//! What the claimer does while there is nothing to claim: it waits, and passes on what the settlers have
//! claimed.

use std::time::{Duration, Instant};

use crossbeam_channel::select;

use super::Claimer;
use crate::relay::intake::fill_all;
use crate::relay::planner::{Awaited, Wait};
use crate::relay::wanted::Want;

/// A queue holds half a second's work: senders that get on make room within this time.
const SOON: Duration = Duration::from_millis(500);

impl Claimer<'_> {
    pub(super) fn wait_for(&mut self, wait: Wait) {
        let Wait {
            what,
            until,
            answers,
        } = wait;
        if let Some(question) = answers {
            self.shared.idle().answer(question);
        }
        if what == Awaited::Work {
            self.shared.fall_asleep();
        }
        let is_rung = match what {
            Awaited::Room => self.wait_for_room(until),
            _ => self.wait_until(until),
        };
        if matches!(what, Awaited::Work | Awaited::Turn) && !is_rung {
            self.shared.metrics.polled.increment(1);
        }
        let is_nothing_in_flight = self.shared.is_nothing_in_flight();
        (self.planner).waited(Instant::now(), what, is_rung, is_nothing_in_flight);
    }

    /// Waits until a sender makes room. Where that takes its time, others' messages must not wait for it:
    /// whoever commits one shall ring.
    fn wait_for_room(&mut self, until: Instant) -> bool {
        let soon = until.min(Instant::now() + SOON);
        let mut is_rung = self.wait_until(soon);
        if !is_rung && soon < until {
            self.shared.fall_asleep();
            is_rung = self.wait_until(until);
        }
        self.shared.wanted.no_more(Want::Room);
        is_rung
    }

    /// Waits for the doorbell or the time, and hears what it is told meanwhile.
    /// `true`: the doorbell rang.
    pub(super) fn wait_until(&mut self, until: Instant) -> bool {
        loop {
            self.fill_queues();
            select! {
                recv(self.ears.ring) -> _ => return true,
                recv(self.ears.new) -> _ => {
                    self.planner.has_news();
                    return true;
                }
                recv(self.ears.inbox) -> told => match told {
                    Ok(told) => {
                        let wakes = told.wakes();
                        self.hear_of(told);
                        if wakes {
                            return true;
                        }
                    }
                    // Whoever tells something has its other end, as this relay does.
                    Err(_) => return false,
                },
                default(until.saturating_duration_since(Instant::now())) => return false,
            }
        }
    }

    /// Hands the senders what their queues had no room for. Where they still have none, a sender rings.
    pub(super) fn fill_queues(&mut self) {
        let shared = self.shared;
        fill_all(&mut self.intakes, || shared.wanted.want(Want::Room));
    }
}
