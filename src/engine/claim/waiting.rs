//! The claimer's waits while there is nothing to claim. Meanwhile it hands over the messages that the settlers have
//! claimed.

use std::time::{Duration, Instant};

use crossbeam_channel::Select;

use super::Claimer;
use super::intake::fill_all;
use crate::clock;
use crate::engine::host::database::Database;
use crate::engine::plan::{Awaited, Report, Wait};

/// A queue holds half a second of work, so senders that make progress make room within this time.
pub(crate) const SOON: Duration = Duration::from_millis(500);

impl<D: Database> Claimer<'_, D> {
    pub(super) fn wait_for(&mut self, wait: Wait) {
        self.begin_wait(&wait);
        let until = wait.until;
        // Messages of other destinations must not wait for room that comes late: commits must notify.
        let soon = until.min(clock::now() + SOON);
        let is_rung = if wait.what == Awaited::Room && soon < until {
            self.wait_until(soon) || {
                self.shared.signals.sleep.ask();
                self.wait_until(until)
            }
        } else {
            self.wait_until(until)
        };
        self.end_wait(&wait, is_rung);
    }

    pub(crate) fn begin_wait(&self, wait: &Wait) {
        if let Some(question) = wait.answers {
            self.shared.custody.answer(question);
        }
        if matches!(wait.what, Awaited::Work | Awaited::WorkOrRoom) {
            self.shared.signals.sleep.ask();
        }
    }

    pub(crate) fn end_wait(&mut self, wait: &Wait, is_rung: bool) {
        let what = wait.what;
        if what.is_room() {
            self.shared.custody.room_wanted.no_more();
        }
        let polls = matches!(what, Awaited::Work | Awaited::WorkOrRoom | Awaited::Turn);
        if polls && wait.is_poll && !is_rung {
            self.shared.metrics.polled.increment(1);
        }
        let is_nothing_in_flight = self.shared.custody.seen().is_nothing_in_flight;
        (self.planner).waited(clock::now(), what, is_rung, is_nothing_in_flight);
    }

    /// Waits for the doorbell, at most until `until`, and reads the inbox meanwhile. `true`: the claimer was woken.
    fn wait_until(&mut self, until: Instant) -> bool {
        loop {
            if self.is_woken() {
                return true;
            }
            let mut any = Select::new();
            any.recv(&self.shared.signals.doorbell.ear);
            any.recv(&self.shared.signals.news.ear);
            any.recv(&self.inbox);
            if any.ready_deadline(until).is_err() {
                return false;
            }
        }
    }

    /// Reads the bells and the inbox. `true`: the claimer must stop waiting.
    pub(crate) fn is_woken(&mut self) -> bool {
        if self.shared.signals.doorbell.ear.try_recv().is_ok() {
            return true;
        }
        if self.shared.signals.news.ear.try_recv().is_ok() {
            self.planner.hear(Report::News);
            return true;
        }
        while let Ok(told) = self.inbox.try_recv() {
            let wakes = told.wakes();
            self.hear_of(told);
            if wakes {
                return true;
            }
        }
        // Last, because the jobs just received may find no room, and then a sender must ring.
        self.fill_queues();
        false
    }

    /// Hands waiting jobs to the queues of the senders. If a queue still has no room, a sender rings later.
    pub(super) fn fill_queues(&mut self) {
        let shared = self.shared;
        fill_all(&mut self.intakes, || shared.custody.room_wanted.want());
    }
}
