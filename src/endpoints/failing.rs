//! Since when an endpoint has failed: what the sends of this relay show, and what the table says.
//!
//! The table holds the time of the first failure since the last success, whatever the rate of traffic. The relays write
//! only changes: the first failure, the first failure after [`FAILING_AFTER`], and the first success after them. So a
//! success at one relay clears what another relay has written, and a relay that alone cannot reach the endpoint
//! disables nothing.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::sql::failing::{FAILING_AFTER, RowFailures};
use crate::clock;
use crate::dispatch::{Failure, Outcome, Pause};
use crate::engine::send::breaker::{Sign, sign};
use crate::engine::send::gate::Learner;
use crate::lock::lock;
use crate::status::ReasonCode;

/// After a recovery, a new failure is written no sooner than this, unless a success comes first: an endpoint that fails
/// now and then costs few writes.
const BETWEEN_WRITES: Duration = Duration::from_secs(60);
/// Without an answer of any endpoint for this long, this relay may have no network. Then a send without a connection
/// shows nothing about its endpoint.
const ALONE: Duration = Duration::from_secs(600);

/// When any endpoint has last answered this relay.
#[derive(Debug)]
pub(super) struct Answers {
    origin: Instant,
    /// Milliseconds since the origin, plus one; 0: never.
    last: AtomicU64,
}

impl Answers {
    pub(super) fn new() -> Self {
        Self {
            origin: clock::now(),
            last: AtomicU64::new(0),
        }
    }

    fn note(&self, outcome: &Outcome, now: Instant) {
        let is_answer = match outcome {
            Outcome::Delivered(_) => true,
            Outcome::Retry(failure) | Outcome::Wait(failure) | Outcome::Dead(failure) => {
                failure.response.status.is_some()
            }
        };
        if is_answer {
            let millis = now.saturating_duration_since(self.origin).as_millis();
            let millis = u64::try_from(millis).unwrap_or(u64::MAX - 1);
            self.last.store(millis + 1, Ordering::Relaxed);
        }
    }

    /// Whether an endpoint has answered lately, so the network of this relay works.
    fn are_there(&self, now: Instant) -> bool {
        let last = self.last.load(Ordering::Relaxed).checked_sub(1);
        last.is_some_and(|millis| {
            let at = self.origin + Duration::from_millis(millis);
            now.saturating_duration_since(at) < ALONE
        })
    }
}

/// What the result of a send shows about the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shows {
    Works,
    Fails(ReasonCode),
    Nothing,
}

fn shows(outcome: &Outcome, answers: &Answers, now: Instant) -> Shows {
    let of_failure = |failure: &Failure| match failure {
        one if one.response.status.is_some() => Shows::Fails(one.code),
        one if one.may_be_ours => match answers.are_there(now) {
            true => Shows::Fails(one.code),
            false => Shows::Nothing,
        },
        one if sign(outcome) == Sign::Bad => Shows::Fails(one.code),
        _ => Shows::Nothing,
    };
    match outcome {
        Outcome::Delivered(_) => Shows::Works,
        Outcome::Retry(failure) | Outcome::Dead(failure) => of_failure(failure),
        Outcome::Wait(_) => Shows::Nothing,
    }
}

/// Whether the receiver says that the endpoint is gone, and the endpoint takes that as its end.
fn is_gone(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Retry(failure)
        if failure.code == ReasonCode::Gone && failure.pause == Some(Pause::UntilResumed))
}

/// A change that the row of the endpoint must show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowNews {
    /// All sends have failed since this time, the last for this reason.
    Fails(Instant, ReasonCode),
    /// A send has succeeded.
    Works,
    /// All sends have failed for this long, so the endpoint is to be disabled.
    HasFailedLong(Duration),
    /// The receiver says that the endpoint is gone, so the endpoint is to be disabled.
    Gone,
}

/// Whether an endpoint fails.
#[derive(Debug)]
struct FailureState {
    answers: Arc<Answers>,
    disable_after: Duration,
    /// The first failure since the last success, at this relay.
    since: Option<Instant>,
    /// What the row said at this time.
    row: RowFailures,
    read_at: Instant,
    recovered: Option<Instant>,
    news: Option<RowNews>,
}

impl FailureState {
    pub(super) fn new(answers: Arc<Answers>, disable_after: Duration) -> Self {
        Self {
            read_at: answers.origin,
            answers,
            disable_after,
            since: None,
            row: RowFailures::default(),
            recovered: None,
            news: None,
        }
    }

    /// Whether the next success must be noticed.
    pub(super) fn is_failing(&self) -> bool {
        self.since.is_some() || self.row.lasts.is_some()
    }

    /// Learns the result of a send.
    pub(super) fn record(&mut self, outcome: &Outcome, now: Instant) {
        if self.news == Some(RowNews::Gone) || is_gone(outcome) {
            self.news = Some(RowNews::Gone);
            return;
        }
        match shows(outcome, &self.answers, now) {
            Shows::Nothing => {}
            Shows::Works => {
                self.since = None;
                self.news = self.row.lasts.map(|_| RowNews::Works);
            }
            // A success that is not written yet came before this failure.
            Shows::Fails(_) if self.news == Some(RowNews::Works) => {
                self.since.get_or_insert(now);
            }
            Shows::Fails(code) => {
                let since = *self.since.get_or_insert(now);
                let read = now.saturating_duration_since(self.read_at);
                self.news = match self.row.lasts.map(|lasted| lasted + read) {
                    Some(age) if age >= self.disable_after => {
                        Some(RowNews::HasFailedLong(self.disable_after))
                    }
                    Some(age) if age >= FAILING_AFTER && !self.row.is_failing => {
                        Some(RowNews::Fails(since, code))
                    }
                    None => Some(RowNews::Fails(since, code)),
                    Some(_) => None,
                };
            }
        }
    }

    /// Takes the change to record. A failure soon after a recovery waits.
    fn take(&mut self, now: Instant) -> Option<RowNews> {
        let wrote_lately = |at: Instant| now.saturating_duration_since(at) < BETWEEN_WRITES;
        let is_new = self.row.lasts.is_none() && matches!(self.news, Some(RowNews::Fails(..)));
        match is_new && self.recovered.is_some_and(wrote_lately) {
            true => None,
            false => self.news.take(),
        }
    }

    /// Keeps a change that could not be recorded. Later changes replace it, but no failure hides a success.
    fn keep(&mut self, news: RowNews) {
        let is_success = news == RowNews::Works && self.news != Some(RowNews::Gone);
        if self.news.is_none() || is_success {
            self.news = Some(news);
        }
    }

    /// Learns what the row said at this time.
    fn learn(&mut self, row: RowFailures, read_at: Instant) {
        if row.lasts.is_none() && self.row.lasts.is_some() {
            // Another relay's success counts as one of this relay.
            (self.since, self.recovered) = (None, Some(read_at));
        }
        (self.row, self.read_at) = (row, read_at);
    }
}

/// Whether an endpoint fails: learns from its sends beside its gate.
#[derive(Debug)]
pub(super) struct Follower {
    answers: Arc<Answers>,
    /// Whether the next success must be noticed: sends have failed.
    fails: AtomicBool,
    failing: Mutex<FailureState>,
}

impl Follower {
    pub(super) fn new(answers: &Arc<Answers>, disable_after: Duration) -> Self {
        Self {
            answers: Arc::clone(answers),
            fails: AtomicBool::new(false),
            failing: Mutex::new(FailureState::new(Arc::clone(answers), disable_after)),
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut FailureState) -> T) -> T {
        let mut failing = lock(&self.failing);
        let changed = change(&mut failing);
        self.fails.store(failing.is_failing(), Ordering::Release);
        changed
    }

    /// Takes the change to record in the row.
    pub(super) fn take_row_news(&self) -> Option<RowNews> {
        self.change(|failing| failing.take(clock::now()))
    }

    /// Keeps a change that could not be recorded.
    pub(super) fn keep_row_news(&self, news: RowNews) {
        self.change(|failing| failing.keep(news));
    }

    /// Learns what the row said at this time.
    pub(super) fn learn_row(&self, row: RowFailures, read_at: Instant) {
        self.change(|failing| failing.learn(row, read_at));
    }
}

impl Learner for Follower {
    fn note(&self, outcome: &Outcome, now: Instant) -> bool {
        self.answers.note(outcome, now);
        self.fails.load(Ordering::Acquire)
    }

    /// The row of an endpoint that is gone is disabled, and its pause says nothing.
    fn learn(&self, outcome: &Outcome, now: Instant) -> bool {
        self.change(|failing| failing.record(outcome, now));
        is_gone(outcome)
    }

    fn has_news(&self) -> bool {
        lock(&self.failing).news.is_some()
    }

    fn forget_news(&self) {
        self.change(|failing| failing.news = None);
    }
}

#[cfg(test)]
mod tests {
    use super::super::sql::failing::EpisodeTurn;
    use super::*;
    use crate::dispatch::Response;

    const AFTER: Duration = Duration::from_secs(100);

    fn failing() -> (FailureState, Instant) {
        let answers = Arc::new(Answers::new());
        let now = answers.origin;
        (FailureState::new(answers, AFTER), now)
    }

    fn failed(code: ReasonCode, status: Option<u16>) -> Outcome {
        let mut failure = Failure::new(code, "");
        failure.response = Response::new(status, None);
        Outcome::Retry(failure)
    }

    fn code_of(outcome: &Outcome) -> ReasonCode {
        match outcome {
            Outcome::Retry(failure) | Outcome::Dead(failure) | Outcome::Wait(failure) => {
                failure.code
            }
            Outcome::Delivered(_) => panic!("no failure"),
        }
    }

    /// What the row of an endpoint says that has failed for this time.
    fn failed_for(time: Duration) -> RowFailures {
        RowFailures::default().after(Some(time))
    }

    fn unreached() -> Outcome {
        let mut failure = Failure::new(ReasonCode::Dns, "");
        failure.may_be_ours = true;
        Outcome::Retry(failure)
    }

    fn delivered() -> Outcome {
        Outcome::Delivered(Response::default())
    }

    /// R50
    #[test]
    fn any_answer_but_success_and_a_hanging_receiver_are_failures() {
        for (outcome, fails) in [
            (failed(ReasonCode::ServerError, Some(500)), true),
            (failed(ReasonCode::ClientError, Some(404)), true),
            (failed(ReasonCode::RateLimited, Some(429)), true),
            (failed(ReasonCode::Timeout, None), true),
            (failed(ReasonCode::ConnectionLost, None), true),
            (failed(ReasonCode::Panic, None), false),
            (failed(ReasonCode::BlockedAddress, None), false),
            (unreached(), false),
            (Outcome::Wait(Failure::new(ReasonCode::Proxy, "")), false),
            (delivered(), false),
        ] {
            let (mut one, now) = failing();
            one.record(&outcome, now);
            assert_eq!(
                one.news,
                fails.then(|| RowNews::Fails(now, code_of(&outcome))),
                "{outcome:?}"
            );
        }
        let rejected = Failure {
            response: Response::new(Some(400), None),
            ..Failure::new(ReasonCode::Rejected, "")
        };
        let (mut one, now) = failing();
        one.record(&Outcome::Dead(rejected), now);
        assert_eq!(one.news, Some(RowNews::Fails(now, ReasonCode::Rejected)));
    }

    /// R50: without any answer, the network of this relay may be the cause.
    #[test]
    fn an_unreachable_receiver_fails_only_beside_another_that_answers() {
        let (mut one, now) = failing();
        one.record(&unreached(), now);
        assert_eq!(one.news, None);
        one.answers
            .note(&failed(ReasonCode::ServerError, Some(500)), now);
        one.record(&unreached(), now);
        assert_eq!(one.news, Some(RowNews::Fails(now, ReasonCode::Dns)));
        let (mut one, now) = failing();
        one.answers.note(&delivered(), now);
        one.record(&unreached(), now + ALONE);
        assert_eq!(one.news, None, "the answer was long ago");
    }

    #[test]
    fn only_the_first_failure_and_the_first_success_are_written() {
        let (mut one, now) = failing();
        let fails = failed(ReasonCode::ServerError, Some(500));
        one.record(&fails, now);
        assert_eq!(
            one.news.take(),
            Some(RowNews::Fails(now, ReasonCode::ServerError))
        );
        one.learn(failed_for(Duration::ZERO), now);
        let second = Duration::from_secs(1);
        one.record(&fails, now + second);
        assert_eq!(one.news, None);
        one.record(&delivered(), now + 2 * second);
        one.record(&fails, now + 3 * second);
        assert_eq!(
            one.news.take(),
            Some(RowNews::Works),
            "it was not written yet"
        );
        one.learn(RowFailures::default(), now + 3 * second);
        one.record(&delivered(), now + 4 * second);
        assert_eq!(one.news, None);
        // An endpoint that fails now and then.
        one.record(&fails, now + 5 * second);
        assert_eq!(one.take(now + 5 * second), None);
        one.record(&delivered(), now + 6 * second);
        assert_eq!(one.take(now + 5 * second + BETWEEN_WRITES), None);
    }

    /// R50: also if nothing is sent meanwhile.
    #[test]
    fn a_failure_soon_after_a_recovery_is_written_without_another_send() {
        let (mut one, now) = failing();
        one.learn(failed_for(Duration::ZERO), now);
        one.learn(RowFailures::default(), now);
        let failed_at = now + Duration::from_secs(5);
        one.record(&failed(ReasonCode::ServerError, Some(500)), failed_at);
        assert_eq!(one.take(failed_at), None);
        assert_eq!(
            one.take(now + BETWEEN_WRITES),
            Some(RowNews::Fails(failed_at, ReasonCode::ServerError))
        );
    }

    /// R50: the success of another relay counts.
    #[test]
    fn only_a_destination_that_fails_for_all_relays_is_disabled() {
        let (mut one, now) = failing();
        let fails = failed(ReasonCode::Timeout, None);
        one.record(&fails, now);
        one.learn(failed_for(Duration::ZERO), now);
        one.record(&fails, now + AFTER / 2);
        one.news = None;
        one.learn(RowFailures::default(), now + AFTER / 2);
        one.record(&fails, now + AFTER);
        assert_ne!(one.news, Some(RowNews::HasFailedLong(AFTER)));
        // As another relay has written, before this relay was started.
        one.learn(failed_for(AFTER), now + AFTER);
        one.record(&fails, now + AFTER);
        assert_eq!(one.news, Some(RowNews::HasFailedLong(AFTER)));
    }

    /// R58: what happens between a success and a later send must not be forgotten.
    #[test]
    fn a_change_that_could_not_be_recorded_hides_no_success() {
        let (mut one, now) = failing();
        one.learn(failed_for(AFTER), now);
        one.record(&delivered(), now);
        let works = one.news.take().expect("a success");
        one.record(&failed(ReasonCode::ServerError, Some(500)), now);
        assert_eq!(one.news, Some(RowNews::HasFailedLong(AFTER)));
        one.keep(works);
        assert_eq!(one.news, Some(RowNews::Works));
        one.keep(RowNews::HasFailedLong(AFTER));
        assert_eq!(one.news, Some(RowNews::Works));
    }

    const MINUTE: Duration = Duration::from_secs(60);
    const HOUR: Duration = Duration::from_secs(3600);

    /// A customer's row, and the events about it.
    struct Row {
        since: Option<Instant>,
        is_failing: bool,
        is_enabled: bool,
        events: Vec<&'static str>,
        /// A decision that does not know what it has told.
        forgets: bool,
    }

    impl Row {
        fn read(&self, now: Instant) -> RowFailures {
            RowFailures {
                lasts: self.since.map(|since| now.saturating_duration_since(since)),
                is_failing: self.is_failing && !self.forgets,
            }
        }

        /// Writes what a relay has seen, as the statements do.
        fn write(&mut self, news: RowNews, now: Instant) {
            let failed_for = match news {
                RowNews::Fails(since, _) => Some(now.saturating_duration_since(since)),
                RowNews::Works => None,
                RowNews::HasFailedLong(_) | RowNews::Gone => {
                    let lasts = self.read(now).lasts;
                    if self.is_enabled && lasts.is_some_and(|time| time >= 12 * HOUR) {
                        self.is_enabled = false;
                        self.events.push("disabled");
                    }
                    return;
                }
            };
            let before = self.read(now);
            let after = before.after(failed_for);
            self.since = after.lasts.map(|lasts| self.since.unwrap_or(now - lasts));
            self.is_failing = after.is_failing;
            self.events
                .extend(before.turn_to(after).map(|turn| match turn {
                    EpisodeTurn::Fails => "failing",
                    EpisodeTurn::Works => "recovered",
                }));
        }
    }

    /// A day of a customer who fails for this time, served by three relays. Relays are killed, before and after they
    /// have written what they know, and have no database for a while. Returns the events.
    fn day(seed: u64, fails_for: Duration, forgets: bool) -> String {
        let mut rng = fastrand::Rng::with_seed(seed);
        let start = clock::now() + HOUR;
        let begun = |at: Instant| {
            let answers = Answers {
                origin: at,
                ..Answers::new()
            };
            FailureState::new(Arc::new(answers), 12 * HOUR)
        };
        let mut relays: Vec<FailureState> = (0..3).map(|_| begun(start)).collect();
        let mut row = Row {
            since: None,
            is_failing: false,
            is_enabled: true,
            events: Vec::new(),
            forgets,
        };
        let fails_from = start + 2 * HOUR + Duration::from_secs(rng.u64(..3600));
        let (mut now, end) = (start, start + 24 * HOUR);
        let pace = rng.u64(10..60);
        let mut without_database = [start; 3];
        while now < end {
            now += Duration::from_secs(rng.u64(..pace));
            let which = rng.usize(..3);
            let one = &mut relays[which];
            let send = |one: &mut FailureState| {
                let fails = (fails_from..fails_from + fails_for).contains(&now);
                one.record(
                    &match fails {
                        true => failed(ReasonCode::ServerError, Some(503)),
                        false => delivered(),
                    },
                    now,
                );
            };
            match rng.u8(..20) {
                0 => *one = begun(now),
                1 if without_database[which] <= now => {
                    without_database[which] = now + Duration::from_secs(rng.u64(..900));
                }
                2..5 if without_database[which] <= now => one.learn(row.read(now), now),
                _ if row.is_enabled => send(one),
                _ => {}
            }
            let Some(news) = one.take(now) else {
                continue;
            };
            if rng.bool() && row.is_enabled {
                send(one);
            }
            if without_database[which] > now {
                one.keep(news);
                continue;
            }
            row.write(news, now);
            match rng.u8(..10) {
                0 => *one = begun(now),
                _ => one.learn(row.read(now), now),
            }
        }
        row.events.join(" ")
    }

    /// R58
    #[test]
    fn a_day_of_a_failing_customer_has_one_event_for_its_begin_and_one_for_its_end() {
        for seed in 0..300 {
            for (fails_for, events) in [
                (8 * MINUTE, ""),
                (HOUR, "failing recovered"),
                (8 * HOUR, "failing recovered"),
                (20 * HOUR, "failing disabled"),
            ] {
                assert_eq!(day(seed, fails_for, false), events, "{seed} {fails_for:?}");
            }
        }
        let is_found = |seed| day(seed, HOUR, true) != "failing recovered";
        assert!((0..10).all(is_found), "a decision that forgets");
    }
}
