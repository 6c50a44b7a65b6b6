//! `diesel-outbox listen`: a receiver to try deliveries with. It verifies, prints, and can fail on purpose.

mod feed;

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use diesel_outbox::ConfigError;
use diesel_outbox::program;
use diesel_outbox::receive::{self, CloudEvent, Headers, ReceiveError, Verifier};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::admin::server::{Request, Response, Server};
use crate::settings::SettingFlags;
use crate::{output, signals};

/// The largest request of a relay with default settings, and more.
const MOST_BODY_BYTES: usize = 16 * 1024 * 1024;
/// The server gives a response up after this time.
const LONGEST_DELAY: Duration = Duration::from_secs(240);
/// The topic of the first question to an endpoint.
const VERIFICATION: &str = "outbox.verification";

/// Options of `listen`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The port; 0: any free one
    #[arg(long, default_value_t = 8080)]
    port: u16,

    /// The address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    address: IpAddr,

    /// The statuses of the attempts of each message, such as 500,500,200; later attempts get the last
    #[arg(long, value_name = "STATUS", value_delimiter = ',', default_value = "200",
        value_parser = clap::value_parser!(u16).range(200..=599))]
    answer: Vec<u16>,

    /// How long each response takes, such as 2s
    #[arg(long, value_name = "DURATION")]
    delay: Option<humantime::Duration>,

    #[command(flatten)]
    feed: feed::FeedOptions,

    /// Print a line of JSON for each event
    #[arg(long)]
    json: bool,
}

/// `settings`: secrets or public keys to verify signatures with; without, everything is accepted.
pub(crate) fn run(options: Options, settings: &SettingFlags) -> Result<()> {
    if let Some(url) = &options.feed.feed {
        return feed::run(url, &options.feed, settings.load()?, options.json);
    }
    let signals = signals::channel()?;
    let delay = options.delay.map_or(Duration::ZERO, Into::into);
    if delay > LONGEST_DELAY {
        let most = humantime::format_duration(LONGEST_DELAY);
        return Err(ConfigError::new("--delay", format!("must be at most {most}")).into());
    }
    let verifier: Option<Verifier> = secrets(settings)?.map(|text| text.parse()).transpose()?;
    let address = SocketAddr::new(options.address, options.port);
    let listener = TcpListener::bind(address).map_err(|error| {
        ConfigError::new("--port", format!("cannot listen on {address}: {error}"))
    })?;
    let address = listener
        .local_addr()
        .context("the address of the listener")?;
    let receiver = Arc::new(Receiver {
        verifier,
        options,
        delay,
        seen: Mutex::default(),
    });
    let shared = Arc::clone(&receiver);
    let server = Server::start(
        listener,
        Arc::new(move |request, _| shared.answer(&request).into()),
        MOST_BODY_BYTES,
    )?;
    eprintln!("listening on http://{address}/ (Ctrl-C ends)");
    // The sender lives as long as the process.
    let _ = signals.recv();
    drop(server);
    let seen = receiver.seen();
    eprintln!(
        "{} events, {} of them repeated; {} out of order, {} refused",
        seen.events, seen.repeated, seen.out_of_order, seen.refused
    );
    Ok(())
}

/// The secrets and public keys of the flag, of the variable, or of the file that the variable names.
fn secrets(settings: &SettingFlags) -> Result<Option<String>, ConfigError> {
    const FILE: &str = "OUTBOX_SECRET_FILE";
    let variables = program::relevant_variables()?;
    let value = |name: &str| {
        let found = variables.iter().find(|(variable, _)| variable == name);
        found.map(|(_, value)| value.clone())
    };
    let given = settings.get("OUTBOX_SECRET").map(str::to_owned);
    match (given.or_else(|| value("OUTBOX_SECRET")), value(FILE)) {
        (None, Some(path)) => std::fs::read_to_string(&path)
            .map(Some)
            .map_err(|error| ConfigError::new(FILE, format!("cannot read {path:?}: {error}"))),
        (given, _) => Ok(given),
    }
}

struct Receiver {
    verifier: Option<Verifier>,
    options: Options,
    delay: Duration,
    seen: Mutex<Seen>,
}

/// What has arrived so far. It grows with the number of messages, as a record for tests may.
#[derive(Default)]
struct Seen {
    attempts: HashMap<String, usize>,
    accepted: HashSet<String>,
    order: Order,
    events: u64,
    repeated: u64,
    out_of_order: u64,
    refused: u64,
}

/// What is special about an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Marks {
    attempt: usize,
    status: u16,
    is_repeat: bool,
    is_out_of_order: bool,
}

impl Seen {
    /// Learns an event that arrives, to be answered with the status of its attempt.
    fn add(&mut self, event: &CloudEvent<'_>, answers: &[u16]) -> Marks {
        let id = event.id.as_ref();
        let attempt = self.attempts.entry(id.to_owned()).or_default();
        *attempt += 1;
        let (attempt, status) = (
            *attempt,
            *answers.get(*attempt - 1).or(answers.last()).unwrap_or(&200),
        );
        let is_repeat = self.accepted.contains(id);
        let is_accepted = (200..=299).contains(&status);
        let is_out_of_order = self.order.add(event, is_accepted) && !is_repeat;
        if is_accepted {
            self.accepted.insert(id.to_owned());
        }
        self.events += 1;
        self.repeated += u64::from(is_repeat);
        self.out_of_order += u64::from(is_out_of_order);
        Marks {
            attempt,
            status,
            is_repeat,
            is_out_of_order,
        }
    }
}

/// The highest accepted sequence of each ordering key.
#[derive(Default)]
struct Order(HashMap<String, i64>);

impl Order {
    /// Returns whether a later event of the key was accepted before.
    fn add(&mut self, event: &CloudEvent<'_>, is_accepted: bool) -> bool {
        let sequence = event.extensions.get("sequence");
        let sequence = sequence.and_then(|one| one.parse::<i64>().ok());
        let (Some(key), Some(sequence)) = (event.ordering_key(), sequence) else {
            return false;
        };
        let last = self.0.get(key).map_or(sequence, |last| sequence.max(*last));
        if is_accepted {
            self.0.insert(key.to_owned(), last);
        }
        sequence < last
    }
}

impl Receiver {
    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, request: &Request) -> Response {
        if request.method() != Method::POST {
            return respond(200, "diesel-outbox listen: POST events here\n");
        }
        let pairs = request.headers().iter().filter_map(|(name, value)| {
            let value = value.to_str().ok()?;
            Some((name.as_str(), value))
        });
        let (headers, body) = (Headers::new(pairs), request.body());
        let events = match &self.verifier {
            Some(verifier) => verifier.events(&headers, body),
            None => receive::events(&headers, body).map_err(ReceiveError::from),
        };
        let answer = match events {
            Ok(events) => self.accept(&events),
            Err(error) => self.refuse(&error),
        };
        if !self.delay.is_zero() {
            std::thread::sleep(self.delay);
        }
        answer
    }

    fn refuse(&self, error: &ReceiveError) -> Response {
        self.seen().refused += 1;
        let line = match self.options.json {
            true => json!({ "refused": error.to_string(), "status": error.status() }).to_string(),
            false => format!("refused with {}: {error}", error.status()),
        };
        print(&line);
        respond(error.status(), format!("{error}\n"))
    }

    /// The response has the status of the first event: all events of a request share it.
    fn accept(&self, events: &[CloudEvent<'_>]) -> Response {
        let mut answer = None;
        for event in events {
            let marks = self.seen().add(event, &self.options.answer);
            print(&match self.options.json {
                true => as_json(event, marks).to_string(),
                false => as_line(event, marks, self.verifier.is_some()),
            });
            let challenge = || {
                let data: Value = serde_json::from_str(event.json()?).ok()?;
                let is_question = event.event_type == VERIFICATION;
                data["challenge"]
                    .as_str()
                    .filter(|_| is_question)
                    .map(str::to_owned)
            };
            answer.get_or_insert_with(|| (marks.status, challenge().unwrap_or_default()));
        }
        let (status, body) = answer.unwrap_or((200, String::new()));
        respond(status, body)
    }
}

/// Only the status and the body: a `Retry-After`, as the pages send with 429, would pause the destination.
fn respond(status: u16, body: impl Into<Vec<u8>>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
    response
}

/// Whoever reads the output may have gone; the responses go on.
fn print(line: &str) {
    let _ = output::line(output::shown(line));
}

fn as_line(event: &CloudEvent<'_>, marks: Marks, is_verified: bool) -> String {
    let answer = match marks.status {
        200..=299 => String::new(),
        status => format!(" -> {status}"),
    };
    let attempt = format!("attempt {}", marks.attempt);
    let notes = [
        (is_verified, "verified"),
        (marks.attempt > 1 && !marks.is_repeat, &attempt),
        (marks.is_repeat, "REPEATED"),
        (marks.is_out_of_order, "OUT OF ORDER"),
    ];
    line(event, &answer, &notes)
}

fn as_json(event: &CloudEvent<'_>, marks: Marks) -> Value {
    let mut shown = fields(event, marks.is_repeat, marks.is_out_of_order);
    shown["attempt"] = json!(marks.attempt);
    shown["status"] = json!(marks.status);
    shown
}

/// An event as a line: the answer follows its payload, and then the notes that hold.
fn line(event: &CloudEvent<'_>, answer: &str, notes: &[(bool, &str)]) -> String {
    let mut words = vec![event.event_type.to_string()];
    words.extend(event.ordering_key().map(|key| format!("key={key}")));
    words.push(format!("{}{answer}", event.json().unwrap_or("(no JSON)")));
    let notes = notes.iter().filter(|(holds, _)| *holds);
    words.extend(notes.map(|(_, note)| (*note).to_owned()));
    words.join("  ")
}

/// The fields of an event that arrived in either way.
fn fields(event: &CloudEvent<'_>, is_repeat: bool, is_out_of_order: bool) -> Value {
    let data = event.json();
    let data = data.and_then(|text| serde_json::from_str::<Value>(text).ok());
    json!({
        "topic": event.event_type,
        "id": event.id,
        "ordering_key": event.ordering_key(),
        "sequence": event.extensions.get("sequence"),
        "data": data,
        "repeated": is_repeat,
        "out_of_order": is_out_of_order,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_and_disorder_are_seen() {
        let mut seen = Seen::default();
        let mut add = |id: &str, sequence: i64, answers: &[u16]| {
            let body = format!(
                r#"{{"specversion":"1.0","id":"{id}","source":"/","type":"t","sequence":"{sequence}","partitionkey":"k","data":1}}"#
            );
            let headers = Headers::new([("content-type", "application/cloudevents+json")]);
            let events = receive::events(&headers, body.as_bytes()).expect("events");
            let Marks {
                attempt,
                status,
                is_repeat,
                is_out_of_order,
            } = seen.add(&events[0], answers);
            (attempt, status, is_repeat, is_out_of_order)
        };
        let fails_twice = [500, 503, 204];
        assert_eq!(add("a", 1, &fails_twice), (1, 500, false, false));
        assert_eq!(add("a", 1, &fails_twice), (2, 503, false, false));
        assert_eq!(
            add("b", 2, &[200]),
            (1, 200, false, false),
            "a was not accepted"
        );
        assert_eq!(add("a", 1, &fails_twice), (3, 204, false, true));
        assert_eq!(add("b", 2, &[200]), (2, 200, true, false));
        assert_eq!(add("c", 3, &fails_twice), (1, 500, false, false));
        assert_eq!(add("a", 1, &fails_twice), (4, 204, true, false));
    }
}
