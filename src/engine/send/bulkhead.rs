//! A bulkhead for each destination: its own threads, queue and gate. So a destination that fails, is slow or hangs
//! takes nothing from the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, never};

use super::calls::Calls;
use super::gate::Gate;
use super::job::Job;
use super::limits::Limits;
use crate::dispatch::Dispatcher;
use crate::engine::plan::to::To;
use crate::message::Message;

/// The most bytes of messages in memory, of all destinations together, before claims get smaller.
const MOST_BYTES: usize = 32 * 1024 * 1024;
/// The most bytes of one claim: for a moment, its result is in memory twice.
const CLAIM_BYTES: usize = MOST_BYTES / 2;
/// A request takes no further messages once the gathered payloads have this many bytes.
pub(super) const REQUEST_BYTES: usize = 1024 * 1024;
/// A queue holds about this much of the senders' time: enough to last during the next claim, and little enough to leave
/// messages to other relays.
const PREFETCH_MICROS: u64 = 250_000;
/// The most lanes in one claim. If there are more, they take turns.
pub(crate) const MOST_LANES: usize = 64;
/// The name of the application's own dispatcher, which takes messages that no other destination serves.
pub(crate) const REST: &str = "";

/// One destination, as the relay sees it.
// Why: docs/decisions.md#bulkheads
pub(crate) struct Bulkhead {
    pub(crate) name: Arc<str>,
    /// The index of the bulkhead.
    pub(crate) number: usize,
    pub(crate) gate: Gate,
    pub(crate) serves: SendsTo,
    pub(crate) limits: Limits,
    /// The destination's share of memory, in bytes.
    pub(crate) most_bytes: usize,
    /// The bytes of payloads and headers of claimed messages that are not sent yet.
    bytes: AtomicUsize,
    /// The recent mean time of a send, in microseconds; 0: no send yet.
    send_micros: AtomicU64,
    /// The queue of the destination.
    pub(crate) jobs: Receiver<Job>,
}

/// The recipient of a destination's messages.
pub(crate) enum SendsTo {
    Dispatcher(Arc<dyn Dispatcher>),
    Handlers(Arc<dyn Calls>),
    /// A feed: its messages are settled when they are claimed.
    Feed,
    /// All members: each has its own dispatcher. At most so many threads send to them.
    Members(usize),
}

impl Bulkhead {
    /// The bulkheads in this order, with the sending ends of their queues.
    pub(crate) fn numbered(all: Vec<Self>) -> (Vec<Self>, Vec<Sender<Job>>) {
        let has_share = |one: &&Self| !matches!(one.serves, SendsTo::Members(_));
        let count = all.iter().filter(has_share).count();
        let numbered = all.into_iter().enumerate();
        numbered
            .map(|(number, bulkhead)| {
                let (queue, jobs) = bounded(bulkhead.queue());
                let bulkhead = Self {
                    number,
                    most_bytes: MOST_BYTES / count.max(1),
                    jobs,
                    ..bulkhead
                };
                (bulkhead, queue)
            })
            .unzip()
    }

    /// Without a number, a share of memory and a queue.
    pub(crate) fn new(name: &str, gate: Gate, limits: Limits, serves: SendsTo) -> Self {
        Self {
            gate,
            name: name.into(),
            number: 0,
            serves,
            limits,
            most_bytes: 0,
            bytes: AtomicUsize::new(0),
            send_micros: AtomicU64::new(0),
            jobs: never(),
        }
    }

    /// With the number and the share of memory of another bulkhead, and without a queue.
    pub(crate) fn beside(self, other: &Self) -> Self {
        Self {
            number: other.number,
            most_bytes: other.most_bytes,
            ..self
        }
    }

    /// The most threads that may ever send at once.
    pub(crate) fn most_threads(&self) -> usize {
        match self.serves {
            SendsTo::Members(most) => most,
            SendsTo::Feed => 0,
            SendsTo::Dispatcher(_) | SendsTo::Handlers(_) => self.limits.concurrency,
        }
    }

    /// The most bytes of a request, without its last message.
    pub(super) fn request_bytes(&self) -> usize {
        let limits = self.limits.request_batch;
        limits.map_or(usize::MAX, |_| REQUEST_BYTES)
    }

    /// Counts the bytes of a claimed message.
    pub(crate) fn load(&self, message: &Message) {
        self.bytes.fetch_add(self.size(message), Ordering::AcqRel);
    }

    /// Stops counting the bytes of a message whose payload and headers are freed.
    pub(crate) fn unload(&self, message: &Message) {
        self.bytes.fetch_sub(self.size(message), Ordering::AcqRel);
    }

    fn size(&self, message: &Message) -> usize {
        match self.serves {
            SendsTo::Dispatcher(_) | SendsTo::Members(_) | SendsTo::Feed => message.bytes(),
            // A handler works on a copy.
            SendsTo::Handlers(_) => 2 * message.bytes(),
        }
    }

    /// The free bytes of the destination's share; 0 until half of it is free, because small claims cost more.
    pub(crate) fn free_bytes(&self) -> usize {
        let bytes = self.bytes.load(Ordering::Acquire);
        match bytes <= self.most_bytes / 2 {
            true => self.most_bytes - bytes,
            false => 0,
        }
    }

    /// Whether the destination uses more than its share.
    pub(crate) fn is_overloaded(&self) -> bool {
        self.bytes.load(Ordering::Acquire) > self.most_bytes
    }

    /// Learns how long a send took.
    pub(crate) fn learn(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        let before = self.send_micros.load(Ordering::Relaxed);
        let mean = match before {
            0 => micros,
            _ => (before - before / 8).saturating_add(micros / 8),
        };
        // Two threads may race and one sample may be lost; the mean barely changes.
        self.send_micros.store(mean, Ordering::Relaxed);
    }

    /// The most messages of the next claim, by the time that sends take.
    pub(crate) fn prefetch(&self) -> usize {
        let micros = self.send_micros.load(Ordering::Relaxed);
        let Some(sends) = PREFETCH_MICROS.checked_div(micros) else {
            return self.limits.first_claim();
        };
        let sends = usize::try_from(sends).unwrap_or(usize::MAX).max(1);
        (self.limits.most_sending().saturating_mul(sends)).min(self.limits.batch)
    }

    /// The capacity of the queue: two batches, of which one is sent while the next is claimed, and the messages that
    /// lanes may return beyond their shared batch.
    pub(crate) fn queue(&self) -> usize {
        2 * self.limits.batch + self.limits.batch / 4 + MOST_LANES
    }
}

impl To {
    /// The bulkhead for this way.
    pub(crate) fn bulkhead(self, all: &[Bulkhead]) -> Option<&Bulkhead> {
        match self {
            Self::Bulkhead(number) => all.get(number),
            // If there are members, the last bulkhead is theirs.
            Self::Member(_) | Self::Feed(_) => all.last(),
            Self::Split | Self::Nowhere => None,
        }
    }
}

/// The bytes that may be claimed in addition to those in memory; 0 if too much is in memory already.
pub(crate) fn left_bytes(bulkheads: &[Bulkhead]) -> usize {
    let bytes = |bulkhead: &Bulkhead| bulkhead.bytes.load(Ordering::Acquire);
    let all: usize = bulkheads.iter().map(bytes).sum();
    MOST_BYTES.saturating_sub(all).min(CLAIM_BYTES)
}

/// The most bytes of the next claim. A destination that uses more than its share takes nothing from the others.
pub(crate) fn claim_bytes(bulkheads: &[Bulkhead]) -> usize {
    let free = bulkheads.iter().map(Bulkhead::free_bytes).max();
    let free = free.unwrap_or_default().min(CLAIM_BYTES);
    left_bytes(bulkheads).max(free).max(1)
}
