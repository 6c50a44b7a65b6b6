//! How much may be claimed: what the queues, the memory and the settler can take.

use std::collections::VecDeque;

use crossbeam_channel::{Sender, TrySendError};

use super::bulkhead::{Bulkhead, FIRST_BATCH, Serves};
use super::gate::Room;
use super::job::Job;
use super::planner::Door;
use super::shared::Shared;

/// The way into the queue of a bulkhead, and what is known of what goes there.
pub(super) struct Intake {
    queue: Sender<Job>,
    /// What the queue had no room for: keys go on while others are claimed.
    waiting: VecDeque<Job>,
    pub(super) payloads: Payloads,
}

/// The largest mean of a message's bytes that a claim has shown lately.
#[derive(Debug, Default)]
pub(super) struct Payloads(Option<usize>);

impl Intake {
    pub(super) fn new(queue: Sender<Job>) -> Self {
        Self {
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
            match self.queue.try_send(job) {
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
    pub(super) fn take_back(&mut self, bulkhead: &Bulkhead) -> impl Iterator<Item = Job> {
        bulkhead.jobs.try_iter().chain(self.waiting.drain(..))
    }

    fn len(&self) -> usize {
        self.queue.len() + self.waiting.len()
    }

    /// Messages that a claim may bring. `taken`: out of the queue, and with no sender yet.
    fn room(&self, bulkhead: &Bulkhead, room: Room, taken: usize) -> usize {
        match room {
            Room::Closed => 0,
            Room::One => usize::from(self.len() == 0),
            Room::Free => {
                let (prefetch, bytes) = (bulkhead.prefetch(), bulkhead.free_bytes());
                let batch = self.payloads.batch(prefetch, bytes);
                let is_free = bytes > 0 && self.len() + taken <= batch;
                if is_free { batch } else { 0 }
            }
        }
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

/// Fills all queues. Where messages still wait for a place, `want_room` has the senders ring when they make some.
pub(super) fn fill_all(intakes: &mut [Intake], want_room: impl FnOnce()) {
    intakes.iter_mut().for_each(Intake::fill);
    if intakes.iter().any(Intake::is_full) {
        want_room();
        // Once more: a sender that made room before the flags were up did not ring.
        intakes.iter_mut().for_each(Intake::fill);
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

/// What may go to each destination, and how many messages to be split a claim may bring. Claims are as large
/// as the batch where there is a backlog: a queue has to have room for a whole one.
pub(super) fn doors(
    shared: &Shared,
    intakes: &[Intake],
    to_split: &Payloads,
) -> (Vec<Door>, usize) {
    // What is neither in a queue nor with a sender waits for the settler. The claimer stands
    // still when settles do, and for nothing else: what a destination holds is its own affair.
    let turns = shared.registered.turns();
    let (taken, moving) = (turns.waiting(), turns.waiting_of_good());
    drop(turns);
    let queued: usize = intakes.iter().map(Intake::len).sum::<usize>() + taken;
    let settling = shared
        .in_flight_beside_handlers()
        .saturating_sub(queued + shared.most_sending());
    let stands_still = settling > 2 * shared.batch();
    let doors = shared.bulkheads.iter().zip(intakes);
    let doors = doors.map(|(bulkhead, intake)| {
        let room = bulkhead.gate.room();
        Door {
            is_open: room != Room::Closed,
            opens_at: bulkhead.gate.opens_at(),
            room: match room {
                _ if stands_still => 0,
                room => match bulkhead.serves {
                    // What waits for those that hang keeps nothing from the others.
                    Serves::Registered => intake.room(bulkhead, room, moving),
                    _ => intake.room(bulkhead, room, 0),
                },
            },
        }
    });
    // What is to be split has no queue; its payloads come with the claim all the same.
    let bytes = shared.bulkheads.iter().map(|b| b.most_bytes).min();
    // Some of it may go to registered destinations at once.
    let to_split = match stands_still || moving > 2 * shared.config.batch {
        true => 0,
        false => to_split.batch(shared.config.batch, bytes.unwrap_or(0)),
    };
    (doors.collect(), to_split)
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::bounded;

    use super::*;
    use crate::relay::planner::tests::claimed;
    use crate::relay::to::To;
    use crate::store::relay::lease::LeaseId;

    /// The last sender may empty the queue between the look at it and the flags, and then goes to sleep: nobody
    /// rings.
    #[test]
    fn a_queue_that_is_emptied_before_the_flags_are_up_is_filled_at_once() {
        let (jobs, queue) = bounded(1);
        let mut intake = Intake::new(jobs);
        for sequence in 1..=2 {
            intake.put(Job {
                message: claimed(sequence, "a", None).message,
                lease: LeaseId(1),
                to: To::Bulkhead(0),
                customer: None,
                unsent: None,
            });
        }
        assert!(intake.is_full());
        let mut intakes = [intake];
        fill_all(&mut intakes, || drop(queue.try_recv()));
        assert!(!intakes[0].is_full(), "nobody would ring for it");
        assert_eq!(queue.len(), 1);
    }
}
