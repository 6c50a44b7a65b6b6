//! Destinations: where messages are sent, and their settings.

mod classes;
mod policy;
mod tls;
mod verification;

use std::fmt;
use std::time::Duration;

use ipnet::IpNet;
use secrecy::SecretString;
use url::Url;

pub use self::classes::{Class, Classes};
pub use self::policy::{DeliveryPolicy, PolicyOption};
pub use self::tls::{Proxy, Roots, Tls, TlsVersion};
pub use self::verification::Verification;
pub use crate::delivery::{Breaker, Mode, OnDead, Rate, RequestBatch};

use super::auth::Auth;
use super::secret::SigningSecret;
use super::text::{TICK, at_least, shown_url, url as parse_url, within};
use crate::config_error::ConfigError;

/// A destination: where messages are sent, and how.
///
/// A field that is `None` has the value of the setting with the same name. The relay checks the values when it starts.
///
/// ```
/// use diesel_outbox::{Destination, config::Mode};
/// use std::time::Duration;
///
/// let billing = Destination::new("billing", "https://billing.example/events")?
///     .secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwDWMPr4sFQxs=".parse()?)
///     .header("x-team", "billing")
///     .configure(|billing| {
///         billing.https_only = Some(true);
///         billing.policy.mode = Some(Mode::Structured);
///         billing.policy.timeout = Some(Duration::from_secs(5));
///         billing.policy.concurrency = Some(8);
///     });
/// # Ok::<(), diesel_outbox::ConfigError>(())
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
    /// Authentication that the receiver asks for, beside the signatures: an OAuth 2.0 token, or a signature in a header
    /// of its own.
    pub auth: Option<Auth>,
    /// The largest payload in bytes. A message with a larger payload is dead-lettered. `None`: the limit of the table.
    pub max_payload_bytes: Option<usize>,
    /// `true`: the host may resolve to any address. `false`: only to public addresses. `None`: `OUTBOX_PUBLIC_ONLY`.
    pub internal: Option<bool>,
    /// Networks that the host may resolve to in addition to public addresses. If set, all other addresses are refused.
    pub allow: Vec<IpNet>,
    /// Whether to refuse a URL without TLS. `None`: `OUTBOX_HTTPS_ONLY`.
    pub https_only: Option<bool>,
    /// The TLS settings.
    pub tls: Tls,
    /// The HTTP proxy to the destination. `None`: `OUTBOX_PROXY`.
    pub proxy: Option<Proxy>,
    /// How an endpoint shows that it wants messages.
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

/// A destination that is read instead of sent to: a [feed](crate::feed).
///
/// ```
/// use diesel_outbox::config::FeedDestination;
/// use std::time::Duration;
///
/// let audit = FeedDestination::new("audit");
/// assert_eq!(audit.expires_after, None);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FeedDestination {
    /// The name, which routes use, and readers.
    pub name: String,
    /// How long after it became due a message that is not in the feed yet expires. `None`: never.
    pub expires_after: Option<Duration>,
}

impl FeedDestination {
    /// A feed with this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            expires_after: None,
        }
    }

    /// Its policy as that of a destination.
    pub(crate) fn policy(&self) -> DeliveryPolicy {
        DeliveryPolicy {
            expires_after: self.expires_after,
            ..DeliveryPolicy::default()
        }
    }
}

/// What can be chained.
impl Destination {
    /// Changes the fields of this destination.
    #[must_use]
    pub fn configure(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
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
    use super::*;

    #[test]
    fn debug_shows_no_secret() {
        let mut destination =
            Destination::new("a", "https://u:hunter2@example.com/?token=hunter2").expect("a URL");
        destination.headers = vec![("authorization".to_owned(), "hunter2".into())];
        destination.proxy = Some(Proxy::of("http://u:hunter2@p:1").expect("a URL"));
        let shown = format!("{destination:?} {:?}", destination.proxy);
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("authorization"), "{shown}");
    }
}
