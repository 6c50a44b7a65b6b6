//! Inserts, on the caller's connection and in the caller's transaction.
//!
//! Text: WITH, `unnest`, and operators with their schema, because the search path is the application's.

use std::collections::HashMap;

use diesel::RunQueryDsl;
use diesel::connection::LoadConnection;
use diesel::pg::Pg;
use diesel::pg::data_types::{PgInterval, PgTimestamp};
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::sql_types::{
    Array, BigInt, Binary, Bool, Interval, Nullable, Text, Timestamptz, Uuid as SqlUuid,
};

use uuid::Uuid;

use crate::message::{Due, NewMessage};
use crate::name::OutboxName;
use crate::schema::values::from_micros;
use crate::sql::digest_of;
use crate::sql::statement::{Statement, unprepared_statement};

/// A message, and the digest of its content.
pub(crate) struct NewRow {
    message: NewMessage,
    /// Set for a message with a key, to compare it with another message of the key.
    digest: Option<Vec<u8>>,
}

/// What may exist only once: a given key, at each destination. A message without a key is no duplicate of any
/// message: its identity is its id, and the number of messages with that id before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum OnlyOnce<'a> {
    Key(&'a str, &'a str),
    Id(Uuid, &'a str, usize),
}

impl<'a> OnlyOnce<'a> {
    fn new(key: Option<&'a str>, id: Uuid, destination: &'a str) -> Self {
        match key {
            Some(key) => Self::Key(key, destination),
            None => Self::Id(id, destination, 0),
        }
    }

    /// The first identity with this id that is not taken. A key stays as it is.
    fn unless(mut self, is_taken: impl Fn(&Self) -> bool) -> Self {
        while let Self::Id(id, destination, before) = self
            && is_taken(&self)
        {
            self = Self::Id(id, destination, before + 1);
        }
        self
    }
}

impl NewRow {
    pub(crate) fn new(message: NewMessage) -> Self {
        Self {
            digest: message.idempotency_key.is_some().then(|| message.digest()),
            message,
        }
    }

    /// The given key, or the message's id.
    pub(crate) fn key(&self) -> String {
        self.message.key()
    }

    pub(crate) fn topic(&self) -> &str {
        &self.message.topic
    }

    /// The approximate bytes that the message sends to the database.
    pub(crate) fn bytes(&self) -> usize {
        let headers = self.message.headers.iter();
        self.message.payload.len() + headers.map(|(n, v)| n.len() + v.len()).sum::<usize>()
    }

    fn given_key(&self) -> Option<&str> {
        self.message.idempotency_key.as_deref()
    }

    fn identity(&self) -> OnlyOnce<'_> {
        let message = &self.message;
        OnlyOnce::new(self.given_key(), message.message_id, &message.destination)
    }
}

/// What the outbox has for a message's key after an insert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoredMessage {
    pub(crate) sequence: i64,
    pub(crate) message_id: Uuid,
    /// Whether this insert wrote the row.
    pub(crate) is_new: bool,
    /// Whether the row has this message's topic and payload.
    pub(crate) is_same: bool,
}

#[derive(diesel::Queryable)]
struct FoundMessage {
    sequence: i64,
    message_id: Uuid,
    idempotency_key: Option<String>,
    destination: String,
    /// Set for a row that existed before, unless a plain insert wrote it.
    digest: Option<Vec<u8>>,
    is_new: bool,
}

impl FoundMessage {
    fn identity(&self) -> OnlyOnce<'_> {
        let key = self.idempotency_key.as_deref();
        OnlyOnce::new(key, self.message_id, &self.destination)
    }
}

/// The most tries of an insert that neither inserted a message nor saw the row in its way, because that row was
/// committed or removed at that moment.
const TRIES: usize = 100;

/// Inserts the messages whose keys are free, in order, with one statement. Returns what the outbox has for each
/// message. A second statement is needed only if another transaction enqueued one of the keys at the same moment,
/// or if a plain insert did so before.
///
/// The statement is not prepared. So it takes one round trip from the first call on a connection, and its search for
/// keys is planned for the table as it is. (The plan for an empty table reads the whole table.)
pub(crate) fn insert_or_find(
    conn: &mut impl LoadConnection<Backend = Pg>,
    name: &OutboxName,
    rows: &[NewRow],
) -> QueryResult<Vec<StoredMessage>> {
    let mut first_of = HashMap::with_capacity(rows.len());
    let mut missing = Vec::with_capacity(rows.len());
    for (index, row) in rows.iter().enumerate() {
        let identity = row.identity().unless(|it| first_of.contains_key(it));
        first_of.entry(identity).or_insert_with(|| {
            missing.push(index);
            index
        });
    }
    let mut found: Vec<Option<FoundMessage>> = rows.iter().map(|_| None).collect();
    for _ in 0..TRIES {
        if missing.is_empty() {
            return Ok(stored(rows, &first_of, &found));
        }
        let wanted: Vec<&NewRow> = missing.iter().map(|&index| &rows[index]).collect();
        let seen = insert_or_find_statement(name, &wanted)
            .giving::<(
                BigInt,
                SqlUuid,
                Nullable<Text>,
                Text,
                Nullable<Binary>,
                Bool,
            )>()
            .load::<FoundMessage>(conn)?;
        for row in with_digests(conn, name, seen)? {
            let is_found = |it: &OnlyOnce<'_>| {
                first_of
                    .get(it)
                    .is_some_and(|&index: &usize| found[index].is_some())
            };
            let Some(&index) = first_of.get(&row.identity().unless(is_found)) else {
                continue;
            };
            // A row that was settled while the insert waited for it is returned in addition to the new row.
            if row.is_new || found[index].is_none() {
                found[index] = Some(row);
            }
        }
        missing.retain(|&index| found[index].is_none());
    }
    Err(Error::QueryBuilderError(
        format!("other transactions enqueued and settled a key {TRIES} times in a row").into(),
    ))
}

/// Computes the digests of rows from plain inserts, which have none, with a separate statement. Only this statement
/// reads topics and payloads, so a role that enqueues usually needs no right to read them. Omits rows that are gone
/// meanwhile.
fn with_digests(
    conn: &mut impl LoadConnection<Backend = Pg>,
    name: &OutboxName,
    mut rows: Vec<FoundMessage>,
) -> QueryResult<Vec<FoundMessage>> {
    let has_none = |row: &FoundMessage| !row.is_new && row.digest.is_none();
    let plain = rows.iter().filter(|row| has_none(row));
    let plain: Vec<i64> = plain.map(|row| row.sequence).collect();
    if plain.is_empty() {
        return Ok(rows);
    }
    let digests: HashMap<i64, Vec<u8>> = unprepared_statement(format!(
        "SELECT o.sequence, {digest} AS digest FROM {outbox} o
          WHERE o.sequence OPERATOR(pg_catalog.=) ANY($1)",
        digest = digest_of("o"),
        outbox = name.outbox(),
    ))
    .bind::<Array<BigInt>, _>(plain)
    .giving::<(BigInt, Binary)>()
    .load::<(i64, Vec<u8>)>(conn)?
    .into_iter()
    .collect();
    for row in rows.iter_mut().filter(|row| has_none(row)) {
        row.digest = digests.get(&row.sequence).cloned();
    }
    rows.retain(|row| !has_none(row));
    Ok(rows)
}

/// Maps the rows found for the first message of each key to all messages.
fn stored(
    rows: &[NewRow],
    first_of: &HashMap<OnlyOnce<'_>, usize>,
    found: &[Option<FoundMessage>],
) -> Vec<StoredMessage> {
    let stored = rows.iter().enumerate().filter_map(|(index, row)| {
        let first = match row.identity() {
            identity @ OnlyOnce::Key(..) => *first_of.get(&identity)?,
            OnlyOnce::Id(..) => index,
        };
        let found = found[first].as_ref()?;
        let digest = found.digest.as_ref().or(rows[first].digest.as_ref());
        Some(StoredMessage {
            sequence: found.sequence,
            message_id: found.message_id,
            is_new: found.is_new && first == index,
            is_same: digest == row.digest.as_ref(),
        })
    });
    stored.collect()
}

/// Inserts all messages in order with one statement, or none (`false`) because a key is taken. The server has a fifth
/// less work than with an insert that looks up each key first. Messages with keys are tried in a savepoint; messages
/// without keys cannot conflict.
pub(crate) fn insert_all(
    conn: &mut impl LoadConnection<Backend = Pg>,
    name: &OutboxName,
    rows: &[NewRow],
) -> QueryResult<bool> {
    let rows: Vec<&NewRow> = rows.iter().collect();
    let statement = unprepared_statement(insert(name, in_array));
    if !has_keys(&rows) {
        return bind_many(statement, &rows).execute(conn).map(|_| true);
    }
    match conn.transaction(|conn| bind_many(statement, &rows).execute(conn)) {
        Ok(_) => Ok(true),
        Err(Error::DatabaseError(DatabaseErrorKind::UniqueViolation, _)) => Ok(false),
        Err(error) => Err(error),
    }
}

fn has_keys(rows: &[&NewRow]) -> bool {
    rows.iter().any(|row| row.given_key().is_some())
}

/// The columns of a [`FoundMessage`] for a new row.
const NEW: &str =
    "sequence, message_id, idempotency_key, destination, NULL::pg_catalog.bytea AS digest,
    true AS is_new";

/// Messages without a key are inserted without a search.
///
/// `ON CONFLICT DO NOTHING` raises no error, so the caller's transaction stays usable. The search probes the index
/// for one key after the other: a join would read a table of about 100,000 rows completely.
fn insert_or_find_statement<'a>(name: &OutboxName, rows: &[&'a NewRow]) -> Statement<'a> {
    let element = if rows.len() == 1 { alone } else { in_array };
    let insert = insert(name, element);
    let with_keys = || {
        format!(
            "WITH inserted AS (
            {insert}
            ON CONFLICT (idempotency_key, destination) WHERE idempotency_key IS NOT NULL DO NOTHING
            RETURNING sequence, message_id, idempotency_key, destination
        )
        SELECT {NEW} FROM inserted
        UNION ALL
        SELECT found.sequence, found.message_id, given.key, given.destination, found.digest, false
          FROM (SELECT {key} AS key, {destination} AS destination) AS given
         CROSS JOIN LATERAL (
            SELECT o.sequence, o.message_id, o.digest FROM {outbox} o
             WHERE o.idempotency_key OPERATOR(pg_catalog.=) given.key
               AND o.destination OPERATOR(pg_catalog.=) given.destination
             LIMIT 1
         ) AS found
         WHERE (SELECT pg_catalog.count(*) FROM inserted) OPERATOR(pg_catalog.<) {count}",
            key = element(7),
            destination = element(3),
            outbox = name.outbox(),
            count = rows.len(),
        )
    };
    let statement = match has_keys(rows) {
        true => with_keys(),
        false => format!("{insert} RETURNING {NEW}"),
    };
    let statement = unprepared_statement(statement);
    match rows {
        [row] => bind_one(statement, row),
        rows => bind_many(statement, rows),
    }
}

/// The parameter itself.
fn alone(parameter: usize) -> String {
    format!("${parameter}")
}

/// The parameter's elements, one for each row. A NULL array gives NULL for each row.
fn in_array(parameter: usize) -> String {
    format!("pg_catalog.unnest(${parameter})")
}

/// Rows are inserted in the order of the arrays: `unnest` in a SELECT list returns the elements one by one, and no
/// step between `unnest` and the insert reorders them.
fn insert(name: &OutboxName, element: fn(usize) -> String) -> String {
    let given = [
        "message_id",
        "topic",
        "destination",
        "payload",
        "headers",
        "ordering_key",
        "idempotency_key",
        "digest",
        "tenant_id",
        "due_in",
        "due_at",
        "expires_in",
        "expires_at",
        "occurred_at",
    ];
    let given: Vec<String> = (1..)
        .zip(given)
        .map(|(parameter, column)| format!("{} AS {column}", element(parameter)))
        .collect();
    format!(
        "INSERT INTO {outbox} (message_id, topic, destination, payload, headers, ordering_key,
                               idempotency_key, digest, tenant_id, available_at, expires_at, occurred_at)
         SELECT message_id, topic, destination, payload::pg_catalog.json, headers::pg_catalog.json,
                ordering_key,
                idempotency_key, digest, tenant_id,
                coalesce(due_at, pg_catalog.now() OPERATOR(pg_catalog.+) due_in, pg_catalog.now()),
                coalesce(expires_at, pg_catalog.now() OPERATOR(pg_catalog.+) expires_in),
                occurred_at
           FROM (SELECT {given}) AS given",
        outbox = name.outbox(),
        given = given.join(", "),
    )
}

fn bind_one<'a>(statement: Statement<'a>, row: &'a NewRow) -> Statement<'a> {
    let message = &row.message;
    statement
        .bind::<SqlUuid, _>(message.message_id)
        .bind::<Text, _>(&message.topic)
        .bind::<Text, _>(&message.destination)
        .bind::<Text, _>(&message.payload)
        .bind::<Nullable<Text>, _>(headers_json(row))
        .bind::<Nullable<Text>, _>(&message.ordering_key)
        .bind::<Nullable<Text>, _>(row.given_key())
        .bind::<Nullable<Binary>, _>(row.digest.as_ref())
        .bind::<Nullable<SqlUuid>, _>(message.tenant_id)
        .bind::<Nullable<Interval>, _>(relative(message.due))
        .bind::<Nullable<Timestamptz>, _>(absolute(message.due))
        .bind::<Nullable<Interval>, _>(message.expiry.and_then(relative))
        .bind::<Nullable<Timestamptz>, _>(message.expiry.and_then(absolute))
        .bind::<Nullable<Timestamptz>, _>(occurred_at(row))
}

fn bind_many<'a>(statement: Statement<'a>, rows: &[&'a NewRow]) -> Statement<'a> {
    statement
        .bind::<Array<SqlUuid>, _>(each(rows, |row| row.message.message_id))
        .bind::<Array<Text>, _>(each(rows, |row| &*row.message.topic))
        .bind::<Array<Text>, _>(each(rows, |row| &*row.message.destination))
        .bind::<Array<Text>, _>(each(rows, |row| &*row.message.payload))
        .bind::<Each<Text>, _>(any(rows, headers_json))
        .bind::<Each<Text>, _>(any(rows, |row| row.message.ordering_key.as_deref()))
        .bind::<Each<Text>, _>(any(rows, NewRow::given_key))
        .bind::<Each<Binary>, _>(any(rows, |row| row.digest.as_ref()))
        .bind::<Each<SqlUuid>, _>(any(rows, |row| row.message.tenant_id))
        .bind::<Each<Interval>, _>(any(rows, |row| relative(row.message.due)))
        .bind::<Each<Timestamptz>, _>(any(rows, |row| absolute(row.message.due)))
        .bind::<Each<Interval>, _>(any(rows, |row| row.message.expiry.and_then(relative)))
        .bind::<Each<Timestamptz>, _>(any(rows, |row| row.message.expiry.and_then(absolute)))
        .bind::<Each<Timestamptz>, _>(any(rows, occurred_at))
}

fn each<'a, T>(rows: &[&'a NewRow], value: impl Fn(&'a NewRow) -> T) -> Vec<T> {
    rows.iter().map(|&row| value(row)).collect()
}

/// A value for each row, or NULL if no row has a value.
type Each<T> = Nullable<Array<Nullable<T>>>;

/// `None` if no row has a value: most messages use few of the columns.
fn any<'a, T>(
    rows: &[&'a NewRow],
    value: impl Fn(&'a NewRow) -> Option<T>,
) -> Option<Vec<Option<T>>> {
    let values = each(rows, value);
    values.iter().any(Option::is_some).then_some(values)
}

fn headers_json(row: &NewRow) -> Option<String> {
    row.message.headers_json()
}

fn occurred_at(row: &NewRow) -> Option<PgTimestamp> {
    absolute(Due::At(row.message.occurred_at?))
}

/// From 1970 to the end of 9999, and back to the year 1, in microseconds. Times beyond these limits are clamped.
const LAST_MICRO: i64 = 253_402_300_799_000_000;
const FIRST_MICRO: i64 = 62_135_596_800_000_000;
/// A hundred years in microseconds. Longer delays are clamped.
const MOST_MICROS: i64 = 100 * 365 * 24 * 3600 * 1_000_000;

pub(super) fn relative(due: Due) -> Option<PgInterval> {
    match due {
        Due::Now | Due::At(_) => None,
        Due::After(delay) => {
            let micros = micros_up_to(delay.as_micros(), MOST_MICROS);
            Some(PgInterval::from_microseconds(micros))
        }
    }
}

pub(super) fn absolute(due: Due) -> Option<PgTimestamp> {
    let Due::At(time) = due else {
        return None;
    };
    let micros = match time.duration_since(std::time::UNIX_EPOCH) {
        Ok(since) => micros_up_to(since.as_micros(), LAST_MICRO),
        Err(before) => -micros_up_to(before.duration().as_micros(), FIRST_MICRO),
    };
    Some(from_micros(micros))
}

fn micros_up_to(micros: u128, most: i64) -> i64 {
    i64::try_from(micros).map_or(most, |micros| micros.min(most))
}
