//! `diesel-outbox resume`

use std::time::Duration;

use anyhow::{Result, bail};
use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::program::{self, Act};
use diesel_outbox_pages::pause::find;
use serde_json::json;

use crate::connection::connect;
use crate::settings::SettingFlags;
use crate::signed::Signed;
use crate::{output, pauses};

/// The actions of `resume`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Resume a destination, whatever paused it
    Destination {
        /// Name of the destination, as in `pause list`
        name: String,
        #[command(flatten)]
        signed: Signed,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Resume a topic
    Topic {
        /// Topic, as in `pause list`
        topic: String,
        #[command(flatten)]
        signed: Signed,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
}

pub(crate) fn run(action: &Action, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let (kind, name, signed, json) = match action {
        Action::Destination { name, signed, json } => (Pausable::Destination, name, signed, *json),
        Action::Topic {
            topic,
            signed,
            json,
        } => (Pausable::Topic, topic, signed, *json),
    };
    let mut conn = connect(&config, "resume", Duration::from_secs(30))?;
    let pauses = admin::pauses(&mut conn, &config.table)?;
    let pause = find(&pauses, kind, name);
    // Also deletes an expired pause, which would have to be deleted later anyway.
    let (table, note) = (&config.table, signed.note());
    program::audited(&mut conn, table, &note, Act::Resume, name, |conn| {
        admin::resume(conn, table, kind, name)
    })?;
    let Some(pause) = pause else {
        bail!(
            "{} {name:?} is not paused: `diesel-outbox pause list` shows all pauses",
            kind.as_str()
        );
    };
    if json {
        return output::json(&json!({ "resumed": pauses::as_json(pause) }));
    }
    let name = output::shown(name);
    output::line(format!("{} {name} is resumed", kind.as_str()))
}
