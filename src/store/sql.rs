//! PostgreSQL's functions, and values, that statements say in Diesel's words.
//!
//! Functions have their schema: on an application's connection the search path is the application's (see
//! `pinned`). `greatest` is syntax, so nobody can make another one.

use std::time::Duration;

use diesel::declare_sql_function;
use diesel::deserialize::{self, FromSql, FromSqlRow};
use diesel::expression::AsExpression;
use diesel::internal::table_macro::ops;
use diesel::pg::data_types::PgInterval;
use diesel::pg::{Pg, PgValue};
use diesel::prelude::{BoolExpressionMethods, BoxableExpression, IntoSql};
use diesel::serialize::{self, IsNull, Output, ToSql};
use diesel::sql_types::{BigInt, Bool, Interval, Nullable, Text, Timestamptz};

#[declare_sql_function]
extern "SQL" {
    /// The clock, which goes on while a transaction lasts.
    #[sql_name = "pg_catalog.clock_timestamp"]
    fn clock_timestamp() -> Timestamptz;

    /// When the transaction began.
    #[sql_name = "pg_catalog.now"]
    fn now() -> Timestamptz;

    /// A part of a time. `epoch`: seconds since 1970.
    #[sql_name = "pg_catalog.date_part"]
    fn date_part(part: Text, time: Timestamptz) -> diesel::sql_types::Double;

    /// The greater one; a null is none.
    fn greatest(first: BigInt, second: Nullable<BigInt>) -> BigInt;

    /// The latest of these times; a null is none.
    #[sql_name = "greatest"]
    fn latest(
        first: Timestamptz,
        second: Nullable<Timestamptz>,
        third: Nullable<Timestamptz>,
    ) -> Timestamptz;

    /// The table of this name; null: there is none.
    #[sql_name = "pg_catalog.to_regclass"]
    fn to_regclass(name: Text) -> Nullable<diesel::sql_types::Oid>;

    /// A setting of the session or of the server.
    #[sql_name = "pg_catalog.current_setting"]
    fn current_setting(name: Text) -> Text;

    /// Changes a setting, and returns it. `is_local`: for the open transaction only.
    #[sql_name = "pg_catalog.set_config"]
    fn set_config(name: Text, value: Text, is_local: Bool) -> Text;

    /// The process that serves the connection.
    #[sql_name = "pg_catalog.pg_backend_pid"]
    fn pg_backend_pid() -> diesel::sql_types::Integer;
}

/// Diesel gives operators to functions that have arguments, and not to these.
macro_rules! plus_and_minus_interval {
    ($($time:ident)+) => {$(
        impl<T: AsExpression<Interval>> std::ops::Add<T> for $time {
            type Output = ops::Add<Self, T::Expression>;

            fn add(self, interval: T) -> Self::Output {
                ops::Add::new(self, interval.as_expression())
            }
        }

        impl<T: AsExpression<Interval>> std::ops::Sub<T> for $time {
            type Output = ops::Sub<Self, T::Expression>;

            fn sub(self, interval: T) -> Self::Output {
                ops::Sub::new(self, interval.as_expression())
            }
        }
    )+};
}

plus_and_minus_interval!(clock_timestamp now);

/// For `time + interval(…)`. Settings and ages are far below its range.
pub(crate) fn interval(duration: Duration) -> PgInterval {
    PgInterval::from_microseconds(i64::try_from(duration.as_micros()).unwrap_or(i64::MAX))
}

/// An expression on a row of a table; most are conditions.
pub(crate) type On<'a, T, SqlType = Bool> =
    Box<dyn BoxableExpression<T, Pg, SqlType = SqlType> + 'a>;

/// All of these conditions. Of none: true.
pub(crate) fn all_of<'a, T: 'a>(conditions: Vec<On<'a, T>>) -> On<'a, T> {
    let both = |one: On<'a, T>, other: On<'a, T>| -> On<'a, T> { Box::new(one.and(other)) };
    let all = conditions.into_iter().reduce(both);
    all.unwrap_or_else(|| Box::new(true.into_sql::<Bool>()))
}

/// JSON as it is written.
#[derive(Debug, AsExpression)]
#[diesel(sql_type = diesel::sql_types::Json)]
pub(crate) struct Json<'a>(pub(crate) &'a str);

/// JSON as it was written, where there is some.
#[derive(Debug, FromSqlRow)]
pub struct MaybeJson(Option<String>);

impl From<MaybeJson> for Option<String> {
    fn from(json: MaybeJson) -> Self {
        json.0
    }
}

impl FromSql<Nullable<diesel::sql_types::Json>, Pg> for MaybeJson {
    fn from_sql(bytes: PgValue<'_>) -> deserialize::Result<Self> {
        FromSql::<Text, Pg>::from_sql(bytes).map(|json| Self(Some(json)))
    }

    fn from_nullable_sql(bytes: Option<PgValue<'_>>) -> deserialize::Result<Self> {
        bytes.map_or(Ok(Self(None)), Self::from_sql)
    }
}

impl ToSql<diesel::sql_types::Json, Pg> for Json<'_> {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        std::io::Write::write_all(out, self.0.as_bytes())?;
        Ok(IsNull::No)
    }
}
