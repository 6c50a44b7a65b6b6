//! Counts the waiting messages and sets the gauges. The janitor counts from time to time.
//!
//! A lane is the waiting messages of one topic and destination.

mod gauges;
mod unrouted;

use std::time::{Duration, Instant};

pub use self::gauges::DepthGauges;

use self::unrouted::{Logged, Unrouted, unrouted};
use super::sql::agreement::{self, Difference};
use super::sql::depths::{self, Depths, LaneDepth};
use crate::endpoints::sql::subscribers::{self, WithoutSubscriber};
use crate::engine::claim::sql::claim::Topic;
use crate::engine::claim::sql::claimable::is_claimable;
use crate::engine::claim::told::Told;
use crate::engine::clean::chore::Chore;
use crate::engine::host::session::Session;
use crate::engine::host::shared::Shared;
use crate::engine::observe::health::{Problem, ProblemKind};
use crate::engine::observe::monitor::{and_more, patience};
use crate::engine::plan::Report;
use crate::engine::plan::pace::{Last, Pace};
use crate::engine::plan::to::To;
use crate::engine::send::gate::Standing;
use crate::engine::serves::routes::Way;
use crate::error::DatabaseError;
use crate::log;
use crate::sql::brief::Tried;
use crate::sql::pinned::look_for_endpoints;
use crate::status::ReasonCode;

/// Counting takes at most a hundredth of the time.
const PACE: Pace = Pace::new(Duration::from_secs(10), 100);
const HURRIED: Pace = Pace::new(Duration::ZERO, 100);
/// The longest interval between two looks at what the relays record of settings and topics.
const LONGEST_FINDINGS_INTERVAL: Duration = Duration::from_secs(30);
/// The most topics without a subscriber that are recorded at once.
const MOST_UNWANTED: usize = 10;
/// The most lanes that are checked when the relay makes no progress.
const MOST_PROBED: usize = 10;

/// Counts messages and sets the gauges.
struct Counting<'a> {
    shared: &'a Shared,
    last: Option<Last>,
    pace: Pace,
    /// [`Stats::moves`](crate::engine::host::Stats::moves) at the last count.
    moves: u64,
    gauges: DepthGauges,
    logged: Logged,
    /// The next look at what the relays record of settings and topics.
    next_findings: Instant,
    /// The topics that end without a subscriber, and never had one.
    without_subscriber: Vec<WithoutSubscriber>,
    /// The settings on which this relay and others do not agree.
    differences: Vec<Difference>,
}

pub(crate) fn chore(shared: &Shared) -> Box<dyn Chore + '_> {
    Box::new(Counting {
        shared,
        last: None,
        pace: PACE,
        moves: 0,
        gauges: DepthGauges::new(
            &shared.metrics.outbox,
            shared.bulkheads.iter().map(|bulkhead| &*bulkhead.name),
        ),
        logged: Logged::default(),
        next_findings: Instant::now(),
        without_subscriber: Vec::new(),
        differences: Vec::new(),
    })
}

impl Counting<'_> {
    /// Records topics whose messages have ended without a subscriber, and says so. `true`: there are any.
    fn record_unwanted(&self, session: &mut Session) -> Result<bool, DatabaseError> {
        let mut is_any = false;
        for topic in self.shared.unwanted.take(MOST_UNWANTED) {
            // Who locks the table holds up nobody: the topic is recorded at its next message.
            let recorded = session.run_without_waiting(|conn, name| {
                subscribers::record_without_subscriber(conn, name, &topic)
            })?;
            if matches!(recorded, Tried::Done(true)) {
                is_any = true;
                log::warn!(event = "topic_without_subscriber", topic = topic; "messages of {topic} have ended without a subscriber, and the ledger has no delivery of the topic: if the topic is right, declare it (OUTBOX_TOPICS)");
            }
        }
        Ok(is_any)
    }

    /// Counts, if a count is due.
    fn count(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let began = Instant::now();
        if !self.pace.is_due(began, self.last) {
            return Ok(());
        }
        let depths = session.run(|conn, name| {
            // The outbox may have endpoints by now, also if this relay serves none.
            look_for_endpoints(conn, name)?;
            depths::depths_of_relay(conn, name)
        })?;
        self.look_for_findings(session)?;
        (self.last, self.pace) = (Some(Last::since(began)), PACE);
        let roster = self.shared.directory.roster();
        let is_registered = |name: &str| roster.member(name).is_some();
        self.gauges.show_with(&depths, is_registered);
        let unrouted = self.look_for_unrouted(&depths);
        self.shared.set_found(self.found(unrouted));
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
        let (without_subscriber, differences) = session.run(|conn, name| {
            let without_subscriber = subscribers::without_subscriber(conn, name)?;
            let differences = match lease {
                Some(lease) => agreement::differences(conn, name, Some(lease))?,
                None => Vec::new(),
            };
            Ok((without_subscriber, differences))
        })?;
        self.next_findings = now + LONGEST_FINDINGS_INTERVAL.min(self.shared.settings.lease);
        let is_known = |one: &Difference| {
            let mut known = self.differences.iter();
            known.any(|other| other.setting == one.setting)
        };
        for new in differences.iter().filter(|one| !is_known(one)) {
            log::warn!(event = "settings_differ", setting = new.setting; "the relays of the outbox do not agree: {new}. Set the same value at all of them");
        }
        (self.without_subscriber, self.differences) = (without_subscriber, differences);
        Ok(())
    }

    /// Finds the messages that no relay serves, except messages of topics that this relay is told not to take.
    fn look_for_unrouted(&mut self, depths: &Depths) -> Vec<Unrouted> {
        if !self.shared.settings.enabled {
            return Vec::new();
        }
        let mut unrouted = unrouted(depths);
        unrouted.retain(|Unrouted { topic, .. }| {
            let way = self.shared.routes.find(&topic.topic, &topic.destination);
            way != Way::NotTaken
        });
        self.logged.log(&unrouted);
        let topics = unrouted.iter().map(|one| one.topic.clone()).collect();
        (self.shared).tell_claimer(Told::Report(Report::Unserved(topics)));
        unrouted
    }

    /// The problems that health shows of what was found.
    fn found(&self, unrouted: Vec<Unrouted>) -> Vec<Problem> {
        let (unknown, unrouted): (Vec<_>, Vec<_>) =
            (unrouted.into_iter()).partition(|one| one.code == ReasonCode::UnknownTopic);
        let without_subscriber = self.without_subscriber.split_first();
        let without_subscriber = without_subscriber.map(|(first, others)| {
            let (what, next) = (first.what(), first.next_step());
            format!("{what}{}: {next}", and_more(others.len()))
        });
        let each: Vec<String> = self.differences.iter().map(ToString::to_string).collect();
        let differences = (!each.is_empty()).then(|| {
            let each = each.join("; ");
            format!("{each}: set the same value at all relays of the outbox")
        });
        let found = [
            (ProblemKind::NoRoute, unserved(&unrouted)),
            (ProblemKind::UnknownTopic, unserved(&unknown)),
            (ProblemKind::NoSubscriber, without_subscriber),
            (ProblemKind::SettingsDiffer, differences),
        ];
        let found = found.into_iter();
        (found.filter_map(|(kind, what)| what.map(|what| Problem { kind, what }))).collect()
    }

    /// Whether messages wait that this relay should have claimed long ago, while the relay makes no progress.
    fn is_left(&mut self, session: &mut Session, depths: &Depths) -> Result<bool, DatabaseError> {
        let shared = self.shared;
        let moves = shared.stats().moves();
        let has_moved = std::mem::replace(&mut self.moves, moves) != moves;
        if has_moved || !is_free_to_claim(shared) {
            return Ok(false);
        }
        // A relay that does not listen finds a message only at its next poll.
        let due_for = patience(shared).saturating_add(shared.settings.poll_interval);
        let is_late = |lane: &&LaneDepth| {
            let age = lane.oldest_due_seconds.unwrap_or(0.0);
            age > due_for.as_secs_f64()
                && is_open(shared, &Topic::new(&lane.topic, &lane.destination))
        };
        let roster = shared.directory.roster();
        for lane in depths.lanes.iter().filter(is_late).take(MOST_PROBED) {
            let (topic, destination) = (&lane.topic, &lane.destination);
            let namesakes = roster.namesakes();
            let claimable = session
                .run(|conn, name| is_claimable(conn, name, topic, destination, namesakes, due_for));
            if claimable? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The first topic that no relay serves, and how many more there are.
fn unserved(all: &[Unrouted]) -> Option<String> {
    let (first, others) = all.split_first()?;
    let (what, why, next) = (first.what(), &first.why, &first.next_step);
    let more = and_more(others.len());
    Some(format!("{what}{more}, because {why}: {next}"))
}

/// Whether no message is in flight here (except with handlers) and nothing keeps the relay from claiming.
pub(crate) fn is_free_to_claim(shared: &Shared) -> bool {
    let state = shared.threads.state();
    shared.settings.enabled
        && shared.limit.is_none()
        && !state.stands_by
        && shared.custody.count_beside_handlers() == 0
        && shared.lease.current().is_some()
        && state.troubles().next().is_none()
}

/// Whether due messages of the topic may be claimed and sent at once.
fn is_open(shared: &Shared, topic: &Topic) -> bool {
    let is_taken = || !shared.policy().not_taken.contains(&topic.topic);
    if shared.custody.kept_back().has(topic) || !is_taken() {
        return false;
    }
    match shared.directory.roster().way(topic) {
        To::Bulkhead(number) => shared.bulkheads[number].gate.standing() == Standing::Flowing,
        To::Member(id) | To::Feed(id) => shared.rooms().is_open(id),
        To::Split => true,
        To::Nowhere => false,
    }
}

impl Chore for Counting<'_> {
    fn next(&self) -> Option<Instant> {
        let next = |last| self.pace.next(last);
        Some(self.last.map_or_else(Instant::now, next))
    }

    fn work(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        if self.record_unwanted(session)? {
            self.next_findings = Instant::now();
        }
        self.count(session)
    }

    fn hurry(&mut self) {
        self.pace = HURRIED;
    }

    /// Records the topics of a job's last messages.
    fn last(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        self.record_unwanted(session).map(drop)
    }
}
