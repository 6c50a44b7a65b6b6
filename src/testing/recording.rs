//! A dispatcher for tests, which takes the place of a receiver.

use std::sync::{Arc, Mutex, MutexGuard};

use serde::de::DeserializeOwned;

use super::decoded;
use crate::dispatch::{Dispatcher, Outcome, Response};
use crate::event::Event;
use crate::lock::lock;
use crate::message::Message;
use crate::shows::shows;

/// A dispatcher that records messages, and returns outcomes that the test chooses. Defaults to delivered.
///
/// Clones share their messages.
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
#[derive(Clone, Default)]
pub struct RecordingDispatcher {
    /// `None`: every message is delivered.
    answer: Option<Arc<OutcomeOf>>,
    messages: Arc<Mutex<Vec<Message>>>,
}

type OutcomeOf = dyn Fn(&Message) -> Outcome + Send + Sync;

impl RecordingDispatcher {
    /// Creates a dispatcher that delivers every message.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a dispatcher that returns the outcomes of this function.
    pub fn answering(answer: impl Fn(&Message) -> Outcome + Send + Sync + 'static) -> Self {
        Self {
            answer: Some(Arc::new(answer)),
            messages: Arc::default(),
        }
    }

    /// The recorded messages, in order. A retried message is recorded again.
    pub fn messages(&self) -> Vec<Message> {
        self.list().clone()
    }

    /// The recorded events of one type.
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
    /// If a message of the type's topic does not have the type's shape.
    pub fn events<E: Event + DeserializeOwned>(&self) -> Vec<E> {
        self.messages().iter().filter_map(decoded).collect()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Message>> {
        lock(&self.messages)
    }
}

impl Dispatcher for RecordingDispatcher {
    fn dispatch(&self, message: &Message) -> Outcome {
        self.list().push(message.clone());
        match &self.answer {
            Some(answer) => answer(message),
            None => Outcome::Delivered(Response::default()),
        }
    }
}

shows!(RecordingDispatcher: messages = [list().len()]);
