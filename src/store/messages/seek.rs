//! From what somebody knows of a message to its idempotency key, which is what the tables are indexed by.
//!
//! Neither the outbox nor the ledger has an index of message ids: each would cost every message for a
//! question that is asked a few times a day. An id of the library's (a UUID of version 7) says when it
//! was made, and so about where to look; for others there is a time after which the search ends.

use std::time::Duration;

use diesel::dsl::{exists, max, min};
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, CombineDsl, ExpressionMethods, IntoSql, OptionalExtension, QueryDsl,
    RunQueryDsl,
};
use diesel::query_dsl::methods::LoadQuery;
use diesel::result::QueryResult;
use diesel::sql_types::Text;
use diesel::{PgConnection, select};
use uuid::Uuid;

use super::super::looking::looking_briefly;
use super::super::place::{from_micros, to_micros};
use super::super::searched::{ALL, Deadline, Searched};
use super::super::statement::{PlannedAnew, planned_anew};
use super::super::table::{dead, ledger, outbox};
use super::MessageKey;
use crate::name::OutboxName;

/// Live messages around the place where one of an id's time should be.
const AROUND: i64 = 50_000;

/// Sequences that bisecting leaves.
const NEAR: i64 = 10_000;

/// How long one probe of bisecting may take: usual is much less than a millisecond.
const PROBE: Duration = Duration::from_millis(200);

const SECOND: i64 = 1_000_000;
const HOUR: i64 = 3600 * SECOND;

/// Where in the ledger a message of an id's time is looked for: microseconds after it, the likely ones
/// first; at last before and after all of these.
const WINDOWS: [(i64, i64); 7] = [
    (-10 * SECOND, 60 * SECOND),
    (60 * SECOND, HOUR),
    (-HOUR, -10 * SECOND),
    (HOUR, 24 * HOUR),
    (24 * HOUR, 240 * HOUR),
    (240 * HOUR, i64::MAX),
    (i64::MIN, -HOUR),
];

/// A search under way.
struct Search<'a> {
    conn: &'a mut PgConnection,
    name: &'a OutboxName,
    deadline: Deadline,
    keys: Vec<String>,
    is_complete: bool,
}

/// The idempotency keys of the messages that `wanted` names.
pub(super) fn keys(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &MessageKey,
    deadline: Deadline,
) -> QueryResult<Searched<String>> {
    let mut search = Search {
        conn,
        name,
        deadline,
        keys: Vec::new(),
        is_complete: true,
    };
    let (key, id, sequence) = match wanted {
        MessageKey::Id(id) => (None, Some(*id), None),
        MessageKey::Key(key) => (Some(key.clone()), None, None),
        MessageKey::Sequence(sequence) => (None, None, Some(*sequence)),
        MessageKey::Text(text) => {
            let text = text.trim();
            (Some(text.to_owned()), text.parse().ok(), text.parse().ok())
        }
    };
    // What an index finds comes first; tables are only read where that is nothing.
    if let Some(key) = key {
        search.by_key(&key)?;
    }
    if let Some(sequence) = sequence {
        search.by_sequence(sequence)?;
    }
    if let Some(id) = id.filter(|_| search.keys.is_empty()) {
        search.by_id(id)?;
    }
    if let Some(sequence) = sequence.filter(|_| search.keys.is_empty()) {
        search.in_ledger_by_sequence(sequence)?;
    }
    Ok(Searched {
        rows: search.keys,
        is_complete: search.is_complete,
    })
}

impl Search<'_> {
    fn outbox(&self) -> outbox::table {
        outbox::table(self.name.outbox())
    }

    fn dead(&self) -> dead::table {
        dead::table(self.name.dead())
    }

    fn ledger(&self) -> ledger::table {
        ledger::table(self.name.ledger())
    }

    /// Adds the keys that a query finds, in the time that is left.
    fn add<'q, Q>(&mut self, most: Duration, query: Q) -> QueryResult<bool>
    where
        PlannedAnew<Q>: LoadQuery<'q, PgConnection, String>,
    {
        let Some(left) = self.deadline.left(most) else {
            self.is_complete = false;
            return Ok(false);
        };
        match looking_briefly(self.conn, left, |conn| planned_anew(query).load(conn))? {
            Some(keys) => {
                let found = !keys.is_empty();
                self.keys.extend(keys);
                Ok(found)
            }
            None => {
                self.is_complete = false;
                Ok(false)
            }
        }
    }

    fn by_key(&mut self, key: &str) -> QueryResult<bool> {
        let is_live = exists(
            self.outbox()
                .filter(outbox::idempotency_key.eq(key))
                .select(outbox::sequence),
        );
        let is_settled = exists(
            self.ledger()
                .filter(ledger::idempotency_key.eq(key))
                .select(ledger::sequence),
        );
        let is_dead = exists(
            self.dead()
                .filter(dead::idempotency_key.eq(key))
                .select(dead::sequence),
        );
        let query = select(key.into_sql::<Text>()).filter(is_live.or(is_settled).or(is_dead));
        self.add(ALL, query)
    }

    fn by_sequence(&mut self, sequence: i64) -> QueryResult<bool> {
        let live = self
            .outbox()
            .filter(outbox::sequence.eq(sequence))
            .select(outbox::idempotency_key);
        let parts = self
            .outbox()
            .filter(outbox::split_from.eq(sequence))
            .select(outbox::idempotency_key);
        let dead = self
            .dead()
            .filter(dead::sequence.eq(sequence))
            .select(dead::idempotency_key);
        self.add(ALL, live.union(parts).union(dead))
    }

    fn in_ledger_by_sequence(&mut self, sequence: i64) -> QueryResult<bool> {
        let settled = self
            .ledger()
            .filter(ledger::sequence.eq(sequence))
            .select(ledger::idempotency_key);
        self.add(ALL, settled)
    }

    fn by_id(&mut self, id: Uuid) -> QueryResult<bool> {
        let dead = self
            .dead()
            .filter(dead::message_id.eq(id))
            .select(dead::idempotency_key)
            .distinct();
        let found = self.add(ALL, dead)?;
        if found {
            return Ok(true);
        }
        match made_at(id) {
            Some(at) => Ok(self.live_around(id, at)?
                || self.in_ledger_around(id, at)?
                || self.live_anywhere(id)?),
            None => Ok(self.live_anywhere(id)? || self.in_ledger_anywhere(id)?),
        }
    }

    /// Sequences grow with time, so the place of a time is found by bisecting.
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
        let near = self
            .outbox()
            .filter(outbox::sequence.ge(first.saturating_sub(AROUND)))
            .filter(outbox::sequence.le(last.saturating_add(AROUND)))
            .filter(outbox::message_id.eq(id))
            .select(outbox::idempotency_key)
            .distinct();
        self.add(ALL, near)
    }

    fn bounds(&mut self) -> QueryResult<Option<(i64, i64)>> {
        let bounds = self
            .outbox()
            .select((min(outbox::sequence), max(outbox::sequence)));
        let found = self.probe(|conn| bounds.get_result::<(Option<i64>, Option<i64>)>(conn))?;
        Ok(found.and_then(|(first, last)| Some((first?, last?))))
    }

    /// When the first live message from this sequence on was enqueued.
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

    fn in_ledger_around(&mut self, id: Uuid, at: i64) -> QueryResult<bool> {
        for (from, to) in WINDOWS {
            let time = |offset: i64| match offset {
                i64::MIN | i64::MAX => PgTimestamp(offset),
                offset => from_micros(at.saturating_add(offset)),
            };
            let settled = self
                .ledger()
                .filter(ledger::settled_at.ge(time(from)))
                .filter(ledger::settled_at.lt(time(to)))
                .filter(ledger::message_id.eq(id))
                .select(ledger::idempotency_key)
                .distinct();
            let found = self.add(ALL, settled)?;
            if found {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn live_anywhere(&mut self, id: Uuid) -> QueryResult<bool> {
        let live = self
            .outbox()
            .filter(outbox::message_id.eq(id))
            .select(outbox::idempotency_key)
            .distinct();
        self.add(ALL, live)
    }

    fn in_ledger_anywhere(&mut self, id: Uuid) -> QueryResult<bool> {
        let settled = self
            .ledger()
            .filter(ledger::message_id.eq(id))
            .select(ledger::idempotency_key)
            .distinct();
        self.add(ALL, settled)
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
