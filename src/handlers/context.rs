//! The context of a handler: its message, its time limit, and database connections.

use std::cell::{Cell, RefCell, RefMut};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use diesel::PgConnection;
use metrics::Gauge;

use super::error::HandlerError;
use crate::dispatch::fence::Hold;
use crate::inbox::{self, Once};
use crate::lock::lock;
use crate::message::Message;
use crate::shows::shows;

/// Provides handlers with connections of the application.
pub(crate) type ConnectionPool = dyn Fn() -> Result<Pooled, HandlerError> + Send + Sync;

pub(crate) type Pooled = Box<dyn DerefMut<Target = PgConnection>>;

/// The pool, with a count of connections in use.
pub(crate) struct Connections {
    pool: Arc<ConnectionPool>,
    in_use: Gauge,
}

impl Connections {
    pub(crate) fn new(pool: Arc<ConnectionPool>, in_use: Gauge) -> Self {
        Self { pool, in_use }
    }

    fn get(&self) -> Result<Own, HandlerError> {
        let conn = (self.pool)()?;
        self.in_use.increment(1);
        let in_use = self.in_use.clone();
        Ok(Own { conn, in_use })
    }
}

/// A connection of the application.
struct Own {
    conn: Pooled,
    in_use: Gauge,
}

impl Drop for Own {
    fn drop(&mut self) {
        self.in_use.decrement(1);
    }
}

/// A connection that a test lends.
pub(super) type Lent<'a> = RefCell<&'a mut PgConnection>;

/// The source of connections.
#[derive(Clone, Copy)]
pub(super) enum ConnectionSource<'a> {
    Application(&'a Connections),
    Test(&'a Lent<'a>),
}

/// The context of a call: the message and the time limit. Handlers that work in the database get a [`PooledContext`].
///
/// ```
/// use diesel_outbox::handlers::{HandlerError, Handlers};
///
/// let handlers = Handlers::new().on_topic("report.wanted", |_, context| {
///     println!("{}, attempt {}", context.message().message_id, context.attempt());
///     if context.remaining().as_secs() < 60 {
///         return Err(HandlerError::retry("not enough time left"));
///     }
///     Ok(())
/// });
/// ```
pub struct Context<'a> {
    message: &'a Message,
    deadline: Option<Instant>,
    /// The lease under which the relay holds the message. Another claim of the message may replace it.
    hold: Option<&'a Mutex<Option<Hold>>>,
}

/// A [`Context`] with connections, for handlers added with
/// [`Handlers::on_pooled`](super::Handlers::on_pooled).
///
/// ```
/// use diesel::prelude::*;
/// use diesel_outbox::handlers::{HandlerError, Handlers};
/// use std::time::Duration;
///
/// let reports = Handlers::new().on_topic_pooled("year.ended", |_, context| {
///     for month in 1..=12 {
///         if context.remaining() < Duration::from_secs(1) {
///             return Err(HandlerError::retry("not enough time left for the whole year"));
///         }
///         let mut conn = context.connection()?;
///         diesel::sql_query("CALL refresh_report($1)")
///             .bind::<diesel::sql_types::Integer, _>(month)
///             .execute(&mut *conn)?;
///     }
///     println!("{} is done, attempt {}", context.message().message_id, context.attempt());
///     Ok(())
/// });
/// ```
pub struct PooledContext<'a> {
    context: Context<'a>,
    /// The inbox source of the messages: outbox and group.
    inbox: &'a str,
    source: ConnectionSource<'a>,
    /// Whether [`once`](Self::once) has succeeded.
    is_done: Cell<bool>,
}

impl<'a> PooledContext<'a> {
    pub(super) fn new(
        message: &'a Message,
        inbox: &'a str,
        (deadline, hold): (Instant, &'a Mutex<Option<Hold>>),
        connections: &'a Connections,
    ) -> Self {
        Self {
            context: Context {
                message,
                deadline: Some(deadline),
                hold: Some(hold),
            },
            inbox,
            source: ConnectionSource::Application(connections),
            is_done: Cell::new(false),
        }
    }

    /// A context for a test, which lends its own connection and sets no limit.
    pub(super) fn lent(message: &'a Message, inbox: &'a str, conn: &'a Lent<'a>) -> Self {
        Self {
            context: Context {
                message,
                deadline: None,
                hold: None,
            },
            inbox,
            source: ConnectionSource::Test(conn),
            is_done: Cell::new(false),
        }
    }
}

impl Context<'_> {
    /// The message: its ids, keys, headers and payload.
    pub fn message(&self) -> &Message {
        self.message
    }

    /// The number of this attempt, starting at 1.
    pub fn attempt(&self) -> u32 {
        self.message.attempts.saturating_add(1)
    }

    /// Whether the relay's lease still holds. `false`: another relay may be handling this message, or the next message of
    /// its ordering key, and the result of this call may not count. Ask before work that a later message must not
    /// precede, and return an error instead:
    ///
    /// ```
    /// use diesel_outbox::handlers::{HandlerError, Handlers};
    ///
    /// # fn render(_: &str) -> Vec<u8> { Vec::new() }
    /// # fn publish(_: Vec<u8>) {}
    /// let handlers = Handlers::new().on_topic("page.changed", |message, context| {
    ///     let page = render(&message.payload);
    ///     if !context.holds_lease() {
    ///         return Err(HandlerError::retry("the lease was lost"));
    ///     }
    ///     publish(page);
    ///     Ok(())
    /// });
    /// ```
    ///
    /// The lease may end just after the answer, so this makes an overlap rare, not impossible. Work in the database is
    /// protected by [`once`](PooledContext::once). In tests the lease always holds.
    pub fn holds_lease(&self) -> bool {
        let hold = self.hold.and_then(|hold| lock(hold).clone());
        hold.is_none_or(|hold| hold.lasts())
    }

    /// The time until the limit of the group. Zero: the limit has passed. The handler then continues, and its
    /// result still counts. Use this to return an error instead of running too long. Tests have no limit:
    /// [`Duration::MAX`].
    pub fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        })
    }
}

impl<'a> Deref for PooledContext<'a> {
    type Target = Context<'a>;

    fn deref(&self) -> &Context<'a> {
        &self.context
    }
}

impl<'a> PooledContext<'a> {
    /// A connection for the work of the handler: from the pool that the relay opens for its handlers, or from the source
    /// given to [`RelayBuilder::connections`](crate::RelayBuilder::connections). In tests
    /// ([`testing`](crate::testing)) this is the test's own connection.
    ///
    /// The connection is not in a transaction. To enqueue, use [`once`](Self::once) or
    /// `conn.transaction(…)`.
    ///
    /// # Errors
    /// [`HandlerError::Unavailable`] when the pool provides no connection: the message waits, and no attempt is counted.
    /// In tests, a retrying [`HandlerError`] when the only connection is already in use.
    pub fn connection(&self) -> Result<Connection<'a>, HandlerError> {
        match self.source {
            ConnectionSource::Application(all) => Ok(Connection(Inner::Own(all.get()?))),
            ConnectionSource::Test(lent) => match lent.try_borrow_mut() {
                Ok(conn) => Ok(Connection(Inner::Lent(conn))),
                Err(_) => Err(HandlerError::retry(
                    "the test's only connection is in use: drop the connection before taking it again",
                )),
            },
        }
    }

    /// Runs `handle` once for this message, in a transaction on a [`connection`](Self::connection). Its
    /// database work is done once, even if the handler is called again. The table `outbox_inbox` remembers
    /// the message.
    ///
    /// If the relay has lost its lease, another relay's call may handle the same message at the same time.
    /// One of the two commits, the other is a duplicate. `once` waits for a lock until the limit of the
    /// handler at most, and then returns its connection.
    ///
    /// Put all such work of a handler into a single `once`. The inbox remembers the message as a whole, so a
    /// second `once` in the same call would be skipped as a duplicate. It is therefore an error.
    ///
    /// ```no_run
    /// # use diesel::prelude::*;
    /// # use diesel_outbox::Event;
    /// # use diesel_outbox::handlers::Handlers;
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct MemberJoined { member_id: i64 }
    /// # impl Event for MemberJoined { const TOPIC: &'static str = "member.joined"; }
    /// let handlers = Handlers::new().on_pooled::<MemberJoined>(|event, context| {
    ///     context.once(|conn| {
    ///         diesel::sql_query("UPDATE clubs SET members = members + 1").execute(conn)?;
    ///         Ok(())
    ///     })?;
    ///     Ok(())
    /// });
    /// ```
    ///
    /// # Errors
    /// The error of `handle`, after a rollback, or a [`HandlerError`] of the database.
    pub fn once<T>(
        &self,
        handle: impl FnOnce(&mut PgConnection) -> Result<T, HandlerError>,
    ) -> Result<Once<T>, HandlerError> {
        if self.is_done.get() {
            return Err(HandlerError::retry(
                "the handler called context.once a second time: put all work into one call",
            ));
        }
        let mut conn = self.connection()?;
        let patience = self.context.deadline.map(|_| self.remaining());
        let id = self.context.message.message_id;
        let once = inbox::once_within(&mut conn, self.inbox, id, patience, handle)?;
        self.is_done.set(true);
        Ok(once)
    }
}

shows!(PooledContext<'_>: message, attempt = [attempt()]);

shows!(Context<'_>: message, attempt = [attempt()]);

/// A connection of the application. Returned to the pool when dropped. Dereferences to `PgConnection`.
pub struct Connection<'a>(Inner<'a>);

enum Inner<'a> {
    Own(Own),
    Lent(RefMut<'a, &'a mut PgConnection>),
}

impl Deref for Connection<'_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match &self.0 {
            Inner::Own(own) => &own.conn,
            Inner::Lent(conn) => conn,
        }
    }
}

impl DerefMut for Connection<'_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match &mut self.0 {
            Inner::Own(own) => &mut own.conn,
            Inner::Lent(conn) => conn,
        }
    }
}

shows!(Connection<'_>: );
