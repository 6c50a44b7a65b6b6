//! Registered destinations, as a relay knows them: rows of a table that change while it runs.
//!
//! All of them share one bulkhead, the last one, with its threads. Each has a gate of its own, and its turn (see
//! [`turns`](super::turns)).

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Instant, SystemTime};

use uuid::Uuid;

use super::bell::Bell;
use super::bulkhead::Bulkhead;
use super::gate::{Room, Standing};
use super::job::Job;
use super::to::To;
use super::turns::Turns;
use crate::config::{Config, ConfigError};
use crate::dispatch::{Customers, Dispatcher, Failure, Outcome};
use crate::lock::lock;
use crate::message::Message;
use crate::registered::RegisteredDestination;
use crate::routes::{Routes, Way, matches_any};
use crate::sealed::{Place, Unreadable, open_all};
use crate::status::ReasonCode;
use crate::store::destinations::{AsSeen, Registered as Row, Stamp};
use crate::store::relay::claim::Topic;
use crate::store::relay::own::is_own;
use crate::store::relay::served::Others;

/// The bulkhead's share of its batch that one destination may have in flight.
const SHARE: usize = 4;

/// One registered destination.
pub(crate) struct Customer {
    /// The same for a name, as long as that is there.
    pub(super) id: u32,
    stamp: i64,
    updated_at: Option<SystemTime>,
    topics: Vec<String>,
    tenant_id: Option<Uuid>,
    pub(super) has_filter: bool,
    /// What is needed to send. `None`: it is disabled.
    pub(super) bulkhead: Option<Bulkhead>,
    /// This relay cannot decrypt its secret. Messages for it wait, for others may: see [`Locked`].
    pub(super) is_locked: bool,
}

impl Customer {
    /// Empty where it is disabled: then nothing goes there.
    pub(super) fn name(&self) -> &str {
        self.bulkhead.as_ref().map_or("", |one| &one.name)
    }

    pub(super) fn as_seen(&self) -> AsSeen<'_> {
        AsSeen {
            name: self.name(),
            updated_at: self.updated_at,
        }
    }

    /// Whether its topics and tenant are those of the message.
    fn wants(&self, message: &Message) -> bool {
        let is_tenants = self
            .tenant_id
            .is_none_or(|tenant| message.tenant_id == Some(tenant));
        is_tenants && subscribe(&self.topics, &message.topic)
    }
}

/// Whether these patterns of registered destinations mean a topic. `*` means the application's: what the outbox tells
/// of itself goes to those only that ask for it by `outbox.`, and not to each customer.
fn subscribe(patterns: &[String], topic: &str) -> bool {
    if !is_own(topic) {
        return matches_any(patterns, topic);
    }
    let asks = |pattern: &&String| pattern.starts_with("outbox.");
    let mut asking = patterns.iter().filter(asks);
    asking.any(|pattern| matches_any(std::slice::from_ref(pattern), topic))
}

/// All of them, at one moment.
#[derive(Default)]
pub(crate) struct Registry {
    pub(super) stamp: Stamp,
    by_name: HashMap<Arc<str>, Arc<Customer>>,
    by_id: HashMap<u32, Arc<Customer>>,
    /// The enabled ones, by their tenants, in the order of their names.
    of_tenants: HashMap<Option<Uuid>, Vec<Arc<str>>>,
    /// The topics of all enabled ones.
    topics: Vec<String>,
    pub(super) has_filters: bool,
    last_id: u32,
    /// What relays at work serve.
    others: Arc<Others>,
    /// Those that are gone, and may have messages still.
    removed: HashSet<String>,
}

/// What has changed in the table.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(super) stamp: Stamp,
    pub(super) others: Others,
    pub(super) gone: Vec<String>,
    /// New ones, and those that are not as they were; each with what changes with it.
    pub(super) rows: Vec<(Row, i64)>,
}

/// A row that cannot be used, and why.
pub(super) struct Bad {
    pub(super) name: String,
    updated_at: Option<SystemTime>,
    pub(super) why: String,
    /// Only for this relay: it cannot decrypt the secret.
    pub(super) is_locked: bool,
}

impl Bad {
    pub(super) fn as_seen(&self) -> AsSeen<'_> {
        AsSeen {
            name: &self.name,
            updated_at: self.updated_at,
        }
    }
}

/// In the place of a dispatcher that cannot sign. The claimer leaves such destinations alone, so only a message that was
/// claimed before comes here.
struct Locked(String);

impl Dispatcher for Locked {
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
    /// Whether there are any.
    pub(super) fn is_in_use(&self) -> bool {
        !self.by_name.is_empty()
    }

    /// What is known of each name.
    pub(super) fn stamps(&self) -> HashMap<String, i64> {
        let stamp = |(name, one): (&Arc<str>, &Arc<Customer>)| (name.to_string(), one.stamp);
        self.by_name.iter().map(stamp).collect()
    }

    pub(super) fn named(&self, name: &str) -> Option<&Arc<Customer>> {
        self.by_name.get(name)
    }

    pub(super) fn get(&self, id: u32) -> Option<&Arc<Customer>> {
        self.by_id.get(&id)
    }

    /// Whether messages that name it are to die.
    pub(super) fn is_removed(&self, name: &str) -> bool {
        self.removed.contains(name)
    }

    /// Whether a message of this topic may be for some of them.
    pub(super) fn may_want(&self, topic: &str) -> bool {
        subscribe(&self.topics, topic)
    }

    /// The enabled ones that a message is for, as far as its payload does not say otherwise.
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

    /// Whether nobody is to get messages of this topic, which no route of this relay serves, and that is no error.
    pub(super) fn is_nobodys(&self, topic: &str) -> bool {
        self.is_in_use() && self.others_route(topic).is_none()
    }

    /// The destinations of another relay's route for this topic.
    pub(super) fn others_route(&self, topic: &str) -> Option<Vec<&str>> {
        self.others
            .routes
            .iter()
            .find_map(|routes| routes.names(topic))
    }

    /// The same, with what has changed. With it: rows that cannot be used.
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
            removed: self.removed.clone(),
            ..Self::default()
        };
        for name in &changes.gone {
            next.by_name.remove(name.as_str());
        }
        let mut bad = Vec::new();
        for (Row { row, secrets }, stamp) in changes.rows {
            let id = next.by_name.get(row.name.as_str()).map(|before| before.id);
            let id = id.unwrap_or_else(|| {
                next.last_id += 1;
                next.last_id
            });
            let made = row.enabled.then(|| match routes.has(&row.name) {
                true => Err("a destination of a relay's settings has its name".to_owned()),
                false => maker.make(&row, secrets.as_ref(), pool),
            });
            let mut tell = |why, is_locked| {
                bad.push(Bad {
                    name: row.name.clone(),
                    updated_at: row.updated_at,
                    why,
                    is_locked,
                });
            };
            let made = made.transpose().unwrap_or_else(|why| {
                tell(why, false);
                None
            });
            let locked = made.as_ref().and_then(|made| made.locked.clone());
            let is_locked = locked.is_some();
            if let Some(why) = locked {
                tell(why, true);
            }
            let bulkhead = made.map(|made| made.bulkhead);
            let customer = Customer {
                id,
                stamp,
                updated_at: row.updated_at,
                topics: row.topics,
                tenant_id: row.tenant_id,
                has_filter: row.filter.is_some(),
                bulkhead,
                is_locked,
            };
            next.by_name.insert(row.name.into(), Arc::new(customer));
        }
        next.index();
        (next, bad)
    }

    /// The same, with those that are gone.
    pub(super) fn without(&self, removed: HashSet<String>) -> Self {
        let mut next = Self {
            stamp: self.stamp,
            by_name: self.by_name.clone(),
            last_id: self.last_id,
            others: Arc::clone(&self.others),
            removed,
            ..Self::default()
        };
        next.index();
        next
    }

    fn index(&mut self) {
        let mut topics = HashSet::new();
        for (name, one) in &self.by_name {
            self.by_id.insert(one.id, Arc::clone(one));
            if one.bulkhead.is_some() {
                let of_tenant = self.of_tenants.entry(one.tenant_id).or_default();
                of_tenant.push(Arc::clone(name));
                topics.extend(one.topics.iter().cloned());
                self.has_filters |= one.has_filter;
            }
        }
        self.of_tenants
            .values_mut()
            .for_each(|names| names.sort_unstable());
        self.topics = topics.into_iter().collect();
    }
}

impl To {
    /// Where the messages of a topic go.
    pub(super) fn of(routes: &Routes, registry: &Registry, topic: &Topic) -> Self {
        let Topic { topic, destination } = topic;
        match (routes.find(topic, destination), destination.as_str()) {
            (Way::NotTaken, _) => Self::Nowhere,
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

/// Makes bulkheads of rows.
pub(super) struct Maker {
    /// As they are for registered destinations.
    config: Config,
    customers: Arc<Customers>,
}

impl Maker {
    pub(super) fn new(config: &Config, customers: Arc<Customers>) -> Self {
        Self {
            config: config.for_registered(),
            customers,
        }
    }

    fn make(
        &self,
        row: &RegisteredDestination,
        secrets: Option<&secrecy::SecretString>,
        pool: &Bulkhead,
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
        let (secrets, locked) = match open_all(&self.config.secret_keys, place, secrets) {
            Ok(secrets) => (secrets, None),
            Err(Unreadable::Locked(why)) => (Vec::new(), Some(why)),
            Err(Unreadable::Bad(why)) => return Err(format!("secret: {why}")),
        };
        let secrets = secrets.into_iter().map(|one| one.secret).collect();
        let wrong = |error: ConfigError| error.to_string();
        let destination = row.destination(&self.config, secrets).map_err(wrong)?;
        let dispatcher = match &locked {
            Some(why) => Arc::new(Locked(why.clone())) as Arc<dyn Dispatcher>,
            None => (self.customers.dispatcher(destination.clone())).map_err(wrong)?,
        };
        let bulkhead = Bulkhead::of_customer(&destination, &self.config, pool, dispatcher);
        Ok(Made { bulkhead, locked })
    }
}

/// What a row becomes.
struct Made {
    bulkhead: Bulkhead,
    /// Why its secret cannot be decrypted here.
    locked: Option<String>,
}

#[derive(Default)]
struct Known {
    registry: Arc<Registry>,
    /// Those whose gates may not let everything through, or have news for the table.
    watched: HashSet<u32>,
}

/// What the threads of a relay share about registered destinations.
pub(crate) struct Registered {
    /// `None`: the application has a dispatcher of its own, or this build has no HTTP.
    maker: Option<Maker>,
    known: Mutex<Known>,
    turns: Mutex<Turns>,
    /// Calls a thread that has nothing to do.
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

    /// Whether this relay delivers to them.
    pub(super) fn is_on(&self) -> bool {
        self.maker.is_some()
    }

    pub(super) fn registry(&self) -> Arc<Registry> {
        Arc::clone(&lock(&self.known).registry)
    }

    pub(super) fn turns(&self) -> MutexGuard<'_, Turns> {
        lock(&self.turns)
    }

    /// Hands jobs over to the threads.
    pub(super) fn put(&self, jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        let mut turns = self.turns();
        for job in jobs {
            if let To::Registered(id) = job.to {
                turns.put(id, job);
            }
        }
        drop(turns);
        self.bell.ring();
    }

    /// Takes over what has changed. Returns rows that cannot be used, and whether messages go elsewhere than before.
    pub(super) fn change(
        &self,
        changes: Changes,
        pool: &Bulkhead,
        routes: &Routes,
    ) -> (Vec<Bad>, bool) {
        let Some(maker) = &self.maker else {
            return (Vec::new(), false);
        };
        let before = self.registry();
        let is_same = changes.stamp == before.stamp && changes.others == *before.others;
        if is_same {
            return (Vec::new(), false);
        }
        let changed = changes.rows.iter().map(|(one, _)| one.row.name.clone());
        let changed: Vec<String> = changed.collect();
        let (next, bad) = before.with(changes, pool, maker, routes);
        for bulkhead in next.by_id.values().filter_map(|one| one.bulkhead.as_ref()) {
            bulkhead.gate.share(next.others.registered);
        }
        // A gate that is new knows nothing of the table's pauses.
        let new = changed.iter().filter_map(|name| next.named(name));
        self.turns().keep(|id| next.get(id).is_some());
        let mut known = lock(&self.known);
        known.watched.extend(new.map(|one| one.id));
        known.registry = Arc::new(next);
        (bad, true)
    }

    /// These are gone, and may have messages still. `true`: others than before are.
    pub(super) fn set_removed(&self, removed: HashSet<String>) -> bool {
        let registry = &mut lock(&self.known).registry;
        let is_new = registry.removed != removed;
        if is_new {
            *registry = Arc::new(registry.without(removed));
        }
        is_new
    }

    /// Its gate may not let everything through from here on.
    pub(super) fn watch(&self, id: u32) {
        lock(&self.known).watched.insert(id);
    }

    /// Those that are watched.
    pub(super) fn watched(&self) -> Vec<Arc<Customer>> {
        let known = lock(&self.known);
        let watched = known.watched.iter();
        watched
            .filter_map(|id| known.registry.get(*id).cloned())
            .collect()
    }

    /// Watches no longer what flows again, or is not there.
    pub(super) fn forget_flowing(&self) {
        let Known { registry, watched } = &mut *lock(&self.known);
        watched.retain(|id| {
            let customer = registry.get(*id);
            let bulkhead = customer.and_then(|one| one.bulkhead.as_ref());
            let is_locked = customer.is_some_and(|one| one.is_locked);
            bulkhead.is_some_and(|bulkhead| {
                is_locked
                    || !matches!(
                        bulkhead.gate.standing(),
                        Standing::Flowing | Standing::Trying
                    )
                    || bulkhead.gate.has_news()
            })
        });
    }
}

/// How much may be claimed for each of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rooms {
    registry: Arc<Registry>,
    /// Messages of each that are claimed and not settled.
    in_flight: HashMap<u32, usize>,
    /// Messages that one of them may have in flight.
    most: usize,
    /// To these nothing is sent just now, or one message to see whether they are well.
    closed: HashSet<u32>,
    probed: HashSet<u32>,
    /// When the first of these opens by itself.
    pub(super) opens_at: Option<Instant>,
}

impl Rooms {
    /// `in_flight`: messages of each that are claimed and not settled.
    pub(super) fn now(
        registered: &Registered,
        in_flight: HashMap<u32, usize>,
        batch: usize,
    ) -> Self {
        let mut rooms = Self {
            registry: registered.registry(),
            in_flight,
            most: (batch / SHARE).max(1),
            ..Self::default()
        };
        for one in registered.watched() {
            if one.is_locked {
                rooms.closed.insert(one.id);
                continue;
            }
            let Some(bulkhead) = &one.bulkhead else {
                continue;
            };
            match bulkhead.gate.room() {
                Room::Closed => {
                    rooms.closed.insert(one.id);
                    let opens = bulkhead.gate.opens_at();
                    rooms.opens_at = rooms.opens_at.into_iter().chain(opens).min();
                }
                Room::One => {
                    rooms.probed.insert(one.id);
                }
                Room::Free => {}
            }
        }
        rooms
    }

    /// Another message goes there.
    pub(super) fn take(&mut self, id: u32) {
        *self.in_flight.entry(id).or_default() += 1;
    }

    pub(super) fn of(&self, id: u32) -> usize {
        let bulkhead = self.registry.get(id).and_then(|one| one.bulkhead.as_ref());
        let most = match bulkhead {
            None => 0,
            Some(_) if self.closed.contains(&id) => 0,
            Some(_) if self.probed.contains(&id) => 1,
            Some(bulkhead) => bulkhead.prefetch().clamp(1, self.most),
        };
        let in_flight = self.in_flight.get(&id).copied().unwrap_or(0);
        most.saturating_sub(in_flight)
    }

    pub(super) fn is_open(&self, id: u32) -> bool {
        !self.closed.contains(&id)
    }
}
