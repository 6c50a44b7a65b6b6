//! Authentication against programs of others: tokens of the server oidc-provider, and signatures that GitHub's and
//! Stripe's own libraries verify.

use std::process::Command;
use std::time::Duration;

use diesel_outbox::{Destination, RelayHandle};
use serde_json::{Value, json};

use crate::example::installed;
use crate::support::{Database, Running, end, eventually};

/// The characters that id and secret must not have in Basic authentication as they are.
const SECRET: &str = "hunter2 %&+:";
const METHODS: [&str; 6] = [
    "client_secret_basic",
    "client_secret_post",
    "ES256",
    "ES384",
    "EdDSA",
    "RS256",
];

struct Server {
    process: Running,
    url: String,
}

impl Server {
    /// A server whose tokens live for this time.
    fn start(token_seconds: u32) -> Self {
        // Node.js finds packages from the place of the script.
        let packages = installed("receivers-auth/node_modules");
        let script = packages.with_file_name(format!("{}.mjs", uuid::Uuid::now_v7()));
        std::fs::write(&script, include_str!("auth/server.mjs")).expect("a script");
        let mut command = Command::new("node");
        command
            .arg(&script)
            .env("SECRET", SECRET)
            .env("SECONDS", token_seconds.to_string());
        let process = Running::start(command);
        process.wait_for_log("\"issuer\"");
        std::fs::remove_file(script).expect("our script");
        let mut server = Self {
            process,
            url: String::new(),
        };
        let said = server.said("issuer").remove(0);
        server.url = said["issuer"].as_str().expect("a URL").to_owned();
        server
    }

    /// The lines that have this key.
    fn said(&self, key: &str) -> Vec<Value> {
        let log = self.process.log();
        let lines = log
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        lines
            .filter(|line: &Value| line.get(key).is_some())
            .collect()
    }

    /// What `/events` accepted.
    fn accepted(&self) -> Vec<Value> {
        self.said("token")
    }

    /// A destination whose name is a client of the server, or another name.
    fn destination(&self, name: &str, path: &str, auth: &Value) -> Destination {
        let url = format!("{}{path}", self.url);
        let destination = Destination::new(name, &url).expect("a URL");
        destination.configure(|destination| {
            destination.auth = Some(auth.to_string().parse().expect("authentication"))
        })
    }

    /// The client of this name, with a secret or a key.
    fn client(&self, name: &str) -> Destination {
        self.destination(name, "/events", &self.auth_of(name))
    }

    fn auth_of(&self, name: &str) -> Value {
        let mut auth = json!({
            "type": "oauth2",
            "token_url": format!("{}/token", self.url),
            "client_id": name,
            "scope": "events",
        });
        let clients = self.said("private_key");
        match clients.iter().find(|one| one["client"] == name) {
            Some(one) => {
                auth["private_key"] = one["private_key"].clone();
                auth["key_id"] = json!(format!("key of {name}"));
                auth["assertion_audience"] = json!(self.url);
            }
            None => {
                auth["client_secret"] = json!(SECRET);
                auth["method"] = json!(name);
            }
        }
        auth
    }
}

fn relay(database: &Database, destinations: Vec<Destination>) -> RelayHandle {
    let second = Duration::from_secs(1);
    let mut relay = database
        .relay()
        .lease(30 * second)
        .send_timeout(20 * second);
    for destination in destinations {
        let topic = destination.name.clone();
        relay = relay.route(&topic, &topic).destination(destination);
    }
    relay.start().expect("a relay")
}

/// R59
#[test]
fn r59_a_client_gets_tokens_by_each_method_that_the_server_knows() {
    let (database, server) = (Database::new(), Server::start(3600));
    let clients = METHODS.map(|method| server.client(method)).to_vec();
    let relay = relay(&database, clients);
    for method in METHODS {
        for n in 0..3 {
            database.enqueue(method, json!({ "n": n }));
        }
    }
    eventually("all are delivered", || database.count("delivered") == 18);
    end(&relay);
    assert_eq!(database.number("SELECT count(*) FROM {o}_attempt"), 0);
    let accepted = server.accepted();
    for method in METHODS {
        let of_client: Vec<&Value> = accepted
            .iter()
            .filter(|one| one["client"] == method)
            .collect();
        assert_eq!(of_client.len(), 3, "{method}");
        assert!(of_client.iter().all(|one| one["scope"] == "events"));
        assert!(
            of_client
                .iter()
                .all(|one| one["token"] == of_client[0]["token"])
        );
    }
}

/// R59
#[test]
fn r59_tokens_that_expire_are_renewed_and_no_attempt_fails() {
    let (database, server) = (Database::new(), Server::start(2));
    let relay = relay(&database, vec![server.client("ES256")]);
    let mut sent = 0;
    let tokens = || {
        let accepted = server.accepted();
        let tokens = accepted.iter().map(|one| one["token"].to_string());
        tokens.collect::<std::collections::BTreeSet<_>>().len()
    };
    eventually("the third token is in use", || {
        database.enqueue("ES256", json!({ "n": sent }));
        sent += 1;
        tokens() >= 3
    });
    eventually("all are delivered", || database.count("delivered") == sent);
    end(&relay);
    assert_eq!(database.number("SELECT count(*) FROM {o}_attempt"), 0);
}

/// R59
#[test]
fn r59_a_revoked_token_is_replaced_within_the_attempt() {
    let (database, server) = (Database::new(), Server::start(3600));
    let relay = relay(&database, vec![server.client("client_secret_basic")]);
    for delivered in 1..=2 {
        database.enqueue("client_secret_basic", json!({}));
        eventually("it is delivered", || {
            database.count("delivered") == delivered
        });
        let url = format!("{}/revoke", server.url);
        ureq::post(&url).send("").expect("revoked");
    }
    end(&relay);
    let statuses: Vec<Value> = server
        .said("path")
        .iter()
        .filter(|one| one["path"] == "/events")
        .map(|one| one["status"].clone())
        .collect();
    assert_eq!(statuses, [204, 401, 204]);
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
}

/// R59
#[test]
fn r59_a_wrong_secret_or_key_is_refused_by_the_token_server() {
    let (database, server) = (Database::new(), Server::start(3600));
    let mut wrong = server.client("client_secret_post");
    let settings = json!({
        "type": "oauth2",
        "token_url": format!("{}/token", server.url),
        "client_id": "client_secret_post",
        "client_secret": "another",
        "method": "client_secret_post",
    });
    wrong.auth = Some(settings.to_string().parse().expect("authentication"));
    let mut other_key = server.client("ES384");
    let mut of_another = server.auth_of("ES256");
    of_another["client_id"] = json!("ES384");
    other_key.auth = Some(of_another.to_string().parse().expect("authentication"));
    let relay = relay(
        &database,
        vec![
            wrong.configure(|destination| destination.policy.max_attempts = Some(1)),
            other_key.configure(|destination| destination.policy.max_attempts = Some(1)),
        ],
    );
    for topic in ["client_secret_post", "ES384"] {
        database.enqueue(topic, json!({}));
    }
    eventually("both are dead-lettered", || database.count("dead") == 2);
    end(&relay);
    let errors = "SELECT string_agg(DISTINCT reason || ' ' || last_error, ', ') FROM {o}_dead";
    let expected = "TOKEN_SERVER token server: answered 401 (invalid_client)";
    assert_eq!(database.text(errors).as_deref(), Some(expected));
}

/// R59
#[test]
fn r59_signatures_of_other_shapes_are_verified_by_the_libraries_of_github_and_stripe() {
    let (database, server) = (Database::new(), Server::start(3600));
    let github = |secret: &str| json!({ "type": "header", "name": "X-Hub-Signature-256", "secret": secret, "prefix": "sha256=" });
    let stripe = |secret: &str| {
        json!({
            "type": "header", "name": "Stripe-Signature", "secret": secret,
            "value": "t={timestamp},v1={signature}", "content": "{timestamp}.{body}",
        })
    };
    let destinations = vec![
        server.destination("github", "/github", &github(SECRET)),
        server.destination("stripe", "/stripe", &stripe(SECRET)),
        server
            .destination("no-github", "/github", &github("another"))
            .configure(|destination| destination.policy.max_attempts = Some(1)),
        server
            .destination("no-stripe", "/stripe", &stripe("another"))
            .configure(|destination| destination.policy.max_attempts = Some(1)),
    ];
    let relay = relay(&database, destinations);
    for topic in ["github", "stripe", "no-github", "no-stripe"] {
        database.enqueue(
            topic,
            json!({ "id": "evt_1", "object": "event", "text": "Grüße €" }),
        );
    }
    eventually("two are delivered", || database.count("delivered") == 2);
    eventually("two are dead-lettered", || database.count("dead") == 2);
    end(&relay);
    let delivered = "SELECT string_agg(destination, ' ' ORDER BY destination) FROM {o}_ledger WHERE status = 'delivered'";
    assert_eq!(database.text(delivered).as_deref(), Some("github stripe"));
    let refused = "SELECT string_agg(DISTINCT http_status::text, ' ') FROM {o}_dead";
    assert_eq!(database.text(refused).as_deref(), Some("401"));
}
