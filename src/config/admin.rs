//! Settings of the binary's admin page.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use secrecy::SecretString;

use super::settings::{ConfigError, bad, unknown};
use super::text::parse_bool;

/// A token of so many characters is one that was made by a program. A shorter one may be a word of
/// somebody's, which can be guessed: the page takes the right token at any time, after however many wrong ones.
const SHORTEST_TOKEN: usize = 32;
const ADDR: &str = "OUTBOX_ADMIN_ADDR";
const TOKEN: &str = "OUTBOX_ADMIN_TOKEN";
const HOSTS: &str = "OUTBOX_ADMIN_HOSTS";

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
    pub(super) fn set(&mut self, variable: &str, value: &str) -> Result<(), ConfigError> {
        match variable {
            ADDR => self.addr = Some(parse_addr(value)?),
            TOKEN => self.token = Some(parse_token(value)?.into()),
            HOSTS => self.hosts = parse_hosts(value)?,
            "OUTBOX_ADMIN_PAYLOADS" => self.payloads = parse_bool(variable, value)?,
            "OUTBOX_ADMIN_READ_ONLY" => self.read_only = parse_bool(variable, value)?,
            _ => return Err(unknown(variable)),
        }
        Ok(())
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        match self.addr {
            Some(addr) if !addr.ip().is_loopback() && self.token.is_none() => Err(bad(
                ADDR,
                &format!(
                    "{addr} can be reached from other machines: set {TOKEN} or {TOKEN}_FILE, or listen on 127.0.0.1"
                ),
            )),
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
fn parse_addr(value: &str) -> Result<SocketAddr, ConfigError> {
    let value = value.trim();
    if let Ok(addr) = value.parse() {
        return Ok(addr);
    }
    value
        .strip_prefix("localhost:")
        .and_then(|port| port.parse().ok())
        .map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .ok_or_else(|| {
            bad(
                ADDR,
                &format!(
                    "{value:?} is no IP address with a port, such as 127.0.0.1:8687 or [::1]:8687"
                ),
            )
        })
}

/// What can stand in a header, as a bearer's token does.
fn parse_token(value: &str) -> Result<&str, ConfigError> {
    if value.len() < SHORTEST_TOKEN {
        return Err(bad(
            TOKEN,
            &format!(
                "it has {} characters; the least is {SHORTEST_TOKEN}. `openssl rand -hex 32` makes a token",
                value.len()
            ),
        ));
    }
    if !value.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(bad(
            TOKEN,
            "it may have ASCII letters, digits and signs, and no spaces",
        ));
    }
    Ok(value)
}

fn parse_hosts(value: &str) -> Result<Vec<String>, ConfigError> {
    let words = value.split([',', ' ']).filter(|word| !word.is_empty());
    words
        .map(|word| {
            let is_name = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
            let is_address = word.parse::<IpAddr>().is_ok();
            if is_address || !word.bytes().all(is_name) {
                return Err(bad(
                    HOSTS,
                    &format!("{word:?} is no name such as outbox.example.com: no scheme, no port; addresses need not be listed"),
                ));
            }
            Ok(word.to_ascii_lowercase())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(variable: &str, value: &str) -> Result<Admin, String> {
        let mut admin = Admin::default();
        let set = admin.set(variable, value).and_then(|()| admin.validate());
        set.map(|()| admin).map_err(|error| error.to_string())
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
