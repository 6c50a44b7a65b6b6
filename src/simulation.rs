//! The relay in a simulated world. Its claimer, settlers, gates and heartbeat run against a simulated database,
//! receivers and clocks. A seed decides what these do. After each step, the promises of `promises.rs` are checked.
//!
//! `make simulate` plays many histories (`SEED=`, `HISTORIES=`, `MINUTES=`), `make test` plays some.
//!
//! Why: docs/decisions.md#simulation

mod broken;
mod feeds;
mod history;
mod link;
mod process;
mod promises;
mod same;
mod stage;
mod tables;
mod wants;

use std::cell::OnceCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use self::broken::Broken;
use self::history::History;
use self::promises::Fall;
use self::stage::{MOST_PROCESSES, Stage};

/// The default number of histories.
const HISTORIES: u64 = 300;
/// Each broken variant must be found within this many histories.
const HISTORIES_OF_BROKEN: u64 = 2000;
/// Variants that are found by one history of hundreds, and a seed soon before such a one: it saves half of the test's time.
const RARE: [(Broken, u64); 3] = [
    (Broken::OverlooksCrashes, 940),
    (Broken::OutlivesItsSession, 1040),
    (Broken::ContinuesLater, 570),
];
/// How many histories are played twice.
const SAME: u64 = 40;
/// How often progress is printed.
const PROGRESS: Duration = Duration::from_secs(10);

/// Plays a history. Returns the first broken promise, and the story if `tells`.
fn play(history: &History, broken: Option<Broken>, tells: bool) -> (Option<Fall>, Vec<String>) {
    let slots: Vec<OnceCell<_>> = (0..MOST_PROCESSES).map(|_| OnceCell::new()).collect();
    let stage = Stage::new(history, broken, &slots, tells);
    let fall = stage.play();
    let story = stage.story.take();
    (fall, story.unwrap_or_default())
}

/// The history with as few items as still break the promise.
fn shortest(history: &History, fall: &Fall) -> History {
    let mut history = history.clone();
    let mut number = 0;
    while number < history.items.len() {
        let mut shorter = history.clone();
        shorter.items.remove(number);
        let (other, _) = play(&shorter, None, false);
        match other.is_some_and(|other| other.promise == fall.promise) {
            true => history = shorter,
            false => number += 1,
        }
    }
    history
}

/// The shortest story that breaks the promise.
fn story(history: &History, fall: &Fall) -> String {
    let history = shortest(history, fall);
    let (fall, story) = play(&history, None, true);
    let fall = fall.expect("the same history breaks the promise again");
    format!("{history}{}\n{fall}", story.join("\n"))
}

fn setting(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok().filter(|value| !value.is_empty())?;
    Some(value.parse().expect(name))
}

/// Plays histories on all cores, from this seed on, until a history breaks a promise.
fn find(
    from: u64,
    broken: Option<Broken>,
    continues: impl Fn(u64) -> bool + Sync,
) -> (u64, Option<(u64, Fall)>) {
    let next = AtomicU64::new(from);
    let found: Mutex<Option<(u64, Fall)>> = Mutex::new(None);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let is_found = found.lock().expect("no panic").is_some();
                    if is_found || !continues(seed - from) {
                        break;
                    }
                    if let (Some(fall), _) = play(&History::of(seed), broken, false) {
                        let mut found = found.lock().expect("no panic");
                        // Keep the lower seed, so that the result does not depend on which core was faster.
                        if found.as_ref().is_none_or(|(other, _)| seed < *other) {
                            *found = Some((seed, fall));
                        }
                    }
                }
            });
        }
    });
    let played = next.into_inner() - from;
    (
        played.saturating_sub(cores as u64),
        found.into_inner().expect("no panic"),
    )
}

/// R49: G1 to G6 hold, and no message waits longer than necessary, whatever happens to the relays.
#[test]
fn the_promises_hold_in_each_history() {
    let from = setting("SEED").unwrap_or(1);
    let minutes = setting("MINUTES").map(|minutes| Duration::from_secs(60 * minutes));
    let count = setting("HISTORIES").or(minutes.is_none().then_some(HISTORIES));
    let began = Instant::now();
    let told = Mutex::new(began);
    let (played, found) = find(from, None, |played| {
        let mut told = told.lock().expect("no panic");
        if told.elapsed() >= PROGRESS {
            *told = Instant::now();
            eprintln!("{played} histories, {:.0} a second", rate(played, began));
        }
        count.is_none_or(|count| played < count)
            && minutes.is_none_or(|most| began.elapsed() < most)
    });
    eprintln!("{played} histories, {:.0} a second", rate(played, began));
    if let Some((seed, fall)) = found {
        panic!(
            "make simulate SEED={seed} HISTORIES=1\n{}",
            story(&History::of(seed), &fall)
        );
    }
}

#[allow(clippy::cast_precision_loss, reason = "for people to read")]
fn rate(played: u64, began: Instant) -> f64 {
    played as f64 / began.elapsed().as_secs_f64()
}

/// R49: each broken variant is found; otherwise the simulation would prove nothing.
#[test]
fn each_broken_variant_is_found_out() {
    let mut missed = Vec::new();
    let only = std::env::var("BROKEN").unwrap_or_default();
    for (broken, promises) in Broken::OF_RELAYS {
        if !format!("{broken:?}").contains(&only) {
            continue;
        }
        let most = setting("HISTORIES").unwrap_or(HISTORIES_OF_BROKEN);
        let rare = RARE.iter().find(|(rare, _)| *rare == broken);
        let from = rare.map_or(1, |(_, seed)| *seed);
        let (_, found) = find(from, Some(broken), |played| played < most);
        match found {
            Some((seed, fall)) if promises.contains(&fall.promise) => {
                eprintln!("{broken:?}: {:?} in the history {seed}", fall.promise);
            }
            found => missed.push((broken, found)),
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

/// R49: a seed determines its history to the microsecond.
#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 1..=SAME {
        let history = History::of(seed);
        let (_, first) = play(&history, None, true);
        let (_, second) = play(&history, None, true);
        assert!(!first.is_empty());
        let differs = first.iter().zip(&second).find(|(one, other)| one != other);
        assert_eq!((differs, first.len()), (None, second.len()), "seed {seed}");
    }
}
