//! The target of sends to one destination: its ureq agents, and the outcomes of their errors.

use std::collections::HashMap;
use std::error::Error as StdError;
use std::io::{ErrorKind, Read};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ::http::header::{HeaderMap, RETRY_AFTER};
use ::http::{Method, Request, Uri};
use ureq::Agent;
use ureq::tls::TlsConfig;
use ureq::unversioned::transport::Connector;

use super::USER_AGENT;
use super::connection::OneWriteConnector;
use super::egress::{Blocked, Egress};
use super::lookups::{Lookup, LookupFailed, Lookups, THREADS, THREADS_OF_REGISTERED, Times};
use super::proxy::{FirstHop, NotConnected, ProxyFailed, Via};
use super::resolver::FirstAddress;
use super::tls::{HandshakeFailed, SharedTls, TlsSettings};
use crate::config::{Config, ConfigError, Destination};
use crate::dispatch::{Failure, Outcome, Response};
use crate::lock::lock;
use crate::status::ReasonCode;

/// The most bytes to read of a response body. The connection of a longer response cannot be reused.
const READ_BYTES: u64 = 64 * 1024;
/// The most bytes to keep of a response body, for the ledger.
const KEEP_BYTES: usize = 2048;
/// The number of idle connections of an agent, and their maximum age.
const IDLE_CONNECTIONS: usize = 1;
const IDLE_AGE: Duration = Duration::from_secs(15);
/// The most idle agents of destinations that share agents.
const MOST_SHARED: usize = 512;

/// A destination with everything that a send needs.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) destination: Destination,
    uri: Uri,
    timeout: Duration,
    agent_config: Arc<ureq::config::Config>,
    /// Whether the timeout differs from that of the agents.
    has_own_timeout: bool,
    resolver: FirstAddress,
    via: Option<Arc<Via>>,
    tls: SharedTls,
    idle: Idle,
    /// Since when every send has found only refused addresses.
    refused_since: Mutex<Option<Instant>>,
}

/// Idle agents.
#[derive(Debug)]
enum Idle {
    Own(Mutex<Vec<Agent>>),
    /// Shared by all destinations of an origin.
    Shared(Arc<Agents>, Arc<str>),
}

/// The idle agents of destinations that share agents.
#[derive(Debug, Default)]
struct Agents(Mutex<ByOrigin>);

/// Idle agents by origin, each with the time since which it has been idle.
type ByOrigin = HashMap<Arc<str>, Vec<(Instant, Agent)>>;

impl Agents {
    fn take(&self, origin: &str) -> Option<Agent> {
        let mut all = lock(&self.0);
        let of_origin = all.get_mut(origin)?;
        let (_, agent) = of_origin.pop()?;
        if of_origin.is_empty() {
            all.remove(origin);
        }
        Some(agent)
    }

    /// Keeps an agent for the next send. If there are too many, drops agents whose connections are too old to reuse.
    fn put(&self, origin: &Arc<str>, agent: Agent) {
        let mut all = lock(&self.0);
        let count = |all: &HashMap<_, Vec<_>>| all.values().map(Vec::len).sum::<usize>();
        if all.len() >= MOST_SHARED / 2 && count(&all) >= MOST_SHARED {
            all.retain(|_, agents| {
                agents.retain(|(since, _)| since.elapsed() < IDLE_AGE);
                !agents.is_empty()
            });
            if count(&all) >= MOST_SHARED {
                return;
            }
        }
        let of_origin = all.entry(Arc::clone(origin)).or_default();
        of_origin.push((Instant::now(), agent));
    }
}

/// The state of destinations that share agents.
#[derive(Debug, Default)]
struct Sharing {
    agents: Arc<Agents>,
    tls: SharedTls,
    /// The configuration without TLS, and with TLS.
    configs: [Option<Arc<ureq::config::Config>>; 2],
}

/// A response with any status.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) response: Response,
    /// The header as received.
    pub(super) retry_after: Option<String>,
}

/// The state that all destinations of a dispatcher share.
pub(super) struct Common {
    lookups: Arc<Lookups>,
    tls: TlsSettings,
    /// `Some`: the destinations share agents.
    sharing: Option<Sharing>,
}

impl Common {
    /// The state of configured destinations, which look up names with `lookup`.
    pub(super) fn new(lookup: Box<Lookup>) -> Self {
        Self {
            lookups: Arc::new(Lookups::new(lookup, THREADS, Times::default())),
            tls: TlsSettings::default(),
            sharing: None,
        }
    }

    /// The state of registered destinations. They share agents, because all have the same TLS settings.
    pub(super) fn shared(lookup: Box<Lookup>) -> Self {
        let lookups = Lookups::new(lookup, THREADS_OF_REGISTERED, Times::default());
        Self {
            lookups: Arc::new(lookups),
            tls: TlsSettings::default(),
            sharing: Some(Sharing::default()),
        }
    }
}

/// Checks what no relay can use as the URL of a registered destination, whatever its settings.
pub(super) fn check_for_all(destination: &Destination, config: &Config) -> Result<(), ConfigError> {
    uri_of(destination)?;
    // No setting allows link-local and metadata addresses.
    let egress = Egress::Registered { public_only: false };
    egress.check_literal(destination, config)
}

fn uri_of(destination: &Destination) -> Result<Uri, ConfigError> {
    let Destination { name, url, .. } = destination;
    url.as_str()
        .parse()
        .map_err(|error| ConfigError::new(format!("destinations.{name}.url"), format!("{error}")))
}

impl Target {
    /// Checks the settings of the destination. An error names the invalid setting.
    pub(super) fn new(
        destination: Destination,
        config: &Config,
        common: &mut Common,
    ) -> Result<Self, ConfigError> {
        let timeout = destination.timeout.unwrap_or(config.send_timeout);
        let uri = uri_of(&destination)?;
        let egress = match common.sharing {
            None => Egress::of(&destination, config),
            Some(_) => Egress::of_registered(config),
        };
        egress.check_literal(&destination, config)?;
        let via = Via::of(&destination, config)?;
        let resolver = match &via {
            Some(via) => FirstAddress::of_proxy(&common.lookups, via),
            None => FirstAddress::of(&common.lookups, &destination.url, egress),
        };
        let (agent_config, tls, idle) = match &mut common.sharing {
            None => {
                let tls = common.tls.of(&destination, config)?;
                let idle = Idle::Own(Mutex::default());
                let agents = Arc::new(of_agents(timeout, tls));
                (agents, SharedTls::default(), idle)
            }
            Some(sharing) => {
                let place = &mut sharing.configs[usize::from(destination.url.scheme() == "https")];
                let agents = match place {
                    Some(agents) => Arc::clone(agents),
                    None => {
                        let tls = common.tls.of(&destination, config)?;
                        Arc::clone(place.insert(Arc::new(of_agents(config.send_timeout, tls))))
                    }
                };
                let origin = destination.url.origin().ascii_serialization();
                let idle = Idle::Shared(Arc::clone(&sharing.agents), origin.into());
                (agents, sharing.tls.clone(), idle)
            }
        };
        Ok(Self {
            has_own_timeout: common.sharing.is_some() && timeout != config.send_timeout,
            destination,
            uri,
            timeout,
            agent_config,
            resolver,
            via,
            tls,
            idle,
            refused_since: Mutex::default(),
        })
    }

    /// An agent for exclusive use. Each agent has its own connection, so no send waits for another.
    fn agent(&self) -> Agent {
        let idle = match &self.idle {
            Idle::Own(agents) => lock(agents).pop(),
            Idle::Shared(agents, origin) => agents.take(origin),
        };
        idle.unwrap_or_else(|| {
            Agent::with_parts(
                ureq::config::Config::clone(&self.agent_config),
                FirstHop::new(self.via.clone())
                    .chain(self.tls.clone())
                    .chain(OneWriteConnector),
                self.resolver.clone(),
            )
        })
    }

    fn give_back(&self, agent: Agent) {
        match &self.idle {
            Idle::Own(agents) => lock(agents).push(agent),
            Idle::Shared(agents, origin) => agents.put(origin, agent),
        }
    }

    /// Posts a body. The caller decides the outcome of a response. Without a response, the error is the outcome.
    pub(super) fn post(&self, headers: HeaderMap, body: &str) -> Result<Answer, Outcome> {
        let mut request = Request::new(body);
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = headers;
        let agent = self.agent();
        if self.has_own_timeout {
            request = (agent.configure_request(request))
                .timeout_global(Some(self.timeout))
                .timeout_connect(Some(self.timeout))
                .build();
        }
        let result = agent.run(request).map(|answer| {
            let retry_after = answer.headers().get(RETRY_AFTER);
            let retry_after = retry_after.and_then(|value| value.to_str().ok());
            Answer {
                retry_after: retry_after.map(str::to_owned),
                response: Response {
                    status: Some(answer.status().as_u16()),
                    body: beginning(answer.into_body().into_reader()),
                },
            }
        });
        self.give_back(agent);
        let result = result.map_err(|error| failed(&error, self.timeout));
        self.follow_refusals(&result);
        result
    }

    fn follow_refusals(&self, result: &Result<Answer, Outcome>) {
        let mut since = lock(&self.refused_since);
        match result {
            Err(outcome) if is_refused(outcome) => {
                since.get_or_insert_with(Instant::now);
            }
            Ok(_) | Err(_) => *since = None,
        }
    }

    /// Gives up a message whose send has found only refused addresses, if this is certain to be no moment's mistake of
    /// the name server: the message has been tried several times, and no send of the destination has found another
    /// address for a while. `attempts` is the number of earlier attempts.
    pub(super) fn or_give_up(&self, outcome: Outcome, attempts: u32) -> Outcome {
        let is_enough = attempts.saturating_add(1) >= REFUSED_TRIES;
        match outcome {
            Outcome::Retry(failure) if is_enough && failure.code == ReasonCode::BlockedAddress => {
                let since = *lock(&self.refused_since);
                match since.is_some_and(|since| since.elapsed() >= REFUSED_FOR) {
                    true => Outcome::Dead(failure),
                    false => Outcome::Retry(failure),
                }
            }
            outcome => outcome,
        }
    }
}

/// How often a message is tried, and how long a name must have had only refused addresses, before the message is given
/// up. Name servers answer with `0.0.0.0` or a private address for a while when they fail over or block a name.
const REFUSED_TRIES: u32 = 6;
const REFUSED_FOR: Duration = Duration::from_secs(60);

/// Whether the send has found only refused addresses, and has connected to none.
fn is_refused(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Retry(failure) if failure.code == ReasonCode::BlockedAddress)
}

/// The most bytes of a response head, which must fit into the buffer of a connection.
const HEADER_BYTES: usize = 64 * 1024;
/// The size of the output buffer of each connection. It is small because there may be hundreds of connections.
const OUTPUT_BYTES: usize = 32 * 1024;

/// The configuration of all agents. ureq's defaults could lose messages or hang: redirects turn POST into GET, proxies
/// come from the environment, and there is no timeout. `FirstHop` handles the proxy of the settings.
fn of_agents(timeout: Duration, tls: TlsConfig) -> ureq::config::Config {
    Agent::config_builder()
        .timeout_global(Some(timeout))
        .timeout_connect(Some(timeout))
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        .proxy(None)
        .tls_config(tls)
        .no_delay(true)
        .max_response_header_size(HEADER_BYTES)
        .input_buffer_size(HEADER_BYTES + 1024)
        .output_buffer_size(OUTPUT_BYTES)
        .max_idle_connections(IDLE_CONNECTIONS)
        .max_idle_connections_per_host(IDLE_CONNECTIONS)
        .max_idle_age(IDLE_AGE)
        .user_agent(USER_AGENT)
        .build()
}

/// Reads a response body and keeps its beginning. An error has no effect, because the status has already arrived.
fn beginning(reader: impl Read) -> Option<String> {
    let mut body = Vec::new();
    if let Err(error) = reader.take(READ_BYTES).read_to_end(&mut body) {
        log::debug!(event = "answer_cut", error:% = error; "the response body could not be read completely: keeping the part that arrived");
    }
    body.truncate(KEEP_BYTES);
    (!body.is_empty()).then(|| String::from_utf8_lossy(&body).into_owned())
}

/// The outcome of a request without a response.
fn failed(error: &ureq::Error, timeout: Duration) -> Outcome {
    use ureq::Error;

    let code = match error {
        Error::Other(inner) => return unsent(inner.as_ref(), timeout),
        Error::Http(_) => {
            return Outcome::Dead(Failure::new(ReasonCode::InvalidHeader, error.to_string()));
        }
        Error::BadUri(_) | Error::RequireHttpsOnly(_) => {
            return Outcome::Dead(Failure::new(ReasonCode::InvalidUrl, error.to_string()));
        }
        Error::Timeout(_) => ReasonCode::Timeout,
        Error::HostNotFound => ReasonCode::Dns,
        Error::ConnectionFailed => ReasonCode::Connect,
        Error::Tls(_) | Error::Pem(_) | Error::Rustls(_) | Error::TlsRequired => ReasonCode::Tls,
        Error::Protocol(_) | Error::LargeResponseHeader(..) => ReasonCode::Protocol,
        // The connection was established and broke later, so the receiver may have the message.
        Error::Io(io) => match io.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => ReasonCode::Timeout,
            ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::ConnectionRefused
            | ErrorKind::BrokenPipe
            | ErrorKind::NotConnected
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::NetworkDown
            | ErrorKind::WriteZero
            | ErrorKind::UnexpectedEof => ReasonCode::ConnectionLost,
            // rustls reports untrusted certificates as invalid data.
            ErrorKind::InvalidData => ReasonCode::Tls,
            _ => ReasonCode::Failed,
        },
        _ => ReasonCode::Failed,
    };
    let text = match error {
        Error::Io(inner) => inner.to_string(),
        Error::Timeout(_) => no_answer_within(timeout),
        other => other.to_string(),
    };
    Outcome::Retry(Failure::new(code, text))
}

/// The outcome of a request that failed before it was sent, with an error of this crate.
fn unsent(error: &(dyn StdError + Send + Sync + 'static), timeout: Duration) -> Outcome {
    let code = match error.downcast_ref() {
        Some(ProxyFailed::Itself { .. }) => {
            return Outcome::Wait(Failure::new(ReasonCode::Proxy, error.to_string()));
        }
        Some(ProxyFailed::Destination { .. }) => ReasonCode::Connect,
        Some(ProxyFailed::Silent { .. }) => ReasonCode::Timeout,
        // The name may lead elsewhere soon: see `Target::or_give_up`.
        None if error.is::<Blocked>() => ReasonCode::BlockedAddress,
        None if error.is::<LookupFailed>() => ReasonCode::Dns,
        None if error.is::<HandshakeFailed>() => ReasonCode::Tls,
        None => match error.downcast_ref::<NotConnected>() {
            Some(NotConnected(io)) if io.kind() == ErrorKind::TimedOut => {
                let text = no_answer_within(timeout);
                return Outcome::Retry(Failure::new(ReasonCode::Timeout, text));
            }
            Some(_) => ReasonCode::Connect,
            None => ReasonCode::Failed,
        },
    };
    Outcome::Retry(Failure::new(code, error.to_string()))
}

fn no_answer_within(timeout: Duration) -> String {
    format!("no response within {} ms", timeout.as_millis())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::SocketAddr;

    use ureq::{Error, Timeout};

    use super::*;

    fn own(error: impl StdError + Send + Sync + 'static) -> Error {
        Error::Other(Box::new(error))
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
        };
        let retried = [
            (own(lookup_failed), Code::Dns),
            (own(blocked()), Code::BlockedAddress),
            (Error::HostNotFound, Code::Dns),
            (
                own(NotConnected(ErrorKind::ConnectionRefused.into())),
                Code::Connect,
            ),
            (
                own(NotConnected(ErrorKind::HostUnreachable.into())),
                Code::Connect,
            ),
            (
                own(NotConnected(ErrorKind::NetworkUnreachable.into())),
                Code::Connect,
            ),
            (
                own(NotConnected(ErrorKind::PermissionDenied.into())),
                Code::Connect,
            ),
            (own(NotConnected(ErrorKind::TimedOut.into())), Code::Timeout),
            (Error::ConnectionFailed, Code::Connect),
            (
                own(HandshakeFailed(ErrorKind::InvalidData.into())),
                Code::Tls,
            ),
            (
                own(HandshakeFailed(ErrorKind::UnexpectedEof.into())),
                Code::Tls,
            ),
            (
                own(HandshakeFailed(ErrorKind::ConnectionReset.into())),
                Code::Tls,
            ),
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
            (ErrorKind::OutOfMemory.into_error(), Code::Failed),
        ];
        for (error, code) in retried {
            match failed(&error, Duration::from_secs(1)) {
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
            match failed(&error, Duration::from_secs(1)) {
                Outcome::Dead(failure) => assert_eq!(failure.code, code, "{error:?}"),
                other => panic!("{error:?} is {other:?}"),
            }
        }

        let error = own(ProxyFailed::Itself {
            proxy: proxy(),
            reason: "is away".to_owned(),
        });
        match failed(&error, Duration::from_secs(1)) {
            Outcome::Wait(failure) => {
                assert_eq!(failure.code, Code::Proxy);
                assert_eq!(failure.error, "proxy proxy:3128 is away");
            }
            other => panic!("{error:?} is {other:?}"),
        }
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
