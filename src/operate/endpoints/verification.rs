//! Verifying an endpoint at once.

use std::time::{Duration, Instant, SystemTime};

use diesel::PgConnection;

use crate::config::{Config, ConfigError, Rate, Verification};
use crate::dispatch::NotVerified;
use crate::endpoints::public_error::public_error;
use crate::endpoints::sql::rows::AsSeen;
use crate::endpoints::sql::verification::{self, NextTry};
use crate::endpoints::{EndpointError, Endpoints};
use crate::http::{EndpointClients, EndpointVerifier};
use crate::shows::shows;
use crate::status::ReasonCode;

/// A try to verify an endpoint that is ready to be sent: see [`Endpoints::verify`].
#[must_use = "only `ask` sends the request"]
pub struct EndpointCheck {
    verifier: EndpointVerifier,
    name: String,
    updated_at: Option<SystemTime>,
}

/// The answer of an endpoint: see [`Endpoints::record`].
#[derive(Debug)]
#[non_exhaustive]
pub struct EndpointAnswer {
    /// Whether the endpoint has shown that it wants messages.
    pub is_verified: bool,
    /// The rate limit that the endpoint asks for.
    pub allowed_rate: Option<Rate>,
    /// The duration of the request.
    pub took: Duration,
    /// Why the endpoint is not verified.
    pub reason: Option<ReasonCode>,
    /// The reason in words, for operators. Show customers [`public_error`](Self::public_error).
    pub error: Option<String>,
    name: String,
    updated_at: Option<SystemTime>,
    failed: Option<NotVerified>,
}

impl EndpointCheck {
    /// Sends the request, and waits for the response, with the same timeout as for a message.
    ///
    /// ```
    /// use diesel_outbox::endpoints::EndpointCheck;
    ///
    /// fn wants_messages(check: EndpointCheck) -> bool {
    ///     check.ask().is_verified
    /// }
    /// ```
    pub fn ask(self) -> EndpointAnswer {
        let began = Instant::now();
        let answer = self.verifier.ask();
        let (allowed_rate, failed) = match answer {
            Ok(rate) => (rate, None),
            Err(failed) => (None, Some(failed)),
        };
        let failure = failed.as_ref().map(|one| &one.failure);
        EndpointAnswer {
            is_verified: failed.is_none(),
            allowed_rate,
            took: began.elapsed(),
            reason: failure.map(|failure| failure.code),
            error: failure.map(|failure| failure.error.clone()),
            name: self.name,
            updated_at: self.updated_at,
            failed,
        }
    }
}

impl EndpointAnswer {
    /// Why the endpoint is not verified, in words for customers.
    ///
    /// ```
    /// use diesel_outbox::endpoints::EndpointAnswer;
    ///
    /// fn says(answer: &EndpointAnswer) -> String {
    ///     answer.public_error().unwrap_or_else(|| "your endpoint is verified".to_owned())
    /// }
    /// ```
    pub fn public_error(&self) -> Option<String> {
        let reason = self.reason?;
        Some(public_error(Some(reason), self.error.as_deref()))
    }
}

impl Endpoints<'_> {
    /// Prepares a try to verify an endpoint now. Relays wait until it must have ended. `None`: the
    /// endpoint does not exist.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let endpoints = outbox.endpoints();
    /// if let Some(check) = endpoints.verify(&mut conn, "acme", &config)? {
    ///     // Outside of a transaction: the response may take seconds.
    ///     let answer = check.ask();
    ///     endpoints.record(&mut conn, &answer)?;
    ///     println!("{}", answer.public_error().unwrap_or("verified".to_owned()));
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// - [`EndpointError::Refused`]: a relay with these settings would not send to the endpoint.
    /// - [`EndpointError::Invalid`]: no relay can send to the endpoint, or its `verification` is none.
    /// - [`EndpointError::Database`]: the database failed.
    pub fn verify(
        &self,
        conn: &mut PgConnection,
        name: &str,
        config: &Config,
    ) -> Result<Option<EndpointCheck>, EndpointError> {
        let Some((row, secrets, config)) = self.ready(conn, name, config)? else {
            return Ok(None);
        };
        if row.verification == Verification::None {
            let key = format!("destinations.{name}.verification");
            return Err(ConfigError::new(key, "is none: there is nothing to verify").into());
        }
        let destination = row.destination(secrets)?;
        let clients = EndpointClients::new(config.for_endpoints());
        let verifier = clients.verifier(destination, row.tenant_id)?;
        let seen = AsSeen {
            name,
            updated_at: row.updated_at,
        };
        let is_there = self.pinned(conn, |conn, outbox| {
            verification::hold(conn, outbox, seen, verifier.timeout())
        })?;
        Ok(is_there.then_some(EndpointCheck {
            verifier,
            name: row.name,
            updated_at: row.updated_at,
        }))
    }

    /// Records the answer of an endpoint. If it is verified, its messages are sent; a verified endpoint stays so, whatever
    /// it answers. `false`: the endpoint has changed meanwhile, or was verified, and nothing was recorded.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let endpoints = outbox.endpoints().with_keys(&config.secret_keys);
    /// if let Some(check) = endpoints.verify(&mut conn, "acme", &config)? {
    ///     endpoints.record(&mut conn, &check.ask())?;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the database fails.
    pub fn record(
        &self,
        conn: &mut PgConnection,
        answer: &EndpointAnswer,
    ) -> Result<bool, EndpointError> {
        let seen = AsSeen {
            name: &answer.name,
            updated_at: answer.updated_at,
        };
        self.pinned(conn, |conn, outbox| match &answer.failed {
            None => verification::verified(conn, outbox, seen, answer.allowed_rate),
            Some(why) => {
                let why = (why.text(), why.is_final);
                let next = verification::failed(conn, outbox, seen, (&why.0, why.1), false)?;
                Ok(!matches!(next, NextTry::Changed))
            }
        })
    }
}

shows!(EndpointCheck: destination = [name]);
