//! Whose failure it is that a send has no response: the table of this crate. `docs/requests.md` shows it to users.
//!
//! | whose | outcome |
//! |---|---|
//! | this machine: descriptors, ports, memory, its network | the message waits, and no attempt is counted |
//! | this relay: only its settings refuse the addresses of an endpoint | the message waits, and no attempt is counted |
//! | the proxy: unreachable, refuses the credentials, is none | the message waits, and no attempt is counted |
//! | the destination: everything else, also what the proxy says about it | a failed attempt |
//! | the message: it cannot be sent to any receiver | a dead letter |
//!
//! This machine, this relay and the proxy are blamed only for what is certain. In doubt the attempt counts, so that no message waits
//! for ever.

use std::error::Error as StdError;
use std::io::{self, ErrorKind};
use std::time::Duration;

use ureq::Error;

use super::egress::Blocked;
use super::lookups::LookupFailed;
use super::proxy::ProxyFailed;
use super::shortage::{NotConnected, Shortage};
use super::socket::Closed;
use super::tls::HandshakeFailed;
use crate::dispatch::{Failure, Outcome};
use crate::status::ReasonCode;

/// How long a message waits that this machine, this relay or the proxy could not send.
const WAIT: Duration = Duration::from_secs(1);

/// Whose failure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    ThisMachine,
    ThisRelay,
    Proxy,
    Destination,
    Message,
}

/// The outcome of a request without a response.
pub(super) fn outcome(error: &Error, timeout: Duration) -> Outcome {
    let (whose, code) = judge(error);
    let text = match error {
        Error::Io(inner) => match Shortage::of(inner) {
            Some(shortage) => shortage.to_string(),
            None => inner.to_string(),
        },
        Error::Other(inner) => match inner.downcast_ref::<NotConnected>() {
            Some(NotConnected { place, .. }) if code == ReasonCode::Timeout => {
                format!("no connection to {place} within {} ms", timeout.as_millis())
            }
            _ => inner.to_string(),
        },
        Error::Timeout(_) => format!("no response within {} ms", timeout.as_millis()),
        other => other.to_string(),
    };
    let mut failure = Failure::new(code, text);
    failure.may_be_ours = may_be_ours(error);
    match whose {
        Whose::ThisMachine | Whose::ThisRelay | Whose::Proxy => {
            failure.retry_after = Some(WAIT);
            Outcome::Wait(failure)
        }
        Whose::Destination => Outcome::Retry(failure),
        Whose::Message => Outcome::Dead(failure),
    }
}

/// Whether a connection has ended.
pub(super) fn is_lost(error: &Error) -> bool {
    judge(error).1 == ReasonCode::ConnectionLost
}

fn judge(error: &Error) -> (Whose, ReasonCode) {
    let code = match error {
        Error::Other(inner) => return judge_own(inner.as_ref()),
        Error::Http(_) => return (Whose::Message, ReasonCode::InvalidHeader),
        Error::BadUri(_) | Error::RequireHttpsOnly(_) => {
            return (Whose::Message, ReasonCode::InvalidUrl);
        }
        // The connection was established and broke later, so the receiver may have the message.
        Error::Io(io) => match io.kind() {
            _ if Shortage::of(io).is_some() => return (Whose::ThisMachine, ReasonCode::Shortage),
            ErrorKind::TimedOut | ErrorKind::WouldBlock => ReasonCode::Timeout,
            ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::ConnectionRefused
            | ErrorKind::BrokenPipe
            | ErrorKind::NotConnected
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::WriteZero
            | ErrorKind::UnexpectedEof => ReasonCode::ConnectionLost,
            // rustls reports untrusted certificates as invalid data.
            ErrorKind::InvalidData => ReasonCode::Tls,
            _ => ReasonCode::Failed,
        },
        Error::Timeout(_) => ReasonCode::Timeout,
        Error::HostNotFound => ReasonCode::Dns,
        Error::ConnectionFailed => ReasonCode::Connect,
        Error::Tls(_) | Error::Pem(_) | Error::Rustls(_) | Error::TlsRequired => ReasonCode::Tls,
        Error::Protocol(_) | Error::LargeResponseHeader(..) => ReasonCode::Protocol,
        _ => ReasonCode::Failed,
    };
    (Whose::Destination, code)
}

/// Judges an error of this crate from before the request was sent.
fn judge_own(error: &(dyn StdError + Send + Sync + 'static)) -> (Whose, ReasonCode) {
    let shortage = (Whose::ThisMachine, ReasonCode::Shortage);
    let is_short = |io: &io::Error| Shortage::of(io).is_some();
    if error.is::<Shortage>() {
        return shortage;
    }
    if error.is::<Closed>() {
        return (Whose::Destination, ReasonCode::Timeout);
    }
    if let Some(blocked) = error.downcast_ref::<Blocked>() {
        let whose = match blocked.is_for_others {
            true => Whose::ThisRelay,
            // The name may lead elsewhere soon: see `Target::or_give_up`.
            false => Whose::Destination,
        };
        return (whose, ReasonCode::BlockedAddress);
    }
    if let Some(failed) = error.downcast_ref::<ProxyFailed>() {
        return match failed {
            ProxyFailed::Itself { .. } => (Whose::Proxy, ReasonCode::Proxy),
            ProxyFailed::Destination { .. } | ProxyFailed::Denied { .. } => {
                (Whose::Destination, ReasonCode::Connect)
            }
            ProxyFailed::Silent { .. } => (Whose::Destination, ReasonCode::Timeout),
        };
    }
    if error.is::<LookupFailed>() {
        return (Whose::Destination, ReasonCode::Dns);
    }
    if let Some(HandshakeFailed { error, .. }) = error.downcast_ref() {
        return match is_short(error) {
            true => shortage,
            false => (Whose::Destination, ReasonCode::Tls),
        };
    }
    let code = match error.downcast_ref::<NotConnected>() {
        Some(failed) if failed.error.kind() == ErrorKind::TimedOut => ReasonCode::Timeout,
        Some(_) => ReasonCode::Connect,
        None => ReasonCode::Failed,
    };
    (Whose::Destination, code)
}

/// Whether no connection was made, or this relay closed it, and nothing shows that the receiver is the cause. The attempt counts all the same, but
/// says little about the destination as a whole.
fn may_be_ours(error: &Error) -> bool {
    use ureq::Timeout;

    match error {
        Error::HostNotFound | Error::Timeout(Timeout::Resolve | Timeout::Connect) => true,
        Error::Other(inner) if inner.is::<LookupFailed>() || inner.is::<Closed>() => true,
        Error::Other(inner) => inner.downcast_ref().is_some_and(|failed: &NotConnected| {
            failed.error.kind() != ErrorKind::ConnectionRefused
        }),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use rustix::io::Errno;
    use ureq::Timeout;

    use super::super::egress::Egress;
    use super::super::shortage::{is_shortage, not_connected};
    use super::*;
    use crate::endpoints::public_error::public_error;

    fn own(error: impl StdError + Send + Sync + 'static) -> Error {
        Error::Other(Box::new(error))
    }

    fn no_connection(kind: ErrorKind) -> Error {
        own(NotConnected {
            place: "shop.example:443".to_owned(),
            error: kind.into(),
        })
    }

    fn no_handshake(error: io::Error) -> Error {
        let host = "shop.example:443".to_owned();
        own(HandshakeFailed { host, error })
    }

    fn blocked() -> Blocked {
        let address = SocketAddr::from(([169, 254, 169, 254], 80));
        Egress::NoMetadata
            .filter("shop.example", &[address])
            .expect_err("a refused address")
    }

    /// The outcome of each error of a request without a response. The tests of `response` cover responses.
    #[test]
    fn every_error_has_its_outcome() {
        use ReasonCode as Code;

        let proxy = || "proxy:3128".to_owned();
        let lookup_failed = LookupFailed {
            host: "shop.example".into(),
            reason: "no".to_owned(),
            shortage: None,
        };
        let retried = [
            (own(lookup_failed), Code::Dns),
            (own(blocked()), Code::BlockedAddress),
            (Error::HostNotFound, Code::Dns),
            (no_connection(ErrorKind::ConnectionRefused), Code::Connect),
            (no_connection(ErrorKind::HostUnreachable), Code::Connect),
            (no_connection(ErrorKind::NetworkUnreachable), Code::Connect),
            (no_connection(ErrorKind::PermissionDenied), Code::Connect),
            (no_connection(ErrorKind::TimedOut), Code::Timeout),
            (Error::ConnectionFailed, Code::Connect),
            (no_handshake(ErrorKind::InvalidData.into()), Code::Tls),
            (no_handshake(ErrorKind::UnexpectedEof.into()), Code::Tls),
            (no_handshake(ErrorKind::ConnectionReset.into()), Code::Tls),
            (Error::Tls("no name"), Code::Tls),
            (Error::TlsRequired, Code::Tls),
            (Error::Rustls(rustls::Error::DecryptError), Code::Tls),
            (ErrorKind::InvalidData.into_error(), Code::Tls),
            (Error::Timeout(Timeout::Global), Code::Timeout),
            (Error::Timeout(Timeout::Connect), Code::Timeout),
            (ErrorKind::WouldBlock.into_error(), Code::Timeout),
            (ErrorKind::TimedOut.into_error(), Code::Timeout),
            (
                ErrorKind::ConnectionReset.into_error(),
                Code::ConnectionLost,
            ),
            (
                ErrorKind::ConnectionAborted.into_error(),
                Code::ConnectionLost,
            ),
            (ErrorKind::BrokenPipe.into_error(), Code::ConnectionLost),
            (ErrorKind::UnexpectedEof.into_error(), Code::ConnectionLost),
            (
                ErrorKind::HostUnreachable.into_error(),
                Code::ConnectionLost,
            ),
            (Error::LargeResponseHeader(2, 1), Code::Protocol),
            (
                own(ProxyFailed::Destination {
                    proxy: proxy(),
                    status: 502,
                }),
                Code::Connect,
            ),
            (own(ProxyFailed::Silent { proxy: proxy() }), Code::Timeout),
            (own(io::Error::other("unknown")), Code::Failed),
            (
                own(ProxyFailed::Denied {
                    proxy: proxy(),
                    status: 403,
                }),
                Code::Connect,
            ),
        ];
        for (error, code) in retried {
            match outcome(&error, Duration::from_secs(1)) {
                Outcome::Retry(failure) => assert_eq!(failure.code, code, "{error:?}"),
                other => panic!("{error:?} is {other:?}"),
            }
        }

        let bad_header = ::http::HeaderName::from_bytes(b"a b").expect_err("a space");
        let dead = [
            (Error::BadUri("a".to_owned()), Code::InvalidUrl),
            (Error::RequireHttpsOnly("a".to_owned()), Code::InvalidUrl),
            (Error::Http(bad_header.into()), Code::InvalidHeader),
        ];
        for (error, code) in dead {
            match outcome(&error, Duration::from_secs(1)) {
                Outcome::Dead(failure) => assert_eq!(failure.code, code, "{error:?}"),
                other => panic!("{error:?} is {other:?}"),
            }
        }

        let error = own(ProxyFailed::Itself {
            proxy: proxy(),
            reason: "is away".to_owned(),
        });
        assert_eq!(
            waits(&error),
            (Code::Proxy, "proxy proxy:3128 is away".to_owned())
        );
    }

    /// R50: the settings of one relay decide nothing for others.
    #[test]
    fn an_address_that_only_the_settings_of_this_relay_refuse_costs_no_attempt() {
        let private = SocketAddr::from(([10, 0, 0, 1], 80));
        let metadata = SocketAddr::from(([169, 254, 169, 254], 80));
        let error = |public_only, addresses: &[SocketAddr]| {
            let egress = Egress::Endpoint { public_only };
            own((egress.filter("shop.example", addresses)).expect_err("refused addresses"))
        };
        for addresses in [&[private][..], &[metadata, private]] {
            assert_eq!(waits(&error(true, addresses)).0, ReasonCode::BlockedAddress);
        }
        for public_only in [true, false] {
            let nobodys = outcome(&error(public_only, &[metadata]), Duration::from_secs(1));
            assert!(matches!(nobodys, Outcome::Retry(_)), "{nobodys:?}");
        }
    }

    /// The reason of an error that costs no attempt.
    #[track_caller]
    fn waits(error: &Error) -> (ReasonCode, String) {
        match outcome(error, Duration::from_secs(1)) {
            Outcome::Wait(failure) => (failure.code, failure.error),
            other => panic!("{error:?} is {other:?}"),
        }
    }

    /// R58: what a customer can mend, in the words of `public_error`.
    #[test]
    fn each_error_that_a_customer_can_mend_says_what_to_mend() {
        use rustls::CertificateError as Fault;

        let certificate = |fault| {
            let error = rustls::Error::InvalidCertificate(fault);
            no_handshake(io::Error::new(ErrorKind::InvalidData, error))
        };
        let time =
            |seconds| rustls::pki_types::UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let expired = Fault::ExpiredContext {
            time: time(7),
            not_after: time(6),
        };
        let not_yet = Fault::NotValidYetContext {
            time: time(7),
            not_before: time(8),
        };
        let other_name = Fault::NotValidForNameContext {
            expected: "shop.example".try_into().expect("a name"),
            presented: vec!["expired.example".to_owned()],
        };
        let lookup_failed = LookupFailed {
            host: "shop.example".into(),
            reason: "no".to_owned(),
            shortage: None,
        };
        let unresolved = "the name shop.example does not resolve to a public address";
        let silent = "your endpoint did not answer within 15 s";
        for (error, words) in [
            (own(lookup_failed), unresolved),
            (own(blocked()), unresolved),
            (Error::Timeout(Timeout::Global), silent),
            (no_connection(ErrorKind::TimedOut), silent),
            (
                certificate(expired),
                "the certificate of shop.example has expired",
            ),
            (
                certificate(Fault::Expired),
                "the certificate of shop.example has expired",
            ),
            (
                certificate(not_yet),
                "the certificate of shop.example is not valid yet",
            ),
            (
                certificate(Fault::NotValidYet),
                "the certificate of shop.example is not valid yet",
            ),
            (
                certificate(other_name),
                "the certificate of shop.example is for another name",
            ),
            (
                certificate(Fault::NotValidForName),
                "the certificate of shop.example is for another name",
            ),
            (
                certificate(Fault::UnknownIssuer),
                "the certificate of shop.example is from no trusted authority, or its chain is incomplete",
            ),
            (
                certificate(Fault::Revoked),
                "the certificate of shop.example is revoked",
            ),
            (
                certificate(Fault::BadEncoding),
                "no secure connection to shop.example was possible",
            ),
            (
                no_handshake(ErrorKind::ConnectionReset.into()),
                "no secure connection to shop.example was possible",
            ),
            (
                no_connection(ErrorKind::ConnectionRefused),
                "your endpoint could not be reached",
            ),
        ] {
            let Outcome::Retry(failure) = outcome(&error, Duration::from_secs(15)) else {
                panic!("{error:?}");
            };
            let said = public_error(Some(failure.code), Some(&failure.error));
            assert_eq!(said, words, "{}", failure.error);
        }
    }

    fn os(errno: Errno) -> io::Error {
        errno.into()
    }

    /// R50
    #[test]
    fn a_shortage_of_this_machine_is_never_the_destinations_failure() {
        for errno in [
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOBUFS,
            Errno::NOMEM,
            Errno::NETDOWN,
        ] {
            for error in [
                Error::Io(os(errno)),
                not_connected(os(errno), "shop.example:443", &[]),
                no_handshake(os(errno)),
            ] {
                assert_eq!(waits(&error).0, ReasonCode::Shortage, "{error:?}");
            }
        }
    }

    /// R50
    #[test]
    fn an_address_that_this_machine_can_reach_has_no_port_left_and_another_has_no_way() {
        let here = SocketAddr::from(([127, 0, 0, 1], 9));
        let no_port = not_connected(os(Errno::ADDRNOTAVAIL), "a:9", &[here]);
        let (code, text) = waits(&no_port);
        assert_eq!(code, ReasonCode::Shortage);
        assert!(
            text.starts_with("this machine has no free port: "),
            "{text}"
        );
        // An address without a way, as ::1 in a container without IPv6: no address at all is the same.
        for errno in [Errno::ADDRNOTAVAIL, Errno::HOSTUNREACH] {
            let no_way = not_connected(os(errno), "a:9", &[]);
            assert!(!is_shortage(&no_way), "{no_way:?}");
        }
        // There is a way to 127.0.0.1: whoever says that it is unreachable is elsewhere.
        let unreachable = not_connected(os(Errno::NETUNREACH), "a:9", &[here]);
        assert!(!is_shortage(&unreachable), "{unreachable:?}");
    }

    trait IntoError {
        fn into_error(self) -> Error;
    }

    impl IntoError for ErrorKind {
        fn into_error(self) -> Error {
            Error::Io(self.into())
        }
    }
}
