//! A registered destination: a row of `outbox_destination`.

use std::fmt;
use std::time::{Duration, SystemTime};

use secrecy::{ExposeSecret, SecretString};
use uuid::Uuid;

use crate::config::{Config, ConfigError, Destination, Mode, Rate, SigningSecret, parse_url};
use crate::header::check_header;

/// The maximum number of concurrent sends to one registered destination.
const MOST_CONCURRENCY: usize = 64;
/// The default number of concurrent sends.
const CONCURRENCY: usize = 4;
const LONGEST_TIMEOUT: Duration = Duration::from_secs(3600);
const MOST_TOPICS: usize = 100;

/// A registered destination: a row of `outbox_destination`.
///
/// The relay's settings apply to a mode or timeout that is `None`.
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
///     .description("Acme's shop");
/// assert!(hook.check().is_ok());
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct RegisteredDestination {
    /// The name, which is unique in the outbox.
    pub name: String,
    /// The URL to which messages are posted.
    pub url: String,
    /// Topic patterns, as in routes (1 to 100).
    pub topics: Vec<String>,
    /// Only messages of this tenant; `None`: messages of any tenant.
    pub tenant_id: Option<Uuid>,
    /// Only messages whose payload matches this `jsonpath`, such as `$.total ? (@ > 100)`; `None`: all messages.
    pub filter: Option<String>,
    /// `false`: nothing is sent, and messages wait.
    pub enabled: bool,
    /// Headers of every request. The values are secret.
    pub headers: Vec<(String, SecretString)>,
    /// The mode of requests; `None`: the mode of the relay's settings.
    pub mode: Option<Mode>,
    /// The maximum number of concurrent sends (1 to 64); `None`: 4.
    pub concurrency: Option<usize>,
    /// The rate limit for requests of all relays together; `None`: no limit.
    pub rate: Option<Rate>,
    /// The timeout of a send, at most 1 hour; `None`: the timeout of the relay's settings. A relay limits the timeout
    /// to `OUTBOX_SEND_TIMEOUT`, or to the longest timeout of its configured destinations if that is longer.
    pub timeout: Option<Duration>,
    /// A description for people.
    pub description: Option<String>,
    /// Why the destination is disabled.
    pub disabled_reason: Option<String>,
    /// Why no relay uses the destination although it is enabled: a value cannot be used, or the settings of all running
    /// relays refuse the destination.
    pub problem: Option<String>,
    /// When the destination was registered; `None`: not registered yet.
    pub created_at: Option<SystemTime>,
    /// When the destination was last changed.
    pub updated_at: Option<SystemTime>,
    /// The time of the first failed send since the last successful one; `None`: the last send was successful, as far as
    /// the relays have recorded it. [`put`](crate::destinations::Destinations::put) ignores the value.
    pub failing_since: Option<SystemTime>,
    /// Until when older secrets also sign, as after a rotation. `None`: only the newest secret signs, or all of them sign
    /// until you change them. Set by the database.
    pub old_secrets_until: Option<SystemTime>,
    /// Whether the row has a value that could not be read: `problem` says which, and the field here is empty.
    pub(crate) is_unread: bool,
}

impl RegisteredDestination {
    /// Creates a destination for all topics and any tenant.
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
            failing_since: None,
            old_secrets_until: None,
            is_unread: false,
        }
    }

    /// Sets the topic patterns, as in routes: the destination gets messages whose topic matches one of them. Defaults
    /// to `*`.
    #[must_use]
    pub fn topics<T: Into<String>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        self.topics = topics.into_iter().map(Into::into).collect();
        self
    }

    /// Limits the destination to messages of this tenant. Defaults to any tenant.
    #[must_use]
    pub fn tenant(mut self, tenant_id: Uuid) -> Self {
        self.tenant_id = Some(tenant_id);
        self
    }

    /// Limits the destination to messages whose payload matches this `jsonpath`: `$.total ? (@ > 100)`,
    /// `$.items[*] ? (@.kind == "book")`. Defaults to all messages.
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

    /// Sets the mode of requests. Defaults to the mode of the relay's settings.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// Sets the maximum number of concurrent sends (1 to 64). Defaults to 4.
    #[must_use]
    pub fn concurrency(mut self, sends: usize) -> Self {
        self.concurrency = Some(sends);
        self
    }

    /// Sets the rate limit for requests of all relays together. Defaults to no limit.
    #[must_use]
    pub fn rate(mut self, rate: Rate) -> Self {
        self.rate = Some(rate);
        self
    }

    /// Sets the timeout of a send, at most 1 hour. Defaults to the timeout of the relay's settings.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets a description for people.
    #[must_use]
    pub fn description(mut self, description: impl Into<String>) -> Self {
        self.description = Some(description.into());
        self
    }

    /// Converts the row into a destination of a relay with the settings of [`Config::for_registered`]. The settings may
    /// still refuse the destination.
    ///
    /// # Errors
    /// A [`ConfigError`] if no relay can use the row.
    pub(crate) fn destination(
        &self,
        config: &Config,
        secrets: Vec<SigningSecret>,
    ) -> Result<Destination, ConfigError> {
        self.check()?;
        let mut destination = Destination::new(&self.name, &self.url)?;
        destination.mode = self.mode;
        destination.secrets = secrets;
        destination.headers = self.headers.clone();
        destination.concurrency = Some(self.concurrency.unwrap_or(CONCURRENCY));
        destination.rate = self.rate;
        // The lease is long enough for sends of this length, but not for longer sends.
        let longest = config.longest_send();
        destination.timeout = self.timeout.map(|timeout| timeout.min(longest));
        Ok(destination)
    }

    /// Checks whether a relay can use the destination. Relays apply the same check to rows from plain SQL.
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
    /// A [`ConfigError`], which names the first value that cannot be used.
    pub fn check(&self) -> Result<(), ConfigError> {
        let name = &self.name;
        let at = |key: &str, reason: String| {
            ConfigError::new(format!("destinations.{name}.{key}"), reason)
        };
        let is_bad = |c: char| c.is_whitespace() || c.is_control();
        if name.is_empty() || name.len() > 255 || name.contains(is_bad) {
            let reason = "a name has 1 to 255 bytes, without white space and control characters";
            return Err(at("name", reason.to_owned()));
        }
        parse_url(&self.url).map_err(|reason| at("url", reason))?;
        if self.topics.is_empty() || self.topics.len() > MOST_TOPICS {
            return Err(at(
                "topics",
                format!("must have 1 to {MOST_TOPICS} patterns"),
            ));
        }
        if self
            .topics
            .iter()
            .any(|topic| topic.is_empty() || topic.contains(is_bad))
        {
            return Err(at(
                "topics",
                "a pattern is empty, or contains white space".to_owned(),
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
                format!("must be 1 to {MOST_CONCURRENCY}"),
            ));
        }
        let millisecond = Duration::from_millis(1);
        if self
            .timeout
            .is_some_and(|timeout| !(millisecond..=LONGEST_TIMEOUT).contains(&timeout))
        {
            return Err(at("timeout", "must be 1ms to 1h".to_owned()));
        }
        Ok(())
    }
}

impl fmt::Debug for RegisteredDestination {
    /// Omits the values of headers, and the URL, which may contain a secret.
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
