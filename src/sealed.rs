//! Secrets at rest: the database stores secrets of registered destinations sealed (encrypted) with `OUTBOX_SECRET_KEY`.
//!
//! A sealed secret is `sealed1_`, followed by the base64 of a random nonce (12 bytes), the secret encrypted with
//! AES-256-GCM, and the tag (16 bytes). The names of the outbox and the destination are authenticated with the secret,
//! so the sealed secret of one row cannot be opened in another row. The schema of the outbox is not authenticated: a
//! process that finds the outbox by the search path does not know the schema.
//!
//! The rustls provider of the process encrypts, through the interface for QUIC packets: an AEAD with a key, a nonce
//! and associated data. Every TLS provider has AES-256-GCM, so secrets at rest need no other library.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use secrecy::{ExposeSecret, SecretString};

use crate::config::{SecretKeys, SigningSecret, words};
use crate::name::OutboxName;

/// The prefix of a sealed secret. It contains the version of the format.
const PREFIX: &str = "sealed1_";
/// The prefix of a sealed secret of any version. No plain secret begins with this text.
const PREFIX_OF_ANY: &str = "sealed";
const NONCE_BYTES: usize = 12;

/// The row to which a secret belongs.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) outbox: &'a OutboxName,
    pub(crate) destination: &'a str,
}

impl Place<'_> {
    /// The authenticated names. A zero byte separates them, and no name contains a zero byte.
    fn associated_data(&self) -> Vec<u8> {
        let (outbox, destination) = (self.outbox.table(), self.destination);
        format!("diesel-outbox {PREFIX}\0{outbox}\0{destination}").into_bytes()
    }
}

/// How a secret is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    Plain,
    ByNewestKey,
    ByOlderKey,
}

/// A stored secret that could be read.
pub(crate) struct Opened {
    pub(crate) secret: SigningSecret,
    pub(crate) stored: Stored,
}

/// The secret in its stored form: sealed with the newest key, or plain if there is no key. The error is the reason.
pub(crate) fn seal(
    keys: &SecretKeys,
    place: Place<'_>,
    secret: &SigningSecret,
) -> Result<SecretString, String> {
    let Some(key) = keys.bytes().next() else {
        return Ok(secret.written());
    };
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| format!("cannot get random bytes: {error}"))?;
    let written = secret.written();
    let plain = written.expose_secret().as_bytes();
    let encrypted = aead::encrypt(key, nonce, &place.associated_data(), plain)?;
    let bytes = [&nonce[..], &encrypted].concat();
    Ok(format!("{PREFIX}{}", BASE64.encode(bytes)).into())
}

/// Why a secret cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// The secret is encrypted, and this process cannot decrypt it. Another process may be able to, with another key or
    /// a later version, unless the text is damaged.
    Locked(String),
    /// The text is not a secret.
    Bad(String),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Locked(reason) | Self::Bad(reason)) = self;
        f.write_str(reason)
    }
}

/// The secrets of a column, plain or sealed.
pub(crate) fn open_all(
    keys: &SecretKeys,
    place: Place<'_>,
    column: &str,
) -> Result<Vec<Opened>, Unreadable> {
    let open = |(index, word)| {
        let which = |reason| format!("secret {}: {reason}", index + 1);
        open(keys, place, word).map_err(|error| match error {
            Unreadable::Locked(reason) => Unreadable::Locked(which(reason)),
            Unreadable::Bad(reason) => Unreadable::Bad(which(reason)),
        })
    };
    words(column).enumerate().map(open).collect()
}

fn open(keys: &SecretKeys, place: Place<'_>, word: &str) -> Result<Opened, Unreadable> {
    let parsed = |text: &str| {
        let secret = text.parse::<SigningSecret>();
        secret.map_err(|error| Unreadable::Bad(error.reason().to_owned()))
    };
    let locked = |reason: &str| Unreadable::Locked(reason.to_owned());
    let Some(encoded) = word.strip_prefix(PREFIX) else {
        if word.starts_with(PREFIX_OF_ANY) {
            return Err(locked("encrypted by a later version"));
        }
        return Ok(Opened {
            secret: parsed(word)?,
            stored: Stored::Plain,
        });
    };
    if keys.is_empty() {
        return Err(locked(
            "encrypted, but no key is given: set OUTBOX_SECRET_KEY, or in code Destinations::with_keys",
        ));
    }
    let bytes = BASE64
        .decode(encoded)
        .map_err(|_| locked("encrypted, but damaged: not base64"))?;
    let (nonce, encrypted) = bytes
        .split_first_chunk::<NONCE_BYTES>()
        .ok_or_else(|| locked("encrypted, but truncated"))?;
    let associated_data = place.associated_data();
    for (index, key) in keys.bytes().enumerate() {
        let plain = aead::decrypt(key, *nonce, &associated_data, encrypted);
        if let Some(plain) = plain.map_err(Unreadable::Locked)? {
            return Ok(Opened {
                secret: parsed(plain.expose_secret())?,
                stored: match index {
                    0 => Stored::ByNewestKey,
                    _ => Stored::ByOlderKey,
                },
            });
        }
    }
    Err(locked(
        "encrypted, but no key of OUTBOX_SECRET_KEY decrypts it: the key is missing, or the secret belongs to another destination or outbox",
    ))
}

/// AES-256-GCM.
#[cfg(feature = "http")]
mod aead {
    use rustls::CipherSuite::TLS13_AES_256_GCM_SHA384;
    use rustls::crypto::cipher::{AeadKey, Iv};
    use rustls::quic::PacketKey;
    use secrecy::SecretString;

    use super::NONCE_BYTES;
    use crate::provider::{MISSING, provider};

    /// The packet number is XORed into the IV. With 0, the IV is the nonce.
    const PACKET: u64 = 0;

    /// The ciphertext, followed by the tag.
    pub(super) fn encrypt(
        key: &[u8; 32],
        nonce: [u8; NONCE_BYTES],
        associated_data: &[u8],
        plain: &[u8],
    ) -> Result<Vec<u8>, String> {
        let mut encrypted = plain.to_vec();
        let tag = cipher(key, nonce)?
            .encrypt_in_place(PACKET, associated_data, &mut encrypted)
            .map_err(|error| error.to_string())?;
        encrypted.extend_from_slice(tag.as_ref());
        Ok(encrypted)
    }

    /// `None`: encrypted with another key, or with other associated data.
    pub(super) fn decrypt(
        key: &[u8; 32],
        nonce: [u8; NONCE_BYTES],
        associated_data: &[u8],
        encrypted: &[u8],
    ) -> Result<Option<SecretString>, String> {
        let cipher = cipher(key, nonce)?;
        let mut bytes = encrypted.to_vec();
        let plain = cipher.decrypt_in_place(PACKET, associated_data, &mut bytes);
        let plain = plain.ok().and_then(|plain| str::from_utf8(plain).ok());
        Ok(plain.map(SecretString::from))
    }

    fn cipher(key: &[u8; 32], nonce: [u8; NONCE_BYTES]) -> Result<Box<dyn PacketKey>, String> {
        let provider = provider()
            .ok_or_else(|| format!("OUTBOX_SECRET_KEY needs cryptography, and {MISSING}"))?;
        let mut suites = provider.cipher_suites.iter();
        let suite = suites.find(|suite| suite.suite() == TLS13_AES_256_GCM_SHA384);
        let algorithm = suite.and_then(|suite| suite.tls13()?.quic);
        let algorithm = algorithm.ok_or(
            "OUTBOX_SECRET_KEY needs AES-256-GCM for QUIC, which the installed CryptoProvider of rustls lacks",
        )?;
        Ok(algorithm.packet_key(AeadKey::from(*key), Iv::new(nonce)))
    }
}

#[cfg(not(feature = "http"))]
mod aead {
    use secrecy::SecretString;

    use super::NONCE_BYTES;

    const MISSING: &str = "OUTBOX_SECRET_KEY needs cryptography, and this build has none: enable the feature `ring` or `aws-lc-rs` of diesel-outbox";

    pub(super) fn encrypt(
        _: &[u8; 32],
        _: [u8; NONCE_BYTES],
        _: &[u8],
        _: &[u8],
    ) -> Result<Vec<u8>, String> {
        Err(MISSING.to_owned())
    }

    pub(super) fn decrypt(
        _: &[u8; 32],
        _: [u8; NONCE_BYTES],
        _: &[u8],
        _: &[u8],
    ) -> Result<Option<SecretString>, String> {
        Err(MISSING.to_owned())
    }
}

#[cfg(test)]
mod tests;
