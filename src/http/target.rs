//! The target of sends to one destination: its ureq agents.

use std::io::Read;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ::http::header::{AUTHORIZATION, AsHeaderName, HeaderMap, HeaderValue, PROXY_AUTHORIZATION};
use ::http::{Method, Request, Uri};
use ureq::Agent;
use ureq::unversioned::transport::Connector;

use super::connection::{INPUT_BYTES, OUTPUT_BYTES, OneWriteConnector};
use super::credentials::{basic, without_user};
use super::egress::Egress;
use super::form;
use super::lines::{IDLE_AGE, Line, LineWatch, Lines, Reuse, Sharing};
use super::lookups::{Lookup, Lookups, THREADS, THREADS_OF_ENDPOINTS, Times};
use super::proxy::{FirstHop, QUICKLY, Via};
use super::resolver::FirstAddress;
use super::shortage::Shortage;
use super::sockets::{Permit, most_sockets};
use super::tls::{TlsConnector, TlsSettings};
use super::{USER_AGENT, blame};
use crate::config::{Config, ConfigError, Destination};
use crate::dispatch::{Failure, Outcome, Response};
use crate::lock::lock;
use crate::log;
use crate::status::{ONLY_FOR_OPERATORS, ReasonCode};

/// The most bytes to read of a response body. The connection of a longer response cannot be reused.
const READ_BYTES: u64 = 64 * 1024;
/// The most bytes to keep of a response body, for the ledger.
const KEEP_BYTES: usize = 2048;
/// How long to wait for the body after the head. The status has decided, and a receiver must not hold a thread with a
/// body. The connection of a slower response cannot be reused.
const BODY_WAIT: Duration = Duration::from_millis(250);
/// The number of idle connections of an agent.
const IDLE_CONNECTIONS: usize = 1;

/// A destination with everything that a send needs.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) destination: Destination,
    uri: Uri,
    /// The user and the password of the URL.
    authorization: Option<HeaderValue>,
    pub(super) timeout: Duration,
    agent_config: Arc<ureq::config::Config>,
    /// Whether the timeout differs from that of the agents.
    has_own_timeout: bool,
    resolver: FirstAddress,
    via: Option<Arc<Via>>,
    tls: TlsConnector,
    /// Idle lines, with those of other destinations if they are shared.
    lines: Arc<Lines>,
    reuse: Reuse,
    worked: Arc<Mutex<Option<IpAddr>>>,
    /// Since when every send has found only refused addresses.
    refused_since: Mutex<Option<Instant>>,
    reads: BodyRead,
    shown_to: ShownTo,
}

/// How much of a response body is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyRead {
    /// The beginning, for the ledger.
    Beginning,
    /// All of it, for as long as the send may take.
    Whole,
}

/// Who may see what a response holds, besides its status. The owner of an endpoint could read the responses of
/// servers inside the network otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShownTo {
    /// The destination is configured, or its address is public.
    Everybody,
    /// The address may be a private one. The portal shows no response then.
    Operators,
    /// The response came through a proxy: nobody has checked which server has answered.
    Nobody,
}

/// A wait for a connection that does not shorten the time of a send.
const NO_WAIT: Duration = Duration::from_millis(5);

/// The state of destinations that share connections.
#[derive(Debug)]
struct SharedConnections {
    lines: Arc<Sharing>,
    /// `None` until a destination with https.
    tls: Option<TlsConnector>,
    config: Option<Arc<ureq::config::Config>>,
}

/// A response with any status.
#[derive(Debug)]
pub(super) struct HttpAnswer {
    /// The part of the body that is kept.
    pub(super) response: Response,
    pub(super) headers: HeaderMap,
    /// What was read of the body, whoever may see it.
    pub(super) body: String,
    pub(super) shown_to: ShownTo,
}

impl HttpAnswer {
    /// A header, unless it has other characters than ASCII.
    pub(super) fn header(&self, name: impl AsHeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// What the response says, as a part of an error that says so `after` its beginning.
    pub(super) fn quoted(&self, after: &str, text: &str) -> String {
        match self.shown_to {
            ShownTo::Everybody => format!("{after}{text}"),
            ShownTo::Operators | ShownTo::Nobody => format!("{ONLY_FOR_OPERATORS}{text}"),
        }
    }
}

/// The state that all destinations of a dispatcher share.
pub(super) struct Common {
    lookups: Arc<Lookups>,
    tls: TlsSettings,
    /// `Some`: the destinations share agents.
    sharing: Option<SharedConnections>,
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

    /// The state of endpoints. They share agents, because all have the same TLS settings.
    pub(super) fn shared(lookup: Box<Lookup>) -> Self {
        let lookups = Lookups::new(lookup, THREADS_OF_ENDPOINTS, Times::default());
        Self {
            lookups: Arc::new(lookups),
            tls: TlsSettings::default(),
            sharing: Some(SharedConnections {
                lines: Arc::default(),
                tls: None,
                config: None,
            }),
        }
    }
}

/// Checks what no relay can use as the URL of an endpoint, whatever its settings.
pub(super) fn check_for_all(destination: &Destination, config: &Config) -> Result<(), ConfigError> {
    address_of(destination)?;
    // No setting allows link-local and metadata addresses.
    let egress = Egress::Endpoint { public_only: false };
    egress.check_literal(destination, config)
}

/// The URL without user and password, and these as a header.
fn address_of(destination: &Destination) -> Result<(Uri, Option<HeaderValue>), ConfigError> {
    let Destination { name, url, .. } = destination;
    let bad = |reason: String| ConfigError::new(format!("destinations.{name}.url"), reason);
    let authorization = basic(url).map_err(|reason| bad(reason.to_owned()))?;
    let uri: Uri = without_user(url)
        .parse()
        .map_err(|error: ::http::uri::InvalidUri| bad(error.to_string()))?;
    let length = uri.path_and_query().map_or(0, |path| path.as_str().len());
    if length > LONGEST_PATH {
        let reason = format!("the path has {length} bytes: at most {LONGEST_PATH} can be sent");
        return Err(bad(reason));
    }
    Ok((uri, authorization))
}

impl Target {
    /// Checks the settings of the destination. An error names the invalid setting.
    pub(super) fn new(
        destination: Destination,
        config: &Config,
        common: &mut Common,
    ) -> Result<Self, ConfigError> {
        let timeout = destination.policy.timeout.unwrap_or(config.send_timeout);
        let (uri, authorization) = address_of(&destination)?;
        let egress = match common.sharing {
            None => Egress::of(&destination, config),
            Some(_) => Egress::of_endpoints(config),
        };
        egress.check_literal(&destination, config)?;
        let via = Via::of(&destination, config)?;
        let has_proxy = via.is_some();
        let resolver = match &via {
            Some(via) => FirstAddress::of_proxy(&common.lookups, via),
            None => FirstAddress::of(&common.lookups, &destination.url, egress),
        };
        let has_tls = destination.url.scheme() == "https";
        let (agent_config, tls, sharing) = match &mut common.sharing {
            None => {
                let tls = common.tls.of(&destination, config)?;
                let agents = Arc::new(of_agents(timeout));
                (agents, tls, Arc::default())
            }
            Some(sharing) => {
                let agents = (sharing.config)
                    .get_or_insert_with(|| Arc::new(of_agents(config.send_timeout)));
                let tls = match (&sharing.tls, has_tls) {
                    (Some(tls), true) => tls.clone(),
                    (None, true) => {
                        let tls = common.tls.of(&destination, config)?;
                        sharing.tls.insert(tls).clone()
                    }
                    (_, false) => TlsConnector::default(),
                };
                (Arc::clone(agents), tls, Arc::clone(&sharing.lines))
            }
        };
        let uri = match &via {
            Some(via) => via.target(&uri).map_err(|error| {
                ConfigError::new(
                    format!("destinations.{}.url", destination.name),
                    error.to_string(),
                )
            })?,
            None => uri,
        };
        let origin = destination.url.origin().ascii_serialization();
        Ok(Self {
            has_own_timeout: common.sharing.is_some() && timeout != config.send_timeout,
            destination,
            uri,
            authorization,
            timeout,
            agent_config,
            resolver,
            via,
            tls,
            lines: sharing.of(origin),
            reuse: Reuse::default(),
            worked: Arc::default(),
            refused_since: Mutex::default(),
            reads: BodyRead::Beginning,
            shown_to: match (common.sharing.is_some(), has_proxy) {
                (true, true) => ShownTo::Nobody,
                (true, false) if !config.endpoint_public_only => ShownTo::Operators,
                _ => ShownTo::Everybody,
            },
        })
    }

    /// Reads whole bodies of responses, up to [`READ_BYTES`].
    pub(super) fn reading_whole(self) -> Self {
        Self {
            reads: BodyRead::Whole,
            ..self
        }
    }

    #[cfg(test)]
    pub(super) fn lines(&self) -> &Lines {
        &self.lines
    }

    /// The part of the timeout of a send that is left.
    pub(super) fn left(&self, began: Instant) -> Duration {
        self.timeout.saturating_sub(began.elapsed())
    }

    /// The outcome of a send that has no time left.
    pub(super) fn timed_out(&self) -> Outcome {
        let error = ureq::Error::Timeout(ureq::Timeout::Global);
        blame::outcome(&error, self.timeout)
    }

    /// A line without a connection, for exclusive use, so that no send waits for another. `None`: this process may have no
    /// more connections, and none was closed for a part of the timeout.
    fn new_line(&self) -> Option<Line> {
        let permit = Permit::take(self.timeout / 4)?;
        let watch = Arc::new(LineWatch::default());
        let hop = FirstHop {
            via: self.via.clone(),
            watch: Arc::clone(&watch),
            worked: Arc::clone(&self.worked),
        };
        let write = OneWriteConnector {
            watch: Arc::clone(&watch),
            is_forwarded: self.via.as_ref().is_some_and(|via| via.forwards()),
        };
        let agent = Agent::with_parts(
            ureq::config::Config::clone(&self.agent_config),
            hop.chain(self.tls.clone()).chain(write),
            self.resolver.clone(),
        );
        Some(Line {
            agent,
            permit,
            watch,
        })
    }

    /// Adds the credentials of the URL, unless a header replaces them, and those for a proxy that forwards requests.
    fn authorize(&self, headers: &mut HeaderMap) {
        if let Some(authorization) = &self.authorization {
            let entry = headers.entry(AUTHORIZATION);
            entry.or_insert_with(|| authorization.clone());
        }
        if let Some(authorization) = self.via.as_ref().and_then(|via| via.authorization()) {
            headers.insert(PROXY_AUTHORIZATION, authorization.clone());
        }
    }

    /// Sends a request of a send that began then. The caller decides the outcome of a response. Without a response, the
    /// error is the outcome.
    ///
    /// A reused connection may be lost because the receiver closes it at that moment. Then the request is built and sent
    /// once more, on a new connection.
    pub(super) fn post<'m>(
        &self,
        began: Instant,
        build: impl Fn() -> Result<form::Request<'m>, Failure>,
    ) -> Result<HttpAnswer, Outcome> {
        let mut request = build().map_err(Outcome::Dead)?;
        let is_worth_it = self.reuse.is_worth_it();
        let idle = is_worth_it.then(|| self.lines.take(began)).flatten();
        let mut is_reused = idle.is_some();
        let Some(line) = idle.or_else(|| self.new_line()) else {
            let most = most_sockets();
            let shortage = Shortage::new(
                "has no free file descriptor for another receiver",
                format!("all {most} connections are in use (raise the limit of open files)"),
            );
            let error = ureq::Error::Other(Box::new(shortage));
            return Err(blame::outcome(&error, self.timeout));
        };
        let mut passed = began.elapsed();
        let result = loop {
            let result = self.send(&line, request, passed);
            match &result {
                Err(error) if is_reused && !line.watch.has_answered() && blame::is_lost(error) => {}
                _ => break result,
            }
            log::debug!(event = "connection_closed", destination = self.destination.name.as_str(); "the receiver closed a connection when a request was sent: sending it once more");
            self.reuse.lost();
            is_reused = false;
            passed = began.elapsed();
            request = build().map_err(Outcome::Dead)?;
        };
        if is_reused && result.is_ok() {
            self.reuse.worked();
        }
        match self.reuse.is_worth_it() {
            true => self.lines.put(line),
            false => drop(line),
        }
        let result = result.and_then(|answer| self.of_receiver(answer));
        let result = result.map_err(|error| blame::outcome(&error, self.timeout));
        self.follow_refusals(&result);
        result
    }

    /// Sends a request and reads the response. A part of the timeout has already passed.
    fn send(
        &self,
        line: &Line,
        form::Request {
            method,
            headers,
            body,
        }: form::Request<'_>,
        passed: Duration,
    ) -> Result<HttpAnswer, ureq::Error> {
        let mut request = Request::new(&*body);
        let has_body = method != Method::OPTIONS;
        *request.method_mut() = method;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = headers;
        self.authorize(request.headers_mut());
        let reads_whole = self.reads == BodyRead::Whole;
        if self.has_own_timeout || passed > NO_WAIT || reads_whole {
            let timeout = Some(self.timeout.saturating_sub(passed));
            request = (line.agent.configure_request(request))
                .timeout_global(timeout)
                .timeout_connect(timeout)
                .timeout_recv_body(Some(BODY_WAIT).filter(|_| !reads_whole))
                .build();
        }
        let answer = match has_body {
            true => line.agent.run(request)?,
            false => line.agent.run(request.map(drop))?,
        };
        let (parts, body) = answer.into_parts();
        let body = beginning(body.into_reader());
        let kept = match self.shown_to {
            ShownTo::Everybody | ShownTo::Operators => &body[..body.len().min(KEEP_BYTES)],
            ShownTo::Nobody => &[],
        };
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Ok(HttpAnswer {
            headers: parts.headers,
            response: Response {
                status: Some(parts.status.as_u16()),
                body: (!kept.is_empty()).then(|| text(kept)),
            },
            body: match self.reads {
                BodyRead::Beginning => String::new(),
                BodyRead::Whole => text(&body),
            },
            shown_to: self.shown_to,
        })
    }

    /// The response, unless it is that of a proxy that refuses the credentials.
    fn of_receiver(&self, answer: HttpAnswer) -> Result<HttpAnswer, ureq::Error> {
        if let Some(via) = &self.via
            && via.may_be_own(answer.response.status, &answer.headers)
        {
            // In doubt, the response is the receiver's.
            let addresses = self.resolver.addresses(QUICKLY).unwrap_or_default();
            via.check_credentials(&addresses)?;
        }
        Ok(answer)
    }

    fn follow_refusals(&self, result: &Result<HttpAnswer, Outcome>) {
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

/// The most bytes of the path of a URL. The request line must fit into the output buffer, also with the host for a proxy.
const LONGEST_PATH: usize = 32 * 1024;

/// The configuration of all agents. ureq's defaults could lose messages or hang: redirects turn POST into GET, proxies
/// come from the environment, and there is no timeout. `FirstHop` handles the proxy of the settings.
fn of_agents(timeout: Duration) -> ureq::config::Config {
    Agent::config_builder()
        .timeout_global(Some(timeout))
        .timeout_connect(Some(timeout))
        .timeout_recv_body(Some(BODY_WAIT))
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        .proxy(None)
        .input_buffer_size(INPUT_BYTES)
        .output_buffer_size(OUTPUT_BYTES)
        .max_idle_connections(IDLE_CONNECTIONS)
        .max_idle_connections_per_host(IDLE_CONNECTIONS)
        .max_idle_age(IDLE_AGE)
        .user_agent(USER_AGENT)
        .build()
}

/// Reads a response body. An error has no effect, because the status has already arrived.
fn beginning(reader: impl Read) -> Vec<u8> {
    let mut body = Vec::new();
    if let Err(error) = reader.take(READ_BYTES).read_to_end(&mut body) {
        log::debug!(event = "answer_cut", error:% = error; "the response body could not be read completely: keeping the part that arrived");
    }
    body
}
