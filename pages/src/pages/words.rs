//! Numbers and times formatted for people.

use std::fmt::Display;
use std::time::{Duration, SystemTime};

use maud::{Markup, html};
use uuid::Uuid;

use crate::text::LONGEST_NAME;
pub(crate) use crate::text::shortened;

/// `1234567` as `1,234,567`; an estimate as `~1,234,567`.
pub(crate) fn count(number: i64, is_estimate: bool) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = String::with_capacity(digits.len() + 6);
    if is_estimate && number != 0 {
        text.push('~');
    }
    if number < 0 {
        text.push('-');
    }
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 message`, `2 messages`.
pub(super) fn counted(number: i64, one: &str, many: &str) -> String {
    let word = if number == 1 { one } else { many };
    format!("{} {word}", count(number, false))
}

/// A text whose commands stand between backticks.
pub(super) fn with_code(text: &str) -> Markup {
    let parts = text.split('`').enumerate();
    html! { @for (at, part) in parts { @if at % 2 == 1 { code { (part) } } @else { (part) } } }
}

/// A rate per minute, from a rate per second. Small rates have one decimal digit.
pub(super) fn per_minute(per_second: f64) -> String {
    amount(per_second * 60.0)
}

/// A number that may have a fraction: small numbers have one decimal digit.
pub(super) fn amount(number: f64) -> String {
    #[allow(clippy::cast_possible_truncation, reason = "`as` saturates")]
    match number {
        n if n < 0.05 => "0".to_owned(),
        n if n < 9.95 => format!("{n:.1}").trim_end_matches(".0").to_owned(),
        n => count(n.round() as i64, false),
    }
}

/// `4 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`: at most two units.
pub(crate) fn duration(seconds: f64) -> String {
    if seconds < 0.9995 {
        return format!("{:.0} ms", seconds.max(0.0) * 1000.0);
    }
    if seconds < 9.95 {
        return format!("{seconds:.1}").trim_end_matches(".0").to_owned() + " s";
    }
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "`as` saturates"
    )]
    let whole = seconds.round() as u64;
    let (units, rest, small) = match whole {
        s if s < 60 => return format!("{s} s"),
        s if s < 3600 => (format!("{} min", s / 60), s % 60, "s"),
        s if s < 86_400 => (format!("{} h", s / 3600), s % 3600 / 60, "min"),
        s => (format!("{} d", s / 86_400), s % 86_400 / 3600, "h"),
    };
    match rest {
        0 => units,
        rest => format!("{units} {rest} {small}"),
    }
}

/// How long ago an RFC 3339 time from the database was, with the time itself as a tooltip.
pub(super) fn ago(rfc3339: &str) -> Markup {
    let text = match seconds_since(rfc3339) {
        Some(seconds) if seconds < 1.0 => "just now".to_owned(),
        Some(seconds) => format!("{} ago", duration(seconds)),
        None => rfc3339.to_owned(),
    };
    html! { time datetime=(rfc3339) title=(rfc3339) { (text) } }
}

/// A time in seconds, with the whole time as a tooltip.
pub(crate) fn time(rfc3339: &str) -> Markup {
    html! { time datetime=(rfc3339) title=(rfc3339) { (in_seconds(rfc3339)) } }
}

/// `2026-01-31 12:00:00 UTC`. What is no time, such as `infinity`, stays as it is.
pub(crate) fn in_seconds(rfc3339: &str) -> String {
    match rfc3339.split_at_checked(19) {
        Some((seconds, rest)) if rest.ends_with('Z') => {
            format!("{} UTC", seconds.replacen('T', " ", 1))
        }
        _ => rfc3339.to_owned(),
    }
}

/// A text with its times, which are RFC 3339, as people read them.
pub(super) fn with_times(text: &str) -> Markup {
    html! {
        @for word in text.split_inclusive(' ') {
            @match word.split_once('Z') {
                Some((begin, rest)) if begin.len() >= 19 && humantime::parse_rfc3339(&format!("{begin}Z")).is_ok() => {
                    (time(&format!("{begin}Z"))) (rest)
                }
                _ => (word),
            }
        }
    }
}

/// A time in full, and how long ago it was.
pub(super) fn moment(rfc3339: &str) -> Markup {
    let ago = seconds_since(rfc3339).filter(|seconds| *seconds > 0.0);
    let shown = rfc3339.replacen('T', " ", 1).replace('Z', " UTC");
    html! {
        time datetime=(rfc3339) { (shown) }
        @if let Some(seconds) = ago { " " span.quiet.short { "(" (duration(seconds)) " ago)" } }
    }
}

/// The sequence of a message, with a link.
pub(super) fn sequence(href: &str, sequence: impl Display) -> Markup {
    html! { a.short href=(href) { "#" (sequence) } }
}

/// Seconds since a time; `None`: not a time, or infinite. A future time counts as now, because clocks differ.
pub(super) fn seconds_since(rfc3339: &str) -> Option<f64> {
    let then = humantime::parse_rfc3339_weak(rfc3339).ok()?;
    let since = SystemTime::now().duration_since(then);
    Some(since.unwrap_or(Duration::ZERO).as_secs_f64())
}

/// Seconds from one time to another; `None`: either is not a time, or `to` is earlier.
pub(super) fn seconds_between(from: &str, to: &str) -> Option<f64> {
    let read = |text| humantime::parse_rfc3339_weak(text).ok();
    let between = read(to)?.duration_since(read(from)?).ok()?;
    Some(between.as_secs_f64())
}

/// The time of day in UTC: `12:03:04`.
pub(super) fn clock(time: SystemTime) -> String {
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.get(11..19).unwrap_or(&text).to_owned()
}

/// A tenant, with a link to its page.
pub(super) fn tenant(id: Uuid) -> Markup {
    html! { a.key href={ "/tenant?tenant=" (id) } { (id) } }
}

/// A name of up to a kilobyte. A long name is shortened, with the whole name as a tooltip.
pub(super) fn name(name: &str) -> Markup {
    if name.chars().count() <= LONGEST_NAME {
        return html! { (name) };
    }
    html! { span title=(name) { (shortened(name, LONGEST_NAME)) } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_estimates_marked() {
        assert_eq!(count(0, true), "0");
        assert_eq!(count(999, false), "999");
        assert_eq!(count(1000, true), "~1,000");
        assert_eq!(count(-1_234_567, false), "-1,234,567");
        assert_eq!(counted(1, "message", "messages"), "1 message");
        assert_eq!(counted(2000, "message", "messages"), "2,000 messages");
        assert_eq!(count(i64::MIN, false), "-9,223,372,036,854,775,808");
    }

    #[test]
    fn durations_have_two_units_at_most() {
        for (seconds, text) in [
            (-1.0, "0 ms"),
            (0.0, "0 ms"),
            (0.25, "250 ms"),
            (0.9999, "1 s"),
            (4.26, "4.3 s"),
            (59.4, "59 s"),
            (60.0, "1 min"),
            (200.0, "3 min 20 s"),
            (7500.0, "2 h 5 min"),
            (273_600.0, "3 d 4 h"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn rates_are_short() {
        assert_eq!(per_minute(0.0), "0");
        assert_eq!(per_minute(0.01), "0.6");
        assert_eq!(per_minute(0.05), "3");
        assert_eq!(per_minute(1000.0), "60,000");
    }

    #[test]
    fn a_time_that_is_none_is_shown_as_it_is() {
        assert_eq!(seconds_since("infinity"), None);
        assert_eq!(seconds_since("2999-01-01T00:00:00Z"), Some(0.0));
        let shown = ago("<b>").into_string();
        assert!(!shown.contains("<b>"), "{shown}");
        assert_eq!(clock(SystemTime::UNIX_EPOCH), "00:00:00");
    }

    #[test]
    fn times_in_a_text_are_shown_in_seconds() {
        let text = "topic paused until 2026-01-31T12:00:00.123Z: moved to ZZ, since 2026";
        let shown = with_times(text).into_string();
        assert!(shown.starts_with("topic paused until <time "), "{shown}");
        let end = ">2026-01-31 12:00:00 UTC</time>: moved to ZZ, since 2026";
        assert!(shown.ends_with(end), "{shown}");
        assert_eq!(in_seconds("infinity"), "infinity");
        assert_eq!(
            in_seconds("10000-01-01 00:00:00+00"),
            "10000-01-01 00:00:00+00"
        );
    }

    #[test]
    fn a_long_name_is_shown_by_its_beginning_with_the_whole_as_a_title() {
        assert_eq!(name("<a>").into_string(), "&lt;a&gt;");
        let long = "ä".repeat(81);
        let start = "ä".repeat(79);
        assert_eq!(
            name(&long).into_string(),
            format!("<span title=\"{long}\">{start}…</span>")
        );
    }
}
