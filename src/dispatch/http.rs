//! Blocking HTTP: messages to the destinations that their topics are routed to.

mod address;
mod cloudevents;
mod connection;
mod egress;
mod form;
mod headers;
mod lookups;
mod proxy;
mod resolver;
mod response;
pub(crate) mod signature;
mod stored;
mod target;
mod tls;
mod trace;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use self::form::{Checked, Form, Request};
use self::lookups::{Lookup, system_lookup};
use self::target::{Common, Target};
use super::{Dispatcher, Failure, Outcome};
use crate::config::{Config, ConfigError, Destination, Mode};
use crate::lock::lock;
use crate::message::Message;
use crate::routes::{Routes, Way};
use crate::status::ReasonCode;

/// How requests say whose they are, also to a proxy.
const USER_AGENT: &str = concat!("diesel-outbox/", env!("CARGO_PKG_VERSION"));

/// Posts messages to destinations, by topic or by name.
///
/// A destination's [`Mode`] says how: the payload as it is and everything else in headers, or
/// CloudEvents documents that hold both. In each mode a request has the ids of Standard Webhooks
/// and, where there are secrets, their signatures; the payload is what was stored, byte for byte.
/// A request for several messages (batched mode) has an id of its own. The ids of its messages are
/// in their documents; their stored HTTP headers, keys and attempts are not sent.
///
/// Made by the relay from its settings; of use by itself where an application wants to add
/// something around it.
#[derive(Debug)]
pub struct HttpDispatcher {
    routes: Routes,
    places: Vec<Place>,
}

/// A destination, and the form of its requests.
#[derive(Debug)]
struct Place {
    target: Target,
    form: Form,
}

impl HttpDispatcher {
    /// A dispatcher for the destinations, the routes and the default URL of `config`.
    ///
    /// Names are resolved as the system does it, and a destination gets no connection to an address
    /// that it must not have. Behind a proxy the proxy resolves its name, so only an address that
    /// stands in the URL is judged: which others are reached is the proxy's to say.
    ///
    /// ```no_run
    /// use diesel_outbox::{HttpDispatcher, config};
    ///
    /// // What is wrong with a destination is told before a relay is started.
    /// let dispatcher = HttpDispatcher::new(&config::from_env()?)?;
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] when a destination cannot be used: a file of its TLS settings is not what
    /// it has to be, or its URL is an address that it must not have.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        Self::looking_up(config, Box::new(system_lookup))
    }

    /// As [`new`](Self::new), with a lookup of your own instead of the system's: another DNS, or a
    /// registry of services. It gets a host and a port and gives the addresses to connect to, which
    /// are judged like any others: see [`Destination::internal`](crate::Destination::internal).
    ///
    /// It is called by two threads at once, never for the same name, and what it says is kept for
    /// ten seconds, an error for one. Callers do not wait for it longer than for their send; a
    /// lookup that never comes back costs a thread, and both of them all names.
    ///
    /// ```
    /// use diesel_outbox::{Config, HttpDispatcher};
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
        let source = source(config);
        let place = |destination| {
            let form = Form::new(&destination, config, &source)?;
            let target = Target::new(destination, config, &mut common)?;
            Ok(Place { target, form })
        };
        let destinations = config.all_destinations().into_iter();
        Ok(Self {
            routes: Routes::new(config),
            places: destinations.map(place).collect::<Result<_, _>>()?,
        })
    }

    /// One dispatcher for each destination, in their order: whoever calls one has found out where a message goes.
    pub(crate) fn of_each(config: &Config) -> Result<Vec<Arc<dyn Dispatcher>>, ConfigError> {
        let each = Self::new(config)?.places.into_iter();
        Ok(each.map(|place| Arc::new(place) as _).collect())
    }

    /// The names of the destinations of messages of a topic: the one that they name or, where
    /// `destination` is empty, those that the topic is routed to. Handlers in the process are not
    /// among them.
    ///
    /// ```
    /// use diesel_outbox::{Config, Destination, HttpDispatcher, Route};
    ///
    /// let mut config = Config::default();
    /// config.destinations.push(Destination::new("billing", "https://billing.example/events")?);
    /// config.routes.push(Route::new("order.*", "billing"));
    ///
    /// let dispatcher = HttpDispatcher::new(&config)?;
    /// assert_eq!(dispatcher.destinations_of("order.paid", ""), ["billing"]);
    /// assert!(dispatcher.destinations_of("member.joined", "").is_empty());
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    pub fn destinations_of(&self, topic: &str, destination: &str) -> Vec<&str> {
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

    /// The number of the message's place.
    fn number_of(&self, message: &Message) -> Result<usize, Failure> {
        match self.routes.find(&message.topic, &message.destination) {
            Way::To(number) if number < self.places.len() => Ok(number),
            Way::NoRoute | Way::NotTaken => {
                let error = format!(
                    "no route, no handler and no default URL serves the topic {:?}",
                    message.topic
                );
                Err(Failure::new(ReasonCode::NoRoute, error))
            }
            // Handlers in the process get theirs from the relay.
            Way::To(_) | Way::UnknownDestination => {
                let error = format!(
                    "no destination with a URL is called {:?}",
                    message.destination
                );
                Err(Failure::new(ReasonCode::UnknownDestination, error))
            }
            // The relay splits such messages before it sends them.
            Way::Split(_) => Err(Failure::new(
                ReasonCode::NoRoute,
                "its topic is routed to several destinations: a relay makes a message for each",
            )),
        }
    }
}

/// Makes dispatchers for registered destinations, which come and go. All of them share their connections.
pub(crate) struct Customers {
    common: Mutex<Common>,
    source: String,
    config: Config,
}

impl Customers {
    /// `config`: as it is for registered destinations.
    pub(crate) fn new(config: Config) -> Result<Option<Self>, ConfigError> {
        Ok(Some(Self {
            common: Mutex::new(Common::shared(Box::new(system_lookup))),
            source: source(&config),
            config,
        }))
    }

    /// One that posts to this destination, whatever a message says.
    pub(crate) fn dispatcher(
        &self,
        destination: Destination,
    ) -> Result<Arc<dyn Dispatcher>, ConfigError> {
        let form = Form::new(&destination, &self.config, &self.source)?;
        let target = Target::new(destination, &self.config, &mut lock(&self.common))?;
        Ok(Arc::new(Place { target, form }))
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
        // There is one destination as a rule. Where there are several, each gets a request.
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

/// To one destination, whatever a message says: a relay knows that it goes there.
impl Dispatcher for Place {
    fn dispatch(&self, message: &Message) -> Outcome {
        self.send(message)
    }

    fn dispatch_batch(&self, messages: &[Message]) -> Vec<Outcome> {
        let mut outcomes = self.send_all(messages.iter().enumerate());
        outcomes.sort_by_key(|(index, _)| *index);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }
}

impl Place {
    fn send(&self, message: &Message) -> Outcome {
        let request = self
            .form
            .check(message)
            .and_then(|checked| self.form.one(checked, SystemTime::now()));
        self.post(request)
    }

    /// Sends messages by one request, where that is its mode. The outcomes have their messages' numbers.
    fn send_all<'m>(
        &self,
        messages: impl IntoIterator<Item = (usize, &'m Message)>,
    ) -> Vec<(usize, Outcome)> {
        let messages = messages.into_iter();
        if self.form.mode() != Mode::Batched {
            return messages.map(|(n, one)| (n, self.send(one))).collect();
        }
        let (mut outcomes, mut numbers, mut batch) = (Vec::new(), Vec::new(), Vec::new());
        for (number, message) in messages {
            match self.form.check(message) {
                Ok(checked) => {
                    numbers.push(number);
                    batch.push(checked);
                }
                Err(failure) => outcomes.push((number, Outcome::Dead(failure))),
            }
        }
        if !batch.is_empty() {
            let outcome = self.send_batch(batch);
            outcomes.extend(numbers.into_iter().map(|number| (number, outcome.clone())));
        }
        outcomes
    }

    /// Sends all of them by one request: its outcome is theirs.
    fn send_batch(&self, mut batch: Vec<Checked<'_>>) -> Outcome {
        let now = SystemTime::now();
        let request = match batch.pop() {
            Some(only) if batch.is_empty() => self.form.one(only, now),
            last => {
                batch.extend(last);
                self.form.several(&batch, now)
            }
        };
        self.post(request)
    }

    fn post(&self, request: Result<Request<'_>, Failure>) -> Outcome {
        let Request { headers, body } = match request {
            Ok(request) => request,
            Err(failure) => return Outcome::Dead(failure),
        };
        match self.target.post(headers, &body) {
            Ok(answer) => response::outcome(answer, &self.target.destination, SystemTime::now()),
            Err(outcome) => outcome,
        }
    }
}
