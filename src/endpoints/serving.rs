//! What sends to endpoints: rows of a table that change while the relay runs. What they are is a value
//! (`endpoints/roster.rs`).
//!
//! All endpoints share the last bulkhead, with its threads. Each has its own gate, and takes turns with
//! the others (see [`turns`](super::turns)).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use metrics::{Counter, counter};

use super::endpoint::Endpoint;
use super::failing::{Answers, Follower};
use super::filter_troubles::Troubles;
use super::roster::{KnownEndpoint, Registry};
use super::sealed::{SecretRow, Unreadable, open_all, open_auth};
use super::sql::failing::RowFailures;
use super::sql::registrations::{ReadTo, Unread};
use super::sql::rows::{AsSeen, EndpointRow as Row, Stamp};
use super::turns::Turns;
use crate::clock;
use crate::config::{Config, ConfigError, DeliveryPolicy};
use crate::dispatch::{Dispatcher, EndpointRefusal, Failure, Outcome};
use crate::endpoints::sql::served::Others;
use crate::engine::claim::sql::claim::Reads;
use crate::engine::directory::{Directory, Doors, Roster};
use crate::engine::observe::health::{Problem, ProblemKind};
use crate::engine::plan::to::To;
use crate::engine::send::bulkhead::{Bulkhead, SendsTo};
use crate::engine::send::gate::{Gate, Learner, Room, Standing, Trouble};
use crate::engine::send::job::Job;
use crate::engine::send::limits::Limits;
use crate::engine::send::paused::Pauses;
use crate::engine::send::sql::pause::Paused;
use crate::engine::serves::routes::{Refuses, Routes};
use crate::engine::wake::bell::Bell;
use crate::filter::Filter;
use crate::http::{EndpointClients, EndpointVerifier};
use crate::lock::lock;
use crate::message::Message;
use crate::metrics::FILTER_TOO_MUCH;
use crate::status::ReasonCode;

/// One enabled endpoint, and what sends to it.
pub(crate) struct ServedEndpoint {
    pub(crate) endpoint: Arc<KnownEndpoint>,
    pub(crate) bulkhead: Bulkhead,
    pub(super) follower: Arc<Follower>,
}

/// The enabled endpoints, by number.
pub(super) type Pool = HashMap<u32, Arc<ServedEndpoint>>;

/// The changes of the table.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) stamp: Stamp,
    pub(crate) others: Others,
    /// All removed endpoints that may still have messages.
    pub(crate) removed: HashSet<String>,
    pub(crate) gone: Vec<String>,
    /// The new and the changed rows, each with its stamp, which changes with the row.
    pub(crate) rows: Vec<(Row, i64)>,
    /// The failing endpoints, if some fail now or do not fail any more.
    pub(crate) failing: Option<Failing>,
    /// The number that a claim has if it sees no other registrations.
    pub(crate) registrations: Option<i64>,
    /// If there are new or changed rows: all pauses, read after the rows.
    pub(crate) paused: Option<Vec<Paused>>,
}

/// The endpoints that fail according to their rows. A change of this column changes no gate and no other state of an
/// endpoint, so it is read apart from the rows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failing {
    pub(super) stamp: i64,
    /// What the row of each name said when this was read.
    pub(super) rows: HashMap<String, RowFailures>,
    /// The names whose rows were read; `None`: all.
    pub(super) only: Option<Vec<String>>,
}

/// All rows are compared this often. Otherwise a look reads those that the triggers have recorded, and the table may have
/// been changed without them (`DISABLE TRIGGER`, logical replication).
const WHOLE: Duration = Duration::from_secs(600);

/// A row that no relay can use, with the reason.
pub(crate) struct Bad {
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

/// Replaces the dispatcher of an endpoint to which this relay does not send. The claimer claims no messages for such an
/// endpoint, so only messages that were claimed before get here.
struct Refusing(String);

impl Dispatcher for Refusing {
    fn dispatch(&self, _: &Message) -> Outcome {
        Outcome::Wait(Failure::new(ReasonCode::Failed, self.0.clone()))
    }
}

/// Makes a bulkhead from a row.
pub(super) struct Maker {
    /// The settings for endpoints.
    config: Config,
    clients: Arc<EndpointClients>,
    /// Shared by the gates of all endpoints.
    answers: Arc<Answers>,
}

impl Maker {
    pub(super) fn new(config: &Config, clients: Arc<EndpointClients>) -> Self {
        Self {
            config: config.for_endpoints(),
            clients,
            answers: Arc::new(Answers::new()),
        }
    }

    /// Applies changes.
    fn apply(
        &self,
        (registry, pool): (&Registry, &Pool),
        changes: Changes,
        all: &Bulkhead,
    ) -> Applied {
        let mut next = registry.copy();
        (next.stamp, next.others) = (changes.stamp, Arc::new(changes.others));
        (next.removed, next.can_send) = (changes.removed, self.clients.can_send());
        next.registrations = changes.registrations;
        let (mut pool, mut bad) = (pool.clone(), Vec::new());
        let mut verifiers = Vec::new();
        for name in &changes.gone {
            if let Some(gone) = next.by_name.remove(name.as_str()) {
                pool.remove(&gone.id);
            }
        }
        for (Row { row, id, secrets }, stamp) in changes.rows {
            // Messages that wait for an endpoint by its number must not reach another registration.
            let registration = id;
            let before = next.by_name.get(row.name.as_str());
            before.and_then(|one| pool.remove(&one.id));
            let before = before.filter(|one| one.registration == registration);
            let id = before.map(|one| one.id).unwrap_or_else(|| {
                next.last_id += 1;
                next.last_id
            });
            let not_here = next.routes.has(&row.name).then_some(SAME_NAME);
            let made = (row.enabled).then(|| self.make(&row, secrets.as_ref(), all, not_here));
            let made = made.transpose().unwrap_or_else(|why| {
                bad.push(Bad {
                    name: row.name.clone(),
                    updated_at: row.updated_at,
                    why,
                });
                None
            });
            let Made {
                sends,
                refused,
                verifier,
            } = made.unwrap_or_default();
            // Until then, it is like a disabled one.
            let skips = !row.is_verified() && row.verification.skips();
            let sends = sends.filter(|_| !skips);
            let is_feed = row.is_feed();
            let filter = row.filter.as_ref().map(Filter::new).transpose();
            // Which messages a bad filter was for is not known: none, until it is mended.
            let topics = if filter.is_ok() {
                row.topics
            } else {
                Vec::new()
            };
            let endpoint = Arc::new(KnownEndpoint {
                id,
                registration,
                stamp,
                name: row.name.into(),
                updated_at: row.updated_at,
                topics,
                tenant_id: row.tenant_id,
                filter: filter.ok().flatten(),
                created_at: row.created_at,
                limits: sends.as_ref().map(|(one, _)| one.limits.clone()),
                refused,
                is_unverified: verifier.is_some(),
                is_feed,
            });
            verifiers.push((id, verifier));
            next.by_name
                .insert(Arc::clone(&endpoint.name), Arc::clone(&endpoint));
            let member = sends.map(|(bulkhead, follower)| {
                Arc::new(ServedEndpoint {
                    endpoint,
                    bulkhead,
                    follower,
                })
            });
            pool.extend(member.map(|member| (id, member)));
        }
        next.index();
        Applied {
            registry: next,
            pool,
            verifiers,
            bad,
        }
    }

    fn make(
        &self,
        row: &Endpoint,
        secrets: Option<&secrecy::SecretString>,
        pool: &Bulkhead,
        not_here: Option<&str>,
    ) -> Result<Made, String> {
        use secrecy::ExposeSecret;

        if let Some(problem) = &row.problem {
            return Err(problem.clone());
        }
        if row.is_feed() {
            return Ok(self.feed(row, pool, not_here));
        }
        let secrets = secrets.map(ExposeSecret::expose_secret).unwrap_or_default();
        let place = SecretRow {
            outbox: &self.config.table,
            destination: &row.name,
        };
        let keys = &self.config.secret_keys;
        let (secrets, unreadable) = match open_all(keys, place, secrets) {
            Ok(secrets) => (secrets, None),
            Err(Unreadable::Locked(why)) => (Vec::new(), Some(why)),
            Err(Unreadable::Bad(why)) => return Err(format!("secret: {why}")),
        };
        let secrets = secrets.into_iter().map(|one| one.secret).collect();
        let auth = row
            .auth
            .as_ref()
            .map(|auth| open_auth(keys, place, auth.written().expose_secret()));
        let (auth, unreadable) = match auth.transpose() {
            Ok(auth) => (auth.map(|one| one.secret), unreadable),
            Err(Unreadable::Locked(why)) => (None, unreadable.or(Some(format!("auth: {why}")))),
            Err(Unreadable::Bad(why)) => return Err(format!("auth: {why}")),
        };
        let wrong = |error: ConfigError| error.to_string();
        let row = Endpoint {
            auth,
            ..row.clone()
        };
        let destination = row.destination(secrets);
        let destination = destination.map_err(wrong)?;
        let refusing = |why: &str| Arc::new(Refusing(why.to_owned())) as Arc<dyn Dispatcher>;
        let made = match unreadable.or(not_here.map(str::to_owned)) {
            Some(why) => Err(EndpointRefusal::NotHere(why)),
            None if row.is_verified() => (self.clients)
                .dispatcher(destination.clone())
                .map(|dispatcher| (dispatcher, None)),
            None => (self.clients)
                .verifier(destination.clone(), row.tenant_id)
                .map(|verifier| (refusing(NOT_VERIFIED), Some(Arc::new(verifier)))),
        };
        let (dispatcher, verifier, refused) = match made {
            Ok((dispatcher, verifier)) => (dispatcher, verifier, None),
            Err(EndpointRefusal::Invalid(error)) => return Err(wrong(error)),
            Err(EndpointRefusal::NotHere(why)) => (refusing(&why), None, Some(why)),
        };
        let answers = &self.answers;
        let DeliveryPolicy { rate, breaker, .. } = destination.policy;
        let follower = Follower::new(answers, self.config.endpoint_disable_after);
        let follower = Arc::new(follower);
        let learner = Arc::clone(&follower) as Arc<dyn Learner>;
        let gate = Gate::new(&destination.name, rate, breaker, Some(learner));
        let limits = Limits::new(&destination.policy, &self.config, None);
        let serves = SendsTo::Dispatcher(dispatcher);
        // It has no queue and no threads: all endpoints share those of `pool`.
        let bulkhead = Bulkhead::new(&destination.name, gate, limits, serves).beside(pool);
        Ok(Made {
            sends: Some((bulkhead, follower)),
            refused,
            verifier,
        })
    }
}

impl Maker {
    /// Nothing is sent to a feed: its messages are settled when they are claimed.
    fn feed(&self, row: &Endpoint, pool: &Bulkhead, not_here: Option<&str>) -> Made {
        let without = (!cfg!(feature = "feeds")).then_some("this relay is built without feeds");
        let refused = not_here.or(without).map(str::to_owned);
        let follower = Follower::new(&self.answers, self.config.endpoint_disable_after);
        let limits = Limits::of_feed(&row.policy, &self.config);
        let serves = SendsTo::Dispatcher(Arc::new(Refusing(NOT_SENT.to_owned())));
        let gate = Gate::open(&row.name, None);
        let bulkhead = Bulkhead::new(&row.name, gate, limits, serves).beside(pool);
        Made {
            sends: Some((bulkhead, Arc::new(follower))),
            refused,
            verifier: None,
        }
    }
}

/// Why a message that was claimed for an endpoint of this name is not sent: the name belongs to a feed by now.
const NOT_SENT: &str = "the endpoint is a feed";

/// Why a relay refuses a row with the name of one of its configured destinations or groups of handlers.
const SAME_NAME: &str = "a destination in this relay's settings has the same name";

/// Why no relay sends to an endpoint that has not shown that it wants messages.
const NOT_VERIFIED: &str = "the destination is not verified";

/// The result of making a bulkhead.
#[derive(Default)]
struct Made {
    sends: Option<(Bulkhead, Arc<Follower>)>,
    /// The reason why this relay does not send.
    refused: Option<String>,
    verifier: Option<Arc<EndpointVerifier>>,
}

/// The endpoints with changes applied.
struct Applied {
    registry: Registry,
    pool: Pool,
    /// Of the changed rows; `None`: it has shown that it wants messages, or need not.
    verifiers: Vec<(u32, Option<Arc<EndpointVerifier>>)>,
    /// The rows that no relay can use.
    bad: Vec<Bad>,
}

#[derive(Default)]
struct KnownEndpoints {
    registry: Arc<Registry>,
    pool: Arc<Pool>,
    /// Of the endpoints that must first show that they want messages.
    verifiers: HashMap<u32, Arc<EndpointVerifier>>,
    /// The endpoints whose gates may restrict sends, or have changes for the table.
    watched: BTreeSet<u32>,
    /// The failing endpoints, and when they were read.
    failing: Failing,
    failing_at: Option<Instant>,
    /// Up to where the rows are read, and when all were read.
    read_to: Option<Arc<ReadTo>>,
    read_all_at: Option<Instant>,
}

/// The state of endpoints that the threads of a relay share.
pub(crate) struct ServedEndpoints {
    maker: Maker,
    known: Mutex<KnownEndpoints>,
    turns: Mutex<Turns>,
    /// Wakes an idle thread.
    pub(crate) bell: Bell,
    /// Says that a send has begun, and no other send was young.
    pub(super) begins: Bell,
    troubles: Troubles,
    filter_too_much: Counter,
}

impl ServedEndpoints {
    pub(crate) fn new(config: &Config, clients: Arc<EndpointClients>, routes: Arc<Routes>) -> Self {
        let known = KnownEndpoints {
            registry: Arc::new(Registry::of(routes)),
            ..KnownEndpoints::default()
        };
        Self {
            maker: Maker::new(config, clients),
            known: Mutex::new(known),
            turns: Mutex::new(Turns::new(config.endpoint_threads)),
            bell: Bell::new(),
            begins: Bell::new(),
            troubles: Troubles::default(),
            filter_too_much: counter!(FILTER_TOO_MUCH, "outbox" => config.metrics_label()),
        }
    }

    pub(crate) fn registry(&self) -> Arc<Registry> {
        Arc::clone(&lock(&self.known).registry)
    }

    pub(crate) fn pool(&self) -> Arc<Pool> {
        Arc::clone(&lock(&self.known).pool)
    }

    /// Asks an endpoint that must first show that it wants messages.
    pub(super) fn verifier(&self, id: u32) -> Option<Arc<EndpointVerifier>> {
        lock(&self.known).verifiers.get(&id).cloned()
    }

    pub(crate) fn turns(&self) -> MutexGuard<'_, Turns> {
        lock(&self.turns)
    }

    /// Applies changes. Returns the rows that no relay can use, and whether messages may go elsewhere than before.
    pub(crate) fn change(&self, mut changes: Changes, all: &Bulkhead) -> (Vec<Bad>, bool) {
        let (before, pool) = (self.registry(), self.pool());
        let mut to_learn = Vec::new();
        if let Some(mut failing) = changes.failing.take() {
            let mut known = lock(&self.known);
            let before = std::mem::take(&mut known.failing.rows);
            match &failing.only {
                Some(names) => {
                    to_learn.extend(names.iter().cloned());
                    let others = before.into_iter().filter(|(name, _)| !names.contains(name));
                    failing.rows.extend(others.collect::<Vec<_>>());
                }
                None => to_learn.extend(before.keys().chain(failing.rows.keys()).cloned()),
            }
            (known.failing, known.failing_at) = (failing, Some(clock::now()));
        }
        let is_same = changes.stamp == before.stamp
            && changes.others == *before.others
            && changes.removed == before.removed
            && changes.registrations == before.registrations;
        if is_same {
            self.tell_failing(&before, &pool, to_learn.iter());
            return (Vec::new(), false);
        }
        let changed = changes.rows.iter().map(|(one, _)| one.row.name.clone());
        let changed: Vec<String> = changed.collect();
        let paused = changes.paused.take().unwrap_or_default();
        let Applied {
            registry: next,
            pool,
            verifiers,
            bad,
        } = self.maker.apply((&before, &pool), changes, all);
        for member in pool.values() {
            member.bulkhead.gate.share(next.others.registered);
        }
        // A new gate lets nothing through before it knows the pauses.
        let new = || changed.iter().filter_map(|name| next.named(name));
        let (paused, now) = (Pauses::of(&paused), clock::now());
        for member in new().filter_map(|one| pool.get(&one.id)) {
            let rows = paused.of_both(&member.endpoint.name, member.endpoint.tenant_id);
            member.bulkhead.gate.learn(rows, now);
        }
        self.turns().keep(|id| next.get(id).is_some());
        self.tell_failing(&next, &pool, changed.iter().chain(&to_learn));
        let mut known = lock(&self.known);
        known.watched.extend(new().map(|one| one.id));
        known.verifiers.retain(|id, _| next.has(*id));
        for (id, verifier) in verifiers {
            match verifier {
                Some(verifier) => drop(known.verifiers.insert(id, verifier)),
                None => drop(known.verifiers.remove(&id)),
            }
        }
        (known.registry, known.pool) = (Arc::new(next), Arc::new(pool));
        (bad, true)
    }

    /// Up to where the rows are read, for a claim.
    pub(super) fn rows_read_to(&self) -> Option<Arc<ReadTo>> {
        lock(&self.known).read_to.clone()
    }

    /// Whether the next look reads all rows.
    pub(super) fn is_whole_due(&self) -> bool {
        let read_all_at = lock(&self.known).read_all_at;
        read_all_at.is_none_or(|at| clock::since(at) >= WHOLE)
    }

    /// The rows are read up to here. `all`: all of them, when that began.
    pub(super) fn has_read_to(&self, read_to: Option<ReadTo>, all: Option<Instant>) {
        let mut known = lock(&self.known);
        known.read_to = read_to.map(Arc::new);
        known.read_all_at = all.or(known.read_all_at);
    }

    /// The stamp of the failing endpoints as known here.
    pub(super) fn failing_stamp(&self) -> i64 {
        lock(&self.known).failing.stamp
    }

    /// Whether some endpoint has failed since its last success, as far as this relay knows.
    pub(super) fn is_any_failing(&self) -> bool {
        !lock(&self.known).failing.rows.is_empty()
    }

    /// Tells the gates of these endpoints what their rows say about failures.
    fn tell_failing<'n>(
        &self,
        registry: &Registry,
        pool: &Pool,
        names: impl Iterator<Item = &'n String>,
    ) {
        let known = lock(&self.known);
        let read_at = known.failing_at.unwrap_or_else(clock::now);
        for name in names {
            let one = registry.named(name);
            if let Some(member) = one.and_then(|one| pool.get(&one.id)) {
                let row = known.failing.rows.get(name).copied();
                member.follower.learn_row(row.unwrap_or_default(), read_at);
            }
        }
    }

    /// The endpoints to which this relay does not send because of its settings or a bug: those of the registry, those
    /// whose names lead to addresses that the settings refuse, and those for which its code panicked.
    pub(super) fn refuses(&self) -> Arc<Refuses> {
        let mut refuses = Arc::clone(&self.registry().refuses);
        for member in self.watched() {
            let trouble = member.bulkhead.gate.trouble();
            let refused = trouble
                .filter(|one| matches!(one.code, ReasonCode::BlockedAddress | ReasonCode::Panic));
            if let Some(refused) = refused {
                Arc::make_mut(&mut refuses).add(&member.endpoint.name, &refused.what);
            }
        }
        refuses
    }

    /// Watches an endpoint, because its gate may restrict sends from here on.
    pub(super) fn watch(&self, id: u32) {
        lock(&self.known).watched.insert(id);
    }

    /// The watched endpoints.
    pub(super) fn watched(&self) -> Vec<Arc<ServedEndpoint>> {
        let known = lock(&self.known);
        let watched = known.watched.iter();
        watched
            .filter_map(|id| known.pool.get(id).cloned())
            .collect()
    }

    /// Stops watching endpoints whose messages flow again, or that do not exist any more.
    pub(super) fn forget_flowing(&self) {
        let KnownEndpoints { pool, watched, .. } = &mut *lock(&self.known);
        let is_limited = |member: &Arc<ServedEndpoint>| {
            let gate = &member.bulkhead.gate;
            let is_flowing = matches!(gate.standing(), Standing::Flowing | Standing::Trying);
            member.endpoint.is_held() || !is_flowing || gate.has_news()
        };
        watched.retain(|id| pool.get(id).is_some_and(is_limited));
    }
}

impl Directory for ServedEndpoints {
    fn roster(&self) -> Arc<dyn Roster> {
        self.registry()
    }

    fn doors(&self) -> Doors {
        let mut doors = Doors::default();
        for ServedEndpoint {
            endpoint, bulkhead, ..
        } in self.watched().iter().map(AsRef::as_ref)
        {
            if endpoint.is_held() {
                doors.closed.insert(endpoint.id);
                continue;
            }
            let opens = bulkhead.gate.opens_at();
            doors.opens_at = doors.opens_at.into_iter().chain(opens).min();
            match bulkhead.gate.room() {
                Room::Closed => drop(doors.closed.insert(endpoint.id)),
                Room::One => drop(doors.probed.insert(endpoint.id)),
                Room::Free => {}
            }
        }
        doors
    }

    fn read_to(&self) -> Option<Arc<dyn Reads>> {
        Some(match self.rows_read_to() {
            Some(read_to) => read_to,
            None => Arc::new(Unread),
        })
    }

    fn can_send(&self) -> bool {
        self.maker.clients.can_send()
    }

    fn prefetch(&self, member: u32) -> Option<usize> {
        let known = lock(&self.known);
        let member = known.pool.get(&member);
        member.map(|member| member.bulkhead.prefetch())
    }

    fn put(&self, jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        let registry = self.registry();
        let mut turns = self.turns();
        for job in jobs {
            if let To::Member(id) = job.to {
                turns.put(id, registry.tenant(id), job);
            }
        }
        drop(turns);
        self.bell.ring();
    }

    fn take_back(&self) -> Vec<Job> {
        self.turns().take_all()
    }

    fn moving(&self) -> usize {
        self.turns().waiting_of_quick()
    }

    fn only_waits(&self) -> bool {
        self.turns().only_waits()
    }

    fn paused(&self, rows: &[Paused], now: Instant) {
        let (pauses, registry) = (Pauses::of(rows), self.registry());
        for one in (pauses.of_destinations.keys()).filter_map(|name| registry.named(name)) {
            self.watch(one.id);
        }
        if !pauses.of_tenants.is_empty() {
            let endpoints = registry.by_name.values();
            let paused = endpoints.filter(|one| pauses.of_tenant(one.tenant_id).is_some());
            paused.for_each(|one| self.watch(one.id));
        }
        for member in self.watched() {
            let rows = pauses.of_both(&member.endpoint.name, member.endpoint.tenant_id);
            member.bulkhead.gate.learn(rows, now);
        }
        self.forget_flowing();
    }

    fn troubles(&self) -> Vec<(Arc<str>, Trouble)> {
        let pool = self.pool();
        let all = pool.values().map(|one| &one.bulkhead);
        let troubles = all.filter_map(|one| Some((Arc::clone(&one.name), one.gate.trouble()?)));
        troubles.collect()
    }

    fn doubted(&self, member: &str, message: &Message) {
        self.filter_too_much.increment(1);
        self.troubles.too_much(member, message);
    }

    fn problems(&self, now: Instant) -> Vec<Problem> {
        let refuses = self.refuses();
        let refused = refuses.first().map(|(name, why)| Problem {
            kind: ProblemKind::EndpointRefused,
            what: format!(
                "this relay does not send to {} endpoints, for example {name} ({why}): their messages wait for a relay that does",
                refuses.count()
            ),
        });
        let too_much = self.troubles.first(now).map(|(first, count)| {
            let more = match count {
                1 => String::new(),
                _ => format!(" (and {} more such destinations)", count - 1),
            };
            Problem {
                kind: ProblemKind::FilterTooMuch,
                what: format!("{first}{more}"),
            }
        });
        refused.into_iter().chain(too_much).collect()
    }
}
