//! Enqueueing: what an application calls inside its own transaction.

use std::fmt;
use std::sync::Arc;

use diesel::{Connection, PgConnection};

use crate::error::EnqueueError;
use crate::message::{NewMessage, Sequence};
use crate::name::{BadName, OutboxName};
use crate::store::enqueue::{Stored, identity, insert_or_find};

/// An outbox to enqueue into. Cheap to make, to clone and to share between threads.
///
/// ```no_run
/// use diesel::prelude::*;
/// use diesel_outbox::{NewMessage, Outbox};
///
/// let outbox = Outbox::new("outbox")?;
/// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// conn.transaction(|conn| {
///     // … the change of the application's own tables …
///     let message = NewMessage::new("order.paid", &serde_json::json!({ "order_id": 7 }))?;
///     outbox.enqueue(conn, message)
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct Outbox {
    name: OutboxName,
    trace: Option<Arc<CurrentTrace>>,
}

type CurrentTrace = dyn Fn() -> Option<TraceContext> + Send + Sync;

/// Where in a trace something happens, as W3C Trace Context writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// The header `traceparent`.
    pub traceparent: String,
    /// The header `tracestate`, where there is one.
    pub tracestate: Option<String>,
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// What became of a message that was enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Enqueued {
    /// Its place in the outbox; of a repeated key: the first message's.
    pub sequence: Sequence,
    /// `false`: the same message, by its idempotency key, was in the outbox already.
    pub is_new: bool,
}

impl Outbox {
    /// The outbox of this name: `outbox`, `org_outbox`, `hrm.outbox`.
    ///
    /// # Errors
    /// [`BadName`] when it is not the name of an outbox.
    pub fn new(name: &str) -> Result<Self, BadName> {
        Ok(Self {
            name: name.parse()?,
            trace: None,
        })
    }

    /// Asks `current` for the trace context of each message that brings none, when it is enqueued.
    /// The relay continues it with each attempt, so that the trace of a request reaches whoever
    /// receives the message. An application with a tracer tells here how to ask it.
    ///
    /// ```
    /// use diesel_outbox::{Outbox, TraceContext};
    ///
    /// # fn current_traceparent() -> Option<String> { None }
    /// let outbox = Outbox::new("outbox")?.trace_with(|| {
    ///     current_traceparent().map(|traceparent| TraceContext { traceparent, tracestate: None })
    /// });
    /// # Ok::<(), diesel_outbox::BadName>(())
    /// ```
    #[must_use]
    pub fn trace_with(
        mut self,
        current: impl Fn() -> Option<TraceContext> + Send + Sync + 'static,
    ) -> Self {
        self.trace = Some(Arc::new(current));
        self
    }

    fn traced(&self, message: NewMessage) -> NewMessage {
        let Some(current) = &self.trace else {
            return message;
        };
        if message.headers.contains_key("traceparent") {
            return message;
        }
        match current() {
            Some(trace) => message.trace_context(trace.traceparent, trace.tracestate.as_deref()),
            None => message,
        }
    }

    /// Its name.
    pub fn name(&self) -> &OutboxName {
        &self.name
    }

    /// Writes a message on the caller's connection, in its open transaction: it is delivered if
    /// and only if that commits. One statement.
    ///
    /// # Errors
    /// - [`EnqueueError::Message`]: the message is bad; nothing was sent to the database.
    /// - [`EnqueueError::Conflict`]: its key stands for another message that is still in the
    ///   outbox; nothing was written, and the transaction stays usable.
    /// - [`EnqueueError::Database`]: the database failed.
    pub fn enqueue(
        &self,
        conn: &mut PgConnection,
        message: NewMessage,
    ) -> Result<Enqueued, EnqueueError> {
        let message = self.traced(message);
        message.validate()?;
        let messages = [message];
        let stored = insert_or_find(conn, &self.name, &messages)?;
        outcomes(&messages, &stored).map(|outcomes| outcomes[0])
    }

    /// Writes many messages by one statement, all or none. The outcomes are in the order of
    /// the messages; so are the sequences of the new ones.
    ///
    /// Runs in a transaction of its own, or a savepoint inside the caller's. Two transactions that
    /// enqueue the same keys in opposite order at the same moment can deadlock, as with any unique
    /// index; PostgreSQL then aborts one of them.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue), for the first message that is bad or in conflict.
    pub fn enqueue_batch(
        &self,
        conn: &mut PgConnection,
        messages: impl IntoIterator<Item = NewMessage>,
    ) -> Result<Vec<Enqueued>, EnqueueError> {
        let messages: Vec<NewMessage> = messages
            .into_iter()
            .map(|message| self.traced(message))
            .collect();
        for message in &messages {
            message.validate()?;
        }
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        conn.transaction(|conn| {
            let stored = insert_or_find(conn, &self.name, &messages)?;
            outcomes(&messages, &stored)
        })
    }
}

/// What the table has for each message. Of two with one key in one batch, the second is not new.
fn outcomes(
    messages: &[NewMessage],
    stored: &std::collections::HashMap<(String, String), Stored>,
) -> Result<Vec<Enqueued>, EnqueueError> {
    let mut seen = std::collections::HashSet::new();
    let mut outcomes = Vec::with_capacity(messages.len());
    for message in messages {
        let identity = identity(message);
        let Some(found) = stored.get(&identity) else {
            // `insert_or_find` returns an error where a key is neither inserted nor found.
            return Err(diesel::result::Error::NotFound.into());
        };
        if found.digest != message.digest() {
            return Err(EnqueueError::Conflict {
                idempotency_key: identity.0,
                sequence: Sequence(found.sequence),
            });
        }
        outcomes.push(Enqueued {
            sequence: Sequence(found.sequence),
            is_new: found.is_new && seen.insert(identity),
        });
    }
    Ok(outcomes)
}
