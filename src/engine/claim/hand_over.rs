//! Hands claimed messages to a queue of senders, or straight to the settlers.

use super::Claimer;
use crate::engine::host::database::Database;
use crate::engine::plan::Report;
use crate::engine::plan::to::To;
use crate::engine::send::bulkhead::SendsTo;
use crate::engine::send::job::Job;
use crate::engine::send::verdict::Verdict;
use crate::engine::settle::settlement::Settlement;

/// The thread that has claimed a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// The claimer, which claims only as much as there is room for.
    Claimer,
    /// A settler, which does not know the room.
    Settler,
}

impl<D: Database> Claimer<'_, D> {
    pub(super) fn hand_over(&mut self, by: By, mut jobs: Vec<Job>) {
        jobs.sort_unstable_by_key(|job| job.message.sequence);
        self.learn_payloads(&jobs);
        let mut of_members = Vec::new();
        for mut job in jobs {
            for message in job.messages() {
                self.planner.hear(Report::Claimed(message.sequence.0));
            }
            let bulkhead = job.to.bulkhead(&self.shared.bulkheads);
            let verdict = match (job.unsent.take(), bulkhead) {
                (None, Some(bulkhead)) if matches!(bulkhead.serves, SendsTo::Members(_)) => {
                    of_members.push(job);
                    continue;
                }
                (None, Some(bulkhead)) => {
                    let number = bulkhead.number;
                    let intake = &mut self.intakes[number];
                    if by == By::Claimer || intake.has_place(bulkhead) {
                        intake.put(job);
                        continue;
                    }
                    let topic = job.message.topic.clone();
                    self.planner.hear(Report::NoPlace(topic, job.to));
                    Verdict::Released
                }
                (unsent, _) => unsent.unwrap_or(Verdict::Released),
            };
            let settlement = Settlement::unsent(job, &self.shared.bulkheads, verdict);
            let _ = self.outcomes.send(settlement);
        }
        self.shared.directory.put(of_members);
    }

    /// Learns the sizes of the messages for each destination, and of the messages to be fanned out.
    fn learn_payloads(&mut self, jobs: &[Job]) {
        let mut seen = vec![(0, 0); self.intakes.len()];
        let mut to_split = (0, 0);
        for job in jobs {
            let size = job.bytes() + bytes_of_destinations(job);
            let add = |(count, bytes): &mut (usize, usize)| {
                *count += job.len();
                *bytes += size;
            };
            // The message was claimed to be fanned out, but goes at once to the only destination that wants it.
            let was_to_split =
                matches!(job.to, To::Member(_) | To::Feed(_)) && job.message.destination.is_empty();
            if was_to_split || job.to == To::Split {
                add(&mut to_split);
            }
            if let Some(bulkhead) = job.to.bulkhead(&self.shared.bulkheads) {
                add(&mut seen[bulkhead.number]);
            }
        }
        let payloads = self.intakes.iter_mut().map(|one| &mut one.payloads);
        let payloads = payloads.chain([&mut self.split_payloads]);
        for (payloads, (count, bytes)) in payloads.zip(seen.into_iter().chain([to_split])) {
            payloads.learn(count, bytes);
        }
    }
}

/// The memory of the list of a message's destinations, if the message is to be fanned out.
fn bytes_of_destinations(job: &Job) -> usize {
    let Some(Verdict::Split(parts)) = &job.unsent else {
        return 0;
    };
    let bytes = |name: &String| size_of::<String>() + name.len();
    parts.to.iter().map(bytes).sum()
}
