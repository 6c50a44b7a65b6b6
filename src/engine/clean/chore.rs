//! Regular work of the janitor's thread that the janitor itself does not know.

use std::time::Instant;

use crate::engine::host::session::Session;
use crate::engine::host::shared::Shared;
use crate::error::DatabaseError;

/// One chore of the janitor. It must not take long at once: the others wait.
pub(crate) trait Chore {
    /// When there is work; `None`: never, as far as the chore knows.
    fn next(&self) -> Option<Instant>;

    /// Does what is due. If the database fails, the janitor comes again.
    fn work(&mut self, session: &mut Session) -> Result<(), DatabaseError>;

    /// Somebody waits for the result: the next work is due as soon as permitted.
    fn hurry(&mut self) {}

    /// The relay has stopped: does what must not wait for another relay.
    fn last(&mut self, _: &mut Session) -> Result<(), DatabaseError> {
        Ok(())
    }
}

/// Makes a chore when the janitor's thread starts.
pub(crate) type NewChore = for<'a> fn(&'a Shared) -> Box<dyn Chore + 'a>;
