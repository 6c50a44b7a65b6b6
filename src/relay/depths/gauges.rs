//! The gauges of what waits, whoever counts it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use metrics::{Gauge, gauge};

use crate::metrics::{MESSAGES, OLDEST_DUE_SECONDS, OTHER, describe, topic_label};
use crate::name::OutboxName;
use crate::status::Status;
use crate::store::operate::depths::Depths;

type Labels = (Arc<str>, Arc<str>);

/// The states that are counted.
const STATES: [Status; 4] = [
    Status::Pending,
    Status::Sending,
    Status::Retrying,
    Status::Dead,
];

struct LaneGauges {
    /// In the order of [`STATES`].
    messages: [Gauge; STATES.len()],
    oldest_due_seconds: Gauge,
}

/// What the gauges of a lane show. Of lanes that share labels: all together.
#[derive(Debug, Default, Clone, PartialEq)]
struct Shown {
    messages: [i64; STATES.len()],
    oldest_due_seconds: f64,
}

/// The gauges `diesel_outbox_messages` and `diesel_outbox_oldest_due_seconds`, for a process without a
/// relay: a relay sets them by itself.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName};
/// use diesel_outbox::admin::{self, DepthGauges};
/// use std::time::Duration;
///
/// /// An exporter, after it has installed its recorder.
/// fn export(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     let mut gauges = DepthGauges::new(outbox, ["billing", "warehouse"]);
///     loop {
///         gauges.show(&admin::depths(conn, outbox)?);
///         std::thread::sleep(Duration::from_secs(10));
///     }
/// }
/// ```
pub struct DepthGauges {
    outbox: Arc<str>,
    /// Those that have a label of their own.
    destinations: BTreeSet<Arc<str>>,
    /// By topic and destination, as labels.
    lanes: BTreeMap<Labels, LaneGauges>,
}

impl DepthGauges {
    /// Gauges of the recorder that is installed now. Of destinations other than these, which anybody who
    /// inserts can name, there is one: `other`.
    pub fn new<'a>(outbox: &OutboxName, destinations: impl IntoIterator<Item = &'a str>) -> Self {
        describe();
        // A message that names none.
        let all = destinations.into_iter().chain([""]);
        Self {
            outbox: outbox.to_string().into(),
            destinations: all.map(Arc::from).collect(),
            lanes: BTreeMap::new(),
        }
    }

    /// Sets them. Lanes that were there before and are not any more show 0.
    pub fn show(&mut self, depths: &Depths) {
        let mut shown = summed(depths, |topic, destination| {
            (
                topic_label(&self.outbox, topic),
                self.destination_label(destination),
            )
        });
        for labels in self.lanes.keys() {
            shown.entry(labels.clone()).or_default();
        }
        for (labels, shown) in shown {
            let gauges = self.lanes.entry(labels);
            let gauges = gauges.or_insert_with_key(|labels| LaneGauges::new(&self.outbox, labels));
            gauges.show(&shown);
        }
    }

    fn destination_label(&self, name: &str) -> Arc<str> {
        let own = self.destinations.get(name).cloned();
        own.unwrap_or_else(|| OTHER.into())
    }
}

impl std::fmt::Debug for DepthGauges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DepthGauges")
            .field("outbox", &self.outbox)
            .finish_non_exhaustive()
    }
}

fn summed(depths: &Depths, labels: impl Fn(&str, &str) -> Labels) -> BTreeMap<Labels, Shown> {
    let mut all: BTreeMap<Labels, Shown> = BTreeMap::new();
    let mut add = |topic: &str, destination: &str, messages: [i64; 4], oldest: Option<f64>| {
        let shown = all.entry(labels(topic, destination)).or_default();
        for (shown, count) in shown.messages.iter_mut().zip(messages) {
            *shown += count;
        }
        shown.oldest_due_seconds = shown.oldest_due_seconds.max(oldest.unwrap_or(0.0));
    };
    for lane in &depths.lanes {
        let messages = [lane.pending, lane.sending, lane.retrying, 0];
        let oldest = lane.oldest_due_seconds;
        add(&lane.topic, &lane.destination, messages, oldest);
    }
    for lane in &depths.dead {
        add(&lane.topic, &lane.destination, [0, 0, 0, lane.count], None);
    }
    all
}

impl LaneGauges {
    fn new(outbox: &Arc<str>, (topic, destination): &Labels) -> Self {
        let messages = |status: Status| {
            gauge!(MESSAGES, "outbox" => Arc::clone(outbox), "topic" => Arc::clone(topic),
                "destination" => Arc::clone(destination), "status" => status.as_str())
        };
        Self {
            messages: STATES.map(messages),
            oldest_due_seconds: gauge!(OLDEST_DUE_SECONDS, "outbox" => Arc::clone(outbox),
                "topic" => Arc::clone(topic), "destination" => Arc::clone(destination)),
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "gauges are floating")]
    fn show(&self, shown: &Shown) {
        for (gauge, count) in self.messages.iter().zip(shown.messages) {
            gauge.set(count as f64);
        }
        self.oldest_due_seconds.set(shown.oldest_due_seconds);
    }
}
