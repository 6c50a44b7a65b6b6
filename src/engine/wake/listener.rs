//! The listener thread: rings the claimer when messages are committed.

use std::time::{Duration, Instant};

use super::sql::notifications::{Listener, Lock};
use crate::engine::host::shared::Shared;
use crate::engine::host::sql::logins::Logins;
use crate::engine::host::threads::{Cause, MARGIN, Post};
use crate::error::DatabaseError;
use crate::log;

/// The time limit of each statement of the listener, and how long it waits for the answer.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// A listener that stays in the database longer than this is stuck.
const LONGEST_STAY: Duration = STATEMENT_TIMEOUT.saturating_add(MARGIN);
/// While an open insert will not notify, the claimer checks after this time, then after twice this time, and so on.
const FIRST_TRY: Duration = Duration::from_millis(2);
const LONGEST_TRY: Duration = Duration::from_millis(25);
/// How often, during an open insert, the claimer also queries for topics that had no messages.
const LOOK_WHILE_INSERTING: Duration = Duration::from_millis(100);
/// The wait between attempts while another relay holds the lock, or is awake. That relay releases the lock without notice
/// when it finds work or ends.
const TRY_AFTER_ANOTHER: Duration = Duration::from_secs(1);
/// Others that serve the same sleep quietly only beside a relay that has had work for this time, and not for one message.
const STEADY: Duration = Duration::from_millis(100);
/// How often a listener that hears nothing asks whether the server still answers.
const PROVE: Duration = Duration::from_secs(10);
/// The wait between attempts to reach a lost database.
const RECONNECT: Duration = Duration::from_secs(1);

/// Listens until the relay stops. Notifications are only hints: without the listener, the relay polls.
///
/// `serves`: what the relay serves, the same text for relays that serve the same.
pub(crate) fn run(shared: &Shared, serves: &str) {
    let Some(url) = shared.listener_url() else {
        log::warn!(event = "listener_without_url", poll_interval:? = shared.settings.poll_interval; "the relay's connections come from a manager and cannot listen: polling for new messages every {:?}; set RelayBuilder::listener_url (OUTBOX_LISTENER_URL) to a direct connection, or OUTBOX_LISTENER to false", shared.settings.poll_interval);
        // The thread must not end: an ended thread counts as a bug.
        let _ = shared.signals.stop.recv();
        return;
    };
    let is_direct = shared.settings.listener_url.is_some();
    let own = Logins::default();
    let logins = match is_direct {
        true => &own,
        false => &shared.threads.logins,
    };
    while !shared.is_stopping() {
        let Ok(attempt) = logins.begin(Instant::now()) else {
            shared.pause(logins.wait(Instant::now()).unwrap_or_default());
            continue;
        };
        let connected = asking(shared, || {
            let name = &shared.settings.table;
            Listener::connect(url, name, STATEMENT_TIMEOUT, is_direct, serves)
        });
        attempt.end(&connected, Instant::now());
        let end = match connected {
            Ok(Some(listener)) => {
                if listener.is_pooled {
                    log::warn!(event = "listener_url_pooled"; "OUTBOX_LISTENER_URL seems to lead to a pooler: listening, but notifications arrive only if the pooler works in session mode");
                }
                listen(shared, listener)
            }
            Ok(None) => {
                log::warn!(event = "listener_pooled", poll_interval:? = shared.settings.poll_interval; "the database is behind a pooler, which does not pass notifications on: polling for new messages every {:?}; set OUTBOX_LISTENER_URL to a direct connection, or OUTBOX_LISTENER to false", shared.settings.poll_interval);
                // The thread must not end: an ended thread counts as a bug.
                let _ = shared.signals.stop.recv();
                return;
            }
            Err(error) => Err(error),
        };
        shared.signals.sleep.interrupt();
        match end {
            Ok(()) => return shared.threads.set_connected(Post::Listener, false),
            Err(error) => {
                shared.threads.failed(Post::Listener, &error, Cause::Other);
                // Messages committed while the listener is disconnected cause no notification.
                shared.signals.news.ring();
                let wait = logins.wait(Instant::now()).unwrap_or_default();
                shared.pause(wait.max(RECONNECT));
            }
        }
    }
}

fn listen(shared: &Shared, mut listener: Listener) -> Result<(), DatabaseError> {
    shared.threads.set_connected(Post::Listener, true);
    shared.set_listener(listener.backend);
    // Messages committed before the connection caused no notification here.
    shared.signals.news.ring();
    let sleep = &shared.signals.sleep;
    let mut next_try = Some(Duration::ZERO);
    let mut at_work: Option<Instant> = None;
    let mut looked = Instant::now();
    let mut answered = Instant::now();
    while !shared.is_stopping() {
        let left = PROVE.saturating_sub(answered.elapsed());
        let time = next_try.map_or(left, |time| time.min(left));
        listener.wait(sleep.descriptor(), time)?;
        sleep.drain();
        if answered.elapsed() >= PROVE {
            // Before the notifications are read: they may come with the answer.
            asking(shared, || listener.prove())?;
            answered = Instant::now();
        }
        let is_news = listener.has_news();
        if is_news {
            sleep.interrupt();
            shared.metrics.notified.increment(1);
            shared.signals.doorbell.ring();
        }
        at_work = match sleep.is_at_work() {
            true => at_work.or_else(|| Some(Instant::now())),
            false => None,
        };
        if is_news || sleep.is_awake() {
            let is_steady = at_work.is_some_and(|since| since.elapsed() >= STEADY);
            let stays = is_steady && shared.is_listener_named();
            asking(shared, || listener.wake(stays))?;
        }
        next_try = match (sleep.is_awake(), listener.has_lock) {
            (true, _) => at_work.filter(|_| !listener.is_awake).map(|_| STEADY),
            (false, true) => {
                fall_asleep(shared);
                None
            }
            // The heartbeat tells when the lease names this session.
            (false, false) if !shared.is_listener_named() => None,
            (false, false) => try_to_sleep(shared, &mut listener, next_try, &mut looked)?,
        };
    }
    Ok(())
}

/// Tries to take the lock that makes inserts notify. Returns when to try again. `waited`: for how long it has waited for this
/// try. `looked`: when the claimer was last told of an open insert to query all topics.
fn try_to_sleep(
    shared: &Shared,
    listener: &mut Listener,
    waited: Option<Duration>,
    looked: &mut Instant,
) -> Result<Option<Duration>, DatabaseError> {
    let signals = &shared.signals;
    let lock = asking(shared, || listener.try_lock())?;
    if lock == Lock::Insert {
        // The insert, and others with it, may be committed by now.
        if looked.elapsed() >= LOOK_WHILE_INSERTING {
            // Also query topics that had no messages before.
            signals.news.ring();
            *looked = Instant::now();
        } else {
            signals.doorbell.ring();
        }
        let wait = waited.map_or(FIRST_TRY, |wait| wait * 2);
        return Ok(Some(wait.clamp(FIRST_TRY, LONGEST_TRY)));
    }
    fall_asleep(shared);
    // Awake: inserts do not notify. The other relay finds their messages, unless it has just ended. Taken: also if the claimer
    // was already asleep, because the relay that held the lock may have released it some time ago.
    if lock == Lock::Taken || lock == Lock::Awake && waited.is_some() {
        signals.news.ring();
    }
    Ok((lock != Lock::Taken).then_some(TRY_AFTER_ANOTHER))
}

/// Runs a call to the database as a stay of the listener.
fn asking<T>(shared: &Shared, ask: impl FnOnce() -> T) -> T {
    let _within = shared
        .threads
        .in_database(Post::Listener)
        .within(LONGEST_STAY);
    ask()
}

/// From now on, commits notify. The claimer must check once more for messages that were committed before.
fn fall_asleep(shared: &Shared) {
    if shared.signals.sleep.begin() {
        shared.signals.news.ring();
    }
}
