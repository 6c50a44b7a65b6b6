//! Verification of Standard Webhooks signatures.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::{Signature, VerifyingKey as PublicVerifyingKey};
use hmac::Mac;

use super::ReceiveError;
use super::cloudevent::CloudEvent;
use super::headers::{Headers, RepeatedHeader};
use super::request::{self, Mode};
use crate::config::{ConfigError, PublicKey, SigningSecret, VerifyingKey, parse_verifying_keys};
use crate::http::signature::{Signer, signed_content};

const ID: &str = "webhook-id";
const TIMESTAMP: &str = "webhook-timestamp";
const SIGNATURE: &str = "webhook-signature";
/// The prefix of HMAC-SHA256 signatures. Signatures with other prefixes are ignored.
const SYMMETRIC: &str = "v1,";
/// The prefix of Ed25519 signatures.
const ASYMMETRIC: &str = "v1a,";
/// The maximum number of signatures that public keys verify. Anyone can send signatures, and each costs much more than
/// a symmetric signature.
const MOST_ASYMMETRIC: usize = 16;

/// The default of the Standard Webhooks libraries.
const TOLERANCE: Duration = Duration::from_secs(300);

/// Verifies requests that this crate's relay or another sender has signed according to
/// [Standard Webhooks](https://www.standardwebhooks.com).
///
/// A request is verified if any of its signatures matches any of the secrets or public keys, so secrets and keys can be
/// changed without refusing requests. Create one verifier, and share it between threads.
///
/// A secret (`whsec_…`) is known to both sides, so the receiver could also sign with it. A public key (`whpk_…`) only
/// verifies.
///
/// ```
/// use diesel_outbox::receive::{Headers, Verifier, VerifyError};
///
/// // A secret or a public key, or several, separated by commas or white space.
/// let verifier: Verifier = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse()?;
///
/// let headers = Headers::new([
///     ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
///     ("webhook-timestamp", "1614265330"),
///     ("webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
/// ]);
/// let refused = verifier.verify(&headers, br#"{"test": 2432232314}"#);
/// assert!(matches!(refused, Err(VerifyError::TooOld { .. })));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct Verifier {
    signer: Signer,
    public_keys: Vec<PublicVerifyingKey>,
    tolerance: Duration,
    takes_binary: bool,
    /// The time at which requests are verified. `None`: now.
    at: Option<SystemTime>,
}

/// The signed headers of a verified request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verified<'a> {
    /// The id of the message, which is the same on every attempt. For a request with several messages, the id of the
    /// request.
    pub id: &'a str,
    /// When this attempt was signed.
    pub timestamp: SystemTime,
}

impl Verifier {
    /// Creates a verifier for symmetric signatures (`v1`) by any of these secrets.
    ///
    /// For asymmetric signatures (`v1a`), or both, [parse](str::parse) a text with the public keys and secrets.
    ///
    /// ```
    /// use diesel_outbox::config::SigningSecret;
    /// use diesel_outbox::receive::Verifier;
    ///
    /// let new: SigningSecret = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD".parse()?;
    /// let old: SigningSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse()?;
    /// let verifier = Verifier::new(&[new, old])?;
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] if there are no secrets, or if a secret is asymmetric: only senders have private keys.
    pub fn new(secrets: &[SigningSecret]) -> Result<Self, ConfigError> {
        Self::of(secrets, &[])
    }

    fn of(secrets: &[SigningSecret], keys: &[PublicKey]) -> Result<Self, ConfigError> {
        let wrong = |reason: String| ConfigError::new("secrets", reason);
        if secrets.is_empty() && keys.is_empty() {
            return Err(wrong("give at least one secret or public key".to_owned()));
        }
        if secrets.iter().any(SigningSecret::is_asymmetric) {
            return Err(wrong(
                "a private key (whsk_) is only for the sender: give its public key, whpk_…, which `diesel-outbox secret public` shows".to_owned(),
            ));
        }
        let public_key = |key: &PublicKey| {
            PublicVerifyingKey::from_bytes(&key.bytes())
                .map_err(|_| wrong(format!("{key} is not an Ed25519 key")))
        };
        Ok(Self {
            signer: Signer::new(secrets).map_err(wrong)?,
            public_keys: keys.iter().map(public_key).collect::<Result<_, _>>()?,
            tolerance: TOLERANCE,
            takes_binary: true,
            at: None,
        })
    }

    /// Sets how far the timestamp of a request may differ from the current time, in both directions. The
    /// difference includes the clock difference and the time on the network. Counts whole seconds. Defaults to
    /// 5 minutes.
    ///
    /// During this time, anyone who has seen a request can replay it: handle messages [once](crate::inbox).
    ///
    /// ```
    /// use diesel_outbox::receive::Verifier;
    /// use std::time::Duration;
    ///
    /// let verifier: Verifier = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse()?;
    /// let strict = verifier.tolerance(Duration::from_secs(30));
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    #[must_use]
    pub fn tolerance(mut self, tolerance: Duration) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Refuses requests in binary mode, so that source, type and all other attributes of an
    /// [event](Self::events) are signed. For receivers of a relay that sends in structured or batched mode.
    /// Defaults to accepting binary mode.
    ///
    /// The content type, which determines the mode, is an unsigned header. Without this option, an attacker who
    /// can change a request on the network can pass a document off as the data of another event.
    ///
    /// ```
    /// use diesel_outbox::receive::Verifier;
    ///
    /// let verifier: Verifier = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse()?;
    /// let verifier = verifier.refuse_binary();
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    #[must_use]
    pub fn refuse_binary(mut self) -> Self {
        self.takes_binary = false;
        self
    }

    /// Verifies requests at this time instead of now: for tests and for stored requests.
    ///
    /// ```
    /// use diesel_outbox::receive::{Headers, Verifier};
    /// use std::time::{Duration, UNIX_EPOCH};
    ///
    /// let verifier: Verifier = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse()?;
    /// let headers = Headers::new([
    ///     ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
    ///     ("webhook-timestamp", "1614265330"),
    ///     ("webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
    /// ]);
    /// let then = UNIX_EPOCH + Duration::from_secs(1_614_265_400);
    /// let verified = verifier.at(then).verify(&headers, br#"{"test": 2432232314}"#)?;
    /// assert_eq!(verified.id, "msg_p5jXN8AQM9LWM0D4loKWxJek");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn at(mut self, time: SystemTime) -> Self {
        self.at = Some(time);
        self
    }

    fn now(&self) -> SystemTime {
        self.at.unwrap_or_else(SystemTime::now)
    }

    /// Verifies a request by its headers and its body. The body must be unchanged, byte for byte.
    ///
    /// Only the id, the timestamp and the body are signed: see [`events`](Self::events).
    ///
    /// # Errors
    /// A [`VerifyError`]. Respond with 401: the relay then retries, so no message is lost while you fix a
    /// secret or a clock.
    pub fn verify<'a>(
        &self,
        headers: &'a Headers,
        body: &[u8],
    ) -> Result<Verified<'a>, VerifyError> {
        self.verify_at(headers, body, self.now())
    }

    fn verify_at<'a>(
        &self,
        headers: &'a Headers,
        body: &[u8],
        now: SystemTime,
    ) -> Result<Verified<'a>, VerifyError> {
        let id = text(headers, ID)?;
        if id.contains('.') {
            // The signed parts are joined with full stops: other parts could have the same signature.
            return Err(VerifyError::BadHeader {
                name: ID,
                reason: "contains a full stop",
            });
        }
        let written = text(headers, TIMESTAMP)?;
        let timestamp = self.timestamp(written, now)?;
        let signatures = text(headers, SIGNATURE)?;
        let is_ours = self.is_by_secret(id, written, body, signatures)
            || self.is_by_public_key(id, written, body, signatures);
        match is_ours {
            true => Ok(Verified { id, timestamp }),
            false => Err(VerifyError::NoMatch),
        }
    }

    fn is_by_secret(&self, id: &str, timestamp: &str, body: &[u8], signatures: &str) -> bool {
        let macs = self.signer.macs(id.as_bytes(), timestamp.as_bytes(), body);
        let macs: Vec<_> = macs.collect();
        // In constant time, so that the time reveals nothing of the right signature.
        of_version(SYMMETRIC, signatures).any(|signature| {
            let mut macs = macs.iter();
            macs.any(|mac| mac.clone().verify_slice(&signature).is_ok())
        })
    }

    fn is_by_public_key(&self, id: &str, timestamp: &str, body: &[u8], signatures: &str) -> bool {
        if self.public_keys.is_empty() {
            return false;
        }
        let content = signed_content(id.as_bytes(), timestamp.as_bytes(), body);
        of_version(ASYMMETRIC, signatures)
            .take(MOST_ASYMMETRIC)
            .filter_map(|signature| Signature::from_slice(&signature).ok())
            .any(|signature| {
                let mut keys = self.public_keys.iter();
                keys.any(|key| key.verify_strict(&content, &signature).is_ok())
            })
    }

    /// Verifies a request, and reads its events: [`verify`](Self::verify), then
    /// [`events`](super::events).
    ///
    /// In binary mode, the attributes of an event are headers, which are not signed. Therefore the event's id
    /// must equal the signed `webhook-id`, so that a duplicate cannot be passed off as another message. If you
    /// must be able to trust source, type and the other attributes, let the relay send in structured or batched
    /// mode, where they are part of the body, and [refuse binary mode](Self::refuse_binary).
    ///
    /// # Errors
    /// A [`ReceiveError`]. Respond with its [`status`](ReceiveError::status).
    pub fn events<'a>(
        &self,
        headers: &'a Headers,
        body: &'a [u8],
    ) -> Result<Vec<CloudEvent<'a>>, ReceiveError> {
        self.events_at(headers, body, self.now())
    }

    fn events_at<'a>(
        &self,
        headers: &'a Headers,
        body: &'a [u8],
        now: SystemTime,
    ) -> Result<Vec<CloudEvent<'a>>, ReceiveError> {
        let verified = self.verify_at(headers, body, now)?;
        let is_binary = Mode::of(headers)? == Mode::Binary;
        if is_binary && !self.takes_binary {
            return Err(ReceiveError::Binary);
        }
        let events = request::events(headers, body)?;
        let is_signed = |event: &CloudEvent<'_>| event.id == verified.id;
        if is_binary && !events.iter().all(is_signed) {
            return Err(ReceiveError::OtherId);
        }
        Ok(events)
    }

    /// Reads the timestamp of a request, and checks the tolerance.
    fn timestamp(&self, written: &str, now: SystemTime) -> Result<SystemTime, VerifyError> {
        let seconds: u64 = match written.bytes().all(|byte| byte.is_ascii_digit()) {
            true => written.parse().map_err(|_| VerifyError::Timestamp)?,
            false => return Err(VerifyError::Timestamp),
        };
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let apart = now.abs_diff(seconds);
        if apart > self.tolerance.as_secs() {
            return Err(match seconds < now {
                true => VerifyError::TooOld { seconds: apart },
                false => VerifyError::TooNew { seconds: apart },
            });
        }
        UNIX_EPOCH
            .checked_add(Duration::from_secs(seconds))
            .ok_or(VerifyError::TooNew { seconds: apart })
    }
}

/// The decoded signatures with this prefix.
fn of_version(version: &str, signatures: &str) -> impl Iterator<Item = Vec<u8>> {
    signatures
        .split_ascii_whitespace()
        .filter_map(move |signature| BASE64.decode(signature.strip_prefix(version)?).ok())
}

/// The value of a required header. It must occur once, and not be empty.
fn text<'a>(headers: &'a Headers, name: &'static str) -> Result<&'a str, VerifyError> {
    let bad = |reason| VerifyError::BadHeader { name, reason };
    match headers.get(name) {
        Err(RepeatedHeader) => Err(bad("occurs twice")),
        Ok(None | Some([])) => Err(VerifyError::MissingHeader { name }),
        Ok(Some(value)) => std::str::from_utf8(value).map_err(|_| bad("is not UTF-8")),
    }
}

impl FromStr for Verifier {
    type Err = ConfigError;

    /// Reads secrets (`whsec_…`) and public keys (`whpk_…`), separated by white space or commas.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let (mut secrets, mut keys) = (Vec::new(), Vec::new());
        for one in parse_verifying_keys("secrets", text)? {
            match one {
                VerifyingKey::Secret(secret) => secrets.push(secret),
                VerifyingKey::Public(key) => keys.push(key),
            }
        }
        Self::of(&secrets, &keys)
    }
}

impl fmt::Debug for Verifier {
    /// Omits the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier")
            .field("signer", &self.signer)
            .field("public_keys", &self.public_keys.len())
            .field("tolerance", &self.tolerance)
            .field("takes_binary", &self.takes_binary)
            .field("at", &self.at)
            .finish()
    }
}

/// Why a request cannot be verified. The error reveals nothing of the secrets, the right signature or the
/// body.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// A header is missing or empty.
    #[error("the header {name} is missing")]
    MissingHeader {
        /// The name of the header.
        name: &'static str,
    },
    /// A header cannot be used.
    #[error("the header {name} {reason}")]
    BadHeader {
        /// The name of the header.
        name: &'static str,
        /// Why the header cannot be used.
        reason: &'static str,
    },
    /// The timestamp is not a number of seconds.
    #[error("webhook-timestamp is not a number of seconds")]
    Timestamp,
    /// The request was signed too long ago: it is late, it is a replay, or a clock is wrong.
    #[error("the request was signed {seconds} s ago")]
    TooOld {
        /// The age of the request, in seconds.
        seconds: u64,
    },
    /// The request was signed in the future: a clock is wrong.
    #[error("the request was signed {seconds} s in the future")]
    TooNew {
        /// How far the timestamp is in the future, in seconds.
        seconds: u64,
    },
    /// No signature matches one of the secrets or public keys.
    #[error("no signature matches a known secret or public key")]
    NoMatch,
}

#[cfg(test)]
mod tests;
