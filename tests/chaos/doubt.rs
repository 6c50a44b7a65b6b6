//! A lost answer, a restart of PostgreSQL or a lock, while messages are in flight that take long: only the messages
//! that it concerns wait.

use std::process::Command;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::RunQueryDsl;
use diesel::sql_types::Integer;
use diesel::{Connection, PgConnection, select};
use diesel_outbox::config::Rate;
use diesel_outbox::{Destination, NewMessage, ProblemKind, Relay, RelayBuilder, RelayHandle};
use serde_json::json;

use crate::ground::{Server, alone};
use crate::lost_answers::{CLAIM, Proxy};
use crate::support::{Database, Gate, Receiver, end, eventually};

/// The promise is 2 s beside the time that the server was away. The rest is for a busy machine.
const SOON: Duration = Duration::from_secs(6);
/// Longer than a test waits for anything.
const LONG: Duration = Duration::from_secs(120);

/// A relay with a destination `slow`, for messages that take long, and a destination `quick`.
fn relay(database: &Database, url: &str, slow: Destination, quick: &Receiver) -> RelayHandle {
    let relay = builder(database, url, slow, quick);
    relay.start().expect("a relay")
}

fn builder(database: &Database, url: &str, slow: Destination, quick: &Receiver) -> RelayBuilder {
    let quick = Destination::new("quick", &quick.url()).expect("a URL");
    Relay::builder(url)
        .outbox(&database.name())
        .lease(Duration::from_secs(60))
        .send_timeout(LONG)
        .destination(slow)
        .destination(quick)
        .route("slow.*", "slow")
        .route("quick.*", "quick")
}

/// A destination with this rate.
fn limited(receiver: &Receiver, a_second: f64) -> Destination {
    let mut slow = Destination::new("slow", &receiver.url()).expect("a URL");
    slow.policy.rate = Some(Rate::per_second(a_second));
    slow
}

fn enqueue(database: &Database, topic: &str, count: usize) {
    for n in 0..count {
        database.enqueue(topic, json!({ "n": n }));
    }
}

/// Enqueues messages of other topics, which arrive soon.
#[track_caller]
fn others_flow(database: &Database, quick: &Receiver) {
    let before = quick.count();
    let began = Instant::now();
    enqueue(database, "quick.paid", 10);
    eventually("other messages arrive", || quick.count() >= before + 10);
    let took = began.elapsed();
    assert!(took < SOON, "other messages arrived after {took:?}");
}

/// The messages that are claimed and not in the hands of the relay are given back: all that is left is `known`.
#[track_caller]
fn is_resolved(database: &Database, relay: &RelayHandle, known: i64) {
    eventually("nothing is in doubt", || {
        let health = relay.health();
        let mut problems = health.problems().iter();
        !problems.any(|one| one.kind == ProblemKind::ClaimInDoubt)
    });
    let claimed = || database.number("SELECT count(*) FROM {o} WHERE locked_by IS NOT NULL");
    eventually(
        &format!("the lease holds {known}, as the relay, not {}", claimed()),
        || claimed() == known,
    );
}

/// A relay with a message whose receiver hangs, and a receiver for other messages.
fn hanging(database: &Database, url: &str) -> (RelayHandle, Receiver, (Receiver, Gate)) {
    let (hanging, gate) = Receiver::held();
    let quick = Receiver::ok();
    let slow = Destination::new("slow", &hanging.url()).expect("a URL");
    let relay = relay(database, url, slow, &quick);
    enqueue(database, "slow.paid", 1);
    hanging.wait_for(1);
    (relay, quick, (hanging, gate))
}

/// R65
#[test]
fn a_restart_holds_up_no_message_of_others_while_a_rate_limit_holds_claimed_messages() {
    let _alone = alone();
    let (database, server) = (Database::new(), Server::new());
    let (slow, quick) = (Receiver::ok(), Receiver::ok());
    let relay = relay(&database, &database.url, limited(&slow, 1.0 / 60.0), &quick);
    let held = 9;
    enqueue(&database, "slow.paid", 1 + held);
    slow.wait_for(1);
    let held = i64::try_from(held).expect("few");
    eventually("messages wait for the rate limit", || {
        database.count("sending") == held && database.count("delivered") == 1
    });
    for mode in ["fast", "immediate"] {
        server.restart(mode);
        others_flow(&database, &quick);
    }
    assert!(relay.health().is_live(), "{}", relay.health());
    is_resolved(&database, &relay, held);
    end(&relay);
    assert_eq!(slow.count(), 1);
}

/// R65
#[test]
fn a_restart_holds_up_no_message_of_others_while_a_receiver_hangs() {
    let _alone = alone();
    let (database, server) = (Database::new(), Server::new());
    let (relay, quick, (hanging, gate)) = hanging(&database, &database.url);
    server.restart("fast");
    others_flow(&database, &quick);
    is_resolved(&database, &relay, 1);
    drop(gate);
    eventually("the message is recorded as delivered", || {
        database.count("delivered") == 11
    });
    end(&relay);
    assert_eq!(hanging.count(), 1, "the message is not sent again");
}

/// R65
#[test]
fn the_end_of_the_claimers_session_holds_up_no_message_of_others_while_a_receiver_hangs() {
    let _alone = alone();
    let database = Database::new();
    let (relay, quick, (hanging, gate)) = hanging(&database, &database.url);
    for _ in 0..5 {
        let ended = database.number(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
              WHERE application_name = 'diesel-outbox claimer'",
        );
        assert_eq!(ended, 1);
        others_flow(&database, &quick);
        eventually("the relay is ready", || relay.health().is_ready());
    }
    is_resolved(&database, &relay, 1);
    drop(gate);
    end(&relay);
    assert_eq!(hanging.count(), 1, "the message is not sent again");
}

/// R65: a person looks at a message whose send has just ended, and another claim has no answer.
#[test]
fn a_lost_answer_holds_up_no_message_of_others_while_a_person_has_locked_one() {
    let _alone = alone();
    let database = Database::new();
    let proxy = Proxy::new(&database);
    let (relay, quick, (hanging, gate)) = hanging(&database, &proxy.url(&database));
    let mut person = database.connect();
    let lock = format!("BEGIN; SELECT FROM {} FOR UPDATE", database.name());
    person.batch_execute(&lock).expect("locked");
    gate.open();
    eventually("the settle waits for the person", || {
        database.number("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0
    });
    proxy.lose_the_answer_to(CLAIM);
    others_flow(&database, &quick);
    assert_eq!(proxy.lost(), 1);
    others_flow(&database, &quick);
    is_resolved(&database, &relay, 1);
    person.batch_execute("ROLLBACK").expect("unlocked");
    eventually("all are settled", || database.count("delivered") == 21);
    end(&relay);
    assert_eq!(hanging.count(), 1, "the message is not sent again");
    assert_eq!(quick.ids().len(), quick.count(), "none is sent twice");
}

/// R65: what the lost claim has taken is found and sent again soon, also while a person has locked a part of it.
#[test]
fn the_messages_of_a_lost_claim_are_found_while_others_are_in_flight() {
    let _alone = alone();
    let database = Database::new();
    let proxy = Proxy::new(&database);
    let (relay, quick, (_hanging, gate)) = hanging(&database, &proxy.url(&database));
    proxy.lose_the_answer_to(CLAIM);
    database.enqueue_message(
        NewMessage::new("quick.paid", &json!(1))
            .expect("JSON")
            .ordering_key("k"),
    );
    enqueue(&database, "quick.paid", 20);
    eventually("an answer is lost", || proxy.lost() == 1);
    let began = Instant::now();
    quick.wait_for(21);
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    eventually("all are settled", || database.count("delivered") == 21);
    is_resolved(&database, &relay, 1);
    assert_eq!(quick.count(), 21, "none is sent twice");
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE attempts > 1"),
        0
    );
    drop(gate);
    end(&relay);
}

/// The server answers to a statement in memory, and writes it to its disk ten seconds later.
struct WritesLate<'a>(&'a Database);

impl<'a> WritesLate<'a> {
    fn new(database: &'a Database) -> Self {
        Self::set(database, "SET wal_writer_delay = '10s'");
        Self(database)
    }

    fn set(database: &Database, what: &str) {
        database.execute(&format!("ALTER SYSTEM {what}"));
        database.execute("SELECT pg_reload_conf()");
    }
}

impl Drop for WritesLate<'_> {
    fn drop(&mut self) {
        Self::set(self.0, "RESET wal_writer_delay");
    }
}

/// R65: after a crash of one of its processes, the server loses what it had only answered, and it has not started anew: a
/// relay that looks at the start of the server sees nothing.
#[test]
fn settles_that_a_crash_of_one_server_process_has_lost_are_missed() {
    let _alone = alone();
    for shares in [false, true] {
        // Other work of the server may have written the results to its disk before the crash: then nothing is lost.
        let lost = (0..10).find(|_| misses_what_a_crash_has_lost(shares));
        assert!(lost.is_some(), "no crash has lost anything");
    }
}

/// `false`: the crash has lost nothing.
fn misses_what_a_crash_has_lost(share_connection: bool) -> bool {
    let database = Database::new();
    let url = format!("{}?options=-csynchronous_commit%3Doff", database.url);
    let (receiver, gate) = Receiver::held();
    let slow = Destination::new("slow", &receiver.url()).expect("a URL");
    let relay = builder(&database, &url, slow, &Receiver::ok())
        .configure(|config| config.share_connection = share_connection)
        .start()
        .expect("a relay");
    enqueue(&database, "slow.paid", 8);
    receiver.wait_for(8);
    let _late = WritesLate::new(&database);
    database.execute("CHECKPOINT");
    let started = database.text("SELECT pg_postmaster_start_time()::text");
    gate.open();
    eventually("all are settled", || database.count("delivered") == 8);
    // A claim without an answer would be a doubt of its own.
    eventually("nothing is claimed any more", || database.is_relay_asleep());
    let mut other = database.connect();
    let process = select(sql::<Integer>(
        "(SELECT pid FROM pg_stat_activity
           WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() LIMIT 1)",
    ));
    let process: i32 = process.get_result(&mut other).expect("another session");
    let killed = Command::new("kill")
        .args(["-9", &process.to_string()])
        .status();
    assert!(killed.expect("kill runs").success());
    // Until the server notices, it accepts connections.
    eventually("the crash ends other sessions", || {
        other.batch_execute("SELECT").is_err()
    });
    eventually("the server is there again", || {
        PgConnection::establish(&database.url).is_ok()
    });
    eventually(
        &format!("lost settles are made again, with one connection: {share_connection}"),
        || database.count("delivered") == 8,
    );
    is_resolved(&database, &relay, 0);
    assert_eq!(
        database.text("SELECT pg_postmaster_start_time()::text"),
        started
    );
    end(&relay);
    receiver.count() > 8
}
