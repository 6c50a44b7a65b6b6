//! Whether an outbox has endpoints, for a relay of a library that is built without them.

use std::time::{Duration, Instant};

use diesel::internal::table_macro::NoFromClause;
use diesel::prelude::{ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl};
use diesel::sql_types::{BigInt, Nullable};

use crate::engine::claim::sql::claim::Reads;
use crate::engine::clean::chore::Chore;
use crate::engine::host::session::Session;
use crate::engine::host::shared::Shared;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::absent::appeared;
use crate::sql::functions::On;
use crate::sql::pinned::look_for_endpoints;
use crate::sql::table::{endpoint, outbox};

/// The time between two looks for the table. Until the next one, messages wait that are claimed with a new table.
const INTERVAL: Duration = Duration::from_secs(2);

/// 0 if somebody is registered, or may be: the table was not there at the last look.
#[derive(Debug)]
pub(crate) struct Registered;

impl Reads for Registered {
    fn seen<'a>(&'a self, name: &OutboxName) -> On<'a, outbox::table, Nullable<BigInt>> {
        match name.has_endpoints() {
            true => Box::new(
                endpoint::table(name.endpoint())
                    .select(0_i64.into_sql::<BigInt>())
                    .limit(1)
                    .single_value(),
            ),
            false => Box::new(appeared!(name.endpoint())),
        }
    }

    /// Such a relay reads no endpoints, so surveys do not ask.
    fn changed<'a>(&'a self, _: &OutboxName) -> On<'a, NoFromClause, Nullable<BigInt>> {
        Box::new(None::<i64>.into_sql::<Nullable<BigInt>>())
    }
}

/// Looks for the table, if the outbox had none: whoever is registered there may want messages.
struct Looking {
    next: Option<Instant>,
}

pub(crate) fn chore(_: &Shared) -> Box<dyn Chore + '_> {
    Box::new(Looking {
        next: Some(Instant::now()),
    })
}

impl Chore for Looking {
    fn next(&self) -> Option<Instant> {
        self.next
    }

    fn work(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let is_there = session.run(|conn, name| {
            look_for_endpoints(conn, name)?;
            Ok(name.has_endpoints())
        })?;
        self.next = (!is_there).then(|| Instant::now() + INTERVAL);
        Ok(())
    }
}
