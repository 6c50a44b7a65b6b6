//! The names of all metrics, with what they mean, and the labels that have to be bounded.
//!
//! They go through the crate `metrics`: an application that has installed a recorder sees them, and
//! where there is none they cost next to nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, LazyLock, Once, PoisonError, RwLock};

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge};

/// Topics of an outbox that have a label of their own, for each process.
const MOST_TOPICS: usize = 100;
/// The label of all others.
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
        "Messages that this process has inserted, also in transactions that were rolled back later.";
    counter ENQUEUE_DUPLICATES = "diesel_outbox_enqueue_duplicates_total", Count,
        "Messages that this process has enqueued while one of their idempotency key was in the outbox.";
    counter CLAIMED = "diesel_outbox_claimed_total", Count, "Messages claimed.";
    counter SETTLED = "diesel_outbox_settled_total", Count,
        "Messages whose outcome was written down, by outcome: delivered, deduplicated, retried, dead, split, released.";
    counter RETRIES = "diesel_outbox_retries_total", Count,
        "Attempts that failed and will be repeated, by the number of the attempt that failed.";
    counter DEAD = "diesel_outbox_dead_total", Count, "Messages that died, by reason and topic.";
    counter TAKEN_OVER = "diesel_outbox_taken_over_total", Count,
        "Messages taken over from relays that died.";
    counter LEASES_LOST = "diesel_outbox_leases_lost_total", Count, "Leases lost.";
    counter CONFLICTS = "diesel_outbox_conflicts_total", Count,
        "Outcomes that changed nothing, because another relay had the message.";
    counter BREAKER_OPENED = "diesel_outbox_breaker_opened_total", Count,
        "How often this relay has opened a circuit breaker.";
    counter WAKE_UPS = "diesel_outbox_wake_ups_total", Count,
        "How often the relay was woken, by what: notification, poll, call.";
    counter DATABASE_ERRORS = "diesel_outbox_database_errors_total", Count,
        "Statements and connects that failed, by thread.";
    histogram CLAIM_SECONDS = "diesel_outbox_claim_seconds", Seconds,
        "Time of a claim that found something.";
    histogram QUEUE_WAIT_SECONDS = "diesel_outbox_queue_wait_seconds", Seconds,
        "Time from the claim of a message to the begin of its send.";
    histogram SEND_SECONDS = "diesel_outbox_send_seconds", Seconds, "Time of a send.";
    histogram DISPATCH_SECONDS = "diesel_outbox_dispatch_seconds", Seconds,
        "Time of the send that a message was in, by topic and result: delivered, retry, wait, dead.";
    histogram SETTLE_SECONDS = "diesel_outbox_settle_seconds", Seconds,
        "Time of a statement that writes down what became of messages.";
    histogram DELIVERY_SECONDS = "diesel_outbox_delivery_seconds", Seconds,
        "Time from the insert of a message to its delivery written down, with delays and retries.";
    gauge MESSAGES = "diesel_outbox_messages", Count, "Messages in the outbox, by status.";
    gauge OLDEST_DUE_SECONDS = "diesel_outbox_oldest_due_seconds", Seconds,
        "How long the message that waits longest has been due; 0: none is due.";
    gauge IN_FLIGHT = "diesel_outbox_in_flight", Count,
        "Messages that this relay has claimed and not settled.";
    gauge QUEUED = "diesel_outbox_queued", Count, "Claimed messages that wait for a sender.";
    gauge THREADS = "diesel_outbox_threads", Count, "Threads that send.";
    gauge THREADS_BUSY = "diesel_outbox_threads_busy", Count, "Threads that are sending.";
    gauge CONNECTIONS = "diesel_outbox_connections", Count,
        "Connections to the database that the relay has open.";
    gauge POOL_IN_USE = "diesel_outbox_pool_connections_in_use", Count,
        "Connections of the application's pool that handlers hold.";
    gauge BREAKER_OPEN = "diesel_outbox_breaker_open", Count, "1: the circuit breaker is open.";
    gauge PAUSED = "diesel_outbox_paused", Count, "1: the destination is paused.";
    gauge TOPIC_PAUSED = "diesel_outbox_topic_paused", Count, "1: the topic is paused.";
    gauge LEASE_SECONDS_LEFT = "diesel_outbox_lease_seconds_left", Seconds,
        "How long sends may begin without another look at the lease.";
    gauge LISTENER_CONNECTED = "diesel_outbox_listener_connected", Count,
        "1: the relay hears of new messages at once.";
    gauge LIVE = "diesel_outbox_live", Count, "0: the relay has to be restarted.";
    gauge READY = "diesel_outbox_ready", Count, "1: the relay works, or stands by.";
    gauge PROBLEM = "diesel_outbox_problem", Count, "1: the relay has this problem.";
    gauge BUILD_INFO = "diesel_outbox_build_info", Count, "1, by the version.";
}

/// Tells the recorder what the metrics mean. Again and again does no harm.
pub(crate) fn describe() {
    describe_all();
    gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1);
}

/// The topic as a label: at most 100 different ones of an outbox in a process, and then `other`.
pub(crate) fn topic_label(outbox: &str, topic: &str) -> Arc<str> {
    static TOPICS: LazyLock<Labels> = LazyLock::new(Labels::default);
    TOPICS.of(outbox, topic)
}

/// Labels that anybody can make up: only so many of each outbox.
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

/// What one or more statements have enqueued.
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

    /// Counts them, when they are written.
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

    /// R29: whoever makes topics up makes no more series than these.
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
