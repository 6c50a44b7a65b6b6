//! A test of an endpoint: one immediate request, and the response.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use diesel::PgConnection;
use uuid::Uuid;

use crate::config::{Config, SigningSecret};
use crate::dispatch::{Dispatcher, Failure, Outcome, Response, caught};
use crate::endpoints::endpoint::Endpoint;
use crate::endpoints::public_error::public_error;
use crate::endpoints::sql::rows::{self as store, AsSeen};
use crate::endpoints::{EndpointError, Endpoints};
use crate::engine::send::sql::pause;
use crate::http::EndpointClients;
use crate::message::Message;
use crate::shows::shows;
use crate::status::ReasonCode;

/// The topic of a test.
const TOPIC: &str = "outbox.test";

/// A test that is ready to be sent: see [`Endpoints::test`].
#[must_use = "only `send` sends the test"]
pub struct EndpointTest {
    pub(super) dispatcher: Arc<dyn Dispatcher>,
    pub(super) message: Message,
    pub(super) updated_at: Option<SystemTime>,
}

/// The result of a test.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TestAnswer {
    /// The id of the test event, which the receiver sees as `webhook-id`.
    pub message_id: Uuid,
    /// Whether the receiver accepted the test, as it would accept a message.
    pub went_well: bool,
    /// The status of the response, if there was a response.
    pub http_status: Option<u16>,
    /// The duration of the send.
    pub took: Duration,
    /// The beginning of the response. Show it to customers only if `OUTBOX_ENDPOINT_PUBLIC_ONLY` is true: otherwise
    /// an internal server may have responded.
    pub body: Option<String>,
    /// Why the test failed.
    pub reason: Option<ReasonCode>,
    /// The reason in words, for operators. It may reveal details of the internal network: show customers
    /// [`public_error`](Self::public_error).
    pub error: Option<String>,
    name: String,
    updated_at: Option<SystemTime>,
}

impl Endpoints<'_> {
    /// Prepares a test: an event `outbox.test`, or [another](EndpointTest::event), which is signed and formatted like the endpoint's messages, but not
    /// stored in the outbox. [`send`](EndpointTest::send) sends the test immediately, even if the endpoint is
    /// disabled, and needs no connection. `None`: the endpoint does not exist.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let test = outbox.endpoints().test(&mut conn, "acme", &config)?;
    /// // The response may take seconds: release the connection first.
    /// drop(conn);
    /// if let Some(answer) = test.map(|test| test.send()) {
    ///     println!("{:?} after {} ms", answer.http_status, answer.took.as_millis());
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// - [`EndpointError::Refused`]: a relay with these settings would not send to the endpoint.
    /// - [`EndpointError::Invalid`]: no relay can send to the endpoint.
    /// - [`EndpointError::Database`]: the database failed. [`EndpointError::public_error`] is the text for customers.
    pub fn test(
        &self,
        conn: &mut PgConnection,
        name: &str,
        config: &Config,
    ) -> Result<Option<EndpointTest>, EndpointError> {
        let ready = self.ready(conn, name, config)?;
        ready
            .map(|(row, secrets, config)| EndpointTest::new(&row, secrets, &config))
            .transpose()
    }

    /// Records the result of a [test](Self::test). If the receiver has accepted it, the circuit breaker is closed, and waiting
    /// messages are sent at once. `true`: the breaker was open. Other pauses stay. A test of an endpoint that has changed since
    /// says nothing.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let endpoints = outbox.endpoints();
    /// if let Some(test) = endpoints.test(&mut conn, "acme", &config)? {
    ///     let answer = test.send();
    ///     endpoints.record_test(&mut conn, &answer)?;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the database fails.
    pub fn record_test(
        &self,
        conn: &mut PgConnection,
        answer: &TestAnswer,
    ) -> Result<bool, EndpointError> {
        if !answer.went_well {
            return Ok(false);
        }
        self.pinned(conn, |conn, outbox| {
            let seen = answer.seen();
            let is_same = store::hold_as_seen(conn, outbox, seen)?;
            Ok::<_, diesel::result::Error>(
                is_same && pause::close_breaker(conn, outbox, seen.name)?,
            )
        })
    }
}

impl TestAnswer {
    /// The row that was tested.
    pub(super) fn seen(&self) -> AsSeen<'_> {
        AsSeen {
            name: &self.name,
            updated_at: self.updated_at,
        }
    }

    /// Why the test failed, in words that reveal nothing of the internal network, like
    /// [`Delivery::public_error`](crate::endpoints::Delivery::public_error).
    ///
    /// ```
    /// use diesel_outbox::endpoints::TestAnswer;
    ///
    /// fn describe(answer: &TestAnswer) -> String {
    ///     match (answer.http_status, answer.public_error()) {
    ///         (_, None) => "your server accepted the test".to_owned(),
    ///         (Some(status), Some(error)) => format!("{status}: {error}"),
    ///         (None, Some(error)) => error,
    ///     }
    /// }
    /// ```
    pub fn public_error(&self) -> Option<String> {
        let reason = self.reason?;
        Some(public_error(Some(reason), self.error.as_deref()))
    }
}

impl EndpointTest {
    /// Prepares a test of the endpoint, as a relay with these settings would send to it.
    pub(super) fn new(
        one: &Endpoint,
        secrets: Vec<SigningSecret>,
        config: &Config,
    ) -> Result<Self, EndpointError> {
        let config = config.for_endpoints();
        let destination = one.destination(secrets)?;
        let dispatcher = EndpointClients::new(config).dispatcher(destination);
        let dispatcher = dispatcher?;
        let payload = serde_json::json!({ "destination": one.name });
        Ok(Self {
            dispatcher,
            message: Message::unstored(TOPIC, &one.name, one.tenant_id, &payload),
            updated_at: one.updated_at,
        })
    }

    /// Sends an event of this topic, such as the example of a catalogue, instead of `outbox.test`.
    ///
    /// ```
    /// use diesel_outbox::endpoints::EndpointTest;
    ///
    /// fn paid(test: EndpointTest) -> EndpointTest {
    ///     test.event("order.paid", &serde_json::json!({ "order_id": 1, "cents": 4200 }))
    /// }
    /// ```
    pub fn event(mut self, topic: &str, payload: &serde_json::Value) -> Self {
        let (to, tenant) = (self.message.destination, self.message.tenant_id);
        self.message = Message::unstored(topic, &to, tenant, payload);
        self
    }

    /// Sends the test, and waits for the response, with the same timeout as for a message.
    ///
    /// ```
    /// use diesel_outbox::endpoints::EndpointTest;
    ///
    /// fn says(test: EndpointTest) -> String {
    ///     let answer = test.send();
    ///     format!("responded with {:?} after {:?}", answer.http_status, answer.took)
    /// }
    /// ```
    pub fn send(self) -> TestAnswer {
        let Self {
            dispatcher,
            message,
            updated_at,
        } = self;
        let began = Instant::now();
        let outcome = caught(&message, || dispatcher.dispatch(&message));
        let took = began.elapsed();
        let (response, failure) = match outcome {
            Ok(Outcome::Delivered(response)) => (response, None),
            Ok(Outcome::Retry(failure) | Outcome::Wait(failure) | Outcome::Dead(failure))
            | Err(failure) => {
                let Failure {
                    code,
                    error,
                    response,
                    ..
                } = failure;
                (response, Some((code, error)))
            }
        };
        let Response { status, body } = response;
        let (reason, error) = failure.unzip();
        TestAnswer {
            message_id: message.message_id,
            went_well: reason.is_none(),
            http_status: status,
            took,
            body,
            reason,
            error,
            name: message.destination,
            updated_at,
        }
    }
}

shows!(EndpointTest: destination = [message.destination]);
