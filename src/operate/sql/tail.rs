//! The ledger as it grows, oldest first.

use std::time::{Duration, SystemTime};

use diesel::prelude::{
    ExpressionMethods, IntoSql, NullableExpressionMethods, OptionalExtension, QueryDsl, Queryable,
    RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, select};

use super::messages::{self, Content, MessageRecord};
use crate::name::OutboxName;
use crate::operate::sql::place::Place;
use crate::schema::values::{MaybeTime, Time, from_micros, to_micros};
use crate::sql::functions::{JsonText, MaybeJson, TimeAndSequence, clock_timestamp, shown_key};
use crate::sql::looking::looking;
use crate::sql::statement::unprepared;
use crate::sql::table::ledger;

/// The rows of the last minute are in no index: under load, reading them takes seconds.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The place before everything that is settled from now on.
pub(crate) fn end(conn: &mut PgConnection) -> QueryResult<Place> {
    select(clock_timestamp())
        .get_result(conn)
        .map(|now| Place::before(to_micros(now)))
}

/// The entries after the first place and before the second, oldest first, at most `limit`.
pub(crate) fn between(
    conn: &mut PgConnection,
    name: &OutboxName,
    (from, to): (Place, Place),
    limit: i64,
) -> QueryResult<Vec<MessageRecord>> {
    let when = || (ledger::settled_at, ledger::sequence).into_sql::<TimeAndSequence>();
    // The index knows only times.
    let since = ledger::settled_at.ge(from_micros(from.micros));
    let rows = messages::settled(name, Box::new(since), Content::Without)
        .filter(ledger::settled_at.le(from_micros(to.micros)))
        .filter(when().gt(from.of_row()))
        .filter(when().lt(to.of_row()))
        .order((ledger::settled_at, ledger::sequence))
        .limit(limit);
    looking(conn, Some(TIMEOUT), |conn| unprepared(rows).load(conn))
}

/// What the ledger keeps of a message, if it keeps payloads.
#[derive(Queryable)]
pub(crate) struct KeptPayload {
    pub(crate) idempotency_key: String,
    #[diesel(deserialize_as = JsonText)]
    pub(crate) payload: String,
    #[diesel(deserialize_as = MaybeJson)]
    pub(crate) headers: Option<String>,
    #[diesel(deserialize_as = Time)]
    pub(crate) created_at: SystemTime,
    #[diesel(deserialize_as = MaybeTime)]
    pub(crate) occurred_at: Option<SystemTime>,
}

/// What the ledger keeps of the message of this entry.
pub(crate) fn kept(
    conn: &mut PgConnection,
    name: &OutboxName,
    entry: &MessageRecord,
) -> QueryResult<Option<KeptPayload>> {
    let row = ledger::table(name.ledger())
        .filter(ledger::settled_at.eq(from_micros(entry.place().micros)))
        .filter(ledger::sequence.eq(entry.sequence.0))
        .filter(ledger::message_id.eq(entry.message_id))
        .filter(ledger::payload.is_not_null())
        .limit(1)
        .select((
            shown_key!(ledger),
            ledger::payload.assume_not_null(),
            ledger::headers,
            ledger::created_at,
            ledger::occurred_at,
        ));
    looking(conn, Some(TIMEOUT), |conn| {
        unprepared(row).get_result(conn).optional()
    })
}
