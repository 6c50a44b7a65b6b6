//! A relay that runs in the test's own thread.

use diesel::PgConnection;
use diesel::result::QueryResult;

use crate::builder::RelayBuilder;
use crate::builder::by_hand::{ByHand, EndedMessage, Processed};
use crate::engine::host::StartError;
use crate::message::{Message, Sequence};
use crate::operate::sql::why::WaitReason;
use crate::shows::shows;
use crate::status::{ReasonCode, Status};

/// A relay without threads. It works only inside [`drain`](Self::drain), on the test's connection.
///
/// A test relay uses the builder of the application's real relay, so routes, handlers, dispatchers and the
/// results of messages are the same. Handlers run on the test's thread, and
/// [`PooledContext::connection`](crate::handlers::PooledContext::connection) is the test's connection.
///
/// Unlike a real relay, a test relay takes over no messages of other relays, sends batches one message at a
/// time, and ignores pauses, rate limits, circuit breakers and the time limits of handlers. A destination
/// with a URL gets real requests: give it a [`RecordingDispatcher`](super::RecordingDispatcher) instead.
pub struct TestRelay {
    by_hand: ByHand,
}

impl TestRelay {
    /// Creates a test relay from a builder: [`Relay::in_test`](crate::Relay::in_test), or the application's own.
    ///
    /// # Errors
    /// The errors of [`RelayBuilder::start`] that concern settings.
    pub fn new(builder: RelayBuilder) -> Result<Self, StartError> {
        Ok(Self {
            by_hand: ByHand::new(builder)?,
        })
    }

    /// Sends every due message once, in the order of sequences. A failed message waits for its next attempt: use
    /// [`advance`](super::advance) to make it due.
    ///
    /// # Errors
    /// Diesel's error if the database fails.
    pub fn drain(&self, conn: &mut PgConnection) -> QueryResult<Drained> {
        Ok(Drained::of(self.by_hand.drain(conn)?))
    }
}

shows!(TestRelay: );

/// The results of one [`TestRelay::drain`].
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Drained {
    /// Messages that were delivered now, or had been delivered before.
    pub delivered: Vec<Message>,
    /// Messages that will be retried, and why.
    pub retried: Vec<NotDelivered>,
    /// Messages that were dead-lettered, and why.
    pub dead: Vec<NotDelivered>,
    /// Messages that no route, handler or destination serves. They wait, and no attempt was counted.
    pub unrouted: Vec<NotDelivered>,
    /// Due messages that could not be sent, and why: an earlier message of their ordering key waits, for example.
    pub waiting: Vec<Waiting>,
}

/// A due message that was not sent.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Waiting {
    /// The message's place in the outbox.
    pub sequence: Sequence,
    /// The topic of the message.
    pub topic: String,
    /// Why the message waits.
    pub reason: WaitReason,
}

/// A message that was not delivered.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NotDelivered {
    /// The message.
    pub message: Message,
    /// Why the message was not delivered, as a code.
    pub reason: ReasonCode,
    /// Why the message was not delivered, in words.
    pub error: String,
}

impl Drained {
    fn of(Processed { ended, waiting }: Processed) -> Self {
        let waiting = waiting.into_iter().map(|(record, reason)| Waiting {
            sequence: record.sequence,
            topic: record.topic,
            reason,
        });
        let mut drained = Self {
            waiting: waiting.collect(),
            ..Self::default()
        };
        for EndedMessage {
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

    /// Asserts that every due message was delivered. Messages that are due later may wait.
    ///
    /// # Panics
    /// If a due message was not delivered. The text lists all such messages and their reasons.
    #[track_caller]
    pub fn assert_all_delivered(&self) {
        let failed = self.retried.iter().chain(&self.dead).chain(&self.unrouted);
        let failed = failed.fold(String::new(), |text, one| {
            format!(
                "{text}\n  {} {}: {} {}",
                one.message.topic, one.message.sequence, one.reason, one.error
            )
        });
        let failed = self.waiting.iter().fold(failed, |text, one| {
            format!("{text}\n  {} {}: {}", one.topic, one.sequence, one.reason)
        });
        assert!(failed.is_empty(), "not delivered:{failed}");
    }
}
