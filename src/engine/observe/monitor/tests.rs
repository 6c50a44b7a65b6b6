use std::sync::Arc;

use std::time::Duration;

use crossbeam_channel::bounded;

use super::{health, look};
use crate::builder::Dispatchers;
use crate::clock::BootTime;
use crate::config::Config;
use crate::engine::claim::doubt::RanBy;
use crate::engine::directory::Prefetched;
use crate::engine::host::settings::Settings;
use crate::engine::host::shared::{Shared, SharedParts, Signals};
use crate::engine::host::threads::{Cause, Life, Post};
use crate::engine::lease::clock::LeaseClock;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::observe::health::ProblemKind;
use crate::engine::plan::to::To;
use crate::engine::send::bulkhead::Bulkhead;
use crate::engine::serves::configured::Configured;
use crate::engine::serves::routes::Routes;
use crate::engine::settle::sql::settle::Claim;
use crate::error::DatabaseError;
use crate::operate::counts::is_free_to_claim;
use crate::sql::range::Range;

/// The state of a relay without threads, with a lease and without a listener.
fn shared() -> Shared {
    let config = Config {
        listener: false,
        ..Config::default()
    };
    let (bulkheads, _) = Bulkhead::all(&config, Dispatchers::idle(&config));
    let settings = Settings::of(&config, false);
    let routes = Arc::new(Routes::of(settings.serves.clone()));
    let directory = Arc::new(Configured::new(Arc::clone(&routes), None));
    let clock = LeaseClock::of(&settings);
    clock.registered(LeaseId(1), BootTime::now());
    let signals = Signals::new(bounded(0).1, bounded(0).1).expect("a pair of sockets");
    let parts = SharedParts::of_tests(settings, bulkheads, (routes, directory));
    Shared::new(parts, clock, signals)
}

fn kinds(shared: &Shared) -> Vec<ProblemKind> {
    let health = health(shared);
    health.problems().iter().map(|one| one.kind).collect()
}

#[test]
fn a_thread_that_ended_unasked_is_named_and_a_stopped_thread_is_not() {
    let shared = shared();
    look(&shared);
    assert_eq!(health(&shared).to_string(), "ok");
    shared
        .threads
        .set_life(&"relay-settler".into(), Life::Ended);
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
fn threads_without_a_database_are_one_problem_and_the_listener_is_none() {
    let shared = shared();
    look(&shared);
    let error = DatabaseError::Connect("gone".to_owned());
    let failed = |post, cause| shared.threads.failed(post, &error, cause);
    failed(Post::Listener, Cause::Other);
    assert_eq!(kinds(&shared), []);
    failed(Post::Settler, Cause::TimeOut);
    failed(Post::Claimer, Cause::Other);
    assert_eq!(
        health(&shared).to_string(),
        format!("no_database: no database for 0 s (claimer, settler): {error}")
    );
    failed(Post::Claimer, Cause::Missing("no outbox".to_owned()));
    assert_eq!(health(&shared).to_string(), "schema: no outbox");
    shared.threads.set_connected(Post::Claimer, true);
    assert_eq!(kinds(&shared), [ProblemKind::NoDatabase]);
    shared.threads.set_connected(Post::Settler, false);
    assert_eq!(kinds(&shared), []);
}

#[test]
fn claimed_messages_that_do_not_move_need_a_reason() {
    let shared = shared();
    look(&shared);
    let is_stalled = || {
        look(&shared);
        shared.threads.state().watch.stalled.is_some()
    };
    assert!(!is_stalled(), "an idle relay");
    let claim = Claim { sequence: 1, at: 1 };
    shared
        .custody
        .began(LeaseId(1), [(claim, To::Bulkhead(0))].into_iter());
    assert!(is_stalled(), "no thread sends the message");
    shared.count(|stats| stats.delivered += 1);
    assert!(!is_stalled(), "the relay makes progress");
    assert!(is_stalled(), "no further progress");
    let sending = shared.threads.senders[0][1].within(Duration::from_secs(600));
    assert!(!is_stalled(), "a sender has its own time limit");
    drop(sending);
    let in_database = shared.threads.in_database(Post::Settler);
    let settling = in_database.within(Duration::from_secs(600));
    assert!(!is_stalled(), "a settler has its own time limit");
    drop(settling);
    assert!(is_stalled());
}

/// R45: a handler may run for ten minutes and longer.
#[test]
fn a_handler_that_runs_holds_up_nothing_but_its_own_message() {
    let shared = shared();
    let lease = LeaseId(1);
    let claim = Claim { sequence: 7, at: 1 };
    let is_stalled = || {
        look(&shared);
        shared.threads.state().watch.stalled.is_some()
    };
    let sent = [(claim, To::Bulkhead(0))];
    shared.custody.began(lease, sent.into_iter());
    assert!(shared.custody.leases().contains(&lease));
    shared.custody.begin_handling(lease, claim);
    let known = shared.custody.begin_release(lease, Range::ALL);
    assert_eq!(
        known,
        Some(vec![claim]),
        "undoing a lost claim spares the handled message"
    );
    shared.custody.end_release();
    assert!(
        shared.custody.leases().is_empty(),
        "this relay may take over its own lost lease"
    );
    assert!(is_free_to_claim(&shared));
    assert!(!is_stalled());
    assert_eq!(
        shared.custody.unsettled(),
        1,
        "a shutdown waits for the handler"
    );
    shared.custody.end_handling(lease, claim);
    assert!(shared.custody.leases().contains(&lease));
    (shared.custody).settled(lease, sent.into_iter(), &Prefetched::new());
    assert_eq!(
        shared.custody.begin_release(lease, Range::ALL),
        Some(Vec::new())
    );
    assert!(shared.custody.leases().is_empty());
}

/// R65: a doubt is told, with its age, and holds up nothing else.
#[test]
fn a_doubt_is_a_problem_that_fails_no_probe() {
    let shared = shared();
    look(&shared);
    shared.custody.begin_doubt(LeaseId(1), RanBy::Any);
    let told = health(&shared);
    assert_eq!(kinds(&shared), [ProblemKind::ClaimInDoubt]);
    assert!(told.is_live() && told.is_ready());
    let beginning = "claim_in_doubt: the answer of a claim was lost 0 s ago";
    assert!(told.to_string().starts_with(beginning), "{told}");
    assert!(is_free_to_claim(&shared));
    let doubt = shared.custody.doubt().expect("a doubt");
    shared.custody.end_doubt(&doubt);
    assert_eq!(health(&shared).to_string(), "ok");
}
