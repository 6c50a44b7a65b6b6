//! Reads a request within limits of size and time.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use url::form_urlencoded;

use super::{Response, Status};

const MOST_HEAD_BYTES: usize = 16 * 1024;
const MOST_HEADERS: usize = 64;
const MOST_BODY_BYTES: usize = 256 * 1024;
/// How long, and how much of, the rest of a refused request is read and dropped.
const DRAIN_TIME: Duration = Duration::from_millis(500);
const DRAIN_BYTES: usize = 1024 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Get,
    Head,
    Post,
}

/// A parsed request.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) method: Method,
    /// The path as sent: nothing is decoded or resolved.
    pub(crate) path: String,
    pub(crate) query: Form,
    /// Path and query, as sent.
    pub(crate) target: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// The address of the client, or of a proxy in front of this server.
    pub(crate) peer: IpAddr,
}

/// Names and values of a query or a submitted form.
#[derive(Debug, Default)]
pub(crate) struct Form(Vec<(String, String)>);

impl Form {
    /// Drops NUL characters, which PostgreSQL text cannot hold.
    fn parse(text: &[u8]) -> Self {
        let pairs = form_urlencoded::parse(text);
        let pairs = pairs.map(|(name, value)| (name.into_owned(), value.replace('\0', "")));
        Self(pairs.collect())
    }

    /// The first non-empty value of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let mut of_name = self.0.iter().filter(|(given, _)| given == name);
        of_name
            .find(|(_, value)| !value.is_empty())
            .map(|(_, value)| value.as_str())
    }

    /// All values of this name.
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let of_name = self.0.iter().filter(move |(given, _)| given == name);
        of_name.map(|(_, value)| value.as_str())
    }
}

impl Request {
    /// Reads a request until the deadline. `None`: the client sent nothing.
    pub(super) fn read(
        stream: &mut TcpStream,
        deadline: Instant,
    ) -> Result<Option<Self>, Response> {
        let peer = stream
            .peer_addr()
            .map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| {
                peer.ip().to_canonical()
            });
        let mut bytes = Vec::with_capacity(2048);
        loop {
            let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
            let mut head = httparse::Request::new(&mut headers);
            match head.parse(&bytes) {
                Ok(httparse::Status::Complete(length)) => {
                    let (request, body_bytes) = Self::of_head(&head, peer)?;
                    let body = bytes.split_off(length);
                    return request.with_body(body, body_bytes, stream, deadline);
                }
                Ok(httparse::Status::Partial) if bytes.len() < MOST_HEAD_BYTES => {}
                Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                    return Err(refusal(
                        Status::HeadTooLarge,
                        "the request head is too large",
                    ));
                }
                Err(error) => {
                    return Err(refusal(
                        Status::BadRequest,
                        &format!("not an HTTP/1.1 request: {error}"),
                    ));
                }
            }
            if !read_more(stream, &mut bytes, deadline)? {
                return match bytes.is_empty() {
                    true => Ok(None),
                    false => Err(refusal(
                        Status::BadRequest,
                        "the request head is incomplete",
                    )),
                };
            }
        }
    }

    /// Builds the request without its body. Also returns the length of the body.
    fn of_head(head: &httparse::Request<'_, '_>, peer: IpAddr) -> Result<(Self, usize), Response> {
        let method = match head.method {
            Some("GET") => Method::Get,
            Some("HEAD") => Method::Head,
            Some("POST") => Method::Post,
            _ => {
                let refused = refusal(
                    Status::MethodNotAllowed,
                    "only GET, HEAD and POST are supported",
                );
                return Err(refused.with_header("allow", "GET, HEAD, POST"));
            }
        };
        let target = head.path.unwrap_or_default();
        if !target.starts_with('/') {
            return Err(refusal(
                Status::BadRequest,
                "the request target is not a path",
            ));
        }
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let headers = head
            .headers
            .iter()
            .map(|header| {
                let value = String::from_utf8_lossy(header.value).into_owned();
                (header.name.to_ascii_lowercase(), value)
            })
            .collect();
        let request = Self {
            method,
            path: path.to_owned(),
            query: Form::parse(query.as_bytes()),
            target: target.to_owned(),
            headers,
            body: Vec::new(),
            peer,
        };
        for once in [
            "host",
            "content-length",
            "origin",
            "cookie",
            "authorization",
        ] {
            if request
                .headers
                .iter()
                .filter(|(name, _)| name == once)
                .count()
                > 1
            {
                let reason = format!("duplicate header {once}");
                return Err(refusal(Status::BadRequest, &reason));
            }
        }
        if request.header("transfer-encoding").is_some() {
            return Err(refusal(
                Status::LengthRequired,
                "a request body needs content-length: chunked bodies are not supported",
            ));
        }
        let body_bytes = match request.header("content-length") {
            None => 0,
            // `parse` accepts a sign, but HTTP allows digits only.
            Some(text) => text
                .parse()
                .ok()
                .filter(|_| text.bytes().all(|b| b.is_ascii_digit()))
                .ok_or_else(|| refusal(Status::BadRequest, "content-length is not a number"))?,
        };
        if body_bytes > MOST_BODY_BYTES {
            return Err(refusal(
                Status::BodyTooLarge,
                "the request body is too large",
            ));
        }
        Ok((request, body_bytes))
    }

    fn with_body(
        mut self,
        mut body: Vec<u8>,
        length: usize,
        stream: &mut TcpStream,
        deadline: Instant,
    ) -> Result<Option<Self>, Response> {
        while body.len() < length {
            if !read_more(stream, &mut body, deadline)? {
                return Err(refusal(
                    Status::BadRequest,
                    "the request body is shorter than its content-length",
                ));
            }
        }
        // One request per connection: ignore the bytes after it.
        body.truncate(length);
        self.body = body;
        Ok(Some(self))
    }

    /// The value of the header with this lower-case name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(given, _)| given == name)?;
        Some(value.trim())
    }

    /// The submitted form.
    pub(crate) fn form(&self) -> Form {
        Form::parse(&self.body)
    }

    /// The value of a cookie.
    pub(crate) fn cookie(&self, name: &str) -> Option<&str> {
        self.header("cookie")?
            .split(';')
            .filter_map(|pair| pair.trim().split_once('='))
            .find(|(given, _)| *given == name)
            .map(|(_, value)| value)
    }
}

/// Reads more bytes. `false`: the client sends no more.
fn read_more(
    stream: &mut TcpStream,
    bytes: &mut Vec<u8>,
    deadline: Instant,
) -> Result<bool, Response> {
    let left = deadline.saturating_duration_since(Instant::now());
    let mut chunk = [0; 4096];
    let read = if left.is_zero() {
        Err(ErrorKind::TimedOut.into())
    } else {
        let limited = stream.set_read_timeout(Some(left));
        limited.and_then(|()| stream.read(&mut chunk))
    };
    match read {
        Ok(0) => Ok(false),
        Ok(count) => {
            bytes.extend_from_slice(&chunk[..count]);
            Ok(true)
        }
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
            Err(refusal(
                Status::RequestTimeout,
                "the request took too long to arrive",
            ))
        }
        Err(_) => Ok(false),
    }
}

/// Reads and drops further input for a short time.
pub(super) fn drain(stream: &mut TcpStream) {
    let deadline = Instant::now() + DRAIN_TIME;
    let mut bytes = Vec::new();
    let mut drained = 0;
    while drained < DRAIN_BYTES && matches!(read_more(stream, &mut bytes, deadline), Ok(true)) {
        drained += bytes.len();
        bytes.clear();
    }
}

fn refusal(status: Status, reason: &str) -> Response {
    Response::text(status, format!("{reason}\n"))
}
