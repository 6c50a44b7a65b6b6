//! Tables of PostgreSQL's catalogue, and functions that ask it, for Diesel's query builder. Columns of the type `name` are
//! declared as `Text`.

#[cfg(feature = "relay")]
use diesel::PgConnection;
use diesel::declare_sql_function;
#[cfg(feature = "relay")]
use diesel::prelude::{
    CombineDsl, ExpressionMethods, NullableExpressionMethods, QueryDsl, RunQueryDsl,
};
#[cfg(feature = "relay")]
use diesel::result::QueryResult;
#[cfg(feature = "relay")]
use diesel::select;
use diesel::sql_types::{Bool, Nullable, Text};

#[cfg(feature = "relay")]
use crate::sql::functions::to_regclass;

diesel::table! {
    /// Columns of tables and indexes.
    pg_catalog.pg_attribute (attrelid, attnum) {
        attrelid -> Oid,
        attname -> Text,
        atttypid -> Oid,
        /// Negative for system columns, such as `ctid`.
        attnum -> SmallInt,
        attisdropped -> Bool,
    }
}

diesel::table! {
    /// Tables, indexes, views and sequences.
    pg_catalog.pg_class (oid) {
        oid -> Oid,
        relname -> Text,
        /// Pages at the last VACUUM or ANALYZE; `reltuples`: rows.
        relpages -> Integer,
        reltuples -> Float,
    }
}

diesel::table! {
    /// Partitions of tables and indexes.
    pg_catalog.pg_inherits (inhrelid) {
        inhrelid -> Oid,
        inhparent -> Oid,
    }
}

diesel::allow_tables_to_appear_in_same_query!(pg_class, pg_inherits);

diesel::table! {
    pg_catalog.pg_trigger (oid) {
        oid -> Oid,
        tgrelid -> Oid,
        tgname -> Text,
        /// When the trigger fires: `O` except during replication (default), `A` always.
        tgenabled -> CChar,
    }
}

#[cfg(feature = "relay")]
diesel::table! {
    pg_catalog.pg_settings (name) {
        name -> Text,
        /// The value in this session.
        setting -> Nullable<Text>,
        /// The value in a new session.
        reset_val -> Nullable<Text>,
    }
}

#[declare_sql_function]
extern "SQL" {
    /// The function with this name and these types; null if there is none.
    #[sql_name = "pg_catalog.to_regprocedure"]
    fn to_regprocedure(name: Text) -> Nullable<diesel::sql_types::Oid>;

    /// The SQL name of a type. `modifier`: the type's length or precision.
    #[sql_name = "pg_catalog.format_type"]
    fn format_type(
        of: diesel::sql_types::Oid,
        modifier: Nullable<diesel::sql_types::Integer>,
    ) -> Text;

    #[sql_name = "pg_catalog.current_database"]
    fn current_database() -> Text;

    /// Whether this role has the privilege on a database.
    #[sql_name = "pg_catalog.has_database_privilege"]
    fn has_database_privilege(database: Text, privilege: Text) -> Bool;

    /// Whether this role has the privilege on a table; null if there is no table.
    #[sql_name = "pg_catalog.has_table_privilege"]
    fn has_table_privilege(
        table: Nullable<diesel::sql_types::Oid>,
        privilege: Text,
    ) -> Nullable<Bool>;

    /// The rows inserted into a table since statistics began; null if there is no table.
    #[sql_name = "pg_catalog.pg_stat_get_tuples_inserted"]
    fn pg_stat_get_tuples_inserted(table: Nullable<diesel::sql_types::Oid>) -> Nullable<BigInt>;

    /// The rows deleted from a table since statistics began; null if there is no table.
    #[sql_name = "pg_catalog.pg_stat_get_tuples_deleted"]
    fn pg_stat_get_tuples_deleted(table: Nullable<diesel::sql_types::Oid>) -> Nullable<BigInt>;

    /// The size of a table in bytes.
    #[sql_name = "pg_catalog.pg_relation_size"]
    fn pg_relation_size(table: Nullable<diesel::sql_types::Oid>) -> Nullable<BigInt>;

    /// Whether the server is a standby.
    #[sql_name = "pg_catalog.pg_is_in_recovery"]
    fn pg_is_in_recovery() -> Bool;

    /// The schemas of the search path.
    #[sql_name = "pg_catalog.current_schemas"]
    fn current_schemas(with_implicit: Bool) -> Array<Text>;
}

/// Converts bytes to pages.
#[cfg(feature = "relay")]
macro_rules! pages_of {
    ($bytes:expr) => {
        $bytes
            / crate::sql::functions::current_setting("block_size")
                .fallible_cast::<diesel::sql_types::BigInt>()
                .nullable()
    };
}

#[cfg(feature = "relay")]
pub(crate) use pages_of;

/// The size of a table and its partitions, in pages.
#[cfg(feature = "relay")]
pub(crate) fn pages(conn: &mut PgConnection, table: &str) -> QueryResult<i64> {
    let own = select(pages_of!(pg_relation_size(to_regclass(table))));
    let of_parts = pg_inherits::table
        .filter(pg_inherits::inhparent.nullable().eq(to_regclass(table)))
        .select(pages_of!(pg_relation_size(
            pg_inherits::inhrelid.nullable()
        )));
    let pages: Vec<Option<i64>> = own.union_all(of_parts).load(conn)?;
    Ok(pages.into_iter().flatten().sum())
}
