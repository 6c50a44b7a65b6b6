//! How messages are sent to a destination: its policy, with the defaults of the settings. A value, for the planner and for
//! the fate of messages.

use std::time::Duration;

use super::job::Terms;
use super::verdict::Retries;
use crate::config::{Config, DeliveryPolicy, Mode, Rate, RequestBatch};

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
    /// `request_batch`: the limits of a request, if the destination has a batched mode.
    pub(super) fn new(
        policy: &DeliveryPolicy,
        config: &Config,
        request_batch: Option<RequestBatch>,
    ) -> Self {
        let is_batched = policy.mode.unwrap_or(config.mode) == Mode::Batched;
        let request_batch = request_batch.filter(|_| is_batched);
        let per_request = request_batch.map_or(1, |batch| batch.size);
        let batch = match policy.rate {
            Some(rate) => of_a_second(rate, per_request, config.batch),
            // Batched senders empty a batch quickly, and larger statements cost less for each message.
            None if request_batch.is_some() => 2 * config.batch,
            None => config.batch,
        };
        // A run in batched mode is one request.
        let longest_run = request_batch.map_or(batch, |one| one.size.min(batch));
        Self {
            retries: Retries {
                max_attempts: policy.max_attempts.unwrap_or(config.max_attempts),
                backoff: (policy.backoff.clone()).unwrap_or_else(|| config.backoff.clone()),
            },
            terms: Terms {
                on_dead: policy.on_dead.unwrap_or(config.on_dead),
                expires_after: policy.expires_after,
            },
            concurrency: policy.concurrency.unwrap_or(config.concurrency),
            request_batch,
            batch,
            key_run: policy.key_run.min(longest_run),
            send_timeout: policy.timeout.unwrap_or(config.send_timeout),
        }
    }

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

/// The most messages of a claim under a rate limit: as many as are sent in a second, so that other relays can claim the
/// rest.
fn of_a_second(rate: Rate, per_request: usize, batch: usize) -> usize {
    // In range: a rate is above zero and below a million.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let requests = rate.per_second.ceil() as usize;
    requests.saturating_mul(per_request).clamp(1, batch)
}
