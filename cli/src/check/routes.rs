//! The destinations of each topic, in words.

use diesel_outbox::{Config, Route};
use serde_json::{Value, json};

use super::{Finding, bad, good};

/// The pattern that serves every topic without a route of its own.
const REST: &str = "*";

pub(super) fn findings(config: &Config) -> Vec<Finding> {
    let routes = config.all_routes();
    if routes.is_empty() && config.expects_registered() {
        let registered = "every topic -> the registered destinations that subscribe to it";
        return vec![good("route", registered.to_owned())];
    }
    if routes.is_empty() {
        let nothing = match config.destinations.as_slice() {
            [] => {
                "there is no route and no OUTBOX_URL: nothing can be sent; set OUTBOX_URL, or add destinations and routes to outbox.toml (OUTBOX_CONFIG). If all destinations are registered in the database, set OUTBOX_REGISTERED_THREADS"
            }
            _ => {
                "there is no route and no OUTBOX_URL: only messages that name a destination are sent"
            }
        };
        return vec![bad("route", nothing.to_owned())];
    }
    let mut findings: Vec<Finding> = routes.iter().map(in_words).collect();
    if !routes.iter().any(|route| route.topic == REST) {
        let rest = "every other topic -> nothing (NO_ROUTE)";
        findings.push(good("route", rest.to_owned()));
    }
    findings
}

fn in_words(route: &Route) -> Finding {
    let topic = match route.topic.as_str() {
        REST => "every other topic",
        topic => topic,
    };
    good("route", format!("{topic} -> {}", route.to.join(" and ")))
}

pub(super) fn as_json(config: &Config) -> Value {
    config
        .all_routes()
        .into_iter()
        .map(|route| json!({ "topic": route.topic, "to": route.to }))
        .collect()
}

/// Whether a route leads to this destination, so that messages need not name it.
pub(super) fn lead_to(config: &Config, destination: &str) -> bool {
    let mut routes = config.all_routes().into_iter();
    routes.any(|route| route.to.iter().any(|to| to == destination))
}
