//! Turns groups of handlers into destinations, and adds routes to the groups.

use std::collections::BTreeMap;

use crate::config::{Config, ConfigError, InProcess, Route};
use crate::handlers::Handlers;

/// The default group, for handlers that are added without a group.
pub(crate) const HANDLERS: &str = "handlers";

/// Makes each group a destination, and routes the topics of its handlers to the group.
pub(crate) fn add_groups(
    config: &mut Config,
    groups: &[(String, Handlers)],
) -> Result<(), ConfigError> {
    let mut by_topic: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (at, (name, handlers)) in groups.iter().enumerate() {
        let wrong = |reason: &str| Err(ConfigError::new(format!("handlers.{name}"), reason));
        if name.is_empty() || name.len() > 255 || name.contains(char::is_control) {
            return wrong("a name has 1 to 255 bytes and no control characters");
        }
        if groups[..at].iter().any(|(other, _)| other == name) {
            return wrong("another group of handlers has this name: rename one of them");
        }
        if handlers.is_empty() {
            return wrong("the group has no handler: add one, or remove the group");
        }
        if let Some(topic) = handlers.repeated() {
            return wrong(&format!("the topic {topic:?} has two handlers"));
        }
        for topic in handlers.topics() {
            if topic.contains('*') {
                return wrong(&format!(
                    "the topic {topic:?} is a pattern, but a handler serves one topic"
                ));
            }
            by_topic.entry(topic).or_default().push(name);
        }
        config.in_process.push(InProcess {
            name: name.clone(),
            topics: handlers.topics().map(str::to_owned).collect(),
            policy: handlers.policy.clone(),
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
                        "the topic {topic:?} has a route that does not name {name:?}: add {name:?} to the route"
                    ),
                ));
            }
        }
    }
    Ok(())
}
