//! The claim thread: takes due messages and hands them to the senders.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, select};
use diesel::PgConnection;
use diesel::result::QueryResult;

use super::database_clock::DatabaseClock;
use super::gate::Room;
use super::intake::{Intake, Payloads, Rooms};
use super::lanes::{Harvest, Lanes, To};
use super::pauses;
use super::session::Session;
use super::settlement::{Settlement, Verdict};
use super::shared::{Continued, Doubt, Job, Returned, Shared, add};
use super::walk::{self, Step, Walk};
use crate::dispatch::Failure;
use crate::error::DatabaseError;
use crate::message::Message;
use crate::routes::Way;
use crate::status::ReasonCode;
use crate::store::claim::{
    self, Claimant, Claimed, Known, Lane, Position, Stream, TakenOver, Topic,
};
use crate::store::connection::{self, Plans};
use crate::store::lease::{self, LeaseId};
use crate::store::ordered::Candidate;
use crate::store::{ordered, pause, settle};

/// How often, at least, topics and expired leases are looked for.
const SURVEY_INTERVAL: Duration = Duration::from_secs(1);
/// While another relay claims messages with ordering keys.
const CONTENTION: Duration = Duration::from_millis(1);
/// How often, at least, lanes are asked while a walk over many keys goes on: nobody rings a relay that is
/// awake.
const GLANCE: Duration = Duration::from_millis(20);
/// A claim that takes longer than this is given up and tried again.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Claimer<'a> {
    shared: &'a Shared,
    session: Session,
    /// One for each bulkhead.
    intakes: Vec<Intake>,
    /// Of messages for several destinations.
    split_payloads: Payloads,
    outcomes: Sender<Settlement>,
    doorbell: Receiver<()>,
    /// What the settler has claimed right behind a settled message.
    continued: Receiver<Continued>,
    lanes: Lanes,
    walk: Walk,
    /// The walk's turn comes after each claim of lanes.
    is_walks_turn: bool,
    /// When the lanes were last opened in the middle of a walk.
    glanced: Instant,
    clock: DatabaseClock,
    /// No other relay has to do the work.
    is_active: bool,
    /// Leases that are over, as far as they were seen. A lease that is over stays so.
    known_expired: Vec<i64>,
    /// Leases of others whose messages may be taken.
    expired: Vec<i64>,
    surveyed: Option<Instant>,
    look: Look,
}

/// A look at all lanes, which may take several claims.
#[derive(Debug)]
struct Look {
    /// The last question before the last survey.
    question: u64,
    began: Instant,
    nothing_in_flight: bool,
    found_nothing: bool,
}

impl<'a> Claimer<'a> {
    pub(crate) fn new(
        shared: &'a Shared,
        queues: Vec<(Sender<Job>, Receiver<Job>)>,
        outcomes: Sender<Settlement>,
        doorbell: Receiver<()>,
        continued: Receiver<Continued>,
    ) -> Self {
        Self {
            shared,
            session: shared.session("claimer", STATEMENT_TIMEOUT, Plans::ByIndex),
            intakes: queues.into_iter().map(Intake::new).collect(),
            split_payloads: Payloads::default(),
            outcomes,
            doorbell,
            continued,
            lanes: Lanes::default(),
            walk: Walk::default(),
            is_walks_turn: false,
            glanced: Instant::now(),
            clock: DatabaseClock::default(),
            is_active: true,
            known_expired: Vec::new(),
            expired: Vec::new(),
            surveyed: None,
            look: Look {
                question: 0,
                began: Instant::now(),
                nothing_in_flight: false,
                found_nothing: false,
            },
        }
    }

    /// Claims until the relay stops. A full claim is followed at once by another.
    pub(crate) fn run(mut self) {
        self.claim_until_stop();
        // The senders may be busy for long: what waits for them goes back now.
        for intake in &self.intakes {
            for Job { message, lease } in intake.queue.try_iter() {
                let settlement = Settlement::unsent(message, lease, Verdict::Released);
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
            match self.claim_once(lease) {
                Ok(Next::Again) => {}
                Ok(Next::AgainSoon) => {
                    self.wait(CONTENTION);
                }
                Ok(Next::WaitForRoom) => {
                    self.wait(self.until_next_look());
                    self.want_room(false);
                    self.begin_look();
                }
                Ok(Next::WaitForWork) => {
                    // One that stands by needs not hear of what another one does.
                    if self.is_active {
                        self.shared.fall_asleep();
                    }
                    if !self.wait(self.until_next_look()) {
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

    /// Until the poll interval is over, or a destination opens.
    fn until_next_look(&self) -> Duration {
        let now = Instant::now();
        self.shared
            .bulkheads
            .iter()
            .filter_map(|bulkhead| bulkhead.gate.opens_at())
            .map(|at| at.saturating_duration_since(now))
            .fold(self.shared.config.poll_interval, Duration::min)
    }

    /// After a claim without an answer the lease may hold messages that nobody here knows of.
    /// Once everything known is settled, what the lease still holds are those: they are given
    /// back. Where the claim may be at work in the server still, its lease is ended before, so
    /// that what it takes later is taken over. `false`: not yet.
    fn resolve(&mut self, doubt: Doubt, lease: LeaseId) -> bool {
        if doubt.lease != lease {
            // That lease is over: what it held is taken over.
            self.shared.ring_when_settled(false);
            self.shared.end_doubt();
            return true;
        }
        self.shared.ring_when_settled(true);
        let Some(aside) = self.shared.only_aside() else {
            self.wait(self.shared.config.poll_interval);
            return false;
        };
        self.shared.ring_when_settled(false);
        let name = &self.shared.config.table;
        let result = self.session.run(|conn| {
            let is_at_work = match doubt.backend {
                Some(backend) => connection::is_at_work(conn, backend)?,
                None => true,
            };
            if is_at_work {
                lease::expire(conn, name, lease)?;
            }
            Ok((is_at_work, settle::release_all(conn, name, lease, &aside)?))
        });
        let (is_at_work, count) = match result {
            Ok(done) => done,
            Err(_) => {
                self.shared.pause(self.session.wait());
                return false;
            }
        };
        if count > 0 || is_at_work {
            log::warn!(event = "claim_undone", lease = lease.0, messages = count, new_lease = is_at_work; "a claim had no answer: what it took was given back");
        }
        self.shared.end_doubt();
        self.lanes.forget_places();
        self.walk.restart();
        if is_at_work {
            self.shared.lease.lost();
            self.shared.beat_now();
        }
        !is_at_work
    }

    /// Waits for the doorbell or the time, and hands over what the settler has claimed meanwhile.
    /// `true`: the doorbell rang.
    fn wait(&mut self, duration: Duration) -> bool {
        let now = Instant::now();
        // Nobody waits for a day.
        let until = now + duration.min(Duration::from_secs(24 * 3600));
        loop {
            select! {
                recv(self.doorbell) -> _ => return true,
                recv(self.continued) -> continued => match continued {
                    Ok(Continued { claimed, lease }) => self.hand_over_all(claimed, lease),
                    // The settler is gone, and with it the relay.
                    Err(_) => return true,
                },
                default(until.saturating_duration_since(Instant::now())) => return false,
            }
        }
    }

    fn take_continued(&mut self) {
        while let Ok(Continued { claimed, lease }) = self.continued.try_recv() {
            self.hand_over_all(claimed, lease);
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
        if self.known_expired.contains(&lease.0) || !self.is_active {
            // The heartbeat is about to find out; or another relay does the work.
            return Ok(Next::WaitForWork);
        }
        let limit = self.left_to_claim();
        if limit == Some(0) {
            if self.shared.in_flight.load(Ordering::Acquire) == 0 {
                self.shared.idle().answer(self.look.question);
            }
            return Ok(Next::WaitForWork);
        }
        let Returned { topics, keys } = self.shared.take_returned();
        self.lanes.forget_places_of(&topics);
        self.walk.freed(keys);
        if self.walk.is_under_way() && self.glanced.elapsed() >= GLANCE {
            self.lanes.ask_again();
            self.glanced = Instant::now();
        }
        let rooms = Rooms::now(self.shared, &self.intakes, &self.split_payloads);
        let is_asked = self.is_asked();
        let asked = self.lanes.allot(|to| rooms.of(to), is_asked);
        let has_keyed = self.lanes.has_keyed(|to| rooms.of(to) > 0);
        if has_keyed && let Some(keys) = self.walk.next_freed() {
            return self.look_at(lease, keys, limit, &rooms);
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
        let expired = std::mem::take(&mut self.expired);
        let claimant = self.claimant(lease, &expired);
        let began = Instant::now();
        let result = self.claiming(lease, |conn| {
            claim::claim(conn, name, claimant, asked, room)
        });
        self.expired = expired;
        let claimed = result?;
        let count = claimed.len();
        let reached = HashMap::new();
        self.learn_and_take(lease, room, asked, (claimed, reached), began.elapsed());
        Ok(count)
    }

    fn claim_keyed(
        &mut self,
        lease: LeaseId,
        room: usize,
        asked: &[Lane],
    ) -> Result<Next, DatabaseError> {
        let goes_to = |lane: &Lane| {
            let Topic { topic, destination } = &lane.stream.topic;
            self.goes_to(self.way(topic, destination))
        };
        let goes_to: Vec<&str> = asked.iter().map(goes_to).collect();
        let name = &self.shared.config.table;
        let expired = std::mem::take(&mut self.expired);
        let claimant = self.claimant(lease, &expired);
        let began = Instant::now();
        let result = self.claiming(lease, |conn| {
            let found = ordered::due(conn, name, claimant, asked, &goes_to)?;
            let (mut due, mut reached) = (Vec::new(), HashMap::new());
            for (lane, found) in asked.iter().zip(found) {
                due.extend(found.candidates);
                reached.extend(found.reached.map(|at| (lane.stream.clone(), at)));
            }
            due.truncate(room);
            let claimed = match due.is_empty() {
                true => Some(Vec::new()),
                false => ordered::claim(conn, name, claimant, &due)?,
            };
            Ok(claimed.map(|claimed| (claimed, reached)))
        });
        self.expired = expired;
        let Some(harvest) = result? else {
            self.look.found_nothing = false;
            return Ok(Next::AgainSoon);
        };
        self.learn_and_take(lease, room, asked, harvest, began.elapsed());
        Ok(Next::Again)
    }

    fn learn_and_take(
        &mut self,
        lease: LeaseId,
        room: usize,
        asked: &[Lane],
        (claimed, reached): (Vec<Claimed>, HashMap<Stream, Position>),
        took: Duration,
    ) {
        self.look.found_nothing &= claimed.is_empty();
        self.lanes.learn(&Harvest {
            asked,
            claimed: &claimed,
            reached: &reached,
            is_cut: claimed.len() >= room,
            took,
            clock: &self.clock,
        });
        self.take(claimed, took, lease);
    }

    /// A step of the walk over all keys.
    fn step(
        &mut self,
        lease: LeaseId,
        from: &ordered::Key,
        limit: Option<usize>,
        rooms: &Rooms,
    ) -> Result<Next, DatabaseError> {
        let name = &self.shared.config.table;
        let (began, expired) = (Instant::now(), &self.expired);
        let page = self
            .session
            .run(|conn| ordered::walk(conn, name, expired, from, walk::STEP))?;
        let step = page.last.map_or(Step::End, Step::At);
        let picked = self.pick(page.heads, limit, rooms);
        let Some(claimed) = self.claim_picked(lease, &picked.candidates)? else {
            return Ok(Next::AgainSoon);
        };
        // Ends where the first of a destination has no room left.
        let step = picked.beyond.into_iter().next().map_or(step, Step::At);
        let has_left = !picked.without_room.is_empty();
        let took = began.elapsed();
        self.walk.learn(step, took, has_left);
        self.take(claimed, took, lease);
        Ok(Next::Again)
    }

    /// A look at keys that were freed.
    fn look_at(
        &mut self,
        lease: LeaseId,
        keys: Vec<ordered::Key>,
        limit: Option<usize>,
        rooms: &Rooms,
    ) -> Result<Next, DatabaseError> {
        let name = &self.shared.config.table;
        let (began, expired) = (Instant::now(), &self.expired);
        let page = self
            .session
            .run(|conn| ordered::first_of(conn, name, expired, &keys));
        let picked = page.map(|page| self.pick(page.heads, limit, rooms));
        let result = picked.and_then(|picked| {
            let claimed = self.claim_picked(lease, &picked.candidates)?;
            Ok((picked, claimed))
        });
        let (picked, claimed) = match result {
            Ok((picked, Some(claimed))) => (picked, claimed),
            Ok((_, None)) => {
                self.walk.freed(keys);
                return Ok(Next::AgainSoon);
            }
            Err(error) => {
                // One of them may be the reason.
                self.walk.want_round();
                return Err(error);
            }
        };
        self.walk.wait_with(picked.without_room);
        self.walk.freed(picked.beyond);
        self.take(claimed, began.elapsed(), lease);
        Ok(Next::Again)
    }

    /// `None`: another relay is claiming just now.
    fn claim_picked(
        &mut self,
        lease: LeaseId,
        candidates: &[Candidate],
    ) -> Result<Option<Vec<Claimed>>, DatabaseError> {
        if candidates.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let name = &self.shared.config.table;
        let expired = std::mem::take(&mut self.expired);
        let claimant = self.claimant(lease, &expired);
        let result = self.claiming(lease, |conn| {
            ordered::claim(conn, name, claimant, candidates)
        });
        self.expired = expired;
        let claimed = result?;
        self.look.found_nothing &= claimed.as_ref().is_some_and(Vec::is_empty);
        Ok(claimed)
    }

    /// Those for which there is room, up to the first of a destination that has none left.
    fn pick(&self, heads: Vec<ordered::Head>, limit: Option<usize>, rooms: &Rooms) -> Picked {
        let mut picked = Picked::default();
        let mut taken: HashMap<To, usize> = HashMap::new();
        let most = limit.unwrap_or(usize::MAX);
        let mut heads = heads.into_iter();
        while let Some(head) = heads.next() {
            let to = self.way(&head.topic.topic, &head.topic.destination);
            if self.lanes.kept_back().has(&head.topic) {
                continue;
            }
            let room = rooms.of(to);
            let count = taken.entry(to).or_default();
            if room == 0 {
                if self.is_open(to) {
                    picked.without_room.push((to, head.key));
                }
            } else if *count >= room || picked.candidates.len() >= most {
                picked.beyond.push(head.key);
                picked.beyond.extend(heads.map(|head| head.key));
                break;
            } else {
                *count += 1;
                picked.candidates.push(Candidate {
                    sequence: head.sequence,
                    goes_to: self.goes_to(to).to_owned(),
                });
            }
        }
        picked
    }

    fn way(&self, topic: &str, destination: &str) -> To {
        let nowhere = self.shared.bulkheads.len() - 1;
        To::of(&self.shared.routes, topic, destination, nowhere)
    }

    /// The destination by its name.
    fn goes_to(&self, to: To) -> &'a str {
        match to {
            To::Bulkhead(number) => &self.shared.bulkheads[number].name,
            To::Split => "",
        }
    }

    fn is_open(&self, to: To) -> bool {
        match to {
            To::Bulkhead(number) => self.shared.bulkheads[number].gate.room() != Room::Closed,
            To::Split => true,
        }
    }

    fn claimant<'e>(&self, lease: LeaseId, expired: &'e [i64]) -> Claimant<'e> {
        Claimant {
            lease,
            expired,
            max_attempts: self.shared.config.max_attempts,
        }
    }

    fn take(&mut self, claimed: Vec<Claimed>, took: Duration, lease: LeaseId) {
        if claimed.is_empty() {
            return;
        }
        self.shared.stay_awake();
        let micros = usize::try_from(took.as_micros()).unwrap_or(usize::MAX);
        add(&self.shared.stats.claim_micros, micros);
        add(&self.shared.stats.claims, 1);
        add(&self.shared.stats.claimed, claimed.len());
        self.shared.began(lease, claimed.len());
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
            self.walk.wait_is_over();
            return Next::Again;
        }
        let waits_for_room = self.lanes.is_anything_left(|to| self.is_open(to))
            || (self.walk.is_under_way() && self.lanes.has_keyed(|to| self.is_open(to)));
        if waits_for_room {
            return Next::WaitForRoom;
        }
        self.want_room(false);
        if self.shared.bulkheads.iter().any(|b| b.gate.is_due()) {
            // A pause whose time is over was just read: what waits behind it may be sent.
            return Next::Again;
        }
        let has_keyed = self.lanes.has_keyed(|to| self.is_open(to));
        let is_walked = !has_keyed || self.walk.is_done_since(self.look.began);
        if self.look.found_nothing && self.look.nothing_in_flight && is_walked {
            self.shared.idle().answer(self.look.question);
        }
        Next::WaitForWork
    }

    fn want_room(&self, is_wanted: bool) {
        for bulkhead in &self.shared.bulkheads {
            bulkhead.wants_room.store(is_wanted, Ordering::Release);
        }
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

    /// Runs a claim. One without an answer may have worked, or be at work still.
    fn claiming<T>(
        &mut self,
        lease: LeaseId,
        claim: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        let result = self.session.run(claim);
        if result.as_ref().is_err_and(DatabaseError::is_without_answer) {
            let backend = self.session.backend();
            self.shared.begin_doubt(Doubt { lease, backend });
        }
        result
    }

    /// Every lane may have something again, as far as the last survey has seen lanes.
    fn begin_look(&mut self) {
        self.walk.wait_is_over();
        self.lanes.begin_look();
        self.look = Look {
            question: self.look.question,
            began: Instant::now(),
            nothing_in_flight: self.shared.in_flight.load(Ordering::Acquire) == 0,
            found_nothing: true,
        };
    }

    /// Looks for topics, for leases that are over and for pauses, where that was not done lately.
    /// Begins a new look, unless one is under way that has found nothing yet.
    fn survey(&mut self, lease: LeaseId) -> Result<(), DatabaseError> {
        let is_recent = self
            .surveyed
            .is_some_and(|at| at.elapsed() < SURVEY_INTERVAL);
        if is_recent {
            return Ok(());
        }
        let question = self.shared.idle().question();
        let nothing_in_flight = self.shared.in_flight.load(Ordering::Acquire) == 0;
        let began = Instant::now();
        let name = &self.shared.config.table;
        let known = &self.known_expired;
        let (streams, standing, newly_expired, paused) = self.session.run(|conn| {
            let streams = claim::streams(conn, name)?;
            let standing = lease::standing(conn, name, lease)?;
            let newly_expired = lease::newly_expired(conn, name, known)?;
            Ok((streams, standing, newly_expired, pause::all(conn, name)?))
        })?;
        self.clock = DatabaseClock::new(standing.now, began);
        self.stand(standing.is_active);
        let kept_back = pauses::learn(self.shared, &paused);
        // A look of many lanes that has found nothing may take longer than a survey is good for: it
        // goes on, or it would never end. What a dead relay held may be in any lane.
        let is_new_look =
            self.surveyed.is_none() || !self.look.found_nothing || !newly_expired.is_empty();
        if !newly_expired.is_empty() {
            self.lanes.forget_places();
            self.walk.restart();
        }
        for id in newly_expired {
            log::warn!(event = "lease_expired", lease = id; "a relay's lease is over: what it held is taken over");
            self.known_expired.push(id);
        }
        // What this process itself still has to write down, under a lease that it has lost, is
        // not taken from it.
        let mut expired = self.known_expired.clone();
        expired.retain(|id| !self.shared.holds_under(LeaseId(*id)));
        let vanished = self
            .shared
            .vanished
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        expired.extend(vanished.iter());
        drop(vanished);
        let nowhere = self.shared.bulkheads.len() - 1;
        self.lanes
            .set_streams(streams, &self.shared.routes, nowhere, &self.clock);
        self.shared.set_paused_topics(&kept_back);
        self.lanes.keep_back(kept_back);
        if is_new_look {
            self.lanes.begin_look();
            self.look = Look {
                question,
                began,
                nothing_in_flight,
                found_nothing: true,
            };
        }
        self.expired = expired;
        self.surveyed = Some(Instant::now());
        Ok(())
    }

    /// Says so when this relay becomes, or ceases to be, the one that works.
    fn stand(&mut self, is_active: bool) {
        if is_active == self.is_active || !self.shared.config.single_active {
            return;
        }
        self.is_active = is_active;
        if is_active {
            log::info!(event = "active", outbox:% = self.shared.config.table; "this relay does the work now");
            self.lanes.forget_places();
        } else {
            self.shared.stay_awake();
            log::info!(event = "standby", outbox:% = self.shared.config.table; "another relay does the work: standing by");
        }
    }

    fn hand_over_all(&mut self, mut claimed: Vec<Claimed>, lease: LeaseId) {
        let is_taken_over = |c: &&Claimed| c.taken_over != TakenOver::No;
        let taken_over = claimed.iter().filter(is_taken_over).count();
        if taken_over > 0 {
            add(&self.shared.stats.taken_over, taken_over);
            log::warn!(event = "takeover", messages = taken_over; "messages were taken over from a relay that died or lost its lease");
        }
        claimed.sort_unstable_by_key(|c| c.message.sequence);
        let mut seen = vec![(0, 0); self.intakes.len()];
        let mut seen_to_split = (0, 0);
        for one in claimed {
            let to = self.way(&one.message.topic, &one.message.destination);
            let (count, bytes) = match to {
                To::Bulkhead(number) => &mut seen[number],
                To::Split => &mut seen_to_split,
            };
            *count += 1;
            *bytes += one.message.payload.len();
            self.hand_over(one, to, lease);
        }
        for (intake, (count, bytes)) in self.intakes.iter_mut().zip(seen) {
            intake.payloads.learn(count, bytes);
        }
        let (count, bytes) = seen_to_split;
        self.split_payloads.learn(count, bytes);
    }

    /// To a sender, or straight to the settler where nothing has to be sent.
    fn hand_over(&self, claimed: Claimed, to: To, lease: LeaseId) {
        let Claimed {
            mut message,
            known,
            taken_over,
            ..
        } = claimed;
        if taken_over != TakenOver::No {
            log::debug!(event = "taken_over", sequence = message.sequence.0, topic = message.topic, attempts = message.attempts; "a message was taken over from a relay that died");
        }
        let number = match to {
            To::Bulkhead(number) => number,
            To::Split => self.shared.bulkheads.len() - 1,
        };
        let bulkhead = &self.shared.bulkheads[number];
        let abandoned = || {
            let error = "the relay that had claimed it died or lost its lease";
            Failure::new(ReasonCode::Abandoned, error)
        };
        let verdict = if known == Known::Delivered {
            Verdict::Deduplicated
        } else if known == Known::OtherContent {
            let error = "the key was delivered before, with another topic or payload";
            Verdict::Dead(Failure::new(ReasonCode::IdempotencyConflict, error), 0)
        } else if to == To::Split {
            Verdict::Split(self.destinations_of(&message))
        } else if taken_over == TakenOver::Again {
            Verdict::of_failure(abandoned(), message.attempts, &bulkhead.retries)
        } else if taken_over == TakenOver::Once && message.attempts >= bulkhead.retries.max_attempts
        {
            // The takeover was the last attempt that its destination allows.
            Verdict::Dead(abandoned(), 0)
        } else {
            match self.intakes[number].jobs.try_send(Job { message, lease }) {
                Ok(()) => return,
                // It has room for what is claimed here, since nobody else fills it; hardly ever not
                // for what the settler has claimed besides.
                Err(TrySendError::Full(job)) => {
                    message = job.message;
                    Verdict::Released
                }
                // When the senders are gone, so is the relay, and its lease leads to a takeover.
                Err(TrySendError::Disconnected(_)) => return,
            }
        };
        // Not needed any more: the settle works on the stored row.
        message.payload = String::new();
        let settlement = Settlement::unsent(message, lease, verdict).to(bulkhead.name.clone());
        let _ = self.outcomes.send(settlement);
    }

    fn destinations_of(&self, message: &Message) -> Vec<String> {
        match self
            .shared
            .routes
            .find(&message.topic, &message.destination)
        {
            Way::Split(numbers) => numbers
                .iter()
                .map(|number| self.shared.bulkheads[*number].name.to_string())
                .collect(),
            Way::To(_) | Way::NoRoute | Way::UnknownDestination => Vec::new(),
        }
    }
}

/// What is about to be claimed.
#[derive(Default)]
struct Picked {
    candidates: Vec<Candidate>,
    /// Passed over: their destinations have no room.
    without_room: Vec<(To, ordered::Key)>,
    /// Not looked at any more.
    beyond: Vec<ordered::Key>,
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
