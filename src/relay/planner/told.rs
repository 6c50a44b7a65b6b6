//! The planner's input: the results of its steps, and reports of other threads.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::database_clock::DatabaseClock;
use super::lanes::{Brought, Seen};
use super::search::{Outcome, SearchKind};
use super::surveys::{Looks, Streams, Survey, Surveyed};
use super::undoing::{Part, Undoing};
use super::{
    Awaited, NEWS_SHARE, News, Planner, Policy, SHORTEST_SURVEY_INTERVAL, SURVEY_INTERVAL, Stage,
};
use crate::relay::registered::Registry;
use crate::relay::to::To;
use crate::relay::told::Returned;
use crate::store::relay::claim::{Batch, Lane, Topic};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::patrol::Free;
use crate::store::relay::search::Ask;
use crate::store::relay::settle::Claim;

impl Planner<'_> {
    /// A wait has ended. `is_rung`: a notification ended it early.
    pub(in crate::relay) fn waited(
        &mut self,
        now: Instant,
        what: Awaited,
        is_rung: bool,
        is_nothing_in_flight: bool,
    ) {
        match what {
            Awaited::Nothing | Awaited::Lease | Awaited::OthersClaim | Awaited::Settles => return,
            // A query for streams is owed, and nothing else announces its time.
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

    /// A step has failed. The next connection may be to another server, so a new survey is due.
    pub(in crate::relay) fn failed(&mut self) {
        self.surveyed = None;
        self.stage = Stage::Undo;
    }

    /// There may be new messages.
    pub(in crate::relay) fn has_news(&mut self) {
        self.news = News::Heard;
    }

    /// When the rows of registered destinations must be checked, if this survey leaves them out.
    pub(in crate::relay) fn look_at_rows_at(&mut self, at: Option<Instant>) {
        self.rows_owed = at;
    }

    /// Messages were released or have become free.
    pub(in crate::relay) fn returned(&mut self, Returned { topics, keys }: Returned) {
        self.lanes.go_back(&topics);
        self.searches.free(keys);
    }

    /// Gets the unserved topics when a round over them is due.
    pub(in crate::relay) fn look_at_unserved(
        &mut self,
        now: Instant,
        unserved: impl FnOnce() -> Vec<Topic>,
    ) {
        if self.searches.unserved.wants_a_round(now) {
            let is_nowhere = |topic: &Topic| self.way(topic) == To::Nowhere;
            let topics = unserved().into_iter().filter(is_nowhere).collect();
            let moment = self.settings.poll_interval;
            self.searches.unserved.begin(now, topics, moment);
        }
    }

    /// Takes in the result of a survey. Begins a new look, unless the current look has found nothing yet. Returns
    /// `true` if new topics were found that this relay does not serve.
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
            self.searches.patrol.want(now);
        }
        // `now` is after the answer, so the estimate is never ahead of the database.
        self.clock = DatabaseClock::new(time, now);
        if is_active && !self.is_active {
            self.lanes.forget_places();
            self.searches.late.restart();
        }
        self.is_active = is_active;
        let is_first = self.ended.is_none();
        let before = self.ended.take().unwrap_or_default();
        let is_new = |id: &&i64| !before.contains(id);
        let newly_ended: Vec<i64> = ended.iter().filter(is_new).copied().collect();
        // A look over many lanes may take longer than the survey interval. If the look has found nothing yet, it
        // continues: otherwise it would never end. A newly expired lease begins a new look: its messages may be in any
        // lane.
        let is_due = self.surveyed.is_none() || self.news != News::None;
        let is_new_look = is_due || !self.look.found_nothing || !newly_ended.is_empty();
        if !newly_ended.is_empty() {
            self.lanes.forget_places();
            self.searches.walk.restart();
        }
        // Leases that had expired before this relay started are no news.
        for id in newly_ended.iter().filter(|_| !is_first) {
            log::warn!(event = "lease_expired", lease = id; "lease {id} of another relay has expired: taking over its messages");
        }
        self.expire(&ended, &held);
        self.ended = Some(ended);
        let has_new_nowhere = self.take_over(seen, now);
        let kept_back = kept_back.unwrap_or_else(|| self.lanes.kept_back().clone());
        self.policy = Policy {
            paused: kept_back.topics.iter().cloned().collect(),
            not_taken: self.lanes.nowhere().collect(),
            has_parts: self.lanes.has_keyed_parts(),
            full: std::mem::take(&mut self.policy.full),
        };
        self.is_policy_new = true;
        if self.lanes.keep_back(kept_back) {
            // The walk has skipped the keys that were kept back.
            self.searches.walk.restart();
        }
        if is_new_look {
            self.lanes.begin_look();
            self.look = survey.look;
        }
        self.surveyed = Some(now);
        self.news = News::None;
        // If every statement is slow, surveys must not take half of the time.
        let took = now.saturating_duration_since(began);
        let poll = (self.settings.poll_interval).clamp(SHORTEST_SURVEY_INTERVAL, SURVEY_INTERVAL);
        self.survey_interval = poll.max(3 * took).min(SURVEY_INTERVAL);
        self.news_interval = (NEWS_SHARE * took).min(self.survey_interval);
        has_new_nowhere
    }

    pub(super) fn take_over(&mut self, seen: Seen, now: Instant) -> bool {
        let now = self.now(now);
        let way = |topic: &Topic| To::of(self.routes, &self.registry, topic);
        self.lanes.take_over(seen, way, now)
    }

    /// Registered destinations have changed: lanes may go elsewhere, and waiting messages may be sent.
    pub(in crate::relay) fn registered(&mut self, registry: Arc<Registry>) {
        self.registry = registry;
        let way = |topic: &Topic| To::of(self.routes, &self.registry, topic);
        if self.lanes.go_elsewhere(way) {
            self.searches.walk.restart();
        }
    }

    /// Updates the leases to take over from. A lease that this process has lost is left out while its messages are
    /// still to be settled here.
    fn expire(&mut self, ended: &[i64], held: &HashSet<LeaseId>) {
        let is_undone = |id| self.undoing.as_ref().is_some_and(|one| one.is_of(id));
        let is_free = |id: &&i64| !held.contains(&LeaseId(**id)) && !is_undone(LeaseId(**id));
        let over = ended.iter().chain(&self.vanished);
        self.expired = over.filter(is_free).copied().collect();
    }

    /// Records the server that answered a survey. Returns `true` if the server has changed. A promoted standby may lack
    /// the last settles: then the lease still holds messages that this process has forgotten.
    pub(in crate::relay) fn is_other_server(&mut self, server: i64) -> bool {
        let before = self.server.replace(server);
        let is_other = before.is_some_and(|before| before != server);
        if is_other {
            self.searches.late.restart();
        }
        is_other
    }

    /// A survey has failed, and its result is lost: the next survey queries all streams, however long that takes.
    pub(in crate::relay) fn survey_failed(&mut self) {
        self.looks = Looks::default();
    }

    /// Messages name these leases, but the rows of the leases are gone.
    pub(in crate::relay) fn vanished(&mut self, leases: Vec<i64>) {
        if leases.iter().any(|id| !self.vanished.contains(id)) {
            // Their messages may be anywhere. The next survey lets claims take them over.
            self.lanes.forget_places();
            self.searches.walk.restart();
            self.surveyed = None;
        }
        self.vanished = leases;
    }

    /// Takes in the result of a claim from lanes.
    pub(in crate::relay) fn claimed(&mut self, now: Instant, brought: &Brought<'_>) {
        self.look.found_nothing &= brought.batch.claimed.is_empty();
        self.lanes.learn(brought, self.now(now));
    }

    /// A claim from these lanes took too long: their floors skip the dead entries, and the patrol searches the rest.
    pub(in crate::relay) fn was_too_slow(&mut self, now: Instant, asked: &[Lane], took: Duration) {
        log::warn!(event = "claim_slow", lanes = asked.len(), seconds = took.as_secs_f64(); "a claim took {:.1} s and was cancelled: an old transaction may keep settled messages in the index. Searching in smaller steps", took.as_secs_f64());
        self.lanes.were_too_slow(asked, took, self.now(now));
        self.searches.patrol.want(now);
    }

    /// A keyed claim has ended; `None`: another relay's claim blocked it. `random` is from 0 to 1.
    pub(in crate::relay) fn contended(&mut self, now: Instant, random: f64, batch: Option<&Batch>) {
        match batch {
            Some(_) => self.contention.won(),
            None => self.contention.lost(now, random),
        }
        self.look.found_nothing &= batch.is_some_and(|batch| batch.claimed.is_empty());
    }

    /// Another relay's claim blocked a claim of lanes: it is repeated a little later.
    pub(in crate::relay) fn was_beaten(&mut self) {
        self.is_beaten = true;
    }

    /// A claim had no answer. Its messages may be in ranges that the undo has already passed.
    pub(in crate::relay) fn lost_answer(&mut self) {
        self.undoing = None;
    }

    /// Every known message is settled: all other messages of the lease, except those in `aside`, are released.
    pub(in crate::relay) fn begin_undo(&mut self, lease: LeaseId, aside: Vec<Claim>) {
        self.undoing = Some(Undoing::new(lease, aside));
    }

    /// `count` messages of a part were released; `None`: the statement took too long.
    pub(in crate::relay) fn undone(&mut self, part: &Part, count: Option<usize>, took: Duration) {
        if let Some(undoing) = &mut self.undoing {
            undoing.learn(part.range, count, took);
        }
    }

    /// A message was claimed under a lease, by the claimer or a settler.
    pub(in crate::relay) fn knows(&mut self, lease: LeaseId, claim: Claim) {
        self.searches.late.saw(claim.sequence);
        if let Some(undoing) = &mut self.undoing {
            undoing.knows(lease, claim);
        }
    }

    /// A settler has claimed a message of this topic, and the queue of its destination has no room.
    pub(in crate::relay) fn had_no_place(&mut self, topic: &str, to: To) {
        if self.full.insert(topic.to_owned(), to).is_none() {
            self.tell_full();
        }
    }

    /// Takes in the outcome of a search.
    pub(in crate::relay) fn searched(
        &mut self,
        now: Instant,
        (by, ask): (SearchKind, Ask),
        outcome: Outcome,
        took: Duration,
    ) {
        if let Outcome::Done { claims, .. } = &outcome {
            self.look.found_nothing &= claims.claimed.is_empty() && !claims.is_beaten;
            // The search is repeated a little later.
            self.is_beaten = claims.is_beaten;
        }
        // The query of late messages cannot have taken longer: this process stood still.
        let took = match by {
            SearchKind::Late => took.min(self.settings.moment),
            _ => took,
        };
        let hints = self.searches.learn(now, (by, ask), outcome, took);
        if hints.wants_patrol {
            self.searches.patrol.want(now);
        }
        if hints.restarts_walk {
            self.searches.walk.restart();
        }
        if hints.wants_walk {
            self.searches.walk.want_round();
        }
        self.searches.free(hints.freed);
        let mut passed = hints.free;
        passed.retain(|one| self.lanes.has_passed(&one.found()));
        let (keyed, plain): (Vec<Free>, Vec<Free>) =
            (passed.into_iter()).partition(|one| one.ordering_key.is_some());
        self.returned(Returned::new(
            plain.iter().map(|one| (one.topic(), one.available_at.0)),
            keyed.iter().filter_map(Free::key),
        ));
    }
}
