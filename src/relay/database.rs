//! What claimer, settlers, gates and heartbeat ask of the database: each is one call, with one answer.
//!
//! A [`Session`] asks PostgreSQL; the simulation asks a database of its own.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use diesel::Connection;

use super::doubt::Doubt;
use super::gate::News;
use super::planner::{LATE_STEP, PATROL_STEP, Part, Streams, Surveyed, WALK_STEP};
use super::registered::{Changes, Registry};
use super::session::{AfterRefusal, Session};
use super::settler::{Settle, Written, write_down};
use crate::error::DatabaseError;
use crate::store::brief::briefly;
use crate::store::destinations::{self, AsSeen};
use crate::store::range::Range;
use crate::store::relay::claim::{self, Batch, Claimant, Lane, Position, Stream};
use crate::store::relay::connection;
use crate::store::relay::late::{Late, LookForLate, late};
use crate::store::relay::lease::{self, LeaseId, Registration, Seen};
use crate::store::relay::ordered::{self, Candidate, Key, Page};
use crate::store::relay::own;
use crate::store::relay::patrol::{self, Free};
use crate::store::relay::pause::{self, BREAKER_OPEN, Pausable, Paused};
use crate::store::relay::served;
use crate::store::relay::settle::{self, Claim, Trace};
use crate::store::relay::streams::{streams, streams_behind, streams_beside};
use crate::store::relay::unserved;
use crate::store::relay::whereabouts::{Whereabouts, whereabouts};

/// What came back, or why nothing did.
pub(super) type Answer<T> = Result<T, DatabaseError>;

pub(super) trait Database {
    /// The server's process that the last statements ran in.
    fn backend(&self) -> Option<i32>;

    /// How long to wait before the next try.
    fn wait(&self) -> Duration;

    /// Whether the last error came from what is wrong with the outbox.
    fn is_missing(&self) -> bool;

    /// What has failed was refused for its values: the database is there.
    fn was_only_refused(&self);

    /// Topics, leases that are over, how the lease stands, and what is paused.
    fn survey(
        &mut self,
        lease: LeaseId,
        streams: &Streams,
        moment: Duration,
    ) -> Answer<(Surveyed, Vec<Paused>)>;

    /// What has changed of registered destinations since then, by what was known of each, and what others serve.
    fn registered(&mut self, known: &Registry) -> Answer<Option<Changes>>;

    /// Which of these messages meet the filters of these registered destinations, by their places. `None`: it took too
    /// long.
    fn meeting(
        &mut self,
        after: AfterRefusal,
        pairs: &[(i64, &str)],
        moment: Duration,
    ) -> Answer<Option<Vec<i64>>>;

    /// Whether filters can be asked about this payload.
    fn is_filterable(&mut self, payload: &str) -> Answer<bool>;

    /// A registered destination cannot be used as it is. `false`: it is otherwise by now.
    fn disable(&mut self, seen: AsSeen<'_>, why: &str) -> Answer<bool>;

    /// Messages without a key, `room` of them at most.
    fn claim(&mut self, by: Claimant<'_>, lanes: &[Lane], room: usize) -> Answer<Batch>;

    /// The first messages of their keys in these lanes, and where the look at each of these ended. `None`: another
    /// relay is claiming keyed messages.
    fn claim_due(
        &mut self,
        by: Claimant<'_>,
        lanes: &[Lane],
        goes_to: &[String],
        room: usize,
    ) -> Answer<(Option<Batch>, HashMap<Stream, Position>)>;

    /// The first messages of the keys behind this one. `None`: it took too long.
    fn walk(&mut self, expired: &[i64], from: &Key, moment: Duration) -> Answer<Option<Page>>;

    /// The first messages of these keys.
    fn first_of(&mut self, expired: &[i64], keys: &[Key]) -> Answer<Page>;

    /// These keyed messages. `None`: another relay is claiming keyed messages.
    fn claim_keyed(&mut self, by: Claimant<'_>, candidates: &[Candidate]) -> Answer<Option<Batch>>;

    /// What is free in a range. `None`: it took too long.
    fn free(
        &mut self,
        expired: &[i64],
        range: Range,
        moment: Duration,
    ) -> Answer<Option<Vec<Free>>>;

    /// What was committed late. `None`: it took too long.
    fn late(
        &mut self,
        expired: &[i64],
        look: LookForLate,
        moment: Duration,
    ) -> Answer<Option<Late>>;

    /// These messages, which have no keys.
    fn claim_chosen(&mut self, by: Claimant<'_>, sequences: &[i64]) -> Answer<Batch>;

    /// Messages of a stream whose time is over.
    fn expired(&mut self, stream: &Stream, after: Position) -> Answer<unserved::Part>;

    /// Whether a claim without an answer is at work still: then its lease is ended.
    fn end_if_at_work(&mut self, doubt: Doubt) -> Answer<bool>;

    /// Gives back what a lease holds and nobody knows of. `None`: it took too long.
    fn release_unknown(&mut self, part: &Part, moment: Duration) -> Answer<Option<usize>>;

    /// Writes down a group and claims what follows in its keys: in one transaction, so that no other relay can be
    /// faster.
    fn settle(&mut self, after: AfterRefusal, settle: &Settle<'_>) -> Answer<(Written, Batch)>;

    /// Those that were settled by their claims.
    fn settled(&mut self, after: AfterRefusal, traces: &[Trace]) -> Answer<Vec<i64>>;

    /// Gives these back.
    fn release(&mut self, lease: LeaseId, claims: &[Claim]) -> Answer<()>;

    /// What became of messages that a settle has not found.
    fn whereabouts(&mut self, missed: &[Trace]) -> Answer<Vec<Whereabouts>>;

    /// Tells others what a gate has seen.
    fn tell_pause(&mut self, destination: &str, news: News) -> Answer<()>;

    /// Whether the breaker of a destination has not closed for so long.
    fn has_failed_for(&mut self, destination: &str, duration: Duration) -> Answer<bool>;

    /// Whether this relay may probe a destination for so long, and what is paused.
    fn take_probe(&mut self, destination: &str, hold: Duration) -> Answer<(bool, Vec<Paused>)>;

    fn give_back_probe(&mut self, destination: &str) -> Answer<()>;

    fn register(&mut self, registration: &Registration) -> Answer<LeaseId>;

    /// Looks at the lease, and takes its lock, where the connection keeps one. `None`: the lease is over.
    fn look(&mut self, lease: LeaseId) -> Answer<Option<Seen>>;

    /// Whether the lease was there still: it is good for so long again.
    fn renew(
        &mut self,
        lease: LeaseId,
        by: Duration,
        takeover_after: Option<Duration>,
    ) -> Answer<bool>;

    fn end(&mut self, lease: LeaseId) -> Answer<()>;
}

impl Database for Session {
    fn backend(&self) -> Option<i32> {
        self.backend
    }

    fn wait(&self) -> Duration {
        self.wait()
    }

    fn is_missing(&self) -> bool {
        self.is_missing
    }

    fn was_only_refused(&self) {
        self.threads.set_connected(self.post, self.conn.is_some());
    }

    fn survey(
        &mut self,
        lease: LeaseId,
        asked: &Streams,
        moment: Duration,
    ) -> Answer<(Surveyed, Vec<Paused>)> {
        self.run(|conn, name| {
            let began = Instant::now();
            let streams = match asked {
                Streams::All => briefly(conn, moment, |conn| streams(conn, name))?,
                Streams::Beside(known) => {
                    briefly(conn, moment, |conn| streams_beside(conn, name, known))?
                }
                Streams::Behind(sequence) => {
                    briefly(conn, moment, |conn| streams_behind(conn, name, *sequence))?
                }
            };
            let took = began.elapsed();
            let shortened = lease::shorten(conn, name, lease)?;
            let ended = lease::ended(conn, name)?;
            let standing = lease::standing(conn, name, lease)?;
            let found = Surveyed {
                streams,
                took,
                shortened,
                ended,
                is_active: standing.is_active,
                time: standing.now,
                server: standing.server,
                ..Surveyed::default()
            };
            Ok((found, pause::all(conn, name)?))
        })
    }

    fn registered(&mut self, known: &Registry) -> Answer<Option<Changes>> {
        self.run(|conn, name| {
            let stamp = destinations::stamp(conn, name)?;
            if stamp.0 == 0 && !known.is_in_use() {
                return Ok(None);
            }
            let others = served::others(conn, name)?;
            if stamp == known.stamp {
                return Ok(Some(Changes {
                    stamp,
                    others,
                    ..Changes::default()
                }));
            }
            let mut gone = known.stamps();
            let mut changed = HashMap::new();
            for (destination, stamp) in destinations::stamps(conn, name)? {
                if gone.remove(&destination) != Some(stamp) {
                    changed.insert(destination, stamp);
                }
            }
            let names: Vec<String> = changed.keys().cloned().collect();
            let rows = destinations::registered_as(conn, name, &names)?.into_iter();
            let rows = rows.filter_map(|one| {
                let stamp = *changed.get(&one.row.name)?;
                Some((one, stamp))
            });
            Ok(Some(Changes {
                stamp,
                others,
                gone: gone.into_keys().collect(),
                rows: rows.collect(),
            }))
        })
    }

    fn meeting(
        &mut self,
        after: AfterRefusal,
        pairs: &[(i64, &str)],
        moment: Duration,
    ) -> Answer<Option<Vec<i64>>> {
        self.run_with(after, |conn, name| {
            briefly(conn, moment, |conn| {
                destinations::meeting(conn, name, pairs)
            })
        })
    }

    fn is_filterable(&mut self, payload: &str) -> Answer<bool> {
        let read = self.run_with(AfterRefusal::Keep, |conn, _| {
            destinations::read_payload(conn, payload)
        });
        match read {
            Err(error) if error.is_refusal() => Ok(false),
            read => read.map(|()| true),
        }
    }

    fn disable(&mut self, seen: AsSeen<'_>, why: &str) -> Answer<bool> {
        if self.own_events {
            return self
                .run(|conn, name| conn.transaction(|conn| own::disable(conn, name, seen, why)));
        }
        self.run(|conn, name| {
            let disabled = destinations::disable_as_seen(conn, name, seen, why)?;
            Ok(disabled.is_some())
        })
    }

    fn claim(&mut self, by: Claimant<'_>, lanes: &[Lane], room: usize) -> Answer<Batch> {
        self.run(|conn, name| claim::claim(conn, name, by, lanes, room))
    }

    fn claim_due(
        &mut self,
        by: Claimant<'_>,
        lanes: &[Lane],
        goes_to: &[String],
        room: usize,
    ) -> Answer<(Option<Batch>, HashMap<Stream, Position>)> {
        self.run(|conn, name| {
            let goes_to: Vec<&str> = goes_to.iter().map(String::as_str).collect();
            let found = ordered::due(conn, name, by, lanes, &goes_to)?;
            let (mut due, mut reached) = (Vec::new(), HashMap::new());
            for (lane, found) in lanes.iter().zip(found) {
                due.extend(found.candidates);
                reached.extend(found.reached.map(|at| (lane.stream.clone(), at)));
            }
            due.truncate(room);
            let batch = match due.is_empty() {
                true => Some(Batch::default()),
                false => ordered::claim(conn, name, by, &due)?,
            };
            Ok((batch, reached))
        })
    }

    fn walk(&mut self, expired: &[i64], from: &Key, moment: Duration) -> Answer<Option<Page>> {
        self.run(|conn, name| {
            briefly(conn, moment, |conn| {
                ordered::walk(conn, name, expired, from, WALK_STEP)
            })
        })
    }

    fn first_of(&mut self, expired: &[i64], keys: &[Key]) -> Answer<Page> {
        self.run(|conn, name| ordered::first_of(conn, name, expired, keys))
    }

    fn claim_keyed(&mut self, by: Claimant<'_>, candidates: &[Candidate]) -> Answer<Option<Batch>> {
        self.run(|conn, name| ordered::claim(conn, name, by, candidates))
    }

    fn free(
        &mut self,
        expired: &[i64],
        range: Range,
        moment: Duration,
    ) -> Answer<Option<Vec<Free>>> {
        self.run(|conn, name| {
            briefly(conn, moment, |conn| {
                patrol::free(conn, name, expired, range, PATROL_STEP)
            })
        })
    }

    fn late(
        &mut self,
        expired: &[i64],
        look: LookForLate,
        moment: Duration,
    ) -> Answer<Option<Late>> {
        self.run(|conn, name| {
            briefly(conn, moment, |conn| {
                late(conn, name, expired, look, LATE_STEP)
            })
        })
    }

    fn claim_chosen(&mut self, by: Claimant<'_>, sequences: &[i64]) -> Answer<Batch> {
        self.run(|conn, name| claim::claim_chosen(conn, name, by, sequences))
    }

    fn expired(&mut self, stream: &Stream, after: Position) -> Answer<unserved::Part> {
        self.run(|conn, name| unserved::expired(conn, name, stream, after))
    }

    fn end_if_at_work(&mut self, Doubt { lease, backend }: Doubt) -> Answer<bool> {
        self.run(|conn, name| {
            let is_at_work = match backend {
                Some(backend) => connection::is_at_work(conn, backend)?,
                None => true,
            };
            if is_at_work {
                lease::expire(conn, name, lease)?;
            }
            Ok(is_at_work)
        })
    }

    fn release_unknown(&mut self, part: &Part, moment: Duration) -> Answer<Option<usize>> {
        self.run(|conn, name| {
            briefly(conn, moment, |conn| {
                settle::release_unknown(conn, name, part.lease, &part.known, part.range)
            })
        })
    }

    fn settle(&mut self, after: AfterRefusal, settle: &Settle<'_>) -> Answer<(Written, Batch)> {
        if settle.keys.is_empty() {
            let written = self.run_with(after, |conn, _| write_down(conn, settle))?;
            return Ok((written, Batch::default()));
        }
        let claimant = Claimant {
            lease: settle.lease,
            expired: &[],
            max_attempts: settle.config.max_attempts,
            bytes: settle.bytes,
        };
        self.run_with(after, |conn, name| {
            conn.transaction(|conn| {
                let written = write_down(conn, settle)?;
                let of_changed = written
                    .changed
                    .iter()
                    .filter_map(|one| settle.keys.get(one));
                let keys: Vec<Key> = of_changed.cloned().collect();
                let next = match keys.is_empty() {
                    true => Batch::default(),
                    false => ordered::claim_next(conn, name, claimant, &keys, settle.closed)?,
                };
                Ok((written, next))
            })
        })
    }

    fn settled(&mut self, after: AfterRefusal, traces: &[Trace]) -> Answer<Vec<i64>> {
        self.run_with(after, |conn, name| settle::settled(conn, name, traces))
    }

    fn release(&mut self, lease: LeaseId, claims: &[Claim]) -> Answer<()> {
        self.run(|conn, name| settle::release(conn, name, lease, claims).map(drop))
    }

    fn whereabouts(&mut self, missed: &[Trace]) -> Answer<Vec<Whereabouts>> {
        self.run(|conn, name| whereabouts(conn, name, missed))
    }

    fn tell_pause(&mut self, which: &str, news: News) -> Answer<()> {
        // What is left of it by now: the database may have been away.
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let (reason, duration, openings) = match news {
            News::Paused(code, until) => (code.as_str(), until.map(left), 0),
            News::Opened(until, openings) if self.own_events => {
                return self.run(|conn, name| {
                    let left = left(until);
                    conn.transaction(|conn| own::open_breaker(conn, name, which, left, openings))
                });
            }
            News::Opened(until, openings) => (BREAKER_OPEN, Some(left(until)), openings),
            News::Recovered => {
                return self.run(|conn, name| pause::close_breaker(conn, name, which));
            }
        };
        let kind = Pausable::Destination;
        self.run(|conn, name| pause::pause(conn, name, kind, which, reason, duration, openings))
    }

    fn has_failed_for(&mut self, which: &str, duration: Duration) -> Answer<bool> {
        self.run(|conn, name| pause::has_failed_for(conn, name, which, duration))
    }

    fn take_probe(&mut self, which: &str, hold: Duration) -> Answer<(bool, Vec<Paused>)> {
        self.run(|conn, name| {
            let is_ours = pause::take_probe(conn, name, which, hold)?;
            Ok((is_ours, pause::all(conn, name)?))
        })
    }

    fn give_back_probe(&mut self, which: &str) -> Answer<()> {
        self.run(|conn, name| pause::give_back_probe(conn, name, which).map(drop))
    }

    fn register(&mut self, registration: &Registration) -> Answer<LeaseId> {
        self.run(|conn, name| lease::register(conn, name, registration))
    }

    fn look(&mut self, id: LeaseId) -> Answer<Option<Seen>> {
        // Known of a connection that was made. Behind a pooler a session is everybody's, and outlives the relay.
        let locks = self.backend.is_some();
        self.run(|conn, name| lease::look(conn, name, id, locks))
    }

    fn renew(
        &mut self,
        id: LeaseId,
        by: Duration,
        takeover_after: Option<Duration>,
    ) -> Answer<bool> {
        self.run(|conn, name| lease::renew(conn, name, id, by, takeover_after))
    }

    fn end(&mut self, id: LeaseId) -> Answer<()> {
        self.run(|conn, name| lease::end(conn, name, id).map(drop))
    }
}
