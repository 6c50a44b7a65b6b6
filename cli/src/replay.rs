//! `diesel-outbox replay`

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Result, bail};
use diesel::PgConnection;
use diesel_outbox::admin::{self, Bulk, Bulked, ReplayIds, ReplayRun};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, Chosen, MessageKey};
use diesel_outbox::{ConfigError, Status};
use serde_json::json;

use crate::bulk::{self, Pace};
use crate::confirm::ask;
use crate::connection::connect;
use crate::settings::SettingFlags;
use crate::signed::Signed;
use crate::{output, values};

/// Options of `replay`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A message can be replayed if the ledger has its payload, that is, if OUTBOX_LEDGER_PAYLOAD was \
    true when the message was delivered. Headers and times are kept with the payload. Messages are replayed in \
    the order of their deliveries, and keep their ordering keys. A message that named a destination goes there again. \
    With --destination, only messages delivered there are replayed, and they go there again (\"\": only those that \
    named none). Other messages follow the current routes. Receivers see the same message id, and ignore \
    the message if they handle each id once: with --new-ids, they handle it again."
)]
pub(crate) struct Options {
    /// Only these messages: message ids, idempotency keys or sequences
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    #[command(flatten)]
    chosen: Chosen,
    /// Assign new message ids, so that receivers handle the messages again
    #[arg(long)]
    new_ids: bool,
    /// Name of the run; the same name continues a run. Idempotency keys become <key>#replay-NAME
    #[arg(long, value_name = "NAME")]
    run: Option<String>,
    #[command(flatten)]
    signed: Signed,
    #[command(flatten)]
    pace: Pace,
    /// Skip the confirmation
    #[arg(long)]
    yes: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    if options.ids.is_empty() && !options.chosen.has_begin() {
        let reason =
            "give --since, or the messages to replay; --since 9999d selects the whole ledger";
        return Err(ConfigError::new("replay", reason).into());
    }
    let selection = values::chosen(&options.chosen)?;
    let fixed_times = options.chosen.fixed_times(&selection);
    // The name is known before the first replay, so that an interrupted run can continue.
    let run = options.run.as_deref().map_or_else(
        || Ok(ReplayRun::now()),
        |run| {
            let why = format!("{run:?} is not a run name: give 1 to 22 letters, digits and -");
            run.parse().map_err(|_| ConfigError::new("--run", why))
        },
    )?;
    let mut conn = connect(&config, "replay", Duration::from_secs(600))?;
    let selection = selection.idempotency_keys(keys(&mut conn, &config, &options.ids)?);
    let ids = if options.new_ids {
        ReplayIds::New
    } else {
        ReplayIds::Same
    };
    let note = options.signed.note();
    let mut replay =
        |bulk: Bulk<'_>| admin::replay(&mut conn, &config.table, &selection, ids, &run, bulk);
    let found = replay(Bulk::new(&note).dry_run())?;
    if found.without_payload > 0 && !options.json {
        output::line(format!(
            "{} cannot be replayed: the ledger has no payload (OUTBOX_LEDGER_PAYLOAD)",
            output::counted(
                found.without_payload,
                "delivered message",
                "delivered messages"
            )
        ))?;
    }
    if options.pace.dry_run || found.changed == 0 {
        return end(options, &found, &Bulked::default(), None);
    }
    if !options.yes {
        let messages = output::messages(found.changed);
        let question = format!("replay {messages} of the outbox {}", config.table);
        let ids = match options.new_ids {
            true => "They get new message ids.",
            false => "They keep their message ids.",
        };
        ask("replay", &question, ids)?;
    }
    let how_to_continue = format!("to continue, repeat the command with --run {run}{fixed_times}");
    let (replayed, is_stopped) = bulk::perform(
        found.changed,
        &options.pace,
        &note,
        &how_to_continue,
        |bulk| Ok(replay(bulk)?),
    )?;
    end(options, &found, &replayed, Some(&run))?;
    if is_stopped {
        bail!("stopped by a signal; {how_to_continue}");
    }
    Ok(())
}

/// The idempotency keys of these messages.
fn keys(conn: &mut PgConnection, config: &Config, ids: &[String]) -> Result<Vec<String>> {
    let mut keys = Vec::new();
    for id in ids {
        let key = MessageKey::Text(id.clone());
        let found = program::message(conn, &config.table, &key)?.rows;
        let delivered = found
            .iter()
            .filter(|record| matches!(record.status, Status::Delivered | Status::NoSubscriber));
        let before = keys.len();
        // Skip earlier replays: they are copies of the same message.
        let first = delivered.filter(|record| record.replay_of().is_none());
        keys.extend(first.map(|record| record.idempotency_key.clone()));
        if keys.len() == before {
            bail!("no delivered message has the id, key or sequence {id:?}; nothing was replayed");
        }
    }
    keys.sort();
    keys.dedup();
    Ok(keys)
}

fn end(options: &Options, found: &Bulked, done: &Bulked, run: Option<&ReplayRun>) -> Result<()> {
    if options.json {
        return output::json(&json!({
            "run": run.map(ToString::to_string),
            "matched": found.changed + found.without_payload,
            "without_payload": found.without_payload,
            "replayed": done.changed,
            "skipped": done.skipped,
        }));
    }
    if options.pace.dry_run {
        return output::line(format!(
            "{} would be replayed",
            output::messages(found.changed)
        ));
    }
    // What a new run skips are earlier replays of the messages that it replays.
    let skipped = match done.skipped {
        0 => String::new(),
        _ if options.run.is_none() => String::new(),
        1 => "; 1 was already in this run".to_owned(),
        skipped => format!("; {skipped} were already in this run"),
    };
    if found.changed + found.without_payload == 0 {
        return output::line("replayed 0: no delivered message in the ledger matches");
    }
    let run = run.map_or(String::new(), |run| format!(" in the run {run}"));
    let end = if std::io::stdout().is_terminal() && done.changed > 0 {
        "; `diesel-outbox status --watch` shows the progress"
    } else {
        ""
    };
    output::line(format!("replayed {}{run}{skipped}{end}", done.changed))
}
