//! The planner decides the next step of the claim thread.
//!
//! It decides where to search for due messages, how many to claim, when to survey, and how long to wait. Where a
//! claimed message goes is decided elsewhere (`engine/claim/fate.rs`).
//!
//! # Inputs and output
//!
//! The planner has no thread, lock, connection or clock. It decides from three inputs:
//!
//! * the time, which is a parameter;
//! * the [`View`]: the lease, the room and the gate of each destination, and the state of the messages in flight;
//! * the results of earlier steps and the reports of other threads (the methods in `reports`).
//!
//! The output is one [`Step`]. The claimer executes the step, reports its result, and asks for the next step. So a
//! unit test can put the planner into any state, and the same inputs always lead to the same steps.
//!
//! # Words
//!
//! * A **stream** is all messages of one topic and destination, either with or without an ordering key.
//! * A **lane** is a stream with its floor. The database index orders a stream by due time, then by sequence.
//! * The **floor** of a lane is the index position after which its next claim starts. A claim raises the floor to the
//!   position it reached, and a message that this relay releases lowers it. So a claim does not read the index entries
//!   of settled messages again: an old snapshot may keep these entries for hours.
//! * A **sweep** is a claim from the start of a lane. It finds messages below the floor that another relay released,
//!   or left when it crashed.
//! * A **late** message was committed after the floor had passed its position. A query of the newest sequences finds
//!   it sooner than a sweep.
//! * The **walk** goes over all ordering keys, for the first message of each. A **freed** key is a key whose first
//!   message may have become free; it is queried by name, without a walk.
//! * The **patrol** goes over the whole outbox in ranges of sequences. It runs only after a query or claim has taken
//!   too long.
//! * A **survey** is the periodic query for the streams that exist, expired leases and pauses. It also reports whether
//!   this relay is active or stands by.
//! * A **look** starts with a survey and ends when every lane was found empty. A look that finds nothing answers the
//!   question whether anything is due.
//! * **Room** is the number of messages that a destination can take now.
//! * Work is **owed** if this look had to skip it until some time. No notification announces that work, so the planner
//!   wakes up for it.
//!
//! # A round
//!
//! [`Planner::next`] goes through these stages, one step a call:
//!
//! 1. After a claim without an answer, find out whether the claim is still running, and release the messages it took
//!    that this process does not know, one part a round ([`Step::Undo`]). The round continues: nothing else waits for it.
//! 2. Exchange news between the gates and the pause table ([`Step::Gates`]).
//! 3. Survey, if a survey is due ([`Step::Survey`]). After news, the known lanes are asked first if a survey was made a
//!    moment ago.
//! 4. Claim once. The searches come first ([`Step::Search`]), in the order of [`search`], and the lanes last
//!    ([`Step::Claim`]). Freed keys, the patrol and the walk take only every other turn while others have work. While
//!    another relay claims keyed messages, freed keys, the walk and the keyed lanes wait.
//!
//! A relay that stands by, or has reached its limit of claims, does not claim. If the planner finds nothing to claim,
//! [`Planner::look_again`] decides what to wait for: room, or work.

mod contention;
mod database_clock;
mod directory;
mod freed;
pub(super) mod kept_back;
mod lanes;
mod late;
mod leases;
pub(crate) mod pace;
mod patrol;
mod picks;
mod ranges;
mod reports;
pub(crate) mod room;
mod rounds;
mod search;
mod searches;
mod surveys;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod to;
mod undoing;
mod unserved;
mod view;
mod walk;
pub(super) mod wanted;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use self::contention::OfKeys;
pub(crate) use self::lanes::Brought;
pub(crate) use self::picks::Claims;
pub(super) use self::picks::Picked;
pub(crate) use self::reports::Report;
pub(super) use self::reports::Returned;
pub(crate) use self::search::{Finished, FoundMessages, SearchOutcome};
pub(super) use self::surveys::Survey;
pub(crate) use self::surveys::{Streams, Surveyed};
pub(crate) use self::view::{Door, Timing, View};

use self::contention::Contention;
use self::database_clock::Now;
use self::directory::PlanDirectory;
use self::lanes::Lanes;
use self::leases::Leases;
use self::search::SearchPass;
use self::searches::Searches;
use self::surveys::{SurveyLook, Surveys};
use self::to::{Group, To};
use self::undoing::Undoing;
use super::claim::doubt::Doubt;
use super::claim::sql::claim::Lane;
use super::claim::sql::search::Ask;
use super::directory::Roster;
use super::lease::sql::lease::LeaseId;
use crate::sql::range::Range;

/// A relay without a lease checks this often for one.
const LEASE_INTERVAL: Duration = Duration::from_millis(100);
/// The longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// The claimer's next step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Ask the planner again.
    Again,
    Wait(Wait),
    /// No lane with room has work. Ask the senders to ring for room, then call [`look_again`](Planner::look_again):
    /// a sender that made room before did not ring.
    LookAgain,
    /// After a claim without an answer.
    Undo(Undo),
    /// Record the gates' news in the pause table, and open the gates whose pause has expired. A relay that stands by
    /// has no messages to probe a destination with, so it leaves probes to the active relay.
    Gates {
        may_probe: bool,
    },
    Survey(Survey),
    /// The lease has expired: other relays may take over its messages.
    LoseLease(LeaseId),
    /// Claim those of the messages that a search finds which the planner picks.
    Search(Ask),
    /// Claim at most `room` messages of these lanes.
    Claim {
        plain: Vec<Lane>,
        keyed: Vec<Lane>,
        room: usize,
    },
}

/// What to do after a claim without an answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Undo {
    /// Find out whether the claim may still be running.
    Look(Doubt),
    /// Release the messages in this range that the lease holds and that this process does not know.
    Part(Range),
    /// Nothing about this lease is in doubt any more. `released`: the number of released messages.
    End {
        doubt: Doubt,
        released: Option<usize>,
    },
}

/// A wait: for what, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) what: Awaited,
    pub(crate) until: Instant,
    /// Whether the next poll is due then; otherwise work that was left out until then.
    pub(super) is_poll: bool,
    /// The question that this wait answers: nothing is due.
    pub(super) answers: Option<u64>,
}

impl Wait {
    /// A wait for a time, after which the look continues.
    pub(super) fn until(until: Instant) -> Self {
        Self {
            what: Awaited::Time,
            until,
            is_poll: false,
            answers: None,
        }
    }
}

/// The subject of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// Only its end. This relay is disabled or has no lease, or another relay is claiming keyed messages.
    Time,
    /// The end of the active relay: this relay stands by.
    Turn,
    /// Room in a queue.
    Room,
    /// Messages that are due and can be sent.
    Work,
    /// The same, or room at a member. Some of these destinations never have room, and new messages must
    /// not wait for them.
    WorkOrRoom,
}

impl Awaited {
    /// Whether room ends the wait.
    pub(super) fn is_room(self) -> bool {
        matches!(self, Self::Room | Self::WorkOrRoom)
    }
}

/// The stage of a round. Every round reaches its claim, whatever is reported meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RoundStage {
    Undo,
    Gates,
    Survey,
    Claim,
}

/// The facts that other threads need from the planner.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Policy {
    /// Topics that this relay does not serve.
    pub(crate) not_taken: Vec<String>,
    /// Topics whose destinations have no room for the next message of a settled key.
    pub(super) full: Vec<String>,
    /// Whether some keyed messages name a destination: then one key has a separate order for each destination.
    pub(super) has_parts: bool,
}

/// Knows the state of the outbox, and decides the next step.
#[derive(Debug)]
pub(crate) struct Planner<'a> {
    timing: Timing,
    pub(super) directory: PlanDirectory<'a>,
    /// The lease under which the last step is executed.
    pub(super) lease: LeaseId,
    stage: RoundStage,
    lanes: Lanes,
    searches: Searches,
    /// The back-off from keyed claims of other relays.
    contention: Contention,
    /// The release of messages that a claim without an answer took.
    undoing: Option<Undoing>,
    /// The time of the last survey.
    clock: Option<Now>,
    /// Whether this relay is active; otherwise it stands by.
    pub(super) is_active: bool,
    leases: Leases,
    surveys: Surveys,
    look: SurveyLook,
    /// Topics of keyed messages that the settlers claimed and that found no place in a queue, with their ways.
    full: HashMap<String, To>,
    /// Whether the policy may have changed since it was taken.
    has_policy: bool,
}

impl<'a> Planner<'a> {
    pub(crate) fn new(
        now: Instant,
        timing: Timing,
        roster: Arc<dyn Roster>,
        destinations: Vec<&'a str>,
    ) -> Self {
        Self {
            timing,
            directory: PlanDirectory {
                roster,
                names: destinations,
            },
            lease: LeaseId(0),
            stage: RoundStage::Undo,
            lanes: Lanes::default(),
            searches: Searches::default(),
            contention: Contention::default(),
            undoing: None,
            clock: None,
            is_active: true,
            leases: Leases::default(),
            surveys: Surveys::default(),
            look: SurveyLook {
                found_nothing: false,
                ..SurveyLook::new(now, 0, false)
            },
            full: HashMap::new(),
            has_policy: false,
        }
    }

    /// Expired leases of other relays, whose messages may be taken over.
    pub(super) fn expired(&self) -> &[i64] {
        &self.leases.expired
    }

    /// The destinations that messages of known streams name.
    pub(super) fn destinations(&self) -> impl Iterator<Item = &str> {
        self.lanes.destinations()
    }

    /// The policy, if it may have changed since the last call.
    pub(super) fn take_policy(&mut self) -> Option<Policy> {
        std::mem::take(&mut self.has_policy).then(|| Policy {
            not_taken: self.lanes.nowhere().collect(),
            full: self.full.keys().cloned().collect(),
            has_parts: self.lanes.has_keyed_parts(),
        })
    }

    /// Decides the next step.
    pub(crate) fn next(&mut self, now: Instant, view: &View) -> Step {
        if self.contention.take_beaten() {
            return Step::Wait(Wait::until(now + self.contention.left(now)));
        }
        let poll = self.next_poll(now);
        if !self.timing.is_enabled {
            let answers = Some(view.custody.question);
            return Step::Wait(Wait {
                answers,
                ..Wait::until(poll)
            });
        }
        let Some(lease) = view.lease else {
            return Step::Wait(Wait::until(poll.min(now + LEASE_INTERVAL)));
        };
        if lease != self.lease {
            // The database has refused statements under the previous lease since that lease expired.
            self.surveys.want();
            self.stage = RoundStage::Undo;
            self.lease = lease;
        }
        self.prepare(now, lease, view).unwrap_or_else(|| {
            self.stage = RoundStage::Undo;
            self.claim(now, lease, view)
        })
    }

    /// The steps before a claim. A round undoes one part, so claims continue during an undo.
    fn prepare(&mut self, now: Instant, lease: LeaseId, view: &View) -> Option<Step> {
        if self.stage == RoundStage::Undo {
            self.stage = RoundStage::Gates;
            if let Some(undo) = self.undo(now, lease, view.custody.doubt.clone()) {
                return Some(Step::Undo(undo));
            }
        }
        if self.stage == RoundStage::Gates {
            self.stage = RoundStage::Survey;
            let may_probe = self.is_active;
            return Some(Step::Gates { may_probe });
        }
        if self.stage == RoundStage::Claim {
            return None;
        }
        self.stage = RoundStage::Claim;
        if !self.surveys.is_due(now, view.custody.is_asked) {
            if self.surveys.take_news() {
                self.begin_look(now, view.custody.is_nothing_in_flight);
            }
            return None;
        }
        let (lanes, moment) = (&self.lanes, self.timing.moment);
        let newest = self.searches.late.before_newest();
        let (looks, custody) = (&mut self.surveys.looks, &view.custody);
        let streams = looks.next(now, || lanes.streams(), custody.is_asked, newest, moment);
        let look = SurveyLook::new(now, custody.question, custody.is_nothing_in_flight);
        Some(Step::Survey(Survey { streams, look }))
    }

    /// The next step of the undo of a claim without an answer, if one is due. The lease may hold messages that this
    /// process does not know, beside those that it knows.
    pub(super) fn undo(
        &mut self,
        now: Instant,
        lease: LeaseId,
        doubt: Option<Doubt>,
    ) -> Option<Undo> {
        let doubt = doubt?;
        if doubt.lease != lease {
            // The lease has expired: its messages are taken over.
            self.undoing = None;
            let released = None;
            return Some(Undo::End { doubt, released });
        }
        let before = self.undoing.take();
        let undoing = match before {
            Some(undoing) if undoing.doubt == doubt => undoing,
            before => Undoing::new(now, doubt, before),
        };
        let step = undoing.next(now);
        match step {
            Some(Undo::End { .. }) => self.look_everywhere(),
            _ => self.undoing = Some(undoing),
        }
        step
    }

    /// Free messages may be anywhere.
    fn look_everywhere(&mut self) {
        self.lanes.forget_places();
        self.searches.walk.restart();
        self.surveys.want();
    }

    /// Returns one claim, or a wait if this relay must not claim.
    fn claim(&mut self, now: Instant, lease: LeaseId, view: &View) -> Step {
        if self.leases.has_ended(lease) {
            // Other relays may take over its messages.
            return Step::LoseLease(lease);
        }
        if !self.is_active {
            return self.wait_for(now, Awaited::Turn, view, None);
        }
        if self.lanes.keep_back(&view.custody.kept_back) {
            // The walk has skipped the keys that were kept back.
            self.searches.walk.restart();
        }
        if view.left_to_claim == Some(0) {
            let answers = view
                .custody
                .is_nothing_in_flight
                .then_some(self.look.question);
            return self.wait_for(now, Awaited::Work, view, answers);
        }
        if self.has_keys_left(|to| view.is_open(to)) && self.searches.walk.is_glance_due(now) {
            self.lanes.ask_again();
        }
        self.searches
            .freed
            .wait_has_ended(|to| view.room_of(to) > 0);
        self.open_full(view);
        self.claim_where_room_is(now, view)
    }

    fn claim_where_room_is(&mut self, now: Instant, view: &View) -> Step {
        let mut asked = self.allot(now, view);
        let has_keyed = self.lanes.has_keyed(|to| view.room_of(to) > 0);
        let rest = self.contention.left(now);
        let is_resting = has_keyed && !rest.is_zero();
        if is_resting {
            asked.retain(|lane| !lane.stream.is_keyed);
        }
        let pass = SearchPass {
            is_idle: asked.is_empty(),
            ..self.pass(now, view, has_keyed && !is_resting)
        };
        if let Some(ask) = self.searches.ask(&pass) {
            return Step::Search(ask);
        }
        self.lanes.end_turn();
        if asked.is_empty() {
            return match is_resting {
                true => Step::Wait(Wait::until(now + rest)),
                false => Step::LookAgain,
            };
        }
        let is_keyed = |lane: &Lane| lane.stream.is_keyed;
        let (keyed, plain) = asked.into_iter().partition(is_keyed);
        let room = view.left_to_claim.unwrap_or(usize::MAX);
        Step::Claim { plain, keyed, room }
    }

    fn allot(&mut self, now: Instant, view: &View) -> Vec<Lane> {
        let (is_asked, now) = (self.is_asked(view), self.now(now));
        let (room, tenant) = (|group| view.room(group), |to| self.directory.tenant(to));
        self.lanes.allot(now, room, tenant, is_asked)
    }

    /// What the searches see, if no lane has work.
    fn pass(&self, now: Instant, view: &View, has_keyed: bool) -> SearchPass {
        SearchPass {
            now,
            since: self.look.began,
            is_idle: true,
            is_asked: self.is_asked(view),
            has_keyed,
            is_limited: view.left_to_claim.is_some(),
            passed: self.lanes.passed(),
        }
    }

    /// Whether a walk is unfinished, or a freed key has an open destination.
    fn has_keys_left(&self, is_open: impl Fn(To) -> bool) -> bool {
        self.searches.walk.is_in_round() || self.searches.freed.has_some(is_open)
    }

    /// Whether a question is open that this look can answer.
    fn is_asked(&self, view: &View) -> bool {
        view.custody.is_asked && self.look.nothing_in_flight
    }

    /// Decides what to wait for when every lane with room was asked: for room if a lane has none, otherwise for work.
    pub(crate) fn look_again(&mut self, now: Instant, view: &View) -> Step {
        let has_room = |to| view.room_of(to) > 0;
        let is_open = |to| view.is_open(to);
        let asked = self.allot(now, view);
        let freed = &mut self.searches.freed;
        let has_freed = self.lanes.has_keyed(has_room) && freed.has_some(has_room);
        if has_freed || !asked.is_empty() {
            freed.wait_has_ended(has_room);
            return Step::Again;
        }
        let is_left = |is_open: &dyn Fn(To) -> bool| {
            self.lanes.is_anything_left(self.now(now), is_open)
                || (self.has_keys_left(is_open) && self.lanes.has_keyed(is_open))
        };
        let is_member = |to: To| to.group() == Group::Members;
        if view.is_queue_full || is_left(&|to| is_open(to) && !is_member(to)) {
            return self.wait_for(now, Awaited::Room, view, None);
        }
        if is_left(&is_open) {
            return self.wait_for(now, Awaited::WorkOrRoom, view, None);
        }
        if view.has_pause_to_end(now) {
            // A pause has expired since the gates were read: its messages may be sent.
            return Step::Again;
        }
        let pass = self.pass(now, view, self.lanes.has_keyed(is_open));
        let is_all_seen = self.searches.is_done(&pass);
        // A claim under an expired lease returns nothing, whatever is due.
        let has_lease = view.lease == Some(self.lease) && view.may_send;
        let has_nothing = self.look.found_nothing && self.look.nothing_in_flight;
        let is_nothing_due = has_lease && has_nothing && is_all_seen;
        let answers = is_nothing_due.then_some(self.look.question);
        self.wait_for(now, Awaited::Work, view, answers)
    }

    /// Returns a wait. If a step of an undo is due, or after news since the last survey, returns [`Step::Again`] instead.
    /// While something is in doubt, answers no question.
    fn wait_for(&mut self, now: Instant, what: Awaited, view: &View, answers: Option<u64>) -> Step {
        let undo_at = self.undoing.as_ref().map(|undoing| undoing.at);
        if undo_at.is_some_and(|at| now >= at) {
            self.begin_look(now, view.custody.is_nothing_in_flight);
            return Step::Again;
        }
        if self.surveys.is_wanted() {
            return Step::Again;
        }
        let answers = answers.filter(|_| view.custody.doubt.is_none());
        let until = self.next_look(now, view);
        let until = undo_at.map_or(until, |at| at.min(until));
        Step::Wait(Wait {
            what,
            until,
            is_poll: until == self.next_poll(now),
            answers,
        })
    }

    /// When the next look starts: at the end of the poll interval, when a destination opens, or when owed work is due,
    /// whichever is first.
    fn next_look(&self, now: Instant, view: &View) -> Instant {
        let is_open = |to| view.is_open(to);
        let pass = self.pass(now, view, self.lanes.has_keyed(is_open));
        // Only a claim can do this work: without claims it would stay due forever.
        let claims = self.is_active && view.left_to_claim != Some(0);
        let owed = self.searches.again_at(&pass).into_iter();
        let owed = owed
            .chain(self.lanes.owed_at(self.look.began, is_open))
            .filter(|_| claims);
        view.opens_at()
            .filter(|_| claims)
            .chain(self.surveys.owed_at())
            .chain(owed)
            .fold(self.next_poll(now), Instant::min)
    }

    /// When the outbox is polled next, even without notifications.
    pub(super) fn next_poll(&self, now: Instant) -> Instant {
        now + self.timing.poll_interval.min(LONGEST_WAIT)
    }

    /// Lets the settlers continue the keys of topics that have room again.
    fn open_full(&mut self, view: &View) {
        let count = self.full.len();
        self.full.retain(|_, to| view.room_of(*to) == 0);
        self.has_policy |= self.full.len() < count;
    }

    /// Starts a look: every known lane may have messages again.
    fn begin_look(&mut self, now: Instant, nothing_in_flight: bool) {
        self.lanes.begin_look();
        self.look = SurveyLook::new(now, self.look.question, nothing_in_flight);
    }

    fn now(&self, here: Instant) -> Now {
        Now::new(here, self.clock)
    }
}
