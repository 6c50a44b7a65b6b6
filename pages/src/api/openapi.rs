//! The OpenAPI document of a table of routes.

use http::Method;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::once::LONGEST;
use super::{Problem, Route};

/// The document of these routes, which are served below this path.
pub(crate) fn document<S, V>(routes: &[Route<S, V>], title: &str, base: &str) -> Value {
    let (mut inputs, mut outputs) = generators();
    let problem = reference::<Problem>(&mut outputs);
    let mut paths = Map::new();
    for route in routes {
        let mut parameters: Vec<Value> = route
            .names()
            .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}))
            .collect();
        parameters.extend(route.parameters().map(|name| {
            let schema = match name {
                "limit" => json!({"type": "integer", "minimum": 1, "maximum": super::MOST, "default": super::USUAL}),
                _ => json!({"type": "string"}),
            };
            json!({"name": name, "in": "query", "schema": schema})
        }));
        let refused = |why: &str| json!({"description": why, "content": {"application/problem+json": {"schema": problem}}});
        let content = |schema: Value| json!({"application/json": {"schema": schema}});
        let output = (route.output)(&mut outputs).to_value();
        let status = route.status.as_str();
        let mut operation = json!({
            "operationId": route.id,
            "summary": route.summary,
            "responses": {
                status: {"description": "Done.", "content": content(output)},
                "default": refused("Refused."),
            },
        });
        if route.method != Method::GET {
            let key = json!({"type": "string", "minLength": 1, "maxLength": LONGEST});
            let key = json!({"name": "Idempotency-Key", "in": "header", "description": OF_KEY, "schema": key});
            parameters.push(key);
            operation["responses"]["409"] =
                refused("The state forbids it, or a request with this key has not ended.");
            operation["responses"]["422"] =
                refused("A value is wrong, or the key is that of another request.");
        }
        operation["parameters"] = parameters.into();
        if let Some(input) = route.input {
            let schema = input(&mut inputs).to_value();
            let name = schema["$ref"].as_str().and_then(|to| to.rsplit('/').next());
            let of_body = name.and_then(|name| inputs.definitions().get(name));
            let is_required = of_body.is_some_and(|of| of.get("required").is_some());
            operation["requestBody"] = json!({"required": is_required, "content": content(schema)});
        }
        let method = route.method.as_str().to_ascii_lowercase();
        let operations = paths.entry(route.path).or_insert_with(|| json!({}));
        operations[method] = operation;
    }
    let mut schemas = inputs.take_definitions(true);
    schemas.extend(outputs.take_definitions(true));
    json!({
        "openapi": "3.1.0",
        "info": {"title": title, "version": env!("CARGO_PKG_VERSION"), "description": DESCRIPTION},
        "servers": [{"url": format!("{base}/api/v1")}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    })
}

const DESCRIPTION: &str =
    "Lists have pages: `cursor` is the `next` of the page before. Times are RFC 3339, in UTC.";

const OF_KEY: &str = "The same request with the same key acts once within 24 hours, and gets the same answer with \
    Idempotency-Replayed: true, but without a secret.";

/// Of the bodies of requests and of answers: a field with a default is required only of answers.
fn generators() -> (SchemaGenerator, SchemaGenerator) {
    let settings = || {
        SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
            settings.meta_schema = None;
        })
    };
    (
        settings().into_generator(),
        settings().for_serialize().into_generator(),
    )
}

fn reference<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    generator.subschema_for::<T>().to_value()
}
