//! How messages are sent to a destination: its policy, with the defaults of the settings. A value, for the planner and for
//! the fate of messages.

use std::time::Duration;

use super::job::Terms;
use super::verdict::Retries;
use crate::config::RequestBatch;

/// The size of a claim before the size of messages and the time of sends are known, unless more can be sent at once.
pub(crate) const FIRST_BATCH: usize = 32;

#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) retries: Retries,
    pub(crate) terms: Terms,
    /// The number of threads that send to the destination; of a registered one: of concurrent sends.
    pub(crate) concurrency: usize,
    /// The limits of a request in batched mode.
    pub(crate) request_batch: Option<RequestBatch>,
    /// The most messages of one claim.
    pub(crate) batch: usize,
    /// The most messages of a run.
    pub(crate) key_run: usize,
    /// The time limit of one send or handler call.
    pub(crate) send_timeout: Duration,
    /// Whether the destination is a feed: its messages are settled without a send.
    pub(crate) is_feed: bool,
}

impl Limits {
    /// The most messages that the senders hold.
    pub(super) fn most_sending(&self) -> usize {
        let of_a_request = self.request_batch.map_or(1, |limits| limits.size);
        self.concurrency.saturating_mul(of_a_request)
    }

    /// The most messages of a claim, until the time of sends is known.
    pub(crate) fn first_claim(&self) -> usize {
        self.most_sending().max(FIRST_BATCH).min(self.batch)
    }
}
