//! A hook in the transactions of settles and pauses.

use std::fmt::Debug;

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::settle::Failed;
use crate::engine::send::gate::GateNews;
use crate::message::Message;
use crate::name::OutboxName;

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

    /// A gate has told other relays something that they did not know: a breaker was closed before that opens.
    fn told(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        destination: &str,
        news: GateNews,
    ) -> QueryResult<()>;
}

/// The hook, if there is one.
pub(crate) type OwnWitness = Option<&'static dyn Witness>;
