//! What an answer's status means for the message.

use std::time::{Duration, SystemTime};

use super::{Failure, Outcome, Response};
use crate::status::ReasonCode;

/// The longest wait that a receiver can ask for.
const RETRY_AFTER_CAP: Duration = Duration::from_secs(3600);

/// The outcome of an answer with this status.
pub(super) fn outcome(response: Response, retry_after: Option<&str>, now: SystemTime) -> Outcome {
    let status = response.status.unwrap_or_default();
    let (code, is_final) = match status {
        200..=299 => return Outcome::Delivered(response),
        300..=399 => (ReasonCode::Redirect, false),
        400 | 413 | 415 | 422 => (ReasonCode::Rejected, true),
        410 => (ReasonCode::Gone, true),
        429 => (ReasonCode::RateLimited, false),
        401..=499 => (ReasonCode::ClientError, false),
        500..=599 => (ReasonCode::ServerError, false),
        _ => (ReasonCode::Protocol, false),
    };
    let may_ask_to_wait = matches!(status, 408 | 409 | 425 | 429 | 500..=599);
    let failure = Failure {
        code,
        error: format!("the receiver answered {status}"),
        response,
        retry_after: retry_after
            .filter(|_| may_ask_to_wait)
            .and_then(|value| parse_retry_after(value, now)),
    };
    if is_final {
        Outcome::Dead(failure)
    } else {
        Outcome::Retry(failure)
    }
}

/// Both forms of `Retry-After` (RFC 9110, 10.2.3): seconds, or a date.
fn parse_retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    let wait = if !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit()) {
        // More digits than a number has are more than the cap, too.
        value.parse().map_or(RETRY_AFTER_CAP, Duration::from_secs)
    } else {
        httpdate::parse_http_date(value)
            .ok()?
            .duration_since(now)
            .unwrap_or_default()
    };
    Some(wait.min(RETRY_AFTER_CAP))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, proptest};

    use super::*;

    fn outcome_of(status: u16) -> Outcome {
        outcome(
            Response::new(Some(status), None),
            Some("7"),
            SystemTime::now(),
        )
    }

    #[test]
    fn every_status_has_its_outcome() {
        for status in [200, 201, 202, 204, 299] {
            assert!(
                matches!(outcome_of(status), Outcome::Delivered(_)),
                "{status}"
            );
        }
        for (status, code, waits) in [
            (301, ReasonCode::Redirect, false),
            (307, ReasonCode::Redirect, false),
            (401, ReasonCode::ClientError, false),
            (404, ReasonCode::ClientError, false),
            (408, ReasonCode::ClientError, true),
            (409, ReasonCode::ClientError, true),
            (425, ReasonCode::ClientError, true),
            (429, ReasonCode::RateLimited, true),
            (500, ReasonCode::ServerError, true),
            (503, ReasonCode::ServerError, true),
        ] {
            let Outcome::Retry(failure) = outcome_of(status) else {
                panic!("{status} is not retried");
            };
            assert_eq!(failure.code, code, "{status}");
            assert_eq!(failure.retry_after.is_some(), waits, "{status}");
        }
        for (status, code) in [
            (400, ReasonCode::Rejected),
            (410, ReasonCode::Gone),
            (413, ReasonCode::Rejected),
            (415, ReasonCode::Rejected),
            (422, ReasonCode::Rejected),
        ] {
            let Outcome::Dead(failure) = outcome_of(status) else {
                panic!("{status} is not final");
            };
            assert_eq!(failure.code, code, "{status}");
        }
    }

    #[test]
    fn retry_after_is_read_in_both_forms_under_a_cap() {
        let now = SystemTime::now();
        let in_a_minute = httpdate::fmt_http_date(now + Duration::from_secs(60));
        let wait = parse_retry_after(&in_a_minute, now).expect("a date");
        assert!(wait > Duration::from_secs(58) && wait <= Duration::from_secs(60));
        assert_eq!(parse_retry_after(" 2 ", now), Some(Duration::from_secs(2)));
        assert_eq!(
            parse_retry_after("99999999999999999999999", now),
            Some(RETRY_AFTER_CAP)
        );
        let long_ago = "Sun, 06 Nov 1994 08:49:37 GMT";
        assert_eq!(parse_retry_after(long_ago, now), Some(Duration::ZERO));
        for nonsense in ["", "-1", "soon", "1.5"] {
            assert_eq!(parse_retry_after(nonsense, now), None, "{nonsense}");
        }
    }

    proptest! {
        #[test]
        fn any_answer_has_an_outcome(status in any::<u16>(), value in ".{0,40}") {
            outcome(Response::new(Some(status), None), Some(&value), SystemTime::now());
            if let Some(wait) = parse_retry_after(&value, SystemTime::now()) {
                prop_assert!(wait <= RETRY_AFTER_CAP);
            }
        }
    }
}
