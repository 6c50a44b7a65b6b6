//! The messages in flight (claimed and not yet settled): their counts, by lease and by destination; the messages put
//! aside, because the database refuses to settle them; the messages with handlers; and claims in doubt.
//!
//! Also the question whether anything is left to do, which a caller asks and the claimer answers.

use std::collections::{HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Shared;
use crate::clock;
use crate::lock::lock;
use crate::relay::bulkhead::{Bulkhead, Serves};
use crate::relay::doubt::Doubt;
use crate::relay::fate::{Met, Unasked, Ways};
use crate::relay::filtering::Filtering;
use crate::relay::job::Job;
use crate::relay::planner::View;
use crate::relay::registered::Pool;
use crate::relay::room::{Held, Rooms};
use crate::relay::settlement::Settlement;
use crate::relay::to::To;
use crate::relay::wanted::Want;
use crate::store::relay::claim::{Claimed, TakenOver, Topic};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::settle::Claim;

/// The shortest interval between two log lines about held claims.
const TELL_INTERVAL: Duration = Duration::from_secs(60);

/// The messages in flight.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    /// All messages except those put aside.
    count: usize,
    /// The number of messages of each lease, including those put aside, without those that handlers work on.
    of_leases: HashMap<LeaseId, usize>,
    /// The number of messages of each bulkhead, including those put aside.
    of_bulkheads: Vec<usize>,
    /// The messages of each registered destination that has had any, including those put aside.
    of_registered: HashMap<u32, Held>,
    /// The number of messages to be fanned out, without those put aside. They are part of `count`.
    to_split: usize,
    /// The messages whose handlers run, with their leases. They are part of `count`, possibly for long.
    handled: HashSet<(LeaseId, Claim)>,
    aside: Aside,
    /// A claim whose result was lost. The claim may have succeeded, or may still be running.
    doubt: Option<Doubt>,
    /// The last question whether nothing is due, and the last question that the claimer has answered. The claimer
    /// answers after a query that began after the question, if the query found nothing and nothing was in flight.
    asked: u64,
    answered: u64,
}

/// The end of a wait for an idle relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::relay) enum Waited {
    Idle,
    TimedOut,
    Stopped,
}

impl InFlight {
    /// Whether a question is still unanswered.
    fn is_asked(&self) -> bool {
        self.answered < self.asked
    }

    /// Whether all messages are settled, except those that the database has refused.
    fn is_nothing(&self) -> bool {
        self.aside.untried.is_empty() && self.count == 0
    }

    /// Whether only messages with handlers are in flight. The resolution of a doubtful claim does not wait for
    /// handlers.
    fn is_rest_settled(&self) -> bool {
        self.count == self.handled.len()
    }

    fn forget(&mut self, lease: LeaseId, count: usize) {
        if let Some(left) = self.of_leases.get_mut(&lease) {
            *left = left.saturating_sub(count);
            if *left == 0 {
                self.of_leases.remove(&lease);
            }
        }
    }

    /// The count of the bulkhead that `to` belongs to.
    fn of(&mut self, to: To) -> Option<&mut usize> {
        let number = match to {
            To::Bulkhead(number) => number,
            To::Registered(_) | To::Split | To::Nowhere => return None,
        };
        if self.of_bulkheads.len() <= number {
            self.of_bulkheads.resize(number + 1, 0);
        }
        self.of_bulkheads.get_mut(number)
    }

    fn forget_splits(&mut self, ways: impl Iterator<Item = To>) {
        let count = ways.filter(|to| *to == To::Split).count();
        self.to_split = self.to_split.saturating_sub(count);
    }

    fn add_way(&mut self, to: To) {
        self.to_split += usize::from(to == To::Split);
        if let Some(of_bulkhead) = self.of(to) {
            *of_bulkhead += 1;
        }
        if let To::Registered(id) = to {
            self.of_registered.entry(id).or_default().in_flight += 1;
        }
    }

    /// Also learns how many messages the registered destinations among these can take, by the time of their sends.
    fn forget_ways(&mut self, ways: impl Iterator<Item = To>, pool: &Pool) {
        for to in ways {
            if let Some(left) = self.of(to) {
                *left = left.saturating_sub(1);
            }
            if let To::Registered(id) = to
                && let Some(held) = self.of_registered.get_mut(&id)
            {
                held.in_flight = held.in_flight.saturating_sub(1);
                let member = pool.get(&id);
                held.prefetch = member.map(|member| member.bulkhead.prefetch());
            }
        }
    }
}

/// Messages put aside: the database refused their settles, or the settles of other messages of their topics.
#[derive(Debug, Default)]
struct Aside {
    /// By topic. Claims and not sequences, because a sequence may be used again.
    of_topics: HashMap<Topic, HashSet<Claim>>,
    /// The messages that were not yet refused individually. Their settles may succeed.
    untried: HashSet<Claim>,
    /// The topics of which the relay claims no more messages.
    held: HashSet<Topic>,
    /// The last log line about held topics.
    told: Option<Instant>,
}

impl Aside {
    /// Returns where the new ones among these messages go.
    fn put(&mut self, topic: &Topic, claims: impl Iterator<Item = (Claim, To)>) -> Vec<To> {
        let of_topic = self.of_topics.entry(topic.clone()).or_default();
        let new: Vec<(Claim, To)> = claims
            .filter(|(claim, _)| of_topic.insert(*claim))
            .collect();
        self.untried.extend(new.iter().map(|(claim, _)| claim));
        new.into_iter().map(|(_, to)| to).collect()
    }

    /// Returns how many claims were removed.
    fn take(&mut self, topic: &Topic, claims: impl Iterator<Item = Claim>) -> usize {
        let Some(of_topic) = self.of_topics.get_mut(topic) else {
            return 0;
        };
        let untried = &mut self.untried;
        let taken = |claim: &Claim| {
            untried.remove(claim);
            of_topic.remove(claim)
        };
        let count = claims.filter(taken).count();
        if of_topic.is_empty() {
            self.of_topics.remove(topic);
        }
        count
    }

    fn of_topic(&self, topic: &Topic) -> usize {
        self.of_topics.get(topic).map_or(0, HashSet::len)
    }

    fn all(&self) -> usize {
        self.of_topics.values().map(HashSet::len).sum()
    }
}

/// A decision to stop or to resume claims of a topic.
struct Judged {
    topic: Topic,
    is_held: bool,
    messages: usize,
    all: usize,
}

impl Shared {
    fn in_flight(&self) -> MutexGuard<'_, InFlight> {
        lock(&self.in_flight)
    }

    /// Takes claimed messages in, and decides where each message goes. `met` contains the matching filters of
    /// registered destinations, if they were looked up.
    pub(in crate::relay) fn took(
        &self,
        claimed: Vec<Claimed>,
        lease: LeaseId,
        met: Result<Met, Unasked>,
    ) -> Vec<Job> {
        self.count_claimed(&claimed);
        let claimed = claimed.into_iter().map(|one| (one, lease));
        let jobs = self.decide(claimed, met);
        self.began(lease, jobs.iter().map(|job| job.to));
        jobs
    }

    /// Takes claimed messages in whose filters must be evaluated first. They go nowhere until then.
    pub(in crate::relay) fn took_to_filter(&self, claimed: &[Claimed], lease: LeaseId) {
        self.count_claimed(claimed);
        self.began(lease, claimed.iter().map(|_| To::Nowhere));
    }

    /// Decides where messages go whose filters are evaluated.
    pub(in crate::relay) fn filtered(&self, filtered: Vec<Filtering>) -> Vec<Job> {
        let mut met = Met::new();
        for one in &filtered {
            let sequence = one.message().sequence.0;
            met.extend((one.answers.iter()).map(|(id, matches)| ((sequence, *id), *matches)));
        }
        let claimed = filtered.into_iter().map(|one| (one.claimed, one.lease));
        let jobs = self.decide(claimed, Ok(met));
        let mut in_flight = self.in_flight();
        jobs.iter().for_each(|job| in_flight.add_way(job.to));
        jobs
    }

    fn count_claimed(&self, claimed: &[Claimed]) {
        let is_taken_over = |one: &&Claimed| one.taken_over != TakenOver::No;
        let taken_over = claimed.iter().filter(is_taken_over).count() as u64;
        for Claimed { message, .. } in claimed.iter().filter(is_taken_over) {
            log::debug!(event = "taken_over", sequence = message.sequence.0, topic = message.topic, attempts = message.attempts; "took over message {} of {} from a relay that crashed or lost its lease ({} attempts so far)", message.message_id, message.topic, message.attempts);
        }
        if taken_over > 0 {
            log::warn!(event = "takeover", messages = taken_over; "took over {taken_over} messages from a relay that crashed or lost its lease: this relay continues with them");
        }
        let count = claimed.len() as u64;
        self.count(|stats| {
            stats.claimed += count;
            stats.taken_over += taken_over;
        });
        self.metrics.claimed.increment(count);
        self.metrics.taken_over.increment(taken_over);
    }

    fn decide(
        &self,
        claimed: impl Iterator<Item = (Claimed, LeaseId)>,
        met: Result<Met, Unasked>,
    ) -> Vec<Job> {
        let now = clock::now();
        let mut ways = Ways {
            routes: &self.routes,
            bulkheads: &self.bulkheads,
            on_dead: self.config.on_dead,
            registry: self.registered.registry(),
            rooms: self.rooms(),
            met,
        };
        let jobs = claimed.map(|(one, lease)| ways.job(one, lease, now));
        let jobs: Vec<Job> = jobs.collect();
        for Job { to, message, .. } in &jobs {
            if let Some(bulkhead) = to.bulkhead(&self.bulkheads) {
                bulkhead.load(message);
            }
        }
        jobs
    }

    /// Counts messages as in flight under a lease, by where they go.
    pub(crate) fn began(&self, lease: LeaseId, ways: impl Iterator<Item = To>) {
        let mut in_flight = self.in_flight();
        let mut count = 0;
        for to in ways {
            count += 1;
            in_flight.add_way(to);
        }
        *in_flight.of_leases.entry(lease).or_default() += count;
        in_flight.count += count;
    }

    /// Puts messages of a topic aside. Each waits for an individual settle, and nothing waits for the messages.
    pub(crate) fn put_aside(&self, topic: &Topic, claims: impl Iterator<Item = (Claim, To)>) {
        let mut in_flight = self.in_flight();
        let new = in_flight.aside.put(topic, claims);
        in_flight.count = in_flight.count.saturating_sub(new.len());
        in_flight.forget_splits(new.into_iter());
        let judged = self.judge(&mut in_flight.aside, topic);
        let is_asked = in_flight.is_asked();
        drop(in_flight);
        tell(judged);
        let is_wanted = |what| self.wanted.is(what);
        if is_asked || is_wanted(Want::Settled) || is_wanted(Want::Room) {
            self.signals.doorbell.ring();
        }
    }

    /// Records that the individual settle of a message put aside was refused.
    pub(crate) fn refused(&self, claim: Claim) {
        let mut in_flight = self.in_flight();
        in_flight.aside.untried.remove(&claim);
        self.ring_when_sure(&in_flight);
    }

    /// Records that messages of a topic, which were put aside, are settled.
    pub(crate) fn finished_aside(&self, lease: LeaseId, topic: &Topic, settled: &[&Settlement]) {
        let pool = self.registered.pool();
        let mut in_flight = self.in_flight();
        in_flight.forget_ways(settled.iter().map(|one| one.to), &pool);
        let aside = &mut in_flight.aside;
        let count = aside.take(topic, settled.iter().map(|one| one.claim()));
        let held = aside.held.clone();
        let judge = |held: &Topic| self.judge(aside, held);
        let judged: Vec<Judged> = held.iter().filter_map(judge).collect();
        in_flight.forget(lease, count);
        self.ring_when_sure(&in_flight);
        drop(in_flight);
        tell(judged);
    }

    /// Wakes the claimer for a pending question, once every message put aside has been tried individually.
    fn ring_when_sure(&self, in_flight: &InFlight) {
        if in_flight.aside.untried.is_empty() && in_flight.is_asked() {
            self.signals.doorbell.ring();
        }
    }

    /// Stops and resumes claims of a topic, by the number of its messages that are put aside: messages whose results
    /// cannot be recorded must not be sent. Returns the decision, to be logged after the lock is released.
    fn judge(&self, aside: &mut Aside, topic: &Topic) -> Option<Judged> {
        let (messages, all) = (aside.of_topic(topic), aside.all());
        let most = 2 * self.batch();
        let was_held = aside.held.contains(topic);
        let is_held = match was_held {
            false => messages > 0 && (messages >= most || all >= 2 * most),
            true => messages > 0 && (messages > most / 2 || all > most),
        };
        if is_held == was_held {
            return None;
        }
        self.signals.doorbell.ring();
        if is_held {
            aside.held.insert(topic.clone());
            if (aside.told).is_some_and(|told| clock::since(told) < TELL_INTERVAL) {
                return None;
            }
            aside.told = Some(clock::now());
        } else {
            aside.held.remove(topic);
        }
        let topic = topic.clone();
        Some(Judged {
            topic,
            is_held,
            messages,
            all,
        })
    }

    /// The claimer's view of the messages in flight, at one point in time.
    pub(in crate::relay) fn seen_by_claimer(&self) -> View {
        let full = self.filter_load.full();
        let in_flight = self.in_flight();
        View {
            doubt: in_flight.doubt,
            held: in_flight.aside.held.union(&full).cloned().collect(),
            question: in_flight.asked,
            is_asked: in_flight.is_asked(),
            is_nothing_in_flight: in_flight.is_nothing(),
            ..View::default()
        }
    }

    /// Answers a question: a query that began after the question found nothing.
    pub(in crate::relay) fn answer(&self, question: u64) {
        let mut in_flight = self.in_flight();
        in_flight.answered = question.max(in_flight.answered);
        self.answered.notify_all();
    }

    /// Asks whether nothing is due. Returns the number of the question.
    pub(in crate::relay) fn ask(&self) -> u64 {
        let mut in_flight = self.in_flight();
        in_flight.asked += 1;
        let question = in_flight.asked;
        drop(in_flight);
        self.signals.news.ring();
        question
    }

    /// Waits until no message is due and none is in flight.
    pub(in crate::relay) fn wait_until_idle(&self, until: Option<Instant>) -> Waited {
        let question = self.ask();
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let left = until.map_or(Duration::MAX, left);
        let is_open =
            |in_flight: &mut InFlight| in_flight.answered < question && !self.is_stopping();
        let waited = (self.answered).wait_timeout_while(self.in_flight(), left, is_open);
        let (in_flight, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match in_flight.answered >= question {
            true => Waited::Idle,
            false if self.is_stopping() => Waited::Stopped,
            false => Waited::TimedOut,
        }
    }

    /// Ends the waits for an idle relay, because the relay stops.
    pub(super) fn wake_askers(&self) {
        // Under the lock, so that no waiting thread misses the call.
        let _in_flight = self.in_flight();
        self.answered.notify_all();
    }

    /// The topics of which the relay claims nothing, because the database refuses to record the results of their
    /// messages.
    pub(crate) fn held_topics(&self) -> HashSet<Topic> {
        self.in_flight().aside.held.clone()
    }

    /// The held topics, with the number of messages put aside for each.
    pub(crate) fn held_counts(&self) -> Vec<(Topic, usize)> {
        let aside = &self.in_flight().aside;
        let count = |topic: &Topic| (topic.clone(), aside.of_topic(topic));
        aside.held.iter().map(count).collect()
    }

    /// Whether all claimed messages are settled, except those that the database has refused.
    pub(crate) fn is_nothing_in_flight(&self) -> bool {
        self.in_flight().is_nothing()
    }

    /// The messages that are put aside or whose handlers run, if no others are in flight; and the doubt, if any.
    pub(crate) fn only_aside(&self) -> (Option<Vec<Claim>>, Option<Doubt>) {
        let in_flight = self.in_flight();
        let of_handlers = in_flight.handled.iter().map(|(_, claim)| *claim);
        let put_aside = in_flight.aside.of_topics.values().flatten().copied();
        let is_all = in_flight.is_rest_settled();
        let aside = is_all.then(|| put_aside.chain(of_handlers).collect());
        (aside, in_flight.doubt)
    }

    /// Records that a handler begins. A handler may run for long, so only the settle of its own message waits for it.
    /// If the lease is lost meanwhile, this relay may claim the message again, but does not start the handler again.
    pub(in crate::relay) fn begin_handling(&self, lease: LeaseId, claim: Claim) {
        let mut in_flight = self.in_flight();
        in_flight.handled.insert((lease, claim));
        in_flight.forget(lease, 1);
        let is_rest_settled = in_flight.is_rest_settled();
        drop(in_flight);
        if is_rest_settled && self.wanted.is(Want::Settled) {
            self.signals.doorbell.ring();
        }
    }

    /// Records that a handler has ended: its message is about to be settled.
    pub(in crate::relay) fn end_handling(&self, lease: LeaseId, claim: Claim) {
        let mut in_flight = self.in_flight();
        *in_flight.of_leases.entry(lease).or_default() += 1;
        in_flight.handled.remove(&(lease, claim));
    }

    /// The number of messages in flight, without those put aside.
    pub(in crate::relay) fn count_in_flight(&self) -> usize {
        self.in_flight().count
    }

    /// The number of messages in flight, without those put aside or with a handler.
    pub(in crate::relay) fn in_flight_beside_handlers(&self) -> usize {
        let in_flight = self.in_flight();
        in_flight.count.saturating_sub(in_flight.handled.len())
    }

    /// The number of messages to be fanned out in flight. They may be there for long.
    pub(in crate::relay) fn to_split(&self) -> usize {
        self.in_flight().to_split
    }

    /// The number of messages of a bulkhead in flight.
    pub(in crate::relay) fn in_flight_of(&self, bulkhead: &Bulkhead) -> usize {
        let mut in_flight = self.in_flight();
        match bulkhead.serves {
            Serves::Registered => {
                let held = in_flight.of_registered.values();
                held.map(|held| held.in_flight).sum()
            }
            _ => in_flight
                .of(To::Bulkhead(bulkhead.number))
                .copied()
                .unwrap_or(0),
        }
    }

    /// How many messages may be claimed for each registered destination.
    pub(in crate::relay) fn rooms(&self) -> Rooms {
        if !self.registered.registry().is_in_use() {
            return Rooms::default();
        }
        let held = self.in_flight().of_registered.clone();
        Rooms::now(&self.registered, held, self.config.batch)
    }

    /// Forgets removed destinations without messages.
    pub(in crate::relay) fn forget_removed(&self) {
        let registry = self.registered.registry();
        let is_there =
            |id: &u32, held: &mut Held| held.in_flight > 0 || registry.get(*id).is_some();
        self.in_flight().of_registered.retain(is_there);
    }

    /// The number of messages that are claimed and not yet settled.
    pub(crate) fn unsettled(&self) -> usize {
        let in_flight = self.in_flight();
        in_flight.count + in_flight.aside.all()
    }

    /// The leases of messages that are still in flight here.
    pub(crate) fn held_leases(&self) -> HashSet<LeaseId> {
        self.in_flight().of_leases.keys().copied().collect()
    }

    /// Records that messages of a lease are settled, released or lost to another relay.
    pub(crate) fn finished(&self, lease: LeaseId, ways: impl ExactSizeIterator<Item = To> + Clone) {
        let count = ways.len();
        let pool = self.registered.pool();
        let mut in_flight = self.in_flight();
        in_flight.forget_ways(ways.clone(), &pool);
        in_flight.forget_splits(ways);
        in_flight.forget(lease, count);
        in_flight.count = in_flight.count.saturating_sub(count);
        let (is_rest_settled, is_asked) = (in_flight.is_rest_settled(), in_flight.is_asked());
        drop(in_flight);
        let is_waited_for = || is_asked || self.wanted.is(Want::Settled);
        if (is_rest_settled && is_waited_for()) || self.wanted.is(Want::Room) {
            self.signals.doorbell.ring();
        }
    }

    pub(crate) fn doubt(&self) -> Option<Doubt> {
        self.in_flight().doubt
    }

    /// Records that the result of a claim was lost.
    pub(crate) fn begin_doubt(&self, doubt: Doubt) {
        let mut in_flight = self.in_flight();
        in_flight.doubt = Some(doubt.beside(in_flight.doubt));
    }

    /// Records that no claim under this lease is in doubt any more.
    pub(crate) fn end_doubt(&self, lease: LeaseId) {
        let mut in_flight = self.in_flight();
        in_flight.doubt.take_if(|doubt| doubt.lease == lease);
    }
}

fn tell(judged: impl IntoIterator<Item = Judged>) {
    for judged in judged {
        let (messages, all) = (judged.messages, judged.all);
        let Topic { topic, destination } = judged.topic;
        let to = match destination.as_str() {
            "" => String::new(),
            name => format!(" to {name}"),
        };
        if judged.is_held {
            log::error!(event = "claims_held", topic = topic, destination = destination, messages = messages, all = all; "the database refuses to record the results of {messages} messages of {topic}{to}: this relay claims no more of them until the database accepts the results");
        } else {
            log::info!(event = "claims_resumed", topic = topic, destination = destination, messages = messages; "the database accepts the results of {topic}{to} again: this relay claims its messages again");
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::relay::monitor::tests::shared_and_doorbell;
    use crate::relay::to::To;
    use crate::relay::wanted::Want;
    use crate::store::relay::claim::Topic;
    use crate::store::relay::lease::LeaseId;
    use crate::store::relay::settle::Claim;

    impl crate::relay::shared::Shared {
        pub(in crate::relay) fn is_answered(&self, question: u64) -> bool {
            self.in_flight().answered >= question
        }
    }

    const LEASE: LeaseId = LeaseId(1);

    fn claim(sequence: i64) -> Claim {
        Claim { sequence, at: 0 }
    }

    /// R13: a claim whose result was lost is undone while a handler runs, because a handler may take long.
    #[test]
    fn the_claimer_is_rung_for_when_only_handlers_run() {
        let (shared, rings) = shared_and_doorbell();
        shared.began(LEASE, [To::Nowhere; 3].into_iter());
        shared.wanted.want(Want::Settled);
        shared.begin_handling(LEASE, claim(1));
        shared.finished(LEASE, [To::Nowhere; 1].into_iter());
        assert!(rings.is_empty(), "one message is in flight");
        shared.finished(LEASE, [To::Nowhere; 1].into_iter());
        assert_eq!(rings.try_recv(), Ok(()));
        shared.began(LEASE, [To::Nowhere; 1].into_iter());
        shared.begin_handling(LEASE, claim(2));
        assert_eq!(rings.try_recv(), Ok(()), "the handler begins last");
    }

    #[test]
    fn the_claimer_is_woken_when_the_messages_it_waits_for_are_put_aside() {
        let (shared, rings) = shared_and_doorbell();
        shared.began(LEASE, [To::Nowhere; 2].into_iter());
        let topic = Topic::new("a", "");
        let claim = |sequence| Claim { sequence, at: 0 };
        shared.put_aside(&topic, [(claim(1), To::Nowhere)].into_iter());
        assert!(rings.is_empty());
        shared.wanted.want(Want::Room);
        shared.put_aside(&topic, [(claim(2), To::Nowhere)].into_iter());
        assert_eq!(rings.try_recv(), Ok(()));
    }
}
