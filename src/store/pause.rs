//! Which destinations and topics are paused: shared by all relays of an outbox.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Double, Integer, Nullable, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};

use super::millis;
use super::statement::statement;
use crate::name::OutboxName;

/// The reason of a row that a circuit breaker wrote.
pub(crate) const BREAKER_OPEN: &str = "BREAKER_OPEN";

/// What can be paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pausable {
    /// A destination, by its name; `default` is the one of `OUTBOX_URL`.
    Destination,
    /// A topic, as it is written in messages.
    Topic,
}

impl Pausable {
    /// The name in the table and in output.
    ///
    /// ```
    /// use diesel_outbox::admin::Pausable;
    ///
    /// assert_eq!(Pausable::Topic.as_str(), "topic");
    /// ```
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Destination => "destination",
            Self::Topic => "topic",
        }
    }
}

/// A row of `outbox_pause`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Paused {
    /// `destination` or `topic`.
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) reason: String,
    /// How often in a row a breaker has opened.
    pub(crate) openings: u32,
    /// Zero: its time is over. `None`: until it is resumed.
    pub(crate) left: Option<Duration>,
}

#[derive(diesel::QueryableByName)]
struct PausedRow {
    #[diesel(sql_type = Text)]
    kind: String,
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    reason: String,
    #[diesel(sql_type = Integer)]
    openings: i32,
    #[diesel(sql_type = Nullable<Double>)]
    seconds_left: Option<f64>,
}

/// All rows, also those whose time is over.
pub(crate) fn all(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Paused>> {
    let rows: Vec<PausedRow> = statement(format!(
        "SELECT kind, name, reason, openings,
                CASE WHEN isfinite(paused_until) THEN
                     greatest(extract(epoch FROM paused_until - clock_timestamp()), 0)::float8
                END AS seconds_left
           FROM {} ORDER BY kind, name",
        name.pause()
    ))
    .load(conn)?;
    Ok(rows
        .into_iter()
        .map(|row| Paused {
            kind: row.kind,
            name: row.name,
            reason: row.reason,
            openings: u32::try_from(row.openings).unwrap_or(0),
            left: row
                .seconds_left
                .map(|left| Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX)),
        })
        .collect())
}

/// Pauses a destination or a topic for a time, or until it is resumed. A pause that is there
/// already and longer stays.
pub(crate) fn pause(
    conn: &mut PgConnection,
    name: &OutboxName,
    kind: Pausable,
    which: &str,
    reason: &str,
    duration: Option<Duration>,
    openings: u32,
) -> QueryResult<()> {
    sql_query(format!(
        "INSERT INTO {pause} AS p (kind, name, reason, openings, paused_until)
         VALUES ($1, $2, $3, $4, clock_timestamp() + $5 * interval '1 millisecond')
         ON CONFLICT (kind, name) DO UPDATE
            SET reason = excluded.reason, openings = excluded.openings,
                paused_at = excluded.paused_at, paused_until = excluded.paused_until
          WHERE p.paused_until IS NOT NULL
            AND (p.reason = '{BREAKER_OPEN}' OR excluded.paused_until IS NULL
                 OR excluded.paused_until > p.paused_until)",
        pause = name.pause()
    ))
    .bind::<Text, _>(kind.as_str())
    .bind::<Text, _>(which)
    .bind::<Text, _>(reason)
    .bind::<Integer, _>(i32::try_from(openings).unwrap_or(i32::MAX))
    .bind::<Nullable<BigInt>, _>(duration.map(millis))
    .execute(conn)
    .map(|_| ())
}

/// Takes the right to probe a destination whose breaker has been open for long enough. Others get
/// it again after `hold`, should this relay die. `false`: another one has it, or there is no need.
pub(crate) fn take_probe(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
    hold: Duration,
) -> QueryResult<bool> {
    sql_query(format!(
        "UPDATE {} SET paused_until = clock_timestamp() + $2 * interval '1 millisecond'
          WHERE kind = 'destination' AND name = $1 AND reason = '{BREAKER_OPEN}'
            AND paused_until <= clock_timestamp()",
        name.pause()
    ))
    .bind::<Text, _>(destination)
    .bind::<BigInt, _>(millis(hold))
    .execute(conn)
    .map(|count| count > 0)
}

/// Gives the right to probe back: whoever comes next may.
pub(crate) fn give_back_probe(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
) -> QueryResult<()> {
    sql_query(format!(
        "UPDATE {} SET paused_until = clock_timestamp()
          WHERE kind = 'destination' AND name = $1 AND reason = '{BREAKER_OPEN}'",
        name.pause()
    ))
    .bind::<Text, _>(destination)
    .execute(conn)
    .map(|_| ())
}

/// A probe went well: the breaker is closed for all relays. Other pauses stay.
pub(crate) fn close_breaker(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
) -> QueryResult<()> {
    sql_query(format!(
        "DELETE FROM {} WHERE kind = 'destination' AND name = $1 AND reason = '{BREAKER_OPEN}'",
        name.pause()
    ))
    .bind::<Text, _>(destination)
    .execute(conn)
    .map(|_| ())
}

/// Ends a pause, whatever its reason. `false`: there was none.
pub(crate) fn resume(
    conn: &mut PgConnection,
    name: &OutboxName,
    kind: Pausable,
    which: &str,
) -> QueryResult<bool> {
    sql_query(format!(
        "DELETE FROM {} WHERE kind = $1 AND name = $2",
        name.pause()
    ))
    .bind::<Text, _>(kind.as_str())
    .bind::<Text, _>(which)
    .execute(conn)
    .map(|count| count > 0)
}

/// Removes rows whose time was over long ago.
pub(crate) fn forget(
    conn: &mut PgConnection,
    name: &OutboxName,
    age: Duration,
) -> QueryResult<usize> {
    sql_query(format!(
        "DELETE FROM {} WHERE paused_until < clock_timestamp() - $1 * interval '1 millisecond'",
        name.pause()
    ))
    .bind::<BigInt, _>(millis(age))
    .execute(conn)
}
