//! The relay, started and stopped with the server.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use diesel_outbox::config::Config;
use diesel_outbox::{Relay, RelayHandle};
use rocket::fairing::{Fairing, Info, Kind};
use rocket::tokio::task::spawn_blocking;
use rocket::{Orbit, Rocket, error};

/// How long in-flight sends may take at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// Starts a relay when the server listens, and stops the relay when the server shuts down. Both wait for the
/// database and for receivers, so they run outside the async threads of Rocket.
// Why: docs/decisions.md#rocket-fairing
#[derive(Clone)]
pub struct RelayFairing {
    config: Config,
    relay: Arc<OnceLock<RelayHandle>>,
}

impl RelayFairing {
    pub fn new(config: Config) -> Self {
        Self {
            config,
            relay: Arc::default(),
        }
    }

    /// Stops the relay, if it is running.
    pub async fn end(&self) {
        let relay = Arc::clone(&self.relay);
        let end = spawn_blocking(move || match relay.get() {
            Some(relay) => relay.shutdown(SHUTDOWN_TIMEOUT),
            None => Ok(()),
        });
        match end.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => error!("the relay did not shut down cleanly: {error}"),
            Err(error) => error!("the relay did not shut down cleanly: {error}"),
        }
    }
}

#[rocket::async_trait]
impl Fairing for RelayFairing {
    fn info(&self) -> Info {
        Info {
            name: "outbox relay",
            kind: Kind::Liftoff | Kind::Shutdown,
        }
    }

    async fn on_liftoff(&self, rocket: &Rocket<Orbit>) {
        let relay = Relay::from_config(self.config.clone());
        // In this example the receiver is another part of the same server.
        let receiver = format!("http://127.0.0.1:{}/events", rocket.config().port);
        let started = Arc::clone(&self.relay);
        let start = spawn_blocking(move || {
            // The last are threads for the webhooks of customers.
            let handle = relay.url(&receiver).endpoint_threads(4).start()?;
            started.get_or_init(|| handle);
            Ok::<(), diesel_outbox::StartError>(())
        });
        let failure = match start.await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        error!("the relay did not start: {failure}");
        rocket.shutdown().notify();
    }

    async fn on_shutdown(&self, _rocket: &Rocket<Orbit>) {
        self.end().await;
    }
}
