//! `diesel-outbox run`

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use crossbeam_channel::RecvTimeoutError;
use diesel_outbox::Relay;

use crate::admin::Bound;
use crate::settings::SettingFlags;
use crate::{logging, signals};

/// How often the relay is asked whether a thread has ended by a defect.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

pub(crate) fn run(settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    logging::start(&config);
    let signals = signals::channel()?;
    let shutdown_timeout = config.shutdown_timeout;
    if !config.enabled {
        log::warn!(event = "relay_disabled"; "OUTBOX_ENABLED is false: nothing is claimed or sent");
    }
    let page = Bound::new(&config)?;
    let relay = Arc::new(Relay::from_config(config).start()?);
    // Also while the relay shuts down.
    let _page = page
        .map(|page| page.serve(Some(Arc::clone(&relay))))
        .transpose()?;
    loop {
        match signals.recv_timeout(CHECK_INTERVAL) {
            Ok(_) => return Ok(relay.shutdown(shutdown_timeout)?),
            Err(RecvTimeoutError::Timeout) if !relay.has_failed() => {}
            Err(_) => break,
        }
    }
    relay.shutdown(shutdown_timeout)?;
    bail!("a thread of the relay ended by itself; its log lines say which")
}
