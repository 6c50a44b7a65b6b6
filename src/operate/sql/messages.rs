//! A message in all tables: live rows, dead letters, and ledger entries.

use diesel::PgConnection;
use diesel::deserialize::FromSqlRow;
use diesel::dsl::AsExprOf;
use diesel::internal::table_macro::{BoxedSelectStatement, FromClause};
use diesel::pg::Pg;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, CombineDsl, ExpressionMethods, IntoSql, NullableExpressionMethods,
    QueryDsl, Queryable, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{
    BigInt, Bool, Integer, Json as SqlJson, Nullable, Text, Timestamptz, Uuid as SqlUuid,
};
use uuid::Uuid;

use crate::message::Sequence;
use crate::message::replays::{base_of, keys_of_replays};
use crate::name::OutboxName;
use crate::operate::sql::place::Place;
use crate::outbox::sql::searched::Searched;
use crate::outbox::sql::seek::{Hit, MessageKey, live_ones, seek};
use crate::schema::rfc3339::{MaybeRfc3339, Rfc3339};
use crate::schema::values::{texts, to_micros};
use crate::sql::functions::{Json, MaybeJson, On, coalesce, null, shown_key};
pub(super) use crate::sql::live;
use crate::sql::looking::looking;
use crate::sql::statement::unprepared;
pub(super) use crate::sql::table::dead;
use crate::sql::table::{ledger, outbox};
use crate::status::Status;
use crate::words::{UnknownWord, words};

words! {
    "table of messages":
    /// A table that has rows of messages.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromSqlRow)]
    pub enum KeptIn {
        /// The outbox, whose messages are live.
        Live = "live",
        /// The dead letters.
        Dead = "dead",
        /// The ledger.
        Ledger = "ledger",
    }
}

texts!(KeptIn);

/// One row of a message, in one table and for one destination. A message may have several rows: one for each
/// destination, a dead letter and its ledger entry, and the rows of its replays.
#[derive(Debug, Clone, Queryable)]
#[non_exhaustive]
pub struct MessageRecord {
    /// The table that has the row.
    pub kept_in: KeptIn,
    /// The state of the message.
    pub status: Status,
    /// The sequence of the message: its place in the outbox.
    pub sequence: Sequence,
    /// The message id, as receivers see it.
    pub message_id: Uuid,
    /// The topic of the message.
    pub topic: String,
    /// The destination; empty if the topic decides.
    pub destination: String,
    /// The idempotency key; the message id if the caller gave none.
    pub idempotency_key: String,
    /// The ordering key.
    pub ordering_key: Option<String>,
    /// The tenant of the message.
    pub tenant_id: Option<Uuid>,
    /// The number of attempts.
    pub attempts: i32,
    /// When the message was enqueued, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub created_at: String,
    /// When the event occurred, RFC 3339, if the application gave a time.
    #[diesel(deserialize_as = MaybeRfc3339)]
    pub occurred_at: Option<String>,
    /// When the message is or was due, RFC 3339. The ledger does not keep this time.
    #[diesel(deserialize_as = MaybeRfc3339)]
    pub available_at: Option<String>,
    /// When the message expires, RFC 3339. The ledger does not keep this time.
    #[diesel(deserialize_as = MaybeRfc3339)]
    pub expires_at: Option<String>,
    /// The lease of the relay that has claimed the message.
    pub locked_by: Option<i64>,
    /// When the message was claimed, RFC 3339.
    #[diesel(deserialize_as = MaybeRfc3339)]
    pub locked_at: Option<String>,
    /// When the message was delivered or dead-lettered, RFC 3339.
    #[diesel(deserialize_as = MaybeRfc3339)]
    pub settled_at: Option<String>,
    /// Why the message was dead-lettered, or why its last attempt failed: the name of a
    /// [`ReasonCode`](crate::ReasonCode).
    pub reason: Option<String>,
    /// The last error.
    pub last_error: Option<String>,
    /// The HTTP status of the last response.
    pub http_status: Option<i32>,
    /// The beginning of the last response.
    pub response: Option<String>,
    /// The message whose fan-out inserted this message, for one of several destinations.
    pub split_from: Option<Sequence>,
    /// The message is dead, and blocks its ordering key until it is requeued or discarded.
    pub blocks_key: bool,
    /// The stored headers, if they are kept.
    #[diesel(deserialize_as = MaybeJson)]
    pub headers: Option<String>,
    /// The stored JSON, if it is kept.
    #[diesel(deserialize_as = MaybeJson)]
    pub payload: Option<String>,
    /// The stored JSON is kept, so the message can be sent again.
    pub has_payload: bool,
    at: PgTimestamp,
}

impl MessageRecord {
    /// The row as a dead letter, for requeue and discard.
    pub fn id(&self) -> LetterId {
        LetterId {
            sequence: self.sequence,
            message_id: self.message_id,
        }
    }

    /// The place of the row in its list, which the next page begins at: of a waiting message when it is due, of a dead
    /// letter or ledger entry when it was settled.
    pub fn place(&self) -> Place {
        Place {
            micros: to_micros(self.at),
            sequence: self.sequence.0,
        }
    }

    /// The idempotency key of the message that this message replays. `None`: this message is no replay.
    pub fn replay_of(&self) -> Option<&str> {
        base_of(&self.idempotency_key)
    }
}

/// What tells a dead letter from all others, as `sequence.message-id` in text. The sequence alone does not: after a
/// restore, or after the outbox was emptied, sequences may be used again.
///
/// ```
/// use diesel_outbox::admin::LetterId;
///
/// let letter: LetterId = "42.0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c".parse()?;
/// assert_eq!(letter.sequence.0, 42);
/// # Ok::<(), diesel_outbox::UnknownWord>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LetterId {
    /// The sequence of the message.
    pub sequence: Sequence,
    /// The message id, as receivers see it.
    pub message_id: Uuid,
}

impl LetterId {
    /// Of the columns of a row.
    pub(super) fn of((sequence, message_id): (Sequence, Uuid)) -> Self {
        Self {
            sequence,
            message_id,
        }
    }
}

impl std::fmt::Display for LetterId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.sequence, self.message_id)
    }
}

impl std::str::FromStr for LetterId {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let parts = text.split_once('.').and_then(|(sequence, message_id)| {
            Some((sequence.parse().ok()?, message_id.parse().ok()?))
        });
        let (sequence, message_id) =
            parts.ok_or_else(|| UnknownWord::new("dead letter (sequence.message-id)", text))?;
        Ok(Self {
            sequence: Sequence(sequence),
            message_id,
        })
    }
}

/// Whether the stored JSON is read, too. Read-only roles have no right to the stored JSON.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Whole,
    Without,
}

impl Content {
    pub(super) fn of<'a, T: 'a>(
        self,
        column: On<'a, T, Nullable<SqlJson>>,
    ) -> On<'a, T, Nullable<SqlJson>> {
        match self {
            Self::Whole => column,
            Self::Without => Box::new(null!(Json<'_>, SqlJson)),
        }
    }
}

type Records<'a, T> = BoxedSelectStatement<'a, Columns, FromClause<T>, Pg>;

/// The columns of a [`MessageRecord`]: the SQL type of each, and its expression for the outbox, the dead letters and
/// the ledger. `content`: whether they read stored JSON.
macro_rules! records {
    ($content:ident: $($sql_type:ty => $live:expr, $dead:expr, $settled:expr;)+) => {
        type Columns = ($($sql_type,)+);

        /// Live messages.
        pub(super) fn live<'a>(
            name: &OutboxName,
            which: On<'a, outbox::table>,
            $content: Content,
        ) -> Records<'a, outbox::table> {
            let rows = outbox::table(name.outbox()).filter(which);
            rows.select(($($live,)+)).into_boxed()
        }

        /// Dead letters.
        pub(super) fn dead<'a>(
            name: &OutboxName,
            which: On<'a, dead::table>,
            $content: Content,
        ) -> Records<'a, dead::table> {
            let rows = dead::table(name.dead()).filter(which);
            rows.select(($($dead,)+)).into_boxed()
        }

        /// Ledger entries.
        pub(super) fn settled<'a>(
            name: &OutboxName,
            which: On<'a, ledger::table>,
            $content: Content,
        ) -> Records<'a, ledger::table> {
            let rows = ledger::table(name.ledger()).filter(which);
            rows.select(($($settled,)+)).into_boxed()
        }
    };
}

records! { content:
    Text => kept_in(KeptIn::Live), kept_in(KeptIn::Dead), kept_in(KeptIn::Ledger);
    Text => live::status(), Status::Dead.as_str().into_sql::<Text>(), ledger::status;
    BigInt => outbox::sequence, dead::sequence, ledger::sequence;
    SqlUuid => outbox::message_id, dead::message_id, ledger::message_id;
    Text => outbox::topic, dead::topic, ledger::topic;
    Text => outbox::destination, dead::destination, ledger::destination;
    Text => shown_key!(outbox), shown_key!(dead), shown_key!(ledger);
    Nullable<Text> => outbox::ordering_key, dead::ordering_key, ledger::ordering_key;
    Nullable<SqlUuid> => outbox::tenant_id, dead::tenant_id, ledger::tenant_id;
    Integer => outbox::attempts, dead::attempts, ledger::attempts;
    Timestamptz => outbox::created_at, dead::created_at, ledger::created_at;
    Nullable<Timestamptz> => outbox::occurred_at, dead::occurred_at, ledger::occurred_at;
    Nullable<Timestamptz> => outbox::available_at.nullable(), dead::available_at.nullable(), no_time();
    Nullable<Timestamptz> => outbox::expires_at, dead::expires_at, no_time();
    Nullable<BigInt> => outbox::locked_by, null!(i64, BigInt), null!(i64, BigInt);
    Nullable<Timestamptz> => outbox::locked_at, no_time(), no_time();
    Nullable<Timestamptz> => no_time(), dead::dead_lettered_at.nullable(), ledger::settled_at.nullable();
    Nullable<Text> => outbox::last_error_code, dead::reason.nullable(), ledger::reason;
    Nullable<Text> => outbox::last_error, dead::last_error, ledger::error;
    Nullable<Integer> => null!(i32, Integer), dead::http_status, ledger::http_status;
    Nullable<Text> => null!(&str, Text), dead::response, ledger::response;
    Nullable<BigInt> => outbox::split_from, dead::split_from, ledger::split_from;
    Bool => false.into_sql::<Bool>(), dead::blocks_key, false.into_sql::<Bool>();
    Nullable<SqlJson> => content.of(Box::new(outbox::headers)), content.of(Box::new(dead::headers)),
        content.of(Box::new(ledger::headers));
    Nullable<SqlJson> => content.of(Box::new(outbox::payload.nullable())),
        content.of(Box::new(dead::payload.nullable())), content.of(Box::new(ledger::payload));
    Bool => true.into_sql::<Bool>(), true.into_sql::<Bool>(), ledger::payload.is_not_null();
    Timestamptz => outbox::available_at, dead::dead_lettered_at, ledger::settled_at;
}

fn kept_in(table: KeptIn) -> AsExprOf<&'static str, Text> {
    table.as_str().into_sql::<Text>()
}

/// NULL, for a time that a table does not keep.
fn no_time() -> AsExprOf<Option<PgTimestamp>, Nullable<Timestamptz>> {
    null!(PgTimestamp, Timestamptz)
}

/// All rows of the messages that `wanted` names, and of their replays, in the order of their sequences.
pub(crate) fn find(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &MessageKey,
) -> QueryResult<Searched<MessageRecord>> {
    let mut found = seek(conn, name, wanted)?;
    // A replay leads to the original message, and with it to all other replays.
    let mut keys: Vec<String> = Vec::new();
    for key in found.rows.iter().map(Hit::key).collect::<Vec<_>>() {
        match base_of(&key).map(str::to_owned) {
            Some(base) if !keys.contains(&base) => {
                let replayed = seek(conn, name, &MessageKey::Key(base.clone()))?;
                found.rows.extend(replayed.rows);
                found.is_complete &= replayed.is_complete;
                keys.push(base);
            }
            None if !keys.contains(&key) => keys.push(key),
            _ => {}
        }
    }
    let mut rows = of_hits(conn, name, &found.rows)?;
    for key in &keys {
        rows.extend(replays_of(conn, name, key)?);
    }
    let identity = |row: &MessageRecord| {
        let destination = row.destination.clone();
        (
            row.sequence,
            row.message_id,
            destination,
            std::cmp::Reverse(row.kept_in.as_str()),
            row.settled_at.clone(),
        )
    };
    rows.sort_by_cached_key(identity);
    rows.dedup_by(|a, b| identity(a) == identity(b));
    Ok(Searched {
        rows,
        is_complete: found.is_complete,
    })
}

/// All rows of these messages: settled rows by message id, live rows by sequence.
fn of_hits(
    conn: &mut PgConnection,
    name: &OutboxName,
    hits: &[Hit],
) -> QueryResult<Vec<MessageRecord>> {
    if hits.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<Uuid> = hits.iter().map(|hit| hit.message_id).collect();
    let live = live(name, live_ones(name, hits), Content::Whole);
    let is_dead = dead::message_id.eq_any(ids.clone());
    let dead = dead(name, Box::new(is_dead), Content::Whole);
    let settled = settled(
        name,
        Box::new(ledger::message_id.eq_any(ids)),
        Content::Whole,
    );
    let all = live.union_all(dead).union_all(settled);
    looking(conn, None, |conn| unprepared(all).load(conn))
}

/// The replays of the messages with this key.
fn replays_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    key: &str,
) -> QueryResult<Vec<MessageRecord>> {
    let (from, to) = keys_of_replays(key);
    /// Whether a row is a replay, by its key.
    macro_rules! is_replay {
        ($table:ident) => {{
            let key = || $table::idempotency_key.assume_not_null();
            Box::new(key().ge(&from).and(key().lt(&to)))
        }};
    }
    let live = live(name, is_replay!(outbox), Content::Whole);
    let dead = dead(name, is_replay!(dead), Content::Whole);
    let settled = settled(name, is_replay!(ledger), Content::Whole);
    let all = live.union_all(dead).union_all(settled);
    looking(conn, None, |conn| unprepared(all).load(conn))
}

/// The live messages and the dead letters of an ordering key, in the order of the key, without content.
pub(crate) fn of_ordering_key(
    conn: &mut PgConnection,
    name: &OutboxName,
    ordering_key: &str,
    limit: i64,
) -> QueryResult<Vec<MessageRecord>> {
    let is_live = outbox::ordering_key.assume_not_null().eq(ordering_key);
    let live = live(name, Box::new(is_live), Content::Without)
        .order((
            coalesce(outbox::split_from, outbox::sequence),
            outbox::sequence,
        ))
        .limit(limit);
    let is_dead = dead::ordering_key.assume_not_null().eq(ordering_key);
    let dead = dead(name, Box::new(is_dead), Content::Without)
        .order((coalesce(dead::split_from, dead::sequence), dead::sequence))
        .limit(limit);
    let both = live.union_all(dead);
    let mut rows: Vec<MessageRecord> = looking(conn, None, |conn| unprepared(both).load(conn))?;
    rows.sort_by_key(|row| (row.split_from.unwrap_or(row.sequence), row.sequence));
    rows.truncate(usize::try_from(limit).unwrap_or(0));
    Ok(rows)
}
