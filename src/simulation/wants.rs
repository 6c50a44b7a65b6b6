//! Which messages an endpoint wants: its topics, its tenant and its filter. They follow from the topic and
//! the number of a message, so that the promises need no second record of them.

use serde_json::{Value, json};
use uuid::Uuid;

use super::history::REGISTERED;
use crate::own_topics;

/// The topics of endpoints. If relays have different settings, the first relay alone has a route for
/// `ROUTED`, to `a`, and only at each second start.
pub(super) const TOPIC: &str = "c";
pub(super) const ROUTED: &str = "d";
/// An event about the outbox.
pub(super) const OWN: &str = own_topics::OPENED;

/// The topics of a destination. One alone asks for events about the outbox: the pattern of the others does not begin with
/// `outbox.`.
pub(super) fn topics(destination: &str) -> [&'static str; 3] {
    let of_own = match subscribes(destination, OWN) {
        true => "outbox.*",
        false => "*opened",
    };
    [TOPIC, ROUTED, of_own]
}

pub(super) fn subscribes(destination: &str, topic: &str) -> bool {
    topic != OWN || destination == REGISTERED[1]
}

/// One of two tenants.
pub(super) fn tenant(number: usize) -> Uuid {
    Uuid::from_u128(number as u128 % 2 + 1)
}

/// The tenant of a message, if messages have tenants. A third of them belong to none.
pub(super) fn tenant_of(id: usize) -> Option<Uuid> {
    (!id.is_multiple_of(3)).then(|| tenant(id % 3))
}

/// Whether the filter of a destination matches a message.
pub(super) fn matches(destination: &str, id: usize) -> bool {
    !(id + destination.len() + usize::from(destination.as_bytes()[0])).is_multiple_of(3)
}

/// The filter of a destination.
pub(super) fn filter(destination: &str) -> Value {
    json!({ "for": [destination] })
}

/// The payload of a message: the destinations, of these, whose filters match it.
pub(super) fn payload<'n>(id: usize, destinations: impl Iterator<Item = &'n str>) -> String {
    let names: Vec<&str> = destinations.filter(|name| matches(name, id)).collect();
    json!({ "for": names }).to_string()
}
