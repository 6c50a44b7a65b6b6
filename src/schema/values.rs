//! Conversions between SQL and the library's types: states, reasons, sequences and times.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::backend::Backend;
use diesel::deserialize::{self, FromSql, FromSqlRow};
use diesel::pg::data_types::PgTimestamp;
use diesel::pg::{Pg, PgValue};
use diesel::serialize::{self, Output, ToSql};
use diesel::sql_types::{BigInt, Nullable, Timestamptz};

use crate::message::Sequence;
use crate::status::{ReasonCode, Status};

/// 2000-01-01, from which PostgreSQL counts, in microseconds since 1970.
const BEGIN_MICROS: i64 = 946_684_800_000_000;

/// Types that are texts in the database. A text that this version does not know is an error.
macro_rules! texts {
    ($($word:ty)+) => {$(
        impl diesel::serialize::ToSql<diesel::sql_types::Text, diesel::pg::Pg> for $word {
            fn to_sql<'b>(
                &'b self,
                out: &mut diesel::serialize::Output<'b, '_, diesel::pg::Pg>,
            ) -> diesel::serialize::Result {
                std::io::Write::write_all(out, self.as_str().as_bytes())?;
                Ok(diesel::serialize::IsNull::No)
            }
        }

        impl diesel::deserialize::FromSql<diesel::sql_types::Text, diesel::pg::Pg> for $word {
            fn from_sql(bytes: diesel::pg::PgValue<'_>) -> diesel::deserialize::Result<Self> {
                Ok(std::str::from_utf8(bytes.as_bytes())?.parse()?)
            }
        }
    )+};
}
pub(crate) use texts;

texts!(Status ReasonCode);

impl ToSql<BigInt, Pg> for Sequence {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        ToSql::<BigInt, Pg>::to_sql(&self.0, out)
    }
}

/// For any backend: the query of `Outbox::insert` also runs on `MultiConnection`, which has a backend of its own.
impl<DB: Backend> FromSql<BigInt, DB> for Sequence
where
    i64: FromSql<BigInt, DB>,
{
    fn from_sql(bytes: DB::RawValue<'_>) -> deserialize::Result<Self> {
        i64::from_sql(bytes).map(Self)
    }
}

/// A time that loads as a [`SystemTime`]. Diesel itself loads `timestamptz` only as types of other crates.
#[derive(Debug, FromSqlRow)]
pub struct Time(SystemTime);

/// A [`Time`] that may be null.
#[derive(Debug, FromSqlRow)]
pub struct MaybeTime(Option<SystemTime>);

impl From<Time> for SystemTime {
    fn from(time: Time) -> Self {
        time.0
    }
}

impl From<MaybeTime> for Option<SystemTime> {
    fn from(time: MaybeTime) -> Self {
        time.0
    }
}

impl FromSql<Timestamptz, Pg> for Time {
    fn from_sql(bytes: PgValue<'_>) -> deserialize::Result<Self> {
        let micros = to_micros(FromSql::<Timestamptz, Pg>::from_sql(bytes)?);
        let since = Duration::from_micros(micros.unsigned_abs());
        let time = match micros < 0 {
            true => UNIX_EPOCH.checked_sub(since),
            false => UNIX_EPOCH.checked_add(since),
        };
        Ok(Self(time.ok_or("the time is out of range on this system")?))
    }
}

impl FromSql<Nullable<Timestamptz>, Pg> for MaybeTime {
    fn from_sql(bytes: PgValue<'_>) -> deserialize::Result<Self> {
        Time::from_sql(bytes).map(|time| Self(Some(time.0)))
    }

    fn from_nullable_sql(bytes: Option<PgValue<'_>>) -> deserialize::Result<Self> {
        bytes.map_or(Ok(Self(None)), Self::from_sql)
    }
}

/// The last second of the year 9999. Later times have no RFC 3339 form.
const LAST_SECOND: Duration = Duration::from_secs(253_402_300_799);

/// The nearest time from 1970 to the year 9999, which any text and header can hold. Plain SQL can store any time, and
/// infinity.
pub(crate) fn system_time(timestamp: PgTimestamp) -> SystemTime {
    let since_1970 = u64::try_from(to_micros(timestamp)).unwrap_or(0);
    UNIX_EPOCH + Duration::from_micros(since_1970).min(LAST_SECOND)
}

/// Converts PostgreSQL's time to microseconds since 1970. `-infinity` is the smallest value, `infinity` the largest.
pub(crate) fn to_micros(time: PgTimestamp) -> i64 {
    match time.0 {
        i64::MIN | i64::MAX => time.0,
        micros => micros.saturating_add(BEGIN_MICROS),
    }
}

/// Converts microseconds since 1970 to PostgreSQL's time. The smallest value is `-infinity`, the largest `infinity`.
pub(crate) fn from_micros(micros: i64) -> PgTimestamp {
    match micros {
        i64::MIN | i64::MAX => PgTimestamp(micros),
        micros => PgTimestamp(micros.saturating_sub(BEGIN_MICROS).max(EARLIEST)),
    }
}

/// The earliest time that PostgreSQL can store, in 4714 BC.
const EARLIEST: i64 = -211_813_488_000_000_000;

/// Microseconds since 1970.
pub(crate) fn as_micros(time: SystemTime) -> i64 {
    let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => micros(after),
        Err(before) => -micros(before.duration()),
    }
}
