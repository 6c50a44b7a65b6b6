//! Until when the sends of a thread may run, whatever their timeouts are.
//!
//! A relay whose lease may end must end its sends, because another relay sends the messages again. The threads that send
//! are the relay's own, so the limit belongs to the thread: it also holds where an application's own dispatcher uses
//! [`HttpDispatcher`](super::HttpDispatcher).

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::BootTime;

thread_local! {
    static OF_THREAD: RefCell<Option<Arc<Fence>>> = const { RefCell::new(None) };
    /// The lease under which the thread's send began.
    static LEASE: Cell<i64> = const { Cell::new(0) };
}

/// The relay's lease, and the time when sends under it end, unless a look at the lease moves the time on.
// Why: docs/decisions.md#session-gone
#[derive(Debug, Default)]
pub(crate) struct Fence {
    /// The id of the lease; 0: none.
    pub(crate) lease: AtomicI64,
    /// In microseconds of [`BootTime`].
    until: AtomicU64,
}

impl Fence {
    /// Sends under the lease may run until then.
    pub(crate) fn set(&self, until: BootTime) {
        self.until.store(until.micros(), Ordering::Release);
    }

    /// How long a send that began under this lease may still run.
    pub(crate) fn left(&self, lease: i64) -> Duration {
        self.left_at(lease, BootTime::now())
    }

    pub(crate) fn left_at(&self, lease: i64, now: BootTime) -> Duration {
        if self.lease.load(Ordering::Acquire) != lease {
            return Duration::ZERO;
        }
        let until = self.until.load(Ordering::Acquire);
        Duration::from_micros(until.saturating_sub(now.micros()))
    }

    /// From now on, this thread sends within the fence.
    pub(crate) fn enter(self: &Arc<Self>) {
        OF_THREAD.set(Some(Arc::clone(self)));
    }
}

/// The lease under which the send of a thread runs, for other threads that work for it.
#[derive(Debug, Clone)]
pub(crate) struct Hold {
    fence: Arc<Fence>,
    lease: i64,
}

impl Hold {
    /// The lease of this thread's send. `None`: the thread does not send for a relay.
    pub(crate) fn of_thread() -> Option<Self> {
        let fence = OF_THREAD.with_borrow(Option::clone)?;
        let lease = LEASE.get();
        Some(Self { fence, lease })
    }

    /// Whether no other relay may have taken the message over.
    pub(crate) fn lasts(&self) -> bool {
        !self.fence.left(self.lease).is_zero()
    }
}

/// The thread's next send runs under this lease.
pub(crate) fn begin(lease: i64) {
    LEASE.set(lease);
}

/// How long the send of this thread may still run. `None`: there is no limit.
#[cfg(feature = "http")]
pub(crate) fn left() -> Option<Duration> {
    OF_THREAD.with_borrow(|fence| fence.as_ref().map(|fence| fence.left(LEASE.get())))
}
