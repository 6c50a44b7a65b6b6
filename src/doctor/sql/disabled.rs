//! Endpoints that are disabled, fail or are not verified, or whose signatures cover less than they could.

use diesel::dsl::{count_star, min, not};
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, OptionalExtension, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, PgExpressionMethods};

use crate::config::Mode;
use crate::endpoints::EndpointKind;
use crate::endpoints::sql::rows::is_unverified;
use crate::name::OutboxName;
use crate::sql::absent::all_endpoints;
use crate::sql::functions::On;
use crate::sql::table::endpoint;

/// The destinations in a state that somebody must see to.
pub(crate) struct NeglectedDestinations {
    pub(crate) count: i64,
    /// The destination that was changed last.
    pub(crate) name: String,
    /// Why it is disabled.
    pub(crate) disabled: Option<String>,
    /// Why it is not verified.
    pub(crate) unverified: Option<String>,
}

pub(crate) fn disabled(
    conn: &mut PgConnection,
    outbox: &OutboxName,
) -> QueryResult<Option<NeglectedDestinations>> {
    found(conn, outbox, || Box::new(not(endpoint::enabled)))
}

pub(crate) fn failing(
    conn: &mut PgConnection,
    outbox: &OutboxName,
) -> QueryResult<Option<NeglectedDestinations>> {
    found(conn, outbox, || {
        let is_webhook = endpoint::kind.ne(EndpointKind::Feed.as_str());
        Box::new(endpoint::enabled.and(endpoint::failing).and(is_webhook))
    })
}

pub(crate) fn unread(
    conn: &mut PgConnection,
    outbox: &OutboxName,
) -> QueryResult<Option<NeglectedDestinations>> {
    found(conn, outbox, || {
        let is_feed = endpoint::kind.eq(EndpointKind::Feed.as_str());
        Box::new(endpoint::enabled.and(endpoint::failing).and(is_feed))
    })
}

pub(crate) fn unverified(
    conn: &mut PgConnection,
    outbox: &OutboxName,
) -> QueryResult<Option<NeglectedDestinations>> {
    found(conn, outbox, || {
        Box::new(endpoint::enabled.and(is_unverified()))
    })
}

fn found(
    conn: &mut PgConnection,
    outbox: &OutboxName,
    which: fn() -> On<'static, endpoint::table>,
) -> QueryResult<Option<NeglectedDestinations>> {
    let rows = || all_endpoints(outbox).filter(which());
    let last: Option<(String, Option<String>, Option<String>)> = rows()
        .order(endpoint::updated_at.desc())
        .select((
            endpoint::name,
            endpoint::disabled_reason,
            endpoint::verification_error,
        ))
        .first(conn)
        .optional()?;
    let Some((name, disabled, unverified)) = last else {
        return Ok(None);
    };
    Ok(Some(NeglectedDestinations {
        count: rows().count().get_result(conn)?,
        name,
        disabled,
        unverified,
    }))
}

/// How many enabled destinations get signed requests in binary mode, and the first of them. `default`: the mode of rows
/// without their own.
pub(crate) fn signed_in_binary(
    conn: &mut PgConnection,
    outbox: &OutboxName,
    default: Mode,
) -> QueryResult<Option<(i64, String)>> {
    let own = endpoint::mode.is_not_distinct_from(Some("binary"));
    let is_binary: On<'_, endpoint::table> = match default {
        Mode::Binary => Box::new(endpoint::mode.is_null().or(own)),
        _ => Box::new(own),
    };
    let (count, first): (i64, Option<String>) = all_endpoints(outbox)
        .filter(endpoint::enabled)
        .filter(endpoint::secret.is_not_null())
        .filter(is_binary)
        .select((count_star(), min(endpoint::name)))
        .get_result(conn)?;
    Ok(first.map(|first| (count, first)))
}
