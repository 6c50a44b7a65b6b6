//! `diesel-outbox run`

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use crossbeam_channel::select;
use diesel_outbox::{Relay, RelayHandle};

use crate::admin::Bound;
use crate::settings::SettingFlags;
use crate::{logging, signals};

/// How often the relay is checked for a thread that ended unexpectedly.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

pub(crate) fn run(settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    logging::start(&config);
    let (signals, reload) = signals::with_reload()?;
    let shutdown_timeout = config.shutdown_timeout;
    if !config.enabled {
        log::warn!(event = "relay_disabled"; "OUTBOX_ENABLED is false: this relay claims and sends nothing");
    }
    let page = Bound::new(&config)?;
    let relay = Arc::new(Relay::from_config(config).start()?);
    // The page stays available while the relay shuts down.
    let _page = page
        .map(|page| page.serve(Some(Arc::clone(&relay))))
        .transpose()?;
    loop {
        select! {
            recv(signals) -> _ => return Ok(relay.shutdown(shutdown_timeout)?),
            recv(reload) -> _ => read_anew(&relay, settings),
            default(CHECK_INTERVAL) => {
                if relay.has_failed() {
                    break;
                }
            }
        }
    }
    relay.shutdown(shutdown_timeout)?;
    bail!("a relay thread ended unexpectedly: the log says which")
}

/// Reloads the settings. If they cannot be used, logs the error and keeps the old settings.
fn read_anew(relay: &RelayHandle, settings: &SettingFlags) {
    let reload = || -> Result<()> {
        let config = settings.load()?;
        let deadline = config.shutdown_timeout;
        Ok(relay.reload(Relay::from_config(config), deadline)?)
    };
    if let Err(error) = reload() {
        log::error!(event = "reload_failed", error:% = format!("{error:#}"); "the reload failed, and the relay continues with the old settings: {error:#}");
    }
}
