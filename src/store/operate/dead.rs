//! Dead letters: list, group, read, requeue, discard.

mod groups;

use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, Connection, ExpressionMethods, IntoSql, NullableExpressionMethods,
    QueryDsl, Queryable, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Text};
use diesel::{PgConnection, delete};
use uuid::Uuid;

pub use self::groups::DeadGroup;
pub(crate) use self::groups::groups;

use super::history::{self, Touched};
use super::messages::Content;
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::status::ReasonCode;
use crate::store::open_part;
use crate::store::place::{MaybeRfc3339, Place, Rfc3339, to_micros};
use crate::store::sql::{MaybeJson, On, TimeAndSequence, all_of, given, shown_key};
use crate::store::statement::{planned_anew, statement_anew};
use crate::store::table::dead;
use crate::store::write::waiting;

/// Selects dead letters. All given conditions must hold.
#[derive(Debug, Clone, Default)]
pub struct DeadFilter {
    /// Only these sequences; empty: any.
    pub sequences: Vec<i64>,
    /// Only this topic.
    pub topic: Option<String>,
    /// Only this reason.
    pub reason: Option<ReasonCode>,
    /// Only dead letters for this destination.
    pub destination: Option<String>,
    /// Only this tenant.
    pub tenant_id: Option<Uuid>,
    /// Only this registration of the destination, or none.
    pub registration: Option<Uuid>,
    /// Only dead letters from before this place: the next page of the list.
    pub before: Option<Place>,
}

/// A dead letter.
#[derive(Debug, Clone, Queryable)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The sequence of the message, by which the letter is requeued or discarded.
    pub sequence: Sequence,
    /// The message id, as receivers see it.
    pub message_id: Uuid,
    /// The topic of the message.
    pub topic: String,
    /// The destination of the message; empty if no destination serves its topic.
    pub destination: String,
    /// The idempotency key; the message id if the caller gave none.
    pub idempotency_key: String,
    /// The ordering key.
    pub ordering_key: Option<String>,
    /// The tenant of the message.
    pub tenant_id: Option<Uuid>,
    /// Why the message was dead-lettered: the name of a [`ReasonCode`].
    pub reason: String,
    /// The last error.
    pub last_error: Option<String>,
    /// The HTTP status of the last response.
    pub http_status: Option<i32>,
    /// The beginning of the last response.
    pub response: Option<String>,
    /// The number of attempts.
    pub attempts: i32,
    /// When the message was enqueued, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub created_at: String,
    /// When the event occurred, RFC 3339, if the application gave a time.
    #[diesel(deserialize_as = MaybeRfc3339)]
    pub occurred_at: Option<String>,
    /// When the message was dead-lettered, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub died_at: String,
    /// The stored headers; only if letters are read by sequence or message id.
    #[diesel(deserialize_as = MaybeJson)]
    pub headers: Option<String>,
    /// The stored JSON; only if letters are read by sequence or message id.
    #[diesel(deserialize_as = MaybeJson)]
    pub payload: Option<String>,
    died: PgTimestamp,
}

impl DeadLetter {
    /// The place of the letter in the list. The next page is before the last place ([`DeadFilter::before`]).
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
            micros: to_micros(self.died),
            sequence: self.sequence.0,
        }
    }
}

type Condition<'a> = On<'a, dead::table>;

/// Whether the filter selects a dead letter.
fn is_meant(filter: &DeadFilter) -> Condition<'_> {
    let sequences = Some(&filter.sequences).filter(|sequences| !sequences.is_empty());
    let when = (dead::died_at, dead::sequence).into_sql::<TimeAndSequence>();
    all_of([
        given(sequences, |these| dead::sequence.eq_any(these)),
        given(filter.topic.as_ref(), |topic| dead::topic.eq(topic)),
        given(filter.reason, |reason| dead::reason.eq(reason.as_str())),
        given(filter.destination.as_ref(), |name| {
            dead::destination.eq(name)
        }),
        given(filter.tenant_id, |id| {
            dead::tenant_id.assume_not_null().eq(id)
        }),
        given(filter.registration, |id| {
            let is_it = dead::registration.assume_not_null().eq(id);
            dead::registration.is_null().or(is_it)
        }),
        given(filter.before, |place| when.lt(place.of_row())),
    ])
}

/// The selected dead letters, latest first.
fn latest(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: Condition<'_>,
    content: Content,
    limit: i64,
) -> QueryResult<Vec<DeadLetter>> {
    let letters = dead::table(name.dead())
        .filter(which)
        .order((dead::died_at.desc(), dead::sequence.desc()))
        .limit(limit)
        .select((
            dead::sequence,
            dead::message_id,
            dead::topic,
            dead::destination,
            shown_key!(dead),
            dead::ordering_key,
            dead::tenant_id,
            dead::reason,
            dead::last_error,
            dead::http_status,
            dead::response,
            dead::attempts,
            dead::created_at,
            dead::occurred_at,
            dead::died_at,
            content.of(Box::new(dead::headers)),
            content.of(Box::new(dead::payload.nullable())),
            dead::died_at,
        ));
    planned_anew(letters).load(conn)
}

/// Dead letters without payloads, latest first.
pub(crate) fn list(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &DeadFilter,
    limit: i64,
) -> QueryResult<Vec<DeadLetter>> {
    latest(conn, name, is_meant(filter), Content::Without, limit)
}

/// The sequences of the matching dead letters, oldest first.
pub(crate) fn matching(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &DeadFilter,
) -> QueryResult<Vec<i64>> {
    let sequences = dead::table(name.dead())
        .filter(is_meant(filter))
        .order(dead::sequence)
        .select(dead::sequence);
    planned_anew(sequences).load(conn)
}

/// One dead letter, with payload and headers.
pub(crate) fn find(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequence: i64,
) -> QueryResult<Option<DeadLetter>> {
    let is_one = Box::new(dead::sequence.eq(sequence));
    latest(conn, name, is_one, Content::Whole, 1).map(|mut found| found.pop())
}

/// The dead letters of a message: one for each destination that did not get the message.
pub(crate) fn find_by_message_id(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: Uuid,
) -> QueryResult<Vec<DeadLetter>> {
    let is_of_message = Box::new(dead::message_id.eq(message_id));
    let mut letters = latest(conn, name, is_of_message, Content::Whole, i64::MAX)?;
    letters.sort_unstable_by_key(|letter| letter.sequence);
    Ok(letters)
}

/// The dead letters of a message for this destination. If the name is registered, only those of its registration.
pub(super) fn of_delivery(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: Uuid,
    destination: &str,
    registration: Option<Uuid>,
) -> QueryResult<Vec<i64>> {
    let filter = DeadFilter {
        destination: Some(destination.to_owned()),
        registration,
        ..DeadFilter::default()
    };
    let sequences = dead::table(name.dead())
        .filter(dead::message_id.eq(message_id))
        .filter(is_meant(&filter))
        .order(dead::sequence)
        .select(dead::sequence);
    planned_anew(sequences).load(conn)
}

/// Puts dead letters back into the outbox: due at once, with no attempts, and without an expiry that has passed.
/// A letter stays dead if its idempotency key is in the outbox again. `operator`: who requeues, and why. Returns
/// the number of requeued letters.
pub(crate) fn requeue(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
    operator: &str,
) -> QueryResult<usize> {
    requeue_to(conn, name, sequences, "", operator)
}

/// The same. `asked`: the destination of letters that name none; empty: the current routes decide. Letters of a removed
/// registration are addressed anew: to the registration that has the name now.
///
/// Text: Diesel has no WITH, so no DELETE can feed an INSERT.
pub(super) fn requeue_to(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
    asked: &str,
    operator: &str,
) -> QueryResult<usize> {
    statement_anew(format!(
        "WITH chosen AS MATERIALIZED (
            SELECT d.sequence FROM {dead} d
             WHERE d.sequence = ANY($1)
               AND NOT EXISTS (SELECT FROM {outbox} o WHERE o.idempotency_key = d.idempotency_key
                                AND o.destination = coalesce(nullif(d.named_destination, ''), $3))
               AND NOT EXISTS (SELECT FROM {dead} e WHERE e.idempotency_key = d.idempotency_key
                                AND e.named_destination = d.named_destination
                                AND e.sequence = ANY($1) AND e.sequence < d.sequence)
             ORDER BY d.sequence FOR UPDATE
        ), gone AS (
            DELETE FROM {dead} WHERE sequence = ANY(ARRAY(SELECT sequence FROM chosen)) RETURNING *
        ), noted AS (
            INSERT INTO {attempt} (part, sequence, message_id, topic, destination, tenant_id, event, operator)
            SELECT {part}, sequence, message_id, topic, destination, tenant_id, 'requeued', $2 FROM gone
        )
        INSERT INTO {outbox} (sequence, message_id, topic, destination, payload, headers,
            ordering_key, idempotency_key, digest, tenant_id, expires_at, created_at, occurred_at,
            split_from, split_to, registration)
        OVERRIDING SYSTEM VALUE
        SELECT sequence, message_id, topic, coalesce(nullif(named_destination, ''), $3), payload, headers,
               ordering_key, idempotency_key, digest, tenant_id,
               CASE WHEN expires_at > clock_timestamp() THEN expires_at END, created_at,
               occurred_at, split_from, split_to,
               CASE WHEN reason <> 'DESTINATION_REMOVED' AND destination = coalesce(nullif(named_destination, ''), $3)
                    THEN registration END
          FROM gone",
        dead = name.dead(),
        outbox = name.outbox(),
        attempt = name.attempt(),
        part = open_part(name),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Text, _>(operator)
    .bind::<Text, _>(asked)
    .execute(conn)
}

/// Deletes dead letters for good, and unblocks the ordering keys that they held. The ledger keeps their entries.
/// Returns the number of deleted letters.
pub(crate) fn discard(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
    operator: &str,
) -> QueryResult<usize> {
    conn.transaction(|conn| {
        let gone: Vec<(Touched, bool, Option<String>)> = delete(dead::table(name.dead()))
            .filter(dead::sequence.eq_any(sequences))
            .returning((
                (
                    dead::sequence,
                    dead::message_id,
                    dead::topic,
                    dead::destination,
                    dead::tenant_id,
                ),
                dead::blocks_key,
                dead::ordering_key,
            ))
            .load(conn)?;
        let (mut touched, mut held) = (Vec::new(), Vec::new());
        for (one, blocks_key, key) in gone {
            touched.push(one);
            held.extend(key.filter(|_| blocks_key));
        }
        history::note_discarded(conn, name, &touched, operator)?;
        waiting::free(conn, name, held.into_iter())?;
        Ok(touched.len())
    })
}
