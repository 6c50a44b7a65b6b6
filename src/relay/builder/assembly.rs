//! What a relay is made of, from its settings.

use std::sync::Arc;

use metrics::gauge;

use super::RelayBuilder;
use crate::config::Config;
use crate::dispatch::{Dispatcher, HttpDispatcher};
use crate::handlers::{Connections, HandlerDispatcher, inbox_of};
use crate::metrics::POOL_IN_USE;
use crate::relay::StartError;
use crate::relay::groups::add_groups;
use crate::relay::observer::Observers;

impl RelayBuilder {
    /// Puts together what works, with settings that are checked.
    pub(in crate::relay) fn assemble(self) -> Result<Assembled, StartError> {
        if let Some(error) = self.error {
            return Err(error.into());
        }
        let mut config = self.config;
        add_groups(&mut config, &self.handlers)?;
        config.validate()?;
        let own_threads = self.dispatcher.as_ref().map(|_| config.concurrency);
        let common = match self.dispatcher {
            Some(dispatcher) => dispatcher,
            None => {
                let is_served = config.url.is_some()
                    || !config.destinations.is_empty()
                    || !config.in_process.is_empty();
                if config.enabled && !is_served {
                    log::error!(event = "no_destination"; "nothing can be sent: OUTBOX_URL is not set, and there is no destination and no handler");
                }
                Arc::new(HttpDispatcher::new(&config)?)
            }
        };
        let connections = self.connections.map(|pool| {
            let in_use = gauge!(POOL_IN_USE, "outbox" => config.table.to_string());
            Arc::new(Connections::new(pool, in_use))
        });
        let groups = self.handlers.into_iter().map(|(name, handlers)| {
            let inbox = inbox_of(&config.table, &name);
            let timeout = handlers.timeout.unwrap_or(config.send_timeout);
            let dispatcher =
                HandlerDispatcher::new(&name, inbox, timeout, handlers, connections.clone());
            Arc::new(dispatcher)
        });
        Ok(Assembled {
            groups: groups.collect(),
            config,
            common,
            own_threads,
            observers: self.observers,
            limit: self.limit,
        })
    }
}

/// What a relay is made of.
pub(in crate::relay) struct Assembled {
    pub(in crate::relay) config: Config,
    /// Sends what no handler serves.
    pub(in crate::relay) common: Arc<dyn Dispatcher>,
    pub(in crate::relay) own_threads: Option<usize>,
    /// In the order of `config.in_process`.
    pub(in crate::relay) groups: Vec<Arc<HandlerDispatcher>>,
    pub(in crate::relay) observers: Observers,
    pub(in crate::relay) limit: Option<u64>,
}
