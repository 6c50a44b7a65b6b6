//! The registered destinations that a relay knows: rows of a table that change while the relay runs.
//!
//! All registered destinations share the last bulkhead, with its threads. Each has its own gate, and takes turns with
//! the others (see [`turns`](super::turns)).

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use uuid::Uuid;

use super::bell::Bell;
use super::bulkhead::Bulkhead;
use super::gate::{Answers, Room, Standing};
use super::job::Job;
use super::to::To;
use super::turns::Turns;
use crate::clock;
use crate::config::{Config, ConfigError};
use crate::dispatch::{CustomerError, Customers, Dispatcher, Failure, Outcome};
use crate::lock::lock;
use crate::message::Message;
use crate::registered::RegisteredDestination;
use crate::routes::{Refuses, Routes, Way, matches_any};
use crate::sealed::{Place, Unreadable, open_all};
use crate::status::ReasonCode;
use crate::store::destinations::{AsSeen, Registered as Row, Stamp};
use crate::store::relay::claim::Topic;
use crate::store::relay::own::is_own;
use crate::store::relay::served::Others;

/// One destination may have at most 1/`SHARE` of a batch in flight, and 1/`CLAIMED_SHARE` by claims of the messages that
/// name it: a backlog that fills the whole share takes CPU from the other destinations.
const SHARE: usize = 4;
const CLAIMED_SHARE: usize = 8;
/// Claims always leave room for this many messages per concurrent send.
const ROUNDS_OF_SENDS: usize = 4;

/// One registered destination.
pub(crate) struct Customer {
    /// Constant for a registration.
    pub(super) id: u32,
    /// The registration of the name: messages are addressed to it.
    pub(super) registration: Uuid,
    pub(super) stamp: i64,
    updated_at: Option<SystemTime>,
    topics: Vec<String>,
    tenant_id: Option<Uuid>,
    pub(super) filter: Option<String>,
    /// `None`: the destination is disabled.
    pub(super) bulkhead: Option<Bulkhead>,
    /// Why this relay does not send: its settings do not allow the URL, or it cannot decrypt the secret. The messages
    /// wait, because another relay may be able to send. See [`Refusing`].
    refused: Option<String>,
}

impl Customer {
    /// The name. Empty for a disabled destination, which gets no messages.
    pub(super) fn name(&self) -> &str {
        self.bulkhead.as_ref().map_or("", |one| &one.name)
    }

    pub(super) fn as_seen(&self) -> AsSeen<'_> {
        AsSeen {
            name: self.name(),
            updated_at: self.updated_at,
        }
    }

    /// Whether this relay does not send to the destination, although others may.
    pub(super) fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// Whether a message that names the destination is not for it: the name was registered again, or the row was given to
    /// another tenant, after the message was addressed; or both belong to different tenants.
    pub(super) fn is_another(&self, message: &Message) -> bool {
        let tenants = self.tenant_id.zip(message.tenant_id);
        message
            .registration
            .is_some_and(|one| one != self.registration)
            || tenants.is_some_and(|(own, of_message)| own != of_message)
    }

    /// Whether the message has a topic and the tenant of this destination.
    fn wants(&self, message: &Message) -> bool {
        let is_tenants = self
            .tenant_id
            .is_none_or(|tenant| message.tenant_id == Some(tenant));
        is_tenants && subscribe(&self.topics, &message.topic)
    }
}

/// Whether these patterns of registered destinations match a topic. The relay's own events match only patterns that
/// begin with `outbox.`, so that a customer with `*` does not get them.
fn subscribe(patterns: &[String], topic: &str) -> bool {
    if !is_own(topic) {
        return matches_any(patterns, topic);
    }
    let asks = |pattern: &&String| pattern.starts_with("outbox.");
    let mut asking = patterns.iter().filter(asks);
    asking.any(|pattern| matches_any(std::slice::from_ref(pattern), topic))
}

/// All registered destinations, at one point in time.
#[derive(Default)]
pub(crate) struct Registry {
    pub(super) stamp: Stamp,
    by_name: HashMap<Arc<str>, Arc<Customer>>,
    by_id: HashMap<u32, Arc<Customer>>,
    /// The enabled destinations, by tenant, in the order of their names.
    of_tenants: HashMap<Option<Uuid>, Vec<Arc<str>>>,
    /// The topics of all enabled destinations.
    topics: Vec<String>,
    pub(super) has_filters: bool,
    last_id: u32,
    /// What the active relays serve.
    others: Arc<Others>,
    /// The removed destinations that may still have messages.
    pub(super) removed: HashSet<String>,
    /// Whether this relay sends to registered destinations.
    can_send: bool,
    /// The enabled destinations to which this relay does not send because of its settings, if it sends to others.
    pub(super) refuses: Arc<Refuses>,
}

/// The changes of the table.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(super) stamp: Stamp,
    pub(super) others: Others,
    /// All removed destinations that may still have messages.
    pub(super) removed: HashSet<String>,
    pub(super) gone: Vec<String>,
    /// The new and the changed rows, each with its stamp, which changes with the row.
    pub(super) rows: Vec<(Row, i64)>,
    /// The failing destinations, if some fail now or do not fail any more.
    pub(super) failing: Option<Failing>,
}

/// The destinations that fail according to their rows. A change of this column changes no gate and no other state of a
/// destination, so it is read apart from the rows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failing {
    pub(super) stamp: i64,
    /// Each name, and for how long it has failed when this was read.
    pub(super) ages: HashMap<String, Duration>,
}

/// A row that no relay can use, with the reason.
pub(super) struct Bad {
    name: String,
    updated_at: Option<SystemTime>,
    pub(super) why: String,
}

impl Bad {
    pub(super) fn as_seen(&self) -> AsSeen<'_> {
        AsSeen {
            name: &self.name,
            updated_at: self.updated_at,
        }
    }
}

/// Replaces the dispatcher of a destination to which this relay does not send. The claimer claims no messages for such a
/// destination, so only messages that were claimed before get here.
struct Refusing(String);

impl Dispatcher for Refusing {
    fn dispatch(&self, _: &Message) -> Outcome {
        Outcome::Wait(Failure::new(ReasonCode::Failed, self.0.clone()))
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registry({} destinations)", self.by_name.len())
    }
}

impl Registry {
    /// Whether any destination is registered.
    pub(super) fn is_in_use(&self) -> bool {
        !self.by_name.is_empty()
    }

    /// The stamp of each name.
    pub(super) fn stamps(&self) -> HashMap<String, i64> {
        let stamp = |(name, one): (&Arc<str>, &Arc<Customer>)| (name.to_string(), one.stamp);
        self.by_name.iter().map(stamp).collect()
    }

    pub(super) fn named(&self, name: &str) -> Option<&Arc<Customer>> {
        self.by_name.get(name)
    }

    pub(super) fn each(&self) -> impl Iterator<Item = &Arc<Customer>> {
        self.by_name.values()
    }

    pub(super) fn get(&self, id: u32) -> Option<&Arc<Customer>> {
        self.by_id.get(&id)
    }

    /// Whether the destination was removed. Messages that name it are dead-lettered.
    pub(super) fn is_removed(&self, name: &str) -> bool {
        self.removed.contains(name)
    }

    /// Whether a message of this topic may be for a registered destination.
    pub(super) fn may_want(&self, topic: &str) -> bool {
        subscribe(&self.topics, topic)
    }

    /// The enabled destinations whose topics and tenant match a message. Filters on the payload are not applied.
    pub(super) fn wanting<'a>(
        &'a self,
        message: &'a Message,
    ) -> impl Iterator<Item = &'a Arc<Customer>> {
        let tenants = [Some(None), message.tenant_id.map(Some)];
        let names = tenants.into_iter().flatten();
        let names = names
            .filter_map(|tenant| self.of_tenants.get(&tenant))
            .flatten();
        let all = names.filter_map(|name| self.by_name.get(name));
        all.filter(|one| one.wants(message))
    }

    /// Whether messages of this topic, which no route of this relay serves and no registered destination wants, are for
    /// nobody. Only a relay that sends to registered destinations decides this.
    pub(super) fn is_nobodys(&self, topic: &str) -> bool {
        self.can_send && self.is_in_use() && self.others_route(topic).is_none()
    }

    /// Whether messages of this topic, which no route of this relay serves, wait for a relay that does not run: it has
    /// served the topic before.
    pub(super) fn awaits_route(&self, topic: &str) -> bool {
        self.others_route(topic).is_none() && matches_any(&self.others.ever, topic)
    }

    /// Whether this relay claims messages of this topic, which another relay's route serves, because registered
    /// destinations may want them.
    pub(super) fn hands_on(&self, topic: &str) -> bool {
        let others = self.others_route(topic);
        self.may_want(topic) && others.is_some_and(|names| !names.is_empty())
    }

    /// The destinations of another relay's route for this topic.
    pub(super) fn others_route(&self, topic: &str) -> Option<Vec<&str>> {
        self.others
            .routes
            .iter()
            .find_map(|routes| routes.names(topic))
    }

    /// The registry with the changes applied. Also returns the rows that no relay can use.
    fn with(
        &self,
        changes: Changes,
        pool: &Bulkhead,
        maker: &Maker,
        routes: &Routes,
    ) -> (Self, Vec<Bad>) {
        let mut next = Self {
            stamp: changes.stamp,
            by_name: self.by_name.clone(),
            last_id: self.last_id,
            others: Arc::new(changes.others),
            removed: changes.removed,
            can_send: maker.customers.can_send(),
            ..Self::default()
        };
        for name in &changes.gone {
            next.by_name.remove(name.as_str());
        }
        let mut bad = Vec::new();
        for (Row { row, id, secrets }, stamp) in changes.rows {
            // Messages that wait for a destination by its number must not reach another registration.
            let registration = id;
            let before = next.by_name.get(row.name.as_str());
            let before = before.filter(|one| one.registration == registration);
            let id = before.map(|one| one.id).unwrap_or_else(|| {
                next.last_id += 1;
                next.last_id
            });
            let not_here = routes.has(&row.name).then_some(SAME_NAME);
            let made = (row.enabled).then(|| maker.make(&row, secrets.as_ref(), pool, not_here));
            let made = made.transpose().unwrap_or_else(|why| {
                bad.push(Bad {
                    name: row.name.clone(),
                    updated_at: row.updated_at,
                    why,
                });
                None
            });
            let Made { bulkhead, refused } = made.unwrap_or_default();
            let customer = Customer {
                id,
                registration,
                stamp,
                updated_at: row.updated_at,
                topics: row.topics,
                tenant_id: row.tenant_id,
                filter: row.filter,
                bulkhead,
                refused,
            };
            next.by_name.insert(row.name.into(), Arc::new(customer));
        }
        next.index();
        (next, bad)
    }

    fn index(&mut self) {
        let mut topics = HashSet::new();
        let mut refuses = Refuses::default();
        for (name, one) in &self.by_name {
            self.by_id.insert(one.id, Arc::clone(one));
            if let Some(why) = one.refused.as_deref().filter(|_| self.can_send) {
                refuses.add(name, why);
            }
            if one.bulkhead.is_some() {
                let of_tenant = self.of_tenants.entry(one.tenant_id).or_default();
                of_tenant.push(Arc::clone(name));
                topics.extend(one.topics.iter().cloned());
                self.has_filters |= one.filter.is_some();
            }
        }
        self.of_tenants
            .values_mut()
            .for_each(|names| names.sort_unstable());
        self.topics = topics.into_iter().collect();
        self.refuses = Arc::new(refuses);
    }
}

impl To {
    /// Where messages of this topic and destination go.
    pub(super) fn of(routes: &Routes, registry: &Registry, topic: &Topic) -> Self {
        let Topic { topic, destination } = topic;
        match (routes.find(topic, destination), destination.as_str()) {
            (Way::NotTaken, _) => Self::Nowhere,
            (Way::NoRoute, "") if registry.awaits_route(topic) => Self::Nowhere,
            (_, "") if registry.may_want(topic) => Self::Split,
            (Way::NoRoute, "") if registry.is_nobodys(topic) => Self::Split,
            (Way::UnknownDestination, name) => match registry.named(name) {
                Some(one) if one.bulkhead.is_some() => Self::Registered(one.id),
                None if registry.is_removed(name) => Self::Split,
                Some(_) | None => Self::Nowhere,
            },
            (way, _) => way.into(),
        }
    }
}

/// Makes a bulkhead from a row.
pub(super) struct Maker {
    /// The settings for registered destinations.
    config: Config,
    customers: Arc<Customers>,
    /// Shared by the gates of all registered destinations.
    answers: Arc<Answers>,
}

impl Maker {
    pub(super) fn new(config: &Config, customers: Arc<Customers>) -> Self {
        Self {
            config: config.for_registered(),
            customers,
            answers: Arc::new(Answers::new()),
        }
    }

    fn make(
        &self,
        row: &RegisteredDestination,
        secrets: Option<&secrecy::SecretString>,
        pool: &Bulkhead,
        not_here: Option<&str>,
    ) -> Result<Made, String> {
        use secrecy::ExposeSecret;

        if let Some(problem) = &row.problem {
            return Err(problem.clone());
        }
        let secrets = secrets.map(ExposeSecret::expose_secret).unwrap_or_default();
        let place = Place {
            outbox: &self.config.table,
            destination: &row.name,
        };
        let (secrets, unreadable) = match open_all(&self.config.secret_keys, place, secrets) {
            Ok(secrets) => (secrets, None),
            Err(Unreadable::Locked(why)) => (Vec::new(), Some(why)),
            Err(Unreadable::Bad(why)) => return Err(format!("secret: {why}")),
        };
        let secrets = secrets.into_iter().map(|one| one.secret).collect();
        let wrong = |error: ConfigError| error.to_string();
        let destination = row.destination(&self.config, secrets).map_err(wrong)?;
        let made = match unreadable.or(not_here.map(str::to_owned)) {
            Some(why) => Err(CustomerError::NotHere(why)),
            None => self.customers.dispatcher(destination.clone()),
        };
        let (dispatcher, refused) = match made {
            Ok(dispatcher) => (dispatcher, None),
            Err(CustomerError::Invalid(error)) => return Err(wrong(error)),
            Err(CustomerError::NotHere(why)) => (
                Arc::new(Refusing(why.clone())) as Arc<dyn Dispatcher>,
                Some(why),
            ),
        };
        let answers = &self.answers;
        let bulkhead = Bulkhead::of_customer(&destination, &self.config, pool, dispatcher, answers);
        Ok(Made {
            bulkhead: Some(bulkhead),
            refused,
        })
    }
}

/// Why a relay refuses a row with the name of one of its configured destinations or groups of handlers.
const SAME_NAME: &str = "a destination in this relay's settings has the same name";

/// The result of making a bulkhead.
#[derive(Default)]
struct Made {
    bulkhead: Option<Bulkhead>,
    /// The reason why this relay does not send.
    refused: Option<String>,
}

#[derive(Default)]
struct Known {
    registry: Arc<Registry>,
    /// The destinations whose gates may restrict sends, or have changes for the table.
    watched: HashSet<u32>,
    /// The failing destinations, and when they were read.
    failing: Failing,
    failing_at: Option<Instant>,
}

/// The state of registered destinations that the threads of a relay share.
pub(crate) struct Registered {
    /// `None`: the application's own dispatcher takes all messages.
    maker: Option<Maker>,
    known: Mutex<Known>,
    turns: Mutex<Turns>,
    /// Wakes an idle thread.
    pub(super) bell: Bell,
}

impl Registered {
    pub(super) fn new(config: &Config, customers: Option<Arc<Customers>>) -> Self {
        Self {
            maker: customers.map(|customers| Maker::new(config, customers)),
            known: Mutex::default(),
            turns: Mutex::new(Turns::new(config.registered_threads)),
            bell: Bell::new(),
        }
    }

    /// Whether this relay knows the registered destinations.
    pub(super) fn is_on(&self) -> bool {
        self.maker.is_some()
    }

    /// Whether this relay sends to registered destinations.
    pub(super) fn can_send(&self) -> bool {
        let maker = self.maker.as_ref();
        maker.is_some_and(|maker| maker.customers.can_send())
    }

    pub(super) fn registry(&self) -> Arc<Registry> {
        Arc::clone(&lock(&self.known).registry)
    }

    pub(super) fn turns(&self) -> MutexGuard<'_, Turns> {
        lock(&self.turns)
    }

    /// Hands jobs to the threads.
    pub(super) fn put(&self, jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        let registry = self.registry();
        let mut turns = self.turns();
        for job in jobs {
            if let To::Registered(id) = job.to {
                let tenant = registry.get(id).and_then(|one| one.tenant_id);
                turns.put(id, tenant, job);
            }
        }
        drop(turns);
        self.bell.ring();
    }

    /// Applies changes. Returns the rows that no relay can use, and whether messages may go elsewhere than before.
    pub(super) fn change(
        &self,
        mut changes: Changes,
        pool: &Bulkhead,
        routes: &Routes,
    ) -> (Vec<Bad>, bool) {
        let Some(maker) = &self.maker else {
            return (Vec::new(), false);
        };
        let before = self.registry();
        let mut to_learn = Vec::new();
        if let Some(failing) = changes.failing.take() {
            let mut known = lock(&self.known);
            to_learn.extend(
                known
                    .failing
                    .ages
                    .keys()
                    .chain(failing.ages.keys())
                    .cloned(),
            );
            (known.failing, known.failing_at) = (failing, Some(clock::now()));
        }
        let is_same = changes.stamp == before.stamp
            && changes.others == *before.others
            && changes.removed == before.removed;
        if is_same {
            self.tell_failing(&before, to_learn.iter());
            return (Vec::new(), false);
        }
        let changed = changes.rows.iter().map(|(one, _)| one.row.name.clone());
        let changed: Vec<String> = changed.collect();
        let (next, bad) = before.with(changes, pool, maker, routes);
        for bulkhead in next.by_id.values().filter_map(|one| one.bulkhead.as_ref()) {
            bulkhead.gate.share(next.others.registered);
        }
        // A new gate does not know the pauses in the table, so it is watched.
        let new = changed.iter().filter_map(|name| next.named(name));
        self.turns().keep(|id| next.get(id).is_some());
        self.tell_failing(&next, changed.iter().chain(&to_learn));
        let mut known = lock(&self.known);
        known.watched.extend(new.map(|one| one.id));
        known.registry = Arc::new(next);
        (bad, true)
    }

    /// The stamp of the failing destinations as known here.
    pub(super) fn failing_stamp(&self) -> i64 {
        lock(&self.known).failing.stamp
    }

    /// Tells the gates of these destinations for how long they have failed according to their rows.
    fn tell_failing<'n>(&self, registry: &Registry, names: impl Iterator<Item = &'n String>) {
        let now = clock::now();
        let known = lock(&self.known);
        let since = now.saturating_duration_since(known.failing_at.unwrap_or(now));
        for name in names {
            let one = registry.named(name);
            if let Some(bulkhead) = one.and_then(|one| one.bulkhead.as_ref()) {
                let age = known.failing.ages.get(name);
                bulkhead.gate.learn_row(age.map(|age| *age + since), now);
            }
        }
    }

    /// The destinations to which this relay does not send because of its settings: those of the registry, and those whose
    /// names lead to addresses that the settings refuse.
    pub(super) fn refuses(&self) -> Arc<Refuses> {
        let mut refuses = Arc::clone(&self.registry().refuses);
        for customer in self.watched() {
            let trouble = customer
                .bulkhead
                .as_ref()
                .and_then(|one| one.gate.trouble());
            let blocked = trouble.filter(|one| one.code == ReasonCode::BlockedAddress);
            if let Some(blocked) = blocked {
                Arc::make_mut(&mut refuses).add(customer.name(), &blocked.what);
            }
        }
        refuses
    }

    /// Watches a destination, because its gate may restrict sends from here on.
    pub(super) fn watch(&self, id: u32) {
        lock(&self.known).watched.insert(id);
    }

    /// The watched destinations.
    pub(super) fn watched(&self) -> Vec<Arc<Customer>> {
        let known = lock(&self.known);
        let watched = known.watched.iter();
        watched
            .filter_map(|id| known.registry.get(*id).cloned())
            .collect()
    }

    /// Stops watching destinations whose messages flow again, or that do not exist any more.
    pub(super) fn forget_flowing(&self) {
        let Known {
            registry, watched, ..
        } = &mut *lock(&self.known);
        watched.retain(|id| {
            let customer = registry.get(*id);
            let bulkhead = customer.and_then(|one| one.bulkhead.as_ref());
            let is_refused = customer.is_some_and(|one| one.is_refused());
            bulkhead.is_some_and(|bulkhead| {
                is_refused
                    || !matches!(
                        bulkhead.gate.standing(),
                        Standing::Flowing | Standing::Trying
                    )
                    || bulkhead.gate.has_news()
            })
        });
    }
}

/// How many messages may be claimed for each registered destination.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rooms {
    registry: Arc<Registry>,
    /// The messages of each destination in flight.
    in_flight: HashMap<u32, usize>,
    /// The most messages that one destination may have in flight.
    most: usize,
    /// The same limit for claims of messages that name the destination.
    most_claimed: usize,
    /// The destinations that get no messages now.
    closed: HashSet<u32>,
    /// The destinations that get one message as a probe.
    probed: HashSet<u32>,
    /// The time at which the first closed gate opens.
    pub(super) opens_at: Option<Instant>,
}

impl Rooms {
    /// The current rooms. `in_flight` is the messages of each destination in flight.
    pub(super) fn now(
        registered: &Registered,
        in_flight: HashMap<u32, usize>,
        batch: usize,
    ) -> Self {
        let mut rooms = Self {
            registry: registered.registry(),
            in_flight,
            most: (batch / SHARE).max(1),
            most_claimed: (batch / CLAIMED_SHARE).max(1),
            ..Self::default()
        };
        for one in registered.watched() {
            if one.is_refused() {
                rooms.closed.insert(one.id);
                continue;
            }
            let Some(bulkhead) = &one.bulkhead else {
                continue;
            };
            let opens = bulkhead.gate.opens_at();
            rooms.opens_at = rooms.opens_at.into_iter().chain(opens).min();
            match bulkhead.gate.room() {
                Room::Closed => {
                    rooms.closed.insert(one.id);
                }
                Room::One => {
                    rooms.probed.insert(one.id);
                }
                Room::Free => {}
            }
        }
        rooms
    }

    /// Counts another message for the destination.
    pub(super) fn take(&mut self, id: u32) {
        *self.in_flight.entry(id).or_default() += 1;
    }

    /// The room for the next claim.
    pub(super) fn of(&self, id: u32) -> usize {
        let sends = self.bulkhead(id).map_or(0, |bulkhead| bulkhead.concurrency);
        // Never so few that the destination has nothing to send while others have their turns.
        let most_claimed = self.most_claimed.max(ROUNDS_OF_SENDS * sends);
        room_for_a_claim(self.most(id).min(most_claimed), self.in_flight(id))
    }

    /// Whether there is room for another message that is claimed already.
    pub(super) fn has_place(&self, id: u32) -> bool {
        self.in_flight(id) < self.most(id)
    }

    fn in_flight(&self, id: u32) -> usize {
        self.in_flight.get(&id).copied().unwrap_or(0)
    }

    fn bulkhead(&self, id: u32) -> Option<&Bulkhead> {
        self.registry.get(id)?.bulkhead.as_ref()
    }

    /// The most messages that the destination may have in flight.
    fn most(&self, id: u32) -> usize {
        match self.bulkhead(id) {
            None => 0,
            Some(_) if self.closed.contains(&id) => 0,
            Some(_) if self.probed.contains(&id) => 1,
            Some(bulkhead) => bulkhead.prefetch().clamp(1, self.most),
        }
    }

    pub(super) fn is_open(&self, id: u32) -> bool {
        !self.closed.contains(&id)
    }
}

/// No room until half of the destination's share is free: a small claim costs nearly as much as a large one, and other
/// destinations wait behind it.
fn room_for_a_claim(most: usize, in_flight: usize) -> usize {
    let left = most.saturating_sub(in_flight);
    if 2 * left >= most { left } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Customer {
        /// An enabled destination with a filter, for tests of what is known of filters.
        pub(in crate::relay) fn filtering() -> Arc<Self> {
            Arc::new(Self {
                id: 1,
                registration: Uuid::nil(),
                stamp: 1,
                updated_at: None,
                topics: vec!["*".to_owned()],
                tenant_id: None,
                filter: Some("$.a".to_owned()),
                bulkhead: None,
                refused: None,
            })
        }
    }

    impl Registry {
        /// The registry of a relay beside another one, with registered destinations that want none of the messages of
        /// these topics.
        pub(in crate::relay) fn beside(other: Routes, topics: &[&str]) -> Self {
            Self {
                topics: topics.iter().map(|&topic| topic.to_owned()).collect(),
                others: Arc::new(Others {
                    routes: vec![other],
                    ..Others::default()
                }),
                ..Self::default()
            }
        }
    }

    /// R46: a destination with a backlog is claimed from in large claims.
    #[test]
    fn a_destination_has_room_when_half_of_its_share_is_free() {
        let rooms = |most| (0..=most).map(move |in_flight| room_for_a_claim(most, in_flight));
        assert_eq!(rooms(1).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(rooms(5).collect::<Vec<_>>(), [5, 4, 3, 0, 0, 0]);
        assert_eq!(room_for_a_claim(4, 7), 0, "the share has become smaller");
    }
}
