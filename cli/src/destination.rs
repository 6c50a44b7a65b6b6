//! `diesel-outbox destination`

mod deliveries;

use std::time::{Duration, SystemTime};

use anyhow::{Result, bail};
use diesel::{Connection, PgConnection};
use diesel_outbox::config::{SigningSecret, parse_duration};
use diesel_outbox::destinations::{
    DestinationError, DestinationFilter, Destinations, RegisteredDestination,
};
use diesel_outbox::{ConfigError, Outbox};
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::settings::SettingFlags;
use crate::{output, pause};

/// Options of `destination`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Show the registered destinations in the order of their names
    List(List),
    /// Show one, without its secret
    Show {
        /// Its name
        name: String,
        /// Show what its receiver verifies with instead, and nothing else: its newest secret or, where that is asymmetric, the public key
        #[arg(long)]
        reveal: bool,
        /// Show it as JSON
        #[arg(long, conflicts_with = "reveal")]
        json: bool,
    },
    /// Register a destination, or change what is given of one that is there; a new one gets a secret
    Put(Box<Put>),
    /// Send to it again
    Enable {
        /// Its name
        name: String,
    },
    /// Let its messages wait
    Disable {
        /// Its name
        name: String,
        /// Why, for whoever finds it disabled
        #[arg(long, value_name = "TEXT", default_value = "OPERATOR")]
        reason: String,
    },
    /// Remove it; what waits for it becomes dead letters
    Remove {
        /// Its name
        name: String,
    },
    /// Make a new secret and show what its receiver verifies with; the secret before it signs beside it for a while
    Rotate {
        /// Its name
        name: String,
        /// Make an asymmetric one (Ed25519), and show its public key: the receiver cannot sign with it
        #[arg(long)]
        asymmetric: bool,
        /// How long the old secret signs still
        #[arg(long, value_name = "DURATION", default_value = "24h")]
        keep: String,
    },
    /// Encrypt all secrets in the database with the newest key of OUTBOX_SECRET_KEY
    Encrypt,
    /// Send it a test event at once, also where it is disabled, and show the answer
    Test {
        /// Its name
        name: String,
        /// Show it as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show what became of its messages, the newest first
    Deliveries(deliveries::List),
    /// Send a message there once more: one that it got, or a dead letter
    SendAgain {
        /// Its name
        name: String,
        /// The message id, as the receiver sees it
        id: Uuid,
    },
}

#[derive(Debug, clap::Args)]
struct List {
    /// Those of this tenant only
    #[arg(long, value_name = "UUID")]
    tenant: Option<Uuid>,
    /// The disabled ones only
    #[arg(long)]
    disabled: bool,
    /// Those with this in their name, URL or description only
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
    /// Those behind this name only
    #[arg(long, value_name = "NAME")]
    after: Option<String>,
    /// How many, at most
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: u32,
    /// Show them as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct Put {
    /// Its name
    name: String,
    /// Where messages are posted; needed for a new one
    url: Option<String>,
    /// Only topics that match this pattern; may be given again
    #[arg(long = "topic", value_name = "PATTERN")]
    topics: Vec<String>,
    /// Only messages of this tenant
    #[arg(long, value_name = "UUID")]
    tenant: Option<Uuid>,
    /// Only messages whose payload meets this, such as '$.total ? (@ > 100)'
    #[arg(long, value_name = "JSONPATH")]
    filter: Option<String>,
    /// A header of every request, 'name: value'; may be given again
    #[arg(long = "header", value_name = "HEADER")]
    headers: Vec<String>,
    /// binary, structured or batched
    #[arg(long = "as", value_name = "MODE")]
    mode: Option<String>,
    /// Sends at the same time, 1 to 64
    #[arg(long = "sends", value_name = "COUNT")]
    concurrency: Option<usize>,
    /// Requests from all relays together: 10/s, 600/min, 100/h
    #[arg(long, value_name = "RATE")]
    rate: Option<String>,
    /// The limit for one send
    #[arg(long, value_name = "DURATION")]
    timeout: Option<String>,
    /// A line for people
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
    /// Show it as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let outbox = Outbox::from(config.table.clone());
    let destinations = outbox.destinations().with_keys(&config.secret_keys);
    let mut conn = pause::connect(&config, "destination")?;
    let conn = &mut conn;
    match &options.action {
        Action::List(how) => list(conn, destinations, how),
        Action::Show { name, reveal, json } => {
            if *reveal {
                return show_secret(conn, destinations, name);
            }
            match (destinations.get(conn, name)?, json) {
                (Some(one), true) => output::json(&as_json(&one)),
                (Some(one), false) => output::line(shown(&one)),
                (None, _) => missing(name),
            }
        }
        Action::Put(put) => {
            let one =
                conn.transaction::<_, anyhow::Error, _>(|conn| put.put(conn, destinations))?;
            match put.json {
                true => output::json(&as_json(&one)),
                false => output::line(shown(&one)),
            }
        }
        Action::Enable { name } => match destinations.enable(conn, name)? {
            true => output::line(format!("{} is enabled", output::shown(name))),
            false => missing(name),
        },
        Action::Disable { name, reason } => match destinations.disable(conn, name, reason)? {
            true => output::line(format!(
                "{} is disabled: its messages wait",
                output::shown(name)
            )),
            false => missing(name),
        },
        Action::Remove { name } => match destinations.remove(conn, name)? {
            true => output::line(format!("{} is removed", output::shown(name))),
            false => missing(name),
        },
        Action::Rotate {
            name,
            asymmetric,
            keep,
        } => {
            let keep = parse_duration("--keep", keep)?;
            let secret = match asymmetric {
                true => SigningSecret::random_asymmetric()?,
                false => SigningSecret::random(),
            };
            match destinations.rotate_to(conn, name, &secret, keep)? {
                true => output::line(for_receivers(&secret)?),
                false => missing(name),
            }
        }
        Action::Encrypt => encrypt(conn, destinations),
        Action::Test { name, json } => deliveries::test(conn, destinations, name, &config, *json),
        Action::Deliveries(how) => deliveries::list(conn, destinations, how),
        Action::SendAgain { name, id } => deliveries::send_again(conn, destinations, name, *id),
    }
}

fn encrypt(conn: &mut PgConnection, destinations: Destinations<'_>) -> Result<()> {
    let before = destinations.encrypt(conn).map_err(|error| match error {
        // Bad settings: exit code 2.
        DestinationError::Invalid(error) => error.into(),
        error => anyhow::Error::from(error),
    })?;
    output::line(format!(
        "encrypted the secrets of {} destinations ({} plain, {} with an older key); {} had the newest key already",
        before.plain + before.older,
        before.plain,
        before.older,
        before.newest,
    ))?;
    let names: Vec<String> = before
        .unreadable
        .iter()
        .map(|name| output::shown(name))
        .collect();
    match names.as_slice() {
        [] => Ok(()),
        names => bail!(
            "the secrets of {} destinations cannot be read and stay as they are: {}",
            names.len(),
            names.join(", ")
        ),
    }
}

fn missing(name: &str) -> Result<()> {
    bail!(
        "there is no registered destination {name:?}; `diesel-outbox destination list` shows those that are there"
    )
}

impl Put {
    /// What is given, on top of what is there.
    fn put(
        &self,
        conn: &mut PgConnection,
        destinations: Destinations<'_>,
    ) -> Result<RegisteredDestination> {
        let found = destinations.get(conn, &self.name)?;
        let mut one = match (found, &self.url) {
            (Some(one), _) => one,
            (None, Some(url)) => RegisteredDestination::new(&self.name, url),
            (None, None) => {
                let reason = format!(
                    "it is needed, as there is no destination {:?} yet",
                    self.name
                );
                return Err(ConfigError::new("URL", reason).into());
            }
        };
        // What could not be read would be replaced by nothing. The rest is checked when it is put.
        let is_unread = |problem: &&String| !problem.starts_with("destinations.");
        if let Some(problem) = one.problem.as_ref().filter(is_unread) {
            bail!(
                "nothing was changed: the row has a value that cannot be read, {problem}. Mend it by SQL, or remove the destination"
            );
        }
        if let Some(url) = &self.url {
            one.url.clone_from(url);
        }
        if !self.topics.is_empty() {
            one.topics.clone_from(&self.topics);
        }
        if !self.headers.is_empty() {
            one.headers = self
                .headers
                .iter()
                .map(|text| header(text))
                .collect::<Result<_, _>>()?;
        }
        let of_flag = |flag: &'static str| move |reason: String| ConfigError::new(flag, reason);
        if let Some(word) = &self.mode {
            one.mode = Some(word.parse().map_err(of_flag("--as"))?);
        }
        if let Some(text) = &self.rate {
            let wrong = |error: ConfigError| ConfigError::new("--rate", error.reason());
            one.rate = Some(text.parse().map_err(wrong)?);
        }
        if let Some(text) = &self.timeout {
            one.timeout = Some(parse_duration("--timeout", text)?);
        }
        one.tenant_id = self.tenant.or(one.tenant_id);
        one.concurrency = self.concurrency.or(one.concurrency);
        one.filter = self.filter.clone().or(one.filter);
        one.description = self.description.clone().or(one.description);
        destinations.put(conn, &one).map_err(|error| match error {
            // Of what was given: exit code 2.
            DestinationError::Invalid(error) => error.into(),
            error => anyhow::Error::from(error),
        })?;
        let stored = destinations.get(conn, &self.name)?;
        Ok(stored.unwrap_or(one))
    }
}

fn header(text: &str) -> Result<(String, secrecy::SecretString), ConfigError> {
    // Without its value, which may be a secret.
    let (name, value) = text
        .split_once(':')
        .ok_or_else(|| ConfigError::new("--header", "it has no colon: write 'name: value'"))?;
    Ok((name.trim().to_owned(), value.trim().into()))
}

fn show_secret(conn: &mut PgConnection, destinations: Destinations<'_>, name: &str) -> Result<()> {
    match destinations.secret(conn, name)? {
        Some(secret) => output::line(for_receivers(&secret)?),
        None if destinations.get(conn, name)?.is_some() => {
            bail!("{name} has no secret: `diesel-outbox destination rotate` makes one")
        }
        None => missing(name),
    }
}

/// What a receiver verifies with.
fn for_receivers(secret: &SigningSecret) -> Result<String> {
    Ok(match secret.public_key()? {
        Some(key) => key.to_string(),
        None => secret.written().expose_secret().to_owned(),
    })
}

fn list(conn: &mut PgConnection, destinations: Destinations<'_>, how: &List) -> Result<()> {
    let filter = DestinationFilter {
        tenant_id: how.tenant,
        enabled: how.disabled.then_some(false),
        search: how.search.clone(),
        after: how.after.clone(),
    };
    let limit = usize::try_from(how.limit)?;
    let found = destinations.list(conn, &filter, limit)?;
    if how.json {
        return output::json(&Value::Array(found.iter().map(as_json).collect()));
    }
    if found.is_empty() {
        return output::line("no destination is registered");
    }
    let mut table = output::table(&["name", "url", "topics", "state"]);
    for one in &found {
        table.add_row([
            output::name(&one.name),
            output::name(&one.url),
            output::name(&one.topics.join(" ")),
            state(one),
        ]);
    }
    output::line(table)?;
    if found.len() == limit
        && let Some(last) = found.last()
    {
        output::line(format!(
            "there may be more: --after {}",
            output::shown(&last.name)
        ))?;
    }
    Ok(())
}

/// Whether it is sent to, and if not why.
fn state(one: &RegisteredDestination) -> String {
    let reason = one
        .disabled_reason
        .as_deref()
        .unwrap_or("no reason was given");
    match (one.enabled, &one.problem) {
        (false, _) => format!("disabled: {}", output::shown(reason)),
        (true, Some(problem)) => format!("not used: {}", output::shown(problem)),
        (true, None) => "enabled".to_owned(),
    }
}

fn shown(one: &RegisteredDestination) -> String {
    let mut table = output::table(&[&output::name(&one.name), &state(one)]);
    let mut row = |what: &str, value: Option<String>| {
        if let Some(value) = value {
            table.add_row([what.to_owned(), output::shown(&value)]);
        }
    };
    let headers: Vec<&str> = one.headers.iter().map(|(name, _)| name.as_str()).collect();
    row("url", Some(one.url.clone()));
    row("topics", Some(one.topics.join(" ")));
    row("tenant", one.tenant_id.map(|tenant| tenant.to_string()));
    row("filter", one.filter.clone());
    row("headers", (!headers.is_empty()).then(|| headers.join(" ")));
    row("mode", one.mode.map(|mode| mode.to_string()));
    row(
        "concurrency",
        one.concurrency.map(|sends| sends.to_string()),
    );
    row("rate", one.rate.map(|rate| rate.to_string()));
    row(
        "timeout",
        one.timeout
            .map(|time| humantime::format_duration(time).to_string()),
    );
    row("description", one.description.clone());
    row("registered", one.created_at.map(time));
    row("changed", one.updated_at.map(time));
    table.to_string()
}

fn time(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

/// A destination, as programs read it: without secrets, and without values of headers.
fn as_json(one: &RegisteredDestination) -> Value {
    let headers: Vec<&str> = one.headers.iter().map(|(name, _)| name.as_str()).collect();
    json!({
        "name": one.name,
        "url": one.url,
        "topics": one.topics,
        "tenant_id": one.tenant_id.map(|tenant| tenant.to_string()),
        "filter": one.filter,
        "enabled": one.enabled,
        "headers": headers,
        "mode": one.mode.map(|mode| mode.to_string()),
        "concurrency": one.concurrency,
        "rate": one.rate.map(|rate| rate.to_string()),
        "timeout_seconds": one.timeout.as_ref().map(Duration::as_secs_f64),
        "description": one.description,
        "disabled_reason": one.disabled_reason,
        "problem": one.problem,
        "created_at": one.created_at.map(time),
        "updated_at": one.updated_at.map(time),
    })
}
