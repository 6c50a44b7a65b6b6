//! Replaces the HTTP dispatcher in a build without the feature `http`.

use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use crate::config::{Config, ConfigError, Destination, Rate};
use crate::dispatch::{Dispatcher, EndpointRefusal, NotVerified};

/// Creates no dispatchers: a relay of this build does not send to endpoints.
pub(crate) struct EndpointClients;

impl EndpointClients {
    pub(crate) fn new(_: Config) -> Self {
        Self
    }

    pub(crate) fn none(_: Config) -> Self {
        Self
    }

    pub(crate) fn for_feeds(_: Config) -> Self {
        Self
    }

    pub(crate) fn can_send(&self) -> bool {
        false
    }

    pub(crate) fn dispatcher(
        &self,
        _: Destination,
    ) -> Result<Arc<dyn Dispatcher>, EndpointRefusal> {
        Err(EndpointRefusal::NotHere(
            "this build does not support HTTP".to_owned(),
        ))
    }

    pub(crate) fn verifier(
        &self,
        destination: Destination,
        _: Option<Uuid>,
    ) -> Result<EndpointVerifier, EndpointRefusal> {
        self.dispatcher(destination).map(|_| unreachable!())
    }
}

/// There is none.
#[derive(Debug)]
pub(crate) enum EndpointVerifier {}

impl EndpointVerifier {
    pub(crate) fn timeout(&self) -> Duration {
        match *self {}
    }

    pub(crate) fn ask(&self) -> Result<Option<Rate>, NotVerified> {
        match *self {}
    }
}

/// There are no connections.
pub(crate) fn close_idle() {}

/// Sends nothing: all topics of the relay have handlers.
pub(crate) struct HttpDispatcher;

impl HttpDispatcher {
    /// Refuses destinations: they have URLs, and this build does not support HTTP.
    pub(crate) fn of_each(config: &Config) -> Result<Vec<Arc<dyn Dispatcher>>, ConfigError> {
        match config.all_destinations().first() {
            None => Ok(Vec::new()),
            Some(destination) => Err(ConfigError::new(
                format!("destinations.{}.url", destination.name),
                "this build does not support HTTP: enable the feature `http` of diesel-outbox, or give the relay a dispatcher",
            )),
        }
    }
}
