//! The leases of other relays whose messages may be taken over.

use crate::engine::lease::sql::lease::LeaseId;
use crate::log;

#[derive(Debug, Default)]
pub(super) struct Leases {
    /// The expired leases of the last survey; `None` before the first survey.
    ended: Option<Vec<i64>>,
    /// Leases that messages name but whose rows are gone.
    vanished: Vec<i64>,
    /// Those of both whose messages may be taken over.
    pub(super) expired: Vec<i64>,
}

impl Leases {
    pub(super) fn has_ended(&self, lease: LeaseId) -> bool {
        self.ended.iter().flatten().any(|id| *id == lease.0)
    }

    /// Learns the expired leases. A lease that this process has lost is left out while this process still has its
    /// messages (`is_held`). Returns `true` if some have expired since the last survey.
    pub(super) fn learn(&mut self, ended: Vec<i64>, is_held: impl Fn(LeaseId) -> bool) -> bool {
        let before = self.ended.replace(ended);
        let before_first = before.is_none();
        let (before, ended) = (before.unwrap_or_default(), self.ended.iter().flatten());
        let new = ended.clone().filter(|id| !before.contains(id));
        let has_new = new.clone().next().is_some();
        // Leases that had expired before this relay started are no news.
        for id in new.filter(|_| !before_first) {
            log::warn!(event = "lease_expired", lease = id; "lease {id} of another relay has expired: taking over its messages");
        }
        let all = ended.chain(&self.vanished).copied();
        self.expired = all.filter(|id| !is_held(LeaseId(*id))).collect();
        has_new
    }

    /// Learns the leases whose rows are gone. The next survey lets claims take over from them. Returns `true` if some
    /// are new.
    pub(super) fn learn_vanished(&mut self, vanished: Vec<i64>) -> bool {
        let has_new = vanished.iter().any(|id| !self.vanished.contains(id));
        self.vanished = vanished;
        has_new
    }
}
