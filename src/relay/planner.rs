//! The planner: it knows what the claimer knows, and decides what is done next.
//!
//! It has no thread, no lock, no connection and no clock. The claimer tells it the time, how others stand
//! ([`View`]) and what its statements have found; the planner says one [`Step`] at a time. So a test can put it
//! into any state, and the same answers always lead to the same steps.

mod contention;
mod database_clock;
mod expiry;
mod kept_back;
mod lanes;
mod late;
mod patrol;
mod picks;
mod ranges;
mod rounds;
mod surveys;
#[cfg(test)]
pub(super) mod tests;
mod told;
mod undoing;
mod view;
mod walk;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) use self::kept_back::KeptBack;
pub(super) use self::lanes::{Brought, MOST_LANES};
pub(super) use self::late::STEP as LATE_STEP;
pub(super) use self::patrol::STEP as PATROL_STEP;
pub(super) use self::surveys::{Streams, Survey, Surveyed};
pub(super) use self::undoing::Part;
pub(super) use self::view::{Door, Settings, View};
pub(super) use self::walk::STEP as WALK_STEP;

use self::contention::Contention;
use self::database_clock::DatabaseClock;
use self::expiry::Expiry;
use self::lanes::{Lanes, Now};
use self::late::Late;
use self::patrol::Patrol;
use self::surveys::{Look, Looks};
use self::undoing::Undoing;
use self::walk::Walk;
use super::doubt::Doubt;
use super::registered::Registry;
use super::to::To;
use crate::routes::Routes;
use crate::store::range::Range;
use crate::store::relay::claim::{Lane, Position, Stream};
use crate::store::relay::late::LookForLate;
use crate::store::relay::lease::LeaseId;
use crate::store::relay::ordered::Key;

/// How often, at least, topics and expired leases are looked for; as often as the outbox is polled, between these.
const SURVEY_INTERVAL: Duration = Duration::from_secs(1);
const SHORTEST_SURVEY_INTERVAL: Duration = Duration::from_millis(100);
/// How often, at least, lanes are asked while a walk over many keys goes on: nobody rings a relay that is
/// awake.
const GLANCE: Duration = Duration::from_millis(20);
/// A relay without a lease looks this often whether it has one.
const LEASE_INTERVAL: Duration = Duration::from_millis(100);
/// Nobody waits for longer.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// What is done next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The planner is asked again.
    Again,
    Wait(Wait),
    /// Nothing is to be asked. The senders are told to ring for room, and then
    /// [`look_again`](Planner::look_again) says what to wait for: one that made room before did not ring.
    LookAgain,
    /// Whether a claim without an answer is at work still is found out, when everything known is settled.
    Resolve(Doubt),
    /// Nothing about this lease is in doubt any more. `given_back`: so many messages were.
    EndDoubt {
        lease: LeaseId,
        given_back: Option<usize>,
    },
    /// A part of what a lease holds and nobody knows of is given back.
    Undo(Part),
    /// The table hears what the gates have seen, and those open whose time is over. A relay that stands by has
    /// nothing to probe a destination with, and leaves that to the one that works.
    Gates {
        may_probe: bool,
    },
    Survey(Survey),
    /// The lease is over: others may take what it holds.
    LoseLease(LeaseId),
    /// Messages of a stream that no relay serves, and whose time is over, are claimed: they die.
    ExpireUnserved {
        stream: Stream,
        after: Position,
    },
    /// What was committed after claims had passed its place.
    LookForLate(LookForLate),
    /// Messages of these lanes, `room` of them at most.
    Claim {
        plain: Vec<Lane>,
        keyed: Vec<Lane>,
        room: usize,
    },
    /// The first messages of these keys.
    Keys(Vec<Key>),
    /// The first messages of the keys behind this one.
    Walk(Key),
    /// What is free in this range.
    Patrol(Range),
}

impl Step {
    /// Whether a sender is to ring when it makes room.
    pub(super) fn waits_for_room(&self) -> bool {
        matches!(self, Self::Wait(wait) if wait.what == Awaited::Room || wait.or_room)
    }
}

/// How long nothing is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wait {
    pub(super) what: Awaited,
    pub(super) until: Instant,
    /// Until the poll interval is over, and not only until something is owed.
    pub(super) is_poll: bool,
    /// Until a registered destination has room, too. Some always have none, and new messages do not wait for these.
    pub(super) or_room: bool,
    /// Nothing is due: the answer to this question.
    pub(super) answers: Option<u64>,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    /// This relay is not to work.
    Nothing,
    Lease,
    /// Another relay's keyed claim.
    OthersClaim,
    /// The end of another relay, which does the work.
    Turn,
    /// That everything known is settled.
    Settles,
    /// A place in some queue.
    Room,
    /// Nothing is due that can be sent.
    Work,
}

/// Where a round is. Whatever is heard meanwhile, it comes to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Undo,
    Gates,
    Survey,
    Claim,
}

/// What the claimer tells others of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Policy {
    /// Topics that an operator has paused.
    pub(super) paused: Vec<String>,
    /// Topics that this relay does not take.
    pub(super) not_taken: Vec<String>,
    /// Topics whose destinations have no room for what follows a settled message.
    pub(super) full: Vec<String>,
    /// Some keyed messages name a destination: then those of one key are several orders.
    pub(super) has_parts: bool,
}

impl Policy {
    /// Topics of which nothing is to be claimed.
    pub(super) fn closed(&self) -> impl Iterator<Item = &String> {
        self.paused.iter().chain(&self.not_taken)
    }
}

/// What is known of the outbox, and what is done next.
#[derive(Debug)]
pub(super) struct Planner<'a> {
    settings: Settings,
    routes: &'a Routes,
    registry: Arc<Registry>,
    /// The names of the bulkheads.
    destinations: Vec<&'a str>,
    /// Under which the last step is done.
    lease: LeaseId,
    stage: Stage,
    /// Another relay's claim was in the way of the last one.
    is_beaten: bool,
    lanes: Lanes,
    walk: Walk,
    /// How keyed claims of other relays keep this one's waiting.
    contention: Contention,
    late: Late,
    patrol: Patrol,
    expiry: Expiry,
    /// What a claim without an answer took is given back.
    undoing: Option<Undoing>,
    /// The walk's turn comes after each claim of lanes.
    is_walks_turn: bool,
    /// When the lanes were last opened in the middle of a walk.
    glanced: Instant,
    clock: DatabaseClock,
    /// That of the last survey.
    server: Option<i64>,
    /// No other relay has to do the work.
    is_active: bool,
    /// Leases that have ended, as the last survey has seen them; `None` before the first one.
    ended: Option<Vec<i64>>,
    /// Leases of others whose messages may be taken.
    expired: Vec<i64>,
    /// Leases whose rows are gone while messages name them.
    vanished: Vec<i64>,
    /// When the last survey was made. `None`: there is to be one.
    surveyed: Option<Instant>,
    /// How soon the next one may be.
    survey_interval: Duration,
    looks: Looks,
    look: Look,
    /// Topics of keyed messages that the settlers have claimed and that had no place, and where they go.
    full: HashMap<String, To>,
    policy: Policy,
    is_policy_new: bool,
}

impl<'a> Planner<'a> {
    pub(super) fn new(
        now: Instant,
        settings: Settings,
        routes: &'a Routes,
        destinations: Vec<&'a str>,
    ) -> Self {
        Self {
            settings,
            routes,
            registry: Arc::default(),
            destinations,
            lease: LeaseId(0),
            stage: Stage::Undo,
            is_beaten: false,
            lanes: Lanes::default(),
            walk: Walk::default(),
            contention: Contention::default(),
            late: Late::default(),
            patrol: Patrol::default(),
            expiry: Expiry::default(),
            undoing: None,
            is_walks_turn: false,
            glanced: now,
            clock: DatabaseClock::default(),
            server: None,
            is_active: true,
            ended: None,
            expired: Vec::new(),
            vanished: Vec::new(),
            surveyed: None,
            survey_interval: SURVEY_INTERVAL,
            looks: Looks::default(),
            look: Look {
                question: 0,
                began: now,
                nothing_in_flight: false,
                found_nothing: false,
            },
            full: HashMap::new(),
            policy: Policy::default(),
            is_policy_new: false,
        }
    }

    /// The lease under which the last step is done.
    pub(super) fn lease(&self) -> LeaseId {
        self.lease
    }

    /// Leases of others whose messages may be taken.
    pub(super) fn expired(&self) -> &[i64] {
        &self.expired
    }

    /// Whether no other relay has to do the work.
    pub(super) fn is_active(&self) -> bool {
        self.is_active
    }

    /// What others are to know, where that has changed.
    pub(super) fn take_policy(&mut self) -> Option<Policy> {
        std::mem::take(&mut self.is_policy_new).then(|| self.policy.clone())
    }

    /// Says what is done next.
    pub(super) fn next(&mut self, now: Instant, view: &View) -> Step {
        if std::mem::take(&mut self.is_beaten) {
            return wait(Awaited::OthersClaim, now + self.contention.left(now), None);
        }
        let poll = self.next_poll(now);
        if !self.settings.is_enabled {
            return wait(Awaited::Nothing, poll, Some(view.question));
        }
        let Some(lease) = view.lease else {
            return wait(Awaited::Lease, poll.min(now + LEASE_INTERVAL), None);
        };
        if lease != self.lease {
            // What was asked under the one before was refused since it was over.
            self.surveyed = None;
            self.stage = Stage::Undo;
            self.lease = lease;
        }
        let before = self
            .resolve(lease, view)
            .or_else(|| self.prepare(now, view));
        before.unwrap_or_else(|| {
            self.stage = Stage::Undo;
            self.claim(now, lease, view)
        })
    }

    /// After a claim without an answer the lease may hold messages that nobody here knows of.
    /// Once everything known is settled, what the lease still holds are those: they are given back, part by
    /// part. Where the claim may be at work in the server still, its lease is ended before, so that what it
    /// takes later is taken over.
    fn resolve(&self, lease: LeaseId, view: &View) -> Option<Step> {
        let doubt = view.doubt?;
        if doubt.lease != lease {
            // That lease is over: what it held is taken over.
            return Some(Step::EndDoubt {
                lease: doubt.lease,
                given_back: None,
            });
        }
        let is_undone = self.undoing.as_ref().is_some_and(|one| one.is_of(lease));
        (!is_undone).then_some(Step::Resolve(doubt))
    }

    /// What comes before a claim. Claims go on between the parts of an undo.
    fn prepare(&mut self, now: Instant, view: &View) -> Option<Step> {
        if self.stage == Stage::Undo {
            self.stage = Stage::Gates;
            if let Some(step) = self.undo_a_part() {
                return Some(step);
            }
        }
        if self.stage == Stage::Gates {
            self.stage = Stage::Survey;
            let may_probe = self.is_active;
            return Some(Step::Gates { may_probe });
        }
        if self.stage == Stage::Claim {
            return None;
        }
        self.stage = Stage::Claim;
        let is_recent = |at: Instant| now.saturating_duration_since(at) < self.survey_interval;
        if self.surveyed.is_some_and(is_recent) {
            return None;
        }
        let (lanes, moment) = (&self.lanes, self.settings.moment);
        let newest = self.late.before_newest();
        let streams = (self.looks).next(now, || lanes.streams(), view.is_asked, newest, moment);
        let look = Self::look(now, view.question, view.is_nothing_in_flight);
        Some(Step::Survey(Survey { streams, look }))
    }

    /// Gives back a part of what a lease holds that nobody knows of.
    pub(super) fn undo_a_part(&mut self) -> Option<Step> {
        let undoing = self.undoing.as_ref()?;
        let lease = undoing.lease();
        let given_back = match undoing.next() {
            Ok(part) => return Some(Step::Undo(part)),
            Err(given_back) => Some(given_back),
        };
        self.undoing = None;
        self.lanes.forget_places();
        self.walk.restart();
        self.surveyed = None;
        Some(Step::EndDoubt { lease, given_back })
    }

    /// One claim: from as many lanes as one claim takes and have room, or a step of the walk.
    fn claim(&mut self, now: Instant, lease: LeaseId, view: &View) -> Step {
        if self.ended.iter().flatten().any(|id| *id == lease.0) {
            // Others may take what it holds.
            return Step::LoseLease(lease);
        }
        if !self.is_active {
            return self.wait_for(now, Awaited::Turn, view, None);
        }
        if self.lanes.hold(view.held.clone()) {
            // The walk has passed over their keys.
            self.walk.restart();
        }
        if view.left_to_claim == Some(0) {
            let answers = view.is_nothing_in_flight.then_some(self.look.question);
            return self.wait_for(now, Awaited::Work, view, answers);
        }
        if view.left_to_claim.is_none()
            && let Some((stream, after)) = self.expiry.step(now)
        {
            return Step::ExpireUnserved { stream, after };
        }
        let since_glance = now.saturating_duration_since(self.glanced);
        if self.walk.is_under_way(|to| view.is_open(to)) && since_glance >= GLANCE {
            self.lanes.ask_again();
            self.glanced = now;
        }
        self.walk.wait_is_over(|to| view.room_of(to) > 0);
        self.open_full(view);
        self.claim_where_room_is(now, view)
    }

    fn claim_where_room_is(&mut self, now: Instant, view: &View) -> Step {
        if let Some(look) = self.late.next(now, self.lanes.passed()) {
            return Step::LookForLate(look);
        }
        let (is_asked, clock) = (self.is_asked(view), self.now(now));
        let mut asked = self.lanes.allot(clock, |to| view.room_of(to), is_asked);
        let mut has_keyed = self.lanes.has_keyed(|to| view.room_of(to) > 0);
        let left = self.contention.left(now);
        if has_keyed && !left.is_zero() {
            asked.retain(|lane| !lane.stream.is_keyed);
            if asked.is_empty() {
                return wait(Awaited::OthersClaim, now + left, None);
            }
            has_keyed = false;
        }
        if has_keyed && let Some(keys) = self.walk.next_freed() {
            return Step::Keys(keys);
        }
        if let Some(range) = self.patrol.next(now, asked.is_empty()) {
            return Step::Patrol(range);
        }
        self.is_walks_turn = !self.is_walks_turn;
        if (self.is_walks_turn || asked.is_empty()) && has_keyed {
            let is_asked = is_asked.then_some(self.look.began);
            if let Some(from) = self.walk.from(now, asked.is_empty(), is_asked) {
                return Step::Walk(from);
            }
        }
        if asked.is_empty() {
            return Step::LookAgain;
        }
        let is_keyed = |lane: &Lane| lane.stream.is_keyed;
        let (keyed, plain) = asked.into_iter().partition(is_keyed);
        let room = view.left_to_claim.unwrap_or(usize::MAX);
        Step::Claim { plain, keyed, room }
    }

    /// Whether somebody waits for an answer that could be given now.
    fn is_asked(&self, view: &View) -> bool {
        view.is_asked && self.look.nothing_in_flight
    }

    /// Every lane that has room was asked: wait for room where one has none, or else for work.
    pub(super) fn look_again(&mut self, now: Instant, view: &View) -> Step {
        let (is_asked, clock) = (self.is_asked(view), self.now(now));
        let has_room = |to| view.room_of(to) > 0;
        let is_open = |to| view.is_open(to);
        let has_freed = self.lanes.has_keyed(has_room) && self.walk.has_freed(has_room);
        let asked = self.lanes.allot(clock, |to| view.room_of(to), is_asked);
        if has_freed || !asked.is_empty() {
            self.walk.wait_is_over(has_room);
            return Step::Again;
        }
        let has_keyed = self.lanes.has_keyed(is_open);
        let is_left = |is_open: &dyn Fn(To) -> bool| {
            self.lanes.is_anything_left(clock, is_open)
                || (self.walk.is_under_way(is_open) && self.lanes.has_keyed(is_open))
        };
        let is_registered = |to: To| to.group() == To::ALL_REGISTERED;
        if view.is_queue_full || is_left(&|to| is_open(to) && !is_registered(to)) {
            return self.wait_for(now, Awaited::Room, view, None);
        }
        if is_left(&is_open) {
            let mut step = self.wait_for(now, Awaited::Work, view, None);
            if let Step::Wait(wait) = &mut step {
                wait.or_room = true;
            }
            return step;
        }
        if view.has_pause_to_end(now) {
            // It was just read: what waits behind it may be sent.
            return Step::Again;
        }
        let is_walked = !has_keyed || self.walk.is_done_since(self.look.began);
        let is_all_seen = is_walked && self.patrol.is_done_since(now, self.look.began);
        // A claim under a lease that is over brings nothing.
        let has_lease = view.lease == Some(self.lease) && view.may_send;
        let has_nothing = self.look.found_nothing && self.look.nothing_in_flight;
        let is_nothing_due = has_lease && has_nothing && is_all_seen;
        let answers = is_nothing_due.then_some(self.look.question);
        self.wait_for(now, Awaited::Work, view, answers)
    }

    /// Nothing is waited for while something is to be undone, nor any question answered; nor where there was news
    /// since the last survey.
    fn wait_for(&mut self, now: Instant, what: Awaited, view: &View, answers: Option<u64>) -> Step {
        if self.undoing.is_some() {
            self.begin_look(now, view.is_nothing_in_flight);
            return Step::Again;
        }
        if self.surveyed.is_none() {
            return Step::Again;
        }
        let until = self.next_look(now, view);
        Step::Wait(Wait {
            what,
            until,
            is_poll: until == self.next_poll(now),
            or_room: false,
            answers,
        })
    }

    /// When the poll interval is over, a destination opens, or something is due that this look has left out.
    fn next_look(&self, now: Instant, view: &View) -> Instant {
        let is_open = |to| view.is_open(to);
        let has_keyed = self.lanes.has_keyed(is_open);
        let walk = self.walk.owed_at(self.look.began);
        let walk = walk.filter(|_| has_keyed).into_iter();
        // What is due only where there are claims would be due for ever.
        let claims = self.is_active && view.left_to_claim != Some(0);
        let owed = walk
            .chain(self.lanes.owed_at(self.look.began, is_open))
            .chain(self.late.owed_at(self.look.began, self.lanes.passed()))
            .chain(self.patrol.next_at(now))
            .filter(|_| claims);
        let expiry = self.expiry.goes_on_at();
        let expiry = expiry.filter(|_| claims && view.left_to_claim.is_none());
        view.opens_at()
            .filter(|_| claims)
            .chain(self.looks.owed_at())
            .chain(owed)
            .chain(expiry)
            .fold(self.next_poll(now), Instant::min)
    }

    /// A claim without an answer is found out about when everything known is settled.
    pub(super) fn wait_for_settles(&self, now: Instant) -> Wait {
        Wait {
            what: Awaited::Settles,
            until: self.next_poll(now),
            is_poll: true,
            or_room: false,
            answers: None,
        }
    }

    /// When the outbox is looked at, whatever else is heard of it.
    fn next_poll(&self, now: Instant) -> Instant {
        now + self.settings.poll_interval.min(LONGEST_WAIT)
    }

    /// Settlers go on with the messages of topics that have room again.
    fn open_full(&mut self, view: &View) {
        let count = self.full.len();
        self.full.retain(|_, to| view.room_of(*to) == 0);
        if self.full.len() < count {
            self.tell_full();
        }
    }

    fn tell_full(&mut self) {
        self.policy.full = self.full.keys().cloned().collect();
        self.is_policy_new = true;
    }

    fn look(now: Instant, question: u64, nothing_in_flight: bool) -> Look {
        Look {
            question,
            began: now,
            nothing_in_flight,
            found_nothing: true,
        }
    }

    /// Every lane may have something again, as far as the last survey has seen lanes.
    fn begin_look(&mut self, now: Instant, nothing_in_flight: bool) {
        self.lanes.begin_look();
        self.look = Self::look(now, self.look.question, nothing_in_flight);
    }

    fn now(&self, here: Instant) -> Now {
        Now {
            here,
            database: self.clock,
        }
    }
}

fn wait(what: Awaited, until: Instant, answers: Option<u64>) -> Step {
    Step::Wait(Wait {
        what,
        until,
        is_poll: false,
        or_room: false,
        answers,
    })
}
