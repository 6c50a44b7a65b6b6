//! The health of a relay, for probes, with its problems.

use std::fmt;

use crate::words::words;

/// The health of a relay, as returned by [`RelayHandle::health`](crate::RelayHandle::health).
///
/// A relay is *live* unless only a restart can help: a thread has ended because of a bug, or hangs. A relay is
/// *ready* while it is live and either delivers or stands by. A relay without a database is live but not ready.
///
/// ```
/// use diesel_outbox::{ProblemKind, RelayHandle};
///
/// /// For a readiness probe: the status and the body of the response.
/// fn readiness(relay: &RelayHandle) -> (u16, String) {
///     let health = relay.health();
///     let status = if health.is_ready() { 200 } else { 503 };
///     if health.problems().iter().any(|problem| problem.kind == ProblemKind::Schema) {
///         return (status, "run `diesel-outbox migrate`".to_owned());
///     }
///     (status, health.to_string())
/// }
///
/// /// For a liveness probe, which restarts the process.
/// fn liveness(relay: &RelayHandle) -> u16 {
///     if relay.health().is_live() { 200 } else { 500 }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    problems: Vec<Problem>,
}

/// A problem of a relay.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// The kind of problem, for programs.
    pub kind: ProblemKind,
    /// The problem for people: which thread, since when, what to do.
    pub what: String,
}

words! {
    /// The kinds of problems. The names are stable: they are the label `problem` of the metric
    /// `diesel_outbox_problem`.
    ///
    /// ```
    /// use diesel_outbox::ProblemKind;
    ///
    /// assert_eq!(ProblemKind::NoDatabase.as_str(), "no_database");
    /// assert!(ProblemKind::ALL.contains(&ProblemKind::NoDatabase));
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    #[non_exhaustive]
    pub enum ProblemKind {
        /// A thread has ended unasked, which only a bug can cause. Not live.
        ThreadEnded = "thread_ended",
        /// A thread has waited for the database far longer than any statement may take. Not live.
        DatabaseStuck = "database_stuck",
        /// All sender threads of a destination have been sending far longer than the send timeout. Not live.
        SendersStuck = "senders_stuck",
        /// Messages are due or claimed, but the relay makes no progress and knows no reason. Not live.
        NoProgress = "no_progress",
        /// The database cannot be reached, or refuses statements. Not ready.
        NoDatabase = "no_database",
        /// The relay has no valid lease. Not ready.
        NoLease = "no_lease",
        /// The outbox is missing or has another version, or the role lacks rights on the outbox. Not ready.
        Schema = "schema",
        /// The relay is shutting down. Not ready.
        Stopping = "stopping",
        /// Some sender threads of a destination have been sending far longer than the send timeout; the others work.
        SomeSendersStuck = "some_senders_stuck",
        /// The database refuses to record the results of a topic's messages. The relay claims no more messages of the
        /// topic.
        SettlesRefused = "settles_refused",
        /// The answer of a claim was lost, or the server was replaced. The relay looks for messages that its lease holds and
        /// that it does not know, and releases them. Only these messages wait.
        ClaimInDoubt = "claim_in_doubt",
        /// No active relay has a route, a handler or a destination for some messages. The messages wait and use no
        /// attempts.
        NoRoute = "no_route",
        /// The application has declared its topics, and messages of other topics wait, because nobody wants them.
        UnknownTopic = "unknown_topic",
        /// Messages of a topic have ended without a subscriber in the last 24 hours, although the topic never had one: it may
        /// be misspelt.
        NoSubscriber = "no_subscriber",
        /// The relays of the outbox have different values of settings on which they must agree.
        SettingsDiffer = "settings_differ",
        /// The settings of the relay refuse some registered destinations, or its code panicked for a destination: their
        /// messages wait for a relay that serves them.
        EndpointRefused = "endpoint_refused",
        /// In the last 10 minutes, the filter of a destination needed too many steps for a message, which
        /// therefore did not match.
        FilterTooMuch = "filter_too_much",
        /// The relay gets no notifications of new messages and finds them by polling.
        ListenerDown = "listener_down",
        /// The settings could not be reloaded, or are being read for more than 3 s: the relay continues with the old
        /// settings.
        ReloadFailed = "reload_failed",
        /// This machine lacks file descriptors, ports or memory for some sends, or has no network. The messages wait and use no
        /// attempts.
        Shortage = "shortage",
        /// The HTTP proxy is unreachable, or refuses the credentials. The messages wait and use no attempts.
        Proxy = "proxy",
        /// `OUTBOX_ENABLED` is false: the relay claims and sends nothing.
        Disabled = "disabled",
    }
}

/// The problems of a relay that is not live.
const OF_LIFE: [ProblemKind; 4] = [
    ProblemKind::ThreadEnded,
    ProblemKind::DatabaseStuck,
    ProblemKind::SendersStuck,
    ProblemKind::NoProgress,
];

/// The problems of a relay that is live and not ready.
const OF_READINESS: [ProblemKind; 4] = [
    ProblemKind::NoDatabase,
    ProblemKind::NoLease,
    ProblemKind::Schema,
    ProblemKind::Stopping,
];

impl Health {
    pub(super) fn new(problems: Vec<Problem>) -> Self {
        Self { problems }
    }

    /// Whether the relay is live, that is, needs no restart. For a liveness probe.
    pub fn is_live(&self) -> bool {
        !self.has_any(&OF_LIFE)
    }

    /// Whether the relay is live and either delivers or stands by. For a readiness probe.
    pub fn is_ready(&self) -> bool {
        self.is_live() && !self.has_any(&OF_READINESS)
    }

    /// All problems, the worst first, including the problems that fail no probe.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    fn has_any(&self, kinds: &[ProblemKind]) -> bool {
        self.problems.iter().any(|one| kinds.contains(&one.kind))
    }
}

/// All problems on one line, or `ok`.
impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.problems.is_empty() {
            return f.write_str("ok");
        }
        for (number, problem) in self.problems.iter().enumerate() {
            let separator = if number == 0 { "" } else { "; " };
            write!(f, "{separator}{problem}")?;
        }
        Ok(())
    }
}

/// `no_database: the claimer has no database: …`
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.what)
    }
}
