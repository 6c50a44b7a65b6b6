//! The portal: pages for the customers of an application, as a function from request to response.

mod budgets;
mod doors;
mod filters;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_outbox::NewMessage;
use diesel_outbox::config::Config;
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::receive::{Headers, Verifier};
use diesel_outbox_pages::{Language, Pages, PagesError, Portal, Rights, Visitor, portal_routes};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::{Database, Receiver, Request, end, eventually};
use crate::tenants::{Tenant, config, rows_of, two};

const HOUR: Duration = Duration::from_secs(3600);

fn portal(config: &Config) -> Portal {
    let url = config.database_url().expect("a database");
    complete(Pages::portal(config, url).expect("a portal"))
}

fn complete(portal: Portal) -> Portal {
    let example = json!({ "order_id": 1 });
    let portal = portal.key([7; 32]);
    portal
        .expect("a key")
        .topic("order.paid", "An order was paid.", example)
}

/// A response, as a browser sees it.
#[derive(Debug)]
struct Seen {
    status: StatusCode,
    location: String,
    cookie: String,
    text: String,
}

impl Seen {
    fn ok(self) -> String {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        self.text
    }

    /// What the form sends back without showing it.
    fn hidden(&self, name: &str) -> String {
        let start = format!("type=\"hidden\" name=\"{name}\" value=\"");
        let rest = self.text.split_once(&start);
        let (value, _) = rest
            .and_then(|(_, rest)| rest.split_once('"'))
            .expect("a form");
        value
            .replace("&quot;", "\"")
            .replace("&lt;", "<")
            .replace("&gt;", ">")
            .replace("&amp;", "&")
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.text).expect("JSON")
    }
}

/// Whoever sends requests: known to the application, with the cookie of a link, or with a token.
#[derive(Clone)]
struct Browser<'a> {
    portal: &'a Portal,
    visitor: Visitor,
    cookie: String,
    token: String,
}

impl<'a> Browser<'a> {
    fn of(portal: &'a Portal, tenant: &Tenant, rights: Rights) -> Self {
        Self {
            portal,
            visitor: Visitor::of_tenant(tenant.id, "someone", rights),
            cookie: String::new(),
            token: String::new(),
        }
    }

    fn unknown(portal: &'a Portal) -> Self {
        Self {
            portal,
            visitor: Visitor::unknown([127, 0, 0, 1].into()),
            cookie: String::new(),
            token: String::new(),
        }
    }

    /// Opens a link.
    fn opening(portal: &'a Portal, link: &str) -> Self {
        let mut browser = Self::unknown(portal);
        let opened = browser.get(link);
        assert_eq!(opened.status, StatusCode::SEE_OTHER, "{}", opened.text);
        assert!(!opened.location.contains("token"), "{}", opened.location);
        let (cookie, how) = opened.cookie.split_once(';').expect("attributes");
        assert!(
            how.contains("HttpOnly") && how.contains("SameSite=Lax"),
            "{how}"
        );
        cookie.clone_into(&mut browser.cookie);
        browser
    }

    fn ask(&self, method: Method, path: &str, headers: &[(&str, &str)], form: &str) -> Seen {
        let mut request = http::Request::builder().method(method).uri(path);
        let bearer = match self.token.as_str() {
            "" => String::new(),
            token => format!("Bearer {token}"),
        };
        let own = [
            ("host", "shop.example"),
            ("cookie", self.cookie.as_str()),
            ("authorization", &bearer),
        ];
        let headers = headers.iter().chain(&own);
        for (name, value) in headers.filter(|(_, value)| !value.is_empty()) {
            request = request.header(*name, *value);
        }
        let request = request.body(form.as_bytes().to_vec()).expect("a request");
        let response = self.portal.respond(request, self.visitor.clone());
        let header = |name: &str| {
            let value = response.headers().get(name);
            value
                .map_or("", |value| value.to_str().expect("text"))
                .to_owned()
        };
        Seen {
            status: response.status(),
            location: header("location"),
            cookie: header("set-cookie"),
            text: String::from_utf8_lossy(response.body()).into_owned(),
        }
    }

    fn get(&self, path: &str) -> Seen {
        self.ask(Method::GET, path, &[], "")
    }

    /// Sends a form of this browser's own pages.
    fn post(&self, path: &str, pairs: &[(&str, &str)]) -> Seen {
        let token = self.get("/endpoints/new").hidden("form_token");
        let form = encoded(&[pairs, &[("form_token", token.as_str())]].concat());
        self.ask(Method::POST, path, &[], &form)
    }

    /// A program of the tenant changes the endpoint.
    fn patch(portal: &'a Portal, tenant: &Tenant, body: &Value) -> Seen {
        let mut program = Self::unknown(portal);
        program.token = portal.token(tenant.id, HOUR, Rights::all());
        let path = format!("/api/v1/endpoints/{}", tenant.endpoint);
        let json = [("content-type", "application/json")];
        program.ask(Method::PATCH, &path, &json, &body.to_string())
    }
}

fn encoded(pairs: &[(&str, &str)]) -> String {
    let mut form = url::form_urlencoded::Serializer::new(String::new());
    form.extend_pairs(pairs).finish()
}

/// The secret that a page shows.
fn secret(page: &str) -> String {
    let (_, rest) = page.split_once("id=\"secret\">").expect("a secret");
    rest.split('<').next().expect("its end").to_owned()
}

fn is_signed(request: &Request, secret: &str) -> bool {
    let verifier = Verifier::new(&[secret.parse().expect("a secret")]).expect("a verifier");
    verifier
        .verify(&Headers::new(request.headers()), &request.body)
        .is_ok()
}

/// R60: without a script, and from a link.
#[test]
fn a_customer_does_everything_with_an_endpoint() {
    let database = Database::new();
    all_of_an_endpoint(&database, &portal(&config(&database)));
}

/// R60: the settings then name no database.
#[test]
fn a_portal_works_with_connections_of_the_application() {
    let database = Arc::new(Database::new());
    let lent = Arc::clone(&database);
    let mut config = config(&database);
    config.database_url = None;
    let get = move || Ok::<_, String>(Box::new(lent.connect()));
    let portal = Pages::portal(&config, get);
    all_of_an_endpoint(&database, &complete(portal.expect("a portal")));
}

fn all_of_an_endpoint(database: &Database, portal: &Portal) {
    let (tenant, receiver) = (Uuid::now_v7(), Receiver::ok());
    let ann = Browser::opening(portal, &portal.link(tenant, HOUR));
    assert!(ann.get("/").ok().contains("There are no endpoints yet"));
    for (url, topic, why) in [
        ("acme.example", "order.paid", "Enter the whole URL"),
        (&receiver.url(), "internal.audit", "There is no such event"),
    ] {
        let typed = [("url", url), ("description", "ours"), ("topic", topic)];
        let refused = ann.post("/endpoints/add", &typed);
        assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY);
        let text = &refused.text;
        assert!(text.contains(why), "{text}");
        // The form is as it was sent.
        for (_, value) in &typed[..2] {
            assert!(text.contains(&format!("value=\"{value}\"")), "{text}");
        }
        let is_chosen = text.contains("value=\"order.paid\" checked");
        assert_eq!(is_chosen, topic == "order.paid", "{text}");
    }
    assert!(ann.get("/").ok().contains("There are no endpoints yet"));

    let url = receiver.url();
    let fields = [
        ("url", url.as_str()),
        ("description", "<b>ours"),
        ("topic", "order.paid"),
    ];
    let first = secret(&ann.post("/endpoints/add", &fields).ok());
    let list = ann.get("/").ok();
    assert!(list.contains(&url) && list.contains("&lt;b&gt;ours") && !list.contains(&first));
    assert!(!list.contains("<script"), "{list}");
    let (_, rest) = list.split_once("/endpoint?name=").expect("a link");
    let name = rest.split('"').next().expect("a name").to_owned();
    let name = [("name", name.as_str())];
    let page = format!("/endpoint?{}", encoded(&name));

    // An example of a chosen event, and another secret beside the first.
    let second = secret(&ann.post("/endpoint/rotate", &name).ok());
    let example = [name[0], ("topic", "order.paid")];
    let answer = ann.post("/endpoint/test", &example).ok();
    assert!(
        answer.contains("HTTP 200") && answer.contains("accepted"),
        "{answer}"
    );
    let request = receiver.wait_for(1).remove(0);
    let event = request.json();
    assert_eq!(event["type"], "order.paid");
    assert_eq!(event["data"], json!({ "order_id": 1 }));
    assert!(is_signed(&request, &first) && is_signed(&request, &second));

    // Deliveries, by filters, and one of them again.
    let message = NewMessage::new("order.paid", &json!({ "of": "ann's order" })).expect("JSON");
    let id = message.message_id().to_string();
    database.enqueue_message(message.tenant_id(tenant));
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("delivered", || database.count("delivered") == 1);
    for (filter, is_there) in [
        ("", true),
        (
            "topic=order.paid&state=delivered&since=2000-01-01T00%3A00",
            true,
        ),
        ("topic=order.sent", false),
        ("state=dead", false),
        ("until=2000-01-01T00%3A00", false),
    ] {
        let list = ann.get(&format!("/deliveries?{filter}")).ok();
        assert_eq!(list.contains(&id), is_there, "{filter}");
    }
    let wrong = ann.get("/deliveries?since=yesterday");
    assert_eq!(wrong.status, StatusCode::UNPROCESSABLE_ENTITY);
    let delivery = [name[0], ("id", &id)];
    let shown = ann.get(&format!("/delivery?{}", encoded(&delivery))).ok();
    assert!(
        shown.contains("ann&#39;s order") || shown.contains("ann's order"),
        "{shown}"
    );
    let again = ann.post("/delivery/again", &delivery);
    assert!(again.location.ends_with("done=again"), "{again:?}");
    assert_eq!(receiver.wait_for(3)[2].id(), id);
    end(&relay);

    // Disabled, changed, enabled, recovered, removed.
    let disabled = ann.post("/endpoint/disable", &name);
    assert!(
        ann.get(&disabled.location)
            .ok()
            .contains("was disabled here")
    );
    let edit = ann.get(&format!("/endpoint/edit?{}", encoded(&name))).ok();
    assert!(edit.contains("&lt;b&gt;ours") && edit.contains("An order was paid."));
    // The form shows no password, and keeps it at the same server only.
    let stored = "SELECT url FROM {o}_endpoint";
    let with_password = receiver.url().replace("://", "://ann:pa55word@");
    let change = |url: &str| {
        ann.post(
            "/endpoint/change",
            &[name[0], ("url", url), ("topic", "order.paid")],
        )
    };
    change(&with_password);
    assert_eq!(database.text(stored), Some(with_password.clone()));
    let edit = ann.get(&format!("/endpoint/edit?{}", encoded(&name))).ok();
    assert!(
        !edit.contains("pa55word") && !edit.contains("ann:"),
        "{edit}"
    );
    let shown = receiver.url().replace("://", "://***@");
    assert!(edit.contains(&shown), "{edit}");
    change(&shown);
    assert_eq!(database.text(stored), Some(with_password.clone()));
    change(&format!("{shown}/more"));
    assert_eq!(database.text(stored), Some(format!("{with_password}/more")));
    let elsewhere = change("http://***@elsewhere.example/");
    assert_eq!(elsewhere.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(database.text(stored), Some(format!("{with_password}/more")));

    let moved = [
        name[0],
        ("url", "http://10.0.0.7/new"),
        ("topic", "order.paid"),
    ];
    let mistyped = [name[0], ("url", "new.example"), moved[2]];
    let refused = ann.post("/endpoint/change", &mistyped);
    assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        refused.text.contains("value=\"new.example\""),
        "{refused:?}"
    );
    ann.post("/endpoint/change", &moved);
    assert!(ann.get(&page).ok().contains("http://10.0.0.7/new"));
    ann.post("/endpoint/enable", &name);
    assert!(ann.get(&page).ok().contains("badge good"));
    assert!(ann.get(&page).ok().contains("Send waiting events now"));
    let retried = ann.post("/endpoint/retry", &name);
    assert!(
        ann.get(&retried.location)
            .ok()
            .contains("Waiting events that are due now: 0.")
    );
    let recover = [name[0], ("since", "2000-01-01T00:00")];
    let recovered = ann.post("/endpoint/recover", &recover);
    assert!(
        ann.get(&recovered.location)
            .ok()
            .contains("Events that wait to be sent again: 0.")
    );
    let unsure = ann.post("/endpoint/remove", &name);
    assert_eq!(unsure.status, StatusCode::OK);
    let waiting = "Events that wait for this endpoint: ";
    assert!(unsure.text.contains(waiting), "{}", unsure.text);
    assert_eq!(ann.get(&page).status, StatusCode::OK, "it is asked first");
    ann.post("/endpoint/remove", &[name[0], ("sure", "yes")]);
    assert_eq!(ann.get(&page).status, StatusCode::NOT_FOUND);
    let acts = database.text("SELECT string_agg(act, ',' ORDER BY at) FROM {o}_audit");
    let acts = acts.expect("acts");
    for act in ["put", "rotate", "send-again", "disable", "enable", "remove"] {
        assert!(acts.contains(act), "{act} of {acts}");
    }
}

/// A route that a tenant tries: its path may have `{name}`.
struct Door {
    method: Method,
    path: String,
    /// Parameters, fields, and what stands in the path.
    takes: Vec<String>,
    is_json: bool,
}

const KEY: &str = "Idempotency-Key";

impl Door {
    /// Every page, every act, and every route of the JSON interface, as the portal lists them.
    fn all(spy: &Browser<'_>) -> Vec<Self> {
        let pages = portal_routes().map(|(method, path, takes)| Self {
            method,
            path: path.to_owned(),
            takes: takes.iter().map(|name| (*name).to_owned()).collect(),
            is_json: false,
        });
        let document: Value =
            serde_json::from_str(&spy.get("/api/v1/openapi.json").ok()).expect("JSON");
        let mut all: Vec<Self> = pages.collect();
        for (path, operations) in document["paths"].as_object().expect("paths") {
            for (method, operation) in operations.as_object().expect("operations") {
                let parameters = operation["parameters"].as_array().expect("a list");
                let names = parameters
                    .iter()
                    .map(|one| one["name"].as_str().expect("a name").to_owned());
                let body = &operation["requestBody"]["content"]["application/json"]["schema"];
                let body = body["$ref"]
                    .as_str()
                    .and_then(|to| document.pointer(&to[1..]));
                let fields = body.and_then(|body| body["properties"].as_object());
                let fields = fields.into_iter().flat_map(|fields| fields.keys().cloned());
                all.push(Self {
                    method: method.to_uppercase().parse().expect("a method"),
                    path: format!("/api/v1{path}"),
                    takes: names.chain(fields).collect(),
                    is_json: true,
                });
            }
        }
        // An endpoint that is registered again has no deliveries of the old one.
        all.sort_by_key(|door| door.method == Method::DELETE || door.path == "/endpoint/remove");
        assert!(
            all.len() > portal_routes().count() + 15,
            "JSON has routes, too"
        );
        all
    }

    fn is_of_feeds(&self) -> bool {
        self.path.contains("/feed")
    }

    /// A value that the events of a feed can be asked for with; for all other routes, none.
    fn of_events(&self, parameter: &str) -> &'static str {
        match parameter {
            "after" if self.path.ends_with("/events") => "begin",
            "limit" if self.path.ends_with("/events") => "10",
            "wait" if self.path.ends_with("/events") => "0s",
            _ => "",
        }
    }

    /// Sends these values, wherever the route takes them.
    fn ask(&self, spy: &Browser<'_>, values: &[(&str, &str)]) -> Seen {
        let mut path = self.path.clone();
        let mut rest = Vec::new();
        let mut headers = vec![("content-type", "application/json")];
        for (name, value) in values {
            if *name == KEY {
                headers.push((KEY, *value));
                continue;
            }
            let there = format!("{{{name}}}");
            let segment = encoded(&[("", *value)]).split_off(1).replace('+', "%20");
            match path.contains(&there) {
                true => path = path.replace(&there, &segment),
                false => rest.push((*name, *value)),
            }
        }
        if self.method == Method::GET || !self.is_json {
            let both = encoded(&rest);
            return spy.ask(self.method.clone(), &format!("{path}?{both}"), &[], &both);
        }
        if self.method == Method::DELETE {
            // Not a dry run.
            let asked: Vec<(&str, &str)> = (rest.into_iter())
                .map(|(name, value)| match value {
                    "yes" => (name, "false"),
                    value => (name, value),
                })
                .collect();
            let path = format!("{path}?{}", encoded(&asked));
            return spy.ask(self.method.clone(), &path, &headers, "{}");
        }
        let field = |(name, value): &(&str, &str)| {
            let value = match *name {
                "topics" => json!([value]),
                "filter" if value.is_empty() => Value::Null,
                "missing" | "dry_run" if *value == "yes" => json!(true),
                _ => json!(value),
            };
            ((*name).to_owned(), value)
        };
        let body = Value::Object(rest.iter().map(field).collect()).to_string();
        spy.ask(self.method.clone(), &path, &headers, &body)
    }
}

/// R70, R73: an outbox without the tables of feeds offers none.
#[test]
fn a_customer_is_offered_no_feed_where_there_are_none() {
    let database = Database::without_endpoints();
    database.execute("SELECT public.outbox_create_endpoints('{o}')");
    let portal = portal(&config(&database));
    let ann = Browser::opening(&portal, &portal.link(Uuid::now_v7(), HOUR));
    let form = ann.get("/endpoints/new").ok();
    assert!(form.contains("name=\"url\""), "{form}");
    assert!(!form.contains("You fetch"), "{form}");
    let fields = [("kind", "feed"), ("topic", "order.paid")];
    let refused = ann.post("/endpoints/add", &fields);
    assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY);
    let fields = [("url", "https://acme.example"), ("topic", "order.paid")];
    ann.post("/endpoints/add", &fields).ok();
    assert_eq!(database.number("SELECT count(*) FROM {o}_endpoint"), 1);
}

/// R73: from the choice to the events, as the page says it.
#[test]
fn a_customer_fetches_events_with_the_command_of_the_page() {
    let database = Database::new();
    let portal = portal(&config(&database)).base("/webhooks");
    let tenant = Uuid::now_v7();
    let ann = Browser::opening(&portal, &portal.link(tenant, HOUR));
    let form = ann.get("/endpoints/new").ok();
    assert!(
        form.contains("We call you") && form.contains("You fetch"),
        "{form}"
    );
    // A URL that was typed before is no mistake.
    let fields = [
        ("kind", "feed"),
        ("url", "https://acme.example"),
        ("topic", "order.paid"),
        ("description", "our CRM"),
    ];
    let added = ann.post("/endpoints/add", &fields);
    assert_eq!(added.status, StatusCode::SEE_OTHER, "{}", added.text);
    let page = ann.get(&added.location).ok();
    let name = database
        .text("SELECT name FROM {o}_endpoint WHERE kind = 'feed'")
        .expect("a name");
    let address = format!("https://shop.example/webhooks/api/v1/feeds/{name}/events");
    for there in [&address, "You fetch", "never", "Make a token", "our CRM"] {
        assert!(page.contains(there), "{there}: {page}");
    }
    for of_sends in ["Signing secret", "Send an example", ">URL<"] {
        assert!(!page.contains(of_sends), "{of_sends}: {page}");
    }
    let edit = [("name", name.as_str())];
    let edit = ann.get(&format!("/endpoint/edit?{}", encoded(&edit))).ok();
    assert!(!edit.contains("name=\"url\""), "{edit}");
    let change = [
        ("name", name.as_str()),
        ("topic", "order.paid"),
        ("description", "CRM"),
    ];
    let changed = ann.post("/endpoint/change", &change);
    assert!(changed.location.ends_with("done=changed"), "{changed:?}");

    let id = {
        let message = NewMessage::new("order.paid", &json!({ "n": 1 })).expect("JSON");
        let id = message.message_id().to_string();
        database.enqueue_message(message.tenant_id(tenant));
        id
    };
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("the event is stored", || {
        database.number("SELECT count(*) FROM {o}_feed_event") == 1
    });
    end(&relay);
    let page = ann.get(&added.location).ok();
    assert!(page.contains("events: 1, "), "{page}");
    let list = ann.get("/deliveries").ok();
    assert!(list.contains(&id));
    // Nobody was called.
    let delivery = [("name", name.as_str()), ("id", id.as_str())];
    let delivery = ann.get(&format!("/delivery?{}", encoded(&delivery))).ok();
    for shown in [&page, &list, &delivery] {
        assert!(shown.contains("in the feed"), "{shown}");
        assert!(!shown.contains(">delivered"), "{shown}");
    }

    let token = ann.post("/feed/token", &[("name", &name)]).ok();
    let secret = secret(&token);
    let command = format!(
        "curl -i -H &quot;Authorization: Bearer {secret}&quot; &quot;{address}?after=begin&quot;"
    );
    assert!(token.contains(&command), "{token}");
    assert!(!ann.get(&added.location).ok().contains(&secret));
    let mut program = Browser::unknown(&portal);
    program.token.clone_from(&secret);
    let path = address
        .strip_prefix("https://shop.example")
        .expect("a path");
    let events = program.get(&format!("{path}?after=begin"));
    assert_eq!(events.json()[0]["id"], json!(id), "{events:?}");
    // Who removes the feed is told what nobody has fetched.
    let remove = ann.post("/endpoint/remove", &[("name", &name)]).ok();
    for there in ["have not fetched: 1.", "nobody can fetch the events"] {
        assert!(remove.contains(there), "{there}: {remove}");
    }
    // The token opens nothing else.
    assert_eq!(
        program.get("/webhooks/api/v1/endpoints").status,
        StatusCode::UNAUTHORIZED
    );
    // A wait ends.
    let began = Instant::now();
    assert_eq!(
        program.get(&format!("{path}?after=end&wait=1s")).json(),
        json!([])
    );
    assert!(began.elapsed() >= Duration::from_secs(1));

    // With the session, for those who may see content; not for another tenant, and not for operators.
    assert_eq!(ann.get(path).json()[0]["id"], json!(id));
    for (visitor, status) in [
        (
            Visitor::of_tenant(tenant, "bob", Rights::all().with_payloads(false)),
            403,
        ),
        (
            Visitor::of_tenant(Uuid::now_v7(), "eve", Rights::all()),
            404,
        ),
        (Visitor::known("operator", Rights::all()), 403),
        (Visitor::unknown([127, 0, 0, 1].into()), 401),
    ] {
        let other = Browser {
            visitor,
            ..Browser::unknown(&portal)
        };
        assert_eq!(other.get(path).status, status);
    }
    // Without the right to see secrets, nobody makes a token.
    let rights = Rights::all().with_secrets(false);
    let looks = Browser {
        visitor: Visitor::of_tenant(tenant, "bob", rights),
        ..Browser::unknown(&portal)
    };
    assert!(!looks.get(&added.location).ok().contains("Make a token"));
    let refused = looks.post("/feed/token", &[("name", &name)]);
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
    let acts =
        "SELECT string_agg(act || ' by ' || who, ', ') FROM {o}_audit WHERE act = 'feed token'";
    assert_eq!(
        database.text(acts).as_deref(),
        Some("feed token by portal link")
    );
}

/// R60: what is wrong with an endpoint and what to do, on its page and as JSON.
#[test]
fn an_endpoint_says_why_it_gets_nothing_and_what_to_do() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database));
    let ann = Browser::of(&portal, &acme, Rights::all());
    let page = format!("/endpoint?{}", encoded(&[("name", &acme.endpoint)]));
    for (row, state, words) in [
        ("enabled = true", "active", ">active<"),
        (
            "failing = true, failing_since = now() - interval '20 min'",
            "failing",
            "Look at the latest deliveries for the reason",
        ),
        (
            "enabled = false, disabled_by = 'receiver', disabled_reason = 'GONE: the receiver returned 410'",
            "disabled",
            "answered 410 (Gone)",
        ),
        (
            "disabled_by = 'relay', disabled_reason = 'has failed for 5 days'",
            "disabled",
            "recover the events that it missed",
        ),
        (
            "disabled_by = NULL, disabled_reason = '10.0.0.7 annoys us'",
            "disabled",
            "contact our support",
        ),
        (
            "enabled = true, failing = false, verification = 'challenge'",
            "unverified",
            "Nothing is sent before your endpoint is verified",
        ),
        (
            "verification_error = 'CONNECT: 10.0.0.7 refused'",
            "unverified",
            "your endpoint could not be reached",
        ),
        (
            "enabled = false, disabled_by = 'relay', disabled_reason = 'NOT_VERIFIED: CONNECT: 10.0.0.7 refused'",
            "disabled",
            "did not confirm that it wants events",
        ),
    ] {
        database.execute(&format!(
            "UPDATE {{o}}_endpoint SET {row} WHERE name = 'acme-hook'"
        ));
        let shown = ann.get(&page).ok();
        assert!(shown.contains(words), "{row}: {shown}");
        assert!(!shown.contains("10.0.0.7"), "{shown}");
        let one = ann.get("/api/v1/endpoints/acme-hook").ok();
        assert!(
            one.contains(&format!("\"state\":\"{state}\"")),
            "{row}: {one}"
        );
        assert!(!one.contains("10.0.0.7"), "{one}");
        // The curves are there for those who do not see them, too.
        assert!(
            shown.contains("delivered, last 24 hours") && shown.contains("up to 1 in half an hour")
        );
    }
}

/// R60
#[test]
fn a_customer_verifies_an_endpoint_and_recovers_what_failed() {
    let database = Database::new();
    let is_well = Arc::new(AtomicBool::new(false));
    let well = Arc::clone(&is_well);
    let receiver = Receiver::start(move |request, stream| {
        let challenge = request.json()["data"]["challenge"]
            .as_str()
            .map(str::to_owned);
        let status = match well.load(Ordering::Acquire) {
            true => "200 OK",
            false => "422 No",
        };
        let body = challenge.map_or_else(String::new, |challenge| {
            json!({ "challenge": challenge }).to_string()
        });
        let answer = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        std::io::Write::write_all(stream, answer.as_bytes())
    });
    let (portal, tenant) = (portal(&config(&database)), Uuid::now_v7());
    let ann = Browser::opening(&portal, &portal.link(tenant, HOUR));
    let fields = [("url", receiver.url()), ("topic", "order.paid".to_owned())];
    let fields = fields
        .each_ref()
        .map(|(name, value)| (*name, value.as_str()));
    ann.post("/endpoints/add", &fields).ok();
    let name = database
        .text("SELECT name FROM {o}_endpoint")
        .expect("an endpoint");
    let name = [("name", name.as_str())];
    let message = NewMessage::new("order.paid", &json!({ "order_id": 1 })).expect("JSON");
    let id = message.message_id().to_string();
    database.enqueue_message(message.tenant_id(tenant));
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("given up", || database.count("dead") == 1);
    end(&relay);

    database.execute("UPDATE {o}_endpoint SET verification = 'challenge'");
    let refused = ann.post("/endpoint/verify", &name);
    assert!(!refused.location.contains("done="), "{refused:?}");
    let page = ann.get(&refused.location).ok();
    assert!(
        page.contains("not verified") && page.contains("Verify now"),
        "{page}"
    );
    is_well.store(true, Ordering::Release);
    let verified = ann.post("/endpoint/verify", &name);
    let page = ann.get(&verified.location).ok();
    assert!(
        page.contains("Your endpoint is verified") && page.contains("badge good"),
        "{page}"
    );

    let since = [name[0], ("since", "2000-01-01T00:00")];
    let recovered = ann.post("/endpoint/recover", &since);
    assert!(
        ann.get(&recovered.location)
            .ok()
            .contains("Events that wait to be sent again: 1.")
    );
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("delivered", || database.count("delivered") == 1);
    end(&relay);
    let received = receiver.requests();
    assert_eq!(received.last().map(Request::id), Some(id));
}

/// R66: also of events that were never tried, which no history leads to.
#[test]
fn a_waiting_event_has_details() {
    let (database, acme, globex) = two();
    let id = Uuid::now_v7();
    database.execute(&format!(
        "INSERT INTO {{o}} (message_id, topic, destination, tenant_id, payload, available_at)
         SELECT CASE n WHEN 7 THEN '{id}'::uuid ELSE gen_random_uuid() END, 'order.paid', '{}', '{}', json_build_object('n', n), now() + interval '1 hour'
           FROM generate_series(1, 9) n",
        acme.endpoint, acme.id
    ));
    let portal = portal(&config(&database));
    let owner = Browser::of(&portal, &acme, Rights::all());
    let name = [("name", acme.endpoint.as_str())];
    let page = format!("/delivery?{}", encoded(&[name[0], ("id", &id.to_string())]));
    let list = owner.get(&format!("/deliveries?{}", encoded(&name))).ok();
    assert!(list.contains(&page.replace('&', "&amp;")), "{list}");
    let details = owner.get(&page).ok();
    assert!(details.contains("waiting") && details.contains("next attempt"));
    assert!(details.contains("&quot;n&quot;: 7"), "{details}");
    let other = Browser::of(&portal, &globex, Rights::all());
    assert_eq!(other.get(&page).status, StatusCode::NOT_FOUND);
    let unknown = page.replace(&id.to_string(), &Uuid::now_v7().to_string());
    assert_eq!(owner.get(&unknown).status, StatusCode::NOT_FOUND);
}

/// R59, R60
#[test]
fn endpoints_of_customers_are_verified_if_the_settings_say_so() {
    let database = Database::new();
    let mut config = config(&database);
    config
        .set("OUTBOX_ENDPOINT_VERIFICATION", "challenge")
        .expect("a setting");
    let (portal, receiver) = (portal(&config), Receiver::ok());
    let ann = Browser::opening(&portal, &portal.link(Uuid::now_v7(), HOUR));
    let url = receiver.url();
    let fields = [("url", url.as_str()), ("topic", "order.paid")];
    ann.post("/endpoints/add", &fields).ok();
    let verification = "SELECT verification FROM {o}_endpoint";
    assert_eq!(database.text(verification).as_deref(), Some("challenge"));
    // The relay asks the endpoint: so it costs as much as a test.
    assert_eq!(database.number("SELECT cost FROM {o}_audit"), 6);
}

/// R60
#[test]
fn a_portal_speaks_the_visitors_language_and_wears_the_applications_colours() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database))
        .name("Acme Shop")
        .logo("image/svg+xml", "<svg/>")
        .style(":root { --accent: #0a6e4f; }");
    let ann = Browser::of(&portal, &acme, Rights::all());
    let german = ann
        .ask(Method::GET, "/", &[("accept-language", "de-AT,en")], "")
        .ok();
    assert!(german.contains("lang=\"de\"") && german.contains("Endpunkt hinzufügen"));
    assert!(german.contains("Acme Shop") && german.contains("src=\"/assets/logo\""));
    let dead = [
        ("name", acme.endpoint.as_str()),
        ("id", &acme.dead.to_string()),
    ];
    let dead = format!("/delivery?{}", encoded(&dead));
    let dead = ann
        .ask(Method::GET, &dead, &[("accept-language", "de")], "")
        .ok();
    assert!(
        dead.contains("Ihr Endpunkt hat die Anfrage abgelehnt"),
        "{dead}"
    );
    assert!(!dead.contains("refused"), "{dead}");
    assert_eq!(ann.get("/assets/logo").ok(), "<svg/>");
    let style = ann.get("/assets/style.css").ok();
    assert!(style.contains("prefers-color-scheme: dark") && style.ends_with("#0a6e4f; }"));
    // What the form of an endpoint can refuse, in words of this language alone.
    let mut strict = config(&database);
    (strict.endpoint_https_only, strict.endpoint_public_only) = (true, true);
    let strict = Pages::portal(&strict, &database.secret_url()).expect("a portal");
    let strict = strict.topic("order.paid", "An order was paid.", json!({}));
    let ann = Browser::of(&strict, &acme, Rights::all());
    let token = ann.get("/endpoints/new").hidden("form_token");
    let long = "x".repeat(201);
    let url = "https://customer.example/";
    for (url, description, topic, words) in [
        (
            "customer.example",
            "",
            "order.paid",
            "Geben Sie die vollständige URL",
        ),
        ("", "", "order.paid", "Geben Sie die vollständige URL"),
        (
            "ftp://customer.example/",
            "",
            "order.paid",
            "Geben Sie die vollständige URL",
        ),
        (
            "https://a:b:c@customer.example:99999/",
            "",
            "order.paid",
            "Geben Sie die vollständige URL",
        ),
        (
            "http://customer.example/",
            "",
            "order.paid",
            "Diese URL ist hier nicht erlaubt",
        ),
        (
            "https://127.0.0.1/",
            "",
            "order.paid",
            "Diese URL ist hier nicht erlaubt",
        ),
        (
            url,
            long.as_str(),
            "order.paid",
            "Die Beschreibung ist zu lang",
        ),
        (url, "", "", "Wählen Sie mindestens ein Ereignis"),
    ] {
        let fields = [
            ("url", url),
            ("description", description),
            ("topic", topic),
            ("form_token", &token),
        ];
        let german = [
            ("accept-language", "de"),
            ("content-type", "application/x-www-form-urlencoded"),
        ];
        let refused = ann.ask(Method::POST, "/endpoints/add", &german, &encoded(&fields));
        assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY, "{url}");
        let (_, alert) = refused
            .text
            .split_once("role=\"alert\">")
            .expect("an error");
        assert!(alert.starts_with(words), "{url:?}: {alert}");
    }
    let fixed = portal.language(Language::German);
    let ann = Browser::of(&fixed, &acme, Rights::all());
    assert!(ann.get("/").ok().contains("Endpunkte"));
    assert_eq!(ann.get("/nothing").status, StatusCode::NOT_FOUND);
}
