//! Reads a request within limits of size and time.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use diesel_outbox_pages::plain;
use http::StatusCode;
use http::header::{ALLOW, CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING};

use super::{Request, Response};

const MOST_HEAD_BYTES: usize = 16 * 1024;
const MOST_HEADERS: usize = 64;
/// The longest line before a chunk: its length and its extensions.
const MOST_CHUNK_LINE: usize = 1024;
/// How long, and how much of, the rest of a refused request is read and dropped.
const DRAIN_TIME: Duration = Duration::from_millis(500);
const DRAIN_BYTES: usize = 1024 * 1024;

/// The methods of the routes: the pages answer which of them a path has.
const SUPPORTED: &str = "GET, HEAD, POST, PATCH, DELETE";

/// Why a request is not read to its end.
pub(super) struct Refusal(StatusCode, String);

impl From<Refusal> for Response {
    fn from(Refusal(status, reason): Refusal) -> Self {
        let mut response = plain(status, reason);
        if status == StatusCode::METHOD_NOT_ALLOWED {
            let allowed = HeaderValue::from_static(SUPPORTED);
            response.headers_mut().insert(ALLOW, allowed);
        }
        response
    }
}

/// Reads a request until the deadline. `None`: the client sent nothing.
pub(super) fn read(
    stream: &mut TcpStream,
    deadline: Instant,
    most_bytes: usize,
) -> Result<Option<Request>, Refusal> {
    let mut bytes = Vec::with_capacity(2048);
    loop {
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut head = httparse::Request::new(&mut headers);
        match head.parse(&bytes) {
            Ok(httparse::Status::Complete(length)) => {
                let mut request = of_head(&head)?;
                let framing = framing(&request, most_bytes)?;
                let body = bytes.split_off(length);
                *request.body_mut() = match framing {
                    Framing::Length(length) => whole(body, length, stream, deadline)?,
                    Framing::Chunked => chunked(body, most_bytes, stream, deadline)?,
                };
                return Ok(Some(request));
            }
            Ok(httparse::Status::Partial) if bytes.len() < MOST_HEAD_BYTES => {}
            Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                return Err(refusal(
                    StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                    "the request head is too large",
                ));
            }
            Err(error) => return Err(no_request(&error)),
        }
        if !read_more(stream, &mut bytes, deadline)? {
            return match bytes.is_empty() {
                true => Ok(None),
                false => Err(refusal(
                    StatusCode::BAD_REQUEST,
                    "the request head is incomplete",
                )),
            };
        }
    }
}

/// The request without its body.
fn of_head(head: &httparse::Request<'_, '_>) -> Result<Request, Refusal> {
    let mut supported = SUPPORTED.split(", ");
    let asked = head
        .method
        .filter(|asked| supported.any(|one| one == *asked));
    let Some(method) = asked else {
        let why = format!("only {SUPPORTED} are supported");
        return Err(refusal(StatusCode::METHOD_NOT_ALLOWED, &why));
    };
    let target = head.path.unwrap_or_default();
    if !target.starts_with('/') {
        return Err(refusal(
            StatusCode::BAD_REQUEST,
            "the request target is not a path",
        ));
    }
    let request = http::Request::builder().method(method).uri(target);
    let request = head.headers.iter().fold(request, |request, header| {
        request.header(header.name, header.value)
    });
    request.body(Vec::new()).map_err(|error| no_request(&error))
}

/// Where the body ends.
enum Framing {
    Length(usize),
    Chunked,
}

/// Where the body ends, which has at most this many bytes.
fn framing(request: &Request, most_bytes: usize) -> Result<Framing, Refusal> {
    let headers = request.headers();
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let mut encodings = headers.get_all(TRANSFER_ENCODING).iter();
    if let Some(encoding) = encodings.next() {
        let is_chunked = encoding
            .as_bytes()
            .trim_ascii()
            .eq_ignore_ascii_case(b"chunked");
        if !is_chunked || encodings.next().is_some() {
            return Err(refusal(
                StatusCode::NOT_IMPLEMENTED,
                "chunked is the only transfer-encoding that is supported",
            ));
        }
        // Whoever stands before this server may have read the other one.
        if lengths.next().is_some() {
            return Err(refusal(
                StatusCode::BAD_REQUEST,
                "a request has either content-length or transfer-encoding",
            ));
        }
        return Ok(Framing::Chunked);
    }
    let Some(length) = lengths.next() else {
        return Ok(Framing::Length(0));
    };
    if lengths.next().is_some() {
        return Err(refusal(
            StatusCode::BAD_REQUEST,
            "duplicate header content-length",
        ));
    }
    // `parse` accepts a sign, but HTTP allows digits only.
    let digits = length
        .to_str()
        .ok()
        .map(str::trim)
        .filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
    let bytes = digits
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| refusal(StatusCode::BAD_REQUEST, "content-length is not a number"))?;
    match bytes > most_bytes {
        true => Err(too_large()),
        false => Ok(Framing::Length(bytes)),
    }
}

fn too_large() -> Refusal {
    refusal(
        StatusCode::PAYLOAD_TOO_LARGE,
        "the request body is too large",
    )
}

/// Reads a body in chunks (RFC 9112, 7.1). What follows the last chunk is ignored.
fn chunked(
    mut unread: Vec<u8>,
    most_bytes: usize,
    stream: &mut TcpStream,
    deadline: Instant,
) -> Result<Vec<u8>, Refusal> {
    let bad = || {
        refusal(
            StatusCode::BAD_REQUEST,
            "the chunks of the body are malformed",
        )
    };
    let mut more = |unread: &mut Vec<u8>| match read_more(stream, unread, deadline)? {
        true => Ok(()),
        false => Err(refusal(
            StatusCode::BAD_REQUEST,
            "the request body ends before its last chunk",
        )),
    };
    let mut body = Vec::new();
    loop {
        let (line, length) = match httparse::parse_chunk_size(&unread) {
            Ok(httparse::Status::Complete((line, length))) => (line, length),
            Ok(httparse::Status::Partial) if unread.len() < MOST_CHUNK_LINE => {
                more(&mut unread)?;
                continue;
            }
            Ok(httparse::Status::Partial) | Err(_) => return Err(bad()),
        };
        let length = usize::try_from(length).map_err(|_| too_large())?;
        if length == 0 {
            return Ok(body);
        }
        if length > most_bytes - body.len() {
            return Err(too_large());
        }
        let end = line + length;
        while unread.len() < end + 2 {
            more(&mut unread)?;
        }
        if &unread[end..end + 2] != b"\r\n" {
            return Err(bad());
        }
        body.extend_from_slice(&unread[line..end]);
        unread.drain(..end + 2);
    }
}

/// Reads the rest of the body.
fn whole(
    mut body: Vec<u8>,
    length: usize,
    stream: &mut TcpStream,
    deadline: Instant,
) -> Result<Vec<u8>, Refusal> {
    while body.len() < length {
        if !read_more(stream, &mut body, deadline)? {
            return Err(refusal(
                StatusCode::BAD_REQUEST,
                "the request body is shorter than its content-length",
            ));
        }
    }
    // One request per connection: ignore the bytes after it.
    body.truncate(length);
    Ok(body)
}

/// Reads more bytes. `false`: the client sends no more.
fn read_more(
    stream: &mut TcpStream,
    bytes: &mut Vec<u8>,
    deadline: Instant,
) -> Result<bool, Refusal> {
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
                StatusCode::REQUEST_TIMEOUT,
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

fn no_request(error: &dyn std::error::Error) -> Refusal {
    let reason = format!("not an HTTP/1.1 request: {error}");
    refusal(StatusCode::BAD_REQUEST, &reason)
}

fn refusal(status: StatusCode, reason: &str) -> Refusal {
    Refusal(status, format!("{reason}\n"))
}
