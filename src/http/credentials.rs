//! User and password of a URL, as HTTP sends them (RFC 7617).

use ::http::HeaderValue;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use percent_encoding::percent_decode_str;
use url::Url;

/// The value of the header for the user and the password of a URL. A URL encodes them; the header holds the bytes
/// themselves. The error is the reason why they cannot be sent.
pub(super) fn basic(url: &Url) -> Result<Option<HeaderValue>, &'static str> {
    if url.username().is_empty() && url.password().is_none() {
        return Ok(None);
    }
    // A percent sign without two digits stands for itself.
    let decoded = |text| percent_decode_str(text).collect::<Vec<u8>>();
    let user = decoded(url.username());
    let password = decoded(url.password().unwrap_or_default());
    if user.contains(&b':') {
        return Err(
            "the user name contains a colon, which Basic authentication cannot send: set the header `authorization` instead",
        );
    }
    if user.iter().chain(&password).any(u8::is_ascii_control) {
        return Err("user name and password must not contain control characters");
    }
    let both = [user.as_slice(), b":", &password].concat();
    let value = format!("Basic {}", BASE64_STANDARD.encode(both));
    let mut value =
        HeaderValue::try_from(value).map_err(|_| "user name or password is too long")?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// The URL without user, password and fragment, none of which is part of a request.
pub(super) fn without_user(url: &Url) -> String {
    let end = &url[url::Position::BeforeHost..url::Position::AfterQuery];
    format!("{}://{end}", url.scheme())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str) -> Result<Option<String>, &'static str> {
        let url = url.parse().expect("a URL");
        let value = basic(&url)?;
        Ok(value.map(|value| {
            let value = value.to_str().expect("ASCII").to_owned();
            let encoded = value.strip_prefix("Basic ").expect("Basic");
            let bytes = BASE64_STANDARD.decode(encoded).expect("base64");
            String::from_utf8(bytes).expect("UTF-8")
        }))
    }

    #[test]
    fn a_password_reaches_the_receiver_as_it_was_before_it_was_put_into_a_url() {
        for (user, sent) in [
            ("relay:plain", "relay:plain"),
            ("relay:p%40ss%2Fword", "relay:p@ss/word"),
            ("relay:a=b", "relay:a=b"),
            ("relay:a:b", "relay:a:b"),
            ("relay:a%3Ab", "relay:a:b"),
            ("relay:gr%C3%BC%C3%9Fe", "relay:grüße"),
            ("relay:grüße", "relay:grüße"),
            ("relay:100%", "relay:100%"),
            ("relay:%25", "relay:%"),
            ("relay:a%20b", "relay:a b"),
            ("us%20er", "us er:"),
            (":token", ":token"),
        ] {
            let found = of(&format!("http://{user}@shop.example/a"));
            assert_eq!(found, Ok(Some(sent.to_owned())), "{user}");
        }
        assert_eq!(of("http://shop.example/a"), Ok(None));
        for user in ["a%3Ab:c", "a:%0D%0Ab", "a%00:b"] {
            assert!(
                of(&format!("http://{user}@shop.example/")).is_err(),
                "{user}"
            );
        }
    }

    #[test]
    fn a_request_shows_neither_user_nor_fragment() {
        for (url, sent) in [
            (
                "http://a:b@shop.example:81/x?y=1#z",
                "http://shop.example:81/x?y=1",
            ),
            ("https://[2001:db8::1]", "https://[2001:db8::1]/"),
        ] {
            assert_eq!(without_user(&url.parse().expect("a URL")), sent);
        }
    }
}
