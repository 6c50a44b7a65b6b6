//! Random histories of producers, relays and operators against a simple model: the promises hold in
//! each, and do not when the store breaks one of them.

mod broken;
pub(crate) mod database;
mod expected;
mod harness;
mod history;
mod promises;
mod system;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::Mutex;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use broken::{
    ClaimsKeyed, ClaimsWhatOthersHave, ContinuesLater, CountsReleases, CountsTwice,
    EnqueuesOutside, ForgetsKeys, ForgetsWhatIsDelivered, NeverSweeps, Part, RequeuesCopies,
    RetriesForFree, SettlesByLease, SettlesUnfenced, TakesOverForFree, TakesOverFromTheLiving,
};
use database::{Connections, Outbox};
use history::{History, histories};
use promises::{Broken, Event, Events, Promise};
use system::{Store, System};

/// Histories, where `OUTBOX_MODEL_CASES` does not say how many.
const CASES: u32 = 150;
/// Histories within which a broken variant has to be found out.
const CASES_OF_BROKEN: u32 = 400;
/// Tries to make a history smaller.
const SHRINKS: u32 = 1000;
/// Histories of a variant that is not broken.
const CASES_OF_WHOLE: u32 = 30;

/// A history in which a promise is broken, after so many histories in which it was not.
struct Found {
    broken: Broken,
    history: History,
    after: u32,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Broken { promise, what } = &self.broken;
        writeln!(f, "{promise:?}, after {} histories: {what}", self.after)?;
        for (number, step) in self.history.steps.iter().enumerate() {
            writeln!(f, "{number:>4}  {step:?}")?;
        }
        write!(f, "  at the end commits: {:?}", self.history.commits)
    }
}

/// Plays histories, always the same ones. Returns what has happened in them, or the first one that
/// breaks a promise, as small as `shrinks` tries make it.
fn find_broken(system: &dyn System, cases: u32, shrinks: u32) -> Result<Events, Box<Found>> {
    let outbox = Outbox::new();
    let connections: RefCell<Option<Connections>> = RefCell::new(None);
    let last: RefCell<Option<Broken>> = RefCell::new(None);
    let played = Cell::new(0);
    let events = RefCell::new(Events::new());
    let config = Config {
        cases,
        max_shrink_iters: shrinks,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let result = TestRunner::new_with_rng(config, rng).run(&histories(), |history| {
        if last.borrow().is_none() {
            played.set(played.get() + 1);
        }
        let mut mine = connections.take().unwrap_or_else(|| outbox.connections());
        outbox.empty(&mut mine.operator);
        match harness::play(system, &outbox.name, mine, &history) {
            Ok((mine, more)) => {
                connections.replace(Some(mine));
                for (event, count) in more {
                    *events.borrow_mut().entry(event).or_default() += count;
                }
                Ok(())
            }
            Err(broken) => {
                let reason = format!("{broken:?}");
                last.replace(Some(broken));
                Err(TestCaseError::fail(reason))
            }
        }
    });
    match result {
        Ok(()) => Ok(events.take()),
        Err(TestError::Fail(_, history)) => Err(Box::new(Found {
            broken: last.take().expect("a history fails with a reason"),
            history,
            after: played.get() - 1,
        })),
        Err(TestError::Abort(reason)) => panic!("no histories: {reason}"),
    }
}

/// G1 to G6 hold, whatever producers, relays and operators do.
#[test]
fn the_promises_hold_in_every_history() {
    let cases = std::env::var("OUTBOX_MODEL_CASES")
        .map_or(CASES, |cases| cases.parse().expect("a number of cases"));
    let events = find_broken(&Store, cases, SHRINKS).unwrap_or_else(|found| panic!("{found}"));
    eprintln!("{cases} histories: {events:?}");
    for event in Event::ALL {
        assert!(events.contains_key(&event), "in no history: {event:?}");
    }
}

/// A history is found in which the broken store does not keep the promise.
fn assert_broken(system: &dyn System, promise: Promise) {
    let Err(found) = find_broken(system, CASES_OF_BROKEN, 0) else {
        panic!("no history has shown what is broken");
    };
    eprintln!("after {} histories: {}", found.after, found.broken.what);
    assert_eq!(found.broken.promise, Some(promise), "{found}");
}

/// The statement that the broken claims are made of is not broken by itself.
#[test]
fn a_claim_of_keyed_messages_with_all_its_parts_is_not_broken() {
    let result = find_broken(&ClaimsKeyed { without: None }, CASES_OF_WHOLE, SHRINKS);
    assert!(result.is_ok(), "{}", result.expect_err("it is not"));
}

/// G1
#[test]
fn a_message_that_is_enqueued_outside_of_its_transaction_is_found_out() {
    let connection = Outbox::new().connect();
    assert_broken(&EnqueuesOutside(Mutex::new(connection)), Promise::G1);
}

/// G2
#[test]
fn a_settle_without_the_ledger_is_found_out() {
    assert_broken(&ForgetsWhatIsDelivered, Promise::G2);
}

/// G2
#[test]
fn a_claim_that_never_looks_before_its_place_is_found_out() {
    assert_broken(&NeverSweeps::default(), Promise::G2);
}

/// G2
#[test]
fn a_requeue_that_leaves_the_dead_letter_is_found_out() {
    assert_broken(&RequeuesCopies, Promise::G2);
}

/// G2: a new primary gives sequences out again, and the lease has claimed the new messages, too.
#[test]
fn a_settle_that_does_not_name_its_claim_is_found_out() {
    assert_broken(&SettlesByLease, Promise::G2);
}

/// G3
#[test]
fn a_claim_of_what_another_relay_has_is_found_out() {
    assert_broken(&ClaimsWhatOthersHave, Promise::G3);
}

/// G3
#[test]
fn a_takeover_from_a_living_relay_is_found_out() {
    assert_broken(&TakesOverFromTheLiving, Promise::G3);
}

/// G3
#[test]
fn a_claim_that_does_not_ask_the_ledger_is_found_out() {
    assert_broken(&ForgetsKeys, Promise::G3);
}

/// G4
#[test]
fn a_settle_without_the_fence_is_found_out() {
    assert_broken(&SettlesUnfenced, Promise::G4);
}

/// G4
#[test]
fn a_claim_by_a_lease_that_is_over_is_found_out() {
    let without = Some(Part::IsLive);
    assert_broken(&ClaimsKeyed { without }, Promise::G4);
}

/// G5
#[test]
fn a_claim_that_does_not_ask_who_is_first_is_found_out() {
    let without = Some(Part::IsFirst);
    assert_broken(&ClaimsKeyed { without }, Promise::G5);
}

/// G5
#[test]
fn a_claim_that_does_not_ask_who_is_in_flight_is_found_out() {
    let without = Some(Part::IsAlone);
    assert_broken(&ClaimsKeyed { without }, Promise::G5);
}

/// G5
#[test]
fn a_claim_behind_a_dead_letter_that_keeps_its_key_back_is_found_out() {
    let without = Some(Part::IsNotKeptBack);
    assert_broken(&ClaimsKeyed { without }, Promise::G5);
}

/// G5
#[test]
fn claims_of_keyed_messages_beside_one_another_are_found_out() {
    let without = Some(Part::Lock);
    assert_broken(&ClaimsKeyed { without }, Promise::G5);
}

/// G5
#[test]
fn a_key_that_goes_on_after_the_settle_and_not_in_it_is_found_out() {
    assert_broken(&ContinuesLater, Promise::G5);
}

/// G6
#[test]
fn a_retry_that_costs_nothing_is_found_out() {
    assert_broken(&RetriesForFree, Promise::G6);
}

/// G6
#[test]
fn a_repeated_retry_that_counts_twice_is_found_out() {
    assert_broken(&CountsTwice, Promise::G6);
}

/// G6
#[test]
fn a_release_that_counts_is_found_out() {
    assert_broken(&CountsReleases, Promise::G6);
}

/// G6
#[test]
fn a_takeover_that_costs_nothing_is_found_out() {
    assert_broken(&TakesOverForFree, Promise::G6);
}
