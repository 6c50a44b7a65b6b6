//! What became of a claimed message, and how it is written down.

mod told;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;

pub(super) use self::told::{Failures, log_conflict, log_settled};

use super::bulkhead::Bulkhead;
use super::job::Job;
use super::to::To;
use super::verdict::Verdict;
use crate::dispatch::Failure;
use crate::message::Message;
use crate::status::ReasonCode;
use crate::store::relay::claim::Topic;
use crate::store::relay::lease::LeaseId;
use crate::store::relay::ordered::Key;
use crate::store::relay::settle::{Claim, Delivered, Failed, Trace};

/// A hundred years: more is none of the database's intervals.
const LONGEST_DELAY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// Characters of an error that are stored.
const ERROR_CHARS: usize = 512;

/// Where settlements go.
#[derive(Debug, Clone)]
pub(crate) struct Outcomes {
    /// Of messages without an ordering key.
    pub(super) plain: Sender<Settlement>,
    pub(super) keyed: Sender<Settlement>,
}

/// Nobody takes settlements any more.
#[derive(Debug)]
pub(super) struct NobodyListens;

impl Outcomes {
    pub(super) fn send(&self, settlement: Settlement) -> Result<(), NobodyListens> {
        let settlers = match settlement.message.ordering_key {
            None => &self.plain,
            Some(_) => &self.keyed,
        };
        settlers.send(settlement).map_err(|_| NobodyListens)
    }
}

/// A claimed message whose relay is done with it, whatever way. Without its payload: what is left to do works on
/// the stored row.
#[derive(Debug)]
pub(crate) struct Settlement {
    pub(super) message: Message,
    pub(super) lease: LeaseId,
    pub(super) to: To,
    customer: Option<Arc<str>>,
    verdict: Verdict,
    latency: Duration,
    /// A settle of it was tried whose answer did not come.
    pub(super) repeated: bool,
}

impl Settlement {
    pub(crate) fn new(
        mut job: Job,
        bulkheads: &[Bulkhead],
        verdict: Verdict,
        latency: Duration,
    ) -> Self {
        job.unload(bulkheads);
        Self {
            message: job.message,
            lease: job.lease,
            to: job.to,
            customer: job.customer,
            verdict,
            latency,
            repeated: false,
        }
    }

    pub(crate) fn unsent(job: Job, bulkheads: &[Bulkhead], verdict: Verdict) -> Self {
        Self::new(job, bulkheads, verdict, Duration::ZERO)
    }

    pub(super) fn sequence(&self) -> i64 {
        self.message.sequence.0
    }

    pub(super) fn claim(&self) -> Claim {
        Claim::of(&self.message)
    }

    /// What its settle leaves in the ledger.
    pub(super) fn trace(&self) -> Trace {
        Trace {
            claim: self.claim(),
            message_id: self.message.message_id,
        }
    }

    pub(super) fn kind(&self) -> Kind {
        match self.verdict {
            Verdict::Delivered(_) | Verdict::Nobody => Kind::Delivered,
            Verdict::Deduplicated => Kind::Deduplicated,
            Verdict::Retry(..) => Kind::Retry,
            Verdict::Dead(..) => Kind::Dead,
            Verdict::Split(_) => Kind::Split,
            Verdict::Released => Kind::Released,
        }
    }

    /// Which attempt has failed; 0: none that counts.
    pub(super) fn failed_attempt(&self) -> u32 {
        match self.verdict {
            Verdict::Retry(_, _, counted) | Verdict::Dead(_, counted) if counted > 0 => {
                self.message.attempts.saturating_add(1)
            }
            _ => 0,
        }
    }

    /// Why it was not delivered.
    pub(super) fn failure(&self) -> Option<&Failure> {
        match &self.verdict {
            Verdict::Retry(failure, ..) | Verdict::Dead(failure, _) => Some(failure),
            _ => None,
        }
    }

    /// The destinations of a message that is to be split.
    pub(super) fn destinations(&self) -> &[String] {
        match &self.verdict {
            Verdict::Split(destinations) => destinations,
            _ => &[],
        }
    }

    /// What becomes of it where it was to be split, and one of its parts stands for another message: it
    /// dies unsent.
    pub(super) fn in_conflict(&self) -> Self {
        let error = "the outbox has another message of its key for one of its destinations";
        let failure = Failure::new(ReasonCode::IdempotencyConflict, error);
        Self {
            message: self.message.clone(),
            customer: self.customer.clone(),
            verdict: Verdict::Dead(failure, 0),
            ..*self
        }
    }

    /// The destination that it was for, also where the message names none; empty: none serves it.
    fn destination(&self, bulkheads: &[Bulkhead]) -> Arc<str> {
        if let Some(customer) = &self.customer {
            return Arc::clone(customer);
        }
        let bulkhead = self.to.bulkhead(bulkheads);
        bulkhead.map_or_else(Arc::default, |bulkhead| Arc::clone(&bulkhead.name))
    }

    /// The destinations that the message, or its parts, name in the outbox when it is written down,
    /// where it was before.
    fn destinations_before(&self) -> &[String] {
        match &self.verdict {
            Verdict::Split(destinations) => destinations,
            _ => std::slice::from_ref(&self.message.destination),
        }
    }

    /// Their topics, where it has no ordering key, and when they could first be claimed.
    pub(super) fn topics_before(&self) -> impl Iterator<Item = (Topic, i64)> {
        let topic = |destination: &String| Topic::new(&self.message.topic, destination);
        let destinations = match self.message.ordering_key {
            None => self.destinations_before(),
            Some(_) => &[],
        };
        let since = self.message.available_at;
        destinations.iter().map(move |one| (topic(one), since))
    }

    /// Their keys, where it has one, and that of the message behind it.
    pub(super) fn keys_before(&self) -> impl Iterator<Item = Key> {
        let key = |destination: &String| {
            Some(Key {
                ordering_key: self.message.ordering_key.clone()?,
                destination: destination.clone(),
            })
        };
        let of_destinations = self.destinations_before().iter().filter_map(key);
        of_destinations.chain(self.key())
    }

    /// The keys of which messages may have waited for it: its own and, where some name a destination, that
    /// of those that name none, or the one that it was for.
    pub(super) fn keys_behind(
        &self,
        bulkheads: &[Bulkhead],
        has_parts: bool,
    ) -> impl Iterator<Item = Key> {
        let own = self.key();
        let beside = own.as_ref().filter(|_| has_parts).map(|own| Key {
            ordering_key: own.ordering_key.clone(),
            destination: match own.destination.is_empty() {
                true => self.destination(bulkheads).to_string(),
                false => String::new(),
            },
        });
        own.into_iter().chain(beside)
    }

    /// Its key, and the destination within which that orders.
    pub(super) fn key(&self) -> Option<Key> {
        Key::of(&self.message)
    }

    /// Its topic, and the destination that it names, as claims tell messages apart.
    pub(super) fn topic(&self) -> Topic {
        Topic::new(&self.message.topic, &self.message.destination)
    }

    /// Leaves only ASCII in its texts, which every encoding can store. `true`: there was something else.
    pub(super) fn make_ascii(&mut self) -> bool {
        match &mut self.verdict {
            Verdict::Delivered(response) => response.body.as_mut().is_some_and(make_ascii),
            Verdict::Retry(failure, ..) | Verdict::Dead(failure, _) => {
                let of_body = failure.response.body.as_mut().is_some_and(make_ascii);
                make_ascii(&mut failure.error) | of_body
            }
            Verdict::Nobody | Verdict::Deduplicated | Verdict::Split(_) | Verdict::Released => {
                false
            }
        }
    }
}

/// What one statement can settle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Kind {
    Delivered,
    Deduplicated,
    Retry,
    Dead,
    Split,
    Released,
}

impl Kind {
    /// All, in their order, with their names.
    pub(super) const ALL: [(Self, &str); 6] = [
        (Self::Delivered, "delivered"),
        (Self::Deduplicated, "deduplicated"),
        (Self::Retry, "retried"),
        (Self::Dead, "dead"),
        (Self::Split, "split"),
        (Self::Released, "released"),
    ];

    pub(super) fn as_str(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

fn make_ascii(text: &mut String) -> bool {
    if text.is_ascii() {
        return false;
    }
    *text = text
        .chars()
        .map(|c| if c.is_ascii() { c } else { '?' })
        .collect();
    true
}

pub(super) fn delivered(settlement: &Settlement, bulkheads: &[Bulkhead]) -> Option<Delivered> {
    let (response, code) = match &settlement.verdict {
        Verdict::Delivered(response) => (Some(response), None),
        Verdict::Nobody => (None, Some(ReasonCode::NoSubscriber)),
        _ => return None,
    };
    let body = response.and_then(|response| response.body.as_deref());
    Some(Delivered {
        claim: settlement.claim(),
        destination: settlement.destination(bulkheads),
        http_status: response.and_then(|response| response.status.map(i32::from)),
        response: body.map(storable),
        code,
    })
}

/// `blocks_key`: where it dies, its death keeps its key back.
pub(super) fn failed(
    settlement: &Settlement,
    bulkheads: &[Bulkhead],
    blocks_key: bool,
) -> Option<Failed> {
    let (failure, delay, counted) = match &settlement.verdict {
        Verdict::Retry(failure, delay, counted) => (failure, *delay, *counted),
        Verdict::Dead(failure, counted) => (failure, Duration::ZERO, *counted),
        _ => return None,
    };
    Some(Failed {
        claim: settlement.claim(),
        destination: settlement.destination(bulkheads),
        code: failure.code,
        error: storable(&failure.error).chars().take(ERROR_CHARS).collect(),
        http_status: failure.response.status.map(i32::from),
        response: failure.response.body.as_deref().map(storable),
        took: settlement.latency,
        delay: delay.min(LONGEST_DELAY),
        counted,
        blocks_key,
    })
}

/// Text without control characters but line breaks and tabs: PostgreSQL takes no NUL, and a
/// terminal obeys the others.
fn storable(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c.is_control() && !matches!(c, '\n' | '\t') {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}
