//! Questions: what a relay asks a database. A seed decides; leases and claims have numbers instead of ids.

use std::collections::BTreeSet;

use fastrand::Rng;

use super::turns;
use crate::dispatch::{Failure, Response};
use crate::engine::claim::sql::claim::Stream;
use crate::engine::keys::sql::ordered::{Candidate, Key};
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::send::verdict::{Attempt, Verdict};
use crate::message::Message;
use crate::simulation::tables::{self, Held, Tables, goes_to};
use crate::sql::range::Range;
use crate::status::ReasonCode;

const TOPICS: [&str; 3] = ["a", "b", "fan"];
const DESTINATIONS: [&str; 3] = ["", "a", "b"];
const KEYS: [&str; 3] = ["k", "l", "m"];
/// The most bytes of a claim: first a limit that makes a claim check sizes, then no limit.
const BYTES: [usize; 2] = [1 << 20, usize::MAX];
/// The most messages of a settle: the last ones that the lease holds.
const MOST_CLAIMS: usize = 12;

#[derive(Debug)]
pub(super) struct Question {
    pub(super) ask: Ask,
    /// Whether another connection asks, whose transaction stays open until [`Ask::LetGo`].
    pub(super) stays_open: bool,
    pub(super) lease: usize,
    pub(super) expired: Vec<usize>,
    /// In the order of their sequences, without duplicates.
    pub(super) claims: Vec<usize>,
    pub(super) bytes: usize,
    /// The most messages that are claimed behind another.
    pub(super) behind: usize,
    /// Whether delivered messages are settled as one run.
    pub(super) is_run: bool,
}

/// A message to enqueue, with times in turns.
#[derive(Debug)]
pub(super) struct New {
    pub(super) topic: &'static str,
    pub(super) destination: &'static str,
    pub(super) ordering_key: Option<&'static str>,
    pub(super) idempotency_key: Option<&'static str>,
    pub(super) body: u8,
    pub(super) headers: Option<u8>,
    pub(super) delay: u32,
    pub(super) expires: Option<u32>,
}

/// A lane.
#[derive(Debug)]
pub(super) struct Strip {
    pub(super) stream: Stream,
    pub(super) goes_to: &'static str,
    pub(super) room: usize,
    /// Claims start after this message.
    pub(super) after: Option<i64>,
}

#[derive(Debug)]
pub(super) enum Ask {
    /// In the producer's transaction, which the first enqueue begins.
    Enqueue(Vec<New>),
    Commit,
    RollBack,
    /// Commits the transaction that has stayed open.
    LetGo,
    TimePasses,
    Requeue(Vec<i64>),
    Discard(Vec<i64>),
    Cancel(Vec<i64>),
    /// Makes a message due after so many turns.
    Reschedule(i64, u32),
    /// Sends the delivered messages of a topic again.
    Replay(&'static str),
    /// Forgets expired leases that hold no messages.
    Forget,
    /// Copies the present state to the standby.
    Replicate,
    /// The standby takes over: later commits are lost, and their sequences are used again.
    FailOver,
    Register(u32, bool),
    Renew(u32),
    IsThere,
    End,
    Expire,
    Survey(Option<Vec<Stream>>),
    Claim(Vec<Strip>, usize),
    ClaimDue(Vec<Strip>, usize),
    ClaimKeyed(Vec<Candidate>),
    ClaimChosen(Vec<i64>),
    Walk(Key),
    FirstOf(Vec<Key>),
    Free(Range),
    Late(Range),
    Expired(Stream, Option<i64>),
    ReleaseUnknown(Range),
    Settle {
        verdict: Verdict,
        keys_continue: bool,
        blocks_key: bool,
        closed: Vec<String>,
        /// The most parts of a fan-out.
        parts: usize,
    },
    Settled,
    Pause(&'static str, Option<u32>),
    Open(&'static str, u32, u32),
    Recover(&'static str),
    TakeProbe(&'static str, u32),
    GiveBackProbe(&'static str),
}

/// Chooses questions. Knows the simulated database, so that most questions are such as a relay asks.
pub(super) struct Dice<'a> {
    pub(super) rng: &'a mut Rng,
    pub(super) tables: &'a Tables,
    pub(super) now: i64,
    pub(super) leases: &'a [LeaseId],
    pub(super) claimed: &'a [Message],
    pub(super) is_single_active: bool,
    /// Whether a producer's transaction is open, and whether it has enqueued an idempotency key.
    pub(super) is_enqueueing: bool,
    pub(super) has_enqueued_key: bool,
    /// Whether another transaction is open that has claimed or settled.
    pub(super) is_beside: bool,
    pub(super) has_standby: bool,
}

impl<'a> Dice<'a> {
    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.usize(..of.len())]
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.rng.u32(..n) == 0
    }

    /// One in `n` of the values.
    fn some<T>(&mut self, of: impl IntoIterator<Item = T>, n: u32) -> Vec<T> {
        of.into_iter().filter(|_| self.one_in(n)).collect()
    }

    pub(super) fn question(mut self) -> Question {
        let lease = self.lease();
        let claims = self.claims(self.leases[lease]);
        let ask = match self.is_beside {
            true => self.beside(),
            false => self.ask(&claims),
        };
        let may_stay_open = match &ask {
            Ask::Claim(..) | Ask::ClaimDue(..) | Ask::ClaimKeyed(_) | Ask::ClaimChosen(_) => true,
            Ask::Settle { verdict, .. } => !matches!(verdict, Verdict::Split(_)),
            _ => false,
        };
        Question {
            stays_open: may_stay_open && !self.is_beside && self.one_in(5),
            ask,
            lease,
            expired: self.expired(),
            claims,
            bytes: self.one(&BYTES),
            behind: self.rng.usize(..4),
            is_run: self.one_in(2),
        }
    }

    /// Mostly a lease that may claim.
    fn lease(&mut self) -> usize {
        let is_any = self.one_in(6);
        let is_it = |id: LeaseId| is_any || self.tables.is_at_work(id.0, self.now);
        let these = (0..self.leases.len()).filter(|number| is_it(self.leases[*number]));
        let these: Vec<usize> = these.collect();
        match these.is_empty() {
            true => self.leases.len() - 1,
            false => self.one(&these),
        }
    }

    /// Mostly expired leases.
    fn expired(&mut self) -> Vec<usize> {
        let (is_none, is_any) = (self.one_in(2), self.one_in(10));
        let is_it = |id: LeaseId| !is_none && (is_any || !self.tables.is_there(id.0, self.now));
        let these = (0..self.leases.len()).filter(|number| is_it(self.leases[*number]));
        let these: Vec<usize> = these.collect();
        these.into_iter().filter(|_| !self.one_in(4)).collect()
    }

    /// Mostly messages that the lease holds.
    fn claims(&mut self, lease: LeaseId) -> Vec<usize> {
        let is_any = self.one_in(5);
        let is_it = |message: &Message| {
            let held = Held {
                lease: lease.0,
                at: message.claimed_at,
            };
            let row = self.tables.rows.get(&message.sequence.0);
            is_any || row.is_some_and(|row| row.held == Some(held))
        };
        let these = (0..self.claimed.len()).rev();
        let these = these.filter(|number| is_it(&self.claimed[*number]));
        let these: Vec<usize> = these.take(MOST_CLAIMS).collect();
        let mut these = self.some(these, 2);
        these.sort_by_key(|number| self.claimed[*number].sequence);
        these.dedup_by_key(|number| self.claimed[*number].sequence);
        these
    }

    fn message_or_none(&mut self) -> Option<i64> {
        let all: Vec<i64> = self.tables.rows.keys().copied().collect();
        (!all.is_empty() && self.one_in(3)).then(|| self.one(&all))
    }

    fn streams(&mut self) -> Vec<Stream> {
        let all = self.tables.streams(i64::MIN, &[]).into_iter();
        self.some(all.map(|found| found.stream), 2)
    }

    fn strips(&mut self, is_keyed: bool) -> Vec<Strip> {
        let streams = self.streams().into_iter();
        let strip = |stream: Stream| Strip {
            goes_to: self.goes_to(&stream.topic.topic, &stream.topic.destination),
            room: self.rng.usize(1..5),
            after: self.message_or_none(),
            stream,
        };
        streams
            .filter(|one| one.is_keyed == is_keyed)
            .map(strip)
            .collect()
    }

    /// Mostly the destination of the topic.
    fn goes_to(&mut self, topic: &str, destination: &str) -> &'static str {
        let right = goes_to(topic, destination);
        let right = DESTINATIONS.into_iter().find(|one| *one == right);
        right
            .filter(|_| !self.one_in(8))
            .unwrap_or_else(|| self.one(&DESTINATIONS))
    }

    fn candidates(&mut self) -> Vec<Candidate> {
        let tables: &'a Tables = self.tables;
        let rows = self.some(tables.rows.values(), 3).into_iter();
        let candidate = |row: &tables::Row| Candidate {
            sequence: row.sequence,
            goes_to: self.goes_to(row.topic, &row.destination).to_owned(),
        };
        rows.filter(|row| row.ordering_key.is_some())
            .map(candidate)
            .collect()
    }

    fn keys(&mut self) -> Vec<Key> {
        let all = KEYS
            .into_iter()
            .flat_map(|key| DESTINATIONS.map(|one| (key, one)));
        let key = |(ordering_key, destination): (&str, &str)| Key {
            ordering_key: ordering_key.to_owned(),
            destination: destination.to_owned(),
        };
        self.some(all, 2).into_iter().map(key).collect()
    }

    fn range(&mut self) -> Range {
        let mut sequence = || self.rng.i64(0..=self.tables.last_sequence + 1);
        let (one, other) = (sequence(), sequence());
        Range {
            after: one.min(other),
            upto: one.max(other),
        }
    }

    fn message(&mut self) -> New {
        New {
            topic: self.one(&TOPICS),
            destination: if self.one_in(3) {
                self.one(&DESTINATIONS)
            } else {
                ""
            },
            ordering_key: (!self.one_in(3)).then(|| self.one(&KEYS)),
            // With a key, the insert would wait for the settle of another message of that key.
            idempotency_key: (!self.is_beside && self.one_in(3)).then(|| self.one(&KEYS[..2])),
            body: self.rng.u8(..4) / 3,
            headers: (!self.one_in(3)).then(|| self.rng.u8(..)),
            delay: if self.one_in(5) {
                self.rng.u32(1..4)
            } else {
                0
            },
            expires: self.one_in(5).then(|| self.rng.u32(1..5)),
        }
    }

    /// Whether a message may be fanned out. Its parts would wait for a producer that has enqueued the key.
    fn may_be_split(&self, message: &Message) -> bool {
        let row = self.tables.rows.get(&message.sequence.0);
        let has_key = row.is_some_and(|row| row.idempotency_key.is_some());
        message.destination.is_empty() && !(has_key && self.has_enqueued_key)
    }

    fn settle(&mut self, claims: &[usize]) -> Ask {
        let code = self.one(&[ReasonCode::Abandoned, ReasonCode::Timeout]);
        let failure = Failure::new(code, "no");
        let attempt = self.one(&[Attempt::NotCounted, Attempt::Counted]);
        let blocks_key = self.one_in(3);
        let parts = self.one(&[&["a"][..], &["a", "b"]]).iter();
        let mut messages = claims.iter().map(|number| &self.claimed[*number]);
        let may_be_split = messages.all(|message| self.may_be_split(message));
        let verdict = match self.rng.u8(..13) {
            0..3 => Verdict::Delivered(Response::default()),
            3 => Verdict::Stored,
            4 => Verdict::Deduplicated(1),
            5 | 6 => Verdict::Retry(failure, turns(self.rng.u32(0..3)), attempt),
            7 | 8 => Verdict::Dead(failure, attempt),
            9..12 if may_be_split => {
                let to: Vec<String> = parts.map(|&one| one.to_owned()).collect();
                Verdict::Split(to.into())
            }
            _ => Verdict::Released,
        };
        // The same rule as in the settler.
        let is_done = match &verdict {
            Verdict::Delivered(_)
            | Verdict::Stored
            | Verdict::NoSubscriber
            | Verdict::Deduplicated(_) => true,
            Verdict::Dead(..) => !blocks_key,
            Verdict::Retry(..) | Verdict::Split(_) | Verdict::Released => false,
        };
        Ask::Settle {
            verdict,
            keys_continue: is_done && !self.one_in(4),
            blocks_key,
            closed: self.some(TOPICS.map(str::to_owned), 6),
            parts: self.rng.usize(1..5),
        }
    }

    fn claim(&mut self) -> Ask {
        let room = self.rng.usize(1..10);
        match self.rng.u8(..14) {
            0..4 => Ask::Claim(self.strips(false), room),
            4..9 => Ask::ClaimDue(self.strips(true), room),
            9..12 => Ask::ClaimKeyed(self.candidates()),
            _ => Ask::ClaimChosen(self.some(self.tables.rows.keys().copied(), 4)),
        }
    }

    fn look(&mut self) -> Ask {
        match self.rng.u8(..5) {
            0 => Ask::Walk(self.keys().pop().unwrap_or_default()),
            1 => Ask::FirstOf(self.keys()),
            2 => Ask::Free(self.range()),
            3 => Ask::Late(self.range()),
            _ => match self.streams().pop() {
                Some(stream) => Ask::Expired(stream, self.message_or_none()),
                None => Ask::Survey(None),
            },
        }
    }

    fn enqueue(&mut self) -> Ask {
        Ask::Enqueue((0..self.rng.usize(1..5)).map(|_| self.message()).collect())
    }

    /// A question that does not wait for another transaction.
    fn beside(&mut self) -> Ask {
        match self.rng.u8(..12) {
            0..3 => Ask::LetGo,
            3..8 => self.claim(),
            8 => self.look(),
            9 if self.is_enqueueing => Ask::Commit,
            _ => self.enqueue(),
        }
    }

    fn dead(&mut self) -> Vec<i64> {
        let dead: BTreeSet<i64> = self
            .tables
            .dead
            .iter()
            .map(|one| one.row.sequence)
            .collect();
        self.some(dead, 2)
    }

    fn ask(&mut self, claims: &[usize]) -> Ask {
        let which = self.one(&["a", "b"]);
        let is_single_active = self.is_single_active && !self.one_in(8);
        match self.rng.u8(..70) {
            0..12 if !claims.is_empty() => self.settle(claims),
            12..26 => self.claim(),
            26 if !self.is_enqueueing => Ask::TimePasses,
            27 => Ask::Discard(self.dead()),
            28 | 29 => Ask::Register(self.rng.u32(0..6), is_single_active),
            30 | 31 => Ask::Renew(self.rng.u32(0..6)),
            32 => Ask::IsThere,
            33 if self.one_in(2) => Ask::End,
            33 => Ask::Expire,
            34 => Ask::Survey(None),
            35 | 36 => Ask::Survey(Some(self.streams())),
            37..41 => self.look(),
            41 | 42 => Ask::ReleaseUnknown(self.range()),
            43 | 44 => Ask::Settled,
            45 => Ask::Pause(which, (!self.one_in(4)).then(|| self.rng.u32(0..4))),
            46 => Ask::Open(which, self.rng.u32(0..4), self.rng.u32(1..4)),
            47 => Ask::Recover(which),
            48 => Ask::TakeProbe(which, self.rng.u32(0..3)),
            49 => Ask::GiveBackProbe(which),
            50 | 51 if !self.has_enqueued_key => Ask::Requeue(self.dead()),
            52 => Ask::Forget,
            60 => Ask::Cancel(self.some(self.tables.rows.keys().copied(), 8)),
            61 | 62 => match self.message_or_none() {
                Some(sequence) => Ask::Reschedule(sequence, self.rng.u32(0..3)),
                None => Ask::Forget,
            },
            63 | 64 => Ask::Replay(self.one(&TOPICS)),
            53 => Ask::Replicate,
            54 if self.has_standby => Ask::FailOver,
            55 if self.is_enqueueing && self.one_in(3) => Ask::RollBack,
            55..60 if self.is_enqueueing => Ask::Commit,
            _ => self.enqueue(),
        }
    }
}
