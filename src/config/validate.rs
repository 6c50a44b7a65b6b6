//! Checks that settings do not contradict each other.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use secrecy::ExposeSecret;

use super::text::wrong_pattern;
use super::{Auth, Config, DEFAULT_DESTINATION, LedgerPayload, SETTINGS};
use crate::config_error::ConfigError;
use crate::delivery::{LONGEST_LEASE, LONGEST_SEND, SHORTEST_SEEN};
use crate::header::check_header;

/// The most sender threads of all destinations together.
const MOST_THREADS: usize = 4096;
/// The time allowed for a settle in the check of the lease.
const SETTLE_TIME: Duration = Duration::from_millis(100);

impl Config {
    /// Checks that each setting is in range, and that the settings do not contradict each other.
    ///
    /// ```
    /// use diesel_outbox::config::Config;
    ///
    /// let mut config = Config::default();
    /// config.set("OUTBOX_SEND_TIMEOUT", "10m")?;
    /// // A send may take up to 5 minutes.
    /// assert!(config.validate().is_err());
    /// config.set("OUTBOX_SEND_TIMEOUT", "5m")?;
    /// config.validate()?;
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] names the invalid or contradicting settings.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for setting in SETTINGS {
            let check = setting.check(self);
            check.map_err(|reason| ConfigError::new(setting.variable, reason))?;
        }
        if self.lease > LONGEST_LEASE {
            return Err(ConfigError::new(
                "OUTBOX_LEASE",
                "must not be longer than one day: no other relay could take over from a crashed relay during that time",
            ));
        }
        if self.cleaner && self.retention.is_zero() {
            return Err(ConfigError::new(
                "OUTBOX_RETENTION",
                "0 would remove delivered messages at once: to keep them forever, set OUTBOX_CLEANER=false",
            ));
        }
        if self.cleaner && self.feed_retention.is_zero() {
            return Err(ConfigError::new(
                "OUTBOX_FEED_RETENTION",
                "0 would remove events before anybody reads them",
            ));
        }
        if let Some(wrong) = self.topics.iter().find_map(|one| wrong_pattern(one)) {
            return Err(ConfigError::new("OUTBOX_TOPICS", wrong));
        }
        if self.inbox_retention.is_some_and(|age| age.is_zero()) {
            return Err(ConfigError::new(
                "OUTBOX_INBOX_RETENTION",
                "0 would forget handled messages at once: to keep them forever, unset OUTBOX_INBOX_RETENTION",
            ));
        }
        if let LedgerPayload::For(age) = self.ledger_payload
            && (age.is_zero() || (self.cleaner && age >= self.retention))
        {
            return Err(ConfigError::new(
                "OUTBOX_LEDGER_PAYLOAD",
                "must be shorter than OUTBOX_RETENTION, and not 0: to keep payloads as long as the ledger, write true",
            ));
        }
        self.admin.validate()?;
        let longest_send = self.longest_send();
        if self.endpoint_timeout > LONGEST_SEND {
            return Err(ConfigError::new(
                "OUTBOX_ENDPOINT_TIMEOUT",
                "must not be longer than 5 minutes",
            ));
        }
        if longest_send > LONGEST_SEND {
            return Err(ConfigError::new(
                "OUTBOX_SEND_TIMEOUT",
                "must not be longer than 5 minutes, as the timeout of a destination must not be",
            ));
        }
        let must_hold_a_send = self.has_own_dispatcher || self.lease < SHORTEST_SEEN;
        if must_hold_a_send && longest_send.saturating_add(SETTLE_TIME) >= self.lease / 2 {
            return Err(ConfigError::new(
                "OUTBOX_LEASE",
                format!(
                    "{} is too short: below 12s, and with a dispatcher of the application's own, half of the lease must hold a send of {} (OUTBOX_SEND_TIMEOUT, or the timeout of a destination) and {} for the settle",
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
                    "OUTBOX_URL already creates a destination of this name: unset OUTBOX_URL, or choose another name",
                ));
            }
            if all[..index].iter().any(|d| d.name == *name) {
                return Err(ConfigError::new(
                    format!("destinations.{name}"),
                    "another destination has this name: choose another name",
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
                    "must be https, because https_only is set",
                ));
            }
            let token_url = destination.auth.as_ref().and_then(Auth::token_url);
            if destination.https_only.unwrap_or(self.https_only)
                && token_url.is_some_and(|url| url.scheme() != "https")
            {
                let reason = "must be https, because https_only is set";
                return Err(ConfigError::new(key("auth.token_url"), reason));
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
        for (index, feed) in self.feeds.iter().enumerate() {
            let name = &feed.name;
            if all.iter().any(|destination| destination.name == *name)
                || self.in_process.iter().any(|local| local.name == *name)
                || self.feeds[..index].iter().any(|one| one.name == *name)
            {
                return Err(ConfigError::new(
                    format!("destinations.{name}"),
                    "another destination has this name: choose another name",
                ));
            }
        }
        for local in &self.in_process {
            let name = &local.name;
            if all.iter().any(|destination| destination.name == *name) {
                return Err(ConfigError::new(
                    format!("handlers.{name}"),
                    "a destination has this name: choose another name",
                ));
            }
            let check = local.policy.check();
            check.map_err(|(of, reason)| {
                ConfigError::new(format!("handlers.{name}.{of}"), reason)
            })?;
        }
        let urls = all.iter().map(|one| one.policy.concurrency);
        let locals = self.in_process.iter().map(|one| one.policy.concurrency);
        let threads = urls
            .chain(locals)
            .map(|threads| threads.unwrap_or(self.concurrency))
            .fold(0, usize::saturating_add);
        if threads > MOST_THREADS {
            return Err(ConfigError::new(
                "OUTBOX_CONCURRENCY",
                format!(
                    "{} destinations have {threads} threads together, and at most {MOST_THREADS} are allowed: lower OUTBOX_CONCURRENCY, or the concurrency of destinations",
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
                return Err(ConfigError::new(&key, "must name a destination"));
            }
            for (place, name) in route.to.iter().enumerate() {
                if !names.contains(name) {
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    let known = match names.as_slice() {
                        [] => "no destination exists".to_owned(),
                        names => format!("existing destinations are {}", names.join(", ")),
                    };
                    let why = format!("unknown destination {name:?}: {known}");
                    return Err(ConfigError::new(&key, &why));
                }
                if route.to[..place].contains(name) {
                    return Err(ConfigError::new(&key, format!("{name:?} is listed twice")));
                }
            }
            if !topics.insert(route.topic.as_str()) {
                return Err(ConfigError::new(
                    format!("routes[{index}].topic"),
                    format!("{:?} already has a route", route.topic),
                ));
            }
        }
        Ok(())
    }
}
