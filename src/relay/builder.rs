//! Setting a relay up.

mod assembly;
mod in_code;
mod settings;

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;

use diesel::PgConnection;
use diesel::r2d2::ManageConnection;
use serde::de::DeserializeOwned;

pub(super) use self::assembly::Assembled;
use self::in_code::InCode;
use super::groups::HANDLERS;
use super::observer::{Observer, Observers};
use super::shared::CLAIM_LIMIT;
use super::{Incarnation, RelayHandle, StartError};
use crate::config::{Config, ConfigError, Destination, Route};
use crate::dispatch::Dispatcher;
use crate::event::Event;
use crate::handlers::{Context, HandlerError, Handlers, Pool, PooledContext};
use crate::message::Message;
use crate::store::relay::connection::Manager;

/// Where setting up a relay begins. What runs is a [`RelayHandle`].
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
        Self::in_test().set("DATABASE_URL", &database_url.into())
    }

    /// A relay for the outbox `outbox` in the database that this manager connects to, with default settings: see
    /// [`RelayBuilder::manager`].
    ///
    /// ```no_run
    /// use diesel::PgConnection;
    /// use diesel::r2d2::ConnectionManager;
    /// use diesel_outbox::Relay;
    ///
    /// let manager = ConnectionManager::<PgConnection>::new("postgres://localhost/shop");
    /// let relay = Relay::managed(manager).url("https://receiver.example/events").start()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn managed(manager: impl ManageConnection<Connection = PgConnection>) -> RelayBuilder {
        Self::in_test().manager(manager)
    }

    /// A relay with default settings and no database, for a [`TestRelay`](crate::testing::TestRelay):
    /// that works on the test's connection.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    /// use diesel_outbox::testing::{RecordingDispatcher, TestRelay};
    ///
    /// let receiver = RecordingDispatcher::new();
    /// let relay = TestRelay::new(Relay::in_test().dispatcher(receiver.clone()))?;
    /// # Ok::<(), diesel_outbox::StartError>(())
    /// ```
    pub fn in_test() -> RelayBuilder {
        let mut builder = Self::from_config(Config::default());
        builder.in_code = InCode::All;
        builder
    }

    /// A relay with these settings, for example those of [`config::from_env`](crate::config::from_env).
    ///
    /// ```no_run
    /// use diesel_outbox::{Relay, config};
    ///
    /// // From DATABASE_URL, OUTBOX_URL, …
    /// let relay = Relay::from_config(config::from_env()?).start()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_config(config: Config) -> RelayBuilder {
        RelayBuilder {
            config,
            dispatcher: None,
            handlers: Vec::new(),
            connections: None,
            manager: None,
            observers: Observers::default(),
            limit: None,
            in_code: InCode::Some(Vec::new()),
            claim_limit: CLAIM_LIMIT,
            error: None,
        }
    }
}

/// Settings of a relay. What is wrong with them is told by [`start`](Self::start).
///
/// Each setting says its default; [`SETTINGS`](crate::config::SETTINGS) are more, which
/// [`Relay::from_config`] takes.
///
/// ```no_run
/// use diesel_outbox::{Backoff, Relay};
/// use std::time::Duration;
///
/// let relay = Relay::builder("postgres://localhost/shop")
///     .outbox("hrm.outbox")
///     .url("https://receiver.example/events")
///     .concurrency(8)
///     .batch(200)
///     .poll_interval(Duration::from_secs(1))
///     .send_timeout(Duration::from_secs(10))
///     .lease(Duration::from_secs(120))
///     .max_attempts(10)
///     .backoff("5s,1m,10m,1h".parse::<Backoff>()?)
///     .retention(Some(Duration::from_secs(30 * 24 * 3600)))
///     .start()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// With several destinations:
///
/// ```
/// use diesel_outbox::{Destination, Relay};
///
/// let relay = Relay::builder("postgres://localhost/shop")
///     .destination(Destination::new("billing", "https://billing.example/events")?)
///     .destination(Destination::new("audit", "https://audit.example/events")?)
///     .route("invoice.*", "billing")
///     .route_to_each("order.paid", &["billing", "audit"])
///     .url("https://receiver.example/events"); // all other topics
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
pub struct RelayBuilder {
    config: Config,
    dispatcher: Option<Arc<dyn Dispatcher>>,
    handlers: Vec<(String, Handlers)>,
    connections: Option<Arc<Pool>>,
    manager: Option<Arc<dyn Manager>>,
    observers: Observers,
    limit: Option<u64>,
    in_code: InCode,
    claim_limit: Duration,
    /// The first setting that could not be used.
    error: Option<ConfigError>,
}

impl RelayBuilder {
    /// A server that needs longer than this for a claim is as slow as a huge table.
    #[cfg(test)]
    pub(in crate::relay) fn claim_limit(mut self, limit: Duration) -> Self {
        self.claim_limit = limit;
        self
    }

    fn set(mut self, variable: &'static str, value: &str) -> Self {
        self.in_code.add(variable);
        if let Err(error) = self.config.set(variable, value) {
            self.error.get_or_insert(error);
        }
        self
    }

    /// The same, for a value that needs no reading.
    fn with(mut self, variable: &'static str, set: impl FnOnce(&mut Config)) -> Self {
        self.in_code.add(variable);
        set(&mut self.config);
        self
    }

    /// The outbox to work on: `name` or `schema.name`. Defaults to `outbox`.
    #[must_use]
    pub fn outbox(self, name: &str) -> Self {
        self.set("OUTBOX_TABLE", name)
    }

    /// Where messages go that no route serves. By default such messages wait for another relay.
    #[must_use]
    pub fn url(self, url: &str) -> Self {
        self.set("OUTBOX_URL", url)
    }

    /// Adds a named destination: for routes, and for messages that name it
    /// ([`NewMessage::destination`](crate::NewMessage::destination)).
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

    /// [`on`](Self::on), for a handler that works in the database: its context has `once` and `connection`.
    /// [`start`](Self::start) fails without [`connections`](Self::connections).
    ///
    /// ```no_run
    /// # use diesel::prelude::*;
    /// # use diesel::r2d2::{ConnectionManager, Pool};
    /// # use diesel_outbox::{Event, Relay};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct MemberJoined { member_id: i64 }
    /// # impl Event for MemberJoined { const TOPIC: &'static str = "member.joined"; }
    /// # let pool = Pool::new(ConnectionManager::<PgConnection>::new("postgres://localhost/club"))?;
    /// let relay = Relay::builder("postgres://localhost/club")
    ///     .connections(move || pool.get())
    ///     .on_pooled::<MemberJoined>(|event, context| {
    ///         context.once(|conn| {
    ///             diesel::sql_query("UPDATE clubs SET members = members + 1").execute(conn)?;
    ///             Ok(())
    ///         })?;
    ///         Ok(())
    ///     })
    ///     .start()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn on_pooled<E: Event + DeserializeOwned>(
        self,
        handler: impl Fn(E, &PooledContext<'_>) -> Result<(), HandlerError> + Send + Sync + 'static,
    ) -> Self {
        self.in_default_group(|group| group.on_pooled::<E>(handler))
    }

    /// [`on_topic`](Self::on_topic), for a handler that works in the database: see
    /// [`on_pooled`](Self::on_pooled).
    ///
    /// ```
    /// use diesel::RunQueryDsl;
    /// use diesel_outbox::Relay;
    ///
    /// let relay = Relay::builder("postgres://localhost/shop").on_topic_pooled("audit.entry", |message, context| {
    ///     context.once(|conn| {
    ///         diesel::sql_query("INSERT INTO audit VALUES ($1)")
    ///             .bind::<diesel::sql_types::Text, _>(&message.payload)
    ///             .execute(conn)?;
    ///         Ok(())
    ///     })?;
    ///     Ok(())
    /// });
    /// ```
    #[must_use]
    pub fn on_topic_pooled(
        self,
        topic: impl Into<String>,
        handler: impl Fn(&Message, &PooledContext<'_>) -> Result<(), HandlerError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        self.in_default_group(|group| group.on_topic_pooled(topic, handler))
    }

    /// Handles the messages of a topic as they are, in the group `handlers`.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// let relay = Relay::builder("postgres://localhost/shop").on_topic("audit.entry", |message, _| {
    ///     println!("{} {}", message.created_at.elapsed()?.as_secs(), message.payload);
    ///     Ok(())
    /// });
    /// ```
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
    /// A group without a handler, and a name that is there twice, are errors of [`start`](Self::start).
    ///
    /// The names of groups are kept in the outbox while such messages are under way, and in the inbox of
    /// [`PooledContext::once`]: keep them as they are.
    ///
    /// ```
    /// use diesel_outbox::{Handlers, Relay};
    ///
    /// let search = Handlers::new().on_topic("order.paid", |message, _| Ok(println!("index {message:?}")));
    /// let mailer = Handlers::new().on_topic("order.paid", |message, _| Ok(println!("mail {message:?}")));
    /// let relay = Relay::builder("postgres://localhost/shop")
    ///     .handlers("search", search.concurrency(2))
    ///     .handlers("mailer", mailer);
    /// ```
    #[must_use]
    pub fn handlers(mut self, name: impl Into<String>, handlers: Handlers) -> Self {
        self.handlers.push((name.into(), handlers));
        self
    }

    /// Where handlers ([`on_pooled`](Self::on_pooled)) get their connections from: the application's pool, as a rule. The relay's own
    /// connections are not for them. A pool should give up sooner than a handler's time is over: r2d2 waits
    /// for 30 s if it is told nothing else.
    ///
    /// ```no_run
    /// use diesel::r2d2::{ConnectionManager, Pool};
    /// use diesel_outbox::Relay;
    /// use std::time::Duration;
    ///
    /// let manager = ConnectionManager::<diesel::PgConnection>::new("postgres://localhost/club");
    /// let pool = Pool::builder().connection_timeout(Duration::from_secs(1)).build(manager)?;
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

    /// Where the relay's own connections come from, instead of a URL: a manager of r2d2's, of your own where
    /// passwords rotate, tokens expire, or a role is to be set. Each thread of the relay asks it for a connection,
    /// keeps that one, and asks for another when it breaks. There is no pool: only
    /// [`connect`](ManageConnection::connect) is called, by several threads at once.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel::connection::SimpleConnection;
    /// use diesel::r2d2::{self, ManageConnection};
    /// use diesel_outbox::Relay;
    ///
    /// # fn token() -> String { String::new() }
    /// /// Connects with a token that is new each time, and works as the role `relay`.
    /// struct ByToken;
    ///
    /// impl ManageConnection for ByToken {
    ///     type Connection = PgConnection;
    ///     type Error = r2d2::Error;
    ///
    ///     fn connect(&self) -> Result<PgConnection, r2d2::Error> {
    ///         let url = format!("postgres://shop:{}@db/shop?tcp_user_timeout=20000", token());
    ///         let mut conn = PgConnection::establish(&url).map_err(r2d2::Error::ConnectionError)?;
    ///         conn.batch_execute("SET ROLE relay").map_err(r2d2::Error::QueryError)?;
    ///         Ok(conn)
    ///     }
    ///
    ///     fn is_valid(&self, _: &mut PgConnection) -> Result<(), r2d2::Error> {
    ///         Ok(())
    ///     }
    ///
    ///     fn has_broken(&self, _: &mut PgConnection) -> bool {
    ///         false
    ///     }
    /// }
    ///
    /// let relay = Relay::managed(ByToken)
    ///     .listener_url("postgres://shop@db/shop?passfile=/run/secrets/pgpass")
    ///     .url("https://receiver.example/events")
    ///     .start()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The relay names each connection and sets its limits, as by a URL. What it cannot set: how soon a connection
    /// notices that its server is gone (`connect_timeout`, `keepalives_idle`, `keepalives_interval`,
    /// `keepalives_count`, `tcp_user_timeout`): put these into the manager's URL. A pooler in transaction mode is
    /// not noticed: let the manager connect to the server itself.
    ///
    /// No connection of a manager can listen for new messages. Give [`listener_url`](Self::listener_url) as well, or
    /// the relay looks for them every [`poll_interval`](Self::poll_interval), and says so once.
    ///
    /// ```
    /// use diesel::PgConnection;
    /// use diesel::r2d2::ConnectionManager;
    /// use diesel_outbox::Relay;
    ///
    /// let manager = ConnectionManager::<PgConnection>::new("postgres://shop@db/shop");
    /// let builder = Relay::builder("").manager(manager);
    /// # let _ = builder;
    /// ```
    #[must_use]
    pub fn manager(mut self, manager: impl ManageConnection<Connection = PgConnection>) -> Self {
        self.manager = Some(Arc::new(manager));
        self
    }

    /// Where the relay listens for new messages: a direct connection, where its others lead through a pooler or come
    /// from a [`manager`](Self::manager). Defaults to the URL of [`Relay::builder`].
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// let builder = Relay::builder("postgres://pooler/shop").listener_url("postgres://db/shop");
    /// # let _ = builder;
    /// ```
    #[must_use]
    pub fn listener_url(self, url: &str) -> Self {
        self.set("OUTBOX_LISTENER_URL", url)
    }

    /// Tells this observer what happens to messages. There can be several.
    ///
    /// ```
    /// use diesel_outbox::{Observer, Relay, Settled};
    ///
    /// struct Trail;
    ///
    /// impl Observer for Trail {
    ///     fn settled(&self, settled: &Settled<'_>) {
    ///         println!("{} is {} after {} attempts", settled.message.message_id, settled.status, settled.attempts);
    ///     }
    /// }
    ///
    /// let relay = Relay::builder("postgres://localhost/shop").observe(Trail);
    /// ```
    #[must_use]
    pub fn observe(mut self, observer: impl Observer) -> Self {
        self.observers.0.push(Arc::new(observer));
        self
    }

    /// Sends with this instead of HTTP: to the destinations with a URL or, where there are none, everything that
    /// no handler serves.
    ///
    /// ```no_run
    /// use diesel_outbox::{Dispatcher, HttpDispatcher, Message, Outcome, Relay, config};
    ///
    /// /// Says what is about to be sent.
    /// struct Told(HttpDispatcher);
    ///
    /// impl Dispatcher for Told {
    ///     fn dispatch(&self, message: &Message) -> Outcome {
    ///         println!("{} of {}", message.message_id, message.topic);
    ///         self.0.dispatch(message)
    ///     }
    /// }
    ///
    /// let config = config::from_env()?;
    /// let told = Told(HttpDispatcher::new(&config)?);
    /// let relay = Relay::from_config(config).dispatcher(told).start()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn dispatcher(mut self, dispatcher: impl Dispatcher) -> Self {
        self.dispatcher = Some(Arc::new(dispatcher));
        self
    }

    /// Checks the settings and the database, takes a lease and starts the threads.
    ///
    /// Metrics go through the crate [`metrics`](https://docs.rs/metrics), to the recorder that is installed
    /// by then: one that comes later sees most of them never. What they are called, and mean, stands in
    /// [the guide](crate::guide::operating).
    ///
    /// The relay opens up to five connections of its own: they do not come out of the application's
    /// pool, so neither can starve the other.
    ///
    /// # Errors
    /// A [`StartError`]: a bad setting, no database, no outbox in it or one of another version, a role
    /// that may not do all that a relay does, or no thread. Nothing is left running.
    pub fn start(self) -> Result<RelayHandle, StartError> {
        self.incarnation().map(RelayHandle::new)
    }

    pub(super) fn incarnation(self) -> Result<Incarnation, StartError> {
        let wanting = self.handlers.iter().find(|(_, group)| group.wants_pool);
        if let (Some((name, _)), None) = (wanting, &self.connections) {
            return Err(ConfigError::new(
                format!("handlers.{name}"),
                "a handler wants connections (on_pooled): say where to take them (RelayBuilder::connections)",
            )
            .into());
        }
        Incarnation::start(self.assemble()?)
    }
}

impl RelayHandle {
    /// Has a relay with other settings take the place of this one: starts it, and then ends this one as
    /// [`shutdown`](Self::shutdown) does. Nothing is lost or sent twice meanwhile: for a moment they are two relays of
    /// one outbox. Where the new one cannot start, this one goes on; where this one was shut down meanwhile, or before, the
    /// new one is shut down, too.
    ///
    /// `deadline` is for the end of this one. Handlers, dispatchers and observers are those of `builder`.
    ///
    /// ```
    /// use diesel_outbox::{Config, Relay, RelayHandle, StartError};
    /// use std::time::Duration;
    ///
    /// /// A secret or a route has changed.
    /// fn reload(relay: &RelayHandle, config: Config) -> Result<(), StartError> {
    ///     relay.reload(Relay::from_config(config), Duration::from_secs(30))
    /// }
    /// ```
    ///
    /// # Errors
    /// A [`StartError`] as from [`RelayBuilder::start`]. That this one has not ended cleanly is logged.
    pub fn reload(&self, builder: RelayBuilder, deadline: Duration) -> Result<(), StartError> {
        self.replace(builder.incarnation()?, deadline);
        Ok(())
    }
}
