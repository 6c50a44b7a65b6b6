//! `check --catalogue FILE`: stored messages that do not fit the types of the application.
//!
//! The catalogue says what the types are now, the stored messages what they were. A field that the messages have and the
//! type lacks was removed, or renamed: receivers that use it will miss it. A message that the schema refuses shows a type
//! that became narrower: who reads with the new type cannot read the message.

mod fields;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use anyhow::{Context, Result};
use boon::{Compiler, SchemaIndex, Schemas, ValidationError};
use diesel::PgConnection;
use diesel_outbox::ConfigError;
use diesel_outbox::catalogue::{Catalogue, EventType};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, Place, StoredPayload};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use super::{Finding, Level, bad, good, unchecked, warning};
use crate::output;

const WHAT: &str = "catalogue";
/// The most messages that are named for one difference.
const MOST_NAMED: usize = 3;
/// The most topics that are named.
const MOST_TOPICS: usize = 10;

/// A catalogue, ready to check messages.
pub(crate) struct Checked {
    events: Vec<(EventType, SchemaIndex)>,
    schemas: Schemas,
}

impl Checked {
    /// # Errors
    /// The file cannot be read, or has something that is no schema.
    pub(crate) fn read(path: &Path) -> Result<Self, ConfigError> {
        let read = || {
            let text = std::fs::read_to_string(path)?;
            Self::new(serde_json::from_str(&text)?)
        };
        read().map_err(|error: anyhow::Error| {
            ConfigError::new("--catalogue", format!("{}: {error:#}", path.display()))
        })
    }

    fn new(catalogue: Catalogue) -> Result<Self> {
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        let mut events = Vec::new();
        for (number, event) in catalogue.events.into_iter().enumerate() {
            let what = || format!("the schema of {} is not valid", event.topic);
            // References lead nowhere else: nothing is loaded from files or the network.
            let place = format!("catalogue:/{number}");
            let added = compiler.add_resource(&place, event.schema.clone());
            added
                .map_err(|error| anyhow::anyhow!("{error}"))
                .with_context(what)?;
            let compiled = compiler.compile(&place, &mut schemas);
            let index = compiled
                .map_err(|error| anyhow::anyhow!("{error:#}"))
                .with_context(what)?;
            events.push((event, index));
        }
        Ok(Self { events, schemas })
    }

    /// Compares all stored messages.
    pub(super) fn findings(&self, conn: &mut PgConnection, config: &Config) -> Vec<Finding> {
        let mut differences = Differences::new(self);
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

    /// What is different in this payload, in sentences without its values.
    fn differences(
        &self,
        event: &EventType,
        index: SchemaIndex,
        payload: &str,
    ) -> BTreeSet<String> {
        let Ok(value) = serde_json::from_str::<Value>(payload) else {
            return BTreeSet::from(["the payload is not JSON that can be read".to_owned()]);
        };
        let mut found = BTreeSet::new();
        if let Err(error) = self.schemas.validate(&value, index) {
            refused(&error, &mut found);
        }
        for path in fields::unknown(&value, &event.schema) {
            found.insert(format!(
                "{path} is not in the type any more: was it removed or renamed?"
            ));
        }
        found
    }
}

/// The innermost reasons of a refusal, without values.
fn refused(error: &ValidationError<'_, '_>, found: &mut BTreeSet<String>) {
    if error.causes.is_empty() {
        let tokens = error.instance_location.tokens.iter();
        let path = fields::path(tokens.map(|token| match token {
            boon::InstanceToken::Prop(name) => Some(name.as_ref()),
            boon::InstanceToken::Item(_) => None,
        }));
        found.insert(format!("{path}: {}", without_values(&error.kind)));
        return;
    }
    for cause in &error.causes {
        refused(cause, found);
    }
}

/// What a schema asks for. Payloads may hold what nobody should read in a terminal.
fn without_values(kind: &boon::ErrorKind<'_, '_>) -> String {
    use boon::ErrorKind as Kind;
    match kind {
        Kind::Type { .. } | Kind::Required { .. } | Kind::Const { .. } => kind.to_string(),
        Kind::Enum { want } => {
            let all: Vec<String> = want.iter().map(ToString::to_string).collect();
            format!("must be one of {}", all.join(", "))
        }
        Kind::Format { want, .. } => format!("must have the format {want}"),
        Kind::Pattern { want, .. } => format!("must match {want}"),
        Kind::AdditionalProperties { .. } => "has fields that the type does not allow".to_owned(),
        Kind::Minimum { want, .. } => format!("must be {want} or more"),
        Kind::Maximum { want, .. } => format!("must be {want} or less"),
        Kind::ExclusiveMinimum { want, .. } => format!("must be more than {want}"),
        Kind::ExclusiveMaximum { want, .. } => format!("must be less than {want}"),
        other => other.to_string(),
    }
}

/// How many messages have a difference, where they are, and which are the first.
#[derive(Default)]
struct Count {
    places: BTreeMap<Place, u64>,
    first: Vec<uuid::Uuid>,
}

impl Count {
    fn add(&mut self, stored: &StoredPayload) {
        *self.places.entry(stored.place).or_default() += 1;
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
                Place::Outbox => format!("{count} waiting"),
                Place::Dead => format!("{count} dead"),
                Place::Ledger => format!("{count} in the ledger"),
            })
            .collect();
        let first: Vec<String> = self.first.iter().map(ToString::to_string).collect();
        write!(f, "{}; for example {}", places.join(", "), first.join(", "))
    }
}

/// What is different in all stored messages.
struct Differences<'a> {
    checked: &'a Checked,
    by_type: HashMap<(&'a str, u32), (&'a EventType, SchemaIndex)>,
    read: u64,
    different: BTreeMap<(String, u32, String), Count>,
    other_versions: BTreeMap<(String, u32), Count>,
    other_topics: BTreeMap<String, u64>,
}

impl<'a> Differences<'a> {
    fn new(checked: &'a Checked) -> Self {
        let of_type = |(event, index): &'a (EventType, SchemaIndex)| {
            ((event.topic.as_str(), event.version), (event, *index))
        };
        Self {
            checked,
            by_type: checked.events.iter().map(of_type).collect(),
            read: 0,
            different: BTreeMap::new(),
            other_versions: BTreeMap::new(),
            other_topics: BTreeMap::new(),
        }
    }

    fn add(&mut self, stored: &StoredPayload) {
        let (topic, version) = (stored.topic.as_str(), stored.version);
        let Some((event, index)) = self.by_type.get(&(topic, version)) else {
            let is_known = self
                .checked
                .events
                .iter()
                .any(|(event, _)| event.topic == topic);
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
        for what in self.checked.differences(event, *index, &stored.payload) {
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
            findings.push(Finding {
                advice: Some(format!(
                    "give the type Event::VERSION {} and teach Event::decode this shape, or keep the field",
                    version + 1
                )),
                ..bad(WHAT, detail)
            });
        }
        for ((topic, version), count) in &self.other_versions {
            let detail = format!(
                "{} {}: the catalogue lacks this version ({count})",
                messages(count.sum()),
                of(topic, *version)
            );
            findings.push(Finding {
                advice: Some("Event::decode of the type must read it".to_owned()),
                ..warning(WHAT, detail)
            });
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// What is different between a payload and a schema.
    fn differences(schema: Value, payload: &Value) -> Vec<String> {
        let catalogue = json!({ "events": [{ "topic": "t", "name": "T", "schema": schema }] });
        let checked = Checked::new(serde_json::from_value(catalogue).expect("a catalogue"));
        let checked = checked.expect("schemas");
        let (event, index) = &checked.events[0];
        (checked.differences(event, *index, &payload.to_string()))
            .into_iter()
            .collect()
    }

    /// R64.
    #[test]
    fn differences_are_named_without_values() {
        let schema = json!({
            "type": "object",
            "properties": {
                "id": { "type": "integer" },
                "means": { "enum": ["card", "invoice"] },
                "items": { "type": "array", "items": { "$ref": "#/$defs/Item" } },
            },
            "required": ["id"],
            "$defs": { "Item": { "type": "object", "properties": { "count": { "type": "integer", "minimum": 1 } } } },
        });
        for (payload, expected) in [
            (json!({ "id": 7, "items": [{ "count": 1 }] }), vec![]),
            (json!({}), vec!["the payload: missing properties 'id'"]),
            (
                json!({ "id": "secret" }),
                vec!["id: want integer, but got string"],
            ),
            (
                json!({ "id": 7, "means": "secret" }),
                vec!["means: must be one of \"card\", \"invoice\""],
            ),
            (
                json!({ "id": 7, "items": [{}, { "count": 0, "color": "secret" }] }),
                vec![
                    "items[].color is not in the type any more: was it removed or renamed?",
                    "items[].count: must be 1 or more",
                ],
            ),
        ] {
            assert_eq!(differences(schema.clone(), &payload), expected, "{payload}");
        }
    }

    #[test]
    fn a_bad_schema_is_refused() {
        for schema in [
            json!({ "type": "nothing" }),
            json!({ "$ref": "#/$defs/none" }),
            json!({ "$ref": "file:///etc/passwd" }),
        ] {
            let catalogue = json!({ "events": [{ "topic": "t", "name": "T", "schema": schema }] });
            let checked = Checked::new(serde_json::from_value(catalogue).expect("a catalogue"));
            let error = checked.err().expect("an error");
            assert!(
                error.to_string().contains("the schema of t is not valid"),
                "{error:#}"
            );
        }
    }
}
