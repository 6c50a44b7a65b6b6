//! `diesel-outbox check`

use std::time::Duration;

use anyhow::{Result, bail};
use diesel_outbox::admin::{self, LiveTopic};
use diesel_outbox::{Config, HttpDispatcher};
use serde_json::json;

use crate::output;
use crate::settings::SettingFlags;

/// Options of `check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Show it as JSON
    #[arg(long)]
    json: bool,
}

/// One thing that was looked at.
struct Finding {
    what: &'static str,
    is_good: bool,
    detail: String,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    // Bad settings end here, with the exit code of bad settings.
    let config = settings.load()?;
    config.database_url()?;
    let dispatcher = HttpDispatcher::new(&config)?;
    let mut findings = vec![good("settings", config.summary()), routes(&config)];
    findings.extend(database(&config, &dispatcher));
    let problems = findings.iter().filter(|finding| !finding.is_good).count();
    if options.json {
        output::json(&json!({
            "ok": problems == 0,
            "findings": findings.iter().map(|finding| json!({
                "what": finding.what,
                "ok": finding.is_good,
                "detail": finding.detail,
            })).collect::<Vec<_>>(),
        }))?;
    } else {
        for finding in &findings {
            let mark = if finding.is_good {
                "ok     "
            } else {
                "PROBLEM"
            };
            output::line(format!(
                "{mark} {:<9} {}",
                finding.what,
                output::shown(&finding.detail)
            ))?;
        }
    }
    if problems > 0 {
        bail!("{problems} of {} checks failed", findings.len());
    }
    Ok(())
}

fn good(what: &'static str, detail: String) -> Finding {
    Finding {
        what,
        is_good: true,
        detail,
    }
}

fn bad(what: &'static str, detail: String) -> Finding {
    Finding {
        what,
        is_good: false,
        detail,
    }
}

fn routes(config: &Config) -> Finding {
    let mut lines: Vec<String> = config
        .routes
        .iter()
        .map(|route| format!("{} -> {}", route.topic, route.to.join(" and ")))
        .collect();
    if config.url.is_some() {
        lines.push("every other topic -> OUTBOX_URL".to_owned());
    }
    if lines.is_empty() {
        return bad(
            "routes",
            "there is no route and no OUTBOX_URL: nothing can be sent".to_owned(),
        );
    }
    good("routes", lines.join("; "))
}

fn database(config: &Config, dispatcher: &HttpDispatcher) -> Vec<Finding> {
    let mut conn = match config
        .database_url()
        .map_err(anyhow::Error::from)
        .and_then(|url| Ok(admin::connect(url, "check", Duration::from_secs(30))?))
    {
        Ok(conn) => conn,
        Err(error) => return vec![bad("database", error.to_string())],
    };
    let mut findings = match admin::server_version(&mut conn) {
        Ok(version) => vec![good(
            "database",
            format!("connected to PostgreSQL {version}"),
        )],
        Err(error) => return vec![bad("database", error.to_string())],
    };
    if let Err(error) = admin::check_schema(&mut conn, &config.table) {
        findings.push(bad("schema", error.to_string()));
        return findings;
    }
    findings.push(good(
        "schema",
        format!("outbox {} has all that this version uses", config.table),
    ));
    match admin::topics(&mut conn, &config.table) {
        Ok(topics) => findings.extend(topics.iter().map(|topic| goes(topic, dispatcher))),
        Err(error) => findings.push(bad("topics", error.to_string())),
    }
    findings
}

fn goes(topic: &LiveTopic, dispatcher: &HttpDispatcher) -> Finding {
    let (topic, destination) = (&topic.topic, &topic.destination);
    let found = dispatcher.destinations_of(topic, destination);
    if !found.is_empty() {
        return good("topic", format!("{topic} -> {}", found.join(" and ")));
    }
    let why = if destination.is_empty() {
        "nothing serves it (NO_ROUTE)".to_owned()
    } else {
        format!("no destination is called {destination:?} (UNKNOWN_DESTINATION)")
    };
    bad("topic", format!("{topic} waits and {why}"))
}
