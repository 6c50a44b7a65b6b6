//! Whose act it was.
//!
//! Why: docs/decisions.md#hands

use std::time::SystemTime;

use crate::words::words;

words! {
    "hand":
    /// Who has paused or disabled a destination, or set one of its values.
    ///
    /// ```
    /// use diesel_outbox::endpoints::Hand;
    ///
    /// assert_eq!(Hand::Receiver.as_str(), "receiver");
    /// assert_eq!("owner".parse(), Ok(Hand::Owner));
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    #[non_exhaustive]
    pub enum Hand {
        /// The owner of an endpoint: a customer, in the portal or through
        /// [`of_tenant`](crate::endpoints::Endpoints::of_tenant).
        Owner = "owner",
        /// An operator, with a command, on the page, through the library, or with SQL.
        Operator = "operator",
        /// The relays: their circuit breaker, or an endpoint that has failed for too long or cannot be used.
        Relay = "relay",
        /// The receiver, by its responses.
        Receiver = "receiver",
    }
}

/// A pause that holds now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PausedBy {
    pub(crate) by: Hand,
    pub(crate) reason: String,
    /// `None`: until it is resumed.
    pub(crate) until: Option<SystemTime>,
}

impl Hand {
    /// The hand of a column; null and unknown words count as an operator.
    pub(crate) fn of_column(word: Option<&str>) -> Self {
        let known = word.and_then(|word| word.parse().ok());
        known.unwrap_or(Self::Operator)
    }
}
