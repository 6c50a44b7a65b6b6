//! The ground for the browser tests: an outbox with two destinations, a relay with its page, and the browser.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use diesel_outbox::NewMessage;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::page::Page;
use crate::support::{Database, Receiver, eventually, finish};

/// The program names of the browser.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

pub(crate) struct Ground {
    pub(crate) database: Database,
    pub(crate) billing: Receiver,
    /// Refuses every payload that contains `bad`, until `accept` is called.
    pub(crate) warehouse: Receiver,
    accepts: Arc<AtomicBool>,
    settings: PathBuf,
}

impl Ground {
    pub(crate) fn new() -> Self {
        Self::of(Database::new())
    }

    pub(crate) fn of(database: Database) -> Self {
        let billing = Receiver::ok();
        let accepts = Arc::new(AtomicBool::new(false));
        let all = Arc::clone(&accepts);
        let warehouse = Receiver::answering(move |request| {
            let is_bad = request.body.windows(5).any(|part| part == b"\"bad\"");
            if is_bad && !all.load(Ordering::Acquire) {
                422
            } else {
                200
            }
        });
        let settings =
            std::env::temp_dir().join(format!("outbox-browser-{}.toml", uuid::Uuid::now_v7()));
        let text = format!(
            "[destinations.billing]\nurl = '{}'\nconcurrency = 4
             [destinations.warehouse]\nurl = '{}'\nconcurrency = 8
             [[routes]]\ntopic = 'billing.*'\nto = 'billing'
             [[routes]]\ntopic = '*'\nto = 'warehouse'",
            billing.url(),
            warehouse.url()
        );
        std::fs::write(&settings, text).expect("a file");
        database.execute(
            "INSERT INTO {o}_endpoint (name, url, topics, description)
             VALUES ('acme', 'https://hooks.acme.example/orders', '{webhook.*}', 'Acme Ltd.')",
        );
        Self {
            database,
            billing,
            warehouse,
            accepts,
            settings,
        }
    }

    /// From now on the warehouse accepts everything.
    pub(crate) fn accept(&self) {
        self.accepts.store(true, Ordering::Release);
    }

    /// Starts a relay with its page.
    pub(crate) fn page(&self, settings: &[(&str, &str)]) -> Page {
        let mut command = self.database.binary(&["run"]);
        command.env("OUTBOX_CONFIG", &self.settings);
        command.envs(settings.iter().copied());
        Page::start(command)
    }

    /// Enqueues a message that the warehouse refuses, waits until it is dead-lettered, and returns its sequence.
    pub(crate) fn dead_letter(&self) -> i64 {
        let payload = json!({ "order": 7, "bad": true, "customer": "Ada", "lines": [1, 2] });
        let message = NewMessage::new("order.paid", &payload)
            .expect("JSON")
            .ordering_key("order-7");
        let sequence = self.database.enqueue_message(message);
        self.drain();
        eventually("the message is dead-lettered", || {
            self.database.count("dead") > 0
        });
        sequence
    }

    /// Sends the due messages.
    fn drain(&self) {
        let mut command = self.database.binary(&["drain"]);
        command.env("OUTBOX_CONFIG", &self.settings);
        finish(command);
    }

    /// Fills the outbox: delivered messages, dead letters, a waiting key and a paused topic.
    pub(crate) fn fill(&self) {
        for number in 0..60 {
            let topic = ["order.paid", "order.shipped", "billing.due"][number % 3];
            let payload = json!({ "order": number, "customer": "Ada" });
            self.database.enqueue(topic, payload);
        }
        for number in 0..12 {
            self.database
                .enqueue("order.cancelled", json!({ "order": number, "bad": true }));
        }
        self.drain();
        self.database.execute(
            "INSERT INTO {o} (topic, payload, ordering_key, available_at, attempts, last_error_code, last_error)
             SELECT 'order.late', '{\"n\":1}', 'order-7', now() + n * interval '1 hour', 2, 'SERVER_ERROR', 'the receiver returned 503'
               FROM generate_series(1, 3) n",
        );
        self.database.execute(
            "INSERT INTO {o}_pause (kind, name, reason, paused_until)
             VALUES ('topic', 'order.late', 'they are closed', now() + interval '1 hour')",
        );
    }

    /// Adds ten thousand destinations of customers, and a million messages that wait for tomorrow.
    pub(crate) fn crowd(&self) {
        crowd(&self.database);
    }

    /// Enqueues what a small shop produces in half a second: more and less, in waves, and now and then a message that
    /// the warehouse refuses.
    pub(crate) fn trickle(&self, round: usize) {
        let orders = 8.0 + 6.0 * (round as f64 / 40.0).sin();
        for number in 0..orders as usize {
            let topic = ["order.paid", "order.shipped", "billing.due"][number % 3];
            self.database.enqueue(topic, json!({ "order": round }));
        }
        if round % 37 == 5 {
            self.database.enqueue("order.paid", json!({ "bad": true }));
        }
    }

    /// Writes HTML into every field that other people can write. Returns the key, the topic and the other names.
    pub(crate) fn hostile_rows(&self) -> String {
        let html =
            |class: &str| format!("<img src=x onerror=\"window.hacked=true\" class={class}>");
        // A topic has no spaces.
        let topic = html("topic").replace(' ', "/");
        let row = |table: &str, columns: &str, values: String| {
            self.database.execute(&format!(
                "INSERT INTO {{o}}{table} ({columns}) VALUES ({values})"
            ));
        };
        let payload = serde_json::to_string(&json!({ html("key"): html("payload"), "s": "</pre><script>window.hacked=true</script>" }))
            .expect("JSON");
        row(
            "_dead",
            "sequence, message_id, topic, destination, payload, headers, ordering_key, idempotency_key, available_at, created_at, attempts, reason, last_error, response, blocks_key",
            format!(
                "1000000, gen_random_uuid(), '{topic}', '{}', '{payload}', '{payload}', '{}', '{topic}', now(), now(), 3, 'REJECTED', '{}', '{}', true",
                html("destination"),
                html("ordering"),
                html("error"),
                html("response"),
            ),
        );
        row(
            "_ledger",
            "part, idempotency_key, destination, sequence, message_id, topic, digest, status, reason, error, attempts, created_at, payload",
            format!(
                "0, '{topic}', '{}', 1000001, gen_random_uuid(), '{topic}', '', 'dead', 'REJECTED', '{}', 3, now(), '{payload}'",
                html("destination"),
                html("error"),
            ),
        );
        row(
            "",
            "topic, payload, ordering_key, available_at, last_error, last_error_code, attempts",
            format!(
                "'{topic}', '{payload}', '{}', now() + interval '1 day', '{}', 'FAILED', 1",
                html("ordering"),
                html("error")
            ),
        );
        row(
            "_pause",
            "kind, name, reason",
            format!("'topic', '{topic}', '{}'", html("pause")),
        );
        row(
            "_lease",
            "relay, expires_at",
            format!("'{}', now() + interval '1 hour'", html("relay")),
        );
        row(
            "_endpoint",
            "name, url, topics, description, enabled, disabled_reason",
            format!(
                "'{topic}', 'https://a.example/{}', ARRAY['{topic}'], '{}', false, '{}'",
                html("url"),
                html("description"),
                html("why"),
            ),
        );
        topic
    }

    pub(crate) fn scenario(&self, page: &Page, name: &str, told: Value) {
        scenario(page.address, name, told);
    }
}

/// The name of the endpoint whose rows are long: the portal names endpoints like this.
pub(crate) const LONG: &str = "01990000-0000-7000-8000-000000000001";
/// A message of this endpoint that waits for the next attempt.
pub(crate) const LONG_WAITS: &str = "01990000-0000-7000-8000-00000000a001";

/// A message of this endpoint that was never tried.
pub(crate) const LONG_UNTRIED: &str = "01990000-0000-7000-8000-00000000b001";

/// Long names, URLs, errors and times in every list: forty endpoints of a tenant in all states, and deliveries of the
/// first one in all states.
pub(crate) fn long_rows(database: &Database, tenant: Uuid) {
    let topic =
        "com.acme-international.billing.subscription.invoice.payment-attempt.failed-permanently.v2";
    let url = format!(
        "https://integration-gateway.eu-central-1.production.hooks.acme-international.example/v2/tenants/{tenant}/inbound/webhooks/accounting?environment=production&source=orders"
    );
    let error = "the receiver returned 503 Service Unavailable: upstream connect error or disconnect/reset before headers. reset reason: remote connection failure, transport failure reason: delayed connect error: 111 (eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIiwibmFtZSI6IkpvaG4gRG9lIn0)";
    let why = "the receiver is being moved to another data centre, as agreed with Acme International in ticket 4711; ask Ann before you resume it";
    let key = "customer-01990000-0000-7000-8000-00000000c0de/subscription-01990000-0000-7000-8000-00000000beef";
    for sql in [
        format!(
            "INSERT INTO {{o}}_endpoint (name, url, topics, tenant_id, description, enabled, disabled_by, disabled_reason, failing, failing_since, verification)
             SELECT '01990000-0000-7000-8000-' || lpad(n::text, 12, '0'), '{url}&n=' || n, ARRAY['{topic}', 'order.*', 'com.acme-international.stock.*'], '{tenant}',
                    'Accounting of the branch in Ghent, connected by the integration team of Acme International, number ' || n,
                    n % 5 <> 0, CASE n % 5 WHEN 0 THEN (ARRAY['owner', 'operator', 'relay', 'receiver'])[1 + n / 5 % 4] END, CASE n % 5 WHEN 0 THEN '{why}' END,
                    n % 5 = 1, CASE n % 5 WHEN 1 THEN now() - n * interval '53 minutes 7 seconds' END, CASE n % 5 WHEN 2 THEN 'challenge' END
               FROM generate_series(1, 40) n"
        ),
        format!(
            "INSERT INTO {{o}}_pause (kind, name, reason, paused_by, paused_until)
             SELECT 'destination', '01990000-0000-7000-8000-' || lpad(n::text, 12, '0'), CASE n WHEN 23 THEN 'BREAKER_OPEN' ELSE '{why}' END,
                    (ARRAY['owner', 'operator', 'relay', 'receiver'])[1 + n / 5 % 4], now() + (n - 3) * interval '7 hours 13 minutes'
               FROM generate_series(3, 38, 5) n
              UNION ALL SELECT 'topic', '{topic}', '{why}', 'operator', NULL
              UNION ALL SELECT 'tenant', '01990000-0000-7000-8000-00000000feed', '{why}', 'operator', now() + interval '3 hours'"
        ),
        format!(
            "INSERT INTO {{o}} (message_id, topic, destination, tenant_id, payload, ordering_key, idempotency_key, available_at, attempts, last_error_code, last_error)
             SELECT ('01990000-0000-7000-8000-00000000a' || lpad(n::text, 3, '0'))::uuid, '{topic}', '{LONG}', '{tenant}'::uuid, '{{\"a\": 1}}'::json, '{key}', '{key}/' || n,
                    now() + n * interval '1 hour 13 minutes', 6 + n, 'SERVER_ERROR', '{error}'
               FROM generate_series(1, 3) n
              UNION ALL
             SELECT ('01990000-0000-7000-8000-00000000b' || lpad(n::text, 3, '0'))::uuid, '{topic}', '01990000-0000-7000-8000-' || lpad(n::text, 12, '0'), '{tenant}', '{{}}', NULL, NULL, now() - interval '71 minutes', 0, NULL, NULL
               FROM generate_series(1, 12) n"
        ),
        format!(
            "INSERT INTO {{o}}_dead (sequence, message_id, topic, destination, tenant_id, payload, headers, ordering_key, idempotency_key, available_at, created_at, attempts, reason, last_error, http_status, response, dead_lettered_at, blocks_key)
             SELECT 2000000 + n, ('01990000-0000-7000-8000-00000000d' || lpad(n::text, 3, '0'))::uuid, '{topic}', '{LONG}', '{tenant}'::uuid, '{{\"a\": \"{key}\"}}', '{{\"x-request-id\": \"{key}\"}}', '{key}', '{key}/dead/' || n,
                    now(), now() - n * interval '26 hours', 20, 'SERVER_ERROR', '{error}', 503, '{error}', now() - n * interval '2 hours 5 minutes', true
               FROM generate_series(1, 3) n"
        ),
        format!(
            "INSERT INTO {{o}}_ledger (part, sequence, message_id, topic, destination, tenant_id, ordering_key, idempotency_key, digest, status, reason, error, http_status, attempts, created_at, settled_at, payload, registration)
             SELECT 0, 3000000 + n, gen_random_uuid(), '{topic}', CASE WHEN n % 4 <> 2 THEN '{LONG}' ELSE '' END, '{tenant}'::uuid, '{key}', '{key}/settled/' || n, '',
                    CASE n % 4 WHEN 1 THEN 'dead' WHEN 2 THEN 'no_subscriber' ELSE 'delivered' END,
                    CASE n % 4 WHEN 1 THEN 'CANCELLED' WHEN 2 THEN 'NO_SUBSCRIBER' END, CASE n % 4 WHEN 1 THEN 'alice: {why}' END, CASE n % 4 WHEN 1 THEN NULL WHEN 2 THEN NULL ELSE 200 END,
                    n, now() - n * interval '3 hours 7 minutes', now() - n * interval '47 minutes 11 seconds', '{{}}', (SELECT id FROM {{o}}_endpoint WHERE name = '{LONG}')
               FROM generate_series(1, 12) n"
        ),
        format!(
            "INSERT INTO {{o}}_attempt (part, sequence, message_id, topic, destination, tenant_id, event, attempt, reason, error, http_status, response, took, relay, happened_at)
             SELECT 0, (SELECT sequence FROM {{o}} WHERE message_id = '{LONG_WAITS}'), '{LONG_WAITS}', '{topic}', '{LONG}', '{tenant}', 'failed', n, 'SERVER_ERROR', '{error}', 503, '{error}', interval '12.345 seconds', 'r', now() - (10 - n) * interval '1 hour'
               FROM generate_series(1, 7) n"
        ),
        format!(
            "INSERT INTO {{o}}_audit (at, who, act, target, why)
             SELECT now() - n * interval '1 hour 13 minutes', 'ann.van-den-berghe@integration.acme-international.example', 'rotate_endpoint', '{LONG}', '{why}' FROM generate_series(1, 5) n"
        ),
        format!(
            "INSERT INTO {{o}}_lease (relay, expires_at) VALUES ('worker-7d9f8b6c5d-x2x4z.orders.production.eu-central-1.acme-international.internal/{LONG}', now() + interval '1 hour')"
        ),
        format!("INSERT INTO {{o}}_topic (pattern, kind) VALUES ('{topic}', 'route')"),
    ] {
        database.execute(&sql);
    }
}

/// Ten thousand destinations of customers, and a million messages that wait for tomorrow.
pub(crate) fn crowd(database: &Database) {
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, topics, description)
         SELECT 'customer-' || n, 'https://customer.example/' || n, '{webhook.*}', 'Customer ' || n
           FROM generate_series(1, 10000) n",
    );
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, available_at)
         SELECT 'webhook.' || n % 10, '{}', CASE n % 2 WHEN 1 THEN 'customer-' || n % 20000 END, now() + interval '1 day'
           FROM generate_series(1, 1000000) n",
    );
    database.execute("ANALYZE {o}, {o}_endpoint");
}

/// Runs a scenario in the browser, on the pages at this address. Fails with the browser's output.
pub(crate) fn scenario(address: SocketAddr, name: &str, told: Value) {
    let mut all = json!({
        "origin": format!("http://{address}"),
        "browser": browser(),
        "packages": folder(),
    });
    if let (Value::Object(all), Value::Object(told)) = (&mut all, told) {
        all.extend(told);
    }
    let sources = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("tests/browser");
    let output = Command::new("node")
        .arg(sources.join("scenarios.mjs"))
        .arg(name)
        .env("BROWSER_TEST", all.to_string())
        .stdin(Stdio::null())
        .output()
        .expect("Node.js runs: see scripts/install-browser");
    assert!(
        output.status.success(),
        "{name} failed:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Drop for Ground {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.settings);
    }
}

/// The folder where `scripts/install-browser` installs its packages.
pub(crate) fn folder() -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_diesel-outbox"));
    let folder = program
        .ancestors()
        .nth(2)
        .expect("the build's folder")
        .join("browser");
    assert!(
        folder.join("node_modules/playwright-core").is_dir(),
        "{} has no playwright-core: run scripts/install-browser",
        folder.display()
    );
    folder
}

/// `BROWSER_PATH`, or the first browser on the search path.
fn browser() -> PathBuf {
    if let Some(path) = std::env::var_os("BROWSER_PATH") {
        return path.into();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .flat_map(|folder| BROWSERS.map(|name| folder.join(name)))
        .find(|program| program.is_file())
        .expect("a browser is installed: run scripts/install-browser, or set BROWSER_PATH")
}
