//! The claim thread: takes due messages and hands them to the senders.

mod contention;
mod doubts;
mod expiry;
mod hand_over;
mod keyed;
mod patrolling;
mod survey;
mod waiting;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use self::contention::Contention;
use self::doubts::Undoing;
use self::expiry::Expiry;
use self::survey::{Look, Looks};
use super::database_clock::DatabaseClock;
use super::intake::{Intake, Payloads, Rooms};
use super::lanes::{Harvest, Lanes, To};
use super::patrol::Patrol;
use super::pauses;
use super::session::Session;
use super::settlement::{Outcomes, Settlement, Verdict};
use super::shared::{Continued, Job, Returned, Shared};
use super::stats::add;
use super::walk::Walk;
use crate::error::DatabaseError;
use crate::store::relay::claim::{self, Batch, Claimed, Lane, Position, Stream};
use crate::store::relay::connection::Plans;
use crate::store::relay::lease::LeaseId;

/// How often, at least, lanes are asked while a walk over many keys goes on: nobody rings a relay that is
/// awake.
const GLANCE: Duration = Duration::from_millis(20);
pub(crate) struct Claimer<'a> {
    shared: &'a Shared,
    session: Session,
    /// One for each bulkhead.
    intakes: Vec<Intake>,
    /// Of messages for several destinations.
    split_payloads: Payloads,
    outcomes: Outcomes,
    doorbell: Receiver<()>,
    /// What the settler has claimed right behind a settled message.
    continued: Receiver<Continued>,
    /// Topics of keyed messages that the settlers have claimed and that had no place here, and where they go.
    full: HashMap<String, To>,
    lanes: Lanes,
    walk: Walk,
    /// How keyed claims of other relays keep this one's waiting.
    contention: Contention,
    patrol: Patrol,
    /// The walk's turn comes after each claim of lanes.
    is_walks_turn: bool,
    /// When the lanes were last opened in the middle of a walk.
    glanced: Instant,
    clock: DatabaseClock,
    /// No other relay has to do the work.
    is_active: bool,
    /// Leases that have ended, as the last survey has seen them; `None` before the first one.
    ended: Option<Vec<i64>>,
    /// Leases of others whose messages may be taken.
    expired: Vec<i64>,
    surveyed: Option<Instant>,
    looks: Looks,
    look: Look,
    /// What a claim without an answer took is given back.
    undoing: Option<Undoing>,
    expiry: Expiry,
}

impl<'a> Claimer<'a> {
    pub(crate) fn new(
        shared: &'a Shared,
        queues: Vec<(Sender<Job>, Receiver<Job>)>,
        outcomes: Outcomes,
        doorbell: Receiver<()>,
        continued: Receiver<Continued>,
    ) -> Self {
        Self {
            shared,
            session: shared.session(&shared.progress.claimer, shared.claim_limit, Plans::ByIndex),
            intakes: queues.into_iter().map(Intake::new).collect(),
            split_payloads: Payloads::default(),
            outcomes,
            doorbell,
            continued,
            full: HashMap::new(),
            lanes: Lanes::default(),
            walk: Walk::default(),
            contention: Contention::default(),
            patrol: Patrol::default(),
            is_walks_turn: false,
            glanced: Instant::now(),
            clock: DatabaseClock::default(),
            is_active: true,
            ended: None,
            expired: Vec::new(),
            surveyed: None,
            looks: Looks::default(),
            look: Look {
                question: 0,
                began: Instant::now(),
                nothing_in_flight: false,
                found_nothing: false,
            },
            undoing: None,
            expiry: Expiry::new(),
        }
    }

    /// Claims until the relay stops. A full claim is followed at once by another.
    pub(crate) fn run(mut self) {
        self.claim_until_stop();
        self.finish_undoing();
        // The senders may be busy for long: what waits for them goes back now.
        for (intake, bulkhead) in self.intakes.iter_mut().zip(&self.shared.bulkheads) {
            for Job { mut message, lease } in intake.take_back() {
                bulkhead.unload(&mut message);
                let settlement = Settlement::unsent(message, lease, bulkhead, Verdict::Released);
                let _ = self.outcomes.send(settlement);
            }
        }
    }

    fn claim_until_stop(&mut self) {
        while !self.shared.is_stopping() {
            if !self.shared.config.enabled {
                let question = self.shared.idle().question();
                self.shared.idle().answer(question);
                self.wait(self.shared.config.poll_interval);
                continue;
            }
            let Some(lease) = self.shared.lease.current() else {
                self.wait(
                    self.shared
                        .config
                        .poll_interval
                        .min(Duration::from_millis(100)),
                );
                continue;
            };
            if let Some(doubt) = self.shared.doubt()
                && !self.resolve(doubt, lease)
            {
                continue;
            }
            let next = self.undo_a_part().and_then(|()| self.claim_once(lease));
            match next {
                Ok(Next::Again) => {}
                Ok(Next::WaitForRoom | Next::WaitForWork) if self.undoing.is_some() => {
                    self.want_room(false);
                    self.begin_look();
                }
                Ok(Next::AgainSoon) => {
                    self.wait(self.contention.left());
                }
                Ok(Next::WaitForRoom) => {
                    self.wait_for_room();
                    self.want_room(false);
                    self.begin_look();
                }
                Ok(Next::WaitForWork) => {
                    // One that stands by needs not hear of what another one does.
                    if self.is_active {
                        self.shared.fall_asleep();
                    }
                    if !self.wait(self.until_next_look()) {
                        self.shared.metrics.polled.increment(1);
                        self.surveyed = None;
                    }
                    self.begin_look();
                }
                Err(_) => {
                    self.surveyed = None;
                    self.shared.pause(self.session.wait());
                }
            }
        }
    }

    /// One claim: from as many lanes as one claim takes and have room, or a step of the walk.
    fn claim_once(&mut self, lease: LeaseId) -> Result<Next, DatabaseError> {
        self.take_continued();
        pauses::follow_up(self.shared, &mut self.session)?;
        if self.shared.take_news() {
            self.surveyed = None;
        }
        self.survey(lease)?;
        if self.ended.iter().flatten().any(|id| *id == lease.0) {
            // Others may take what it holds.
            self.shared.lose_lease(lease);
            self.shared.beat_now();
            return Ok(Next::AgainSoon);
        }
        if !self.is_active {
            return Ok(Next::WaitForWork);
        }
        if self.lanes.hold(self.shared.held_topics()) {
            // The walk has passed over their keys.
            self.walk.restart();
        }
        let limit = self.left_to_claim();
        if limit == Some(0) {
            if self.shared.is_nothing_in_flight() && self.undoing.is_none() {
                self.shared.idle().answer(self.look.question);
            }
            return Ok(Next::WaitForWork);
        }
        if limit.is_none()
            && let Some(next) = self.expire_unserved(lease)?
        {
            return Ok(next);
        }
        let Returned { topics, keys } = self.shared.take_returned();
        self.lanes.go_back(&topics);
        self.walk.freed(keys);
        if self.walk.is_under_way() && self.glanced.elapsed() >= GLANCE {
            self.lanes.ask_again();
            self.glanced = Instant::now();
        }
        let rooms = Rooms::now(self.shared, &self.intakes, &self.split_payloads);
        // Those of a closed one wait no longer: a round finds them when it opens.
        let shared = self.shared;
        self.walk
            .wait_is_over(|to| rooms.of(to) > 0 || !shared.is_open(to));
        self.open_full(&rooms);
        let is_asked = self.is_asked();
        let mut asked = self.lanes.allot(|to| rooms.of(to), is_asked);
        let mut has_keyed = self.lanes.has_keyed(|to| rooms.of(to) > 0);
        if has_keyed && !self.contention.left().is_zero() {
            asked.retain(|lane| !lane.stream.is_keyed);
            if asked.is_empty() {
                return Ok(Next::AgainSoon);
            }
            has_keyed = false;
        }
        if has_keyed && let Some(keys) = self.walk.next_freed() {
            return self.look_at(lease, keys, limit, &rooms);
        }
        if let Some(range) = self.patrol.next(asked.is_empty()) {
            return self.patrol(lease, range, limit, &rooms);
        }
        self.is_walks_turn = !self.is_walks_turn;
        if (self.is_walks_turn || asked.is_empty())
            && has_keyed
            && let Some(from) = self
                .walk
                .from(asked.is_empty(), is_asked.then_some(self.look.began))
        {
            return self.step(lease, &from, limit, &rooms);
        }
        if asked.is_empty() {
            return Ok(self.nothing_to_ask());
        }
        self.claim_from(lease, limit, asked)
    }

    /// Whether somebody waits for an answer that could be given now.
    fn is_asked(&self) -> bool {
        self.shared.idle().is_asked() && self.look.nothing_in_flight
    }

    /// Two claims, each with an answer of its own: what the first one has got is handed over whatever
    /// becomes of the second.
    fn claim_from(
        &mut self,
        lease: LeaseId,
        limit: Option<usize>,
        asked: Vec<Lane>,
    ) -> Result<Next, DatabaseError> {
        let (keyed, plain): (Vec<Lane>, Vec<Lane>) =
            asked.into_iter().partition(|lane| lane.stream.is_keyed);
        let room = limit.unwrap_or(usize::MAX);
        let count = match plain.is_empty() {
            true => 0,
            false => self.claim_plain(lease, room, &plain)?,
        };
        if keyed.is_empty() || count >= room {
            return Ok(Next::Again);
        }
        self.claim_keyed(lease, room - count, &keyed)
    }

    /// Returns how many it has brought.
    fn claim_plain(
        &mut self,
        lease: LeaseId,
        room: usize,
        asked: &[Lane],
    ) -> Result<usize, DatabaseError> {
        let name = &self.shared.config.table;
        let began = Instant::now();
        let claimed = self.claiming(lease, |conn, claimant| {
            claim::claim(conn, name, claimant, asked, room)
        });
        let claimed = match claimed {
            Err(error) if self.took_too_long(&error, began) => {
                self.leave_to_patrol(asked, began.elapsed());
                return Ok(0);
            }
            claimed => claimed?,
        };
        let count = claimed.claimed.len();
        let reached = HashMap::new();
        self.learn_and_take(lease, room, asked, (claimed, reached), began.elapsed());
        Ok(count)
    }

    fn learn_and_take(
        &mut self,
        lease: LeaseId,
        room: usize,
        asked: &[Lane],
        (batch, reached): (Batch, HashMap<Stream, Position>),
        took: Duration,
    ) {
        let Batch { claimed, is_cut } = batch;
        self.look.found_nothing &= claimed.is_empty();
        self.lanes.learn(&Harvest {
            asked,
            claimed: &claimed,
            reached: &reached,
            is_cut: is_cut || claimed.len() >= room,
            took,
            clock: &self.clock,
        });
        self.take(claimed, took, lease);
    }

    fn way(&self, topic: &str, destination: &str) -> To {
        To::of(&self.shared.routes, topic, destination)
    }

    fn take(&mut self, claimed: Vec<Claimed>, took: Duration, lease: LeaseId) {
        if claimed.is_empty() {
            return;
        }
        self.shared.stay_awake();
        let micros = usize::try_from(took.as_micros()).unwrap_or(usize::MAX);
        add(&self.shared.stats.claim_micros, micros);
        add(&self.shared.stats.claims, 1);
        self.shared.count_claimed(claimed.len());
        self.shared.metrics.claim_seconds.record(took.as_secs_f64());
        self.shared.began(lease, claimed.len());
        self.shared.load(&claimed);
        self.hand_over_all(claimed, lease);
    }

    /// Every lane that has room was asked: wait for room where one has none, or else for work.
    fn nothing_to_ask(&mut self) -> Next {
        // Looked at again after the flags are up: a sender that made room before did not ring.
        self.want_room(true);
        let rooms = Rooms::now(self.shared, &self.intakes, &self.split_payloads);
        let is_asked = self.is_asked();
        let has_room = |to| rooms.of(to) > 0;
        let has_freed = self.lanes.has_keyed(has_room) && self.walk.has_freed(has_room);
        if has_freed || !self.lanes.allot(|to| rooms.of(to), is_asked).is_empty() {
            self.want_room(false);
            self.walk.wait_is_over(has_room);
            return Next::Again;
        }
        let waits_for_room = self.intakes.iter().any(Intake::is_full)
            || self.lanes.is_anything_left(|to| self.shared.is_open(to))
            || (self.walk.is_under_way() && self.lanes.has_keyed(|to| self.shared.is_open(to)));
        if waits_for_room {
            return Next::WaitForRoom;
        }
        self.want_room(false);
        if self.shared.bulkheads.iter().any(|b| b.gate.is_due()) {
            // A pause whose time is over was just read: what waits behind it may be sent.
            return Next::Again;
        }
        let has_keyed = self.lanes.has_keyed(|to| self.shared.is_open(to));
        let is_walked = !has_keyed || self.walk.is_done_since(self.look.began);
        let is_all_seen =
            is_walked && self.undoing.is_none() && self.patrol.is_done_since(self.look.began);
        if self.look.found_nothing && self.look.nothing_in_flight && is_all_seen {
            self.shared.idle().answer(self.look.question);
        }
        Next::WaitForWork
    }

    /// Where only so many messages are to be claimed.
    fn left_to_claim(&self) -> Option<usize> {
        // What was given back unsent, or became other messages, was not sent yet.
        let stats = self.shared.stats.read();
        let given_back = stats.released + stats.split;
        let left = self
            .shared
            .limit?
            .saturating_add(given_back)
            .saturating_sub(stats.claimed);
        Some(usize::try_from(left).unwrap_or(usize::MAX))
    }
}

/// What the claimer does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Another claim.
    Again,
    /// Another claim, when another relay is done with its own.
    AgainSoon,
    /// Some lane has more than its queue can take.
    WaitForRoom,
    /// Nothing is due that can be sent.
    WaitForWork,
}
