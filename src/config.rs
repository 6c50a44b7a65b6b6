//! Settings: their names, defaults and meaning, and how they are read.
//!
//! Each is a variable of the environment ([`SETTINGS`] lists all of them), a flag of the binary
//! (`OUTBOX_SEND_TIMEOUT` is `--send-timeout`) and a key of `outbox.toml` (`send_timeout`).
//! A flag wins over the environment, the environment over the file, the file over the default.

mod admin;
mod destination;
mod environment;
mod error;
#[cfg(feature = "file")]
mod file;
mod no_proxy;
mod public_key;
mod route;
mod secret;
mod secret_keys;
mod settings;
#[cfg(test)]
mod tests;
mod text;
mod validate;

use std::fmt;
use std::time::Duration;

use secrecy::SecretString;
use url::Url;

pub use self::admin::Admin;
pub use self::destination::{
    Breaker, Class, Classes, Destination, Mode, OnDead, Proxy, Rate, RequestBatch, Roots, Tls,
    TlsVersion,
};
pub use self::environment::{from_env, relevant_variables};
pub use self::error::ConfigError;
pub use self::public_key::PublicKey;
pub use self::route::Route;
pub use self::secret::{SigningSecret, parse_secrets};
#[cfg(feature = "http")]
pub(crate) use self::secret::{VerifyingKey, parse_verifying_keys};
pub use self::secret_keys::SecretKeys;
pub use self::settings::{SETTINGS, Setting};
pub use self::text::parse_duration;
pub(crate) use self::text::url as parse_url;

use self::settings::{Place, unknown};
use self::text::{by_word, content, shown_database, shown_url, written};
use crate::backoff::Backoff;
use crate::name::OutboxName;

/// The name of the destination that `OUTBOX_URL` makes.
pub(crate) const DEFAULT_DESTINATION: &str = "default";

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

by_word!(LogFormat, "text or json", Text = "text", Json = "json");

/// All settings of a relay. Its defaults are those of [`SETTINGS`].
///
/// ```
/// use diesel_outbox::{Config, Destination};
/// use std::time::Duration;
///
/// let mut config = Config::default();
/// config.set("DATABASE_URL", "postgres://app:hunter2@localhost/shop")?;
/// config.set("OUTBOX_URL", "https://receiver.example/events")?;
/// config.lease = Duration::from_secs(30);
/// config.destinations.push(Destination::new("audit", "https://audit.example/events")?);
///
/// assert!(config.database_url().is_ok());
/// let names: Vec<String> = config.all_destinations().into_iter().map(|one| one.name).collect();
/// assert_eq!(names, ["audit", "default"]);
/// assert!(config.summary().contains("lease=30s"));
/// assert!(!config.summary().contains("hunter2"));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Config {
    /// The database. `None` until set.
    pub database_url: Option<SecretString>,
    /// Path of `outbox.toml`. [`from_env`] and the binary read it.
    pub config: Option<String>,
    /// Whether messages are claimed and sent.
    pub enabled: bool,
    /// The outbox to work on.
    pub table: OutboxName,
    /// The default destination.
    pub url: Option<Url>,
    /// What is signed with, the newest first, where a destination has no secrets of its own.
    pub secrets: Vec<SigningSecret>,
    /// What secrets of registered destinations are encrypted with in the database.
    pub secret_keys: SecretKeys,
    /// How requests look.
    pub mode: Mode,
    /// `ce-source`; `None`: `diesel-outbox/` and the outbox's name.
    pub source: Option<String>,
    /// Whether URLs without TLS are refused.
    pub https_only: bool,
    /// Whether destinations may resolve to public addresses only.
    pub public_only: bool,
    /// Whose signature under a certificate is trusted.
    pub tls_roots: Roots,
    /// The HTTP proxy of all destinations.
    pub proxy: Proxy,
    /// Hosts that are reached without the proxy: names, `.suffix`, or networks.
    pub no_proxy: Vec<String>,
    /// Sender threads of each destination.
    pub concurrency: usize,
    /// Threads that send to all registered destinations together.
    pub registered_threads: usize,
    /// Whether registered destinations without TLS are refused.
    pub registered_https_only: bool,
    /// Whether registered destinations may resolve to public addresses only.
    pub registered_public_only: bool,
    /// The only ports that URLs of registered destinations may have; empty: any.
    pub registered_ports: Vec<u16>,
    /// How long a registered destination may fail before it is disabled.
    pub registered_disable_after: Duration,
    /// Messages per claim and per settle, at most.
    pub batch: usize,
    /// How long an idle relay waits before it looks again.
    pub poll_interval: Duration,
    /// How long a silent relay keeps its messages.
    pub lease: Duration,
    /// The limit for one send.
    pub send_timeout: Duration,
    /// Failed attempts after which a message is dead.
    pub max_attempts: u32,
    /// Delay between attempts.
    pub backoff: Backoff,
    /// What the death of a message means for those behind it that have its ordering key.
    pub on_dead: OnDead,
    /// Whether relays stand by while an older one of this outbox works.
    pub single_active: bool,
    /// Whether the relay listens for new messages. Without, it polls.
    pub listener: bool,
    /// Where it listens, if not at the database's URL: behind a pooler it has to be a direct one.
    pub listener_url: Option<SecretString>,
    /// Time for a graceful end.
    pub shutdown_timeout: Duration,
    /// Age at which ledger rows are removed.
    pub retention: Duration,
    /// Age at which rows of the inbox are removed; `None`: never, by the relay.
    pub inbox_retention: Option<Duration>,
    /// Whether ledger rows are removed.
    pub cleaner: bool,
    /// Whether the ledger keeps payloads.
    pub ledger_payload: bool,
    /// Whether deaths, disabled registered destinations and open breakers become messages.
    pub own_events: bool,
    /// How the binary logs.
    pub log_format: LogFormat,
    /// The admin page of the binary.
    pub admin: Admin,
    /// Named destinations.
    pub destinations: Vec<Destination>,
    /// Which topic goes where; the most particular pattern wins.
    pub routes: Vec<Route>,
    /// Destinations inside the process.
    pub(crate) in_process: Vec<InProcess>,
    /// Registered destinations are expected: a relay may have no others.
    pub(crate) expects_registered: bool,
    /// The application's own dispatcher sends whatever no destination serves.
    pub(crate) takes_rest: bool,
    /// The only topics that the relay takes messages of, as patterns; empty: all.
    pub(crate) only: Vec<String>,
}

/// A destination inside the process. What is `None` is as the setting of the same name says.
#[derive(Debug, Clone, Default)]
pub(crate) struct InProcess {
    pub(crate) name: String,
    /// The topics that it has handlers for.
    pub(crate) topics: Vec<String>,
    pub(crate) concurrency: Option<usize>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) backoff: Option<Backoff>,
    pub(crate) rate: Option<Rate>,
}

impl Default for Config {
    /// The defaults of [`SETTINGS`].
    fn default() -> Self {
        let mut config = Self {
            database_url: None,
            config: None,
            enabled: true,
            table: OutboxName::default(),
            url: None,
            secrets: Vec::new(),
            secret_keys: SecretKeys::default(),
            mode: Mode::Binary,
            source: None,
            https_only: false,
            public_only: false,
            tls_roots: Roots::Bundled,
            proxy: Proxy::Direct,
            no_proxy: Vec::new(),
            concurrency: 0,
            registered_threads: 0,
            registered_https_only: true,
            registered_public_only: true,
            registered_ports: Vec::new(),
            registered_disable_after: Duration::ZERO,
            batch: 0,
            poll_interval: Duration::ZERO,
            lease: Duration::ZERO,
            send_timeout: Duration::ZERO,
            max_attempts: 0,
            backoff: Backoff::default(),
            on_dead: OnDead::Continue,
            single_active: false,
            listener: true,
            listener_url: None,
            shutdown_timeout: Duration::ZERO,
            retention: Duration::ZERO,
            inbox_retention: None,
            cleaner: true,
            ledger_payload: false,
            own_events: false,
            log_format: LogFormat::Text,
            admin: Admin::default(),
            destinations: Vec::new(),
            routes: Vec::new(),
            in_process: Vec::new(),
            expects_registered: false,
            takes_rest: false,
            only: Vec::new(),
        };
        for setting in SETTINGS {
            if !setting.default.is_empty() {
                setting
                    .set(&mut config, setting.default)
                    .expect("the defaults are valid: a test reads them all");
            }
        }
        config.expects_registered = false;
        config
    }
}

impl Config {
    /// Sets one setting by its variable, or from a file by `DATABASE_URL_FILE`,
    /// `OUTBOX_URL_FILE`, `OUTBOX_LISTENER_URL_FILE`, `OUTBOX_SECRET_FILE`, `OUTBOX_SECRET_KEY_FILE` or
    /// `OUTBOX_ADMIN_TOKEN_FILE`. Line ends at the end of the file do not count.
    ///
    /// ```no_run
    /// use diesel_outbox::Config;
    ///
    /// let mut config = Config::default();
    /// config.set_variable("DATABASE_URL_FILE", "/run/secrets/database_url")?;
    /// config.set_variable("OUTBOX_BATCH", "200")?;
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] that names the variable or the file.
    pub fn set_variable(&mut self, variable: &str, value: &str) -> Result<(), ConfigError> {
        let of_file = variable.strip_suffix("_FILE").and_then(Setting::of);
        let Some(setting) = of_file.filter(|setting| setting.place == Place::OwnFile) else {
            return self.set(variable, value);
        };
        let content = content(value).map_err(ConfigError::at(variable))?;
        self.set(setting.variable, &content)
    }

    /// Sets one setting by its variable from text.
    ///
    /// ```
    /// use diesel_outbox::Config;
    ///
    /// let mut config = Config::default();
    /// config.set("OUTBOX_LEASE", "30s")?;
    /// assert!(config.set("OUTBOX_LEASE", "soon").is_err());
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] that names the variable: there is none of this name, or its value cannot be used.
    pub fn set(&mut self, variable: &str, value: &str) -> Result<(), ConfigError> {
        let setting = Setting::of(variable).ok_or_else(|| unknown(variable))?;
        let set = setting.set(self, value);
        set.map_err(ConfigError::at(variable))
    }

    /// The named destinations, and last the one of `OUTBOX_URL`, which is called `default`.
    pub fn all_destinations(&self) -> Vec<Destination> {
        let default = self
            .url
            .as_ref()
            .map(|url| Destination::at(DEFAULT_DESTINATION.to_owned(), url.clone()));
        self.destinations.iter().cloned().chain(default).collect()
    }

    /// The limit of the slowest destination. Handlers do not count: a message is not started again here
    /// while its handler runs, and what fences it elsewhere is the lease's id.
    pub(crate) fn longest_send(&self) -> Duration {
        let timeouts = self.destinations.iter().filter_map(|one| one.timeout);
        timeouts.fold(self.send_timeout, Duration::max)
    }

    /// The same for registered destinations, whose URLs come from strangers. The application's own secrets do not
    /// sign what these get: who knows a secret can forge for all that trust it.
    pub(crate) fn for_registered(&self) -> Self {
        Self {
            https_only: self.registered_https_only,
            public_only: self.registered_public_only,
            secrets: Vec::new(),
            ..self.clone()
        }
    }

    /// How soon a relay's lease may end after its session is gone: for so long it starts sends without having seen
    /// its lease, and the last one of them takes its time. `None`: the lease is so short that it ends by time only.
    pub(crate) fn takeover_after(&self) -> Option<Duration> {
        let unseen = self.lease / 12;
        let after = unseen.saturating_add(self.longest_send());
        (unseen >= Duration::from_secs(1) && after < self.lease / 2).then_some(after)
    }

    /// The database, where one is set.
    ///
    /// # Errors
    /// A [`ConfigError`] that says how to set it.
    pub fn database_url(&self) -> Result<&SecretString, ConfigError> {
        self.database_url.as_ref().ok_or_else(|| {
            ConfigError::new(
                "DATABASE_URL",
                "it is not set: give the database, for example postgres://user@localhost/shop",
            )
        })
    }

    /// The settings in one line, without secrets.
    pub fn summary(&self) -> String {
        let database = self.database_url.as_ref();
        self.summary_at(&database.map_or_else(|| "unset".to_owned(), shown_database))
    }

    /// The same of a relay that gets its connections elsewhere: `database` says where.
    pub(crate) fn summary_at(&self, database: &str) -> String {
        format!(
            "table={} database={database} url={} mode={} secrets={} destinations={} handlers={} routes={} concurrency={} batch={} poll_interval={} lease={} send_timeout={} max_attempts={} backoff={:?} shutdown_timeout={} retention={} inbox_retention={} enabled={} cleaner={} on_dead={} single_active={} listener={} admin={}",
            self.table,
            self.url
                .as_ref()
                .map_or_else(|| "unset".to_owned(), shown_url),
            self.mode,
            self.secrets.len(),
            self.destinations.len(),
            self.in_process.len(),
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
