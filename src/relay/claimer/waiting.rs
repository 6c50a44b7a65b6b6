//! What the claimer does while there is nothing to claim: it waits, and passes on what the settlers have
//! claimed.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{never, select};

use super::Claimer;
use crate::relay::intake::Intake;

/// A queue holds half a second's work: senders that get on make room within this time.
const SOON: Duration = Duration::from_millis(500);

impl Claimer<'_> {
    /// Until the poll interval is over, a destination opens, or something is due that this look has left out.
    pub(super) fn until_next_look(&self) -> Duration {
        let now = Instant::now();
        let has_keyed = self.lanes.has_keyed(|to| self.shared.is_open(to));
        let walk = self.walk.owed_at(self.look.began).filter(|_| has_keyed);
        self.shared
            .bulkheads
            .iter()
            .filter_map(|bulkhead| bulkhead.gate.opens_at())
            .chain(walk)
            .chain(
                self.lanes
                    .owed_at(self.look.began, |to| self.shared.is_open(to)),
            )
            .chain(self.looks.owed_at())
            .chain(self.patrol.next_at())
            .chain(self.expiry.goes_on_at())
            .map(|at| at.saturating_duration_since(now))
            .fold(self.shared.config.poll_interval, Duration::min)
    }

    /// Waits until a sender makes room. Where that takes its time, others' messages must not wait for it:
    /// whoever commits one shall ring.
    pub(super) fn wait_for_room(&mut self) {
        let until = Instant::now() + self.until_next_look();
        if self.wait(SOON.min(self.until_next_look())) || Instant::now() >= until {
            return;
        }
        self.shared.fall_asleep();
        self.wait(until.saturating_duration_since(Instant::now()));
    }

    /// Waits for the doorbell or the time, and hands over what the settlers have claimed meanwhile.
    /// `true`: the doorbell rang.
    pub(super) fn wait(&mut self, duration: Duration) -> bool {
        let now = Instant::now();
        // Nobody waits for a day.
        let until = now + duration.min(Duration::from_secs(24 * 3600));
        loop {
            self.fill_queues();
            select! {
                recv(self.doorbell) -> _ => return true,
                recv(self.continued) -> continued => match continued {
                    Ok(continued) => self.hand_over_continued(continued),
                    // Both settlers of keys have ended by a defect, and the relay has failed. Until
                    // somebody ends it, nothing comes any more.
                    Err(_) => self.continued = never(),
                },
                default(until.saturating_duration_since(Instant::now())) => return false,
            }
        }
    }

    /// Hands the senders what their queues had no room for. Where they still have none, a sender rings.
    pub(super) fn fill_queues(&mut self) {
        self.intakes.iter_mut().for_each(Intake::fill);
        if self.intakes.iter().any(Intake::is_full) {
            self.want_room(true);
            // Once more: a sender that made room before the flags were up did not ring.
            self.intakes.iter_mut().for_each(Intake::fill);
        }
    }

    pub(super) fn take_continued(&mut self) {
        self.fill_queues();
        while let Ok(continued) = self.continued.try_recv() {
            self.hand_over_continued(continued);
        }
    }

    pub(super) fn want_room(&self, is_wanted: bool) {
        for bulkhead in &self.shared.bulkheads {
            bulkhead.wants_room.store(is_wanted, Ordering::Release);
        }
    }
}
