//! Retention of the ledger and of the history.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{Bool, Integer, Interval};
use diesel::{PgConnection, Queryable, RunQueryDsl};

use crate::name::OutboxName;
use crate::store::LONGEST_AGE;
use crate::store::sql::interval;
use crate::store::statement::statement_anew;

/// What a turn of the ring has done.
#[derive(Debug, Queryable)]
pub(crate) struct Turned {
    /// Parts that were emptied.
    pub(crate) emptied: i32,
    /// Another transaction reads an old part, which stays for now.
    pub(crate) is_in_use: bool,
}

/// Empties the parts of the ring whose entries are all older than `retention`, and opens another one where it
/// is time.
///
/// Text: the function's name is known at run time only.
pub(crate) fn rotate(
    conn: &mut PgConnection,
    name: &OutboxName,
    retention: Duration,
) -> QueryResult<Turned> {
    statement_anew(format!("SELECT * FROM {}($1)", name.rotate()))
        .bind::<Interval, _>(interval(retention.min(LONGEST_AGE)))
        .giving::<(Integer, Bool)>()
        .get_result(conn)
}
