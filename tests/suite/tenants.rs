//! Two tenants, of which neither sees, guesses or touches anything of the other.

use std::time::{Duration, SystemTime};

use diesel::PgConnection;
use diesel_outbox::admin::{Bulk, Note};
use diesel_outbox::config::Config;
use diesel_outbox::endpoints::{
    DeliveryFilter, Endpoint, EndpointError, EndpointFilter, Endpoints, Recover,
};
use diesel_outbox::{NewMessage, Status};
use serde_json::json;
use uuid::Uuid;

use crate::support::{Database, Receiver, end, eventually};

/// A tenant with an endpoint, a delivery and a dead letter. Its word is in everything that it has.
pub(crate) struct Tenant {
    pub(crate) id: Uuid,
    pub(crate) word: &'static str,
    pub(crate) endpoint: String,
    pub(crate) receiver: Receiver,
    pub(crate) delivered: Uuid,
    pub(crate) dead: Uuid,
}

impl Tenant {
    fn new(database: &Database, word: &'static str) -> Self {
        let receiver = Receiver::start(move |request, stream| {
            // With its quotes: an id may contain the letters.
            let is_bad = String::from_utf8_lossy(&request.body).contains("\"bad\"");
            let status = if is_bad { "422 No" } else { "200 OK" };
            let body = format!("{word} says so");
            let length = body.len();
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}");
            std::io::Write::write_all(stream, answer.as_bytes())
        });
        let id = Uuid::now_v7();
        let message = |is: &str| {
            let payload = json!({ "of": word, "is": is });
            let message = NewMessage::new(format!("{word}.event"), &payload).expect("JSON");
            message.tenant_id(id).header("x-shop", word)
        };
        let (good, bad) = (message("good"), message("bad"));
        let tenant = Self {
            id,
            word,
            endpoint: format!("{word}-hook"),
            receiver,
            delivered: good.message_id(),
            dead: bad.message_id(),
        };
        tenant.put(database);
        database.enqueue_message(good);
        database.enqueue_message(bad);
        tenant
    }

    /// Registers the endpoint, or puts it back as it was.
    pub(crate) fn put(&self, database: &Database) {
        let url = self
            .receiver
            .url()
            .replace("/events", &format!("/{}", self.word));
        let hook = Endpoint::new(&self.endpoint, url)
            .tenant(self.id)
            .topics([format!("{}.*", self.word)])
            .configure(|hook| hook.description = Some(format!("the server of {}", self.word)));
        let (outbox, conn) = (database.outbox(), &mut database.connect());
        outbox.endpoints().put(conn, &hook).expect("put");
    }
}

/// Both tenants. All messages are settled, and no relay runs.
pub(crate) fn two() -> (Database, Tenant, Tenant) {
    let database = Database::new();
    let (acme, globex) = (
        Tenant::new(&database, "acme"),
        Tenant::new(&database, "globex"),
    );
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("all messages are settled", || {
        (database.count("delivered"), database.count("dead")) == (2, 2)
    });
    end(&relay);
    (database, acme, globex)
}

/// Everything that the tenant has, as one text.
pub(crate) fn rows_of(database: &Database, tenant: &Tenant) -> String {
    let of = |table: &str| {
        let is_its = format!("tenant_id = '{}'", tenant.id);
        let rows = format!(
            "SELECT string_agg(t::text, '\n' ORDER BY t::text) FROM {{o}}{table} t WHERE {is_its}"
        );
        database.text(&rows).unwrap_or_default()
    };
    ["_endpoint", "", "_dead", "_ledger", "_attempt"]
        .map(of)
        .join("\n---\n")
}

/// R60: whoever has the name of a destination, and the ids of its messages.
#[test]
fn destinations_of_a_tenant_do_not_exist_for_another() {
    let (database, acme, globex) = two();
    let outbox = database.outbox();
    let all = outbox.endpoints();
    let (mut conn, before) = (database.connect(), rows_of(&database, &acme));
    let own = all.of_tenant(globex.id);
    let name = acme.endpoint.as_str();
    let sees = |own: Endpoints<'_>, conn: &mut PgConnection| {
        let note = Note::new("globex", "curious");
        let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        let day = Duration::from_secs(86_400);
        let filter = DeliveryFilter::default();
        let listed = own
            .list(conn, &EndpointFilter::default(), 10)
            .expect("listed");
        [
            own.get(conn, name).expect("an answer").is_some(),
            listed.iter().any(|one| one.name == name),
            own.secret(conn, name).expect("an answer").is_some(),
            !(own
                .deliveries(conn, name, &filter, 10)
                .expect("deliveries")
                .rows)
                .is_empty(),
            own.delivery(conn, name, acme.dead)
                .expect("an answer")
                .is_some(),
            own.delivery(conn, name, acme.delivered)
                .expect("an answer")
                .is_some(),
            (own.delivery_counts(conn, name, day, 1)
                .expect("counts")
                .iter()
                .flatten())
            .any(|count| count.delivered + count.dead > 0),
            own.test(conn, name, &config(&database))
                .expect("an answer")
                .is_some(),
            own.backfill(conn, name, long_ago, Bulk::new(&note).dry_run())
                .expect("an answer")
                .is_some(),
            own.send_again(conn, name, acme.delivered)
                .expect("an answer"),
            own.recover(conn, name, long_ago, Recover::AndMissed, Bulk::new(&note))
                .expect("an answer")
                .is_some(),
            own.rotate(conn, name, day).expect("an answer").is_some(),
            own.disable(conn, name, "out of spite").expect("an answer"),
            own.enable(conn, name).expect("an answer"),
            own.remove(conn, name).expect("an answer"),
        ]
    };
    assert_eq!(sees(own, &mut conn), [false; 15]);
    let stolen = Endpoint::new(name, "https://globex.example/");
    let error = own.put(&mut conn, &stolen).expect_err("the name is taken");
    assert!(matches!(error, EndpointError::Invalid(_)), "{error}");
    // The filter of another tenant selects nothing.
    let filter = DeliveryFilter::default().tenant_id(acme.id);
    let found = own.deliveries(&mut conn, &globex.endpoint, &filter, 10);
    assert!(found.expect("deliveries").rows.is_empty());
    assert_eq!(rows_of(&database, &acme), before);
    assert_eq!(acme.receiver.count(), 2);

    // Its own are there, and what it registers is its own.
    assert_eq!(sees(all.of_tenant(acme.id), &mut conn), [true; 15]);
    own.put(&mut conn, &stolen).expect("the name is free again");
    let found = all.get(&mut conn, name).expect("an answer").expect("there");
    assert_eq!(found.tenant_id, Some(globex.id));
    let foreign = own.delivery(&mut conn, name, acme.delivered);
    assert!(foreign.expect("an answer").is_none(), "of the name before");
}

/// Settings that allow endpoints of this machine.
pub(crate) fn config(database: &Database) -> Config {
    let mut config = Config::default();
    for (setting, value) in [
        ("DATABASE_URL", database.url.as_str()),
        ("OUTBOX_TABLE", &database.name()),
        ("OUTBOX_ENDPOINT_HTTPS_ONLY", "false"),
        ("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false"),
    ] {
        config.set(setting, value).expect(setting);
    }
    config
}

/// R60, R46
#[test]
fn a_delivery_is_shown_with_its_content_its_answer_and_its_failures() {
    let (database, acme, _) = two();
    let (outbox, mut conn) = (database.outbox(), database.connect());
    let own = outbox.endpoints().of_tenant(acme.id);
    let details = |conn: &mut PgConnection, id| {
        let found = own.delivery(conn, &acme.endpoint, id).expect("an answer");
        found.expect("the delivery")
    };
    let dead = details(&mut conn, acme.dead);
    assert_eq!(
        (dead.delivery.state, dead.delivery.attempts),
        (Status::Dead, 1)
    );
    assert_eq!(dead.response.as_deref(), Some("acme says so"));
    assert!(dead.payload.is_some_and(|payload| payload.contains("bad")));
    assert!(
        dead.headers
            .is_some_and(|headers| headers.contains("x-shop"))
    );
    let failed = &dead.failed[0];
    assert_eq!((failed.attempt, failed.http_status), (Some(1), Some(422)));
    let error = failed.public_error();
    assert_eq!(error.as_deref(), Some("your endpoint refused the request"));
    let good = details(&mut conn, acme.delivered);
    assert_eq!(good.delivery.state, Status::Delivered);
    assert!(good.delivery.can_be_sent_again && good.failed.is_empty());

    // Sent again, it waits.
    own.send_again(&mut conn, &acme.endpoint, acme.dead)
        .expect("sent again");
    let waits = details(&mut conn, acme.dead);
    assert_eq!(waits.delivery.state, Status::Pending);
    assert!(!waits.delivery.can_be_sent_again && waits.failed.len() == 1);

    // By topic and time.
    let count = |conn: &mut PgConnection, filter: DeliveryFilter| {
        let found = own.deliveries(conn, &acme.endpoint, &filter, 10);
        found.expect("deliveries").rows.len()
    };
    let hour = Duration::from_secs(3600);
    let (past, future) = (SystemTime::now() - hour, SystemTime::now() + hour);
    let all = DeliveryFilter::default();
    for (filter, expected) in [
        (all.clone(), 2),
        (all.clone().topic("acme.event".to_owned()), 2),
        (all.clone().topic("acme.other".to_owned()), 0),
        (all.clone().since(past).until(future), 2),
        (all.clone().until(past), 0),
        (all.since(future), 0),
    ] {
        assert_eq!(count(&mut conn, filter.clone()), expected, "{filter:?}");
    }
}
