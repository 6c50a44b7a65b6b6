//! Endpoints: the ones that an application's customers register.

use std::time::{Duration, SystemTime};

use diesel::Connection;
use diesel_outbox::NewMessage;
use diesel_outbox::config::{Class, Classes, DeliveryPolicy, Mode, OnDead, Rate};
use diesel_outbox::endpoints::{Endpoint, EndpointError, EndpointFilter};
use secrecy::ExposeSecret;
use serde_json::json;
use uuid::Uuid;

use crate::support::{Database, finish};

const HOUR: Duration = Duration::from_secs(3600);

fn hook(name: &str) -> Endpoint {
    Endpoint::new(name, "https://acme.example/hooks")
}

/// R46
#[test]
fn a_destination_is_read_as_it_was_put() {
    let database = Database::new();
    let (outbox, mut conn) = (database.outbox(), database.connect());
    let destinations = outbox.endpoints();
    let tenant = Uuid::now_v7();
    let mut gone_is_dead = Classes::default();
    gone_is_dead.set(410, Class::Dead).expect("a 4xx");
    let put = hook("acme")
        .topics(["order.*", "member.joined"])
        .tenant(tenant)
        .filter(json!({"total": [{"numeric": [">", 100]}]}))
        .configure(|hook| {
            hook.policy.mode = Some(Mode::Structured);
            hook.policy.concurrency = Some(2);
            hook.policy.rate = Some(Rate::per_second(1.5));
            hook.policy.timeout = Some(Duration::from_millis(2_500));
            hook.policy.max_attempts = Some(3);
            hook.policy.backoff = Some("5s,1m".parse().expect("a table"));
            hook.policy.on_dead = Some(OnDead::Block);
            hook.policy.expires_after = Some(HOUR);
            hook.policy.classes = gone_is_dead;
            hook.description = Some("their shop".into());
        })
        .header("x-team", "billing");
    destinations.put(&mut conn, &put).expect("put");
    let found = destinations.get(&mut conn, "acme").expect("an answer");
    let found = found.expect("it is there");
    assert_eq!(found.topics, ["order.*", "member.joined"]);
    assert_eq!(
        (found.url.as_str(), found.tenant_id, found.enabled),
        ("https://acme.example/hooks", Some(tenant), true)
    );
    // PostgreSQL rewrites the filter in its own form.
    assert_eq!(
        found.filter,
        Some(json!({"total": [{"numeric": [">", 100]}]}))
    );
    let (header, value) = &found.headers[0];
    assert_eq!(
        (header.as_str(), value.expose_secret()),
        ("x-team", "billing")
    );
    assert_eq!(
        (found.policy.mode, found.policy.concurrency),
        (Some(Mode::Structured), Some(2))
    );
    assert_eq!(
        (&found.policy, found.problem.as_deref()),
        (&put.policy, None)
    );
    assert_eq!(found.description.as_deref(), Some("their shop"));
    assert_eq!(found.problem, None);
    assert!(found.created_at.expect("a time") <= SystemTime::now() + HOUR);
    assert!(!format!("{found:?}").contains("billing"), "{found:?}");

    // Everything is replaced except the secret.
    let secret = |conn: &mut _| {
        let secret = destinations.secret(conn, "acme").expect("an answer");
        secret.expect("a new destination gets a secret").written()
    };
    let before = secret(&mut conn);
    destinations.put(&mut conn, &hook("acme")).expect("put");
    let after = destinations.get(&mut conn, "acme").expect("an answer");
    let after = after.expect("it is there");
    assert_eq!((after.topics, after.filter), (vec!["*".to_owned()], None));
    assert_eq!(after.headers.len(), 0);
    assert_eq!(after.policy, DeliveryPolicy::default());
    // Without the tenant it is another registration, which gets no earlier messages.
    assert!(after.created_at > found.created_at);
    assert!(after.updated_at > found.updated_at);
    assert_eq!(secret(&mut conn).expose_secret(), before.expose_secret());
    assert_eq!(
        destinations
            .get(&mut conn, "other")
            .expect("an answer")
            .map(|one| one.name),
        None
    );
}

#[test]
fn put_is_part_of_the_callers_transaction() {
    let database = Database::new();
    let (outbox, mut conn) = (database.outbox(), database.connect());
    let undone = conn.transaction(|conn| {
        outbox.endpoints().put(conn, &hook("acme"))?;
        Err::<(), EndpointError>(diesel::result::Error::RollbackTransaction.into())
    });
    assert!(undone.is_err());
    assert_eq!(database.number("SELECT count(*) FROM {o}_endpoint"), 0);
}

#[test]
fn they_are_listed_by_pages_enabled_disabled_and_removed() {
    let database = Database::new();
    let (outbox, mut conn) = (database.outbox(), database.connect());
    let destinations = outbox.endpoints();
    let tenant = Uuid::now_v7();
    for name in ["c", "a", "b"] {
        destinations.put(&mut conn, &hook(name)).expect("put");
    }
    destinations
        .put(&mut conn, &hook("d").tenant(tenant))
        .expect("put");
    let mut names = |filter: &EndpointFilter| -> String {
        let found = destinations.list(&mut conn, filter, 3).expect("a list");
        found.into_iter().map(|one| one.name).collect()
    };
    let all = EndpointFilter::default();
    assert_eq!(names(&all), "abc");
    assert_eq!(names(&all.clone().after("b".to_owned())), "cd");
    assert_eq!(names(&all.clone().tenant_id(tenant)), "d");

    let mut conn = database.connect();
    assert!(
        destinations
            .disable(&mut conn, "b", "they asked for it")
            .expect("an answer")
    );
    assert_eq!(names(&all.clone().enabled(false)), "b");
    let found = destinations
        .get(&mut conn, "b")
        .expect("an answer")
        .expect("it is there");
    assert_eq!(found.disabled_reason.as_deref(), Some("they asked for it"));
    assert!(destinations.enable(&mut conn, "b").expect("an answer"));
    let found = destinations
        .get(&mut conn, "b")
        .expect("an answer")
        .expect("it is there");
    assert_eq!((found.enabled, found.disabled_reason), (true, None));
    assert!(destinations.remove(&mut conn, "b").expect("an answer"));
    for gone in [
        destinations.remove(&mut conn, "b"),
        destinations.enable(&mut conn, "b"),
        destinations.disable(&mut conn, "b", "why"),
    ] {
        assert!(!gone.expect("an answer"));
    }
}

#[test]
fn a_secret_is_rotated_and_the_one_before_signs_for_a_while() {
    let database = Database::new();
    let (outbox, mut conn) = (database.outbox(), database.connect());
    let destinations = outbox.endpoints();
    let stored = || {
        database
            .text("SELECT secret FROM {o}_endpoint")
            .expect("a secret")
    };
    destinations.put(&mut conn, &hook("acme")).expect("put");
    let first = stored();
    let mut rotate = || {
        let new = destinations
            .rotate(&mut conn, "acme", HOUR)
            .expect("an answer");
        new.expect("it is there")
            .written()
            .expose_secret()
            .to_owned()
    };
    let second = rotate();
    assert_eq!(stored(), format!("{second} {first}"));
    let left = "SELECT extract(epoch FROM old_secrets_until - clock_timestamp())::bigint FROM {o}_endpoint";
    assert!((3590..=3600).contains(&database.number(left)));
    let third = rotate();
    assert_eq!(
        stored(),
        format!("{third} {second} {first}"),
        "all three secrets still sign"
    );
    database.execute("UPDATE {o}_endpoint SET old_secrets_until = now() - interval '1 s'");
    let fourth = rotate();
    assert_eq!(
        stored(),
        format!("{fourth} {third}"),
        "the older secrets no longer sign"
    );
    database.execute(
        "UPDATE {o}_endpoint SET secret = replace(secret, ' ', ','), old_secrets_until = now() - interval '1 s'",
    );
    let fifth = rotate();
    assert_eq!(
        stored(),
        format!("{fifth} {fourth}"),
        "commas also separate secrets"
    );
    let none = destinations
        .rotate(&mut conn, "other", HOUR)
        .expect("an answer");
    assert!(none.is_none());
    assert!(
        destinations
            .secret(&mut conn, "other")
            .expect("an answer")
            .is_none()
    );
}

#[test]
fn an_unusable_destination_is_refused_before_anything_is_written() {
    let database = Database::new();
    let (outbox, mut conn) = (database.outbox(), database.connect());
    let one = |url: &str| Endpoint::new("acme", url);
    for (bad, key) in [
        (Endpoint::new("a b", "https://a.example"), "name"),
        (one("acme.example"), "url"),
        (one("ftp://acme.example"), "url"),
        (hook("acme").topics::<String>([]), "topics"),
        (hook("acme").topics(["order paid"]), "topics"),
        (hook("acme").header("webhook-id", "1"), "headers.webhook-id"),
        (hook("acme").header("x-a", "1\r\nx-b: 2"), "headers.x-a"),
        (
            hook("acme").configure(|hook| hook.policy.concurrency = Some(65)),
            "concurrency",
        ),
        (
            hook("acme").configure(|hook| hook.policy.timeout = Some(2 * HOUR)),
            "timeout",
        ),
        (one(" https://acme.example"), "url"),
        (
            one(&format!("https://acme.example/{}", "a".repeat(2048))),
            "url",
        ),
        (hook("acme").filter(json!({"total": 1})), "filter"),
        (
            hook("acme").filter(json!({ "a": ["a".repeat(4096)] })),
            "filter",
        ),
        (
            hook("acme").configure(|hook| hook.description = Some("a".repeat(1025))),
            "description",
        ),
        (
            hook("acme").configure(|hook| hook.description = Some("a\0b".to_owned())),
            "description",
        ),
    ] {
        let error = outbox.endpoints().put(&mut conn, &bad).expect_err(key);
        let EndpointError::Invalid(error) = error else {
            panic!("{key}: {error}");
        };
        assert!(error.key().ends_with(key), "{error}");
    }
    assert_eq!(database.number("SELECT count(*) FROM {o}_endpoint"), 0);
}

/// Anyone with SQL access may write rows. The table refuses what it can check; reading the row reports the rest.
#[test]
fn a_row_of_plain_sql_is_checked_by_the_table_and_when_it_is_read() {
    let database = Database::new();
    let insert = |columns: &str, values: &str| {
        format!(
            "INSERT INTO {{o}}_endpoint (name, url, {columns}) VALUES ('a', 'https://a.example', {values})"
        )
    };
    for (columns, values, constraint) in [
        ("topics", "'{}'", "topics_are_1_to_100_patterns"),
        ("topics", "ARRAY['a', NULL]", "topics_are_1_to_100_patterns"),
        (
            "id",
            "'00000000-0000-0000-0000-000000000000'",
            "id_is_not_zero",
        ),
        ("mode", "'soap'", "mode_is_known"),
        ("concurrency", "0", "concurrency_is_1_to_64"),
        ("timeout", "'2 h'", "timeout_is_1_ms_to_5_min"),
        ("headers", "'[]'", "headers_are_an_object"),
        (
            "description",
            "repeat('a', 1025)",
            "description_is_at_most_1_kib",
        ),
    ] {
        let refused = database.refused(&insert(columns, values));
        assert!(
            refused.contains(&format!("outbox_endpoint_{constraint}")),
            "{refused}"
        );
    }
    let refused = database.refused("INSERT INTO {o}_endpoint (name, url) VALUES ('a', 'mailto:a')");
    assert!(
        refused.contains("outbox_endpoint_url_is_http_or_https"),
        "{refused}"
    );

    let (outbox, mut conn) = (database.outbox(), database.connect());
    for (columns, values, problem) in [
        ("rate", "'fast'", "rate"),
        ("headers", "'{\"x-a\": 1}'", "headers"),
        ("headers", "'{\"host\": \"b\"}'", "headers.host"),
        ("topics", "ARRAY['a b']", "topics"),
    ] {
        database.execute("DELETE FROM {o}_endpoint");
        database.execute(&insert(columns, values));
        let found = outbox.endpoints().get(&mut conn, "a").expect("an answer");
        let found = found.expect("it is there").problem.expect(problem);
        assert!(found.contains(problem), "{found}");
    }
}

/// `put` replaces all values, so a value that `get` could not read would be lost.
#[test]
fn unreadable_values_are_not_replaced_by_an_update() {
    let database = Database::new();
    let (outbox, mut conn) = (database.outbox(), database.connect());
    let destinations = outbox.endpoints();
    let stored = || database.text("SELECT concat(rate, headers) FROM {o}_endpoint");
    for (column, value) in [("rate", "fast"), ("headers", "{\"x-a\": 1}")] {
        destinations.put(&mut conn, &hook("acme")).expect("put");
        database.execute(&format!("UPDATE {{o}}_endpoint SET {column} = '{value}'"));
        let found = destinations.get(&mut conn, "acme").expect("an answer");
        let found = found
            .expect("it is there")
            .configure(|hook| hook.description = Some("their shop".into()));
        let error = destinations.put(&mut conn, &found).expect_err(column);
        let EndpointError::Invalid(error) = error else {
            panic!("{column}: {error}");
        };
        assert_eq!(error.key(), "destinations.acme");
        assert!(error.reason().contains(column), "{error}");
        assert_eq!(stored().as_deref(), Some(value));
    }
    // Values that do not come from the row replace it.
    destinations.put(&mut conn, &hook("acme")).expect("put");
    assert_eq!(stored().as_deref(), Some(""));
}

/// An error undoes the call, and nothing else of the caller's transaction.
#[test]
fn the_callers_transaction_continues_after_an_error() {
    let database = Database::new();
    let (outbox, mut conn) = (database.outbox(), database.connect());
    let (destinations, tenant) = (outbox.endpoints(), Uuid::now_v7());
    limit(&database, 1);
    conn.transaction(|conn| {
        destinations.put(conn, &hook("a").tenant(tenant))?;
        let error = destinations.put(conn, &hook("b").tenant(tenant));
        let error = error.expect_err("too many");
        assert!(matches!(error, EndpointError::TooMany(_)), "{error:?}");
        let error = destinations.put(conn, &hook("b").filter(json!({"total": 1})));
        let error = error.expect_err("no path");
        assert!(matches!(error, EndpointError::Invalid(_)), "{error:?}");
        destinations.put(conn, &hook("c"))
    })
    .expect("committed");
    assert_eq!(
        database.text("SELECT string_agg(name, '' ORDER BY name) FROM {o}_endpoint"),
        Some("ac".to_owned())
    );
}

#[test]
fn the_commands_register_show_change_and_remove_a_destination() {
    let database = Database::new();
    let run = |arguments: &[&str]| {
        let arguments = [&["endpoint"], arguments].concat();
        finish(database.binary(&arguments))
    };
    let put = [
        "put",
        "acme",
        "https://acme.example/hooks",
        "--topic",
        "order.*",
        "--header",
        "x-key: hidden",
        "--rate",
        "10/s",
        "--timeout",
        "3s",
        "--filter",
        r#"{"total": [{"numeric": [">", 100]}]}"#,
        "--json",
    ];
    let one = run(&put).code(0).json();
    assert_eq!(one["url"], "https://acme.example/hooks");
    assert_eq!(one["topics"], json!(["order.*"]));
    assert_eq!(
        one["headers"],
        json!(["x-key"]),
        "header values are not shown"
    );
    assert_eq!(
        (&one["rate"], &one["timeout"]),
        (&json!("10/s"), &json!("3s"))
    );
    // Only the given options are changed.
    run(&["put", "acme", "--description", "their shop"]).code(0);
    let shown = run(&["show", "acme"]).code(0).stdout;
    for part in ["active", "order.*", "10/s", "3s", "their shop", "x-key"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(
        !shown.contains("hidden") && !shown.contains("whsec_"),
        "{shown}"
    );
    let secret = run(&["show", "acme", "--reveal"]).code(0).stdout;
    let new = run(&["rotate", "acme", "--keep", "1h"]).code(0).stdout;
    assert!(secret.starts_with("whsec_") && new.starts_with("whsec_") && secret != new);
    assert_eq!(run(&["show", "acme", "--reveal"]).code(0).stdout, new);
    let shown = run(&["show", "acme"]).code(0).stdout;
    assert!(shown.contains("older secrets sign until"), "{shown}");

    run(&["disable", "acme", "--reason", "they asked for it"]).code(0);
    let listed = run(&["list"]).code(0).stdout;
    assert!(
        listed.contains("disabled by an operator: they asked for it"),
        "{listed}"
    );
    run(&["enable", "acme"]).code(0);
    assert_eq!(
        run(&["list", "--failing"]).code(0).stdout,
        "no endpoint matches\n"
    );
    let listed = run(&["list", "--json", "--limit", "1"]).code(0).json();
    assert_eq!(
        (&listed[0]["name"], &listed[0]["enabled"]),
        (&json!("acme"), &json!(true))
    );
    // A change of another column keeps the value that cannot be read.
    database.execute("UPDATE {o}_endpoint SET rate = 'fast'");
    run(&["put", "acme", "--description", "a shop"]).code(0);
    let rate = database.text("SELECT rate FROM {o}_endpoint");
    assert_eq!(rate.as_deref(), Some("fast"));
    let error = run(&["put", "acme", "--max-attempts", "3"]).code(2).stderr;
    assert!(
        error.contains("rate") && error.contains("Fix the value with SQL"),
        "{error}"
    );
    database.execute("UPDATE {o}_endpoint SET rate = '5/s', url = 'http://['");
    run(&["put", "acme", "https://acme.example"]).code(0);
    run(&["remove", "acme", "--yes"]).code(0);
    assert_eq!(run(&["list"]).code(0).stdout, "no endpoint is registered\n");
    for arguments in [
        &["show", "acme"][..],
        &["enable", "acme"],
        &["disable", "acme"],
        &["rotate", "acme"],
        &["remove", "acme"],
    ] {
        let error = run(arguments).code(1).stderr;
        assert!(error.contains("no endpoint \"acme\""), "{error}");
    }
    for (arguments, flag) in [
        (&["put", "b"][..], "URL"),
        (&["put", "b", "ftp://b.example"], "diesel-outbox: URL: "),
        (
            &["put", "b c", "https://b.example"],
            "diesel-outbox: NAME: ",
        ),
        (
            &["put", "b", "https://b.example", "--topic", "a b"],
            "diesel-outbox: --topic: ",
        ),
        (
            &["put", "b", "https://b.example", "--header", "host: b"],
            "diesel-outbox: --header: host",
        ),
        (
            &["put", "b", "https://b.example", "--max-attempts", "0"],
            "diesel-outbox: --max-attempts: ",
        ),
        (
            &["put", "b", "https://b.example", "--concurrency", "65"],
            "diesel-outbox: --concurrency: ",
        ),
        (
            &["put", "b", "https://b.example", "--backoff", "soon"],
            "diesel-outbox: --backoff: ",
        ),
        (
            &["put", "b", "https://b.example", "--on-dead", "weep"],
            "diesel-outbox: --on-dead: ",
        ),
        (
            &["put", "b", "https://b.example", "--rate", "fast"],
            "--rate",
        ),
        (
            &["put", "b", "https://b.example", "--mode", "soap"],
            "--mode",
        ),
        (
            &["put", "b", "https://b.example", "--header", "secret"],
            "--header",
        ),
    ] {
        let error = run(arguments).code(2).stderr;
        assert!(
            error.contains(flag) && !error.contains("secret:"),
            "{error}"
        );
    }
}

/// R46: what ends with a destination is said before it is removed.
#[test]
fn a_removal_says_which_messages_end_and_asks() {
    let database = Database::new();
    let run = |arguments: &[&str]| finish(database.binary(&[&["endpoint"], arguments].concat()));
    run(&["put", "acme", "https://acme.example"]).code(0);
    let stderr = run(&["remove", "acme"]).code(1).stderr;
    assert!(
        stderr.contains("nothing was changed: No message waits for it.")
            && stderr.contains("give --yes"),
        "{stderr}"
    );
    for named in ["acme", "acme", "other"] {
        database.enqueue_message(
            NewMessage::new("order.paid", &json!(1))
                .expect("JSON")
                .destination(named),
        );
    }
    let stderr = run(&["remove", "acme"]).code(1).stderr;
    assert!(
        stderr.contains("2 messages wait for it. Messages that wait for it end unsent"),
        "{stderr}"
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}_endpoint"), 1);
    run(&["remove", "acme", "--yes"]).code(0);
    let mut drain = database.binary(&["drain"]);
    drain.env("OUTBOX_ENDPOINT_THREADS", "2");
    finish(drain);
    let ended = "SELECT count(*) FROM {o}_ledger WHERE reason = 'DESTINATION_REMOVED'";
    assert_eq!(database.number(ended), 2);
}

fn limit(database: &Database, most: i32) {
    let name = database.name();
    database.execute(&format!(
        "SELECT public.outbox_endpoint_limit('{name}', {most})"
    ));
}

/// R46: 100,000 rows of one tenant would be an attack.
#[test]
fn a_tenant_gets_as_many_as_the_limit_says_and_replaces_those_it_has() {
    let database = Database::new();
    let (outbox, mut conn) = (database.outbox(), database.connect());
    let conn = &mut conn;
    let destinations = outbox.endpoints();
    let (tenant, other) = (Uuid::now_v7(), Uuid::now_v7());
    limit(&database, 2);
    for one in [
        hook("a").tenant(tenant),
        hook("b").tenant(tenant),
        hook("c").tenant(other),
        hook("d"),
        hook("e"),
        hook("f"),
    ] {
        destinations.put(conn, &one).expect("put");
    }
    let one_more = destinations.put(conn, &hook("g").tenant(tenant));
    let error = one_more.expect_err("too many");
    assert!(matches!(error, EndpointError::TooMany(_)), "{error:?}");
    let expected = format!("the tenant {tenant} would have more than 2 endpoints");
    assert_eq!(error.to_string(), expected);

    // Plain SQL, in every way.
    let insert = format!(
        "INSERT INTO {{o}}_endpoint (name, url, tenant_id) VALUES ('g', 'https://a.example', '{tenant}')"
    );
    let moved =
        format!("UPDATE {{o}}_endpoint SET tenant_id = '{tenant}' WHERE name IN ('c', 'd')");
    let swapped = format!(
        "UPDATE {{o}}_endpoint SET tenant_id = CASE name WHEN 'a' THEN '{other}'::uuid ELSE '{tenant}' END WHERE name IN ('a', 'c')"
    );
    for statement in [&insert, &moved] {
        let refused = database.refused(statement);
        assert!(refused.contains(&expected), "{refused}");
    }
    database.execute(&swapped);

    // Existing rows can still be changed, even if the limit was lowered.
    limit(&database, 1);
    destinations
        .put(
            conn,
            &hook("b")
                .tenant(tenant)
                .configure(|hook| hook.description = Some("new".into())),
        )
        .expect("replaced");
    assert!(destinations.disable(conn, "b", "why").expect("disabled"));
    assert!(destinations.remove(conn, "b").expect("removed"));
    assert!(destinations.put(conn, &hook("b").tenant(tenant)).is_err());
    limit(&database, 2);
    destinations
        .put(conn, &hook("b").tenant(tenant))
        .expect("put");
    let bad = database.refused(&format!(
        "SELECT public.outbox_endpoint_limit('{}', 0)",
        database.name()
    ));
    assert!(bad.contains("1 endpoint or more"), "{bad}");
}

#[test]
fn a_tenant_gets_a_thousand_destinations_by_default() {
    let database = Database::new();
    let insert = |tenant: &str, from: i32, to: i32| {
        format!(
            "INSERT INTO {{o}}_endpoint (name, url, tenant_id)
             SELECT 'hook-' || n, 'https://a.example', {tenant} FROM generate_series({from}, {to}) n"
        )
    };
    let tenant = format!("'{}'::uuid", Uuid::now_v7());
    let refused = database.refused(&insert(&tenant, 1, 1001));
    assert!(refused.contains("more than 1000"), "{refused}");
    database.execute(&insert(&tenant, 1, 1000));
    database.execute(&insert("NULL", 1001, 3000));
    database.execute(&insert("gen_random_uuid()", 3001, 5000));
}

/// R46: flags of settings that name a value of the destination mean that value.
#[test]
fn put_takes_the_secret_and_the_policy_and_clears_values() {
    let db = Database::new();
    let run = |arguments: &[&str]| {
        let mut command = db.binary(&["endpoint"]);
        command.args(arguments);
        finish(command)
    };
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYqr";
    let tenant = uuid::Uuid::now_v7().to_string();
    let put = run(&[
        "put",
        "acme",
        "https://acme.example",
        "--secret",
        secret,
        "--mode",
        "structured",
        "--concurrency",
        "7",
        "--tenant",
        &tenant,
        "--filter",
        r#"{"a": [1]}"#,
        "--rate",
        "5/s",
        "--timeout",
        "3s",
        "--max-attempts",
        "3",
        "--backoff",
        "5s,1m",
        "--on-dead",
        "block",
        "--expires-after",
        "1day",
        "--classes",
        "404=dead 410=retry",
        "--header",
        "x-a: b",
        "--topic",
        "order.*",
        "--description",
        "Acme",
        "--json",
    ]);
    let put = put.code(0).json();
    assert_eq!(
        (&put["mode"], &put["concurrency"]),
        (&"structured".into(), &7.into())
    );
    assert_eq!(
        (&put["max_attempts"], &put["backoff"], &put["on_dead"]),
        (&json!(3), &json!("5s,1m"), &json!("block"))
    );
    let classes = json!({ "404": "dead", "410": "retry" });
    assert_eq!(
        (&put["expires_after"], &put["classes"]),
        (&json!("1day"), &classes)
    );
    let shown = run(&["show", "acme"]).code(0).stdout;
    for part in ["max attempts", "5s,1m", "404=dead 410=retry"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let shown = run(&["show", "acme", "--reveal"]).code(0).stdout;
    assert_eq!(shown.trim(), secret);
    let listed = run(&["list"]).code(0).stdout;
    assert!(listed.contains(&tenant), "{listed}");

    let mut clear = vec!["put", "acme", "--json"];
    for field in [
        "topics",
        "tenant",
        "filter",
        "headers",
        "mode",
        "concurrency",
        "rate",
        "timeout",
        "max-attempts",
        "backoff",
        "on-dead",
        "expires-after",
        "key-run",
        "classes",
        "description",
    ] {
        clear.extend(["--clear", field]);
    }
    let cleared = run(&clear).code(0).json();
    for field in [
        "tenant_id",
        "filter",
        "mode",
        "concurrency",
        "rate",
        "timeout",
        "max_attempts",
        "backoff",
        "on_dead",
        "expires_after",
        "key_run",
        "classes",
        "description",
    ] {
        assert!(cleared[field].is_null(), "{field}: {cleared}");
    }
    assert_eq!(cleared["topics"], serde_json::json!(["*"]));
    assert_eq!(cleared["headers"], serde_json::json!([]));
    // The secret stays.
    let shown = run(&["show", "acme", "--reveal"]).code(0).stdout;
    assert_eq!(shown.trim(), secret);
}

/// Users and passwords of customers' servers are no text for a terminal or a log of commands.
#[test]
fn no_command_shows_the_password_of_a_url() {
    let database = Database::new();
    let run = |arguments: &[&str]| {
        let all = [&["endpoint"], arguments].concat();
        finish(database.binary(&all)).code(0).stdout
    };
    let put = run(&["put", "acme", "https://max:pass-word@a.example/hooks?t=1"]);
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, enabled) VALUES ('bad', 'https://max:pass-word@:x', false)",
    );
    let shown = [
        put,
        run(&["list"]),
        run(&["list", "--json"]),
        run(&["show", "acme"]),
        run(&["show", "acme", "--json"]),
        run(&["show", "bad", "--json"]),
    ];
    for text in &shown {
        assert!(
            text.contains("***@") && !text.contains("pass-word"),
            "{text}"
        );
    }
    assert!(
        shown[4].contains("https://***@a.example/hooks?***"),
        "{}",
        shown[4]
    );
}
