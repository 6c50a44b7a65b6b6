//! The catalogue as documents for machines: [AsyncAPI 3.0](https://www.asyncapi.com/docs/reference/specification/v3.0.0)
//! and [OpenAPI 3.1](https://spec.openapis.org/oas/v3.1.0) with webhooks.
//!
//! Both describe CloudEvents in structured mode, as endpoints get them.

use std::collections::{BTreeMap, BTreeSet};

use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};

use super::EventType;
use crate::event::VERSION_ATTRIBUTE;

const CONTENT_TYPE: &str = "application/cloudevents+json";
const SCHEMAS: &str = "#/components/schemas/";

pub(super) fn asyncapi(events: &[EventType], title: &str, version: &str) -> Value {
    let (mut channels, mut operations, mut messages) = (Map::new(), Map::new(), Map::new());
    let named = named(events);
    for (topic, versions) in by_topic(&named) {
        let channel = &versions[0].id;
        let refers = |to: &str| json!({ "$ref": to });
        let of_channel = |one: &&NamedEvent<'_>| {
            let message = refers(&format!("#/components/messages/{}", one.id));
            (one.id.clone(), message)
        };
        channels.insert(
            channel.clone(),
            json!({
                "address": topic,
                "messages": versions.iter().map(of_channel).collect::<Map<_, _>>(),
            }),
        );
        let of_operation =
            |one: &&NamedEvent<'_>| refers(&format!("#/channels/{channel}/messages/{}", one.id));
        operations.insert(
            format!("send.{channel}"),
            json!({
                "action": "send",
                "channel": refers(&format!("#/channels/{channel}")),
                "messages": versions.iter().map(of_operation).collect::<Vec<_>>(),
            }),
        );
    }
    for one in &named {
        let message = json!({
            "name": one.event.topic,
            "title": one.event.name,
            "description": one.event.description,
            "contentType": CONTENT_TYPE,
            "payload": envelope(one),
            "examples": [{ "payload": example(one.event) }],
        });
        messages.insert(one.id.clone(), message);
    }
    json!({
        "asyncapi": "3.0.0",
        "info": { "title": title, "version": version },
        "defaultContentType": CONTENT_TYPE,
        "channels": channels,
        "operations": operations,
        "components": { "messages": messages, "schemas": schemas(&named) },
    })
}

pub(super) fn openapi(events: &[EventType], title: &str, version: &str) -> Value {
    let named = named(events);
    let mut webhooks = Map::new();
    for (topic, versions) in by_topic(&named) {
        let first = versions[0];
        let described: Vec<&str> = versions
            .iter()
            .map(|one| one.event.description.as_str())
            .collect();
        let schema = match &versions[..] {
            [one] => envelope(one),
            several => {
                json!({ "oneOf": several.iter().map(|one| envelope(one)).collect::<Vec<_>>() })
            }
        };
        let example =
            |one: &&NamedEvent<'_>| (one.id.clone(), json!({ "value": example(one.event) }));
        let post = json!({
            "operationId": first.id,
            "summary": topic,
            "description": described.join("\n\n"),
            "parameters": PARAMETERS.map(|(name, ..)| json!({ "$ref": format!("#/components/parameters/{name}") })),
            "requestBody": {
                "required": true,
                "content": { CONTENT_TYPE: {
                    "schema": schema,
                    "examples": versions.iter().map(example).collect::<Map<_, _>>(),
                } },
            },
            "responses": {
                "2XX": { "description": "The message is delivered." },
                "410": { "description": "Nobody wants these messages any more: no more are sent." },
                "422": { "description": "This message will never be accepted: it is not sent again." },
                "default": { "description": "The message is sent again later." },
            },
        });
        webhooks.insert(topic.to_owned(), json!({ "post": post }));
    }
    let parameters = PARAMETERS.map(|(name, description)| {
        let parameter = json!({
            "name": name, "in": "header", "required": name == "webhook-id",
            "description": description, "schema": { "type": "string" },
        });
        (name.to_owned(), parameter)
    });
    json!({
        "openapi": "3.1.0",
        "info": { "title": title, "version": version },
        "paths": {},
        "webhooks": webhooks,
        "components": {
            "parameters": Map::from_iter(parameters),
            "schemas": schemas(&named),
        },
    })
}

/// The headers of [Standard Webhooks](https://www.standardwebhooks.com/).
const PARAMETERS: [(&str, &str); 3] = [
    (
        "webhook-id",
        "The id of the message. It is the same whenever the message is sent again.",
    ),
    (
        "webhook-timestamp",
        "When the message was sent, in seconds since 1970. With a secret only.",
    ),
    (
        "webhook-signature",
        "Signatures of id, timestamp and body, separated by spaces. With a secret only.",
    ),
];

/// An event with the name of its components.
struct NamedEvent<'a> {
    id: String,
    event: &'a EventType,
}

/// Components have names of letters, digits, `.`, `-` and `_`, each once.
fn named(events: &[EventType]) -> Vec<NamedEvent<'_>> {
    let mut ids = BTreeSet::new();
    let mut name = |event: &EventType| {
        let id = match event.version {
            1 => word(&event.topic),
            version => format!("{}.v{version}", word(&event.topic)),
        };
        unused(&mut ids, id)
    };
    (events.iter())
        .map(|event| NamedEvent {
            id: name(event),
            event,
        })
        .collect()
}

fn word(text: &str) -> String {
    let may = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    text.chars().map(|c| if may(c) { c } else { '_' }).collect()
}

fn unused(used: &mut BTreeSet<String>, id: String) -> String {
    let mut numbered = (2..).map(|number| format!("{id}_{number}"));
    let mut candidate = id.clone();
    while !used.insert(candidate.clone()) {
        candidate = numbered.next().unwrap_or_default();
    }
    candidate
}

fn by_topic<'a>(named: &'a [NamedEvent<'a>]) -> BTreeMap<&'a str, Vec<&'a NamedEvent<'a>>> {
    let mut topics: BTreeMap<&str, Vec<&NamedEvent<'_>>> = BTreeMap::new();
    for one in named {
        topics.entry(&one.event.topic).or_default().push(one);
    }
    topics
}

/// The schemas of the payloads, and of what they refer to.
fn schemas(named: &[NamedEvent<'_>]) -> Map<String, Value> {
    let mut all = Map::new();
    for NamedEvent { id, event } in named {
        let mut schema = event.schema.clone();
        let parts = match &mut schema {
            Value::Object(schema) => {
                schema.remove("$schema");
                schema.remove("$defs")
            }
            _ => None,
        };
        rename(&mut schema, id);
        all.insert(id.clone(), schema);
        let Some(Value::Object(parts)) = parts else {
            continue;
        };
        for (name, mut part) in parts {
            rename(&mut part, id);
            all.insert(format!("{id}.{}", word(&name)), part);
        }
    }
    all
}

/// Makes references within a schema references within the document.
fn rename(schema: &mut Value, id: &str) {
    match schema {
        Value::Object(members) => {
            if let Some(Value::String(to)) = members.get_mut("$ref") {
                if let Some(part) = to.strip_prefix("#/$defs/") {
                    let part = percent_decode_str(part).decode_utf8_lossy();
                    let part = part.replace("~1", "/").replace("~0", "~");
                    *to = format!("{SCHEMAS}{id}.{}", word(&part));
                } else if to == "#" {
                    *to = format!("{SCHEMAS}{id}");
                }
            }
            members.values_mut().for_each(|one| rename(one, id));
        }
        Value::Array(all) => all.iter_mut().for_each(|one| rename(one, id)),
        _ => {}
    }
}

/// The schema of a CloudEvent with this payload.
fn envelope(one: &NamedEvent<'_>) -> Value {
    let mut properties = json!({
        "specversion": { "const": "1.0" },
        "id": { "type": "string", "format": "uuid" },
        "source": { "type": "string" },
        "type": { "const": one.event.topic },
        "time": { "type": "string", "format": "date-time" },
        "datacontenttype": { "const": "application/json" },
        "sequence": { "type": "string" },
        "partitionkey": { "type": "string" },
        "data": { "$ref": format!("{SCHEMAS}{}", one.id) },
    });
    let mut required = vec!["specversion", "id", "source", "type", "time", "data"];
    if one.event.version != 1 {
        properties[VERSION_ATTRIBUTE] = json!({ "const": one.event.version.to_string() });
        required.push(VERSION_ATTRIBUTE);
    }
    json!({ "type": "object", "properties": properties, "required": required })
}

fn example(event: &EventType) -> Value {
    let mut example = json!({
        "specversion": "1.0",
        "datacontenttype": "application/json",
        "source": "/shop",
        "id": "0198c2b0-7a1e-7000-8000-000000000001",
        "time": "2026-01-31T12:00:00Z",
        "sequence": "1",
        "type": event.topic,
        "data": event.example,
    });
    if event.version != 1 {
        example[VERSION_ATTRIBUTE] = json!(event.version.to_string());
    }
    example
}
