//! Finds the rows of a message by message id, idempotency key or sequence.
//!
//! Ledger, dead letters and history have an index of message ids. The outbox has none: the index would cost every
//! message, for a question that is asked a few times a day. An id made by the library (a UUID of version 7) contains
//! its time, and so leads to about the right place. For other ids, the search stops after a time limit.
//!
//! After a fan-out, the row of one destination may be settled while the row of another waits. So settled rows lead to
//! live rows. Live rows are searched first, so that a message that is settled meanwhile is found.

use std::time::Duration;

use diesel::PgConnection;
use diesel::dsl::{array, max, min};
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, CombineDsl, ExpressionMethods, IntoSql, NullableExpressionMethods,
    OptionalExtension, QueryDsl, RunQueryDsl,
};
use diesel::query_dsl::methods::LoadQuery;
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool};
use uuid::Uuid;

use super::searched::{ALL, SearchDeadline, Searched};
use crate::name::OutboxName;
use crate::schema::values::to_micros;
use crate::sql::functions::On;
use crate::sql::looking::looking_briefly;
use crate::sql::statement::{PlannedAnew, unprepared};
use crate::sql::table::{candidate, dead, ledger, outbox};

/// How many sequences to search before and after the place that the time of an id leads to.
const AROUND: i64 = 50_000;

/// The number of sequences at which bisecting stops.
const NEAR: i64 = 10_000;

/// How far apart the sequences of one fan-out can be: one statement inserts all of its rows, while others enqueue.
const BESIDE: i64 = 10_000;

/// How long one probe of bisecting may take; it usually takes much less than 1 ms.
const PROBE: Duration = Duration::from_millis(200);

const SECOND: i64 = 1_000_000;

/// What to search for a message by.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessageKey {
    /// The message id, as receivers see it.
    Id(Uuid),
    /// The idempotency key.
    Key(String),
    /// The sequence: the place in the outbox.
    Sequence(i64),
    /// Any of these, as typed by a person.
    Text(String),
}

/// A found row.
#[derive(Debug, Clone, PartialEq, Eq, diesel::Queryable)]
pub(crate) struct Hit {
    pub(crate) message_id: Uuid,
    /// The key that the caller gave.
    pub(crate) idempotency_key: Option<String>,
    sequence: i64,
    is_live: bool,
}

impl Hit {
    /// The sequence, if the row is live.
    pub(crate) fn live(&self) -> Option<i64> {
        self.is_live.then_some(self.sequence)
    }

    /// The key to show: the message id if the caller gave no key.
    pub(crate) fn key(&self) -> String {
        let key = self.idempotency_key.clone();
        key.unwrap_or_else(|| self.message_id.to_string())
    }
}

/// Selects the live messages among these hits, the other rows of their fan-outs, and all live messages with one of
/// their keys.
pub(crate) fn live_ones<'a>(name: &OutboxName, hits: &'a [Hit]) -> On<'a, outbox::table> {
    let places: Vec<i64> = hits.iter().filter_map(Hit::live).collect();
    let keys = hits.iter().filter_map(|hit| hit.idempotency_key.as_deref());
    let wholes = candidate::table(name.outbox())
        .filter(candidate::sequence.eq_any(places.clone()))
        .select(candidate::split_from.assume_not_null());
    let split_from = || outbox::split_from.assume_not_null();
    let is_one = outbox::sequence
        .eq_any(places.clone())
        .or(split_from().eq_any(places))
        .or(split_from().eq_any(array::<BigInt, _>(wholes)))
        .or(outbox::idempotency_key
            .assume_not_null()
            .eq_any(keys.collect::<Vec<_>>()));
    Box::new(is_one)
}

/// A search in progress.
struct Seek<'a> {
    conn: &'a mut PgConnection,
    name: &'a OutboxName,
    deadline: SearchDeadline,
    hits: Vec<Hit>,
    is_complete: bool,
}

/// The rows of the messages that `wanted` names, live and settled.
pub(crate) fn seek(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &MessageKey,
) -> QueryResult<Searched<Hit>> {
    let mut search = Seek {
        conn,
        name,
        deadline: SearchDeadline::new(),
        hits: Vec::new(),
        is_complete: true,
    };
    let (key, id, sequence) = match wanted {
        MessageKey::Id(id) => (None, Some(*id), None),
        MessageKey::Key(key) => (Some(key.clone()), key.parse().ok(), None),
        MessageKey::Sequence(sequence) => (None, None, Some(*sequence)),
        MessageKey::Text(text) => {
            let text = text.trim();
            (Some(text.to_owned()), text.parse().ok(), text.parse().ok())
        }
    };
    // Indexes first.
    if let Some(key) = key {
        search.by_key(&key)?;
    }
    if let Some(sequence) = sequence {
        search.by_sequence(sequence)?;
        // Reads the table, because a settled message may have the sequence of a live one.
        search.in_ledger_by_sequence(sequence)?;
    }
    match id.filter(|_| search.hits.is_empty()) {
        Some(id) => search.by_id(id)?,
        None => drop(search.live_beside_settled()?),
    }
    Ok(Searched {
        rows: search.hits,
        is_complete: search.is_complete,
    })
}

/// The rows of a table that match a condition, as [`Hit`]s.
macro_rules! hits {
    ($search:ident in $table:ident, $is_live:literal, $is_so:expr) => {
        $table::table($search.name.$table()).filter($is_so).select((
            $table::message_id,
            $table::idempotency_key,
            $table::sequence,
            $is_live.into_sql::<Bool>(),
        ))
    };
}

impl Seek<'_> {
    fn outbox(&self) -> outbox::table {
        outbox::table(self.name.outbox())
    }

    /// Adds the rows that a query finds in the time left. Returns whether it found any.
    fn add<'q, Q>(&mut self, query: Q) -> QueryResult<bool>
    where
        PlannedAnew<Q>: LoadQuery<'q, PgConnection, Hit>,
    {
        let Some(left) = self.deadline.left(ALL) else {
            self.is_complete = false;
            return Ok(false);
        };
        match looking_briefly(self.conn, left, |conn| unprepared(query).load(conn))? {
            Some(hits) => {
                let found = !hits.is_empty();
                self.hits.extend(hits);
                Ok(found)
            }
            None => {
                self.is_complete = false;
                Ok(false)
            }
        }
    }

    fn by_key(&mut self, key: &str) -> QueryResult<bool> {
        let live = hits!(self in outbox, true, outbox::idempotency_key.eq(key));
        let settled = hits!(self in ledger, false, ledger::idempotency_key.eq(key));
        let dead = hits!(self in dead, false, dead::idempotency_key.eq(key));
        self.add(live.union(settled).union(dead))
    }

    fn by_sequence(&mut self, sequence: i64) -> QueryResult<bool> {
        let live = hits!(self in outbox, true, outbox::sequence.eq(sequence));
        let parts = hits!(self in outbox, true, outbox::split_from.eq(sequence));
        let dead = hits!(self in dead, false, dead::sequence.eq(sequence));
        self.add(live.union(parts).union(dead))
    }

    fn in_ledger_by_sequence(&mut self, sequence: i64) -> QueryResult<bool> {
        // The parts of a settled fan-out keep the sequence that the application knows.
        let is_one = ledger::sequence.nullable().eq(sequence);
        let is_one = is_one.or(ledger::split_from.eq(sequence));
        let settled = hits!(self in ledger, false, is_one);
        self.add(settled.distinct())
    }

    /// An id of version 7 leads to the live message. Any other id is searched for in the whole outbox, even if settled
    /// rows are found, because other rows of the message may be live.
    fn by_id(&mut self, id: Uuid) -> QueryResult<()> {
        let made_at = made_at(id);
        let mut is_live = match made_at {
            Some(at) => self.live_around(id, at)?,
            None => false,
        };
        let settled = hits!(self in ledger, false, ledger::message_id.eq(id));
        let dead = hits!(self in dead, false, dead::message_id.eq(id));
        let is_settled = self.add(settled.union(dead))?;
        is_live = is_live || self.live_beside_settled()?;
        if !is_live && (made_at.is_none() || !is_settled) {
            self.live_anywhere(id)?;
        }
        Ok(())
    }

    /// Rows of a message that was found settled may be live. With a key, they are found by the key; without a key, they
    /// are searched for near the settled rows.
    fn live_beside_settled(&mut self) -> QueryResult<bool> {
        if self.hits.iter().any(|hit| hit.is_live) {
            return Ok(true);
        }
        let without_key = self.hits.iter().filter(|hit| hit.idempotency_key.is_none());
        let mut settled: Vec<(Uuid, i64)> = without_key
            .map(|hit| (hit.message_id, hit.sequence))
            .collect();
        settled.sort_unstable();
        let mut is_live = false;
        let is_near =
            |a: &(Uuid, i64), b: &(Uuid, i64)| a.0 == b.0 && b.1.saturating_sub(a.1) < BESIDE;
        for parts in settled.chunk_by(is_near) {
            let ((id, first), (_, last)) = (parts[0], parts[parts.len() - 1]);
            is_live |= self.live_between(
                id,
                first.saturating_sub(BESIDE),
                last.saturating_add(BESIDE),
            )?;
        }
        Ok(is_live)
    }

    /// Sequences grow with time, so bisecting finds the place of a time.
    fn live_around(&mut self, id: Uuid, at: i64) -> QueryResult<bool> {
        let Some((mut first, mut last)) = self.bounds()? else {
            return Ok(false);
        };
        while last.saturating_sub(first) > NEAR {
            let middle = first + (last - first) / 2;
            match self.created_at_or_behind(middle)? {
                Some(created_at) if created_at < at => first = middle,
                Some(_) => last = middle,
                None => return Ok(false),
            }
        }
        self.live_between(
            id,
            first.saturating_sub(AROUND),
            last.saturating_add(AROUND),
        )
    }

    fn live_between(&mut self, id: Uuid, first: i64, last: i64) -> QueryResult<bool> {
        let is_between = outbox::sequence.between(first, last);
        let is_one = is_between.and(outbox::message_id.eq(id));
        self.add(hits!(self in outbox, true, is_one))
    }

    fn bounds(&mut self) -> QueryResult<Option<(i64, i64)>> {
        let bounds = self
            .outbox()
            .select((min(outbox::sequence), max(outbox::sequence)));
        let found = self.probe(|conn| bounds.get_result::<(Option<i64>, Option<i64>)>(conn))?;
        Ok(found.and_then(|(first, last)| Some((first?, last?))))
    }

    /// When the first live message at or after this sequence was enqueued.
    fn created_at_or_behind(&mut self, sequence: i64) -> QueryResult<Option<i64>> {
        let behind = self
            .outbox()
            .filter(outbox::sequence.ge(sequence))
            .order(outbox::sequence)
            .select(outbox::created_at);
        let found = self.probe(|conn| behind.first::<PgTimestamp>(conn).optional())?;
        Ok(found.flatten().map(to_micros))
    }

    fn probe<T>(
        &mut self,
        probe: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
    ) -> QueryResult<Option<T>> {
        match self.deadline.left(PROBE) {
            Some(left) => looking_briefly(self.conn, left, probe),
            None => Ok(None),
        }
    }

    fn live_anywhere(&mut self, id: Uuid) -> QueryResult<bool> {
        self.add(hits!(self in outbox, true, outbox::message_id.eq(id)))
    }
}

/// When an id of version 7 was made, in microseconds since 1970.
fn made_at(id: Uuid) -> Option<i64> {
    if id.get_version_num() != 7 {
        return None;
    }
    let (seconds, nanos) = id.get_timestamp()?.to_unix();
    let seconds = i64::try_from(seconds).ok()?;
    Some(seconds.checked_mul(SECOND)? + i64::from(nanos) / 1000)
}
