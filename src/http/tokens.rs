//! Access tokens of OAuth 2.0: the client credentials grant (RFC 6749, 4.4).
//!
//! A sender that needs a token requests it itself, within the time of its send. There is one request at a time: other
//! senders use the old token while it is valid, otherwise they wait for the request and share its result. A token is
//! renewed at four fifths of its life, or when the receiver refuses it.

use std::borrow::Cow;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use ::http::Method;
use ::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use secrecy::ExposeSecret;
use serde_json::{Map, Value};
use url::form_urlencoded::{self, Serializer, byte_serialize};

use super::assertion::Assertions;
use super::form::Request;
use super::retry_after::retry_after;
use super::target::Target;
use crate::clock;
use crate::config::{Client, OAuth2};
use crate::dispatch::{Failure, Outcome};
use crate::lock::lock;
use crate::log;
use crate::shows::shows;
use crate::status::{ReasonCode, TOKEN_SERVER};

/// The life of a token whose answer does not say it.
const DEFAULT_LIFE: Duration = Duration::from_secs(300);
/// A token is kept for at least this long, so that messages do not wait for a request each: the receiver refuses a token
/// that has ended before, and gets a new one at once.
const SHORTEST_LIFE: Duration = Duration::from_secs(10);
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
    state: Mutex<TokenState>,
    has_ended: Condvar,
}

#[derive(Debug, Default)]
struct TokenState {
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
        let _ended = RequestEnded(self);
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
                old.renew_at = now + (old.expires_at - now) / 5;
                let old = old.clone();
                drop(state);
                if let Outcome::Retry(failure) | Outcome::Wait(failure) | Outcome::Dead(failure) =
                    outcome
                {
                    log::warn!(event = "token_not_renewed", destination = self.target.destination.name.as_str(); "cannot renew the token of destination {}: {}; using the old token while it is valid", self.target.destination.name, failure.error);
                }
                Ok(old)
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
        let answer = answer.map_err(failed)?;
        let wait = retry_after(&answer.headers, SystemTime::now());
        let status = answer.response.status.unwrap_or_default();
        let more = match status {
            200..=299 => match token(&answer.body, requested_at) {
                Ok(token) => return Ok(token),
                Err(reason) => Some(answer.quoted(", but ", reason)),
            },
            _ => error_code(&answer.body).map(|code| answer.quoted(" ", &format!("({code})"))),
        };
        let more = more.unwrap_or_default();
        let error = format!("{TOKEN_SERVER}answered {status}{more}");
        let cap = self.target.destination.policy.retry_after_cap;
        Err(Outcome::Retry(Failure {
            retry_after: wait.map(|wait| wait.min(cap)),
            ..Failure::new(ReasonCode::TokenServer, error)
        }))
    }
}

/// A request has ended, also by a panic: wakes those who wait for it.
struct RequestEnded<'a>(&'a Tokens);

impl Drop for RequestEnded<'_> {
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

/// The members of an answer: a JSON object (RFC 6749, 5.1) or, from old servers, a form. The last of several members of
/// a name counts.
fn members(body: &str) -> Map<String, Value> {
    let body = body.trim_start_matches('\u{feff}').trim();
    serde_json::from_str(body).unwrap_or_else(|_| {
        let pairs = form_urlencoded::parse(body.as_bytes());
        pairs
            .map(|(name, value)| (name.into_owned(), value.into()))
            .collect()
    })
}

/// The token of an answer. The error is the reason, without the answer.
fn token(body: &str, requested_at: Instant) -> Result<Token, &'static str> {
    let issued = members(body);
    let kind = issued
        .get("token_type")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let kind = kind.trim().to_ascii_lowercase();
    if !matches!(kind.as_str(), "" | "bearer" | "bearertoken") {
        return Err("the token is of another type than Bearer");
    }
    let token = issued.get("access_token").and_then(Value::as_str);
    let token = token.ok_or("the answer holds no access_token")?;
    if token.is_empty() || token.len() > MOST_BYTES {
        return Err("the token is empty, or longer than 16 KiB");
    }
    let header = HeaderValue::try_from(format!("Bearer {token}"));
    let mut header = header.map_err(|_| "the token cannot be sent in a header")?;
    header.set_sensitive(true);
    // Some servers write the seconds as text, and zero for a token that does not expire.
    let seconds = match issued.get("expires_in") {
        Some(Value::Number(seconds)) => seconds.as_f64(),
        Some(Value::String(seconds)) => seconds.trim().parse().ok(),
        _ => None,
    };
    let life = seconds.and_then(|seconds: f64| Duration::try_from_secs_f64(seconds).ok());
    let life = life.filter(|life| !life.is_zero()).unwrap_or(DEFAULT_LIFE);
    let life = life.clamp(SHORTEST_LIFE, LONGEST_LIFE);
    Ok(Token {
        header,
        requested_at,
        renew_at: clock::after(requested_at, life * 4 / 5),
        expires_at: clock::after(requested_at, life),
    })
}

/// The error code of an answer (RFC 6749, 5.2), if it can be shown.
fn error_code(body: &str) -> Option<String> {
    let members = members(body);
    let error = members.get("error")?.as_str()?;
    let is_code = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    (error.len() <= LONGEST_ERROR && error.bytes().all(is_code)).then(|| error.to_owned())
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
            method: Method::POST,
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

shows! {
    /// Without secrets and keys.
    Grant: client_id = [oauth2.client_id]
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, channel};
    use std::thread::{scope, spawn};

    use super::super::lookups::system_lookup;
    use super::super::target::Common;
    use super::*;
    use crate::config::{Auth, AuthKind, Config, Destination};

    const HOUR: Duration = Duration::from_secs(3600);

    /// Tokens of a server that hands each request to the test.
    fn tokens(timeout: Duration) -> (Arc<Tokens>, Receiver<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!(
            "http://{}/token",
            listener.local_addr().expect("an address")
        );
        let (sender, requests) = channel();
        spawn(move || {
            for stream in listener.incoming().flatten() {
                read_request(&stream);
                if sender.send(stream).is_err() {
                    break;
                }
            }
        });
        let settings = serde_json::json!({
            "type": "oauth2", "token_url": url, "client_id": "shop", "client_secret": "hunter2",
        });
        let auth: Auth = settings.to_string().parse().expect("good");
        let AuthKind::OAuth2(oauth2) = auth.kind else {
            panic!("oauth2");
        };
        let server = Destination::new("shop", &url)
            .expect("a URL")
            .configure(|destination| destination.policy.timeout = Some(timeout));
        let mut common = Common::new(Box::new(system_lookup));
        let target = Target::new(server, &Config::default(), &mut common).expect("a target");
        let tokens = Tokens::new(*oauth2, target).expect("tokens");
        assert!(!format!("{tokens:?}").contains("hunter2"));
        (Arc::new(tokens), requests)
    }

    fn read_request(stream: &TcpStream) {
        let mut reader = BufReader::new(stream);
        let (mut line, mut length) = (String::new(), 0);
        while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
            let lower = line.to_ascii_lowercase();
            if let Some(value) = lower.strip_prefix("content-length:") {
                length = value.trim().parse().expect("a number");
            }
            line.clear();
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).expect("a body");
    }

    fn answer(mut stream: TcpStream, status: u16, body: &str) {
        let length = body.len();
        write!(
            stream,
            "HTTP/1.1 {status} OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .expect("the client waits");
    }

    fn issue(stream: TcpStream, token: &str) {
        let body = format!(r#"{{"access_token":"{token}","expires_in":3600}}"#);
        answer(stream, 200, &body);
    }

    fn value(token: &Token) -> &str {
        token.header.to_str().expect("ASCII")
    }

    /// The value of the token that a new send gets.
    fn get(tokens: &Tokens) -> Result<String, String> {
        match tokens.get(Instant::now()) {
            Ok(token) => Ok(value(&token).to_owned()),
            Err(Outcome::Retry(failure)) => {
                assert_eq!(failure.code, ReasonCode::TokenServer);
                Err(failure.error)
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Makes the token due for renewal, with this life left.
    fn age(tokens: &Tokens, left: Duration) {
        let (mut state, now) = (lock(&tokens.state), Instant::now());
        let token = state.token.as_mut().expect("a token");
        (token.renew_at, token.expires_at) = (now, now + left);
    }

    /// R59
    #[test]
    fn senders_without_a_token_wait_for_one_request_and_share_its_result() {
        for is_issued in [true, false] {
            let (tokens, requests) = tokens(HOUR);
            let results = scope(|scope| {
                let gets = [(); 8].map(|()| scope.spawn(|| get(&tokens)));
                let stream = requests.recv().expect("a request");
                match is_issued {
                    true => issue(stream, "t1"),
                    false => answer(stream, 500, ""),
                }
                // A sender that comes after a failure requests a token itself.
                while gets.iter().any(|one| !one.is_finished()) {
                    if let Ok(stream) = requests.recv_timeout(Duration::from_millis(5)) {
                        answer(stream, 500, "");
                    }
                }
                gets.map(|one| one.join().expect("no panic"))
            });
            let expected = match is_issued {
                true => Ok("Bearer t1".to_owned()),
                false => Err("token server: answered 500".to_owned()),
            };
            assert!(results.iter().all(|one| *one == expected), "{results:?}");
            assert!(!is_issued || requests.try_recv().is_err());
        }
    }

    /// R59: as servers write it that are older than the standard, or read it loosely.
    #[test]
    fn a_token_is_read_in_each_form_in_which_servers_send_it() {
        for (status, body) in [
            (201, r#"{"access_token":"t1","token_type":"Bearer"}"#),
            (
                200,
                r#"{"access_token":"t1","token_type":"BearerToken","expires_in":"3600"}"#,
            ),
            (200, r#"{"access_token":"t1","token_type":""}"#),
            (200, r#"{"access_token":"t1","token_type":null}"#),
            (200, "\u{feff} {\"access_token\":\"t1\"}"),
            (200, "access_token=t1&token_type=bearer&expires_in=3600"),
            (
                200,
                r#"{"access_token":"old","token_type":"bearer","access_token":"t1"}"#,
            ),
        ] {
            let (tokens, requests) = tokens(HOUR);
            let got = scope(|scope| {
                let first = scope.spawn(|| get(&tokens));
                answer(requests.recv().expect("a request"), status, body);
                first.join().expect("no panic")
            });
            assert_eq!(got, Ok("Bearer t1".to_owned()), "{body}");
        }
        for (body, why) in [
            ("<p>welcome</p>", "holds no access_token"),
            ("", "holds no access_token"),
            ("[1]", "holds no access_token"),
            (r#"{"access_token":7}"#, "holds no access_token"),
            (
                r#"{"access_token":"t","token_type":"DPoP"}"#,
                "another type",
            ),
        ] {
            let error = token(body, Instant::now()).expect_err("no token");
            assert!(error.contains(why), "{body}: {error}");
        }
    }

    /// R59
    #[test]
    fn while_one_sender_renews_the_token_others_use_the_old_one() {
        let (tokens, requests) = tokens(HOUR);
        scope(|scope| {
            let first = scope.spawn(|| get(&tokens));
            issue(requests.recv().expect("a request"), "t1");
            assert_eq!(first.join().expect("no panic"), Ok("Bearer t1".to_owned()));
            age(&tokens, HOUR);
            let renewing = scope.spawn(|| get(&tokens));
            let request = requests.recv().expect("a request");
            for _ in 0..3 {
                assert_eq!(get(&tokens), Ok("Bearer t1".to_owned()));
            }
            issue(request, "t2");
            assert_eq!(
                renewing.join().expect("no panic"),
                Ok("Bearer t2".to_owned())
            );
            assert_eq!(get(&tokens), Ok("Bearer t2".to_owned()));
        });
        assert!(requests.try_recv().is_err());
    }

    /// R59
    #[test]
    fn a_renewal_that_fails_leaves_the_old_token_for_as_long_as_it_is_valid() {
        let (tokens, requests) = tokens(HOUR);
        scope(|scope| {
            let first = scope.spawn(|| get(&tokens));
            issue(requests.recv().expect("a request"), "t1");
            first.join().expect("no panic").expect("a token");
            age(&tokens, HOUR);
            let renewing = scope.spawn(|| get(&tokens));
            answer(requests.recv().expect("a request"), 503, "");
            assert_eq!(
                renewing.join().expect("no panic"),
                Ok("Bearer t1".to_owned())
            );
            // Not at once again.
            assert_eq!(get(&tokens), Ok("Bearer t1".to_owned()));
            assert!(requests.try_recv().is_err());
            age(&tokens, Duration::ZERO);
            let expired = scope.spawn(|| get(&tokens));
            answer(requests.recv().expect("a request"), 503, "");
            let error = expired.join().expect("no panic").expect_err("no token");
            assert_eq!(error, "token server: answered 503");
        });
    }

    /// R59
    #[test]
    fn a_sender_waits_for_a_token_no_longer_than_its_send_may_take() {
        let (tokens, requests) = tokens(Duration::from_millis(300));
        scope(|scope| {
            let gets = [(); 3].map(|()| scope.spawn(|| get(&tokens)));
            for one in gets {
                let error = one.join().expect("no panic").expect_err("no token");
                assert_eq!(error, "token server: TIMEOUT: no response within 300 ms");
            }
        });
        drop(requests);
    }

    /// R59
    #[test]
    fn only_the_refused_token_is_forgotten() {
        let (tokens, requests) = tokens(HOUR);
        let get = || tokens.get(Instant::now()).expect("a token");
        scope(|scope| {
            let first = scope.spawn(get);
            issue(requests.recv().expect("a request"), "t1");
            let first = first.join().expect("no panic");
            tokens.refuse(&first);
            let second = scope.spawn(get);
            issue(requests.recv().expect("a request"), "t2");
            assert_eq!(value(&second.join().expect("no panic")), "Bearer t2");
            // Another sender comes with the first token.
            tokens.refuse(&first);
            assert_eq!(value(&get()), "Bearer t2");
        });
    }

    /// R59
    #[test]
    fn the_life_of_a_token_is_read_in_every_form_that_servers_write() {
        let now = Instant::now();
        let life = |expires: &str| {
            let body = format!(r#"{{"access_token":"a"{expires}}}"#);
            let token = token(&body, now).expect("a token");
            let life = token.expires_at - now;
            assert_eq!(token.renew_at - now, life * 4 / 5);
            life.as_secs()
        };
        for (expires, seconds) in [
            (r#","expires_in":3600"#, 3600),
            (r#","expires_in":"3600""#, 3600),
            // Each message would cost a request otherwise, one after another.
            (r#","expires_in":0"#, 300),
            (r#","expires_in":"0""#, 300),
            (r#","expires_in":1e-308"#, 300),
            (r#","expires_in":1"#, 10),
            (r#","expires_in":60"#, 60),
            (r#","expires_in":1e300"#, 300),
            (r#","expires_in":999999999"#, 24 * 3600),
            (r#","expires_in":-1"#, 300),
            (r#","expires_in":null"#, 300),
            ("", 300),
        ] {
            assert_eq!(life(expires), seconds, "{expires}");
        }
        let long = format!(r#"{{"access_token":"{}"}}"#, "a".repeat(MOST_BYTES + 1));
        for bad in ["", "[]", r#"{"access_token":""}"#, &long] {
            assert!(token(bad, now).is_err());
        }
    }

    /// R59
    #[test]
    fn an_error_code_is_shown_only_if_it_is_one() {
        let of = |error: &str| error_code(&serde_json::json!({ "error": error }).to_string());
        assert_eq!(of("invalid_client").as_deref(), Some("invalid_client"));
        for odd in ["a b", "<script>", &"a".repeat(65)] {
            assert_eq!(of(odd), None);
        }
        assert_eq!(error_code("no JSON"), None);
    }
}
