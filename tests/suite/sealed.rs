//! Secrets at rest: what the database stores, who can read it, and how a relay handles secrets that it cannot read.

use std::time::Duration;

use diesel_outbox::config::SecretKeys;
use diesel_outbox::endpoints::{Endpoint, EndpointError, EndpointFilter};
use diesel_outbox::receive::{Headers, Verifier};
use diesel_outbox::{RelayBuilder, RelayHandle};
use secrecy::ExposeSecret;
use serde_json::json;

use crate::commands::With;
use crate::support::{Database, Finished, Receiver, end, eventually, finish};

const HOUR: Duration = Duration::from_secs(3600);

fn keys(of: &[&SecretKeys]) -> SecretKeys {
    let written: Vec<String> = of.iter().map(|one| text(one)).collect();
    written.join(" ").parse().expect("keys")
}

fn text(keys: &SecretKeys) -> String {
    keys.written().expose_secret().to_owned()
}

fn hook(name: &str, receiver: &Receiver) -> Endpoint {
    Endpoint::new(name, receiver.url())
}

fn put(database: &Database, keys: &SecretKeys, hook: &Endpoint) {
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let destinations = outbox.endpoints().with_keys(keys);
    destinations.put(conn, hook).expect("put");
}

/// The secret as stored in the row.
fn stored(database: &Database, name: &str) -> String {
    let secret = database.text(&format!(
        "SELECT secret FROM {{o}}_endpoint WHERE name = '{name}'"
    ));
    secret.expect("a secret")
}

/// The secret as the application reads it.
fn read(database: &Database, keys: &SecretKeys, name: &str) -> Result<String, EndpointError> {
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let secret = outbox.endpoints().with_keys(keys).secret(conn, name)?;
    let secret = secret.expect("it is there").written();
    Ok(secret.expose_secret().to_owned())
}

fn relay(database: &Database, keys: &SecretKeys) -> RelayHandle {
    let relay: RelayBuilder = database
        .relay()
        .endpoint_threads(4)
        .secret_keys(keys.clone());
    relay.start().expect("a relay")
}

fn command(database: &Database, keys: &SecretKeys, arguments: &[&str]) -> Finished {
    let command = database.binary(arguments);
    match keys.is_empty() {
        true => finish(command),
        false => finish(command.with("OUTBOX_SECRET_KEY", &text(keys))),
    }
}

/// R47
#[test]
fn a_new_secret_is_stored_encrypted_and_read_with_the_key() {
    let (database, receiver) = (Database::new(), Receiver::ok());
    let (key, other, none) = (
        SecretKeys::random(),
        SecretKeys::random(),
        SecretKeys::default(),
    );
    put(&database, &key, &hook("acme", &receiver));
    let first = stored(&database, "acme");
    assert!(first.starts_with("sealed1_"), "{first}");
    assert!(
        read(&database, &key, "acme")
            .expect("read")
            .starts_with("whsec_")
    );
    for wrong in [&other, &none] {
        let error = read(&database, wrong, "acme")
            .expect_err("not the key")
            .to_string();
        assert!(
            error.starts_with("destinations.acme.secret: secret 1: encrypted"),
            "{error}"
        );
        assert!(!error.contains("sealed1_"), "{error}");
    }

    let (outbox, mut conn) = (database.outbox(), database.connect());
    let destinations = outbox.endpoints().with_keys(&key);
    let new = destinations
        .rotate(&mut conn, "acme", HOUR)
        .expect("an answer");
    let new = new
        .expect("it is there")
        .written()
        .expose_secret()
        .to_owned();
    assert_eq!(read(&database, &key, "acme").expect("read"), new);
    let both = stored(&database, "acme");
    let words: Vec<&str> = both.split(' ').collect();
    assert!(
        words[0].starts_with("sealed1_") && words[1] == first,
        "{both}"
    );

    // A change of another column needs no key and changes no secret.
    put(
        &database,
        &none,
        &hook("acme", &receiver).configure(|hook| hook.description = Some("a shop".into())),
    );
    assert_eq!(stored(&database, "acme"), both);
}

/// R47: a row's secret is useless in another row.
#[test]
fn a_secret_that_was_moved_to_another_row_is_a_problem_there() {
    let (database, receiver) = (Database::new(), Receiver::ok());
    let key = SecretKeys::random();
    for name in ["acme", "evil"] {
        put(&database, &key, &hook(name, &receiver));
    }
    database.execute(
        "UPDATE {o}_endpoint SET secret = (SELECT secret FROM {o}_endpoint WHERE name = 'acme') WHERE name = 'evil'",
    );
    assert!(read(&database, &key, "evil").is_err());
    let (outbox, mut conn) = (database.outbox(), database.connect());
    let problem = |keys: &SecretKeys, name: &str| {
        let destinations = outbox.endpoints().with_keys(keys);
        let one = destinations
            .get(&mut database.connect(), name)
            .expect("an answer");
        one.expect("it is there").problem
    };
    assert_eq!(problem(&key, "acme"), None);
    let told = problem(&key, "evil").expect("a problem");
    assert!(told.starts_with("destinations.evil.secret: "), "{told}");
    // Without keys, secrets are not read: the role may lack the right.
    assert_eq!(problem(&SecretKeys::default(), "evil"), None);
    let destinations = outbox.endpoints().with_keys(&key);
    let listed = destinations.list(&mut conn, &EndpointFilter::default(), 10);
    let listed = listed.expect("an answer");
    let problems: Vec<bool> = listed.iter().map(|one| one.problem.is_some()).collect();
    assert_eq!(problems, [false, true]);
}

/// R47
#[test]
fn a_relay_with_the_key_signs_as_the_customer_expects() {
    let (database, receiver) = (Database::new(), Receiver::ok());
    let key = SecretKeys::random();
    put(&database, &key, &hook("acme", &receiver));
    let verifier: Verifier = read(&database, &key, "acme")
        .expect("read")
        .parse()
        .expect("a secret");
    let relay = relay(&database, &key);
    database.enqueue("order.paid", json!({}));
    receiver.wait_for(1);
    eventually("the message is settled", || {
        database.count("delivered") == 1
    });
    end(&relay);
    let request = receiver.requests().remove(0);
    verifier
        .verify(&Headers::new(request.headers()), &request.body)
        .expect("verified");
}

/// R47: a relay without the key does not sign wrongly, loses no message, and does not disable destinations that other
/// relays can serve.
#[test]
fn messages_that_a_relay_cannot_decrypt_wait_for_another_relay() {
    let (database, receiver) = (Database::new(), Receiver::ok());
    let (key, other, none) = (
        SecretKeys::random(),
        SecretKeys::random(),
        SecretKeys::default(),
    );
    put(&database, &key, &hook("acme", &receiver));
    put(&database, &none, &hook("plain", &receiver));
    for wrong in [&other, &none] {
        let before = receiver.count();
        let relay = relay(&database, wrong);
        database.enqueue("order.paid", json!({}));
        receiver.wait_for(before + 1);
        std::thread::sleep(Duration::from_millis(500));
        end(&relay);
        assert_eq!(
            receiver.count(),
            before + 1,
            "only the destination plain gets the message"
        );
    }
    let state = "SELECT string_agg(destination || ' ' || attempts, ', ') FROM {o}";
    assert_eq!(database.text(state).as_deref(), Some("acme 0, acme 0"));
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_endpoint WHERE enabled"),
        2
    );

    // One relay cannot decrypt, the other can.
    let without = relay(&database, &none);
    let with = relay(&database, &keys(&[&other, &key]));
    database.enqueue("order.paid", json!({}));
    eventually("all messages are delivered", || {
        database.count("delivered") == 6
    });
    end(&without);
    end(&with);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    assert_eq!(receiver.count(), 6);
}

/// R47
#[test]
fn a_command_encrypts_existing_secrets_and_changes_the_key() {
    let (database, receiver) = (Database::new(), Receiver::ok());
    let (old, new, lost, none) = (
        SecretKeys::random(),
        SecretKeys::random(),
        SecretKeys::random(),
        SecretKeys::default(),
    );
    let both = keys(&[&new, &old]);
    let encrypt = |keys: &SecretKeys| command(&database, keys, &["endpoint", "encrypt"]);
    let check = |keys: &SecretKeys| {
        let shown = command(&database, keys, &["check", "--json"]).json();
        let findings = shown["findings"].as_array().expect("an array").clone();
        let of_secrets = findings.iter().find(|one| one["what"] == "secret");
        of_secrets.map(|one| {
            format!(
                "{} {}",
                one["level"].as_str().expect("a level"),
                one["detail"]
            )
        })
    };
    put(&database, &none, &hook("a", &receiver));
    put(&database, &old, &hook("b", &receiver));
    put(&database, &new, &hook("c", &receiver));
    let read_all =
        |keys: &SecretKeys| ["a", "b", "c"].map(|name| read(&database, keys, name).expect("read"));
    let secrets = read_all(&both);

    let error = encrypt(&none).code(2).stderr;
    assert!(
        error.contains("OUTBOX_SECRET_KEY: it is not set"),
        "{error}"
    );
    let warned = check(&both).expect("a finding");
    assert!(
        warned.starts_with("warning ") && warned.contains("(1 plain, 1 with an older key)"),
        "{warned}"
    );
    assert_eq!(
        encrypt(&both).code(0).stdout,
        "encrypted the secrets of 2 endpoints (1 plain, 1 with an older key); 1 already had the newest key\n"
    );
    assert_eq!(read_all(&new), secrets);
    let good = check(&new).expect("a finding");
    assert!(
        good.starts_with("ok ") && good.contains("3 endpoints"),
        "{good}"
    );
    assert_eq!(
        encrypt(&new).code(0).stdout,
        "encrypted the secrets of 0 endpoints (0 plain, 0 with an older key); 3 already had the newest key\n"
    );
    let acts = "SELECT string_agg(target, ', ') FROM {o}_audit WHERE act = 'endpoint encrypt'";
    assert_eq!(database.text(acts).as_deref(), Some("2 endpoints"));

    // A secret that cannot be read is reported and left unchanged.
    put(&database, &lost, &hook("d", &receiver));
    let before = stored(&database, "d");
    let error = encrypt(&new).code(1).stderr;
    assert!(
        error.contains("1 endpoint cannot be read, and are unchanged: d"),
        "{error}"
    );
    assert_eq!(stored(&database, "d"), before);
    for keys in [&new, &none] {
        let problem = check(keys).expect("a finding");
        assert!(
            problem.starts_with("problem ") && problem.contains("nothing is sent to them"),
            "{problem}"
        );
    }
    let shown = command(&database, &new, &["endpoint", "show", "d", "--json"])
        .code(0)
        .json();
    let problem = shown["problem"].as_str().expect("a problem");
    assert!(problem.starts_with("destinations.d.secret"), "{problem}");
    // The customer of this destination gets a new secret.
    let rotate = |keep| {
        command(
            &database,
            &new,
            &["endpoint", "rotate", "d", "--keep", keep],
        )
    };
    let refused = rotate("1h").code(1);
    assert!(refused.stderr.contains("encrypted"), "{}", refused.stderr);
    rotate("0s").code(0);
}

#[test]
fn a_key_is_made_by_a_command() {
    let key = finish(crate::support::binary(&["secret", "new", "--at-rest"]))
        .code(0)
        .stdout;
    assert!(key.trim_end().parse::<SecretKeys>().is_ok(), "{key}");
}
