//! The listener thread: rings the claimer when something was committed.

use std::time::{Duration, Instant};

use super::shared::Shared;
use super::threads::{Cause, MARGIN, Post};
use crate::error::DatabaseError;
use crate::store::relay::notifications::{Listener, Lock};

/// The limit of each of its statements.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);
/// One that stays in the database for longer is of no use.
const LONGEST_STAY: Duration = STATEMENT_TIMEOUT.saturating_add(MARGIN);
/// While an insert is under way that will not notify, the claimer looks after this long, then after
/// twice as long, and so on.
const FIRST_TRY: Duration = Duration::from_millis(2);
const LONGEST_TRY: Duration = Duration::from_millis(25);
/// How often, while an insert is under way, topics are looked for that had nothing.
const LOOK_WHILE_INSERTING: Duration = Duration::from_millis(100);
/// While another relay has the lock for all: it gives it back without a word when it finds work in
/// another way, or ends.
const TRY_AFTER_ANOTHER: Duration = Duration::from_secs(1);
/// Between tries to reach a database that is gone.
const RECONNECT: Duration = Duration::from_secs(1);

/// Listens until the relay stops. Everything it does is a hint: without it the relay polls.
pub(crate) fn run(shared: &Shared) {
    let Some(url) = shared.listener_url() else {
        log::warn!(event = "listener_without_url", poll_interval:? = shared.config.poll_interval; "the relay's connections come from a manager and cannot listen: polling for new messages every {:?}. Set RelayBuilder::listener_url (OUTBOX_LISTENER_URL) to a direct connection, or OUTBOX_LISTENER to false", shared.config.poll_interval);
        // This thread's end would be taken for a defect.
        let _ = shared.signals.stop.recv();
        return;
    };
    while !shared.is_stopping() {
        let connected = asking(shared, || {
            let is_direct = shared.config.listener_url.is_some();
            let name = &shared.config.table;
            Listener::connect(url, name, STATEMENT_TIMEOUT, is_direct)
        });
        let end = match connected {
            Ok(Some(listener)) => {
                if listener.is_pooled {
                    log::warn!(event = "listener_url_pooled"; "OUTBOX_LISTENER_URL seems to lead to a pooler: notifications arrive only if the pooler works in session mode");
                }
                listen(shared, listener)
            }
            Ok(None) => {
                log::warn!(event = "listener_pooled", poll_interval:? = shared.config.poll_interval; "the database is behind a pooler, which passes no notifications on: polling for new messages every {:?}. Set OUTBOX_LISTENER_URL to a direct connection, or OUTBOX_LISTENER to false", shared.config.poll_interval);
                // This thread's end would be taken for a defect.
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
                // What is committed from now on is not heard.
                shared.signals.news.ring();
                shared.pause(RECONNECT);
            }
        }
    }
}

fn listen(shared: &Shared, mut listener: Listener) -> Result<(), DatabaseError> {
    shared.threads.set_connected(Post::Listener, true);
    // Whatever was committed before was heard by nobody.
    shared.signals.news.ring();
    let sleep = &shared.signals.sleep;
    let mut has_lock = false;
    let mut next_try: Option<Duration> = None;
    let mut looked = Instant::now();
    while !shared.is_stopping() {
        listener.wait(sleep.descriptor(), next_try)?;
        sleep.drain();
        let is_news = listener.notifications() > 0;
        if is_news {
            sleep.interrupt();
            shared.metrics.notified.increment(1);
            shared.signals.doorbell.ring();
        }
        if has_lock && (is_news || sleep.is_awake()) {
            asking(shared, || listener.unlock())?;
            has_lock = false;
        }
        next_try = match (sleep.is_awake(), has_lock) {
            (true, _) => None,
            (false, true) => {
                fall_asleep(shared);
                None
            }
            (false, false) => match asking(shared, || listener.try_lock())? {
                Lock::Insert => {
                    // It may be committed by now, and others with it.
                    if looked.elapsed() >= LOOK_WHILE_INSERTING {
                        // Also where there was nothing before.
                        shared.signals.news.ring();
                        looked = Instant::now();
                    } else {
                        shared.signals.doorbell.ring();
                    }
                    let wait = next_try.map_or(FIRST_TRY, |wait| wait * 2);
                    Some(wait.min(LONGEST_TRY))
                }
                Lock::Another => {
                    fall_asleep(shared);
                    Some(TRY_AFTER_ANOTHER)
                }
                Lock::Taken => {
                    has_lock = true;
                    fall_asleep(shared);
                    // Also where it slept before: whoever had the lock may be gone for a while.
                    shared.signals.news.ring();
                    None
                }
            },
        };
    }
    Ok(())
}

/// Asks the database something.
fn asking<T>(shared: &Shared, ask: impl FnOnce() -> T) -> T {
    let _within = shared
        .threads
        .in_database(Post::Listener)
        .within(LONGEST_STAY);
    ask()
}

/// From now on whoever commits rings. The claimer looks once more: before, nobody did.
fn fall_asleep(shared: &Shared) {
    if shared.signals.sleep.begin() {
        shared.signals.news.ring();
    }
}
