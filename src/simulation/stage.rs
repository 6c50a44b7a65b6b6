//! The stage: the time, the order of events, the server and the notifications.
//!
//! Everything runs in one thread. Events that happen during a statement are played inside that statement. So of two
//! overlapping statements, the later one ends first. A transaction can end after a later one only if its client has
//! given up ([`Trouble::Hangs`]).

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant, SystemTime};

use fastrand::Rng;
use uuid::Uuid;

use super::broken::Broken;
use super::feeds::Reader;
use super::history::{
    Act, BAD, Event, HANDLED, History, Item, LENGTH, Mood, NAMESAKE, New, QUIET, REGISTERED,
    SEND_TIMEOUT,
};
use super::process::{Actor, Process, Send, Slot, of};
use super::promises::{Fall, Promise};
use super::tables::{Changes, Entry, Now, Row, Tables, goes_to, micros};
use super::wants;
use crate::clock::simulated;
use crate::config::Verification;
use crate::engine::claim::sql::namesakes::OF_ROUTE;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::settle::settlement::Settlement;
use crate::engine::settle::written::Settle;
use crate::hand::Hand;
use crate::operate::sql::why::WaitReason;

/// The time at which a history begins: the clocks do not start at 0.
const BEGIN: Duration = Duration::from_secs(100);
/// The start of the database's clock.
const EPOCH: i64 = 1_800_000_000_000_000;
/// While others are in flight for long, a message is settled within this time, beside the time that the server is away.
/// Settles of messages that a person has locked come before it.
const BESIDE_OTHERS: Duration = Duration::from_secs(2);
const BESIDE_LOCKS: Duration = Duration::from_secs(4);
/// When all messages must have ended. A key of hundreds of messages moves about once a second where statements are slow.
const END: Duration = Duration::from_secs(300);
/// A commit with `synchronous_commit = off` is on disk after this time: three times the default of `wal_writer_delay`.
const LONGEST_UNWRITTEN: Duration = Duration::from_millis(600);
/// How often the promises about time are checked.
const TICK: Duration = Duration::from_millis(25);
/// The time until a claim is on disk.
const FLUSH: Duration = Duration::from_millis(600);
/// How often missing leases are queried. A relay does so once an hour.
const JANITOR: Duration = Duration::from_secs(20);
/// How often a relay looks which endpoints are not verified, and how long a try may take in all.
const LOOK: Duration = Duration::from_secs(1);
const LONGEST_TRY: Duration = Duration::from_secs(5);
/// How often a registration looks whether its feed is still held.
const WHILE_HELD: Duration = Duration::from_millis(1);
/// The longest shutdown of a relay.
const SHUTDOWN: Duration = Duration::from_secs(10);
/// The time limit of a claim.
pub(super) const CLAIM_LIMIT: Duration = Duration::from_secs(3);
/// The most processes of one history.
pub(super) const MOST_PROCESSES: usize = 40;
/// A due message that has room is claimed within this time. If no notification announces that the message has become
/// due, the poll interval is added.
const LATE: Duration = Duration::from_millis(1100);
/// The same for a message whose commit is announced.
const SOON: Duration = Duration::from_millis(600);
/// A claimed message is settled within this time. Several settles in a row may wait for rows that a person has locked.
const HELD: Duration = Duration::from_millis(2_500);
/// The same of a broken variant, which may be slow: it is to be found for what it breaks.
const HELD_IF_BROKEN: Duration = Duration::from_secs(4);
/// A message is fanned out to at most this many destinations.
const MOST_PARTS: usize = 4;
/// The most statements of one process in a second.
const MOST_STATEMENTS: u32 = 4000;
/// The same after two seconds with an empty outbox.
const MOST_IDLE_STATEMENTS: u32 = 100;
const IDLE: Duration = Duration::from_secs(2);
/// Of two endpoints with waiting messages, one may have had this much more time of the threads, for each
/// relay: a send takes up to 20 ms, and four may be in flight.
const MOST_AHEAD: Duration = Duration::from_millis(120);
/// While other destinations hang, the first message to an endpoint is sent within this time.
const BESIDE_HANGING: Duration = Duration::from_secs(6);
/// The most turns of a claimer in which no time passes.
pub(super) const MOST_TURNS: u32 = 2000;

/// What happens to a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    None,
    /// The statement never reaches the server.
    LostBefore,
    /// The statement succeeds, and its answer is lost.
    LostAfter,
    /// The client gives up, and the server continues for this long.
    Hangs(Duration),
    TimesOut(Duration),
    Refused,
}

/// A scheduled event.
#[derive(Debug)]
enum Happens {
    Item(usize),
    /// A producer's transaction ends.
    End(usize),
    Notify(usize),
    SendEnds(u64),
    HungEnds(i32),
    SessionEnds(i32),
    Recover(usize),
    Start(usize),
    /// The time for an orderly shutdown has ended.
    GiveUp(usize),
    /// A process that gets new settings wakes up.
    Reload(usize),
    /// The application's question is asked again, because a reload has replaced the relay.
    Ask(usize),
    Resume(String, String),
    Well(&'static str, u32),
    Accept(&'static str),
    /// The server is there again.
    Back(u64),
    /// A person unlocks the rows.
    Unlock(Vec<i64>),
    /// An endpoint is registered again, enabled.
    Put(&'static str),
    Janitor(usize),
    /// The process asks the endpoints that are not verified whether they want messages.
    Verify(usize),
    /// An endpoint is given to the other tenant.
    Give(&'static str),
    /// A reader of a feed reads a page.
    Read(usize),
    /// Old events of feeds are emptied.
    Empty,
    /// One has answered: its name and stamp, and whether it wants messages.
    Answers(usize, (&'static str, i64), bool),
    Calm,
    Tick,
}

/// A producer's transaction.
struct Transaction {
    /// The transaction number.
    writer: i64,
    server: u64,
    rows: Vec<Row>,
    commits: bool,
    /// A relay slept at the time of the insert.
    notifies: bool,
    /// When it began, if it registers a destination.
    registers: Option<i64>,
}

/// The true history of a message, even if the database has forgotten it.
#[derive(Debug, Clone, Default)]
pub(super) struct Truth {
    pub(super) fails: u32,
    /// Whether the receiver refuses the message.
    pub(super) is_refused: bool,
    /// When the transaction began, by the server's clock, and whether it registers a destination.
    began: i64,
    registers: bool,
    pub(super) delay: Duration,
    pub(super) committed: Option<Duration>,
    /// Successful and failed sends, by destination.
    pub(super) well: BTreeMap<String, u32>,
    pub(super) failed: BTreeMap<String, u32>,
    pub(super) taken_over: BTreeMap<String, u32>,
    /// How often an operator has requeued or replayed the message, by destination.
    pub(super) again: BTreeMap<String, u32>,
    pub(super) is_cancelled: bool,
    /// The registrations to which the message was sent while it named no destination.
    pub(super) addressed: BTreeSet<Uuid>,
    /// The headers and the time of the first send.
    pub(super) first: Option<(Option<String>, SystemTime)>,
}

/// What receivers have had of messages with keys.
#[derive(Debug, Default)]
pub(super) struct Received {
    /// The place and the sequence of the last message of each key at each destination.
    pub(super) last: BTreeMap<(&'static str, String), (i64, i64)>,
    /// The message before each message in its last run.
    pub(super) before: BTreeMap<i64, Option<i64>>,
}

/// A claim that is not on disk yet, with the row before and after.
struct Unflushed {
    at: Duration,
    before: Row,
    after: Row,
}

pub(super) struct Stage<'w> {
    pub(super) broken: Option<Broken>,
    pub(super) history: &'w History,
    rng: RefCell<Rng>,
    origin: Instant,
    now: Cell<Duration>,
    pub(super) tables: RefCell<Tables>,
    server: Cell<u64>,
    /// The number of the server after its last start.
    started: Cell<u64>,
    /// When the transaction that registers a destination has committed.
    registered_at: Cell<Option<i64>>,
    is_down: Cell<bool>,
    skew: Cell<i64>,
    unflushed: RefCell<Vec<Unflushed>>,
    /// Past states of the tables, which a standby may have.
    past: RefCell<VecDeque<(Duration, Tables)>>,
    hung: RefCell<BTreeMap<i32, (u64, Changes)>>,
    /// Processes of the server that were ended at work.
    ended: RefCell<BTreeSet<i32>>,
    /// How often the database was set back to an earlier state.
    pub(super) set_back: Cell<u32>,
    /// The tables without the last commits that are not on disk ([`Broken::StoresUnwritten`]).
    unwritten: RefCell<Option<(Duration, Tables)>>,
    pub(super) readers: RefCell<Vec<Reader>>,
    /// The process that each of the server's processes serves.
    backends: RefCell<Vec<usize>>,
    /// What happens, by its time and in the order in which it was queued.
    queue: RefCell<BTreeMap<(Duration, u64), Happens>>,
    order: Cell<u64>,
    slots: &'w [OnceCell<Slot>],
    /// [`Stage::strike`] drops them: they refer to the stage, and must not be dropped with it.
    pub(super) processes: ManuallyDrop<RefCell<Vec<Process<'w>>>>,
    transactions: RefCell<Vec<Transaction>>,
    pub(super) messages: RefCell<Vec<Truth>>,
    pub(super) received: RefCell<Received>,
    pub(super) moods: RefCell<BTreeMap<&'static str, (Mood, u32)>>,
    refused: RefCell<BTreeSet<&'static str>>,
    /// The process whose listener has the lock that makes inserts notify.
    pub(super) listener: Cell<Option<usize>>,
    pub(super) inserting: Cell<usize>,
    pub(super) sends: RefCell<BTreeMap<u64, Send>>,
    send_count: Cell<u64>,
    waits_since: RefCell<BTreeMap<i64, Duration>>,
    /// Sends to endpoints that have more messages waiting.
    sends_while_busy: RefCell<BTreeMap<&'static str, Duration>>,
    /// When the outbox last had messages, or an insert was in progress.
    busy_at: Cell<Duration>,
    /// When the server was last back.
    back_at: Cell<Duration>,
    /// When a person last unlocked rows.
    unlocked_at: Cell<Duration>,
    has_ended: Cell<bool>,
    pub(super) fall: RefCell<Option<Fall>>,
    pub(super) story: RefCell<Option<Vec<String>>>,
    pub(super) poll: Duration,
}

impl<'w> Stage<'w> {
    pub(super) fn new(
        history: &'w History,
        broken: Option<Broken>,
        slots: &'w [OnceCell<Slot>],
        tells: bool,
    ) -> Self {
        let mut rng = Rng::with_seed(history.seed ^ 0x9e37_79b9_7f4a_7c15);
        let poll = Duration::from_millis([500, 10_000][rng.usize(..2)]);
        Self {
            broken,
            history,
            rng: RefCell::new(rng),
            origin: Instant::now(),
            now: Cell::new(BEGIN),
            tables: RefCell::new(Tables {
                looked_at: history.is_crowded.then_some(1),
                broken,
                has_tenants: history.has_tenants,
                has_filters: history.has_filters,
                feed_names: history.feeds,
                verification: history.verification,
                key_run: history.key_run.max(1),
                // The first relay has run before.
                served: [wants::ROUTED, HANDLED]
                    .into_iter()
                    .filter(|_| history.settings_differ)
                    .map(str::to_owned)
                    .collect(),
                ..Tables::default()
            }),
            server: Cell::new(1),
            started: Cell::new(1),
            registered_at: Cell::new(None),
            is_down: Cell::new(false),
            skew: Cell::new(0),
            unflushed: RefCell::default(),
            past: RefCell::default(),
            hung: RefCell::default(),
            ended: RefCell::default(),
            set_back: Cell::new(0),
            unwritten: RefCell::default(),
            readers: RefCell::new(Reader::of(history.feeds)),
            backends: RefCell::default(),
            queue: RefCell::default(),
            order: Cell::new(0),
            slots,
            processes: ManuallyDrop::new(RefCell::default()),
            transactions: RefCell::default(),
            messages: RefCell::default(),
            received: RefCell::default(),
            moods: RefCell::default(),
            refused: RefCell::default(),
            listener: Cell::new(None),
            inserting: Cell::new(0),
            sends: RefCell::default(),
            send_count: Cell::new(0),
            waits_since: RefCell::default(),
            sends_while_busy: RefCell::default(),
            busy_at: Cell::new(BEGIN),
            back_at: Cell::new(BEGIN),
            unlocked_at: Cell::new(BEGIN),
            has_ended: Cell::new(false),
            fall: RefCell::default(),
            story: RefCell::new(tells.then(Vec::new)),
            poll,
        }
    }

    /// Plays the history.
    pub(super) fn play(&'w self) -> Option<Fall> {
        let begin = self.now.get();
        fastrand::seed(self.history.seed);
        if self.history.has_endpoints {
            let mut tables = self.tables.borrow_mut();
            let names = match self.history.has_crowd {
                true => [&REGISTERED[..], &BAD, &[QUIET]].concat(),
                false if self.history.registers.is_some() => REGISTERED[..1].to_vec(),
                false => REGISTERED[..2].to_vec(),
            };
            names.into_iter().for_each(|name| tables.put(name, true, 0));
        }
        for relay in 0..self.history.relays {
            self.start(relay);
        }
        for (number, item) in self.history.items.iter().enumerate() {
            self.at(begin + item.at, Happens::Item(number));
        }
        let readers = self.readers.borrow().len();
        for reader in 0..readers {
            self.at(begin, Happens::Read(reader));
        }
        if !self.history.feeds.is_empty() {
            self.at(begin, Happens::Empty);
        }
        self.at(begin + LENGTH, Happens::Calm);
        self.at(begin + TICK, Happens::Tick);
        while !self.has_ended.get() && self.fall.borrow().is_none() {
            self.run_until(self.now.get() + Duration::from_secs(1));
            if self.now.get() > begin + END {
                self.check_end();
                break;
            }
        }
        self.strike();
        self.fall.borrow_mut().take()
    }

    /// Drops everything that refers to the stage.
    fn strike(&self) {
        drop(std::mem::take(&mut *self.sends.borrow_mut()));
        drop(std::mem::take(&mut *self.processes.borrow_mut()));
        simulated::set(None);
    }

    pub(super) fn tell(&self, what: impl FnOnce() -> String) {
        if let Some(story) = &mut *self.story.borrow_mut() {
            story.push(format!("{:>10.3} ms  {}", self.millis(), what()));
        }
    }

    fn millis(&self) -> f64 {
        (self.now.get() - BEGIN).as_secs_f64() * 1e3
    }

    pub(super) fn fall(&self, promise: Promise, what: impl FnOnce() -> String) {
        let mut fall = self.fall.borrow_mut();
        if fall.is_none() {
            *fall = Some(Fall {
                promise,
                at: self.now.get() - BEGIN,
                what: what(),
            });
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.now.get()
    }

    /// The database's time at this moment, with the steps so far.
    pub(super) fn in_database(&self, at: Duration) -> i64 {
        EPOCH + micros(at) + self.skew.get()
    }

    pub(super) fn database_now(&self) -> Now {
        Now {
            micros: self.in_database(self.now.get()),
            here: crate::clock::now(),
        }
    }

    /// Switches to a process and its clocks.
    pub(super) fn enter(&self, process: usize) {
        let lost = self.processes.borrow()[process].lost;
        self.set_clocks(lost);
    }

    pub(super) fn set_clocks(&self, lost: Duration) {
        let awake = self.now.get().saturating_sub(lost);
        let since_boot = match self.broken {
            Some(Broken::MeasuresByTheWrongClock) => awake,
            _ => self.now.get(),
        };
        simulated::set(Some((self.origin + awake, since_boot)));
    }

    /// Converts a time of a process to the stage's clock.
    pub(super) fn when(&self, process: &Process<'_>, at: Instant) -> Duration {
        at.saturating_duration_since(self.origin) + process.lost
    }

    pub(super) fn rng<T>(&self, dice: impl FnOnce(&mut Rng) -> T) -> T {
        dice(&mut self.rng.borrow_mut())
    }

    /// A random time from `from` to `to` milliseconds.
    pub(super) fn dice(&self, from: u64, to: u64) -> Duration {
        Duration::from_micros(self.rng(|rng| rng.u64(from * 1000..=to * 1000)))
    }

    /// How long a part of a statement takes.
    pub(super) fn way(&self) -> Duration {
        let slow = self.history.slow;
        let is_slow = slow > 0 && self.rng(|rng| rng.u32(..slow)) == 0;
        match is_slow {
            true => self.dice(1, 400),
            false => Duration::from_micros(self.rng(|rng| rng.u64(100..1500))),
        }
    }

    pub(super) fn has_dead_entries(&self) -> bool {
        self.history.has_dead_entries
    }

    pub(super) fn trouble(&self, process: usize) -> Trouble {
        let troubles = self.history.troubles;
        if troubles == 0 || self.is_calm_now() || self.rng(|rng| rng.u32(..troubles)) > 0 {
            return Trouble::None;
        }
        let trouble = match self.rng(|rng| rng.u8(..4)) {
            0 => Trouble::LostBefore,
            1 => Trouble::LostAfter,
            2 => Trouble::Hangs(self.dice(1, 3000)),
            _ => Trouble::TimesOut(CLAIM_LIMIT),
        };
        self.tell(|| format!("process {process}: {trouble:?}"));
        trouble
    }

    pub(super) fn is_calm_now(&self) -> bool {
        self.now.get() >= BEGIN + LENGTH
    }

    pub(super) fn is_strict_relay(&self, process: usize) -> bool {
        self.history
            .is_strict(self.processes.borrow()[process].relay)
    }

    /// Whether the next start of this relay has the route for the topic `d`, and the handlers.
    pub(super) fn has_route_next(&self, relay: usize) -> bool {
        let processes = self.processes.borrow();
        let starts = processes.iter().filter(|one| one.relay == relay).count();
        let is_first = self.history.settings_differ && relay == 0;
        is_first && (starts.is_multiple_of(2) || self.is_calm_now())
    }

    pub(super) fn next_backend(&self, process: usize) -> i32 {
        let mut backends = self.backends.borrow_mut();
        backends.push(process);
        i32::try_from(backends.len() - 1).expect("a short history")
    }

    /// The server learns at once that this process's connections are gone.
    fn all_sessions_end(&self, process: usize) {
        let backends = self.backends.borrow();
        let is_its = |backend: i32| {
            let of = usize::try_from(backend)
                .ok()
                .and_then(|backend| backends.get(backend));
            of == Some(&process)
        };
        self.tables.borrow_mut().unlock_leases(is_its);
    }

    /// The server, if this thread of the process reaches it.
    pub(super) fn server(&self, process: usize, thread: Actor) -> Option<u64> {
        let is_out = self.is_down.get() || self.is_cut_off(process, thread);
        (!is_out).then(|| self.server.get())
    }

    /// Tells servers apart, but not a crash of one server process, after which the server continues.
    pub(super) fn start_of_server(&self) -> i64 {
        self.started.get().cast_signed()
    }

    pub(super) fn is_server(&self, server: Option<u64>) -> bool {
        !self.is_down.get() && server == Some(self.server.get())
    }

    pub(super) fn is_cut_off(&self, process: usize, thread: Actor) -> bool {
        let processes = self.processes.borrow();
        let process = &processes[process];
        let is_stuck = thread == Actor::Heartbeat && process.stuck_until > self.now.get();
        process.is_dead || is_stuck || process.cut_off_until > self.now.get()
    }

    /// Whether the server has ended this process of its at work.
    pub(super) fn was_ended(&self, backend: i32) -> bool {
        self.ended.borrow_mut().remove(&backend)
    }

    /// The server, if it is there.
    pub(super) fn reached(&self) -> Option<u64> {
        (!self.is_down.get()).then(|| self.server.get())
    }

    pub(super) fn is_at_work(&self, backend: i32) -> bool {
        self.hung.borrow().contains_key(&backend)
    }

    /// A process ends that is asked to, unless it is just committing.
    pub(super) fn ask_to_end(&self, backend: i32) {
        let is_committing = self.rng(Rng::bool);
        let ended = (!is_committing).then(|| self.hung.borrow_mut().remove(&backend));
        if let Some((server, changes)) = ended.flatten()
            && server == self.server.get()
        {
            self.ended.borrow_mut().insert(backend);
            self.tables.borrow_mut().unlock(&changes);
        }
    }

    pub(super) fn refuses(&self, settle: &Settle<'_>) -> bool {
        let refused = self.refused.borrow();
        settle
            .group
            .iter()
            .flat_map(Settlement::each)
            .any(|one| refused.contains(&*one.topic().topic))
    }

    pub(super) fn count_statement(&self, process: usize) {
        let second = self.now.get().as_secs();
        let mut processes = self.processes.borrow_mut();
        let process = &mut processes[process];
        if process.statements.0 != second {
            process.statements = (second, 0);
        }
        process.statements.1 += 1;
        let count = process.statements.1;
        drop(processes);
        let is_idle = self.now.get() >= self.busy_at.get() + IDLE + Duration::from_secs(1);
        let most = match is_idle && self.history.is_calm() {
            true => MOST_IDLE_STATEMENTS,
            false => MOST_STATEMENTS,
        };
        if count > most {
            self.fall(Promise::Busy, || format!("{count} statements in a second"));
        }
    }

    pub(super) fn commit(&self, changes: Changes) {
        if let Some((sequence, told)) = changes.misled.first().filter(|_| self.is_strict()) {
            self.fall(Promise::Reasons, || {
                format!("{sequence} is claimed, but operators are told: {told}")
            });
        }
        self.note_claims(&changes);
        self.check_events(&changes);
        if self.broken == Some(Broken::StoresUnwritten) {
            self.leave_unwritten(&changes);
        }
        if self.is_strict() {
            self.check_delivered(&changes);
            self.check_takeovers(&changes);
            self.check_claims(&changes);
            self.check_parts(&changes);
        }
        let mut tables = self.tables.borrow_mut();
        tables.unlock(&changes);
        tables.change(&changes);
        drop(tables);
        if self.is_strict() {
            self.check_alone(&changes);
            self.check_attempts(&changes);
        }
    }

    /// Keeps the tables without a commit of events, as a crash leaves them. Another commit writes those before it.
    fn leave_unwritten(&self, changes: &Changes) {
        let mut unwritten = self.unwritten.borrow_mut();
        let since = self.now.get().saturating_sub(FLUSH);
        *unwritten = (unwritten.take()).filter(|(at, _)| changes.is_only_claim || *at >= since);
        match changes.events.is_empty() {
            true if !changes.is_only_claim => *unwritten = None,
            true => {}
            false => {
                let tables = || (self.now.get(), self.tables.borrow().clone());
                unwritten.get_or_insert_with(tables);
            }
        }
    }

    /// Checks that relays leave the messages for other destinations of the same name to others. A settler may continue a key
    /// while the claimer reads the destinations.
    fn check_claims(&self, changes: &Changes) {
        let (tables, processes) = (self.tables.borrow(), self.processes.borrow());
        let rows = changes.rows.values().flatten();
        for row in rows.filter(|row| row.ordering_key.is_none()) {
            let before = tables.rows.get(&row.sequence);
            let claimed = row
                .held
                .filter(|_| before.is_some_and(|one| one.held != row.held));
            let lease = claimed.map(|held| LeaseId(held.lease));
            let by = |one: &&Process<'_>| lease.is_some() && one.shared.lease.current() == lease;
            if processes.iter().find(by).is_some_and(|one| one.leaves(row)) {
                self.fall(Promise::Others, || {
                    format!("{row:?} is claimed by a relay that does not serve it")
                });
            }
        }
    }

    /// Checks that messages are not addressed to a destination that skips them until it is verified. After a takeover, a
    /// message may have been addressed before.
    fn check_parts(&self, changes: &Changes) {
        let (tables, messages) = (self.tables.borrow(), self.messages.borrow());
        let rows = changes.rows.values().flatten();
        let is_new = |row: &&Row| !tables.rows.contains_key(&row.sequence);
        for row in rows.filter(is_new) {
            let to = tables.registered.get(&*row.destination);
            let skips = to.is_some_and(|to| {
                let is_to = row.registration == Some(to.id);
                is_to && !to.is_verified && tables.verification.skips()
            });
            if skips && messages[row.id].taken_over.is_empty() {
                self.fall(Promise::Recipients, || {
                    format!("{row:?} is for a destination that is not verified")
                });
            }
        }
    }

    /// Checks that no message is retried because of its first takeover, without a send.
    fn check_takeovers(&self, changes: &Changes) {
        let tables = self.tables.borrow();
        for row in changes.rows.values().flatten() {
            let before = tables.rows.get(&row.sequence);
            let was_once = before.is_some_and(|one| one.held.is_some() && !one.is_abandoned);
            if was_once && row.is_abandoned && row.held.is_none() {
                self.fall(Promise::Takeover, || format!("{row:?} waits unsent"));
            }
        }
    }

    /// Checks that dead letters have no more attempts than they had failed sends and takeovers.
    fn check_attempts(&self, changes: &Changes) {
        let messages = self.messages.borrow();
        for entry in changes.ledger.iter().filter(|one| !one.is_delivered) {
            let (row, truth) = (&entry.row, &messages[entry.row.id]);
            let most =
                of(&truth.failed, &row.destination) + of(&truth.taken_over, &row.destination);
            if row.attempts.unsigned_abs() > most {
                self.fall(Promise::Attempts, || {
                    format!("{entry:?} has more attempts than the {most} that were made")
                });
            }
        }
    }

    /// Checks that of messages that exclude one another, only one is held.
    fn check_alone(&self, changes: &Changes) {
        let now = self.database_now().micros;
        let tables = self.tables.borrow();
        let held = |row: &&Row| {
            row.held
                .is_some_and(|held| tables.is_there(held.lease, now))
        };
        for row in changes.rows.values().flatten().filter(held) {
            let mut others = tables.rows.values().filter(held);
            // The messages of a run are claimed without a gap.
            let is_of_run = |other: &Row| {
                let (first, last) = (
                    row.place().min(other.place()),
                    row.place().max(other.place()),
                );
                let between = tables
                    .rows
                    .values()
                    .filter(|one| one.key() == row.key() && (first..=last).contains(&one.place()));
                let lease = |row: &Row| row.held.map(|held| held.lease);
                let mut between = between.filter(|one| self.was_seen(one, row));
                self.may_run(row)
                    && other.key() == row.key()
                    && between.all(|one| lease(one) == lease(row))
            };
            let beside = others.find(|other| {
                other.sequence != row.sequence && other.excludes(row) && !is_of_run(other)
            });
            if let Some(other) = beside {
                self.fall(Promise::Order, || {
                    format!("{row:?} is claimed while {other:?} is held")
                });
            }
        }
    }

    /// Whether several messages of a key are claimed at once. Of a feed, as many as there are; a single endpoint gets
    /// messages that name none.
    fn may_run(&self, row: &Row) -> bool {
        let feeds = self.history.feeds;
        let is_for_feed = match &*row.destination {
            "" => !feeds.is_empty(),
            name => feeds.contains(&name),
        };
        self.history.key_run > 1 || is_for_feed
    }

    /// Whether a message was committed before another was claimed.
    fn was_seen(&self, row: &Row, claimed: &Row) -> bool {
        let committed = self.messages.borrow()[row.id].committed;
        let committed = committed.map(|at| self.in_database(at));
        committed
            .zip(claimed.held)
            .is_some_and(|(at, held)| at + 1000 < held.at)
    }

    /// Checks that no message is recorded as delivered while an earlier one of its key is live: after a crash, the earlier
    /// one would be sent again alone.
    fn check_delivered(&self, changes: &Changes) {
        let tables = self.tables.borrow();
        for entry in changes.ledger.iter().filter(|one| one.is_delivered) {
            let row = tables.rows.get(&entry.row.sequence);
            // Others have no subscriber.
            let is_sent = |row: &&Row| !goes_to(row.topic, &row.destination).is_empty();
            let Some(row) = row.filter(is_sent) else {
                continue;
            };
            let mut earlier = tables.rows.values().filter(|other| {
                other.place() < row.place()
                    && other.split_from.is_none()
                    && row.waits_for(other)
                    && self.was_seen(other, row)
                    && !matches!(changes.rows.get(&other.sequence), Some(None))
            });
            if let Some(other) = earlier.next() {
                self.fall(Promise::Repeats, || {
                    format!("{:?} is recorded as delivered before {other:?}", entry.row)
                });
            }
        }
    }

    /// Records the claims that a crash of the server may undo, and the takeovers.
    fn note_claims(&self, changes: &Changes) {
        let tables = self.tables.borrow();
        let mut unflushed = self.unflushed.borrow_mut();
        if !changes.is_only_claim {
            unflushed.clear();
        }
        for (sequence, row) in &changes.rows {
            let (Some(before), Some(after)) = (tables.rows.get(sequence), row) else {
                continue;
            };
            if changes.is_only_claim {
                unflushed.push(Unflushed {
                    at: self.now.get(),
                    before: before.clone(),
                    after: after.clone(),
                });
            }
            // The claim counts the takeover, or the settle that follows.
            if before.held.is_some() && after.held.is_some() {
                let mut messages = self.messages.borrow_mut();
                let of = messages[after.id]
                    .taken_over
                    .entry(after.destination.clone());
                *of.or_default() += 1;
            }
            if let (Some(was), Some(is)) = (before.held, after.held) {
                self.tell(|| {
                    format!(
                        "{} {sequence}: taken over from {was:?} by {is:?}",
                        after.topic
                    )
                });
            }
        }
    }

    pub(super) fn commit_later(&self, changes: Changes, backend: i32, time: Duration) {
        self.hung
            .borrow_mut()
            .insert(backend, (self.server.get(), changes));
        self.after(time, Happens::HungEnds(backend));
    }

    /// The client of a session is gone, and the server learns so at once or later.
    pub(super) fn session_ends(&self, backend: i32) {
        let time = match self.rng(|rng| rng.u8(..4)) {
            0 => self.dice(1, 20_000),
            _ => Duration::ZERO,
        };
        self.after(time, Happens::SessionEnds(backend));
    }

    fn after(&self, time: Duration, what: Happens) {
        self.at(self.now.get() + time, what);
    }

    fn at(&self, at: Duration, what: Happens) {
        self.order.set(self.order.get() + 1);
        let order = self.order.get();
        self.queue.borrow_mut().insert((at, order), what);
    }

    /// Lets time pass for a reader.
    pub(super) fn pass_by(&'w self, time: Duration) {
        self.run_until(self.now.get() + time);
    }

    /// Lets time pass for a process that waits. Others continue meanwhile.
    pub(super) fn pass(&'w self, process: usize, time: Duration) {
        if !time.is_zero() {
            self.run_until(self.now.get() + time);
        }
        loop {
            let until = self.processes.borrow()[process].frozen_until;
            if until <= self.now.get() || self.fall.borrow().is_some() {
                break;
            }
            self.run_until(until);
        }
        self.enter(process);
    }

    fn run_until(&'w self, until: Duration) {
        while self.fall.borrow().is_none() && !self.has_ended.get() {
            let (actor, at) = self.next_actor();
            let next = (self.queue.borrow().first_key_value()).map(|((at, _), _)| *at);
            let is_actors_turn = match (actor, next) {
                (Some(_), Some(next)) => at <= next,
                (actor, _) => actor.is_some(),
            };
            let at = if is_actors_turn {
                at
            } else {
                next.unwrap_or(until)
            };
            if at > until {
                break;
            }
            self.now.set(self.now.get().max(at));
            match actor.filter(|_| is_actors_turn) {
                Some((process, actor)) => self.act(process, actor),
                None => {
                    let next = self.queue.borrow_mut().pop_first();
                    if let Some((_, what)) = next {
                        self.happens(what);
                    }
                }
            }
        }
        self.now.set(self.now.get().max(until));
    }

    /// The next actor, and when it acts. A ready actor takes a moment to start.
    fn next_actor(&self) -> (Option<(usize, Actor)>, Duration) {
        let now = self.now.get();
        let mut first = (None, Duration::MAX);
        let mut processes = self.processes.borrow_mut();
        for (number, process) in processes.iter_mut().enumerate() {
            if process.is_dead {
                continue;
            }
            process.pass_on_entries(self.broken);
            for actor in process.actors() {
                let Some(due) = process.due(self, actor) else {
                    process.scheduled.remove(&actor);
                    continue;
                };
                let at = if due <= now {
                    *process.scheduled.entry(actor).or_insert_with(|| {
                        let micros = self.rng(|rng| match rng.u8(..60) {
                            0 => rng.u64(1000..20_000),
                            _ => rng.u64(1..200),
                        });
                        now + Duration::from_micros(micros)
                    })
                } else {
                    process.scheduled.remove(&actor);
                    due
                };
                let at = at.max(process.frozen_until);
                if at < first.1 {
                    first = (Some((number, actor)), at);
                }
            }
        }
        first
    }

    fn act(&'w self, process: usize, actor: Actor) {
        let is_scheduled = {
            let mut processes = self.processes.borrow_mut();
            processes[process].scheduled.remove(&actor).is_some()
        };
        if is_scheduled {
            self.enter(process);
            self.run(process, actor);
        }
    }

    fn start(&'w self, relay: usize) {
        self.start_in(relay, None);
    }

    /// Starts a relay in a new process, or in the process of the relay that the new relay replaces.
    fn start_in(&'w self, relay: usize, replaced: Option<usize>) -> Option<usize> {
        let number = self.processes.borrow().len();
        let slot = self.slots.get(number)?;
        // The new process needs clocks before it exists.
        match replaced {
            Some(old) => self.enter(old),
            None => self.set_clocks(Duration::ZERO),
        }
        let mut process = Process::new(self, number, relay, slot);
        if let Some(old) = replaced {
            process.begin_beside(&self.processes.borrow()[old]);
        }
        self.processes.borrow_mut().push(process);
        self.after(self.dice(1, 500), Happens::Janitor(number));
        if self.history.verification != Verification::None {
            self.after(self.dice(1, 4000), Happens::Verify(number));
        }
        self.tell(|| format!("process {number} starts, for relay {relay}"));
        Some(number)
    }

    /// Gives a process new settings. As in the program, the new relay registers its lease before the old relay stops.
    fn reload(&'w self, relay: usize) {
        let Some(old) = self.process_of(relay) else {
            return;
        };
        let frozen_until = self.processes.borrow()[old].frozen_until;
        if frozen_until > self.now.get() {
            return self.at(frozen_until, Happens::Reload(relay));
        }
        // Without a database, the new relay does not start, and the old relay continues.
        if self.server(old, Actor::Claimer).is_none() {
            return;
        }
        let Some(new) = self.start_in(relay, Some(old)) else {
            return;
        };
        let (registration, replaced) = {
            let processes = self.processes.borrow();
            (processes[new].registration(), processes[old].shared)
        };
        let before = replaced.lease.current();
        let lease = match before.filter(|_| self.broken == Some(Broken::ReloadsInPlace)) {
            Some(before) => before,
            None => {
                let now = self.database_now().micros;
                let lease = self.tables.borrow_mut().register(&registration, now);
                self.commit(Changes::default());
                lease
            }
        };
        self.processes.borrow_mut()[new].hold(self, new, lease);
        match (self.broken, before) {
            (Some(Broken::ReloadsInPlace), _) => return self.relay_ends(old, true),
            (Some(Broken::ReloadsAtOnce), Some(before)) => {
                self.tables.borrow_mut().leases.remove(&before.0);
            }
            _ => {}
        }
        replaced.begin_stop();
        self.after(SHUTDOWN, Happens::GiveUp(old));
        let question = self.processes.borrow_mut()[old].question.take();
        if question.is_some() {
            self.ask(relay);
        }
    }

    /// The application asks whether nothing is due. After a reload, the question waits for the end of the old relay.
    fn ask(&self, relay: usize) {
        let Some(number) = self.process_of(relay) else {
            return;
        };
        let is_alive = |number: &usize| !self.processes.borrow()[*number].is_dead;
        if self
            .relays_of(number)
            .iter()
            .filter(|one| is_alive(one))
            .count()
            > 1
        {
            return self.after(TICK, Happens::Ask(relay));
        }
        self.enter(number);
        self.processes.borrow_mut()[number].ask(self.now.get());
    }

    /// The live process of a relay.
    fn process_of(&self, relay: usize) -> Option<usize> {
        let processes = self.processes.borrow();
        let is_it =
            |one: &Process<'_>| one.relay == relay && !one.is_dead && !one.shared.is_stopping();
        processes.iter().rposition(is_it)
    }

    /// The relays of a process: the one that a reload has started last, and those that it has replaced.
    fn relays_of(&self, number: usize) -> Vec<usize> {
        let processes = self.processes.borrow();
        let host = processes[number].host;
        let beside = processes
            .iter()
            .zip(0..)
            .filter(|(one, _)| one.host == host);
        beside.map(|(_, number)| number).collect()
    }

    /// The relays of the live process of a relay.
    fn all_of(&self, relay: usize) -> Vec<usize> {
        let number = self.process_of(relay);
        number
            .map(|number| self.relays_of(number))
            .unwrap_or_default()
    }

    fn happens(&'w self, what: Happens) {
        match what {
            Happens::Item(number) => self.happens_to_all(&self.history.items[number].event),
            Happens::End(transaction) => self.end(transaction),
            Happens::Notify(process) => {
                let processes = self.processes.borrow();
                let process = &processes[process];
                let is_heard = !process.is_dead
                    && process.deaf_until <= self.now.get()
                    && self.broken != Some(Broken::LosesNews);
                if is_heard {
                    process.notified.set(true);
                }
            }
            Happens::SendEnds(send) => self.send_ends(send),
            Happens::HungEnds(backend) => {
                let hung = self.hung.borrow_mut().remove(&backend);
                if let Some((server, changes)) =
                    hung.filter(|(server, _)| *server == self.server.get())
                {
                    self.tell(|| {
                        format!("server {server}: a hung statement of backend {backend} ends")
                    });
                    self.commit(changes);
                }
            }
            Happens::SessionEnds(backend) => {
                (self.tables.borrow_mut()).unlock_leases(|other| other == backend);
            }
            Happens::Recover(process) => {
                let processes = self.processes.borrow();
                let process = &processes[process];
                if !process.is_dead {
                    process.shared.signals.sleep.interrupt();
                    process.shared.signals.news.ring();
                }
            }
            Happens::Start(relay) => {
                if self.process_of(relay).is_none() {
                    self.start(relay);
                }
            }
            Happens::GiveUp(relay) => self.relay_ends(relay, true),
            Happens::Reload(relay) => self.reload(relay),
            Happens::Ask(relay) => self.ask(relay),
            Happens::Resume(kind, name) => {
                let row = (kind, name, Hand::Operator);
                self.tables.borrow_mut().pauses.remove(&row);
            }
            Happens::Well(destination, since) => {
                let mut moods = self.moods.borrow_mut();
                if moods
                    .get(destination)
                    .is_some_and(|(_, number)| *number == since)
                {
                    moods.remove(destination);
                }
            }
            Happens::Accept(topic) => {
                self.refused.borrow_mut().remove(topic);
            }
            Happens::Back(server) => {
                if server == self.server.get() {
                    self.is_down.set(false);
                    self.back_at.set(self.now.get());
                }
            }
            Happens::Unlock(rows) => {
                let tables = &mut *self.tables.borrow_mut();
                for row in rows {
                    // A server that is gone has dropped the lock, and a statement may have locked the row since.
                    if tables.of_people.remove(&row) {
                        tables.locked.remove(&row);
                    }
                }
                tables.has_locked_pauses = false;
                self.unlocked_at.set(self.now.get());
            }
            Happens::Put(name) if self.waits_for_feed(name) => {
                self.after(WHILE_HELD, Happens::Put(name));
            }
            Happens::Give(name) if self.waits_for_feed(name) => {
                self.after(WHILE_HELD, Happens::Give(name));
            }
            Happens::Give(name) => self.tables.borrow_mut().give(name),
            Happens::Read(number) => {
                let pause = self.read(number);
                self.after(pause, Happens::Read(number));
            }
            Happens::Empty => {
                let all = self.rng(Rng::bool);
                if !self.is_down.get() {
                    self.tables.borrow_mut().empty_events(all);
                }
                self.after(self.dice(100, 3000), Happens::Empty);
            }
            Happens::Put(name) => {
                let now = self.database_now().micros;
                self.tables.borrow_mut().put(name, true, now);
            }
            Happens::Janitor(number) => {
                let vanished = self.tables.borrow().vanished();
                let processes = self.processes.borrow();
                let process = &processes[number];
                if !process.is_dead {
                    process.tell_vanished(vanished);
                    self.after(JANITOR, Happens::Janitor(number));
                }
            }
            Happens::Verify(number) => self.verify(number),
            Happens::Answers(number, of, is_verified) => self.answers(number, of, is_verified),
            Happens::Calm => self.calm_down(),
            Happens::Tick => {
                self.tick();
                self.after(TICK, Happens::Tick);
            }
        }
    }

    /// Whether a transaction holds the row of a feed, which another registration of the name would change.
    fn waits_for_feed(&self, name: &str) -> bool {
        self.tables.borrow().held_feeds.contains(name)
    }

    /// Asks the endpoints that are not verified.
    fn verify(&self, number: usize) {
        let (shared, served, is_dead, frozen_until) = {
            let processes = self.processes.borrow();
            let process = &processes[number];
            (
                process.shared,
                process.served(),
                process.is_dead,
                process.frozen_until,
            )
        };
        if is_dead || shared.is_stopping() {
            return;
        }
        let now = self.now.get();
        self.at(frozen_until.max(now + LOOK), Happens::Verify(number));
        if frozen_until > now || self.server(number, Actor::Claimer).is_none() {
            return;
        }
        let mut unverified = served.registry().unverified.clone();
        unverified.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        for one in unverified {
            let (of, now) = ((&*one.name, one.stamp), self.database_now().micros);
            let until = now + micros(LONGEST_TRY);
            let Some(name) = self.tables.borrow_mut().take_try(of, until, now) else {
                continue;
            };
            let mood = self.moods.borrow().get(name).map(|(mood, _)| *mood);
            let (lasts, is_verified) = match mood.unwrap_or(Mood::Well) {
                Mood::Well => (self.dice(1, 20), true),
                Mood::Slow => (self.dice(200, 1400), true),
                Mood::Failing => (self.dice(1, 10), false),
                Mood::Hanging => (SEND_TIMEOUT, false),
            };
            self.tell(|| format!("process {number} asks {name}: {is_verified} in {lasts:?}"));
            self.after(
                lasts,
                Happens::Answers(number, (name, one.stamp), is_verified),
            );
        }
    }

    /// Records the answer of an endpoint when the process can.
    fn answers(&self, number: usize, of: (&'static str, i64), is_verified: bool) {
        let (is_dead, frozen_until) = {
            let processes = self.processes.borrow();
            (processes[number].is_dead, processes[number].frozen_until)
        };
        let again = || Happens::Answers(number, of, is_verified);
        match self.server(number, Actor::Claimer) {
            _ if is_dead => {}
            _ if frozen_until > self.now.get() => self.at(frozen_until, again()),
            None => self.after(LOOK, again()),
            Some(_) => {
                let now = self.database_now().micros;
                self.tables.borrow_mut().tried(of, is_verified, now);
            }
        }
    }

    fn happens_to_all(&'w self, event: &Event) {
        self.tell(|| format!("{event:?}"));
        let now = self.now.get();
        let of = |relay: usize, change: &dyn Fn(&mut Process<'w>)| {
            for number in self.all_of(relay) {
                change(&mut self.processes.borrow_mut()[number]);
            }
        };
        match event {
            Event::Enqueue {
                messages,
                lasts,
                commits,
            } => self.enqueue(messages, *lasts, *commits),
            Event::Mood(destination, mood, lasts) => {
                let number = u32::try_from(self.order.get()).unwrap_or(0);
                self.moods.borrow_mut().insert(destination, (*mood, number));
                self.after(*lasts, Happens::Well(destination, number));
            }
            Event::Pause(kind, name, lasts) => {
                let now = self.database_now().micros;
                let mut tables = self.tables.borrow_mut();
                tables.pause(kind, name, (Hand::Operator, "OPERATOR"), None, 0, now);
                drop(tables);
                self.after(
                    *lasts,
                    Happens::Resume((*kind).to_owned(), (*name).to_owned()),
                );
            }
            Event::Disable(name, lasts) => {
                let is_there = self.tables.borrow().registered.contains_key(name);
                if is_there {
                    let now = self.database_now().micros;
                    self.tables.borrow_mut().put(name, false, now);
                    self.after(*lasts, Happens::Put(name));
                }
            }
            Event::Remove(name, lasts) => {
                self.tables.borrow_mut().remove(name);
                if let Some(lasts) = lasts {
                    self.after(*lasts, Happens::Put(name));
                }
            }
            Event::Give(name) => self.happens(Happens::Give(name)),
            Event::Lock(from, lasts) => {
                let tables = &mut *self.tables.borrow_mut();
                let free = tables
                    .rows
                    .keys()
                    .filter(|row| !tables.locked.contains(row));
                let rows: Vec<i64> = free.skip(*from).step_by(3).copied().collect();
                tables.locked.extend(&rows);
                tables.of_people.extend(&rows);
                tables.has_locked_pauses = true;
                self.tell(|| format!("locked: {rows:?}"));
                self.after(*lasts, Happens::Unlock(rows));
            }
            Event::Act(act, number) => self.change_by_hand(*act, *number),
            Event::Ask(relay) => self.ask(*relay),
            Event::Kill(relay, until) => {
                if let Some(number) = self.process_of(*relay) {
                    self.die(number);
                    self.after(*until, Happens::Start(*relay));
                }
            }
            Event::Stop(relay, until) => {
                if let Some(number) = self.process_of(*relay) {
                    self.enter(number);
                    let shared = self.processes.borrow()[number].shared;
                    shared.begin_stop();
                    self.after(SHUTDOWN, Happens::GiveUp(number));
                    self.after(*until + Duration::from_secs(2), Happens::Start(*relay));
                }
            }
            Event::Reload(relay) => self.reload(*relay),
            Event::Freeze(relay, lasts) => of(*relay, &|process| {
                process.frozen_until = process.frozen_until.max(now + *lasts);
            }),
            Event::Sleep(relay, lasts) => of(*relay, &|process| {
                let until = now + *lasts;
                process.lost += until.saturating_sub(process.frozen_until.max(now));
                process.frozen_until = process.frozen_until.max(until);
            }),
            Event::CutOff(relay, lasts) => {
                of(*relay, &|process| process.cut_off_until = now + *lasts);
                self.may_break(*relay);
                self.deafen(*relay, *lasts);
            }
            Event::Stuck(relay, lasts) => {
                of(*relay, &|process| process.stuck_until = now + *lasts);
                self.may_break(*relay);
            }
            Event::Deaf(relay, lasts) => self.deafen(*relay, *lasts),
            Event::Restart(lasts) => {
                self.forget_claims();
                self.change_server(*lasts);
                self.started.set(self.server.get());
            }
            Event::FailOver(lag) => {
                let mut past = std::mem::take(&mut *self.past.borrow_mut());
                while past.len() > 1 && past[1].0 + *lag <= now {
                    past.pop_front();
                }
                if let Some((_, tables)) = past.pop_front() {
                    *self.tables.borrow_mut() = tables;
                    self.set_back.set(self.set_back.get() + 1);
                }
                self.change_server(*lag);
                // The server has written what it had committed asynchronously within this time.
                if *lag > LONGEST_UNWRITTEN {
                    self.started.set(self.server.get());
                }
            }
            Event::Step(micros) => self.skew.set(self.skew.get() + micros),
            Event::Refuse(topic, lasts) => {
                self.refused.borrow_mut().insert(topic);
                self.after(*lasts, Happens::Accept(topic));
            }
        }
    }

    /// A process is killed, with all its relays.
    fn die(&self, number: usize) {
        for relay in self.relays_of(number) {
            self.relay_ends(relay, false);
        }
    }

    /// A relay ends. The session of a lease that the relay leaves to expire stays open until the process exits, because
    /// the relay may still be sending.
    pub(super) fn relay_ends(&self, number: usize, leaves_lease: bool) {
        self.processes.borrow_mut()[number].is_dead = true;
        if self.listener.get() == Some(number) {
            self.listener.set(None);
        }
        let relays = self.relays_of(number);
        let is_alive = |number: &usize| !self.processes.borrow()[*number].is_dead;
        if !relays.iter().any(is_alive) {
            return relays
                .into_iter()
                .for_each(|one| self.all_sessions_end(one));
        }
        if !leaves_lease {
            self.all_sessions_end(number);
        }
    }

    /// Either resets the connections of a process, or lets no packet through.
    fn may_break(&self, relay: usize) {
        let relays = self.all_of(relay);
        if !relays.is_empty() && self.rng(Rng::bool) {
            relays
                .into_iter()
                .for_each(|one| self.all_sessions_end(one));
        }
    }

    /// Breaks the listener's connection, which the server notices.
    fn deafen(&self, relay: usize, lasts: Duration) {
        for number in self.all_of(relay) {
            let process = &mut self.processes.borrow_mut()[number];
            process.deaf_until = self.now.get() + lasts;
            process.listening.is_awake = false;
            if self.listener.get() == Some(number) {
                self.listener.set(None);
            }
            self.after(lasts, Happens::Recover(number));
        }
    }

    /// Undoes the claims that were not on disk.
    fn forget_claims(&self) {
        if let Some((_, tables)) = self.unwritten.take() {
            *self.tables.borrow_mut() = tables;
        }
        let mut unflushed = std::mem::take(&mut *self.unflushed.borrow_mut());
        let mut tables = self.tables.borrow_mut();
        let since = self.now.get().saturating_sub(FLUSH);
        while let Some(one) = unflushed.pop() {
            let is_so_still = tables.rows.get(&one.after.sequence) == Some(&one.after);
            if one.at >= since && is_so_still {
                tables.rows.insert(one.before.sequence, one.before);
            }
        }
    }

    /// Breaks all connections; the server is back in a moment.
    fn change_server(&self, lasts: Duration) {
        self.server.set(self.server.get() + 1);
        if self.history.has_outages {
            self.is_down.set(true);
            self.after(lasts, Happens::Back(self.server.get()));
        }
        let mut tables = self.tables.borrow_mut();
        tables.locked.clear();
        tables.of_people.clear();
        tables.held_feeds.clear();
        tables.has_locked_pauses = false;
        tables.keyed_claims = 0;
        tables.writers.clear();
        tables.unlock_leases(|_| true);
        drop(tables);
        self.unflushed.borrow_mut().clear();
        self.past.borrow_mut().clear();
        self.hung.borrow_mut().clear();
        self.inserting.set(0);
        for relay in 0..self.history.relays {
            self.deafen(relay, lasts);
        }
        self.listener.set(None);
    }

    fn enqueue(&self, messages: &[New], lasts: Duration, commits: bool) {
        let now = self.database_now().micros;
        let mut tables = self.tables.borrow_mut();
        let mut truths = self.messages.borrow_mut();
        let mut transactions = self.transactions.borrow_mut();
        let registers = self.history.registers == Some(transactions.len());
        let row = |new: &New| {
            tables.last_sequence += 1;
            truths.push(Truth {
                fails: new.fails,
                is_refused: new.is_refused,
                began: now,
                registers,
                delay: new.delay,
                ..Truth::default()
            });
            Row {
                sequence: tables.last_sequence,
                id: truths.len() - 1,
                topic: new.topic,
                destination: new.destination.to_owned(),
                ordering_key: new.ordering_key,
                headers: Some(u8::try_from(truths.len() % 100).unwrap_or(0)),
                occurred_at: now,
                available_at: now + micros(new.delay),
                expires_at: new.expires_after.map(|after| now + micros(after)),
                registration: tables.registered.get(new.destination).map(|one| one.id),
                ..Row::default()
            }
        };
        let rows = messages.iter().map(row).collect();
        let notifies = self.listener.get().is_some();
        if !notifies {
            self.inserting.set(self.inserting.get() + 1);
        }
        let writer = tables.next_writer;
        tables.next_writer += 1;
        tables.writers.insert(writer);
        transactions.push(Transaction {
            writer,
            server: self.server.get(),
            rows,
            commits,
            notifies,
            registers: registers.then_some(now),
        });
        self.after(lasts, Happens::End(transactions.len() - 1));
    }

    fn end(&self, number: usize) {
        let mut transactions = self.transactions.borrow_mut();
        let transaction = &mut transactions[number];
        if transaction.server != self.server.get() || self.is_down.get() {
            return;
        }
        if !transaction.notifies {
            self.inserting.set(self.inserting.get().saturating_sub(1));
        }
        self.tables.borrow_mut().writers.remove(&transaction.writer);
        if !transaction.commits {
            return;
        }
        self.unflushed.borrow_mut().clear();
        let mut tables = self.tables.borrow_mut();
        for row in std::mem::take(&mut transaction.rows) {
            self.messages.borrow_mut()[row.id].committed = Some(self.now.get());
            self.tell(|| {
                format!(
                    "committed: {} {} {:?}",
                    row.topic, row.sequence, row.ordering_key
                )
            });
            tables.rows.insert(row.sequence, row);
        }
        if let Some(began) = transaction.registers {
            self.tell(|| format!("registered: {}", REGISTERED[1]));
            tables.put(REGISTERED[1], true, began);
            self.registered_at.set(Some(self.database_now().micros));
        }
        drop(tables);
        if transaction.notifies {
            self.notify();
        }
    }

    pub(super) fn notify(&self) {
        for number in 0..self.processes.borrow().len() {
            let time = self.dice(0, 3);
            self.after(time, Happens::Notify(number));
        }
    }

    /// An operator changes a message.
    fn change_by_hand(&self, act: Act, number: usize) {
        fn one<T>(of: Vec<T>, number: usize) -> Option<T> {
            let number = number.checked_rem(of.len())?;
            of.into_iter().nth(number)
        }
        let now = self.database_now().micros;
        let tables = &mut *self.tables.borrow_mut();
        let messages = &mut *self.messages.borrow_mut();
        let waiting = || {
            let waits = |row: &&Row| row.held.is_none() && !tables.locked.contains(&row.sequence);
            let waiting = tables.rows.values().filter(waits);
            one(waiting.cloned().collect(), number)
        };
        let row = match act {
            Act::Cancel | Act::Reschedule(_) => waiting(),
            Act::Requeue => one(
                tables.dead.iter().map(|one| one.row.clone()).collect(),
                number,
            ),
            Act::Replay => {
                let sent = tables.ledger.iter().filter(|one| one.is_delivered);
                one(sent.map(|one| one.row.clone()).collect(), number)
            }
        };
        let Some(row) = row else { return };
        self.tell(|| format!("{act:?} of {row:?}"));
        let truth = &mut messages[row.id];
        match act {
            Act::Cancel => {
                truth.is_cancelled = true;
                tables.cancel(&[row.sequence], now);
            }
            Act::Reschedule(delay) => {
                truth.delay += delay;
                tables.reschedule(row.sequence, delay, now);
            }
            Act::Requeue | Act::Replay => {
                truth.committed = Some(self.now.get());
                *truth.again.entry(row.destination.clone()).or_default() += 1;
                match act {
                    Act::Requeue => tables.requeue(&[row.sequence], now),
                    _ => tables.replay(vec![row], &format!("r{}", self.order.get()), now),
                }
            }
        }
        self.unflushed.borrow_mut().clear();
        if self.listener.get().is_some() {
            self.notify();
        }
    }

    pub(super) fn send(&self, send: Send) {
        self.send_count.set(self.send_count.get() + 1);
        let number = self.send_count.get();
        let ends = send.ends;
        self.sends.borrow_mut().insert(number, send);
        self.look_at_send(number, ends, Duration::ZERO);
    }

    /// A thread that waits for a response looks again and again whether it must close the connection.
    fn look_at_send(&self, number: u64, ends: Duration, open_for: Duration) {
        let look = self.now.get() + open_for.min(Duration::from_secs(1));
        self.at(ends.min(look), Happens::SendEnds(number));
    }

    fn send_ends(&'w self, number: u64) {
        let (process, is_received, ends, lease) = {
            let sends = self.sends.borrow();
            let Some(send) = sends.get(&number) else {
                return;
            };
            let lease = send.lease();
            (send.process, send.is_received, send.ends, lease)
        };
        let now = self.now.get();
        if now < ends {
            let open_for = self.open_for(process, lease);
            if !open_for.is_zero() {
                return self.look_at_send(number, ends, open_for);
            }
            if let Some(send) = self.sends.borrow_mut().get_mut(&number) {
                send.close(now);
            }
        }
        if !is_received {
            self.received(number);
        }
        let (is_dead, frozen_until) = {
            let processes = self.processes.borrow();
            (processes[process].is_dead, processes[process].frozen_until)
        };
        if !is_dead && frozen_until > self.now.get() {
            return self.at(frozen_until, Happens::SendEnds(number));
        }
        let send = self.sends.borrow_mut().remove(&number);
        if let Some(send) = send.filter(|_| !is_dead) {
            self.enter(process);
            self.conclude(send);
        }
    }

    /// How long the connection of a send stays open. The kernel closes those of a dead process. Nobody can close those of
    /// a frozen one, which writes nothing either.
    fn open_for(&'w self, process: usize, lease: Option<LeaseId>) -> Duration {
        if self.processes.borrow()[process].is_dead {
            return Duration::ZERO;
        }
        let Some(lease) = lease.filter(|_| self.broken != Some(Broken::LeavesSendsOpen)) else {
            return Duration::MAX;
        };
        self.enter(process);
        let shared = self.processes.borrow()[process].shared;
        shared.lease.fence().left(lease.0)
    }

    pub(super) fn end_history(&self) {
        self.has_ended.set(true);
    }

    /// Ends all troubles: from now on, all messages must end.
    fn calm_down(&'w self) {
        self.moods.borrow_mut().clear();
        let now = self.now.get();
        for send in self.sends.borrow_mut().values_mut() {
            send.ends = send.ends.min(now + SEND_TIMEOUT);
        }
        self.refused.borrow_mut().clear();
        for message in self.messages.borrow_mut().iter_mut() {
            message.fails = 0;
        }
        let mut tables = self.tables.borrow_mut();
        tables.pauses.retain(|(.., by), _| *by != Hand::Operator);
        // A promoted standby may not know that a destination was enabled.
        let registered: Vec<&str> = tables.registered.keys().copied().collect();
        registered
            .into_iter()
            .for_each(|name| tables.put(name, true, 0));
        if self.history.all_have_namesake {
            tables.remove(NAMESAKE);
        }
        if self.history.has_endpoints && tables.registered.is_empty() {
            // Without an endpoint, messages that no route serves would wait forever.
            tables.put(REGISTERED[2], true, 0);
        }
        drop(tables);
        for process in self.processes.borrow_mut().iter_mut() {
            (process.cut_off_until, process.stuck_until) = (Duration::ZERO, Duration::ZERO);
        }
        let first = self.process_of(0);
        let lacks_route = first.is_some_and(|first| !self.processes.borrow()[first].has_route());
        if self.history.settings_differ && lacks_route {
            self.reload(0);
        }
    }

    fn tick(&'w self) {
        let now = self.now.get();
        if self
            .history
            .items
            .iter()
            .any(|item| matches!(item.event, Event::FailOver(_)))
        {
            let mut past = self.past.borrow_mut();
            past.push_back((now, self.tables.borrow().clone()));
            if past.len() > 80 {
                past.pop_front();
            }
        }
        if self.is_calm_now() && self.process_of(0).is_none() {
            self.start(0);
        }
        if self.is_calm_now() && self.history.all_have_namesake {
            self.tables.borrow_mut().remove(NAMESAKE);
        }
        if self.inserting.get() > 0 || !self.tables.borrow().rows.is_empty() {
            self.busy_at.set(now);
        }
        self.check_count();
        self.check_answers();
        self.check_quiet();
        if self.history.has_outages && !self.is_down.get() {
            self.check_others();
        }
        if self.history.is_calm() {
            self.check_lateness();
            self.check_held_up();
        }
        let is_empty = self.inserting.get() == 0 && self.tables.borrow().rows.is_empty();
        let has_ended = is_empty && self.is_calm_now();
        if has_ended
            && now > BEGIN + LENGTH + Duration::from_secs(1)
            && self.sends.borrow().is_empty()
        {
            self.check_end();
            self.end_history();
        }
    }

    /// Checks fairness at the start of a send to an endpoint: destinations whose unclaimed messages have
    /// waited since the same moment get equal times of the threads. While the first send to a destination is in flight,
    /// the sends to others do not count.
    pub(super) fn check_fairness(
        &self,
        destination: &str,
        lasts: Duration,
        awaits_first: impl Fn(&str) -> bool,
    ) {
        let Some(one) = REGISTERED.into_iter().find(|name| *name == destination) else {
            return;
        };
        if !self.history.has_crowd {
            return;
        }
        let tables = self.tables.borrow();
        let has_work = |name: &str| {
            let mut rows = tables.rows.values();
            rows.any(|row| row.destination == name && row.held.is_none())
        };
        let mut sends = self.sends_while_busy.borrow_mut();
        let before = *sends.entry(one).or_default();
        sends.insert(one, before + lasts);
        let relays = u32::try_from(self.history.relays).unwrap_or(u32::MAX);
        let most = MOST_AHEAD * relays;
        // With only two destinations, threads may be idle.
        if !REGISTERED.into_iter().all(has_work) {
            return;
        }
        for other in REGISTERED {
            let its = sends.entry(other).or_default();
            if awaits_first(other) {
                *its = before.max(*its);
            }
            let its = *its;
            if before > its + most {
                self.fall(Promise::Fair, || {
                    format!("the sends to {one} took {before:?}, but only {its:?} those to {other}, which has more waiting")
                });
            }
        }
    }

    /// Checks that hanging or failing destinations do not hold up the messages of another.
    fn check_quiet(&self) {
        let (tables, messages) = (self.tables.borrow(), self.messages.borrow());
        for row in tables.rows.values().filter(|row| row.destination == QUIET) {
            let truth = &messages[row.id];
            let Some(committed) = truth.committed else {
                continue;
            };
            let waits = self.now.get() - committed;
            // By then, a single relay has had a response from the destination.
            let is_known = self.history.relays == 1 && committed > BEGIN + BESIDE_HANGING;
            let most = if is_known { LATE } else { BESIDE_HANGING };
            if truth.well.is_empty() && waits > most {
                self.fall(Promise::Late, || {
                    format!("{row:?} has waited for {waits:?}")
                });
            }
        }
    }

    /// Checks that messages are claimed soon that wait only for room, as operators are told.
    fn check_lateness(&self) {
        let now = self.now.get();
        let micros = self.database_now().micros;
        let tables = self.tables.borrow();
        let processes = self.processes.borrow();
        let is_busy = |row: &Row| {
            let to = goes_to(row.topic, &row.destination);
            let mut living = processes.iter().filter(|one| !one.is_dead);
            living.any(|one| one.is_busy(to))
        };
        let waits_for_people =
            |row: &Row| tables.rows_of_people().any(|other| other.has_key_of(row));
        let facts = tables.facts(micros);
        // A message that is fanned out may wait for the parts of any other.
        let waits_for_parts = |row: &Row, other: &Row| {
            goes_to(row.topic, &row.destination).is_empty()
                && other.place() < row.place()
                && row.waits_for(other)
        };
        let waits_for_room = |row: &Row| match tables.reason(&facts, row, micros) {
            // No relay may have the namesake in its settings, or all may.
            _ if row.registration == Some(OF_ROUTE) => false,
            _ if row.destination == NAMESAKE && self.history.all_have_namesake => false,
            WaitReason::NoRoom { .. } | WaitReason::NoRelay { .. } => true,
            // One relay alone has a route, and only at each second start.
            WaitReason::NotServed { .. } => !self.history.settings_differ,
            _ => false,
        };
        let is_ready = |row: &Row| {
            waits_for_room(row)
                && !tables.locked.contains(&row.sequence)
                && !is_busy(row)
                && !waits_for_people(row)
                && !tables.rows.values().any(|other| {
                    other.sequence != row.sequence
                        && (waits_for_parts(row, other)
                            || (other.held.is_some() && other.excludes(row)))
                })
        };
        let messages = self.messages.borrow();
        let mut since = self.waits_since.borrow_mut();
        since.retain(|sequence, _| tables.rows.get(sequence).is_some_and(&is_ready));
        for row in tables.rows.values().filter(|row| is_ready(row)) {
            let began = *since.entry(row.sequence).or_insert(now);
            // No notification announces that a message has become due or that an operator has resumed a destination.
            // And if another relay settles the part that a message waits for, this takes up to a second to be found.
            let may_wait_for_parts = row.ordering_key.is_some() && self.history.has_parts();
            let has_people = self.history.has(|event| matches!(event, Event::Lock(..)));
            let is_announced = row.attempts == 0
                && !self.history.has_pauses()
                // Several settles in a row may wait for locks.
                && !has_people
                && !may_wait_for_parts
                // No notification tells other relays of the parts that this relay refuses to send.
                && !self.history.settings_differ
                // A notification may come to the old relay of a reload, which claims nothing any more.
                && !self.history.has_reloads()
                // Nor of a destination that is verified.
                && self.history.verification == Verification::None
                && messages[row.id].delay.is_zero();
            let most = match is_announced {
                true => SOON,
                // All searches have gone past what a person had locked, until their next rounds. Lanes of endpoints are asked rarely.
                false if has_people => 8 * LATE + self.poll,
                false => LATE + self.poll,
            };
            if now - began > most {
                self.fall(Promise::Late, || {
                    format!(
                        "{} {} {:?} has waited for {:?}",
                        row.topic,
                        row.sequence,
                        row.ordering_key,
                        now - began
                    )
                });
            }
        }
    }

    /// Checks that messages to `b` are settled soon, whatever happens to those of `a`.
    fn check_others(&self) {
        let now = self.now.get();
        let tables = self.tables.borrow();
        let mut since = self.waits_since.borrow_mut();
        let has_locks = self.history.has(|event| matches!(event, Event::Lock(..)));
        let is_locked = |row: &Row| {
            tables
                .rows_of_people()
                .any(|other| other.sequence == row.sequence || other.has_key_of(row))
        };
        since.retain(|sequence, _| tables.rows.get(sequence).is_some_and(|row| !is_locked(row)));
        let others = tables.rows.values().filter(|row| row.topic == "b");
        for row in others.filter(|row| !is_locked(row)) {
            let began = *since.entry(row.sequence).or_insert(now);
            let waits = now - began.max(self.back_at.get());
            let most = match has_locks {
                // No notification announces that a person has unlocked a message.
                true => BESIDE_LOCKS + self.poll,
                false => BESIDE_OTHERS,
            };
            if waits > most {
                self.fall(Promise::Late, || {
                    format!("{row:?} has waited for {waits:?} beside others in flight")
                });
            }
        }
    }

    /// Checks that messages that a person has locked hold up the settle of no other.
    fn check_held_up(&self) {
        let began = self.in_database(self.unlocked_at.get());
        let tables = self.tables.borrow();
        let now = self.database_now().micros;
        let is_late = |row: &&Row| {
            // The sends of a run follow one another.
            let most = match self.broken {
                None => HELD,
                Some(_) => HELD_IF_BROKEN,
            };
            let most = most * u32::try_from(self.history.key_run).unwrap_or(1);
            let held = row
                .held
                .is_some_and(|held| now - held.at.max(began) > micros(most));
            // A run is settled as a whole.
            let is_with = |other: &Row| {
                other.sequence == row.sequence
                    || (self.may_run(row) && other.held == row.held && other.has_key_of(row))
            };
            held && !tables.rows_of_people().any(is_with)
        };
        if let Some(row) = tables.rows.values().find(is_late) {
            self.fall(Promise::Late, || format!("{row:?} is not settled"));
        }
    }

    /// Checks that fan-outs do not insert parts again and again.
    fn check_count(&self) {
        let (rows, messages) = (
            self.tables.borrow().rows.len(),
            self.messages.borrow().len(),
        );
        if rows > MOST_PARTS * messages {
            self.fall(Promise::Doubled, || {
                format!("{messages} messages have become {rows}")
            });
        }
    }

    /// Checks that after the answer "nothing is due", no message is left that was due when the question was asked.
    fn check_answers(&self) {
        let now = self.now.get();
        let mut processes = self.processes.borrow_mut();
        for process in processes.iter_mut().filter(|process| !process.is_dead) {
            let Some((question, asked_at)) = process.question else {
                continue;
            };
            if !process.shared.custody.is_answered(question) {
                if self.history.is_calm()
                    && !self.history.has_times()
                    && self.is_calm_now()
                    && now - asked_at > LATE + LENGTH
                {
                    self.fall(Promise::Idle, || "a question has no answer".to_owned());
                }
                continue;
            }
            process.question = None;
            self.tell(|| format!("relay {}: nothing is due", process.relay));
            if !self.history.is_calm() || self.history.has_times() || self.history.relays > 1 {
                continue;
            }
            let messages = self.messages.borrow();
            let is_left = |row: &&Row| messages[row.id].committed.is_some_and(|at| at < asked_at);
            let tables = self.tables.borrow();
            if let Some(row) = tables.rows.values().find(is_left) {
                self.fall(Promise::Idle, || {
                    format!(
                        "{} {} is due, but the relay has answered that nothing is due",
                        row.topic, row.sequence
                    )
                });
            }
        }
    }

    /// Checks that all committed messages have ended.
    fn check_end(&'w self) {
        let tables = self.tables.borrow();
        if let Some(row) = tables.rows.values().next() {
            return self.fall(Promise::Lost, || format!("the message never ends: {row:?}"));
        }
        drop(tables);
        self.check_feeds();
        let tables = self.tables.borrow();
        if !self.history.is_lawful() {
            return;
        }
        self.check_recipients(&tables);
        self.check_addressees(&tables);
        for (id, truth) in self.messages.borrow().iter().enumerate() {
            let entries: Vec<_> = tables
                .ledger
                .iter()
                .filter(|entry| entry.row.id == id)
                .collect();
            if truth.committed.is_some() && entries.is_empty() {
                return self.fall(Promise::Lost, || {
                    format!("message {id} was committed and has not ended")
                });
            }
            for entry in &entries {
                let of = |of: &BTreeMap<String, u32>| {
                    of.get(&entry.row.destination).copied().unwrap_or_default()
                };
                // Messages for endpoints alone may have had no subscriber.
                let is_without_subscriber = [wants::TOPIC, wants::OWN].contains(&entry.row.topic)
                    && entry.row.destination.is_empty();
                if entry.is_delivered && of(&truth.well) == 0 && !is_without_subscriber {
                    return self.fall(Promise::Lost, || {
                        format!("recorded as delivered but never sent: {entry:?}")
                    });
                }
                let times = (entries.iter())
                    .filter(|one| one.row.destination == entry.row.destination)
                    .count();
                // Such a message that had no subscriber is replayed to those that are there later.
                let to_all = truth
                    .again
                    .get("")
                    .filter(|_| !entry.row.destination.is_empty());
                let again = of(&truth.again) + to_all.copied().unwrap_or_default();
                let is_twice = times > 1 + again as usize;
                if is_twice {
                    return self.fall(Promise::Doubled, || format!("recorded twice: {entry:?}"));
                }
            }
        }
    }

    /// Checks that no message was settled as one that nobody wants after it was sent to a destination that still exists.
    fn check_addressees(&self, tables: &Tables) {
        let messages = self.messages.borrow();
        let is_there = |id: &Uuid| tables.registered.values().any(|one| one.id == *id);
        let has_no_subscriber = |entry: &&Entry| {
            let truth = &messages[entry.row.id];
            let was_addressed = truth.addressed.iter().any(is_there);
            entry.is_delivered && entry.to.is_empty() && was_addressed && truth.again.is_empty()
        };
        if let Some(entry) = tables.ledger.iter().find(has_no_subscriber) {
            self.fall(Promise::Address, || {
                format!("{entry:?} was sent to a destination, and ended without a subscriber")
            });
        }
    }

    /// Checks that each message for endpoints has reached those that want it, and no others.
    fn check_recipients(&self, tables: &Tables) {
        if !self.history.has_same_recipients() {
            return;
        }
        let mut reached: BTreeMap<(usize, &str), BTreeSet<&str>> = BTreeMap::new();
        for entry in tables
            .ledger
            .iter()
            .filter(|one| [wants::TOPIC, wants::ROUTED, wants::OWN].contains(&one.row.topic))
        {
            // A message may expire before it is fanned out.
            let is_fanned_out = entry.is_delivered || !entry.row.destination.is_empty();
            let of = reached.entry((entry.row.id, entry.row.topic)).or_default();
            of.insert(if is_fanned_out {
                if entry.row.topic == wants::ROUTED {
                    &entry.row.destination
                } else {
                    &entry.to
                }
            } else {
                "*"
            });
        }
        for ((id, topic), mut reached) in reached {
            if self.messages.borrow()[id].is_cancelled {
                continue;
            }
            // It ended without a subscriber, before one was verified, and was replayed since.
            let is_replayed = !self.messages.borrow()[id].again.is_empty();
            if tables.verification.skips() && is_replayed && reached.len() > 1 {
                reached.remove("");
            }
            let want = |name: &&str| {
                let tenant = (tables.registered.get(name))
                    .and_then(|one| tables.tenants.get(&one.stamp).copied());
                let is_tenants = tenant.is_none() || tenant == wants::tenant_of(id);
                let matches = wants::matches(name, id);
                let is_asked = wants::subscribes(name, topic);
                is_asked && is_tenants && (matches || !tables.has_filters)
            };
            let mut wanted: BTreeSet<&str> = REGISTERED[..2].iter().copied().filter(want).collect();
            match self.is_behind_registration(id) {
                Some(true) => {}
                Some(false) => drop(wanted.remove(REGISTERED[1])),
                None => wanted.retain(|name| *name != REGISTERED[1] || reached.contains(name)),
            }
            if tables.verification.skips() {
                wanted.retain(|name| reached.contains(name));
            }
            // A message that only the route of a topic gets needs no row for the route's destination. A replay names it.
            let is_whole = wanted.is_empty() && reached.contains("");
            wanted.extend((topic == wants::ROUTED).then_some("a"));
            let has_namesake = topic == wants::ROUTED && self.history.has_namesake;
            wanted.extend(has_namesake.then_some(NAMESAKE));
            let named = reached.iter().copied().filter(|name| !name.is_empty());
            let is_so = match is_whole {
                true => named.collect::<BTreeSet<_>>().is_subset(&wanted),
                false => reached == wanted,
            };
            if !is_so && !reached.contains("*") {
                self.fall(Promise::Recipients, || {
                    format!("message {id} is for {wanted:?} and was settled for {reached:?}")
                });
            }
        }
    }

    /// Whether the transaction of a message registers the destination `y`, or began after `y` was registered. `None`: it
    /// began while the registering transaction was open.
    fn is_behind_registration(&self, id: usize) -> Option<bool> {
        let Some(registers) = self.history.registers else {
            return Some(true);
        };
        let Truth {
            began,
            registers: is_it,
            ..
        } = self.messages.borrow()[id];
        let transactions = self.transactions.borrow();
        let registration = transactions.get(registers).and_then(|one| one.registers);
        match (registration, self.registered_at.get()) {
            (Some(_), Some(_)) if is_it => Some(true),
            (Some(registration), Some(_)) if began < registration => Some(false),
            (Some(_), Some(committed)) => (began > committed).then_some(true),
            _ => Some(false),
        }
    }

    /// Checks that a message is not sent to a destination of another tenant.
    pub(super) fn check_tenant(&self, id: usize, stamp: i64, name: &str) {
        let tables = self.tables.borrow();
        let tenants = tables
            .tenants
            .get(&stamp)
            .copied()
            .zip(wants::tenant_of(id));
        if let Some((its, of_message)) = tenants.filter(|(its, of)| its != of) {
            self.fall(Promise::Tenant, || {
                format!("message {id} of tenant {of_message} is sent to {name} of {its}")
            });
        }
    }

    /// Checks that a destination was verified before the first message.
    pub(super) fn check_verified(&self, id: usize, stamp: i64, name: &str) {
        if self.tables.borrow().unverified.contains(&stamp) {
            self.fall(Promise::Verified, || {
                format!("message {id} is sent to {name}, which is not verified")
            });
        }
    }

    /// Whether only the relays change leases and claims in this history.
    pub(super) fn is_strict(&self) -> bool {
        self.history.is_lawful()
    }
}

impl History {
    /// Whether messages become due without a notification.
    pub(super) fn has_times(&self) -> bool {
        self.has_pauses()
            || self.verification != Verification::None
            || self.has(|event| matches!(event, Event::Act(..) | Event::Lock(..)))
            || self.items.iter().any(|item| match &item.event {
                Event::Enqueue { messages, .. } => messages
                    .iter()
                    .any(|new| !new.delay.is_zero() || new.fails > 0),
                _ => false,
            })
    }

    /// Whether keyed messages are fanned out.
    fn has_parts(&self) -> bool {
        let is_apart = |new: &New| {
            (["fan", wants::TOPIC].contains(&new.topic) || !new.destination.is_empty())
                && new.ordering_key.is_some()
        };
        let enqueues = |item: &Item| match &item.event {
            Event::Enqueue { messages, .. } => messages.iter().any(is_apart),
            _ => false,
        };
        self.items.iter().any(enqueues)
    }

    fn has_reloads(&self) -> bool {
        self.has(|event| matches!(event, Event::Reload(_)))
    }

    fn has_pauses(&self) -> bool {
        let is_pause = |item: &Item| matches!(item.event, Event::Pause(..));
        self.items.iter().any(is_pause)
    }
}
