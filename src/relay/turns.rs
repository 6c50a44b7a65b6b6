//! Whose turn it is: registered destinations share a few threads.
//!
//! Destinations with work take turns, one message each. A destination has as many sends under way as it deserves: one
//! at first, twice as many after each success up to its limit, half after each failure. Those that have not had an
//! answer yet, and those that fail, have a part of the threads, so that hundreds that hang leave the others theirs.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::gate::{Admission, Pass};
use super::job::Job;

/// Of so many parts of the threads those that fail have so many at most, and together with the new ones so many.
const PARTS: usize = 4;
const OF_FAILING: usize = 1;
const OF_DOUBTFUL: usize = 3;

/// What is known of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Class {
    /// Nothing was sent there.
    #[default]
    New,
    /// The last send failed.
    Failing,
    Good,
}

/// The first of these has its turn first, as far as it has threads.
const CLASSES: [Class; 3] = [Class::New, Class::Failing, Class::Good];

/// What a thread does next.
#[expect(clippy::large_enum_variant, reason = "nearly all of them are sends")]
pub(super) enum Next {
    Send(Job, Pass, UnderWay),
    /// The gate is closed: these are given back.
    GiveBack(Vec<Job>),
    /// Nothing before then, or before somebody says that there is something.
    Nothing(Option<Instant>),
}

/// Messages that are claimed, by their destinations.
pub(super) struct Turns {
    of: HashMap<u32, Turn>,
    classes: [OfClass; CLASSES.len()],
    /// Those that wait for a time: a rate, or the answer to a first send.
    later: BTreeSet<(Instant, u32)>,
    threads: usize,
}

/// What all destinations of a class have together.
#[derive(Debug, Default)]
struct OfClass {
    /// Whose turn comes next.
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
    /// Sends that it may have under way.
    allowed: usize,
    is_ready: bool,
    later: Option<Instant>,
}

/// A send that is under way: to be given back when it has ended.
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

    /// The same of those whose last send went well.
    pub(super) fn waiting_of_good(&self) -> usize {
        self.classes[Class::Good as usize].waiting
    }

    /// Whether all that is left waits for a time.
    pub(super) fn only_waits(&self) -> bool {
        self.waiting() > 0 && self.classes.iter().all(|class| class.ready.is_empty())
    }

    /// Whether another thread has something to do.
    pub(super) fn has_ready(&self) -> bool {
        let is_ready = |class: &Class| !self.classes[*class as usize].ready.is_empty();
        CLASSES
            .iter()
            .any(|class| is_ready(class) && self.has_thread(*class))
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

    /// Whether a destination has messages here, or on their way.
    #[cfg(test)]
    pub(super) fn has(&self, id: u32) -> bool {
        let turn = self.of.get(&id);
        turn.is_some_and(|turn| turn.under_way > 0 || !turn.jobs.is_empty())
    }

    /// Forgets those that are gone and have nothing left.
    pub(super) fn keep(&mut self, is_there: impl Fn(u32) -> bool) {
        let is_kept = |turn: &Turn| turn.under_way > 0 || !turn.jobs.is_empty();
        self.of.retain(|id, turn| is_there(*id) || is_kept(turn));
    }

    /// A message for this destination.
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

    /// What a thread does. `admit` asks the destination's gate.
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
                // A send has failed since this one was to have its turn.
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

    /// A send has come to its end. `went_well`: `None` where nothing was sent. `most`: sends that the destination may
    /// have under way.
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
        // What waited for the answer to a first send waits no longer.
        self.wait_is_over(send.id);
    }

    /// Everything that no thread has taken.
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
            unsent: None,
        }
    }

    /// All gates are open.
    fn open(now: Instant) -> impl FnMut(u32) -> Admission {
        let gate = Gate::open("a", None);
        move |_| gate.try_pass(now)
    }

    /// Whose message a thread sends, if there is one.
    fn next(turns: &mut Turns, now: Instant) -> Option<UnderWay> {
        match turns.next(now, open(now)) {
            Next::Send(_, _, send) => Some(send),
            Next::GiveBack(_) => panic!("no gate is closed"),
            Next::Nothing(_) => None,
        }
    }

    /// Each send takes a turn of the clock, on so many threads.
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

    /// R46: fairness does not depend on how much one has waiting, nor on who came first.
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
            // One tells, and of the others nothing was sent.
            let mut sends = sends.into_iter();
            turns.ended(sends.next().expect("a send"), Some(went_well), MOST);
            sends.for_each(|send| turns.ended(send, None, MOST));
        }
        assert_eq!(allowed, [1, 2, 4, 4, 2, 1, 1]);
    }

    /// R46: one that fails has no more sends than it deserves, though it was about to have its turn.
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
        // It may have four, has three, and is to have another.
        let mut sends: Vec<UnderWay> = (0..3).filter_map(|_| send(&mut turns)).collect();
        turns.ended(sends.remove(0), Some(false), 16);
        assert!(
            send(&mut turns).is_none(),
            "it has the two that it may have"
        );
        turns.ended(sends.remove(0), None, 16);
        assert!(send(&mut turns).is_some());
    }

    /// R46: what hangs has its share of the threads and no more.
    #[test]
    fn those_that_have_not_answered_leave_threads_to_the_others() {
        let (mut turns, now) = (Turns::new(8), Instant::now());
        turns.put(1, job(1, 0));
        let send = next(&mut turns, now).expect("its first");
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
        // One of those that hang has answered.
        let other = sends.iter().position(|send| send.id != 1).expect("one");
        let failed = sends.remove(other);
        turns.put(failed.id, job(failed.id, 1));
        turns.ended(failed, Some(false), MOST);
        let tries = next(&mut turns, now).expect("the next one tries");
        assert_eq!(tries.class, Class::New, "before what failed");
        assert!(
            next(&mut turns, now).is_none(),
            "all their threads are taken"
        );
    }

    #[test]
    fn one_that_has_to_wait_comes_when_its_time_has_come_or_a_send_has_ended() {
        let (mut turns, now) = (Turns::new(8), Instant::now());
        turns.put(1, job(1, 0));
        turns.put(1, job(1, 1));
        let wait = Duration::from_secs(1);
        let Next::Nothing(until) = turns.next(now, |_| Admission::Wait(wait)) else {
            panic!("it has to wait");
        };
        assert_eq!(until, Some(now + wait));
        assert!(turns.only_waits());
        let later = now + wait;
        let send = next(&mut turns, later).expect("its time has come");
        turns.ended(send, Some(true), MOST);
        let Next::Nothing(_) = turns.next(later, |_| Admission::Wait(wait)) else {
            panic!("it has to wait");
        };
        let mut closed = |_| Admission::Closed;
        let Next::GiveBack(jobs) = turns.next(later + wait, &mut closed) else {
            panic!("its gate is closed");
        };
        assert_eq!((jobs.len(), turns.waiting()), (1, 0));
    }
}
