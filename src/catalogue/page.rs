//! The catalogue as a page in Markdown, for those who receive the events.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::EventType;
use super::example::kind;

pub(super) fn markdown(events: &[EventType]) -> String {
    let mut page = "# Events\n".to_owned();
    // Writing to a string cannot fail.
    let _ = events.iter().try_for_each(|one| event(&mut page, one));
    page
}

fn event(page: &mut String, one: &EventType) -> std::fmt::Result {
    match one.version {
        1 => writeln!(page, "\n## {}", one.topic)?,
        version => writeln!(page, "\n## {} (version {version})", one.topic)?,
    }
    if !one.description.is_empty() {
        writeln!(page, "\n{}", one.description)?;
    }
    fields(page, &one.schema)?;
    let parts = one.schema["$defs"].as_object().into_iter().flatten();
    for (name, part) in parts {
        writeln!(page, "\n### {name} (of {})", one.topic)?;
        if let Some(text) = part["description"].as_str() {
            writeln!(page, "\n{text}")?;
        }
        fields(page, part)?;
    }
    writeln!(page, "\n```json\n{:#}\n```", one.example)
}

/// The table of an object's fields, or a sentence about another type.
fn fields(page: &mut String, schema: &Value) -> std::fmt::Result {
    let Some(properties) = properties(schema) else {
        return writeln!(page, "\nType: {}", type_of(schema));
    };
    let required = schema["required"].as_array();
    let is_required = |name: &str| required.is_some_and(|all| all.iter().any(|one| one == name));
    writeln!(
        page,
        "\n| field | type | always there | meaning |\n|---|---|---|---|"
    )?;
    for (name, field) in properties {
        let there = if is_required(name) { "yes" } else { "no" };
        let meaning = field["description"].as_str().unwrap_or_default();
        writeln!(
            page,
            "| `{name}` | {} | {there} | {} |",
            cell(&type_of(field)),
            cell(meaning)
        )?;
    }
    Ok(())
}

fn properties(schema: &Value) -> Option<&Map<String, Value>> {
    schema["properties"].as_object()
}

/// A text within one cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\r', '\n'], " ")
}

fn type_of(schema: &Value) -> String {
    if let Some(to) = schema["$ref"].as_str() {
        let name = to.rsplit('/').next().unwrap_or(to);
        return if name == "#" { "the same" } else { name }.to_owned();
    }
    if let Some(only) = schema.get("const") {
        return format!("`{only}`");
    }
    if let Some(all) = schema["enum"].as_array() {
        let all: Vec<String> = all.iter().map(|one| format!("`{one}`")).collect();
        return all.join(", ");
    }
    for key in ["oneOf", "anyOf", "allOf"] {
        if let Some(all) = schema[key].as_array() {
            let all: Vec<String> = all.iter().map(type_of).collect();
            return all.join(if key == "allOf" { " and " } else { " or " });
        }
    }
    let name = match (kind(schema), schema["format"].as_str()) {
        ("array", _) => match schema.get("items") {
            Some(items) => format!("array of {}", type_of(items)),
            None => "array".to_owned(),
        },
        ("string", Some(format)) => format!("string ({format})"),
        ("", _) => "any".to_owned(),
        (kind, _) => kind.to_owned(),
    };
    let is_nullable = schema["type"]
        .as_array()
        .is_some_and(|all| all.iter().any(|one| one == "null"));
    if is_nullable {
        format!("{name} or null")
    } else {
        name
    }
}
