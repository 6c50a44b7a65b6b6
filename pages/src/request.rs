//! A request, as the pages read it.

use http::{Method, StatusCode};
use url::form_urlencoded;

use crate::Visitor;
use crate::base::within;
use crate::response::Response;

/// Headers on which access and acts depend. With two values, a proxy and this server could each read another one.
const ONCE: [&str; 5] = [
    "host",
    "origin",
    "cookie",
    "authorization",
    "idempotency-key",
];

/// A request with its query.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) method: Method,
    /// The path within the pages, as sent: nothing is decoded or resolved.
    pub(crate) path: String,
    pub(crate) query: Form,
    /// The path within the pages and the query, as sent.
    pub(crate) target: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    pub(crate) visitor: Visitor,
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

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// All values of this name.
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let of_name = self.0.iter().filter(move |(given, _)| given == name);
        of_name.map(|(_, value)| value.as_str())
    }
}

impl Request {
    /// `base`: the path below which the pages are served. The error is a refusal.
    pub(crate) fn new(
        request: http::Request<Vec<u8>>,
        visitor: Visitor,
        base: &str,
    ) -> Result<Self, Response> {
        let (head, body) = request.into_parts();
        for once in ONCE {
            if head.headers.get_all(once).iter().count() > 1 {
                let reason = format!("duplicate header {once}\n");
                return Err(Response::text(StatusCode::BAD_REQUEST, reason));
            }
        }
        let headers = head.headers.iter().map(|(name, value)| {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            (name.as_str().to_owned(), value)
        });
        Ok(Self {
            headers: headers.collect(),
            method: head.method,
            path: within(base, head.uri.path()),
            query: Form::parse(head.uri.query().unwrap_or_default().as_bytes()),
            target: head
                .uri
                .path_and_query()
                .map_or_else(String::new, |target| within(base, target.as_str())),
            body,
            visitor,
        })
    }

    /// The value of the header with this lower-case name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(given, _)| given == name)?;
        Some(value.trim())
    }

    /// Scheme and host under which the visitor reaches the pages. A proxy says whether it speaks TLS; otherwise only an
    /// address of this machine goes without.
    pub(crate) fn origin(&self) -> String {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
        let host = self
            .header("host")
            .filter(|host| !host.is_empty() && host.chars().all(is_plain));
        let Some(host) = host else {
            return "https://YOUR-HOST".to_owned();
        };
        let is_local = ["localhost", "127.", "[::1]"]
            .iter()
            .any(|local| host.starts_with(local));
        let scheme = match self.header("x-forwarded-proto") {
            Some(scheme @ ("http" | "https")) => scheme,
            _ if is_local => "http",
            _ => "https",
        };
        format!("{scheme}://{host}")
    }

    pub(crate) fn body(&self) -> &[u8] {
        &self.body
    }

    /// Whether no page in a browser has sent the request: browsers add neither a bearer token on their own, nor leave out
    /// the origin of a request that changes something.
    pub(crate) fn is_of_program(&self) -> bool {
        let marks = ["cookie", "origin", "sec-fetch-site"];
        self.bearer().is_some() || marks.iter().all(|name| self.header(name).is_none())
    }

    /// The token of `Authorization: Bearer`.
    pub(crate) fn bearer(&self) -> Option<&str> {
        let (scheme, token) = self.header("authorization")?.split_once(' ')?;
        (scheme.eq_ignore_ascii_case("bearer")).then_some(token.trim())
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
