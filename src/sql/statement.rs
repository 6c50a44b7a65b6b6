//! Statements as SQL text, and which statements are prepared once for each connection.

use std::marker::PhantomData;

use diesel::pg::Pg;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::serialize::ToSql;
use diesel::sql_types::{HasSqlType, Untyped};
use diesel::{PgConnection, RunQueryDsl};

/// SQL with its values: `.bind`, then `.load` or `.execute`. Created by [`statement`] or [`unprepared_statement`].
pub(crate) struct Statement<'a, Row = Untyped> {
    sql: String,
    is_kept: bool,
    binds: Vec<Box<dyn QueryFragment<Pg> + Send + 'a>>,
    row: PhantomData<Row>,
}

/// The statement with this text; `$1`, `$2`, … are the bound values, in any order, any number of times.
///
/// The first call on a connection prepares the statement (one more round trip). Diesel keeps it under its text, so
/// later calls only bind and execute. A connection keeps every text until it closes, so there must be few: a text
/// may name an outbox, but never contain a value. After five calls PostgreSQL may keep one plan for all values, so
/// the plan must be good for all values, and for any size that the tables had when the plan was made.
pub(crate) fn statement<'a>(sql: impl Into<String>) -> Statement<'a> {
    Statement {
        is_kept: true,
        ..unprepared_statement(sql)
    }
}

/// Like [`statement`], but the server parses and plans it at every call, as with Diesel's `sql_query`.
pub(crate) fn unprepared_statement<'a>(sql: impl Into<String>) -> Statement<'a> {
    Statement {
        sql: sql.into(),
        is_kept: false,
        binds: Vec::new(),
        row: PhantomData,
    }
}

impl<'a> Statement<'a> {
    /// Binds the next value, of the SQL type `T`.
    pub(crate) fn bind<T, V>(mut self, value: V) -> Self
    where
        Pg: HasSqlType<T>,
        T: Send + 'a,
        V: ToSql<T, Pg> + Send + 'a,
    {
        self.binds.push(Box::new(Bind {
            value,
            sql_type: PhantomData,
        }));
        self
    }

    /// Adds text.
    pub(crate) fn and(mut self, sql: &str) -> Self {
        self.sql.push_str(sql);
        self
    }

    /// Sets the SQL types of the rows, whose columns then need no names.
    pub(crate) fn giving<Row>(self) -> Statement<'a, Row> {
        Statement {
            sql: self.sql,
            is_kept: self.is_kept,
            binds: self.binds,
            row: PhantomData,
        }
    }
}

impl<Row> QueryFragment<Pg> for Statement<'_, Row> {
    /// Diesel writes `$n` for each bound value. The text has its own placeholders, so Diesel's go into a comment
    /// after the text.
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        if !self.is_kept {
            out.unsafe_to_cache_prepared();
        }
        out.push_sql(&self.sql);
        out.push_sql("\n--");
        for bind in &self.binds {
            out.push_sql(" ");
            bind.walk_ast(out.reborrow())?;
        }
        Ok(())
    }
}

/// Without a static id, Diesel finds the prepared statement by its text.
impl<Row> QueryId for Statement<'_, Row> {
    type QueryId = ();

    const HAS_STATIC_QUERY_ID: bool = false;
}

impl<Row> Query for Statement<'_, Row> {
    type SqlType = Row;
}

impl<Row, C> RunQueryDsl<C> for Statement<'_, Row> {}

/// A Diesel query that the server plans at every call, for the values of that call.
///
/// Otherwise Diesel prepares a query once for each connection, and PostgreSQL may keep one plan for all values.
/// That is wrong if the best plan depends on the values: all rows or none may be older than a time, and a filter
/// may leave one row or all.
#[derive(QueryId)]
pub(crate) struct PlannedAnew<Q>(Q);

pub(crate) fn unprepared<Q>(query: Q) -> PlannedAnew<Q> {
    PlannedAnew(query)
}

impl<Q: QueryFragment<Pg>> QueryFragment<Pg> for PlannedAnew<Q> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.unsafe_to_cache_prepared();
        self.0.walk_ast(out)
    }
}

impl<Q: Query> Query for PlannedAnew<Q> {
    type SqlType = Q::SqlType;
}

impl<Q> RunQueryDsl<PgConnection> for PlannedAnew<Q> {}

/// A Diesel UPDATE that is prepared once for each connection.
///
/// Diesel never keeps an UPDATE, because `.set(…)` may produce another text for other values. A kept UPDATE must have
/// one of few texts, like a [`Statement`]. Use RETURNING and `load`: `execute` works on a reference to the query,
/// which Diesel would not keep.
#[derive(QueryId)]
pub(crate) struct Kept<Q>(Q);

pub(crate) fn kept<Q>(query: Q) -> Kept<Q> {
    Kept(query)
}

impl<Q: QueryFragment<Pg>> QueryFragment<Pg> for Kept<Q> {
    fn walk_ast<'b>(&'b self, out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.walk_ast(out)
    }

    fn is_safe_to_cache_prepared(&self, _: &Pg) -> QueryResult<bool> {
        Ok(true)
    }
}

impl<Q: Query> Query for Kept<Q> {
    type SqlType = Q::SqlType;
}

impl<Q> RunQueryDsl<PgConnection> for Kept<Q> {}

struct Bind<T, V> {
    value: V,
    sql_type: PhantomData<T>,
}

impl<T, V> QueryFragment<Pg> for Bind<T, V>
where
    Pg: HasSqlType<T>,
    V: ToSql<T, Pg>,
{
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_bind_param::<T, V>(&self.value)
    }
}

#[cfg(test)]
mod tests {
    use diesel::sql_types::{Array, BigInt, Integer, Nullable, Text};
    use diesel::{ExpressionMethods, IntoSql, debug_query};

    use super::super::table::pause;
    use super::*;

    #[test]
    fn a_statement_has_its_own_placeholders_and_is_kept_by_its_text() {
        let statement = statement("SELECT $2, $1, $1")
            .bind::<Array<Nullable<BigInt>>, _>(vec![Some(7), None])
            .bind::<Text, _>("a");
        assert_eq!(
            debug_query::<Pg, _>(&statement).to_string(),
            "SELECT $2, $1, $1\n-- $1 $2 -- binds: [[Some(7), None], \"a\"]"
        );
        const { assert!(!Statement::<Untyped>::HAS_STATIC_QUERY_ID) };
    }

    #[test]
    fn an_update_is_kept_where_that_is_asked_for() {
        let outbox = super::super::tests::Outbox::new();
        let conn = &mut outbox.connect();
        let count = |conn: &mut PgConnection| {
            let count = diesel::dsl::sql::<BigInt>("SELECT count(*) FROM pg_prepared_statements");
            count.get_result::<i64>(conn).expect("a count")
        };
        let before = count(conn);
        for openings in [1, 2] {
            let change = || {
                let pauses = diesel::update(pause::table(outbox.name.pause()));
                pauses
                    .set(pause::openings.eq(openings))
                    .returning(pause::name)
            };
            change().load::<String>(conn).expect("not kept");
            assert_eq!(count(conn), before + i64::from(openings - 1));
            kept(change()).load::<String>(conn).expect("kept");
            assert_eq!(count(conn), before + 1);
        }
    }

    #[test]
    fn an_unprepared_query_is_never_kept() {
        let conn = &mut super::super::tests::Outbox::new().connect();
        let one = || diesel::select(1.into_sql::<Integer>());
        let kept = |conn: &mut PgConnection| {
            let count = diesel::dsl::sql::<BigInt>("SELECT count(*) FROM pg_prepared_statements");
            count.get_result::<i64>(conn).expect("a count")
        };
        let before = kept(conn);
        assert_eq!(unprepared(one()).get_result(conn), Ok(1));
        assert_eq!(kept(conn), before);
        assert_eq!(one().get_result(conn), Ok(1));
        assert_eq!(kept(conn), before + 1);
    }
}
