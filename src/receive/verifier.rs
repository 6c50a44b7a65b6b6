//! Signatures of Standard Webhooks, verified.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::Mac;

use super::ReceiveError;
use super::cloudevent::CloudEvent;
use super::headers::{Headers, Repeated};
use super::request::{self, Mode};
use crate::config::{ConfigError, PublicKey, SigningSecret, VerifyingKey, parse_verifying_keys};
use crate::dispatch::{Signer, signed_content};
use crate::ed25519::PublicKeys;

const ID: &str = "webhook-id";
const TIMESTAMP: &str = "webhook-timestamp";
const SIGNATURE: &str = "webhook-signature";
/// What stands before the signatures of HMAC-SHA256. There will be other versions.
const SYMMETRIC: &str = "v1,";
/// And of Ed25519.
const ASYMMETRIC: &str = "v1a,";
/// More signatures than this are not looked at by public keys: each costs a multiple of one by a secret, and anyone may
/// send them.
const MOST_ASYMMETRIC: usize = 16;

/// As the libraries of Standard Webhooks have it.
const TOLERANCE: Duration = Duration::from_secs(300);

/// Verifies requests that were signed as [Standard Webhooks](https://www.standardwebhooks.com) says,
/// by this crate's relay or by others.
///
/// A request is verified when any of its signatures is by any of the secrets or public keys, so that they can be
/// changed without refusing a request. Make one verifier, and share it between threads.
///
/// A secret (`whsec_…`) is known to both sides, so the receiver can sign with it, too. A public key (`whpk_…`) only
/// verifies. It needs cryptography: the feature `ring` or `aws-lc-rs`, or a `CryptoProvider` of rustls that the
/// application has installed.
///
/// ```
/// use diesel_outbox::receive::{Headers, Verifier, VerifyError};
///
/// // A secret or a public key, or several with commas or white space between them.
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
    public_keys: Option<PublicKeys>,
    tolerance: Duration,
    takes_binary: bool,
}

/// What a verified request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verified<'a> {
    /// Of the message, the same on every attempt; of the request, where it has several messages.
    pub id: &'a str,
    /// Of this attempt.
    pub timestamp: SystemTime,
}

impl Verifier {
    /// Verifies with any of these secrets.
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
    /// A [`ConfigError`] when there are none, or one is asymmetric: only senders have private keys.
    pub fn new(secrets: &[SigningSecret]) -> Result<Self, ConfigError> {
        Self::of(secrets, &[])
    }

    /// Verifies asymmetric signatures (`v1a`) with any of these public keys.
    ///
    /// For public keys beside secrets, [parse](str::parse) a text with both.
    ///
    /// ```no_run
    /// use diesel_outbox::config::PublicKey;
    /// use diesel_outbox::receive::Verifier;
    ///
    /// let key: PublicKey = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=".parse()?;
    /// let verifier = Verifier::of_public_keys(&[key])?;
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] when there are none, or when the process has no cryptography.
    pub fn of_public_keys(keys: &[PublicKey]) -> Result<Self, ConfigError> {
        Self::of(&[], keys)
    }

    fn of(secrets: &[SigningSecret], keys: &[PublicKey]) -> Result<Self, ConfigError> {
        let wrong = |reason: String| ConfigError::new("secrets", reason);
        if secrets.is_empty() && keys.is_empty() {
            return Err(wrong("there is none".to_owned()));
        }
        if secrets.iter().any(SigningSecret::is_asymmetric) {
            return Err(wrong(
                "a private key (whsk_) is for the sender alone: give its public key, whpk_…, which `diesel-outbox secret public` shows".to_owned(),
            ));
        }
        let public_keys = match keys {
            [] => None,
            keys => {
                let keys = keys.iter().map(PublicKey::bytes).collect();
                Some(PublicKeys::new(keys).map_err(wrong)?)
            }
        };
        Ok(Self {
            signer: Signer::new(secrets).map_err(wrong)?,
            public_keys,
            tolerance: TOLERANCE,
            takes_binary: true,
        })
    }

    /// How far the clocks of sender and receiver, and the time on the way, may lie apart, in both
    /// directions. Defaults to 5 minutes. It counts whole seconds.
    ///
    /// Who has seen a request can send it again for as long: handle messages [once](crate::inbox).
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

    /// Refuses requests in binary mode: then source, type and all other attributes of an
    /// [event](Self::events) are signed. For receivers of a relay that sends in structured or batched mode.
    ///
    /// The content type, which says the mode, is a header and not signed either: without this, who can
    /// change a request on its way can pass a document off as the data of another event.
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

    /// Verifies a request by its headers and its body, which has to be what came, byte for byte.
    ///
    /// Only the id, the timestamp and the body are signed: see [`events`](Self::events).
    ///
    /// # Errors
    /// A [`VerifyError`]. The answer is 401: the relay tries again, so nothing is lost while a secret
    /// or a clock is put right.
    pub fn verify<'a>(
        &self,
        headers: &'a Headers,
        body: &[u8],
    ) -> Result<Verified<'a>, VerifyError> {
        self.verify_at(headers, body, SystemTime::now())
    }

    /// [`verify`](Self::verify) at another time than now, for tests and for requests that were kept.
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
    /// let verified = verifier.verify_at(&headers, br#"{"test": 2432232314}"#, then)?;
    /// assert_eq!(verified.id, "msg_p5jXN8AQM9LWM0D4loKWxJek");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A [`VerifyError`].
    pub fn verify_at<'a>(
        &self,
        headers: &'a Headers,
        body: &[u8],
        now: SystemTime,
    ) -> Result<Verified<'a>, VerifyError> {
        let id = text(headers, ID)?;
        if id.contains('.') {
            // What is signed is joined with full stops: another split would have the same signature.
            return Err(VerifyError::BadHeader {
                name: ID,
                reason: "it holds a full stop",
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
        // In a time that tells nothing of the right signature.
        of_version(SYMMETRIC, signatures).any(|signature| {
            let mut macs = macs.iter();
            macs.any(|mac| mac.clone().verify_slice(&signature).is_ok())
        })
    }

    fn is_by_public_key(&self, id: &str, timestamp: &str, body: &[u8], signatures: &str) -> bool {
        let Some(keys) = &self.public_keys else {
            return false;
        };
        let content = signed_content(id.as_bytes(), timestamp.as_bytes(), body);
        of_version(ASYMMETRIC, signatures)
            .take(MOST_ASYMMETRIC)
            .any(|signature| keys.verify(&content, &signature))
    }

    /// Verifies a request, and reads its events: [`verify`](Self::verify), then
    /// [`events`](super::events).
    ///
    /// In binary mode headers say what happened, and headers are not signed. Therefore the event's id
    /// has to be the one that is signed, `webhook-id`; a duplicate cannot be passed off as another
    /// message. Where source, type and the other attributes have to be certain, let the relay send in
    /// structured or batched mode, where they are a part of the body, and
    /// [refuse binary mode](Self::refuse_binary).
    ///
    /// # Errors
    /// A [`ReceiveError`], which knows the status to answer with.
    pub fn events<'a>(
        &self,
        headers: &'a Headers,
        body: &'a [u8],
    ) -> Result<Vec<CloudEvent<'a>>, ReceiveError> {
        self.events_at(headers, body, SystemTime::now())
    }

    /// [`events`](Self::events) at another time than now.
    ///
    /// ```
    /// use diesel_outbox::receive::{Headers, Verifier};
    /// use std::time::{Duration, UNIX_EPOCH};
    ///
    /// let verifier: Verifier = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse()?;
    /// let headers = Headers::new([
    ///     ("content-type", "application/json"),
    ///     ("webhook-id", "0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c"),
    ///     ("webhook-timestamp", "1795200000"),
    ///     ("webhook-signature", "v1,BTndPL7PpPJPkcPOm29icrPnKUwdimSTF1YYn+ubk+s="),
    ///     ("ce-specversion", "1.0"),
    ///     ("ce-id", "0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c"),
    ///     ("ce-source", "diesel-outbox/outbox"),
    ///     ("ce-type", "order.paid"),
    /// ]);
    /// let then = UNIX_EPOCH + Duration::from_secs(1_795_200_001);
    /// let events = verifier.events_at(&headers, br#"{"order_id":7}"#, then)?;
    /// assert_eq!(events[0].event_type, "order.paid");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A [`ReceiveError`].
    pub fn events_at<'a>(
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

    /// The time of a request that is neither too old nor too new.
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

/// The signatures of a version, decoded.
fn of_version(version: &str, signatures: &str) -> impl Iterator<Item = Vec<u8>> {
    signatures
        .split_ascii_whitespace()
        .filter_map(move |signature| BASE64.decode(signature.strip_prefix(version)?).ok())
}

/// A header that has to be there, once, with a value.
fn text<'a>(headers: &'a Headers, name: &'static str) -> Result<&'a str, VerifyError> {
    let bad = |reason| VerifyError::BadHeader { name, reason };
    match headers.get(name) {
        Err(Repeated) => Err(bad("it is there twice")),
        Ok(None | Some([])) => Err(VerifyError::MissingHeader { name }),
        Ok(Some(value)) => std::str::from_utf8(value).map_err(|_| bad("it is not text")),
    }
}

impl FromStr for Verifier {
    type Err = ConfigError;

    /// Secrets (`whsec_…`) and public keys (`whpk_…`), with white space or commas between them.
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
    /// Without the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier")
            .field("signer", &self.signer)
            .field("public_keys", &self.public_keys)
            .field("tolerance", &self.tolerance)
            .field("takes_binary", &self.takes_binary)
            .finish()
    }
}

/// Why a request is not verified. It says nothing of secrets, of the signature that would be right,
/// or of the body.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// A header is not there, or empty.
    #[error("the header {name} is missing")]
    MissingHeader {
        /// Which one.
        name: &'static str,
    },
    /// A header is there, and cannot be used.
    #[error("the header {name} cannot be used: {reason}")]
    BadHeader {
        /// Which one.
        name: &'static str,
        /// What is wrong.
        reason: &'static str,
    },
    /// The timestamp is not a number of seconds.
    #[error("webhook-timestamp is not a number of seconds")]
    Timestamp,
    /// The request was signed too long ago. A late one, a replay, or a clock that is wrong.
    #[error("the request was signed {seconds} s ago")]
    TooOld {
        /// How long ago.
        seconds: u64,
    },
    /// The request was signed in the future: a clock is wrong.
    #[error("the request was signed {seconds} s in the future")]
    TooNew {
        /// How far.
        seconds: u64,
    },
    /// No signature is by one of the secrets or public keys.
    #[error("no signature is by a known secret")]
    NoMatch,
}

#[cfg(test)]
mod tests;
