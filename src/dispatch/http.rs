//! Blocking HTTP: a message to the destination that its topic is routed to.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use ::http::header::HeaderValue;

use super::resolver::CachingResolver;
use super::target::{Shared, Target};
use super::{Dispatcher, Failure, Outcome, headers, response};
use crate::config::{Config, ConfigError};
use crate::message::Message;
use crate::routes::{Routes, Way};
use crate::status::ReasonCode;

/// Posts messages to destinations, by topic or by name.
///
/// Made by the relay from its settings; of use by itself where an application wants to add
/// something around it.
#[derive(Debug)]
pub struct HttpDispatcher {
    routes: Routes,
    targets: Vec<Target>,
    source: HeaderValue,
    /// Topics that were logged as having no route.
    unrouted: Mutex<HashSet<String>>,
}

/// Topics without a route that are remembered as logged.
const MOST_UNROUTED: usize = 1000;

impl HttpDispatcher {
    /// A dispatcher for the destinations, the routes and the default URL of `config`.
    ///
    /// # Errors
    /// A [`ConfigError`] when a destination cannot be used.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        let resolver = CachingResolver::new().map_err(|error| {
            ConfigError::new("destinations", format!("no thread for names: {error}"))
        })?;
        let resolver = Shared(Arc::new(resolver));
        let targets = config
            .all_destinations()
            .into_iter()
            .map(|destination| Target::new(destination, config, &resolver))
            .collect::<Result<_, _>>()?;
        let source = match &config.source {
            Some(source) => source.clone(),
            None => format!("diesel-outbox/{}", config.table),
        };
        let source = HeaderValue::try_from(source)
            .map_err(|error| ConfigError::new("OUTBOX_SOURCE", error.to_string()))?;
        Ok(Self {
            routes: Routes::new(config),
            targets,
            source,
            unrouted: Mutex::default(),
        })
    }

    /// The names of the destinations that a topic is routed to.
    pub fn destinations_of(&self, topic: &str) -> Vec<&str> {
        let name = |number: &usize| self.targets[*number].destination.name.as_str();
        match self.routes.find(topic, "") {
            Way::To(number) => vec![name(&number)],
            Way::Split(numbers) => numbers.iter().map(name).collect(),
            Way::NoRoute | Way::UnknownDestination => Vec::new(),
        }
    }

    fn target(&self, message: &Message) -> Result<&Target, Failure> {
        match self.routes.find(&message.topic, &message.destination) {
            Way::To(number) => Ok(&self.targets[number]),
            Way::NoRoute => {
                self.log_unrouted(&message.topic);
                let error = format!(
                    "no route and no default URL serves the topic {:?}",
                    message.topic
                );
                Err(Failure::new(ReasonCode::NoRoute, error))
            }
            Way::UnknownDestination => {
                let error = format!("no destination is called {:?}", message.destination);
                Err(Failure::new(ReasonCode::UnknownDestination, error))
            }
            // The relay splits such messages before it sends them.
            Way::Split(_) => Err(Failure::new(
                ReasonCode::NoRoute,
                "its topic is routed to several destinations: a relay makes a message for each",
            )),
        }
    }

    /// Once for each topic: every message of it has its own line as a retry.
    fn log_unrouted(&self, topic: &str) {
        let mut unrouted = self.unrouted.lock().unwrap_or_else(PoisonError::into_inner);
        if unrouted.len() < MOST_UNROUTED && unrouted.insert(topic.to_owned()) {
            log::error!(event = "no_route", topic = topic; "no route and no default URL serves this topic: its messages wait and will die");
        }
    }
}

impl Dispatcher for HttpDispatcher {
    fn dispatch(&self, message: &Message) -> Outcome {
        let target = match self.target(message) {
            Ok(target) => target,
            Err(failure) => return Outcome::Retry(failure),
        };
        let headers = match headers::of(message, &self.source, SystemTime::now()) {
            Ok(headers) => headers,
            Err(failure) => return Outcome::Dead(failure),
        };
        match target.post(headers, &message.payload) {
            Ok(answer) => response::outcome(answer, &target.destination, SystemTime::now()),
            Err(outcome) => outcome,
        }
    }
}
