//! The question whether a relay has nothing to do.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::lock::lock;

/// Whether nothing is due: asked by whoever waits for it, answered by the claimer after a look
/// that began later than the question, found nothing, and had nothing in flight.
#[derive(Debug, Default)]
pub(crate) struct Idle {
    state: Mutex<IdleState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct IdleState {
    asked: u64,
    answered: u64,
}

impl Idle {
    /// The number of the last question, to be taken before a look.
    pub(crate) fn question(&self) -> u64 {
        lock(&self.state).asked
    }

    /// Whether a question has no answer yet.
    pub(crate) fn is_asked(&self) -> bool {
        let state = lock(&self.state);
        state.answered < state.asked
    }

    /// A look that began after this question found nothing.
    pub(crate) fn answer(&self, question: u64) {
        let mut state = lock(&self.state);
        state.answered = state.answered.max(question);
        self.changed.notify_all();
    }

    /// Asks. Returns the number of the question.
    pub(super) fn ask(&self) -> u64 {
        let mut state = lock(&self.state);
        state.asked += 1;
        state.asked
    }

    #[cfg(test)]
    pub(super) fn is_answered(&self, question: u64) -> bool {
        let state = lock(&self.state);
        state.answered >= question
    }

    /// Asks, `ring`s the claimer, and waits for the answer. `false`: the time was over first.
    pub(super) fn wait(&self, timeout: Duration, ring: impl FnOnce()) -> bool {
        let question = self.ask();
        ring();
        let state = lock(&self.state);
        let (state, _) = self
            .changed
            .wait_timeout_while(state, timeout, |state| state.answered < question)
            .unwrap_or_else(PoisonError::into_inner);
        state.answered >= question
    }
}
