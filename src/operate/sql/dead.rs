//! Dead letters: list, group, read, requeue, discard.

pub(crate) mod groups;

use diesel::dsl::sql;
use diesel::prelude::{
    Connection, ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::result::{Error, QueryResult};
use diesel::sql_types::{Array, BigInt, Bool, Text, Uuid as SqlUuid};
use diesel::{PgConnection, delete};
use uuid::Uuid;

pub use self::groups::DeadGroup;
pub(crate) use self::groups::groups;

use super::history::{self, Event, Touched};
use super::messages::{self, Content, LetterId, MessageRecord};
use super::selection::selected;
use crate::endpoints::sql::recipient::Recipient;
use crate::endpoints::sql::removed::removed_again;
use crate::name::OutboxName;
use crate::operate::sql::selection::Selection;
use crate::outbox::sql::waiting;
use crate::schema::values::{as_micros, from_micros};
use crate::sql::functions::{On, TimeAndSequence, all_of, coalesce, given};
use crate::sql::open_part;
use crate::sql::statement::{unprepared, unprepared_statement};
use crate::sql::table::dead;
use crate::status::Status;

type DeadCondition<'a> = On<'a, dead::table>;

/// Whether a dead letter is selected.
fn is_meant(selection: &Selection) -> DeadCondition<'_> {
    let when = (dead::dead_lettered_at, dead::sequence).into_sql::<TimeAndSequence>();
    let others = [
        given(selection.destination.as_deref(), |to| {
            dead::destination.eq(to)
        }),
        given(selection.status, |status| {
            (status == Status::Dead).into_sql::<Bool>()
        }),
        given(selection.behind, |place| when.lt(place.of_row())),
    ];
    let own = selected!(dead, selection, dead_lettered_at, reason);
    all_of(own.into_iter().chain(others))
}

/// The selected dead letters, latest first.
fn latest(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: DeadCondition<'_>,
    content: Content,
    limit: i64,
) -> QueryResult<Vec<MessageRecord>> {
    let letters = messages::dead(name, which, content)
        .order((dead::dead_lettered_at.desc(), dead::sequence.desc()))
        .limit(limit);
    unprepared(letters).load(conn)
}

/// Dead letters without payloads, latest first.
pub(crate) fn list(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    limit: i64,
) -> QueryResult<Vec<MessageRecord>> {
    latest(conn, name, is_meant(selection), Content::Without, limit)
}

/// The matching dead letters, oldest first: in the order of their ordering keys.
pub(crate) fn matching(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
) -> QueryResult<Vec<LetterId>> {
    let letters = dead::table(name.dead())
        .filter(is_meant(selection))
        .order((
            coalesce(dead::split_from, dead::sequence),
            dead::sequence,
            dead::message_id,
        ))
        .select((dead::sequence, dead::message_id));
    let letters = unprepared(letters).load(conn)?;
    Ok(letters.into_iter().map(LetterId::of).collect())
}

/// The dead letters with this sequence, with payload and headers.
pub(crate) fn find(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequence: i64,
) -> QueryResult<Vec<MessageRecord>> {
    let is_one = Box::new(dead::sequence.eq(sequence));
    latest(conn, name, is_one, Content::Whole, i64::MAX)
}

/// The dead letters of a message: one for each destination that did not get the message.
pub(crate) fn find_by_message_id(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: Uuid,
) -> QueryResult<Vec<MessageRecord>> {
    let is_of_message = Box::new(dead::message_id.eq(message_id));
    let mut letters = latest(conn, name, is_of_message, Content::Whole, i64::MAX)?;
    letters.sort_unstable_by_key(|letter| letter.sequence);
    Ok(letters)
}

/// The dead letters of a message for this recipient.
pub(super) fn of_delivery(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: Uuid,
    to: Recipient<'_>,
) -> QueryResult<Vec<LetterId>> {
    let letters = dead::table(name.dead())
        .filter(dead::message_id.eq(message_id))
        .filter(to.letters())
        .order(dead::sequence)
        .select((dead::sequence, dead::message_id));
    let letters = unprepared(letters).load(conn)?;
    Ok(letters.into_iter().map(LetterId::of).collect())
}

/// Puts dead letters back into the outbox: due at once, with no attempts, and without an expiry that has passed.
/// A letter stays dead if its idempotency key is in the outbox again, and ends for good if its endpoint was
/// removed: relays write that into the ledger only. `operator`: who requeues, and why. Returns the number of requeued letters.
pub(crate) fn requeue(
    conn: &mut PgConnection,
    name: &OutboxName,
    letters: &[LetterId],
    operator: &str,
) -> QueryResult<usize> {
    requeue_to(conn, name, letters, "", operator)
}

/// How often letters are given new sequences. Each try takes the next numbers of the outbox, which may also be in use.
const TRIES: usize = 10_000;

/// The same. `asked`: the destination of letters that name none; empty: the current routes decide. A letter that was
/// for an endpoint stays addressed to this registration, whoever has the name now.
///
/// A letter keeps its sequence, and with it its place in its ordering key. If another message has the sequence by now,
/// the letter gets a new one.
pub(crate) fn requeue_to(
    conn: &mut PgConnection,
    name: &OutboxName,
    letters: &[LetterId],
    asked: &str,
    operator: &str,
) -> QueryResult<usize> {
    conn.transaction(|conn| {
        let to = |conn: &mut PgConnection, sequences| {
            requeue_with(conn, name, letters, asked, operator, sequences)
        };
        let (done, _) = to(conn, RequeuedSequences::Old)?;
        if done == letters.len() {
            return Ok(done);
        }
        for _ in 0..TRIES {
            let moved = conn.transaction(|conn| match to(conn, RequeuedSequences::New)? {
                (gone, placed) if gone == placed => Ok(gone),
                _ => Err(Error::RollbackTransaction),
            });
            match moved {
                Err(Error::RollbackTransaction) => continue,
                moved => return moved.map(|moved| done + moved),
            }
        }
        Err(Error::QueryBuilderError(
            "the next sequences of the outbox are in use: `diesel-outbox check` says how to set its sequence"
                .into(),
        ))
    })
}

/// The sequences of requeued messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequeuedSequences {
    /// Their own. Letters whose sequences have other messages stay.
    Old,
    /// New ones.
    New,
}

/// Requeues letters; returns how many were removed from the dead letters, and how many were placed in the outbox.
///
/// Text: Diesel has no WITH, so no DELETE can feed an INSERT.
fn requeue_with(
    conn: &mut PgConnection,
    name: &OutboxName,
    letters: &[LetterId],
    asked: &str,
    operator: &str,
    sequences: RequeuedSequences,
) -> QueryResult<(usize, usize)> {
    let (outbox, dead) = (name.outbox(), name.dead());
    let (is_free, sequence, ending) = match sequences {
        RequeuedSequences::Old => (
            format!(
                "AND NOT EXISTS (SELECT FROM {outbox} o WHERE o.sequence = d.sequence)
                 AND NOT EXISTS (SELECT FROM asked e
                                  WHERE e.sequence = d.sequence AND e.message_id < d.message_id)"
            ),
            "sequence,",
            "",
        ),
        RequeuedSequences::New => (
            String::new(),
            "",
            "ORDER BY sequence, message_id ON CONFLICT (sequence) DO NOTHING",
        ),
    };
    let (numbers, ids) = arrays(letters);
    let counts: (i64, i64) = unprepared_statement(format!(
        "WITH asked AS (
            SELECT * FROM unnest($1::bigint[], $4::uuid[]) AS t(sequence, message_id)
        ), chosen AS MATERIALIZED (
            SELECT d.sequence, d.message_id FROM {dead} d JOIN asked a USING (sequence, message_id)
             WHERE d.sequence = ANY($1)
               AND NOT EXISTS (SELECT FROM {outbox} o WHERE o.idempotency_key = d.idempotency_key
                                AND o.destination = coalesce(nullif(d.named_destination, ''), $3))
               AND NOT EXISTS (SELECT FROM {dead} e JOIN asked a USING (sequence, message_id)
                                WHERE e.idempotency_key = d.idempotency_key
                                  AND e.named_destination = d.named_destination
                                  AND (e.sequence, e.message_id) < (d.sequence, d.message_id))
               {is_free}
             ORDER BY d.sequence, d.message_id FOR UPDATE OF d
        ), gone AS (
            DELETE FROM {dead} d USING chosen c
             WHERE d.sequence = c.sequence AND d.message_id = c.message_id AND d.sequence = ANY($1)
            RETURNING d.*
        ), noted AS (
            INSERT INTO {attempt} (part, sequence, message_id, topic, destination, tenant_id, event, operator)
            SELECT {part}, sequence, message_id, topic, destination, tenant_id, 'requeued', $2 FROM gone
        ), placed AS (
            INSERT INTO {outbox} ({sequence} message_id, topic, destination, payload, headers,
                ordering_key, idempotency_key, digest, tenant_id, expires_at, created_at, occurred_at,
                split_from, split_to, registration)
            OVERRIDING SYSTEM VALUE
            SELECT {sequence} message_id, topic, coalesce(nullif(named_destination, ''), $3), payload, headers,
                   ordering_key, idempotency_key, digest, tenant_id,
                   CASE WHEN expires_at > clock_timestamp() THEN expires_at END, created_at,
                   occurred_at, split_from, split_to,
                   CASE WHEN destination = coalesce(nullif(named_destination, ''), $3)
                        THEN registration END
              FROM gone {ending}
            RETURNING 1
        ), removed AS (
            {removed}
        )
        SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM placed)",
        attempt = name.attempt(),
        part = open_part(name),
        removed = removed_again(
            name,
            "SELECT destination, registration FROM gone WHERE destination = coalesce(nullif(named_destination, ''), $3)"
        ),
    ))
    .bind::<Array<BigInt>, _>(numbers)
    .bind::<Text, _>(operator)
    .bind::<Text, _>(asked)
    .bind::<Array<SqlUuid>, _>(ids)
    .giving::<(BigInt, BigInt)>()
    .get_result(conn)?;
    let count = |count: i64| usize::try_from(count).unwrap_or(0);
    Ok((count(counts.0), count(counts.1)))
}

/// The letters as two arrays, for `unnest`.
fn arrays(letters: &[LetterId]) -> (Vec<i64>, Vec<Uuid>) {
    let each = letters.iter();
    each.map(|letter| (letter.sequence.0, letter.message_id))
        .unzip()
}

/// Deletes dead letters for good, and unblocks the ordering keys that they held. The ledger keeps their entries.
/// Returns the number of deleted letters.
pub(crate) fn discard(
    conn: &mut PgConnection,
    name: &OutboxName,
    letters: &[LetterId],
    operator: &str,
) -> QueryResult<usize> {
    let (sequences, ids) = arrays(letters);
    // Diesel compares no pairs of columns with a set.
    let are_these = sql::<Bool>("(sequence, message_id) IN (SELECT * FROM unnest(")
        .bind::<Array<BigInt>, _>(sequences.clone())
        .sql(", ")
        .bind::<Array<SqlUuid>, _>(ids)
        .sql("))");
    conn.transaction(|conn| {
        let gone: Vec<(Touched, bool, Option<String>)> = delete(dead::table(name.dead()))
            .filter(dead::sequence.eq_any(sequences))
            .filter(are_these)
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
        history::note(conn, name, &touched, Event::Discarded, operator)?;
        waiting::free(conn, name, held.into_iter())?;
        Ok(touched.len())
    })
}
