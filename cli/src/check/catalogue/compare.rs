//! Compares a payload with the schema of its type.
//!
//! The schemas are those of `schemars`, from Rust types; of JSON Schema (2020-12), these are the keywords that such types
//! can have. `pattern`, `format` and the like say more than types do, and are left to those who write the types. A full
//! validator needs regular expressions, which would make the executable a quarter larger.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Schemas may refer to themselves.
const DEEPEST: usize = 64;

/// What is different, in sentences that name fields and no values.
pub(super) fn differences(value: &Value, schema: &Value) -> BTreeSet<String> {
    let mut compared = Compared {
        root: schema,
        at: Vec::new(),
        followed: 0,
        found: BTreeSet::new(),
    };
    compared.refused(value, schema);
    compared.unknown(value, &[schema]);
    compared.found
}

/// Why this is no schema: a reference that leads nowhere, or a type that does not exist.
pub(super) fn fault(schema: &Value) -> Option<String> {
    fn search(schema: &Value, root: &Value) -> Option<String> {
        match schema {
            Value::Object(members) => {
                if let Some(Value::String(to)) = members.get("$ref")
                    && referred(to, root).is_none()
                {
                    return Some(format!("the reference {to} leads nowhere in the schema"));
                }
                let kinds = match members.get("type") {
                    Some(Value::Array(kinds)) => kinds.as_slice(),
                    Some(kind @ Value::String(_)) => std::slice::from_ref(kind),
                    _ => &[],
                };
                let is_known =
                    |kind: &&Value| kind.as_str().is_some_and(|kind| KINDS.contains(&kind));
                if let Some(kind) = kinds.iter().find(|kind| !is_known(kind)) {
                    return Some(format!("there is no type {kind}"));
                }
                // These have values, and no schemas.
                let is_value = |key: &str| matches!(key, "const" | "default" | "enum" | "examples");
                let mut schemas = members.iter().filter(|(key, _)| !is_value(key));
                schemas.find_map(|(_, one)| search(one, root))
            }
            Value::Array(all) => all.iter().find_map(|one| search(one, root)),
            _ => None,
        }
    }
    match schema {
        Value::Object(_) | Value::Bool(_) => search(schema, schema),
        _ => Some("it is neither an object nor true or false".to_owned()),
    }
}

const KINDS: [&str; 7] = [
    "null", "boolean", "integer", "number", "string", "array", "object",
];

fn referred<'a>(to: &str, root: &'a Value) -> Option<&'a Value> {
    root.pointer(to.strip_prefix('#')?)
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn list<'a>(schema: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    schema
        .get(key)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
}

/// One comparison on its way through the payload.
struct Compared<'a> {
    root: &'a Value,
    /// The way to the current place; `None` stands for an element of a list.
    at: Vec<Option<&'a str>>,
    /// References that are being followed.
    followed: usize,
    found: BTreeSet<String>,
}

impl<'a> Compared<'a> {
    /// A path such as `items[].count`.
    fn path(&self) -> String {
        let mut path = String::new();
        for step in &self.at {
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

    fn note(&mut self, what: &str) {
        let note = format!("{}: {what}", self.path());
        self.found.insert(note);
    }

    /// Runs one step further into the payload.
    fn within(&mut self, step: Option<&'a str>, compare: impl FnOnce(&mut Self)) {
        if self.at.len() < DEEPEST {
            self.at.push(step);
            compare(self);
            self.at.pop();
        }
    }

    /// What the schema refuses.
    fn refused(&mut self, value: &'a Value, schema: &'a Value) {
        if schema == &Value::Bool(false) {
            return self.note("is not allowed");
        }
        if let Some(to) = schema["$ref"]
            .as_str()
            .and_then(|to| referred(to, self.root))
        {
            // A circle of references asks for nothing.
            if self.followed < DEEPEST {
                self.followed += 1;
                self.refused(value, to);
                self.followed -= 1;
            }
        }
        for one in list(schema, "allOf") {
            self.refused(value, one);
        }
        for key in ["anyOf", "oneOf"] {
            self.refused_by_all(value, list(schema, key).collect());
        }
        let is_a = |kind: &Value| {
            kind == kind_of(value)
                || kind == "number" && value.is_number()
                || kind == "integer" && value.as_f64().is_some_and(|number| number.fract() == 0.0)
        };
        let kinds: Vec<&Value> = match &schema["type"] {
            Value::Null => Vec::new(),
            Value::Array(kinds) => kinds.iter().collect(),
            kind => vec![kind],
        };
        if !kinds.is_empty() && !kinds.iter().any(|kind| is_a(kind)) {
            let kinds: Vec<&str> = kinds.into_iter().filter_map(Value::as_str).collect();
            return self.note(&format!(
                "want {}, but got {}",
                kinds.join(" or "),
                kind_of(value)
            ));
        }
        if let Some(only) = schema.get("const").filter(|only| *only != value) {
            self.note(&format!("must be {only}"));
        }
        if schema.get("enum").is_some() && !list(schema, "enum").any(|one| one == value) {
            let all: Vec<String> = list(schema, "enum").map(Value::to_string).collect();
            self.note(&format!("must be one of {}", all.join(", ")));
        }
        match value {
            Value::Object(members) => self.refused_members(members, schema),
            Value::Array(elements) => {
                for (index, element) in elements.iter().enumerate() {
                    if let Some(schema) = schema_of(index, schema) {
                        self.within(None, |one| one.refused(element, schema));
                    }
                }
            }
            Value::Number(number) => {
                let number = number.as_f64().unwrap_or_default();
                type Bound = (&'static str, fn(f64, f64) -> bool, &'static str);
                let bounds: [Bound; 4] = [
                    ("minimum", |number, bound| number >= bound, "at least"),
                    ("maximum", |number, bound| number <= bound, "at most"),
                    (
                        "exclusiveMinimum",
                        |number, bound| number > bound,
                        "more than",
                    ),
                    (
                        "exclusiveMaximum",
                        |number, bound| number < bound,
                        "less than",
                    ),
                ];
                for (key, is_good, words) in bounds {
                    let bound = schema[key]
                        .as_f64()
                        .filter(|bound| !is_good(number, *bound));
                    if bound.is_some() {
                        self.note(&format!("must be {words} {}", schema[key]));
                    }
                }
            }
            _ => {}
        }
    }

    fn refused_members(&mut self, members: &'a Map<String, Value>, schema: &'a Value) {
        let required = list(schema, "required").filter_map(Value::as_str);
        let missing: Vec<String> = required
            .filter(|name| !members.contains_key(*name))
            .map(|name| format!("'{name}'"))
            .collect();
        if !missing.is_empty() {
            self.note(&format!("missing properties {}", missing.join(", ")));
        }
        for (name, value) in members {
            let named = schema["properties"].get(name);
            let of_others = || {
                let others = schema.get("additionalProperties");
                others.filter(|_| schema.get("patternProperties").is_none())
            };
            // What `false` forbids is a field that the type lacks, which is said once.
            let member = named.or_else(|| of_others().filter(|one| *one != &Value::Bool(false)));
            if let Some(schema) = member {
                self.within(Some(name), |one| one.refused(value, schema));
            }
        }
    }

    /// What is refused if all of these choices refuse the value: what the choice refuses that fits best. A choice fits
    /// worst whose tag or type is another one.
    fn refused_by_all(&mut self, value: &'a Value, choices: Vec<&'a Value>) {
        let mut best: Option<(usize, BTreeSet<String>)> = None;
        for choice in choices {
            let mut tried = Self {
                root: self.root,
                at: self.at.clone(),
                followed: self.followed,
                found: BTreeSet::new(),
            };
            tried.refused(value, choice);
            if tried.found.is_empty() {
                return;
            }
            let is_other = |what: &&String| what.contains(": must be ") || what.contains(": want ");
            let others = tried.found.iter().filter(is_other).count();
            if best.as_ref().is_none_or(|(least, _)| others < *least) {
                best = Some((others, tried.found));
            }
        }
        self.found
            .extend(best.into_iter().flat_map(|(_, found)| found));
    }

    /// Fields that none of these schemas names. An object whose other fields are a map has none.
    fn unknown(&mut self, value: &'a Value, schemas: &[&'a Value]) {
        let mut all = Vec::new();
        for schema in schemas {
            gather(schema, self.root, 0, &mut all);
        }
        match value {
            Value::Object(members) => {
                let is_map = |one: &&Value| {
                    let others = one.get("additionalProperties");
                    others.is_some_and(|others| others != &Value::Bool(false))
                        || one.get("patternProperties").is_some()
                };
                // A schema that names no field at all takes any.
                let names_some = all.iter().any(|one| one.get("properties").is_some());
                if all.iter().any(is_map) || !names_some {
                    return;
                }
                for (name, value) in members {
                    let named: Vec<&Value> = (all.iter())
                        .filter_map(|one| one.get("properties")?.get(name))
                        .collect();
                    self.within(Some(name), |one| match named.is_empty() {
                        true => {
                            let path = one.path();
                            let note = "is not in the type any more: was it removed or renamed?";
                            one.found.insert(format!("{path} {note}"));
                        }
                        false => one.unknown(value, &named),
                    });
                }
            }
            Value::Array(elements) => {
                for (index, value) in elements.iter().enumerate() {
                    let of_element: Vec<&Value> = (all.iter())
                        .filter_map(|one| schema_of(index, one))
                        .collect();
                    self.within(None, |one| one.unknown(value, &of_element));
                }
            }
            _ => {}
        }
    }
}

/// The schema of this element of a list.
fn schema_of(index: usize, schema: &Value) -> Option<&Value> {
    let placed = schema.get("prefixItems").and_then(|all| all.get(index));
    placed.or(schema.get("items"))
}

/// The schema, what it refers to, and its choices.
fn gather<'a>(schema: &'a Value, root: &'a Value, depth: usize, all: &mut Vec<&'a Value>) {
    if depth > DEEPEST {
        return;
    }
    all.push(schema);
    let to = schema["$ref"].as_str().and_then(|to| referred(to, root));
    let keys = ["allOf", "anyOf", "oneOf"].into_iter();
    for one in to.into_iter().chain(keys.flat_map(|key| list(schema, key))) {
        gather(one, root, depth + 1, all);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(schema: &Value, value: &Value) -> Vec<String> {
        differences(value, schema).into_iter().collect()
    }

    /// R64.
    #[test]
    fn differences_are_named_without_values() {
        let schema = json!({
            "type": "object",
            "properties": {
                "id": { "type": "integer" },
                "means": { "enum": ["card", "invoice"] },
                "share": { "type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1 },
                "items": { "type": "array", "items": { "$ref": "#/$defs/Item" } },
            },
            "required": ["id"],
            "$defs": { "Item": { "type": "object", "properties": { "count": { "type": "integer", "minimum": 1 } } } },
        });
        for (payload, expected) in [
            (
                json!({ "id": 7, "items": [{ "count": 1 }], "share": null }),
                vec![],
            ),
            (json!({ "id": 7.0, "share": 1 }), vec![]),
            (json!({}), vec!["the payload: missing properties 'id'"]),
            (json!([]), vec!["the payload: want object, but got array"]),
            (
                json!({ "id": "secret" }),
                vec!["id: want integer, but got string"],
            ),
            (
                json!({ "id": 7, "means": "secret" }),
                vec!["means: must be one of \"card\", \"invoice\""],
            ),
            (
                json!({ "id": 7, "share": "secret" }),
                vec!["share: want number or null, but got string"],
            ),
            (
                json!({ "id": 7, "share": 0 }),
                vec!["share: must be more than 0"],
            ),
            (
                json!({ "id": 7, "share": 1.5 }),
                vec!["share: must be at most 1"],
            ),
            (
                json!({ "id": 7, "items": [{}, { "count": 0, "color": "secret" }] }),
                vec![
                    "items[].color is not in the type any more: was it removed or renamed?",
                    "items[].count: must be at least 1",
                ],
            ),
        ] {
            assert_eq!(found(&schema, &payload), expected, "{payload}");
        }
    }

    /// R64: of several choices, the one that fits best says what is wrong.
    #[test]
    fn choices_and_references_are_followed() {
        let schema = json!({
            "type": "object",
            "properties": { "left": { "anyOf": [{ "$ref": "#" }, { "type": "null" }] }, "name": {} },
            "oneOf": [
                { "properties": { "kind": { "const": "a" }, "of_a": { "type": "integer" } }, "required": ["kind", "of_a"] },
                {
                    "properties": { "kind": { "const": "b" }, "pair": { "prefixItems": [true, { "properties": { "x": {} } }] } },
                    "required": ["kind"],
                },
            ],
        });
        for (payload, expected) in [
            (
                json!({ "name": 1, "kind": "a", "of_a": 2, "left": null }),
                vec![],
            ),
            (
                json!({ "kind": "a" }),
                vec!["the payload: missing properties 'of_a'"],
            ),
            (
                json!({ "kind": "b", "left": { "kind": "a", "of_a": 1, "left": { "kind": "b" } } }),
                vec![],
            ),
            (
                json!({ "kind": "b", "left": { "kind": "b", "old": 1 } }),
                vec!["left.old is not in the type any more: was it removed or renamed?"],
            ),
            (
                json!({ "kind": "b", "pair": [{ "any": 1 }, { "x": 1, "y": 2 }] }),
                vec!["pair[].y is not in the type any more: was it removed or renamed?"],
            ),
            (
                json!({ "kind": "b", "left": { "kind": "a", "of_a": "1" } }),
                vec!["left.of_a: want integer, but got string"],
            ),
        ] {
            assert_eq!(found(&schema, &payload), expected, "{payload}");
        }
        let map =
            json!({ "properties": { "name": {} }, "additionalProperties": { "type": "integer" } });
        assert_eq!(
            found(&map, &json!({ "name": {}, "more": 7 })),
            Vec::<String>::new()
        );
        assert_eq!(
            found(&map, &json!({ "more": "7" })),
            ["more: want integer, but got string"]
        );
        let circle = json!({ "$ref": "#/$defs/A", "$defs": { "A": { "$ref": "#/$defs/B" }, "B": { "$ref": "#/$defs/A" } } });
        assert_eq!(found(&circle, &json!(7)), Vec::<String>::new());
        assert_eq!(
            found(&json!(false), &json!(7)),
            ["the payload: is not allowed"]
        );
    }

    #[test]
    fn a_bad_schema_has_a_fault() {
        for (schema, expected) in [
            (json!({ "type": "nothing" }), "there is no type \"nothing\""),
            (
                json!({ "items": { "$ref": "#/$defs/none" } }),
                "the reference #/$defs/none leads nowhere in the schema",
            ),
            (
                json!({ "$ref": "file:///etc/passwd" }),
                "the reference file:///etc/passwd leads nowhere in the schema",
            ),
            (json!("text"), "it is neither an object nor true or false"),
        ] {
            assert_eq!(fault(&schema).as_deref(), Some(expected));
        }
        assert_eq!(
            fault(
                &json!({ "type": ["string", "null"], "properties": { "type": { "type": "integer" } } })
            ),
            None
        );
    }
}
