//! The gate of a destination: its rate limit, its circuit breaker and its pauses.
//!
//! All relays share the table `outbox_pause`, which decides about pauses. A gate closes at once when the results of
//! its own senders require it. The claimer has a connection: it records the change in the table, and tells the gate
//! the state of the table.

mod others;
mod outcomes;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::breaker::{Window, sign};
use super::bucket::Bucket;
use crate::clock;
use crate::delivery::{Breaker, Rate};
use crate::dispatch::{Failure, Outcome, Pause, unwound};
use crate::lock::lock;
use crate::log;
use crate::status::ReasonCode;
use crate::words::words;

/// After a start or a pause, one send goes first. The other sends wait for its response, but no longer than this. So a
/// destination that is not ready costs one attempt, and a slow destination is not held up.
const FIRST_SEND: Duration = Duration::from_millis(100);
/// For how long a gate is held after this relay could not send: doubled each time in a row.
const SHORTEST_HOLD: Duration = Duration::from_millis(100);
const LONGEST_HOLD: Duration = Duration::from_secs(10);
/// A waiting sender checks its lease at least this often.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// A row that another session has locked is tried again after this time. Each try may take 20 ms.
const LOCKED_ROW: Duration = Duration::from_secs(1);

/// The gate of one destination.
pub(crate) struct Gate {
    name: Arc<str>,
    /// Whether nothing limits sends: a send then passes without the lock.
    is_free: AtomicBool,
    /// Successful sends that the window has not counted yet.
    good: AtomicU32,
    /// Who else learns from the results of sends.
    learner: Option<Arc<dyn Learner>>,
    state: Mutex<GateState>,
    changed: Condvar,
}

struct GateState {
    phase: Phase,
    bucket: Option<Bucket>,
    window: Option<Window>,
    /// How often in a row the breaker has opened.
    openings: u32,
    /// Until when this relay has the right to probe.
    may_probe_until: Option<Instant>,
    /// The change to record in the table.
    news: Option<GateNews>,
    /// When to try again to change a row of this destination, which another session has locked.
    row_wanted_at: Option<Instant>,
    /// Why this relay could not send, until a send has had a response.
    trouble: Option<Trouble>,
}

/// Why this relay could not send, for reasons of its own.
#[derive(Debug, Clone)]
pub(crate) struct Trouble {
    pub(crate) code: ReasonCode,
    pub(crate) what: String,
    /// How often in a row the gate was held.
    times: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Flowing,
    /// One send goes first, and is in flight since this time.
    Trying(Option<Instant>),
    /// The same after the breaker has opened, without a time limit.
    Probing {
        is_in_flight: bool,
    },
    /// `then_probe`: the breaker has closed the gate.
    Closed {
        until: Option<Instant>,
        then_probe: bool,
    },
    /// This relay never sends to the destination again: its code panicked. Other relays and the table do not learn of it.
    Refused,
    /// This relay could not send, for reasons of its own. Other relays and the table do not learn of it.
    /// `then_probe`: this relay has the right to probe, and keeps it.
    Held {
        until: Instant,
        then_probe: bool,
    },
}

/// A change that other relays must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GateNews {
    /// Paused until this time, or until the destination is resumed.
    Paused(ReasonCode, Option<Instant>),
    /// The breaker is open until this time, for the nth time in a row.
    Opened(Instant, u32),
    /// A probe has succeeded.
    Recovered,
}

/// When gates and the table of pauses are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExchangeTime {
    Running {
        /// Whether this relay may ask for the right to probe.
        may_probe: bool,
    },
    /// The claimer has ended. Each change is tried once, and unused rights to probe are given back.
    AtTheEnd,
}

/// How many messages a destination can take now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// None.
    Closed,
    /// One, as a probe.
    One,
    /// As many as its queue holds.
    Free,
}

words! {
    /// The state of a gate.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Standing {
        Flowing = "flowing",
        /// One send goes first.
        Trying = "trying",
        Paused = "paused",
        BreakerOpen = "breaker_open",
        /// This relay could not send, for reasons of its own.
        Held = "held",
    }
}

/// Learns from the results of sends to a destination what its gate does not record.
pub(crate) trait Learner: Send + Sync {
    /// Notes the result of a send. Whether [`learn`](Self::learn) must be called for it, although it is a success.
    fn note(&self, outcome: &Outcome, now: Instant) -> bool;

    /// Whether the destination ends with this result, so that a pause says nothing.
    fn learn(&self, outcome: &Outcome, now: Instant) -> bool;

    /// Whether something must be recorded.
    fn has_news(&self) -> bool;

    /// Forgets what must be recorded.
    fn forget_news(&self);
}

/// The right to one send.
#[derive(Debug)]
#[must_use]
pub(crate) struct Pass {
    is_first: bool,
}

/// A gate's decision about a send.
#[derive(Debug)]
pub(crate) enum Admission {
    Pass(Pass),
    Closed,
    Wait(Duration),
}

impl Gate {
    pub(crate) fn new(
        name: &str,
        rate: Option<Rate>,
        breaker: Option<Breaker>,
        learner: Option<Arc<dyn Learner>>,
    ) -> Self {
        let state = GateState {
            phase: Phase::Trying(None),
            bucket: rate.map(|rate| Bucket::new(rate, clock::now())),
            window: breaker.map(Window::new),
            openings: 0,
            may_probe_until: None,
            news: None,
            row_wanted_at: None,
            trouble: None,
        };
        Self {
            name: name.into(),
            is_free: AtomicBool::new(state.is_free()),
            good: AtomicU32::new(0),
            learner,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// A gate that only an operator closes.
    pub(crate) fn open(name: &str, rate: Option<Rate>) -> Self {
        let gate = Self::new(name, rate, None, None);
        gate.turn(&mut gate.lock(), Phase::Flowing);
        gate
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        lock(&self.state)
    }

    /// Announces a change of the phase. Must be called with the lock.
    fn changed(&self, state: &GateState) {
        self.is_free.store(state.is_free(), Ordering::Release);
        self.changed.notify_all();
    }

    /// Waits for the right to one send, while `is_wanted`. `None`: the send is no longer wanted, or the gate is closed.
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

    /// The right to one send, or when to ask again. Does not wait.
    pub(crate) fn try_pass(&self, now: Instant) -> Admission {
        if self.is_free.load(Ordering::Acquire) {
            return Admission::Pass(Pass { is_first: false });
        }
        self.try_admit(&mut self.lock(), now)
    }

    /// Shares the rate limit between this many relays.
    pub(crate) fn share(&self, relays: u32) {
        if let Some(bucket) = &mut self.lock().bucket {
            bucket.share(relays);
        }
    }

    /// Whether a change must be recorded in a table.
    pub(crate) fn has_news(&self) -> bool {
        self.lock().news.is_some() || self.learner.as_ref().is_some_and(|one| one.has_news())
    }

    fn try_admit(&self, state: &mut GateState, now: Instant) -> Admission {
        match state.phase {
            Phase::Closed { .. } | Phase::Held { .. } | Phase::Refused => return Admission::Closed,
            Phase::Probing { is_in_flight: true } => return Admission::Wait(LONGEST_WAIT),
            // The first send decides whether this relay can send at all.
            Phase::Trying(Some(_)) if state.trouble.is_some() => {
                return Admission::Wait(LONGEST_WAIT);
            }
            Phase::Trying(Some(began)) => {
                let waited = now.saturating_duration_since(began);
                if waited < FIRST_SEND {
                    return Admission::Wait(FIRST_SEND - waited);
                }
                state.phase = Phase::Flowing;
                self.changed(state);
            }
            Phase::Flowing | Phase::Trying(None) | Phase::Probing { .. } => {}
        }
        match state.bucket.as_mut().map_or(Ok(()), |b| b.take(now)) {
            Ok(()) => {
                let is_first = state.send_first(Some(now));
                Admission::Pass(Pass { is_first })
            }
            Err(wait) => Admission::Wait(wait),
        }
    }

    /// Returns an unused pass.
    pub(crate) fn return_pass(&self, pass: &Pass) {
        if pass.is_first {
            self.lock().send_first(None);
            self.changed.notify_all();
        }
    }

    /// Learns the result of a send. Returns `true` if the claimer must know: a change must be recorded in the table, or
    /// this relay can send again.
    pub(crate) fn record(&self, pass: &Pass, outcome: &Outcome) -> bool {
        let learner = self.learner.as_deref();
        let must_learn = learner.is_some_and(|one| one.note(outcome, clock::now()));
        if matches!(outcome, Outcome::Delivered(_))
            && self.is_free.load(Ordering::Acquire)
            && !must_learn
        {
            self.good.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let now = clock::now();
        let mut state = self.lock();
        if state.phase == Phase::Refused {
            return false;
        }
        let is_ended = learner.is_some_and(|one| one.learn(outcome, now));
        self.count_good(&mut state, now);
        let before = state.phase;
        let (mut can_send_again, mut is_held) = (false, false);
        let pause = pause_of(outcome).filter(|_| !is_ended);
        let news = match (pause, own_trouble(outcome)) {
            (Some((pause, failure)), _) => state.pause(pause, failure.code, now),
            (None, Some(failure)) => {
                is_held = hold(&mut state, failure, now);
                None
            }
            (None, None) => {
                can_send_again = state.trouble.take().is_some();
                state.count(pass, sign(outcome), now)
            }
        };
        if state.phase != before {
            self.changed(&state);
        }
        state.news = news.or(state.news);
        let has_news = state.news.is_some() || learner.is_some_and(Learner::has_news);
        drop(state);
        if let Some(news) = news {
            self.say(news, sign(outcome), now);
        }
        if is_held && let Some(failure) = own_trouble(outcome) {
            log::warn!(event = "send_held", destination:% = self.name, reason = failure.code.as_str(), error = failure.error; "cannot send to {} ({}: {}): holding its messages, no attempts used, trying again soon", self.name, failure.code, failure.error);
        }
        has_news || can_send_again
    }

    /// Runs code of this relay for the destination. `None`: the code panicked, and this relay sends to the destination no
    /// more.
    // Why: docs/decisions.md#numbers-from-outside
    pub(crate) fn guard<T>(&self, run: impl FnOnce() -> T) -> Option<T> {
        unwound(run).map_err(|panic| self.refuse(&panic)).ok()
    }

    /// Closes the gate for good, because this relay's code panicked for the destination. The row and its owner are not to
    /// blame: another relay may be of another version.
    fn refuse(&self, panic: &str) {
        let mut state = self.lock();
        if state.phase == Phase::Refused {
            return;
        }
        // What the panic left behind is not told to anybody.
        (state.news, state.row_wanted_at, state.may_probe_until) = (None, None, None);
        if let Some(learner) = &self.learner {
            learner.forget_news();
        }
        self.good.store(0, Ordering::Relaxed);
        state.trouble = Some(Trouble {
            code: ReasonCode::Panic,
            what: format!(
                "this relay panicked{panic}, and sends nothing to the destination until its row changes or the relay is restarted"
            ),
            times: 1,
        });
        self.turn(&mut state, Phase::Refused);
        drop(state);
        log::error!(event = "endpoint_refused", destination:% = self.name; "this relay panicked{panic} for {}, which is a bug: it releases the messages of the destination and sends it no more; other relays do", self.name);
    }

    /// Why this relay cannot send to the destination, for reasons of its own.
    pub(crate) fn trouble(&self) -> Option<Trouble> {
        let has_sent = self.good.load(Ordering::Relaxed) > 0;
        self.lock().trouble.clone().filter(|_| !has_sent)
    }

    /// Counts the successful sends that passed without the lock, at most a poll interval later.
    fn count_good(&self, state: &mut GateState, now: Instant) {
        let good = self.good.swap(0, Ordering::Relaxed);
        if good > 0 {
            state.trouble = None;
            state.openings = 0;
            if let Some(window) = &mut state.window {
                window.count_good(good, now);
            }
        }
    }

    /// How many messages may be claimed for the destination.
    pub(crate) fn room(&self) -> Room {
        let state = self.lock();
        match state.phase {
            Phase::Trying(None) if state.trouble.is_some() => Room::One,
            Phase::Trying(Some(_)) if state.trouble.is_some() => Room::Closed,
            Phase::Flowing | Phase::Trying(_) => Room::Free,
            UNUSED_PROBE => Room::One,
            Phase::Probing { .. } | Phase::Closed { .. } => Room::Closed,
            Phase::Held { .. } | Phase::Refused => Room::Closed,
        }
    }

    /// Whether the destination has a rate limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.lock().bucket.is_some()
    }

    /// The state of the gate.
    pub(crate) fn standing(&self) -> Standing {
        let state = self.lock();
        match state.phase {
            Phase::Flowing => Standing::Flowing,
            Phase::Trying(_) if state.trouble.is_some() => Standing::Held,
            Phase::Trying(_) | Phase::Probing { .. } => Standing::Trying,
            Phase::Closed { then_probe, .. } if then_probe => Standing::BreakerOpen,
            Phase::Closed { .. } => Standing::Paused,
            Phase::Held { .. } | Phase::Refused => Standing::Held,
        }
    }

    /// Whether this relay has the right to probe and has not used it.
    pub(crate) fn has_unused_probe(&self) -> bool {
        let state = self.lock();
        let is_in_time = |until: Instant| clock::now() < until;
        let is_used = state.phase == Phase::Probing { is_in_flight: true };
        state.is_probing() && !is_used && state.may_probe_until.is_some_and(is_in_time)
    }

    /// When the pause expires, or a locked row is to be tried again.
    pub(crate) fn opens_at(&self) -> Option<Instant> {
        let state = self.lock();
        if state.row_wanted_at.is_some() {
            return state.row_wanted_at;
        }
        match state.phase {
            Phase::Closed { until, .. } => until,
            Phase::Held { until, .. } => Some(until),
            Phase::Flowing | Phase::Trying(_) | Phase::Probing { .. } | Phase::Refused => None,
        }
    }

    /// Opens the gate if its pause has expired. Whether a breaker has closed the gate, so that the table must be asked who
    /// may probe.
    pub(crate) fn open_in_time(&self, now: Instant) -> bool {
        let mut state = self.lock();
        self.count_good(&mut state, now);
        if let Phase::Held { until, then_probe } = state.phase {
            if now < until {
                return false;
            }
            let next = match then_probe {
                true => UNUSED_PROBE,
                false => Phase::Trying(None),
            };
            self.turn(&mut state, next);
        }
        let may_probe = |until: Instant| now < until;
        if state.phase == UNUSED_PROBE && !state.may_probe_until.is_some_and(may_probe) {
            // There was no message to send. Another relay may have the right to probe by now.
            state.close(Some(now), true);
            self.changed(&state);
        }
        let Phase::Closed {
            until: Some(until),
            then_probe,
        } = state.phase
        else {
            return false;
        };
        if now < until || state.news.is_some() {
            return false;
        }
        if then_probe {
            return true;
        }
        self.turn(&mut state, Phase::Trying(None));
        drop(state);
        log::info!(event = "destination_resumed", destination:% = self.name; "the pause of {} has expired: sending again", self.name);
        false
    }

    /// Gives this relay the right to probe for this long.
    pub(crate) fn begin_probe(&self, hold: Duration) {
        let mut state = self.lock();
        if state.phase == Phase::Refused {
            return;
        }
        state.may_probe_until = Some(clock::after(clock::now(), hold));
        self.turn(&mut state, UNUSED_PROBE);
    }

    fn turn(&self, state: &mut GateState, phase: Phase) {
        state.phase = phase;
        self.changed(state);
    }
}

/// This relay has the right to probe, and has not sent a message yet.
const UNUSED_PROBE: Phase = Phase::Probing {
    is_in_flight: false,
};

/// Holds the gate for a while, because this relay could not send. The destination has not failed. Returns whether this is
/// news.
fn hold(state: &mut GateState, failure: &Failure, now: Instant) -> bool {
    if matches!(state.phase, Phase::Closed { .. } | Phase::Held { .. }) {
        return false;
    }
    let times = state.trouble.as_ref().map_or(0, |trouble| trouble.times);
    state.trouble = Some(Trouble {
        code: failure.code,
        what: failure.error.clone(),
        times: times.saturating_add(1),
    });
    // The right to probe stays with this relay: no send was made.
    let then_probe = matches!(state.phase, Phase::Probing { .. });
    let hold = SHORTEST_HOLD.saturating_mul(2_u32.saturating_pow(times.min(16)));
    let until = clock::after(now, hold.min(LONGEST_HOLD));
    state.phase = Phase::Held { until, then_probe };
    times == 0
}

impl GateState {
    /// Whether sends pass without the lock.
    fn is_free(&self) -> bool {
        self.phase == Phase::Flowing && self.bucket.is_none()
    }

    /// Whether this relay has had the right to probe since the breaker opened.
    fn is_probing(&self) -> bool {
        match self.phase {
            Phase::Held { then_probe, .. } => then_probe,
            phase => matches!(phase, Phase::Probing { .. }),
        }
    }

    /// If one send goes first, records that it begins `now`, or (`None`) that it was not made. Returns whether one send
    /// goes first.
    fn send_first(&mut self, now: Option<Instant>) -> bool {
        match &mut self.phase {
            Phase::Trying(began) => *began = now,
            Phase::Probing { is_in_flight } => *is_in_flight = now.is_some(),
            Phase::Flowing | Phase::Closed { .. } => return false,
            Phase::Held { .. } | Phase::Refused => return false,
        }
        true
    }

    fn close(&mut self, until: Option<Instant>, then_probe: bool) {
        self.phase = Phase::Closed { until, then_probe };
        self.clear();
    }

    /// Forgets the results of earlier sends.
    fn clear(&mut self) {
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

/// The failure of this relay itself, of its machine, its proxy or its settings.
fn own_trouble(outcome: &Outcome) -> Option<&Failure> {
    use ReasonCode::{BlockedAddress, Proxy, Shortage};

    let is_own = |failure: &Failure| matches!(failure.code, Shortage | Proxy | BlockedAddress);
    match outcome {
        Outcome::Wait(failure) if is_own(failure) => Some(failure),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
