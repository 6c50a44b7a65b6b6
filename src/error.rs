//! Errors of enqueueing and of the database.

use crate::message::{MessageError, Sequence};

/// Why nothing was enqueued.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_outbox::{EnqueueError, NewMessage, Outbox};
///
/// fn order(conn: &mut PgConnection, outbox: &Outbox, message: NewMessage) -> QueryResult<()> {
///     match outbox.enqueue(conn, message) {
///         Ok(enqueued) => println!("message {}", enqueued.sequence),
///         // The transaction stays usable.
///         Err(EnqueueError::Conflict { idempotency_key, sequence }) => {
///             println!("{idempotency_key} is message {sequence}, with other content");
///         }
///         // Inside a Diesel transaction, `?` is enough.
///         Err(error) => Err(error)?,
///     }
///     Ok(())
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnqueueError {
    /// Diesel has no transaction open on the connection, so the message and the change that it reports would not be
    /// committed together. Nothing was sent to the database. Wrap both in `conn.transaction(…)`; see also
    /// [`allow_outside_transaction`](crate::Outbox::allow_outside_transaction).
    #[error(
        "not in a transaction: wrap this call and the changes that it reports in `conn.transaction(…)`; \
         to write only messages, use `Outbox::allow_outside_transaction()`"
    )]
    NotInTransaction,
    /// The message is invalid. Nothing was sent to the database.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// One of several messages is invalid. Nothing was written, and the caller's transaction stays usable.
    #[error("message {index} (counted from 0): {error}")]
    MessageAt {
        /// The index of the message, counted from 0.
        index: u64,
        /// Why the message is invalid.
        #[source]
        error: MessageError,
    },
    /// Another message with a different topic or payload has the idempotency key. Nothing was written, and
    /// the caller's transaction stays usable.
    #[error(
        "idempotency key {idempotency_key:?} is taken by message {sequence}, whose topic or payload differs"
    )]
    Conflict {
        /// The idempotency key of both messages.
        idempotency_key: String,
        /// The message that already has the key.
        sequence: Sequence,
    },
    /// The database refused or failed. The caller's transaction is aborted.
    #[error("{}", with_advice(.0))]
    Database(#[from] diesel::result::Error),
}

/// The error, and what to do about a missing table. Diesel passes no SQLSTATE on, only the server's text.
fn with_advice(error: &diesel::result::Error) -> String {
    let text = error.to_string();
    let is_missing = text.starts_with("relation ") && text.ends_with(" does not exist");
    match is_missing {
        true => format!(
            "{text}: create the outbox with `diesel_outbox::migrate` or `diesel-outbox migrate`, or check the search path"
        ),
        false => text,
    }
}

/// Makes `?` work in transactions that return Diesel's own error. An error that does not come from the database
/// becomes a [`QueryBuilderError`](diesel::result::Error::QueryBuilderError) that contains the [`EnqueueError`].
impl From<EnqueueError> for diesel::result::Error {
    fn from(error: EnqueueError) -> Self {
        match error {
            EnqueueError::Database(error) => error,
            other => Self::QueryBuilderError(Box::new(other)),
        }
    }
}

/// An error of the database, or of the connection to it.
///
/// ```no_run
/// use diesel_outbox::{DatabaseError, Relay, StartError};
///
/// match Relay::builder("postgres://localhost/shop").start() {
///     Err(StartError::Database(DatabaseError::Connect(reason))) => {
///         println!("try again soon: {reason}");
///     }
///     Err(StartError::Database(DatabaseError::Schema(reason))) => println!("{reason}"),
///     other => drop(other?),
/// }
/// # Ok::<(), StartError>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatabaseError {
    /// The connection failed. The text does not contain the password of the URL.
    #[error("cannot connect to the database: {0}")]
    Connect(String),
    /// A statement failed.
    #[error(transparent)]
    Statement(#[from] diesel::result::Error),
    /// The outbox is missing or does not match this version, or the role lacks rights on the outbox.
    #[error("{0}")]
    Schema(String),
}

impl DatabaseError {
    /// Whether a statement was sent and the database did not answer. The statement may have been executed.
    pub(crate) fn is_without_answer(&self) -> bool {
        use diesel::result::{DatabaseErrorKind, Error};
        match self {
            Self::Statement(Error::DatabaseError(kind, _)) => matches!(
                kind,
                DatabaseErrorKind::ClosedConnection | DatabaseErrorKind::UnableToSendCommand
            ),
            // Nothing was sent.
            Self::Statement(Error::QueryBuilderError(_)) => false,
            // An unreadable answer counts as no answer.
            Self::Statement(_) => true,
            Self::Connect(_) | Self::Schema(_) => false,
        }
    }

    /// Whether the server refused the values of the statement. A read-only server and a missing partition refuse all
    /// values, so their errors do not count. A missing partition is a CHECK violation that names no constraint. The
    /// caller must know whether the statement exceeded a time limit, which is no refusal: Diesel hides the SQLSTATE.
    pub(crate) fn is_refusal(&self) -> bool {
        use diesel::result::{DatabaseErrorKind, Error};
        match self {
            Self::Statement(Error::DatabaseError(
                DatabaseErrorKind::ReadOnlyTransaction | DatabaseErrorKind::SerializationFailure,
                _,
            )) => false,
            Self::Statement(Error::DatabaseError(DatabaseErrorKind::CheckViolation, told))
                if told.table_name().is_some() && told.constraint_name().is_none() =>
            {
                false
            }
            Self::Statement(Error::DatabaseError(..) | Error::QueryBuilderError(_)) => {
                !self.is_without_answer()
            }
            _ => false,
        }
    }
}
