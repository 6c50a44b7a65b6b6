//! The claim thread: takes due messages and hands them to the senders.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::lanes::{Given, Lanes};
use super::session::Session;
use super::settlement::{Settlement, Verdict};
use super::shared::{Job, Shared, add};
use crate::dispatch::Failure;
use crate::error::DatabaseError;
use crate::status::ReasonCode;
use crate::store::claim::{self, Claim, Claimed, Known, Lane, TakenOver};
use crate::store::connection;
use crate::store::lease::{self, LeaseId};
use crate::store::settle;

/// How often, at least, topics and expired leases are looked for.
const SURVEY_INTERVAL: Duration = Duration::from_secs(1);
/// Payload bytes that may wait in the queue. The batch shrinks where payloads are large.
const QUEUE_BYTES: usize = 16 * 1024 * 1024;
/// The first claim, before the size of payloads is known.
const FIRST_BATCH: usize = 32;
/// A claim that takes longer than this is given up and tried again.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Claimer<'a> {
    shared: &'a Shared,
    session: Session,
    jobs: Sender<Job>,
    job_queue: Receiver<Job>,
    outcomes: Sender<Settlement>,
    doorbell: Receiver<()>,
    lanes: Lanes,
    /// Leases that are over, as far as they were seen. A lease that is over stays so.
    known_expired: Vec<i64>,
    /// Leases of others whose messages may be taken.
    expired: Vec<i64>,
    surveyed: Option<Instant>,
    sweep: Option<Sweep>,
    /// A claim without an answer: it may have worked, or be at work still.
    doubtful: Option<Doubt>,
    /// The largest mean of payload bytes that a claim has shown lately.
    payload_bytes: Option<usize>,
}

impl<'a> Claimer<'a> {
    pub(crate) fn new(
        shared: &'a Shared,
        jobs: Sender<Job>,
        job_queue: Receiver<Job>,
        outcomes: Sender<Settlement>,
        doorbell: Receiver<()>,
    ) -> Self {
        Self {
            shared,
            session: shared.session("claimer", STATEMENT_TIMEOUT),
            jobs,
            job_queue,
            outcomes,
            doorbell,
            lanes: Lanes::default(),
            known_expired: Vec::new(),
            expired: Vec::new(),
            surveyed: None,
            sweep: None,
            doubtful: None,
            payload_bytes: None,
        }
    }

    /// Claims until the relay stops. A full claim is followed at once by another.
    pub(crate) fn run(mut self) {
        self.claim_until_stop();
        // The senders may be busy for long: what waits for them goes back now.
        for Job { message, lease } in self.job_queue.try_iter() {
            let settlement = Settlement::unsent(message, lease, Verdict::Released);
            let _ = self.outcomes.send(settlement);
        }
        if self.doubtful.is_some() {
            // The lease has to expire by itself, so that others find what it may hold.
            self.shared.keep_lease.store(true, Ordering::Release);
        }
    }

    fn claim_until_stop(&mut self) {
        while !self.shared.is_stopping() {
            let question = self.shared.idle().question();
            if !self.shared.config.enabled {
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
            let Some(room) = self.room_or_wait() else {
                continue;
            };
            let room = self.within_limit(room);
            match self.look(lease, room, question) {
                Ok(Found::More) => {}
                Ok(Found::Nothing) => {
                    self.surveyed = None;
                    self.wait(self.shared.config.poll_interval);
                }
                Err(_) => {
                    self.surveyed = None;
                    self.sweep = None;
                    self.shared.pause(self.session.wait());
                }
            }
        }
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

    /// How many messages may be claimed, or `None` after a wait for room. Claims are as large as
    /// the batch where there is a backlog: it waits until the queue takes a whole one.
    fn room_or_wait(&self) -> Option<usize> {
        let batch = self.batch();
        let free = || {
            let queue = (2 * batch).saturating_sub(self.jobs.len());
            let held = self.shared.in_flight.load(Ordering::Acquire);
            queue.min(self.most_in_flight().saturating_sub(held))
        };
        if free() >= batch {
            return Some(batch);
        }
        self.shared.wants_room.store(true, Ordering::Release);
        // Looked at again after the flag is up: a sender that made room before did not ring.
        if free() < batch {
            self.wait(self.shared.config.poll_interval);
        }
        self.shared.wants_room.store(false, Ordering::Release);
        None
    }

    fn within_limit(&self, room: usize) -> usize {
        let Some(limit) = self.shared.limit else {
            return room;
        };
        let left = limit.saturating_sub(self.shared.stats.claimed.load(Ordering::Relaxed));
        room.min(usize::try_from(left).unwrap_or(room))
    }

    /// The queue, what the senders hold, and two batches on their way to be settled. The claimer
    /// stands still when settles do.
    fn most_in_flight(&self) -> usize {
        let config = &self.shared.config;
        self.jobs.capacity().unwrap_or_default() + config.concurrency + 2 * config.batch
    }

    fn batch(&self) -> usize {
        let batch = self.shared.config.batch;
        match self.payload_bytes {
            None => batch.min(FIRST_BATCH),
            Some(bytes) => batch.min((QUEUE_BYTES / bytes.max(1)).max(1)),
        }
    }

    /// Claims once, from as many topics as one claim takes.
    fn look(&mut self, lease: LeaseId, room: usize, question: u64) -> Result<Found, DatabaseError> {
        if room == 0 {
            if self.shared.in_flight.load(Ordering::Acquire) == 0 {
                self.shared.idle().answer(question);
            }
            return Ok(Found::Nothing);
        }
        self.survey(question)?;
        if self.known_expired.contains(&lease.0) {
            // The heartbeat is about to find out.
            return Ok(Found::Nothing);
        }
        let lanes = self.lanes.allot(room);
        let claimed = if lanes.is_empty() {
            Vec::new()
        } else {
            self.claim(lease, room, &lanes)?
        };
        if claimed.is_empty() {
            return Ok(self.found_nothing(lanes.len()));
        }
        self.sweep = None;
        let given = self.lanes.learn(&lanes, &claimed, room);
        let is_all = given == Given::LessThanAsked && self.lanes.are_all(&lanes);
        self.hand_over_all(claimed, lease);
        Ok(if is_all { Found::Nothing } else { Found::More })
    }

    fn claim(
        &mut self,
        lease: LeaseId,
        room: usize,
        lanes: &[Lane],
    ) -> Result<Vec<Claimed>, DatabaseError> {
        let claim = Claim {
            lease,
            lanes,
            room,
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

    /// These lanes had nothing. When that holds for all topics since a survey, nothing is due.
    fn found_nothing(&mut self, lanes: usize) -> Found {
        let Some(sweep) = &mut self.sweep else {
            // Something was found since: begin anew.
            self.surveyed = None;
            return Found::More;
        };
        sweep.topics_left = sweep.topics_left.saturating_sub(lanes);
        if sweep.topics_left > 0 {
            return Found::More;
        }
        if sweep.nothing_in_flight {
            self.shared.idle().answer(sweep.question);
        }
        self.sweep = None;
        Found::Nothing
    }

    /// Looks for topics and for leases that are over, where that was not done lately.
    fn survey(&mut self, question: u64) -> Result<(), DatabaseError> {
        let is_recent = self
            .surveyed
            .is_some_and(|at| at.elapsed() < SURVEY_INTERVAL);
        if is_recent || (self.sweep.is_some() && self.surveyed.is_some()) {
            return Ok(());
        }
        let nothing_in_flight = self.shared.in_flight.load(Ordering::Acquire) == 0;
        let name = &self.shared.config.table;
        let known = &self.known_expired;
        let (topics, newly_expired) = self.session.run(|conn| {
            let topics = claim::topics(conn, name)?;
            Ok((topics, lease::newly_expired(conn, name, known)?))
        })?;
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
        self.sweep = Some(Sweep {
            question,
            nothing_in_flight,
            topics_left: topics.len(),
        });
        self.lanes.set_topics(topics);
        self.expired = expired;
        self.surveyed = Some(Instant::now());
        Ok(())
    }

    fn hand_over_all(&mut self, mut claimed: Vec<Claimed>, lease: LeaseId) {
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
        let bytes: usize = claimed.iter().map(|c| c.message.payload.len()).sum();
        // Up at once, down slowly.
        let before = self.payload_bytes.unwrap_or_default();
        self.payload_bytes = Some((bytes / count.max(1)).max(before - before / 8));
        claimed.sort_unstable_by_key(|c| c.message.sequence);
        for one in claimed {
            self.hand_over(one, lease);
        }
    }

    /// To a sender, or straight to the settler where nothing has to be sent.
    fn hand_over(&self, claimed: Claimed, lease: LeaseId) {
        let Claimed {
            message,
            known,
            taken_over,
        } = claimed;
        if taken_over != TakenOver::No {
            log::debug!(event = "taken_over", sequence = message.sequence.0, topic = message.topic, attempts = message.attempts; "a message was taken over from a relay that died");
        }
        let verdict = if known == Known::Delivered {
            Verdict::Deduplicated
        } else if known == Known::OtherContent {
            let error = "the key was delivered before, with another topic or payload";
            Verdict::Dead(Failure::new(ReasonCode::IdempotencyConflict, error), 0)
        } else if taken_over == TakenOver::Again {
            let error = "the relay that had claimed it died or lost its lease";
            let failure = Failure::new(ReasonCode::Abandoned, error);
            Verdict::of_failure(failure, message.attempts, &self.shared.config)
        } else {
            // The queue has room: nobody else fills it. When the senders are gone, so is the
            // relay, and its lease leads to a takeover.
            let _ = self.jobs.send(Job { message, lease });
            return;
        };
        let settlement = Settlement::unsent(message, lease, verdict);
        let _ = self.outcomes.send(settlement);
    }
}

/// A claim without an answer.
#[derive(Debug, Clone, Copy)]
struct Doubt {
    lease: LeaseId,
    /// The server's process that it ran in.
    backend: Option<i32>,
}

/// What a claim leaves to be claimed.
enum Found {
    /// More may be due.
    More,
    /// Nothing is due now.
    Nothing,
}

/// A look at all topics, which may take several claims, as long as it finds nothing.
struct Sweep {
    /// The last question when it began.
    question: u64,
    nothing_in_flight: bool,
    topics_left: usize,
}
