//! Cancels and reschedules waiting messages.

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::Outbox;
use super::sql::waiting::{self, Changed, End, MessageRef, Reach};
use crate::message::Due;
use crate::sql::pinned::pinned;

impl Outbox {
    /// Cancels a waiting message, on the caller's connection and in the caller's transaction. If the
    /// transaction commits, the message is not sent. Use it, for example, for the reminder of an order that
    /// is cancelled.
    ///
    /// The message leaves the outbox. The ledger records the message as `dead` with the reason `CANCELLED`,
    /// without its payload; there is no dead letter. The idempotency key can be enqueued again. The next
    /// message of the ordering key no longer waits for the cancelled message.
    ///
    /// A message stays unchanged if a relay is sending it, or if another transaction has locked its row. The
    /// result is then [`Answer::InFlight`](crate::Answer::InFlight), without waiting. After a fan-out, there is
    /// one result for each part: waiting parts are cancelled, other parts are not.
    ///
    /// Outside a transaction, the call commits on its own.
    ///
    /// By idempotency key, the call takes a few short statements. A sequence that is no longer live is searched
    /// in the ledger, without an index, for at most 2 s.
    ///
    /// The role needs the rights of `outbox_canceller` (`diesel-outbox migrate --print --roles`).
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Answer, MessageRef, Outbox};
    ///
    /// fn cancel_order(conn: &mut PgConnection, outbox: &Outbox, order: i64) -> QueryResult<()> {
    ///     conn.transaction(|conn| {
    ///         // … the change of the application's own tables …
    ///         let reminder = MessageRef::key(format!("order-{order}-reminder"));
    ///         match outbox.cancel(conn, reminder)?.answer() {
    ///             Answer::Done | Answer::Cancelled | Answer::Unknown => {}
    ///             Answer::InFlight | Answer::Delivered => println!("the reminder is being sent or was sent"),
    ///             other => println!("the reminder: {other:?}"),
    ///         }
    ///         Ok(())
    ///     })
    /// }
    /// ```
    ///
    /// # Errors
    /// The database refused or failed. The caller's transaction is aborted.
    pub fn cancel(
        &self,
        conn: &mut PgConnection,
        which: impl Into<MessageRef>,
    ) -> QueryResult<Changed> {
        let which = which.into();
        let (end, reach) = (End::Cancelled, Reach::Waiting);
        pinned(conn, &self.name, |conn, name| {
            waiting::end(conn, name, &which, end, None, reach)
        })
    }

    /// Changes when a waiting message is due, on the caller's connection and in the caller's transaction. The
    /// new time may be earlier or later. A time in the past means now. Attempts and expiry stay unchanged.
    ///
    /// A message in flight stays unchanged, as with [`cancel`](Self::cancel). If the first message of an
    /// ordering key is put off, the other messages of the key wait for it, as for a delayed message.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Due, MessageRef, Outbox};
    /// use std::time::Duration;
    ///
    /// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let reminder = MessageRef::key("order-42-reminder");
    /// let due = Due::After(Duration::from_secs(3 * 24 * 3600));
    /// let changed = Outbox::default().reschedule(&mut conn, reminder, due)?;
    /// println!("{:?}", changed.answer());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The database refused or failed. The caller's transaction is aborted.
    pub fn reschedule(
        &self,
        conn: &mut PgConnection,
        which: impl Into<MessageRef>,
        due: Due,
    ) -> QueryResult<Changed> {
        let which = which.into();
        pinned(conn, &self.name, |conn, name| {
            waiting::reschedule(conn, name, &which, due)
        })
    }
}
