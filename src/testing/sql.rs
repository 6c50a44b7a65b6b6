//! SQL: statements for tests, which read the live messages, and move times.

use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{QueryDsl, RunQueryDsl, SelectableHelper};
use diesel::result::QueryResult;
use diesel::sql_types::BigInt;

use crate::message::Message;
use crate::name::OutboxName;
use crate::sql::functions::clock_timestamp;
use crate::sql::live::LiveRow;
use crate::sql::millis;
use crate::sql::statement::unprepared_statement;
use crate::sql::table::outbox;

/// The live messages, ordered by sequence.
pub(crate) fn live(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Message>> {
    let before = Instant::now();
    let rows: Vec<(LiveRow, PgTimestamp)> = outbox::table(name.outbox())
        .order(outbox::sequence)
        .select((LiveRow::as_select(), clock_timestamp()))
        .load(conn)?;
    let message = |(row, now): (LiveRow, PgTimestamp)| row.into_message(now, before);
    Ok(rows.into_iter().map(message).collect())
}

/// Ten thousand years. Every time that a message can be given is nearer.
const FURTHEST: Duration = Duration::from_secs(10_000 * 365 * 24 * 3600);

/// Moves all times of the messages back by `duration`, so that future times come nearer. No time moves before 1970:
/// every time is in the past there.
///
/// Text: Diesel cannot subtract times.
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
    unprepared_statement(format!(
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
