//! Hosts reached without the proxy.

use std::convert::Infallible;
use std::net::IpAddr;

use ipnet::IpNet;
use url::{Host, Url};

use super::text::words;
use super::{Config, Destination, Proxy};
use crate::config_error::ConfigError;

impl Config {
    /// The proxy of a destination: the destination's own setting or, unless `OUTBOX_NO_PROXY` lists the host, the
    /// general setting.
    ///
    /// # Errors
    /// A [`ConfigError`] when `OUTBOX_NO_PROXY` is invalid.
    pub(crate) fn proxy_of(&self, destination: &Destination) -> Result<Proxy, ConfigError> {
        if let Some(proxy) = &destination.proxy {
            return Ok(proxy.clone());
        }
        if self.proxy != Proxy::Direct && is_excepted(&destination.url, &self.no_proxy)? {
            return Ok(Proxy::Direct);
        }
        Ok(self.proxy.clone())
    }
}

pub(super) fn hosts(text: &str) -> Result<Vec<String>, Infallible> {
    Ok(words(text).map(str::to_ascii_lowercase).collect())
}

/// Whether the host of a URL is in a list of names, suffixes and networks.
fn is_excepted(url: &Url, no_proxy: &[String]) -> Result<bool, ConfigError> {
    for exception in no_proxy {
        let exception = Exception::parse(exception).ok_or_else(|| {
            ConfigError::new(
                "OUTBOX_NO_PROXY",
                format!(
                    "{exception:?} is not a host such as shop.example, a suffix such as .example, or a network such as 10.0.0.0/8"
                ),
            )
        })?;
        if url.host().is_some_and(|host| exception.has(&host)) {
            return Ok(true);
        }
    }
    Ok(false)
}

enum Exception<'a> {
    Network(IpNet),
    Name(&'a str),
    /// The suffix without its leading dot. The bare name also matches.
    Suffix(&'a str),
}

impl<'a> Exception<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let literal = text.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = literal.parse::<IpAddr>() {
            return Some(Self::Network(address.into()));
        }
        if let Ok(network) = text.parse() {
            return Some(Self::Network(network));
        }
        let text = text.strip_suffix('.').unwrap_or(text);
        let (name, kind): (_, fn(&'a str) -> Self) = match text.strip_prefix('.') {
            Some(suffix) => (suffix, Self::Suffix),
            None => (text, Self::Name),
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        (!name.is_empty() && name.bytes().all(is_name)).then(|| kind(name))
    }

    fn has(&self, host: &Host<&str>) -> bool {
        let name = match (host, self) {
            (Host::Ipv4(address), Self::Network(net)) => {
                return net.contains(&IpAddr::V4(*address));
            }
            (Host::Ipv6(address), Self::Network(net)) => {
                return net.contains(&IpAddr::V6(*address));
            }
            (Host::Domain(name), Self::Name(_) | Self::Suffix(_)) => {
                name.strip_suffix('.').unwrap_or(name)
            }
            _ => return false,
        };
        match self {
            Self::Network(_) => false,
            Self::Name(own) => name == *own,
            Self::Suffix(suffix) => name
                .strip_suffix(suffix)
                .is_some_and(|before| before.is_empty() || before.ends_with('.')),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn excepts(no_proxy: &str, url: &str) -> Result<bool, ConfigError> {
        let no_proxy: Vec<String> = no_proxy.split(' ').map(str::to_owned).collect();
        is_excepted(&url.parse().expect("a URL"), &no_proxy)
    }

    #[test]
    fn hosts_are_excepted_by_name_suffix_and_network() {
        for (no_proxy, url) in [
            ("shop.example", "http://shop.example/"),
            ("shop.example", "https://SHOP.example.:8443/"),
            ("shop.example.", "http://shop.example/"),
            ("a.example .shop.example", "http://shop.example/"),
            (".shop.example", "http://eu.shop.example/"),
            ("localhost", "http://localhost:1/"),
            ("10.0.0.0/8", "http://10.1.2.3/"),
            ("127.0.0.1", "http://0x7f.1:80/"),
            ("::1", "http://[::1]:80/"),
            ("[::1]", "http://[::1]/"),
            ("fd00::/8", "http://[fd00::5]/"),
        ] {
            assert_eq!(excepts(no_proxy, url), Ok(true), "{no_proxy} {url}");
        }
        for (no_proxy, url) in [
            ("shop.example", "http://eu.shop.example/"),
            ("shop.example", "http://myshop.example/"),
            (".shop.example", "http://myshop.example/"),
            (".example.shop", "http://shop.example/"),
            ("10.0.0.0/8", "http://11.0.0.1/"),
            ("127.0.0.1", "http://localhost/"),
            ("0.0.0.0/0", "http://shop.example/"),
            ("::/0", "http://1.2.3.4/"),
        ] {
            assert_eq!(excepts(no_proxy, url), Ok(false), "{no_proxy} {url}");
        }
        for no_proxy in [
            "*",
            "*.example",
            "shop.example:80",
            ".",
            "10.0.0.0/33",
            "http://a",
        ] {
            let error = excepts(no_proxy, "http://shop.example/").expect_err(no_proxy);
            assert_eq!(error.key(), "OUTBOX_NO_PROXY");
            assert!(error.to_string().contains(no_proxy), "{error}");
        }
    }
}
