//! The name of an outbox, and of the tables that belong to it.

use std::fmt;
use std::str::FromStr;

/// Bytes that a part of a name may have: the longest derived name stays below PostgreSQL's 63.
const MAX_PART_BYTES: usize = 48;

/// The validated name of an outbox: `outbox`, `org_outbox` or, with a schema, `org.events`.
///
/// A part begins with an ASCII letter or `_` and goes on with ASCII letters, digits, `_`, `-`
/// or `$`; it has 48 bytes at most. Names are taken as written and always quoted, so
/// `Order-Events` and `order` are good names, and upper case stays upper case.
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
    /// Where it was found by the search path. Shown nowhere but in SQL.
    found_in: Option<String>,
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

    pub(crate) fn pause(&self) -> String {
        self.suffixed("_pause")
    }

    pub(crate) fn destination(&self) -> String {
        self.suffixed("_destination")
    }

    pub(crate) fn messages(&self) -> String {
        self.quoted("_messages")
    }

    /// The quoted name of the schema, where one is given or was found. A valid one holds no quote; one that was
    /// found may.
    pub(crate) fn schema(&self) -> Option<String> {
        let schema = self.found_in.as_ref().or(self.schema.as_ref())?;
        Some(format!("\"{}\"", schema.replace('"', "\"\"")))
    }

    /// The quoted name of the table with this suffix.
    pub(crate) fn suffixed(&self, suffix: &str) -> String {
        self.quoted(suffix)
    }

    /// The same outbox, in this schema.
    pub(crate) fn found_in(&self, schema: &str) -> Self {
        Self {
            found_in: Some(schema.to_owned()),
            ..self.clone()
        }
    }

    /// An outbox of the same name, in a schema whose name needs no quotes.
    #[cfg(feature = "relay")]
    pub(crate) fn in_schema(&self, schema: &str) -> Self {
        Self {
            schema: Some(schema.to_owned()),
            found_in: None,
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
            found_in: None,
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
            found_in: None,
        })
    }
}

fn check_part(part: &str) -> Result<(), &'static str> {
    let mut bytes = part.bytes();
    match bytes.next() {
        None => return Err("it is empty, or a part of it is"),
        Some(first) if !(first.is_ascii_alphabetic() || first == b'_') => {
            return Err("it has to begin with a letter or _");
        }
        Some(_) => {}
    }
    if !bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'$')) {
        return Err(
            "only ASCII letters, digits, _, - and $ are allowed, and one dot after a schema",
        );
    }
    if part.len() > MAX_PART_BYTES {
        return Err("a part of it is longer than 48 bytes");
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

/// A name that is not one of an outbox. It never reaches SQL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is no name of an outbox: {reason}")]
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
                error.to_string().contains("is no name of an outbox"),
                "{error}"
            );
        }
    }
}
