//! `Idempotency-Key`: a request that is sent again acts once, and gets the same answer.
//!
//! The key and the answer are written in the transaction of the act, so a crash leaves both or none. An act that sends, or
//! works on many messages, has no transaction with its key: that is written before, and its answer after. If the process or the database fails
//! in between, the key stays taken for some minutes.

use std::collections::BTreeMap;

use diesel_outbox::program::{Keyed, Known};
use http::StatusCode;
use http::header::HeaderName;
use serde::Deserialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use super::{Call, Problem, Route};
use crate::Rights;
use crate::database::Database;
use crate::request::Request;
use crate::response::Response;

pub(super) const KEY: &str = "idempotency-key";
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// The longest key, in bytes.
pub(super) const LONGEST: usize = 255;

/// On whose behalf a visitor acts.
pub(crate) struct Caller<'a> {
    /// For changes.
    pub(crate) database: &'a Database,
    /// Callers with one name share their keys.
    pub(crate) name: String,
    /// With other rights, the answer is another one.
    pub(crate) rights: Rights,
}

impl Caller<'_> {
    /// Carries out an act, or repeats the answer to it.
    pub(super) fn act<S, V>(
        &self,
        route: &Route<S, V>,
        call: &Call<'_, S, V>,
    ) -> Result<Response, Problem> {
        let Some(key) = key(call.request)? else {
            return (route.answer)(call).map(|answer| Response::json(route.status, answer));
        };
        let request = Keyed {
            caller: &self.name,
            key,
            digest: &self.digest(call.request),
        };
        match route.lasts {
            true => self.once(request, route, call),
            false => {
                let done = self.database.together(&self.name, |act| {
                    let act = Some(act);
                    self.once(request, route, &Call { act, ..*call })
                });
                done.map_err(Problem::away)?
            }
        }
    }

    fn once<S, V>(
        &self,
        request: Keyed<'_>,
        route: &Route<S, V>,
        call: &Call<'_, S, V>,
    ) -> Result<Response, Problem> {
        let claim = |conn: &mut _, outbox: &_| request.claim(conn, outbox);
        let known = self.database.within(call.act, &self.name, claim);
        let since = match known.map_err(Problem::away)? {
            Known::New(since) => since,
            Known::Running => {
                let why = "a request with this key has not ended";
                return Err(Problem::new(StatusCode::CONFLICT, why).of_field(KEY));
            }
            Known::Other => {
                return Err(Problem::invalid("this key is that of another request").of_field(KEY));
            }
            Known::Answered(status, answer) => {
                let status = u16::try_from(status).ok();
                let status = status.and_then(|status| StatusCode::from_u16(status).ok());
                let status = status.unwrap_or(route.status);
                let answer = Response::json(status, answer.into_bytes());
                return Ok(answer.with_header(REPLAYED, "true"));
            }
        };
        let since = Some(since);
        let done = (route.answer)(&Call { since, ..*call });
        // A test fails only before it is sent; asking an endpoint or recovering twice does no harm: what failed may be tried again.
        // What is left of an act on many messages is done by the same request.
        let kept = done.as_ref().ok();
        let kept = kept.map(|answer| (route.status.as_u16(), without_secret(answer)));
        let kept = kept.as_ref().map(|(status, body)| (*status, body.as_str()));
        // Steps that were done before the database failed stay.
        let has_failed = |problem: &Problem| route.lasts && problem.status >= 500;
        let has_failed = done.as_ref().err().is_some_and(has_failed);
        let keep = |conn: &mut _, outbox: &_| match kept {
            Some((_, body)) if is_unfinished(body) => request.is_unfinished(conn, outbox),
            None if has_failed => request.is_unfinished(conn, outbox),
            kept => request.answer(conn, outbox, kept),
        };
        if let Err(error) = self.database.within(call.act, &self.name, keep) {
            let problem = Problem::away(error);
            if call.act.is_some() {
                return Err(problem);
            }
            // What was sent stays sent: its answer is the truth, though no later request gets it.
        }
        done.map(|answer| Response::json(route.status, answer))
    }

    /// Of all that makes it another request.
    fn digest(&self, request: &Request) -> [u8; 32] {
        let head = format!("{:?} {} {}\n", self.rights, request.method, request.target);
        let digest = Sha256::new_with_prefix(head).chain_update(request.body());
        digest.finalize().into()
    }
}

/// The key of a request, with or without quotes.
fn key(request: &Request) -> Result<Option<&str>, Problem> {
    let Some(key) = request.header(KEY) else {
        return Ok(None);
    };
    let bare = key.strip_prefix('"').and_then(|key| key.strip_suffix('"'));
    let key = bare.unwrap_or(key);
    let is_plain = key.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    match is_plain && (1..=LONGEST).contains(&key.len()) {
        true => Ok(Some(key)),
        false => {
            let why = format!("must have 1 to {LONGEST} ASCII characters");
            Err(Problem::new(StatusCode::BAD_REQUEST, why).of_field(KEY))
        }
    }
}

/// Whether the act has left something, which the same request does.
fn is_unfinished(answer: &str) -> bool {
    #[derive(Deserialize)]
    struct Rest {
        #[serde(default)]
        left: u64,
        #[serde(default)]
        more: bool,
    }
    serde_json::from_str::<Rest>(answer).is_ok_and(|rest| rest.left > 0 || rest.more)
}

/// What an answer shows only once.
const SECRETS: [&str; 2] = ["secret", "token"];

/// The answer as it is kept.
fn without_secret(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body).into_owned();
    match serde_json::from_str::<BTreeMap<&str, &RawValue>>(&text) {
        Ok(mut fields) if SECRETS.iter().any(|secret| fields.contains_key(secret)) => {
            let secrets = fields.iter_mut().filter(|(name, _)| SECRETS.contains(name));
            secrets.for_each(|(_, value)| *value = RawValue::NULL);
            String::from_utf8_lossy(&super::text(&fields)).into_owned()
        }
        _ => text,
    }
}
