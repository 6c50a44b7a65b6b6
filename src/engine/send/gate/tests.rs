//! What closes and opens a gate.

use super::*;
use crate::config::{Destination, Rate};
use crate::dispatch::Response;
use crate::engine::send::sql::pause::{BREAKER_OPEN, Paused};
use crate::hand::Hand;

impl Gate {
    /// The right to one send, or how long to wait for it. Does not wait.
    pub(crate) fn ask(&self) -> Admission {
        self.try_admit(&mut self.lock(), clock::now())
    }
}

fn gate(change: impl FnOnce(&mut Destination)) -> Gate {
    let mut destination = Destination::new("a", "http://a").expect("a URL");
    change(&mut destination);
    let policy = &destination.policy;
    Gate::new(&destination.name, policy.rate, policy.breaker, None)
}

fn failed(code: ReasonCode) -> Outcome {
    Outcome::Retry(Failure::new(code, ""))
}

fn asked_to_wait(duration: Duration) -> Outcome {
    let mut failure = Failure::new(ReasonCode::RateLimited, "");
    failure.pause = Some(Pause::For(duration));
    Outcome::Retry(failure)
}

fn delivered() -> Outcome {
    Outcome::Delivered(Response::default())
}

fn send(gate: &Gate, outcome: &Outcome) {
    let pass = gate.admit(|| true).expect("the gate is open");
    gate.record(&pass, outcome);
}

fn row(reason: &str, left: Option<Duration>) -> Paused {
    Paused {
        kind: "destination".to_owned(),
        name: "a".to_owned(),
        reason: reason.to_owned(),
        by: Hand::Operator,
        openings: 1,
        left,
    }
}

#[test]
fn the_first_send_goes_alone_and_its_answer_closes_the_gate_for_all() {
    let gate = gate(|_| {});
    let first = gate.admit(|| true).expect("the gate is open");
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| gate.admit(|| true).is_some()))
            .collect();
        gate.record(&first, &asked_to_wait(Duration::from_secs(2)));
        for other in others {
            assert!(!other.join().expect("no panic"), "a send passed");
        }
    });
    assert_eq!(gate.room(), Room::Closed);
    assert!(matches!(gate.take_news(), Some(GateNews::Paused(..))));
}

/// Sends in flight get their responses a moment apart.
#[test]
fn a_pause_that_is_longer_by_a_moment_is_kept_and_no_news() {
    let gate = gate(|_| {});
    let passes: Vec<Pass> = (0..3)
        .map(|_| {
            let pass = gate.admit(|| true).expect("the gate is open");
            gate.record(&pass, &Outcome::Delivered(Response::default()));
            pass
        })
        .collect();
    gate.record(&passes[0], &asked_to_wait(Duration::from_secs(5)));
    assert!(matches!(gate.take_news(), Some(GateNews::Paused(..))));
    let before = gate.opens_at();
    gate.record(&passes[1], &asked_to_wait(Duration::from_millis(5500)));
    assert!(gate.take_news().is_none());
    assert!(gate.opens_at() > before);
    gate.record(&passes[2], &asked_to_wait(Duration::from_secs(20)));
    assert!(matches!(gate.take_news(), Some(GateNews::Paused(..))));
}

#[test]
fn a_slow_first_send_holds_the_others_for_a_moment_only() {
    let gate = gate(|_| {});
    let _first = gate.admit(|| true).expect("the gate is open");
    let began = Instant::now();
    assert!(gate.admit(|| true).is_some());
    assert!(began.elapsed() >= FIRST_SEND / 2);
    assert!(gate.admit(|| true).is_some(), "later sends do not wait");
}

#[test]
fn a_breaker_opens_probes_and_closes() {
    let gate = gate(|destination| {
        destination.policy.breaker = Some(Breaker {
            min_sends: 2,
            open: Duration::from_millis(1),
            ..Breaker::default()
        });
    });
    send(&gate, &failed(ReasonCode::Timeout));
    send(&gate, &failed(ReasonCode::Timeout));
    assert!(matches!(gate.take_news(), Some(GateNews::Opened(_, 1))));
    let later = Instant::now() + Duration::from_millis(5);
    assert!(gate.open_in_time(later));
    gate.begin_probe(Duration::from_secs(9));
    assert_eq!(gate.room(), Room::One);
    send(&gate, &failed(ReasonCode::Timeout));
    let Some(GateNews::Opened(until, 2)) = gate.take_news() else {
        panic!("a failed probe opens it again");
    };
    let longer = until.saturating_duration_since(Instant::now());
    assert!(longer <= Duration::from_millis(2), "{longer:?}");
    gate.begin_probe(Duration::from_secs(9));
    send(&gate, &delivered());
    assert_eq!(gate.take_news(), Some(GateNews::Recovered));
    assert_eq!(gate.room(), Room::Free);
}

#[test]
fn without_a_breaker_failures_close_nothing() {
    let gate = gate(|destination| destination.policy.breaker = None);
    for _ in 0..200 {
        send(&gate, &failed(ReasonCode::Timeout));
    }
    assert_eq!(gate.room(), Room::Free);
}

#[test]
fn a_row_of_the_table_closes_and_opens_the_gate() {
    let gate = gate(|_| {});
    let now = Instant::now();
    gate.learn(Some(&row("OPERATOR", None)), now);
    assert_eq!(gate.room(), Room::Closed);
    assert_eq!(gate.opens_at(), None);
    gate.learn(None, now);
    assert_eq!(gate.room(), Room::Free);
    gate.learn(
        Some(&row("RATE_LIMITED", Some(Duration::from_secs(3)))),
        now,
    );
    assert_eq!(gate.opens_at(), Some(now + Duration::from_secs(3)));
    assert!(!gate.open_in_time(now + Duration::from_secs(4)));
    assert_eq!(gate.room(), Room::Free);
}

#[test]
fn an_expired_row_closes_nothing_and_that_of_a_breaker_asks_for_a_probe() {
    let gate = gate(|_| {});
    let now = Instant::now();
    let over = Some(Duration::ZERO);
    gate.learn(Some(&row("RATE_LIMITED", over)), now);
    assert_eq!(gate.room(), Room::Free);
    gate.learn(Some(&row(BREAKER_OPEN, over)), now);
    assert!(gate.open_in_time(now));
    // Meanwhile another reason has replaced the breaker, and has expired, too.
    gate.learn(Some(&row("RATE_LIMITED", over)), now);
    assert!(!gate.open_in_time(now));
    assert_eq!(gate.room(), Room::Free);
}

#[test]
fn news_that_is_not_recorded_yet_is_not_forgotten() {
    let gate = gate(|_| {});
    send(&gate, &asked_to_wait(Duration::from_secs(9)));
    gate.learn(None, Instant::now());
    assert_eq!(gate.room(), Room::Closed);
    let news = gate.take_news().expect("news");
    gate.keep_news(news);
    gate.learn(None, Instant::now());
    assert_eq!(gate.room(), Room::Closed);
}

#[test]
fn who_waits_for_the_rate_goes_when_it_is_not_wanted_any_more() {
    let gate = gate(|destination| destination.policy.rate = Some(Rate::per_second(0.001)));
    send(&gate, &delivered());
    let is_wanted = std::sync::atomic::AtomicBool::new(true);
    std::thread::scope(|scope| {
        let waiting =
            scope.spawn(|| gate.admit(|| is_wanted.load(std::sync::atomic::Ordering::SeqCst)));
        is_wanted.store(false, std::sync::atomic::Ordering::SeqCst);
        gate.wake();
        assert!(waiting.join().expect("no panic").is_none());
    });
}

#[test]
fn a_right_to_probe_that_is_not_used_comes_to_its_end() {
    let gate = gate(|_| {});
    gate.begin_probe(Duration::ZERO);
    assert!(gate.open_in_time(Instant::now()));
    assert_eq!(gate.room(), Room::Closed);
    gate.begin_probe(Duration::from_secs(9));
    assert!(!gate.open_in_time(Instant::now()));
    assert_eq!(gate.room(), Room::One);
}

#[test]
fn a_breaker_of_others_neither_closes_nor_holds_a_gate_without_one() {
    let gate = gate(|destination| destination.policy.breaker = None);
    let now = Instant::now();
    let open = row(BREAKER_OPEN, Some(Duration::from_secs(60)));
    gate.learn(Some(&open), now);
    assert_eq!(gate.room(), Room::Free);
    let asked = row("RATE_LIMITED", Some(Duration::from_secs(2)));
    gate.learn([&asked, &open], now);
    assert_eq!(gate.opens_at(), Some(now + Duration::from_secs(2)));
    gate.learn(Some(&open), now);
    assert_eq!(gate.room(), Room::Free);
}

/// R66: each hand has a pause of its own. The gate stays closed until all have ended.
#[test]
fn the_gate_stays_closed_until_the_last_of_several_pauses_ends() {
    let gate = gate(|_| {});
    let now = Instant::now();
    let open = row(BREAKER_OPEN, Some(Duration::from_secs(9)));
    let of_owner = row("HOLIDAY", Some(Duration::from_secs(60)));
    let asked = row("RATE_LIMITED", Some(Duration::from_secs(5)));
    gate.learn([&open, &of_owner, &asked], now);
    assert_eq!(gate.opens_at(), Some(now + Duration::from_secs(60)));
    gate.learn([&open, &row("HOLIDAY", None)], now);
    assert_eq!((gate.room(), gate.opens_at()), (Room::Closed, None));
    gate.learn([&open, &asked], now);
    assert_eq!(gate.opens_at(), Some(now + Duration::from_secs(9)));
}

fn not_sent() -> Outcome {
    Outcome::Wait(Failure::new(ReasonCode::Proxy, "the proxy is away"))
}

/// R50: the machine or the proxy has a trouble, and many messages wait.
#[test]
fn while_this_relay_cannot_send_one_message_at_a_time_is_tried() {
    let gate = gate(|_| {});
    let mut now = Instant::now();
    send(&gate, &not_sent());
    for _ in 0..10 {
        assert_eq!(gate.room(), Room::Closed, "held");
        now = gate.opens_at().expect("an end of the hold").max(now);
        assert!(!gate.open_in_time(now));
        assert_eq!(gate.room(), Room::One, "one message is claimed as a probe");
        let Admission::Pass(first) = gate.try_pass(now) else {
            panic!("the probe may go");
        };
        assert_eq!(gate.room(), Room::Closed, "the probe is in flight");
        now += FIRST_SEND;
        assert!(
            matches!(gate.try_pass(now), Admission::Wait(_)),
            "a slow probe goes alone, too"
        );
        gate.record(&first, &not_sent());
    }
    now = gate.opens_at().expect("an end of the hold");
    let _ = gate.open_in_time(now);
    let Admission::Pass(first) = gate.try_pass(now) else {
        panic!("the probe may go");
    };
    assert!(gate.record(&first, &delivered()), "the claimer must know");
    assert_eq!(gate.room(), Room::Free);
}

/// R50
#[test]
fn a_probe_that_this_relay_cannot_send_is_tried_again_later_with_the_right_to_it() {
    let gate = gate(|_| {});
    gate.begin_probe(Duration::from_secs(9));
    send(&gate, &not_sent());
    assert_eq!(gate.room(), Room::Closed, "held");
    assert!(gate.has_unused_probe());
    gate.learn(
        Some(&row(BREAKER_OPEN, Some(Duration::ZERO))),
        Instant::now(),
    );
    let held_until = gate.opens_at().expect("an end of the hold");
    assert!(!gate.open_in_time(held_until));
    assert_eq!(gate.room(), Room::One);
    // Without a right that is still valid, the table is asked again.
    send(&gate, &not_sent());
    let late = Instant::now() + Duration::from_secs(60);
    assert!(gate.open_in_time(late));
}

/// R50: nothing opens it again, and nobody else learns of it.
#[test]
fn a_gate_whose_code_panicked_stays_closed() {
    let gate = gate(|_| {});
    assert_eq!(gate.guard(|| 7), Some(7));
    let pass = gate.admit(|| true).expect("the gate is open");
    gate.record(&pass, &asked_to_wait(Duration::from_secs(1)));
    assert_eq!(gate.guard(|| -> u8 { panic!("a bug") }), None);
    assert!(!gate.has_news(), "the pause is this relay's");
    let later = clock::now() + Duration::from_secs(3600);
    for _ in 0..2 {
        assert!(gate.admit(|| true).is_none());
        assert!(matches!(gate.try_pass(later), Admission::Closed));
        assert_eq!(
            (gate.room(), gate.standing()),
            (Room::Closed, Standing::Held)
        );
        assert_eq!(gate.opens_at(), None);
        assert!(!gate.record(&pass, &delivered()));
        gate.learn(Some(&row("BREAKER_OPEN", Some(Duration::ZERO))), later);
        gate.learn(None, later);
        assert!(!gate.open_in_time(later));
        gate.begin_probe(Duration::from_secs(1));
        gate.return_pass(&pass);
    }
    let trouble = gate.trouble().expect("a trouble");
    assert_eq!(trouble.code, ReasonCode::Panic);
    assert!(trouble.what.contains("panicked: a bug"), "{}", trouble.what);
}
