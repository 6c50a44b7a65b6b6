//! One message out, one outcome back.

#[cfg(feature = "http")]
mod http;
#[cfg(not(feature = "http"))]
mod without_http;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

#[cfg(feature = "http")]
pub(crate) use self::http::Customers;
#[cfg(feature = "http")]
pub use self::http::HttpDispatcher;
#[cfg(feature = "http")]
pub(crate) use self::http::signature::{Signer, signed_content};
#[cfg(not(feature = "http"))]
pub(crate) use self::without_http::{Customers, HttpDispatcher};
use crate::message::Message;
use crate::status::ReasonCode;

/// Sends a message to where it belongs.
///
/// Called by all sender threads at once, each with a message of its own. A panic is a failed
/// attempt of that message, not the end of the relay. It has to come back by itself: nothing
/// cuts it off.
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
///     // By itself it calls `dispatch` for each.
///     fn dispatch_batch(&self, messages: &[Message]) -> Vec<Outcome> {
///         println!("{} messages at once", messages.len());
///         messages.iter().map(|message| self.dispatch(message)).collect()
///     }
/// }
/// ```
pub trait Dispatcher: Send + Sync + 'static {
    /// Sends one message and says what came of it.
    fn dispatch(&self, message: &Message) -> Outcome;

    /// Sends messages of a destination in batched mode, by one request, and says of each what came
    /// of it, in their order. A refusal of the whole request that would be the end of its messages
    /// is not believed: each is then sent by a call of its own.
    ///
    /// Defaults to one [`dispatch`](Self::dispatch) after the other.
    fn dispatch_batch(&self, messages: &[Message]) -> Vec<Outcome> {
        messages.iter().map(|one| self.dispatch(one)).collect()
    }
}

/// What came of one send.
///
/// ```
/// use diesel_outbox::{Failure, Outcome, ReasonCode, Response};
///
/// fn outcome(status: u16, body: String) -> Outcome {
///     let mut failure = Failure::new(ReasonCode::ServerError, format!("it answered {status}"));
///     match status {
///         200..=299 => Outcome::Delivered(Response::new(Some(status), Some(body))),
///         400 => Outcome::Dead(Failure::new(ReasonCode::Rejected, "it does not want this one")),
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
    /// The receiver has it.
    Delivered(Response),
    /// It failed and may go well another time. After the last attempt the message is dead.
    Retry(Failure),
    /// Nothing came as far as the receiver, and not for the message's sake: it waits, and no attempt
    /// is counted. It waits for the failure's `retry_after` where that is given, else as the backoff says.
    Wait(Failure),
    /// It failed and always will: the message is dead.
    Dead(Failure),
}

/// What the receiver answered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Response {
    /// The HTTP status, where there is one.
    pub status: Option<u16>,
    /// The beginning of the answer, where there is one.
    pub body: Option<String>,
}

impl Response {
    /// An answer with this status and body.
    ///
    /// ```
    /// use diesel_outbox::Response;
    ///
    /// let answer = Response::new(Some(202), None);
    /// assert_eq!(answer.status, Some(202));
    /// ```
    pub fn new(status: Option<u16>, body: Option<String>) -> Self {
        Self { status, body }
    }
}

/// Why a send failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The reason, as tables and logs name it.
    pub code: ReasonCode,
    /// The reason in words. Stored up to 512 characters; it must not hold the payload.
    pub error: String,
    /// What the receiver answered, if it did.
    pub response: Response,
    /// The receiver asked to wait for as long as this.
    pub retry_after: Option<Duration>,
    /// What follows for the other messages of the destination.
    pub pause: Option<Pause>,
}

/// For how long a destination gets nothing. Its messages wait, at no cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pause {
    /// This long.
    For(Duration),
    /// Until an operator resumes it (`diesel-outbox resume`).
    UntilResumed,
}

impl Failure {
    /// A failure without an answer.
    ///
    /// ```
    /// use diesel_outbox::{Failure, Pause, ReasonCode};
    ///
    /// let mut failure = Failure::new(ReasonCode::Connect, "the broker is away");
    /// failure.pause = Some(Pause::For(std::time::Duration::from_secs(10)));
    /// ```
    pub fn new(code: ReasonCode, error: impl Into<String>) -> Self {
        Self {
            code,
            error: error.into(),
            response: Response::default(),
            retry_after: None,
            pause: None,
        }
    }
}

/// Runs the application's code. Its panic is a failed attempt of the message; whatever that code
/// shares between its calls is its own to keep sound.
pub(crate) fn caught<T>(message: &Message, run: impl FnOnce() -> T) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        // A text that was put together may quote the payload, as that of an `unwrap` does.
        let text = match panic.downcast_ref::<&str>() {
            Some(text) => format!(": {text}"),
            None => " with a text of its own, which is not kept: it may quote the payload".to_owned(),
        };
        // It is the application's own, and dropping it may panic, too.
        std::mem::forget(panic);
        log::error!(event = "dispatch_panic", sequence = message.sequence.0, message_id:% = message.message_id, topic = message.topic; "the dispatcher or handler panicked: message {} ({})", message.message_id, message.topic);
        Failure::new(ReasonCode::Panic, format!("the dispatcher or handler panicked{text}"))
    })
}
