//! The format of the log.

use crate::words::words;

words! {
    setting:
    /// The format of log lines.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum LogFormat {
        /// Plain text.
        #[default]
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
}
