//! The format of the log.

use super::text::by_word;

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogFormat {
    /// Plain text.
    Text,
    /// One JSON object per line.
    Json,
}

by_word!(LogFormat, "text or json", Text = "text", Json = "json");
