//! The names and descriptions of all metrics, and the labels whose number must be bounded.
//!
//! Metrics go through the crate `metrics`. An application that installs a recorder sees them; without a
//! recorder they cost almost nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, LazyLock, Once, PoisonError, RwLock};

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge};

/// The maximum number of topics of one outbox that a process uses as labels.
const MOST_TOPICS: usize = 100;
/// The label of all other topics.
pub(crate) const OTHER: &str = "other";

macro_rules! names {
    ($($kind:ident $name:ident = $text:literal, $unit:ident, $help:literal;)+) => {
        $(#[doc = $help] pub(crate) const $name: &str = $text;)+

        fn describe_all() {
            $(names!(@ $kind, $name, $unit, $help);)+
        }
    };
    (@ counter, $name:ident, $unit:ident, $help:literal) => {
        describe_counter!($name, Unit::$unit, $help)
    };
    (@ gauge, $name:ident, $unit:ident, $help:literal) => {
        describe_gauge!($name, Unit::$unit, $help)
    };
    (@ histogram, $name:ident, $unit:ident, $help:literal) => {
        describe_histogram!($name, Unit::$unit, $help)
    };
}

names! {
    counter ENQUEUED = "diesel_outbox_enqueued_total", Count,
        "Messages that this process inserted, including transactions that were rolled back later.";
    counter ENQUEUE_DUPLICATES = "diesel_outbox_enqueue_duplicates_total", Count,
        "Messages that this process enqueued when their idempotency key was already in the outbox.";
    counter CLAIMED = "diesel_outbox_claimed_total", Count, "Messages claimed.";
    counter SETTLED = "diesel_outbox_settled_total", Count,
        "Messages settled, by outcome: delivered, no_subscriber, deduplicated, retried, waiting, dead, cancelled, split, released.";
    counter RETRIES = "diesel_outbox_retries_total", Count,
        "Failed attempts that will be retried, by the number of the attempt.";
    counter DEAD = "diesel_outbox_dead_total", Count,
        "Messages dead-lettered, by reason and topic.";
    counter TAKEN_OVER = "diesel_outbox_taken_over_total", Count,
        "Messages taken over from relays whose lease expired.";
    counter LEASES_LOST = "diesel_outbox_leases_lost_total", Count, "Leases lost.";
    counter CONFLICTS = "diesel_outbox_conflicts_total", Count,
        "Outcomes that were not recorded because another relay had taken over the message.";
    counter FILTER_TOO_MUCH = "diesel_outbox_filter_too_much_total", Count,
        "Filters of endpoints that needed too many steps for a message, which therefore did not match.";
    counter BREAKER_OPENED = "diesel_outbox_breaker_opened_total", Count,
        "Circuit breakers opened by this relay.";
    counter WAKE_UPS = "diesel_outbox_wake_ups_total", Count,
        "Wake-ups of the relay, by cause: notification, poll, call.";
    counter DATABASE_ERRORS = "diesel_outbox_database_errors_total", Count,
        "Failed statements and failed connection attempts, by thread.";
    counter LOG_DROPPED = "diesel_outbox_log_lines_dropped_total", Count,
        "Log lines that the program dropped because its standard error was not read.";
    histogram CLAIM_SECONDS = "diesel_outbox_claim_seconds", Seconds,
        "Duration of a claim that found messages.";
    histogram QUEUE_WAIT_SECONDS = "diesel_outbox_queue_wait_seconds", Seconds,
        "Time from the claim of a message to the start of its send.";
    histogram SEND_SECONDS = "diesel_outbox_send_seconds", Seconds, "Duration of a send.";
    histogram DISPATCH_SECONDS = "diesel_outbox_dispatch_seconds", Seconds,
        "Duration of the send of each message, by topic and result: delivered, retry, wait, dead.";
    histogram SETTLE_SECONDS = "diesel_outbox_settle_seconds", Seconds,
        "Duration of a statement that settles messages.";
    histogram DELIVERY_SECONDS = "diesel_outbox_delivery_seconds", Seconds,
        "Time from the insert of a message until its delivery is settled, with delays and retries.";
    gauge MESSAGES = "diesel_outbox_messages", Count, "Messages in the outbox, by status.";
    gauge OLDEST_DUE_SECONDS = "diesel_outbox_oldest_due_seconds", Seconds,
        "How long the oldest due message has been due; 0: no message is due.";
    gauge IN_FLIGHT = "diesel_outbox_in_flight", Count,
        "Messages that this relay has claimed and not settled.";
    gauge QUEUED = "diesel_outbox_queued", Count, "Claimed messages that wait for a sender.";
    gauge THREADS = "diesel_outbox_threads", Count, "Sender threads.";
    gauge THREADS_BUSY = "diesel_outbox_threads_busy", Count, "Sender threads that are sending.";
    gauge CONNECTIONS = "diesel_outbox_connections", Count,
        "Open database connections of the relay.";
    gauge POOL_IN_USE = "diesel_outbox_pool_connections_in_use", Count,
        "Connections of the application's pool that handlers hold.";
    gauge BREAKER_OPEN = "diesel_outbox_breaker_open", Count, "1: the circuit breaker is open.";
    gauge PAUSED = "diesel_outbox_paused", Count, "1: the destination is paused.";
    gauge ENDPOINTS = "diesel_outbox_endpoints", Count,
        "Endpoints, by state: working, unverified, paused, failing, unread, disabled.";
    gauge FEED_LAG_EVENTS = "diesel_outbox_feed_lag_events", Count,
        "Events of the feed that no reader with a token has read.";
    gauge FEED_LAG_SECONDS = "diesel_outbox_feed_lag_seconds", Seconds,
        "How long the first of these events has been stored; 0: all are read.";
    gauge TOPIC_PAUSED = "diesel_outbox_topic_paused", Count, "1: the topic is paused.";
    gauge LEASE_SECONDS_LEFT = "diesel_outbox_lease_seconds_left", Seconds,
        "Time left in which sends may start before the relay must renew its lease.";
    gauge LISTENER_CONNECTED = "diesel_outbox_listener_connected", Count,
        "1: the relay is notified of new messages immediately.";
    gauge LIVE = "diesel_outbox_live", Count, "0: the relay must be restarted.";
    gauge READY = "diesel_outbox_ready", Count, "1: the relay is active or on standby.";
    gauge PROBLEM = "diesel_outbox_problem", Count, "1: the relay has this problem.";
    gauge BUILD_INFO = "diesel_outbox_build_info", Count, "Always 1; the label is the version.";
}

/// Describes the metrics to the recorder. May be called repeatedly.
pub(crate) fn describe() {
    describe_all();
    gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1);
}

/// The topic as a label. Beyond 100 topics of an outbox, the label of further topics is `other`.
pub(crate) fn topic_label(outbox: &str, topic: &str) -> Arc<str> {
    static TOPICS: LazyLock<Labels> = LazyLock::new(Labels::default);
    TOPICS.of(outbox, topic)
}

/// Labels whose values the application chooses. Their number is limited for each outbox.
#[derive(Default)]
struct Labels(RwLock<HashMap<String, HashSet<Arc<str>>>>);

impl Labels {
    fn of(&self, outbox: &str, text: &str) -> Arc<str> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let known = all.get(outbox);
        if let Some(label) = known.and_then(|known| known.get(text)) {
            return Arc::clone(label);
        }
        let is_full = known.is_some_and(|known| known.len() >= MOST_TOPICS);
        drop(all);
        if is_full {
            return OTHER.into();
        }
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let known = all.entry(outbox.to_owned()).or_default();
        if known.len() >= MOST_TOPICS && !known.contains(text) {
            return OTHER.into();
        }
        let label: Arc<str> = text.into();
        known.insert(Arc::clone(&label));
        label
    }
}

/// Counts of the messages that one or more statements enqueued.
#[derive(Default)]
pub(crate) struct Enqueues {
    new: BTreeMap<Box<str>, u64>,
    repeated: u64,
}

impl Enqueues {
    pub(crate) fn add(&mut self, topic: &str, is_new: bool) {
        if is_new {
            let is_known = self.new.contains_key(topic) || self.new.len() < MOST_TOPICS;
            let topic = if is_known { topic } else { OTHER };
            *self.new.entry(topic.into()).or_default() += 1;
        } else {
            self.repeated += 1;
        }
    }

    /// Adds the counts to the metrics, once the messages are written.
    pub(crate) fn count(self, outbox: &str) {
        static DESCRIBED: Once = Once::new();
        DESCRIBED.call_once(describe);
        for (topic, count) in self.new {
            let topic = topic_label(outbox, &topic);
            counter!(ENQUEUED, "outbox" => outbox.to_owned(), "topic" => topic).increment(count);
        }
        if self.repeated > 0 {
            counter!(ENQUEUE_DUPLICATES, "outbox" => outbox.to_owned()).increment(self.repeated);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R29: an application cannot create an unlimited number of series.
    #[test]
    fn beyond_a_hundred_topics_all_have_the_same_label() {
        let labels = Labels::default();
        for n in 0..MOST_TOPICS {
            assert_eq!(
                &*labels.of("outbox", &format!("topic.{n}")),
                format!("topic.{n}")
            );
        }
        assert_eq!(&*labels.of("outbox", "one.more"), OTHER);
        assert_eq!(&*labels.of("outbox", "topic.7"), "topic.7");
        assert_eq!(&*labels.of("org.outbox", "one.more"), "one.more");
    }
}
