//! The settle threads: they write down what became of messages, many at a time.

mod next;
mod refused;
mod written;

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

#[cfg(test)]
pub(super) use self::written::blocks_key;
pub(super) use self::written::{Settle, Written, write_down};

use self::next::look_at_the_next;
use self::refused::Refused;
use super::database::Database;
use super::pauses;
use super::session::{AfterRefusal, Session};
use super::settlement::{Failures, Kind, Settlement, log_conflict, log_settled};
use super::shared::Shared;
use super::threads::Post;
use super::told::{Returned, Told};
use crate::clock;
use crate::error::DatabaseError;
use crate::store::relay::claim::Topic;
use crate::store::relay::connection::Plans;
use crate::store::relay::lease::LeaseId;
use crate::store::relay::settle::Trace;
use crate::store::relay::whereabouts::Whereabouts;

/// How long outcomes are gathered while there are many of them, and how often it is asked meanwhile
/// whether the senders have run out of work.
const LINGER: Duration = Duration::from_millis(5);
const GLANCE: Duration = Duration::from_millis(1);
/// What waits for a settle keeps keys back: as long as the senders have so many times as much to do, more
/// is gathered.
const KEYED_WORK: usize = 3;
/// A batch of no more than this is of a relay with little to do: it settles at once.
const LIGHT: usize = 16;
/// A settle that takes longer than this is given up and tried again.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(20);

/// Settles messages without ordering keys until all senders and the claimer are gone and everything is
/// written down, or until the relay gives up at its deadline.
///
/// What the database refuses for its values is kept apart (`refused`) and tried again now and then: it holds
/// nothing else, and what is not refused always comes first.
pub(crate) fn run(shared: &Shared, outcomes: &Receiver<Settlement>) {
    let session = session(shared, Post::Settler);
    let mut settler = Settler::new(shared, session, Keys::None);
    if settler.run(outcomes).is_ok() {
        pauses::tell_the_last(shared, &mut settler.db);
    }
}

/// The same with ordering keys, on one of several threads: what waits for a settle here is what nobody
/// sends meanwhile.
///
/// Where the first message of an ordering key is done, the next one is claimed in the transaction
/// that says so, and goes to the claimer.
pub(crate) fn run_keyed(shared: &Shared, post: Post, outcomes: &Receiver<Settlement>) {
    let mut settler = Settler::new(shared, session(shared, post), Keys::GoOn);
    if settler.run(outcomes).is_ok() {
        // What the claimer has left in its inbox.
        for told in shared.signals.told.1.try_iter() {
            if let Told::Continued(jobs) = told {
                settler.release(&jobs);
            }
        }
    }
}

fn session(shared: &Shared, post: Post) -> Session {
    shared.session(post, STATEMENT_TIMEOUT, Plans::ByIndex)
}

/// The relay has given up.
struct GivenUp;

/// Whether the messages of a settler have ordering keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keys {
    None,
    /// They have, and a key goes on in the settle of its first message.
    GoOn,
}

pub(super) struct Settler<'a, D> {
    shared: &'a Shared,
    db: D,
    keys: Keys,
    /// The last batch was a large one.
    is_busy: bool,
    refused: Refused,
    failures: Failures,
    /// What a refusal means to the statement under way.
    after_refusal: AfterRefusal,
    /// The topic of the statement under way, where its messages were put aside.
    topic_aside: Option<Topic>,
}

impl<'a, D: Database> Settler<'a, D> {
    pub(super) fn new(shared: &'a Shared, db: D, keys: Keys) -> Self {
        Self {
            shared,
            db,
            keys,
            is_busy: false,
            refused: Refused::default(),
            failures: Failures::default(),
            after_refusal: AfterRefusal::Reconnect,
            topic_aside: None,
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
                    let batch = gather(first, outcomes, batch_size);
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
            // Asked here: a channel that is never empty would not let the time run out.
            self.try_next();
            self.failures.tell(clock::now());
        }
    }

    /// When something that was refused is tried again, or the log is to be told of failures.
    pub(super) fn next_try(&self) -> Option<Instant> {
        let tries = self.refused.next_try(clock::now());
        tries.into_iter().chain(self.failures.due()).min()
    }

    /// Until everything is written down or put aside.
    fn settle_all(&mut self, batch: Vec<Settlement>) -> Result<(), GivenUp> {
        let mut left = self.set_suspects_apart(batch);
        while !left.is_empty() {
            left = self.settle(left);
            if !left.is_empty() {
                if self.shared.is_abandoned() {
                    return Err(GivenUp);
                }
                self.shared.pause(self.db.wait());
            }
        }
        Ok(())
    }

    /// Waits for more outcomes while the senders have work; where messages have ordering keys, while
    /// they have a good deal more than what waits here, because that keeps back the next one of each
    /// key. Not on the channel: each outcome would wake this thread. Ends early at shutdown.
    fn linger(&self, outcomes: &Receiver<Settlement>, enough: usize) {
        let shared = self.shared;
        let until = clock::now() + LINGER;
        let is_worth_it = || {
            let waiting = outcomes.len();
            let unsent = shared.count_in_flight().saturating_sub(waiting);
            let least = match self.keys {
                Keys::GoOn => KEYED_WORK * waiting,
                Keys::None => 0,
            };
            waiting < enough && unsent > shared.senders().max(least) && clock::now() < until
        };
        while is_worth_it() && !shared.is_stopping() {
            let _ = shared.signals.stop.recv_timeout(GLANCE);
        }
    }

    /// Settles a batch, one statement for each lease and kind. Returns what could not be written down for want
    /// of a server: it is tried again at once.
    pub(super) fn settle(&mut self, batch: Vec<Settlement>) -> Vec<Settlement> {
        let mut groups: BTreeMap<(LeaseId, Kind), Vec<Settlement>> = BTreeMap::new();
        for settlement in batch {
            groups
                .entry((settlement.lease, settlement.kind()))
                .or_default()
                .push(settlement);
        }
        let mut left = Vec::new();
        for mut group in groups.into_values().flat_map(each_once) {
            let Err(error) = self.settle_group(&group) else {
                continue;
            };
            group.iter_mut().for_each(|one| one.repeated = true);
            if error.is_refusal() && !self.db.is_missing() {
                left.extend(self.isolate(group));
            } else {
                left.extend(group);
            }
        }
        left
    }

    /// Settles messages of one lease and kind.
    fn settle_group(&mut self, group: &[Settlement]) -> Result<(), DatabaseError> {
        let Some(first) = group.first() else {
            return Ok(());
        };
        let (shared, lease, kind) = (self.shared, first.lease, first.kind());
        let began = clock::now();
        let (written, seen_to) = self.settle_and_continue(lease, kind, group)?;
        let now = clock::now();
        let took = now.saturating_duration_since(began);
        shared.metrics.settle_seconds.record(took.as_secs_f64());
        let changed: HashSet<i64> = written.changed.into_iter().collect();
        let missed: Vec<&Settlement> = group
            .iter()
            .filter(|s| !changed.contains(&s.sequence()))
            .collect();
        let settled_before = self.settled_before(&missed)?;
        let (mut done, mut dead, mut conflicts) = (Vec::new(), Vec::new(), Vec::new());
        for settlement in group {
            let sequence = settlement.sequence();
            if written.in_conflict.contains(&sequence) {
                dead.push(settlement.in_conflict());
            } else if changed.contains(&sequence) || settled_before.contains(&sequence) {
                done.push(settlement);
            } else {
                conflicts.push(settlement);
            }
        }
        shared.count(|stats| {
            stats.settles += 1;
            stats.conflicts += conflicts.len() as u64;
            stats.dead += dead.len() as u64;
            *match kind {
                Kind::Delivered => &mut stats.delivered,
                Kind::Deduplicated => &mut stats.deduplicated,
                Kind::Retry => &mut stats.retried,
                Kind::Dead => &mut stats.dead,
                Kind::Split => &mut stats.split,
                Kind::Released => &mut stats.released,
            } += done.len() as u64;
        });
        shared.metrics.conflicts.increment(conflicts.len() as u64);
        for settlement in done.into_iter().chain(&dead) {
            self.tell(settlement, now);
        }
        self.tell_conflicts(&conflicts);
        if matches!(kind, Kind::Split | Kind::Released) {
            let topics = group.iter().flat_map(Settlement::topics_before);
            let keys = group.iter().flat_map(Settlement::keys_before);
            shared.tell_claimer(Told::Returned(Returned::new(topics, keys)));
        } else {
            look_at_the_next(shared, group, &seen_to);
        }
        if kind == Kind::Split {
            // What it became is to be claimed.
            shared.signals.news.ring();
        }
        match &self.topic_aside {
            None => shared.finished(lease, group.iter().map(|one| one.to)),
            Some(topic) => shared.finished_aside(lease, topic, group),
        }
        Ok(())
    }

    /// Of messages that a repeated settle did not find: those that the first one had settled.
    fn settled_before(&mut self, missed: &[&Settlement]) -> Result<HashSet<i64>, DatabaseError> {
        let (traced, untraced): (Vec<&Settlement>, Vec<_>) = missed
            .iter()
            .filter(|one| one.repeated)
            .partition(|one| matches!(one.kind(), Kind::Delivered | Kind::Dead));
        // A retry or a release that worked before leaves nothing to be told by; nor does it matter.
        let mut before: HashSet<i64> = untraced.iter().map(|one| one.sequence()).collect();
        if !traced.is_empty() {
            let traces: Vec<Trace> = traced.iter().map(|one| one.trace()).collect();
            before.extend(self.db.settled(self.after_refusal, &traces)?);
        }
        Ok(before)
    }

    /// Tells the log, the metrics and the observers what is written down.
    fn tell(&mut self, settlement: &Settlement, now: Instant) {
        let shared = self.shared;
        shared.metrics.of(settlement.to).settled(settlement, now);
        let (config, bulkheads) = (&shared.config, &shared.bulkheads);
        log_settled(settlement, config, bulkheads, &mut self.failures, now);
        if let Some(settled) = settlement.told(bulkheads) {
            let message = &settlement.message;
            shared.observers.tell(message, |one| one.settled(&settled));
        }
    }

    /// Writes down, for each message that was not this lease's any more, how it stands now. A failure here is
    /// the outage's to tell; the outcome is lost to this relay either way.
    fn tell_conflicts(&mut self, conflicts: &[&Settlement]) {
        if conflicts.is_empty() {
            return;
        }
        let missed: Vec<Trace> = conflicts.iter().map(|one| one.trace()).collect();
        let found = self.db.whereabouts(&missed).ok();
        for settlement in conflicts {
            let is_it = |standing: &&Whereabouts| standing.sequence == settlement.sequence();
            let found = found.as_ref().map(|found| found.iter().find(is_it));
            log_conflict(
                settlement,
                &self.shared.config,
                &self.shared.bulkheads,
                found,
            );
        }
    }
}

/// Groups in the order of their sequences, each sequence once: a new primary that lacks the last inserts
/// gives some of them out again.
fn each_once(mut group: Vec<Settlement>) -> Vec<Vec<Settlement>> {
    group.sort_unstable_by_key(Settlement::claim);
    let mut groups: Vec<Vec<Settlement>> = Vec::new();
    for one in group {
        let last = |group: &Vec<Settlement>| group.last().map(Settlement::sequence);
        let is_new = |group: &&mut Vec<Settlement>| last(group) != Some(one.sequence());
        match groups.iter_mut().find(is_new) {
            Some(group) => group.push(one),
            None => groups.push(vec![one]),
        }
    }
    groups
}

/// The first outcome and those that wait behind it, up to a batch.
fn gather(first: Settlement, outcomes: &Receiver<Settlement>, most: usize) -> Vec<Settlement> {
    std::iter::once(first)
        .chain(outcomes.try_iter())
        .take(most)
        .collect()
}
