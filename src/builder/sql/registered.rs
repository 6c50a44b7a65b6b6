//! Whether an outbox has endpoints, for a relay of a library that is built without them.

use diesel::internal::table_macro::NoFromClause;
use diesel::prelude::{ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl};
use diesel::sql_types::{BigInt, Nullable};

use crate::engine::claim::sql::claim::Reads;
use crate::name::OutboxName;
use crate::sql::absent::appeared;
use crate::sql::functions::On;
use crate::sql::table::{endpoint, outbox};

/// 0 if somebody is registered, or may be: the table was not there when this relay was started.
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
