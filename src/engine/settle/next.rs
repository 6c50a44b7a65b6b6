//! Continues ordering keys: the settle of a key's message also claims the key's next message.

use std::collections::{HashMap, HashSet};

use super::Settler;
use super::settlement::{Kind, Settlement};
use super::sql::settle::Written;
use super::written::Settle;
use crate::engine::claim::custody::Continuing;
use crate::engine::claim::sql::claim::{Batch, Claimant, Runs};
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

impl<'a, D: Database> Settler<'a, D> {
    /// Settles a group and claims the next message of each ordering key whose first message is finished. Both happen in
    /// one transaction, for deliveries in one statement, so that no other relay claims first. Also returns the messages
    /// after which the claimer need not check the key.
    // Why: docs/decisions.md#continue
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
            claimant: Claimant {
                lease,
                expired: &[],
                bytes: left_bytes(&shared.bulkheads),
                runs: None,
                namesakes: roster.namesakes(),
                read_to: read_to.as_deref(),
            },
            kind,
            group,
            keys: &HashMap::new(),
            closed: &[],
            piece: self.splits.piece(),
        };
        // Until the messages that this settle claims are in custody.
        let continuing = self.begin_continuing(settle.claimant);
        let (mut rows, in_a_row) = match continuing {
            Some(_) => next_keys(shared, group),
            None => Default::default(),
        };
        if rows.is_empty() {
            drop(continuing);
            let (written, _) = self.db.settle(self.after_refusal, &settle)?;
            return Ok((written, HashSet::new()));
        }
        let has_full = !shared.policy().full.is_empty();
        let (closed, runs) = (shared.closed_topics(), shared.runs());
        (settle.keys, settle.closed) = (&rows, &closed);
        settle.claimant.runs = runs.as_ref().map(|runs| runs as &dyn Runs);
        let result = self.db.settle(self.after_refusal, &settle);
        if result.as_ref().is_err_and(DatabaseError::is_without_answer) {
            // The statement may have succeeded. The lease then holds messages unknown to this relay.
            (shared.custody).begin_doubt(lease, self.db.after().backend.into());
        }
        let (written, next) = result?;
        // A next message that was committed too late for this claim may have been skipped by the claimer meanwhile,
        // because the message was not yet the first of its key.
        let is_passed = shared.keyed_looks().has_looked_since(looks) || shared.policy().has_parts;
        let may_be_left = is_passed || next.is_cut || has_full;
        let claimed = self.hand_on(next, lease, &in_a_row);
        rows.retain(|_, key| claimed.contains(key) || !may_be_left);
        Ok((written, rows.into_keys().collect()))
    }

    /// Whether this settler may claim next messages under this lease, until the value is dropped.
    fn begin_continuing(&self, by: Claimant<'_>) -> Option<Continuing<'a>> {
        let shared = self.shared;
        // What is put aside is expected to fail, and its topic may not be claimed.
        let may_continue = self.is_keyed
            && self.topic_aside.is_none()
            && by.bytes > 0
            && !shared.is_stopping()
            && shared.limit.is_none()
            && shared.lease.current() == Some(by.lease);
        let continuing = may_continue.then(|| shared.custody.begin_continuing());
        continuing.flatten()
    }

    /// Hands claimed messages to the claimer. Returns their keys. `in_a_row`: how many messages of each key were claimed
    /// before in a row.
    fn hand_on<'k>(
        &self,
        mut next: Batch,
        lease: LeaseId,
        in_a_row: &'k HashMap<Key, u32>,
    ) -> HashSet<&'k Key> {
        let mut keys = HashSet::new();
        for one in &mut next.claimed {
            let key = Key::of(&one.message).and_then(|key| in_a_row.get_key_value(&key));
            one.message.in_a_row = key.map_or(0, |(_, count)| count + 1);
            keys.extend(key.map(|(key, _)| key));
        }
        if next.claimed.is_empty() {
            return keys;
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
        keys
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

/// Whether the key's next message may be sent after this settle.
fn is_done(settlement: &Settlement) -> bool {
    match settlement.kind() {
        Kind::Delivered | Kind::Stored | Kind::NoSubscriber | Kind::Deduplicated => true,
        Kind::Dead | Kind::Cancelled => !settlement.blocks_key(),
        Kind::Retry | Kind::Waiting | Kind::Split | Kind::Released => false,
    }
}

/// The keys that continue after this settle, by their finished messages, and how many messages of each were claimed in a
/// row. The messages of a run count from the first one.
fn next_keys(shared: &Shared, group: &[Settlement]) -> (HashMap<i64, Key>, HashMap<Key, u32>) {
    // The claim may be the cause of a failure, so a repeated settle does not claim.
    let continues = |one: &&Settlement| is_done(one) && !one.repeated && !one.is_followed;
    let next = |one: &Settlement| {
        let behind = u32::try_from(one.behind.len()).unwrap_or(u32::MAX);
        let in_a_row = one.message.in_a_row.saturating_add(behind);
        let gives_way = in_a_row >= MOST_IN_A_ROW && shared.custody.room_wanted.is_so();
        let key = Key::of(&one.message).filter(|_| !gives_way)?;
        Some(((one.sequence(), key.clone()), (key, in_a_row)))
    };
    group.iter().filter(continues).filter_map(next).unzip()
}
