//! Verifies endpoints: asks each whether it wants messages, before the first is sent.
//!
//! A try may take as long as a send, so it has a thread of its own, and no connection. The janitor's thread takes what is
//! due, and records the results.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use uuid::Uuid;

use super::roster::{KnownEndpoint, Registry};
use super::serving::ServedEndpoints;
use super::sql::verification::{self, NextTry};
use crate::config::Rate;
use crate::dispatch::NotVerified;
use crate::engine::clean::chore::Chore;
use crate::engine::host::session::Session;
use crate::engine::host::shared::Shared;
use crate::error::DatabaseError;
use crate::http::EndpointVerifier;
use crate::log;

/// The interval between two checks whether endpoints have changed.
const INTERVAL: Duration = Duration::from_secs(1);
/// While they are the same, the interval between two questions to the database which tries are due.
const ASK: Duration = Duration::from_secs(10);
/// The most tries at a time: of all tenants, and of each. Endpoints that hang hold up no endpoint of another tenant.
const MOST: usize = 32;
const MOST_OF_TENANT: usize = 4;

/// A try that has ended.
struct EndedTry {
    endpoint: Arc<KnownEndpoint>,
    result: Result<Option<Rate>, NotVerified>,
}

/// The tries of this relay.
struct Verifications<'a> {
    served: &'a ServedEndpoints,
    shared: &'a Shared,
    ended: Sender<EndedTry>,
    /// What has ended, without those that `to_record` has.
    inbox: Receiver<EndedTry>,
    threads: Vec<JoinHandle<()>>,
    to_record: Vec<EndedTry>,
    /// The number of tries of each tenant.
    in_flight: HashMap<Option<Uuid>, usize>,
    next: Instant,
    /// The endpoints at the last question, and when the next one is if they stay the same.
    asked: Option<(Arc<Registry>, Instant)>,
}

/// Those of the due tries that begin now: tenants with few tries come first.
fn choose(
    due: Vec<usize>,
    tenant: impl Fn(usize) -> Option<Uuid>,
    in_flight: &HashMap<Option<Uuid>, usize>,
) -> Vec<usize> {
    let room = MOST.saturating_sub(in_flight.values().sum());
    let mut tries = in_flight.clone();
    let mut ranked: Vec<(usize, usize)> = Vec::new();
    for index in due {
        let count = tries.entry(tenant(index)).or_default();
        if *count < MOST_OF_TENANT {
            ranked.push((*count, index));
            *count += 1;
        }
    }
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.truncate(room);
    ranked.into_iter().map(|(_, index)| index).collect()
}

pub(super) fn chore<'a>(served: &'a ServedEndpoints, shared: &'a Shared) -> Box<dyn Chore + 'a> {
    let (ended, inbox) = unbounded();
    Box::new(Verifications {
        served,
        shared,
        ended,
        inbox,
        threads: Vec::new(),
        to_record: Vec::new(),
        in_flight: HashMap::new(),
        next: Instant::now(),
        asked: None,
    })
}

impl Verifications<'_> {
    /// Keeps the tries that have ended, to be recorded.
    fn keep_ended(&mut self) {
        for one in self.inbox.try_iter() {
            let tenant = one.endpoint.tenant_id;
            if let Some(count) = self.in_flight.get_mut(&tenant) {
                *count -= 1;
                if *count == 0 {
                    self.in_flight.remove(&tenant);
                }
            }
            self.to_record.push(one);
        }
    }

    /// Begins what is due.
    fn look(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let now = Instant::now();
        if now < self.next {
            return Ok(());
        }
        self.next = now + INTERVAL;
        let registry = self.served.registry();
        let is_same =
            |asked: &(Arc<Registry>, Instant)| Arc::ptr_eq(&asked.0, &registry) && now < asked.1;
        if registry.unverified.is_empty() || self.asked.as_ref().is_some_and(is_same) {
            return Ok(());
        }
        let asked: Vec<(&Arc<KnownEndpoint>, Arc<EndpointVerifier>)> = (registry.unverified.iter())
            .filter_map(|one| Some((one, self.served.verifier(one.id)?)))
            .collect();
        let seen: Vec<_> = (asked.iter())
            .map(|(one, verifier)| (one.as_seen(), verifier.timeout()))
            .collect();
        let tenant = |index: usize| asked[index].0.tenant_id;
        let (in_flight, mut is_any_left) = (&self.in_flight, false);
        let choose = |due: Vec<usize>| {
            let count = due.len();
            let chosen = choose(due, tenant, in_flight);
            is_any_left = chosen.len() < count;
            chosen
        };
        let taken = session.run(|conn, name| verification::take(conn, name, &seen, choose))?;
        let ask_at = if is_any_left { now } else { now + ASK };
        for index in taken {
            let (endpoint, verifier) = &asked[index];
            self.try_now(endpoint, Arc::clone(verifier));
        }
        self.asked = Some((registry, ask_at));
        Ok(())
    }

    fn try_now(&mut self, endpoint: &Arc<KnownEndpoint>, verifier: Arc<EndpointVerifier>) {
        let (endpoint, ended) = (Arc::clone(endpoint), self.ended.clone());
        let (log, bell) = (self.shared.log.clone(), self.shared.signals.chores.clone());
        let tenant = endpoint.tenant_id;
        let thread = Builder::new().name(self.shared.settings.thread_name("relay-verify"));
        let try_it = move || {
            let _log = log.enter();
            let result = verifier.ask();
            // `Verifications` holds the receiver until this thread has ended.
            let _ = ended.send(EndedTry { endpoint, result });
            bell.ring();
        };
        match thread.spawn(try_it) {
            Ok(thread) => {
                *self.in_flight.entry(tenant).or_default() += 1;
                self.threads.push(thread);
            }
            Err(error) => {
                log::error!(event = "thread_failed", error:% = error; "could not start a thread to verify a destination ({error}): trying again");
            }
        }
    }

    /// Records what has ended.
    fn record(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        self.keep_ended();
        while let Some(EndedTry { endpoint, result }) = self.to_record.last() {
            let (seen, own_events) = (endpoint.as_seen(), session.witness.is_some());
            let name = &endpoint.name;
            match result {
                Ok(rate) => {
                    if session.run(|conn, name| verification::verified(conn, name, seen, *rate))? {
                        log::info!(event = "endpoint_verified", destination:% = name; "verified the endpoint {name}: its messages are sent");
                    }
                }
                Err(why) => {
                    let (text, is_final) = (why.text(), why.is_final);
                    let next = session.run(|conn, name| {
                        verification::failed(conn, name, seen, (&text, is_final), own_events)
                    })?;
                    match next {
                        NextTry::Again(wait) => {
                            log::warn!(event = "endpoint_not_verified", destination:% = name, reason = text, retry_in:? = wait; "could not verify the endpoint {name} ({text}): retrying in {wait:?}");
                        }
                        NextTry::Disabled(why) => {
                            log::warn!(event = "endpoint_disabled", destination:% = name, reason = why; "disabled the endpoint {name}: {why}; messages already addressed to it wait until it is enabled, and it gets no new ones");
                        }
                        NextTry::Changed => {}
                    }
                }
            }
            self.to_record.pop();
        }
        Ok(())
    }
}

impl Chore for Verifications<'_> {
    fn next(&self) -> Option<Instant> {
        Some(self.next)
    }

    fn work(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let (ended, running) = (self.threads.drain(..)).partition(JoinHandle::is_finished);
        self.threads = running;
        join(ended);
        self.record(session)?;
        self.look(session)
    }

    /// Waits for the tries, and records their results.
    fn last(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        join(std::mem::take(&mut self.threads));
        self.record(session)
    }
}

fn join(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        if thread.join().is_err() {
            log::error!(event = "thread_panicked"; "a thread that verifies a destination has panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R65: sixty-four endpoints of one tenant that hang hold up no endpoint of another tenant.
    #[test]
    fn tenants_share_the_places_of_verifications() {
        let tenant = |index: usize| (index > 0).then(|| Uuid::from_u128(index as u128 / 100));
        let many: Vec<usize> = (100..164).collect();
        let chosen = choose(many.clone(), tenant, &HashMap::new());
        assert_eq!(chosen, [100, 101, 102, 103]);
        let in_flight = HashMap::from([(Some(Uuid::from_u128(1)), MOST_OF_TENANT)]);
        let due = many.into_iter().chain([200, 201]).collect();
        assert_eq!(choose(due, tenant, &in_flight), [200, 201]);
        let due = (1..40).map(|tenant| tenant * 100).collect();
        let chosen = choose(due, tenant, &in_flight);
        assert_eq!(chosen.len(), MOST - MOST_OF_TENANT);
    }
}
