//! Registered destinations that are disabled, or whose signatures cover less than they could.

use diesel::dsl::{count_star, min};
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, OptionalExtension, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, PgExpressionMethods};

use crate::config::Mode;
use crate::name::OutboxName;
use crate::store::sql::On;
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

/// How many enabled destinations get signed requests in binary mode, and the first of them. `default`: the mode of rows
/// without their own.
pub(crate) fn signed_in_binary(
    conn: &mut PgConnection,
    outbox: &OutboxName,
    default: Mode,
) -> QueryResult<Option<(i64, String)>> {
    let own = destination::mode.is_not_distinct_from(Some("binary"));
    let is_binary: On<'_, destination::table> = match default {
        Mode::Binary => Box::new(destination::mode.is_null().or(own)),
        _ => Box::new(own),
    };
    let (count, first): (i64, Option<String>) = destination::table(outbox.destination())
        .filter(destination::enabled)
        .filter(destination::secret.is_not_null())
        .filter(is_binary)
        .select((count_star(), min(destination::name)))
        .get_result(conn)?;
    Ok(first.map(|first| (count, first)))
}
