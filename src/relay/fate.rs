//! Where a claimed message goes, and what becomes of it without a send: decided once, when it is claimed.

use std::time::Instant;

use super::bulkhead::Bulkhead;
use super::job::{Job, is_expired};
use super::verdict::Verdict;
use crate::dispatch::Failure;
use crate::message::Message;
use crate::routes::{Routes, Way};
use crate::status::ReasonCode;
use crate::store::relay::claim::{Claimed, Known, TakenOver};
use crate::store::relay::lease::LeaseId;

impl Job {
    pub(super) fn new(
        claimed: Claimed,
        lease: LeaseId,
        routes: &Routes,
        bulkheads: &[Bulkhead],
        now: Instant,
    ) -> Self {
        let Message {
            topic, destination, ..
        } = &claimed.message;
        let way = routes.find(topic, destination);
        Self {
            unsent: unsent(&claimed, way, bulkheads, now),
            to: way.into(),
            lease,
            message: claimed.message,
        }
    }

    /// Frees the payload and the headers of its message.
    pub(super) fn unload(&mut self, bulkheads: &[Bulkhead]) {
        let message = &mut self.message;
        if let Some(bulkhead) = self.to.bulkhead(bulkheads) {
            bulkhead.unload(message);
        }
        (message.payload, message.headers) = (String::new(), None);
    }
}

/// What is written down of a message that goes this way, without a send. `None`: its destination gets it.
fn unsent(
    claimed: &Claimed,
    way: Way<'_>,
    bulkheads: &[Bulkhead],
    now: Instant,
) -> Option<Verdict> {
    let message = &claimed.message;
    match claimed.known {
        Known::No => {}
        Known::Delivered => return Some(Verdict::Deduplicated),
        Known::OtherContent => {
            let error = "the key was delivered before, with another topic or payload";
            let failure = Failure::new(ReasonCode::IdempotencyConflict, error);
            return Some(Verdict::Dead(failure, 0));
        }
    }
    let number = match way {
        Way::To(number) => number,
        Way::Split(numbers) => {
            let name = |number: &usize| bulkheads[*number].name.to_string();
            return Some(Verdict::Split(numbers.iter().map(name).collect()));
        }
        // It was behind another one of its key, or was claimed because its time is over.
        Way::NoRoute | Way::UnknownDestination | Way::NotTaken => {
            return Some(match is_expired(message, now) {
                true => Verdict::expired(),
                false => Verdict::Released,
            });
        }
    };
    let error = "the relay that had claimed it died or lost its lease";
    let abandoned = || Failure::new(ReasonCode::Abandoned, error);
    let retries = &bulkheads[number].retries;
    match claimed.taken_over {
        TakenOver::Again => Some(Verdict::of_failure(abandoned(), message.attempts, retries)),
        // The takeover was the last attempt that its destination allows.
        TakenOver::Once if message.attempts >= retries.max_attempts => {
            Some(Verdict::Dead(abandoned(), 0))
        }
        TakenOver::Once | TakenOver::No => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::{Config, Destination, Route};
    use crate::relay::bulkhead::Dispatchers;
    use crate::relay::planner::tests::claimed;
    use crate::relay::to::To;

    /// What becomes of a message that goes to `a`, to `a` and `b`, or nowhere.
    fn of(topic: &str, change: impl FnOnce(&mut Claimed)) -> Job {
        let mut config = Config {
            max_attempts: 3,
            ..Config::default()
        };
        for name in ["a", "b"] {
            let destination = Destination::new(name, "http://a").expect("a URL");
            config.destinations.push(destination);
        }
        config.routes.push(Route::new("a", "a"));
        config.routes.push(Route::to_each("fan", ["a", "b"]));
        let (bulkheads, _) = Bulkhead::all(&config, Dispatchers::idle(&config));
        let mut one = claimed(1, topic, None);
        change(&mut one);
        let routes = Routes::new(&config);
        Job::new(one, LeaseId(1), &routes, &bulkheads, Instant::now())
    }

    fn unsent(topic: &str, change: impl FnOnce(&mut Claimed)) -> Option<Verdict> {
        of(topic, change).unsent
    }

    #[test]
    fn where_a_message_goes_is_known_when_it_is_claimed() {
        for (topic, to) in [
            ("a", To::Bulkhead(0)),
            ("fan", To::Split),
            ("none", To::Nowhere),
        ] {
            assert_eq!(of(topic, |_| {}).to, to);
        }
        let named = of("none", |one| one.message.destination = "b".to_owned());
        assert_eq!(named.to, To::Bulkhead(1));
    }

    /// R20
    #[test]
    fn what_the_ledger_knows_is_not_sent_wherever_it_goes() {
        for topic in ["a", "fan", "none"] {
            let known = unsent(topic, |one| one.known = Known::Delivered);
            assert!(matches!(known, Some(Verdict::Deduplicated)));
            let other = unsent(topic, |one| one.known = Known::OtherContent);
            let Some(Verdict::Dead(failure, 0)) = other else {
                panic!("{other:?}");
            };
            assert_eq!(failure.code, ReasonCode::IdempotencyConflict);
        }
    }

    /// R12
    #[test]
    fn a_message_that_was_taken_over_is_sent_once_more_and_then_counts_as_failed() {
        let taken = |attempts, taken_over| {
            unsent("a", |one| {
                one.taken_over = taken_over;
                one.message.attempts = attempts;
            })
        };
        assert!(taken(0, TakenOver::No).is_none());
        assert!(taken(2, TakenOver::Once).is_none());
        let dead = taken(3, TakenOver::Once);
        assert!(matches!(dead, Some(Verdict::Dead(_, 0))));
        let again = taken(1, TakenOver::Again);
        assert!(matches!(again, Some(Verdict::Retry(_, _, 1))));
        let last = taken(2, TakenOver::Again);
        assert!(matches!(last, Some(Verdict::Dead(_, 1))));
    }

    /// R6, R44
    #[test]
    fn what_goes_nowhere_is_given_back_or_has_expired() {
        let nowhere = unsent("none", |_| {});
        assert!(matches!(nowhere, Some(Verdict::Released)));
        let expired = unsent("none", |one| one.message.expires = Some(Instant::now()));
        assert!(matches!(expired, Some(Verdict::Dead(_, 0))));
        let later = Instant::now() + Duration::from_secs(60);
        let waiting = unsent("none", |one| one.message.expires = Some(later));
        assert!(matches!(waiting, Some(Verdict::Released)));
        let split = unsent("fan", |_| {});
        assert!(matches!(split, Some(Verdict::Split(to)) if to == ["a", "b"]));
    }
}
