//! Why the events of a request cannot be read.

/// Why the events of a request cannot be read. The error gives the position of the problem, but no part of the
/// payload, which may be private.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloudEventError {
    /// The content type occurs twice, or is CloudEvents in a format other than JSON.
    #[error("the content type must be CloudEvents in JSON")]
    ContentType,
    /// The body is not UTF-8.
    #[error("the body is not UTF-8")]
    Utf8,
    /// The body is not valid JSON, or not a document or an array of documents: which of the two, and where.
    #[error("{0}")]
    Json(String),
    /// A required attribute is missing.
    #[error("the attribute {name} is missing")]
    Missing {
        /// The name of the attribute.
        name: &'static str,
    },
    /// An attribute, or `data_base64`, cannot be used.
    #[error("the attribute {name} {reason}")]
    Attribute {
        /// The name of the attribute.
        name: String,
        /// Why the attribute cannot be used.
        reason: &'static str,
    },
    /// The name of an attribute has characters other than lower-case letters and digits.
    #[error("the name of an attribute must consist of lower-case letters and digits")]
    Name,
    /// An event of a batch cannot be read.
    #[error("event {index} (counted from 0): {error}")]
    InBatch {
        /// The index of the event, counted from 0.
        index: usize,
        /// Why the event cannot be read.
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
