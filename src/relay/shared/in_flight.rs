//! What is claimed and not settled: counted, by lease, and put aside.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Shared;
use crate::relay::bulkhead::Bulkhead;
use crate::relay::stats::add;
use crate::relay::to::To;
use crate::relay::wanted::Want;
use crate::store::relay::claim::{Claimed, Topic};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::settle::Claim;

/// How often it is said, at most, that claims are held.
const TELL_INTERVAL: Duration = Duration::from_secs(60);

/// Messages whose settles the database refuses, or did of others of their topics.
#[derive(Debug, Default)]
pub(crate) struct Aside {
    /// Their claims: sequences may be given out again.
    of_topics: HashMap<Topic, HashSet<Claim>>,
    /// Those that were not refused by themselves, and may be fine.
    untried: HashSet<Claim>,
    /// No more of these is claimed.
    held: HashSet<Topic>,
    /// When it was last said that some are.
    told: Option<Instant>,
}

impl Aside {
    /// Returns how many were not there.
    fn put(&mut self, topic: &Topic, claims: impl Iterator<Item = Claim>) -> usize {
        let of_topic = self.of_topics.entry(topic.clone()).or_default();
        let new = |claim: &Claim| of_topic.insert(*claim);
        let new: Vec<Claim> = claims.filter(new).collect();
        self.untried.extend(&new);
        new.len()
    }

    /// Returns how many were there.
    fn take(&mut self, topic: &Topic, claims: impl Iterator<Item = Claim>) -> usize {
        let Some(of_topic) = self.of_topics.get_mut(topic) else {
            return 0;
        };
        let untried = &mut self.untried;
        let taken = |claim: &Claim| {
            untried.remove(claim);
            of_topic.remove(claim)
        };
        let count = claims.filter(taken).count();
        if of_topic.is_empty() {
            self.of_topics.remove(topic);
        }
        count
    }

    fn of_topic(&self, topic: &Topic) -> usize {
        self.of_topics.get(topic).map_or(0, HashSet::len)
    }

    fn all(&self) -> usize {
        self.of_topics.values().map(HashSet::len).sum()
    }
}

impl Shared {
    /// Counts messages that were claimed.
    pub(in crate::relay) fn count_claimed(&self, count: usize) {
        add(&self.stats.claimed, count);
        self.metrics.claimed.increment(count as u64);
        self.progress.moved();
    }

    /// `count` messages were claimed under a lease.
    pub(crate) fn began(&self, lease: LeaseId, count: usize) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        *held.entry(lease).or_default() += count;
        self.in_flight.fetch_add(count, Ordering::AcqRel);
    }

    /// These messages are in memory until their bulkheads unload them.
    pub(crate) fn load(&self, claimed: &[Claimed]) {
        for Claimed { message, .. } in claimed {
            let to = To::of(&self.routes, &message.topic, &message.destination);
            self.bulkhead_of(to).load(message);
        }
    }

    /// The bulkhead that counts what goes there: the last one also what is settled without a send.
    pub(crate) fn bulkhead_of(&self, to: To) -> &Bulkhead {
        match to {
            To::Bulkhead(number) => &self.bulkheads[number],
            To::Split | To::Nowhere => &self.bulkheads[self.bulkheads.len() - 1],
        }
    }

    /// These messages of a topic are put aside: they wait for a settle of their own, and nothing waits for
    /// them.
    pub(crate) fn put_aside(&self, topic: &Topic, claims: impl Iterator<Item = Claim>) {
        let mut aside = self.aside();
        let count = aside.put(topic, claims);
        self.in_flight.fetch_sub(count, Ordering::AcqRel);
        self.judge(&mut aside, topic);
        if self.idle.is_asked() || self.wanted.is(Want::Settled) {
            self.ring();
        }
    }

    /// The settle of a message that is put aside was refused.
    pub(crate) fn refused(&self, claim: Claim) {
        let mut aside = self.aside();
        aside.untried.remove(&claim);
        self.ring_when_sure(&aside);
    }

    /// These messages that were put aside are written down.
    pub(crate) fn finished_aside(
        &self,
        lease: LeaseId,
        topic: &Topic,
        claims: impl Iterator<Item = Claim>,
    ) {
        let mut aside = self.aside();
        let count = aside.take(topic, claims);
        for held in aside.held.clone() {
            self.judge(&mut aside, &held);
        }
        self.ring_when_sure(&aside);
        drop(aside);
        self.forget_held(lease, count);
    }

    /// What waits for the answer whether anything is on its way has waited for these, too.
    fn ring_when_sure(&self, aside: &Aside) {
        if aside.untried.is_empty() && self.idle.is_asked() {
            self.ring();
        }
    }

    /// Claims of a topic end and begin again with the number of its messages that are put aside: what cannot
    /// be written down is not to be sent.
    fn judge(&self, aside: &mut Aside, topic: &Topic) {
        let (count, all) = (aside.of_topic(topic), aside.all());
        let most = 2 * self.batch();
        let is_held = aside.held.contains(topic);
        if !is_held && count > 0 && (count >= most || all >= 2 * most) {
            aside.held.insert(topic.clone());
            self.ring();
            if aside
                .told
                .is_none_or(|told| told.elapsed() >= TELL_INTERVAL)
            {
                aside.told = Some(Instant::now());
                log::error!(event = "claims_held", topic = topic.topic, destination = topic.destination, messages = count, all = all; "the database refuses to record {count} messages of {}: this relay claims no more of them until it does", topic.topic);
            }
        } else if is_held && (count == 0 || (count <= most / 2 && all <= most)) {
            aside.held.remove(topic);
            self.ring();
            log::info!(event = "claims_resumed", topic = topic.topic, destination = topic.destination, messages = count; "claiming messages of {} again", topic.topic);
        }
    }

    /// The topics of which nothing is claimed, because the database refuses to write down what became of their
    /// messages.
    pub(crate) fn held_topics(&self) -> HashSet<Topic> {
        self.aside().held.clone()
    }

    /// The same, with how many messages of each are put aside.
    pub(crate) fn held_counts(&self) -> Vec<(Topic, usize)> {
        let aside = self.aside();
        let count = |topic: &Topic| (topic.clone(), aside.of_topic(topic));
        aside.held.iter().map(count).collect()
    }

    /// Whether everything that was claimed is written down, but for what the database has refused.
    pub(crate) fn is_nothing_in_flight(&self) -> bool {
        let aside = self.aside();
        aside.untried.is_empty() && self.in_flight.load(Ordering::Acquire) == 0
    }

    /// The messages that are put aside or whose handlers run, if nothing else is in flight.
    pub(crate) fn only_aside(&self) -> Option<Vec<i64>> {
        let handled = self.handled();
        let aside = self.aside();
        let is_all = self.in_flight.load(Ordering::Acquire) == handled.len();
        let of_handlers = handled.iter().map(|(_, sequence)| *sequence);
        let put_aside = aside
            .of_topics
            .values()
            .flatten()
            .map(|claim| claim.sequence);
        is_all.then(|| put_aside.chain(of_handlers).collect())
    }

    /// A handler begins: nothing but its own settle waits for it, for it may take long. Where its lease is
    /// lost meanwhile, the message may be claimed here anew, and not be started again.
    pub(in crate::relay) fn begin_handling(&self, lease: LeaseId, sequence: i64) {
        self.handled().insert((lease, sequence));
        self.forget_held(lease, 1);
    }

    /// The handler has ended: its settle is on its way.
    pub(in crate::relay) fn end_handling(&self, lease: LeaseId, sequence: i64) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        *held.entry(lease).or_default() += 1;
        drop(held);
        self.handled().remove(&(lease, sequence));
    }

    /// What is in flight and not with a handler.
    pub(in crate::relay) fn in_flight_beside_handlers(&self) -> usize {
        let handled = self.handled().len();
        self.in_flight
            .load(Ordering::Acquire)
            .saturating_sub(handled)
    }

    fn handled(&self) -> MutexGuard<'_, HashSet<(LeaseId, i64)>> {
        self.handled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Messages claimed and not settled.
    pub(crate) fn unsettled(&self) -> usize {
        let aside = self.aside();
        self.in_flight.load(Ordering::Acquire) + aside.all()
    }

    fn aside(&self) -> MutexGuard<'_, Aside> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The leases under which messages were claimed that are still on their way here.
    pub(crate) fn held_leases(&self) -> HashSet<LeaseId> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.keys().copied().collect()
    }

    /// `count` messages of a lease are settled, released or lost to another relay.
    pub(crate) fn finished(&self, lease: LeaseId, count: usize) {
        self.forget_held(lease, count);
        let before = self.in_flight.fetch_sub(count, Ordering::AcqRel);
        let is_waited_for = || self.idle.is_asked() || self.wanted.is(Want::Settled);
        if (before == count && is_waited_for()) || self.wanted.is(Want::Room) {
            self.ring();
        }
    }

    fn forget_held(&self, lease: LeaseId, count: usize) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(left) = held.get_mut(&lease) {
            *left = left.saturating_sub(count);
            if *left == 0 {
                held.remove(&lease);
            }
        }
    }
}
