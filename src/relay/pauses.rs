//! Exchanges pauses between the gates of this relay and the table of pauses that all relays share.
//!
//! A gate decides whether messages may be sent to its destination now.

use std::sync::Arc;
use std::time::Duration;

use super::bulkhead::Bulkhead;
use super::database::Database;
use super::gate::{Due, News, RowNews};
use super::lease_clock::CLOSES_AFTER;
use super::paused::{Pauses, of_kind};
use super::serving::ServedEndpoint;
use super::shared::Shared;
use crate::clock;
use crate::error::DatabaseError;
use crate::hand::Hand;
use crate::log;
use crate::store::brief::Tried;
use crate::store::endpoints::AsSeen;
use crate::store::relay::pause::{Pausable, Paused};

/// Why an endpoint is disabled after a 410.
const GONE: &str = "GONE: the receiver responded with 410";
/// The time that a probe has to be claimed and finished, in addition to the time of its send.
const PROBE_TIME: Duration = Duration::from_secs(5);

/// Records the changes of the gates in the table, and opens gates whose pause has expired. For a gate that a breaker
/// has closed, asks the table for the right to probe.
pub(super) fn follow_up(
    shared: &Shared,
    db: &mut impl Database,
    may_probe: bool,
) -> Result<(), DatabaseError> {
    let watched = shared.registered.watched();
    for (bulkhead, row) in with_watched(shared, &watched) {
        let gate = &bulkhead.gate;
        if gate.waits_for_row(clock::now()) {
            continue;
        }
        if let Some(news) = gate.take_news() {
            let told = tell(shared, db, (bulkhead, row), news);
            if !matches!(told, Ok(Tried::Done(()))) {
                gate.keep_news(news);
            }
            if told? == Tried::Locked {
                gate.wait_for_row(clock::now());
                continue;
            }
        }
        if gate.open_in_time(clock::now()) == Due::Probe && may_probe {
            probe(shared, db, bulkhead)?;
        }
    }
    for member in &watched {
        follow_row(db, member)?;
    }
    Ok(())
}

/// Records in the row of an endpoint that it fails or works, and disables one that has failed for longer
/// than the settings allow.
fn follow_row(db: &mut impl Database, member: &ServedEndpoint) -> Result<(), DatabaseError> {
    let gate = &member.bulkhead.gate;
    if gate.waits_for_row(clock::now()) {
        return Ok(());
    }
    let Some(news) = gate.take_row_news() else {
        return Ok(());
    };
    let seen = member.customer.as_seen();
    let failed = match news {
        RowNews::Fails(since, code) => Some((clock::now().saturating_duration_since(since), code)),
        RowNews::Works | RowNews::HasFailedLong(_) | RowNews::Gone => None,
    };
    let told = match news {
        RowNews::Fails(..) | RowNews::Works => db.tell_failing(seen, failed).map(|told| {
            if let Tried::Done(row) = told {
                gate.learn_row(row, clock::now());
            }
            matches!(told, Tried::Done(_))
        }),
        RowNews::HasFailedLong(after) => {
            let why = format!("has failed for {}", humantime::format_duration(after));
            let why = (Hand::Relay, why.as_str());
            disable(db, seen, why, Some(after)).map(|told| matches!(told, Tried::Done(_)))
        }
        RowNews::Gone => {
            let why = (Hand::Receiver, GONE);
            disable(db, seen, why, None).map(|told| matches!(told, Tried::Done(_)))
        }
    };
    if !matches!(told, Ok(true)) {
        gate.keep_row_news(news);
    }
    if !told? {
        gate.wait_for_row(clock::now());
    }
    Ok(())
}

/// A bulkhead. That of an endpoint with the row that it was made from.
type OfRow<'a> = (&'a Bulkhead, Option<AsSeen<'a>>);

/// All bulkheads, including those of endpoints whose gates are watched.
fn with_watched<'a>(
    shared: &'a Shared,
    watched: &'a [Arc<ServedEndpoint>],
) -> impl Iterator<Item = OfRow<'a>> {
    let of_watched = watched.iter();
    let of_watched = of_watched.map(|one| (&one.bulkhead, Some(one.customer.as_seen())));
    let others = shared.bulkheads.iter().map(|one| (one, None));
    others.chain(of_watched)
}

fn tell(
    shared: &Shared,
    db: &mut impl Database,
    (bulkhead, row): OfRow<'_>,
    news: News,
) -> Result<Tried<()>, DatabaseError> {
    let told = db.tell_pause(&bulkhead.name, row, news)?;
    if told == Tried::Done(()) && matches!(news, News::Opened(..)) {
        let metrics = &shared.metrics.destinations[bulkhead.number];
        metrics.breaker_opened.increment(1);
    }
    Ok(told)
}

/// Disables an endpoint, unless it has changed since it was seen or, with `failed_for`, has not failed for
/// this time. Logs the change.
pub(super) fn disable(
    db: &mut impl Database,
    seen: AsSeen<'_>,
    (by, why): (Hand, &str),
    failed_for: Option<Duration>,
) -> Result<Tried<()>, DatabaseError> {
    let Tried::Done(is_disabled) = db.disable(seen, (by, why), failed_for)? else {
        return Ok(Tried::Locked);
    };
    if is_disabled {
        let name = seen.name;
        log::warn!(event = "endpoint_disabled", destination = name, reason = why; "disabled the endpoint {name}: {why}; messages already addressed to it wait until it is enabled, and it gets no new ones");
    }
    Ok(Tried::Done(()))
}

fn probe(
    shared: &Shared,
    db: &mut impl Database,
    bulkhead: &Bulkhead,
) -> Result<(), DatabaseError> {
    // After a longer time, another relay may be the one to find out: this one may be dead.
    let hold = 2 * bulkhead.limits.send_timeout.min(CLOSES_AFTER) + PROBE_TIME;
    match db.take_probe(&bulkhead.name, hold)? {
        Tried::Done((true, _)) => bulkhead.gate.begin_probe(hold),
        Tried::Done((false, rows)) => learn(shared, &rows),
        Tried::Locked => bulkhead.gate.wait_for_row(clock::now()),
    }
    Ok(())
}

/// Records the changes that the last senders have caused after the end of the claimer, and gives unused rights to
/// probe back. Tries only once: other relays discover a failing destination on their own.
pub(super) fn tell_the_last(shared: &Shared, db: &mut impl Database) {
    let watched = shared.registered.watched();
    let mut tell_all = || {
        for (bulkhead, row) in with_watched(shared, &watched) {
            let mut told = Tried::Done(());
            if bulkhead.gate.has_unused_probe() {
                told = db.release_probe(&bulkhead.name)?;
            }
            if let Some(news) = bulkhead.gate.take_news() {
                told = tell(shared, db, (bulkhead, row), news)?;
            }
            if told == Tried::Locked {
                log::warn!(event = "pause_lost", destination:% = bulkhead.name; "could not record the pause of {} at shutdown, because another session has locked its row: other relays will discover the failing destination on their own", bulkhead.name);
            }
        }
        for member in &watched {
            follow_row(db, member)?;
        }
        Ok::<(), DatabaseError>(())
    };
    if let Err(error) = tell_all() {
        log::warn!(event = "pause_lost", error:% = error; "could not record a pause at shutdown: other relays will discover the failing destination on their own: {error}");
    }
}

/// Takes in the state of the table: tells it to the gates, and keeps back the paused topics and the paused destinations
/// without a gate.
pub(super) fn learn(shared: &Shared, rows: &[Paused]) {
    let (now, pauses) = (clock::now(), Pauses::of(rows));
    let (registered, registry) = (&shared.registered, shared.registered.registry());
    for one in (pauses.of_destinations.keys()).filter_map(|name| registry.named(name)) {
        registered.watch(one.id);
    }
    if !pauses.of_tenants.is_empty() {
        let customers = registry.by_name.values();
        let paused = customers.filter(|one| pauses.of_tenant(one).is_some());
        paused.for_each(|one| registered.watch(one.id));
    }
    for one in &shared.bulkheads {
        one.gate.learn(pauses.of_name(&one.name), now);
    }
    for member in registered.watched() {
        let rows = pauses.of_customer(&member.customer);
        member.bulkhead.gate.learn(rows, now);
    }
    registered.forget_flowing();
    let is_on = |row: &&Paused| row.is_on();
    let has_gate = |row: &&Paused| {
        let mut bulkheads = shared.bulkheads.iter();
        bulkheads.any(|one| *one.name == *row.name) || registry.named(&row.name).is_some()
    };
    let topics = of_kind(rows, Pausable::Topic).filter(is_on);
    let destinations = of_kind(rows, Pausable::Destination).filter(is_on);
    let destinations = destinations.filter(|row| !has_gate(row));
    shared.set_paused(
        topics.map(|row| row.name.clone()).collect(),
        destinations.map(|row| row.name.clone()).collect(),
    );
}
