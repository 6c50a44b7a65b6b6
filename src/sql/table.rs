//! The tables of an outbox for Diesel's query builder. Their names are known only at run time.
//!
//! ```text
//! lease::table(name.lease()).filter(lease::id.eq(7)).select(lease::relay)
//! SELECT "lease"."relay" FROM "hrm"."outbox_lease" AS "lease" WHERE ("lease"."id" = $1)
//! ```
//!
//! A table is used like a table of `diesel::table!`. The differences, and their reasons:
//!
//! - **A table is a value that holds its name**, quoted and with its schema, from [`OutboxName`]. `table!` puts the
//!   name into the type.
//! - **Columns are written with an alias**, the name of their module: a column has no value that could hold a name.
//! - **Column types come from [`schema`](crate::schema)**, which declares them for users. This module lists only the
//!   columns that our statements need.
//! - **No query has a static [`QueryId`]**: queries of one type have a different text for each outbox. Diesel then
//!   keeps the prepared statement under its text.
//! - **A table that a query names twice has two modules**, for example `lease` and `other_lease`: a Diesel query may
//!   contain a type only once, so that each column belongs to one table. All modules are declared distinct, as
//!   `allow_tables_to_appear_in_same_query!` does.
//! - **`update(table).filter(…)`, never `update(table.filter(…))`**, and the same for `delete`: the second form
//!   creates a new table from the type, which has no name. Such a query returns an error.
//! - **`ctid`**, the physical place of a row, is a column of every table.
//! - There are no joins, no `find` and no associations, because nothing here uses them.
//!
//! [`OutboxName`]: crate::OutboxName
//! [`QueryId`]: diesel::query_builder::QueryId

use std::io::Write;

use diesel::expression::AsExpression;
use diesel::pg::Pg;
use diesel::query_builder::{AstPass, QueryId};
use diesel::result::{Error, QueryResult};
use diesel::serialize::{self, IsNull, Output, ToSql};
use diesel::sql_types::{self, SqlType};

/// PostgreSQL's `tid`: the physical place of a row.
#[derive(SqlType, QueryId)]
#[diesel(postgres_type(oid = 27, array_oid = 1010))]
pub struct Tid;

/// The first place on a page of a table.
#[derive(Debug, Clone, Copy, AsExpression)]
#[diesel(sql_type = Tid)]
pub struct PageBegin(pub(crate) u32);

impl ToSql<Tid, Pg> for PageBegin {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        out.write_all(&self.0.to_be_bytes())?;
        out.write_all(&[0, 0])?;
        Ok(IsNull::No)
    }
}

/// The PostgreSQL name of a column's type.
trait Named {
    const NAME: &'static str;
}

macro_rules! named {
    ($($sql_type:ident = $name:literal)+) => {
        $(
            impl Named for sql_types::$sql_type {
                const NAME: &'static str = $name;
            }
        )+
    };
}

named! {
    SmallInt = "smallint"
    Integer = "integer"
    BigInt = "bigint"
    Bool = "boolean"
    Text = "text"
    Binary = "bytea"
    Json = "json"
    Uuid = "uuid"
    Interval = "interval"
    Timestamptz = "timestamp with time zone"
}

impl Named for sql_types::Array<sql_types::Text> {
    const NAME: &'static str = "text[]";
}

impl<T: Named + SqlType<IsNull = sql_types::is_nullable::NotNull>> Named
    for sql_types::Nullable<T>
{
    const NAME: &'static str = T::NAME;
}

/// Declares tables: `module, second module for the same table = table of crate::schema { columns }`.
/// The first column is the primary key, or a part of it.
macro_rules! tables {
    ($($($module:ident),+ = $typed:ident $columns:tt)+) => {
        $($(tables!(@table $module $typed $columns);)+)+
        tables!(@apart $($($module)+)+);
    };
    (@apart $left:ident $($right:ident)+) => {
        $(
            impl diesel::query_source::TableNotEqual<$left::table> for $right::table {}
            impl diesel::query_source::TableNotEqual<$right::table> for $left::table {}
        )+
        tables!(@apart $($right)+);
    };
    (@apart $last:ident) => {};
    (@table $module:ident $typed:ident { $key:ident $(, $column:ident)* $(,)? }) => {
        #[allow(
            non_camel_case_types,
            unreachable_pub,
            dead_code,
            reason = "as with `table!`: Diesel's traits need public items, and columns may be unused"
        )]
        pub(crate) mod $module {
            use diesel::associations::HasTable;
            use diesel::internal::table_macro::{FromClause, Inner, Join, SelectStatement};
            use diesel::pg::Pg;
            use diesel::query_builder::{
                AsQuery, AstPass, IntoUpdateTarget, QueryFragment, QueryId, UpdateTarget,
            };
            use diesel::query_source::{AppearsInFromClause, Once};
            use diesel::result::QueryResult;
            use diesel::{Expression, QuerySource, Table};

            /// The table, with its quoted name.
            #[derive(Debug, Clone)]
            pub struct table {
                quoted: String,
            }

            /// The columns, and the PostgreSQL names of their types.
            pub(crate) const COLUMNS: &[(&str, &str)] = &[
                tables!(@named $typed $key),
                $(tables!(@named $typed $column),)*
            ];

            /// The table with this quoted name.
            pub(crate) fn table(quoted: impl Into<String>) -> table {
                table { quoted: quoted.into() }
            }

            impl QueryFragment<Pg> for table {
                fn walk_ast<'b>(&'b self, pass: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
                    let alias = concat!(" AS \"", stringify!($module), "\"");
                    crate::sql::table::push_table(pass, &self.quoted, alias)
                }
            }

            impl QueryId for table {
                type QueryId = ();

                const HAS_STATIC_QUERY_ID: bool = false;
            }

            impl QuerySource for table {
                type FromClause = Self;
                type DefaultSelection = <Self as Table>::AllColumns;

                fn from_clause(&self) -> Self {
                    self.clone()
                }

                fn default_selection(&self) -> Self::DefaultSelection {
                    Self::all_columns()
                }
            }

            impl AsQuery for table {
                type SqlType = <<Self as Table>::AllColumns as Expression>::SqlType;
                type Query = SelectStatement<FromClause<Self>>;

                fn as_query(self) -> Self::Query {
                    SelectStatement::simple(self)
                }
            }

            impl Table for table {
                type PrimaryKey = $key;
                type AllColumns = ($key, $($column,)*);

                fn primary_key(&self) -> Self::PrimaryKey {
                    $key
                }

                fn all_columns() -> Self::AllColumns {
                    ($key, $($column,)*)
                }
            }

            impl HasTable for table {
                type Table = Self;

                /// A table without a name: queries on it return an error.
                fn table() -> Self {
                    table("")
                }
            }

            impl IntoUpdateTarget for table {
                type WhereClause = <<Self as AsQuery>::Query as IntoUpdateTarget>::WhereClause;

                fn into_update_target(self) -> UpdateTarget<Self, Self::WhereClause> {
                    UpdateTarget {
                        where_clause: table("").as_query().into_update_target().where_clause,
                        table: self,
                    }
                }
            }

            impl AppearsInFromClause<table> for table {
                type Count = Once;
            }

            tables!(@column $module $key: <crate::schema::$typed::$key as Expression>::SqlType);
            $(
                tables!(@column $module $column: <crate::schema::$typed::$column as Expression>::SqlType);
            )*
            tables!(@column $module ctid: crate::sql::table::Tid);
        }
    };
    (@named $typed:ident $column:ident) => {
        (
            stringify!($column),
            <<crate::schema::$typed::$column as Expression>::SqlType as crate::sql::table::Named>::NAME,
        )
    };
    (@column $module:ident $column:ident: $sql_type:ty) => {
        #[derive(Debug, Clone, Copy, QueryId)]
        pub struct $column;

        impl Expression for $column {
            type SqlType = $sql_type;
        }

        impl QueryFragment<Pg> for $column {
            fn walk_ast<'b>(&'b self, mut pass: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
                // One literal, `"lease"."id"`, because a claim names dozens of columns.
                let column = concat!('"', stringify!($module), "\".\"", stringify!($column), '"');
                pass.push_sql(column);
                Ok(())
            }
        }

        impl diesel::query_source::Column for $column {
            type Table = table;

            const NAME: &'static str = stringify!($column);
        }

        impl<QS> diesel::AppearsOnTable<QS> for $column where
            QS: AppearsInFromClause<table, Count = Once>
        {
        }

        impl diesel::SelectableExpression<table> for $column {}

        impl<L, R> diesel::SelectableExpression<Join<L, R, Inner>> for $column
        where
            L: QuerySource,
            R: QuerySource,
            Self: diesel::AppearsOnTable<Join<L, R, Inner>>,
        {
        }

        impl diesel::expression::ValidGrouping<()> for $column {
            type IsAggregate = diesel::expression::is_aggregate::No;
        }

        impl diesel::expression::ValidGrouping<$column> for $column {
            type IsAggregate = diesel::expression::is_aggregate::Yes;
        }
    };
}

/// `"hrm"."outbox_lease" AS "lease"`.
fn push_table(mut out: AstPass<'_, '_, Pg>, quoted: &str, alias: &str) -> QueryResult<()> {
    if quoted.is_empty() {
        let error =
            "this table has no name: write update(table).filter(…) or delete(table).filter(…)";
        return Err(Error::QueryBuilderError(error.into()));
    }
    out.push_sql(quoted);
    out.push_sql(alias);
    Ok(())
}

tables! {
    lease, other_lease = outbox_lease {
        id, relay, started_at, renewed_at, expires_at, single_active, ended, serves, takeover_after,
        refuses, listener_pid, listener_started, settings
    }
    lock = outbox_lock { name }
    outbox, candidate, other = outbox {
        sequence, message_id, topic, destination, payload, headers, ordering_key, idempotency_key,
        digest, tenant_id, available_at, expires_at, created_at, occurred_at, attempts, locked_by,
        locked_at, last_attempt_at, last_error_code, last_error, split_from, split_to, registration
    }
    ledger = outbox_ledger {
        message_id, part, sequence, topic, destination, named_destination, ordering_key, idempotency_key,
        digest, tenant_id, status, reason, error, http_status, response, attempts, payload, headers,
        created_at, occurred_at, settled_at, split_from, registration
    }
    part = outbox_part { part, opened_at, closed_at }
    attempt = outbox_attempt {
        message_id, part, sequence, topic, destination, tenant_id, event, attempt, reason, error, http_status,
        response, took, relay, operator, happened_at
    }
    dead = outbox_dead {
        sequence, message_id, topic, destination, named_destination, payload, headers, ordering_key,
        idempotency_key, digest, tenant_id, available_at, expires_at, created_at, occurred_at, attempts, reason,
        last_error, http_status, response, dead_lettered_at, split_from, split_to, blocks_key, registration
    }
    messages = outbox_messages { sequence, status, settled_at }
    pause = outbox_pause { kind, name, reason, openings, paused_at, paused_until, lasts, paused_by }
    endpoint = outbox_endpoint {
        name, kind, url, topics, tenant_id, filter, enabled, secret, old_secrets_until, headers, auth, mode, concurrency,
        rate, timeout, policy, description, disabled_reason, created_at, updated_at, failing_since,
        failing_reason, failing, verification, verified_at, allowed_rate, verification_due, verification_tries,
        verification_error, id, disabled_by, set_by
    }
    registration = outbox_registration { xid, name, is_new }
    feed = outbox_feed { name, registration, base, base_id, base_stored_at }
    feed_part = outbox_feed_part { part, opened_at, closed_at }
    feed_event = outbox_feed_event {
        position, part, feed, message_id, sequence, topic, payload, headers, ordering_key, tenant_id, created_at,
        occurred_at, stored_at
    }
    feed_reader = outbox_feed_reader { token_digest, feed, created_at, valid_until, last_position, last_read_at }
    topic = outbox_topic { pattern, kind, first_served, last_served }
    audit = outbox_audit { at, who, act, target, why, tenant_id, cost }
    request = outbox_request { caller, key, digest, at, status, answer }
    inbox = outbox_inbox { source, message_id }
    feed_position = outbox_feed_position { consumer, feed, cursor, updated_at }
}

#[cfg(test)]
mod tests {
    use diesel::dsl::{array, exists, not};
    use diesel::query_builder::{QueryFragment, QueryId};
    use diesel::query_dsl::methods::FilterDsl;
    use diesel::sql_types::{BigInt, Bool};
    use diesel::upsert::excluded;
    use diesel::{
        BoolExpressionMethods, BoxableExpression, ExpressionMethods, Insertable, RunQueryDsl,
        debug_query, delete, insert_into, update,
    };

    use super::super::tests::Outbox;
    use super::{Pg, Tid, lease, other_lease, pause};
    use crate::name::OutboxName;

    fn sql<T: QueryFragment<Pg>>(query: &T) -> String {
        debug_query::<Pg, _>(query).to_string()
    }

    fn name() -> OutboxName {
        "hrm.events".parse().expect("a name")
    }

    fn pauses() -> pause::table {
        pause::table(name().pause())
    }

    fn leases() -> lease::table {
        lease::table(name().lease())
    }

    fn others() -> other_lease::table {
        other_lease::table(name().lease())
    }

    #[test]
    fn a_select_names_the_table_and_its_columns_by_an_alias() {
        use diesel::QueryDsl;

        let is_topic: Box<dyn BoxableExpression<pause::table, Pg, SqlType = Bool>> =
            Box::new(pause::kind.eq("topic"));
        let select = QueryDsl::filter(pauses(), is_topic)
            .order((pause::paused_at, pause::name))
            .limit(5)
            .select((pause::name, pause::openings))
            .for_no_key_update()
            .skip_locked();
        assert_eq!(
            sql(&select),
            r#"SELECT "pause"."name", "pause"."openings" FROM "hrm"."events_pause" AS "pause" WHERE ("pause"."kind" = $1) ORDER BY "pause"."paused_at", "pause"."name" LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED -- binds: ["topic", 5]"#
        );
        const { assert!(!pause::table::HAS_STATIC_QUERY_ID, "kept by its text") };
    }

    #[test]
    fn an_insert_may_have_rows_conflicts_and_an_answer() {
        let row = |name| (pause::kind.eq("topic"), pause::name.eq(name));
        let insert = insert_into(pauses())
            .values(row("a"))
            .on_conflict_do_nothing();
        assert_eq!(
            sql(&insert),
            r#"INSERT INTO "hrm"."events_pause" AS "pause" ("kind", "name") VALUES ($1, $2) ON CONFLICT DO NOTHING -- binds: ["topic", "a"]"#
        );
        let upsert = insert_into(pauses())
            .values(vec![row("a"), row("b")])
            .on_conflict((pause::kind, pause::name))
            .do_update()
            .set(pause::openings.eq(excluded(pause::openings)));
        let upsert = FilterDsl::filter(upsert, pause::paused_until.is_not_null());
        assert_eq!(
            sql(&upsert.returning(pause::name)),
            r#"INSERT INTO "hrm"."events_pause" AS "pause" ("kind", "name") VALUES ($1, $2), ($3, $4) ON CONFLICT ("kind", "name") DO UPDATE SET "openings" = excluded."openings" WHERE ("pause"."paused_until" IS NOT NULL) RETURNING "pause"."name" -- binds: ["topic", "a", "topic", "b"]"#
        );
        let from_select = diesel::QueryDsl::select(others(), (other_lease::id, other_lease::relay))
            .insert_into(leases())
            .into_columns((lease::id, lease::relay));
        assert_eq!(
            sql(&from_select),
            r#"INSERT INTO "hrm"."events_lease" AS "lease" ("id", "relay") SELECT "other_lease"."id", "other_lease"."relay" FROM "hrm"."events_lease" AS "other_lease" -- binds: []"#
        );
    }

    /// A claim takes its locked rows this way.
    #[test]
    fn an_update_takes_its_rows_from_the_second_type_over_the_same_name() {
        use diesel::QueryDsl;

        let found = QueryDsl::filter(others(), not(other_lease::ended))
            .select(other_lease::id)
            .order((other_lease::expires_at, other_lease::id))
            .limit(3)
            .for_no_key_update()
            .skip_locked();
        let change = update(leases())
            .filter(lease::id.eq_any(array::<BigInt, _>(found)))
            .set(lease::ended.eq(true))
            .returning((lease::id, lease::relay));
        assert_eq!(
            sql(&change),
            r#"UPDATE "hrm"."events_lease" AS "lease" SET "ended" = $1 WHERE ("lease"."id" = ANY(ARRAY(SELECT "other_lease"."id" FROM "hrm"."events_lease" AS "other_lease" WHERE  NOT ("other_lease"."ended") ORDER BY "other_lease"."expires_at", "other_lease"."id" LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED))) RETURNING "lease"."id", "lease"."relay" -- binds: [true, 3]"#
        );
    }

    #[test]
    fn a_delete_may_ask_for_the_place_of_rows_and_for_other_rows() {
        use diesel::QueryDsl;

        let found = others().select(other_lease::ctid).limit(3);
        let removal = delete(leases()).filter(lease::ctid.eq_any(array::<Tid, _>(found)));
        assert_eq!(
            sql(&removal),
            r#"DELETE FROM "hrm"."events_lease" AS "lease" WHERE ("lease"."ctid" = ANY(ARRAY(SELECT "other_lease"."ctid" FROM "hrm"."events_lease" AS "other_lease" LIMIT $1))) -- binds: [3]"#
        );
        let older = others().select(other_lease::id);
        let older = QueryDsl::filter(older, other_lease::id.lt(lease::id));
        let removal = delete(leases())
            .filter(lease::relay.eq("a").and(exists(older)))
            .returning(lease::id);
        assert_eq!(
            sql(&removal),
            r#"DELETE FROM "hrm"."events_lease" AS "lease" WHERE (("lease"."relay" = $1) AND EXISTS (SELECT "other_lease"."id" FROM "hrm"."events_lease" AS "other_lease" WHERE ("other_lease"."id" < "lease"."id"))) RETURNING "lease"."id" -- binds: ["a"]"#
        );
    }

    #[test]
    fn they_run_on_the_outbox_that_they_name() {
        use diesel::QueryDsl;

        let (outbox, other) = (Outbox::new(), Outbox::new());
        let conn = &mut outbox.connect();
        let table = || pause::table(outbox.name.pause());
        let row = |name| {
            (
                pause::kind.eq("topic"),
                pause::name.eq(name),
                pause::reason.eq("r"),
            )
        };
        let insert = |name| {
            insert_into(table())
                .values(row(name))
                .on_conflict_do_nothing()
        };
        assert_eq!(insert("a").execute(conn), Ok(1));
        assert_eq!(insert("a").execute(conn), Ok(0));
        let batch = insert_into(table()).values(vec![row("b"), row("c")]);
        let names = batch.returning(pause::name).get_results::<String>(conn);
        assert_eq!(names, Ok(vec!["b".to_owned(), "c".to_owned()]));
        let change = update(table())
            .filter(pause::name.ne_all(["a"]))
            .set(pause::openings.eq(pause::openings));
        assert_eq!(change.execute(conn), Ok(2));
        let removal = delete(table()).filter(pause::name.eq("b"));
        let removed = removal.returning((pause::kind, pause::openings));
        assert_eq!(removed.get_result(conn), Ok(("topic".to_owned(), 0)));
        let locked = |name: &OutboxName| {
            pause::table(name.pause())
                .select(pause::name)
                .order(pause::name.desc())
                .limit(9)
                .for_no_key_update()
                .skip_locked()
        };
        let left = locked(&outbox.name).load::<String>(conn);
        assert_eq!(left, Ok(vec!["c".to_owned(), "a".to_owned()]));
        let left = locked(&other.name).load::<String>(conn);
        assert_eq!(left, Ok(vec![]), "the same types, another outbox");

        let made_of_a_query = delete(QueryDsl::filter(table(), pause::name.eq("a")));
        let error = made_of_a_query.execute(conn).expect_err("no name");
        assert!(error.to_string().contains("has no name"), "{error}");
    }
}
