//! `diesel-outbox pause`

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, bail};
use diesel::PgConnection;
use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::config::Config;
use diesel_outbox::endpoints::{EndpointFilter, Hand};
use diesel_outbox::program::{self, Act, parse_duration};
use diesel_outbox::{ConfigError, Outbox};
use diesel_outbox_pages::pause::{OPERATOR, check_reason, of};
use serde_json::Value;
use uuid::Uuid;

use crate::connection::connect;
use crate::settings::SettingFlags;
use crate::signed::Who;
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
/// How many endpoints an error can name.
const SOME_ENDPOINTS: usize = 10;
pub(crate) fn run(action: &Action, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    match action {
        Action::Destination { name, force, how } => {
            let duration = how.duration()?;
            let mut conn = connect(&config, "pause", LONGEST)?;
            check_name(&mut conn, &config, name, *force)?;
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
            let mut conn = connect(&config, "pause", LONGEST)?;
            if !is_named(&mut conn, &config, Pausable::Topic, topic)? {
                check_topic(topic)?;
                warn_of_unknown(Pausable::Topic, topic);
            }
            pause(&mut conn, &config, Pausable::Topic, topic, how, duration)
        }
        Action::Tenant { tenant, how } => {
            let duration = how.duration()?;
            let mut conn = connect(&config, "pause", LONGEST)?;
            let name = tenant.to_string();
            pause(&mut conn, &config, Pausable::Tenant, &name, how, duration)
        }
        Action::List { json } => list(&mut connect(&config, "pause", LONGEST)?, &config, *json),
    }
}

impl How {
    /// Checks the reason and the duration, and returns the duration.
    fn duration(&self) -> Result<Option<Duration>, ConfigError> {
        let wrong = |why| ConfigError::new("--reason", why);
        check_reason(self.reason.trim()).map_err(wrong)?;
        let Some(text) = &self.duration else {
            return Ok(None);
        };
        let duration = parse_duration("--for", text)?;
        if duration < Duration::from_millis(1) {
            return Err(ConfigError::new("--for", "must be 1ms or longer"));
        }
        Ok(Some(duration))
    }
}

/// Refuses an unknown name, because pausing a misspelt name has no effect. If these settings, the running relays and the
/// outbox have no destination, nobody knows the names, and every name is accepted.
fn check_name(conn: &mut PgConnection, config: &Config, name: &str, force: bool) -> Result<()> {
    if name.is_empty() {
        return Err(ConfigError::new("pause destination", "the name is empty").into());
    }
    let outbox = Outbox::from(config.table.clone());
    let endpoints = outbox.endpoints();
    let destinations = program::all_destinations(config).into_iter();
    let mut known: BTreeSet<String> = destinations.map(|one| one.name).collect();
    let leases = program::leases(conn, &config.table)?.into_iter();
    // Also of one whose heartbeat has stopped: that is when one pauses.
    let valid = leases.filter(|lease| lease.seconds_left > 0.0);
    known.extend(valid.flat_map(|lease| lease.destinations));
    let is_known = known.contains(name) || program::or_none(endpoints.get(conn, name))?.is_some();
    if is_known || is_named(conn, config, Pausable::Destination, name)? {
        return Ok(());
    }
    let some = endpoints.list(conn, &EndpointFilter::default(), SOME_ENDPOINTS);
    let some = program::or_none(some)?;
    known.extend(some.into_iter().map(|one| one.name));
    if known.is_empty() {
        warn_of_unknown(Pausable::Destination, name);
        return Ok(());
    }
    if force {
        return Ok(());
    }
    let known: Vec<String> = known.into_iter().collect();
    let problem = format!(
        "no destination {name:?} is in these settings, is an endpoint, or is served by a running relay: check the spelling, or give --force; existing ones include {}",
        output::names(&known)
    );
    Err(ConfigError::new("pause destination", problem).into())
}

/// Whether a waiting message has this topic, or names this destination.
fn is_named(conn: &mut PgConnection, config: &Config, kind: Pausable, name: &str) -> Result<bool> {
    let live = program::topics(conn, &config.table)?;
    Ok(live.iter().any(|one| match kind {
        Pausable::Topic => one.topic == name,
        _ => one.destination == name,
    }))
}

/// Warns about a name that no waiting message has: the name may be misspelt, or its messages may come later.
fn warn_of_unknown(kind: Pausable, name: &str) {
    let kind = kind.as_str();
    eprintln!(
        "diesel-outbox: no waiting message has the {kind} {name:?}: check the spelling (`diesel-outbox resume {kind} {name:?}` ends the pause)"
    );
}

/// Refuses a topic that no message can have, or that looks like a pattern.
fn check_topic(topic: &str) -> Result<(), ConfigError> {
    let problem = if topic.is_empty() {
        "the topic is empty"
    } else if topic.contains('*') {
        "no message has this topic, and patterns are not allowed: pause each topic by name"
    } else {
        return Ok(());
    };
    Err(ConfigError::new("pause topic", problem))
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
    let (table, note) = (&config.table, how.who.note(reason));
    program::audited(conn, table, &note, Act::Pause, name, |conn| {
        admin::pause(conn, table, kind, name, reason, duration).map(|()| true)
    })?;
    let pauses = admin::pauses(conn, &config.table)?;
    let mut own = of(&pauses, kind, name).filter(|pause| pause.by == Hand::Operator);
    let Some(pause) = own.next() else {
        bail!(
            "{} {name:?} is not paused: the pause has already ended",
            kind.as_str()
        );
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
            "nothing was changed: {sentence}, which is at least as long as requested. To replace this pause, first run: diesel-outbox resume {kind} {}",
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
