//! A sender thread: one message at a time, never the database.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};

use super::settlement::{Settlement, Verdict};
use super::shared::{Job, Shared};
use crate::dispatch::{Failure, Outcome};
use crate::message::Message;
use crate::status::ReasonCode;

/// Sends until the queue is closed and empty. Once the relay stops, or its lease is gone, what
/// is in the queue goes back unsent.
pub(crate) fn run(shared: &Shared, jobs: &Receiver<Job>, outcomes: &Sender<Settlement>) {
    let quarter = jobs.capacity().unwrap_or_default() / 2;
    for Job { mut message, lease } in jobs {
        if shared.wants_room.load(Ordering::Acquire) && jobs.len() <= quarter {
            shared.ring();
        }
        let began = Instant::now();
        let verdict = if shared.is_stopping() || !shared.lease.may_send(lease) {
            Verdict::Released
        } else if message.expires.is_some_and(|end| began >= end) {
            let error = "its time was over before it was sent";
            Verdict::Dead(Failure::new(ReasonCode::Expired, error), 0)
        } else {
            match dispatch(shared, &message) {
                Outcome::Delivered(response) => Verdict::Delivered(response),
                Outcome::Dead(failure) => Verdict::Dead(failure, 1),
                Outcome::Wait(failure) | Outcome::Retry(failure) => {
                    Verdict::of_failure(failure, message.attempts, &shared.config)
                }
            }
        };
        // Not needed any more: the settle works on the stored row.
        message.payload = String::new();
        let settlement = Settlement::new(message, lease, verdict, began.elapsed());
        if outcomes.send(settlement).is_err() {
            return;
        }
    }
}

fn dispatch(shared: &Shared, message: &Message) -> Outcome {
    // Whatever a dispatcher shares between its calls is its own to keep sound.
    catch_unwind(AssertUnwindSafe(|| shared.dispatcher.dispatch(message))).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no text".to_owned());
        log::error!(event = "dispatch_panic", sequence = message.sequence.0, topic = message.topic; "the dispatcher panicked");
        Outcome::Retry(Failure::new(ReasonCode::Panic, format!("the dispatcher panicked: {text}")))
    })
}
