//! A relay without threads, for tests. It works on the caller's connection, one message after the other, and stops when
//! no message is due.
//!
//! Why: docs/decisions.md#by-hand

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::result::QueryResult;
use diesel::{Connection, PgConnection};

use super::sql::jit::without_jit;
use super::{CheckedSettings, RelayBuilder, settings_of};
use crate::dispatch::{Failure, Outcome, caught};
use crate::engine::claim::fate::Ways;
use crate::engine::claim::sql::claim::Claimant;
use crate::engine::directory::Reading;
use crate::engine::host::StartError;
use crate::engine::host::settings::Settings;
use crate::engine::keys::sql::ordered;
use crate::engine::lease::sql::lease::{self, LeaseId, Registration};
use crate::engine::observe::observer::Observers;
use crate::engine::plan::room::Rooms;
use crate::engine::send::bulkhead::{Bulkhead, SendsTo};
use crate::engine::send::job::{Job, is_expired};
use crate::engine::send::verdict::Verdict;
use crate::engine::serves::configured::Configured;
use crate::engine::serves::routes::{Routes, Way};
use crate::engine::settle::settlement::Settlement;
use crate::engine::settle::sql::settle;
use crate::engine::settle::sql::split::Piece;
use crate::engine::settle::written::{Settle, write_down};
use crate::message::Message;
use crate::operate::sql::messages::MessageRecord;
use crate::operate::sql::why::{self, WaitReason};
use crate::outbox::sql::whole::{depth, roll_back_to};
use crate::sql::range::Range;
use crate::status::{ReasonCode, Status};

/// Runs a handler inside a savepoint, so that a failed statement of the handler does not affect the rest of the test.
/// Outside of tests, the statement would fail alone.
fn in_savepoint(
    conn: &mut PgConnection,
    handle: impl FnOnce(&mut PgConnection) -> Outcome,
) -> Outcome {
    let mut outcome = None;
    let kept = conn.transaction(|conn| {
        let depth = depth(conn)?;
        outcome = Some(handle(conn));
        // A panic may have left transactions open.
        roll_back_to(conn, depth)
    });
    match (outcome, kept) {
        // The handler has seen the error and reports success. Outside of tests, its other statements would be kept.
        (Some(Outcome::Delivered(_)), Err(error)) => {
            let text = format!(
                "a statement of the handler failed ({error}), so the test's transaction keeps none of the handler's statements: run statements that may fail in their own transaction"
            );
            Outcome::Retry(Failure::new(ReasonCode::Failed, text))
        }
        (Some(outcome), Ok(()) | Err(_)) => outcome,
        (None, Ok(())) => Outcome::Retry(Failure::new(
            ReasonCode::Failed,
            "the handler returned no outcome",
        )),
        (None, Err(error)) => Outcome::Retry(Failure::new(ReasonCode::Failed, error.to_string())),
    }
}

/// Longer than any test.
const LEASE: Duration = Duration::from_secs(24 * 3600);

/// The result of one message.
pub(crate) struct EndedMessage {
    pub(crate) message: Message,
    pub(crate) status: Status,
    /// The reason why the message was not delivered.
    pub(crate) failure: Option<Failure>,
}

/// What one pass over the due messages has done.
pub(crate) struct Processed {
    pub(crate) ended: Vec<EndedMessage>,
    /// The due messages that were not processed, and why each waits.
    pub(crate) waiting: Vec<(MessageRecord, WaitReason)>,
}

pub(crate) struct ByHand {
    settings: Settings,
    routes: Arc<Routes>,
    bulkheads: Vec<Bulkhead>,
    observers: Observers,
}

impl ByHand {
    pub(crate) fn new(builder: RelayBuilder) -> Result<Self, StartError> {
        let CheckedSettings {
            config,
            mut dispatchers,
            observers,
            ..
        } = builder.checked()?;
        dispatchers.clients = None;
        Ok(Self {
            routes: Arc::new(Routes::new(&config)),
            bulkheads: Bulkhead::all(&config, dispatchers).0,
            settings: settings_of(&config, false),
            observers,
        })
    }

    /// Processes each due message once. Also returns the due messages that wait, and why.
    pub(crate) fn drain(&self, conn: &mut PgConnection) -> QueryResult<Processed> {
        without_jit(conn, |conn| {
            let name = &self.settings.table;
            let registration = Registration {
                relay: "test".to_owned(),
                lease: LEASE,
                is_single_active: false,
                serves: None,
                records_topics: false,
                settings: None,
            };
            let lease = lease::register(conn, name, &registration)?;
            let ended = self.take_each(conn, lease);
            if ended.is_err() {
                // In a failed transaction these statements fail too, and the rollback undoes everything.
                let _ = settle::release_unknown(conn, name, lease, &[], Range::ALL);
                let _ = lease::end(conn, name, lease);
            }
            let ended = ended?;
            let sequences: Vec<i64> = ended.iter().map(|one| one.message.sequence.0).collect();
            let waiting = why::due_in_test(conn, name, &sequences)?;
            Ok(Processed { ended, waiting })
        })
    }

    fn take_each(&self, conn: &mut PgConnection, lease: LeaseId) -> QueryResult<Vec<EndedMessage>> {
        let name = &self.settings.table;
        let mut ended = Vec::new();
        let mut seen = Vec::new();
        while let Some(claimed) = ordered::claim_one(conn, name, lease, &seen)? {
            seen.push(claimed.message.sequence.0);
            let mut ways = Ways {
                bulkheads: &self.bulkheads,
                on_dead: self.settings.on_dead,
                roster: Arc::new(Configured::new(Arc::clone(&self.routes), None)),
                rooms: Rooms::default(),
                doubted: &|_, _| {},
                reading: Reading::NotAsked,
                seen: None,
            };
            let job = ways.last_job(claimed, lease, Instant::now());
            let verdict = self.verdict(&job, conn);
            let unrouted =
                matches!(verdict, Verdict::Released).then(|| self.unrouted(&job.message));
            let settlement = Settlement::unsent(job, &self.bulkheads, verdict);
            let settle = Settle {
                settings: &self.settings,
                bulkheads: &self.bulkheads,
                claimant: Claimant {
                    bytes: 0,
                    ..Claimant::of(lease)
                },
                kind: settlement.kind(),
                group: std::slice::from_ref(&settlement),
                keys: &HashMap::new(),
                closed: &[],
                piece: Piece::WHOLE,
            };
            let written = write_down(conn, &settle)?;
            let settlement = match written.in_conflict.is_empty() {
                true => settlement,
                false => settlement.in_conflict(),
            };
            if let Some(failure) = unrouted {
                ended.push(EndedMessage {
                    message: *settlement.message,
                    status: Status::Pending,
                    failure: Some(failure),
                });
            } else if let Some(settled) = settlement.told(&self.bulkheads) {
                let message = &settlement.message;
                self.observers.tell(message, |one| one.settled(&settled));
                ended.push(EndedMessage {
                    message: Message::clone(message),
                    status: settled.status,
                    failure: settlement.failure().cloned(),
                });
            }
        }
        lease::end(conn, name, lease)?;
        Ok(ended)
    }

    /// Decides as the relay does, and sends the message if the relay would send it.
    fn verdict(&self, job: &Job, conn: &mut PgConnection) -> Verdict {
        let message = &job.message;
        match (&job.unsent, job.to.bulkhead(&self.bulkheads)) {
            (Some(verdict), _) => verdict.clone(),
            (None, Some(bulkhead)) if !is_expired(message, Instant::now()) => {
                let outcome = self.send(bulkhead, message, conn);
                Verdict::of_outcome(outcome, message.attempts, &bulkhead.limits.retries)
            }
            (None, _) => Verdict::expired(),
        }
    }

    /// The reason why no destination serves the message.
    fn unrouted(&self, message: &Message) -> Failure {
        let Message {
            topic, destination, ..
        } = message;
        let (code, error) = match self.routes.find(topic, destination) {
            Way::UnknownDestination => (
                ReasonCode::UnknownDestination,
                format!("there is no destination named {destination:?}"),
            ),
            _ => (
                ReasonCode::NoRoute,
                format!("the topic {topic:?} has no route, no handler and no default URL"),
            ),
        };
        Failure::new(code, error)
    }

    fn send(&self, bulkhead: &Bulkhead, message: &Message, conn: &mut PgConnection) -> Outcome {
        let (began, name) = (Instant::now(), &*bulkhead.name);
        self.observers
            .tell(message, |one| one.sending(message, name));
        let outcome = match &bulkhead.serves {
            SendsTo::Handlers(handlers) => {
                in_savepoint(conn, |conn| handlers.call_here(message, conn))
            }
            SendsTo::Dispatcher(dispatcher) => {
                caught(message, || dispatcher.dispatch(message)).unwrap_or_else(Outcome::Retry)
            }
            SendsTo::Members(_) => Outcome::Retry(Failure::new(
                ReasonCode::UnknownDestination,
                "only a running relay serves endpoints",
            )),
            SendsTo::Feed => Outcome::Retry(Failure::new(
                ReasonCode::UnknownDestination,
                "only a running relay serves feeds",
            )),
        };
        let took = began.elapsed();
        self.observers
            .tell(message, |one| one.sent(message, name, &outcome, took));
        outcome
    }
}
