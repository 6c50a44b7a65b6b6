//! PostgreSQL's functions, and values, that statements say in Diesel's words.
//!
//! Functions have their schema: on an application's connection the search path is the application's (see
//! `pinned`). `greatest` is syntax, so nobody can make another one.

use std::time::Duration;

use diesel::declare_sql_function;
use diesel::expression::AsExpression;
use diesel::internal::table_macro::ops;
use diesel::pg::Pg;
use diesel::pg::data_types::PgInterval;
use diesel::serialize::{self, IsNull, Output, ToSql};
use diesel::sql_types::{BigInt, Interval, Nullable, Text, Timestamptz};

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

/// JSON as it is written.
#[derive(Debug, AsExpression)]
#[diesel(sql_type = diesel::sql_types::Json)]
pub(crate) struct Json<'a>(pub(crate) &'a str);

impl ToSql<diesel::sql_types::Json, Pg> for Json<'_> {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        std::io::Write::write_all(out, self.0.as_bytes())?;
        Ok(IsNull::No)
    }
}
