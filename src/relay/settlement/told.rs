//! What the log and observers are told of a settlement.

use super::{ERROR_CHARS, Kind, Settlement, Verdict, storable};
use crate::config::Config;
use crate::message::hashed_key;
use crate::relay::observer::Settled;
use crate::status::{ReasonCode, Status};

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
        status = line.status.as_str(),
        attempts = line.attempts,
        reason = line.reason.map_or("", ReasonCode::as_str),
        latency_ms = u64::try_from(settlement.latency.as_millis()).unwrap_or(u64::MAX);
        "{}{}", line.event, if error.is_empty() { String::new() } else { format!(": {error}") }
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
