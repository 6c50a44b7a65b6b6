//! A relay without threads, for tests: it works on the caller's connection, one message after the
//! other, and ends when nothing is due.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, TransactionManager};
use diesel::result::{Error, QueryResult};
use diesel::{Connection, PgConnection};

use super::StartError;
use super::builder::{Assembled, RelayBuilder};
use super::bulkhead::{Bulkhead, Serves};
use super::fate::Ways;
use super::job::{Job, is_expired};
use super::observer::Observers;
use super::registered::Rooms;
use super::settlement::Settlement;
use super::settler::Settle;
use super::settler::write_down;
use super::verdict::Verdict;
use crate::config::Config;
use crate::dispatch::{Failure, Outcome, caught};
use crate::message::Message;
use crate::routes::{Routes, Way};
use crate::status::{ReasonCode, Status};
use crate::store::range::Range;
use crate::store::relay::lease::{LeaseId, Registration};
use crate::store::relay::{lease, ordered, settle};
use crate::store::testing;

/// How many transactions are open, one inside the other.
fn depth(conn: &mut PgConnection) -> QueryResult<u32> {
    let status = AnsiTransactionManager::transaction_manager_status_mut(conn);
    let depth = status.transaction_depth();
    Ok(depth
        .map_err(|_| Error::BrokenTransactionManager)?
        .map_or(0, NonZeroU32::get))
}

/// Runs a handler so that a statement of its that fails spoils nothing else: outside of tests it would
/// have failed alone.
fn in_savepoint(
    conn: &mut PgConnection,
    handle: impl FnOnce(&mut PgConnection) -> Outcome,
) -> Outcome {
    let mut outcome = None;
    let kept = conn.transaction(|conn| {
        let depth = depth(conn)?;
        outcome = Some(handle(conn));
        // Those that a panic has left open.
        while self::depth(conn)? > depth {
            AnsiTransactionManager::rollback_transaction(conn)?;
        }
        QueryResult::Ok(())
    });
    match (outcome, kept) {
        // It has heard of the error, and goes on as if nothing had been: outside of tests its other
        // statements would stay.
        (Some(Outcome::Delivered(_)), Err(error)) => {
            let text = format!(
                "a statement of the handler failed, so in a test's transaction none can stay ({error}): put what may fail into a transaction of its own"
            );
            Outcome::Retry(Failure::new(ReasonCode::Failed, text))
        }
        (Some(outcome), Ok(()) | Err(_)) => outcome,
        (None, Ok(())) => Outcome::Retry(Failure::new(ReasonCode::Failed, "no outcome")),
        (None, Err(error)) => Outcome::Retry(Failure::new(ReasonCode::Failed, error.to_string())),
    }
}

/// No test takes as long as this.
const LEASE: Duration = Duration::from_secs(24 * 3600);

/// What became of one message.
pub(crate) struct Ended {
    pub(crate) message: Message,
    pub(crate) status: Status,
    /// Why it was not delivered.
    pub(crate) failure: Option<Failure>,
}

pub(crate) struct ByHand {
    config: Config,
    routes: Routes,
    bulkheads: Vec<Bulkhead>,
    observers: Observers,
}

impl ByHand {
    pub(crate) fn new(builder: RelayBuilder) -> Result<Self, StartError> {
        let Assembled {
            config,
            mut dispatchers,
            observers,
            ..
        } = builder.assemble()?;
        dispatchers.customers = None;
        Ok(Self {
            routes: Routes::new(&config),
            bulkheads: Bulkhead::all(&config, dispatchers).0,
            config,
            observers,
        })
    }

    /// Takes each message that is due, once.
    pub(crate) fn drain(&self, conn: &mut PgConnection) -> QueryResult<Vec<Ended>> {
        testing::without_jit(conn, |conn| {
            let name = &self.config.table;
            let registration = Registration {
                relay: "test".to_owned(),
                lease: LEASE,
                is_single_active: false,
                serves: None,
            };
            let lease = lease::register(conn, name, &registration)?;
            let ended = self.take_each(conn, lease);
            if ended.is_err() {
                // In a test's transaction this fails as well, and nothing of it stays.
                let _ = settle::release_unknown(conn, name, lease, &[], Range::ALL);
                let _ = lease::end(conn, name, lease);
            }
            ended
        })
    }

    fn take_each(&self, conn: &mut PgConnection, lease: LeaseId) -> QueryResult<Vec<Ended>> {
        let name = &self.config.table;
        let mut ended = Vec::new();
        let mut seen = Vec::new();
        while let Some(claimed) = ordered::claim_one(conn, name, lease, &seen)? {
            seen.push(claimed.message.sequence.0);
            let mut ways = Ways {
                routes: &self.routes,
                bulkheads: &self.bulkheads,
                registry: Arc::default(),
                rooms: Rooms::default(),
                met: None,
            };
            let job = ways.job(claimed, lease, Instant::now());
            let verdict = self.verdict(&job, conn);
            let unrouted =
                matches!(verdict, Verdict::Released).then(|| self.unrouted(&job.message));
            let settlement = Settlement::unsent(job, &self.bulkheads, verdict);
            let settle = Settle {
                config: &self.config,
                bulkheads: &self.bulkheads,
                lease,
                kind: settlement.kind(),
                group: std::slice::from_ref(&settlement),
                keys: &HashMap::new(),
                closed: &[],
                bytes: 0,
            };
            let written = write_down(conn, &settle)?;
            let settlement = match written.in_conflict.is_empty() {
                true => settlement,
                false => settlement.in_conflict(),
            };
            if let Some(failure) = unrouted {
                ended.push(Ended {
                    message: settlement.message,
                    status: Status::Pending,
                    failure: Some(failure),
                });
            } else if let Some(settled) = settlement.told(&self.bulkheads) {
                let message = &settlement.message;
                self.observers.tell(message, |one| one.settled(&settled));
                ended.push(Ended {
                    message: message.clone(),
                    status: settled.status,
                    failure: settlement.failure().cloned(),
                });
            }
        }
        lease::end(conn, name, lease)?;
        Ok(ended)
    }

    /// As the relay decides: what it would send is sent here.
    fn verdict(&self, job: &Job, conn: &mut PgConnection) -> Verdict {
        let message = &job.message;
        match (&job.unsent, job.to.bulkhead(&self.bulkheads)) {
            (Some(verdict), _) => verdict.clone(),
            (None, Some(bulkhead)) if !is_expired(message, Instant::now()) => {
                let outcome = self.send(bulkhead, message, conn);
                Verdict::of_outcome(outcome, message.attempts, &bulkhead.retries)
            }
            (None, _) => Verdict::expired(),
        }
    }

    /// Why nothing becomes of it.
    fn unrouted(&self, message: &Message) -> Failure {
        let Message {
            topic, destination, ..
        } = message;
        let (code, error) = match self.routes.find(topic, destination) {
            Way::UnknownDestination => (
                ReasonCode::UnknownDestination,
                format!("no destination is called {destination:?}"),
            ),
            _ => (
                ReasonCode::NoRoute,
                format!("no route, no handler and no default URL serves the topic {topic:?}"),
            ),
        };
        Failure::new(code, error)
    }

    fn send(&self, bulkhead: &Bulkhead, message: &Message, conn: &mut PgConnection) -> Outcome {
        let (began, name) = (Instant::now(), &*bulkhead.name);
        self.observers
            .tell(message, |one| one.sending(message, name));
        let outcome = match &bulkhead.serves {
            Serves::Group(group) => in_savepoint(conn, |conn| group.handle_here(message, conn)),
            Serves::Dispatcher(dispatcher) => {
                caught(message, || dispatcher.dispatch(message)).unwrap_or_else(Outcome::Retry)
            }
            Serves::Registered => Outcome::Retry(Failure::new(
                ReasonCode::UnknownDestination,
                "registered destinations are served by a running relay only",
            )),
        };
        let took = began.elapsed();
        self.observers
            .tell(message, |one| one.sent(message, name, &outcome, took));
        outcome
    }
}
