//! What commands say beside their result: hints, names and pages of help.

use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::program::SETTINGS;
use serde_json::json;

use crate::support::{Database, Receiver, binary, end, eventually, finish};

/// R71: a destination selects what routes send there, too; an act that ends messages leaves those that others get as well.
#[test]
fn a_destination_selects_what_a_route_sends_there() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    let named = |name| diesel_outbox::Destination::new(name, &receiver.url()).expect("a URL");
    let hour = std::time::Duration::from_secs(3600);
    let relay = database.keeping_relay();
    let relay = relay
        .backoff(diesel_outbox::Backoff::Table(vec![hour]))
        .destination(named("billing"))
        .destination(named("archive"))
        .route("order.*", "billing")
        .configure(|config| {
            let both = diesel_outbox::Route::to_each("news.*", ["billing", "archive"]);
            config.routes.push(both);
        })
        .start()
        .expect("a relay");
    let ask = |arguments: &[&str]| {
        let flags = ["--destination", "billing", "--json"];
        let all = [arguments, &flags].concat();
        finish(database.binary(&all)).code(0).json()
    };
    let tried = |times: i32| {
        let tried =
            format!("SELECT count(*) FROM {{o}} WHERE attempts = {times} AND locked_by IS NULL");
        eventually("the message has failed", || database.number(&tried) == 1);
    };
    database.enqueue("order.paid", json!({}));
    tried(1);
    database.execute(
        "INSERT INTO {o} (topic, payload, available_at)
         VALUES ('news.daily', '1', now() + interval '1 hour'), ('order.late', '1', now() + interval '1 hour')",
    );
    assert_eq!(ask(&["message", "retry", "--dry-run"])["matched"], 1);
    assert_eq!(ask(&["message", "retry", "--yes"])["changed"], 1);
    tried(2);
    let listed = ask(&["message", "list"]);
    assert_eq!(
        listed["messages"].as_array().map(Vec::len),
        Some(3),
        "{listed}"
    );

    // Others get the news and, from now on, the late order.
    let hook = Endpoint::new("acme", "https://hooks.example/in").topics(["order.late"]);
    let conn = &mut database.connect();
    (database.outbox().endpoints())
        .put(conn, &hook)
        .expect("put");
    assert_eq!(ask(&["message", "cancel", "--yes"])["changed"], 1);
    let left = "SELECT string_agg(topic, ' ' ORDER BY topic) FROM {o}";
    assert_eq!(
        database.text(left).as_deref(),
        Some("news.daily order.late")
    );

    end(&relay);
}

/// R66: an operator sees which destination fails.
#[test]
fn the_status_names_the_destination_that_a_route_leads_to() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    let billing = diesel_outbox::Destination::new("billing", &receiver.url()).expect("a URL");
    let relay = database.keeping_relay();
    let relay = relay
        .backoff(diesel_outbox::Backoff::Table(vec![
            std::time::Duration::from_secs(3600),
        ]))
        .destination(billing)
        .route("order.*", "billing")
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("the message waits for a retry", || {
        database.count("retrying") == 1
    });
    let status = finish(database.binary(&["status", "--json"]))
        .code(0)
        .json();
    let trouble = &status["troubles"][0];
    assert_eq!(trouble["destination"], "billing", "{status}");
    let text = finish(database.binary(&["status"])).code(0).stdout;
    assert!(text.contains("billing"), "{text}");
    end(&relay);
}

/// R48: query parameters are credentials of many receivers.
#[test]
fn no_command_shows_the_query_of_a_registered_url() {
    let database = Database::new();
    let hook = Endpoint::new("acme", "https://hooks.example/in?token=hunter2");
    let conn = &mut database.connect();
    (database.outbox().endpoints())
        .put(conn, &hook)
        .expect("put");
    for arguments in [
        ["endpoint", "list"].as_slice(),
        &["endpoint", "list", "--json"],
        &["endpoint", "show", "acme"],
        &["endpoint", "show", "acme", "--json"],
    ] {
        let shown = finish(database.binary(arguments)).code(0).stdout;
        assert!(!shown.contains("hunter2"), "{arguments:?}: {shown}");
        assert!(
            shown.contains("hooks.example/in?***"),
            "{arguments:?}: {shown}"
        );
    }
}

/// A flag that is the name of a subcommand.
#[test]
fn a_subcommand_that_is_given_as_a_flag_is_named() {
    for (arguments, hint) in [
        (
            ["pause", "--destination", "billing"].as_slice(),
            "pause destination",
        ),
        (&["pause", "--topic", "order.paid"], "pause topic"),
        (
            &["resume", "--destination", "billing"],
            "resume destination",
        ),
        (&["endpoint", "--list"], "endpoint list"),
    ] {
        let error = finish(binary(arguments)).code(2).stderr;
        assert!(error.contains(hint), "{arguments:?}: {error}");
        assert!(!error.contains("--retention"), "{arguments:?}: {error}");
    }
}

/// The settings have a page of their own.
#[test]
fn the_help_of_a_command_has_its_own_options_and_help_settings_has_the_settings() {
    let help = finish(binary(&["pause", "destination", "--help"]))
        .code(0)
        .stdout;
    assert!(
        help.contains("--reason") && help.contains("help settings"),
        "{help}"
    );
    assert!(help.lines().count() < 50, "{help}");
    for page in [["help", "settings"].as_slice(), &["settings"]] {
        let page = finish(binary(page)).code(0).stdout;
        for setting in SETTINGS {
            let flag = setting.variable.trim_start_matches("OUTBOX_");
            let flag = format!("--{}", flag.to_lowercase().replace('_', "-"));
            for part in [setting.variable, setting.default, &flag] {
                assert!(page.contains(part), "{part}: {page}");
            }
        }
    }
}
