//! `diesel-outbox topics`

use std::time::Duration;

use anyhow::{Result, bail};
use diesel_outbox::program::{self, Act, ServedTopic};

use crate::connection::connect;
use crate::output;
use crate::settings::SettingFlags;
use crate::signed::Signed;

/// Options of `topics`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// List the topics that a route or handler of any relay has ever served
    List {
        /// Print the topics as JSON
        #[arg(long)]
        json: bool,
    },
    /// Forget topics that no relay will serve again: messages then no longer wait for such a relay
    Forget {
        /// Pattern as `topics list` shows it
        pattern: String,
        /// Forget only this kind
        #[arg(long, value_parser = ["route", "handler"])]
        kind: Option<String>,
        #[command(flatten)]
        signed: Signed,
    },
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let mut conn = connect(&config, "topics", Duration::from_secs(30))?;
    match &options.action {
        Action::List { json } => {
            let topics = program::served_topics(&mut conn, &config.table)?;
            if *json {
                return output::json(&topics);
            }
            output::line(shown(&topics))
        }
        Action::Forget {
            pattern,
            kind,
            signed,
        } => {
            let kind = kind.as_deref();
            let (table, note, act) = (&config.table, signed.note(), Act::ForgetTopics);
            let has_forgotten = program::audited(&mut conn, table, &note, act, pattern, |conn| {
                let forgotten = program::forget_topic(conn, table, pattern, kind)?;
                anyhow::Ok(forgotten > 0)
            })?;
            if !has_forgotten {
                bail!(
                    "no relay has served {pattern:?} in the outbox \"{}\": see `topics list`",
                    config.table
                );
            }
            output::line(format!(
                "forgotten: messages of {pattern} that no registered destination wants end as no_subscriber, until a relay that serves them starts"
            ))
        }
    }
}

fn shown(topics: &[ServedTopic]) -> String {
    if topics.is_empty() {
        return "no relay has served any topic yet".to_owned();
    }
    let mut table = output::table(&["pattern", "kind", "first served", "last served"]);
    for one in topics {
        table.add_row([
            output::shown(&one.pattern),
            one.kind.clone(),
            one.first_served.clone(),
            one.last_served.clone(),
        ]);
    }
    table.to_string()
}
