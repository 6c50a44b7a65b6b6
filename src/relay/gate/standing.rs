//! How a gate stands, for whoever looks on.

use super::{Gate, Phase};

/// How a gate stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    Flowing,
    /// One send goes first.
    Trying,
    Paused,
    BreakerOpen,
}

impl Standing {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Flowing => "flowing",
            Self::Trying => "trying",
            Self::Paused => "paused",
            Self::BreakerOpen => "breaker_open",
        }
    }
}

impl Gate {
    /// Whether sends may wait for a rate.
    pub(crate) fn is_limited(&self) -> bool {
        self.lock().bucket.is_some()
    }

    /// How it stands, in a word.
    pub(crate) fn standing(&self) -> Standing {
        match self.lock().phase {
            Phase::Flowing => Standing::Flowing,
            Phase::Trying { .. } => Standing::Trying,
            Phase::Closed {
                then_probe: true, ..
            } => Standing::BreakerOpen,
            Phase::Closed {
                then_probe: false, ..
            } => Standing::Paused,
        }
    }
}
