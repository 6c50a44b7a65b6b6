//! `diesel-outbox run`

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use crossbeam_channel::select;
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, Admin};
use diesel_outbox::{Relay, RelayHandle};
use secrecy::ExposeSecret;

use crate::admin::Bound;
use crate::settings::SettingFlags;
use crate::{descriptors, logging, signals};

/// How often the relay is checked for a thread that ended unexpectedly.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

pub(crate) fn run(settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    logging::start(&config);
    descriptors::raise_limit();
    let (signals, reload) = signals::with_reload()?;
    let mut shutdown_timeout = config.shutdown_timeout;
    if !config.enabled {
        log::warn!(event = "relay_disabled"; "OUTBOX_ENABLED is false: this relay claims and sends nothing");
    }
    let page = Bound::new(&config)?;
    let relay = Arc::new(Relay::from_config(config.clone()).start()?);
    // The page stays available while the relay shuts down.
    let _page = page
        .map(|page| page.serve(Some(Arc::clone(&relay))))
        .transpose()?;
    loop {
        select! {
            recv(signals) -> _ => return Ok(relay.shutdown(shutdown_timeout)?),
            recv(reload) -> _ => {
                if let Some(config) = reload_settings(&relay, settings, &config) {
                    shutdown_timeout = config.shutdown_timeout;
                }
            },
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

/// Reloads the settings, and returns the new settings. If they cannot be used, logs the error and keeps the old settings.
/// `first` are the settings of the process's start, which the page and the log keep.
fn reload_settings(relay: &RelayHandle, settings: &SettingFlags, first: &Config) -> Option<Config> {
    let reload = || -> Result<Config> {
        let config = settings.load()?;
        let next = Relay::from_config(config.clone());
        relay.reload(next, config.shutdown_timeout)?;
        Ok(config)
    };
    match reload() {
        Ok(config) => {
            let kept = kept(first, &config);
            if !kept.is_empty() {
                log::warn!(event = "restart_needed", settings = kept.join(" "); "the reload does not apply the new values of {}: restart the process", kept.join(", "));
            }
            Some(config)
        }
        Err(error) => {
            program::reload_failed(relay, format_args!("{error:#}"));
            log::error!(event = "reload_failed", error:% = format!("{error:#}"); "the reload failed, and the relay continues with the old settings: {error:#}");
            None
        }
    }
}

/// The settings that differ, and that only a restart applies.
fn kept(first: &Config, now: &Config) -> Vec<&'static str> {
    let (page, new) = (program::admin(first), program::admin(now));
    let token = |page: &Admin| {
        let token = page.token.as_ref();
        token.map(|token| token.expose_secret().to_owned())
    };
    let settings = [
        ("OUTBOX_ADMIN_ADDR", page.addr != new.addr),
        ("OUTBOX_ADMIN_TOKEN", token(page) != token(new)),
        ("OUTBOX_ADMIN_HOSTS", page.hosts != new.hosts),
        ("OUTBOX_ADMIN_PAYLOADS", page.payloads != new.payloads),
        ("OUTBOX_ADMIN_READ_ONLY", page.read_only != new.read_only),
        (
            "OUTBOX_LOG_FORMAT",
            program::log_format(first) != program::log_format(now),
        ),
    ];
    let differ = settings.into_iter().filter(|(_, differs)| *differs);
    differ.map(|(name, _)| name).collect()
}
