//! Looking at an outbox: whether it is there and as it must be, and how much is in it.

mod complete;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Double, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};

pub(crate) use self::complete::check;

use crate::name::OutboxName;

#[derive(diesel::QueryableByName)]
struct FoundRow {
    #[diesel(sql_type = Bool)]
    found: bool,
}

pub(crate) fn table_exists(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<bool> {
    sql_query("SELECT pg_catalog.to_regclass($1) IS NOT NULL AS found")
        .bind::<Text, _>(name.outbox())
        .get_result::<FoundRow>(conn)
        .map(|row| row.found)
}

/// Whether there is a table of this name with such a column.
pub(crate) fn has_column(conn: &mut PgConnection, table: &str, column: &str) -> QueryResult<bool> {
    sql_query(
        "SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass($1)
                           AND attname = $2 AND NOT attisdropped) AS found",
    )
    .bind::<Text, _>(table)
    .bind::<Text, _>(column)
    .get_result::<FoundRow>(conn)
    .map(|row| row.found)
}

/// Whether inserts wake relays: the trigger is there, and on.
pub(crate) fn has_trigger(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<bool> {
    sql_query(
        "SELECT EXISTS (SELECT FROM pg_trigger
                         WHERE tgrelid = to_regclass($1) AND tgname = 'outbox_wake'
                           AND tgenabled IN ('O', 'A')) AS found",
    )
    .bind::<Text, _>(name.outbox())
    .get_result::<FoundRow>(conn)
    .map(|row| row.found)
}

/// A relay that is, or was, at work.
#[derive(Debug, Clone, diesel::QueryableByName)]
#[non_exhaustive]
pub struct LeaseRow {
    /// The lease's id: the fencing token.
    #[diesel(sql_type = BigInt)]
    pub id: i64,
    /// Host and process.
    #[diesel(sql_type = Text)]
    pub relay: String,
    /// Seconds since it was registered: the relay's age, or the time since it lost its last lease.
    #[diesel(sql_type = Double)]
    pub started_seconds_ago: f64,
    /// Seconds since it was renewed.
    #[diesel(sql_type = Double)]
    pub renewed_seconds_ago: f64,
    /// Seconds until it is over; negative: it is.
    #[diesel(sql_type = Double)]
    pub seconds_left: f64,
    /// An older one does the work, and it stands by.
    #[diesel(sql_type = Bool)]
    pub stands_by: bool,
}

pub(crate) fn leases(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<LeaseRow>> {
    sql_query(format!(
        "SELECT id, relay,
                extract(epoch FROM clock_timestamp() - started_at)::float8 AS started_seconds_ago,
                extract(epoch FROM clock_timestamp() - renewed_at)::float8 AS renewed_seconds_ago,
                extract(epoch FROM expires_at - clock_timestamp())::float8 AS seconds_left,
                single_active AND EXISTS (
                    SELECT FROM {lease} e
                     WHERE e.single_active AND e.id < l.id AND NOT e.ended) AS stands_by
           FROM {lease} l ORDER BY id",
        lease = name.lease()
    ))
    .load(conn)
}

#[derive(diesel::QueryableByName)]
struct CountRow {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

pub(crate) fn count_due(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<i64> {
    sql_query(format!(
        "SELECT count(*) AS count FROM {} WHERE locked_by IS NULL AND available_at <= now()",
        name.outbox()
    ))
    .get_result::<CountRow>(conn)
    .map(|row| row.count)
}

/// Due messages of a topic that nobody has claimed, for the destination that they name.
#[derive(Debug, Clone, diesel::QueryableByName)]
pub(crate) struct DueRow {
    #[diesel(sql_type = Text)]
    pub(crate) topic: String,
    #[diesel(sql_type = Text)]
    pub(crate) destination: String,
    #[diesel(sql_type = BigInt)]
    pub(crate) count: i64,
    /// Those of them that wait for another one of their ordering key, live or dead.
    #[diesel(sql_type = BigInt)]
    pub(crate) behind: i64,
}

pub(crate) fn due(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<DueRow>> {
    let stands_before = |row: &str| {
        format!(
            "{row}.ordering_key = o.ordering_key
             AND coalesce({row}.split_from, {row}.sequence) < coalesce(o.split_from, o.sequence)
             AND ({row}.destination = o.destination OR {row}.destination = '' OR o.destination = '')"
        )
    };
    sql_query(format!(
        "SELECT o.topic, o.destination, count(*) AS count,
                count(*) FILTER (WHERE o.ordering_key IS NOT NULL AND (
                    EXISTS (SELECT FROM {outbox} e WHERE {e})
                    OR EXISTS (SELECT FROM {dead} d WHERE d.blocks_key AND {d}))) AS behind
           FROM {outbox} o
          WHERE o.locked_by IS NULL AND o.available_at <= now()
          GROUP BY 1, 2 ORDER BY 1, 2",
        outbox = name.outbox(),
        dead = name.dead(),
        e = stands_before("e"),
        d = stands_before("d"),
    ))
    .load(conn)
}

#[derive(diesel::QueryableByName)]
struct TextRow {
    #[diesel(sql_type = Text)]
    text: String,
}

/// A setting of the server, such as `server_version`.
pub(crate) fn setting(conn: &mut PgConnection, name: &str) -> QueryResult<String> {
    sql_query("SELECT pg_catalog.current_setting($1) AS text")
        .bind::<Text, _>(name)
        .get_result::<TextRow>(conn)
        .map(|row| row.text)
}
