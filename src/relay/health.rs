//! How a relay is: what a probe asks, with the reasons.

use std::fmt;

/// How a relay is. Made by [`RelayHandle::health`](crate::RelayHandle::health).
///
/// It is *live* unless only a restart can help: a thread has ended by a defect, or hangs. It is *ready*
/// while it is live and delivers, or stands by to. Without its database it is alive and not ready.
///
/// ```
/// use diesel_outbox::{ProblemKind, RelayHandle};
///
/// /// For a probe: the status, and what stands in its body.
/// fn readiness(relay: &RelayHandle) -> (u16, String) {
///     let health = relay.health();
///     let status = if health.is_ready() { 200 } else { 503 };
///     if health.problems().iter().any(|problem| problem.kind == ProblemKind::Schema) {
///         return (status, "somebody has to run `diesel-outbox migrate`".to_owned());
///     }
///     (status, health.to_string())
/// }
///
/// /// For the one that restarts.
/// fn liveness(relay: &RelayHandle) -> u16 {
///     if relay.health().is_live() { 200 } else { 500 }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    problems: Vec<Problem>,
}

/// Something that is wrong with a relay.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// What it is, for programs.
    pub kind: ProblemKind,
    /// What it is, for people: which thread, since when, what to do.
    pub what: String,
}

/// What a problem touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Touches {
    Life,
    Readiness,
    /// Nothing that a probe should fail for.
    Nothing,
}

macro_rules! problem_kinds {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal, $touches:ident;)+) => {
        /// What can be wrong with a relay. The names are stable: they are the label `problem` of the
        /// metric `diesel_outbox_problem`.
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
            $($(#[doc = $doc])+ $variant,)+
        }

        impl ProblemKind {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The stable name.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            fn touches(self) -> Touches {
                match self {
                    $(Self::$variant => Touches::$touches,)+
                }
            }
        }
    };
}

problem_kinds! {
    /// A thread has ended by itself, which only a defect can cause. Not live.
    ThreadEnded = "thread_ended", Life;
    /// A thread waits for the database's answer for far longer than any statement may take. Not live.
    DatabaseStuck = "database_stuck", Life;
    /// All threads of a destination send for far longer than a send may take. Not live.
    SendersStuck = "senders_stuck", Life;
    /// Messages are there to be sent, and nothing happens with them, for no reason that is known. Not
    /// live.
    NoProgress = "no_progress", Life;
    /// The database cannot be reached, or refuses. Not ready.
    NoDatabase = "no_database", Readiness;
    /// The relay has no lease with time left. Not ready.
    NoLease = "no_lease", Readiness;
    /// The outbox is not there, or is of another version, or the role lacks rights on it. Not ready.
    Schema = "schema", Readiness;
    /// The relay ends. Not ready.
    Stopping = "stopping", Readiness;
    /// Some threads of a destination send for far longer than a send may take; others work.
    SomeSendersStuck = "some_senders_stuck", Nothing;
    /// The database refuses to record what became of the messages of a topic, so the relay claims no more
    /// of them.
    SettlesRefused = "settles_refused", Nothing;
    /// Messages wait that no relay at work has a route, a handler or a destination for. They use no attempts.
    NoRoute = "no_route", Nothing;
    /// The relay does not hear of new messages: it finds them by polling.
    ListenerDown = "listener_down", Nothing;
    /// `OUTBOX_ENABLED` is false: nothing is claimed or sent.
    Disabled = "disabled", Nothing;
}

impl fmt::Display for ProblemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Health {
    pub(super) fn new(problems: Vec<Problem>) -> Self {
        Self { problems }
    }

    /// Whether a restart is of no use. For a liveness probe.
    pub fn is_live(&self) -> bool {
        !self.has(Touches::Life)
    }

    /// Whether the relay delivers, or stands by to. For a readiness probe.
    pub fn is_ready(&self) -> bool {
        self.is_live() && !self.has(Touches::Readiness)
    }

    /// All that is wrong, the worst first; also what a relay can live with.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    fn has(&self, touched: Touches) -> bool {
        self.problems
            .iter()
            .any(|problem| problem.kind.touches() == touched)
    }
}

/// All problems in a line, or `ok`.
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

/// How one destination of a relay stands just now.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DestinationState {
    /// Its name; empty: the application's own dispatcher.
    pub name: String,
    /// Threads that send to it.
    pub threads: usize,
    /// Those of them that are sending.
    pub busy: usize,
    /// Claimed messages that wait for one of them.
    pub queued: usize,
    /// Messages that this relay has claimed for it and not settled.
    pub in_flight: usize,
    /// `flowing`; `trying` (one send goes first), `paused` or `breaker_open`.
    pub state: &'static str,
}
