//! Assertions with which a client proves to a token server who it is: signed JWTs (RFC 7523, 2.2).
//!
//! The cryptography is that of TLS: the signatures of TLS 1.2 and 1.3 are those of JWTs, except that ECDSA has another
//! encoding.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use rustls::SignatureScheme;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::sign::SigningKey;
use secrecy::ExposeSecret;
use serde_json::json;
use uuid::Uuid;

use crate::config::ClientKey;
use crate::provider::{MISSING, provider};

/// How long an assertion is valid.
const SECONDS: u64 = 60;

/// Signs the assertions of one client.
pub(super) struct Assertions {
    client_id: String,
    audience: String,
    key_id: Option<String>,
    key: Arc<dyn SigningKey>,
}

impl Assertions {
    /// The error is the reason.
    pub(super) fn new(client_id: &str, key: &ClientKey) -> Result<Self, String> {
        let pem = key.private_key.expose_secret().as_bytes();
        let der = PrivateKeyDer::from_pem_slice(pem)
            .map_err(|_| "private_key is not a PEM key (BEGIN PRIVATE KEY)".to_owned())?;
        let provider = provider().ok_or(format!(
            "a signed assertion needs cryptography, and {MISSING}"
        ))?;
        let loaded = provider.key_provider.load_private_key(der);
        let loaded = loaded.map_err(|error| format!("private_key cannot be used: {error}"))?;
        let assertions = Self {
            client_id: client_id.to_owned(),
            audience: key.audience.clone(),
            key_id: key.key_id.clone(),
            key: loaded,
        };
        assertions.sign(UNIX_EPOCH)?;
        Ok(assertions)
    }

    /// A new assertion. The error is the reason.
    pub(super) fn sign(&self, now: SystemTime) -> Result<String, String> {
        use SignatureScheme as Scheme;

        let offered = [
            Scheme::ED25519,
            Scheme::ECDSA_NISTP256_SHA256,
            Scheme::ECDSA_NISTP384_SHA384,
            Scheme::RSA_PKCS1_SHA256,
        ];
        let signer = self.key.choose_scheme(&offered);
        let signer = signer.ok_or("private_key is neither RSA, P-256, P-384 nor Ed25519")?;
        let (algorithm, half) = match signer.scheme() {
            Scheme::ED25519 => ("EdDSA", None),
            Scheme::ECDSA_NISTP256_SHA256 => ("ES256", Some(32)),
            Scheme::ECDSA_NISTP384_SHA384 => ("ES384", Some(48)),
            _ => ("RS256", None),
        };
        let mut header = json!({ "alg": algorithm, "typ": "JWT" });
        if let Some(id) = &self.key_id {
            header["kid"] = json!(id);
        }
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let claims = json!({
            "iss": self.client_id,
            "sub": self.client_id,
            "aud": self.audience,
            "jti": Uuid::now_v7().to_string(),
            "iat": now,
            "exp": now + SECONDS,
        });
        let [header, claims] = [header, claims].map(|part| BASE64.encode(part.to_string()));
        let signed = format!("{header}.{claims}");
        let signature = signer.sign(signed.as_bytes());
        let mut signature = signature.map_err(|error| error.to_string())?;
        if let Some(half) = half {
            signature = joined(&signature, half).ok_or("the signature has an unknown form")?;
        }
        Ok(format!("{signed}.{}", BASE64.encode(signature)))
    }
}

/// The two numbers of an ECDSA signature, each with this length, as JWTs have them (RFC 7518, 3.4). TLS has a DER
/// sequence of two integers.
fn joined(der: &[u8], half: usize) -> Option<Vec<u8>> {
    let [0x30, length, rest @ ..] = der else {
        return None;
    };
    let mut rest = (usize::from(*length) == rest.len()).then_some(rest)?;
    let mut joined = vec![0; 2 * half];
    for place in joined.chunks_exact_mut(half) {
        let [0x02, length, after @ ..] = rest else {
            return None;
        };
        let (number, after) = after.split_at_checked((*length).into())?;
        let number = number.strip_prefix(&[0]).unwrap_or(number);
        let start = half.checked_sub(number.len())?;
        place[start..].copy_from_slice(number);
        rest = after;
    }
    rest.is_empty().then_some(joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R59
    #[test]
    fn the_numbers_of_an_ecdsa_signature_have_their_full_length() {
        let der = [0x30, 9, 2, 3, 0, 0x80, 1, 2, 2, 5, 6];
        assert_eq!(joined(&der, 3), Some(vec![0, 0x80, 1, 0, 5, 6]));
        for bad in [
            &der[..10],
            &[0x31, 9, 2, 3, 0, 0x80, 1, 2, 2, 5, 6],
            &[0x30, 5, 2, 3, 0, 0x80, 1],
            &[0x30, 10, 2, 3, 0, 0x80, 1, 2, 2, 5, 6, 7],
            &[0x30, 8, 2, 4, 1, 2, 3, 4, 2, 0],
            &[0x30, 4, 2, 9, 1, 2],
            &[],
        ] {
            assert_eq!(joined(bad, 3), None, "{bad:?}");
        }
    }
}
