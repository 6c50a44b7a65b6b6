//! What tests look at, and what they move.

use std::time::{Duration, Instant};

use diesel::result::QueryResult;
use diesel::sql_types::BigInt;
use diesel::{PgConnection, RunQueryDsl, sql_query};

use super::claim::{ClaimedRow, claimed};
use super::millis;
use crate::message::Message;
use crate::name::OutboxName;

/// The live messages, in their order.
pub(crate) fn live(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Message>> {
    let before = Instant::now();
    let rows: Vec<ClaimedRow> = sql_query(format!(
        "SELECT sequence, message_id, topic, destination, payload::text AS payload,
                headers::text AS headers, ordering_key, idempotency_key, tenant_id, created_at,
                available_at, clock_timestamp() AS locked_at, attempts, 0 AS taken_over,
                NULL::float8 AS expires_in, NULL::int AS known
           FROM {} ORDER BY sequence",
        name.outbox()
    ))
    .load(conn)?;
    Ok(claimed(rows, before)
        .into_iter()
        .map(|claimed| claimed.message)
        .collect())
}

/// Brings all that is to come nearer.
pub(crate) fn advance(
    conn: &mut PgConnection,
    name: &OutboxName,
    duration: Duration,
) -> QueryResult<()> {
    sql_query(format!(
        "UPDATE {} SET available_at = available_at - $1 * interval '1 millisecond',
                       expires_at = expires_at - $1 * interval '1 millisecond',
                       created_at = created_at - $1 * interval '1 millisecond'",
        name.outbox()
    ))
    .bind::<BigInt, _>(millis(duration))
    .execute(conn)
    .map(drop)
}
