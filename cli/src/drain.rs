//! `diesel-outbox drain`

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use diesel_outbox::admin::{self, Pause, Unserved};
use diesel_outbox::program::{self, DueTopic, RefusedEndpoint};
use diesel_outbox::{DatabaseError, OutboxName, ProblemKind, Relay, RelayHandle, Stats};
use indicatif::{ProgressBar, ProgressStyle};
use secrecy::SecretString;
use serde_json::json;

use crate::connection::connect;
use crate::number::whole;
use crate::settings::SettingFlags;
use crate::threads::spawn;
use crate::{descriptors, logging, output, pauses, signals};

/// Options of `drain`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct Options {
    /// Deliver only topics that match this topic or pattern (order.*); repeatable
    #[arg(long = "topic", value_name = "TOPIC", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    topics: Vec<String>,
    /// Stop after this many messages
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true, value_parser = whole(0..=u64::MAX))]
    max_messages: Option<u64>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Hide the progress bar
    #[arg(long)]
    quiet: bool,
}

const EXIT_CODES: &str = "Exit codes: 0, no sendable message is due any more, or --max-messages is reached; \
1, sends failed and no message was delivered, or these settings refuse an endpoint of due messages, or another relay is active (OUTBOX_SINGLE_ACTIVE), or drain \
was interrupted or failed; 2, bad settings or usage. If at least one message was delivered, failed sends are not an error: \
\"failed\" counts them.";

/// The update interval of the progress bar.
const TICK: Duration = Duration::from_millis(100);

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    logging::start(&config)?;
    descriptors::raise_limit();
    if !config.enabled {
        return output::line("OUTBOX_ENABLED is false: nothing was sent");
    }
    let due = {
        let mut conn = connect(&config, "drain", Duration::from_secs(60))?;
        match options.topics.as_slice() {
            [] => program::count_due(&mut conn, &config.table)?,
            topics => count(&program::due(&mut conn, &config.table, topics)?),
        }
    };
    // Until here a signal ends the process.
    let signals = signals::channel()?;
    let bar = progress_bar(options, due);
    let shutdown_timeout = config.shutdown_timeout;
    let (database_url, table) = (config.database_url()?.clone(), config.table.clone());
    let mut builder = Relay::from_config(config).one_shot();
    if let Some(most) = options.max_messages {
        builder = builder.limit(most);
    }
    for topic in &options.topics {
        builder = builder.only_topic(topic);
    }
    let relay = Arc::new(builder.start()?);
    let began = Instant::now();
    let mut interrupted = false;
    let idle = when_idle(&relay)?;
    while idle.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        show(&bar, due, relay.stats());
        if signals.try_recv().is_ok() {
            interrupted = true;
            break;
        }
        if relay.stands_by() {
            relay.shutdown(shutdown_timeout)?;
            bar.finish_and_clear();
            bail!(
                "another relay of the outbox {table} is active and OUTBOX_SINGLE_ACTIVE is set: nothing was drained"
            );
        }
        if relay.has_failed() {
            relay.shutdown(shutdown_timeout)?;
            bail!("a relay thread ended unexpectedly: the log says which");
        }
    }
    let elapsed = began.elapsed();
    // Before the shutdown: while this relay is registered, the topics that it serves have a route.
    let left = Left::read(&database_url, &table, &options.topics);
    let undeclared = (relay.stats().waiting > 0).then(|| undeclared(&relay));
    relay.shutdown(shutdown_timeout)?;
    let stats = relay.stats();
    show(&bar, due, stats);
    bar.finish_and_clear();
    let left = left.unwrap_or_else(|error| {
        // The result is reported all the same.
        log::warn!(event = "left_unknown", error:% = error; "cannot count the messages that are left: {error}");
        Left::default()
    });
    report(
        options,
        stats,
        elapsed,
        &left,
        undeclared.flatten().as_deref(),
    )?;
    if interrupted {
        bail!("interrupted by a signal before all due messages were processed");
    }
    if let Some(refused) = left.of_refused() {
        bail!("{}", output::shown(&refused));
    }
    let failed = stats.dead + stats.retried;
    if failed > 0 && stats.delivered + stats.no_subscriber + stats.deduplicated == 0 {
        let sends = match failed {
            1 => "the send failed".to_owned(),
            failed => format!("all {failed} sends failed"),
        };
        bail!("no message was delivered: {sends}");
    }
    Ok(())
}

fn count(due: &[DueTopic]) -> u64 {
    due.iter().map(|topic| topic.count).sum()
}

/// A channel that reports when no message is due any more. One wait covers the whole drain: a poll of the relay may
/// take longer than a tick, and only answers waits that began before the poll.
fn when_idle(relay: &Arc<RelayHandle>) -> Result<Receiver<()>> {
    let (idle, is_idle) = bounded(1);
    let relay = Arc::clone(relay);
    spawn("idle", move || {
        if relay.wait_until_idle(Duration::MAX) {
            // After an interruption nobody receives.
            let _ = idle.send(());
        }
    })?;
    Ok(is_idle)
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

/// The due messages that a drain leaves, and the pauses.
#[derive(Default)]
struct Left {
    /// Due messages without a route, paused, behind another message of their key, or beyond `--max-messages`.
    due: Vec<DueTopic>,
    pauses: Vec<Pause>,
    /// The endpoints that the settings of a running relay refuse, and that no other relay serves.
    refused: Vec<RefusedEndpoint>,
}

impl Left {
    fn read(
        database_url: &SecretString,
        table: &OutboxName,
        topics: &[String],
    ) -> Result<Self, DatabaseError> {
        let mut conn = program::connect(database_url, "drain", Duration::from_secs(15))?;
        Ok(Self {
            due: program::due(&mut conn, table, topics)?,
            pauses: admin::pauses(&mut conn, table)?,
            refused: program::refused_destinations(&mut conn, table)?
                .into_iter()
                .filter(|one| !one.is_served)
                .collect(),
        })
    }

    /// The refused endpoint of these due messages.
    fn refusal(&self, due: &DueTopic) -> Option<&RefusedEndpoint> {
        self.refused.iter().find(|one| one.name == due.destination)
    }

    /// A sentence about the due messages of refused endpoints, if there are any.
    fn of_refused(&self) -> Option<String> {
        let refused = self.due.iter().filter(|due| self.refusal(due).is_some());
        let refused: Vec<&DueTopic> = refused.collect();
        let RefusedEndpoint { name, why, .. } = self.refusal(refused.first()?)?;
        let count: u64 = refused.iter().map(|due| due.count).sum();
        let destinations: HashSet<&str> =
            refused.iter().map(|due| due.destination.as_str()).collect();
        let destinations = destinations.len();
        Some(format!(
            "{count} due messages for {destinations} endpoints were not sent, because these settings refuse them, for example {name} ({why}): the messages wait for a relay that serves them"
        ))
    }
}

/// What the relay says of messages whose topic is not declared, if there are any.
fn undeclared(relay: &RelayHandle) -> Option<String> {
    let health = relay.health();
    let mut problems = health.problems().iter();
    let found = problems.find(|problem| problem.kind == ProblemKind::UnknownTopic);
    found.map(|problem| problem.what.clone())
}

fn report(
    options: &Options,
    stats: Stats,
    elapsed: Duration,
    left: &Left,
    undeclared: Option<&str>,
) -> Result<()> {
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
            "no_subscriber": stats.no_subscriber,
            "deduplicated": stats.deduplicated,
            "failed": failed,
            "retrying": stats.retried,
            "waiting": stats.waiting,
            "dead": stats.dead,
            "cancelled": stats.cancelled,
            "seconds": seconds,
            "messages_per_second": rate,
            "left_due": count(&left.due),
            "left": left.due.iter().map(|due| json!({
                "topic": due.topic,
                "destination": due.destination,
                "due": due.count,
                "behind_their_key": due.behind,
                "no_route": due.unserved.is_some(),
                "unserved": due.unserved.as_ref().map(Unserved::to_string),
            })).collect::<Vec<_>>(),
            "refused": left.refused.iter().map(|one| json!({
                "destination": one.name,
                "why": one.why,
            })).collect::<Vec<_>>(),
            "pauses": left.pauses.iter().map(pauses::as_json).collect::<Vec<_>>(),
        }));
    }
    output::line(format!(
        "processed {processed}, failed {failed} ({} will be retried, {} dead), {} messages/s in {seconds:.1} s",
        stats.retried,
        stats.dead,
        output::grouped(rate),
    ))?;
    if let Some(what) = undeclared {
        output::line(output::shown(&format!("UNKNOWN_TOPIC: {what}")))?;
    }
    if left.due.is_empty() {
        return Ok(());
    }
    output::line(match count(&left.due) {
        1 => "1 due message is left".to_owned(),
        number => format!("{number} due messages are left"),
    })?;
    for due in left.due.iter().filter(|due| left.refusal(due).is_none()) {
        let why = match &due.unserved {
            None => continue,
            Some(why @ Unserved::UnknownTopic { .. }) => format!("UNKNOWN_TOPIC, {why}"),
            Some(_) => "NO_ROUTE, no relay serves them".to_owned(),
        };
        let to = match due.destination.as_str() {
            "" => String::new(),
            name => format!(" for the destination {name}"),
        };
        let line = format!("{} of {}{to}: {why}", due.count, due.topic);
        output::line(output::shown(&line))?;
    }
    let routed = left.due.iter().filter(|due| due.unserved.is_none());
    let behind: u64 = routed.clone().map(|due| due.behind).sum();
    if behind > 0 {
        output::line(format!(
            "{behind} behind another message of the same ordering key"
        ))?;
    }
    let first = routed.map(|due| due.count).sum::<u64>() - behind;
    if first > 0 {
        output::line(format!(
            "{first} held back by a pause, --max-messages or a signal"
        ))?;
    }
    for pause in &left.pauses {
        output::line(pauses::sentence(pause))?;
    }
    Ok(())
}
