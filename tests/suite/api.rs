//! JSON under `api/v1` of the pages and of the portal. Each answer fits the OpenAPI document that the same handler serves.

mod clients;
mod once;
mod rights;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use diesel_outbox::NewMessage;
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox_pages::{Pages, Portal, Rights, Visitor};
use http::{Method, Request, Response, StatusCode};
use jsonschema::Draft;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::commands::With;
use crate::page::{Page, TOKEN};
use crate::support::{Database, File, Receiver, end, eventually, finish};
use crate::tenants::{config, two};

const HOUR: Duration = Duration::from_secs(3600);
const STRANGER: [u8; 4] = [192, 0, 2, 7];

/// A handler, whichever it is.
trait Handler: Sync {
    fn respond(&self, request: Request<Vec<u8>>, visitor: Visitor) -> Response<Vec<u8>>;
}

impl Handler for Pages {
    fn respond(&self, request: Request<Vec<u8>>, visitor: Visitor) -> Response<Vec<u8>> {
        Pages::respond(self, request, visitor)
    }
}

impl Handler for Portal {
    fn respond(&self, request: Request<Vec<u8>>, visitor: Visitor) -> Response<Vec<u8>> {
        Portal::respond(self, request, visitor)
    }
}

/// A program that knows the document of a handler.
struct Program<'a> {
    handler: &'a dyn Handler,
    token: String,
    document: Value,
    /// The operations that have answered as documented.
    answered: Mutex<BTreeSet<String>>,
}

impl<'a> Program<'a> {
    fn new(handler: &'a dyn Handler, token: &str) -> Self {
        let mut program = Self {
            handler,
            token: token.to_owned(),
            document: Value::Null,
            answered: Mutex::default(),
        };
        let (status, document) = program.send(&Method::GET, "/openapi.json", None);
        assert_eq!(status, StatusCode::OK, "{document}");
        program.document = document;
        program
    }

    fn send(&self, method: &Method, path: &str, body: Option<Value>) -> (StatusCode, Value) {
        read(&self.respond(method, path, body, None))
    }

    fn respond(
        &self,
        method: &Method,
        path: &str,
        body: Option<Value>,
        key: Option<&str>,
    ) -> Response<Vec<u8>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("/api/v1{path}"))
            .header("host", "localhost")
            .header("authorization", format!("Bearer {}", self.token));
        if body.is_some() {
            request = request.header("content-type", "application/json");
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let body = body.map_or_else(Vec::new, |body| body.to_string().into_bytes());
        let request = request.body(body).expect("a request");
        let visitor = Visitor::unknown(STRANGER.into());
        self.handler.respond(request, visitor)
    }

    /// Status and answer of a post with a key, and whether the answer is that of an earlier one.
    fn keyed(&self, path: &str, body: &Value, key: &str) -> (u16, Value, bool) {
        let response = self.respond(&Method::POST, path, Some(body.clone()), Some(key));
        let is_replayed = response.headers().contains_key("idempotency-replayed");
        let (status, answer) = read(&response);
        self.fits(&Method::POST, path, status, &answer);
        (status.as_u16(), answer, is_replayed)
    }

    /// The answer, which has the shape that the document describes.
    fn ask(&self, method: &Method, path: &str, body: Option<Value>) -> (StatusCode, Value) {
        let (status, answer) = self.send(method, path, body);
        self.fits(method, path, status, &answer);
        (status, answer)
    }

    /// Fails if the answer has not the shape that the document describes.
    fn fits(&self, method: &Method, path: &str, status: StatusCode, answer: &Value) {
        let plain = path.split('?').next().expect("a path");
        let is_meant = |template: &str| {
            let (own, given) = (template.split('/'), plain.split('/'));
            own.clone().count() == given.clone().count()
                && own
                    .zip(given)
                    .all(|(own, given)| own == given || own.starts_with('{'))
        };
        let paths = self.document["paths"].as_object().expect("paths");
        let verb = method.as_str().to_lowercase();
        let mut operations = paths
            .iter()
            .filter(|(template, _)| is_meant(template))
            .filter_map(|(_, operations)| operations.get(&verb));
        let operation = operations.next().expect("an operation");
        let responses = &operation["responses"];
        let response = responses.get(status.as_str());
        let content = match status.is_success() {
            true => {
                let content = &response.expect("a status of the document")["content"];
                let mut kinds = content.as_object().expect("kinds").values();
                kinds.next().expect("a kind")
            }
            false => {
                &response.unwrap_or(&responses["default"])["content"]["application/problem+json"]
            }
        };
        let content = &content["schema"];
        assert!(content.is_object(), "{method} {path}: {status}");
        let schema = json!({ "allOf": [content], "components": self.document["components"] });
        let validator = jsonschema::options()
            .with_draft(Draft::Draft202012)
            .should_validate_formats(true)
            .build(&schema)
            .expect("a schema");
        let faults: Vec<String> = validator
            .iter_errors(answer)
            .map(|fault| format!("{}: {fault}", fault.instance_path()))
            .collect();
        assert!(faults.is_empty(), "{method} {path}: {answer}: {faults:?}");
        if status.is_success() {
            let id = operation["operationId"].as_str().expect("an id").to_owned();
            self.answered.lock().expect("no panic").insert(id);
        }
    }

    fn get(&self, path: &str) -> Value {
        let (status, answer) = self.ask(&Method::GET, path, None);
        assert_eq!(status, StatusCode::OK, "{path}: {answer}");
        answer
    }

    fn done(&self, method: &Method, path: &str, body: Value) -> Value {
        let (status, answer) = self.ask(method, path, Some(body));
        assert!(status.is_success(), "{method} {path}: {answer}");
        answer
    }

    fn post(&self, path: &str, body: Value) -> Value {
        self.done(&Method::POST, path, body)
    }

    fn refused(&self, method: &Method, path: &str, body: Value) -> (u16, Value) {
        let (status, answer) = self.ask(method, path, Some(body));
        assert_eq!(answer["status"], status.as_u16(), "{answer}");
        (status.as_u16(), answer)
    }

    /// The operations that have not answered as documented.
    fn unanswered(&self) -> Vec<String> {
        let answered = self.answered.lock().expect("no panic");
        let paths = self.document["paths"].as_object().expect("paths");
        let operations = paths
            .values()
            .flat_map(|path| path.as_object().expect("operations").values());
        let ids = operations.map(|one| one["operationId"].as_str().expect("an id").to_owned());
        ids.filter(|id| !answered.contains(id)).collect()
    }

    /// Method and path of each route, with these words for the names in paths.
    fn routes(&self, word: &str) -> Vec<(Method, String)> {
        let paths = self.document["paths"].as_object().expect("paths");
        let mut routes = Vec::new();
        for (template, operations) in paths {
            let segments = template.split('/').map(|one| match one.starts_with('{') {
                true => word,
                false => one,
            });
            let path = segments.collect::<Vec<_>>().join("/");
            for verb in operations.as_object().expect("operations").keys() {
                let method = verb.to_uppercase().parse().expect("a method");
                routes.push((method, path.clone()));
            }
        }
        routes
    }
}

/// The status and the JSON of a response, of the right media type.
fn read(response: &Response<Vec<u8>>) -> (StatusCode, Value) {
    let status = response.status();
    let text = String::from_utf8_lossy(response.body());
    let kind = match status.is_success() {
        true if text.starts_with('[') => "application/cloudevents-batch+json",
        true => "application/json",
        false => "application/problem+json",
    };
    assert_eq!(response.headers()["content-type"], kind, "{text}");
    (status, serde_json::from_str(&text).expect("JSON"))
}

fn pages(database: &Database) -> Pages {
    let mut config = config(database);
    for (setting, value) in [
        ("OUTBOX_ADMIN_TOKEN", TOKEN),
        ("OUTBOX_ADMIN_PAYLOADS", "true"),
    ] {
        config.set(setting, value).expect(setting);
    }
    Pages::operators(&config, &database.secret_url(), None).expect("pages")
}

fn portal(database: &Database) -> Portal {
    let portal = Pages::portal(&config(database), &database.secret_url()).expect("a portal");
    let example = json!({ "order_id": 1 });
    portal
        .key([7; 32])
        .expect("a key")
        .topic("order.paid", "An order was paid.", example)
}

/// A receiver that refuses what says that it is bad.
fn receiver() -> Receiver {
    Receiver::start(|request, stream| {
        // With its quotes: an id may contain the letters.
        let is_bad = String::from_utf8_lossy(&request.body).contains("\"bad\"");
        let status = if is_bad { "422 No" } else { "200 OK" };
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\nok");
        std::io::Write::write_all(stream, answer.as_bytes())
    })
}

fn enqueue(database: &Database, tenant: Option<Uuid>, is: &str) -> String {
    let message = NewMessage::new("order.paid", &json!({ "is": is })).expect("JSON");
    let id = message.message_id().to_string();
    database.enqueue_message(match tenant {
        Some(tenant) => message.tenant_id(tenant),
        None => message,
    });
    id
}

/// R60
#[test]
fn operators_do_as_json_what_they_do_on_the_pages() {
    let (database, receiver) = (Database::new(), receiver());
    let pages = pages(&database);
    let program = Program::new(&pages, TOKEN);
    let (get, post) = (&Method::GET, &Method::POST);

    // Destinations.
    let acme =
        json!({ "name": "acme/1", "endpoint": { "url": receiver.url(), "topics": ["order.*"] } });
    let registered = program.post("/endpoints", acme.clone());
    assert_eq!(registered["endpoint"]["topics"], json!(["order.*"]));
    assert_eq!(registered["endpoint"]["old_secrets_until"], Value::Null);
    let secret = registered["secret"].as_str().expect("a secret");
    assert!(secret.starts_with("whsec_"));
    let (status, again) = program.refused(post, "/endpoints", acme);
    assert_eq!((status, &again["title"]), (409, &json!("Conflict")));
    let wrong = json!({ "name": "globex", "endpoint": { "url": "globex.example" } });
    let (status, problem) = program.refused(post, "/endpoints", wrong);
    assert_eq!(
        (status, &problem["field"]),
        (422, &json!("url")),
        "{problem}"
    );
    let unknown = json!({ "name": "globex", "colour": "red" });
    for (body, field) in [
        (unknown, json!("colour")),
        (json!({ "name": 7 }), json!("name")),
        (json!({ "endpoint": {} }), json!("name")),
        (
            json!({ "name": "a", "endpoint": { "topics": ["a", 1] } }),
            json!("topics"),
        ),
        (
            json!({ "name": "a", "endpoint": { "colour": "red" } }),
            json!("colour"),
        ),
    ] {
        let (status, problem) = program.refused(post, "/endpoints", body);
        assert_eq!((status, &problem["field"]), (422, &field), "{problem}");
    }
    let acme = "/endpoints/acme%2F1";
    for filter in [json!(""), json!({}), json!({ "is": true })] {
        let (status, problem) = program.refused(&Method::PATCH, acme, json!({ "filter": filter }));
        assert_eq!(
            (status, &problem["field"]),
            (422, &json!("filter")),
            "{problem}"
        );
    }
    let changed = json!({ "description": "Acme", "filter": { "is": [true] } });
    let changed = program.done(&Method::PATCH, acme, changed);
    assert_eq!(
        (&changed["topics"], &changed["filter"]),
        (&json!(["order.*"]), &json!({ "is": [true] }))
    );
    let changed = program.done(&Method::PATCH, acme, json!({ "filter": null }));
    assert_eq!(
        (&changed["description"], &changed["filter"]),
        (&json!("Acme"), &Value::Null)
    );
    assert_eq!(program.get(acme), changed);
    let options = r#"UPDATE {o}_endpoint SET concurrency = 3, policy = '{"key_run": 50}'"#;
    database.execute(options);
    let policy = json!({ "concurrency": 3, "key_run": 50 });
    let changed = program.get(acme);
    assert_eq!(changed["policy"], policy);
    assert_eq!(program.get("/endpoints?q=acm")["data"], json!([changed]));
    assert_eq!(program.get("/endpoints?q=globex")["data"], json!([]));
    assert_eq!(program.ask(get, "/endpoints/globex", None).0, 404);
    program.post(&format!("{acme}/disable"), json!({ "why": "maintenance" }));
    assert_eq!(program.get(acme)["disabled_reason"], "maintenance");
    program.post(&format!("{acme}/disable"), json!({}));
    assert_eq!(
        program.get(acme)["disabled_reason"],
        "maintenance",
        "it stays"
    );
    program.post(&format!("{acme}/enable"), json!({}));
    assert_eq!(
        program
            .refused(post, &format!("{acme}/verify"), json!({}))
            .0,
        422
    );
    program.done(
        &Method::PATCH,
        acme,
        json!({ "verification": "challenge:skip" }),
    );
    let verified = program.post(&format!("{acme}/verify"), json!({}));
    assert_eq!(verified["is_verified"], false, "{verified}");
    program.done(&Method::PATCH, acme, json!({ "verification": "none" }));
    let (status, why) = program.refused(post, &format!("{acme}/rotate"), json!({ "keep": "200y" }));
    assert_eq!(status, 422, "{why}");
    assert!(why.to_string().contains("one hundred years"), "{why}");
    let rotated = program.post(&format!("{acme}/rotate"), json!({ "keep": "1h" }));
    assert_ne!(rotated["secret"], secret);
    assert_eq!(
        program.post(&format!("{acme}/test"), json!({}))["accepted"],
        true
    );

    // Waiting messages, from page to page.
    let ids = ["good", "good", "bad"].map(|is| enqueue(&database, None, is));
    let first = program.get("/messages?limit=2");
    let next = first["next"].as_str().expect("a second page");
    let second = program.get(&format!("/messages?limit=2&cursor={next}"));
    assert_eq!(
        (second["data"][0]["message_id"].as_str(), &second["next"]),
        (Some(ids[2].as_str()), &Value::Null)
    );
    for wrong in ["limit=0", "limit=101", "cursor=x", "status=x", "colour=red"] {
        let status = program.ask(get, &format!("/messages?{wrong}"), None).0;
        assert!(status.is_client_error(), "{wrong}");
    }
    for (list, field) in [
        ("/messages", "status"),
        ("/messages", "tenant"),
        ("/ledger", "since"),
        ("/ledger", "until"),
        ("/dead", "reason"),
        ("/endpoints", "state"),
    ] {
        let (status, problem) = program.ask(get, &format!("{list}?{field}=x"), None);
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
        assert_eq!(problem["field"], field, "{problem}");
    }
    let known = program.get(&format!("/messages/{}", ids[0]));
    assert_eq!(known["rows"][0]["payload"], json!({ "is": "good" }));
    assert!(known["rows"][0]["waits"].is_string(), "{known}");
    let topic = &program.get("/topics")["data"][0];
    assert_eq!(
        (&topic["topic"], &topic["served_by"]),
        (&json!("order.paid"), &json!([]))
    );
    let depth = &program.get("/depths")["data"][0];
    assert_eq!(
        (&depth["topic"], &depth["pending"]),
        (&json!("order.paid"), &json!(3))
    );
    let sequence = &known["rows"][0]["sequence"];
    let later = program.post(
        &format!("/messages/{sequence}/reschedule"),
        json!({ "in": "1h" }),
    );
    assert_eq!(later["became"], "rescheduled");
    let cancelled = json!({ "dry_run": true });
    let cancelled = program.post("/messages/cancel?topic=order.paid", cancelled);
    assert_eq!(
        (&cancelled["matched"], &cancelled["changed"]),
        (&json!(3), &json!(0))
    );
    assert_eq!(
        program.post("/messages/cancel?topic=other", json!({}))["changed"],
        0
    );
    // A variable of a script that is empty cancels nothing.
    for all in ["/messages/cancel", "/messages/cancel?topic="] {
        let (status, problem) = program.refused(post, all, json!({}));
        assert_eq!(status, 422, "{problem}");
    }
    assert_eq!(
        program.post("/messages/cancel", json!({ "all": true, "dry_run": true }))["matched"],
        3
    );
    assert_eq!(
        program.post("/messages/retry", json!({ "all": true, "why": "mended" }))["changed"],
        0
    );
    program.post(
        &format!("/messages/{sequence}/cancel"),
        json!({ "why": "a test" }),
    );
    assert_eq!(
        program
            .refused(post, &format!("/messages/{sequence}/cancel"), json!({}))
            .0,
        409
    );
    assert_eq!(
        program
            .refused(post, "/messages/999999/cancel", json!({}))
            .0,
        404
    );

    // Deliveries, the ledger, dead letters. A cancelled message counts as dead.
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("settled", || {
        (database.count("delivered"), database.count("dead")) == (1, 2)
    });
    let relays = program.get("/relays");
    assert_eq!(relays["data"].as_array().map(Vec::len), Some(1), "{relays}");
    end(&relay);
    eventually("the dead letter is counted", || {
        let numbers = program.get("/depths/dead")["data"].to_string();
        numbers.contains("\"dead\":1")
    });
    program.get("/topics/served");
    let deliveries = program.get(&format!("{acme}/deliveries"));
    assert_eq!(
        deliveries["data"].as_array().map(Vec::len),
        Some(2),
        "{deliveries}"
    );
    assert_eq!(
        program.ask(get, "/endpoints/globex/deliveries", None).0,
        404
    );
    let ledger = program.get("/ledger?status=delivered&limit=1");
    assert_eq!(ledger["data"][0]["message_id"], ids[1]);
    let dead = program.get("/dead?destination=acme/1");
    let letter = &dead["data"][0];
    assert_eq!(
        (letter["message_id"].as_str(), &letter["payload"]),
        (Some(ids[2].as_str()), &Value::Null)
    );
    let letter = letter["id"].as_str().expect("an id");
    assert_eq!(
        program.get(&format!("/dead/{letter}"))["payload"],
        json!({ "is": "bad" })
    );
    let since = json!({ "since": "1h", "missing": true, "dry_run": true });
    assert_eq!(
        program.post(&format!("{acme}/recover"), since)["changed"],
        1
    );
    let since = json!({ "since": "yesterday" });
    let (status, problem) = program.refused(post, &format!("{acme}/recover"), since);
    assert_eq!((status, &problem["field"]), (422, &json!("since")));
    program.post(
        &format!("{acme}/backfill"),
        json!({ "since": "1h", "dry_run": true }),
    );
    for neither in [
        json!({}),
        json!({ "all": true, "ids": [letter] }),
        json!({ "ids": ["x"] }),
        json!({ "letters": [letter] }),
    ] {
        assert_eq!(program.refused(post, "/dead/requeue", neither).0, 422);
    }
    let count = json!({ "dry_run": true });
    assert_eq!(
        program.post("/dead/requeue?reason=REJECTED", count.clone())["matched"],
        1
    );
    assert_eq!(
        program.post("/dead/requeue?topic=other", count)["matched"],
        0
    );
    let requeued = program.post("/dead/requeue", json!({ "ids": [letter] }));
    assert_eq!(
        (&requeued["changed"], &requeued["left"]),
        (&json!(1), &json!(0))
    );
    let gone = program.post("/dead/requeue", json!({ "ids": [letter] }));
    assert_eq!((&gone["changed"], &gone["skipped"]), (&json!(0), &json!(1)));
    assert_eq!(
        program.post("/dead/discard", json!({ "all": true }))["changed"],
        0
    );
    let again = format!("{acme}/deliveries/{}/send-again", ids[1]);
    program.post(&again, json!({}));
    assert_eq!(database.count("pending"), 2);
    let settled = program.get(&format!("/messages/{}", ids[2]));
    let sequence = &settled["rows"][0]["sequence"];
    let settle = json!({ "verdict": "delivered", "why": "by mail", "destination": "acme/1" });
    let settled = program.post(&format!("/messages/{sequence}/settle"), settle);
    assert_eq!(settled["became"], "settled_delivered");

    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, available_at) SELECT 'order.paid', '{}', 'order-7', now() + interval '1 h' / n FROM generate_series(1, 2) n",
    );
    let key = &program.get("/keys")["data"][0];
    assert_eq!(
        (&key["ordering_key"], &key["waiting"]),
        (&json!("order-7"), &json!(1))
    );

    // Pauses, acts, the end.
    let pausing =
        json!({ "kind": "topic", "name": "order.paid", "reason": "maintenance", "for": "1h" });
    program.post("/pauses", pausing);
    assert_eq!(program.get("/pauses")["data"][0]["reason"], "maintenance");
    program.done(&Method::DELETE, "/pauses/topic/order.paid", json!({}));
    assert_eq!(
        program
            .refused(&Method::DELETE, "/pauses/topic/order.paid", json!({}))
            .0,
        404
    );
    program.done(&Method::DELETE, acme, json!({}));
    assert_eq!(program.ask(get, acme, None).0, 404);
    let crm = json!({ "name": "crm", "kind": "feed", "endpoint": { "topics": ["order.*"] } });
    let registered = program.post("/endpoints", crm);
    assert_eq!(registered["secret"], Value::Null);
    for (body, field) in [
        (json!({ "name": "a", "kind": "mail" }), "kind"),
        (
            json!({ "name": "a", "kind": "feed", "endpoint": { "url": receiver.url() } }),
            "url",
        ),
    ] {
        let (status, problem) = program.refused(post, "/endpoints", body);
        assert_eq!(
            (status, &problem["field"]),
            (422, &json!(field)),
            "{problem}"
        );
    }
    reads_a_feed(&database, &program, &registered["endpoint"]);
    assert_eq!(program.get("/feeds")["data"][0]["name"], "crm");
    assert_eq!(program.get("/feeds?limit=1")["next"], Value::Null);
    assert_eq!(program.ask(get, "/feeds/nobody", None).0, 404);
    let acts = program.get("/audit?q=acme")["data"].to_string();
    for act in ["put", "disable", "enable", "rotate", "send-again", "remove"] {
        assert!(acts.contains(&format!("endpoint {act}")), "{act}: {acts}");
    }
    program.get("/openapi.json");
    assert_eq!(program.unanswered(), [""; 0]);
}

/// R60
#[test]
fn acts_have_pages_and_none_is_missed_at_the_same_time() {
    let database = Database::new();
    let pages = pages(&database);
    let program = Program::new(&pages, TOKEN);
    database.execute(
        "INSERT INTO {o}_audit (at, who, act, target, why)
         SELECT '2026-01-31 12:00:00.123456Z'::timestamptz + n / 4 * interval '1 us', 'ann', 'pause', n::text, ''
           FROM generate_series(0, 11) n",
    );
    let mut found = Vec::new();
    let mut path = "/audit?limit=5".to_owned();
    loop {
        let page = program.get(&path);
        let acts = page["data"].as_array().expect("a list");
        found.extend(acts.iter().map(|act| act["target"].to_string()));
        let Some(next) = page["next"].as_str() else {
            break;
        };
        path = format!("/audit?limit=5&cursor={next}");
    }
    assert_eq!(found.len(), 12);
    let last = found[11].clone();
    assert!(
        ["\"0\"", "\"1\"", "\"2\"", "\"3\""].contains(&last.as_str()),
        "{found:?}"
    );
    found.sort();
    found.dedup();
    assert_eq!(found.len(), 12);
    let wrong = program.ask(&Method::GET, "/audit?cursor=x", None);
    assert_eq!(wrong.0, 422);
}

/// R60
#[test]
fn customers_do_as_json_what_they_do_in_the_portal() {
    let (database, receiver) = (Database::new(), receiver());
    let (portal, tenant) = (portal(&database), Uuid::now_v7());
    let program = Program::new(&portal, &portal.token(tenant, HOUR, Rights::all()));
    let (get, post) = (&Method::GET, &Method::POST);
    assert_eq!(
        program.get("/topics")["data"][0]["example"],
        json!({ "order_id": 1 })
    );
    for (body, field) in [
        (
            json!({ "url": "acme.example", "topics": ["order.paid"] }),
            json!("url"),
        ),
        (
            json!({ "url": receiver.url(), "topics": [] }),
            json!("topics"),
        ),
        (
            json!({ "url": receiver.url(), "topics": ["order.paid", "internal"] }),
            json!("topics"),
        ),
    ] {
        let (status, problem) = program.refused(post, "/endpoints", body);
        assert_eq!((status, &problem["field"]), (422, &field), "{problem}");
    }
    let body = json!({ "url": receiver.url(), "topics": ["order.paid"], "description": "ours" });
    let added = program.post("/endpoints", body);
    assert!(
        added["secret"].is_string() && added["endpoint"]["state"] == "active",
        "{added}"
    );
    let name = added["endpoint"]["name"].as_str().expect("a name");
    let one = format!("/endpoints/{name}");
    assert_eq!(program.get(&one), added["endpoint"]);
    assert_eq!(
        program.get("/endpoints")["data"],
        json!([added["endpoint"]])
    );
    let changed = program.done(&Method::PATCH, &one, json!({ "description": "" }));
    assert_eq!(
        (&changed["description"], &changed["url"]),
        (&Value::Null, &json!(receiver.url()))
    );
    // What a program has read it may send back: the password stays.
    let with_password = receiver.url().replace("://", "://ann:pa55word@");
    let changed = program.done(&Method::PATCH, &one, json!({ "url": with_password }));
    assert_eq!(
        changed["url"],
        receiver.url().replace("://", "://***@"),
        "{changed}"
    );
    program.done(&Method::PATCH, &one, json!({ "url": changed["url"] }));
    let stored = "SELECT url FROM {o}_endpoint";
    assert_eq!(database.text(stored), Some(with_password));
    let elsewhere = json!({ "url": "http://***@elsewhere.example/" });
    let (status, problem) = program.refused(&Method::PATCH, &one, elsewhere);
    assert_eq!(
        (status, &problem["field"]),
        (422, &json!("url")),
        "{problem}"
    );
    program.done(&Method::PATCH, &one, json!({ "url": receiver.url() }));

    let example = program.post(&format!("{one}/test"), json!({ "topic": "order.paid" }));
    assert_eq!(
        (&example["accepted"], &example["response"]),
        (&json!(true), &Value::Null)
    );
    let unknown = json!({ "topic": "order.piad" });
    let (status, problem) = program.refused(post, &format!("{one}/test"), unknown);
    assert_eq!(status, 422, "{problem}");
    let rotated = program.post(&format!("{one}/rotate"), json!({}));
    assert_ne!(rotated["secret"], added["secret"]);

    let ids = ["good", "bad"].map(|is| enqueue(&database, Some(tenant), is));
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("settled", || {
        (database.count("delivered"), database.count("dead")) == (1, 1)
    });
    end(&relay);
    let first = program.get(&format!("{one}/deliveries?limit=1"));
    let next = first["next"].as_str().expect("a second page");
    let second = program.get(&format!("{one}/deliveries?cursor={next}"));
    assert_eq!(second["data"].as_array().map(Vec::len), Some(1), "{second}");
    let dead = program.get(&format!(
        "{one}/deliveries?state=dead&topic=order.paid&since=2000-01-01T00:00"
    ));
    assert_eq!(dead["data"][0]["message_id"], ids[1]);
    assert_eq!(
        program
            .ask(get, &format!("{one}/deliveries?since=yesterday"), None)
            .0,
        422
    );
    for wrong in ["state=gone", "cursor=x", "since=1x"] {
        let path = format!("{one}/deliveries?{wrong}");
        let (status, problem) = program.ask(get, &path, None);
        let field = wrong.split('=').next();
        assert_eq!(
            (status.as_u16(), problem["field"].as_str()),
            (422, field),
            "{problem}"
        );
    }
    let counts = program.get(&format!("{one}/counts"));
    let counts = counts["data"].as_array().expect("steps");
    let sum = |of: &str| {
        counts
            .iter()
            .filter_map(|step| step[of].as_u64())
            .sum::<u64>()
    };
    assert_eq!((counts.len(), sum("delivered"), sum("dead")), (48, 1, 1));
    let details = program.get(&format!("{one}/deliveries/{}", ids[0]));
    assert_eq!(details["payload"], json!({ "is": "good" }));
    let since = json!({ "since": "2000-01-01T00:00:00Z", "missing": true, "dry_run": true });
    assert_eq!(program.post(&format!("{one}/recover"), since)["changed"], 1);
    let since = json!({ "since": "24h", "missing": true, "dry_run": true });
    assert_eq!(program.post(&format!("{one}/recover"), since)["changed"], 1);
    let (status, problem) =
        program.refused(post, &format!("{one}/recover"), json!({ "since": "x" }));
    assert_eq!((status, &problem["field"]), (422, &json!("since")));
    program.post(
        &format!("{one}/deliveries/{}/send-again", ids[1]),
        json!({}),
    );
    assert_eq!(database.count("pending"), 1);
    assert_eq!(
        program.refused(post, &format!("{one}/verify"), json!({})).0,
        422
    );
    database.execute("UPDATE {o}_endpoint SET verification = 'challenge'");
    let verified = program.post(&format!("{one}/verify"), json!({}));
    assert_eq!(verified["is_verified"], false, "{verified}");
    program.post(&format!("{one}/pause"), json!({ "for": "1h" }));
    program.post(&format!("{one}/resume"), json!({}));
    program.post(&format!("{one}/retry"), json!({}));
    program.post(&format!("{one}/disable"), json!({}));
    let disabled = program.get(&one);
    assert_eq!(disabled["state"], "disabled", "{disabled}");
    program.post(&format!("{one}/enable"), json!({}));
    program.done(&Method::DELETE, &one, json!({}));
    assert_eq!(program.ask(get, &one, None).0, 404);
    let wrong = json!({ "kind": "mail", "topics": ["order.paid"] });
    let (status, problem) = program.refused(post, "/endpoints", wrong);
    assert_eq!((status, &problem["field"]), (422, &json!("kind")));
    let added = program.post(
        "/endpoints",
        json!({ "kind": "feed", "topics": ["order.paid"] }),
    );
    assert_eq!(added["secret"], Value::Null);
    let one = format!(
        "/endpoints/{}",
        added["endpoint"]["name"].as_str().expect("a name")
    );
    let (status, problem) = program.refused(&Method::PATCH, &one, json!({ "kind": "webhook" }));
    assert_eq!((status, &problem["field"]), (422, &json!("kind")));
    program.done(
        &Method::PATCH,
        &one,
        json!({ "kind": "feed", "description": "ours" }),
    );
    database.execute("DELETE FROM {o} WHERE true");
    reads_a_feed(&database, &program, &added["endpoint"]);
    let who = database.text("SELECT DISTINCT who FROM {o}_audit");
    assert_eq!(who.as_deref(), Some("portal token"));
    program.get("/openapi.json");
    assert_eq!(program.unanswered(), [""; 0]);
}

/// R73: tokens, events and how far they are read.
fn reads_a_feed(database: &Database, program: &Program<'_>, feed: &Value) {
    assert_eq!(
        (&feed["kind"], &feed["url"]),
        (&json!("feed"), &json!("")),
        "{feed}"
    );
    let name = feed["name"].as_str().expect("a name");
    let path = format!("/feeds/{name}");
    let state = program.get(&path);
    assert_eq!(
        (&state["last_position"], &state["lag_events"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(state["readers"], json!([]));
    let tenant: Option<Uuid> = serde_json::from_value(state["tenant"].clone()).expect("a tenant");
    let id = enqueue(database, tenant, "good");
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("the event is stored", || {
        program.get(&path)["last_position"] == 1
    });
    end(&relay);
    let token = format!("{path}/token");
    let made = program.keyed(&token, &json!({}), "once");
    let again = program.keyed(&token, &json!({}), "once");
    assert_eq!((&again.1["token"], again.2), (&Value::Null, true));
    let secret = made.1["token"].as_str().expect("a token").to_owned();
    let state = program.get(&path);
    assert_eq!(
        (&state["lag_events"], &state["last_read_at"]),
        (&json!(1), &Value::Null),
        "{state}"
    );
    assert_eq!(state["readers"].as_array().map(Vec::len), Some(1));
    // With what lets the program in, which is no reader; and with the token of the feed.
    let events = program.get(&format!("{path}/events?after=begin"));
    assert_eq!(events[0]["id"], json!(id));
    let read = |query: &str| {
        let request = Request::get(format!("/api/v1{path}/events?{query}"))
            .header("host", "localhost")
            .header("authorization", format!("Bearer {secret}"));
        let request = request.body(Vec::new()).expect("a request");
        program
            .handler
            .respond(request, Visitor::unknown(STRANGER.into()))
    };
    let first = read("limit=1");
    let next = first.headers()["outbox-feed-next"].to_str().expect("text");
    assert_eq!(read(&format!("after={next}")).body(), b"[]");
    let state = program.get(&path);
    assert_eq!(
        (&state["lag_events"], &state["read_to"]),
        (&json!(0), &json!(1)),
        "{state}"
    );
    assert!(state["last_read_at"].is_string(), "{state}");
}

/// R71, R73: an outbox without the tables of feeds takes none, whoever asks.
#[test]
fn r73_each_interface_says_that_there_are_no_feeds() {
    let database = Database::without_endpoints();
    database.execute("SELECT public.outbox_create_endpoints('{o}')");
    let missing = "has no tables of feeds: `diesel-outbox migrate --with feeds` creates them";
    let outbox = database.outbox();
    let put = outbox
        .endpoints()
        .put(&mut database.connect(), &Endpoint::feed("crm"));
    let said = put.expect_err("a refusal").to_string();
    assert!(said.contains(missing), "{said}");

    let said = finish(database.binary(&["endpoint", "put", "crm", "--feed", "--topic", "a"]));
    let said = said.code(2).stderr;
    assert!(said.contains(missing), "{said}");

    let pages = pages(&database);
    let program = Program::new(&pages, TOKEN);
    let crm = json!({ "name": "crm", "kind": "feed", "endpoint": { "topics": ["a"] } });
    let (status, problem) = program.refused(&Method::POST, "/endpoints", crm);
    assert_eq!((status, &problem["field"]), (422, &json!("kind")));
    assert!(problem["detail"].to_string().contains(missing), "{problem}");
}
