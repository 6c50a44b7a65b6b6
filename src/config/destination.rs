//! Where messages are sent, and all that can be said about one such place.

mod classes;
mod limits;
mod tls;

use std::fmt;
use std::time::Duration;

use ipnet::IpNet;
use secrecy::SecretString;
use url::Url;

pub use self::classes::{Class, Classes};
pub use self::limits::{Breaker, Rate, RequestBatch};
pub use self::tls::{Proxy, Roots, Tls, TlsVersion};

use super::secret::SigningSecret;
use super::settings::ConfigError;
use super::text::{parse_url, shown_url};
use crate::backoff::Backoff;

/// A place that messages are sent to.
///
/// What is `None` is as the setting of the same name says.
///
/// ```
/// use diesel_outbox::{Destination, config::Mode};
/// use std::time::Duration;
///
/// let mut billing = Destination::new("billing", "https://billing.example/events")?;
/// billing.mode = Some(Mode::Structured);
/// billing.secrets = vec!["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwDWMPr4sFQxs=".parse()?];
/// billing.timeout = Some(Duration::from_secs(5));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Destination {
    /// Its name, as routes and `outbox.destination` use it.
    pub name: String,
    /// Where messages are posted.
    pub url: Url,
    /// How requests look.
    pub mode: Option<Mode>,
    /// How many messages one request of batched mode takes, and how long it waits for them.
    pub request_batch: RequestBatch,
    /// What requests are signed with, the newest first. Empty: `OUTBOX_SECRET`.
    pub secrets: Vec<SigningSecret>,
    /// Headers of every request. Messages cannot replace them. Their values are not shown.
    pub headers: Vec<(String, SecretString)>,
    /// The limit for one send.
    pub timeout: Option<Duration>,
    /// Threads that send to it.
    pub concurrency: Option<usize>,
    /// How many requests it gets in a second; `None`: as many as it takes.
    pub rate: Option<Rate>,
    /// Failed attempts after which a message is dead.
    pub max_attempts: Option<u32>,
    /// The delay between attempts.
    pub backoff: Option<Backoff>,
    /// What the death of a message means for those behind it that have its ordering key.
    pub on_dead: Option<OnDead>,
    /// The longest wait that its `Retry-After` can ask for.
    pub retry_after_cap: Duration,
    /// When it is left alone because it fails; `None`: never.
    pub breaker: Option<Breaker>,
    /// What its 4xx answers mean for a message.
    pub classes: Classes,
    /// Bytes that a payload for it may have; a larger one is dead. `None`: what the table takes.
    pub max_payload_bytes: Option<usize>,
    /// `true`: its name may resolve to any address. `false`: to public ones only.
    pub internal: Option<bool>,
    /// Networks that its name may resolve to beside the public ones. With these, others are refused.
    pub allow: Vec<IpNet>,
    /// Whether a URL without TLS is refused.
    pub https_only: Option<bool>,
    /// How TLS is spoken.
    pub tls: Tls,
    /// Whether an HTTP proxy stands between.
    pub proxy: Option<Proxy>,
}

/// The longest wait that `Retry-After` can ask for, where a destination says nothing else.
const RETRY_AFTER_CAP: Duration = Duration::from_secs(3600);

impl Destination {
    /// A destination of this name, with default settings.
    ///
    /// # Errors
    /// A [`ConfigError`] when `url` is not one of `http` or `https` with a host.
    pub fn new(name: impl Into<String>, url: &str) -> Result<Self, ConfigError> {
        let name = name.into();
        let url = parse_url(&format!("destinations.{name}.url"), url)?;
        Ok(Self::at(name, url))
    }

    /// Its URL without password, token and query, for people's eyes.
    ///
    /// ```
    /// use diesel_outbox::Destination;
    ///
    /// let billing = Destination::new("billing", "https://shop:hunter2@billing.example/?token=7")?;
    /// assert_eq!(billing.shown_url(), "https://shop:***@billing.example/?***");
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    pub fn shown_url(&self) -> String {
        shown_url(&self.url)
    }

    pub(super) fn at(name: String, url: Url) -> Self {
        Self {
            name,
            url,
            mode: None,
            request_batch: RequestBatch::default(),
            secrets: Vec::new(),
            headers: Vec::new(),
            timeout: None,
            concurrency: None,
            rate: None,
            max_attempts: None,
            backoff: None,
            on_dead: None,
            retry_after_cap: RETRY_AFTER_CAP,
            breaker: Some(Breaker::default()),
            classes: Classes::default(),
            max_payload_bytes: None,
            internal: None,
            allow: Vec::new(),
            https_only: None,
            tls: Tls::default(),
            proxy: None,
        }
    }
}

impl Destination {
    /// Whether each value can be used. The key of the one that cannot, and why.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        let within = |key, value: usize, most: usize| {
            if (1..=most).contains(&value) {
                return Ok(());
            }
            Err((key, format!("{value} is not a number from 1 to {most}")))
        };
        let wrong = |key, reason: &str| Err((key, reason.to_owned()));
        within("concurrency", self.concurrency.unwrap_or(1), 1024)?;
        within("batch_size", self.request_batch.size, 10_000)?;
        if self.request_batch.linger > LONGEST_LINGER {
            return wrong("batch_linger", "it is longer than 10s");
        }
        if self.timeout.is_some_and(|timeout| timeout.as_millis() == 0) {
            return wrong("timeout", "it has to be 1ms or longer");
        }
        if self.max_attempts == Some(0) {
            return wrong("max_attempts", "it has to be 1 or more");
        }
        if let Some(rate) = self.rate {
            let is_rate = rate.per_second > 0.0 && rate.per_second < 1e6;
            if !is_rate || rate.burst == 0 {
                return wrong(
                    "rate",
                    "it has to be above 0 and below 1000000, with a burst of 1 or more",
                );
            }
        }
        if let Some(breaker) = self.breaker {
            if !(breaker.failure_ratio > 0.0 && breaker.failure_ratio <= 1.0) {
                return wrong("breaker.failure_ratio", "it has to be above 0 and up to 1");
            }
            if breaker.open > breaker.open_cap || breaker.open.is_zero() {
                return wrong("breaker.open", "it has to be above 0 and up to open_cap");
            }
            if breaker.window.is_zero() {
                return wrong("breaker.window", "it has to be longer than 0");
            }
        }
        if self.internal == Some(true) && !self.allow.is_empty() {
            return wrong("allow", "internal = true allows every address already");
        }
        Ok(())
    }
}

/// A request in batched mode waits for no longer than this.
const LONGEST_LINGER: Duration = Duration::from_secs(10);

impl fmt::Debug for Destination {
    /// Without passwords, secrets and values of headers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Destination")
            .field("name", &self.name)
            .field("url", &self.shown_url())
            .field("mode", &self.mode)
            .field("secrets", &self.secrets.len())
            .field("headers", &headers)
            .field("timeout", &self.timeout)
            .field("concurrency", &self.concurrency)
            .field("rate", &self.rate)
            .finish_non_exhaustive()
    }
}

/// What the death of a message means for those behind it that have its ordering key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnDead {
    /// The next one is delivered.
    #[default]
    Continue,
    /// They wait until an operator requeues or discards it.
    Block,
}

impl fmt::Display for OnDead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Continue => "continue",
            Self::Block => "block",
        })
    }
}

impl std::str::FromStr for OnDead {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "continue" => Ok(Self::Continue),
            "block" => Ok(Self::Block),
            _ => Err(format!("{word:?} is not continue or block")),
        }
    }
}

/// How a message becomes a request: the modes of CloudEvents over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// The payload is the body, everything else is in headers.
    #[default]
    Binary,
    /// One JSON document with everything. What to choose when signing: headers are not signed.
    Structured,
    /// A JSON array of such documents: one request for many messages.
    Batched,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Binary => "binary",
            Self::Structured => "structured",
            Self::Batched => "batched",
        })
    }
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "binary" => Ok(Self::Binary),
            "structured" => Ok(Self::Structured),
            "batched" => Ok(Self::Batched),
            _ => Err(format!("{word:?} is not binary, structured or batched")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_no_secret() {
        let mut destination =
            Destination::new("a", "https://u:hunter2@example.com/?token=hunter2").expect("a URL");
        destination.headers = vec![("authorization".to_owned(), "hunter2".into())];
        destination.proxy = Some(Proxy::parse("proxy", "http://u:hunter2@p:1").expect("a URL"));
        let shown = format!("{destination:?} {:?}", destination.proxy);
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("authorization"), "{shown}");
    }
}
