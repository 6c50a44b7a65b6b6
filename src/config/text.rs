//! Parsing the values of settings from text, and showing them without secrets.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use url::Url;

use crate::config_error::ConfigError;

pub(super) fn not_empty(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("must not be empty".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

pub(super) fn path(text: &str) -> Result<PathBuf, String> {
    not_empty(text).map(PathBuf::from)
}

/// Refuses only text that is certainly no database URL or key=value string. libpq parses the rest.
pub(super) fn database_url(text: &str) -> Result<SecretString, String> {
    let text = not_empty(text)?;
    let schemes = ["postgres://", "postgresql://"];
    let is_url = schemes.iter().any(|scheme| text.starts_with(scheme));
    if is_url || (text.contains('=') && !text.contains("://")) {
        return Ok(text.into());
    }
    Err("expected a postgres:// URL, or key=value pairs such as host=db dbname=shop".to_owned())
}

pub(super) fn switch(text: &str) -> Result<bool, String> {
    let switch = text.parse();
    switch.map_err(|_| format!("{text:?} is not true or false"))
}

/// A URI reference, as CloudEvents requires for `source`, limited to characters that a header can hold unencoded.
pub(super) fn source(text: &str) -> Result<String, String> {
    let is_plain = |b: u8| matches!(b, b'!'..=b'~') && !matches!(b, b'"' | b'<' | b'>' | b'\\');
    if text.is_empty() || !text.bytes().all(is_plain) {
        return Err(format!(
            "{text:?} is not a URI reference such as https://shop.example/orders or /shop"
        ));
    }
    Ok(text.to_owned())
}

/// The words of a text, separated by commas or white space.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c == ',' || c.is_whitespace())
        .filter(|word| !word.is_empty())
}

/// Reads patterns of topics. The error is the reason.
pub(super) fn topics(text: &str) -> Result<Vec<String>, String> {
    let patterns: Vec<String> = words(text).map(str::to_owned).collect();
    match patterns.iter().find_map(|one| wrong_pattern(one)) {
        Some(wrong) => Err(wrong),
        None => Ok(patterns),
    }
}

/// Why no topic matches this pattern, if none does.
pub fn wrong_pattern(pattern: &str) -> Option<String> {
    let is_bad = |c: char| c.is_whitespace() || c.is_control();
    match pattern {
        "" => Some("a pattern of topics is empty".to_owned()),
        long if long.len() > 255 => Some("a pattern of topics has at most 255 bytes".to_owned()),
        bad if bad.contains(is_bad) => Some(format!(
            "{bad:?} contains white space or control characters, and no topic does"
        )),
        _ => None,
    }
}

/// The size limit of files with secrets.
const MOST_BYTES: u64 = 64 * 1024;

/// The content of a file that a setting names, without line breaks at the end.
pub(super) fn content(path: &str) -> Result<String, String> {
    // The error does not show a relative path: the value may be the secret itself instead of a path.
    let (file, hint) = match Path::new(path).is_absolute() {
        true => (format!("{path:?}"), ""),
        false => (
            "the named file".to_owned(),
            "; relative paths start at the working directory",
        ),
    };
    let mut content = String::new();
    let read = File::open(path)
        .and_then(|opened| opened.take(MOST_BYTES + 1).read_to_string(&mut content));
    match read {
        Ok(_) if content.len() as u64 > MOST_BYTES => {
            Err(format!("{file} has more than {MOST_BYTES} bytes"))
        }
        Ok(_) => Ok(content.trim_end_matches(['\r', '\n']).to_owned()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(format!("cannot read {file}: {error}{hint}"))
        }
        Err(error) => Err(format!("cannot read {file}: {error}")),
    }
}

/// Returns `number`, which was read from `given`, if the number is from 1 to `most`.
pub(super) fn within<T: TryInto<u32>>(
    given: impl fmt::Debug,
    number: Option<T>,
    (least, most): (u32, u32),
) -> Result<u32, String> {
    let number = number.and_then(|number| number.try_into().ok());
    number
        .filter(|number| (least..=most).contains(number))
        .ok_or_else(|| format!("{given:?} is not a whole number from {least} to {most}"))
}

/// The shortest useful duration.
pub(super) const TICK: Duration = Duration::from_millis(1);

pub(super) fn at_least(time: Duration, least: Duration) -> Result<Duration, String> {
    match time < least {
        true => Err(format!("must be {} or longer", written(least))),
        false => Ok(time),
    }
}

/// One hundred years. Longer durations overflow when clocks or the database add them.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Parses a duration such as `500ms` or `2h` for the setting `variable`.
///
/// # Errors
/// A [`ConfigError`] names the setting.
pub fn parse_duration(variable: &str, value: &str) -> Result<Duration, ConfigError> {
    duration(value).map_err(ConfigError::at(variable))
}

/// A number of bytes above zero.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    match text.trim().parse() {
        Ok(0) | Err(_) => Err(format!("{text:?} is not a number of bytes above 0")),
        Ok(bytes) => Ok(bytes),
    }
}

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text.trim()).map_err(|_| {
        let hint = match text.trim().parse::<f64>() {
            Ok(_) => ": the unit is missing",
            Err(_) => "",
        };
        format!("{text:?} is not a duration such as 500ms or 2h{hint}")
    })?;
    if duration > LONGEST {
        return Err("must not be longer than one hundred years".to_owned());
    }
    Ok(duration)
}

pub(super) fn ports(text: &str) -> Result<Vec<u16>, String> {
    let port = |word: &str| match word.parse() {
        Ok(0) | Err(_) => Err(format!("{word:?} is not a port from 1 to 65535")),
        Ok(port) => Ok(port),
    };
    words(text).map(port).collect()
}

pub(crate) fn url(text: &str) -> Result<Url, String> {
    let url = Url::parse(text.trim()).map_err(|error| {
        let why = match error {
            url::ParseError::RelativeUrlWithoutBase => String::new(),
            error => format!(": {error}"),
        };
        format!("not a URL that starts with http:// or https://{why}")
    })?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!(
            "the scheme {:?} is not supported: use http:// or https://",
            url.scheme()
        ));
    }
    if url.host().is_none() {
        return Err("the URL has no host".to_owned());
    }
    if url.as_str().parse::<http::Uri>().is_err() {
        return Err("the URL cannot be used in an HTTP request".to_owned());
    }
    Ok(url)
}

/// A duration as one word.
pub(super) fn written(duration: Duration) -> String {
    humantime::format_duration(duration)
        .to_string()
        .replace(' ', "")
}

/// A longer first path segment is masked: the segment may be a token.
const LONGEST_SEGMENT: usize = 24;
/// Replaces secrets and possible secrets.
const MASK: &str = "***";

/// A URL for display: scheme, host, port and the first segment of the path. Receivers such as Slack and
/// Discord put tokens into the path, so the rest of the path is masked like a password.
pub(crate) fn shown_url(url: &Url) -> String {
    let user = match url.username().is_empty() && url.password().is_none() {
        true => String::new(),
        false => format!("{MASK}@"),
    };
    let port = url
        .port()
        .map_or_else(String::new, |port| format!(":{port}"));
    let (first, rest) = match url.path().trim_start_matches('/').split_once('/') {
        Some((first, rest)) => (first, Some(rest)),
        None => (url.path().trim_start_matches('/'), None),
    };
    let is_word = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let is_shown = first.len() <= LONGEST_SEGMENT && first.bytes().all(is_word);
    let first = if is_shown { first } else { MASK };
    let rest = match rest {
        None => String::new(),
        Some("") => "/".to_owned(),
        Some(_) => format!("/{MASK}"),
    };
    let query = match url.query() {
        None => String::new(),
        Some(_) => format!("?{MASK}"),
    };
    format!(
        "{}://{user}{}{port}/{first}{rest}{query}",
        url.scheme(),
        url.host_str().unwrap_or_default(),
    )
}

/// Whether a part of the URL is the mask of a URL [for display](shown_url), which says nothing of what it was.
pub(crate) fn is_masked(url: &Url) -> bool {
    let mut segments = url.path_segments().into_iter().flatten();
    url.username() == MASK || url.query() == Some(MASK) || segments.any(|one| one == MASK)
}

/// A database URL or key=value string for display: host, port, database, and the user of a key=value
/// string.
pub(super) fn shown_database(database_url: &SecretString) -> String {
    let text = database_url.expose_secret();
    let url = text.split_once("://");
    match url.filter(|(scheme, _)| matches!(*scheme, "postgres" | "postgresql")) {
        Some((scheme, rest)) => shown_database_url(scheme, rest),
        None => shown_pairs(text),
    }
}

/// Masks everything between the scheme and the last `@`, which may be a password without percent-encoding.
fn shown_database_url(scheme: &str, rest: &str) -> String {
    let (place, query) = match rest.split_once('?') {
        Some((place, query)) => (place, Some(query)),
        None => (rest, None),
    };
    // Ambiguous: either the password contains a question mark, or a parameter contains an at sign.
    if query.is_some_and(|query| query.contains('@')) {
        return format!("{scheme}://{MASK}");
    }
    let (user, place) = match place.rsplit_once('@') {
        Some((_, place)) => (format!("{MASK}@"), place),
        None => (String::new(), place),
    };
    let (hosts, database) = match place.split_once('/') {
        Some((hosts, database)) => (hosts, format!("/{database}")),
        None => (place, String::new()),
    };
    let hosts: Vec<&str> = hosts
        .split(',')
        .map(|host| {
            let after_address = host.rsplit(']').next().unwrap_or(host);
            let port = after_address.split_once(':').map_or("", |(_, port)| port);
            let is_port = port.bytes().all(|b| b.is_ascii_digit());
            if is_port { host } else { MASK }
        })
        .collect();
    let query = query.map_or_else(String::new, |_| format!("?{MASK}"));
    format!("{scheme}://{user}{}{database}{query}", hosts.join(","))
}

fn shown_pairs(text: &str) -> String {
    let Some(pairs) = pairs(text) else {
        return MASK.to_owned();
    };
    let shown = pairs.into_iter().filter_map(|(key, value)| {
        // `dbname` may hold a whole connection string with a password.
        let is_plain = !value.contains("://") && !value.contains('=');
        let value = if is_plain { value.as_str() } else { MASK };
        let is_shown = matches!(key, "host" | "hostaddr" | "port" | "dbname" | "user");
        is_shown.then(|| match value.contains([' ', '\'']) {
            true => format!("{key}={value:?}"),
            false => format!("{key}={value}"),
        })
    });
    shown.collect::<Vec<_>>().join(" ")
}

/// The pairs of a key=value string, parsed like libpq: values may be in single quotes, a backslash escapes the
/// next character, and the equals sign may have spaces around it. `None`: libpq refuses the string.
fn pairs(text: &str) -> Option<Vec<(&str, String)>> {
    let mut pairs = Vec::new();
    let mut rest = text.trim_ascii_start();
    while !rest.is_empty() {
        let (key, value) = rest.split_once('=')?;
        let key = key.trim_ascii_end();
        if key.is_empty() || key.contains(|c: char| c.is_ascii_whitespace()) {
            return None;
        }
        let value = value.trim_ascii_start();
        let is_quoted = value.starts_with('\'');
        let mut characters = value.char_indices().skip(usize::from(is_quoted));
        let mut read = String::new();
        let end = loop {
            match characters.next() {
                Some((_, '\\')) => read.extend(characters.next().map(|(_, c)| c)),
                Some((at, '\'')) if is_quoted => break at + 1,
                None if is_quoted => return None,
                Some((at, c)) if !is_quoted && c.is_ascii_whitespace() => break at,
                None => break value.len(),
                Some((_, c)) => read.push(c),
            }
        };
        pairs.push((key, read));
        rest = value[end..].trim_ascii_start();
    }
    Some(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_numbers_separated_by_commas() {
        assert_eq!(ports("443, 8443"), Ok(vec![443, 8443]));
        assert_eq!(ports(""), Ok(Vec::new()));
        for bad in ["0", "https", "443;8443", "65536", "-1"] {
            assert!(ports(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_the_first_path_segment_of_a_url_is_shown() {
        for (url, shown) in [
            ("https://a.example", "https://a.example/"),
            (
                "https://a.example:8443/events",
                "https://a.example:8443/events",
            ),
            ("https://a.example/events/", "https://a.example/events/"),
            (
                "https://hooks.slack.com/services/T0SECRET/B0SECRET/SECRET",
                "https://hooks.slack.com/services/***",
            ),
            (
                "https://discord.com/api/webhooks/1/SECRET?wait=SECRET#SECRET",
                "https://discord.com/api/***?***",
            ),
            (
                "https://api.telegram.org/bot1:SECRET/sendMessage",
                "https://api.telegram.org/***/***",
            ),
            (
                "https://webhook.site/01234567-89ab-cdef-0123-SECRET",
                "https://webhook.site/***",
            ),
            ("https://SECRET@a.example/x", "https://***@a.example/x"),
            (
                "https://u:SECRET@[::1]:1/x//SECRET",
                "https://***@[::1]:1/x/***",
            ),
            (
                "https://a.example//events/SECRET",
                "https://a.example/events/***",
            ),
        ] {
            let url = Url::parse(url).expect("a URL");
            assert_eq!(shown_url(&url), shown);
        }
    }

    #[test]
    fn no_password_of_a_database_is_shown_in_any_notation() {
        for (given, shown) in [
            ("postgres://db/x", "postgres://db/x"),
            ("postgres://u:SECRET@db:5432/x", "postgres://***@db:5432/x"),
            ("postgres://u:123/SECRET@db/x", "postgres://***@db/x"),
            (
                "postgres://u:SE@CR/ET@[::1]:1/x",
                "postgres://***@[::1]:1/x",
            ),
            ("postgres://u:SECRET?SECRET@db/x", "postgres://***"),
            ("postgres://db/x?password=SE@CRET", "postgres://***"),
            ("postgres://db/x?password=SECRET", "postgres://db/x?***"),
            ("postgres://u:SECRET/x", "postgres://***/x"),
            ("postgresql://a:1,b:2/x", "postgresql://a:1,b:2/x"),
            ("host=db user=u password=SECRET", "host=db user=u"),
            ("password='x user=SECRET' dbname=shop", "dbname=shop"),
            (r"password=x\ user=SECRET host = db", "host=db"),
            (r"password='\' user=SECRET' host='db'", "host=db"),
            ("password=SECRET://SECRET@db", ""),
            ("passfile=/x dbname = 'a b' user=u", "dbname=\"a b\" user=u"),
            ("dbname=postgres://u:SECRET@db/x", "dbname=***"),
            ("dbname='password=SECRET'", "dbname=***"),
            ("password='x user=SECRET", "***"),
            ("host=db SECRET user=u", "***"),
            ("host=db SECRET", "***"),
        ] {
            assert_eq!(shown_database(&SecretString::from(given)), shown);
        }
    }
}
