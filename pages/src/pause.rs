//! Pauses, as the pages and the commands of the program see them.

use std::borrow::Cow;

use diesel_outbox::admin::{Pausable, Pause};

/// The default reason.
pub const OPERATOR: &str = "OPERATOR";
/// The reason by which relays recognise a pause of the circuit breaker.
const RESERVED: &str = "BREAKER_OPEN";
/// The most bytes of a reason.
const LONGEST_REASON: usize = 200;

/// Returns what is wrong with a reason.
pub fn check_reason(reason: &str) -> Result<(), String> {
    if reason.is_empty() || reason.len() > LONGEST_REASON {
        return Err(format!("must have 1 to {LONGEST_REASON} bytes"));
    }
    match reason == RESERVED {
        true => Err("is reserved for relays: give another reason".to_owned()),
        false => Ok(()),
    }
}

/// The pause of a destination or topic, if there is one.
pub fn find<'a>(pauses: &'a [Pause], kind: Pausable, name: &str) -> Option<&'a Pause> {
    pauses
        .iter()
        .find(|pause| pause.kind == kind && pause.name == name)
}

/// A reason. Words follow a code that is no word of the operator.
pub fn in_words(reason: &str) -> Cow<'_, str> {
    let words = match reason {
        OPERATOR => "by hand, without a reason",
        RESERVED => "the circuit breaker has opened",
        "GONE" => "the receiver answered 410",
        "RATE_LIMITED" => "the receiver answered 429",
        "SERVER_ERROR" => "the receiver asked to wait",
        _ => return reason.into(),
    };
    format!("{reason} ({words})").into()
}
