//! Whose turn it is: tenants share the time of the thread that evaluates filters.
//!
//! The tenant that has used the least time comes next (see [`Fair`]), and its topics take turns. So a tenant with slow
//! filters delays another by one turn, however many messages and topics it has.

use std::collections::VecDeque;
use std::time::Duration;

use uuid::Uuid;

use crate::relay::fair::Fair;

/// A tenant keeps only as many messages here as need this long, by the experience of its last turn, and at least
/// [`LEAST`]. More of them would keep the messages of other tenants from being claimed.
const MOST_TIME: Duration = Duration::from_secs(2);
const LEAST: usize = 8;

/// What waits, by tenant and topic.
pub(super) struct Shares<T>(Fair<Option<Uuid>, OfTopic<T>>);

type OfTopic<T> = (String, VecDeque<T>);

/// What waits of one topic of a tenant.
pub(super) struct Turn<T> {
    tenant: Option<Uuid>,
    topic: String,
    pub(super) waiting: VecDeque<T>,
}

impl<T> Default for Shares<T> {
    fn default() -> Self {
        Self(Fair::default())
    }
}

impl<T> Shares<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn push(&mut self, tenant: Option<Uuid>, topic: &str, one: T) {
        let mut topics = self.0.waits_for(tenant);
        if let Some((_, waiting)) = topics.find(|(of, _)| of == topic) {
            waiting.push_back(one);
            return;
        }
        drop(topics);
        let of_topic = (topic.to_owned(), [one].into());
        self.0.wait(tenant, of_topic, Duration::ZERO);
    }

    /// Begins a turn, which [`Shares::end`] ends.
    pub(super) fn begin(&mut self) -> Option<Turn<T>> {
        let (tenant, (topic, waiting)) = self.0.next()?;
        Some(Turn {
            tenant,
            topic,
            waiting,
        })
    }

    /// Ends a turn, in which this many messages needed this long. The rest waits again. Returns what the tenant cannot
    /// keep here, and how long it would have waited.
    pub(super) fn end(
        &mut self,
        turn: Turn<T>,
        messages: usize,
        took: Duration,
    ) -> (Vec<T>, Duration) {
        let tenant = turn.tenant;
        self.0.charge(tenant, took, Duration::ZERO);
        if !turn.waiting.is_empty() {
            let of_topic = (turn.topic, turn.waiting);
            self.0.wait(tenant, of_topic, Duration::ZERO);
        }
        let each = took.div_f64(messages.max(1) as f64);
        let counts = self.0.waits_for(tenant).map(|(_, waiting)| waiting.len());
        let all: usize = counts.sum();
        let (mut left, mut too_many) = (all, Vec::new());
        for (_, waiting) in self.0.waits_for(tenant).rev() {
            while left > LEAST
                && each.mul_f64(left as f64) > MOST_TIME
                && let Some(one) = waiting.pop_back()
            {
                too_many.push(one);
                left -= 1;
            }
        }
        self.0.take(tenant, |(_, waiting)| waiting.is_empty());
        if left == 0 {
            self.0.tidy();
        }
        (too_many, each.mul_f64(all as f64))
    }

    pub(super) fn into_all(self) -> impl Iterator<Item = T> {
        self.0.into_all().flat_map(|(_, waiting)| waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: Option<Uuid> = Some(Uuid::from_u128(1));
    const OTHER: Option<Uuid> = Some(Uuid::from_u128(2));
    const SECOND: Duration = Duration::from_secs(1);

    /// A turn that evaluates one message.
    fn turn(shares: &mut Shares<u32>, took: Duration) -> (u32, Vec<u32>) {
        let mut turn = shares.begin().expect("something waits");
        let one = turn.waiting.pop_front().expect("messages");
        (one, shares.end(turn, 1, took).0)
    }

    /// R50: the filters of one tenant delay those of another by one turn.
    #[test]
    fn a_tenant_with_many_slow_topics_delays_another_by_one_turn() {
        let mut shares = Shares::default();
        for n in 0..LEAST as u32 {
            shares.push(SLOW, &format!("slow.{n}"), n);
        }
        assert_eq!(turn(&mut shares, SECOND).0, 0);
        for n in 100..150 {
            shares.push(OTHER, "fast", n);
        }
        for n in 100..150 {
            assert_eq!(turn(&mut shares, SECOND / 100).0, n);
        }
        // The tenant has used as much time as the others meanwhile: none is owed.
        assert_eq!(turn(&mut shares, SECOND).0, 1);
        shares.push(OTHER, "fast", 150);
        assert_eq!(turn(&mut shares, SECOND / 100).0, 150);
        assert_eq!(turn(&mut shares, SECOND).0, 2);
    }

    #[test]
    fn topics_of_a_tenant_and_tenants_with_equal_times_take_turns() {
        let mut shares = Shares::default();
        for (n, (tenant, topic)) in [(SLOW, "a"), (SLOW, "a"), (SLOW, "b"), (OTHER, "a")]
            .into_iter()
            .enumerate()
        {
            shares.push(tenant, topic, n as u32);
        }
        let order: Vec<u32> = (0..4)
            .map(|_| turn(&mut shares, Duration::ZERO).0)
            .collect();
        assert_eq!(order, [0, 3, 2, 1]);
        assert!(shares.is_empty() && shares.begin().is_none());
    }

    /// R50: a tenant with slow filters does not fill the room of others.
    #[test]
    fn a_tenant_keeps_what_two_seconds_are_enough_for() {
        let mut shares = Shares::default();
        (0..100).for_each(|n| shares.push(SLOW, "a", n));
        assert_eq!(turn(&mut shares, SECOND / 100), (0, vec![]));
        let (first, too_many) = turn(&mut shares, SECOND / 10);
        assert_eq!((first, too_many.len()), (1, 98 - 20));
        let (_, too_many) = turn(&mut shares, SECOND * 10);
        assert_eq!(too_many.len(), 19 - LEAST);
        assert_eq!(shares.into_all().count(), LEAST);
    }
}
