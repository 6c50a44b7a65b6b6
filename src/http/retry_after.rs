//! How long a response asks to wait, in any of the forms that receivers write.
//!
//! A point in time is compared with the receiver's own clock, if the response has a `Date`: a receiver whose clock is an
//! hour ahead asks for five seconds, too.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ::http::header::{DATE, HeaderMap, HeaderName, RETRY_AFTER};

use crate::schema::instant::{in_utc, parse_time, zone};

/// Longer waits are cut to this duration.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// A number from here on is no number of seconds to wait, but the time since 1970, in seconds.
const UNIX_SECONDS: u64 = 1_000_000_000;
/// The same in milliseconds.
const UNIX_MILLIS: u64 = UNIX_SECONDS * 1000;
/// No form of time has larger numbers.
const MOST_UNIX_MILLIS: u64 = UNIX_MILLIS * 100;

/// The reset of a rate limit, in the forms before and after the drafts of the IETF (`RateLimit-Reset: 5`).
const RESETS: [HeaderName; 2] = [
    HeaderName::from_static("ratelimit-reset"),
    HeaderName::from_static("x-ratelimit-reset"),
];
/// `RateLimit: "default";r=0;t=5`, and the older `RateLimit: limit=100, remaining=0, reset=5`.
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// What `Retry-After` asks for (RFC 9110, 10.2.3). `now` is this machine's clock.
pub(super) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = text(headers, RETRY_AFTER)?;
    wait(value, clock_of(headers).unwrap_or(now))
}

/// When the rate limit of a refused request ends. APIs that have these headers send them with every response.
pub(super) fn reset(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let now = clock_of(headers).unwrap_or(now);
    let plain = RESETS
        .into_iter()
        .find_map(|name| wait(text(headers, name)?, now));
    plain.or_else(|| {
        let parameters = text(headers, RATE_LIMIT)?.split([';', ',']);
        let mut named = parameters.filter_map(|one| one.split_once('='));
        named.find_map(|(name, value)| match name.trim() {
            "t" | "reset" => wait(value, now),
            _ => None,
        })
    })
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// The receiver's clock.
fn clock_of(headers: &HeaderMap) -> Option<SystemTime> {
    date(text(headers, DATE)?)
}

/// Seconds, or a point in time. Of what else receivers write (`30.5`, `30, 30`, `30s`, `500ms`) the first number counts,
/// rounded up.
fn wait(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    let until = |time: SystemTime| time.duration_since(now).unwrap_or_default().min(LONGEST);
    if let Some(time) = date(value) {
        return Some(until(time));
    }
    let is_digit = |byte: &char| byte.is_ascii_digit();
    let digits = value.chars().take_while(is_digit).count();
    if digits == 0 {
        return None;
    }
    let (whole, rest) = value.split_at(digits);
    let fraction: String = match rest.strip_prefix('.') {
        Some(rest) => rest.chars().take_while(is_digit).collect(),
        None => String::new(),
    };
    let unit = rest.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
    let unit = unit.trim_start();
    // An unknown form of date or time.
    if unit.starts_with(['-', ':', '/']) {
        return None;
    }
    let has_fraction = u64::from(fraction.contains(|digit| digit != '0'));
    // A number that overflows exceeds the longest wait, too.
    let number = whole.parse::<u64>().unwrap_or(u64::MAX);
    let number = number.saturating_add(has_fraction);
    let is_millis = unit.to_ascii_lowercase().starts_with("ms");
    Some(match number {
        _ if is_millis => Duration::from_secs(number.div_ceil(1000)).min(LONGEST),
        UNIX_SECONDS..UNIX_MILLIS => until(UNIX_EPOCH + Duration::from_secs(number)),
        UNIX_MILLIS..MOST_UNIX_MILLIS => until(UNIX_EPOCH + Duration::from_millis(number)),
        _ => Duration::from_secs(number).min(LONGEST),
    })
}

/// A date of HTTP or in the form of RFC 3339, with any zone, by name or by numbers.
fn date(text: &str) -> Option<SystemTime> {
    let text = text.trim();
    if let Ok(date) = httpdate::parse_http_date(text) {
        return Some(date);
    }
    let (local, east) = zone(text)?;
    let time = httpdate::parse_http_date(&format!("{} GMT", local.trim_end())).ok();
    time.and_then(|local| in_utc(local, east))
        .or_else(|| parse_time(text))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, proptest};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn headers(all: &[(&'static str, String)]) -> HeaderMap {
        let valid = |(name, value): &(&'static str, String)| {
            (
                HeaderName::from_static(name),
                value.parse().expect("a header"),
            )
        };
        all.iter().map(valid).collect()
    }

    fn retry_after_of(value: &str, now: SystemTime) -> Option<Duration> {
        retry_after(&headers(&[("retry-after", value.to_owned())]), now)
    }

    /// Noon of a Wednesday.
    fn noon() -> SystemTime {
        humantime::parse_rfc3339("2026-11-25T12:00:00Z").expect("a time")
    }

    #[test]
    fn both_forms_of_the_standard_are_read() {
        let now = noon();
        let in_a_minute = httpdate::fmt_http_date(now + 60 * SECOND);
        assert_eq!(retry_after_of(&in_a_minute, now), Some(60 * SECOND));
        assert_eq!(retry_after_of(" 2 ", now), Some(2 * SECOND));
        let endless = "99999999999999999999999";
        assert_eq!(retry_after_of(endless, now), Some(LONGEST));
        let long_ago = "Sun, 06 Nov 1994 08:49:37 GMT";
        assert_eq!(retry_after_of(long_ago, now), Some(Duration::ZERO));
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
            assert_eq!(retry_after_of(odd, now), wait, "{odd}");
        }
        for nonsense in ["", "-1", "soon", ".5", "10:30", "2026-11-25", "25/11/2026"] {
            assert_eq!(retry_after_of(nonsense, now), None, "{nonsense}");
        }
    }

    #[test]
    fn a_time_in_any_zone_or_in_unix_form_is_the_wait_until_then() {
        let now = noon();
        let unix = now.duration_since(UNIX_EPOCH).expect("after 1970");
        for same in [
            "Wed, 25 Nov 2026 12:00:05 GMT",
            "Wed, 25 Nov 2026 12:00:05 +0000",
            "Wed, 25 Nov 2026 12:00:05 UTC",
            "Wed, 25 Nov 2026 12:00:05 Z",
            "Wed, 25 Nov 2026 14:00:05 +0200",
            "2026-11-25T12:00:05Z",
            "2026-11-25T12:00:05.000z",
            "2026-11-25 12:00:05 UTC",
            "2026-11-25T12:00:05+00:00",
            "2026-11-25T04:00:05-08:00",
            "2026-11-25T17:30:05+0530",
            &(unix.as_secs() + 5).to_string(),
            &(unix.as_millis() + 5000).to_string(),
        ] {
            assert_eq!(retry_after_of(same, now), Some(5 * SECOND), "{same}");
        }
    }

    /// A receiver's clock is wrong in the same way in both headers.
    #[test]
    fn a_receiver_is_judged_by_its_own_clock() {
        let now = noon();
        let there = now + 3600 * SECOND;
        let unix = there.duration_since(UNIX_EPOCH).expect("after 1970");
        for until in [
            httpdate::fmt_http_date(there + 5 * SECOND),
            (unix.as_secs() + 5).to_string(),
        ] {
            let its_date = httpdate::fmt_http_date(there);
            let both = headers(&[("retry-after", until.clone()), ("date", its_date)]);
            assert_eq!(retry_after(&both, now), Some(5 * SECOND), "{until}");
            let without_date = headers(&[("retry-after", until)]);
            assert_eq!(retry_after(&without_date, now), Some(3605 * SECOND));
        }
        let seconds = [("retry-after", "7".to_owned()), ("date", "soon".to_owned())];
        assert_eq!(retry_after(&headers(&seconds), now), Some(7 * SECOND));
    }

    #[test]
    fn the_reset_of_a_rate_limit_is_read_in_each_form() {
        let now = noon();
        let unix = now.duration_since(UNIX_EPOCH).expect("after 1970");
        for (name, value) in [
            ("ratelimit-reset", "5".to_owned()),
            ("x-ratelimit-reset", "5".to_owned()),
            ("x-ratelimit-reset", (unix.as_secs() + 5).to_string()),
            ("ratelimit", "\"default\";r=0;t=5".to_owned()),
            ("ratelimit", "limit=100, remaining=0, reset=5".to_owned()),
        ] {
            let found = reset(&headers(&[(name, value.clone())]), now);
            assert_eq!(found, Some(5 * SECOND), "{name}: {value}");
        }
        let other = headers(&[("ratelimit", "limit=100".to_owned())]);
        assert_eq!(reset(&other, now), None);
    }

    proptest! {
        #[test]
        fn no_value_asks_for_more_than_the_longest_wait(value in "[ -~]{0,40}", date in "[ -~]{0,40}", n in any::<u64>()) {
            for value in [value, n.to_string(), format!("{n}ms")] {
                let all = headers(&[("retry-after", value.clone()), ("ratelimit", value), ("date", date.clone())]);
                for wait in [retry_after(&all, noon()), reset(&all, noon())] {
                    prop_assert!(wait.unwrap_or_default() <= LONGEST);
                }
            }
        }
    }
}
