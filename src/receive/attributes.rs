//! Attributes of CloudEvents: their names, and values that need parsing.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use super::error::CloudEventError;

pub(super) const DATA_CONTENT_TYPE: &str = "datacontenttype";

/// The attributes of one event by name. Each occurs once.
#[derive(Debug, Default)]
pub(super) struct Attributes<'a> {
    pub(super) values: BTreeMap<Cow<'a, str>, Cow<'a, str>>,
}

impl<'a> Attributes<'a> {
    /// Adds an attribute. The name must have passed `check_name`.
    pub(super) fn add(
        &mut self,
        name: Cow<'a, str>,
        value: Cow<'a, str>,
    ) -> Result<(), CloudEventError> {
        if self.values.contains_key(&name) {
            return Err(CloudEventError::attribute(&name, "occurs twice"));
        }
        self.values.insert(name, value);
        Ok(())
    }

    /// Whether the content type of the data is JSON; `None`: there is no content type.
    pub(super) fn data_is_json(&self) -> Option<bool> {
        let content_type = media_type(self.values.get(DATA_CONTENT_TYPE)?);
        let (_, subtype) = content_type.split_once('/').unwrap_or_default();
        Some(subtype == "json" || subtype.ends_with("+json"))
    }

    pub(super) fn required(&mut self, name: &'static str) -> Result<Cow<'a, str>, CloudEventError> {
        self.optional(name)?
            .ok_or(CloudEventError::Missing { name })
    }

    /// Removes an attribute that CloudEvents defines. These attributes must not be empty.
    pub(super) fn optional(&mut self, name: &str) -> Result<Option<Cow<'a, str>>, CloudEventError> {
        match self.values.remove(name) {
            Some(value) if value.is_empty() => Err(CloudEventError::attribute(name, "is empty")),
            value => Ok(value),
        }
    }
}

/// Whether CloudEvents itself defines the attribute. All these attributes are texts.
pub(super) fn is_known(name: &str) -> bool {
    matches!(
        name,
        "id" | "source"
            | "specversion"
            | "type"
            | "subject"
            | "time"
            | DATA_CONTENT_TYPE
            | "dataschema"
    )
}

/// Checks the name of an attribute: lower-case letters and digits, but not `data`.
pub(super) fn check_name(name: &str) -> Result<(), CloudEventError> {
    let is_good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    match !name.is_empty() && name != "data" && name.bytes().all(is_good) {
        true => Ok(()),
        false => Err(CloudEventError::Name),
    }
}

/// A content type without its parameters.
pub(super) fn media_type(content_type: &str) -> String {
    let (media_type, _) = content_type.split_once(';').unwrap_or((content_type, ""));
    media_type.trim().to_ascii_lowercase()
}

/// Parses an RFC 3339 time with any offset.
pub(super) fn rfc3339(text: &str) -> Option<SystemTime> {
    let text = text.to_ascii_uppercase();
    let (local, offset) = text.split_at_checked(text.len().checked_sub(6)?)?;
    let (is_east, offset) = match (offset.strip_prefix('+'), offset.strip_prefix('-')) {
        (Some(east), _) => (true, east),
        (_, Some(west)) => (false, west),
        _ => return humantime::parse_rfc3339(&text).ok(),
    };
    if !local.ends_with(|last: char| last.is_ascii_digit()) {
        return None;
    }
    let (hours, minutes) = offset.split_once(':')?;
    let number = |text: &str, below: u64| {
        let is_number = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = is_number.then(|| text.parse::<u64>().ok())?;
        number.filter(|number| *number < below)
    };
    let offset = Duration::from_secs(number(hours, 24)? * 3600 + number(minutes, 60)? * 60);
    let local = humantime::parse_rfc3339(&format!("{local}Z")).ok()?;
    match is_east {
        true => local.checked_sub(offset),
        false => local.checked_add(offset),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_any_offset() {
        let time = |text| rfc3339(text).map(|time| humantime::format_rfc3339(time).to_string());
        for (text, utc) in [
            ("2018-04-05T17:31:00Z", "2018-04-05T17:31:00Z"),
            ("2018-04-05t17:31:00z", "2018-04-05T17:31:00Z"),
            ("2018-04-05T17:31:00-00:00", "2018-04-05T17:31:00Z"),
            (
                "2018-04-05T17:31:00.5-23:59",
                "2018-04-06T17:30:00.500000000Z",
            ),
            ("2018-04-05T17:31:00+02:00", "2018-04-05T15:31:00Z"),
        ] {
            assert_eq!(time(text).as_deref(), Some(utc), "{text}");
        }
        for text in [
            "",
            "Z",
            "+00:00",
            "2018-04-05",
            "2018-04-05T17:31:00",
            "2018-04-05T17:31:00+2:00",
            "2018-04-05T17:31:00+24:00",
            "2018-04-05T17:31:00++1:00",
            "2018-04-05T17:31:00Z+01:00",
            "2018-04-05T17:31:00Ä01:00",
            "1969-12-31T23:59:59Z",
        ] {
            assert_eq!(time(text), None, "{text}");
        }
    }
}
