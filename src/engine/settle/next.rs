//! Continues ordering keys: the settle of a key's message also claims the key's next message.

use std::collections::{HashMap, HashSet};

use super::settlement::{Kind, Settlement};
use super::written::{Settle, Written};
use super::{Keys, Settler};
use crate::engine::claim::sql::claim::{Batch, Runs};
use crate::engine::claim::told::Told;
use crate::engine::directory::Reading;
use crate::engine::host::database::Database;
use crate::engine::host::shared::Shared;
use crate::engine::keys::sql::ordered::Key;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::plan::{Report, Returned};
use crate::engine::send::bulkhead::left_bytes;
use crate::engine::send::job::Job;
use crate::engine::send::verdict::Verdict;
use crate::error::DatabaseError;
use crate::log;

/// The most messages of one key that are claimed in a row while other messages wait for room.
const MOST_IN_A_ROW: u32 = 100;

impl<D: Database> Settler<'_, D> {
    /// Hands claimed messages to the claimer.
    fn hand_on(&self, next: Batch, lease: LeaseId) {
        if next.claimed.is_empty() {
            return;
        }
        let shared = self.shared;
        let mut jobs = shared.took(next, lease, |_| Reading::NotAsked);
        let continued: usize = jobs.iter().map(Job::len).sum();
        shared.count(|stats| stats.continued += continued as u64);
        // Bulkheads do not count the bytes of these messages while they wait for the claimer.
        for job in jobs.iter_mut().filter(|job| job.unsent.is_some()) {
            job.unload(&shared.bulkheads);
        }
        shared.tell_claimer(Told::Continued(jobs));
    }

    /// Settles a group and claims the next message of each ordering key whose first message is finished. Both happen in
    /// one transaction, for deliveries in one statement, so that no other relay claims first. Also returns the messages after which the claimer need not
    /// check the key.
    pub(super) fn settle_and_continue(
        &mut self,
        lease: LeaseId,
        kind: Kind,
        group: &[Settlement],
    ) -> Result<(Written, HashSet<i64>), DatabaseError> {
        let shared = self.shared;
        let looks = shared.keyed_looks();
        let (roster, read_to) = (shared.directory.roster(), shared.directory.read_to());
        let mut settle = Settle {
            settings: &shared.settings,
            bulkheads: &shared.bulkheads,
            lease,
            kind,
            group,
            runs: None,
            keys: &HashMap::new(),
            closed: &[],
            namesakes: roster.namesakes(),
            read_to: read_to.as_deref(),
            bytes: left_bytes(&shared.bulkheads),
            piece: self.splits.piece(),
        };
        let mut rows = HashMap::new();
        let mut in_a_row = HashMap::new();
        // What is put aside is expected to fail, and its topic may not be claimed.
        let may_continue = self.keys == Keys::Continue
            && self.topic_aside.is_none()
            && settle.bytes > 0
            && may_continue(shared, lease);
        // Until the messages that this settle claims are in custody.
        let continuing = may_continue.then(|| shared.custody.begin_continuing());
        let continuing = continuing.flatten();
        if continuing.is_some() {
            for settlement in group {
                if let Some((key, count)) = next_key(shared, settlement) {
                    in_a_row.insert(key.clone(), count);
                    rows.insert(settlement.sequence(), key);
                }
            }
        }
        if rows.is_empty() {
            drop(continuing);
            let (written, _) = self.db.settle(self.after_refusal, &settle)?;
            return Ok((written, HashSet::new()));
        }
        let has_full = !shared.policy().full.is_empty();
        let (closed, runs) = (shared.closed_topics(), shared.runs());
        (settle.keys, settle.closed) = (&rows, &closed);
        settle.runs = runs.as_ref().map(|runs| runs as &dyn Runs);
        let result = self.db.settle(self.after_refusal, &settle);
        if result.as_ref().is_err_and(DatabaseError::is_without_answer) {
            // The statement may have succeeded. The lease then holds messages unknown to this relay.
            (shared.custody).begin_doubt(lease, self.db.after().backend.into());
        }
        let (written, mut next) = result?;
        for one in &mut next.claimed {
            let key = Key::of(&one.message).and_then(|key| in_a_row.get(&key));
            one.message.in_a_row = key.map_or(0, |count| count + 1);
        }
        // A next message that was committed too late for this claim may have been skipped by the claimer meanwhile,
        // because the message was not yet the first of its key.
        let is_passed = shared.keyed_looks().has_looked_since(looks) || shared.policy().has_parts;
        let may_be_left = is_passed || next.is_cut || has_full;
        let claimed: HashSet<Key> = next
            .claimed
            .iter()
            .filter_map(|one| Key::of(&one.message))
            .collect();
        let seen_to = rows
            .into_iter()
            .filter(|(_, key)| claimed.contains(key) || !may_be_left)
            .map(|(sequence, _)| sequence)
            .collect();
        self.hand_on(next, lease);
        drop(continuing);
        Ok((written, seen_to))
    }

    /// Releases claimed messages that no thread sends any more.
    pub(crate) fn release(&mut self, jobs: Vec<Job>) {
        let bulkheads = &self.shared.bulkheads;
        let release = |job| Settlement::unsent(job, bulkheads, Verdict::Released);
        let released = jobs.into_iter().map(release).flat_map(Settlement::apart);
        let left = self.settle(released.collect());
        if !left.is_empty() {
            // The messages stay in flight, so the lease is left to expire, and other relays take them over.
            let count = left.len();
            log::warn!(event = "release_failed", messages = count; "could not release {count} messages: other relays take them over when the lease expires");
        }
    }
}

/// Tells the claimer the keys that continue and whose next message was not claimed here.
pub(super) fn look_at_the_next(shared: &Shared, group: &[Settlement], seen_to: &HashSet<i64>) {
    let rests =
        |settlement: &&Settlement| is_done(settlement) && !seen_to.contains(&settlement.sequence());
    let has_parts = shared.policy().has_parts;
    let keys: Vec<Key> = group
        .iter()
        .filter(rests)
        .flat_map(|settlement| settlement.keys_behind(&shared.bulkheads, has_parts))
        .collect();
    if !keys.is_empty() {
        let returned = Returned::new(std::iter::empty(), keys.into_iter());
        shared.tell_claimer(Told::Report(Report::Returned(returned)));
    }
}

/// Whether this relay may still claim under this lease.
fn may_continue(shared: &Shared, lease: LeaseId) -> bool {
    !shared.is_stopping() && shared.limit.is_none() && shared.lease.current() == Some(lease)
}

/// Whether the key's next message may be sent after this settle.
fn is_done(settlement: &Settlement) -> bool {
    match settlement.kind() {
        Kind::Delivered | Kind::NoSubscriber | Kind::Deduplicated => true,
        Kind::Dead | Kind::Cancelled => !settlement.blocks_key(),
        Kind::Retry | Kind::Waiting | Kind::Split | Kind::Released => false,
    }
}

/// The key that continues after this settle, and how many of its messages were claimed in a row. The messages of a run
/// count from the first one.
fn next_key(shared: &Shared, settlement: &Settlement) -> Option<(Key, u32)> {
    // The claim may be the cause of a failure, so a repeated settle does not claim.
    if !is_done(settlement) || settlement.repeated || settlement.is_followed {
        return None;
    }
    let behind = u32::try_from(settlement.behind.len()).unwrap_or(u32::MAX);
    let in_a_row = settlement.message.in_a_row.saturating_add(behind);
    if in_a_row >= MOST_IN_A_ROW && shared.custody.room_wanted.is_so() {
        return None;
    }
    Some((settlement.key()?, in_a_row))
}
