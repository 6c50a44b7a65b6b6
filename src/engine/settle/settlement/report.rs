//! Reports settlements to the log and to observers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::{Attempt, ERROR_CHARS, Kind, Settlement, Verdict, storable};
use crate::engine::host::shared::Shared;
use crate::engine::observe::observer::Settled;
use crate::engine::send::bulkhead::Bulkhead;
use crate::engine::settle::sql::whereabouts::Whereabouts;
use crate::error::DatabaseError;
use crate::log;
use crate::message::hashed_key;
use crate::status::{ReasonCode, Status};

impl Settlement {
    /// The destination as logs and observers name it.
    fn place<'a>(&'a self, bulkheads: &'a [Bulkhead]) -> &'a str {
        if let Some(member) = &self.member {
            return member;
        }
        match self.to.bulkhead(bulkheads) {
            Some(bulkhead) if !bulkhead.name.is_empty() => &bulkhead.name,
            _ => &self.message.destination,
        }
    }

    /// The event for observers. `None` for a fan-out and for a release.
    pub(crate) fn told<'a>(&'a self, bulkheads: &'a [Bulkhead]) -> Option<Settled<'a>> {
        let is_one = !matches!(self.verdict, Verdict::Split(_) | Verdict::Released);
        is_one.then(|| self.as_told(bulkheads))
    }

    fn as_told<'a>(&'a self, bulkheads: &'a [Bulkhead]) -> Settled<'a> {
        let before = self.message.attempts;
        let attempts = match self.verdict {
            Verdict::Delivered(_) | Verdict::Stored => before.saturating_add(1),
            _ => before.max(self.failed_attempt()),
        };
        Settled {
            message: &self.message,
            destination: self.place(bulkheads),
            status: match self.verdict {
                Verdict::Delivered(_) | Verdict::Stored | Verdict::Deduplicated(_) => {
                    Status::Delivered
                }
                Verdict::NoSubscriber => Status::NoSubscriber,
                Verdict::Dead(..) => Status::Dead,
                Verdict::Retry(..) | Verdict::Released if attempts > 0 => Status::Retrying,
                Verdict::Retry(..) | Verdict::Released | Verdict::Split(_) => Status::Pending,
            },
            reason: match self.verdict {
                Verdict::NoSubscriber => Some(ReasonCode::NoSubscriber),
                _ => self.failure().map(|failure| failure.code),
            },
            attempts,
        }
    }

    /// The log text: what happened, to which message and destination, and what happens next.
    fn sentence(&self, told: &Settled<'_>, error: &str) -> String {
        let (topic, id) = (&self.message.topic, self.message.message_id);
        let (to, attempts) = (to(told.destination), told.attempts);
        match &self.verdict {
            Verdict::Delivered(_) => format!("delivered {topic}{to} (message {id})"),
            Verdict::Stored => format!("stored {topic} in the feed{to} (message {id})"),
            Verdict::NoSubscriber => {
                format!(
                    "nobody wants {topic}, and no route or handler has ever served it: settled without a send (message {id})"
                )
            }
            Verdict::Deduplicated(first) => format!(
                "{topic} was delivered{to} before as {first}, with the same key: not sent again (message {id})"
            ),
            Verdict::Retry(_, delay, attempt) => {
                let delay = match delay.as_secs() {
                    seconds @ 0..10 => Duration::new(seconds, delay.subsec_millis() * 1_000_000),
                    seconds => Duration::from_secs(seconds),
                };
                let delay = humantime::format_duration(delay);
                let what = match attempt {
                    Attempt::NotCounted => "no attempt counted".to_owned(),
                    Attempt::Counted => format!("attempt {attempts} failed"),
                };
                format!("{topic}{to}: {what}: {error}; next attempt in {delay} (message {id})")
            }
            Verdict::Dead(..) if self.kind() == Kind::Cancelled => {
                format!("ended {topic}{to} unsent: {error} (message {id})")
            }
            Verdict::Dead(..) if attempts == 0 => {
                format!("gave up on {topic}{to} without a send: {error} (message {id})")
            }
            Verdict::Dead(..) => {
                let plural = if attempts == 1 { "" } else { "s" };
                format!(
                    "gave up on {topic}{to} after {attempts} attempt{plural}: {error} (message {id})"
                )
            }
            Verdict::Split(parts) => {
                format!(
                    "fanned {topic} out to {} destinations (message {id})",
                    parts.to.len()
                )
            }
            Verdict::Released => {
                format!("released {topic} unsent, without counting an attempt (message {id})")
            }
        }
    }

    /// What repeats if others fail for the same reason.
    fn repeated(&self, bulkheads: &[Bulkhead]) -> Option<Repeated> {
        let (destination, code) = match self.verdict {
            Verdict::NoSubscriber => (self.message.topic.as_str(), ReasonCode::NoSubscriber),
            _ => (self.place(bulkheads), self.failure()?.code),
        };
        Some((destination.to_owned(), code, self.event().0))
    }

    /// The event name and the level in the log.
    fn event(&self) -> (&'static str, log::Level) {
        match self.verdict {
            Verdict::Delivered(_) | Verdict::Stored => ("delivered", log::Level::Debug),
            Verdict::NoSubscriber => ("no_subscriber", log::Level::Warn),
            Verdict::Deduplicated(_) => ("dedup_hit", log::Level::Info),
            Verdict::Retry(_, _, Attempt::Counted) => ("retry", log::Level::Warn),
            Verdict::Retry(..) => ("wait", log::Level::Warn),
            Verdict::Dead(..) if self.kind() == Kind::Cancelled => ("cancelled", log::Level::Warn),
            Verdict::Dead(..) => ("dead", log::Level::Error),
            Verdict::Split(_) => ("split", log::Level::Debug),
            Verdict::Released => ("released", log::Level::Debug),
        }
    }
}

/// The destination in a sentence. A message that was not assigned to a destination has none.
pub(crate) fn to(destination: &str) -> String {
    match destination {
        "" => String::new(),
        name => format!(" to {name}"),
    }
}

/// The interval of the counts of further failures. The first failure of a destination for a reason is logged with its
/// own line.
const COUNTED: Duration = Duration::from_secs(10);
/// The interval of the counts of messages without a subscriber, for each topic.
const COUNTED_NOBODYS: Duration = Duration::from_secs(60);

fn interval(code: ReasonCode) -> Duration {
    match code {
        ReasonCode::NoSubscriber => COUNTED_NOBODYS,
        _ => COUNTED,
    }
}

/// The failed sends that are counted for the log. Each has the start of its count, and the number of failures since.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    of: BTreeMap<Repeated, (Instant, u64)>,
}

/// What repeats: the destination, or the topic if no destination wants the messages; the reason; and the event.
type Repeated = (String, ReasonCode, &'static str);

impl Failures {
    /// Whether this failure gets its own log line. If not, counts the failure.
    fn is_new(&mut self, what: Repeated, now: Instant) -> bool {
        let Some((_, count)) = self.of.get_mut(&what) else {
            self.of.insert(what, (now, 0));
            return true;
        };
        *count += 1;
        false
    }

    /// The time at which the next count is due.
    pub(crate) fn due(&self) -> Option<Instant> {
        let due =
            |((_, code, _), (since, _)): (&Repeated, &(Instant, u64))| *since + interval(*code);
        self.of.iter().map(due).min()
    }

    /// Logs the counts that are due. If a count is 0, the next failure gets its own line.
    pub(crate) fn tell(&mut self, now: Instant) {
        for ((destination, code, event), count) in self.take_due(now) {
            let plural = if count == 1 { "" } else { "s" };
            let to = to(&destination);
            match event {
                "no_subscriber" => {
                    log::warn!(event = "no_subscriber", topic = destination, messages = count; "{count} more message{plural} of {destination} settled without a send: nobody wants them, and no route or handler has ever served the topic")
                }
                "retry" => {
                    log::warn!(event = "retries", destination = destination, reason = code.as_str(), messages = count; "{count} more attempt{plural} to deliver{to} failed ({code}): messages with attempts left are retried")
                }
                "cancelled" => {
                    log::warn!(event = "cancellations", destination = destination, reason = code.as_str(), messages = count; "ended {count} more message{plural}{to} unsent ({code})")
                }
                "dead" => {
                    log::error!(event = "dead_letters", destination = destination, reason = code.as_str(), messages = count; "gave up on {count} more message{plural}{to} ({code})")
                }
                _ => {
                    log::warn!(event = "waits", destination = destination, reason = code.as_str(), messages = count; "{count} more message{plural} could not be sent{to} ({code}), no attempts used: the messages will be sent later")
                }
            }
        }
    }

    /// Logs all counts at the end, whether due or not.
    pub(crate) fn tell_all(&mut self, now: Instant) {
        self.tell(now + COUNTED_NOBODYS);
    }

    fn take_due(&mut self, now: Instant) -> Vec<(Repeated, u64)> {
        let mut due = Vec::new();
        self.of.retain(|what, (since, count)| {
            if now < *since + interval(what.1) {
                return true;
            }
            let counted = std::mem::take(count);
            *since = now;
            if counted > 0 {
                due.push((what.clone(), counted));
            }
            counted > 0
        });
        due
    }
}

/// Logs a line for a settled message, with a stable event name. Repeated failures are only counted: see [`Failures`].
pub(crate) fn log_settled(
    settlement: &Settlement,
    shared: &Shared,
    failures: &mut Failures,
    now: Instant,
) {
    let (event, mut level) = settlement.event();
    let mut is_repeated = || {
        let what = settlement.repeated(&shared.bulkheads);
        what.is_some_and(|what| !failures.is_new(what, now))
    };
    if level <= log::Level::Warn && level <= log::max_level() && is_repeated() {
        level = log::Level::Debug;
    }
    if level > log::max_level() {
        return;
    }
    let message = &settlement.message;
    let key = hashed_key(&message.idempotency_key);
    let tenant = message.tenant_id.map(|tenant| tenant.to_string());
    let told = settlement.as_told(&shared.bulkheads);
    let error = settlement.failure().map_or("", |failure| &failure.error);
    let error: String = storable(error).chars().take(ERROR_CHARS).collect();
    log::log!(
        level,
        event = event,
        outbox:% = shared.settings.table,
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
        "{}", settlement.sentence(&told, &error)
    );
}

/// Logs a line for a message whose settle changed nothing, with the discarded outcome and the current state. `now` is
/// the state of the message: `None` if the message no longer exists. Returns why, in words.
pub(crate) fn log_conflict(
    settlement: &Settlement,
    shared: &Shared,
    now: Result<Option<&Whereabouts>, &DatabaseError>,
) -> String {
    let message = &settlement.message;
    let key = hashed_key(&message.idempotency_key);
    let tenant = message.tenant_id.map(|tenant| tenant.to_string());
    let held_by = |standing: &Whereabouts| match (standing.lease, &standing.relay) {
        (Some(lease), Some(relay)) => {
            format!("relay {relay:?} holds the message now (lease {lease})")
        }
        (Some(lease), None) => format!("the removed lease {lease} holds the message now"),
        (None, _) => format!("the message is {} now", standing.status),
    };
    let (status, why) = match now {
        Err(_) => (
            "unknown",
            "the current state of the message could not be read".to_owned(),
        ),
        Ok(None) => ("gone", "the message is no longer in the outbox".to_owned()),
        Ok(Some(other)) if other.message_id != message.message_id => (
            "gone",
            format!("message {} has this sequence now", other.message_id),
        ),
        Ok(Some(standing)) => (standing.status.as_str(), held_by(standing)),
    };
    let standing = now.ok().flatten();
    log::warn!(
        event = "conflict",
        outbox:% = shared.settings.table,
        sequence = settlement.sequence(),
        message_id:% = message.message_id,
        key = key,
        topic = message.topic,
        destination = settlement.place(&shared.bulkheads),
        tenant = tenant.as_deref().unwrap_or_default(),
        outcome = settlement.kind().as_str(),
        lease = settlement.lease.0,
        status = status,
        attempts = standing.map_or(0, |standing| standing.attempts),
        holder = standing.and_then(|standing| standing.relay.as_deref()).unwrap_or_default(),
        holder_lease = standing.and_then(|standing| standing.lease).unwrap_or_default();
        "discarded the result of {}{} ({}): lease {} no longer holds message {}: {why}",
        message.topic, to(settlement.place(&shared.bulkheads)), settlement.kind().as_str(), settlement.lease.0, message.message_id
    );
    why
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_one_destination_have_a_line_and_then_a_count() {
        let (mut failures, begin) = (Failures::default(), Instant::now());
        let what = |destination: &str, code, event| (destination.to_owned(), code, event);
        let of_a = || what("a", ReasonCode::ServerError, "retry");
        let of_b = || what("b", ReasonCode::ServerError, "retry");
        assert!(failures.is_new(of_a(), begin));
        assert!(!failures.is_new(of_a(), begin));
        assert!(!failures.is_new(of_a(), begin));
        let another_reason = what("a", ReasonCode::Timeout, "retry");
        assert!(failures.is_new(another_reason, begin));
        let without_attempt = what("a", ReasonCode::ServerError, "wait");
        assert!(failures.is_new(without_attempt, begin));
        let dead = what("a", ReasonCode::ServerError, "dead");
        assert!(failures.is_new(dead, begin));
        assert!(failures.is_new(of_b(), begin), "another destination");
        assert_eq!(failures.take_due(begin), []);
        let at = failures.due().expect("counted failures");
        assert_eq!(failures.take_due(at), [(of_a(), 2)]);
        assert!(!failures.is_new(of_a(), at), "the failures continue");
        assert!(failures.is_new(of_b(), at), "the failures had ended");
        let later = at + COUNTED;
        assert_eq!(failures.take_due(later), [(of_a(), 1)]);
        assert_eq!(failures.take_due(later + COUNTED), []);
        assert_eq!(failures.due(), None);
    }
}
