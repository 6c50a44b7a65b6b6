//! What stands in for HTTP in a build without the feature `http`.

use std::sync::Arc;

use super::Dispatcher;
use crate::config::{Config, ConfigError, Destination};

/// Makes nothing: a relay of this build delivers to no registered destinations.
pub(crate) struct Customers;

impl Customers {
    pub(crate) fn new(_: Config) -> Result<Option<Self>, ConfigError> {
        Ok(None)
    }

    pub(crate) fn dispatcher(&self, _: Destination) -> Result<Arc<dyn Dispatcher>, ConfigError> {
        Err(ConfigError::new(
            "destinations",
            "this build speaks no HTTP",
        ))
    }
}

/// Sends nothing: all topics of its relay have handlers.
pub(crate) struct HttpDispatcher;

impl HttpDispatcher {
    /// Destinations are URLs, and this build serves none.
    pub(crate) fn of_each(config: &Config) -> Result<Vec<Arc<dyn Dispatcher>>, ConfigError> {
        match config.all_destinations().first() {
            None => Ok(Vec::new()),
            Some(destination) => Err(ConfigError::new(
                format!("destinations.{}.url", destination.name),
                "this build speaks no HTTP: give diesel-outbox the feature `http`, or the relay a dispatcher",
            )),
        }
    }
}
