//! Asks an endpoint whether it wants messages, before the first is sent.
//!
//! A challenge is an event like any other, and is sent like one. The other way is that of CloudEvents:
//! [HTTP 1.1 Web Hooks for Event Delivery](https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/http-webhook.md),
//! section 4, without a callback.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use uuid::Uuid;

use super::form::origin;
use super::target::HttpAnswer;
use super::{EndpointClients, HttpDestination, response};
use crate::config::{Destination, Rate};
use crate::dispatch::{EndpointRefusal, Failure, NotVerified, Outcome, caught};
use crate::message::Message;
use crate::status::{NO_CHALLENGE, ReasonCode};

/// The topic of a challenge.
const TOPIC: &str = "outbox.verification";

/// Asks one endpoint.
#[derive(Debug)]
pub(crate) struct EndpointVerifier {
    place: HttpDestination,
    tenant_id: Option<Uuid>,
    origin: String,
}

impl EndpointClients {
    pub(crate) fn verifier(
        &self,
        destination: Destination,
        tenant_id: Option<Uuid>,
    ) -> Result<EndpointVerifier, EndpointRefusal> {
        let place = self.place(destination)?;
        Ok(EndpointVerifier {
            place: HttpDestination {
                target: place.target.reading_whole(),
                ..place
            },
            tenant_id,
            origin: origin(&self.source),
        })
    }
}

impl EndpointVerifier {
    /// The time limit of a try.
    pub(crate) fn timeout(&self) -> Duration {
        self.place.target.timeout
    }

    /// Sends the request, and waits for the response. Returns the rate limit that the endpoint asks for.
    pub(crate) fn ask(&self) -> Result<Option<Rate>, NotVerified> {
        let token = token();
        let destination = &self.place.target.destination;
        let payload = json!({ "destination": destination.name, "challenge": token });
        let message = Message::unstored(TOPIC, &destination.name, self.tenant_id, &payload);
        let asked = caught(&message, || {
            match destination.verification.is_by_cloudevents() {
                true => self.options(),
                false => self.challenge(&message, &token).map(|()| None),
            }
        });
        asked.unwrap_or_else(|failure| Err(again(failure)))
    }

    fn challenge(&self, message: &Message, token: &str) -> Result<(), NotVerified> {
        let answer = self.place.answer(|| {
            let checked = self.place.form.check(message)?;
            self.place.form.one(checked, SystemTime::now())
        });
        let answer = self.accepted(answer)?;
        match repeats(&answer.body, token) {
            true => Ok(()),
            false => Err(again(Failure::new(ReasonCode::NotVerified, NO_CHALLENGE))),
        }
    }

    fn options(&self) -> Result<Option<Rate>, NotVerified> {
        let answer = self.place.answer(|| Ok(self.place.form.options()));
        let answer = self.accepted(answer)?;
        let mut allowed = (answer.headers.get_all("webhook-allowed-origin").iter())
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .map(str::trim)
            .peekable();
        let is_final = allowed.peek().is_some();
        if !allowed.any(|one| one == "*" || one.eq_ignore_ascii_case(&self.origin)) {
            let error = format!(
                "the response does not allow the origin {} (WebHook-Allowed-Origin)",
                self.origin
            );
            let failure = Failure::new(ReasonCode::NotVerified, error);
            return Err(NotVerified { failure, is_final });
        }
        let rate = answer.header("webhook-allowed-rate").map(str::trim);
        match rate.filter(|rate| *rate != "*") {
            None => Ok(None),
            Some(rate) => Rate::asked(&format!("{rate}/min")).map(Some).map_err(|_| {
                let error = format!("the response has the WebHook-Allowed-Rate {rate:?}, which is no number of requests per minute");
                again(Failure::new(ReasonCode::Protocol, error))
            }),
        }
    }

    /// The answer, if it has a status of success.
    fn accepted(&self, answer: Result<HttpAnswer, Outcome>) -> Result<HttpAnswer, NotVerified> {
        let outcome = match answer {
            Ok(answer) if matches!(answer.response.status, Some(200..=299)) => return Ok(answer),
            Ok(answer) => {
                response::outcome(answer, &self.place.target.destination, SystemTime::now())
            }
            Err(outcome) => outcome,
        };
        Err(match outcome {
            Outcome::Retry(failure) | Outcome::Wait(failure) | Outcome::Dead(failure) => {
                NotVerified {
                    is_final: failure.code == ReasonCode::Gone,
                    failure,
                }
            }
            // Not reached: only a status of success is delivered.
            Outcome::Delivered(_) => again(Failure::new(ReasonCode::Failed, "")),
        })
    }
}

fn again(failure: Failure) -> NotVerified {
    NotVerified {
        failure,
        is_final: false,
    }
}

/// A text that nobody can guess.
fn token() -> String {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).expect("the system provides random numbers");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the body is the token, as text or as a JSON text, or a JSON object whose `challenge` is the token.
fn repeats(body: &str, token: &str) -> bool {
    let body = body.trim_start_matches('\u{feff}').trim();
    let json = serde_json::from_str::<Value>(body);
    body == token || json.is_ok_and(|json| json == token || json["challenge"] == token)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R59.
    #[test]
    fn a_challenge_is_repeated_as_the_body_or_as_a_field() {
        for body in [
            "abc",
            " abc\n",
            "\u{feff}abc",
            "\"abc\"",
            r#"{"challenge": "abc", "more": 1}"#,
        ] {
            assert!(repeats(body, "abc"), "{body}");
        }
        for body in ["", "abcd", "\"ab\"", r#"{"challenge": "ab"}"#, "[1]"] {
            assert!(!repeats(body, "abc"), "{body}");
        }
        assert_ne!(token(), token());
    }

    /// R59.
    #[test]
    fn the_origin_is_the_host_of_the_source() {
        assert_eq!(origin("https://shop.example/orders"), "shop.example");
        assert_eq!(origin("diesel-outbox/outbox"), "diesel-outbox");
        assert_eq!(origin("urn:shop"), "diesel-outbox");
    }
}
