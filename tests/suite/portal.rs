//! The portal: pages for the customers of an application, as a function from request to response.

use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_outbox::NewMessage;
use diesel_outbox::config::Config;
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

    fn form_token(&self) -> String {
        let rest = self.text.split_once("name=\"form_token\" value=\"");
        let (token, _) = rest
            .and_then(|(_, rest)| rest.split_once('"'))
            .expect("a form");
        token.to_owned()
    }
}

/// Whoever sends requests: known to the application, or with the cookie of a link.
#[derive(Clone)]
struct Browser<'a> {
    portal: &'a Portal,
    visitor: Visitor,
    cookie: String,
}

impl<'a> Browser<'a> {
    fn of(portal: &'a Portal, tenant: &Tenant, rights: Rights) -> Self {
        Self {
            portal,
            visitor: Visitor::of_tenant(tenant.id, "someone", rights),
            cookie: String::new(),
        }
    }

    fn unknown(portal: &'a Portal) -> Self {
        Self {
            portal,
            visitor: Visitor::unknown([127, 0, 0, 1].into()),
            cookie: String::new(),
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
        let cookie = ("cookie", self.cookie.as_str());
        let own = [("host", "shop.example"), cookie];
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
        let token = self.get("/endpoints/new").form_token();
        let form = encoded(&[pairs, &[("form_token", token.as_str())]].concat());
        self.ask(Method::POST, path, &[], &form)
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
        (
            &receiver.url(),
            "internal.audit",
            "Choose at least one event",
        ),
    ] {
        let refused = ann.post("/endpoints/add", &[("url", url), ("topic", topic)]);
        assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert!(refused.text.contains(why), "{}", refused.text);
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
    let moved = [
        name[0],
        ("url", "http://10.0.0.7/new"),
        ("topic", "order.paid"),
    ];
    ann.post("/endpoint/change", &moved);
    assert!(ann.get(&page).ok().contains("http://10.0.0.7/new"));
    ann.post("/endpoint/enable", &name);
    assert!(ann.get(&page).ok().contains("badge good"));
    let recover = [name[0], ("since", "2000-01-01T00:00")];
    let recovered = ann.post("/endpoint/recover", &recover);
    assert!(
        ann.get(&recovered.location)
            .ok()
            .contains("0 events will be sent")
    );
    let unsure = ann.post("/endpoint/remove", &name);
    assert_eq!(unsure.status, StatusCode::UNPROCESSABLE_ENTITY);
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
        let field = |(name, value): &(&str, &str)| {
            let value = match *name {
                "topics" => json!([value]),
                "missing" | "dry_run" if *value == "yes" => json!(true),
                _ => json!(value),
            };
            ((*name).to_owned(), value)
        };
        let body = Value::Object(rest.iter().map(field).collect()).to_string();
        spy.ask(self.method.clone(), &path, &headers, &body)
    }
}

/// R60: over every route of pages and JSON, with each parameter.
#[test]
fn a_tenant_sees_guesses_and_touches_nothing_of_another() {
    let (database, acme, globex) = two();
    let secret = database.text("SELECT secret FROM {o}_destination WHERE name = 'acme-hook'");
    let secret = secret.expect("a secret");
    let (id, delivered, dead) = (acme.id, acme.delivered, acme.dead);
    let [id, delivered, dead] = [id, delivered, dead].map(|id| id.to_string());
    let sequence = database.number("SELECT sequence FROM {o}_dead WHERE topic = 'acme.event'");
    let sequence = format!("{sequence}.{dead}");
    let theirs = [
        &acme.endpoint,
        &id,
        &delivered,
        &dead,
        &sequence,
        "acme.event",
    ];
    let of_acme = [acme.word, &id, &delivered, &dead, &secret];
    let [own_dead, own_delivered] = [globex.dead, globex.delivered].map(|id| id.to_string());
    let url = globex.receiver.url();
    let own = |parameter: &str, is_json: bool| match parameter {
        "name" => globex.endpoint.clone(),
        // The dead letter waits again after its page has sent it.
        "id" if is_json => own_delivered.clone(),
        "id" => own_dead.clone(),
        "url" => url.clone(),
        "topic" | "topics" => "order.paid".to_owned(),
        "since" => "2000-01-01T00:00".to_owned(),
        "missing" | "sure" | "dry_run" => "yes".to_owned(),
        _ => String::new(),
    };
    let before = rows_of(&database, &acme);
    let mut strict = config(&database);
    strict.registered_public_only = true;
    for config in [config(&database), strict] {
        let portal = portal(&config);
        let spy = Browser::of(&portal, &globex, Rights::all());
        let token = spy.get("/endpoints/new").form_token();
        for door in Door::all(&spy) {
            let (path, takes) = (&door.path, &door.takes);
            let send = |values: &[(&str, String)]| {
                // As it was, whatever the last request did to it.
                let others =
                    "DELETE FROM {o}_destination WHERE name NOT IN ('acme-hook', 'globex-hook')";
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
                .map(|name| (name.as_str(), own(name, door.is_json)))
                .collect();
            let seen = send(&all_own);
            if !config.registered_public_only && !path.ends_with("/verify") {
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
                    if name == "name" && *value == acme.endpoint {
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

/// R60: over every act.
#[test]
fn a_form_needs_the_right_and_the_token_of_its_own_session() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let link = portal.link(acme.id, HOUR);
    let own = Browser::opening(&portal, &link);
    let token = |browser: &Browser<'_>| browser.get("/endpoints/new").form_token();
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
    database.execute("DELETE FROM {o}_destination WHERE name = 'acme-hook'");
    acme.put(&database);
    assert_eq!(test(&portals[0], &acme), StatusCode::TOO_MANY_REQUESTS);
    database.execute("UPDATE {o}_audit SET at = at - interval '1 minute'");
    assert_eq!(test(&portals[0], &acme), StatusCode::OK);
}

/// R60: the pages of a tenant that wait for the database leave connections to other tenants.
#[test]
fn slow_pages_of_one_tenant_delay_no_other() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let slow = format!("/delivery?{}", encoded(&[("name", &acme.endpoint), ("id", &acme.dead.to_string())]));
    let (mut other, name) = (database.connect(), database.name());
    other
        .batch_execute(&format!("BEGIN; LOCK TABLE {name}_attempt"))
        .expect("a lock");
    let waiting = || {
        database.number("SELECT count(*) FROM pg_locks WHERE relation = '{o}_attempt'::regclass AND NOT granted")
    };
    std::thread::scope(|threads| {
        let ann = Browser::of(&portal, &acme, Rights::all());
        let slow: Vec<_> = (0..8)
            .map(|_| threads.spawn(|| ann.get(&slow).status))
            .collect();
        eventually("pages of acme wait for the lock", || waiting() >= 2);
        let bob = Browser::of(&portal, &globex, Rights::all());
        for _ in 0..3 {
            let began = Instant::now();
            assert!(bob.get("/").ok().contains("globex-hook"));
            assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        }
        assert_eq!(waiting(), 2);
        other.batch_execute("COMMIT").expect("unlocked");
        let answers: Vec<StatusCode> = slow.into_iter().map(|one| one.join().expect("answered")).collect();
        assert!(answers.contains(&StatusCode::OK), "{answers:?}");
    });
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
    let dead = [("name", acme.endpoint.as_str()), ("id", &acme.dead.to_string())];
    let dead = format!("/delivery?{}", encoded(&dead));
    let dead = ann.ask(Method::GET, &dead, &[("accept-language", "de")], "").ok();
    assert!(dead.contains("Ihr Endpunkt hat die Anfrage abgelehnt"), "{dead}");
    assert!(!dead.contains("refused"), "{dead}");
    assert_eq!(ann.get("/assets/logo").ok(), "<svg/>");
    let style = ann.get("/assets/style.css").ok();
    assert!(style.contains("prefers-color-scheme: dark") && style.ends_with("#0a6e4f; }"));
    // What the form of an endpoint can refuse, in words of this language alone.
    let mut strict = config(&database);
    (strict.registered_https_only, strict.registered_public_only) = (true, true);
    let strict = Pages::portal(&strict, &database.secret_url()).expect("a portal");
    let strict = strict.topic("order.paid", "An order was paid.", json!({}));
    let ann = Browser::of(&strict, &acme, Rights::all());
    let token = ann.get("/endpoints/new").form_token();
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
