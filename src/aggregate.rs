//! Domain events that an aggregate collects. Saving the aggregate enqueues them.

use crate::event::IntoMessage;
use crate::message::{MessageError, NewMessage};

/// The unsaved events of an aggregate, in the order in which they were recorded.
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
    /// An empty collection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an event: an [`Event`](crate::Event), or a [`NewMessage`] with more options. If the event
    /// cannot be serialised, saving the aggregate fails. Receivers see when an event occurred if
    /// [`Event::occurred_at`](crate::Event::occurred_at) or [`NewMessage::occurred_at`] says so.
    pub fn record(&mut self, event: impl IntoMessage) {
        self.recorded.push(event.into_message());
    }

    /// The number of events.
    pub fn len(&self) -> usize {
        self.recorded.len()
    }

    /// Whether there are no events.
    pub fn is_empty(&self) -> bool {
        self.recorded.is_empty()
    }

    /// Removes all events.
    pub fn clear(&mut self) {
        self.recorded.clear();
    }

    /// Copies of the messages: a failed save keeps the events. An error comes with the index of its event.
    pub(crate) fn messages(&self) -> Result<Vec<NewMessage>, (u64, MessageError)> {
        let numbered = (0..).zip(&self.recorded);
        numbered
            .map(|(index, one)| one.clone().map_err(|error| (index, error)))
            .collect()
    }
}

/// A domain object that records an event for each change.
/// [`Outbox::save`](crate::Outbox::save) saves the object and enqueues its events.
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
    /// The events that the aggregate has collected.
    fn events(&mut self) -> &mut Events;
}
