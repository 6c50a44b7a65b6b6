//! Events about the outbox itself (`OUTBOX_OWN_EVENTS`): messages in the same outbox, written in the transaction that
//! caused the event, and routed like any message. Each is about an endpoint, and has its tenant.
//!
//! Why: docs/decisions.md#own-events

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{ExpressionMethods, NullableExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::{PgConnection, delete, insert_into, select};
use serde_json::{Value, json};
use uuid::Uuid;

use super::failing::{EpisodeTurn, TurnedEpisode};
use super::rows::{self, AsSeen};
use super::unread::UnreadTurn;
use crate::endpoints::public_error::of_disabled;
use crate::engine::send::gate::GateNews;
use crate::engine::send::sql::pause;
use crate::engine::settle::sql::settle::Failed;
use crate::engine::settle::sql::witness::Witness;
use crate::hand::Hand;
use crate::message::{Message, digest};
use crate::name::OutboxName;
use crate::own_topics::{DEAD, DISABLED, FAILING, OPENED, PAUSED, RECOVERED, UNREAD, is_own};
use crate::schema::rfc3339::rfc3339;
use crate::sql::functions::{Json, JsonText, clock_timestamp};
use crate::sql::table::outbox;
use crate::status::ReasonCode;

const MINUTE_MICROS: i64 = 60_000_000;

/// An event that is sent at once.
fn write(
    conn: &mut PgConnection,
    name: &OutboxName,
    topic: &'static str,
    destination: &str,
    facts: Value,
) -> QueryResult<()> {
    let tenants = rows::tenants(conn, name, &[destination])?;
    let tenant_id = tenants.get(destination).copied();
    insert_into(outbox::table(name.outbox()))
        .values((
            outbox::message_id.eq(Uuid::now_v7()),
            outbox::topic.eq(topic),
            outbox::payload.eq(Json(&payload(destination, tenant_id, facts))),
            outbox::tenant_id.eq(tenant_id),
        ))
        .execute(conn)
        .map(drop)
}

/// The endpoint, its tenant and these facts, as JSON.
fn payload(destination: &str, tenant_id: Option<Uuid>, facts: Value) -> String {
    let mut all = json!({
        "destination": destination,
        "tenant_id": tenant_id.map(|id| id.to_string()),
    });
    if let (Value::Object(all), Value::Object(facts)) = (&mut all, facts) {
        all.extend(facts);
    }
    all.to_string()
}

/// Writes the event that the endpoint fails from now on, or works again.
pub(crate) fn tell_failing(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
    (turn, since, reason): TurnedEpisode,
) -> QueryResult<()> {
    let mut facts = json!({ "failing_since": rfc3339(since) });
    let topic = match turn {
        EpisodeTurn::Fails => {
            facts["reason"] = reason.map(ReasonCode::as_str).into();
            FAILING
        }
        EpisodeTurn::Works => RECOVERED,
    };
    write(conn, name, topic, destination, facts)
}

/// Writes the event that nobody reads the feed, or that it is read again.
pub(crate) fn tell_unread(
    conn: &mut PgConnection,
    name: &OutboxName,
    feed: &str,
    turn: UnreadTurn,
) -> QueryResult<()> {
    let (topic, since) = match turn {
        UnreadTurn::Unread(since) => (UNREAD, since),
        UnreadTurn::Read(since) => (RECOVERED, since),
    };
    let facts = json!({ "unread_since": rfc3339(since) });
    write(conn, name, topic, feed, facts)
}

/// Like [`disable_as_seen`](endpoints::disable_as_seen), and writes an event.
pub(crate) fn disable(
    conn: &mut PgConnection,
    name: &OutboxName,
    seen: AsSeen<'_>,
    (by, reason): (Hand, &str),
    failed_for: Option<Duration>,
) -> QueryResult<bool> {
    let why = (by, reason);
    let is_disabled = rows::disable_as_seen(conn, name, seen, why, failed_for)?;
    if is_disabled {
        let facts = json!({ "reason": of_disabled(reason) });
        write(conn, name, DISABLED, seen.name, facts)?;
    }
    Ok(is_disabled)
}

/// Writes events.
#[derive(Debug)]
pub(crate) struct OwnEvents;

impl Witness for OwnEvents {
    /// Counts the dead letters in the event of their endpoint and minute. A dead-lettered event is not counted: that would
    /// never end.
    fn buried(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        messages: &[&Message],
        dead: &[Failed],
        buried: &[i64],
    ) -> QueryResult<()> {
        let buried: HashSet<i64> = buried.iter().copied().collect();
        let is_counted = |one: &&&Message| buried.contains(&one.sequence.0) && !is_own(&one.topic);
        let counted = messages.iter().filter(is_counted);
        let counted: HashSet<i64> = counted.map(|one| one.sequence.0).collect();
        let mut counts = BTreeMap::new();
        for one in dead
            .iter()
            .filter(|one| counted.contains(&one.claim.sequence) && one.is_dead_letter())
        {
            *counts.entry(&*one.destination).or_default() += 1;
        }
        add(conn, name, counts)
    }

    fn told(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        destination: &str,
        news: GateNews,
    ) -> QueryResult<()> {
        let (topic, facts) = match news {
            GateNews::Paused(why, None) => (PAUSED, json!({ "reason": why.as_str() })),
            // A failed probe does not open the breaker again. So a failing endpoint that gets the event of its own breaker
            // gets only one.
            GateNews::Opened(..) => {
                let until: Option<PgTimestamp> = pause::open_until(conn, name, destination)?;
                (OPENED, json!({ "until": until.map(rfc3339) }))
            }
            GateNews::Paused(..) | GateNews::Recovered => return Ok(()),
        };
        write(conn, name, topic, destination, facts)
    }
}

/// Adds to the events of this minute, which are due at its end. A relay may write payloads, but not change them: so an
/// event is replaced by one with the sum.
fn add(
    conn: &mut PgConnection,
    name: &OutboxName,
    mut counts: BTreeMap<&str, i64>,
) -> QueryResult<()> {
    let all: Vec<&str> = counts.keys().copied().collect();
    let tenants = match all.is_empty() {
        true => HashMap::new(),
        false => rows::tenants(conn, name, &all)?,
    };
    let mut tries = 0;
    while !counts.is_empty() {
        let now: PgTimestamp = select(clock_timestamp()).get_result(conn)?;
        // At the first try, another relay may insert the event. An event that cannot be replaced then is being sent,
        // because an operator has made it due: the next minute has another.
        let minute = PgTimestamp((now.0.div_euclid(MINUTE_MICROS) + tries / 2) * MINUTE_MICROS);
        let end = PgTimestamp(minute.0 + MINUTE_MICROS);
        // Two relays insert in the same order, so neither waits for the other for ever.
        let keys: BTreeMap<String, &str> = (counts.keys())
            .map(|destination| (key(destination, minute), *destination))
            .collect();
        for (key, count) in take(conn, name, keys.keys(), now)? {
            *counts.entry(keys[&key]).or_default() += count;
        }
        let payloads: Vec<(&String, &str, String)> = (keys.iter())
            .map(|(key, destination)| {
                let facts = json!({ "minute": rfc3339(minute), "count": counts[destination] });
                let tenant_id = tenants.get(*destination).copied();
                (key, *destination, payload(destination, tenant_id, facts))
            })
            .collect();
        let rows = payloads.iter().map(|(key, destination, payload)| {
            (
                outbox::message_id.eq(Uuid::now_v7()),
                outbox::topic.eq(DEAD),
                outbox::payload.eq(Json(payload)),
                outbox::tenant_id.eq(tenants.get(*destination).copied()),
                outbox::idempotency_key.eq(*key),
                outbox::available_at.eq(end),
            )
        });
        let written: Vec<String> = insert_into(outbox::table(name.outbox()))
            .values(rows.collect::<Vec<_>>())
            .on_conflict_do_nothing()
            .returning(outbox::idempotency_key.assume_not_null())
            .load(conn)?;
        for key in written {
            counts.remove(keys[&key]);
        }
        tries += 1;
    }
    Ok(())
}

/// The idempotency key of an event: names may be as long as a key.
fn key(destination: &str, minute: PgTimestamp) -> String {
    let digest = STANDARD.encode(digest(DEAD, destination));
    format!("{DEAD}/{}/{digest}", rfc3339(minute))
}

/// Removes events that are not due at `now`, and returns their counts by key. Locks them in the order of the keys.
fn take<'a>(
    conn: &mut PgConnection,
    name: &OutboxName,
    keys: impl Iterator<Item = &'a String>,
    now: PgTimestamp,
) -> QueryResult<Vec<(String, i64)>> {
    let table = || outbox::table(name.outbox());
    let key = outbox::idempotency_key.assume_not_null();
    let found: Vec<(i64, String, JsonText)> = table()
        .filter(outbox::idempotency_key.is_not_null())
        .filter(key.eq_any(keys.collect::<Vec<_>>()))
        .filter(outbox::destination.eq(""))
        .filter(outbox::locked_by.is_null())
        .filter(outbox::attempts.eq(0))
        .filter(outbox::available_at.gt(now))
        .order(key)
        .for_update()
        .select((outbox::sequence, key, outbox::payload))
        .load(conn)?;
    let sequences: Vec<i64> = found.iter().map(|(sequence, ..)| *sequence).collect();
    if !sequences.is_empty() {
        delete(table())
            .filter(outbox::sequence.eq_any(sequences))
            .execute(conn)?;
    }
    // A payload that somebody has changed counts nothing.
    let count = |payload: JsonText| {
        let payload: Value = serde_json::from_str(&String::from(payload)).ok()?;
        payload["count"].as_i64()
    };
    let counted = found.into_iter();
    Ok(counted
        .map(|(_, key, payload)| (key, count(payload).unwrap_or(0)))
        .collect())
}
