//! Names, texts and URLs for display, shared by the pages and the commands of the program.

use diesel_outbox::Destination;
use diesel_outbox::program;
use url::Url;

/// Replaces user and password.
const MASK: &str = "***";

/// The most characters of a name in a table row.
pub const LONGEST_NAME: usize = 80;

/// A text of at most `most` characters. A shortened text ends with `…`.
pub fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(most.saturating_sub(1)).collect();
    short.push('…');
    short
}

/// The URL without user and password.
pub fn without_user(text: &str) -> String {
    // `user:password@host` has a scheme, but no host.
    let parsed = Url::parse(text).ok().filter(Url::has_authority);
    let masked = parsed.ok_or(()).map(|mut url| {
        let has_user = !url.username().is_empty() || url.password().is_some();
        let is_masked = has_user && url.set_username(MASK).and(url.set_password(None)).is_ok();
        (has_user, is_masked, url)
    });
    match (masked, text.rsplit_once('@')) {
        (Ok((false, ..)), _) | (Err(_), None) => text.to_owned(),
        (Ok((_, true, url)), _) => url.into(),
        // A row written by SQL may have any text.
        (_, Some((_, rest))) => format!("{MASK}@{rest}"),
        (_, None) => MASK.to_owned(),
    }
}

/// The URL without user, password and the values of its query, which are tokens at many receivers.
pub fn without_credentials(text: &str) -> String {
    let shown = without_user(text);
    let (before, fragment) = match shown.split_once('#') {
        Some((before, fragment)) => (before, format!("#{fragment}")),
        None => (shown.as_str(), String::new()),
    };
    match before.split_once('?') {
        Some((before, _)) => format!("{before}?{MASK}{fragment}"),
        None => shown,
    }
}

/// The URL without anything that may be a secret: user, password, query, and the path after its first segment, which
/// is a token at Slack.
pub fn without_secrets(url: &str) -> String {
    let parsed = Destination::new("", url);
    parsed.map_or_else(|_| "invalid URL".to_owned(), |one| program::shown_url(&one))
}

/// What a person or a program means who writes a URL that was shown without its secrets: the stored URL, or another path
/// at the same server, which keeps user and password. Another server does not get them.
pub(crate) fn with_user_of(written: String, stored: &str) -> String {
    let shown = [
        without_user(stored),
        without_credentials(stored),
        without_secrets(stored),
    ];
    if shown.contains(&written) {
        return stored.to_owned();
    }
    let urls = Url::parse(&written).ok().zip(Url::parse(stored).ok());
    let same = urls.filter(|(new, old)| new.username() == MASK && new.origin() == old.origin());
    let filled = same.and_then(|(mut new, old)| {
        new.set_username(old.username()).ok()?;
        new.set_password(old.password()).ok()?;
        Some(new.into())
    });
    filled.unwrap_or(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_shortened_by_characters() {
        assert_eq!(shortened("äöü", 3), "äöü");
        assert_eq!(shortened("äöüß", 3), "äö…");
    }

    #[test]
    fn a_url_is_shown_without_its_user() {
        for (url, shown) in [
            ("https://a.test/b/c?d=e", "https://a.test/b/c?d=e"),
            ("https://ann:pw@a.test/b", "https://***@a.test/b"),
            ("https://token@a.test/b", "https://***@a.test/b"),
            ("ann:pw@nowhere", "***@nowhere"),
            ("no URL", "no URL"),
        ] {
            assert_eq!(without_user(url), shown);
        }
    }

    #[test]
    fn a_url_that_comes_back_masked_keeps_what_was_masked_at_the_same_server() {
        let stored = "https://ann:p%40w@a.test/b/c?d=e";
        for (written, meant) in [
            (without_user(stored), stored),
            (without_credentials(stored), stored),
            (without_secrets(stored), stored),
            (
                "https://***@a.test/new".to_owned(),
                "https://ann:p%40w@a.test/new",
            ),
            ("https://a.test/b".to_owned(), "https://a.test/b"),
            (
                "https://bob:x@a.test/b".to_owned(),
                "https://bob:x@a.test/b",
            ),
            (
                "https://***@evil.test/b".to_owned(),
                "https://***@evil.test/b",
            ),
            ("http://***@a.test/b".to_owned(), "http://***@a.test/b"),
        ] {
            assert_eq!(with_user_of(written.clone(), stored), meant, "{written}");
        }
        assert_eq!(with_user_of("https://b".to_owned(), ""), "https://b");
    }

    #[test]
    fn a_url_is_shown_without_anything_that_may_be_a_secret() {
        for (url, shown) in [
            (
                "https://ann:pw@a.test/b/c?d=e",
                "https://***@a.test/b/***?***",
            ),
            ("ann:pw@nowhere", "invalid URL"),
        ] {
            assert_eq!(without_secrets(url), shown);
        }
    }
}
