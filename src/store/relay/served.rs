//! The topics and destinations that the active relays serve, as recorded in their leases.

use std::collections::{BTreeMap, HashSet};

use diesel::PgConnection;
use diesel::dsl::not;
use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;

use super::lease::{is_not_over, leases, stands_by};
use super::pause::removed;
use super::topics;
use crate::name::OutboxName;
use crate::routes::{Refuses, Routes, Serves, matches_any};
use crate::store::sql::MaybeJson;
use crate::store::table::{destination, lease};

/// The topics and destinations that all active relays serve together.
pub(crate) struct Served {
    relays: Vec<Relay>,
    /// `false`: a relay of a later version is active, and may serve anything.
    is_certain: bool,
    /// The registered destinations, and the removed ones, whose messages are dead-lettered. If any are registered, also
    /// the empty name: a message that names no destination goes to all that want its topic, if any. Empty if no relay
    /// delivers to registered destinations.
    registered: HashSet<String>,
    /// The patterns of topics that any relay has ever served: what meets one waits for such a relay.
    ever: Vec<String>,
}

struct Relay {
    name: String,
    routes: Routes,
    /// Whether the relay delivers to registered destinations.
    registered: bool,
    /// The registered destinations to which it does not deliver.
    refuses: Refuses,
}

/// Reads the leases of active relays: all valid leases, except those of relays that stand by or are switched off.
pub(crate) fn served(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Served> {
    let mut served = relays(conn, name)?;
    if served.relays.iter().any(|relay| relay.registered) {
        let there = destination::table(name.destination()).select(destination::name);
        served.registered = there.load::<String>(conn)?.into_iter().collect();
        if !served.registered.is_empty() {
            served.registered.insert(String::new());
        }
        served.registered.extend(removed(conn, name)?);
        served.ever = topics::patterns(conn, name)?;
    }
    Ok(served)
}

/// The topics and destinations that these relays serve, without the relays' names.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Others {
    /// A relay of a later version counts as serving everything.
    pub(crate) routes: Vec<Routes>,
    /// The number of relays that deliver to registered destinations.
    pub(crate) registered: u32,
    /// The patterns of topics that any relay has ever served.
    pub(crate) ever: Vec<String>,
}

pub(crate) fn others(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Others> {
    let found = relays(conn, name)?;
    let anything = (!found.is_certain).then(|| Routes::of(Serves::anything()));
    let registered = found.relays.iter().filter(|relay| relay.registered).count();
    let routes = found.relays.into_iter().map(|relay| relay.routes);
    Ok(Others {
        routes: routes.chain(anything).collect(),
        registered: u32::try_from(registered).unwrap_or(u32::MAX),
        ever: topics::patterns(conn, name)?,
    })
}

fn relays(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Served> {
    let rows: Vec<(String, MaybeJson, MaybeJson)> = leases(name)
        .filter(lease::serves.is_not_null())
        .filter(is_not_over())
        .filter(not(stands_by(name)))
        .order(lease::id)
        .select((lease::relay, lease::serves, lease::refuses))
        .load(conn)?;
    let count = rows.len();
    let relays = rows.into_iter().filter_map(|(name, serves, refuses)| {
        let (serves, refuses): (Option<String>, Option<String>) = (serves.into(), refuses.into());
        let serves = Serves::from_json(&serves?)?;
        Some(Relay {
            name,
            refuses: Refuses::from_json(refuses.as_deref()),
            registered: serves.has_registered(),
            routes: Routes::of(serves),
        })
    });
    let relays: Vec<Relay> = relays.collect();
    Ok(Served {
        is_certain: relays.len() == count,
        relays,
        registered: HashSet::new(),
        ever: Vec::new(),
    })
}

impl Served {
    /// Whether no relay is active.
    pub(crate) fn is_empty(&self) -> bool {
        self.is_certain && self.relays.is_empty()
    }

    /// The only destination of messages that have this topic and name no destination. `None`: they have none or several,
    /// or the relays do not agree.
    pub(crate) fn only_destination(&self, topic: &str) -> Option<&str> {
        let mut only = None;
        for names in self
            .relays
            .iter()
            .filter_map(|relay| relay.routes.names(topic))
        {
            match (names.as_slice(), only) {
                ([name], None) => only = Some(*name),
                ([name], Some(other)) if *name == other => {}
                _ => return None,
            }
        }
        only
    }

    /// Whether relays are active, but none takes messages of this topic and destination. `false` if no relay is
    /// active: the missing route is not the problem then.
    pub(crate) fn has_no_route(&self, topic: &str, destination: &str) -> bool {
        let is_known = self.is_certain && !self.relays.is_empty();
        is_known && self.by(topic, destination).next().is_none()
    }

    /// The names of the relays that take messages of this topic and destination.
    pub(crate) fn by(&self, topic: &str, destination: &str) -> impl Iterator<Item = &str> {
        let awaits_route = destination.is_empty() && matches_any(&self.ever, topic);
        let is_registered = self.registered.contains(destination) && !awaits_route;
        let takes = move |relay: &&Relay| {
            let delivers = relay.registered && relay.refuses.why(destination).is_none();
            relay.routes.serve(topic, destination)
                || (delivers && is_registered && relay.routes.takes(topic))
        };
        let relays = self.relays.iter().filter(takes);
        relays.map(|relay| relay.name.as_str())
    }
}

/// A registered destination that an active relay does not serve because of its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RefusedDestination {
    /// The name of the destination.
    pub name: String,
    /// Why the relay refuses the destination.
    pub why: String,
    /// The name of a relay that refuses the destination.
    pub relay: String,
    /// Whether another active relay serves the destination. If none does, its messages wait.
    pub is_served: bool,
}

/// The registered destinations that an active relay refuses, each once, by name. Those that no active relay serves come
/// with the reason of the relay that was started first.
pub(crate) fn refused(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Vec<RefusedDestination>> {
    let found = relays(conn, name)?;
    let relays: Vec<&Relay> = (found.relays.iter()).filter(|one| one.registered).collect();
    let mut all: BTreeMap<&str, RefusedDestination> = BTreeMap::new();
    for relay in &relays {
        for (name, why) in relay.refuses.each() {
            all.entry(name).or_insert_with(|| RefusedDestination {
                name: name.to_owned(),
                why: why.to_owned(),
                relay: relay.name.clone(),
                // A relay of a later version may serve anything.
                is_served: !found.is_certain
                    || relays.iter().any(|one| one.refuses.why(name).is_none()),
            });
        }
    }
    Ok(all.into_values().collect())
}
