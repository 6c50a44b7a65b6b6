//! Times that people and other programs have written.

use std::time::{Duration, SystemTime};

/// Parses a time in the form of RFC 3339. The zone may be missing (UTC) or have a name, the seconds and the time of day may be
/// missing, too: fields of browsers omit zeros.
pub(crate) fn parse_time(text: &str) -> Option<SystemTime> {
    let (local, east) = zone(text).unwrap_or((text, 0));
    let local = local.trim_end().to_ascii_uppercase();
    let rest = match local.matches(':').count() {
        0 => "T00:00:00",
        1 => ":00",
        _ => "",
    };
    let local = humantime::parse_rfc3339_weak(&format!("{local}{rest}")).ok()?;
    in_utc(local, east)
}

/// The time in UTC of a local one, so many seconds east of Greenwich.
pub(crate) fn in_utc(local: SystemTime, east: i64) -> Option<SystemTime> {
    let offset = Duration::from_secs(east.unsigned_abs());
    match east < 0 {
        true => local.checked_add(offset),
        false => local.checked_sub(offset),
    }
}

/// The time without its zone, and the seconds by which the zone is east of Greenwich.
pub(crate) fn zone(text: &str) -> Option<(&str, i64)> {
    let named = ["GMT", "UTC", "UT", "Z"].into_iter().find_map(|zone| {
        let (local, end) = text.split_at_checked(text.len().checked_sub(zone.len())?)?;
        end.eq_ignore_ascii_case(zone).then_some((local, 0))
    });
    let offset = |length: usize| {
        let (local, end) = text.split_at_checked(text.len().checked_sub(length)?)?;
        let (sign, digits) = (end.get(..1)?, end.get(1..)?);
        let digits = match length {
            6 => {
                let (hours, minutes) = digits.split_once(':')?;
                format!("{hours}{minutes}")
            }
            _ => digits.to_owned(),
        };
        let is_number = digits.len() == 4 && digits.bytes().all(|byte| byte.is_ascii_digit());
        let number = is_number.then(|| digits.parse::<i64>().ok())??;
        let seconds = (number / 100) * 3600 + (number % 100) * 60;
        match sign {
            "+" => Some((local, seconds)),
            "-" => Some((local, -seconds)),
            _ => None,
        }
    };
    named.or_else(|| offset(5)).or_else(|| offset(6))
}
