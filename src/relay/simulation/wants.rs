//! Which messages a registered destination wants: its tenant and its filter. Both follow from the number of a message,
//! so that the promises need no second record of them.

use std::time::Duration;

use uuid::Uuid;

use super::broken::Broken;
use crate::store::filters::{Evaluated, Unfinished};

/// The topics of registered destinations. If relays have different settings, the first relay alone has a route for
/// `ROUTED`, to `a`, and only at each second start.
pub(super) const TOPIC: &str = "c";
pub(super) const ROUTED: &str = "d";

/// One of two tenants.
pub(super) fn tenant(number: usize) -> Uuid {
    Uuid::from_u128(number as u128 % 2 + 1)
}

/// The tenant of a message, if messages have tenants. A third of them belong to none.
pub(super) fn tenant_of(id: usize) -> Option<Uuid> {
    (!id.is_multiple_of(3)).then(|| tenant(id % 3))
}

/// What PostgreSQL answers for the filter of a destination and the payload of a message.
pub(super) fn evaluated(destination: &str, id: usize) -> Evaluated {
    let number = id + destination.len() + usize::from(destination.as_bytes()[0]);
    match number {
        _ if number.is_multiple_of(7) => Evaluated::Failed("no number".to_owned()),
        _ if number.is_multiple_of(3) => Evaluated::DoesNot,
        _ => Evaluated::Matches,
    }
}

/// An evaluation that was cancelled on a busy server.
pub(super) fn unfinished(broken: Option<Broken>) -> Evaluated {
    let control = match broken {
        Some(Broken::BlamesFiltersForLoad) => 1,
        _ => 500,
    };
    Evaluated::Unfinished(Unfinished {
        took: Duration::from_millis(600),
        control: Duration::from_millis(control),
        error: None,
    })
}
