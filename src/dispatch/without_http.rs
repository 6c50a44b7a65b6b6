//! What stands in for HTTP in a build without the feature `http`.

use super::{Dispatcher, Failure, Outcome};
use crate::config::{Config, ConfigError};
use crate::message::Message;
use crate::status::ReasonCode;

/// Sends nothing: all topics of its relay have handlers.
#[derive(Debug)]
pub(crate) struct HttpDispatcher;

impl HttpDispatcher {
    /// Destinations are URLs, and this build serves none.
    pub(crate) fn new(config: &Config) -> Result<Self, ConfigError> {
        match config.all_destinations().first() {
            None => Ok(Self),
            Some(destination) => Err(ConfigError::new(
                format!("destinations.{}.url", destination.name),
                "this build speaks no HTTP: give diesel-outbox the feature `http`, or the relay a dispatcher",
            )),
        }
    }
}

impl Dispatcher for HttpDispatcher {
    fn dispatch(&self, message: &Message) -> Outcome {
        let code = match message.destination.as_str() {
            "" => ReasonCode::NoRoute,
            _ => ReasonCode::UnknownDestination,
        };
        let error = format!("no handler serves the topic {:?}", message.topic);
        Outcome::Retry(Failure::new(code, error))
    }
}
