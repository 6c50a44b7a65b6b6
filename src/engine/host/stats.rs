//! The counts of a relay's work.

/// The counts of a relay's work since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Messages claimed.
    pub claimed: u64,
    /// Messages delivered.
    pub delivered: u64,
    /// Messages settled without a send, because no destination wanted them.
    pub no_subscriber: u64,
    /// Messages settled without a send, because the ledger had them as delivered.
    pub deduplicated: u64,
    /// Messages put back for a retry after a send, with or without a counted attempt.
    pub retried: u64,
    /// Messages put off without a send, because nobody knows where they go: above all messages of topics that are not
    /// declared (`UNKNOWN_TOPIC`).
    pub waiting: u64,
    /// Messages dead-lettered.
    pub dead: u64,
    /// Messages ended without a send, because their destination was removed. They leave no dead letters.
    pub cancelled: u64,
    /// Messages that became one message for each of their destinations (fan-out).
    pub split: u64,
    /// Messages released unsent.
    pub released: u64,
    /// Messages taken over from relays whose lease expired.
    pub taken_over: u64,
    /// Settles without effect, because another relay had claimed the message.
    pub conflicts: u64,
    /// Messages claimed together with the settle of their ordering key's previous message.
    pub(crate) continued: u64,
    /// Leases lost.
    pub leases_lost: u64,
    /// Claims that found messages.
    pub(crate) claims: u64,
    /// The time that these claims took, in microseconds.
    pub(crate) claim_micros: u64,
    /// Statements that settled messages.
    pub(crate) settles: u64,
}

impl Stats {
    /// The finished messages: delivered, without a subscriber, deduplicated, dead or cancelled.
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
        self.delivered + self.no_subscriber + self.deduplicated + self.dead + self.cancelled
    }

    /// The sums of both.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            claimed: self.claimed + other.claimed,
            delivered: self.delivered + other.delivered,
            no_subscriber: self.no_subscriber + other.no_subscriber,
            deduplicated: self.deduplicated + other.deduplicated,
            retried: self.retried + other.retried,
            waiting: self.waiting + other.waiting,
            dead: self.dead + other.dead,
            cancelled: self.cancelled + other.cancelled,
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

    /// A number that changes with every claim and every settle.
    pub(crate) fn moves(&self) -> u64 {
        self.claimed + self.processed() + self.retried + self.waiting + self.split + self.released
    }
}
