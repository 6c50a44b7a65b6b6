//! The claimer thread: executes the planner's steps, reports their results to the planner, and hands claimed messages
//! to the senders.

mod claims;
pub(super) mod custody;
pub(super) mod doubt;
pub(crate) mod fate;
mod hand_over;
mod intake;
pub(crate) mod sql;
mod statements;
pub(crate) mod told;
mod waiting;

#[cfg(test)]
pub(crate) use self::waiting::SOON;

use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use self::hand_over::By;
use self::intake::{Intake, Payloads, doors};
use self::told::Told;
use super::host::database::{Database, DatabaseResult};
use super::host::shared::Shared;
use super::plan::{Planner, Report, Step, Timing, View, Wait};
use super::send::gate::ExchangeTime;
use super::send::job::Job;
use super::send::pauses;
use super::send::verdict::Verdict;
use super::settle::settlement::{Outcomes, Settlement};
use super::workers::Keeper;
use crate::clock;

/// For how long a relay that is shutting down continues to release messages it does not know.
const MOST_AT_END: Duration = Duration::from_secs(2);

pub(crate) struct Claimer<'a, D> {
    shared: &'a Shared,
    planner: Planner<'a>,
    db: D,
    /// One intake for each bulkhead.
    intakes: Vec<Intake>,
    /// The sizes of messages to be fanned out.
    split_payloads: Payloads,
    outcomes: Outcomes,
    inbox: Receiver<Told>,
    /// Reads the members. `None`: this relay knows none.
    keeper: Option<Box<dyn Keeper<D> + 'a>>,
    /// Whether the pauses have been read.
    knows_pauses: bool,
    /// The connections that were lost before the last survey: what the server had answered there may be lost, too.
    lost: u64,
    /// Whether the topics that this relay serves are recorded, or need not be.
    is_recorded: bool,
}

/// The result of a turn of the claimer.
pub(crate) enum ClaimTurn {
    Continue,
    Wait(Wait),
    /// The database has failed: pause for this long.
    Pause(Duration),
}

impl<'a, D: Database> Claimer<'a, D> {
    pub(crate) fn new(
        shared: &'a Shared,
        queues: Vec<Sender<Job>>,
        outcomes: Outcomes,
        inbox: Receiver<Told>,
        keeper: Option<Box<dyn Keeper<D> + 'a>>,
        db: D,
    ) -> Self {
        let settings = &shared.settings;
        let timing = Timing {
            is_enabled: settings.enabled,
            poll_interval: settings.poll_interval,
            moment: shared.moment(),
        };
        let names = shared.bulkheads.iter().map(|bulkhead| &*bulkhead.name);
        Self {
            shared,
            planner: Planner::new(
                clock::now(),
                timing,
                shared.directory.roster(),
                names.collect(),
            ),
            db,
            intakes: queues.into_iter().map(Intake::new).collect(),
            split_payloads: Payloads::default(),
            outcomes,
            inbox,
            keeper,
            knows_pauses: false,
            lost: 0,
            is_recorded: !settings.enabled || !(settings.single_active || shared.is_one_shot),
        }
    }

    /// Claims until the relay stops. After a full claim, the next claim follows at once.
    pub(crate) fn run(mut self) {
        while !self.shared.is_stopping() {
            match self.turn() {
                ClaimTurn::Continue => {}
                ClaimTurn::Wait(wait) => self.wait_for(wait),
                ClaimTurn::Pause(pause) => self.shared.pause(pause),
            }
        }
        self.finish();
    }

    /// Executes one step of the planner.
    pub(crate) fn turn(&mut self) -> ClaimTurn {
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
            Ok(None) => ClaimTurn::Continue,
            Ok(Some(wait)) => ClaimTurn::Wait(wait),
            Err(_) => ClaimTurn::Pause(self.db.after().wait),
        }
    }

    /// Ends the claimer when the relay stops: releases the messages that wait for a sender.
    pub(crate) fn finish(mut self) {
        self.finish_undoing();
        // The senders may be busy for long, so the messages that wait for them are released now.
        let bulkheads = &self.shared.bulkheads;
        let intakes = self.intakes.iter_mut().zip(bulkheads);
        let waiting = intakes.flat_map(|(intake, bulkhead)| intake.take_back(bulkhead));
        let of_members = self.shared.directory.take_back();
        for job in waiting.chain(of_members) {
            let settlement = Settlement::unsent(job, bulkheads, Verdict::Released);
            let _ = self.outcomes.send(settlement);
        }
    }

    /// Reads the bells and the inbox, and reports to the planner.
    fn hear(&mut self) {
        self.fill_queues();
        while let Ok(told) = self.inbox.try_recv() {
            self.hear_of(told);
        }
        if self.shared.signals.news.ear.try_recv().is_ok() {
            self.planner.hear(Report::News);
        }
    }

    fn hear_of(&mut self, told: Told) {
        match told {
            Told::Continued(jobs) => {
                self.hand_over(By::Settler, jobs);
                // The settlers must not claim more messages of a topic without room.
                self.publish();
            }
            Told::Report(report) => self.planner.hear(report),
        }
    }

    /// The current state of the other threads.
    fn view(&self) -> View {
        let shared = self.shared;
        // Read first: a look that begins now answers the question, and a released message that is no longer in flight
        // is already counted as released.
        let custody = shared.custody.seen();
        let (doors, room_to_split, room_of_feeds) =
            doors(shared, &self.intakes, &self.outcomes, &self.split_payloads);
        let lease = shared.lease.current();
        View {
            custody,
            lease,
            may_send: lease.is_some_and(|lease| shared.lease.may_send(lease)),
            doors,
            rooms: shared.rooms(),
            room_to_split,
            room_of_feeds,
            is_queue_full: self.intakes.iter().any(Intake::is_full),
            left_to_claim: self.left_to_claim(),
        }
    }

    /// How many messages are left to claim, if the number is limited.
    fn left_to_claim(&self) -> Option<usize> {
        let limit = self.shared.limit?;
        let stats = self.shared.stats();
        // Released and fanned-out messages were not sent yet.
        let released = stats.released + stats.split;
        let left = limit.saturating_add(released).saturating_sub(stats.claimed);
        Some(usize::try_from(left).unwrap_or(usize::MAX))
    }

    /// Publishes the planner's policy for the other threads.
    fn publish(&mut self) {
        if let Some(policy) = self.planner.take_policy() {
            self.shared.set_policy(policy);
        }
    }

    /// Executes a step.
    fn act(&mut self, step: Step, view: &View) -> DatabaseResult<Option<Wait>> {
        match step {
            Step::Again => {}
            Step::Wait(wait) => return Ok(Some(wait)),
            Step::LookAgain => return self.look_again(),
            Step::Undo(undo) => self.undo(undo)?,
            Step::Gates { may_probe } => {
                let keeper = self.keeper.as_deref_mut();
                let when = ExchangeTime::Running { may_probe };
                pauses::exchange(self.shared, keeper, &mut self.db, when)?;
            }
            Step::Survey(survey) => self.survey(survey)?,
            Step::LoseLease(lease) => {
                self.shared.lose_lease(lease);
                self.shared.signals.pulse.ring();
            }
            Step::Search(ask) => self.search(ask, view)?,
            Step::Claim { plain, keyed, room } => self.claim(&plain, &keyed, room)?,
        }
        if !self.is_recorded && self.shared.stats().claimed > 0 {
            self.record_topics()?;
        }
        Ok(None)
    }

    /// Plans again after the flag is set that makes senders ring for room: room made before the flag must not be
    /// missed.
    fn look_again(&mut self) -> DatabaseResult<Option<Wait>> {
        self.shared.custody.room_wanted.want();
        let view = self.view();
        let step = self.planner.look_again(clock::now(), &view);
        if !matches!(&step, Step::Wait(wait) if wait.what.is_room()) {
            self.shared.custody.room_wanted.no_more();
        }
        self.act(step, &view)
    }

    /// At the end of the relay, completes the release of unknown messages, for at most [`MOST_AT_END`]. If messages
    /// remain, the lease stays in doubt and is left to expire.
    fn finish_undoing(&mut self) {
        let until = clock::now() + MOST_AT_END;
        while clock::now() < until && !self.shared.is_abandoned() {
            let (now, lease) = (clock::now(), self.planner.lease);
            let undo = self.planner.undo(now, lease, self.shared.custody.doubt());
            // Nothing is in doubt, or the next step is due later.
            let Some(undo) = undo else { return };
            if self.undo(undo).is_err() {
                return;
            }
        }
    }
}
