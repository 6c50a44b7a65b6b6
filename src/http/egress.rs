//! The addresses that a destination may have. No URL and no name can lead the relay to its own host, its
//! network, or the metadata service of a cloud, which hands out credentials.
//!
//! The relay checks addresses, not names, and connects to exactly the addresses that it has checked. A name
//! that resolves differently the next time (DNS rebinding) does not help.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use url::Host;

use super::address::{metadata, special};
use crate::config::{Config, ConfigError, DEFAULT_DESTINATION, Destination};

/// The addresses that a destination may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Egress {
    /// All addresses.
    Any,
    /// All addresses except link-local and cloud metadata addresses, which no receiver has.
    NoMetadata,
    /// Public addresses, and addresses in the allowed networks.
    Public { allow: Vec<IpNet> },
    /// The addresses of an endpoint, which has no allowed networks.
    Endpoint { public_only: bool },
}

impl Egress {
    pub(super) fn of(destination: &Destination, config: &Config) -> Self {
        let allow = || destination.allow.clone();
        match destination.internal {
            Some(true) => Self::Any,
            Some(false) => Self::Public { allow: allow() },
            None if config.public_only || !destination.allow.is_empty() => {
                Self::Public { allow: allow() }
            }
            None => Self::NoMetadata,
        }
    }

    pub(super) fn of_endpoints(config: &Config) -> Self {
        Self::Endpoint {
            public_only: config.endpoint_public_only,
        }
    }

    /// The family of a refused address. `None`: the address is allowed.
    // Why: docs/decisions.md#resolved-addresses
    pub(super) fn refusal(&self, address: IpAddr) -> Option<&'static str> {
        match self {
            Self::Any => None,
            Self::NoMetadata | Self::Endpoint { public_only: false } => metadata(address),
            Self::Public { allow } if allow.iter().any(|net| net.contains(&address)) => None,
            Self::Public { .. } | Self::Endpoint { public_only: true } => {
                metadata(address).or_else(|| special(address))
            }
        }
    }

    /// The allowed addresses of `host`. An error if all addresses are refused.
    pub(super) fn filter(
        &self,
        host: &str,
        addresses: &[SocketAddr],
    ) -> Result<Vec<SocketAddr>, Blocked> {
        let mut blocked = None;
        let mut good = Vec::with_capacity(addresses.len());
        for address in addresses {
            match self.refusal(address.ip()) {
                None => good.push(*address),
                Some(family) => {
                    blocked.get_or_insert_with(|| self.blocked(host, address.ip(), family));
                }
            }
        }
        match blocked {
            Some(mut blocked) if good.is_empty() => {
                blocked.is_for_others = addresses.iter().any(|one| self.leaves_to_others(one.ip()));
                Err(blocked)
            }
            _ => Ok(good),
        }
    }

    /// Refuses a URL with a refused IP address as host, in any notation: `Url` has normalised the address.
    pub(super) fn check_literal(
        &self,
        destination: &Destination,
        config: &Config,
    ) -> Result<(), ConfigError> {
        let address = match destination.url.host() {
            Some(Host::Ipv4(address)) => IpAddr::V4(address),
            Some(Host::Ipv6(address)) => IpAddr::V6(address),
            Some(Host::Domain(_)) | None => return Ok(()),
        };
        let Some(family) = self.refusal(address) else {
            return Ok(());
        };
        let name = &destination.name;
        let key = if name == DEFAULT_DESTINATION && config.url.is_some() {
            "OUTBOX_URL".to_owned()
        } else {
            format!("destinations.{name}.url")
        };
        let blocked = self.blocked(&address.to_string(), address, family);
        Err(ConfigError::new(key, blocked.to_string()))
    }

    /// Whether a relay with other settings may send to this refused address of an endpoint.
    fn leaves_to_others(&self, address: IpAddr) -> bool {
        matches!(self, Self::Endpoint { public_only: true }) && metadata(address).is_none()
    }

    fn blocked(&self, host: &str, address: IpAddr, family: &'static str) -> Blocked {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Blocked {
            address,
            family,
            of: (host.parse() != Ok(address)).then(|| host.to_owned()),
            is_for_others: self.leaves_to_others(address),
            cure: match self {
                Self::Public { .. } => {
                    "allowed are public addresses and networks in `allow`, or any address with `internal = true`"
                }
                Self::Any | Self::NoMetadata => "allowed only with `internal = true`",
                Self::Endpoint { .. } => {
                    "endpoints must have public addresses (`OUTBOX_ENDPOINT_PUBLIC_ONLY`)"
                }
            },
        }
    }
}

/// The error of a destination whose addresses are all refused. Holds the first of them.
#[derive(Debug)]
pub(super) struct Blocked {
    address: IpAddr,
    family: &'static str,
    /// The resolved name, if the URL holds a name.
    of: Option<String>,
    /// Whether only a setting of this relay refuses an address of an endpoint: another relay may send.
    pub(super) is_for_others: bool,
    cure: &'static str,
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blocked address {} ({})", self.address, self.family)?;
        if let Some(host) = &self.of {
            write!(f, " of {host}")?;
        }
        write!(f, ": {}", self.cure)
    }
}

impl std::error::Error for Blocked {}

#[cfg(test)]
mod tests {
    use super::*;

    const PUBLIC: Egress = Egress::Public { allow: Vec::new() };

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn the_level_follows_from_the_destination_and_then_from_the_setting() {
        let allow: Vec<IpNet> = vec!["10.0.0.0/8".parse().expect("a network")];
        let allowed = Egress::Public {
            allow: allow.clone(),
        };
        for (internal, allow, public_only, egress) in [
            (None, Vec::new(), false, Egress::NoMetadata),
            (None, Vec::new(), true, PUBLIC),
            (None, allow.clone(), false, allowed.clone()),
            (Some(false), Vec::new(), false, PUBLIC),
            (Some(false), allow.clone(), true, allowed),
            (Some(true), Vec::new(), true, Egress::Any),
            (Some(true), allow, false, Egress::Any),
        ] {
            let mut destination = Destination::new("a", "http://a.example").expect("a URL");
            (destination.internal, destination.allow) = (internal, allow);
            let config = Config {
                public_only,
                ..Config::default()
            };
            assert_eq!(Egress::of(&destination, &config), egress);
        }
        for address in ["127.0.0.1", "169.254.169.254", "::", "10.0.0.1"] {
            assert_eq!(Egress::Any.refusal(ip(address)), None, "{address}");
        }
    }

    /// R46
    #[test]
    fn endpoints_never_have_metadata_addresses() {
        for (public_only, address, is_refused) in [
            (true, "10.0.0.1", true),
            (true, "8.8.8.8", false),
            (false, "10.0.0.1", false),
            (false, "169.254.169.254", true),
        ] {
            let config = Config {
                endpoint_public_only: public_only,
                ..Config::default()
            };
            let refusal = Egress::of_endpoints(&config).refusal(ip(address));
            assert_eq!(refusal.is_some(), is_refused, "{public_only}, {address}");
        }
    }

    #[test]
    fn only_allowed_networks_are_reached_in_addition_to_public_addresses() {
        let allow = ["10.1.0.0/16", "fd00:1::/32", "169.254.1.0/24"];
        let allow = allow.map(|net| net.parse().expect("a network")).to_vec();
        let egress = Egress::Public { allow };
        for address in ["10.1.2.3", "fd00:1::5", "169.254.1.1", "8.8.8.8"] {
            assert_eq!(egress.refusal(ip(address)), None, "{address}");
        }
        for address in [
            "10.2.0.1",
            "::ffff:10.1.2.3",
            "fd00:2::5",
            "169.254.169.254",
        ] {
            assert!(egress.refusal(ip(address)).is_some(), "{address}");
        }
    }

    #[test]
    fn refused_addresses_are_left_out_and_the_first_is_named_if_none_remains() {
        let (good, bad) = ("8.8.8.8:80", "127.0.0.1:80");
        let addresses = [bad, good].map(|address| address.parse().expect("an address"));
        let left = PUBLIC
            .filter("shop.example", &addresses)
            .expect("one address is allowed");
        assert_eq!(left, addresses[1..]);
        let blocked = PUBLIC
            .filter("shop.example", &addresses[..1])
            .expect_err("all addresses are refused")
            .to_string();
        assert!(
            blocked.starts_with("blocked address 127.0.0.1 (loopback) of shop.example:"),
            "{blocked}"
        );
    }
}
