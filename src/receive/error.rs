//! What can be wrong with the events of a request.

use crate::event::reason_of;

/// Why a request has no events that can be read. It tells the place, and nothing of what stands there:
/// payloads may be private.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloudEventError {
    /// It is there twice, or of CloudEvents in a format that is not JSON.
    #[error("the content type is not one of CloudEvents in JSON")]
    ContentType,
    /// The body is not UTF-8.
    #[error("the body is not UTF-8")]
    Utf8,
    /// The body is not JSON, or not a document or an array of documents.
    #[error("{reason} at line {line}, column {column}")]
    Json {
        /// In which way.
        reason: &'static str,
        /// Counted from 1.
        line: usize,
        /// Counted from 1; 0: before the first.
        column: usize,
    },
    /// An attribute that every event has is not there.
    #[error("the attribute {name} is missing")]
    Missing {
        /// Which one.
        name: &'static str,
    },
    /// An attribute, or `data_base64`, cannot be used.
    #[error("the attribute {name} {reason}")]
    Attribute {
        /// Which one.
        name: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// The name of an attribute is not made of lower-case letters and digits.
    #[error("the name of an attribute is not made of lower-case letters and digits")]
    Name,
    /// One event of a batch is bad.
    #[error("event {index} (counted from 0): {error}")]
    InBatch {
        /// How many events came before it.
        index: usize,
        /// What is wrong with it.
        #[source]
        error: Box<CloudEventError>,
    },
}

impl CloudEventError {
    pub(super) fn attribute(name: &str, reason: &'static str) -> Self {
        let name = name.to_owned();
        Self::Attribute { name, reason }
    }
}

impl From<serde_json::Error> for CloudEventError {
    /// Without the error's text: it quotes values.
    fn from(error: serde_json::Error) -> Self {
        Self::Json {
            reason: reason_of(&error),
            line: error.line(),
            column: error.column(),
        }
    }
}
