//! Sending delivered messages to another URL, in the form in which they were delivered.

use std::collections::HashMap;
use std::sync::Arc;

use diesel::PgConnection;
use serde_json::Value;

use crate::config::{Config, ConfigError, Destination, Proxy, Tls};
use crate::dispatch::Dispatcher;
use crate::endpoints::{EndpointError, EndpointTest, Endpoints, TestAnswer};
use crate::http::HttpDispatcher;
use crate::message::{Message, replays};
use crate::operate::sql::messages::MessageRecord;
use crate::operate::sql::tail::{self, KeptPayload};
use crate::shows::shows;
use crate::sql::pinned::pinned;

/// Posts delivered messages to a URL, and writes nothing into the database.
///
/// Mode and signatures are those of the endpoint that has the message. Its headers, its authentication and its proxy
/// are left out: they are for its receiver only.
pub struct Forward<'a> {
    destinations: Endpoints<'a>,
    config: &'a Config,
    to: Destination,
    /// By the name of the first endpoint.
    dispatchers: HashMap<String, Arc<dyn Dispatcher>>,
}

impl<'a> Forward<'a> {
    /// # Errors
    /// A [`ConfigError`] if the URL is none.
    pub fn new(
        destinations: Endpoints<'a>,
        config: &'a Config,
        url: &str,
    ) -> Result<Self, ConfigError> {
        let to = Destination::new("forward", url)
            .map_err(|error| ConfigError::new("--forward-to", error.reason()))?;
        Ok(Self {
            destinations,
            config,
            to,
            dispatchers: HashMap::new(),
        })
    }

    /// Posts the message of a ledger entry. `None`: the ledger has not kept its payload.
    ///
    /// # Errors
    /// If the database fails, or the settings of the first endpoint cannot be used here.
    pub fn send(
        &mut self,
        conn: &mut PgConnection,
        entry: &MessageRecord,
    ) -> Result<Option<TestAnswer>, EndpointError> {
        let kept = pinned(conn, self.destinations.name, |conn, outbox| {
            tail::kept(conn, outbox, entry)
        })?;
        let Some(kept) = kept else {
            return Ok(None);
        };
        let dispatcher = match self.dispatchers.get(&entry.destination) {
            Some(dispatcher) => Arc::clone(dispatcher),
            None => {
                let dispatcher = self.dispatcher(conn, &entry.destination)?;
                let name = entry.destination.clone();
                Arc::clone(self.dispatchers.entry(name).or_insert(dispatcher))
            }
        };
        let message = message(entry, kept);
        let again = EndpointTest {
            dispatcher,
            message,
            // Another server than that of the endpoint.
            updated_at: None,
        };
        Ok(Some(again.send()))
    }

    fn dispatcher(
        &self,
        conn: &mut PgConnection,
        name: &str,
    ) -> Result<Arc<dyn Dispatcher>, EndpointError> {
        let configured = self.config.all_destinations();
        let (first, config) = match configured.into_iter().find(|it| it.name == name) {
            Some(first) => (first, self.config.clone()),
            None => match self.destinations.ready(conn, name, self.config) {
                Ok(Some((row, secrets, config))) => {
                    (row.destination(secrets)?, config.for_endpoints())
                }
                Ok(None) | Err(EndpointError::NoTables(_)) => {
                    (self.to.clone(), self.config.clone())
                }
                Err(error) => return Err(error),
            },
        };
        let to = Destination {
            url: self.to.url.clone(),
            headers: Vec::new(),
            auth: None,
            internal: Some(true),
            allow: Vec::new(),
            https_only: Some(false),
            tls: Tls::default(),
            proxy: Some(Proxy::Direct),
            ..first
        };
        let config = Config {
            destinations: vec![to],
            url: None,
            routes: Vec::new(),
            ..config
        };
        let only = HttpDispatcher::of_each(&config)?.pop();
        only.ok_or_else(|| ConfigError::new("--forward-to", "no endpoint").into())
    }
}

/// The message as it was delivered, at its first attempt.
fn message(entry: &MessageRecord, kept: KeptPayload) -> Message {
    let key = replays::same_message(&kept.idempotency_key).map(str::to_owned);
    Message {
        sequence: entry.sequence,
        message_id: entry.message_id,
        headers: kept.headers,
        ordering_key: entry.ordering_key.clone(),
        idempotency_key: key.unwrap_or(kept.idempotency_key),
        created_at: kept.created_at,
        occurred_at: kept.occurred_at,
        payload: kept.payload,
        ..Message::unstored(
            &entry.topic,
            &entry.destination,
            entry.tenant_id,
            &Value::Null,
        )
    }
}

shows!(Forward<'_>: );
