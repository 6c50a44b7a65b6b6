//! Turns: how endpoints share a few threads.
//!
//! Tenants share the time of the threads (see [`Fair`]), and the endpoints of a tenant take turns, one message each. A
//! endpoint without a tenant has a share of its own. So however many endpoints of a tenant are slow, another
//! tenant waits for a thread, and not for its turn.
//!
//! New endpoints, without a response yet, and slow endpoints get only a part of the threads, so hundreds of hanging
//! endpoints leave threads to the others. The time of an endpoint's sends decides, whatever their results are.
//!
//! A send that lasts is slow before it ends, whatever was expected of it. If more such sends run than slow endpoints
//! may have, threads of the reserve replace theirs: otherwise endpoints that begin to hang would stop all sends for
//! the time that an endpoint has for its answer.
//!
//! An endpoint may have one send in flight at first, twice as many after each success (up to its limit), and half as
//! many after each failure.
//!
//! Why: docs/decisions.md#fair-turns

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::fair::Fair;
use crate::clock;
use crate::engine::send::gate::{Admission, Pass};
use crate::engine::send::job::Job;
use crate::engine::send::run::Sent;

/// The threads are divided into this many parts. Slow endpoints get at most [`OF_SLOW`] parts; new and slow
/// endpoints together get at most [`OF_DOUBTFUL`].
const PARTS: usize = 4;
const OF_SLOW: usize = 1;
const OF_DOUBTFUL: usize = 3;

/// For each thread, this many more may replace threads whose sends last.
const RESERVE: usize = 3;

/// An endpoint is slow if its sends take this long: the mean of all, in which the last send counts 1/[`OF_LAST`]. A send
/// lasts if it has taken this long.
const SLOW: Duration = Duration::from_millis(500);
const OF_LAST: u32 = 4;

/// What is expected of an endpoint's next send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedSend {
    /// No send has had a result yet.
    New,
    Slow,
    Quick,
}

/// The order of turns: the first class that has threads left comes first.
const CLASSES: [ExpectedSend; 3] = [ExpectedSend::New, ExpectedSend::Slow, ExpectedSend::Quick];

/// Who has a share of the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Owner {
    Tenant(Uuid),
    /// An endpoint without a tenant.
    Destination(u32),
}

/// The next work of a thread.
#[expect(clippy::large_enum_variant, reason = "nearly all values are sends")]
pub(crate) enum NextWork {
    Send(Job, Pass, InFlight),
    /// The gate is closed: these jobs are released.
    GiveBack(Vec<Job>),
    /// No work until this time, or until new work is announced.
    Nothing(Option<Instant>),
}

/// Claimed messages, by endpoint.
pub(crate) struct Turns {
    of: HashMap<u32, EndpointTurn>,
    classes: [OfClass; CLASSES.len()],
    /// Endpoints that wait for a time: for the rate limit, or for the response to a first send.
    later: BTreeSet<(Instant, u32)>,
    threads: usize,
    /// The number of sends that have begun.
    begun: u64,
    /// The sends in flight that do not last yet, by number, so in the order of their beginnings.
    young: BTreeMap<u64, (Instant, BegunSend)>,
    /// The numbers of the sends in flight that last.
    lasting: HashSet<u64>,
}

/// What [`Turns::look`] has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TurnsLook {
    /// The number of threads that may send now.
    pub(super) threads: usize,
    /// When to look again. `None`: when a send has begun.
    pub(super) again: Option<Instant>,
}

/// The endpoints of a class.
#[derive(Default)]
struct OfClass {
    /// The endpoints whose turns come next.
    ready: Fair<Owner, u32>,
    /// The sends in flight that do not last.
    in_flight: usize,
    /// Messages that no thread has taken.
    waiting: usize,
}

struct EndpointTurn {
    jobs: VecDeque<Job>,
    owner: Owner,
    /// The recent mean time of a send.
    mean: Option<Duration>,
    in_flight: usize,
    /// How many of the sends in flight last.
    lasting: usize,
    /// The most sends that may be in flight.
    allowed: usize,
    /// Whether the endpoint is among the ready ones.
    is_ready: bool,
    later: Option<Instant>,
}

/// A send in flight. The thread returns it to [`Turns::ended`] when the send has ended.
#[derive(Debug)]
#[must_use]
pub(crate) struct InFlight {
    number: u64,
    begun: BegunSend,
}

#[derive(Debug, Clone, Copy)]
struct BegunSend {
    id: u32,
    class: ExpectedSend,
    owner: Owner,
    /// What the owner was charged with before the send.
    charged: Duration,
}

impl EndpointTurn {
    fn class(&self) -> ExpectedSend {
        match self.mean {
            _ if self.lasting > 0 => ExpectedSend::Slow,
            None => ExpectedSend::New,
            Some(mean) if mean >= SLOW => ExpectedSend::Slow,
            Some(_) => ExpectedSend::Quick,
        }
    }

    fn learn(&mut self, sent: Sent, most: usize) {
        self.allowed = match sent.went_well {
            true => (self.allowed * 2).min(most).max(1),
            false => (self.allowed / 2).max(1),
        };
        self.mean = Some(match self.mean {
            None => sent.mean(),
            Some(mean) => mean - mean / OF_LAST + sent.mean() / OF_LAST,
        });
    }
}

impl Turns {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            of: HashMap::new(),
            classes: Default::default(),
            later: BTreeSet::new(),
            threads,
            begun: 0,
            young: BTreeMap::new(),
            lasting: HashSet::new(),
        }
    }

    /// The most threads that may ever send at once, of a pool of this many.
    pub(crate) fn most(threads: usize) -> usize {
        threads * (1 + RESERVE)
    }

    /// Finds the sends that last by now.
    pub(super) fn look(&mut self, now: Instant) -> TurnsLook {
        let again = loop {
            let Some(first) = self.young.first_entry() else {
                break None;
            };
            let lasts_at = first.get().0 + SLOW;
            if lasts_at > now {
                break Some(lasts_at);
            }
            let (number, (_, begun)) = first.remove_entry();
            let of_class = &mut self.classes[begun.class as usize];
            of_class.in_flight -= 1;
            let charged = begun.charged.max(SLOW);
            of_class.ready.charge(begun.owner, charged, begun.charged);
            self.lasting.insert(number);
            self.learn(begun.id, |turn| turn.lasting += 1);
        };
        TurnsLook {
            threads: self.threads + self.replaced(),
            again,
        }
    }

    /// Whether this is the only send that does not last, so that somebody must begin to [`look`](Self::look).
    pub(super) fn is_first(&self, send: &InFlight) -> bool {
        self.young.len() == 1 && self.young.contains_key(&send.number)
    }

    /// The threads that the reserve replaces.
    fn replaced(&self) -> usize {
        let of_slow = self.threads * OF_SLOW / PARTS;
        let too_many = self.lasting.len().saturating_sub(of_slow);
        too_many.min(self.threads * RESERVE)
    }

    /// Messages that no thread has taken.
    pub(crate) fn waiting(&self) -> usize {
        self.classes.iter().map(|class| class.waiting).sum()
    }

    /// Messages that no thread has taken, of endpoints whose sends are quick.
    pub(super) fn waiting_of_quick(&self) -> usize {
        self.classes[ExpectedSend::Quick as usize].waiting
    }

    /// Whether all endpoints with messages wait for a time.
    pub(super) fn only_waits(&self) -> bool {
        self.waiting() > 0 && self.classes.iter().all(|class| class.ready.is_empty())
    }

    /// Whether there is work for another thread.
    pub(super) fn has_ready(&self) -> bool {
        let is_ready = |class: &ExpectedSend| !self.classes[*class as usize].ready.is_empty();
        CLASSES
            .iter()
            .any(|class| is_ready(class) && self.has_thread(*class))
    }

    /// Whether an endpoint waits for a time.
    pub(super) fn has_later(&self) -> bool {
        !self.later.is_empty()
    }

    /// Whether another thread may work for this class.
    fn has_thread(&self, class: ExpectedSend) -> bool {
        let in_flight = |class: ExpectedSend| self.classes[class as usize].in_flight;
        let parts = |parts: usize| (self.threads * parts / PARTS).max(1);
        let slow = in_flight(ExpectedSend::Slow) + self.lasting.len();
        let doubtful = in_flight(ExpectedSend::New) + slow - self.replaced();
        let is_free = doubtful + in_flight(ExpectedSend::Quick) < self.threads;
        match class {
            ExpectedSend::Quick => is_free,
            ExpectedSend::New => is_free && doubtful < parts(OF_DOUBTFUL),
            ExpectedSend::Slow => is_free && doubtful < parts(OF_DOUBTFUL) && slow < parts(OF_SLOW),
        }
    }

    /// Whether an endpoint has messages waiting or in flight.
    #[cfg(test)]
    pub(crate) fn has(&self, id: u32) -> bool {
        let turn = self.of.get(&id);
        turn.is_some_and(|turn| turn.in_flight > 0 || !turn.jobs.is_empty())
    }

    /// Whether the first send is in flight, so that no other may begin.
    #[cfg(test)]
    pub(crate) fn awaits_first(&self, id: u32) -> bool {
        let turn = self.of.get(&id);
        turn.is_some_and(|turn| turn.class() == ExpectedSend::New && turn.in_flight > 0)
    }

    /// Forgets removed endpoints without messages.
    pub(super) fn keep(&mut self, is_there: impl Fn(u32) -> bool) {
        let is_kept = |turn: &EndpointTurn| turn.in_flight > 0 || !turn.jobs.is_empty();
        self.of.retain(|id, turn| is_there(*id) || is_kept(turn));
        self.classes.iter_mut().for_each(|one| one.ready.tidy());
    }

    /// Adds a message for an endpoint of this tenant.
    pub(super) fn put(&mut self, id: u32, tenant: Option<Uuid>, job: Job) {
        let turn = self.of.entry(id).or_insert_with(|| EndpointTurn {
            jobs: VecDeque::new(),
            // The tenant of a registration never changes.
            owner: tenant.map_or(Owner::Destination(id), Owner::Tenant),
            mean: None,
            in_flight: 0,
            lasting: 0,
            allowed: 1,
            is_ready: false,
            later: None,
        });
        self.classes[turn.class() as usize].waiting += job.len();
        turn.jobs.push_back(job);
        self.make_ready(id);
    }

    fn make_ready(&mut self, id: u32) {
        let Some(turn) = self.of.get_mut(&id) else {
            return;
        };
        let may = turn.in_flight < turn.allowed && turn.later.is_none();
        if may && !turn.is_ready && !turn.jobs.is_empty() {
            turn.is_ready = true;
            let mean = turn.mean.unwrap_or_default();
            let of_class = &mut self.classes[turn.class() as usize];
            of_class.ready.wait(turn.owner, id, mean);
        }
    }

    /// The next work of a thread. `admit` asks the endpoint's gate.
    pub(super) fn next(
        &mut self,
        now: Instant,
        mut admit: impl FnMut(u32) -> Admission,
    ) -> NextWork {
        while let Some((at, id)) = self.later.first().copied()
            && at <= now
        {
            self.wait_has_ended(id);
        }
        while let Some(id) = self.pop() {
            let Some(turn) = self.of.get_mut(&id) else {
                continue;
            };
            turn.is_ready = false;
            if turn.jobs.is_empty() || turn.in_flight >= turn.allowed {
                // A send has failed since the endpoint got its turn.
                continue;
            }
            let (class, owner) = (turn.class(), turn.owner);
            let of_class = &mut self.classes[class as usize];
            match admit(id) {
                Admission::Pass(pass) => {
                    let Some(job) = turn.jobs.pop_front() else {
                        continue;
                    };
                    turn.in_flight += 1;
                    of_class.in_flight += 1;
                    of_class.waiting -= job.len();
                    // Charged now, so that the owner does not take the next threads for the same price.
                    let charged = turn.mean.unwrap_or_default();
                    of_class.ready.charge(owner, charged, Duration::ZERO);
                    self.make_ready(id);
                    self.begun += 1;
                    let begun = BegunSend {
                        id,
                        class,
                        owner,
                        charged,
                    };
                    self.young.insert(self.begun, (now, begun));
                    let send = InFlight {
                        number: self.begun,
                        begun,
                    };
                    return NextWork::Send(job, pass, send);
                }
                Admission::Closed => {
                    let jobs: Vec<Job> = turn.jobs.drain(..).collect();
                    of_class.waiting -= messages(&jobs);
                    return NextWork::GiveBack(jobs);
                }
                Admission::Wait(wait) => {
                    let at = clock::after(now, wait.max(Duration::from_millis(1)));
                    turn.later = Some(at);
                    self.later.insert((at, id));
                }
            }
        }
        NextWork::Nothing(self.later.first().map(|(at, _)| *at))
    }

    fn pop(&mut self) -> Option<u32> {
        let next = CLASSES
            .into_iter()
            .find_map(|class| match self.has_thread(class) {
                true => self.classes[class as usize].ready.next(),
                false => None,
            });
        next.map(|(_, id)| id)
    }

    fn wait_has_ended(&mut self, id: u32) {
        let turn = self.of.get_mut(&id);
        if let Some(at) = turn.and_then(|turn| turn.later.take()) {
            self.later.remove(&(at, id));
        }
        self.make_ready(id);
    }

    /// A send has ended. `sent`: `None` if no message was sent. `most`: the most sends that the endpoint may have in
    /// flight.
    pub(crate) fn ended(&mut self, send: InFlight, sent: Option<Sent>, most: usize) {
        let InFlight { number, begun } = send;
        let of_class = &mut self.classes[begun.class as usize];
        let lasted = self.lasting.remove(&number);
        let charged = match lasted {
            true => begun.charged.max(SLOW),
            false => {
                self.young.remove(&number);
                of_class.in_flight -= 1;
                begun.charged
            }
        };
        let took = sent.map_or(Duration::ZERO, |sent| sent.took);
        of_class.ready.charge(begun.owner, took, charged);
        self.learn(begun.id, |turn| {
            turn.in_flight -= 1;
            turn.lasting -= usize::from(lasted);
            if let Some(sent) = sent {
                turn.learn(sent, most);
            }
        });
        // The messages that waited for the response to a first send may go now.
        self.wait_has_ended(begun.id);
    }

    /// An endpoint has changed: its messages follow it into its class.
    fn learn(&mut self, id: u32, change: impl FnOnce(&mut EndpointTurn)) {
        let Some(turn) = self.of.get_mut(&id) else {
            return;
        };
        let before = turn.class();
        change(turn);
        let class = turn.class();
        if class == before {
            return;
        }
        let waiting = messages(&turn.jobs);
        self.classes[before as usize].waiting -= waiting;
        self.classes[class as usize].waiting += waiting;
        if std::mem::take(&mut turn.is_ready) {
            let ready = &mut self.classes[before as usize].ready;
            ready.take(turn.owner, |one| *one == id);
        }
        self.make_ready(id);
    }

    /// Takes all messages that no thread has taken.
    pub(super) fn take_all(&mut self) -> Vec<Job> {
        self.later.clear();
        let mut jobs = Vec::new();
        for (id, turn) in &mut self.of {
            let of_class = &mut self.classes[turn.class() as usize];
            if std::mem::take(&mut turn.is_ready) {
                of_class.ready.take(turn.owner, |one| one == id);
            }
            of_class.waiting = 0;
            turn.later = None;
            jobs.extend(turn.jobs.drain(..));
        }
        jobs
    }
}

/// The number of messages of these runs.
fn messages<'a>(jobs: impl IntoIterator<Item = &'a Job>) -> usize {
    jobs.into_iter().map(Job::len).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::engine::lease::sql::lease::LeaseId;
    use crate::engine::plan::tests::claimed;
    use crate::engine::plan::to::To;
    use crate::engine::send::gate::Gate;
    use crate::engine::send::job::Terms;

    const MOST: usize = 4;

    fn job(id: u32, sequence: i64) -> Job {
        let message = claimed(sequence, "a", None).message;
        Job::new(message, LeaseId(1), To::Member(id), Terms::default())
    }

    /// All gates are open.
    fn open(now: Instant) -> impl FnMut(u32) -> Admission {
        let gate = Gate::open("a", None);
        move |_| gate.try_pass(now)
    }

    const QUICK: Duration = Duration::from_millis(10);
    const HANGS: Duration = Duration::from_millis(2_500);

    fn sent(went_well: bool, took: Duration) -> Option<Sent> {
        Some(Sent {
            went_well,
            took,
            messages: 1,
        })
    }

    /// Threads that send, by a clock of their own.
    struct Threads {
        turns: Turns,
        began: Instant,
        now: Duration,
        /// The sends in flight, by their ends.
        sends: BTreeMap<(Duration, u32), Vec<InFlight>>,
        /// The most sends that were in flight at once.
        most: usize,
    }

    impl Threads {
        fn new(threads: usize) -> Self {
            Self {
                turns: Turns::new(threads),
                began: Instant::now(),
                now: Duration::ZERO,
                sends: BTreeMap::new(),
                most: 0,
            }
        }

        /// Works until `end`. Returns the endpoint and the time of each send that has begun.
        fn work(&mut self, end: Duration, result: impl Fn(u32) -> Sent) -> Vec<(u32, Duration)> {
            let mut began = Vec::new();
            loop {
                let look = self.turns.look(self.began + self.now);
                while let Some(send) = next(&mut self.turns, self.began + self.now) {
                    began.push((send.begun.id, self.now));
                    let ends = self.now + result(send.begun.id).took;
                    self.sends
                        .entry((ends, send.begun.id))
                        .or_default()
                        .push(send);
                }
                let in_flight: usize = self.sends.values().map(Vec::len).sum();
                assert!(in_flight <= look.threads);
                self.most = self.most.max(in_flight);
                let first = self.sends.first_key_value().map(|((ends, _), _)| *ends);
                let again = look.again.map(|again| again - self.began);
                let Some(now) = first
                    .into_iter()
                    .chain(again)
                    .min()
                    .filter(|now| *now <= end)
                else {
                    self.now = end;
                    return began;
                };
                self.now = now;
                let has_ended = |one: &BTreeMap<(Duration, u32), _>| {
                    one.first_key_value()
                        .is_some_and(|((ends, _), _)| *ends <= now)
                };
                while has_ended(&self.sends) {
                    let sends = self.sends.pop_first().map(|(_, sends)| sends);
                    for send in sends.into_iter().flatten() {
                        let sent = result(send.begun.id);
                        self.turns.ended(send, Some(sent), MOST);
                    }
                }
            }
        }
    }

    const TENANT: Option<Uuid> = Some(Uuid::from_u128(1));
    const OTHER: Option<Uuid> = Some(Uuid::from_u128(2));
    /// The endpoint of the other tenant.
    const GOOD: u32 = 0;

    /// Quick responses of one endpoint, and slow ones of the others.
    fn slow_but_good(id: u32) -> Sent {
        Sent {
            went_well: true,
            took: if id == GOOD { QUICK } else { HANGS },
            messages: 1,
        }
    }

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    /// R46: the time of a send decides, whatever its status.
    #[test]
    fn slow_successes_of_one_tenant_leave_threads_to_another() {
        for tenants in [(TENANT, OTHER), (None, None)] {
            let mut threads = Threads::new(64);
            for id in 1..=1_000 {
                for sequence in 0..10 {
                    threads.turns.put(id, tenants.0, job(id, sequence));
                }
            }
            threads.turns.put(GOOD, tenants.1, job(GOOD, 0));
            let began = threads.work(seconds(60), slow_but_good);
            let first = began.iter().find(|(id, _)| *id == GOOD).expect("a send");
            let most = if tenants.0.is_some() {
                HANGS
            } else {
                seconds(60)
            };
            assert!(first.1 <= most, "the first send began after {:?}", first.1);
            for second in 60..100 {
                threads.turns.put(GOOD, tenants.1, job(GOOD, second));
                let at = threads.now;
                let began = threads.work(at + seconds(1), slow_but_good);
                let sends = began.iter().filter(|(id, _)| *id == GOOD);
                assert_eq!(sends.collect::<Vec<_>>(), [&(GOOD, at)]);
            }
        }
    }

    /// As long as an endpoint has for its answer.
    const HANGS_LONG: Duration = Duration::from_secs(15);

    fn one_in_five_hangs(id: u32) -> Sent {
        let hangs = id.is_multiple_of(5);
        Sent {
            went_well: !hangs,
            took: if hangs { HANGS_LONG } else { QUICK },
            messages: 1,
        }
    }

    /// The longest time until a good endpoint had its turn.
    fn longest_wait(began: &[(u32, Duration)]) -> Duration {
        let good = began.iter().filter(|(id, _)| id % 5 != 0);
        good.map(|(_, at)| *at).max().expect("a send")
    }

    /// R46: nobody knows yet who hangs.
    #[test]
    fn new_destinations_do_not_wait_for_the_answers_of_new_destinations_that_hang() {
        for tenants in [[TENANT, OTHER], [None, None]] {
            let mut threads = Threads::new(64);
            for id in 0..1_000 {
                let tenant = tenants[usize::from(id % 5 == 0)];
                threads.turns.put(id, tenant, job(id, 0));
            }
            let began = threads.work(seconds(15), one_in_five_hangs);
            assert_eq!(began.iter().filter(|(id, _)| id % 5 != 0).count(), 800);
            let longest = longest_wait(&began);
            assert!(longest <= seconds(5), "{longest:?}");
            assert!(threads.most <= Turns::most(64), "{}", threads.most);
        }
    }

    /// R46: a network that is cut takes endpoints with it that were quick a moment ago.
    #[test]
    fn destinations_that_begin_to_hang_stop_no_others() {
        let mut threads = Threads::new(64);
        let all_go_well = |_| Sent {
            went_well: true,
            took: QUICK,
            messages: 1,
        };
        for round in 0..4 {
            for id in 0..1_000 {
                threads.turns.put(id, None, job(id, round));
            }
            threads.work(
                seconds(u64::try_from(round).expect("small") + 1),
                all_go_well,
            );
        }
        for second in 4..60 {
            let at = threads.now;
            for id in 0..1_000 {
                threads.turns.put(id, None, job(id, second));
            }
            let began = threads.work(at + seconds(1), one_in_five_hangs);
            let good = began.iter().filter(|(id, _)| id % 5 != 0).count();
            if second > 8 {
                assert_eq!(good, 800, "in second {second}");
            }
            assert!(good > 100, "{good} in second {second}");
        }
        assert!(threads.most <= Turns::most(64), "{}", threads.most);
        // All threads of the reserve have ended.
        let look = threads.turns.look(threads.began + threads.now);
        assert!(look.threads <= 64 + 4, "{look:?}");
    }

    /// R46: after failures, an endpoint is next among the slow ones.
    #[test]
    fn a_destination_that_hangs_once_does_not_wait_behind_destinations_that_always_hang() {
        for tenants in [(TENANT, OTHER), (None, None)] {
            let mut threads = Threads::new(64);
            threads.turns.put(GOOD, tenants.1, job(GOOD, 0));
            threads.work(seconds(1), slow_but_good);
            for id in 1..=1_000 {
                for sequence in 0..100 {
                    threads.turns.put(id, tenants.0, job(id, sequence));
                }
            }
            let result = |is_well: bool| {
                move |id| Sent {
                    went_well: is_well && id == GOOD,
                    took: if is_well && id == GOOD { QUICK } else { HANGS },
                    messages: 1,
                }
            };
            threads.work(seconds(200), result(true));
            threads.turns.put(GOOD, tenants.1, job(GOOD, 1));
            threads.work(seconds(203), result(false));
            for sequence in 0..10 {
                threads.turns.put(GOOD, tenants.1, job(GOOD, sequence));
            }
            let began = threads.work(seconds(210), result(true));
            let sends: Vec<_> = began.iter().filter(|(id, _)| *id == GOOD).collect();
            assert_eq!(sends.len(), 10, "{sends:?}");
            assert!(sends[9].1 <= seconds(203) + HANGS, "{sends:?}");
        }
    }

    /// R46: a tenant with a hundred endpoints gets no more time than a tenant with one.
    #[test]
    fn tenants_share_the_time() {
        let mut threads = Threads::new(2);
        for id in 1..=100 {
            (0..100).for_each(|sequence| threads.turns.put(id, TENANT, job(id, sequence)));
        }
        (0..1_000).for_each(|sequence| threads.turns.put(GOOD, OTHER, job(GOOD, sequence)));
        let took = |id| Sent {
            went_well: true,
            took: if id == GOOD { QUICK } else { 4 * QUICK },
            messages: 1,
        };
        // The first sends are of another class.
        threads.work(seconds(4), took);
        let began = threads.work(seconds(8), took);
        let good = began.iter().filter(|(id, _)| *id == GOOD).count();
        assert!((350..=450).contains(&good), "{good} of {}", began.len());
    }

    /// R46: an endpoint that fails at once holds no thread.
    #[test]
    fn quick_failures_are_not_slow() {
        let (mut turns, now) = (Turns::new(128), Instant::now());
        for id in 1..=100 {
            turns.put(id, None, job(id, 0));
            let send = next(&mut turns, now).expect("a send");
            turns.ended(send, sent(false, QUICK), MOST);
            turns.put(id, None, job(id, 1));
            assert_eq!(turns.waiting_of_quick(), id as usize);
        }
        let sends = std::iter::from_fn(|| next(&mut turns, now)).count();
        assert_eq!(sends, 100);
    }

    /// The next send of a thread, if there is one.
    fn next(turns: &mut Turns, now: Instant) -> Option<InFlight> {
        match turns.next(now, open(now)) {
            NextWork::Send(_, _, send) => Some(send),
            NextWork::GiveBack(_) => panic!("no gate is closed"),
            NextWork::Nothing(_) => None,
        }
    }

    /// Plays `sends` sends of equal length on `threads` threads. Returns the number of sends of each endpoint.
    fn play(turns: &mut Turns, threads: usize, sends: usize) -> BTreeMap<u32, usize> {
        let now = Instant::now();
        let (mut got, mut in_flight) = (BTreeMap::new(), VecDeque::new());
        for _ in 0..sends {
            while in_flight.len() < threads
                && let Some(send) = next(turns, now)
            {
                *got.entry(send.begun.id).or_default() += 1;
                in_flight.push_back(send);
            }
            if let Some(send) = in_flight.pop_front() {
                turns.ended(send, sent(true, QUICK), MOST);
            }
        }
        got
    }

    /// R46: fairness does not depend on the backlog of an endpoint, or on which endpoint came first.
    #[test]
    fn destinations_with_work_get_as_much_as_each_other() {
        let mut turns = Turns::new(8);
        for sequence in 0..1_000 {
            turns.put(1, None, job(1, sequence));
        }
        for id in 2..=10 {
            for sequence in 0..200 {
                turns.put(id, None, job(id, sequence));
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
            turns.put(1, None, job(1, sequence));
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
            turns.ended(sends.next().expect("a send"), sent(went_well, QUICK), MOST);
            sends.for_each(|send| turns.ended(send, None, MOST));
        }
        assert_eq!(allowed, [1, 2, 4, 4, 2, 1, 1]);
    }

    /// R46: a failing endpoint gets no more sends than it may have, even if its turn was next.
    #[test]
    fn a_failure_counts_before_the_next_turn() {
        let (mut turns, now) = (Turns::new(64), Instant::now());
        for sequence in 0..100 {
            turns.put(1, None, job(1, sequence));
        }
        let send = |turns: &mut Turns| next(turns, now);
        for went_well in [true, true, true, false] {
            let began = send(&mut turns).expect("a send");
            turns.ended(began, sent(went_well, QUICK), 16);
        }
        // The endpoint may have four sends in flight, has three, and its turn is next.
        let mut sends: Vec<InFlight> = (0..3).filter_map(|_| send(&mut turns)).collect();
        turns.ended(sends.remove(0), sent(false, QUICK), 16);
        assert!(
            send(&mut turns).is_none(),
            "two sends are in flight, as many as allowed"
        );
        turns.ended(sends.remove(0), None, 16);
        assert!(send(&mut turns).is_some());
    }

    /// R46: hanging endpoints get only their share of the threads.
    #[test]
    fn destinations_without_an_answer_yet_leave_threads_to_the_others() {
        let (mut turns, now) = (Turns::new(8), Instant::now());
        turns.put(1, None, job(1, 0));
        let send = next(&mut turns, now).expect("the first send");
        turns.ended(send, sent(true, QUICK), MOST);
        for id in 2..=100 {
            turns.put(id, None, job(id, 0));
        }
        turns.put(1, None, job(1, 1));
        turns.put(1, None, job(1, 2));
        let mut sends = Vec::new();
        while let Some(send) = next(&mut turns, now) {
            sends.push(send);
        }
        let good = sends.iter().filter(|send| send.begun.id == 1).count();
        assert_eq!((good, sends.len()), (2, 8), "six of eight threads");
        // One of the hanging endpoints has responded.
        let other = sends
            .iter()
            .position(|send| send.begun.id != 1)
            .expect("a hanging destination");
        let failed = sends.remove(other);
        turns.put(failed.begun.id, None, job(failed.begun.id, 1));
        turns.ended(failed, sent(false, HANGS), MOST);
        let tries = next(&mut turns, now).expect("the next new destination");
        assert_eq!(
            tries.begun.class,
            ExpectedSend::New,
            "new destinations go before slow ones"
        );
        assert!(
            next(&mut turns, now).is_none(),
            "their share of the threads is used up"
        );
    }

    #[test]
    fn a_destination_that_must_wait_is_next_when_its_time_has_come_or_a_send_has_ended() {
        let (mut turns, now) = (Turns::new(8), Instant::now());
        turns.put(1, None, job(1, 0));
        turns.put(1, None, job(1, 1));
        let wait = Duration::from_secs(1);
        let NextWork::Nothing(until) = turns.next(now, |_| Admission::Wait(wait)) else {
            panic!("expected a wait");
        };
        assert_eq!(until, Some(now + wait));
        assert!(turns.only_waits());
        let later = now + wait;
        let send = next(&mut turns, later).expect("a send after the wait");
        turns.ended(send, sent(true, QUICK), MOST);
        let NextWork::Nothing(_) = turns.next(later, |_| Admission::Wait(wait)) else {
            panic!("expected a wait");
        };
        let mut closed = |_| Admission::Closed;
        let NextWork::GiveBack(jobs) = turns.next(later + wait, &mut closed) else {
            panic!("expected a release");
        };
        assert_eq!((jobs.len(), turns.waiting()), (1, 0));
    }
}
