//! Groups of handlers as destinations, and the routes to them.

use std::collections::BTreeMap;

use crate::config::{Config, ConfigError, InProcess, Route};
use crate::handlers::{DEFAULT_TIMEOUT, Handlers};

/// The group of single handlers.
pub(super) const HANDLERS: &str = "handlers";

/// Makes each group a destination, and routes its topics to it.
pub(super) fn add_groups(
    config: &mut Config,
    groups: &[(String, Handlers)],
) -> Result<(), ConfigError> {
    let mut by_topic: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (at, (name, handlers)) in groups.iter().enumerate() {
        let wrong = |reason: &str| Err(ConfigError::new(format!("handlers.{name}"), reason));
        if name.is_empty() || name.len() > 255 || name.contains(char::is_control) {
            return wrong("a name has 1 to 255 bytes, and no control characters");
        }
        if groups[..at].iter().any(|(other, _)| other == name) {
            return wrong("it is there twice");
        }
        if handlers.is_empty() {
            return wrong("it has no handler");
        }
        if let Some(topic) = handlers.repeated() {
            return wrong(&format!("the topic {topic:?} has two handlers"));
        }
        for topic in handlers.topics() {
            if topic.contains('*') {
                return wrong(&format!(
                    "the topic {topic:?} is a pattern: a handler serves one topic"
                ));
            }
            by_topic.entry(topic).or_default().push(name);
        }
        config.in_process.push(InProcess {
            name: name.clone(),
            topics: handlers.topics().map(str::to_owned).collect(),
            concurrency: handlers.concurrency,
            timeout: Some(handlers.timeout.unwrap_or(DEFAULT_TIMEOUT)),
            max_attempts: handlers.max_attempts,
            backoff: handlers.backoff.clone(),
            rate: handlers.rate,
        });
    }
    for (topic, names) in by_topic {
        let Some(route) = config.routes.iter().find(|route| route.topic == topic) else {
            config.routes.push(Route::to_each(topic, names));
            continue;
        };
        for name in names {
            if !route.to.iter().any(|to| to == name) {
                return Err(ConfigError::new(
                    format!("handlers.{name}"),
                    format!(
                        "the topic {topic:?} has a route that does not name {name:?}: name it there, too"
                    ),
                ));
            }
        }
    }
    Ok(())
}
