//! Keys that encrypt secrets in the database.

use std::str::FromStr;

use base64::Engine;
use secrecy::{ExposeSecret, SecretSlice, SecretString};

use super::public_key::BASE64;
use super::text::words;
use crate::config_error::ConfigError;

/// The length of a key in bytes (AES-256).
const BYTES: usize = 32;

/// The keys of `OUTBOX_SECRET_KEY`, which encrypt the secrets of endpoints in the database. The newest
/// key encrypts, and the matching key decrypts. Without keys, new secrets are stored in plain text.
///
/// As text, a key is the base64 of 32 random bytes. Several keys are separated by commas or white space, newest first.
/// `diesel-outbox secret new --at-rest` and `openssl rand -base64 32` generate a key.
///
/// ```
/// use diesel_outbox::config::SecretKeys;
///
/// let keys: SecretKeys = "9MMfxlcYUyu2sa5cYoUYXvyhYOXs7TtNvOLzlpTtrLo=".parse()?;
/// assert!(!keys.is_empty());
/// assert!(SecretKeys::default().is_empty());
///
/// // A new key, as settings take it.
/// let written = SecretKeys::random().written();
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct SecretKeys {
    keys: Vec<SecretSlice<u8>>,
}

impl SecretKeys {
    /// One random key.
    ///
    /// # Panics
    /// When the system provides no random numbers.
    pub fn random() -> Self {
        let mut key = vec![0; BYTES];
        getrandom::fill(&mut key).expect("the system provides random numbers");
        Self {
            keys: vec![key.into()],
        }
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The keys as settings take them, newest first. Keep the text secret.
    pub fn written(&self) -> SecretString {
        let keys: Vec<String> = self.bytes().map(|key| BASE64.encode(key)).collect();
        keys.join(" ").into()
    }

    /// The keys in bytes, newest first.
    pub(crate) fn bytes(&self) -> impl Iterator<Item = &[u8; BYTES]> {
        let keys = self.keys.iter();
        keys.filter_map(|key| key.expose_secret().try_into().ok())
    }
}

impl FromStr for SecretKeys {
    type Err = ConfigError;

    /// The error does not show the refused text.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |reason: String| ConfigError::new("secret_key", reason);
        let key = |(index, word): (usize, &str)| {
            let wrong = |reason: String| wrong(format!("key {}: {reason}", index + 1));
            let key = BASE64
                .decode(word)
                .map_err(|_| wrong("not base64".to_owned()))?;
            match key.len() {
                BYTES => Ok(SecretSlice::from(key)),
                count => Err(wrong(format!("must have {BYTES} bytes, and has {count}"))),
            }
        };
        let keys: Vec<_> = words(text).enumerate().map(key).collect::<Result<_, _>>()?;
        match keys.is_empty() {
            true => Err(wrong("must not be empty".to_owned())),
            false => Ok(Self { keys }),
        }
    }
}

/// Reads the setting. The error is the reason.
pub(super) fn secret_keys(text: &str) -> Result<SecretKeys, String> {
    let keys = text.parse();
    keys.map_err(|error: ConfigError| error.reason().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "9MMfxlcYUyu2sa5cYoUYXvyhYOXs7TtNvOLzlpTtrLo=";
    const NEW: &str = "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE=";

    #[test]
    fn keys_are_read_in_their_order() {
        let keys: SecretKeys = format!("{NEW},\n{OLD}").parse().expect("two");
        assert_eq!(keys.bytes().next(), Some(&[b'A'; 32]));
        assert_eq!(keys.written().expose_secret(), format!("{NEW} {OLD}"));
        assert_eq!(format!("{keys:?}").matches("REDACTED").count(), 2);
        let [one, other] = [0, 1].map(|_| SecretKeys::random().written());
        assert_ne!(one.expose_secret(), other.expose_secret());
        assert!(one.expose_secret().parse::<SecretKeys>().is_ok());
    }

    #[test]
    fn a_bad_key_is_refused_and_not_shown() {
        for text in [
            "",
            " , ",
            "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo=",
            &format!("{NEW} MfKQ"),
        ] {
            let error = text.parse::<SecretKeys>().expect_err(text).to_string();
            assert!(!error.contains("MfKQ"), "{error}");
        }
    }
}
