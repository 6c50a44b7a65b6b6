//! `message expunge`

use anyhow::{Result, bail};
use diesel::PgConnection;
use diesel_outbox::admin;
use diesel_outbox::config::Config;
use serde_json::json;
use uuid::Uuid;

use crate::confirm::confirmed;
use crate::output;
use crate::signed::SignedWithWhy;

/// Options of `message expunge`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Payload, headers, responses and errors of the message are removed from the ledger and the history of \
    attempts. Waiting messages are cancelled, and dead letters are discarded. Which message was settled, when, where and \
    with which result remains. What receivers got, logs and backups stay as they are. Run the command as the owner of the \
    outbox."
)]
pub(crate) struct Expunge {
    /// Message id (the id of the event at the receiver)
    id: Uuid,
    #[command(flatten)]
    signed: SignedWithWhy,
    /// Skip the confirmation
    #[arg(long)]
    yes: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(conn: &mut PgConnection, config: &Config, options: &Expunge) -> Result<()> {
    let Expunge { id, json, .. } = *options;
    let question = format!(
        "remove the content of the message {id} from the outbox {}? This cannot be undone",
        config.table
    );
    let hint = "message expunge asks for confirmation: without a terminal, give --yes";
    if !options.yes && !confirmed(&question, hint)? {
        bail!("nothing was removed");
    }
    let done = admin::expunge(conn, &config.table, id, &options.signed.note())?;
    if json {
        output::json(&json!({
            "cancelled": done.cancelled,
            "discarded": done.discarded,
            "ledger_entries": done.ledger_entries,
            "attempts": done.attempts,
            "left": done.left,
        }))?;
    }
    if done.is_unknown() {
        bail!("{}", super::unknown(&id.to_string(), config));
    }
    if !json {
        output::line(format!(
            "cancelled {}, discarded {}, blanked {} and {}",
            output::counted(done.cancelled, "waiting message", "waiting messages"),
            output::dead_letters(done.discarded),
            output::counted(done.ledger_entries, "ledger entry", "ledger entries"),
            output::counted(done.attempts, "attempt", "attempts"),
        ))?;
    }
    if done.left > 0 {
        bail!(
            "in flight: {} of the message; run the same command again once they are settled",
            output::counted(done.left, "part", "parts")
        );
    }
    Ok(())
}
