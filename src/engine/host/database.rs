//! The database calls of the claimer, the settlers, the gates and the heartbeat. Each call has one result.
//!
//! A [`Session`] calls PostgreSQL. The simulation has its own database.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use diesel::result::QueryResult;
use diesel::{Connection, PgConnection};

use super::session::{AfterRefusal, Session};
use crate::engine::claim::sql::claim::{self, Batch, Claimant, Lane, Position, Reads, Stream};
use crate::engine::claim::sql::glance::{self, Glance, Marks};
use crate::engine::claim::sql::late;
use crate::engine::claim::sql::page::Page;
use crate::engine::claim::sql::search::{self, Ask};
use crate::engine::claim::sql::streams::{FoundStream, streams, streams_behind, streams_beside};
use crate::engine::keys::sql::ordered::{self, Candidate, Key};
use crate::engine::lease::sql::backend::{self, Backend};
use crate::engine::lease::sql::lease::{self, LeaseId, Registration, SeenLease};
use crate::engine::plan::{Streams, Surveyed};
use crate::engine::send::gate::GateNews;
use crate::engine::send::sql::pause::{self, BREAKER_OPEN, Pausable, Paused};
use crate::engine::serves::routes::Serves;
use crate::engine::serves::sql::topics;
use crate::engine::settle::sql::log::Log;
use crate::engine::settle::sql::settle::{self, Claim, Discarded, Released, Trace, Written};
use crate::engine::settle::sql::whereabouts::{Whereabouts, whereabouts};
use crate::engine::settle::sql::witness::OwnWitness;
use crate::engine::settle::written::{Settle, deliver_and_continue, write_down};
use crate::error::DatabaseError;
use crate::hand::Hand;
use crate::name::OutboxName;
use crate::sql::brief::{Locks, Tried, briefly, without_waiting};
use crate::sql::expired;
use crate::sql::range::Range;

/// The result of a call.
pub(crate) type DatabaseResult<T> = Result<T, DatabaseError>;

/// The connection after a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AfterStatement {
    /// The server process of the last statements, if it is known.
    pub(crate) backend: Option<Backend>,
    /// How many connections have ended without an answer. After each, the server may have lost what it had answered before:
    /// in a failover, or in a crash with `synchronous_commit = off`.
    pub(crate) lost: u64,
    /// How long to wait before the next attempt.
    pub(crate) wait: Duration,
    /// Whether the cause of the last error was a problem of the outbox.
    pub(crate) is_missing: bool,
    /// Whether the last error came after a time limit.
    pub(crate) has_timed_out: bool,
}

/// What to claim.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Which<'a> {
    /// At most this many messages without keys of these lanes.
    Plain(&'a [Lane], usize),
    /// At most this many messages of these lanes that are the first of their keys. The messages of each lane go to one
    /// destination.
    Due(&'a [Lane], &'a [String], usize),
    /// These messages without keys.
    Chosen(&'a [i64]),
    /// Those of these messages that are the first of their keys.
    First(&'a [Candidate]),
}

/// The result of a claim.
pub(crate) struct Taken {
    /// `None`: another relay is claiming keyed messages.
    pub(crate) batch: Option<Batch>,
    /// The position that the claim has reached in each keyed lane that has more messages.
    pub(crate) reached: HashMap<Stream, Position>,
}

/// What a survey asks beside the streams and the leases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asks<'a> {
    /// Whether the survey waits for locks of the table of pauses.
    pub(crate) locks: Locks,
    /// Whether the survey reads the marks of members.
    pub(crate) marks: bool,
    /// Up to where the relay has read its members.
    pub(crate) read_to: Option<&'a dyn Reads>,
}

pub(crate) trait Database {
    /// The connection after the last call.
    fn after(&self) -> AfterStatement;

    /// Another server has replaced the one of this connection: the next call opens a new connection.
    fn replace(&mut self);

    /// Queries the streams, the ended leases, the state of this lease, the pauses, and the marks of members.
    fn survey(
        &mut self,
        lease: LeaseId,
        streams: &Streams,
        moment: Duration,
        asks: Asks<'_>,
    ) -> DatabaseResult<Surveyed>;

    /// Records the topics that this relay serves.
    fn record_topics(&mut self, serves: &Serves) -> DatabaseResult<()>;

    /// Claims messages.
    fn claim(&mut self, by: Claimant<'_>, which: Which<'_>) -> DatabaseResult<Taken>;

    /// A page of what a search asks for. `None`: the query took too long.
    fn find(
        &mut self,
        expired: &[i64],
        ask: &Ask,
        moment: Duration,
    ) -> DatabaseResult<Option<Page>>;

    /// Whether one of these server processes, whose clients are gone, still exists: it may finish a claim. Asks them to end.
    fn end_processes(&mut self, processes: &[Backend]) -> DatabaseResult<bool>;

    /// The highest sequence, or 0 if there is no message. `None`: the query took too long.
    fn newest(&mut self, moment: Duration) -> DatabaseResult<Option<i64>>;

    /// Releases messages that a lease holds, except those that the relay knows. `None`: the statement took too long.
    fn release_unknown(
        &mut self,
        lease: LeaseId,
        range: Range,
        known: &[Claim],
        moment: Duration,
    ) -> DatabaseResult<Option<Released>>;

    /// Settles a group and claims the next messages of its keys, in one transaction, so that no other relay claims
    /// first.
    fn settle(
        &mut self,
        after: AfterRefusal,
        settle: &Settle<'_>,
    ) -> DatabaseResult<(Written, Batch)>;

    /// The sequences of the messages that were settled under these claims.
    fn settled(&mut self, after: AfterRefusal, traces: &[Trace]) -> DatabaseResult<Vec<i64>>;

    /// Those of these messages that another session has locked. Waits for no row.
    fn locked(&mut self, sequences: &[i64]) -> DatabaseResult<Vec<i64>>;

    /// Those of these feeds whose rows another session has locked. Waits for no row.
    fn locked_feeds(&mut self, _log: &dyn Log, _feeds: &[&str]) -> DatabaseResult<Vec<String>> {
        Ok(Vec::new())
    }

    /// The current state of messages that a settle did not find.
    fn whereabouts(&mut self, missed: &[Trace]) -> DatabaseResult<Vec<Whereabouts>>;

    /// Records the results that changed nothing in the history.
    fn note_conflicts(&mut self, discarded: &[Discarded<'_>]) -> DatabaseResult<()>;

    /// Records a change of a gate for other relays.
    fn tell_pause(&mut self, destination: &str, news: GateNews) -> DatabaseResult<Tried<()>>;

    /// Whether this relay may probe a destination for the time `hold`, and the pauses.
    fn take_probe(
        &mut self,
        destination: &str,
        hold: Duration,
    ) -> DatabaseResult<Tried<(bool, Vec<Paused>)>>;

    fn release_probe(&mut self, destination: &str) -> DatabaseResult<Tried<()>>;

    fn register(&mut self, registration: &Registration) -> DatabaseResult<LeaseId>;

    /// Checks the lease, and takes its lock if the connection can hold one. `None`: the lease has ended.
    fn look(&mut self, lease: LeaseId) -> DatabaseResult<Option<SeenLease>>;

    /// Renews the lease for the time `by`. `false`: the lease has ended or expired.
    fn renew(
        &mut self,
        lease: LeaseId,
        by: Duration,
        takeover_after: Option<Duration>,
        listener: Option<Backend>,
    ) -> DatabaseResult<bool>;

    fn end(&mut self, lease: LeaseId) -> DatabaseResult<()>;
}

/// What the survey reads beside the streams.
struct SeenAtGlance {
    glance: Glance,
    paused: Tried<Vec<Paused>>,
    marks: Option<(Marks, Duration)>,
}

impl Session {
    /// Reads the leases, the pauses and the marks: one statement, unless it takes too long, or another session has locked a
    /// table.
    fn glance(
        &mut self,
        lease: LeaseId,
        moment: Duration,
        asks: Asks<'_>,
    ) -> DatabaseResult<SeenAtGlance> {
        let began = Instant::now();
        let marks_of = asks.marks.then_some(asks.read_to);
        let seen = match asks.locks {
            Locks::NotWaitedFor => self.run_briefly(moment, |conn, name| {
                glance::at_all(conn, name, lease, marks_of)
            })?,
            Locks::WaitedFor => None,
        };
        if let Some((glance, (paused, are_ahead), marks)) = seen {
            let took = began.elapsed();
            return Ok(SeenAtGlance {
                glance,
                paused: match are_ahead {
                    true => self.run_heeding(asks.locks, pause::all_in_time)?,
                    false => Tried::Done(paused),
                },
                marks: marks.map(|marks| (marks, took)),
            });
        }
        Ok(SeenAtGlance {
            glance: self.run(|conn, name| glance::at_leases(conn, name, lease))?,
            paused: self.run_heeding(asks.locks, pause::all_in_time)?,
            marks: None,
        })
    }

    /// For tables that people and applications may lock, too.
    pub(crate) fn run_heeding<T>(
        &mut self,
        locks: Locks,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> QueryResult<T>,
    ) -> DatabaseResult<Tried<T>> {
        match locks {
            Locks::WaitedFor => self.run(statements).map(Tried::Done),
            Locks::NotWaitedFor => self.run_without_waiting(statements),
        }
    }

    /// For rows that people and applications may lock, too.
    pub(crate) fn run_without_waiting<T>(
        &mut self,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> QueryResult<T>,
    ) -> DatabaseResult<Tried<T>> {
        self.run(|conn, name| without_waiting(conn, |conn| statements(conn, name)))
    }
}

fn ask_streams(
    conn: &mut PgConnection,
    name: &OutboxName,
    asked: &Streams,
) -> QueryResult<Vec<FoundStream>> {
    match asked {
        Streams::All => streams(conn, name),
        Streams::Beside(known) => streams_beside(conn, name, known),
        Streams::Behind(sequence) => streams_behind(conn, name, *sequence),
    }
}

/// Records a change of a gate for other relays.
pub(crate) fn record_news(
    conn: &mut PgConnection,
    name: &OutboxName,
    witness: OwnWitness,
    which: &str,
    news: GateNews,
) -> QueryResult<()> {
    // The time that is left now: the database may have been unavailable meanwhile.
    let left = |until: Instant| until.saturating_duration_since(Instant::now());
    let kind = Pausable::Destination;
    let is_new = match (news, witness) {
        (GateNews::Paused(code, until), _) => {
            let by = (Hand::Receiver, code.as_str());
            pause::pause(conn, name, kind, which, by, until.map(left), 0)
        }
        (GateNews::Opened(until, openings), Some(_)) => {
            pause::open_breaker(conn, name, which, left(until), openings)
        }
        (GateNews::Opened(until, openings), None) => {
            let by = (Hand::Relay, BREAKER_OPEN);
            pause::pause(conn, name, kind, which, by, Some(left(until)), openings)
        }
        (GateNews::Recovered, _) => pause::close_breaker(conn, name, which),
    }?;
    match witness {
        Some(witness) if is_new => witness.told(conn, name, which, news),
        _ => Ok(()),
    }
}

impl Database for Session {
    fn after(&self) -> AfterStatement {
        AfterStatement {
            backend: self.backend,
            lost: self.lost,
            wait: self.wait(),
            is_missing: self.is_missing,
            has_timed_out: self.has_timed_out,
        }
    }

    fn replace(&mut self) {
        Self::replace(self);
    }

    fn survey(
        &mut self,
        lease: LeaseId,
        asked: &Streams,
        moment: Duration,
        asks: Asks<'_>,
    ) -> DatabaseResult<Surveyed> {
        let began = Instant::now();
        let found = self.run_briefly(moment, |conn, name| ask_streams(conn, name, asked))?;
        let found = match found {
            // Another session holds the table for a moment: only a query that is slow gives up.
            None if began.elapsed() < moment => {
                self.run(|conn, name| briefly(conn, moment, |conn| ask_streams(conn, name, asked)))?
            }
            found => found,
        };
        let took = began.elapsed();
        let mut seen = self.glance(lease, moment, asks)?;
        let mut shortened = Vec::new();
        if seen.glance.is_any_over {
            (shortened, seen.glance) = self.run(|conn, name| {
                let shortened = lease::shorten(conn, name, lease)?;
                expired::ended(conn, name)?;
                Ok((shortened, glance::at_leases(conn, name, lease)?))
            })?;
        }
        let Glance {
            now,
            is_active,
            server,
            ended,
            ..
        } = seen.glance;
        Ok(Surveyed {
            streams: found,
            took,
            shortened,
            ended,
            is_active,
            time: now.0,
            server: server.0,
            paused: seen.paused,
            marks: seen.marks,
        })
    }

    fn record_topics(&mut self, serves: &Serves) -> DatabaseResult<()> {
        self.run(|conn, name| topics::record(conn, name, serves, false))
    }

    fn claim(&mut self, by: Claimant<'_>, which: Which<'_>) -> DatabaseResult<Taken> {
        self.run(|conn, name| {
            let mut reached = HashMap::new();
            let batch = match which {
                Which::Plain(lanes, room) => Some(claim::claim(conn, name, by, lanes, room)?),
                Which::Chosen(sequences) => Some(claim::claim_chosen(conn, name, by, sequences)?),
                Which::First(candidates) => ordered::claim(conn, name, by, candidates)?,
                Which::Due(lanes, goes_to, room) => {
                    let mut due;
                    (due, reached) = ordered::due(conn, name, by, lanes, goes_to)?;
                    due.truncate(room);
                    match due.is_empty() {
                        true => Some(Batch::default()),
                        false => ordered::claim(conn, name, by, &due)?,
                    }
                }
            };
            Ok(Taken { batch, reached })
        })
    }

    fn find(
        &mut self,
        expired: &[i64],
        ask: &Ask,
        moment: Duration,
    ) -> DatabaseResult<Option<Page>> {
        self.run(|conn, name| match ask.may_be_long() {
            true => briefly(conn, moment, |conn| search::find(conn, name, expired, ask)),
            false => search::find(conn, name, expired, ask).map(Some),
        })
    }

    fn end_processes(&mut self, processes: &[Backend]) -> DatabaseResult<bool> {
        self.run(|conn, _| backend::end(conn, processes))
    }

    fn newest(&mut self, moment: Duration) -> DatabaseResult<Option<i64>> {
        self.run(|conn, name| briefly(conn, moment, |conn| late::newest(conn, name)))
    }

    fn release_unknown(
        &mut self,
        lease: LeaseId,
        range: Range,
        known: &[Claim],
        moment: Duration,
    ) -> DatabaseResult<Option<Released>> {
        self.run(|conn, name| {
            briefly(conn, moment, |conn| {
                settle::release_unknown(conn, name, lease, known, range)
            })
        })
    }

    fn settle(
        &mut self,
        after: AfterRefusal,
        settle: &Settle<'_>,
    ) -> DatabaseResult<(Written, Batch)> {
        if settle.keys.is_empty() && !settle.has_runs() {
            let written = self.run_with(after, |conn, _| write_down(conn, settle))?;
            return Ok((written, Batch::default()));
        }
        self.run_with(after, |conn, name| {
            if let Some(done) = deliver_and_continue(conn, settle)? {
                return Ok(done);
            }
            conn.transaction(|conn| {
                let written = write_down(conn, settle)?;
                let of_changed = written
                    .changed
                    .iter()
                    .filter_map(|one| settle.keys.get(one));
                let keys: Vec<Key> = of_changed.cloned().collect();
                let next = match keys.is_empty() {
                    true => Batch::default(),
                    false => {
                        ordered::claim_next(conn, name, settle.claimant, &keys, settle.closed)?
                    }
                };
                Ok((written, next))
            })
        })
    }

    fn settled(&mut self, after: AfterRefusal, traces: &[Trace]) -> DatabaseResult<Vec<i64>> {
        self.run_with(after, |conn, name| settle::settled(conn, name, traces))
    }

    fn locked(&mut self, sequences: &[i64]) -> DatabaseResult<Vec<i64>> {
        self.run(|conn, name| settle::locked(conn, name, sequences))
    }

    fn locked_feeds(&mut self, log: &dyn Log, feeds: &[&str]) -> DatabaseResult<Vec<String>> {
        self.run(|conn, name| log.locked(conn, name, feeds))
    }

    fn note_conflicts(&mut self, discarded: &[Discarded<'_>]) -> DatabaseResult<()> {
        self.run(|conn, name| settle::note_conflicts(conn, name, discarded))
    }

    fn whereabouts(&mut self, missed: &[Trace]) -> DatabaseResult<Vec<Whereabouts>> {
        self.run(|conn, name| whereabouts(conn, name, missed))
    }

    fn tell_pause(&mut self, which: &str, news: GateNews) -> DatabaseResult<Tried<()>> {
        let witness = self.witness;
        self.run_without_waiting(|conn, name| record_news(conn, name, witness, which, news))
    }

    fn take_probe(
        &mut self,
        which: &str,
        hold: Duration,
    ) -> DatabaseResult<Tried<(bool, Vec<Paused>)>> {
        self.run_without_waiting(|conn, name| {
            let is_ours = pause::take_probe(conn, name, which, hold)?;
            Ok((is_ours, pause::all(conn, name)?))
        })
    }

    fn release_probe(&mut self, which: &str) -> DatabaseResult<Tried<()>> {
        self.run_without_waiting(|conn, name| pause::release_probe(conn, name, which))
    }

    fn register(&mut self, registration: &Registration) -> DatabaseResult<LeaseId> {
        self.run(|conn, name| lease::register(conn, name, registration))
    }

    fn look(&mut self, id: LeaseId) -> DatabaseResult<Option<SeenLease>> {
        // Behind a pooler no lock is taken: clients share the session, which outlives the relay.
        let locks = self.backend.is_some();
        self.run(|conn, name| lease::look(conn, name, id, locks))
    }

    fn renew(
        &mut self,
        id: LeaseId,
        by: Duration,
        takeover_after: Option<Duration>,
        listener: Option<Backend>,
    ) -> DatabaseResult<bool> {
        self.run(|conn, name| lease::renew(conn, name, id, by, takeover_after, listener))
    }

    fn end(&mut self, id: LeaseId) -> DatabaseResult<()> {
        self.run(|conn, name| lease::end(conn, name, id).map(drop))
    }
}
