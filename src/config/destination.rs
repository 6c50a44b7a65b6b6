//! Destinations: where messages are sent, and their settings.

mod classes;
mod limits;
mod policy;
mod tls;
mod verification;

use std::fmt;
use std::time::Duration;

use ipnet::IpNet;
use secrecy::SecretString;
use url::Url;

pub use self::classes::{Class, Classes};
pub use self::limits::{Breaker, Rate, RequestBatch};
pub(crate) use self::policy::setters;
pub use self::policy::{DeliveryPolicy, Mode, OnDead, PolicyOption};
pub use self::tls::{Proxy, Roots, Tls, TlsVersion};
pub use self::verification::Verification;

use super::auth::Auth;
use super::error::ConfigError;
use super::secret::SigningSecret;
use super::text::{TICK, at_least, shown_url, url as parse_url, within};

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
/// assert_eq!(billing.policy.concurrency, Some(8));
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
///     .auth(r#"{"type":"header","name":"x-signature","secret":"hunter2"}"#.parse()?)
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
///     .on_dead(OnDead::Block)
///     .expires_after(Duration::from_secs(86_400))
///     .key_run(50);
/// assert_eq!(partner.policy.max_attempts, Some(10));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Destination {
    /// The name, which routes and `outbox.destination` use.
    pub name: String,
    /// The URL that messages are posted to.
    pub url: Url,
    /// Limits, retries, and what responses mean.
    pub policy: DeliveryPolicy,
    /// How many messages a request in batched mode holds, and how long it waits for them.
    pub request_batch: RequestBatch,
    /// The secrets that sign requests, newest first. Empty: `OUTBOX_SECRET`.
    pub secrets: Vec<SigningSecret>,
    /// Headers of every request. Messages cannot replace them. Logs and pages never show the values.
    pub headers: Vec<(String, SecretString)>,
    /// Authentication that the receiver asks for, beside the signatures.
    pub auth: Option<Auth>,
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
    /// How the endpoint of a registered destination shows that it wants messages.
    pub(crate) verification: Verification,
}

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
            policy: DeliveryPolicy::default(),
            request_batch: RequestBatch::default(),
            secrets: Vec::new(),
            headers: Vec::new(),
            auth: None,
            max_payload_bytes: None,
            internal: None,
            allow: Vec::new(),
            https_only: None,
            tls: Tls::default(),
            proxy: None,
            verification: Verification::None,
        }
    }
}

setters!(configured Destination);

/// Setters of the destination, which can be chained. The relay checks the values when it starts.
impl Destination {
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

    /// Sets authentication that the receiver asks for, beside the signatures: an OAuth 2.0 token, or a signature in a
    /// header of its own. Defaults to none.
    #[must_use]
    pub fn auth(mut self, auth: Auth) -> Self {
        self.auth = Some(auth);
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
        self.policy.check()?;
        count_within("batch_size", self.request_batch.size, 10_000)?;
        if self.request_batch.linger > LONGEST_LINGER {
            return wrong("batch_linger", "must not be longer than 10s");
        }
        if self.internal == Some(true) && !self.allow.is_empty() {
            let reason = "internal = true already allows every address: remove internal or allow";
            return wrong("allow", reason);
        }
        if let Some(auth) = &self.auth {
            auth.check(&self.headers, &self.url)
                .map_err(|reason| ("auth", reason))?;
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
/// The most messages of an ordering key that are claimed together.
pub(super) const LONGEST_RUN: u32 = 500;
/// The maximum of counts without a limit of their own.
pub(super) const MOST: u32 = 1_000_000;

fn count_within(
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
            .field("secrets", &self.secrets.len())
            .field("headers", &headers)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;
    use crate::backoff::Backoff;

    /// The pattern below lists every field, so a new field does not compile without an assertion.
    #[test]
    fn each_setter_sets_its_field_and_no_other() {
        let seconds = Duration::from_secs;
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let secret = || secret.parse::<SigningSecret>().expect("a secret");
        let signature = r#"{"type":"header","name":"x-sig","secret":"hunter2"}"#;
        let signature = || signature.parse::<Auth>().expect("authentication");
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
            .auth(signature())
            .timeout(seconds(1))
            .concurrency(2)
            .rate(Rate::per_second(3.0))
            .max_attempts(4)
            .backoff(Backoff::Table(vec![seconds(5)]))
            .on_dead(OnDead::Block)
            .expires_after(seconds(8))
            .key_run(9)
            .retry_after_cap(seconds(6))
            .breaker(of_nine)
            .classes(of_404.clone())
            .max_payload_bytes(7)
            .internal(false)
            .allow(network)
            .https_only(true)
            .tls(system.clone())
            .proxy(Proxy::Direct);
        assert!(destination.clone().breaker(None).policy.breaker.is_none());
        let Destination {
            name,
            url,
            policy,
            request_batch,
            secrets,
            headers,
            auth,
            max_payload_bytes,
            internal,
            allow,
            https_only,
            tls,
            proxy,
            verification: _,
        } = destination;
        assert_eq!(
            (name.as_str(), url.host_str()),
            ("billing", Some("billing.test"))
        );
        assert_eq!(secrets.len(), 2);
        assert_eq!(
            (headers[0].0.as_str(), headers[0].1.expose_secret()),
            ("authorization", "hunter2")
        );
        let auth = auth.map(|auth| auth.to_string());
        assert_eq!(auth, Some(signature().to_string()));
        let expected = DeliveryPolicy {
            mode: Some(Mode::Batched),
            timeout: Some(seconds(1)),
            concurrency: Some(2),
            rate: Some(Rate::per_second(3.0)),
            max_attempts: Some(4),
            backoff: Some(Backoff::Table(vec![seconds(5)])),
            on_dead: Some(OnDead::Block),
            expires_after: Some(seconds(8)),
            key_run: 9,
            classes: of_404,
            retry_after_cap: seconds(6),
            breaker: Some(of_nine),
        };
        assert_eq!((policy, request_batch), (expected, batch));
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
