//! A live message, read from its row.

use std::time::{Duration, Instant};

use diesel::dsl::case_when;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{ExpressionMethods, IntoSql, Queryable, Selectable};
use diesel::sql_types::Text;
use uuid::Uuid;

use super::functions::{JsonText, MaybeJson, On};
use super::table::outbox;
use crate::message::{Message, Sequence, digest, replays};
use crate::schema::values::system_time;
use crate::status::Status;

/// The columns of the outbox that relays need.
#[derive(Queryable, Selectable)]
#[diesel(table_name = outbox)]
pub(crate) struct LiveRow {
    pub(crate) sequence: i64,
    message_id: Uuid,
    topic: String,
    destination: String,
    #[diesel(deserialize_as = JsonText)]
    payload: String,
    #[diesel(deserialize_as = MaybeJson)]
    headers: Option<String>,
    ordering_key: Option<String>,
    idempotency_key: Option<String>,
    digest: Option<Vec<u8>>,
    tenant_id: Option<Uuid>,
    created_at: PgTimestamp,
    occurred_at: Option<PgTimestamp>,
    pub(crate) available_at: PgTimestamp,
    expires_at: Option<PgTimestamp>,
    attempts: i32,
    split_to: Option<String>,
    registration: Option<Uuid>,
}

impl LiveRow {
    /// The idempotency key, and the destination for which it counts.
    pub(crate) fn key(&self) -> Option<(String, String)> {
        let key = self.idempotency_key.clone()?;
        Some((key, self.destination.clone()))
    }

    /// Whether the content has the digest `delivered`. Plain inserts write no digest, so it is computed.
    pub(crate) fn has_content(&self, delivered: &[u8]) -> bool {
        match &self.digest {
            Some(digest) => digest == delivered,
            None => digest(&self.topic, &self.payload) == delivered,
        }
    }

    /// The message. `claimed_at` is the time of the claim by the database's clock, `before` a moment before the claim
    /// by this process's clock.
    pub(crate) fn into_message(self, claimed_at: PgTimestamp, before: Instant) -> Message {
        let expires = self
            .expires_at
            .and_then(|at| expiry(at, claimed_at, before));
        Message {
            sequence: Sequence(self.sequence),
            message_id: self.message_id,
            topic: self.topic,
            destination: self.destination,
            payload: self.payload,
            headers: self.headers,
            ordering_key: self.ordering_key,
            idempotency_key: match self.idempotency_key {
                Some(key) => replays::same_message(&key)
                    .map(str::to_owned)
                    .unwrap_or(key),
                None => self.message_id.to_string(),
            },
            tenant_id: self.tenant_id,
            created_at: system_time(self.created_at),
            occurred_at: self.occurred_at.map(system_time),
            age: between(self.created_at, claimed_at),
            claimed: before,
            attempts: u32::try_from(self.attempts).unwrap_or(0),
            expires,
            available_at: self.available_at.0,
            claimed_at: claimed_at.0,
            in_a_row: 0,
            split_to: self.split_to,
            registration: self.registration,
        }
    }
}

/// The status of a live message: `sending`, `retrying` or `pending`.
pub(crate) fn status() -> On<'static, outbox::table, Text> {
    let word = |status: Status| status.as_str().into_sql::<Text>();
    let status = case_when(outbox::locked_by.is_not_null(), word(Status::Sending))
        .when(outbox::attempts.gt(0), word(Status::Retrying))
        .otherwise(word(Status::Pending));
    Box::new(status)
}

/// When a message claimed at `claimed_at` expires, by this process's clock.
fn expiry(at: PgTimestamp, claimed_at: PgTimestamp, before: Instant) -> Option<Instant> {
    // PostgreSQL's infinity.
    if at.0 == i64::MAX {
        return None;
    }
    // No message stays in a relay's memory for as long as the longest wait.
    // At most a year, as by `clock::after`, which only relays have: nothing overflows.
    let wait = between(claimed_at, at).min(Duration::from_secs(365 * 24 * 3600));
    before.checked_add(wait)
}

/// The time between `from` and a later time; zero if `to` is earlier.
fn between(from: PgTimestamp, to: PgTimestamp) -> Duration {
    Duration::from_micros(u64::try_from(to.0.saturating_sub(from.0)).unwrap_or(0))
}
