//! How a relay of a history sends and settles what it has claimed.

use std::collections::BTreeSet;

use crate::status::ReasonCode;
use crate::store::range::Range;
use crate::store::relay::settle::{self, Claim};

use super::Harness;
use super::claims::claimant;
use crate::store::model::expected::{MAX_ATTEMPTS, Message, Model, State};
use crate::store::model::history::{Answer, Aside, Outcome};
use crate::store::model::promises::{Event, Kept, Promise, keep};
use crate::store::model::system::{FAN, Job, Moment, Settle, Todo, Verdict};

impl Harness<'_> {
    pub(super) fn send(&mut self, number: usize, pick: usize) -> Kept {
        let relay = &mut self.relays[number];
        let count = relay.jobs.len().max(1);
        match relay.jobs.get_mut(pick % count) {
            Some(job) => send(&mut self.model, job),
            None => Ok(()),
        }
    }

    /// Takes one of a relay's jobs, and says how it is to be settled.
    pub(super) fn decide(
        &mut self,
        number: usize,
        pick: usize,
        outcome: Outcome,
    ) -> Kept<Option<Settle>> {
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

    pub(super) fn is_split_in_the_way(&self, job: &Job) -> bool {
        let key = &job.identity.0;
        FAN.iter().any(|destination| {
            let identity = (key.clone(), (*destination).to_owned());
            self.model.is_taken_by_another(&identity, None)
        })
    }

    pub(super) fn settle(&mut self, number: usize, pick: usize, outcome: Outcome) -> Kept {
        let Some(settle) = self.decide(number, pick, outcome)? else {
            return Ok(());
        };
        self.settle_now(number, settle)
    }

    pub(super) fn settle_now(&mut self, number: usize, settle: Settle) -> Kept {
        self.with_relay(number, |this, conn, _| {
            let changed = this.system.settle(conn, this.name, &settle)?;
            this.check_settled(&settle, &changed)?;
            this.relays[number].last_settle = Some(settle);
            Ok(())
        })
    }

    pub(super) fn check_settled(&mut self, settle: &Settle, changed: &[i64]) -> Kept {
        let sequences: Vec<&Message> = (settle.jobs.iter())
            .filter_map(|job| self.model.messages.get(&job.sequence))
            .collect();
        let was_lost =
            |m: &&Message| matches!(m.state, State::Held { lease, .. } if lease != settle.lease.0);
        let is_lost = sequences.iter().any(was_lost);
        let is_held = (sequences.iter())
            .any(|m| matches!(m.state, State::Held { lease, .. } if lease == settle.lease.0));
        let is_other = settle.jobs.iter().any(|job| {
            let message = self.model.messages.get(&job.sequence);
            message.is_some_and(|message| message.identity != job.identity)
        });
        let expected: BTreeSet<i64> = self.model.settle(settle).into_iter().collect();
        self.model.note_if(is_lost, Event::SettleFenced);
        self.model.note_if(is_other, Event::SequenceGivenTwice);
        let changed: BTreeSet<i64> = changed.iter().copied().collect();
        let promise = if is_other {
            // A message that has got the sequence of another one, and was never sent.
            Promise::G2
        } else if is_held {
            // By a repeat, of a message that the same lease has claimed anew.
            Promise::G6
        } else {
            Promise::G4
        };
        keep(changed.is_subset(&expected), promise, || {
            format!("{settle:?} changed {changed:?} instead of {expected:?}")
        })?;
        keep(expected.is_subset(&changed), Promise::G2, || {
            format!("{settle:?} changed only {changed:?} of {expected:?}")
        })
    }

    pub(super) fn settle_and_continue(
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

    pub(super) fn continue_with(
        &mut self,
        number: usize,
        settle: Settle,
        asides: [&[Aside]; 2],
    ) -> Kept {
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

    pub(super) fn settle_all(&mut self, number: usize) -> Kept {
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
    pub(super) fn repeat(&mut self, number: usize) -> Kept {
        match self.relays[number].last_settle.take() {
            Some(settle) if settle.verdict != Verdict::Split => {
                self.model.note_if(true, Event::SettleRepeated);
                self.settle_now(number, settle)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn release_unknown(&mut self, number: usize) -> Kept {
        self.with_relay(number, |this, conn, lease| {
            let known: Vec<Claim> = (this.relays[number].jobs.iter())
                .filter(|job| job.lease == lease)
                .map(Job::claim)
                .collect();
            settle::release_unknown(conn, this.name, lease, &known, Range::ALL)?;
            this.model.release_unknown(lease, &known);
            Ok(())
        })
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
