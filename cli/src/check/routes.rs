//! The destinations of each topic, in words.

use diesel_outbox::Route;
use diesel_outbox::config::Config;
use diesel_outbox::program;
use serde_json::{Value, json};

use super::{Finding, Level, bad, good};

/// The pattern that serves every topic without a route of its own.
const REST: &str = "*";

pub(super) fn findings(config: &Config) -> Vec<Finding> {
    let routes = program::all_routes(config);
    if routes.is_empty() && program::expects_endpoints(config) {
        let registered = "every topic -> the endpoints that subscribe to it";
        return vec![good("route", registered)];
    }
    if name_none(config) {
        let detail = "these settings name no destination, so only the database and the running relays are checked";
        return vec![Finding::new("route", Level::Skipped, detail).advise(
            "to check the settings of a relay, run this command with them: OUTBOX_URL, OUTBOX_CONFIG or OUTBOX_ENDPOINT_THREADS",
        )];
    }
    if routes.is_empty() {
        let nothing =
            "there is no route and no OUTBOX_URL: only messages that name a destination are sent";
        return vec![bad("route", nothing)];
    }
    let mut findings: Vec<Finding> = routes.iter().map(in_words).collect();
    if !routes.iter().any(|route| route.topic == REST) {
        let rest = "every other topic -> nothing (NO_ROUTE)";
        findings.push(good("route", rest));
    }
    findings
}

/// Whether these settings are those of no relay, as in the shell of an operator whose application has the relay.
pub(super) fn name_none(config: &Config) -> bool {
    program::all_destinations(config).is_empty() && !program::expects_endpoints(config)
}

fn in_words(route: &Route) -> Finding {
    let topic = match route.topic.as_str() {
        REST => "every other topic",
        topic => topic,
    };
    good("route", format!("{topic} -> {}", route.to.join(" and ")))
}

pub(super) fn as_json(config: &Config) -> Value {
    program::all_routes(config)
        .into_iter()
        .map(|route| json!({ "topic": route.topic, "to": route.to }))
        .collect()
}

/// Whether a route leads to this destination, so that messages need not name it.
pub(super) fn lead_to(config: &Config, destination: &str) -> bool {
    let mut routes = program::all_routes(config).into_iter();
    routes.any(|route| route.to.iter().any(|to| to == destination))
}
