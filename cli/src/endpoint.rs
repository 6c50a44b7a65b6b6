//! `diesel-outbox endpoint`

mod change;
mod deliveries;
mod policy;
mod send;

use std::collections::BTreeMap;
use std::io::Read;
use std::time::{Duration, SystemTime};

use anyhow::{Result, bail};
use clap::builder::PossibleValuesParser;
use diesel::{Connection, PgConnection};
use diesel_outbox::admin::Note;
use diesel_outbox::config::{Auth, Config, SigningSecret, Verification};
use diesel_outbox::endpoints::{
    Endpoint, EndpointError, EndpointFilter, EndpointKind, Endpoints, Hand,
};
use diesel_outbox::program::{self, Act, PolicyOption, parse_duration};
use diesel_outbox::{ConfigError, Outbox, OutboxName};
use diesel_outbox_pages::pause::state_in_words;
use diesel_outbox_pages::text::without_credentials;
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use uuid::Uuid;

use self::change::Changes;
use self::policy::PolicyFlags;
use self::send::Sends;

use crate::connection::connect;
use crate::listed::Listed;
use crate::output;
use crate::settings::SettingFlags;
use crate::signed::Signed;

/// The actions of `endpoint`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List endpoints by name
    List(List),
    /// Show an endpoint without its secret
    Show {
        /// Name of the endpoint
        name: String,
        /// Print only the key that the receiver verifies with: the newest secret, or its public key if asymmetric
        #[arg(long)]
        reveal: bool,
        /// Print the endpoint as JSON
        #[arg(long, conflicts_with = "reveal")]
        json: bool,
    },
    /// Register an endpoint with a new secret, or change the given values of an existing endpoint.
    /// `endpoint show NAME --reveal` prints the secret
    Put(Box<Put>),
    /// Enable, disable or remove it
    #[command(flatten)]
    Change(Listed<Changes>),
    /// Create a new secret and print the key for the receiver; the old secret also signs for a while
    Rotate {
        /// Name of the endpoint
        name: String,
        /// Create an asymmetric secret (Ed25519) and print its public key, which cannot sign
        #[arg(long)]
        asymmetric: bool,
        /// Time until the old secret expires
        #[arg(long, value_name = "DURATION", default_value = "24h")]
        keep: String,
        #[command(flatten)]
        signed: Signed,
    },
    /// Encrypt all secrets in the database with the newest key of OUTBOX_SECRET_KEY
    Encrypt {
        #[command(flatten)]
        signed: Signed,
    },
    /// Send a test event at once, even to a disabled endpoint, and show the response
    Test {
        /// Name of the endpoint
        name: String,
        /// Print the response as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        signed: Signed,
    },
    /// Ask an endpoint now whether it wants messages, as its --verification says
    Verify {
        /// Name of the endpoint
        name: String,
        /// Print the answer as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        signed: Signed,
    },
    /// List the messages of an endpoint with their results, newest first
    Deliveries(deliveries::List),
    /// Send a delivered message or a dead letter to an endpoint again
    SendAgain {
        /// Name of the endpoint
        name: String,
        /// Message id (the id of the event at the receiver)
        id: Uuid,
        #[command(flatten)]
        signed: Signed,
    },
    /// Recover or backfill it
    #[command(flatten)]
    Send(Listed<Sends>),
}

#[derive(Debug, clap::Args)]
pub(crate) struct List {
    /// Only this tenant
    #[arg(long, value_name = "UUID")]
    tenant: Option<Uuid>,
    /// Only failing endpoints: no send has succeeded for ten minutes since the first failure, or nobody reads the feed
    #[arg(long)]
    failing: bool,
    /// Only disabled endpoints
    #[arg(long)]
    disabled: bool,
    /// Only endpoints with this text in their name, URL or description
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
    /// Only endpoints after this name
    #[arg(long, value_name = "NAME")]
    after: Option<String>,
    /// Maximum number of endpoints
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: u32,
    /// Print the endpoints as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Once an endpoint is registered, a message without a destination, route or handler no longer waits as \
    NO_ROUTE, unless a relay has served its topic before (see `topics list`): it ends unsent, as no_subscriber."
)]
pub(crate) struct Put {
    /// Name of the endpoint
    name: String,
    /// URL that messages are posted to; required for a new endpoint, unless it is a feed
    url: Option<String>,
    /// Register a feed: an endpoint without a URL, which consumers read (see `feed token`)
    #[arg(long, conflicts_with_all = ["url", "headers", "auth", "verification"])]
    feed: bool,
    /// Only topics that match this pattern; repeatable
    #[arg(long = "topic", value_name = "PATTERN")]
    topics: Vec<String>,
    /// Only messages of this tenant
    #[arg(long, value_name = "UUID")]
    tenant: Option<Uuid>,
    /// Only messages that match this filter, such as '{"total": [{"numeric": [">", 100]}]}'
    #[arg(long, value_name = "JSON", value_parser = json_value)]
    filter: Option<Value>,
    /// Header of every request, 'name: value'; repeatable
    #[arg(long = "header", value_name = "HEADER")]
    headers: Vec<String>,
    /// Authentication that the receiver asks for, as JSON; @FILE reads a file, - standard input
    #[arg(long, value_name = "JSON")]
    auth: Option<String>,
    #[command(flatten)]
    policy: PolicyFlags,
    /// How the endpoint shows that it wants messages, before the first is sent: challenge or cloudevents. Until then, messages
    /// wait; with challenge:skip or cloudevents:skip, the endpoint gets none
    #[arg(long, value_name = "WORD")]
    verification: Option<Verification>,
    /// Description, for operators
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
    /// Clear a value, so that the default applies; repeatable
    #[arg(long, value_name = "FIELD", value_parser = PossibleValuesParser::new(policy::fields()))]
    clear: Vec<String>,
    #[command(flatten)]
    signed: Signed,
    /// Print the endpoint as JSON
    #[arg(long)]
    json: bool,
}

/// The secret of `--secret`, which is the endpoint's own here.
fn given_secret(
    settings: &SettingFlags,
    config: &Config,
) -> Result<Option<SigningSecret>, ConfigError> {
    match (settings.get("OUTBOX_SECRET"), config.secrets.as_slice()) {
        (None, _) => Ok(None),
        (Some(_), [secret]) => Ok(Some(secret.clone())),
        (Some(_), _) => {
            let reason = "an endpoint starts with one secret: `endpoint rotate` adds the next";
            Err(ConfigError::new("--secret", reason))
        }
    }
}

pub(crate) fn run(action: &Action, settings: &SettingFlags) -> Result<()> {
    let config = match action {
        Action::Put(_) => settings.without(policy::is_option).load()?,
        _ => settings.load()?,
    };
    let outbox = Outbox::from(config.table.clone());
    let endpoints = outbox.endpoints().with_keys(&config.secret_keys);
    let statement = match action {
        Action::Send(_) => Duration::from_secs(600),
        _ => Duration::from_secs(30),
    };
    let mut conn = connect(&config, "endpoint", statement)?;
    let (conn, table) = (&mut conn, &config.table);
    match action {
        Action::List(how) => list(conn, endpoints, how),
        Action::Show { name, reveal, json } => {
            if *reveal {
                return show_secret(conn, endpoints, name);
            }
            match (endpoints.get(conn, name)?, json) {
                (Some(one), true) => output::json(&as_json(&one)),
                (Some(one), false) => output::line(shown(&one)),
                (None, _) => missing(name),
            }
        }
        Action::Put(put) => {
            let secret = given_secret(settings, &config)?;
            let one = conn.transaction::<_, anyhow::Error, _>(|conn| {
                let one = put.put(conn, endpoints, secret.clone())?;
                let note = put.signed.note();
                program::audit(conn, table, &note, Act::PutEndpoint, &one.name)?;
                Ok(one)
            })?;
            let refusal = program::refusal(conn, endpoints, &one.name, &config)?;
            if put.json {
                let mut shown = as_json(&one);
                shown["refused_by_these_settings"] = json!(refusal);
                return output::json(&shown);
            }
            output::line(shown(&one))?;
            if let Some(why) = refusal {
                let (name, why) = (output::shown(&one.name), output::shown(&why));
                output::line(format!(
                    "warning: a relay with the settings of this command would not send to {name}: {why}. Messages for {name} wait unless another relay has settings that allow it"
                ))?;
            }
            if (put.url.is_some() || put.feed) && one.tenant_id.is_none() && one.topics == ["*"] {
                output::line(format!(
                    "{} gets the messages of all topics and tenants: --topic and --tenant select some",
                    output::shown(&one.name)
                ))?;
            }
            if !one.enabled {
                let name = output::shown(&one.name);
                output::line(format!(
                    "disabled: `diesel-outbox endpoint enable {name}` enables it"
                ))?;
            }
            Ok(())
        }
        Action::Change(act) => act.run(conn, endpoints, &config),
        Action::Rotate {
            name,
            asymmetric,
            keep,
            signed,
        } => {
            let keep = parse_duration("--keep", keep)?;
            let secret = match asymmetric {
                true => SigningSecret::random_asymmetric(),
                false => SigningSecret::random(),
            };
            match program::rotate(conn, endpoints, name, (&secret, keep), &signed.note())? {
                true => output::line(for_receivers(&secret)?),
                false => missing(name),
            }
        }
        Action::Encrypt { signed } => encrypt(conn, endpoints, table, &signed.note()),
        Action::Test { name, json, signed } => {
            let test = program::begin_test(conn, endpoints, name, &config, &signed.note());
            let Some(test) = deliveries::sendable(test)? else {
                return missing(name);
            };
            let answer = test.send();
            let has_closed = endpoints.record_test(conn, &answer)?;
            deliveries::tested(name, &answer, has_closed, *json)
        }
        Action::Verify { name, json, signed } => {
            let note = signed.note();
            let check = program::begin_verification(conn, endpoints, name, &config, &note);
            let Some(check) = deliveries::sendable(check)? else {
                return missing(name);
            };
            let answer = check.ask();
            endpoints.record(conn, &answer)?;
            deliveries::verified(name, &answer, *json)
        }
        Action::Deliveries(how) => deliveries::list(conn, endpoints, how),
        Action::SendAgain { name, id, signed } => {
            let sent = program::send_again(conn, endpoints, name, *id, &signed.note());
            deliveries::sent_again(conn, endpoints, (name, *id), sent)
        }
        Action::Send(act) => act.run(conn, endpoints),
    }
}

fn encrypt(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    table: &OutboxName,
    note: &Note,
) -> Result<()> {
    let before = endpoints.encrypt(conn).map_err(|error| match error {
        // Bad settings: exit code 2.
        EndpointError::Invalid(error) => error.into(),
        error => anyhow::Error::from(error),
    })?;
    let changed = before.plain + before.older;
    if changed > 0 {
        let what = output::counted(changed, "endpoint", "endpoints");
        program::audit(conn, table, note, Act::EncryptEndpoints, &what)?;
    }
    output::line(format!(
        "encrypted the secrets of {} ({} plain, {} with an older key); {} already had the newest key",
        output::counted(changed, "endpoint", "endpoints"),
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
            "the secrets of {} cannot be read, and are unchanged: {}",
            output::counted(names.len(), "endpoint", "endpoints"),
            names.join(", ")
        ),
    }
}

fn missing(name: &str) -> Result<()> {
    bail!("there is no endpoint {name:?}: `diesel-outbox endpoint list` shows all of them")
}

impl Put {
    /// Applies the given values to the stored endpoint, or to a new one.
    fn put(
        &self,
        conn: &mut PgConnection,
        endpoints: Endpoints<'_>,
        secret: Option<SigningSecret>,
    ) -> Result<Endpoint> {
        let invalid = |error: EndpointError| match error {
            // Bad arguments: exit code 2.
            EndpointError::Invalid(error) => self.named(error).into(),
            error => anyhow::Error::from(error),
        };
        let found = endpoints.get(conn, &self.name)?;
        if let Some(found) = &found
            && self.feed
            && found.kind != EndpointKind::Feed
        {
            let reason = format!("{:?} is a webhook, and stays one", self.name);
            return Err(ConfigError::new("--feed", reason).into());
        }
        if found.is_none() {
            let new = match (&self.url, self.feed) {
                (_, true) => Endpoint::feed(&self.name),
                (Some(url), false) => Endpoint::new(&self.name, url),
                (None, false) => {
                    let reason = format!(
                        "required, because there is no endpoint {:?} yet; or --feed",
                        self.name
                    );
                    return Err(ConfigError::new("URL", reason).into());
                }
            };
            endpoints.put(conn, &new).map_err(invalid)?;
        }
        // What cannot be read is refused before anything is written.
        let given = Given {
            headers: self
                .headers
                .iter()
                .map(|text| header(text))
                .collect::<Result<_, _>>()?,
            auth: self.auth.as_deref().map(auth).transpose()?,
            secret,
        };
        let mut refused = None;
        let is_there = endpoints.change(conn, &self.name, |row| {
            refused = self.write(given, row).err();
        });
        let is_there = is_there.map_err(invalid)?;
        if let Some(error) = refused {
            return Err(error.into());
        }
        match endpoints.get(conn, &self.name)? {
            Some(one) if is_there => Ok(one),
            _ => bail!("{:?} was removed meanwhile: nothing was changed", self.name),
        }
    }

    /// The error of a given value names its argument, and not the column.
    fn named(&self, error: ConfigError) -> ConfigError {
        let of_row = format!("destinations.{}.", self.name);
        let Some(value) = error.key().strip_prefix(&of_row) else {
            return error;
        };
        let (column, part) = value.split_once('.').unwrap_or((value, ""));
        let argument = match column {
            "name" => Some("NAME".to_owned()),
            "url" => self.url.is_some().then(|| "URL".to_owned()),
            "topics" => (!self.topics.is_empty()).then(|| "--topic".to_owned()),
            "filter" => self.filter.is_some().then(|| "--filter".to_owned()),
            "headers" => (!self.headers.is_empty()).then(|| "--header".to_owned()),
            "auth" => self.auth.is_some().then(|| "--auth".to_owned()),
            "description" => (self.description.is_some()).then(|| "--description".to_owned()),
            option => self.policy.flag(option),
        };
        let reason = match part {
            "" => error.reason().to_owned(),
            part => format!("{part}: {}", error.reason()),
        };
        argument.map_or(error, |argument| ConfigError::new(argument, reason))
    }

    /// Writes the given values.
    fn write(&self, given: Given, one: &mut Endpoint) -> Result<(), ConfigError> {
        if let Some(url) = &self.url {
            one.url.clone_from(url);
        }
        if !self.topics.is_empty() {
            one.topics.clone_from(&self.topics);
        }
        if !self.headers.is_empty() {
            one.headers = given.headers;
        }
        if given.auth.is_some() {
            one.auth = given.auth;
        }
        self.policy.apply(&mut one.policy)?;
        one.tenant_id = self.tenant.or(one.tenant_id);
        if self.filter.is_some() {
            one.filter.clone_from(&self.filter);
        }
        if self.description.is_some() {
            one.description.clone_from(&self.description);
        }
        for field in &self.clear {
            policy::clear(one, field);
        }
        one.verification = self.verification.unwrap_or(one.verification);
        one.secret = given.secret;
        Ok(())
    }
}

/// What was read of the given values of `put`.
struct Given {
    headers: Vec<(String, secrecy::SecretString)>,
    auth: Option<Auth>,
    secret: Option<SigningSecret>,
}

fn header(text: &str) -> Result<(String, secrecy::SecretString), ConfigError> {
    // The error omits the value, which may be a secret.
    let (name, value) = text
        .split_once(':')
        .ok_or_else(|| ConfigError::new("--header", "the colon is missing: write 'name: value'"))?;
    Ok((name.trim().to_owned(), value.trim().into()))
}

/// The value of `--auth`: JSON, or where it is. Other processes can see a value on the command line.
fn auth(text: &str) -> Result<Auth, ConfigError> {
    let wrong = |reason: String| ConfigError::new("--auth", reason);
    let path = text.strip_prefix('@');
    let read = match (text, path) {
        ("-", _) => {
            let mut text = String::new();
            let read = std::io::stdin().read_to_string(&mut text);
            read.map(|_| text)
        }
        (_, Some(path)) => std::fs::read_to_string(path),
        _ => Ok(text.to_owned()),
    };
    let read = read.map_err(|error| {
        let what = path.unwrap_or("standard input");
        wrong(format!("{what:?} cannot be read: {error}"))
    })?;
    if text != "-" && path.is_none() && !text.trim_start().starts_with('{') {
        return Err(wrong(
            "not a JSON object: write {…}, @FILE to read a file, or - for standard input"
                .to_owned(),
        ));
    }
    read.parse()
}

fn show_secret(conn: &mut PgConnection, endpoints: Endpoints<'_>, name: &str) -> Result<()> {
    match endpoints.secret(conn, name)? {
        Some(secret) => output::line(for_receivers(&secret)?),
        None if endpoints.get(conn, name)?.is_some() => {
            bail!("{name} has no secret: `diesel-outbox endpoint rotate` creates one")
        }
        None => missing(name),
    }
}

/// The key that a receiver verifies with: the public key, or the symmetric secret.
fn for_receivers(secret: &SigningSecret) -> Result<String> {
    Ok(match secret.public_key()? {
        Some(key) => key.to_string(),
        None => secret.written().expose_secret().to_owned(),
    })
}

fn list(conn: &mut PgConnection, endpoints: Endpoints<'_>, how: &List) -> Result<()> {
    let filter = EndpointFilter::default()
        .tenant_id(how.tenant)
        .enabled(how.disabled.then_some(false))
        .failing(how.failing.then_some(true))
        .search(how.search.clone())
        .after(how.after.clone());
    let limit = usize::try_from(how.limit)?;
    let found = endpoints.list(conn, &filter, limit)?;
    if how.json {
        return output::json(&found.iter().map(as_json).collect::<Value>());
    }
    if found.is_empty() {
        let is_registered = !endpoints
            .list(conn, &EndpointFilter::default(), 1)?
            .is_empty();
        return output::line(match is_registered {
            true => "no endpoint matches",
            false => "no endpoint is registered",
        });
    }
    let mut table = output::table(&["name", "url", "topics", "tenant", "state"]);
    for one in &found {
        let url = match one.kind {
            EndpointKind::Feed => "(feed)".to_owned(),
            _ => without_credentials(&one.url),
        };
        table.add_row([
            output::name(&one.name),
            output::name(&url),
            output::name(&one.topics.join(" ")),
            one.tenant_id.map(|id| id.to_string()).unwrap_or_default(),
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

/// The state, and why no relay uses the endpoint.
fn state(one: &Endpoint) -> String {
    let state = output::shown(&state_in_words(one));
    match &one.problem {
        Some(problem) if one.enabled => format!("{state}, not used: {}", output::shown(problem)),
        _ => state,
    }
}

fn shown(one: &Endpoint) -> String {
    let mut table = output::table(&[&output::name(&one.name), &state(one)]);
    let mut row = |what: &str, value: Option<String>| {
        if let Some(value) = value {
            table.add_row([what.to_owned(), output::shown(&value)]);
        }
    };
    let headers: Vec<&str> = one.headers.iter().map(|(name, _)| name.as_str()).collect();
    row("kind", Some(one.kind.to_string()));
    row(
        "url",
        (one.kind != EndpointKind::Feed).then(|| without_credentials(&one.url)),
    );
    row("topics", Some(one.topics.join(" ")));
    row("tenant", one.tenant_id.map(|tenant| tenant.to_string()));
    row("filter", one.filter.as_ref().map(Value::to_string));
    row("headers", (!headers.is_empty()).then(|| headers.join(" ")));
    row("auth", one.auth.as_ref().map(ToString::to_string));
    for option in PolicyOption::of_endpoints() {
        row(&option.name.replace('_', " "), option.text(&one.policy));
    }
    if one.verification != Verification::None {
        row("verification", Some(one.verification.to_string()));
        row("verified", one.verified_at.map(time));
        row(
            "allowed rate",
            one.allowed_rate.map(|rate| rate.to_string()),
        );
    }
    row("description", one.description.clone());
    row("registered", one.created_at.map(time));
    row("changed", one.updated_at.map(time));
    let since = match one.kind {
        EndpointKind::Feed => "unread since",
        _ => "failing since",
    };
    row(since, one.failing_since.map(time));
    row("older secrets sign until", old_secrets_until(one).map(time));
    table.to_string()
}

/// Until when older secrets sign, if they sign now.
fn old_secrets_until(one: &Endpoint) -> Option<SystemTime> {
    one.old_secrets_until
        .filter(|until| *until > SystemTime::now())
}

fn time(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

fn json_value(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))
}

/// An endpoint as JSON, without secrets and without header values. It has every option, also those that have their defaults.
fn as_json(one: &Endpoint) -> Value {
    let headers: Vec<&str> = one.headers.iter().map(|(name, _)| name.as_str()).collect();
    let auth = one.auth.as_ref().map(program::shown_auth);
    let set_by = (one.set_by.iter()).map(|(name, by)| (name.as_str(), by.as_str()));
    let mut shown = json!({
        "name": one.name,
        "kind": one.kind.as_str(),
        "url": without_credentials(&one.url),
        "topics": one.topics,
        "tenant_id": one.tenant_id.map(|tenant| tenant.to_string()),
        "filter": one.filter,
        "state": one.state.as_str(),
        "state_by": one.state_by.map(Hand::as_str),
        "state_until": one.state_until.map(time),
        "state_reason": one.state_reason,
        "enabled": one.enabled,
        "headers": headers,
        "auth": auth.map(BTreeMap::from_iter),
        "description": one.description,
        "disabled_reason": one.disabled_reason,
        "disabled_by": one.disabled_by.map(Hand::as_str),
        "set_by": BTreeMap::from_iter(set_by),
        "problem": one.problem,
        "verification": one.verification.to_string(),
        "verified_at": one.verified_at.map(time),
        "allowed_rate": one.allowed_rate.map(|rate| rate.to_string()),
        "verification_error": one.verification_error,
        "created_at": one.created_at.map(time),
        "updated_at": one.updated_at.map(time),
        "failing": one.failing,
        "failing_since": one.failing_since.map(time),
        "old_secrets_until": old_secrets_until(one).map(time),
    });
    for option in PolicyOption::of_endpoints() {
        shown[option.name] = json!(option.value(&one.policy));
    }
    shown
}
