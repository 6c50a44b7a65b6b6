//! The key that signs sessions, forms and links. Processes with the same key accept each other's.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::PagesError;

/// Shortest secret for signatures, in bytes.
const SHORTEST: usize = 32;

type Keyed = Hmac<Sha256>;

pub(crate) struct Key([u8; 64]);

impl Key {
    pub(crate) fn random() -> Result<Self, PagesError> {
        random().map(Self)
    }

    /// From a secret that the application gives.
    pub(crate) fn of_secret(secret: &[u8]) -> Result<Self, PagesError> {
        match secret.len() {
            short @ ..SHORTEST => Err(PagesError::ShortKey(short)),
            _ => Ok(Self::derived(secret)),
        }
    }

    /// What the key signs does not lead back to the secret.
    pub(crate) fn derived(secret: &[u8]) -> Self {
        let half = |what: &[u8]| {
            let mut mac = Keyed::new_from_slice(secret).expect("HMAC takes keys of any length");
            mac.update(what);
            mac.finalize().into_bytes()
        };
        let mut key = [0; 64];
        key[..32].copy_from_slice(&half(b"admin key 1"));
        key[32..].copy_from_slice(&half(b"admin key 2"));
        Self(key)
    }

    /// The signature of a text, for this purpose only.
    pub(crate) fn signature(&self, purpose: &str, text: &str) -> String {
        hex(&self.mac(&[purpose, ":", text]).finalize().into_bytes())
    }

    /// A name for what this key signs, such as a cookie.
    pub(crate) fn name(&self, purpose: &str) -> String {
        let mut name = self.signature(purpose, "");
        name.truncate(8);
        name
    }

    /// Compares in constant time.
    pub(crate) fn is_same(&self, one: &str, other: &str) -> bool {
        let other = self.mac(&[other]).finalize().into_bytes();
        self.mac(&[one]).verify_slice(&other).is_ok()
    }

    fn mac(&self, parts: &[&str]) -> Keyed {
        let mut mac = Keyed::new((&self.0).into());
        for part in parts {
            mac.update(part.as_bytes());
        }
        mac
    }
}

/// Unpredictable bytes.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], PagesError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
