//! Addresses of the database as the user wrote them, and the limits that a connection adds, at both ends.

use std::time::Duration;

use crate::error::DatabaseError;

/// How long a pooler lets a client wait for a server connection: the default of PgBouncer's `query_wait_timeout`.
pub(crate) const POOLERS_TURN: Duration = Duration::from_secs(120);

/// The user timeout in milliseconds. The connections of Diesel add a few ([`Socket`](super::socket::Socket)).
pub(super) const USER_TIMEOUT: u32 = 20_000;

/// libpq's parameters, used if the URL does not set them. A dead server is noticed after at most 20 s of silence, and
/// sooner while data is being sent.
const PARAMETERS: &[(&str, &str)] = &[
    ("connect_timeout", "5"),
    ("keepalives_idle", "10"),
    ("keepalives_interval", "5"),
    ("keepalives_count", "2"),
    ("tcp_user_timeout", "20000"),
];

/// The same limits at the server, which otherwise keeps the session of a vanished machine, and its locks, for hours.
/// They belong to the session, and have no effect on a Unix socket.
pub(crate) const OF_SESSION: &str = "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5;
     SET tcp_keepalives_count = 2; SET tcp_user_timeout = 20000";

/// Puts our parameters, and `parameters`, before those of the URL: libpq uses the last of several values.
pub(crate) fn with_parameters(database_url: &str, parameters: &[(&str, String)]) -> String {
    let is_url = ["postgres://", "postgresql://"]
        .iter()
        .any(|scheme| database_url.starts_with(scheme));
    let separator = if is_url { "&" } else { " " };
    let written = |value: &str| {
        if is_url {
            value
                .replace('%', "%25")
                .replace('\\', "%5C")
                .replace(' ', "%20")
                .replace('=', "%3D")
        } else {
            format!("'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"))
        }
    };
    let fixed = PARAMETERS.iter().map(|(name, value)| (*name, *value));
    let more = parameters
        .iter()
        .map(|(name, value)| (*name, value.as_str()));
    let ours = fixed
        .chain(more)
        .map(|(name, value)| format!("{name}={}", written(value)))
        .collect::<Vec<_>>()
        .join(separator);
    if !is_url {
        return format!("{ours} {database_url}");
    }
    match query_at(database_url).map(|at| (&database_url[..at], &database_url[at + 1..])) {
        None => format!("{database_url}?{ours}"),
        Some((before, "")) => format!("{before}?{ours}"),
        Some((before, theirs)) => format!("{before}?{ours}&{theirs}"),
    }
}

/// Where the question mark before the parameters of a URL is. Like libpq, which takes what is before the first `@` for
/// user and password, unless a `/` comes first: these may contain question marks.
fn query_at(url: &str) -> Option<usize> {
    let begin = url.find("://")? + "://".len();
    let rest = &url[begin..];
    let user = rest
        .find(['@', '/'])
        .filter(|at| rest[*at..].starts_with('@'));
    let place = user.unwrap_or(0);
    rest[place..].find('?').map(|at| begin + place + at)
}

/// An error of libpq on one line, without the password of the URL.
pub(crate) fn refused(error: &str, database_url: &str) -> DatabaseError {
    let error = without_password(error, database_url);
    let lines: Vec<&str> = error.lines().map(str::trim).collect();
    DatabaseError::Connect(lines.join("; "))
}

/// Hides the password in a libpq error. libpq quotes text that it cannot read, and takes part of a password with an
/// unencoded `/` or `@` for something else. Every quoted piece that may belong to the password is hidden.
fn without_password(error: &str, database_url: &str) -> String {
    let secret = password_of(database_url);
    let touches_secret = |piece: &str| {
        !secret.is_empty()
            && database_url
                .match_indices(piece)
                .any(|(at, _)| at < secret.end && at + piece.len() > secret.start)
    };
    error
        .split('"')
        .map(|piece| {
            let is_secret = !piece.is_empty() && (piece.contains('@') || touches_secret(piece));
            if is_secret { "***" } else { piece }
        })
        .collect::<Vec<_>>()
        .join("\"")
}

/// The range that contains the password. In a URL: from the end of the user to the last `@`. In parameters and pairs:
/// from `password` to the end. In anything else: the whole text.
fn password_of(database_url: &str) -> std::ops::Range<usize> {
    if let Some((scheme, rest)) = database_url.split_once("://")
        && !scheme.contains('=')
    {
        if let Some(parameter) = rest.find("password=") {
            let user = rest.find(':').unwrap_or(rest.len()).min(parameter);
            return database_url.len() - rest.len() + user..database_url.len();
        }
        let begin = scheme.len() + "://".len();
        let user = rest.find(':').unwrap_or(rest.len());
        let at = rest.rfind('@').unwrap_or(0);
        return begin + user..begin + at.max(user);
    }
    let begin = match database_url.find("password") {
        Some(begin) => begin,
        None if database_url.contains('=') => database_url.len(),
        None => 0,
    };
    begin..database_url.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_of_the_password_is_hidden_and_other_pieces_are_shown() {
        for (url, error, shown) in [
            (
                "postgres://u:se/kret@db/shop",
                r#"invalid integer value "se" for connection option "port""#,
                r#"invalid integer value "***" for connection option "port""#,
            ),
            (
                "postgres://u:se@kret@db/shop",
                r#"could not translate host name "kret@db" to address"#,
                r#"could not translate host name "***" to address"#,
            ),
            (
                "host=db password=se kret",
                r#"missing "=" after "kret" in connection info string"#,
                r#"missing "***" after "***" in connection info string"#,
            ),
            (
                "postgres://u:sekret@db/shop",
                r#"connection to server at "db", port 5432 failed: FATAL: role "u" does not exist"#,
                r#"connection to server at "db", port 5432 failed: FATAL: role "u" does not exist"#,
            ),
            (
                "sekret",
                r#"missing "=" after "sekret" in connection info string"#,
                r#"missing "=" after "***" in connection info string"#,
            ),
            (
                "postgres://db/shop",
                r#"could not translate host name "db" to address"#,
                r#"could not translate host name "db" to address"#,
            ),
        ] {
            assert_eq!(without_password(error, url), shown);
        }
    }

    #[test]
    fn the_users_parameters_come_last_and_win() {
        let url = with_parameters("postgres://db/shop?connect_timeout=9", &[]);
        assert!(
            url.starts_with("postgres://db/shop?connect_timeout=5&"),
            "{url}"
        );
        assert!(url.ends_with("&connect_timeout=9"), "{url}");
        assert!(with_parameters("host=db", &[]).ends_with(" host=db"));
        assert!(with_parameters("postgres://db/shop", &[]).contains("shop?connect_timeout=5"));
    }

    /// As psql reads such a URL.
    #[test]
    fn a_question_mark_in_the_password_begins_no_parameters() {
        let url = with_parameters("postgres://u:se?kr?et@db/shop", &[]);
        let expected = "postgres://u:se?kr?et@db/shop?connect_timeout=5&";
        assert!(url.starts_with(expected), "{url}");
        let url = with_parameters("postgres://u:se?et@db/shop?sslmode=require", &[]);
        let expected = "postgres://u:se?et@db/shop?connect_timeout=5&";
        assert!(url.starts_with(expected), "{url}");
        assert!(url.ends_with("&sslmode=require"), "{url}");
        let url = with_parameters("postgres:///shop?options=a@b/c?d", &[]);
        assert!(
            url.starts_with("postgres:///shop?connect_timeout=5&"),
            "{url}"
        );
        assert!(url.ends_with("&options=a@b/c?d"), "{url}");
    }

    #[test]
    fn values_are_written_as_each_form_wants_them() {
        let named = [("application_name", "a=b\\ c".to_owned())];
        let url = with_parameters("postgres://db/shop", &named);
        assert!(url.ends_with("&application_name=a%3Db%5C%20c"), "{url}");
        let pairs = with_parameters("host=db", &named);
        assert!(pairs.contains(r"application_name='a=b\\ c' "), "{pairs}");
    }
}
