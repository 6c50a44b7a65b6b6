//! Destinations: where messages are sent, and their settings.

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

/// A destination: where messages are sent, and how.
///
/// A field that is `None` has the value of the setting with the same name.
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
/// // Each setting is also a field.
/// assert_eq!(billing.concurrency, Some(8));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
///
/// The other settings:
///
/// ```
/// use diesel_outbox::config::{Breaker, Classes, OnDead, Proxy, Rate, RequestBatch, Tls};
/// use diesel_outbox::{Backoff, Destination};
/// use std::time::Duration;
///
/// let partner = Destination::new("partner", "https://partner.example/events")?
///     // The request.
///     .header("x-team", "billing")
///     .request_batch(RequestBatch::default())
///     .max_payload_bytes(65_536)
///     .tls(Tls::default())
///     .proxy(Proxy::Direct)
///     // Allowed addresses.
///     .https_only(true)
///     .internal(false)
///     .allow("10.1.0.0/16".parse()?)
///     // Limits, and what responses mean.
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
    /// The name, which routes and `outbox.destination` use.
    pub name: String,
    /// The URL that messages are posted to.
    pub url: Url,
    /// The CloudEvents mode of requests.
    pub mode: Option<Mode>,
    /// How many messages a request in batched mode holds, and how long it waits for them.
    pub request_batch: RequestBatch,
    /// The secrets that sign requests, newest first. Empty: `OUTBOX_SECRET`.
    pub secrets: Vec<SigningSecret>,
    /// Headers of every request. Messages cannot replace them. Logs and pages never show the values.
    pub headers: Vec<(String, SecretString)>,
    /// The time limit of one send.
    pub timeout: Option<Duration>,
    /// The number of sender threads.
    pub concurrency: Option<usize>,
    /// The rate limit in requests per second. `None`: no limit.
    pub rate: Option<Rate>,
    /// Failed attempts after which a message is dead-lettered.
    pub max_attempts: Option<u32>,
    /// The delay between attempts.
    pub backoff: Option<Backoff>,
    /// Whether later messages with the ordering key of a dead letter are sent or wait.
    pub on_dead: Option<OnDead>,
    /// The longest wait that `Retry-After` may ask for.
    pub retry_after_cap: Duration,
    /// The circuit breaker. `None`: no breaker.
    pub breaker: Option<Breaker>,
    /// What 4xx responses mean for a message.
    pub classes: Classes,
    /// The largest payload in bytes. A message with a larger payload is dead-lettered. `None`: the limit of the table.
    pub max_payload_bytes: Option<usize>,
    /// `true`: the host may resolve to any address. `false`: only to public addresses.
    pub internal: Option<bool>,
    /// Networks that the host may resolve to in addition to public addresses. If set, all other addresses are refused.
    pub allow: Vec<IpNet>,
    /// Whether to refuse a URL without TLS.
    pub https_only: Option<bool>,
    /// The TLS settings.
    pub tls: Tls,
    /// The HTTP proxy to the destination.
    pub proxy: Option<Proxy>,
}

/// The default of the longest wait that `Retry-After` may ask for.
const RETRY_AFTER_CAP: Duration = Duration::from_secs(3600);

impl Destination {
    /// A destination with this name, and default settings.
    ///
    /// # Errors
    /// A [`ConfigError`] when `url` is not an `http` or `https` URL with a host.
    pub fn new(name: impl Into<String>, url: &str) -> Result<Self, ConfigError> {
        let name = name.into();
        let url = parse_url(url).map_err(ConfigError::at(format!("destinations.{name}.url")))?;
        Ok(Self::at(name, url))
    }

    /// The URL for display: scheme, host, port and the first segment of the path. User, password, the rest of the path
    /// and the query are masked, as each may be a token.
    pub(crate) fn shown_url(&self) -> String {
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

/// Setters, which can be chained. The relay checks the values when it starts.
impl Destination {
    /// Sets the CloudEvents mode of requests. Defaults to `OUTBOX_MODE`.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// Sets how many messages a request in batched mode holds, and how long it waits for them. Defaults to
    /// [`RequestBatch::default`].
    #[must_use]
    pub fn request_batch(mut self, batch: RequestBatch) -> Self {
        self.request_batch = batch;
        self
    }

    /// Adds a secret that signs requests. Add the newest first. Defaults to `OUTBOX_SECRET`.
    #[must_use]
    pub fn secret(mut self, secret: SigningSecret) -> Self {
        self.secrets.push(secret);
        self
    }

    /// Adds a header to every request. Messages cannot replace the header. Logs and pages never show the value.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<SecretString>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the time limit of one send. Defaults to `OUTBOX_SEND_TIMEOUT`.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the number of sender threads, 1 to 1024. Defaults to `OUTBOX_CONCURRENCY`.
    #[must_use]
    pub fn concurrency(mut self, threads: usize) -> Self {
        self.concurrency = Some(threads);
        self
    }

    /// Sets the rate limit in requests per second. Defaults to no limit. Each relay counts its own requests.
    #[must_use]
    pub fn rate(mut self, rate: Rate) -> Self {
        self.rate = Some(rate);
        self
    }

    /// Sets after how many failed attempts a message is dead-lettered, at least 1. Defaults to `OUTBOX_MAX_ATTEMPTS`.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// Sets the delay between attempts. Defaults to `OUTBOX_BACKOFF`.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = Some(backoff);
        self
    }

    /// Sets whether later messages with the ordering key of a dead letter are sent or wait. Defaults to
    /// `OUTBOX_ON_DEAD`.
    #[must_use]
    pub fn on_dead(mut self, on_dead: OnDead) -> Self {
        self.on_dead = Some(on_dead);
        self
    }

    /// Sets the longest wait that `Retry-After` may ask for. Defaults to one hour.
    #[must_use]
    pub fn retry_after_cap(mut self, cap: Duration) -> Self {
        self.retry_after_cap = cap;
        self
    }

    /// Sets the circuit breaker. `None`: no breaker. Defaults to [`Breaker::default`].
    #[must_use]
    pub fn breaker(mut self, breaker: impl Into<Option<Breaker>>) -> Self {
        self.breaker = breaker.into();
        self
    }

    /// Sets what 4xx responses mean for a message. Defaults to [`Classes::default`].
    #[must_use]
    pub fn classes(mut self, classes: Classes) -> Self {
        self.classes = classes;
        self
    }

    /// Sets the largest payload in bytes. A message with a larger payload is dead-lettered. Defaults to the limit of
    /// the table.
    #[must_use]
    pub fn max_payload_bytes(mut self, bytes: usize) -> Self {
        self.max_payload_bytes = Some(bytes);
        self
    }

    /// Sets the allowed addresses. `true`: the host may resolve to any address. `false`: only to public addresses.
    /// Defaults to `OUTBOX_PUBLIC_ONLY`.
    #[must_use]
    pub fn internal(mut self, internal: bool) -> Self {
        self.internal = Some(internal);
        self
    }

    /// Adds a network that the host may resolve to in addition to public addresses. All other addresses are refused.
    #[must_use]
    pub fn allow(mut self, network: IpNet) -> Self {
        self.allow.push(network);
        self
    }

    /// Sets whether to refuse a URL without TLS. Defaults to `OUTBOX_HTTPS_ONLY`.
    #[must_use]
    pub fn https_only(mut self, https_only: bool) -> Self {
        self.https_only = Some(https_only);
        self
    }

    /// Sets the TLS settings. Defaults to [`Tls::default`].
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = tls;
        self
    }

    /// Sets the HTTP proxy to the destination. Defaults to `OUTBOX_PROXY`.
    #[must_use]
    pub fn proxy(mut self, proxy: Proxy) -> Self {
        self.proxy = Some(proxy);
        self
    }
}

/// The key of an invalid value, and the reason.
pub(super) type Wrong = (&'static str, String);

impl Destination {
    /// Checks each value.
    pub(super) fn check(&self) -> Result<(), Wrong> {
        check_limits(self.concurrency, self.timeout, self.max_attempts, self.rate)?;
        count("batch_size", self.request_batch.size, 10_000)?;
        if self.request_batch.linger > LONGEST_LINGER {
            return wrong("batch_linger", "must not be longer than 10s");
        }
        if let Some(breaker) = self.breaker {
            if !(breaker.failure_ratio > 0.0 && breaker.failure_ratio <= 1.0) {
                return wrong("breaker.failure_ratio", "must be above 0 and at most 1");
            }
            count("breaker.min_sends", breaker.min_sends, MOST)?;
            long_enough("breaker.window", breaker.window)?;
            long_enough("breaker.open", breaker.open)?;
            if breaker.open > breaker.open_cap {
                let cap = humantime::format_duration(breaker.open_cap);
                let reason = format!("must not be longer than open_cap, which is {cap}");
                return Err(("breaker.open", reason));
            }
        }
        if self.internal == Some(true) && !self.allow.is_empty() {
            let reason = "internal = true already allows every address: remove internal or allow";
            return wrong("allow", reason);
        }
        if self.tls.client_cert_file.is_some() != self.tls.client_key_file.is_some() {
            return wrong(
                "tls",
                "client_cert_file and client_key_file go together: set both or neither",
            );
        }
        Ok(())
    }
}

/// The longest wait of a request in batched mode.
const LONGEST_LINGER: Duration = Duration::from_secs(10);
/// The most sender threads of a destination.
pub(super) const MOST_SENDERS: u32 = 1024;
/// The maximum of counts without a limit of their own.
pub(super) const MOST: u32 = 1_000_000;

/// Checks the limits that destinations and groups of handlers have in common.
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
    let within = within(value, Some(value), (1, most));
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
    /// Without passwords, secrets and header values.
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

/// Whether later messages with the ordering key of a dead letter are sent or wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnDead {
    /// The relay sends the next message.
    #[default]
    Continue,
    /// Later messages wait until an operator requeues or discards the dead letter.
    Block,
}

by_word!(
    OnDead,
    "continue or block",
    Continue = "continue",
    Block = "block"
);

/// How a message becomes a request: the content modes of CloudEvents over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// The payload is the body. Everything else is in headers.
    #[default]
    Binary,
    /// The body is one JSON document with everything. Choose this mode for signed requests: headers are not signed.
    Structured,
    /// The body is a JSON array of documents: one request for many messages.
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

    /// The pattern below lists every field, so a new field does not compile without an assertion.
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
