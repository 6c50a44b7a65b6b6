//! Signing secrets of Standard Webhooks.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use secrecy::{ExposeSecret, SecretSlice, SecretString};

use super::error::ConfigError;
use super::text::words;

/// Secrets have this many bytes, says Standard Webhooks.
const BYTES: std::ops::RangeInclusive<usize> = 24..=64;
const PREFIX: &str = "whsec_";
/// Padding may be there or not.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// What requests to a destination are signed with: `whsec_` and the base64 of 24 to 64 bytes.
///
/// `openssl rand -base64 32` makes one.
#[derive(Clone)]
pub struct SigningSecret {
    key: SecretSlice<u8>,
}

impl SigningSecret {
    /// A new one, of 32 random bytes.
    ///
    /// # Panics
    /// When the system has no random numbers.
    pub(crate) fn random() -> Self {
        let mut key = vec![0; 32];
        getrandom::fill(&mut key).expect("the system has random numbers");
        Self { key: key.into() }
    }

    /// As it is given to receivers: `whsec_` and base64. Keep it secret.
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
        format!("{PREFIX}{}", BASE64.encode(self.key())).into()
    }

    /// The bytes of the key.
    pub(crate) fn key(&self) -> &[u8] {
        self.key.expose_secret()
    }
}

impl FromStr for SigningSecret {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let encoded = text.strip_prefix(PREFIX).ok_or_else(|| {
            ConfigError::new(
                "secret",
                "it does not begin with whsec_ (whsec_ and the base64 of 24 to 64 random bytes)",
            )
        })?;
        // The decoder's own error would show a part of it.
        let key = BASE64
            .decode(encoded)
            .map_err(|_| ConfigError::new("secret", "what follows whsec_ is not base64"))?;
        if !BYTES.contains(&key.len()) {
            let count = key.len();
            return Err(ConfigError::new(
                "secret",
                format!("it has {count} bytes; 24 to 64 are needed"),
            ));
        }
        Ok(Self { key: key.into() })
    }
}

impl fmt::Debug for SigningSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningSecret(***)")
    }
}

/// Reads secrets, the newest first, with white space or commas between them, for the setting `key`.
///
/// ```
/// use diesel_outbox::config::parse_secrets;
///
/// let text = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
/// assert_eq!(parse_secrets("OUTBOX_SECRET", text)?.len(), 2);
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
///
/// # Errors
/// A [`ConfigError`] that names `key`, and never shows a part of a secret.
pub fn parse_secrets(key: &str, text: &str) -> Result<Vec<SigningSecret>, ConfigError> {
    secrets(text).map_err(ConfigError::at(key))
}

pub(super) fn secrets(text: &str) -> Result<Vec<SigningSecret>, String> {
    let secret = |(index, word): (usize, &str)| {
        let secret = word.parse();
        secret.map_err(|error: ConfigError| format!("secret {}: {}", index + 1, error.reason()))
    };
    match words(text).next() {
        Some(_) => words(text).enumerate().map(secret).collect(),
        None => Err("it is empty".to_owned()),
    }
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

    #[test]
    fn a_bad_secret_is_refused_and_not_shown() {
        for text in [
            "",
            " , ",
            "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "whsec_c2hvcnQ=",
            "whsec_!!!!!!!!",
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw whsec_x",
        ] {
            let error = parse_secrets("OUTBOX_SECRET", text).expect_err(text);
            assert_eq!(error.key(), "OUTBOX_SECRET");
            assert!(!error.to_string().contains("MfKQ"), "{error}");
            assert!(!error.to_string().contains("c2hv"), "{error}");
        }
    }
}
