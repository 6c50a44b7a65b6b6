//! What the status of a response means for the message.

use std::time::SystemTime;

use ::http::header::LOCATION;

use super::retry_after::{reset, retry_after};
use super::target::HttpAnswer;
use crate::config::{Class, Destination, shown_url};
use crate::dispatch::{Failure, Outcome, Pause};
use crate::status::{REDIRECTS_TO, ReasonCode};

/// The outcome of a response.
pub(super) fn outcome(answer: HttpAnswer, destination: &Destination, now: SystemTime) -> Outcome {
    let status = answer.response.status.unwrap_or_default();
    let asked = retry_after(&answer.headers, now);
    let class = match status {
        200..=299 => return Outcome::Delivered(answer.response),
        400..=499 => destination.policy.classes.of(status),
        _ => Class::Retry,
    };
    // With a time, the receiver says that it refuses the message only for now (RFC 9110, 15.5.14).
    let is_for_now = status == 413 && class == Class::Dead && asked.is_some();
    let class = if is_for_now { Class::Retry } else { class };
    let code = match (status, class) {
        (300..=399, _) => ReasonCode::Redirect,
        (410, _) => ReasonCode::Gone,
        (_, Class::Dead) => ReasonCode::Rejected,
        (429, _) => ReasonCode::RateLimited,
        (400..=499, _) => ReasonCode::ClientError,
        (500..=599, _) => ReasonCode::ServerError,
        _ => ReasonCode::Protocol,
    };
    let asked = match status {
        408 | 409 | 413 | 425 | 500..=599 => asked,
        429 => asked.or_else(|| reset(&answer.headers, now)),
        _ => None,
    };
    let retry_after = asked.map(|wait| wait.min(destination.policy.retry_after_cap));
    let pause = match (class, status) {
        (Class::Pause, _) => Some(Pause::UntilResumed),
        // The receiver asks for a pause of the whole destination, not only of this message.
        (Class::Retry, 429 | 503) => retry_after.filter(|wait| !wait.is_zero()).map(Pause::For),
        _ => None,
    };
    // The URL is shown without what may be a token: the error is logged.
    let to = answer.header(LOCATION);
    let to = to.and_then(|to| destination.url.join(to).ok());
    let to = to.filter(|_| code == ReasonCode::Redirect);
    let to = to.map(|to| answer.quoted(REDIRECTS_TO, &shown_url(&to)));
    let error = format!("the receiver returned {status}{}", to.unwrap_or_default());
    let failure = Failure {
        error,
        response: answer.response,
        retry_after,
        pause,
        ..Failure::new(code, "")
    };
    match class {
        Class::Dead => Outcome::Dead(failure),
        Class::Retry | Class::Pause => Outcome::Retry(failure),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ::http::header::{HeaderName, RETRY_AFTER};
    use proptest::prelude::{any, prop_assert, proptest};

    use super::super::target::ShownTo;
    use super::*;
    use crate::dispatch::Response;

    fn answer(status: u16, header: Option<(HeaderName, &str)>) -> HttpAnswer {
        let header = header.into_iter();
        let valid = |(name, value): (_, &str)| (name, value.parse().expect("a header"));
        HttpAnswer {
            response: Response::new(Some(status), None),
            headers: header.map(valid).collect(),
            body: String::new(),
            shown_to: ShownTo::Everybody,
        }
    }

    fn outcome_of(status: u16, retry_after: Option<&str>, destination: &Destination) -> Outcome {
        let answer = answer(status, retry_after.map(|value| (RETRY_AFTER, value)));
        outcome(answer, destination, SystemTime::now())
    }

    fn destination() -> Destination {
        Destination::new("a", "http://a").expect("a URL")
    }

    #[test]
    fn every_status_has_its_outcome() {
        let destination = destination();
        for status in [200, 201, 202, 204, 299] {
            let outcome = outcome_of(status, Some("7"), &destination);
            assert!(matches!(outcome, Outcome::Delivered(_)), "{status}");
        }
        let seven = Some(Duration::from_secs(7));
        for (status, code, waits, pause) in [
            (301, ReasonCode::Redirect, None, None),
            (307, ReasonCode::Redirect, None, None),
            (401, ReasonCode::ClientError, None, None),
            (404, ReasonCode::ClientError, None, None),
            (408, ReasonCode::ClientError, seven, None),
            (409, ReasonCode::ClientError, seven, None),
            (410, ReasonCode::Gone, None, Some(Pause::UntilResumed)),
            (425, ReasonCode::ClientError, seven, None),
            (429, ReasonCode::RateLimited, seven, seven.map(Pause::For)),
            (500, ReasonCode::ServerError, seven, None),
            (502, ReasonCode::ServerError, seven, None),
            (503, ReasonCode::ServerError, seven, seven.map(Pause::For)),
            (999, ReasonCode::Protocol, None, None),
        ] {
            let Outcome::Retry(failure) = outcome_of(status, Some("7"), &destination) else {
                panic!("{status} is not retried");
            };
            assert_eq!(failure.code, code, "{status}");
            assert_eq!(failure.retry_after, waits, "{status}");
            assert_eq!(failure.pause, pause, "{status}");
        }
        for (status, asks) in [
            (400, Some("7")),
            (413, None),
            (415, Some("7")),
            (422, Some("7")),
        ] {
            let Outcome::Dead(failure) = outcome_of(status, asks, &destination) else {
                panic!("{status} is not final");
            };
            assert_eq!(failure.code, ReasonCode::Rejected, "{status}");
        }
    }

    /// RFC 9110, 15.5.14: it is too large for now.
    #[test]
    fn a_413_that_says_until_when_is_retried_then() {
        let outcome = outcome_of(413, Some("7"), &destination());
        let Outcome::Retry(failure) = outcome else {
            panic!("it is not retried: {outcome:?}");
        };
        assert_eq!(failure.retry_after, Some(Duration::from_secs(7)));
        assert_eq!(
            (failure.code, failure.pause),
            (ReasonCode::ClientError, None)
        );
    }

    #[test]
    fn a_429_with_the_reset_of_a_rate_limit_alone_waits_until_then() {
        let of = |status| {
            let reset = HeaderName::from_static("ratelimit-reset");
            let answer = answer(status, Some((reset, "7")));
            match outcome(answer, &destination(), SystemTime::now()) {
                Outcome::Retry(failure) => failure.retry_after,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(of(429), Some(Duration::from_secs(7)));
        assert_eq!(of(500), None, "the header is in every response");
    }

    #[test]
    fn a_destination_chooses_what_its_refusals_mean() {
        let mut destination = destination();
        for (status, class) in [
            (404, Class::Dead),
            (410, Class::Dead),
            (401, Class::Pause),
            (422, Class::Retry),
        ] {
            destination
                .policy
                .classes
                .set(status, class)
                .expect("a 4xx");
        }
        let outcome = |status| outcome_of(status, None, &destination);
        assert!(matches!(outcome(404), Outcome::Dead(f) if f.code == ReasonCode::Rejected));
        assert!(matches!(outcome(410), Outcome::Dead(f) if f.code == ReasonCode::Gone));
        assert!(matches!(outcome(401), Outcome::Retry(f) if f.pause == Some(Pause::UntilResumed)));
        assert!(matches!(outcome(422), Outcome::Retry(f) if f.pause.is_none()));
    }

    #[test]
    fn a_redirect_says_where_to_without_what_may_be_a_token() {
        let destination = destination();
        for (location, shown) in [
            ("https://b.example/hooks", "https://b.example/hooks"),
            ("/events/", "http://a/events/"),
            (
                "https://u:pw@b.example/hooks/T0/B0?token=1",
                "https://***@b.example/hooks/***?***",
            ),
        ] {
            let answer = answer(308, Some((LOCATION, location)));
            let Outcome::Retry(failure) = outcome(answer, &destination, SystemTime::now()) else {
                panic!("a redirect is retried");
            };
            let expected = format!("the receiver returned 308, which redirects to {shown}");
            assert_eq!(
                (failure.code, failure.error),
                (ReasonCode::Redirect, expected)
            );
        }
    }

    /// R46
    #[test]
    fn a_redirect_of_an_unchecked_server_says_only_to_operators_where_to() {
        for shown_to in [ShownTo::Operators, ShownTo::Nobody] {
            let answer = HttpAnswer {
                shown_to,
                ..answer(308, Some((LOCATION, "http://10.0.0.7/")))
            };
            let Outcome::Retry(failure) = outcome(answer, &destination(), SystemTime::now()) else {
                panic!("a redirect is retried");
            };
            let all = "the receiver returned 308; only for operators: http://10.0.0.7/";
            assert_eq!(failure.error, all);
        }
    }

    #[test]
    fn a_wait_is_limited_by_its_cap() {
        let mut destination = destination();
        destination.policy.retry_after_cap = Duration::from_secs(3);
        let Outcome::Retry(failure) = outcome_of(429, Some("86400"), &destination) else {
            panic!("429 is not retried");
        };
        assert_eq!(failure.retry_after, Some(Duration::from_secs(3)));
        assert_eq!(failure.pause, Some(Pause::For(Duration::from_secs(3))));
    }

    proptest! {
        #[test]
        fn any_response_has_an_outcome(status in any::<u16>(), value in "[ -~]{0,40}") {
            let destination = destination();
            if let Outcome::Retry(failure) = outcome_of(status, Some(&value), &destination) {
                prop_assert!(failure.retry_after.unwrap_or_default() <= destination.policy.retry_after_cap);
            }
        }
    }
}
