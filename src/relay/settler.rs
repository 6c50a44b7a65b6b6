//! The settle thread: writes down what became of messages, many at a time.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use crossbeam_channel::Receiver;
use diesel::PgConnection;
use diesel::result::{Error, QueryResult};

use super::session::Session;
use super::shared::{Shared, add};
use crate::config::Config;
use crate::dispatch::{Failure, Response};
use crate::error::DatabaseError;
use crate::message::{Message, hashed_key};
use crate::status::{ReasonCode, Status};
use crate::store::lease::LeaseId;
use crate::store::settle::{self, Delivered, Failed};

/// How long outcomes are gathered while there are many of them.
const LINGER: Duration = Duration::from_millis(5);
/// A batch of no more than this is of a relay with little to do: it settles at once.
const LIGHT: usize = 16;
/// Characters of an error that are stored.
const ERROR_CHARS: usize = 512;
/// A settle that takes longer than this is given up and tried again.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(20);

/// What is to be written down of a message.
#[derive(Debug, Clone)]
pub(crate) enum Verdict {
    Delivered(Response),
    Deduplicated,
    /// Waits for as long as this.
    Retry(Failure, Duration),
    /// Counts as so many attempts: 1, or 0 where nothing was sent.
    Dead(Failure, i32),
    Released,
}

impl Verdict {
    /// After a failed attempt: another one later, or the end. `attempts` were made before it.
    pub(crate) fn of_failure(failure: Failure, attempts: u32, config: &Config) -> Self {
        let made = attempts.saturating_add(1);
        if made >= config.max_attempts {
            return Self::Dead(failure, 1);
        }
        let delay = config.backoff.delay(made, fastrand::f64());
        let delay = failure.retry_after.map_or(delay, |asked| asked.max(delay));
        Self::Retry(failure, delay)
    }
}

/// A claimed message whose relay is done with it, whatever way.
#[derive(Debug)]
pub(crate) struct Settlement {
    message: Message,
    lease: LeaseId,
    verdict: Verdict,
    latency: Duration,
    /// A settle of it was tried whose answer did not come.
    repeated: bool,
}

impl Settlement {
    pub(crate) fn new(
        message: Message,
        lease: LeaseId,
        verdict: Verdict,
        latency: Duration,
    ) -> Self {
        Self {
            message,
            lease,
            verdict,
            latency,
            repeated: false,
        }
    }

    pub(crate) fn unsent(message: Message, lease: LeaseId, verdict: Verdict) -> Self {
        Self::new(message, lease, verdict, Duration::ZERO)
    }

    fn sequence(&self) -> i64 {
        self.message.sequence.0
    }
}

/// Settles until all senders and the claimer are gone and everything is written down, or until
/// the relay gives up at its deadline.
pub(crate) fn run(shared: &Shared, outcomes: &Receiver<Settlement>) {
    let mut session = shared.session("settler", STATEMENT_TIMEOUT);
    let mut is_busy = false;
    while let Ok(first) = outcomes.recv() {
        if is_busy {
            // Not on the channel: each outcome would wake this thread. Ends early at shutdown.
            let _ = shared.stop_signal().recv_timeout(LINGER);
        }
        let mut batch = gather(first, outcomes, shared.config.batch);
        is_busy = batch.len() > LIGHT;
        let mut isolate = false;
        while !batch.is_empty() {
            batch = settle(shared, &mut session, batch, isolate);
            if batch.is_empty() {
                break;
            }
            if shared.is_abandoned() {
                return;
            }
            shared.pause(session.wait());
            // A statement that failed by itself fails again: find out whose fault it is.
            isolate = true;
        }
    }
}

/// The first outcome and those that wait behind it, up to a batch.
fn gather(first: Settlement, outcomes: &Receiver<Settlement>, most: usize) -> Vec<Settlement> {
    std::iter::once(first)
        .chain(outcomes.try_iter())
        .take(most)
        .collect()
}

/// What one statement can settle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Delivered,
    Deduplicated,
    Retry,
    Dead,
    Released,
}

impl Settlement {
    fn kind(&self) -> Kind {
        match self.verdict {
            Verdict::Delivered(_) => Kind::Delivered,
            Verdict::Deduplicated => Kind::Deduplicated,
            Verdict::Retry(..) => Kind::Retry,
            Verdict::Dead(..) => Kind::Dead,
            Verdict::Released => Kind::Released,
        }
    }
}

/// Settles a batch, one statement for each lease and kind. Returns what failed.
fn settle(
    shared: &Shared,
    session: &mut Session,
    batch: Vec<Settlement>,
    isolate: bool,
) -> Vec<Settlement> {
    let mut groups: BTreeMap<(LeaseId, Kind), Vec<Settlement>> = BTreeMap::new();
    for settlement in batch {
        groups
            .entry((settlement.lease, settlement.kind()))
            .or_default()
            .push(settlement);
    }
    let mut failed = Vec::new();
    for ((lease, kind), mut group) in groups {
        group.sort_unstable_by_key(Settlement::sequence);
        match settle_group(shared, session, lease, kind, &group) {
            Ok(()) => {}
            Err(error) if isolate && is_of_the_data(&error) => {
                failed.extend(settle_singly(shared, session, lease, kind, group));
            }
            Err(_) => failed.extend(group),
        }
    }
    for settlement in &mut failed {
        settlement.repeated = true;
    }
    failed
}

/// The server refused the values, and not for want of a server.
fn is_of_the_data(error: &DatabaseError) -> bool {
    matches!(
        error,
        DatabaseError::Statement(Error::DatabaseError(..) | Error::QueryBuilderError(_))
    ) && !error.is_without_answer()
}

/// One after the other, with texts in plain ASCII, which every encoding can store: so one
/// message that cannot be written down does not hold the others. Returns those that failed still.
fn settle_singly(
    shared: &Shared,
    session: &mut Session,
    lease: LeaseId,
    kind: Kind,
    group: Vec<Settlement>,
) -> Vec<Settlement> {
    let mut failed = Vec::new();
    let mut group = group.into_iter();
    while let Some(mut settlement) = group.next() {
        match &mut settlement.verdict {
            Verdict::Delivered(response) => make_ascii(&mut response.body),
            Verdict::Retry(failure, _) | Verdict::Dead(failure, _) => {
                failure.error = ascii(&failure.error);
                make_ascii(&mut failure.response.body);
            }
            Verdict::Deduplicated | Verdict::Released => {}
        }
        let one = std::slice::from_ref(&settlement);
        if let Err(error) = settle_group(shared, session, lease, kind, one) {
            if !is_of_the_data(&error) {
                failed.push(settlement);
                failed.extend(group);
                break;
            }
            log::error!(event = "settle_failed", sequence = settlement.sequence(), error:% = error; "a message cannot be settled; it is tried again");
            failed.push(settlement);
        }
    }
    failed
}

fn ascii(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_ascii() { c } else { '?' })
        .collect()
}

fn make_ascii(text: &mut Option<String>) {
    if let Some(text) = text {
        *text = ascii(text);
    }
}

fn settle_group(
    shared: &Shared,
    session: &mut Session,
    lease: LeaseId,
    kind: Kind,
    group: &[Settlement],
) -> Result<(), DatabaseError> {
    let changed = session.run(|conn| write_down(conn, &shared.config, lease, kind, group))?;
    let changed: HashSet<i64> = changed.into_iter().collect();
    let missed: Vec<&Settlement> = group
        .iter()
        .filter(|s| !changed.contains(&s.sequence()))
        .collect();
    let settled_before = settled_before(shared, session, &missed)?;
    add(&shared.stats.settles, 1);
    let mut counted = 0;
    for settlement in group {
        if changed.contains(&settlement.sequence())
            || settled_before.contains(&settlement.sequence())
        {
            counted += 1;
            log_settled(settlement, &shared.config);
        } else {
            add(&shared.stats.conflicts, 1);
            log::warn!(event = "conflict", sequence = settlement.sequence(), topic = settlement.message.topic, lease = lease.0; "another relay has the message: its settle changed nothing");
        }
    }
    let counter = match kind {
        Kind::Delivered => &shared.stats.delivered,
        Kind::Deduplicated => &shared.stats.deduplicated,
        Kind::Retry => &shared.stats.retried,
        Kind::Dead => &shared.stats.dead,
        Kind::Released => &shared.stats.released,
    };
    add(counter, counted);
    shared.finished(group.len());
    Ok(())
}

fn write_down(
    conn: &mut PgConnection,
    config: &Config,
    lease: LeaseId,
    kind: Kind,
    group: &[Settlement],
) -> QueryResult<Vec<i64>> {
    let name = &config.table;
    let sequences = || group.iter().map(Settlement::sequence).collect::<Vec<_>>();
    match kind {
        Kind::Delivered => {
            let delivered: Vec<Delivered> = group.iter().filter_map(delivered).collect();
            settle::delivered(conn, name, lease, &delivered, config.ledger_payload)
        }
        Kind::Deduplicated => settle::deduplicated(conn, name, lease, &sequences()),
        Kind::Retry => {
            let failed: Vec<Failed> = group.iter().filter_map(failed).collect();
            settle::retry(conn, name, lease, &failed)
        }
        Kind::Dead => {
            let failed: Vec<Failed> = group.iter().filter_map(failed).collect();
            settle::dead(conn, name, lease, &failed, config.ledger_payload)
        }
        Kind::Released => settle::release(conn, name, lease, &sequences()),
    }
}

fn delivered(settlement: &Settlement) -> Option<Delivered> {
    let Verdict::Delivered(response) = &settlement.verdict else {
        return None;
    };
    Some(Delivered {
        sequence: settlement.sequence(),
        http_status: response.status.map(i32::from),
        response: response.body.as_deref().map(storable),
    })
}

fn failed(settlement: &Settlement) -> Option<Failed> {
    let (failure, delay, counted) = match &settlement.verdict {
        Verdict::Retry(failure, delay) => (failure, *delay, 1),
        Verdict::Dead(failure, counted) => (failure, Duration::ZERO, *counted),
        Verdict::Delivered(_) | Verdict::Deduplicated | Verdict::Released => return None,
    };
    Some(Failed {
        sequence: settlement.sequence(),
        code: failure.code,
        error: storable(&failure.error).chars().take(ERROR_CHARS).collect(),
        http_status: failure.response.status.map(i32::from),
        response: failure.response.body.as_deref().map(storable),
        delay,
        before: i32::try_from(settlement.message.attempts).unwrap_or(i32::MAX),
        counted,
    })
}

/// Text without control characters but line breaks and tabs: PostgreSQL takes no NUL, and a
/// terminal obeys the others.
fn storable(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c.is_control() && !matches!(c, '\n' | '\t') {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

/// Of messages that a repeated settle did not find: those that the first one had settled.
fn settled_before(
    shared: &Shared,
    session: &mut Session,
    missed: &[&Settlement],
) -> Result<HashSet<i64>, DatabaseError> {
    let keys: Vec<(String, String)> = missed
        .iter()
        .filter(|s| s.repeated && matches!(s.kind(), Kind::Delivered | Kind::Dead))
        .map(|s| {
            (
                s.message.idempotency_key.clone(),
                s.message.destination.clone(),
            )
        })
        .collect();
    // A retry or a release that worked before leaves nothing to be told by; nor does it matter.
    let mut before: HashSet<i64> = missed
        .iter()
        .filter(|s| {
            s.repeated && matches!(s.kind(), Kind::Retry | Kind::Released | Kind::Deduplicated)
        })
        .map(|s| s.sequence())
        .collect();
    if !keys.is_empty() {
        let name = &shared.config.table;
        before.extend(session.run(|conn| settle::settled(conn, name, &keys))?);
    }
    Ok(before)
}

/// One line for each message that was settled, with a stable event name.
fn log_settled(settlement: &Settlement, config: &Config) {
    let level = match settlement.kind() {
        Kind::Delivered | Kind::Released => log::Level::Debug,
        Kind::Deduplicated => log::Level::Info,
        Kind::Retry => log::Level::Warn,
        Kind::Dead => log::Level::Error,
    };
    if level > log::max_level() {
        return;
    }
    let message = &settlement.message;
    let key = hashed_key(&message.idempotency_key);
    let line = Line {
        event: "",
        status: Status::Delivered,
        attempts: message.attempts.saturating_add(1),
        reason: None,
        error: "",
    };
    let line = match &settlement.verdict {
        Verdict::Delivered(_) => Line {
            event: "delivered",
            ..line
        },
        Verdict::Deduplicated => Line {
            event: "dedup_hit",
            attempts: message.attempts,
            ..line
        },
        Verdict::Retry(failure, _) => Line {
            event: "retry",
            status: Status::Retrying,
            reason: Some(failure.code),
            error: &failure.error,
            ..line
        },
        Verdict::Dead(failure, counted) => Line {
            event: "dead",
            status: Status::Dead,
            attempts: message.attempts.saturating_add(u32::from(*counted > 0)),
            reason: Some(failure.code),
            error: &failure.error,
        },
        Verdict::Released => Line {
            event: "released",
            status: if message.attempts > 0 {
                Status::Retrying
            } else {
                Status::Pending
            },
            attempts: message.attempts,
            ..line
        },
    };
    let error: String = storable(line.error).chars().take(ERROR_CHARS).collect();
    log::log!(
        level,
        event = line.event,
        outbox:% = config.table,
        sequence = settlement.sequence(),
        message_id:% = message.message_id,
        key = key,
        topic = message.topic,
        destination = message.destination,
        status = line.status.as_str(),
        attempts = line.attempts,
        reason = line.reason.map_or("", ReasonCode::as_str),
        latency_ms = u64::try_from(settlement.latency.as_millis()).unwrap_or(u64::MAX);
        "{}{}", line.event, if error.is_empty() { String::new() } else { format!(": {error}") }
    );
}

struct Line<'a> {
    event: &'static str,
    status: Status,
    attempts: u32,
    reason: Option<ReasonCode>,
    error: &'a str,
}
