//! Signatures of Standard Webhooks over `id.timestamp.body`: version `v1` (HMAC-SHA256) and `v1a` (Ed25519).

use std::fmt;

use ::http::header::{HeaderValue, InvalidHeaderValue};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::{Signer as _, SigningKey};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::config::SigningSecret;

/// `v1a,`, 88 characters and a space.
const SIGNATURE_BYTES: usize = 93;

/// Signs requests with each secret, and computes the MACs to verify symmetric signatures.
#[derive(Clone)]
pub(crate) struct Signer {
    keys: Vec<PreparedKey>,
}

/// A prepared key, so that no request repeats the key setup.
#[derive(Clone)]
enum PreparedKey {
    Symmetric(Hmac<Sha256>),
    Asymmetric(SigningKey),
}

impl Signer {
    /// The error is the reason.
    pub(crate) fn new(secrets: &[SigningSecret]) -> Result<Self, String> {
        let key = |(index, secret): (usize, &SigningSecret)| {
            let key = match secret.is_asymmetric() {
                true => secret.private_key().map(PreparedKey::Asymmetric),
                false => Hmac::new_from_slice(secret.key())
                    .map(PreparedKey::Symmetric)
                    .map_err(|error| error.to_string()),
            };
            key.map_err(|reason| format!("secret {}: {reason}", index + 1))
        };
        let keys = secrets.iter().enumerate().map(key);
        Ok(Self {
            keys: keys.collect::<Result<_, _>>()?,
        })
    }

    /// The value of `webhook-signature`: one signature for each secret, in order. `None` if there are no secrets.
    pub(crate) fn sign(
        &self,
        id: &[u8],
        timestamp: &[u8],
        body: &[u8],
    ) -> Result<Option<HeaderValue>, InvalidHeaderValue> {
        if self.keys.is_empty() {
            return Ok(None);
        }
        // Ed25519 signs one contiguous buffer.
        let mut whole = None;
        let mut signatures = String::with_capacity(self.keys.len() * SIGNATURE_BYTES);
        for key in &self.keys {
            if !signatures.is_empty() {
                signatures.push(' ');
            }
            match key {
                PreparedKey::Symmetric(keyed) => {
                    signatures.push_str("v1,");
                    let mac = mac(keyed, id, timestamp, body);
                    BASE64.encode_string(mac.finalize().into_bytes(), &mut signatures);
                }
                PreparedKey::Asymmetric(private) => {
                    signatures.push_str("v1a,");
                    let whole = whole.get_or_insert_with(|| signed_content(id, timestamp, body));
                    BASE64.encode_string(private.sign(whole).to_bytes(), &mut signatures);
                }
            }
        }
        Ok(Some(HeaderValue::try_from(signatures)?))
    }

    /// The MAC of a request for each symmetric secret, in order.
    pub(crate) fn macs(
        &self,
        id: &[u8],
        timestamp: &[u8],
        body: &[u8],
    ) -> impl Iterator<Item = Hmac<Sha256>> {
        self.keys.iter().filter_map(move |key| match key {
            PreparedKey::Symmetric(keyed) => Some(mac(keyed, id, timestamp, body)),
            PreparedKey::Asymmetric(_) => None,
        })
    }
}

fn mac(keyed: &Hmac<Sha256>, id: &[u8], timestamp: &[u8], body: &[u8]) -> Hmac<Sha256> {
    let mut mac = keyed.clone();
    for part in [id, b".", timestamp, b".", body] {
        mac.update(part);
    }
    mac
}

/// The signed content of a request.
pub(crate) fn signed_content(id: &[u8], timestamp: &[u8], body: &[u8]) -> Vec<u8> {
    [id, timestamp, body].join(&b'.')
}

impl fmt::Debug for Signer {
    /// Without the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signer({} secrets)", self.keys.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert_eq, proptest};
    use sha2::Digest;

    use super::*;
    use crate::config::{ConfigError, parse_secrets};

    const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const SECOND: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

    fn signature(secrets: &str, id: &str, timestamp: &str, body: &[u8]) -> String {
        let secrets = parse_secrets("secrets", secrets).expect("secrets");
        let value = Signer::new(&secrets)
            .expect("a signer")
            .sign(id.as_bytes(), timestamp.as_bytes(), body)
            .expect("a signature")
            .expect("there are secrets");
        value.to_str().expect("ASCII").to_owned()
    }

    /// The test vector of the libraries of Standard Webhooks.
    #[test]
    fn a_signature_equals_that_of_the_standards_own_libraries() {
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

    mod asymmetric {
        use secrecy::ExposeSecret;

        use super::*;
        use crate::config::PublicKey;

        const PAIR: &str = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg==";
        const SEED: &str = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbc=";

        fn public(secret: &str) -> Result<PublicKey, ConfigError> {
            let secret: SigningSecret = secret.parse().expect("a secret");
            secret.public_key().map(|key| key.expect("asymmetric"))
        }

        /// The signature is from the specification of Standard Webhooks, the key from the tests of Svix's server.
        /// Ed25519 signatures are deterministic.
        #[test]
        fn a_signature_is_that_of_the_standard() {
            for secret in [PAIR, SEED] {
                let id = "msg_p5jXN8AQM9LWM0D4loKWxJek";
                assert_eq!(
                    signature(secret, id, "1614265330", br#"{"test": 2432232314}"#),
                    "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg=="
                );
                let public = public(secret).expect("a public key").to_string();
                assert_eq!(public, "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=");
            }
        }

        /// Keys and signatures that versions before the crate `ed25519-dalek` created, through rustls with ring.
        #[test]
        fn a_key_created_by_an_earlier_version_signs_as_it_did() {
            for (pair, key, signed) in [
                (
                    "whsk_BZysWbDjy9V9K0V2J2UIKY15MH19Ma3/rQ0dRRkaRcmCT6vPwX/JoVgFoWWAtxot15nqDVxOr3OKRdPi2FSWWQ==",
                    "whpk_gk+rz8F/yaFYBaFlgLcaLdeZ6g1cTq9zikXT4thUllk=",
                    "v1a,OK9HZsdPNWXqAnqGDQxEG6ahmapgFGmX+EUYIAvZdVVIGImJ483YvvCXbDcYuKWGZ4wYOcQQOkKUA3j4JQdGBw==",
                ),
                (
                    "whsk_wEVU5FeGCTU3IbLu2Fp+jt0wJ+vSsnlkwmKPeHlXrELM585uWyZPCaRz5iVZixXOZ3mZy8pb9xOaFuCMqD6gxQ==",
                    "whpk_zOfOblsmTwmkc+YlWYsVzmd5mcvKW/cTmhbgjKg+oMU=",
                    "v1a,nblWfd5o10LBkCD5c7MRRL14Ytb1IF85ji/X9NEHZden96wjNNlpDsQ0D5U4xa/QiAM1aWMorpqjkxODhTaFAw==",
                ),
            ] {
                let id = "0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c";
                let signature = signature(pair, id, "1795200000", br#"{"order_id":7}"#);
                assert_eq!(signature, signed);
                assert_eq!(public(pair).expect("a public key").to_string(), key);
                let secret: SigningSecret = pair.parse().expect("a secret");
                assert_eq!(secret.written().expose_secret(), pair);
            }
        }

        /// Test 1 of RFC 8032, section 7.1.
        #[test]
        fn a_public_key_is_that_of_the_rfc() {
            let public = public("whsk_nWGxne/9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A=");
            let expected = "whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=";
            assert_eq!(public.expect("a public key").to_string(), expected);
        }

        #[test]
        fn secrets_of_both_kinds_sign_in_their_order() {
            let each = [SEED, FIRST, PAIR, SECOND];
            let all = signature(&each.join(" "), "a", "1", b"{}");
            let alone = each.map(|secret| signature(secret, "a", "1", b"{}"));
            assert_eq!(all, alone.join(" "));
        }

        #[test]
        fn halves_that_do_not_belong_together_are_refused() {
            let other = PAIR.replace("Kvg==", "Kvw==");
            let secrets = parse_secrets("secrets", &format!("{FIRST} {other}")).expect("two");
            let error = Signer::new(&secrets).expect_err("another public half");
            assert_eq!(
                error,
                "secret 2: the public half does not match the private half"
            );
            assert!(public(&other).is_err());
        }

        #[test]
        fn a_new_secret_has_its_public_half() {
            let secret = SigningSecret::random_asymmetric();
            assert_eq!(secret.key().len(), 64);
            let public = secret.public_key().expect("a key").expect("asymmetric");
            assert_eq!(public.bytes(), secret.key()[32..]);
        }
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

    /// HMAC as defined in RFC 2104, for a key of at most one block.
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
        fn any_body_is_signed_as_the_rfc_defines(
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
