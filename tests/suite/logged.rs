//! Captures what the relays of this process log.

use std::fmt::Write;
use std::sync::{Mutex, Once, PoisonError};

use log::kv::{Error, Key, Value, VisitSource};

/// The events whose lines are kept.
const KEPT: [&str; 5] = [
    "dispatch_panic",
    "handler_stuck",
    "handler_late",
    "relay_started",
    "listener_without_url",
];

/// The message of each line, and its keys and values. One list for the whole process.
struct Lines(Mutex<Vec<(String, String)>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl log::Log for Lines {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Info
    }

    fn log(&self, record: &log::Record<'_>) {
        let event = record.key_values().get("event".into());
        let event = event.map_or_else(String::new, |event| event.to_string());
        if KEPT.contains(&event.as_str()) {
            let mut line = Line(record.args().to_string());
            record
                .key_values()
                .visit(&mut line)
                .expect("the values are written");
            let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            lines.push((event, line.0));
        }
    }

    fn flush(&self) {}
}

struct Line(String);

impl<'kvs> VisitSource<'kvs> for Line {
    fn visit_pair(&mut self, key: Key<'kvs>, value: Value<'kvs>) -> Result<(), Error> {
        Ok(write!(self.0, " {key}={value}")?)
    }
}

/// Keeps lines from now on.
pub(crate) fn keep() {
    static SET: Once = Once::new();
    SET.call_once(|| {
        log::set_logger(&LINES).expect("no other logger is set");
        log::set_max_level(log::LevelFilter::Info);
    });
}

/// Whether a line of this event contains `what`.
pub(crate) fn is_logged(event: &str, what: &str) -> bool {
    let lines = LINES.0.lock().unwrap_or_else(PoisonError::into_inner);
    lines
        .iter()
        .any(|(of, line)| of == event && line.contains(what))
}
