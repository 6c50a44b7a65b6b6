//! Sends over HTTP, and checks the order of the messages of each key.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use diesel_outbox::{Dispatcher, HttpDispatcher, Message, Outcome};

/// A dispatcher that reports each send to `watched`.
pub(super) struct OrderChecker {
    pub(super) http: HttpDispatcher,
    pub(super) watched: Arc<Watched>,
}

impl Dispatcher for OrderChecker {
    fn dispatch(&self, message: &Message) -> Outcome {
        let Some(key) = message.ordering_key.as_deref() else {
            return self.http.dispatch(message);
        };
        self.watched.begins(key, message.sequence.0);
        let outcome = self.http.dispatch(message);
        let is_delivered = matches!(outcome, Outcome::Delivered(_));
        self.watched.ends(key, message.sequence.0, is_delivered);
        outcome
    }
}

/// The sends of all keys.
#[derive(Default)]
pub(super) struct Watched {
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    keys: HashMap<String, Key>,
    breaches: Breaches,
}

#[derive(Default)]
struct Key {
    /// The highest delivered sequence.
    delivered: i64,
    in_flight: u32,
}

/// How often the order of a key was broken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Breaches {
    /// Sends that began after a later message of their key had been delivered.
    pub(super) misorders: u64,
    /// Sends that began while another message of their key was being sent.
    pub(super) overlaps: u64,
}

impl Watched {
    pub(super) fn breaches(&self) -> Breaches {
        self.lock().breaches
    }

    fn begins(&self, name: &str, sequence: i64) {
        let mut seen = self.lock();
        let Seen { keys, breaches } = &mut *seen;
        if !keys.contains_key(name) {
            keys.insert(name.to_owned(), Key::default());
        }
        let Some(key) = keys.get_mut(name) else {
            return;
        };
        breaches.misorders += u64::from(sequence < key.delivered);
        breaches.overlaps += u64::from(key.in_flight > 0);
        key.in_flight += 1;
    }

    fn ends(&self, name: &str, sequence: i64, is_delivered: bool) {
        if let Some(key) = self.lock().keys.get_mut(name) {
            key.in_flight -= 1;
            if is_delivered {
                key.delivered = key.delivered.max(sequence);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaches_of(send: impl Fn(&Watched)) -> (u64, u64) {
        let watched = Watched::default();
        send(&watched);
        let Breaches {
            misorders,
            overlaps,
        } = watched.breaches();
        (misorders, overlaps)
    }

    #[test]
    fn one_after_the_other_is_in_order() {
        let breaches = breaches_of(|watched| {
            for sequence in [3, 5, 9] {
                watched.begins("a", sequence);
                watched.begins("b", sequence + 1);
                watched.ends("a", sequence, true);
                watched.ends("b", sequence + 1, true);
            }
        });
        assert_eq!(breaches, (0, 0));
    }

    #[test]
    fn a_failed_message_may_be_repeated() {
        let breaches = breaches_of(|watched| {
            for is_delivered in [false, true] {
                watched.begins("a", 3);
                watched.ends("a", 3, is_delivered);
            }
        });
        assert_eq!(breaches, (0, 0));
    }

    #[test]
    fn an_earlier_message_after_a_later_one_is_a_misorder() {
        let breaches = breaches_of(|watched| {
            for sequence in [5, 3] {
                watched.begins("a", sequence);
                watched.ends("a", sequence, true);
            }
        });
        assert_eq!(breaches, (1, 0));
    }

    #[test]
    fn two_at_a_time_overlap() {
        let breaches = breaches_of(|watched| {
            watched.begins("a", 3);
            watched.begins("a", 5);
            watched.ends("a", 3, true);
            watched.ends("a", 5, true);
        });
        assert_eq!(breaches, (0, 1));
    }
}
