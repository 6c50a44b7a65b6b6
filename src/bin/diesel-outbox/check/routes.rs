//! Which topic goes where, in words.

use std::cmp::Reverse;

use diesel_outbox::{Config, Route};
use serde_json::{Value, json};

use super::{Finding, bad, good};

/// The destination of `OUTBOX_URL`.
const DEFAULT: &str = "default";

pub(super) fn findings(config: &Config) -> Vec<Finding> {
    let has_default = has_default(config);
    if config.routes.is_empty() && !has_default {
        let nothing = "there is no route and no OUTBOX_URL: nothing can be sent";
        return vec![bad("route", nothing.to_owned())];
    }
    let mut findings: Vec<Finding> = in_order(config)
        .into_iter()
        .map(|route| {
            good(
                "route",
                format!("{} -> {}", route.topic, route.to.join(" and ")),
            )
        })
        .collect();
    if has_default {
        let rest = format!("every other topic -> {DEFAULT} (OUTBOX_URL)");
        findings.push(good("route", rest));
    } else if !serves_all(config) {
        let rest = "every other topic -> nothing (NO_ROUTE)";
        findings.push(good("route", rest.to_owned()));
    }
    findings
}

pub(super) fn as_json(config: &Config) -> Value {
    let route = |topic: &str, to: &[String]| json!({ "topic": topic, "to": to });
    let mut routes: Vec<Value> = in_order(config)
        .into_iter()
        .map(|r| route(&r.topic, &r.to))
        .collect();
    if has_default(config) {
        routes.push(route("*", &[DEFAULT.to_owned()]));
    }
    Value::Array(routes)
}

/// Whether messages come to this destination without naming it.
pub(super) fn lead_to(config: &Config, destination: &str) -> bool {
    let is_routed = |route: &Route| route.to.iter().any(|to| to == destination);
    config.routes.iter().any(is_routed) || (destination == DEFAULT && has_default(config))
}

/// The most particular first, as the relay looks for one.
fn in_order(config: &Config) -> Vec<&Route> {
    let mut routes: Vec<&Route> = config.routes.iter().collect();
    routes.sort_by_key(|route| {
        let before_star = route.topic.split('*').next().unwrap_or_default().len();
        let is_exact = !route.topic.contains('*');
        Reverse((is_exact, before_star, route.topic.len()))
    });
    routes
}

fn serves_all(config: &Config) -> bool {
    config.routes.iter().any(|route| route.topic == "*")
}

/// Whether `OUTBOX_URL` serves the rest.
fn has_default(config: &Config) -> bool {
    config.url.is_some() && !serves_all(config)
}

#[cfg(test)]
mod tests {
    use diesel_outbox::{Destination, HttpDispatcher};

    use super::*;

    #[test]
    fn the_order_is_the_one_in_which_the_relay_looks() {
        let patterns = [
            "*",
            "order.*",
            "order.paid",
            "order.p*",
            "*.paid",
            "*r*.paid",
        ];
        let mut config = Config::default();
        for (number, pattern) in patterns.into_iter().enumerate() {
            let name = format!("d{number}");
            let destination = Destination::new(&name, "http://a.example/").expect("a URL");
            config.destinations.push(destination);
            config.routes.push(Route::new(pattern, name));
        }
        let order: Vec<String> = in_order(&config)
            .into_iter()
            .map(|route| route.topic.clone())
            .collect();
        assert_eq!(order[0], "order.paid");
        // All of them match: the relay takes the first that is left.
        for left in 0..order.len() {
            let mut config = config.clone();
            config.routes.retain(|r| order[left..].contains(&r.topic));
            let first = &in_order(&config)[0].to;
            let dispatcher = HttpDispatcher::new(&config).expect("good settings");
            assert_eq!(dispatcher.destinations_of("order.paid", ""), *first);
        }
    }
}
