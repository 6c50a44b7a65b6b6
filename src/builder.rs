//! The builder of a relay: settings, destinations, routes and handlers.

mod assembly;
mod bulkheads;
#[cfg(feature = "operate")]
pub(crate) mod by_hand;
mod in_code;
mod members;
mod settings;
mod sql;

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;

use diesel::PgConnection;
use diesel::r2d2::ManageConnection;
use secrecy::ExposeSecret;
use serde::de::DeserializeOwned;

pub use self::assembly::check;
pub(super) use self::assembly::{CheckedSettings, settings_of};
#[cfg(test)]
pub(super) use self::bulkheads::Dispatchers;
use self::in_code::InCode;
use crate::config::{Config, ConfigError, Destination, FeedDestination, Route};
use crate::dispatch::Dispatcher;
use crate::engine::host::shared::CLAIM_LIMIT;
use crate::engine::host::sql::connection::Manager;
use crate::engine::host::{Incarnation, Launch, RelayHandle, StartError};
use crate::engine::observe::observer::{Observer, Observers};
use crate::event::Event;
use crate::handlers::groups::HANDLERS;
use crate::handlers::{
    ConnectionPool, Context, HandlerError, Handlers, PooledContext, no_connection, of_url, pool_of,
};
use crate::log;
use crate::message::Message;

/// The start of setting up a relay. A running relay is a [`RelayHandle`].
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
    /// A builder with default settings, for the outbox `outbox` in this database.
    pub fn builder(database_url: impl Into<String>) -> RelayBuilder {
        Self::in_test().set("DATABASE_URL", &database_url.into())
    }

    /// A builder with default settings, for the outbox `outbox` in the manager's database. See
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

    /// A builder with default settings and no database, for a [`TestRelay`](crate::testing::TestRelay). The test
    /// relay works on the test's connection.
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

    /// A builder with these settings, for example from [`config::from_env`](crate::config::from_env).
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
            is_one_shot: false,
            in_code: InCode::Some(Vec::new()),
            claim_limit: CLAIM_LIMIT,
            error: None,
        }
    }
}

/// The settings of a relay. [`start`](Self::start) reports bad settings.
///
/// Each setter documents its default. [`configure`](Self::configure) and [`Relay::from_config`] take all
/// [settings](crate::guide::settings), also the ones without a setter here.
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
    connections: Option<Arc<ConnectionPool>>,
    manager: Option<Arc<dyn Manager>>,
    observers: Observers,
    limit: Option<u64>,
    is_one_shot: bool,
    in_code: InCode,
    claim_limit: Duration,
    /// The error of the first bad setting.
    error: Option<ConfigError>,
}

impl RelayBuilder {
    /// Sets the time limit of a claim. In a test, a claim beyond a short limit is like a claim from a huge table.
    #[cfg(test)]
    pub(crate) fn claim_limit(mut self, limit: Duration) -> Self {
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

    /// [`set`](Self::set) for a value that needs no parsing.
    fn with(mut self, variable: &'static str, set: impl FnOnce(&mut Config)) -> Self {
        self.in_code.add(variable);
        self.configure(set)
    }

    /// Changes the settings that have no setter here: see the fields of [`Config`].
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// // On a developer's machine, customers' webhooks are at localhost.
    /// let relay = Relay::builder("postgres://localhost/shop").configure(|config| {
    ///     config.endpoint_https_only = false;
    ///     config.endpoint_public_only = false;
    /// });
    /// ```
    #[must_use]
    pub fn configure(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// Sets the outbox to work on: `name` or `schema.name`. Defaults to `outbox`.
    #[must_use]
    pub fn outbox(self, name: &str) -> Self {
        self.set("OUTBOX_TABLE", name)
    }

    /// Sets the URL for messages that no route serves. Defaults to none: such messages wait for another relay.
    #[must_use]
    pub fn url(self, url: &str) -> Self {
        self.set("OUTBOX_URL", url)
    }

    /// Adds a named destination. Routes can name the destination, and so can messages
    /// ([`NewMessage::destination`](crate::NewMessage::destination)).
    #[must_use]
    pub fn destination(mut self, destination: Destination) -> Self {
        self.config.destinations.push(destination);
        self
    }

    /// Adds a [feed](crate::feed): a destination that is read instead of sent to. Routes lead to it as to others.
    ///
    /// ```
    /// let relay = diesel_outbox::Relay::builder("postgres://localhost/shop")
    ///     .feed("warehouse")
    ///     .route("order.*", "warehouse");
    /// ```
    #[must_use]
    pub fn feed(mut self, name: impl Into<String>) -> Self {
        self.config.feeds.push(FeedDestination::new(name));
        self
    }

    /// Adds a route from topics that match the pattern `topic` to the destination named `to`.
    #[must_use]
    pub fn route(mut self, topic: &str, to: &str) -> Self {
        self.config.routes.push(Route::new(topic, to));
        self
    }

    /// Adds a route to several destinations. Each destination gets its own message, with its own attempts and its
    /// own row in the ledger.
    #[must_use]
    pub fn route_to_each(mut self, topic: &str, to: &[&str]) -> Self {
        self.config
            .routes
            .push(Route::to_each(topic, to.iter().copied()));
        self
    }

    /// Handles the messages of an event's topic in this process, in the group `handlers`. See [`Handlers`].
    ///
    /// The most specific route wins: a topic with a handler goes to the handler, not to the default URL or to a
    /// route with a matching pattern. To send the topic to both, name both:
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
    ///         println!("member {} has joined (attempt {})", event.member_id, context.attempt());
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

    /// Like [`on`](Self::on), for a handler that uses the database: the handler's context has `once` and
    /// `connection`. The connections come from a pool that the relay opens for its handlers, unless
    /// [`connections`](Self::connections) sets another source.
    ///
    /// ```no_run
    /// # use diesel::prelude::*;
    /// # use diesel_outbox::{Event, Relay};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct MemberJoined { member_id: i64 }
    /// # impl Event for MemberJoined { const TOPIC: &'static str = "member.joined"; }
    /// let relay = Relay::builder("postgres://localhost/club")
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

    /// Like [`on_topic`](Self::on_topic), for a handler that uses the database. See [`on_pooled`](Self::on_pooled).
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

    /// Handles the messages of a topic without parsing the payload, in the group `handlers`.
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

    /// Adds a group of handlers, with its own name and threads. If several groups handle a topic, each group gets
    /// its own copy of every message, with its own attempts.
    ///
    /// [`start`](Self::start) fails for a group without a handler and for a repeated name.
    ///
    /// Do not rename a group: unsettled messages in the outbox and the inbox of [`PooledContext::once`] refer to
    /// the group by name.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    /// use diesel_outbox::handlers::Handlers;
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

    /// Sets the source of connections for [`on_pooled`](Self::on_pooled) handlers, such as the application's pool. Defaults
    /// to a pool that the relay opens for its handlers, with one connection for each concurrent call.
    ///
    /// Handlers compete with your requests for the connections of a shared pool: set
    /// [`Handlers::concurrency`] well below the pool's size, and the pool's connection timeout (30 s by default in r2d2)
    /// below the handlers' time limit. Without a connection, a message waits and uses no attempt.
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
            Err(error) => Err(no_connection(error)),
        }));
        self
    }

    /// Sets an r2d2 manager as the source of the relay's own connections, instead of a URL. Write your own manager
    /// if passwords rotate, tokens expire or a role must be set. Defaults to none: the relay connects by URL.
    ///
    /// Each thread of the relay takes one connection from the manager, keeps the connection, and takes another when
    /// it breaks. There is no pool. The relay calls only [`connect`](ManageConnection::connect), from several
    /// threads at once.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel::connection::SimpleConnection;
    /// use diesel::r2d2::{self, ManageConnection};
    /// use diesel_outbox::Relay;
    ///
    /// # fn token() -> String { String::new() }
    /// /// Connects with a new token each time and sets the role `relay`.
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
    /// The relay names each connection and sets its statement limits, as it does for a URL. The relay cannot set
    /// the parameters that detect a lost server. Put them into the manager's URL: `connect_timeout`,
    /// `keepalives_idle`, `keepalives_interval`, `keepalives_count` and `tcp_user_timeout`.
    ///
    /// The manager must connect to the server directly: the relay cannot detect a pooler in transaction mode.
    ///
    /// The relay cannot listen for new messages on a manager's connection. Set [`listener_url`](Self::listener_url)
    /// too. Otherwise the relay logs once that it polls, and polls every [`poll_interval`](Self::poll_interval).
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

    /// Sets the URL at which the relay listens for new messages: a direct connection to the server. Needed if the
    /// relay's other connections go through a pooler or come from a [`manager`](Self::manager). Defaults to the URL
    /// of [`Relay::builder`].
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

    /// Names this relay among those of this process: its threads are called `LABEL relay-…`, and the label `outbox` of
    /// its metrics is `LABEL:` and the name of the outbox.
    ///
    /// ```no_run
    /// use diesel_outbox::Relay;
    ///
    /// let relays = ["acme", "globex"].map(|tenant| {
    ///     Relay::builder(format!("postgres://localhost/{tenant}"))
    ///         .url("https://receiver.example/events")
    ///         .configure(|config| config.share_connection = true)
    ///         .label(tenant)
    ///         .start()
    /// });
    /// ```
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        let label: String = label.into();
        // Neither threads nor lines of a log have names with others.
        self.config.label = Some(label.replace(char::is_control, " "));
        self
    }

    /// Adds an observer, which the relay calls as messages are sent and settled. A relay can have several.
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

    /// Sets the dispatcher that sends messages instead of HTTP. The dispatcher gets the messages of destinations
    /// with a URL. Without such destinations, it gets every message that no handler serves, in the mode of the relay
    /// (`OUTBOX_MODE`): if that is batched, many in one call of [`dispatch_batch`](Dispatcher::dispatch_batch). Defaults to
    /// HTTP.
    ///
    /// ```no_run
    /// use diesel_outbox::{Dispatcher, HttpDispatcher, Message, Outcome, Relay, config};
    ///
    /// /// Prints each message before it is sent.
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
    /// The relay reports metrics through the crate [`metrics`](https://docs.rs/metrics). Install the recorder
    /// before `start`; a later recorder misses most metrics. [The guide](crate::guide::watch) lists the metrics.
    ///
    /// The relay opens up to five connections of its own, and two more once messages have ordering keys, or two in all
    /// with [`share_connection`](Config::share_connection) and without a listener. Handlers that
    /// use the database ([`on_pooled`](Self::on_pooled)) have up to one more for each concurrent call. They do not come
    /// from the application's pool, so the relay and the application cannot starve each other.
    ///
    /// # Errors
    /// A [`StartError`] if a setting is bad, the database cannot be reached, the outbox is missing or has another
    /// version, the role lacks a right, or a thread cannot be started. No thread is left running.
    pub fn start(self) -> Result<RelayHandle, StartError> {
        let (incarnation, launch) = self.prepare()?;
        incarnation.launch(launch)?;
        Ok(RelayHandle::new(incarnation))
    }

    fn prepare(mut self) -> Result<(Incarnation, Launch), StartError> {
        self.give_connections()?;
        Incarnation::prepare(self.checked()?.assembled()?)
    }

    /// Gives handlers that use the database a pool of their own, unless the application has set a source.
    fn give_connections(&mut self) -> Result<(), ConfigError> {
        let wanting = self.handlers.iter().filter(|(_, group)| group.wants_pool);
        let calls = |group: &Handlers| group.policy.concurrency.unwrap_or(self.config.concurrency);
        if self.connections.is_some() {
            for (name, group) in wanting.filter(|(_, group)| group.policy.concurrency.is_none()) {
                log::warn!(event = "handlers_share_pool", handlers = name; "handlers of {name} may take up to {} connections of the application's pool at once: set Handlers::concurrency well below the size of the pool, or leave out RelayBuilder::connections to give handlers a pool of their own", calls(group));
            }
            return Ok(());
        }
        let most: usize = wanting.map(|(_, group)| calls(group)).sum();
        if most == 0 {
            return Ok(());
        }
        let manager = match &self.manager {
            Some(manager) => Arc::clone(manager),
            None => of_url(self.config.database_url()?.expose_secret()),
        };
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        self.connections = Some(pool_of(manager, most));
        Ok(())
    }
}

impl RelayHandle {
    /// Replaces this relay with a relay of other settings: starts the new relay, then ends the old relay as
    /// [`shutdown`](Self::shutdown) does. For a moment two relays work on one outbox; no message is lost or sent twice.
    ///
    /// If the new relay cannot start, the old relay continues. If the handle was already shut down, or is shut down
    /// meanwhile, the new relay is shut down too.
    ///
    /// `deadline` limits the shutdown of the old relay. The new relay has the handlers, dispatchers and observers
    /// of `builder`.
    ///
    /// ```
    /// use diesel_outbox::{Relay, RelayHandle, StartError};
    /// use diesel_outbox::config::Config;
    /// use std::time::Duration;
    ///
    /// /// A secret or a route has changed.
    /// fn reload(relay: &RelayHandle, config: Config) -> Result<(), StartError> {
    ///     relay.reload(Relay::from_config(config), Duration::from_secs(30))
    /// }
    /// ```
    ///
    /// # Errors
    /// A [`StartError`], as from [`RelayBuilder::start`]. If the old relay does not shut down cleanly, the relay only
    /// logs the error.
    pub fn reload(&self, builder: RelayBuilder, deadline: Duration) -> Result<(), StartError> {
        let prepared = builder.prepare();
        prepared
            .and_then(|next| self.replace(next, deadline))
            .inspect_err(|error| self.reload_failed(error))
    }
}
