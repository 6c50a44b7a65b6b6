//! Whose deliveries are meant, and the rows that are theirs.

use diesel::PgConnection;
use diesel::prelude::{BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods};
use diesel::result::QueryResult;
use uuid::Uuid;

use crate::name::OutboxName;
use crate::store::destinations::{self, Which};
use crate::store::sql::{On, all_of, given};
use crate::store::table::{attempt, dead, ledger};

/// Whose deliveries are meant: those to a destination. If the name is registered, only those of its registration, and
/// those that were addressed by the name alone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recipient<'a> {
    pub(super) destination: &'a str,
    pub(super) registration: Option<Uuid>,
    /// Only messages of this tenant.
    pub(super) tenant: Option<Uuid>,
}

impl<'a> Recipient<'a> {
    /// `None`: the tenant has no such destination.
    pub(super) fn find(
        conn: &mut PgConnection,
        name: &OutboxName,
        which: Which<'a>,
    ) -> QueryResult<Option<Self>> {
        let registration = destinations::registration(conn, name, which)?;
        let is_there = registration.is_some() || which.tenant.is_none();
        Ok(is_there.then_some(Self {
            destination: which.name,
            registration,
            tenant: which.tenant,
        }))
    }

    /// Their dead letters.
    pub(super) fn letters(self) -> On<'a, dead::table> {
        all_of([
            given(Some(self.destination), |name| dead::destination.eq(name)),
            given(self.registration, letter_of),
            given(self.tenant, |id| dead::tenant_id.assume_not_null().eq(id)),
        ])
    }

    /// Their entries in the ledger.
    pub(super) fn entries(self) -> On<'a, ledger::table> {
        all_of([
            given(Some(self.destination), |name| ledger::destination.eq(name)),
            given(self.registration, entry_of),
            given(self.tenant, |id| ledger::tenant_id.assume_not_null().eq(id)),
        ])
    }

    /// The history of a message of theirs.
    pub(super) fn history(self, message_id: Uuid) -> On<'a, attempt::table> {
        all_of([
            given(Some(message_id), |id| attempt::message_id.eq(id)),
            given(Some(self.destination), |name| attempt::destination.eq(name)),
            given(self.tenant, |id| {
                attempt::tenant_id.assume_not_null().eq(id)
            }),
        ])
    }
}

/// Whether a dead letter is of this registration of a destination, or of none.
pub(super) fn letter_of(registration: Uuid) -> On<'static, dead::table> {
    let is_it = dead::registration.assume_not_null().eq(registration);
    Box::new(dead::registration.is_null().or(is_it))
}

/// Whether an entry of the ledger is of this registration of a destination, or of none.
pub(super) fn entry_of(registration: Uuid) -> On<'static, ledger::table> {
    let is_it = ledger::registration.assume_not_null().eq(registration);
    Box::new(ledger::registration.is_null().or(is_it))
}
