//! A claimed message inside the relay.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::to::To;
use super::verdict::Verdict;
use uuid::Uuid;

use crate::config::OnDead;
use crate::message::Message;
use crate::store::relay::lease::LeaseId;

/// A claimed message with its lease and its destination.
pub(crate) struct Job {
    pub(crate) message: Box<Message>,
    pub(crate) lease: LeaseId,
    pub(crate) to: To,
    /// The name of the registered destination that the message goes to.
    pub(crate) customer: Option<Arc<str>>,
    /// The registration of that name.
    pub(crate) registration: Option<Uuid>,
    /// The verdict on a message that is settled without a send.
    pub(crate) unsent: Option<Verdict>,
    pub(crate) terms: Terms,
}

/// The part of a destination's policy that counts when a message is settled. Decided once, when the message is claimed:
/// the row of a registered destination may change until then.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Terms {
    pub(crate) on_dead: OnDead,
    pub(crate) expires_after: Option<Duration>,
}

impl Terms {
    /// Lets a message expire in time after it became due. A failed attempt writes the time into the row, so a retry, which
    /// becomes due later, does not put the end off.
    pub(super) fn limit(self, message: &mut Message) {
        let waited = message.claimed_at.saturating_sub(message.available_at);
        let waited = Duration::from_micros(u64::try_from(waited).unwrap_or(0));
        let left = self.expires_after.map(|after| after.saturating_sub(waited));
        let end = left.and_then(|left| message.claimed.checked_add(left));
        message.expires = message.expires.into_iter().chain(end).min();
    }
}

/// Whether the message has expired and must not be sent.
pub(super) fn is_expired(message: &Message, now: Instant) -> bool {
    message.expires.is_some_and(|end| now >= end)
}
