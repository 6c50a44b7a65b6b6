//! An HTTP proxy between the relay and a destination.
//!
//! ureq supports proxies, but barely distinguishes failures of the proxy from failures of the destination, and
//! restarts the timeout with each read of the proxy's response. This module opens a tunnel (CONNECT) like ureq,
//! for `http` as well as `https`: the proxy sees no message of a destination with TLS, and changes no message.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use secrecy::{ExposeSecret, SecretString};
use ureq::Error;
use ureq::unversioned::transport::time::{Duration, Instant};
use ureq::unversioned::transport::{
    ConnectionDetails, Connector, NextTimeout, TcpConnector, Transport, TransportAdapter,
};
use url::Url;

use crate::config::{Config, ConfigError, Destination, Proxy};

/// The most bytes of the heads of a proxy's response, interim responses included.
const MOST_HEAD_BYTES: usize = 16 * 1024;

/// A proxy, with the CONNECT request for a tunnel to one destination.
#[derive(Debug)]
pub(super) struct Via {
    pub(super) url: Url,
    /// The head of the CONNECT request, with the password for the proxy.
    connect: SecretString,
}

/// Why a destination was not reached through the proxy.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProxyFailed {
    /// A failure of the proxy itself, which says nothing about the destination.
    #[error("proxy {proxy} {reason}")]
    Itself { proxy: String, reason: String },
    /// The proxy cannot reach the destination.
    #[error("proxy {proxy} cannot reach the destination: it returned {status}")]
    Destination { proxy: String, status: u16 },
    /// The proxy was reached but did not respond in time: the proxy or the destination is slow.
    #[error("proxy {proxy} opened no tunnel to the destination in time")]
    Silent { proxy: String },
}

impl Via {
    /// The proxy of a destination, if any.
    pub(super) fn of(
        destination: &Destination,
        config: &Config,
    ) -> Result<Option<Arc<Self>>, ConfigError> {
        let Proxy::Via(url) = config.proxy_of(destination)? else {
            return Ok(None);
        };
        let key = match &destination.proxy {
            Some(_) => format!("destinations.{}.proxy", destination.name),
            None => "OUTBOX_PROXY".to_owned(),
        };
        Self::new(&url, &destination.url)
            .map(|via| Some(Arc::new(via)))
            .map_err(|reason| ConfigError::new(key, reason))
    }

    fn new(url: &Url, destination: &Url) -> Result<Self, &'static str> {
        if url.scheme() != "http" {
            return Err("must be an http:// URL: https destinations use TLS inside the tunnel");
        }
        if url.path() != "/" || url.query().is_some() {
            return Err("the URL of a proxy must not have a path");
        }
        // `ureq::Proxy` also decodes percent-encoding.
        let parsed = ureq::Proxy::new(url.as_str()).map_err(|_| "not a valid proxy URL")?;
        let host = destination.host_str().unwrap_or_default();
        let port = destination.port_or_known_default().unwrap_or_default();
        let mut connect = format!(
            "CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: {}\r\n",
            super::USER_AGENT
        );
        if parsed.username().is_some() || parsed.password().is_some() {
            let user = parsed.username().unwrap_or_default();
            let password = parsed.password().unwrap_or_default();
            let credentials = BASE64_STANDARD.encode(format!("{user}:{password}"));
            connect += &format!("Proxy-Authorization: Basic {credentials}\r\n");
        }
        connect += "\r\n";
        Ok(Self {
            url: url.clone(),
            connect: connect.into(),
        })
    }

    /// Host and port, for display.
    fn shown(&self) -> String {
        format!(
            "{}:{}",
            self.url.host_str().unwrap_or_default(),
            self.url.port_or_known_default().unwrap_or_default()
        )
    }

    fn itself(&self, reason: impl Into<String>) -> Error {
        Error::Other(Box::new(ProxyFailed::Itself {
            proxy: self.shown(),
            reason: reason.into(),
        }))
    }

    /// Converts an error from before the CONNECT request.
    pub(super) fn unreachable(&self, error: &Error) -> Error {
        self.itself(match error {
            Error::Timeout(_) => "cannot be reached in time".to_owned(),
            Error::Other(inner) => format!("cannot be reached: {inner}"),
            Error::Io(inner) => format!("cannot be reached: {inner}"),
            other => format!("cannot be reached: {other}"),
        })
    }

    /// Requests a tunnel and waits for the response.
    fn open<T: Transport>(&self, to_proxy: T, details: &ConnectionDetails) -> Result<T, Error> {
        let mut stream = TransportAdapter::new(to_proxy, Arc::clone(&details.current_time));
        stream.set_timeout(left(details));
        let status = self.ask(&mut stream).map_err(|error| match error.into() {
            Error::Timeout(_) => Error::Other(Box::new(ProxyFailed::Silent {
                proxy: self.shown(),
            })),
            Error::Io(error) => self.itself(format!("opened no tunnel: {error}")),
            other => self.itself(format!("opened no tunnel: {other}")),
        })?;
        match status {
            200..=299 => Ok(stream.into_inner()),
            407 => Err(self.itself("refused the credentials: it returned 407")),
            // Proxies report an unreachable destination with any of these: 502 and 504 by the standard,
            // Squid 503, tinyproxy 500.
            500 | 502..=504 => Err(Error::Other(Box::new(ProxyFailed::Destination {
                proxy: self.shown(),
                status,
            }))),
            _ => Err(self.itself(format!(
                "refused the tunnel: it returned {status} to CONNECT"
            ))),
        }
    }

    /// Sends the CONNECT request and returns the status. Reads byte by byte: the bytes after the head belong to the
    /// destination.
    fn ask(&self, stream: &mut (impl Read + Write)) -> io::Result<u16> {
        stream.write_all(self.connect.expose_secret().as_bytes())?;
        stream.flush()?;
        let mut head = Vec::new();
        for _ in 0..MOST_HEAD_BYTES {
            let mut byte = [0];
            if stream.read(&mut byte)? == 0 {
                return Err(io::Error::other("the proxy closed the connection"));
            }
            head.push(byte[0]);
            if !head.ends_with(b"\r\n\r\n") {
                continue;
            }
            match status_of(&head) {
                // Interim responses.
                Some(100..=199) => head.clear(),
                Some(status) => return Ok(status),
                None => return Err(io::Error::other("the response is not HTTP")),
            }
        }
        Err(io::Error::other("the response head is too long"))
    }
}

fn status_of(head: &[u8]) -> Option<u16> {
    let line = head.strip_prefix(b"HTTP/1.")?.get(1..)?;
    let digits = line.strip_prefix(b" ")?.get(..3)?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The remaining time to connect.
fn left(details: &ConnectionDetails) -> NextTimeout {
    let mut timeout = details.timeout;
    let now = (details.current_time)();
    if let (Duration::Exact(whole), Instant::Exact(began), Instant::Exact(now)) =
        (timeout.after, details.now, now)
    {
        timeout.after = whole
            .saturating_sub(now.saturating_duration_since(began))
            .into();
    }
    timeout
}

/// Connects to the destination, directly or through its proxy.
#[derive(Debug)]
pub(super) struct FirstHop {
    tcp: TcpConnector,
    via: Option<Arc<Via>>,
}

impl FirstHop {
    pub(super) fn new(via: Option<Arc<Via>>) -> Self {
        Self {
            tcp: TcpConnector::default(),
            via,
        }
    }
}

impl Connector for FirstHop {
    type Out = <TcpConnector as Connector>::Out;

    fn connect(
        &self,
        details: &ConnectionDetails,
        chained: Option<()>,
    ) -> Result<Option<Self::Out>, Error> {
        let connected = self.tcp.connect(details, chained);
        let Some(via) = &self.via else {
            return connected.map_err(|error| match error {
                Error::Io(error) => Error::Other(Box::new(NotConnected(error))),
                other => other,
            });
        };
        let to_proxy = connected.map_err(|error| via.unreachable(&error))?;
        to_proxy
            .map(|to_proxy| via.open(to_proxy, details))
            .transpose()
    }
}

/// No connection was established, so nothing was sent.
#[derive(Debug)]
pub(super) struct NotConnected(pub(super) io::Error);

impl fmt::Display for NotConnected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for NotConnected {}

#[cfg(test)]
mod tests {
    use super::*;

    fn via(url: &str, destination: &str) -> Result<Via, &'static str> {
        Via::new(
            &url.parse().expect("a URL"),
            &destination.parse().expect("a URL"),
        )
    }

    #[test]
    fn a_tunnel_is_requested_with_host_port_and_credentials() {
        let head = |via: Via| via.connect.expose_secret().to_owned();
        let plain = head(via("http://proxy:3128", "https://shop.example/a?b").expect("a proxy"));
        assert!(
            plain.starts_with("CONNECT shop.example:443 HTTP/1.1\r\nHost: shop.example:443\r\n"),
            "{plain}"
        );
        assert!(!plain.contains("Authorization"), "{plain}");
        assert!(plain.ends_with("\r\n\r\n"), "{plain}");
        let known = via("http://us%20er:p%40ss@proxy", "http://[2001:200::1]/").expect("a proxy");
        assert!(!format!("{known:?}").contains("c3MK"), "{known:?}");
        let known = head(known);
        assert!(known.starts_with("CONNECT [2001:200::1]:80 "), "{known}");
        let credentials = BASE64_STANDARD.encode("us er:p@ss");
        let header = format!("\r\nProxy-Authorization: Basic {credentials}\r\n");
        assert!(known.contains(&header), "{known}");
    }

    /// A proxy that never ends its interim responses.
    struct Endless(usize);

    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let interim = b"HTTP/1.1 103 Early Hints\r\n\r\n";
            buffer[0] = interim[self.0 % interim.len()];
            self.0 += 1;
            Ok(1)
        }
    }

    impl Write for Endless {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn interim_responses_without_end_are_refused() {
        let mut proxy = Endless(0);
        let via = via("http://proxy:3128", "https://shop.example").expect("a proxy");
        let error = via.ask(&mut proxy).expect_err("no end");
        assert_eq!(error.to_string(), "the response head is too long");
        assert_eq!(proxy.0, MOST_HEAD_BYTES);
    }

    #[test]
    fn a_proxy_that_cannot_be_used_is_refused() {
        for url in [
            "https://proxy:3128",
            "http://proxy/path",
            "http://proxy/?a=b",
        ] {
            assert!(via(url, "http://shop.example/").is_err(), "{url}");
        }
    }

    #[test]
    fn a_destinations_own_proxy_wins_over_the_general_one_and_its_exceptions() {
        let mut config = Config::default();
        config
            .set("OUTBOX_PROXY", "http://general:3128")
            .expect("a URL");
        config
            .set("OUTBOX_NO_PROXY", "shop.example")
            .expect("a list");
        let mut destination = Destination::new("shop", "http://shop.example").expect("a URL");
        let of = |destination: &Destination| {
            let via = Via::of(destination, &config).expect("a proxy or none");
            via.map(|via| via.shown())
        };
        assert_eq!(of(&destination), None);
        destination.proxy = Some(Proxy::parse("proxy", "http://own:8080").expect("a URL"));
        assert_eq!(of(&destination).as_deref(), Some("own:8080"));
        let mut other = Destination::new("other", "http://other.example").expect("a URL");
        assert_eq!(of(&other).as_deref(), Some("general:3128"));
        other.proxy = Some(Proxy::Direct);
        assert_eq!(of(&other), None);
    }

    #[test]
    fn statuses_are_read_from_the_first_line() {
        assert_eq!(status_of(b"HTTP/1.1 200 OK\r\n\r\n"), Some(200));
        assert_eq!(status_of(b"HTTP/1.0 407\r\n\r\n"), Some(407));
        for line in [
            "",
            "HTTP/1.1",
            "HTTP/1.1 20",
            "HTTP/2 200 OK",
            "SSH-2.0",
            "HTTP/1.1 abc",
        ] {
            assert_eq!(status_of(line.as_bytes()), None, "{line}");
        }
    }
}
