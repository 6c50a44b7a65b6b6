//! The planner's input: the results of its steps, and reports of other threads.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::contention::OfKeys;
use super::database_clock::Now;
use super::lanes::{Brought, SeenStreams};
use super::search::{Finished, SearchOutcome, WalkAgain};
use super::surveys::{Looks, Streams, Survey, Surveyed};
use super::to::To;
use super::{Awaited, Planner, RoundStage};
use crate::engine::claim::doubt::AtWork;
use crate::engine::claim::sql::claim::{Lane, Topic};
use crate::engine::claim::sql::page::Free;
use crate::engine::claim::sql::search::Ask;
use crate::engine::directory::Roster;
use crate::engine::keys::sql::ordered::Key;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::settle::sql::settle::Released;
use crate::log;
use crate::sql::range::Range;

/// What other threads report to the planner, and what the claimer learns beside its steps.
#[derive(Debug)]
pub(crate) enum Report {
    /// There may be new messages.
    News,
    /// When the members must be read, if this survey leaves them out.
    RowsOwed(Option<Instant>),
    /// Members have changed: lanes may go elsewhere, and waiting messages may be sent.
    Roster(Arc<dyn Roster>),
    /// All topics with messages that no relay serves.
    Unserved(Vec<Topic>),
    /// Messages were released or have become free.
    Returned(Returned),
    /// All leases whose rows are gone while messages still name them.
    Vanished(Vec<i64>),
    /// The message with this sequence was claimed, by the claimer or a settler.
    Claimed(i64),
    /// A settler has claimed a message of this topic, and the queue of its destination has no room.
    NoPlace(String, To),
}

/// Messages that were released or became free. They may be due at index positions that claims have already passed.
#[derive(Debug, Default)]
pub(crate) struct Returned {
    /// For messages without an ordering key: the earliest time from which a message of the topic can be claimed.
    pub(crate) topics: HashMap<Topic, i64>,
    pub(crate) keys: HashSet<Key>,
}

impl Returned {
    pub(crate) fn new(
        topics: impl Iterator<Item = (Topic, i64)>,
        keys: impl Iterator<Item = Key>,
    ) -> Self {
        let mut returned = Self {
            keys: keys.collect(),
            ..Self::default()
        };
        for (topic, available_at) in topics {
            let first = returned.topics.entry(topic).or_insert(available_at);
            *first = available_at.min(*first);
        }
        returned
    }
}

impl Planner<'_> {
    /// A wait has ended. `is_rung`: a notification ended it early.
    pub(crate) fn waited(
        &mut self,
        now: Instant,
        what: Awaited,
        is_rung: bool,
        is_nothing_in_flight: bool,
    ) {
        let must_survey = match what {
            Awaited::Time => return,
            // A query for streams is owed, and nothing else announces its time.
            Awaited::Room => self.surveys.looks.owed_at().is_some_and(|at| now >= at),
            Awaited::Turn | Awaited::Work | Awaited::WorkOrRoom => !is_rung,
        };
        if must_survey {
            self.surveys.want();
        }
        self.begin_look(now, is_nothing_in_flight);
    }

    /// A step has failed. The next connection may be to another server, so a new survey is due.
    pub(crate) fn failed(&mut self) {
        if self.stage == RoundStage::Claim {
            // The result of a survey is lost: the next one queries all streams, however long that takes.
            self.surveys.looks = Looks::default();
        }
        self.surveys.want();
        self.stage = RoundStage::Undo;
    }

    /// Takes in what other threads report, and what the claimer learns beside its steps.
    pub(crate) fn hear(&mut self, report: Report) {
        match report {
            Report::News => self.surveys.hear(),
            Report::RowsOwed(at) => self.surveys.rows_owed = at,
            Report::Roster(roster) => {
                self.directory.roster = roster;
                let directory = &self.directory;
                if self.lanes.go_elsewhere(|topic| directory.roster.way(topic)) {
                    self.searches.walk.restart();
                }
            }
            Report::Unserved(mut topics) => {
                topics.retain(|topic| self.directory.roster.way(topic) == To::Nowhere);
                self.searches.unserved.topics = topics;
            }
            Report::Returned(Returned { topics, keys }) => {
                let (roster, looked) = (&self.directory.roster, self.look.began);
                (self.lanes).go_back(&topics, |topic| roster.way(topic), looked);
                self.searches.free(keys);
            }
            Report::Vanished(leases) => {
                if self.leases.learn_vanished(leases) {
                    // Their messages may be anywhere.
                    self.lanes.forget_places();
                    self.searches.walk.restart();
                    self.surveys.want();
                }
            }
            Report::Claimed(sequence) => {
                self.searches.late.saw(sequence);
            }
            Report::NoPlace(topic, to) => {
                self.has_policy |= self.full.insert(topic, to).is_none();
            }
        }
    }

    /// Takes in the result of a survey. `held`: the leases whose messages are still in flight in this process. Begins a
    /// new look, unless the current look has found nothing yet. Returns `true` if new topics were found that this relay
    /// does not serve.
    pub(crate) fn surveyed(
        &mut self,
        now: Instant,
        survey: Survey,
        found: Surveyed,
        held: &HashSet<LeaseId>,
    ) -> bool {
        let began = survey.look.began;
        let is_cut = !matches!(survey.streams, Streams::Behind(_)) && found.streams.is_none();
        let looks = &mut self.surveys.looks;
        let seen = looks.learn(now, &survey.streams, found.streams, found.took);
        if is_cut {
            self.searches.patrol.want(now);
        }
        // `now` is after the answer, so the estimate is never ahead of the database.
        self.clock = Some(Now {
            here: now,
            database: found.time,
        });
        if found.is_active && !self.is_active {
            self.lanes.forget_places();
            self.searches.late.restart();
        }
        self.is_active = found.is_active;
        let has_ended = self
            .leases
            .learn(found.ended, |lease| held.contains(&lease));
        if has_ended {
            self.lanes.forget_places();
            self.searches.walk.restart();
        }
        let has_new_nowhere = self.take_over(seen, now);
        self.has_policy = true;
        let was_wanted = self.surveys.end(began, now, self.timing.poll_interval);
        // A look over many lanes may take longer than the survey interval. If the look has found nothing yet, it
        // continues: otherwise it would never end. A newly expired lease begins a new look: its messages may be in any
        // lane.
        if was_wanted || !self.look.found_nothing || has_ended {
            self.lanes.begin_look();
            self.look = survey.look;
        }
        has_new_nowhere
    }

    pub(super) fn take_over(&mut self, seen: SeenStreams, now: Instant) -> bool {
        let (now, roster) = (self.now(now), &self.directory.roster);
        (self.lanes).take_over(seen, |topic| roster.way(topic), now)
    }

    /// Whether another server has answered a survey than the survey before. A promoted standby may lack the last
    /// settles: then the lease still holds messages that this process has forgotten.
    pub(crate) fn is_other_server(&mut self, server: i64) -> bool {
        let before = self.surveys.server.replace(server);
        let is_other = before.is_some_and(|before| before != server);
        if is_other {
            self.searches.late.restart();
        }
        is_other
    }

    /// Takes in whether a claim without an answer may still be running. It has taken no message after `newest`.
    pub(crate) fn looked(&mut self, now: Instant, at_work: AtWork, newest: i64) {
        if let Some(undoing) = &mut self.undoing {
            undoing.looked(now, at_work, newest);
        }
    }

    /// The release of a part waits for settlers that continue keys.
    pub(crate) fn undo_is_put_off(&mut self, now: Instant) {
        if let Some(undoing) = &mut self.undoing {
            undoing.is_put_off(now);
        }
    }

    /// Messages of a range were released; `None`: the statement took too long.
    pub(crate) fn undone(
        &mut self,
        now: Instant,
        range: Range,
        released: Option<Released>,
        took: Duration,
    ) {
        let undoing = self.undoing.as_mut();
        if undoing.is_some_and(|one| one.learn(now, range, released, took)) {
            self.look_everywhere();
        }
    }

    /// Takes in what a claim from lanes has brought.
    pub(crate) fn claimed(&mut self, now: Instant, asked: &[Lane], brought: &Brought<'_>) {
        self.count(now, brought.batch.claimed.len(), brought.of_keys);
        if !brought.of_keys.is_beaten() {
            self.lanes.learn(asked, brought, self.now(now));
        }
    }

    /// A claim from lanes took too long and was cancelled. Searches may take too long, too.
    pub(crate) fn claim_was_too_slow(&mut self, now: Instant, asked: &[Lane], took: Duration) {
        log::warn!(event = "claim_slow", lanes = asked.len(), seconds = took.as_secs_f64(); "a claim took {:.1} s and was cancelled: an old transaction may keep settled messages in the index. Searching in smaller steps", took.as_secs_f64());
        self.searches.patrol.want(now);
        self.lanes.were_too_slow(asked, took, self.now(now));
    }

    /// Takes in the outcome of a search.
    pub(crate) fn searched(&mut self, mut finished: Finished) {
        let now = finished.last.ended;
        match &finished.outcome {
            SearchOutcome::Done(done) => {
                self.count(now, done.claims.claimed.len(), done.claims.of_keys);
                self.searches.free(done.left_out());
            }
            SearchOutcome::TooSlow => self.searches.patrol.want(now),
            SearchOutcome::Failed => {}
        }
        if matches!(finished.ask, Ask::Late(_)) {
            // The query of late messages cannot have taken longer: this process stood still.
            finished.last.took = finished.last.took.min(self.timing.moment);
            if let SearchOutcome::Done(done) = &finished.outcome {
                // Those that claims have passed are found again in their lanes or by their keys.
                let found = done.page.found.iter();
                let passed = found.filter(|one| self.lanes.has_passed(&one.found()));
                let (keyed, plain): (Vec<&Free>, Vec<&Free>) =
                    passed.partition(|one| one.ordering_key.is_some());
                let topics = plain.iter().map(|one| (one.topic(), one.available_at.0));
                let keys = keyed.iter().filter_map(|one| one.key());
                self.hear(Report::Returned(Returned::new(topics, keys)));
            }
        }
        match self.searches.learn(finished) {
            Some(WalkAgain::Now) => self.searches.walk.restart(),
            Some(WalkAgain::Soon) => self.searches.walk.want_round(),
            None => {}
        }
    }

    /// A claim has taken this many messages.
    fn count(&mut self, now: Instant, claimed: usize, of_keys: OfKeys) {
        self.look.found_nothing &= claimed == 0 && !of_keys.is_beaten();
        self.contention.learn(now, of_keys);
    }
}
