//! What the log and observers are told of a settlement.

use super::{ERROR_CHARS, Kind, Settlement, Verdict, storable};
use crate::config::Config;
use crate::message::hashed_key;
use crate::relay::bulkhead::Bulkhead;
use crate::relay::observer::Settled;
use crate::status::{ReasonCode, Status};
use crate::store::relay::whereabouts::Whereabouts;

impl Settlement {
    /// The destination, as people are told.
    fn place<'a>(&'a self, bulkheads: &'a [Bulkhead]) -> &'a str {
        if let Some(customer) = &self.customer {
            return customer;
        }
        match self.to.bulkhead(bulkheads) {
            Some(bulkhead) if !bulkhead.name.is_empty() => &bulkhead.name,
            _ => &self.message.destination,
        }
    }

    /// What observers are told, where its outcome is one of a send.
    pub(in crate::relay) fn told<'a>(&'a self, bulkheads: &'a [Bulkhead]) -> Option<Settled<'a>> {
        let is_one = !matches!(self.verdict, Verdict::Split(_) | Verdict::Released);
        is_one.then(|| self.as_told(bulkheads))
    }

    fn as_told<'a>(&'a self, bulkheads: &'a [Bulkhead]) -> Settled<'a> {
        let before = self.message.attempts;
        let attempts = match self.verdict {
            Verdict::Delivered(_) => before.saturating_add(1),
            _ => before.max(self.failed_attempt()),
        };
        Settled {
            message: &self.message,
            destination: self.place(bulkheads),
            status: match self.verdict {
                Verdict::Delivered(_) | Verdict::Nobody | Verdict::Deduplicated => {
                    Status::Delivered
                }
                Verdict::Dead(..) => Status::Dead,
                Verdict::Retry(..) | Verdict::Released if attempts > 0 => Status::Retrying,
                Verdict::Retry(..) | Verdict::Released | Verdict::Split(_) => Status::Pending,
            },
            reason: match self.verdict {
                Verdict::Nobody => Some(ReasonCode::NoSubscriber),
                _ => self.failure().map(|failure| failure.code),
            },
            attempts,
        }
    }

    /// What has happened, as the log names it.
    fn event(&self) -> &'static str {
        match self.verdict {
            Verdict::Delivered(_) => "delivered",
            Verdict::Nobody => "no_subscriber",
            Verdict::Deduplicated => "dedup_hit",
            Verdict::Retry(_, _, counted) if counted > 0 => "retry",
            Verdict::Retry(..) => "wait",
            Verdict::Dead(..) => "dead",
            Verdict::Split(_) => "split",
            Verdict::Released => "released",
        }
    }
}

/// One line for each message that was settled, with a stable event name.
pub(in crate::relay) fn log_settled(
    settlement: &Settlement,
    config: &Config,
    bulkheads: &[Bulkhead],
) {
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
    let (event, told) = (settlement.event(), settlement.as_told(bulkheads));
    let error = settlement.failure().map_or("", |failure| &failure.error);
    let error: String = storable(error).chars().take(ERROR_CHARS).collect();
    log::log!(
        level,
        event = event,
        outbox:% = config.table,
        sequence = settlement.sequence(),
        message_id:% = message.message_id,
        key = key,
        topic = message.topic,
        destination = told.destination,
        tenant = tenant.as_deref().unwrap_or_default(),
        status = told.status.as_str(),
        attempts = told.attempts,
        reason = told.reason.map_or("", ReasonCode::as_str),
        latency_ms = u64::try_from(settlement.latency.as_millis()).unwrap_or(u64::MAX);
        "{event}{}", if error.is_empty() { String::new() } else { format!(": {error}") }
    );
}

/// One line for a message whose settle changed nothing: the outcome that is lost, and how the message stands
/// `now` (`None`: that could not be read; `Some(None)`: it is nowhere).
pub(in crate::relay) fn log_conflict(
    settlement: &Settlement,
    config: &Config,
    bulkheads: &[Bulkhead],
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
        destination = settlement.place(bulkheads),
        tenant = tenant.as_deref().unwrap_or_default(),
        outcome = settlement.kind().as_str(),
        lease = settlement.lease.0,
        status = status,
        attempts = standing.map_or(0, |standing| standing.attempts),
        holder = standing.and_then(|standing| standing.relay.as_deref()).unwrap_or_default(),
        holder_lease = standing.and_then(|standing| standing.lease).unwrap_or_default();
        "message {}: the outcome {} of lease {} changed nothing: {why}",
        message.message_id, settlement.kind().as_str(), settlement.lease.0
    );
}
