//! Handlers: messages that are worked on inside the process, by topic.
//!
//! A relay gives the messages of a topic to a function instead of posting them to a URL, with the same
//! attempts, delays, order and ledger: see [`Handlers`], and [`RelayBuilder::on`](crate::RelayBuilder::on)
//! for a single one. What a handler is given beside its event is a [`Context`].

mod context;
mod error;
mod group;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;

pub use self::context::{Connection, Context, PooledContext};
pub(crate) use self::context::{Connections, Pool, Pooled};
pub use self::error::HandlerError;
pub(crate) use self::group::{Group, MOST_LATE};

use crate::backoff::Backoff;
use crate::config::Rate;
use crate::dispatch::{Failure, Outcome, Response};
use crate::event::{DecodeError, Event};
use crate::message::Message;
use crate::name::OutboxName;
use crate::status::ReasonCode;

/// A group of handlers: one for each of its topics, with threads of its own.
///
/// Each group is a destination like those with a URL: it has a name, a queue and threads of its own,
/// and a message that several groups (or a group and a URL) get is a message of its own for each. Add
/// one to a relay by [`RelayBuilder::handlers`](crate::RelayBuilder::handlers), or single handlers by
/// [`RelayBuilder::on`](crate::RelayBuilder::on).
///
/// A handler says what came of a message: `Ok(())` is done; an error from `?` is a failed attempt,
/// tried again later; [`HandlerError`] says when, or that it never will be. A panic is a failed attempt.
/// A handler can be called twice for a message, as any receiver can; [`PooledContext::once`] makes its work
/// in the database happen once.
///
/// # How long a handler may run
/// Ten minutes, unless the group says otherwise ([`timeout`](Self::timeout)). While a call runs, also past
/// that limit, this process starts no second call of its message. No other relay does, either, as long as
/// this relay renews its lease, which needs only the database. Where the lease is lost meanwhile (this relay was
/// cut off from the database for longer than a takeover takes, 7.5 s by default, and another was not), the call goes on
/// and another relay may start the message as well. Then the lease's id fences the result: that of the relay
/// that holds the message counts. What both do in [`PooledContext::once`] is done once; what a handler does
/// elsewhere, such as sending a mail, may be done twice.
///
/// A shutdown waits for running handlers until its deadline. A handler that runs longer keeps its message
/// claimed: its result still counts if the process lives on and it returns before the lease expires. After
/// that another relay takes the message over, as after a crash, which costs one attempt (`ABANDONED`).
///
/// ```no_run
/// use diesel::prelude::*;
/// use diesel_outbox::{Event, Handlers, HandlerError, Relay};
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
///     .on::<MemberJoined>(|event, context| {
///         if event.member_id == 0 {
///             return Err(HandlerError::dead("nobody has this number"));
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
#[derive(Default)]
pub struct Handlers {
    by_topic: BTreeMap<String, Arc<Handler>>,
    /// Topics that were given a second handler.
    repeated: Vec<String>,
    /// Some handler wants connections.
    pub(crate) wants_pool: bool,
    pub(crate) concurrency: Option<usize>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) backoff: Option<Backoff>,
    pub(crate) rate: Option<Rate>,
}

/// The limit of a call, where a group says nothing else.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

type Handler = dyn Fn(&Message, &PooledContext<'_>) -> Result<(), Refusal> + Send + Sync;

/// Why a handler did not do its work.
enum Refusal {
    Undecodable(DecodeError),
    Handler(HandlerError),
}

impl Handlers {
    /// A group without handlers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Handles the messages of an event's topic.
    ///
    /// A payload of another shape makes its message dead (`UNDECODABLE`); one of a newer version than
    /// the type knows is tried again, for a newer program may come.
    #[must_use]
    pub fn on<E: Event + DeserializeOwned>(
        self,
        handler: impl Fn(E, &Context<'_>) -> Result<(), HandlerError> + Send + Sync + 'static,
    ) -> Self {
        self.insert_event(move |event, context| handler(event, context))
    }

    /// [`on`](Self::on), for a handler that works in the database: its context has
    /// [`once`](PooledContext::once) and [`connection`](PooledContext::connection). A relay with such a
    /// handler does not start unless it is told where to take connections
    /// ([`RelayBuilder::connections`](crate::RelayBuilder::connections)).
    ///
    /// ```
    /// use diesel::RunQueryDsl;
    /// use diesel_outbox::{Event, Handlers};
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

    /// Handles the messages of a topic as they are: of use where the topic has no type.
    ///
    /// ```
    /// use diesel_outbox::{HandlerError, Handlers};
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

    /// [`on_topic`](Self::on_topic), for a handler that works in the database: see
    /// [`on_pooled`](Self::on_pooled).
    ///
    /// ```
    /// use diesel::RunQueryDsl;
    /// use diesel_outbox::Handlers;
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

    /// Handlers that run at once, 1 to 1024. Defaults to `OUTBOX_CONCURRENCY`.
    #[must_use]
    pub fn concurrency(mut self, threads: usize) -> Self {
        self.concurrency = Some(threads);
        self
    }

    /// The limit of one call. Defaults to 10 minutes, and has nothing to do with the
    /// [lease](crate::RelayBuilder::lease): the relay renews the lease while handlers run.
    ///
    /// A thread cannot be killed, so the limit ends no call. A call that runs longer is reported
    /// (`event=handler_stuck`) and gives its place among the group's threads to the next message. The
    /// message stays claimed and is not started again while the call runs; the result counts when the
    /// call returns, however late. While 64 calls of a group run past the limit, or fewer whose messages are
    /// half of the group's share of memory, the group starts no more: its messages wait, and no attempt is counted.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Failed attempts after which a message of the group is dead: 1 or more. Defaults to
    /// `OUTBOX_MAX_ATTEMPTS`.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// The delay between attempts. Defaults to `OUTBOX_BACKOFF`.
    ///
    /// ```
    /// use diesel_outbox::{Backoff, Handlers};
    /// use std::time::Duration;
    ///
    /// let second = Duration::from_secs(1);
    /// let handlers = Handlers::new().backoff(Backoff::exponential(second, 60 * second));
    /// ```
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = Some(backoff);
        self
    }

    /// How many calls begin in a second. Defaults to no limit. Each relay counts for itself.
    ///
    /// ```
    /// use diesel_outbox::{Handlers, config::Rate};
    ///
    /// let mailer = Handlers::new().rate(Rate::per_second(5.0)).max_attempts(3);
    /// ```
    #[must_use]
    pub fn rate(mut self, rate: Rate) -> Self {
        self.rate = Some(rate);
        self
    }

    /// Its topics.
    pub(crate) fn topics(&self) -> impl Iterator<Item = &str> {
        self.by_topic.keys().map(String::as_str)
    }

    /// A topic that has two handlers.
    pub(crate) fn repeated(&self) -> Option<&str> {
        self.repeated.first().map(String::as_str)
    }

    /// Whether it has none.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_topic.is_empty()
    }

    fn find(&self, topic: &str) -> Result<Arc<Handler>, Failure> {
        self.by_topic.get(topic).cloned().ok_or_else(|| {
            let error = format!("no handler serves the topic {topic:?}");
            Failure::new(ReasonCode::NoRoute, error)
        })
    }
}

/// The name that an inbox knows the messages of a group of an outbox by.
pub(crate) fn inbox_of(outbox: &OutboxName, group: &str) -> String {
    format!("{outbox}/{group}")
}

fn run(handler: &Handler, message: &Message, context: &PooledContext<'_>) -> Outcome {
    match crate::dispatch::caught(message, || handler(message, context)) {
        Ok(Ok(())) => Outcome::Delivered(Response::default()),
        Ok(Err(Refusal::Handler(error))) => error.into_outcome(),
        Ok(Err(Refusal::Undecodable(error))) => {
            let text = format!("the payload cannot be read: {error}");
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

impl fmt::Debug for Handlers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handlers")
            .field("topics", &self.by_topic.keys())
            .field("concurrency", &self.concurrency)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}
