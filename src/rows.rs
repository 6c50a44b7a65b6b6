//! Rows of an outbox's tables and view, for your own queries.
//!
//! ```no_run
//! use diesel::prelude::*;
//! use diesel_outbox::rows::{DeadLetter, LedgerEntry, MessageRow};
//! use diesel_outbox::schema::{outbox_dead, outbox_messages};
//! use diesel_outbox::{ReasonCode, Sequence, Status};
//!
//! # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
//! // Messages that wait for their next attempt, oldest first.
//! let waiting: Vec<MessageRow> = MessageRow::query()
//!     .filter(outbox_messages::status.eq(Status::Retrying))
//!     .order(outbox_messages::sequence)
//!     .load(&mut conn)?;
//! for row in waiting {
//!     println!("{} {} {:?}", row.envelope.sequence, row.envelope.topic, row.last_error);
//! }
//!
//! // A row together with another column: dead letters with their payloads.
//! let rejected: Vec<(DeadLetter, serde_json::Value)> = outbox_dead::table
//!     .filter(outbox_dead::reason.eq(ReasonCode::Rejected))
//!     .select((DeadLetter::as_select(), outbox_dead::payload))
//!     .load(&mut conn)?;
//!
//! // The results of a message.
//! # let sequence = Sequence(1);
//! let entries: Vec<LedgerEntry> = LedgerEntry::query()
//!     .filter(diesel_outbox::schema::outbox_ledger::sequence.eq(sequence))
//!     .load(&mut conn)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Outboxes of other names
//! `query` and `as_select` use the outbox `outbox`. For tables that
//! [`outbox_tables!`](crate::outbox_tables) declares, [`of`] returns the columns of a row:
//!
//! ```
//! use diesel::prelude::*;
//! use diesel_outbox::rows::{self, MessageRow};
//!
//! diesel_outbox::outbox_tables!(
//!     org_outbox: org_outbox_ledger, org_outbox_attempt, org_outbox_dead, org_outbox_lease,
//!     org_outbox_pause, org_outbox_endpoint, org_outbox_messages
//! );
//!
//! fn messages(conn: &mut PgConnection, topic: &str) -> QueryResult<Vec<MessageRow>> {
//!     org_outbox_messages::table
//!         .filter(org_outbox_messages::topic.eq(topic))
//!         .select(rows::of::<MessageRow, _>(org_outbox_messages::table))
//!         .load(conn)
//! }
//! ```
//!
//! # Joins
//! A row can be loaded together with rows of other tables, as in [`schema`](crate::schema#joins):
//! `.select((Order::as_select(), rows::of::<MessageRow, _>(outbox_messages::table)))`.

use std::time::SystemTime;

use diesel::HasQuery;
use diesel::expression::Selectable;
use diesel::pg::Pg;
use diesel::prelude::Queryable;
use diesel::query_builder::AsQuery;
use uuid::Uuid;

use crate::message::Sequence;
use crate::schema::values::{MaybeTime, Time};
use crate::schema::{outbox_dead, outbox_ledger, outbox_messages};
use crate::status::Status;

/// The columns that all rows of a message have in common.
#[derive(Debug, Clone, PartialEq, Eq, Queryable)]
#[non_exhaustive]
pub struct Envelope {
    /// The position in the outbox.
    pub sequence: Sequence,
    /// The message id, as receivers see it.
    pub message_id: Uuid,
    /// The topic.
    pub topic: String,
    /// For a live message, the destination that it names, or empty. For a settled message, the destination that was
    /// used.
    pub destination: String,
    /// The ordering key.
    pub ordering_key: Option<String>,
    /// The tenant of the message.
    pub tenant_id: Option<Uuid>,
    /// The number of attempts.
    pub attempts: i32,
    /// When the message was enqueued.
    #[diesel(deserialize_as = Time)]
    pub created_at: SystemTime,
    /// When the event occurred, if the application set it.
    #[diesel(deserialize_as = MaybeTime)]
    pub occurred_at: Option<SystemTime>,
}

/// A message in any state: a row of the view `outbox_messages`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable)]
#[non_exhaustive]
pub struct MessageRow {
    /// The common columns.
    #[diesel(embed)]
    pub envelope: Envelope,
    /// The state of the message.
    pub status: Status,
    /// The idempotency key; the message id if the caller gave none.
    pub idempotency_key: String,
    /// When the message is or was due; `None` for a delivered message.
    #[diesel(deserialize_as = MaybeTime)]
    pub available_at: Option<SystemTime>,
    /// When the message expires; `None` for a delivered message, and for a message that never expires.
    #[diesel(deserialize_as = MaybeTime)]
    pub expires_at: Option<SystemTime>,
    /// The lease of the relay that has claimed the message.
    pub locked_by: Option<i64>,
    /// When the message was claimed.
    #[diesel(deserialize_as = MaybeTime)]
    pub locked_at: Option<SystemTime>,
    /// Why the message was dead-lettered, or why its last attempt failed: the name of a
    /// [`ReasonCode`](crate::ReasonCode), possibly of a later version.
    pub last_error_code: Option<String>,
    /// The reason in words.
    pub last_error: Option<String>,
    /// The status of the last response, for a settled message.
    pub http_status: Option<i32>,
    /// When the message was delivered or dead-lettered.
    #[diesel(deserialize_as = MaybeTime)]
    pub settled_at: Option<SystemTime>,
}

/// A dead letter, without its payload and headers: select these columns in addition.
#[derive(Debug, Clone, PartialEq, Eq, Queryable)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The common columns.
    #[diesel(embed)]
    pub envelope: Envelope,
    /// The idempotency key; `None`: the caller gave none.
    pub idempotency_key: Option<String>,
    /// Why the message was dead-lettered: the name of a [`ReasonCode`](crate::ReasonCode), possibly of a later version.
    pub reason: String,
    /// The reason in words.
    pub last_error: Option<String>,
    /// The status of the last response.
    pub http_status: Option<i32>,
    /// The beginning of the last response.
    pub response: Option<String>,
    /// When the message was dead-lettered.
    #[diesel(deserialize_as = Time)]
    pub dead_lettered_at: SystemTime,
    /// For a part of a fan-out, the sequence of the original message.
    pub split_from: Option<Sequence>,
    /// Whether the dead letter blocks its ordering key until it is requeued or discarded.
    pub blocks_key: bool,
}

/// The result of a message at a destination, without the payload that the ledger may keep.
#[derive(Debug, Clone, PartialEq, Eq, Queryable)]
#[non_exhaustive]
pub struct LedgerEntry {
    /// The common columns.
    #[diesel(embed)]
    pub envelope: Envelope,
    /// The idempotency key; `None`: the caller gave none.
    pub idempotency_key: Option<String>,
    /// [`Delivered`](Status::Delivered) or [`Dead`](Status::Dead).
    pub status: Status,
    /// Why the message was dead-lettered: the name of a [`ReasonCode`](crate::ReasonCode), possibly of a later version.
    pub reason: Option<String>,
    /// The reason in words.
    pub error: Option<String>,
    /// The status of the last response.
    pub http_status: Option<i32>,
    /// The beginning of the last response.
    pub response: Option<String>,
    /// When the message was settled.
    #[diesel(deserialize_as = Time)]
    pub settled_at: SystemTime,
}

/// A table or view whose rows load as `Row`. [`outbox_tables!`](crate::outbox_tables) implements the trait.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_outbox::rows::{Loads, MessageRow};
/// use diesel_outbox::schema::outbox_messages;
///
/// fn all(conn: &mut PgConnection) -> QueryResult<Vec<MessageRow>> {
///     let columns = <outbox_messages::table as Loads<MessageRow>>::columns();
///     outbox_messages::table.select(columns).load(conn)
/// }
/// ```
pub trait Loads<Row>: AsQuery {
    /// The type of a row's columns.
    type Columns;

    /// The columns of a row.
    fn columns() -> Self::Columns;
}

/// The columns of a row in this table, for `select`.
pub fn of<Row, T: Loads<Row>>(_table: T) -> T::Columns {
    T::columns()
}

/// The columns of each row in the tables that `outbox_tables!` declares, in the order of the row's fields.
#[doc(hidden)]
#[macro_export]
macro_rules! __outbox_rows {
    ($messages:ident $dead:ident $ledger:ident) => {
        $crate::__outbox_rows!(@row MessageRow of $messages {
            status idempotency_key available_at expires_at locked_by locked_at last_error_code last_error
            http_status settled_at
        });
        $crate::__outbox_rows!(@row DeadLetter of $dead {
            idempotency_key reason last_error http_status response dead_lettered_at split_from blocks_key
        });
        $crate::__outbox_rows!(@row LedgerEntry of $ledger {
            idempotency_key status reason error http_status response settled_at
        });
    };
    (@row $row:ident of $table:ident { $($column:ident)+ }) => {
        impl $crate::rows::Loads<$crate::rows::$row> for $table::table {
            type Columns = (
                $crate::__outbox_rows!(@envelope $table),
                $($table::$column,)+
            );

            fn columns() -> Self::Columns {
                ($crate::__outbox_rows!(@envelope $table), $($table::$column,)+)
            }
        }
    };
    // Used as a type and as a value.
    (@envelope $table:ident) => {
        (
            $table::sequence,
            $table::message_id,
            $table::topic,
            $table::destination,
            $table::ordering_key,
            $table::tenant_id,
            $table::attempts,
            $table::created_at,
            $table::occurred_at,
        )
    };
}

/// `as_select` and `query`, for the outbox `outbox`.
macro_rules! of_the_outbox {
    ($($row:ident of $table:ident)+) => {$(
        impl Selectable<Pg> for $row {
            type SelectExpression = <$table::table as Loads<Self>>::Columns;

            fn construct_selection() -> Self::SelectExpression {
                $table::table::columns()
            }
        }

        impl HasQuery<Pg> for $row {
            type BaseQuery = <$table::table as AsQuery>::Query;

            fn base_query() -> Self::BaseQuery {
                $table::table.as_query()
            }
        }
    )+};
}

of_the_outbox! {
    MessageRow of outbox_messages
    DeadLetter of outbox_dead
    LedgerEntry of outbox_ledger
}
