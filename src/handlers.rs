//! Handlers: messages that are worked on inside the process, by topic.
//!
//! A relay gives the messages of a topic to a function instead of posting them to a URL, with the same
//! attempts, delays, order and ledger: see [`Handlers`], and [`RelayBuilder::on`](crate::RelayBuilder::on)
//! for a single one. What a handler is given beside its event is a [`Context`].

mod context;
mod error;
mod worker;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;

pub use self::context::{Connection, Context};
pub(crate) use self::context::{Connections, Pool};
pub use self::error::HandlerError;
pub(crate) use self::worker::HandlerDispatcher;

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
/// A handler can be called twice for a message, as any receiver can; [`Context::once`] makes its work
/// in the database happen once.
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
///     .timeout(Duration::from_secs(10))
///     .on::<MemberJoined>(|event, context| {
///         if context.attempt() > 5 {
///             return Err(HandlerError::dead("the mail server took it five times and lost it"));
///         }
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
    pub(crate) concurrency: Option<usize>,
    pub(crate) timeout: Option<Duration>,
}

type Handler = dyn Fn(&Message, &Context<'_>) -> Result<(), Refusal> + Send + Sync;

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
        self.insert(
            E::TOPIC.to_owned(),
            Arc::new(move |message, context| {
                let event = message.decode::<E>().map_err(Refusal::Undecodable)?;
                handler(event, context).map_err(Refusal::Handler)
            }),
        )
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

    /// The time of one handler. Defaults to `OUTBOX_SEND_TIMEOUT`. One that takes longer is reported
    /// (`event=handler_stuck`) and left alone: its message is tried again as after any failed attempt,
    /// and what it says later does not count. Twice this time, and a little more, has to fit into the
    /// [lease](crate::RelayBuilder::lease).
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
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

fn run(handler: &Handler, message: &Message, context: &Context<'_>) -> Outcome {
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
