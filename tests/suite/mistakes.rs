//! The commands as a newcomer uses them: every error names the flag, the problem and the remedy.

use serde_json::json;

use crate::support::{Database, Running, binary, finish};

/// R11: impossible values are refused by the name of the flag, before anything is done.
#[test]
fn a_number_beyond_its_limits_is_refused_with_them() {
    let limit = "not a whole number from 1 to 4294967295";
    for (command, flag, value, why) in [
        ("keys", "--limit", "0", limit),
        ("keys show k", "--limit", "0", limit),
        ("dead list", "--limit", "0", limit),
        ("dead list", "--limit", "-1", limit),
        ("dead groups", "--limit", "many", limit),
        ("message list", "--limit", "4294967296", limit),
        ("drain", "--max-messages", "x", "not a whole number from 0"),
        (
            "dead requeue",
            "",
            "one",
            "not an id: `diesel-outbox dead list`",
        ),
        ("status", "--watch", "soon", "not a number of seconds"),
        (
            "run",
            "--batch",
            "-1",
            "\"-1\" is not a whole number from 1 to 10000",
        ),
    ] {
        let given = match flag {
            "" => value.to_owned(),
            flag => format!("{flag}={value}"),
        };
        let arguments: Vec<&str> = command.split(' ').chain([given.as_str()]).collect();
        let refused = finish(binary(&arguments)).code(2).stderr;
        assert!(
            refused.contains(flag) && refused.contains(why),
            "{arguments:?}: {refused}"
        );
    }
    // A negative number is taken as the flag's value.
    let refused = finish(binary(&["run", "--batch", "-1"])).code(2).stderr;
    assert!(
        refused.contains("--batch (OUTBOX_BATCH): \"-1\""),
        "{refused}"
    );
}

/// R11: no error is a library's raw text, and none lacks the name of the flag.
#[test]
fn a_value_that_cannot_be_read_is_refused_by_its_flag() {
    let database = Database::new();
    for (command, why) in [
        (
            "dead list --before here",
            "--before: \"here\" is not a place: copy the place from the line \"more: --before",
        ),
        (
            "message list --after here",
            "--after: \"here\" is not a place",
        ),
        (
            "message list --status sent",
            "--status: \"sent\" is not pending, sending or retrying",
        ),
        ("message list --status dead", "see `dead list`"),
        ("message list --tenant me", "--tenant: \"me\" is not a UUID"),
        ("dead show letter", "dead show: \"letter\" is not an id"),
        (
            "replay x --run a_b",
            "--run: \"a_b\" is not a run name: give 1 to 22",
        ),
        (
            "message reschedule 7 --in 5",
            "--in: \"5\" is not a duration such as 500ms or 2h: the unit is missing",
        ),
        (
            "run --lease soon",
            "\"soon\" is not a duration such as 500ms or 2h",
        ),
        (
            "run --backoff soon",
            "\"soon\" is not a duration such as 5s (write exponential(5s, 1h)",
        ),
        (
            "run --proxy foo",
            "a URL that starts with http:// or https://",
        ),
        (
            "run --table a.b.c",
            "\"a.b.c\" is not a valid outbox name: only",
        ),
    ] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let refused = finish(database.binary(&arguments)).code(2).stderr;
        let reason = refused.lines().last().unwrap_or_default();
        assert!(
            reason.contains(why) && reason.starts_with("diesel-outbox: "),
            "{command}: {refused}"
        );
        for library in ["expected number", "unit needed", "without a base"] {
            assert!(!refused.contains(library), "{command}: {refused}");
        }
    }
    for arguments in [
        ["dead", "requeue", "--topic", ""].as_slice(),
        &["message", "settle", "7", "--never", "--why", ""],
    ] {
        let refused = finish(database.binary(arguments)).code(2).stderr;
        assert!(refused.contains("a value is required for"), "{refused}");
    }
}

/// R25, R11: a filter without matches says so instead of looking like success.
#[test]
fn a_filter_that_matches_nothing_says_so() {
    let database = Database::new();
    for (command, said) in [
        ("dead list", "no dead letters\n"),
        ("dead list --topic ordr", "no dead letter matches\n"),
        ("dead list 7", "no dead letter matches\n"),
        ("dead groups", "no dead letters\n"),
        (
            "dead groups --destination nobody",
            "no dead letter matches\n",
        ),
        (
            "dead requeue --destination nobody",
            "requeued 0 dead letters: none matches\n",
        ),
        (
            "dead discard --reason DNS",
            "discarded 0 dead letters: none matches\n",
        ),
        (
            "replay --since 2h --topic ordr",
            "replayed 0: no delivered message in the ledger matches\n",
        ),
    ] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let text = finish(database.binary(&arguments)).code(0).stdout;
        assert_eq!(text, said, "{command}");
    }
    for command in ["message cancel nobody", "message show nobody"] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let error = finish(database.binary(&arguments)).code(1).stderr;
        let said = format!(
            "no message with the id, key or sequence \"nobody\" in the outbox \"{}\"",
            database.name()
        );
        assert!(error.contains(&said), "{command}: {error}");
    }
}

/// R11: the error names the missing right and where to get it.
#[test]
fn a_role_without_rights_learns_which_command_prints_them() {
    let database = Database::new();
    let role = format!("{}_nobody", database.schema());
    database.execute(&format!("CREATE ROLE {role} LOGIN"));
    let mut url = url::Url::parse(&database.url).expect("a URL");
    url.set_username(&role).expect("a user");
    // The outbox seems missing: its schema is not in the search path without the USAGE right.
    let no_outbox = "the role needs USAGE on that schema";
    let options = format!("options=-csearch_path%3D{}", database.schema());
    url.set_query(Some(&options));
    let of_schema = format!("permission denied for schema {}", database.schema());
    let whole = format!("{}.{}", database.schema(), "outbox");
    for (arguments, said) in [
        (["status", "--table", "outbox"].as_slice(), no_outbox),
        (&["status", "--table", &whole], &of_schema),
        (&["status", "--table", &whole], "needs USAGE on this schema"),
        (&["check", "--table", &whole], "needs USAGE on this schema"),
    ] {
        let mut command = database.binary(arguments);
        command.env("DATABASE_URL", url.as_str());
        let finished = finish(command).code(1);
        let text = finished.stdout + &finished.stderr;
        assert!(text.contains(said), "{arguments:?}: {text}");
    }
    url.set_query(None);
    database.execute(&format!(
        "GRANT USAGE ON SCHEMA {} TO {role}",
        database.schema()
    ));
    for (command, said) in [
        ("status", "permission denied for table"),
        ("dead list", "permission denied for table"),
        (
            "leases",
            "`diesel-outbox migrate --print --roles` prints the rights",
        ),
        (
            "pause list",
            "`diesel-outbox check` the rights that a relay lacks",
        ),
    ] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let mut command = database.binary(&arguments);
        command.env("DATABASE_URL", url.as_str());
        let error = finish(command).code(1).stderr;
        assert!(error.contains(said), "{arguments:?}: {error}");
    }
    database.execute(&format!("DROP OWNED BY {role}"));
    database.execute(&format!("DROP ROLE {role}"));
}

/// R24, R11
#[test]
fn the_admin_page_without_an_outbox_says_what_makes_one() {
    let database = Database::new();
    let nowhere = format!("{}_nowhere", database.name());
    let page = Running::start(database.binary(&[
        "admin",
        "--admin-addr",
        "127.0.0.1:0",
        "--table",
        &nowhere,
    ]));
    page.wait_for_log("admin_look_failed");
    let log = page.log();
    assert!(
        log.contains("there is no outbox") && log.contains("`diesel-outbox migrate`"),
        "{log}"
    );
}

/// R32, R11: a wait that only an operator can end is a warning; a wait that ends by itself is not.
#[test]
fn check_reports_keys_that_wait() {
    let database = Database::new();
    let check = || {
        let command = database.binary(&["check", "--json", "--url", "http://127.0.0.1:9/"]);
        let findings = finish(command).json()["findings"].clone();
        let all = findings.as_array().expect("findings").clone();
        all.into_iter()
            .filter(|one| one["what"] == "keys")
            .collect::<Vec<_>>()
    };
    assert!(check().is_empty());
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, attempts, available_at, last_error_code)
         VALUES ('t', '1', 'slow', 1, now() + interval '1 hour', 'TIMEOUT'),
                ('t', '2', 'slow', 0, now(), NULL), ('t', '3', 'held', 0, now(), NULL)",
    );
    database.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, ordering_key,
            idempotency_key, available_at, created_at, attempts, reason, blocks_key)
         VALUES (-7, gen_random_uuid(), 't', '', '1', 'held', 'd', now(), now(), 3, 'REJECTED', true)",
    );
    let found = check();
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(found[0]["level"], json!("warning"));
    assert_eq!(
        found[0]["detail"],
        json!("1 ordering key is blocked by a dead letter, for example \"held\" by -7 (REJECTED)")
    );
    let advice = found[0]["advice"].as_str().expect("an advice");
    assert!(advice.contains("diesel-outbox dead requeue -7"), "{advice}");
    assert_eq!(found[1]["level"], json!("ok"));
    let detail = found[1]["detail"].as_str().expect("a sentence");
    assert!(
        detail.contains("a retry or a delayed message, for example \"slow\""),
        "{detail}"
    );
}
