//! Whether settings agree with each other.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use secrecy::ExposeSecret;

use super::destination::check_limits;
use super::error::ConfigError;
use super::{Config, DEFAULT_DESTINATION, SETTINGS};
use crate::header::check_header;

/// Threads that send, of all destinations together.
const MOST_THREADS: usize = 4096;
const LONGEST_LEASE: Duration = Duration::from_secs(24 * 3600);
/// Time that a settle is expected to take at most, for the check of the lease.
const SETTLE_TIME: Duration = Duration::from_millis(100);

impl Config {
    /// Whether the settings agree with each other.
    ///
    /// ```
    /// use diesel_outbox::Config;
    ///
    /// let mut config = Config::default();
    /// config.set("OUTBOX_SEND_TIMEOUT", "1m")?;
    /// // A send has to fit into half of the lease, which is 60 s.
    /// assert!(config.validate().is_err());
    /// config.set("OUTBOX_LEASE", "5m")?;
    /// config.validate()?;
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] that names the settings that contradict each other.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for setting in SETTINGS {
            let check = setting.check(self);
            check.map_err(|reason| ConfigError::new(setting.variable, reason))?;
        }
        if self.lease > LONGEST_LEASE {
            return Err(ConfigError::new(
                "OUTBOX_LEASE",
                "it is longer than a day: for as long nobody would take over from a relay that died",
            ));
        }
        if self.cleaner && self.retention.is_zero() {
            return Err(ConfigError::new(
                "OUTBOX_RETENTION",
                "0 would forget at once what was delivered; to keep it for ever set OUTBOX_CLEANER=false",
            ));
        }
        if self.inbox_retention.is_some_and(|age| age.is_zero()) {
            return Err(ConfigError::new(
                "OUTBOX_INBOX_RETENTION",
                "0 would forget at once what was handled; to keep it for ever unset it",
            ));
        }
        self.admin.validate()?;
        let longest_send = self.longest_send();
        if longest_send.saturating_add(SETTLE_TIME) >= self.lease / 2 {
            return Err(ConfigError::new(
                "OUTBOX_LEASE",
                format!(
                    "{} is too short: a send of {} (OUTBOX_SEND_TIMEOUT, or the timeout of a destination) and {} for its settle have to fit into half of it",
                    humantime::format_duration(self.lease),
                    humantime::format_duration(longest_send),
                    humantime::format_duration(SETTLE_TIME),
                ),
            ));
        }
        self.validate_destinations()?;
        self.validate_routes()
    }

    fn validate_destinations(&self) -> Result<(), ConfigError> {
        let all = self.all_destinations();
        for (index, destination) in all.iter().enumerate() {
            let name = &destination.name;
            let key = |key: &str| format!("destinations.{name}.{key}");
            if name == DEFAULT_DESTINATION && self.url.is_some() && index + 1 < all.len() {
                return Err(ConfigError::new(
                    format!("destinations.{name}"),
                    "OUTBOX_URL is the destination of this name: unset it, or choose another name",
                ));
            }
            if all[..index].iter().any(|d| d.name == *name) {
                return Err(ConfigError::new(
                    format!("destinations.{name}"),
                    "it is there twice",
                ));
            }
            if destination.https_only.unwrap_or(self.https_only)
                && destination.url.scheme() != "https"
            {
                let key = if name == DEFAULT_DESTINATION {
                    "OUTBOX_URL".to_owned()
                } else {
                    key("url")
                };
                return Err(ConfigError::new(
                    &key,
                    "it has to be https: https_only is set",
                ));
            }
            for (header, value) in &destination.headers {
                check_header(header, value.expose_secret()).map_err(|reason| {
                    ConfigError::new(key(&format!("headers.{header}")), reason)
                })?;
            }
            destination
                .check()
                .map_err(|(of, reason)| ConfigError::new(key(of), reason))?;
        }
        for local in &self.in_process {
            let name = &local.name;
            if all.iter().any(|destination| destination.name == *name) {
                return Err(ConfigError::new(
                    format!("handlers.{name}"),
                    "a destination has this name: choose another one",
                ));
            }
            check_limits(
                local.concurrency,
                local.timeout,
                local.max_attempts,
                local.rate,
            )
            .map_err(|(of, reason)| ConfigError::new(format!("handlers.{name}.{of}"), reason))?;
        }
        let urls = all.iter().map(|destination| destination.concurrency);
        let locals = self.in_process.iter().map(|local| local.concurrency);
        let threads = urls
            .chain(locals)
            .map(|threads| threads.unwrap_or(self.concurrency))
            .fold(0, usize::saturating_add);
        if threads > MOST_THREADS {
            return Err(ConfigError::new(
                "OUTBOX_CONCURRENCY",
                format!(
                    "{} destinations have {threads} threads together; {MOST_THREADS} are allowed: lower it, or the destinations' own concurrency",
                    all.len() + self.in_process.len()
                ),
            ));
        }
        Ok(())
    }

    fn validate_routes(&self) -> Result<(), ConfigError> {
        let names: BTreeSet<String> = self.destination_names().collect();
        let mut topics = HashSet::new();
        for (index, route) in self.routes.iter().enumerate() {
            let key = format!("routes[{index}].to");
            if route.to.is_empty() {
                return Err(ConfigError::new(&key, "it names no destination"));
            }
            for (place, name) in route.to.iter().enumerate() {
                if !names.contains(name) {
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    let known = match names.as_slice() {
                        [] => "there are none".to_owned(),
                        names => format!("there are {}", names.join(", ")),
                    };
                    let why = format!("no destination is called {name:?}; {known}");
                    return Err(ConfigError::new(&key, &why));
                }
                if route.to[..place].contains(name) {
                    return Err(ConfigError::new(&key, format!("it names {name:?} twice")));
                }
            }
            if !topics.insert(route.topic.as_str()) {
                return Err(ConfigError::new(
                    format!("routes[{index}].topic"),
                    format!("{:?} has a route already", route.topic),
                ));
            }
        }
        Ok(())
    }
}
