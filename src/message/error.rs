//! Why a message cannot be enqueued.

use super::{MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES};

/// Bytes that a topic, a destination or an idempotency key may have. The table has the same limit.
const MAX_NAME_BYTES: usize = 255;
/// Bytes that an ordering key may have. The table has the same limit.
const MAX_ORDERING_KEY_BYTES: usize = 1024;

/// Why a message cannot be enqueued. Nothing was sent to the database.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The payload is no JSON, or could not be made into JSON.
    #[error("the payload is not JSON: {0}")]
    Payload(String),
    /// The payload is too long.
    #[error(
        "the payload of a message of topic {topic:?} has {bytes} bytes; {MAX_PAYLOAD_BYTES} are allowed"
    )]
    PayloadTooLarge {
        /// The message's topic.
        topic: String,
        /// The length of its payload.
        bytes: usize,
    },
    /// A topic, destination or key that cannot be stored.
    #[error("bad {field} {value:?}: {reason}")]
    Name {
        /// Which one.
        field: &'static str,
        /// Its first 255 characters.
        value: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// The headers are too long.
    #[error("the headers have {bytes} bytes; {MAX_HEADER_BYTES} are allowed")]
    HeadersTooLarge {
        /// Names and values together.
        bytes: usize,
    },
    /// A header that cannot be sent.
    #[error("bad header {name:?}: {reason}")]
    Header {
        /// The header's name.
        name: String,
        /// What is wrong.
        reason: &'static str,
    },
}

pub(super) fn not_json(error: serde_json::Error) -> MessageError {
    MessageError::Payload(error.to_string())
}

pub(super) fn check_name(field: &'static str, value: &str) -> Result<(), MessageError> {
    check_text(field, value, MAX_NAME_BYTES, "it is longer than 255 bytes")
}

pub(super) fn check_ordering_key(value: &str) -> Result<(), MessageError> {
    let too_long = "it is longer than 1024 bytes";
    check_text("ordering_key", value, MAX_ORDERING_KEY_BYTES, too_long)
}

fn check_text(
    field: &'static str,
    value: &str,
    max_bytes: usize,
    too_long: &'static str,
) -> Result<(), MessageError> {
    let reason = if value.is_empty() {
        "it is empty"
    } else if value.len() > max_bytes {
        too_long
    } else if value.contains(char::is_control) {
        "it holds a control character"
    } else {
        return Ok(());
    };
    Err(MessageError::Name {
        field,
        value: value.chars().take(MAX_NAME_BYTES).collect(),
        reason,
    })
}
