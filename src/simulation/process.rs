//! A process of a relay, with the threads that make decisions. Claimer, settlers and heartbeat are the relay's own
//! code. Senders and the listener are played here: they act like the relay's threads, without a receiver or a
//! connection.

use std::cell::{Cell, OnceCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use super::broken::Broken;
use super::history::{HANDLED, History, MAX_ATTEMPTS, Mood, NAMESAKE, REGISTERED, SEND_TIMEOUT};
use super::link::Link;
use super::promises::Promise;
use super::stage::{CLAIM_LIMIT, MOST_TURNS, Stage};
use super::tables::{Row, goes_to};
use super::wants;
use crate::backoff::Backoff;
use crate::builder::Dispatchers;
use crate::clock::{self, BootTime, simulated};
use crate::config::{Breaker, Config, Destination, Mode, Rate, Route, Verification};
use crate::dispatch::{Failure, Outcome, Response};
use crate::endpoints::keeper::EndpointKeeper;
use crate::endpoints::roster::KnownEndpoint;
use crate::endpoints::serving::{ServedEndpoint, ServedEndpoints};
use crate::endpoints::turns::{InFlight, NextWork};
use crate::engine::claim::sql::claim::{Batch, Claimed, Position, Stream, Topic};
use crate::engine::claim::sql::namesakes::OF_ROUTE;
use crate::engine::claim::sql::page::{Moment, Page, Writers};
use crate::engine::claim::sql::streams;
use crate::engine::claim::told::Told;
use crate::engine::claim::{ClaimTurn, Claimer, SOON};
use crate::engine::directory::{Directory, Reading};
use crate::engine::host::registration;
use crate::engine::host::settings::Settings;
use crate::engine::host::shared::{Shared, SharedParts, Signals};
use crate::engine::lease::clock::LeaseClock;
use crate::engine::lease::heartbeat::Heartbeat;
use crate::engine::lease::sql::lease::{LeaseId, Registration};
use crate::engine::plan::tests::claimed;
use crate::engine::plan::to::To;
use crate::engine::plan::{
    self, Awaited, Brought, Door, OfKeys, Planner, Report, Step, Surveyed, Timing, View, Wait,
};
use crate::engine::send::batch::{Gathered, answered, telling};
use crate::engine::send::bulkhead::{Bulkhead, SendsTo};
use crate::engine::send::gate::{Admission, Pass};
use crate::engine::send::job::{Job, is_expired};
use crate::engine::send::run::{Run, Sent};
use crate::engine::send::verdict::Verdict;
use crate::engine::serves::configured::Configured;
use crate::engine::serves::routes::Routes;
use crate::engine::settle::Settler;
use crate::engine::settle::settlement::{Outcomes, Settlement};
use crate::engine::settle::sql::settle::Claim;
use crate::engine::settle::sql::split::Piece;
use crate::engine::workers::Keeper;
use crate::handlers::groups::add_groups;
use crate::handlers::{Handlers, no_connection};
use crate::http::EndpointClients;
use crate::message::Message;
use crate::sql::brief::Tried;
use crate::status::ReasonCode;

/// How long a listener waits while an insert is in progress, and while another listener has the lock.
const WHILE_INSERTING: Duration = Duration::from_millis(5);
const AFTER_ANOTHER: Duration = Duration::from_secs(1);
/// One part, so that a fan-out to two destinations has two pieces.
const PIECE: Piece = Piece {
    parts: 1,
    bytes: usize::MAX,
};

/// A thread that acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Actor {
    Claimer,
    Settler(usize),
    Heartbeat,
    Sender(usize),
    Listener,
}

/// The state of the claimer.
enum Claiming {
    Continues,
    Pauses(Duration),
    Waits {
        wait: Wait,
        until: Duration,
        /// During a wait for room: when the messages of others must ring.
        naps_at: Option<Duration>,
    },
}

struct Settling<'w> {
    settler: Option<Settler<'w, Link<'w>>>,
    outcomes: Receiver<Settlement>,
    left: Vec<Settlement>,
    next: Duration,
}

#[derive(Default)]
struct Sending {
    busy: usize,
    /// A request that waits for its gate.
    held: Option<Request>,
    /// Requests that go on with a run.
    going_on: VecDeque<Request>,
    /// Runs of batched mode that are sent one by one.
    alone: VecDeque<(Job, Run)>,
    /// The jobs that are gathered for the next request, until this time.
    gathered: Option<(Gathered, Duration)>,
    /// A run that the last request had no space for.
    left: Option<Job>,
    next: Duration,
}

/// What is sent at once: the runs of a request in batched mode, or a message of a run.
struct Request {
    jobs: Vec<Job>,
    run: Option<Run>,
    /// The sends of the run so far, and the turn and the destination, if the destination is registered.
    sent: Option<Sent>,
    registered: Option<(InFlight, Arc<ServedEndpoint>)>,
    /// All endpoints, then.
    served: Option<Arc<ServedEndpoints>>,
}

impl Request {
    fn of(jobs: Vec<Job>) -> Self {
        Self {
            jobs,
            run: None,
            sent: None,
            registered: None,
            served: None,
        }
    }

    /// The messages of the run that are delivered.
    fn delivered(&self) -> Vec<i64> {
        self.run.as_ref().map(Run::delivered).unwrap_or_default()
    }

    fn of_run((first, run): (Job, Run)) -> Self {
        Self {
            run: Some(run),
            ..Self::of(vec![first])
        }
    }

    /// Settles the messages that are not to be sent. Returns the request if some are left, and the runs to be sent alone.
    fn cut(
        mut self,
        shared: &Shared,
        outcomes: &Outcomes,
        unsent: impl Fn(&Job) -> Option<Verdict>,
    ) -> (Option<Self>, Vec<(Job, Run)>) {
        let (bulkheads, mut ended, mut alone) = (&shared.bulkheads, Vec::new(), Vec::new());
        let unsent = |job: &Job| job.unsent.clone().or_else(|| unsent(job));
        for job in std::mem::take(&mut self.jobs) {
            let unsent = job.each().find_map(unsent);
            match (unsent, &mut self.run) {
                (None, _) => self.jobs.push(job),
                (Some(verdict), Some(run)) => {
                    drop(run.next(Settlement::unsent(job, bulkheads, verdict), bulkheads));
                }
                (Some(verdict), None) if job.behind.is_empty() => {
                    ended.push(Settlement::unsent(job, bulkheads, verdict));
                }
                (Some(_), None) => alone.push(Run::begin(job)),
            }
        }
        let has_ended = self.jobs.is_empty();
        if has_ended
            && let Some((turn, member)) = self.registered.take()
            && let Some(served) = &self.served
        {
            let most = member.bulkhead.limits.concurrency;
            served.turns().ended(turn, self.sent, most);
        }
        ended.extend(self.run.take_if(|_| has_ended).and_then(Run::settlement));
        // The send cannot fail: the other end is here.
        ended.into_iter().for_each(|one| drop(outcomes.send(one)));
        ((!has_ended).then_some(self), alone)
    }
}

#[derive(Default)]
pub(super) struct Listening {
    has_lock: bool,
    /// Whether relays that serve the same see that this one is awake.
    pub(super) is_awake: bool,
    next_try: Option<Duration>,
}

impl Sending {
    fn has_jobs(&self) -> bool {
        let has_request = self.held.is_some() || !self.going_on.is_empty();
        has_request || !self.alone.is_empty() || self.gathered.is_some() || self.left.is_some()
    }

    /// The next request. None while the request waits for more.
    fn take(
        &mut self,
        queue: &Receiver<Job>,
        bulkhead: &Bulkhead,
        now: Duration,
    ) -> Option<Request> {
        let begun = self.held.take().or_else(|| self.going_on.pop_front());
        if begun.is_some() {
            return begun;
        }
        if let Some(run) = self.alone.pop_front() {
            return Some(Request::of_run(run));
        }
        let Some(limits) = bulkhead.limits.request_batch else {
            let job = queue.try_recv().ok();
            return job.map(Run::begin).map(Request::of_run);
        };
        let gathered = self.gathered.take();
        let (mut gathered, until) =
            gathered.unwrap_or_else(|| (Gathered::default(), now + limits.linger));
        while !gathered.is_full(limits)
            && let Some(job) = self.left.take().or_else(|| queue.try_recv().ok())
        {
            if !gathered.fits(&job, limits) {
                self.left = Some(job);
                break;
            }
            gathered.add(job);
        }
        if self.left.is_none() && !gathered.is_full(limits) && now < until {
            self.gathered = Some((gathered, until));
            self.next = until;
            return None;
        }
        self.alone
            .extend(gathered.alone.into_iter().map(Run::begin));
        match gathered.together.is_empty() {
            true => self.alone.pop_front().map(Request::of_run),
            false => Some(Request::of(gathered.together)),
        }
    }
}

/// A request to a receiver.
pub(super) struct Send {
    pub(super) process: usize,
    bulkhead: usize,
    request: Request,
    pass: Pass,
    outcomes: Vec<Outcome>,
    began: Instant,
    /// The receiver has responded.
    pub(super) is_received: bool,
    /// When the receiver responds, or the send times out.
    pub(super) ends: Duration,
    can_close: bool,
}

impl Send {
    /// The lease under which the connection stays open. `None`: there is no connection to close.
    pub(super) fn lease(&self) -> Option<LeaseId> {
        self.request
            .jobs
            .first()
            .map(|job| job.lease)
            .filter(|_| self.can_close)
    }

    /// The connection is closed before the receiver responds.
    pub(super) fn close(&mut self, now: Duration) {
        let failure = Failure::new(ReasonCode::Timeout, "closed");
        self.outcomes.fill(Outcome::Retry(failure));
        self.ends = now;
    }
}

/// What the threads of a relay share, and its endpoints.
pub(super) struct Slot {
    shared: Shared,
    served: Option<Arc<ServedEndpoints>>,
}

/// A relay in a process. A reload starts a second relay in the same process.
pub(super) struct Process<'w> {
    pub(super) relay: usize,
    /// The number of the first relay in this process.
    pub(super) host: usize,
    pub(super) shared: &'w Shared,
    served: Option<Arc<ServedEndpoints>>,
    pub(super) is_dead: bool,
    pub(super) frozen_until: Duration,
    pub(super) cut_off_until: Duration,
    pub(super) stuck_until: Duration,
    pub(super) deaf_until: Duration,
    /// [`Broken::SharesWhileIdle`].
    shares_while_idle: bool,
    /// How long the machine has slept in total.
    pub(super) lost: Duration,
    pub(super) statements: (u64, u32),
    pub(super) scheduled: BTreeMap<Actor, Duration>,
    /// The open question, and when it was asked.
    pub(super) question: Option<(u64, Duration)>,
    pub(super) notified: Cell<bool>,
    claimer: Option<Claimer<'w, Link<'w>>>,
    /// Whether the claimer has ended.
    has_ended: bool,
    claiming: Claiming,
    turns: (Duration, u32),
    settling: [Settling<'w>; 2],
    heartbeat: Option<Heartbeat<'w, Link<'w>>>,
    next_beat: Duration,
    queues: Vec<Receiver<Job>>,
    sending: Vec<Sending>,
    outcomes: Outcomes,
    pub(super) listening: Listening,
    inbox: (Sender<Told>, Receiver<Told>),
    /// Kept alive for the other ends.
    _channels: (Sender<()>, Sender<()>),
}

/// The destination that a message is for, if it is registered or the message names it.
fn addressee(job: &Job) -> &str {
    let named = &job.message.destination;
    job.member.as_deref().unwrap_or(named)
}

fn registration_of(shared: &Shared) -> Registration {
    registration(
        &shared.settings,
        "relay",
        shared.directory.can_send(),
        false,
    )
}

/// The factory of dispatchers, which are not used here. It is shared by all processes with the same settings, because
/// it has threads.
fn clients(is_strict: bool) -> Arc<EndpointClients> {
    static ALL: [OnceLock<Arc<EndpointClients>>; 2] = [const { OnceLock::new() }; 2];
    let make = || {
        let config = Config {
            endpoint_ports: if is_strict { vec![80] } else { Vec::new() },
            ..Config::default()
        };
        Arc::new(EndpointClients::new(config))
    };
    Arc::clone(ALL[usize::from(is_strict)].get_or_init(make))
}

/// The settings of the next start of a relay.
fn config(stage: &Stage<'_>, relay: usize) -> Config {
    let mut config = Config {
        listener: true,
        batch: if stage.history.has_crowd { 32 } else { 8 },
        concurrency: stage.history.senders,
        poll_interval: stage.poll,
        lease: stage.history.lease,
        send_timeout: stage.history.send_timeout(),
        // Each destination has a limit of its own.
        max_attempts: 1,
        backoff: Backoff::exponential(Duration::from_millis(200), Duration::from_secs(2)),
        single_active: stage.history.single_active,
        endpoint_threads: match stage.history.has_endpoints {
            true => stage.history.senders,
            false => 0,
        },
        endpoint_timeout: stage.history.send_timeout(),
        endpoint_max_attempts: MAX_ATTEMPTS,
        endpoint_backoff: Backoff::exponential(Duration::from_millis(200), Duration::from_secs(2)),
        endpoint_https_only: false,
        ..Config::default()
    };
    for name in ["a", "b"] {
        let mut destination = Destination::new(name, "http://a").expect("a URL");
        destination.policy.breaker = Some(Breaker {
            min_sends: 10,
            window: Duration::from_secs(5),
            open: Duration::from_millis(300),
            open_cap: Duration::from_secs(2),
            ..Breaker::default()
        });
        destination.policy.key_run = stage.history.key_run;
        destination.policy.max_attempts = Some(MAX_ATTEMPTS);
        config.destinations.push(destination);
        config.routes.push(Route::new(name, name));
    }
    if let Some(rate) = stage.history.rate {
        config.destinations[0].policy.rate = Some(Rate::per_second(rate));
    }
    if stage.history.has_batches {
        config.destinations[0].policy.mode = Some(Mode::Batched);
        config.destinations[0].request_batch.size = 4;
    }
    config.routes.push(Route::to_each("fan", ["a", "b"]));
    let has_route = stage.has_route_next(relay);
    let namesake = stage.history.has_namesake.then_some(NAMESAKE);
    if let Some(name) = namesake.filter(|_| has_route || stage.history.all_have_namesake) {
        let namesake = Destination::new(name, "http://a").expect("a URL");
        config.destinations.push(namesake);
    }
    if has_route {
        let names = ["a"].into_iter().chain(namesake);
        config.routes.push(Route::to_each(wants::ROUTED, names));
    }
    let has_handlers = !stage.history.settings_differ || has_route;
    if stage.history.has_handlers && has_handlers {
        let handlers = Handlers::new().on_topic(HANDLED, |_, _| Ok(()));
        let handlers = handlers.timeout(SEND_TIMEOUT).max_attempts(MAX_ATTEMPTS);
        add_groups(&mut config, &[(HANDLED.to_owned(), handlers)]).expect("a group");
    }
    config
}

impl<'w> Process<'w> {
    pub(super) fn new(
        stage: &'w Stage<'w>,
        number: usize,
        relay: usize,
        slot: &'w OnceCell<Slot>,
    ) -> Self {
        let inbox = unbounded();
        let (stopper, stop) = bounded(0);
        let (abandoner, abandon) = bounded(0);
        let signals = Signals::new(stop, abandon).expect("a pair of sockets");
        let mut queues = Vec::new();
        let Slot { shared, served } = slot.get_or_init(|| {
            let config = config(stage, relay);
            let clients =
                (stage.history.has_endpoints).then(|| clients(stage.history.is_strict(relay)));
            let dispatchers = Dispatchers {
                clients: clients.clone(),
                ..Dispatchers::idle(&config)
            };
            let (bulkheads, senders) = Bulkhead::all(&config, dispatchers);
            queues = senders;
            let can_send = clients.as_ref().is_some_and(|one| one.can_send());
            let settings = Settings::of(&config, can_send);
            let routes = Arc::new(Routes::of(settings.serves.clone()));
            let served = clients.map(|clients| {
                Arc::new(ServedEndpoints::new(&config, clients, Arc::clone(&routes)))
            });
            let directory: Arc<dyn Directory> = match &served {
                Some(served) => Arc::clone(served) as Arc<dyn Directory>,
                None => Arc::new(Configured::new(Arc::clone(&routes), None)),
            };
            let clock = match stage.broken {
                Some(Broken::OutlivesItsSession) => {
                    LeaseClock::of(&settings).outliving_its_session()
                }
                _ => LeaseClock::of(&settings),
            };
            let mut parts = SharedParts::of_tests(settings, bulkheads, (routes, directory));
            parts.claim_limit = CLAIM_LIMIT;
            let shared = Shared::new(parts, clock, signals);
            Slot { shared, served }
        });
        let keeper = served.as_ref().map(|served| {
            let keeper = EndpointKeeper::new(Arc::clone(served));
            Box::new(keeper) as Box<dyn Keeper<Link<'w>>>
        });
        let receivers = shared
            .bulkheads
            .iter()
            .map(|one| one.jobs.clone())
            .collect();
        let (plain, plain_queue) = unbounded();
        let (keyed, keyed_queue) = unbounded();
        let outcomes = Outcomes { plain, keyed };
        let link = |thread| Link::new(stage, number, thread);
        let settling = |is_keyed, outcomes| Settling {
            settler: Some(Settler::new(
                shared,
                link(Actor::Settler(0)),
                is_keyed,
                PIECE,
            )),
            outcomes,
            left: Vec::new(),
            next: Duration::ZERO,
        };
        shared.signals.news.ring();
        Self {
            relay,
            host: number,
            shared,
            served: served.clone(),
            is_dead: false,
            frozen_until: Duration::ZERO,
            cut_off_until: Duration::ZERO,
            stuck_until: Duration::ZERO,
            deaf_until: Duration::ZERO,
            shares_while_idle: stage.broken == Some(Broken::SharesWhileIdle),
            lost: Duration::ZERO,
            statements: (0, 0),
            scheduled: BTreeMap::new(),
            question: None,
            notified: Cell::new(false),
            claimer: Some(Claimer::new(
                shared,
                queues,
                outcomes.clone(),
                inbox.1.clone(),
                keeper,
                link(Actor::Claimer),
            )),
            has_ended: false,
            claiming: Claiming::Continues,
            turns: (Duration::ZERO, 0),
            settling: [settling(false, plain_queue), settling(true, keyed_queue)],
            heartbeat: Some(Heartbeat::new(
                shared,
                registration_of(shared),
                None,
                link(Actor::Heartbeat),
            )),
            next_beat: Duration::ZERO,
            sending: (0..shared.bulkheads.len())
                .map(|_| Sending::default())
                .collect(),
            queues: receivers,
            outcomes,
            listening: Listening::default(),
            inbox,
            _channels: (stopper, abandoner),
        }
    }

    /// Its endpoints, if its history has some.
    pub(super) fn served(&self) -> Arc<ServedEndpoints> {
        Arc::clone(self.served.as_ref().expect("a relay that knows endpoints"))
    }

    /// Runs in the process of this relay, and shares its fate.
    pub(super) fn begin_beside(&mut self, old: &Self) {
        self.host = old.host;
        (self.frozen_until, self.lost) = (old.frozen_until, old.lost);
        (self.cut_off_until, self.stuck_until) = (old.cut_off_until, old.stuck_until);
        self.deaf_until = old.deaf_until;
    }

    /// Whether the relay has the route for the topic `d`.
    pub(super) fn has_route(&self) -> bool {
        let mut routes = self.shared.settings.serves.routes.iter();
        routes.any(|(topic, _)| topic == wants::ROUTED)
    }

    /// Whether the relay knows that a message is for other relays: for another destination of the same name.
    pub(super) fn leaves(&self, row: &Row) -> bool {
        let configured = &self.shared.settings.serves.destinations;
        let is_configured = configured.contains(&row.destination);
        match row.registration {
            Some(OF_ROUTE) => !is_configured,
            Some(id) if is_configured => {
                let registry = self.served.as_ref().map(|served| served.registry());
                let registry = registry.as_ref();
                let named = registry.and_then(|one| one.named(&row.destination));
                named.is_some_and(|one| one.registration == id)
            }
            _ => false,
        }
    }

    pub(super) fn registration(&self) -> Registration {
        registration_of(self.shared)
    }

    /// Whether others that serve the same may rely on this relay.
    fn is_at_work(&self) -> bool {
        let sleep = &self.shared.signals.sleep;
        sleep.is_at_work() || self.shares_while_idle && sleep.is_awake()
    }

    /// Starts with a lease that is registered.
    pub(super) fn hold(&mut self, stage: &'w Stage<'w>, number: usize, lease: LeaseId) {
        let shared = self.shared;
        shared.lease.registered(lease, BootTime::now());
        let (registration, link) = (
            self.registration(),
            Link::new(stage, number, Actor::Heartbeat),
        );
        self.heartbeat = Some(Heartbeat::new(shared, registration, Some(lease), link));
    }

    /// The jobs left in the inbox when the claimer ended.
    fn left_behind(&self, which: usize) -> Vec<Vec<Job>> {
        if which == 0 || !self.has_ended {
            return Vec::new();
        }
        let left = self.inbox.1.try_iter();
        let continued = left.filter_map(|told| match told {
            Told::Continued(jobs) => Some(jobs),
            Told::Report(_) => None,
        });
        continued.collect()
    }

    pub(super) fn ask(&mut self, now: Duration) {
        let question = self.shared.ask();
        self.question = Some((question, now));
    }

    pub(super) fn tell_vanished(&self, leases: Vec<i64>) {
        self.shared
            .tell_claimer(Told::Report(Report::Vanished(leases)));
    }

    /// Whether all senders of a destination are busy.
    pub(super) fn is_busy(&self, destination: &str) -> bool {
        let bulkheads = self.shared.bulkheads.iter();
        let number = bulkheads
            .zip(0..)
            .find(|(one, _)| *one.name == *destination);
        match number {
            Some((bulkhead, number)) => {
                !self.queues[number].is_empty()
                    || self.sending[number].busy >= bulkhead.limits.concurrency
            }
            // Endpoints share a few threads.
            None => {
                let Some(served) = &self.served else {
                    return false;
                };
                let registry = served.registry();
                let pool = self.sending.last().zip(self.shared.bulkheads.last());
                let is_full =
                    pool.is_some_and(|(pool, threads)| pool.busy >= threads.limits.concurrency);
                let endpoint = registry.named(destination);
                endpoint.is_some_and(|one| is_full || served.turns().has(one.id))
            }
        }
    }

    pub(super) fn pass_on_entries(&self, broken: Option<Broken>) {
        while let Ok(told) = self.shared.signals.told.1.try_recv() {
            let is_lost =
                broken == Some(Broken::LosesHandOvers) && matches!(told, Told::Continued(_));
            if !is_lost {
                // The send cannot fail: the other end is here.
                let _ = self.inbox.0.send(told);
            }
        }
        if broken == Some(Broken::LosesRings) {
            while self.shared.signals.doorbell.ear.try_recv().is_ok() {}
        }
    }

    pub(super) fn actors(&self) -> impl Iterator<Item = Actor> + use<> {
        let senders = (0..self.sending.len()).map(Actor::Sender);
        [
            Actor::Claimer,
            Actor::Settler(0),
            Actor::Settler(1),
            Actor::Heartbeat,
            Actor::Listener,
        ]
        .into_iter()
        .chain(senders)
    }

    /// When an actor has work. `None`: it waits to be woken, or is at work.
    pub(super) fn due(&self, stage: &Stage<'w>, actor: Actor) -> Option<Duration> {
        let now = stage.now();
        match actor {
            Actor::Claimer => {
                self.claimer.as_ref()?;
                let is_announced = || {
                    !self.shared.signals.doorbell.ear.is_empty()
                        || !self.shared.signals.news.ear.is_empty()
                        || !self.inbox.1.is_empty()
                };
                match &self.claiming {
                    _ if self.shared.is_stopping() => Some(now),
                    Claiming::Continues => Some(now),
                    Claiming::Pauses(until) => Some(*until),
                    Claiming::Waits { .. } if is_announced() => Some(now),
                    Claiming::Waits { until, naps_at, .. } => {
                        Some(naps_at.map_or(*until, |at| at.min(*until)))
                    }
                }
            }
            Actor::Settler(number) => {
                let settling = &self.settling[number];
                let settler = settling.settler.as_ref()?;
                if !settling.left.is_empty() {
                    return Some(settling.next);
                }
                let has_left_behind = number == 1 && self.has_ended && !self.inbox.1.is_empty();
                if !settling.outcomes.is_empty() || has_left_behind {
                    return Some(now);
                }
                stage.enter_as(self);
                settler.next_try().map(|at| stage.when(self, at))
            }
            Actor::Heartbeat => {
                self.heartbeat.as_ref()?;
                match self.shared.signals.pulse.ear.is_empty() {
                    true => Some(self.next_beat),
                    false => Some(now),
                }
            }
            Actor::Sender(number) => {
                let sending = &self.sending[number];
                let bulkhead = &self.shared.bulkheads[number];
                let is_free = sending.busy < bulkhead.limits.concurrency;
                if let Some(served) = &self.served
                    && matches!(bulkhead.serves, SendsTo::Members(_))
                {
                    let is_called = !served.bell.ear.is_empty();
                    let continues = !sending.going_on.is_empty();
                    return match served.turns().waiting() {
                        _ if continues => Some(now),
                        0 => None,
                        _ if !is_free => None,
                        _ if is_called => Some(now),
                        _ => Some(sending.next),
                    };
                }
                let has_job = sending.has_jobs() || !self.queues[number].is_empty();
                (is_free && has_job).then_some(sending.next)
            }
            Actor::Listener => {
                if self.deaf_until > now || self.shared.is_stopping() {
                    return None;
                }
                let is_awake = self.shared.signals.sleep.is_awake();
                match self.listening.has_lock {
                    _ if self.notified.get() => Some(now),
                    true => is_awake.then_some(now),
                    false if is_awake => {
                        (self.is_at_work() != self.listening.is_awake).then_some(now)
                    }
                    false => Some(self.listening.next_try.unwrap_or(now)),
                }
            }
        }
    }
}

impl<'w> Stage<'w> {
    /// Sets the clocks for a process that asks for the time.
    fn enter_as(&self, process: &Process<'w>) {
        self.set_clocks(process.lost);
    }

    pub(super) fn run(&'w self, number: usize, actor: Actor) {
        match actor {
            Actor::Claimer => self.run_claimer(number),
            Actor::Settler(which) => self.run_settler(number, which),
            Actor::Heartbeat => self.run_heartbeat(number),
            Actor::Sender(bulkhead) => match self.is_of_endpoint(number, bulkhead) {
                true => self.run_pool(number, bulkhead),
                false => self.run_sender(number, bulkhead),
            },
            Actor::Listener => self.run_listener(number),
        }
    }

    fn run_claimer(&'w self, number: usize) {
        let now = self.now();
        let (claimer, claiming, shared) = {
            let mut processes = self.processes.borrow_mut();
            let process = &mut processes[number];
            let claiming = std::mem::replace(&mut process.claiming, Claiming::Continues);
            (process.claimer.take(), claiming, process.shared)
        };
        let Some(mut claimer) = claimer else { return };
        let is_held_up = self.broken == Some(Broken::WaitsForAllInFlight)
            && shared.custody.doubt().is_some()
            && shared.custody.count_beside_handlers() > 0;
        if is_held_up && !shared.is_stopping() {
            // It hands on what settlers have claimed.
            claimer.is_woken();
            let mut processes = self.processes.borrow_mut();
            processes[number].claimer = Some(claimer);
            processes[number].claiming = Claiming::Pauses(now + Duration::from_millis(5));
            return;
        }
        if shared.is_stopping() {
            claimer.finish();
            self.processes.borrow_mut()[number].has_ended = true;
            return self.end_where_it_is_done(number);
        }
        let after = match claiming {
            Claiming::Waits {
                wait,
                until,
                naps_at,
            } if !claimer.is_woken() && now < until => {
                let is_nap = naps_at.is_some_and(|at| now >= at);
                if is_nap {
                    shared.signals.sleep.ask();
                }
                let naps_at = naps_at.filter(|_| !is_nap);
                Claiming::Waits {
                    wait,
                    until,
                    naps_at,
                }
            }
            Claiming::Waits { wait, until, .. } => {
                claimer.end_wait(&wait, now < until);
                Claiming::Continues
            }
            Claiming::Continues | Claiming::Pauses(_) => match claimer.turn() {
                ClaimTurn::Continue => Claiming::Continues,
                ClaimTurn::Pause(pause) => Claiming::Pauses(self.now() + pause),
                ClaimTurn::Wait(wait) => {
                    claimer.begin_wait(&wait);
                    self.tell(|| format!("process {number} waits for {:?}", wait.what));
                    let processes = self.processes.borrow();
                    let until = self.when(&processes[number], wait.until);
                    let naps_at = (wait.what == Awaited::Room).then(|| self.now() + SOON);
                    Claiming::Waits {
                        wait,
                        until,
                        naps_at,
                    }
                }
            },
        };
        let mut processes = self.processes.borrow_mut();
        let process = &mut processes[number];
        process.claimer = Some(claimer);
        process.claiming = after;
        // Finds a claimer that runs in a busy loop.
        let second = Duration::from_secs(self.now().as_secs());
        process.turns = match process.turns {
            (since, count) if since == second => (since, count + 1),
            _ => (second, 0),
        };
        let turns = process.turns.1;
        drop(processes);
        if turns > 2 * MOST_TURNS {
            self.fall(Promise::Busy, || {
                format!("{turns} turns of a claimer in a second")
            });
        }
    }

    fn run_settler(&'w self, number: usize, which: usize) {
        let (settler, mut batch, outcomes, left_behind) = {
            let mut processes = self.processes.borrow_mut();
            let left_behind = processes[number].left_behind(which);
            let settling = &mut processes[number].settling[which];
            let left = std::mem::take(&mut settling.left);
            (
                settling.settler.take(),
                left,
                settling.outcomes.clone(),
                left_behind,
            )
        };
        let Some(mut settler) = settler else { return };
        if batch.is_empty() {
            let gathered: Vec<Settlement> = outcomes.try_iter().take(8).collect();
            batch = settler.set_apart(gathered);
        }
        if self.broken == Some(Broken::ContinuesWhileReleasing) {
            self.processes.borrow()[number].shared.custody.end_release();
        }
        let left = match batch.is_empty() {
            true => batch,
            false => settler.settle(batch),
        };
        settler.try_next();
        for jobs in left_behind {
            settler.release(jobs);
        }
        let pause = match left.is_empty() {
            true => Duration::ZERO,
            false => Duration::from_millis(100),
        };
        let mut processes = self.processes.borrow_mut();
        let settling = &mut processes[number].settling[which];
        settling.next = self.now() + pause;
        settling.left = left;
        settling.settler = Some(settler);
        drop(processes);
        self.end_where_it_is_done(number);
    }

    /// A relay that stops has ended when everything is settled.
    fn end_where_it_is_done(&'w self, number: usize) {
        let heartbeat = {
            let mut processes = self.processes.borrow_mut();
            let process = &mut processes[number];
            let is_done = process.shared.is_stopping()
                && process.has_ended
                && process.shared.custody.unsettled() == 0
                && process.settling.iter().all(|one| one.settler.is_some());
            if !is_done {
                return;
            }
            process.heartbeat.take()
        };
        let Some(heartbeat) = heartbeat else { return };
        let is_in_doubt = self.processes.borrow()[number]
            .shared
            .custody
            .doubt()
            .is_some();
        if !is_in_doubt {
            heartbeat.end();
        }
        self.tell(|| format!("process {number} has ended"));
        self.relay_ends(number, is_in_doubt);
    }

    fn run_heartbeat(&'w self, number: usize) {
        let heartbeat = {
            let mut processes = self.processes.borrow_mut();
            let process = &mut processes[number];
            while process.shared.signals.pulse.ear.try_recv().is_ok() {}
            process.heartbeat.take()
        };
        let Some(mut heartbeat) = heartbeat else {
            return;
        };
        let wait = heartbeat.beat();
        let mut processes = self.processes.borrow_mut();
        let process = &mut processes[number];
        process.heartbeat = Some(heartbeat);
        process.next_beat = self.now() + wait;
        drop(processes);
        self.end_where_it_is_done(number);
    }

    fn run_listener(&self, number: usize) {
        let mut processes = self.processes.borrow_mut();
        let now = self.now();
        let serves = |process: &Process<'_>| process.registration().serves;
        let mut others = processes.iter().enumerate().filter(|(other, process)| {
            *other != number
                && !process.is_dead
                && process.listening.is_awake
                && serves(process) == serves(&processes[number])
        });
        let is_another_awake = others.next().is_some();
        let is_at_work = processes[number].is_at_work();
        let process = &mut processes[number];
        let (shared, sleep) = (process.shared, &process.shared.signals.sleep);
        let listening = &mut process.listening;
        let is_news = process.notified.replace(false);
        sleep.drain();
        if is_news {
            sleep.interrupt();
            shared.signals.doorbell.ring();
        }
        // Another listener may have the lock by now.
        listening.has_lock &= self.listener.get() == Some(number);
        if listening.has_lock && (is_news || sleep.is_awake()) {
            self.listener.set(None);
            listening.has_lock = false;
        }
        listening.is_awake = is_at_work;
        let fall_asleep = || {
            if sleep.begin() && self.broken != Some(Broken::SleepsAtOnce) {
                shared.signals.news.ring();
            }
        };
        listening.next_try = match (sleep.is_awake(), listening.has_lock) {
            (true, _) => None,
            (false, true) => {
                fall_asleep();
                None
            }
            (false, false) if is_another_awake => {
                fall_asleep();
                if listening.next_try.is_some() {
                    shared.signals.news.ring();
                }
                Some(now + AFTER_ANOTHER)
            }
            (false, false) if self.inserting.get() > 0 => {
                shared.signals.news.ring();
                Some(now + WHILE_INSERTING)
            }
            (false, false) if self.listener.get().is_some() => {
                fall_asleep();
                Some(now + AFTER_ANOTHER)
            }
            (false, false) => {
                self.listener.set(Some(number));
                listening.has_lock = true;
                fall_asleep();
                if self.broken != Some(Broken::SleepsAtOnce) {
                    shared.signals.news.ring();
                }
                None
            }
        };
    }

    fn run_sender(&self, number: usize, which: usize) {
        let now = self.now();
        let (shared, request, outcomes) = {
            let mut processes = self.processes.borrow_mut();
            let process = &mut processes[number];
            let (queue, bulkhead) = (&process.queues[which], &process.shared.bulkheads[which]);
            let request = process.sending[which].take(queue, bulkhead, now);
            (process.shared, request, process.outcomes.clone())
        };
        let Some(request) = request else { return };
        let bulkhead = &shared.bulkheads[which];
        {
            let processes = self.processes.borrow();
            let is_low = processes[number].queues[which].len() <= bulkhead.prefetch();
            shared.custody.made_room(|| is_low);
        }
        let may_send = |job: &Job| !shared.is_stopping() && shared.lease.may_send(job.lease);
        let admission = match request.jobs.iter().any(may_send) {
            true => bulkhead.gate.ask(),
            false => Admission::Closed,
        };
        let pass = match admission {
            Admission::Pass(pass) => pass,
            Admission::Closed => {
                let released = |job| Settlement::unsent(job, &shared.bulkheads, Verdict::Released);
                if request.run.is_none() {
                    let released = request.jobs.into_iter().map(released);
                    return released.for_each(|one| drop(outcomes.send(one)));
                }
                return drop(request.cut(shared, &outcomes, |_| Some(Verdict::Released)));
            }
            Admission::Wait(wait) => {
                let mut processes = self.processes.borrow_mut();
                let sending = &mut processes[number].sending[which];
                sending.held = Some(request);
                sending.next = now + wait.min(Duration::from_millis(10));
                return;
            }
        };
        let unsent = |job: &Job| match is_expired(&job.message, clock::now()) {
            _ if !may_send(job) => Some(Verdict::Released),
            true => Some(Verdict::expired()),
            false => None,
        };
        let (request, alone) = request.cut(shared, &outcomes, unsent);
        self.processes.borrow_mut()[number].sending[which]
            .alone
            .extend(alone);
        match request {
            None => bulkhead.gate.return_pass(&pass),
            Some(request) => self.begin_send((number, which), &bulkhead.name, (request, pass)),
        }
    }

    fn is_of_endpoint(&self, number: usize, which: usize) -> bool {
        let processes = self.processes.borrow();
        let bulkhead = &processes[number].shared.bulkheads[which];
        matches!(bulkhead.serves, SendsTo::Members(_))
    }

    /// Runs a thread of the pool for endpoints.
    fn run_pool(&self, number: usize, which: usize) {
        let (shared, served, outcomes) = {
            let processes = self.processes.borrow();
            let process = &processes[number];
            (process.shared, process.served(), process.outcomes.clone())
        };
        while served.bell.ear.try_recv().is_ok() {}
        let release_unsent = |job: Job| {
            let verdict = job.release_unsent();
            let settlement = Settlement::unsent(job, &shared.bulkheads, verdict);
            // The send cannot fail: the other end is here.
            let _ = outcomes.send(settlement);
        };
        let now = self.now();
        let going_on = {
            let mut processes = self.processes.borrow_mut();
            processes[number].sending[which].going_on.pop_front()
        };
        if let Some(request) = going_on {
            return self.send_to_endpoints((number, which), request, None);
        }
        let next = match served.next_turn(shared, &shared.bulkheads[which]) {
            NextWork::Nothing(until) => {
                let processes = self.processes.borrow();
                until.map_or(Duration::MAX, |until| {
                    self.when(&processes[number], until).max(now)
                })
            }
            NextWork::GiveBack(jobs) => {
                jobs.into_iter().for_each(release_unsent);
                now
            }
            NextWork::Send(job, pass, in_flight) => {
                let registry = served.registry();
                let pool = served.pool();
                let member = match job.to {
                    To::Member(id) => pool.get(&id),
                    _ => None,
                };
                if let Some(ServedEndpoint {
                    endpoint, bulkhead, ..
                }) = member.map(AsRef::as_ref)
                    && self.broken == Some(Broken::PrefersOne)
                    && self.history.has_crowd
                    && REGISTERED[1..].contains(&&*endpoint.name)
                    && let Some(preferred) = registry.named(REGISTERED[0])
                    && served.turns().has(preferred.id)
                {
                    bulkhead.gate.return_pass(&pass);
                    served.turns().ended(in_flight, None, 1);
                    return served.put(vec![job]);
                }
                match member.map(Arc::clone) {
                    Some(member) => {
                        let request = Request {
                            registered: Some((in_flight, member)),
                            served: Some(Arc::clone(&served)),
                            ..Request::of_run(Run::begin(job))
                        };
                        self.send_to_endpoints((number, which), request, Some(pass));
                    }
                    None => {
                        served.turns().ended(in_flight, None, 1);
                        release_unsent(job);
                    }
                }
                now
            }
        };
        self.processes.borrow_mut()[number].sending[which].next = next;
    }

    /// Sends a message to an endpoint. `pass`: `None` if the message is not the first of its run.
    fn send_to_endpoints(
        &self,
        (number, which): (usize, usize),
        request: Request,
        pass: Option<Pass>,
    ) {
        let (shared, served, outcomes) = {
            let processes = self.processes.borrow();
            let process = &processes[number];
            (process.shared, process.served(), process.outcomes.clone())
        };
        let (_, member) = request.registered.as_ref().expect("a turn");
        let member = Arc::clone(member);
        let (endpoint, gate) = (&member.endpoint, &member.bulkhead.gate);
        let pool = served.pool();
        let now = pool.get(&endpoint.id).filter(|one| !one.endpoint.is_held());
        let is_same = pass.is_some() || now.is_some_and(|one| Arc::ptr_eq(one, &member));
        let pass = pass.or_else(|| match gate.try_pass(clock::now()) {
            Admission::Pass(pass) => Some(pass),
            Admission::Closed | Admission::Wait(_) => None,
        });
        let unsent = |job: &Job| {
            let may_send = shared.lease.may_send(job.lease) && is_same && pass.is_some();
            match is_expired(&job.message, clock::now()) {
                _ if shared.is_stopping() || !may_send => Some(Verdict::Released),
                true => Some(Verdict::expired()),
                false => None,
            }
        };
        match (request.cut(shared, &outcomes, unsent).0, pass) {
            (Some(request), Some(pass)) => {
                for job in &request.jobs {
                    self.check_address(&job.message, endpoint);
                }
                self.begin_send((number, which), &endpoint.name, (request, pass));
            }
            (_, pass) => pass.iter().for_each(|pass| gate.return_pass(pass)),
        }
    }

    fn check_address(&self, message: &Message, endpoint: &KnownEndpoint) {
        let tables = self.tables.borrow();
        // A new primary may use the sequence again.
        let row = tables.rows.get(&message.sequence.0);
        let row = row.filter(|row| row.id == number_of(message));
        let addressed = row.and_then(|row| row.registration);
        if addressed.is_some_and(|one| one != endpoint.registration) {
            self.fall(Promise::Address, || {
                let (sequence, name) = (message.sequence.0, &endpoint.name);
                format!("{sequence} is sent to another registration of the name {name}")
            });
        }
    }

    /// Notes that a message which names no destination goes to this one. A relay may not know yet that it is disabled.
    fn note_addressee(&self, message: &Message, endpoint: &KnownEndpoint) {
        let tables = self.tables.borrow();
        let living = tables.registered.get(&*endpoint.name);
        let is_it = living.is_some_and(|one| one.enabled && one.id == endpoint.registration);
        if is_it && message.destination.is_empty() {
            let mut messages = self.messages.borrow_mut();
            let addressed = &mut messages[number_of(message)].addressed;
            addressed.insert(endpoint.registration);
        }
    }

    fn begin_send(
        &self,
        (number, which): (usize, usize),
        name: &str,
        (request, pass): (Request, Pass),
    ) {
        let sent = request.delivered();
        let mut earlier: Vec<&Job> = Vec::new();
        for run in &request.jobs {
            let mut of_run = sent.clone();
            for job in run.each() {
                self.check_send(job, name, &earlier, &of_run);
                of_run.push(job.message.sequence.0);
                let of_endpoints = request.registered.as_ref();
                if let Some((_, member)) = of_endpoints.filter(|_| self.is_strict()) {
                    let (id, stamp) = (number_of(&job.message), member.endpoint.stamp);
                    self.check_tenant(id, stamp, name);
                    self.check_verified(id, stamp, name);
                    self.note_addressee(&job.message, &member.endpoint);
                }
            }
            earlier.extend(run.each());
        }
        let jobs: Vec<&Job> = request.jobs.iter().flat_map(Job::each).collect();
        let shared = self.processes.borrow()[number].shared;
        let is_group = matches!(shared.bulkheads[which].serves, SendsTo::Handlers(_));
        let (outcomes, lasts) = match is_group {
            true => self.handle(&request.jobs),
            false => self.answer(&request.jobs, name),
        };
        for job in jobs.iter().filter(|_| is_group) {
            shared
                .custody
                .begin_handling(job.lease, Claim::of(&job.message));
        }
        if request.registered.is_some() {
            let served = self.processes.borrow()[number].served();
            let registry = served.registry();
            self.check_fairness(name, lasts, |name| {
                let turns = served.turns();
                (registry.named(name)).is_some_and(|one| turns.awaits_first(one.id))
            });
        }
        for (job, outcome) in jobs.iter().zip(&outcomes) {
            self.tell(|| {
                let (message, lease) = (&job.message, job.lease);
                format!(
                    "process {number} sends {} {} to {name} under {lease}: {outcome:?} in {lasts:?}",
                    message.topic, message.sequence.0
                )
            });
        }
        let send = Send {
            process: number,
            bulkhead: which,
            request,
            pass,
            outcomes,
            began: clock::now(),
            is_received: false,
            ends: self.now() + lasts,
            can_close: !is_group,
        };
        self.processes.borrow_mut()[number].sending[which].busy += 1;
        self.send(send);
    }

    /// The outcomes of a request, and how long it takes. A receiver accepts or refuses a request as a whole, unless the
    /// dispatcher has an outcome for each message.
    fn answer(&self, runs: &[Job], destination: &str) -> (Vec<Outcome>, Duration) {
        let mood = self
            .moods
            .borrow()
            .get(destination)
            .map_or(Mood::Well, |(mood, _)| *mood);
        let messages = self.messages.borrow();
        let failed = |code| Outcome::Retry(Failure::new(code, "no"));
        let addressee = runs.first().map_or("", addressee);
        let of_message = |message: &Message| {
            let truth = &messages[number_of(message)];
            if mood == Mood::Failing || of(&truth.failed, addressee) < truth.fails {
                failed(ReasonCode::ServerError)
            } else if truth.is_refused {
                let mut failure = Failure::new(ReasonCode::Rejected, "no");
                failure.response.status = Some(422);
                Outcome::Dead(failure)
            } else {
                Outcome::Delivered(Response::default())
            }
        };
        let each = || runs.iter().flat_map(Job::messages).map(of_message);
        let is_delivered = |one: &Outcome| matches!(one, Outcome::Delivered(_));
        let count = runs.iter().map(Job::len).sum();
        let outcomes = if mood == Mood::Hanging {
            vec![failed(ReasonCode::Timeout); count]
        } else if self.history.has_outcomes_of_each {
            // A dispatcher sends nothing behind a message of a key that is not delivered.
            let of_run = |run: &Job| {
                let mut continues = true;
                let each = run.messages().map(|message| {
                    let outcome = match continues {
                        true => of_message(message),
                        false => Outcome::Wait(Failure::new(ReasonCode::Failed, "not sent")),
                    };
                    continues = is_delivered(&outcome);
                    outcome
                });
                each.collect::<Vec<_>>()
            };
            runs.iter().flat_map(of_run).collect()
        } else {
            let worst = each().max_by_key(|one| match one {
                Outcome::Retry(_) => 2,
                Outcome::Dead(_) => 1,
                _ => 0,
            });
            vec![worst.expect("a request has messages"); count]
        };
        let lasts = match mood {
            Mood::Hanging => self.history.send_timeout(),
            _ if !outcomes.iter().all(is_delivered) => self.dice(1, 10),
            Mood::Slow => {
                let most = self.history.send_timeout().as_millis() as u64;
                self.dice(200, most - 100)
            }
            Mood::Well | Mood::Failing => self.dice(1, 20),
        };
        (outcomes, lasts)
    }

    /// The result of a handler, and how long it takes. If nothing else goes wrong, there is a connection.
    fn handle(&self, jobs: &[Job]) -> (Vec<Outcome>, Duration) {
        let has_trouble = !self.history.is_calm() && !self.is_calm_now();
        if has_trouble && self.rng(|rng| rng.u8(..4)) == 0 {
            let outcome = no_connection("all are in use").into_outcome();
            return (vec![outcome; jobs.len()], self.dice(1, 10));
        }
        self.answer(jobs, HANDLED)
    }

    /// The receiver has responded.
    pub(super) fn received(&self, number: u64) {
        let mut sends = self.sends.borrow_mut();
        let Some(send) = sends.get_mut(&number) else {
            return;
        };
        send.is_received = true;
        let sent = send.request.delivered();
        let mut outcomes = send.outcomes.iter();
        for run in &send.request.jobs {
            let mut before = sent.last().copied();
            for (job, outcome) in run.each().zip(outcomes.by_ref()) {
                self.received_one(job, outcome);
                if matches!(outcome, Outcome::Delivered(_)) {
                    self.check_repeat(&job.message, before);
                }
                before = Some(job.message.sequence.0);
            }
        }
    }

    fn received_one(&self, job: &Job, outcome: &Outcome) {
        let message = &job.message;
        let mut messages = self.messages.borrow_mut();
        let truth = &mut messages[number_of(message)];
        // Those that name no destination are counted where they go.
        let mut names = vec![addressee(job), &message.destination];
        names.dedup();
        let again: u32 = names.iter().map(|name| of(&truth.again, name)).sum();
        let of = match outcome {
            Outcome::Delivered(_) => &mut truth.well,
            // No handler was called.
            Outcome::Wait(_) => return,
            // The receiver has refused another message of the request.
            Outcome::Dead(_) if !truth.is_refused => return,
            _ => &mut truth.failed,
        };
        let count = of.entry(addressee(job).to_owned()).or_default();
        *count += 1;
        let most = 1 + again;
        let is_twice = *count > most && matches!(outcome, Outcome::Delivered(_));
        drop(messages);
        if is_twice && self.history.is_fair() {
            self.fall(Promise::Doubled, || {
                format!(
                    "{} {} was delivered twice",
                    message.topic, message.sequence.0
                )
            });
        }
        self.check_held(message, job.lease, "at the end of its send");
    }

    /// Checks the promises at the start of a send to a destination. `earlier`: messages of other runs of the same request.
    /// `of_run`: earlier messages of the same run.
    fn check_send(&self, job: &Job, to: &str, earlier: &[&Job], of_run: &[i64]) {
        let (message, lease) = (&job.message, job.lease);
        self.check_held(message, lease, "at the beginning of its send");
        self.check_again(message);
        if !self.is_strict() {
            return;
        }
        let tables = self.tables.borrow();
        let sequence = message.sequence.0;
        let Some(row) = tables.rows.get(&sequence) else {
            return;
        };
        let messages = self.messages.borrow();
        // The claim must have seen the other message.
        let seen = |other: &&Row| {
            let committed = messages[other.id].committed.map(|at| self.in_database(at));
            committed.is_some_and(|at| at + 1000 < message.claimed_at)
        };
        let before = tables.rows.values().filter(|other| {
            other.has_key_of(row)
                && other.place() < row.place()
                && ["", to].contains(&other.destination.as_str())
                && !of_run.contains(&other.sequence)
        });
        let is_there = |other: &&Row| {
            // Parts are made later. A message that is sent without a part has waited for those that are there.
            other.split_from.is_none() || row.split_from.is_none() && row.topic == wants::ROUTED
        };
        if let Some(other) = before.filter(seen).find(is_there) {
            self.fall(Promise::Order, || {
                format!(
                    "{} {sequence} is sent before {} of its key is done: {other:?}",
                    row.topic, other.sequence
                )
            });
        }
        let sends = self.sends.borrow();
        let sent = sends.values().filter(|send| !send.is_received);
        let sent = sent.flat_map(|send| send.request.jobs.iter().flat_map(Job::each));
        let mut sent = sent.chain(earlier.iter().copied());
        let beside = sent.find(|job| {
            let other = tables.rows.get(&job.message.sequence.0);
            job.message.sequence.0 == sequence || other.is_some_and(|other| other.excludes(row))
        });
        if let Some(other) = beside {
            let other = other.message.sequence.0;
            self.fall(Promise::Order, || {
                format!(
                    "{} {sequence} is sent while {other} of its key is in flight",
                    row.topic
                )
            });
        }
        let truth = &messages[row.id];
        let of = |counts| of(counts, &row.destination);
        let most = of(&truth.failed) + of(&truth.taken_over);
        if message.attempts > most {
            self.fall(Promise::Attempts, || {
                format!(
                    "{} {sequence} has {} attempts, but only {most} were made",
                    row.topic, message.attempts
                )
            });
        }
    }

    /// Checks that a message that was sent before is the same.
    fn check_again(&self, message: &Message) {
        let id = number_of(message);
        let time = message.occurred_at.unwrap_or(message.created_at);
        let sent = (message.headers.clone(), time);
        let mut messages = self.messages.borrow_mut();
        let first = messages[id].first.get_or_insert_with(|| sent.clone());
        if *first != sent {
            self.fall(Promise::Again, || {
                format!("message {id} was sent as {first:?}, and is sent again as {sent:?}")
            });
        }
    }

    /// Checks that this lease holds the message by this claim.
    fn check_held(&self, message: &Message, lease: LeaseId, when: &str) {
        let tables = self.tables.borrow();
        let held = tables
            .rows
            .get(&message.sequence.0)
            .and_then(|row| row.held);
        let is_held =
            held.is_some_and(|held| held.lease == lease.0 && held.at == message.claimed_at);
        if !is_held && self.is_strict() {
            self.fall(Promise::Fence, || {
                format!(
                    "{} {} is not held by {lease} {when}, but by {held:?}",
                    message.topic, message.sequence.0
                )
            });
        }
    }

    /// The sender gets the result of the send.
    pub(super) fn conclude(&self, send: Send) {
        let Send {
            process,
            bulkhead: number,
            request,
            pass,
            outcomes: mut answers,
            began,
            ..
        } = send;
        let (shared, outcomes) = {
            let mut processes = self.processes.borrow_mut();
            let process = &mut processes[process];
            process.sending[number].busy -= 1;
            process.sending[number].next = self.now();
            (process.shared, process.outcomes.clone())
        };
        let Request {
            jobs,
            run,
            sent,
            registered,
            served,
        } = request;
        let took = clock::since(began);
        let telling = telling(jobs.iter().map(Job::len), &answers).expect("a request has messages");
        let is_delivered = matches!(telling, Outcome::Delivered(_));
        if registered.is_none() || is_delivered {
            shared.bulkheads[number].learn(took);
        }
        if matches!(shared.bulkheads[number].serves, SendsTo::Handlers(_)) {
            let ended = jobs.iter().map(|job| (job.lease, Claim::of(&job.message)));
            ended.for_each(|(lease, claim)| shared.custody.end_handling(lease, claim));
        }
        let member = registered.as_ref().map(|(_, member)| Arc::clone(member));
        let of_endpoint = member.as_ref().map(|member| &member.bulkhead);
        let bulkhead = of_endpoint.unwrap_or(&shared.bulkheads[number]);
        if bulkhead.gate.record(&pass, telling) {
            shared.signals.doorbell.ring();
        }
        if self.broken == Some(Broken::CountsRefusalsForAll) {
            for outcome in &mut answers {
                if let Outcome::Dead(failure) = outcome {
                    failure.response.status = None;
                }
            }
        }
        if self.broken == Some(Broken::RepeatsRefusedRuns) {
            let mut left = &mut answers[..];
            for job in &jobs {
                let of_run;
                (of_run, left) = left.split_at_mut(job.len());
                if let Some(refusal) = of_run.iter().find(|one| matches!(one, Outcome::Dead(_))) {
                    of_run.fill(refusal.clone());
                }
            }
        }
        let conclude = |job: Job, outcome| {
            let outcome = match outcome {
                Outcome::Wait(failure) if self.broken == Some(Broken::CountsCallsNotMade) => {
                    Outcome::Retry(failure)
                }
                outcome => outcome,
            };
            let verdict =
                Verdict::of_outcome(outcome, job.message.attempts, &bulkhead.limits.retries);
            Settlement::new(job, &shared.bulkheads, verdict, took)
        };
        let this = Sent {
            went_well: is_delivered,
            took,
            messages: 1,
        };
        let sent = sent.map_or(this, |sent| sent.and(this));
        let mut settled = Vec::new();
        if let Some(mut run) = run {
            let next = jobs.into_iter().zip(answers).next();
            let next = next.and_then(|(job, outcome)| {
                let settlement = conclude(job, outcome);
                match self.broken {
                    Some(Broken::RunsPastFailures) => run.continue_past(settlement),
                    _ => run.next(settlement, &shared.bulkheads),
                }
            });
            if let Some(next) = next {
                let request = Request {
                    jobs: vec![next],
                    run: Some(run),
                    sent: Some(sent),
                    registered,
                    served,
                };
                let sending = &mut self.processes.borrow_mut()[process].sending[number];
                return sending.going_on.push_back(request);
            }
            settled.extend(run.settlement());
        } else {
            let (ended, alone) = answered(jobs, answers, &shared.bulkheads, conclude);
            settled.extend(ended);
            let sending = &mut self.processes.borrow_mut()[process].sending[number];
            sending.alone.extend(alone);
        }
        if let Some((turn, member)) = registered {
            let served = served.expect("a relay that knows endpoints");
            served.sent(shared, member.endpoint.id, bulkhead);
            if self.broken != Some(Broken::LosesTurns) {
                let most = bulkhead.limits.concurrency;
                let sent = match self.broken {
                    Some(Broken::TrustsWhatFails) => Sent {
                        went_well: true,
                        took: Duration::ZERO,
                        messages: 1,
                    },
                    _ => sent,
                };
                served.turns().ended(turn, Some(sent), most);
            }
        }
        for mut settlement in settled {
            let behind = match self.broken {
                Some(Broken::SettlesRunsOneByOne) => std::mem::take(&mut settlement.behind),
                _ => Vec::new(),
            };
            let all = std::iter::once(settlement).chain(behind);
            // The send cannot fail: the other end is here.
            all.for_each(|one| drop(outcomes.send(one)));
        }
    }

    /// Checks that a delivered message of a run is sent again only after the messages before it in the run. `before`: the
    /// message before it now.
    fn check_repeat(&self, message: &Message, before: Option<i64>) {
        let tables = self.tables.borrow();
        let Some(row) = tables.rows.get(&message.sequence.0) else {
            return;
        };
        let Some(key) = row.ordering_key.filter(|_| self.is_strict()) else {
            return;
        };
        let to = goes_to(row.topic, &row.destination).to_owned();
        let mut received = self.received.borrow_mut();
        let last = received.last.insert((key, to), (row.place(), row.sequence));
        let earlier = received.before.insert(row.sequence, before);
        let is_back = last.is_some_and(|(place, _)| row.place() <= place);
        let was_behind = earlier.flatten().filter(|_| is_back && before.is_none());
        let is_settled = |sequence: &i64| {
            let mut ledger = tables.ledger.iter();
            ledger.any(|entry| entry.is_delivered && entry.row.sequence == *sequence)
        };
        if let Some(first) = was_behind.filter(is_settled) {
            self.fall(Promise::Repeats, || {
                format!("{row:?} is sent again, and not {first}, which was before it in its run")
            });
        }
        if let Some(before) = before.filter(|before| last.is_none_or(|last| last.1 != *before)) {
            self.fall(Promise::Repeats, || {
                format!("{row:?} is received after {last:?}, and not after {before}")
            });
        }
    }
}

/// The number of a message in its history.
fn number_of(message: &Message) -> usize {
    usize::try_from(message.message_id.as_u128()).unwrap_or(0)
}

/// The count for a destination. A message for a single endpoint is sent before a row names the
/// destination, so sends without a name count, too.
pub(super) fn of(counts: &BTreeMap<String, u32>, destination: &str) -> u32 {
    let unnamed = (!destination.is_empty()).then_some("");
    let names = unnamed.into_iter().chain([destination]);
    names.filter_map(|name| counts.get(name)).sum()
}

/// Messages that the settlers have claimed wait when a queue is full. The claimer must ask to be rung for room before
/// it sleeps: otherwise it does not learn when the queue has room again.
#[test]
fn a_claimer_that_hears_of_more_than_a_queue_takes_asks_to_be_rung_for_room() {
    let history = History::of(1);
    let slots = [OnceCell::new()];
    let stage = Stage::new(&history, None, &slots, false);
    stage.set_clocks(Duration::ZERO);
    let mut process = Process::new(&stage, 0, 0, &slots[0]);
    let shared = process.shared;
    let most = i64::try_from(shared.bulkheads[0].queue()).expect("a small queue");
    let claimed: Vec<Claimed> = (0..=most).map(|n| claimed(n, "a", Some("k"))).collect();
    let batch = Batch {
        claimed,
        ..Batch::default()
    };
    let jobs = shared.took(batch, LeaseId(1), |_| Reading::NotAsked);
    shared.tell_claimer(Told::Continued(jobs));
    process.pass_on_entries(None);
    let claimer = process.claimer.as_mut().expect("the claimer is idle");
    while claimer.is_woken() {}
    assert_eq!(process.queues[0].len(), shared.bulkheads[0].queue());
    assert!(shared.custody.room_wanted.is_so());
}

/// Messages wait for the turn of a destination by its number. When another tenant gets the destination, they must not
/// be sent there.
#[test]
fn a_destination_that_another_tenant_gets_has_another_number() {
    let history = History {
        has_endpoints: true,
        has_tenants: true,
        ..History::of(1)
    };
    let slots = [OnceCell::new()];
    let stage = Stage::new(&history, None, &slots, false);
    stage.set_clocks(Duration::ZERO);
    let process = Process::new(&stage, 0, 0, &slots[0]);
    let (shared, registered) = (process.shared, process.served());
    let number_now = || {
        let changes =
            (stage.tables.borrow()).registered_since(&registered.registry(), &[], false, 0);
        let pool = shared.bulkheads.last().expect("the pool");
        registered.change(changes.expect("changes"), pool);
        registered.registry().named("x").expect("registered").id
    };
    stage.tables.borrow_mut().put("x", true, 0);
    let first = number_now();
    stage.tables.borrow_mut().put("x", false, 0);
    assert_eq!(number_now(), first);
    stage.tables.borrow_mut().give("x");
    assert_ne!(number_now(), first);
    assert!(registered.registry().get(first).is_none());
}

/// R57: the endpoint is registered after the claim of the message and before the read of the rows that the claim asks for.
/// It must not get the message, which is of an earlier transaction.
#[test]
fn an_endpoint_that_is_registered_before_the_read_does_not_get_a_message_claimed_before() {
    let history = History {
        has_endpoints: true,
        ..History::of(1)
    };
    let slots = [OnceCell::new()];
    let stage = Stage::new(&history, None, &slots, false);
    stage.set_clocks(Duration::ZERO);
    let process = Process::new(&stage, 0, 0, &slots[0]);
    let (shared, registered) = (process.shared, process.served());
    let mut one = claimed(1, "nobody.has.a.route", None);
    one.message.claimed = clock::now();
    one.message.age = Duration::ZERO;
    let enqueued = one.message.created_at;
    let batch = Batch {
        claimed: vec![one],
        registrations: Some(1),
        ..Batch::default()
    };
    let jobs = shared.took(batch, LeaseId(1), |unsure| {
        assert_eq!(unsure.len(), 1, "the rows are read");
        simulated::set(Some((
            clock::now() + Duration::from_secs(1),
            Duration::ZERO,
        )));
        stage.tables.borrow_mut().put("x", true, 0);
        let changes =
            (stage.tables.borrow()).registered_since(&registered.registry(), &[], false, 0);
        let mut changes = changes.expect("changes");
        for (row, _) in &mut changes.rows {
            row.row.topics = vec!["*".to_owned()];
            row.row.created_at = enqueued.checked_add(Duration::from_millis(500));
        }
        let pool = shared.bulkheads.last().expect("the pool");
        registered.change(changes, pool);
        Reading::Fresh
    });
    let unsent = jobs[0].unsent.as_ref();
    assert!(matches!(unsent, Some(Verdict::NoSubscriber)), "{unsent:?}");
}

/// A relay that does not send to a destination does not verify it either, and must not address messages to it for that.
#[test]
fn a_relay_whose_settings_refuse_a_destination_knows_that_it_skips_messages() {
    let history = History {
        has_endpoints: true,
        settings_differ: true,
        verification: Verification::CloudEventsSkip,
        ..History::of(1)
    };
    let slots = [OnceCell::new(), OnceCell::new()];
    let stage = Stage::new(&history, None, &slots, false);
    stage.set_clocks(Duration::ZERO);
    stage.tables.borrow_mut().put(REGISTERED[0], true, 0);
    for (relay, slot) in slots.iter().enumerate() {
        let process = Process::new(&stage, relay, relay, slot);
        let (shared, registered) = (process.shared, process.served());
        let changes =
            (stage.tables.borrow()).registered_since(&registered.registry(), &[], false, 0);
        let pool = shared.bulkheads.last().expect("the pool");
        registered.change(changes.expect("changes"), pool);
        let registry = registered.registry();
        let one = registry.named(REGISTERED[0]).expect("registered");
        assert_eq!(!one.is_unverified, history.is_strict(relay));
        assert!(!one.is_enabled(), "relay {relay}");
    }
}

/// The planner's steps for these views. The answers are always the same.
fn play(shared: &Shared, began: Instant, mut views: impl FnMut(u64) -> View) -> Vec<String> {
    let timing = Timing {
        is_enabled: true,
        poll_interval: Duration::from_secs(60),
        moment: Duration::from_millis(250),
    };
    let names = shared.bulkheads.iter().map(|bulkhead| &*bulkhead.name);
    let mut planner = Planner::new(began, timing, shared.directory.roster(), names.collect());
    let stream = |is_keyed| streams::FoundStream {
        stream: Stream {
            topic: Topic::new("c", REGISTERED[1]),
            is_keyed,
        },
        first: Position::START,
    };
    let mut steps = Vec::new();
    for number in 0..100 {
        let (view, now) = (views(number), began + Duration::from_millis(20 * number));
        let mut step = planner.next(now, &view);
        if step == Step::LookAgain {
            step = planner.look_again(now, &view);
        }
        steps.push(format!("{step:?}"));
        let took = Duration::from_millis(1);
        match step {
            Step::Survey(survey) => {
                let found = Surveyed {
                    streams: Some([false, true].map(stream).into()),
                    took,
                    shortened: Vec::new(),
                    ended: Vec::new(),
                    is_active: true,
                    time: 0,
                    server: 0,
                    paused: Tried::Locked,
                    marks: None,
                };
                planner.surveyed(now, survey, found, &HashSet::new());
            }
            Step::Claim { plain, keyed, .. } => {
                let brought = Brought {
                    room: usize::MAX,
                    batch: &Batch::default(),
                    of_keys: OfKeys::Done,
                    reached: &HashMap::new(),
                    took,
                };
                let asked = [plain, keyed].concat();
                planner.claimed(now, &asked, &brought);
            }
            Step::Search(ask) => {
                let page = Page {
                    moment: Some(Moment {
                        newest: None,
                        writers: Writers { oldest: 1, next: 1 },
                    }),
                    ..Page::default()
                };
                let picked = planner.pick(now, &ask, &page, &view);
                let found = plan::FoundMessages {
                    page,
                    picked,
                    claims: plan::Claims::default(),
                };
                let finished = plan::Finished {
                    ask,
                    outcome: plan::SearchOutcome::Done(Box::new(found)),
                    last: crate::engine::plan::pace::Last { ended: now, took },
                };
                planner.searched(finished);
            }
            Step::Wait(wait) => planner.waited(now, wait.what, true, true),
            _ => {}
        }
    }
    steps
}

/// The planner sees values: whatever senders and settlers have done since, a view leads to the same step.
#[test]
fn recorded_views_lead_to_the_same_steps_when_they_are_played_again() {
    let history = History {
        has_endpoints: true,
        ..History::of(1)
    };
    let slots = [OnceCell::new()];
    let stage = Stage::new(&history, None, &slots, false);
    stage.set_clocks(Duration::ZERO);
    let process = Process::new(&stage, 0, 0, &slots[0]);
    let (shared, registered) = (process.shared, process.served());
    stage.tables.borrow_mut().put(REGISTERED[1], true, 0);
    let changes = (stage.tables.borrow()).registered_since(&registered.registry(), &[], false, 0);
    let all = shared.bulkheads.last().expect("the threads");
    registered.change(changes.expect("changes"), all);
    let pool = registered.pool();
    let (id, member) = pool.iter().next().expect("one destination");
    let (to, lease) = (To::Member(*id), LeaseId(1));
    let doors = shared.bulkheads.iter().map(|_| Door {
        room: 100,
        is_open: true,
        opens_at: None,
    });
    let doors: Vec<Door> = doors.collect();
    let claim = |number| Claim {
        sequence: i64::try_from(number).expect("a small number"),
        at: 0,
    };
    let mut views: Vec<View> = Vec::new();
    let began = clock::now();
    let prefetched = || shared.prefetched([to].into_iter());
    let live = play(shared, began, |number| {
        // Sends get slower and faster, and messages come and go.
        (member.bulkhead).learn(Duration::from_millis(1 + (number * 37) % 400));
        match number % 3 {
            0 => (shared.custody).began(lease, [(claim(number), to)].into_iter()),
            1 => (shared.custody).settled(
                lease,
                [(claim(number - 1), to)].into_iter(),
                &prefetched(),
            ),
            _ => {}
        }
        views.push(View {
            custody: shared.custody.seen(),
            lease: Some(lease),
            may_send: true,
            doors: doors.clone(),
            rooms: shared.rooms(),
            room_to_split: 10,
            room_of_feeds: 10,
            is_queue_full: false,
            left_to_claim: None,
        });
        views[views.len() - 1].clone()
    });
    for _ in 0..100 {
        member.bulkhead.learn(Duration::from_secs(10));
    }
    let many = (0..30).map(|number| (claim(1000 + number), to));
    shared.custody.began(lease, many);
    let mut recorded = views.iter().cloned();
    let again = play(shared, began, |_| recorded.next().expect("a view"));
    assert_eq!(live, again);
    assert!(
        live.iter().any(|step| step.starts_with("Claim")),
        "{live:?}"
    );
    let rooms: BTreeSet<usize> = views.iter().map(|view| view.rooms.of(*id)).collect();
    assert!(rooms.len() > 1, "the room has changed: {rooms:?}");
}
