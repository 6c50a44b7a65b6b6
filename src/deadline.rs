//! Deadlines of calls that nothing else ends: a thread looks at them once a second, and ends those past their limit.
//!
//! There is one thread in a process. It starts with the first deadline, and ends after the last one is dropped.
//!
//! Why: docs/decisions.md#connections-that-do-not-answer

use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::lock::lock;
use crate::log;

/// How often the thread looks: a call lasts at most this much longer than its limit.
const TICK: Duration = Duration::from_secs(1);
/// If the thread looks so late, the whole process was stopped, and the limits begin again: the answers may be there.
const STOPPED: Duration = Duration::from_secs(5);

/// All deadlines of the process.
static ALL: Mutex<All> = Mutex::new(All {
    deadlines: Vec::new(),
    process: None,
});

struct All {
    deadlines: Vec<Weak<Deadline>>,
    /// The process whose thread looks. Another process, if this one was forked: it needs a thread of its own.
    process: Option<u32>,
}

/// Ends a call.
type EndCall = Box<dyn Fn() + Send + Sync>;

/// Calls one after the other, each with a limit.
pub(crate) struct Deadline {
    calls: Mutex<LimitedCalls>,
    end: EndCall,
}

struct LimitedCalls {
    limit: Duration,
    /// When the present call began. `None`: there is none.
    began: Option<Instant>,
    /// The limit of the call that was ended.
    ended: Option<Duration>,
}

impl Deadline {
    /// For calls that may take so long. `end` ends the present call. It must not wait, and calls no logger.
    pub(crate) fn new(limit: Duration, end: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        let deadline = Arc::new(Self {
            calls: Mutex::new(LimitedCalls {
                limit,
                began: None,
                ended: None,
            }),
            end: Box::new(end),
        });
        let mut all = lock(&ALL);
        all.deadlines.push(Arc::downgrade(&deadline));
        let process = Some(std::process::id());
        if all.process != process {
            let spawned = thread::Builder::new()
                .name("db-deadlines".to_owned())
                .spawn(look_at_all);
            match spawned {
                Ok(_) => all.process = process,
                // The next deadline tries again.
                Err(error) => {
                    log::warn!(event = "no_deadlines", error:% = error; "cannot start the thread that ends waits for a database that does not answer: {error}");
                }
            }
        }
        deadline
    }

    /// Changes the limit of the next calls. Returns the limit before.
    pub(crate) fn set_limit(&self, limit: Duration) -> Duration {
        std::mem::replace(&mut lock(&self.calls).limit, limit)
    }

    /// A call begins, or the next step of one, with the whole limit.
    pub(crate) fn begin(&self) {
        lock(&self.calls).began = Some(Instant::now());
    }

    /// The call has ended.
    pub(crate) fn finish(&self) {
        lock(&self.calls).began = None;
    }

    /// The limit of the call that was ended, if one was.
    pub(crate) fn ended(&self) -> Option<Duration> {
        lock(&self.calls).ended
    }

    /// Ends the present call if its limit has passed.
    fn look(&self, now: Instant) {
        // Held while the call is ended: the thread of the call cannot begin another meanwhile.
        let mut calls = lock(&self.calls);
        let LimitedCalls { limit, began, .. } = *calls;
        if began.is_some_and(|began| now.saturating_duration_since(began) >= limit) {
            calls.began = None;
            calls.ended = Some(limit);
            (self.end)();
        }
    }

    /// The present call gets its whole limit again.
    fn restart(&self, now: Instant) {
        let mut calls = lock(&self.calls);
        calls.began = calls.began.map(|_| now);
    }
}

fn look_at_all() {
    let mut looked = Instant::now();
    loop {
        thread::sleep(TICK);
        let now = Instant::now();
        let was_stopped = now.saturating_duration_since(looked) > STOPPED;
        looked = now;
        let Some(deadlines) = living() else {
            return;
        };
        for deadline in deadlines {
            match was_stopped {
                true => deadline.restart(now),
                false => deadline.look(now),
            }
        }
    }
}

/// The deadlines that are not dropped. `None`: there is none, and the thread must end.
fn living() -> Option<Vec<Arc<Deadline>>> {
    let mut all = lock(&ALL);
    let deadlines: Vec<_> = all.deadlines.iter().filter_map(Weak::upgrade).collect();
    if deadlines.is_empty() {
        (all.deadlines, all.process) = (Vec::new(), None);
        return None;
    }
    all.deadlines = deadlines.iter().map(Arc::downgrade).collect();
    Some(deadlines)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A deadline of 10 s, and how often it has ended a call.
    fn counted() -> (Arc<Deadline>, Arc<AtomicUsize>) {
        let ends = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&ends);
        let deadline = Deadline::new(Duration::from_secs(10), move || {
            counted.fetch_add(1, Ordering::AcqRel);
        });
        (deadline, ends)
    }

    #[test]
    fn a_call_is_ended_once_when_its_limit_has_passed_and_not_between_calls() {
        let (deadline, ends) = counted();
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        deadline.look(at(100));
        assert_eq!(ends.load(Ordering::Acquire), 0, "no call");
        deadline.begin();
        deadline.look(at(9));
        assert_eq!(ends.load(Ordering::Acquire), 0, "in time");
        deadline.finish();
        deadline.look(at(100));
        assert_eq!(ends.load(Ordering::Acquire), 0, "it has ended");
        deadline.begin();
        deadline.look(at(100));
        deadline.look(at(200));
        assert_eq!(ends.load(Ordering::Acquire), 1);
        assert_eq!(deadline.ended(), Some(Duration::from_secs(10)));
    }

    #[test]
    fn the_time_that_the_process_stood_still_does_not_count() {
        let (deadline, ends) = counted();
        deadline.begin();
        let back = Instant::now() + Duration::from_secs(100);
        deadline.restart(back);
        deadline.look(back + Duration::from_secs(9));
        assert_eq!(ends.load(Ordering::Acquire), 0);
        deadline.look(back + Duration::from_secs(10));
        assert_eq!(ends.load(Ordering::Acquire), 1);
    }
}
