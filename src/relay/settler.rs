//! The settle threads: they write down what became of messages, many at a time.

mod next;
mod written;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use diesel::result::{DatabaseErrorKind, Error};

pub(super) use self::written::write_down;

use self::next::{Settled, look_at_the_next};
use super::pauses;
use super::progress::Post;
use super::session::Session;
use super::settlement::{Kind, Settlement, log_settled};
use super::shared::{Continued, Shared};
use super::stats::add;
use crate::error::DatabaseError;
use crate::store::connection::Plans;
use crate::store::lease::LeaseId;
use crate::store::settle;

/// How long outcomes are gathered while there are many of them, and how often it is asked meanwhile
/// whether the senders have run out of work.
const LINGER: Duration = Duration::from_millis(5);
const GLANCE: Duration = Duration::from_millis(1);
/// What waits for a settle keeps keys back: as long as the senders have so many times as much to do, more
/// is gathered.
const KEYED_WORK: usize = 3;
/// A batch of no more than this is of a relay with little to do: it settles at once.
const LIGHT: usize = 16;
/// How long a message waits whose settle was refused.
const ASIDE: Duration = Duration::from_secs(10);
/// Messages that one try puts aside.
const MOST_REFUSED: usize = 3;
/// A settle that takes longer than this is given up and tried again.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(20);

/// Settles messages without ordering keys until all senders and the claimer are gone and everything is
/// written down, or until the relay gives up at its deadline.
///
/// What the database refuses for its values is put aside and tried again now and then, so that it
/// holds nothing else.
pub(crate) fn run(shared: &Shared, outcomes: &Receiver<Settlement>) {
    let mut settler = Settler::new(shared, &shared.progress.settler, None);
    if settler.run(outcomes).is_ok() {
        pauses::tell_the_last(shared, &mut settler.session);
    }
}

/// The same with ordering keys, on one of several threads: what waits for a settle here is what nobody
/// sends meanwhile.
///
/// Where the first message of an ordering key is done, the next one is claimed in the transaction
/// that says so, and goes to the claimer by `continued`. `left` is that channel's other end, for what
/// the claimer left in it.
pub(crate) fn run_keyed(
    shared: &Shared,
    post: &Arc<Post>,
    outcomes: &Receiver<Settlement>,
    continued: &Sender<Continued>,
    left: &Receiver<Continued>,
) {
    let mut settler = Settler::new(shared, post, Some(continued));
    if settler.run(outcomes).is_ok() {
        for Continued { claimed, lease } in left.try_iter() {
            settler.release(claimed, lease);
        }
    }
}

/// The relay has given up.
struct GivenUp;

struct Settler<'a> {
    shared: &'a Shared,
    session: Session,
    /// Where keys go on.
    continued: Option<&'a Sender<Continued>>,
}

impl<'a> Settler<'a> {
    fn new(shared: &'a Shared, post: &Arc<Post>, continued: Option<&'a Sender<Continued>>) -> Self {
        Self {
            shared,
            session: shared.session(post, STATEMENT_TIMEOUT, Plans::ByIndex),
            continued,
        }
    }

    fn run(&mut self, outcomes: &Receiver<Settlement>) -> Result<(), GivenUp> {
        let shared = self.shared;
        let mut aside: Vec<Settlement> = Vec::new();
        let mut aside_until = Instant::now();
        let mut is_busy = false;
        let batch_size = shared.batch();
        loop {
            let next = if aside.is_empty() {
                outcomes.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else if Instant::now() >= aside_until {
                // Asked here: a channel that is never empty would not let the time run out.
                Err(RecvTimeoutError::Timeout)
            } else {
                outcomes.recv_deadline(aside_until)
            };
            let is_last = matches!(next, Err(RecvTimeoutError::Disconnected));
            let is_again = next.is_err();
            let mut batch = match next {
                Ok(first) => {
                    if is_busy {
                        self.linger(outcomes, batch_size);
                    }
                    gather(first, outcomes, batch_size)
                }
                Err(_) => {
                    shared.take_up_aside(aside.iter().map(Settlement::sequence));
                    std::mem::take(&mut aside)
                }
            };
            is_busy = batch.len() > LIGHT;
            let mut isolate = is_again;
            while !batch.is_empty() {
                let unsettled = self.settle(batch, isolate);
                if !unsettled.refused.is_empty() {
                    if unsettled.failed.is_empty() {
                        self.session.was_only_refused();
                    }
                    shared.put_aside(unsettled.refused.iter().map(Settlement::sequence));
                    aside.extend(unsettled.refused);
                    aside_until = Instant::now() + ASIDE;
                }
                batch = unsettled.failed;
                if shared.is_abandoned() && !batch.is_empty() {
                    return Err(GivenUp);
                }
                if !batch.is_empty() {
                    shared.pause(self.session.wait());
                }
                // A statement that failed by itself fails again: find out whose fault it is.
                isolate = true;
            }
            if is_last {
                return Ok(());
            }
        }
    }

    /// Waits for more outcomes while the senders have work; where messages have ordering keys, while
    /// they have a good deal more than what waits here, because that keeps back the next one of each
    /// key. Not on the channel: each outcome would wake this thread. Ends early at shutdown.
    fn linger(&self, outcomes: &Receiver<Settlement>, enough: usize) {
        let shared = self.shared;
        let until = Instant::now() + LINGER;
        let is_worth_it = || {
            let waiting = outcomes.len();
            let unsent = shared
                .in_flight
                .load(Ordering::Acquire)
                .saturating_sub(waiting);
            let least = match self.continued {
                Some(_) => KEYED_WORK * waiting,
                None => 0,
            };
            waiting < enough && unsent > shared.senders().max(least) && Instant::now() < until
        };
        while is_worth_it() && !shared.is_stopping() {
            let _ = shared.stop_signal().recv_timeout(GLANCE);
        }
    }

    /// Settles a batch, one statement for each lease and kind.
    fn settle(&mut self, batch: Vec<Settlement>, isolate: bool) -> Unsettled {
        let mut groups: BTreeMap<(LeaseId, Kind), Vec<Settlement>> = BTreeMap::new();
        for settlement in batch {
            groups
                .entry((settlement.lease, settlement.kind()))
                .or_default()
                .push(settlement);
        }
        let mut unsettled = Unsettled::default();
        for ((lease, kind), mut group) in groups {
            group.sort_unstable_by_key(Settlement::sequence);
            match self.settle_group(lease, kind, &group) {
                Ok(()) => {}
                Err(error) if isolate && is_of_the_data(&error) => {
                    self.settle_singly(lease, kind, group, &mut unsettled);
                }
                Err(_) => unsettled.failed.extend(group),
            }
        }
        let Unsettled { failed, refused } = &mut unsettled;
        for settlement in failed.iter_mut().chain(refused) {
            settlement.repeated = true;
        }
        unsettled
    }

    /// One after the other, with texts in plain ASCII, which every encoding can store: so one
    /// message that cannot be written down does not hold the others.
    ///
    /// After a few refusals the rest is left to the next try: a server that refuses everything, with
    /// a full disk for example, is not told by each message.
    fn settle_singly(
        &mut self,
        lease: LeaseId,
        kind: Kind,
        group: Vec<Settlement>,
        unsettled: &mut Unsettled,
    ) {
        let mut group = group.into_iter();
        while let Some(mut settlement) = group.next() {
            settlement.make_ascii();
            let one = std::slice::from_ref(&settlement);
            match self.settle_group(lease, kind, one) {
                Ok(()) => {}
                Err(error)
                    if is_of_the_data(&error)
                        && unsettled.refused.len() < MOST_REFUSED
                        && !self.shared.is_abandoned() =>
                {
                    log::error!(event = "settle_failed", sequence = settlement.sequence(), error:% = error; "a message cannot be settled; it is put aside and tried again");
                    unsettled.refused.push(settlement);
                }
                Err(_) => {
                    unsettled.failed.push(settlement);
                    unsettled.failed.extend(group);
                    return;
                }
            }
        }
    }

    fn settle_group(
        &mut self,
        lease: LeaseId,
        kind: Kind,
        group: &[Settlement],
    ) -> Result<(), DatabaseError> {
        let shared = self.shared;
        let began = Instant::now();
        let Settled {
            written,
            next,
            seen_to,
        } = self.settle_and_continue(lease, kind, group)?;
        let now = Instant::now();
        let took = now.saturating_duration_since(began);
        shared.metrics.settle_seconds.record(took.as_secs_f64());
        self.hand_on(next, lease);
        let changed: HashSet<i64> = written.changed.into_iter().collect();
        let missed: Vec<&Settlement> = group
            .iter()
            .filter(|s| !changed.contains(&s.sequence()))
            .collect();
        let settled_before = self.settled_before(&missed)?;
        add(&shared.stats.settles, 1);
        let mut counted = 0;
        for settlement in group {
            let bulkhead = &shared.bulkheads[settlement.bulkhead];
            bulkhead.in_flight.fetch_sub(1, Ordering::Relaxed);
            if written.in_conflict.contains(&settlement.sequence()) {
                tell(shared, &settlement.in_conflict(), now);
            } else if changed.contains(&settlement.sequence())
                || settled_before.contains(&settlement.sequence())
            {
                counted += 1;
                tell(shared, settlement, now);
            } else {
                add(&shared.stats.conflicts, 1);
                shared.metrics.conflicts.increment(1);
                log::warn!(event = "conflict", sequence = settlement.sequence(), topic = settlement.message.topic, lease = lease.0; "another relay has the message: its settle changed nothing");
            }
        }
        let counter = match kind {
            Kind::Delivered => &shared.stats.delivered,
            Kind::Deduplicated => &shared.stats.deduplicated,
            Kind::Retry => &shared.stats.retried,
            Kind::Dead => &shared.stats.dead,
            Kind::Split => &shared.stats.split,
            Kind::Released => &shared.stats.released,
        };
        add(counter, counted);
        add(&shared.stats.dead, written.in_conflict.len());
        if matches!(kind, Kind::Split | Kind::Released) {
            let topics = group.iter().flat_map(Settlement::topics_before);
            shared.returned(topics, group.iter().flat_map(Settlement::keys_before));
        } else {
            look_at_the_next(shared, group, &seen_to);
        }
        if kind == Kind::Split {
            // What it became is to be claimed.
            shared.look();
        }
        shared.finished(lease, group.len());
        Ok(())
    }

    /// Of messages that a repeated settle did not find: those that the first one had settled.
    fn settled_before(&mut self, missed: &[&Settlement]) -> Result<HashSet<i64>, DatabaseError> {
        let keys: Vec<(String, String)> = missed
            .iter()
            .filter(|s| s.repeated && matches!(s.kind(), Kind::Delivered | Kind::Dead))
            .map(|s| {
                (
                    s.message.idempotency_key.clone(),
                    s.message.destination.clone(),
                )
            })
            .collect();
        // A retry or a release that worked before leaves nothing to be told by; nor does it matter.
        let mut before: HashSet<i64> = missed
            .iter()
            .filter(|s| {
                let leaves_nothing = matches!(
                    s.kind(),
                    Kind::Retry | Kind::Split | Kind::Released | Kind::Deduplicated
                );
                s.repeated && leaves_nothing
            })
            .map(|s| s.sequence())
            .collect();
        if !keys.is_empty() {
            let name = &self.shared.config.table;
            before.extend(
                self.session
                    .run(|conn| settle::settled(conn, name, &keys))?,
            );
        }
        Ok(before)
    }
}

/// What could not be written down.
#[derive(Default)]
struct Unsettled {
    /// For want of a server: tried again at once, with everything else waiting.
    failed: Vec<Settlement>,
    /// Refused by itself.
    refused: Vec<Settlement>,
}

/// The first outcome and those that wait behind it, up to a batch.
fn gather(first: Settlement, outcomes: &Receiver<Settlement>, most: usize) -> Vec<Settlement> {
    std::iter::once(first)
        .chain(outcomes.try_iter())
        .take(most)
        .collect()
}

/// The server refused the values, and not for want of a server that can write.
fn is_of_the_data(error: &DatabaseError) -> bool {
    match error {
        DatabaseError::Statement(Error::DatabaseError(
            DatabaseErrorKind::ReadOnlyTransaction | DatabaseErrorKind::SerializationFailure,
            _,
        )) => false,
        DatabaseError::Statement(Error::DatabaseError(..) | Error::QueryBuilderError(_)) => {
            !error.is_without_answer()
        }
        _ => false,
    }
}

/// Tells the log, the metrics and the observers what is written down.
fn tell(shared: &Shared, settlement: &Settlement, now: Instant) {
    shared.progress.moved();
    shared.metrics.destinations[settlement.bulkhead].settled(settlement, now);
    log_settled(settlement, &shared.config);
    if let Some(settled) = settlement.told() {
        let message = &settlement.message;
        shared.observers.tell(message, |one| one.settled(&settled));
    }
}
