//! What the status of a response means for the message.

use std::time::{Duration, SystemTime};

use ::http::header::{LOCATION, RETRY_AFTER};

use super::target::Answer;
use crate::config::{Class, Destination, shown_url};
use crate::dispatch::{Failure, Outcome, Pause};
use crate::status::{REDIRECTS_TO, ReasonCode};

/// The outcome of a response.
pub(super) fn outcome(answer: Answer, destination: &Destination, now: SystemTime) -> Outcome {
    let status = answer.response.status.unwrap_or_default();
    let class = match status {
        200..=299 => return Outcome::Delivered(answer.response),
        400..=499 => destination.policy.classes.of(status),
        _ => Class::Retry,
    };
    let code = match (status, class) {
        (300..=399, _) => ReasonCode::Redirect,
        (410, _) => ReasonCode::Gone,
        (_, Class::Dead) => ReasonCode::Rejected,
        (429, _) => ReasonCode::RateLimited,
        (400..=499, _) => ReasonCode::ClientError,
        (500..=599, _) => ReasonCode::ServerError,
        _ => ReasonCode::Protocol,
    };
    let may_ask_to_wait = matches!(status, 408 | 409 | 425 | 429 | 500..=599);
    let retry_after = (answer.header(RETRY_AFTER))
        .filter(|_| may_ask_to_wait)
        .and_then(|value| parse_retry_after(value, now))
        .map(|wait| wait.min(destination.policy.retry_after_cap));
    let pause = match (class, status) {
        (Class::Pause, _) => Some(Pause::UntilResumed),
        // The receiver asks for a pause of the whole destination, not only of this message.
        (Class::Retry, 429 | 503) => retry_after.filter(|wait| !wait.is_zero()).map(Pause::For),
        _ => None,
    };
    // The URL is shown without what may be a token: the error is logged.
    let to = answer.header(LOCATION);
    let to = to.and_then(|to| destination.url.join(to).ok());
    let error = match to.filter(|_| code == ReasonCode::Redirect) {
        Some(to) => format!(
            "the receiver returned {status}{REDIRECTS_TO}{}",
            shown_url(&to)
        ),
        None => format!("the receiver returned {status}"),
    };
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

/// Longer waits are cut to this duration.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Parses both forms of `Retry-After` (RFC 9110, 10.2.3): seconds, or a date. Of what else receivers write (`30.5`,
/// `30, 30`, `30s`, `500ms`) it takes the first number, rounded up.
pub(super) fn parse_retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    let is_digit = |byte: &char| byte.is_ascii_digit();
    let digits = value.chars().take_while(is_digit).count();
    if digits == 0 {
        let date = httpdate::parse_http_date(value).ok()?;
        return Some(date.duration_since(now).unwrap_or_default());
    }
    let (whole, rest) = value.split_at(digits);
    let fraction: String = match rest.strip_prefix('.') {
        Some(rest) => rest.chars().take_while(is_digit).collect(),
        None => String::new(),
    };
    let unit = rest.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
    let unit = unit.trim_start();
    // Another form of date or time.
    if unit.starts_with(['-', ':', '/']) {
        return None;
    }
    // A number that overflows exceeds the longest wait, too.
    let wait = whole
        .parse()
        .map_or(LONGEST, Duration::from_secs)
        .min(LONGEST);
    let has_fraction = fraction.contains(|digit| digit != '0');
    let wait = wait + Duration::from_secs(u64::from(has_fraction));
    match unit.to_ascii_lowercase().starts_with("ms") {
        true => Some(Duration::from_secs(wait.as_secs().div_ceil(1000))),
        false => Some(wait.min(LONGEST)),
    }
}

#[cfg(test)]
mod tests {
    use ::http::header::HeaderName;
    use proptest::prelude::{any, prop_assert, proptest};

    use super::*;
    use crate::dispatch::Response;

    fn answer(status: u16, header: Option<(HeaderName, &str)>) -> Answer {
        let header = header.into_iter();
        let valid = |(name, value): (_, &str)| (name, value.parse().expect("a header"));
        Answer {
            response: Response::new(Some(status), None),
            headers: header.map(valid).collect(),
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
        for status in [400, 413, 415, 422] {
            let Outcome::Dead(failure) = outcome_of(status, Some("7"), &destination) else {
                panic!("{status} is not final");
            };
            assert_eq!(failure.code, ReasonCode::Rejected, "{status}");
        }
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

    /// R46: the trigger of registered destinations deletes the pauses of relays by their reasons.
    #[test]
    fn the_trigger_knows_each_reason_that_a_status_pauses_with() {
        let functions =
            include_str!("../../../migrations/2026-11-20-000001_outbox_functions/up.sql");
        let reasons = (functions.split_once("'{BREAKER_OPEN, "))
            .and_then(|(_, after)| after.split_once('}'))
            .map(|(reasons, _)| reasons.split(", ").collect::<Vec<_>>())
            .expect("the list");
        let mut destination = destination();
        for status in 400..500 {
            let classes = &mut destination.policy.classes;
            classes.set(status, Class::Pause).expect("a 4xx");
        }
        for status in (400..600).filter(|status| *status < 500 || *status == 503) {
            let outcome = outcome_of(status, Some("7"), &destination);
            let Outcome::Retry(failure) = outcome else {
                panic!("{status}: {outcome:?}");
            };
            assert!(failure.pause.is_some(), "{status}");
            assert!(reasons.contains(&failure.code.as_str()), "{status}");
        }
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

    #[test]
    fn retry_after_is_read_in_both_forms() {
        let now = SystemTime::now();
        let in_a_minute = httpdate::fmt_http_date(now + Duration::from_secs(60));
        let wait = parse_retry_after(&in_a_minute, now).expect("a date");
        assert!(wait > Duration::from_secs(58) && wait <= Duration::from_secs(60));
        assert_eq!(parse_retry_after(" 2 ", now), Some(Duration::from_secs(2)));
        assert_eq!(
            parse_retry_after("99999999999999999999999", now),
            Some(LONGEST)
        );
        let long_ago = "Sun, 06 Nov 1994 08:49:37 GMT";
        assert_eq!(parse_retry_after(long_ago, now), Some(Duration::ZERO));
        for (odd, seconds) in [
            ("30.5", 31),
            ("30.0", 30),
            ("30, 30", 30),
            ("30,60", 30),
            ("30s", 30),
            ("30 seconds", 30),
            ("30; x", 30),
            ("1500ms", 2),
        ] {
            let wait = Some(Duration::from_secs(seconds));
            assert_eq!(parse_retry_after(odd, now), wait, "{odd}");
        }
        for nonsense in ["", "-1", "soon", ".5", "2026-11-25T10:00:00Z", "10:30"] {
            assert_eq!(parse_retry_after(nonsense, now), None, "{nonsense}");
        }
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
