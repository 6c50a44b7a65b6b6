//! `diesel-outbox drain`

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use diesel_outbox::admin;
use diesel_outbox::{Relay, Stats};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::settings::SettingFlags;
use crate::{logging, output, signals};

/// Options of `drain`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Stop after this many messages
    #[arg(long, value_name = "NUMBER")]
    max_messages: Option<u64>,
    /// Show the result as JSON
    #[arg(long)]
    json: bool,
    /// Show no progress bar
    #[arg(long)]
    quiet: bool,
}

/// How often the progress bar moves.
const TICK: Duration = Duration::from_millis(100);

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    logging::start(&config);
    if !config.enabled {
        return output::line("OUTBOX_ENABLED is false: nothing was relayed");
    }
    let signals = signals::channel()?;
    let due = {
        let mut conn = admin::connect(config.database_url()?, "drain", Duration::from_secs(60))?;
        admin::check_schema(&mut conn, &config.table)?;
        admin::count_due(&mut conn, &config.table)?
    };
    let bar = progress_bar(options, due);
    let shutdown_timeout = config.shutdown_timeout;
    let mut builder = Relay::from_config(config);
    if let Some(most) = options.max_messages {
        builder = builder.limit(most);
    }
    let relay = builder.start()?;
    let began = Instant::now();
    let mut interrupted = false;
    while !relay.wait_until_idle(TICK) {
        show(&bar, due, relay.stats());
        if signals.try_recv().is_ok() {
            interrupted = true;
            break;
        }
        if relay.has_failed() {
            relay.shutdown(shutdown_timeout)?;
            bail!("a thread of the relay ended by itself; its log lines say which");
        }
    }
    let elapsed = began.elapsed();
    relay.shutdown(shutdown_timeout)?;
    let stats = relay.stats();
    show(&bar, due, stats);
    bar.finish_and_clear();
    report(options, stats, elapsed)?;
    if interrupted {
        bail!("interrupted by a signal before everything due was processed");
    }
    Ok(())
}

fn progress_bar(options: &Options, due: u64) -> ProgressBar {
    if options.quiet {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {per_sec} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(options.max_messages.map_or(due, |most| most.min(due))).with_style(style)
}

fn show(bar: &ProgressBar, due: u64, stats: Stats) {
    let done = stats.processed() + stats.retried;
    bar.set_length(bar.length().unwrap_or(due).max(done));
    bar.set_position(done);
}

fn report(options: &Options, stats: Stats, elapsed: Duration) -> Result<()> {
    let seconds = elapsed.as_secs_f64();
    let processed = stats.processed() + stats.retried;
    let failed = stats.dead + stats.retried;
    let rate = if seconds > 0.0 {
        processed as f64 / seconds
    } else {
        0.0
    };
    if options.json {
        return output::json(&json!({
            "processed": processed,
            "delivered": stats.delivered,
            "deduplicated": stats.deduplicated,
            "failed": failed,
            "retrying": stats.retried,
            "dead": stats.dead,
            "seconds": seconds,
            "messages_per_second": rate,
        }));
    }
    output::line(format!(
        "processed {processed}, failed {failed} ({} will be retried, {} dead), {} messages/s in {seconds:.1} s",
        stats.retried,
        stats.dead,
        output::grouped(rate),
    ))
}
