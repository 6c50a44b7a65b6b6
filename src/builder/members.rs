//! What knows and serves the members of a relay: endpoints, if the library is built with them (feature `endpoints`).

use std::sync::Arc;

#[cfg(not(feature = "endpoints"))]
use super::sql::Registered;
use crate::config::Config;
#[cfg(feature = "endpoints")]
use crate::endpoints::{
    serving::ServedEndpoints, sql::own::OwnEvents, turns::Turns, workers::EndpointWorkers,
};
use crate::engine::directory::Directory;
use crate::engine::serves::configured::Configured;
use crate::engine::serves::routes::Routes;
use crate::engine::settle::sql::witness::OwnWitness;
use crate::engine::workers::Workers;
use crate::http::EndpointClients;

/// The clients for endpoints. A relay that sends to no endpoint (`sends` is not set) knows them all the same, so that their
/// messages get rows for another relay.
#[cfg(feature = "endpoints")]
pub(super) fn clients(config: &Config, sends: bool) -> Option<Arc<EndpointClients>> {
    Some(Arc::new(match sends {
        true => EndpointClients::new(config.for_endpoints()),
        false => EndpointClients::none(config.for_endpoints()),
    }))
}

#[cfg(not(feature = "endpoints"))]
pub(super) fn clients(_: &Config, _: bool) -> Option<Arc<EndpointClients>> {
    None
}

/// What knows the members, and what works for them. Without `clients`: nobody does.
pub(super) fn members(
    config: &Config,
    clients: Option<Arc<EndpointClients>>,
    routes: &Arc<Routes>,
) -> (Arc<dyn Directory>, Arc<dyn Workers>) {
    #[cfg(feature = "endpoints")]
    if let Some(clients) = clients {
        let served = Arc::new(ServedEndpoints::new(config, clients, Arc::clone(routes)));
        let workers = EndpointWorkers(Arc::clone(&served));
        return (served, Arc::new(workers));
    }
    #[cfg(not(feature = "endpoints"))]
    let configured = match (clients, config.takes_rest) {
        // An application's own dispatcher takes every message.
        (_, true) => Configured::new(Arc::clone(routes)),
        (_, false) => Configured::beside_members(Arc::clone(routes), Arc::new(Registered)),
    };
    #[cfg(feature = "endpoints")]
    let configured = Configured::new(Arc::clone(routes));
    let configured = Arc::new(configured);
    (Arc::clone(&configured) as _, configured)
}

/// What writes the relay's own events, which are about endpoints.
#[cfg(feature = "endpoints")]
pub(super) fn witness(config: &Config) -> OwnWitness {
    match config.own_events {
        true => Some(&OwnEvents),
        false => None,
    }
}

#[cfg(not(feature = "endpoints"))]
pub(super) fn witness(_: &Config) -> OwnWitness {
    None
}

/// The most threads that may ever send to endpoints at once.
#[cfg(feature = "endpoints")]
pub(super) fn most_threads(threads: usize) -> usize {
    Turns::most(threads)
}

#[cfg(not(feature = "endpoints"))]
pub(super) fn most_threads(threads: usize) -> usize {
    threads
}
