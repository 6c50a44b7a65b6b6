//! What has happened to messages: failed attempts, and what operators did.

use std::time::Duration;

use diesel::data_types::PgInterval;
use diesel::prelude::{ExpressionMethods, QueryDsl, Queryable, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::{PgConnection, insert_into};
use uuid::Uuid;

use crate::message::Sequence;
use crate::name::OutboxName;
use crate::store::place::Rfc3339;
use crate::store::sql::part_or;
use crate::store::statement::planned_anew;
use crate::store::table::{attempt, part};

/// Entries that are read of some messages.
const MOST: i64 = 1000;

/// Something that happened to a message: an attempt that failed, or what an operator did.
#[derive(Debug, Clone, Queryable)]
#[non_exhaustive]
pub struct HistoryEntry {
    /// The message's place in the outbox.
    pub sequence: Sequence,
    /// Its id, as receivers see it.
    pub message_id: Uuid,
    /// The destination that was used; empty where none was.
    pub destination: String,
    /// `failed`, `requeued`, `discarded` or `replayed`.
    pub event: String,
    /// Which attempt failed: 1 is the first.
    pub attempt: Option<i32>,
    /// Why it failed: the name of a [`ReasonCode`](crate::ReasonCode).
    pub reason: Option<String>,
    /// The same in words.
    pub error: Option<String>,
    /// The answer's status.
    pub http_status: Option<i32>,
    /// The beginning of the answer.
    pub response: Option<String>,
    /// From the beginning of the send to its end.
    #[diesel(deserialize_as = Took)]
    pub took: Option<Duration>,
    /// The relay that sent.
    pub relay: Option<String>,
    /// Who did it and why, where a person did.
    pub operator: Option<String>,
    /// When, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub happened_at: String,
}

/// An interval as what it is here: less than a day.
pub struct Took(Option<PgInterval>);

impl From<Took> for Option<Duration> {
    fn from(took: Took) -> Self {
        let micros = took.0?.microseconds;
        Some(Duration::from_micros(u64::try_from(micros).unwrap_or(0)))
    }
}

impl<DB, ST> Queryable<ST, DB> for Took
where
    DB: diesel::backend::Backend,
    Option<PgInterval>: Queryable<ST, DB>,
{
    type Row = <Option<PgInterval> as Queryable<ST, DB>>::Row;

    fn build(row: Self::Row) -> diesel::deserialize::Result<Self> {
        Option::<PgInterval>::build(row).map(Self)
    }
}

/// What has happened to these messages, the first first.
pub(crate) fn history(
    conn: &mut PgConnection,
    name: &OutboxName,
    ids: &[Uuid],
) -> QueryResult<Vec<HistoryEntry>> {
    let entries = attempt::table(name.attempt())
        .filter(attempt::message_id.eq_any(ids))
        .order((attempt::happened_at, attempt::sequence))
        .limit(MOST)
        .select((
            attempt::sequence,
            attempt::message_id,
            attempt::destination,
            attempt::event,
            attempt::attempt,
            attempt::reason,
            attempt::error,
            attempt::http_status,
            attempt::response,
            attempt::took,
            attempt::relay,
            attempt::operator,
            attempt::happened_at,
        ));
    planned_anew(entries).load(conn)
}

/// A message that an operator has done something with.
#[derive(Debug, Queryable)]
pub(super) struct Touched {
    pub(super) sequence: i64,
    pub(super) message_id: Uuid,
    pub(super) topic: String,
    pub(super) destination: String,
    pub(super) tenant_id: Option<Uuid>,
}

/// Writes down that somebody has discarded these.
pub(super) fn note_discarded(
    conn: &mut PgConnection,
    name: &OutboxName,
    touched: &[Touched],
    operator: &str,
) -> QueryResult<()> {
    let open = || {
        let open = part::table(name.part())
            .filter(part::opened_at.is_not_null())
            .filter(part::closed_at.is_null())
            .select(part::part);
        // As `open_part`.
        part_or(open.single_value(), 0)
    };
    let row = |one: &Touched| {
        (
            attempt::part.eq(open()),
            attempt::sequence.eq(one.sequence),
            attempt::message_id.eq(one.message_id),
            attempt::topic.eq(one.topic.clone()),
            attempt::destination.eq(one.destination.clone()),
            attempt::tenant_id.eq(one.tenant_id),
            attempt::event.eq("discarded"),
            attempt::operator.eq(operator.to_owned()),
        )
    };
    let rows: Vec<_> = touched.iter().map(row).collect();
    insert_into(attempt::table(name.attempt()))
        .values(rows)
        .execute(conn)
        .map(drop)
}
