//! Whose deliveries are meant, and the rows that are theirs.

use diesel::PgConnection;
use diesel::prelude::{ExpressionMethods, NullableExpressionMethods};
use diesel::result::QueryResult;
use uuid::Uuid;

use super::rows::{self, WhichEndpoint};
use crate::endpoints::sql::filter::is_of_registration;
use crate::name::OutboxName;
use crate::sql::functions::{On, all_of, given};
use crate::sql::table::{attempt, dead, ledger, outbox};

/// Whose deliveries are meant: those to an endpoint. If the name is registered, only those of its registration, and
/// those that were addressed by the name alone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recipient<'a> {
    pub(crate) destination: &'a str,
    pub(crate) registration: Option<Uuid>,
    /// Only messages of this tenant.
    pub(crate) tenant: Option<Uuid>,
}

/// The rows of a recipient in each of these tables.
macro_rules! theirs {
    ($($(#[$doc:meta])+ $rows:ident: $table:ident;)+) => {$(
        $(#[$doc])+
        pub(crate) fn $rows(self) -> On<'a, $table::table> {
            all_of([
                given(Some(self.destination), |name| $table::destination.eq(name)),
                given(self.registration, |id| is_of_registration!($table, id)),
                given(self.tenant, |id| $table::tenant_id.assume_not_null().eq(id)),
            ])
        }
    )+};
}

impl<'a> Recipient<'a> {
    /// `None`: the tenant has no such endpoint.
    pub(crate) fn find(
        conn: &mut PgConnection,
        name: &OutboxName,
        which: WhichEndpoint<'a>,
    ) -> QueryResult<Option<Self>> {
        let registration = rows::registration(conn, name, which)?;
        let is_there = registration.is_some() || which.tenant.is_none();
        Ok(is_there.then_some(Self {
            destination: which.name,
            registration,
            tenant: which.tenant,
        }))
    }

    theirs! {
        /// Their live messages that name the endpoint.
        live: outbox;
        /// Their dead letters.
        letters: dead;
        /// Their entries in the ledger.
        entries: ledger;
    }

    /// The history of a message of theirs.
    pub(crate) fn history(self, message_id: Uuid) -> On<'a, attempt::table> {
        all_of([
            given(Some(message_id), |id| attempt::message_id.eq(id)),
            given(Some(self.destination), |name| attempt::destination.eq(name)),
            given(self.tenant, |id| {
                attempt::tenant_id.assume_not_null().eq(id)
            }),
        ])
    }
}
