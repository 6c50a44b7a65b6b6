//! The monitor thread: checks every second whether the other threads make progress, and updates the gauges. It
//! also closes connections that receivers have closed. The monitor has no database connection.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::RecvTimeoutError;
use metrics::Gauge;

use super::health::{Health, Problem, ProblemKind};
use crate::engine::claim::sql::claim::Topic;
use crate::engine::host::shared::{Reload, Shared};
use crate::engine::host::threads::{MARGIN, Post, ThreadsState};
use crate::engine::plan::to::To;
use crate::engine::send::bulkhead::{Bulkhead, SendsTo};
use crate::engine::send::calls::Calls;
use crate::engine::send::gate::{Standing, Trouble};
use crate::engine::serves::sql::topics::correct_or_declare;
use crate::status::ReasonCode;

/// The interval of the checks.
const INTERVAL: Duration = Duration::from_secs(1);
/// A reload that reads the settings for this long is a problem.
const SLOW_RELOAD: Duration = Duration::from_secs(3);
/// A relay works without its listener, so a reconnect within this time is no problem.
const LISTENER_GRACE: Duration = Duration::from_secs(5);

/// Checks until the relay stops.
pub(crate) fn run(shared: &Shared) {
    loop {
        look(shared);
        record(shared);
        (shared.hooks.close_idle)();
        match shared.signals.stop.recv_timeout(INTERVAL) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    record(shared);
}

fn look(shared: &Shared) {
    let is_connected = shared.threads.state().is_connected(Post::Listener);
    let is_deaf = shared.listens() && !is_connected;
    let moves = shared.stats().moves();
    shared.threads.look(moves, is_stuck(shared), is_deaf);
}

/// How long the relay may make no progress without a known reason.
pub(crate) fn patience(shared: &Shared) -> Duration {
    shared.settings.lease.saturating_add(MARGIN)
}

/// The number of messages of a bulkhead in flight.
pub(crate) fn in_flight_of(shared: &Shared, bulkhead: &Bulkhead) -> usize {
    match bulkhead.serves {
        SendsTo::Members(_) => {
            let held = shared.custody.of_ways().into_iter();
            let of_members = held.filter(|(to, _)| matches!(to, To::Member(_) | To::Feed(_)));
            of_members.map(|(_, held)| held.in_flight).sum()
        }
        _ => shared.custody.of_way(To::Bulkhead(bulkhead.number)),
    }
}

/// Whether claimed messages are neither sent nor settled, without a known reason.
// Why: docs/decisions.md#health
fn is_stuck(shared: &Shared) -> bool {
    // A rate limit may be as low as one message an hour.
    let is_held =
        |bulkhead: &Bulkhead| in_flight_of(shared, bulkhead) > 0 && bulkhead.gate.is_limited();
    // A thread that sends or waits for the database has its own time limit.
    shared.custody.count_beside_handlers() > 0
        && !shared.threads.is_busy()
        && !shared.bulkheads.iter().any(is_held)
        && !shared.directory.only_waits()
        && shared.threads.state().troubles().next().is_none()
}

/// The current problems, the worst first.
pub(crate) fn health(shared: &Shared) -> Health {
    // Read before the stop is checked: threads that end because of a stop are no problem.
    let state = shared.threads.state();
    let mut found = Vec::new();
    if shared.is_stopping() {
        let what = "the relay is shutting down";
        add(&mut found, ProblemKind::Stopping, what.to_owned());
        return Health::new(found);
    }
    find_of_threads(shared, &state, &mut found);
    find_of_database(shared, &state, &mut found);
    find_of_messages(shared, &mut found);
    find_of_sends(shared, &mut found);
    find_of_settings(shared, &state, &mut found);
    found.sort_by_key(|problem| problem.kind);
    Health::new(found)
}

fn add(found: &mut Vec<Problem>, kind: ProblemKind, what: String) {
    found.push(Problem { kind, what });
}

/// Threads that have ended, or make no progress.
fn find_of_threads(shared: &Shared, state: &ThreadsState, found: &mut Vec<Problem>) {
    for thread in state.ended() {
        let what = format!(
            "the thread {thread} has ended unexpectedly, and the log has the reason: restart the relay"
        );
        add(found, ProblemKind::ThreadEnded, what);
    }
    let watch = &state.watch;
    for post in Post::needed() {
        if let Some(stayed) = watch.stuck(shared.threads.in_database(post)) {
            let (post, stayed) = (post.as_str(), seconds(stayed));
            let what = format!(
                "the {post} has waited for the database for {stayed}, far beyond its statement limit, because the server, a proxy or the network hangs: restart the relay if this continues"
            );
            add(found, ProblemKind::DatabaseStuck, what);
        }
    }
    for (bulkhead, senders) in shared.bulkheads.iter().zip(&shared.threads.senders) {
        let stuck: Vec<Duration> = senders.iter().filter_map(|one| watch.stuck(one)).collect();
        if let Some(longest) = stuck.iter().max() {
            let kind = match stuck.len() == senders.len() {
                true => ProblemKind::SendersStuck,
                false => ProblemKind::SomeSendersStuck,
            };
            let what = stuck_sending(bulkhead, stuck.len(), senders.len(), *longest);
            add(found, kind, what);
        }
        if let SendsTo::Handlers(handlers) = &bulkhead.serves
            && handlers.late() > 0
        {
            let (kind, what) = stuck_handlers(bulkhead, &**handlers);
            add(found, kind, what);
        }
    }
    if let Some(stayed) = watch.overdue(watch.stalled, patience(shared)) {
        let (count, stayed) = (shared.custody.count_beside_handlers(), seconds(stayed));
        let what = format!(
            "{count} claimed messages have been neither sent nor settled for {stayed}, because of a bug or an observer that hangs: restart the relay"
        );
        add(found, ProblemKind::NoProgress, what);
    }
    if let Some(stayed) = watch.overdue(watch.left, patience(shared)) {
        let stayed = seconds(stayed);
        let what = format!(
            "messages are due, but none has been claimed for {stayed}, because of a bug: restart the relay"
        );
        add(found, ProblemKind::NoProgress, what);
    }
}

/// The database, the lease, and what is not known of claims and settles.
fn find_of_database(shared: &Shared, state: &ThreadsState, found: &mut Vec<Problem>) {
    if let Some((kind, what)) = database(state) {
        add(found, kind, what);
    }
    if shared.lease.current().is_none() {
        let what = "the relay has no valid lease: it claims and sends nothing until it has one";
        add(found, ProblemKind::NoLease, what.to_owned());
    }
    for (Topic { topic, .. }, count) in shared.custody.refused_topics() {
        let what = format!(
            "the database refuses to record the results of {count} messages of {topic}, and the log has the error: the relay claims no more of this topic until they are recorded"
        );
        add(found, ProblemKind::SettlesRefused, what);
    }
    if let Some(doubt) = shared.custody.doubt() {
        let (lasts, lease) = (seconds(crate::clock::since(doubt.since)), doubt.lease.0);
        let what = format!(
            "the answer of a claim was lost {lasts} ago: the relay looks for messages that its lease {lease} holds and that it does not know, and releases them. Only these messages wait"
        );
        add(found, ProblemKind::ClaimInDoubt, what);
    }
}

/// What a chore has found, and topics whose messages wait.
fn find_of_messages(shared: &Shared, found: &mut Vec<Problem>) {
    let of_chore = shared.found();
    let is_unknown = |one: &Problem| one.kind == ProblemKind::UnknownTopic;
    if !of_chore.iter().any(is_unknown)
        && let Some(what) = undeclared(shared)
    {
        add(found, ProblemKind::UnknownTopic, what);
    }
    found.extend(of_chore);
}

/// Destinations that this relay cannot send to.
fn find_of_sends(shared: &Shared, found: &mut Vec<Problem>) {
    let of_members = shared.directory.problems(crate::clock::now());
    let is_refused = |one: &Problem| one.kind == ProblemKind::EndpointRefused;
    if !of_members.iter().any(is_refused)
        && let Some(what) = cannot_send(shared, ReasonCode::Panic)
    {
        add(found, ProblemKind::EndpointRefused, what);
    }
    found.extend(of_members);
    for (kind, code) in [
        (ProblemKind::Shortage, ReasonCode::Shortage),
        (ProblemKind::Proxy, ReasonCode::Proxy),
    ] {
        if let Some(what) = cannot_send(shared, code) {
            add(found, kind, what);
        }
    }
}

/// Settings, and the listener.
fn find_of_settings(shared: &Shared, state: &ThreadsState, found: &mut Vec<Problem>) {
    let watch = &state.watch;
    if watch.overdue(watch.deaf, LISTENER_GRACE).is_some() {
        let every = humantime::format_duration(shared.settings.poll_interval);
        let what = format!(
            "the listener is not connected: the relay finds new messages by polling, every {every}"
        );
        add(found, ProblemKind::ListenerDown, what);
    }
    let reload = match shared.reload() {
        Some(Reload::Failed(error)) => Some(format!("could not be reloaded: {error}")),
        Some(Reload::Reading(since)) => {
            let lasts = crate::clock::since(since);
            (lasts >= SLOW_RELOAD).then(|| {
                format!(
                    "have been read for {}: is one of the files a pipe that nobody writes?",
                    seconds(lasts)
                )
            })
        }
        None => None,
    };
    if let Some(what) = reload {
        let what = format!("the relay continues with the old settings. The new settings {what}");
        add(found, ProblemKind::ReloadFailed, what);
    }
    if !shared.settings.enabled {
        let what = "OUTBOX_ENABLED is false: this relay claims and sends nothing";
        add(found, ProblemKind::Disabled, what.to_owned());
    }
}

/// In words, how many topics there are beside one.
pub(crate) fn and_more(topics: usize) -> String {
    match topics {
        0 => String::new(),
        count => format!(" (and {count} more such topics)"),
    }
}

/// Topics whose messages wait, although members have patterns for them: those of other tenants.
fn undeclared(shared: &Shared) -> Option<String> {
    let (topic, count) = shared.undeclared.first(crate::clock::now())?;
    let more = and_more(count - 1);
    Some(format!(
        "messages of the topic {topic:?}{more} wait, because the topic is not declared, and nobody wants them: {}",
        correct_or_declare(&topic)
    ))
}

/// The destinations that this relay cannot send to for a reason of its own.
fn cannot_send(shared: &Shared, code: ReasonCode) -> Option<String> {
    let own = shared.bulkheads.iter();
    let own = own.filter_map(|one| Some((Arc::clone(&one.name), one.gate.trouble()?)));
    let troubles = own.chain(shared.directory.troubles());
    let mut troubles = troubles.filter(|(_, trouble)| trouble.code == code);
    let (name, Trouble { what, .. }) = troubles.next()?;
    let more = match troubles.count() {
        0 => String::new(),
        count => format!(" and {count} more destinations"),
    };
    Some(format!(
        "{what}: messages to {name:?}{more} wait, and use no attempts"
    ))
}

/// The problem with the database or the outbox.
fn database(state: &ThreadsState) -> Option<(ProblemKind, String)> {
    let (_, first) = state.troubles().next()?;
    let missing = state.troubles().find_map(|(_, trouble)| trouble.missing());
    if let Some(missing) = missing {
        return Some((ProblemKind::Schema, missing.to_owned()));
    }
    let threads: Vec<&str> = state.troubles().map(|(post, _)| post.as_str()).collect();
    let (lasts, threads) = (seconds(first.lasts()), threads.join(", "));
    let what = format!("no database for {lasts} ({threads}): {}", first.error);
    Some((ProblemKind::NoDatabase, what))
}

fn stuck_handlers(bulkhead: &Bulkhead, handlers: &dyn Calls) -> (ProblemKind, String) {
    let late = handlers.late();
    let (kind, then) = if late < handlers.most_late() {
        (ProblemKind::SomeSendersStuck, "the group continues")
    } else {
        (
            ProblemKind::SendersStuck,
            "the group starts no more handlers: restart the relay",
        )
    };
    let what = format!(
        "{late} handlers of {:?} have been running longer than their limit of {}: their messages wait for them, and {then}",
        bulkhead.name,
        humantime::format_duration(bulkhead.limits.send_timeout)
    );
    (kind, what)
}

fn stuck_sending(bulkhead: &Bulkhead, count: usize, of: usize, longest: Duration) -> String {
    format!(
        "{count} of {of} threads that send to {:?} have been sending for up to {}, beyond the limit of {}, because a dispatcher or an observer does not return: restart the relay",
        bulkhead.name,
        seconds(longest),
        humantime::format_duration(bulkhead.limits.send_timeout)
    )
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs())
}

/// Sets the gauges of the relay's state in memory, all to 0 once the relay has ended.
pub(crate) fn record(shared: &Shared) {
    let (metrics, state) = (&shared.metrics, shared.threads.state());
    let has_ended = state.has_ended();
    let set = |gauge: &Gauge, value: f64| gauge.set(if has_ended { 0.0 } else { value });
    let count = |gauge, count: usize| set(gauge, number(count));
    let flag = |gauge, is_so: bool| count(gauge, usize::from(is_so));
    for (bulkhead, metrics) in shared.bulkheads.iter().zip(&metrics.destinations) {
        let standing = bulkhead.gate.standing();
        count(&metrics.in_flight, in_flight_of(shared, bulkhead));
        count(&metrics.queued, bulkhead.jobs.len());
        count(&metrics.threads, bulkhead.limits.concurrency);
        count(&metrics.threads_busy, shared.threads.busy(bulkhead.number));
        flag(&metrics.breaker_open, standing == Standing::BreakerOpen);
        flag(&metrics.paused, standing == Standing::Paused);
    }
    if has_ended {
        metrics.set_paused(&shared.custody.kept_back().topics, &HashSet::new());
    }
    count(&metrics.connections, state.connections());
    let lease_left = shared.lease.left().as_secs_f64();
    set(&metrics.lease_seconds_left, lease_left);
    let is_listening = state.is_connected(Post::Listener);
    flag(&metrics.listener_connected, is_listening);
    let health = health(shared);
    flag(&metrics.live, health.is_live());
    flag(&metrics.ready, health.is_ready());
    for (kind, gauge) in ProblemKind::ALL.iter().zip(&metrics.problems) {
        let mut problems = health.problems().iter();
        flag(gauge, problems.any(|problem| problem.kind == *kind));
    }
}

#[allow(
    clippy::cast_precision_loss,
    reason = "counts in memory are far below 2^52"
)]
fn number(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests;
