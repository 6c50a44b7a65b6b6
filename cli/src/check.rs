//! `diesel-outbox check`

mod catalogue;
mod destinations;
mod routes;
mod secrets;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use diesel::PgConnection;
use diesel_outbox::admin::{self, Unserved};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, BlockedKey, LeaseRow, LiveTopic, Severity, WakeUp};
use diesel_outbox::{DatabaseError, HttpDispatcher, Status};
use serde_json::{Value, json};

use self::catalogue::Checked;
use crate::exit::with_advice;
use crate::settings::SettingFlags;
use crate::{output, pauses};

/// Options of `check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,

    /// Also compare all stored messages with the types of the application: a catalogue of events as JSON
    #[arg(long, value_name = "FILE")]
    catalogue: Option<PathBuf>,
}

/// The most blocked keys that are read.
const MOST_KEYS: i64 = 100;

/// The result of one check.
struct Finding {
    what: &'static str,
    level: Level,
    detail: String,
    /// What to do.
    advice: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Good,
    /// Could not be checked.
    Skipped,
    /// Works, but may be unintended.
    Warning,
    Problem,
}

impl Level {
    fn as_str(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Skipped => "skipped",
            Self::Warning => "warning",
            Self::Problem => "PROBLEM",
        }
    }
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    // Bad settings end the command here, with exit code 2.
    let config = settings.load()?;
    config.database_url()?;
    let catalogue = match &options.catalogue {
        Some(path) => Some(Checked::read(path)?),
        None => None,
    };
    let dispatcher = HttpDispatcher::new(&config)?;
    let mut findings = vec![good("settings", program::summary(&config))];
    findings.extend(routes::findings(&config));
    findings.extend(destinations::findings(&config));
    findings.extend(secrets::findings(&config));
    findings.extend(database(&config, &dispatcher, catalogue.as_ref()));
    if options.json {
        output::json(&as_json(&config, &findings))?;
    } else {
        show(&findings)?;
    }
    let problems = count_problems(&findings);
    if problems > 0 {
        bail!("{problems} of {} checks failed", findings.len());
    }
    Ok(())
}

fn count_problems(findings: &[Finding]) -> usize {
    findings
        .iter()
        .filter(|finding| finding.level == Level::Problem)
        .count()
}

fn as_json(config: &Config, findings: &[Finding]) -> Value {
    let finding = |finding: &Finding| {
        json!({
            "what": finding.what,
            "ok": finding.level != Level::Problem,
            "level": finding.level.as_str().to_lowercase(),
            "detail": finding.detail,
            "advice": finding.advice,
        })
    };
    json!({
        "ok": count_problems(findings) == 0,
        "findings": findings.iter().map(finding).collect::<Vec<_>>(),
        "routes": routes::as_json(config),
        "destinations": destinations::as_json(config),
    })
}

fn show(findings: &[Finding]) -> Result<()> {
    for finding in findings {
        let (level, detail) = (finding.level.as_str(), output::shown(&finding.detail));
        output::line(format!("{level:<7} {:<11} {detail}", finding.what))?;
        if let Some(advice) = &finding.advice {
            output::line(format!("{:<20}-> {}", "", output::shown(advice)))?;
        }
    }
    Ok(())
}

impl Finding {
    fn new(what: &'static str, level: Level, detail: impl Into<String>) -> Self {
        Self {
            what,
            level,
            detail: detail.into(),
            advice: None,
        }
    }

    fn advise(self, advice: impl Into<String>) -> Self {
        let advice = Some(advice.into());
        Self { advice, ..self }
    }
}

fn good(what: &'static str, detail: impl Into<String>) -> Finding {
    Finding::new(what, Level::Good, detail)
}

fn warning(what: &'static str, detail: impl Into<String>) -> Finding {
    Finding::new(what, Level::Warning, detail)
}

fn bad(what: &'static str, detail: impl Into<String>) -> Finding {
    Finding::new(what, Level::Problem, detail)
}

/// A check that the database refused. A right that the role lacks is no problem of the outbox.
fn unchecked(what: &'static str, error: &impl std::fmt::Display) -> Finding {
    let text = error.to_string();
    // Diesel does not pass on the code of this error, and a server in another language has other words.
    let level = match text.contains("permission denied for ") {
        true => Level::Skipped,
        false => Level::Problem,
    };
    Finding::new(what, level, format!("could not be checked: {text}"))
}

fn database(
    config: &Config,
    dispatcher: &HttpDispatcher,
    catalogue: Option<&Checked>,
) -> Vec<Finding> {
    let mut conn = match config
        .database_url()
        .map_err(anyhow::Error::from)
        .and_then(|url| Ok(program::connect(url, "check", Duration::from_secs(30))?))
    {
        Ok(conn) => conn,
        Err(error) => return vec![bad("database", error.to_string())],
    };
    let mut findings = match program::server_version(&mut conn) {
        Ok(version) => vec![good(
            "database",
            format!("connected to PostgreSQL {version}"),
        )],
        Err(error) => return vec![bad("database", error.to_string())],
    };
    if let Err(error) = admin::check_schema(&mut conn, &config.table) {
        findings.push(bad("schema", with_advice(&error.into())));
        return findings;
    }
    findings.push(good(
        "schema",
        format!(
            "outbox {} has everything that this version uses",
            config.table
        ),
    ));
    findings.push(match program::missing_rights(&mut conn, &config.table) {
        Ok(missing) if missing.is_empty() => good(
            "rights",
            "the role has all rights that a relay needs",
        ),
        Ok(missing) => bad("rights", format!("missing: {}", missing.join("; "))).advise(
            "GRANT the role outbox_relay, which `diesel-outbox migrate --print --roles` prints, or grant what is missing",
        ),
        Err(error) => bad("rights", error.to_string()),
    });
    findings.push(wake_up(program::wake_up(&mut conn, config), config));
    match program::diagnose(&mut conn, config) {
        Ok(found) => findings.extend(found.into_iter().map(of_the_doctor)),
        Err(error) => findings.push(bad("doctor", error.to_string())),
    }
    findings.extend(secrets::at_rest(&mut conn, config));
    match topics(&mut conn, config, dispatcher) {
        Ok(topics) => findings.extend(topics),
        Err(error) => findings.push(unchecked("topics", &error)),
    }
    match program::blocked_keys(&mut conn, &config.table, MOST_KEYS) {
        Ok(keys) => findings.extend(keys_that_wait(&keys)),
        Err(error) => findings.push(unchecked("keys", &error)),
    }
    match admin::pauses(&mut conn, &config.table) {
        Ok(pauses) => findings.extend(pauses.iter().map(|pause| {
            let sentence = pauses::sentence(pause);
            // A pause that expires is a temporary failure of a receiver.
            match pause.left {
                Some(_) => warning("pause", sentence),
                None => bad("pause", sentence).advise(format!(
                    "once the cause is mended: `diesel-outbox resume {} {}`",
                    pause.kind.as_str(),
                    output::name(&pause.name)
                )),
            }
        })),
        Err(error) => findings.push(unchecked("pause", &error)),
    }
    if let Some(catalogue) = catalogue {
        findings.extend(catalogue.findings(&mut conn, config));
    }
    findings
}

/// Keys blocked by a dead letter need an operator. Other keys continue on their own.
fn keys_that_wait(keys: &[BlockedKey]) -> Vec<Finding> {
    let waits = |is_ours: fn(&&BlockedKey) -> bool, for_what: &str| {
        let keys: Vec<&BlockedKey> = keys.iter().filter(is_ours).collect();
        let first = keys.first()?;
        let number = match keys.len() {
            1 => "1 ordering key is blocked".to_owned(),
            number => format!("{number} ordering keys are blocked"),
        };
        let detail = format!(
            "{number} by {for_what}, for example {:?} by {} ({})",
            output::name(&first.ordering_key),
            first.sequence,
            first
                .waits
                .as_deref()
                .or(first.reason.as_deref())
                .unwrap_or("delayed"),
        );
        Some((detail, first.sequence))
    };
    let held = waits(|key| key.status == Status::Dead, "a dead letter");
    let closed = waits(
        |key| key.waits.is_some(),
        "a due message that cannot be sent",
    );
    let late = waits(
        |key| key.status != Status::Dead && key.waits.is_none(),
        "a retry or a delayed message",
    );
    let held = held.map(|(detail, sequence)| {
        warning("keys", detail).advise(format!(
            "`diesel-outbox keys` shows the keys: requeue or discard each dead letter, as in `diesel-outbox dead requeue {sequence}`"
        ))
    });
    let closed = closed.map(|(detail, sequence)| {
        warning("keys", detail).advise(format!(
            "`diesel-outbox message show {sequence}` says why the first message waits"
        ))
    });
    let late = late.map(|(detail, _)| good("keys", detail));
    held.into_iter().chain(closed).chain(late).collect()
}

fn of_the_doctor(finding: program::Finding) -> Finding {
    Finding {
        what: finding.check,
        level: match finding.severity {
            Severity::Ok => Level::Good,
            Severity::Skipped => Level::Skipped,
            Severity::Error => Level::Problem,
            _ => Level::Warning,
        },
        detail: finding.what,
        advice: finding.advice,
    }
}

/// Without wake-ups, polling finds messages a little later.
fn wake_up(found: Result<WakeUp, DatabaseError>, config: &Config) -> Finding {
    let polls = format!(
        "the relay polls for new messages every {:?}",
        config.poll_interval
    );
    let why = match found {
        Ok(WakeUp::Listening) => return good("wake-up", "a commit wakes the relay"),
        Ok(WakeUp::Off) => return good("wake-up", format!("the listener is off: {polls}")),
        Ok(WakeUp::Pooled) => {
            "the connection leads through a pooler (set OUTBOX_LISTENER_URL to a direct connection)"
                .to_owned()
        }
        Ok(WakeUp::NoTrigger) => "the trigger outbox_wake is missing or disabled".to_owned(),
        Ok(other) => format!("{other:?}"),
        Err(error) => format!("the listener cannot connect: {error}"),
    };
    warning("wake-up", format!("{why}: {polls}"))
}

/// Where the live messages go, by these settings and by the running relays.
fn topics(
    conn: &mut PgConnection,
    config: &Config,
    dispatcher: &HttpDispatcher,
) -> Result<Vec<Finding>, DatabaseError> {
    let leases = program::leases(conn, &config.table)?;
    // Nothing here says what the relay will serve that is not running now.
    let is_unknown = routes::name_none(config) && !leases.iter().any(LeaseRow::is_alive);
    let topics = program::topics(conn, &config.table)?;
    let found = topics.iter().map(|topic| match is_unknown {
        true => {
            let detail = format!("{} waits for a relay: none is running", topic.topic);
            Finding::new("topic", Level::Skipped, detail)
        }
        false => goes(topic, dispatcher),
    });
    Ok(found.collect())
}

fn goes(live: &LiveTopic, dispatcher: &HttpDispatcher) -> Finding {
    let (topic, destination) = (&live.topic, &live.destination);
    let found = program::destinations_of(dispatcher, topic, destination);
    if !found.is_empty() {
        return good("topic", format!("{topic} -> {}", found.join(" and ")));
    }
    if !live.served_by.is_empty() {
        let relays = live.served_by.join(" and ");
        return good(
            "topic",
            format!("{topic} is served by another relay: {relays}"),
        );
    }
    let missing = match destination.as_str() {
        "" => Unserved::NoRoute,
        name => Unserved::UnknownDestination {
            destination: name.to_owned(),
        },
    };
    let why = live.unserved.as_ref().unwrap_or(&missing);
    let detail = format!("{topic} waits ({}): {why}", program::reason_of(why));
    bad("topic", detail).advise(program::next_step(why, live.waiting))
}
