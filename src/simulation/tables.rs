//! The tables of the simulated database, and the reads and changes of each statement.
//!
//! A statement sees committed rows. A transaction locks the rows that it changes until it ends, and statements that
//! skip locked rows do so here, too.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Bound::{Excluded, Included};
use std::time::{Duration, Instant, UNIX_EPOCH};

use uuid::Uuid;

use super::broken::Broken;
use super::feeds::{Event, Feed, FeedParts};
use super::history::{HANDLED, REGISTERED};
use super::wants;
use crate::config::Verification;
use crate::endpoints::endpoint::Endpoint;
use crate::endpoints::roster::Registry;
use crate::endpoints::serving;
use crate::endpoints::sql::rows;
use crate::endpoints::sql::served::{Others, Served};
use crate::engine::claim::sql::claim::{
    Batch, Claimant, Claimed, KnownDelivery, Lane, Position, Stream, TakenOver, Topic,
};
use crate::engine::claim::sql::glance::Marks;
use crate::engine::claim::sql::late::LookForLate;
use crate::engine::claim::sql::page::{Free, Moment, PAGE, Page, SearchPlace, Writers};
use crate::engine::claim::sql::search::Ask;
use crate::engine::claim::sql::streams::FoundStream;
use crate::engine::directory::Roster;
use crate::engine::keys::sql::ordered::{Candidate, Key};
use crate::engine::lease::sql::lease::{LeaseId, Registration, SeenLease};
use crate::engine::send::sql::pause::{BREAKER_OPEN, Paused};
use crate::engine::serves::routes::{Refuses, Routes, Serves};
use crate::engine::serves::sql::topics::{KnownTopic, Patterns};
use crate::engine::settle::settlement::{Kind, Settlement, delivered, failed};
use crate::engine::settle::sql::settle::{Claim, Released, Written};
use crate::engine::settle::written::Settle;
use crate::hand::Hand;
use crate::message::replays::replayed;
use crate::message::{Message, Sequence};
use crate::operate::sql::why::{Blocker, ReasonFacts, WaitReason, WhyFacts};
use crate::sql::range::Range;
use crate::status::ReasonCode;

/// A live message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) sequence: i64,
    /// The message of the history, also for the parts of a fanned-out message.
    pub(super) id: usize,
    pub(super) topic: &'static str,
    pub(super) destination: String,
    pub(super) ordering_key: Option<&'static str>,
    /// The idempotency key, if the producer has set one.
    pub(super) idempotency_key: Option<String>,
    pub(super) body: u8,
    /// The value of the only header.
    pub(super) headers: Option<u8>,
    /// The time of the event: when the first message was enqueued.
    pub(super) occurred_at: i64,
    pub(super) available_at: i64,
    pub(super) expires_at: Option<i64>,
    pub(super) attempts: i32,
    pub(super) is_abandoned: bool,
    pub(super) held: Option<Held>,
    pub(super) split_from: Option<i64>,
    /// The last destination that has its part.
    pub(super) split_to: Option<String>,
    /// The registration that the message is addressed to.
    pub(super) registration: Option<Uuid>,
}

/// The lease that holds a message, and the time of the claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) lease: i64,
    pub(super) at: i64,
}

#[derive(Debug, Clone)]
pub(super) struct Dead {
    pub(super) row: Row,
    pub(super) blocks_key: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// The row when it was settled.
    pub(super) row: Row,
    /// The destination that the message was for, even if the row names none.
    pub(super) to: String,
    pub(super) is_delivered: bool,
    pub(super) at: i64,
}

#[derive(Debug, Clone)]
pub(super) struct Lease {
    pub(super) expires_at: i64,
    pub(super) is_ended: bool,
    pub(super) is_single_active: bool,
    pub(super) takeover_after: Option<Duration>,
    /// The server's process that holds the lock of the lease.
    pub(super) locked_by: Option<i32>,
    serves: Option<Serves>,
}

/// The changes of a transaction, made when it ends.
#[derive(Debug, Clone, Default)]
pub(super) struct Changes {
    /// `None`: the row is deleted.
    pub(super) rows: BTreeMap<i64, Option<Row>>,
    pub(super) dead: Vec<Dead>,
    pub(super) ledger: Vec<Entry>,
    /// Rows that are locked and not changed.
    pub(super) only_locked: Vec<i64>,
    /// Whether the transaction has the lock of keyed claims.
    pub(super) is_keyed_claim: bool,
    /// Whether the commit need not wait for the disk.
    pub(super) is_only_claim: bool,
    /// Claimed messages of which operators are told that they wait.
    pub(super) misled: Vec<(i64, WaitReason)>,
    /// The feeds that the transaction holds, and the events that it stores.
    pub(super) feeds: Vec<&'static str>,
    pub(super) events: Vec<(&'static str, Event)>,
    /// Whether the answer is a refusal, although others of its messages are settled.
    pub(super) is_refused: bool,
    /// The last positions of feeds, if they were read before ([`Broken::NumbersBeforeTheLock`]).
    pub(super) ends: Vec<(&'static str, i64)>,
}

/// Kind, name and hand of a pause.
pub(super) type PauseOf = (String, String, Hand);
/// Its reason, the openings of the breaker, and its end.
pub(super) type PauseRow = (String, u32, Option<i64>);

#[derive(Debug, Clone, Default)]
pub(super) struct Tables {
    pub(super) rows: BTreeMap<i64, Row>,
    pub(super) dead: Vec<Dead>,
    pub(super) ledger: Vec<Entry>,
    pub(super) leases: BTreeMap<i64, Lease>,
    /// By kind, name and hand: the reason, the openings of the breaker, and the end (`None`: until resumed).
    pub(super) pauses: BTreeMap<PauseOf, PauseRow>,
    /// The endpoints.
    pub(super) registered: BTreeMap<&'static str, SimulatedEndpoint>,
    /// The endpoints that were removed.
    pub(super) removed: BTreeSet<&'static str>,
    /// The patterns of topics that any relay has served.
    pub(super) served: BTreeSet<String>,
    /// The tenant of each destination that is or was registered, by its stamp.
    pub(super) tenants: BTreeMap<i64, Uuid>,
    pub(super) has_tenants: bool,
    pub(super) has_filters: bool,
    pub(super) verification: Verification,
    /// The stamps of endpoints while they were not verified.
    pub(super) unverified: BTreeSet<i64>,
    /// The most messages of a run at endpoints.
    pub(super) key_run: usize,
    pub(super) last_stamp: i64,
    /// How many destinations were registered so far.
    pub(super) registrations: i64,
    pub(super) last_sequence: i64,
    /// Rows that an open transaction has changed.
    pub(super) locked: BTreeSet<i64>,
    /// Those of them that a person has locked.
    pub(super) of_people: BTreeSet<i64>,
    /// Whether a person has locked the rows of pauses.
    pub(super) has_locked_pauses: bool,
    pub(super) keyed_claims: usize,
    /// The most keyed messages of a lane that a claim reads; `None`: no limit.
    pub(super) looked_at: Option<usize>,
    /// The numbers of open producers' transactions, and the next number.
    pub(super) writers: BTreeSet<i64>,
    pub(super) next_writer: i64,
    /// The names of endpoints that are feeds.
    pub(super) feed_names: &'static [&'static str],
    pub(super) feeds: BTreeMap<&'static str, Feed>,
    /// Those that an open transaction holds.
    pub(super) held_feeds: BTreeSet<&'static str>,
    pub(super) parts: FeedParts,
    /// The last positions, if transactions take them without a lock ([`Broken::NumbersWithoutLock`]).
    pub(super) counters: BTreeMap<&'static str, i64>,
    pub(super) broken: Option<Broken>,
}

/// An endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SimulatedEndpoint {
    pub(super) enabled: bool,
    pub(super) id: Uuid,
    /// The number of its tenant, if destinations have tenants.
    tenant: usize,
    /// Changes with each update.
    pub(super) stamp: i64,
    /// When the transaction that registered it began.
    pub(super) created_at: i64,
    updated_at: i64,
    pub(super) is_verified: bool,
    /// When the endpoint may be asked again whether it wants messages.
    ask_at: i64,
}

/// How long after a failed try an endpoint is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// The destination of a message; empty if the message is fanned out or goes nowhere.
pub(super) fn goes_to<'a>(topic: &str, destination: &'a str) -> &'a str {
    match (topic, destination) {
        ("a", "") => "a",
        ("b", "") => "b",
        (HANDLED, "") => HANDLED,
        (_, destination) => destination,
    }
}

impl Row {
    /// The message, if it is due and free.
    fn free(&self, expired: &[i64], now: i64) -> Option<Free> {
        let is_free = self.available_at <= now && self.is_free(expired);
        is_free.then(|| self.as_free())
    }

    fn as_free(&self) -> Free {
        Free {
            sequence: self.sequence,
            topic: self.topic.to_owned(),
            destination: self.destination.clone(),
            ordering_key: self.ordering_key.map(str::to_owned),
            available_at: diesel::pg::data_types::PgTimestamp(self.available_at),
            registration: self.registration,
        }
    }

    pub(super) fn key(&self) -> Option<Key> {
        Some(Key {
            ordering_key: self.ordering_key?.to_owned(),
            destination: self.destination.clone(),
        })
    }

    pub(super) fn place(&self) -> i64 {
        self.split_from.unwrap_or(self.sequence)
    }

    pub(super) fn stream(&self) -> Stream {
        Stream {
            topic: self.of_topic(),
            is_keyed: self.ordering_key.is_some(),
        }
    }

    pub(super) fn of_topic(&self) -> Topic {
        Topic {
            topic: self.topic.to_owned(),
            destination: self.destination.clone(),
        }
    }

    fn position(&self) -> Position {
        Position {
            available_at: self.available_at,
            sequence: self.sequence,
        }
    }

    fn is_free(&self, expired: &[i64]) -> bool {
        self.held.is_none_or(|held| expired.contains(&held.lease))
    }

    /// Whether this is the only row with this idempotency key at this destination.
    pub(super) fn is_known_by(&self, idempotency_key: Option<&str>, destination: &str) -> bool {
        let is_it =
            self.idempotency_key.as_deref() == idempotency_key && self.destination == destination;
        idempotency_key.is_some() && is_it
    }

    pub(super) fn has_content_of(&self, other: &Self) -> bool {
        self.topic == other.topic && self.body == other.body
    }

    pub(super) fn has_key_of(&self, other: &Self) -> bool {
        self.ordering_key.is_some() && self.ordering_key == other.ordering_key
    }

    /// Whether the two messages must not be in flight at once.
    pub(super) fn excludes(&self, other: &Self) -> bool {
        let (mine, its) = (
            goes_to(self.topic, &self.destination),
            goes_to(other.topic, &other.destination),
        );
        let name_none = self.destination.is_empty() && other.destination.is_empty();
        self.has_key_of(other) && (name_none || mine == its)
    }

    /// Whether this message waits for `other`, if `other` comes first.
    pub(super) fn waits_for(&self, other: &Self) -> bool {
        let names_none = other.destination.is_empty();
        let goes_to = goes_to(self.topic, &self.destination);
        // A message that will be fanned out waits for the parts of other messages, whatever their destinations.
        let is_apart = goes_to.is_empty();
        self.has_key_of(other) && (names_none || is_apart || other.destination == goes_to)
    }
}

impl Tables {
    /// The rows that no other transaction has locked.
    fn others(&self) -> impl Iterator<Item = &Row> {
        self.rows
            .values()
            .filter(|row| !self.locked.contains(&row.sequence))
    }

    /// Whether a row is free, and not left to other relays.
    fn can_be_taken(&self, by: Claimant<'_>, row: &Row) -> bool {
        let namesakes = by
            .namesakes
            .filter(|_| self.broken != Some(Broken::ClaimsForNamesakes));
        let is_left = namesakes.is_some_and(|one| one.leave(&row.destination, row.registration));
        row.is_free(by.expired) && !is_left
    }

    fn is_locked(&self, row: &Row) -> bool {
        self.locked.contains(&row.sequence) && self.broken != Some(Broken::ClaimsWhatIsLocked)
    }

    pub(super) fn is_at_work(&self, lease: i64, now: i64) -> bool {
        let is_valid = |lease: &Lease| !lease.is_ended && lease.expires_at > now;
        let Some(mine) = self.leases.get(&lease).filter(|lease| is_valid(lease)) else {
            return false;
        };
        !self.stands_by(lease, mine)
    }

    fn stands_by(&self, id: i64, lease: &Lease) -> bool {
        let mut older = self.leases.range(..id).map(|(_, lease)| lease);
        lease.is_single_active && older.any(|one| one.is_single_active && !one.is_ended)
    }

    pub(super) fn has_active_relay(&self, now: i64) -> bool {
        self.leases.keys().any(|lease| self.is_at_work(*lease, now))
    }

    pub(super) fn is_there(&self, lease: i64, now: i64) -> bool {
        let lease = self.leases.get(&lease);
        lease.is_some_and(|lease| !lease.is_ended && lease.expires_at > now)
    }

    /// A session reads a lease and takes its lock.
    pub(super) fn look(&mut self, lease: i64, backend: Option<i32>, now: i64) -> Option<SeenLease> {
        let is_there = self.is_there(lease, now);
        let ends = |other: &Lease| {
            let soon = other
                .takeover_after
                .map_or(now, |after| now + micros(after));
            let has_no_session = other.takeover_after.is_some() && other.locked_by.is_none();
            !other.is_ended && (other.expires_at <= soon || has_no_session)
        };
        let mut others = self.leases.iter().filter(|(id, _)| **id != lease);
        let others_end = others.any(|(_, other)| ends(other));
        let stands_by = (self.leases.get(&lease)).is_some_and(|one| self.stands_by(lease, one));
        let lease = self.leases.get_mut(&lease).filter(|_| is_there)?;
        lease.locked_by = lease.locked_by.or(backend);
        Some(SeenLease {
            left: Duration::from_micros(u64::try_from(lease.expires_at - now).unwrap_or(0)),
            is_locked: backend.is_some() && lease.locked_by == backend,
            others_end,
            stands_by,
        })
    }

    /// Frees the locks of ended sessions.
    pub(super) fn unlock_leases(&mut self, is_gone: impl Fn(i32) -> bool) {
        for lease in self.leases.values_mut() {
            lease.locked_by = lease.locked_by.filter(|backend| !is_gone(*backend));
        }
    }

    /// Makes leases expire soon if their sessions have ended.
    pub(super) fn shorten(&mut self, asks: i64, now: i64) -> Vec<i64> {
        let mut shortened = Vec::new();
        for (id, lease) in &mut self.leases {
            let soon = lease.takeover_after.map(|after| now + micros(after));
            if let Some(soon) = soon
                && *id != asks
                && !lease.is_ended
                && lease.expires_at > soon
                && lease.locked_by.is_none()
            {
                lease.expires_at = soon;
                shortened.push(*id);
            }
        }
        shortened
    }

    pub(super) fn register(&mut self, registration: &Registration, now: i64) -> LeaseId {
        let last = self.leases.keys().next_back();
        let id = last.map_or(now, |last| now.max(last + 1));
        let serves = registration.serves.as_deref().and_then(Serves::from_json);
        if let Some(serves) = serves.as_ref().filter(|_| registration.records_topics) {
            self.record_topics(serves);
        }
        let lease = Lease {
            expires_at: now + micros(registration.lease),
            is_ended: false,
            is_single_active: registration.is_single_active,
            takeover_after: None,
            locked_by: None,
            serves,
        };
        self.leases.insert(id, lease);
        LeaseId(id)
    }

    pub(super) fn record_topics(&mut self, serves: &Serves) {
        if self.broken == Some(Broken::ForgetsServedTopics) {
            let running = self.leases.values().filter(|lease| !lease.is_ended);
            let topics = running.filter_map(|lease| Some(lease.serves.as_ref()?.topics()));
            self.served = topics.flatten().map(|(pattern, _)| pattern).collect();
        }
        let topics = serves.topics().into_iter();
        self.served.extend(topics.map(|(pattern, _)| pattern));
    }

    pub(super) fn renew(
        &mut self,
        lease: i64,
        by: Duration,
        takeover_after: Option<Duration>,
        now: i64,
    ) -> bool {
        let revives = self.broken == Some(Broken::RenewsWhatIsOver);
        let is_there = self.is_there(lease, now) || (revives && self.leases.contains_key(&lease));
        if let Some(lease) = self.leases.get_mut(&lease).filter(|_| is_there) {
            (lease.expires_at, lease.is_ended) = (now + micros(by), false);
            lease.takeover_after = takeover_after;
        }
        is_there
    }

    /// Marks expired leases, and returns all leases that have ended.
    pub(super) fn ended(&mut self, now: i64) -> Vec<i64> {
        for lease in self.leases.values_mut() {
            lease.is_ended |= lease.expires_at <= now;
        }
        if self.broken == Some(Broken::NeverTakesOver) {
            return Vec::new();
        }
        let ended = self.leases.iter().filter(|(_, lease)| lease.is_ended);
        ended.map(|(id, _)| *id).collect()
    }

    /// Leases that messages name but whose rows are gone.
    pub(super) fn vanished(&self) -> Vec<i64> {
        let held = self.rows.values().filter_map(|row| row.held);
        let gone = held.filter(|held| !self.leases.contains_key(&held.lease));
        let gone: BTreeSet<i64> = gone.map(|held| held.lease).collect();
        gone.into_iter().collect()
    }

    /// Registers a destination in a transaction that began at this time, or changes it at this time.
    pub(super) fn put(&mut self, name: &'static str, enabled: bool, began: i64) {
        self.last_stamp += 1;
        let stamp = self.last_stamp;
        let own = REGISTERED.iter().position(|one| *one == name);
        let before = self.registered.get(name);
        self.registrations += i64::from(before.is_none());
        let created_at = before.map_or(began, |one| one.created_at);
        let tenant = before.map(|one| one.tenant).or(own).unwrap_or_default();
        let id = before.map(|one| one.id);
        let id = id.unwrap_or_else(|| Uuid::from_u128(stamp.unsigned_abs().into()));
        if self.has_tenants {
            self.tenants.insert(stamp, wants::tenant(tenant));
        }
        let is_verified = match before {
            Some(before) => before.is_verified,
            None => self.verification == Verification::None || self.is_feed(name),
        };
        if !is_verified {
            self.unverified.insert(stamp);
        }
        let registered = SimulatedEndpoint {
            enabled,
            id,
            tenant,
            stamp,
            created_at,
            updated_at: began,
            is_verified,
            ask_at: 0,
        };
        self.registered.insert(name, registered);
        self.removed.remove(name);
        let of_row = self.feeds.get(name).and_then(|feed| feed.registration);
        if self.is_feed(name) && of_row != Some(id) {
            self.register_feed(name, Some(id));
        }
    }

    fn feed_named(&self, name: &str) -> Option<&'static str> {
        self.feed_names.iter().copied().find(|feed| *feed == name)
    }

    pub(super) fn is_feed(&self, name: &str) -> bool {
        self.feed_named(name).is_some()
    }

    /// Gives a destination to the other tenant.
    pub(super) fn give(&mut self, name: &'static str) {
        let Some(one) = self.registered.get_mut(name) else {
            return;
        };
        one.tenant += 1;
        one.id = Uuid::from_u128(one.id.as_u128() + (1 << 64));
        let enabled = one.enabled;
        self.put(name, enabled, 0);
    }

    /// Takes the next try to verify a destination, if it is due. Until then, no other relay takes it.
    pub(super) fn take_try(
        &mut self,
        (name, stamp): (&str, i64),
        until: i64,
        now: i64,
    ) -> Option<&'static str> {
        let is_due = |one: &SimulatedEndpoint| one.enabled && !one.is_verified && one.ask_at <= now;
        let (name, one) = self.registered.iter_mut().find(|(one, _)| **one == name)?;
        (one.stamp == stamp && is_due(one)).then(|| {
            one.ask_at = until;
            *name
        })
    }

    /// Records a try, unless the destination has changed.
    pub(super) fn tried(
        &mut self,
        (name, stamp): (&'static str, i64),
        is_verified: bool,
        now: i64,
    ) {
        let one = self.registered.get_mut(name);
        let Some(one) = one.filter(|one| one.stamp == stamp) else {
            return;
        };
        one.ask_at = now + micros(ASK_AGAIN);
        if is_verified {
            one.is_verified = true;
            let enabled = one.enabled;
            self.put(name, enabled, now);
        }
    }

    pub(super) fn remove(&mut self, name: &'static str) {
        if self.registered.remove(name).is_some() {
            self.removed.insert(name);
        }
    }

    /// What the active relays serve, and what any relay has served.
    fn active_relays(&self, now: i64) -> Others {
        let active = (self.leases.iter()).filter(|(id, _)| self.is_at_work(**id, now));
        let active = active.filter_map(|(_, lease)| lease.serves.clone());
        let serves: Vec<Serves> = active.collect();
        let overlooks = self.broken == Some(Broken::OverlooksServedTopics);
        let ever = self.served.iter().filter(|_| !overlooks);
        Others {
            registered: u32::try_from(serves.iter().filter(|one| one.members).count())
                .unwrap_or(u32::MAX),
            routes: serves.into_iter().map(Routes::of).collect(),
            topics: Patterns {
                served: ever.cloned().collect(),
                declared: Vec::new(),
            },
        }
    }

    /// What changes with the endpoints, and with what relays serve. The same rows have the same marks.
    pub(super) fn marks(&self, now: i64) -> Marks {
        let mark = |rows: String| {
            let mut hasher = DefaultHasher::new();
            rows.hash(&mut hasher);
            Some(hasher.finish().cast_signed())
        };
        let active = (self.leases.iter()).filter(|(id, _)| self.is_at_work(**id, now));
        let active: Vec<_> = active.map(|(id, lease)| (id, &lease.serves)).collect();
        Marks {
            destinations: {
                let stamps: Vec<i64> = self.registered.values().map(|one| one.stamp).collect();
                mark(format!("{stamps:?} {:?}", self.registrations()))
            },
            leases: mark(format!("{active:?}")),
            topics: mark(format!("{:?}", self.served)),
        }
    }

    /// The changes since the known state of the endpoints.
    pub(super) fn registered_since(
        &self,
        known: &Registry,
        waiting: &[String],
        is_strict: bool,
        now: i64,
    ) -> Option<serving::Changes> {
        let broken = self.broken;
        let stamp = self.registered.values().map(|one| one.stamp).sum();
        let count = i64::try_from(self.registered.len()).unwrap_or(i64::MAX);
        let mut gone = known.stamps(None);
        gone.retain(|name, _| !self.registered.contains_key(name.as_str()));
        let overlooks_removed = broken == Some(Broken::OverlooksWhatIsRemoved);
        let removed = self.removed.iter().filter(|_| !overlooks_removed);
        let removed = removed.map(|name| (*name).to_owned());
        let removed = removed.filter(|name| waiting.contains(name) || gone.contains_key(name));
        let removed = removed.collect();
        let registrations = self.registrations();
        let has_same_records = removed == known.removed && registrations == known.registrations;
        if self.registered.is_empty() && known.is_empty() && has_same_records {
            return None;
        }
        let mut rows = Vec::new();
        for (name, one) in &self.registered {
            if known.named(name).map(|known| known.stamp) != Some(one.stamp) {
                // The port of `x` is refused by a relay with other settings.
                let port = if *name == REGISTERED[0] { 81 } else { 80 };
                let url = format!("http://x:{port}");
                let asks = match broken {
                    Some(Broken::GivesOwnEventsToAll) => REGISTERED[1],
                    _ => name,
                };
                let row = match self.is_feed(name) {
                    true => Endpoint::feed(*name),
                    false => Endpoint::new(*name, &url),
                };
                let mut row = row.topics(wants::topics(asks));
                row.enabled = one.enabled;
                row.verification = match (self.verification, broken) {
                    _ if self.is_feed(name) => Verification::None,
                    (_, Some(Broken::OverlooksVerification)) => Verification::None,
                    (Verification::CloudEvents, Some(Broken::SkipsWhatIsNotVerified)) => {
                        Verification::CloudEventsSkip
                    }
                    (Verification::CloudEventsSkip, Some(Broken::AddressesWhatSkips)) => {
                        Verification::CloudEvents
                    }
                    (verification, _) => verification,
                };
                row.verified_at = one.is_verified.then_some(UNIX_EPOCH);
                row.policy.key_run = self.key_run;
                let knows_filters = self.has_filters && broken != Some(Broken::OverlooksFilters);
                row.filter = knows_filters.then(|| wants::filter(name));
                row.tenant_id = self.tenants.get(&one.stamp).copied();
                row.created_at = (broken != Some(Broken::GivesWhatIsEarlier))
                    .then(|| UNIX_EPOCH + Duration::from_micros(one.created_at.unsigned_abs()));
                let updated_at = match broken {
                    Some(Broken::ForgetsAddressees) => 0,
                    _ => one.updated_at.unsigned_abs(),
                };
                row.updated_at = Some(UNIX_EPOCH + Duration::from_micros(updated_at));
                match broken {
                    Some(Broken::OverlooksTenants) => row.tenant_id = None,
                    Some(Broken::RefusesForAll) if is_strict && *name == REGISTERED[0] => {
                        row.problem = Some("the port is refused".to_owned());
                    }
                    _ => {}
                }
                let (id, secrets) = (one.id, None);
                rows.push((rows::EndpointRow { row, id, secrets }, one.stamp));
            }
        }
        Some(serving::Changes {
            stamp: (count, stamp),
            rows,
            others: self.active_relays(now),
            removed,
            registrations,
            paused: Some(self.all_pauses(now)),
            gone: gone.into_keys().collect(),
            ..serving::Changes::default()
        })
    }

    pub(super) fn all_pauses(&self, now: i64) -> Vec<Paused> {
        let paused =
            |((kind, name, by), (reason, openings, until)): (&PauseOf, &PauseRow)| Paused {
                kind: kind.clone(),
                name: name.clone(),
                reason: reason.clone(),
                by: *by,
                openings: *openings,
                left: until
                    .map(|until| Duration::from_micros(u64::try_from(until - now).unwrap_or(0))),
            };
        let mut pauses: Vec<Paused> = self.pauses.iter().map(paused).collect();
        // PostgreSQL orders hands by their words.
        pauses.sort_by(|one, other| {
            let place = |of: &Paused| (of.kind.clone(), of.name.clone(), of.by.as_str());
            place(one).cmp(&place(other))
        });
        pauses
    }

    /// The rows that a person has locked.
    pub(super) fn rows_of_people(&self) -> impl Iterator<Item = &Row> {
        self.of_people.iter().filter_map(|one| self.rows.get(one))
    }

    pub(super) fn streams(&self, behind: i64, beside: &[Stream]) -> Vec<FoundStream> {
        let mut first: BTreeMap<Stream, Position> = BTreeMap::new();
        for row in self.rows.values().filter(|row| row.sequence > behind) {
            let at = first.entry(row.stream()).or_insert(row.position());
            *at = row.position().min(*at);
        }
        first.retain(|stream, _| !beside.contains(stream));
        let found = first.into_iter();
        found
            .map(|(stream, first)| FoundStream { stream, first })
            .collect()
    }

    fn in_lane(&self, lane: &Lane, now: i64) -> Vec<&Row> {
        let is_in = |row: &&Row| {
            row.stream() == lane.stream && row.position() > lane.after && row.available_at <= now
        };
        let mut rows: Vec<&Row> = self.rows.values().filter(is_in).collect();
        rows.sort_unstable_by_key(|row| row.position());
        rows
    }

    pub(super) fn claim(
        &self,
        by: Claimant<'_>,
        lanes: &[Lane],
        room: usize,
        now: Now,
        changes: &mut Changes,
    ) -> Batch {
        let mut found = Vec::new();
        for lane in lanes {
            let free = self.in_lane(lane, now.micros).into_iter();
            let free = free.filter(|row| self.can_be_taken(by, row) && !self.is_locked(row));
            found.extend(free.take(lane.room));
        }
        let left = found.split_off(room.min(found.len()));
        if self.is_at_work(by.lease.0, now.micros) {
            (changes.only_locked).extend(left.iter().map(|row| row.sequence));
        }
        self.take(by, &found, !left.is_empty(), now, changes)
    }

    pub(super) fn claim_chosen(
        &self,
        by: Claimant<'_>,
        sequences: &[i64],
        now: Now,
        changes: &mut Changes,
    ) -> Batch {
        let is_chosen = |row: &&Row| {
            sequences.contains(&row.sequence)
                && row.ordering_key.is_none()
                && row.available_at <= now.micros
                && self.can_be_taken(by, row)
        };
        let found: Vec<&Row> = self.others().filter(is_chosen).collect();
        self.take(by, &found, false, now, changes)
    }

    /// Claims these rows, if the lease may claim.
    fn take(
        &self,
        by: Claimant<'_>,
        found: &[&Row],
        is_cut: bool,
        now: Now,
        changes: &mut Changes,
    ) -> Batch {
        if !self.is_at_work(by.lease.0, now.micros)
            && self.broken != Some(Broken::ClaimsUnderWhatIsOver)
        {
            return Batch::default();
        }
        if !found.is_empty() {
            let facts = self.facts(now.micros);
            let told = found
                .iter()
                .map(|row| (row.sequence, self.reason(&facts, row, now.micros)));
            (changes.misled).extend(told.filter(|(_, told)| is_held_up(told)));
        }
        // By the settings of the relays, each attempt is the last one.
        let is_last = self.broken == Some(Broken::TakesOverByOwnLimit);
        let claimed = found.iter().map(|row| {
            let taken_over = match row.held {
                None => TakenOver::No,
                Some(_) if row.is_abandoned || is_last => TakenOver::Again,
                Some(_) => TakenOver::Once,
            };
            let is_once = taken_over == TakenOver::Once;
            let counts = match self.broken {
                Some(Broken::CountsTakeoversTwice) => 2,
                Some(Broken::TakesOverForFree) => 0,
                _ => 1,
            };
            let row = Row {
                held: Some(Held {
                    lease: by.lease.0,
                    at: now.micros,
                }),
                attempts: row.attempts + i32::from(is_once) * counts,
                is_abandoned: row.is_abandoned || is_once,
                ..(*row).clone()
            };
            let claimed = Claimed {
                position: row.position(),
                known: self.known(&row),
                taken_over,
                message: Box::new(self.message(&row, now)),
            };
            changes.rows.insert(row.sequence, Some(row));
            claimed
        });
        changes.is_only_claim = true;
        let claimed: Vec<Claimed> = claimed.collect();
        Batch {
            registrations: (!claimed.is_empty())
                .then(|| self.registrations())
                .flatten(),
            claimed,
            behind: Vec::new(),
            is_cut,
        }
    }

    /// Claims the rest of the runs that begin with claimed messages.
    pub(super) fn claim_behind(
        &self,
        by: Claimant<'_>,
        batch: &mut Batch,
        now: Now,
        changes: &mut Changes,
    ) {
        let Some(runs) = by.runs else { return };
        let longest = runs.longest(&batch.claimed);
        let mut mine = self.clone();
        mine.change(changes);
        let mut found = Vec::new();
        for (first, longest) in batch.claimed.iter().zip(longest) {
            let message = &first.message;
            if message.attempts > 0 || first.known != KnownDelivery::No {
                continue;
            }
            let Some(row) = mine.rows.get(&message.sequence.0) else {
                continue;
            };
            let is_behind = |other: &&Row| other.key() == row.key() && other.place() > row.place();
            let mut behind: Vec<&Row> = mine.rows.values().filter(is_behind).collect();
            behind.sort_unstable_by_key(|other| other.place());
            for other in behind.into_iter().take(longest.messages) {
                let names_none = other.destination.is_empty();
                let can_be_claimed = runs.goes_along(message, other.topic)
                    && other.available_at <= now.micros
                    && !self.locked.contains(&other.sequence)
                    && other.held.is_none()
                    && self.can_be_taken(by, other)
                    && other.attempts == 0
                    && mine.is_not_kept_back(other, None)
                    && mine.none_before(other, |one| one.destination.is_empty() != names_none);
                if can_be_claimed {
                    found.push(other);
                } else if self.broken != Some(Broken::RunsOverGaps) {
                    break;
                }
            }
        }
        let told = changes.misled.len();
        let is_only_claim = changes.is_only_claim;
        batch.behind = mine.take(by, &found, false, now, changes).claimed;
        // They wait for the message that is claimed with them.
        changes.misled.truncate(told);
        changes.is_only_claim = is_only_claim;
    }

    /// The number of the records of registrations.
    fn registrations(&self) -> Option<i64> {
        let sees = self.broken != Some(Broken::OverlooksRegistrations);
        (self.registrations > 0 && sees).then_some(self.registrations)
    }

    fn message(&self, row: &Row, now: Now) -> Message {
        let duration = |micros: i64| Duration::from_micros(u64::try_from(micros).unwrap_or(0));
        let expires = row
            .expires_at
            .map(|at| now.here + duration(at - now.micros));
        let payload = match self.has_filters {
            true => wants::payload(row.id, REGISTERED.into_iter()),
            false => "{}".to_owned(),
        };
        Message {
            sequence: Sequence(row.sequence),
            message_id: Uuid::from_u128(row.id as u128),
            topic: row.topic.to_owned(),
            destination: row.destination.clone(),
            payload,
            headers: row.headers.map(|value| format!(r#"{{"h":"{value}"}}"#)),
            ordering_key: row.ordering_key.map(str::to_owned),
            // Messages without a key of their own have their id.
            idempotency_key: (row.idempotency_key.clone())
                .unwrap_or_else(|| Uuid::from_u128(row.id as u128).to_string()),
            tenant_id: wants::tenant_of(row.id).filter(|_| self.has_tenants),
            created_at: UNIX_EPOCH + Duration::from_micros(row.occurred_at.unsigned_abs()),
            occurred_at: Some(UNIX_EPOCH + Duration::from_micros(row.occurred_at.unsigned_abs())),
            age: duration(now.micros - row.occurred_at),
            claimed: now.here,
            attempts: row.attempts.unsigned_abs(),
            expires,
            available_at: row.available_at,
            claimed_at: row.held.map_or(0, |held| held.at),
            in_a_row: 0,
            split_to: row.split_to.clone(),
            registration: row
                .registration
                .filter(|_| self.broken != Some(Broken::KnowsOnlyNames)),
        }
    }

    /// The ledger's last delivery for the row's idempotency key.
    fn known(&self, row: &Row) -> KnownDelivery {
        let is_asked = row.idempotency_key.is_some() && self.broken != Some(Broken::ForgetsKeys);
        let is_it = |one: &&Entry| {
            one.is_delivered
                && one
                    .row
                    .is_known_by(row.idempotency_key.as_deref(), &row.destination)
        };
        let delivered = self.ledger.iter().filter(|one| is_asked && is_it(one));
        match delivered.max_by_key(|one| one.at) {
            None => KnownDelivery::No,
            Some(one) if one.row.has_content_of(row) => KnownDelivery::Delivered(one.row.sequence),
            Some(one) => KnownDelivery::OtherContent(one.row.sequence),
        }
    }

    /// The due messages that wait for others of their keys.
    pub(super) fn behind(&self, now: i64) -> Vec<i64> {
        let waits = |row: &&Row| {
            let goes_to = Some(goes_to(row.topic, &row.destination));
            let is_due = row.held.is_none() && row.available_at <= now;
            let is_free = self.is_first(row, goes_to) && self.is_not_kept_back(row, goes_to);
            is_due && row.ordering_key.is_some() && !is_free
        };
        let waiting = self.rows.values().filter(waits);
        waiting.map(|row| row.sequence).collect()
    }

    /// What decides why messages wait. Destinations that are disabled have a reason in PostgreSQL only.
    pub(super) fn facts(&self, now: i64) -> WhyFacts {
        let leases = self.leases.iter();
        let valid = leases.clone().filter(|(_, one)| one.expires_at > now);
        let at_work = leases.filter(|(id, _)| self.is_at_work(**id, now));
        let serves = at_work.filter_map(|(id, one)| Some((*id, one.serves.clone()?)));
        let relays =
            serves.map(|(id, serves)| (id, "relay".to_owned(), serves, Refuses::default()));
        let mut served = Served::by_relays(relays);
        if served.delivers_to_endpoints() {
            let names = |names: &mut dyn Iterator<Item = &&'static str>| -> Vec<String> {
                names.map(|name| (*name).to_owned()).collect()
            };
            let topic = |pattern: &String| KnownTopic {
                pattern: pattern.clone(),
                kind: "route".to_owned(),
                first_served: String::new(),
                last_served: String::new(),
            };
            let mut there = names(&mut self.registered.keys());
            there.extend((!there.is_empty()).then(String::new));
            served = served.with_endpoints(
                there,
                names(&mut self.removed.iter()),
                self.served.iter().map(topic).collect(),
                (self.registered.iter().filter(|(_, one)| one.enabled))
                    .flat_map(|(name, _)| wants::topics(name).map(|topic| (topic, *name)))
                    .map(|(topic, name)| (topic.to_owned(), name.to_owned()))
                    .collect(),
            );
        }
        let stopped = (self.registered.iter()).filter(|(_, one)| !one.enabled || !one.is_verified);
        WhyFacts::new(
            now,
            valid.map(|(id, _)| *id).collect(),
            served,
            self.all_pauses(now),
            stopped
                .map(|(name, one)| {
                    let destination = (*name).to_owned();
                    let why = match one.enabled {
                        true => WaitReason::NotVerified {
                            destination,
                            error: None,
                        },
                        false => WaitReason::DestinationDisabled {
                            by: Hand::Operator,
                            destination,
                            reason: String::new(),
                        },
                    };
                    ((*name).to_owned(), why)
                })
                .collect(),
            HashMap::new(),
        )
    }

    /// Why a live message waits.
    pub(super) fn reason(&self, facts: &WhyFacts, row: &Row, now: i64) -> WaitReason {
        let first = match self.broken {
            Some(Broken::TellsOfNoKeys) => None,
            _ => self.first_of_key(facts.goes_to(row.topic, &row.destination), row, now),
        };
        facts.reason(&ReasonFacts {
            topic: row.topic,
            destination: &row.destination,
            lease: row.held.map(|held| held.lease),
            since: None,
            due: row.available_at,
            available_at: None,
            has_expired: row.expires_at.is_some_and(|at| at <= now),
            failed: None,
            first,
        })
    }

    /// The message that blocks the key of a message.
    fn first_of_key(&self, goes_to: &str, row: &Row, now: i64) -> Option<(Sequence, Blocker)> {
        let is_any = self.broken == Some(Broken::BlamesLaterMessages);
        let blocks = |other: &Row| {
            let is_of = ["", &row.destination, goes_to].contains(&other.destination.as_str());
            let is_before = other.place() < row.place() || is_any;
            other.has_key_of(row) && is_of && is_before && other.sequence != row.sequence
        };
        let state = |other: &Row| match other {
            _ if other.held.is_some() => Blocker::Sending,
            _ if other.attempts > 0 => Blocker::Retrying,
            _ if other.available_at > now => Blocker::NotDue,
            _ => Blocker::Due,
        };
        let live = self.rows.values().filter(|other| blocks(other));
        let live = live.map(|other| (other.place(), other.sequence, state(other)));
        let dead = self
            .dead
            .iter()
            .filter(|one| one.blocks_key && blocks(&one.row));
        let dead = dead.map(|one| (one.row.place(), one.row.sequence, Blocker::Dead));
        let first = live
            .chain(dead)
            .min_by_key(|(place, sequence, _)| (*place, *sequence));
        first.map(|(_, sequence, blocker)| (Sequence(sequence), blocker))
    }

    fn none_before(&self, row: &Row, is_it: impl Fn(&Row) -> bool) -> bool {
        let is_before = |other: &&Row| other.has_key_of(row) && other.place() < row.place();
        !self.rows.values().filter(is_before).any(is_it)
    }

    fn is_first(&self, row: &Row, goes_to: Option<&str>) -> bool {
        let names_none = row.destination.is_empty();
        self.none_before(row, |other| other.destination == row.destination)
            && (names_none || self.none_before(row, |other| other.destination.is_empty()))
            && (!names_none
                || self.none_before(row, |other| {
                    !other.destination.is_empty()
                        && goes_to.is_none_or(|goes_to| other.destination == goes_to)
                }))
    }

    fn is_alone(&self, row: &Row, expired: &[i64], goes_to: &str) -> bool {
        let is_beside = |other: &Row| {
            let is_in_its_order = other.destination.is_empty()
                || other.destination == row.destination
                || (row.destination.is_empty() && other.destination == goes_to);
            other.has_key_of(row)
                && other.sequence != row.sequence
                && is_in_its_order
                && !other.is_free(expired)
        };
        !self.rows.values().any(is_beside)
    }

    fn is_not_kept_back(&self, row: &Row, goes_to: Option<&str>) -> bool {
        if self.broken == Some(Broken::ClaimsWhatIsKeptBack) {
            return true;
        }
        let keeps_back = |dead: &Dead| {
            let its = dead.row.destination.as_str();
            let goes_there = row.destination.is_empty() && goes_to.is_none_or(|to| its == to);
            dead.blocks_key
                && dead.row.has_key_of(row)
                && dead.row.place() < row.place()
                && (its == row.destination || its.is_empty() || goes_there)
        };
        !self.dead.iter().any(keeps_back)
    }

    /// The candidates in each lane, and where the claim stopped reading.
    pub(super) fn due(
        &self,
        by: Claimant<'_>,
        lanes: &[Lane],
        goes_to: &[&str],
        now: i64,
    ) -> (Vec<Candidate>, HashMap<Stream, Position>) {
        let (mut due, mut reached) = (Vec::new(), HashMap::new());
        for (lane, goes_to) in lanes.iter().zip(goes_to) {
            let mut count = 0;
            for (place, row) in (1..).zip(self.in_lane(lane, now)) {
                if self.can_be_taken(by, row) && self.is_first(row, Some(goes_to)) {
                    count += 1;
                    due.push(Candidate {
                        sequence: row.sequence,
                        goes_to: (*goes_to).to_owned(),
                    });
                }
                if count >= lane.room || self.looked_at == Some(place) {
                    reached.insert(lane.stream.clone(), row.position());
                    break;
                }
            }
        }
        (due, reached)
    }

    /// `None`: another transaction has the lock of keyed claims.
    pub(super) fn claim_keyed(
        &self,
        by: Claimant<'_>,
        candidates: &[Candidate],
        now: Now,
        broken: Option<Broken>,
        changes: &mut Changes,
    ) -> Option<Batch> {
        if self.keyed_claims > 0 && broken != Some(Broken::ClaimsKeyedAtOnce) {
            return None;
        }
        changes.is_keyed_claim = true;
        let mut found = Vec::new();
        for one in candidates {
            let Some(row) = self.rows.get(&one.sequence) else {
                continue;
            };
            let can_be_claimed = row.available_at <= now.micros
                && !self.locked.contains(&row.sequence)
                && self.can_be_taken(by, row)
                && (self.is_first(row, Some(&one.goes_to))
                    || matches!(
                        broken,
                        Some(Broken::ClaimsAnyOfKey | Broken::ClaimsWhatIsNotFirst)
                    ))
                && (self.is_alone(row, by.expired, &one.goes_to)
                    || matches!(
                        broken,
                        Some(Broken::ClaimsAnyOfKey | Broken::ClaimsWhatIsNotAlone)
                    ))
                && self.is_not_kept_back(row, Some(&one.goes_to));
            if can_be_claimed {
                found.push(row);
            }
        }
        found.sort_unstable_by_key(|row| row.sequence);
        found.dedup_by_key(|row| row.sequence);
        let mut batch = self.take(by, &found, false, now, changes);
        self.claim_behind(by, &mut batch, now, changes);
        Some(batch)
    }

    /// What a search asks for.
    pub(super) fn find(&self, leases: &[i64], ask: &Ask, now: i64) -> Page {
        match ask {
            Ask::Expired(stream, after) => self.expired(stream, *after, now),
            Ask::Late(look) => self.late(leases, *look, now),
            Ask::Keys(keys) => self.first_of(leases, keys, now),
            Ask::Walk(from) => self.walk(leases, from, now),
            Ask::Range(range) => self.free(leases, *range, now),
        }
    }

    /// The first message of each key, from `from` on.
    fn walk(&self, expired: &[i64], from: &Key, now: i64) -> Page {
        let mut keys: BTreeMap<Key, &Row> = BTreeMap::new();
        for row in self.rows.values() {
            let Some(key) = row.key().filter(|key| key >= from) else {
                continue;
            };
            let first = keys.entry(key).or_insert(row);
            if row.place() < first.place() {
                *first = row;
            }
        }
        let last = keys.keys().nth(PAGE - 1).cloned();
        let first = keys.into_values().take(PAGE);
        Page {
            found: first.filter_map(|row| row.free(expired, now)).collect(),
            next: last.map(SearchPlace::Key),
            moment: None,
        }
    }

    fn first_of(&self, expired: &[i64], keys: &[Key], now: i64) -> Page {
        let mut keys: Vec<&Key> = keys.iter().collect();
        // A set has given the keys in any order.
        keys.sort_unstable();
        let first = keys.into_iter().filter_map(|key| {
            let rows = self.rows.values();
            let of_key = rows.filter(|row| row.key().as_ref() == Some(key));
            of_key.min_by_key(|row| row.place())?.free(expired, now)
        });
        Page {
            found: first.collect(),
            ..Page::default()
        }
    }

    fn free(&self, expired: &[i64], range: Range, now: i64) -> Page {
        let range = self
            .rows
            .range((Excluded(range.after), Included(range.upto)));
        let free = range.filter_map(|(_, row)| row.free(expired, now));
        Page::of_sequences(free.take(PAGE).collect())
    }

    /// Late messages.
    fn late(&self, expired: &[i64], look: LookForLate, now: i64) -> Page {
        let range = Range {
            after: look.behind.unwrap_or(i64::MAX),
            upto: i64::MAX,
        };
        let mut page = self.free(expired, range, now);
        page.found.retain(|one| {
            let row = &self.rows[&one.sequence];
            let has_its_turn = row.ordering_key.is_none() || self.is_first(row, Some(""));
            row.available_at < look.due_before && has_its_turn
        });
        let newest = self.rows.keys().next_back().copied();
        let first = self.writers.first().copied();
        page.moment = Some(Moment {
            newest: newest.filter(|newest| *newest > look.known),
            writers: Writers {
                oldest: first.unwrap_or(self.next_writer),
                next: self.next_writer,
            },
        });
        page
    }

    fn expired(&self, stream: &Stream, after: Position, now: i64) -> Page {
        let has_expired = |row: &&Row| {
            row.stream() == *stream
                && row.position() > after
                && row.available_at <= now
                && row.expires_at.is_some_and(|at| at <= now)
        };
        let over = self.rows.values().filter(has_expired);
        Page {
            found: over.map(Row::as_free).collect(),
            ..Page::default()
        }
    }

    /// `None`: a person has locked one of them, and the statement waits until its time has ended.
    pub(super) fn release_unknown(
        &self,
        lease: LeaseId,
        range: Range,
        known: &[Claim],
        changes: &mut Changes,
    ) -> Released {
        let is_known = |row: &Row| {
            let mut known = known.iter();
            known.any(|one| self.held(lease, *one) == Some(row))
        };
        let is_unknown = |row: &&Row| {
            range.has(row.sequence)
                && row.held.is_some_and(|held| held.lease == lease.0)
                && !is_known(row)
        };
        let unlocked: Vec<&Row> = self.others().filter(is_unknown).collect();
        for row in &unlocked {
            changes.rows.insert(row.sequence, Some(freed(row)));
        }
        let messages = unlocked.len();
        Released {
            messages,
            are_some_locked: messages < self.rows.values().filter(is_unknown).count(),
        }
    }

    pub(super) fn pause(
        &mut self,
        kind: &str,
        which: &str,
        (by, reason): (Hand, &str),
        left: Option<Duration>,
        openings: u32,
        now: i64,
    ) {
        let key = (kind.to_owned(), which.to_owned(), by);
        let until = left.map(|left| now + micros(left));
        let gives_way = self.pauses.get(&key).is_none_or(|(reason, _, before)| {
            before.is_some_and(|before| {
                reason == BREAKER_OPEN || until.is_none_or(|until| until > before)
            })
        });
        if gives_way {
            self.pauses
                .insert(key, (reason.to_owned(), openings, until));
        }
    }

    fn breaker(&mut self, which: &str) -> Option<&mut PauseRow> {
        let key = ("destination".to_owned(), which.to_owned(), Hand::Relay);
        self.pauses.get_mut(&key)
    }

    pub(super) fn close_breaker(&mut self, which: &str) {
        let key = ("destination".to_owned(), which.to_owned(), Hand::Relay);
        self.pauses.remove(&key);
    }

    pub(super) fn take_probe(&mut self, which: &str, hold: Duration, now: i64) -> bool {
        let over = self
            .breaker(which)
            .filter(|(.., until)| until.is_some_and(|until| until <= now));
        over.is_some_and(|(.., until)| {
            *until = Some(now + micros(hold));
            true
        })
    }

    pub(super) fn release_probe(&mut self, which: &str, now: i64) {
        if let Some((.., until)) = self.breaker(which) {
            *until = Some(now);
        }
    }

    fn held(&self, lease: LeaseId, claim: Claim) -> Option<&Row> {
        let is_any = self.broken == Some(Broken::SettlesByLease);
        let is_it = |held: Held| held.lease == lease.0 && (held.at == claim.at || is_any);
        self.rows
            .get(&claim.sequence)
            .filter(|row| row.held.is_some_and(is_it) && !self.locked.contains(&row.sequence))
    }

    /// Settles a group of messages.
    pub(super) fn settle(
        &mut self,
        settle: &Settle<'_>,
        now: i64,
        broken: Option<Broken>,
        changes: &mut Changes,
    ) -> Written {
        let (mut changed, mut in_conflict) = (Vec::new(), Vec::new());
        let (mut unfinished, mut most) = (Vec::new(), settle.piece.parts);
        let is_held = |one: &Settlement| self.held(settle.claimant.lease, one.claim()).is_some();
        let is_broken = |one: &&Settlement| {
            one.is_delivered()
                && !one.behind.is_empty()
                && !one.each().all(is_held)
                && broken != Some(Broken::SettlesRunsInPart)
        };
        let (split, whole): (Vec<&Settlement>, Vec<_>) = settle.group.iter().partition(is_broken);
        for one in split.into_iter().flat_map(Settlement::each) {
            if let Some(row) = self.held(settle.claimant.lease, one.claim()) {
                changes.rows.insert(row.sequence, Some(freed(row)));
            }
        }
        let mut group: Vec<&Settlement> = whole.into_iter().flat_map(Settlement::each).collect();
        group.sort_unstable_by_key(|one| one.sequence());
        for one in group {
            let claim = one.claim();
            if settle.kind == Kind::Split && self.locked.contains(&claim.sequence) {
                // The statement would wait for the other one, and then place the parts that are left.
                let split_to = self
                    .rows
                    .get(&claim.sequence)
                    .map(|row| row.split_to.clone());
                unfinished.extend(split_to.map(|last| (claim.sequence, last)));
                continue;
            }
            let row = match broken {
                Some(Broken::SettlesUnfenced) => self.rows.get(&claim.sequence),
                _ => self.held(settle.claimant.lease, claim),
            };
            let Some(row) = row.cloned() else {
                continue;
            };
            if changes.rows.contains_key(&row.sequence) {
                continue;
            }
            let entry = |attempts, to: &str, is_delivered| Entry {
                row: Row {
                    attempts: row.attempts + attempts,
                    ..freed(&row)
                },
                to: to.to_owned(),
                is_delivered,
                at: now,
            };
            let stands_there = |destination: &String| {
                let mut rows = self.rows.values();
                rows.find(|other| other.is_known_by(row.idempotency_key.as_deref(), destination))
            };
            let stands_in_the_way = |destination: &String| {
                stands_there(destination).is_some_and(|other| !other.has_content_of(&row))
            };
            let rest = one.destinations();
            let is_placed = |one: &String| row.split_to.as_ref().is_some_and(|last| one <= last);
            let rest = &rest[rest.partition_point(is_placed)..];
            let parts = &rest[..rest.len().min(most)];
            let is_last = parts.len() == rest.len();
            most -= parts.len();
            if parts.is_empty() && !is_last {
                unfinished.push((row.sequence, row.split_to));
                most = 0;
                continue;
            }
            let dying = (parts.iter().any(stands_in_the_way)).then(|| one.in_conflict());
            let kind = dying.as_ref().map_or(settle.kind, Settlement::kind);
            let after = match kind {
                Kind::Stored => {
                    let Some(to) = delivered(one, settle.bulkheads) else {
                        continue;
                    };
                    let feed = self.feed_named(&to.destination);
                    if let Some(feed) = feed.filter(|feed| !self.feeds.contains_key(feed)) {
                        self.register_feed(feed, to.registration);
                    }
                    let Some(feed) = feed.filter(|feed| self.takes(feed, to.registration)) else {
                        // Its feed was registered again since the claim.
                        match broken {
                            Some(Broken::RefusesWhatWasMoved) => changes.is_refused = true,
                            _ => _ = changes.rows.insert(row.sequence, Some(freed(&row))),
                        }
                        continue;
                    };
                    let event = self.event(&row, to.registration, now);
                    changes.events.push((feed, event));
                    changes.ledger.push(entry(1, &to.destination, true));
                    None
                }
                Kind::Delivered | Kind::NoSubscriber => {
                    if broken != Some(Broken::ForgetsWhatIsDelivered) {
                        let to = delivered(one, settle.bulkheads).map(|one| one.destination);
                        changes.ledger.push(entry(1, &to.unwrap_or_default(), true));
                    }
                    None
                }
                Kind::Deduplicated => None,
                Kind::Released => Some(Row {
                    attempts: row.attempts + i32::from(broken == Some(Broken::CountsReleases)),
                    ..freed(&row)
                }),
                Kind::Retry | Kind::Waiting => {
                    let Some(failed) = failed(one, settle.bulkheads) else {
                        continue;
                    };
                    // The clock advances from row to row.
                    let row_at = now + i64::try_from(changed.len()).unwrap_or(0);
                    Some(Row {
                        available_at: row_at + micros(failed.delay),
                        expires_at: {
                            let after = failed.expires_after.map(micros);
                            let end = after.map(|after| row.available_at + after);
                            row.expires_at.into_iter().chain(end).min()
                        },
                        attempts: match broken {
                            Some(Broken::RetriesForFree) => row.attempts,
                            _ => row.attempts + failed.attempt as i32,
                        },
                        is_abandoned: failed.code == ReasonCode::Abandoned,
                        destination: failed.names.to_string(),
                        registration: failed.registration.or(row.registration),
                        ..freed(&row)
                    })
                }
                Kind::Dead | Kind::Cancelled => {
                    let dying = dying.as_ref().unwrap_or(one);
                    let Some(failed) = failed(dying, settle.bulkheads) else {
                        continue;
                    };
                    let (attempts, to) = (failed.attempt as i32, &failed.destination);
                    changes.ledger.push(entry(attempts, to, false));
                    changes.dead.push(Dead {
                        blocks_key: failed.blocks_key && row.ordering_key.is_some(),
                        row: Row {
                            attempts: row.attempts + failed.attempt as i32,
                            destination: failed.names.to_string(),
                            registration: failed.registration.or(row.registration),
                            ..freed(&row)
                        },
                    });
                    None
                }
                Kind::Split => {
                    for destination in parts {
                        let is_there = stands_there(destination).is_some();
                        self.last_sequence += 1;
                        if is_there {
                            continue;
                        }
                        let number = one.destinations().iter().position(|to| to == destination);
                        let of = one.parts().zip(number);
                        let of = of.and_then(|(parts, number)| *parts.registrations.get(number)?);
                        let living = self.registered.get(destination.as_str()).map(|one| one.id);
                        let part = Row {
                            sequence: self.last_sequence,
                            destination: destination.clone(),
                            split_from: Some(row.place()),
                            split_to: None,
                            registration: of.or(living),
                            attempts: if row.is_abandoned { 0 } else { row.attempts },
                            is_abandoned: false,
                            ..freed(&row)
                        };
                        changes.rows.insert(part.sequence, Some(part));
                    }
                    if !is_last {
                        let last = parts.last().cloned();
                        unfinished.push((row.sequence, last.clone()));
                        let split_to = match broken {
                            Some(Broken::ForgetsHowFar) => row.split_to.clone(),
                            _ => last,
                        };
                        let kept = Row { split_to, ..row };
                        changes.rows.insert(kept.sequence, Some(kept));
                        continue;
                    }
                    None
                }
            };
            changes.rows.insert(row.sequence, after);
            changed.push(row.sequence);
            in_conflict.extend(dying.map(|_| row.sequence));
        }
        self.number_events(changes);
        Written {
            changed,
            in_conflict,
            unfinished,
        }
    }

    /// Requeues dead letters, except those whose idempotency key has a live message.
    pub(super) fn requeue(&mut self, sequences: &[i64], now: i64) {
        for sequence in sequences {
            let Some(at) = self
                .dead
                .iter()
                .position(|one| one.row.sequence == *sequence)
            else {
                continue;
            };
            let row = self.dead[at].row.clone();
            let key = row.idempotency_key.as_deref();
            let is_it = |other: &Row| other.is_known_by(key, &row.destination);
            if self.rows.values().any(is_it) {
                continue;
            }
            if self.broken != Some(Broken::RequeuesCopies) {
                self.dead.remove(at);
            }
            let row = Row {
                available_at: now,
                expires_at: row.expires_at.filter(|at| *at > now),
                attempts: 0,
                is_abandoned: false,
                ..row
            };
            self.rows.insert(row.sequence, row);
        }
    }

    /// Discards dead letters. The messages that they blocked are due from now on.
    pub(super) fn discard(&mut self, sequences: &[i64], now: i64) {
        let mut keys = BTreeSet::new();
        self.dead.retain(|one| {
            let goes = sequences.contains(&one.row.sequence);
            keys.extend(one.row.ordering_key.filter(|_| goes && one.blocks_key));
            !goes
        });
        self.let_continue(keys, now);
    }

    /// Cancels messages that are not held under valid leases.
    pub(super) fn cancel(&mut self, sequences: &[i64], now: i64) {
        let holders = sequences.iter().filter_map(|one| self.rows.get(one)?.held);
        if holders.count() > 0 {
            self.ended(now);
        }
        let is_valid = |held: Held| {
            self.leases
                .get(&held.lease)
                .is_some_and(|one| !one.is_ended)
        };
        let is_meant = |row: &&Row| {
            sequences.contains(&row.sequence)
                && !self.locked.contains(&row.sequence)
                && !row.held.is_some_and(is_valid)
        };
        let gone: Vec<Row> = self.rows.values().filter(is_meant).cloned().collect();
        let mut keys = BTreeSet::new();
        for row in gone {
            self.rows.remove(&row.sequence);
            keys.extend(row.ordering_key);
            let (row, is_delivered) = (freed(&row), false);
            self.ledger.push(Entry {
                to: row.destination.clone(),
                row,
                is_delivered,
                at: now,
            });
        }
        if self.broken != Some(Broken::CancelsAlone) {
            self.let_continue(keys, now);
        }
    }

    /// Makes a waiting message due after this time.
    pub(super) fn reschedule(&mut self, sequence: i64, delay: Duration, now: i64) {
        let is_locked = self.locked.contains(&sequence);
        let row = self.rows.get_mut(&sequence);
        if let Some(row) = row.filter(|row| row.held.is_none() && !is_locked) {
            row.available_at = now + micros(delay);
        }
    }

    /// Sends delivered messages again, except those that this run has sent again before.
    pub(super) fn replay(&mut self, delivered: Vec<Row>, run: &str, now: i64) {
        let sent = |one: &Self, key: &str, to: &str| {
            one.ledger
                .iter()
                .any(|entry| entry.row.is_known_by(Some(key), to))
        };
        let key = |row: &Row| {
            let own = row.idempotency_key.clone();
            let own = own.unwrap_or_else(|| Uuid::from_u128(row.id as u128).to_string());
            replayed(&own, run, false)
        };
        let again = delivered.into_iter().map(|row| (key(&row), row));
        let again: Vec<_> = again
            .filter(|(key, row)| !sent(self, key, &row.destination))
            .collect();
        for (key, row) in again {
            // A row that the index refuses uses up a sequence.
            self.last_sequence += 1;
            let mut rows = self.rows.values();
            if rows.any(|other| other.is_known_by(Some(&key), &row.destination)) {
                continue;
            }
            let row = Row {
                sequence: self.last_sequence,
                idempotency_key: Some(key),
                headers: row
                    .headers
                    .filter(|_| self.broken != Some(Broken::ReplaysWithoutHeaders)),
                occurred_at: match self.broken {
                    Some(Broken::ReplaysWithNewTime) => now,
                    _ => row.occurred_at,
                },
                available_at: now,
                expires_at: None,
                attempts: 0,
                is_abandoned: false,
                split_from: None,
                split_to: None,
                ..row
            };
            self.rows.insert(row.sequence, row);
        }
    }

    /// The first messages of these keys are due from now on.
    fn let_continue(&mut self, keys: BTreeSet<&'static str>, now: i64) {
        let mut at = now;
        for key in keys {
            let of_key = self
                .rows
                .values()
                .filter(|row| row.ordering_key == Some(key));
            let mut first: BTreeMap<&str, &Row> = BTreeMap::new();
            for row in of_key {
                let one = first.entry(&row.destination).or_insert(row);
                if row.place() < one.place() {
                    *one = row;
                }
            }
            let is_free = |row: &&&Row| row.held.is_none() && row.available_at <= now;
            let first: BTreeSet<i64> = (first.values().filter(is_free))
                .map(|row| row.sequence)
                .collect();
            for sequence in first {
                // The clock advances from row to row.
                at += 1;
                self.rows
                    .entry(sequence)
                    .and_modify(|row| row.available_at = at);
            }
        }
    }

    /// Forgets expired leases that hold no messages.
    pub(super) fn forget(&mut self, now: i64) {
        let held: BTreeSet<i64> = (self.rows.values())
            .filter_map(|row| Some(row.held?.lease))
            .collect();
        (self.leases).retain(|id, lease| lease.expires_at >= now || held.contains(id));
    }

    /// Claims the next messages of the keys that this transaction has settled. Other transactions do not see the
    /// settles yet.
    pub(super) fn claim_next(
        &self,
        by: Claimant<'_>,
        keys: &[Key],
        closed: &[String],
        now: Now,
        changes: &mut Changes,
    ) -> Batch {
        let mut mine = self.clone();
        mine.change(changes);
        let mut keys: Vec<&Key> = keys.iter().collect();
        keys.sort_unstable();
        keys.dedup();
        let mut found = Vec::new();
        for key in keys {
            let of_key = mine
                .rows
                .values()
                .filter(|row| row.key().as_ref() == Some(key));
            let Some(row) = of_key.min_by_key(|row| row.place()) else {
                continue;
            };
            let elsewhere = |other: &Row| {
                !other.destination.is_empty()
                    && other.has_key_of(row)
                    && (other.place() < row.place() || other.held.is_some())
            };
            let names_none = row.destination.is_empty();
            let can_be_claimed = row.available_at <= now.micros
                && !self.locked.contains(&row.sequence)
                && !closed.iter().any(|topic| topic == row.topic)
                && row.held.is_none()
                && self.can_be_taken(by, row)
                && mine.is_not_kept_back(row, None)
                && (names_none || mine.none_before(row, |other| other.destination.is_empty()))
                && (!names_none || !mine.rows.values().any(elsewhere));
            if can_be_claimed {
                found.push(row);
            }
        }
        found.sort_unstable_by_key(|row| row.sequence);
        let mut batch = mine.take(by, &found, false, now, changes);
        mine.claim_behind(by, &mut batch, now, changes);
        changes.is_only_claim = false;
        batch
    }

    /// Makes the changes of a transaction that ends.
    pub(super) fn change(&mut self, changes: &Changes) {
        for (sequence, row) in &changes.rows {
            match row {
                Some(row) => {
                    self.rows.insert(*sequence, row.clone());
                }
                None => {
                    self.rows.remove(sequence);
                }
            }
        }
        self.dead.extend(changes.dead.iter().cloned());
        self.ledger.extend(changes.ledger.iter().cloned());
        self.add_events(&changes.events);
    }

    /// Locks the rows that a transaction changes, until the transaction ends.
    pub(super) fn lock(&mut self, changes: &Changes) {
        self.locked.extend(changes.rows.keys());
        self.locked.extend(&changes.only_locked);
        self.held_feeds.extend(&changes.feeds);
        self.keyed_claims += usize::from(changes.is_keyed_claim);
    }

    pub(super) fn unlock(&mut self, changes: &Changes) {
        for sequence in changes.rows.keys().chain(&changes.only_locked) {
            self.locked.remove(sequence);
        }
        for feed in &changes.feeds {
            self.held_feeds.remove(feed);
        }
        self.keyed_claims -= usize::from(changes.is_keyed_claim);
    }
}

/// The time by the database's clock, and by the clock of the asking process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    pub(super) micros: i64,
    pub(super) here: Instant,
}

pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX / 4)
}

/// Whether no relay claims a message that waits for this reason.
fn is_held_up(reason: &WaitReason) -> bool {
    matches!(
        reason,
        WaitReason::NotDue { .. } | WaitReason::BehindKey { .. } | WaitReason::NoRelay { .. }
    )
}

fn freed(row: &Row) -> Row {
    Row {
        held: None,
        ..row.clone()
    }
}
