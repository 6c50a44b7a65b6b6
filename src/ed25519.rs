//! Ed25519 signatures. The rustls provider of the process creates and verifies them.
//!
//! Certificates need Ed25519, so every TLS provider has it, and the relay needs no other library.
//! A provider reads private keys as PKCS #8 and returns public keys as SubjectPublicKeyInfo (RFC 8410). For Ed25519,
//! both formats are a fixed prefix followed by the key.

use std::fmt;
use std::sync::Arc;

use rustls::SignatureScheme::ED25519;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, SignatureVerificationAlgorithm};
use rustls::sign::Signer;

use crate::provider::{MISSING, provider};

/// The length of a public key, and of a private key's seed.
const KEY_BYTES: usize = 32;
/// The prefix of a seed in PKCS #8, version 1.
const PKCS8: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];
/// The prefix of a public key in SubjectPublicKeyInfo.
const SPKI: [u8; 12] = [
    0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00,
];

/// A key that signs.
#[derive(Clone)]
pub(crate) struct PrivateKey {
    signer: Arc<dyn Signer>,
    /// `None`: the secret did not contain the public key, and the provider does not derive it.
    public: Option<[u8; KEY_BYTES]>,
}

impl PrivateKey {
    /// Reads a seed, or a seed followed by its public key. The error is the reason.
    pub(crate) fn new(bytes: &[u8]) -> Result<Self, String> {
        let (seed, given) = bytes
            .split_first_chunk::<KEY_BYTES>()
            .ok_or("the key is too short")?;
        let given: Option<[u8; KEY_BYTES]> = match given {
            [] => None,
            given => Some(given.try_into().map_err(|_| "the key is too long")?),
        };
        let provider = provider().ok_or_else(no_provider)?;
        let der = PrivatePkcs8KeyDer::from([&PKCS8[..], seed].concat());
        let key = provider
            .key_provider
            .load_private_key(PrivateKeyDer::from(der))
            .map_err(|error| format!("the installed CryptoProvider of rustls: {error}"))?;
        let derived = key.public_key();
        let derived = derived
            .as_ref()
            .and_then(|spki| spki.as_ref().strip_prefix(&SPKI[..])?.try_into().ok());
        if given.is_some() && derived.is_some() && given != derived {
            return Err("the public half does not match the private half".to_owned());
        }
        let signer = key.choose_scheme(&[ED25519]).ok_or(NO_ED25519)?;
        Ok(Self {
            signer: Arc::from(signer),
            public: derived.or(given),
        })
    }

    /// Signs the content. The signature has 64 bytes.
    pub(crate) fn sign(&self, content: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        self.signer.sign(content)
    }

    /// The public key, which verifies the signatures. The error is the reason.
    pub(crate) fn public(&self) -> Result<[u8; KEY_BYTES], String> {
        self.public.ok_or_else(|| {
            "the installed CryptoProvider of rustls does not derive public keys: give the private key with its public half, 64 bytes".to_owned()
        })
    }
}

impl fmt::Debug for PrivateKey {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(***)")
    }
}

/// Public keys. A signature is valid if any of the keys verifies it.
#[derive(Debug, Clone)]
pub(crate) struct PublicKeys {
    keys: Vec<[u8; KEY_BYTES]>,
    algorithm: &'static dyn SignatureVerificationAlgorithm,
}

impl PublicKeys {
    /// The error is the reason.
    pub(crate) fn new(keys: Vec<[u8; KEY_BYTES]>) -> Result<Self, String> {
        let provider = provider().ok_or_else(no_provider)?;
        let mut known = provider.signature_verification_algorithms.mapping.iter();
        let algorithms = known.find(|(scheme, _)| *scheme == ED25519);
        let algorithm = algorithms.and_then(|(_, algorithms)| algorithms.first());
        let algorithm = *algorithm.ok_or(NO_ED25519)?;
        Ok(Self { keys, algorithm })
    }

    /// Whether one of the keys verifies the signature of the content.
    pub(crate) fn verify(&self, content: &[u8], signature: &[u8]) -> bool {
        let by = |key: &[u8; KEY_BYTES]| {
            let verified = self.algorithm.verify_signature(key, content, signature);
            verified.is_ok()
        };
        self.keys.iter().any(by)
    }
}

const NO_ED25519: &str = "the installed CryptoProvider of rustls has no Ed25519";

fn no_provider() -> String {
    format!("asymmetric signatures (v1a) need cryptography, and {MISSING}")
}
