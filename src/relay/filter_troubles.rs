//! The filters that are in trouble.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::lock::lock;
use crate::log;
use crate::message::Message;
use crate::store::filters::Unfinished;

/// How long a trouble is reported.
const REMEMBERED: Duration = Duration::from_secs(600);
/// The shortest interval between two log lines about one destination.
const TELL_INTERVAL: Duration = Duration::from_secs(60);
/// The most destinations whose troubles are remembered.
const MOST_TROUBLES: usize = 1000;

/// The filters that have failed or did not finish lately, for health and the log.
#[derive(Debug, Default)]
pub(crate) struct Troubles(Mutex<HashMap<String, Trouble>>);

#[derive(Debug)]
struct Trouble {
    since: Instant,
    last: Instant,
    told: Option<Instant>,
    failures: u64,
    what: String,
}

impl Troubles {
    /// Records an error of a filter for a message, which therefore does not match.
    pub(super) fn failed(&self, name: &str, message: &Message, error: &str, now: Instant) {
        let (id, sequence) = (message.message_id, message.sequence.0);
        let what = format!(
            "failed for message {id} ({error}): a message for which a filter fails does not match"
        );
        if let Some(failures) = self.note(name, 1, what, now) {
            log::warn!(event = "filter_failed", destination = name, sequence = sequence, topic = message.topic, error = error, failures = failures; "the filter of the registered destination {name} failed for message {id} of {} ({error}): the destination does not get the message ({failures} failures so far)", message.topic);
        }
    }

    /// Records an evaluation that did not finish.
    pub(super) fn waits(&self, name: &str, unfinished: &Unfinished, now: Instant) {
        let seconds = unfinished.took.as_secs_f64();
        let why = match &unfinished.error {
            Some(error) => format!("did not finish ({error})"),
            None => format!("was cancelled after {seconds:.1} s"),
        };
        let what = format!("{why}: the messages wait, and use no attempts");
        if self.note(name, 0, what, now).is_some() {
            log::warn!(event = "filter_unfinished", destination = name, seconds = seconds; "the filter of the registered destination {name} {why}: its messages are released, and the filter is evaluated again later");
        }
    }

    /// Returns the number of failures so far, if the trouble is to be logged.
    fn note(&self, name: &str, failures: u64, what: String, now: Instant) -> Option<u64> {
        let mut troubles = lock(&self.0);
        troubles.retain(|_, one| now.saturating_duration_since(one.last) < REMEMBERED);
        if troubles.len() >= MOST_TROUBLES && !troubles.contains_key(name) {
            return None;
        }
        let one = troubles.entry(name.to_owned()).or_insert_with(|| Trouble {
            since: now,
            last: now,
            told: None,
            failures: 0,
            what: String::new(),
        });
        one.last = now;
        one.failures += failures;
        one.what = what;
        let is_due =
            (one.told).is_none_or(|told| now.saturating_duration_since(told) >= TELL_INTERVAL);
        is_due.then(|| {
            one.told = Some(now);
            one.failures
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
