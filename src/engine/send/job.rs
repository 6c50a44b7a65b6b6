//! A claimed message inside the relay.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::verdict::Verdict;
use crate::engine::plan::to::To;
use uuid::Uuid;

use crate::config::OnDead;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::settle::sql::split::Parts;
use crate::message::Message;

/// A claimed message with its lease and its destination.
pub(crate) struct Job {
    pub(crate) message: Box<Message>,
    pub(crate) lease: LeaseId,
    pub(crate) to: To,
    /// The name of the member that the message goes to.
    pub(crate) member: Option<Arc<str>>,
    /// The registration of that name.
    pub(crate) registration: Option<Uuid>,
    /// The verdict on a message that is settled without a send.
    pub(crate) unsent: Option<Verdict>,
    pub(crate) terms: Terms,
    /// The rest of the run, in order: messages of the same key and destination.
    pub(crate) behind: Vec<Job>,
}

impl Job {
    /// A message to send alone.
    pub(crate) fn new(message: Box<Message>, lease: LeaseId, to: To, terms: Terms) -> Self {
        Self {
            message,
            lease,
            to,
            member: None,
            registration: None,
            unsent: None,
            terms,
            behind: Vec::new(),
        }
    }

    /// The jobs of the run. The first one has the others.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.behind)
    }

    /// The messages of the run.
    pub(crate) fn messages(&self) -> impl Iterator<Item = &Message> {
        self.each().map(|job| &*job.message)
    }

    /// How a member gives the message back. A message that names no destination gets a row for the member that it was for:
    /// the member may get no messages any more, and then no other claim would find who wants the message.
    pub(crate) fn release_unsent(&self) -> Verdict {
        match &self.member {
            Some(name) if self.message.destination.is_empty() => Verdict::Split(Parts {
                to: vec![name.to_string()],
                registrations: vec![self.registration],
            }),
            _ => Verdict::Released,
        }
    }

    /// The number of messages of the run.
    pub(crate) fn len(&self) -> usize {
        1 + self.behind.len()
    }

    /// The bytes of payloads and headers of the run.
    pub(crate) fn bytes(&self) -> usize {
        self.messages().map(Message::bytes).sum()
    }
}

/// The part of a destination's policy that counts when a message is settled. Decided once, when the message is claimed:
/// a member may change until then.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Terms {
    pub(crate) on_dead: OnDead,
    pub(crate) expires_after: Option<Duration>,
}

impl Terms {
    /// Lets a message expire in time after it became due. A failed attempt writes the time into the row, so a retry, which
    /// becomes due later, does not put the end off.
    pub(crate) fn limit(self, message: &mut Message) {
        let waited = message.claimed_at.saturating_sub(message.available_at);
        let waited = Duration::from_micros(u64::try_from(waited).unwrap_or(0));
        let left = self.expires_after.map(|after| after.saturating_sub(waited));
        let end = left.and_then(|left| message.claimed.checked_add(left));
        message.expires = message.expires.into_iter().chain(end).min();
    }
}

/// Whether the message has expired and must not be sent.
pub(crate) fn is_expired(message: &Message, now: Instant) -> bool {
    message.expires.is_some_and(|end| now >= end)
}
