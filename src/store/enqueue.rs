//! Inserts, on the caller's connection and in its transaction.

use std::collections::HashMap;

use diesel::pg::Pg;
use diesel::query_builder::{BoxedSqlQuery, SqlQuery};
use diesel::result::{Error, QueryResult};
use diesel::sql_types::{Array, BigInt, Binary, Bool, Nullable, Text, Uuid as SqlUuid};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use uuid::Uuid;

use super::digest_of;
use crate::message::{Due, NewMessage};
use crate::name::OutboxName;

/// What the table has for a key after an insert.
#[derive(Debug, Clone, diesel::QueryableByName)]
pub(crate) struct Stored {
    #[diesel(sql_type = BigInt)]
    pub(crate) sequence: i64,
    #[diesel(sql_type = Text)]
    idempotency_key: String,
    #[diesel(sql_type = Text)]
    destination: String,
    #[diesel(sql_type = Binary)]
    pub(crate) digest: Vec<u8>,
    #[diesel(sql_type = Bool)]
    pub(crate) is_new: bool,
}

/// Key and destination: what is unique in the outbox.
pub(crate) type Identity = (String, String);

/// How often an insert is tried that neither inserted nor saw the row that stood in its way: that
/// row was committed, or removed, at just that moment.
const TRIES: usize = 100;

/// Inserts the messages whose key is free, in their order, by one statement, and tells for each
/// key what the table has. Needs a second statement only when another transaction enqueued one of
/// the keys at the same moment.
pub(crate) fn insert_or_find(
    conn: &mut PgConnection,
    name: &OutboxName,
    messages: &[NewMessage],
) -> QueryResult<HashMap<Identity, Stored>> {
    let mut found: HashMap<Identity, Stored> = HashMap::with_capacity(messages.len());
    for _ in 0..TRIES {
        let missing: Vec<&NewMessage> = messages
            .iter()
            .filter(|message| !found.contains_key(&identity(message)))
            .collect();
        if missing.is_empty() {
            return Ok(found);
        }
        for stored in insert_statement(name, &missing).load::<Stored>(conn)? {
            let identity = (stored.idempotency_key.clone(), stored.destination.clone());
            // A row that was settled while the insert waited for it is seen beside the new one.
            if stored.is_new || !found.contains_key(&identity) {
                found.insert(identity, stored);
            }
        }
    }
    Err(Error::QueryBuilderError(
        format!("a key was enqueued and settled by others {TRIES} times in a row").into(),
    ))
}

pub(crate) fn identity(message: &NewMessage) -> Identity {
    (message.key(), message.destination.clone())
}

/// `ON CONFLICT DO NOTHING` raises no error, so the caller's transaction stays usable.
fn insert_statement(
    name: &OutboxName,
    messages: &[&NewMessage],
) -> BoxedSqlQuery<'static, Pg, SqlQuery> {
    let outbox = name.outbox();
    let column = |f: fn(&NewMessage) -> String| messages.iter().map(|m| f(m)).collect::<Vec<_>>();
    let optional =
        |f: fn(&NewMessage) -> Option<String>| messages.iter().map(|m| f(m)).collect::<Vec<_>>();
    let times = |f: fn(&NewMessage) -> Option<Due>, which: fn(Due) -> Option<i64>| {
        messages
            .iter()
            .map(|m| f(m).and_then(which))
            .collect::<Vec<Option<i64>>>()
    };
    let ids: Vec<Uuid> = messages.iter().map(|m| m.message_id).collect();
    let tenants: Vec<Option<Uuid>> = messages.iter().map(|m| m.tenant_id).collect();
    let digests: Vec<Vec<u8>> = messages.iter().map(|m| m.digest()).collect();
    sql_query(format!(
        "WITH given AS MATERIALIZED (
            SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[],
                                 $6::text[], $7::text[], $8::bytea[], $9::uuid[],
                                 $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[])
                WITH ORDINALITY
                AS t(message_id, topic, destination, payload, headers, ordering_key,
                     idempotency_key, digest, tenant_id, due_in, due_at, expires_in, expires_at, n)
        ), inserted AS (
            INSERT INTO {outbox} (message_id, topic, destination, payload, headers, ordering_key,
                                  idempotency_key, digest, tenant_id, available_at, expires_at)
            SELECT message_id, topic, destination, payload::json, headers::json, ordering_key,
                   idempotency_key, digest, tenant_id,
                   coalesce('epoch'::timestamptz + due_at * interval '1 microsecond',
                            now() + coalesce(due_in, 0) * interval '1 microsecond'),
                   coalesce('epoch'::timestamptz + expires_at * interval '1 microsecond',
                            now() + expires_in * interval '1 microsecond')
              FROM given ORDER BY n
            ON CONFLICT (idempotency_key, destination) DO NOTHING
            RETURNING sequence, idempotency_key, destination, digest
        )
        SELECT sequence, idempotency_key, destination, digest, true AS is_new FROM inserted
        UNION ALL
        SELECT o.sequence, o.idempotency_key, o.destination,
               {stored_digest}, false
          FROM given JOIN {outbox} o USING (idempotency_key, destination)",
        stored_digest = digest_of("o"),
    ))
    .into_boxed()
    .bind::<Array<SqlUuid>, _>(ids)
    .bind::<Array<Text>, _>(column(|m| m.topic.clone()))
    .bind::<Array<Text>, _>(column(|m| m.destination.clone()))
    .bind::<Array<Text>, _>(column(|m| m.payload.clone()))
    .bind::<Array<Nullable<Text>>, _>(optional(headers_json))
    .bind::<Array<Nullable<Text>>, _>(optional(|m| m.ordering_key.clone()))
    .bind::<Array<Text>, _>(column(NewMessage::key))
    .bind::<Array<Binary>, _>(digests)
    .bind::<Array<Nullable<SqlUuid>>, _>(tenants)
    .bind::<Array<Nullable<BigInt>>, _>(times(|m| Some(m.due), relative_micros))
    .bind::<Array<Nullable<BigInt>>, _>(times(|m| Some(m.due), absolute_micros))
    .bind::<Array<Nullable<BigInt>>, _>(times(|m| m.expiry, relative_micros))
    .bind::<Array<Nullable<BigInt>>, _>(times(|m| m.expiry, absolute_micros))
}

fn headers_json(message: &NewMessage) -> Option<String> {
    if message.headers.is_empty() {
        return None;
    }
    let object = message
        .headers
        .iter()
        .map(|(name, value)| (name.clone(), value.clone().into()))
        .collect();
    Some(serde_json::Value::Object(object).to_string())
}

/// From 1970 to the end of 9999 and back to the year 1: further away is no timestamp for sure.
const LAST_MICRO: i64 = 253_402_300_799_000_000;
const FIRST_MICRO: i64 = 62_135_596_800_000_000;
/// A hundred years in microseconds: more overflows a timestamp.
const MOST_MICROS: i64 = 100 * 365 * 24 * 3600 * 1_000_000;

fn relative_micros(due: Due) -> Option<i64> {
    match due {
        Due::Now | Due::At(_) => None,
        Due::After(delay) => {
            Some(i64::try_from(delay.as_micros()).map_or(MOST_MICROS, |us| us.min(MOST_MICROS)))
        }
    }
}

fn absolute_micros(due: Due) -> Option<i64> {
    match due {
        Due::Now | Due::After(_) => None,
        Due::At(time) => match time.duration_since(std::time::UNIX_EPOCH) {
            Ok(since) => Some(micros_up_to(since.as_micros(), LAST_MICRO)),
            Err(before) => Some(-micros_up_to(before.duration().as_micros(), FIRST_MICRO)),
        },
    }
}

fn micros_up_to(micros: u128, most: i64) -> i64 {
    i64::try_from(micros).map_or(most, |micros| micros.min(most))
}
