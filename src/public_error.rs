//! What a customer may read about a failed delivery: what to mend, and nothing about the network of the relay.
//!
//! The reason and the error are those of an operator. A name without an address and a name with a forbidden address give
//! the same text, and a forbidden address is never connected to: otherwise, a customer who registers URLs could explore
//! that network.

use std::time::Duration;

use crate::status::{NO_CHALLENGE, REDIRECTS_TO, ReasonCode, TOKEN_SERVER};

/// What TLS says of a certificate, and the words for it, after the name of the host.
const CERTIFICATES: [(&str, &str); 8] = [
    ("certificate expired", "has expired"),
    ("Expired", "has expired"),
    ("certificate not valid yet", "is not valid yet"),
    ("NotValidYet", "is not valid yet"),
    ("certificate not valid for", "is for another name"),
    ("NotValidForName", "is for another name"),
    (
        "UnknownIssuer",
        "is from no trusted authority, or its chain is incomplete",
    ),
    ("Revoked", "is revoked"),
];

/// The text for a reason code, a colon and an error.
pub(crate) fn of_text(text: &str) -> String {
    let (code, error) = text.split_once(": ").unwrap_or((text, ""));
    public_error(code.parse().ok(), Some(error))
}

/// The text for this reason and this error.
pub(crate) fn public_error(code: Option<ReasonCode>, error: Option<&str>) -> String {
    use ReasonCode as Code;

    let error = error.unwrap_or_default();
    let words = match code {
        Some(Code::Dns | Code::BlockedAddress) => match unresolved(error) {
            Some(host) => return format!("the name {host} does not resolve to a public address"),
            None => "the URL leads to no public address",
        },
        Some(Code::Connect | Code::Proxy) => "your endpoint could not be reached",
        Some(Code::Tls) => match (handshake(error), certificate(error)) {
            (Some(host), Some(fault)) => return format!("the certificate of {host} {fault}"),
            (Some(host), None) => return format!("no secure connection to {host} was possible"),
            (None, _) => "no secure connection was possible",
        },
        Some(Code::Timeout) => match limit(error) {
            Some(limit) => return format!("your endpoint did not answer within {limit}"),
            None => "your endpoint did not answer in time",
        },
        Some(Code::TokenServer) => return of_token_server(error),
        Some(Code::Redirect) => match error.split_once(REDIRECTS_TO) {
            Some((_, to)) => {
                return format!("your endpoint redirects to {to}, and redirects are not followed");
            }
            None => "your endpoint redirects, and redirects are not followed",
        },
        Some(Code::ConnectionLost) => "the connection was lost before your endpoint answered",
        Some(Code::Protocol) => "the answer of your endpoint was not valid HTTP",
        Some(Code::RateLimited) => "your endpoint limits the rate of requests",
        Some(Code::ClientError | Code::Rejected) => "your endpoint refused the request",
        Some(Code::ServerError) => "your endpoint answered with a server error",
        Some(Code::Gone) => "your endpoint accepts no more requests at this URL",
        Some(Code::InvalidUrl) => "the URL cannot be used",
        Some(Code::InvalidHeader) => "a header cannot be sent",
        Some(Code::PayloadTooLarge) => "the message is too large",
        Some(Code::NotVerified) => match error {
            NO_CHALLENGE => "the answer of your endpoint did not repeat the challenge",
            _ => "your endpoint did not allow this sender (WebHook-Allowed-Origin)",
        },
        Some(Code::Expired) => "the message expired before delivery",
        Some(Code::Cancelled) => "the message was cancelled",
        Some(Code::ByHand) => "the message was settled by an operator",
        Some(Code::DestinationRemoved) => "the destination was removed",
        _ => "the delivery failed",
    };
    words.to_owned()
}

/// What the token server answered, or why it did not: the words for the endpoint, about the token server.
fn of_token_server(error: &str) -> String {
    let error = error.strip_prefix(TOKEN_SERVER).unwrap_or_default();
    if error.starts_with("answered ") {
        return format!("your token server {error}");
    }
    let (code, error) = error.split_once(": ").unwrap_or_default();
    let code = code.parse().unwrap_or(ReasonCode::Connect);
    public_error(Some(code), Some(error))
        .replace("your endpoint", "your token server")
        .replace("the URL", "the token URL")
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
    known
        .find(|(sign, _)| fault.starts_with(sign))
        .map(|(_, words)| *words)
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

    /// R58: the tests of `dispatch::http::blame` compare with the errors themselves.
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
