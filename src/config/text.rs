//! Values of settings as text: reading them, and showing them without their secrets.

use std::fmt;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use url::Url;

use super::settings::{ConfigError, bad};

pub(super) fn not_empty<'a>(variable: &str, value: &'a str) -> Result<&'a str, ConfigError> {
    if value.trim().is_empty() {
        return Err(bad(variable, "it is empty"));
    }
    Ok(value)
}

/// Only what is certainly none is refused; libpq reads the rest.
pub(super) fn parse_database_url<'a>(
    variable: &str,
    value: &'a str,
) -> Result<&'a str, ConfigError> {
    let value = not_empty(variable, value)?;
    let is_url = ["postgres://", "postgresql://"]
        .iter()
        .any(|scheme| value.starts_with(scheme));
    if is_url || (value.contains('=') && !value.contains("://")) {
        return Ok(value);
    }
    Err(bad(
        variable,
        "it is no postgres:// URL, and no key=value pairs such as host=db dbname=shop",
    ))
}

pub(super) fn parse_bool(variable: &str, value: &str) -> Result<bool, ConfigError> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(bad(variable, &format!("{value:?} is not true or false"))),
    }
}

/// A value of one of the small languages of settings.
pub(super) fn parse_word<T>(variable: &str, value: &str) -> Result<T, ConfigError>
where
    T: std::str::FromStr<Err = String>,
{
    value
        .parse()
        .map_err(|reason: String| bad(variable, &reason))
}

/// A reference as CloudEvents wants for `source`, restricted to what a header can hold as it is.
pub(super) fn parse_source(variable: &str, value: &str) -> Result<String, ConfigError> {
    let is_plain = |b: u8| matches!(b, b'!'..=b'~') && !matches!(b, b'"' | b'<' | b'>' | b'\\');
    if value.is_empty() || !value.bytes().all(is_plain) {
        return Err(bad(
            variable,
            &format!("{value:?} is no URI reference such as https://shop.example/orders or /shop"),
        ));
    }
    Ok(value.to_owned())
}

/// The content of a file that a setting names.
pub(super) fn read_file(variable: &str, path: &str) -> Result<String, ConfigError> {
    std::fs::read_to_string(path)
        .map_err(|error| bad(variable, &format!("cannot read {path:?}: {error}")))
}

pub(super) fn parse_count<T>(
    variable: &str,
    value: &str,
    least: T,
    most: T,
) -> Result<T, ConfigError>
where
    T: std::str::FromStr + PartialOrd + fmt::Display,
{
    value
        .parse()
        .ok()
        .filter(|count| *count >= least && *count <= most)
        .ok_or_else(|| {
            bad(
                variable,
                &format!("{value:?} is not a whole number from {least} to {most}"),
            )
        })
}

/// A hundred years: longer ones overflow what clocks and the database can add up.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Reads a duration such as `500ms` or `2h` for the setting `variable`.
///
/// ```
/// use diesel_outbox::config::parse_duration;
/// use std::time::Duration;
///
/// assert_eq!(parse_duration("cleanup_interval", "1h 30m")?, Duration::from_secs(5400));
/// let error = parse_duration("cleanup_interval", "90").map_err(|error| error.key().to_owned());
/// assert_eq!(error, Err("cleanup_interval".to_owned()));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
///
/// # Errors
/// A [`ConfigError`] that names the setting.
pub fn parse_duration(variable: &str, value: &str) -> Result<Duration, ConfigError> {
    let duration = humantime::parse_duration(value.trim()).map_err(|error| {
        bad(
            variable,
            &format!("{value:?} is not a duration such as 500ms or 2h: {error}"),
        )
    })?;
    if duration > LONGEST {
        return Err(bad(variable, "it is longer than a hundred years"));
    }
    Ok(duration)
}

pub(super) fn parse_url(variable: &str, value: &str) -> Result<Url, ConfigError> {
    let url = Url::parse(value.trim()).map_err(|error| {
        bad(
            variable,
            &format!("it is not a URL that begins with http:// or https://: {error}"),
        )
    })?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(bad(
            variable,
            &format!(
                "its scheme is {:?}: begin it with http:// or https://",
                url.scheme()
            ),
        ));
    }
    if url.host().is_none() {
        return Err(bad(variable, "it has no host"));
    }
    if url.as_str().parse::<http::Uri>().is_err() {
        return Err(bad(variable, "it cannot be sent in an HTTP request"));
    }
    Ok(url)
}

/// A duration as one word.
pub(super) fn written(duration: Duration) -> String {
    humantime::format_duration(duration)
        .to_string()
        .replace(' ', "")
}

/// A URL without password and query, for people's eyes.
pub(super) fn shown_url(url: &Url) -> String {
    let mut shown = url.clone();
    // Neither can fail: a URL with a user has a host.
    if shown.password().is_some() {
        let _ = shown.set_password(Some("***"));
    } else if !shown.username().is_empty() && matches!(shown.scheme(), "http" | "https") {
        // A user without a password is a token.
        let _ = shown.set_username("***");
    }
    if shown.query().is_some() {
        shown.set_query(Some("***"));
    }
    shown.to_string()
}

/// A database URL or key=value string for people's eyes: host and name, nothing else.
pub(super) fn shown_database(database_url: &SecretString) -> String {
    let text = database_url.expose_secret();
    if let Ok(url) = Url::parse(text) {
        return shown_url(&url);
    }
    text.split_whitespace()
        .filter(|pair| {
            ["host=", "hostaddr=", "port=", "dbname=", "user="]
                .iter()
                .any(|key| pair.starts_with(key))
        })
        .collect::<Vec<_>>()
        .join(" ")
}
