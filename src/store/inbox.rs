//! The inbox: which messages were handled, in the database of who handles them.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};

use super::statement::statement;
use super::{LONGEST_AGE, millis};

/// Remembers a message. `false`: it was there. Where a transaction that has not ended holds it, this
/// waits for that one's end.
pub(crate) fn insert(conn: &mut PgConnection, source: &str, message_id: &str) -> QueryResult<bool> {
    statement(
        "INSERT INTO outbox_inbox (source, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING",
    )
    .bind::<Text, _>(source)
    .bind::<Text, _>(message_id)
    .execute(conn)
    .map(|rows| rows == 1)
}

/// Has no statement of the open transaction wait for a lock longer than `limit`, nor than the connection
/// does anyway.
pub(crate) fn limit_lock_timeout(conn: &mut PgConnection, limit: Duration) -> QueryResult<()> {
    statement(
        "SELECT set_config('lock_timeout', $1::bigint::text, true)
           FROM (SELECT extract(epoch FROM current_setting('lock_timeout')::interval) * 1000) AS own(ms)
          WHERE own.ms = 0 OR own.ms > $1",
    )
    // 0 is no limit.
    .bind::<BigInt, _>(millis(limit).clamp(1, i32::MAX.into()))
    .execute(conn)
    .map(drop)
}

/// Forgets messages that were handled longer than `age` ago, `limit` at most. Returns how many.
///
/// Nothing locks rows of the inbox or changes them, so none is locked first: that would need the right
/// to UPDATE.
pub(crate) fn remove_old_rows(
    conn: &mut PgConnection,
    age: Duration,
    limit: i64,
) -> QueryResult<usize> {
    sql_query(
        "DELETE FROM outbox_inbox WHERE ctid = ANY(ARRAY(
            SELECT ctid FROM outbox_inbox
             WHERE handled_at < now() - $1 * interval '1 millisecond'
             LIMIT $2))",
    )
    .bind::<BigInt, _>(millis(age.min(LONGEST_AGE)))
    .bind::<BigInt, _>(limit)
    .execute(conn)
}

/// Whether a connection can clean the inbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cleaning {
    /// It can.
    Possible,
    /// There is no inbox.
    NoTable,
    /// Its role must not.
    NoRight,
}

#[derive(diesel::QueryableByName)]
struct CleaningRow {
    #[diesel(sql_type = Bool)]
    found: bool,
    #[diesel(sql_type = Bool)]
    allowed: bool,
}

/// Whether the inbox can be cleaned on this connection.
pub(crate) fn cleaning(conn: &mut PgConnection) -> QueryResult<Cleaning> {
    let row: CleaningRow = sql_query(
        "SELECT inbox IS NOT NULL AS found,
                coalesce(has_table_privilege(inbox, 'SELECT')
                     AND has_table_privilege(inbox, 'DELETE'), false) AS allowed
           FROM (SELECT (SELECT attrelid FROM pg_attribute
                          WHERE attrelid = to_regclass('outbox_inbox')
                            AND attname = 'handled_at' AND NOT attisdropped) AS inbox) AS found",
    )
    .get_result(conn)?;
    Ok(match (row.found, row.allowed) {
        (false, _) => Cleaning::NoTable,
        (true, false) => Cleaning::NoRight,
        (true, true) => Cleaning::Possible,
    })
}
