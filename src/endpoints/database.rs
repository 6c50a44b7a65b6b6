//! The database calls of the keeper of endpoints, beside those of the engine (`engine/host/database.rs`).
//!
//! A [`Session`] calls PostgreSQL. The simulation has its own database.

use std::collections::HashMap;
use std::time::Duration;

use super::roster::Registry;
use super::serving::{Changes, Failing};
use super::sql::failing::{self, RowFailures};
use super::sql::own;
use super::sql::registrations::{self, ReadTo};
use super::sql::removed;
use super::sql::rows::{self, AsSeen};
use crate::endpoints::sql::served;
use crate::engine::directory::Roster;
use crate::engine::host::database::{DatabaseResult, record_news};
use crate::engine::host::session::Session;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::send::gate::GateNews;
use crate::engine::send::sql::pause;
use crate::hand::Hand;
use crate::log;
use crate::sql::brief::{Locks, Tried};
use crate::sql::pinned::look_for_endpoints;
use crate::status::ReasonCode;

/// The endpoints of a database, since a relay has read them: their changes, if any, and up to where they are
/// read now.
pub(crate) type SinceThen = (Option<Changes>, Option<ReadTo>);

pub(crate) trait Rows {
    /// The changes of endpoints since `known` and since the stamp `failing`, those of the names `waiting`
    /// that were removed, and what other relays serve. Looks only at rows that have changed since `read_to`, if there is one.
    /// `locks`: of the tables of destinations, pauses and topics.
    fn registered(
        &mut self,
        known: &Registry,
        since: (i64, Option<&ReadTo>),
        waiting: &[String],
        locks: Locks,
    ) -> DatabaseResult<Tried<SinceThen>>;

    /// Disables an endpoint, unless the destination has changed meanwhile, or has not failed for the given
    /// time, if any. `false`: the destination was not disabled.
    fn disable(
        &mut self,
        seen: AsSeen<'_>,
        why: (Hand, &str),
        failed_for: Option<Duration>,
    ) -> DatabaseResult<Tried<bool>>;

    /// Records in its row that an endpoint has failed for this time, last for this reason, or (`None`) that
    /// it works. Returns what the row says then.
    fn tell_failing(
        &mut self,
        seen: AsSeen<'_>,
        failed: Option<(Duration, ReasonCode)>,
    ) -> DatabaseResult<Tried<RowFailures>>;

    /// Tells other relays which endpoints this one refuses, as JSON.
    fn publish_refusals(&mut self, lease: LeaseId, refuses: Option<String>) -> DatabaseResult<()>;

    /// Records a change of the gate of an endpoint, which must not have changed since.
    fn tell_pause_of(&mut self, row: AsSeen<'_>, news: GateNews) -> DatabaseResult<Tried<()>>;
}

impl Rows for Session {
    fn registered(
        &mut self,
        known: &Registry,
        (failing, read_to): (i64, Option<&ReadTo>),
        waiting: &[String],
        locks: Locks,
    ) -> DatabaseResult<Tried<SinceThen>> {
        self.run_heeding(locks, |conn, name| {
            if look_for_endpoints(conn, name)? {
                log::info!(event = "endpoints_created", outbox:% = name; "the outbox {name} has tables of endpoints now: delivering to endpoints, too");
            }
            // Read first, so that the rows are at least as new.
            let next = registrations::now(conn)?;
            let names = match read_to.filter(|one| one.is_of_server_of(&next)) {
                Some(read_to) => Some(registrations::names(conn, name, read_to)?),
                None => None,
            };
            let only = names.as_ref().map(|names| names.iter().map(String::as_str));
            let only: Option<Vec<&str>> = only.map(Iterator::collect);
            let mut stamp = known.stamp;
            let mut failing_now = failing;
            if only.is_none() {
                (stamp, failing_now) = rows::stamp(conn, name)?;
            }
            let mut gone = HashMap::new();
            let mut changed = HashMap::new();
            let has_changed = only
                .as_ref()
                .map_or(stamp != known.stamp, |names| !names.is_empty());
            if has_changed {
                gone = known.stamps(only.as_deref());
                for (destination, stamp) in rows::stamps(conn, name, only.as_deref())? {
                    if gone.remove(&destination) != Some(stamp) {
                        changed.insert(destination, stamp);
                    }
                }
            }
            if only.is_some() {
                stamp = known.stamp_with(&changed, &gone);
            }
            let asked = waiting.iter().chain(gone.keys()).map(String::as_str);
            let asked: Vec<&str> = asked.collect();
            let removed = removed::removed_of(conn, name, &asked)?.into_iter().collect();
            // Nothing is read of tables that are not there: the next look reads all rows again.
            let next = name.has_endpoints().then_some(next);
            if stamp.0 == 0 && known.is_empty() && removed == known.removed {
                return Ok((None, next));
            }
            let others = served::others(conn, name)?;
            let failing = match (&only, failing_now == failing) {
                (Some(names), _) if names.is_empty() => None,
                (None, true) => None,
                (names, _) => Some(Failing {
                    stamp: failing_now,
                    rows: failing::all(conn, name, names.as_deref())?
                        .into_iter()
                        .collect(),
                    only: names
                        .as_ref()
                        .map(|names| names.iter().map(ToString::to_string).collect()),
                }),
            };
            let names: Vec<String> = changed.keys().cloned().collect();
            let rows = match names.is_empty() {
                true => Vec::new(),
                false => rows::endpoint_rows(conn, name, &names)?,
            };
            // Read last: who registers a destination that is paused has committed the pause before.
            let paused = match names.is_empty() {
                true => None,
                false => Some(pause::all(conn, name)?),
            };
            let rows = rows.into_iter().filter_map(|one| {
                let stamp = *changed.get(&one.row.name)?;
                Some((one, stamp))
            });
            let changes = Changes {
                stamp,
                others,
                removed,
                gone: gone.into_keys().collect(),
                rows: rows.collect(),
                failing,
                registrations: None,
                paused,
            };
            Ok((Some(changes), next))
        })
    }

    fn disable(
        &mut self,
        seen: AsSeen<'_>,
        why: (Hand, &str),
        failed_for: Option<Duration>,
    ) -> DatabaseResult<Tried<bool>> {
        let own_events = self.witness.is_some();
        self.run_without_waiting(|conn, name| match own_events {
            true => own::disable(conn, name, seen, why, failed_for),
            false => rows::disable_as_seen(conn, name, seen, why, failed_for),
        })
    }

    fn tell_failing(
        &mut self,
        seen: AsSeen<'_>,
        failed: Option<(Duration, ReasonCode)>,
    ) -> DatabaseResult<Tried<RowFailures>> {
        let own_events = self.witness.is_some();
        self.run_without_waiting(|conn, name| {
            let Some(recorded) = failing::record(conn, name, seen, failed)? else {
                return Ok(RowFailures::default());
            };
            if let (Some(turned), true) = (recorded.turn, own_events) {
                own::tell_failing(conn, name, seen.name, turned)?;
            }
            Ok(recorded.failures)
        })
    }

    fn publish_refusals(&mut self, lease: LeaseId, refuses: Option<String>) -> DatabaseResult<()> {
        self.run(|conn, name| served::publish_refusals(conn, name, lease, refuses.as_deref()))
    }

    fn tell_pause_of(&mut self, row: AsSeen<'_>, news: GateNews) -> DatabaseResult<Tried<()>> {
        let witness = self.witness;
        self.run_without_waiting(|conn, name| match rows::hold_as_seen(conn, name, row)? {
            true => record_news(conn, name, witness, row.name, news),
            false => Ok(()),
        })
    }
}
