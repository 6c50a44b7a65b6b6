//! Signatures of Standard Webhooks, version 1: HMAC-SHA256 of `id.timestamp.body`.

use std::fmt;

use ::http::header::{HeaderValue, InvalidHeaderValue};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::config::{ConfigError, SigningSecret};

/// `v1,`, 44 characters and a space.
const SIGNATURE_BYTES: usize = 48;

/// Signs with each of its secrets, and knows what they have signed.
#[derive(Clone)]
pub(crate) struct Signer {
    /// Keyed already: what is done with the key is done once, and not for each request.
    keyed: Vec<Hmac<Sha256>>,
}

impl Signer {
    pub(crate) fn new(secrets: &[SigningSecret]) -> Result<Self, ConfigError> {
        let keyed = secrets
            .iter()
            .map(|secret| Hmac::new_from_slice(secret.key()))
            .collect::<Result<_, _>>()
            .map_err(|error| ConfigError::new("secrets", error.to_string()))?;
        Ok(Self { keyed })
    }

    /// The value of `webhook-signature`: a signature by each secret, in their order. `None` when
    /// there are no secrets.
    pub(crate) fn sign(
        &self,
        id: &[u8],
        timestamp: &[u8],
        body: &[u8],
    ) -> Result<Option<HeaderValue>, InvalidHeaderValue> {
        if self.keyed.is_empty() {
            return Ok(None);
        }
        let mut signatures = String::with_capacity(self.keyed.len() * SIGNATURE_BYTES);
        for mac in self.macs(id, timestamp, body) {
            if !signatures.is_empty() {
                signatures.push(' ');
            }
            signatures.push_str("v1,");
            BASE64.encode_string(mac.finalize().into_bytes(), &mut signatures);
        }
        HeaderValue::try_from(signatures).map(Some)
    }

    /// What is signed, by each secret, in their order.
    pub(crate) fn macs(
        &self,
        id: &[u8],
        timestamp: &[u8],
        body: &[u8],
    ) -> impl Iterator<Item = Hmac<Sha256>> {
        self.keyed.iter().map(move |keyed| {
            let mut mac = keyed.clone();
            for part in [id, b".", timestamp, b".", body] {
                mac.update(part);
            }
            mac
        })
    }
}

impl fmt::Debug for Signer {
    /// Without the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signer({} secrets)", self.keyed.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert_eq, proptest};
    use sha2::Digest;

    use super::*;
    use crate::config::parse_secrets;

    const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const SECOND: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

    fn signature(secrets: &str, id: &str, timestamp: &str, body: &[u8]) -> String {
        let secrets = parse_secrets("secrets", secrets).expect("secrets");
        let value = Signer::new(&secrets)
            .expect("a signer")
            .sign(id.as_bytes(), timestamp.as_bytes(), body)
            .expect("a header's value")
            .expect("there are secrets");
        value.to_str().expect("ASCII").to_owned()
    }

    /// The vector that the libraries of Standard Webhooks are tested with.
    #[test]
    fn a_signature_is_that_of_the_standards_own_libraries() {
        assert_eq!(
            signature(
                FIRST,
                "msg_p5jXN8AQM9LWM0D4loKWxJek",
                "1614265330",
                br#"{"test": 2432232314}"#
            ),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        );
    }

    #[test]
    fn each_secret_signs_in_their_order() {
        let both = signature(&format!("{FIRST} {SECOND}"), "a", "1", b"{}");
        let first = signature(FIRST, "a", "1", b"{}");
        let second = signature(SECOND, "a", "1", b"{}");
        assert_eq!(both, format!("{first} {second}"));
        assert_ne!(first, second);
    }

    #[test]
    fn without_a_secret_nothing_is_signed() {
        let signer = Signer::new(&[]).expect("a signer");
        assert_eq!(signer.sign(b"a", b"1", b"{}").expect("no error"), None);
    }

    #[test]
    fn debug_shows_no_key() {
        let secrets = parse_secrets("secrets", FIRST).expect("a secret");
        let signer = Signer::new(&secrets).expect("a signer");
        assert_eq!(format!("{signer:?}"), "Signer(1 secrets)");
    }

    /// HMAC as RFC 2104 writes it down, for a key that is no longer than a block.
    fn hmac_by_hand(key: &[u8], content: &[u8]) -> Vec<u8> {
        let padded = |with: u8| {
            let mut block = [with; 64];
            for (byte, key) in block.iter_mut().zip(key) {
                *byte ^= key;
            }
            block
        };
        let inner = Sha256::new()
            .chain_update(padded(0x36))
            .chain_update(content)
            .finalize();
        Sha256::new()
            .chain_update(padded(0x5c))
            .chain_update(inner)
            .finalize()
            .to_vec()
    }

    proptest! {
        #[test]
        fn any_body_is_signed_as_the_rfc_says(
            key in proptest::collection::vec(any::<u8>(), 24..=64),
            timestamp in any::<u64>(),
            body in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let timestamp = timestamp.to_string();
            let secret = format!("whsec_{}", BASE64.encode(&key));
            let content = [b"id.", timestamp.as_bytes(), b".", &body].concat();
            let expected = BASE64.encode(hmac_by_hand(&key, &content));
            prop_assert_eq!(signature(&secret, "id", &timestamp, &body), format!("v1,{expected}"));
        }
    }
}
