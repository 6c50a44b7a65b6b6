//! Registered destinations that are disabled.

use diesel::PgConnection;
use diesel::prelude::{ExpressionMethods, OptionalExtension, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;

use crate::name::OutboxName;
use crate::store::table::destination;

/// The disabled destinations.
pub(crate) struct Disabled {
    pub(crate) count: i64,
    /// The destination that was disabled or changed last.
    pub(crate) name: String,
    pub(crate) why: Option<String>,
}

pub(crate) fn disabled(
    conn: &mut PgConnection,
    outbox: &OutboxName,
) -> QueryResult<Option<Disabled>> {
    let disabled =
        || destination::table(outbox.destination()).filter(destination::enabled.eq(false));
    let last: Option<(String, Option<String>)> = disabled()
        .order(destination::updated_at.desc())
        .select((destination::name, destination::disabled_reason))
        .first(conn)
        .optional()?;
    let Some((name, why)) = last else {
        return Ok(None);
    };
    let count = disabled().count().get_result(conn)?;
    Ok(Some(Disabled { count, name, why }))
}
