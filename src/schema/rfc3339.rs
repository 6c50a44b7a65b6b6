//! Times as text.

use diesel::deserialize::{self, FromSql, FromSqlRow};
use diesel::pg::data_types::PgTimestamp;
use diesel::pg::{Pg, PgValue};
use diesel::sql_types::{Nullable, Timestamptz};

/// A time as text, formatted by [`rfc3339`].
#[derive(Debug, FromSqlRow)]
pub struct Rfc3339(String);

/// A nullable time as text, formatted by [`rfc3339`].
#[derive(Debug, FromSqlRow)]
pub struct MaybeRfc3339(Option<String>);

impl From<Rfc3339> for String {
    fn from(time: Rfc3339) -> Self {
        time.0
    }
}

impl From<MaybeRfc3339> for Option<String> {
    fn from(time: MaybeRfc3339) -> Self {
        time.0
    }
}

impl FromSql<Timestamptz, Pg> for Rfc3339 {
    fn from_sql(bytes: PgValue<'_>) -> deserialize::Result<Self> {
        FromSql::<Timestamptz, Pg>::from_sql(bytes).map(|time| Self(rfc3339(time)))
    }
}

impl FromSql<Nullable<Timestamptz>, Pg> for MaybeRfc3339 {
    fn from_sql(bytes: PgValue<'_>) -> deserialize::Result<Self> {
        Rfc3339::from_sql(bytes).map(|time| Self(Some(time.0)))
    }

    fn from_nullable_sql(bytes: Option<PgValue<'_>>) -> deserialize::Result<Self> {
        bytes.map_or(Ok(Self(None)), Self::from_sql)
    }
}

const DAY_MICROS: i64 = 86_400 * 1_000_000;

/// Formats a time as RFC 3339 with milliseconds; infinity as `infinity` or `-infinity`.
pub(crate) fn rfc3339(PgTimestamp(micros): PgTimestamp) -> String {
    match micros {
        i64::MAX => return "infinity".to_owned(),
        i64::MIN => return "-infinity".to_owned(),
        _ => {}
    }
    let (year, month, day) = date(micros.div_euclid(DAY_MICROS));
    // PostgreSQL writes years BC without marking them as such.
    let year = if year > 0 { year } else { 1 - year };
    let millis = micros.rem_euclid(DAY_MICROS) / 1000;
    let (seconds, millis) = (millis / 1000, millis % 1000);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// The Gregorian date `days` days after 2000-01-01. Years start on 1 March here, so that a leap day comes last.
fn date(days: i64) -> (i64, i64, i64) {
    /// From 0000-03-01 to 2000-01-01.
    const BEFORE: i64 = 730_425;
    const IN_400_YEARS: i64 = 146_097;
    let days = days + BEFORE;
    let (period, day) = (days.div_euclid(IN_400_YEARS), days.rem_euclid(IN_400_YEARS));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    (period * 400 + year + next_year, month, day)
}

#[cfg(test)]
mod tests {
    use diesel::sql_types::{BigInt, Text};
    use diesel::{PgConnection, RunQueryDsl, sql_query};

    use super::*;
    use crate::schema::values::{from_micros, to_micros};
    use crate::sql::tests::Outbox;

    #[derive(Debug, diesel::QueryableByName)]
    struct Row {
        #[diesel(sql_type = Timestamptz)]
        time: PgTimestamp,
        #[diesel(sql_type = Text)]
        shown: String,
        #[diesel(sql_type = BigInt)]
        micros: i64,
    }

    #[test]
    fn times_are_the_same_by_sql_and_by_us() {
        let conn: &mut PgConnection = &mut Outbox::new().connect();
        let rows: Vec<Row> = sql_query(
            "SELECT time,
                    coalesce(to_char(time AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), time::text)
                        AS shown,
                    CASE WHEN isfinite(time)
                         -- Split: PostgreSQL 13 returns a double, which loses microseconds that far from 1970.
                         THEN extract(epoch FROM date_trunc('second', time))::bigint * 1000000
                              + extract(microseconds FROM time)::bigint % 1000000
                         WHEN time > now() THEN 9223372036854775807 ELSE -9223372036854775808 END AS micros
               FROM (SELECT timestamptz '0044-03-15 BC' + n * interval '97 days 13:14:15.678901'
                       FROM generate_series(0, 9000) n
                     UNION ALL SELECT unnest('{infinity,-infinity,epoch,2000-02-29,1900-02-28 23:59:59.9999Z,
                         290000-12-31,4713-01-01 BC,0001-12-31 BC,0001-01-01}'::timestamptz[])) t (time)",
        )
        .load(conn)
        .expect("times");
        assert!(rows.len() > 9000);
        for row in rows {
            assert_eq!(rfc3339(row.time), row.shown);
            assert_eq!(to_micros(row.time), row.micros, "{}", row.shown);
            assert_eq!(from_micros(row.micros), row.time, "{}", row.shown);
        }
    }
}
