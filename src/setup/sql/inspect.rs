//! Checks that an outbox exists and has the right schema.

mod complete;

use diesel::dsl::{exists, not};
use diesel::pg::Pg;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, select};

pub(crate) use self::complete::check;
pub(super) use self::complete::check_migrated;
pub(crate) use self::complete::has_feeds;
#[cfg(feature = "relay")]
pub(crate) use self::complete::{
    OF_OWNER, ROTATES_FEEDS, TABLES_AND_VIEW, function, is_of_endpoints, is_of_feeds, may_lack,
    parts,
};

use crate::name::OutboxName;
use crate::setup::sql::catalogue::{pg_attribute, pg_trigger};
use crate::sql::functions::{current_setting, to_regclass};

pub(crate) fn table_exists(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<bool> {
    select(to_regclass(name.outbox()).is_not_null()).get_result(conn)
}

/// Whether there is a table of this name with this column.
pub(crate) fn has_column(conn: &mut PgConnection, table: &str, column: &str) -> QueryResult<bool> {
    let found = columns(table).filter(pg_attribute::attname.eq(column));
    select(exists(found)).get_result(conn)
}

/// The columns of this table, including system columns.
fn columns(table: &str) -> ColumnsQuery<'_> {
    pg_attribute::table
        .filter(not(pg_attribute::attisdropped))
        .filter(pg_attribute::attrelid.nullable().eq(to_regclass(table)))
        .into_boxed()
}

type ColumnsQuery<'a> = pg_attribute::BoxedQuery<'a, Pg>;

/// Whether inserts wake relays: the trigger exists and is enabled.
pub(crate) fn has_trigger(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<bool> {
    let is_on = pg_trigger::tgenabled
        .eq(b'O')
        .or(pg_trigger::tgenabled.eq(b'A'));
    let found = pg_trigger::table
        .filter(
            pg_trigger::tgrelid
                .nullable()
                .eq(to_regclass(name.outbox())),
        )
        .filter(pg_trigger::tgname.eq("outbox_wake"))
        .filter(is_on);
    select(exists(found)).get_result(conn)
}

/// The value of a server setting, such as `server_version`.
pub(crate) fn setting(conn: &mut PgConnection, name: &str) -> QueryResult<String> {
    select(current_setting(name)).get_result(conn)
}
