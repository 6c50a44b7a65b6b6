//! The `[destinations.NAME]` tables.

use std::net::IpAddr;

use ipnet::IpNet;
use secrecy::SecretString;
use serde_json::Value;

use super::values::{bytes, content, list, path, switch};
use crate::config::auth::SECRET_KEYS;
use crate::config::section::{Section, both, shown};
use crate::config::values::{count, duration, parsed, text, unshown, wrong_type};
use crate::config::{
    Auth, ConfigError, Destination, FeedDestination, PolicyOption, Proxy, Roots, SigningSecret,
    Tls, TlsVersion, parse_secrets,
};
use crate::message::MAX_PAYLOAD_BYTES;

/// The keys of a feed, beside `feed = true`.
const OF_FEEDS: [&str; 2] = [FEED, "expires_after"];
const FEED: &str = "feed";

/// The keys of a destination, beside the options of its policy.
const OWN_KEYS: &[&str] = &[
    FEED,
    "url",
    "url_file",
    "secret",
    "secret_file",
    "batch_size",
    "batch_linger",
    "headers",
    "auth",
    "max_payload",
    "internal",
    "allow",
    "https_only",
    "tls",
    "proxy",
];
const TLS_KEYS: &[&str] = &[
    "roots",
    "client_cert_file",
    "client_key_file",
    "min_version",
];
const LONGEST_NAME: usize = 255;
const URL: &str = "expected a URL such as https://shop.example/events";

/// The keys of a destination.
pub(super) fn keys() -> Vec<&'static str> {
    let options = PolicyOption::ALL.iter().map(|option| option.name);
    OWN_KEYS.iter().copied().chain(options).collect()
}

/// A destination that is sent to, or one that is read.
pub(super) enum Read {
    Sent(Box<Destination>),
    Feed(FeedDestination),
}

pub(super) fn read(name: &str, value: Value) -> Result<Read, ConfigError> {
    let at = format!("destinations.{}", shown(name));
    if name.is_empty() || name.len() > LONGEST_NAME || name.contains(char::is_control) {
        let reason = "a name must have 1 to 255 bytes and no control characters";
        return Err(ConfigError::new(at, reason));
    }
    let others = (value.as_object()).and_then(|table| {
        let mut keys = table.keys();
        keys.find(|key| !OF_FEEDS.contains(&key.as_str())).cloned()
    });
    let mut section = Section::new(at, value, &keys())?;
    if section.take(FEED, switch)? == Some(true) {
        if let Some(other) = others {
            let reason = "a feed is read, and nothing is sent to it: remove this key, or feed";
            return Err(ConfigError::new(section.key(&other), reason));
        }
        let mut feed = FeedDestination::new(name);
        feed.expires_after = section.take("expires_after", duration)?;
        return Ok(Read::Feed(feed));
    }
    section.one_of("url_file", "url")?;
    let of_file = section.take("url_file", content)?;
    let (key, url) = match of_file {
        Some(url) => ("url_file", url),
        None => ("url", section.required("url", text)?),
    };
    let mut destination = Destination::new(name, &url)
        .map_err(|error| unshown(&section.key(key), error.reason(), &url, URL))?;
    request(&mut section, &mut destination)?;
    destination.policy.read(&mut section)?;
    way(&mut section, &mut destination)?;
    destination
        .check()
        .map_err(|(name, reason)| ConfigError::new(section.key(name), reason))?;
    Ok(Read::Sent(Box::new(destination)))
}

/// The request.
fn request(section: &mut Section, destination: &mut Destination) -> Result<(), ConfigError> {
    let batch = &mut destination.request_batch;
    section.set("batch_size", &mut batch.size, count)?;
    section.set("batch_linger", &mut batch.linger, duration)?;
    section.one_of("secret_file", "secret")?;
    section.set("secret", &mut destination.secrets, secrets)?;
    section.set("secret_file", &mut destination.secrets, |key, value| {
        parse_secrets(key, &content(key, value)?)
    })?;
    section.set("headers", &mut destination.headers, headers)?;
    destination.auth = section.take("auth", auth)?;
    destination.max_payload_bytes = section.take("max_payload", bytes(MAX_PAYLOAD_BYTES))?;
    Ok(())
}

/// Allowed addresses, TLS and proxy.
fn way(section: &mut Section, destination: &mut Destination) -> Result<(), ConfigError> {
    destination.internal = section.take("internal", switch)?;
    section.set("allow", &mut destination.allow, networks)?;
    destination.https_only = section.take("https_only", switch)?;
    section.set("tls", &mut destination.tls, tls)?;
    let takes = "expected direct, or a URL such as http://proxy.example:3128";
    destination.proxy = section.take("proxy", parsed(takes, Proxy::of))?;
    Ok(())
}

/// Text or an array of texts. Each text may hold several secrets.
fn secrets(key: &str, value: Value) -> Result<Vec<SigningSecret>, ConfigError> {
    let Value::Array(values) = value else {
        return parse_secrets(key, &text(key, value)?);
    };
    let mut secrets = Vec::new();
    for (index, value) in values.into_iter().enumerate() {
        let key = format!("{key}[{index}]");
        secrets.extend(parse_secrets(&key, &text(&key, value)?)?);
    }
    if secrets.is_empty() {
        return Err(ConfigError::new(key, "must not be empty"));
    }
    Ok(secrets)
}

/// `name = "value"` or `name = { file = "path" }`.
fn headers(key: &str, value: Value) -> Result<Vec<(String, SecretString)>, ConfigError> {
    let mut headers: Vec<(String, SecretString)> = Vec::new();
    for (key, name, value) in Section::open(key.to_owned(), value)?.entries() {
        if headers
            .iter()
            .any(|(other, _)| other.eq_ignore_ascii_case(&name))
        {
            return Err(ConfigError::new(key, "the header is set twice"));
        }
        let value = match value {
            Value::String(value) => value,
            Value::Object(_) => {
                let mut file = Section::new(key, value, &["file"])?;
                file.required("file", content)?
            }
            other => return Err(wrong_type(&key, &other, "text or { file = \"path\" }")),
        };
        headers.push((name, value.into()));
    }
    Ok(headers)
}

/// A table, whose secrets may be in files: `client_secret_file` instead of `client_secret`.
fn auth(key: &str, mut value: Value) -> Result<Auth, ConfigError> {
    if let Some(table) = value.as_object_mut() {
        for name in SECRET_KEYS {
            let of_file = format!("{name}_file");
            if let Some(path) = table.remove(&of_file) {
                let of_file = format!("{key}.{of_file}");
                if table.contains_key(name) {
                    return Err(both(&of_file, name));
                }
                table.insert(name.to_owned(), content(&of_file, path)?.into());
            }
        }
    }
    Auth::read(key, value)
}

/// Networks such as `10.0.0.0/8`, or plain addresses.
fn networks(key: &str, value: Value) -> Result<Vec<IpNet>, ConfigError> {
    let network = |(index, text): (usize, String)| {
        let address = text.parse::<IpAddr>().map(IpNet::from);
        address.or_else(|_| text.parse()).map_err(|_| {
            let reason = "not a network such as 10.0.0.0/8, and not an IP address";
            ConfigError::new(format!("{key}[{index}]"), reason)
        })
    };
    list(key, value)?
        .into_iter()
        .enumerate()
        .map(network)
        .collect()
}

fn tls(key: &str, value: Value) -> Result<Tls, ConfigError> {
    let mut section = Section::new(key.to_owned(), value, TLS_KEYS)?;
    let version = |key: &str, value| {
        let value = match value {
            Value::Number(number) if number.is_f64() => Value::String(number.to_string()),
            other => other,
        };
        parsed("expected 1.2 or 1.3", TlsVersion::read)(key, value)
    };
    Ok(Tls {
        roots: section.take(
            "roots",
            parsed("expected bundled, system or a path", Roots::read),
        )?,
        client_cert_file: section.take("client_cert_file", path)?,
        client_key_file: section.take("client_key_file", path)?,
        min_version: section.take("min_version", version)?.unwrap_or_default(),
    })
}
