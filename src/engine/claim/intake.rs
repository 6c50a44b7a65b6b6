//! How much may be claimed: the room in the queues, the memory and the settlers.

use std::collections::VecDeque;

use crossbeam_channel::{Sender, TrySendError};

use crate::engine::host::shared::Shared;
use crate::engine::plan::Door;
use crate::engine::plan::to::To;
use crate::engine::send::bulkhead::{Bulkhead, SendsTo};
use crate::engine::send::gate::Room;
use crate::engine::send::job::Job;
use crate::engine::send::limits::FIRST_BATCH;
use crate::engine::settle::settlement::Outcomes;

/// The entry to the queue of a bulkhead.
pub(super) struct Intake {
    queue: Sender<Job>,
    /// The jobs that the queue has no room for: settlers claim next messages of keys while the claimer claims others.
    waiting: VecDeque<Job>,
    pub(super) payloads: Payloads,
}

/// The largest recent mean size of the messages of a claim, in bytes.
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

    /// Hands a job to the senders, behind all earlier jobs.
    pub(super) fn put(&mut self, job: Job) {
        self.waiting.push_back(job);
        self.fill();
    }

    /// Fills the queue with the waiting jobs.
    pub(super) fn fill(&mut self) {
        while let Some(job) = self.waiting.pop_front() {
            match self.queue.try_send(job) {
                Ok(()) => {}
                Err(TrySendError::Full(job)) => {
                    self.waiting.push_front(job);
                    return;
                }
                // Without senders the relay has ended, and its messages are taken over when the lease expires.
                Err(TrySendError::Disconnected(_)) => return self.waiting.clear(),
            }
        }
    }

    /// Whether jobs wait for room in the queue.
    pub(super) fn is_full(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes all jobs that no sender has taken.
    pub(super) fn take_back(&mut self, bulkhead: &Bulkhead) -> impl Iterator<Item = Job> {
        bulkhead.jobs.try_iter().chain(self.waiting.drain(..))
    }

    fn len(&self) -> usize {
        self.queue.len() + self.waiting.len()
    }

    /// How many messages a claim may return. `taken` is the number of messages that have left the queue and are not yet
    /// with a sender.
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

    /// Whether there is room for another message that the claimer did not plan for.
    pub(super) fn has_place(&self, bulkhead: &Bulkhead) -> bool {
        match bulkhead.gate.room() {
            Room::Closed => false,
            Room::One => self.len() == 0,
            Room::Free => self.len() < 2 * bulkhead.queue() && !bulkhead.is_overloaded(),
        }
    }
}

/// Fills all queues. If jobs still wait, `want_room` makes the senders ring when they make room.
pub(super) fn fill_all(intakes: &mut [Intake], want_room: impl FnOnce()) {
    intakes.iter_mut().for_each(Intake::fill);
    if intakes.iter().any(Intake::is_full) {
        want_room();
        // Once more, because a sender that made room before the flag was set did not ring.
        intakes.iter_mut().for_each(Intake::fill);
    }
}

impl Payloads {
    /// How many messages one claim may return, so that their payloads do not fill the memory.
    fn batch(&self, most: usize, most_bytes: usize) -> usize {
        match self.0 {
            None => most.min(FIRST_BATCH),
            Some(bytes) => most.min((most_bytes / bytes.max(1)).max(1)),
        }
    }

    /// Learns the mean size of a claim's messages. The value rises at once and falls slowly.
    pub(super) fn learn(&mut self, count: usize, bytes: usize) {
        if let Some(mean) = bytes.checked_div(count) {
            let before = self.0.unwrap_or_default();
            self.0 = Some(mean.max(before - before / 8));
        }
    }
}

/// The room of each destination, how many messages to be fanned out a claim may return, and how many for feeds of members. With a backlog, claims are
/// as large as the batch, so a queue must have room for a whole batch.
pub(super) fn doors(
    shared: &Shared,
    intakes: &[Intake],
    outcomes: &Outcomes,
    to_split: &Payloads,
) -> (Vec<Door>, usize, usize) {
    // Only a stop of the settlers stops the claimer: a slow destination does not affect the others.
    let stands_still = outcomes.waiting() > 2 * shared.batch();
    let moving = shared.directory.moving();
    let splitting = shared.custody.of_way(To::Split);
    let doors = shared.bulkheads.iter().zip(intakes);
    let doors = doors.map(|(bulkhead, intake)| {
        let room = bulkhead.gate.room();
        Door {
            is_open: room != Room::Closed,
            opens_at: bulkhead.gate.opens_at(),
            room: match room {
                _ if stands_still => 0,
                room => match bulkhead.serves {
                    // Messages for slow destinations take no room from the others.
                    SendsTo::Members(_) => intake.room(bulkhead, room, moving),
                    _ => intake.room(bulkhead, room, 0),
                },
            },
        }
    });
    // Messages to be fanned out have no queue, but their payloads are in the claim.
    let bytes = shared.bulkheads.iter().map(|b| b.most_bytes).min();
    // Some of these messages may go to members at once. Others are fanned out piece by piece, and
    // wait for one another: the settlers put off what a tenant has too many of.
    let is_behind = splitting > shared.settings.batch / 2;
    let is_full = moving > 2 * shared.settings.batch;
    let to_split = match stands_still || is_behind || is_full {
        true => 0,
        false => to_split.batch(shared.settings.batch, bytes.unwrap_or(0)),
    };
    let of_feeds = match stands_still {
        true => 0,
        false => shared.settings.batch,
    };
    (doors.collect(), to_split, of_feeds)
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::bounded;

    use super::*;
    use crate::engine::lease::sql::lease::LeaseId;
    use crate::engine::plan::tests::claimed;
    use crate::engine::send::job::Terms;

    /// The last sender may empty the queue after the check and before the flag is set, and then sleep without a ring.
    #[test]
    fn a_queue_that_is_emptied_before_the_flags_are_up_is_filled_at_once() {
        let (jobs, queue) = bounded(1);
        let mut intake = Intake::new(jobs);
        for sequence in 1..=2 {
            let message = claimed(sequence, "a", None).message;
            let to = To::Bulkhead(0);
            intake.put(Job::new(message, LeaseId(1), to, Terms::default()));
        }
        assert!(intake.is_full());
        let mut intakes = [intake];
        fill_all(&mut intakes, || drop(queue.try_recv()));
        assert!(!intakes[0].is_full(), "no sender would ring");
        assert_eq!(queue.len(), 1);
    }
}
