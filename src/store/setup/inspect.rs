//! Whether an outbox is there, and as it must be.

mod complete;

use diesel::prelude::{ExpressionMethods, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::{Bool, Text};
use diesel::{PgConnection, select, sql_query};

pub(crate) use self::complete::check;
#[cfg(feature = "relay")]
pub(super) use self::complete::parts;

use crate::name::OutboxName;
use crate::store::sql::{current_setting, to_regclass};

#[derive(diesel::QueryableByName)]
struct FoundRow {
    #[diesel(sql_type = Bool)]
    found: bool,
}

pub(crate) fn table_exists(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<bool> {
    select(to_regclass(name.outbox()).is_not_null()).get_result(conn)
}

/// Whether there is a table of this name with such a column.
///
/// Text: it asks PostgreSQL's catalogue.
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
///
/// Text: it asks PostgreSQL's catalogue.
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

/// A setting of the server, such as `server_version`.
pub(crate) fn setting(conn: &mut PgConnection, name: &str) -> QueryResult<String> {
    select(current_setting(name)).get_result(conn)
}
