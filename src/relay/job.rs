//! A claimed message inside the relay.

use std::sync::Arc;
use std::time::Instant;

use super::to::To;
use super::verdict::Verdict;
use uuid::Uuid;

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
}

/// Whether the message has expired and must not be sent.
pub(super) fn is_expired(message: &Message, now: Instant) -> bool {
    message.expires.is_some_and(|end| now >= end)
}
