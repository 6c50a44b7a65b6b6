//! The store as the relays and producers of a history call it.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::{Connection, PgConnection};

use crate::message::NewMessage;
use crate::name::OutboxName;
use crate::status::ReasonCode;
use crate::store::operate::dead;
use crate::store::relay::claim::{self, Claimant, Claimed, Lane};
use crate::store::relay::lease::{self, LeaseId};
use crate::store::relay::ordered::{self, Candidate, Key};
use crate::store::relay::settle::{self, Claim, Delivered, Failed};
use crate::store::relay::split;
use crate::store::write::enqueue::{self, Row, Stored};

use super::expected::Identity;

/// Where messages of the topic `fan` go.
pub(super) const FAN: [&str; 2] = ["a", "b"];

/// Where a message goes: nowhere by itself where it is to be split.
pub(super) fn goes_to<'a>(topic: &str, destination: &'a str) -> &'a str {
    match (topic, destination) {
        ("fan", "") => "",
        ("direct", "") => FAN[0],
        (_, "") => "main",
        _ => destination,
    }
}

/// What a relay knows of a message that it has claimed.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub(super) lease: LeaseId,
    pub(super) sequence: i64,
    pub(super) claimed_at: i64,
    pub(super) identity: Identity,
    /// Before this one.
    pub(super) attempts: i32,
    pub(super) key: Option<Key>,
    pub(super) is_sent: bool,
    pub(super) todo: Todo,
}

impl Job {
    pub(super) fn claim(&self) -> Claim {
        Claim {
            sequence: self.sequence,
            at: self.claimed_at,
        }
    }
}

/// What is to be done with a claimed message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Todo {
    Send,
    Deduplicate,
    BuryConflict,
    BuryExpired,
    Split,
    CountAbandoned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Delivered,
    Deduplicated,
    Retry {
        code: ReasonCode,
        counted: i32,
        is_due_again: bool,
    },
    Dead {
        code: ReasonCode,
        counted: i32,
        blocks_key: bool,
    },
    Split,
    Released,
}

/// Messages that are settled in one way, by one lease.
#[derive(Debug, Clone)]
pub(super) struct Settle {
    pub(super) lease: LeaseId,
    pub(super) verdict: Verdict,
    pub(super) jobs: Vec<Job>,
}

impl Settle {
    pub(super) fn sequences(&self) -> Vec<i64> {
        self.jobs.iter().map(|job| job.sequence).collect()
    }

    pub(super) fn claims(&self) -> Vec<Claim> {
        self.jobs.iter().map(Job::claim).collect()
    }

    /// The keys that go on behind these.
    pub(super) fn keys_of(&self, changed: &[i64]) -> Vec<Key> {
        let is_done = match self.verdict {
            Verdict::Delivered | Verdict::Deduplicated => true,
            Verdict::Dead { blocks_key, .. } => !blocks_key,
            Verdict::Retry { .. } | Verdict::Split | Verdict::Released => false,
        };
        let of_changed = |job: &&Job| is_done && changed.contains(&job.sequence);
        let jobs = self.jobs.iter().filter(of_changed);
        jobs.filter_map(|job| job.key.clone()).collect()
    }

    fn failed(&self, code: ReasonCode, counted: i32) -> Vec<Failed> {
        let failed = |job: &Job| Failed {
            claim: job.claim(),
            destination: "there".into(),
            code,
            error: String::new(),
            http_status: None,
            response: None,
            took: Duration::ZERO,
            delay: Duration::ZERO,
            before: job.attempts,
            counted,
            blocks_key: false,
        };
        self.jobs.iter().map(failed).collect()
    }
}

/// Where a settle that goes on with its keys is.
#[derive(Debug)]
pub(super) enum Moment<'a> {
    /// In a transaction that others do not see.
    Open,
    /// Others see that these were settled.
    Settled(&'a [i64]),
}

/// The operations that a broken variant may do wrong. By themselves they are the store's.
pub(super) trait System {
    fn enqueue(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        message: NewMessage,
    ) -> QueryResult<Stored> {
        enqueue::insert_or_find(conn, name, &[Row::new(message)]).map(|stored| stored[0])
    }

    fn ended(&self, conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<i64>> {
        lease::ended(conn, name)
    }

    fn claim(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        claimant: Claimant<'_>,
        lanes: &[Lane],
        room: usize,
    ) -> QueryResult<Vec<Claimed>> {
        claim::claim(conn, name, claimant, lanes, room).map(|batch| batch.claimed)
    }

    fn claim_keyed(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        claimant: Claimant<'_>,
        candidates: &[Candidate],
    ) -> QueryResult<Option<Vec<Claimed>>> {
        let batch = ordered::claim(conn, name, claimant, candidates)?;
        Ok(batch.map(|batch| batch.claimed))
    }

    fn settle(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        settle: &Settle,
    ) -> QueryResult<Vec<i64>> {
        settle_them(conn, name, settle)
    }

    /// As the relay's settler does it. `meanwhile` is what others do before keys go on, and after.
    fn settle_and_continue(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        claimant: Claimant<'_>,
        settle: &Settle,
        meanwhile: &mut dyn FnMut(Moment<'_>),
    ) -> QueryResult<(Vec<i64>, Vec<Claimed>)> {
        conn.transaction(|conn| {
            let changed = self.settle(conn, name, settle)?;
            meanwhile(Moment::Open);
            let next = continue_keys(conn, name, claimant, &settle.keys_of(&changed))?;
            meanwhile(Moment::Open);
            Ok((changed, next))
        })
    }

    fn requeue(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        sequences: &[i64],
    ) -> QueryResult<usize> {
        dead::requeue(conn, name, sequences, "")
    }
}

/// The store itself.
pub(super) struct Store;

impl System for Store {}

pub(super) fn continue_keys(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    keys: &[Key],
) -> QueryResult<Vec<Claimed>> {
    if keys.is_empty() {
        return Ok(Vec::new());
    }
    let claimant = Claimant {
        expired: &[],
        ..claimant
    };
    ordered::claim_next(conn, name, claimant, keys, &[]).map(|batch| batch.claimed)
}

pub(super) fn settle_them(
    conn: &mut PgConnection,
    name: &OutboxName,
    settle: &Settle,
) -> QueryResult<Vec<i64>> {
    let lease = settle.lease;
    match settle.verdict {
        Verdict::Delivered => {
            let delivered = |job: &Job| Delivered {
                claim: job.claim(),
                destination: "there".into(),
                http_status: Some(200),
                response: None,
            };
            let delivered: Vec<Delivered> = settle.jobs.iter().map(delivered).collect();
            settle::delivered(conn, name, lease, &delivered, false)
        }
        Verdict::Deduplicated => settle::deduplicated(conn, name, lease, &settle.claims()),
        Verdict::Retry {
            code,
            counted,
            is_due_again,
        } => {
            let mut failed = settle.failed(code, counted);
            if !is_due_again {
                failed.iter_mut().for_each(|one| one.delay = LATER);
            }
            settle::retry(conn, name, lease, &failed)
        }
        Verdict::Dead {
            code,
            counted,
            blocks_key,
        } => {
            let mut failed = settle.failed(code, counted);
            failed
                .iter_mut()
                .for_each(|one| one.blocks_key = blocks_key);
            settle::dead(conn, name, lease, &failed, false)
        }
        Verdict::Split => split_them(conn, name, settle),
        Verdict::Released => settle::release(conn, name, lease, &settle.claims()),
    }
}

/// Later than any history lasts.
pub(super) const LATER: Duration = Duration::from_secs(3600);

fn split_them(
    conn: &mut PgConnection,
    name: &OutboxName,
    settle: &Settle,
) -> QueryResult<Vec<i64>> {
    let fan = FAN.map(str::to_owned);
    let messages: Vec<split::Split<'_>> = settle
        .jobs
        .iter()
        .map(|job| (job.claim(), fan.as_slice()))
        .collect();
    let done = split::split(conn, name, settle.lease, &messages)?;
    let mut changed = done.split;
    if !done.in_conflict.is_empty() {
        let mut dead = settle.failed(ReasonCode::IdempotencyConflict, 0);
        dead.retain(|one| done.in_conflict.contains(&one.claim.sequence));
        changed.extend(settle::dead(conn, name, settle.lease, &dead, false)?);
    }
    Ok(changed)
}
