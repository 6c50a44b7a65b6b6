//! Blocking HTTP: a message to the destination that its topic is routed to.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use ::http::header::{HeaderMap, HeaderValue, RETRY_AFTER};
use ::http::{Method, Request, Uri};
use ureq::Agent;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{Connector, DefaultConnector, NextTimeout};

use super::connection::OneWriteConnector;
use super::resolver::{CachingResolver, LookupFailed};
use super::routes::Routes;
use super::{Dispatcher, Failure, Outcome, Response, headers, response};
use crate::config::{Config, ConfigError};
use crate::message::Message;
use crate::status::ReasonCode;

/// Bytes of an answer that are read, so that its connection can be used again. A longer answer
/// costs its connection.
const READ_BYTES: u64 = 64 * 1024;
/// Bytes of an answer that are kept for the ledger.
const KEEP_BYTES: usize = 2048;
/// The name under which `OUTBOX_URL` stands in logs.
const DEFAULT_DESTINATION: &str = "default";

/// Posts messages to destinations, by topic or by name.
///
/// Made by the relay from its settings; of use by itself where an application wants to add
/// something around it.
#[derive(Debug)]
pub struct HttpDispatcher {
    routes: Routes<Arc<Target>>,
    by_name: HashMap<String, Arc<Target>>,
    source: HeaderValue,
    /// Topics that were logged as having no route.
    unrouted: Mutex<HashSet<String>>,
}

/// A destination, ready to be sent to.
#[derive(Debug)]
struct Target {
    name: String,
    uri: Uri,
    timeout: Duration,
    /// One for each sender thread: each keeps its own connection, and none waits for a lock.
    agents: Vec<Agent>,
}

/// Numbers the threads that send.
static NEXT_SLOT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static SLOT: usize = NEXT_SLOT.fetch_add(1, Ordering::Relaxed);
}

/// Connections that one thread keeps. More than one only where several threads share a slot.
const IDLE_CONNECTIONS: usize = 4;
/// Topics without a route that are remembered as logged.
const MOST_UNROUTED: usize = 1000;

impl HttpDispatcher {
    /// A dispatcher for the destinations, the routes and the default URL of `config`.
    ///
    /// # Errors
    /// A [`ConfigError`] when a destination cannot be used.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        let resolver = CachingResolver::new().map_err(|error| {
            ConfigError::new("destinations", format!("no thread for names: {error}"))
        })?;
        let resolver = Shared(Arc::new(resolver));
        let mut by_name = HashMap::new();
        for destination in &config.destinations {
            let timeout = destination.timeout.unwrap_or(config.send_timeout);
            let target = Target::new(
                &destination.name,
                &destination.url,
                timeout,
                config,
                &resolver,
            )?;
            by_name.insert(destination.name.clone(), Arc::new(target));
        }
        let mut patterns = Vec::new();
        for route in &config.routes {
            let target = by_name.get(&route.to).ok_or_else(|| {
                ConfigError::new("routes", format!("no destination is called {:?}", route.to))
            })?;
            patterns.push((route.topic.clone(), Arc::clone(target)));
        }
        if let Some(url) = &config.url
            && !patterns.iter().any(|(pattern, _)| pattern == "*")
        {
            let target = Target::new(
                DEFAULT_DESTINATION,
                url,
                config.send_timeout,
                config,
                &resolver,
            )?;
            patterns.push(("*".to_owned(), Arc::new(target)));
        }
        let source = HeaderValue::try_from(format!("diesel-outbox/{}", config.table))
            .map_err(|error| ConfigError::new("OUTBOX_TABLE", error.to_string()))?;
        Ok(Self {
            routes: Routes::new(patterns),
            by_name,
            source,
            unrouted: Mutex::default(),
        })
    }

    /// The name of the destination that a topic is routed to.
    pub fn destination_of(&self, topic: &str) -> Option<&str> {
        self.routes.find(topic).map(|target| target.name.as_str())
    }

    fn target(&self, message: &Message) -> Result<&Target, Failure> {
        if message.destination.is_empty() {
            return self
                .routes
                .find(&message.topic)
                .map(AsRef::as_ref)
                .ok_or_else(|| {
                    self.log_unrouted(&message.topic);
                    let error = format!(
                        "no route and no default URL serves the topic {:?}",
                        message.topic
                    );
                    Failure::new(ReasonCode::NoRoute, error)
                });
        }
        self.by_name
            .get(&message.destination)
            .map(AsRef::as_ref)
            .ok_or_else(|| {
                let error = format!("no destination is called {:?}", message.destination);
                Failure::new(ReasonCode::UnknownDestination, error)
            })
    }

    /// Once for each topic: every message of it has its own line as a retry.
    fn log_unrouted(&self, topic: &str) {
        let mut unrouted = self.unrouted.lock().unwrap_or_else(PoisonError::into_inner);
        if unrouted.len() < MOST_UNROUTED && unrouted.insert(topic.to_owned()) {
            log::error!(event = "no_route", topic = topic; "no route and no default URL serves this topic: its messages wait and will die");
        }
    }
}

impl Target {
    fn new(
        name: &str,
        url: &url::Url,
        timeout: Duration,
        config: &Config,
        resolver: &Shared,
    ) -> Result<Self, ConfigError> {
        let uri: Uri = url.as_str().parse().map_err(|error| {
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
            name: name.to_owned(),
            uri,
            timeout,
            agents: (0..config.concurrency)
                .map(|_| {
                    Agent::with_parts(
                        agent_config.clone(),
                        DefaultConnector::default().chain(OneWriteConnector),
                        resolver.clone(),
                    )
                })
                .collect(),
        })
    }

    fn post(&self, headers: HeaderMap, body: &str) -> Outcome {
        let mut request = Request::new(body);
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = headers;
        let slot = SLOT.with(|slot| *slot);
        match self.agents[slot % self.agents.len()].run(request) {
            Ok(answer) => {
                let retry_after = answer.headers().get(RETRY_AFTER).cloned();
                let retry_after = retry_after.as_ref().and_then(|value| value.to_str().ok());
                let status = answer.status().as_u16();
                let body = beginning(answer.into_body().into_reader());
                response::outcome(
                    Response::new(Some(status), body),
                    retry_after,
                    SystemTime::now(),
                )
            }
            Err(error) => failed(&error, self.timeout),
        }
    }
}

impl Dispatcher for HttpDispatcher {
    fn dispatch(&self, message: &Message) -> Outcome {
        let target = match self.target(message) {
            Ok(target) => target,
            Err(failure) => return Outcome::Retry(failure),
        };
        match headers::of(message, &self.source, SystemTime::now()) {
            Ok(headers) => target.post(headers, &message.payload),
            Err(failure) => Outcome::Dead(failure),
        }
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
struct Shared(Arc<CachingResolver>);

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
