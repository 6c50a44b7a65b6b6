//! What stands in for HTTP in a build without the feature `http`.

use std::sync::Arc;

use super::Dispatcher;
use crate::config::{Config, ConfigError};

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
