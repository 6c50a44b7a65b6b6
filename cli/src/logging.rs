//! Log lines with key-value pairs, as text or JSON.

mod lines;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::Write;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use diesel_outbox::config::Config;
use diesel_outbox::program::{self, LogFormat};
use env_logger::Target;
use env_logger::fmt::Formatter;
use log::kv::{Error, Key, Value, VisitSource};
use log::{Level, Record};
use serde_json::Map;

use self::lines::Lines;

/// The most bytes of a message in a log line. Names and errors come from outside, and may be long.
const LONGEST_MESSAGE: usize = 4096;
/// The most bytes of a value in a log line.
const LONGEST_VALUE: usize = 1024;

/// How long the last lines of the process may take.
const LONGEST_FLUSH: Duration = Duration::from_secs(1);

static LINES: Lines = Lines::new();
/// Set once a thread writes the lines.
static LINE: OnceLock<LineFormat> = OnceLock::new();

type LineFormat = fn(&str, &Record<'_>) -> String;

/// Starts logging to standard error, filtered by `RUST_LOG`. Defaults to `info`. No line waits for the reader of standard
/// error: lines that do not fit into a bounded queue are dropped and counted.
///
/// # Errors
///
/// The thread that writes the lines cannot be started.
pub fn start(config: &Config) -> std::io::Result<()> {
    let line: LineFormat = match program::log_format(config) {
        LogFormat::Json => |time, record| json_line(time, record).to_string(),
        _ => text_line,
    };
    if LINE.set(line).is_err() {
        return Ok(());
    }
    std::thread::Builder::new()
        .name("log".to_owned())
        .spawn(move || LINES.write_all(move |dropped| note(line, dropped)))?;
    let filter = env_logger::Env::default().default_filter_or("info");
    let mut builder = env_logger::Builder::from_env(filter);
    builder
        .target(Target::Pipe(Box::new(Queue)))
        .format(move |out, record| write(out, record, line));
    // Fails only if a logger is already installed, which then keeps getting the lines.
    let _ = builder.try_init();
    // The default hook writes to standard error itself: a thread that panics would wait for the reader.
    std::panic::set_hook(Box::new(move |panic| {
        let backtrace = Backtrace::capture();
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        log::error!(event = "panic", thread = thread; "{panic}");
        if backtrace.status() == BacktraceStatus::Captured {
            print(&backtrace.to_string());
        }
        // The process may end with this thread.
        if thread == "main" {
            flush();
        }
    }));
    Ok(())
}

/// How many lines were dropped since the start, because standard error was not read.
pub(crate) fn dropped_lines() -> u64 {
    LINES.lost()
}

/// Waits until the lines so far are written, for at most a second.
pub(crate) fn flush() {
    LINES.flush(LONGEST_FLUSH);
}

/// Prints a text to standard error, after the lines of the log.
pub(crate) fn print_last(text: &str) {
    match LINE.get() {
        Some(_) => print(text),
        None => eprintln!("{text}"),
    }
}

fn print(text: &str) {
    LINES.add(format!("{text}\n").as_bytes());
}

/// The line that says how many were dropped.
fn note(line: LineFormat, dropped: u64) -> Vec<u8> {
    let pairs = [
        ("event", Value::from("log_dropped")),
        ("lines", Value::from(dropped)),
    ];
    let plural = if dropped == 1 { "" } else { "s" };
    let text = line(
        &now(),
        &Record::builder()
            .level(Level::Warn)
            .target(module_path!())
            .key_values(&pairs)
            .args(format_args!(
                "dropped {dropped} line{plural} of the log: standard error was not read fast enough"
            ))
            .build(),
    );
    format!("{text}\n").into_bytes()
}

/// Takes whole lines.
struct Queue;

impl Write for Queue {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        LINES.add(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The current time, in RFC 3339.
fn now() -> String {
    humantime::format_rfc3339_millis(SystemTime::now()).to_string()
}

/// At these levels the HTTP library logs URLs and raw traffic, including secrets.
fn shows_the_wire(record: &Record<'_>) -> bool {
    record.level() >= log::Level::Debug && record.target().starts_with("ureq")
}

fn write(out: &mut Formatter, record: &Record<'_>, line: LineFormat) -> std::io::Result<()> {
    match shows_the_wire(record) {
        true => Ok(()),
        false => writeln!(out, "{}", line(&now(), record)),
    }
}

/// Time, level, message, pairs. Text that could pass for pairs is quoted.
fn text_line(time: &str, record: &Record<'_>) -> String {
    let message = cut(record.args().to_string(), LONGEST_MESSAGE);
    let quotes = message.matches('"').count();
    let message = match message.contains('=') || quotes % 2 == 1 {
        true => format!("{message:?}"),
        false => message.replace(char::is_control, " "),
    };
    let mut line = format!("{time} {:<5} {message}", record.level());
    for (key, value) in pairs(record) {
        let value = match value {
            serde_json::Value::String(text) if text.is_empty() => continue,
            serde_json::Value::String(text) if is_plain(&text) => text,
            serde_json::Value::String(text) => format!("{text:?}"),
            value => value.to_string(),
        };
        line += &format!(" {key}={value}");
    }
    line
}

fn is_plain(text: &str) -> bool {
    text.chars()
        .all(|c| c.is_alphanumeric() || "-_.:/@*".contains(c))
}

/// The line's own keys come first. A pair with one of these keys gets an underscore.
fn json_line(time: &str, record: &Record<'_>) -> serde_json::Value {
    let mut line = Map::new();
    line.insert("time".to_owned(), time.into());
    line.insert(
        "level".to_owned(),
        record.level().as_str().to_lowercase().into(),
    );
    line.insert("target".to_owned(), record.target().into());
    let message = cut(record.args().to_string(), LONGEST_MESSAGE);
    line.insert("message".to_owned(), message.into());
    for (mut key, value) in pairs(record) {
        while line.contains_key(&key) {
            key.push('_');
        }
        line.insert(key, value);
    }
    serde_json::Value::Object(line)
}

/// A text of at most `most` bytes. A shortened text ends with its full length.
fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        let bytes = text.len();
        let end = (0..=most).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        text += &format!("… ({bytes} bytes)");
    }
    text
}

fn pairs(record: &Record<'_>) -> Map<String, serde_json::Value> {
    let mut pairs = Pairs::default();
    if let Some(label) = program::label_of_thread() {
        pairs.0.insert("database".to_owned(), label.into());
    }
    // The visitor below never fails.
    let _ = record.key_values().visit(&mut pairs);
    pairs.0
}

#[derive(Default)]
struct Pairs(Map<String, serde_json::Value>);

impl<'kvs> VisitSource<'kvs> for Pairs {
    fn visit_pair(&mut self, key: Key<'kvs>, value: Value<'kvs>) -> Result<(), Error> {
        let json = if let Some(number) = value.to_u64() {
            number.into()
        } else if let Some(number) = value.to_i64() {
            number.into()
        } else if let Some(switch) = value.to_bool() {
            switch.into()
        } else if let Some(number) = value.to_f64() {
            number.into()
        } else {
            cut(value.to_string(), LONGEST_VALUE).into()
        };
        self.0.insert(key.to_string(), json);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORGED: &str = "x who=root event=admin_login\nEvent: \u{9b}31m\"";

    /// The text line and the JSON line of a record with these pairs.
    fn lines(message: &str, pairs: &[(&str, &str)]) -> (String, serde_json::Value) {
        let text = text_line(
            "T",
            &Record::builder()
                .args(format_args!("{message}"))
                .key_values(&pairs)
                .build(),
        );
        let json = json_line(
            "T",
            &Record::builder()
                .args(format_args!("{message}"))
                .key_values(&pairs)
                .build(),
        );
        (text, json)
    }

    /// R30.
    #[test]
    fn a_pair_never_takes_the_place_of_what_the_line_says_itself() {
        let pairs = [
            ("time", "until resumed"),
            ("level", "none"),
            ("target", "a"),
            ("message", "b"),
            ("message_", "c"),
            ("event", "paused"),
        ];
        let (text, json) = lines("it is paused", &pairs);
        assert!(text.starts_with("T INFO  it is paused"), "{text}");
        let own = ["time", "level", "target", "message", "event"];
        let shown = own.map(|name| json[name].as_str().expect("a text"));
        assert_eq!(shown, ["T", "info", "", "it is paused", "paused"]);
        let given = ["time_", "level_", "target_", "message_", "message__"];
        let mut shown = given.map(|name| json[name].as_str().expect("a text"));
        shown[3..].sort_unstable();
        assert_eq!(shown, ["until resumed", "none", "a", "b", "c"]);
    }

    /// R30.
    #[test]
    fn values_from_outside_forge_no_pair_and_no_line() {
        for (message, pairs) in [
            ("it is paused", [("who", FORGED), ("event", "paused")]),
            (FORGED, [("who", "shop"), ("event", "paused")]),
            ("an \" event", [("who", "shop"), ("event", "paused")]),
        ] {
            let (text, json) = lines(message, &pairs);
            assert!(!text.contains(char::is_control), "{text}");
            assert_eq!(json["message"], message);
            // Text outside quotes is the line's own.
            let mut is_quoted = false;
            let mut is_escaped = false;
            let outside: String = text
                .chars()
                .filter(|c| {
                    is_quoted ^= *c == '"' && !is_escaped;
                    is_escaped = *c == '\\' && !is_escaped;
                    !is_quoted
                })
                .collect();
            assert!(!is_quoted, "{text}");
            let found = |name: &str| outside.matches(name).count();
            assert_eq!(
                (found("event="), found("who="), found("root")),
                (1, 1, 0),
                "{text}"
            );
        }
    }

    #[test]
    fn a_line_is_bounded() {
        let long = "ä".repeat(100_000);
        let (text, json) = lines(&long, &[("destination", &long)]);
        let most = LONGEST_MESSAGE + LONGEST_VALUE + 200;
        assert!(text.len() < most, "{}", text.len());
        assert!(json.to_string().len() < most);
        assert!(text.ends_with("… (200000 bytes)\""), "{text}");
    }
}
