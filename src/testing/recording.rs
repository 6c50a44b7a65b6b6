//! A receiver for tests.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use serde::de::DeserializeOwned;

use super::decoded;
use crate::dispatch::{Dispatcher, Outcome, Response};
use crate::event::Event;
use crate::lock::lock;
use crate::message::Message;

/// A dispatcher that keeps what it is given, and answers as it is told: delivered, if nothing else.
///
/// Its clones are one.
///
/// ```
/// use diesel_outbox::testing::RecordingDispatcher;
/// use diesel_outbox::{Failure, Outcome, ReasonCode};
///
/// let receiver = RecordingDispatcher::answering(|message| match message.attempts {
///     0 => Outcome::Retry(Failure::new(ReasonCode::ServerError, "503")),
///     _ => Outcome::Delivered(Default::default()),
/// });
/// assert!(receiver.messages().is_empty());
/// ```
#[derive(Clone)]
pub struct RecordingDispatcher {
    answer: Arc<dyn Fn(&Message) -> Outcome + Send + Sync>,
    messages: Arc<Mutex<Vec<Message>>>,
}

impl RecordingDispatcher {
    /// One that takes everything.
    pub fn new() -> Self {
        Self::answering(|_| Outcome::Delivered(Response::default()))
    }

    /// One that answers as this says.
    pub fn answering(answer: impl Fn(&Message) -> Outcome + Send + Sync + 'static) -> Self {
        Self {
            answer: Arc::new(answer),
            messages: Arc::default(),
        }
    }

    /// What it was given, in order; a message that was tried again is there again.
    pub fn messages(&self) -> Vec<Message> {
        self.list().clone()
    }

    /// The events of a type that it was given.
    ///
    /// ```
    /// use diesel_outbox::testing::RecordingDispatcher;
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct OrderPaid { order_id: i64 }
    /// # impl diesel_outbox::Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
    ///
    /// let receiver = RecordingDispatcher::new();
    /// // … a relay drains the outbox …
    /// let orders: Vec<i64> = receiver.events::<OrderPaid>().iter().map(|paid| paid.order_id).collect();
    /// # assert!(orders.is_empty());
    /// ```
    ///
    /// # Panics
    /// When a message of the type's topic is not of its shape.
    pub fn events<E: Event + DeserializeOwned>(&self) -> Vec<E> {
        self.messages().iter().filter_map(decoded).collect()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Message>> {
        lock(&self.messages)
    }
}

impl Default for RecordingDispatcher {
    fn default() -> Self {
        Self::new()
    }
}

impl Dispatcher for RecordingDispatcher {
    fn dispatch(&self, message: &Message) -> Outcome {
        self.list().push(message.clone());
        (self.answer)(message)
    }
}

impl fmt::Debug for RecordingDispatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordingDispatcher")
            .field("messages", &self.list().len())
            .finish_non_exhaustive()
    }
}
