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

/// Why somebody must see to a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Neglected {
    Disabled,
    /// A webhook.
    Failing,
    /// A feed that fails.
    Unread,
    Unverified,
}

pub(crate) fn neglected(
    conn: &mut PgConnection,
    outbox: &OutboxName,
    which: Neglected,
) -> QueryResult<Option<NeglectedDestinations>> {
    let is_feed = || endpoint::kind.eq(EndpointKind::Feed.as_str());
    let fails = || endpoint::enabled.and(endpoint::failing);
    let is_meant = || -> On<'_, endpoint::table> {
        match which {
            Neglected::Disabled => Box::new(not(endpoint::enabled)),
            Neglected::Failing => Box::new(fails().and(not(is_feed()))),
            Neglected::Unread => Box::new(fails().and(is_feed())),
            Neglected::Unverified => Box::new(endpoint::enabled.and(is_unverified())),
        }
    };
    let rows = || all_endpoints(outbox).filter(is_meant());
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
