//! What a relay has done.

/// What a relay has done since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Messages claimed.
    pub claimed: u64,
    /// Messages delivered.
    pub delivered: u64,
    /// Messages that the ledger had as delivered, settled without sending.
    pub deduplicated: u64,
    /// Failed attempts that will be repeated.
    pub retried: u64,
    /// Messages that ended dead.
    pub dead: u64,
    /// Messages that became one for each of their destinations.
    pub split: u64,
    /// Messages given back unsent.
    pub released: u64,
    /// Messages taken over from relays that died.
    pub taken_over: u64,
    /// Settles that changed nothing, because another relay had the message.
    pub conflicts: u64,
    /// Messages claimed right behind one of their ordering key that was settled.
    pub continued: u64,
    /// Leases lost.
    pub leases_lost: u64,
    /// Claims that found something.
    pub claims: u64,
    /// Microseconds that these claims took.
    pub claim_micros: u64,
    /// Statements that settled something.
    pub settles: u64,
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

    /// What both have done together.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            claimed: self.claimed + other.claimed,
            delivered: self.delivered + other.delivered,
            deduplicated: self.deduplicated + other.deduplicated,
            retried: self.retried + other.retried,
            dead: self.dead + other.dead,
            split: self.split + other.split,
            released: self.released + other.released,
            taken_over: self.taken_over + other.taken_over,
            conflicts: self.conflicts + other.conflicts,
            continued: self.continued + other.continued,
            leases_lost: self.leases_lost + other.leases_lost,
            claims: self.claims + other.claims,
            claim_micros: self.claim_micros + other.claim_micros,
            settles: self.settles + other.settles,
        }
    }

    /// Changes with whatever is claimed or settled.
    pub(super) fn moves(&self) -> u64 {
        self.claimed + self.processed() + self.retried + self.split + self.released
    }
}
