//! `check --catalogue FILE`: stored messages that do not fit the types of the application.
//!
//! The catalogue says what the types are now, the stored messages what they were. A field that the messages have and the
//! type lacks was removed, or renamed: receivers that use it will miss it. A message that the schema refuses shows a type
//! that became narrower: who reads with the new type cannot read the message.

mod compare;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use anyhow::bail;
use diesel::PgConnection;
use diesel_outbox::ConfigError;
use diesel_outbox::catalogue::{Catalogue, EventType};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, KeptIn, StoredPayload};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use super::{Finding, Level, bad, good, unchecked, warning};
use crate::output;

const WHAT: &str = "catalogue";
/// The most messages that are named for one difference.
const MOST_NAMED: usize = 3;
/// The most topics that are named.
const MOST_TOPICS: usize = 10;

/// A catalogue whose schemas can be read.
pub(crate) struct Checked(Catalogue);

impl Checked {
    /// # Errors
    /// The file cannot be read, or has something that is no schema.
    pub(crate) fn read(path: &Path) -> Result<Self, ConfigError> {
        let read = || {
            let text = std::fs::read_to_string(path)?;
            let catalogue: Catalogue = serde_json::from_str(&text)?;
            for event in &catalogue.events {
                if let Some(fault) = compare::fault(&event.schema) {
                    bail!("the schema of {} is not valid: {fault}", event.topic);
                }
            }
            Ok(Self(catalogue))
        };
        read().map_err(|error: anyhow::Error| {
            ConfigError::new("--catalogue", format!("{}: {error:#}", path.display()))
        })
    }

    /// Compares all stored messages.
    pub(super) fn findings(&self, conn: &mut PgConnection, config: &Config) -> Vec<Finding> {
        let mut differences = Differences::new(&self.0);
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {human_pos} messages {per_sec}")
        {
            bar.set_style(style);
        }
        let read = program::for_each_payload(conn, &config.table, |stored| {
            differences.add(&stored);
            bar.inc(1);
        });
        bar.finish_and_clear();
        match read {
            Ok(()) => differences.into_findings(),
            Err(error) => vec![unchecked(WHAT, &error)],
        }
    }
}

/// What is different in this payload, in sentences without its values.
fn differences(event: &EventType, payload: &str) -> BTreeSet<String> {
    match serde_json::from_str::<Value>(payload) {
        Ok(value) => compare::differences(&value, &event.schema),
        Err(_) => BTreeSet::from(["the payload is not JSON that can be read".to_owned()]),
    }
}

/// How many messages have a difference, where they are, and which are the first.
#[derive(Default)]
struct Count {
    places: BTreeMap<KeptIn, u64>,
    first: Vec<uuid::Uuid>,
}

impl Count {
    fn add(&mut self, stored: &StoredPayload) {
        *self.places.entry(stored.kept_in).or_default() += 1;
        if self.first.len() < MOST_NAMED && !self.first.contains(&stored.message_id) {
            self.first.push(stored.message_id);
        }
    }

    fn sum(&self) -> u64 {
        self.places.values().sum()
    }
}

impl std::fmt::Display for Count {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let places: Vec<String> = (self.places.iter())
            .map(|(place, count)| match place {
                KeptIn::Live => format!("{count} waiting"),
                KeptIn::Dead => format!("{count} dead"),
                KeptIn::Ledger => format!("{count} in the ledger"),
            })
            .collect();
        let first: Vec<String> = self.first.iter().map(ToString::to_string).collect();
        write!(f, "{}; for example {}", places.join(", "), first.join(", "))
    }
}

/// What is different in all stored messages.
struct Differences<'a> {
    catalogue: &'a Catalogue,
    by_type: HashMap<(&'a str, u32), &'a EventType>,
    read: u64,
    different: BTreeMap<(String, u32, String), Count>,
    other_versions: BTreeMap<(String, u32), Count>,
    other_topics: BTreeMap<String, u64>,
}

impl<'a> Differences<'a> {
    fn new(catalogue: &'a Catalogue) -> Self {
        let of_type = |event: &'a EventType| ((event.topic.as_str(), event.version), event);
        Self {
            catalogue,
            by_type: catalogue.events.iter().map(of_type).collect(),
            read: 0,
            different: BTreeMap::new(),
            other_versions: BTreeMap::new(),
            other_topics: BTreeMap::new(),
        }
    }

    fn add(&mut self, stored: &StoredPayload) {
        let (topic, version) = (stored.topic.as_str(), stored.version);
        let Some(event) = self.by_type.get(&(topic, version)) else {
            let is_known = self
                .catalogue
                .events
                .iter()
                .any(|event| event.topic == topic);
            match is_known {
                true => {
                    let key = (topic.to_owned(), version);
                    self.other_versions.entry(key).or_default().add(stored);
                }
                false => *self.other_topics.entry(topic.to_owned()).or_default() += 1,
            }
            return;
        };
        self.read += 1;
        for what in differences(event, &stored.payload) {
            let key = (topic.to_owned(), version, what);
            self.different.entry(key).or_default().add(stored);
        }
    }

    fn into_findings(self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for ((topic, version, what), count) in &self.different {
            let detail = format!(
                "{} {} {what} ({count})",
                messages(count.sum()),
                of(topic, *version)
            );
            findings.push(bad(WHAT, detail).advise(format!(
                "give the type Event::VERSION {} and teach Event::decode this shape, or keep the field",
                version + 1
            )));
        }
        for ((topic, version), count) in &self.other_versions {
            let detail = format!(
                "{} {}: the catalogue lacks this version ({count})",
                messages(count.sum()),
                of(topic, *version)
            );
            let advice = "Event::decode of the type must read it";
            findings.push(warning(WHAT, detail).advise(advice));
        }
        if !self.other_topics.is_empty() {
            let mut named: Vec<String> = (self.other_topics.iter())
                .take(MOST_TOPICS)
                .map(|(topic, count)| format!("{} ({count})", output::name(topic)))
                .collect();
            if self.other_topics.len() > MOST_TOPICS {
                named.push("…".to_owned());
            }
            let detail = format!("topics that the catalogue lacks: {}", named.join(", "));
            findings.push(Finding::new(WHAT, Level::Skipped, detail));
        }
        if self.different.is_empty() {
            let detail = format!("{} fit the catalogue", messages(self.read));
            findings.push(good(WHAT, detail));
        }
        findings
    }
}

fn messages(count: u64) -> String {
    match count {
        1 => "1 stored message".to_owned(),
        count => format!("{count} stored messages"),
    }
}

fn of(topic: &str, version: u32) -> String {
    match version {
        1 => format!("of {}", output::name(topic)),
        version => format!("of {} version {version}", output::name(topic)),
    }
}
