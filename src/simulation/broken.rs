//! Variants of the relay and of its database that are broken on purpose. The simulation must find each of them.

use super::promises::Promise;

/// The broken behaviour.
// Why: docs/decisions.md#broken-variants
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broken {
    /// A settle changes a message even if another lease holds it.
    SettlesUnfenced,
    /// A keyed claim takes messages that are not the first of their keys.
    ClaimsAnyOfKey,
    /// Messages of unexpired leases are taken over.
    TakesOverFromTheLiving,
    /// A claim takes messages that another claim has locked.
    ClaimsWhatIsLocked,
    /// A takeover counts as two attempts.
    CountsTakeoversTwice,
    /// The relay's own limit decides which attempt of a message is the last, not the limit of the message's destination.
    TakesOverByOwnLimit,
    /// The messages of a dead relay are never taken over.
    NeverTakesOver,
    /// An expired lease is renewed.
    RenewsWhatIsOver,
    /// A relay that no longer sees its lease leaves the connections of its running sends open.
    LeavesSendsOpen,
    /// The lease is measured by a clock that stops while the machine sleeps.
    MeasuresByTheWrongClock,
    /// A relay whose session has ended sends for as long as its lease would have lasted.
    OutlivesItsSession,
    /// The new relay of a reload has the lease of the old relay, whose messages in flight are forgotten.
    ReloadsInPlace,
    /// A reload ends the lease of the old relay while the old relay still sends.
    ReloadsAtOnce,
    /// A claim without an answer counts as failed.
    ForgetsDoubts,
    /// A claim without an answer is undone while the server is still running it.
    DoubtsNoOneAtWork,
    /// After a claim without an answer, the relay claims nothing until all its messages in flight are settled.
    WaitsForAllInFlight,
    /// A settler continues keys while the claimer releases what it does not know.
    ContinuesWhileReleasing,
    /// The messages of a claim without an answer are not released.
    UndoesNothing,
    /// The relay does not notice that another server has replaced the previous one.
    TakesEachServerForTheSame,
    /// The relay does not notice that its connections were lost, unless another server has replaced the previous one.
    OverlooksCrashes,
    /// The claimer is never rung.
    LosesRings,
    /// The claimer never hears of commits.
    LosesNews,
    /// Messages that a settler has claimed never reach the claimer.
    LosesHandOvers,
    /// The relay does not poll once more after it has fallen asleep.
    SleepsAtOnce,
    /// A relay that is awake without work, as one that stands by, says that it has work.
    SharesWhileIdle,
    /// A query for late commits finds none.
    OverlooksWhatIsLate,
    /// The relay never hears that an endpoint was removed.
    OverlooksWhatIsRemoved,
    /// The relay does not know which destinations have been disabled since a message was enqueued.
    ForgetsAddressees,
    /// A relay claims the messages for another destination of the same name, which other relays serve.
    ClaimsForNamesakes,
    /// A message goes to whoever has the name of its destination.
    KnowsOnlyNames,
    /// The end of a send to an endpoint frees no place for the next send.
    LosesTurns,
    /// While one endpoint has messages, the pool serves no other.
    PrefersOne,
    /// The pool for endpoints counts failures as successes.
    TrustsWhatFails,
    /// A relay takes a URL that its own settings refuse for a row that no relay can use.
    RefusesForAll,
    /// The relay does not know the tenants of endpoints.
    OverlooksTenants,
    /// A claim does not show that destinations were registered since the relay has read them.
    OverlooksRegistrations,
    /// A destination gets messages of transactions that began before that of its registration.
    GivesWhatIsEarlier,
    /// The relay does not know which topics other relays have served before.
    OverlooksServedTopics,
    /// A relay that registers forgets the topics that no running relay serves.
    ForgetsServedTopics,
    /// The relay does not know the filters of endpoints.
    OverlooksFilters,
    /// The relay does not know that endpoints must be verified.
    OverlooksVerification,
    /// A destination that is not verified gets no messages, although they should wait for it.
    SkipsWhatIsNotVerified,
    /// Messages wait for a destination that gets none until it is verified.
    AddressesWhatSkips,
    /// Each endpoint gets the events about the outbox.
    GivesOwnEventsToAll,
    /// A key continues after the settle's transaction, not within it.
    ContinuesLater,
    /// The messages of a rolled-back transaction stay.
    KeepsWhatIsRolledBack,
    /// The ledger does not record deliveries.
    ForgetsWhatIsDelivered,
    /// A claim does not check the ledger for delivered keys.
    ForgetsKeys,
    /// A settle waits until a person unlocks its messages.
    WaitsForPeople,
    /// A refused request counts as a refusal of each of its messages.
    CountsRefusalsForAll,
    /// A handler without a connection counts as a failed attempt.
    CountsCallsNotMade,
    /// Operators are not told that a message waits for others of its key.
    TellsOfNoKeys,
    /// Operators are told that a message waits for later messages of its key.
    BlamesLaterMessages,
    /// Requeued messages also stay dead letters.
    RequeuesCopies,
    /// A replay drops the headers of a message.
    ReplaysWithoutHeaders,
    /// A replay has the time of the replay.
    ReplaysWithNewTime,
    /// A cancelled message does not let its key continue.
    CancelsAlone,
    /// A fan-out does not record how far it is.
    ForgetsHowFar,
    /// A settle changes every message that its lease holds, under any claim.
    SettlesByLease,
    /// An expired lease claims.
    ClaimsUnderWhatIsOver,
    /// A keyed claim takes messages behind earlier live messages.
    ClaimsWhatIsNotFirst,
    /// A keyed claim takes messages of keys that have another message in flight.
    ClaimsWhatIsNotAlone,
    /// A keyed claim takes messages whose keys are blocked by dead letters.
    ClaimsWhatIsKeptBack,
    /// Keyed claims do not exclude one another.
    ClaimsKeyedAtOnce,
    /// A run continues after a message that was not delivered.
    RunsPastFailures,
    /// A run leaves out messages that cannot be claimed.
    RunsOverGaps,
    /// The delivered messages of a run are settled one by one.
    SettlesRunsOneByOne,
    /// Of a request that the receiver refuses in part, a run is sent again from its beginning.
    RepeatsRefusedRuns,
    /// If another relay has taken over a part of a run, the rest is recorded as delivered.
    SettlesRunsInPart,
    /// A failed attempt is not counted.
    RetriesForFree,
    /// A release of an unsent message counts an attempt.
    CountsReleases,
    /// A settle reads the last position of a feed before it locks the feed.
    NumbersBeforeTheLock,
    /// Settles take the positions of events from a counter, without a lock: their order is not that of commits, and a
    /// rollback leaves a gap.
    NumbersWithoutLock,
    /// After the events of a feed were emptied, its positions begin again.
    ReusesEmptiedPositions,
    /// Readers see events that a crash of the server takes back. Their positions are used again.
    StoresUnwritten,
    /// Pages compare positions alone.
    ComparesPositionsOnly,
    /// A feed takes messages that are addressed to an earlier registration of its name.
    StoresForAnyRegistration,
    /// The last event of a feed is read with a base that was read before.
    ReadsFormerBase,
    /// A page has the events of whatever registration the feed has by now.
    ReadsForAnyRegistration,
    /// A settle is refused if its feed was registered again since the claim, instead of releasing the messages.
    RefusesWhatWasMoved,
    /// Takeovers are not counted, so a message that crashes relays does so forever.
    TakesOverForFree,
}

impl Broken {
    /// The variants that the simulation must find, and the promises that each may break.
    pub(super) const OF_RELAYS: [(Self, &'static [Promise]); 66] = [
        (
            Self::SettlesUnfenced,
            &[
                Promise::Lost,
                Promise::Fence,
                Promise::Doubled,
                Promise::Attempts,
                Promise::Order,
            ],
        ),
        (Self::ClaimsAnyOfKey, &[Promise::Order, Promise::Reasons]),
        (
            Self::TakesOverFromTheLiving,
            &[Promise::Fence, Promise::Order],
        ),
        (
            Self::ClaimsWhatIsLocked,
            &[Promise::Fence, Promise::Order, Promise::Doubled],
        ),
        (Self::CountsTakeoversTwice, &[Promise::Attempts]),
        (Self::TakesOverByOwnLimit, &[Promise::Takeover]),
        (Self::NeverTakesOver, &[Promise::Lost]),
        (Self::RenewsWhatIsOver, &[Promise::Fence, Promise::Order]),
        (Self::LeavesSendsOpen, &[Promise::Fence, Promise::Order]),
        (
            Self::MeasuresByTheWrongClock,
            &[Promise::Fence, Promise::Order],
        ),
        (Self::OutlivesItsSession, &[Promise::Fence, Promise::Order]),
        (Self::ReloadsInPlace, &[Promise::Lost, Promise::Late]),
        (Self::ReloadsAtOnce, &[Promise::Fence, Promise::Order]),
        (Self::ForgetsDoubts, &[Promise::Late, Promise::Lost]),
        (Self::DoubtsNoOneAtWork, &[Promise::Late, Promise::Lost]),
        (Self::WaitsForAllInFlight, &[Promise::Late]),
        (
            Self::ContinuesWhileReleasing,
            &[Promise::Fence, Promise::Order, Promise::Doubled],
        ),
        (Self::UndoesNothing, &[Promise::Late, Promise::Lost]),
        (Self::TakesEachServerForTheSame, &[Promise::Lost]),
        (Self::OverlooksCrashes, &[Promise::Lost]),
        (Self::LosesRings, &[Promise::Late]),
        (Self::LosesNews, &[Promise::Late]),
        (Self::LosesHandOvers, &[Promise::Lost]),
        (Self::SleepsAtOnce, &[Promise::Late]),
        (Self::SharesWhileIdle, &[Promise::Late]),
        (Self::OverlooksWhatIsLate, &[Promise::Late]),
        (Self::ContinuesLater, &[Promise::Order]),
        (Self::RunsPastFailures, &[Promise::Order, Promise::Repeats]),
        (Self::RunsOverGaps, &[Promise::Order, Promise::Repeats]),
        (Self::SettlesRunsOneByOne, &[Promise::Repeats]),
        (Self::RepeatsRefusedRuns, &[Promise::Doubled]),
        (Self::OverlooksWhatIsRemoved, &[Promise::Lost]),
        (Self::ForgetsAddressees, &[Promise::Address]),
        (Self::ClaimsForNamesakes, &[Promise::Others]),
        (Self::KnowsOnlyNames, &[Promise::Address]),
        (Self::LosesTurns, &[Promise::Late, Promise::Lost]),
        (Self::PrefersOne, &[Promise::Fair, Promise::Late]),
        (Self::TrustsWhatFails, &[Promise::Late]),
        (
            Self::ForgetsHowFar,
            &[Promise::Lost, Promise::Doubled, Promise::Late],
        ),
        (Self::CountsRefusalsForAll, &[Promise::Attempts]),
        (Self::CountsCallsNotMade, &[Promise::Attempts]),
        (Self::TellsOfNoKeys, &[Promise::Late]),
        (Self::BlamesLaterMessages, &[Promise::Reasons]),
        (Self::WaitsForPeople, &[Promise::Late]),
        (Self::ReplaysWithoutHeaders, &[Promise::Again]),
        (Self::ReplaysWithNewTime, &[Promise::Again]),
        (Self::RefusesForAll, &[Promise::Others]),
        (
            Self::OverlooksTenants,
            &[Promise::Tenant, Promise::Recipients],
        ),
        (Self::OverlooksRegistrations, &[Promise::Recipients]),
        (Self::GivesWhatIsEarlier, &[Promise::Recipients]),
        (
            Self::OverlooksServedTopics,
            &[Promise::Lost, Promise::Recipients],
        ),
        (
            Self::ForgetsServedTopics,
            &[Promise::Lost, Promise::Recipients],
        ),
        (Self::OverlooksFilters, &[Promise::Recipients]),
        (Self::OverlooksVerification, &[Promise::Verified]),
        (Self::SkipsWhatIsNotVerified, &[Promise::Recipients]),
        (Self::AddressesWhatSkips, &[Promise::Recipients]),
        (Self::GivesOwnEventsToAll, &[Promise::Recipients]),
        (Self::NumbersBeforeTheLock, &[Promise::Gap]),
        (Self::NumbersWithoutLock, &[Promise::Gap, Promise::Cursor]),
        (
            Self::ReusesEmptiedPositions,
            &[Promise::Gap, Promise::Cursor, Promise::Lost],
        ),
        (Self::StoresUnwritten, &[Promise::Gap, Promise::Cursor]),
        (Self::ComparesPositionsOnly, &[Promise::Gap]),
        (Self::StoresForAnyRegistration, &[Promise::Address]),
        (Self::ReadsFormerBase, &[Promise::Cursor]),
        (Self::ReadsForAnyRegistration, &[Promise::Address]),
        (Self::RefusesWhatWasMoved, &[Promise::Lost, Promise::Late]),
    ];

    /// The variants of statements that the comparison with PostgreSQL must find.
    pub(super) const OF_STATEMENTS: [Self; 27] = [
        Self::SettlesUnfenced,
        Self::SettlesByLease,
        Self::ClaimsUnderWhatIsOver,
        Self::ClaimsWhatIsLocked,
        Self::ClaimsWhatIsNotFirst,
        Self::ClaimsWhatIsNotAlone,
        Self::ClaimsWhatIsKeptBack,
        Self::ClaimsKeyedAtOnce,
        Self::RunsOverGaps,
        Self::SettlesRunsInPart,
        Self::TakesOverFromTheLiving,
        Self::TakesOverForFree,
        Self::CountsTakeoversTwice,
        Self::NeverTakesOver,
        Self::RenewsWhatIsOver,
        Self::UndoesNothing,
        Self::RetriesForFree,
        Self::CountsReleases,
        Self::ForgetsHowFar,
        Self::ForgetsWhatIsDelivered,
        Self::ForgetsKeys,
        Self::RequeuesCopies,
        Self::ReplaysWithoutHeaders,
        Self::ReplaysWithNewTime,
        Self::CancelsAlone,
        Self::KeepsWhatIsRolledBack,
        Self::ClaimsAnyOfKey,
    ];
}
