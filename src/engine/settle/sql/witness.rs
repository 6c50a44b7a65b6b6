//! A hook in the transactions of settles and pauses.

use std::fmt::Debug;
use std::time::Duration;

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::settle::Failed;
use crate::message::Message;
use crate::name::OutboxName;
use crate::status::ReasonCode;

/// Writes down what a relay records of its own accord, in the same transaction.
pub(crate) trait Witness: Debug + Send + Sync {
    /// Some of these messages were dead-lettered: those with the sequences `buried`.
    fn buried(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        messages: &[&Message],
        dead: &[Failed],
        buried: &[i64],
    ) -> QueryResult<()>;

    /// Pauses a destination until it is resumed, and writes that down if it is new.
    fn pause(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        destination: &str,
        why: ReasonCode,
    ) -> QueryResult<()>;

    /// Records that a breaker is open for this time, and writes that down if it was closed before.
    fn open_breaker(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        destination: &str,
        lasts: Duration,
        openings: u32,
    ) -> QueryResult<()>;
}

/// The hook, if there is one.
pub(crate) type OwnWitness = Option<&'static dyn Witness>;
