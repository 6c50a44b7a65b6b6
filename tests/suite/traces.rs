//! Trace context from the enqueuer to the receiver, and the relay's spans.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use diesel::Connection;
use diesel_outbox::{NewMessage, TraceContext};
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

use crate::support::{Database, Receiver, end, eventually};

const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";

/// R31, R4.
#[test]
fn the_trace_of_the_enqueuer_reaches_the_receiver_and_each_attempt_is_a_step_of_its_own() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| {
        if request.header("outbox-attempt") == Some("1") {
            500
        } else {
            200
        }
    });
    let outbox = database.outbox().trace_with(|| {
        Some(TraceContext {
            traceparent: format!("00-{TRACE_ID}-b7ad6b7169203331-01"),
            tracestate: Some("shop=1".to_owned()),
        })
    });
    let own = "00-11111111111111111111111111111111-2222222222222222-00";
    database
        .connect()
        .transaction(|conn| {
            outbox.enqueue(conn, NewMessage::new("order.paid", &1).expect("JSON"))?;
            let traced = NewMessage::new("order.sent", &2).expect("JSON");
            outbox.enqueue(conn, traced.trace_context(own, None))
        })
        .expect("enqueued");
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("both messages are delivered", || {
        database.count("delivered") == 2
    });
    end(&relay);
    let requests = receiver.requests();
    let parents: Vec<String> = requests
        .iter()
        .filter(|request| request.header("ce-type") == Some("order.paid"))
        .map(|request| {
            assert_eq!(request.header("tracestate"), Some("shop=1"));
            let traceparent = request.header("traceparent").expect("a trace");
            let parts: Vec<&str> = traceparent.split('-').collect();
            assert_eq!((parts[0], parts[1], parts[3]), ("00", TRACE_ID, "01"));
            parts[2].to_owned()
        })
        .collect();
    assert_eq!(parents.len(), 2);
    assert_ne!(parents[0], parents[1]);
    assert!(!parents.contains(&"b7ad6b7169203331".to_owned()));
    let other = requests
        .iter()
        .find(|request| request.header("ce-type") == Some("order.sent"))
        .and_then(|request| request.header("traceparent"))
        .expect("a trace");
    assert!(
        other.starts_with("00-11111111111111111111111111111111-"),
        "the message's own trace wins"
    );
}

/// R31, R36.
#[test]
fn a_message_has_a_span_and_its_send_one_inside_it() {
    let spans = Spans::install();
    let database = Database::new();
    let receiver = Receiver::answering(|request| {
        if request.header("outbox-attempt") == Some("1") {
            503
        } else {
            202
        }
    });
    let tenant = uuid::Uuid::from_u128(7);
    let message = NewMessage::new("order.paid", &1)
        .expect("JSON")
        .tenant_id(tenant)
        .trace_context(format!("00-{TRACE_ID}-b7ad6b7169203331-01"), None);
    let id = message.message_id().to_string();
    database.enqueue_message(message);
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    let spans = spans.closed();
    let of_message = |name, span: &&Span| {
        let field = "messaging.message.id";
        span.name == name && (span.is(field, &id) || span.parent.get(field) == Some(&id))
    };
    let count = |name| spans.iter().filter(|span| of_message(name, span)).count();
    assert_eq!(count("outbox.message"), 2, "one span for each attempt");
    assert_eq!(count("outbox.send"), 2);
    for (attempt, outcome, error, status) in [
        ("1", "retry", Some("SERVER_ERROR"), "503"),
        ("2", "delivered", None, "202"),
    ] {
        let span = spans
            .iter()
            .find(|span| of_message("outbox.message", span) && span.is("outbox.attempt", attempt))
            .expect("a span of the attempt");
        assert!(span.is("outcome", outcome), "{span:?}");
        assert!(span.is("messaging.destination.name", "order.paid"));
        assert!(span.is("outbox.destination", "default"));
        assert!(span.is("outbox.tenant_id", &tenant.to_string()));
        assert_eq!(span.fields.get("error.type").map(String::as_str), error);
        let send = spans
            .iter()
            .find(|span| {
                of_message("outbox.send", span)
                    && span.parent.get("outbox.attempt").map(String::as_str) == Some(attempt)
            })
            .expect("a span of the send inside it");
        assert!(send.is("http.response.status_code", status), "{send:?}");
        let traceparent = receiver
            .requests()
            .iter()
            .find(|request| request.header("outbox-attempt") == Some(attempt))
            .and_then(|request| request.header("traceparent").map(str::to_owned))
            .expect("a trace");
        assert!(send.is("traceparent", &traceparent), "{send:?}");
    }
}

/// A subscriber that panics when the outcome of a message to this destination is recorded.
pub(crate) const PANICS: &str = "panics-at-its-outcome";

pub(crate) fn install() {
    Spans::install();
}

/// Records every span of this process.
#[derive(Clone, Default)]
struct Spans {
    /// By the registry's ids, which the registry reuses.
    open: Arc<Mutex<HashMap<u64, Span>>>,
    closed: Arc<Mutex<Vec<Span>>>,
}

#[derive(Debug, Clone)]
struct Span {
    name: &'static str,
    /// The fields of the parent span.
    parent: HashMap<String, String>,
    fields: HashMap<String, String>,
}

impl Span {
    fn is(&self, field: &str, value: &str) -> bool {
        self.fields.get(field).is_some_and(|found| found == value)
    }
}

impl Spans {
    fn install() -> Self {
        static INSTALLED: LazyLock<Spans> = LazyLock::new(|| {
            let spans = Spans::default();
            let registry = tracing_subscriber::registry().with(spans.clone());
            tracing::subscriber::set_global_default(registry).expect("no other subscriber");
            spans
        });
        INSTALLED.clone()
    }

    fn closed(&self) -> Vec<Span> {
        self.closed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn open(&self) -> MutexGuard<'_, HashMap<u64, Span>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Subscriber> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        let mut open = self.open();
        let parent = attributes.parent().and_then(|id| open.get(&id.into_u64()));
        let mut span = Span {
            name: attributes.metadata().name(),
            parent: parent.map(|span| span.fields.clone()).unwrap_or_default(),
            fields: HashMap::new(),
        };
        attributes.record(&mut span);
        open.insert(id.into_u64(), span);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut open = self.open();
        if let Some(span) = open.get_mut(&id.into_u64()) {
            values.record(span);
            assert!(!span.is("outbox.destination", PANICS), "{PANICS}");
        }
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        if let Some(span) = self.open().remove(&id.into_u64()) {
            let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
            closed.push(span);
        }
    }
}

impl Visit for Span {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let text = format!("{value:?}");
        self.fields.insert(field.name().to_owned(), text);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields
            .insert(field.name().to_owned(), value.to_owned());
    }
}
