//! The deliveries of an endpoint, for its owner.

use std::time::Duration;

use diesel::PgConnection;
use uuid::Uuid;

use crate::endpoints::{
    Deliveries, DeliveryCount, DeliveryDetails, DeliveryFilter, EndpointError, Endpoints,
};
use crate::operate::sql::deliveries;
use crate::operate::sql::replay::SentAgain;

/// The operator in the history of a message that is sent again.
const SENT_AGAIN_BY: &str = "send again";

impl Endpoints<'_> {
    /// The messages of an endpoint, newest first, at most `limit`: waiting messages, dead letters and deliveries.
    /// Discarded and cancelled messages are not included. A new message is included once a relay has found that the
    /// message is for this endpoint.
    ///
    /// Indexes find waiting messages and dead letters. Deliveries are searched in the ledger from its end, for at most
    /// 2 s: an index by endpoint would make every delivery more expensive. So a page may have few rows if the
    /// endpoint gets few messages and others get very many. [`Deliveries::next`] continues the search.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    /// use diesel_outbox::endpoints::DeliveryFilter;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let mut filter = DeliveryFilter::default();
    /// loop {
    ///     let page = outbox.endpoints().deliveries(&mut conn, "acme", &filter, 50)?;
    ///     for delivery in &page.rows {
    ///         println!("{} {} {}", delivery.created_at, delivery.topic, delivery.state);
    ///     }
    ///     if page.next.is_none() {
    ///         break;
    ///     }
    ///     filter = filter.after(page.next);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the database fails.
    pub fn deliveries(
        &self,
        conn: &mut PgConnection,
        name: &str,
        filter: &DeliveryFilter,
        limit: usize,
    ) -> Result<Deliveries, EndpointError> {
        self.pinned(conn, |conn, outbox| {
            deliveries::deliveries(conn, outbox, self.which(name), filter, limit)
        })
    }

    /// One delivery of an endpoint, with its content and its failed attempts. `None`: the endpoint has no delivery,
    /// dead letter or waiting message with this message id. A message that was never tried is searched for at most two
    /// seconds.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    ///
    /// # let message_id = uuid::Uuid::nil();
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// if let Some(found) = outbox.endpoints().delivery(&mut conn, "acme", message_id)? {
    ///     println!("{:?} after {} failures", found.delivery.state, found.failed.len());
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the database fails.
    pub fn delivery(
        &self,
        conn: &mut PgConnection,
        name: &str,
        message_id: Uuid,
    ) -> Result<Option<DeliveryDetails>, EndpointError> {
        self.pinned(conn, |conn, outbox| {
            deliveries::details(conn, outbox, self.which(name), message_id)
        })
    }

    /// How many messages of an endpoint were delivered and how many were dead-lettered, in each of `windows` time
    /// spans of length `window`. The oldest span is first; the last span ends now. `None`: 2 s were not enough to count
    /// the span.
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let minute = Duration::from_secs(60);
    /// for count in outbox.endpoints().delivery_counts(&mut conn, "acme", minute, 60)? {
    ///     match count {
    ///         Some(count) => println!("{} delivered, {} dead", count.delivered, count.dead),
    ///         None => println!("not known"),
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the database fails.
    pub fn delivery_counts(
        &self,
        conn: &mut PgConnection,
        name: &str,
        window: Duration,
        windows: usize,
    ) -> Result<Vec<Option<DeliveryCount>>, EndpointError> {
        self.pinned(conn, |conn, outbox| {
            deliveries::counts(conn, outbox, self.which(name), window, windows)
        })
    }

    /// Sends a delivered message or a dead letter once more, to this endpoint only. The message keeps its id, so a
    /// receiver that detects duplicates ignores the message if it has already handled it.
    ///
    /// If the message already waits to be sent again, the call changes nothing and returns `true`. `false`: the
    /// endpoint does not exist, or it has no such delivery or dead letter.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    /// use diesel_outbox::endpoints::EndpointError;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// // From a form: the `webhook-id` that the customer asks about.
    /// let message_id = "0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c".parse()?;
    /// match outbox.endpoints().send_again(&mut conn, "acme", message_id) {
    ///     Ok(true) => println!("the message is on its way"),
    ///     Ok(false) => println!("there is no such delivery"),
    ///     Err(EndpointError::PayloadNotKept { .. }) => println!("we did not keep the message"),
    ///     Err(error) => Err(error)?,
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// - [`EndpointError::PayloadNotKept`]: the message was delivered, and the ledger keeps payloads only with
    ///   `OUTBOX_LEDGER_PAYLOAD`.
    /// - [`EndpointError::Database`]: the database failed.
    pub fn send_again(
        &self,
        conn: &mut PgConnection,
        name: &str,
        message_id: Uuid,
    ) -> Result<bool, EndpointError> {
        self.send_again_by(conn, name, message_id, SENT_AGAIN_BY)
    }

    /// The same; `by`: what the history says of who did.
    pub(crate) fn send_again_by(
        &self,
        conn: &mut PgConnection,
        name: &str,
        message_id: Uuid,
        by: &str,
    ) -> Result<bool, EndpointError> {
        let sent = self.pinned(conn, |conn, outbox| {
            deliveries::send_again(conn, outbox, self.which(name), message_id, by)
        })?;
        match sent {
            SentAgain::Yes => Ok(true),
            SentAgain::NotFound => Ok(false),
            SentAgain::NotKept => Err(EndpointError::PayloadNotKept { message_id }),
        }
    }
}
