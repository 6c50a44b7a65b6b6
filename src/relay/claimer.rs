//! The claim thread: takes due messages and hands them to the senders.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::gate::Room;
use super::intake::{Intake, Payloads, Rooms};
use super::lanes::{Lanes, To};
use super::pauses;
use super::session::Session;
use super::settlement::{Settlement, Verdict};
use super::shared::{Job, Shared, add};
use crate::dispatch::Failure;
use crate::error::DatabaseError;
use crate::message::Message;
use crate::routes::Way;
use crate::status::ReasonCode;
use crate::store::claim::{self, Claim, Claimed, Known, Lane, TakenOver};
use crate::store::connection;
use crate::store::lease::{self, LeaseId};
use crate::store::{pause, settle};

/// How often, at least, topics and expired leases are looked for.
const SURVEY_INTERVAL: Duration = Duration::from_secs(1);
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
    lanes: Lanes,
    /// Leases that are over, as far as they were seen. A lease that is over stays so.
    known_expired: Vec<i64>,
    /// Leases of others whose messages may be taken.
    expired: Vec<i64>,
    surveyed: Option<Instant>,
    look: Look,
    /// A claim without an answer: it may have worked, or be at work still.
    doubtful: Option<Doubt>,
}

/// A look at all lanes, which may take several claims. It begins with a survey.
#[derive(Debug, Default)]
struct Look {
    /// The last question when it began.
    question: u64,
    nothing_in_flight: bool,
    found_nothing: bool,
}

impl<'a> Claimer<'a> {
    pub(crate) fn new(
        shared: &'a Shared,
        queues: Vec<(Sender<Job>, Receiver<Job>)>,
        outcomes: Sender<Settlement>,
        doorbell: Receiver<()>,
    ) -> Self {
        Self {
            shared,
            session: shared.session("claimer", STATEMENT_TIMEOUT),
            intakes: queues.into_iter().map(Intake::new).collect(),
            split_payloads: Payloads::default(),
            outcomes,
            doorbell,
            lanes: Lanes::default(),
            known_expired: Vec::new(),
            expired: Vec::new(),
            surveyed: None,
            look: Look::default(),
            doubtful: None,
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
        if self.doubtful.is_some() {
            // The lease has to expire by itself, so that others find what it may hold.
            self.shared.keep_lease.store(true, Ordering::Release);
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
            if let Some(doubt) = self.doubtful
                && !self.resolve(doubt, lease)
            {
                continue;
            }
            match self.claim_once(lease) {
                Ok(Next::Again) => {}
                Ok(Next::WaitForRoom) => {
                    self.wait(self.until_next_look());
                    self.want_room(false);
                    self.lanes.begin_look();
                }
                Ok(Next::WaitForWork) => {
                    self.wait(self.until_next_look());
                    self.surveyed = None;
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
            self.doubtful = None;
            return true;
        }
        let Some(aside) = self.shared.only_aside() else {
            self.wait(self.shared.config.poll_interval);
            return false;
        };
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
        self.doubtful = None;
        if is_at_work {
            self.shared.lease.lost();
            self.shared.beat_now();
        }
        !is_at_work
    }

    /// Waits for the doorbell or the time.
    fn wait(&self, duration: Duration) {
        // By ring, by time or, when the relay is gone, by disconnection: look again.
        let _ = self.doorbell.recv_timeout(duration);
    }

    /// One claim, from as many lanes as one claim takes and have room.
    fn claim_once(&mut self, lease: LeaseId) -> Result<Next, DatabaseError> {
        pauses::follow_up(self.shared, &mut self.session)?;
        if self.shared.take_news() {
            self.surveyed = None;
        }
        self.survey()?;
        if self.known_expired.contains(&lease.0) {
            // The heartbeat is about to find out.
            return Ok(Next::WaitForWork);
        }
        let limit = self.left_to_claim();
        if limit == Some(0) {
            if self.shared.in_flight.load(Ordering::Acquire) == 0 {
                self.shared.idle().answer(self.look.question);
            }
            return Ok(Next::WaitForWork);
        }
        let rooms = Rooms::now(self.shared, &self.intakes, &self.split_payloads);
        let (asked, ways): (Vec<Lane>, Vec<To>) =
            self.lanes.allot(|to| rooms.of(to)).into_iter().unzip();
        if asked.is_empty() {
            return Ok(self.nothing_to_ask());
        }
        let began = Instant::now();
        let claimed = self.claim(lease, limit, &asked)?;
        let took = began.elapsed();
        self.look.found_nothing &= claimed.is_empty();
        let is_cut = limit.is_some_and(|limit| claimed.len() >= limit);
        self.lanes.learn(&asked, &claimed, is_cut);
        if !claimed.is_empty() {
            let micros = usize::try_from(took.as_micros()).unwrap_or(usize::MAX);
            add(&self.shared.stats.claim_micros, micros);
            self.hand_over_all(claimed, &asked, &ways, lease);
        }
        Ok(Next::Again)
    }

    /// Every lane that has room was asked: wait for room where one has none, or else for work.
    fn nothing_to_ask(&mut self) -> Next {
        // Looked at again after the flags are up: a sender that made room before did not ring.
        self.want_room(true);
        let rooms = Rooms::now(self.shared, &self.intakes, &self.split_payloads);
        if !self.lanes.allot(|to| rooms.of(to)).is_empty() {
            self.want_room(false);
            return Next::Again;
        }
        let is_open = |to: To| match to {
            To::Bulkhead(number) => self.shared.bulkheads[number].gate.room() != Room::Closed,
            To::Split => true,
        };
        if self.lanes.is_anything_left(is_open) {
            return Next::WaitForRoom;
        }
        self.want_room(false);
        if self.shared.bulkheads.iter().any(|b| b.gate.is_due()) {
            // A pause whose time is over was just read: what waits behind it may be sent.
            return Next::Again;
        }
        if self.look.found_nothing && self.look.nothing_in_flight {
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

    fn claim(
        &mut self,
        lease: LeaseId,
        limit: Option<usize>,
        lanes: &[Lane],
    ) -> Result<Vec<Claimed>, DatabaseError> {
        let claim = Claim {
            lease,
            lanes,
            room: limit.unwrap_or(usize::MAX),
            expired: &self.expired,
            max_attempts: self.shared.config.max_attempts,
        };
        let name = &self.shared.config.table;
        let result = self.session.run(|conn| claim::claim(conn, name, &claim));
        if result.as_ref().is_err_and(DatabaseError::is_without_answer) {
            let backend = self.session.backend();
            self.doubtful = Some(Doubt { lease, backend });
        }
        result
    }

    /// Looks for topics, for leases that are over and for pauses, where that was not done lately.
    /// Begins a new look, unless one is under way that has found nothing yet.
    fn survey(&mut self) -> Result<(), DatabaseError> {
        let is_recent = self
            .surveyed
            .is_some_and(|at| at.elapsed() < SURVEY_INTERVAL);
        if is_recent {
            return Ok(());
        }
        let look = Look {
            question: self.shared.idle().question(),
            nothing_in_flight: self.shared.in_flight.load(Ordering::Acquire) == 0,
            found_nothing: true,
        };
        let name = &self.shared.config.table;
        let known = &self.known_expired;
        let (topics, newly_expired, paused) = self.session.run(|conn| {
            let topics = claim::topics(conn, name)?;
            let newly_expired = lease::newly_expired(conn, name, known)?;
            Ok((topics, newly_expired, pause::all(conn, name)?))
        })?;
        let kept_back = pauses::learn(self.shared, &paused);
        // A look of many lanes that has found nothing may take longer than a survey is good for: it
        // goes on, or it would never end. What a dead relay held may be in any lane.
        let is_new_look =
            self.surveyed.is_none() || !self.look.found_nothing || !newly_expired.is_empty();
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
        self.lanes.set_topics(topics, &self.shared.routes, nowhere);
        self.lanes.keep_back(kept_back);
        if is_new_look {
            self.lanes.begin_look();
            self.look = look;
        }
        self.expired = expired;
        self.surveyed = Some(Instant::now());
        Ok(())
    }

    fn hand_over_all(
        &mut self,
        mut claimed: Vec<Claimed>,
        asked: &[Lane],
        ways: &[To],
        lease: LeaseId,
    ) {
        let count = claimed.len();
        add(&self.shared.stats.claims, 1);
        add(&self.shared.stats.claimed, count);
        self.shared.began(lease, count);
        let is_taken_over = |c: &&Claimed| c.taken_over != TakenOver::No;
        let taken_over = claimed.iter().filter(is_taken_over).count();
        if taken_over > 0 {
            add(&self.shared.stats.taken_over, taken_over);
            log::warn!(event = "takeover", messages = taken_over; "messages were taken over from a relay that died or lost its lease");
        }
        let ways: HashMap<(&str, &str), To> = asked
            .iter()
            .zip(ways)
            .map(|(lane, to)| {
                let key = (lane.topic.topic.as_str(), lane.topic.destination.as_str());
                (key, *to)
            })
            .collect();
        // A claim brings what its lanes have; anything else would be told that nothing serves it.
        let nowhere = To::Bulkhead(self.shared.bulkheads.len() - 1);
        claimed.sort_unstable_by_key(|c| c.message.sequence);
        let mut seen = vec![(0, 0); self.intakes.len()];
        let mut seen_to_split = (0, 0);
        for one in claimed {
            let key = (one.message.topic.as_str(), one.message.destination.as_str());
            let to = ways.get(&key).copied().unwrap_or(nowhere);
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
            // The queue has room: nobody else fills it. When the senders are gone, so is the
            // relay, and its lease leads to a takeover.
            let _ = self.intakes[number].jobs.send(Job { message, lease });
            return;
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

/// A claim without an answer.
#[derive(Debug, Clone, Copy)]
struct Doubt {
    lease: LeaseId,
    /// The server's process that it ran in.
    backend: Option<i32>,
}

/// What the claimer does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Another claim.
    Again,
    /// Some lane has more than its queue can take.
    WaitForRoom,
    /// Nothing is due that can be sent.
    WaitForWork,
}
