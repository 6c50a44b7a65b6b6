//! The metrics of one relay. The handles are created once, at the start, so counting a message costs one addition.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, Label, counter, gauge, histogram};

use super::health::ProblemKind;
use crate::dispatch::Outcome;
use crate::engine::plan::to::To;
use crate::engine::send::bulkhead::{Bulkhead, REST};
use crate::engine::settle::settlement::{Kind, Settlement};
use crate::metrics as names;
use crate::status::ReasonCode;

/// The labels of attempts. All attempts from the tenth on share one label.
const ATTEMPTS: [&str; 10] = ["1", "2", "3", "4", "5", "6", "7", "8", "9", "10+"];

pub(crate) struct Metrics {
    pub(crate) outbox: Arc<str>,
    pub(crate) claimed: Counter,
    pub(crate) taken_over: Counter,
    pub(crate) leases_lost: Counter,
    pub(crate) conflicts: Counter,
    pub(crate) notified: Counter,
    pub(crate) polled: Counter,
    pub(crate) called: Counter,
    pub(crate) claim_seconds: Histogram,
    pub(crate) settle_seconds: Histogram,
    /// In the order of the bulkheads.
    pub(crate) destinations: Vec<OfDestination>,
    /// The metrics of messages without a destination.
    nowhere: OfDestination,
    pub(super) connections: Gauge,
    pub(super) lease_seconds_left: Gauge,
    pub(super) listener_connected: Gauge,
    pub(super) live: Gauge,
    pub(super) ready: Gauge,
    /// In the order of [`ProblemKind::ALL`].
    pub(super) problems: Vec<Gauge>,
}

/// The metrics of one destination.
pub(crate) struct OfDestination {
    outbox: Arc<str>,
    name: Arc<str>,
    settled: [Counter; Kind::ALL.len()],
    pub(crate) breaker_opened: Counter,
    pub(super) queue_wait_seconds: Histogram,
    pub(crate) send_seconds: Histogram,
    delivery_seconds: Histogram,
    pub(super) in_flight: Gauge,
    pub(super) queued: Gauge,
    pub(super) threads: Gauge,
    pub(super) threads_busy: Gauge,
    pub(super) breaker_open: Gauge,
    pub(super) paused: Gauge,
}

impl Metrics {
    /// `outbox`: the label of that name.
    pub(crate) fn new(outbox: String, bulkheads: &[Bulkhead]) -> Self {
        names::describe();
        let outbox: Arc<str> = outbox.into();
        let label = || Arc::clone(&outbox);
        let woken = |source: &'static str| counter!(names::WAKE_UPS, "outbox" => label(), "source" => source);
        Self {
            claimed: counter!(names::CLAIMED, "outbox" => label()),
            taken_over: counter!(names::TAKEN_OVER, "outbox" => label()),
            leases_lost: counter!(names::LEASES_LOST, "outbox" => label()),
            conflicts: counter!(names::CONFLICTS, "outbox" => label()),
            notified: woken("notification"),
            polled: woken("poll"),
            called: woken("call"),
            claim_seconds: histogram!(names::CLAIM_SECONDS, "outbox" => label()),
            settle_seconds: histogram!(names::SETTLE_SECONDS, "outbox" => label()),
            destinations: bulkheads
                .iter()
                .map(|bulkhead| OfDestination::new(&outbox, &bulkhead.name))
                .collect(),
            nowhere: OfDestination::new(&outbox, &REST.into()),
            connections: gauge!(names::CONNECTIONS, "outbox" => label()),
            lease_seconds_left: gauge!(names::LEASE_SECONDS_LEFT, "outbox" => label()),
            listener_connected: gauge!(names::LISTENER_CONNECTED, "outbox" => label()),
            live: gauge!(names::LIVE, "outbox" => label()),
            ready: gauge!(names::READY, "outbox" => label()),
            problems: ProblemKind::ALL
                .iter()
                .map(|kind| gauge!(names::PROBLEM, "outbox" => label(), "problem" => kind.as_str()))
                .collect(),
            outbox,
        }
    }

    /// Sets the gauges of the topics that are paused now, and clears the gauges of topics that were paused before.
    pub(crate) fn set_paused(&self, before: &HashSet<String>, paused: &HashSet<String>) {
        let label = |topic: &String| names::topic_label(&self.outbox, topic);
        let set = |topic, value: f64| {
            gauge!(names::TOPIC_PAUSED, "outbox" => Arc::clone(&self.outbox), "topic" => topic)
                .set(value)
        };
        let paused: HashSet<Arc<str>> = paused.iter().map(label).collect();
        let before = before.iter().map(label);
        for topic in before.filter(|topic| !paused.contains(topic)) {
            set(topic, 0.0);
        }
        paused.into_iter().for_each(|topic| set(topic, 1.0));
    }

    /// The metrics of the destination that messages go to.
    pub(crate) fn of(&self, to: To) -> &OfDestination {
        match to {
            To::Bulkhead(number) => &self.destinations[number],
            // All members share one set of metrics: their number is unbounded.
            To::Member(_) | To::Feed(_) => self.destinations.last().unwrap_or(&self.nowhere),
            To::Split | To::Nowhere => &self.nowhere,
        }
    }

    /// The counter of database errors of a thread.
    pub(crate) fn database_errors(&self, thread: &'static str) -> Counter {
        counter!(names::DATABASE_ERRORS, "outbox" => Arc::clone(&self.outbox), "thread" => thread)
    }
}

impl OfDestination {
    fn new(outbox: &Arc<str>, name: &Arc<str>) -> Self {
        let labels = || {
            vec![
                Label::new("outbox", Arc::clone(outbox)),
                Label::new("destination", Arc::clone(name)),
            ]
        };
        let settled = |kind: usize| counter!(names::SETTLED, "outbox" => Arc::clone(outbox), "destination" => Arc::clone(name), "outcome" => Kind::ALL[kind].as_str());
        Self {
            settled: std::array::from_fn(settled),
            breaker_opened: counter!(names::BREAKER_OPENED, labels()),
            queue_wait_seconds: histogram!(names::QUEUE_WAIT_SECONDS, labels()),
            send_seconds: histogram!(names::SEND_SECONDS, labels()),
            delivery_seconds: histogram!(names::DELIVERY_SECONDS, labels()),
            in_flight: gauge!(names::IN_FLIGHT, labels()),
            queued: gauge!(names::QUEUED, labels()),
            threads: gauge!(names::THREADS, labels()),
            threads_busy: gauge!(names::THREADS_BUSY, labels()),
            breaker_open: gauge!(names::BREAKER_OPEN, labels()),
            paused: gauge!(names::PAUSED, labels()),
            outbox: Arc::clone(outbox),
            name: Arc::clone(name),
        }
    }

    /// Records how long a message waited between its claim and its send.
    pub(crate) fn waited(&self, claimed: Instant, began: Instant) {
        let waited = began.saturating_duration_since(claimed);
        self.queue_wait_seconds.record(waited.as_secs_f64());
    }

    /// Records that a message was settled at `now`.
    pub(crate) fn settled(&self, settlement: &Settlement, now: Instant) {
        let kind = settlement.kind();
        self.settled[kind as usize].increment(1);
        match kind {
            Kind::Delivered | Kind::Stored => {
                let since_claim = now.saturating_duration_since(settlement.message.claimed);
                let took = settlement.message.age.saturating_add(since_claim);
                self.delivery_seconds.record(took.as_secs_f64());
            }
            Kind::Retry => self.retried(settlement.failed_attempt()),
            Kind::Dead => {
                if let Some(failure) = settlement.failure() {
                    self.dead_lettered(failure.code, &settlement.message.topic);
                }
            }
            Kind::NoSubscriber
            | Kind::Deduplicated
            | Kind::Waiting
            | Kind::Cancelled
            | Kind::Split
            | Kind::Released => {}
        }
    }

    /// Counts a failed attempt by its number; 0 is an attempt that does not count. Failures are rare enough to look the
    /// counter up each time.
    fn retried(&self, attempt: u32) {
        let Some(number) = attempt.checked_sub(1) else {
            return;
        };
        let at = usize::try_from(number).map_or(ATTEMPTS.len() - 1, |n| n.min(ATTEMPTS.len() - 1));
        counter!(names::RETRIES, "outbox" => Arc::clone(&self.outbox), "destination" => Arc::clone(&self.name), "attempt" => ATTEMPTS[at]).increment(1);
    }

    /// Counts a dead letter. Dead letters are as rare.
    fn dead_lettered(&self, reason: ReasonCode, topic: &str) {
        let topic = names::topic_label(&self.outbox, topic);
        counter!(names::DEAD, "outbox" => Arc::clone(&self.outbox), "destination" => Arc::clone(&self.name), "reason" => reason.as_str(), "topic" => topic).increment(1);
    }
}

/// The durations of sends, by topic and result. The handles belong to one sender thread alone.
pub(crate) struct Dispatches {
    outbox: Arc<str>,
    /// By topic; at most as many as there are topic labels.
    of_topics: HashMap<Box<str>, OfTopic>,
    /// For topics without their own label.
    of_others: OfTopic,
}

/// By result, created on first use.
type OfTopic = [Option<Histogram>; RESULTS.len()];

/// The results of a send, in the order of [`result_of`].
const RESULTS: [&str; 4] = ["delivered", "retry", "wait", "dead"];

fn result_of(outcome: &Outcome) -> usize {
    match outcome {
        Outcome::Delivered(_) => 0,
        Outcome::Retry(_) => 1,
        Outcome::Wait(_) => 2,
        Outcome::Dead(_) => 3,
    }
}

impl Dispatches {
    pub(crate) fn new(outbox: &Arc<str>) -> Self {
        Self {
            outbox: Arc::clone(outbox),
            of_topics: HashMap::new(),
            of_others: OfTopic::default(),
        }
    }

    /// Records the duration of a send that contained a message of this topic.
    pub(crate) fn sent(&mut self, topic: &str, outcome: &Outcome, took: Duration) {
        let result = result_of(outcome);
        let of_topic = match self.of_topics.get_mut(topic) {
            Some(of_topic) => of_topic,
            None => match names::topic_label(&self.outbox, topic) {
                other if *other == *names::OTHER => &mut self.of_others,
                _ => self.of_topics.entry(topic.into()).or_default(),
            },
        };
        let outbox = &self.outbox;
        of_topic[result]
            .get_or_insert_with(|| {
                let topic = names::topic_label(outbox, topic);
                histogram!(names::DISPATCH_SECONDS, "outbox" => Arc::clone(outbox), "topic" => topic, "result" => RESULTS[result])
            })
            .record(took.as_secs_f64());
    }
}
