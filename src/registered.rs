//! What is known of a registered destination.

use std::fmt;
use std::time::{Duration, SystemTime};

use secrecy::{ExposeSecret, SecretString};
use uuid::Uuid;

use crate::config::{Config, ConfigError, Destination, Mode, Rate, SigningSecret, parse_url};
use crate::header::check_header;

/// Sends to one registered destination at the same time, at most.
const MOST_CONCURRENCY: usize = 64;
/// The same, where the row does not say.
const CONCURRENCY: usize = 4;
const LONGEST_TIMEOUT: Duration = Duration::from_secs(3600);
const MOST_TOPICS: usize = 100;

/// A registered destination: a row of `outbox_destination`.
///
/// What is `None` is as the relay's settings say.
///
/// ```
/// use diesel_outbox::config::{Mode, Rate};
/// use diesel_outbox::destinations::RegisteredDestination;
/// use std::time::Duration;
///
/// # let tenant = uuid::Uuid::nil();
/// let hook = RegisteredDestination::new("acme", "https://acme.example/hooks")
///     .topics(["order.*", "member.joined"])
///     .tenant(tenant)
///     .filter("$.total ? (@ > 100)")
///     .header("x-team", "billing")
///     .mode(Mode::Structured)
///     .concurrency(2)
///     .rate(Rate::per_second(10.0))
///     .timeout(Duration::from_secs(5))
///     .description("their shop");
/// assert!(hook.check().is_ok());
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct RegisteredDestination {
    /// Its name, which no other one has.
    pub name: String,
    /// Where messages are posted.
    pub url: String,
    /// Patterns of topics, as in routes: 1 to 100.
    pub topics: Vec<String>,
    /// Only messages of this tenant; `None`: of any.
    pub tenant_id: Option<Uuid>,
    /// Only messages whose payload meets this `jsonpath`, such as `$.total ? (@ > 100)`.
    pub filter: Option<String>,
    /// `false`: nothing is sent there, and its messages wait.
    pub enabled: bool,
    /// Headers of every request. Their values are not shown.
    pub headers: Vec<(String, SecretString)>,
    /// How requests look.
    pub mode: Option<Mode>,
    /// Sends at the same time: 1 to 64.
    pub concurrency: Option<usize>,
    /// How many requests it gets, from all relays together.
    pub rate: Option<Rate>,
    /// The limit for one send: an hour at most, and no longer than `OUTBOX_SEND_TIMEOUT` of the relay (or the longest
    /// timeout of its configured destinations).
    pub timeout: Option<Duration>,
    /// For people.
    pub description: Option<String>,
    /// Why it is disabled.
    pub disabled_reason: Option<String>,
    /// Why no relay uses it, though it is enabled: a value that cannot be used.
    pub problem: Option<String>,
    /// When it was registered; `None`: it is not yet.
    pub created_at: Option<SystemTime>,
    /// When it was last changed.
    pub updated_at: Option<SystemTime>,
}

impl RegisteredDestination {
    /// A destination for every topic of any tenant.
    pub fn new(name: impl Into<String>, url: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            url: url.into(),
            topics: vec!["*".to_owned()],
            tenant_id: None,
            filter: None,
            enabled: true,
            headers: Vec::new(),
            mode: None,
            concurrency: None,
            rate: None,
            timeout: None,
            description: None,
            disabled_reason: None,
            problem: None,
            created_at: None,
            updated_at: None,
        }
    }

    /// Only messages whose topic matches one of these patterns, as in routes.
    #[must_use]
    pub fn topics<T: Into<String>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        self.topics = topics.into_iter().map(Into::into).collect();
        self
    }

    /// Only messages of this tenant.
    #[must_use]
    pub fn tenant(mut self, tenant_id: Uuid) -> Self {
        self.tenant_id = Some(tenant_id);
        self
    }

    /// Only messages whose payload meets this `jsonpath`: `$.total ? (@ > 100)`, `$.items[*] ? (@.kind == "book")`.
    #[must_use]
    pub fn filter(mut self, filter: impl Into<String>) -> Self {
        self.filter = Some(filter.into());
        self
    }

    /// Adds a header to every request.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into().into()));
        self
    }

    /// How requests look.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// Sends at the same time: 1 to 64. Defaults to 4.
    #[must_use]
    pub fn concurrency(mut self, sends: usize) -> Self {
        self.concurrency = Some(sends);
        self
    }

    /// How many requests it gets, from all relays together. Defaults to no limit.
    #[must_use]
    pub fn rate(mut self, rate: Rate) -> Self {
        self.rate = Some(rate);
        self
    }

    /// The limit for one send: an hour at most.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// A line for people.
    #[must_use]
    pub fn description(mut self, description: impl Into<String>) -> Self {
        self.description = Some(description.into());
        self
    }

    /// It as a destination of a relay with the settings of [`Config::for_registered`].
    ///
    /// # Errors
    /// A [`ConfigError`] when such a relay does not send to it.
    pub(crate) fn destination(
        &self,
        config: &Config,
        secrets: Vec<SigningSecret>,
    ) -> Result<Destination, ConfigError> {
        self.check()?;
        let mut destination = Destination::new(&self.name, &self.url)?;
        if config.https_only && destination.url.scheme() != "https" {
            return Err(ConfigError::new(
                format!("destinations.{}.url", self.name),
                "it has to be https: OUTBOX_REGISTERED_HTTPS_ONLY is set",
            ));
        }
        let port = destination.url.port_or_known_default();
        let is_allowed = |port: u16| config.registered_ports.contains(&port);
        if !config.registered_ports.is_empty() && !port.is_some_and(is_allowed) {
            return Err(ConfigError::new(
                format!("destinations.{}.url", self.name),
                "its port is not among OUTBOX_REGISTERED_PORTS",
            ));
        }
        destination.mode = self.mode;
        destination.secrets = secrets;
        destination.headers = self.headers.clone();
        destination.concurrency = Some(self.concurrency.unwrap_or(CONCURRENCY));
        destination.rate = self.rate;
        // Leases are made for sends of this length.
        let longest = config.longest_send();
        destination.timeout = self.timeout.map(|timeout| timeout.min(longest));
        Ok(destination)
    }

    /// Whether a relay can use it. Rows that were written by plain SQL have to pass the same.
    ///
    /// ```
    /// use diesel_outbox::destinations::RegisteredDestination;
    ///
    /// assert!(RegisteredDestination::new("acme", "https://acme.example/hooks").check().is_ok());
    /// let error = RegisteredDestination::new("acme", "acme.example").check().unwrap_err();
    /// assert_eq!(error.key(), "destinations.acme.url");
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] that names the first value which cannot be used.
    pub fn check(&self) -> Result<(), ConfigError> {
        let name = &self.name;
        let at = |key: &str, reason: String| {
            ConfigError::new(format!("destinations.{name}.{key}"), reason)
        };
        let is_bad = |c: char| c.is_whitespace() || c.is_control();
        if name.is_empty() || name.len() > 255 || name.contains(is_bad) {
            let reason =
                "a name has 1 to 255 bytes, and neither white space nor control characters";
            return Err(at("name", reason.to_owned()));
        }
        parse_url(&self.url).map_err(|reason| at("url", reason))?;
        if self.topics.is_empty() || self.topics.len() > MOST_TOPICS {
            return Err(at(
                "topics",
                format!("1 to {MOST_TOPICS} patterns are needed"),
            ));
        }
        if self
            .topics
            .iter()
            .any(|topic| topic.is_empty() || topic.contains(is_bad))
        {
            return Err(at(
                "topics",
                "a pattern is empty, or has white space".to_owned(),
            ));
        }
        for (header, value) in &self.headers {
            check_header(header, value.expose_secret())
                .map_err(|reason| at(&format!("headers.{header}"), reason.to_owned()))?;
        }
        if self
            .concurrency
            .is_some_and(|sends| !(1..=MOST_CONCURRENCY).contains(&sends))
        {
            return Err(at(
                "concurrency",
                format!("it has to be 1 to {MOST_CONCURRENCY}"),
            ));
        }
        let millisecond = Duration::from_millis(1);
        if self
            .timeout
            .is_some_and(|timeout| !(millisecond..=LONGEST_TIMEOUT).contains(&timeout))
        {
            return Err(at("timeout", "it has to be 1ms to 1h".to_owned()));
        }
        Ok(())
    }
}

impl fmt::Debug for RegisteredDestination {
    /// Without values of headers, and without what a URL may hide.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("RegisteredDestination")
            .field("name", &self.name)
            .field("topics", &self.topics)
            .field("tenant_id", &self.tenant_id)
            .field("enabled", &self.enabled)
            .field("headers", &headers)
            .finish_non_exhaustive()
    }
}
