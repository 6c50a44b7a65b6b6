//! Enqueueing: what an application calls inside its own transaction.

mod bulk;
mod waiting;

use std::fmt;
use std::sync::Arc;

use diesel::Connection;
use diesel::connection::LoadConnection;
use diesel::pg::Pg;
use uuid::Uuid;

use self::bulk::Bulk;
use crate::aggregate::Aggregate;
use crate::error::EnqueueError;
use crate::event::IntoMessage;
use crate::message::{NewMessage, Sequence};
use crate::metrics::Enqueues;
use crate::name::{BadName, OutboxName};
use crate::store::check_transaction;
use crate::store::pinned::is_in_transaction;
use crate::store::write::enqueue::{Row, Stored, insert_or_find};
use crate::store::write::insert::Insert;

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
    allows_outside: bool,
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
    /// The id that receivers see; of a repeated key: the first message's.
    pub message_id: Uuid,
    /// `false`: the same message, by its idempotency key, was in the outbox already.
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
    /// [`BadName`] when it is not the name of an outbox.
    pub fn new(name: &str) -> Result<Self, BadName> {
        name.parse::<OutboxName>().map(Self::from)
    }

    /// Lets messages be written where no transaction is open: each call then commits by itself. By default
    /// such a call is refused with [`EnqueueError::NotInTransaction`]: the message and the change that it tells
    /// of would not be committed together.
    ///
    /// Call it where messages are all that is written: in a script, a seed or a benchmark. Give the rest of the
    /// application an `Outbox` without it.
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
    /// Diesel knows whether a transaction is open, so asking costs no round trip. Diesel does not see a `BEGIN`
    /// that was sent as SQL, and the call is refused. This method is no remedy there: `enqueue` would be part of
    /// that transaction, but the other methods would commit it. Begin transactions with Diesel.
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

    /// Its name, as [`admin`](crate::admin) takes it.
    ///
    /// ```
    /// use diesel_outbox::Outbox;
    ///
    /// assert_eq!(Outbox::default().name().to_string(), "outbox");
    /// ```
    pub fn name(&self) -> &OutboxName {
        &self.name
    }

    /// Writes a message on the caller's connection, in its open transaction: it is delivered if
    /// and only if that commits. One statement.
    ///
    /// The connection is any of Diesel's with the backend `Pg`: a `PgConnection`, one of a pool, a wrapper. For
    /// others see [`insert`](Self::insert).
    ///
    /// # Errors
    /// - [`EnqueueError::NotInTransaction`]: no transaction is open, and
    ///   [`allow_outside_transaction`](Self::allow_outside_transaction) was not called; nothing was sent to
    ///   the database.
    /// - [`EnqueueError::Message`]: the message is bad; nothing was sent to the database.
    /// - [`EnqueueError::Conflict`]: its key stands for another message that is still in the
    ///   outbox; nothing was written, and the transaction stays usable.
    /// - [`EnqueueError::Database`]: the database failed.
    pub fn enqueue(
        &self,
        conn: &mut impl LoadConnection<Backend = Pg>,
        message: impl IntoMessage,
    ) -> Result<Enqueued, EnqueueError> {
        self.check_in_transaction(conn)?;
        let message = self.traced(message.into_message()?);
        message.validate()?;
        let rows = [Row::new(message)];
        let stored = insert_or_find(conn, &self.name, &rows)?;
        let enqueued = outcome(&rows[0], stored[0])?;
        self.count(&rows, &[enqueued]);
        Ok(enqueued)
    }

    /// A message as a query, for whatever executes Diesel's queries: also `#[derive(MultiConnection)]`, and
    /// diesel-async. Execute it in the transaction that changes the application's data.
    ///
    /// The message is checked, and its trace context taken, by this call: hence the `?`. What can only be seen on
    /// a connection is left to the caller. [`enqueue`](Self::enqueue) does more, and is to be preferred on a
    /// connection that it takes:
    ///
    /// | | `enqueue` | `insert` |
    /// |---|---|---|
    /// | where no transaction is open | is refused | commits by itself |
    /// | the key of another message with the same topic and payload | `is_new: false`, with that message's sequence | no row |
    /// | the same, with another topic or payload | [`EnqueueError::Conflict`] | no row |
    /// | is counted by the metrics | yes | no |
    ///
    /// So where a message has an idempotency key, `execute` gives 1 for a message that is new and 0 for a key that
    /// is taken, and `get_result` the [`Sequence`] or `NotFound`; of other messages `execute` always gives 1.
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
    /// [`EnqueueError::Message`]: the message is bad.
    pub fn insert(&self, message: impl IntoMessage) -> Result<Insert, EnqueueError> {
        let message = self.traced(message.into_message()?);
        message.validate()?;
        Ok(Insert::new(&self.name, message))
    }

    /// Writes many messages by one statement, all or none. The outcomes are in the order of
    /// the messages; so are the sequences of the new ones.
    ///
    /// Runs in a savepoint inside the caller's transaction. Two transactions that enqueue the same keys in
    /// opposite order at the same moment can deadlock, as with any unique index; PostgreSQL then aborts one
    /// of them.
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
    /// As [`enqueue`](Self::enqueue), for the first message that is bad or in conflict. Nothing was
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

    /// Tells the metrics what was written.
    fn count(&self, rows: &[Row], enqueued: &[Enqueued]) {
        let mut enqueues = Enqueues::default();
        add(&mut enqueues, rows, enqueued);
        enqueues.count(&self.name.to_string());
    }

    fn rows(
        &self,
        messages: impl IntoIterator<Item = impl IntoMessage>,
    ) -> Result<Vec<Row>, EnqueueError> {
        let mut rows = Vec::new();
        for message in messages {
            let message = self.traced(message.into_message()?);
            message.validate()?;
            rows.push(Row::new(message));
        }
        Ok(rows)
    }

    /// Saves an aggregate together with the events that it has collected, in a savepoint inside the caller's
    /// transaction: `store` writes the aggregate, then the events are enqueued. The events are forgotten when
    /// both went well, and kept when one of them failed.
    ///
    /// Load the aggregate in the same transaction, so that nobody changes it in between. Whoever rolls that
    /// transaction back has an aggregate without its events: load it anew.
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
    /// That of `store`, or one of enqueueing as of [`enqueue_batch`](Self::enqueue_batch). Nothing was
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
        let (value, rows, enqueued) = conn.transaction(|conn| {
            let value = store(conn, aggregate)?;
            let messages = aggregate.events().messages();
            let messages =
                messages.map_err(|(index, error)| EnqueueError::MessageAt { index, error })?;
            let rows = self.rows(messages)?;
            let enqueued = if rows.is_empty() {
                // `store` may have ignored an error; then nothing of it stays.
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

    /// Writes as many messages as there are, all or none, in their order, and returns how many of
    /// them were new. For imports and backfills: it takes messages from the iterator as it goes, and
    /// holds some thousand of them (some MiB) at a time.
    ///
    /// Keys count as in [`enqueue_batch`](Self::enqueue_batch): a message whose key and content are in the
    /// outbox or in the call already is not counted, and one of other content is a conflict. It is
    /// fastest while keys are new; the first that is not makes PostgreSQL log a duplicate key, and
    /// the rest of the call looks at each key.
    ///
    /// Runs in a savepoint inside the caller's transaction. Relays see none of the messages before the
    /// commit. Of many millions, several transactions hold fewer locks and less WAL at a time.
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
    /// Nothing was written. The caller's transaction stays usable after a bad message and a conflict.
    /// - [`EnqueueError::NotInTransaction`]: as of [`enqueue`](Self::enqueue).
    /// - [`EnqueueError::MessageAt`]: a message is bad; the ones after it were not looked at.
    /// - [`EnqueueError::Conflict`]: a key stands for another message.
    /// - [`EnqueueError::Database`]: the database failed.
    pub fn enqueue_bulk(
        &self,
        conn: &mut impl LoadConnection<Backend = Pg>,
        messages: impl IntoIterator<Item = impl IntoMessage>,
    ) -> Result<u64, EnqueueError> {
        self.check_in_transaction(conn)?;
        let (new, enqueues) = conn.transaction(|conn| {
            let mut bulk = Bulk::new(&self.name);
            for (index, message) in (0..).zip(messages) {
                let message = message.into_message().and_then(|message| {
                    let message = self.traced(message);
                    message.validate()?;
                    Ok(message)
                });
                let message = message.map_err(|error| EnqueueError::MessageAt { index, error })?;
                bulk.push(conn, Row::new(message))?;
            }
            bulk.finish(conn)
        })?;
        enqueues.count(&self.name.to_string());
        Ok(new)
    }
}

/// Each row, and what became of it.
fn add(enqueues: &mut Enqueues, rows: &[Row], enqueued: &[Enqueued]) {
    for (row, outcome) in rows.iter().zip(enqueued) {
        enqueues.add(row.topic(), outcome.is_new);
    }
}

fn insert_each(
    conn: &mut impl LoadConnection<Backend = Pg>,
    name: &OutboxName,
    rows: &[Row],
) -> Result<Vec<Enqueued>, EnqueueError> {
    let stored = insert_or_find(conn, name, rows)?;
    rows.iter()
        .zip(stored)
        .map(|(row, stored)| outcome(row, stored))
        .collect()
}

fn outcome(row: &Row, stored: Stored) -> Result<Enqueued, EnqueueError> {
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
