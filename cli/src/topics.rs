//! `diesel-outbox topics`

use std::time::Duration;

use anyhow::{Result, bail};
use diesel::PgConnection;
use diesel_outbox::ConfigError;
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, Act, Freed, KnownTopic, TopicChange, TopicError};

use crate::confirm::ask;
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
    /// List what is recorded of topics: served by a route or handler of any relay, declared, or without a subscriber
    List {
        /// Print the topics as JSON
        #[arg(long)]
        json: bool,
    },
    /// Declare topics of the application: from then on, messages of other topics that nobody wants wait
    Declare {
        /// Topic, or pattern as in routes: order.*
        pattern: String,
        #[command(flatten)]
        how: How,
    },
    /// Forget topics that no relay will serve again, or that the application no longer declares
    Forget {
        /// Pattern as `topics list` shows it
        pattern: String,
        /// Forget only this kind
        #[arg(long, value_parser = ["route", "handler", "declared", "no_subscriber"])]
        kind: Option<String>,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        how: How,
    },
}

#[derive(Debug, clap::Args)]
struct How {
    /// Also if messages wait that nothing keeps after that: some may end unsent
    #[arg(long)]
    with_waiting: bool,
    #[command(flatten)]
    signed: Signed,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let mut conn = connect(&config, "topics", Duration::from_secs(30))?;
    match &options.action {
        Action::List { json } => {
            let topics = program::known_topics(&mut conn, &config.table)?;
            if *json {
                return output::json(&topics);
            }
            output::line(shown(&topics))
        }
        Action::Declare { pattern, how } => {
            if let Some(wrong) = program::wrong_pattern(pattern) {
                return Err(ConfigError::new("topics declare", wrong).into());
            }
            let change = TopicChange::Declare(pattern);
            let act = Act::DeclareTopics;
            let is_new = carry_out(&mut conn, &config, (change, act, pattern), how)?;
            output::line(match is_new {
                true => format!(
                    "declared: messages of topics that are not declared wait if nobody wants them, and those of {pattern} end as no_subscriber"
                ),
                false => format!("{pattern} was declared before"),
            })
        }
        Action::Forget {
            pattern,
            kind,
            yes,
            how,
        } => {
            let change = TopicChange::Forget(pattern, kind.as_deref());
            let freed = program::freed_by(&mut conn, &config.table, change)?;
            if freed.messages == 0 || how.with_waiting {
                let becomes = match freed.messages {
                    0 => "No waiting message depends on it.".to_owned(),
                    _ => becomes(&freed),
                };
                if !yes {
                    ask("topics forget", &format!("forget {pattern}"), &becomes)?;
                }
            }
            let act = Act::ForgetTopics;
            if !carry_out(&mut conn, &config, (change, act, pattern), how)? {
                bail!(
                    "{pattern:?} is not recorded in the outbox \"{}\": see `topics list`",
                    config.table
                );
            }
            output::line(format!("forgotten: {pattern}"))
        }
    }
}

/// Changes the recorded topics, and says what keeps that from being done. `false`: there was nothing to change.
fn carry_out(
    conn: &mut PgConnection,
    config: &Config,
    (change, act, pattern): (TopicChange<'_>, Act, &str),
    how: &How,
) -> Result<bool> {
    let (table, note) = (&config.table, how.signed.note());
    let changed = program::audited(conn, table, &note, act, pattern, |conn| {
        let changed = program::change_topics(conn, table, change, how.with_waiting)?;
        Ok::<_, anyhow::Error>(changed > 0)
    });
    changed.map_err(|error| match error.downcast_ref::<TopicError>() {
        Some(TopicError::Waiting(freed)) => anyhow::anyhow!(
            "nothing was changed: {} Add a route for these topics until the messages are gone; or give --with-waiting",
            becomes(freed)
        ),
        _ => error,
    })
}

/// `3 waiting messages of invoice.paid would go on as soon as a relay sends to endpoints: 2 end as no_subscriber, unsent; 1 goes to endpoints.`
fn becomes(freed: &Freed) -> String {
    let waiting = output::counted(
        u64::try_from(freed.messages).unwrap_or(0),
        "waiting message",
        "waiting messages",
    );
    let ends = |count: i64, one: &str, many: &str| match count {
        1 => format!("1 {one}"),
        count => format!("{count} {many}"),
    };
    let sent = freed.messages - freed.without_subscriber;
    let unsent = ends(
        freed.without_subscriber,
        "ends as no_subscriber",
        "end as no_subscriber",
    );
    let sent = ends(sent, "goes to endpoints", "go to endpoints");
    format!(
        "{waiting} of {} would go on as soon as a relay sends to endpoints: {unsent}, unsent; {sent}, if their filters match.",
        output::names(&freed.topics)
    )
}

fn shown(topics: &[KnownTopic]) -> String {
    if topics.is_empty() {
        return "no relay has served any topic yet, and none is declared".to_owned();
    }
    let mut table = output::table(&["pattern", "kind", "first", "last"]);
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
