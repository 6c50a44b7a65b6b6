//! Sends messages over blocking HTTP to the destinations that their topics are routed to.

mod address;
mod assertion;
mod blame;
mod cloudevents;
mod connection;
mod credentials;
mod egress;
mod form;
mod head;
mod header_signature;
mod headers;
mod lines;
mod lookups;
mod pinned;
mod proxy;
mod reading;
mod resolver;
mod response;
mod retry_after;
mod shortage;
pub(crate) mod signature;
mod socket;
mod sockets;
mod stored;
mod target;
mod tls;
mod tokens;
mod trace;
mod verification;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use ::http::header::AUTHORIZATION;

pub(crate) use self::cloudevents::EventEnvelope;
use self::form::{Checked, Form, Request};
pub(crate) use self::lines::close_idle;
use self::lookups::{Lookup, system_lookup};
use self::proxy::Via;
#[cfg(feature = "feeds")]
pub(crate) use self::reading::{PageAnswer, PageClient, PageLost};
use self::target::{Common, HttpAnswer, Target};
use self::tokens::{Token, Tokens};
pub(crate) use self::verification::EndpointVerifier;
use crate::config::{AuthKind, Config, ConfigError, Destination, Mode, OAuth2};
use crate::dispatch::{CutKeys, Dispatcher, EndpointRefusal, Failure, Outcome, in_order};
use crate::engine::serves::routes::{Routes, Way};
use crate::lock::lock;
use crate::message::Message;
use crate::status::ReasonCode;

/// The `User-Agent` of all requests, including requests to a proxy.
const USER_AGENT: &str = concat!("diesel-outbox/", env!("CARGO_PKG_VERSION"));

/// Posts messages to destinations, by topic or by name.
///
/// The [`Mode`] of a destination determines the form of requests: the payload as the body with everything
/// else in headers, or CloudEvents documents that hold both. In every mode a request has the headers of
/// Standard Webhooks, with signatures if there are secrets. The payload is sent as stored, byte for byte.
/// A request for several messages (batched mode) has its own id. The ids of the messages are in their
/// documents; their stored HTTP headers, keys and attempts are not sent.
///
/// The relay creates the dispatcher from its settings. An application can also create one, to wrap it in
/// its own dispatcher.
#[derive(Debug)]
pub struct HttpDispatcher {
    routes: Routes,
    places: Vec<HttpDestination>,
}

/// A destination, and the form of its requests.
#[derive(Debug)]
struct HttpDestination {
    target: Target,
    form: Form,
    /// The tokens that the receiver asks for.
    tokens: Option<Tokens>,
}

impl HttpDispatcher {
    /// A dispatcher for the destinations, routes and default URL of `config`.
    ///
    /// The dispatcher resolves names with the system's resolver, and never connects to an address that the
    /// destination must not have. Behind a proxy, the proxy resolves names, so the dispatcher checks only an
    /// IP address in the URL.
    ///
    /// ```no_run
    /// use diesel_outbox::{HttpDispatcher, config};
    ///
    /// // Finds invalid destinations before a relay starts.
    /// let dispatcher = HttpDispatcher::new(&config::from_env()?)?;
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] when a destination is invalid: a file of its TLS settings is unusable, or its URL
    /// holds an address that the destination must not have.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        Self::looking_up(config, Box::new(system_lookup))
    }

    /// As [`new`](Self::new), with your own lookup instead of the system's: another DNS, or a service
    /// registry. The lookup takes a host and a port and returns the addresses to connect to. The dispatcher
    /// checks these addresses like any others: see [`Destination::internal`](crate::Destination::internal).
    ///
    /// Up to four threads call the lookup, never for the same name at once. Results are kept for 10 s, errors for
    /// 1 s. A sender waits for the lookup at most until its send times out. A lookup that never returns
    /// blocks one of the two threads; if both are blocked, no name can be looked up.
    ///
    /// ```
    /// use diesel_outbox::HttpDispatcher;
    /// use diesel_outbox::config::Config;
    ///
    /// let mut config = Config::default();
    /// config.set("OUTBOX_URL", "http://receiver.test/events")?;
    /// let dispatcher = HttpDispatcher::with_lookup(&config, |host, port| match host {
    ///     "receiver.test" => Ok(vec![([127, 0, 0, 1], port).into()]),
    ///     _ => Err(std::io::ErrorKind::NotFound.into()),
    /// })?;
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_lookup(
        config: &Config,
        lookup: impl Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Result<Self, ConfigError> {
        Self::looking_up(config, Box::new(lookup))
    }

    fn looking_up(config: &Config, lookup: Box<Lookup>) -> Result<Self, ConfigError> {
        let mut common = Common::new(lookup);
        tls::check_endpoints(config)?;
        Via::check_endpoints(config)?;
        let source = source(config);
        let place = |destination| HttpDestination::new(destination, config, &source, &mut common);
        let destinations = config.all_destinations().into_iter();
        Ok(Self {
            routes: Routes::new(config),
            places: destinations.map(place).collect::<Result<_, _>>()?,
        })
    }

    /// One dispatcher for each destination, in order. The caller has already routed the message.
    pub(crate) fn of_each(config: &Config) -> Result<Vec<Arc<dyn Dispatcher>>, ConfigError> {
        let each = Self::new(config)?.places.into_iter();
        Ok(each.map(|place| Arc::new(place) as _).collect())
    }

    /// The names of the destinations of messages with this topic and `destination`: the named destination or,
    /// if `destination` is empty, the destinations that the topic is routed to. Handlers in the process are
    /// not included.
    pub(crate) fn destinations_of(&self, topic: &str, destination: &str) -> Vec<&str> {
        let name = |number: &usize| {
            let place = self.places.get(*number)?;
            Some(place.target.destination.name.as_str())
        };
        match self.routes.find(topic, destination) {
            Way::To(number) => name(&number).into_iter().collect(),
            Way::Split(numbers) => numbers.iter().filter_map(name).collect(),
            Way::NoRoute | Way::UnknownDestination | Way::NotTaken => Vec::new(),
        }
    }

    /// The index of the message's destination.
    fn number_of(&self, message: &Message) -> Result<usize, Failure> {
        match self.routes.find(&message.topic, &message.destination) {
            Way::To(number) if number < self.places.len() => Ok(number),
            Way::NoRoute | Way::NotTaken => {
                let error = format!(
                    "topic {:?} has no route, no handler and no default URL",
                    message.topic
                );
                Err(Failure::new(ReasonCode::NoRoute, error))
            }
            // The relay calls handlers in the process; this dispatcher has only URLs.
            Way::To(_) | Way::UnknownDestination => {
                let error = format!(
                    "no destination with a URL is named {:?}",
                    message.destination
                );
                Err(Failure::new(ReasonCode::UnknownDestination, error))
            }
            // The relay fans such messages out before it sends them.
            Way::Split(_) => Err(Failure::new(
                ReasonCode::NoRoute,
                "the topic is routed to several destinations: only a relay can fan the message out",
            )),
        }
    }
}

/// Creates dispatchers for endpoints, which come and go. All dispatchers share connections.
pub(crate) struct EndpointClients {
    common: Mutex<Common>,
    source: String,
    config: Config,
    can_send: bool,
    /// Why it sends to none.
    refuses: Option<&'static str>,
}

impl EndpointClients {
    /// `config` must have the settings for endpoints.
    pub(crate) fn new(config: Config) -> Self {
        Self {
            common: Mutex::new(Common::shared(Box::new(system_lookup))),
            source: source(&config),
            config,
            can_send: true,
            refuses: None,
        }
    }

    /// For a relay that does not send to endpoints: another one does.
    pub(crate) fn none(config: Config) -> Self {
        let why = match config.endpoint_threads {
            0 => "OUTBOX_ENDPOINT_THREADS is 0",
            _ => "this relay sends by the application's own dispatcher",
        };
        Self {
            can_send: false,
            refuses: Some(why),
            ..Self::new(config)
        }
    }

    /// For a relay that serves nothing but feeds.
    pub(crate) fn for_feeds(config: Config) -> Self {
        Self {
            refuses: Some("OUTBOX_ENDPOINT_THREADS is 0: this relay serves feeds only"),
            ..Self::new(config)
        }
    }

    /// Whether endpoints are this relay's concern.
    pub(crate) fn can_send(&self) -> bool {
        self.can_send
    }

    /// A dispatcher that posts every message to this destination.
    pub(crate) fn dispatcher(
        &self,
        destination: Destination,
    ) -> Result<Arc<dyn Dispatcher>, EndpointRefusal> {
        Ok(Arc::new(self.place(destination)?))
    }

    fn place(&self, mut destination: Destination) -> Result<HttpDestination, EndpointRefusal> {
        destination.tls = tls::of_endpoints(&self.config);
        if let Some(why) = self.refuses {
            return Err(EndpointRefusal::NotHere(why.to_owned()));
        }
        // All checks but these also depend on this relay's settings.
        let for_all = |one| target::check_for_all(one, &self.config);
        let not_here = |error: ConfigError| EndpointRefusal::NotHere(error.to_string());
        for_all(&destination).map_err(EndpointRefusal::Invalid)?;
        self.check_settings(&destination).map_err(not_here)?;
        if let Some((server, _)) = token_server(&destination) {
            let bad = for_all(&server).map_err(of_token_url);
            bad.map_err(EndpointRefusal::Invalid)?;
            let bad = self.check_settings(&server).map_err(of_token_url);
            bad.map_err(not_here)?;
        }
        let common = &mut lock(&self.common);
        HttpDestination::new(destination, &self.config, &self.source, common).map_err(not_here)
    }

    /// Whether the settings allow the scheme and the port of the URL.
    fn check_settings(&self, destination: &Destination) -> Result<(), ConfigError> {
        let (config, url) = (&self.config, &destination.url);
        let refused = |why| {
            let key = format!("destinations.{}.url", destination.name);
            Err(ConfigError::new(key, why))
        };
        if config.https_only && url.scheme() != "https" {
            return refused("must be https: OUTBOX_ENDPOINT_HTTPS_ONLY is set");
        }
        let ports = &config.endpoint_ports;
        let is_allowed = |port: u16| ports.is_empty() || ports.contains(&port);
        if !url.port_or_known_default().is_some_and(is_allowed) {
            return refused("the port is not in OUTBOX_ENDPOINT_PORTS");
        }
        Ok(())
    }
}

/// The token server as a destination, which is reached as the destination itself.
fn token_server(of: &Destination) -> Option<(Destination, OAuth2)> {
    let AuthKind::OAuth2(oauth2) = &of.auth.as_ref()?.kind else {
        return None;
    };
    let server = Destination {
        url: oauth2.token_url.clone(),
        ..of.clone()
    };
    Some((server, OAuth2::clone(oauth2)))
}

/// The error of the URL of a token server.
fn of_token_url(error: ConfigError) -> ConfigError {
    match error.key().strip_suffix(".url") {
        Some(key) => ConfigError::new(format!("{key}.auth.token_url"), error.reason()),
        None => error,
    }
}

fn source(config: &Config) -> String {
    let own = || format!("diesel-outbox/{}", config.table);
    config.source.clone().unwrap_or_else(own)
}

impl Dispatcher for HttpDispatcher {
    fn dispatch(&self, message: &Message) -> Outcome {
        match self.number_of(message) {
            Ok(number) => self.places[number].send(message),
            Err(failure) => Outcome::Retry(failure),
        }
    }

    fn dispatch_batch(&self, messages: &[Message]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(messages.len());
        // Usually all messages have the same destination. Otherwise each destination gets a request.
        let mut batches: BTreeMap<usize, Vec<(usize, &Message)>> = BTreeMap::new();
        for (index, message) in messages.iter().enumerate() {
            match self.number_of(message) {
                Ok(number) => batches.entry(number).or_default().push((index, message)),
                Err(failure) => outcomes.push((index, Outcome::Retry(failure))),
            }
        }
        for (number, batch) in batches {
            outcomes.extend(self.places[number].send_all(batch));
        }
        outcomes.sort_by_key(|(index, _)| *index);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }
}

/// Sends every message to one destination: the relay has already routed the message.
impl Dispatcher for HttpDestination {
    fn dispatch(&self, message: &Message) -> Outcome {
        self.send(message)
    }

    fn dispatch_batch(&self, messages: &[Message]) -> Vec<Outcome> {
        let mut outcomes = self.send_all(messages.iter().enumerate());
        outcomes.sort_by_key(|(index, _)| *index);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }
}

impl HttpDestination {
    /// Checks the settings of the destination. An error names the invalid setting.
    fn new(
        destination: Destination,
        config: &Config,
        source: &str,
        common: &mut Common,
    ) -> Result<Self, ConfigError> {
        let form = Form::new(&destination, config, source)?;
        let tokens = token_server(&destination).map(|(server, oauth2)| {
            let key = format!("destinations.{}.auth", server.name);
            let target = Target::new(server, config, common).map_err(of_token_url)?;
            Tokens::new(oauth2, target).map_err(|reason| ConfigError::new(key, reason))
        });
        Ok(Self {
            form,
            tokens: tokens.transpose()?,
            target: Target::new(destination, config, common)?,
        })
    }

    fn send(&self, message: &Message) -> Outcome {
        let outcome = self.post(|| {
            let checked = self.form.check(message)?;
            self.form.one(checked, SystemTime::now())
        });
        self.target.or_give_up(outcome, message.attempts)
    }

    /// Sends messages with one request in batched mode, otherwise one by one. Returns each outcome with the number of
    /// its message.
    fn send_all<'m>(
        &self,
        messages: impl IntoIterator<Item = (usize, &'m Message)>,
    ) -> Vec<(usize, Outcome)> {
        let messages = messages.into_iter();
        if self.form.mode() != Mode::Batched {
            let (numbers, messages): (Vec<_>, Vec<_>) = messages.unzip();
            let outcomes = in_order(messages.into_iter(), |one| self.send(one));
            return numbers.into_iter().zip(outcomes).collect();
        }
        let (mut outcomes, mut numbers, mut batch) = (Vec::new(), Vec::new(), Vec::new());
        let mut cut = CutKeys::default();
        for (number, message) in messages {
            if let Some(outcome) = cut.behind(message) {
                outcomes.push((number, outcome));
                continue;
            }
            match self.form.check(message) {
                Ok(checked) => {
                    numbers.push((number, message.attempts));
                    batch.push(checked);
                }
                Err(failure) => {
                    cut.add(message);
                    outcomes.push((number, Outcome::Dead(failure)));
                }
            }
        }
        if !batch.is_empty() {
            let outcome = self.send_batch(&batch);
            outcomes.extend(numbers.into_iter().map(|(number, attempts)| {
                let outcome = self.target.or_give_up(outcome.clone(), attempts);
                (number, outcome)
            }));
        }
        outcomes
    }

    /// Sends all messages with one request, whose outcome applies to each message.
    fn send_batch(&self, batch: &[Checked<'_>]) -> Outcome {
        match batch {
            [only] => self.post(|| {
                let checked = self.form.check(only.message())?;
                self.form.one(checked, SystemTime::now())
            }),
            several => self.post(|| self.form.several(several, SystemTime::now())),
        }
    }

    /// Posts a request. `build` is called again if the request has to be sent again.
    fn post<'m>(&self, build: impl Fn() -> Result<Request<'m>, Failure>) -> Outcome {
        match self.answer(build) {
            Ok(answer) => response::outcome(answer, &self.target.destination, SystemTime::now()),
            Err(outcome) => outcome,
        }
    }

    /// The response to a request, whatever it means.
    fn answer<'m>(
        &self,
        build: impl Fn() -> Result<Request<'m>, Failure>,
    ) -> Result<HttpAnswer, Outcome> {
        let began = Instant::now();
        match &self.tokens {
            None => self.target.post(began, build),
            Some(tokens) => self.post_with_token(tokens, began, build),
        }
    }

    /// Posts a request with a token. If the receiver refuses a token that this send has not requested itself, posts the
    /// request once more with a new token.
    fn post_with_token<'m>(
        &self,
        tokens: &Tokens,
        began: Instant,
        build: impl Fn() -> Result<Request<'m>, Failure>,
    ) -> Result<HttpAnswer, Outcome> {
        let post = |token: &Token| {
            self.target.post(began, || {
                let mut request = build()?;
                let header = token.header.clone();
                request.headers.insert(AUTHORIZATION, header);
                Ok(request)
            })
        };
        let token = tokens.get(began)?;
        let answer = post(&token)?;
        if answer.response.status != Some(401) || token.is_newer_than(began) {
            return Ok(answer);
        }
        tokens.refuse(&token);
        post(&tokens.get(began)?)
    }
}

#[cfg(test)]
mod tests;
