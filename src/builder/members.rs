//! What knows and serves the members of a relay: endpoints, if the library is built with them (feature `endpoints`).

use std::sync::Arc;

#[cfg(not(feature = "endpoints"))]
use super::sql::registered::Registered;
use crate::config::Config;
#[cfg(feature = "endpoints")]
use crate::endpoints::{
    serving::ServedEndpoints, sql::own::OwnEvents, turns::Turns, workers::EndpointWorkers,
};
use crate::engine::claim::sql::claim::Reads;
use crate::engine::directory::Directory;
use crate::engine::serves::configured::Configured;
use crate::engine::serves::routes::Routes;
use crate::engine::settle::sql::log::OwnLog;
use crate::engine::settle::sql::witness::OwnWitness;
use crate::engine::workers::Workers;
#[cfg(feature = "feeds")]
use crate::feed::sql::store::EventLog;
use crate::http::EndpointClients;

/// The clients for endpoints. A relay that sends to no endpoint (`sends` is not set) knows them all the same, so that their
/// messages get rows for another relay. `has_others`: it serves other destinations.
pub(super) fn clients(
    config: &Config,
    sends: bool,
    has_others: bool,
) -> Option<Arc<EndpointClients>> {
    cfg!(feature = "endpoints").then(|| {
        let config = config.for_endpoints();
        Arc::new(match sends {
            true => EndpointClients::new(config),
            false if has_others => EndpointClients::none(config),
            false => EndpointClients::for_feeds(config),
        })
    })
}

/// What knows the members, and what works for them. Without `clients`, the relay knows none.
pub(super) fn members(
    config: &Config,
    clients: Option<Arc<EndpointClients>>,
    routes: &Arc<Routes>,
) -> (Arc<dyn Directory>, Option<Arc<dyn Workers>>) {
    #[cfg(feature = "endpoints")]
    if let Some(clients) = clients {
        let served = Arc::new(ServedEndpoints::new(config, clients, Arc::clone(routes)));
        let workers = EndpointWorkers(Arc::clone(&served));
        return (served, Some(Arc::new(workers)));
    }
    #[cfg(not(feature = "endpoints"))]
    drop(clients);
    let read_to = others(config);
    let configured = Configured::new(Arc::clone(routes), read_to);
    (Arc::new(configured), None)
}

/// What asks whether somebody is registered whom this relay would pass over. An application's own dispatcher takes every
/// message.
fn others(config: &Config) -> Option<Arc<dyn Reads>> {
    #[cfg(not(feature = "endpoints"))]
    if !config.takes_rest {
        return Some(Arc::new(Registered));
    }
    let _ = config;
    None
}

/// What writes the relay's own events, which are about endpoints.
pub(super) fn witness(config: &Config) -> OwnWitness {
    #[cfg(feature = "endpoints")]
    if config.own_events {
        return Some(&OwnEvents);
    }
    let _ = config;
    None
}

/// What writes the events of feeds.
pub(super) fn log() -> OwnLog {
    #[cfg(feature = "feeds")]
    return Some(&EventLog);
    #[cfg(not(feature = "feeds"))]
    None
}

/// The most threads that may ever send to endpoints at once, of this many.
pub(super) fn most_threads(threads: usize) -> usize {
    #[cfg(feature = "endpoints")]
    let threads = Turns::most(threads);
    threads
}
