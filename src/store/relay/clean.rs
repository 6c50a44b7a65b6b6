//! Retention of the ledger and of the history.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{Bool, Integer, Interval};
use diesel::{PgConnection, Queryable, RunQueryDsl};

use crate::name::OutboxName;
use crate::store::LONGEST_AGE;
use crate::store::sql::interval;
use crate::store::statement::unprepared_statement;

/// The result of turning the ring.
#[derive(Debug, Queryable)]
pub(crate) struct Turned {
    /// The number of parts that were emptied.
    pub(crate) emptied: i32,
    /// Whether another transaction is reading an old part, which stays for now.
    pub(crate) is_in_use: bool,
}

/// Empties the parts of the ring whose entries are all older than `retention`, and opens another part when it is
/// time.
///
/// Text: the function's name is known only at run time.
pub(crate) fn rotate(
    conn: &mut PgConnection,
    name: &OutboxName,
    retention: Duration,
) -> QueryResult<Turned> {
    unprepared_statement(format!("SELECT * FROM {}($1)", name.rotate()))
        .bind::<Interval, _>(interval(retention.min(LONGEST_AGE)))
        .giving::<(Integer, Bool)>()
        .get_result(conn)
}
