//! Enqueueing: the methods that an application calls inside its own transaction.

mod bulk;
pub(crate) mod sql;
mod waiting;

use std::sync::Arc;

use diesel::Connection;
use diesel::connection::LoadConnection;
use diesel::pg::Pg;
use uuid::Uuid;

use self::bulk::PendingBulk;
use self::sql::enqueue::{NewRow, StoredMessage, insert_or_find};
use self::sql::insert::Insert;
use self::sql::whole::{check_transaction, transaction};
use crate::aggregate::Aggregate;
use crate::error::EnqueueError;
use crate::event::IntoMessage;
use crate::message::{NewMessage, Sequence};
use crate::metrics::Enqueues;
use crate::name::{BadName, OutboxName};
use crate::shows::shows;
use crate::sql::pinned::is_in_transaction;

/// An outbox, into which an application enqueues messages. Cheap to create, to clone and to share between
/// threads.
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
    allows_outside: bool,
}

type CurrentTrace = dyn Fn() -> Option<TraceContext> + Send + Sync;

/// A position in a trace, as defined by W3C Trace Context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// The header `traceparent`.
    pub traceparent: String,
    /// The header `tracestate`, if any.
    pub tracestate: Option<String>,
}

shows!(Outbox: name);

/// The result of enqueueing a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Enqueued {
    /// The position in the outbox. For a repeated idempotency key, the position of the first message.
    pub sequence: Sequence,
    /// The id that receivers see. For a repeated idempotency key, the id of the first message.
    pub message_id: Uuid,
    /// `false`: the outbox already contained the message, by its idempotency key.
    pub is_new: bool,
}

impl From<OutboxName> for Outbox {
    fn from(name: OutboxName) -> Self {
        Self {
            name,
            trace: None,
            allows_outside: false,
        }
    }
}

impl Outbox {
    /// The outbox of this name: `outbox`, `org_outbox`, `hrm.outbox`.
    ///
    /// ```
    /// use diesel_outbox::Outbox;
    ///
    /// let outbox = Outbox::new("hrm.outbox")?;
    /// assert_eq!(outbox.name().to_string(), "hrm.outbox");
    /// assert!(Outbox::new("outbox; DROP TABLE orders").is_err());
    /// # Ok::<(), diesel_outbox::BadName>(())
    /// ```
    ///
    /// # Errors
    /// [`BadName`] if the name is not valid.
    pub fn new(name: &str) -> Result<Self, BadName> {
        name.parse::<OutboxName>().map(Self::from)
    }

    /// Allows calls without an open transaction. Each such call commits on its own. By default, such a call is
    /// refused with [`EnqueueError::NotInTransaction`], because the message and the change that it reports would
    /// not be committed together.
    ///
    /// Use this for code that writes only messages: a script, a seed or a benchmark. Give the rest of the
    /// application an `Outbox` without this option.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{NewMessage, Outbox};
    ///
    /// let outbox = Outbox::new("outbox")?.allow_outside_transaction();
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// outbox.enqueue(&mut conn, NewMessage::new("report.wanted", &2026)?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Diesel knows whether a transaction is open, so the check costs no round trip. Begin transactions with
    /// Diesel: it does not notice a `BEGIN` that was sent as SQL, so calls in such a transaction are refused.
    /// This option does not help there: `enqueue` would be part of that transaction, but the other methods would
    /// commit it.
    #[must_use]
    pub fn allow_outside_transaction(mut self) -> Self {
        self.allows_outside = true;
        self
    }

    fn check_in_transaction(&self, conn: &mut impl Connection) -> Result<(), EnqueueError> {
        if self.allows_outside || is_in_transaction(conn) {
            return Ok(());
        }
        Err(EnqueueError::NotInTransaction)
    }

    /// Sets a function that returns the current trace context, for applications with a tracer. Enqueueing
    /// calls the function for each message without a trace context. The relay continues the trace with each
    /// attempt, so the trace of a request reaches the receiver. Defaults to none.
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

    /// The name of the outbox, as the functions of [`admin`](crate::admin) expect it.
    ///
    /// ```
    /// use diesel_outbox::Outbox;
    ///
    /// assert_eq!(Outbox::default().name().to_string(), "outbox");
    /// ```
    pub fn name(&self) -> &OutboxName {
        &self.name
    }

    /// Writes a message on the caller's connection, in its open transaction, with one statement. The message
    /// is delivered if and only if the transaction commits.
    ///
    /// The connection is any Diesel connection with the backend `Pg`: a `PgConnection`, a connection of a pool,
    /// a wrapper. For other connections, see [`insert`](Self::insert).
    ///
    /// # Errors
    /// - [`EnqueueError::NotInTransaction`]: no transaction is open, and
    ///   [`allow_outside_transaction`](Self::allow_outside_transaction) was not called. Nothing was sent to
    ///   the database.
    /// - [`EnqueueError::Message`]: the message is invalid. Nothing was sent to the database.
    /// - [`EnqueueError::Conflict`]: another message in the outbox has the idempotency key; the error has its sequence. Nothing was
    ///   written, and the transaction stays usable.
    /// - [`EnqueueError::Database`]: the database failed.
    pub fn enqueue(
        &self,
        conn: &mut impl LoadConnection<Backend = Pg>,
        message: impl IntoMessage,
    ) -> Result<Enqueued, EnqueueError> {
        self.check_in_transaction(conn)?;
        let message = self.traced(message.into_message()?);
        message.validate()?;
        let rows = [NewRow::new(message)];
        let stored = insert_or_find(conn, &self.name, &rows)?;
        let enqueued = outcome(&rows[0], stored[0])?;
        self.count(&rows, &[enqueued]);
        Ok(enqueued)
    }

    /// Returns a message as a query, for everything that executes Diesel's queries, including
    /// `#[derive(MultiConnection)]` and diesel-async. Execute the query in the transaction that changes the
    /// application's data.
    ///
    /// This call checks the message and reads the trace context. It cannot check the connection. Prefer
    /// [`enqueue`](Self::enqueue) on a connection that it accepts, because it does more:
    ///
    /// | | `enqueue` | `insert` |
    /// |---|---|---|
    /// | no open transaction | is refused | commits on its own |
    /// | key taken, same topic and payload | `is_new: false`, with the first message's sequence | no row |
    /// | key taken, other topic or payload | [`EnqueueError::Conflict`] | no row |
    /// | metrics count the message | yes | no |
    ///
    /// For a message with an idempotency key, `execute` returns 1 if the message is new and 0 if the key is taken;
    /// `get_result` returns the [`Sequence`] or `NotFound`. For a message without a key, `execute` returns 1.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Event, Outbox, Sequence};
    ///
    /// #[derive(diesel::MultiConnection)]
    /// enum AnyConnection {
    ///     Postgres(PgConnection),
    /// }
    ///
    /// #[derive(serde::Serialize)]
    /// struct OrderPaid { order_id: i64 }
    ///
    /// impl Event for OrderPaid {
    ///     const TOPIC: &'static str = "order.paid";
    /// }
    ///
    /// fn pay(conn: &mut AnyConnection, outbox: &Outbox, order_id: i64) -> QueryResult<Option<Sequence>> {
    ///     conn.transaction(|conn| {
    ///         // … the change of the application's own tables …
    ///         outbox.insert(&OrderPaid { order_id })?.get_result(conn).optional()
    ///     })
    /// }
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    /// [`EnqueueError::Message`]: the message is invalid.
    pub fn insert(&self, message: impl IntoMessage) -> Result<Insert, EnqueueError> {
        let message = self.traced(message.into_message()?);
        message.validate()?;
        Ok(Insert::new(&self.name, message))
    }

    /// Writes several messages with one statement, all or none. The results are in the order of the
    /// messages, and so are the sequences of new messages.
    ///
    /// Runs in a savepoint inside the caller's transaction. Two concurrent transactions that enqueue the same
    /// keys in opposite order can deadlock, as with any unique index. PostgreSQL then aborts one of them.
    ///
    /// ```
    /// # use diesel::prelude::*;
    /// # use diesel_outbox::{EnqueueError, NewMessage, Outbox};
    /// fn ship(conn: &mut PgConnection, outbox: &Outbox, orders: &[i64]) -> Result<usize, EnqueueError> {
    ///     let messages: Vec<NewMessage> = orders
    ///         .iter()
    ///         .map(|id| Ok(NewMessage::new("order.shipped", id)?.idempotency_key(format!("{id}-shipped"))))
    ///         .collect::<Result<_, EnqueueError>>()?;
    ///     let enqueued = outbox.enqueue_batch(conn, messages)?;
    ///     Ok(enqueued.iter().filter(|one| one.is_new).count())
    /// }
    /// ```
    ///
    /// # Errors
    /// Like [`enqueue`](Self::enqueue), for the first message that is invalid or in conflict. Nothing was
    /// written.
    pub fn enqueue_batch(
        &self,
        conn: &mut impl LoadConnection<Backend = Pg>,
        messages: impl IntoIterator<Item = impl IntoMessage>,
    ) -> Result<Vec<Enqueued>, EnqueueError> {
        self.check_in_transaction(conn)?;
        let rows = self.rows(messages)?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let enqueued = conn.transaction(|conn| insert_each(conn, &self.name, &rows))?;
        self.count(&rows, &enqueued);
        Ok(enqueued)
    }

    /// Adds the written messages to the metrics.
    fn count(&self, rows: &[NewRow], enqueued: &[Enqueued]) {
        let mut enqueues = Enqueues::default();
        add(&mut enqueues, rows, enqueued);
        enqueues.count(&self.name.to_string());
    }

    fn rows(
        &self,
        messages: impl IntoIterator<Item = impl IntoMessage>,
    ) -> Result<Vec<NewRow>, EnqueueError> {
        let mut rows = Vec::new();
        for message in messages {
            let message = self.traced(message.into_message()?);
            message.validate()?;
            rows.push(NewRow::new(message));
        }
        Ok(rows)
    }

    /// Saves an aggregate and enqueues its events, in a savepoint inside the caller's transaction. First
    /// `store` writes the aggregate, then the events are enqueued. If both succeed, the events are removed from
    /// the aggregate. If one fails, the aggregate keeps its events.
    ///
    /// Load and lock the aggregate in the same transaction, so that no other transaction changes it in between.
    /// If that transaction is rolled back later, load the aggregate again: its events are gone.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Aggregate, Event, Events, Outbox};
    ///
    /// diesel::table! {
    ///     orders (id) { id -> BigInt, paid -> Bool }
    /// }
    ///
    /// #[derive(Queryable, Identifiable, AsChangeset)]
    /// #[diesel(table_name = orders)]
    /// struct OrderRow { id: i64, paid: bool }
    ///
    /// #[derive(serde::Serialize)]
    /// struct OrderPaid { order_id: i64 }
    ///
    /// impl Event for OrderPaid {
    ///     const TOPIC: &'static str = "order.paid";
    /// }
    ///
    /// struct Order { row: OrderRow, events: Events }
    ///
    /// impl Order {
    ///     fn pay(&mut self) {
    ///         self.row.paid = true;
    ///         self.events.record(OrderPaid { order_id: self.row.id });
    ///     }
    /// }
    ///
    /// impl Aggregate for Order {
    ///     fn events(&mut self) -> &mut Events {
    ///         &mut self.events
    ///     }
    /// }
    ///
    /// fn pay(conn: &mut PgConnection, outbox: &Outbox, id: i64) -> QueryResult<()> {
    ///     conn.transaction(|conn| {
    ///         let row = orders::table.find(id).for_update().first(conn)?;
    ///         let mut order = Order { row, events: Events::new() };
    ///         order.pay();
    ///         outbox.save(conn, &mut order, |conn, order| {
    ///             diesel::update(&order.row).set(&order.row).execute(conn)
    ///         })?;
    ///         Ok(())
    ///     })
    /// }
    /// ```
    ///
    /// # Errors
    /// The error of `store`, or an error of enqueueing as in [`enqueue_batch`](Self::enqueue_batch). Nothing was
    /// written.
    pub fn save<C, A: Aggregate, T, E>(
        &self,
        conn: &mut C,
        aggregate: &mut A,
        store: impl FnOnce(&mut C, &mut A) -> Result<T, E>,
    ) -> Result<T, E>
    where
        C: LoadConnection<Backend = Pg>,
        E: From<EnqueueError> + From<diesel::result::Error>,
    {
        self.check_in_transaction(conn)?;
        let (value, rows, enqueued) = transaction(conn, |conn| {
            let value = store(conn, aggregate)?;
            let messages = aggregate.events().messages();
            let messages =
                messages.map_err(|(index, error)| EnqueueError::MessageAt { index, error })?;
            let rows = self.rows(messages)?;
            let enqueued = if rows.is_empty() {
                // `store` may have ignored the error of a statement. Its changes cannot be committed then.
                check_transaction(conn)?;
                Vec::new()
            } else {
                insert_each(conn, &self.name, &rows)?
            };
            Ok::<_, E>((value, rows, enqueued))
        })?;
        self.count(&rows, &enqueued);
        aggregate.events().clear();
        Ok(value)
    }

    /// Enqueues the events of an aggregate that the caller has written in this transaction: [`save`](Self::save) without
    /// its `store`.
    ///
    /// ```
    /// # use diesel::prelude::*;
    /// # use diesel_outbox::{Aggregate, EnqueueError, Outbox};
    /// fn publish(conn: &mut PgConnection, outbox: &Outbox, order: &mut impl Aggregate) -> Result<(), EnqueueError> {
    ///     outbox.enqueue_events(conn, order)
    /// }
    /// ```
    ///
    /// # Errors
    /// Like [`save`](Self::save).
    pub fn enqueue_events(
        &self,
        conn: &mut impl LoadConnection<Backend = Pg>,
        aggregate: &mut impl Aggregate,
    ) -> Result<(), EnqueueError> {
        self.save(conn, aggregate, |_, _| Ok(()))
    }

    /// Writes any number of messages in order, all or none, and returns how many were new. For imports and
    /// backfills: it reads the iterator step by step, and holds a few thousand messages (a few MiB) at a time.
    ///
    /// Idempotency keys work as in [`enqueue_batch`](Self::enqueue_batch). A message whose key and content are
    /// already in the outbox, or earlier in the call, is not counted. The same key with other content is a
    /// conflict. The call is fastest while keys are new: at the first repeated key PostgreSQL logs a duplicate
    /// key, and from then on the call checks each key.
    ///
    /// Runs in a savepoint inside the caller's transaction. Relays see the messages only after the commit. If the iterator
    /// panics, nothing was written, and the caller's transaction stays usable. For
    /// many millions of messages, use several transactions: each holds fewer locks and less WAL.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Event, Outbox};
    ///
    /// #[derive(serde::Serialize)]
    /// struct Imported { customer: u32 }
    ///
    /// impl Event for Imported {
    ///     const TOPIC: &'static str = "customer.imported";
    ///
    ///     fn idempotency_key(&self) -> Option<String> {
    ///         Some(format!("import-7-{}", self.customer))
    ///     }
    /// }
    ///
    /// let outbox = Outbox::new("outbox")?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let events = (0..1_000_000).map(|customer| Imported { customer });
    /// let new = conn.transaction(|conn| outbox.enqueue_bulk(conn, events))?;
    /// println!("{new} messages");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Nothing was written. The caller's transaction stays usable after an invalid message and after a conflict.
    /// - [`EnqueueError::NotInTransaction`]: as for [`enqueue`](Self::enqueue).
    /// - [`EnqueueError::MessageAt`]: a message is invalid. Later messages were not read.
    /// - [`EnqueueError::Conflict`]: another message has the idempotency key.
    /// - [`EnqueueError::Database`]: the database failed.
    pub fn enqueue_bulk(
        &self,
        conn: &mut impl LoadConnection<Backend = Pg>,
        messages: impl IntoIterator<Item = impl IntoMessage>,
    ) -> Result<u64, EnqueueError> {
        self.check_in_transaction(conn)?;
        let (new, enqueues) = transaction(conn, |conn| {
            let mut bulk = PendingBulk::new(&self.name);
            for (index, message) in (0..).zip(messages) {
                let message = message.into_message().and_then(|message| {
                    let message = self.traced(message);
                    message.validate()?;
                    Ok(message)
                });
                let message = message.map_err(|error| EnqueueError::MessageAt { index, error })?;
                bulk.push(conn, NewRow::new(message))?;
            }
            bulk.finish(conn)
        })?;
        enqueues.count(&self.name.to_string());
        Ok(new)
    }
}

/// Counts each row by its outcome.
fn add(enqueues: &mut Enqueues, rows: &[NewRow], enqueued: &[Enqueued]) {
    for (row, outcome) in rows.iter().zip(enqueued) {
        enqueues.add(row.topic(), outcome.is_new);
    }
}

fn insert_each(
    conn: &mut impl LoadConnection<Backend = Pg>,
    name: &OutboxName,
    rows: &[NewRow],
) -> Result<Vec<Enqueued>, EnqueueError> {
    let stored = insert_or_find(conn, name, rows)?;
    rows.iter()
        .zip(stored)
        .map(|(row, stored)| outcome(row, stored))
        .collect()
}

fn outcome(row: &NewRow, stored: StoredMessage) -> Result<Enqueued, EnqueueError> {
    let sequence = Sequence(stored.sequence);
    if !stored.is_same {
        return Err(EnqueueError::Conflict {
            idempotency_key: row.key(),
            sequence,
        });
    }
    Ok(Enqueued {
        sequence,
        message_id: stored.message_id,
        is_new: stored.is_new,
    })
}
