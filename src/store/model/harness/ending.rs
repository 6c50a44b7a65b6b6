//! How a history comes to its end.

use super::{Harness, Relay};
use crate::store::model::expected::{Model, State};
use crate::store::model::history::{Answer, Find, Outcome};
use crate::store::model::promises::Kept;
use crate::store::operate::dead;

/// Rounds in which a relay has to come to an end with everything.
const ROUNDS: usize = 300;
const SETTLES_OF_ROUND: usize = 20;

impl Harness<'_> {
    /// Producers end, relays die but for one, and that one delivers everything.
    pub(super) fn finish(&mut self, commits: &[bool]) -> Kept {
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
    pub(super) fn drain(&mut self, number: usize, round: usize) -> Kept {
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
        dead::discard(&mut self.operator, self.name, &blocking, "")?;
        self.model.discard(&blocking);
        Ok(())
    }
}

fn is_well_at(model: &Model, relay: &Relay) -> bool {
    relay.lease.is_some_and(|lease| !model.is_over(lease))
}
