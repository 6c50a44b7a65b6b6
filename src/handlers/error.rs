//! What a handler says when it did not do its work.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::dispatch::{Failure, Outcome};
use crate::event::DecodeError;
use crate::status::ReasonCode;

/// Why a handler did not do its work, and what is to follow.
///
/// Any error becomes one by `?`: the message is tried again. Its text is stored, up to 512 characters,
/// and logged: it must not hold the payload. (Errors of `serde_json` quote it; of these only the place is
/// kept.)
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
    /// A failed attempt: the message is tried again, or is dead after the last one.
    Retry {
        /// Why.
        error: String,
        /// Not before this; the backoff counts, too. `None`: as the backoff says.
        after: Option<Duration>,
    },
    /// Nothing went wrong, but it is too early: the message waits, and no attempt is counted.
    Snooze {
        /// For how long.
        after: Duration,
    },
    /// The message is dead: it would fail each time.
    Dead {
        /// Why.
        error: String,
    },
}

impl HandlerError {
    /// Try again later, when the backoff says.
    pub fn retry(error: impl fmt::Display) -> Self {
        Self::Retry {
            error: error.to_string(),
            after: None,
        }
    }

    /// Try again, but not before `after`.
    pub fn retry_after(error: impl fmt::Display, after: Duration) -> Self {
        Self::Retry {
            error: error.to_string(),
            after: Some(after),
        }
    }

    /// Call again after `after`, without counting an attempt: the shop has not opened yet, the report is not
    /// complete. It never ends by itself: give the message an expiry, or look at its age
    /// ([`Message::created_at`](crate::Message::created_at)) where the wait has to end some day.
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

    /// Never try again: the message is dead.
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
                    "the handler asked for {}",
                    humantime::format_duration(rounded)
                );
                let mut failure = Failure::new(ReasonCode::Snoozed, error);
                failure.retry_after = Some(after);
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
    fn an_error_of_json_is_told_without_what_it_quotes() {
        let json = serde_json::from_str::<u32>("\"my secret\"").expect_err("a text");
        assert!(json.to_string().contains("my secret"));
        let HandlerError::Retry { error, after: None } = HandlerError::from(json) else {
            panic!("tried again");
        };
        assert_eq!(error, "the JSON has another shape at line 1, column 11");
    }
}
