//! `diesel-outbox run`

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use crossbeam_channel::{Receiver, bounded, select};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, Admin};
use diesel_outbox::{Relay, RelayHandle};
use secrecy::ExposeSecret;

use crate::admin::Bound;
use crate::settings::SettingFlags;
use crate::threads::spawn;
use crate::{descriptors, logging, signals};

/// How often the relay is checked for a thread that ended unexpectedly.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

pub(crate) fn run(settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    logging::start(&config)?;
    descriptors::raise_limit();
    let (signals, reload) = signals::with_reload()?;
    let mut shutdown_timeout = config.shutdown_timeout;
    if !config.enabled {
        log::warn!(event = "relay_disabled"; "OUTBOX_ENABLED is false: this relay claims and sends nothing");
    }
    let page = Bound::new(&config)?;
    let Some(relay) = start(&config, &signals)? else {
        return Ok(());
    };
    // The page stays available while the relay shuts down.
    let _page = page
        .map(|page| page.serve(Some(Arc::clone(&relay))))
        .transpose()?;
    let (reloaded, settings) = (Arc::clone(&relay), settings.clone());
    let reloads = signals::at_each(reload, move || {
        reload_settings(&reloaded, &settings, &config)
    })?;
    // This thread does nothing else, so that nothing holds up a signal.
    loop {
        select! {
            recv(signals) -> _ => return Ok(relay.shutdown(shutdown_timeout)?),
            recv(reloads) -> settings => match settings {
                Ok(Some(settings)) => shutdown_timeout = settings.shutdown_timeout,
                Ok(None) => {}
                Err(_) => break,
            },
            default(CHECK_INTERVAL) => {
                if relay.has_failed() {
                    break;
                }
            }
        }
    }
    relay.shutdown(shutdown_timeout)?;
    bail!("a thread ended unexpectedly: the log says which")
}

/// Starts the relay. `None`: a signal has come meanwhile, and the relay has ended.
fn start(config: &Config, signals: &Receiver<i32>) -> Result<Option<Arc<RelayHandle>>> {
    let (done, started) = bounded(1);
    let relay = Relay::from_config(config.clone());
    spawn("start", move || {
        // Nobody reads the result while the process ends.
        let _ = done.send(relay.start());
    })?;
    select! {
        recv(started) -> relay => return Ok(Some(Arc::new(relay.context("a thread panicked")??))),
        recv(signals) -> _ => {}
    }
    let signalled = Instant::now();
    if let Ok(relay) = started.recv_timeout(config.shutdown_timeout) {
        relay?.shutdown(config.shutdown_timeout.saturating_sub(signalled.elapsed()))?;
    }
    Ok(None)
}

/// Reloads the settings, and returns the new settings. If they cannot be used, logs the error and keeps the old settings.
/// `first` are the settings of the process's start, which the page and the log keep.
fn reload_settings(relay: &RelayHandle, settings: &SettingFlags, first: &Config) -> Option<Config> {
    let reload = || -> Result<Config> {
        program::reload_begins(relay);
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
