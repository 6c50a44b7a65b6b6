//! Signals as a channel: the first requests a shutdown, the second exits at once.

use anyhow::{Context, Result};
use crossbeam_channel::{Receiver, bounded, select};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::logging;
use crate::threads::spawn;

/// Returns [`channel`], and a second channel that receives SIGHUP: a request to reload the settings.
pub(crate) fn with_reload() -> Result<(Receiver<i32>, Receiver<()>)> {
    let mut signals = Signals::new([SIGHUP]).context("cannot listen for signals")?;
    let (ask, asked) = bounded(1);
    spawn("reload", move || {
        for _ in signals.forever() {
            // Full: a reload is already requested.
            let _ = ask.try_send(());
        }
    })?;
    Ok((channel()?, asked))
}

/// Does this work at each request, on a thread of its own, and returns the channel of the results. Signals do not wait for
/// the work, which may read a file that never ends.
pub(crate) fn at_each<T: Send + 'static>(
    asked: Receiver<()>,
    mut work: impl FnMut() -> T + Send + 'static,
) -> Result<Receiver<T>> {
    let (done, results) = bounded(1);
    spawn("reload-settings", move || {
        for () in asked {
            // Nobody reads the result while the process ends.
            let _ = done.send(work());
        }
    })?;
    Ok(results)
}

/// Runs work that reads only, until it ends or a signal arrives. A signal is a success, and does not wait for the work,
/// which may hang in the database.
///
/// # Errors
///
/// Those of the work, or a thread cannot be started.
pub(crate) fn or_until_signal(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let signals = channel()?;
    let (end, ended) = bounded(1);
    spawn("work", move || {
        // After a signal nobody receives.
        let _ = end.send(work());
    })?;
    select! {
        recv(signals) -> _ => Ok(()),
        recv(ended) -> result => result.context("the command panicked")?,
    }
}

/// A channel that receives the first SIGTERM or SIGINT. The second exits the process at once.
///
/// # Errors
///
/// A signal handler or a thread cannot be installed.
pub fn channel() -> Result<Receiver<i32>> {
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot listen for signals")?;
    let (first, received) = bounded(1);
    spawn("signals", move || {
        let mut asked = false;
        for signal in signals.forever() {
            if asked {
                log::warn!(event = "exit_now", signal = signal; "second signal: exiting now; unsettled messages are taken over when the lease expires");
                logging::flush();
                std::process::exit(1);
            }
            asked = true;
            // The channel holds one signal. The receiver may be gone.
            let _ = first.try_send(signal);
            log::info!(event = "signal", signal = signal; "signal received: shutting down; a second signal exits at once");
        }
    })?;
    Ok(received)
}
