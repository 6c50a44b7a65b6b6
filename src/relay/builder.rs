//! Setting a relay up.

use std::sync::Arc;
use std::time::Duration;

use super::RelayHandle;
use super::bulkhead::Bulkhead;
use crate::backoff::Backoff;
use crate::config::{Config, ConfigError, Destination, Route};
use crate::dispatch::{Dispatcher, HttpDispatcher};
use crate::error::DatabaseError;

/// A relay that is being set up.
///
/// ```no_run
/// use diesel_outbox::Relay;
/// use std::time::Duration;
///
/// let relay = Relay::builder("postgres://localhost/shop")
///     .url("https://receiver.example/events")
///     .concurrency(8)
///     .start()?;
/// // … the application runs …
/// relay.shutdown(Duration::from_secs(30))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Relay;

impl Relay {
    /// A relay for the outbox `outbox` in this database, with default settings.
    pub fn builder(database_url: impl Into<String>) -> RelayBuilder {
        let mut builder = Self::from_config(Config::default());
        builder.set("DATABASE_URL", &database_url.into());
        builder
    }

    /// A relay with these settings, for example those of [`config::from_env`](crate::config::from_env).
    pub fn from_config(config: Config) -> RelayBuilder {
        RelayBuilder {
            config,
            dispatcher: None,
            limit: None,
            error: None,
        }
    }
}

/// Settings of a relay. What is wrong with them is told by [`start`](Self::start).
pub struct RelayBuilder {
    config: Config,
    dispatcher: Option<Arc<dyn Dispatcher>>,
    limit: Option<u64>,
    /// The first setting that could not be used.
    error: Option<ConfigError>,
}

impl RelayBuilder {
    fn set(&mut self, variable: &str, value: &str) {
        if let Err(error) = self.config.set(variable, value) {
            self.error.get_or_insert(error);
        }
    }

    /// The outbox to work on: `name` or `schema.name`. Defaults to `outbox`.
    #[must_use]
    pub fn outbox(mut self, name: &str) -> Self {
        self.set("OUTBOX_TABLE", name);
        self
    }

    /// Where messages go that no route serves. Defaults to nowhere.
    #[must_use]
    pub fn url(mut self, url: &str) -> Self {
        self.set("OUTBOX_URL", url);
        self
    }

    /// Adds a named destination.
    #[must_use]
    pub fn destination(mut self, destination: Destination) -> Self {
        self.config.destinations.push(destination);
        self
    }

    /// Adds a route: topics that match the pattern `topic` go to the destination named `to`.
    #[must_use]
    pub fn route(mut self, topic: &str, to: &str) -> Self {
        self.config.routes.push(Route::new(topic, to));
        self
    }

    /// Adds a route to several destinations: each gets a message of its own, with its own attempts
    /// and its own row in the ledger.
    #[must_use]
    pub fn route_to_each(mut self, topic: &str, to: &[&str]) -> Self {
        self.config
            .routes
            .push(Route::to_each(topic, to.iter().copied()));
        self
    }

    /// Sends with this instead of HTTP.
    #[must_use]
    pub fn dispatcher(mut self, dispatcher: impl Dispatcher) -> Self {
        self.dispatcher = Some(Arc::new(dispatcher));
        self
    }

    /// Threads that send, for each destination that has no number of its own. Defaults to 16.
    #[must_use]
    pub fn concurrency(mut self, threads: usize) -> Self {
        self.set("OUTBOX_CONCURRENCY", &threads.to_string());
        self
    }

    /// Messages claimed, and settled, by one statement at most. Defaults to 500.
    #[must_use]
    pub fn batch(mut self, messages: usize) -> Self {
        self.set("OUTBOX_BATCH", &messages.to_string());
        self
    }

    /// How long an idle relay waits before it looks again. Defaults to 500 ms.
    #[must_use]
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.config.poll_interval = interval;
        self
    }

    /// How long a silent relay keeps its messages. Defaults to 60 s.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.config.lease = lease;
        self
    }

    /// The limit for one send. Defaults to 2.5 s.
    #[must_use]
    pub fn send_timeout(mut self, timeout: Duration) -> Self {
        self.config.send_timeout = timeout;
        self
    }

    /// Failed attempts after which a message is dead. Defaults to 20.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.set("OUTBOX_MAX_ATTEMPTS", &attempts.to_string());
        self
    }

    /// The delay between attempts. Defaults to `exponential(5s, 1h)`.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.config.backoff = backoff;
        self
    }

    /// How long the ledger keeps settled messages; `None`: for ever. Defaults to a week.
    #[must_use]
    pub fn retention(mut self, retention: Option<Duration>) -> Self {
        self.config.cleaner = retention.is_some();
        if let Some(retention) = retention {
            self.config.retention = retention;
        }
        self
    }

    /// Whether messages are claimed and sent; without, the relay stands by. Defaults to true.
    #[must_use]
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.config.enabled = enabled;
        self
    }

    /// Claims this many messages and then no more: for jobs that do a bounded amount of work.
    /// Defaults to no limit.
    #[must_use]
    pub fn limit(mut self, messages: u64) -> Self {
        self.limit = Some(messages);
        self
    }

    /// Checks the settings and the database, takes a lease and starts the threads.
    ///
    /// The relay opens five connections of its own: they do not come out of the application's
    /// pool, so neither can starve the other.
    ///
    /// # Errors
    /// A [`StartError`]: a bad setting, no database, no outbox in it or one of another version,
    /// or no thread. Nothing is left running.
    pub fn start(self) -> Result<RelayHandle, StartError> {
        if let Some(error) = self.error {
            return Err(error.into());
        }
        let config = self.config;
        config.validate()?;
        let own_threads = self.dispatcher.as_ref().map(|_| config.concurrency);
        let bulkheads = Bulkhead::all(&config, own_threads);
        let dispatcher = match self.dispatcher {
            Some(dispatcher) => dispatcher,
            None => {
                if config.enabled && config.url.is_none() && config.destinations.is_empty() {
                    log::error!(event = "no_destination"; "nothing can be sent: OUTBOX_URL is not set, and there is no destination");
                }
                Arc::new(HttpDispatcher::new(&config)?)
            }
        };
        RelayHandle::start(config, dispatcher, bulkheads, self.limit)
    }
}

/// Why a relay did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting is bad, or contradicts another.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The database cannot be reached, or the outbox is not there.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The system gave no thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}
