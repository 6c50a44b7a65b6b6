//! Signing secrets of Standard Webhooks.

use std::str::FromStr;

use base64::Engine;
#[cfg(feature = "http")]
use ed25519_dalek::SigningKey;
use secrecy::{ExposeSecret, SecretSlice, SecretString};

#[cfg(feature = "http")]
use super::public_key::PublicKey;
use super::public_key::{self, BASE64, PRIVATE_PREFIX};
use super::text::words;
use crate::config_error::ConfigError;

/// The length of a symmetric secret in bytes, according to Standard Webhooks.
const BYTES: std::ops::RangeInclusive<usize> = 24..=64;
const PREFIX: &str = "whsec_";
/// The length of an asymmetric secret in bytes: a seed, or a seed followed by the public key.
const PRIVATE_BYTES: [usize; 2] = [32, 64];

/// A secret that signs requests, symmetric or asymmetric.
///
/// | secret | signature | receivers verify with |
/// |---|---|---|
/// | `whsec_` and the base64 of 24 to 64 bytes | `v1`, HMAC-SHA256 | the same secret, so every receiver can also sign |
/// | `whsk_` and the base64 of 64 bytes, an Ed25519 seed and its public key, or of the seed alone | `v1a`, Ed25519 | the [`PublicKey`], which cannot sign |
///
/// `diesel-outbox secret new` generates a secret, and so do [`random`](Self::random) and `random_asymmetric`.
///
/// ```
/// use diesel_outbox::config::SigningSecret;
/// use secrecy::ExposeSecret;
///
/// let secret = SigningSecret::random();
/// assert!(secret.written().expose_secret().starts_with("whsec_"));
/// ```
#[derive(Debug, Clone)]
pub struct SigningSecret {
    is_asymmetric: bool,
    key: SecretSlice<u8>,
}

impl SigningSecret {
    /// A new symmetric secret of 32 random bytes.
    ///
    /// # Panics
    /// When the system provides no random numbers.
    pub fn random() -> Self {
        let mut key = vec![0; 32];
        getrandom::fill(&mut key).expect("the system provides random numbers");
        Self {
            is_asymmetric: false,
            key: key.into(),
        }
    }

    /// A new asymmetric secret. Receivers get the [public key](Self::public_key).
    ///
    /// ```
    /// use diesel_outbox::config::SigningSecret;
    ///
    /// let secret = SigningSecret::random_asymmetric();
    /// println!("{}", secret.public_key()?.expect("an asymmetric secret"));
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Panics
    /// When the system provides no random numbers.
    #[cfg(feature = "http")]
    pub fn random_asymmetric() -> Self {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).expect("the system provides random numbers");
        Self {
            is_asymmetric: true,
            key: SigningKey::from_bytes(&seed)
                .to_keypair_bytes()
                .to_vec()
                .into(),
        }
    }

    /// Whether receivers verify with a public key instead of this secret.
    pub(crate) fn is_asymmetric(&self) -> bool {
        self.is_asymmetric
    }

    /// The public key that receivers verify with. `None`: the secret is symmetric.
    ///
    /// ```
    /// use diesel_outbox::config::SigningSecret;
    ///
    /// let secret: SigningSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse()?;
    /// assert_eq!(secret.public_key()?, None);
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] when the two halves of the key do not match.
    #[cfg(feature = "http")]
    pub fn public_key(&self) -> Result<Option<PublicKey>, ConfigError> {
        if !self.is_asymmetric {
            return Ok(None);
        }
        let private = self.private_key().map_err(ConfigError::at("secret"))?;
        Ok(Some(PublicKey::of(private.verifying_key().to_bytes())))
    }

    /// The private key of an asymmetric secret. The error is the reason.
    #[cfg(feature = "http")]
    pub(crate) fn private_key(&self) -> Result<SigningKey, String> {
        match self.key().try_into() {
            Ok(pair) => SigningKey::from_keypair_bytes(pair)
                .map_err(|_| "the public half does not match the private half".to_owned()),
            Err(_) => SigningKey::try_from(self.key()).map_err(|error| error.to_string()),
        }
    }

    /// The secret as settings take it: `whsec_` or `whsk_`, followed by base64. Give receivers a symmetric secret
    /// itself, but only the public key of an asymmetric secret.
    ///
    /// ```
    /// use diesel_outbox::config::SigningSecret;
    /// use secrecy::ExposeSecret;
    ///
    /// let secret: SigningSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse()?;
    /// assert_eq!(secret.written().expose_secret(), "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    pub fn written(&self) -> SecretString {
        let prefix = match self.is_asymmetric {
            true => PRIVATE_PREFIX,
            false => PREFIX,
        };
        format!("{prefix}{}", BASE64.encode(self.key())).into()
    }

    /// The key in bytes.
    pub(crate) fn key(&self) -> &[u8] {
        self.key.expose_secret()
    }
}

impl FromStr for SigningSecret {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |reason: String| ConfigError::new("secret", reason);
        if text.starts_with(public_key::PREFIX) {
            return Err(wrong(
                "this is a public key (whpk_), which is for receivers: give the private key, whsk_…"
                    .to_owned(),
            ));
        }
        let (encoded, prefix, is_asymmetric) = match text.strip_prefix(PRIVATE_PREFIX) {
            Some(encoded) => (encoded, PRIVATE_PREFIX, true),
            None => {
                let encoded = text.strip_prefix(PREFIX).ok_or_else(|| {
                    wrong(
                        "must start with whsec_ (followed by the base64 of 24 to 64 random bytes) or whsk_ (an Ed25519 private key)"
                            .to_owned(),
                    )
                })?;
                (encoded, PREFIX, false)
            }
        };
        // The decoder's own error would show a part of the secret.
        let key = BASE64
            .decode(encoded)
            .map_err(|_| wrong(format!("the part after {prefix} is not base64")))?;
        let count = key.len();
        match is_asymmetric {
            true if !PRIVATE_BYTES.contains(&count) => {
                Err(wrong(format!("must have 32 or 64 bytes, and has {count}")))
            }
            false if !BYTES.contains(&count) => {
                Err(wrong(format!("must have 24 to 64 bytes, and has {count}")))
            }
            _ => Ok(Self {
                is_asymmetric,
                key: key.into(),
            }),
        }
    }
}

/// Parses secrets, newest first, separated by white space or commas, for the setting `key`. Symmetric and asymmetric
/// secrets may be mixed: each of them signs.
///
/// # Errors
/// A [`ConfigError`] names `key`, and never shows a part of a secret.
pub fn parse_secrets(key: &str, text: &str) -> Result<Vec<SigningSecret>, ConfigError> {
    secrets(text).map_err(ConfigError::at(key))
}

pub(super) fn secrets(text: &str) -> Result<Vec<SigningSecret>, String> {
    each(text, |word| word.parse())
}

/// Reads each word of the text, in order.
fn each<T>(text: &str, read: impl Fn(&str) -> Result<T, ConfigError>) -> Result<Vec<T>, String> {
    let read = |(index, word): (usize, &str)| {
        let read = read(word);
        read.map_err(|error| format!("secret {}: {}", index + 1, error.reason()))
    };
    match words(text).next() {
        Some(_) => words(text).enumerate().map(read).collect(),
        None => Err("must not be empty".to_owned()),
    }
}

/// A key that a receiver verifies signatures with.
#[cfg(feature = "http")]
pub(crate) enum VerifyingKey {
    Secret(SigningSecret),
    Public(PublicKey),
}

/// Parses keys that a receiver verifies signatures with, as [`parse_secrets`] parses secrets.
#[cfg(feature = "http")]
pub(crate) fn parse_verifying_keys(
    key: &str,
    text: &str,
) -> Result<Vec<VerifyingKey>, ConfigError> {
    let read = |word: &str| match word.starts_with(public_key::PREFIX) {
        true => word.parse().map(VerifyingKey::Public),
        false => word.parse().map(VerifyingKey::Secret),
    };
    each(text, read).map_err(ConfigError::at(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_read_in_their_order() {
        let text = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw,\n whsec_QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE";
        let secrets = parse_secrets("OUTBOX_SECRET", text).expect("two");
        assert_eq!(secrets[0].key().len(), 24);
        assert_eq!(secrets[1].key(), [b'A'; 32]);
    }

    /// R47
    #[test]
    fn symmetric_and_asymmetric_secrets_may_be_mixed() {
        let (symmetric, seed) = (
            "whsec_QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE=",
            "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbc=",
        );
        let pair = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg==";
        let text = [symmetric, seed, pair].join(" ");
        let secrets = parse_secrets("OUTBOX_SECRET", &text).expect("three");
        let kinds: Vec<bool> = secrets.iter().map(SigningSecret::is_asymmetric).collect();
        assert_eq!(kinds, [false, true, true]);
        let written = secrets
            .iter()
            .map(|one| one.written().expose_secret().to_owned());
        assert_eq!(written.collect::<Vec<_>>(), [symmetric, seed, pair]);
        let shown = format!("{:?}", secrets[1]);
        assert!(shown.contains("REDACTED"), "{shown}");
    }

    #[test]
    fn a_bad_secret_is_refused_and_not_shown() {
        for text in [
            "",
            " , ",
            "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "whsec_c2hvcnQ=",
            "whsec_!!!!!!!!",
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw whsec_x",
            "whsk_c2hvcnQ=",
            "whsk_!!!!!!!!",
            // 24 and 63 bytes.
            "whsk_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "whsk_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYqrTwjUPD8I",
            "whpk_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo=",
        ] {
            let error = parse_secrets("OUTBOX_SECRET", text).expect_err(text);
            assert_eq!(error.key(), "OUTBOX_SECRET");
            assert!(!error.to_string().contains("MfKQ"), "{error}");
            assert!(!error.to_string().contains("c2hv"), "{error}");
        }
    }
}
