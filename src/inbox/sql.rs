//! SQL: the inbox: the messages that a receiver has handled, in the receiver's database.

use std::time::Duration;

use diesel::pg::data_types::{PgInterval, PgTimestamp};
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Interval, Nullable, Timestamptz};
use diesel::{
    BoolExpressionMethods, ExpressionMethods, PgConnection, RunQueryDsl, insert_into, select,
};

use crate::setup::sql::catalogue::has_table_privilege;
use crate::setup::sql::inspect::has_column;
use crate::sql::functions::{LONGEST, to_regclass};
use crate::sql::millis;
use crate::sql::pinned::located_by_default;
use crate::sql::statement::{statement, unprepared_statement};
use crate::sql::table::inbox;

/// Records a message as handled. `false`: the message was already recorded. If an open transaction has recorded the
/// message, this waits for its end.
// Why: docs/decisions.md#inbox-mark
pub(crate) fn insert(conn: &mut PgConnection, source: &str, message_id: &str) -> QueryResult<bool> {
    insert_into(inbox::table(TABLE))
        .values((inbox::source.eq(source), inbox::message_id.eq(message_id)))
        .on_conflict_do_nothing()
        .execute(conn)
        .map(|rows| rows == 1)
}

/// Limits how long statements of the open transaction wait for a lock. A shorter limit of the connection stays.
///
/// Text: Diesel cannot qualify operators and types with their schema, as an application's search path requires.
pub(crate) fn limit_lock_timeout(conn: &mut PgConnection, limit: Duration) -> QueryResult<()> {
    statement(
        "SELECT pg_catalog.set_config('lock_timeout', $1::pg_catalog.int8::pg_catalog.text, true)
           FROM (SELECT pg_catalog.date_part('epoch', pg_catalog.current_setting('lock_timeout')
                                                      ::pg_catalog.interval)) AS own(s)
          WHERE own.s OPERATOR(pg_catalog.=) 0
             OR own.s OPERATOR(pg_catalog.*) 1000 OPERATOR(pg_catalog.>) $1::pg_catalog.float8",
    )
    // 0 would mean no limit.
    .bind::<BigInt, _>(millis(limit).clamp(1, i32::MAX.into()))
    .execute(conn)
    .map(drop)
}

/// Deletes messages that were handled longer ago than `age`, oldest first.
// Why: docs/decisions.md#inbox-mark
pub(crate) struct ForgettingHandled {
    table: String,
    age: PgInterval,
    /// When the last deleted message was handled. The next step starts there: otherwise each step would read again
    /// the deleted rows that an old snapshot keeps.
    from: PgTimestamp,
}

impl ForgettingHandled {
    pub(crate) fn new(table: String, age: Duration) -> Self {
        let age = i64::try_from(age.min(LONGEST).as_micros()).unwrap_or(i64::MAX);
        Self {
            table,
            age: PgInterval::from_microseconds(age),
            from: MINUS_INFINITY,
        }
    }

    /// Deletes at most `limit` messages and returns their number. 0: no more messages are that old.
    ///
    /// The rows are not locked first, because nothing else locks or changes rows of the inbox. Locking would need
    /// the UPDATE right.
    ///
    /// Text: Diesel has no WITH, and cannot qualify operators with their schema, as an application's search path
    /// requires.
    pub(crate) fn step(&mut self, conn: &mut PgConnection, limit: i64) -> QueryResult<usize> {
        let (rows, last): (i64, Option<PgTimestamp>) = unprepared_statement(format!(
            "WITH forgotten AS (
                DELETE FROM {table} WHERE ctid OPERATOR(pg_catalog.=) ANY(ARRAY(
                    SELECT ctid FROM {table}
                     WHERE handled_at OPERATOR(pg_catalog.>=) $1
                       AND handled_at OPERATOR(pg_catalog.<) (pg_catalog.now() OPERATOR(pg_catalog.-) $2)
                     ORDER BY handled_at LIMIT $3))
                RETURNING handled_at
             )
             SELECT pg_catalog.count(*), pg_catalog.max(handled_at) FROM forgotten",
            table = self.table
        ))
        .bind::<Timestamptz, _>(self.from)
        .bind::<Interval, _>(self.age)
        .bind::<BigInt, _>(limit)
        .giving::<(BigInt, Nullable<Timestamptz>)>()
        .get_result(conn)?;
        self.from = last.unwrap_or(self.from);
        Ok(usize::try_from(rows).unwrap_or(0))
    }
}

/// PostgreSQL's `-infinity`.
const MINUS_INFINITY: PgTimestamp = PgTimestamp(i64::MIN);

/// The inbox, found by the connection's search path.
pub(crate) const TABLE: &str = "outbox_inbox";

/// Whether a connection can clean the inbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cleaning {
    /// The connection can clean this table.
    Possible(String),
    /// There is no inbox.
    NoTable,
    /// The role may not read or delete rows of the inbox.
    NoRight,
}

/// Whether this connection of a relay can clean the inbox.
pub(crate) fn cleaning(conn: &mut PgConnection) -> QueryResult<Cleaning> {
    let Some(table) = located_by_default(conn, TABLE)? else {
        return Ok(Cleaning::NoTable);
    };
    if !has_column(conn, &table, "handled_at")? {
        return Ok(Cleaning::NoTable);
    }
    let may = |privilege: &'static str| has_table_privilege(to_regclass(&table), privilege);
    let is_allowed: Option<bool> = select(may("SELECT").and(may("DELETE"))).get_result(conn)?;
    Ok(match is_allowed {
        Some(true) => Cleaning::Possible(table),
        _ => Cleaning::NoRight,
    })
}
