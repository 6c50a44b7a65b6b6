//! Log lines, as text or JSON, with their key-values.

use std::io::Write;

use diesel_outbox::Config;
use diesel_outbox::config::LogFormat;
use env_logger::fmt::Formatter;
use log::Record;
use log::kv::{Error, Key, Value, VisitSource};
use serde_json::Map;

/// Starts logging to standard error. `RUST_LOG` chooses; the default is `info`.
pub(crate) fn start(config: &Config) {
    let filter = env_logger::Env::default().default_filter_or("info");
    let mut builder = env_logger::Builder::from_env(filter);
    match config.log_format {
        LogFormat::Text => builder.format(text),
        LogFormat::Json => builder.format(json),
        _ => &mut builder,
    };
    // Refused only when it was started before: then lines go there.
    let _ = builder.try_init();
}

/// At these levels the HTTP library writes down URLs and what goes over the wire, secrets and all.
fn shows_the_wire(record: &Record<'_>) -> bool {
    record.level() >= log::Level::Debug && record.target().starts_with("ureq")
}

fn text(out: &mut Formatter, record: &Record<'_>) -> std::io::Result<()> {
    if shows_the_wire(record) {
        return Ok(());
    }
    let pairs = pairs(record);
    write!(
        out,
        "{} {:<5} {}",
        out.timestamp_millis(),
        record.level(),
        record.args().to_string().replace(['\n', '\r'], " ")
    )?;
    for (key, value) in pairs {
        match value {
            serde_json::Value::String(text) if text.is_empty() => {}
            serde_json::Value::String(text) if is_plain(&text) => write!(out, " {key}={text}")?,
            value => write!(out, " {key}={value}")?,
        }
    }
    writeln!(out)
}

fn is_plain(text: &str) -> bool {
    text.chars()
        .all(|c| c.is_alphanumeric() || "-_.:/@*".contains(c))
}

fn json(out: &mut Formatter, record: &Record<'_>) -> std::io::Result<()> {
    if shows_the_wire(record) {
        return Ok(());
    }
    let mut line = Map::new();
    line.insert("time".to_owned(), out.timestamp_millis().to_string().into());
    line.insert(
        "level".to_owned(),
        record.level().as_str().to_lowercase().into(),
    );
    line.insert("target".to_owned(), record.target().into());
    line.insert("message".to_owned(), record.args().to_string().into());
    line.extend(pairs(record));
    writeln!(out, "{}", serde_json::Value::Object(line))
}

fn pairs(record: &Record<'_>) -> Map<String, serde_json::Value> {
    let mut pairs = Pairs::default();
    // The visitor below refuses nothing.
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
            value.to_string().into()
        };
        self.0.insert(key.to_string(), json);
        Ok(())
    }
}
