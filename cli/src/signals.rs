//! Signals as one more channel: the first asks for an end, the second does not ask.

use anyhow::{Context, Result};
use crossbeam_channel::{Receiver, bounded};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The first SIGTERM or SIGINT comes out of the channel; the second ends the process at once.
pub(crate) fn channel() -> Result<Receiver<i32>> {
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot listen for signals")?;
    let (first, received) = bounded(1);
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let mut asked = false;
            for signal in signals.forever() {
                if asked {
                    log::warn!(event = "exit_now", signal = signal; "second signal: exiting now; what is not settled is taken over when the lease is over");
                    std::process::exit(1);
                }
                asked = true;
                // There is room for one, and whoever is asked may be gone.
                let _ = first.try_send(signal);
                log::info!(event = "signal", signal = signal; "signal received: shutting down; a second one exits at once");
            }
        })
        .context("cannot start a thread")?;
    Ok(received)
}
