//! Scans the outbox from time to time for the leases that hold messages. The scan finds leases that can be removed, and
//! messages whose lease is gone.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::error::DatabaseError;
use crate::relay::session::Session;
use crate::relay::shared::Shared;
use crate::relay::told::Told;
use crate::store::relay::{lease, pause};

/// The interval between two scans.
const INTERVAL: Duration = Duration::from_secs(3600);
/// How long a lease or a pause is kept after its end.
const AGE: Duration = Duration::from_secs(3600);
/// The most messages that one statement scans.
const PART: i64 = 10_000;
/// After `A_LITTLE` of work, the scan rests, so that it takes at most 1/`SHARE` of the time.
const SHARE: u32 = 100;
const A_LITTLE: Duration = Duration::from_millis(100);

/// Scans the outbox part by part.
pub(super) struct Leases {
    round: Option<Round>,
    next: Instant,
}

struct Round {
    began: Instant,
    after: i64,
    holders: BTreeSet<i64>,
    vanished: BTreeSet<i64>,
}

impl Leases {
    pub(super) fn new() -> Self {
        Self {
            round: None,
            next: Instant::now(),
        }
    }

    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// Continues the scan, if it is due.
    pub(super) fn look(
        &mut self,
        shared: &Shared,
        session: &mut Session,
    ) -> Result<(), DatabaseError> {
        if Instant::now() < self.next {
            return Ok(());
        }
        let began = Instant::now();
        let round = self.round.get_or_insert_with(|| Round {
            began,
            after: i64::MIN,
            holders: BTreeSet::new(),
            vanished: BTreeSet::new(),
        });
        while began.elapsed() < A_LITTLE && !shared.is_stopping() {
            let part = session.run(|conn, name| lease::holders(conn, name, round.after, PART))?;
            round.holders.extend(part.holders);
            round.vanished.extend(part.vanished);
            if let Some(last) = part.last {
                round.after = last;
                continue;
            }
            round.end(shared, session)?;
            self.round = None;
            self.next = Instant::now() + INTERVAL;
            return Ok(());
        }
        self.next = Instant::now() + SHARE * began.elapsed();
        Ok(())
    }
}

impl Round {
    fn end(&self, shared: &Shared, session: &mut Session) -> Result<(), DatabaseError> {
        // A lease that ended before the scan began claims nothing during the scan.
        let age = AGE.max(self.began.elapsed());
        let holders: Vec<i64> = self.holders.iter().copied().collect();
        session.run(|conn, name| {
            lease::forget(conn, name, age, &holders)?;
            pause::forget_removed(conn, name, AGE)?;
            pause::forget(conn, name, AGE)
        })?;
        let vanished: Vec<i64> = self.vanished.iter().copied().collect();
        if !vanished.is_empty() {
            log::warn!(event = "lease_vanished", leases:? = vanished; "the leases {vanished:?} hold messages, but their rows were removed: taking the messages over");
        }
        shared.tell_claimer(Told::Vanished(vanished));
        Ok(())
    }
}
