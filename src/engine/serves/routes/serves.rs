//! What a relay serves. The relay publishes this description in its lease, for the other relays.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// A topic pattern with the destinations of its route, or a group of handlers with its topics.
type NamedRoute = (String, Vec<String>);

/// The pattern that every topic matches.
const EVERYTHING: &str = "*";

/// The topics and destinations whose messages a relay takes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Serves {
    /// Topic patterns and their destinations, most specific first.
    pub(crate) routes: Vec<NamedRoute>,
    /// The names of destinations with a URL, then of feeds.
    pub(crate) destinations: Vec<String>,
    /// Groups of handlers and their topics.
    pub(crate) handlers: Vec<NamedRoute>,
    /// Whether the application's own dispatcher takes all other messages.
    pub(crate) rest: bool,
    /// Whether the relay sends to members.
    #[serde(rename = "endpoints")]
    pub(crate) members: bool,
    /// Patterns of the only topics that the relay takes; empty: all topics.
    pub(crate) only: Vec<String>,
    /// The rate limits of destinations and groups of handlers, by name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) rates: Vec<(String, String)>,
    /// The patterns of topics that the settings declare.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) declared: Vec<String>,
}

impl Serves {
    /// The names of destinations with a URL, and of groups of handlers.
    pub(crate) fn names(self) -> Vec<String> {
        let groups = self.handlers.into_iter().map(|(name, _)| name);
        self.destinations.into_iter().chain(groups).collect()
    }

    /// Every message.
    pub(crate) fn anything() -> Self {
        Self {
            rest: true,
            ..Self::default()
        }
    }

    /// Whether the relay can never take a message, apart from those for members.
    pub(crate) fn is_nothing(&self) -> bool {
        self.destinations.is_empty() && self.handlers.is_empty() && !self.rest
    }

    /// The patterns of topics that the relay serves or declares, and their kinds in `outbox_topic`, in order. A route that
    /// leads only to handlers serves the topics of the handlers.
    pub(crate) fn topics(&self) -> BTreeSet<(String, &'static str)> {
        let is_handler = |name: &String| self.handlers.iter().any(|(group, _)| group == name);
        let routes = self
            .routes
            .iter()
            .filter(|(_, to)| !to.iter().all(is_handler));
        let routes = routes.map(|(pattern, _)| pattern.as_str());
        let routes = routes.chain(self.rest.then_some(EVERYTHING));
        // A relay for some topics serves no others, whatever its routes match.
        let of_route = |pattern: &str| match pattern {
            EVERYTHING if !self.only.is_empty() => self.only.clone(),
            pattern => vec![pattern.to_owned()],
        };
        let routes = routes.flat_map(of_route).map(|pattern| (pattern, "route"));
        let handlers = self.handlers.iter().flat_map(|(_, topics)| topics);
        let handlers = handlers.map(|topic| (topic.clone(), "handler"));
        let declared = self
            .declared
            .iter()
            .map(|pattern| (pattern.clone(), "declared"));
        routes.chain(handlers).chain(declared).collect()
    }

    /// JSON in ASCII, which a database with any encoding can store.
    pub(crate) fn to_json(&self) -> String {
        ascii(&serde_json::json!(self).to_string())
    }

    /// `None`: a later version has written this JSON, in another format.
    pub(crate) fn from_json(json: &str) -> Option<Self> {
        serde_json::from_str(json).ok()
    }
}

/// The same JSON with escapes for all characters that are not ASCII.
pub(super) fn ascii(json: &str) -> String {
    let mut ascii = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            ascii.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            ascii += &format!("\\u{unit:04x}");
        }
    }
    ascii
}

#[cfg(test)]
mod tests {
    use super::super::Routes;
    use super::*;
    use crate::config::{Config, Destination, Route};

    #[test]
    fn the_topics_that_a_relay_serves_are_read_back() {
        let mut config = Config::default();
        let billing = Destination::new("billing", "http://a").expect("a URL");
        config.destinations.push(billing);
        config.routes.push(Route::new("заказ.*", "billing"));
        config.routes.push(Route::new("\u{1f4e6}", "billing"));
        let serves = Serves::new(&config);
        let json = serves.to_json();
        assert!(json.is_ascii(), "{json}");
        assert_eq!(Serves::from_json(&json), Some(serves.clone()));
        let routes = Routes::of(serves);
        for (topic, destination, expected) in [
            ("заказ.paid", "", true),
            ("\u{1f4e6}", "", true),
            ("order.paid", "", false),
            ("order.paid", "billing", true),
            ("order.paid", "audit", false),
        ] {
            assert_eq!(
                routes.serve(topic, destination),
                expected,
                "{topic} {destination}"
            );
        }
    }
}
