//! The error of a handler.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::dispatch::{Failure, Outcome};
use crate::event::DecodeError;
use crate::status::ReasonCode;

/// How long a message waits after [`HandlerError::Unavailable`].
const UNAVAILABLE_FOR: Duration = Duration::from_secs(1);

/// Why a handler failed, and what happens to the message.
///
/// `?` converts any [`std::error::Error`] to a `HandlerError` that retries the message. The relay stores and logs up to 512
/// characters of the text, which must not contain the payload. Errors of `serde_json` quote the payload, so only
/// their kind and position are kept.
///
/// A boxed error and an `anyhow::Error` are no `std::error::Error`, and may hide an error that quotes the payload. Pass
/// them on with `map_err`:
///
/// ```
/// use diesel_outbox::HandlerError;
///
/// fn charge() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
///     Err("the bank is closed")?
/// }
///
/// fn handle() -> Result<(), HandlerError> {
///     charge().map_err(HandlerError::retry)?;
///     Ok(())
/// }
/// # assert!(handle().is_err());
/// ```
///
/// ```
/// use diesel_outbox::HandlerError;
/// use std::time::Duration;
///
/// fn charge(card: &str) -> Result<(), HandlerError> {
///     if card.is_empty() {
///         return Err(HandlerError::dead("the order has no card"));
///     }
///     if card.starts_with("test") {
///         return Err(HandlerError::retry("the bank is not open for tests"));
///     }
///     let limit: u32 = "100".parse()?; // a failed attempt, as with `retry`
///     if limit < 100 {
///         return Err(HandlerError::retry_after("over the limit", Duration::from_secs(3600)));
///     }
///     Ok(())
/// }
/// # assert!(charge("").is_err());
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum HandlerError {
    /// A failed attempt: the message is retried, or dead-lettered after the last attempt.
    Retry {
        /// The reason.
        error: String,
        /// The minimum delay: the longer of `after` and the backoff applies. `None`: the backoff.
        after: Option<Duration>,
    },
    /// The message is too early: it waits, and no attempt is counted.
    Snooze {
        /// The delay.
        after: Duration,
    },
    /// The handler could not do its work, because something of this process is missing: a connection of the pool, for
    /// example. The message waits, and no attempt is counted.
    Unavailable {
        /// What is missing.
        error: String,
    },
    /// The message would always fail: it is dead-lettered.
    Dead {
        /// The reason.
        error: String,
    },
}

impl HandlerError {
    /// Retries the message after the backoff.
    pub fn retry(error: impl fmt::Display) -> Self {
        Self::Retry {
            error: error.to_string(),
            after: None,
        }
    }

    /// Retries the message after the backoff, and not before `after`.
    pub fn retry_after(error: impl fmt::Display, after: Duration) -> Self {
        Self::Retry {
            error: error.to_string(),
            after: Some(after),
        }
    }

    /// Calls the handler again after `after`, without counting an attempt. Use this if the message is too early: the
    /// shop is closed, the report is not complete. A handler can snooze forever. To end the wait, give the message an
    /// expiry, or check its age ([`Message::created_at`](crate::Message::created_at)).
    ///
    /// ```
    /// use diesel_outbox::{HandlerError, Handlers};
    /// use std::time::Duration;
    ///
    /// # fn is_open() -> bool { false }
    /// let handlers = Handlers::new().on_topic("order.paid", |_, _| {
    ///     if !is_open() {
    ///         return Err(HandlerError::snooze(Duration::from_secs(600)));
    ///     }
    ///     Ok(())
    /// });
    /// ```
    pub fn snooze(after: Duration) -> Self {
        Self::Snooze { after }
    }

    /// Calls the handler again a second later, without counting an attempt. Use this if the process lacks something for
    /// a while, which says nothing about the message: a pool of the application has no connection, for example.
    /// [`PooledContext::connection`](super::PooledContext::connection) returns this error itself.
    ///
    /// ```
    /// use diesel_outbox::{HandlerError, Handlers};
    ///
    /// # fn license() -> Option<u32> { None }
    /// let handlers = Handlers::new().on_topic("drawing.saved", |_, _| {
    ///     let license = license().ok_or_else(|| HandlerError::unavailable("all licenses are in use"))?;
    ///     println!("converting with license {license}");
    ///     Ok(())
    /// });
    /// ```
    pub fn unavailable(error: impl fmt::Display) -> Self {
        Self::Unavailable {
            error: error.to_string(),
        }
    }

    /// Dead-letters the message, without retries.
    pub fn dead(error: impl fmt::Display) -> Self {
        Self::Dead {
            error: error.to_string(),
        }
    }

    pub(super) fn into_outcome(self) -> Outcome {
        match self {
            Self::Retry { error, after } => {
                let mut failure = Failure::new(ReasonCode::Failed, error);
                failure.retry_after = after;
                Outcome::Retry(failure)
            }
            Self::Snooze { after } => {
                let rounded =
                    Duration::from_millis(u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
                let error = format!(
                    "the handler asked to wait for {}",
                    humantime::format_duration(rounded)
                );
                let mut failure = Failure::new(ReasonCode::Snoozed, error);
                failure.retry_after = Some(after);
                Outcome::Wait(failure)
            }
            Self::Unavailable { error } => {
                let mut failure = Failure::new(ReasonCode::NoConnection, error);
                failure.retry_after = Some(UNAVAILABLE_FOR);
                Outcome::Wait(failure)
            }
            Self::Dead { error } => Outcome::Dead(Failure::new(ReasonCode::Failed, error)),
        }
    }
}

impl<E: Error + 'static> From<E> for HandlerError {
    fn from(error: E) -> Self {
        let any: &dyn Any = &error;
        match any.downcast_ref::<serde_json::Error>() {
            Some(json) => Self::retry(DecodeError::of(json)),
            None => Self::retry(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_json_is_stored_without_the_quoted_payload() {
        let json = serde_json::from_str::<u32>("\"my secret\"").expect_err("a text");
        assert!(json.to_string().contains("my secret"));
        let HandlerError::Retry { error, after: None } = HandlerError::from(json) else {
            panic!("not a retry");
        };
        assert_eq!(error, "unexpected JSON shape at line 1, column 11");
    }
}
