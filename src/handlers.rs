//! Handlers: functions in this process that handle the messages of a topic.
//!
//! The relay calls a function instead of posting to a URL. Attempts, backoff, order and ledger are the same.
//! See [`Handlers`] for a group of handlers, and [`RelayBuilder::on`](crate::RelayBuilder::on) for a single
//! handler. A handler gets its event and a [`Context`].

mod context;
mod error;
mod group;
pub(crate) mod groups;
mod pool;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;

pub use self::context::{Connection, Context, PooledContext};
pub(crate) use self::context::{ConnectionPool, Connections, Pooled};
pub use self::error::HandlerError;
pub(crate) use self::group::HandlerGroup;
pub(crate) use self::pool::{no_connection, of_url, pool_of};

use crate::backoff::Backoff;
use crate::config::{DeliveryPolicy, OnDead, Rate};
use crate::dispatch::{Failure, Outcome, Response};
use crate::event::{DecodeError, Event};
use crate::message::Message;
use crate::name::OutboxName;
use crate::shows::shows;
use crate::status::ReasonCode;

/// A group of handlers, one for each topic, with its own threads.
///
/// A group is a destination like a URL: it has a name, a queue and threads. A message for several groups (or
/// a group and a URL) is fanned out: each of them gets its own message. Add a group to a relay with
/// [`RelayBuilder::handlers`](crate::RelayBuilder::handlers), or single handlers with
/// [`RelayBuilder::on`](crate::RelayBuilder::on).
///
/// The result of a handler is the outcome of the message. `Ok(())`: delivered. An error from `?`: a failed
/// attempt, retried later. A [`HandlerError`] can also choose the delay, or dead-letter the message. A panic
/// is a failed attempt. Like any receiver, a handler may be called twice for a message.
/// [`PooledContext::once`] makes its database work happen only once.
///
/// # How long a handler may run
/// A handler may run for ten minutes, or for the [`timeout`](Self::timeout) of its group. While a call runs,
/// even past that limit, this process starts no second call of the same message. Neither does any other
/// relay, as long as this relay renews its lease, which requires only the database.
///
/// A relay can lose its lease while a call runs: if it is cut off from the database for longer than a
/// takeover takes (8.5 s by default), while another relay is not. The call continues, and the other relay
/// may start the message as well. The lease id then fences the result: only the result of the relay that
/// holds the message counts. Work in [`PooledContext::once`] is done once. Other work, such as sending a
/// mail, may be done twice.
///
/// A shutdown waits for running handlers until its deadline. A handler that runs longer keeps its message
/// claimed. Its result still counts if the process stays alive and the handler returns before the lease
/// expires. After that another relay takes over the message, as after a crash, which costs one attempt
/// (`ABANDONED`).
///
/// ```no_run
/// use diesel::prelude::*;
/// use diesel_outbox::config::{OnDead, Rate};
/// use diesel_outbox::{Backoff, Event, Relay};
/// use diesel_outbox::handlers::{HandlerError, Handlers};
/// use serde::{Deserialize, Serialize};
/// use std::time::Duration;
///
/// #[derive(Serialize, Deserialize)]
/// struct MemberJoined { member_id: i64 }
///
/// impl Event for MemberJoined {
///     const TOPIC: &'static str = "member.joined";
/// }
///
/// # fn send_mail(_: i64) -> std::io::Result<()> { Ok(()) }
/// let mailer = Handlers::new()
///     .concurrency(4)
///     .timeout(Duration::from_secs(60))
///     .max_attempts(5)
///     .backoff(Backoff::Table(vec![Duration::from_secs(10), Duration::from_secs(60)]))
///     .expires_after(Duration::from_secs(3600))
///     .on_dead(OnDead::Continue)
///     .rate(Rate::per_second(10.0))
///     .on::<MemberJoined>(|event, context| {
///         if event.member_id == 0 {
///             return Err(HandlerError::dead("no member has this number"));
///         }
///         println!("attempt {}", context.attempt());
///         send_mail(event.member_id)?;
///         Ok(())
///     });
///
/// let relay = Relay::builder("postgres://localhost/club")
///     .handlers("mailer", mailer)
///     .start()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Handlers {
    by_topic: BTreeMap<String, Arc<Handler>>,
    /// Topics with a second handler.
    repeated: Vec<String>,
    /// Whether any handler needs connections.
    pub(crate) wants_pool: bool,
    pub(crate) policy: DeliveryPolicy,
}

impl Default for Handlers {
    fn default() -> Self {
        let policy = DeliveryPolicy {
            timeout: Some(DEFAULT_TIMEOUT),
            ..DeliveryPolicy::default()
        };
        Self {
            by_topic: BTreeMap::new(),
            repeated: Vec::new(),
            wants_pool: false,
            policy,
        }
    }
}

/// The default time limit of a call.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

type Handler = dyn Fn(&Message, &PooledContext<'_>) -> Result<(), Refusal> + Send + Sync;

/// Why a message was not handled.
enum Refusal {
    Undecodable(DecodeError),
    Handler(HandlerError),
}

impl Handlers {
    /// A group without handlers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a handler for the topic of an event.
    ///
    /// A message whose payload does not decode is dead-lettered (`UNDECODABLE`). A message of a newer version
    /// than the type knows is retried, as a newer program may be deployed soon.
    #[must_use]
    pub fn on<E: Event + DeserializeOwned>(
        self,
        handler: impl Fn(E, &Context<'_>) -> Result<(), HandlerError> + Send + Sync + 'static,
    ) -> Self {
        self.insert_event(move |event, context| handler(event, context))
    }

    /// As [`on`](Self::on), for a handler that works in the database. Its context has
    /// [`once`](PooledContext::once) and [`connection`](PooledContext::connection). The connections come from a pool
    /// that the relay opens for its handlers, one for each concurrent call, or from
    /// [`RelayBuilder::connections`](crate::RelayBuilder::connections).
    ///
    /// ```
    /// use diesel::RunQueryDsl;
    /// use diesel_outbox::Event;
    /// use diesel_outbox::handlers::Handlers;
    ///
    /// #[derive(serde::Serialize, serde::Deserialize)]
    /// struct MemberJoined;
    /// impl Event for MemberJoined {
    ///     const TOPIC: &'static str = "member.joined";
    /// }
    ///
    /// let handlers = Handlers::new().on_pooled::<MemberJoined>(|_, context| {
    ///     context.once(|conn| {
    ///         diesel::sql_query("UPDATE clubs SET members = members + 1").execute(conn)?;
    ///         Ok(())
    ///     })?;
    ///     Ok(())
    /// });
    /// ```
    #[must_use]
    pub fn on_pooled<E: Event + DeserializeOwned>(
        mut self,
        handler: impl Fn(E, &PooledContext<'_>) -> Result<(), HandlerError> + Send + Sync + 'static,
    ) -> Self {
        self.wants_pool = true;
        self.insert_event(handler)
    }

    /// Adds a handler for a topic without an event type. The handler gets the message itself.
    ///
    /// ```
    /// use diesel_outbox::handlers::{HandlerError, Handlers};
    ///
    /// let handlers = Handlers::new().on_topic("sensor.reading", |message, _| {
    ///     let reading: serde_json::Value = serde_json::from_str(&message.payload)?;
    ///     let celsius = reading["celsius"].as_f64().ok_or_else(|| HandlerError::dead("no celsius"))?;
    ///     println!("{celsius} °C");
    ///     Ok(())
    /// });
    /// ```
    #[must_use]
    pub fn on_topic(
        self,
        topic: impl Into<String>,
        handler: impl Fn(&Message, &Context<'_>) -> Result<(), HandlerError> + Send + Sync + 'static,
    ) -> Self {
        self.insert(
            topic.into(),
            Arc::new(move |message, context| handler(message, context).map_err(Refusal::Handler)),
        )
    }

    /// As [`on_topic`](Self::on_topic), for a handler that works in the database: see
    /// [`on_pooled`](Self::on_pooled).
    ///
    /// ```
    /// use diesel::RunQueryDsl;
    /// use diesel_outbox::handlers::Handlers;
    ///
    /// let handlers = Handlers::new().on_topic_pooled("audit.entry", |message, context| {
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
        mut self,
        topic: impl Into<String>,
        handler: impl Fn(&Message, &PooledContext<'_>) -> Result<(), HandlerError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        self.wants_pool = true;
        self.insert(
            topic.into(),
            Arc::new(move |message, context| handler(message, context).map_err(Refusal::Handler)),
        )
    }

    fn insert_event<E: Event + DeserializeOwned>(
        self,
        handler: impl Fn(E, &PooledContext<'_>) -> Result<(), HandlerError> + Send + Sync + 'static,
    ) -> Self {
        self.insert(
            E::TOPIC.to_owned(),
            Arc::new(move |message, context| {
                let event = message.decode::<E>().map_err(Refusal::Undecodable)?;
                handler(event, context).map_err(Refusal::Handler)
            }),
        )
    }

    fn insert(mut self, topic: String, handler: Arc<Handler>) -> Self {
        if self.by_topic.insert(topic.clone(), handler).is_some() {
            self.repeated.push(topic);
        }
        self
    }

    /// Sets the time limit of one call. Defaults to 10 minutes. The limit is independent of the
    /// [lease](crate::RelayBuilder::lease), which the relay renews while handlers run.
    ///
    /// The limit does not end the call, because a thread cannot be killed. The relay reports a call that runs
    /// longer (`event=handler_stuck`) and starts the next message on another thread. The message stays claimed
    /// and is not started again while the call runs. When the call returns, its result counts, however late.
    ///
    /// The group starts no more calls while 64 calls run past the limit, or fewer if their messages fill half of
    /// the group's share of memory. Its messages wait, and no attempt is counted.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.policy.timeout = Some(timeout);
        self
    }

    /// Sets how many calls run at once, 1 to 1024. Defaults to `OUTBOX_CONCURRENCY`.
    #[must_use]
    pub fn concurrency(mut self, calls: usize) -> Self {
        self.policy.concurrency = Some(calls);
        self
    }

    /// Sets the rate limit in calls per second. Defaults to no limit. Each relay counts its own.
    #[must_use]
    pub fn rate(mut self, rate: Rate) -> Self {
        self.policy.rate = Some(rate);
        self
    }

    /// Sets after how many failed attempts a message is dead-lettered, at least 1. Defaults to `OUTBOX_MAX_ATTEMPTS`.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.policy.max_attempts = Some(attempts);
        self
    }

    /// Sets the delay between attempts. Defaults to `OUTBOX_BACKOFF`.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.policy.backoff = Some(backoff);
        self
    }

    /// Sets whether later messages with the ordering key of a dead letter are handled or wait. Defaults to
    /// `OUTBOX_ON_DEAD`.
    #[must_use]
    pub fn on_dead(mut self, on_dead: OnDead) -> Self {
        self.policy.on_dead = Some(on_dead);
        self
    }

    /// Sets how long after it became due a message expires: it is dead-lettered (`EXPIRED`). A requeued message becomes
    /// due again. Defaults to never.
    #[must_use]
    pub fn expires_after(mut self, expires_after: Duration) -> Self {
        self.policy.expires_after = Some(expires_after);
        self
    }

    /// The topics of the group.
    pub(crate) fn topics(&self) -> impl Iterator<Item = &str> {
        self.by_topic.keys().map(String::as_str)
    }

    /// A topic with two handlers.
    pub(crate) fn repeated(&self) -> Option<&str> {
        self.repeated.first().map(String::as_str)
    }

    /// Whether the group has no handlers.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_topic.is_empty()
    }

    fn find(&self, topic: &str) -> Result<Arc<Handler>, Failure> {
        self.by_topic.get(topic).cloned().ok_or_else(|| {
            let error = format!("topic {topic:?} has no handler");
            Failure::new(ReasonCode::NoRoute, error)
        })
    }
}

/// The inbox source of the messages of a handler group: outbox and group.
pub(crate) fn inbox_of(outbox: &OutboxName, group: &str) -> String {
    format!("{outbox}/{group}")
}

fn run(handler: &Handler, message: &Message, context: &PooledContext<'_>) -> Outcome {
    match crate::dispatch::caught(message, || handler(message, context)) {
        Ok(Ok(())) => Outcome::Delivered(Response::default()),
        Ok(Err(Refusal::Handler(error))) => error.into_outcome(),
        Ok(Err(Refusal::Undecodable(error))) => {
            let text = format!("cannot decode the payload: {error}");
            let failure = Failure::new(ReasonCode::Undecodable, text);
            match error {
                DecodeError::Version { version, known } if version > known => {
                    Outcome::Retry(failure)
                }
                _ => Outcome::Dead(failure),
            }
        }
        Err(failure) => Outcome::Retry(failure),
    }
}

shows!(Handlers: topics = [by_topic.keys()], policy);
