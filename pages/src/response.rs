//! Responses, and the headers that all of them share.

use http::StatusCode;
use http::header::{HeaderName, HeaderValue, RETRY_AFTER};

/// Allows only resources from this server: no inline styles, no inline scripts, no frames.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
/// The headers of every response, apart from its type.
const SHARED: [(HeaderName, &str); 7] = [
    (http::header::CACHE_CONTROL, "no-store"),
    (http::header::CONTENT_SECURITY_POLICY, POLICY),
    (http::header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (http::header::X_FRAME_OPTIONS, "DENY"),
    (http::header::REFERRER_POLICY, "same-origin"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
];

/// A response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: StatusCode,
    kind: &'static str,
    body: Vec<u8>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl Response {
    fn new(status: StatusCode, kind: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            kind,
            body: body.into(),
            headers: Vec::new(),
        }
    }

    pub(crate) fn text(status: StatusCode, body: impl Into<Vec<u8>>) -> Self {
        Self::new(status, "text/plain; charset=utf-8", body)
    }

    pub(crate) fn html(status: StatusCode, body: impl Into<Vec<u8>>) -> Self {
        Self::new(status, "text/html; charset=utf-8", body)
    }

    /// A static file of the page, such as the style sheet.
    pub(crate) fn asset(kind: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self::new(StatusCode::OK, kind, body)
    }

    /// JSON: what was asked for, or a problem (RFC 9457).
    pub(crate) fn json(status: StatusCode, body: Vec<u8>) -> Self {
        let kind = match status.is_success() {
            true => "application/json",
            false => "application/problem+json",
        };
        Self::new(status, kind, body)
    }

    /// Events of a feed.
    pub(crate) fn events(body: String) -> Self {
        Self::new(StatusCode::OK, "application/cloudevents-batch+json", body)
    }

    /// Metrics in the text format of Prometheus.
    pub(crate) fn metrics(body: String) -> Self {
        Self::new(
            StatusCode::OK,
            "text/plain; version=0.0.4; charset=utf-8",
            body,
        )
    }

    /// Redirects to another page of this server by GET.
    pub(crate) fn see_other(path: &str) -> Self {
        Self::text(StatusCode::SEE_OTHER, "").with_header(http::header::LOCATION, path)
    }

    /// Adds a header. Characters that no header may have are dropped.
    pub(crate) fn with_header(mut self, name: HeaderName, value: &str) -> Self {
        let value: String = value.chars().filter(|c| (' '..='~').contains(c)).collect();
        if let Ok(value) = HeaderValue::from_str(&value) {
            self.headers.push((name, value));
        }
        self
    }

    pub(crate) fn is_page(&self) -> bool {
        self.kind.starts_with("text/html")
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
}

impl From<Response> for http::Response<Vec<u8>> {
    fn from(response: Response) -> Self {
        let mut answer = Self::new(response.body);
        *answer.status_mut() = response.status;
        let headers = answer.headers_mut();
        headers.insert(
            http::header::CONTENT_TYPE,
            HeaderValue::from_static(response.kind),
        );
        for (name, value) in SHARED {
            headers.insert(name, HeaderValue::from_static(value));
        }
        headers.extend(response.headers);
        if response.status == StatusCode::TOO_MANY_REQUESTS {
            let minute = HeaderValue::from_static("60");
            headers.entry(RETRY_AFTER).or_insert(minute);
        }
        answer
    }
}
