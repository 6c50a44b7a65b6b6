use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded, unbounded};
use secrecy::SecretString;

use super::{ASLEEP, INTERVAL, Monitor, health, is_free_to_claim};
use crate::config::Config;
use crate::dispatch::{Dispatcher, Outcome, Response};
use crate::message::Message;
use crate::relay::bulkhead::{Bulkhead, Dispatchers};
use crate::relay::health::ProblemKind;
use crate::relay::lease_clock::{BootTime, LeaseClock};
use crate::relay::observer::Observers;
use crate::relay::progress::{Stay, millis};
use crate::relay::shared::{Shared, Signals};
use crate::relay::sleep::Sleep;
use crate::store::relay::connection::Source;
use crate::store::relay::lease::LeaseId;

struct Nothing;

impl Dispatcher for Nothing {
    fn dispatch(&self, _: &Message) -> Outcome {
        Outcome::Delivered(Response::default())
    }
}

fn shared() -> Shared {
    shared_and_doorbell().0
}

/// A relay without threads, that has a lease and does not listen, and what rings its claimer.
pub(in crate::relay) fn shared_and_doorbell() -> (Shared, Receiver<()>) {
    let config = Config {
        listener: false,
        ..Config::default()
    };
    let dispatchers = Dispatchers {
        common: Arc::new(Nothing),
        own_threads: Some(2),
        groups: Vec::new(),
    };
    let bulkheads = Bulkhead::all(&config, dispatchers);
    let clock = LeaseClock::new(config.lease, config.longest_send());
    clock.registered(LeaseId(1), BootTime::now());
    let (doorbell, rings) = bounded(1);
    let signals = Signals {
        stop: bounded(0).1,
        abandon: bounded(0).1,
        doorbell,
        news: bounded(1).0,
        to_claimer: unbounded().0,
        pulse: bounded(1).0,
        count: bounded(1).0,
        sleep: Sleep::new().expect("a pair of sockets"),
    };
    let source = Source::Url(SecretString::from(""));
    let observers = Observers::default();
    let shared = Shared::new(config, source, bulkheads, observers, None, clock, signals);
    (shared, rings)
}

fn kinds(shared: &Shared) -> Vec<ProblemKind> {
    let health = health(shared);
    health.problems().iter().map(|one| one.kind).collect()
}

#[test]
fn a_thread_that_ended_by_itself_is_named_and_one_that_was_told_to_is_not() {
    let shared = shared();
    shared.monitor.look(&shared);
    assert_eq!(health(&shared).to_string(), "ok");
    shared.thread_ended("relay-settler");
    let health = health(&shared);
    assert!(!health.is_live() && !health.is_ready());
    assert!(
        health
            .to_string()
            .starts_with("thread_ended: the thread relay-settler has ended")
    );
    shared.begin_stop();
    assert_eq!(kinds(&shared), [ProblemKind::Stopping]);
}

#[test]
fn what_is_claimed_and_does_not_move_has_to_have_a_reason() {
    let shared = shared();
    shared.monitor.look(&shared);
    let is_stalled = || {
        shared.monitor.look(&shared);
        shared.monitor.stalled.is_inside()
    };
    assert!(!is_stalled(), "an idle relay");
    shared.began(LeaseId(1), 1);
    assert!(is_stalled(), "nobody sends it");
    shared.progress.moved();
    assert!(!is_stalled(), "something moves");
    assert!(is_stalled(), "and nothing again");
    let sending = shared.progress.senders[0][1].within(Duration::from_secs(600));
    assert!(!is_stalled(), "it is sent, and judged by that");
    drop(sending);
    let settling = shared
        .progress
        .settler
        .in_database
        .within(Duration::from_secs(600));
    assert!(!is_stalled(), "it is settled, and judged by that");
    drop(settling);
    assert!(is_stalled());
}

/// R45: it may run for ten minutes and longer.
#[test]
fn a_handler_that_runs_holds_up_nothing_but_its_own_message() {
    let shared = shared();
    let (lease, sequence) = (LeaseId(1), 7);
    let is_stalled = || {
        shared.monitor.look(&shared);
        shared.monitor.stalled.is_inside()
    };
    shared.began(lease, 1);
    assert_eq!(shared.only_aside().0, None, "it is on its way");
    assert!(shared.held_leases().contains(&lease));
    shared.begin_handling(lease, sequence);
    assert_eq!(
        shared.only_aside().0,
        Some(vec![sequence]),
        "a lost claim is undone but for it"
    );
    assert!(
        shared.held_leases().is_empty(),
        "a lost lease is taken over here"
    );
    assert!(is_free_to_claim(&shared));
    assert!(!is_stalled());
    assert_eq!(shared.unsettled(), 1, "a shutdown waits for it");
    shared.end_handling(lease, sequence);
    assert_eq!(shared.only_aside().0, None, "its settle is on its way");
    assert!(shared.held_leases().contains(&lease));
    shared.finished(lease, 1);
    assert_eq!(shared.only_aside().0, Some(Vec::new()));
    assert!(shared.held_leases().is_empty());
}

#[test]
fn a_stay_is_overdue_beyond_its_limit_and_not_for_the_time_that_the_process_stood_still() {
    let stay = Stay::default();
    assert_eq!(stay.overdue(1_000_000, 0), None, "it is outside");
    stay.begin(Duration::from_secs(10));
    let since = stay.since().expect("inside");
    assert_eq!(stay.overdue(since + 10_000, 0), None);
    let stayed = stay.overdue(since + 10_001, 0);
    assert_eq!(stayed, Some(Duration::from_millis(10_001)));
    let awake = since + 50_000;
    assert_eq!(stay.overdue(awake + 10_000, awake), None);
    assert!(stay.overdue(awake + 10_001, awake).is_some());
    stay.end();
    assert_eq!(stay.overdue(u64::MAX, 0), None);
}

#[test]
fn a_process_that_stood_still_counts_from_when_it_goes_on() {
    let (second, asleep) = (millis(INTERVAL), millis(ASLEEP));
    let monitor = Monitor::default();
    monitor.tick(1000);
    monitor.tick(1000 + second);
    let begin = 1000 + second;
    assert!(monitor.awake(begin + second) <= 1000, "nothing happened");
    // It goes on, and somebody asks before the monitor looks.
    let back = begin + 100 * asleep;
    assert_eq!(monitor.awake(back), back);
    assert_eq!(monitor.awake(back + 500), back);
    monitor.tick(back + 600);
    assert_eq!(monitor.awake(back + 700), back + 600);
    // The monitor itself hangs: times count from when that was first seen.
    let seen = back + 600 + 2 * asleep;
    assert_eq!(monitor.awake(seen), seen);
    assert_eq!(monitor.awake(seen + 100 * asleep), seen);
}
