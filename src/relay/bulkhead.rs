//! A bulkhead for each destination: threads, a queue and a gate of its own, so that one that is
//! broken, slow or hanging takes nothing from the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, never};

use super::gate::Gate;
use super::job::Job;
use super::planner::MOST_LANES;
use super::to::To;
use super::verdict::Retries;
use crate::config::{Config, Destination, InProcess, Mode, OnDead, Rate, RequestBatch};
use crate::dispatch::{Customers, Dispatcher};
use crate::handlers::Group;
use crate::message::Message;

/// Bytes of messages, those of all destinations together, that may be in memory before less is claimed.
const MOST_BYTES: usize = 32 * 1024 * 1024;
/// Bytes of one claim: its answer is in memory twice for a moment.
const CLAIM_BYTES: usize = MOST_BYTES / 2;
/// What a queue holds is about so much of its senders' time: enough while the next claim is made, and
/// little enough to leave the rest to other relays.
const PREFETCH: Duration = Duration::from_millis(250);
/// Messages of a claim before it is known how large they are, or how long a send takes; or as many as
/// can be sent at once.
pub(super) const FIRST_BATCH: usize = 32;
/// What the bulkhead of all of them is called, in metrics and health. No row can have that name.
pub(super) const REGISTERED: &str = "registered destinations";
/// Where the application's own dispatcher takes the rest.
pub(super) const REST: &str = "";

/// What the relay knows of one destination.
pub(crate) struct Bulkhead {
    pub(crate) name: Arc<str>,
    /// Its place among them.
    pub(crate) number: usize,
    pub(crate) gate: Gate,
    pub(crate) serves: Serves,
    /// Threads that send to it.
    pub(crate) concurrency: usize,
    /// In batched mode.
    pub(crate) request_batch: Option<RequestBatch>,
    pub(crate) retries: Retries,
    pub(crate) on_dead: OnDead,
    /// Messages of one claim, at most.
    pub(crate) batch: usize,
    /// Its share of the memory.
    pub(crate) most_bytes: usize,
    /// Payloads and headers of its messages that are claimed and not sent.
    bytes: AtomicUsize,
    /// The limit of one send, or of one call of a handler.
    pub(crate) send_timeout: Duration,
    /// Microseconds that a send has taken lately; 0: none was made.
    send_micros: AtomicU64,
    /// Its queue.
    pub(crate) jobs: Receiver<Job>,
}

/// What takes a destination's messages.
pub(crate) enum Serves {
    Dispatcher(Arc<dyn Dispatcher>),
    Group(Arc<Group>),
    /// All registered destinations: what takes their messages each of them has.
    Registered,
}

/// What messages are sent with.
pub(super) struct Dispatchers {
    /// To the destinations with a URL, in their order.
    pub(super) urls: Vec<Arc<dyn Dispatcher>>,
    /// To those inside the process, in their order.
    pub(super) groups: Vec<Arc<Group>>,
    /// The application's own that takes what nothing else serves.
    pub(super) rest: Option<Arc<dyn Dispatcher>>,
    /// To registered destinations.
    pub(super) customers: Option<Arc<Customers>>,
}

impl Bulkhead {
    /// One for each destination, in their order: those with a URL, those inside the process, the application's own
    /// dispatcher, and one for all registered destinations (see [`registered`](super::registered)). With them: where messages for each of them are put.
    pub(super) fn all(config: &Config, dispatchers: Dispatchers) -> (Vec<Self>, Vec<Sender<Job>>) {
        let Dispatchers {
            urls,
            groups,
            rest,
            customers,
        } = dispatchers;
        let count = urls.len() + groups.len() + usize::from(rest.is_some());
        let most_bytes = MOST_BYTES / count.max(1);
        let destinations = config.all_destinations();
        let urls = destinations.iter().zip(urls);
        let urls = urls
            .map(|(destination, dispatcher)| Self::of(destination, config, most_bytes, dispatcher));
        let groups = config.in_process.iter().zip(groups).map(|(local, group)| {
            let local = local.clone();
            Self::plain(local, config, most_bytes, Serves::Group(group))
        });
        let rest = rest.map(|dispatcher| {
            let local = InProcess {
                name: REST.to_owned(),
                ..InProcess::default()
            };
            Self::plain(local, config, most_bytes, Serves::Dispatcher(dispatcher))
        });
        let registered = customers.is_some().then(|| {
            let local = InProcess {
                name: REGISTERED.to_owned(),
                concurrency: Some(config.registered_threads),
                ..InProcess::default()
            };
            Self::plain(local, config, most_bytes, Serves::Registered)
        });
        let opened = urls.chain(groups).chain(rest).chain(registered).enumerate();
        opened
            .map(|(number, bulkhead)| {
                let (queue, jobs) = bounded(bulkhead.queue());
                let bulkhead = Self {
                    number,
                    jobs,
                    ..bulkhead
                };
                (bulkhead, queue)
            })
            .unzip()
    }

    /// One without a URL.
    fn plain(local: InProcess, config: &Config, most_bytes: usize, serves: Serves) -> Self {
        Self {
            gate: Gate::open(&local.name, local.rate),
            name: local.name.into(),
            number: 0,
            serves,
            concurrency: local.concurrency.unwrap_or(config.concurrency),
            request_batch: None,
            retries: Retries {
                max_attempts: local.max_attempts.unwrap_or(config.max_attempts),
                backoff: local.backoff.unwrap_or_else(|| config.backoff.clone()),
            },
            on_dead: config.on_dead,
            batch: local
                .rate
                .map_or(config.batch, |rate| of_a_second(rate, 1, config.batch)),
            most_bytes,
            bytes: AtomicUsize::new(0),
            send_timeout: local.timeout.unwrap_or(config.send_timeout),
            send_micros: AtomicU64::new(0),
            jobs: never(),
        }
    }

    fn of(
        destination: &Destination,
        config: &Config,
        most_bytes: usize,
        dispatcher: Arc<dyn Dispatcher>,
    ) -> Self {
        let mode = destination.mode.unwrap_or(config.mode);
        let request_batch = (mode == Mode::Batched).then_some(destination.request_batch);
        let per_request = request_batch.map_or(1, |batch| batch.size);
        let batch = match destination.rate {
            Some(rate) => of_a_second(rate, per_request, config.batch),
            // Its senders are done with a batch in no time: larger statements cost less for each.
            None if request_batch.is_some() => 2 * config.batch,
            None => config.batch,
        };
        let local = InProcess {
            name: destination.name.clone(),
            concurrency: destination.concurrency,
            timeout: destination.timeout,
            max_attempts: destination.max_attempts,
            backoff: destination.backoff.clone(),
            ..InProcess::default()
        };
        Self {
            gate: Gate::new(destination),
            request_batch,
            on_dead: destination.on_dead.unwrap_or(config.on_dead),
            batch,
            ..Self::plain(local, config, most_bytes, Serves::Dispatcher(dispatcher))
        }
    }

    /// That of one registered destination, beside the one of all. It has no queue and no threads of its own.
    pub(super) fn of_customer(
        destination: &Destination,
        config: &Config,
        of_all: &Self,
        dispatcher: Arc<dyn Dispatcher>,
    ) -> Self {
        Self {
            number: of_all.number,
            request_batch: None,
            ..Self::of(destination, config, of_all.most_bytes, dispatcher)
        }
    }

    /// Messages that its senders may hold.
    pub(crate) fn most_sending(&self) -> usize {
        let of_a_request = self.request_batch.map_or(1, |limits| limits.size);
        self.concurrency.saturating_mul(of_a_request)
    }

    /// A message of it was claimed.
    pub(super) fn load(&self, message: &Message) {
        self.bytes.fetch_add(self.size(message), Ordering::AcqRel);
    }

    /// Its payload and its headers are in memory no longer.
    pub(super) fn unload(&self, message: &Message) {
        self.bytes.fetch_sub(self.size(message), Ordering::AcqRel);
    }

    fn size(&self, message: &Message) -> usize {
        match self.serves {
            Serves::Dispatcher(_) | Serves::Registered => message.bytes(),
            // A handler works on a copy.
            Serves::Group(_) => 2 * message.bytes(),
        }
    }

    /// How much of its share is free: nothing before half of it is, for small claims cost more.
    pub(super) fn free_bytes(&self) -> usize {
        let bytes = self.bytes.load(Ordering::Acquire);
        let free = self.most_bytes.saturating_sub(bytes);
        if bytes <= self.most_bytes / 2 {
            free
        } else {
            0
        }
    }

    /// Whether it has more than its share.
    pub(super) fn is_overloaded(&self) -> bool {
        self.bytes.load(Ordering::Acquire) > self.most_bytes
    }

    /// A send has taken so long.
    pub(crate) fn learn(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        let before = self.send_micros.load(Ordering::Relaxed);
        let mean = if before == 0 {
            micros
        } else {
            (before - before / 8).saturating_add(micros / 8)
        };
        // Two threads may race and one sample may be lost; the mean barely changes.
        self.send_micros.store(mean, Ordering::Relaxed);
    }

    /// Messages that one claim may bring, by the time that sends take.
    pub(crate) fn prefetch(&self) -> usize {
        let micros = self.send_micros.load(Ordering::Relaxed);
        let sends = u64::try_from(PREFETCH.as_micros())
            .unwrap_or(u64::MAX)
            .checked_div(micros)
            .map(|sends| usize::try_from(sends).unwrap_or(usize::MAX));
        let wanted = match sends {
            None => self.most_sending().max(FIRST_BATCH),
            Some(sends) => self.most_sending().saturating_mul(sends.max(1)),
        };
        wanted.min(self.batch)
    }

    /// Places in its queue: two batches, one to be sent while the next is claimed, and what lanes
    /// may give beyond the batch that they share.
    pub(crate) fn queue(&self) -> usize {
        2 * self.batch + self.batch / 4 + MOST_LANES
    }
}

impl To {
    /// The bulkhead of these to which something goes.
    pub(super) fn bulkhead(self, all: &[Bulkhead]) -> Option<&Bulkhead> {
        match self {
            Self::Bulkhead(number) => all.get(number),
            // Where there are any, the last one is theirs.
            Self::Registered(_) => all.last(),
            Self::Split | Self::Nowhere => None,
        }
    }
}

/// How much may be claimed beside what all of them have. Nothing where that is too much already.
pub(super) fn left_bytes(bulkheads: &[Bulkhead]) -> usize {
    let bytes = |bulkhead: &Bulkhead| bulkhead.bytes.load(Ordering::Acquire);
    let all: usize = bulkheads.iter().map(bytes).sum();
    MOST_BYTES.saturating_sub(all).min(CLAIM_BYTES)
}

/// The bytes of the next claim. One destination that has more than its share takes nothing from the others'.
pub(super) fn claim_bytes(bulkheads: &[Bulkhead]) -> usize {
    let free = bulkheads.iter().map(Bulkhead::free_bytes).max();
    let free = free.unwrap_or_default().min(CLAIM_BYTES);
    left_bytes(bulkheads).max(free).max(1)
}

/// Messages of a claim where a rate is set: no more than are sent in a second, for the rest can go to other
/// relays.
fn of_a_second(rate: Rate, per_request: usize, batch: usize) -> usize {
    // In range: a rate is above zero and below a million.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let requests = rate.per_second.ceil() as usize;
    requests.saturating_mul(per_request).clamp(1, batch)
}
