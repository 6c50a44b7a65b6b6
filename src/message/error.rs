//! Why a message cannot be enqueued.

use super::{MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES};

/// The maximum length of a topic, a destination or an idempotency key, in bytes. The table has the same limit.
const MAX_NAME_BYTES: usize = 255;
/// The maximum length of an ordering key, in bytes. The table has the same limit.
const MAX_ORDERING_KEY_BYTES: usize = 1024;

/// Why a message cannot be enqueued. Nothing was sent to the database.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The payload is not JSON, or cannot be serialised as JSON.
    #[error("the payload is not JSON: {0}")]
    Payload(String),
    /// The payload is too long.
    #[error(
        "the payload of a message of topic {topic:?} has {bytes} bytes, at most {MAX_PAYLOAD_BYTES} are allowed"
    )]
    PayloadTooLarge {
        /// The topic of the message.
        topic: String,
        /// The length of the payload.
        bytes: usize,
    },
    /// A topic, destination or key cannot be stored.
    #[error("bad {field} {value:?}: {reason}")]
    Name {
        /// The column: `topic`, `destination`, `idempotency_key` or `ordering_key`.
        field: &'static str,
        /// The first 255 characters of the value.
        value: String,
        /// Why the value cannot be stored.
        reason: &'static str,
    },
    /// The headers are too long.
    #[error("the headers have {bytes} bytes, at most {MAX_HEADER_BYTES} are allowed")]
    HeadersTooLarge {
        /// The total length of names and values.
        bytes: usize,
    },
    /// A header cannot be sent.
    #[error("bad header {name:?}: {reason}")]
    Header {
        /// The name of the header.
        name: String,
        /// Why the header cannot be sent.
        reason: &'static str,
    },
}

pub(super) fn not_json(error: serde_json::Error) -> MessageError {
    MessageError::Payload(error.to_string())
}

pub(super) fn check_name(field: &'static str, value: &str) -> Result<(), MessageError> {
    check_text(field, value, MAX_NAME_BYTES, "longer than 255 bytes")
}

pub(super) fn check_ordering_key(value: &str) -> Result<(), MessageError> {
    let too_long = "longer than 1024 bytes";
    check_text("ordering_key", value, MAX_ORDERING_KEY_BYTES, too_long)
}

fn check_text(
    field: &'static str,
    value: &str,
    max_bytes: usize,
    too_long: &'static str,
) -> Result<(), MessageError> {
    let reason = if value.is_empty() {
        "empty"
    } else if value.len() > max_bytes {
        too_long
    } else if value.contains(char::is_control) {
        "contains a control character"
    } else {
        return Ok(());
    };
    Err(MessageError::Name {
        field,
        value: value.chars().take(MAX_NAME_BYTES).collect(),
        reason,
    })
}
