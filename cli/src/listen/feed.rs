//! `diesel-outbox listen --feed`: prints the events of a feed as they arrive, for whom nobody can post to.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use diesel_outbox::ConfigError;
use diesel_outbox::config::{Config, Proxy};
use diesel_outbox::feed::{After, Page, Reader};
use diesel_outbox::receive::CloudEvent;
use secrecy::SecretString;
use serde_json::{Value, json};

use super::{Order, fields, line};
use crate::{logging, output, signals};

/// Options of `listen --feed`.
#[derive(Debug, clap::Args)]
pub(super) struct FeedOptions {
    /// Read a feed instead of receiving requests: the URL of its events, .../api/v1/feeds/NAME/events
    #[arg(long, value_name = "URL", requires = "token_file",
        conflicts_with_all = ["port", "address", "answer", "delay"])]
    pub(super) feed: Option<String>,

    /// A file with a token of the feed
    #[arg(long, value_name = "FILE", requires = "feed")]
    token_file: Option<String>,

    /// Where to begin in the feed: begin, end, a cursor, a time (2026-11-21T10:00:00Z), or 2h for two hours ago
    #[arg(
        long,
        value_name = "CURSOR",
        default_value = "begin",
        requires = "feed"
    )]
    after: String,
}

/// `config`: what TLS trusts, and the proxy.
pub(super) fn run(url: &str, options: &FeedOptions, config: Config, as_json: bool) -> Result<()> {
    let after = crate::feed::after(&options.after)?;
    let token = token(options.token_file.as_deref().unwrap_or_default())?;
    let named = |error: ConfigError| match error.key() {
        "url" => ConfigError::new("--feed", error.reason()),
        "proxy" => ConfigError::new("OUTBOX_PROXY", error.reason()),
        _ => ConfigError::new("--token-file", error.reason()),
    };
    let reader = Reader::new(url, token).and_then(|reader| reader.roots(config.tls_roots));
    let reader = reader.and_then(|reader| match config.proxy {
        Proxy::Via(url) => reader.proxy(String::from(url).into()),
        _ => Ok(reader),
    });
    let reader = reader.map_err(named)?;
    // Retries of the reader.
    logging::start(&Config::default())?;
    eprintln!("reading {url} (Ctrl-C ends)");
    let seen = Arc::new(Mutex::new(FeedSeen::default()));
    let shared = Arc::clone(&seen);
    let ended = signals::or_until_signal(move || read(&reader, after, &shared, as_json));
    eprintln!("{}", lock(&seen).summary());
    // A gateway may serve it elsewhere.
    ended.map_err(|error| match url.ends_with("/events") {
        true => error,
        false => error.context("the URL of a feed usually ends with /api/v1/feeds/NAME/events"),
    })
}

fn token(path: &str) -> Result<SecretString, ConfigError> {
    let bad = |reason: String| ConfigError::new("--token-file", reason);
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|error| bad(format!("cannot read {path:?}: {error}")))?;
    match text.trim() {
        "" => Err(bad(format!("{path:?} is empty"))),
        token => Ok(token.into()),
    }
}

fn lock(seen: &Mutex<FeedSeen>) -> std::sync::MutexGuard<'_, FeedSeen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prints events until the feed cannot be read. The reader refuses pages with a hole.
fn read(reader: &Reader, mut after: After, seen: &Mutex<FeedSeen>, as_json: bool) -> Result<()> {
    loop {
        let page = reader.page(after)?;
        for event in &page.events {
            let marks = lock(seen).add(event);
            output::line(output::shown(&match as_json {
                true => as_json_line(event, marks).to_string(),
                false => as_line(event, marks),
            }))?;
        }
        lock(seen).end_of(&page);
        after = After::Cursor(page.next);
    }
}

/// What has arrived so far. It grows with the number of events, as a record for tests may.
#[derive(Default)]
struct FeedSeen {
    ids: HashSet<String>,
    order: Order,
    /// The first and the last position.
    positions: Option<(i64, i64)>,
    next: Option<String>,
    repeated: u64,
    out_of_order: u64,
}

/// What is special about an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FeedMarks {
    is_repeat: bool,
    is_out_of_order: bool,
}

impl FeedSeen {
    fn add(&mut self, event: &CloudEvent<'_>) -> FeedMarks {
        let is_out_of_order = self.order.add(event, true);
        if let Some(position) = event.position() {
            let (first, _) = self.positions.unwrap_or((position, position));
            self.positions = Some((first, position));
        }
        let is_repeat = !self.ids.insert(event.id.clone().into_owned());
        self.repeated += u64::from(is_repeat);
        self.out_of_order += u64::from(is_out_of_order);
        FeedMarks {
            is_repeat,
            is_out_of_order,
        }
    }

    fn end_of(&mut self, page: &Page) {
        self.next = Some(page.next.to_string());
    }

    fn summary(&self) -> String {
        let read = match self.positions {
            Some((first, last)) => format!(
                "{} at the positions {first} to {last} without a gap, {} repeated, {} out of order",
                output::counted(last.abs_diff(first) + 1, "event", "events"),
                self.repeated,
                self.out_of_order
            ),
            None => "no events".to_owned(),
        };
        match &self.next {
            Some(next) => format!("{read}; to continue: --after {next}"),
            None => read,
        }
    }
}

fn as_line(event: &CloudEvent<'_>, marks: FeedMarks) -> String {
    let notes = [
        (event.extensions.contains_key("expunged"), "expunged"),
        (marks.is_repeat, "REPEATED"),
        (marks.is_out_of_order, "OUT OF ORDER"),
    ];
    let position = event.position().unwrap_or_default();
    format!("{position}  {}", line(event, "", &notes))
}

fn as_json_line(event: &CloudEvent<'_>, marks: FeedMarks) -> Value {
    let mut shown = fields(event, marks.is_repeat, marks.is_out_of_order);
    shown["position"] = json!(event.position());
    shown
}
