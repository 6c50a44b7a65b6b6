//! What the planner is told: what its steps have found, and what others have done.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::database_clock::DatabaseClock;
use super::lanes::{Brought, Seen};
use super::picks::Picked;
use super::surveys::{Looks, Streams, Survey, Surveyed};
use super::undoing::{Part, Undoing};
use super::{
    Awaited, LATE_STEP, Planner, Policy, SHORTEST_SURVEY_INTERVAL, SURVEY_INTERVAL, Stage, walk,
};
use crate::relay::registered::Registry;
use crate::relay::to::To;
use crate::relay::told::Returned;
use crate::store::range::Range;
use crate::store::relay::claim::{Batch, Lane, Position, Topic};
use crate::store::relay::late::Late;
use crate::store::relay::lease::LeaseId;
use crate::store::relay::ordered::Key;
use crate::store::relay::patrol::Free;
use crate::store::relay::settle::Claim;

impl Planner<'_> {
    /// A wait is over. `is_rung`: before its time.
    pub(in crate::relay) fn waited(
        &mut self,
        now: Instant,
        what: Awaited,
        is_rung: bool,
        is_nothing_in_flight: bool,
    ) {
        match what {
            Awaited::Nothing | Awaited::Lease | Awaited::OthersClaim | Awaited::Settles => return,
            // A look is owed, and nothing else tells that its time has come.
            Awaited::Room if self.looks.owed_at().is_some_and(|at| now >= at) => {
                self.surveyed = None;
            }
            Awaited::Room => {}
            Awaited::Turn | Awaited::Work => {
                if !is_rung {
                    self.surveyed = None;
                }
            }
        }
        self.begin_look(now, is_nothing_in_flight);
    }

    /// A step has failed. The next connection may be to another server: what it knows is looked for anew.
    pub(in crate::relay) fn failed(&mut self) {
        self.surveyed = None;
        self.stage = Stage::Undo;
    }

    /// Something new may be there: to be looked for from the start.
    pub(in crate::relay) fn has_news(&mut self) {
        self.surveyed = None;
    }

    /// Messages were given back, or became free.
    pub(in crate::relay) fn returned(&mut self, Returned { topics, keys }: Returned) {
        self.lanes.go_back(&topics);
        self.walk.freed(keys);
    }

    /// Asks what no relay serves, when it is time to look through that.
    pub(in crate::relay) fn look_at_unserved(
        &mut self,
        now: Instant,
        unserved: impl FnOnce() -> Vec<Topic>,
    ) {
        if self.expiry.wants_a_round(now) {
            let is_nowhere = |topic: &Topic| self.way(topic) == To::Nowhere;
            let topics = unserved().into_iter().filter(is_nowhere).collect();
            self.expiry.begin(now, topics, self.settings.poll_interval);
        }
    }

    /// A survey has found this. Begins a new look, unless one is under way that has found nothing yet.
    /// `true`: some topics were found for the first time that this relay does not take.
    pub(in crate::relay) fn surveyed(
        &mut self,
        now: Instant,
        survey: Survey,
        found: Surveyed,
    ) -> bool {
        let Surveyed {
            streams,
            took,
            shortened: _,
            ended,
            held,
            is_active,
            time,
            server: _,
            kept_back,
        } = found;
        let began = survey.look.began;
        let is_of_newest = matches!(survey.streams, Streams::Behind(_));
        let is_cut = !is_of_newest && streams.is_none();
        let seen = self.looks.learn(now, &survey.streams, streams, took);
        if is_cut {
            self.patrol.want(now);
        }
        // The answer had come by now, so that it is never ahead.
        self.clock = DatabaseClock::new(time, now);
        if is_active && !self.is_active {
            self.lanes.forget_places();
            self.late.restart();
        }
        self.is_active = is_active;
        let is_first = self.ended.is_none();
        let before = self.ended.take().unwrap_or_default();
        let is_new = |id: &&i64| !before.contains(id);
        let newly_ended: Vec<i64> = ended.iter().filter(is_new).copied().collect();
        // A look of many lanes that has found nothing may take longer than a survey is good for: it
        // goes on, or it would never end. What a dead relay held may be in any lane.
        let is_new_look =
            self.surveyed.is_none() || !self.look.found_nothing || !newly_ended.is_empty();
        if !newly_ended.is_empty() {
            self.lanes.forget_places();
            self.walk.restart();
        }
        // Those that had ended before this relay began are no news.
        for id in newly_ended.iter().filter(|_| !is_first) {
            log::warn!(event = "lease_expired", lease = id; "lease {id} of another relay has expired: taking its messages over");
        }
        self.expire(&ended, &held);
        self.ended = Some(ended);
        let has_new_nowhere = self.take_over(seen, now);
        self.policy = Policy {
            paused: kept_back.topics.iter().cloned().collect(),
            not_taken: self.lanes.nowhere().collect(),
            has_parts: self.lanes.has_keyed_parts(),
            full: std::mem::take(&mut self.policy.full),
        };
        self.is_policy_new = true;
        if self.lanes.keep_back(kept_back) {
            // The walk has passed over their keys.
            self.walk.restart();
        }
        if is_new_look {
            self.lanes.begin_look();
            self.look = survey.look;
        }
        self.surveyed = Some(now);
        // Where each statement takes long, surveys do not take half of the time.
        let took = now.saturating_duration_since(began);
        let poll = (self.settings.poll_interval).clamp(SHORTEST_SURVEY_INTERVAL, SURVEY_INTERVAL);
        self.survey_interval = poll.max(3 * took).min(SURVEY_INTERVAL);
        has_new_nowhere
    }

    fn take_over(&mut self, seen: Seen, now: Instant) -> bool {
        let now = self.now(now);
        let way = |topic: &Topic| To::of(self.routes, &self.registry, topic);
        self.lanes.take_over(seen, way, now)
    }

    /// Registered destinations are others than before: lanes may go elsewhere, and messages that waited may be sent.
    pub(in crate::relay) fn registered(&mut self, registry: Arc<Registry>) {
        self.registry = registry;
        let way = |topic: &Topic| To::of(self.routes, &self.registry, topic);
        if self.lanes.go_elsewhere(way) {
            self.walk.restart();
        }
    }

    /// What this process itself still has to write down, under a lease that it has lost, is not taken from
    /// it.
    fn expire(&mut self, ended: &[i64], held: &HashSet<LeaseId>) {
        let is_undone = |id| self.undoing.as_ref().is_some_and(|one| one.is_of(id));
        let is_free = |id: &&i64| !held.contains(&LeaseId(**id)) && !is_undone(LeaseId(**id));
        let over = ended.iter().chain(&self.vanished);
        self.expired = over.filter(is_free).copied().collect();
    }

    /// Which server a survey has asked. `true`: another one than before. A standby that has taken the place of its
    /// primary may lack the last settles: then the lease holds messages that nobody here knows of any more.
    pub(in crate::relay) fn is_other_server(&mut self, server: i64) -> bool {
        let before = self.server.replace(server);
        let is_other = before.is_some_and(|before| before != server);
        if is_other {
            self.late.restart();
        }
        is_other
    }

    /// A survey has failed, and what it found is lost: it is looked for anew, however long that takes.
    pub(in crate::relay) fn survey_failed(&mut self) {
        self.looks = Looks::default();
    }

    /// The rows of these leases are gone while messages name them.
    pub(in crate::relay) fn vanished(&mut self, leases: Vec<i64>) {
        self.vanished = leases;
    }

    /// A claim of lanes has brought this.
    pub(in crate::relay) fn claimed(&mut self, now: Instant, brought: &Brought<'_>) {
        self.look.found_nothing &= brought.batch.claimed.is_empty();
        self.lanes.learn(brought, self.now(now));
    }

    /// A claim of these lanes took too long: they go on where fewer dead entries are, and the patrol looks
    /// at the rest.
    pub(in crate::relay) fn was_too_slow(&mut self, now: Instant, asked: &[Lane], took: Duration) {
        log::warn!(event = "claim_slow", lanes = asked.len(), seconds = took.as_secs_f64(); "a claim took {:.1} s and was cancelled: an old transaction may keep settled messages in the index. Searching in smaller steps", took.as_secs_f64());
        self.lanes.were_too_slow(asked, took, self.now(now));
        self.patrol.want(now);
    }

    /// A keyed claim was made, or (`None`) another relay's was in its way. `random`: from 0 to 1.
    pub(in crate::relay) fn contended(&mut self, now: Instant, random: f64, batch: Option<&Batch>) {
        match batch {
            Some(_) => self.contention.won(),
            None => self.contention.lost(now, random),
        }
        self.look.found_nothing &= batch.is_some_and(|batch| batch.claimed.is_empty());
    }

    /// Another relay's claim was in the way of a step: it is made again, a little later.
    pub(in crate::relay) fn was_beaten(&mut self) {
        self.is_beaten = true;
    }

    /// A claim has no answer. What it took may be where an undo has been.
    pub(in crate::relay) fn lost_answer(&mut self) {
        self.undoing = None;
    }

    /// Everything known is settled: what the lease holds beside these is given back.
    pub(in crate::relay) fn begin_undo(&mut self, lease: LeaseId, aside: Vec<Claim>) {
        self.undoing = Some(Undoing::new(lease, aside));
    }

    /// So many messages of a part were given back. `None`: it took too long.
    pub(in crate::relay) fn undone(&mut self, part: &Part, count: Option<usize>, took: Duration) {
        if let Some(undoing) = &mut self.undoing {
            undoing.learn(part.range, count, took);
        }
    }

    /// This was claimed under a lease, here or by a settler.
    pub(in crate::relay) fn knows(&mut self, lease: LeaseId, claim: Claim) {
        self.late.saw(claim.sequence);
        if let Some(undoing) = &mut self.undoing {
            undoing.knows(lease, claim);
        }
    }

    /// A settler has claimed a message of this topic, and its destination has no place for it.
    pub(in crate::relay) fn had_no_place(&mut self, topic: &str, to: To) {
        if self.full.insert(topic.to_owned(), to).is_none() {
            self.tell_full();
        }
    }

    /// A step of the walk has looked up to this key (`None`: the last one), and its claim has brought this.
    pub(in crate::relay) fn walked(
        &mut self,
        now: Instant,
        last: Option<Key>,
        picked: Picked,
        batch: &Batch,
        took: Duration,
    ) {
        self.look_at_cut(&picked, batch);
        // Ends where the first of a destination has no room left.
        let last = picked.beyond.into_iter().next().or(last);
        let step = last.map_or(walk::Step::End, walk::Step::At);
        self.walk.learn(now, step, took, picked.has_left);
    }

    /// A step of the walk took too long, and would take as long again: the next round begins when it may.
    pub(in crate::relay) fn walk_was_too_slow(&mut self, now: Instant, took: Duration) {
        self.walk.learn(now, walk::Step::End, took, false);
        self.patrol.want(now);
    }

    /// Keys that were freed were looked at, and the claim has brought this.
    pub(in crate::relay) fn looked_at_keys(&mut self, picked: Picked, batch: &Batch) {
        self.look_at_cut(&picked, batch);
        self.walk.wait_with(picked.waiting);
        self.walk.freed(picked.beyond);
    }

    /// Keys that were freed are to be looked at again.
    pub(in crate::relay) fn look_at_keys_again(&mut self, keys: Vec<Key>) {
        self.walk.freed(keys);
    }

    /// A look at keys that were freed has failed. One of them may be the reason.
    pub(in crate::relay) fn keys_failed(&mut self) {
        self.walk.want_round();
    }

    /// The keys of what a claim has left for its size are looked at again.
    fn look_at_cut(&mut self, picked: &Picked, batch: &Batch) {
        if batch.is_cut {
            let claimed = batch.claimed.iter().map(|one| one.message.sequence.0);
            let claimed: HashSet<i64> = claimed.collect();
            let picked = picked.candidates.iter().zip(&picked.keys);
            let left = picked.filter(|(one, _)| !claimed.contains(&one.sequence));
            self.walk.freed(left.map(|(_, key)| key.clone()));
        }
    }

    /// A look for what was committed late has found this.
    pub(in crate::relay) fn found_late(&mut self, now: Instant, found: Late, took: Duration) {
        if let Some(newest) = found.newest {
            self.late.saw(newest);
        }
        let last = found.free.get(LATE_STEP - 1);
        let upto = last.map(|last| last.sequence);
        // What took longer was this process, which stood still.
        let took = took.min(self.settings.moment);
        if self.late.learn(now, upto, found.writers, took) {
            // Sweeps find the others.
            self.walk.restart();
        }
        self.found_free(now, &found.free);
        let passed = found
            .free
            .iter()
            .filter(|one| self.lanes.has_passed(&one.found()));
        let (keyed, plain): (Vec<&Free>, Vec<&Free>) =
            passed.partition(|one| one.ordering_key.is_some());
        self.returned(Returned::new(
            plain
                .into_iter()
                .map(|one| (one.topic(), one.available_at.0)),
            keyed.into_iter().filter_map(Free::key),
        ));
    }

    /// A look for what was committed late took too long.
    pub(in crate::relay) fn late_was_too_slow(&mut self, now: Instant, took: Duration) {
        self.late.was_too_slow(now, took);
        self.patrol.want(now);
    }

    /// The patrol has found these: streams that no look has found in its time may be among them.
    pub(in crate::relay) fn found_free(&mut self, now: Instant, free: &[Free]) {
        let seen = Seen {
            found: free.iter().map(Free::found).collect(),
            is_all: false,
            slow: Some(self.settings.moment),
        };
        self.take_over(seen, now);
    }

    /// The patrol's claim of messages without a key has brought this.
    pub(in crate::relay) fn claimed_free(&mut self, batch: &Batch) {
        self.look.found_nothing &= batch.claimed.is_empty();
    }

    /// The patrol has read its range up to here. `has_left`: something in it is still to be claimed.
    pub(in crate::relay) fn patrolled(
        &mut self,
        now: Instant,
        upto: i64,
        took: Duration,
        has_left: bool,
    ) {
        self.patrol.read(now, upto, took, has_left);
    }

    /// A range of the patrol took too long.
    pub(in crate::relay) fn range_was_too_wide(
        &mut self,
        now: Instant,
        range: Range,
        took: Duration,
    ) {
        self.patrol.was_too_wide(now, range, took);
    }

    /// What has expired in a stream that no relay serves is claimed up to here; `None`: it has no more.
    pub(in crate::relay) fn expired_upto(
        &mut self,
        now: Instant,
        reached: Option<Position>,
        took: Duration,
    ) {
        self.expiry.learn(now, reached, took);
    }
}
