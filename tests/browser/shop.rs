//! A shop that serves the portal to a customer, whose endpoints are in order, failing and disabled.

use std::io::Write;
use std::time::Duration;

use diesel_outbox::config::Config;
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::{Backoff, NewMessage};
use diesel_outbox_pages::{Pages, Portal, Rights, Visitor, portal_routes};
use http::Method;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::ground::{LONG, LONG_UNTRIED, LONG_WAITS, crowd, long_rows};
use crate::support::{Database, Receiver, end, eventually};

const DELIVERED: i64 = 60;
const EVENTS: [(&str, &str); 3] = [
    ("order.paid", "An order was paid."),
    ("order.shipped", "A parcel has left the warehouse."),
    ("stock.low", "An article is about to run out."),
];

pub(crate) struct Shop {
    pub(crate) server: Receiver,
    tenant: Uuid,
    /// A delivered message, and a message that the endpoint never accepted.
    delivered: Uuid,
    dead: Uuid,
    database: Database,
}

impl Shop {
    pub(crate) fn new() -> Self {
        let (database, tenant) = (Database::new(), Uuid::now_v7());
        let (works, fails) = (Receiver::ok(), Receiver::answering(|_| 503));
        for (name, url, topics) in [
            (
                "orders",
                works.url(),
                ["order.paid", "order.shipped"].as_slice(),
            ),
            ("stock", fails.url(), &["stock.low"]),
            ("archive", works.url(), &["order.cancelled"]),
        ] {
            let endpoint = Endpoint::new(name, url)
                .tenant(tenant)
                .topics(topics.iter().copied());
            let (outbox, mut conn) = (database.outbox(), database.connect());
            outbox.endpoints().put(&mut conn, &endpoint).expect("put");
        }
        let enqueue = |topic: &str, payload: Value| {
            let message = NewMessage::new(topic, &payload)
                .expect("JSON")
                .tenant_id(tenant);
            let id = message.message_id();
            database.enqueue_message(message);
            id
        };
        let orders: Vec<Uuid> = (0..DELIVERED)
            .map(|number| {
                let (topic, _) = EVENTS[usize::from(number % 3 == 1)];
                enqueue(topic, json!({ "order_id": number, "euro": 42 }))
            })
            .collect();
        let delivered = *orders.last().expect("orders");
        let dead = enqueue("stock.low", json!({ "article": "teapot", "left": 2 }));
        let relay = database
            .keeping_relay()
            .configure(|config| config.endpoint_max_attempts = 3)
            .configure(|config| {
                config.endpoint_backoff = Backoff::Table(vec![Duration::from_millis(50)])
            });
        let relay = relay.start().expect("a relay");
        eventually("all messages are settled", || {
            (database.count("delivered"), database.count("dead")) == (DELIVERED, 1)
        });
        end(&relay);
        // As after a day, at addresses of the customer.
        for sql in [
            "UPDATE {o}_endpoint SET created_at = now() - interval '9 days', url = 'https://hooks.acme.example/' || name,
                description = CASE name WHEN 'orders' THEN 'Accounting' WHEN 'stock' THEN 'Purchasing, in Ghent' ELSE 'Until last year' END",
            "UPDATE {o}_endpoint SET enabled = false, disabled_reason = 'GONE', disabled_by = 'receiver' WHERE name = 'archive'",
            "UPDATE {o}_endpoint SET failing = true, failing_since = now() - interval '40 min' WHERE name = 'stock'",
            "UPDATE {o}_ledger SET settled_at = settled_at - ago, created_at = created_at - ago
               FROM (SELECT sequence AS one, (sequence * sequence % 1380) * interval '1 min' AS ago FROM {o}_ledger) l
              WHERE sequence = one AND status = 'delivered'",
        ] {
            database.execute(sql);
        }
        Self {
            server: serve(portal(&database), tenant),
            tenant,
            delivered,
            dead,
            database,
        }
    }

    /// Adds ten thousand destinations and a million messages. The customer has 900 more endpoints, one with most of the
    /// messages.
    pub(crate) fn crowd(&self) {
        crowd(&self.database);
        let tenant = self.tenant;
        self.database.execute(&format!(
            "INSERT INTO {{o}}_endpoint (name, url, topics, tenant_id)
             SELECT 'e' || n, 'https://hooks.acme.example/e' || n, '{{order.*}}', '{tenant}' FROM generate_series(100, 999) n"
        ));
        self.database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, destination, tenant_id, available_at)
             SELECT 'order.paid', '{{}}', 'e500', '{tenant}', now() + interval '1 day' FROM generate_series(1, 200000) n"
        ));
        self.database.execute("ANALYZE {o}, {o}_endpoint");
    }

    /// Adds endpoints and deliveries of the customer with long names, URLs and errors.
    pub(crate) fn long_rows(&self) {
        long_rows(&self.database, self.tenant);
    }

    /// What the scenarios must know.
    pub(crate) fn told(&self) -> Value {
        let pages = portal_routes().filter(|(method, ..)| *method == Method::GET);
        let pages: Vec<&str> = pages.map(|(_, path, _)| path).collect();
        json!({
            "delivered": self.delivered.to_string(),
            "dead": self.dead.to_string(),
            "pages": pages,
            "long": LONG,
            "waits": LONG_WAITS,
            "untried": LONG_UNTRIED,
        })
    }
}

fn portal(database: &Database) -> Portal {
    let mut config = Config::default();
    for (setting, value) in [
        ("DATABASE_URL", &database.url),
        ("OUTBOX_TABLE", &database.name()),
    ] {
        config.set(setting, value).expect(setting);
    }
    let portal = Pages::portal(&config, config.database_url().expect("a database"))
        .expect("a portal")
        .name("Webhooks of the shop");
    EVENTS.iter().fold(portal, |portal, (topic, description)| {
        portal.topic(*topic, *description, json!({ "order_id": 1 }))
    })
}

/// Serves the portal to this tenant.
fn serve(portal: Portal, tenant: Uuid) -> Receiver {
    Receiver::start(move |asked, stream| {
        let mut line = asked.line.split(' ');
        let (method, target) = line.next().zip(line.next()).expect("a method and a target");
        let request = http::Request::builder().method(method).uri(target);
        let request = asked.headers().fold(request, |request, (name, value)| {
            request.header(name, value)
        });
        let request = request.body(asked.body.clone()).expect("a request");
        let visitor = Visitor::of_tenant(tenant, "ann", Rights::all());
        let (head, body) = portal.respond(request, visitor).into_parts();
        write!(
            stream,
            "HTTP/1.1 {}\r\ncontent-length: {}\r\n",
            head.status,
            body.len()
        )?;
        for (name, value) in &head.headers {
            write!(stream, "{name}: {}\r\n", value.to_str().expect("text"))?;
        }
        stream.write_all(b"\r\n")?;
        stream.write_all(&body)
    })
}
