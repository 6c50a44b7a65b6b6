//! `diesel-outbox pause`

use std::time::Duration;

use anyhow::{Result, bail};
use diesel::PgConnection;
use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::config::parse_duration;
use diesel_outbox::{Config, ConfigError};
use serde_json::Value;

use crate::settings::SettingFlags;
use crate::{output, pauses};

/// Options of `pause`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Send nothing to a destination; relays learn of it within a second
    Destination {
        /// Its name; `default` is the one of OUTBOX_URL
        name: String,
        /// Pause it even if these settings have no such destination
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        how: How,
    },
    /// Claim no messages of a topic; what relays have claimed is still sent
    Topic {
        /// The topic as it stands in messages, not a pattern
        topic: String,
        #[command(flatten)]
        how: How,
    },
    /// Show what is paused, why and for how long
    List {
        /// Show it as JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, clap::Args)]
struct How {
    /// For how long, for example 10m; without it until it is resumed
    #[arg(long = "for", value_name = "DURATION")]
    duration: Option<String>,
    /// Why, for whoever finds it paused
    #[arg(long, value_name = "TEXT", default_value = OPERATOR)]
    reason: String,
    /// Show the pause as JSON
    #[arg(long)]
    json: bool,
}

/// The reason where the operator gives none.
const OPERATOR: &str = "OPERATOR";
/// The reason that makes a pause the circuit breaker's.
const BREAKER_OPEN: &str = "BREAKER_OPEN";
const LONGEST_REASON: usize = 200;

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    match &options.action {
        Action::Destination { name, force, how } => {
            if !force {
                check_name(&config, name)?;
            }
            let duration = how.duration()?;
            let mut conn = connect(&config, "pause")?;
            if config.all_destinations().is_empty() {
                warn_of_unknown(&mut conn, &config, Pausable::Destination, name)?;
            }
            pause(
                &mut conn,
                &config,
                Pausable::Destination,
                name,
                how,
                duration,
            )
        }
        Action::Topic { topic, how } => {
            let duration = how.duration()?;
            let mut conn = connect(&config, "pause")?;
            check_topic(&mut conn, &config, topic)?;
            warn_of_unknown(&mut conn, &config, Pausable::Topic, topic)?;
            pause(&mut conn, &config, Pausable::Topic, topic, how, duration)
        }
        Action::List { json } => list(&mut connect(&config, "pause")?, &config, *json),
    }
}

/// A connection to an outbox that is there.
pub(crate) fn connect(config: &Config, purpose: &str) -> Result<PgConnection> {
    let mut conn = admin::connect(config.database_url()?, purpose, Duration::from_secs(30))?;
    admin::check_schema(&mut conn, &config.table)?;
    Ok(conn)
}

impl How {
    /// The duration, when all that was said is usable.
    fn duration(&self) -> Result<Option<Duration>, ConfigError> {
        let reason = self.reason.trim();
        if reason.is_empty() || reason.len() > LONGEST_REASON {
            let limits = format!("it has to have 1 to {LONGEST_REASON} bytes");
            return Err(ConfigError::new("--reason", limits));
        }
        if reason == BREAKER_OPEN {
            let taken = "relays would take it for a circuit breaker's: choose another";
            return Err(ConfigError::new("--reason", taken));
        }
        let Some(text) = &self.duration else {
            return Ok(None);
        };
        let duration = parse_duration("--for", text)?;
        if duration < Duration::from_millis(1) {
            return Err(ConfigError::new("--for", "it has to be 1ms or longer"));
        }
        Ok(Some(duration))
    }
}

/// A misspelt name would pause nothing, and nobody would notice. Without any destination in the
/// settings at hand, another process has them.
fn check_name(config: &Config, name: &str) -> Result<(), ConfigError> {
    let destinations = config.all_destinations();
    let known: Vec<&str> = destinations.iter().map(|d| d.name.as_str()).collect();
    if name.is_empty() {
        return Err(ConfigError::new("pause destination", "the name is empty"));
    }
    if known.is_empty() || known.contains(&name) {
        return Ok(());
    }
    Err(ConfigError::new(
        "pause destination",
        format!(
            "these settings have no destination {name:?}, only {}; --force pauses it all the same",
            known.join(", ")
        ),
    ))
}

/// A name that no waiting message has may be misspelt, or its messages are still to come.
fn warn_of_unknown(
    conn: &mut PgConnection,
    config: &Config,
    kind: Pausable,
    name: &str,
) -> Result<()> {
    let live = admin::topics(conn, &config.table)?;
    let is_named = live.iter().any(|one| match kind {
        Pausable::Topic => one.topic == name,
        _ => one.destination == name,
    });
    if !is_named {
        let kind = kind.as_str();
        eprintln!(
            "diesel-outbox: no waiting message names the {kind} {name:?}: check the spelling (`diesel-outbox resume {kind} {name:?}` ends the pause)"
        );
    }
    Ok(())
}

fn check_topic(conn: &mut PgConnection, config: &Config, topic: &str) -> Result<()> {
    let problem = if topic.is_empty() {
        "the topic is empty"
    } else if topic.contains('*')
        && !admin::topics(conn, &config.table)?
            .iter()
            .any(|live| live.topic == topic)
    {
        "no message has this topic, and patterns are not served: pause each topic by its name"
    } else {
        return Ok(());
    };
    Err(ConfigError::new("pause topic", problem).into())
}

fn pause(
    conn: &mut PgConnection,
    config: &Config,
    kind: Pausable,
    name: &str,
    how: &How,
    duration: Option<Duration>,
) -> Result<()> {
    let reason = how.reason.trim();
    admin::pause(conn, &config.table, kind, name, reason, duration)?;
    let pauses = admin::pauses(conn, &config.table)?;
    let Some(pause) = pauses::find(&pauses, kind, name) else {
        bail!("the pause of {} {name} is over already", kind.as_str());
    };
    if how.json {
        return output::json(&pauses::as_json(pause));
    }
    let is_longer = match (duration, pause.left) {
        (None, _) => pause.reason != reason,
        (Some(_), None) => true,
        (Some(asked), Some(left)) => left > asked,
    };
    let sentence = pauses::sentence(pause);
    if is_longer {
        let kind = kind.as_str();
        return output::line(format!(
            "nothing was changed: {sentence}, and that pause lasts as long as the one asked for, or longer. To replace it, first run: diesel-outbox resume {kind} {}",
            output::shown(name)
        ));
    }
    output::line(sentence)
}

fn list(conn: &mut PgConnection, config: &Config, json: bool) -> Result<()> {
    let pauses = admin::pauses(conn, &config.table)?;
    if json {
        return output::json(&Value::Array(pauses.iter().map(pauses::as_json).collect()));
    }
    if pauses.is_empty() {
        return output::line("nothing is paused");
    }
    output::line(pauses::table(&pauses))
}
