//! Settlements that are set aside, so that no other settlement waits with them: the database refuses to record them, or
//! another session has locked their messages, such as a person's open transaction. They are tried again apart from all
//! others.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::settlement::{Kind, Settlement, to};
use super::{GivenUp, Settler, each_once};
use crate::clock;
use crate::engine::claim::sql::claim::Topic;
use crate::engine::host::database::Database;
use crate::engine::host::session::AfterRefusal;
use crate::engine::lease::sql::lease::LeaseId;
use crate::error::DatabaseError;
use crate::log;

/// How long a message waits after its first refusal. Each further refusal doubles the wait.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The time between two looks whether messages are still locked.
const LOCKED_PAUSE: Duration = Duration::from_secs(1);
/// After a refused try, the next try waits this many times as long as the refused try took. So refusals take at most a
/// tenth of a busy thread's time, and half of an idle thread's.
const REST: u32 = 9;
const IDLE_REST: u32 = 1;
/// How long after a refusal the messages of a topic are settled apart from others.
const SUSPICION: Duration = Duration::from_secs(120);
/// For how long settlements set aside are retried when the relay ends.
const LAST_TRIES: Duration = Duration::from_secs(5);

/// Messages of one class, to be settled by one statement, and the number of refusals if it is a single message.
type Try = (Vec<Settlement>, u32);

impl Settlement {
    /// The properties that all messages of one try share.
    fn class(&self) -> (Topic, LeaseId, Kind) {
        (self.topic(), self.lease, self.kind())
    }
}

/// The settlements that are set aside.
// Why: docs/decisions.md#put-aside
#[derive(Debug, Default)]
pub(super) struct SetAside {
    /// The last refusal of each topic.
    suspects: HashMap<Topic, Instant>,
    /// Not tried yet: their topics have had a recent refusal.
    fresh: VecDeque<Try>,
    /// By the time of the next try. The number makes the keys unique.
    waiting: BTreeMap<(Instant, u64), Try>,
    number: u64,
    /// Whose messages were locked at the last look, and the time of the next one.
    locked: Vec<Settlement>,
    look_at: Option<Instant>,
    /// No try before this time.
    rests_until: Option<Instant>,
    /// Whether the last try was a fresh one: fresh and waiting tries take turns.
    had_fresh: bool,
}

impl SetAside {
    /// The time of the next try or look, if there is one.
    pub(super) fn next_try(&self, now: Instant) -> Option<Instant> {
        self.next_refused(now).into_iter().chain(self.look_at).min()
    }

    fn next_refused(&self, now: Instant) -> Option<Instant> {
        let waiting = self.waiting.keys().next().map(|(at, _)| *at);
        let next = match self.fresh.is_empty() {
            true => waiting?,
            false => now,
        };
        Some(self.rests_until.map_or(next, |until| next.max(until)))
    }

    fn take_next(&mut self) -> Option<Try> {
        let now = clock::now();
        if self.next_refused(now).is_none_or(|at| at > now) {
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

    /// Splits a batch into the messages of suspect topics and the others.
    fn take_suspects(&mut self, batch: Vec<Settlement>) -> (Vec<Settlement>, Vec<Settlement>) {
        self.suspects.retain(|_, at| clock::since(*at) < SUSPICION);
        if self.suspects.is_empty() {
            return (Vec::new(), batch);
        }
        batch
            .into_iter()
            .partition(|one| self.suspects.contains_key(&one.topic()))
    }

    fn add_fresh(&mut self, group: Vec<Settlement>, most: usize) {
        let class = group[0].class();
        let has_room = |(one, _): &&mut Try| one[0].class() == class && one.len() < most;
        match self.fresh.iter_mut().find(has_room) {
            Some((one, _)) => one.extend(group),
            None => self.fresh.push_back((group, 0)),
        }
    }

    fn wait(&mut self, one: Try, pause: Duration) {
        self.number += 1;
        let at = clock::now() + pause;
        self.waiting.insert((at, self.number), one);
    }

    /// One look is for all locked messages.
    fn wait_for_locks(&mut self, group: Vec<Settlement>) {
        self.locked.extend(group);
        if self.has_locked() && self.look_at.is_none() {
            self.look_at = Some(clock::now() + LOCKED_PAUSE);
        }
    }

    fn has_locked(&self) -> bool {
        !self.locked.is_empty()
    }

    /// The locked messages, if a look is due.
    fn take_locked(&mut self) -> Option<Vec<Settlement>> {
        self.look_at.take_if(|at| *at <= clock::now())?;
        Some(std::mem::take(&mut self.locked))
    }

    /// Makes the waiting settlements that `is_so` ready to be tried at once, together.
    fn bring_forward(&mut self, most: usize, is_so: impl Fn(&Settlement) -> bool) {
        for (at, (group, refusals)) in std::mem::take(&mut self.waiting) {
            match is_so(&group[0]) {
                true => self.add_fresh(group, most),
                false => drop(self.waiting.insert(at, (group, refusals))),
            }
        }
    }
}

impl<D: Database> Settler<'_, D> {
    /// Takes the runs apart, and sets aside what would hold up the others: locked messages, and those of topics with a
    /// recent refusal. Returns the others.
    pub(crate) fn set_apart(&mut self, batch: Vec<Settlement>) -> Vec<Settlement> {
        let batch = match batch.iter().any(|one| !one.behind.is_empty()) {
            true => batch.into_iter().flat_map(Settlement::apart).collect(),
            false => batch,
        };
        let free = self.without_locked(batch);
        let (suspects, others) = self.aside.take_suspects(free);
        let mut classes: BTreeMap<_, Vec<Settlement>> = BTreeMap::new();
        for one in suspects {
            classes.entry(one.class()).or_default().push(one);
        }
        for group in classes.into_values() {
            self.put_aside(&group);
            self.aside.add_fresh(group, self.shared.batch());
        }
        others
    }

    fn put_aside(&self, group: &[Settlement]) {
        let each = group.iter().flat_map(Settlement::each);
        let claims = each.map(|one| (one.claim(), one.to));
        self.shared.custody.put_aside(&group[0].topic(), claims);
    }

    /// Finds the topics that caused the refusal of this group, by bisection, and settles the others. Returns the
    /// messages that could not be tried because the database is unavailable.
    pub(super) fn isolate(&mut self, mut group: Vec<Settlement>) -> Vec<Settlement> {
        group.sort_by_cached_key(Settlement::topic);
        let mut parts = match halves_by_topic(&mut group) {
            Some(second) => vec![group, second],
            // One topic: try once more on a new connection, which may succeed.
            None => vec![group],
        };
        let mut untried = Vec::new();
        while let Some(mut part) = parts.pop() {
            if !untried.is_empty() || self.shared.is_abandoned() {
                untried.extend(part);
                continue;
            }
            match self.settle_apart(&mut part, None) {
                Ok(()) => part.into_iter().for_each(|one| self.splits.add(one)),
                Err((error, took)) if self.is_refused(&error) => match halves_by_topic(&mut part) {
                    Some(second) => parts.extend([part, second]),
                    None => {
                        self.put_aside(&part);
                        self.was_refused((part, 0), &error, took);
                    }
                },
                Err(_) => untried.extend(part),
            }
        }
        untried
    }

    /// Like [`settle_group`](Self::settle_group), for a group whose refusal is expected. `aside` is the topic of a group that was put aside. An error comes
    /// with the duration of the try.
    fn settle_apart(
        &mut self,
        group: &mut Vec<Settlement>,
        aside: Option<Topic>,
    ) -> Result<(), (DatabaseError, Duration)> {
        (self.after_refusal, self.topic_aside) = (AfterRefusal::Keep, aside);
        let began = clock::now();
        let settled = self.settle_group(group);
        (self.after_refusal, self.topic_aside) = (AfterRefusal::Reconnect, None);
        settled.map_err(|error| (error, clock::since(began)))
    }

    /// Makes one try of a settlement set aside, or one look at those that are locked, if it is due.
    pub(super) fn try_aside(&mut self) {
        if let Some(locked) = self.aside.take_locked() {
            self.look_at_locked(locked);
        } else if let Some(one) = self.aside.take_next() {
            // An error is no problem here: the settlement waits for its next try.
            let _ = self.try_to_settle(one);
        }
    }

    /// After a settle that exceeded its time limit: sets the messages that are locked aside, and returns the others.
    /// If the query fails, the database is unavailable, and all are returned to be retried.
    pub(super) fn set_locked_apart(&mut self, group: Vec<Settlement>) -> Vec<Settlement> {
        let (locked, free) = match self.by_lock(group) {
            Ok(parts) => parts,
            Err(group) => return group,
        };
        let Some(first) = locked.first() else {
            // A refusal that has taken long looks like a timeout.
            return self.isolate(free);
        };
        let (sequence, messages) = (first.sequence(), locked.len());
        log::warn!(event = "settle_locked", sequence = sequence, messages = messages; "another session has locked {messages} messages, among them message {sequence}: their results are recorded when it ends its transaction (see pg_stat_activity)");
        self.aside.wait_for_locks(locked);
        free
    }

    /// While another session keeps messages locked, it may have locked some of these, too: sets them aside, so that the
    /// settle does not wait for them. Returns the others.
    pub(super) fn without_locked(&mut self, group: Vec<Settlement>) -> Vec<Settlement> {
        if !self.aside.has_locked() {
            return group;
        }
        match self.by_lock(group) {
            Ok((locked, free)) => {
                self.aside.wait_for_locks(locked);
                free
            }
            Err(group) => group,
        }
    }

    /// Settles those of these messages that are no longer locked.
    fn look_at_locked(&mut self, waiting: Vec<Settlement>) {
        // At the end of the relay, no piece of a fan-out follows.
        let is_stopping = self.shared.is_stopping();
        let waiting = waiting.into_iter().map(|one| match one.kind() {
            Kind::Split if is_stopping => one.release(),
            _ => one,
        });
        let waiting = waiting.collect();
        let (locked, free) = match self.by_lock(waiting) {
            Ok(parts) => parts,
            Err(waiting) => (waiting, Vec::new()),
        };
        self.aside.wait_for_locks(locked);
        let left = self.settle(free);
        self.aside.wait_for_locks(left);
    }

    /// The locked messages and the others. An error, with all messages, if the database is unavailable.
    fn by_lock(
        &mut self,
        group: Vec<Settlement>,
    ) -> Result<(Vec<Settlement>, Vec<Settlement>), Vec<Settlement>> {
        let each = group.iter().flat_map(Settlement::each);
        let sequences: Vec<i64> = each.map(Settlement::sequence).collect();
        // The session reports the error.
        let Ok(locked) = self.db.locked(&sequences) else {
            return Err(group);
        };
        let locked: HashSet<i64> = locked.into_iter().collect();
        let Ok(feeds) = self.locked_feeds(&group) else {
            return Err(group);
        };
        let is_locked = |one: &Settlement| {
            one.each().any(|one| locked.contains(&one.sequence()))
                || (one.kind() == Kind::Stored && feeds.contains(&*self.feed_of(one)))
        };
        Ok(group.into_iter().partition(is_locked))
    }

    /// The feeds of these messages whose rows another session has locked.
    fn locked_feeds(&mut self, group: &[Settlement]) -> Result<HashSet<String>, DatabaseError> {
        let stored = group.iter().filter(|one| one.kind() == Kind::Stored);
        let feeds: HashSet<Arc<str>> = stored.map(|one| self.feed_of(one)).collect();
        match self.shared.settings.log {
            Some(log) if !feeds.is_empty() => {
                let feeds: Vec<&str> = feeds.iter().map(|name| &**name).collect();
                Ok(self.db.locked_feeds(log, &feeds)?.into_iter().collect())
            }
            _ => Ok(HashSet::new()),
        }
    }

    fn feed_of(&self, settlement: &Settlement) -> Arc<str> {
        settlement.destination(&self.shared.bulkheads)
    }

    /// At the end of the relay, releases the messages that are not fanned out yet, and tries all settlements set aside
    /// once more, for at most [`LAST_TRIES`].
    pub(super) fn try_the_rest(&mut self) -> Result<(), GivenUp> {
        let unfinished = self.splits.release();
        self.settle_all(unfinished)?;
        let until = clock::now() + LAST_TRIES;
        self.aside.bring_forward(usize::MAX, |_| true);
        loop {
            if let Some(locked) = self.aside.take_locked() {
                self.look_at_locked(locked);
                continue;
            }
            let now = clock::now();
            let next = self.aside.fresh.pop_front().or_else(|| {
                let first = self.aside.waiting.first_entry()?;
                (first.key().0 <= now).then(|| first.remove())
            });
            let is_late = now >= until;
            let Some(one) = next else {
                if is_late || self.shared.is_abandoned() || !self.aside.has_locked() {
                    return Ok(());
                }
                self.shared.pause(LOCKED_PAUSE / 4);
                continue;
            };
            if is_late && one.0.iter().all(|message| message.repeated) {
                return Ok(());
            }
            if self.try_to_settle(one).is_err() {
                if self.shared.is_abandoned() {
                    return Err(GivenUp);
                }
                self.shared.pause(self.db.after().wait);
                // The settlement that failed is the last of the waiting ones. It becomes fresh again.
                self.aside
                    .fresh
                    .extend(self.aside.waiting.pop_last().map(|(_, one)| one));
            } else if self.shared.is_abandoned() {
                return Ok(());
            }
        }
    }

    /// Returns an error only if the database is unavailable.
    fn try_to_settle(&mut self, (group, refusals): Try) -> Result<(), DatabaseError> {
        let mut groups = each_once(group).into_iter();
        let mut group = groups.next().unwrap_or_default();
        for again in groups {
            (self.aside).wait((again, 0), Duration::ZERO);
        }
        let was_refused = group.iter().any(|message| message.repeated);
        let topic = group[0].topic();
        match self.settle_apart(&mut group, Some(topic.clone())) {
            Ok(()) => {
                let most = self.shared.batch();
                if was_refused {
                    (self.aside).bring_forward(most, |one| one.topic() == topic);
                }
                if !group.is_empty() {
                    self.aside.add_fresh(group, most);
                }
                Ok(())
            }
            Err((error, took)) if self.is_refused(&error) => {
                self.was_refused((group, refusals), &error, took);
                Ok(())
            }
            Err((error, _)) => {
                group.iter_mut().for_each(Settlement::repeat);
                (self.aside).wait((group, refusals), self.db.after().wait);
                Err(error)
            }
        }
    }

    /// Handles the refusal of a try that was put aside: the try is repeated in halves, or later.
    fn was_refused(&mut self, (mut group, refusals): Try, error: &DatabaseError, took: Duration) {
        let (now, topic) = (clock::now(), group[0].topic());
        let is_news = self.aside.suspects.insert(topic.clone(), now).is_none();
        let rest = if self.is_busy { REST } else { IDLE_REST };
        self.aside.rests_until = Some(now + rest * took);
        if is_news {
            let Topic { topic, destination } = topic;
            let to = to(&destination);
            log::error!(event = "settle_failed", topic = topic, destination = destination, messages = group.len(), error:% = error; "the database refuses to record the results of {} messages of {topic}{to}: retrying until it accepts them: {error}", group.len());
        }
        let mut was_changed = false;
        for message in &mut group {
            message.repeat();
            // Every database encoding can store ASCII.
            was_changed |= message.make_ascii();
        }
        if was_changed {
            return (self.aside).wait((group, refusals), Duration::ZERO);
        }
        if group.len() > 1 {
            let second = group.split_off(group.len() / 2);
            for half in [group, second] {
                (self.aside).wait((half, 0), Duration::ZERO);
            }
            return;
        }
        let refusals = refusals + 1;
        for message in group.iter().flat_map(Settlement::each) {
            log::debug!(event = "settle_refused", sequence = message.sequence(), refusals = refusals, error:% = error; "the database refuses to record the result of message {} ({}), {refusals} times so far: retrying later: {error}", message.message.message_id, message.message.topic);
            self.shared.custody.refused(message.claim());
        }
        let pause = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(refusals - 1));
        (self.aside).wait((group, refusals), pause.min(LONGEST_PAUSE));
    }
}

/// Cuts messages that are ordered by topic at the start of a topic, near the middle. Returns the second part. `None`:
/// all messages have one topic.
fn halves_by_topic(group: &mut Vec<Settlement>) -> Option<Vec<Settlement>> {
    let middle = group.len() / 2;
    let begins = |at: &usize| group[*at].topic() != group[*at - 1].topic();
    let behind = (middle.max(1)..group.len()).find(begins);
    let at = behind.or_else(|| (1..middle).rev().find(begins))?;
    Some(group.split_off(at))
}
