//! What a relay's parts need, made from the settings: values of the engine.

use std::time::Duration;

use super::agreement;
use crate::config::{Config, DeliveryPolicy, Mode, Rate, RequestBatch};
use crate::engine::host::settings::{Sends, Settings};
use crate::engine::send::job::Terms;
use crate::engine::send::limits::Limits;
use crate::engine::send::verdict::Retries;
use crate::engine::serves::routes::Serves;

impl Settings {
    /// `registered`: the relay sends to endpoints.
    pub(crate) fn of(config: &Config, registered: bool) -> Self {
        // A relay can close every send but those of an application's own dispatcher.
        let longest = match config.endpoint_threads > 0 && !config.has_own_dispatcher {
            true => Duration::MAX,
            false => config.longest_send(),
        };
        Self {
            table: config.table.clone(),
            label: config.label.clone(),
            enabled: config.enabled,
            batch: config.batch,
            poll_interval: config.poll_interval,
            lease: config.lease,
            on_dead: config.on_dead,
            single_active: config.single_active,
            share_connection: config.share_connection,
            listener: config.listener,
            listener_url: config.listener_url.clone(),
            shutdown_timeout: config.shutdown_timeout,
            retention: config.retention,
            inbox_retention: config.inbox_retention,
            feed_retention: config.feed_retention,
            feed_max_bytes: config.feed_max_bytes,
            feed_unread_after: config.feed_unread_after,
            cleaner: config.cleaner,
            ledger_payload: config.ledger_payload,
            witness: None,
            log: None,
            sends: Sends {
                longest,
                can_close: !config.has_own_dispatcher,
            },
            serves: Serves::new(config),
            published: agreement::published(config, registered),
        }
    }
}

impl Limits {
    /// `request_batch`: the limits of a request, if the destination has a batched mode.
    pub(crate) fn new(
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
            is_feed: false,
        }
    }
}

impl Limits {
    /// Those of a feed: nothing is sent to it, so a claim and a run may have a whole batch.
    pub(crate) fn of_feed(policy: &DeliveryPolicy, config: &Config) -> Self {
        Self {
            batch: config.batch,
            key_run: config.batch,
            is_feed: true,
            ..Self::new(policy, config, None)
        }
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
