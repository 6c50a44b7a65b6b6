//! A claimed message on its way through the relay.

use std::sync::Arc;
use std::time::Instant;

use super::to::To;
use super::verdict::Verdict;
use crate::message::Message;
use crate::store::relay::lease::LeaseId;

/// A claimed message.
pub(crate) struct Job {
    pub(crate) message: Message,
    pub(crate) lease: LeaseId,
    pub(crate) to: To,
    /// The name of the registered destination that it goes to.
    pub(crate) customer: Option<Arc<str>>,
    /// What is written down of it where it is not sent.
    pub(crate) unsent: Option<Verdict>,
}

/// Whether its time is over: then it is not sent.
pub(super) fn is_expired(message: &Message, now: Instant) -> bool {
    message.expires.is_some_and(|end| now >= end)
}
