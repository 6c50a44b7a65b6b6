//! Replays: delivered messages are delivered again.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use diesel_outbox::NewMessage;
use diesel_outbox::admin::{self, Bulk, Note, ReplayIds, ReplayRun, Selection};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::{Database, Receiver, finish};

/// Delivers the due messages. With `keep`, the ledger keeps payloads.
fn drain(db: &Database, receiver: &Receiver, keep: bool) {
    let mut command = db.binary(&["drain", "--quiet"]);
    command
        .env("OUTBOX_URL", receiver.url())
        .env("OUTBOX_LEDGER_PAYLOAD", keep.to_string());
    finish(command).code(0);
}

fn alice() -> Note {
    Note::new("alice", "")
}

fn replay(db: &Database, arguments: &[&str]) -> Value {
    let arguments = [&["replay", "--json", "--yes"], arguments].concat();
    finish(db.binary(&arguments)).code(0).json()
}

/// Messages that a receiver has lost are delivered again, with the same ids and in the order of their deliveries.
/// Each message is replayed once, however often the run is repeated.
#[test]
fn delivered_messages_are_delivered_again_with_their_ids() {
    let db = Database::new();
    let receiver = Receiver::ok();
    for n in 0..5 {
        let topic = if n < 3 { "order.paid" } else { "order.sent" };
        db.enqueue_message(
            NewMessage::new(topic, &json!({ "n": n }))
                .expect("a message")
                .ordering_key("k")
                .idempotency_key(format!("key-{n}")),
        );
    }
    drain(&db, &receiver, true);
    let first: Vec<(String, Value)> = receiver
        .requests()
        .iter()
        .map(|r| (r.id(), r.json()))
        .collect();
    assert_eq!(first.len(), 5);

    let dry = replay(&db, &["--since", "1h", "--dry-run"]);
    assert_eq!((&dry["matched"], &dry["replayed"]), (&json!(5), &json!(0)));
    let done = replay(
        &db,
        &[
            "--since",
            "1h",
            "--topic",
            "order.paid",
            "--run",
            "first-run",
        ],
    );
    assert_eq!(done["replayed"], json!(3), "{done}");
    assert_eq!(done["run"], json!("first-run"));
    drain(&db, &receiver, true);
    let again: Vec<(String, Value)> = receiver.requests()[5..]
        .iter()
        .map(|r| (r.id(), r.json()))
        .collect();
    assert_eq!(again, first[..3]);
    assert_eq!(
        receiver.requests()[5].header("idempotency-key"),
        Some("\"key-0\""),
        "a replay is the same message"
    );
    // The same run has nothing more to do; the first deliveries and its own are skipped.
    let same = replay(
        &db,
        &[
            "--since",
            "1h",
            "--topic",
            "order.paid",
            "--run",
            "first-run",
        ],
    );
    assert_eq!(same["replayed"], json!(0), "{same}");
    assert_eq!(same["skipped"], json!(6), "{same}");
    // Another run replays each message once, though the ledger has it twice.
    let other = replay(&db, &["--since", "1h", "--topic", "order.paid"]);
    assert_eq!(other["replayed"], json!(3), "{other}");
    let nested = db.number("SELECT count(*) FROM {o} WHERE idempotency_key LIKE '%replay%replay%'");
    assert_eq!(nested, 0);
    // So a dry run counts it once, and a new run has nothing of its own to skip.
    drain(&db, &receiver, true);
    let counted = replay(&db, &["--since", "1h", "--dry-run"]);
    assert_eq!(counted["matched"], json!(5), "{counted}");
    let said = finish(db.binary(&["replay", "--since", "1h", "--yes"])).code(0);
    assert!(said.stdout.contains("replayed 5 "), "{}", said.stdout);
    assert!(!said.stdout.contains("already"), "{}", said.stdout);
}

#[test]
fn new_ids_and_single_messages() {
    let db = Database::new();
    let receiver = Receiver::ok();
    db.enqueue_many(3);
    drain(&db, &receiver, true);
    let id = receiver.requests()[1].id();
    let done = replay(&db, &[&id, "--new-ids"]);
    assert_eq!(done["replayed"], json!(1), "{done}");
    drain(&db, &receiver, true);
    let requests = receiver.requests();
    assert_eq!(requests.len(), 4);
    assert_ne!(requests[3].id(), id);
    assert_eq!(requests[3].json(), requests[1].json());
    let ids: HashSet<String> = receiver.ids();
    assert_eq!(ids.len(), 4);
}

/// R36.
#[test]
fn a_replay_may_be_of_one_tenant() {
    let db = Database::new();
    let receiver = Receiver::ok();
    let tenant = Uuid::now_v7();
    for (n, of) in [(0, None), (1, Some(tenant)), (2, Some(Uuid::now_v7()))] {
        let message = NewMessage::new("order.paid", &json!({ "n": n })).expect("a message");
        db.enqueue_message(match of {
            Some(tenant) => message.tenant_id(tenant),
            None => message,
        });
    }
    drain(&db, &receiver, true);
    let done = replay(&db, &["--since", "1h", "--tenant", &tenant.to_string()]);
    assert_eq!(done["replayed"], json!(1), "{done}");
    let replayed = db.text("SELECT (payload ->> 'n') || ' ' || tenant_id FROM {o}");
    assert_eq!(replayed, Some(format!("1 {tenant}")));
    let entry = db.text("SELECT tenant_id FROM {o}_attempt WHERE event = 'replayed'");
    assert_eq!(entry, Some(tenant.to_string()));
    let bad = ["replay", "--since", "1h", "--tenant", "acme"];
    finish(db.binary(&bad)).code(2);
}

/// A message with several destinations is replayed only for the chosen ones.
#[test]
fn a_replay_goes_to_the_destination_of_its_row_only() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o}_ledger (part, idempotency_key, destination, named_destination, sequence, message_id, topic, digest,
            status, attempts, created_at, payload, ordering_key)
         SELECT 0, 'k', d, d, 1, gen_random_uuid(), 't', '\\x01', status, 1, now(), '{\"a\": 1}', 'o'
           FROM (VALUES ('a', 'delivered'), ('b', 'delivered'), ('c', 'dead')) AS v (d, status)",
    );
    let done = replay(&db, &["--since", "1h", "--destination", "b"]);
    assert_eq!(done["replayed"], json!(1), "{done}");
    let row = db.text(
        "SELECT destination || topic || payload || ordering_key || (headers IS NULL) || attempts FROM {o}",
    );
    assert_eq!(row.as_deref(), Some("bt{\"a\": 1}otrue0"));
    assert_eq!(replay(&db, &["k"])["replayed"], json!(2));
}

/// With `--destination`, a message goes to its old destination again, even if the routes have changed meanwhile.
#[test]
fn a_replay_for_a_destination_names_it() {
    let db = Database::new();
    let receiver = Receiver::ok();
    db.enqueue_many(1);
    drain(&db, &receiver, true);
    let used = db.text("SELECT named_destination || '>' || destination FROM {o}_ledger");
    assert_eq!(used.as_deref(), Some(">default"));
    for (flags, named) in [
        (&["--since", "1h"] as &[&str], ""),
        (&["--since", "1h", "--destination", ""], ""),
        (&["--since", "1h", "--destination", "default"], "default"),
    ] {
        let done = replay(&db, flags);
        assert_eq!(done["replayed"], json!(1), "{done}");
        let destination = db.text("SELECT destination FROM {o}");
        assert_eq!(destination.as_deref(), Some(named), "{flags:?}");
        let again = [flags, &["--run", done["run"].as_str().expect("a name")]].concat();
        assert_eq!(
            replay(&db, &again)["replayed"],
            json!(0),
            "while the replay waits"
        );
        drain(&db, &receiver, true);
        assert_eq!(
            replay(&db, &again)["replayed"],
            json!(0),
            "after the delivery"
        );
    }
    assert_eq!(receiver.count(), 4);
}

#[test]
fn messages_without_a_payload_are_reported() {
    let db = Database::new();
    let receiver = Receiver::ok();
    db.enqueue_many(2);
    drain(&db, &receiver, false);
    db.enqueue_many(1);
    drain(&db, &receiver, true);
    let text = finish(db.binary(&["replay", "--since", "1h", "--yes"])).code(0);
    assert!(
        text.stdout
            .contains("2 delivered messages cannot be replayed"),
        "{}",
        text.stdout
    );
    assert!(
        text.stdout.contains("replayed 1 in the run "),
        "{}",
        text.stdout
    );
}

#[test]
fn it_asks_first_and_refuses_without_a_terminal() {
    let db = Database::new();
    let receiver = Receiver::ok();
    db.enqueue_many(1);
    drain(&db, &receiver, true);
    let refused = finish(db.binary(&["replay", "--since", "1h"])).code(1);
    assert!(refused.stderr.contains("--yes"), "{}", refused.stderr);
    assert_eq!(db.number("SELECT count(*) FROM {o}"), 0);
    for bad in [
        ["replay", "--yes"].as_slice(),
        &["replay", "--since", "yesterday"],
        &["replay", "--since", "1h", "--until", "2h"],
        &["replay", "--since", "1h", "--run", "two words"],
    ] {
        finish(db.binary(bad)).code(2);
    }
    let unknown = finish(db.binary(&["replay", "nobody", "--yes"])).code(1);
    assert!(unknown.stderr.contains("nobody"), "{}", unknown.stderr);
}

/// Thousands of messages are replayed in batches and in order; a stopped run can be continued.
#[test]
fn a_stopped_run_continues_in_order_and_doubles_nothing() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o}_ledger (part, idempotency_key, destination, sequence, message_id, topic, digest,
            status, attempts, created_at, payload, settled_at)
         SELECT 0, CASE WHEN g % 7 = 0 THEN repeat('é', 120) || g ELSE 'k' || g END, '', g,
                gen_random_uuid(), 't', '\\x01', 'delivered', 1, now(), to_json(g),
                now() - interval '9 days' + (g / 100) * interval '1 hour'
           FROM generate_series(1, 3500) g",
    );
    let mut conn = db.connect();
    let run: ReplayRun = "r".parse().expect("a name");
    let (filter, name, alice) = (Selection::default(), db.outbox_name(), alice());
    let mut replay = |bulk: Bulk<'_>| {
        let same = ReplayIds::Same;
        admin::replay(&mut conn, &name, &filter, same, &run, bulk).expect("replayed")
    };
    assert_eq!(replay(Bulk::new(&alice).dry_run()).changed, 3500);
    let mut batches = 0;
    let stopped = replay(Bulk::new(&alice).progress(|_| {
        batches += 1;
        batches < 5
    }));
    assert!((1..3500).contains(&stopped.changed), "{stopped:?}");
    let rest = replay(Bulk::new(&alice));
    assert_eq!(rest.skipped, stopped.changed);
    assert_eq!(stopped.changed + rest.changed, 3500);
    let out_of_order = db.number(
        "SELECT count(*) FROM (SELECT payload::text::int - lag(payload::text::int) OVER (ORDER BY sequence)
            AS step FROM {o}) s WHERE step <> 1",
    );
    assert_eq!(out_of_order, 0);
}

/// A run that failed at its first statement still gets a name, and its error quotes absolute times.
#[test]
fn a_run_that_fails_says_how_to_continue() {
    let db = Database::new();
    let receiver = Receiver::ok();
    db.enqueue_many(2);
    drain(&db, &receiver, true);
    let schema = db.schema().to_owned();
    db.execute(&format!(
        "CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'not now'; END $$"
    ));
    db.execute(&format!(
        "CREATE TRIGGER refuse BEFORE INSERT ON {{o}} FOR EACH ROW EXECUTE FUNCTION {schema}.refuse()"
    ));
    let arguments = ["replay", "--since", "1h", "--yes"];
    let failed = finish(db.binary(&arguments)).code(1);
    let (_, flags) = failed
        .stderr
        .split_once("repeat the command with --run ")
        .unwrap_or_else(|| panic!("{}", failed.stderr));
    let mut flags = flags.split_whitespace();
    let (run, from, since) = (flags.next(), flags.next(), flags.next());
    assert_eq!(from, Some("--since"), "{}", failed.stderr);
    db.execute("DROP TRIGGER refuse ON {o}");
    let (run, since) = (run.expect("a name"), since.expect("a time"));
    let done = replay(&db, &["--since", since, "--run", run]);
    assert_eq!((&done["run"], &done["replayed"]), (&run.into(), &2.into()));
}

#[test]
fn times_bound_what_is_replayed() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o}_ledger (part, idempotency_key, destination, sequence, message_id, topic, digest,
            status, attempts, created_at, payload, settled_at)
         SELECT 0, 'k' || g, '', g, gen_random_uuid(), 't', '\\x01', 'delivered', 1, now(), '1',
                now() - g * interval '1 hour'
           FROM generate_series(1, 10) g",
    );
    let ago = |hours: f64| SystemTime::now().checked_sub(Duration::from_secs_f64(hours * 3600.0));
    let filter = Selection::default().since(ago(5.5)).until(ago(2.5));
    let (mut conn, alice) = (db.connect(), alice());
    for bulk in [Bulk::new(&alice).dry_run(), Bulk::new(&alice)] {
        let (ids, run) = (ReplayIds::New, ReplayRun::now());
        let done = admin::replay(&mut conn, &db.outbox_name(), &filter, ids, &run, bulk);
        assert_eq!(done.expect("replayed").changed, 3);
    }
    let oldest = db
        .text("SELECT min(idempotency_key) FROM {o}")
        .expect("one");
    assert!(oldest.starts_with("k3#replay-2"), "{oldest}");
}

/// At a terminal the command asks, and follows the answer.
#[test]
fn at_a_terminal_it_asks() {
    let db = Database::new();
    let receiver = Receiver::ok();
    db.enqueue_many(2);
    drain(&db, &receiver, true);
    for (answer, code, live) in [("n", 1, 0), ("y", 0, 2)] {
        let binary = db.binary(&[]);
        let mut command = std::process::Command::new("sh");
        let asked = "(sleep 1; echo $ANSWER; sleep 1) | script -qefc '\"$BIN\" replay --since 1h' /dev/null";
        command.args(["-c", asked]);
        for (name, value) in binary.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
            .env("BIN", binary.get_program())
            .env("ANSWER", answer);
        let finished = finish(command).code(code);
        let question = "replay 2 messages of the outbox ";
        assert!(finished.stdout.contains(question), "{}", finished.stdout);
        assert_eq!(db.number("SELECT count(*) FROM {o}"), live);
    }
}

/// R39: a replay has the id of the delivered message, and a sequence of its own.
#[test]
fn a_replay_that_waits_is_cancelled_by_its_sequence() {
    let db = Database::new();
    let receiver = Receiver::ok();
    db.enqueue_many(1);
    drain(&db, &receiver, true);
    replay(&db, &["--since", "1h"]);
    let sequence = db.number("SELECT sequence FROM {o}").to_string();
    let cancelled = finish(db.binary(&["message", "cancel", &sequence])).code(0);
    let told = format!("{sequence}: cancelled\n");
    assert_eq!(cancelled.stdout, told);
    assert_eq!(db.number("SELECT count(*) FROM {o}"), 0);
}
