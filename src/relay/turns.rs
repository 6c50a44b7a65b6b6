//! Turns: how registered destinations share a few threads.
//!
//! Destinations with waiting messages take turns, one message each. A destination may have one send in flight at first,
//! twice as many after each success (up to its limit), and half as many after each failure. New destinations, without
//! a response yet, and failing destinations get only a part of the threads. So hundreds of hanging destinations leave
//! threads to the others.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::gate::{Admission, Pass};
use super::job::Job;

/// The threads are divided into this many parts. Failing destinations get at most [`OF_FAILING`] parts; new and failing
/// destinations together get at most [`OF_DOUBTFUL`].
const PARTS: usize = 4;
const OF_FAILING: usize = 1;
const OF_DOUBTFUL: usize = 3;

/// The recent result of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Class {
    /// No send has had a result yet.
    #[default]
    New,
    /// The last send failed.
    Failing,
    Good,
}

/// The order of turns: the first class that has threads left comes first.
const CLASSES: [Class; 3] = [Class::New, Class::Failing, Class::Good];

/// The next work of a thread.
#[expect(clippy::large_enum_variant, reason = "nearly all values are sends")]
pub(super) enum Next {
    Send(Job, Pass, UnderWay),
    /// The gate is closed: these jobs are released.
    GiveBack(Vec<Job>),
    /// No work until this time, or until new work is announced.
    Nothing(Option<Instant>),
}

/// Claimed messages, by destination.
pub(super) struct Turns {
    of: HashMap<u32, Turn>,
    classes: [OfClass; CLASSES.len()],
    /// Destinations that wait for a time: for the rate limit, or for the response to a first send.
    later: BTreeSet<(Instant, u32)>,
    threads: usize,
}

/// The totals of a class.
#[derive(Debug, Default)]
struct OfClass {
    /// The destinations whose turns come next, in order.
    ready: VecDeque<u32>,
    under_way: usize,
    /// Messages that no thread has taken.
    waiting: usize,
}

#[derive(Default)]
struct Turn {
    jobs: VecDeque<Job>,
    class: Class,
    under_way: usize,
    /// The most sends that may be in flight.
    allowed: usize,
    is_ready: bool,
    later: Option<Instant>,
}

/// A send in flight. The thread returns it to [`Turns::ended`] when the send has ended.
#[derive(Debug)]
#[must_use]
pub(super) struct UnderWay {
    id: u32,
    class: Class,
}

impl Turns {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            of: HashMap::new(),
            classes: Default::default(),
            later: BTreeSet::new(),
            threads,
        }
    }

    /// Messages that no thread has taken.
    pub(super) fn waiting(&self) -> usize {
        self.classes.iter().map(|class| class.waiting).sum()
    }

    /// Messages that no thread has taken, of destinations whose last send succeeded.
    pub(super) fn waiting_of_good(&self) -> usize {
        self.classes[Class::Good as usize].waiting
    }

    /// Whether all destinations with messages wait for a time.
    pub(super) fn only_waits(&self) -> bool {
        self.waiting() > 0 && self.classes.iter().all(|class| class.ready.is_empty())
    }

    /// Whether there is work for another thread.
    pub(super) fn has_ready(&self) -> bool {
        let is_ready = |class: &Class| !self.classes[*class as usize].ready.is_empty();
        CLASSES
            .iter()
            .any(|class| is_ready(class) && self.has_thread(*class))
    }

    /// Whether a destination waits for a time.
    pub(super) fn has_later(&self) -> bool {
        !self.later.is_empty()
    }

    /// Whether another thread may work for this class.
    fn has_thread(&self, class: Class) -> bool {
        let under_way = |class: Class| self.classes[class as usize].under_way;
        let is_below = |sends: usize, parts: usize| sends < (self.threads * parts / PARTS).max(1);
        let doubtful = under_way(Class::New) + under_way(Class::Failing);
        match class {
            Class::Good => true,
            Class::New => is_below(doubtful, OF_DOUBTFUL),
            Class::Failing => {
                is_below(doubtful, OF_DOUBTFUL) && is_below(under_way(class), OF_FAILING)
            }
        }
    }

    /// Whether a destination has messages waiting or in flight.
    #[cfg(test)]
    pub(super) fn has(&self, id: u32) -> bool {
        let turn = self.of.get(&id);
        turn.is_some_and(|turn| turn.under_way > 0 || !turn.jobs.is_empty())
    }

    /// Whether the first send is in flight, so that no other may begin.
    #[cfg(test)]
    pub(super) fn awaits_first(&self, id: u32) -> bool {
        let turn = self.of.get(&id);
        turn.is_some_and(|turn| turn.class == Class::New && turn.under_way > 0)
    }

    /// Forgets removed destinations without messages.
    pub(super) fn keep(&mut self, is_there: impl Fn(u32) -> bool) {
        let is_kept = |turn: &Turn| turn.under_way > 0 || !turn.jobs.is_empty();
        self.of.retain(|id, turn| is_there(*id) || is_kept(turn));
    }

    /// Adds a message for a destination.
    pub(super) fn put(&mut self, id: u32, job: Job) {
        let turn = self.of.entry(id).or_insert_with(|| Turn {
            allowed: 1,
            ..Turn::default()
        });
        turn.jobs.push_back(job);
        self.classes[turn.class as usize].waiting += 1;
        self.make_ready(id);
    }

    fn make_ready(&mut self, id: u32) {
        let Some(turn) = self.of.get_mut(&id) else {
            return;
        };
        let may = turn.under_way < turn.allowed && turn.later.is_none();
        if may && !turn.is_ready && !turn.jobs.is_empty() {
            turn.is_ready = true;
            self.classes[turn.class as usize].ready.push_back(id);
        }
    }

    /// The next work of a thread. `admit` asks the destination's gate.
    pub(super) fn next(&mut self, now: Instant, mut admit: impl FnMut(u32) -> Admission) -> Next {
        while let Some((at, id)) = self.later.first().copied()
            && at <= now
        {
            self.wait_is_over(id);
        }
        while let Some(id) = self.pop() {
            let Some(turn) = self.of.get_mut(&id) else {
                continue;
            };
            turn.is_ready = false;
            if turn.jobs.is_empty() || turn.under_way >= turn.allowed {
                // A send has failed since the destination got its turn.
                continue;
            }
            let class = turn.class;
            let of_class = &mut self.classes[class as usize];
            match admit(id) {
                Admission::Pass(pass) => {
                    let Some(job) = turn.jobs.pop_front() else {
                        continue;
                    };
                    turn.under_way += 1;
                    of_class.under_way += 1;
                    of_class.waiting -= 1;
                    self.make_ready(id);
                    return Next::Send(job, pass, UnderWay { id, class });
                }
                Admission::Closed => {
                    let jobs: Vec<Job> = turn.jobs.drain(..).collect();
                    of_class.waiting -= jobs.len();
                    return Next::GiveBack(jobs);
                }
                Admission::Wait(wait) => {
                    let at = now + wait.max(Duration::from_millis(1));
                    turn.later = Some(at);
                    self.later.insert((at, id));
                }
            }
        }
        Next::Nothing(self.later.first().map(|(at, _)| *at))
    }

    fn pop(&mut self) -> Option<u32> {
        CLASSES
            .into_iter()
            .find_map(|class| match self.has_thread(class) {
                true => self.classes[class as usize].ready.pop_front(),
                false => None,
            })
    }

    fn wait_is_over(&mut self, id: u32) {
        let turn = self.of.get_mut(&id);
        if let Some(at) = turn.and_then(|turn| turn.later.take()) {
            self.later.remove(&(at, id));
        }
        self.make_ready(id);
    }

    /// A send has ended. `went_well`: `None` if no message was sent. `most`: the most sends that the destination may
    /// have in flight.
    pub(super) fn ended(&mut self, send: UnderWay, went_well: Option<bool>, most: usize) {
        self.classes[send.class as usize].under_way -= 1;
        let Some(turn) = self.of.get_mut(&send.id) else {
            return;
        };
        turn.under_way -= 1;
        let class = match went_well {
            Some(true) => Class::Good,
            Some(false) => Class::Failing,
            None => turn.class,
        };
        turn.allowed = match went_well {
            Some(true) => (turn.allowed * 2).min(most).max(1),
            Some(false) => (turn.allowed / 2).max(1),
            None => turn.allowed,
        };
        let before = std::mem::replace(&mut turn.class, class);
        if class != before {
            self.classes[before as usize].waiting -= turn.jobs.len();
            self.classes[class as usize].waiting += turn.jobs.len();
            if std::mem::take(&mut turn.is_ready) {
                let ready = &mut self.classes[before as usize].ready;
                ready.retain(|one| *one != send.id);
            }
        }
        // The messages that waited for the response to a first send may go now.
        self.wait_is_over(send.id);
    }

    /// Takes all messages that no thread has taken.
    pub(super) fn take_all(&mut self) -> Vec<Job> {
        self.later.clear();
        for class in &mut self.classes {
            class.ready.clear();
            class.waiting = 0;
        }
        let mut jobs = Vec::new();
        for turn in self.of.values_mut() {
            (turn.is_ready, turn.later) = (false, None);
            jobs.extend(turn.jobs.drain(..));
        }
        jobs
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::relay::gate::Gate;
    use crate::relay::planner::tests::claimed;
    use crate::relay::to::To;
    use crate::store::relay::lease::LeaseId;

    const MOST: usize = 4;

    fn job(id: u32, sequence: i64) -> Job {
        Job {
            message: claimed(sequence, "a", None).message,
            lease: LeaseId(1),
            to: To::Registered(id),
            customer: None,
            registration: None,
            unsent: None,
        }
    }

    /// All gates are open.
    fn open(now: Instant) -> impl FnMut(u32) -> Admission {
        let gate = Gate::open("a", None);
        move |_| gate.try_pass(now)
    }

    /// The next send of a thread, if there is one.
    fn next(turns: &mut Turns, now: Instant) -> Option<UnderWay> {
        match turns.next(now, open(now)) {
            Next::Send(_, _, send) => Some(send),
            Next::GiveBack(_) => panic!("no gate is closed"),
            Next::Nothing(_) => None,
        }
    }

    /// Plays `sends` sends of equal length on `threads` threads. Returns the number of sends of each destination.
    fn play(turns: &mut Turns, threads: usize, sends: usize) -> BTreeMap<u32, usize> {
        let now = Instant::now();
        let (mut got, mut under_way) = (BTreeMap::new(), VecDeque::new());
        for _ in 0..sends {
            while under_way.len() < threads
                && let Some(send) = next(turns, now)
            {
                *got.entry(send.id).or_default() += 1;
                under_way.push_back(send);
            }
            if let Some(send) = under_way.pop_front() {
                turns.ended(send, Some(true), MOST);
            }
        }
        got
    }

    /// R46: fairness does not depend on the backlog of a destination, or on which destination came first.
    #[test]
    fn destinations_with_work_get_as_much_as_each_other() {
        let mut turns = Turns::new(8);
        for sequence in 0..1_000 {
            turns.put(1, job(1, sequence));
        }
        for id in 2..=10 {
            for sequence in 0..200 {
                turns.put(id, job(id, sequence));
            }
        }
        let got = play(&mut turns, 8, 1_000);
        let (least, most) = (got.values().min(), got.values().max());
        let (least, most) = (least.expect("some"), most.expect("some"));
        assert!(most - least <= 2 * MOST, "{got:?}");
        assert_eq!(got.len(), 10);
    }

    /// R46
    #[test]
    fn one_begins_with_one_send_and_has_more_as_they_succeed() {
        let (mut turns, now) = (Turns::new(64), Instant::now());
        for sequence in 0..100 {
            turns.put(1, job(1, sequence));
        }
        let mut allowed = Vec::new();
        for went_well in [true, true, true, false, false, false, true] {
            let mut sends = Vec::new();
            while let Some(send) = next(&mut turns, now) {
                sends.push(send);
            }
            allowed.push(sends.len());
            // One send has a result; the others did not send a message.
            let mut sends = sends.into_iter();
            turns.ended(sends.next().expect("a send"), Some(went_well), MOST);
            sends.for_each(|send| turns.ended(send, None, MOST));
        }
        assert_eq!(allowed, [1, 2, 4, 4, 2, 1, 1]);
    }

    /// R46: a failing destination gets no more sends than it may have, even if its turn was next.
    #[test]
    fn a_failure_counts_before_the_next_turn() {
        let (mut turns, now) = (Turns::new(64), Instant::now());
        for sequence in 0..100 {
            turns.put(1, job(1, sequence));
        }
        let send = |turns: &mut Turns| next(turns, now);
        for went_well in [true, true, true, false] {
            let sent = send(&mut turns).expect("a send");
            turns.ended(sent, Some(went_well), 16);
        }
        // The destination may have four sends in flight, has three, and its turn is next.
        let mut sends: Vec<UnderWay> = (0..3).filter_map(|_| send(&mut turns)).collect();
        turns.ended(sends.remove(0), Some(false), 16);
        assert!(
            send(&mut turns).is_none(),
            "two sends are in flight, as many as allowed"
        );
        turns.ended(sends.remove(0), None, 16);
        assert!(send(&mut turns).is_some());
    }

    /// R46: hanging destinations get only their share of the threads.
    #[test]
    fn those_that_have_not_answered_leave_threads_to_the_others() {
        let (mut turns, now) = (Turns::new(8), Instant::now());
        turns.put(1, job(1, 0));
        let send = next(&mut turns, now).expect("the first send");
        turns.ended(send, Some(true), MOST);
        for id in 2..=100 {
            turns.put(id, job(id, 0));
        }
        turns.put(1, job(1, 1));
        turns.put(1, job(1, 2));
        let mut sends = Vec::new();
        while let Some(send) = next(&mut turns, now) {
            sends.push(send);
        }
        let good = sends.iter().filter(|send| send.id == 1).count();
        assert_eq!((good, sends.len()), (2, 8), "six of eight threads");
        // One of the hanging destinations has responded.
        let other = sends
            .iter()
            .position(|send| send.id != 1)
            .expect("a hanging destination");
        let failed = sends.remove(other);
        turns.put(failed.id, job(failed.id, 1));
        turns.ended(failed, Some(false), MOST);
        let tries = next(&mut turns, now).expect("the next new destination");
        assert_eq!(
            tries.class,
            Class::New,
            "new destinations go before failing ones"
        );
        assert!(
            next(&mut turns, now).is_none(),
            "their share of the threads is used up"
        );
    }

    #[test]
    fn one_that_has_to_wait_comes_when_its_time_has_come_or_a_send_has_ended() {
        let (mut turns, now) = (Turns::new(8), Instant::now());
        turns.put(1, job(1, 0));
        turns.put(1, job(1, 1));
        let wait = Duration::from_secs(1);
        let Next::Nothing(until) = turns.next(now, |_| Admission::Wait(wait)) else {
            panic!("expected a wait");
        };
        assert_eq!(until, Some(now + wait));
        assert!(turns.only_waits());
        let later = now + wait;
        let send = next(&mut turns, later).expect("a send after the wait");
        turns.ended(send, Some(true), MOST);
        let Next::Nothing(_) = turns.next(later, |_| Admission::Wait(wait)) else {
            panic!("expected a wait");
        };
        let mut closed = |_| Admission::Closed;
        let Next::GiveBack(jobs) = turns.next(later + wait, &mut closed) else {
            panic!("expected a release");
        };
        assert_eq!((jobs.len(), turns.waiting()), (1, 0));
    }
}
