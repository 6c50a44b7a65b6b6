//! The filters that need too many steps.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use uuid::Uuid;

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
pub(crate) struct Troubles(Mutex<HashMap<String, FilterTrouble>>);

#[derive(Debug)]
struct FilterTrouble {
    since: Instant,
    last: Instant,
    told: Option<Instant>,
    times: u64,
    message_id: Uuid,
}

impl FilterTrouble {
    fn since(now: Instant) -> Self {
        Self {
            since: now,
            last: now,
            told: None,
            times: 0,
            message_id: Uuid::nil(),
        }
    }
}

impl Troubles {
    /// Records that a filter was given up for a message, which therefore does not match.
    pub(super) fn too_much(&self, name: &str, message: &Message) {
        let (id, sequence) = (message.message_id, message.sequence.0);
        if let Some(times) = self.note(name, id, clock::now()) {
            log::warn!(event = "filter_too_much", destination = name, sequence = sequence, topic = message.topic, times = times; "the filter of the endpoint {name} needs too many steps for message {id} of {}: the destination does not get the message ({times} times so far)", message.topic);
        }
    }

    /// Returns the number of times so far, if the trouble is to be logged.
    fn note(&self, name: &str, message_id: Uuid, now: Instant) -> Option<u64> {
        let mut troubles = lock(&self.0);
        if troubles.len() >= MOST_TROUBLES && !troubles.contains_key(name) {
            return None;
        }
        if !troubles.contains_key(name) {
            troubles.insert(name.to_owned(), FilterTrouble::since(now));
        }
        let one = troubles.get_mut(name)?;
        (one.last, one.message_id) = (now, message_id);
        one.times += 1;
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
            "the filter of the endpoint {name} needs too many steps for message {}: such a message does not match",
            first.message_id
        );
        Some((what, troubles.len()))
    }
}
