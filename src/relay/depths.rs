//! How much waits, as gauges: the janitor counts now and then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{Gauge, gauge};

use super::monitor;
use super::session::Session;
use super::shared::Shared;
use crate::error::DatabaseError;
use crate::metrics::{MESSAGES, OLDEST_DUE_SECONDS, OTHER, topic_label};
use crate::store::claimable::is_claimable;
use crate::store::depths::{self, Depths, LaneDepth};

/// How often messages are counted.
const INTERVAL: Duration = Duration::from_secs(10);
/// Counting takes this part of the time at most.
const SHARE: u32 = 100;
/// Lanes that are looked at, where nothing moves.
const MOST_PROBED: usize = 10;

/// Counts messages, and tells the gauges.
pub(super) struct DepthGauges<'a> {
    shared: &'a Shared,
    next: Instant,
    /// What had been claimed and settled when it last counted.
    moves: u64,
    /// By topic and destination, as labels.
    lanes: BTreeMap<Labels, LaneGauges>,
}

type Labels = (Arc<str>, Arc<str>);

struct LaneGauges {
    pending: Gauge,
    sending: Gauge,
    retrying: Gauge,
    dead: Gauge,
    oldest_due_seconds: Gauge,
}

/// What the gauges of a lane show. Of lanes that share labels: all together.
#[derive(Debug, Default, Clone, PartialEq)]
struct Shown {
    pending: i64,
    sending: i64,
    retrying: i64,
    dead: i64,
    oldest_due_seconds: f64,
}

impl<'a> DepthGauges<'a> {
    pub(super) fn new(shared: &'a Shared) -> Self {
        Self {
            shared,
            next: Instant::now(),
            moves: 0,
            lanes: BTreeMap::new(),
        }
    }

    /// When it counts next.
    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// Counts, where it is time.
    pub(super) fn count(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let began = Instant::now();
        if began < self.next {
            return Ok(());
        }
        let name = &self.shared.config.table;
        let depths = session.run(|conn| depths::depths(conn, name))?;
        self.next = Instant::now() + INTERVAL.max(SHARE * began.elapsed());
        self.show(&depths);
        let is_left = self.is_left(session, &depths)?;
        self.shared.monitor.set_left(self.shared, is_left);
        Ok(())
    }

    /// Whether messages lie there that this relay should have claimed long ago, while it has moved none.
    fn is_left(&mut self, session: &mut Session, depths: &Depths) -> Result<bool, DatabaseError> {
        let shared = self.shared;
        let moves = shared.progress.moves();
        let has_moved = std::mem::replace(&mut self.moves, moves) != moves;
        if has_moved || !monitor::is_free_to_claim(shared) {
            return Ok(false);
        }
        // One that does not listen sleeps until its next poll.
        let due_for = monitor::patience(shared).saturating_add(shared.config.poll_interval);
        let is_late = |lane: &&LaneDepth| {
            let age = lane.oldest_due_seconds.unwrap_or(0.0);
            age > due_for.as_secs_f64() && monitor::is_open(shared, &lane.topic, &lane.destination)
        };
        for lane in depths.lanes.iter().filter(is_late).take(MOST_PROBED) {
            let (name, lane) = (&shared.config.table, (&lane.topic, &lane.destination));
            if session.run(|conn| is_claimable(conn, name, lane.0, lane.1, due_for))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Lanes that were there and are not any more show 0.
    fn show(&mut self, depths: &Depths) {
        let mut shown = summed(depths, |topic, destination| {
            (topic_label(topic), self.destination_label(destination))
        });
        for labels in self.lanes.keys() {
            shown.entry(labels.clone()).or_default();
        }
        let outbox = &self.shared.metrics.outbox;
        for (labels, shown) in shown {
            let gauges = self.lanes.entry(labels);
            let gauges = gauges.or_insert_with_key(|labels| LaneGauges::new(outbox, labels));
            gauges.show(&shown);
        }
    }

    /// Anybody who inserts can name one that is not there: those have one label.
    fn destination_label(&self, name: &str) -> Arc<str> {
        let bulkheads = &self.shared.bulkheads;
        match bulkheads.iter().find(|bulkhead| *bulkhead.name == *name) {
            Some(bulkhead) => Arc::clone(&bulkhead.name),
            None => OTHER.into(),
        }
    }
}

fn summed(depths: &Depths, labels: impl Fn(&str, &str) -> Labels) -> BTreeMap<Labels, Shown> {
    let mut all: BTreeMap<Labels, Shown> = BTreeMap::new();
    for lane in &depths.lanes {
        let shown = all
            .entry(labels(&lane.topic, &lane.destination))
            .or_default();
        shown.pending += lane.pending;
        shown.sending += lane.sending;
        shown.retrying += lane.retrying;
        let age = lane.oldest_due_seconds.unwrap_or(0.0);
        shown.oldest_due_seconds = shown.oldest_due_seconds.max(age);
    }
    for lane in &depths.dead {
        let shown = all
            .entry(labels(&lane.topic, &lane.destination))
            .or_default();
        shown.dead += lane.count;
    }
    all
}

impl LaneGauges {
    fn new(outbox: &Arc<str>, (topic, destination): &Labels) -> Self {
        let messages = |status: &'static str| {
            gauge!(MESSAGES, "outbox" => Arc::clone(outbox), "topic" => Arc::clone(topic),
                "destination" => Arc::clone(destination), "status" => status)
        };
        Self {
            pending: messages("pending"),
            sending: messages("sending"),
            retrying: messages("retrying"),
            dead: messages("dead"),
            oldest_due_seconds: gauge!(OLDEST_DUE_SECONDS, "outbox" => Arc::clone(outbox),
                "topic" => Arc::clone(topic), "destination" => Arc::clone(destination)),
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "gauges are floating")]
    fn show(&self, shown: &Shown) {
        self.pending.set(shown.pending as f64);
        self.sending.set(shown.sending as f64);
        self.retrying.set(shown.retrying as f64);
        self.dead.set(shown.dead as f64);
        self.oldest_due_seconds.set(shown.oldest_due_seconds);
    }
}
