//! From what somebody knows of a message to its id and to the rows that live.
//!
//! Ledger, dead letters and history have an index of message ids. The outbox has none, because it would
//! cost every message for a question that is asked a few times a day. An id of the library's (a UUID of
//! version 7) says when it was made, and so about where to look; for others there is a time after
//! which the search ends.

use std::time::Duration;

use diesel::PgConnection;
use diesel::dsl::{max, min};
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    CombineDsl, ExpressionMethods, IntoSql, NullableExpressionMethods, OptionalExtension, QueryDsl,
    RunQueryDsl,
};
use diesel::query_dsl::methods::LoadQuery;
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Nullable};
use uuid::Uuid;

use super::MessageKey;
use crate::name::OutboxName;
use crate::store::looking::looking_briefly;
use crate::store::place::to_micros;
use crate::store::searched::{ALL, Deadline, Searched};
use crate::store::statement::{PlannedAnew, planned_anew};
use crate::store::table::{dead, ledger, outbox};

/// Live messages around the place where one of an id's time should be.
const AROUND: i64 = 50_000;

/// Sequences that bisecting leaves.
const NEAR: i64 = 10_000;

/// How long one probe of bisecting may take: usual is much less than a millisecond.
const PROBE: Duration = Duration::from_millis(200);

const SECOND: i64 = 1_000_000;

/// A row that was found.
#[derive(Debug, Clone, PartialEq, Eq, diesel::Queryable)]
pub(crate) struct Hit {
    pub(crate) message_id: Uuid,
    /// The key that the caller gave.
    pub(crate) idempotency_key: Option<String>,
    /// Its place in the outbox, where it lives.
    pub(crate) live: Option<i64>,
}

impl Hit {
    /// The key that is shown: the message id where the caller gave none.
    pub(crate) fn key(&self) -> String {
        let key = self.idempotency_key.clone();
        key.unwrap_or_else(|| self.message_id.to_string())
    }
}

/// A search under way.
struct Search<'a> {
    conn: &'a mut PgConnection,
    name: &'a OutboxName,
    deadline: Deadline,
    hits: Vec<Hit>,
    is_complete: bool,
}

/// The rows of the messages that `wanted` names.
pub(super) fn seek(
    conn: &mut PgConnection,
    name: &OutboxName,
    wanted: &MessageKey,
    deadline: Deadline,
) -> QueryResult<Searched<Hit>> {
    let mut search = Search {
        conn,
        name,
        deadline,
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
    // What an index finds comes first; tables are only read where that is nothing.
    if let Some(key) = key {
        search.by_key(&key)?;
    }
    if let Some(sequence) = sequence {
        search.by_sequence(sequence)?;
    }
    if let Some(id) = id.filter(|_| search.hits.is_empty()) {
        search.by_id(id)?;
    }
    if let Some(sequence) = sequence.filter(|_| search.hits.is_empty()) {
        search.in_ledger_by_sequence(sequence)?;
    }
    search.find_what_lives()?;
    Ok(Searched {
        rows: search.hits,
        is_complete: search.is_complete,
    })
}

/// The columns of a [`Hit`].
macro_rules! hit {
    (outbox) => {
        (
            outbox::message_id,
            outbox::idempotency_key,
            outbox::sequence.nullable(),
        )
    };
    ($settled:ident) => {
        (
            $settled::message_id,
            $settled::idempotency_key,
            None::<i64>.into_sql::<Nullable<BigInt>>(),
        )
    };
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

    /// Adds what a query finds, in the time that is left.
    fn add<'q, Q>(&mut self, query: Q) -> QueryResult<bool>
    where
        PlannedAnew<Q>: LoadQuery<'q, PgConnection, Hit>,
    {
        let Some(left) = self.deadline.left(ALL) else {
            self.is_complete = false;
            return Ok(false);
        };
        match looking_briefly(self.conn, left, |conn| planned_anew(query).load(conn))? {
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
        let live = self
            .outbox()
            .filter(outbox::idempotency_key.eq(key))
            .select(hit!(outbox));
        let settled = self
            .ledger()
            .filter(ledger::idempotency_key.eq(key))
            .select(hit!(ledger));
        let dead = self
            .dead()
            .filter(dead::idempotency_key.eq(key))
            .select(hit!(dead));
        self.add(live.union(settled).union(dead))
    }

    fn by_sequence(&mut self, sequence: i64) -> QueryResult<bool> {
        let live = self
            .outbox()
            .filter(outbox::sequence.eq(sequence))
            .select(hit!(outbox));
        let parts = self
            .outbox()
            .filter(outbox::split_from.eq(sequence))
            .select(hit!(outbox));
        let dead = self
            .dead()
            .filter(dead::sequence.eq(sequence))
            .select(hit!(dead));
        self.add(live.union(parts).union(dead))
    }

    fn in_ledger_by_sequence(&mut self, sequence: i64) -> QueryResult<bool> {
        let settled = self
            .ledger()
            .filter(ledger::sequence.eq(sequence))
            .select(hit!(ledger))
            .distinct();
        self.add(settled)
    }

    /// Of a message that was found settled, parts may live. Those with a key are found by it; those
    /// without one have no row here yet.
    fn find_what_lives(&mut self) -> QueryResult<()> {
        if self.hits.iter().any(|hit| hit.live.is_some()) {
            return Ok(());
        }
        let without_key = self.hits.iter().filter(|hit| hit.idempotency_key.is_none());
        let mut ids: Vec<Uuid> = without_key.map(|hit| hit.message_id).collect();
        ids.dedup();
        for id in ids {
            if let Some(at) = made_at(id) {
                self.live_around(id, at)?;
            }
        }
        Ok(())
    }

    fn by_id(&mut self, id: Uuid) -> QueryResult<()> {
        let settled = self
            .ledger()
            .filter(ledger::message_id.eq(id))
            .select(hit!(ledger));
        let dead = self
            .dead()
            .filter(dead::message_id.eq(id))
            .select(hit!(dead));
        let is_settled = self.add(settled.union(dead))?;
        let is_live = match made_at(id) {
            Some(at) => self.live_around(id, at)?,
            None => false,
        };
        if !is_settled && !is_live {
            self.live_anywhere(id)?;
        }
        Ok(())
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
            .select(hit!(outbox));
        self.add(near)
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

    fn live_anywhere(&mut self, id: Uuid) -> QueryResult<bool> {
        let live = self
            .outbox()
            .filter(outbox::message_id.eq(id))
            .select(hit!(outbox));
        self.add(live)
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
