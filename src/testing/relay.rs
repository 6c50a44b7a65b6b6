//! A relay that works in the test's own thread.

use std::fmt;

use diesel::PgConnection;
use diesel::result::QueryResult;

use crate::message::Message;
use crate::relay::{ByHand, Ended, RelayBuilder, StartError};
use crate::status::{ReasonCode, Status};

/// A relay without threads: it works when it is told to, on the test's connection.
///
/// It is made from what the application gives its real relay: routes, handlers and dispatchers are the
/// same, and so is what becomes of a message. Handlers run on the test's thread, and
/// [`PooledContext::connection`](crate::handlers::PooledContext::connection) is the test's connection.
///
/// What it does not do: it takes no message that another relay holds, has no time limit for handlers,
/// does not look at pauses, rates and circuit breakers, and sends batches one by one. A destination with
/// a URL gets real requests: give it a [`RecordingDispatcher`](super::RecordingDispatcher) instead.
pub struct TestRelay {
    by_hand: ByHand,
}

impl TestRelay {
    /// One with these settings: [`Relay::in_test`](crate::Relay::in_test), or the application's own.
    ///
    /// # Errors
    /// As of [`RelayBuilder::start`], as far as settings are concerned.
    pub fn new(builder: RelayBuilder) -> Result<Self, StartError> {
        Ok(Self {
            by_hand: ByHand::new(builder)?,
        })
    }

    /// Takes every message that is due, in order of its sequence, each once: one that fails waits for
    /// its next attempt, until [`advance`](super::advance) brings that near.
    ///
    /// # Errors
    /// The database's.
    pub fn drain(&self, conn: &mut PgConnection) -> QueryResult<Drained> {
        Ok(Drained::of(self.by_hand.drain(conn)?))
    }
}

impl fmt::Debug for TestRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestRelay").finish_non_exhaustive()
    }
}

/// What became of the messages of one [`TestRelay::drain`].
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Drained {
    /// Those that are delivered, or were before.
    pub delivered: Vec<Message>,
    /// Those that are tried again, and why.
    pub retried: Vec<NotDelivered>,
    /// Those that are dead, and why.
    pub dead: Vec<NotDelivered>,
    /// Those that no route, handler or destination serves: they wait, and no attempt was counted.
    pub unrouted: Vec<NotDelivered>,
}

/// A message that was not delivered.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NotDelivered {
    /// The message.
    pub message: Message,
    /// Why, as tables and logs name it.
    pub reason: ReasonCode,
    /// Why, in words.
    pub error: String,
}

impl Drained {
    fn of(ended: Vec<Ended>) -> Self {
        let mut drained = Self::default();
        for Ended {
            message,
            status,
            failure,
        } in ended
        {
            let Some(failure) = failure else {
                drained.delivered.push(message);
                continue;
            };
            let is_unrouted = matches!(
                failure.code,
                ReasonCode::NoRoute | ReasonCode::UnknownDestination
            );
            let list = match status {
                Status::Dead => &mut drained.dead,
                Status::Pending if is_unrouted => &mut drained.unrouted,
                _ => &mut drained.retried,
            };
            list.push(NotDelivered {
                message,
                reason: failure.code,
                error: failure.error,
            });
        }
        drained
    }

    /// Fails unless every message was delivered.
    ///
    /// # Panics
    /// When one was not: it says which and why.
    #[track_caller]
    pub fn assert_all_delivered(&self) {
        let failed = self.retried.iter().chain(&self.dead).chain(&self.unrouted);
        let failed = failed.fold(String::new(), |text, one| {
            format!(
                "{text}\n  {} {}: {} {}",
                one.message.topic, one.message.sequence, one.reason, one.error
            )
        });
        assert!(failed.is_empty(), "not delivered:{failed}");
    }
}
