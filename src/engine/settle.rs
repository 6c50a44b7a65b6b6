//! The settler threads: they settle messages (record the results in the database), many at a time.

mod aside;
mod next;
pub(crate) mod settlement;
mod splits;
pub(crate) mod sql;
mod tell;
pub(crate) mod written;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use self::aside::SetAside;
use self::settlement::{Failures, Kind, Settlement};
use self::splits::Splits;
use self::sql::split::Piece;
use super::claim::doubt::RanBy;
use super::claim::sql::claim::Topic;
use super::claim::told::Told;
use super::host::database::Database;
use super::host::session::{AfterRefusal, Session};
use super::host::shared::Shared;
use super::host::sql::connection::Plans;
use super::host::threads::Post;
use super::lease::sql::lease::LeaseId;
use super::send::pauses;
use super::workers::Workers;
use crate::clock;
use crate::error::DatabaseError;

/// How long a busy settler gathers outcomes, and how often it checks meanwhile whether the senders have run out of
/// work.
const LINGER: Duration = Duration::from_millis(5);
const GLANCE: Duration = Duration::from_millis(1);
/// Messages that wait for their settle block their ordering keys. A settler of keys gathers more only while the senders
/// have this many times as many messages.
const KEYED_WORK: usize = 3;
/// A batch of at most this size means little load: the next batch is settled at once.
const LIGHT: usize = 16;
/// The time limit of a settle. A settle that takes longer is given up and retried.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a settle waits for a row that another session has locked. Then the settler asks which rows are locked, and
/// settles the others.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// The most stored bytes of the parts that one transaction places, unless a single part has more.
const PIECE_BYTES: usize = 4 << 20;

/// Settles messages without ordering keys. Ends when all senders and the claimer have ended and all messages are
/// settled, or when the relay gives up at its deadline.
///
/// Settlements that the database refuses because of their values, and those of messages that another session has locked,
/// are set aside (`aside`) and retried from time to time. They do not hold up others, which always come first.
pub(crate) fn run(shared: &Shared, workers: Option<&dyn Workers>, outcomes: &Receiver<Settlement>) {
    let mut settler = settler(shared, Post::Settler, false);
    if settler.run(outcomes).is_ok() {
        let keeper = workers.map(Workers::keeper);
        pauses::tell_the_last(shared, keeper, &mut settler.db);
    }
}

/// Settles messages with ordering keys, on one of several threads: a key's next message cannot be sent before the
/// settle.
///
/// When the first message of a key is finished, the same transaction settles it and claims the key's next message,
/// which goes to the claimer.
pub(crate) fn run_keyed(shared: &Shared, post: Post, outcomes: &Receiver<Settlement>) {
    let mut settler = settler(shared, post, true);
    if settler.run(outcomes).is_ok() {
        // Handles the entries that the claimer has left in its inbox.
        for told in shared.signals.told.1.try_iter() {
            if let Told::Continued(jobs) = told {
                settler.release(jobs);
            }
        }
    }
}

fn settler(shared: &Shared, post: Post, is_keyed: bool) -> Settler<'_, Session> {
    let session = shared.session(post, STATEMENT_TIMEOUT, Plans::ByIndex);
    // A settle of other messages waits at most for one such transaction.
    let piece = Piece {
        parts: shared.batch(),
        bytes: PIECE_BYTES,
    };
    Settler::new(
        shared,
        session.expecting_locks(LOCK_TIMEOUT),
        is_keyed,
        piece,
    )
}

/// The relay has given up.
struct GivenUp;

pub(crate) struct Settler<'a, D> {
    shared: &'a Shared,
    db: D,
    /// Whether the messages have ordering keys. The settle of a key's first message then also claims the key's next
    /// message.
    is_keyed: bool,
    /// Whether the last batch was large.
    is_busy: bool,
    aside: SetAside,
    splits: Splits,
    failures: Failures,
    /// What to do with the connection if the current statement is refused.
    after_refusal: AfterRefusal,
    /// The topic of the current statement, if its messages were put aside.
    topic_aside: Option<Topic>,
    /// The connections that were lost, and the servers that the claimer had met, before the last settle.
    lost: u64,
    servers: u64,
}

impl<'a, D: Database> Settler<'a, D> {
    /// `piece`: the most of a fan-out that one transaction does.
    pub(crate) fn new(shared: &'a Shared, db: D, is_keyed: bool, piece: Piece) -> Self {
        Self {
            shared,
            db,
            is_keyed,
            is_busy: false,
            aside: SetAside::default(),
            splits: Splits::new(piece),
            failures: Failures::default(),
            after_refusal: AfterRefusal::Reconnect,
            topic_aside: None,
            lost: 0,
            servers: 0,
        }
    }

    fn run(&mut self, outcomes: &Receiver<Settlement>) -> Result<(), GivenUp> {
        let batch_size = self.shared.batch();
        loop {
            let next = match self.next_try() {
                None => outcomes.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => outcomes.recv_deadline(at),
            };
            match next {
                Ok(first) => {
                    if self.is_busy {
                        self.linger(outcomes, batch_size);
                    }
                    let batch = std::iter::once(first).chain(outcomes.try_iter());
                    let batch: Vec<Settlement> = batch.take(batch_size).collect();
                    self.is_busy = batch.len() > LIGHT;
                    self.settle_all(batch)?;
                }
                Err(RecvTimeoutError::Timeout) => self.is_busy = false,
                Err(RecvTimeoutError::Disconnected) => {
                    let rest = self.try_the_rest();
                    self.failures.tell_all(clock::now());
                    return rest;
                }
            }
            // Checked after every batch: with a channel that is never empty, the deadline never fires.
            self.try_next();
            self.failures.tell(clock::now());
        }
    }

    /// The time of the next piece of a fan-out, of the next try of settlements set aside, or of the next log line about
    /// failures.
    pub(crate) fn next_try(&self) -> Option<Instant> {
        let now = clock::now();
        let tries = [self.aside.next_try(now), self.splits.next_piece(now)];
        tries
            .into_iter()
            .chain([self.failures.due()])
            .flatten()
            .min()
    }

    /// Makes one try of settlements set aside, if a try is due, and does a piece of the fan-outs, if there are any.
    pub(crate) fn try_next(&mut self) {
        self.try_aside();
        self.split_next();
    }

    /// Settles a batch until every message is settled, put aside, or left to be fanned out.
    fn settle_all(&mut self, batch: Vec<Settlement>) -> Result<(), GivenUp> {
        let mut left = self.set_apart(batch);
        while !left.is_empty() {
            left = self.settle(left);
            if !left.is_empty() {
                if self.shared.is_abandoned() {
                    return Err(GivenUp);
                }
                self.shared.pause(self.db.after().wait);
            }
        }
        Ok(())
    }

    /// Waits for more outcomes while the senders have work. With ordering keys, the senders must have much more work
    /// than waits here, because the waiting messages block their keys. Does not wait on the channel, because each
    /// outcome would wake this thread. Ends early at shutdown.
    fn linger(&self, outcomes: &Receiver<Settlement>, enough: usize) {
        let shared = self.shared;
        let until = clock::now() + LINGER;
        let is_worth_it = || {
            let waiting = outcomes.len();
            let unsent = shared.custody.count().saturating_sub(waiting);
            let least = match self.is_keyed {
                true => KEYED_WORK * waiting,
                false => 0,
            };
            waiting < enough && unsent > shared.senders().max(least) && clock::now() < until
        };
        while is_worth_it() && !shared.is_stopping() {
            let _ = shared.signals.stop.recv_timeout(GLANCE);
        }
    }

    /// Settles a batch, with one statement for each lease and kind. Returns the messages that were not settled because
    /// the database is unavailable. The caller retries them at once. Fan-outs are only begun: see [`splits`].
    pub(crate) fn settle(&mut self, batch: Vec<Settlement>) -> Vec<Settlement> {
        let mut groups: BTreeMap<(LeaseId, Kind), Vec<Settlement>> = BTreeMap::new();
        for settlement in batch {
            match settlement.kind() {
                Kind::Split => self.splits.add(settlement),
                kind => (groups.entry((settlement.lease, kind)).or_default()).push(settlement),
            }
        }
        let mut left = Vec::new();
        for mut group in groups.into_values().flat_map(each_once) {
            let Err(error) = self.settle_group(&mut group) else {
                continue;
            };
            left.extend(self.was_not_settled(group, &error));
        }
        left
    }

    /// Handles an error of a settle. Returns the messages that are to be retried.
    fn was_not_settled(
        &mut self,
        mut group: Vec<Settlement>,
        error: &DatabaseError,
    ) -> Vec<Settlement> {
        group.iter_mut().for_each(Settlement::repeat);
        if self.db.after().has_timed_out {
            self.set_locked_apart(group)
        } else if error.is_refusal() && !self.db.after().is_missing {
            self.isolate(group)
        } else {
            group
        }
    }

    /// Whether the database refused the last statement for its values. A timeout says nothing about values.
    fn is_refused(&self, error: &DatabaseError) -> bool {
        error.is_refusal() && !self.db.after().has_timed_out
    }

    /// Settles messages of one lease and kind. Leaves those in the group of which only a part of the fan-out is done.
    fn settle_group(&mut self, group: &mut Vec<Settlement>) -> Result<(), DatabaseError> {
        let Some(first) = group.first() else {
            return Ok(());
        };
        let (shared, lease, kind) = (self.shared, first.lease, first.kind());
        let servers = shared.custody.servers();
        if std::mem::replace(&mut self.servers, servers) != servers {
            self.db.replace();
        }
        let began = clock::now();
        let (written, seen_to) = self.settle_and_continue(lease, kind, group)?;
        let now = clock::now();
        let took = now.saturating_duration_since(began);
        shared.metrics.settle_seconds.record(took.as_secs_f64());
        let unfinished: HashMap<i64, Option<String>> = written.unfinished.into_iter().collect();
        let ended = group.iter();
        let ended = ended.filter(|one| !unfinished.contains_key(&one.sequence()));
        let ended: Vec<&Settlement> = ended.flat_map(Settlement::each).collect();
        let settled = self.settled(&ended, written.changed)?;
        self.report(kind, &ended, &settled, &written.in_conflict, now);
        self.tell_claimer(kind, group, &ended, &unfinished, &seen_to);
        if kind == Kind::Split {
            self.splits.took(took);
            // The new rows of the fan-out are ready to be claimed.
            shared.signals.news.ring();
        }
        self.leave_custody(lease, &ended);
        self.doubt_after_a_loss(lease, servers);
        group.retain_mut(|one| {
            let last = unfinished.get(&one.sequence());
            last.map(|last| one.place_up_to(last.as_deref())).is_some()
        });
        Ok(())
    }

    /// The sequences of those of these messages that are settled: `changed` by this statement, or by an earlier one that
    /// is repeated now.
    fn settled(
        &mut self,
        ended: &[&Settlement],
        changed: Vec<i64>,
    ) -> Result<HashSet<i64>, DatabaseError> {
        let mut settled: HashSet<i64> = changed.into_iter().collect();
        let mut traces = Vec::new();
        for one in ended.iter().filter(|one| one.repeated) {
            match one.kind() {
                _ if settled.contains(&one.sequence()) => {}
                Kind::Delivered
                | Kind::Stored
                | Kind::NoSubscriber
                | Kind::Dead
                | Kind::Cancelled => {
                    traces.push(one.trace());
                }
                // An earlier retry or release leaves no trace, and counting it as done is harmless.
                _ => _ = settled.insert(one.sequence()),
            }
        }
        if !traces.is_empty() {
            settled.extend(self.db.settled(self.after_refusal, &traces)?);
        }
        Ok(settled)
    }

    fn leave_custody(&self, lease: LeaseId, ended: &[&Settlement]) {
        let custody = &self.shared.custody;
        let prefetched = self.shared.prefetched(ended.iter().map(|one| one.to));
        match &self.topic_aside {
            None => {
                let ended = ended.iter().map(|one| (one.claim(), one.to));
                custody.settled(lease, ended, &prefetched);
            }
            Some(topic) => custody.settled_aside(lease, topic, ended, &prefetched),
        }
    }

    /// Begins a doubt if a server was lost since there were so many `servers`: it may have lost what it had settled and
    /// what this process no longer knows.
    fn doubt_after_a_loss(&mut self, lease: LeaseId, servers: u64) {
        let (shared, lost) = (self.shared, self.db.after().lost);
        let is_without_answer = std::mem::replace(&mut self.lost, lost) != lost;
        let is_in_doubt = is_without_answer || shared.custody.servers() != servers;
        // At the end of the relay, the lease ends, and other relays find what it may have left.
        if is_in_doubt && !shared.is_stopping() {
            let lease = shared.lease.current().unwrap_or(lease);
            shared.custody.begin_doubt(lease, RanBy::Only(Vec::new()));
        }
    }
}

/// Splits a group so that each part has every sequence at most once. A new primary that lacks the last inserts uses some
/// sequences again. The settlement of the earlier claim comes first.
fn each_once(mut group: Vec<Settlement>) -> Vec<Vec<Settlement>> {
    group.sort_unstable_by_key(Settlement::claim);
    let mut parts: Vec<(HashSet<i64>, Vec<Settlement>)> = Vec::new();
    for one in group {
        let has = |seen: &HashSet<i64>| one.each().any(|one| seen.contains(&one.sequence()));
        let at = parts.iter().position(|(seen, _)| !has(seen));
        let at = at.unwrap_or_else(|| {
            parts.push((HashSet::new(), Vec::new()));
            parts.len() - 1
        });
        let (seen, part) = &mut parts[at];
        seen.extend(one.each().map(Settlement::sequence));
        part.push(one);
    }
    parts.into_iter().map(|(_, part)| part).collect()
}
