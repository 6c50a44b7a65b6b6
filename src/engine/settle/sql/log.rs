//! What a settle needs to know of feeds: destinations that are read instead of sent to. Their tables are not the engine's.

use std::fmt::Debug;

use diesel::PgConnection;
use diesel::result::QueryResult;
use uuid::Uuid;

use crate::name::OutboxName;

/// Writes events of feeds, as parts of the settle's statement.
pub(crate) trait Log: Debug + Send + Sync {
    /// A query that locks the feeds that `outcome` names as destinations, in one order for all settles, and gives the
    /// `name` and the `registration` of each.
    fn locks(&self, name: &OutboxName) -> String;

    /// An INSERT of an event for each row of `gone` and its `outcome`, behind the last one of a feed that is `held`.
    fn stores(&self, name: &OutboxName) -> String;

    /// Those of these feeds into which no settle can store, because another session has locked their rows. Waits for no row.
    fn locked(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        feeds: &[&str],
    ) -> QueryResult<Vec<String>>;

    /// Makes what a settle into these feeds lacks, each with its registration.
    ///
    /// # Errors
    /// A refusal of the database: a feed of the relay's settings belongs to a member.
    fn mend(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        feeds: &[(&str, Option<Uuid>)],
    ) -> QueryResult<()>;
}

/// The log, if the library is built with feeds.
pub(crate) type OwnLog = Option<&'static dyn Log>;
