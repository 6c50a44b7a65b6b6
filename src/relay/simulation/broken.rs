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
    /// A relay whose session is gone sends for as long as its lease would have lasted.
    OutlivesItsSession,
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
    /// A look for late commits finds none.
    OverlooksWhatIsLate,
    /// Nobody hears that a registered destination is gone.
    OverlooksWhatIsRemoved,
    /// The end of a send to a registered destination makes no place for the next one.
    LosesTurns,
    /// While one registered destination has messages, the pool serves no other.
    PrefersOne,
    /// The pool for registered destinations takes failures for successes.
    TrustsWhatFails,
    /// A key goes on after the settle's transaction, and not in it.
    ContinuesLater,
    /// What a transaction has enqueued that is rolled back stays.
    KeepsWhatIsRolledBack,
    /// The ledger does not get to know what is delivered.
    ForgetsWhatIsDelivered,
    /// The ledger is not asked whether a key was delivered.
    ForgetsKeys,
    /// Requeued messages stay dead letters, too.
    RequeuesCopies,
    /// A settle changes what its lease holds, whenever that was claimed.
    SettlesByLease,
    /// A lease that is over claims.
    ClaimsUnderWhatIsOver,
    /// A keyed claim takes messages behind others that are live.
    ClaimsWhatIsNotFirst,
    /// A keyed claim takes messages beside others that are held.
    ClaimsWhatIsNotAlone,
    /// A keyed claim takes messages that dead letters keep back.
    ClaimsWhatIsKeptBack,
    /// Keyed claims do not exclude one another.
    ClaimsKeyedAtOnce,
    /// A failed attempt costs nothing.
    RetriesForFree,
    /// A message that was given back unsent pays for it.
    CountsReleases,
    /// A message that kills relays does so for ever.
    TakesOverForFree,
}

impl Broken {
    /// Each that the simulation has to find, and the promises that do not hold.
    pub(super) const OF_RELAYS: [(Self, &'static [Promise]); 24] = [
        (
            Self::SettlesUnfenced,
            &[
                Promise::Lost,
                Promise::Fence,
                Promise::Doubled,
                Promise::Attempts,
            ],
        ),
        (Self::ClaimsAnyOfKey, &[Promise::Order]),
        (
            Self::TakesOverFromTheLiving,
            &[Promise::Fence, Promise::Order],
        ),
        (
            Self::ClaimsWhatIsLocked,
            &[Promise::Fence, Promise::Order, Promise::Doubled],
        ),
        (Self::CountsTakeoversTwice, &[Promise::Attempts]),
        (Self::NeverTakesOver, &[Promise::Lost]),
        (Self::RenewsWhatIsOver, &[Promise::Fence, Promise::Order]),
        (Self::SendsTooLong, &[Promise::Fence, Promise::Order]),
        (
            Self::MeasuresByTheWrongClock,
            &[Promise::Fence, Promise::Order],
        ),
        (Self::OutlivesItsSession, &[Promise::Fence, Promise::Order]),
        (Self::ForgetsDoubts, &[Promise::Late, Promise::Lost]),
        (Self::DoubtsNoOneAtWork, &[Promise::Late, Promise::Lost]),
        (Self::UndoesNothing, &[Promise::Late, Promise::Lost]),
        (Self::TakesEachServerForTheSame, &[Promise::Lost]),
        (Self::LosesRings, &[Promise::Late]),
        (Self::LosesNews, &[Promise::Late]),
        (Self::LosesHandOvers, &[Promise::Lost]),
        (Self::SleepsAtOnce, &[Promise::Late]),
        (Self::OverlooksWhatIsLate, &[Promise::Late]),
        (Self::ContinuesLater, &[Promise::Order]),
        (Self::OverlooksWhatIsRemoved, &[Promise::Lost]),
        (Self::LosesTurns, &[Promise::Late, Promise::Lost]),
        (Self::PrefersOne, &[Promise::Fair, Promise::Late]),
        (Self::TrustsWhatFails, &[Promise::Late]),
    ];

    /// What statements would do that are broken: each that the comparison with PostgreSQL has to find.
    pub(super) const OF_STATEMENTS: [Self; 21] = [
        Self::SettlesUnfenced,
        Self::SettlesByLease,
        Self::ClaimsUnderWhatIsOver,
        Self::ClaimsWhatIsLocked,
        Self::ClaimsWhatIsNotFirst,
        Self::ClaimsWhatIsNotAlone,
        Self::ClaimsWhatIsKeptBack,
        Self::ClaimsKeyedAtOnce,
        Self::TakesOverFromTheLiving,
        Self::TakesOverForFree,
        Self::CountsTakeoversTwice,
        Self::NeverTakesOver,
        Self::RenewsWhatIsOver,
        Self::UndoesNothing,
        Self::RetriesForFree,
        Self::CountsReleases,
        Self::ForgetsWhatIsDelivered,
        Self::ForgetsKeys,
        Self::RequeuesCopies,
        Self::KeepsWhatIsRolledBack,
        Self::ClaimsAnyOfKey,
    ];
}
