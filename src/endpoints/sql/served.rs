//! The topics and destinations that the active relays serve, as recorded in their leases.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

use diesel::dsl::not;
use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::Text;
use diesel::{PgConnection, update};

use super::removed::removed_of;
use super::silent::SilentRelay;
use super::subscribers;
use crate::engine::lease::sql::lease::{LeaseId, is_not_over, leases, stands_by};
use crate::engine::serves::routes::{Refuses, Routes, Serves, matches_any, nearest_pattern};
use crate::engine::serves::sql::topics::{
    self, KnownTopic, Patterns, correct_or_declare, did_you_mean,
};
use crate::name::OutboxName;
use crate::sql::absent::{all_endpoints, all_endpoints_text};
use crate::sql::functions::{Json, MaybeJson};
use crate::sql::statement::unprepared_statement;
use crate::sql::table::{endpoint, lease};
use crate::status::ReasonCode;

/// The topics and destinations that all active relays serve together.
pub(crate) struct Served {
    relays: Vec<ServingRelay>,
    /// `false`: a relay of a later version is active, and may serve anything.
    is_certain: bool,
    /// Of the names that were asked for, the endpoints, and the removed ones, whose messages relays
    /// end. If any are registered, also the empty name: a message that names no destination goes to all that want
    /// its topic, if any. Empty if no relay delivers to endpoints.
    registered: HashSet<String>,
    /// The topics that any relay has ever served: what meets one waits for such a relay.
    ever: Vec<KnownTopic>,
    /// What is recorded of topics.
    patterns: Patterns,
    /// The patterns of enabled endpoints, each with the name of one.
    wanted: Vec<(String, String)>,
    /// A relay that runs with `OUTBOX_ENABLED=false`.
    disabled: Option<String>,
}

struct ServingRelay {
    lease: i64,
    name: String,
    routes: Routes,
    /// Whether the relay delivers to endpoints.
    registered: bool,
    /// The endpoints to which it does not deliver.
    refuses: Refuses,
    /// The rate limits of its configured destinations, by name.
    rates: Vec<(String, String)>,
}

/// Reads the leases of active relays: all valid leases, except those of relays that stand by or are switched off. `names`:
/// the destinations of the messages in question. There may be any number of others, and of removed ones.
pub(crate) fn served(
    conn: &mut PgConnection,
    name: &OutboxName,
    names: &BTreeSet<&str>,
) -> QueryResult<Served> {
    let mut served = relays(conn, name)?;
    let known = topics::known(conn, name)?;
    served.patterns = Patterns::of(&known);
    if served.delivers_to_endpoints() {
        let names: Vec<&str> = names
            .iter()
            .copied()
            .filter(|one| !one.is_empty())
            .collect();
        let there = all_endpoints(name)
            .filter(endpoint::name.eq_any(&names))
            .select(endpoint::name);
        let mut there = there.load::<String>(conn)?;
        // A message for nobody in particular.
        if subscribers::has_endpoints(conn, name)? {
            there.push(String::new());
        }
        let ever: Vec<KnownTopic> = (known.into_iter().filter(KnownTopic::is_served)).collect();
        let wanted = match ever.is_empty() && served.patterns.declared.is_empty() {
            true => Vec::new(),
            false => wanted(conn, name)?,
        };
        let removed = removed_of(conn, name, &names)?;
        served = served.with_endpoints(there, removed, ever, wanted);
    }
    Ok(served)
}

/// Text: `unnest` of a column in FROM.
fn wanted(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<(String, String)>> {
    unprepared_statement(format!(
        "SELECT pattern, min(name) FROM {} d CROSS JOIN unnest(topics) pattern WHERE enabled GROUP BY 1",
        all_endpoints_text(name)
    ))
    .giving::<(Text, Text)>()
    .load(conn)
}

/// The topics and destinations that these relays serve, without the relays' names.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Others {
    /// A relay of a later version counts as serving everything.
    pub(crate) routes: Vec<Routes>,
    /// The number of relays that deliver to endpoints.
    pub(crate) registered: u32,
    /// What is recorded of topics.
    pub(crate) topics: Patterns,
}

pub(crate) fn others(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Others> {
    let found = relays(conn, name)?;
    let anything = (!found.is_certain).then(|| Routes::of(Serves::anything()));
    let registered = found.relays.iter().filter(|relay| relay.registered).count();
    let routes = found.relays.into_iter().map(|relay| relay.routes);
    Ok(Others {
        routes: routes.chain(anything).collect(),
        registered: u32::try_from(registered).unwrap_or(u32::MAX),
        topics: topics::patterns(conn, name)?,
    })
}

fn relays(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Served> {
    let rows: Vec<(i64, String, MaybeJson, MaybeJson)> = leases(name)
        .filter(is_not_over())
        .filter(not(stands_by(name)))
        .order(lease::id)
        .select((lease::id, lease::relay, lease::serves, lease::refuses))
        .load(conn)?;
    let mut disabled = None;
    let mut enabled = Vec::new();
    for (id, relay, serves, refuses) in rows {
        match Option::<String>::from(serves) {
            Some(serves) => enabled.push((id, relay, serves, refuses)),
            None => disabled = disabled.or(Some(relay)),
        }
    }
    let count = enabled.len();
    let relays = enabled
        .into_iter()
        .filter_map(|(id, name, serves, refuses)| {
            let refuses: Option<String> = refuses.into();
            let serves = Serves::from_json(&serves)?;
            Some((id, name, serves, Refuses::from_json(refuses.as_deref())))
        });
    let served = Served::by_relays(relays);
    Ok(Served {
        is_certain: served.relays.len() == count,
        disabled,
        ..served
    })
}

/// The running relays, oldest first, and what each serves. `None`: a relay of a later version, which may serve anything.
fn running(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Vec<(String, Option<Serves>)>> {
    let rows: Vec<(String, MaybeJson)> = leases(name)
        .filter(lease::serves.is_not_null())
        .filter(is_not_over())
        .order(lease::id)
        .select((lease::relay, lease::serves))
        .load(conn)?;
    let read = |json: MaybeJson| Serves::from_json(&Option::<String>::from(json)?);
    let each = rows.into_iter();
    Ok(each.map(|(relay, json)| (relay, read(json))).collect())
}

/// The name of a running relay that serves a pattern, of this kind or of any.
pub(crate) fn server_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    pattern: &str,
    kind: Option<&str>,
) -> QueryResult<Option<String>> {
    let is_meant =
        |(one, of): &(String, &str)| one == pattern && kind.is_none_or(|kind| kind == *of);
    let serves = |serves: &Serves| serves.topics().iter().any(is_meant);
    let mut relays = running(conn, name)?.into_iter();
    let found = relays.find(|(_, known)| known.as_ref().is_none_or(serves));
    Ok(found.map(|(relay, _)| relay))
}

/// The name of a running relay whose settings have a destination, or a group of handlers, of this name.
pub(crate) fn relay_with(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
) -> QueryResult<Option<String>> {
    let mut relays = running(conn, name)?.into_iter();
    Ok(relays.find_map(|(relay, known)| {
        let has = known?.names().iter().any(|one| one == destination);
        has.then_some(relay)
    }))
}

impl Served {
    /// What these active relays serve and refuse, without endpoints.
    pub(crate) fn by_relays(relays: impl Iterator<Item = (i64, String, Serves, Refuses)>) -> Self {
        let relay = |(lease, name, serves, refuses): (i64, String, Serves, Refuses)| ServingRelay {
            lease,
            name,
            refuses,
            registered: serves.members,
            rates: serves.rates.clone(),
            routes: Routes::of(serves),
        };
        Self {
            relays: relays.map(relay).collect(),
            is_certain: true,
            registered: HashSet::new(),
            ever: Vec::new(),
            patterns: Patterns::default(),
            wanted: Vec::new(),
            disabled: None,
        }
    }

    pub(crate) fn delivers_to_endpoints(&self) -> bool {
        self.relays.iter().any(|relay| relay.registered)
    }

    /// `there`: the names of endpoints; the empty name if there are any. `removed`: those of removed
    /// destinations. `ever`: the topics that any relay has served. `wanted`: the patterns of enabled endpoints, each with the
    /// name of one; needed only if there are such topics, or topics that applications have declared.
    pub(crate) fn with_endpoints(
        mut self,
        there: Vec<String>,
        removed: impl IntoIterator<Item = String>,
        ever: Vec<KnownTopic>,
        wanted: Vec<(String, String)>,
    ) -> Self {
        self.registered = there.into_iter().chain(removed).collect();
        (self.ever, self.wanted) = (ever, wanted);
        self
    }

    /// Whether no relay is active.
    pub(crate) fn is_empty(&self) -> bool {
        self.is_certain && self.relays.is_empty()
    }

    /// The only destination of messages that have this topic and name no destination. `None`: they have none or several,
    /// endpoints want the topic, or the relays do not agree.
    pub(crate) fn only_destination(&self, topic: &str) -> Option<&str> {
        if self.wants(topic).is_some() {
            return None;
        }
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

    /// Whether all active relays could be read.
    pub(crate) fn is_certain(&self) -> bool {
        self.is_certain
    }

    /// Whether a route of an active relay sends messages that have this topic and name no destination there.
    pub(crate) fn is_routed_to(&self, topic: &str, destination: &str) -> bool {
        let names = self.relays.iter().filter_map(|one| one.routes.names(topic));
        names.flatten().any(|name| name == destination)
    }

    /// The rate limit of a configured destination, if relays have one.
    pub(crate) fn rate_of(&self, destination: &str) -> Option<&str> {
        let mut rates = self.relays.iter().flat_map(|relay| &relay.rates);
        let found = rates.find(|(name, _)| name == destination);
        found.map(|(_, rate)| rate.as_str())
    }

    /// A relay that runs with `OUTBOX_ENABLED=false`.
    pub(crate) fn disabled(&self) -> Option<&str> {
        self.disabled.as_deref()
    }

    /// Why relays are active, but none takes messages of this topic and destination. `None` if no relay is active: the
    /// missing route is not the problem then.
    pub(crate) fn unserved(&self, topic: &str, destination: &str) -> Option<Unserved> {
        let is_known = self.is_certain && !self.relays.is_empty();
        let is_unserved = is_known && self.by(topic, destination).next().is_none();
        is_unserved.then(|| self.why(topic, destination))
    }

    fn why(&self, topic: &str, destination: &str) -> Unserved {
        let mut relays = self.relays.iter().filter(|relay| relay.registered);
        let refusal = relays.find_map(|relay| Some((&relay.name, relay.refuses.why(destination)?)));
        if let Some((relay, why)) = refusal {
            return Unserved::Refused {
                destination: destination.to_owned(),
                relay: relay.clone(),
                why: why.to_owned(),
            };
        }
        if !destination.is_empty() {
            return Unserved::UnknownDestination {
                destination: destination.to_owned(),
            };
        }
        match self.before(topic) {
            Some(before) => Unserved::ServedBefore {
                pattern: before.pattern.clone(),
                last_served: before.last_served.clone(),
                wanted_by: self.wants(topic).map(str::to_owned),
            },
            None if self.patterns.is_undeclared(topic) => self.unknown(topic),
            None => Unserved::NoRoute,
        }
    }

    /// Why messages of a topic wait that is not declared.
    pub(crate) fn unknown(&self, topic: &str) -> Unserved {
        let Patterns { served, declared } = &self.patterns;
        let patterns = declared.iter().chain(served).map(String::as_str);
        Unserved::UnknownTopic {
            topic: topic.to_owned(),
            nearest: nearest_pattern(topic, patterns).map(str::to_owned),
        }
    }

    /// The name of an endpoint with a pattern for this topic.
    fn wants(&self, topic: &str) -> Option<&str> {
        let mut wanted = self.wanted.iter();
        let found = wanted.find(|(pattern, _)| matches_any(std::slice::from_ref(pattern), topic));
        found.map(|(_, name)| name.as_str())
    }

    /// The topics of messages that name no destination, and that no active relay's route serves, as far as `before` keeps
    /// their messages and `after` does not.
    pub(crate) fn freed<'a>(
        &self,
        topics: impl Iterator<Item = &'a str>,
        before: &Patterns,
        after: &Patterns,
    ) -> Vec<String> {
        let is_routed = |topic: &str| self.relays.iter().any(|one| one.routes.serve(topic, ""));
        let is_freed = |topic: &&str| before.keep(topic) && !after.keep(topic) && !is_routed(topic);
        topics.filter(is_freed).map(str::to_owned).collect()
    }

    /// What is recorded of topics.
    pub(crate) fn patterns(&self) -> &Patterns {
        &self.patterns
    }

    /// The pattern of this topic that a relay has served before.
    fn before(&self, topic: &str) -> Option<&KnownTopic> {
        let mut ever = self.ever.iter();
        ever.find(|one| matches_any(std::slice::from_ref(&one.pattern), topic))
    }

    /// A silent relay, if only silent ones take messages of this topic and destination.
    pub(crate) fn silent<'a>(
        &self,
        topic: &str,
        destination: &str,
        silent: &'a HashMap<i64, SilentRelay>,
    ) -> Option<&'a SilentRelay> {
        let takers = self.takers(topic, destination);
        let all: Option<Vec<_>> = takers.map(|relay| silent.get(&relay.lease)).collect();
        all?.pop().filter(|_| self.is_certain)
    }

    /// The names of the relays that take messages of this topic and destination.
    pub(crate) fn by(&self, topic: &str, destination: &str) -> impl Iterator<Item = &str> {
        self.takers(topic, destination)
            .map(|relay| relay.name.as_str())
    }

    fn takers(&self, topic: &str, destination: &str) -> impl Iterator<Item = &ServingRelay> {
        let awaits_route = destination.is_empty() && self.before(topic).is_some();
        let is_unknown = destination.is_empty()
            && self.patterns.is_undeclared(topic)
            && self.wants(topic).is_none();
        let is_registered = self.registered.contains(destination) && !awaits_route && !is_unknown;
        let takes = move |relay: &&ServingRelay| {
            let delivers = relay.registered && relay.refuses.why(destination).is_none();
            relay.routes.serve(topic, destination)
                || (delivers && is_registered && relay.routes.takes(topic))
        };
        self.relays.iter().filter(takes)
    }
}

/// Why relays are active, but none serves the messages of a topic and destination (`NO_ROUTE`). The text says why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Unserved {
    /// No relay has a route or a handler for the topic.
    NoRoute,
    /// No relay has the destination that the messages name.
    UnknownDestination {
        /// The name of the destination.
        destination: String,
    },
    /// The settings of a relay refuse the endpoint.
    Refused {
        /// The name of the destination.
        destination: String,
        /// The name of the relay.
        relay: String,
        /// Why the relay refuses the destination.
        why: String,
    },
    /// A relay has served the topic before, and the messages wait for such a relay.
    ServedBefore {
        /// The pattern of its route, or the topic of its handler.
        pattern: String,
        /// When such a relay was last started, RFC 3339.
        last_served: String,
        /// An enabled endpoint with a pattern for this topic, if there are any.
        wanted_by: Option<String>,
    },
    /// The application has declared its topics, and this is none of them (`UNKNOWN_TOPIC`).
    UnknownTopic {
        /// The topic of the messages.
        topic: String,
        /// The nearest pattern that is known.
        nearest: Option<String>,
    },
}

impl Unserved {
    /// The reason in one word.
    pub(crate) fn code(&self) -> ReasonCode {
        match self {
            Self::UnknownTopic { .. } => ReasonCode::UnknownTopic,
            _ => ReasonCode::NoRoute,
        }
    }

    /// What to do, as an imperative: it keeps the messages. `waiting`: how many wait; 0: not known.
    pub(crate) fn next_step(&self, waiting: i64) -> String {
        let are_gone = match waiting {
            0 => "its messages are gone".to_owned(),
            1 => "this message is gone".to_owned(),
            _ => format!("these {waiting} messages are gone"),
        };
        match self {
            Self::NoRoute => "add a route, or start the relay that has the handler".to_owned(),
            Self::UnknownDestination { .. } => {
                "start a relay that has the destination, or correct the name where messages are enqueued".to_owned()
            }
            Self::Refused { .. } => {
                "change the settings of the relay, or the row (endpoint_refused)".to_owned()
            }
            Self::ServedBefore { pattern, .. } => format!(
                "start that relay, or add a route for '{pattern}' again until {are_gone}; `diesel-outbox topics forget '{pattern}'` says what becomes of them without a route"
            ),
            Self::UnknownTopic { topic, .. } => correct_or_declare(topic),
        }
    }
}

impl fmt::Display for Unserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRoute => f.write_str("no active relay has a route or a handler for this topic"),
            Self::UnknownDestination { destination } => {
                write!(f, "no active relay has the destination {destination:?}")
            }
            Self::Refused {
                destination,
                relay,
                why,
            } => write!(
                f,
                "the relay {relay} refuses the endpoint {destination:?}: {why}"
            ),
            Self::ServedBefore {
                pattern,
                last_served,
                wanted_by,
            } => {
                write!(
                    f,
                    "the messages wait for a relay that serves {pattern:?}, last started {last_served}"
                )?;
                match wanted_by {
                    Some(name) => {
                        write!(f, ", and so do the copies for endpoints, such as {name:?}")
                    }
                    None => Ok(()),
                }
            }
            Self::UnknownTopic { topic, nearest } => write!(
                f,
                "the topic {topic:?} is not declared{}, and nobody wants the message",
                did_you_mean(nearest.as_deref())
            ),
        }
    }
}

/// An endpoint that an active relay does not serve because of its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RefusedEndpoint {
    /// The name of the destination.
    pub name: String,
    /// Why the relay refuses the destination.
    pub why: String,
    /// The name of a relay that refuses the destination.
    pub relay: String,
    /// Whether another active relay serves the destination. If none does, its messages wait.
    pub is_served: bool,
}

/// Records which endpoints the relay of this lease refuses.
pub(crate) fn publish_refusals(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: LeaseId,
    refuses: Option<&str>,
) -> QueryResult<()> {
    update(leases(name))
        .filter(lease::id.eq(id.0))
        .set(lease::refuses.eq(refuses.map(Json)))
        .execute(conn)
        .map(drop)
}

/// The endpoints that an active relay refuses, each once, by name. Those that no active relay serves come
/// with the reason of the relay that was started first.
pub(crate) fn refused(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Vec<RefusedEndpoint>> {
    let found = relays(conn, name)?;
    let relays: Vec<&ServingRelay> = (found.relays.iter()).filter(|one| one.registered).collect();
    let mut all: BTreeMap<&str, RefusedEndpoint> = BTreeMap::new();
    for relay in &relays {
        for (name, why) in relay.refuses.each() {
            all.entry(name).or_insert_with(|| RefusedEndpoint {
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
