//! The setters for single values: counts, durations and flags.

use std::time::Duration;

use super::RelayBuilder;
use crate::backoff::Backoff;
use crate::config::SecretKeys;

/// The setters of settings that one field of the same name holds.
macro_rules! setters {
    ($($(#[$doc:meta])* $variable:literal: $setter:ident($value:ident: $type:ty);)+) => {
        impl RelayBuilder {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $setter(self, $value: $type) -> Self {
                    self.with($variable, |config| config.$setter = $value)
                }
            )+
        }
    };
}

setters! {
    /// Sets the number of sender threads, 1 to 1024, for each destination without its own number. Defaults to 16.
    "OUTBOX_CONCURRENCY": concurrency(threads: usize);

    /// Sets the most messages in one claim and in one settle, 1 to 10,000. Defaults to 500.
    "OUTBOX_BATCH": batch(messages: usize);

    /// Sets how long an idle relay waits before it polls again. Defaults to 500 ms.
    "OUTBOX_POLL_INTERVAL": poll_interval(interval: Duration);

    /// Sets how long a silent relay keeps its claimed messages; after that, other relays take them over. Must be more
    /// than twice the longest send. Defaults to 60 s.
    "OUTBOX_LEASE": lease(lease: Duration);

    /// Sets the keys that encrypt the secrets of endpoints in the database. See
    /// [`Endpoints::with_keys`](crate::endpoints::Endpoints::with_keys). Defaults to none.
    ///
    /// If no key decrypts a destination's secret, the relay sends nothing there, and the messages wait.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    /// use diesel_outbox::config::SecretKeys;
    ///
    /// let keys: SecretKeys = "9MMfxlcYUyu2sa5cYoUYXvyhYOXs7TtNvOLzlpTtrLo=".parse()?;
    /// let relay = Relay::builder("postgres://localhost/shop").secret_keys(keys);
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    "OUTBOX_SECRET_KEY": secret_keys(keys: SecretKeys);

    /// Sets the time limit of one send, for each destination without its own limit. Handlers have
    /// [their own limit](crate::handlers::Handlers::timeout). Defaults to 2.5 s.
    "OUTBOX_SEND_TIMEOUT": send_timeout(timeout: Duration);

    /// Sets the number of failed attempts, 1 to 1,000,000, after which a message is dead-lettered. Defaults to 20.
    "OUTBOX_MAX_ATTEMPTS": max_attempts(attempts: u32);

    /// Sets the delays between attempts. Defaults to `exponential(5s, 1h)`.
    "OUTBOX_BACKOFF": backoff(backoff: Backoff);

    /// Sets whether the relay writes messages about its own events into the same outbox. Defaults to `false`.
    ///
    /// | topic | when | payload, beside `destination` and `tenant_id` |
    /// |---|---|---|
    /// | `outbox.endpoint.failing` | an endpoint fails, and no send has succeeded for ten minutes | `failing_since`, `reason` |
    /// | `outbox.endpoint.unread` | a feed has events, and nobody has read it for `OUTBOX_FEED_UNREAD_AFTER` | `unread_since` |
    /// | `outbox.endpoint.recovered` | the next success of a failing destination, or an unread feed is read | `failing_since` or `unread_since` |
    /// | `outbox.endpoint.paused` | a relay has paused a destination until it is resumed | `reason` |
    /// | `outbox.endpoint.disabled` | a relay has disabled an endpoint | `reason` |
    /// | `outbox.breaker.opened` | a relay has opened a closed circuit breaker | `until` |
    /// | `outbox.messages.dead` | the end of a minute in which messages to the destination were dead-lettered | `minute`, `count` |
    ///
    /// Each message is written once, whatever the number of relays, in the transaction that records the event. It is
    /// routed like any other message: add a route for `outbox.*`. An [endpoint](crate::endpoints) gets
    /// these messages only if one of its topics begins with `outbox.`. A dead letter among these messages is not counted.
    ///
    /// ```
    /// # use diesel_outbox::{ConfigError, Destination, Relay, RelayBuilder};
    /// fn relay(url: &str) -> Result<RelayBuilder, ConfigError> {
    ///     Ok(Relay::builder(url)
    ///         .url("https://billing.example/events")
    ///         .destination(Destination::new("alarms", "https://alarms.example/")?)
    ///         .route("outbox.*", "alarms")
    ///         .own_events(true))
    /// }
    /// ```
    "OUTBOX_OWN_EVENTS": own_events(is_so: bool);

    /// Sets whether the relay claims and sends messages. Defaults to `true`.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// // A copy of the production database delivers nothing.
    /// let is_production = std::env::var("STAGE").as_deref() == Ok("production");
    /// let relay = Relay::builder("postgres://localhost/shop").enabled(is_production);
    /// ```
    "OUTBOX_ENABLED": enabled(enabled: bool);
}

impl RelayBuilder {
    /// Sets the number of sender threads, up to 1024, that all [endpoints](crate::endpoints) share. With
    /// 0, the relay serves no endpoints but feeds: messages of others wait for another relay.
    /// The threads start with the first message for an endpoint. While sends take 500 ms or more, up to
    /// four times as many may run. Defaults to 64.
    ///
    /// Call this method if the relay has endpoints only: otherwise the relay does not start.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// let relay = Relay::builder("postgres://localhost/shop").endpoint_threads(32);
    /// ```
    #[must_use]
    pub fn endpoint_threads(self, threads: usize) -> Self {
        self.with("OUTBOX_ENDPOINT_THREADS", |config| {
            config.set_endpoint_threads(threads);
        })
    }

    /// Sets how long the ledger keeps settled messages; `None` keeps them forever. Defaults to a week.
    #[must_use]
    pub fn retention(self, retention: Option<Duration>) -> Self {
        self.with("OUTBOX_RETENTION", |config| {
            config.cleaner = retention.is_some();
            config.retention = retention.unwrap_or(config.retention);
        })
    }

    /// Sets the number of messages after which the relay stops claiming, for jobs that do a bounded amount of work.
    /// Defaults to no limit.
    ///
    /// ```no_run
    /// use diesel_outbox::Relay;
    /// use std::time::Duration;
    ///
    /// // A job that delivers at most 1,000 messages, for at most ten minutes.
    /// let relay = Relay::builder("postgres://localhost/shop")
    ///     .url("https://receiver.example/events")
    ///     .limit(1000)
    ///     .start()?;
    /// relay.wait_until_idle(Duration::from_secs(600));
    /// relay.shutdown(Duration::from_secs(30))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn limit(mut self, messages: u64) -> Self {
        self.limit = Some(messages);
        self
    }

    /// Marks the relay as a one-shot job, such as `diesel-outbox drain`. Other relays record the topics that they serve
    /// when they start, and messages of these topics then wait for such a relay. A one-shot relay records its topics only
    /// once it has claimed a message.
    ///
    /// ```no_run
    /// use diesel_outbox::Relay;
    /// use std::time::Duration;
    ///
    /// let relay = Relay::builder("postgres://localhost/shop")
    ///     .url("https://receiver.example/events")
    ///     .one_shot()
    ///     .start()?;
    /// relay.wait_until_idle(Duration::from_secs(600));
    /// relay.shutdown(Duration::from_secs(30))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn one_shot(mut self) -> Self {
        self.is_one_shot = true;
        self
    }

    /// Declares topics of the application, as patterns like those of routes. Where any are declared, a message of another
    /// topic that nobody wants waits as `UNKNOWN_TOPIC`, and is a problem ([`ProblemKind::UnknownTopic`]); where none are, the
    /// message ends without a subscriber. Declared topics stay declared until `diesel-outbox topics forget`.
    ///
    /// [`ProblemKind::UnknownTopic`]: crate::ProblemKind::UnknownTopic
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// let relay = Relay::builder("postgres://localhost/shop").topics(["order.*", "invoice.sent"]);
    /// ```
    #[must_use]
    pub fn topics<T: Into<String>>(self, patterns: impl IntoIterator<Item = T>) -> Self {
        let patterns = patterns.into_iter().map(Into::into);
        self.with("OUTBOX_TOPICS", |config| config.topics.extend(patterns))
    }

    /// Limits the relay to a topic, or to topics that match a pattern as in routes. The routes still apply. Call
    /// again to add a topic. Defaults to all topics.
    ///
    /// Meant for one-shot jobs: other relays must take the remaining topics.
    ///
    /// ```no_run
    /// use diesel_outbox::Relay;
    /// use std::time::Duration;
    ///
    /// let relay = Relay::builder("postgres://localhost/shop")
    ///     .url("https://receiver.example/events")
    ///     .only_topic("invoice.*")
    ///     .start()?;
    /// relay.wait_until_idle(Duration::from_secs(600));
    /// relay.shutdown(Duration::from_secs(30))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn only_topic(mut self, topic: impl Into<String>) -> Self {
        self.config.only.push(topic.into());
        self
    }
}
