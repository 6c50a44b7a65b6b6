//! The monitor thread: looks each second whether the others move, and says so to the metrics. It has no
//! connection.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::RecvTimeoutError;

use super::bulkhead::{Bulkhead, Serves};
use super::gate::Standing;
use super::health::{DestinationState, Health, Problem, ProblemKind};
use super::progress::{MARGIN, Stay, millis, now};
use super::shared::Shared;
use super::to::To;
use crate::handlers::MOST_LATE;
use crate::store::relay::claim::Topic;

/// How often it looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Where it has not looked for as long, the whole process stood still.
const ASLEEP: Duration = Duration::from_secs(5);
/// A relay can do without its listener: that it connects takes no longer.
const LISTENER_GRACE: Duration = Duration::from_secs(5);

/// What the monitor remembers.
#[derive(Debug, Default)]
pub(crate) struct Monitor {
    /// When it last looked; 0: never.
    looked: AtomicU64,
    /// Since when the process has not stood still.
    awake: AtomicU64,
    /// When somebody else saw that it does not look; 0: it does.
    missed: AtomicU64,
    /// The last sum of all moves.
    moves: AtomicU64,
    /// What is claimed does not move, and nothing explains it.
    stalled: Stay,
    /// What is due is not claimed, and nothing explains it.
    left: Stay,
    /// The relay does not listen.
    deaf: Stay,
}

/// Looks until the relay stops.
pub(crate) fn run(shared: &Shared) {
    loop {
        shared.monitor.look(shared);
        record(shared);
        match shared.stop_signal().recv_timeout(INTERVAL) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    record(shared);
}

impl Monitor {
    fn look(&self, shared: &Shared) {
        self.tick(now());
        let moves = shared.progress.moves();
        let has_moved = self.moves.swap(moves, Ordering::AcqRel) != moves;
        let is_stalled = !has_moved && is_stalled(shared);
        follow(&self.stalled, is_stalled, patience(shared));
        let is_wanted = shared.config.listener && shared.config.enabled;
        let is_deaf = is_wanted && !shared.progress.listener.is_connected();
        follow(&self.deaf, is_deaf, LISTENER_GRACE);
    }

    /// The janitor has looked whether something is due that the relay should have claimed.
    pub(super) fn set_left(&self, shared: &Shared, is_left: bool) {
        follow(&self.left, is_left, patience(shared));
    }

    /// The monitor looks.
    fn tick(&self, now: u64) {
        let before = self.looked.swap(now, Ordering::AcqRel);
        if now.saturating_sub(before) > millis(ASLEEP) {
            self.awake.store(now, Ordering::Release);
        }
        self.missed.store(0, Ordering::Release);
    }

    /// Since when times count. A process that stood still sees that its threads were where they are for
    /// long, before they could move.
    fn awake(&self, now: u64) -> u64 {
        let looked = self.looked.load(Ordering::Acquire);
        if now.saturating_sub(looked) <= millis(ASLEEP) {
            return self.awake.load(Ordering::Acquire);
        }
        // Either that is so just now, or the monitor itself hangs: then times count from here on.
        let first = self
            .missed
            .compare_exchange(0, now, Ordering::AcqRel, Ordering::Acquire);
        first.map_or_else(|missed| missed, |_| now)
    }
}

/// Begins the stay where it is so and was not before; ends it where it is not.
fn follow(stay: &Stay, is_so: bool, limit: Duration) {
    match (is_so, stay.is_inside()) {
        (true, false) => stay.begin(limit),
        (false, true) => stay.end(),
        _ => {}
    }
}

/// For how long nothing may happen without a reason.
pub(super) fn patience(shared: &Shared) -> Duration {
    shared.config.lease.saturating_add(MARGIN)
}

/// Whether nothing is on its way here, and nothing keeps the relay from claiming what is due.
pub(super) fn is_free_to_claim(shared: &Shared) -> bool {
    shared.config.enabled
        && shared.limit.is_none()
        && !shared.progress.stands_by()
        && shared.in_flight_beside_handlers() == 0
        && shared.lease.current().is_some()
        && shared.doubt().is_none()
        && shared.outage.troubles().is_empty()
}

/// Whether what is due there may be claimed and sent at once.
pub(super) fn is_open(shared: &Shared, topic: &str, destination: &str) -> bool {
    if shared.policy().closed().any(|closed| closed == topic) {
        return false;
    }
    let held = |held: &Topic| held.topic == topic && held.destination == destination;
    if shared.held_topics().iter().any(held) {
        return false;
    }
    match To::of(&shared.routes, topic, destination) {
        To::Bulkhead(number) => shared.bulkheads[number].gate.standing() == Standing::Flowing,
        To::Split => true,
        To::Nowhere => false,
    }
}

/// Whether messages are on their way here that nobody sends, and that nothing keeps.
fn is_stalled(shared: &Shared) -> bool {
    let progress = &shared.progress;
    // Who sends, or waits for the database, is judged by that.
    let is_busy = progress.is_settling() || progress.senders.iter().flatten().any(Stay::is_inside);
    // A rate may be a message an hour.
    let is_held = |bulkhead: &Bulkhead| {
        bulkhead.in_flight.load(Ordering::Relaxed) > 0 && bulkhead.gate.is_limited()
    };
    shared.in_flight_beside_handlers() > 0
        && !is_busy
        && !shared.bulkheads.iter().any(is_held)
        && shared.outage.troubles().is_empty()
        && shared.doubt().is_none()
}

/// What is wrong just now, the worst first.
pub(crate) fn health(shared: &Shared) -> Health {
    // Before it is asked whether the relay stops: whatever has ended for that is seen after it.
    let ended = shared.ended();
    let mut problems = Vec::new();
    let mut found = |kind, what: String| problems.push(Problem { kind, what });
    if shared.is_stopping() {
        found(
            ProblemKind::Stopping,
            "the relay is shutting down".to_owned(),
        );
        return Health::new(problems);
    }
    for thread in ended {
        found(
            ProblemKind::ThreadEnded,
            format!(
                "the thread {thread} has ended by itself; its log lines say why. Restart the relay"
            ),
        );
    }
    let now = now();
    let awake = shared.monitor.awake(now);
    for post in shared.progress.needed() {
        if let Some(stayed) = post.in_database.overdue(now, awake) {
            found(
                ProblemKind::DatabaseStuck,
                stuck_in_database(post.thread, stayed),
            );
        }
    }
    for (bulkhead, senders) in shared.bulkheads.iter().zip(&shared.progress.senders) {
        let overdue = senders.iter().filter_map(|one| one.overdue(now, awake));
        let (mut count, mut longest) = (0, Duration::ZERO);
        for stayed in overdue {
            count += 1;
            longest = longest.max(stayed);
        }
        if count > 0 {
            let all = count == senders.len();
            let kind = if all {
                ProblemKind::SendersStuck
            } else {
                ProblemKind::SomeSendersStuck
            };
            found(kind, stuck_sending(bulkhead, count, senders.len(), longest));
        }
        if let Serves::Group(group) = &bulkhead.serves
            && group.late() > 0
        {
            let (kind, what) = stuck_handlers(bulkhead, group.late());
            found(kind, what);
        }
    }
    if let Some(stayed) = shared.monitor.stalled.overdue(now, awake) {
        let count = shared.in_flight_beside_handlers();
        found(
            ProblemKind::NoProgress,
            format!(
                "{count} claimed messages are neither sent nor settled for {}: an observer hangs, or there is a defect. Restart the relay",
                seconds(stayed)
            ),
        );
    }
    if let Some(stayed) = shared.monitor.left.overdue(now, awake) {
        found(
            ProblemKind::NoProgress,
            format!(
                "messages are due, and none was claimed for {}: a defect. Restart the relay",
                seconds(stayed)
            ),
        );
    }
    database(shared, &mut found);
    for (Topic { topic, .. }, count) in shared.held_counts() {
        found(
            ProblemKind::SettlesRefused,
            format!(
                "the database refuses to record what became of {count} messages of {topic}; no more of them are claimed until it does. The log has the database's error"
            ),
        );
    }
    let unrouted = shared.unrouted();
    if let Some(first) = unrouted.first() {
        let more = match unrouted.len() - 1 {
            0 => String::new(),
            count => format!(" (and {count} more such topics)"),
        };
        found(
            ProblemKind::NoRoute,
            format!(
                "{}{more}. Add a route, or start the relay that has the handler",
                first.what()
            ),
        );
    }
    if shared.monitor.deaf.overdue(now, awake).is_some() {
        found(
            ProblemKind::ListenerDown,
            format!(
                "the listener has no connection that hears anything; new messages are found by polling, every {}",
                humantime::format_duration(shared.config.poll_interval)
            ),
        );
    }
    if !shared.config.enabled {
        found(
            ProblemKind::Disabled,
            "OUTBOX_ENABLED is false: nothing is claimed or sent".to_owned(),
        );
    }
    problems.sort_by_key(|problem| problem.kind);
    Health::new(problems)
}

/// Whether database, outbox and lease are there.
fn database(shared: &Shared, found: &mut impl FnMut(ProblemKind, String)) {
    let troubles = shared.outage.troubles();
    let missing = troubles
        .iter()
        .find_map(|(_, trouble)| trouble.missing.as_ref());
    if let Some(missing) = missing {
        found(ProblemKind::Schema, missing.clone());
    }
    let unreachable = troubles
        .iter()
        .filter(|(_, trouble)| trouble.missing.is_none());
    let (mut threads, mut first) = (Vec::new(), None);
    for (thread, trouble) in unreachable {
        threads.push(*thread);
        first.get_or_insert(trouble);
    }
    if let (Some(trouble), None) = (first, missing) {
        let since = seconds(trouble.since.elapsed());
        found(
            ProblemKind::NoDatabase,
            format!(
                "no database for {since} ({}): {}",
                threads.join(", "),
                trouble.error
            ),
        );
    }
    if shared.lease.current().is_none() {
        found(
            ProblemKind::NoLease,
            "the relay has no lease with time left: nothing is claimed or sent until it has"
                .to_owned(),
        );
    }
}

fn stuck_in_database(thread: &str, stayed: Duration) -> String {
    format!(
        "the {thread} has waited for the database for {}, far beyond the limit of its statements: a server, a proxy or a network that hangs. Restart the relay if that does not pass",
        seconds(stayed)
    )
}

fn stuck_handlers(bulkhead: &Bulkhead, late: usize) -> (ProblemKind, String) {
    let (kind, then) = if late < MOST_LATE {
        (ProblemKind::SomeSendersStuck, "the group goes on")
    } else {
        (
            ProblemKind::SendersStuck,
            "the group starts no more. Restart the relay",
        )
    };
    let what = format!(
        "{late} handlers of {:?} have been running for longer than their limit of {}: their messages wait for them, and {then}",
        bulkhead.name,
        humantime::format_duration(bulkhead.send_timeout)
    );
    (kind, what)
}

fn stuck_sending(bulkhead: &Bulkhead, count: usize, of: usize, longest: Duration) -> String {
    format!(
        "{count} of {of} threads that send to {:?} have been at it for up to {}, and the limit is {}: a dispatcher or an observer that does not return. Restart the relay",
        bulkhead.name,
        seconds(longest),
        humantime::format_duration(bulkhead.send_timeout)
    )
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs())
}

/// How each destination stands.
pub(crate) fn destinations(shared: &Shared) -> Vec<DestinationState> {
    let state = |bulkhead: &Bulkhead| DestinationState {
        name: bulkhead.name.to_string(),
        threads: bulkhead.concurrency,
        busy: shared.progress.busy(bulkhead.number),
        queued: shared.progress.queued(bulkhead.number),
        in_flight: bulkhead.in_flight.load(Ordering::Relaxed),
        state: bulkhead.gate.standing().as_str(),
    };
    // The last one has no threads where there is no such dispatcher.
    let sends = |bulkhead: &&Bulkhead| bulkhead.concurrency > 0;
    shared.bulkheads.iter().filter(sends).map(state).collect()
}

/// Sets the gauges of what is in memory.
pub(crate) fn record(shared: &Shared) {
    let (metrics, progress) = (&shared.metrics, &shared.progress);
    for (bulkhead, metrics) in shared.bulkheads.iter().zip(&metrics.destinations) {
        let standing = bulkhead.gate.standing();
        metrics
            .in_flight
            .set(number(bulkhead.in_flight.load(Ordering::Relaxed)));
        metrics.queued.set(number(progress.queued(bulkhead.number)));
        metrics.threads.set(number(bulkhead.concurrency));
        metrics
            .threads_busy
            .set(number(progress.busy(bulkhead.number)));
        metrics
            .breaker_open
            .set(flag(standing == Standing::BreakerOpen));
        metrics.paused.set(flag(standing == Standing::Paused));
    }
    metrics.set_paused(&shared.policy().paused);
    let connected = progress.needed().chain([&*progress.listener]);
    let connections = connected.filter(|post| post.is_connected()).count();
    metrics.connections.set(number(connections));
    metrics
        .lease_seconds_left
        .set(shared.lease.left().as_secs_f64());
    metrics
        .listener_connected
        .set(flag(progress.listener.is_connected()));
    let health = health(shared);
    metrics.live.set(flag(health.is_live()));
    metrics.ready.set(flag(health.is_ready()));
    for (kind, gauge) in ProblemKind::ALL.iter().zip(&metrics.problems) {
        let has = health
            .problems()
            .iter()
            .any(|problem| problem.kind == *kind);
        gauge.set(flag(has));
    }
}

/// The relay is gone: what it had, it has not any more.
pub(crate) fn record_end(shared: &Shared) {
    let metrics = &shared.metrics;
    let of_destinations = metrics.destinations.iter().flat_map(|one| {
        [
            &one.in_flight,
            &one.queued,
            &one.threads,
            &one.threads_busy,
            &one.breaker_open,
            &one.paused,
        ]
    });
    let own = [
        &metrics.connections,
        &metrics.lease_seconds_left,
        &metrics.listener_connected,
        &metrics.live,
        &metrics.ready,
    ];
    let all = of_destinations.chain(own).chain(&metrics.problems);
    all.for_each(|gauge| gauge.set(0));
    metrics.set_paused(&[]);
}

#[allow(
    clippy::cast_precision_loss,
    reason = "counts in memory are far below 2^52"
)]
fn number(count: usize) -> f64 {
    count as f64
}

fn flag(is_so: bool) -> f64 {
    f64::from(u8::from(is_so))
}

#[cfg(test)]
pub(super) mod tests;
