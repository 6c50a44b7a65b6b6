//! Access tokens of OAuth 2.0: the client credentials grant (RFC 6749, 4.4).
//!
//! A sender that needs a token requests it itself, within the time of its send. There is one request at a time: other
//! senders use the old token while it is valid, otherwise they wait for the request and share its result. A token is
//! renewed at four fifths of its life, or when the receiver refuses it.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use ::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use secrecy::ExposeSecret;
use serde::Deserialize;
use serde_json::Value;
use url::form_urlencoded::{Serializer, byte_serialize};

use super::assertion::Assertions;
use super::form::Request;
use super::response::parse_retry_after;
use super::target::{Answer, Target};
use crate::config::{Client, OAuth2};
use crate::dispatch::{Failure, Outcome};
use crate::lock::lock;
use crate::status::{ReasonCode, TOKEN_SERVER};

/// The life of a token whose answer does not say it.
const DEFAULT_LIFE: Duration = Duration::from_secs(300);
/// The longest life of a token.
const LONGEST_LIFE: Duration = Duration::from_secs(24 * 3600);
/// The longest token.
const MOST_BYTES: usize = 16 * 1024;
/// The most characters of an error code that are shown.
const LONGEST_ERROR: usize = 64;

/// The tokens of one destination.
#[derive(Debug)]
pub(super) struct Tokens {
    target: Target,
    grant: Grant,
    state: Mutex<State>,
    has_ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    token: Option<Token>,
    is_requested: bool,
    /// Why the last request failed, until the next one begins.
    failed: Option<Outcome>,
}

/// A token, as the value of the header.
#[derive(Debug, Clone)]
pub(super) struct Token {
    pub(super) header: HeaderValue,
    requested_at: Instant,
    renew_at: Instant,
    expires_at: Instant,
}

impl Token {
    /// Whether the token was requested since then.
    pub(super) fn is_newer_than(&self, began: Instant) -> bool {
        self.requested_at >= began
    }
}

impl Tokens {
    /// `target` is the token server. The error is the reason.
    pub(super) fn new(oauth2: OAuth2, target: Target) -> Result<Self, String> {
        Ok(Self {
            target: target.reading_whole(),
            grant: Grant::new(oauth2)?,
            state: Mutex::default(),
            has_ended: Condvar::new(),
        })
    }

    /// A valid token for a send that began then, or the outcome of the send.
    pub(super) fn get(&self, began: Instant) -> Result<Token, Outcome> {
        let mut state = lock(&self.state);
        loop {
            let now = Instant::now();
            if let Some(token) = state.token.as_ref().filter(|one| now < one.expires_at)
                && (state.is_requested || now < token.renew_at)
            {
                return Ok(token.clone());
            }
            if !state.is_requested {
                break;
            }
            let left = self.target.left(began);
            if left.is_zero() {
                return Err(failed(self.target.timed_out()));
            }
            let waited = self.has_ended.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if let Some(failed) = &state.failed {
                return Err(failed.clone());
            }
        }
        state.is_requested = true;
        state.failed = None;
        drop(state);
        let _ended = Ended(self);
        let requested = self.request(began);
        let mut state = lock(&self.state);
        let now = Instant::now();
        match requested {
            Ok(token) => {
                state.token = Some(token.clone());
                Ok(token)
            }
            Err(outcome) => {
                state.failed = Some(outcome.clone());
                let old = state.token.as_mut().filter(|one| now < one.expires_at);
                let Some(old) = old else {
                    return Err(outcome);
                };
                if let Outcome::Retry(failure) | Outcome::Wait(failure) | Outcome::Dead(failure) =
                    outcome
                {
                    log::warn!(event = "token_not_renewed", destination = self.target.destination.name.as_str(); "cannot renew the token of destination {}: {}; using the old token while it is valid", self.target.destination.name, failure.error);
                }
                old.renew_at = now + (old.expires_at - now) / 5;
                Ok(old.clone())
            }
        }
    }

    /// Forgets a token that the receiver has refused.
    pub(super) fn refuse(&self, refused: &Token) {
        let mut state = lock(&self.state);
        let is_refused = |token: &Token| token.requested_at == refused.requested_at;
        if state.token.as_ref().is_some_and(is_refused) {
            state.token = None;
        }
    }

    fn request(&self, began: Instant) -> Result<Token, Outcome> {
        let requested_at = Instant::now();
        let answer = self.target.post(began, || self.grant.request());
        let Answer {
            response,
            retry_after,
            ..
        } = answer.map_err(failed)?;
        let body = response.body.unwrap_or_default();
        let answered = match response.status.unwrap_or_default() {
            200 => match token(&body, requested_at) {
                Ok(token) => return Ok(token),
                Err(reason) => format!("answered 200, but {reason}"),
            },
            status => match error_code(&body) {
                Some(code) => format!("answered {status} ({code})"),
                None => format!("answered {status}"),
            },
        };
        let error = format!("{TOKEN_SERVER}{answered}");
        let cap = self.target.destination.policy.retry_after_cap;
        let wait = retry_after.and_then(|value| parse_retry_after(&value, SystemTime::now()));
        Err(Outcome::Retry(Failure {
            retry_after: wait.map(|wait| wait.min(cap)),
            ..Failure::new(ReasonCode::TokenServer, error)
        }))
    }
}

/// A request has ended, also by a panic: wakes those who wait for it.
struct Ended<'a>(&'a Tokens);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).is_requested = false;
        self.0.has_ended.notify_all();
    }
}

/// The outcome of a send whose token request had no answer. What is not the token server's fault stays as it is.
fn failed(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Wait(failure) => Outcome::Wait(Failure {
            error: format!("{TOKEN_SERVER}{}", failure.error),
            ..failure
        }),
        Outcome::Retry(failure) | Outcome::Dead(failure) => Outcome::Retry(Failure {
            code: ReasonCode::TokenServer,
            error: format!("{TOKEN_SERVER}{}: {}", failure.code, failure.error),
            ..failure
        }),
        Outcome::Delivered(_) => outcome,
    }
}

/// A successful answer (RFC 6749, 5.1). Some servers write the seconds as text.
#[derive(Deserialize)]
struct Issued {
    access_token: String,
    token_type: Option<String>,
    expires_in: Option<Value>,
}

/// The token of an answer. The error is the reason, without the answer.
fn token(body: &str, requested_at: Instant) -> Result<Token, &'static str> {
    let issued: Issued =
        serde_json::from_str(body).map_err(|_| "the answer holds no access_token")?;
    let is_bearer = |kind: &str| kind.eq_ignore_ascii_case("bearer");
    if !issued.token_type.as_deref().is_none_or(is_bearer) {
        return Err("the token is of another type than Bearer");
    }
    let token = issued.access_token;
    if token.is_empty() || token.len() > MOST_BYTES {
        return Err("the token is empty, or longer than 16 KiB");
    }
    let header = HeaderValue::try_from(format!("Bearer {token}"));
    let mut header = header.map_err(|_| "the token cannot be sent in a header")?;
    header.set_sensitive(true);
    let seconds = match issued.expires_in {
        Some(Value::Number(seconds)) => seconds.as_f64(),
        Some(Value::String(seconds)) => seconds.parse().ok(),
        _ => None,
    };
    let life = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let life = life.unwrap_or(DEFAULT_LIFE).min(LONGEST_LIFE);
    Ok(Token {
        header,
        requested_at,
        renew_at: requested_at + life * 4 / 5,
        expires_at: requested_at + life,
    })
}

/// The error code of an answer (RFC 6749, 5.2), if it can be shown.
fn error_code(body: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Refused {
        error: String,
    }
    let Refused { error } = serde_json::from_str(body).ok()?;
    let is_code = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    (error.len() <= LONGEST_ERROR && error.bytes().all(is_code)).then_some(error)
}

/// The requests for tokens.
struct Grant {
    oauth2: OAuth2,
    assertions: Option<Assertions>,
}

impl Grant {
    fn new(oauth2: OAuth2) -> Result<Self, String> {
        let assertions = match &oauth2.client {
            Client::Jwt(key) => Some(Assertions::new(&oauth2.client_id, key)?),
            Client::Basic(_) | Client::Post(_) => None,
        };
        Ok(Self { oauth2, assertions })
    }

    fn request(&self) -> Result<Request<'static>, Failure> {
        let OAuth2 {
            client_id, client, ..
        } = &self.oauth2;
        let unsendable = |error: String| Failure::new(ReasonCode::InvalidHeader, error);
        let mut headers = HeaderMap::new();
        let form = HeaderValue::from_static("application/x-www-form-urlencoded");
        headers.insert(CONTENT_TYPE, form);
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        let mut body = Serializer::new(String::new());
        body.append_pair("grant_type", "client_credentials");
        body.extend_pairs(&self.oauth2.parameters);
        match client {
            Client::Basic(secret) => {
                headers.insert(AUTHORIZATION, basic(client_id, secret.expose_secret())?);
            }
            Client::Post(secret) => {
                body.append_pair("client_id", client_id);
                body.append_pair("client_secret", secret.expose_secret());
            }
            Client::Jwt(_) => {}
        }
        if let Some(assertions) = &self.assertions {
            let assertion = assertions.sign(SystemTime::now()).map_err(unsendable)?;
            body.append_pair("client_id", client_id);
            body.append_pair(
                "client_assertion_type",
                "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
            );
            body.append_pair("client_assertion", &assertion);
        }
        Ok(Request {
            headers,
            body: Cow::Owned(body.finish()),
        })
    }
}

/// Id and secret are form-encoded before they are joined (RFC 6749, 2.3.1).
fn basic(id: &str, secret: &str) -> Result<HeaderValue, Failure> {
    let [id, secret] = [id, secret].map(|part| byte_serialize(part.as_bytes()).collect::<String>());
    let value = format!("Basic {}", BASE64.encode(format!("{id}:{secret}")));
    let value = HeaderValue::try_from(value);
    let mut value =
        value.map_err(|error| Failure::new(ReasonCode::InvalidHeader, error.to_string()))?;
    value.set_sensitive(true);
    Ok(value)
}

impl fmt::Debug for Grant {
    /// Without secrets and keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grant")
            .field("client_id", &self.oauth2.client_id)
            .finish_non_exhaustive()
    }
}
