//! What the log and observers are told of a settlement.

use super::{ERROR_CHARS, Kind, Settlement, Verdict, storable};
use crate::config::Config;
use crate::message::hashed_key;
use crate::relay::observer::Settled;
use crate::status::{ReasonCode, Status};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::whereabouts::Whereabouts;

impl Settlement {
    /// The destination, as people are told.
    fn place(&self) -> &str {
        if self.destination.is_empty() {
            return &self.message.destination;
        }
        &self.destination
    }

    /// What observers are told, where its outcome is one of a send.
    pub(in crate::relay) fn told(&self) -> Option<Settled<'_>> {
        if matches!(self.verdict, Verdict::Split(_) | Verdict::Released) {
            return None;
        }
        let Line {
            status,
            attempts,
            reason,
            ..
        } = self.line();
        Some(Settled {
            message: &self.message,
            destination: self.place(),
            status,
            reason,
            attempts,
        })
    }

    fn line(&self) -> Line<'_> {
        let message = &self.message;
        let line = Line {
            event: "",
            status: Status::Delivered,
            attempts: message.attempts.saturating_add(1),
            reason: None,
            error: "",
        };
        match &self.verdict {
            Verdict::Delivered(_) => Line {
                event: "delivered",
                ..line
            },
            Verdict::Deduplicated => Line {
                event: "dedup_hit",
                attempts: message.attempts,
                ..line
            },
            Verdict::Retry(failure, _, counted) => Line {
                event: if *counted > 0 { "retry" } else { "wait" },
                status: waiting(message.attempts, *counted),
                attempts: message.attempts.saturating_add(u32::from(*counted > 0)),
                reason: Some(failure.code),
                error: &failure.error,
            },
            Verdict::Dead(failure, counted) => Line {
                event: "dead",
                status: Status::Dead,
                attempts: message.attempts.saturating_add(u32::from(*counted > 0)),
                reason: Some(failure.code),
                error: &failure.error,
            },
            Verdict::Split(_) => Line {
                event: "split",
                status: Status::Pending,
                attempts: message.attempts,
                ..line
            },
            Verdict::Released => Line {
                event: "released",
                status: waiting(message.attempts, 0),
                attempts: message.attempts,
                ..line
            },
        }
    }
}

/// One line for each message that was settled, with a stable event name.
pub(in crate::relay) fn log_settled(settlement: &Settlement, config: &Config) {
    let level = match settlement.kind() {
        Kind::Delivered | Kind::Split | Kind::Released => log::Level::Debug,
        Kind::Deduplicated => log::Level::Info,
        Kind::Retry => log::Level::Warn,
        Kind::Dead => log::Level::Error,
    };
    if level > log::max_level() {
        return;
    }
    let message = &settlement.message;
    let key = hashed_key(&message.idempotency_key);
    let tenant = message.tenant_id.map(|tenant| tenant.to_string());
    let line = settlement.line();
    let error: String = storable(line.error).chars().take(ERROR_CHARS).collect();
    log::log!(
        level,
        event = line.event,
        outbox:% = config.table,
        sequence = settlement.sequence(),
        message_id:% = message.message_id,
        key = key,
        topic = message.topic,
        destination = settlement.place(),
        tenant = tenant.as_deref().unwrap_or_default(),
        status = line.status.as_str(),
        attempts = line.attempts,
        reason = line.reason.map_or("", ReasonCode::as_str),
        latency_ms = u64::try_from(settlement.latency.as_millis()).unwrap_or(u64::MAX);
        "{}{}", line.event, if error.is_empty() { String::new() } else { format!(": {error}") }
    );
}

/// One line for a message whose settle changed nothing: the outcome that is lost, and how the message stands
/// `now` (`None`: that could not be read; `Some(None)`: it is nowhere).
pub(in crate::relay) fn log_conflict(
    settlement: &Settlement,
    config: &Config,
    lease: LeaseId,
    now: Option<Option<&Whereabouts>>,
) {
    let message = &settlement.message;
    let key = hashed_key(&message.idempotency_key);
    let tenant = message.tenant_id.map(|tenant| tenant.to_string());
    let held_by = |standing: &Whereabouts| match (standing.lease, &standing.relay) {
        (Some(lease), Some(relay)) => format!("relay {relay:?} has it (lease {lease})"),
        (Some(lease), None) => format!("lease {lease}, which is gone, has it"),
        (None, _) => format!("it is {} now", standing.status),
    };
    let (status, why) = match now {
        None => ("unknown", "who has it could not be read".to_owned()),
        Some(None) => ("gone", "it is in no table of the outbox".to_owned()),
        Some(Some(other)) if other.message_id != message.message_id => (
            "gone",
            format!("its sequence is message {} now", other.message_id),
        ),
        Some(Some(standing)) => (standing.status.as_str(), held_by(standing)),
    };
    let standing = now.flatten();
    log::warn!(
        event = "conflict",
        outbox:% = config.table,
        sequence = settlement.sequence(),
        message_id:% = message.message_id,
        key = key,
        topic = message.topic,
        destination = settlement.place(),
        tenant = tenant.as_deref().unwrap_or_default(),
        outcome = settlement.kind().as_str(),
        lease = lease.0,
        status = status,
        attempts = standing.map_or(0, |standing| standing.attempts),
        holder = standing.and_then(|standing| standing.relay.as_deref()).unwrap_or_default(),
        holder_lease = standing.and_then(|standing| standing.lease).unwrap_or_default();
        "message {}: the outcome {} of lease {} changed nothing: {why}",
        message.message_id, settlement.kind().as_str(), lease.0
    );
}

/// The state of a message that waits.
fn waiting(attempts: u32, counted: i32) -> Status {
    if attempts > 0 || counted > 0 {
        Status::Retrying
    } else {
        Status::Pending
    }
}

struct Line<'a> {
    event: &'static str,
    status: Status,
    attempts: u32,
    reason: Option<ReasonCode>,
    error: &'a str,
}
