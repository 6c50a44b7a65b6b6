//! Verifies the endpoints of registered destinations: asks each whether it wants messages, before the first is sent.
//!
//! A try may take as long as a send, so it has a thread of its own, and no connection. The janitor takes what is due, and
//! records the results.

use std::sync::Arc;
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::config::Rate;
use crate::dispatch::NotVerified;
use crate::error::DatabaseError;
use crate::log;
use crate::relay::registry::{Customer, Registry};
use crate::relay::session::Session;
use crate::relay::shared::Shared;
use crate::store::relay::verification::{self, Next};

/// The interval between two checks whether destinations have changed.
const INTERVAL: Duration = Duration::from_secs(1);
/// While they are the same, the interval between two questions to the database which tries are due.
const ASK: Duration = Duration::from_secs(10);
/// The most tries at a time.
const MOST: usize = 16;

/// A try that has ended.
pub(super) struct Ended {
    customer: Arc<Customer>,
    result: Result<Option<Rate>, NotVerified>,
}

/// The tries of this relay.
pub(super) struct Verifications {
    ended: Sender<Ended>,
    /// What has ended, without those that `to_record` has.
    pub(super) inbox: Receiver<Ended>,
    to_record: Vec<Ended>,
    in_flight: usize,
    next: Instant,
    /// The destinations at the last question, and when the next one is if they stay the same.
    asked: Option<(Arc<Registry>, Instant)>,
}

impl Verifications {
    pub(super) fn new() -> Self {
        let (ended, inbox) = unbounded();
        Self {
            ended,
            inbox,
            to_record: Vec::new(),
            in_flight: 0,
            next: Instant::now(),
            asked: None,
        }
    }

    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// Keeps a try that has ended, to be recorded.
    pub(super) fn keep(&mut self, ended: impl IntoIterator<Item = Ended>) {
        let before = self.to_record.len();
        self.to_record.extend(ended);
        self.in_flight -= self.to_record.len() - before;
    }

    /// Records what has ended, and begins what is due.
    pub(super) fn look<'scope>(
        &mut self,
        shared: &Shared,
        scope: &'scope Scope<'scope, '_>,
        session: &mut Session,
    ) -> Result<(), DatabaseError> {
        self.record(session)?;
        let now = Instant::now();
        if now < self.next {
            return Ok(());
        }
        self.next = now + INTERVAL;
        let registry = shared.registered.registry();
        let most = MOST - self.in_flight;
        let is_same =
            |asked: &(Arc<Registry>, Instant)| Arc::ptr_eq(&asked.0, &registry) && now < asked.1;
        if registry.unverified.is_empty() || most == 0 || self.asked.as_ref().is_some_and(is_same) {
            return Ok(());
        }
        let seen: Vec<_> = (registry.unverified.iter())
            .filter_map(|one| Some((one.as_seen(), one.verifier.as_ref()?.timeout())))
            .collect();
        let taken = session.run(|conn, name| verification::take(conn, name, &seen, most))?;
        let ask_at = if taken.len() == most { now } else { now + ASK };
        for index in taken {
            self.begin(shared, scope, &registry.unverified[index]);
        }
        self.asked = Some((registry, ask_at));
        Ok(())
    }

    fn begin<'scope>(
        &mut self,
        shared: &Shared,
        scope: &'scope Scope<'scope, '_>,
        customer: &Arc<Customer>,
    ) {
        let (customer, ended) = (Arc::clone(customer), self.ended.clone());
        let Some(verifier) = customer.verifier.clone() else {
            return;
        };
        let thread = Builder::new().name(shared.config.thread_name("relay-verify"));
        let log = shared.log.clone();
        let try_it = move || {
            let _log = log.enter();
            let result = verifier.ask();
            // The janitor holds the receiver until this thread has ended.
            let _ = ended.send(Ended { customer, result });
        };
        match thread.spawn_scoped(scope, try_it) {
            Ok(_) => self.in_flight += 1,
            Err(error) => {
                log::error!(event = "thread_failed", error:% = error; "could not start a thread to verify a destination ({error}): trying again");
            }
        }
    }

    /// Records what has ended.
    pub(super) fn record(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let inbox = self.inbox.clone();
        self.keep(inbox.try_iter());
        while let Some(Ended { customer, result }) = self.to_record.last() {
            let (seen, own_events) = (customer.as_seen(), session.own_events);
            let name = &customer.name;
            match result {
                Ok(rate) => {
                    if session.run(|conn, name| verification::verified(conn, name, seen, *rate))? {
                        log::info!(event = "destination_verified", destination:% = name; "verified the registered destination {name}: its messages are sent");
                    }
                }
                Err(why) => {
                    let (text, is_final) = (why.text(), why.is_final);
                    let next = session.run(|conn, name| {
                        verification::failed(conn, name, seen, (&text, is_final), own_events)
                    })?;
                    match next {
                        Next::Again(wait) => {
                            log::warn!(event = "destination_not_verified", destination:% = name, reason = text, retry_in:? = wait; "could not verify the registered destination {name} ({text}): retrying in {wait:?}");
                        }
                        Next::Disabled(why) => {
                            log::warn!(event = "destination_disabled", destination:% = name, reason = why; "disabled the registered destination {name}: {why}; messages already addressed to it wait until it is enabled, and it gets no new ones");
                        }
                        Next::Changed => {}
                    }
                }
            }
            self.to_record.pop();
        }
        Ok(())
    }
}
