//! What becomes of messages at a relay that knows endpoints.

use super::*;
use crate::builder::Dispatchers;
use crate::config::{Config, Destination, Route};
use crate::delivery::OnDead;
use crate::endpoints::sql::served::Others;
use crate::engine::claim::fate::Ways;
use crate::engine::claim::sql::claim::{Claimed, KnownDelivery, TakenOver};
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::plan::room::Rooms;
use crate::engine::plan::tests::claimed;
use crate::engine::send::bulkhead::Bulkhead;
use crate::engine::send::job::Job;
use crate::engine::send::verdict::{Attempt, Verdict};
use crate::engine::serves::sql::topics::Patterns;
use crate::handlers::Handlers;
use crate::handlers::groups::add_groups;

/// What becomes of a message, as a relay decides that knows these endpoints.
fn decided(bulkheads: &[Bulkhead], registry: Registry, reading: Reading, one: Claimed) -> Job {
    let mut ways = Ways {
        bulkheads,
        on_dead: OnDead::Continue,
        roster: Arc::new(registry),
        rooms: Rooms::default(),
        doubted: &|_, _| {},
        reading,
        seen: None,
    };
    ways.last_job(one, LeaseId(1), Instant::now())
}

/// The registry of a relay with these settings, without endpoints.
fn of_settings(config: &Config) -> Registry {
    Registry::of(Arc::new(Routes::new(config)))
}

/// Registers an endpoint that relays can send to.
fn register(registry: &mut Registry, bulkheads: &[Bulkhead], endpoint: KnownEndpoint) {
    let endpoint = Arc::new(KnownEndpoint {
        limits: bulkheads.last().map(|one| one.limits.clone()),
        ..endpoint
    });
    let name = Arc::clone(&endpoint.name);
    registry.by_name.insert(name, endpoint);
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
    decided(&bulkheads, of_settings(&config), Reading::NotAsked, one)
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
        let mut registry = of_settings(config);
        if is_removed {
            registry.removed.insert("x".to_owned());
        } else {
            let endpoint = KnownEndpoint {
                registration: there,
                ..KnownEndpoint::plain()
            };
            register(&mut registry, &bulkheads, endpoint);
        }
        registry.index();
        let mut one = claimed(1, "a", None);
        one.message.destination = "x".to_owned();
        one.message.registration = Some(registration);
        let job = decided(&bulkheads, registry, Reading::Fresh, one);
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
        (&none, there, false, "Member(1)"),
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
    for others in [Vec::new(), vec![Routes::new(&other)]] {
        let (bulkheads, ..) = Bulkhead::all(&config, Dispatchers::idle(&config));
        let mut registry = of_settings(&config);
        registry.others = Arc::new(Others {
            routes: others,
            ..Others::default()
        });
        registry.can_send = true;
        register(&mut registry, &bulkheads, KnownEndpoint::plain());
        registry.index();
        let mut one = claimed(1, "d", None);
        one.message.destination = "group".to_owned();
        let unsent = decided(&bulkheads, registry, Reading::Fresh, one).unsent;
        assert!(matches!(unsent, Some(Verdict::Released)), "{unsent:?}");
    }
}

/// R50: otherwise the relay would claim the message again and again, and the other relay would not get it.
#[test]
fn a_message_that_no_endpoint_wants_goes_to_the_route_of_another_relay() {
    let (bulkheads, ..) = Bulkhead::all(&Config::default(), Dispatchers::idle(&Config::default()));
    let mut config = Config::default();
    let destination = Destination::new("billing", "http://a").expect("a URL");
    config.destinations.push(destination);
    config.routes.push(Route::new("d", "billing"));
    let of_topic = |topics: &[&str]| {
        decided(
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
    let (bulkheads, ..) = Bulkhead::all(&Config::default(), Dispatchers::idle(&Config::default()));
    let of_topic = |topic: &str| {
        let topics = Patterns {
            declared: vec!["order.*".to_owned()],
            ..Patterns::default()
        };
        let mut registry = of_settings(&Config::default());
        registry.others = Arc::new(Others {
            topics,
            ..Others::default()
        });
        registry.can_send = true;
        // Another tenant wants every topic.
        let endpoint = KnownEndpoint {
            tenant_id: Some(Uuid::now_v7()),
            ..KnownEndpoint::plain()
        };
        register(&mut registry, &bulkheads, endpoint);
        registry.index();
        decided(
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
    let Some(Verdict::Retry(failure, wait, Attempt::NotCounted)) = of_topic("odrer.paid") else {
        panic!("expected a message that waits");
    };
    assert_eq!(failure.code, ReasonCode::UnknownTopic);
    assert!(wait >= WHILE_UNDECLARED.0 && wait <= WHILE_UNDECLARED.1);
}

/// R46: the destination may have been registered again since this relay's last query.
#[test]
fn a_message_for_a_removed_destination_is_dead_lettered_only_after_a_lookup() {
    let (bulkheads, ..) = Bulkhead::all(&Config::default(), Dispatchers::idle(&Config::default()));
    let dies = |looked| {
        let mut one = claimed(1, "a", None);
        one.message.destination = "gone".to_owned();
        let mut registry = Registry::default();
        registry.removed.insert("gone".to_owned());
        decided(&bulkheads, registry, looked, one).unsent
    };
    let failed = dies(Reading::NotAsked);
    assert!(matches!(failed, Some(Verdict::Released)));
    let Some(Verdict::Retry(failure, WHILE_LOCKED, Attempt::NotCounted)) = dies(Reading::Locked)
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
    let (bulkheads, ..) = Bulkhead::all(&Config::default(), Dispatchers::idle(&Config::default()));
    let of_endpoint = |refused: Option<String>| {
        let mut registry = Registry::default();
        let endpoint = KnownEndpoint {
            refused,
            ..KnownEndpoint::plain()
        };
        register(&mut registry, &bulkheads, endpoint);
        registry.index();
        let mut one = claimed(1, "a", None);
        one.message.destination = "x".to_owned();
        decided(&bulkheads, registry, Reading::Fresh, one)
    };
    let served = of_endpoint(None);
    assert!(served.unsent.is_none() && matches!(served.to, To::Member(_)));
    let refused = of_endpoint(Some("no threads".to_owned()));
    assert!(matches!(refused.unsent, Some(Verdict::Released)));
}

/// R20
#[test]
fn a_message_known_to_the_ledger_is_not_sent_to_any_destination() {
    for topic in ["a", "fan", "none"] {
        let known = unsent(topic, |one| one.known = KnownDelivery::Delivered(7));
        assert!(matches!(known, Some(Verdict::Deduplicated(7))));
        let other = unsent(topic, |one| one.known = KnownDelivery::OtherContent(7));
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

impl KnownEndpoint {
    /// An endpoint that takes all topics.
    pub(crate) fn plain() -> Self {
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
            is_unverified: false,
            is_feed: false,
        }
    }
}

impl Registry {
    /// The registry of a relay beside another one, with endpoints that want none of the messages of
    /// these topics.
    pub(crate) fn beside(other: Routes, topics: &[&str]) -> Self {
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
