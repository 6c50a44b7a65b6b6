//! The endpoints that a relay knows, as a value: what they are, and which messages they want. What sends
//! to them is elsewhere (`relay/serving.rs`).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

use uuid::Uuid;

use super::limits::Limits;
use super::to::To;
use crate::clock;
use crate::dispatch::http::Verifier;
use crate::filter::Filter;
use crate::message::Message;
use crate::own_topics::is_own;
use crate::routes::{Refuses, Routes, Way, matches_any};
use crate::store::endpoints::{AsSeen, Stamp};
use crate::store::relay::claim::Topic;
use crate::store::relay::namesakes::Namesakes;
use crate::store::relay::served::Others;

/// One endpoint.
#[derive(Debug)]
pub(crate) struct KnownEndpoint {
    /// Constant for a registration.
    pub(super) id: u32,
    /// The registration of the name: messages are addressed to it.
    pub(super) registration: Uuid,
    pub(super) stamp: i64,
    pub(super) name: Arc<str>,
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
    /// Asks the endpoint, which must first show that it wants messages; `None`: it has, or need not. The messages wait.
    pub(super) verifier: Option<Arc<Verifier>>,
}

impl KnownEndpoint {
    pub(super) fn is_enabled(&self) -> bool {
        self.limits.is_some()
    }

    pub(super) fn as_seen(&self) -> AsSeen<'_> {
        AsSeen {
            name: &self.name,
            updated_at: self.updated_at,
        }
    }

    /// Whether this relay does not send to the endpoint: its settings refuse it, or it is not verified.
    pub(super) fn is_held(&self) -> bool {
        self.refused.is_some() || self.verifier.is_some()
    }

    /// Whether a message that names the endpoint is not for it: the name was registered again, or the row was given to
    /// another tenant, after the message was addressed; or both belong to different tenants.
    pub(super) fn is_another(&self, message: &Message) -> bool {
        let tenants = self.tenant_id.zip(message.tenant_id);
        message
            .registration
            .is_some_and(|one| one != self.registration)
            || tenants.is_some_and(|(own, of_message)| own != of_message)
    }

    /// Whether the message may have been addressed to this endpoint, which is disabled now: its row has changed since the
    /// message was enqueued.
    fn may_have_wanted(&self, message: &Message) -> bool {
        self.updated_at.is_none_or(|at| at >= message.created_at) && self.wants(message)
    }

    /// Whether the message has a topic and the tenant of this endpoint, and is not of a transaction that began before
    /// that of the registration. If the registration is in the future, the server's clock was set back, and says nothing.
    fn wants(&self, message: &Message) -> bool {
        let registered = self.created_at;
        let is_earlier =
            |at: &SystemTime| message.created_at < *at && *at <= message.time_of(clock::now());
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

/// The names of endpoints by their tenants.
type OfTenants = HashMap<Option<Uuid>, Vec<Arc<str>>>;

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
    /// The endpoints whose endpoints this relay may verify.
    pub(super) unverified: Vec<Arc<KnownEndpoint>>,
    pub(super) last_id: u32,
    /// What the active relays serve.
    pub(super) others: Arc<Others>,
    /// The removed endpoints that may still have messages.
    pub(super) removed: HashSet<String>,
    /// The number of the registrations that have been read.
    pub(super) registrations: Option<i64>,
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
    /// Whether any endpoint is registered.
    pub(super) fn is_in_use(&self) -> bool {
        !self.by_name.is_empty()
    }

    /// The stamp of each name, or with `only` of these.
    pub(super) fn stamps(&self, only: Option<&[&str]>) -> HashMap<String, i64> {
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

    pub(super) fn named(&self, name: &str) -> Option<&Arc<KnownEndpoint>> {
        self.by_name.get(name)
    }

    pub(super) fn get(&self, id: u32) -> Option<&Arc<KnownEndpoint>> {
        self.by_id.get(&id)
    }

    /// The most messages of a run of an endpoint.
    pub(super) fn key_run(&self, id: u32) -> usize {
        let limits = self.get(id).and_then(|one| one.limits.as_ref());
        limits.map_or(1, |limits| limits.key_run)
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
    pub(super) fn wanting<'a, 'm>(
        &'a self,
        message: &'m Message,
    ) -> impl Iterator<Item = &'a Arc<KnownEndpoint>> + use<'a, 'm> {
        let enabled = self.for_tenant_of(&self.of_tenants, message);
        let enabled = enabled.filter(|one| one.wants(message));
        // The row of a message that went at once to its only endpoint does not name the endpoint. Then its relay
        // has crashed, and the takeover has counted an attempt.
        let may_have_gone = message.attempts > 0 && self.may_go_without_a_part(message);
        let disabled = may_have_gone.then(|| self.for_tenant_of(&self.disabled, message));
        let disabled = disabled.into_iter().flatten();
        enabled.chain(disabled.filter(|one| one.may_have_wanted(message)))
    }

    fn for_tenant_of<'a>(
        &'a self,
        names: &'a OfTenants,
        message: &Message,
    ) -> impl Iterator<Item = &'a Arc<KnownEndpoint>> + use<'a> {
        let tenants = [Some(None), message.tenant_id.map(Some)].into_iter();
        let names = tenants.flatten().filter_map(|tenant| names.get(&tenant));
        names.flatten().filter_map(|name| self.by_name.get(name))
    }

    /// Whether a message goes to its only endpoint without a row of its own, if it has a single one. A
    /// message with an ordering key always gets its own row: other messages of the key may have other endpoints. So
    /// does a message with an idempotency key: later messages of the key are compared by endpoint.
    pub(super) fn may_go_without_a_part(&self, message: &Message) -> bool {
        message.ordering_key.is_none()
            && !message.has_idempotency_key()
            && self.others_route(&message.topic).is_none()
    }

    /// Whether messages of this topic, which no route of this relay serves and no endpoint wants, are for
    /// nobody. Only a relay that sends to endpoints decides this.
    pub(super) fn is_without_subscriber(&self, topic: &str) -> bool {
        self.can_send && self.is_in_use() && self.others_route(topic).is_none()
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
            ..Self::default()
        }
    }

    /// Derives the other fields from `by_name`.
    pub(super) fn index(&mut self, routes: &Routes) {
        self.namesakes = (self.is_in_use() || !self.removed.is_empty()).then(|| {
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
            if let Some(why) = one.refused.as_deref().filter(|_| self.can_send) {
                refuses.add(name, why);
            }
            if one.verifier.is_some() && self.can_send {
                self.unverified.push(Arc::clone(one));
            }
            let of_tenants = match one.is_enabled() {
                true => &mut self.of_tenants,
                false => &mut self.disabled,
            };
            let of_tenant = of_tenants.entry(one.tenant_id).or_default();
            of_tenant.push(Arc::clone(name));
            if one.is_enabled() {
                topics.extend(one.topics.iter().cloned());
                self.has_runs |= one.limits.as_ref().is_some_and(|one| one.key_run > 1);
            }
        }
        (self.of_tenants.values_mut())
            .chain(self.disabled.values_mut())
            .for_each(|names| names.sort_unstable());
        self.topics = topics.into_iter().collect();
        self.refuses = Arc::new(refuses);
    }
}

impl To {
    /// Where messages of this topic and endpoint go.
    pub(super) fn of(routes: &Routes, registry: &Registry, topic: &Topic) -> Self {
        let Topic { topic, destination } = topic;
        match (routes.find(topic, destination), destination.as_str()) {
            (Way::NotTaken, _) => Self::Nowhere,
            (Way::NoRoute, "") if registry.awaits_route(topic) => Self::Nowhere,
            (_, "") if registry.may_want(topic) => Self::Split,
            (Way::NoRoute, "")
                if registry.is_without_subscriber(topic) && !registry.is_undeclared(topic) =>
            {
                Self::Split
            }
            (Way::UnknownDestination, name) => match registry.named(name) {
                Some(one) if one.is_enabled() => Self::Registered(one.id),
                None if registry.is_removed(name) => Self::Split,
                Some(_) | None => Self::Nowhere,
            },
            (way, _) => way.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl KnownEndpoint {
        /// An endpoint that takes all topics.
        pub(in crate::relay) fn plain() -> Self {
            Self {
                id: 1,
                registration: Uuid::nil(),
                stamp: 1,
                name: "x".into(),
                updated_at: None,
                topics: vec!["*".to_owned()],
                tenant_id: None,
                filter: None,
                created_at: None,
                limits: None,
                refused: None,
                verifier: None,
            }
        }
    }

    impl Registry {
        /// The registry of a relay beside another one, with endpoints that want none of the messages of
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
}
