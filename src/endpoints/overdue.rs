//! Reports endpoints that have failed for long enough, and to which nothing is sent until a retry.

use std::time::{Duration, Instant};

use super::serving::ServedEndpoints;
use super::sql::{failing, own};
use crate::engine::clean::chore::Chore;
use crate::engine::host::session::Session;
use crate::error::DatabaseError;

/// While endpoints fail, the interval between two looks.
const INTERVAL: Duration = Duration::from_secs(10);

struct Overdue<'a> {
    served: &'a ServedEndpoints,
    next: Instant,
}

pub(super) fn chore(served: &ServedEndpoints) -> Box<dyn Chore + '_> {
    let next = Instant::now();
    Box::new(Overdue { served, next })
}

impl Chore for Overdue<'_> {
    fn next(&self) -> Option<Instant> {
        let is_any = self.served.is_any_failing();
        is_any.then_some(self.next)
    }

    fn work(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let now = Instant::now();
        if now < self.next || !self.served.is_any_failing() {
            return Ok(());
        }
        self.next = now + INTERVAL;
        let own_events = session.witness.is_some();
        // Who locks the table holds up neither leases nor the ledger: the janitor comes again.
        let told = session.run_without_waiting(|conn, name| {
            for (destination, turned) in failing::record_overdue(conn, name)? {
                if own_events {
                    own::tell_failing(conn, name, &destination, turned)?;
                }
            }
            Ok(())
        });
        told.map(drop)
    }
}
