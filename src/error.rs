//! The errors of enqueueing and of the database.

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
///         // The transaction goes on.
///         Err(EnqueueError::Conflict { idempotency_key, sequence }) => {
///             println!("{idempotency_key} is message {sequence}, with other content");
///         }
///         // In a transaction of Diesel's, `?` is enough.
///         Err(error) => Err(error)?,
///     }
///     Ok(())
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnqueueError {
    /// The connection is not in a transaction that was begun by Diesel, so the message would not be committed
    /// together with what it tells of. Nothing was sent to the database. Wrap both in `conn.transaction(…)`;
    /// see also [`allow_outside_transaction`](crate::Outbox::allow_outside_transaction).
    #[error(
        "not in a transaction: wrap this call, and the changes that belong to it, in `conn.transaction(…)`; \
         to write messages alone, use `Outbox::allow_outside_transaction()`"
    )]
    NotInTransaction,
    /// The message itself is bad. Nothing was sent to the database.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// One of many messages is bad. Nothing was written, and the caller's transaction stays usable.
    #[error("message {index} (counted from 0): {error}")]
    MessageAt {
        /// How many messages came before it.
        index: u64,
        /// What is wrong with it.
        #[source]
        error: MessageError,
    },
    /// The key stands for another message already. Nothing was written, and the caller's
    /// transaction stays usable.
    #[error(
        "idempotency key {idempotency_key:?} is taken by message {sequence}, whose topic or payload differs"
    )]
    Conflict {
        /// The key that was enqueued twice.
        idempotency_key: String,
        /// The message that has it.
        sequence: Sequence,
    },
    /// The database refused or failed. The caller's transaction is aborted.
    #[error(transparent)]
    Database(#[from] diesel::result::Error),
}

/// So that `?` works in transactions that return Diesel's own error. What is not of the database becomes
/// a [`QueryBuilderError`](diesel::result::Error::QueryBuilderError) with the [`EnqueueError`] inside.
impl From<EnqueueError> for diesel::result::Error {
    fn from(error: EnqueueError) -> Self {
        match error {
            EnqueueError::Database(error) => error,
            other => Self::QueryBuilderError(Box::new(other)),
        }
    }
}

/// What went wrong between this process and its database.
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
    /// No connection. The URL's password is not shown.
    #[error("cannot connect to the database: {0}")]
    Connect(String),
    /// A statement failed.
    #[error(transparent)]
    Statement(#[from] diesel::result::Error),
    /// The outbox is missing, or not as this version needs it, or the role lacks rights on it.
    #[error("{0}")]
    Schema(String),
}

impl DatabaseError {
    /// Whether a statement was sent and no answer came: it may have worked.
    pub(crate) fn is_without_answer(&self) -> bool {
        use diesel::result::{DatabaseErrorKind, Error};
        match self {
            Self::Statement(Error::DatabaseError(kind, _)) => matches!(
                kind,
                DatabaseErrorKind::ClosedConnection | DatabaseErrorKind::UnableToSendCommand
            ),
            // Nothing was sent.
            Self::Statement(Error::QueryBuilderError(_)) => false,
            // An answer that could not be read is none.
            Self::Statement(_) => true,
            Self::Connect(_) | Self::Schema(_) => false,
        }
    }

    /// Whether the server refused the values, and not for want of a server that can write, or of a part of a table:
    /// that refuses whatever is written. Its error has no constraint's name, which each CHECK has.
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
