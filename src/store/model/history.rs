//! What happens in a history.

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_oneof};

/// Transactions that may be open at once.
pub(super) const PRODUCERS: usize = 3;
/// Relays that may be at work at once.
pub(super) const RELAYS: usize = 3;

/// Steps, and which of the transactions that are open at the end commit.
#[derive(Debug, Clone)]
pub(super) struct History {
    pub(super) steps: Vec<Step>,
    pub(super) commits: Vec<bool>,
}

/// A message to be enqueued.
#[derive(Debug, Clone)]
pub(super) struct New {
    pub(super) topic: &'static str,
    pub(super) destination: &'static str,
    pub(super) ordering_key: Option<&'static str>,
    /// One of few, where it is given.
    pub(super) idempotency_key: Option<&'static str>,
    pub(super) body: u8,
    pub(super) is_due: bool,
    pub(super) is_expired: bool,
}

/// How a relay finds keyed messages that it could claim.
#[derive(Debug, Clone, Copy)]
pub(super) enum Find {
    Due,
    Walk,
    /// It tries them all: the claim itself has to choose.
    Guess,
}

/// What others do while a relay's transaction is open.
#[derive(Debug, Clone)]
pub(super) enum Aside {
    Commit(usize),
    Claim(usize),
    ClaimKeyed(usize, Find),
}

/// What a receiver says, or why nothing was sent.
#[derive(Debug, Clone, Copy)]
pub(super) enum Outcome {
    Delivered,
    Failed { is_due_again: bool },
    Refused { blocks_key: bool },
    Waits,
    Released,
}

/// Whether a claim's answer arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Heard,
    Lost,
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Enqueue(usize, Vec<New>),
    Commit(usize),
    RollBack(usize),
    Claim {
        relay: usize,
        room: usize,
        is_sweep: bool,
        answer: Answer,
        meanwhile: Vec<Aside>,
    },
    ClaimKeyed {
        relay: usize,
        find: Find,
        answer: Answer,
        meanwhile: Vec<Aside>,
    },
    /// The relay sends one of its messages and does not settle it yet.
    Send(usize, usize),
    Settle {
        relay: usize,
        pick: usize,
        outcome: Outcome,
    },
    /// The key goes on, and others do something before that and after it.
    SettleAndContinue {
        relay: usize,
        pick: usize,
        outcome: Outcome,
        before: Vec<Aside>,
        after: Vec<Aside>,
    },
    /// All that it has sent is delivered, by one statement.
    SettleAll(usize),
    /// The answer of its last settle was lost: it settles once more.
    Repeat(usize),
    /// It gives back what its lease holds and it does not know of.
    ReleaseUnknown(usize),
    Renew(usize),
    /// Its lease is over, and it works on.
    LoseLease(usize),
    Die(usize),
    /// Leases of dead relays run out.
    GhostsEnd,
    /// It claims and delivers, with nothing but success.
    Drain(usize),
    /// It looks which leases are over, and claims what it can.
    TakeOver(usize),
    ShutDown(usize),
    Requeue(usize),
    Discard(usize),
    /// What waited for its time is due.
    TimePasses,
    /// Leases that are over and hold nothing are forgotten.
    Forget,
    /// The standby has everything up to here.
    Replicate,
    /// The standby becomes the primary: what came since is lost, and sequences are given out again.
    FailOver,
}

pub(super) fn histories() -> impl Strategy<Value = History> {
    let steps = prop_oneof![
        40 => step().prop_map(|step| vec![step]),
        3 => late(),
        1 => failover(),
    ];
    (vec(steps, 1..70), vec(any::<bool>(), PRODUCERS)).prop_map(|(steps, commits)| History {
        steps: steps.concat(),
        commits,
    })
}

/// A key with nothing but two messages, and one before them that is not committed yet. Some of these
/// go on at once: the first one is settled, and the late one is committed while the key goes on.
fn late() -> impl Strategy<Value = Vec<Step>> {
    let names_none = |new: New| New {
        destination: "",
        ..new
    };
    let first = new(Just(Some("k1"))).prop_map(names_none);
    let others = vec(new(Just(Some("k1"))).prop_map(names_none), 2);
    let who = (relay(), 0..PRODUCERS, find());
    (who, first, others, any::<bool>()).prop_map(|(who, first, others, goes_on)| {
        let (relay, producer, find) = who;
        let another = (producer + 1) % PRODUCERS;
        let mut steps = vec![
            Step::Drain(relay),
            Step::Enqueue(producer, vec![first]),
            Step::Enqueue(another, others),
            Step::Commit(another),
        ];
        if goes_on {
            let another = (relay + 1) % RELAYS;
            steps.push(Step::ClaimKeyed {
                relay,
                find,
                answer: Answer::Heard,
                meanwhile: Vec::new(),
            });
            steps.push(Step::SettleAndContinue {
                relay,
                pick: 0,
                outcome: Outcome::Delivered,
                before: vec![Aside::ClaimKeyed(another, find), Aside::Commit(producer)],
                after: Vec::new(),
            });
        }
        steps
    })
}

/// A relay has sent what the new primary does not have, and claims what has got the same sequences.
fn failover() -> impl Strategy<Value = Vec<Step>> {
    let news = || vec(new(any_key()), 1..3);
    let who = (relay(), 0..PRODUCERS, find(), outcome());
    (who, news(), news()).prop_map(|(who, lost, others)| {
        let (relay, producer, find, outcome) = who;
        let get = |new: Vec<New>| {
            let answer = Answer::Heard;
            [
                Step::Enqueue(producer, new),
                Step::Commit(producer),
                Step::Claim {
                    relay,
                    room: 3,
                    is_sweep: true,
                    answer,
                    meanwhile: Vec::new(),
                },
                Step::ClaimKeyed {
                    relay,
                    find,
                    answer,
                    meanwhile: Vec::new(),
                },
            ]
        };
        let settle = Step::Settle {
            relay,
            pick: 0,
            outcome,
        };
        let mut steps = vec![Step::Drain(relay), Step::Replicate];
        steps.extend(get(lost));
        steps.push(Step::FailOver);
        steps.extend(get(others));
        steps.extend([settle.clone(), settle]);
        steps
    })
}

fn producer() -> impl Strategy<Value = usize> {
    0..PRODUCERS
}

/// The last one has little to do.
fn relay() -> impl Strategy<Value = usize> {
    prop_oneof![4 => Just(0_usize), 4 => Just(1_usize), 1 => 2..RELAYS]
}

fn pick() -> impl Strategy<Value = usize> {
    0_usize..8
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => producer().prop_map(Step::Commit),
        1 => producer().prop_map(Step::RollBack),
        18 => (producer(), vec(new(any_key()), 1..3)).prop_map(|(producer, new)| Step::Enqueue(producer, new)),
        15 => claims(),
        3 => (relay(), pick()).prop_map(|(relay, pick)| Step::Send(relay, pick)),
        12 => settles(),
        10 => settles_and_continues(),
        2 => relay().prop_map(Step::SettleAll),
        3 => relay().prop_map(Step::Repeat),
        1 => relay().prop_map(Step::ReleaseUnknown),
        24 => lives(),
        4 => pick().prop_map(Step::Requeue),
        1 => pick().prop_map(Step::Discard),
        1 => relay().prop_map(Step::Drain),
        1 => Just(Step::TimePasses),
        1 => Just(Step::Forget),
        1 => Just(Step::Replicate),
        1 => Just(Step::FailOver),
    ]
}

fn lives() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => relay().prop_map(Step::Renew),
        5 => relay().prop_map(Step::LoseLease),
        2 => relay().prop_map(Step::Die),
        2 => Just(Step::GhostsEnd),
        8 => relay().prop_map(Step::TakeOver),
        1 => relay().prop_map(Step::ShutDown),
    ]
}

fn any_key() -> impl Strategy<Value = Option<&'static str>> {
    prop_oneof![
        2 => Just(None),
        4 => Just(Some("k1")),
        2 => Just(Some("k2")),
    ]
}

fn new(ordering_key: impl Strategy<Value = Option<&'static str>>) -> impl Strategy<Value = New> {
    let destination = prop_oneof![5 => Just(""), 2 => Just("a"), 1 => Just("b")];
    let idempotency_key =
        prop_oneof![4 => Just(None), 1 => Just(Some("i1")), 1 => Just(Some("i2"))];
    let topic = prop_oneof![4 => Just("plain"), 2 => Just("direct"), 1 => Just("fan")];
    (
        (topic, destination, ordering_key, idempotency_key),
        prop_oneof![3 => Just(0_u8), 1 => Just(1_u8)],
        prop_oneof![8 => Just(true), 1 => Just(false)],
        prop_oneof![12 => Just(false), 1 => Just(true)],
    )
        .prop_map(|(names, body, is_due, is_expired)| {
            let (topic, destination, ordering_key, idempotency_key) = names;
            New {
                topic,
                destination,
                ordering_key,
                idempotency_key,
                body,
                is_due,
                is_expired,
            }
        })
}

fn find() -> impl Strategy<Value = Find> {
    prop_oneof![Just(Find::Due), Just(Find::Walk), Just(Find::Guess)]
}

fn asides() -> impl Strategy<Value = Vec<Aside>> {
    let aside = prop_oneof![
        2 => producer().prop_map(Aside::Commit),
        1 => relay().prop_map(Aside::Claim),
        2 => (relay(), find()).prop_map(|(relay, find)| Aside::ClaimKeyed(relay, find)),
    ];
    // What is committed just then is looked for by another relay.
    let race = (producer(), relay(), find()).prop_map(|(producer, relay, find)| {
        vec![Aside::Commit(producer), Aside::ClaimKeyed(relay, find)]
    });
    let late = (producer(), relay(), find()).prop_map(|(producer, relay, find)| {
        vec![Aside::ClaimKeyed(relay, find), Aside::Commit(producer)]
    });
    prop_oneof![2 => vec(aside, 0..4), 1 => race, 1 => late]
}

fn answer() -> impl Strategy<Value = Answer> {
    prop_oneof![9 => Just(Answer::Heard), 1 => Just(Answer::Lost)]
}

fn claims() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (relay(), 1_usize..4, any::<bool>(), answer(), asides()).prop_map(
            |(relay, room, is_sweep, answer, meanwhile)| Step::Claim {
                relay,
                room,
                is_sweep,
                answer,
                meanwhile,
            }
        ),
        2 => (relay(), find(), answer(), asides()).prop_map(
            |(relay, find, answer, meanwhile)| Step::ClaimKeyed {
                relay,
                find,
                answer,
                meanwhile,
            }
        ),
    ]
}

fn outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        5 => Just(Outcome::Delivered),
        3 => any::<bool>().prop_map(|is_due_again| Outcome::Failed { is_due_again }),
        2 => any::<bool>().prop_map(|blocks_key| Outcome::Refused { blocks_key }),
        1 => Just(Outcome::Waits),
        2 => Just(Outcome::Released),
    ]
}

fn settles() -> impl Strategy<Value = Step> {
    (relay(), pick(), outcome()).prop_map(|(relay, pick, outcome)| Step::Settle {
        relay,
        pick,
        outcome,
    })
}

fn settles_and_continues() -> impl Strategy<Value = Step> {
    let done = prop_oneof![
        5 => Just(Outcome::Delivered),
        1 => Just(Outcome::Refused { blocks_key: false }),
    ];
    (relay(), pick(), done, asides(), asides()).prop_map(|(relay, pick, outcome, before, after)| {
        Step::SettleAndContinue {
            relay,
            pick,
            outcome,
            before,
            after,
        }
    })
}
