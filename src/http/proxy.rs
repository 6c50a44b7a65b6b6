//! An HTTP proxy between the relay and a destination.
//!
//! ureq supports proxies, but barely distinguishes failures of the proxy from failures of the destination, and
//! restarts the timeout with each read of the proxy's response. This module does it as curl does. For `https` it opens a
//! tunnel (CONNECT), so the proxy sees no message. For `http` it sends the proxy the request with the whole URL
//! (RFC 9112, 3.2.2), because many proxies allow CONNECT to port 443 only.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::{Arc, LazyLock, Mutex};

use ::http::Uri;
use ::http::header::{HeaderMap, HeaderValue, PROXY_AUTHENTICATE};
use secrecy::{ExposeSecret, SecretString};
use ureq::unversioned::transport::time::{Duration, Instant};
use ureq::unversioned::transport::{
    ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport, TransportAdapter,
};
use ureq::{Error, Timeout};
use url::Url;
use uuid::Uuid;

use super::credentials::basic;
use super::head::status_of;
use super::lines::LineWatch;
use super::shortage::{NotConnected, is_shortage, not_connected};
use super::socket::{ReceiverSocket, connect_to_first};
use super::sockets::Permit;
use crate::config::{Config, ConfigError, Destination, Proxy};
use crate::lock::lock;

/// The most bytes of the heads of a proxy's response, interim responses included.
const MOST_HEAD_BYTES: usize = 16 * 1024;
/// The longest method of a request.
const LONGEST_METHOD: usize = 16;

/// The proxy of one destination.
#[derive(Debug)]
pub(super) struct Via {
    pub(super) url: Url,
    way: ProxyWay,
}

/// The way through a proxy.
#[derive(Debug)]
enum ProxyWay {
    /// The head of a CONNECT request, with the password for the proxy.
    Tunnel(SecretString),
    /// The proxy forwards each request.
    Forward {
        authorization: Option<HeaderValue>,
        /// The head of a CONNECT request that only the proxy itself answers.
        check: SecretString,
    },
}

/// Stands before the whole URL in a path, as ureq sends only paths. [`remove_mark`] cuts it out. A body cannot contain
/// the mark, because it is random.
static MARK: LazyLock<String> = LazyLock::new(|| format!("/{}/", Uuid::now_v7().simple()));

/// Why a destination was not reached through the proxy.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProxyFailed {
    /// A failure of the proxy itself, which says nothing about the destination.
    #[error("proxy {proxy} {reason}")]
    Itself { proxy: String, reason: String },
    /// The proxy cannot reach the destination.
    #[error("proxy {proxy} cannot reach the destination: it returned {status}")]
    Destination { proxy: String, status: u16 },
    /// The proxy does not allow the destination.
    #[error("proxy {proxy} does not allow the destination: it returned {status} to CONNECT")]
    Denied { proxy: String, status: u16 },
    /// The proxy answers, but not to the request for this tunnel: the destination is slow.
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
            None if config.endpoint_proxy.as_ref() == Some(&config.proxy) => {
                "OUTBOX_ENDPOINT_PROXY".to_owned()
            }
            None => "OUTBOX_PROXY".to_owned(),
        };
        Self::new(&url, &destination.url)
            .map(|via| Some(Arc::new(via)))
            .map_err(|reason| ConfigError::new(key, reason))
    }

    /// Checks the proxy of endpoints.
    pub(super) fn check_endpoints(config: &Config) -> Result<(), ConfigError> {
        let Some(Proxy::Via(url)) = &config.endpoint_proxy else {
            return Ok(());
        };
        let checked = Self::check(url).map(drop);
        checked.map_err(|reason| ConfigError::new("OUTBOX_ENDPOINT_PROXY", reason))
    }

    /// Checks the URL of a proxy, and returns its credentials.
    fn check(url: &Url) -> Result<Option<HeaderValue>, &'static str> {
        if url.scheme() != "http" {
            return Err("must be an http:// URL: https destinations use TLS inside the tunnel");
        }
        if url.path() != "/" || url.query().is_some() {
            return Err("the URL of a proxy must not have a path");
        }
        basic(url)
    }

    fn new(url: &Url, destination: &Url) -> Result<Self, &'static str> {
        let authorization = Self::check(url)?;
        let way = match destination.scheme() {
            "http" => ProxyWay::Forward {
                check: connect_to(destination, TUNNEL_PORT, authorization.as_ref()).into(),
                authorization,
            },
            _ => {
                let port = destination.port_or_known_default().unwrap_or_default();
                ProxyWay::Tunnel(connect_to(destination, port, authorization.as_ref()).into())
            }
        };
        Ok(Self {
            url: url.clone(),
            way,
        })
    }

    /// Whether the proxy gets the requests themselves, with the whole URL.
    pub(super) fn forwards(&self) -> bool {
        matches!(self.way, ProxyWay::Forward { .. })
    }

    /// The URI to give to ureq for a destination.
    pub(super) fn target(&self, uri: &Uri) -> Result<Uri, ::http::Error> {
        if !self.forwards() {
            return Ok(uri.clone());
        }
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = Some(format!("{}{uri}", *MARK).parse()?);
        Ok(Uri::from_parts(parts)?)
    }

    /// The credentials to send with each request, if the proxy forwards requests.
    pub(super) fn authorization(&self) -> Option<&HeaderValue> {
        match &self.way {
            ProxyWay::Forward { authorization, .. } => authorization.as_ref(),
            ProxyWay::Tunnel(_) => None,
        }
    }

    /// Whether a response may be the proxy's own: it asks for other credentials. Every other response to a forwarded request
    /// counts as the destination's, because they look alike.
    pub(super) fn may_be_own(&self, status: Option<u16>, headers: &HeaderMap) -> bool {
        let is_challenge = status == Some(407) && headers.contains_key(PROXY_AUTHENTICATE);
        self.forwards() && is_challenge
    }

    /// Whether the proxy at these addresses refuses the credentials. A destination can write the same response, but not
    /// that to CONNECT. So the relay asks for a tunnel to the host of the destination, at the port that each proxy allows.
    pub(super) fn check_credentials(&self, proxy: &[SocketAddr]) -> Result<(), Error> {
        let ProxyWay::Forward { check, .. } = &self.way else {
            return Ok(());
        };
        let asked = || -> Option<ProxyAnswer> {
            let _permit = Permit::take(QUICKLY)?;
            let quickly = NextTimeout {
                after: QUICKLY.into(),
                reason: Timeout::Connect,
                ..NextTimeout::default()
            };
            let (mut stream, _) = connect_to_first(proxy, None, quickly, || None).ok()?;
            stream.set_write_timeout(Some(QUICKLY)).ok()?;
            stream.set_read_timeout(Some(QUICKLY)).ok()?;
            let began = std::time::Instant::now();
            ask(check, &mut stream, || began.elapsed() >= QUICKLY).ok()
        };
        match asked() {
            Some(answer) if answer.is_refusal() => Err(self.itself(REFUSED_CREDENTIALS)),
            _ => Ok(()),
        }
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

    /// Converts an error from before a request to the proxy. A shortage of this machine stays one.
    pub(super) fn unreachable(&self, error: Error) -> Error {
        if is_shortage(&error) {
            return error;
        }
        let text = match error {
            Error::Other(inner) => match inner.downcast::<NotConnected>() {
                Ok(failed) => {
                    return Error::Other(Box::new(ProxyFailed::Itself {
                        proxy: failed.place,
                        reason: match failed.error.kind() {
                            ErrorKind::TimedOut => "cannot be reached in time".to_owned(),
                            _ => format!("cannot be reached: {}", failed.error),
                        },
                    }));
                }
                Err(inner) => inner.to_string(),
            },
            Error::Timeout(_) => return self.itself("cannot be reached in time"),
            other => other.to_string(),
        };
        self.itself(format!("cannot be reached: {text}"))
    }

    /// Requests a tunnel with the head `connect`, and waits for the response.
    fn open<T: Transport>(
        &self,
        connect: &SecretString,
        to_proxy: T,
        details: &ConnectionDetails,
    ) -> Result<T, Error> {
        let mut stream = TransportAdapter::new(to_proxy, Arc::clone(&details.current_time));
        stream.set_timeout(left(details));
        // Each read has the time that is left for the whole.
        let asked = ask(connect, &mut stream, || false);
        let answer = match asked.map_err(Error::from) {
            Ok(answer) => answer,
            Err(Error::Timeout(_)) => {
                // The next connection has the permit of this one.
                drop(stream);
                return Err(match details.addrs.first().is_some_and(|at| answers(*at)) {
                    true => Error::Other(Box::new(ProxyFailed::Silent {
                        proxy: self.shown(),
                    })),
                    false => self.itself("answers nothing"),
                });
            }
            Err(error) if is_shortage(&error) => return Err(error),
            Err(Error::Io(error)) => {
                return Err(self.itself(format!("opened no tunnel: {error}")));
            }
            Err(other) => return Err(self.itself(format!("opened no tunnel: {other}"))),
        };
        let status = answer.status;
        let failed = match status {
            200..=299 => return Ok(stream.into_inner()),
            407 if answer.is_refusal() => return Err(self.itself(REFUSED_CREDENTIALS)),
            405 | 501 => {
                let reason = format!("opens no tunnels: it returned {status} to CONNECT");
                return Err(self.itself(reason));
            }
            // Proxies report an unreachable destination with any of these: 502 and 504 by the standard,
            // Squid 503, tinyproxy 500.
            500 | 502..=504 => ProxyFailed::Destination {
                proxy: self.shown(),
                status,
            },
            // 403 above all; 407 without a challenge is the same in other words.
            _ => ProxyFailed::Denied {
                proxy: self.shown(),
                status,
            },
        };
        Err(Error::Other(Box::new(failed)))
    }
}

/// The port to which each proxy that opens tunnels allows them.
const TUNNEL_PORT: u16 = 443;

/// How long a proxy has to answer a request that needs no other server.
pub(super) const QUICKLY: std::time::Duration = std::time::Duration::from_secs(2);

/// Whether the proxy answers anything at all. It has opened no tunnel in time: then either the destination is slow, or the
/// proxy hangs, and that costs no message an attempt. A request for the proxy itself tells which: each proxy answers one,
/// if only with an error.
fn answers(proxy: SocketAddr) -> bool {
    let asked = || -> io::Result<usize> {
        let mut stream = TcpStream::connect_timeout(&proxy, QUICKLY)?;
        stream.set_write_timeout(Some(QUICKLY))?;
        stream.set_read_timeout(Some(QUICKLY))?;
        let request = format!("GET / HTTP/1.1\r\nHost: {proxy}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        stream.read(&mut [0])
    };
    // A proxy that closes the connection is alive, too.
    match asked() {
        Ok(_) => true,
        Err(error) => matches!(
            error.kind(),
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
        ),
    }
}

const REFUSED_CREDENTIALS: &str = "refused the credentials: it returned 407";

fn connect_to(destination: &Url, port: u16, authorization: Option<&HeaderValue>) -> String {
    let host = destination.host_str().unwrap_or_default();
    let mut connect = format!(
        "CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: {}\r\n",
        super::USER_AGENT
    );
    if let Some(Ok(authorization)) = authorization.map(HeaderValue::to_str) {
        connect += &format!("Proxy-Authorization: {authorization}\r\n");
    }
    connect + "\r\n"
}

/// The answer of a proxy to CONNECT.
#[derive(Debug, PartialEq, Eq)]
struct ProxyAnswer {
    status: u16,
    /// Whether the proxy names a way to authenticate.
    is_challenge: bool,
}

impl ProxyAnswer {
    /// Whether the proxy refuses the credentials.
    fn is_refusal(&self) -> bool {
        self.status == 407 && self.is_challenge
    }
}

/// Sends a CONNECT request and returns the answer. Reads byte by byte: the bytes after the head belong to the
/// destination.
fn ask(
    connect: &SecretString,
    stream: &mut (impl Read + Write),
    has_ended: impl Fn() -> bool,
) -> io::Result<ProxyAnswer> {
    stream.write_all(connect.expose_secret().as_bytes())?;
    stream.flush()?;
    let mut head = Vec::new();
    for _ in 0..MOST_HEAD_BYTES {
        let mut byte = [0];
        if has_ended() {
            return Err(ErrorKind::TimedOut.into());
        }
        if stream.read(&mut byte)? == 0 {
            return Err(io::Error::other("the proxy closed the connection"));
        }
        head.push(byte[0]);
        // Some proxies end lines with a line feed alone.
        if !(head.ends_with(b"\n\r\n") || head.ends_with(b"\n\n")) {
            continue;
        }
        match status_of(&head) {
            // Interim responses.
            Some(100..=199) => head.clear(),
            Some(status) => {
                return Ok(ProxyAnswer {
                    status,
                    is_challenge: has_challenge(&head),
                });
            }
            None => return Err(io::Error::other("the response is not HTTP")),
        }
    }
    Err(io::Error::other("the response head is too long"))
}

fn has_challenge(head: &[u8]) -> bool {
    let name = |line: &[u8]| line.split(|byte| *byte == b':').next().map(<[u8]>::to_vec);
    head.split(|byte| *byte == b'\n')
        .filter_map(name)
        .any(|name| name.eq_ignore_ascii_case(PROXY_AUTHENTICATE.as_str().as_bytes()))
}

/// The host and the port of a URI, for display: without credentials, path and query.
pub(super) fn host_and_port(uri: &Uri) -> String {
    let port = match uri.port_u16() {
        Some(port) => port,
        None if uri.scheme() == Some(&::http::uri::Scheme::HTTP) => 80,
        None => 443,
    };
    format!("{}:{port}", uri.host().unwrap_or_default())
}

/// The remaining time to connect.
pub(super) fn left(details: &ConnectionDetails) -> NextTimeout {
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
    pub(super) via: Option<Arc<Via>>,
    pub(super) watch: Arc<LineWatch>,
    /// The address that worked when the first did not.
    pub(super) worked: Arc<Mutex<Option<IpAddr>>>,
}

impl FirstHop {
    fn connect(&self, details: &ConnectionDetails) -> Result<ReceiverSocket, Error> {
        let worked = *lock(&self.worked);
        let (stream, address) =
            connect_to_first(&details.addrs, worked, left(details), Permit::spare).map_err(
                |error| {
                    let error = match error {
                        Error::Io(error) => error,
                        Error::Timeout(_) => ErrorKind::TimedOut.into(),
                        other => return other,
                    };
                    let host = match &self.via {
                        Some(via) => via.shown(),
                        None => host_and_port(details.uri),
                    };
                    not_connected(error, &host, &details.addrs)
                },
            )?;
        let is_first = details.addrs.first() == Some(&address);
        *lock(&self.worked) = (!is_first).then_some(address.ip());
        let stream = Arc::new(stream);
        self.watch.connects(&stream);
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(ReceiverSocket::new(stream, buffers))
    }
}

impl Connector for FirstHop {
    type Out = ReceiverSocket;

    fn connect(
        &self,
        details: &ConnectionDetails,
        _: Option<()>,
    ) -> Result<Option<Self::Out>, Error> {
        let connected = self.connect(details);
        let Some(via) = &self.via else {
            return connected.map(Some);
        };
        let to_proxy = connected.map_err(|error| via.unreachable(error))?;
        match &via.way {
            ProxyWay::Forward { .. } => Ok(Some(to_proxy)),
            ProxyWay::Tunnel(connect) => via.open(connect, to_proxy, details).map(Some),
        }
    }
}

/// Removes the mark before the whole URL, if these bytes begin with a request line that has it. Returns how many bytes are
/// left.
pub(super) fn remove_mark(output: &mut [u8]) -> usize {
    let mut first = output.iter().take(LONGEST_METHOD);
    if let Some(method) = first.position(|byte| *byte == b' ')
        && output[method + 1..].starts_with(MARK.as_bytes())
    {
        output.copy_within(method + 1 + MARK.len().., method + 1);
        return output.len() - MARK.len();
    }
    output.len()
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;

    use super::*;

    fn via(url: &str, destination: &str) -> Result<Via, &'static str> {
        Via::new(
            &url.parse().expect("a URL"),
            &destination.parse().expect("a URL"),
        )
    }

    #[test]
    fn a_tunnel_is_requested_with_host_port_and_credentials() {
        let head = |via: Via| match via.way {
            ProxyWay::Tunnel(connect) => connect.expose_secret().to_owned(),
            ProxyWay::Forward { .. } => panic!("https needs a tunnel"),
        };
        let plain = head(via("http://proxy:3128", "https://shop.example/a?b").expect("a proxy"));
        assert!(
            plain.starts_with("CONNECT shop.example:443 HTTP/1.1\r\nHost: shop.example:443\r\n"),
            "{plain}"
        );
        assert!(!plain.contains("Authorization"), "{plain}");
        assert!(plain.ends_with("\r\n\r\n"), "{plain}");
        let known = via("http://us%20er:p%40ss@proxy", "https://[2001:200::1]/").expect("a proxy");
        assert!(!format!("{known:?}").contains("c3MK"), "{known:?}");
        let known = head(known);
        assert!(known.starts_with("CONNECT [2001:200::1]:443 "), "{known}");
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
        let error = ask(&"CONNECT".to_owned().into(), &mut proxy, || false).expect_err("no end");
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
        destination.proxy = Some(Proxy::Via("http://own:8080".parse().expect("a URL")));
        assert_eq!(of(&destination).as_deref(), Some("own:8080"));
        let mut other = Destination::new("other", "http://other.example").expect("a URL");
        assert_eq!(of(&other).as_deref(), Some("general:3128"));
        other.proxy = Some(Proxy::Direct);
        assert_eq!(of(&other), None);
    }

    #[test]
    fn a_request_to_forward_has_the_whole_url() {
        let url = "http://shop.example:81/a?b=http://c";
        let via = via("http://us%20er:p%40ss@proxy", url).expect("a proxy");
        let target = via.target(&url.parse().expect("a URI")).expect("a URI");
        assert_eq!(
            target.authority().map(|a| a.as_str()),
            Some("shop.example:81")
        );
        let path = target.path_and_query().expect("a path");
        let mut line = format!("POST {path} HTTP/1.1\r\n").into_bytes();
        let left = remove_mark(&mut line);
        assert_eq!(line[..left], *format!("POST {url} HTTP/1.1\r\n").as_bytes());
        assert_eq!(remove_mark(&mut b"[{\"a\": 1}]".to_owned()), 10);
        assert!(via.authorization().is_some());
        assert!(!format!("{via:?}").contains("Basic"), "{via:?}");
    }

    #[test]
    fn a_challenge_is_found_by_its_header() {
        let head = b"HTTP/1.1 407 No\r\nPROXY-Authenticate: Basic\r\n\r\n";
        assert!(has_challenge(head));
        assert!(!has_challenge(
            b"HTTP/1.1 407 Proxy-Authenticate\r\nvia: proxy-authenticate\r\n\r\n"
        ));
    }
}
