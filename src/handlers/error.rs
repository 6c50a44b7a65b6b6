//! The error of a handler.

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
/// `?` converts every error that is `Send` and `Sync` to a `HandlerError` that retries the message: each
/// [`std::error::Error`], a boxed error, an `anyhow::Error`, a text. The relay stores and logs up to 512 characters of the
/// text, which must not contain the payload. Errors of `serde_json` quote the payload: `?` keeps only their kind and
/// position, also inside another error.
///
/// ```
/// use diesel_outbox::handlers::HandlerError;
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
// Why: docs/decisions.md#handler-results
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
    /// use diesel_outbox::handlers::{HandlerError, Handlers};
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
    /// use diesel_outbox::handlers::{HandlerError, Handlers};
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

    pub(crate) fn into_outcome(self) -> Outcome {
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

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for HandlerError {
    fn from(error: E) -> Self {
        Self::retry(without_payload(&*error.into()))
    }
}

/// The text of an error and of its sources, without the payload that an error of `serde_json` quotes. The texts of most
/// libraries leave out their sources, and others repeat them.
fn without_payload(error: &(dyn Error + Send + Sync + 'static)) -> String {
    let mut text = String::new();
    let mut level: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = level {
        let own = error.to_string();
        if !text.contains(&own) {
            let separator = if text.is_empty() { "" } else { ": " };
            text = format!("{text}{separator}{own}");
        }
        if let Some(json) = error.downcast_ref::<serde_json::Error>() {
            text = text.replace(&own, &DecodeError::of(json).to_string());
        }
        level = error.source();
    }
    without_quotes(text)
}

/// The same for an error of `serde_json` whose type is hidden, as in an `anyhow::Error`, or that is only a part of a text.
/// Its text has one of two forms: `… at line 1 column 2` after parsing, and `invalid type: string "…", expected …` after
/// the conversion of a value. Of the first form only the position stays, of the second what comes before it.
fn without_quotes(text: String) -> String {
    const QUOTES: [&str; 4] = [
        "invalid type: ",
        "invalid value: ",
        "unknown variant `",
        "unknown field `",
    ];
    const HIDDEN: &str = "unexpected JSON";

    let mut lines = text.match_indices(" at line ").map(|(at, _)| &text[at..]);
    if let Some(position) = lines.find_map(position) {
        return format!("{HIDDEN}{position}");
    }
    let quote = QUOTES.iter().filter_map(|quote| text.find(quote)).min();
    let is_of_serde = |rest: &str| rest.contains(", expected ") || rest.contains(", there are no ");
    match quote.filter(|at| is_of_serde(&text[*at..])) {
        Some(at) => format!("{}{HIDDEN}", &text[..at]),
        None => text,
    }
}

/// ` at line N column N`, if the text begins with it.
fn position(text: &str) -> Option<&str> {
    let end_of_number = |from: usize, before: &str| -> Option<usize> {
        let digits = text[from..].strip_prefix(before)?;
        let rest = digits.trim_start_matches(|c: char| c.is_ascii_digit());
        (rest.len() < digits.len()).then_some(text.len() - rest.len())
    };
    let line = end_of_number(0, " at line ")?;
    Some(&text[..end_of_number(line, " column ")?])
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use serde_json::json;

    use super::*;

    fn json_error() -> serde_json::Error {
        let error = serde_json::from_str::<u32>("\"my secret\"").expect_err("a text");
        assert!(error.to_string().contains("my secret"));
        error
    }

    fn value_error() -> serde_json::Error {
        let error = serde_json::from_value::<u32>(json!("my secret")).expect_err("a text");
        assert!(error.to_string().contains("my secret"));
        error
    }

    #[derive(Debug, thiserror::Error)]
    #[error("card: {0}")]
    struct WithSource(#[from] serde_json::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("card: {0}")]
    struct WithText(String);

    /// The text that is stored and logged after `?`.
    fn stored<E>(result: Result<(), E>) -> String
    where
        HandlerError: From<E>,
    {
        let handle = || -> Result<(), HandlerError> { Ok(result?) };
        match handle() {
            Err(HandlerError::Retry { error, after: None }) => error,
            other => panic!("not a retry: {other:?}"),
        }
    }

    #[test]
    fn every_error_passes_the_question_mark() {
        type Boxed = Box<dyn Error + Send + Sync>;

        let io = || std::io::Error::other("the bank is closed");
        for text in [
            stored(Err(io())),
            stored(Err(Boxed::from(io()))),
            stored(Err(Box::new(io()))),
            stored(Err(anyhow::Error::from(io()))),
            stored(Err(anyhow::anyhow!("the bank is closed"))),
            stored(Err(Boxed::from(anyhow::anyhow!("the bank is closed")))),
            stored(Err(anyhow::Error::from(io()).context("the bank is closed"))),
            stored(Err("the bank is closed")),
        ] {
            assert_eq!(text, "the bank is closed");
        }
    }

    #[derive(Debug, thiserror::Error)]
    #[error("cannot book")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn the_sources_of_an_error_are_stored() {
        let io = || std::io::Error::other("the bank is closed");
        let outer = || Outer(io());
        assert_eq!(stored(Err(outer())), "cannot book: the bank is closed");
        let context = Err::<(), _>(outer()).context("order 7");
        assert_eq!(stored(context), "order 7: cannot book: the bank is closed");
    }

    #[test]
    fn an_error_of_json_is_stored_without_the_quoted_payload() {
        type Boxed = Box<dyn Error + Send + Sync>;

        let shape = "unexpected JSON shape at line 1, column 11";
        assert_eq!(stored(Err(json_error())), shape);
        assert_eq!(stored(Err(Boxed::from(json_error()))), shape);
        let card = format!("card: {shape}");
        assert_eq!(stored(Err(WithSource(json_error()))), card);
        let context = Err::<(), _>(json_error()).context("reading the card");
        assert_eq!(stored(context), format!("reading the card: {shape}"));
        // Here the type is hidden.
        let hidden = "unexpected JSON at line 1 column 11";
        let any = || anyhow::Error::from(json_error());
        assert_eq!(stored(Err(any())), hidden);
        assert_eq!(stored(Err(Boxed::from(any()))), hidden);
        assert_eq!(stored(Err(WithText(json_error().to_string()))), hidden);
        let of_value = "card: unexpected JSON";
        assert_eq!(stored(Err(WithText(value_error().to_string()))), of_value);
        assert_eq!(
            stored(Err(anyhow::Error::from(value_error()))),
            "unexpected JSON"
        );
        for text in [
            stored(Err(value_error())),
            stored(Err(WithSource(value_error()))),
            stored(Err(anyhow::anyhow!("{}, {}", json_error(), value_error()))),
        ] {
            assert!(!text.contains("my secret"), "{text}");
        }
    }

    #[test]
    fn other_texts_stay() {
        for text in [
            "lost at line 7",
            "invalid value: 5",
            "at line 1 column 2",
            "",
        ] {
            assert_eq!(stored(Err(text)), text);
        }
    }
}
