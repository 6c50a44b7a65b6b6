//! The JSON format of CloudEvents: documents, and arrays of them.

use std::borrow::Cow;
use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::attributes::{Attributes, check_name, is_known};
use super::cloudevent::{CloudEvent, Data};
use super::error::CloudEventError;
use crate::event::unquoted;

const DATA: &str = "data";
const DATA_BASE64: &str = "data_base64";

/// Reads JSON. The error omits the text of serde's error, which quotes values.
pub(super) fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, CloudEventError> {
    serde_json::from_str(text).map_err(|error| CloudEventError::Json(unquoted(&error)))
}

/// Reads the event of a document.
pub(super) fn document(text: &str) -> Result<CloudEvent<'_>, CloudEventError> {
    parse::<Members<'_>>(text)?.into_event()
}

/// Reads the events of an array of documents.
pub(super) fn batch(text: &str) -> Result<Vec<CloudEvent<'_>>, CloudEventError> {
    let documents: Vec<Members<'_>> = parse(text)?;
    documents
        .into_iter()
        .enumerate()
        .map(|(index, document)| {
            document
                .into_event()
                .map_err(|error| CloudEventError::InBatch {
                    index,
                    error: Box::new(error),
                })
        })
        .collect()
}

/// The members of an object in order, including repeated members.
struct Members<'a>(Vec<(JsonString<'a>, &'a RawValue)>);

/// A string, borrowed if it has no escapes.
#[derive(Deserialize)]
struct JsonString<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'a> Members<'a> {
    fn into_event(self) -> Result<CloudEvent<'a>, CloudEventError> {
        let mut attributes = Attributes::default();
        let (mut data, mut base64) = (None, None);
        for (JsonString(name), value) in self.0 {
            let slot = match name.as_ref() {
                DATA => &mut data,
                DATA_BASE64 => &mut base64,
                _ => {
                    check_name(&name)?;
                    // A null attribute counts as absent.
                    if value.get() != "null" {
                        let value = attribute(&name, value)?;
                        attributes.add(name, value)?;
                    }
                    continue;
                }
            };
            if slot.replace(value).is_some() {
                return Err(CloudEventError::attribute(&name, "occurs twice"));
            }
        }
        let base64 = base64.filter(|value| value.get() != "null");
        let is_json = attributes.data_is_json().unwrap_or(true);
        let data = match (data, base64) {
            (None, None) => None,
            (Some(_), Some(_)) => {
                let reason = "occurs together with data";
                return Err(CloudEventError::attribute(DATA_BASE64, reason));
            }
            (None, Some(base64)) => Some(Data::Bytes(decoded(base64)?.into())),
            (Some(data), None) if is_json => Some(Data::Json(Cow::Borrowed(data.get()))),
            // Data of another content type is a JSON string.
            (Some(data), None) => Some(match serde_json::from_str(data.get()) {
                Ok(JsonString(Cow::Borrowed(text))) => Data::Bytes(Cow::Borrowed(text.as_bytes())),
                Ok(JsonString(Cow::Owned(text))) => Data::Bytes(Cow::Owned(text.into_bytes())),
                Err(_) => Data::Json(Cow::Borrowed(data.get())),
            }),
        };
        attributes.into_event(data)
    }
}

fn decoded(base64: &RawValue) -> Result<Vec<u8>, CloudEventError> {
    let JsonString(text) = serde_json::from_str(base64.get())
        .map_err(|_| CloudEventError::attribute(DATA_BASE64, "is not a text"))?;
    BASE64
        .decode(text.as_bytes())
        .map_err(|_| CloudEventError::attribute(DATA_BASE64, "is not base64"))
}

/// The value of an attribute as text. An attribute is a string; an extension may also be a number or a
/// boolean, which stays as written in JSON.
fn attribute<'a>(name: &str, value: &'a RawValue) -> Result<Cow<'a, str>, CloudEventError> {
    let bad = |reason| CloudEventError::attribute(name, reason);
    match value.get().as_bytes() {
        [b'"', ..] => {
            let JsonString(text) =
                serde_json::from_str(value.get()).map_err(|_| bad("is not a Unicode text"))?;
            Ok(text)
        }
        _ if is_known(name) => Err(bad("is not a text")),
        [b'{' | b'[', ..] => Err(bad("is not a text, number or boolean")),
        _ => Ok(Cow::Borrowed(value.get())),
    }
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a CloudEvents document")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Members(members))
    }
}
