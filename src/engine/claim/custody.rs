//! Custody: the messages that this process has claimed and not yet settled. Where each is, how many a destination has,
//! what must not be claimed meanwhile, claims in doubt, and when to wake the claimer.
//!
//! A message is in flight, or put aside because the database refuses to settle it. Handlers
//! work on some of the messages in flight.
//!
//! Also the question whether anything is left to do, which a caller asks and the claimer answers.

mod aside;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use self::aside::{Judged, TopicsAside};
use super::doubt::{Doubt, RanBy};
use super::sql::claim::Topic;
use crate::clock;
use crate::engine::directory::Prefetched;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::plan::kept_back::KeptBack;
use crate::engine::plan::room::Held;
use crate::engine::plan::to::To;
use crate::engine::plan::wanted::RoomWanted;
use crate::engine::settle::settlement::Settlement;
use crate::engine::settle::sql::settle::Claim;
use crate::engine::wake::bell::Bell;
use crate::lock::lock;
use crate::sql::range::Range;

pub(crate) struct Custody {
    state: Mutex<CustodyState>,
    /// Signals that the claimer has answered a question.
    answered: Condvar,
    /// Whether the claimer waits for room.
    pub(crate) room_wanted: RoomWanted,
    /// Wakes the claimer.
    doorbell: Bell,
    /// Claims of a topic stop while this many of its messages are put aside.
    most_aside: usize,
}

#[derive(Debug, Default)]
struct CustodyState {
    /// All messages in flight.
    count: usize,
    /// The messages of each lease, including those put aside.
    of_leases: HashMap<LeaseId, HashSet<Claim>>,
    /// The messages of each way that has had any, including those put aside. Of those to be fanned out, which may be in
    /// flight for long, those put aside are not counted.
    of_ways: HashMap<To, Held>,
    /// The messages whose handlers run, possibly for long, with their leases.
    handled: HashSet<(LeaseId, Claim)>,
    aside: TopicsAside,
    kept_back: Arc<KeptBack>,
    /// A claim whose result was lost. The claim may have succeeded, or may still be running.
    doubt: Option<Doubt>,
    /// The number of claims whose results were lost.
    doubts: u64,
    /// How often the claimer has met another server than before.
    servers: u64,
    /// The settlers that are continuing keys. Nobody knows yet what they claim.
    continuing: usize,
    /// Whether the claimer releases what no thread knows, or waits until no settler continues keys.
    is_releasing: bool,
    /// The last question whether nothing is due, and the last question that the claimer has answered. The claimer
    /// answers after a query that began after the question, if the query found nothing and nothing was in flight.
    asked: u64,
    answered: u64,
}

/// A settler that is continuing keys: what it claims becomes known with the answer.
pub(crate) struct Continuing<'a>(&'a Custody);

impl Drop for Continuing<'_> {
    fn drop(&mut self) {
        self.0.state().continuing -= 1;
    }
}

/// What the claimer sees of the messages in custody, at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct InCustody {
    pub(crate) doubt: Option<Doubt>,
    pub(crate) kept_back: Arc<KeptBack>,
    /// The number of the last question whether anything is due.
    pub(crate) question: u64,
    /// Whether that question is still open.
    pub(crate) is_asked: bool,
    /// Whether all messages are settled, except those that the database has refused.
    pub(crate) is_nothing_in_flight: bool,
}

/// The end of a wait for an idle relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waited {
    Idle,
    TimedOut,
    Stopped,
}

/// What has happened to the messages in custody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CustodyEvent {
    /// Messages have left, or were put aside: there may be room.
    Left,
    /// A settle was refused: less is waited for.
    LessIsAwaited,
    /// Other messages may be claimed than before, or a settler has lost the result of its claim.
    Other,
}

impl CustodyState {
    fn is_asked(&self) -> bool {
        self.answered < self.asked
    }

    fn is_nothing_in_flight(&self) -> bool {
        self.aside.untried.is_empty() && self.count == 0
    }

    /// Removes messages of these ways. Also learns how many messages a member can take, by the time of its sends.
    fn remove(&mut self, ways: impl Iterator<Item = To>, prefetched: &Prefetched) {
        for to in ways {
            let Some(held) = self.of_ways.get_mut(&to) else {
                continue;
            };
            held.in_flight = held.in_flight.saturating_sub(1);
            if let To::Member(id) = to {
                held.prefetch = prefetched.get(&id).copied().flatten();
            }
        }
    }

    fn forget(&mut self, lease: LeaseId, claims: impl Iterator<Item = Claim>) {
        if let Some(left) = self.of_leases.get_mut(&lease) {
            claims.for_each(|claim| _ = left.remove(&claim));
            if left.is_empty() {
                self.of_leases.remove(&lease);
            }
        }
    }

    /// Decides whether claims of a topic stop or resume because of the messages put aside.
    fn judge(&mut self, topic: &Topic, most: usize) -> Option<Judged> {
        let held = &mut Arc::make_mut(&mut self.kept_back).refused;
        self.aside.judge(topic, held, most)
    }
}

impl Custody {
    /// `most_aside`: claims of a topic stop while this many of its messages are
    /// put aside.
    pub(crate) fn new(most_aside: usize, doorbell: Bell) -> Self {
        Self {
            state: Mutex::default(),
            answered: Condvar::new(),
            room_wanted: RoomWanted::default(),
            doorbell,
            most_aside,
        }
    }

    fn state(&self) -> MutexGuard<'_, CustodyState> {
        lock(&self.state)
    }

    /// Whether the claimer must be woken. It waits for room, or with an open question, which it answers when nothing is
    /// in flight.
    fn must_ring(&self, state: &CustodyState, event: CustodyEvent) -> bool {
        let is_settled = || state.count == 0 && state.is_asked();
        match event {
            CustodyEvent::Left => is_settled() || self.room_wanted.is_so(),
            CustodyEvent::LessIsAwaited => is_settled(),
            CustodyEvent::Other => true,
        }
    }

    /// Wakes the claimer if it must know.
    fn tell(&self, state: MutexGuard<'_, CustodyState>, event: CustodyEvent) {
        let must_ring = self.must_ring(&state, event);
        drop(state);
        if must_ring {
            self.doorbell.ring();
        }
    }

    /// A sender has taken a message from a queue, and has thereby made room if `is_room`. Takes no lock.
    pub(crate) fn made_room(&self, is_room: impl FnOnce() -> bool) {
        if self.room_wanted.is_so() && is_room() {
            self.doorbell.ring();
        }
    }

    /// Takes in claimed messages of a lease, and where each goes.
    pub(crate) fn began(&self, lease: LeaseId, claims: impl Iterator<Item = (Claim, To)>) {
        let mut guard = self.state();
        let state = &mut *guard;
        for (claim, to) in claims {
            state.of_leases.entry(lease).or_default().insert(claim);
            state.count += 1;
            state.of_ways.entry(to).or_default().in_flight += 1;
        }
    }

    /// Messages of a lease are settled, released or lost to another relay.
    pub(crate) fn settled(
        &self,
        lease: LeaseId,
        settled: impl ExactSizeIterator<Item = (Claim, To)> + Clone,
        prefetched: &Prefetched,
    ) {
        let mut state = self.state();
        let count = settled.len();
        state.remove(settled.clone().map(|(_, to)| to), prefetched);
        state.forget(lease, settled.map(|(claim, _)| claim));
        state.count = state.count.saturating_sub(count);
        self.tell(state, CustodyEvent::Left);
    }

    /// Puts messages of a topic aside. Each waits for an individual settle, and nothing waits for the messages.
    pub(crate) fn put_aside(&self, topic: &Topic, claims: impl Iterator<Item = (Claim, To)>) {
        let mut state = self.state();
        let new = state.aside.put(topic, claims);
        state.count = state.count.saturating_sub(new.len());
        let splits = new.into_iter().filter(|to| *to == To::Split);
        state.remove(splits, &Prefetched::new());
        let judged = state.judge(topic, self.most_aside);
        self.tell_judged(state, judged.into_iter().collect());
    }

    /// The individual settle of a message put aside was refused.
    pub(crate) fn refused(&self, claim: Claim) {
        let mut state = self.state();
        state.aside.untried.remove(&claim);
        self.tell(state, CustodyEvent::LessIsAwaited);
    }

    /// Messages of a topic, which were put aside, are settled.
    pub(crate) fn settled_aside(
        &self,
        lease: LeaseId,
        topic: &Topic,
        settled: &[&Settlement],
        prefetched: &Prefetched,
    ) {
        let mut state = self.state();
        let ways = settled.iter().map(|one| one.to);
        state.remove(ways.filter(|to| *to != To::Split), prefetched);
        let claims = settled.iter().map(|one| one.claim());
        state.aside.take(topic, claims.clone());
        state.forget(lease, claims);
        let held = state.kept_back.refused.clone();
        let judged = held
            .iter()
            .filter_map(|held| state.judge(held, self.most_aside));
        let judged = judged.collect();
        self.tell_judged(state, judged);
    }

    fn tell_judged(&self, mut state: MutexGuard<'_, CustodyState>, mut judged: Vec<Judged>) {
        let event = match judged.is_empty() {
            true => CustodyEvent::Left,
            false => CustodyEvent::Other,
        };
        judged.retain(|one| state.aside.is_news(one));
        self.tell(state, event);
        judged.into_iter().for_each(Judged::log);
    }

    /// A handler begins. A handler may run for long, so only the settle of its own message waits for it. If the lease is
    /// lost meanwhile, this relay may claim the message again, but does not start the handler again.
    pub(crate) fn begin_handling(&self, lease: LeaseId, claim: Claim) {
        self.state().handled.insert((lease, claim));
    }

    /// A handler has ended: its message is about to be settled.
    pub(crate) fn end_handling(&self, lease: LeaseId, claim: Claim) {
        self.state().handled.remove(&(lease, claim));
    }

    /// What must not be claimed.
    pub(crate) fn kept_back(&self) -> Arc<KeptBack> {
        Arc::clone(&self.state().kept_back)
    }

    /// Sets the paused topics, and the paused destinations without a gate. Returns the topics that were paused before.
    pub(crate) fn set_paused(
        &self,
        topics: HashSet<String>,
        destinations: HashSet<String>,
    ) -> HashSet<String> {
        let mut state = self.state();
        let kept_back = Arc::make_mut(&mut state.kept_back);
        kept_back.destinations = destinations;
        std::mem::replace(&mut kept_back.topics, topics)
    }

    /// The topics that are not claimed from because the database refuses to record the results of their messages, with
    /// the number of messages put aside for each.
    pub(crate) fn refused_topics(&self) -> Vec<(Topic, usize)> {
        let state = self.state();
        let count = |topic: &Topic| (topic.clone(), state.aside.of_topic(topic));
        state.kept_back.refused.iter().map(count).collect()
    }

    /// What the claimer sees.
    pub(crate) fn seen(&self) -> InCustody {
        let state = self.state();
        InCustody {
            doubt: state.doubt.clone(),
            kept_back: Arc::clone(&state.kept_back),
            question: state.asked,
            is_asked: state.is_asked(),
            is_nothing_in_flight: state.is_nothing_in_flight(),
        }
    }

    /// Whether this process has messages, or may have: of a claim in doubt.
    pub(crate) fn has_messages(&self) -> bool {
        let state = self.state();
        state.count > 0 || !state.of_leases.is_empty() || state.doubt.is_some()
    }

    /// The number of messages in flight.
    pub(crate) fn count(&self) -> usize {
        self.state().count
    }

    /// The number of messages in flight that no handler works on.
    pub(crate) fn count_beside_handlers(&self) -> usize {
        let state = self.state();
        state.count.saturating_sub(state.handled.len())
    }

    /// The number of messages that are claimed and not yet settled.
    pub(crate) fn unsettled(&self) -> usize {
        let state = self.state();
        state.count + state.aside.count()
    }

    /// The number of messages of a way.
    pub(crate) fn of_way(&self, to: To) -> usize {
        let state = self.state();
        state.of_ways.get(&to).map_or(0, |held| held.in_flight)
    }

    /// The messages of each way that has had any.
    pub(crate) fn of_ways(&self) -> HashMap<To, Held> {
        self.state().of_ways.clone()
    }

    /// Forgets members without messages, unless `is_there`.
    pub(super) fn keep_members(&self, is_there: impl Fn(u32) -> bool) {
        self.state().of_ways.retain(|to, held| match to {
            To::Member(id) | To::Feed(id) => held.in_flight > 0 || is_there(*id),
            _ => true,
        });
    }

    /// The leases of messages that are still in flight here, other than those that only handlers work on.
    pub(crate) fn leases(&self) -> HashSet<LeaseId> {
        let state = self.state();
        let is_handled = |lease, claim: &Claim| state.handled.contains(&(lease, *claim));
        let all = state.of_leases.iter();
        let held =
            all.filter(|(lease, claims)| !claims.iter().all(|claim| is_handled(**lease, claim)));
        held.map(|(lease, _)| *lease).collect()
    }

    pub(crate) fn doubt(&self) -> Option<Doubt> {
        self.state().doubt.clone()
    }

    /// All messages of a lease that this process knows in this range, so that the claimer can release all others. Until
    /// [`end_release`](Self::end_release), no settler claims. `None`: a settler is still continuing keys.
    pub(crate) fn begin_release(&self, lease: LeaseId, range: Range) -> Option<Vec<Claim>> {
        let mut state = self.state();
        state.is_releasing = true;
        let known = state.of_leases.get(&lease).into_iter().flatten();
        let known = known.filter(|claim| range.has(claim.sequence)).copied();
        (state.continuing == 0).then(|| known.collect())
    }

    pub(crate) fn end_release(&self) {
        self.state().is_releasing = false;
    }

    /// A settler begins to continue keys, until the value is dropped. `None`: it must not now, because the claimer
    /// releases what no thread knows.
    pub(crate) fn begin_continuing(&self) -> Option<Continuing<'_>> {
        let mut state = self.state();
        if state.is_releasing {
            return None;
        }
        state.continuing += 1;
        Some(Continuing(self))
    }

    /// The result of a claim was lost. The release of unknown messages begins anew: those of this claim may be in ranges
    /// that it has passed.
    pub(crate) fn begin_doubt(&self, lease: LeaseId, ran_by: RanBy) {
        let mut state = self.state();
        state.doubts += 1;
        let doubt = Doubt::new(lease, ran_by, state.doubts, clock::now());
        state.doubt = Some(doubt.beside(state.doubt.take()));
        self.tell(state, CustodyEvent::Other);
    }

    /// The claimer has met another server than before. A settler may still reach the previous one.
    pub(super) fn meet_another_server(&self) {
        self.state().servers += 1;
    }

    pub(crate) fn servers(&self) -> u64 {
        self.state().servers
    }

    /// Nothing is in doubt any more, unless another result was lost meanwhile.
    pub(crate) fn end_doubt(&self, doubt: &Doubt) {
        let mut state = self.state();
        state.is_releasing = false;
        state.doubt.take_if(|one| one == doubt);
    }

    /// Answers a question: a query that began after the question found nothing.
    pub(super) fn answer(&self, question: u64) {
        let mut state = self.state();
        state.answered = question.max(state.answered);
        self.answered.notify_all();
    }

    /// Asks whether nothing is due. Returns the number of the question. The caller rings for news.
    pub(crate) fn ask(&self) -> u64 {
        let mut state = self.state();
        state.asked += 1;
        state.asked
    }

    /// Waits until a question is answered.
    pub(crate) fn wait_for_answer(
        &self,
        question: u64,
        until: Option<Instant>,
        is_stopping: impl Fn() -> bool,
    ) -> Waited {
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let left = until.map_or(std::time::Duration::MAX, left);
        let is_open = |state: &mut CustodyState| state.answered < question && !is_stopping();
        let waited = (self.answered).wait_timeout_while(self.state(), left, is_open);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.answered >= question {
            true => Waited::Idle,
            false if is_stopping() => Waited::Stopped,
            false => Waited::TimedOut,
        }
    }

    /// Ends the waits for answers, because the relay stops.
    pub(crate) fn wake_askers(&self) {
        // Under the lock, so that no waiting thread misses the call.
        let _state = self.state();
        self.answered.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Custody {
        pub(crate) fn is_answered(&self, question: u64) -> bool {
            self.state().answered >= question
        }
    }

    const LEASE: LeaseId = LeaseId(1);

    fn claim(sequence: i64) -> Claim {
        Claim { sequence, at: 0 }
    }

    fn custody() -> Custody {
        Custody::new(20, Bell::new())
    }

    fn began(custody: &Custody, count: usize) {
        let claims = (1..).map(claim).take(count);
        custody.began(LEASE, claims.map(|claim| (claim, To::Nowhere)));
    }

    fn settled(custody: &Custody, sequence: i64) {
        let settled = [(claim(sequence), To::Nowhere)];
        custody.settled(LEASE, settled.into_iter(), &Prefetched::new());
    }

    fn is_rung(custody: &Custody) -> bool {
        custody.doorbell.ear.try_recv().is_ok()
    }

    /// R65: whatever else is in flight, what this process knows is not released, and what it does not know is.
    #[test]
    fn all_messages_in_custody_are_known_whatever_happens_to_them() {
        let custody = custody();
        began(&custody, 5);
        custody.begin_handling(LEASE, claim(1));
        let topic = Topic::new("a", "");
        custody.put_aside(&topic, [(claim(2), To::Nowhere)].into_iter());
        settled(&custody, 3);
        let known = |range| {
            let mut known = custody.begin_release(LEASE, range).expect("no settler");
            custody.end_release();
            known.sort_unstable();
            known
        };
        assert_eq!(known(Range::ALL), [1, 2, 4, 5].map(claim));
        let (after, upto) = (1, 4);
        assert_eq!(known(Range { after, upto }), [2, 4].map(claim));
        assert!(
            custody
                .begin_release(LeaseId(2), Range::ALL)
                .is_some_and(|one| one.is_empty())
        );
    }

    /// R65, G4: a settler that continues a key claims a message that is known only with its answer. A release of unknown
    /// messages would free it.
    #[test]
    fn no_settler_continues_keys_while_unknown_messages_are_released() {
        let custody = custody();
        let continuing = custody.begin_continuing().expect("nothing is released");
        assert_eq!(custody.begin_release(LEASE, Range::ALL), None);
        assert!(custody.begin_continuing().is_none(), "the claimer waits");
        drop(continuing);
        assert!(custody.begin_release(LEASE, Range::ALL).is_some());
        assert!(custody.begin_continuing().is_none());
        custody.end_release();
        assert!(custody.begin_continuing().is_some());
        // The lease of the doubt has ended.
        custody.begin_doubt(LEASE, RanBy::Any);
        let doubt = custody.doubt().expect("a doubt");
        custody.begin_release(LEASE, Range::ALL);
        custody.end_doubt(&doubt);
        assert!(custody.begin_continuing().is_some());
    }

    #[test]
    fn the_claimer_is_woken_when_the_messages_it_waits_for_are_put_aside() {
        let custody = custody();
        began(&custody, 3);
        let topic = Topic::new("a", "");
        let put_aside =
            |sequence| custody.put_aside(&topic, [(claim(sequence), To::Nowhere)].into_iter());
        put_aside(1);
        assert!(!is_rung(&custody));
        custody.room_wanted.want();
        put_aside(2);
        assert!(is_rung(&custody));
        custody.room_wanted.no_more();
        custody.ask();
        put_aside(3);
        assert!(is_rung(&custody), "a question is open");
    }

    /// R13: the release of unknown messages would miss those of the second claim.
    #[test]
    fn a_doubt_does_not_end_with_an_earlier_one() {
        let custody = custody();
        custody.begin_doubt(LEASE, RanBy::Any);
        let first = custody.doubt().expect("a doubt");
        custody.begin_doubt(LEASE, RanBy::Any);
        custody.end_doubt(&first);
        let second = custody.doubt().expect("another doubt");
        assert_ne!(first, second);
        custody.end_doubt(&second);
        assert_eq!(custody.doubt(), None);
    }
}
