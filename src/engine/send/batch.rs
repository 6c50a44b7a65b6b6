//! A request with several messages (batched mode): which messages it takes, and what its response means for each.

use super::bulkhead::{Bulkhead, REQUEST_BYTES};
use super::job::Job;
use super::run::Run;
use crate::config::RequestBatch;
use crate::dispatch::Outcome;
use crate::engine::settle::settlement::Settlement;

/// The messages gathered for a request.
#[derive(Default)]
pub(crate) struct Gathered {
    /// The messages of the request.
    pub(crate) together: Vec<Job>,
    /// Messages that were attempted before. Each is sent alone, so that a message that the receiver cannot take does not
    /// hold up others.
    pub(crate) alone: Vec<Job>,
    count: usize,
    bytes: usize,
}

impl Gathered {
    /// Whether the request has space for the messages of a run.
    pub(crate) fn fits(&self, job: &Job, limits: RequestBatch) -> bool {
        let is_one = job.behind.is_empty() || self.count == 0;
        is_one || self.count + job.len() <= limits.size && self.bytes + job.bytes() <= REQUEST_BYTES
    }

    pub(crate) fn add(&mut self, job: Job) {
        self.bytes += job.messages().map(|one| one.payload.len()).sum::<usize>();
        self.count += job.len();
        match job.message.attempts {
            0 => self.together.push(job),
            _ => self.alone.push(job),
        }
    }

    pub(crate) fn is_full(&self, limits: RequestBatch) -> bool {
        self.count >= limits.size || self.bytes >= REQUEST_BYTES
    }
}

/// The results of the messages of a request, after the response, and the runs that are left. The receiver may have refused
/// the request because of a single message: the first one of a run that was not delivered is sent again alone, with the run
/// so far. `outcomes`: of each message, in order. `conclude` makes the settlement of a message. The delivered messages at the
/// beginning of a run stay delivered. The first message that is not ends the run, or is sent again.
// Why: docs/decisions.md#refused-batch
pub(crate) fn answered(
    sent: Vec<Job>,
    outcomes: Vec<Outcome>,
    bulkheads: &[Bulkhead],
    conclude: impl Fn(Job, Outcome) -> Settlement,
) -> (Vec<Settlement>, Vec<(Job, Run)>) {
    let is_batch = outcomes.len() > 1;
    let (mut settled, mut alone) = (Vec::new(), Vec::new());
    let mut outcomes = outcomes.into_iter();
    for job in sent {
        let count = job.len();
        let (first, mut run) = Run::begin(job);
        let (mut next, mut refused) = (Some(first), None);
        for outcome in outcomes.by_ref().take(count) {
            match next.take() {
                Some(job) if is_batch && is_refusal(&outcome) => refused = Some(job),
                job => next = job.and_then(|job| run.next(conclude(job, outcome), bulkheads)),
            }
        }
        match refused {
            Some(job) => alone.push((job, run)),
            None => settled.extend(run.settlement()),
        }
    }
    (settled, alone)
}

/// The outcome that counts for the destination. The outcomes of one request usually agree; if they differ, the worst
/// counts, without those behind the end of a run. `runs`: their lengths.
pub(crate) fn telling(
    runs: impl IntoIterator<Item = usize>,
    mut outcomes: &[Outcome],
) -> Option<&Outcome> {
    let each = runs.into_iter().flat_map(|count| {
        let of_run;
        (of_run, outcomes) = outcomes.split_at(count);
        let delivered = of_run.iter().take_while(|one| is_delivery(one)).count();
        of_run.iter().take(delivered + 1)
    });
    each.max_by_key(|outcome| weight(outcome))
}

fn is_delivery(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Delivered(_))
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
