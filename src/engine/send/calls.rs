//! What the relay knows of handlers: it calls them, and a call may end late.

use diesel::PgConnection;

use crate::dispatch::Outcome;
use crate::engine::observe::spans::Span;
use crate::message::Message;

/// Receives the outcome of a call.
pub(crate) type OnEnd = Box<dyn FnOnce(Outcome) + Send>;

/// Handlers of one destination, which run in this process.
pub(crate) trait Calls: Send + Sync + 'static {
    /// Calls the handler of a message. Returns when the call has ended or its time limit has passed. `on_end` gets the
    /// outcome, on any thread and however late.
    fn call(&self, message: Message, span: Span, on_end: OnEnd);

    /// Handles a message on this thread and this connection, without a limit. For tests.
    fn call_here(&self, message: &Message, conn: &mut PgConnection) -> Outcome;

    /// The number of calls past the limit.
    fn late(&self) -> usize;

    /// The most calls that may run past the limit. At this number no more calls start.
    fn most_late(&self) -> usize;
}
