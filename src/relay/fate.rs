//! What becomes of a claimed message: it is sent, or settled without a send.

use std::time::Instant;

use super::bulkhead::{Bulkhead, Retries};
use super::settlement::Verdict;
use super::to::To;
use crate::dispatch::Failure;
use crate::message::Message;
use crate::routes::{Routes, Way};
use crate::status::ReasonCode;
use crate::store::relay::claim::{Claimed, Known, TakenOver};

#[derive(Debug)]
pub(super) enum Fate {
    /// Its destination gets it.
    Send,
    Settle(Verdict),
}

impl Fate {
    /// Of a message that goes there. `parts`: its destinations, where it goes to several.
    pub(super) fn of(
        claimed: &Claimed,
        to: To,
        retries: &Retries,
        parts: impl FnOnce() -> Vec<String>,
        now: Instant,
    ) -> Self {
        let message = &claimed.message;
        let abandoned = || {
            let error = "the relay that had claimed it died or lost its lease";
            Failure::new(ReasonCode::Abandoned, error)
        };
        let verdict = match (claimed.known, to, claimed.taken_over) {
            (Known::Delivered, ..) => Verdict::Deduplicated,
            (Known::OtherContent, ..) => {
                let error = "the key was delivered before, with another topic or payload";
                Verdict::Dead(Failure::new(ReasonCode::IdempotencyConflict, error), 0)
            }
            // It was behind another one of its key, or was claimed because its time is over.
            (Known::No, To::Nowhere, _) if is_expired(message, now) => Verdict::expired(),
            (Known::No, To::Nowhere, _) => Verdict::Released,
            (Known::No, To::Split, _) => Verdict::Split(parts()),
            (Known::No, To::Bulkhead(_), TakenOver::Again) => {
                Verdict::of_failure(abandoned(), message.attempts, retries)
            }
            // The takeover was the last attempt that its destination allows.
            (Known::No, To::Bulkhead(_), TakenOver::Once)
                if message.attempts >= retries.max_attempts =>
            {
                Verdict::Dead(abandoned(), 0)
            }
            (Known::No, To::Bulkhead(_), TakenOver::Once | TakenOver::No) => return Self::Send,
        };
        Self::Settle(verdict)
    }
}

/// Whether its time is over: then it is not sent.
pub(super) fn is_expired(message: &Message, now: Instant) -> bool {
    message.expires.is_some_and(|end| now >= end)
}

/// The destinations of a message that goes to several.
pub(super) fn parts(routes: &Routes, bulkheads: &[Bulkhead], message: &Message) -> Vec<String> {
    match routes.find(&message.topic, &message.destination) {
        Way::Split(numbers) => numbers
            .iter()
            .map(|number| bulkheads[*number].name.to_string())
            .collect(),
        Way::To(_) | Way::NoRoute | Way::UnknownDestination | Way::NotTaken => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::backoff::Backoff;
    use crate::relay::planner::tests::claimed;

    fn fate(to: To, change: impl FnOnce(&mut Claimed)) -> Fate {
        let mut one = claimed(1, "a", None);
        change(&mut one);
        let retries = Retries {
            max_attempts: 3,
            backoff: Backoff::default(),
        };
        let parts = || vec!["a".to_owned(), "b".to_owned()];
        Fate::of(&one, to, &retries, parts, Instant::now())
    }

    /// R20
    #[test]
    fn what_the_ledger_knows_is_not_sent_wherever_it_goes() {
        for to in [To::Bulkhead(0), To::Split, To::Nowhere] {
            let known = fate(to, |one| one.known = Known::Delivered);
            assert!(matches!(known, Fate::Settle(Verdict::Deduplicated)));
            let other = fate(to, |one| one.known = Known::OtherContent);
            let Fate::Settle(Verdict::Dead(failure, 0)) = other else {
                panic!("{other:?}");
            };
            assert_eq!(failure.code, ReasonCode::IdempotencyConflict);
        }
    }

    /// R12
    #[test]
    fn a_message_that_was_taken_over_is_sent_once_more_and_then_counts_as_failed() {
        let here = To::Bulkhead(0);
        let taken = |attempts, taken_over| {
            fate(here, |one| {
                one.taken_over = taken_over;
                one.message.attempts = attempts;
            })
        };
        assert!(matches!(taken(0, TakenOver::No), Fate::Send));
        assert!(matches!(taken(2, TakenOver::Once), Fate::Send));
        let dead = taken(3, TakenOver::Once);
        assert!(matches!(dead, Fate::Settle(Verdict::Dead(_, 0))));
        let again = taken(1, TakenOver::Again);
        assert!(matches!(again, Fate::Settle(Verdict::Retry(_, _, 1))));
        let last = taken(2, TakenOver::Again);
        assert!(matches!(last, Fate::Settle(Verdict::Dead(_, 1))));
    }

    /// R6, R44
    #[test]
    fn what_goes_nowhere_is_given_back_or_has_expired() {
        let nowhere = fate(To::Nowhere, |_| {});
        assert!(matches!(nowhere, Fate::Settle(Verdict::Released)));
        let expired = fate(To::Nowhere, |one| {
            one.message.expires = Some(Instant::now())
        });
        assert!(matches!(expired, Fate::Settle(Verdict::Dead(_, 0))));
        let later = Instant::now() + Duration::from_secs(60);
        let waiting = fate(To::Nowhere, |one| one.message.expires = Some(later));
        assert!(matches!(waiting, Fate::Settle(Verdict::Released)));
        let split = fate(To::Split, |_| {});
        assert!(matches!(split, Fate::Settle(Verdict::Split(to)) if to == ["a", "b"]));
    }
}
