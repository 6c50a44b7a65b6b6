//! The gauges of waiting messages, for a relay and for a process without one.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use metrics::{Gauge, gauge};

use crate::endpoints::sql::rows::EndpointCounts;
use crate::metrics::{
    ENDPOINTS, FEED_LAG_EVENTS, FEED_LAG_SECONDS, MESSAGES, OLDEST_DUE_SECONDS, OTHER, describe,
    topic_label,
};
use crate::operate::sql::depths::{Depths, FeedLag};
use crate::shows::shows;
use crate::status::Status;

type LaneLabels = (Arc<str>, Arc<str>);

/// At each count, this many endpoints with the most messages get their own label, and as many with the
/// longest waiting messages.
const WORST: usize = 10;
/// The most endpoints that ever get their own label: a label stays as long as the process.
const MOST_NAMED: usize = 100;

/// The counted statuses.
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

/// The values of the gauges of a lane. Lanes with the same labels are summed.
#[derive(Debug, Default, Clone, PartialEq)]
struct GaugeValues {
    messages: [i64; STATES.len()],
    oldest_due_seconds: f64,
}

/// The gauges of messages, of endpoints and of feeds, for
/// a process without a relay. A relay sets them itself. When dropped, they show that nothing waits: nobody counts any more.
pub struct DepthGauges {
    outbox: Arc<str>,
    /// The destinations that have their own label.
    destinations: BTreeSet<Arc<str>>,
    /// How many more endpoints can get their own label.
    unnamed: usize,
    /// The gauges, by their topic and destination labels.
    lanes: BTreeMap<LaneLabels, LaneGauges>,
    /// The gauges of feeds, by their label.
    feeds: BTreeMap<Arc<str>, FeedGauges>,
}

impl DepthGauges {
    /// Gauges of the currently installed recorder. These destinations get their own labels. All other destinations
    /// share the label `other`, because any writer of messages can name a destination.
    pub fn new<'a>(outbox: &str, destinations: impl IntoIterator<Item = &'a str>) -> Self {
        describe();
        // The empty name is the label of messages without a destination.
        let all = destinations.into_iter().chain([""]);
        Self {
            outbox: outbox.into(),
            destinations: all.map(Arc::from).collect(),
            unnamed: MOST_NAMED,
            lanes: BTreeMap::new(),
            feeds: BTreeMap::new(),
        }
    }

    /// Sets the gauges. Lanes that have disappeared show 0.
    pub fn show(&mut self, depths: &Depths) {
        self.show_with(depths, |_| false);
    }

    /// Sets the gauges, and gives the endpoints with the worst backlog their own labels.
    pub(super) fn show_with(&mut self, depths: &Depths, is_registered: impl Fn(&str) -> bool) {
        self.name_the_worst(depths, is_registered);
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
        self.show_destinations(depths.endpoints);
        self.show_feeds(&depths.feeds);
    }

    /// The first feeds have their own labels, as many as endpoints; the others share one. Feeds that have disappeared show 0.
    fn show_feeds(&mut self, lags: &[FeedLag]) {
        let mut shown: BTreeMap<Arc<str>, (i64, f64)> = BTreeMap::new();
        for lag in lags {
            let has_label = self.feeds.contains_key(lag.name.as_str());
            let is_new = !has_label && self.feeds.len() < MOST_NAMED;
            let label: Arc<str> = match has_label || is_new {
                true => lag.name.as_str().into(),
                false => OTHER.into(),
            };
            if is_new {
                let gauges = FeedGauges::new(&self.outbox, &label);
                self.feeds.insert(Arc::clone(&label), gauges);
            }
            let of_label = shown.entry(label).or_default();
            of_label.0 += lag.events;
            of_label.1 = of_label.1.max(lag.seconds);
        }
        if shown.contains_key(OTHER) && !self.feeds.contains_key(OTHER) {
            let gauges = FeedGauges::new(&self.outbox, OTHER);
            self.feeds.insert(OTHER.into(), gauges);
        }
        for (label, gauges) in &self.feeds {
            gauges.show(shown.get(label).copied().unwrap_or_default());
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "gauges are floating-point")]
    fn show_destinations(&self, counts: EndpointCounts) {
        for (state, count) in [
            ("working", counts.working),
            ("unverified", counts.unverified),
            ("paused", counts.paused),
            ("failing", counts.failing),
            ("unread", counts.unread),
            ("disabled", counts.disabled),
        ] {
            let outbox = Arc::clone(&self.outbox);
            gauge!(ENDPOINTS, "outbox" => outbox, "state" => state).set(count as f64);
        }
    }

    fn name_the_worst(&mut self, depths: &Depths, is_registered: impl Fn(&str) -> bool) {
        let label = |_: &str, destination: &str| (Arc::default(), destination.into());
        let mut others: Vec<(Arc<str>, GaugeValues)> = (summed(depths, label).into_iter())
            .map(|((_, destination), shown)| (destination, shown))
            .filter(|(name, _)| is_registered(name) && !self.destinations.contains(name))
            .collect();
        others.sort_by_key(|(_, shown)| Reverse(shown.messages.iter().sum::<i64>()));
        let mut worst: Vec<Arc<str>> = names(&others);
        others.sort_by(|(_, a), (_, b)| b.oldest_due_seconds.total_cmp(&a.oldest_due_seconds));
        worst.extend(names(&others));
        for name in worst {
            if self.unnamed > 0 && self.destinations.insert(name) {
                self.unnamed -= 1;
            }
        }
    }

    fn destination_label(&self, name: &str) -> Arc<str> {
        let own = self.destinations.get(name).cloned();
        own.unwrap_or_else(|| OTHER.into())
    }
}

impl Drop for DepthGauges {
    fn drop(&mut self) {
        let nothing = GaugeValues::default();
        self.lanes.values().for_each(|lane| lane.show(&nothing));
        let feeds = self.feeds.values();
        feeds.for_each(|feed| feed.show((0, 0.0)));
    }
}

shows!(DepthGauges: outbox);

/// The names of the first [`WORST`] destinations.
fn names(others: &[(Arc<str>, GaugeValues)]) -> Vec<Arc<str>> {
    let first = others.iter().take(WORST);
    first.map(|(name, _)| Arc::clone(name)).collect()
}

fn summed(
    depths: &Depths,
    labels: impl Fn(&str, &str) -> LaneLabels,
) -> BTreeMap<LaneLabels, GaugeValues> {
    let mut all: BTreeMap<LaneLabels, GaugeValues> = BTreeMap::new();
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
    fn new(outbox: &Arc<str>, (topic, destination): &LaneLabels) -> Self {
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

    #[allow(clippy::cast_precision_loss, reason = "gauges are floating-point")]
    fn show(&self, shown: &GaugeValues) {
        for (gauge, count) in self.messages.iter().zip(shown.messages) {
            gauge.set(count as f64);
        }
        self.oldest_due_seconds.set(shown.oldest_due_seconds);
    }
}

struct FeedGauges {
    events: Gauge,
    seconds: Gauge,
}

impl FeedGauges {
    fn new(outbox: &Arc<str>, feed: &str) -> Self {
        let (outbox, feed): (_, Arc<str>) = (Arc::clone(outbox), feed.into());
        Self {
            events: gauge!(FEED_LAG_EVENTS, "outbox" => Arc::clone(&outbox), "feed" => Arc::clone(&feed)),
            seconds: gauge!(FEED_LAG_SECONDS, "outbox" => outbox, "feed" => feed),
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "gauges are floating-point")]
    fn show(&self, (events, seconds): (i64, f64)) {
        self.events.set(events as f64);
        self.seconds.set(seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operate::sql::depths::LaneDepth;

    /// R46, R38: of thousands of destinations, the worst get their own labels, and the number of labels stays small.
    #[test]
    fn the_worst_registered_ones_have_labels_and_no_more_than_a_hundred_ever_do() {
        let mut gauges = DepthGauges::new("outbox", ["billing"]);
        let lane = |n: i64, pending, oldest| LaneDepth {
            topic: "order.paid".to_owned(),
            destination: format!("d{n}"),
            pending,
            oldest_due_seconds: Some(oldest),
            ..LaneDepth::default()
        };
        let look = |from: i64| Depths {
            lanes: (from..from + 1_000)
                .map(|n| lane(n, n, f64::from(u8::from(n % 1_000 == 5))))
                .collect(),
            ..Depths::default()
        };
        let show =
            |gauges: &mut DepthGauges, from| gauges.show_with(&look(from), |name| name != "d998");
        show(&mut gauges, 0);
        for (name, label) in [
            ("d999", "d999"),
            ("d998", "other"),
            ("d989", "d989"),
            ("d988", "other"),
            ("d5", "d5"),
            ("billing", "billing"),
        ] {
            assert_eq!(&*gauges.destination_label(name), label, "{name}");
        }
        for round in 1..50 {
            show(&mut gauges, 1_000 * round);
        }
        assert_eq!(gauges.destinations.len(), MOST_NAMED + 2);
        assert_eq!(&*gauges.destination_label("d999"), "d999", "a label stays");
    }
}
