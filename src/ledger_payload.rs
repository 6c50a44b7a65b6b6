//! How long the ledger keeps payloads.

use std::fmt;
use std::time::Duration;

/// How long the ledger keeps the payloads and headers of settled messages, which can then be sent again.
///
/// ```
/// use diesel_outbox::config::{Config, LedgerPayload};
/// use std::time::Duration;
///
/// let mut config = Config::default();
/// config.ledger_payload = LedgerPayload::For(Duration::from_secs(3 * 24 * 3600));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LedgerPayload {
    /// `false`: the ledger keeps none.
    #[default]
    Never,
    /// `true`: as long as the entry of the message.
    WithEntry,
    /// A duration shorter than the retention. Then a relay blanks payload and headers.
    For(Duration),
}

impl LedgerPayload {
    /// Whether a settle writes the payload.
    pub(crate) fn is_kept(self) -> bool {
        self != Self::Never
    }
}

impl fmt::Display for LedgerPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => f.write_str("false"),
            Self::WithEntry => f.write_str("true"),
            Self::For(age) => humantime::format_duration(*age).fmt(f),
        }
    }
}
