//! Pausing a destination, a topic or a tenant, as an operator does.

use std::collections::BTreeSet;
use std::time::Duration;

use diesel::{Connection, PgConnection};

use super::{ActError, Found};
use crate::endpoints::{EndpointError, EndpointFilter};
use crate::engine::send::sql::pause::{self as store, BREAKER_OPEN, Pausable};
use crate::error::DatabaseError;
use crate::hand::Hand;
use crate::name::OutboxName;
use crate::operate::chosen::{WrongChoice, duration};
use crate::operate::keys::leases;
use crate::operate::pauses::{self, Pause, pauses};
use crate::operate::sql::audit::Act;
use crate::operate::topics::topics;
use crate::operate::waiting::{Note, audited};
use crate::outbox::Outbox;
use crate::sql::pinned::pinned;

/// The reason of a pause without one.
pub const OPERATOR: &str = "OPERATOR";
/// The most bytes of a reason.
const LONGEST_REASON: usize = 200;
/// The longest pause that ends by itself.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
/// The endpoints that an error names.
const SOME: usize = 10;

/// Whether a pause may have this reason.
///
/// # Errors
/// Why not.
pub fn check_pause_reason(reason: &str) -> Result<(), String> {
    if reason.is_empty() || reason.len() > LONGEST_REASON {
        return Err(format!("the reason must have 1 to {LONGEST_REASON} bytes"));
    }
    match reason == BREAKER_OPEN {
        true => Err("the reason is reserved for relays: give another one".to_owned()),
        false => Ok(()),
    }
}

/// A pause that is asked for.
#[derive(Debug, Clone)]
pub struct Pausing {
    kind: Pausable,
    name: String,
    reason: String,
    lasts: Option<Duration>,
    is_forced: bool,
}

/// What became of it.
#[derive(Debug, Clone)]
pub struct PauseAnswer {
    /// The operator's pause that holds now.
    pub pause: Pause,
    /// `false`: a pause at least as long was there, and stays.
    pub has_changed: bool,
    /// No waiting message has this name, so it may be misspelt.
    pub is_unknown: bool,
}

impl Pausing {
    /// A pause with this reason ([`OPERATOR`] without one), for a time such as `2h`, or until it is resumed. `is_forced`: also of a destination
    /// that nobody knows.
    ///
    /// # Errors
    /// A [`WrongChoice`] of `name`, `reason` or `for`.
    pub fn new(
        kind: Pausable,
        name: &str,
        reason: Option<&str>,
        lasts: Option<&str>,
        is_forced: bool,
    ) -> Result<Self, WrongChoice> {
        let lasts = lasts.map(|text| duration("for", text)).transpose()?;
        let wrong = |field, why: String| Err(WrongChoice { field, why });
        let (name, reason) = (name.trim(), reason.map_or(OPERATOR, str::trim));
        if name.is_empty() {
            return wrong("name", format!("the {} is empty", kind.as_str()));
        }
        if kind == Pausable::Tenant && name.parse::<uuid::Uuid>().is_err() {
            return wrong("name", format!("{name:?} is not a UUID, as a tenant is"));
        }
        if lasts.is_some_and(|lasts| lasts < Duration::from_millis(1) || lasts > LONGEST) {
            let why = "the time must be from 1ms to a year; without it, the pause ends when it is resumed";
            return wrong("for", why.to_owned());
        }
        if let Err(why) = check_pause_reason(reason) {
            return wrong("reason", why);
        }
        Ok(Self {
            kind,
            name: name.to_owned(),
            reason: reason.to_owned(),
            lasts,
            is_forced,
        })
    }

    /// Pauses, and records that `who` did; `configured`: the destinations of the settings. A misspelt name would pause nothing, so a
    /// destination must be known: by the settings, a running relay, an endpoint or a waiting message. If there is none, nobody
    /// knows the names, and each is accepted.
    ///
    /// # Errors
    /// An [`ActError`]; unknown names among them.
    pub fn perform(
        &self,
        conn: &mut PgConnection,
        outbox: &OutboxName,
        configured: impl IntoIterator<Item = String>,
        who: &str,
    ) -> Found<PauseAnswer> {
        let is_unknown = match self.kind {
            Pausable::Tenant => false,
            Pausable::Topic => self.is_unknown(conn, outbox)?,
            Pausable::Destination => {
                self.is_unknown(conn, outbox)?
                    && !self.is_destination(conn, outbox, configured.into_iter().collect())?
            }
        };
        if is_unknown && self.kind == Pausable::Topic && self.name.contains('*') {
            return Err(ActError::Unknown(format!(
                "no message has the topic {:?}, and patterns are not allowed: pause each topic by name",
                self.name
            )));
        }
        // A pause without a reason has none in the audit.
        let why = Some(self.reason.as_str()).filter(|reason| *reason != OPERATOR);
        let note = Note::new(who, why.unwrap_or_default());
        conn.transaction(|conn| {
            let by = (Hand::Operator, self.reason.as_str());
            let has_changed = pinned(conn, outbox, |conn, outbox| {
                let is_new = store::pause(conn, outbox, self.kind, &self.name, by, self.lasts, 0)?;
                if is_new {
                    note.audit(conn, outbox, Act::Pause, &self.name)?;
                }
                diesel::QueryResult::Ok(is_new)
            })?;
            let own = pauses(conn, outbox)?.into_iter().find(|pause| {
                let is_same = pause.kind == self.kind && pause.name == self.name;
                is_same && pause.by == Hand::Operator
            });
            let pause = own.ok_or_else(|| {
                let (kind, name) = (self.kind.as_str(), &self.name);
                ActError::Unknown(format!(
                    "{kind} {name:?} is not paused: the pause has already ended"
                ))
            })?;
            Ok(PauseAnswer {
                pause,
                has_changed,
                is_unknown,
            })
        })
    }

    /// Whether no waiting message has this topic, or names this destination.
    fn is_unknown(&self, conn: &mut PgConnection, outbox: &OutboxName) -> Found<bool> {
        let live = topics(conn, outbox)?;
        Ok(!live.iter().any(|one| match self.kind {
            Pausable::Topic => one.topic == self.name,
            _ => one.destination == self.name,
        }))
    }

    /// Whether there is such a destination; these are `known`. An error, if there are others and this one is not forced.
    fn is_destination(
        &self,
        conn: &mut PgConnection,
        outbox: &OutboxName,
        mut known: BTreeSet<String>,
    ) -> Found<bool> {
        // Also of a relay whose heartbeat has stopped: that is when one pauses.
        let valid = leases(conn, outbox)?.into_iter();
        let valid = valid.filter(|lease| lease.seconds_left > 0.0);
        known.extend(valid.flat_map(|lease| lease.destinations));
        let of = Outbox::from(outbox.clone());
        let endpoint = or_none(of.endpoints().get(conn, &self.name))?;
        if known.contains(&self.name) || endpoint.is_some() || self.is_forced {
            return Ok(true);
        }
        let some = or_none(of.endpoints().list(conn, &EndpointFilter::default(), SOME))?;
        known.extend(some.into_iter().map(|one| one.name));
        if known.is_empty() {
            return Ok(false);
        }
        let known: Vec<&str> = known.iter().map(String::as_str).take(SOME).collect();
        Err(ActError::Unknown(format!(
            "no destination {:?} is in these settings, is an endpoint, or is served by a running relay: check the spelling, or force it; existing ones include {}",
            self.name,
            known.join(", ")
        )))
    }
}

/// Ends a pause, and records who did. `false`: this was not paused.
///
/// # Errors
/// A [`DatabaseError`](crate::DatabaseError).
pub fn resume(
    conn: &mut PgConnection,
    outbox: &OutboxName,
    kind: Pausable,
    name: &str,
    note: &Note,
) -> Result<bool, DatabaseError> {
    audited(conn, outbox, note, Act::Resume, name, |conn| {
        pauses::resume(conn, outbox, kind, name)
    })
}

/// An outbox without tables of endpoints has none.
fn or_none<T: Default>(found: Result<T, EndpointError>) -> Found<T> {
    match found {
        Err(EndpointError::NoTables(_)) => Ok(T::default()),
        Err(EndpointError::Database(error)) => Err(error.into()),
        Err(error) => Err(ActError::Unknown(error.to_string())),
        Ok(found) => Ok(found),
    }
}
