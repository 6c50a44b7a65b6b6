//! From what somebody knows of a message to its idempotency key, which is what the tables are indexed by.
//!
//! Neither the outbox nor the ledger has an index of message ids: each would cost every message for a
//! question that is asked a few times a day. An id of the library's (a UUID of version 7) says when it
//! was made, and so about where to look; for others there is a time after which the search ends.

use std::time::Duration;

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Nullable, Text, Timestamptz, Uuid as SqlUuid};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use uuid::Uuid;

use super::super::looking::looking_briefly;
use super::super::place::{from_micros, micros};
use super::super::searched::{ALL, Deadline, Searched};
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

#[derive(diesel::QueryableByName)]
struct KeyRow {
    #[diesel(sql_type = Text)]
    idempotency_key: String,
}

#[derive(diesel::QueryableByName)]
struct PlaceRow {
    #[diesel(sql_type = Nullable<BigInt>)]
    sequence: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    micros: Option<i64>,
}

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
    /// Adds the keys that a statement finds, in the time that is left.
    fn add<'q, Q>(&mut self, most: Duration, query: impl FnOnce() -> Q) -> QueryResult<bool>
    where
        Q: diesel::query_dsl::methods::LoadQuery<'q, PgConnection, KeyRow>,
    {
        let Some(left) = self.deadline.left(most) else {
            self.is_complete = false;
            return Ok(false);
        };
        match looking_briefly(self.conn, left, |conn| query().load::<KeyRow>(conn))? {
            Some(rows) => {
                let found = !rows.is_empty();
                self.keys
                    .extend(rows.into_iter().map(|row| row.idempotency_key));
                Ok(found)
            }
            None => {
                self.is_complete = false;
                Ok(false)
            }
        }
    }

    fn by_key(&mut self, key: &str) -> QueryResult<bool> {
        let sql = format!(
            "SELECT $1::text AS idempotency_key
              WHERE EXISTS (SELECT FROM {} WHERE idempotency_key = $1)
                 OR EXISTS (SELECT FROM {} WHERE idempotency_key = $1)
                 OR EXISTS (SELECT FROM {} WHERE idempotency_key = $1)",
            self.name.outbox(),
            self.name.ledger(),
            self.name.dead(),
        );
        self.add(ALL, || sql_query(sql).bind::<Text, _>(key.to_owned()))
    }

    fn by_sequence(&mut self, sequence: i64) -> QueryResult<bool> {
        let sql = format!(
            "SELECT idempotency_key FROM {outbox} WHERE sequence = $1
             UNION SELECT idempotency_key FROM {outbox} WHERE split_from = $1
             UNION SELECT idempotency_key FROM {} WHERE sequence = $1",
            self.name.dead(),
            outbox = self.name.outbox(),
        );
        self.add(ALL, || sql_query(sql).bind::<BigInt, _>(sequence))
    }

    fn in_ledger_by_sequence(&mut self, sequence: i64) -> QueryResult<bool> {
        let sql = format!(
            "SELECT idempotency_key FROM {} WHERE sequence = $1",
            self.name.ledger(),
        );
        self.add(ALL, || sql_query(sql).bind::<BigInt, _>(sequence))
    }

    fn by_id(&mut self, id: Uuid) -> QueryResult<bool> {
        let sql = format!(
            "SELECT DISTINCT idempotency_key FROM {} WHERE message_id = $1",
            self.name.dead(),
        );
        let found = self.add(ALL, || sql_query(sql).bind::<SqlUuid, _>(id))?;
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
        let sql = format!(
            "SELECT DISTINCT idempotency_key FROM {}
              WHERE sequence BETWEEN $2 AND $3 AND message_id = $1",
            self.name.outbox(),
        );
        self.add(ALL, || {
            sql_query(sql)
                .bind::<SqlUuid, _>(id)
                .bind::<BigInt, _>(first.saturating_sub(AROUND))
                .bind::<BigInt, _>(last.saturating_add(AROUND))
        })
    }

    fn bounds(&mut self) -> QueryResult<Option<(i64, i64)>> {
        // As one, the middle would be the first and the last.
        let sql = format!(
            "SELECT min(sequence) AS sequence, max(sequence) AS micros FROM {}",
            self.name.outbox()
        );
        let row = self.probe(|conn| sql_query(sql).get_result::<PlaceRow>(conn))?;
        Ok(row.and_then(|row| Some((row.sequence?, row.micros?))))
    }

    /// When the first live message from this sequence on was enqueued.
    fn created_at_or_behind(&mut self, sequence: i64) -> QueryResult<Option<i64>> {
        let sql = format!(
            "SELECT sequence, {} AS micros FROM {} WHERE sequence >= $1 ORDER BY sequence LIMIT 1",
            micros("created_at"),
            self.name.outbox(),
        );
        let row = self.probe(|conn| {
            let query = sql_query(sql).bind::<BigInt, _>(sequence);
            query.get_results::<PlaceRow>(conn)
        })?;
        Ok(row.and_then(|rows| rows.first().and_then(|row| row.micros)))
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
            let sql = format!(
                "SELECT DISTINCT idempotency_key FROM {}
                  WHERE settled_at >= $2 AND settled_at < $3 AND message_id = $1",
                self.name.ledger(),
            );
            let time = |offset: i64| match offset {
                i64::MIN | i64::MAX => PgTimestamp(offset),
                offset => from_micros(at.saturating_add(offset)),
            };
            let found = self.add(ALL, || {
                sql_query(sql)
                    .bind::<SqlUuid, _>(id)
                    .bind::<Timestamptz, _>(time(from))
                    .bind::<Timestamptz, _>(time(to))
            })?;
            if found {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn live_anywhere(&mut self, id: Uuid) -> QueryResult<bool> {
        self.anywhere(self.name.outbox(), id)
    }

    fn in_ledger_anywhere(&mut self, id: Uuid) -> QueryResult<bool> {
        self.anywhere(self.name.ledger(), id)
    }

    fn anywhere(&mut self, table: String, id: Uuid) -> QueryResult<bool> {
        let sql = format!("SELECT DISTINCT idempotency_key FROM {table} WHERE message_id = $1");
        self.add(ALL, || sql_query(sql).bind::<SqlUuid, _>(id))
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
