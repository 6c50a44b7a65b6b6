//! Undoing a claim without an answer: releasing the messages that it took and that this process does not know, while
//! everything else continues.
//!
//! First it is found out whether the claim may still be running. Then a pass over the outbox releases what the lease
//! holds and this process does not know, a part each round. If the claim may still have been running, this is repeated
//! later. If another session has locked some of the messages, their parts are repeated.

use std::time::{Duration, Instant};

use super::Undo;
use super::pace::{Last, Pace};
use super::ranges::Ranges;
use crate::engine::claim::doubt::{AtWork, Doubt};
use crate::engine::settle::sql::settle::Released;
use crate::sql::range::Range;

/// How long an undo waits before it is repeated: doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A server process notices within this time that its client is gone. Until then, a pass could miss what the process
/// commits.
const NOTICED: Duration = Duration::from_secs(2);
/// How long the release of a part waits for settlers that continue keys.
const WHILE_CONTINUING: Duration = Duration::from_millis(5);
/// The most ranges that are remembered to be read again. Of more, the last becomes wider.
const MOST_LEFT: usize = 64;

// Why: docs/decisions.md#doubt
#[derive(Debug)]
pub(super) struct Undoing {
    pub(super) doubt: Doubt,
    /// When the next step is due.
    pub(super) at: Instant,
    pause: Duration,
    stage: UndoingStage,
    /// The number of released messages.
    count: usize,
}

#[derive(Debug)]
enum UndoingStage {
    /// It is not known whether the claim may still be running.
    Look,
    Pass(Passing),
    Done,
}

/// A pass over all ranges, or over those in which messages were left.
#[derive(Debug)]
struct Passing {
    ranges: Ranges,
    /// Whether the claim may still have been running when the pass began: messages may be left anywhere.
    may_run: bool,
    /// The ranges in which messages are left.
    left: Vec<Range>,
    /// The time of the statements that must be repeated, without what the relay has done between them.
    took: Duration,
}

impl Passing {
    fn new(ranges: Ranges, may_run: bool) -> Self {
        Self {
            ranges,
            may_run,
            left: Vec::new(),
            took: Duration::ZERO,
        }
    }

    /// Messages of a range were released. Returns whether this was the last range.
    fn read(&mut self, range: Range, are_some_locked: bool, took: Duration) -> bool {
        if are_some_locked {
            let are_many = self.left.len() >= MOST_LEFT;
            match self.left.last_mut().filter(|_| are_many) {
                Some(last) => last.upto = range.upto,
                None => self.left.push(range),
            }
        }
        if are_some_locked || self.may_run {
            self.took += took;
        }
        self.ranges.read(range.upto, took);
        self.ranges.next().is_none()
    }
}

impl Undoing {
    /// `before`: the undo of an earlier doubt, which ends here. The messages of this claim may be in ranges that it has
    /// passed.
    pub(super) fn new(now: Instant, doubt: Doubt, before: Option<Self>) -> Self {
        Self {
            doubt,
            at: now,
            pause: FIRST_PAUSE,
            stage: UndoingStage::Look,
            count: before.map_or(0, |before| before.count),
        }
    }

    /// The next step, if it is due.
    pub(super) fn next(&self, now: Instant) -> Option<Undo> {
        if now < self.at {
            return None;
        }
        let (doubt, released) = (self.doubt.clone(), Some(self.count));
        Some(match &self.stage {
            UndoingStage::Look => Undo::Look(doubt),
            UndoingStage::Pass(pass) => Undo::Part(pass.ranges.next()?),
            UndoingStage::Done => Undo::End { doubt, released },
        })
    }

    /// Learns whether the claim may still be running. It has taken no message after `newest`.
    pub(super) fn looked(&mut self, now: Instant, at_work: AtWork, newest: i64) {
        let lasts = now.saturating_duration_since(self.doubt.last);
        self.stage = match at_work == AtWork::Yes && lasts < NOTICED {
            true => self.later(now, Duration::ZERO, UndoingStage::Look),
            false => UndoingStage::Pass(Passing::new(Ranges::until(newest), at_work != AtWork::No)),
        };
    }

    /// A settler is continuing keys: the part is released when it is known what the settler has claimed.
    pub(super) fn is_put_off(&mut self, now: Instant) {
        self.at = now + WHILE_CONTINUING;
    }

    /// Messages of a part were released; `None`: the statement took too long. Returns whether this was the last part of a
    /// pass.
    pub(super) fn learn(
        &mut self,
        now: Instant,
        range: Range,
        released: Option<Released>,
        took: Duration,
    ) -> bool {
        let UndoingStage::Pass(pass) = &mut self.stage else {
            return false;
        };
        let Some(released) = released else {
            pass.ranges.was_too_wide();
            return false;
        };
        self.count += released.messages;
        if !pass.read(range, released.are_some_locked, took) {
            return false;
        }
        let (took, left) = (pass.took, std::mem::take(&mut pass.left));
        self.stage = match (pass.may_run, left.is_empty()) {
            (true, _) => self.later(now, took, UndoingStage::Look),
            (false, true) => UndoingStage::Done,
            (false, false) => {
                let again = Passing::new(Ranges::again(left), false);
                self.later(now, took, UndoingStage::Pass(again))
            }
        };
        true
    }

    /// A stage that begins later. The statements that it repeats took this long.
    fn later(&mut self, now: Instant, took: Duration, stage: UndoingStage) -> UndoingStage {
        let last = Last { ended: now, took };
        self.at = Pace::of_search(self.pause).next(last);
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
        stage
    }
}
