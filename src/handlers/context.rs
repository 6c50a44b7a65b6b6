//! What a handler knows beside the event, and what it works with.

use std::cell::{Cell, RefCell, RefMut};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use metrics::Gauge;

use super::error::HandlerError;
use crate::inbox::{self, Once};
use crate::message::Message;

/// Gives connections to handlers, from where the application takes them.
pub(crate) type Pool = dyn Fn() -> Result<Pooled, HandlerError> + Send + Sync;

pub(crate) type Pooled = Box<dyn DerefMut<Target = PgConnection>>;

/// The same, counted.
pub(crate) struct Connections {
    pool: Arc<Pool>,
    in_use: Gauge,
}

impl Connections {
    pub(crate) fn new(pool: Arc<Pool>, in_use: Gauge) -> Self {
        Self { pool, in_use }
    }

    fn get(&self) -> Result<Own, HandlerError> {
        let conn = (self.pool)()?;
        self.in_use.increment(1);
        let in_use = self.in_use.clone();
        Ok(Own { conn, in_use })
    }
}

/// A connection of the application's.
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

/// Where connections come from.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    Application(&'a Connections),
    Test(&'a Lent<'a>),
}

/// What a handler knows of its message. Handlers that work in the database get a [`PooledContext`].
///
/// ```
/// use diesel_outbox::{HandlerError, Handlers};
///
/// let handlers = Handlers::new().on_topic("report.wanted", |_, context| {
///     println!("{}, attempt {}", context.message().message_id, context.attempt());
///     if context.remaining().as_secs() < 60 {
///         return Err(HandlerError::retry("too little time is left"));
///     }
///     Ok(())
/// });
/// ```
pub struct Context<'a> {
    message: &'a Message,
    deadline: Option<Instant>,
}

/// A [`Context`] with connections, for handlers that are registered by
/// [`Handlers::on_pooled`](super::Handlers::on_pooled).
///
/// ```
/// use diesel::prelude::*;
/// use diesel_outbox::{HandlerError, Handlers};
/// use std::time::Duration;
///
/// let reports = Handlers::new().on_topic_pooled("year.ended", |_, context| {
///     for month in 1..=12 {
///         if context.remaining() < Duration::from_secs(1) {
///             return Err(HandlerError::retry("no time is left for the whole year"));
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
    /// Whose messages its inbox has: the outbox and the group.
    inbox: &'a str,
    source: Source<'a>,
    /// [`once`](Self::once) has come to a good end.
    is_done: Cell<bool>,
}

impl<'a> PooledContext<'a> {
    pub(super) fn new(
        message: &'a Message,
        inbox: &'a str,
        deadline: Instant,
        connections: &'a Connections,
    ) -> Self {
        Self {
            context: Context {
                message,
                deadline: Some(deadline),
            },
            inbox,
            source: Source::Application(connections),
            is_done: Cell::new(false),
        }
    }

    /// One for a test, which lends its own connection and sets no limit.
    pub(super) fn lent(message: &'a Message, inbox: &'a str, conn: &'a Lent<'a>) -> Self {
        Self {
            context: Context {
                message,
                deadline: None,
            },
            inbox,
            source: Source::Test(conn),
            is_done: Cell::new(false),
        }
    }
}

impl Context<'_> {
    /// The message: its ids, keys, headers and payload.
    pub fn message(&self) -> &Message {
        self.message
    }

    /// Which attempt this is: 1, 2, …
    pub fn attempt(&self) -> u32 {
        self.message.attempts.saturating_add(1)
    }

    /// What is left until the group's limit; zero: the limit is over. Nothing cuts the handler off then, and
    /// its result counts all the same: it is for handlers that would rather return an error than run on. In
    /// tests there is no limit: it is [`Duration::MAX`].
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
    /// A connection for the handler's own work, from where
    /// [`RelayBuilder::connections`](crate::RelayBuilder::connections) takes them. In tests
    /// ([`testing`](crate::testing)) it is the test's own connection.
    ///
    /// It is not in a transaction. A handler that enqueues does so in [`once`](Self::once), or in
    /// `conn.transaction(…)`.
    ///
    /// # Errors
    /// A [`HandlerError`], which tries again, when the pool gives none. In tests also when the last one has not been given back yet: there is only one.
    pub fn connection(&self) -> Result<Connection<'a>, HandlerError> {
        match self.source {
            Source::Application(all) => Ok(Connection(Inner::Own(all.get()?))),
            Source::Test(lent) => match lent.try_borrow_mut() {
                Ok(conn) => Ok(Connection(Inner::Lent(conn))),
                Err(_) => Err(HandlerError::retry(
                    "the test's only connection is in use: give it back before taking it again",
                )),
            },
        }
    }

    /// Runs `handle` in a transaction on a [`connection`](Self::connection), once for this message: what
    /// it does in the database is done once, also where the handler is called again. The table
    /// `outbox_inbox` remembers it.
    ///
    /// Where the relay has lost its lease, another relay's call may be at work on the same message. One of
    /// the two commits; the other one is a duplicate. `once` waits for a lock no longer than until the
    /// handler's limit, and then gives its connection back.
    ///
    /// All that a handler does once stands in one `once`: what it did is remembered as a whole, so a second
    /// one in the same call would be taken for done, and is an error.
    ///
    /// ```no_run
    /// # use diesel::prelude::*;
    /// # use diesel_outbox::{Event, Handlers};
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
    /// That of `handle`, which is rolled back; or a [`HandlerError`] of the database.
    pub fn once<T>(
        &self,
        handle: impl FnOnce(&mut PgConnection) -> Result<T, HandlerError>,
    ) -> Result<Once<T>, HandlerError> {
        if self.is_done.get() {
            return Err(HandlerError::retry(
                "the handler calls context.once a second time: all of its work belongs into one",
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

impl fmt::Debug for PooledContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PooledContext")
            .field("message", &self.message)
            .field("attempt", &self.attempt())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("message", &self.message)
            .field("attempt", &self.attempt())
            .finish_non_exhaustive()
    }
}

/// A connection of the application's, given back when dropped. Use it as `&mut PgConnection`.
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

impl fmt::Debug for Connection<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}
