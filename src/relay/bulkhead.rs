//! A bulkhead for each destination: its own threads, queue and gate. So a destination that fails, is slow or hangs
//! takes nothing from the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, never};

use super::gate::{Answers, Gate};
use super::job::{Job, Terms};
use super::registry::Limits;
use super::to::To;
use super::turns::Turns;
use super::verdict::Retries;
use crate::config::{Config, DeliveryPolicy, Destination, Mode, Rate, RequestBatch};
use crate::dispatch::{Customers, Dispatcher};
use crate::handlers::Group;
use crate::message::Message;

/// The most bytes of messages in memory, of all destinations together, before claims get smaller.
const MOST_BYTES: usize = 32 * 1024 * 1024;
/// The most bytes of one claim: for a moment, its result is in memory twice.
const CLAIM_BYTES: usize = MOST_BYTES / 2;
/// A request takes no further messages once the gathered payloads have this many bytes.
pub(super) const REQUEST_BYTES: usize = 1024 * 1024;
/// A queue holds about this much of the senders' time: enough to last during the next claim, and little enough to leave
/// messages to other relays.
const PREFETCH: Duration = Duration::from_millis(250);
/// The most lanes in one claim. If there are more, they take turns.
pub(super) const MOST_LANES: usize = 64;
/// The size of a claim before the size of messages and the time of sends are known, unless more can be sent at once.
pub(super) const FIRST_BATCH: usize = 32;
/// The name of the bulkhead of all registered destinations, in metrics and health. No destination can have this name.
pub(super) const REGISTERED: &str = "registered destinations";
/// The name of the application's own dispatcher, which takes messages that no other destination serves.
pub(super) const REST: &str = "";

/// One destination, as the relay sees it.
pub(crate) struct Bulkhead {
    pub(crate) name: Arc<str>,
    /// The index of the bulkhead.
    pub(crate) number: usize,
    pub(crate) gate: Gate,
    pub(crate) serves: Serves,
    /// The number of threads that send to the destination.
    pub(crate) concurrency: usize,
    /// The limits of a request in batched mode.
    pub(crate) request_batch: Option<RequestBatch>,
    pub(crate) retries: Retries,
    pub(crate) terms: Terms,
    /// The most messages of one claim.
    pub(crate) batch: usize,
    /// The most messages of a run.
    pub(super) key_run: usize,
    /// The destination's share of memory, in bytes.
    pub(crate) most_bytes: usize,
    /// The bytes of payloads and headers of claimed messages that are not sent yet.
    bytes: AtomicUsize,
    /// The time limit of one send or handler call.
    pub(crate) send_timeout: Duration,
    /// The recent mean time of a send, in microseconds; 0: no send yet.
    send_micros: AtomicU64,
    /// The queue of the destination.
    pub(crate) jobs: Receiver<Job>,
}

/// The recipient of a destination's messages.
pub(crate) enum Serves {
    Dispatcher(Arc<dyn Dispatcher>),
    Group(Arc<Group>),
    /// All registered destinations: each has its own dispatcher.
    Registered,
}

/// The dispatchers of all destinations.
pub(super) struct Dispatchers {
    /// For the destinations with a URL, in the order of the settings.
    pub(super) urls: Vec<Arc<dyn Dispatcher>>,
    /// For the destinations inside the process, in the order of the settings.
    pub(super) groups: Vec<Arc<Group>>,
    /// The application's own dispatcher, for messages that no other destination serves.
    pub(super) rest: Option<Arc<dyn Dispatcher>>,
    /// For registered destinations.
    pub(super) customers: Option<Arc<Customers>>,
}

impl Bulkhead {
    /// A bulkhead for each destination, with the sending end of its queue. The order is: destinations with a URL,
    /// destinations inside the process, the application's own dispatcher, and one bulkhead for all registered
    /// destinations (see [`registered`](super::registered)).
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
            let serves = Serves::Group(group);
            Self::plain(&local.name, &local.policy, config, most_bytes, serves)
        });
        let rest = rest.map(|dispatcher| {
            let serves = Serves::Dispatcher(dispatcher);
            let policy = DeliveryPolicy::default();
            let rest = Self::plain(REST, &policy, config, most_bytes, serves);
            rest.with_mode(config.mode, RequestBatch::default(), &policy, config)
        });
        let registered = customers.is_some().then(|| {
            let policy = DeliveryPolicy {
                concurrency: Some(config.registered_threads),
                timeout: Some(config.registered_timeout),
                ..DeliveryPolicy::default()
            };
            Self::plain(REGISTERED, &policy, config, most_bytes, Serves::Registered)
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

    /// A bulkhead without a URL.
    fn plain(
        name: &str,
        policy: &DeliveryPolicy,
        config: &Config,
        most_bytes: usize,
        serves: Serves,
    ) -> Self {
        let retries = Retries {
            max_attempts: policy.max_attempts.unwrap_or(config.max_attempts),
            backoff: (policy.backoff.clone()).unwrap_or_else(|| config.backoff.clone()),
        };
        Self {
            gate: Gate::open(name, policy.rate),
            name: name.into(),
            number: 0,
            serves,
            concurrency: policy.concurrency.unwrap_or(config.concurrency),
            request_batch: None,
            retries,
            terms: Terms {
                on_dead: policy.on_dead.unwrap_or(config.on_dead),
                expires_after: policy.expires_after,
            },
            batch: policy
                .rate
                .map_or(config.batch, |rate| of_a_second(rate, 1, config.batch)),
            key_run: 1,
            most_bytes,
            bytes: AtomicUsize::new(0),
            send_timeout: policy.timeout.unwrap_or(config.send_timeout),
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
        let policy = &destination.policy;
        let mode = policy.mode.unwrap_or(config.mode);
        let serves = Serves::Dispatcher(dispatcher);
        let plain = Self {
            gate: Gate::new(destination),
            ..Self::plain(&destination.name, policy, config, most_bytes, serves)
        };
        plain.with_mode(mode, destination.request_batch, policy, config)
    }

    /// With messages that are sent in this mode: in requests of several messages, if it is batched.
    fn with_mode(
        self,
        mode: Mode,
        request_batch: RequestBatch,
        policy: &DeliveryPolicy,
        config: &Config,
    ) -> Self {
        let request_batch = (mode == Mode::Batched).then_some(request_batch);
        let per_request = request_batch.map_or(1, |batch| batch.size);
        let batch = match policy.rate {
            Some(rate) => of_a_second(rate, per_request, config.batch),
            // Batched senders empty a batch quickly, and larger statements cost less for each message.
            None if request_batch.is_some() => 2 * config.batch,
            None => config.batch,
        };
        Self {
            request_batch,
            batch,
            // A run in batched mode is one request.
            key_run: (policy.key_run.min(batch)).min(request_batch.map_or(batch, |one| one.size)),
            ..self
        }
    }

    /// The bulkhead of one registered destination. It has no queue and no threads: all registered destinations share
    /// those of `of_all`.
    pub(super) fn of_customer(
        destination: &Destination,
        config: &Config,
        of_all: &Self,
        dispatcher: Arc<dyn Dispatcher>,
        answers: &Arc<Answers>,
    ) -> Self {
        let one = Self::of(destination, config, of_all.most_bytes, dispatcher);
        Self {
            number: of_all.number,
            request_batch: None,
            key_run: destination.policy.key_run.min(one.batch),
            gate: one.gate.with_row(answers, config.registered_disable_after),
            ..one
        }
    }

    /// How messages are sent to a destination whose time of sends is not known yet.
    pub(super) fn limits(&self) -> Limits {
        Limits {
            retries: self.retries.clone(),
            terms: self.terms,
            concurrency: self.concurrency,
            prefetch: self.prefetch(),
            key_run: self.key_run,
        }
    }

    /// The most messages that the senders hold.
    pub(crate) fn most_sending(&self) -> usize {
        let of_a_request = self.request_batch.map_or(1, |limits| limits.size);
        self.concurrency.saturating_mul(of_a_request)
    }

    /// The most threads that may ever send at once.
    pub(super) fn most_threads(&self) -> usize {
        match self.serves {
            Serves::Registered => Turns::most(self.concurrency),
            Serves::Dispatcher(_) | Serves::Group(_) => self.concurrency,
        }
    }

    /// The most bytes of a request, without its last message.
    pub(super) fn request_bytes(&self) -> usize {
        self.request_batch.map_or(usize::MAX, |_| REQUEST_BYTES)
    }

    /// Counts the bytes of a claimed message.
    pub(super) fn load(&self, message: &Message) {
        self.bytes.fetch_add(self.size(message), Ordering::AcqRel);
    }

    /// Stops counting the bytes of a message whose payload and headers are freed.
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

    /// The free bytes of the destination's share; 0 until half of it is free, because small claims cost more.
    pub(super) fn free_bytes(&self) -> usize {
        let bytes = self.bytes.load(Ordering::Acquire);
        let free = self.most_bytes.saturating_sub(bytes);
        if bytes <= self.most_bytes / 2 {
            free
        } else {
            0
        }
    }

    /// Whether the destination uses more than its share.
    pub(super) fn is_overloaded(&self) -> bool {
        self.bytes.load(Ordering::Acquire) > self.most_bytes
    }

    /// Learns how long a send took.
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

    /// The most messages of the next claim, by the time that sends take.
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

    /// The capacity of the queue: two batches, of which one is sent while the next is claimed, and the messages that
    /// lanes may return beyond their shared batch.
    pub(crate) fn queue(&self) -> usize {
        2 * self.batch + self.batch / 4 + MOST_LANES
    }
}

impl To {
    /// The bulkhead for this way.
    pub(super) fn bulkhead(self, all: &[Bulkhead]) -> Option<&Bulkhead> {
        match self {
            Self::Bulkhead(number) => all.get(number),
            // If there are registered destinations, the last bulkhead is theirs.
            Self::Registered(_) => all.last(),
            Self::Split | Self::Nowhere => None,
        }
    }
}

/// The bytes that may be claimed in addition to those in memory; 0 if too much is in memory already.
pub(super) fn left_bytes(bulkheads: &[Bulkhead]) -> usize {
    let bytes = |bulkhead: &Bulkhead| bulkhead.bytes.load(Ordering::Acquire);
    let all: usize = bulkheads.iter().map(bytes).sum();
    MOST_BYTES.saturating_sub(all).min(CLAIM_BYTES)
}

/// The most bytes of the next claim. A destination that uses more than its share takes nothing from the others.
pub(super) fn claim_bytes(bulkheads: &[Bulkhead]) -> usize {
    let free = bulkheads.iter().map(Bulkhead::free_bytes).max();
    let free = free.unwrap_or_default().min(CLAIM_BYTES);
    left_bytes(bulkheads).max(free).max(1)
}

/// The most messages of a claim under a rate limit: as many as are sent in a second, so that other relays can claim the
/// rest.
fn of_a_second(rate: Rate, per_request: usize, batch: usize) -> usize {
    // In range: a rate is above zero and below a million.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let requests = rate.per_second.ceil() as usize;
    requests.saturating_mul(per_request).clamp(1, batch)
}
