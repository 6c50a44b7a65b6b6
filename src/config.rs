//! Settings: names, defaults and meaning, and how they are read.
//!
//! Each setting is an environment variable ([all settings](crate::guide::settings)), a flag of the binary
//! (`OUTBOX_SEND_TIMEOUT` is `--send-timeout`) and a key of `outbox.toml` (`send_timeout`).
//! A flag wins over the environment, the environment over the file, the file over the default.

pub(crate) mod admin;
mod agreement;
mod auth;
pub(crate) mod destination;
pub(crate) mod environment;
#[cfg(feature = "file")]
mod file;
mod for_engine;
mod ledger_payload;
pub(crate) mod log_format;
mod no_proxy;
mod public_key;
pub(crate) mod secret;
mod secret_keys;
mod section;
mod serves;
pub(crate) mod settings;
#[cfg(test)]
mod tests;
pub(crate) mod text;
mod validate;
mod values;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;
use url::Url;

pub(crate) use self::admin::Admin;
pub use self::auth::Auth;
#[cfg(feature = "http")]
pub(crate) use self::auth::{
    Algorithm, AuthKind, AuthPart, Client, ClientKey, Encoding, HeaderSignature, OAuth2, Template,
};
pub use self::destination::{
    Breaker, Class, Classes, DeliveryPolicy, FeedDestination, Mode, OnDead, Proxy, Rate,
    RequestBatch, Roots, Tls, TlsVersion, Verification,
};
pub(crate) use self::destination::{Destination, PolicyOption};
pub use self::environment::from_env;
pub(crate) use self::log_format::LogFormat;
pub use self::public_key::PublicKey;
pub use self::secret::SigningSecret;
pub(crate) use self::secret::parse_secrets;
#[cfg(feature = "http")]
pub(crate) use self::secret::{VerifyingKey, parse_verifying_keys};
pub use self::secret_keys::SecretKeys;
pub(crate) use self::settings::{SETTINGS, Setting};
pub(crate) use self::text::{is_masked, shown_url, url as parse_url, words};
pub(crate) use crate::config_error::ConfigError;
pub(crate) use crate::delivery::LONGEST_SEND;
pub use crate::ledger_payload::LedgerPayload;
pub(crate) use crate::route::{DEFAULT_DESTINATION, Route};

use self::settings::{SettingPlace, unknown};
use self::text::{content, shown_database, written};
use crate::backoff::Backoff;
use crate::name::{OutboxName, label_of};

/// The concurrent sends of an endpoint.
const REGISTERED_CONCURRENCY: usize = 4;

/// Declares the settings, and [`Config::empty`].
macro_rules! settings {
    (
        $(#[$of_config:meta])*
        pub struct Config {
            $($(#[$of_field:meta])* $visible:vis $field:ident: $type:ty,)+
        }
    ) => {
        $(#[$of_config])*
        pub struct Config {
            $($(#[$of_field])* $visible $field: $type,)+
        }

        impl Config {
            /// Without the defaults that the table of settings has.
            fn empty() -> Self {
                Self {
                    $($field: Default::default(),)+
                }
            }
        }
    };
}

settings! {
    /// All settings of a relay.
    ///
    /// ```
    /// use diesel_outbox::Destination;
    /// use diesel_outbox::config::Config;
    /// use std::time::Duration;
    ///
    /// let mut config = Config::default();
    /// config.set("DATABASE_URL", "postgres://app:hunter2@localhost/shop")?;
    /// config.set("OUTBOX_URL", "https://receiver.example/events")?;
    /// config.lease = Duration::from_secs(30);
    /// config.destinations.push(Destination::new("audit", "https://audit.example/events")?);
    ///
    /// assert!(config.database_url().is_ok());
    /// assert_eq!(config.destinations[0].name, "audit");
    /// assert!(!format!("{config:?}").contains("hunter2"));
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    #[derive(Clone)]
    #[non_exhaustive]
    pub struct Config {
        /// The database URL or key=value string. `None` until set.
        pub database_url: Option<SecretString>,
        /// The path of `outbox.toml`. [`from_env`] and the binary read the file.
        pub(crate) config: Option<String>,
        /// Whether the relay claims and sends messages.
        pub enabled: bool,
        /// The name of the outbox.
        pub table: OutboxName,
        /// The URL of the default destination.
        pub url: Option<Url>,
        /// The secrets that sign requests, newest first. A destination's own secrets replace them.
        pub secrets: Vec<SigningSecret>,
        /// The keys that encrypt the secrets of endpoints in the database.
        pub secret_keys: SecretKeys,
        /// The CloudEvents mode of requests.
        pub mode: Mode,
        /// The `ce-source` of all messages. `None`: `diesel-outbox/` followed by the name of the outbox.
        pub source: Option<String>,
        /// Whether to refuse URLs without TLS.
        pub https_only: bool,
        /// Whether destinations may resolve only to public addresses.
        pub public_only: bool,
        /// The trusted root certificates.
        pub tls_roots: Roots,
        /// The HTTP proxy of all destinations.
        pub proxy: Proxy,
        /// Hosts reached without the proxy: names, `.suffix`, or networks.
        pub no_proxy: Vec<String>,
        /// Sender threads of each destination.
        pub concurrency: usize,
        /// Sender threads that all endpoints share; while sends last, up to four times as many.
        pub endpoint_threads: usize,
        /// Whether to refuse endpoints without TLS. Defaults to `true`.
        pub endpoint_https_only: bool,
        /// Whether endpoints may resolve only to public addresses. Defaults to `true`, because their URLs come
        /// from customers.
        pub endpoint_public_only: bool,
        /// The ports allowed in URLs of endpoints. Empty: any port.
        pub endpoint_ports: Vec<u16>,
        /// The HTTP proxy of endpoints. `None`: [`proxy`](Self::proxy).
        pub endpoint_proxy: Option<Proxy>,
        /// A PEM file with the client certificate that endpoints see, and its chain (mTLS).
        pub endpoint_client_cert_file: Option<PathBuf>,
        /// A PEM file with the key of this certificate.
        pub endpoint_client_key_file: Option<PathBuf>,
        /// How long an endpoint may fail before the relay disables it: no send has succeeded for this long, at
        /// any relay. Defaults to 5 days.
        pub endpoint_disable_after: Duration,
        /// The CloudEvents mode of requests to endpoints. Defaults to [`Mode::Structured`], because signatures
        /// cover no headers.
        pub endpoint_mode: Mode,
        /// How endpoints that customers register in the portal show that they want messages. Defaults to
        /// [`Verification::None`].
        pub endpoint_verification: Verification,
        /// The time limit of one send to an endpoint, at most 5 minutes. Defaults to 15 s.
        pub endpoint_timeout: Duration,
        /// Failed attempts at an endpoint after which a message is dead-lettered. Defaults to 10.
        pub endpoint_max_attempts: u32,
        /// The delay between attempts at an endpoint. Defaults to `5s,5m,30m,2h,5h,10h,14h,20h,24h`: ten attempts
        /// in three days.
        pub endpoint_backoff: Backoff,
        /// The most messages in one claim or settle.
        pub batch: usize,
        /// How long an idle relay waits between polls.
        pub poll_interval: Duration,
        /// How long a relay keeps its claimed messages without renewing its lease.
        pub lease: Duration,
        /// The time limit of one send.
        pub send_timeout: Duration,
        /// Failed attempts after which a message is dead-lettered.
        pub max_attempts: u32,
        /// The delay between attempts.
        pub backoff: Backoff,
        /// Whether later messages with the ordering key of a dead letter are sent or wait.
        pub on_dead: OnDead,
        /// Whether relays stand by while an older relay of this outbox is active.
        pub single_active: bool,
        /// Whether the relay's threads, except heartbeat and listener, use one connection in turn: for a server with few
        /// connections, or a process with many databases; slower under load. Defaults to `false`.
        pub share_connection: bool,
        /// Whether the relay listens for new messages. Otherwise it only polls.
        pub listener: bool,
        /// The connection of the listener, if not that of the database. It must bypass a pooler.
        pub listener_url: Option<SecretString>,
        /// The time for a graceful shutdown.
        pub shutdown_timeout: Duration,
        /// The age at which the relay removes ledger rows.
        pub retention: Duration,
        /// The age at which the relay removes rows of the inbox. `None`: never, the default. If several relays clean the
        /// inbox, the shortest time applies.
        pub inbox_retention: Option<Duration>,
        /// The age at which the relay removes events of feeds.
        pub feed_retention: Duration,
        /// The most bytes of the events of all feeds. `None`: no limit.
        pub feed_max_bytes: Option<u64>,
        /// The most requests that wait for new events of feeds at the same time, where the program serves them.
        pub feed_waiters: usize,
        /// How long nobody reads a feed with new events until its state is `unread`.
        pub feed_unread_after: Duration,
        /// Whether the relay removes old ledger rows.
        pub cleaner: bool,
        /// How long the ledger keeps payloads and headers.
        pub ledger_payload: LedgerPayload,
        /// Whether what happens to destinations becomes messages.
        pub own_events: bool,
        /// The log format of the binary.
        pub(crate) log_format: LogFormat,
        /// The admin page of the binary.
        pub(crate) admin: Admin,
        /// Named destinations.
        pub destinations: Vec<Destination>,
        /// Destinations that are read instead of sent to.
        pub feeds: Vec<FeedDestination>,
        /// The routes from topics to destinations. The most specific pattern wins.
        pub routes: Vec<Route>,
        /// Destinations inside the process.
        pub(crate) in_process: Vec<InProcess>,
        /// Whether endpoints are expected: the relay may have no other destinations.
        pub(crate) expects_endpoints: bool,
        /// Whether the application's own dispatcher sends all messages without a destination.
        pub(crate) takes_rest: bool,
        /// The name of the relay among those of this process.
        pub(crate) label: Option<String>,
        /// Whether the application sends by a dispatcher of its own, whose sends the relay cannot close.
        pub(crate) has_own_dispatcher: bool,
        /// The topics whose messages the relay claims, as patterns. Empty: all topics.
        pub(crate) only: Vec<String>,
        /// Patterns of the application's topics (`OUTBOX_TOPICS`). Where any relay declares topics, a message of another topic
        /// that nobody wants waits (`UNKNOWN_TOPIC`).
        pub topics: Vec<String>,
    }
}

/// A destination inside the process.
#[derive(Debug, Clone, Default)]
pub(crate) struct InProcess {
    pub(crate) name: String,
    /// The topics with handlers.
    pub(crate) topics: Vec<String>,
    pub(crate) policy: DeliveryPolicy,
}

impl Default for Config {
    /// The defaults of all settings.
    fn default() -> Self {
        let mut config = Self::empty();
        for setting in SETTINGS {
            if !setting.default.is_empty() {
                setting
                    .set(&mut config, setting.default)
                    .expect("the defaults are valid: a test reads all of them");
            }
        }
        config.expects_endpoints = false;
        config
    }
}

impl Config {
    /// Sets one setting by its variable. Reads the value from a file for `DATABASE_URL_FILE`,
    /// `OUTBOX_URL_FILE`, `OUTBOX_LISTENER_URL_FILE`, `OUTBOX_SECRET_FILE`, `OUTBOX_SECRET_KEY_FILE` or
    /// `OUTBOX_ADMIN_TOKEN_FILE`. Line breaks at the end of the file are ignored.
    ///
    /// # Errors
    /// A [`ConfigError`] names the variable or the file.
    pub(crate) fn set_variable(&mut self, variable: &str, value: &str) -> Result<(), ConfigError> {
        let of_file = variable.strip_suffix("_FILE").and_then(Setting::of);
        let Some(setting) = of_file.filter(|setting| setting.place == SettingPlace::OwnFile) else {
            return self.set(variable, value);
        };
        let content = content(value).map_err(ConfigError::at(variable))?;
        self.set(setting.variable, &content)
    }

    /// Sets one setting, given its variable and the value as text.
    ///
    /// ```
    /// use diesel_outbox::config::Config;
    ///
    /// let mut config = Config::default();
    /// config.set("OUTBOX_LEASE", "30s")?;
    /// assert!(config.set("OUTBOX_LEASE", "soon").is_err());
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] names the variable. The variable is unknown, or the value is invalid.
    pub fn set(&mut self, variable: &str, value: &str) -> Result<(), ConfigError> {
        let setting = Setting::of(variable).ok_or_else(|| unknown(variable))?;
        let set = setting.set(self, value);
        set.map_err(ConfigError::at(variable))
    }

    /// Without threads, endpoints may still be feeds.
    pub(crate) fn set_endpoint_threads(&mut self, threads: usize) {
        self.endpoint_threads = threads;
        self.expects_endpoints = threads > 0 || cfg!(feature = "feeds");
    }

    /// Whether `OUTBOX_ENDPOINT_THREADS` is set: the relay may have no other destinations than endpoints.
    pub(crate) fn expects_endpoints(&self) -> bool {
        self.expects_endpoints
    }

    /// The named destinations, followed by the destination `default` if `OUTBOX_URL` is set.
    pub(crate) fn all_destinations(&self) -> Vec<Destination> {
        let default = self
            .url
            .as_ref()
            .map(|url| Destination::at(DEFAULT_DESTINATION.to_owned(), url.clone()));
        self.destinations.iter().cloned().chain(default).collect()
    }

    /// The longest timeout of all configured destinations. Handlers do not count: this process starts no second call of
    /// a message while its handler runs, and in other processes the lease id fences the result.
    pub(crate) fn longest_send(&self) -> Duration {
        let destinations = self.destinations.iter();
        let timeouts = destinations.filter_map(|one| one.policy.timeout);
        timeouts.fold(self.send_timeout, Duration::max)
    }

    /// The settings for endpoints, whose URLs come from strangers. The application's secrets never sign
    /// requests to them: anyone who knows a secret can forge requests to all receivers that trust it.
    pub(crate) fn for_endpoints(&self) -> Self {
        Self {
            https_only: self.endpoint_https_only,
            public_only: self.endpoint_public_only,
            proxy: self.endpoint_proxy.as_ref().unwrap_or(&self.proxy).clone(),
            secrets: Vec::new(),
            concurrency: REGISTERED_CONCURRENCY,
            mode: self.endpoint_mode,
            send_timeout: self.endpoint_timeout,
            max_attempts: self.endpoint_max_attempts,
            backoff: self.endpoint_backoff.clone(),
            ..self.clone()
        }
    }

    /// The database.
    ///
    /// # Errors
    /// A [`ConfigError`] when the database is not set.
    pub fn database_url(&self) -> Result<&SecretString, ConfigError> {
        self.database_url.as_ref().ok_or_else(|| {
            ConfigError::new(
                "DATABASE_URL",
                "not set: give a database, for example postgres://user@localhost/shop",
            )
        })
    }

    /// The label `outbox` of a relay's metrics.
    pub(crate) fn metrics_label(&self) -> String {
        label_of(self.label.as_deref(), &self.table, ":")
    }

    /// The settings on one line, without secrets.
    pub(crate) fn summary(&self) -> String {
        let database = self.database_url.as_ref();
        self.summary_at(&database.map_or_else(|| "unset".to_owned(), shown_database))
    }

    /// The summary of a relay with its own source of connections, which `database` describes.
    pub(crate) fn summary_at(&self, database: &str) -> String {
        format!(
            "table={} database={database} url={} mode={} secrets={} destinations={} handlers={} routes={} concurrency={} batch={} poll_interval={} lease={} send_timeout={} max_attempts={} backoff={:?} shutdown_timeout={} retention={} inbox_retention={} enabled={} cleaner={} on_dead={} single_active={} share_connection={} listener={} admin={}",
            self.table,
            self.url
                .as_ref()
                .map_or_else(|| "unset".to_owned(), shown_url),
            self.mode,
            self.secrets.len(),
            self.destinations.len(),
            self.in_process
                .iter()
                .map(|one| one.topics.len())
                .sum::<usize>(),
            self.routes.len(),
            self.concurrency,
            self.batch,
            written(self.poll_interval),
            written(self.lease),
            written(self.send_timeout),
            self.max_attempts,
            self.backoff.to_string(),
            written(self.shutdown_timeout),
            written(self.retention),
            self.inbox_retention
                .map_or_else(|| "unset".to_owned(), written),
            self.enabled,
            self.cleaner,
            self.on_dead,
            self.single_active,
            self.share_connection,
            match &self.listener_url {
                Some(url) if self.listener => shown_database(url),
                _ => self.listener.to_string(),
            },
            self.admin,
        )
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Config({})", self.summary())
    }
}
