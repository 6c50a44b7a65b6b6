//! Enqueueing one message as a Diesel query.

use diesel::backend::Backend;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::serialize::ToSql;
use diesel::sql_types::{BigInt, Binary, Nullable, Text};
use diesel::{Connection, RunQueryDsl};
use uuid::Uuid;

use super::enqueue::{absolute, relative};
use crate::message::{Due, NewMessage};
use crate::name::OutboxName;
use crate::schema::values::to_micros;
use crate::shows::shows;

const MICROS: i64 = 1_000_000;

/// A message as a query, created by [`Outbox::insert`](crate::Outbox::insert). The query returns the message's
/// [`Sequence`](crate::Sequence), or no row if the idempotency key is taken.
#[must_use = "a query does nothing until it is executed"]
pub struct Insert {
    outbox: String,
    id: Uuid,
    message_id: String,
    topic: String,
    destination: String,
    payload: String,
    headers: Option<String>,
    ordering_key: Option<String>,
    idempotency_key: Option<String>,
    /// Set for a message with a key, to compare it with other messages of the key.
    digest: Option<Vec<u8>>,
    tenant_id: Option<String>,
    due: DueAt,
    expiry: DueAt,
    occurred: DueAt,
}

/// A delay, a point in time, or neither, in numbers that every connection can send.
#[derive(Debug, Default)]
struct DueAt {
    micros_from_now: Option<i64>,
    /// Seconds since 1970; `micros` holds the rest.
    seconds: Option<i64>,
    micros: Option<i64>,
}

impl DueAt {
    fn new(due: Due) -> Self {
        let at = absolute(due).map(to_micros);
        Self {
            micros_from_now: relative(due).map(|interval| interval.microseconds),
            seconds: at.map(|micros| micros.div_euclid(MICROS)),
            micros: at.map(|micros| micros.rem_euclid(MICROS)),
        }
    }
}

shows! {
    /// Omits the payload and the header values, which may be private.
    Insert: message_id = [id], topic
}

impl Insert {
    /// The message must be validated.
    pub(crate) fn new(name: &OutboxName, message: NewMessage) -> Self {
        Self {
            outbox: name.outbox().to_owned(),
            id: message.message_id,
            message_id: message.message_id.to_string(),
            headers: message.headers_json(),
            // Why: docs/decisions.md#keys-given
            digest: message.idempotency_key.is_some().then(|| message.digest()),
            idempotency_key: message.idempotency_key,
            tenant_id: message.tenant_id.map(|id| id.to_string()),
            due: DueAt::new(message.due),
            expiry: message.expiry.map(DueAt::new).unwrap_or_default(),
            occurred: message
                .occurred_at
                .map_or_else(DueAt::default, |time| DueAt::new(Due::At(time))),
            topic: message.topic,
            destination: message.destination,
            payload: message.payload,
            ordering_key: message.ordering_key,
        }
    }

    /// The message id that receivers will see.
    ///
    /// ```
    /// use diesel_outbox::{NewMessage, Outbox};
    ///
    /// let insert = Outbox::default().insert(NewMessage::new("order.paid", &7)?)?;
    /// println!("{} is on its way", insert.message_id());
    /// # Ok::<(), diesel_outbox::EnqueueError>(())
    /// ```
    pub fn message_id(&self) -> Uuid {
        self.id
    }
}

/// Text: the query works with any backend, but our tables only with `Pg`. Expressions are qualified with their schema,
/// because the search path is the application's. Values are sent as texts and numbers, which
/// `#[derive(MultiConnection)]` supports; the server casts them to their types.
impl<DB> QueryFragment<DB> for Insert
where
    DB: Backend,
    String: ToSql<Text, DB>,
    Option<Vec<u8>>: ToSql<Nullable<Binary>, DB>,
    Option<String>: ToSql<Nullable<Text>, DB>,
    Option<i64>: ToSql<Nullable<BigInt>, DB>,
{
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        out.push_sql("INSERT INTO ");
        out.push_sql(&self.outbox);
        out.push_sql(
            " (message_id, topic, destination, payload, headers, ordering_key, idempotency_key, digest, \
              tenant_id, available_at, expires_at, occurred_at) VALUES (",
        );
        out.push_bind_param::<Text, _>(&self.message_id)?;
        out.push_sql("::pg_catalog.uuid, ");
        out.push_bind_param::<Text, _>(&self.topic)?;
        out.push_sql(", ");
        out.push_bind_param::<Text, _>(&self.destination)?;
        out.push_sql(", ");
        out.push_bind_param::<Text, _>(&self.payload)?;
        out.push_sql("::pg_catalog.json, ");
        out.push_bind_param::<Nullable<Text>, _>(&self.headers)?;
        out.push_sql("::pg_catalog.json, ");
        out.push_bind_param::<Nullable<Text>, _>(&self.ordering_key)?;
        out.push_sql(", ");
        out.push_bind_param::<Nullable<Text>, _>(&self.idempotency_key)?;
        out.push_sql(", ");
        out.push_bind_param::<Nullable<Binary>, _>(&self.digest)?;
        out.push_sql(", ");
        out.push_bind_param::<Nullable<Text>, _>(&self.tenant_id)?;
        out.push_sql("::pg_catalog.uuid, coalesce(");
        self.due.push_from_now(&mut out)?;
        out.push_sql(", ");
        self.due.push_at(&mut out)?;
        out.push_sql(", pg_catalog.now()), coalesce(");
        self.expiry.push_from_now(&mut out)?;
        out.push_sql(", ");
        self.expiry.push_at(&mut out)?;
        out.push_sql("), ");
        self.occurred.push_at(&mut out)?;
        out.push_sql(
            ") ON CONFLICT (idempotency_key, destination) WHERE idempotency_key IS NOT NULL DO NOTHING \
             RETURNING sequence",
        );
        Ok(())
    }
}

impl DueAt {
    fn push_from_now<'b, DB>(&'b self, out: &mut AstPass<'_, 'b, DB>) -> QueryResult<()>
    where
        DB: Backend,
        Option<i64>: ToSql<Nullable<BigInt>, DB>,
    {
        out.push_sql("pg_catalog.now() OPERATOR(pg_catalog.+) ");
        push_micros(&self.micros_from_now, out)
    }

    fn push_at<'b, DB>(&'b self, out: &mut AstPass<'_, 'b, DB>) -> QueryResult<()>
    where
        DB: Backend,
        Option<i64>: ToSql<Nullable<BigInt>, DB>,
    {
        out.push_sql("pg_catalog.to_timestamp(");
        out.push_bind_param::<Nullable<BigInt>, _>(&self.seconds)?;
        out.push_sql("::pg_catalog.float8) OPERATOR(pg_catalog.+) ");
        push_micros(&self.micros, out)
    }
}

/// Pushes an interval. It is exact: a float holds whole microseconds up to 285 years.
fn push_micros<'b, DB>(micros: &'b Option<i64>, out: &mut AstPass<'_, 'b, DB>) -> QueryResult<()>
where
    DB: Backend,
    Option<i64>: ToSql<Nullable<BigInt>, DB>,
{
    out.push_sql("(");
    out.push_bind_param::<Nullable<BigInt>, _>(micros)?;
    out.push_sql(
        "::pg_catalog.float8 OPERATOR(pg_catalog.*) '1 microsecond'::pg_catalog.interval)",
    );
    Ok(())
}

/// Without a static id, Diesel keeps the prepared statement under its text, which contains the outbox's name.
impl QueryId for Insert {
    type QueryId = ();

    const HAS_STATIC_QUERY_ID: bool = false;
}

impl Query for Insert {
    type SqlType = BigInt;
}

impl<Conn: Connection> RunQueryDsl<Conn> for Insert {}
