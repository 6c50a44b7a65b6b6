//! `run --databases`: the outboxes of many databases in one process.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use diesel::Connection;
use diesel_outbox::{NewMessage, Outbox};
use serde_json::json;

use crate::fresh::FreshDatabase;
use crate::support::{Database, Receiver, Running, binary, end, eventually, finish};

/// A database with an outbox.
fn database() -> FreshDatabase {
    let database = FreshDatabase::new();
    diesel_outbox::migrate(&mut database.connect(), Outbox::default().name()).expect("migrated");
    database
}

/// Enqueues so many messages, of ten ordering keys.
fn enqueue(database: &FreshDatabase, count: i64) {
    let message = |number| {
        let message = NewMessage::new("t", &json!({ "in": database.name, "number": number }));
        message
            .expect("JSON")
            .ordering_key(format!("k{}", number % 10))
    };
    let mut conn = database.connect();
    conn.transaction(|conn| Outbox::default().enqueue_batch(conn, (0..count).map(message)))
        .expect("enqueued");
}

fn delivered(database: &FreshDatabase) -> i64 {
    database.number("SELECT count(*) FROM outbox_messages WHERE status = 'delivered'")
}

/// A file that names databases, removed when dropped.
pub(crate) struct File(PathBuf);

impl File {
    pub(crate) fn of(databases: &[(&str, &str)]) -> Self {
        let name = format!("databases-{}.toml", uuid::Uuid::now_v7().simple());
        let file = Self(std::env::temp_dir().join(name));
        file.write(databases);
        file
    }

    fn write(&self, databases: &[(&str, &str)]) {
        let mut text = String::new();
        for (name, url) in databases {
            writeln!(text, "{name:?} = {url:?}").expect("a line");
        }
        std::fs::write(&self.0, text).expect("a file");
    }

    pub(crate) fn run(&self, receiver: &Receiver, arguments: &[&str]) -> Command {
        let mut command = binary(&["run", "--databases"]);
        command.arg(&self.0).args(arguments);
        command
            .env("OUTBOX_URL", receiver.url())
            .env("OUTBOX_LEASE", "3s")
            .env("OUTBOX_SHUTDOWN_TIMEOUT", "3s")
            .env("OUTBOX_SEND_TIMEOUT", "1s");
        command
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The connections of the process, by database.
const CONNECTIONS: &str = "SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'diesel-outbox %'";
const OF_RELAYS: &str = "SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'diesel-outbox %' AND application_name <> 'diesel-outbox databases'";

/// Sessions that a relay with one connection has not. The server may count a session for a moment after its end, so the
/// number of sessions says less.
const OF_THREADS: &str = "SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'diesel-outbox %'
      AND application_name NOT IN ('diesel-outbox databases', 'diesel-outbox start', 'diesel-outbox relay', 'diesel-outbox heartbeat')";

/// Asks the process for its metrics.
fn metrics(process: &Running) -> impl Fn() -> String + use<> {
    let get = page(process);
    move || get("/metrics").1
}

/// Asks the process for a path: the status, and the body.
fn page(process: &Running) -> impl Fn(&str) -> (u16, String) + use<> {
    process.wait_for_log("event=admin_started");
    let log = process.log();
    let (_, rest) = log.split_once("address=").expect("an address");
    let address = rest.split_whitespace().next().expect("an address");
    let url = format!("http://{address}");
    move |path| {
        let request = ureq::get(format!("{url}{path}")).config();
        let request = request.http_status_as_error(false).build();
        let mut response = request.call().expect("a response");
        let body = response.body_mut().read_to_string().expect("text");
        (response.status().as_u16(), body)
    }
}

/// A tenant whose database is down does not take the process from the others. But a process that serves none is not ready.
#[test]
fn a_process_is_ready_while_it_serves_any_database_and_names_the_others() {
    let receiver = Receiver::ok();
    let (first, second) = (database(), database());
    first.close();
    second.close();
    let file = File::of(&[("first", &first.url), ("second", &second.url)]);
    let mut command = file.run(&receiver, &[]);
    command.env("OUTBOX_ADMIN_ADDR", "127.0.0.1:0");
    let mut process = Running::start(command);
    let get = page(&process);
    let ready = |status: u16, body: &str| {
        eventually(body, || get("/readyz") == (status, format!("{body}\n")));
    };
    ready(503, "serving 0 of 2 databases; not served: first, second");
    assert_eq!(get("/livez"), (200, "ok\n".to_owned()));
    second.open();
    ready(200, "ok: serving 1 of 2 databases; not served: first");
    first.open();
    ready(200, "ok");
    second.close();
    ready(200, "ok: serving 1 of 2 databases; not served: second");
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
}

/// The numbers of each key in the order in which they arrived.
fn by_key(receiver: &Receiver, database: &FreshDatabase) -> BTreeMap<i64, Vec<i64>> {
    let mut keys = BTreeMap::<i64, Vec<i64>>::new();
    for request in receiver.requests() {
        let body = request.json();
        if body["in"] == database.name.as_str() {
            let number = body["number"].as_i64().expect("a number");
            keys.entry(number % 10).or_default().push(number);
        }
    }
    keys
}

/// More databases than relays: each gets its turn, in order within each key, with two connections at most, and one when
/// nothing is left to do.
#[test]
fn databases_share_relays_and_have_two_connections_at_most() {
    let receiver = Receiver::ok();
    let databases = [(); 5].map(|()| database());
    let names: Vec<(&str, &str)> = (databases.iter())
        .map(|one| (one.name.as_str(), one.url.as_str()))
        .collect();
    let file = File::of(&names);
    databases.iter().for_each(|one| enqueue(one, 200));
    let (is_done, most) = (AtomicBool::new(false), AtomicI64::new(0));
    let mut process = Running::start(file.run(&receiver, &["--busy", "2"]));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Acquire) {
                let now = databases.iter().map(|one| one.number(OF_THREADS)).max();
                most.fetch_max(now.expect("databases"), Ordering::AcqRel);
            }
        });
        for one in &databases {
            eventually("all messages are delivered", || delivered(one) == 200);
            let keys = by_key(&receiver, one);
            assert_eq!(keys.len(), 10);
            assert!(keys.values().all(|key| key.is_sorted()), "{keys:?}");
        }
        for one in &databases {
            eventually("its relay has ended", || one.number(OF_RELAYS) == 0);
            eventually("it is watched", || one.number(CONNECTIONS) == 1);
        }
        is_done.store(true, Ordering::Release);
    });
    assert_eq!(receiver.count(), 1000);
    assert_eq!(most.load(Ordering::Acquire), 0);
    // What is written now is found, and so is what is due later.
    enqueue(&databases[3], 10);
    eventually("a sleeping database is woken", || {
        delivered(&databases[3]) == 210
    });
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
    for one in &databases {
        assert_eq!(
            one.number("SELECT count(*) FROM outbox_lease WHERE NOT ended"),
            0
        );
    }
}

/// The only relay would stay for ten seconds after its last message, and its turn lasts longer.
#[test]
fn a_relay_without_work_gives_way_to_a_database_that_waits() {
    let receiver = Receiver::ok();
    let [first, second] = [(); 2].map(|()| database());
    let file = File::of(&[("first", &first.url), ("second", &second.url)]);
    enqueue(&first, 10);
    let mut process = Running::start(file.run(&receiver, &["--busy", "1"]));
    eventually("the first has delivered", || delivered(&first) == 10);
    let idle = Instant::now();
    enqueue(&second, 10);
    eventually("the second has delivered", || delivered(&second) == 10);
    let took = idle.elapsed();
    assert!(took < Duration::from_secs(9), "{took:?}");
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
}

/// A database that is down, or has no outbox yet, harms no other, and is served as soon as it can be.
#[test]
fn a_database_that_is_down_harms_no_other() {
    let receiver = Receiver::ok();
    let (good, empty, closed) = (database(), FreshDatabase::new(), database());
    enqueue(&closed, 10);
    closed.close();
    let file = File::of(&[
        ("good", &good.url),
        ("empty", &empty.url),
        ("closed", &closed.url),
        ("nowhere", "postgres://ann:S3CRET@127.0.0.1:1/nothing"),
    ]);
    let mut command = file.run(&receiver, &["--busy", "1"]);
    command.env("OUTBOX_ADMIN_ADDR", "127.0.0.1:0");
    let mut process = Running::start(command);
    for name in ["empty", "closed", "nowhere"] {
        process.wait_for_log(&format!("the database {name} cannot be served"));
    }
    enqueue(&good, 100);
    eventually("the good one is served", || delivered(&good) == 100);
    let metrics = metrics(&process);
    let log = process.log();
    let ready = |name: &str| {
        let text = metrics();
        let of_name = |line: &&str| {
            line.starts_with("diesel_outbox_ready{") && line.contains(&format!("\"{name}:outbox\""))
        };
        let line = text
            .lines()
            .find(of_name)
            .unwrap_or_else(|| panic!("{text}"));
        line.rsplit(' ').next().expect("a value").to_owned()
    };
    assert_eq!((ready("good"), ready("nowhere")), ("1".into(), "0".into()));
    assert!(!log.contains("S3CRET"), "{log}");

    closed.open();
    diesel_outbox::migrate(&mut empty.connect(), Outbox::default().name()).expect("migrated");
    enqueue(&empty, 10);
    for one in [&closed, &empty] {
        eventually("it is served once it can be", || delivered(one) == 10);
    }
    process.wait_for_log("database=closed event=database_recovered");
    // It goes away while its relay works, too.
    enqueue(&closed, 500);
    eventually("its relay works", || delivered(&closed) > 10);
    closed.close();
    enqueue(&good, 10);
    eventually("the good one is served", || delivered(&good) == 110);
    closed.open();
    eventually("nothing is lost", || delivered(&closed) == 510);
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
}

/// What nobody measures is left out: a 0 would say that no message waits.
#[test]
fn metrics_of_ended_relays_and_of_removed_databases_are_left_out() {
    let receiver = Receiver::ok();
    let [first, second] = [(); 2].map(|()| database());
    let file = File::of(&[("first", &first.url), ("second", &second.url)]);
    let mut command = file.run(&receiver, &["--busy", "1"]);
    command.env("OUTBOX_ADMIN_ADDR", "127.0.0.1:0");
    let mut process = Running::start(command);
    let metrics = metrics(&process);
    let shows = |begin: &str| metrics().lines().any(|line| line.starts_with(begin));
    let [messages, ready, settled] = ["messages", "ready", "settled_total"]
        .map(|name| format!("diesel_outbox_{name}{{outbox=\"first:outbox\""));

    // A relay that has nothing left to do may end before it counts.
    eventually("its messages are counted", || {
        enqueue(&first, 1);
        shows(&messages)
    });
    enqueue(&second, 10);
    eventually("the second has delivered", || delivered(&second) == 10);
    assert!(!shows(&messages), "{}", metrics());
    assert!(shows(&ready) && shows(&settled), "{}", metrics());
    eventually("a relay counts again", || {
        enqueue(&first, 1);
        shows(&messages)
    });

    file.write(&[("second", &second.url)]);
    process.signal("HUP");
    process.wait_for_log("event=reloaded");
    let text = metrics();
    assert!(!text.contains("first:outbox"), "{text}");
    assert!(text.contains("second:outbox"), "{text}");
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
}

/// Sends may last longer than a shutdown of the process: a turn ends with them, and nothing is sent twice.
#[test]
fn a_turn_ends_with_its_sends_and_leaves_no_connection() {
    let receiver = Receiver::answering(|_| {
        std::thread::sleep(Duration::from_secs(4));
        200
    });
    let databases = [database(), database()];
    let file = File::of(&[("a", &databases[0].url), ("b", &databases[1].url)]);
    databases.iter().for_each(|one| enqueue(one, 10));
    let mut command = file.run(&receiver, &["--busy", "1"]);
    command
        .env("OUTBOX_CONCURRENCY", "1")
        .env("OUTBOX_BATCH", "1")
        .env("OUTBOX_LEASE", "60s")
        .env("OUTBOX_SEND_TIMEOUT", "20s")
        .env("OUTBOX_SHUTDOWN_TIMEOUT", "100ms");
    let process = Running::start(command);
    for one in &databases {
        eventually("it has its turn", || delivered(one) > 0);
    }
    process.wait_for_log("event=relay_stopped");
    let heartbeats = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'diesel-outbox heartbeat'";
    eventually("one relay is left", || {
        let all = databases.iter().map(|one| one.number(heartbeats));
        all.sum::<i64>() == 1
    });
    assert_eq!(receiver.ids().len(), receiver.count());
}

/// A relay that works is not ended because another of its threads has a problem.
#[test]
fn a_relay_that_delivers_continues_beside_a_failing_janitor() {
    let receiver = Receiver::ok();
    let database = database();
    database.execute(
        "CREATE OR REPLACE FUNCTION outbox_rotate(retention interval, OUT emptied integer, OUT is_in_use boolean)
         LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$",
    );
    let file = File::of(&[("a", &database.url)]);
    let process = Running::start(file.run(&receiver, &[]));
    let began = Instant::now();
    let mut count = 0;
    while began.elapsed() < Duration::from_secs(15) {
        enqueue(&database, 1);
        count += 1;
        eventually("it is delivered", || delivered(&database) == count);
        std::thread::sleep(Duration::from_millis(100));
    }
    let log = process.log();
    assert_eq!(log.matches("event=relay_started").count(), 1, "{log}");
    assert!(log.contains("event=db_error"), "{log}");
}

/// What no relay can send costs no relay, and delays nothing else.
#[test]
fn a_paused_topic_or_tenant_wakes_no_relay_until_it_is_resumed() {
    let receiver = Receiver::ok();
    let database = database();
    let tenant = uuid::Uuid::now_v7();
    database.execute(&format!(
        "INSERT INTO outbox_endpoint (name, url, tenant_id) VALUES ('acme', '{}', '{tenant}');
         INSERT INTO outbox_pause (kind, name, reason) VALUES ('topic', 'held', 'OPERATOR'), ('tenant', '{tenant}', 'unpaid');
         INSERT INTO outbox (topic, payload) VALUES ('held', '1');
         INSERT INTO outbox (topic, payload, tenant_id, destination) VALUES ('paid', '1', '{tenant}', 'acme')",
        receiver.url()
    ));
    let file = File::of(&[("a", &database.url)]);
    let process = Running::start(registered(file.run(&receiver, &[])));
    // The first relay comes in any case: it cleans.
    process.wait_for_log("event=relay_stopped");
    let relays = || process.log().matches("event=relay_started").count();
    eventually("it is watched", || database.number(CONNECTIONS) == 1);
    let asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
        AND application_name = 'diesel-outbox databases' AND query_start > now() - interval '1 s'";
    let until = Instant::now() + Duration::from_secs(5);
    eventually("it is asked for five seconds", || {
        database.number(asked) == 1 && Instant::now() > until
    });
    assert_eq!(relays(), 1, "{}", process.log());
    enqueue(&database, 1);
    eventually("another topic is served", || delivered(&database) == 1);
    database.execute("DELETE FROM outbox_pause");
    eventually("both are served", || delivered(&database) == 3);
}

/// With endpoints on this machine.
fn registered(mut command: Command) -> Command {
    command
        .env("OUTBOX_ENDPOINT_THREADS", "2")
        .env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false")
        .env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false");
    command
}

/// R60: a destination to which nothing is sent any more has failed for ten minutes while no relay runs for its database.
#[test]
fn a_failing_destination_is_reported_although_nothing_is_to_be_sent() {
    let receiver = Receiver::ok();
    let database = database();
    let url = receiver.url();
    database.execute(&format!(
        "INSERT INTO outbox_endpoint (name, url, topics) VALUES ('acme', '{url}', '{{order.*}}')"
    ));
    let file = File::of(&[("a", &database.url)]);
    let mut command = registered(file.run(&receiver, &[]));
    command.env("OUTBOX_OWN_EVENTS", "true");
    let process = Running::start(command);
    process.wait_for_log("event=relay_stopped");
    database.execute(
        "UPDATE outbox_endpoint SET failing_since = now() - interval '11 min', failing_reason = 'SERVER_ERROR'",
    );
    let told = "SELECT count(*) FROM outbox_messages WHERE topic = 'outbox.endpoint.failing'";
    eventually("it is reported", || database.number(told) == 1);
}

/// G1: another process takes over what a killed one had in flight.
#[test]
fn messages_of_a_killed_process_are_delivered_by_the_next() {
    let (held, _gate) = Receiver::held();
    let receiver = Receiver::ok();
    let databases = [database(), database()];
    let file = File::of(&[("a", &databases[0].url), ("b", &databases[1].url)]);
    databases.iter().for_each(|one| enqueue(one, 50));
    let killed = Running::start(file.run(&held, &[]));
    held.wait_for(2);
    killed.kill();
    let mut process = Running::start(file.run(&receiver, &[]));
    for one in &databases {
        eventually("all messages are delivered", || delivered(one) == 50);
    }
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
}

/// SIGHUP reads the file again. A file that cannot be used changes nothing.
#[test]
fn a_reload_adds_and_removes_databases() {
    let receiver = Receiver::ok();
    let (first, second) = (database(), database());
    let file = File::of(&[("first", &first.url)]);
    let mut process = Running::start(file.run(&receiver, &[]));
    enqueue(&first, 10);
    eventually("the first is served", || delivered(&first) == 10);
    std::fs::write(&file.0, "first = \"postgres://ann:S3CRET@h/\nbroken").expect("a file");
    process.signal("HUP");
    process.wait_for_log("event=reload_failed");
    assert!(!process.log().contains("S3CRET"), "{}", process.log());
    file.write(&[("second", &second.url)]);
    process.signal("HUP");
    process.wait_for_log("event=reloaded");
    eventually("nobody serves the first", || first.number(CONNECTIONS) == 0);
    enqueue(&first, 10);
    enqueue(&second, 10);
    eventually("the second is served", || delivered(&second) == 10);
    assert_eq!(delivered(&first), 10);
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
}

#[test]
fn a_file_that_names_no_database_is_refused() {
    let receiver = Receiver::ok();
    for (text, why) in [
        ("", "names no database"),
        ("a = 1", "invalid type"),
        ("a = \"mysql://h/d\"", ".toml: a: "),
        ("'a\"b' = \"postgres://h/d\"", "has no quotes"),
        ("'' = \"postgres://h/d\"", "not empty"),
    ] {
        let file = File::of(&[]);
        std::fs::write(&file.0, text).expect("a file");
        let refused = finish(file.run(&receiver, &[])).code(2);
        assert!(refused.stderr.contains(why), "{}", refused.stderr);
    }
    let lost = finish(binary(&["run", "--databases", "/nonexistent/d.toml"])).code(1);
    assert!(
        lost.stderr.contains("cannot read /nonexistent/d.toml"),
        "{}",
        lost.stderr
    );
    finish(binary(&["run", "--busy", "2"])).code(2);
}

/// A relay whose threads take turns works as any other: order, retries, handlers' connections of their own.
#[test]
fn a_relay_that_shares_a_connection_keeps_order_and_retries() {
    let database = Database::new();
    let failed = AtomicBool::new(false);
    let receiver = Receiver::answering(move |request| {
        match request.json()["number"] == 7 && !failed.swap(true, Ordering::AcqRel) {
            true => 503,
            false => 200,
        }
    });
    let relay = database
        .relay()
        .url(&receiver.url())
        .configure(|config| config.share_connection = true);
    let relay = relay.poll_interval(Duration::from_millis(50));
    let relay = relay.start().expect("the relay starts");
    for number in 0..50 {
        let message = NewMessage::new("t", &json!({ "number": number })).expect("JSON");
        database.enqueue_message(message.ordering_key("k"));
    }
    eventually("all are delivered", || database.count("delivered") == 50);
    let numbers = receiver.requests().into_iter();
    let mut numbers: Vec<i64> = numbers
        .filter_map(|one| one.json()["number"].as_i64())
        .collect();
    numbers.dedup();
    assert_eq!(numbers, (0..50).collect::<Vec<_>>());
    end(&relay);
}
