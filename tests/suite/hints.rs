//! What commands say beside their result: hints, names and pages of help.

use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::program::SETTINGS;
use serde_json::json;

use crate::support::{Database, Receiver, binary, end, eventually, finish};

/// R66: messages that a route sends there name no destination.
#[test]
fn a_retry_by_destination_names_the_topics_that_a_route_sends_there() {
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
    for dry in [&["--dry-run"][..], &["--yes"]] {
        let retry = ["message", "retry", "--destination", "billing"];
        let output = finish(database.binary(&[retry.as_slice(), dry].concat())).code(0);
        let said = output.stdout + &output.stderr;
        assert!(said.contains("--topic order.paid"), "{said}");
    }
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
