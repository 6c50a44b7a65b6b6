//! Whose turn it is: registered destinations share a few threads.
//!
//! Destinations with work take turns, one message each. A destination has as many sends under way as it deserves: one
//! at first, twice as many after each success up to its limit, half after each failure. Those whose last send did not
//! succeed may have a share of the threads together, so that hundreds that hang leave the others theirs.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::gate::{Admission, Pass};
use super::job::Job;

/// Sends of destinations that have not proven themselves, of so many threads.
const UNPROVEN_SHARE: (usize, usize) = (3, 4);

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
    /// Whose turn comes next, of those that have proven themselves and of the others.
    ready: [VecDeque<u32>; 2],
    /// Those that wait for a time: a rate, or the answer to a first send.
    later: BTreeSet<(Instant, u32)>,
    /// Sends under way of those that have not proven themselves, and how many there may be.
    unproven: usize,
    most_unproven: usize,
    waiting: usize,
    of_proven: usize,
}

#[derive(Default)]
struct Turn {
    jobs: VecDeque<Job>,
    under_way: usize,
    /// Sends that it may have under way.
    allowed: usize,
    is_proven: bool,
    is_ready: bool,
    later: Option<Instant>,
}

/// A send that is under way: to be given back when it has ended.
#[derive(Debug)]
#[must_use]
pub(super) struct UnderWay {
    id: u32,
    is_proven: bool,
}

impl Turns {
    pub(super) fn new(threads: usize) -> Self {
        let (share, of) = UNPROVEN_SHARE;
        Self {
            of: HashMap::new(),
            ready: Default::default(),
            later: BTreeSet::new(),
            unproven: 0,
            most_unproven: (threads * share / of).max(1),
            waiting: 0,
            of_proven: 0,
        }
    }

    /// Messages that no thread has taken.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// The same of those that have proven themselves.
    pub(super) fn waiting_of_proven(&self) -> usize {
        self.of_proven
    }

    /// Whether all that is left waits for a time.
    pub(super) fn only_waits(&self) -> bool {
        self.waiting > 0 && self.ready.iter().all(VecDeque::is_empty)
    }

    /// Whether another thread has something to do.
    pub(super) fn has_ready(&self) -> bool {
        !self.ready[0].is_empty()
            || (!self.ready[1].is_empty() && self.unproven < self.most_unproven)
    }

    /// Forgets those that are gone and have nothing left.
    pub(super) fn keep(&mut self, is_there: impl Fn(u32) -> bool) {
        self.of
            .retain(|id, turn| is_there(*id) || turn.under_way > 0 || !turn.jobs.is_empty());
    }

    /// A message for this destination.
    pub(super) fn put(&mut self, id: u32, job: Job) {
        let turn = self.of.entry(id).or_insert_with(|| Turn {
            allowed: 1,
            ..Turn::default()
        });
        turn.jobs.push_back(job);
        self.waiting += 1;
        self.of_proven += usize::from(turn.is_proven);
        self.make_ready(id);
    }

    fn make_ready(&mut self, id: u32) {
        let Some(turn) = self.of.get_mut(&id) else {
            return;
        };
        let may = turn.under_way < turn.allowed && turn.later.is_none();
        if may && !turn.is_ready && !turn.jobs.is_empty() {
            turn.is_ready = true;
            self.ready[usize::from(!turn.is_proven)].push_back(id);
        }
    }

    /// What a thread does. `admit` asks the destination's gate.
    pub(super) fn next(&mut self, now: Instant, mut admit: impl FnMut(u32) -> Admission) -> Next {
        while let Some((at, id)) = self.later.first().copied()
            && at <= now
        {
            self.wake(id);
        }
        while let Some(id) = self.pop() {
            let Some(turn) = self.of.get_mut(&id) else {
                continue;
            };
            turn.is_ready = false;
            if turn.jobs.is_empty() || turn.under_way >= turn.allowed {
                continue;
            }
            match admit(id) {
                Admission::Pass(pass) => {
                    let Some(job) = turn.jobs.pop_front() else {
                        continue;
                    };
                    turn.under_way += 1;
                    let is_proven = turn.is_proven;
                    self.unproven += usize::from(!is_proven);
                    self.waiting -= 1;
                    self.of_proven -= usize::from(is_proven);
                    self.make_ready(id);
                    return Next::Send(job, pass, UnderWay { id, is_proven });
                }
                Admission::Closed => {
                    let jobs: Vec<Job> = turn.jobs.drain(..).collect();
                    self.waiting -= jobs.len();
                    if turn.is_proven {
                        self.of_proven -= jobs.len();
                    }
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
        let may_try = self.unproven < self.most_unproven;
        // Those that are to prove themselves come first: they have a share, and no more.
        let unproven = may_try.then(|| self.ready[1].pop_front()).flatten();
        unproven.or_else(|| self.ready[0].pop_front())
    }

    fn wake(&mut self, id: u32) {
        if let Some(turn) = self.of.get_mut(&id)
            && let Some(at) = turn.later.take()
        {
            self.later.remove(&(at, id));
        } else {
            self.later.retain(|(_, one)| *one != id);
        }
        self.make_ready(id);
    }

    /// A send has come to its end. `went_well`: `None` where nothing was sent. `most`: sends that the destination may
    /// have under way.
    pub(super) fn ended(&mut self, send: UnderWay, went_well: Option<bool>, most: usize) {
        self.unproven -= usize::from(!send.is_proven);
        let Some(turn) = self.of.get_mut(&send.id) else {
            return;
        };
        turn.under_way -= 1;
        match went_well {
            Some(true) => turn.allowed = (turn.allowed * 2).min(most).max(1),
            Some(false) => turn.allowed = (turn.allowed / 2).max(1),
            None => {}
        }
        let is_proven = went_well.unwrap_or(turn.is_proven);
        if is_proven != turn.is_proven {
            self.ready[usize::from(!turn.is_proven)].retain(|one| *one != send.id);
            (turn.is_ready, turn.is_proven) = (false, is_proven);
            match is_proven {
                true => self.of_proven += turn.jobs.len(),
                false => self.of_proven -= turn.jobs.len(),
            }
        }
        // What waited for the answer to a first send waits no longer.
        self.wake(send.id);
    }

    /// Everything that no thread has taken.
    pub(super) fn take_all(&mut self) -> Vec<Job> {
        self.ready = Default::default();
        self.later.clear();
        (self.waiting, self.of_proven) = (0, 0);
        let mut jobs = Vec::new();
        for turn in self.of.values_mut() {
            (turn.is_ready, turn.later) = (false, None);
            jobs.extend(turn.jobs.drain(..));
        }
        jobs
    }
}
