//! What a settle reports: to the counters, the log, the metrics, the observers and the claimer.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use super::Settler;
use super::next::look_at_the_next;
use super::settlement::{Kind, Settlement, log_conflict, log_settled};
use super::sql::settle::Trace;
use super::sql::whereabouts::Whereabouts;
use crate::engine::claim::told::Told;
use crate::engine::host::database::Database;
use crate::engine::plan::{Report, Returned};
use crate::status::ReasonCode;

impl<D: Database> Settler<'_, D> {
    /// Counts and reports these messages: settled as they should be, settled as dead letters because they are
    /// `in_conflict`, or no longer held by this lease.
    pub(super) fn report(
        &mut self,
        kind: Kind,
        ended: &[&Settlement],
        settled: &HashSet<i64>,
        in_conflict: &[i64],
        now: Instant,
    ) {
        let shared = self.shared;
        let is_settled = |one: &&Settlement| settled.contains(&one.sequence());
        let (settled, conflicts): (Vec<&Settlement>, Vec<_>) =
            ended.iter().copied().partition(is_settled);
        let is_dead = |one: &&Settlement| in_conflict.contains(&one.sequence());
        let (dead, done): (Vec<&Settlement>, Vec<_>) = settled.into_iter().partition(is_dead);
        shared.count(|stats| {
            stats.settles += 1;
            stats.conflicts += conflicts.len() as u64;
            stats.dead += dead.len() as u64;
            *match kind {
                Kind::Delivered | Kind::Stored => &mut stats.delivered,
                Kind::NoSubscriber => &mut stats.no_subscriber,
                Kind::Deduplicated => &mut stats.deduplicated,
                Kind::Retry => &mut stats.retried,
                Kind::Waiting => &mut stats.waiting,
                Kind::Dead => &mut stats.dead,
                Kind::Cancelled => &mut stats.cancelled,
                Kind::Split => &mut stats.split,
                Kind::Released => &mut stats.released,
            } += done.len() as u64;
        });
        shared.metrics.conflicts.increment(conflicts.len() as u64);
        let topics = || done.iter().map(|one| one.message.topic.as_str());
        if kind == Kind::NoSubscriber {
            shared.unwanted.note(topics(), now);
        }
        let is_undeclared = |one: &&Settlement| {
            (one.failure()).is_some_and(|failure| failure.code == ReasonCode::UnknownTopic)
        };
        if done.iter().any(is_undeclared) {
            shared.undeclared.note(topics(), now);
        }
        done.into_iter().for_each(|one| self.tell(one, now));
        dead.into_iter()
            .for_each(|one| self.tell(&one.in_conflict(), now));
        self.tell_conflicts(kind, &conflicts);
    }

    /// Reports a settled message to the log, the metrics and the observers.
    fn tell(&mut self, settlement: &Settlement, now: Instant) {
        let shared = self.shared;
        shared.metrics.of(settlement.to).settled(settlement, now);
        log_settled(settlement, shared, &mut self.failures, now);
        if let Some(settled) = settlement.told(&shared.bulkheads) {
            let message = &settlement.message;
            shared.observers.tell(message, |one| one.settled(&settled));
        }
    }

    /// Logs the current state of each message that this lease no longer held. If the query fails, the outage is logged
    /// elsewhere; the outcome is lost in any case.
    fn tell_conflicts(&mut self, kind: Kind, conflicts: &[&Settlement]) {
        if conflicts.is_empty() {
            return;
        }
        let missed: Vec<Trace> = conflicts.iter().map(|one| one.trace()).collect();
        let found = self.db.whereabouts(&missed);
        let mut discarded = Vec::new();
        for settlement in conflicts {
            let is_it = |standing: &&Whereabouts| standing.sequence == settlement.sequence();
            let found = found.as_ref().map(|found| found.iter().find(is_it));
            let why = log_conflict(settlement, self.shared, found);
            discarded.push(settlement.discarded(&self.shared.bulkheads, &why));
        }
        // Of a message that was not sent, no result is lost.
        if !matches!(kind, Kind::Split | Kind::Released | Kind::Waiting) {
            // An outage is logged by the session, and the log has the conflict.
            let _ = self.db.note_conflicts(&discarded);
        }
    }

    /// Tells the claimer what it may claim now.
    pub(super) fn tell_claimer(
        &self,
        kind: Kind,
        group: &[Settlement],
        ended: &[&Settlement],
        unfinished: &HashMap<i64, Option<String>>,
        seen_to: &HashSet<i64>,
    ) {
        if !matches!(kind, Kind::Split | Kind::Released) {
            return look_at_the_next(self.shared, group, seen_to);
        }
        let topics = ended.iter().flat_map(|one| one.topics_before());
        let begun = |one| Some((one, unfinished.get(&Settlement::sequence(one))?.as_deref()?));
        let begun = group.iter().filter_map(begun);
        let topics = topics.chain(begun.flat_map(|(one, last)| one.topics_up_to(last)));
        // Parts with a key wait until their message is gone.
        let keys = ended.iter().flat_map(|one| one.keys_before());
        let returned = Report::Returned(Returned::new(topics, keys));
        self.shared.tell_claimer(Told::Report(returned));
    }
}
