//! What tests look at, and what they move.

use std::time::{Duration, Instant};

use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{QueryDsl, RunQueryDsl, SelectableHelper};
use diesel::result::QueryResult;
use diesel::sql_types::BigInt;
use diesel::{PgConnection, select};

use super::live::Row;
use super::millis;
use super::sql::{clock_timestamp, current_setting, set_config};
use super::statement::statement_anew;
use super::table::outbox;
use crate::message::Message;
use crate::name::OutboxName;

/// The live messages, in their order.
pub(crate) fn live(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Message>> {
    let before = Instant::now();
    let rows: Vec<(Row, PgTimestamp)> = outbox::table(name.outbox())
        .order(outbox::sequence)
        .select((Row::as_select(), clock_timestamp()))
        .load(conn)?;
    let message = |(row, now): (Row, PgTimestamp)| row.into_message(now, before);
    Ok(rows.into_iter().map(message).collect())
}

/// Ten thousand years: all times that a message can be given are nearer.
const FURTHEST: Duration = Duration::from_secs(10_000 * 365 * 24 * 3600);

/// Brings all that is to come nearer. No time goes further back than to 1970, where all of them are over.
///
/// Text: Diesel subtracts no times.
pub(crate) fn advance(
    conn: &mut PgConnection,
    name: &OutboxName,
    duration: Duration,
) -> QueryResult<()> {
    let moved = |column: &str| {
        format!(
            "{column} = CASE WHEN isfinite({column}) AND {column} > 'epoch'
                THEN {column} - least($1 * interval '1 millisecond', {column} - 'epoch'::timestamptz)
                ELSE {column} END"
        )
    };
    statement_anew(format!(
        "UPDATE {outbox} SET {available_at}, {expires_at}, {created_at}, {occurred_at}",
        outbox = name.outbox(),
        available_at = moved("available_at"),
        expires_at = moved("expires_at"),
        created_at = moved("created_at"),
        occurred_at = moved("occurred_at"),
    ))
    .bind::<BigInt, _>(millis(duration.min(FURTHEST)))
    .execute(conn)
    .map(drop)
}

/// Works with compilation (JIT) off, as on the relay's own connections: estimates of a test's uncommitted
/// rows are wrong, and each claim would be compiled.
pub(crate) fn without_jit<T>(
    conn: &mut PgConnection,
    work: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<T> {
    let value: String = select(current_setting("jit")).get_result(conn)?;
    let set = |conn: &mut PgConnection, value: &str| {
        select(set_config("jit", value, false)).execute(conn)
    };
    set(conn, "off")?;
    let worked = work(conn);
    // Where a transaction has failed, its end does the same.
    let restored = set(conn, &value);
    let value = worked?;
    restored?;
    Ok(value)
}
