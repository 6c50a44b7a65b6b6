//! A catalogue of events (feature `schemars`): the topics of an application with the schemas of their payloads, made from
//! the Rust types.
//!
//! The types are those that the application enqueues, so the catalogue cannot say anything else than the code. From it
//! come documents for those who receive: AsyncAPI, OpenAPI with webhooks, a page in Markdown. Keep the JSON of the
//! catalogue in the repository of the application (`catalogue.json`): a review then sees what changes for receivers, and
//! `diesel-outbox check --catalogue catalogue.json` finds stored messages that do not fit it.
//!
//! ```
//! use diesel_outbox::{Event, catalogue};
//! use schemars::JsonSchema;
//! use serde::Serialize;
//!
//! /// A customer has paid an order.
//! #[derive(Serialize, JsonSchema)]
//! struct OrderPaid {
//!     order_id: i64,
//!     /// The amount in cents.
//!     cents: u64,
//! }
//!
//! impl Event for OrderPaid {
//!     const TOPIC: &'static str = "order.paid";
//! }
//!
//! let catalogue = catalogue![OrderPaid];
//! assert_eq!(catalogue.events[0].description, "A customer has paid an order.");
//! assert!(catalogue.markdown().contains("| `cents` | integer | yes | The amount in cents. |"));
//! assert_eq!(catalogue.asyncapi("Shop", "1.0.0")["asyncapi"], "3.0.0");
//! assert_eq!(catalogue.openapi("Shop", "1.0.0")["openapi"], "3.1.0");
//! ```

mod documents;
mod example;
mod page;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::event::Event;

/// The events of an application: see the [module](self). Read and written as JSON by serde.
// Why: docs/decisions.md#catalogue
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Catalogue {
    /// The events, by topic and version.
    pub events: Vec<EventType>,
}

/// One version of one topic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EventType {
    /// The topic of the messages.
    pub topic: String,
    /// The version of the payload's shape.
    #[serde(default = "first_version")]
    pub version: u32,
    /// The name of the type.
    pub name: String,
    /// The documentation of the type.
    #[serde(default)]
    pub description: String,
    /// A payload: the first example that the type gives (`#[schemars(example = …)]`), or else one made from the schema.
    #[serde(default)]
    pub example: Value,
    /// The JSON Schema (2020-12) of the payload.
    pub schema: Value,
}

fn first_version() -> u32 {
    1
}

impl EventType {
    /// The type of these events, as they are serialized.
    ///
    /// ```
    /// # #[derive(serde::Serialize, schemars::JsonSchema)]
    /// # struct OrderPaid { order_id: i64 }
    /// # impl diesel_outbox::Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
    /// let event = diesel_outbox::catalogue::EventType::of::<OrderPaid>();
    /// assert_eq!((event.topic.as_str(), event.name.as_str()), ("order.paid", "OrderPaid"));
    /// assert_eq!(event.schema["properties"]["order_id"]["type"], "integer");
    /// ```
    pub fn of<E: Event + JsonSchema>() -> Self {
        let settings = SchemaSettings::draft2020_12().for_serialize();
        let mut schema = settings.into_generator().into_root_schema_for::<E>();
        let mut take = |key| match schema.remove(key) {
            Some(Value::String(text)) => text,
            _ => String::new(),
        };
        let (name, description) = (take("title"), take("description"));
        let schema = Value::from(schema);
        let examples = schema["examples"].as_array();
        let example = examples.and_then(|all| all.first().cloned());
        Self {
            topic: E::TOPIC.to_owned(),
            version: E::VERSION,
            name,
            description,
            example: example.unwrap_or_else(|| example::of(&schema)),
            schema,
        }
    }
}

impl Catalogue {
    /// A catalogue of these events; [`catalogue!`](crate::catalogue!) names types.
    ///
    /// # Panics
    /// If two events have the same topic and version: their messages could not be told apart.
    ///
    /// ```
    /// use diesel_outbox::catalogue::{Catalogue, EventType};
    ///
    /// # #[derive(serde::Serialize, schemars::JsonSchema)]
    /// # struct OrderPaid { order_id: i64 }
    /// # impl diesel_outbox::Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
    /// let catalogue = Catalogue::new([EventType::of::<OrderPaid>()]);
    /// let text = serde_json::to_string_pretty(&catalogue)?;
    /// assert_eq!(serde_json::from_str::<Catalogue>(&text)?, catalogue);
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    pub fn new(events: impl IntoIterator<Item = EventType>) -> Self {
        let mut events: Vec<EventType> = events.into_iter().collect();
        events.sort_by(|a, b| (&a.topic, a.version).cmp(&(&b.topic, b.version)));
        for pair in events.windows(2) {
            assert!(
                (&pair[0].topic, pair[0].version) != (&pair[1].topic, pair[1].version),
                "{} and {} are both version {} of {}",
                pair[0].name,
                pair[1].name,
                pair[1].version,
                pair[1].topic
            );
        }
        Self { events }
    }

    /// The topics of the events, to declare them.
    ///
    /// ```
    /// # #[derive(serde::Serialize, schemars::JsonSchema)]
    /// # struct OrderPaid { order_id: i64 }
    /// # impl diesel_outbox::Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
    /// use diesel_outbox::Relay;
    ///
    /// let catalogue = diesel_outbox::catalogue![OrderPaid];
    /// assert_eq!(catalogue.topics(), ["order.paid"]);
    /// let relay = Relay::builder("postgres://localhost/shop").topics(catalogue.topics());
    /// ```
    pub fn topics(&self) -> Vec<&str> {
        let mut topics: Vec<&str> = self.events.iter().map(|one| one.topic.as_str()).collect();
        topics.dedup();
        topics
    }

    /// An [AsyncAPI](https://www.asyncapi.com/docs/reference/specification/v3.0.0) 3.0 document with this title and
    /// version: a channel for each topic, with messages as CloudEvents in structured mode.
    ///
    /// ```
    /// # #[derive(serde::Serialize, schemars::JsonSchema)]
    /// # struct OrderPaid { order_id: i64 }
    /// # impl diesel_outbox::Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
    /// let catalogue = diesel_outbox::catalogue![OrderPaid];
    /// let document = catalogue.asyncapi("Shop", "1.0.0");
    /// assert_eq!(document["channels"]["order.paid"]["address"], "order.paid");
    /// ```
    pub fn asyncapi(&self, title: &str, version: &str) -> Value {
        documents::asyncapi(&self.events, title, version)
    }

    /// An [OpenAPI](https://spec.openapis.org/oas/v3.1.0) 3.1 document with this title and version: a webhook for each
    /// topic, with CloudEvents in structured mode and the headers of Standard Webhooks.
    ///
    /// ```
    /// # #[derive(serde::Serialize, schemars::JsonSchema)]
    /// # struct OrderPaid { order_id: i64 }
    /// # impl diesel_outbox::Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
    /// let catalogue = diesel_outbox::catalogue![OrderPaid];
    /// let document = catalogue.openapi("Shop", "1.0.0");
    /// assert!(document["webhooks"]["order.paid"]["post"].is_object());
    /// ```
    pub fn openapi(&self, title: &str, version: &str) -> Value {
        documents::openapi(&self.events, title, version)
    }

    /// A page in Markdown for those who receive the events: description, fields and example of each.
    ///
    /// ```
    /// # #[derive(serde::Serialize, schemars::JsonSchema)]
    /// # struct OrderPaid { order_id: i64 }
    /// # impl diesel_outbox::Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
    /// let catalogue = diesel_outbox::catalogue![OrderPaid];
    /// assert!(catalogue.markdown().starts_with("# Events\n\n## order.paid\n"));
    /// ```
    pub fn markdown(&self) -> String {
        page::markdown(&self.events)
    }
}

/// A [`Catalogue`](crate::catalogue::Catalogue) of these [`Event`](crate::Event) types, which also implement
/// `schemars::JsonSchema`. Needs the feature `schemars`.
///
/// ```
/// # #[derive(serde::Serialize, schemars::JsonSchema)]
/// # struct OrderPaid { order_id: i64 }
/// # impl diesel_outbox::Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
/// let catalogue = diesel_outbox::catalogue![OrderPaid];
/// assert_eq!(catalogue.events.len(), 1);
/// ```
#[macro_export]
macro_rules! catalogue {
    ($($event:ty),* $(,)?) => {
        $crate::catalogue::Catalogue::new([$($crate::catalogue::EventType::of::<$event>()),*])
    };
}
