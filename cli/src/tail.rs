//! `diesel-outbox tail`: what is delivered, as it is delivered.

use std::time::Duration;

use anyhow::Result;
use diesel_outbox::config::Config;
use diesel_outbox::endpoints::{EndpointError, TestAnswer};
use diesel_outbox::program::{Connection, Forward, MessageRecord, Tail, TailFilter};
use diesel_outbox::{ConfigError, DatabaseError, Outbox, ReasonCode, Status, admin};
use serde_json::{Value, json};

use crate::settings::SettingFlags;
use crate::{output, signals, values};

/// How long to wait when nothing was settled, and before trying a lost database again.
const INTERVAL: Duration = Duration::from_millis(500);
/// The statement timeout.
const PATIENCE: Duration = Duration::from_secs(15);

/// Options of `tail`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Shows each message once for each destination, in the order in which messages were settled, from the \
    ledger: delivered, dead-lettered, and wanted by no destination. A settle that commits late is shown late, if it does \
    so within a minute. Writes nothing into the database.\n\n\
    --forward-to sends what was delivered to another receiver, one message after the other, in the form of the first \
    delivery: same id, content, headers of the message, mode and signing secret, but without headers and authentication of \
    the destination. It needs the payload in the ledger (OUTBOX_LEDGER_PAYLOAD=true). A message that is refused is not sent \
    again."
)]
pub(crate) struct Options {
    /// Only topics that match, such as 'order.*'; may be repeated
    #[arg(long, value_name = "PATTERN")]
    topic: Vec<String>,
    /// Only this destination
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,
    /// Begin with what was settled since this time: 2026-11-21T10:00:00Z, or 2h for two hours ago [default: now]
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Send each delivered message to this URL, too
    #[arg(long, value_name = "URL")]
    forward_to: Option<String>,
    /// Print a line of JSON for each message
    #[arg(long)]
    json: bool,
}

/// What became of a message that was to be forwarded.
enum Forwarded {
    Sent(Box<TestAnswer>),
    NoPayload,
    Failed(String),
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let since = options.since.as_deref();
    let filter = TailFilter {
        topics: options.topic.clone(),
        destination: options.destination.clone(),
        since: since
            .map(|text| values::time("--since", text))
            .transpose()?,
    };
    let (url, is_json) = (options.forward_to.clone(), options.json);
    signals::or_until_signal(move || follow(&config, filter, url.as_deref(), is_json))
}

fn follow(
    config: &Config,
    filter: TailFilter,
    forward_to: Option<&str>,
    is_json: bool,
) -> Result<()> {
    let outbox = Outbox::new(&config.table.to_string())?;
    let mut forward = forward_to
        .map(|url| Forward::new(outbox.endpoints(), config, url))
        .transpose()?;
    let mut first = open(config)?;
    first.run(|conn| admin::check_schema(conn, &config.table))?;
    let mut tail = first.run(|conn| Tail::new(conn, filter))?;
    // A role without the right to read, for example, never gets further.
    let mut rows = first.run(|conn| tail.next(conn, &config.table))?;
    let mut conn = Some(first);
    eprintln!("following the ledger of {} (Ctrl-C ends)", config.table);
    loop {
        for row in &rows {
            let forwarded = match &mut forward {
                Some(forward) if row.status == Status::Delivered => loop {
                    let sent = connected(&mut conn, config).and_then(|conn| {
                        conn.run(|conn| match forward.send(conn, row) {
                            Err(EndpointError::Database(error)) => Err(error.into()),
                            sent => Ok(sent),
                        })
                    });
                    match sent {
                        Ok(sent) => break Some(forwarded(sent)),
                        Err(error) => lost(&mut conn, &error),
                    }
                    std::thread::sleep(INTERVAL);
                },
                _ => None,
            };
            output::line(match is_json {
                true => as_json(row, forwarded.as_ref()).to_string(),
                false => as_line(row, forwarded.as_ref()),
            })?;
        }
        if rows.is_empty() {
            std::thread::sleep(INTERVAL);
        }
        let read = connected(&mut conn, config)
            .and_then(|conn| conn.run(|conn| tail.next(conn, &config.table)));
        rows = read.unwrap_or_else(|error| {
            lost(&mut conn, &error);
            Vec::new()
        });
    }
}

fn open(config: &Config) -> Result<Connection, DatabaseError> {
    let url = config
        .database_url()
        .map_err(|error: ConfigError| DatabaseError::Connect(error.to_string()))?;
    Connection::open(url, "tail", PATIENCE)
}

/// The connection, opened again if it was lost.
fn connected<'c>(
    conn: &'c mut Option<Connection>,
    config: &Config,
) -> Result<&'c mut Connection, DatabaseError> {
    match conn {
        Some(conn) => Ok(conn),
        None => Ok(conn.insert(open(config)?)),
    }
}

fn lost(conn: &mut Option<Connection>, error: &DatabaseError) {
    *conn = None;
    let text = format!("cannot read the ledger, trying again: {error}");
    eprintln!("{}", output::shown(&text));
}

fn forwarded(sent: Result<Option<TestAnswer>, EndpointError>) -> Forwarded {
    match sent {
        Ok(Some(answer)) => Forwarded::Sent(Box::new(answer)),
        Ok(None) => Forwarded::NoPayload,
        Err(error) => Forwarded::Failed(error.to_string()),
    }
}

fn as_line(row: &MessageRecord, forwarded: Option<&Forwarded>) -> String {
    let mut words = vec![
        row.settled_at.clone().unwrap_or_default(),
        row.topic.clone(),
    ];
    if !row.destination.is_empty() {
        words.push(row.destination.clone());
    }
    words.push(match row.attempts {
        0 | 1 => row.status.to_string(),
        attempts => format!("{} after {attempts} attempts", row.status),
    });
    words.extend(row.http_status.map(|status| status.to_string()));
    words.extend(row.reason.clone());
    words.extend(row.ordering_key.as_ref().map(|key| format!("key={key}")));
    words.push(row.message_id.to_string());
    words.extend(forwarded.map(|forwarded| {
        match forwarded {
            Forwarded::NoPayload => {
                "-> not forwarded: the ledger has not kept the payload (OUTBOX_LEDGER_PAYLOAD)"
                    .to_owned()
            }
            Forwarded::Failed(error) => format!("-> not forwarded: {error}"),
            Forwarded::Sent(answer) => {
                let took = answer.took.as_millis();
                match (answer.http_status, &answer.error) {
                    (Some(status), _) => format!("-> {status} after {took} ms"),
                    (None, error) => format!("-> {}", error.as_deref().unwrap_or("no response")),
                }
            }
        }
    }));
    output::shown(&words.join("  "))
}

fn as_json(row: &MessageRecord, forwarded: Option<&Forwarded>) -> Value {
    let forwarded = forwarded.map(|forwarded| match forwarded {
        Forwarded::NoPayload => json!({ "error": "the ledger has not kept the payload" }),
        Forwarded::Failed(error) => json!({ "error": error }),
        Forwarded::Sent(answer) => json!({
            "http_status": answer.http_status,
            "took_ms": answer.took.as_millis() as u64,
            "reason": answer.reason.map(ReasonCode::as_str),
            "error": answer.error,
        }),
    });
    json!({
        "settled_at": row.settled_at,
        "sequence": row.sequence,
        "message_id": row.message_id.to_string(),
        "topic": row.topic,
        "destination": row.destination,
        "status": row.status,
        "ordering_key": row.ordering_key,
        "tenant_id": row.tenant_id.map(|tenant| tenant.to_string()),
        "attempts": row.attempts,
        "http_status": row.http_status,
        "reason": row.reason,
        "error": row.last_error,
        "has_payload": row.has_payload,
        "forwarded": forwarded,
    })
}
