//! Where a claimed message goes, or how it is settled without a send. Decided once, when the message is claimed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::bulkhead::Bulkhead;
use super::job::{Job, Terms, is_expired};
use super::registry::{Customer, Registry};
use super::room::Rooms;
use super::to::To;
use super::verdict::Verdict;
use crate::config::OnDead;
use crate::dispatch::Failure;
use crate::message::Message;
use crate::routes::{Routes, Way};
use crate::status::ReasonCode;
use crate::store::relay::claim::{Claimed, Known, TakenOver};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::split::Parts;

/// The facts that decide where claimed messages go.
pub(super) struct Ways<'a> {
    pub(super) routes: &'a Routes,
    pub(super) bulkheads: &'a [Bulkhead],
    /// Whether dead letters of no destination block their ordering keys.
    pub(super) on_dead: OnDead,
    pub(super) registry: Arc<Registry>,
    /// The room of registered destinations.
    pub(super) rooms: Rooms,
    /// Which messages match the filters of which registered destinations, if the destinations were looked up.
    pub(super) met: Result<Met, Unasked>,
}

/// Stands for a registration where the message is for a configured destination, although a registered one has its name.
const NOT_REGISTERED: Uuid = Uuid::nil();

/// Why registered destinations were not looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unasked {
    /// A settler has claimed the message, or the query failed: another claim follows.
    Released,
    /// Another session has locked the table.
    Locked,
}

/// How long a message waits for a locked table.
const WHILE_LOCKED: Duration = Duration::from_secs(1);

/// How long a relay leaves a message to the other relays.
const LEFT_TO_OTHERS: Duration = Duration::from_secs(5);

/// Whether messages match the filters of registered destinations, by sequence and number of the destination.
pub(super) type Met = HashMap<(i64, u32), bool>;

/// Where one message goes.
enum Where<'a> {
    Bulkhead(usize),
    Customer(&'a Arc<Customer>),
    Split(Parts),
    /// No registered destination subscribes to the message, and no route serves it.
    NoSubscriber,
    /// The message names a registered destination that was removed.
    Removed,
    /// The message is for another destination of the same name: for a registered one, and this relay has the other one,
    /// or the other way round.
    Namesake,
    /// A query is needed first.
    Unknown(Unasked),
    Nowhere,
}

impl Ways<'_> {
    /// Decides where a claimed message goes, and makes it a job.
    pub(super) fn job(&mut self, mut claimed: Claimed, lease: LeaseId, now: Instant) -> Job {
        let registry = Arc::clone(&self.registry);
        let place = self.find(&registry, &claimed.message);
        let terms = self.terms(&registry, &place);
        let registration = match &place {
            Where::Customer(one) => Some(one.registration),
            _ => None,
        };
        let (to, customer) = match &place {
            Where::Bulkhead(number) => (To::Bulkhead(*number), None),
            Where::Customer(one) => (To::Registered(one.id), Some(Arc::clone(&one.name))),
            Where::Removed => (To::Split, Some(claimed.message.destination.as_str().into())),
            Where::Split(_) | Where::NoSubscriber | Where::Unknown(_) | Where::Namesake => {
                (To::Split, None)
            }
            Where::Nowhere => (To::Nowhere, None),
        };
        let unsent = unsent(&claimed, place, self.bulkheads, now);
        terms.limit(&mut claimed.message);
        if let (To::Registered(id), None) = (to, &unsent) {
            self.rooms.take(id);
        }
        Job {
            unsent,
            to,
            customer,
            registration,
            terms,
            lease,
            message: claimed.message,
        }
    }

    /// What the place's policy says about settling. A message to be fanned out is a dead letter for all its destinations,
    /// so it blocks its key if it would at any of them.
    fn terms(&self, registry: &Registry, place: &Where<'_>) -> Terms {
        let of_none = Terms {
            on_dead: self.on_dead,
            expires_after: None,
        };
        let of_customer = |one: &Customer| one.limits.as_ref().map_or(of_none, |one| one.terms);
        match place {
            Where::Bulkhead(number) => self.bulkheads[*number].terms,
            Where::Customer(one) => of_customer(one),
            Where::Split(parts) => {
                let of_part = |name: &String| {
                    let configured = self.bulkheads.iter().find(|one| *one.name == **name);
                    let registered = || registry.named(name).map(|one| of_customer(one));
                    configured.map(|one| one.terms).or_else(registered)
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

    fn find<'r>(&self, registry: &'r Registry, message: &'r Message) -> Where<'r> {
        let Message {
            topic, destination, ..
        } = message;
        let way = self.routes.find(topic, destination);
        let customers = match (way, destination.is_empty()) {
            (Way::NotTaken, _) => return Where::Nowhere,
            (Way::UnknownDestination, false) => {
                return match registry.named(destination) {
                    Some(_) if message.registration == Some(NOT_REGISTERED) => Where::Namesake,
                    Some(one) if one.is_another(message) => match self.met {
                        Ok(_) => Where::Removed,
                        Err(why) => Where::Unknown(why),
                    },
                    Some(one) if one.is_enabled() => Where::Customer(one),
                    None if registry.is_removed(destination) => match self.met {
                        Ok(_) => Where::Removed,
                        Err(why) => Where::Unknown(why),
                    },
                    Some(_) | None => Where::Nowhere,
                };
            }
            (_, false) if !matches!(message.registration, None | Some(NOT_REGISTERED)) => {
                return Where::Namesake;
            }
            (_, false) => Vec::new(),
            (Way::NoRoute, true) if registry.awaits_route(topic) => return Where::Nowhere,
            (_, true) => match self.customers(registry, message) {
                Ok(customers) => customers,
                Err(why) => return Where::Unknown(why),
            },
        };
        // A message that is fanned out in part has parts, so it goes nowhere itself.
        let is_begun = destination.is_empty() && message.split_to.is_some();
        let name = |number: &usize| self.bulkheads[*number].name.to_string();
        let mut names: Vec<String> = match (way, customers.as_slice()) {
            (Way::To(number), []) if !is_begun => return Where::Bulkhead(number),
            (Way::To(number), _) => vec![name(&number)],
            (Way::Split(numbers), _) => numbers.iter().map(name).collect(),
            // Without an answer to the query, a destination that was just registered may be unknown here.
            (Way::NoRoute, []) if registry.is_without_subscriber(topic) => {
                return match self.met {
                    Ok(_) if is_begun => Where::Split(Parts::default()),
                    Ok(_) => Where::NoSubscriber,
                    Err(why) => Where::Unknown(why),
                };
            }
            // Another relay has a route for the topic: the message gets a row for that relay's destination. A release would
            // let this relay claim the message again and again.
            (_, []) if !registry.hands_on(topic) => return Where::Nowhere,
            (_, [only]) if !is_begun && self.may_go_at_once(registry, message, only) => {
                return Where::Customer(only);
            }
            _ => {
                let others = registry.others_route(topic).unwrap_or_default();
                others.into_iter().map(str::to_owned).collect()
            }
        };
        let of_routes = names.len();
        names.extend(customers.iter().map(|one| one.name.to_string()));
        // A part has one name. If a route leads to a namesake of a registered destination, the part is for the route.
        let routed = names[..of_routes].to_vec();
        // Parts are placed in this order, so the last placed part says which are left.
        names.sort_unstable();
        names.dedup();
        names.retain(|name| message.split_to.as_ref().is_none_or(|last| name > last));
        let registration = |name: &String| {
            let is_namesake = registry.named(name).is_some() && routed.contains(name);
            let named = customers.iter().find(|one| *one.name == **name);
            match is_namesake {
                true => Some(NOT_REGISTERED),
                false => named.map(|one| one.registration),
            }
        };
        Where::Split(Parts {
            registrations: names.iter().map(registration).collect(),
            to: names,
        })
    }

    /// The registered destinations of a message, unless some filters are not evaluated.
    fn customers<'r>(
        &self,
        registry: &'r Registry,
        message: &'r Message,
    ) -> Result<Vec<&'r Arc<Customer>>, Unasked> {
        let meets = |one: &Arc<Customer>| match (&one.filter, &self.met) {
            (None, _) => Ok(true),
            (Some(_), Ok(met)) => {
                let met = met.get(&(message.sequence.0, one.id));
                met.copied().ok_or(Unasked::Released)
            }
            (Some(_), Err(why)) => Err(*why),
        };
        let mut customers = Vec::new();
        for one in registry.wanting(message) {
            if meets(one)? {
                customers.push(one);
            }
        }
        Ok(customers)
    }

    /// Whether a message for a single registered destination may go there without a row of its own. The destination
    /// must have room. A message with an ordering key always gets its own row: other messages of the key may have other
    /// destinations. So does a message with an idempotency key: later messages of the key are compared by destination.
    fn may_go_at_once(&self, registry: &Registry, message: &Message, only: &Customer) -> bool {
        message.ordering_key.is_none()
            && !message.has_idempotency_key()
            && message.attempts == 0
            && registry.others_route(&message.topic).is_none()
            && self.rooms.has_place(only.id)
    }
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

/// How to settle a message without a send; `None`: the message is sent.
fn unsent(
    claimed: &Claimed,
    place: Where<'_>,
    bulkheads: &[Bulkhead],
    now: Instant,
) -> Option<Verdict> {
    let message = &claimed.message;
    match claimed.known {
        Known::No => {}
        Known::Delivered => return Some(Verdict::Deduplicated),
        Known::OtherContent => {
            let error = "a message with the same idempotency key but a different topic or payload was delivered before";
            let failure = Failure::new(ReasonCode::IdempotencyConflict, error);
            return Some(Verdict::Dead(failure, 0));
        }
    }
    let retries = match place {
        Where::Bulkhead(number) => &bulkheads[number].retries,
        Where::Customer(one) => &one.limits.as_ref()?.retries,
        Where::Split(parts) => return Some(Verdict::Split(parts)),
        Where::NoSubscriber => return Some(Verdict::NoSubscriber),
        Where::Removed => {
            let error = "the registered destination of the message was removed, was registered again, or belongs to another tenant now";
            let failure = Failure::new(ReasonCode::DestinationRemoved, error);
            return Some(Verdict::Dead(failure, 0));
        }
        Where::Namesake => {
            let name = &message.destination;
            let error = format!(
                "the message is for another destination {name:?} than that of this relay: a registered and a configured destination have the same name"
            );
            let failure = Failure::new(ReasonCode::UnknownDestination, error);
            return Some(match is_expired(message, now) {
                true => Verdict::expired(),
                false => Verdict::Retry(failure, LEFT_TO_OTHERS, 0),
            });
        }
        // A settler claimed the message as the next of its key, or the claimer claimed it because it has expired.
        Where::Unknown(Unasked::Locked) if !is_expired(message, now) => {
            let error = "which registered destinations want the message is not known: another session has locked their table";
            let failure = Failure::new(ReasonCode::FilterNotEvaluated, error);
            return Some(Verdict::Retry(failure, WHILE_LOCKED, 0));
        }
        Where::Unknown(_) | Where::Nowhere => {
            return Some(match is_expired(message, now) {
                true => Verdict::expired(),
                false => Verdict::Released,
            });
        }
    };
    let error = "the relay that had claimed the message died or lost its lease";
    let abandoned = || Failure::new(ReasonCode::Abandoned, error);
    match claimed.taken_over {
        TakenOver::Again => Some(Verdict::of_failure(abandoned(), message.attempts, retries)),
        // The takeover used the last attempt that the destination allows.
        TakenOver::Once if message.attempts >= retries.max_attempts => {
            Some(Verdict::Dead(abandoned(), 0))
        }
        TakenOver::Once | TakenOver::No => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Destination, Route};
    use crate::relay::bulkhead::Dispatchers;
    use crate::relay::planner::tests::claimed;
    use crate::relay::to::To;

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
        let mut ways = Ways {
            routes: &Routes::new(&config),
            bulkheads: &bulkheads,
            on_dead: OnDead::Continue,
            registry: Arc::default(),
            rooms: Rooms::default(),
            met: Err(Unasked::Released),
        };
        ways.job(one, LeaseId(1), Instant::now())
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
    fn a_message_for_a_registered_destination_does_not_go_to_its_namesake() {
        let named = |registration| {
            of("none", |one| {
                one.message.destination = "b".to_owned();
                one.message.registration = registration;
            })
        };
        assert_eq!(named(None).to, To::Bulkhead(1));
        let other = named(Some(Uuid::now_v7())).unsent;
        assert!(matches!(other, Some(Verdict::Retry(_, _, 0))), "{other:?}");
    }

    /// R50: otherwise the relay would claim the message again and again, and the other relay would not get it.
    #[test]
    fn a_message_that_no_registered_destination_wants_goes_to_the_route_of_another_relay() {
        let (bulkheads, ..) =
            Bulkhead::all(&Config::default(), Dispatchers::idle(&Config::default()));
        let mut config = Config::default();
        let destination = Destination::new("billing", "http://a").expect("a URL");
        config.destinations.push(destination);
        config.routes.push(Route::new("d", "billing"));
        let of_topic = |topics: &[&str]| {
            let mut ways = Ways {
                routes: &Routes::new(&Config::default()),
                bulkheads: &bulkheads,
                on_dead: OnDead::Continue,
                registry: Arc::new(Registry::beside(Routes::new(&config), topics)),
                rooms: Rooms::default(),
                met: Ok(Met::new()),
            };
            ways.job(claimed(1, "d", None), LeaseId(1), Instant::now())
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

    /// R46: the destination may have been registered again since this relay's last query.
    #[test]
    fn a_message_for_a_removed_destination_is_dead_lettered_only_after_a_lookup() {
        let (bulkheads, ..) =
            Bulkhead::all(&Config::default(), Dispatchers::idle(&Config::default()));
        let mut registry = Registry::default();
        registry.removed.insert("gone".to_owned());
        let registry = Arc::new(registry);
        let dies = |met| {
            let mut ways = Ways {
                routes: &Routes::new(&Config::default()),
                bulkheads: &bulkheads,
                on_dead: OnDead::Continue,
                registry: Arc::clone(&registry),
                rooms: Rooms::default(),
                met,
            };
            let mut one = claimed(1, "a", None);
            one.message.destination = "gone".to_owned();
            ways.job(one, LeaseId(1), Instant::now()).unsent
        };
        let failed = dies(Err(Unasked::Released));
        assert!(matches!(failed, Some(Verdict::Released)));
        let Some(Verdict::Retry(failure, WHILE_LOCKED, 0)) = dies(Err(Unasked::Locked)) else {
            panic!("expected a message that waits");
        };
        assert_eq!(failure.code, ReasonCode::FilterNotEvaluated);
        let Some(Verdict::Dead(failure, 0)) = dies(Ok(Met::new())) else {
            panic!("expected a dead letter");
        };
        assert_eq!(failure.code, ReasonCode::DestinationRemoved);
    }

    /// R20
    #[test]
    fn a_message_known_to_the_ledger_is_not_sent_to_any_destination() {
        for topic in ["a", "fan", "none"] {
            let known = unsent(topic, |one| one.known = Known::Delivered);
            assert!(matches!(known, Some(Verdict::Deduplicated)));
            let other = unsent(topic, |one| one.known = Known::OtherContent);
            let Some(Verdict::Dead(failure, 0)) = other else {
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
        assert!(matches!(dead, Some(Verdict::Dead(_, 0))));
        let again = taken(1, TakenOver::Again);
        assert!(matches!(again, Some(Verdict::Retry(_, _, 1))));
        let last = taken(2, TakenOver::Again);
        assert!(matches!(last, Some(Verdict::Dead(_, 1))));
    }

    /// R6, R44
    #[test]
    fn a_message_without_a_route_is_released_or_expires() {
        let nowhere = unsent("none", |_| {});
        assert!(matches!(nowhere, Some(Verdict::Released)));
        let expired = unsent("none", |one| one.message.expires = Some(Instant::now()));
        assert!(matches!(expired, Some(Verdict::Dead(_, 0))));
        let later = Instant::now() + Duration::from_secs(60);
        let waiting = unsent("none", |one| one.message.expires = Some(later));
        assert!(matches!(waiting, Some(Verdict::Released)));
        let split = unsent("fan", |_| {});
        assert!(matches!(split, Some(Verdict::Split(parts)) if parts.to == ["a", "b"]));
    }
}
