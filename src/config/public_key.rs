//! Public keys of Standard Webhooks.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use crate::config_error::ConfigError;

pub(super) const PREFIX: &str = "whpk_";
/// The prefix of private keys.
pub(super) const PRIVATE_PREFIX: &str = "whsk_";
/// The encoding of keys and secrets. Padding is optional.
pub(super) const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The public key that receivers verify asymmetric signatures (`v1a`) with: `whpk_` followed by the base64 of the 32
/// bytes of an Ed25519 public key. A public key is not secret: it cannot sign.
///
/// ```
/// use diesel_outbox::config::PublicKey;
///
/// let key: PublicKey = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=".parse()?;
/// assert_eq!(key.to_string(), "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=");
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublicKey {
    bytes: [u8; 32],
}

impl PublicKey {
    #[cfg(feature = "http")]
    pub(crate) fn of(bytes: [u8; 32]) -> Self {
        Self { bytes }
    }

    #[cfg(feature = "http")]
    pub(crate) fn bytes(&self) -> [u8; 32] {
        self.bytes
    }
}

impl FromStr for PublicKey {
    type Err = ConfigError;

    /// The error does not show the refused text, which may be a secret.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |reason: String| ConfigError::new("public_key", reason);
        if text.starts_with(PRIVATE_PREFIX) {
            return Err(wrong(
                "this is a private key (whsk_), which only the sender may have: give the public key, whpk_…"
                    .to_owned(),
            ));
        }
        let encoded = text.strip_prefix(PREFIX).ok_or_else(|| {
            wrong("must start with whpk_, followed by the base64 of 32 bytes".to_owned())
        })?;
        let bytes = BASE64
            .decode(encoded)
            .map_err(|_| wrong("the part after whpk_ is not base64".to_owned()))?;
        let count = bytes.len();
        let bytes = bytes
            .try_into()
            .map_err(|_| wrong(format!("must have 32 bytes, and has {count}")))?;
        Ok(Self { bytes })
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", BASE64.encode(self.bytes))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_key_is_refused_and_not_shown() {
        for (text, why) in [
            ("", "start with whpk_"),
            ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "start with whpk_"),
            ("whsk_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "private key"),
            ("whpk_!!!!!!!!", "not base64"),
            ("whpk_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "has 24"),
        ] {
            let error = text.parse::<PublicKey>().expect_err(text).to_string();
            assert!(error.contains(why), "{error}");
            assert!(!error.contains("MfKQ"), "{error}");
        }
    }
}
