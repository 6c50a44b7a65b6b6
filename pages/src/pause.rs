//! Pauses, as the pages and the commands of the program see them.

use std::borrow::Cow;

use std::time::SystemTime;

use diesel_outbox::admin::{Pausable, Pause};
use diesel_outbox::endpoints::{Endpoint, EndpointState, Hand};
use diesel_outbox::program::OPERATOR;

/// The reason by which relays recognise a pause of the circuit breaker.
const RESERVED: &str = "BREAKER_OPEN";

/// The pauses of a destination or topic: one of each hand.
pub fn of<'a>(pauses: &'a [Pause], kind: Pausable, name: &str) -> impl Iterator<Item = &'a Pause> {
    let is_one = move |pause: &&Pause| pause.kind == kind && pause.name == name;
    pauses.iter().filter(is_one)
}

/// The pause of a destination or topic that ends last, if there is one.
pub fn find<'a>(pauses: &'a [Pause], kind: Pausable, name: &str) -> Option<&'a Pause> {
    of(pauses, kind, name).max_by_key(|pause| (pause.left.is_none(), pause.left))
}

/// What becomes of the messages of a paused endpoint.
pub const WHILE_PAUSED: &str =
    "New messages are addressed to the endpoint, and wait until the pause ends.";

/// The state of an endpoint in words: `paused by its owner until 2026-11-25 10:00:00Z: upgrade`.
pub fn state_in_words(one: &Endpoint) -> String {
    let mut words = one.state.as_str().to_owned();
    match (one.state_by, one.state_reason.as_deref()) {
        (Some(Hand::Relay), Some(RESERVED)) => words.push_str(" by its circuit breaker"),
        (Some(hand), _) => {
            words.push_str(" by ");
            words.push_str(hand_in_words(hand));
        }
        (None, _) => {}
    }
    let time = |time: SystemTime| humantime::format_rfc3339_seconds(time).to_string();
    match (one.state, one.state_until, one.failing_since) {
        (EndpointState::Paused, None, _) => words.push_str(" until resumed"),
        (_, Some(until), _) => words.push_str(&format!(" until {}", time(until))),
        (EndpointState::Failing | EndpointState::Unread, _, Some(since)) => {
            words.push_str(&format!(" since {}", time(since)));
        }
        (EndpointState::Active, _, Some(since)) => {
            words.push_str(&format!(", no success since {}", time(since)));
        }
        _ => {}
    }
    match one.state_reason.as_deref() {
        None if one.state == EndpointState::Disabled => words.push_str(": no reason was given"),
        None | Some(RESERVED) => {}
        Some(reason) => words.push_str(&format!(": {}", in_words(reason))),
    }
    words
}

/// Whose act it was.
pub fn hand_in_words(hand: Hand) -> &'static str {
    match hand {
        Hand::Owner => "its owner",
        Hand::Operator => "an operator",
        Hand::Relay => "the relay",
        Hand::Receiver => "its receiver",
        other => other.as_str(),
    }
}

/// A reason. Words follow a code that is no word of the operator.
pub fn in_words(reason: &str) -> Cow<'_, str> {
    let words = match reason {
        OPERATOR => "by hand, without a reason",
        RESERVED => "the circuit breaker has opened",
        "GONE" => "the receiver answered 410",
        "RATE_LIMITED" => "the receiver answered 429",
        "SERVER_ERROR" => "the receiver answered 5xx",
        _ => return reason.into(),
    };
    format!("{reason} ({words})").into()
}
