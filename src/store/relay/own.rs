//! Events about the outbox itself (`OUTBOX_OWN_EVENTS`): messages in the same outbox, written in the transaction that
//! caused the event, and routed like any message.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{ExpressionMethods, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::{PgConnection, insert_into};
use serde_json::{Value, json};
use uuid::Uuid;

use super::pause::{self, Pausable};
use super::settle::Failed;
use crate::message::Message;
use crate::name::OutboxName;
use crate::store::destinations::{self, AsSeen};
use crate::store::place::rfc3339;
use crate::store::sql::Json;
use crate::store::table::outbox;

/// A message was dead-lettered.
pub(crate) const DEAD: &str = "outbox.message.dead";
/// A relay has disabled a registered destination.
pub(crate) const DISABLED: &str = "outbox.destination.disabled";
/// A circuit breaker has opened.
pub(crate) const OPENED: &str = "outbox.breaker.opened";

/// The most rows that one statement inserts.
const STEP: usize = 1_000;

/// Whether messages of this topic are events about the outbox itself.
pub(crate) fn is_own(topic: &str) -> bool {
    matches!(topic, DEAD | DISABLED | OPENED)
}

struct OwnEvent {
    topic: &'static str,
    payload: Value,
    /// The tenant concerned, by which forgetting a tenant finds the event.
    tenant_id: Option<Uuid>,
}

fn text(id: Option<Uuid>) -> Option<String> {
    id.map(|id| id.to_string())
}

fn write(conn: &mut PgConnection, name: &OutboxName, events: &[OwnEvent]) -> QueryResult<()> {
    for step in events.chunks(STEP) {
        let payloads: Vec<String> = step.iter().map(|one| one.payload.to_string()).collect();
        let rows = step.iter().zip(&payloads).map(|(one, payload)| {
            (
                outbox::message_id.eq(Uuid::now_v7()),
                outbox::topic.eq(one.topic),
                outbox::payload.eq(Json(payload)),
                outbox::tenant_id.eq(one.tenant_id),
            )
        });
        insert_into(outbox::table(name.outbox()))
            .values(rows.collect::<Vec<_>>())
            .execute(conn)?;
    }
    Ok(())
}

/// Writes an event for each of these dead letters. A dead-lettered event gets no event: that would never end.
pub(crate) fn tell_dead<'a>(
    conn: &mut PgConnection,
    name: &OutboxName,
    messages: impl Iterator<Item = &'a Message>,
    dead: &[Failed],
    buried: &[i64],
) -> QueryResult<()> {
    let buried: HashSet<i64> = buried.iter().copied().collect();
    let told = messages.filter(|one| buried.contains(&one.sequence.0) && !is_own(&one.topic));
    let told: HashMap<i64, &Message> = told.map(|one| (one.sequence.0, one)).collect();
    let event = |failed: &Failed| {
        let message = told.get(&failed.claim.sequence)?;
        Some(OwnEvent {
            topic: DEAD,
            payload: json!({
                "sequence": message.sequence.0,
                "message_id": message.message_id.to_string(),
                "topic": message.topic,
                "destination": &*failed.destination,
                "tenant_id": text(message.tenant_id),
                "reason": failed.code.as_str(),
                "attempts": i64::from(message.attempts) + i64::from(failed.counted),
            }),
            tenant_id: message.tenant_id,
        })
    };
    let events: Vec<OwnEvent> = dead.iter().filter_map(event).collect();
    write(conn, name, &events)
}

/// Like [`disable_as_seen`](destinations::disable_as_seen), and writes an event. `false`: the destination was not
/// disabled.
pub(crate) fn disable(
    conn: &mut PgConnection,
    name: &OutboxName,
    seen: AsSeen<'_>,
    reason: &str,
    failed_for: Option<Duration>,
) -> QueryResult<bool> {
    let disabled = destinations::disable_as_seen(conn, name, seen, reason, failed_for)?;
    let Some(tenant_id) = disabled else {
        return Ok(false);
    };
    let payload = json!({ "name": seen.name, "tenant_id": text(tenant_id), "reason": reason });
    let event = OwnEvent {
        topic: DISABLED,
        payload,
        tenant_id,
    };
    write(conn, name, &[event])?;
    Ok(true)
}

/// Records that a breaker is open, and writes an event if the breaker was closed before. A failed probe does not open
/// the breaker again. So a failing destination that gets the event of its own breaker gets only one.
pub(crate) fn open_breaker(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
    left: Duration,
    openings: u32,
) -> QueryResult<()> {
    if !pause::open_breaker(conn, name, destination, left, openings)? {
        return Ok(());
    }
    let until: Option<PgTimestamp> =
        pause::until(conn, name, Pausable::Destination, destination)?.flatten();
    let tenant_id = destinations::tenant(conn, name, destination)?.flatten();
    let event = OwnEvent {
        topic: OPENED,
        payload: json!({
            "destination": destination,
            "tenant_id": text(tenant_id),
            "until": until.map(rfc3339),
        }),
        tenant_id,
    };
    write(conn, name, &[event])
}
