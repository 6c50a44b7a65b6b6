//! With the `tracing` feature, each sent message is a span with a child span for the send. Without the feature, no
//! spans exist. The names follow OpenTelemetry's messaging conventions.

#[cfg(feature = "tracing")]
mod on {
    use std::sync::Arc;

    use crate::dispatch::{Failure, Outcome};
    use crate::message::Message;

    /// The spans of one request.
    pub(crate) struct Spans {
        messages: Vec<tracing::Span>,
        send: tracing::Span,
    }

    impl Spans {
        pub(crate) fn of(messages: &[Message], destination: &Arc<str>) -> Self {
            let spans: Vec<tracing::Span> = messages
                .iter()
                .map(|message| of_message(message, destination))
                .collect();
            let send = tracing::info_span!(
                parent: spans.first().and_then(tracing::Span::id),
                "outbox.send",
                messaging.batch.message_count = messages.len(),
                http.response.status_code = tracing::field::Empty,
                traceparent = tracing::field::Empty,
            );
            for other in spans.iter().skip(1) {
                send.follows_from(other);
            }
            Self {
                messages: spans,
                send,
            }
        }

        /// Runs a send inside its span.
        pub(crate) fn within<T>(&self, send: impl FnOnce() -> T) -> T {
            self.send.in_scope(send)
        }

        /// Records the outcome of each message.
        pub(crate) fn end(self, outcomes: &[Outcome]) {
            for (span, outcome) in self.messages.iter().zip(outcomes) {
                let (word, failure) = read(outcome);
                span.record("outcome", word);
                let status = match (outcome, failure) {
                    (Outcome::Delivered(response), _) => response.status,
                    (_, Some(failure)) => failure.response.status,
                    (_, None) => None,
                };
                if let Some(failure) = failure {
                    span.record("error.type", failure.code.as_str());
                }
                if let Some(status) = status {
                    self.send.record("http.response.status_code", status);
                }
            }
        }
    }

    /// The current span of a thread, which another thread continues.
    pub(crate) struct Span(tracing::Span);

    impl Span {
        pub(crate) fn current() -> Self {
            Self(tracing::Span::current())
        }

        pub(crate) fn within<T>(&self, run: impl FnOnce() -> T) -> T {
            self.0.in_scope(run)
        }
    }

    fn of_message(message: &Message, destination: &Arc<str>) -> tracing::Span {
        tracing::info_span!(
            "outbox.message",
            messaging.system = "diesel-outbox",
            messaging.operation.name = "send",
            messaging.destination.name = message.topic,
            messaging.message.id = %message.message_id,
            outbox.destination = &**destination,
            outbox.tenant_id = message.tenant_id.map(tracing::field::display),
            outbox.sequence = message.sequence.0,
            outbox.attempt = message.attempts.saturating_add(1),
            outcome = tracing::field::Empty,
            error.type = tracing::field::Empty,
        )
    }

    fn read(outcome: &Outcome) -> (&'static str, Option<&Failure>) {
        match outcome {
            Outcome::Delivered(_) => ("delivered", None),
            Outcome::Retry(failure) => ("retry", Some(failure)),
            Outcome::Wait(failure) => ("wait", Some(failure)),
            Outcome::Dead(failure) => ("dead", Some(failure)),
        }
    }
}

#[cfg(not(feature = "tracing"))]
mod off {
    use std::sync::Arc;

    use crate::dispatch::Outcome;
    use crate::message::Message;

    pub(crate) struct Spans;

    impl Spans {
        pub(crate) fn of(_: &[Message], _: &Arc<str>) -> Self {
            Self
        }

        #[allow(clippy::unused_self, reason = "same signature as with the feature")]
        pub(crate) fn within<T>(&self, send: impl FnOnce() -> T) -> T {
            send()
        }

        #[allow(clippy::unused_self, reason = "same signature as with the feature")]
        pub(crate) fn end(self, _: &[Outcome]) {}
    }

    pub(crate) struct Span;

    impl Span {
        pub(crate) fn current() -> Self {
            Self
        }

        #[allow(clippy::unused_self, reason = "same signature as with the feature")]
        pub(crate) fn within<T>(&self, run: impl FnOnce() -> T) -> T {
            run()
        }
    }
}

#[cfg(not(feature = "tracing"))]
pub(crate) use off::{Span, Spans};
#[cfg(feature = "tracing")]
pub(crate) use on::{Span, Spans};
