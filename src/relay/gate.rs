//! What stands before a destination: its rate, its circuit breaker, and whether it is paused.
//!
//! The truth about pauses is the table `outbox_pause`, which all relays share. A gate closes at
//! once by what its own senders see; the claimer, which has a connection, writes that down and
//! tells the gate what the table says.

mod others;
mod outcomes;
mod standing;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use self::standing::Standing;

use super::breaker::{Window, sign};
use super::bucket::Bucket;
use crate::clock;
use crate::config::{Breaker, Destination, Rate};
use crate::dispatch::{Failure, Outcome, Pause};
use crate::lock::lock;
use crate::status::ReasonCode;

/// After a start or a pause one send goes first; the others wait for its answer, but no longer than
/// this. So a destination that is not ready costs one attempt, and a slow one is not held up.
const FIRST_SEND: Duration = Duration::from_millis(100);
/// Whoever waits looks at least this often whether its lease is good.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The gate of one destination.
pub(crate) struct Gate {
    name: Arc<str>,
    breaker: Option<Breaker>,
    /// Nothing limits sends just now: no lock is needed to let one through.
    is_free: AtomicBool,
    /// Good sends that are not in the window yet.
    good: AtomicU32,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    phase: Phase,
    bucket: Option<Bucket>,
    window: Option<Window>,
    /// How often in a row the breaker has opened.
    openings: u32,
    /// Until when the right to probe is this relay's.
    may_probe_until: Option<Instant>,
    /// What the table has to be told.
    news: Option<News>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Flowing,
    /// One send goes first. `began`: it is under way. `is_probe`: of a breaker, with no limit of time.
    Trying {
        began: Option<Instant>,
        is_probe: bool,
    },
    /// `then_probe`: what closed it is a breaker.
    Closed {
        until: Option<Instant>,
        then_probe: bool,
    },
}

/// A change that other relays have to know of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum News {
    /// Closed until then, or until an operator resumes it.
    Paused(ReasonCode, Option<Instant>),
    /// The breaker is open until then, for the nth time in a row.
    Opened(Instant, u32),
    /// A probe went well.
    Recovered,
}

/// How many messages a destination takes just now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// None.
    Closed,
    /// One, as a probe.
    One,
    /// As many as its queue takes.
    Free,
}

/// What is to be done about a gate whose time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    /// Ask the table who may probe.
    Probe,
}

/// The right to one send.
#[derive(Debug)]
#[must_use]
pub(crate) struct Pass {
    is_first: bool,
}

/// What a gate says to a send.
#[derive(Debug)]
pub(super) enum Admission {
    Pass(Pass),
    Closed,
    Wait(Duration),
}

impl Gate {
    pub(crate) fn new(destination: &Destination) -> Self {
        let now = clock::now();
        let state = State {
            phase: Phase::Trying {
                began: None,
                is_probe: false,
            },
            bucket: destination.rate.map(|rate| Bucket::new(rate, now)),
            window: destination.breaker.map(Window::new),
            openings: 0,
            may_probe_until: None,
            news: None,
        };
        Self::with(destination.name.as_str().into(), destination.breaker, state)
    }

    /// One that only an operator closes.
    pub(crate) fn open(name: &str, rate: Option<Rate>) -> Self {
        let now = clock::now();
        let state = State {
            phase: Phase::Flowing,
            bucket: rate.map(|rate| Bucket::new(rate, now)),
            window: None,
            openings: 0,
            may_probe_until: None,
            news: None,
        };
        Self::with(name.into(), None, state)
    }

    fn with(name: Arc<str>, breaker: Option<Breaker>, state: State) -> Self {
        Self {
            name,
            breaker,
            is_free: AtomicBool::new(state.is_free()),
            good: AtomicU32::new(0),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// To be called with the lock, after a change of the phase: all who have to know, know.
    fn changed(&self, state: &State) {
        self.is_free.store(state.is_free(), Ordering::Release);
        self.changed.notify_all();
    }

    /// Waits for the right to one send, while `is_wanted`. `None`: it is not wanted any more, or
    /// the gate is closed.
    pub(crate) fn admit(&self, is_wanted: impl Fn() -> bool) -> Option<Pass> {
        if self.is_free.load(Ordering::Acquire) {
            return is_wanted().then_some(Pass { is_first: false });
        }
        let mut state = self.lock();
        loop {
            if !is_wanted() {
                return None;
            }
            let wait = match self.try_admit(&mut state, clock::now()) {
                Admission::Pass(pass) => return Some(pass),
                Admission::Closed => return None,
                Admission::Wait(wait) => wait.min(LONGEST_WAIT),
            };
            (state, _) = self
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn try_admit(&self, state: &mut State, now: Instant) -> Admission {
        match state.phase {
            Phase::Closed { .. } => return Admission::Closed,
            Phase::Trying {
                began: Some(began),
                is_probe,
            } => {
                let waited = now.saturating_duration_since(began);
                if is_probe {
                    return Admission::Wait(LONGEST_WAIT);
                }
                if waited < FIRST_SEND {
                    return Admission::Wait(FIRST_SEND - waited);
                }
                state.phase = Phase::Flowing;
                self.changed(state);
            }
            Phase::Flowing | Phase::Trying { began: None, .. } => {}
        }
        match state.bucket.as_mut().map_or(Ok(()), |b| b.take(now)) {
            Ok(()) => Admission::Pass(state.pass(now)),
            Err(wait) => Admission::Wait(wait),
        }
    }

    /// The right to one send, or how long to wait for it, for who must not wait here.
    #[cfg(test)]
    pub(super) fn ask(&self) -> Admission {
        self.try_admit(&mut self.lock(), clock::now())
    }

    /// Nothing was sent.
    pub(crate) fn give_back(&self, pass: &Pass) {
        let mut state = self.lock();
        if let (true, Phase::Trying { began, .. }) = (pass.is_first, &mut state.phase) {
            *began = None;
            self.changed.notify_all();
        }
    }

    /// What came of the send. `true`: the table has to be told.
    pub(crate) fn record(&self, pass: &Pass, outcome: &Outcome) -> bool {
        if matches!(outcome, Outcome::Delivered(_)) && self.is_free.load(Ordering::Acquire) {
            self.good.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let now = clock::now();
        let mut state = self.lock();
        self.count_good(&mut state, now);
        let before = state.phase;
        if let Some((pause, failure)) = pause_of(outcome) {
            self.pause(&mut state, pause, failure, now);
        } else {
            self.count(&mut state, pass, sign(outcome), now);
        }
        if state.phase != before {
            self.changed(&state);
        }
        state.news.is_some()
    }

    /// Good sends that needed no lock are counted here, no later than a poll after they were made.
    fn count_good(&self, state: &mut State, now: Instant) {
        let good = self.good.swap(0, Ordering::Relaxed);
        if good > 0 {
            state.openings = 0;
            if let Some(window) = &mut state.window {
                window.count_good(good, now);
            }
        }
    }

    /// How many messages may be claimed for it.
    pub(crate) fn room(&self) -> Room {
        match self.lock().phase {
            Phase::Flowing
            | Phase::Trying {
                is_probe: false, ..
            } => Room::Free,
            Phase::Trying {
                began: None,
                is_probe: true,
            } => Room::One,
            Phase::Trying { .. } | Phase::Closed { .. } => Room::Closed,
        }
    }

    /// Whether this relay has the right to probe and has not used it.
    pub(crate) fn has_unused_probe(&self) -> bool {
        let unused = Phase::Trying {
            began: None,
            is_probe: true,
        };
        let state = self.lock();
        let is_ours = state
            .may_probe_until
            .is_some_and(|until| clock::now() < until);
        is_ours && state.phase == unused
    }

    /// When it opens by itself.
    pub(crate) fn opens_at(&self) -> Option<Instant> {
        match self.lock().phase {
            Phase::Closed { until, .. } => until,
            Phase::Flowing | Phase::Trying { .. } => None,
        }
    }

    /// Opens it where its time is over and no breaker has closed it.
    pub(crate) fn open_in_time(&self, now: Instant) -> Due {
        let mut state = self.lock();
        self.count_good(&mut state, now);
        let is_unused = matches!(
            state.phase,
            Phase::Trying {
                began: None,
                is_probe: true
            }
        );
        if is_unused && state.may_probe_until.is_none_or(|until| now >= until) {
            // Nothing was there to be sent. Another relay may have the right by now.
            state.close(Some(now), true);
            self.changed(&state);
        }
        let Phase::Closed {
            until: Some(until),
            then_probe,
        } = state.phase
        else {
            return Due::Nothing;
        };
        if now < until || state.news.is_some() {
            return Due::Nothing;
        }
        if then_probe {
            return Due::Probe;
        }
        log::info!(event = "destination_resumed", destination:% = self.name; "the time of {}'s pause is over", self.name);
        self.try_first(&mut state, false);
        Due::Nothing
    }

    /// This relay may probe, for as long as this.
    pub(crate) fn begin_probe(&self, hold: Duration) {
        let mut state = self.lock();
        state.may_probe_until = Some(later(clock::now(), hold));
        self.try_first(&mut state, true);
    }

    fn try_first(&self, state: &mut State, is_probe: bool) {
        state.phase = Phase::Trying {
            began: None,
            is_probe,
        };
        self.changed(state);
    }
}

impl State {
    /// Whether sends need no lock.
    fn is_free(&self) -> bool {
        self.phase == Phase::Flowing && self.bucket.is_none()
    }

    fn pass(&mut self, now: Instant) -> Pass {
        let Phase::Trying { began, .. } = &mut self.phase else {
            return Pass { is_first: false };
        };
        *began = Some(now);
        Pass { is_first: true }
    }

    fn flow(&mut self) {
        self.phase = Phase::Flowing;
        if let Some(window) = &mut self.window {
            window.clear();
        }
    }

    fn close(&mut self, until: Option<Instant>, then_probe: bool) {
        self.phase = Phase::Closed { until, then_probe };
        if let Some(window) = &mut self.window {
            window.clear();
        }
    }
}

fn pause_of(outcome: &Outcome) -> Option<(Pause, &Failure)> {
    match outcome {
        Outcome::Delivered(_) => None,
        Outcome::Retry(failure) | Outcome::Wait(failure) | Outcome::Dead(failure) => failure
            .pause
            .filter(|pause| *pause != Pause::For(Duration::ZERO))
            .map(|pause| (pause, failure)),
    }
}

/// A year: further away than the clock can say is never.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

fn later(now: Instant, duration: Duration) -> Instant {
    now + duration.min(FAR)
}

#[cfg(test)]
mod tests;
