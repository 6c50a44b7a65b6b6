//! Settlements of messages that another session has locked, such as a person's open transaction. They wait, and no
//! other settlement waits with them.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::Settler;
use crate::clock;
use crate::relay::database::Database;
use crate::relay::settlement::Settlement;

/// The time between two looks whether the messages are still locked.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Locked {
    waiting: Vec<Settlement>,
    last_look: Option<Instant>,
}

impl Locked {
    /// The time of the next look, if a message waits.
    pub(super) fn next_look(&self) -> Option<Instant> {
        let last = self.last_look.filter(|_| !self.waiting.is_empty())?;
        Some(last + PAUSE)
    }

    fn add(&mut self, settlements: impl IntoIterator<Item = Settlement>) {
        self.waiting.extend(settlements);
        self.last_look = Some(clock::now());
    }
}

impl<D: Database> Settler<'_, D> {
    /// After a settle that exceeded its time limit: puts the messages that are locked aside, and returns the others.
    /// If the query fails, the database is unavailable, and all are returned to be retried.
    pub(super) fn set_locked_apart(&mut self, group: Vec<Settlement>) -> Vec<Settlement> {
        let (locked, free) = match self.by_lock(group) {
            Ok(parts) => parts,
            Err(group) => return group,
        };
        if let Some(first) = locked.first() {
            let (sequence, messages) = (first.sequence(), locked.len());
            log::warn!(event = "settle_locked", sequence = sequence, messages = messages; "another session has locked {messages} messages, among them message {sequence}: their results are recorded when it ends its transaction (see pg_stat_activity)");
        }
        self.locked.add(locked);
        free
    }

    /// Settles the messages that are no longer locked, if a look is due.
    pub(super) fn try_locked(&mut self) {
        if (self.locked.next_look()).is_some_and(|at| at <= clock::now()) {
            self.look_at_locked();
        }
    }

    /// The same, again and again until no message is locked.
    pub(super) fn try_locked_until(&mut self, until: Instant) {
        while !self.locked.waiting.is_empty() && !self.shared.is_abandoned() {
            self.look_at_locked();
            if self.locked.waiting.is_empty() || clock::now() >= until {
                return;
            }
            self.shared.pause(PAUSE / 4);
        }
    }

    fn look_at_locked(&mut self) {
        let waiting = std::mem::take(&mut self.locked.waiting);
        let (locked, free) = match self.by_lock(waiting) {
            Ok(parts) => parts,
            Err(waiting) => (waiting, Vec::new()),
        };
        self.locked.add(locked);
        let left = self.settle(free);
        self.locked.add(left);
    }

    /// The locked messages and the others. An error, with all messages, if the database is unavailable.
    fn by_lock(
        &mut self,
        group: Vec<Settlement>,
    ) -> Result<(Vec<Settlement>, Vec<Settlement>), Vec<Settlement>> {
        let sequences: Vec<i64> = group.iter().map(Settlement::sequence).collect();
        // The session reports the error.
        let Ok(locked) = self.db.locked(&sequences) else {
            return Err(group);
        };
        let locked: HashSet<i64> = locked.into_iter().collect();
        let is_locked = |one: &Settlement| locked.contains(&one.sequence());
        Ok(group.into_iter().partition(is_locked))
    }
}
