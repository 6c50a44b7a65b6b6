//! What is known of filters that did not finish, and the decision that a filter is too slow.
//!
//! The decision is final until somebody enables the destination again. So it depends only on the time of the evaluation
//! itself, which the server measures: no lock, no cast and no other message is part of it. On a busy server, each
//! evaluation takes longer. So the time counts only if it is much longer than a fixed piece of work that the server does
//! just after it. A filter that was slow [`SLOW_IN_A_ROW`] times in a row, or for one message, is too slow.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::message::Message;
use crate::relay::registry::Customer;
use crate::store::filters::Unfinished;

/// The first time limit of an evaluation. No evaluation below it is slow.
const LIMIT: Duration = Duration::from_millis(500);
/// The time limit doubles up to this while a busy server leaves it open whether the filter is slow.
const LONGEST_LIMIT: Duration = Duration::from_secs(4);
/// A slow evaluation takes this many times as long as the control, which takes about 10 ms on an idle server.
const CONTROLS: u32 = 10;
/// A filter that was slow this many times in a row is too slow.
const SLOW_IN_A_ROW: u32 = 3;
/// After an evaluation that did not finish, the filter rests this long, and longer after each further one.
const FIRST_REST: Duration = Duration::from_secs(1);
const LONGEST_REST: Duration = Duration::from_secs(30);
/// The most messages whose slow evaluations are remembered.
const MOST_MESSAGES: usize = 10_000;

/// Filters that did not finish, and the messages that they were slow for.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// By the number of the destination.
    filters: HashMap<u32, Known>,
    /// How many times a filter was slow for one message.
    messages: HashMap<(i64, Uuid, u32), u32>,
}

#[derive(Debug)]
struct Known {
    /// The version of the row.
    stamp: i64,
    /// How many times in a row the filter was slow, and did not finish.
    slow: u32,
    unfinished: u32,
    limit: Duration,
    rests_until: Instant,
}

/// The judgement on an evaluation that did not finish.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Judged {
    /// Until when the filter is not evaluated for any message.
    pub(super) until: Instant,
    pub(super) is_too_slow: bool,
}

fn of_message(message: &Message, customer: &Customer) -> (i64, Uuid, u32) {
    (message.sequence.0, message.message_id, customer.id)
}

impl Memory {
    fn known(&self, customer: &Customer) -> Option<&Known> {
        let known = self.filters.get(&customer.id);
        known.filter(|known| known.stamp == customer.stamp)
    }

    /// Until when the filter rests.
    pub(super) fn rests_until(&self, customer: &Customer, now: Instant) -> Option<Instant> {
        let until = self.known(customer)?.rests_until;
        (until > now).then_some(until)
    }

    /// The time limit of an evaluation for these destinations.
    pub(super) fn limit<'c>(&self, customers: impl Iterator<Item = &'c Arc<Customer>>) -> Duration {
        let limits = customers.filter_map(|one| Some(self.known(one)?.limit));
        limits.fold(LIMIT, Duration::max)
    }

    /// The filter has an answer for the message.
    pub(super) fn finished(&mut self, customer: &Customer, message: &Message) {
        if !self.filters.is_empty() {
            self.filters.remove(&customer.id);
        }
        if !self.messages.is_empty() {
            self.messages.remove(&of_message(message, customer));
        }
    }

    /// The filter was not evaluated to the end.
    pub(super) fn unfinished(
        &mut self,
        customer: &Customer,
        message: &Message,
        unfinished: &Unfinished,
        now: Instant,
    ) -> Judged {
        let stamp = customer.stamp;
        if self.known(customer).is_none() {
            self.filters.remove(&customer.id);
        }
        let known = self.filters.entry(customer.id).or_insert(Known {
            stamp,
            slow: 0,
            unfinished: 0,
            limit: LIMIT,
            rests_until: now,
        });
        let rest = FIRST_REST.saturating_mul(2_u32.saturating_pow(known.unfinished));
        known.rests_until = now + rest.min(LONGEST_REST);
        known.unfinished = known.unfinished.saturating_add(1);
        let until = known.rests_until;
        if !is_slow(unfinished) {
            known.slow = 0;
            known.limit = (2 * known.limit).min(LONGEST_LIMIT);
            return Judged {
                until,
                is_too_slow: false,
            };
        }
        known.slow += 1;
        let in_a_row = known.slow;
        if self.messages.len() >= MOST_MESSAGES {
            self.messages.clear();
        }
        let of_message = self
            .messages
            .entry(of_message(message, customer))
            .or_default();
        *of_message += 1;
        Judged {
            until,
            is_too_slow: in_a_row.max(*of_message) >= SLOW_IN_A_ROW,
        }
    }

    /// Forgets all about the filter.
    pub(super) fn forget(&mut self, customer: &Customer) {
        self.filters.remove(&customer.id);
        self.messages.retain(|(_, _, id), _| *id != customer.id);
    }
}

/// Whether the filter itself is slow, and not the server.
fn is_slow(unfinished: &Unfinished) -> bool {
    unfinished.error.is_none()
        && unfinished.took >= LIMIT
        && unfinished.took >= CONTROLS * unfinished.control
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::planner::tests::claimed;

    const SLOW: Duration = Duration::from_millis(600);
    const IDLE: Duration = Duration::from_millis(10);

    fn cancelled(took: Duration, control: Duration) -> Unfinished {
        Unfinished {
            took,
            control,
            error: None,
        }
    }

    fn message(sequence: i64) -> Message {
        *claimed(sequence, "a", None).message
    }

    /// R50
    #[test]
    fn a_filter_is_too_slow_after_several_times_in_a_row_and_rests_longer_each_time() {
        let (mut memory, now, customer) =
            (Memory::default(), Instant::now(), Customer::filtering());
        let mut slow = |sequence| {
            let message = message(sequence);
            memory.unfinished(&customer, &message, &cancelled(SLOW, IDLE), now)
        };
        let rest = |seconds, is_too_slow| Judged {
            until: now + Duration::from_secs(seconds),
            is_too_slow,
        };
        assert_eq!(slow(1), rest(1, false));
        assert_eq!(slow(2), rest(2, false));
        assert_eq!(slow(3), rest(4, true));
        assert!(memory.rests_until(&customer, now).is_some());
    }

    /// R50: other messages, for which the filter is fast, do not clear it.
    #[test]
    fn a_filter_that_is_slow_for_one_message_each_time_is_too_slow() {
        let (mut memory, now, customer) =
            (Memory::default(), Instant::now(), Customer::filtering());
        let large = message(1);
        let mut judged = Vec::new();
        for sequence in 2..=4 {
            let slow = memory.unfinished(&customer, &large, &cancelled(SLOW, IDLE), now);
            judged.push(slow.is_too_slow);
            memory.finished(&customer, &message(sequence));
        }
        assert_eq!(judged, [false, false, true]);
    }

    /// R50: what the server does for others is not the filter's time.
    #[test]
    fn a_busy_server_makes_no_filter_slow() {
        let (mut memory, now, customer) =
            (Memory::default(), Instant::now(), Customer::filtering());
        let message = message(1);
        for n in 1..=20_u32 {
            let limit = memory.limit([&customer].into_iter());
            let busy = cancelled(limit, limit / CONTROLS + IDLE);
            let judged = memory.unfinished(&customer, &message, &busy, now);
            assert!(!judged.is_too_slow, "{n}");
        }
        assert_eq!(memory.limit([&customer].into_iter()), LONGEST_LIMIT);
        let short = Unfinished {
            error: Some("out of memory".to_owned()),
            ..cancelled(LONGEST_LIMIT, IDLE)
        };
        for _ in 0..20 {
            assert!(
                !memory
                    .unfinished(&customer, &message, &short, now)
                    .is_too_slow
            );
        }
    }
}
