//! `diesel-outbox forget`

use std::time::Duration;

use anyhow::{Result, bail};
use diesel_outbox::admin::{self, Forgotten};
use diesel_outbox::program::parse_duration;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use uuid::Uuid;

use crate::confirm::ask;
use crate::connection::connect;
use crate::settings::SettingFlags;
use crate::signed::Signed;
use crate::{output, signals};

/// Options of `forget`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Stop enqueueing for the tenant first. The command deletes the tenant's live messages, dead letters, \
    history of attempts and endpoints. The ledger keeps sequence, message id, topic, status, reason code, \
    HTTP status, attempts and times. It blanks idempotency keys: the same key enqueued again is a new message. \
    Messages without a tenant, logs, metrics and backups stay as they are. Run the command as the owner of the outbox."
)]
pub(crate) struct Options {
    /// Tenant to forget (a UUID)
    #[arg(long, value_name = "UUID")]
    tenant: Uuid,
    /// How long to wait for messages in flight
    #[arg(long, value_name = "DURATION", default_value = "1m")]
    wait: String,
    #[command(flatten)]
    signed: Signed,
    /// Skip the confirmation
    #[arg(long)]
    yes: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let patience = parse_duration("--wait", &options.wait)?;
    let mut conn = connect(&config, "forget", Duration::from_secs(600))?;
    if !options.yes {
        let (tenant, table) = (options.tenant, &config.table);
        let question = format!("forget the tenant {tenant} in the outbox {table}");
        ask("forget", &question, "It cannot be undone.")?;
    }
    let signals = signals::channel()?;
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}")?);
    let mut is_stopped = false;
    let progress = |so_far: &Forgotten| {
        bar.set_message(sentence(so_far));
        bar.tick();
        is_stopped = !signals.is_empty();
        !is_stopped
    };
    let done = admin::forget(
        &mut conn,
        &config.table,
        options.tenant,
        patience,
        &options.signed.note(),
        progress,
    );
    bar.finish_and_clear();
    let done = done?;
    if options.json {
        output::json(&json!({
            "messages": done.messages,
            "dead_letters": done.dead_letters,
            "attempts": done.attempts,
            "ledger_entries": done.ledger_entries,
            "feed_events": done.feed_events,
            "endpoints": done.endpoints,
            "left": done.left,
        }))?;
    } else {
        output::line(sentence(&done))?;
    }
    if is_stopped {
        bail!("stopped by a signal: run the same command again to continue");
    }
    if done.left > 0 {
        bail!(
            "still in flight: {} of the tenant, so they and the endpoints remain: run the same command again",
            output::messages(done.left)
        );
    }
    Ok(())
}

fn sentence(done: &Forgotten) -> String {
    format!(
        "removed {}, {}, {}, {}; blanked {} and {}",
        output::messages(done.messages),
        output::dead_letters(done.dead_letters),
        output::counted(done.attempts, "attempt", "attempts"),
        output::counted(done.endpoints, "endpoint", "endpoints"),
        output::counted(done.ledger_entries, "ledger entry", "ledger entries"),
        output::counted(done.feed_events, "event of feeds", "events of feeds"),
    )
}
