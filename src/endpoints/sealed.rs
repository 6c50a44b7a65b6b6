//! Secrets at rest: the database stores secrets of endpoints sealed (encrypted) with `OUTBOX_SECRET_KEY`.
//!
//! A sealed secret is `sealed1_`, followed by the base64 of a random nonce (12 bytes), the secret encrypted with
//! AES-256-GCM, and the tag (16 bytes). The names of the outbox and the endpoint are authenticated with the secret,
//! so the sealed secret of one row cannot be opened in another row. The schema of the outbox is not authenticated: a
//! process that finds the outbox by the search path does not know the schema.

use std::fmt;

use aes_gcm::aead::{Aead, Payload};
use aes_gcm::{Aes256Gcm, KeyInit};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use secrecy::{ExposeSecret, SecretString};

use crate::config::{Auth, ConfigError, SecretKeys, SigningSecret, words};
use crate::name::OutboxName;

/// The prefix of a sealed secret. It contains the version of the format.
const PREFIX: &str = "sealed1_";
/// The prefix of a sealed secret of any version. No plain secret begins with this text.
const PREFIX_OF_ANY: &str = "sealed";
const NONCE_BYTES: usize = 12;

/// The row to which a secret belongs.
#[derive(Clone, Copy)]
pub(crate) struct SecretRow<'a> {
    pub(crate) outbox: &'a OutboxName,
    pub(crate) destination: &'a str,
}

impl SecretRow<'_> {
    /// The authenticated names. A zero byte separates them, and no name contains a zero byte.
    fn associated_data(&self) -> Vec<u8> {
        let (outbox, destination) = (self.outbox.table(), self.destination);
        format!("diesel-outbox {PREFIX}\0{outbox}\0{destination}").into_bytes()
    }
}

/// How a secret is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredSecret {
    Plain,
    ByNewestKey,
    ByOlderKey,
}

/// A stored secret that could be read.
pub(crate) struct Opened<T = SigningSecret> {
    pub(crate) secret: T,
    pub(crate) stored: StoredSecret,
}

/// The text of a secret in its stored form: sealed with the newest key, or plain if there is no key. The error is the
/// reason.
pub(crate) fn seal(
    keys: &SecretKeys,
    place: SecretRow<'_>,
    written: &SecretString,
) -> Result<SecretString, String> {
    let Some(key) = keys.bytes().next() else {
        return Ok(written.clone());
    };
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| format!("cannot get random bytes: {error}"))?;
    let payload = Payload {
        msg: written.expose_secret().as_bytes(),
        aad: &place.associated_data(),
    };
    let encrypted = Aes256Gcm::new(key.into())
        .encrypt(&nonce.into(), payload)
        .map_err(|error| format!("cannot encrypt: {error}"))?;
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
    place: SecretRow<'_>,
    column: &str,
) -> Result<Vec<Opened>, Unreadable> {
    let parse = |text: &str| text.parse();
    let open = |(index, word)| {
        let which = |reason| format!("secret {}: {reason}", index + 1);
        open(keys, place, word, parse).map_err(|error| match error {
            Unreadable::Locked(reason) => Unreadable::Locked(which(reason)),
            Unreadable::Bad(reason) => Unreadable::Bad(which(reason)),
        })
    };
    words(column).enumerate().map(open).collect()
}

/// The authentication of a column, plain or sealed.
pub(crate) fn open_auth(
    keys: &SecretKeys,
    place: SecretRow<'_>,
    column: &str,
) -> Result<Opened<Auth>, Unreadable> {
    open(keys, place, column, str::parse)
}

fn open<T>(
    keys: &SecretKeys,
    place: SecretRow<'_>,
    word: &str,
    parse: impl Fn(&str) -> Result<T, ConfigError>,
) -> Result<Opened<T>, Unreadable> {
    let parsed =
        |text: &str| parse(text).map_err(|error| Unreadable::Bad(error.reason().to_owned()));
    let locked = |reason: &str| Unreadable::Locked(reason.to_owned());
    let Some(encoded) = word.strip_prefix(PREFIX) else {
        if word.starts_with(PREFIX_OF_ANY) {
            return Err(locked("encrypted by a later version"));
        }
        return Ok(Opened {
            secret: parsed(word)?,
            stored: StoredSecret::Plain,
        });
    };
    if keys.is_empty() {
        return Err(locked(
            "encrypted, but no key is given: set OUTBOX_SECRET_KEY, or in code Endpoints::with_keys",
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
        let payload = Payload {
            msg: encrypted,
            aad: &associated_data,
        };
        // Fails if the secret was encrypted with another key, or with other associated data.
        let plain = Aes256Gcm::new(key.into()).decrypt(nonce.into(), payload);
        let plain = plain.ok().and_then(|plain| String::from_utf8(plain).ok());
        if let Some(plain) = plain.map(SecretString::from) {
            return Ok(Opened {
                secret: parsed(plain.expose_secret())?,
                stored: match index {
                    0 => StoredSecret::ByNewestKey,
                    _ => StoredSecret::ByOlderKey,
                },
            });
        }
    }
    Err(locked(
        "encrypted, but no key of OUTBOX_SECRET_KEY decrypts it: the key is missing, or the secret belongs to another destination or outbox",
    ))
}

#[cfg(test)]
mod tests;
