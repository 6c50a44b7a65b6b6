//! The states of a message, and the reasons why a message was not delivered.

use diesel::deserialize::FromSqlRow;
use diesel::expression::AsExpression;
use diesel::sql_types::Text;

use crate::words::words;

words! {
    "status":
    /// The state of a message. The view `<outbox>_messages` derives it from the rows.
    ///
    /// ```
    /// use diesel_outbox::Status;
    ///
    /// let status: Status = "retrying".parse()?;
    /// assert_eq!(status, Status::Retrying);
    /// assert_eq!(status.as_str(), "retrying");
    /// # Ok::<(), diesel_outbox::UnknownWord>(())
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, AsExpression, FromSqlRow)]
    #[diesel(sql_type = Text)]
    #[non_exhaustive]
    pub enum Status {
        /// Committed and not attempted yet.
        Pending = "pending",
        /// Claimed by a relay.
        Sending = "sending",
        /// Waiting for the next attempt, after an attempt that failed.
        Retrying = "retrying",
        /// Accepted by the receiver. Final.
        Delivered = "delivered",
        /// No destination wanted the message, and no route or handler has ever served its topic. Final.
        NoSubscriber = "no_subscriber",
        /// Given up. Final, unless an operator requeues the message.
        Dead = "dead",
    }
}

impl Status {
    /// Whether the state is final, unless an operator sends the message again.
    ///
    /// ```
    /// use diesel_outbox::Status;
    ///
    /// assert!(Status::NoSubscriber.is_final() && !Status::Retrying.is_final());
    /// ```
    pub fn is_final(self) -> bool {
        matches!(self, Self::Delivered | Self::NoSubscriber | Self::Dead)
    }
}

impl serde::Serialize for Status {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

words! {
    "reason code":
    /// Why a send failed or a message was dead-lettered. The names are stable: tables, logs and
    /// the filters of `diesel-outbox dead` contain them.
    ///
    /// ```
    /// use diesel_outbox::ReasonCode;
    ///
    /// // Can requeueing the dead letter succeed?
    /// let reason: ReasonCode = "SERVER_ERROR".parse()?;
    /// match reason {
    ///     ReasonCode::ServerError | ReasonCode::Connect => println!("perhaps"),
    ///     other => println!("fix {} first", other.as_str()),
    /// }
    /// # Ok::<(), diesel_outbox::UnknownWord>(())
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, AsExpression, FromSqlRow)]
    #[diesel(sql_type = Text)]
    #[non_exhaustive]
    pub enum ReasonCode {
        /// The relay that had claimed the message crashed or lost its lease.
        Abandoned = "ABANDONED",
        /// The receiver's name could not be resolved.
        Dns = "DNS",
        /// The connection failed: refused, unreachable, or lost before anything was sent.
        Connect = "CONNECT",
        /// The TLS handshake failed.
        Tls = "TLS",
        /// The send timed out.
        Timeout = "TIMEOUT",
        /// The connection was lost after sending: the receiver may have the message.
        ConnectionLost = "CONNECTION_LOST",
        /// The response was not HTTP.
        Protocol = "PROTOCOL",
        /// 3xx. The relay never follows redirects.
        Redirect = "REDIRECT",
        /// 429.
        RateLimited = "RATE_LIMITED",
        /// 408, 409, 425, or another 4xx that may be temporary.
        ClientError = "CLIENT_ERROR",
        /// 5xx.
        ServerError = "SERVER_ERROR",
        /// 400, 413, 415 or 422: the receiver will never accept this message.
        Rejected = "REJECTED",
        /// 410.
        Gone = "GONE",
        /// An endpoint did not show that it wants messages.
        NotVerified = "NOT_VERIFIED",
        /// No running relay serves the message's topic, or has the destination that the message names. The message waits.
        NoRoute = "NO_ROUTE",
        /// The application has declared its topics, the topic of the message is none of them, and nobody wants the message.
        /// The message waits.
        UnknownTopic = "UNKNOWN_TOPIC",
        /// The message names a destination that is not configured.
        UnknownDestination = "UNKNOWN_DESTINATION",
        /// The endpoint that the message waited for was removed.
        DestinationRemoved = "DESTINATION_REMOVED",
        /// No endpoint matches the message, and no route serves its topic, so there is no receiver.
        NoSubscriber = "NO_SUBSCRIBER",
        /// A stored header cannot be sent.
        InvalidHeader = "INVALID_HEADER",
        /// The payload is larger than the destination allows.
        PayloadTooLarge = "PAYLOAD_TOO_LARGE",
        /// The destination's name resolves only to addresses that are not allowed.
        BlockedAddress = "BLOCKED_ADDRESS",
        /// The destination's token server (OAuth 2.0) is unreachable, or issues no token.
        TokenServer = "TOKEN_SERVER",
        /// The HTTP proxy is unreachable, or refused the credentials. No attempt is counted.
        Proxy = "PROXY",
        /// The relay's machine lacks file descriptors, ports or memory, or its network is down. No attempt is counted.
        Shortage = "SHORTAGE",
        /// The destination's URL cannot be used.
        InvalidUrl = "INVALID_URL",
        /// The message expired before delivery.
        Expired = "EXPIRED",
        /// The message is not fanned out yet, and waits: another session has locked the table of endpoints, or
        /// earlier messages of the tenant have so many destinations that the message waits for its turn.
        NotFannedOut = "NOT_FANNED_OUT",
        /// A message with the same idempotency key and other content was delivered before.
        IdempotencyConflict = "IDEMPOTENCY_CONFLICT",
        /// The dispatcher or the handler panicked.
        Panic = "PANIC",
        /// The handler cannot decode the payload.
        Undecodable = "UNDECODABLE",
        /// The handler could not be called: its pool has no connection. No attempt is counted.
        NoConnection = "NO_CONNECTION",
        /// The handler asked to be called again later. No attempt is counted.
        Snoozed = "SNOOZED",
        /// The application or an operator cancelled the message while it waited.
        Cancelled = "CANCELLED",
        /// An operator marked the message as delivered.
        ByHand = "BY_HAND",
        /// Any other failure of a dispatcher or a handler.
        Failed = "FAILED",
    }
}

/// How an error of the token server begins. What follows is an answer, or the reason code and the error of the request.
pub(crate) const TOKEN_SERVER: &str = "token server: ";

/// In the error of a redirect, before the URL that the receiver redirects to.
pub(crate) const REDIRECTS_TO: &str = ", which redirects to ";

/// In an error, before what a server has answered that the owner of a destination may not be able to reach: nobody has
/// checked its address, or it may be a private one. [`public_error`](crate::endpoints::public_error) cuts it off.
pub(crate) const ONLY_FOR_OPERATORS: &str = "; only for operators: ";

/// The error of an endpoint that did not repeat the challenge.
pub(crate) const NO_CHALLENGE: &str = "the response did not repeat the challenge";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_back_to_its_value() {
        for status in Status::ALL {
            assert_eq!(status.as_str().parse(), Ok(*status));
        }
        for code in ReasonCode::ALL {
            assert_eq!(code.as_str().parse(), Ok(*code));
        }
    }

    #[test]
    fn an_unknown_word_is_an_error_that_names_it() {
        let error = "sent".parse::<Status>().expect_err("not a status");
        assert_eq!(error.to_string(), "unknown status \"sent\"");
    }
}
