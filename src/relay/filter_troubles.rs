//! The filters that need too many comparisons.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::clock;
use crate::lock::lock;
use crate::log;
use crate::message::Message;

/// How long a trouble is reported.
const REMEMBERED: Duration = Duration::from_secs(600);
/// The shortest interval between two log lines about one destination.
const TELL_INTERVAL: Duration = Duration::from_secs(60);
/// The most destinations whose troubles are remembered.
const MOST_TROUBLES: usize = 1000;

/// The filters that were given up lately, for health and the log.
#[derive(Debug, Default)]
pub(crate) struct Troubles(Mutex<HashMap<String, Trouble>>);

#[derive(Debug)]
struct Trouble {
    since: Instant,
    last: Instant,
    told: Option<Instant>,
    times: u64,
    what: String,
}

impl Troubles {
    /// Records that a filter was given up for a message, which therefore does not match.
    pub(super) fn too_much(&self, name: &str, message: &Message) {
        let (id, sequence) = (message.message_id, message.sequence.0);
        let what =
            format!("needs too many comparisons for message {id}: such a message does not match");
        if let Some(times) = self.note(name, what, clock::now()) {
            log::warn!(event = "filter_too_much", destination = name, sequence = sequence, topic = message.topic, times = times; "the filter of the registered destination {name} needs too many comparisons for message {id} of {}: the destination does not get the message ({times} times so far)", message.topic);
        }
    }

    /// Returns the number of times so far, if the trouble is to be logged.
    fn note(&self, name: &str, what: String, now: Instant) -> Option<u64> {
        let mut troubles = lock(&self.0);
        troubles.retain(|_, one| now.saturating_duration_since(one.last) < REMEMBERED);
        if troubles.len() >= MOST_TROUBLES && !troubles.contains_key(name) {
            return None;
        }
        let one = troubles.entry(name.to_owned()).or_insert_with(|| Trouble {
            since: now,
            last: now,
            told: None,
            times: 0,
            what: String::new(),
        });
        one.last = now;
        one.times += 1;
        one.what = what;
        let is_due =
            (one.told).is_none_or(|told| now.saturating_duration_since(told) >= TELL_INTERVAL);
        is_due.then(|| {
            one.told = Some(now);
            one.times
        })
    }

    /// The trouble that began first, and the number of destinations in trouble.
    pub(crate) fn first(&self, now: Instant) -> Option<(String, usize)> {
        let mut troubles = lock(&self.0);
        troubles.retain(|_, one| now.saturating_duration_since(one.last) < REMEMBERED);
        let (name, first) = troubles.iter().min_by_key(|(_, one)| one.since)?;
        let what = format!(
            "the filter of the registered destination {name} {}",
            first.what
        );
        Some((what, troubles.len()))
    }
}
