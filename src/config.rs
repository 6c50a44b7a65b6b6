//! Settings: their names, defaults and meaning, and how they are read.
//!
//! Each is a variable of the environment ([`SETTINGS`] lists all of them), a flag of the binary
//! (`OUTBOX_SEND_TIMEOUT` is `--send-timeout`) and a key of `outbox.toml` (`send_timeout`).
//! A flag wins over the environment, the environment over the file, the file over the default.

mod settings;
mod text;

use std::fmt;
use std::time::Duration;

use secrecy::SecretString;
use url::Url;

pub use self::settings::{ConfigError, SETTINGS, Setting};
pub use self::text::parse_duration;

use self::settings::{bad, not_yet, unknown};

use self::text::{
    not_empty, parse_bool, parse_count, parse_database_url, parse_url, shown_database, shown_url,
    written,
};

use crate::backoff::Backoff;
use crate::name::OutboxName;

/// Time that a settle is expected to take at most, for the check of the lease.
const SETTLE_TIME: Duration = Duration::from_millis(100);

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// A place that messages are sent to.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Destination {
    /// Its name, as routes and `outbox.destination` use it.
    pub name: String,
    /// Where messages are posted.
    pub url: Url,
    /// The limit for one send; `None`: [`Config::send_timeout`].
    pub timeout: Option<Duration>,
}

impl Destination {
    /// A destination of this name.
    ///
    /// # Errors
    /// A [`ConfigError`] when `url` is not one of `http` or `https` with a host.
    pub fn new(name: impl Into<String>, url: &str) -> Result<Self, ConfigError> {
        let name = name.into();
        let key = format!("destinations.{name}.url");
        Ok(Self {
            url: parse_url(&key, url)?,
            name,
            timeout: None,
        })
    }
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Destination")
            .field("name", &self.name)
            .field("url", &shown_url(&self.url))
            .field("timeout", &self.timeout)
            .finish()
    }
}

/// Which topics go to which destination. `*` stands for any characters: `order.*`, `*`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Route {
    /// A topic or a pattern.
    pub topic: String,
    /// A destination's name.
    pub to: String,
}

impl Route {
    /// Topics that match `topic` go to the destination `to`.
    pub fn new(topic: impl Into<String>, to: impl Into<String>) -> Self {
        Self {
            topic: topic.into(),
            to: to.into(),
        }
    }
}

/// All settings of a relay.
#[derive(Clone)]
#[non_exhaustive]
pub struct Config {
    /// The database. `None` until set.
    pub database_url: Option<SecretString>,
    /// Path of `outbox.toml`. Read by the binary.
    pub config: Option<String>,
    /// Whether messages are claimed and sent.
    pub enabled: bool,
    /// The outbox to work on.
    pub table: OutboxName,
    /// The default destination.
    pub url: Option<Url>,
    /// Sender threads.
    pub concurrency: usize,
    /// Messages per claim and per settle, at most.
    pub batch: usize,
    /// The wait of an idle relay.
    pub poll_interval: Duration,
    /// How long a silent relay keeps its messages.
    pub lease: Duration,
    /// For one send.
    pub send_timeout: Duration,
    /// Failed attempts after which a message is dead.
    pub max_attempts: u32,
    /// Delay between attempts.
    pub backoff: Backoff,
    /// Time for a graceful end.
    pub shutdown_timeout: Duration,
    /// Age at which ledger rows are removed.
    pub retention: Duration,
    /// Whether ledger rows are removed.
    pub cleaner: bool,
    /// Whether the ledger keeps payloads.
    pub ledger_payload: bool,
    /// How the binary logs.
    pub log_format: LogFormat,
    /// Named destinations.
    pub destinations: Vec<Destination>,
    /// Which topic goes where; the most particular pattern wins.
    pub routes: Vec<Route>,
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
            concurrency: 0,
            batch: 0,
            poll_interval: Duration::ZERO,
            lease: Duration::ZERO,
            send_timeout: Duration::ZERO,
            max_attempts: 0,
            backoff: Backoff::default(),
            shutdown_timeout: Duration::ZERO,
            retention: Duration::ZERO,
            cleaner: true,
            ledger_payload: false,
            log_format: LogFormat::Text,
            destinations: Vec::new(),
            routes: Vec::new(),
        };
        for setting in SETTINGS {
            if !setting.default.is_empty() {
                config
                    .set(setting.variable, setting.default)
                    .expect("the defaults are valid: a test reads them all");
            }
        }
        config
    }
}

/// Reads the settings from the environment of this process.
///
/// ```no_run
/// let config = diesel_outbox::config::from_env()?;
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
///
/// # Errors
/// A [`ConfigError`] that names the variable: unknown, unparsable, or contradicting another.
pub fn from_env() -> Result<Config, ConfigError> {
    let mut config = Config::default();
    for (variable, value) in relevant_variables()? {
        config.set_variable(&variable, &value)?;
    }
    if config.config.is_some() {
        return Err(bad(
            "OUTBOX_CONFIG",
            "the library reads no file: set destinations and routes by Relay::builder, or unset it",
        ));
    }
    config.validate()?;
    Ok(config)
}

/// The variables of this process's environment that concern the outbox.
///
/// # Errors
/// A [`ConfigError`] when one of them is not UTF-8.
pub fn relevant_variables() -> Result<Vec<(String, String)>, ConfigError> {
    let mut found = Vec::new();
    for (variable, value) in std::env::vars_os() {
        let Some(variable) = variable.to_str().map(str::to_owned) else {
            continue;
        };
        if !is_relevant(&variable) {
            continue;
        }
        match value.into_string() {
            Ok(value) => found.push((variable, value)),
            Err(_) => return Err(bad(&variable, "it is not UTF-8")),
        }
    }
    let is_set = |name: &str| found.iter().any(|(variable, _)| variable == name);
    if is_set("DATABASE_URL") && is_set("DATABASE_URL_FILE") {
        return Err(bad(
            "DATABASE_URL_FILE",
            "DATABASE_URL is set, too: unset one of them",
        ));
    }
    found.sort();
    Ok(found)
}

/// Clusters set `OUTBOX_SERVICE_HOST`, `OUTBOX_PORT_80_TCP` and their like for a service that is
/// called `outbox`: these are nobody's settings.
fn is_relevant(variable: &str) -> bool {
    let service_link = variable.starts_with("OUTBOX_SERVICE_")
        || variable == "OUTBOX_PORT"
        || variable.starts_with("OUTBOX_PORT_");
    matches!(variable, "DATABASE_URL" | "DATABASE_URL_FILE")
        || (variable.starts_with("OUTBOX_") && !service_link)
}

impl Config {
    /// Sets one setting by its variable, or by `DATABASE_URL_FILE` from a file.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the variable or the file.
    pub fn set_variable(&mut self, variable: &str, value: &str) -> Result<(), ConfigError> {
        if variable != "DATABASE_URL_FILE" {
            return self.set(variable, value);
        }
        let content = std::fs::read_to_string(value)
            .map_err(|error| bad(variable, &format!("cannot read {value:?}: {error}")))?;
        self.set("DATABASE_URL", content.trim_end_matches(['\r', '\n']))
    }

    /// Sets one setting by its variable from text.
    ///
    /// ```
    /// use diesel_outbox::Config;
    ///
    /// let mut config = Config::default();
    /// config.set("OUTBOX_LEASE", "30s")?;
    /// let error = config.set("OUTBOX_LEASE", "soon").unwrap_err();
    /// assert!(error.to_string().contains("OUTBOX_LEASE"));
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] that names the variable.
    pub fn set(&mut self, variable: &str, value: &str) -> Result<(), ConfigError> {
        match variable {
            "DATABASE_URL" => self.database_url = Some(parse_database_url(value)?.into()),
            "OUTBOX_CONFIG" => self.config = Some(not_empty(variable, value)?.to_owned()),
            "OUTBOX_ENABLED" => self.enabled = parse_bool(variable, value)?,
            "OUTBOX_TABLE" => {
                self.table = value
                    .parse()
                    .map_err(|error| bad(variable, &format!("{error}")))?;
            }
            "OUTBOX_URL" => self.url = Some(parse_url(variable, value)?),
            "OUTBOX_MODE" => match value {
                "binary" => {}
                "structured" => return Err(not_yet(variable, "structured mode")),
                _ => {
                    return Err(bad(
                        variable,
                        &format!("{value:?} is not binary or structured"),
                    ));
                }
            },
            "OUTBOX_SINGLE_ACTIVE" => {
                if parse_bool(variable, value)? {
                    return Err(not_yet(variable, "single-active relaying"));
                }
            }
            "OUTBOX_CONCURRENCY" => self.concurrency = parse_count(variable, value, 1, 1024)?,
            "OUTBOX_BATCH" => self.batch = parse_count(variable, value, 1, 10_000)?,
            "OUTBOX_POLL_INTERVAL" => self.poll_interval = parse_duration(variable, value)?,
            "OUTBOX_LEASE" => self.lease = parse_duration(variable, value)?,
            "OUTBOX_SEND_TIMEOUT" => self.send_timeout = parse_duration(variable, value)?,
            "OUTBOX_MAX_ATTEMPTS" => {
                self.max_attempts = parse_count(variable, value, 1, 1_000_000)?
            }
            "OUTBOX_BACKOFF" => {
                self.backoff = value
                    .parse()
                    .map_err(|error| bad(variable, &format!("{error}")))?;
            }
            "OUTBOX_SHUTDOWN_TIMEOUT" => self.shutdown_timeout = parse_duration(variable, value)?,
            "OUTBOX_RETENTION" => self.retention = parse_duration(variable, value)?,
            "OUTBOX_CLEANER" => self.cleaner = parse_bool(variable, value)?,
            "OUTBOX_LEDGER_PAYLOAD" => self.ledger_payload = parse_bool(variable, value)?,
            "OUTBOX_LOG_FORMAT" => {
                self.log_format = match value {
                    "text" => LogFormat::Text,
                    "json" => LogFormat::Json,
                    _ => return Err(bad(variable, &format!("{value:?} is not text or json"))),
                };
            }
            _ => return Err(unknown(variable)),
        }
        Ok(())
    }

    /// Whether the settings agree with each other.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the settings that contradict each other.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (variable, duration) in [
            ("OUTBOX_POLL_INTERVAL", self.poll_interval),
            ("OUTBOX_LEASE", self.lease),
            ("OUTBOX_SEND_TIMEOUT", self.send_timeout),
        ] {
            if duration < Duration::from_millis(1) {
                return Err(bad(variable, "it has to be 1ms or longer"));
            }
        }
        if self.cleaner && self.retention.is_zero() {
            return Err(bad(
                "OUTBOX_RETENTION",
                "0 would forget at once what was delivered; to keep it for ever set OUTBOX_CLEANER=false",
            ));
        }
        let longest_send = self
            .destinations
            .iter()
            .filter_map(|destination| destination.timeout)
            .chain([self.send_timeout])
            .max()
            .unwrap_or(self.send_timeout);
        if longest_send + SETTLE_TIME >= self.lease / 2 {
            return Err(bad(
                "OUTBOX_LEASE",
                &format!(
                    "{} is too short: a send of {} (OUTBOX_SEND_TIMEOUT, or a destination's timeout) and {} for its settle have to fit into half of it",
                    humantime::format_duration(self.lease),
                    humantime::format_duration(longest_send),
                    humantime::format_duration(SETTLE_TIME),
                ),
            ));
        }
        for (index, destination) in self.destinations.iter().enumerate() {
            let name = &destination.name;
            if self.destinations[..index].iter().any(|d| d.name == *name) {
                return Err(bad(&format!("destinations.{name}"), "it is there twice"));
            }
        }
        for (index, route) in self.routes.iter().enumerate() {
            if !self.destinations.iter().any(|d| d.name == route.to) {
                return Err(bad(
                    &format!("routes[{index}].to"),
                    &format!("no destination is called {:?}", route.to),
                ));
            }
            if self.routes[..index].iter().any(|r| r.topic == route.topic) {
                return Err(bad(
                    &format!("routes[{index}].topic"),
                    &format!("{:?} has a route already", route.topic),
                ));
            }
        }
        Ok(())
    }

    /// The database, where one is set.
    ///
    /// # Errors
    /// A [`ConfigError`] that says how to set it.
    pub fn database_url(&self) -> Result<&SecretString, ConfigError> {
        self.database_url.as_ref().ok_or_else(|| {
            bad(
                "DATABASE_URL",
                "it is not set: give the database, for example postgres://user@localhost/shop",
            )
        })
    }

    /// The settings in one line, without secrets.
    pub fn summary(&self) -> String {
        format!(
            "table={} database={} url={} destinations={} routes={} concurrency={} batch={} poll_interval={} lease={} send_timeout={} max_attempts={} backoff={:?} shutdown_timeout={} retention={} enabled={} cleaner={}",
            self.table,
            self.database_url
                .as_ref()
                .map_or_else(|| "unset".to_owned(), shown_database),
            self.url
                .as_ref()
                .map_or_else(|| "unset".to_owned(), shown_url),
            self.destinations.len(),
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
            self.enabled,
            self.cleaner,
        )
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Config({})", self.summary())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        let config = Config::default();
        assert_eq!(config.concurrency, 16);
        assert_eq!(config.send_timeout, Duration::from_millis(2500));
        assert_eq!(config.validate(), Ok(()));
    }

    #[test]
    fn a_bad_value_is_an_error_that_names_the_setting() {
        for (variable, value) in [
            ("OUTBOX_LEASE", "soon"),
            ("OUTBOX_LEASE", "99999999999999999h"),
            ("OUTBOX_BATCH", "0"),
            ("OUTBOX_BATCH", "-1"),
            ("OUTBOX_CONCURRENCY", "many"),
            ("OUTBOX_ENABLED", "yes"),
            ("OUTBOX_TABLE", "a b"),
            ("OUTBOX_URL", "ftp://example.com"),
            ("OUTBOX_URL", "example.com"),
            ("OUTBOX_BACKOFF", "5"),
            ("OUTBOX_LOG_FORMAT", "xml"),
            ("OUTBOX_SECRET", "whsec_x"),
            ("OUTBOX_LAESE", "5s"),
        ] {
            let error = Config::default().set(variable, value).expect_err(value);
            assert_eq!(error.key(), variable);
        }
    }

    #[test]
    fn a_misspelt_setting_is_told_its_neighbour() {
        let error = Config::default()
            .set("OUTBOX_LAESE", "5s")
            .expect_err("unknown");
        assert!(error.to_string().contains("OUTBOX_LEASE"), "{error}");
    }

    #[test]
    fn a_lease_shorter_than_two_sends_is_a_contradiction() {
        let mut config = Config::default();
        config.set("OUTBOX_LEASE", "4s").expect("a duration");
        let error = config.validate().expect_err("too short").to_string();
        assert!(
            error.contains("OUTBOX_LEASE") && error.contains("OUTBOX_SEND_TIMEOUT"),
            "{error}"
        );
    }

    #[test]
    fn the_readme_lists_every_setting_with_its_default() {
        let readme = include_str!("../README.md");
        for setting in SETTINGS {
            let default = match setting.default {
                "" => String::new(),
                default => format!("`{default}`"),
            };
            let row = format!(
                "| `{}` | {default} | {} |",
                setting.variable, setting.summary
            );
            assert!(readme.contains(&row), "the README has no row {row}");
        }
    }

    #[test]
    fn nobody_sees_a_password() {
        let mut config = Config::default();
        config
            .set("DATABASE_URL", "postgres://app:hunter2@db/shop")
            .expect("a URL");
        config
            .set("OUTBOX_URL", "https://u:hunter2@example.com/?token=hunter2")
            .expect("a URL");
        assert!(!format!("{config:?}").contains("hunter2"));
        config
            .set("DATABASE_URL", "host=db password=hunter2 dbname=shop")
            .expect("pairs");
        assert!(!format!("{config:?}").contains("hunter2"));
        assert!(format!("{config:?}").contains("host=db dbname=shop"));
    }

    #[test]
    fn a_clusters_service_links_are_no_settings() {
        assert!(!is_relevant("OUTBOX_PORT_8080_TCP_ADDR"));
        assert!(!is_relevant("OUTBOX_SERVICE_HOST"));
        assert!(is_relevant("OUTBOX_POLL_INTERVAL"));
    }
}
