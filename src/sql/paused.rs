//! Which destinations are paused, alone or with their tenant.

use std::collections::HashMap;

use diesel::PgConnection;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use uuid::Uuid;

use super::absent::all_endpoints;
use super::functions::{all_of, given};
use super::table::{endpoint, pause};
use crate::name::OutboxName;
use crate::words::words;

words! {
    "kind":
    /// What can be paused.
    ///
    /// ```
    /// use diesel_outbox::admin::Pausable;
    ///
    /// assert_eq!(Pausable::Topic.as_str(), "topic");
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Pausable {
        /// A destination, by its name; `default` is the destination of `OUTBOX_URL`.
        Destination = "destination",
        /// A topic, as messages name it.
        Topic = "topic",
        /// All endpoints of a tenant, by its UUID.
        Tenant = "tenant",
    }
}

pub(crate) fn pauses(name: &OutboxName) -> pause::table {
    pause::table(name.pause())
}

/// A pause that holds now. Has another type in each query.
macro_rules! is_on {
    () => {{
        let until = pause::paused_until;
        let lasts = until.assume_not_null().gt(clock_timestamp());
        let is_endless = until.assume_not_null().eq(PgTimestamp(i64::MIN));
        until.is_null().or(lasts).or(is_endless)
    }};
}
pub(crate) use is_on;

/// The destinations of these tenants, with `only` those of these names: each with the tenant as its pause names it.
pub(crate) fn of_tenants<'a>(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenants: impl Iterator<Item = &'a str>,
    only: Option<&[&str]>,
) -> QueryResult<Vec<(String, String)>> {
    let ids: HashMap<Uuid, &str> = tenants
        .filter_map(|text| Some((text.parse().ok()?, text)))
        .collect();
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let is_own = endpoint::tenant_id
        .assume_not_null()
        .eq_any(ids.keys().copied().collect::<Vec<_>>());
    let is_asked = all_of([given(only, |names| endpoint::name.eq_any(names))]);
    let found: Vec<(Option<Uuid>, String)> =
        QueryDsl::filter(all_endpoints(name), is_own.and(is_asked))
            .select((endpoint::tenant_id, endpoint::name))
            .load(conn)?;
    let named = |(tenant, name): (Option<Uuid>, String)| {
        let tenant = *ids.get(&tenant?)?;
        Some((tenant.to_owned(), name))
    };
    Ok(found.into_iter().filter_map(named).collect())
}
