//! The claim thread: it does what the planner says, tells it what came of that, and hands claimed messages to
//! the senders.

mod claims;
mod filters;
mod hand_over;
mod statements;
mod waiting;

#[cfg(test)]
pub(super) use self::waiting::SOON;

use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use self::hand_over::By;
use super::database::{Answer, Database};
use super::intake::{Intake, Payloads, doors};
use super::job::Job;
use super::pauses;
use super::planner::{Planner, Settings, Step, View, Wait};
use super::settlement::{Outcomes, Settlement};
use super::shared::Shared;
use super::told::Told;
use super::verdict::Verdict;
use super::wanted::Want;
use crate::clock;

/// How long a relay that ends goes on to give back what nobody knows of.
const MOST_AT_END: Duration = Duration::from_secs(2);

pub(crate) struct Claimer<'a, D> {
    shared: &'a Shared,
    planner: Planner<'a>,
    db: D,
    /// One for each bulkhead.
    intakes: Vec<Intake>,
    /// Of messages for several destinations.
    split_payloads: Payloads,
    outcomes: Outcomes,
    inbox: Receiver<Told>,
}

/// What the claimer does next.
pub(super) enum Turn {
    GoOn,
    Wait(Wait),
    /// The database has failed: a pause.
    Pause(Duration),
}

impl<'a, D: Database> Claimer<'a, D> {
    pub(crate) fn new(
        shared: &'a Shared,
        queues: Vec<Sender<Job>>,
        outcomes: Outcomes,
        inbox: Receiver<Told>,
        db: D,
    ) -> Self {
        let settings = Settings {
            is_enabled: shared.config.enabled,
            poll_interval: shared.config.poll_interval,
            moment: shared.moment(),
        };
        let names = shared.bulkheads.iter().map(|bulkhead| &*bulkhead.name);
        Self {
            shared,
            planner: Planner::new(clock::now(), settings, &shared.routes, names.collect()),
            db,
            intakes: queues.into_iter().map(Intake::new).collect(),
            split_payloads: Payloads::default(),
            outcomes,
            inbox,
        }
    }

    /// Claims until the relay stops. A full claim is followed at once by another.
    pub(crate) fn run(mut self) {
        while !self.shared.is_stopping() {
            match self.turn() {
                Turn::GoOn => {}
                Turn::Wait(wait) => self.wait_for(wait),
                Turn::Pause(pause) => self.shared.pause(pause),
            }
        }
        self.finish();
    }

    /// One step of what the planner says.
    pub(super) fn turn(&mut self) -> Turn {
        self.hear();
        let view = self.view();
        let step = self.planner.next(clock::now(), &view);
        self.publish();
        let done = self.act(step, &view);
        if done.is_err() {
            self.planner.failed();
        }
        self.publish();
        match done {
            Ok(None) => Turn::GoOn,
            Ok(Some(wait)) => Turn::Wait(wait),
            Err(_) => Turn::Pause(self.db.wait()),
        }
    }

    /// The relay stops.
    pub(super) fn finish(mut self) {
        self.finish_undoing();
        // The senders may be busy for long: what waits for them goes back now.
        let bulkheads = &self.shared.bulkheads;
        let intakes = self.intakes.iter_mut().zip(bulkheads);
        let waiting = intakes.flat_map(|(intake, bulkhead)| intake.take_back(bulkhead));
        let registered = self.shared.registered.turns().take_all();
        for job in waiting.chain(registered) {
            let settlement = Settlement::unsent(job, bulkheads, Verdict::Released);
            let _ = self.outcomes.send(settlement);
        }
    }

    /// Takes what others have told, and tells the planner.
    fn hear(&mut self) {
        self.fill_queues();
        while let Ok(told) = self.inbox.try_recv() {
            self.hear_of(told);
        }
        if self.shared.signals.news.ear.try_recv().is_ok() {
            self.planner.has_news();
        }
        let shared = self.shared;
        self.planner.look_at_unserved(clock::now(), || {
            let unrouted = shared.unrouted().into_iter();
            unrouted.map(|one| one.topic).collect()
        });
    }

    fn hear_of(&mut self, told: Told) {
        match told {
            Told::Continued(jobs) => {
                self.hand_over(By::Settler, jobs);
                // The settlers go on with no more of a topic that has no place.
                self.publish();
            }
            Told::Returned(returned) => self.planner.returned(returned),
            Told::Vanished(leases) => self.planner.vanished(leases),
        }
    }

    /// How others stand now.
    fn view(&self) -> View {
        let shared = self.shared;
        // First: a look that begins now answers the question, and what was given back unsent is counted where it is
        // not in flight any more.
        let in_flight = shared.seen_by_claimer();
        let (doors, room_to_split) = doors(shared, &self.intakes, &self.split_payloads);
        let registered = shared.rooms();
        let lease = shared.lease.current();
        View {
            lease,
            may_send: lease.is_some_and(|lease| shared.lease.may_send(lease)),
            doors,
            registered,
            room_to_split,
            is_queue_full: self.intakes.iter().any(Intake::is_full),
            left_to_claim: self.left_to_claim(),
            ..in_flight
        }
    }

    /// Where only so many messages are to be claimed.
    fn left_to_claim(&self) -> Option<usize> {
        let limit = self.shared.limit?;
        let stats = self.shared.stats();
        // What was given back unsent, or became other messages, was not sent yet.
        let given_back = stats.released + stats.split;
        let left = limit
            .saturating_add(given_back)
            .saturating_sub(stats.claimed);
        Some(usize::try_from(left).unwrap_or(usize::MAX))
    }

    /// Tells others what they are to know.
    fn publish(&mut self) {
        if let Some(policy) = self.planner.take_policy() {
            self.shared.set_policy(policy);
        }
    }

    /// Does what the planner says.
    fn act(&mut self, step: Step, view: &View) -> Answer<Option<Wait>> {
        match step {
            Step::Again => {}
            Step::Wait(wait) => return Ok(Some(wait)),
            Step::LookAgain => return self.look_again(),
            Step::LookForLate(look) => self.look_for_late(look)?,
            Step::Resolve(doubt) => return self.resolve(doubt),
            Step::EndDoubt { lease, given_back } => self.end_doubt(lease, given_back),
            Step::Undo(part) => self.undo(&part)?,
            Step::Gates { may_probe } => {
                pauses::follow_up(self.shared, &mut self.db, may_probe)?;
            }
            Step::Survey(survey) => self.survey(survey)?,
            Step::LoseLease(lease) => {
                self.shared.lose_lease(lease);
                self.shared.signals.pulse.ring();
            }
            Step::ExpireUnserved { stream, after } => self.expire(&stream, after)?,
            Step::Claim { plain, keyed, room } => self.claim(&plain, &keyed, room)?,
            Step::Keys(keys) => self.look_at(keys, view)?,
            Step::Walk(from) => self.walk(&from, view)?,
            Step::Patrol(range) => self.patrol(range, view)?,
        }
        Ok(None)
    }

    /// Two looks: the second one when the flags are up by which senders know that they have to ring.
    fn look_again(&mut self) -> Answer<Option<Wait>> {
        self.shared.wanted.want(Want::Room);
        let view = self.view();
        let step = self.planner.look_again(clock::now(), &view);
        if !step.waits_for_room() {
            self.shared.wanted.no_more(Want::Room);
        }
        self.act(step, &view)
    }

    /// At the end of the relay: what is left of a pass is done, if that takes no longer than a moment. Otherwise
    /// the lease is in doubt still, and is left to expire.
    fn finish_undoing(&mut self) {
        let until = clock::now() + MOST_AT_END;
        while clock::now() < until && !self.shared.is_abandoned() {
            let Some(step) = self.planner.undo_a_part() else {
                return;
            };
            if self.act(step, &View::default()).is_err() {
                return;
            }
        }
    }
}
