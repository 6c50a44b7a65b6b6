//! Which endpoints are paused, alone or with their tenant.

use std::collections::HashMap;

use diesel::PgConnection;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;

use crate::hand::{Hand, PausedBy};
use crate::name::OutboxName;
use crate::schema::values::system_time;
use crate::sql::functions::{On, clock_timestamp, id_text};
use crate::sql::paused::{Pausable, is_on, of_tenants, pauses};
use crate::sql::table::{endpoint, pause};

/// The destination is paused now, alone or with its tenant.
pub(crate) fn is_paused(name: &OutboxName) -> On<'static, endpoint::table> {
    let paused = |kind: Pausable| {
        let is_kind = pause::kind.eq(kind.as_str());
        QueryDsl::filter(pauses(name), is_kind.and(is_on!())).select(pause::name)
    };
    let tenant = endpoint::tenant_id;
    let is_tenant = id_text(tenant.assume_not_null()).eq_any(paused(Pausable::Tenant));
    let is_one = endpoint::name.eq_any(paused(Pausable::Destination));
    Box::new(is_one.or(tenant.is_not_null().and(is_tenant)))
}

/// The pause of each of these destinations, or of its tenant, that ends last, by name.
pub(crate) fn of_destinations(
    conn: &mut PgConnection,
    name: &OutboxName,
    names: &[&str],
) -> QueryResult<HashMap<String, PausedBy>> {
    let is_tenant = pause::kind.eq(Pausable::Tenant.as_str());
    let is_one = pause::name.eq_any(names);
    let is_one = pause::kind
        .eq(Pausable::Destination.as_str())
        .and(is_one)
        .or(is_tenant);
    type PausedRow = ((String, String), String, String, Option<PgTimestamp>);
    let mut found: Vec<PausedRow> = QueryDsl::filter(pauses(name), is_one.and(is_on!()))
        .select((
            (pause::kind, pause::name),
            pause::paused_by,
            pause::reason,
            pause::paused_until,
        ))
        .load(conn)?;
    let end = |until: Option<PgTimestamp>| until.filter(|at| !matches!(at.0, i64::MIN | i64::MAX));
    found.sort_by_key(|(.., until)| end(*until).map_or(i64::MAX, |at| at.0));
    let is_of_tenant = |kind: &str| kind == Pausable::Tenant.as_str();
    let tenants = found.iter().filter(|((kind, _), ..)| is_of_tenant(kind));
    let tenants = tenants.map(|((_, tenant), ..)| tenant.as_str());
    let of_tenants = of_tenants(conn, name, tenants, Some(names))?;
    let mut last = HashMap::new();
    for ((kind, which), by, reason, until) in found {
        let by = Hand::of_column(Some(&by));
        let until = end(until).map(system_time);
        let pause = PausedBy { by, reason, until };
        match is_of_tenant(&kind) {
            true => {
                let own = of_tenants.iter().filter(|(tenant, _)| *tenant == which);
                last.extend(own.map(|(_, name)| (name.clone(), pause.clone())));
            }
            false => {
                last.insert(which, pause);
            }
        }
    }
    Ok(last)
}
