//! Dispatchers send messages, and return an outcome for each.

pub(crate) mod fence;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::config::ConfigError;
use crate::log;
use crate::message::Message;
use crate::status::ReasonCode;

/// Why an endpoint has no dispatcher.
#[derive(Debug)]
pub(crate) enum EndpointRefusal {
    /// No relay can send there with this row: only this may be decided for all relays.
    Invalid(ConfigError),
    /// This relay cannot or may not send there. Another relay, with other settings, may.
    NotHere(String),
}

/// An endpoint has not shown that it wants messages.
#[derive(Debug)]
pub(crate) struct NotVerified {
    pub(crate) failure: Failure,
    /// The endpoint refuses them: it is not asked again.
    pub(crate) is_final: bool,
}

impl NotVerified {
    /// The reason code, a colon and the error.
    pub(crate) fn text(&self) -> String {
        format!("{}: {}", self.failure.code, self.failure.error)
    }
}

/// Sends messages to their destinations.
///
/// All sender threads call the dispatcher at the same time, each with its own message. A panic is a failed
/// attempt of that message; the relay continues. A call must return on its own: the relay does not time it
/// out.
///
/// ```
/// use diesel_outbox::{Dispatcher, Message, Outcome, Response};
///
/// /// Writes messages to standard output.
/// struct Print;
///
/// impl Dispatcher for Print {
///     fn dispatch(&self, message: &Message) -> Outcome {
///         println!("{} {}", message.topic, message.payload);
///         Outcome::Delivered(Response::default())
///     }
///
///     // The default calls `dispatch` for each message.
///     fn dispatch_batch(&self, messages: &[Message]) -> Vec<Outcome> {
///         println!("{} messages at once", messages.len());
///         messages.iter().map(|message| self.dispatch(message)).collect()
///     }
/// }
/// ```
// Why: docs/decisions.md#dispatcher-flush
pub trait Dispatcher: Send + Sync + 'static {
    /// Sends one message and returns the outcome.
    fn dispatch(&self, message: &Message) -> Outcome;

    /// Sends messages of a destination in batched mode with one request. Returns an outcome for each
    /// message, in the same order. If the receiver refuses a message of a batch ([`Outcome::Dead`] with an
    /// HTTP status), the relay sends that message again alone: the response may concern another message.
    ///
    /// With a `key_run` above 1, a batch may hold several messages of a key, in order. Deliver a message only if all of its
    /// key before it are delivered. The relay records the delivered messages at the beginning of a run and the outcome of
    /// the first message that is not delivered. The messages behind it go back: their outcomes do not count, and
    /// [`Outcome::Wait`] fits.
    ///
    /// Defaults to calling [`dispatch`](Self::dispatch) for each message, except for those behind a message of their key
    /// that is not delivered.
    fn dispatch_batch(&self, messages: &[Message]) -> Vec<Outcome> {
        in_order(messages.iter(), |one| self.dispatch(one)).collect()
    }
}

/// Sends messages one by one, except for those behind a message of their key that is not delivered.
pub(crate) fn in_order<'m>(
    messages: impl Iterator<Item = &'m Message>,
    send: impl Fn(&Message) -> Outcome,
) -> impl Iterator<Item = Outcome> {
    let mut cut = CutKeys::default();
    messages.map(move |message| {
        cut.behind(message).unwrap_or_else(|| {
            let outcome = send(message);
            if !matches!(outcome, Outcome::Delivered(_)) {
                cut.add(message);
            }
            outcome
        })
    })
}

/// The keys of a batch of which a message is not delivered.
#[derive(Default)]
pub(crate) struct CutKeys<'m>(HashSet<(&'m str, &'m str)>);

impl<'m> CutKeys<'m> {
    pub(crate) fn add(&mut self, message: &'m Message) {
        self.0.extend(Self::key(message));
    }

    /// The outcome of a message that must not be sent, because it is behind one that is not delivered.
    pub(crate) fn behind(&self, message: &'m Message) -> Option<Outcome> {
        let is_cut = Self::key(message).is_some_and(|key| self.0.contains(&key));
        let why = "not sent: an earlier message of the key is not delivered";
        is_cut.then(|| Outcome::Wait(Failure::new(ReasonCode::Failed, why)))
    }

    fn key(message: &'m Message) -> Option<(&'m str, &'m str)> {
        Some((message.ordering_key.as_deref()?, &message.destination))
    }
}

/// The outcome of one send.
///
/// ```
/// use diesel_outbox::{Failure, Outcome, ReasonCode, Response};
///
/// fn outcome(status: u16, body: String) -> Outcome {
///     let mut failure = Failure::new(ReasonCode::ServerError, format!("the broker returned {status}"));
///     match status {
///         200..=299 => Outcome::Delivered(Response::new(Some(status), Some(body))),
///         400 => Outcome::Dead(Failure::new(ReasonCode::Rejected, "the broker rejected the message")),
///         _ => {
///             failure.retry_after = Some(std::time::Duration::from_secs(30));
///             Outcome::Retry(failure)
///         }
///     }
/// }
/// # assert!(matches!(outcome(204, String::new()), Outcome::Delivered(_)));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The receiver has the message.
    Delivered(Response),
    /// The send failed and may succeed later: the relay retries. After the last attempt the message is
    /// dead-lettered.
    Retry(Failure),
    /// Nothing reached the receiver, for reasons unrelated to the message: the message waits, and no attempt
    /// is counted. The wait is `retry_after` of the failure if set, otherwise the backoff.
    Wait(Failure),
    /// The send failed and would always fail: the message is dead-lettered.
    Dead(Failure),
}

/// The response of a receiver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Response {
    /// The HTTP status, if any.
    pub status: Option<u16>,
    /// The beginning of the response body, if any.
    pub body: Option<String>,
}

impl Response {
    /// A response with this status and body.
    ///
    /// ```
    /// use diesel_outbox::Response;
    ///
    /// let response = Response::new(Some(202), None);
    /// assert_eq!(response.status, Some(202));
    /// ```
    pub fn new(status: Option<u16>, body: Option<String>) -> Self {
        Self { status, body }
    }
}

/// Why a send failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The reason code, as in tables and logs.
    pub code: ReasonCode,
    /// The reason as text. It must not contain the payload. The relay stores up to 512 characters.
    pub error: String,
    /// The response of the receiver, if any.
    pub response: Response,
    /// How long the receiver asked to wait.
    pub retry_after: Option<Duration>,
    /// Whether and how long to pause the destination.
    pub pause: Option<Pause>,
    /// Whether the cause may be this machine, its network or its name server: no connection was made, and the receiver
    /// did not refuse it.
    pub(crate) may_be_ours: bool,
}

/// How long to pause a destination. Messages of a paused destination wait, and no attempts are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pause {
    /// For this time.
    For(Duration),
    /// Until it is resumed (`diesel-outbox resume`). A new URL or enabling ends the pause of an endpoint, too.
    UntilResumed,
}

impl Failure {
    /// A failure without a response.
    ///
    /// ```
    /// use diesel_outbox::{Failure, Pause, ReasonCode};
    ///
    /// let mut failure = Failure::new(ReasonCode::Connect, "the broker is unreachable");
    /// failure.pause = Some(Pause::For(std::time::Duration::from_secs(10)));
    /// ```
    pub fn new(code: ReasonCode, error: impl Into<String>) -> Self {
        Self {
            code,
            error: error.into(),
            response: Response::default(),
            retry_after: None,
            pause: None,
            may_be_ours: false,
        }
    }
}

/// Runs the application's code. A panic is a failed attempt of the message. The application must keep state
/// that its calls share consistent across panics.
pub(crate) fn caught<T>(message: &Message, run: impl FnOnce() -> T) -> Result<T, Failure> {
    unwound(run).map_err(|text| {
        log::error!(event = "dispatch_panic", sequence = message.sequence.0, message_id:% = message.message_id, topic = message.topic; "the dispatcher or handler panicked on message {} ({}): this counts as a failed attempt", message.message_id, message.topic);
        Failure::new(ReasonCode::Panic, format!("the dispatcher or handler panicked{text}"))
    })
}

/// Runs code that may panic. The error is what follows the word "panicked".
pub(crate) fn unwound<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        // A formatted panic message may quote the payload, for example in `unwrap`. Only a literal is safe to keep.
        let text = match panic.downcast_ref::<&str>() {
            Some(text) => format!(": {text}"),
            None => " (the panic message is not stored, as it may quote the payload)".to_owned(),
        };
        // The application may have chosen the panic's payload, and its `drop` may panic.
        std::mem::forget(panic);
        text
    })
}
