//! A value that fits a schema, for types without an example of their own.

use serde_json::{Map, Value, json};

/// Deeper than this, an optional value is left out and a list is empty: types may contain themselves.
const DEEPEST: usize = 8;

/// A value that fits this schema as far as its types, formats and constants say.
pub(super) fn of(schema: &Value) -> Value {
    value(schema, schema, 0)
}

fn value(schema: &Value, root: &Value, depth: usize) -> Value {
    if let Some(first) = schema["examples"].get(0) {
        return first.clone();
    }
    for key in ["const", "default"] {
        if let Some(value) = schema.get(key) {
            return value.clone();
        }
    }
    if let Some(found) = schema["$ref"].as_str().and_then(|to| referred(to, root)) {
        return match depth < DEEPEST {
            true => value(found, root, depth + 1),
            false => Value::Null,
        };
    }
    if let Some(first) = schema["enum"].get(0) {
        return first.clone();
    }
    let not_null = |one: &&Value| one["type"] != "null";
    for key in ["oneOf", "anyOf"] {
        let choices = schema[key].as_array();
        if let Some(first) = choices.and_then(|all| all.iter().find(not_null)) {
            let chosen = value(first, root, depth);
            // An enum with its tag inside has properties beside its choices.
            return merged(object(schema, root, depth), chosen);
        }
    }
    if let Some(all) = schema["allOf"].as_array() {
        let parts = all.iter().map(|one| value(one, root, depth));
        return parts.fold(object(schema, root, depth), merged);
    }
    match kind(schema) {
        "object" => object(schema, root, depth),
        "array" => array(schema, root, depth),
        "integer" | "number" => {
            let least = schema.get("minimum").or(schema.get("exclusiveMinimum"));
            match least.and_then(Value::as_i64) {
                Some(least @ 1..) => json!(least + 1),
                _ => json!(1),
            }
        }
        "boolean" => json!(true),
        "string" => json!(string(schema)),
        _ => Value::Null,
    }
}

/// The first type of the schema that is not null.
pub(super) fn kind(schema: &Value) -> &str {
    match &schema["type"] {
        Value::String(kind) => kind,
        Value::Array(kinds) => {
            let mut kinds = kinds.iter().filter_map(Value::as_str);
            kinds.find(|kind| *kind != "null").unwrap_or("null")
        }
        _ if schema.get("properties").is_some() => "object",
        _ => "",
    }
}

/// The schema that a reference within the document names.
pub(super) fn referred<'a>(to: &str, root: &'a Value) -> Option<&'a Value> {
    root.pointer(to.strip_prefix('#')?)
}

fn object(schema: &Value, root: &Value, depth: usize) -> Value {
    let empty = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&empty);
    let is_required = |name: &str| {
        (schema["required"].as_array()).is_some_and(|all| all.iter().any(|one| one == name))
    };
    let shown = (properties.iter()).filter(|(name, _)| depth < DEEPEST || is_required(name));
    shown
        .map(|(name, schema)| (name.clone(), value(schema, root, depth + 1)))
        .collect::<Map<_, _>>()
        .into()
}

fn array(schema: &Value, root: &Value, depth: usize) -> Value {
    if let Some(all) = schema["prefixItems"].as_array() {
        return all.iter().map(|one| value(one, root, depth + 1)).collect();
    }
    match schema.get("items") {
        Some(items) if depth < DEEPEST => {
            let least = schema["minItems"].as_u64().unwrap_or(0).clamp(1, 10);
            (0..least).map(|_| value(items, root, depth + 1)).collect()
        }
        _ => json!([]),
    }
}

fn merged(mut left: Value, right: Value) -> Value {
    match (&mut left, right) {
        (Value::Object(all), Value::Object(more)) => {
            all.extend(more);
            left
        }
        (Value::Object(all), right) if all.is_empty() => right,
        _ => left,
    }
}

fn string(schema: &Value) -> &'static str {
    match schema["format"].as_str() {
        Some("date-time") => "2026-01-31T12:00:00Z",
        Some("date" | "partial-date") => "2026-01-31",
        Some("time" | "partial-date-time" | "partial-time") => "12:00:00",
        Some("uuid") => "0198c2b0-7a1e-7000-8000-000000000001",
        Some("email") => "jane@example.com",
        Some("uri" | "url") => "https://example.com/",
        Some("ip" | "ipv4") => "192.0.2.1",
        Some("ipv6") => "2001:db8::1",
        _ => "text",
    }
}
