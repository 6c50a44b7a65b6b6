//! The OpenAPI document of a table of routes.

use http::Method;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::feed::{MOST_EVENTS, USUAL_EVENTS};
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
    paths.insert(EVENTS.to_owned(), json!({"get": events(&problem)}));
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

/// What is answered beside the routes: the events of a feed are no JSON of ours, and may be waited for.
const EVENTS: &str = "/feeds/{name}/events";

fn events(problem: &Value) -> Value {
    let refused = |why: &str| json!({"description": why, "content": {"application/problem+json": {"schema": problem}}});
    let query = |name: &str, about: &str, schema: Value| json!({"name": name, "in": "query", "description": about, "schema": schema});
    let limit =
        json!({"type": "integer", "minimum": 1, "maximum": MOST_EVENTS, "default": USUAL_EVENTS});
    let event = json!({
        "type": "object",
        "required": ["specversion", "id", "source", "type", "position"],
        "properties": {
            "specversion": {"type": "string"},
            "id": {"type": "string"},
            "source": {"type": "string"},
            "type": {"type": "string"},
            "position": {"type": "string"},
            "storedat": {"type": "string", "format": "date-time"},
            "data": {},
        },
    });
    let text = json!({"type": "string"});
    json!({
        "operationId": "read_events",
        "summary": "Events of a feed, in order. The token may be one of the feed.",
        "parameters": [
            {"name": "name", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}},
            query("after", "`begin`, `end`, a time (RFC 3339), or the `outbox-feed-next` of the last answer.", json!({"type": "string", "default": "begin"})),
            query("limit", "The most events.", limit),
            query("wait", "How long to wait for new events, such as `20s`; at most `60s`.", json!({"type": "string", "default": "0s"})),
        ],
        "responses": {
            "200": {
                "description": "The events; none: there are no new ones yet.",
                "headers": {
                    "outbox-feed-next": {"description": "`after` of the next request.", "schema": text},
                    "link": {"description": "The next request, `rel=\"next\"`.", "schema": text},
                },
                "content": {"application/cloudevents-batch+json": {"schema": {"type": "array", "items": event}}},
            },
            "401": refused("The token is no token of this feed."),
            "409": refused("`feed-changed`: the feed has another event at this cursor, because its database was restored. Go on from a time, and skip known ids."),
            "410": refused("`position-expired`: the next event is no longer kept."),
            "429": refused("Too many readers wait."),
            "default": refused("Refused."),
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
