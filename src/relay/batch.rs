//! A request with several messages (batched mode): which messages it takes, and what its response means for each.

use super::job::Job;
use crate::config::RequestBatch;
use crate::dispatch::Outcome;

/// A request takes no further messages once the gathered payloads have this many bytes.
const REQUEST_BYTES: usize = 1024 * 1024;

/// The messages gathered for a request.
#[derive(Default)]
pub(super) struct Gathered {
    /// The messages of the request.
    pub(super) together: Vec<Job>,
    /// Messages that were attempted before. Each is sent alone, so that a message that the receiver cannot take does not
    /// hold up others.
    pub(super) alone: Vec<Job>,
    bytes: usize,
}

impl Gathered {
    pub(super) fn add(&mut self, job: Job) {
        self.bytes += job.message.payload.len();
        match job.message.attempts {
            0 => self.together.push(job),
            _ => self.alone.push(job),
        }
    }

    pub(super) fn is_full(&self, limits: RequestBatch) -> bool {
        self.together.len() + self.alone.len() >= limits.size || self.bytes >= REQUEST_BYTES
    }
}

/// The messages of a request, after the response.
#[derive(Default)]
pub(super) struct Answered {
    pub(super) ended: Vec<(Job, Outcome)>,
    /// The receiver may have refused the request because of a single message: each of these is sent again, alone.
    pub(super) alone: Vec<Job>,
}

impl Answered {
    pub(super) fn new(sent: Vec<Job>, outcomes: Vec<Outcome>) -> Self {
        let is_batch = sent.len() > 1;
        let mut answered = Self::default();
        for (job, outcome) in sent.into_iter().zip(outcomes) {
            match is_batch && is_refusal(&outcome) {
                true => answered.alone.push(job),
                false => answered.ended.push((job, outcome)),
            }
        }
        answered
    }
}

/// The outcome that counts for the destination. The outcomes of one request usually agree; if they differ, the worst
/// counts.
pub(super) fn telling(outcomes: &[Outcome]) -> Option<&Outcome> {
    outcomes.iter().max_by_key(|outcome| weight(outcome))
}

/// Whether the receiver has refused the request because of its content.
fn is_refusal(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Dead(failure) if failure.response.status.is_some())
}

/// Ranks outcomes by how much they tell about the destination.
fn weight(outcome: &Outcome) -> u8 {
    match outcome {
        Outcome::Dead(failure) if failure.response.status.is_none() => 0,
        Outcome::Dead(_) => 1,
        Outcome::Delivered(_) => 2,
        Outcome::Retry(failure) if failure.pause.is_none() => 3,
        Outcome::Wait(_) => 4,
        Outcome::Retry(_) => 5,
    }
}
