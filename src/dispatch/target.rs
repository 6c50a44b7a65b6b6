//! One destination, ready to be sent to: its agents, and what an error of theirs means.

use std::io::Read;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::http::header::{HeaderMap, RETRY_AFTER};
use ::http::{Method, Request, Uri};
use ureq::Agent;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{Connector, DefaultConnector, NextTimeout};

use super::connection::OneWriteConnector;
use super::resolver::{CachingResolver, LookupFailed};
use super::{Failure, Outcome, Response};
use crate::config::{Config, ConfigError, Destination};
use crate::status::ReasonCode;

/// Bytes of an answer that are read, so that its connection can be used again. A longer answer
/// costs its connection.
const READ_BYTES: u64 = 64 * 1024;
/// Bytes of an answer that are kept for the ledger.
const KEEP_BYTES: usize = 2048;
/// Connections that an agent keeps.
const IDLE_CONNECTIONS: usize = 1;

/// A destination, ready to be sent to.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) destination: Destination,
    uri: Uri,
    timeout: Duration,
    agent_config: ureq::config::Config,
    resolver: Shared,
    /// Those that nobody uses just now.
    agents: Mutex<Vec<Agent>>,
}

/// An answer, whatever its status.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) response: Response,
    /// The header as it came.
    pub(super) retry_after: Option<String>,
}

impl Target {
    pub(super) fn new(
        destination: Destination,
        config: &Config,
        resolver: &Shared,
    ) -> Result<Self, ConfigError> {
        let name = &destination.name;
        let timeout = destination.timeout.unwrap_or(config.send_timeout);
        let uri: Uri = destination.url.as_str().parse().map_err(|error| {
            ConfigError::new(format!("destinations.{name}.url"), format!("{error}"))
        })?;
        // What is not said here has a default that loses messages or never ends: redirects that
        // turn POST into GET, proxies from the environment, no timeout.
        let agent_config = Agent::config_builder()
            .timeout_global(Some(timeout))
            .timeout_connect(Some(timeout))
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .proxy(None)
            .no_delay(true)
            .max_response_header_size(64 * 1024)
            .max_idle_connections(IDLE_CONNECTIONS)
            .max_idle_connections_per_host(IDLE_CONNECTIONS)
            .max_idle_age(Duration::from_secs(15))
            .user_agent(concat!("diesel-outbox/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(Self {
            destination,
            uri,
            timeout,
            agent_config,
            resolver: resolver.clone(),
            agents: Mutex::default(),
        })
    }

    /// An agent that nobody else uses: each keeps its own connection, and none waits for another.
    fn agent(&self) -> Agent {
        let idle = self.idle_agents().pop();
        idle.unwrap_or_else(|| {
            Agent::with_parts(
                self.agent_config.clone(),
                DefaultConnector::default().chain(OneWriteConnector),
                self.resolver.clone(),
            )
        })
    }

    fn idle_agents(&self) -> MutexGuard<'_, Vec<Agent>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a body. What comes of an answer is not known here; of a request without one it is.
    pub(super) fn post(&self, headers: HeaderMap, body: &str) -> Result<Answer, Outcome> {
        let mut request = Request::new(body);
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = headers;
        let agent = self.agent();
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
        self.idle_agents().push(agent);
        result.map_err(|error| failed(&error, self.timeout))
    }
}

/// Reads an answer and keeps its beginning. An error here changes nothing: the status has come.
fn beginning(reader: impl Read) -> Option<String> {
    let mut body = Vec::new();
    if let Err(error) = reader.take(READ_BYTES).read_to_end(&mut body) {
        log::debug!(event = "answer_cut", error:% = error; "the answer's body could not be read to its end");
    }
    body.truncate(KEEP_BYTES);
    (!body.is_empty()).then(|| String::from_utf8_lossy(&body).into_owned())
}

/// A request without an answer.
fn failed(error: &ureq::Error, timeout: Duration) -> Outcome {
    use std::io::ErrorKind;
    use ureq::Error;

    let code = match error {
        Error::Http(_) => {
            return Outcome::Dead(Failure::new(ReasonCode::InvalidHeader, error.to_string()));
        }
        Error::BadUri(_) | Error::RequireHttpsOnly(_) => {
            return Outcome::Dead(Failure::new(ReasonCode::InvalidUrl, error.to_string()));
        }
        Error::Timeout(_) => ReasonCode::Timeout,
        Error::HostNotFound => ReasonCode::Dns,
        Error::Other(inner) if inner.is::<LookupFailed>() => ReasonCode::Dns,
        Error::ConnectionFailed => ReasonCode::Connect,
        Error::Tls(_) | Error::Pem(_) | Error::Rustls(_) | Error::TlsRequired => ReasonCode::Tls,
        Error::Protocol(_) | Error::LargeResponseHeader(..) => ReasonCode::Protocol,
        Error::Io(io) => match io.kind() {
            ErrorKind::ConnectionRefused
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::NetworkDown
            | ErrorKind::AddrNotAvailable => ReasonCode::Connect,
            ErrorKind::TimedOut | ErrorKind::WouldBlock => ReasonCode::Timeout,
            ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe
            | ErrorKind::NotConnected
            | ErrorKind::UnexpectedEof => ReasonCode::ConnectionLost,
            // rustls reports what it does not trust as invalid data.
            ErrorKind::InvalidData => ReasonCode::Tls,
            _ => ReasonCode::Failed,
        },
        _ => ReasonCode::Failed,
    };
    let text = match error {
        Error::Other(inner) => inner.to_string(),
        Error::Io(inner) => inner.to_string(),
        Error::Timeout(_) => format!("no answer within {} ms", timeout.as_millis()),
        other => other.to_string(),
    };
    Outcome::Retry(Failure::new(code, text))
}

/// One resolver for the agents of all destinations.
#[derive(Debug, Clone)]
pub(super) struct Shared(pub(super) Arc<CachingResolver>);

impl Resolver for Shared {
    fn resolve(
        &self,
        uri: &Uri,
        config: &ureq::config::Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        self.0.resolve(uri, config, timeout)
    }
}
