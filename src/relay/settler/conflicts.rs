//! Settles that changed nothing: who has the messages now.

use super::Settler;
use crate::relay::database::Database;
use crate::relay::settlement::{Settlement, log_conflict};
use crate::store::relay::settle::Trace;

impl<D: Database> Settler<'_, D> {
    /// Writes down, for each message that was not this lease's any more, how it stands now. A failure here is
    /// the outage's to tell; the outcome is lost to this relay either way.
    pub(super) fn tell_conflicts(&mut self, conflicts: &[&Settlement]) {
        if conflicts.is_empty() {
            return;
        }
        let shared = self.shared;
        let missed: Vec<Trace> = conflicts
            .iter()
            .map(|settlement| settlement.trace())
            .collect();
        let found = self.db.whereabouts(&missed);
        for settlement in conflicts {
            let found = found.as_ref().map(|found| {
                found
                    .iter()
                    .find(|standing| standing.sequence == settlement.sequence())
            });
            log_conflict(settlement, &shared.config, &shared.bulkheads, found.ok());
        }
    }
}
