//! Settings of the binary's admin page.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use secrecy::SecretString;

use super::error::ConfigError;
use super::text::words;

/// A token of so many characters is one that was made by a program. A shorter one may be a word of
/// somebody's, which can be guessed: the page takes the right token at any time, after however many wrong ones.
const SHORTEST_TOKEN: usize = 32;
const ADDR: &str = "OUTBOX_ADMIN_ADDR";
const TOKEN: &str = "OUTBOX_ADMIN_TOKEN";

/// The admin page of the binary. The library serves none, and leaves these to it.
///
/// ```
/// use diesel_outbox::Config;
///
/// let mut config = Config::default();
/// config.set("OUTBOX_ADMIN_ADDR", "0.0.0.0:8687")?;
/// // Whoever reaches the machine would reach the page.
/// assert_eq!(config.validate().map_err(|error| error.key().to_owned()), Err("OUTBOX_ADMIN_ADDR".to_owned()));
/// config.set("OUTBOX_ADMIN_TOKEN", "9f1c6e0f7a2b4d58b1d3c5e7f9a0b2c4")?;
/// config.validate()?;
/// assert!(!config.summary().contains("9f1c"));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct Admin {
    /// Where it listens; `None`: there is none.
    pub addr: Option<SocketAddr>,
    /// What whoever comes has to know. Needed where it listens beyond the loopback.
    pub token: Option<SecretString>,
    /// Names by which it is reached, in lower case, beside `localhost` and IP addresses. Others are
    /// refused: a page of somebody else's could have its own name lead here.
    pub hosts: Vec<String>,
    /// Whether payloads, headers and answers are shown.
    pub payloads: bool,
    /// Whether it changes nothing.
    pub read_only: bool,
}

impl Admin {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        match self.addr {
            Some(addr) if !addr.ip().is_loopback() && self.token.is_none() => {
                Err(ConfigError::new(
                    ADDR,
                    format!(
                        "{addr} can be reached from other machines: set {TOKEN} or {TOKEN}_FILE, or listen on 127.0.0.1"
                    ),
                ))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(addr) = self.addr else {
            return f.write_str("off");
        };
        let token = if self.token.is_some() {
            "token"
        } else {
            "open"
        };
        write!(f, "{addr},{token}")?;
        if self.payloads {
            f.write_str(",payloads")?;
        }
        if self.read_only {
            f.write_str(",read_only")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Admin({self})")
    }
}

/// An address with a port; `localhost` is the loopback of IPv4.
pub(super) fn addr(text: &str) -> Result<SocketAddr, String> {
    let text = text.trim();
    if let Ok(addr) = text.parse() {
        return Ok(addr);
    }
    let port = text.strip_prefix("localhost:");
    port.and_then(|port| port.parse().ok())
        .map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .ok_or_else(|| {
            format!("{text:?} is no IP address with a port, such as 127.0.0.1:8687 or [::1]:8687")
        })
}

/// What can stand in a header, as a bearer's token does.
pub(super) fn token(text: &str) -> Result<SecretString, String> {
    if text.len() < SHORTEST_TOKEN {
        return Err(format!(
            "it has {} characters; the least is {SHORTEST_TOKEN}. `openssl rand -hex 32` makes a token",
            text.len()
        ));
    }
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err("it may have ASCII letters, digits and signs, and no spaces".to_owned());
    }
    Ok(text.into())
}

pub(super) fn hosts(text: &str) -> Result<Vec<String>, String> {
    let host = |word: &str| {
        let is_name = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
        let is_address = word.parse::<IpAddr>().is_ok();
        if is_address || !word.bytes().all(is_name) {
            return Err(format!(
                "{word:?} is no name such as outbox.example.com: no scheme, no port; addresses need not be listed"
            ));
        }
        Ok(word.to_ascii_lowercase())
    };
    words(text).map(host).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const HOSTS: &str = "OUTBOX_ADMIN_HOSTS";

    fn set(variable: &str, value: &str) -> Result<Admin, String> {
        let mut config = Config::default();
        let set = config.set(variable, value);
        let set = set.and_then(|()| config.admin.validate());
        set.map(|()| config.admin)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn an_address_is_one_of_the_loopback_or_has_a_token() {
        for good in [
            "127.0.0.1:8687",
            "[::1]:8687",
            "localhost:8687",
            "127.8.9.1:0",
        ] {
            assert!(set(ADDR, good).is_ok(), "{good}");
        }
        for bad in [
            "0.0.0.0:8687",
            "[::]:8687",
            "10.0.0.1:8687",
            "[::ffff:10.0.0.1]:1",
        ] {
            let error = set(ADDR, bad).expect_err("it is refused");
            assert!(error.contains("OUTBOX_ADMIN_TOKEN"), "{bad}: {error}");
        }
        for bad in [
            "",
            "true",
            "8687",
            ":8687",
            "localhost",
            "example.com:80",
            "http://127.0.0.1:1",
        ] {
            let error = set(ADDR, bad).expect_err("it is refused");
            assert!(
                error.contains("no IP address with a port"),
                "{bad}: {error}"
            );
        }
    }

    #[test]
    fn a_token_is_long_and_can_stand_in_a_header() {
        assert!(set(TOKEN, "0123456789abcdef0123456789abcdef").is_ok());
        for (bad, reason) in [
            ("", "the least is 32"),
            ("0123456789abcdef", "it has 16 characters; the least is 32"),
            ("0123456789abcdef0123456789abcde", "the least is 32"),
            ("0123456789abcdef 0123456789abcdef", "no spaces"),
            ("0123456789abcdef0123456789abcd\u{e9}", "no spaces"),
        ] {
            let error = set(TOKEN, bad).expect_err("it is refused");
            assert!(error.contains(reason), "{error}");
            assert!(bad.is_empty() || !error.contains(bad), "{error}");
        }
    }

    #[test]
    fn hosts_are_names() {
        let admin = set(HOSTS, "Outbox.example.com, outbox").expect("names");
        assert_eq!(admin.hosts, ["outbox.example.com", "outbox"]);
        for bad in ["http://outbox", "outbox:80", "10.0.0.1", "[::1]", "*"] {
            assert!(set(HOSTS, bad).is_err(), "{bad}");
        }
    }
}
