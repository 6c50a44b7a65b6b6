//! PostgreSQL's functions and values for Diesel's query builder.
//!
//! Functions are qualified with their schema, because the search path of an application's connection is the
//! application's (see `pinned`). `greatest` is syntax, so no other function can replace it.

use std::time::Duration;

use diesel::deserialize::{self, FromSql, FromSqlRow};
use diesel::expression::{
    AppearsOnTable, AsExpression, Expression, SelectableExpression, ValidGrouping,
};
use diesel::internal::table_macro::NoFromClause;
use diesel::pg::data_types::PgInterval;
use diesel::pg::{Pg, PgValue};
use diesel::prelude::{BoolExpressionMethods, BoxableExpression, IntoSql};
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::serialize::{self, IsNull, Output, ToSql};
use diesel::sql_types::{Array, BigInt, Bool, Nullable, Record, Text, Timestamptz};
use diesel::{declare_sql_function, operator_allowed};

#[declare_sql_function]
extern "SQL" {
    /// The current time. It advances during a transaction.
    #[sql_name = "pg_catalog.clock_timestamp"]
    fn clock_timestamp() -> Timestamptz;

    /// When the server was started.
    #[sql_name = "pg_catalog.pg_postmaster_start_time"]
    fn pg_postmaster_start_time() -> Timestamptz;

    /// When the transaction began.
    #[sql_name = "pg_catalog.now"]
    fn now() -> Timestamptz;

    /// A part of a time. `epoch`: seconds since 1970.
    #[sql_name = "pg_catalog.date_part"]
    fn date_part(part: Text, time: Timestamptz) -> diesel::sql_types::Double;

    /// The greater number. A null is ignored.
    fn greatest(first: BigInt, second: Nullable<BigInt>) -> BigInt;

    /// The latest of these times. Nulls are ignored.
    #[sql_name = "greatest"]
    fn latest(
        first: Timestamptz,
        second: Nullable<Timestamptz>,
        third: Nullable<Timestamptz>,
    ) -> Timestamptz;

    /// The greater count.
    #[sql_name = "greatest"]
    fn at_least(
        first: diesel::sql_types::Integer,
        second: diesel::sql_types::Integer,
    ) -> diesel::sql_types::Integer;

    /// The smaller count.
    #[sql_name = "least"]
    fn at_most(
        first: diesel::sql_types::Integer,
        second: diesel::sql_types::Integer,
    ) -> diesel::sql_types::Integer;

    /// The first number, or the second if the first is null. Syntax, like `greatest`.
    fn coalesce(first: Nullable<BigInt>, second: BigInt) -> BigInt;

    /// A number for a text: different texts have different ones, but for accidents.
    #[sql_name = "pg_catalog.hashtext"]
    fn hashtext(text: Text) -> diesel::sql_types::Integer;

    /// The same, with 64 bits.
    #[sql_name = "pg_catalog.hashtextextended"]
    fn hashtextextended(text: Text, seed: BigInt) -> BigInt;

    /// The bytes of a text, in the database's encoding.
    #[sql_name = "pg_catalog.octet_length"]
    fn octet_length(text: Text) -> diesel::sql_types::Integer;

    /// `octet_length` for a nullable text.
    #[sql_name = "pg_catalog.octet_length"]
    fn maybe_octet_length(text: Nullable<Text>) -> Nullable<diesel::sql_types::Integer>;

    /// `coalesce` for texts.
    #[sql_name = "coalesce"]
    fn text_or(first: Nullable<Text>, second: Text) -> Text;

    /// A UUID as text.
    #[sql_name = "pg_catalog.text"]
    fn id_text(id: diesel::sql_types::Uuid) -> Text;

    /// The place of a number in an ascending array, from 1.
    #[sql_name = "pg_catalog.width_bucket"]
    fn width_bucket(number: BigInt, ascending: Array<BigInt>) -> diesel::sql_types::Integer;

    /// The table with this name; null if there is none.
    #[sql_name = "pg_catalog.to_regclass"]
    fn to_regclass(name: Text) -> Nullable<diesel::sql_types::Oid>;

    /// Takes the lock if it is free or this session's, and keeps it until the session ends.
    #[sql_name = "pg_catalog.pg_try_advisory_lock"]
    fn pg_try_advisory_lock(key: BigInt) -> Bool;

    #[sql_name = "pg_catalog.pg_terminate_backend"]
    fn pg_terminate_backend(pid: diesel::sql_types::Integer) -> Bool;

    /// Like `pg_try_advisory_lock`, but keeps the lock until the transaction ends.
    #[sql_name = "pg_catalog.pg_try_advisory_xact_lock"]
    fn pg_try_advisory_xact_lock(key: BigInt) -> Bool;

    /// Waits for the lock, and keeps it until the transaction ends. Its result must not be read.
    #[sql_name = "pg_catalog.pg_advisory_xact_lock"]
    fn pg_advisory_xact_lock(key: BigInt) -> Text;

    /// A setting of the session or of the server.
    #[sql_name = "pg_catalog.current_setting"]
    fn current_setting(name: Text) -> Text;

    /// Changes a setting, and returns it. `is_local`: for the open transaction only.
    #[sql_name = "pg_catalog.set_config"]
    fn set_config(name: Text, value: Text, is_local: Bool) -> Text;

    /// The server process of the connection.
    #[sql_name = "pg_catalog.pg_backend_pid"]
    fn pg_backend_pid() -> diesel::sql_types::Integer;
}

/// The idempotency key to show for a row: the message id if the caller gave no key.
macro_rules! shown_key {
    ($table:ident) => {
        crate::sql::functions::text_or(
            $table::idempotency_key,
            crate::sql::functions::id_text($table::message_id),
        )
    };
}

/// A null of this Rust type and SQL type, for a column that one part of a UNION lacks.
macro_rules! null {
    ($value:ty, $sql:ty) => {
        None::<$value>.into_sql::<Nullable<$sql>>()
    };
}

pub(crate) use {null, shown_key};

// Diesel implements operators only for functions that have arguments.
operator_allowed!(clock_timestamp, Add, add);
operator_allowed!(clock_timestamp, Sub, sub);
operator_allowed!(now, Add, add);
operator_allowed!(now, Sub, sub);

/// A thousand years: PostgreSQL's times have room for this long after any time that a clock shows.
pub(crate) const LONGEST: Duration = Duration::from_secs(1_000 * 365 * 24 * 3600);

/// An interval for `time + interval(…)`. A longer one than [`LONGEST`] is cut.
pub(crate) fn interval(duration: Duration) -> PgInterval {
    PgInterval::from_microseconds(
        i64::try_from(duration.min(LONGEST).as_micros()).unwrap_or(i64::MAX),
    )
}

/// The length of an interval. A month counts as 30 days, as in PostgreSQL's comparisons; a negative one has none.
pub(crate) fn length(interval: PgInterval) -> Duration {
    const DAY: i64 = 24 * 3600 * 1_000_000;
    let days = i64::from(interval.months) * 30 + i64::from(interval.days);
    let micros = days
        .saturating_mul(DAY)
        .saturating_add(interval.microseconds);
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

/// An expression on a row of a table; most are conditions.
pub(crate) type On<'a, T, SqlType = Bool> =
    Box<dyn BoxableExpression<T, Pg, SqlType = SqlType> + 'a>;

/// The condition that `is` makes of a filter's value, if the value is set.
pub(crate) fn given<'a, V, T, C>(value: Option<V>, is: impl FnOnce(V) -> C) -> Option<On<'a, T>>
where
    C: BoxableExpression<T, Pg, SqlType = Bool> + 'a,
{
    value.map(|value| -> On<'a, T> { Box::new(is(value)) })
}

/// All of these conditions joined by AND; true if there are none.
pub(crate) fn all_of<'a, T: 'a>(
    conditions: impl IntoIterator<Item = Option<On<'a, T>>>,
) -> On<'a, T> {
    let both = |one: On<'a, T>, other: On<'a, T>| -> On<'a, T> { Box::new(one.and(other)) };
    let all = conditions.into_iter().flatten().reduce(both);
    all.unwrap_or_else(|| Box::new(true.into_sql::<Bool>()))
}

/// A time and a sequence, compared as one value: the order of lists.
pub(crate) type TimeAndSequence = Record<(Timestamptz, BigInt)>;

/// Any element of an array, for `column.eq(AnyOf(array))`: Diesel's `eq_any` takes no boxed array.
#[derive(ValidGrouping)]
pub(crate) struct AnyOf<'a>(pub(crate) On<'a, NoFromClause, Array<BigInt>>);

impl Expression for AnyOf<'_> {
    type SqlType = BigInt;
}

/// The array uses no table of the query.
impl<QS> AppearsOnTable<QS> for AnyOf<'_> {}

impl<QS> SelectableExpression<QS> for AnyOf<'_> {}

impl QueryId for AnyOf<'_> {
    type QueryId = ();

    const HAS_STATIC_QUERY_ID: bool = false;
}

impl QueryFragment<Pg> for AnyOf<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("ANY(");
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(")");
        Ok(())
    }
}

/// JSON text to write.
#[derive(Debug, AsExpression)]
#[diesel(sql_type = diesel::sql_types::Json)]
pub(crate) struct Json<'a>(pub(crate) &'a str);

/// JSON text as it was written.
#[derive(Debug, FromSqlRow)]
pub struct JsonText(String);

impl From<JsonText> for String {
    fn from(json: JsonText) -> Self {
        json.0
    }
}

impl FromSql<diesel::sql_types::Json, Pg> for JsonText {
    fn from_sql(bytes: PgValue<'_>) -> deserialize::Result<Self> {
        FromSql::<Text, Pg>::from_sql(bytes).map(Self)
    }
}

/// Nullable JSON text as it was written.
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
