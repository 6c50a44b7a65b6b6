//! Variants of the relay and of its database that are broken on purpose: the simulation has to find each.

use super::promises::Promise;

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broken {
    /// A settle changes a message whoever holds it.
    SettlesUnfenced,
    /// A keyed claim takes messages that are not the first of their keys.
    ClaimsAnyOfKey,
    /// Messages of leases that are not over are taken over.
    TakesOverFromTheLiving,
    /// A claim takes what another one is about to take.
    ClaimsWhatIsLocked,
    /// A takeover counts as two attempts.
    CountsTakeoversTwice,
    /// What a dead relay held is left to it.
    NeverTakesOver,
    /// A lease that is over is renewed.
    RenewsWhatIsOver,
    /// A relay sends until its lease is over for the database, and its sends go on after that.
    SendsTooLong,
    /// The lease is measured by a clock that stands still while the machine sleeps.
    MeasuresByTheWrongClock,
    /// A claim without an answer is taken for one that has failed.
    ForgetsDoubts,
    /// A claim without an answer is undone while it is at work still.
    DoubtsNoOneAtWork,
    /// What a claim without an answer took is not given back.
    UndoesNothing,
    /// Nobody notices that another server has taken the place of the one before.
    TakesEachServerForTheSame,
    /// Nobody rings the claimer.
    LosesRings,
    /// Nobody tells the claimer of commits.
    LosesNews,
    /// What a settler has claimed for the claimer does not come there.
    LosesHandOvers,
    /// The relay does not look once more when it has fallen asleep.
    SleepsAtOnce,
}

impl Broken {
    /// Each, and the promise that does not hold.
    pub(super) const ALL: [(Self, &'static [Promise]); 17] = [
        (
            Self::SettlesUnfenced,
            &[Promise::Lost, Promise::Fence, Promise::Doubled],
        ),
        (Self::ClaimsAnyOfKey, &[Promise::Order]),
        (
            Self::TakesOverFromTheLiving,
            &[Promise::Fence, Promise::Order],
        ),
        (Self::ClaimsWhatIsLocked, &[Promise::Fence, Promise::Order]),
        (Self::CountsTakeoversTwice, &[Promise::Attempts]),
        (Self::NeverTakesOver, &[Promise::Lost]),
        (Self::RenewsWhatIsOver, &[Promise::Fence, Promise::Order]),
        (Self::SendsTooLong, &[Promise::Fence, Promise::Order]),
        (
            Self::MeasuresByTheWrongClock,
            &[Promise::Fence, Promise::Order],
        ),
        (Self::ForgetsDoubts, &[Promise::Late, Promise::Lost]),
        (Self::DoubtsNoOneAtWork, &[Promise::Late, Promise::Lost]),
        (Self::UndoesNothing, &[Promise::Late, Promise::Lost]),
        (Self::TakesEachServerForTheSame, &[Promise::Lost]),
        (Self::LosesRings, &[Promise::Late]),
        (Self::LosesNews, &[Promise::Late]),
        (Self::LosesHandOvers, &[Promise::Lost]),
        (Self::SleepsAtOnce, &[Promise::Late]),
    ];
}
