//! Taking back, or putting off, what was enqueued and waits.

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::Outbox;
use crate::message::Due;
use crate::store::pinned::pinned;
use crate::store::write::waiting::{self, Changed, End, MessageRef, Reach};

impl Outbox {
    /// Cancels a message that waits, on the caller's connection and in its transaction: an order is
    /// cancelled, and its reminder must not go. If the transaction commits, the message is not sent.
    ///
    /// The message leaves the outbox. The ledger keeps that it ended `dead` for the reason `CANCELLED`; it is
    /// no dead letter, and its payload is not kept. Its idempotency key may be enqueued again. The next
    /// message of its ordering key goes on.
    ///
    /// A message that a relay is sending is left alone, and so is one whose row another transaction has
    /// locked: the answer is [`Answer::UnderWay`](crate::Answer::UnderWay), and nobody waits. After a
    /// fan-out each part is answered for: those that wait are cancelled, others are not.
    ///
    /// Works outside of a transaction too, and then commits by itself: it is one change of one message.
    ///
    /// By idempotency key this is a few short statements. A sequence that is not live any more is looked for
    /// in the ledger, without an index, for two seconds at most.
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
    ///             Answer::UnderWay | Answer::Delivered => println!("the reminder was, or is being, sent"),
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

    /// Lets a message that waits be due at another time, sooner or later, on the caller's connection and
    /// in its transaction. A time in the past is now. Attempts and expiry stay as they are.
    ///
    /// What is under way is left alone, as with [`cancel`](Self::cancel). The first message of an ordering
    /// key that is put off keeps the key's other messages waiting, as a delayed one does.
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
