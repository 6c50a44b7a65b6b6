//! `diesel-outbox pause`

use std::time::Duration;

use anyhow::Result;
use diesel::PgConnection;
use diesel_outbox::ConfigError;
use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, ActError, OPERATOR, Pausing};
use serde_json::Value;
use uuid::Uuid;

use crate::connection::connect;
use crate::settings::SettingFlags;
use crate::signed::Who;
use crate::values::of_option;
use crate::{output, pauses};

/// The actions of `pause`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Stop sending to a destination, on all relays within 1 s
    Destination {
        /// Name of the destination; `default` is the destination of OUTBOX_URL
        name: String,
        /// Pause the destination even if its name is unknown
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        how: How,
    },
    /// Stop claiming messages of a topic; claimed messages are still sent
    Topic {
        /// Exact topic of the messages; patterns are not allowed
        topic: String,
        #[command(flatten)]
        how: How,
    },
    /// Stop sending to all endpoints of a tenant, on all relays within 1 s
    Tenant {
        /// UUID of the tenant
        tenant: Uuid,
        #[command(flatten)]
        how: How,
    },
    /// List pauses with their reasons and remaining times
    List {
        /// Print the pauses as JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct How {
    /// Duration of the pause, such as 10m [default: until resumed]
    #[arg(long = "for", value_name = "DURATION")]
    duration: Option<String>,
    /// Reason, shown with the pause
    #[arg(long, alias = "why", value_name = "TEXT", default_value = OPERATOR)]
    reason: String,
    #[command(flatten)]
    who: Who,
    /// Print the pause as JSON
    #[arg(long)]
    json: bool,
}

/// The time limit of a statement.
const LONGEST: Duration = Duration::from_secs(30);

pub(crate) fn run(action: &Action, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    match action {
        Action::Destination { name, force, how } => {
            pause(&config, Pausable::Destination, name, how, *force)
        }
        Action::Topic { topic, how } => pause(&config, Pausable::Topic, topic, how, false),
        Action::Tenant { tenant, how } => {
            pause(&config, Pausable::Tenant, &tenant.to_string(), how, false)
        }
        Action::List { json } => list(&mut connect(&config, "pause", LONGEST)?, &config, *json),
    }
}

fn pause(config: &Config, kind: Pausable, name: &str, how: &How, is_forced: bool) -> Result<()> {
    let lasts = how.duration.as_deref();
    let pausing = Pausing::new(kind, name, Some(&how.reason), lasts, is_forced);
    let pausing = pausing.map_err(|wrong| match wrong.field {
        "name" => ConfigError::new(format!("pause {}", kind.as_str()), wrong.why),
        _ => of_option(wrong),
    })?;
    let mut conn = connect(config, "pause", LONGEST)?;
    let configured = program::all_destinations(config).into_iter();
    let configured = configured.map(|one| one.name);
    let answer = match pausing.perform(&mut conn, &config.table, configured, &how.who.name()) {
        Err(ActError::Unknown(why)) => {
            let why = why.replace("or force it", "or give --force");
            return Err(ConfigError::new(format!("pause {}", kind.as_str()), why).into());
        }
        answer => answer?,
    };
    let (kind, shown) = (kind.as_str(), output::shown(name));
    if answer.is_unknown {
        eprintln!(
            "diesel-outbox: no waiting message has the {kind} {name:?}: check the spelling (`diesel-outbox resume {kind} {name:?}` ends the pause)"
        );
    }
    if how.json {
        return output::json(&pauses::as_json(&answer.pause));
    }
    let sentence = pauses::sentence(&answer.pause);
    output::line(match answer.has_changed {
        true => sentence,
        false => format!(
            "nothing was changed: {sentence}, which is at least as long as requested. To replace this pause, first run: diesel-outbox resume {kind} {shown}"
        ),
    })
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
