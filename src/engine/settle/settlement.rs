//! The result of a claimed message, to be settled (recorded in the database).

mod report;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;
use uuid::Uuid;

pub(super) use self::report::{Failures, log_conflict, log_settled, to};

use super::sql::settle::{Claim, Delivered, Discarded, Failed, Trace};
use super::sql::split::Parts;
use crate::clock;
use crate::config::OnDead;
use crate::dispatch::Failure;
use crate::engine::claim::sql::claim::Topic;
use crate::engine::keys::sql::ordered::Key;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::plan::to::To;
use crate::engine::send::bulkhead::Bulkhead;
use crate::engine::send::job::{Job, Terms, is_expired};
use crate::engine::send::verdict::{Attempt, Verdict};
use crate::message::Message;
use crate::sql::functions::LONGEST;
use crate::status::ReasonCode;
use crate::words::words;

/// The most characters of an error that are stored.
const ERROR_CHARS: usize = 512;

/// The queues of the settlers.
#[derive(Debug, Clone)]
pub(crate) struct Outcomes {
    /// For messages without an ordering key.
    pub(crate) plain: Sender<Settlement>,
    /// For messages with an ordering key.
    pub(crate) keyed: Sender<Settlement>,
}

/// The settlers have ended.
#[derive(Debug)]
pub(crate) struct NobodyListens;

impl Outcomes {
    pub(crate) fn send(&self, settlement: Settlement) -> Result<(), NobodyListens> {
        // A feed takes one settle at a time, and several with small batches are slower than one.
        let is_alone = matches!(settlement.verdict, Verdict::Stored);
        let settlers = match settlement.message.ordering_key {
            Some(_) if !is_alone => &self.keyed,
            _ => &self.plain,
        };
        settlers.send(settlement).map_err(|_| NobodyListens)
    }

    /// The number of messages that no settler has taken.
    pub(crate) fn waiting(&self) -> usize {
        self.plain.len() + self.keyed.len()
    }
}

/// A finished message to be settled, whatever its result. The payload is dropped, because the settle works on the
/// stored row.
#[derive(Debug)]
pub(crate) struct Settlement {
    pub(crate) message: Box<Message>,
    pub(super) lease: LeaseId,
    pub(crate) to: To,
    member: Option<Arc<str>>,
    registration: Option<Uuid>,
    verdict: Verdict,
    terms: Terms,
    latency: Duration,
    /// How many destinations of a fan-out have their parts.
    placed: usize,
    /// Whether an earlier settle of the message lost its result.
    pub(super) repeated: bool,
    /// The rest of a run. The same settler settles it: delivered messages by the same statement as this one, the others
    /// after it.
    pub(crate) behind: Vec<Self>,
    /// Whether other results of its run are settled after it. Then the key does not continue with this one.
    pub(crate) is_followed: bool,
}

impl Settlement {
    pub(crate) fn new(
        mut job: Job,
        bulkheads: &[Bulkhead],
        verdict: Verdict,
        latency: Duration,
    ) -> Self {
        job.unload(bulkheads);
        // A run ends before a message that is not for the feed, or has expired.
        let mut continues = matches!(verdict, Verdict::Stored);
        let behind = job.behind.into_iter().map(|job| {
            continues &= matches!(job.unsent, Some(Verdict::Stored));
            let verdict = match continues {
                true => Verdict::Stored,
                false => Verdict::Released,
            };
            Self::unsent(job, bulkheads, verdict)
        });
        Self {
            behind: behind.collect(),
            is_followed: false,
            message: job.message,
            lease: job.lease,
            to: job.to,
            member: job.member,
            registration: job.registration,
            verdict,
            terms: job.terms,
            latency,
            placed: 0,
            repeated: false,
        }
    }

    pub(crate) fn unsent(job: Job, bulkheads: &[Bulkhead], verdict: Verdict) -> Self {
        Self::new(job, bulkheads, verdict, Duration::ZERO)
    }

    /// The results that one statement records, and each of those after them.
    pub(crate) fn apart(mut self) -> impl Iterator<Item = Self> {
        let behind = std::mem::take(&mut self.behind).into_iter();
        let (together, after): (Vec<_>, Vec<_>) = behind.partition(Self::is_delivered);
        self.behind = together;
        self.is_followed = !after.is_empty();
        let last = after.len().saturating_sub(1);
        let after = (0..).zip(after).map(move |(at, one)| Self {
            is_followed: at < last,
            ..one
        });
        std::iter::once(self).chain(after)
    }

    pub(crate) fn is_delivered(&self) -> bool {
        matches!(self.verdict, Verdict::Delivered(_) | Verdict::Stored)
    }

    /// The message, and those settled with it.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.behind)
    }

    /// Notes that the result of a settle was lost.
    pub(super) fn repeat(&mut self) {
        self.repeated = true;
        self.behind.iter_mut().for_each(Self::repeat);
    }

    pub(crate) fn sequence(&self) -> i64 {
        self.message.sequence.0
    }

    pub(crate) fn claim(&self) -> Claim {
        Claim::of(&self.message)
    }

    /// The trace that the settle leaves in the ledger.
    pub(super) fn trace(&self) -> Trace {
        Trace {
            claim: self.claim(),
            message_id: self.message.message_id,
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        match self.verdict {
            Verdict::Delivered(_) => Kind::Delivered,
            Verdict::Stored => Kind::Stored,
            Verdict::NoSubscriber => Kind::NoSubscriber,
            Verdict::Deduplicated(_) => Kind::Deduplicated,
            Verdict::Retry(_, _, Attempt::NotCounted) if self.to == To::Split => Kind::Waiting,
            Verdict::Retry(..) => Kind::Retry,
            Verdict::Dead(ref failure, _) if failure.code == ReasonCode::DestinationRemoved => {
                Kind::Cancelled
            }
            Verdict::Dead(..) => Kind::Dead,
            Verdict::Split(_) => Kind::Split,
            Verdict::Released => Kind::Released,
        }
    }

    /// The number of the failed attempt; 0: no counted attempt has failed.
    pub(crate) fn failed_attempt(&self) -> u32 {
        match self.verdict {
            Verdict::Retry(_, _, Attempt::Counted) | Verdict::Dead(_, Attempt::Counted) => {
                self.message.attempts.saturating_add(1)
            }
            _ => 0,
        }
    }

    /// Whether the message, as a dead letter, blocks the later messages of its ordering key.
    pub(super) fn blocks_key(&self) -> bool {
        self.terms.on_dead == OnDead::Block
    }

    /// The reason why the message was not delivered.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        match &self.verdict {
            Verdict::Retry(failure, ..) | Verdict::Dead(failure, _) => Some(failure),
            _ => None,
        }
    }

    /// The parts of a message to be fanned out.
    pub(crate) fn parts(&self) -> Option<&Parts> {
        match &self.verdict {
            Verdict::Split(parts) => Some(parts),
            _ => None,
        }
    }

    /// The destinations of a message to be fanned out.
    pub(crate) fn destinations(&self) -> &[String] {
        self.parts().map_or(&[], |parts| &parts.to)
    }

    /// The destinations of a fan-out that may lack their parts.
    pub(super) fn unplaced(&self) -> &[String] {
        self.destinations().get(self.placed..).unwrap_or_default()
    }

    /// Notes that a piece of the fan-out has placed the parts up to this destination.
    pub(super) fn place_up_to(&mut self, last: Option<&str>) {
        if let Some(last) = last {
            let is_placed = |one: &String| one.as_str() <= last;
            self.placed = self.destinations().partition_point(is_placed);
        }
    }

    /// Leaves the rest of a fan-out to another relay: the row says how far it is.
    pub(super) fn release(self) -> Self {
        Self {
            verdict: Verdict::Released,
            placed: 0,
            ..self
        }
    }

    /// Whether some parts of the fan-out are placed.
    pub(super) fn is_begun(&self) -> bool {
        self.placed > 0 || self.message.split_to.is_some()
    }

    /// Leaves a fan-out for later, unless the message has expired.
    pub(super) fn put_off(self, why: &str, wait: Duration) -> Self {
        let failure = Failure::new(ReasonCode::NotFannedOut, why);
        let verdict = match is_expired(&self.message, clock::now()) {
            true => Verdict::expired(),
            false => Verdict::Retry(failure, wait, Attempt::NotCounted),
        };
        Self { verdict, ..self }
    }

    /// The settlement of a message that cannot be fanned out, because another message has its key at one of its
    /// destinations. The message is dead-lettered unsent.
    pub(crate) fn in_conflict(&self) -> Self {
        let error = "the outbox has another message with this key for one of the destinations";
        let failure = Failure::new(ReasonCode::IdempotencyConflict, error);
        Self {
            message: self.message.clone(),
            member: self.member.clone(),
            verdict: Verdict::Dead(failure, Attempt::NotCounted),
            behind: Vec::new(),
            ..*self
        }
    }

    /// The destination that the message was for, even if the message names none. Empty: no destination serves it.
    pub(super) fn destination(&self, bulkheads: &[Bulkhead]) -> Arc<str> {
        if let Some(member) = &self.member {
            return Arc::clone(member);
        }
        let bulkhead = self.to.bulkhead(bulkheads);
        bulkhead.map_or_else(Arc::default, |bulkhead| Arc::clone(&bulkhead.name))
    }

    /// The destination that the message names after a failed send. A message that named none names the member that it was
    /// for: a retry, or an operator who requeues it, must reach this destination alone.
    fn names(&self) -> Arc<str> {
        match (&self.member, self.message.destination.as_str()) {
            (Some(member), "") => Arc::clone(member),
            (_, named) => named.into(),
        }
    }

    /// The topics of the parts that a piece of a fan-out has placed up to this destination.
    pub(super) fn topics_up_to(&self, last: &str) -> impl Iterator<Item = (Topic, i64)> {
        let parts = self.unplaced();
        self.topics_at(&parts[..parts.partition_point(|one| one.as_str() <= last)])
    }

    /// The destinations that the message, or each of its parts after a fan-out, names in the outbox. These rows have
    /// the old index position of the message, which claims may have passed.
    fn destinations_before(&self) -> &[String] {
        match &self.verdict {
            Verdict::Split(parts) => &parts.to,
            _ => std::slice::from_ref(&self.message.destination),
        }
    }

    /// The topics of the message, or of each of its parts, in the outbox.
    pub(super) fn topics_before(&self) -> impl Iterator<Item = (Topic, i64)> {
        let destinations = self.destinations_before().get(self.placed..);
        self.topics_at(destinations.unwrap_or_default())
    }

    /// For a message without an ordering key: the topics with these destinations, and the time from which the message
    /// could first be claimed.
    fn topics_at(&self, destinations: &[String]) -> impl Iterator<Item = (Topic, i64)> {
        let is_plain = self.message.ordering_key.is_none();
        let topic = |one: &String| {
            let topic = Topic::new(&self.message.topic, one);
            (topic, self.message.available_at)
        };
        destinations.iter().filter(move |_| is_plain).map(topic)
    }

    /// For a message with an ordering key: the keys at these destinations, and its own key, for the message behind it.
    pub(super) fn keys_before(&self) -> impl Iterator<Item = Key> {
        let key = |destination: &String| {
            Some(Key {
                ordering_key: self.message.ordering_key.clone()?,
                destination: destination.clone(),
            })
        };
        let of_destinations = self.destinations_before().iter().filter_map(key);
        of_destinations.chain(Key::of(&self.message))
    }

    /// The keys whose messages may have waited for this message. The first is its own key. If some messages name a
    /// destination (`has_parts`), the second is the same ordering key without a destination or, for a message that
    /// names none, with the destination that the message was for.
    pub(super) fn keys_behind(
        &self,
        bulkheads: &[Bulkhead],
        has_parts: bool,
    ) -> impl Iterator<Item = Key> {
        let own = Key::of(&self.message);
        let beside = own.as_ref().filter(|_| has_parts).map(|own| Key {
            ordering_key: own.ordering_key.clone(),
            destination: match own.destination.is_empty() {
                true => self.destination(bulkheads).to_string(),
                false => String::new(),
            },
        });
        own.into_iter().chain(beside)
    }

    /// The topic of the message and the destination that it names, as claims distinguish messages.
    pub(crate) fn topic(&self) -> Topic {
        Topic::new(&self.message.topic, &self.message.destination)
    }

    /// Replaces non-ASCII characters in the texts, because every database encoding can store ASCII. `true` if a text
    /// has changed.
    pub(super) fn make_ascii(&mut self) -> bool {
        let of_others = self.behind.iter_mut().map(Self::make_ascii);
        let of_others = of_others.fold(false, |one, other| one | other);
        let own = match &mut self.verdict {
            Verdict::Delivered(response) => response.body.as_mut().is_some_and(make_ascii),
            Verdict::Retry(failure, ..) | Verdict::Dead(failure, _) => {
                let of_body = failure.response.body.as_mut().is_some_and(make_ascii);
                make_ascii(&mut failure.error) | of_body
            }
            _ => false,
        };
        own | of_others
    }
}

words! {
    /// The kinds of settlements. One statement settles messages of one kind.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub(crate) enum Kind {
        Delivered = "delivered",
        Stored = "stored",
        NoSubscriber = "no_subscriber",
        Deduplicated = "deduplicated",
        Retry = "retried",
        /// Put off without a send: nobody here can say where the message goes.
        Waiting = "waiting",
        Dead = "dead",
        /// Ended without a send, in the ledger only: the destination was removed.
        Cancelled = "cancelled",
        Split = "split",
        Released = "released",
    }
}

fn make_ascii(text: &mut String) -> bool {
    let has_changed = !text.is_ascii();
    if has_changed {
        *text = text.replace(|c: char| !c.is_ascii(), "?");
    }
    has_changed
}

pub(crate) fn delivered(settlement: &Settlement, bulkheads: &[Bulkhead]) -> Option<Delivered> {
    let response = match &settlement.verdict {
        Verdict::Delivered(response) => Some(response),
        Verdict::NoSubscriber | Verdict::Stored => None,
        _ => return None,
    };
    let body = response.and_then(|response| response.body.as_deref());
    Some(Delivered {
        claim: settlement.claim(),
        destination: settlement.destination(bulkheads),
        registration: settlement.registration,
        http_status: response.and_then(|response| response.status.map(i32::from)),
        response: body.map(storable),
    })
}

impl Settlement {
    /// The repeat of a delivery to record, with the sequence of the delivered message.
    pub(super) fn repeat_of(&self) -> Option<(Claim, i64)> {
        match self.verdict {
            Verdict::Deduplicated(first) => Some((self.claim(), first)),
            _ => None,
        }
    }

    /// The result that changed nothing, to record. `why`: the current state of the message.
    pub(super) fn discarded(&self, bulkheads: &[Bulkhead], why: &str) -> Discarded<'_> {
        Discarded {
            message: &self.message,
            destination: self.destination(bulkheads),
            error: format!("{}: {why}", self.kind().as_str()),
            lease: self.lease,
        }
    }
}

/// The failed attempt to record.
pub(crate) fn failed(settlement: &Settlement, bulkheads: &[Bulkhead]) -> Option<Failed> {
    let (failure, delay, attempt) = match &settlement.verdict {
        Verdict::Retry(failure, delay, attempt) => (failure, *delay, *attempt),
        Verdict::Dead(failure, attempt) => (failure, Duration::ZERO, *attempt),
        _ => return None,
    };
    Some(Failed {
        claim: settlement.claim(),
        destination: settlement.destination(bulkheads),
        names: settlement.names(),
        registration: settlement.registration,
        code: failure.code,
        error: storable(&failure.error).chars().take(ERROR_CHARS).collect(),
        http_status: failure.response.status.map(i32::from),
        response: failure.response.body.as_deref().map(storable),
        took: settlement.latency,
        delay: delay.min(LONGEST),
        attempt,
        expires_after: (settlement.terms.expires_after).map(|after| after.min(LONGEST)),
        blocks_key: settlement.blocks_key(),
    })
}

/// The text without control characters, except line breaks and tabs. PostgreSQL cannot store NUL, and terminals obey
/// the others.
fn storable(text: &str) -> String {
    let obeyed = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    text.replace(obeyed, "\u{fffd}")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::engine::plan::tests::claimed;

    impl Settlement {
        pub(crate) fn wait(&self) -> Duration {
            match self.verdict {
                Verdict::Retry(_, wait, Attempt::NotCounted) => wait,
                _ => panic!("{self:?} does not wait"),
            }
        }
    }

    /// A message of this tenant for so many destinations.
    pub(crate) fn fan_out(
        sequence: i64,
        tenant_id: Option<Uuid>,
        destinations: usize,
    ) -> Settlement {
        let names = (0..destinations).map(|number| format!("{number:05}"));
        let message = Message {
            tenant_id,
            ..*claimed(sequence, "a", None).message
        };
        Settlement {
            message: Box::new(message),
            lease: LeaseId(1),
            to: To::Split,
            member: None,
            registration: None,
            verdict: Verdict::Split(Parts::from(names.collect::<Vec<_>>())),
            terms: Terms::default(),
            latency: Duration::ZERO,
            placed: 0,
            repeated: false,
            behind: Vec::new(),
            is_followed: false,
        }
    }
}
