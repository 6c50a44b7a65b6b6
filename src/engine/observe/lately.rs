//! Topics that nobody wants.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::lock::lock;

/// The most topics that are remembered.
const MOST_TOPICS: usize = 1000;
/// How long a topic is remembered. Longer than messages of topics that are not declared wait.
const REMEMBERED: Duration = Duration::from_secs(600);

/// Topics of which a message that nobody wants was seen lately.
#[derive(Debug, Default)]
pub(crate) struct Lately(Mutex<HashMap<String, SeenTopics>>);

#[derive(Debug)]
struct SeenTopics {
    last: Instant,
    /// Whether the topic has not been taken yet.
    is_new: bool,
}

impl Lately {
    pub(crate) fn note<'a>(&self, topics: impl Iterator<Item = &'a str>, now: Instant) {
        let mut seen = lock(&self.0);
        seen.retain(|_, one| now.saturating_duration_since(one.last) < REMEMBERED);
        for topic in topics {
            let is_full = seen.len() >= MOST_TOPICS;
            if let Some(one) = seen.get_mut(topic) {
                one.last = now;
            } else if !is_full {
                let one = SeenTopics {
                    last: now,
                    is_new: true,
                };
                seen.insert(topic.to_owned(), one);
            }
        }
    }

    /// One of the topics, and their number.
    pub(crate) fn first(&self, now: Instant) -> Option<(String, usize)> {
        let mut seen = lock(&self.0);
        seen.retain(|_, one| now.saturating_duration_since(one.last) < REMEMBERED);
        let first = seen.keys().min()?.clone();
        Some((first, seen.len()))
    }

    /// Takes at most so many topics that have not been taken yet.
    pub(crate) fn take(&self, most: usize) -> Vec<String> {
        let mut seen = lock(&self.0);
        let new = seen.iter_mut().filter(|(_, one)| one.is_new).take(most);
        new.map(|(topic, one)| {
            one.is_new = false;
            topic.clone()
        })
        .collect()
    }
}
