//! What a relay calls without knowing it. Whoever puts the relay together gives it these functions.

use diesel::PgConnection;

use crate::error::DatabaseError;
use crate::name::OutboxName;

/// The functions that a relay gets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hooks {
    /// Checks that the outbox has all that the relay needs, and that the role of the connection may use it. The error says
    /// what is missing.
    pub(crate) check: Check,
    /// Closes connections that receivers have closed. Called every second, and must not wait.
    pub(crate) close_idle: fn(),
}

pub(super) type Check = fn(&mut PgConnection, &OutboxName) -> Result<(), DatabaseError>;

#[cfg(test)]
impl Hooks {
    /// They do nothing.
    pub(crate) const NONE: Self = Self {
        check: |_, _| Ok(()),
        close_idle: || {},
    };
}
