//! What a relay has done.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])+ $name:ident,)+) => {
        /// What a relay has done since it started.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])+ pub $name: u64,)+
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)+
        }

        impl Counters {
            pub(crate) fn read(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Messages claimed.
    claimed,
    /// Messages delivered.
    delivered,
    /// Messages that the ledger had as delivered, settled without sending.
    deduplicated,
    /// Failed attempts that will be repeated.
    retried,
    /// Messages that ended dead.
    dead,
    /// Messages that became one for each of their destinations.
    split,
    /// Messages given back unsent.
    released,
    /// Messages taken over from relays that died.
    taken_over,
    /// Settles that changed nothing, because another relay had the message.
    conflicts,
    /// Messages claimed right behind one of their ordering key that was settled.
    continued,
    /// Leases lost.
    leases_lost,
    /// Claims that found something.
    claims,
    /// Microseconds that these claims took.
    claim_micros,
    /// Statements that settled something.
    settles,
}

impl Stats {
    /// Messages that came to their end: delivered, deduplicated or dead.
    ///
    /// ```
    /// use diesel_outbox::Stats;
    ///
    /// fn share_of_dead(stats: &Stats) -> Option<f64> {
    ///     let all = stats.processed();
    ///     (all > 0).then(|| stats.dead as f64 / all as f64)
    /// }
    /// # assert_eq!(share_of_dead(&Stats::default()), None);
    /// ```
    pub fn processed(&self) -> u64 {
        self.delivered + self.deduplicated + self.dead
    }

    /// Changes with whatever is claimed or settled.
    pub(super) fn moves(&self) -> u64 {
        self.claimed + self.processed() + self.retried + self.split + self.released
    }
}

pub(crate) fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}
