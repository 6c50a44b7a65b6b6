//! Pauses as text, table and JSON, for several commands.

use std::time::Duration;

use comfy_table::Table;
use diesel_outbox::admin::{Pausable, Pause};
use diesel_outbox_pages::pause::{hand_in_words, in_words};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::output;

pub(crate) fn as_json(pause: &Pause) -> Value {
    json!({
        "what": pause.kind.as_str(),
        "name": pause.name,
        "reason": pause.reason,
        "by": pause.by.as_str(),
        "seconds_left": pause.left.map(|left| left.as_secs_f64()),
    })
}

/// The pause of a tenant.
pub(crate) fn of_tenant(pauses: &[Pause], tenant: Uuid) -> Option<&Pause> {
    let is_of = |pause: &&Pause| pause.kind == Pausable::Tenant && pause.name.parse() == Ok(tenant);
    pauses.iter().find(is_of)
}

pub(crate) fn table(pauses: &[Pause]) -> Table {
    let mut table = output::table(&["paused", "name", "by", "reason", "how long"]);
    for pause in pauses {
        table.add_row([
            pause.kind.as_str().to_owned(),
            output::name(&pause.name),
            hand_in_words(pause.by).to_owned(),
            output::shown(&in_words(&pause.reason)),
            left(pause),
        ]);
    }
    table
}

/// `destination billing is paused by its receiver: GONE (the receiver answered 410), until resumed`
pub(crate) fn sentence(pause: &Pause) -> String {
    let Pause {
        kind, name, reason, ..
    } = pause;
    let reason = in_words(reason);
    let kind = kind.as_str();
    let by = hand_in_words(pause.by);
    let text = format!("{kind} {name} is paused by {by}: {reason}, {}", left(pause));
    output::shown(&text)
}

fn left(pause: &Pause) -> String {
    match pause.left {
        None => "until resumed".to_owned(),
        Some(Duration::ZERO) => "until the next trial message".to_owned(),
        Some(left) => {
            let seconds = Duration::from_secs(left.as_secs_f64().ceil() as u64);
            format!("for another {}", humantime::format_duration(seconds))
        }
    }
}
