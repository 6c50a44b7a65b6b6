//! Settings that are one value: how many, how long, whether.

use std::time::Duration;

use super::RelayBuilder;
use crate::backoff::Backoff;
use crate::config::SecretKeys;

impl RelayBuilder {
    /// Threads that send, 1 to 1024, for each destination that has no number of its own. Defaults to 16.
    #[must_use]
    pub fn concurrency(self, threads: usize) -> Self {
        self.with("OUTBOX_CONCURRENCY", |config| config.concurrency = threads)
    }

    /// Messages claimed, and settled, at once at most: 1 to 10,000. Defaults to 500.
    #[must_use]
    pub fn batch(self, messages: usize) -> Self {
        self.with("OUTBOX_BATCH", |config| config.batch = messages)
    }

    /// How long an idle relay waits before it looks again. Defaults to 500 ms.
    #[must_use]
    pub fn poll_interval(self, interval: Duration) -> Self {
        self.with("OUTBOX_POLL_INTERVAL", |config| {
            config.poll_interval = interval
        })
    }

    /// How long a silent relay keeps its messages: then others take them over. More than twice the
    /// longest send. Defaults to 60 s.
    #[must_use]
    pub fn lease(self, lease: Duration) -> Self {
        self.with("OUTBOX_LEASE", |config| config.lease = lease)
    }

    /// Threads that send to all [registered destinations](crate::destinations) together: 1 to 1024. They start when
    /// the first message for one of these comes. Defaults to 64. Say it where the relay has nothing else to send to.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// let relay = Relay::builder("postgres://localhost/shop").registered_threads(32);
    /// ```
    #[must_use]
    pub fn registered_threads(self, threads: usize) -> Self {
        self.with("OUTBOX_REGISTERED_THREADS", |config| {
            config.registered_threads = threads;
            config.expects_registered = true;
        })
    }

    /// Whether registered destinations without TLS are refused. Defaults to `true`.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// // For a developer's machine.
    /// let relay = Relay::builder("postgres://localhost/shop")
    ///     .registered_https_only(false)
    ///     .registered_public_only(false);
    /// ```
    #[must_use]
    pub fn registered_https_only(self, is_so: bool) -> Self {
        self.with("OUTBOX_REGISTERED_HTTPS_ONLY", |config| {
            config.registered_https_only = is_so;
        })
    }

    /// Whether registered destinations may resolve to public addresses only. Defaults to `true`: their URLs come from
    /// strangers.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// // Behind a firewall that keeps them from everything else.
    /// let relay = Relay::builder("postgres://localhost/shop").registered_public_only(false);
    /// ```
    #[must_use]
    pub fn registered_public_only(self, is_so: bool) -> Self {
        self.with("OUTBOX_REGISTERED_PUBLIC_ONLY", |config| {
            config.registered_public_only = is_so;
        })
    }

    /// The only ports that URLs of registered destinations may have. Defaults to any.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// let relay = Relay::builder("postgres://localhost/shop").registered_ports([443, 8443]);
    /// ```
    #[must_use]
    pub fn registered_ports(self, ports: impl IntoIterator<Item = u16>) -> Self {
        self.with("OUTBOX_REGISTERED_PORTS", |config| {
            config.registered_ports = ports.into_iter().collect();
        })
    }

    /// The keys that secrets of registered destinations are encrypted with in the database: see
    /// [`Destinations::with_keys`](crate::destinations::Destinations::with_keys). Defaults to none.
    ///
    /// Without a key that fits, the relay sends nothing to such a destination: its messages wait.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    /// use diesel_outbox::config::SecretKeys;
    ///
    /// let keys: SecretKeys = "9MMfxlcYUyu2sa5cYoUYXvyhYOXs7TtNvOLzlpTtrLo=".parse()?;
    /// let relay = Relay::builder("postgres://localhost/shop").secret_keys(keys);
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    #[must_use]
    pub fn secret_keys(self, keys: SecretKeys) -> Self {
        self.with("OUTBOX_SECRET_KEY", |config| config.secret_keys = keys)
    }

    /// The limit for one send, for each destination that has none of its own. Handlers have
    /// [another](crate::Handlers::timeout). Defaults to 2.5 s.
    #[must_use]
    pub fn send_timeout(self, timeout: Duration) -> Self {
        self.with("OUTBOX_SEND_TIMEOUT", |config| {
            config.send_timeout = timeout
        })
    }

    /// Failed attempts after which a message is dead: 1 to 1,000,000. Defaults to 20.
    #[must_use]
    pub fn max_attempts(self, attempts: u32) -> Self {
        self.with("OUTBOX_MAX_ATTEMPTS", |config| {
            config.max_attempts = attempts
        })
    }

    /// The delay between attempts. Defaults to `exponential(5s, 1h)`.
    #[must_use]
    pub fn backoff(self, backoff: Backoff) -> Self {
        self.with("OUTBOX_BACKOFF", |config| config.backoff = backoff)
    }

    /// Whether the outbox tells of itself, by messages in the same outbox. Defaults to `false`.
    ///
    /// | topic | payload |
    /// |---|---|
    /// | `outbox.message.dead` | `sequence`, `message_id`, `topic`, `destination`, `tenant_id`, `reason`, `attempts` |
    /// | `outbox.destination.disabled` | `name`, `tenant_id`, `reason`: a relay has disabled a registered destination |
    /// | `outbox.breaker.opened` | `destination`, `tenant_id`, `until` |
    ///
    /// They are written in the transaction that made it so, and routed as any others: give them a route. A
    /// [registered destination](crate::destinations) gets them only where one of its topics begins with `outbox.`. The
    /// death of such a message is not told.
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
    #[must_use]
    pub fn own_events(self, is_so: bool) -> Self {
        self.with("OUTBOX_OWN_EVENTS", |config| config.own_events = is_so)
    }

    /// How long the ledger keeps settled messages; `None`: for ever. Defaults to a week.
    #[must_use]
    pub fn retention(self, retention: Option<Duration>) -> Self {
        self.with("OUTBOX_RETENTION", |config| {
            config.cleaner = retention.is_some();
            config.retention = retention.unwrap_or(config.retention);
        })
    }

    /// How long the [inbox](crate::inbox) of this database remembers what was handled. Defaults to
    /// unset: the relay does not clean it. Where several relays do, the shortest time counts.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    /// use std::time::Duration;
    ///
    /// let relay = Relay::builder("postgres://localhost/billing")
    ///     .inbox_retention(Duration::from_secs(30 * 24 * 3600));
    /// ```
    #[must_use]
    pub fn inbox_retention(self, retention: Duration) -> Self {
        self.with("OUTBOX_INBOX_RETENTION", |config| {
            config.inbox_retention = Some(retention)
        })
    }

    /// Whether messages are claimed and sent; without, the relay stands by. Defaults to true.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// // A copy of the production database delivers nothing.
    /// let is_production = std::env::var("STAGE").as_deref() == Ok("production");
    /// let relay = Relay::builder("postgres://localhost/shop").enabled(is_production);
    /// ```
    #[must_use]
    pub fn enabled(self, enabled: bool) -> Self {
        self.with("OUTBOX_ENABLED", |config| config.enabled = enabled)
    }

    /// Claims this many messages and then no more: for jobs that do a bounded amount of work.
    /// Defaults to no limit.
    ///
    /// ```no_run
    /// use diesel_outbox::Relay;
    /// use std::time::Duration;
    ///
    /// // A job that delivers a thousand messages at most, for ten minutes at most.
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

    /// Takes messages of these topics only, whatever the routes say: topics, or patterns as in routes. Called
    /// again, it adds topics. For a one-shot job; other relays have to take the rest.
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
