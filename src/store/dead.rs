//! Dead letters: listing, grouping, reading, requeueing, discarding.

mod groups;

use diesel::pg::Pg;
use diesel::query_builder::{BoxedSqlQuery, SqlQuery};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Integer, Nullable, Text, Uuid as SqlUuid};
use diesel::{Connection, OptionalExtension, PgConnection, RunQueryDsl, sql_query};
use uuid::Uuid;

pub use self::groups::DeadGroup;
pub(crate) use self::groups::groups;

use super::SequenceRow;
use super::place::{Place, micros, rfc3339};
use super::waiting;
use crate::name::OutboxName;
use crate::status::ReasonCode;

/// Which dead letters. Everything given has to hold.
#[derive(Debug, Clone, Default)]
pub struct DeadFilter {
    /// These sequences only; empty: any.
    pub sequences: Vec<i64>,
    /// This topic only.
    pub topic: Option<String>,
    /// This reason only.
    pub reason: Option<ReasonCode>,
    /// Only those that name this destination; the parts of a fan-out do.
    pub destination: Option<String>,
    /// Only those that died before this place: what a page of the list goes on behind.
    pub before: Option<Place>,
}

/// A dead letter.
#[derive(Debug, Clone, diesel::QueryableByName)]
#[non_exhaustive]
pub struct DeadLetter {
    /// Its place in the outbox, by which it is requeued.
    #[diesel(sql_type = BigInt)]
    pub sequence: i64,
    /// Its id, as receivers see it.
    #[diesel(sql_type = SqlUuid)]
    pub message_id: Uuid,
    /// Its topic.
    #[diesel(sql_type = Text)]
    pub topic: String,
    /// Its named destination, or empty.
    #[diesel(sql_type = Text)]
    pub destination: String,
    /// Its idempotency key.
    #[diesel(sql_type = Text)]
    pub idempotency_key: String,
    /// Its ordering key.
    #[diesel(sql_type = Nullable<Text>)]
    pub ordering_key: Option<String>,
    /// Why it died: the name of a [`ReasonCode`].
    #[diesel(sql_type = Text)]
    pub reason: String,
    /// The last error.
    #[diesel(sql_type = Nullable<Text>)]
    pub last_error: Option<String>,
    /// The last answer's status.
    #[diesel(sql_type = Nullable<Integer>)]
    pub http_status: Option<i32>,
    /// The beginning of the last answer.
    #[diesel(sql_type = Nullable<Text>)]
    pub response: Option<String>,
    /// Attempts made.
    #[diesel(sql_type = Integer)]
    pub attempts: i32,
    /// When it was enqueued, RFC 3339.
    #[diesel(sql_type = Text)]
    pub created_at: String,
    /// When the event occurred, RFC 3339, where who enqueued it has said so.
    #[diesel(sql_type = Nullable<Text>)]
    pub occurred_at: Option<String>,
    /// When it died, RFC 3339.
    #[diesel(sql_type = Text)]
    pub died_at: String,
    /// The stored headers; only where one letter is read.
    #[diesel(sql_type = Nullable<Text>)]
    pub headers: Option<String>,
    /// The stored JSON; only where one letter is read.
    #[diesel(sql_type = Nullable<Text>)]
    pub payload: Option<String>,
    #[diesel(sql_type = BigInt)]
    died_at_micros: i64,
}

impl DeadLetter {
    /// Where it stands in the list: the next page is what is before it ([`DeadFilter::before`]).
    ///
    /// ```
    /// # use diesel::PgConnection;
    /// # use diesel_outbox::{DatabaseError, OutboxName};
    /// use diesel_outbox::admin::{self, DeadFilter, DeadLetter};
    ///
    /// fn next_page(
    ///     conn: &mut PgConnection,
    ///     outbox: &OutboxName,
    ///     page: &[DeadLetter],
    /// ) -> Result<Vec<DeadLetter>, DatabaseError> {
    ///     let before = page.last().map(DeadLetter::place);
    ///     admin::dead_letters(conn, outbox, &DeadFilter { before, ..DeadFilter::default() }, 20)
    /// }
    /// ```
    pub fn place(&self) -> Place {
        Place {
            micros: self.died_at_micros,
            sequence: self.sequence,
        }
    }
}

/// The values of a [`DeadFilter`] as parameters from `$1` on.
type Filtered<'a> = BoxedSqlQuery<'a, Pg, SqlQuery>;

/// What a [`DeadFilter`] asks of a dead letter `d`, by the parameters that [`filtered`] binds.
fn condition() -> String {
    format!(
        "(cardinality($1::bigint[]) = 0 OR d.sequence = ANY($1::bigint[]))
         AND ($2::text IS NULL OR d.topic = $2) AND ($3::text IS NULL OR d.reason = $3)
         AND ($4::text IS NULL OR d.destination = $4)
         AND ($5::bigint IS NULL OR ({}, d.sequence) < ($5, $6))",
        micros("d.died_at")
    )
}

/// A statement with the values of a filter.
fn filtered(sql: String, filter: &DeadFilter) -> Filtered<'_> {
    sql_query(sql)
        .into_boxed()
        .bind::<Array<BigInt>, _>(&filter.sequences)
        .bind::<Nullable<Text>, _>(&filter.topic)
        .bind::<Nullable<Text>, _>(filter.reason.map(ReasonCode::as_str))
        .bind::<Nullable<Text>, _>(&filter.destination)
        .bind::<Nullable<BigInt>, _>(filter.before.map(|place| place.micros))
        .bind::<Nullable<BigInt>, _>(filter.before.map(|place| place.sequence))
}

fn columns(headers: &str, payload: &str) -> String {
    format!(
        "d.sequence, d.message_id, d.topic, d.destination, d.idempotency_key, d.ordering_key,
         d.reason, d.last_error, d.http_status, d.response, d.attempts,
         {} AS created_at, {} AS occurred_at, {} AS died_at, {} AS died_at_micros,
         {headers} AS headers, {payload} AS payload",
        rfc3339("d.created_at"),
        rfc3339("d.occurred_at"),
        rfc3339("d.died_at"),
        micros("d.died_at"),
    )
}

/// The latest dead letters first, without payloads.
pub(crate) fn list(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &DeadFilter,
    limit: i64,
) -> QueryResult<Vec<DeadLetter>> {
    // Chosen first: what is shown is made for these only.
    let sql = format!(
        "SELECT {} FROM {dead} d
          WHERE d.sequence = ANY(ARRAY(SELECT d.sequence FROM {dead} d WHERE {}
                                        ORDER BY d.died_at DESC, d.sequence DESC LIMIT $7))
          ORDER BY d.died_at DESC, d.sequence DESC",
        columns("NULL::text", "NULL::text"),
        condition(),
        dead = name.dead(),
    );
    filtered(sql, filter).bind::<BigInt, _>(limit).load(conn)
}

/// The sequences of the dead letters that match, the oldest first.
pub(crate) fn matching(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &DeadFilter,
) -> QueryResult<Vec<i64>> {
    let sql = format!(
        "SELECT d.sequence FROM {} d WHERE {} ORDER BY d.sequence",
        name.dead(),
        condition(),
    );
    filtered(sql, filter)
        .load::<SequenceRow>(conn)
        .map(|rows| rows.into_iter().map(|row| row.sequence).collect())
}

/// One dead letter, whole.
pub(crate) fn find(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequence: i64,
) -> QueryResult<Option<DeadLetter>> {
    sql_query(format!(
        "SELECT {} FROM {} d WHERE d.sequence = $1",
        columns("d.headers::text", "d.payload::text"),
        name.dead()
    ))
    .bind::<BigInt, _>(sequence)
    .get_result(conn)
    .optional()
}

/// The dead letters of a message: one for each destination that did not get it.
pub(crate) fn find_by_message_id(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: Uuid,
) -> QueryResult<Vec<DeadLetter>> {
    sql_query(format!(
        "SELECT {} FROM {} d WHERE d.message_id = $1 ORDER BY d.sequence",
        columns("d.headers::text", "d.payload::text"),
        name.dead()
    ))
    .bind::<SqlUuid, _>(message_id)
    .load(conn)
}

/// Puts these dead letters back into the outbox, due at once, with no attempts and, where their
/// time was over, without an end. One whose key is in the outbox again stays where it is.
/// Returns how many.
pub(crate) fn requeue(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
) -> QueryResult<usize> {
    sql_query(format!(
        "WITH chosen AS MATERIALIZED (
            SELECT d.sequence FROM {dead} d
             WHERE d.sequence = ANY($1)
               AND NOT EXISTS (SELECT FROM {outbox} o WHERE o.idempotency_key = d.idempotency_key
                                AND o.destination = d.destination)
               AND NOT EXISTS (SELECT FROM {dead} e WHERE e.idempotency_key = d.idempotency_key
                                AND e.destination = d.destination
                                AND e.sequence = ANY($1) AND e.sequence < d.sequence)
             ORDER BY d.sequence FOR UPDATE
        ), gone AS (
            DELETE FROM {dead} WHERE sequence = ANY(ARRAY(SELECT sequence FROM chosen)) RETURNING *
        ), forgotten AS (
            DELETE FROM {ledger} l USING gone g
             WHERE l.idempotency_key = g.idempotency_key AND l.destination = g.destination
               AND l.message_id = g.message_id AND l.status = 'dead'
        )
        INSERT INTO {outbox} (sequence, message_id, topic, destination, payload, headers,
            ordering_key, idempotency_key, digest, tenant_id, expires_at, created_at, occurred_at,
            split_from)
        OVERRIDING SYSTEM VALUE
        SELECT sequence, message_id, topic, destination, payload, headers, ordering_key,
               idempotency_key, digest, tenant_id,
               CASE WHEN expires_at > clock_timestamp() THEN expires_at END, created_at,
               occurred_at, split_from
          FROM gone",
        dead = name.dead(),
        ledger = name.ledger(),
        outbox = name.outbox(),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .execute(conn)
}

/// Removes these dead letters for good, and lets the keys go on that they have held. The ledger keeps that
/// they died. Returns how many.
pub(crate) fn discard(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
) -> QueryResult<usize> {
    conn.transaction(|conn| {
        let gone: Vec<GoneRow> = sql_query(format!(
            "DELETE FROM {} WHERE sequence = ANY($1)
             RETURNING CASE WHEN blocks_key THEN ordering_key END AS held",
            name.dead()
        ))
        .bind::<Array<BigInt>, _>(sequences)
        .load(conn)?;
        let number = gone.len();
        waiting::free(conn, name, gone.into_iter().filter_map(|row| row.held))?;
        Ok(number)
    })
}

#[derive(diesel::QueryableByName)]
struct GoneRow {
    /// The ordering key that it has held.
    #[diesel(sql_type = Nullable<Text>)]
    held: Option<String>,
}
