//! What this machine lacks when it cannot send: descriptors, ports, memory, its network.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use rustix::io::Errno;
use ureq::Error;

/// The most addresses of a name in an error.
const MOST_SHOWN: usize = 4;

/// This machine could not send: it lacks something, and the destination was not asked.
#[derive(Debug, Clone, thiserror::Error)]
#[error("this machine {lacks}: {error}")]
pub(super) struct Shortage {
    lacks: &'static str,
    error: String,
}

/// No connection was established, so nothing was sent.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to {place}: {error}")]
pub(super) struct NotConnected {
    /// Host and port, and the addresses of the host.
    pub(super) place: String,
    pub(super) error: io::Error,
}

impl Shortage {
    pub(super) fn new(lacks: &'static str, error: impl ToString) -> Self {
        Self {
            lacks,
            error: error.to_string(),
        }
    }

    /// Whether an error at any point of a send says that this machine lacks something.
    pub(super) fn of(error: &io::Error) -> Option<Self> {
        let lacks = match Errno::from_io_error(error) {
            Some(Errno::MFILE | Errno::NFILE) => "has no free file descriptor",
            Some(Errno::NOBUFS | Errno::NOMEM) => "has no memory for sockets",
            Some(Errno::NETDOWN) => "has no network",
            _ if error.kind() == ErrorKind::OutOfMemory => "has no memory for sockets",
            _ => return None,
        };
        Some(Self::new(lacks, error))
    }

    /// The same for a lookup of a name, which may hide why it failed.
    pub(super) fn of_lookup(error: &io::Error) -> Option<Self> {
        let is_full = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).err();
        Self::of(error).or_else(|| Self::of(&is_full()?))
    }
}

/// The error of a connection to `host` and port that was not established. A connect of a UDP socket sends nothing: it asks this machine
/// alone for a way to an address.
pub(super) fn not_connected(error: io::Error, host: &str, addresses: &[SocketAddr]) -> Error {
    let has_way = |address: &SocketAddr| way_to(*address).is_ok();
    let lacks = match Errno::from_io_error(&error) {
        // Without a way, the address is of a family that this machine does not have.
        Some(Errno::ADDRNOTAVAIL) if addresses.iter().any(has_way) => Some("has no free port"),
        // A router can also say so; and this machine may have a way to all but this address.
        Some(Errno::NETUNREACH) if is_offline() && !addresses.iter().any(has_way) => {
            Some("has no network")
        }
        _ => None,
    };
    let shortage = match lacks {
        Some(lacks) => Some(Shortage::new(lacks, &error)),
        None => Shortage::of(&error),
    };
    match shortage {
        Some(shortage) => Error::Other(Box::new(shortage)),
        None => Error::Other(Box::new(NotConnected {
            place: with_addresses(host, addresses),
            error,
        })),
    }
}

/// Adds the addresses of a name.
fn with_addresses(host: &str, addresses: &[SocketAddr]) -> String {
    let mut text = host.to_owned();
    if addresses.is_empty() || host.parse::<SocketAddr>().is_ok() {
        return text;
    }
    let shown = addresses.iter().take(MOST_SHOWN);
    let shown: Vec<String> = shown.map(|address| address.ip().to_string()).collect();
    text += &format!(" ({}", shown.join(", "));
    match addresses.len().saturating_sub(MOST_SHOWN) {
        0 => text + ")",
        more => text + &format!(" and {more} more)"),
    }
}

fn way_to(address: SocketAddr) -> io::Result<()> {
    let socket = match address {
        SocketAddr::V4(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)),
    };
    socket?.connect(address)
}

/// Whether this machine has no way to addresses elsewhere. These two are reserved for documentation (RFC 5737, RFC 3849).
fn is_offline() -> bool {
    let elsewhere: [SocketAddr; 2] = [
        (Ipv4Addr::new(192, 0, 2, 1), 9).into(),
        (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into(),
    ];
    elsewhere
        .into_iter()
        .all(|address| way_to(address).is_err())
}

/// Whether an error is a shortage of this machine.
pub(super) fn is_shortage(error: &Error) -> bool {
    match error {
        Error::Other(inner) => inner.is::<Shortage>(),
        Error::Io(io) => Shortage::of(io).is_some(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_host_and_its_addresses() {
        let addresses: Vec<SocketAddr> = (1..=6).map(|n| ([10, 0, 0, n], 443).into()).collect();
        let text = |host: &str, most| {
            let error = ErrorKind::ConnectionRefused.into();
            not_connected(error, host, &addresses[..most]).to_string()
        };
        let (name, address) = ("shop.example:443", "[2001:db8::1]:443");
        for (host, most, place) in [
            (name, 0, "shop.example:443"),
            (name, 1, "shop.example:443 (10.0.0.1)"),
            (
                name,
                4,
                "shop.example:443 (10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4)",
            ),
            (
                name,
                6,
                "shop.example:443 (10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4 and 2 more)",
            ),
            (address, 1, "[2001:db8::1]:443"),
        ] {
            let expected = format!("cannot connect to {place}: connection refused");
            assert!(
                text(host, most).ends_with(&expected),
                "{}",
                text(host, most)
            );
        }
    }
}
