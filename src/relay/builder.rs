//! Setting a relay up.

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;

use diesel::PgConnection;
use serde::de::DeserializeOwned;

use super::RelayHandle;
use super::bulkhead::{Bulkhead, Dispatchers};
use super::groups::{HANDLERS, add_groups};
use super::observer::{Observer, Observers};
use crate::backoff::Backoff;
use crate::config::{Config, ConfigError, Destination, Route};
use crate::dispatch::{Dispatcher, HttpDispatcher};
use crate::error::DatabaseError;
use crate::event::Event;
use crate::handlers::{Connections, Context, HandlerDispatcher, HandlerError, Handlers, inbox_of};
use crate::message::Message;

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

    /// A relay with default settings and no database, for a [`TestRelay`](crate::testing::TestRelay):
    /// that works on the test's connection.
    pub fn in_test() -> RelayBuilder {
        Self::from_config(Config::default())
    }

    /// A relay with these settings, for example those of [`config::from_env`](crate::config::from_env).
    pub fn from_config(config: Config) -> RelayBuilder {
        RelayBuilder {
            config,
            dispatcher: None,
            handlers: Vec::new(),
            connections: None,
            observers: Observers::default(),
            limit: None,
            error: None,
        }
    }
}

/// Settings of a relay. What is wrong with them is told by [`start`](Self::start).
pub struct RelayBuilder {
    config: Config,
    dispatcher: Option<Arc<dyn Dispatcher>>,
    handlers: Vec<(String, Handlers)>,
    connections: Option<Arc<Connections>>,
    observers: Observers,
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

    /// Handles the messages of an event's topic in this process, in the group `handlers`: see
    /// [`Handlers`].
    ///
    /// A topic with a handler goes to its handler, and not to the default URL nor to a pattern that
    /// matches it, since the most particular route wins. To have it go to both, name both:
    /// `.route_to_each("order.paid", &["billing", "handlers"])`.
    ///
    /// ```no_run
    /// # use diesel::prelude::*;
    /// # use diesel_outbox::{Event, Relay};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct MemberJoined { member_id: i64 }
    /// # impl Event for MemberJoined { const TOPIC: &'static str = "member.joined"; }
    /// let relay = Relay::builder("postgres://localhost/club")
    ///     .on::<MemberJoined>(|event, context| {
    ///         println!("{} has joined, told {} times", event.member_id, context.attempt());
    ///         Ok(())
    ///     })
    ///     .url("https://receiver.example/events") // all other topics
    ///     .start()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn on<E: Event + DeserializeOwned>(
        self,
        handler: impl Fn(E, &Context<'_>) -> Result<(), HandlerError> + Send + Sync + 'static,
    ) -> Self {
        self.in_default_group(|group| group.on::<E>(handler))
    }

    /// Handles the messages of a topic as they are, in the group `handlers`.
    #[must_use]
    pub fn on_topic(
        self,
        topic: impl Into<String>,
        handler: impl Fn(&Message, &Context<'_>) -> Result<(), HandlerError> + Send + Sync + 'static,
    ) -> Self {
        self.in_default_group(|group| group.on_topic(topic, handler))
    }

    fn in_default_group(mut self, add: impl FnOnce(Handlers) -> Handlers) -> Self {
        let at = self.handlers.iter().position(|(name, _)| name == HANDLERS);
        let group = match at {
            Some(at) => self.handlers.remove(at).1,
            None => Handlers::new(),
        };
        self.handlers.push((HANDLERS.to_owned(), add(group)));
        self
    }

    /// Adds a group of handlers, with a name and threads of its own. Groups that handle the same topic
    /// each get every message of it, as a message of its own with its own attempts.
    ///
    /// The names of groups are kept in the outbox while such messages are under way, and in the inbox of
    /// [`Context::once`]: keep them as they are.
    #[must_use]
    pub fn handlers(mut self, name: impl Into<String>, handlers: Handlers) -> Self {
        self.handlers.push((name.into(), handlers));
        self
    }

    /// Where handlers get their connections from: the application's pool, as a rule. The relay's own
    /// connections are not for them.
    ///
    /// ```no_run
    /// use diesel::r2d2::{ConnectionManager, Pool};
    /// use diesel_outbox::Relay;
    ///
    /// let pool = Pool::new(ConnectionManager::<diesel::PgConnection>::new("postgres://localhost/club"))?;
    /// let relay = Relay::builder("postgres://localhost/club").connections(move || pool.get());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn connections<C, E>(
        mut self,
        get: impl Fn() -> Result<C, E> + Send + Sync + 'static,
    ) -> Self
    where
        C: DerefMut<Target = PgConnection> + 'static,
        E: std::fmt::Display,
    {
        self.connections = Some(Arc::new(move || match get() {
            Ok(conn) => Ok(Box::new(conn)),
            Err(error) => Err(HandlerError::retry(format_args!("no connection: {error}"))),
        }));
        self
    }

    /// Tells this observer what happens to messages. There can be several.
    #[must_use]
    pub fn observe(mut self, observer: impl Observer) -> Self {
        self.observers.0.push(Arc::new(observer));
        self
    }

    /// Sends with this instead of HTTP what no handler serves.
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

    /// How long the [inbox](crate::inbox) of this database remembers what was handled. Defaults to
    /// unset: the relay does not clean it. Where several relays do, the shortest time counts.
    #[must_use]
    pub fn inbox_retention(mut self, retention: Duration) -> Self {
        self.config.inbox_retention = Some(retention);
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
        let Assembled {
            config,
            common,
            own_threads,
            groups,
            observers,
            limit,
        } = self.assemble()?;
        let in_process = groups.into_iter().map(|group| group as Arc<dyn Dispatcher>);
        let dispatchers = Dispatchers {
            common,
            own_threads,
            in_process: in_process.collect(),
        };
        let bulkheads = Bulkhead::all(&config, dispatchers);
        RelayHandle::start(config, bulkheads, observers, limit)
    }

    /// Puts together what works, with settings that are checked.
    pub(super) fn assemble(self) -> Result<Assembled, StartError> {
        if let Some(error) = self.error {
            return Err(error.into());
        }
        let mut config = self.config;
        add_groups(&mut config, &self.handlers)?;
        config.validate()?;
        let own_threads = self.dispatcher.as_ref().map(|_| config.concurrency);
        let common = match self.dispatcher {
            Some(dispatcher) => dispatcher,
            None => {
                let is_served = config.url.is_some()
                    || !config.destinations.is_empty()
                    || !config.in_process.is_empty();
                if config.enabled && !is_served {
                    log::error!(event = "no_destination"; "nothing can be sent: OUTBOX_URL is not set, and there is no destination and no handler");
                }
                Arc::new(HttpDispatcher::new(&config)?)
            }
        };
        let connections = self.connections;
        let groups = self.handlers.into_iter().map(|(name, handlers)| {
            let inbox = inbox_of(&config.table, &name);
            let timeout = handlers.timeout.unwrap_or(config.send_timeout);
            let dispatcher =
                HandlerDispatcher::new(&name, inbox, timeout, handlers, connections.clone());
            Arc::new(dispatcher)
        });
        Ok(Assembled {
            groups: groups.collect(),
            config,
            common,
            own_threads,
            observers: self.observers,
            limit: self.limit,
        })
    }
}

/// What a relay is made of.
pub(super) struct Assembled {
    pub(super) config: Config,
    /// Sends what no handler serves.
    pub(super) common: Arc<dyn Dispatcher>,
    pub(super) own_threads: Option<usize>,
    /// In the order of `config.in_process`.
    pub(super) groups: Vec<Arc<HandlerDispatcher>>,
    pub(super) observers: Observers,
    pub(super) limit: Option<u64>,
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
