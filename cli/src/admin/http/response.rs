//! Responses, and the headers that all of them share.

use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::time::Instant;

/// Allows only resources from this server: no inline styles, no inline scripts, no frames.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Ok,
    SeeOther,
    BadRequest,
    Unauthorized,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    LengthRequired,
    BodyTooLarge,
    Misdirected,
    TooManyRequests,
    HeadTooLarge,
    Failed,
    Unavailable,
}

impl Status {
    /// Status code and reason phrase.
    pub(crate) fn line(self) -> &'static str {
        match self {
            Self::Ok => "200 OK",
            Self::SeeOther => "303 See Other",
            Self::BadRequest => "400 Bad Request",
            Self::Unauthorized => "401 Unauthorized",
            Self::Forbidden => "403 Forbidden",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed",
            Self::RequestTimeout => "408 Request Timeout",
            Self::LengthRequired => "411 Length Required",
            Self::BodyTooLarge => "413 Content Too Large",
            Self::Misdirected => "421 Misdirected Request",
            Self::TooManyRequests => "429 Too Many Requests",
            Self::HeadTooLarge => "431 Request Header Fields Too Large",
            Self::Failed => "500 Internal Server Error",
            Self::Unavailable => "503 Service Unavailable",
        }
    }
}

/// A response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: Status,
    kind: &'static str,
    body: Vec<u8>,
    headers: Vec<(&'static str, String)>,
}

impl Response {
    fn new(status: Status, kind: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            kind,
            body: body.into(),
            headers: Vec::new(),
        }
    }

    pub(crate) fn text(status: Status, body: impl Into<Vec<u8>>) -> Self {
        Self::new(status, "text/plain; charset=utf-8", body)
    }

    pub(crate) fn html(status: Status, body: impl Into<Vec<u8>>) -> Self {
        Self::new(status, "text/html; charset=utf-8", body)
    }

    /// A static file of the page, such as the style sheet.
    pub(crate) fn asset(kind: &'static str, body: &'static str) -> Self {
        Self::new(Status::Ok, kind, body)
    }

    /// Metrics in the text format of Prometheus.
    pub(crate) fn metrics(body: String) -> Self {
        Self::new(Status::Ok, "text/plain; version=0.0.4; charset=utf-8", body)
    }

    /// Redirects to another page of this server by GET.
    pub(crate) fn see_other(path: &str) -> Self {
        Self::text(Status::SeeOther, "").with_header("location", path)
    }

    /// Adds a header. Characters that could break out of its line are dropped.
    pub(crate) fn with_header(mut self, name: &'static str, value: &str) -> Self {
        let value = value.chars().filter(|c| (' '..='~').contains(c)).collect();
        self.headers.push((name, value));
        self
    }

    /// The text of a plain-text response, if there is any.
    pub(crate) fn words(&self) -> Option<&str> {
        let is_text = self.kind.starts_with("text/plain") && !self.body.is_empty();
        let words = is_text.then(|| std::str::from_utf8(&self.body).ok())?;
        words.map(str::trim)
    }

    /// The same response with this page as its body.
    pub(crate) fn with_page(mut self, page: Self) -> Self {
        (self.kind, self.body) = (page.kind, page.body);
        self
    }

    pub(super) fn write(
        &self,
        stream: &mut TcpStream,
        is_head: bool,
        deadline: Instant,
    ) -> std::io::Result<()> {
        let mut answer = format!(
            "HTTP/1.1 {}\r\ncontent-type: {}\r\ncontent-length: {}\r\nconnection: close\r\n\
             cache-control: no-store\r\ncontent-security-policy: {POLICY}\r\n\
             x-content-type-options: nosniff\r\nx-frame-options: DENY\r\n\
             referrer-policy: same-origin\r\ncross-origin-opener-policy: same-origin\r\n\
             cross-origin-resource-policy: same-origin\r\n",
            self.status.line(),
            self.kind,
            self.body.len(),
        );
        for (name, value) in &self.headers {
            answer.push_str(&format!("{name}: {value}\r\n"));
        }
        answer.push_str("\r\n");
        let mut answer = answer.into_bytes();
        if !is_head {
            answer.extend_from_slice(&self.body);
        }
        let mut rest = answer.as_slice();
        while !rest.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            stream.set_write_timeout(Some(left))?;
            match stream.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
