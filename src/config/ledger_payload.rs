//! Reads how long the ledger keeps payloads.

use super::text::duration;
use crate::ledger_payload::LedgerPayload;

impl LedgerPayload {
    /// Reads the value of the setting. The error is the reason.
    pub(super) fn read(text: &str) -> Result<Self, String> {
        match text.trim() {
            "false" => Ok(Self::Never),
            "true" => Ok(Self::WithEntry),
            other => duration(other)
                .map(Self::For)
                .map_err(|_| format!("{text:?} is not true, false or a duration such as 72h")),
        }
    }
}
