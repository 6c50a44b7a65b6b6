//! An endpoint: a row of `outbox_endpoint`.

use std::collections::BTreeMap;
use std::fmt;
use std::time::SystemTime;

use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use uuid::Uuid;

use super::public_error::of_text;
use crate::config::{
    Auth, ConfigError, DeliveryPolicy, Destination, LONGEST_SEND, Rate, SigningSecret,
    Verification, is_masked, parse_url,
};
use crate::filter::Filter;
use crate::hand::{Hand, PausedBy};
use crate::header::check_header;
use crate::words::words;

/// The maximum number of concurrent sends to one endpoint.
const MOST_CONCURRENCY: usize = 64;
/// The most bytes of a URL.
const MOST_URL_BYTES: usize = 2048;
const MOST_TOPICS: usize = 100;
/// Why a feed has no URL, and gets no test.
const NOTHING_IS_SENT: &str = "a feed is read, and nothing is sent to it";

words! {
    "state":
    /// The state of an endpoint: one word for commands, pages, JSON, and the SQL function
    /// `outbox_endpoint_state(name)`. The first that applies holds.
    ///
    /// ```
    /// use diesel_outbox::endpoints::EndpointState;
    ///
    /// assert_eq!(EndpointState::Paused.as_str(), "paused");
    /// assert_eq!("active".parse(), Ok(EndpointState::Active));
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    #[non_exhaustive]
    pub enum EndpointState {
        /// New messages are not for the endpoint, and those already addressed to it wait.
        Disabled = "disabled",
        /// The endpoint has not shown yet that it wants messages.
        Unverified = "unverified",
        /// New messages are addressed to the endpoint, and wait.
        Paused = "paused",
        /// A feed has events, and no reader with a token was here for `OUTBOX_FEED_UNREAD_AFTER`.
        Unread = "unread",
        /// No send has succeeded for ten minutes since the first failure.
        Failing = "failing",
        /// Messages are sent.
        #[default]
        Active = "active",
    }
}

words! {
    "kind":
    /// How an endpoint gets its messages.
    ///
    /// ```
    /// use diesel_outbox::endpoints::{Endpoint, EndpointKind};
    ///
    /// assert_eq!(Endpoint::feed("acme").kind, EndpointKind::Feed);
    /// assert_eq!("webhook".parse(), Ok(EndpointKind::Webhook));
    /// assert_eq!(EndpointKind::Feed.as_str(), "feed");
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    #[non_exhaustive]
    pub enum EndpointKind {
        /// Messages are posted to its URL.
        #[default]
        Webhook = "webhook",
        /// Messages become events of a [feed](crate::feed), which its consumers read. It has no URL.
        Feed = "feed",
    }
}

/// An endpoint: a row of `outbox_endpoint`.
///
/// The relay's settings have the defaults of the delivery policy.
///
/// ```
/// use diesel_outbox::config::{OnDead, Rate, Verification};
/// use diesel_outbox::endpoints::Endpoint;
/// use serde_json::json;
/// use std::time::Duration;
///
/// # let tenant = uuid::Uuid::nil();
/// let hook = Endpoint::new("acme", "https://acme.example/hooks")
///     .topics(["order.*", "member.joined"])
///     .tenant(tenant)
///     .filter(json!({"total": [{"numeric": [">", 100]}]}))
///     .header("x-team", "billing")
///     .configure(|hook| {
///         hook.description = Some("Acme's shop".to_owned());
///         hook.verification = Verification::Challenge;
///         hook.policy.rate = Some(Rate::per_second(10.0));
///         hook.policy.timeout = Some(Duration::from_secs(5));
///         hook.policy.on_dead = Some(OnDead::Block);
///     });
/// assert!(hook.check().is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Endpoint {
    /// The name, which is unique in the outbox.
    pub name: String,
    /// Whether messages are posted to the endpoint, or read from it. It stays as it was registered.
    pub kind: EndpointKind,
    /// The URL to which messages are posted. Empty: the endpoint is a feed.
    pub url: String,
    /// Topic patterns, as in routes (1 to 100).
    pub topics: Vec<String>,
    /// Only messages of this tenant; `None`: messages of any tenant.
    pub tenant_id: Option<Uuid>,
    /// Only messages that match this [filter](crate::filter); `None`: all messages.
    pub filter: Option<Value>,
    /// `false`: the endpoint is disabled. New messages are not for it, and those already addressed to it wait.
    pub enabled: bool,
    /// Headers of every request. The values are secret.
    pub headers: Vec<(String, SecretString)>,
    /// Authentication that the receiver asks for, beside the signatures: an OAuth 2.0 token, or a signature in a header
    /// of its own. It is encrypted in the database like the
    /// secrets; without the key, it is shown as `encrypted`, and
    /// [`put`](crate::endpoints::Endpoints::put) keeps it.
    pub auth: Option<Auth>,
    /// Limits, retries, and what responses mean. The timeout is at most 5 minutes.
    pub policy: DeliveryPolicy,
    /// A description for people.
    pub description: Option<String>,
    /// Why the endpoint is disabled.
    pub disabled_reason: Option<String>,
    /// Who has disabled the endpoint; `None`: it is enabled.
    pub disabled_by: Option<Hand>,
    /// The state when the row was read. Set by the database.
    pub state: EndpointState,
    /// Whose act the state is: who has disabled or paused the endpoint.
    pub state_by: Option<Hand>,
    /// Until when the state lasts: the end of a pause. `None`: until somebody ends it.
    pub state_until: Option<SystemTime>,
    /// Why the endpoint is in the state, for operators: the text of a person, a reason code, or an error.
    pub state_reason: Option<String>,
    /// Who has set a value, by its name: `filter`, `headers`, `auth`, `verification`, or an option of the policy such as
    /// `rate`. Values of an operator are changed by operators only.
    pub set_by: BTreeMap<String, Hand>,
    /// Why no relay uses the endpoint although it is enabled: a value cannot be used, or the settings of all running
    /// relays refuse the endpoint.
    pub problem: Option<String>,
    /// When the endpoint was registered; `None`: not registered yet.
    pub created_at: Option<SystemTime>,
    /// When the endpoint was last changed.
    pub updated_at: Option<SystemTime>,
    /// The time of the first failed send since the last successful one; `None`: the last send was successful, as far as
    /// the relays have recorded it. Of a feed that is failing: since when nobody has read it.
    /// [`put`](crate::endpoints::Endpoints::put) ignores the value.
    pub failing_since: Option<SystemTime>,
    /// Whether the endpoint is failing: no send has succeeded for ten minutes since the first failure; or it is a feed that
    /// has events, and that nobody reads. Set by the relays.
    pub failing: bool,
    /// The reason code of that failure.
    pub failing_reason: Option<String>,
    /// Until when older secrets also sign, as after a rotation. `None`: only the newest secret signs, or all of them sign
    /// until you change them. Set by the database.
    pub old_secrets_until: Option<SystemTime>,
    /// How the endpoint shows that it wants messages, before the first is sent.
    pub verification: Verification,
    /// When the endpoint was verified; `None`: not since the URL or the verification was changed. Set by the relays.
    pub verified_at: Option<SystemTime>,
    /// The rate limit that the endpoint asked for when it was verified. The lower of both limits holds. Set by the relays.
    pub allowed_rate: Option<Rate>,
    /// Why the last try to verify the endpoint failed: a reason code and the error, for operators. Show customers
    /// [`public_verification_error`](Self::public_verification_error). Set by the relays.
    pub verification_error: Option<String>,
    /// A secret that the receiver brings. [`put`](crate::endpoints::Endpoints::put) replaces all secrets with it;
    /// `None`: a new endpoint gets a random secret, and an existing one keeps its secrets. Never read back.
    pub secret: Option<SigningSecret>,
    /// Whether the row has a value that could not be read: `problem` says which, and the field here is empty.
    pub(crate) is_unread: bool,
}

impl Endpoint {
    /// Creates an endpoint for all topics and any tenant.
    pub fn new(name: impl Into<String>, url: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            kind: EndpointKind::Webhook,
            url: url.into(),
            topics: vec!["*".to_owned()],
            tenant_id: None,
            filter: None,
            enabled: true,
            headers: Vec::new(),
            auth: None,
            policy: DeliveryPolicy::default(),
            description: None,
            disabled_reason: None,
            disabled_by: None,
            state: EndpointState::default(),
            state_by: None,
            state_until: None,
            state_reason: None,
            set_by: BTreeMap::new(),
            problem: None,
            created_at: None,
            updated_at: None,
            failing_since: None,
            failing: false,
            failing_reason: None,
            old_secrets_until: None,
            verification: Verification::None,
            verified_at: None,
            allowed_rate: None,
            verification_error: None,
            secret: None,
            is_unread: false,
        }
    }

    /// Creates a [feed](crate::feed) for all topics and any tenant: an endpoint that is read instead of posted to.
    ///
    /// ```
    /// use diesel_outbox::endpoints::Endpoint;
    ///
    /// let feed = Endpoint::feed("acme").topics(["order.*"]);
    /// assert!(feed.check().is_ok());
    /// ```
    pub fn feed(name: impl Into<String>) -> Self {
        Self {
            kind: EndpointKind::Feed,
            ..Self::new(name, "")
        }
    }

    /// Whether the endpoint is read instead of posted to.
    pub(crate) fn is_feed(&self) -> bool {
        self.kind == EndpointKind::Feed
    }

    /// Changes the fields of this endpoint.
    #[must_use]
    pub fn configure(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Sets the topic patterns, as in routes: the endpoint gets messages whose topic matches one of them. Defaults
    /// to `*`.
    #[must_use]
    pub fn topics<T: Into<String>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        self.topics = topics.into_iter().map(Into::into).collect();
        self
    }

    /// Limits the endpoint to messages of this tenant. Defaults to any tenant.
    #[must_use]
    pub fn tenant(mut self, tenant_id: Uuid) -> Self {
        self.tenant_id = Some(tenant_id);
        self
    }

    /// Limits the endpoint to messages that match this [filter](crate::filter):
    /// `{"total": [{"numeric": [">", 100]}], "items": {"kind": ["book"]}}`. Defaults to all messages.
    #[must_use]
    pub fn filter(mut self, filter: Value) -> Self {
        self.filter = Some(filter);
        self
    }

    /// Adds a header to every request.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into().into()));
        self
    }

    /// Sets a secret that the receiver brings, instead of a random one. The text is that of
    /// [Standard Webhooks](https://www.standardwebhooks.com): `whsec_` and the base64 of 24 to 64 bytes.
    ///
    /// ```
    /// use diesel_outbox::endpoints::Endpoint;
    ///
    /// let hook = Endpoint::new("acme", "https://acme.example/hooks")
    ///     .secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse()?);
    /// # let _ = hook;
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    #[must_use]
    pub fn secret(mut self, secret: SigningSecret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Whether messages may be sent: the endpoint is verified, or need not be.
    ///
    /// ```
    /// use diesel_outbox::config::Verification;
    /// use diesel_outbox::endpoints::Endpoint;
    ///
    /// let mut hook = Endpoint::new("acme", "https://acme.example/hooks");
    /// assert!(hook.is_verified());
    /// hook.verification = Verification::CloudEvents;
    /// assert!(!hook.is_verified());
    /// ```
    pub fn is_verified(&self) -> bool {
        self.verification == Verification::None || self.verified_at.is_some()
    }

    /// Decides the state from the row, and the pause that ends last: the only place that does, beside the SQL function.
    pub(crate) fn set_state(&mut self, pause: Option<PausedBy>) {
        use EndpointState::{Active, Disabled, Failing, Paused, Unread, Unverified};

        let (state, by, until, reason) = match (self.enabled, self.is_verified(), pause) {
            (false, ..) => (
                Disabled,
                self.disabled_by,
                None,
                self.disabled_reason.clone(),
            ),
            (_, false, _) => (Unverified, None, None, self.verification_error.clone()),
            (.., Some(pause)) => (Paused, Some(pause.by), pause.until, Some(pause.reason)),
            _ if self.failing && self.is_feed() => (Unread, None, None, None),
            _ if self.failing => (Failing, None, None, self.failing_reason.clone()),
            _ => (Active, None, None, None),
        };
        self.state = state;
        self.state_by = by;
        self.state_until = until;
        self.state_reason = reason;
    }

    /// Whether an operator has disabled the endpoint.
    pub(crate) fn is_disabled_by_operator(&self) -> bool {
        !self.enabled && self.disabled_by == Some(Hand::Operator)
    }

    /// Why the last try to verify the endpoint failed, in words for customers, like
    /// [`Delivery::public_error`](crate::endpoints::Delivery::public_error).
    ///
    /// ```
    /// use diesel_outbox::endpoints::Endpoint;
    ///
    /// let mut hook = Endpoint::new("acme", "https://acme.example/hooks");
    /// hook.verification_error = Some("TIMEOUT: no response within 15000 ms".to_owned());
    /// let error = hook.public_verification_error();
    /// assert_eq!(error.as_deref(), Some("your endpoint did not answer within 15 s"));
    /// ```
    pub fn public_verification_error(&self) -> Option<String> {
        self.verification_error.as_deref().map(of_text)
    }

    /// Converts the row into an endpoint. The settings of a relay may still refuse it.
    ///
    /// # Errors
    /// A [`ConfigError`] if no relay can use the row.
    pub(crate) fn destination(
        &self,
        secrets: Vec<SigningSecret>,
    ) -> Result<Destination, ConfigError> {
        self.check()?;
        if self.is_feed() {
            let key = format!("destinations.{}.kind", self.name);
            return Err(ConfigError::new(key, NOTHING_IS_SENT));
        }
        let mut destination = Destination::new(&self.name, &self.url)?;
        destination.secrets = secrets;
        destination.headers = self.headers.clone();
        destination.auth = self.auth.clone();
        destination.policy = self.policy.clone();
        destination.verification = self.verification;
        let rates = [self.policy.rate, self.allowed_rate].into_iter().flatten();
        destination.policy.rate = rates.min_by(|a, b| a.per_second.total_cmp(&b.per_second));
        Ok(destination)
    }

    /// Checks whether a relay can use the endpoint. Relays apply the same check to rows from plain SQL.
    ///
    /// ```
    /// use diesel_outbox::endpoints::Endpoint;
    ///
    /// assert!(Endpoint::new("acme", "https://acme.example/hooks").check().is_ok());
    /// let error = Endpoint::new("acme", "acme.example").check().unwrap_err();
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
        let given = [
            ("url", Some(&self.url)),
            ("description", self.description.as_ref()),
        ];
        let mut given = given.into_iter();
        if let Some((key, _)) = given.find(|(_, text)| text.is_some_and(|text| text.contains('\0')))
        {
            return Err(at(key, "contains a NUL character".to_owned()));
        }
        if self.is_feed() {
            self.check_feed().map_err(|(key, reason)| at(key, reason))?;
        } else {
            self.check_sends()
                .map_err(|(key, reason)| at(&key, reason))?;
        }
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
        if let Some(filter) = &self.filter {
            Filter::new(filter).map_err(|error| at("filter", error.to_string()))?;
        }
        let policy = &self.policy;
        policy.check().map_err(|(key, reason)| at(key, reason))?;
        if policy
            .concurrency
            .is_some_and(|sends| sends > MOST_CONCURRENCY)
        {
            let reason = format!("must be 1 to {MOST_CONCURRENCY}");
            return Err(at("concurrency", reason));
        }
        if policy.timeout.is_some_and(|timeout| timeout > LONGEST_SEND) {
            return Err(at("timeout", "must be 1ms to 5m".to_owned()));
        }
        Ok(())
    }
}

impl Endpoint {
    /// Checks how messages are sent.
    fn check_sends(&self) -> Result<(), (String, String)> {
        let at = |key: &str, reason: String| (key.to_owned(), reason);
        if self.url.trim() != self.url || self.url.len() > MOST_URL_BYTES {
            let reason =
                format!("must have at most {MOST_URL_BYTES} bytes, and no white space around it");
            return Err(at("url", reason));
        }
        let url = parse_url(&self.url).map_err(|reason| at("url", reason))?;
        if is_masked(&url) {
            let reason = "has *** in place of what was hidden: write the whole URL";
            return Err(at("url", reason.to_owned()));
        }
        for (header, value) in &self.headers {
            check_header(header, value.expose_secret())
                .map_err(|reason| at(&format!("headers.{header}"), reason.to_owned()))?;
        }
        if let Some(auth) = &self.auth {
            let check = auth.check(&self.headers, &url);
            check.map_err(|reason| at("auth", reason))?;
        }
        Ok(())
    }

    /// A feed has nothing that is about sends.
    fn check_feed(&self) -> Result<(), (&'static str, String)> {
        let of_sends = [
            ("url", self.url.is_empty()),
            ("headers", self.headers.is_empty()),
            ("auth", self.auth.is_none()),
            ("verification", self.verification == Verification::None),
            ("secret", self.secret.is_none()),
        ];
        match of_sends.iter().find(|(_, is_unset)| !is_unset) {
            Some((key, _)) => Err((key, NOTHING_IS_SENT.to_owned())),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Endpoint {
    /// Omits the values of headers, and the URL, which may contain a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Endpoint")
            .field("name", &self.name)
            .field("topics", &self.topics)
            .field("tenant_id", &self.tenant_id)
            .field("enabled", &self.enabled)
            .field("headers", &headers)
            .finish_non_exhaustive()
    }
}
