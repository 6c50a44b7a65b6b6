//! What a customer may read about a failed delivery: what to mend, and nothing about the network of the relay.
//!
//! The reason and the error are those of an operator. A name without an address and a name with a forbidden address give
//! the same text, and a forbidden address is never connected to: otherwise, a customer who registers URLs could explore
//! that network. The portal translates the sentences.

use std::time::Duration;

use crate::status::{NO_CHALLENGE, ONLY_FOR_OPERATORS, REDIRECTS_TO, ReasonCode, TOKEN_SERVER};

/// Declares the sentences. `{}` stands for a value, such as a host.
macro_rules! sentences {
    ($($name:ident = $text:literal;)+) => {
        $(const $name: &str = $text;)+

        /// All sentences. Those about the endpoint and the URL are also said about a [token server](TOKEN_WORDS).
        pub const PUBLIC_ERRORS: &[&str] = &[$($name),+];
    };
}

sentences! {
    NAME_WITHOUT_ADDRESS = "the name {} does not resolve to a public address";
    NO_ADDRESS = "the URL leads to no public address";
    NOT_REACHED = "your endpoint could not be reached";
    HAS_EXPIRED = "the certificate of {} has expired";
    NOT_YET_VALID = "the certificate of {} is not valid yet";
    FOR_ANOTHER_NAME = "the certificate of {} is for another name";
    NOT_TRUSTED = "the certificate of {} is from no trusted authority, or its chain is incomplete";
    REVOKED = "the certificate of {} is revoked";
    UNSUPPORTED = "the certificate of {}, or of an authority above it, is signed in a way that is not supported (for example with P-521)";
    NO_TLS_TO = "no secure connection to {} was possible";
    NO_TLS = "no secure connection was possible";
    TOO_SLOW = "your endpoint did not answer within {}";
    NOT_IN_TIME = "your endpoint did not answer in time";
    REDIRECT_TO = "your endpoint redirects to {}, and redirects are not followed";
    REDIRECTED = "your endpoint redirects, and redirects are not followed";
    LOST = "the connection was lost before your endpoint answered";
    NOT_HTTP = "the answer of your endpoint was not valid HTTP";
    LIMITS_RATE = "your endpoint limits the rate of requests";
    REFUSED = "your endpoint refused the request";
    SERVER_ERROR = "your endpoint answered with a server error";
    GONE = "your endpoint accepts no more requests at this URL";
    BAD_URL = "the URL cannot be used";
    BAD_HEADER = "a header cannot be sent";
    TOO_LARGE = "the message is too large";
    NOT_REPEATED = "the answer of your endpoint did not repeat the challenge";
    NOT_ALLOWED = "your endpoint did not allow this sender (WebHook-Allowed-Origin)";
    EXPIRED = "the message expired before delivery";
    CANCELLED = "the message was cancelled";
    BY_HAND = "the message was settled by an operator";
    REMOVED = "the endpoint was removed";
    TOKEN_ANSWERED = "your token server answered {}";
    FAILED = "the delivery failed";
}

/// How the reason of a disabled destination begins whose endpoint does not want messages. The error of the last try follows.
pub(crate) const NOT_VERIFIED: &str = "NOT_VERIFIED: ";

/// Words for the endpoint, and for its token server.
pub const TOKEN_WORDS: [(&str, &str); 2] = [
    ("your endpoint", "your token server"),
    ("the URL", "the token URL"),
];

/// What TLS says of a certificate, and the sentence for it, with the name of the host.
const CERTIFICATES: [(&str, &str); 9] = [
    ("certificate expired", HAS_EXPIRED),
    ("Expired", HAS_EXPIRED),
    ("certificate not valid yet", NOT_YET_VALID),
    ("NotValidYet", NOT_YET_VALID),
    ("certificate not valid for", FOR_ANOTHER_NAME),
    ("NotValidForName", FOR_ANOTHER_NAME),
    ("UnknownIssuer", NOT_TRUSTED),
    ("Revoked", REVOKED),
    ("UnsupportedSignatureAlgorithm", UNSUPPORTED),
];

/// Why a destination is disabled, as its owner may read it.
pub(crate) fn of_disabled(reason: &str) -> String {
    match reason.strip_prefix(NOT_VERIFIED) {
        Some(error) => format!("{NOT_VERIFIED}{}", of_text(error)),
        None => reason.to_owned(),
    }
}

/// The text for a reason code, a colon and an error.
pub(crate) fn of_text(text: &str) -> String {
    let (code, error) = text.split_once(": ").unwrap_or((text, ""));
    public_error(code.parse().ok(), Some(error))
}

/// The text for this reason and this error.
pub(crate) fn public_error(code: Option<ReasonCode>, error: Option<&str>) -> String {
    use ReasonCode as Code;

    let error = error.unwrap_or_default();
    let error = error.split(ONLY_FOR_OPERATORS).next().unwrap_or_default();
    let with = |sentence: &str, value: &str| sentence.replacen("{}", value, 1);
    let sentence = match code {
        Some(Code::Dns | Code::BlockedAddress) => match unresolved(error) {
            Some(host) => return with(NAME_WITHOUT_ADDRESS, host),
            None => NO_ADDRESS,
        },
        Some(Code::Connect | Code::Proxy) => NOT_REACHED,
        Some(Code::Tls) => match handshake(error) {
            Some(host) => return with(certificate(error).unwrap_or(NO_TLS_TO), host),
            None => NO_TLS,
        },
        Some(Code::Timeout) => match limit(error) {
            Some(limit) => return with(TOO_SLOW, &limit),
            None => NOT_IN_TIME,
        },
        Some(Code::TokenServer) => return of_token_server(error),
        Some(Code::Redirect) => match error.split_once(REDIRECTS_TO) {
            Some((_, to)) => return with(REDIRECT_TO, to),
            None => REDIRECTED,
        },
        Some(Code::ConnectionLost) => LOST,
        Some(Code::Protocol) => NOT_HTTP,
        Some(Code::RateLimited) => LIMITS_RATE,
        Some(Code::ClientError | Code::Rejected) => REFUSED,
        Some(Code::ServerError) => SERVER_ERROR,
        Some(Code::Gone) => GONE,
        Some(Code::InvalidUrl) => BAD_URL,
        Some(Code::InvalidHeader) => BAD_HEADER,
        Some(Code::PayloadTooLarge) => TOO_LARGE,
        Some(Code::NotVerified) => match error {
            NO_CHALLENGE => NOT_REPEATED,
            _ => NOT_ALLOWED,
        },
        Some(Code::Expired) => EXPIRED,
        Some(Code::Cancelled) => CANCELLED,
        Some(Code::ByHand) => BY_HAND,
        Some(Code::DestinationRemoved) => REMOVED,
        _ => FAILED,
    };
    sentence.to_owned()
}

/// What the token server answered, or why it did not: the words for the endpoint, about the token server.
fn of_token_server(error: &str) -> String {
    let error = error.strip_prefix(TOKEN_SERVER).unwrap_or_default();
    if let Some(answer) = error.strip_prefix("answered ") {
        return TOKEN_ANSWERED.replacen("{}", answer, 1);
    }
    let (code, error) = error.split_once(": ").unwrap_or_default();
    let code = code.parse().unwrap_or(ReasonCode::Connect);
    let text = public_error(Some(code), Some(error));
    let [endpoint, url] = TOKEN_WORDS;
    text.replace(endpoint.0, endpoint.1).replace(url.0, url.1)
}

/// The text between these two.
fn between<'a>(text: &'a str, begin: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(begin)?;
    Some(rest.split_once(end)?.0)
}

/// The host without an address, or with forbidden ones. A URL may have an address instead.
fn unresolved(error: &str) -> Option<&str> {
    match error.starts_with("blocked address ") {
        true => between(error, " of ", ": "),
        false => between(error, "cannot resolve ", ": "),
    }
}

/// The host, without its port, of a failed TLS handshake.
fn handshake(error: &str) -> Option<&str> {
    let place = between(error, "TLS handshake with ", ": ")?;
    Some(place.rsplit_once(':').map_or(place, |(host, _)| host))
}

/// What is wrong with the certificate.
fn certificate(error: &str) -> Option<&'static str> {
    let (_, fault) = error.split_once("invalid peer certificate: ")?;
    let mut known = CERTIFICATES.iter();
    let found = known.find(|(sign, _)| fault.starts_with(sign));
    found.map(|(_, sentence)| *sentence)
}

/// The time limit, such as `15 s`.
fn limit(error: &str) -> Option<String> {
    let (_, limit) = error.rsplit_once(" within ")?;
    let limit = Duration::from_millis(limit.strip_suffix(" ms")?.parse().ok()?);
    Some(match limit.as_millis() {
        millis @ ..1000 => format!("{millis} ms"),
        _ => format!("{} s", limit.as_secs_f64()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R46
    #[test]
    fn an_error_for_customers_does_not_say_what_is_inside() {
        let inside = |code| public_error(Some(code), Some("10.0.0.7:5432 refused"));
        assert_eq!(
            inside(ReasonCode::Connect),
            "your endpoint could not be reached"
        );
        assert_eq!(inside(ReasonCode::Proxy), inside(ReasonCode::Connect));
        assert_eq!(inside(ReasonCode::Dns), inside(ReasonCode::BlockedAddress));
        for code in ReasonCode::ALL {
            let text = inside(*code);
            assert!(!text.contains(char::is_numeric), "{text}");
        }
        assert_eq!(public_error(None, Some("10.0.0.7")), "the delivery failed");
    }

    /// R46: the tenant of the destination gets the event with the reason.
    #[test]
    fn the_reason_of_a_disabled_destination_does_not_say_what_is_inside() {
        for (reason, words) in [
            (
                "NOT_VERIFIED: CONNECT: cannot connect to a.example:443 (10.0.0.7): refused",
                "NOT_VERIFIED: your endpoint could not be reached",
            ),
            ("has failed for 5days", "has failed for 5days"),
        ] {
            assert_eq!(of_disabled(reason), words);
        }
    }

    /// R59
    #[test]
    fn an_error_of_the_token_server_names_the_token_server() {
        for (error, words) in [
            (
                "token server: answered 401 (invalid_client)",
                "your token server answered 401 (invalid_client)",
            ),
            (
                "token server: TIMEOUT: no response within 15000 ms",
                "your token server did not answer within 15 s",
            ),
            (
                "token server: CONNECT: 10.0.0.7:443: refused",
                "your token server could not be reached",
            ),
            (
                "token server: BLOCKED_ADDRESS: blocked address 10.0.0.7 (private): no",
                "the token URL leads to no public address",
            ),
            ("", "your token server could not be reached"),
        ] {
            assert_eq!(
                public_error(Some(ReasonCode::TokenServer), Some(error)),
                words
            );
        }
    }

    /// R58: the tests of `http::blame` compare with the errors themselves.
    #[test]
    fn an_error_for_customers_says_what_to_mend() {
        use ReasonCode as Code;

        for (code, error, words) in [
            (
                Code::Timeout,
                "no response within 15000 ms",
                "your endpoint did not answer within 15 s",
            ),
            (
                Code::Timeout,
                "no connection to a.example:443 (203.0.113.7) within 2500 ms",
                "your endpoint did not answer within 2.5 s",
            ),
            (
                Code::Timeout,
                "no response within 800 ms",
                "your endpoint did not answer within 800 ms",
            ),
            (
                Code::Timeout,
                "proxy p:3128 opened no tunnel to the destination in time",
                "your endpoint did not answer in time",
            ),
            (
                Code::Dns,
                "host not found",
                "the URL leads to no public address",
            ),
            (
                Code::BlockedAddress,
                "blocked address 10.0.0.7 (private): no",
                "the URL leads to no public address",
            ),
            (
                Code::Redirect,
                "the receiver returned 302, which redirects to https://b.example/",
                "your endpoint redirects to https://b.example/, and redirects are not followed",
            ),
            (
                Code::Redirect,
                "the receiver returned 302; only for operators: http://10.0.0.7/",
                "your endpoint redirects, and redirects are not followed",
            ),
            (
                Code::TokenServer,
                "token server: answered 401; only for operators: (invalid_client)",
                "your token server answered 401",
            ),
            (
                Code::Redirect,
                "the receiver returned 302",
                "your endpoint redirects, and redirects are not followed",
            ),
            (
                Code::Tls,
                "invalid certificate",
                "no secure connection was possible",
            ),
            (
                Code::ServerError,
                "the receiver returned 500",
                "your endpoint answered with a server error",
            ),
            (
                Code::Rejected,
                "the receiver returned 422",
                "your endpoint refused the request",
            ),
        ] {
            assert_eq!(public_error(Some(code), Some(error)), words, "{error}");
        }
    }
}
