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

use super::error::ConfigError;
use super::secret::SigningSecret;
use super::text::{TICK, at_least, by_word, shown_url, url as parse_url, within};
use crate::backoff::Backoff;

/// A place that messages are sent to.
///
/// What is `None` is as the setting of the same name says.
///
/// ```
/// use diesel_outbox::{Destination, config::Mode};
/// use std::time::Duration;
///
/// let billing = Destination::new("billing", "https://billing.example/events")?
///     .mode(Mode::Structured)
///     .secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwDWMPr4sFQxs=".parse()?)
///     .timeout(Duration::from_secs(5))
///     .concurrency(8);
///
/// // Each setting is a field as well.
/// assert_eq!(billing.concurrency, Some(8));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
///
/// What a destination can be told beside:
///
/// ```
/// use diesel_outbox::config::{Breaker, Classes, OnDead, Proxy, Rate, RequestBatch, Tls};
/// use diesel_outbox::{Backoff, Destination};
/// use std::time::Duration;
///
/// let partner = Destination::new("partner", "https://partner.example/events")?
///     // How it is sent.
///     .header("x-team", "billing")
///     .request_batch(RequestBatch::default())
///     .max_payload_bytes(65_536)
///     .tls(Tls::default())
///     .proxy(Proxy::Direct)
///     // Where it may lead.
///     .https_only(true)
///     .internal(false)
///     .allow("10.1.0.0/16".parse()?)
///     // How often, and what an answer means.
///     .rate(Rate::per_second(50.0))
///     .max_attempts(10)
///     .backoff(Backoff::exponential(Duration::from_secs(1), Duration::from_secs(600)))
///     .retry_after_cap(Duration::from_secs(3600))
///     .breaker(Breaker::default())
///     .classes(Classes::default())
///     .on_dead(OnDead::Block);
/// assert_eq!(partner.max_attempts, Some(10));
/// # Ok::<(), Box<dyn std::error::Error>>(())
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
        let url = parse_url(url).map_err(ConfigError::at(format!("destinations.{name}.url")))?;
        Ok(Self::at(name, url))
    }

    /// The URL for people's eyes: scheme, host, port and the first segment of the path. User, password, the
    /// rest of the path and the query are masked, as each may be a token.
    ///
    /// ```
    /// use diesel_outbox::Destination;
    ///
    /// let slack = Destination::new("slack", "https://hooks.slack.com/services/T024/B9A1/XXXX")?;
    /// assert_eq!(slack.shown_url(), "https://hooks.slack.com/services/***");
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

/// Settings, one after the other. What cannot be used is told when the relay starts.
impl Destination {
    /// How requests look. Defaults to `OUTBOX_MODE`.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// How many messages one request of batched mode takes, and how long it waits for them.
    #[must_use]
    pub fn request_batch(mut self, batch: RequestBatch) -> Self {
        self.request_batch = batch;
        self
    }

    /// Adds a secret that requests are signed with: the newest first. Defaults to `OUTBOX_SECRET`.
    #[must_use]
    pub fn secret(mut self, secret: SigningSecret) -> Self {
        self.secrets.push(secret);
        self
    }

    /// Adds a header to every request. Messages cannot replace it, and its value is not shown.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<SecretString>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// The limit for one send. Defaults to `OUTBOX_SEND_TIMEOUT`.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Threads that send to it, 1 to 1024. Defaults to `OUTBOX_CONCURRENCY`.
    #[must_use]
    pub fn concurrency(mut self, threads: usize) -> Self {
        self.concurrency = Some(threads);
        self
    }

    /// How many requests it gets in a second. Defaults to no limit. Each relay counts for itself.
    #[must_use]
    pub fn rate(mut self, rate: Rate) -> Self {
        self.rate = Some(rate);
        self
    }

    /// Failed attempts after which a message is dead: 1 or more. Defaults to `OUTBOX_MAX_ATTEMPTS`.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// The delay between attempts. Defaults to `OUTBOX_BACKOFF`.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = Some(backoff);
        self
    }

    /// What the death of a message means for those behind it that have its ordering key. Defaults to
    /// `OUTBOX_ON_DEAD`.
    #[must_use]
    pub fn on_dead(mut self, on_dead: OnDead) -> Self {
        self.on_dead = Some(on_dead);
        self
    }

    /// The longest wait that its `Retry-After` can ask for. Defaults to an hour.
    #[must_use]
    pub fn retry_after_cap(mut self, cap: Duration) -> Self {
        self.retry_after_cap = cap;
        self
    }

    /// When it is left alone because it fails; `None`: never. Defaults to [`Breaker::default`].
    #[must_use]
    pub fn breaker(mut self, breaker: impl Into<Option<Breaker>>) -> Self {
        self.breaker = breaker.into();
        self
    }

    /// What its 4xx answers mean for a message.
    #[must_use]
    pub fn classes(mut self, classes: Classes) -> Self {
        self.classes = classes;
        self
    }

    /// Bytes that a payload for it may have; a larger one is dead. Defaults to what the table takes.
    #[must_use]
    pub fn max_payload_bytes(mut self, bytes: usize) -> Self {
        self.max_payload_bytes = Some(bytes);
        self
    }

    /// `true`: its name may resolve to any address. `false`: to public ones only. Defaults to
    /// `OUTBOX_PUBLIC_ONLY`.
    #[must_use]
    pub fn internal(mut self, internal: bool) -> Self {
        self.internal = Some(internal);
        self
    }

    /// Adds a network that its name may resolve to beside the public ones. With this, others are refused.
    #[must_use]
    pub fn allow(mut self, network: IpNet) -> Self {
        self.allow.push(network);
        self
    }

    /// Whether a URL without TLS is refused. Defaults to `OUTBOX_HTTPS_ONLY`.
    #[must_use]
    pub fn https_only(mut self, https_only: bool) -> Self {
        self.https_only = Some(https_only);
        self
    }

    /// How TLS is spoken.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = tls;
        self
    }

    /// Whether an HTTP proxy stands between. Defaults to `OUTBOX_PROXY`.
    #[must_use]
    pub fn proxy(mut self, proxy: Proxy) -> Self {
        self.proxy = Some(proxy);
        self
    }
}

/// The key of a value that cannot be used, and why.
pub(super) type Wrong = (&'static str, String);

impl Destination {
    /// Whether each value can be used.
    pub(super) fn check(&self) -> Result<(), Wrong> {
        check_limits(self.concurrency, self.timeout, self.max_attempts, self.rate)?;
        count("batch_size", self.request_batch.size, 10_000)?;
        if self.request_batch.linger > LONGEST_LINGER {
            return wrong("batch_linger", "it is longer than 10s");
        }
        if let Some(breaker) = self.breaker {
            if !(breaker.failure_ratio > 0.0 && breaker.failure_ratio <= 1.0) {
                return wrong("breaker.failure_ratio", "it has to be above 0 and up to 1");
            }
            count("breaker.min_sends", breaker.min_sends, MOST)?;
            long_enough("breaker.window", breaker.window)?;
            long_enough("breaker.open", breaker.open)?;
            if breaker.open > breaker.open_cap {
                let cap = humantime::format_duration(breaker.open_cap);
                let reason = format!("it is longer than open_cap, which is {cap}");
                return Err(("breaker.open", reason));
            }
        }
        if self.internal == Some(true) && !self.allow.is_empty() {
            let reason = "internal = true allows every address: leave one of them out";
            return wrong("allow", reason);
        }
        if self.tls.client_cert_file.is_some() != self.tls.client_key_file.is_some() {
            return wrong("tls", "client_cert_file and client_key_file go together");
        }
        Ok(())
    }
}

/// A request in batched mode waits for no longer than this.
const LONGEST_LINGER: Duration = Duration::from_secs(10);
/// Threads that send to a destination.
pub(super) const MOST_SENDERS: u32 = 1024;
/// Of what is counted and has no other limit.
pub(super) const MOST: u32 = 1_000_000;

/// Whether the limits that destinations and groups of handlers have can be used.
pub(super) fn check_limits(
    concurrency: Option<usize>,
    timeout: Option<Duration>,
    max_attempts: Option<u32>,
    rate: Option<Rate>,
) -> Result<(), Wrong> {
    count("concurrency", concurrency.unwrap_or(1), MOST_SENDERS)?;
    long_enough("timeout", timeout.unwrap_or(Duration::MAX))?;
    count("max_attempts", max_attempts.unwrap_or(1), MOST)?;
    let Some(rate) = rate else {
        return Ok(());
    };
    if Rate::checked(rate.per_second).is_none() {
        return wrong("rate", Rate::BOUNDS);
    }
    count("burst", rate.burst, MOST)
}

fn count(
    key: &'static str,
    value: impl Copy + fmt::Debug + TryInto<u32>,
    most: u32,
) -> Result<(), Wrong> {
    let within = within(value, Some(value), most);
    within.map(drop).map_err(|reason| (key, reason))
}

fn long_enough(key: &'static str, value: Duration) -> Result<(), Wrong> {
    let long_enough = at_least(value, TICK);
    long_enough.map(drop).map_err(|reason| (key, reason))
}

fn wrong(key: &'static str, reason: &str) -> Result<(), Wrong> {
    Err((key, reason.to_owned()))
}

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

by_word!(
    OnDead,
    "continue or block",
    Continue = "continue",
    Block = "block"
);

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

by_word!(
    Mode,
    "binary, structured or batched",
    Binary = "binary",
    Structured = "structured",
    Batched = "batched",
);

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;

    /// A new field does not compile without a place here.
    #[test]
    fn each_setter_sets_its_field_and_no_other() {
        let seconds = Duration::from_secs;
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let secret = || secret.parse::<SigningSecret>().expect("a secret");
        let batch = RequestBatch {
            size: 7,
            ..RequestBatch::default()
        };
        let mut of_404 = Classes::default();
        of_404.set(404, Class::Dead).expect("a status");
        let system = Tls {
            roots: Some(Roots::System),
            ..Tls::default()
        };
        let of_nine = Breaker {
            min_sends: 9,
            ..Breaker::default()
        };
        let network: IpNet = "10.0.0.0/8".parse().expect("a network");
        let destination = Destination::new("billing", "https://billing.test/")
            .expect("a URL")
            .mode(Mode::Batched)
            .request_batch(batch)
            .secret(secret())
            .secret(secret())
            .header("authorization", "hunter2")
            .timeout(seconds(1))
            .concurrency(2)
            .rate(Rate::per_second(3.0))
            .max_attempts(4)
            .backoff(Backoff::Table(vec![seconds(5)]))
            .on_dead(OnDead::Block)
            .retry_after_cap(seconds(6))
            .breaker(of_nine)
            .classes(of_404.clone())
            .max_payload_bytes(7)
            .internal(false)
            .allow(network)
            .https_only(true)
            .tls(system.clone())
            .proxy(Proxy::Direct);
        assert!(destination.clone().breaker(None).breaker.is_none());
        let Destination {
            name,
            url,
            mode,
            request_batch,
            secrets,
            headers,
            timeout,
            concurrency,
            rate,
            max_attempts,
            backoff,
            on_dead,
            retry_after_cap,
            breaker,
            classes,
            max_payload_bytes,
            internal,
            allow,
            https_only,
            tls,
            proxy,
        } = destination;
        assert_eq!(
            (name.as_str(), url.host_str()),
            ("billing", Some("billing.test"))
        );
        assert_eq!((mode, request_batch), (Some(Mode::Batched), batch));
        assert_eq!(secrets.len(), 2);
        assert_eq!(
            (headers[0].0.as_str(), headers[0].1.expose_secret()),
            ("authorization", "hunter2")
        );
        assert_eq!((timeout, concurrency), (Some(seconds(1)), Some(2)));
        assert_eq!((rate, max_attempts), (Some(Rate::per_second(3.0)), Some(4)));
        assert_eq!(backoff, Some(Backoff::Table(vec![seconds(5)])));
        assert_eq!(
            (on_dead, retry_after_cap),
            (Some(OnDead::Block), seconds(6))
        );
        assert_eq!((breaker, classes), (Some(of_nine), of_404));
        assert_eq!((max_payload_bytes, internal), (Some(7), Some(false)));
        assert_eq!((allow, https_only), (vec![network], Some(true)));
        assert_eq!((tls, proxy), (system, Some(Proxy::Direct)));
    }

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
