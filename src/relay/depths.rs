//! Counts the waiting messages and sets the gauges. The janitor counts from time to time.
//!
//! A lane is the waiting messages of one topic and destination.

mod gauges;

use std::time::{Duration, Instant};

pub use self::gauges::DepthGauges;

use super::monitor;
use super::pace::{Last, Pace};
use super::planner::Report;
use super::session::Session;
use super::shared::Shared;
use super::told::Told;
use super::unrouted::{self, Unrouted};
use crate::error::DatabaseError;
use crate::log;
use crate::routes::Way;
use crate::store::operate::depths::{self, Depths, LaneDepth};
use crate::store::relay::claim::Topic;
use crate::store::relay::claimable::is_claimable;
use crate::store::relay::{agreement, topics};

/// Counting takes at most a hundredth of the time.
const PACE: Pace = Pace::new(Duration::from_secs(10), 100);
const HURRIED: Pace = Pace::new(Duration::ZERO, 100);
/// The longest interval between two looks at what the relays record of settings and topics.
const LONGEST_FINDINGS_INTERVAL: Duration = Duration::from_secs(30);
/// The most lanes that are checked when the relay makes no progress.
const MOST_PROBED: usize = 10;

/// Counts messages and sets the gauges.
pub(super) struct Counting<'a> {
    shared: &'a Shared,
    last: Option<Last>,
    pace: Pace,
    /// [`Stats::moves`](super::Stats::moves) at the last count.
    moves: u64,
    gauges: DepthGauges,
    told: unrouted::Told,
    /// The next look at what the relays record of settings and topics.
    next_findings: Instant,
}

impl<'a> Counting<'a> {
    pub(super) fn new(shared: &'a Shared) -> Self {
        Self {
            shared,
            last: None,
            pace: PACE,
            moves: 0,
            gauges: DepthGauges::new(
                &shared.metrics.outbox,
                shared.bulkheads.iter().map(|bulkhead| &*bulkhead.name),
            ),
            told: unrouted::Told::default(),
            next_findings: Instant::now(),
        }
    }

    /// Moves the next count to the earliest permitted time.
    pub(super) fn hurry(&mut self) {
        self.pace = HURRIED;
    }

    /// Something is recorded: the next count looks at it.
    pub(super) fn has_recorded(&mut self) {
        self.next_findings = Instant::now();
    }

    /// The time of the next count.
    pub(super) fn next(&self) -> Instant {
        self.last
            .map_or_else(Instant::now, |last| self.pace.next(last))
    }

    /// Counts, if a count is due.
    pub(super) fn count(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let began = Instant::now();
        if !self.pace.is_due(began, self.last) {
            return Ok(());
        }
        let depths = session.run(depths::depths_of_relay)?;
        self.look_for_findings(session)?;
        (self.last, self.pace) = (Some(Last::since(began)), PACE);
        let registry = self.shared.registered.registry();
        let is_registered = |name: &str| registry.named(name).is_some();
        self.gauges.show_with(&depths, is_registered);
        self.look_for_unrouted(&depths);
        let is_left = self.is_left(session, &depths)?;
        self.shared.threads.set_left(is_left);
        Ok(())
    }

    /// Finds topics without a subscriber, and settings on which the relays do not agree. These count after two leases, so
    /// one look in each lease is enough.
    fn look_for_findings(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let now = Instant::now();
        if now < self.next_findings {
            return Ok(());
        }
        let lease = self.shared.lease.current().map(|lease| lease.0);
        let (unwanted, differences) = session.run(|conn, name| {
            let unwanted = topics::without_subscriber(conn, name)?;
            let differences = match lease {
                Some(lease) => agreement::differences(conn, name, Some(lease))?,
                None => Vec::new(),
            };
            Ok((unwanted, differences))
        })?;
        self.next_findings = now + LONGEST_FINDINGS_INTERVAL.min(self.shared.settings.lease);
        self.shared.set_without_subscriber(unwanted);
        for new in self.shared.set_differences(differences) {
            log::warn!(event = "settings_differ", setting = new.setting; "the relays of the outbox do not agree: {new}. Set the same value at all of them");
        }
        Ok(())
    }

    /// Finds the messages that no relay serves, except messages of topics that this relay is told not to take.
    fn look_for_unrouted(&mut self, depths: &Depths) {
        if !self.shared.settings.enabled {
            return;
        }
        let mut unrouted = Unrouted::all(depths);
        unrouted.retain(|Unrouted { topic, .. }| {
            let way = self.shared.routes.find(&topic.topic, &topic.destination);
            way != Way::NotTaken
        });
        self.told.tell(&unrouted);
        let topics = unrouted.iter().map(|one| one.topic.clone()).collect();
        (self.shared).tell_claimer(Told::Report(Report::Unserved(topics)));
        self.shared.set_unrouted(unrouted);
    }

    /// Whether messages wait that this relay should have claimed long ago, while the relay makes no progress.
    fn is_left(&mut self, session: &mut Session, depths: &Depths) -> Result<bool, DatabaseError> {
        let shared = self.shared;
        let moves = shared.stats().moves();
        let has_moved = std::mem::replace(&mut self.moves, moves) != moves;
        if has_moved || !monitor::is_free_to_claim(shared) {
            return Ok(false);
        }
        // A relay that does not listen finds a message only at its next poll.
        let due_for = monitor::patience(shared).saturating_add(shared.settings.poll_interval);
        let is_late = |lane: &&LaneDepth| {
            let age = lane.oldest_due_seconds.unwrap_or(0.0);
            age > due_for.as_secs_f64()
                && monitor::is_open(shared, &Topic::new(&lane.topic, &lane.destination))
        };
        let registry = shared.registered.registry();
        for lane in depths.lanes.iter().filter(is_late).take(MOST_PROBED) {
            let (topic, destination) = (&lane.topic, &lane.destination);
            let namesakes = registry.namesakes.as_ref();
            let claimable = session
                .run(|conn, name| is_claimable(conn, name, topic, destination, namesakes, due_for));
            if claimable? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
