//! What the relays at work serve, as they say so in their leases.

use diesel::PgConnection;
use diesel::dsl::not;
use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;

use super::lease::{is_not_over, leases, stands_by};
use crate::name::OutboxName;
use crate::routes::{Routes, Serves};
use crate::store::sql::MaybeJson;
use crate::store::table::lease;

/// What all of them serve together.
pub(crate) struct Served {
    /// By their names.
    relays: Vec<(String, Routes)>,
    /// A relay of a later version may serve anything.
    is_certain: bool,
}

/// Of relays with a live lease, but for those that stand by or are switched off.
pub(crate) fn served(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Served> {
    let rows: Vec<(String, MaybeJson)> = leases(name)
        .filter(lease::serves.is_not_null())
        .filter(is_not_over())
        .filter(not(stands_by(name)))
        .select((lease::relay, lease::serves))
        .load(conn)?;
    let count = rows.len();
    let relays = rows.into_iter().filter_map(|(relay, serves)| {
        let serves: Option<String> = serves.into();
        let routes = Routes::of(Serves::from_json(&serves?)?);
        Some((relay, routes))
    });
    let relays: Vec<(String, Routes)> = relays.collect();
    Ok(Served {
        is_certain: relays.len() == count,
        relays,
    })
}

impl Served {
    /// The routes of all of them.
    pub(crate) fn into_routes(self) -> Vec<Routes> {
        self.relays.into_iter().map(|(_, routes)| routes).collect()
    }

    /// Whether relays are at work and none of them takes such messages. Without any relay that is not the
    /// topic's trouble.
    pub(crate) fn has_no_route(&self, topic: &str, destination: &str) -> bool {
        let is_known = self.is_certain && !self.relays.is_empty();
        is_known && self.by(topic, destination).next().is_none()
    }

    /// The names of the relays that take such messages.
    pub(crate) fn by(&self, topic: &str, destination: &str) -> impl Iterator<Item = &str> {
        let takes = move |(_, routes): &&(String, Routes)| routes.serve(topic, destination);
        self.relays
            .iter()
            .filter(takes)
            .map(|(name, _)| name.as_str())
    }
}
