//! JSON under `api/v1`, beside the pages of operators and beside the portal.
//!
//! Each of both has one table of routes. The router finds a route there, and the OpenAPI document is made from the table
//! and from the types of the answers, so neither has a route that the other lacks.

pub(crate) mod feed;
mod once;
mod openapi;

use std::borrow::Cow;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use diesel_outbox::ConfigError;
use http::header::{ALLOW, WWW_AUTHENTICATE};
use http::{Method, StatusCode};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::error::Category;
use serde_json::value::{RawValue, to_raw_value};
use serde_path_to_error::Segment;
use url::form_urlencoded;

pub(crate) use self::once::Caller;
pub(crate) use self::openapi::document;

use crate::database::Act;
use crate::request::Request;
use crate::response::Response;
use crate::visitor::Needs;

/// Rows of a page, if the request does not say how many, and the most.
const USUAL: usize = 50;
const MOST: usize = 100;
/// What the query of each list takes.
const OF_LISTS: [&str; 2] = ["limit", "cursor"];

/// The answer to a request, as JSON. With `left` above 0, or `more`, the same request continues.
type Answer<S, V> = Box<dyn Fn(&Call<'_, S, V>) -> Result<Vec<u8>, Problem> + Send + Sync>;

/// A route below `api/v1`. `S`: what answers; `V`: who asks.
pub(crate) struct Route<S: 'static, V: 'static> {
    /// The name in the document.
    pub(crate) id: Cow<'static, str>,
    pub(crate) method: Method,
    /// `{name}` is any segment.
    pub(crate) path: &'static str,
    pub(crate) needs: Needs,
    pub(crate) summary: &'static str,
    /// Parameters of the query, which are those of the page.
    pub(crate) query: &'static [&'static str],
    /// Whether the answer is a page of a list.
    pub(crate) is_list: bool,
    /// Whether the act is more than one transaction: it sends a request to an endpoint, or works on many messages. If the process
    /// fails before the answer is kept, the act is done again, on what matches then.
    pub(crate) lasts: bool,
    pub(crate) status: StatusCode,
    pub(crate) input: Option<fn(&mut SchemaGenerator) -> Schema>,
    pub(crate) output: fn(&mut SchemaGenerator) -> Schema,
    pub(crate) answer: Answer<S, V>,
}

/// A row of the table. The function takes the call and, after `<-`, the body of the request; its answer has the type
/// after `->`.
macro_rules! route {
    ($method:ident $path:expr, $needs:ident, $summary:expr, $answer:ident $(<- $input:ty)? => $output:ty $(, $field:ident: $value:expr)*) => {
        crate::api::Route {
            $($field: $value,)*
            ..crate::api::Route {
                id: stringify!($answer).into(),
                method: http::Method::$method,
                path: $path,
                needs: crate::visitor::Needs::$needs,
                summary: $summary,
                query: &[],
                is_list: false,
                lasts: false,
                status: http::StatusCode::OK,
                input: crate::api::input!($($input)?),
                output: |generator| generator.subschema_for::<$output>(),
                answer: Box::new(|call| {
                    let answer: $output = $answer(call $(, call.input::<$input>()?)?)?;
                    Ok(crate::api::text(&answer))
                }),
            }
        }
    };
}

macro_rules! input {
    () => {
        None
    };
    ($input:ty) => {
        Some(|generator| generator.subschema_for::<$input>())
    };
}

/// Declares what an answer shows of a row: a field, its type, its value.
macro_rules! view {
    ($(#[$about:meta])* $name:ident of ($($from:ident: $of:ty),+) { $($(#[$more:meta])* $field:ident: $kind:ty = $value:expr,)* }) => {
        $(#[$about])*
        #[derive(Debug, serde::Serialize, schemars::JsonSchema)]
        pub(super) struct $name { $($(#[$more])* $field: $kind,)* }

        impl $name {
            fn of($($from: $of),+) -> Self {
                Self { $($field: $value,)* }
            }
        }
    };
}

pub(crate) use {input, route, view};

/// A value of a body that may be null; absent: `None`, by the default of the field.
pub(crate) fn given<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(value).map(Some)
}

/// The body of an act that needs no more than its path.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}

/// An act without more to say.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Done {
    done: bool,
}

pub(crate) const DONE: Done = Done { done: true };

/// A page of a list.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "{T}List")]
pub(crate) struct Listed<T> {
    pub(crate) data: Vec<T>,
    /// The `cursor` of the next page. Null: this is the last page.
    pub(crate) next: Option<String>,
    /// `false`: rows of this page may be missing, because the search ran out of time.
    pub(crate) is_complete: bool,
}

impl<T> Listed<T> {
    pub(crate) fn new<R>(rows: &[R], view: impl Fn(&R) -> T, next: Option<String>) -> Self {
        Self {
            data: rows.iter().map(view).collect(),
            next,
            is_complete: true,
        }
    }
}

/// A time, RFC 3339.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline, extend("format" = "date-time"))]
pub(crate) struct Time(String);

impl From<&String> for Time {
    fn from(text: &String) -> Self {
        Self(text.clone())
    }
}

impl From<std::time::SystemTime> for Time {
    fn from(time: std::time::SystemTime) -> Self {
        Self(humantime::format_rfc3339_seconds(time).to_string())
    }
}

pub(crate) fn time(rfc3339: &Option<String>) -> Option<Time> {
    rfc3339.as_ref().map(Time::from)
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A value of any shape.
#[derive(Debug, Serialize)]
pub(crate) struct Json(Box<RawValue>);

impl Json {
    /// Stored JSON as it is, or any other text as a string.
    pub(crate) fn of(text: &str) -> Self {
        let json = RawValue::from_string(text.to_owned()).or_else(|_| to_raw_value(text));
        Self(json.unwrap_or_else(|_| RawValue::NULL.to_owned()))
    }
}

impl JsonSchema for Json {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Json".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        // Not `true`, which some generators of clients cannot read.
        Schema::default()
    }
}

/// What went wrong (RFC 9457).
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Problem {
    /// `about:blank`: the status says it.
    #[serde(rename = "type")]
    kind: &'static str,
    title: String,
    status: u16,
    /// What to mend.
    detail: String,
    /// The field of the body, or the parameter, that is meant.
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<String>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            kind: "about:blank",
            title: status.canonical_reason().unwrap_or_default().to_owned(),
            status: status.as_u16(),
            detail: detail.into(),
            field: None,
        }
    }

    /// There is no such thing, or not for this visitor.
    pub(crate) fn missing() -> Self {
        Self::new(StatusCode::NOT_FOUND, "there is no such thing")
    }

    /// The database failed. Only the log says why.
    fn away(error: anyhow::Error) -> Self {
        log::warn!(event = "pages_failed", error:% = format!("{error:#}"); "an act with an Idempotency-Key failed: {error:#}");
        let why = "the database does not answer: send the same request again";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
    }

    pub(crate) fn invalid(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
    }

    pub(crate) fn of_field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    /// The field is that of a setting with an error.
    pub(crate) fn of_setting(self, error: &ConfigError) -> Self {
        self.of_field(error.key().rsplit('.').next().unwrap_or_default())
    }

    /// The refusal of a request to a page, with its headers.
    pub(crate) fn of(refused: Response) -> Response {
        let problem = Self::new(refused.status, refused.words().unwrap_or_default());
        refused.with_page(problem.into())
    }
}

impl From<Problem> for Response {
    fn from(problem: Problem) -> Self {
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::BAD_REQUEST);
        let response = Self::json(status, text(&problem));
        match status {
            StatusCode::UNAUTHORIZED => response.with_header(WWW_AUTHENTICATE, "Bearer"),
            _ => response,
        }
    }
}

/// The value as JSON. The types of answers have only text keys, so this cannot fail.
pub(crate) fn text(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

/// A request to a route.
pub(crate) struct Call<'a, S, V> {
    pub(crate) site: &'a S,
    pub(crate) visitor: &'a V,
    pub(crate) request: &'a Request,
    /// All that the request does is one transaction.
    pub(crate) act: Option<Act<'a>>,
    /// When a request with a key was sent first: it is not about what came later.
    pub(crate) since: Option<SystemTime>,
    parts: &'a [(&'static str, String)],
}

impl<S, V> Call<'_, S, V> {
    /// What stands in the path for `{name}`.
    pub(crate) fn part(&self, name: &str) -> &str {
        let mut parts = self.parts.iter();
        let found = parts.find(|(part, _)| *part == name);
        debug_assert!(found.is_some(), "the path has no {name}");
        found.map_or("", |(_, value)| value.as_str())
    }

    /// The same as a number or an id. What cannot be one does not exist.
    pub(crate) fn parsed<T: FromStr>(&self, name: &str) -> Result<T, Problem> {
        self.part(name).parse().map_err(|_| Problem::missing())
    }

    /// A parameter of the query.
    pub(crate) fn asked(&self, name: &str) -> Option<&str> {
        self.request.query.get(name).map(str::trim)
    }

    /// A parameter that is `true` or `false`; absent: `false`.
    pub(crate) fn flag(&self, name: &'static str) -> Result<bool, Problem> {
        let given: Vec<&str> = self.request.query.all(name).collect();
        let flag = match given.as_slice() {
            [] => Some(false),
            [one] => one.parse().ok(),
            _ => None,
        };
        let wrong = || Problem::invalid("must be true or false, once").of_field(name);
        flag.ok_or_else(wrong)
    }

    pub(crate) fn limit(&self) -> Result<usize, Problem> {
        let limit = self.asked("limit").map_or(Ok(USUAL), str::parse);
        let limit = limit.ok().filter(|limit| (1..=MOST).contains(limit));
        let why = || Problem::invalid(format!("must be a number from 1 to {MOST}"));
        limit.ok_or_else(|| why().of_field("limit"))
    }

    /// The place where the page begins.
    pub(crate) fn cursor<T: FromStr>(&self) -> Result<Option<T>, Problem> {
        let cursor = self.asked("cursor").map(str::parse).transpose();
        cursor.map_err(|_| Problem::invalid("is not the `next` of a list").of_field("cursor"))
    }

    /// The body.
    pub(crate) fn input<T: DeserializeOwned>(&self) -> Result<T, Problem> {
        let kind = self.request.header("content-type").unwrap_or_default();
        let kind = kind.split(';').next().unwrap_or_default().trim();
        let body = match self.request.body() {
            // A form of another site, in a browser that does not say where a request comes from, is no act.
            [] if kind.is_empty() || self.request.bearer().is_some() => b"{}",
            _ if !kind.eq_ignore_ascii_case("application/json") => {
                let why = "the body must be JSON, with content-type: application/json";
                return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
            }
            body => body,
        };
        // PostgreSQL's text cannot hold it.
        if body.windows(6).any(|part| part == br"\u0000") {
            return Err(Problem::invalid("the body has the character U+0000"));
        }
        let mut reader = serde_json::Deserializer::from_slice(body);
        let read = serde_path_to_error::deserialize(&mut reader).map_err(unread);
        let malformed =
            |error: serde_json::Error| Problem::new(StatusCode::BAD_REQUEST, error.to_string());
        read.and_then(|input| reader.end().map(|()| input).map_err(malformed))
    }
}

/// What a body lacks or has too much, and the field that is meant.
fn unread(error: serde_path_to_error::Error<serde_json::Error>) -> Problem {
    let mut names = error.path().iter().filter_map(|segment| match segment {
        Segment::Map { key } => Some(key.clone()),
        _ => None,
    });
    let field = names.next_back();
    let error = error.into_inner();
    // serde says this only in words. The path ends at the object that lacks the field.
    let text = error.to_string();
    let missing = text.strip_prefix("missing field `");
    let missing = missing.and_then(|rest| rest.split_once('`'));
    let field = missing.map(|(name, _)| name.to_owned()).or(field);
    let problem = match error.classify() {
        Category::Data => Problem::invalid(text),
        _ => Problem::new(StatusCode::BAD_REQUEST, text),
    };
    Problem { field, ..problem }
}

impl<S, V> Route<S, V> {
    /// What the path has for each `{name}`, if it is of this route.
    fn parts(&self, path: &str) -> Option<Vec<(&'static str, String)>> {
        let (own, given) = (self.path.split('/'), path.split('/'));
        if own.clone().count() != given.clone().count() {
            return None;
        }
        let mut parts = Vec::new();
        for (own, given) in own.zip(given) {
            match own.strip_prefix('{').and_then(|own| own.strip_suffix('}')) {
                Some(name) if !given.is_empty() => parts.push((name, decoded(given))),
                _ if own == given => {}
                _ => return None,
            }
        }
        Some(parts)
    }

    /// The names in the path.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        let segments = self.path.split('/');
        segments.filter_map(|one| one.strip_prefix('{')?.strip_suffix('}'))
    }

    /// All parameters of the query.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &'static str> {
        let of_list = OF_LISTS.into_iter().filter(|_| self.is_list);
        self.query.iter().copied().chain(of_list)
    }
}

/// A segment of a path without its `%` escapes.
pub(crate) fn decoded(segment: &str) -> String {
    let escaped = segment.replace('+', "%2B").replace('&', "%26");
    let escaped = escaped.replace('=', "%3D");
    let mut pairs = form_urlencoded::parse(escaped.as_bytes());
    let text = pairs.next().map(|(text, _)| text.replace('\0', ""));
    text.unwrap_or_default()
}

const BASE: &str = "/api/v1";

/// The path below `api/v1`, if the request is one for JSON.
pub(crate) fn path(request: &Request) -> Option<&str> {
    let path = request.path.strip_prefix(BASE)?;
    path.starts_with('/').then_some(path)
}

/// The refusal of a request that cannot be read: a problem, if the request is one for JSON, whatever the base.
pub(crate) fn refused(target: &str, refused: Response) -> Response {
    let path = target.split('?').next().unwrap_or_default();
    match path.contains(&format!("{BASE}/")) {
        true => Problem::of(refused),
        false => refused,
    }
}

/// The answer to a request. `admit`: lets the visitor in, with what the route needs. `caller`: on whose behalf the visitor
/// acts.
pub(crate) fn answer<'a, S, V>(
    routes: &'static [Route<S, V>],
    site: &'a S,
    request: &Request,
    path: &str,
    admit: impl FnOnce(&Route<S, V>) -> Result<V, Response>,
    caller: impl FnOnce(&'a S, &V) -> Caller<'a>,
) -> Response {
    let method = match request.method {
        Method::HEAD => &Method::GET,
        ref other => other,
    };
    let at = routes
        .iter()
        .filter_map(|route| Some((route, route.parts(path)?)));
    let mut at: Vec<_> = at.collect();
    let Some(which) = at.iter().position(|(route, _)| route.method == *method) else {
        let methods: Vec<&str> = at.iter().map(|(route, _)| route.method.as_str()).collect();
        return match methods.is_empty() {
            true => {
                let why = "there is no such path: `openapi.json` has all";
                Problem::new(StatusCode::NOT_FOUND, why).into()
            }
            false => {
                let why = "this path has other methods";
                let refused = Problem::new(StatusCode::METHOD_NOT_ALLOWED, why);
                Response::from(refused).with_header(ALLOW, &methods.join(", "))
            }
        };
    };
    let (route, parts) = at.swap_remove(which);
    let visitor = match admit(route) {
        Ok(visitor) => visitor,
        Err(refused) => return refused,
    };
    let unknown = request.query.names().find(|name| {
        let mut parameters = route.parameters();
        !parameters.any(|own| own == *name)
    });
    if let Some(name) = unknown {
        let why = "there is no such parameter";
        return Problem::new(StatusCode::BAD_REQUEST, why)
            .of_field(name)
            .into();
    }
    let call = Call {
        site,
        visitor: &visitor,
        request,
        act: None,
        since: None,
        parts: &parts,
    };
    let done = match route.method {
        Method::GET => (route.answer)(&call).map(|answer| Response::json(route.status, answer)),
        _ => caller(site, &visitor).act(route, &call),
    };
    done.unwrap_or_else(Response::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_of_a_path_is_decoded_once() {
        for (segment, text) in [
            ("acme", "acme"),
            ("a%2Fb%20c", "a/b c"),
            ("a+b&c=d", "a+b&c=d"),
            ("%2525", "%25"),
            ("%00", ""),
        ] {
            assert_eq!(decoded(segment), text, "{segment}");
        }
    }

    #[test]
    fn json_that_cannot_be_read_is_shown_as_text() {
        let shown = |text: &str| String::from_utf8(super::text(&Json::of(text))).expect("UTF-8");
        assert_eq!(shown("{\"a\": 1.10}"), "{\"a\": 1.10}");
        assert_eq!(shown("<b>"), "\"<b>\"");
    }
}
