//! What has to hold in every history, and what has to happen in some.

use std::collections::BTreeMap;

use crate::status::ReasonCode;

use super::system::Verdict;

/// The promises of README.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Promise {
    /// In the outbox if and only if its transaction committed.
    G1,
    /// Ends exactly once: delivered or dead.
    G2,
    /// Sent twice only where a relay died or lost its lease.
    G3,
    /// A relay whose lease is gone changes nothing.
    G4,
    /// One after the other within a key, in order.
    G5,
    /// Attempts count outcomes of sends.
    G6,
}

/// A promise that was not kept. Without one: the store refused what it has to do.
#[derive(Debug, Clone)]
pub(super) struct Broken {
    pub(super) promise: Option<Promise>,
    pub(super) what: String,
}

impl From<diesel::result::Error> for Broken {
    fn from(error: diesel::result::Error) -> Self {
        Self {
            promise: None,
            what: format!("the store failed: {error}"),
        }
    }
}

pub(super) type Kept<T = ()> = Result<T, Broken>;

pub(super) fn keep(holds: bool, promise: Promise, what: impl FnOnce() -> String) -> Kept {
    if holds {
        return Ok(());
    }
    Err(Broken {
        promise: Some(promise),
        what: what(),
    })
}

pub(super) fn broken(promise: Promise, what: String) -> Broken {
    Broken {
        promise: Some(promise),
        what,
    }
}

/// What histories have to have shown before they say something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    AnotherRelayClaims,
    ClaimUnheard,
    CommittedLate,
    ConflictBuried,
    Continued,
    Deduplicated,
    Delivered,
    DiedOfAttempts,
    Discarded,
    ExpiredBuried,
    FailedOver,
    KeptBack,
    Released,
    Requeued,
    Retried,
    SentTwice,
    SequenceGivenTwice,
    SettleFenced,
    SettleRepeated,
    Split,
    SplitInConflict,
    TakenOver,
    TakenOverAgain,
}

impl Event {
    pub(super) const ALL: [Self; 23] = [
        Self::AnotherRelayClaims,
        Self::ClaimUnheard,
        Self::CommittedLate,
        Self::ConflictBuried,
        Self::Continued,
        Self::Deduplicated,
        Self::Delivered,
        Self::DiedOfAttempts,
        Self::Discarded,
        Self::ExpiredBuried,
        Self::FailedOver,
        Self::KeptBack,
        Self::Released,
        Self::Requeued,
        Self::Retried,
        Self::SentTwice,
        Self::SequenceGivenTwice,
        Self::SettleFenced,
        Self::SettleRepeated,
        Self::Split,
        Self::SplitInConflict,
        Self::TakenOver,
        Self::TakenOverAgain,
    ];
}

/// How often each has happened.
pub(super) type Events = BTreeMap<Event, u32>;

pub(super) fn event_of(verdict: Verdict) -> Event {
    match verdict {
        Verdict::Delivered => Event::Delivered,
        Verdict::Deduplicated => Event::Deduplicated,
        Verdict::Retry { .. } => Event::Retried,
        Verdict::Dead {
            blocks_key: true, ..
        } => Event::KeptBack,
        Verdict::Dead { code, .. } => match code {
            ReasonCode::IdempotencyConflict => Event::ConflictBuried,
            ReasonCode::Expired => Event::ExpiredBuried,
            _ => Event::DiedOfAttempts,
        },
        Verdict::Split => Event::Split,
        Verdict::Released => Event::Released,
    }
}
