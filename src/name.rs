//! The name of an outbox, and the names of its tables.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

/// The maximum length of a part of a name, in bytes. The longest derived name stays within PostgreSQL's limit of 63
/// bytes.
const MAX_PART_BYTES: usize = 48;

/// A name of a relay that has this label.
#[cfg(feature = "relay")]
pub(crate) fn label_of(label: Option<&str>, what: impl fmt::Display, separator: &str) -> String {
    match label {
        Some(label) => format!("{label}{separator}{what}"),
        None => what.to_string(),
    }
}

/// The validated name of an outbox: `outbox`, `org_outbox` or, with a schema, `org.events`.
///
/// Each part has at most 48 bytes. It begins with an ASCII letter or `_`, followed by ASCII letters,
/// digits, `_`, `-` or `$`. SQL always quotes the name as written, so `Order-Events` and `order` are
/// valid names, and upper case stays upper case.
///
/// ```
/// use diesel_outbox::OutboxName;
///
/// let name: OutboxName = "hrm.Order-Events".parse()?;
/// assert_eq!(name.to_string(), "hrm.Order-Events");
/// assert!("outbox; DROP TABLE orders".parse::<OutboxName>().is_err());
/// # Ok::<(), diesel_outbox::BadName>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct OutboxName {
    schema: Option<String>,
    table: String,
    /// What a connection has found. Used only in SQL.
    found: Option<FoundOutbox>,
}

/// An outbox as a connection has found it.
#[derive(Clone, PartialEq, Eq, Hash)]
struct FoundOutbox {
    /// The schema, by the search path.
    schema: String,
    endpoints: HasEndpoints,
}

/// Set: the outbox has the tables of endpoints. It had them when it was found, or a holder of a clone has found them later.
#[derive(Clone)]
struct HasEndpoints(Arc<OnceLock<()>>);

/// The same name, whatever was found.
impl PartialEq for HasEndpoints {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for HasEndpoints {}

impl Hash for HasEndpoints {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl OutboxName {
    /// The quoted name of the table of live messages.
    pub(crate) fn outbox(&self) -> String {
        self.quoted("")
    }

    /// The name without its schema, and without quotes.
    #[cfg(feature = "relay")]
    pub(crate) fn table(&self) -> &str {
        &self.table
    }

    pub(crate) fn part(&self) -> String {
        self.quoted("_part")
    }

    pub(crate) fn audit(&self) -> String {
        self.suffixed("_audit")
    }

    pub(crate) fn request(&self) -> String {
        self.suffixed("_request")
    }

    pub(crate) fn attempt(&self) -> String {
        self.quoted("_attempt")
    }

    pub(crate) fn rotate(&self) -> String {
        self.quoted("_rotate")
    }

    pub(crate) fn ledger(&self) -> String {
        self.quoted("_ledger")
    }

    pub(crate) fn dead(&self) -> String {
        self.quoted("_dead")
    }

    pub(crate) fn lease(&self) -> String {
        self.quoted("_lease")
    }

    pub(crate) fn lock(&self) -> String {
        self.quoted("_lock")
    }

    pub(crate) fn pause(&self) -> String {
        self.suffixed("_pause")
    }

    pub(crate) fn endpoint(&self) -> String {
        self.suffixed("_endpoint")
    }

    pub(crate) fn topic(&self) -> String {
        self.suffixed("_topic")
    }

    /// `"schema"."outbox_registration"`
    pub(crate) fn registration(&self) -> String {
        self.suffixed("_registration")
    }

    pub(crate) fn feed(&self) -> String {
        self.suffixed("_feed")
    }

    pub(crate) fn feed_rotate(&self) -> String {
        self.suffixed("_feed_rotate")
    }

    pub(crate) fn feed_part(&self) -> String {
        self.suffixed("_feed_part")
    }

    pub(crate) fn feed_ends(&self) -> String {
        self.suffixed("_feed_ends")
    }

    pub(crate) fn feed_event(&self) -> String {
        self.suffixed("_feed_event")
    }

    pub(crate) fn feed_reader(&self) -> String {
        self.suffixed("_feed_reader")
    }

    pub(crate) fn messages(&self) -> String {
        self.quoted("_messages")
    }

    /// The quoted name of the schema that was given or found. A found schema may contain quotes, a given schema does
    /// not.
    pub(crate) fn schema(&self) -> Option<String> {
        let found = self.found.as_ref().map(|found| &found.schema);
        let schema = found.or(self.schema.as_ref())?;
        Some(format!("\"{}\"", schema.replace('"', "\"\"")))
    }

    /// The quoted name of the table with this suffix.
    pub(crate) fn suffixed(&self, suffix: &str) -> String {
        self.quoted(suffix)
    }

    /// The same outbox, found in this schema, with or without the tables of endpoints.
    pub(crate) fn found_in(&self, schema: &str, has_endpoints: bool) -> Self {
        let endpoints = match has_endpoints {
            true => OnceLock::from(()),
            false => OnceLock::new(),
        };
        Self {
            found: Some(FoundOutbox {
                schema: schema.to_owned(),
                endpoints: HasEndpoints(Arc::new(endpoints)),
            }),
            ..self.clone()
        }
    }

    /// Whether the outbox has the tables of endpoints. A name that no connection has looked for counts as having them.
    pub(crate) fn has_endpoints(&self) -> bool {
        let is_there = |found: &FoundOutbox| found.endpoints.0.get().is_some();
        self.found.as_ref().is_none_or(is_there)
    }

    /// From now on, this name and its clones have the tables of endpoints.
    #[cfg(feature = "relay")]
    pub(crate) fn found_endpoints(&self) {
        if let Some(found) = &self.found {
            found.endpoints.0.get_or_init(|| ());
        }
    }

    /// From now on, this name has all parts that the other one has.
    #[cfg(feature = "relay")]
    pub(crate) fn has_parts_of(&self, other: &Self) {
        if other.has_endpoints() {
            self.found_endpoints();
        }
    }

    /// The outbox of the same name in this schema, whose name must not contain quotes.
    #[cfg(feature = "relay")]
    pub(crate) fn in_schema(&self, schema: &str) -> Self {
        Self {
            schema: Some(schema.to_owned()),
            found: None,
            ..self.clone()
        }
    }

    fn quoted(&self, suffix: &str) -> String {
        let table = format!("\"{}{suffix}\"", self.table);
        match self.schema() {
            Some(schema) => format!("{schema}.{table}"),
            None => table,
        }
    }
}

impl Default for OutboxName {
    /// `outbox`.
    fn default() -> Self {
        Self {
            schema: None,
            table: "outbox".to_owned(),
            found: None,
        }
    }
}

impl FromStr for OutboxName {
    type Err = BadName;

    fn from_str(name: &str) -> Result<Self, BadName> {
        let bad = |reason| BadName {
            name: name.to_owned(),
            reason,
        };
        let (schema, table) = match name.split_once('.') {
            Some((schema, table)) => (Some(schema), table),
            None => (None, name),
        };
        for part in schema.into_iter().chain([table]) {
            check_part(part).map_err(bad)?;
        }
        Ok(Self {
            schema: schema.map(str::to_owned),
            table: table.to_owned(),
            found: None,
        })
    }
}

fn check_part(part: &str) -> Result<(), &'static str> {
    let mut bytes = part.bytes();
    match bytes.next() {
        None => return Err("it is empty or has an empty part"),
        Some(first) if !(first.is_ascii_alphabetic() || first == b'_') => {
            return Err("each part must begin with a letter or _");
        }
        Some(_) => {}
    }
    if !bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'$')) {
        return Err(
            "only ASCII letters, digits, _, - and $ are allowed, and one dot after the schema",
        );
    }
    if part.len() > MAX_PART_BYTES {
        return Err("a part is longer than 48 bytes");
    }
    Ok(())
}

impl fmt::Display for OutboxName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.schema {
            Some(schema) => write!(f, "{schema}.{}", self.table),
            None => f.write_str(&self.table),
        }
    }
}

impl fmt::Debug for OutboxName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OutboxName({self})")
    }
}

/// A name that is not valid for an outbox. It never reaches SQL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a valid outbox name: {reason}")]
pub struct BadName {
    name: String,
    reason: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_names_are_quoted_as_written() {
        for (name, quoted) in [
            ("outbox", r#""outbox""#),
            ("order", r#""order""#),
            ("Order-Events", r#""Order-Events""#),
            ("hrm.events", r#""hrm"."events""#),
            ("_x$1", r#""_x$1""#),
        ] {
            assert_eq!(name.parse::<OutboxName>().expect(name).outbox(), quoted);
        }
    }

    #[test]
    fn bad_names_are_refused_with_the_reason() {
        let too_long = "x".repeat(49);
        for name in [
            "",
            ".",
            "a.",
            ".a",
            "a.b.c",
            "1a",
            "a b",
            "a\"b",
            "a'b",
            "a;b",
            "tabelle_ä",
            "a\0",
            "a\nb",
            &too_long,
        ] {
            let error = name.parse::<OutboxName>().expect_err(name);
            assert!(
                error.to_string().contains("is not a valid outbox name"),
                "{error}"
            );
        }
    }
}
