//! How messages are sent to a destination: its policy, with the defaults of the settings. A value, for the planner and for
//! the fate of messages.

use std::time::Duration;

use super::job::Terms;
use super::verdict::Retries;
use crate::config::RequestBatch;

/// The size of a claim before the size of messages and the time of sends are known, unless more can be sent at once.
pub(super) const FIRST_BATCH: usize = 32;

#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(super) retries: Retries,
    pub(super) terms: Terms,
    /// The number of threads that send to the destination; of a registered one: of concurrent sends.
    pub(super) concurrency: usize,
    /// The limits of a request in batched mode.
    pub(super) request_batch: Option<RequestBatch>,
    /// The most messages of one claim.
    pub(super) batch: usize,
    /// The most messages of a run.
    pub(super) key_run: usize,
    /// The time limit of one send or handler call.
    pub(super) send_timeout: Duration,
}

impl Limits {
    /// The most messages that the senders hold.
    pub(super) fn most_sending(&self) -> usize {
        let of_a_request = self.request_batch.map_or(1, |limits| limits.size);
        self.concurrency.saturating_mul(of_a_request)
    }

    /// The most messages of a claim, until the time of sends is known.
    pub(super) fn first_claim(&self) -> usize {
        self.most_sending().max(FIRST_BATCH).min(self.batch)
    }
}
