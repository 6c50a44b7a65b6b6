//! Assembles the parts of a relay from its settings.

use std::sync::Arc;
use std::time::Duration;

use metrics::gauge;

use super::bulkheads::Dispatchers;
use super::members::{clients, log, members, witness};
#[cfg(not(feature = "endpoints"))]
use super::sql::registered;
use super::{Relay, RelayBuilder};
use crate::config::{Config, ConfigError};
use crate::doctor::sql::rights::check_relay;
use crate::engine::host::hooks::Hooks;
use crate::engine::host::settings::Settings;
use crate::engine::host::shared::SharedParts;
use crate::engine::host::sql::connection::{Manager, Source};
use crate::engine::host::{Assembled, StartError, ThreadWork};
use crate::engine::observe::observer::Observers;
use crate::engine::send::bulkhead::Bulkhead;
use crate::engine::serves::routes::{Routes, Serves};
use crate::handlers::groups::add_groups;
use crate::handlers::{Connections, HandlerError, HandlerGroup, Pooled, inbox_of};
use crate::http::{HttpDispatcher, close_idle};
use crate::inbox::cleaning;
use crate::metrics::POOL_IN_USE;
#[cfg(feature = "operate")]
use crate::operate::counts;

/// The error for a relay that has nowhere to send messages.
const NOTHING_TO_SEND_TO: &str = "nothing can be sent: set OUTBOX_URL, or add destinations and routes to outbox.toml (OUTBOX_CONFIG). In a program, RelayBuilder also takes destinations, handlers or a dispatcher. If all destinations are registered in the database, set OUTBOX_ENDPOINT_THREADS";

/// The error for settings of endpoints in a library without them.
const WITHOUT_ENDPOINTS: &str =
    "this program has no endpoints: diesel-outbox is built without its feature `endpoints`";

impl RelayBuilder {
    /// Checks the settings, and makes what sends. An error names each setting as the programmer wrote it.
    pub(crate) fn checked(self) -> Result<CheckedSettings, StartError> {
        let in_code = self.in_code.clone();
        self.put_together().map_err(|error| match error {
            StartError::Config(error) => Self::in_words_of_code(&error, &in_code).into(),
            other => other,
        })
    }

    fn put_together(self) -> Result<CheckedSettings, StartError> {
        if let Some(error) = self.error {
            return Err(error.into());
        }
        let mut config = self.config;
        add_groups(&mut config, &self.handlers)?;
        config.has_own_dispatcher = self.dispatcher.is_some();
        config.validate()?;
        // With configured destinations, the dispatcher sends only the messages of those destinations.
        config.takes_rest = self.dispatcher.is_some() && config.all_destinations().is_empty();
        let has_others = !Serves::new(&config).is_nothing();
        let is_nothing = !has_others && !config.expects_endpoints;
        let of_endpoints = [
            ("OUTBOX_ENDPOINT_THREADS", config.expects_endpoints),
            ("OUTBOX_OWN_EVENTS", config.own_events),
        ];
        let set = of_endpoints.into_iter().find(|(_, is_set)| *is_set);
        if let (Some((setting, _)), false) = (set, cfg!(feature = "endpoints")) {
            return Err(ConfigError::new(setting, WITHOUT_ENDPOINTS).into());
        }
        if config.enabled && is_nothing {
            return Err(ConfigError::new("OUTBOX_URL", NOTHING_TO_SEND_TO).into());
        }
        let is_http = self.dispatcher.is_none();
        let serves_endpoints = is_http && config.endpoint_threads > 0;
        let (urls, rest) = match self.dispatcher {
            None => (HttpDispatcher::of_each(&config)?, None),
            Some(own) if config.takes_rest => (Vec::new(), Some(own)),
            Some(own) => (vec![own; config.all_destinations().len()], None),
        };
        // An application's own dispatcher for all topics takes every message.
        let of_endpoints = match config.takes_rest {
            true => None,
            false => clients(&config, serves_endpoints, has_others),
        };
        let pool = self.connections.unwrap_or_else(|| Arc::new(no_pool));
        let in_use = gauge!(POOL_IN_USE, "outbox" => config.metrics_label());
        let connections = Arc::new(Connections::new(pool, in_use));
        let groups = self.handlers.into_iter().map(|(name, handlers)| {
            let inbox = inbox_of(&config.table, &name);
            let timeout = handlers.policy.timeout.unwrap_or(config.send_timeout);
            let connections = connections.clone();
            Arc::new(HandlerGroup::new(
                &name,
                inbox,
                timeout,
                handlers,
                connections,
            ))
        });
        Ok(CheckedSettings {
            dispatchers: Dispatchers {
                urls,
                groups: groups.collect(),
                rest,
                clients: of_endpoints,
            },
            config,
            manager: self.manager,
            observers: self.observers,
            limit: self.limit,
            is_one_shot: self.is_one_shot,
            claim_limit: self.claim_limit,
        })
    }
}

/// Never called: a relay whose handlers need connections does not start without a pool, and a test relay lends
/// its own connection.
fn no_pool() -> Result<Pooled, HandlerError> {
    Err(HandlerError::retry(
        "the relay has no connections for handlers",
    ))
}

/// Checked settings, and what is made from them without a database.
pub(crate) struct CheckedSettings {
    pub(crate) config: Config,
    pub(crate) manager: Option<Arc<dyn Manager>>,
    pub(crate) dispatchers: Dispatchers,
    pub(crate) observers: Observers,
    pub(crate) limit: Option<u64>,
    pub(crate) is_one_shot: bool,
    pub(crate) claim_limit: Duration,
}

impl CheckedSettings {
    /// The parts of a relay, as values of the engine. It connects to nothing.
    pub(crate) fn assembled(self) -> Result<Assembled, StartError> {
        let config = self.config;
        let clients = self.dispatchers.clients.clone();
        let can_send = clients.as_ref().is_some_and(|one| one.can_send());
        let settings = settings_of(&config, can_send);
        let routes = Arc::new(Routes::of(settings.serves.clone()));
        let (directory, workers) = members(&config, clients, &routes);
        let (source, summary) = match self.manager {
            Some(manager) => (Source::Manager(manager), config.summary_at("managed")),
            None => {
                let source = Source::of_url(config.database_url()?.clone());
                (source, config.summary())
            }
        };
        let (bulkheads, queues) = Bulkhead::all(&config, self.dispatchers);
        let parts = SharedParts {
            settings,
            source,
            bulkheads,
            routes,
            directory,
            hooks: Hooks {
                check: check_relay,
                close_idle,
            },
            observers: self.observers,
            limit: self.limit,
            is_one_shot: self.is_one_shot,
            claim_limit: self.claim_limit,
        };
        let work = ThreadWork {
            queues,
            workers,
            chores: &[
                #[cfg(feature = "operate")]
                counts::chore,
                cleaning::chore,
                #[cfg(feature = "feeds")]
                crate::feed::chore,
                #[cfg(not(feature = "endpoints"))]
                registered::chore,
            ],
            summary,
        };
        Ok(Assembled { parts, work })
    }
}

/// The engine's settings, with what writes the relay's own events.
pub(crate) fn settings_of(config: &Config, can_send: bool) -> Settings {
    let mut settings = Settings::of(config, can_send);
    settings.witness = witness(config);
    settings.log = log();
    settings
}

/// Checks that a relay with these settings could start, but for its database.
///
/// # Errors
/// A [`StartError`] names the bad setting.
pub fn check(config: &Config) -> Result<(), StartError> {
    Relay::from_config(config.clone()).checked().map(drop)
}
