//! What the database refuses to write down: kept apart from everything else, and tried again by itself.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::{GivenUp, Settler, each_once};
use crate::clock;
use crate::error::DatabaseError;
use crate::relay::database::Database;
use crate::relay::session::AfterRefusal;
use crate::relay::settlement::{Kind, Settlement};
use crate::store::relay::claim::Topic;
use crate::store::relay::lease::LeaseId;

/// After the first refusal a message waits for as long; after each further one for twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// After a try that was refused there is none for so many times what it took: refusals take a tenth of the time
/// of a busy thread at most, and half of an idle one's.
const REST: u32 = 9;
const IDLE_REST: u32 = 1;
/// For as long after a refusal the messages of a topic are settled apart from others.
const SUSPICION: Duration = Duration::from_secs(120);
/// What was refused is tried for as long when the relay ends.
const LAST_TRIES: Duration = Duration::from_secs(5);

/// What one statement settles here.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class {
    topic: Topic,
    lease: LeaseId,
    kind: Kind,
}

/// Messages of one class, to be settled by one statement.
#[derive(Debug)]
struct Try {
    class: Class,
    group: Vec<Settlement>,
    /// How often it was refused, where it is one message.
    refusals: u32,
}

/// Messages that were refused, or others of whose topics were refused lately.
#[derive(Debug, Default)]
pub(super) struct Refused {
    /// When a message of each was last refused.
    suspects: HashMap<Topic, Instant>,
    /// Not tried yet.
    fresh: VecDeque<Try>,
    /// Refused, in the order of their next tries; the number tells those of one time apart.
    waiting: BTreeMap<(Instant, u64), Try>,
    number: u64,
    /// No try before this.
    rests_until: Option<Instant>,
    /// Fresh ones and waiting ones take turns.
    had_fresh: bool,
}

impl Refused {
    /// When the next try is due, if anything is here.
    pub(super) fn next_try(&self, now: Instant) -> Option<Instant> {
        let waiting = self.waiting.keys().next().map(|(at, _)| *at);
        let next = match self.fresh.is_empty() {
            true => waiting?,
            false => now,
        };
        Some(self.rests_until.map_or(next, |until| next.max(until)))
    }

    fn take_next(&mut self) -> Option<Try> {
        let now = clock::now();
        if self.next_try(now).is_none_or(|at| at > now) {
            return None;
        }
        let is_due = self.waiting.keys().next().is_some_and(|(at, _)| *at <= now);
        let is_waitings_turn = self.fresh.is_empty() || (is_due && self.had_fresh);
        self.had_fresh = !is_waitings_turn;
        match self.had_fresh {
            true => self.fresh.pop_front(),
            false => self.waiting.pop_first().map(|(_, one)| one),
        }
    }

    /// Takes what is to be settled apart out of a batch.
    fn take_suspects(&mut self, batch: Vec<Settlement>) -> (Vec<Settlement>, Vec<Settlement>) {
        self.suspects.retain(|_, at| clock::since(*at) < SUSPICION);
        if self.suspects.is_empty() {
            return (Vec::new(), batch);
        }
        batch
            .into_iter()
            .partition(|one| self.suspects.contains_key(&one.topic()))
    }

    fn add_fresh(&mut self, class: Class, group: Vec<Settlement>, most: usize) {
        let has_room = |one: &&mut Try| one.class == class && one.group.len() < most;
        match self.fresh.iter_mut().find(has_room) {
            Some(one) => one.group.extend(group),
            None => self.fresh.push_back(Try {
                class,
                group,
                refusals: 0,
            }),
        }
    }

    fn wait(&mut self, one: Try, pause: Duration) {
        self.number += 1;
        let at = clock::now() + pause;
        self.waiting.insert((at, self.number), one);
    }

    /// One that had been refused was not any more: what else waits of its topic is tried at once, together.
    fn bring_forward(&mut self, topic: &Topic, most: usize) {
        let waiting = std::mem::take(&mut self.waiting);
        for (at, one) in waiting {
            if one.class.topic == *topic {
                self.add_fresh(one.class, one.group, most);
            } else {
                self.waiting.insert(at, one);
            }
        }
    }
}

impl<D: Database> Settler<'_, D> {
    /// Keeps messages apart of whose topics some were refused lately. Returns the others.
    pub(in crate::relay) fn set_suspects_apart(
        &mut self,
        batch: Vec<Settlement>,
    ) -> Vec<Settlement> {
        let (suspects, others) = self.refused.take_suspects(batch);
        for (class, group) in by_class(suspects) {
            self.put_apart(class, group);
        }
        others
    }

    fn put_apart(&mut self, class: Class, group: Vec<Settlement>) {
        let claims = group.iter().map(Settlement::claim);
        self.shared.put_aside(&class.topic, claims);
        self.refused.add_fresh(class, group, self.shared.batch());
    }

    /// Finds out of which topics of this refused group it was, by halves, and settles the others. Returns what
    /// could not be tried, for want of a server.
    pub(super) fn isolate(&mut self, group: Vec<Settlement>) -> Vec<Settlement> {
        self.after_refusal = AfterRefusal::Keep;
        // One topic: once more, by a new connection, which may know better.
        let mut parts = match by_class(group) {
            topics if topics.len() == 1 => vec![topics],
            topics => halves(topics),
        };
        let mut untried = Vec::new();
        while let Some(mut part) = parts.pop() {
            let began = clock::now();
            let result = if untried.is_empty() && !self.shared.is_abandoned() {
                let mut group: Vec<Settlement> = part.drain(..).flat_map(|(_, one)| one).collect();
                group.sort_unstable_by_key(Settlement::sequence);
                let result = self.settle_group(&group);
                if result.is_err() {
                    part = by_class(group);
                }
                result.map_err(Some)
            } else {
                Err(None)
            };
            match result {
                Ok(()) => {}
                Err(Some(error)) if error.is_refusal() => match part.len() {
                    1 => {
                        for (class, group) in part {
                            let claims = group.iter().map(Settlement::claim);
                            self.shared.put_aside(&class.topic, claims);
                            let one = Try {
                                class,
                                group,
                                refusals: 0,
                            };
                            self.was_refused(one, &error, clock::since(began));
                        }
                    }
                    _ => parts.extend(halves(part)),
                },
                Err(_) => untried.extend(part.into_iter().flat_map(|(_, one)| one)),
            }
        }
        self.after_refusal = AfterRefusal::Reconnect;
        if untried.is_empty() {
            self.db.was_only_refused();
        }
        untried
    }

    /// One try of what is kept apart, where it is time for one.
    pub(in crate::relay) fn try_next(&mut self) {
        if let Some(one) = self.refused.take_next() {
            // Tried again later, with everything else.
            let _ = self.try_to_settle(one);
        }
    }

    /// The relay ends: everything is tried once more, for a while.
    pub(super) fn try_the_rest(&mut self) -> Result<(), GivenUp> {
        let until = clock::now() + LAST_TRIES;
        let waiting = std::mem::take(&mut self.refused.waiting);
        for one in waiting.into_values() {
            self.refused.add_fresh(one.class, one.group, usize::MAX);
        }
        loop {
            let next = self.refused.fresh.pop_front();
            let now = clock::now();
            let is_due = |at: Instant| at <= now;
            let next = next.or_else(|| {
                let first = self.refused.waiting.first_entry()?;
                is_due(first.key().0).then(|| first.remove())
            });
            let Some(one) = next else {
                return Ok(());
            };
            if now >= until && one.group.iter().all(|message| message.repeated) {
                return Ok(());
            }
            if self.try_to_settle(one).is_err() {
                if self.shared.is_abandoned() {
                    return Err(GivenUp);
                }
                self.shared.pause(self.db.wait());
                // It waits behind those that were refused just now.
                let last = self.refused.waiting.pop_last();
                self.refused.fresh.extend(last.map(|(_, one)| one));
            } else if self.shared.is_abandoned() {
                return Ok(());
            }
        }
    }

    /// An error: for want of a server.
    fn try_to_settle(&mut self, mut one: Try) -> Result<(), DatabaseError> {
        let mut groups = each_once(one.group).into_iter();
        one.group = groups.next().unwrap_or_default();
        for group in groups {
            let again = Try {
                class: one.class.clone(),
                group,
                refusals: one.refusals,
            };
            self.refused.wait(again, Duration::ZERO);
        }
        let was_refused = one.group.iter().any(|message| message.repeated);
        self.after_refusal = AfterRefusal::Keep;
        self.topic_aside = Some(one.class.topic.clone());
        let began = clock::now();
        let result = self.settle_group(&one.group);
        self.topic_aside = None;
        self.after_refusal = AfterRefusal::Reconnect;
        match result {
            Ok(()) => {
                if was_refused {
                    let most = self.shared.batch();
                    self.refused.bring_forward(&one.class.topic, most);
                }
                Ok(())
            }
            Err(error) if error.is_refusal() => {
                self.was_refused(one, &error, clock::since(began));
                Ok(())
            }
            Err(error) => {
                one.group
                    .iter_mut()
                    .for_each(|message| message.repeated = true);
                self.refused.wait(one, self.db.wait());
                Err(error)
            }
        }
    }

    /// This was refused, and is put aside: it is tried again in halves, or later.
    fn was_refused(&mut self, mut one: Try, error: &DatabaseError, took: Duration) {
        let now = clock::now();
        let is_news = self.refused.suspects.insert(one.class.topic.clone(), now);
        let rest = if self.is_busy { REST } else { IDLE_REST };
        self.refused.rests_until = Some(now + rest * took);
        if is_news.is_none() {
            let Topic { topic, destination } = &one.class.topic;
            log::error!(event = "settle_failed", topic = topic, destination = destination, messages = one.group.len(), error:% = error; "the database refuses to record what became of messages of {topic}: they are put aside and tried again");
        }
        one.group
            .iter_mut()
            .for_each(|message| message.repeated = true);
        // Each encoding can store these.
        if one
            .group
            .iter_mut()
            .fold(false, |any, message| message.make_ascii() | any)
        {
            return self.refused.wait(one, Duration::ZERO);
        }
        if one.group.len() > 1 {
            let second = one.group.split_off(one.group.len() / 2);
            for group in [one.group, second] {
                let class = one.class.clone();
                let half = Try {
                    class,
                    group,
                    refusals: 0,
                };
                self.refused.wait(half, Duration::ZERO);
            }
            return;
        }
        for message in &one.group {
            log::debug!(event = "settle_refused", sequence = message.sequence(), refusals = one.refusals + 1, error:% = error; "the database refuses to record what became of message {}", message.sequence());
            self.shared.refused(message.claim());
        }
        let pause = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(one.refusals));
        one.refusals += 1;
        self.refused.wait(one, pause.min(LONGEST_PAUSE));
    }
}

/// By what one statement settles here.
fn by_class(settlements: Vec<Settlement>) -> Vec<(Class, Vec<Settlement>)> {
    let mut classes: BTreeMap<Class, Vec<Settlement>> = BTreeMap::new();
    for settlement in settlements {
        let class = Class {
            topic: settlement.topic(),
            lease: settlement.lease,
            kind: settlement.kind(),
        };
        classes.entry(class).or_default().push(settlement);
    }
    classes.into_iter().collect()
}

fn halves<T>(mut all: Vec<T>) -> Vec<Vec<T>> {
    let second = all.split_off(all.len() / 2);
    vec![all, second]
}
