//! Plays a history on the store and on the model beside each other.

mod claims;
mod ending;
mod settles;

use std::collections::HashMap;
use std::time::Duration;

use diesel::connection::{AnsiTransactionManager, TransactionManager};
use diesel::{PgConnection, RunQueryDsl, sql_query};

use crate::message::NewMessage;
use crate::name::OutboxName;
use crate::store::operate::dead;
use crate::store::relay::claim::{Position, Stream};
use crate::store::relay::lease::{self, LeaseId};

use super::database::{Connections, compare, fail_over, replicate};
use super::expected::{Message, Model, State};
use super::history::{Answer, Find, History, New, Outcome, Step};

use super::promises::{Broken, Events, Kept, Promise, keep};
use super::system::{Job, LATER, Settle, System};
pub(super) use claims::stream_of;

/// No history lasts as long as this.
const LEASE: Duration = Duration::from_secs(3600);
const ROUNDS_OF_STEP: usize = 5;

pub(super) struct Harness<'a> {
    system: &'a dyn System,
    name: &'a OutboxName,
    operator: PgConnection,
    producers: Vec<Producer>,
    relays: Vec<Relay>,
    /// Leases of dead relays that are not over.
    ghosts: Vec<LeaseId>,
    model: Model,
    standby: Option<Standby>,
}

/// What a standby has that is behind its primary.
struct Standby {
    model: Model,
    last_sequence: i64,
}

struct Producer {
    conn: PgConnection,
    is_open: bool,
}

#[derive(Default)]
struct Relay {
    /// `None` while it is in a transaction.
    conn: Option<PgConnection>,
    lease: Option<LeaseId>,
    jobs: Vec<Job>,
    ended: Vec<i64>,
    /// Where its claims of a stream go on.
    places: HashMap<Stream, Position>,
    last_settle: Option<Settle>,
}

/// Plays the history, lets one relay come to the end of everything, and gives the connections back.
pub(super) fn play(
    system: &dyn System,
    name: &OutboxName,
    connections: Connections,
    history: &History,
) -> Kept<(Connections, Events)> {
    let relay = |conn| Relay {
        conn: Some(conn),
        ..Relay::default()
    };
    let producer = |conn| Producer {
        conn,
        is_open: false,
    };
    let mut harness = Harness {
        system,
        name,
        operator: connections.operator,
        producers: connections.producers.into_iter().map(producer).collect(),
        relays: connections.relays.into_iter().map(relay).collect(),
        ghosts: Vec::new(),
        model: Model::default(),
        standby: None,
    };
    for (number, step) in history.steps.iter().enumerate() {
        let result = harness.step(step).and_then(|()| harness.compare());
        result.map_err(|broken| at(&format!("step {number}, {step:?}"), broken))?;
    }
    let result = harness.finish(&history.commits);
    result.map_err(|broken| at("the end", broken))?;
    let relays = harness.relays.into_iter();
    let connections = Connections {
        operator: harness.operator,
        producers: harness.producers.into_iter().map(|p| p.conn).collect(),
        relays: relays.filter_map(|relay| relay.conn).collect(),
    };
    Ok((connections, harness.model.events))
}

fn at(place: &str, broken: Broken) -> Broken {
    let what = format!("{}; at {place}", broken.what);
    Broken { what, ..broken }
}

impl Harness<'_> {
    fn compare(&mut self) -> Kept {
        compare(&mut self.operator, self.name, &mut self.model)
    }

    fn step(&mut self, step: &Step) -> Kept {
        match step {
            Step::Enqueue(producer, new) => {
                new.iter().try_for_each(|new| self.enqueue(*producer, new))
            }
            Step::Commit(producer) => self.end(self.open_from(*producer), true),
            Step::RollBack(producer) => self.end(self.open_from(*producer), false),
            Step::Claim {
                relay,
                room,
                is_sweep,
                answer,
                meanwhile,
            } => self.claim(*relay, *room, *is_sweep, *answer, meanwhile),
            Step::ClaimKeyed {
                relay,
                find,
                answer,
                meanwhile,
            } => self.claim_keyed(*relay, *find, *answer, meanwhile),
            Step::Send(relay, pick) => self.send(self.busy_from(*relay), *pick),
            Step::Settle {
                relay,
                pick,
                outcome,
            } => self.settle(self.busy_from(*relay), *pick, *outcome),
            Step::SettleAndContinue {
                relay,
                pick,
                outcome,
                before,
                after,
            } => self.settle_and_continue(self.busy_from(*relay), *pick, *outcome, before, after),
            Step::SettleAll(relay) => self.settle_all(self.busy_from(*relay)),
            Step::Repeat(relay) => self.repeat(*relay),
            Step::ReleaseUnknown(relay) => self.release_unknown(*relay),
            Step::Renew(relay) => self.renew(*relay),
            Step::LoseLease(relay) => self.lose_lease(*relay),
            Step::Die(relay) => self.die(*relay),
            Step::GhostsEnd => self.end_ghosts(),
            Step::Drain(relay) => {
                (0..ROUNDS_OF_STEP).try_for_each(|round| self.drain(*relay, round))
            }
            Step::TakeOver(relay) => self.take_over(*relay),
            Step::ShutDown(relay) => self.shut_down(*relay),
            Step::Requeue(pick) => self.requeue(*pick),
            Step::Discard(pick) => self.discard(*pick),
            Step::TimePasses => self.pass_time(),
            Step::Replicate => self.replicate(),
            Step::FailOver => self.fail_over(),
            Step::Forget => {
                let (operator, name) = (&mut self.operator, self.name);
                let all = lease::holders(operator, name, i64::MIN, i64::MAX)?;
                lease::forget(operator, name, Duration::ZERO, &all.holders)?;
                Ok(())
            }
        }
    }

    /// This producer, or the next one whose transaction is open.
    fn open_from(&self, number: usize) -> usize {
        next_from(number, &self.producers, |producer| producer.is_open)
    }

    /// This relay, or the next one that has something to send or to settle.
    fn busy_from(&self, number: usize) -> usize {
        next_from(number, &self.relays, |relay| !relay.jobs.is_empty())
    }

    // Producers

    fn enqueue(&mut self, number: usize, new: &New) -> Kept {
        let message = message_of(new);
        let expected = Message::new(new, message.key(), State::Open(number));
        if (self.model).is_taken_by_another(&expected.identity, Some(number)) {
            // It would wait for the other transaction.
            return Ok(());
        }
        let producer = &mut self.producers[number];
        if !producer.is_open {
            AnsiTransactionManager::begin_transaction(&mut producer.conn)?;
            producer.is_open = true;
        }
        let stored = (self.system).enqueue(&mut producer.conn, self.name, message)?;
        let there = self.model.seen_by(&expected.identity, number);
        let Some((sequence, there)) = there else {
            keep(stored.is_new, Promise::G1, || {
                format!("{expected:?} was not written")
            })?;
            return self.model.enqueue(stored.sequence, expected);
        };
        let is_same = there.has_content(expected.topic, expected.body);
        let is_found = !stored.is_new && stored.sequence == sequence && stored.is_same == is_same;
        keep(is_found, Promise::G1, || {
            format!("{sequence} was enqueued twice: {stored:?}")
        })
    }

    fn end(&mut self, number: usize, commits: bool) -> Kept {
        let producer = &mut self.producers[number];
        if !producer.is_open {
            return Ok(());
        }
        producer.is_open = false;
        if commits {
            AnsiTransactionManager::commit_transaction(&mut producer.conn)?;
        } else {
            AnsiTransactionManager::rollback_transaction(&mut producer.conn)?;
        }
        self.model.end(number, commits);
        Ok(())
    }

    /// One whose lease is over goes on under a new one, and settles what it has under the old one.
    fn renew(&mut self, number: usize) -> Kept {
        self.with_relay(number, |this, conn, lease| {
            let is_renewed = lease::renew(conn, this.name, lease, LEASE)?;
            let is_over = this.model.is_over(lease);
            keep(is_renewed != is_over, Promise::G4, || {
                format!("the lease {lease} came back, or was lost")
            })?;
            if is_over {
                this.relays[number].lease = None;
            }
            Ok(())
        })
    }

    fn lose_lease(&mut self, number: usize) -> Kept {
        let Some(lease) = self.relays[number].lease else {
            return Ok(());
        };
        self.end_lease(lease)
    }

    fn end_lease(&mut self, lease: LeaseId) -> Kept {
        lease::expire(&mut self.operator, self.name, lease)?;
        self.model.end_lease(lease);
        Ok(())
    }

    fn die(&mut self, number: usize) -> Kept {
        let relay = &mut self.relays[number];
        let conn = relay.conn.take();
        let dead = std::mem::replace(
            relay,
            Relay {
                conn,
                ..Relay::default()
            },
        );
        let leases = dead.lease.into_iter();
        self.ghosts
            .extend(leases.filter(|lease| !self.model.is_over(*lease)));
        Ok(())
    }

    fn end_ghosts(&mut self) -> Kept {
        let ghosts = std::mem::take(&mut self.ghosts);
        ghosts
            .into_iter()
            .try_for_each(|lease| self.end_lease(lease))
    }

    fn survey(&mut self, number: usize) -> Kept {
        self.with_relay(number, |this, conn, _| {
            this.relays[number].ended = (this.system).ended(conn, this.name)?;
            Ok(())
        })
    }

    fn take_over(&mut self, number: usize) -> Kept {
        self.survey(number)?;
        self.claim(number, 3, true, Answer::Heard, &[])?;
        self.claim_keyed(number, Find::Walk, Answer::Heard, &[])
    }

    /// It settles what it has sent, gives the rest back, and ends its lease.
    fn shut_down(&mut self, number: usize) -> Kept {
        let Some(lease) = self.relays[number].lease else {
            return Ok(());
        };
        for _ in 0..self.relays[number].jobs.len() {
            self.settle(number, 0, Outcome::Released)?;
        }
        if !self.relays[number].jobs.is_empty() {
            return self.die(number);
        }
        self.release_unknown(number)?;
        lease::end(&mut self.operator, self.name, lease)?;
        self.model.end_lease(lease);
        self.die(number)
    }

    fn replicate(&mut self) -> Kept {
        self.standby = Some(Standby {
            last_sequence: replicate(&mut self.operator, self.name)?,
            model: self.model.clone(),
        });
        Ok(())
    }

    /// The relays live on, with what they have claimed and sent.
    fn fail_over(&mut self) -> Kept {
        let Some(Standby {
            model,
            last_sequence,
        }) = self.standby.take()
        else {
            return Ok(());
        };
        for number in 0..self.producers.len() {
            self.end(number, false)?;
        }
        for number in 0..self.relays.len() {
            (0..self.relays[number].jobs.len()).try_for_each(|pick| self.send(number, pick))?;
        }
        let leases = fail_over(&mut self.operator, self.name, last_sequence)?;
        self.model.fail_over(model, &leases);
        for relay in &mut self.relays {
            // Its connection broke: it looks anew before it claims.
            relay.ended.clear();
            if let Some(lease) = relay.lease.filter(|lease| !leases.contains(&lease.0)) {
                self.model.end_lease(lease);
            }
        }
        let relays = || self.relays.iter().filter_map(|relay| relay.lease);
        let is_nobodys =
            |lease: &LeaseId| !self.model.is_over(*lease) && relays().all(|of| of != *lease);
        self.ghosts = leases.into_iter().map(LeaseId).filter(is_nobodys).collect();
        Ok(())
    }

    // Operators

    fn requeue(&mut self, pick: usize) -> Kept {
        let mut chosen = some_of(&self.model.dead(), pick);
        chosen.retain(|sequence| {
            let identity = &self.model.messages[sequence].identity;
            !self.model.is_taken_by_another(identity, None)
        });
        (self.system).requeue(&mut self.operator, self.name, &chosen)?;
        self.model.requeue(&chosen);
        Ok(())
    }

    fn discard(&mut self, pick: usize) -> Kept {
        let chosen = some_of(&self.model.dead(), pick);
        dead::discard(&mut self.operator, self.name, &chosen, "")?;
        self.model.discard(&chosen);
        Ok(())
    }

    fn pass_time(&mut self) -> Kept {
        sql_query(format!(
            "UPDATE {} SET available_at = clock_timestamp() WHERE available_at > clock_timestamp()",
            self.name.outbox()
        ))
        .execute(&mut self.operator)?;
        self.model.pass_time();
        Ok(())
    }
}

fn next_from<T>(number: usize, all: &[T], has_work: impl Fn(&T) -> bool) -> usize {
    let mut numbers = (number..all.len()).chain(0..number);
    numbers
        .find(|number| has_work(&all[*number]))
        .unwrap_or(number)
}

fn message_of(new: &New) -> NewMessage {
    let mut message = NewMessage::new(new.topic, &new.body).expect("a number is JSON");
    message = message.destination(new.destination);
    if let Some(key) = new.ordering_key {
        message = message.ordering_key(key);
    }
    if let Some(key) = new.idempotency_key {
        message = message.idempotency_key(key);
    }
    if !new.is_due {
        message = message.delay(LATER);
    }
    if new.is_expired {
        message = message.expires_after(Duration::ZERO);
    }
    message
}

/// One, or from the second half of picks all.
fn some_of(sequences: &[i64], pick: usize) -> Vec<i64> {
    match sequences.get(pick) {
        Some(sequence) => vec![*sequence],
        None => sequences.to_vec(),
    }
}
