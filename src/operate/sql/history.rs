//! The history of messages: failed attempts, and actions of operators.

use std::time::Duration;

use diesel::data_types::PgInterval;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, QueryDsl, Queryable, RunQueryDsl, Selectable,
    SelectableHelper,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, insert_into};
use uuid::Uuid;

use crate::endpoints::sql::recipient::Recipient;
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::schema::rfc3339::Rfc3339;
use crate::sql::functions::On;
use crate::sql::looking::looking_briefly;
use crate::sql::open_part_now;
use crate::sql::statement::unprepared;
use crate::sql::table::{attempt, outbox};
use crate::words::words;

/// The most entries that one query returns.
const MOST: i64 = 1000;

/// An event in the history of a message: a failed attempt, or an action of an operator.
#[derive(Debug, Clone, Queryable, Selectable)]
#[diesel(table_name = attempt)]
#[non_exhaustive]
pub struct HistoryEntry {
    /// The sequence of the message: its place in the outbox.
    pub sequence: Sequence,
    /// The message id, as receivers see it.
    pub message_id: Uuid,
    /// The destination that was used; empty if none was used.
    pub destination: String,
    /// `failed`, `retried`, `requeued`, `discarded`, `replayed`, `repeated` (delivered before, and not sent again) or
    /// `conflict` (the result of a send was discarded, because the relay had lost its lease).
    pub event: String,
    /// The number of the failed attempt, from 1.
    pub attempt: Option<i32>,
    /// Why the attempt failed: the name of a [`ReasonCode`](crate::ReasonCode).
    pub reason: Option<String>,
    /// The error of the attempt.
    pub error: Option<String>,
    /// The HTTP status of the response.
    pub http_status: Option<i32>,
    /// The beginning of the response.
    pub response: Option<String>,
    /// How long the send took.
    #[diesel(deserialize_as = Took)]
    pub took: Option<Duration>,
    /// The relay that sent the message.
    pub relay: Option<String>,
    /// Who acted and why; only for actions of operators.
    pub operator: Option<String>,
    /// When it happened, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub happened_at: String,
}

/// How long a send took: an interval of less than a day.
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

/// The history of these messages, oldest first.
pub(crate) fn history(
    conn: &mut PgConnection,
    name: &OutboxName,
    ids: &[Uuid],
) -> QueryResult<Vec<HistoryEntry>> {
    entries(conn, name, Box::new(attempt::message_id.eq_any(ids)))
}

/// How long a search by sequence may take: no index has it.
const PATIENCE: Duration = Duration::from_secs(2);

/// The history of messages that had this sequence, oldest first. `None`: the search took too long.
pub(crate) fn of_sequence(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequence: i64,
) -> QueryResult<Option<Vec<HistoryEntry>>> {
    looking_briefly(conn, PATIENCE, |conn| {
        entries(conn, name, Box::new(attempt::sequence.eq(sequence)))
    })
}

/// The failed attempts to send this message to this recipient, oldest first.
pub(super) fn failed(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: Uuid,
    to: Recipient<'_>,
) -> QueryResult<Vec<HistoryEntry>> {
    let is_failed = attempt::event.eq("failed");
    entries(conn, name, Box::new(to.history(message_id).and(is_failed)))
}

fn entries(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: On<'_, attempt::table>,
) -> QueryResult<Vec<HistoryEntry>> {
    let entries = attempt::table(name.attempt())
        .filter(which)
        .order((attempt::happened_at, attempt::sequence))
        .limit(MOST)
        .select(HistoryEntry::as_select());
    unprepared(entries).load(conn)
}

words! {
    /// What an operator has done to a message.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(super) enum Event {
        Discarded = "discarded",
        Retried = "retried",
    }
}

/// A message on which an operator has acted.
#[derive(Debug, Queryable, Selectable)]
#[diesel(table_name = outbox)]
pub(super) struct Touched {
    sequence: i64,
    message_id: Uuid,
    topic: String,
    destination: String,
    tenant_id: Option<Uuid>,
}

/// Records what an operator has done to these messages, and why.
pub(super) fn note(
    conn: &mut PgConnection,
    name: &OutboxName,
    touched: &[Touched],
    event: Event,
    operator: &str,
) -> QueryResult<()> {
    let open = open_part_now(conn, name)?;
    let row = |one: &Touched| {
        (
            attempt::part.eq(open),
            attempt::sequence.eq(one.sequence),
            attempt::message_id.eq(one.message_id),
            attempt::topic.eq(one.topic.clone()),
            attempt::destination.eq(one.destination.clone()),
            attempt::tenant_id.eq(one.tenant_id),
            attempt::event.eq(event.as_str()),
            attempt::operator.eq(operator.to_owned()),
        )
    };
    let rows: Vec<_> = touched.iter().map(row).collect();
    insert_into(attempt::table(name.attempt()))
        .values(rows)
        .execute(conn)
        .map(drop)
}

/// The same for live messages.
pub(super) fn note_live(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
    event: Event,
    operator: &str,
) -> QueryResult<()> {
    let touched = outbox::table(name.outbox())
        .filter(outbox::sequence.eq_any(sequences))
        .order(outbox::sequence)
        .select(Touched::as_select());
    let touched: Vec<Touched> = unprepared(touched).load(conn)?;
    note(conn, name, &touched, event, operator)
}
