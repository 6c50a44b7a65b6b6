//! Exchanges pauses between the gates of this relay and the table of pauses that all relays share.
//!
//! A gate decides whether messages may be sent to its destination now.

use std::time::Duration;

use super::bulkhead::Bulkhead;
use super::gate::{ExchangeTime, GateNews};
use super::paused::{Pauses, of_kind};
use super::sql::pause::{Pausable, Paused};
use crate::clock;
use crate::engine::host::database::{Database, DatabaseResult};
use crate::engine::host::shared::Shared;
use crate::engine::lease::clock::CLOSES_AFTER;
use crate::engine::workers::Keeper;
use crate::log;
use crate::sql::brief::Tried;

/// The time that a probe has to be claimed and finished, in addition to the time of its send.
const PROBE_TIME: Duration = Duration::from_secs(5);

/// Records the changes of the gates in the table, and opens gates whose pause has expired. For a gate that a breaker
/// has closed, asks the table for the right to probe.
pub(crate) fn exchange<'k, D: Database>(
    shared: &Shared,
    keeper: Option<&mut (dyn Keeper<D> + 'k)>,
    db: &mut D,
    when: ExchangeTime,
) -> DatabaseResult<()> {
    for bulkhead in &shared.bulkheads {
        let record = |db: &mut D, news| db.tell_pause(&bulkhead.name, news);
        exchange_gate(shared, db, bulkhead, when, record)?;
    }
    keeper.map_or(Ok(()), |keeper| keeper.exchange(shared, db, when))
}

/// The same for one gate. `record`: records a change.
pub(crate) fn exchange_gate<D: Database>(
    shared: &Shared,
    db: &mut D,
    bulkhead: &Bulkhead,
    when: ExchangeTime,
    record: impl FnOnce(&mut D, GateNews) -> DatabaseResult<Tried<()>>,
) -> DatabaseResult<()> {
    let gate = &bulkhead.gate;
    let mut told = Tried::Done(());
    match when {
        ExchangeTime::Running { .. } if gate.waits_for_row(clock::now()) => return Ok(()),
        ExchangeTime::AtTheEnd if gate.has_unused_probe() => {
            told = db.release_probe(&bulkhead.name)?
        }
        _ => {}
    }
    if let Some(news) = gate.take_news() {
        let recorded = record(db, news);
        if !matches!(recorded, Ok(Tried::Done(()))) {
            gate.keep_news(news);
        }
        told = recorded?;
        if told == Tried::Done(()) && matches!(news, GateNews::Opened(..)) {
            let metrics = &shared.metrics.destinations[bulkhead.number];
            metrics.breaker_opened.increment(1);
        }
    }
    match (told, when) {
        (Tried::Done(()), ExchangeTime::Running { may_probe }) => {
            if gate.open_in_time(clock::now()) && may_probe {
                probe(shared, db, bulkhead)?;
            }
        }
        (Tried::Done(()), ExchangeTime::AtTheEnd) => {}
        (Tried::Locked, ExchangeTime::Running { .. }) => gate.wait_for_row(clock::now()),
        (Tried::Locked, ExchangeTime::AtTheEnd) => {
            log::warn!(event = "pause_lost", destination:% = bulkhead.name; "could not record the pause of {} at shutdown, because another session has locked its row: other relays will discover the failing destination on their own", bulkhead.name);
        }
    }
    Ok(())
}

fn probe(shared: &Shared, db: &mut impl Database, bulkhead: &Bulkhead) -> DatabaseResult<()> {
    // After a longer time, another relay may be the one to find out: this one may be dead.
    let hold = 2 * bulkhead.limits.send_timeout.min(CLOSES_AFTER) + PROBE_TIME;
    match db.take_probe(&bulkhead.name, hold)? {
        Tried::Done((true, _)) => bulkhead.gate.begin_probe(hold),
        Tried::Done((false, rows)) => learn(shared, &rows),
        Tried::Locked => bulkhead.gate.wait_for_row(clock::now()),
    }
    Ok(())
}

/// Records the changes that the last senders have caused after the end of the claimer. Other relays discover a failing
/// destination on their own.
pub(crate) fn tell_the_last<D: Database>(
    shared: &Shared,
    mut keeper: Option<Box<dyn Keeper<D>>>,
    db: &mut D,
) {
    if let Err(error) = exchange(shared, keeper.as_deref_mut(), db, ExchangeTime::AtTheEnd) {
        log::warn!(event = "pause_lost", error:% = error; "could not record a pause at shutdown: other relays will discover the failing destination on their own: {error}");
    }
}

/// Takes in the state of the table: tells it to the gates, and keeps back the paused topics and the paused destinations
/// without a gate.
pub(crate) fn learn(shared: &Shared, rows: &[Paused]) {
    let (now, pauses) = (clock::now(), Pauses::of(rows));
    for one in &shared.bulkheads {
        one.gate.learn(pauses.of_both(&one.name, None), now);
    }
    shared.directory.paused(rows, now);
    let roster = shared.directory.roster();
    let is_on = |row: &&Paused| row.is_on();
    let has_gate = |row: &&Paused| {
        let mut bulkheads = shared.bulkheads.iter();
        bulkheads.any(|one| *one.name == *row.name) || roster.member(&row.name).is_some()
    };
    let topics = of_kind(rows, Pausable::Topic).filter(is_on);
    let destinations = of_kind(rows, Pausable::Destination).filter(is_on);
    let destinations = destinations.filter(|row| !has_gate(row));
    shared.set_paused(
        topics.map(|row| row.name.clone()).collect(),
        destinations.map(|row| row.name.clone()).collect(),
    );
}
