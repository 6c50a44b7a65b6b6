//! The endpoints that a relay knows, as a value: what they are, and which messages they want. What sends
//! to them is elsewhere (`endpoints/serving.rs`).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use uuid::Uuid;

use super::sql::rows::{AsSeen, Stamp};
use crate::dispatch::Failure;
use crate::endpoints::sql::served::Others;
use crate::engine::claim::sql::claim::Topic;
use crate::engine::claim::sql::namesakes::{Namesakes, OF_ROUTE};
use crate::engine::directory::{At, Decided, Fate, Reading, Roster};
use crate::engine::plan::to::To;
use crate::engine::send::limits::Limits;
use crate::engine::serves::configured::parts;
use crate::engine::serves::routes::{Refuses, Routes, Way, matches_any};
use crate::engine::settle::sql::split::Parts;
use crate::filter::{Filter, FilterOutcome, evaluate};
use crate::message::Message;
use crate::own_topics::is_own;
use crate::status::ReasonCode;

/// How long a message waits for a locked table.
const WHILE_LOCKED: Duration = Duration::from_secs(1);

/// The shortest and the longest wait of a message of a topic that is not declared.
const WHILE_UNDECLARED: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));

/// One endpoint.
#[derive(Debug)]
pub(crate) struct KnownEndpoint {
    /// Constant for a registration.
    pub(crate) id: u32,
    /// The registration of the name: messages are addressed to it.
    pub(crate) registration: Uuid,
    pub(crate) stamp: i64,
    pub(crate) name: Arc<str>,
    pub(super) updated_at: Option<SystemTime>,
    pub(super) topics: Vec<String>,
    pub(super) tenant_id: Option<Uuid>,
    pub(super) filter: Option<Filter>,
    /// When the transaction that registered the endpoint began, by the server's clock.
    pub(super) created_at: Option<SystemTime>,
    /// `None`: the endpoint is disabled.
    pub(super) limits: Option<Limits>,
    /// Why this relay does not send: its settings do not allow the URL, or it cannot decrypt the secret. The messages
    /// wait, because another relay may be able to send.
    pub(super) refused: Option<String>,
    /// Whether the endpoint must first show that it wants messages. Its messages wait.
    pub(crate) is_unverified: bool,
    /// Whether it is read instead of sent to.
    pub(super) is_feed: bool,
}

impl KnownEndpoint {
    pub(crate) fn is_enabled(&self) -> bool {
        self.limits.is_some()
    }

    pub(super) fn as_seen(&self) -> AsSeen<'_> {
        AsSeen {
            name: &self.name,
            updated_at: self.updated_at,
        }
    }

    /// Where its messages go.
    fn way(&self) -> To {
        match self.limits.as_ref().is_some_and(|limits| limits.is_feed) {
            true => To::Feed(self.id),
            false => To::Member(self.id),
        }
    }

    /// What becomes of a message for this endpoint alone.
    fn fate(&self) -> Fate {
        Fate::Member(self.id, Arc::clone(&self.name), self.registration)
    }

    /// Whether this relay does not send to the endpoint: its settings refuse it, or it is not verified.
    pub(crate) fn is_held(&self) -> bool {
        self.refused.is_some() || self.is_unverified
    }

    /// Whether a message that names the endpoint is not for it: the name was registered again, or the row was given to
    /// another tenant, after the message was addressed; or both belong to different tenants.
    // Why: docs/decisions.md#registrations
    pub(super) fn is_another(&self, message: &Message) -> bool {
        let tenants = self.tenant_id.zip(message.tenant_id);
        message
            .registration
            .is_some_and(|one| one != self.registration)
            || tenants.is_some_and(|(own, of_message)| own != of_message)
    }

    /// Whether the message may have been addressed to this endpoint, which is disabled now: its row has changed since the
    /// message was enqueued.
    fn may_have_wanted(&self, message: &Message, now: Instant) -> bool {
        self.updated_at.is_none_or(|at| at >= message.created_at) && self.wants(message, now)
    }

    /// Whether the message has a topic and the tenant of this endpoint, and is not of a transaction that began before
    /// that of the registration. If the registration is in the future, the server's clock was set back, and says nothing.
    // Why: docs/decisions.md#exact-registration
    fn wants(&self, message: &Message, now: Instant) -> bool {
        let registered = self.created_at;
        let is_earlier = |at: &SystemTime| message.created_at < *at && *at <= message.time_of(now);
        if registered.as_ref().is_some_and(is_earlier) {
            return false;
        }
        let is_tenants = self
            .tenant_id
            .is_none_or(|tenant| message.tenant_id == Some(tenant));
        is_tenants && subscribe(&self.topics, &message.topic)
    }
}

/// Whether these patterns of endpoints match a topic. The relay's own events match only patterns that
/// begin with `outbox.`, so that a customer with `*` does not get them.
fn subscribe(patterns: &[String], topic: &str) -> bool {
    if !is_own(topic) {
        return matches_any(patterns, topic);
    }
    let asks = |pattern: &&String| pattern.starts_with("outbox.");
    let mut asking = patterns.iter().filter(asks);
    asking.any(|pattern| matches_any(std::slice::from_ref(pattern), topic))
}

/// Endpoints by their tenants.
type OfTenants = HashMap<Option<Uuid>, Vec<Arc<KnownEndpoint>>>;

/// All endpoints, at one point in time: a value, for the planner and for the fate of messages.
#[derive(Default)]
pub(crate) struct Registry {
    pub(super) stamp: Stamp,
    pub(super) by_name: HashMap<Arc<str>, Arc<KnownEndpoint>>,
    by_id: HashMap<u32, Arc<KnownEndpoint>>,
    /// The enabled endpoints, by tenant, in the order of their names.
    of_tenants: OfTenants,
    /// The disabled endpoints, likewise.
    disabled: OfTenants,
    /// The topics of all enabled endpoints.
    topics: Vec<String>,
    /// Whether runs of any of them have more than one message.
    pub(super) has_runs: bool,
    /// Whether any endpoint is a feed, enabled or not.
    pub(super) has_feeds: bool,
    /// The endpoints that this relay may verify.
    pub(crate) unverified: Vec<Arc<KnownEndpoint>>,
    pub(super) last_id: u32,
    /// What this relay serves.
    pub(super) routes: Arc<Routes>,
    /// What the active relays serve.
    pub(super) others: Arc<Others>,
    /// The removed endpoints that may still have messages.
    pub(crate) removed: HashSet<String>,
    /// The number of the registrations that have been read.
    pub(crate) registrations: Option<i64>,
    /// Whether this relay sends to endpoints.
    pub(super) can_send: bool,
    /// Which messages for endpoints of one name are left to other relays, if some may be.
    pub(crate) namesakes: Option<Namesakes>,
    /// The enabled endpoints to which this relay does not send because of its settings, if it sends to others.
    pub(super) refuses: Arc<Refuses>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registry({} destinations)", self.by_name.len())
    }
}

impl Registry {
    /// The registry of a relay with these routes, without endpoints.
    pub(super) fn of(routes: Arc<Routes>) -> Self {
        Self {
            routes,
            ..Self::default()
        }
    }

    /// The stamp of each name, or with `only` of these.
    pub(crate) fn stamps(&self, only: Option<&[&str]>) -> HashMap<String, i64> {
        let stamp = |(name, one): (&Arc<str>, &Arc<KnownEndpoint>)| (name.to_string(), one.stamp);
        match only {
            None => self.by_name.iter().map(stamp).collect(),
            Some(names) => {
                let known = names
                    .iter()
                    .filter_map(|name| self.by_name.get_key_value(*name));
                known.map(stamp).collect()
            }
        }
    }

    /// The stamp of all endpoints after these have changed and those are gone.
    pub(super) fn stamp_with(
        &self,
        changed: &HashMap<String, i64>,
        gone: &HashMap<String, i64>,
    ) -> Stamp {
        let (mut count, mut sum) = self.stamp;
        for (name, stamp) in changed {
            let before = self.named(name).map(|one| one.stamp);
            count += i64::from(before.is_none());
            sum = sum.wrapping_add(*stamp).wrapping_sub(before.unwrap_or(0));
        }
        for stamp in gone.values() {
            (count, sum) = (count - 1, sum.wrapping_sub(*stamp));
        }
        (count, sum)
    }

    pub(crate) fn named(&self, name: &str) -> Option<&Arc<KnownEndpoint>> {
        self.by_name.get(name)
    }

    pub(crate) fn get(&self, id: u32) -> Option<&Arc<KnownEndpoint>> {
        self.by_id.get(&id)
    }

    /// Whether the endpoint was removed. Messages that name it end in the ledger, and leave no dead letters.
    pub(super) fn is_removed(&self, name: &str) -> bool {
        self.removed.contains(name)
    }

    /// Whether a message of this topic may be for an endpoint.
    pub(super) fn may_want(&self, topic: &str) -> bool {
        subscribe(&self.topics, topic)
    }

    /// The enabled endpoints whose topics and tenant match a message, and those that a relay may have sent the message
    /// to before they were disabled. Filters on the payload are not applied.
    fn matching<'a, 'm>(
        &'a self,
        message: &'m Message,
        now: Instant,
    ) -> impl Iterator<Item = &'a Arc<KnownEndpoint>> + use<'a, 'm> {
        let enabled = for_tenant_of(&self.of_tenants, message);
        let enabled = enabled.filter(move |one| one.wants(message, now));
        // The row of a message that went at once to its only endpoint does not name the endpoint. Then its relay
        // has crashed, and the takeover has counted an attempt.
        let may_have_gone = message.attempts > 0 && self.may_go_without_a_part(message);
        let disabled = may_have_gone.then(|| for_tenant_of(&self.disabled, message));
        let disabled = disabled.into_iter().flatten();
        enabled.chain(disabled.filter(move |one| one.may_have_wanted(message, now)))
    }

    /// Whether a message goes to its only endpoint without a row of its own, if it has a single one. A
    /// message with an ordering key always gets its own row: other messages of the key may have other endpoints. So
    /// does a message with an idempotency key: later messages of the key are compared by endpoint.
    // Why: docs/decisions.md#direct-sends
    pub(super) fn may_go_without_a_part(&self, message: &Message) -> bool {
        message.ordering_key.is_none()
            && !message.has_idempotency_key()
            && self.others_route(&message.topic).is_none()
    }

    /// Whether messages of this topic, which no route of this relay serves and no endpoint wants, are for
    /// nobody. Only a relay that sends to endpoints decides this.
    // Why: docs/decisions.md#no-subscriber
    pub(super) fn is_without_subscriber(&self, topic: &str) -> bool {
        self.can_send && !self.is_empty() && self.others_route(topic).is_none()
    }

    /// Whether messages of this topic, which no route of this relay serves, wait for a relay that does not run: it has
    /// served the topic before.
    pub(super) fn awaits_route(&self, topic: &str) -> bool {
        self.others_route(topic).is_none() && self.others.topics.has_served(topic)
    }

    /// Whether topics are declared, and this one is not: a message that nobody wants waits.
    pub(super) fn is_undeclared(&self, topic: &str) -> bool {
        self.others.topics.is_undeclared(topic)
    }

    /// Whether this relay claims messages of this topic, which another relay's route serves, because endpoints may want them.
    pub(super) fn hands_on(&self, topic: &str) -> bool {
        let others = self.others_route(topic);
        self.may_want(topic) && others.is_some_and(|names| !names.is_empty())
    }

    /// The endpoints of another relay's route for this topic.
    pub(super) fn others_route(&self, topic: &str) -> Option<Vec<&str>> {
        self.others
            .routes
            .iter()
            .find_map(|routes| routes.names(topic))
    }

    /// The same endpoints, to be changed and then indexed.
    pub(super) fn copy(&self) -> Self {
        Self {
            by_name: self.by_name.clone(),
            last_id: self.last_id,
            routes: Arc::clone(&self.routes),
            ..Self::default()
        }
    }

    /// Derives the other fields from `by_name`.
    pub(super) fn index(&mut self) {
        let routes = &*self.routes;
        self.namesakes = (!self.is_empty() || !self.removed.is_empty()).then(|| {
            let of = |one: &Arc<KnownEndpoint>| one.registration;
            let others = self.others.routes.iter().flat_map(Routes::all_names);
            let is_elsewhere = |name: &&str| !routes.has(name) && self.by_name.contains_key(*name);
            Namesakes {
                configured: routes.all_names().map(str::to_owned).collect(),
                registered: (routes.all_names())
                    .filter_map(|name| self.named(name).map(of))
                    .collect(),
                elsewhere: others.filter(is_elsewhere).map(str::to_owned).collect(),
            }
        });
        let mut topics = HashSet::new();
        let mut refuses = Refuses::default();
        for (name, one) in &self.by_name {
            self.by_id.insert(one.id, Arc::clone(one));
            self.has_feeds |= one.is_feed;
            if let Some(why) = one.refused.as_deref().filter(|_| self.can_send) {
                refuses.add(name, why);
            }
            if one.is_unverified && self.can_send {
                self.unverified.push(Arc::clone(one));
            }
            let of_tenants = match one.is_enabled() {
                true => &mut self.of_tenants,
                false => &mut self.disabled,
            };
            let of_tenant = of_tenants.entry(one.tenant_id).or_default();
            of_tenant.push(Arc::clone(one));
            if one.is_enabled() {
                topics.extend(one.topics.iter().cloned());
                self.has_runs |= one.limits.as_ref().is_some_and(|one| one.key_run > 1);
            }
        }
        (self.of_tenants.values_mut())
            .chain(self.disabled.values_mut())
            .for_each(|all| all.sort_unstable_by(|one, other| one.name.cmp(&other.name)));
        self.topics = topics.into_iter().collect();
        self.refuses = Arc::new(refuses);
    }
}

impl Roster for Registry {
    fn way(&self, topic: &Topic) -> To {
        let Topic { topic, destination } = topic;
        match (self.routes.find(topic, destination), destination.as_str()) {
            (Way::NotTaken, _) => To::Nowhere,
            (Way::NoRoute, "") if self.awaits_route(topic) => To::Nowhere,
            (_, "") if self.may_want(topic) => To::Split,
            (Way::NoRoute, "")
                if self.is_without_subscriber(topic) && !self.is_undeclared(topic) =>
            {
                To::Split
            }
            (Way::UnknownDestination, name) => match self.named(name) {
                Some(one) if one.is_enabled() => one.way(),
                None if self.is_removed(name) => To::Split,
                Some(_) | None => To::Nowhere,
            },
            (way, _) => way.into(),
        }
    }

    fn decide(&self, message: &Message, at: &At<'_>) -> Decided {
        let way = self.routes.find(&message.topic, &message.destination);
        let is_behind = at.reading != Reading::Fresh && self.registrations != at.seen;
        let fate = match way {
            Way::NotTaken => Fate::Elsewhere,
            _ if !message.destination.is_empty() => self.addressed(way, message, at),
            _ if is_behind => unread(at),
            Way::NoRoute if self.awaits_route(&message.topic) => Fate::Elsewhere,
            _ => {
                let (wanting, doubtful) = self.wanting(message, at.now);
                let fate = self.to_all(way, &wanting, message, at);
                return Decided { fate, doubtful };
            }
        };
        fate.into()
    }

    fn member(&self, name: &str) -> Option<u32> {
        self.named(name).map(|one| one.id)
    }

    fn has(&self, member: u32) -> bool {
        self.by_id.contains_key(&member)
    }

    fn limits(&self, member: u32) -> Option<&Limits> {
        self.get(member)?.limits.as_ref()
    }

    fn tenant(&self, member: u32) -> Option<Uuid> {
        self.get(member)?.tenant_id
    }

    fn namesakes(&self) -> Option<&Namesakes> {
        self.namesakes.as_ref()
    }

    fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    fn has_runs(&self) -> bool {
        self.has_runs
    }
}

/// What becomes of a message whose fate depends on a read.
fn unread(at: &At<'_>) -> Fate {
    match at.reading {
        Reading::Fresh | Reading::NotAsked => Fate::Ask,
        Reading::Locked => {
            let error = "which endpoints want the message is not known: another session has locked their table";
            let failure = Failure::new(ReasonCode::NotFannedOut, error);
            Fate::Waits(failure, WHILE_LOCKED)
        }
    }
}

/// This fate, if the endpoints were read after the claim.
fn sure(at: &At<'_>, fate: impl FnOnce() -> Fate) -> Fate {
    match at.reading {
        Reading::Fresh => fate(),
        Reading::NotAsked | Reading::Locked => unread(at),
    }
}

/// The message names an endpoint that was removed.
fn removed() -> Fate {
    let error = "the endpoint of the message was removed, was registered again, or belongs to another tenant now";
    Fate::Dead(Failure::new(ReasonCode::DestinationRemoved, error))
}

/// Nobody wants the message, and its topic is not declared. It waits for as long as it has waited, so that the claims of
/// all such messages cost little.
fn undeclared(message: &Message, now: Instant) -> Fate {
    let topic = &message.topic;
    let error = format!("the topic {topic:?} is not declared, and nobody wants the message");
    let age = message.time_of(now).duration_since(message.created_at);
    let wait = age
        .unwrap_or_default()
        .clamp(WHILE_UNDECLARED.0, WHILE_UNDECLARED.1);
    Fate::Waits(Failure::new(ReasonCode::UnknownTopic, error), wait)
}

impl Registry {
    /// What becomes of a message that names its destination. A name may mean two: the registration says which.
    fn addressed(&self, way: Way<'_>, message: &Message, at: &At<'_>) -> Fate {
        let named = self.named(&message.destination);
        match (way, message.registration) {
            // The destination of the settings of another relay.
            (Way::UnknownDestination, Some(OF_ROUTE)) => Fate::Elsewhere,
            (Way::UnknownDestination, _) => match named {
                Some(one) if one.is_another(message) => sure(at, removed),
                // Claimed as a message of a removed endpoint, or behind one: no thread here sends the message.
                Some(one) if one.is_held() => Fate::Elsewhere,
                Some(one) => one.fate(),
                None if self.is_removed(&message.destination) => sure(at, removed),
                None => Fate::Elsewhere,
            },
            (Way::To(number), None | Some(OF_ROUTE)) => Fate::Bulkhead(number),
            // A group of handlers that has none for the topic.
            (_, None | Some(OF_ROUTE)) => Fate::Elsewhere,
            // The claim was made before this relay knew the registration.
            _ if named.is_some_and(|one| !one.is_another(message)) => Fate::Elsewhere,
            _ => sure(at, removed),
        }
    }

    /// What becomes of a message that goes where the routes lead, and to the endpoints that want it.
    fn to_all(
        &self,
        way: Way<'_>,
        wanting: &[&Arc<KnownEndpoint>],
        message: &Message,
        at: &At<'_>,
    ) -> Fate {
        let topic = &message.topic;
        // A message that is fanned out in part has parts, so it goes nowhere itself.
        let is_begun = message.split_to.is_some();
        // A claim of a message that may be split has not waited for earlier parts of its key, so it gets a part, too. What
        // was read after the claim says nothing of that.
        let has_waited = message.ordering_key.is_none()
            || (!self.may_want(topic) && at.reading == Reading::NotAsked);
        let routed: Vec<&str> = match (way, wanting) {
            (Way::To(number), []) if !is_begun && has_waited => return Fate::Bulkhead(number),
            (Way::To(number), _) => self.routes.names_of(&[number]).collect(),
            (Way::Split(numbers), _) => self.routes.names_of(numbers).collect(),
            (_, []) if self.is_without_subscriber(topic) => {
                let nobody = || match is_begun {
                    true => Fate::Parts(Parts::default()),
                    false if self.is_undeclared(topic) => undeclared(message, at.now),
                    false => Fate::Nobody,
                };
                return match self.matching(message, at.now).next() {
                    // Only filters rule it out.
                    Some(_) => nobody(),
                    // An endpoint that was just registered may be unknown here.
                    None => sure(at, nobody),
                };
            }
            // Another relay has a route for the topic: the message gets a row for that relay's destination. A release would
            // let this relay claim the message again and again.
            (_, []) if !self.hands_on(topic) => return Fate::Elsewhere,
            (_, [only]) if !is_begun && self.may_go_at_once(message, only, at) => {
                return only.fate();
            }
            _ => self.others_route(topic).unwrap_or_default(),
        };
        let of_wanting = wanting.iter();
        let of_wanting = of_wanting.map(|one| (one.name.to_string(), Some(one.registration)));
        let mut all: BTreeMap<String, Option<Uuid>> = of_wanting.collect();
        // A part has one name. If a route leads to a namesake of an endpoint, the part is for the route.
        all.extend(routed.into_iter().map(|name| {
            let namesake = self.named(name).map(|_| OF_ROUTE);
            (name.to_owned(), namesake)
        }));
        Fate::Parts(parts(all, message.split_to.as_ref()))
    }

    /// The endpoints that want a message, and the names of those whose filters need too many steps for it.
    fn wanting(
        &self,
        message: &Message,
        now: Instant,
    ) -> (Vec<&Arc<KnownEndpoint>>, Vec<Arc<str>>) {
        let mut wanting: Vec<&Arc<KnownEndpoint>> = self.matching(message, now).collect();
        let asked: Vec<&Filter> = (wanting.iter())
            .filter_map(|one| one.filter.as_ref())
            .collect();
        let mut too_costly = Vec::new();
        if asked.is_empty() {
            return (wanting, too_costly);
        }
        let (topic, headers) = (&message.topic, message.headers.as_deref());
        let mut outcomes = evaluate(&asked, topic, headers, &message.payload).into_iter();
        wanting.retain(|one| {
            let outcome = (one.filter.as_ref()).and_then(|_| outcomes.next());
            if outcome == Some(FilterOutcome::TooMuch) {
                too_costly.push(Arc::clone(&one.name));
            }
            outcome.is_none_or(|outcome| outcome == FilterOutcome::Matches)
        });
        (wanting, too_costly)
    }

    /// Whether a message for a single endpoint may go there without a row of its own. The destination must have room.
    fn may_go_at_once(&self, message: &Message, only: &KnownEndpoint, at: &At<'_>) -> bool {
        message.attempts == 0 && self.may_go_without_a_part(message) && (at.left)(only.id) > 0
    }
}

/// The endpoints that have no tenant, or that of the message.
fn for_tenant_of<'a>(
    all: &'a OfTenants,
    message: &Message,
) -> impl Iterator<Item = &'a Arc<KnownEndpoint>> + use<'a> {
    let tenants = [Some(None), message.tenant_id.map(Some)].into_iter();
    let found = tenants.flatten().filter_map(|tenant| all.get(&tenant));
    found.flatten()
}

#[cfg(test)]
mod tests;
