//! What is claimed and not settled: counted, by lease, put aside, with handlers, and in doubt; and the question whether
//! anything is left to do.

use std::collections::{HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Shared;
use crate::clock;
use crate::lock::lock;
use crate::relay::bulkhead::{Bulkhead, Serves};
use crate::relay::doubt::Doubt;
use crate::relay::fate::{Met, Ways};
use crate::relay::job::Job;
use crate::relay::planner::View;
use crate::relay::registered::Rooms;
use crate::relay::settlement::Settlement;
use crate::relay::to::To;
use crate::relay::wanted::Want;
use crate::store::relay::claim::{Claimed, TakenOver, Topic};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::settle::Claim;

/// How often it is said, at most, that claims are held.
const TELL_INTERVAL: Duration = Duration::from_secs(60);

/// What is claimed and not settled.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    /// All of it, but for what is put aside.
    count: usize,
    /// How many messages of each lease are on their way here, also those put aside, but for what handlers work
    /// on.
    of_leases: HashMap<LeaseId, usize>,
    /// How many messages of each bulkhead, also those put aside.
    of_bulkheads: Vec<usize>,
    /// The same of each registered destination that has any.
    of_registered: HashMap<u32, usize>,
    /// Messages whose handlers run, and their leases. They count, and may do so for long.
    handled: HashSet<(LeaseId, Claim)>,
    aside: Aside,
    /// A claim without an answer: it may have worked, or be at work still.
    doubt: Option<Doubt>,
    /// The last question whether nothing is due, and the last one that the claimer has answered: after a look that
    /// began later than the question, found nothing, and had nothing in flight.
    asked: u64,
    answered: u64,
}

impl InFlight {
    /// Whether a question has no answer yet.
    fn is_asked(&self) -> bool {
        self.answered < self.asked
    }

    /// Whether everything is written down, but for what the database has refused.
    fn is_nothing(&self) -> bool {
        self.aside.untried.is_empty() && self.count == 0
    }

    /// Whether only handlers run: a claim without an answer does not wait for these.
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

    /// How many there are of the bulkhead to which something goes.
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

    fn forget_ways(&mut self, ways: impl Iterator<Item = To>) {
        for to in ways {
            if let Some(left) = self.of(to) {
                *left = left.saturating_sub(1);
            }
            if let To::Registered(id) = to
                && let Some(left) = self.of_registered.get_mut(&id)
            {
                *left = left.saturating_sub(1);
                if *left == 0 {
                    self.of_registered.remove(&id);
                }
            }
        }
    }
}

/// Messages whose settles the database refuses, or did of others of their topics.
#[derive(Debug, Default)]
struct Aside {
    /// Their claims: sequences may be given out again.
    of_topics: HashMap<Topic, HashSet<Claim>>,
    /// Those that were not refused by themselves, and may be fine.
    untried: HashSet<Claim>,
    /// No more of these is claimed.
    held: HashSet<Topic>,
    /// When it was last said that some are.
    told: Option<Instant>,
}

impl Aside {
    /// Returns how many were not there.
    fn put(&mut self, topic: &Topic, claims: impl Iterator<Item = Claim>) -> usize {
        let of_topic = self.of_topics.entry(topic.clone()).or_default();
        let new = |claim: &Claim| of_topic.insert(*claim);
        let new: Vec<Claim> = claims.filter(new).collect();
        self.untried.extend(&new);
        new.len()
    }

    /// Returns how many were there.
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

/// Claims of a topic have ended, or begun again.
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

    /// These messages were claimed under a lease. From here on it is known of each where it goes.
    /// `met`: which filters of registered destinations they meet, where that is known.
    pub(in crate::relay) fn took(
        &self,
        claimed: Vec<Claimed>,
        lease: LeaseId,
        met: Option<Met>,
    ) -> Vec<Job> {
        let is_taken_over = |one: &&Claimed| one.taken_over != TakenOver::No;
        let taken_over = claimed.iter().filter(is_taken_over).count() as u64;
        for Claimed { message, .. } in claimed.iter().filter(is_taken_over) {
            log::debug!(event = "taken_over", sequence = message.sequence.0, topic = message.topic, attempts = message.attempts; "a message was taken over from a relay that died");
        }
        if taken_over > 0 {
            log::warn!(event = "takeover", messages = taken_over; "took over {taken_over} messages from a relay that died or lost its lease");
        }
        let count = claimed.len() as u64;
        self.count(|stats| {
            stats.claimed += count;
            stats.taken_over += taken_over;
        });
        self.metrics.claimed.increment(count);
        self.metrics.taken_over.increment(taken_over);
        let now = clock::now();
        let mut ways = Ways {
            routes: &self.routes,
            bulkheads: &self.bulkheads,
            registry: self.registered.registry(),
            rooms: self.rooms(),
            met,
        };
        let jobs = claimed.into_iter().map(|one| ways.job(one, lease, now));
        let jobs: Vec<Job> = jobs.collect();
        for Job { to, message, .. } in &jobs {
            if let Some(bulkhead) = to.bulkhead(&self.bulkheads) {
                bulkhead.load(message);
            }
        }
        self.began(lease, jobs.iter().map(|job| job.to));
        jobs
    }

    /// Messages that go there are in flight under a lease.
    pub(crate) fn began(&self, lease: LeaseId, ways: impl Iterator<Item = To>) {
        let mut in_flight = self.in_flight();
        let mut count = 0;
        for to in ways {
            count += 1;
            if let Some(of_bulkhead) = in_flight.of(to) {
                *of_bulkhead += 1;
            }
            if let To::Registered(id) = to {
                *in_flight.of_registered.entry(id).or_default() += 1;
            }
        }
        *in_flight.of_leases.entry(lease).or_default() += count;
        in_flight.count += count;
    }

    /// These messages of a topic are put aside: they wait for a settle of their own, and nothing waits for
    /// them.
    pub(crate) fn put_aside(&self, topic: &Topic, claims: impl Iterator<Item = Claim>) {
        let mut in_flight = self.in_flight();
        let count = in_flight.aside.put(topic, claims);
        in_flight.count = in_flight.count.saturating_sub(count);
        let judged = self.judge(&mut in_flight.aside, topic);
        let is_asked = in_flight.is_asked();
        drop(in_flight);
        tell(judged);
        let is_wanted = |what| self.wanted.is(what);
        if is_asked || is_wanted(Want::Settled) || is_wanted(Want::Room) {
            self.signals.doorbell.ring();
        }
    }

    /// The settle of a message that is put aside was refused.
    pub(crate) fn refused(&self, claim: Claim) {
        let mut in_flight = self.in_flight();
        in_flight.aside.untried.remove(&claim);
        self.ring_when_sure(&in_flight);
    }

    /// These messages of a topic, which were put aside, are written down.
    pub(crate) fn finished_aside(&self, lease: LeaseId, topic: &Topic, settled: &[Settlement]) {
        let mut in_flight = self.in_flight();
        in_flight.forget_ways(settled.iter().map(|one| one.to));
        let aside = &mut in_flight.aside;
        let count = aside.take(topic, settled.iter().map(Settlement::claim));
        let held = aside.held.clone();
        let judge = |held: &Topic| self.judge(aside, held);
        let judged: Vec<Judged> = held.iter().filter_map(judge).collect();
        in_flight.forget(lease, count);
        self.ring_when_sure(&in_flight);
        drop(in_flight);
        tell(judged);
    }

    /// What waits for the answer whether anything is on its way has waited for these, too.
    fn ring_when_sure(&self, in_flight: &InFlight) {
        if in_flight.aside.untried.is_empty() && in_flight.is_asked() {
            self.signals.doorbell.ring();
        }
    }

    /// Claims of a topic end and begin again with the number of its messages that are put aside: what cannot
    /// be written down is not to be sent. Returns what the log is to be told when the lock is given back.
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

    /// What the claimer sees of it, at one moment.
    pub(in crate::relay) fn seen_by_claimer(&self) -> View {
        let in_flight = self.in_flight();
        View {
            doubt: in_flight.doubt,
            held: in_flight.aside.held.clone(),
            question: in_flight.asked,
            is_asked: in_flight.is_asked(),
            is_nothing_in_flight: in_flight.is_nothing(),
            ..View::default()
        }
    }

    /// A look that began after this question found nothing.
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

    /// Waits until nothing is due and nothing in flight. `false`: the time was over first.
    pub(in crate::relay) fn wait_until_idle(&self, timeout: Duration) -> bool {
        let question = self.ask();
        let is_open = |in_flight: &mut InFlight| in_flight.answered < question;
        let waited = (self.answered).wait_timeout_while(self.in_flight(), timeout, is_open);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// The topics of which nothing is claimed, because the database refuses to write down what became of their
    /// messages.
    pub(crate) fn held_topics(&self) -> HashSet<Topic> {
        self.in_flight().aside.held.clone()
    }

    /// The same, with how many messages of each are put aside.
    pub(crate) fn held_counts(&self) -> Vec<(Topic, usize)> {
        let aside = &self.in_flight().aside;
        let count = |topic: &Topic| (topic.clone(), aside.of_topic(topic));
        aside.held.iter().map(count).collect()
    }

    /// Whether everything that was claimed is written down, but for what the database has refused.
    pub(crate) fn is_nothing_in_flight(&self) -> bool {
        self.in_flight().is_nothing()
    }

    /// The messages that are put aside or whose handlers run, if nothing else is in flight; and the doubt, if
    /// there is one.
    pub(crate) fn only_aside(&self) -> (Option<Vec<Claim>>, Option<Doubt>) {
        let in_flight = self.in_flight();
        let of_handlers = in_flight.handled.iter().map(|(_, claim)| *claim);
        let put_aside = in_flight.aside.of_topics.values().flatten().copied();
        let is_all = in_flight.is_rest_settled();
        let aside = is_all.then(|| put_aside.chain(of_handlers).collect());
        (aside, in_flight.doubt)
    }

    /// A handler begins: nothing but its own settle waits for it, for it may take long. Where its lease is
    /// lost meanwhile, the message may be claimed here anew, and not be started again.
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

    /// The handler has ended: its settle is on its way.
    pub(in crate::relay) fn end_handling(&self, lease: LeaseId, claim: Claim) {
        let mut in_flight = self.in_flight();
        *in_flight.of_leases.entry(lease).or_default() += 1;
        in_flight.handled.remove(&(lease, claim));
    }

    /// What is in flight and not put aside.
    pub(in crate::relay) fn count_in_flight(&self) -> usize {
        self.in_flight().count
    }

    /// What is in flight and not with a handler.
    pub(in crate::relay) fn in_flight_beside_handlers(&self) -> usize {
        let in_flight = self.in_flight();
        in_flight.count.saturating_sub(in_flight.handled.len())
    }

    /// Messages of a bulkhead, claimed and not settled.
    pub(in crate::relay) fn in_flight_of(&self, bulkhead: &Bulkhead) -> usize {
        let mut in_flight = self.in_flight();
        match bulkhead.serves {
            Serves::Registered => in_flight.of_registered.values().sum(),
            _ => in_flight
                .of(To::Bulkhead(bulkhead.number))
                .copied()
                .unwrap_or(0),
        }
    }

    /// How much may be claimed for each registered destination.
    pub(in crate::relay) fn rooms(&self) -> Rooms {
        if !self.registered.registry().is_in_use() {
            return Rooms::default();
        }
        let in_flight = self.in_flight().of_registered.clone();
        Rooms::now(&self.registered, in_flight, self.config.batch)
    }

    /// Messages claimed and not settled.
    pub(crate) fn unsettled(&self) -> usize {
        let in_flight = self.in_flight();
        in_flight.count + in_flight.aside.all()
    }

    /// The leases under which messages were claimed that are still on their way here.
    pub(crate) fn held_leases(&self) -> HashSet<LeaseId> {
        self.in_flight().of_leases.keys().copied().collect()
    }

    /// Messages of a lease are settled, released or lost to another relay.
    pub(crate) fn finished(&self, lease: LeaseId, ways: impl ExactSizeIterator<Item = To>) {
        let count = ways.len();
        let mut in_flight = self.in_flight();
        in_flight.forget_ways(ways);
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

    /// A claim has no answer.
    pub(crate) fn begin_doubt(&self, doubt: Doubt) {
        let mut in_flight = self.in_flight();
        in_flight.doubt = Some(doubt.beside(in_flight.doubt));
    }

    /// Nothing about this lease is in doubt any more.
    pub(crate) fn end_doubt(&self, lease: LeaseId) {
        let mut in_flight = self.in_flight();
        in_flight.doubt.take_if(|doubt| doubt.lease == lease);
    }
}

fn tell(judged: impl IntoIterator<Item = Judged>) {
    for judged in judged {
        let (messages, all) = (judged.messages, judged.all);
        let Topic { topic, destination } = judged.topic;
        if judged.is_held {
            log::error!(event = "claims_held", topic = topic, destination = destination, messages = messages, all = all; "the database refuses to record the results of {messages} messages of {topic}: this relay claims no more of {topic} until the database accepts them");
        } else {
            log::info!(event = "claims_resumed", topic = topic, destination = destination, messages = messages; "claiming messages of {topic} again");
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

    /// R13: a claim without an answer is undone while a handler runs, which may take long.
    #[test]
    fn the_claimer_is_rung_for_when_only_handlers_run() {
        let (shared, rings) = shared_and_doorbell();
        shared.began(LEASE, [To::Nowhere; 3].into_iter());
        shared.wanted.want(Want::Settled);
        shared.begin_handling(LEASE, claim(1));
        shared.finished(LEASE, [To::Nowhere; 1].into_iter());
        assert!(rings.is_empty(), "one is on its way");
        shared.finished(LEASE, [To::Nowhere; 1].into_iter());
        assert_eq!(rings.try_recv(), Ok(()));
        shared.began(LEASE, [To::Nowhere; 1].into_iter());
        shared.begin_handling(LEASE, claim(2));
        assert_eq!(rings.try_recv(), Ok(()), "its handler begins last");
    }

    #[test]
    fn the_claimer_is_rung_for_when_what_it_waits_for_is_put_aside() {
        let (shared, rings) = shared_and_doorbell();
        shared.began(LEASE, [To::Nowhere; 2].into_iter());
        let topic = Topic::new("a", "");
        let claim = |sequence| Claim { sequence, at: 0 };
        shared.put_aside(&topic, [claim(1)].into_iter());
        assert!(rings.is_empty());
        shared.wanted.want(Want::Room);
        shared.put_aside(&topic, [claim(2)].into_iter());
        assert_eq!(rings.try_recv(), Ok(()));
    }
}
