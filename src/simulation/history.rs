//! Histories: the events of a relay's world. Producers, receivers and operators act, and anything can go wrong.
//!
//! A seed makes a history: the same seed always makes the same history. Any item can be removed, so that a failure
//! becomes a short story.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;

use super::wants;
use crate::config::Verification;

/// How long events happen. After that, all troubles end, and all messages must be delivered or dead-lettered.
pub(super) const LENGTH: Duration = Duration::from_secs(12);
/// The most relays of one history.
pub(super) const MOST_RELAYS: usize = 3;

#[derive(Debug, Clone, Default)]
pub(super) struct History {
    pub(super) seed: u64,
    pub(super) relays: usize,
    pub(super) single_active: bool,
    pub(super) items: Vec<Item>,
    /// One statement in this many is lost, hangs or takes too long; 0: no statement.
    pub(super) troubles: u32,
    /// One statement in this many takes much longer; 0: no statement.
    pub(super) slow: u32,
    /// The senders of each destination.
    pub(super) senders: usize,
    /// Keyed claims take long to commit.
    pub(super) slow_claims: bool,
    /// Whether an old snapshot keeps dead index entries, which makes walks and other searches slow.
    pub(super) has_dead_entries: bool,
    /// There are so many keys that a walk takes long. And so many messages wait for others of their keys that a claim
    /// reads only these.
    pub(super) is_crowded: bool,
    pub(super) lease: Duration,
    /// Some messages go to the endpoints `x` and `y`, or by topic `c` to both.
    pub(super) has_endpoints: bool,
    /// The transaction that registers `y` also enqueues messages, and is the one with this number, if there are so many.
    /// `None`: `y` is there from the beginning.
    pub(super) registers: Option<usize>,
    /// There are many endpoints: see [`History::crowd`].
    pub(super) has_crowd: bool,
    /// The server goes away while messages to `a` are in flight for long: see [`History::leave_in_flight`].
    pub(super) has_outages: bool,
    /// The rate limit of `a`, a second.
    pub(super) rate: Option<f64>,
    /// The settings of all relays but the first refuse the port of `x`, and have no route for the topic `d` and no
    /// handlers. The first relay has these at each second start.
    pub(super) settings_differ: bool,
    /// While the first relay has the route for `d`, its settings have a destination with the name of the registered `y`, and
    /// the route leads there, too.
    pub(super) has_namesake: bool,
    /// All relays have this destination all the time, so none sends to the registered one, which is removed at the end.
    pub(super) all_have_namesake: bool,
    /// The endpoints have filters.
    pub(super) has_filters: bool,
    /// Endpoints and messages belong to tenants.
    pub(super) has_tenants: bool,
    /// How endpoints show that they want messages, before the first is sent.
    pub(super) verification: Verification,
    /// Some messages go to a group of handlers.
    pub(super) has_handlers: bool,
    /// The destination `a` gets several messages in one request, and refuses some messages.
    pub(super) has_batches: bool,
    /// The dispatcher has an outcome for each message of a request. Otherwise the receiver accepts or refuses the request
    /// as a whole.
    pub(super) has_outcomes_of_each: bool,
    /// The endpoints that are feeds.
    pub(super) feeds: &'static [&'static str],
    /// The most messages of a run, at the destinations `a`, `b` and endpoints.
    pub(super) key_run: usize,
}

/// Endpoints. In a crowd, all of them have a large backlog from the same moment on.
pub(super) const REGISTERED: [&str; 3] = ["x", "y", "z"];
/// The endpoint whose name the settings of the first relay may have.
pub(super) const NAMESAKE: &str = REGISTERED[1];
/// An endpoint that gets a message now and then.
pub(super) const QUIET: &str = "quiet";
/// A group of handlers, and the topic of its handler.
pub(super) const HANDLED: &str = "h";
/// Endpoints that hang or fail.
pub(super) const BAD: [&str; 5] = ["p", "q", "r", "s", "t"];

#[derive(Debug, Clone)]
pub(super) struct Item {
    pub(super) at: Duration,
    pub(super) event: Event,
}

/// A message to enqueue.
#[derive(Debug, Clone)]
pub(super) struct New {
    pub(super) topic: &'static str,
    /// Empty: the route of the topic decides.
    pub(super) destination: &'static str,
    pub(super) ordering_key: Option<&'static str>,
    /// The time until the message is due.
    pub(super) delay: Duration,
    pub(super) expires_after: Option<Duration>,
    /// How many of its sends fail.
    pub(super) fails: u32,
    /// The receiver refuses the message.
    pub(super) is_refused: bool,
}

impl New {
    fn of(topic: &'static str) -> Self {
        Self {
            topic,
            destination: "",
            ordering_key: None,
            delay: Duration::ZERO,
            expires_after: None,
            fails: 0,
            is_refused: false,
        }
    }
}

/// How a destination responds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mood {
    Well,
    Failing,
    /// No response within the time limit.
    Hanging,
    Slow,
}

/// What an operator does to a message.
#[derive(Debug, Clone, Copy)]
pub(super) enum Act {
    Cancel,
    /// Makes a waiting message due after this time.
    Reschedule(Duration),
    Requeue,
    /// Sends a delivered message again.
    Replay,
}

#[derive(Debug, Clone)]
pub(super) enum Event {
    /// A transaction inserts these messages and ends after this time.
    Enqueue {
        messages: Vec<New>,
        lasts: Duration,
        commits: bool,
    },
    Mood(&'static str, Mood, Duration),
    /// An operator pauses a topic or a destination.
    Pause(&'static str, &'static str, Duration),
    /// An endpoint is disabled, or removed. It returns after this time, or (`None`) never.
    Disable(&'static str, Duration),
    Remove(&'static str, Option<Duration>),
    /// An endpoint is given to the other tenant.
    Give(&'static str),
    /// A person locks the rows of pauses and of every third message, from this one on.
    Lock(usize, Duration),
    /// An operator changes one of the messages that can be changed so: the one with this number, modulo their count.
    Act(Act, usize),
    /// The application asks whether nothing is due.
    Ask(usize),
    /// The process is killed, and another process starts after this time.
    Kill(usize, Duration),
    /// The relay shuts down, and another process starts.
    Stop(usize, Duration),
    /// The process gets new settings: a new relay starts in the process, and then the old relay shuts down.
    Reload(usize),
    /// The process is stopped, and continues after this time.
    Freeze(usize, Duration),
    /// The machine of the process sleeps.
    Sleep(usize, Duration),
    /// The process does not reach the database.
    CutOff(usize, Duration),
    /// Only the heartbeat of the process does not reach the database.
    Stuck(usize, Duration),
    /// The server crashes and loses the claims that were not on disk.
    Restart(Duration),
    /// A standby takes over that lacks the commits of this last time; or a server process crashes, and the server
    /// lacks them without a new start.
    FailOver(Duration),
    /// The clock of the database's server steps.
    Step(i64),
    /// The database refuses the settles of a topic.
    Refuse(&'static str, Duration),
    /// Notifications are lost: the listener's connection is broken without notice.
    Deaf(usize, Duration),
}

impl Event {
    fn enqueue(messages: Vec<New>) -> Self {
        Self::Enqueue {
            messages,
            lasts: Duration::ZERO,
            commits: true,
        }
    }
}

/// All messages, transaction by transaction.
fn enqueued_mut(items: &mut [Item]) -> impl Iterator<Item = &mut New> {
    let messages = items.iter_mut().filter_map(|item| match &mut item.event {
        Event::Enqueue { messages, .. } => Some(messages),
        _ => None,
    });
    messages.flatten()
}

/// The most attempts at each destination.
pub(super) const MAX_ATTEMPTS: u32 = 4;
/// The timeout of sends in most histories, and of handlers.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_millis(1500);
/// Too short for an early end when the session is lost.
const SHORT_LEASE: Duration = Duration::from_secs(4);
/// Ends early when the session is lost.
const LONG_LEASE: Duration = Duration::from_secs(12);

fn millis(rng: &mut Rng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_micros(rng.u64(range.start * 1000..range.end * 1000))
}

impl History {
    /// The timeout of sends. Where time counts, it is short.
    pub(super) fn send_timeout(&self) -> Duration {
        if self.has_outages {
            return Duration::from_secs(60);
        }
        if self.troubles == 0 || self.has_crowd {
            return SEND_TIMEOUT;
        }
        match Rng::with_seed(self.seed.rotate_left(32)).u8(..6) {
            0 => Duration::from_secs(30),
            1 => Duration::from_secs(300),
            _ => SEND_TIMEOUT,
        }
    }

    pub(super) fn of(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        // In a third of the histories, nothing goes wrong: there the promises about time hold.
        let is_calm = rng.u8(..3) == 0;
        let relays = 1 + rng.usize(..MOST_RELAYS);
        let mut history = Self {
            seed,
            relays,
            single_active: rng.u8(..8) == 0,
            senders: [1, 3][rng.usize(..2)],
            troubles: [0, 0, 200, 40, 20][rng.usize(..5)],
            slow: [0, 0, 100, 20][rng.usize(..4)],
            has_dead_entries: rng.u8(..6) == 0,
            // Separate dice, so that the other decisions of a seed stay the same.
            is_crowded: Rng::with_seed(!seed).u8(..4) == 0,
            lease: [SHORT_LEASE, LONG_LEASE][rng.usize(..2)],
            // Separate dice, as above.
            key_run: [1, 2, 3, 10]
                [Rng::with_seed(seed.rotate_left(23) ^ 0x8ebc_6af0_9c88_c6e3).usize(..4)],
            ..Self::default()
        };
        if is_calm {
            (history.troubles, history.slow) = (0, 0);
            history.has_dead_entries = false;
        }
        let transactions = rng.usize(1..25);
        let keys: &[&str] = [&["k", "l"][..], &["k", "l", "m", "n", "o", "p"]][rng.usize(..2)];
        let keyed = rng.u8(..5);
        let topics: &[&str] = [&["a"][..], &["a", "b"], &["a", "b", "fan"]][rng.usize(..3)];
        let lates = rng.u8(..3);
        let is_failing = rng.u8(..3) == 0;
        let has_expiry = rng.u8(..5) == 0;
        let has_delays = rng.u8(..3) == 0;
        let bursts = [6, 2][rng.usize(..2)];
        for _ in 0..transactions {
            let count = if rng.u8(..bursts) == 0 {
                rng.usize(5..40)
            } else {
                rng.usize(1..4)
            };
            let new = |rng: &mut Rng| New {
                topic: topics[rng.usize(..topics.len())],
                destination: "",
                ordering_key: (rng.u8(..4) < keyed).then(|| keys[rng.usize(..keys.len())]),
                delay: if has_delays && rng.u8(..6) == 0 {
                    millis(rng, 1..4000)
                } else {
                    Duration::ZERO
                },
                expires_after: (has_expiry && rng.u8(..4) == 0).then(|| millis(rng, 1..3000)),
                fails: if is_failing && rng.u8(..4) == 0 {
                    rng.u32(1..6)
                } else {
                    0
                },
                is_refused: false,
            };
            let messages = (0..count).map(|_| new(&mut rng)).collect();
            let lasts = match rng.u8(..4) < lates {
                true => millis(&mut rng, 1..2500),
                false => millis(&mut rng, 0..3),
            };
            let commits = rng.u8(..12) > 0;
            history.add(
                &mut rng,
                Event::Enqueue {
                    messages,
                    lasts,
                    commits,
                },
            );
        }
        // Each kind of trouble is in some histories only: together, they would hide one another.
        type Make = fn(&mut Rng, usize) -> Event;
        let kinds: &[Make] = &[
            |rng, _| {
                Event::Mood(
                    ["a", "b"][rng.usize(..2)],
                    [Mood::Failing, Mood::Hanging, Mood::Slow][rng.usize(..3)],
                    millis(rng, 100..5000),
                )
            },
            |rng, _| match rng.bool() {
                true => Event::Pause("topic", ["a", "b"][rng.usize(..2)], millis(rng, 50..3000)),
                false => Event::Pause(
                    "destination",
                    ["a", "b"][rng.usize(..2)],
                    millis(rng, 50..3000),
                ),
            },
            |_, relay| Event::Ask(relay),
            |rng, relay| Event::Kill(relay, millis(rng, 1..4000)),
            |rng, relay| Event::Stop(relay, millis(rng, 1..4000)),
            |rng, relay| Event::Freeze(relay, millis(rng, 100..15_000)),
            |rng, relay| Event::Sleep(relay, millis(rng, 100..15_000)),
            |rng, relay| Event::CutOff(relay, millis(rng, 50..12_000)),
            |rng, relay| Event::Stuck(relay, millis(rng, 50..8000)),
            |rng, _| Event::Restart(millis(rng, 1..3000)),
            |rng, _| Event::FailOver(millis(rng, 0..1500)),
            |rng, _| Event::Step(rng.i64(-5_000_000..15_000_000)),
            |rng, _| Event::Refuse(["a", "b"][rng.usize(..2)], millis(rng, 50..4000)),
            |rng, relay| Event::Deaf(relay, millis(rng, 50..3000)),
        ];
        for make in kinds {
            let is_announced =
                matches!(make(&mut rng.clone(), 0), Event::Ask(_) | Event::Pause(..));
            if rng.u8(..4) > 0 || (is_calm && !is_announced) {
                continue;
            }
            for _ in 0..rng.usize(1..4) {
                let relay = rng.usize(..relays);
                let event = make(&mut rng, relay);
                history.add(&mut rng, event);
            }
        }
        if !is_calm && rng.u8(..3) == 0 {
            for _ in 0..rng.usize(1..4) {
                history.besiege(&mut rng);
            }
        }
        if rng.u8(..4) == 0 {
            history.come_late(&mut rng);
            history.slow_claims = !is_calm;
        }
        // Separate dice, so that the other decisions of a seed stay the same.
        let mut rng = Rng::with_seed(seed.rotate_left(17) ^ 0x5851_f42d_4c95_7f2d);
        match rng.u8(..12) {
            0..4 => {
                history.register(&mut rng, is_calm);
                let rng = Rng::with_seed(seed.rotate_left(29) ^ 0x2545_f491_4f6c_dd1d);
                history.divide(rng, is_calm);
                history.store();
            }
            4 => history.crowd(&mut rng),
            5 => history.leave_in_flight(&mut rng),
            _ => {}
        }
        let mut rng = Rng::with_seed(seed.rotate_left(41) ^ 0x94d0_49bb_1331_11eb);
        if !history.is_of_a_piece() && rng.u8(..3) == 0 {
            for _ in 0..rng.usize(1..8) {
                let act = match rng.u8(..5) {
                    0 => Act::Cancel,
                    1 => Act::Reschedule(Duration::ZERO),
                    2 => Act::Reschedule(millis(&mut rng, 1..4000)),
                    3 => Act::Requeue,
                    _ => Act::Replay,
                };
                let event = Event::Act(act, rng.usize(..100));
                history.add(&mut rng, event);
            }
        }
        if !history.is_of_a_piece() && rng.u8(..4) == 0 {
            for _ in 0..rng.usize(1..4) {
                let event = Event::Lock(rng.usize(..3), millis(&mut rng, 50..8000));
                history.add(&mut rng, event);
            }
        }
        let mut rng = Rng::with_seed(seed.rotate_left(53) ^ 0xd6e8_feb8_6659_fd93);
        if !history.is_of_a_piece() && rng.u8(..5) == 0 {
            for _ in 0..rng.usize(1..4) {
                let event = Event::Reload(rng.usize(..history.relays));
                history.add(&mut rng, event);
            }
        }
        let mut rng = Rng::with_seed(seed.rotate_left(7) ^ 0xa076_1d64_78bd_642f);
        if !history.is_of_a_piece() && rng.u8(..6) == 0 {
            history.refuse(&mut rng);
        }
        let mut rng = Rng::with_seed(seed.rotate_left(11) ^ 0xe703_7ed1_a0b4_28db);
        if !history.is_of_a_piece() && rng.u8(..6) == 0 {
            history.handle(&mut rng);
        }
        history.items.sort_by_key(|item| item.at);
        history
    }

    /// Sends some messages to handlers.
    fn handle(&mut self, rng: &mut Rng) {
        self.has_handlers = true;
        let plain = |new: &&mut New| ["a", "b"].contains(&new.topic) && new.destination.is_empty();
        for new in enqueued_mut(&mut self.items).filter(plain) {
            if rng.u8(..3) == 0 {
                new.topic = HANDLED;
                // The group is not always there, and a key would wait for its messages.
                new.ordering_key = new.ordering_key.filter(|_| !self.settings_differ);
            }
        }
    }

    /// Sends several messages in one request, and has the receiver refuse some of them.
    fn refuse(&mut self, rng: &mut Rng) {
        self.has_batches = true;
        self.has_outcomes_of_each = Rng::with_seed(self.seed ^ 2).bool();
        for new in enqueued_mut(&mut self.items).filter(|new| new.topic == "a") {
            new.is_refused = rng.u8(..8) == 0;
        }
    }

    /// Sends some messages to endpoints, which are disabled, removed, fail, hang or are slow.
    fn register(&mut self, rng: &mut Rng, is_calm: bool) {
        self.has_endpoints = true;
        let mut dice = Rng::with_seed(self.seed ^ 1);
        let count = self
            .items
            .iter()
            .filter(|item| matches!(item.event, Event::Enqueue { .. }));
        let count = count.count();
        self.registers = (dice.u8(..3) == 0).then(|| dice.usize(..count.max(1)));
        let has_orphans = !is_calm && dice.u8(..4) == 0;
        if has_orphans {
            self.registers = Some(usize::MAX);
        }
        for new in enqueued_mut(&mut self.items) {
            if rng.bool() {
                continue;
            }
            // Separate keys: messages of other routes are not ordered with these.
            new.ordering_key = new.ordering_key.map(|_| ["r", "s"][rng.usize(..2)]);
            match rng.u8(..3) {
                0 => new.topic = "c",
                _ => new.destination = REGISTERED[rng.usize(..2)],
            }
            if self.registers.is_some() && !new.destination.is_empty() {
                new.destination = REGISTERED[0];
            }
        }
        if is_calm {
            return;
        }
        if has_orphans {
            self.orphan(&mut dice);
        }
        for _ in 0..rng.usize(..4) {
            let name = REGISTERED[rng.usize(..2)];
            let event = match rng.u8(..3) {
                0 => Event::Disable(name, millis(rng, 50..6000)),
                1 => Event::Remove(name, rng.bool().then(|| millis(rng, 50..6000))),
                _ => {
                    let mood = [Mood::Failing, Mood::Hanging, Mood::Slow][rng.usize(..3)];
                    Event::Mood(name, mood, millis(rng, 100..5000))
                }
            };
            self.add(rng, event);
        }
    }

    /// Kills a relay that is sending messages to the only endpoint, which is then disabled until after the
    /// takeover.
    fn orphan(&mut self, rng: &mut Rng) {
        let at = millis(rng, 0..3000);
        let enqueue = Event::enqueue(vec![New::of(wants::TOPIC); rng.usize(1..4)]);
        let name = REGISTERED[0];
        let kill = at + millis(rng, 2..300);
        let events = [
            (at, enqueue),
            (at, Event::Mood(name, Mood::Slow, Duration::from_secs(1))),
            (
                kill,
                Event::Kill(rng.usize(..self.relays), millis(rng, 1..2000)),
            ),
            (kill, Event::Disable(name, Duration::from_secs(8))),
        ];
        let items = events.map(|(at, event)| Item { at, event });
        self.items.extend(items);
    }

    /// Gives relays different settings, and endpoints filters, tenants, verification and events about the
    /// outbox.
    fn divide(&mut self, mut rng: Rng, is_calm: bool) {
        // Of relays with different settings, the only active one would keep the messages that it does not send.
        self.settings_differ = rng.u8(..3) == 0 && self.relays > 1 && !self.single_active;
        self.has_filters = rng.u8(..3) == 0;
        self.has_tenants = rng.u8(..3) == 0;
        if self.has_tenants && !is_calm {
            for _ in 0..rng.usize(..3) {
                let event = Event::Give(REGISTERED[rng.usize(..2)]);
                self.add(&mut rng, event);
            }
        }
        // Separate dice, as above.
        let mut dice = Rng::with_seed(self.seed ^ 6);
        self.verification = match dice.u8(..9) {
            0 | 1 => Verification::CloudEvents,
            2 => Verification::CloudEventsSkip,
            _ => Verification::None,
        };
        if dice.u8(..4) == 0 {
            self.change_topic(wants::OWN, &mut dice);
        }
        if !self.settings_differ {
            return;
        }
        self.has_namesake = Rng::with_seed(self.seed ^ 3).bool();
        self.all_have_namesake = self.has_namesake && Rng::with_seed(self.seed ^ 5).u8(..4) == 0;
        self.change_topic(wants::ROUTED, &mut rng);
    }

    /// Makes endpoints feeds, to which nothing is sent. Relays have no destination of that name in their settings.
    fn store(&mut self) {
        let mut dice = Rng::with_seed(self.seed ^ 7);
        let names: &[&[&str]] = match self.has_namesake {
            true => &[&[], &["x"]],
            false => &[&[], &["x"], &["y"], &["x", "y"]],
        };
        self.feeds = names[dice.usize(..names.len())];
    }

    /// Gives another topic to half of the messages for endpoints.
    fn change_topic(&mut self, topic: &'static str, rng: &mut Rng) {
        let of_endpoints = enqueued_mut(&mut self.items).filter(|new| new.topic == wants::TOPIC);
        for new in of_endpoints.filter(|_| rng.bool()) {
            new.topic = topic;
        }
    }

    /// Makes a crowd of endpoints: some have a large backlog and respond, others hang or fail, and one
    /// gets few messages. Those with a backlog must be served equally, and the one with few messages soon.
    fn crowd(&mut self, rng: &mut Rng) {
        (self.has_endpoints, self.has_crowd) = (true, true);
        self.relays = 1 + rng.usize(..2);
        (self.single_active, self.slow_claims) = (false, false);
        (self.troubles, self.slow) = (0, 0);
        (self.has_dead_entries, self.is_crowded) = (false, false);
        self.senders = 4;
        self.items.clear();
        let enqueue = |at, messages| Item {
            at,
            event: Event::enqueue(messages),
        };
        let to = |destination| New {
            destination,
            ..New::of("a")
        };
        for name in BAD.into_iter().take(rng.usize(..=BAD.len())) {
            let mood = [Mood::Failing, Mood::Hanging][rng.usize(..2)];
            self.items.push(Item {
                at: Duration::ZERO,
                event: Event::Mood(name, mood, LENGTH),
            });
            let messages = vec![to(name); rng.usize(1..15)];
            self.items.push(enqueue(millis(rng, 0..6000), messages));
        }
        let mut at = Duration::ZERO;
        while at < Duration::from_secs(10) {
            at += millis(rng, 10..1000);
            self.items.push(enqueue(at, vec![to(QUIET)]));
        }
        let of_each = REGISTERED.map(|name| vec![to(name); rng.usize(40..120)]);
        let mut messages = of_each.concat();
        if rng.bool() {
            rng.shuffle(&mut messages);
        }
        self.items.push(enqueue(millis(rng, 0..5000), messages));
    }

    /// Restarts and failovers of the server while messages to `a` are slow, hang, wait for a rate limit or are locked by a
    /// person. Messages to `b` must arrive soon whatever happens to those.
    fn leave_in_flight(&mut self, rng: &mut Rng) {
        self.has_outages = true;
        self.relays = 1 + rng.usize(..2);
        (self.single_active, self.slow_claims) = (false, false);
        (self.troubles, self.slow) = (0, 0);
        (self.has_dead_entries, self.is_crowded) = (false, false);
        (self.senders, self.lease) = (3, LONG_LEASE);
        self.items.clear();
        let mut add = |at, event| self.items.push(Item { at, event });
        let enqueue = |new: New, count| Event::enqueue(vec![new; count]);
        self.rate = rng.bool().then_some(0.3);
        if self.rate.is_none() || rng.bool() {
            let mood = [Mood::Slow, Mood::Hanging][rng.usize(..2)];
            add(Duration::ZERO, Event::Mood("a", mood, LENGTH));
        }
        for _ in 0..rng.usize(1..4) {
            let new = New {
                ordering_key: rng.bool().then_some("k"),
                ..New::of("a")
            };
            add(millis(rng, 0..3000), enqueue(new, rng.usize(1..8)));
        }
        let mut at = Duration::ZERO;
        while at < Duration::from_secs(11) {
            at += millis(rng, 10..600);
            let new = New {
                ordering_key: rng.bool().then_some("l"),
                ..New::of("b")
            };
            add(at, enqueue(new, rng.usize(1..6)));
        }
        for _ in 0..rng.usize(1..4) {
            let lasts = millis(rng, 1..3000);
            let event = match rng.u8(..3) {
                0 => Event::FailOver(lasts),
                _ => Event::Restart(lasts),
            };
            add(millis(rng, 500..8000), event);
        }
        if rng.u8(..3) == 0 {
            add(
                millis(rng, 500..8000),
                Event::Lock(rng.usize(..3), millis(rng, 1000..8000)),
            );
        }
    }

    /// Whether the items of this history belong together.
    fn is_of_a_piece(&self) -> bool {
        self.has_crowd || self.has_outages
    }

    /// Holds up a relay for longer than its lease, while many messages go to a slow destination.
    fn besiege(&mut self, rng: &mut Rng) {
        let at = millis(rng, 0..6000);
        // Another relay takes over.
        self.relays = self.relays.max(2);
        let relay = rng.usize(..self.relays);
        let new = New::of("a");
        let event = Event::enqueue(vec![new; rng.usize(10..40)]);
        self.items.push(Item { at, event });
        let mood = [Mood::Slow, Mood::Hanging][rng.usize(..2)];
        let event = Event::Mood("a", mood, Duration::from_secs(9));
        self.items.push(Item { at, event });
        let lasts = millis(rng, 3000..9000);
        // The sessions stay open meanwhile.
        let long = self.lease.mul_f64(rng.f64() * 1.5 + 0.75);
        let event = match rng.u8(..4) {
            0 => Event::Freeze(relay, long),
            1 => Event::Sleep(relay, long),
            2 => Event::CutOff(relay, lasts),
            _ => Event::Stuck(relay, lasts),
        };
        let at = at + millis(rng, 0..1500);
        // A machine that stands still meanwhile wakes with a full queue, and its lease may have ended long before the expiry.
        let stands_still = Rng::with_seed(self.seed ^ 4).bool();
        let loses_session = matches!(event, Event::CutOff(..) | Event::Stuck(..));
        self.items.push(Item { at, event });
        if loses_session && stands_still {
            let event = Event::Freeze(relay, lasts);
            self.items.push(Item { at, event });
        }
    }

    /// Enqueues messages of one key, of which the first are committed last.
    fn come_late(&mut self, rng: &mut Rng) {
        for _ in 0..rng.usize(1..6) {
            let at = millis(rng, 0..10_000);
            let new = New {
                ordering_key: Some("k"),
                ..New::of("a")
            };
            let late = millis(rng, 1..600);
            for (at, lasts) in [(at, late), (at + millis(rng, 0..300), Duration::ZERO)] {
                let event = Event::Enqueue {
                    messages: vec![new.clone(); rng.usize(1..3)],
                    lasts,
                    commits: true,
                };
                self.items.push(Item { at, event });
            }
        }
    }

    fn add(&mut self, rng: &mut Rng, event: Event) {
        let mut at =
            Duration::from_micros(rng.u64(..u64::try_from(LENGTH.as_micros()).unwrap_or(0)));
        // While messages are in flight.
        if !matches!(event, Event::Enqueue { .. }) && rng.bool() {
            let item = &self.items[rng.usize(..self.items.len())];
            if let Event::Enqueue { lasts, .. } = item.event {
                at = item.at + lasts + millis(rng, 0..40);
            }
        }
        let at = at.min(LENGTH - Duration::from_millis(1));
        self.items.push(Item { at, event });
    }

    /// Whether the settings of this relay refuse an endpoint that those of the first relay allow.
    pub(super) fn is_strict(&self, relay: usize) -> bool {
        self.settings_differ && relay > 0
    }

    pub(super) fn has(&self, is_it: impl Fn(&Event) -> bool) -> bool {
        self.items.iter().any(|item| is_it(&item.event))
    }

    /// Whether leases expire and claims are lost only as the relays expect.
    pub(super) fn is_lawful(&self) -> bool {
        !self.has(|event| {
            matches!(
                event,
                Event::Restart(_) | Event::FailOver(_) | Event::Step(_)
            )
        })
    }

    /// Whether no answer is lost and no lease expires early: then no message is sent twice.
    pub(super) fn is_fair(&self) -> bool {
        let breaks = |event: &Event| {
            matches!(
                event,
                Event::Kill(..)
                    | Event::Freeze(..)
                    | Event::Sleep(..)
                    | Event::CutOff(..)
                    | Event::Stuck(..)
                    | Event::Refuse(..)
            )
        };
        // A relay that ends leaves messages that a person has locked to its lease's end.
        let leaves = self.has(|event| matches!(event, Event::Lock(..)))
            && self.has(|event| matches!(event, Event::Reload(_)));
        self.is_lawful()
            && self.troubles == 0
            && self.slow == 0
            && !self.slow_claims
            && !self.has(breaks)
            && !leaves
    }

    /// Whether nothing prevents a relay from claiming due messages.
    pub(super) fn is_calm(&self) -> bool {
        // Failures open a breaker.
        let holds_up = |event: &Event| match event {
            Event::Mood(..)
            | Event::Stop(..)
            | Event::Deaf(..)
            | Event::Disable(..)
            | Event::Remove(..)
            | Event::Give(_) => true,
            Event::Enqueue { messages, .. } => {
                (messages.iter()).any(|new| new.fails > 0 || new.is_refused)
            }
            _ => false,
        };
        self.is_fair() && !self.has_dead_entries && !self.has(holds_up)
    }

    /// Whether the same destinations are registered all the time, so that each message has the same recipients whenever
    /// it is fanned out.
    pub(super) fn has_same_recipients(&self) -> bool {
        let changes = |event: &Event| {
            matches!(
                event,
                Event::Disable(..) | Event::Remove(..) | Event::Give(_)
            )
        };
        let is_removed = self.has_crowd || self.all_have_namesake;
        self.has_endpoints && !is_removed && self.is_lawful() && !self.has(changes)
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {}: {} relays, outages {}, rate {:?}, single_active {}, lease {:?}, troubles {}, slow {}, dead entries {}, crowded {}, registers {:?}, settings differ {}, namesake {} (of all {}), filters {}, tenants {}, verification {}, handlers {}, batches {}, of each {}, feeds {:?}, key_run {}",
            self.seed,
            self.relays,
            self.has_outages,
            self.rate,
            self.single_active,
            self.lease,
            self.troubles,
            self.slow,
            self.has_dead_entries,
            self.is_crowded,
            self.registers,
            self.settings_differ,
            self.has_namesake,
            self.all_have_namesake,
            self.has_filters,
            self.has_tenants,
            self.verification,
            self.has_handlers,
            self.has_batches,
            self.has_outcomes_of_each,
            self.feeds,
            self.key_run
        )?;
        for item in &self.items {
            writeln!(
                f,
                "  {:>9.3} ms  {:?}",
                item.at.as_secs_f64() * 1e3,
                item.event
            )?;
        }
        Ok(())
    }
}
