//! The portal: pages for the customers of an application, as a function from request to response.

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
            .contains("0 waiting events are due now")
    );
    let recover = [name[0], ("since", "2000-01-01T00:00")];
    let recovered = ann.post("/endpoint/recover", &recover);
    assert!(
        ann.get(&recovered.location)
            .ok()
            .contains("0 events wait to be sent again")
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
    assert!(ann.get(&added.location).ok().contains("1 events, "));
    assert!(ann.get("/deliveries").ok().contains(&id));

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

/// R60: over every route of pages and JSON, with each parameter.
#[test]
fn a_tenant_sees_guesses_and_touches_nothing_of_another() {
    let (database, acme, globex) = two();
    let secret = database.text("SELECT secret FROM {o}_endpoint WHERE name = 'acme-hook'");
    let secret = secret.expect("a secret");
    let (id, delivered, dead) = (acme.id, acme.delivered, acme.dead);
    let [id, delivered, dead] = [id, delivered, dead].map(|id| id.to_string());
    let sequence = database.number("SELECT sequence FROM {o}_dead WHERE topic = 'acme.event'");
    let sequence = format!("{sequence}.{dead}");
    let feed_of = |word: &str| format!("{word}-feed");
    for tenant in [&acme, &globex] {
        let feed = Endpoint::feed(feed_of(tenant.word)).tenant(tenant.id);
        let feed = feed.topics([format!("{}.feed", tenant.word)]);
        let (outbox, conn) = (database.outbox(), &mut database.connect());
        outbox.endpoints().put(conn, &feed).expect("put");
    }
    let theirs = [
        &acme.endpoint,
        &feed_of(acme.word),
        &id,
        &delivered,
        &dead,
        &sequence,
        "acme.event",
    ];
    let of_acme = [acme.word, &id, &delivered, &dead, &secret];
    let [own_dead, own_delivered] = [globex.dead, globex.delivered].map(|id| id.to_string());
    let url = globex.receiver.url();
    let own = |door: &Door, parameter: &str, is_json: bool| match parameter {
        "name" if door.is_of_feeds() => feed_of(globex.word),
        "name" => globex.endpoint.clone(),
        // The dead letter waits again after its page has sent it.
        "id" if is_json => own_delivered.clone(),
        "id" => own_dead.clone(),
        "url" => url.clone(),
        "topic" | "topics" => "order.paid".to_owned(),
        "since" => "2000-01-01T00:00".to_owned(),
        "missing" | "sure" | "dry_run" => "yes".to_owned(),
        _ => door.of_events(parameter).to_owned(),
    };
    let before = rows_of(&database, &acme);
    let mut strict = config(&database);
    strict.endpoint_public_only = true;
    for config in [config(&database), strict] {
        let portal = portal(&config);
        let spy = Browser::of(&portal, &globex, Rights::all());
        let token = spy.get("/endpoints/new").hidden("form_token");
        for door in Door::all(&spy) {
            let (path, takes) = (&door.path, &door.takes);
            let send = |values: &[(&str, String)]| {
                // As it was, whatever the last request did to it.
                let others = "DELETE FROM {o}_endpoint WHERE name NOT LIKE 'acme-%' AND name NOT LIKE 'globex-%'";
                database.execute(others);
                database.execute("DELETE FROM {o}_audit");
                globex.put(&database);
                let pairs = values.iter().map(|(name, value)| (*name, value.as_str()));
                let mut pairs: Vec<(&str, &str)> = pairs.collect();
                if !door.is_json {
                    let extra = ["tenant", "tenant_id", "destination", "registration"];
                    pairs.extend(extra.map(|name| (name, id.as_str())));
                    pairs.push(("form_token", &token));
                }
                let seen = door.ask(&spy, &pairs);
                // What the request itself says is no news.
                let mut text = format!("{} {} {}", seen.location, seen.cookie, seen.text);
                for (_, value) in values {
                    let escaped = encoded(&[("", value)]);
                    text = text.replace(value, "").replace(&escaped[1..], "");
                }
                for word in of_acme {
                    assert!(
                        !text.contains(word),
                        "{path} {values:?} shows {word}: {text}"
                    );
                }
                assert_eq!(rows_of(&database, &acme), before, "{path} {values:?}");
                seen
            };
            let all_own: Vec<(&str, String)> = takes
                .iter()
                .map(|name| (name.as_str(), own(&door, name, door.is_json)))
                .collect();
            let seen = send(&all_own);
            if !config.endpoint_public_only && !path.ends_with("/verify") {
                let is_done = seen.status.is_success() || seen.status.is_redirection();
                assert!(is_done, "{path} works for the own: {}", seen.text);
            }
            for value in theirs {
                send(
                    &takes
                        .iter()
                        .map(|name| (name.as_str(), value.to_owned()))
                        .collect::<Vec<_>>(),
                );
                for (n, name) in takes.iter().enumerate() {
                    let mut values = all_own.clone();
                    values[n].1 = value.to_owned();
                    let seen = send(&values);
                    if name == "name"
                        && [acme.endpoint.as_str(), &feed_of(acme.word)].contains(&value)
                    {
                        assert_eq!(seen.status, StatusCode::NOT_FOUND, "{path}: {}", seen.text);
                    }
                }
            }
        }
    }
    assert_eq!(acme.receiver.count(), 2, "nothing was sent there");
    // The same words are there for their owner.
    let portal = portal(&config(&database));
    let owner = Browser::of(&portal, &acme, Rights::all());
    assert!(owner.get("/").ok().contains("acme-hook"));
    let one = encoded(&[("name", &acme.endpoint), ("id", &dead)]);
    assert!(
        owner
            .get(&format!("/delivery?{one}"))
            .ok()
            .contains("acme.event")
    );
}

/// R60
#[test]
fn links_end_and_cannot_be_forged() {
    let database = Database::new();
    let portal = portal(&config(&database)).base("/webhooks");
    let tenant = Uuid::now_v7();
    let link = portal.link(tenant, HOUR);
    assert!(link.starts_with("/webhooks/open?token="), "{link}");
    let stranger = Browser::unknown(&portal);
    let other = Uuid::now_v7().simple().to_string();
    for (path, words) in [
        ("/webhooks/".to_owned(), "A link is needed"),
        (portal.link(tenant, Duration::ZERO), "This link has expired"),
        (
            link.replace(&tenant.simple().to_string(), &other),
            "This link is not valid",
        ),
        ("/webhooks/open?token=".to_owned(), "This link is not valid"),
        (
            Pages::portal(&config(&database), &database.secret_url())
                .expect("a portal")
                .link(tenant, HOUR),
            "This link is not valid",
        ),
    ] {
        let refused = stranger.get(&path);
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "{path}");
        assert!(
            refused.text.contains(words) && refused.cookie.is_empty(),
            "{path}: {refused:?}"
        );
    }
    let opened = Browser::opening(&portal, &link);
    assert!(
        opened
            .get("/webhooks/")
            .ok()
            .contains("href=\"/webhooks/deliveries\"")
    );
    // Where a proxy ends TLS, the cookie stays there.
    let by_tls = stranger.ask(Method::GET, &link, &[("x-forwarded-proto", "https")], "");
    assert!(by_tls.cookie.ends_with("; Secure"), "{}", by_tls.cookie);
    // The token of a link is no cookie.
    let (_, token) = link.split_once('=').expect("a token");
    let name = opened.cookie.split('=').next().expect("a name");
    let forged = Browser {
        cookie: format!("{name}={token}"),
        ..stranger.clone()
    };
    assert_eq!(forged.get("/webhooks/").status, StatusCode::FORBIDDEN);
    // Operators are no tenant's.
    let operator = Browser {
        visitor: Visitor::known("ann", Rights::all()),
        ..opened
    };
    assert_eq!(operator.get("/webhooks/").status, StatusCode::FORBIDDEN);
    let short = Pages::portal(&config(&database), &database.secret_url())
        .expect("a portal")
        .key("short");
    assert!(matches!(short, Err(PagesError::ShortKey(5))));
}

/// What a browser sends to try a route as the owner of acme's things.
fn of_acme(door: &Door, acme: &Tenant, form_token: &str) -> Vec<(String, String)> {
    let value = |name: &str| match name {
        "name" => acme.endpoint.clone(),
        "id" => acme.dead.to_string(),
        "url" => acme.receiver.url(),
        "since" => "2000-01-01T00:00".to_owned(),
        "missing" | "sure" | "dry_run" => "yes".to_owned(),
        _ => door.of_events(name).to_owned(),
    };
    let mut values: Vec<(String, String)> = door
        .takes
        .iter()
        .map(|name| (name.clone(), value(name)))
        .collect();
    if !door.is_json {
        values.push(("form_token".to_owned(), form_token.to_owned()));
    }
    values
}

/// R60: over every route of pages and JSON. The link itself, the cookie that it has become, and its token in a program.
#[test]
fn after_its_time_a_link_opens_nothing_however_it_is_sent_again() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database));
    let link = portal.link(acme.id, Duration::from_secs(3));
    let (_, token) = link.split_once('=').expect("a token");
    let ann = Browser::opening(&portal, &link);
    let form_token = ann.get("/endpoints/new").hidden("form_token");
    let program = Browser {
        token: token.to_owned(),
        ..Browser::unknown(&portal)
    };
    assert!(program.get("/api/v1/endpoints").ok().contains("acme-hook"));
    let doors = Door::all(&Browser::of(&portal, &acme, Rights::all()));
    let before = rows_of(&database, &acme);
    eventually("the link has expired", || {
        ann.get("/").status == StatusCode::FORBIDDEN
    });
    let again = Browser::unknown(&portal).get(&link);
    assert_eq!(again.status, StatusCode::FORBIDDEN);
    assert!(again.cookie.is_empty() && again.text.contains("This link has expired"));
    every_door_is_closed(&[ann, program], &doors, &acme, &form_token);
    assert_eq!(rows_of(&database, &acme), before);
}

fn every_door_is_closed(spies: &[Browser<'_>], doors: &[Door], acme: &Tenant, form_token: &str) {
    for spy in spies {
        for door in doors {
            let values = of_acme(door, acme, form_token);
            let values: Vec<(&str, &str)> = values
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .collect();
            let seen = door.ask(spy, &values);
            let refused = match door.is_json {
                true => StatusCode::UNAUTHORIZED,
                false => StatusCode::FORBIDDEN,
            };
            assert_eq!(seen.status, refused, "{} {}", door.path, seen.text);
            assert!(!seen.text.contains(&acme.endpoint), "{}", seen.text);
        }
    }
}

/// R60: over every route of pages and JSON, with tokens and cookies that say more than what was signed, or that another
/// key or purpose has signed.
#[test]
fn forged_tokens_and_cookies_open_nothing() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let rights = Rights::look().with_payloads(true);
    let token = portal.token(globex.id, HOUR, rights);
    let owner = Browser::opening(&portal, &portal.link_with(globex.id, HOUR, rights));
    let (name, cookie) = owner.cookie.split_once('=').expect("a cookie");
    let others = Pages::portal(&config(&database), &database.secret_url()).expect("a portal");
    let others = others.key([8; 32]).expect("a key");
    let [own, other] = [&globex, &acme].map(|one| one.id.simple().to_string());
    let forged = |signed: &str| {
        let (until, _) = signed.split_once('.').expect("a time");
        let longer = (until.parse::<u64>().expect("seconds") + 1).to_string();
        let (text, signature) = signed.rsplit_once('.').expect("a signature");
        vec![
            signed.replacen(until, &longer, 1),
            signed.replacen(&own, &other, 1),
            signed.replacen(".p.", ".aps.", 1),
            text.to_owned(),
            format!("{text}."),
            format!("{text}.{}", signature.replace(|_| true, "0")),
            format!("{signed}0"),
            "x".repeat(10_000),
            "...".to_owned(),
            format!("{}.{other}.aps..{signature}", u64::MAX),
        ]
    };
    let mut tokens = forged(&token);
    tokens.extend([
        cookie.to_owned(),
        others.token(acme.id, HOUR, Rights::all()),
    ]);
    let mut cookies = forged(cookie);
    cookies.push(token.clone());
    let programs = tokens.into_iter().map(|token| Browser {
        token,
        ..Browser::unknown(&portal)
    });
    let visitors = cookies.into_iter().map(|cookie| Browser {
        cookie: format!("{name}={cookie}"),
        ..Browser::unknown(&portal)
    });
    let spies: Vec<Browser<'_>> = programs.chain(visitors).collect();
    let doors = Door::all(&Browser::of(&portal, &acme, Rights::all()));
    every_door_is_closed(&spies, &doors, &acme, "");
    for spy in &spies {
        let opened = Browser::unknown(&portal).get(&format!("/open?token={}", spy.token));
        assert_eq!(opened.status, StatusCode::FORBIDDEN, "{}", spy.token);
    }
}

/// R60
#[test]
fn processes_with_one_key_accept_each_others_links_sessions_and_forms() {
    let (database, acme, _) = two();
    let portals = [portal(&config(&database)), portal(&config(&database))];
    let ann = Browser::opening(&portals[1], &portals[0].link(acme.id, HOUR));
    let there = Browser {
        portal: &portals[0],
        ..ann.clone()
    };
    let token = ann.get("/endpoints/new").hidden("form_token");
    let form = encoded(&[("name", &acme.endpoint), ("form_token", &token)]);
    let done = there.ask(Method::POST, "/endpoint/disable", &[], &form);
    assert!(done.location.ends_with("done=disabled"), "{done:?}");
    assert!(ann.get(&done.location).ok().contains("was disabled here"));
    let program = Browser {
        token: portals[0].token(acme.id, HOUR, Rights::look()),
        ..Browser::unknown(&portals[1])
    };
    assert!(program.get("/api/v1/endpoints").ok().contains("acme-hook"));
}

/// R60: on every page, also behind a proxy that removes the path.
#[test]
fn below_a_path_all_addresses_of_the_portal_lead_below_it() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database))
        .base("/shop/webhooks")
        .logo("image/svg+xml", "<svg/>");
    let ann = Browser::opening(&portal, &portal.link(acme.id, HOUR));
    let mut to_read = vec!["/shop/webhooks/".to_owned()];
    let mut read = BTreeSet::new();
    while let Some(path) = to_read.pop() {
        if !read.insert(path.clone()) {
            continue;
        }
        let within = path.strip_prefix("/shop/webhooks").expect("below the base");
        let page = ann.get(&path).ok();
        assert_eq!(ann.get(within).ok().len(), page.len(), "{path}");
        for attribute in ["href", "src", "action", "formaction"] {
            let mark = format!(" {attribute}=\"");
            for (index, _) in page.match_indices(&mark) {
                let rest = &page[index + mark.len()..];
                let address = rest
                    .split('"')
                    .next()
                    .expect("an end")
                    .replace("&amp;", "&");
                if address.starts_with('#') {
                    continue;
                }
                assert!(address.starts_with("/shop/webhooks/"), "{path}: {address}");
                if matches!(attribute, "href" | "src") {
                    to_read.push(address);
                }
            }
        }
    }
    let pages = portal_routes().filter(|(method, ..)| *method == Method::GET);
    for (_, page, _) in pages {
        let is_read =
            |one: &String| one.split('?').next() == Some(format!("/shop/webhooks{page}").as_str());
        assert!(read.iter().any(is_read), "{page}: {read:?}");
    }
    let done = ann.post(
        "/shop/webhooks/endpoint/disable",
        &[("name", &acme.endpoint)],
    );
    assert!(
        done.location.starts_with("/shop/webhooks/endpoint?"),
        "{done:?}"
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
            .contains("1 events wait to be sent again")
    );
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("delivered", || database.count("delivered") == 1);
    end(&relay);
    let received = receiver.requests();
    assert_eq!(received.last().map(Request::id), Some(id));
}

/// R60: over every page.
#[test]
fn without_the_right_no_page_shows_content_or_a_form() {
    let (database, acme, _) = two();
    let mut public = config(&database);
    // Otherwise no response is shown to customers.
    public.endpoint_public_only = true;
    let portal = portal(&public);
    let seen = |rights: Rights| {
        let ann = Browser::of(&portal, &acme, rights);
        let doors = Door::all(&ann);
        let pages = doors
            .iter()
            .filter(|door| !door.is_json && door.method == Method::GET);
        let shown = pages.map(|door| {
            let values = of_acme(door, &acme, "");
            let values: Vec<(&str, &str)> = values
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .collect();
            door.ask(&ann, &values).text
        });
        shown.collect::<String>()
    };
    let (all, few) = (seen(Rights::all()), seen(Rights::look()));
    for hidden in ["x-shop", "says so", "method=\"post\"", "/endpoints/new"] {
        assert!(all.contains(hidden) && !few.contains(hidden), "{hidden}");
    }
}

/// R60: over every act.
#[test]
fn a_form_needs_the_right_and_the_token_of_its_own_session() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let link = portal.link(acme.id, HOUR);
    let own = Browser::opening(&portal, &link);
    let token = |browser: &Browser<'_>| browser.get("/endpoints/new").hidden("form_token");
    let others = [
        String::new(),
        token(&Browser::opening(&portal, &link)),
        token(&Browser::of(&portal, &acme, Rights::all())),
        token(&Browser::of(&portal, &globex, Rights::all())),
    ];
    let looks = portal.link_with(acme.id, HOUR, Rights::look());
    let looks = Browser::opening(&portal, &looks);
    let without_secrets = portal.link_with(acme.id, HOUR, Rights::look().with_act(true));
    let without_secrets = Browser::opening(&portal, &without_secrets);
    let before = rows_of(&database, &acme);
    let fields = [("name", acme.endpoint.as_str()), ("sure", "yes")];
    for (_, path, _) in portal_routes().filter(|(method, ..)| method == Method::POST) {
        for token in &others {
            let form = encoded(&[fields.as_slice(), &[("form_token", token)]].concat());
            let refused = own.ask(Method::POST, path, &[], &form);
            assert_eq!(refused.status, StatusCode::FORBIDDEN, "{path}");
        }
        let form = encoded(&[fields.as_slice(), &[("form_token", &token(&own))]].concat());
        let foreign = own.ask(
            Method::POST,
            path,
            &[("sec-fetch-site", "cross-site")],
            &form,
        );
        assert_eq!(foreign.status, StatusCode::FORBIDDEN, "{path}");
        let refused = looks.ask(Method::POST, path, &[], &form);
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "{path}");
    }
    let one = format!("/endpoint?{}", encoded(&fields));
    assert!(!looks.get(&one).ok().contains("<form"));
    let rotate = without_secrets.post("/endpoint/rotate", &fields);
    assert_eq!(rotate.status, StatusCode::FORBIDDEN);
    assert_eq!(rows_of(&database, &acme), before);
    let url = acme.receiver.url();
    let added = [("url", url.as_str()), ("topic", "order.paid")];
    let added = without_secrets.post("/endpoints/add", &added);
    assert!(added.location.ends_with("done=added"), "{added:?}");

    // Without the right, no payload.
    let delivery = encoded(&[("name", &acme.endpoint), ("id", &acme.dead.to_string())]);
    let delivery = format!("/delivery?{delivery}");
    assert!(own.get(&delivery).ok().contains("x-shop"));
    let hidden = looks.get(&delivery).ok();
    assert!(!hidden.contains("x-shop") && hidden.contains("You may not see the content"));
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

/// R60: on pages and as JSON, in all processes together.
#[test]
fn a_tenant_sends_at_most_ten_examples_and_verifications_in_a_minute() {
    let (database, acme, globex) = two();
    let portals = [portal(&config(&database)), portal(&config(&database))];
    let test = |portal: &Portal, tenant: &Tenant| {
        let browser = Browser::of(portal, tenant, Rights::all());
        let form = [("name", tenant.endpoint.as_str()), ("topic", "")];
        browser.post("/endpoint/test", &form).status
    };
    let as_json = |act: &str| {
        let path = format!("/api/v1/endpoints/{}/{act}", acme.endpoint);
        let request = http::Request::post(path).header("host", "shop.example");
        let request = request.header("content-type", "application/json");
        let visitor = Visitor::of_tenant(acme.id, "ann", Rights::all());
        portals[0].respond(request.body(b"{}".to_vec()).expect("a request"), visitor)
    };
    let sent = acme.receiver.count();
    assert_eq!(as_json("test").status(), StatusCode::OK);
    let answers: Vec<StatusCode> = std::thread::scope(|scope| {
        let sent: Vec<_> = (0..16)
            .map(|_| scope.spawn(|| test(&portals[1], &acme)))
            .collect();
        sent.into_iter()
            .map(|one| one.join().expect("answered"))
            .collect()
    });
    let done = answers.iter().filter(|status| **status == StatusCode::OK);
    assert_eq!(done.count(), 9, "{answers:?}");
    let limited = answers
        .iter()
        .filter(|status| **status == StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(limited.count(), 7, "{answers:?}");
    assert_eq!(acme.receiver.count(), sent + 10);
    for act in ["test", "verify"] {
        let refused = as_json(act);
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(refused.headers()["retry-after"], "60");
    }
    assert_eq!(test(&portals[0], &globex), StatusCode::OK, "another tenant");
    // An endpoint that is registered again is one of the same tenant.
    database.execute("DELETE FROM {o}_endpoint WHERE name = 'acme-hook'");
    acme.put(&database);
    assert_eq!(test(&portals[0], &acme), StatusCode::TOO_MANY_REQUESTS);
    database.execute("UPDATE {o}_audit SET at = at - interval '1 minute'");
    assert_eq!(test(&portals[0], &acme), StatusCode::OK);
}

/// R60: changes, messages and requests count against one budget, in pages and JSON: a loop of adding, recovering and
/// removing ends soon, and delays nobody else.
#[test]
fn every_act_of_a_customer_counts_against_the_budget_of_the_tenant() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let change = |tenant: &Tenant, act: &str| {
        let form = [("name", tenant.endpoint.as_str())];
        let browser = Browser::of(&portal, tenant, Rights::all());
        browser.post(&format!("/endpoint/{act}"), &form).status
    };
    let mut changes = 0;
    while change(&acme, ["disable", "enable"][changes % 2]) == StatusCode::SEE_OTHER {
        changes += 1;
        assert!(changes <= 60, "no budget");
    }
    // A disable costs 1, an enable 6: what has begun may overspend.
    assert_eq!(changes, 18);
    for act in ["rotate", "disable", "recover", "verify", "test"] {
        let form = [
            ("name", acme.endpoint.as_str()),
            ("since", "2026-01-01T00:00"),
            ("missing", "on"),
        ];
        let browser = Browser::of(&portal, &acme, Rights::all());
        let refused = browser.post(&format!("/endpoint/{act}"), &form);
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS, "{act}");
    }
    assert_eq!(change(&globex, "disable"), StatusCode::SEE_OTHER);
    database.execute("UPDATE {o}_audit SET at = at - interval '1 minute'");
    assert_eq!(change(&acme, "disable"), StatusCode::SEE_OTHER);
    // An hour has a budget, too.
    database.execute("UPDATE {o}_audit SET at = at - interval '1 minute', cost = 3600");
    assert_eq!(change(&acme, "enable"), StatusCode::TOO_MANY_REQUESTS);
}

/// R60: the cost of a recovery is known at its end, so recoveries that run together would all begin with the same budget.
#[test]
fn recoveries_of_one_tenant_do_not_run_together() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let recover = |tenant: &Tenant, act: &str| {
        let form = [
            ("name", tenant.endpoint.as_str()),
            ("since", "2026-01-01T00:00"),
        ];
        let browser = Browser::of(&portal, tenant, Rights::all());
        browser.post(&format!("/endpoint/{act}"), &form).status
    };
    let (mut other, name) = (database.connect(), database.name());
    other
        .batch_execute(&format!("BEGIN; LOCK TABLE {name}_dead"))
        .expect("a lock");
    let waiting = || {
        database.number(
            "SELECT count(*) FROM pg_locks WHERE relation = '{o}_dead'::regclass AND NOT granted",
        )
    };
    std::thread::scope(|threads| {
        let first = threads.spawn(|| recover(&acme, "recover"));
        eventually("the first recovery makes messages", || waiting() == 1);
        assert_eq!(recover(&acme, "retry"), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(
            recover(&acme, "disable"),
            StatusCode::SEE_OTHER,
            "not held up"
        );
        assert_eq!(
            recover(&globex, "retry"),
            StatusCode::SEE_OTHER,
            "of another tenant"
        );
        other.batch_execute("COMMIT").expect("unlocked");
        assert_eq!(first.join().expect("an answer"), StatusCode::SEE_OTHER);
    });
    assert_eq!(recover(&acme, "retry"), StatusCode::SEE_OTHER);
}

/// A request of the tenant's program to recover the endpoint.
fn recovery(
    portal: &Portal,
    tenant: &Tenant,
    body: &Value,
    key: Option<&str>,
) -> (StatusCode, Value) {
    let path = format!("/api/v1/endpoints/{}/recover", tenant.endpoint);
    let request = http::Request::post(path).header("host", "shop.example");
    let mut request = request.header("content-type", "application/json");
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let visitor = Visitor::of_tenant(tenant.id, "ann", Rights::all());
    let request = request.body(body.to_string().into_bytes());
    let answer = portal.respond(request.expect("a request"), visitor);
    let body = serde_json::from_slice(answer.body()).expect("JSON");
    (answer.status(), body)
}

/// R60: a count, and a recovery that finds nothing, cost the database as much as one that finds messages; each key of a
/// request is a row.
#[test]
fn a_search_that_finds_nothing_counts_against_the_budget_of_the_tenant() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let body = |dry_run| json!({ "since": "1h", "missing": true, "dry_run": dry_run });
    for dry_run in [true, false] {
        let mut answers = (0..=60).map(|number: usize| {
            let key = format!("{dry_run} {number}");
            recovery(&portal, &acme, &body(dry_run), Some(&key)).0
        });
        let refused = answers.position(|status| status == StatusCode::TOO_MANY_REQUESTS);
        assert!(
            (1..=60).contains(&refused.expect("no budget")),
            "{refused:?}"
        );
        let (status, answer) = recovery(&portal, &globex, &body(dry_run), None);
        assert_eq!(status, StatusCode::OK, "another tenant: {answer}");
        database.execute("UPDATE {o}_audit SET at = at - interval '1 minute'");
    }
    assert!(database.number("SELECT count(*) FROM {o}_request") <= 120);
    let counted = "SELECT count(*) FROM {o}_audit WHERE why = 'portal, dry run' AND cost > 0";
    assert!(database.number(counted) > 0);
}

/// R60: counting ends after some seconds, and all tenants together leave connections to those who change something.
#[test]
fn counts_of_customers_end_and_hold_up_no_change() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let (mut other, name) = (database.connect(), database.name());
    other
        .batch_execute(&format!("BEGIN; LOCK TABLE {name}_ledger"))
        .expect("a lock");
    let waiting = || {
        database.number(
            "SELECT count(*) FROM pg_locks WHERE relation = '{o}_ledger'::regclass AND NOT granted",
        )
    };
    let body = json!({ "since": "1h", "missing": true, "dry_run": true });
    let answers: Vec<(StatusCode, Value)> = std::thread::scope(|threads| {
        let counting: Vec<_> = [&acme, &globex, &acme, &globex, &acme, &globex]
            .map(|tenant| threads.spawn(|| recovery(&portal, tenant, &body, None)))
            .into_iter()
            .collect();
        eventually("two tenants count", || waiting() >= 2);
        for tenant in [&acme, &globex] {
            let browser = Browser::of(&portal, tenant, Rights::all());
            let form = [("name", tenant.endpoint.as_str())];
            let paused = browser.post("/endpoint/pause", &form).status;
            assert_eq!(paused, StatusCode::SEE_OTHER);
        }
        let counted = counting
            .into_iter()
            .map(|one| one.join().expect("no panic"));
        counted.collect()
    });
    // One that fails has a cost, too.
    database.execute("UPDATE {o}_audit SET at = at - interval '1 minute', cost = 0");
    let body = json!({ "since": "1h", "missing": true });
    let (status, answer) = recovery(&portal, &acme, &body, None);
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
    assert!(database.number("SELECT sum(cost)::bigint FROM {o}_audit") >= 50);
    other.batch_execute("COMMIT").expect("unlocked");
    for (status, answer) in &answers {
        let is_cut = *status == StatusCode::OK && answer["more"] == true;
        let is_refused = *status == StatusCode::TOO_MANY_REQUESTS;
        let has_no_turn = *status == StatusCode::SERVICE_UNAVAILABLE;
        assert!(is_cut || is_refused || has_no_turn, "{answers:?}");
    }
    assert!(answers.iter().any(|(status, _)| *status == StatusCode::OK));
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

/// R60: the pages of a tenant that wait for the database leave connections to other tenants.
#[test]
fn slow_pages_of_one_tenant_delay_no_other() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let page = format!(
        "/delivery?{}",
        encoded(&[("name", &acme.endpoint), ("id", &acme.dead.to_string())])
    );
    let (mut other, name) = (database.connect(), database.name());
    other
        .batch_execute(&format!("BEGIN; LOCK TABLE {name}_attempt"))
        .expect("a lock");
    let waiting = || {
        database.number("SELECT count(*) FROM pg_locks WHERE relation = '{o}_attempt'::regclass AND NOT granted")
    };
    let ann = Browser::of(&portal, &acme, Rights::all());
    std::thread::scope(|threads| {
        let slow: Vec<_> = (0..8)
            .map(|_| threads.spawn(|| ann.get(&page).status))
            .collect();
        eventually("pages of acme wait for the lock", || waiting() >= 2);
        let bob = Browser::of(&portal, &globex, Rights::all());
        for _ in 0..3 {
            let began = Instant::now();
            assert!(bob.get("/").ok().contains("globex-hook"));
            assert!(
                began.elapsed() < Duration::from_secs(1),
                "{:?}",
                began.elapsed()
            );
        }
        assert_eq!(waiting(), 2);
        other.batch_execute("COMMIT").expect("unlocked");
        let answers: Vec<StatusCode> = slow
            .into_iter()
            .map(|one| one.join().expect("answered"))
            .collect();
        assert!(answers.contains(&StatusCode::OK), "{answers:?}");
    });
}

/// R60: without JSON, and without a script.
#[test]
fn a_customer_chooses_by_conditions_which_events_arrive() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database));
    let ann = Browser::of(&portal, &acme, Rights::all());
    let url = acme.receiver.url();
    let own = [
        ("name", acme.endpoint.as_str()),
        ("url", url.as_str()),
        ("topic", "order.paid"),
    ];
    let row = |field, operator, value| [("field", field), ("operator", operator), ("value", value)];
    let blank = row("", "is", "");
    let gold = row("customer.tier", "is", "gold\r\n7");
    let [least, below] = [row("total", ">=", "100"), row("total", "<", "200.5")];
    let edit = format!("/endpoint/edit?{}", encoded(&own[..1]));
    let filter = || database.text("SELECT filter::text FROM {o}_endpoint WHERE name = 'acme-hook'");
    let change = |rows: &[[(&str, &str); 3]]| {
        let shown = ann.get(&edit).hidden("shown");
        let shown = [("shown", shown.as_str())];
        ann.post(
            "/endpoint/change",
            &[own.as_slice(), &shown, rows.as_flattened()].concat(),
        )
    };

    // Three empty rows at first, and more by a button, which saves nothing.
    assert_eq!(ann.get(&edit).ok().matches("name=\"field\"").count(), 3);
    let more = [own.as_slice(), gold.as_slice(), &blank, &[("more", "yes")]].concat();
    let more = ann.post("/endpoint/change", &more).ok();
    assert_eq!(more.matches("name=\"field\"").count(), 4);
    assert!(
        more.contains("value=\"customer.tier\"") && more.contains("gold\r\n7"),
        "{more}"
    );
    assert_eq!(filter(), None);

    // The row that is wrong says why, and the form is as it was sent.
    let wrong = change(&[gold, row("total<b>", ">", "x<b>")]);
    assert_eq!(wrong.status, StatusCode::UNPROCESSABLE_ENTITY);
    let (_, wrong) = wrong
        .text
        .split_once("value=\"total&lt;b&gt;\"")
        .expect("the row");
    assert!(
        wrong.starts_with(" placeholder=\"customer.tier\" aria-invalid"),
        "{wrong}"
    );
    assert!(
        wrong.contains("Enter one number") && wrong.contains("x&lt;b&gt;"),
        "{wrong}"
    );
    assert_eq!(filter(), None);

    change(&[blank, gold, least, below]);
    let saved = json!({ "customer": { "tier": ["gold", "7", 7] }, "total": [{ "numeric": [">=", 100, "<", 200.5] }] });
    assert_eq!(filter(), Some(saved.to_string()));
    let shown = ann.get(&edit).ok();
    assert_eq!(shown.matches("name=\"field\"").count(), 6);
    assert!(shown.contains(">gold\n7</textarea>"), "{shown}");
    let page = ann.get(&format!("/endpoint?{}", encoded(&own[..1]))).ok();
    assert!(
        page.contains("<code>customer.tier</code> is gold, 7"),
        "{page}"
    );

    // What is sent is what the customer chose.
    let count = acme.receiver.count();
    for (tier, total) in [
        (json!("gold"), json!(99)),
        (json!("GOLD"), json!(100)),
        (json!("7"), json!(200.5)),
        (json!("gold"), json!(100)),
        (json!(7), json!(200.4)),
    ] {
        let payload = json!({ "customer": { "tier": tier }, "total": total });
        let message = NewMessage::new("order.paid", &payload).expect("JSON");
        database.enqueue_message(message.tenant_id(acme.id));
    }
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    let mut totals: Vec<_> = (acme.receiver.wait_for(count + 2).iter().skip(count))
        .map(|request| request.json()["total"].to_string())
        .collect();
    totals.sort();
    assert_eq!(totals, ["100", "200.4"]);

    // A form without rows changes nothing of the filter; empty rows are no filter.
    change(&[]);
    assert_eq!(filter(), Some(saved.to_string()));
    change(&[blank]);
    assert_eq!(filter(), None);
}

/// R60: also what only a program can write.
#[test]
fn a_filter_that_conditions_cannot_show_stays_until_the_customer_removes_it() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database));
    let ann = Browser::of(&portal, &acme, Rights::all());
    let program = |body: Value| Browser::patch(&portal, &acme, &body);
    let wrong = program(json!({ "filter": { "a": "b" } }));
    assert_eq!(
        (wrong.status, &wrong.json()["field"]),
        (StatusCode::UNPROCESSABLE_ENTITY, &json!("filter"))
    );
    let headers = json!({ "$header": { "x-shop": ["<b>"] } });
    let done = program(json!({ "filter": headers }));
    assert_eq!(
        (done.status, &done.json()["filter"]),
        (StatusCode::OK, &headers)
    );

    let url = acme.receiver.url();
    let own = [
        ("name", acme.endpoint.as_str()),
        ("url", url.as_str()),
        ("topic", "order.paid"),
    ];
    let edit = format!("/endpoint/edit?{}", encoded(&own[..1]));
    let filter = || database.text("SELECT filter::text FROM {o}_endpoint WHERE name = 'acme-hook'");
    let shown = ann.get(&edit).ok();
    assert!(
        shown.contains("Conditions cannot show this filter") && shown.contains("&lt;b&gt;"),
        "{shown}"
    );
    assert!(!shown.contains("name=\"field\""), "{shown}");
    let changed = ann.post(
        "/endpoint/change",
        &[own.as_slice(), &[("description", "new")]].concat(),
    );
    assert!(changed.location.ends_with("done=changed"), "{changed:?}");
    assert_eq!(filter(), Some(headers.to_string()));
    ann.post(
        "/endpoint/change",
        &[
            own.as_slice(),
            &[("filter", "none"), ("shown", &headers.to_string())],
        ]
        .concat(),
    );
    assert_eq!(filter(), None);

    // The filter of an operator is shown, and stays.
    let by_operator = json!({ "total": [{ "numeric": [">", 1] }] });
    let operate = |filter: Option<Value>| {
        let conn = &mut database.connect();
        let outbox = database.outbox();
        let done = (outbox.endpoints()).change(conn, "acme-hook", |row| row.filter = filter);
        assert!(done.expect("changed"));
    };
    operate(Some(by_operator.clone()));
    let shown = ann.get(&edit).ok();
    assert!(
        shown.contains("set by us") && !shown.contains("name=\"filter\""),
        "{shown}"
    );
    let rows = [("field", "a"), ("operator", "is"), ("value", "b")];
    let same = by_operator.to_string();
    let typed = [("description", "typed"), ("shown", &same)];
    let refused = ann.post(
        "/endpoint/change",
        &[own.as_slice(), &typed, &rows].concat(),
    );
    assert_eq!(refused.status, StatusCode::CONFLICT, "{}", refused.text);
    assert!(
        refused.text.contains("set by us") && refused.text.contains("value=\"typed\""),
        "{}",
        refused.text
    );
    ann.post("/endpoint/change", &own);
    assert_eq!(filter(), Some(by_operator.to_string()));
    assert_eq!(
        program(json!({ "filter": null })).status,
        StatusCode::CONFLICT
    );

    // Once the operator has removed it, the customer may set one.
    operate(None);
    let changed = ann.post("/endpoint/change", &[own.as_slice(), &rows].concat());
    assert!(changed.location.ends_with("done=changed"), "{changed:?}");
    assert_eq!(filter(), Some(json!({ "a": ["b"] }).to_string()));
}

/// R60: a form that was opened before a program changed the filter.
#[test]
fn a_form_changes_no_filter_that_it_has_not_shown() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database));
    let ann = Browser::of(&portal, &acme, Rights::all());
    let program = |filter: &Value| {
        let done = Browser::patch(&portal, &acme, &json!({ "filter": filter }));
        assert_eq!(done.status, StatusCode::OK, "{}", done.text);
    };
    let url = acme.receiver.url();
    let own = [
        ("name", acme.endpoint.as_str()),
        ("url", url.as_str()),
        ("topic", "order.paid"),
        ("description", "typed"),
    ];
    let open = || ann.get(&format!("/endpoint/edit?{}", encoded(&own[..1])));
    let change = |form: &Seen, more: &[(&str, &str)]| {
        let shown = form.hidden("shown");
        let pairs = [own.as_slice(), &[("shown", &shown)], more].concat();
        ann.post("/endpoint/change", &pairs)
    };
    let row = |column: &str| {
        database.text(&format!(
            "SELECT {column}::text FROM {{o}}_endpoint WHERE name = 'acme-hook'"
        ))
    };
    let is_shown_again = |refused: &Seen| {
        assert_eq!(refused.status, StatusCode::CONFLICT, "{refused:?}");
        assert!(
            refused.text.contains("was changed meanwhile") && refused.text.contains("\"typed\""),
            "{refused:?}"
        );
        assert_eq!(Some(refused.hidden("shown")), row("filter"));
        assert_ne!(row("description"), Some("typed".to_owned()));
    };
    let blank = [("field", ""), ("operator", "is"), ("value", "")];
    let headers = json!({ "$header": { "x-shop": ["<b>"] } });
    let country = json!({ "country": ["DE"] });

    // Rows that were empty, or filled in.
    let stale = open();
    program(&headers);
    let filled = [("field", "a"), ("operator", "is"), ("value", "b")];
    for rows in [blank, filled] {
        let refused = change(&stale, &rows);
        is_shown_again(&refused);
        assert!(!refused.text.contains("name=\"field\""), "{refused:?}");
    }

    // More rows show no new filter.
    let more = change(&stale, &[blank.as_slice(), &[("more", "yes")]].concat());
    assert_eq!(more.status, StatusCode::OK);
    is_shown_again(&change(&more, &blank));

    // The removal of a filter that is another one now.
    let stale = open();
    program(&country);
    let refused = change(&stale, &[("filter", "none")]);
    is_shown_again(&refused);
    assert!(refused.text.contains("value=\"country\""), "{refused:?}");

    // What leaves the filter unchanged is saved, and so is the form with the new filter.
    let changed = change(&stale, &[]);
    assert!(changed.location.ends_with("done=changed"), "{changed:?}");
    assert_eq!(row("description"), Some("typed".to_owned()));
    assert_eq!(row("filter"), Some(country.to_string()));
    let changed = change(&refused, &blank);
    assert!(changed.location.ends_with("done=changed"), "{changed:?}");
    assert_eq!(row("filter"), None);
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
