//! Domain events that an aggregate collects, to be enqueued when it is saved.

use std::time::SystemTime;

use crate::event::IntoMessage;
use crate::message::{MessageError, NewMessage};

/// Events that an aggregate has collected and not saved yet, in their order.
///
/// ```
/// use diesel_outbox::{Event, Events};
///
/// #[derive(serde::Serialize)]
/// struct OrderPaid { order_id: i64 }
///
/// impl Event for OrderPaid {
///     const TOPIC: &'static str = "order.paid";
/// }
///
/// let mut events = Events::new();
/// events.record(OrderPaid { order_id: 7 });
/// assert_eq!(events.len(), 1);
/// events.clear();
/// assert!(events.is_empty());
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Events {
    recorded: Vec<Result<NewMessage, MessageError>>,
}

impl Events {
    /// No events yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one: an [`Event`](crate::Event), or a [`NewMessage`] that says more. Where it cannot be
    /// serialised, saving the aggregate fails.
    pub fn record(&mut self, event: impl IntoMessage) {
        self.recorded.push(event.into_message());
    }

    /// Adds one that occurred at `time`: receivers see it as `ce-time`.
    ///
    /// ```
    /// use diesel_outbox::{Events, NewMessage};
    /// use std::time::SystemTime;
    ///
    /// let mut events = Events::new();
    /// events.record_at(SystemTime::now(), NewMessage::new("order.paid", &7)?);
    /// # Ok::<(), diesel_outbox::MessageError>(())
    /// ```
    pub fn record_at(&mut self, time: SystemTime, event: impl IntoMessage) {
        let message = event.into_message();
        self.recorded
            .push(message.map(|message| message.occurred_at(time)));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.recorded.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.recorded.is_empty()
    }

    /// Forgets all of them.
    pub fn clear(&mut self) {
        self.recorded.clear();
    }

    /// The messages, each time anew.
    pub(crate) fn messages(&self) -> Result<Vec<NewMessage>, (u64, MessageError)> {
        let numbered = (0..).zip(&self.recorded);
        numbered
            .map(|(index, one)| one.clone().map_err(|error| (index, error)))
            .collect()
    }
}

/// What collects events while it changes, and is saved with them: see
/// [`Outbox::save`](crate::Outbox::save).
///
/// ```
/// use diesel_outbox::{Aggregate, Events};
///
/// struct Order { id: i64, paid: bool, events: Events }
///
/// impl Aggregate for Order {
///     fn events(&mut self) -> &mut Events {
///         &mut self.events
///     }
/// }
/// ```
pub trait Aggregate {
    /// The events that it has collected.
    fn events(&mut self) -> &mut Events;
}
