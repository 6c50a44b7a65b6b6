//! Plays a history on the store and on the model beside each other.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use diesel::connection::{AnsiTransactionManager, TransactionManager};
use diesel::result::Error;
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};

use crate::message::NewMessage;
use crate::name::OutboxName;
use crate::status::ReasonCode;
use crate::store::claim::{self, Claimant, Claimed, Lane, Position, Stream, Topic};
use crate::store::lease::{self, LeaseId};
use crate::store::ordered::{self, Candidate, Key};
use crate::store::{dead, settle};

use super::database::{Connections, compare};
use super::expected::{
    Broken, Event, Events, Kept, MAX_ATTEMPTS, Message, Model, Promise, State, keep,
};
use super::history::{Answer, Aside, Find, History, New, Outcome, Step};
use super::system::{Job, LATER, Moment, Settle, System, Todo, Verdict, goes_to};

/// No history lasts as long as this.
const LEASE: Duration = Duration::from_secs(3600);
/// Rounds in which a relay has to come to an end with everything.
const ROUNDS: usize = 300;
const ROUNDS_OF_STEP: usize = 5;
const SETTLES_OF_ROUND: usize = 20;
/// Keys of one step of the walk.
const STEP: usize = 2;

pub(super) struct Harness<'a> {
    system: &'a dyn System,
    name: &'a OutboxName,
    operator: PgConnection,
    producers: Vec<Producer>,
    relays: Vec<Relay>,
    /// Leases of dead relays that are not over.
    ghosts: Vec<LeaseId>,
    model: Model,
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
    known_expired: Vec<i64>,
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
            Step::Forget => {
                lease::forget(&mut self.operator, self.name, Duration::ZERO)?;
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

    // Relays

    /// Lets a relay work, unless it is in a transaction already. One that is dead starts anew.
    fn with_relay(
        &mut self,
        number: usize,
        work: impl FnOnce(&mut Self, &mut PgConnection, LeaseId) -> Kept,
    ) -> Kept {
        let Some(mut conn) = self.relays[number].conn.take() else {
            return Ok(());
        };
        let result = self
            .lease_of(number, &mut conn)
            .and_then(|lease| work(self, &mut conn, lease));
        self.relays[number].conn = Some(conn);
        result
    }

    fn lease_of(&mut self, number: usize, conn: &mut PgConnection) -> Kept<LeaseId> {
        if let Some(lease) = self.relays[number].lease {
            return Ok(lease);
        }
        let lease = lease::register(conn, self.name, "model", LEASE, false)?;
        self.relays[number].lease = Some(lease);
        Ok(lease)
    }

    /// The leases whose messages this relay may take: not what it has to settle itself.
    fn expired(&self, number: usize) -> Vec<i64> {
        let relay = &self.relays[number];
        let is_own = |id: &i64| relay.jobs.iter().any(|job| job.lease.0 == *id);
        let known = relay.known_expired.iter().copied();
        known.filter(|id| !is_own(id)).collect()
    }

    fn lanes(
        &self,
        conn: &mut PgConnection,
        number: usize,
        is_keyed: bool,
        room: usize,
        is_sweep: bool,
    ) -> Kept<Vec<Lane>> {
        let places = &self.relays[number].places;
        let streams = claim::streams(conn, self.name)?.into_iter();
        let lane = |stream: Stream| Lane {
            after: match places.get(&stream) {
                Some(place) if !is_sweep => *place,
                _ => Position::START,
            },
            stream,
            room,
        };
        let of_kind = streams.filter(|stream| stream.is_keyed == is_keyed);
        Ok(of_kind.map(lane).collect())
    }

    fn claim(
        &mut self,
        number: usize,
        room: usize,
        is_sweep: bool,
        answer: Answer,
        meanwhile: &[Aside],
    ) -> Kept {
        self.with_relay(number, |this, conn, lease| {
            let lanes = this.lanes(conn, number, false, room, is_sweep)?;
            let (expired, as_of) = (this.expired(number), this.model.clock());
            let (system, name, claimant) = (this.system, this.name, claimant(lease, &expired));
            let mut aside = Ok(());
            let claimed = conn.transaction::<_, Error, _>(|conn| {
                let claimed = system.claim(conn, name, claimant, &lanes, room)?;
                aside = this.meanwhile(meanwhile);
                Ok(claimed)
            })?;
            aside?;
            this.take(number, lease, as_of, false, answer, claimed)
        })
    }

    fn claim_keyed(
        &mut self,
        number: usize,
        find: Find,
        answer: Answer,
        meanwhile: &[Aside],
    ) -> Kept {
        self.with_relay(number, |this, conn, lease| {
            let expired = this.expired(number);
            let (system, name, claimant) = (this.system, this.name, claimant(lease, &expired));
            let candidates = this.find(conn, number, claimant, find)?;
            let as_of = this.model.clock();
            let mut aside = Ok(());
            let claimed = conn.transaction::<_, Error, _>(|conn| {
                let claimed = system.claim_keyed(conn, name, claimant, &candidates)?;
                aside = this.meanwhile(meanwhile);
                Ok(claimed)
            })?;
            aside?;
            this.model
                .note_if(claimed.is_none(), Event::AnotherRelayClaims);
            let claimed = claimed.unwrap_or_default();
            this.take(number, lease, as_of, true, answer, claimed)
        })
    }

    fn find(
        &self,
        conn: &mut PgConnection,
        number: usize,
        claimant: Claimant<'_>,
        find: Find,
    ) -> Kept<Vec<Candidate>> {
        match find {
            Find::Due => {
                let lanes = self.lanes(conn, number, true, STEP, true)?;
                let topics = lanes.iter().map(|lane| &lane.stream.topic);
                let goes_to: Vec<&str> =
                    topics.map(|t| goes_to(&t.topic, &t.destination)).collect();
                let found = ordered::due(conn, self.name, claimant, &lanes, &goes_to)?;
                Ok(found.into_iter().flat_map(|lane| lane.candidates).collect())
            }
            Find::Walk => {
                let mut candidates = Vec::new();
                let mut from = Some(Key::default());
                while let Some(key) = from {
                    let page = ordered::walk(conn, self.name, claimant.expired, &key, STEP)?;
                    let heads = page.heads.iter();
                    candidates.extend(heads.map(|head| {
                        let Topic { topic, destination } = &head.topic;
                        candidate(head.sequence, topic, destination)
                    }));
                    from = page.last.filter(|last| *last != key);
                }
                // The last key of a page is looked at again.
                candidates.dedup_by_key(|candidate| candidate.sequence);
                Ok(candidates)
            }
            Find::Guess => {
                let live = self.model.live();
                let keyed = live.filter(|(_, message)| message.ordering_key.is_some());
                let guess = |(sequence, message): (i64, &Message)| {
                    candidate(sequence, message.topic, message.destination())
                };
                Ok(keyed.map(guess).collect())
            }
        }
    }

    fn take(
        &mut self,
        number: usize,
        lease: LeaseId,
        as_of: u64,
        is_keyed: bool,
        answer: Answer,
        mut claimed: Vec<Claimed>,
    ) -> Kept {
        claimed.sort_unstable_by_key(|one| one.message.sequence);
        let jobs = self.model.claim(lease, as_of, is_keyed, &claimed)?;
        if answer == Answer::Lost {
            self.model.note_if(!jobs.is_empty(), Event::ClaimUnheard);
            return Ok(());
        }
        let relay = &mut self.relays[number];
        relay.jobs.extend(jobs);
        for one in &claimed {
            let place = relay
                .places
                .entry(stream_of(one))
                .or_insert(Position::START);
            *place = one.position.max(*place);
        }
        Ok(())
    }

    /// What others do while a transaction is open.
    fn meanwhile(&mut self, asides: &[Aside]) -> Kept {
        asides.iter().try_for_each(|aside| match aside {
            Aside::Commit(producer) => self.end(self.open_from(*producer), true),
            Aside::Claim(relay) => self.claim(*relay, 3, true, Answer::Heard, &[]),
            Aside::ClaimKeyed(relay, find) => self.claim_keyed(*relay, *find, Answer::Heard, &[]),
        })
    }

    fn send(&mut self, number: usize, pick: usize) -> Kept {
        let relay = &mut self.relays[number];
        let count = relay.jobs.len().max(1);
        match relay.jobs.get_mut(pick % count) {
            Some(job) => send(&mut self.model, job),
            None => Ok(()),
        }
    }

    /// Takes one of a relay's jobs, and says how it is to be settled.
    fn decide(&mut self, number: usize, pick: usize, outcome: Outcome) -> Kept<Option<Settle>> {
        let relay = &mut self.relays[number];
        if relay.jobs.is_empty() {
            return Ok(None);
        }
        let mut job = relay.jobs.remove(pick % relay.jobs.len());
        let verdict = verdict(&job, outcome);
        let splits_in_vain = verdict == Verdict::Split && self.is_split_in_the_way(&job);
        if splits_in_vain {
            // It would wait for a producer.
            self.relays[number].jobs.push(job);
            return Ok(None);
        }
        if is_of_send(verdict) {
            send(&mut self.model, &mut job)?;
        }
        Ok(Some(Settle {
            lease: job.lease,
            verdict,
            jobs: vec![job],
        }))
    }

    fn is_split_in_the_way(&self, job: &Job) -> bool {
        let key = &self.model.messages[&job.sequence].identity.0;
        super::system::FAN.iter().any(|destination| {
            let identity = (key.clone(), (*destination).to_owned());
            self.model.is_taken_by_another(&identity, None)
        })
    }

    fn settle(&mut self, number: usize, pick: usize, outcome: Outcome) -> Kept {
        let Some(settle) = self.decide(number, pick, outcome)? else {
            return Ok(());
        };
        self.settle_now(number, settle)
    }

    fn settle_now(&mut self, number: usize, settle: Settle) -> Kept {
        self.with_relay(number, |this, conn, _| {
            let changed = this.system.settle(conn, this.name, &settle)?;
            this.check_settled(&settle, &changed)?;
            this.relays[number].last_settle = Some(settle);
            Ok(())
        })
    }

    fn check_settled(&mut self, settle: &Settle, changed: &[i64]) -> Kept {
        let sequences: Vec<&Message> = (settle.jobs.iter())
            .filter_map(|job| self.model.messages.get(&job.sequence))
            .collect();
        let was_lost =
            |m: &&Message| matches!(m.state, State::Held { lease, .. } if lease != settle.lease.0);
        let is_lost = sequences.iter().any(was_lost);
        let is_held = (sequences.iter())
            .any(|m| matches!(m.state, State::Held { lease, .. } if lease == settle.lease.0));
        let expected: BTreeSet<i64> = self.model.settle(settle).into_iter().collect();
        self.model.note_if(is_lost, Event::SettleFenced);
        let changed: BTreeSet<i64> = changed.iter().copied().collect();
        // By a repeat, of a message that the same lease has claimed anew.
        let promise = if is_held { Promise::G6 } else { Promise::G4 };
        keep(changed.is_subset(&expected), promise, || {
            format!("{settle:?} changed {changed:?} instead of {expected:?}")
        })?;
        keep(expected.is_subset(&changed), Promise::G2, || {
            format!("{settle:?} changed only {changed:?} of {expected:?}")
        })
    }

    fn settle_and_continue(
        &mut self,
        number: usize,
        pick: usize,
        outcome: Outcome,
        before: &[Aside],
        after: &[Aside],
    ) -> Kept {
        let Some(settle) = self.decide(number, pick, outcome)? else {
            return Ok(());
        };
        match settle.verdict {
            Verdict::Retry { .. } | Verdict::Split | Verdict::Released => {
                self.settle_now(number, settle)
            }
            Verdict::Delivered | Verdict::Deduplicated | Verdict::Dead { .. } => {
                self.continue_with(number, settle, [before, after])
            }
        }
    }

    fn continue_with(&mut self, number: usize, settle: Settle, asides: [&[Aside]; 2]) -> Kept {
        self.with_relay(number, |this, conn, lease| {
            let (system, name, claimant) = (this.system, this.name, claimant(lease, &[]));
            if settle.lease != lease {
                // Of a lease that is known to be over: nothing goes on.
                let changed = system.settle(conn, name, &settle)?;
                return this.check_settled(&settle, &changed);
            }
            let mut asides = asides.into_iter();
            let mut aside = Ok(());
            let mut is_settled = false;
            let mut as_of = 0;
            let mut meanwhile = |moment: Moment<'_>| {
                if aside.is_err() {
                    return;
                }
                if let Moment::Settled(changed) = moment
                    && !is_settled
                {
                    is_settled = true;
                    aside = this.check_settled(&settle, changed);
                }
                let is_before = asides.len() == 2;
                let others = this.meanwhile(asides.next().unwrap_or_default());
                aside = std::mem::replace(&mut aside, Ok(())).and(others);
                if is_before {
                    as_of = this.model.clock();
                }
            };
            let result = system.settle_and_continue(conn, name, claimant, &settle, &mut meanwhile);
            aside?;
            let (changed, next) = result?;
            if !is_settled {
                this.check_settled(&settle, &changed)?;
            }
            this.relays[number].last_settle = Some(settle);
            this.model.note_if(!next.is_empty(), Event::Continued);
            this.take(number, lease, as_of, true, Answer::Heard, next)
        })
    }

    fn settle_all(&mut self, number: usize) -> Kept {
        let jobs = std::mem::take(&mut self.relays[number].jobs);
        let Some(lease) = jobs.iter().find(|job| job.is_sent).map(|job| job.lease) else {
            self.relays[number].jobs = jobs;
            return Ok(());
        };
        let is_of_it = |job: &Job| job.is_sent && job.lease == lease;
        let (sent, others) = jobs.into_iter().partition(is_of_it);
        self.relays[number].jobs = others;
        let settle = Settle {
            lease,
            verdict: Verdict::Delivered,
            jobs: sent,
        };
        self.continue_with(number, settle, [&[], &[]])
    }

    /// A repeat changes nothing, unless the first one did not.
    fn repeat(&mut self, number: usize) -> Kept {
        match self.relays[number].last_settle.take() {
            Some(settle) if settle.verdict != Verdict::Split => {
                self.model.note_if(true, Event::SettleRepeated);
                self.settle_now(number, settle)
            }
            _ => Ok(()),
        }
    }

    fn release_unknown(&mut self, number: usize) -> Kept {
        self.with_relay(number, |this, conn, lease| {
            let known: Vec<i64> = (this.relays[number].jobs.iter())
                .filter(|job| job.lease == lease)
                .map(|job| job.sequence)
                .collect();
            settle::release_all(conn, this.name, lease, &known)?;
            this.model.release_unknown(lease, &known);
            Ok(())
        })
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
            let relay = &mut this.relays[number];
            let expired = (this.system).newly_expired(conn, this.name, &relay.known_expired)?;
            relay.known_expired.extend(expired);
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
        dead::discard(&mut self.operator, self.name, &chosen)?;
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

    // The end

    /// Producers end, relays die but for one, and that one delivers everything.
    fn finish(&mut self, commits: &[bool]) -> Kept {
        for (number, commits) in commits.iter().enumerate() {
            self.end(number, *commits)?;
        }
        let is_well = |relay: &Relay| relay.lease.is_some_and(|l| !self.model.is_over(l));
        let survivor = self.relays.iter().position(is_well).unwrap_or(0);
        for number in 0..self.relays.len() {
            if number != survivor || !is_well_at(&self.model, &self.relays[number]) {
                self.die(number)?;
            }
        }
        self.end_ghosts()?;
        self.pass_time()?;
        for round in 0..ROUNDS {
            self.drain(survivor, round)?;
            self.compare()?;
            if self.model.live().next().is_none() {
                return self.model.check_end();
            }
            let is_idle = self.relays[survivor].jobs.is_empty();
            if is_idle && round % 6 == 5 {
                // Keys that dead letters keep back wait for an operator.
                self.discard_all_that_block()?;
            }
        }
        self.model.check_end()
    }

    /// A round of a relay that has nothing but success.
    fn drain(&mut self, number: usize, round: usize) -> Kept {
        for _ in 0..SETTLES_OF_ROUND {
            if self.relays[number].jobs.is_empty() {
                break;
            }
            self.settle_and_continue(number, 0, Outcome::Delivered, &[], &[])?;
            self.compare()?;
        }
        self.survey(number)?;
        self.release_unknown(number)?;
        let (is_sweep, find) = match round % 2 {
            0 => (false, Find::Due),
            _ => (true, Find::Walk),
        };
        self.claim(number, 4, is_sweep, Answer::Heard, &[])?;
        self.claim_keyed(number, find, Answer::Heard, &[])
    }

    fn discard_all_that_block(&mut self) -> Kept {
        let mut blocking = self.model.dead();
        blocking.retain(|sequence| {
            self.model.messages[sequence].state == State::Dead { blocks_key: true }
        });
        dead::discard(&mut self.operator, self.name, &blocking)?;
        self.model.discard(&blocking);
        Ok(())
    }
}

fn candidate(sequence: i64, topic: &str, destination: &str) -> Candidate {
    Candidate {
        sequence,
        goes_to: goes_to(topic, destination).to_owned(),
    }
}

fn next_from<T>(number: usize, all: &[T], has_work: impl Fn(&T) -> bool) -> usize {
    let mut numbers = (number..all.len()).chain(0..number);
    numbers
        .find(|number| has_work(&all[*number]))
        .unwrap_or(number)
}

fn is_well_at(model: &Model, relay: &Relay) -> bool {
    relay.lease.is_some_and(|lease| !model.is_over(lease))
}

fn claimant(lease: LeaseId, expired: &[i64]) -> Claimant<'_> {
    Claimant {
        lease,
        expired,
        max_attempts: MAX_ATTEMPTS.unsigned_abs(),
    }
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

pub(super) fn stream_of(claimed: &Claimed) -> Stream {
    let message = &claimed.message;
    Stream {
        topic: Topic {
            topic: message.topic.clone(),
            destination: message.destination.clone(),
        },
        is_keyed: message.ordering_key.is_some(),
    }
}

/// One, or from the second half of picks all.
fn some_of(sequences: &[i64], pick: usize) -> Vec<i64> {
    match sequences.get(pick) {
        Some(sequence) => vec![*sequence],
        None => sequences.to_vec(),
    }
}

fn send(model: &mut Model, job: &mut Job) -> Kept {
    if job.is_sent || job.todo != Todo::Send {
        return Ok(());
    }
    job.is_sent = true;
    model.send(job)
}

fn is_of_send(verdict: Verdict) -> bool {
    match verdict {
        Verdict::Delivered => true,
        Verdict::Retry { counted, .. } | Verdict::Dead { counted, .. } => counted > 0,
        Verdict::Deduplicated | Verdict::Split | Verdict::Released => false,
    }
}

/// As the relay's claimer and senders decide it. What was sent has an outcome.
fn verdict(job: &Job, outcome: Outcome) -> Verdict {
    let buried = |code| Verdict::Dead {
        code,
        counted: 0,
        blocks_key: false,
    };
    match (job.todo, outcome) {
        (Todo::Deduplicate, _) => Verdict::Deduplicated,
        (Todo::BuryConflict, _) => buried(ReasonCode::IdempotencyConflict),
        (Todo::Split, Outcome::Released) => Verdict::Released,
        (Todo::Split, _) => Verdict::Split,
        (Todo::CountAbandoned, _) => failed(job, ReasonCode::Abandoned, true),
        (Todo::BuryExpired, Outcome::Released) => Verdict::Released,
        (Todo::BuryExpired, _) => buried(ReasonCode::Expired),
        (Todo::Send, Outcome::Released) if !job.is_sent => Verdict::Released,
        (Todo::Send, Outcome::Waits) if !job.is_sent => Verdict::Retry {
            code: ReasonCode::Proxy,
            counted: 0,
            is_due_again: true,
        },
        (Todo::Send, Outcome::Delivered | Outcome::Released | Outcome::Waits) => Verdict::Delivered,
        (Todo::Send, Outcome::Failed { is_due_again }) => {
            failed(job, ReasonCode::ServerError, is_due_again)
        }
        (Todo::Send, Outcome::Refused { blocks_key }) => Verdict::Dead {
            code: ReasonCode::Rejected,
            counted: 1,
            blocks_key,
        },
    }
}

fn failed(job: &Job, code: ReasonCode, is_due_again: bool) -> Verdict {
    if job.attempts + 1 >= MAX_ATTEMPTS {
        return Verdict::Dead {
            code,
            counted: 1,
            blocks_key: false,
        };
    }
    Verdict::Retry {
        code,
        counted: 1,
        is_due_again,
    }
}
