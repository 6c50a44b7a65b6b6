//! The fields of a payload that its schema does not name.

use std::collections::BTreeSet;

use serde_json::Value;

/// Schemas may refer to themselves.
const DEEPEST: usize = 32;

/// The paths of fields that the schema does not know. Objects whose other fields are a map have none.
pub(super) fn unknown(value: &Value, schema: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    compare(value, &[schema], schema, &mut Vec::new(), &mut found);
    found
}

/// A path such as `items[].count`; `None` stands for an element of a list.
pub(super) fn path<'a>(steps: impl Iterator<Item = Option<&'a str>>) -> String {
    let mut path = String::new();
    for step in steps {
        match step {
            Some(name) if path.is_empty() => path.push_str(name),
            Some(name) => {
                path.push('.');
                path.push_str(name);
            }
            None => path.push_str("[]"),
        }
    }
    match path.is_empty() {
        true => "the payload".to_owned(),
        false => path,
    }
}

/// `schemas`: those that may describe the value.
fn compare<'a>(
    value: &'a Value,
    schemas: &[&'a Value],
    root: &'a Value,
    at: &mut Vec<Option<&'a str>>,
    found: &mut BTreeSet<String>,
) {
    if at.len() > DEEPEST {
        return;
    }
    let mut all = Vec::new();
    for schema in schemas {
        gather(schema, root, 0, &mut all);
    }
    match value {
        Value::Object(members) => {
            let has = |key: &str| all.iter().any(|one| one.get(key).is_some());
            let is_open = all.iter().any(|one| {
                one.get("additionalProperties")
                    .is_some_and(|more| more != &Value::Bool(false))
            }) || has("patternProperties");
            // A schema that names no field at all takes any.
            if is_open || !has("properties") {
                return;
            }
            for (name, value) in members {
                let named: Vec<&Value> = (all.iter())
                    .filter_map(|one| one.get("properties")?.get(name))
                    .collect();
                at.push(Some(name));
                match named.is_empty() {
                    true => drop(found.insert(path(at.iter().copied()))),
                    false => compare(value, &named, root, at, found),
                }
                at.pop();
            }
        }
        Value::Array(elements) => {
            for (index, value) in elements.iter().enumerate() {
                let of_element: Vec<&Value> = (all.iter())
                    .filter_map(|one| {
                        let placed = one.get("prefixItems").and_then(|all| all.get(index));
                        placed.or(one.get("items"))
                    })
                    .collect();
                if !of_element.is_empty() {
                    at.push(None);
                    compare(value, &of_element, root, at, found);
                    at.pop();
                }
            }
        }
        _ => {}
    }
}

/// The schema, what it refers to, and its choices.
fn gather<'a>(schema: &'a Value, root: &'a Value, depth: usize, all: &mut Vec<&'a Value>) {
    if depth > DEEPEST {
        return;
    }
    all.push(schema);
    let referred = schema["$ref"]
        .as_str()
        .and_then(|to| root.pointer(to.strip_prefix('#')?));
    let choices = ["allOf", "anyOf", "oneOf"]
        .into_iter()
        .filter_map(|key| schema[key].as_array());
    for one in referred.into_iter().chain(choices.flatten()) {
        gather(one, root, depth + 1, all);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// R64.
    #[test]
    fn fields_that_no_schema_names_are_found() {
        let tree = json!({
            "type": "object",
            "properties": { "left": { "anyOf": [{ "$ref": "#" }, { "type": "null" }] }, "name": {} },
            "oneOf": [
                { "properties": { "kind": { "const": "a" }, "of_a": {} } },
                { "properties": { "kind": { "const": "b" }, "pair": { "prefixItems": [true, { "properties": { "x": {} } }] } } },
            ],
        });
        let map =
            json!({ "properties": { "name": {} }, "additionalProperties": { "type": "integer" } });
        for (value, schema, paths) in [
            (json!({ "name": 1, "kind": "a", "of_a": 2 }), &tree, vec![]),
            (
                json!({ "left": { "left": { "old": 1 } } }),
                &tree,
                vec!["left.left.old"],
            ),
            (
                json!({ "pair": [{ "any": 1 }, { "x": 1, "y": 2 }] }),
                &tree,
                vec!["pair[].y"],
            ),
            (json!({ "name": { "any": 1 }, "more": 7 }), &map, vec![]),
            (json!(7), &tree, vec![]),
            (json!({ "any": 1 }), &json!(true), vec![]),
        ] {
            let found: Vec<String> = unknown(&value, schema).into_iter().collect();
            assert_eq!(found, paths, "{value}");
        }
    }
}
