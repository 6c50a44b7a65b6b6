//! How much may be claimed: what the queues, the memory and the settler can take.

use std::collections::VecDeque;

use crossbeam_channel::{Receiver, Sender, TrySendError};

use super::bulkhead::{Bulkhead, FIRST_BATCH};
use super::gate::Room;
use super::lanes::To;
use super::shared::{Job, Shared};

/// The queue of a bulkhead, and what is known of what goes into it.
pub(super) struct Intake {
    pub(super) jobs: Sender<Job>,
    pub(super) queue: Receiver<Job>,
    /// What the queue had no room for: keys go on while others are claimed.
    waiting: VecDeque<Job>,
    pub(super) payloads: Payloads,
}

/// The largest mean of a message's bytes that a claim has shown lately.
#[derive(Debug, Default)]
pub(super) struct Payloads(Option<usize>);

impl Intake {
    pub(super) fn new((jobs, queue): (Sender<Job>, Receiver<Job>)) -> Self {
        Self {
            jobs,
            queue,
            waiting: VecDeque::new(),
            payloads: Payloads::default(),
        }
    }

    /// Hands a job to the senders, behind all that was put before.
    pub(super) fn put(&mut self, job: Job) {
        self.waiting.push_back(job);
        self.fill();
    }

    /// Fills the queue with what waits for it.
    pub(super) fn fill(&mut self) {
        while let Some(job) = self.waiting.pop_front() {
            match self.jobs.try_send(job) {
                Ok(()) => {}
                Err(TrySendError::Full(job)) => {
                    self.waiting.push_front(job);
                    return;
                }
                // When the senders are gone, so is the relay, and its lease leads to a takeover.
                Err(TrySendError::Disconnected(_)) => return self.waiting.clear(),
            }
        }
    }

    /// Whether jobs wait for a place in the queue.
    pub(super) fn is_full(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Everything that no sender has taken.
    pub(super) fn take_back(&mut self) -> impl Iterator<Item = Job> {
        self.queue.try_iter().chain(self.waiting.drain(..))
    }

    fn len(&self) -> usize {
        self.jobs.len() + self.waiting.len()
    }

    /// Whether it takes another message that nobody has asked it for.
    pub(super) fn has_place(&self, bulkhead: &Bulkhead) -> bool {
        match bulkhead.gate.room() {
            Room::Closed => false,
            Room::One => self.len() == 0,
            Room::Free => self.len() < 2 * bulkhead.queue() && !bulkhead.is_overloaded(),
        }
    }
}

impl Payloads {
    /// Messages that one claim may bring, so that their payloads do not fill the memory.
    fn batch(&self, most: usize, most_bytes: usize) -> usize {
        match self.0 {
            None => most.min(FIRST_BATCH),
            Some(bytes) => most.min((most_bytes / bytes.max(1)).max(1)),
        }
    }

    /// Up at once, down slowly.
    pub(super) fn learn(&mut self, count: usize, bytes: usize) {
        if let Some(mean) = bytes.checked_div(count) {
            let before = self.0.unwrap_or_default();
            self.0 = Some(mean.max(before - before / 8));
        }
    }
}

/// How many messages a claim may bring.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    of_bulkheads: Vec<usize>,
    of_split: usize,
}

impl Rooms {
    /// How much each bulkhead can take. Claims are as large as the batch where there is a backlog:
    /// it has to have room for a whole one.
    pub(super) fn now(shared: &Shared, intakes: &[Intake], to_split: &Payloads) -> Self {
        // What is neither in a queue nor with a sender waits for the settler. The claimer stands
        // still when settles do, and for nothing else: what a destination holds is its own affair.
        let queued: usize = intakes.iter().map(Intake::len).sum();
        let settling = shared
            .in_flight_beside_handlers()
            .saturating_sub(queued + shared.most_sending());
        if settling > 2 * shared.batch() {
            return Self::default();
        }
        let of_bulkheads = shared
            .bulkheads
            .iter()
            .zip(intakes)
            .map(|(bulkhead, intake)| match bulkhead.gate.room() {
                Room::Closed => 0,
                Room::One => usize::from(intake.len() == 0),
                Room::Free => {
                    let (prefetch, bytes) = (bulkhead.prefetch(), bulkhead.free_bytes());
                    let batch = intake.payloads.batch(prefetch, bytes);
                    let is_free = bytes > 0 && intake.len() <= batch;
                    if is_free { batch } else { 0 }
                }
            })
            .collect();
        // What is to be split has no queue; its payloads come with the claim all the same.
        let bytes = shared.bulkheads.iter().map(|b| b.most_bytes).min();
        Self {
            of_bulkheads,
            of_split: to_split.batch(shared.config.batch, bytes.unwrap_or(0)),
        }
    }

    pub(super) fn of(&self, to: To) -> usize {
        match to {
            To::Bulkhead(number) => self.of_bulkheads.get(number).copied().unwrap_or(0),
            To::Split => self.of_split,
            To::Nowhere => 0,
        }
    }
}
