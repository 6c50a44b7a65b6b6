//! Where a claimed message goes, or how it is settled without a send. Decided once, when the message is claimed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::bulkhead::Bulkhead;
use super::job::{Job, Terms, is_expired};
use super::registry::{KnownEndpoint, Registry};
use super::room::Rooms;
use super::run::joined;
use super::shared::Shared;
use super::to::To;
use super::verdict::{Attempt, Retries, Verdict};
use crate::clock;
use crate::config::OnDead;
use crate::dispatch::Failure;
use crate::filter::{Filter, Outcome, evaluate};
use crate::log;
use crate::message::Message;
use crate::routes::{Routes, Way};
use crate::status::ReasonCode;
use crate::store::relay::claim::{Batch, Claimed, Known, TakenOver};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::namesakes::OF_ROUTE;
use crate::store::relay::settle::Claim;
use crate::store::relay::split::Parts;

/// The facts that decide where claimed messages go.
pub(super) struct Ways<'a> {
    pub(super) routes: &'a Routes,
    pub(super) bulkheads: &'a [Bulkhead],
    /// Whether dead letters of no destination block their ordering keys.
    pub(super) on_dead: OnDead,
    pub(super) registry: Arc<Registry>,
    /// The room of endpoints.
    pub(super) rooms: Rooms,
    /// Reports the destination of a filter that needs too many steps for a message.
    pub(super) report_too_costly: &'a dyn Fn(&str, &Message),
    /// How new the registry is.
    pub(super) reading: Reading,
    /// The registrations that the claim has seen.
    pub(super) seen: Option<i64>,
    /// Whether the relay reads the table of endpoints.
    pub(super) knows_endpoints: bool,
}

/// How new the relay's knowledge of endpoints is, compared with the claim of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// Older. What becomes of a message may depend on a read.
    NotYet,
    /// Read after the claim.
    Fresh,
    /// Older, and nobody reads: a settler has claimed the message, or the query failed. Another claim follows.
    Released,
    /// Older, because another session has locked the table.
    Locked,
}

/// How long a message waits for a locked table.
const WHILE_LOCKED: Duration = Duration::from_secs(1);

/// The shortest and the longest wait of a message of a topic that is not declared.
const WHILE_UNDECLARED: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));

/// How long a relay leaves a message to the other relays.
const LEFT_TO_OTHERS: Duration = Duration::from_secs(5);

/// What becomes of one message.
struct Fate<'a> {
    to: To,
    /// The name and the registration of the endpoint.
    customer: Option<(Arc<str>, Option<Uuid>)>,
    /// How often the message is sent. If it is not sent: how it is settled.
    sent: Result<&'a Retries, Verdict>,
}

impl Fate<'_> {
    fn settled(to: To, verdict: Verdict) -> Self {
        Self {
            to,
            customer: None,
            sent: Err(verdict),
        }
    }

    /// A message that this relay does not send has its verdict until it expires.
    fn not_sent(to: To, verdict: Verdict, message: &Message, now: Instant) -> Self {
        let verdict = match is_expired(message, now) {
            true => Verdict::expired(),
            false => verdict,
        };
        Self::settled(to, verdict)
    }

    fn nowhere(message: &Message, now: Instant) -> Self {
        Self::not_sent(To::Nowhere, Verdict::Released, message, now)
    }

    /// Which endpoints want the message is not known: another session has locked their table.
    fn unknown(message: &Message, now: Instant) -> Self {
        let error =
            "which endpoints want the message is not known: another session has locked their table";
        let failure = Failure::new(ReasonCode::NotFannedOut, error);
        let verdict = Verdict::Retry(failure, WHILE_LOCKED, Attempt::NotCounted);
        Self::not_sent(To::Split, verdict, message, now)
    }

    /// The message is for an endpoint, of which this relay knows none.
    fn namesake(message: &Message, now: Instant) -> Self {
        let name = &message.destination;
        let error =
            format!("the message is for the endpoint {name:?}, and this relay knows no endpoints");
        let failure = Failure::new(ReasonCode::UnknownDestination, error);
        let verdict = Verdict::Retry(failure, LEFT_TO_OTHERS, Attempt::NotCounted);
        Self::not_sent(To::Split, verdict, message, now)
    }

    /// Nobody wants the message, and its topic is not declared. It waits for as long as it has waited, so that the claims
    /// of all such messages cost little.
    fn undeclared(message: &Message, now: Instant) -> Self {
        let topic = &message.topic;
        let error = format!("the topic {topic:?} is not declared, and nobody wants the message");
        let failure = Failure::new(ReasonCode::UnknownTopic, error);
        let age = message.time_of(now).duration_since(message.created_at);
        let wait = age
            .unwrap_or_default()
            .clamp(WHILE_UNDECLARED.0, WHILE_UNDECLARED.1);
        let verdict = Verdict::Retry(failure, wait, Attempt::NotCounted);
        Self::not_sent(To::Split, verdict, message, now)
    }

    /// The message names an endpoint that was removed.
    fn removed(message: &Message) -> Self {
        let error = "the endpoint of the message was removed, was registered again, or belongs to another tenant now";
        let failure = Failure::new(ReasonCode::DestinationRemoved, error);
        Self {
            customer: Some((message.destination.as_str().into(), None)),
            ..Self::settled(To::Split, Verdict::Dead(failure, Attempt::NotCounted))
        }
    }
}

impl<'a> Fate<'a> {
    fn of_customer(one: &'a KnownEndpoint) -> Option<Self> {
        let limits = one.limits.as_ref()?;
        Some(Self {
            to: To::Registered(one.id),
            customer: Some((Arc::clone(&one.name), Some(one.registration))),
            sent: Ok(&limits.retries),
        })
    }
}

impl<'a> Ways<'a> {
    /// Decides where a claimed message goes, and makes it a job. `Err`: endpoints must be read first.
    pub(super) fn job(
        &mut self,
        claimed: Claimed,
        lease: LeaseId,
        now: Instant,
    ) -> Result<Job, Claimed> {
        let registry = Arc::clone(&self.registry);
        let too_costly = RefCell::default();
        let fate = self.find(&registry, &claimed.message, &too_costly, now);
        let Some(fate) = fate else {
            return Err(claimed);
        };
        for one in too_costly.take() {
            (self.report_too_costly)(&one.name, &claimed.message);
        }
        Ok(self.made(&registry, claimed, lease, fate))
    }

    /// Like [`job`](Self::job), when nothing can be read any more.
    pub(super) fn last_job(&mut self, claimed: Claimed, lease: LeaseId, now: Instant) -> Job {
        self.job(claimed, lease, now).unwrap_or_else(|claimed| {
            let registry = Arc::clone(&self.registry);
            let fate = Fate::not_sent(To::Split, Verdict::Released, &claimed.message, now);
            self.made(&registry, claimed, lease, fate)
        })
    }

    fn made(
        &mut self,
        registry: &Registry,
        mut claimed: Claimed,
        lease: LeaseId,
        fate: Fate<'_>,
    ) -> Job {
        let Fate { to, customer, sent } = fate;
        let terms = self.terms(registry, to, sent.as_ref().err());
        let unsent = unsent(&claimed, sent);
        terms.limit(&mut claimed.message);
        let (customer, registration) = customer.unzip();
        let job = Job {
            unsent,
            to,
            customer,
            registration: registration.flatten(),
            terms,
            lease,
            message: claimed.message,
            behind: Vec::new(),
        };
        self.take_room(&job);
        job
    }

    /// Counts a message that is sent to an endpoint.
    fn take_room(&mut self, job: &Job) {
        if let (To::Registered(id), None) = (job.to, &job.unsent) {
            self.rooms.take(id);
        }
    }

    /// What the policy of the message's destination says about settling. A message to be fanned out is a dead letter for
    /// all its destinations, so it blocks its key if it would at any of them.
    fn terms(&self, registry: &Registry, to: To, settled: Option<&Verdict>) -> Terms {
        let of_none = Terms {
            on_dead: self.on_dead,
            expires_after: None,
        };
        let of_customer =
            |one: &KnownEndpoint| one.limits.as_ref().map_or(of_none, |one| one.terms);
        match (to, settled) {
            (To::Bulkhead(number), _) => self.bulkheads[number].limits.terms,
            (To::Registered(id), _) => registry.get(id).map_or(of_none, |one| of_customer(one)),
            (To::Split, Some(Verdict::Split(parts))) => {
                let of_part = |name: &String| {
                    let configured = self.bulkheads.iter().find(|one| *one.name == **name);
                    let registered = || registry.named(name).map(|one| of_customer(one));
                    configured.map(|one| one.limits.terms).or_else(registered)
                };
                let mut parts = parts.to.iter().map(|name| of_part(name).unwrap_or(of_none));
                let blocks = parts.any(|terms| terms.on_dead == OnDead::Block);
                Terms {
                    on_dead: if blocks {
                        OnDead::Block
                    } else {
                        OnDead::Continue
                    },
                    ..of_none
                }
            }
            _ => of_none,
        }
    }

    /// What becomes of a message. `None`: that depends on a read.
    fn find<'r>(
        &self,
        registry: &'r Registry,
        message: &Message,
        too_costly: &RefCell<Vec<&'r KnownEndpoint>>,
        now: Instant,
    ) -> Option<Fate<'r>>
    where
        'a: 'r,
    {
        let way = self.routes.find(&message.topic, &message.destination);
        match way {
            Way::NotTaken => Some(Fate::nowhere(message, now)),
            _ if !message.destination.is_empty() => self.addressed(way, registry, message, now),
            _ if self.is_behind(registry) => self.unread(message, now),
            Way::NoRoute if registry.awaits_route(&message.topic) => {
                Some(Fate::nowhere(message, now))
            }
            _ => {
                let wanting = wanting(registry, message, too_costly);
                self.to_all(way, &wanting, registry, message, now)
            }
        }
    }

    /// What becomes of a message that names its destination. A name may mean two: the registration says which.
    fn addressed<'r>(
        &self,
        way: Way<'_>,
        registry: &'r Registry,
        message: &Message,
        now: Instant,
    ) -> Option<Fate<'r>>
    where
        'a: 'r,
    {
        let named = registry.named(&message.destination);
        let nowhere = || Fate::nowhere(message, now);
        let removed = || self.sure(|| Fate::removed(message), message, now);
        Some(match (way, message.registration) {
            // The destination of the settings of another relay.
            (Way::UnknownDestination, Some(OF_ROUTE)) => nowhere(),
            (Way::UnknownDestination, _) => match named {
                Some(one) if one.is_another(message) => return removed(),
                // Claimed as a message of a removed destination, or behind one: no thread here sends the message.
                Some(one) if one.is_held() => nowhere(),
                Some(one) => Fate::of_customer(one).unwrap_or_else(nowhere),
                None if registry.is_removed(&message.destination) => return removed(),
                None => nowhere(),
            },
            (Way::To(number), None | Some(OF_ROUTE)) => self.to_bulkhead(number),
            // A group of handlers that has none for the topic.
            (_, None | Some(OF_ROUTE)) => nowhere(),
            _ if !self.knows_endpoints => Fate::namesake(message, now),
            // The claim was made before this relay knew the registration.
            _ if named.is_some_and(|one| !one.is_another(message)) => nowhere(),
            _ => return removed(),
        })
    }

    /// What becomes of a message that goes where the routes lead, and to the endpoints that want it.
    fn to_all<'r>(
        &self,
        way: Way<'_>,
        wanting: &[&'r Arc<KnownEndpoint>],
        registry: &'r Registry,
        message: &Message,
        now: Instant,
    ) -> Option<Fate<'r>>
    where
        'a: 'r,
    {
        let topic = &message.topic;
        // A message that is fanned out in part has parts, so it goes nowhere itself.
        let is_begun = message.split_to.is_some();
        let name = |number: &usize| self.bulkheads[*number].name.to_string();
        let routed: Vec<String> = match (way, wanting) {
            (Way::To(number), []) if !is_begun => return Some(self.to_bulkhead(number)),
            (Way::To(number), _) => vec![name(&number)],
            (Way::Split(numbers), _) => numbers.iter().map(name).collect(),
            // An endpoint that was just registered may be unknown here.
            (_, []) if registry.is_without_subscriber(topic) => {
                let nobody = || match is_begun {
                    true => Fate::settled(To::Split, Verdict::Split(Parts::default())),
                    false if registry.is_undeclared(topic) => Fate::undeclared(message, now),
                    false => Fate::settled(To::Split, Verdict::NoSubscriber),
                };
                return self.sure(nobody, message, now);
            }
            // Another relay has a route for the topic: the message gets a row for that relay's destination. A release would
            // let this relay claim the message again and again.
            (_, []) if !registry.hands_on(topic) => return Some(Fate::nowhere(message, now)),
            (_, [only]) if !is_begun && self.may_go_at_once(registry, message, only) => {
                return Some(
                    Fate::of_customer(only).unwrap_or_else(|| Fate::nowhere(message, now)),
                );
            }
            _ => {
                let others = registry.others_route(topic).unwrap_or_default();
                others.into_iter().map(str::to_owned).collect()
            }
        };
        let parts = parts(routed, wanting, registry, message.split_to.as_ref());
        Some(Fate::settled(To::Split, Verdict::Split(parts)))
    }

    fn to_bulkhead<'r>(&self, number: usize) -> Fate<'r>
    where
        'a: 'r,
    {
        Fate {
            to: To::Bulkhead(number),
            customer: None,
            sent: Ok(&self.bulkheads[number].limits.retries),
        }
    }

    /// Whether the claim has seen registrations that this relay does not know.
    fn is_behind(&self, registry: &Registry) -> bool {
        self.knows_endpoints
            && self.reading != Reading::Fresh
            && registry.registrations != self.seen
    }

    /// This fate, if the relay has read the endpoints after the claim.
    fn sure<'r>(
        &self,
        fate: impl FnOnce() -> Fate<'r>,
        message: &Message,
        now: Instant,
    ) -> Option<Fate<'r>> {
        match self.reading {
            Reading::Fresh => Some(fate()),
            _ => self.unread(message, now),
        }
    }

    /// What becomes of a message whose fate depends on a read.
    fn unread<'r>(&self, message: &Message, now: Instant) -> Option<Fate<'r>> {
        match self.reading {
            Reading::NotYet => None,
            Reading::Locked => Some(Fate::unknown(message, now)),
            Reading::Released | Reading::Fresh => {
                Some(Fate::not_sent(To::Split, Verdict::Released, message, now))
            }
        }
    }

    /// Whether a message for a single endpoint may go there without a row of its own. The destination
    /// must have room.
    fn may_go_at_once(&self, registry: &Registry, message: &Message, only: &KnownEndpoint) -> bool {
        message.attempts == 0
            && registry.may_go_without_a_part(message)
            && self.rooms.left(only.id) > 0
    }
}

/// The endpoints that want a message. Also tells those whose filters need too many steps for it.
fn wanting<'r>(
    registry: &'r Registry,
    message: &Message,
    too_costly: &RefCell<Vec<&'r KnownEndpoint>>,
) -> Vec<&'r Arc<KnownEndpoint>> {
    let mut wanting: Vec<&Arc<KnownEndpoint>> = registry.wanting(message).collect();
    let asked: Vec<&Filter> = (wanting.iter())
        .filter_map(|one| one.filter.as_ref())
        .collect();
    if asked.is_empty() {
        return wanting;
    }
    let (topic, headers) = (&message.topic, message.headers.as_deref());
    let mut outcomes = evaluate(&asked, topic, headers, &message.payload).into_iter();
    wanting.retain(|one| {
        let outcome = (one.filter.as_ref()).and_then(|_| outcomes.next());
        if outcome == Some(Outcome::TooMuch) {
            too_costly.borrow_mut().push(one);
        }
        outcome.is_none_or(|outcome| outcome == Outcome::Matches)
    });
    wanting
}

/// The rows that a message gets in its place, after the last one that it has: one for each name of a route, and one for
/// each endpoint that wants it.
fn parts(
    routed: Vec<String>,
    wanting: &[&Arc<KnownEndpoint>],
    registry: &Registry,
    after: Option<&String>,
) -> Parts {
    // Parts are placed in the order of their names, so the last placed part says which are left.
    let of_wanting = (wanting.iter()).map(|one| (one.name.to_string(), Some(one.registration)));
    let mut parts: BTreeMap<String, Option<Uuid>> = of_wanting.collect();
    // A part has one name. If a route leads to a namesake of an endpoint, the part is for the route.
    parts.extend(routed.into_iter().map(|name| {
        let namesake = registry.named(&name).map(|_| OF_ROUTE);
        (name, namesake)
    }));
    let left = parts.into_iter();
    let left = left.filter(|(name, _)| after.is_none_or(|last| name > last));
    let (to, registrations) = left.unzip();
    Parts { to, registrations }
}

impl Job {
    /// Frees the payload and the headers of the message.
    pub(super) fn unload(&mut self, bulkheads: &[Bulkhead]) {
        let message = &mut self.message;
        if let Some(bulkhead) = self.to.bulkhead(bulkheads) {
            bulkhead.unload(message);
        }
        (message.payload, message.headers) = (String::new(), None);
    }
}

impl Shared {
    /// Takes claimed messages in, with the rest of their runs, and decides where each message goes. `seen`: the
    /// registrations that the claim has seen. `read`: reads the endpoints, for messages whose fate depends on that; it gets
    /// the names that these messages bear.
    pub(super) fn took(
        &self,
        batch: Batch,
        lease: LeaseId,
        read: impl FnOnce(&[Claimed]) -> Reading,
    ) -> Vec<Job> {
        let Batch {
            mut claimed,
            behind,
            registrations,
            ..
        } = batch;
        let first = claimed.len();
        claimed.extend(behind);
        self.count_claimed(&claimed);
        let mut jobs = self.decide(claimed, lease, registrations, read);
        let claims = jobs.iter().map(|job| (Claim::of(&job.message), job.to));
        self.custody.began(lease, claims);
        let behind = jobs.split_off(first);
        joined(jobs, behind)
    }

    fn count_claimed(&self, claimed: &[Claimed]) {
        let is_taken_over = |one: &&Claimed| one.taken_over != TakenOver::No;
        let taken_over = claimed.iter().filter(is_taken_over).count() as u64;
        for Claimed { message, .. } in claimed.iter().filter(is_taken_over) {
            log::debug!(event = "taken_over", sequence = message.sequence.0, topic = message.topic, attempts = message.attempts; "took over message {} of {} from a relay that crashed or lost its lease ({} attempts so far)", message.message_id, message.topic, message.attempts);
        }
        if taken_over > 0 {
            log::warn!(event = "takeover", messages = taken_over; "took over {taken_over} messages from a relay that crashed or lost its lease: this relay continues with them");
        }
        let count = claimed.len() as u64;
        self.count(|stats| {
            stats.claimed += count;
            stats.taken_over += taken_over;
        });
        self.metrics.claimed.increment(count);
        self.metrics.taken_over.increment(taken_over);
    }

    fn decide(
        &self,
        claimed: Vec<Claimed>,
        lease: LeaseId,
        seen: Option<i64>,
        read: impl FnOnce(&[Claimed]) -> Reading,
    ) -> Vec<Job> {
        let now = clock::now();
        let report_too_costly = |name: &str, message: &Message| {
            self.metrics.filter_too_much.increment(1);
            self.filter_troubles.too_much(name, message);
        };
        let ways = |reading| Ways {
            routes: &self.routes,
            bulkheads: &self.bulkheads,
            on_dead: self.settings.on_dead,
            registry: self.registered.registry(),
            rooms: self.rooms(),
            report_too_costly: &report_too_costly,
            reading,
            seen,
            knows_endpoints: self.registered.is_on(),
        };
        let mut known = ways(Reading::NotYet);
        let (mut jobs, mut unsure) = (Vec::with_capacity(claimed.len()), Vec::new());
        for (place, one) in claimed.into_iter().enumerate() {
            match known.job(one, lease, now) {
                Ok(job) => jobs.push((place, job)),
                Err(one) => unsure.push((place, one)),
            }
        }
        if !unsure.is_empty() {
            let (places, unsure): (Vec<usize>, Vec<Claimed>) = unsure.into_iter().unzip();
            let mut known = ways(read(&unsure));
            jobs.iter().for_each(|(_, job)| known.take_room(job));
            let decided = unsure
                .into_iter()
                .map(|one| known.last_job(one, lease, now));
            jobs.extend(places.into_iter().zip(decided));
            jobs.sort_unstable_by_key(|(place, _)| *place);
        }
        let jobs: Vec<Job> = jobs.into_iter().map(|(_, job)| job).collect();
        for Job { to, message, .. } in &jobs {
            if let Some(bulkhead) = to.bulkhead(&self.bulkheads) {
                bulkhead.load(message);
            }
        }
        jobs
    }

    /// How many messages may be claimed for each endpoint.
    pub(super) fn rooms(&self) -> Rooms {
        if !self.registered.registry().is_in_use() {
            return Rooms::default();
        }
        let held = self.custody.of_endpoints();
        Rooms::now(&self.registered, held, self.settings.batch)
    }
}

/// How to settle a message without a send; `None`: the message is sent. The ledger may know the message, and a message
/// that was taken over may have no attempt left.
fn unsent(claimed: &Claimed, sent: Result<&Retries, Verdict>) -> Option<Verdict> {
    let message = &claimed.message;
    match claimed.known {
        Known::No => {}
        Known::Delivered(first) => return Some(Verdict::Deduplicated(first)),
        Known::OtherContent(first) => {
            let error = format!(
                "a message with the same idempotency key but a different topic or payload was delivered before as {first}"
            );
            let failure = Failure::new(ReasonCode::IdempotencyConflict, error);
            return Some(Verdict::Dead(failure, Attempt::NotCounted));
        }
    }
    let retries = match sent {
        Ok(retries) => retries,
        Err(verdict) => return Some(verdict),
    };
    let error = "the relay that had claimed the message died or lost its lease";
    let abandoned = || Failure::new(ReasonCode::Abandoned, error);
    match claimed.taken_over {
        TakenOver::Again => Some(Verdict::of_failure(abandoned(), message.attempts, retries)),
        // The takeover used the last attempt that the destination allows.
        TakenOver::Once if message.attempts >= retries.max_attempts => {
            Some(Verdict::Dead(abandoned(), Attempt::NotCounted))
        }
        TakenOver::Once | TakenOver::No => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Destination, Route};
    use crate::handlers::Handlers;
    use crate::relay::builder::Dispatchers;
    use crate::relay::groups::add_groups;
    use crate::relay::planner::tests::claimed;
    use crate::relay::to::To;
    use crate::store::relay::served::Others;
    use crate::store::relay::topics::Patterns;

    /// What becomes of a message, as a relay decides that knows these endpoints.
    fn decided(
        routes: &Routes,
        bulkheads: &[Bulkhead],
        registry: impl Into<Arc<Registry>>,
        reading: Reading,
        one: Claimed,
    ) -> Job {
        let mut ways = Ways {
            routes,
            bulkheads,
            on_dead: OnDead::Continue,
            registry: registry.into(),
            rooms: Rooms::default(),
            report_too_costly: &|_, _| {},
            reading,
            seen: None,
            knows_endpoints: true,
        };
        ways.last_job(one, LeaseId(1), Instant::now())
    }

    /// Registers a destination that relays can send to.
    fn register(registry: &mut Registry, bulkheads: &[Bulkhead], customer: KnownEndpoint) {
        let customer = Arc::new(KnownEndpoint {
            limits: bulkheads.last().map(|one| one.limits.clone()),
            ..customer
        });
        let name = Arc::clone(&customer.name);
        registry.by_name.insert(name, customer);
    }

    /// The job of a message that goes to `a`, to `a` and `b`, or nowhere.
    fn of(topic: &str, change: impl FnOnce(&mut Claimed)) -> Job {
        let mut config = Config {
            max_attempts: 3,
            ..Config::default()
        };
        for name in ["a", "b"] {
            let destination = Destination::new(name, "http://a").expect("a URL");
            config.destinations.push(destination);
        }
        config.routes.push(Route::new("a", "a"));
        config.routes.push(Route::to_each("fan", ["a", "b"]));
        let (bulkheads, ..) = Bulkhead::all(&config, Dispatchers::idle(&config));
        let mut one = claimed(1, topic, None);
        change(&mut one);
        decided(
            &Routes::new(&config),
            &bulkheads,
            Registry::default(),
            Reading::Released,
            one,
        )
    }

    fn unsent(topic: &str, change: impl FnOnce(&mut Claimed)) -> Option<Verdict> {
        of(topic, change).unsent
    }

    #[test]
    fn where_a_message_goes_is_known_when_it_is_claimed() {
        for (topic, to) in [
            ("a", To::Bulkhead(0)),
            ("fan", To::Split),
            ("none", To::Nowhere),
        ] {
            assert_eq!(of(topic, |_| {}).to, to);
        }
        let named = of("none", |one| one.message.destination = "b".to_owned());
        assert_eq!(named.to, To::Bulkhead(1));
    }

    /// R50: two destinations of one name. The message of a customer never goes to the configured one.
    #[test]
    fn a_message_for_an_endpoint_does_not_go_to_its_namesake() {
        let named = |registration| {
            of("none", |one| {
                one.message.destination = "b".to_owned();
                one.message.registration = registration;
            })
        };
        for registration in [None, Some(OF_ROUTE)] {
            assert_eq!(named(registration).to, To::Bulkhead(1));
        }
        // Its registration may be new.
        let other = named(Some(Uuid::now_v7())).unsent;
        assert!(matches!(other, Some(Verdict::Released)), "{other:?}");
    }

    /// R50: where the settings have a destination of the name, a message for a registration of that name waits for other
    /// relays while the registration exists, and ends when it is gone. Without such a destination, it is the
    /// message of a route that waits, whether a registration of the name exists, or has been removed.
    #[test]
    fn of_two_destinations_of_one_name_each_gets_what_is_addressed_to_it() {
        let mut config = Config::default();
        let b = Destination::new("x", "http://a").expect("a URL");
        config.destinations.push(b);
        let (there, gone) = (Uuid::from_u128(7), Uuid::from_u128(8));
        let of = |config: &Config, registration, is_removed| {
            let (bulkheads, ..) = Bulkhead::all(config, Dispatchers::idle(config));
            let routes = Routes::new(config);
            let mut registry = Registry::default();
            if is_removed {
                registry.removed.insert("x".to_owned());
            } else {
                let customer = KnownEndpoint {
                    registration: there,
                    ..KnownEndpoint::plain()
                };
                register(&mut registry, &bulkheads, customer);
            }
            registry.index(&routes);
            let mut one = claimed(1, "a", None);
            one.message.destination = "x".to_owned();
            one.message.registration = Some(registration);
            let job = decided(&routes, &bulkheads, registry, Reading::Fresh, one);
            match job.unsent {
                None => format!("{:?}", job.to),
                Some(Verdict::Dead(failure, _)) => failure.code.to_string(),
                Some(verdict) => format!("{verdict:?}"),
            }
        };
        let none = Config::default();
        for (config, registration, is_removed, expected) in [
            (&config, OF_ROUTE, false, "Bulkhead(0)"),
            (&config, OF_ROUTE, true, "Bulkhead(0)"),
            (&config, there, false, "Released"),
            (&config, gone, false, "DESTINATION_REMOVED"),
            (&config, there, true, "DESTINATION_REMOVED"),
            (&none, OF_ROUTE, false, "Released"),
            (&none, OF_ROUTE, true, "Released"),
            (&none, there, false, "Registered(1)"),
            (&none, gone, false, "DESTINATION_REMOVED"),
            (&none, there, true, "DESTINATION_REMOVED"),
        ] {
            let is = of(config, registration, is_removed);
            assert_eq!(is, expected, "{registration} {is_removed}");
        }
    }

    /// The group may have a handler for the topic in another version of the application.
    #[test]
    fn a_message_for_a_group_without_a_handler_of_its_topic_waits_for_that_group() {
        let mut config = Config::default();
        let handlers = Handlers::new().on_topic("a", |_, _| Ok(()));
        add_groups(&mut config, &[("group".to_owned(), handlers)]).expect("a group");
        let mut other = Config::default();
        let destination = Destination::new("billing", "http://a").expect("a URL");
        other.destinations.push(destination);
        other.routes.push(Route::new("d", "billing"));
        let routes = Routes::new(&config);
        for others in [Vec::new(), vec![Routes::new(&other)]] {
            let (bulkheads, ..) = Bulkhead::all(&config, Dispatchers::idle(&config));
            let mut registry = Registry::default();
            registry.others = Arc::new(Others {
                routes: others,
                ..Others::default()
            });
            registry.can_send = true;
            register(&mut registry, &bulkheads, KnownEndpoint::plain());
            registry.index(&routes);
            let mut one = claimed(1, "d", None);
            one.message.destination = "group".to_owned();
            let unsent = decided(&routes, &bulkheads, registry, Reading::Fresh, one).unsent;
            assert!(matches!(unsent, Some(Verdict::Released)), "{unsent:?}");
        }
    }

    /// R50: otherwise the relay would claim the message again and again, and the other relay would not get it.
    #[test]
    fn a_message_that_no_endpoint_wants_goes_to_the_route_of_another_relay() {
        let (bulkheads, ..) =
            Bulkhead::all(&Config::default(), Dispatchers::idle(&Config::default()));
        let mut config = Config::default();
        let destination = Destination::new("billing", "http://a").expect("a URL");
        config.destinations.push(destination);
        config.routes.push(Route::new("d", "billing"));
        let of_topic = |topics: &[&str]| {
            decided(
                &Routes::new(&Config::default()),
                &bulkheads,
                Registry::beside(Routes::new(&config), topics),
                Reading::Fresh,
                claimed(1, "d", None),
            )
            .unsent
        };
        let wanted = of_topic(&["d"]);
        assert!(
            matches!(&wanted, Some(Verdict::Split(parts)) if parts.to == ["billing"]),
            "{wanted:?}"
        );
        // A settler claimed the message as the next of its key.
        assert!(matches!(of_topic(&[]), Some(Verdict::Released)));
    }

    /// R67: nobody ends a message of a topic that the application has not declared.
    #[test]
    fn a_message_of_an_undeclared_topic_without_a_subscriber_waits() {
        let (bulkheads, ..) =
            Bulkhead::all(&Config::default(), Dispatchers::idle(&Config::default()));
        let of_topic = |topic: &str| {
            let topics = Patterns {
                declared: vec!["order.*".to_owned()],
                ..Patterns::default()
            };
            let mut registry = Registry::default();
            registry.others = Arc::new(Others {
                topics,
                ..Others::default()
            });
            registry.can_send = true;
            // Another tenant wants every topic.
            let customer = KnownEndpoint {
                tenant_id: Some(Uuid::now_v7()),
                ..KnownEndpoint::plain()
            };
            register(&mut registry, &bulkheads, customer);
            registry.index(&Routes::new(&Config::default()));
            decided(
                &Routes::new(&Config::default()),
                &bulkheads,
                registry,
                Reading::Fresh,
                claimed(1, topic, None),
            )
            .unsent
        };
        assert!(matches!(
            of_topic("order.paid"),
            Some(Verdict::NoSubscriber)
        ));
        let Some(Verdict::Retry(failure, wait, Attempt::NotCounted)) = of_topic("odrer.paid")
        else {
            panic!("expected a message that waits");
        };
        assert_eq!(failure.code, ReasonCode::UnknownTopic);
        assert!(wait >= WHILE_UNDECLARED.0 && wait <= WHILE_UNDECLARED.1);
    }

    /// R46: the destination may have been registered again since this relay's last query.
    #[test]
    fn a_message_for_a_removed_destination_is_dead_lettered_only_after_a_lookup() {
        let (bulkheads, ..) =
            Bulkhead::all(&Config::default(), Dispatchers::idle(&Config::default()));
        let mut registry = Registry::default();
        registry.removed.insert("gone".to_owned());
        let registry = Arc::new(registry);
        let dies = |looked| {
            let mut one = claimed(1, "a", None);
            one.message.destination = "gone".to_owned();
            decided(
                &Routes::new(&Config::default()),
                &bulkheads,
                Arc::clone(&registry),
                looked,
                one,
            )
            .unsent
        };
        let failed = dies(Reading::Released);
        assert!(matches!(failed, Some(Verdict::Released)));
        let Some(Verdict::Retry(failure, WHILE_LOCKED, Attempt::NotCounted)) =
            dies(Reading::Locked)
        else {
            panic!("expected a message that waits");
        };
        assert_eq!(failure.code, ReasonCode::NotFannedOut);
        let Some(Verdict::Dead(failure, Attempt::NotCounted)) = dies(Reading::Fresh) else {
            panic!("expected a dead letter");
        };
        assert_eq!(failure.code, ReasonCode::DestinationRemoved);
    }

    /// R46, G2: a relay without threads for endpoints has claimed the message before it knew that the
    /// destination is registered again.
    #[test]
    fn a_message_for_a_destination_that_this_relay_does_not_serve_is_released() {
        let (bulkheads, ..) =
            Bulkhead::all(&Config::default(), Dispatchers::idle(&Config::default()));
        let of_customer = |refused: Option<String>| {
            let mut registry = Registry::default();
            let customer = KnownEndpoint {
                refused,
                ..KnownEndpoint::plain()
            };
            register(&mut registry, &bulkheads, customer);
            registry.index(&Routes::new(&Config::default()));
            let mut one = claimed(1, "a", None);
            one.message.destination = "x".to_owned();
            decided(
                &Routes::new(&Config::default()),
                &bulkheads,
                registry,
                Reading::Fresh,
                one,
            )
        };
        let served = of_customer(None);
        assert!(served.unsent.is_none() && matches!(served.to, To::Registered(_)));
        let refused = of_customer(Some("no threads".to_owned()));
        assert!(matches!(refused.unsent, Some(Verdict::Released)));
    }

    /// R20
    #[test]
    fn a_message_known_to_the_ledger_is_not_sent_to_any_destination() {
        for topic in ["a", "fan", "none"] {
            let known = unsent(topic, |one| one.known = Known::Delivered(7));
            assert!(matches!(known, Some(Verdict::Deduplicated(7))));
            let other = unsent(topic, |one| one.known = Known::OtherContent(7));
            let Some(Verdict::Dead(failure, Attempt::NotCounted)) = other else {
                panic!("{other:?}");
            };
            assert_eq!(failure.code, ReasonCode::IdempotencyConflict);
        }
    }

    /// R12
    #[test]
    fn a_message_that_was_taken_over_is_sent_once_more_and_then_counts_as_failed() {
        let taken = |attempts, taken_over| {
            unsent("a", |one| {
                one.taken_over = taken_over;
                one.message.attempts = attempts;
            })
        };
        assert!(taken(0, TakenOver::No).is_none());
        assert!(taken(2, TakenOver::Once).is_none());
        let dead = taken(3, TakenOver::Once);
        assert!(matches!(dead, Some(Verdict::Dead(_, Attempt::NotCounted))));
        let again = taken(1, TakenOver::Again);
        assert!(matches!(
            again,
            Some(Verdict::Retry(_, _, Attempt::Counted))
        ));
        let last = taken(2, TakenOver::Again);
        assert!(matches!(last, Some(Verdict::Dead(_, Attempt::Counted))));
    }

    /// R6, R44
    #[test]
    fn a_message_without_a_route_is_released_or_expires() {
        let nowhere = unsent("none", |_| {});
        assert!(matches!(nowhere, Some(Verdict::Released)));
        let expired = unsent("none", |one| one.message.expires = Some(Instant::now()));
        assert!(matches!(
            expired,
            Some(Verdict::Dead(_, Attempt::NotCounted))
        ));
        let later = Instant::now() + Duration::from_secs(60);
        let waiting = unsent("none", |one| one.message.expires = Some(later));
        assert!(matches!(waiting, Some(Verdict::Released)));
        let split = unsent("fan", |_| {});
        assert!(matches!(split, Some(Verdict::Split(parts)) if parts.to == ["a", "b"]));
    }
}
