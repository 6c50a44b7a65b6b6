//! A message wherever it is: live, dead, or what the ledger keeps of it.
//!
//! Text: a UNION of tables with many columns, in FROM, and `unnest`.

mod seek;

use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Integer, Nullable, Text, Uuid as SqlUuid};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use uuid::Uuid;

use super::looking::looking;
use super::place::{Place, micros, rfc3339};
use super::replay::{MARK, after_mark, cut_key};
use super::searched::{Deadline, Searched};
use crate::name::OutboxName;

/// What a message is looked for by.
///
/// ```
/// use diesel_outbox::admin::MessageKey;
///
/// let typed_by_somebody = MessageKey::Text("order-42-paid".to_owned());
/// # let _ = typed_by_somebody;
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessageKey {
    /// Its message id, as receivers see it.
    Id(Uuid),
    /// Its idempotency key.
    Key(String),
    /// Its place in the outbox.
    Sequence(i64),
    /// Any of these, as somebody has typed it.
    Text(String),
}

/// What one table has of a message for one destination. A message may have several: one for each
/// destination, a dead letter and its row of the ledger, and those of its replays.
#[derive(Debug, Clone, diesel::QueryableByName)]
#[non_exhaustive]
pub struct MessageRecord {
    /// Where it stands: `live`, `dead` or `ledger`.
    #[diesel(sql_type = Text)]
    pub kept_in: String,
    /// The name of a [`Status`](crate::Status).
    #[diesel(sql_type = Text)]
    pub status: String,
    /// Its place in the outbox.
    #[diesel(sql_type = BigInt)]
    pub sequence: i64,
    /// Its id, as receivers see it.
    #[diesel(sql_type = SqlUuid)]
    pub message_id: Uuid,
    /// Its topic.
    #[diesel(sql_type = Text)]
    pub topic: String,
    /// Its destination; empty where its topic decides.
    #[diesel(sql_type = Text)]
    pub destination: String,
    /// Its idempotency key.
    #[diesel(sql_type = Text)]
    pub idempotency_key: String,
    /// Its ordering key.
    #[diesel(sql_type = Nullable<Text>)]
    pub ordering_key: Option<String>,
    /// Its tenant.
    #[diesel(sql_type = Nullable<SqlUuid>)]
    pub tenant_id: Option<Uuid>,
    /// Attempts made.
    #[diesel(sql_type = Integer)]
    pub attempts: i32,
    /// When it was enqueued, RFC 3339.
    #[diesel(sql_type = Text)]
    pub created_at: String,
    /// When the event occurred, RFC 3339, where who enqueued it has said so.
    #[diesel(sql_type = Nullable<Text>)]
    pub occurred_at: Option<String>,
    /// When it is, or was, due, RFC 3339; the ledger does not keep it.
    #[diesel(sql_type = Nullable<Text>)]
    pub available_at: Option<String>,
    /// When its time is over, RFC 3339.
    #[diesel(sql_type = Nullable<Text>)]
    pub expires_at: Option<String>,
    /// The lease of the relay that has claimed it.
    #[diesel(sql_type = Nullable<BigInt>)]
    pub locked_by: Option<i64>,
    /// When it was claimed, RFC 3339.
    #[diesel(sql_type = Nullable<Text>)]
    pub locked_at: Option<String>,
    /// When it was delivered or died, RFC 3339.
    #[diesel(sql_type = Nullable<Text>)]
    pub settled_at: Option<String>,
    /// Why it died, or why its last attempt failed: the name of a [`ReasonCode`](crate::ReasonCode).
    #[diesel(sql_type = Nullable<Text>)]
    pub reason: Option<String>,
    /// The last error.
    #[diesel(sql_type = Nullable<Text>)]
    pub last_error: Option<String>,
    /// The last answer's status.
    #[diesel(sql_type = Nullable<Integer>)]
    pub http_status: Option<i32>,
    /// The beginning of the last answer.
    #[diesel(sql_type = Nullable<Text>)]
    pub response: Option<String>,
    /// The message that it is a part of, for one of several destinations.
    #[diesel(sql_type = Nullable<BigInt>)]
    pub split_from: Option<i64>,
    /// It is dead and holds its key until it is requeued or discarded.
    #[diesel(sql_type = Bool)]
    pub blocks_key: bool,
    /// The stored headers; the ledger keeps none.
    #[diesel(sql_type = Nullable<Text>)]
    pub headers: Option<String>,
    /// The stored JSON, where it is kept.
    #[diesel(sql_type = Nullable<Text>)]
    pub payload: Option<String>,
    #[diesel(sql_type = BigInt)]
    due_micros: i64,
}

impl MessageRecord {
    /// Where it stands among what waits: the next page is behind it
    /// ([`WaitingFilter::after`](crate::admin::WaitingFilter::after)).
    ///
    /// ```
    /// # use diesel_outbox::admin::{MessageRecord, WaitingFilter};
    /// fn next_page(page: &[MessageRecord]) -> WaitingFilter {
    ///     let after = page.last().map(MessageRecord::place);
    ///     WaitingFilter { after, ..WaitingFilter::default() }
    /// }
    /// ```
    pub fn place(&self) -> Place {
        Place {
            micros: self.due_micros,
            sequence: self.sequence,
        }
    }

    /// The idempotency key of the message that this one is a replay of.
    ///
    /// ```
    /// # use diesel_outbox::admin::MessageRecord;
    /// fn describe(record: &MessageRecord) -> String {
    ///     match record.replay_of() {
    ///         Some(key) => format!("a replay of {key}"),
    ///         None => record.idempotency_key.clone(),
    ///     }
    /// }
    /// ```
    pub fn replay_of(&self) -> Option<&str> {
        base_of(&self.idempotency_key)
    }
}

/// What a replay's key begins with.
fn base_of(key: &str) -> Option<&str> {
    key.rsplit_once(MARK).map(|(base, _)| base)
}

/// The idempotency keys that lead to what `wanted` names.
pub(crate) fn keys(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &MessageKey,
) -> QueryResult<Searched<String>> {
    seek::keys(conn, name, wanted, Deadline::new())
}

/// Whether the stored JSON is read with the rest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Whole,
    Without,
}

impl Content {
    fn of(self, column: &str) -> String {
        match self {
            Self::Whole => format!("{column}::text"),
            Self::Without => "NULL::text".to_owned(),
        }
    }
}

pub(super) fn live(name: &OutboxName, content: Content) -> String {
    format!(
        "SELECT 'live' AS kept_in,
                CASE WHEN locked_by IS NOT NULL THEN 'sending' WHEN attempts > 0 THEN 'retrying'
                     ELSE 'pending' END AS status,
                sequence, message_id, topic, destination, idempotency_key, ordering_key, tenant_id,
                attempts, {} AS created_at, {} AS occurred_at, {} AS available_at, {} AS expires_at, locked_by,
                {} AS locked_at, NULL::text AS settled_at, last_error_code AS reason, last_error,
                NULL::integer AS http_status, NULL::text AS response, split_from,
                false AS blocks_key, {} AS headers, {} AS payload, {} AS due_micros,
                coalesce(split_from, sequence) AS place
           FROM {} m",
        rfc3339("created_at"),
        rfc3339("occurred_at"),
        rfc3339("available_at"),
        rfc3339("expires_at"),
        rfc3339("locked_at"),
        content.of("headers"),
        content.of("payload"),
        micros("available_at"),
        name.outbox(),
    )
}

fn dead(name: &OutboxName, content: Content) -> String {
    format!(
        "SELECT 'dead', 'dead', sequence, message_id, topic, destination, idempotency_key,
                ordering_key, tenant_id, attempts, {}, {}, {}, {}, NULL::bigint, NULL::text, {}, reason,
                last_error, http_status, response, split_from, blocks_key, {}, {}, {},
                coalesce(split_from, sequence)
           FROM {} m",
        rfc3339("created_at"),
        rfc3339("occurred_at"),
        rfc3339("available_at"),
        rfc3339("expires_at"),
        rfc3339("died_at"),
        content.of("headers"),
        content.of("payload"),
        micros("available_at"),
        name.dead(),
    )
}

fn ledger(name: &OutboxName) -> String {
    format!(
        "SELECT 'ledger', status, sequence, message_id, topic, destination, idempotency_key,
                ordering_key, tenant_id, attempts, {}, {}, NULL::text, NULL::text, NULL::bigint,
                NULL::text, {}, reason, error, http_status, response, NULL::bigint, false,
                NULL::text, payload::text, 0::bigint, sequence
           FROM {} m",
        rfc3339("created_at"),
        rfc3339("occurred_at"),
        rfc3339("settled_at"),
        name.ledger(),
    )
}

/// Everything of the messages that `wanted` names, with what replays have made of them, in the order of
/// their sequences.
pub(crate) fn find(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &MessageKey,
) -> QueryResult<Searched<MessageRecord>> {
    let found = seek::keys(conn, name, wanted, Deadline::new())?;
    // A replay is found as one of what it is a replay of.
    let with_replays = |key: String| base_of(&key).map(str::to_owned).unwrap_or(key);
    let mut keys: Vec<String> = found.rows.into_iter().map(with_replays).collect();
    keys.sort();
    keys.dedup();
    Ok(Searched {
        rows: of_keys(conn, name, &keys)?,
        is_complete: found.is_complete,
    })
}

/// All of these idempotency keys and their replays.
fn of_keys(
    conn: &mut PgConnection,
    name: &OutboxName,
    keys: &[String],
) -> QueryResult<Vec<MessageRecord>> {
    let of_key = format!(
        "m.idempotency_key COLLATE \"C\" = k.key
         OR (m.idempotency_key COLLATE \"C\" >= k.cut || '{MARK}'
             AND m.idempotency_key COLLATE \"C\" < k.cut || '{}')",
        after_mark(),
    );
    // A probe of the index for each key, in each table that has one.
    let of = |table: String| {
        format!(
            "SELECT f.* FROM (SELECT key, {cut} AS cut FROM unnest($1::text[]) AS key OFFSET 0) k
              CROSS JOIN LATERAL ({table} WHERE {of_key} OFFSET 0) f",
            cut = cut_key("key"),
        )
    };
    looking(conn, None, |conn| {
        sql_query(format!(
            "{} UNION ALL {} UNION ALL {} ORDER BY sequence, destination, kept_in DESC",
            of(live(name, Content::Whole)),
            of(dead(name, Content::Whole)),
            of(ledger(name)),
        ))
        .bind::<Array<Text>, _>(keys)
        .load(conn)
    })
}

/// The live messages and the dead letters of an ordering key, in their order, without their content.
pub(crate) fn of_ordering_key(
    conn: &mut PgConnection,
    name: &OutboxName,
    ordering_key: &str,
    limit: i64,
) -> QueryResult<Vec<MessageRecord>> {
    looking(conn, None, |conn| {
        sql_query(format!(
            "SELECT * FROM (
                (SELECT * FROM ({live} WHERE ordering_key = $1) l ORDER BY place, sequence LIMIT $2)
                UNION ALL
                (SELECT * FROM ({dead} WHERE ordering_key = $1) d (kept_in, status, sequence,
                    message_id, topic, destination, idempotency_key, ordering_key, tenant_id, attempts,
                    created_at, occurred_at, available_at, expires_at, locked_by, locked_at,
                    settled_at, reason, last_error, http_status, response, split_from, blocks_key, headers,
                    payload, due_micros, place)
                  ORDER BY place, sequence LIMIT $2)
             ) m ORDER BY place, sequence LIMIT $2",
            live = live(name, Content::Without),
            dead = dead(name, Content::Without),
        ))
        .bind::<Text, _>(ordering_key)
        .bind::<BigInt, _>(limit)
        .load(conn)
    })
}
