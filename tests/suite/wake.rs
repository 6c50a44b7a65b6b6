//! Waking by NOTIFY, and finding messages without it.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection};
use diesel_outbox::{Destination, NewMessage};
use serde_json::json;

use crate::support::{Database, Receiver, Running, end, eventually, finish, status};

/// A poll interval that no message may wait for: if the message is found, something else found it.
const NEVER: Duration = Duration::from_secs(600);

/// The first half of the key of the outbox's advisory locks.
fn number(database: &Database) -> i64 {
    database.number("SELECT '{o}'::regclass::oid::bigint::bit(32)::integer")
}

/// R9
#[test]
fn a_commit_wakes_a_relay_that_sleeps() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database.sleeper(database.relay().url(&receiver.url()));
    // Known topics and new ones, one after another and several at once.
    for n in 1..=20 {
        database.enqueue(&format!("topic-{}", n / 3), json!({ "n": n }));
        if n % 4 == 0 {
            receiver.wait_for(n);
            eventually("the relay sleeps again", || database.is_relay_asleep());
        }
    }
    receiver.wait_for(20);
    eventually("all messages are settled", || relay.stats().delivered == 20);
}

/// R9: inserted by plain SQL, some time before the commit.
#[test]
fn it_is_the_commit_that_wakes_and_not_the_insert() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database.sleeper(database.relay().url(&receiver.url()));
    let mut conn = database.connect();
    let insert = format!(
        "BEGIN; INSERT INTO {} (topic, payload) VALUES ('t', '1')",
        database.name()
    );
    conn.batch_execute(&insert).expect("inserted");
    // Other messages come and go meanwhile.
    database.enqueue("t", json!(2));
    receiver.wait_for(1);
    conn.batch_execute("COMMIT").expect("committed");
    receiver.wait_for(2);
    conn.batch_execute(&insert).expect("inserted");
    conn.batch_execute("ROLLBACK").expect("rolled back");
    database.enqueue("t", json!(3));
    receiver.wait_for(3);
    eventually("all messages are settled", || relay.stats().delivered == 3);
}

/// R9: a message, keyed or not, that was inserted long before its commit, right after a claim that covered
/// everything.
#[test]
fn a_late_commit_right_after_another_one_is_not_left_to_the_poll() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database.sleeper(database.relay().url(&receiver.url()));
    const ROUNDS: usize = 12;
    let late: Vec<PgConnection> = (0..ROUNDS)
        .map(|n| {
            let mut conn = database.connect();
            let key = if n % 2 == 0 { "NULL" } else { "'late'" };
            conn.batch_execute(&format!(
                "BEGIN; INSERT INTO {} (topic, payload, ordering_key) VALUES ('t', '1', {key})",
                database.name()
            ))
            .expect("inserted");
            conn
        })
        .collect();
    // Longer than claims look back.
    database.execute("SELECT pg_sleep(1.5)");
    for (n, mut conn) in late.into_iter().enumerate() {
        let other = NewMessage::new("t", &json!(2)).expect("JSON");
        let sequence = database.enqueue_message(other.ordering_key("soon"));
        eventually("the other message is delivered", || {
            let sent = format!("SELECT count(*) FROM {{o}} WHERE sequence = {sequence}");
            database.number(&sent) == 0
        });
        conn.batch_execute("COMMIT").expect("committed");
        eventually("the late message is delivered", || {
            database.count("delivered") == 2 * i64::try_from(n + 1).expect("a small number")
        });
    }
    end(&relay);
}

/// R9: next to very many keys that are not due, where a walk takes many times as long.
#[test]
fn a_late_commit_of_a_key_does_not_wait_for_a_walk_over_all_keys() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, available_at)
         SELECT 't', '1', 'later-' || n, now() + interval '1 day' FROM generate_series(1, 60000) AS n",
    );
    database.execute("ANALYZE {o}");
    let relay = database.sleeper(database.relay().url(&receiver.url()));
    let mut longest = Duration::ZERO;
    for n in 1..=3 {
        let mut conn = database.connect();
        conn.batch_execute(&format!(
            "BEGIN; INSERT INTO {} (topic, payload, ordering_key) VALUES ('t', '1', 'late'); SELECT pg_sleep(0.2)",
            database.name()
        ))
        .expect("inserted");
        let committed = Instant::now();
        conn.batch_execute("COMMIT").expect("committed");
        receiver.wait_for(n);
        longest = longest.max(committed.elapsed());
    }
    assert!(longest < Duration::from_secs(8), "{longest:?}");
    relay
        .shutdown(Duration::from_secs(10))
        .expect("a clean shutdown");
}

/// R9
#[test]
fn several_relays_that_sleep_are_woken_whichever_of_them_has_the_lock() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut relays = vec![
        database.sleeper(database.relay().url(&receiver.url())),
        database.sleeper(database.relay().url(&receiver.url())),
        database.sleeper(database.relay().url(&receiver.url())),
    ];
    let mut count = 0;
    while !relays.is_empty() {
        for n in 0..5 {
            database.enqueue("t", json!(n));
            count += 1;
            receiver.wait_for(count);
        }
        // The next relay takes over the lock.
        relays.remove(0);
        if !relays.is_empty() {
            eventually("another relay sleeps", || database.is_relay_asleep());
        }
    }
}

/// R9: the relay that holds the lock for all ends while the other relay sleeps.
#[test]
fn a_relay_that_sleeps_behind_anothers_lock_takes_it_when_the_other_one_ends() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let first = database.sleeper(database.relay().url(&receiver.url()));
    let relay = database.relay().poll_interval(NEVER).url(&receiver.url());
    let _second = relay.start().expect("the relay starts");
    let asks_who_has_it = format!(
        "SELECT count(*) FROM pg_stat_activity
          WHERE application_name LIKE 'diesel-outbox listener%' AND state = 'idle'
            AND query LIKE '%pg_locks%classid = {} %'",
        database.number("'{o}'::regclass::oid::bigint")
    );
    eventually("the second relay sleeps behind it", || {
        database.number(&asks_who_has_it) > 0
    });
    drop(first);
    eventually("the second relay has the lock", || {
        database.is_relay_asleep()
    });
    database.enqueue("t", json!(1));
    receiver.wait_for(1);
}

/// R53: any role may take the lock, and give its session the name of a listener.
#[test]
fn a_stranger_with_the_name_of_a_listener_is_not_taken_for_one() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut stranger = database.connect();
    let role = format!("stranger_{}", database.schema());
    stranger
        .batch_execute(&format!(
            "SELECT pg_advisory_lock({}, 1); CREATE ROLE {role}; SET ROLE {role}",
            number(&database)
        ))
        .expect("locked");
    let run = || {
        let mut relay = database.binary(&["run"]);
        relay
            .env("OUTBOX_URL", receiver.url())
            .env("OUTBOX_POLL_INTERVAL", "600s");
        Running::start(relay)
    };
    let mut relay = run();
    eventually("the relay has a lease", || {
        database.number("SELECT count(*) FROM {o}_lease") == 1
    });
    let lease = database.number("SELECT id FROM {o}_lease");
    stranger
        .batch_execute(&format!(
            "SET application_name = 'diesel-outbox listener {lease}'"
        ))
        .expect("named");
    let pid = database.number(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'
            AND classid = '{o}'::regclass::oid",
    );
    let names_it = || {
        let check = database.binary(&["check", "--json", "--url", &receiver.url()]);
        let found = finish(check).json()["findings"].to_string();
        found.contains(&format!("pg_terminate_backend({pid})"))
    };
    eventually("check names the stranger", names_it);
    // A relay searches when it starts, and then once a minute. The first found a session that was too young to be judged.
    let mut later = run();
    later.wait_for_log("event=sleep_lock_taken");
    later.signal("TERM");
    assert_eq!(later.wait().code(), Some(0), "{}", later.log());
    database.enqueue("t", json!(1));
    receiver.wait_for(1);

    stranger
        .batch_execute(&format!(
            "SELECT pg_advisory_unlock_all(); RESET ROLE; DROP ROLE {role}"
        ))
        .expect("released");
    eventually("the relay sleeps", || database.is_relay_asleep());
    eventually("the lease names the listener", || {
        database.number(&format!(
            "SELECT count(listener_started) FROM {{o}}_lease WHERE id = {lease}"
        )) == 1
    });
    let check = database.binary(&["check", "--json", "--url", &receiver.url()]);
    let found = finish(check).json()["findings"].to_string();
    assert!(!found.contains("pg_terminate_backend"), "{found}");
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
}

/// R9: inserting costs no NOTIFY while the relay is busy or absent.
#[test]
fn no_insert_notifies_while_no_relay_sleeps() {
    let database = Database::new();
    let oid = database.number("SELECT '{o}'::regclass::oid::bigint");
    let mut listening = database.connect();
    listening
        .batch_execute(&format!("LISTEN outbox_{oid}"))
        .expect("listening");
    let heard = |conn: &mut PgConnection| {
        conn.batch_execute("SELECT 1").expect("the server answers");
        conn.notifications_iter().count()
    };
    database.enqueue("t", json!(1));
    assert_eq!(heard(&mut listening), 0, "a notification without a relay");

    let receiver = Receiver::ok();
    let relay = database.sleeper(database.relay().url(&receiver.url()));
    database.enqueue("t", json!(2));
    receiver.wait_for(2);
    eventually("a notification arrives", || heard(&mut listening) > 0);
    eventually("the relay sleeps again", || database.is_relay_asleep());

    // While the relay works off a backlog, which wakes it once.
    database.execute(
        "INSERT INTO {o} (topic, payload) SELECT 'order.paid', '1' FROM generate_series(1, 30000)",
    );
    let is_left = || {
        database.number(
            "SELECT EXISTS (SELECT FROM {o} WHERE topic = 'order.paid' AND locked_by IS NULL)::int",
        ) == 1
    };
    eventually("the relay is at work", || {
        !database.is_relay_asleep() && relay.stats().delivered > 100
    });
    let _ = heard(&mut listening);
    let mut beside = 0;
    loop {
        database.enqueue("t", json!(beside));
        let told = heard(&mut listening);
        if !is_left() {
            // No messages are left to claim: the relay may be asleep.
            break;
        }
        assert_eq!(told, 0, "a busy relay was notified");
        beside += 1;
    }
    assert!(
        beside > 20,
        "only {beside} messages came while the relay was at work"
    );
    eventually("the relay sleeps again", || database.is_relay_asleep());
    let _ = heard(&mut listening);
    drop(relay);
    eventually("its end is announced", || heard(&mut listening) == 1);
    // The server ends a session a moment after its client.
    eventually("its lock is gone", || !database.is_relay_asleep());
    database.enqueue("t", json!(3));
    assert_eq!(
        heard(&mut listening),
        0,
        "a notification after the relay has ended"
    );
}

/// R9: the listener's connection breaks.
#[test]
fn a_listener_that_was_cut_off_listens_again() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database.sleeper(database.relay().url(&receiver.url()));
    for n in 1..=3 {
        let cut = database.number(&format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_locks
              WHERE locktype = 'advisory' AND classid = {}::bit(32)::bigint::oid AND objid = 1
                AND mode = 'ExclusiveLock'",
            number(&database)
        ));
        assert_eq!(cut, 1);
        // Committed without a listener: the relay polls when it listens again.
        database.enqueue("t", json!(n));
        receiver.wait_for(2 * n - 1);
        eventually("the relay sleeps again", || database.is_relay_asleep());
        database.enqueue("t", json!(n));
        receiver.wait_for(2 * n);
        eventually("the relay sleeps again", || database.is_relay_asleep());
    }
    assert!(relay.is_healthy());
}

/// A TCP proxy before PostgreSQL. It counts the ends of transactions, and can lose its connections to the server without
/// a word to its clients.
pub(crate) struct Proxy {
    /// The URL of the database through this proxy.
    pub(crate) url: String,
    statements: Arc<AtomicUsize>,
    to_server: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    pub(crate) fn start(database: &Database) -> Self {
        let mut url = url::Url::parse(&database.url).expect("a URL");
        let host = url.host_str().expect("a host");
        let server = format!("{host}:{}", url.port().unwrap_or(5432));
        let listens = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listens.local_addr().expect("an address").port();
        url.set_port(Some(port)).expect("a port");
        let to_server: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let statements = Arc::<AtomicUsize>::default();
        let (kept, counted) = (Arc::clone(&to_server), Arc::clone(&statements));
        std::thread::spawn(move || {
            for client in listens.incoming() {
                let client = client.expect("a client");
                let server = TcpStream::connect(&server).expect("the server is there");
                kept.lock()
                    .expect("no panic holds it")
                    .push(server.try_clone().expect("a descriptor"));
                let (requests, to) = (
                    client.try_clone().expect("a descriptor"),
                    server.try_clone().expect("a descriptor"),
                );
                let counted = Arc::clone(&counted);
                // At the end of one side, the other stays open.
                std::thread::spawn(move || pass_on(requests, to, &counted));
                let (mut responses, mut client) = (server, client);
                std::thread::spawn(move || std::io::copy(&mut responses, &mut client));
            }
        });
        Self {
            url: url.into(),
            statements,
            to_server,
        }
    }

    /// The number of statements, including BEGIN, COMMIT and settings.
    pub(crate) fn statements(&self) -> usize {
        self.statements.load(Ordering::SeqCst)
    }

    fn lose_the_server(&self) {
        for server in self.to_server.lock().expect("no panic holds it").drain(..) {
            server.shutdown(Shutdown::Both).expect("it was open");
        }
    }
}

/// Copies the client's requests and counts the statements: messages `Execute`, and texts of messages `Query`.
fn pass_on(
    mut client: TcpStream,
    mut server: TcpStream,
    statements: &AtomicUsize,
) -> std::io::Result<()> {
    /// The code of a request that is followed by a startup message, as its length and code: for TLS, for GSSAPI.
    const BEFORE_STARTUP: [u32; 2] = [80_877_103, 80_877_104];
    let mut has_started = false;
    loop {
        let mut message = vec![0; if has_started { 5 } else { 4 }];
        client.read_exact(&mut message)?;
        let length = message.last_chunk::<4>().expect("a length");
        let (kind, length) = (message[0], u32::from_be_bytes(*length) as usize);
        let at = message.len();
        message.resize(at + length - 4, 0);
        client.read_exact(&mut message[at..])?;
        let body = &message[at..];
        if !has_started {
            let code = body.first_chunk().expect("a code");
            has_started = !BEFORE_STARTUP.contains(&u32::from_be_bytes(*code));
        } else if kind == b'E' {
            statements.fetch_add(1, Ordering::SeqCst);
        } else if kind == b'Q' {
            let text = String::from_utf8_lossy(body);
            let each = text.split(';');
            let each = each.filter(|one| !one.trim_matches(['\0', ' ', '\n']).is_empty());
            statements.fetch_add(each.count(), Ordering::SeqCst);
        }
        server.write_all(&message)?;
    }
}

/// R9, R50: the client's side of a connection stays open although the server's side is gone.
#[test]
fn a_listener_that_the_server_does_not_hear_any_more_listens_again() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let proxy = Proxy::start(&database);
    let relay = database.relay().listener_url(&proxy.url);
    let relay = database.sleeper(relay.url(&receiver.url()));
    eventually("the relay sleeps", || database.is_relay_asleep());
    proxy.lose_the_server();
    eventually("the server has no listener", || !database.is_relay_asleep());
    let began = Instant::now();
    while !database.is_relay_asleep() {
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "the listener is still deaf"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    database.enqueue("t", json!(1));
    receiver.wait_for(1);
    end(&relay);
}

/// R9: polling remains the guarantee. Without a listener, without the trigger, and by `wake`.
#[test]
fn without_a_listener_messages_are_found_by_polling_and_by_wake() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = |poll: Duration| {
        let mut config = diesel_outbox::config::Config::default();
        for (variable, value) in [
            ("DATABASE_URL", database.url.as_str()),
            ("OUTBOX_TABLE", &database.name()),
            ("OUTBOX_LISTENER", "false"),
            ("OUTBOX_URL", &receiver.url()),
        ] {
            config.set(variable, value).expect("a good setting");
        }
        config.poll_interval = poll;
        diesel_outbox::Relay::from_config(config)
            .start()
            .expect("the relay starts")
    };
    let polling = relay(Duration::from_millis(50));
    database.enqueue("t", json!(1));
    receiver.wait_for(1);
    assert!(!database.is_relay_asleep());
    drop(polling);

    let woken = relay(NEVER);
    assert!(woken.wait_until_idle(Duration::from_secs(30)));
    database.enqueue("t", json!(2));
    woken.wake();
    receiver.wait_for(2);
    drop(woken);

    database.execute("ALTER TABLE {o} DISABLE TRIGGER outbox_wake");
    let listening = database
        .relay()
        .poll_interval(Duration::from_millis(50))
        .url(&receiver.url())
        .start()
        .expect("the relay starts");
    database.enqueue("t", json!(3));
    receiver.wait_for(3);
    drop(listening);
}

/// R9: a listener that cannot connect is reported, and messages still arrive.
#[test]
fn a_relay_works_without_the_connection_that_its_listener_should_have() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut command = database.binary(&["run", "--url", &receiver.url()]);
    command.env(
        "OUTBOX_LISTENER_URL",
        "postgres://nobody:sekret@127.0.0.1:1/no",
    );
    let relay = Running::start(command);
    database.enqueue("t", json!(1));
    receiver.wait_for(1);
    relay.wait_for_log("listener");
    assert!(!relay.log().contains("sekret"), "{}", relay.log());
    let bad = database
        .binary(&["check"])
        .env("OUTBOX_LISTENER_URL", "no")
        .output()
        .expect("the command runs");
    assert_eq!(bad.status.code(), Some(2));
    for (variable, value, says) in [
        ("OUTBOX_LISTENER", "true", "a commit wakes the relay"),
        ("OUTBOX_LISTENER", "false", "the listener is off"),
        (
            "OUTBOX_LISTENER_URL",
            "postgres://nobody:sekret@127.0.0.1:1/no",
            "the listener cannot connect",
        ),
    ] {
        let mut check = database.binary(&["check", "--url", &receiver.url()]);
        check.env(variable, value);
        let checked = finish(check).code(0).stdout;
        assert!(checked.contains(says), "{checked}");
        assert!(!checked.contains("sekret"), "{checked}");
    }
    database.execute("ALTER TABLE {o} DISABLE TRIGGER outbox_wake");
    let checked = finish(database.binary(&["check", "--url", &receiver.url()])).code(0);
    assert!(
        checked
            .stdout
            .contains("the trigger outbox_wake is missing or disabled"),
        "{}",
        checked.stdout
    );
}

/// R9: producers commit, wait and roll back at random times while relays sleep and wake. No committed message waits
/// longer than a poll, and hardly any waits that long.
#[test]
fn no_commit_is_left_waiting_at_any_interleaving() {
    const POLL: Duration = Duration::from_secs(8);
    const PRODUCERS: u64 = 6;
    let database = Database::new();
    let committed: Arc<Mutex<HashMap<String, Instant>>> = Arc::default();
    let receiver = Receiver::ok();
    let relays = [0, 1].map(|_| {
        let relay = database.relay().poll_interval(POLL).url(&receiver.url());
        relay.start().expect("the relay starts")
    });
    let until = Instant::now() + Duration::from_secs(5);
    std::thread::scope(|scope| {
        for producer in 0..PRODUCERS {
            let (database, committed) = (&database, Arc::clone(&committed));
            scope.spawn(move || produce(database, producer, until, &committed));
        }
    });
    let committed = committed.lock().expect("no panic holds it").clone();
    assert!(committed.len() > 100, "{} commits", committed.len());
    receiver.wait_for(committed.len());
    drop(relays);
    let mut waits: Vec<Duration> = receiver
        .requests()
        .iter()
        .map(|request| {
            let at = committed
                .get(&request.id())
                .unwrap_or_else(|| panic!("{} was not committed", request.id()));
            request.at.saturating_duration_since(*at)
        })
        .collect();
    waits.sort();
    let longest = *waits.last().expect("some waits");
    assert!(longest < POLL, "a message waited for {longest:?}");
    let of_ninety = waits[waits.len() * 9 / 10];
    assert!(
        of_ninety < POLL / 4,
        "a tenth of the messages waited for {of_ninety:?} or longer"
    );
}

/// R9: a hanging destination has more messages than it takes. The relay still notices commits for other destinations.
#[test]
fn a_relay_that_waits_for_room_hears_of_commits_for_others() {
    let database = Database::new();
    let (stuck, gate) = Receiver::held();
    let receiver = Receiver::ok();
    for n in 0..200 {
        database.enqueue("stuck", json!({ "n": n }));
    }
    let relay = database.relay().poll_interval(NEVER).batch(10);
    let relay = relay
        .destination(Destination::new("stuck", &stuck.url()).expect("a destination"))
        .route("stuck", "stuck")
        .url(&receiver.url())
        .send_timeout(Duration::from_secs(15))
        .lease(Duration::from_secs(600))
        .start()
        .expect("the relay starts");
    stuck.wait_for(1);
    for n in 1..=6 {
        eventually("commits notify the relay", || database.is_relay_asleep());
        // Known topics and new ones.
        database.enqueue(&format!("topic-{}", n / 2), json!({ "n": n }));
        receiver.wait_for(n);
    }
    gate.open();
    end(&relay);
}

/// R9: a relay cannot fall asleep while a transaction with an insert is open. Messages that others commit meanwhile,
/// on topics without other messages, do not wait for the next survey, which comes after a second.
#[test]
fn beside_an_open_transaction_messages_of_new_topics_are_found_soon() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut open = database.connect();
    open.batch_execute("BEGIN").expect("a transaction");
    let message = NewMessage::new("open", &json!({})).expect("JSON");
    database
        .outbox()
        .enqueue(&mut open, message)
        .expect("enqueued");
    let relay = database.relay().poll_interval(NEVER).url(&receiver.url());
    let relay = relay.start().expect("the relay starts");
    let began = Instant::now();
    for n in 1..=12 {
        database.enqueue(&format!("topic-{n}"), json!({ "n": n }));
        receiver.wait_for(n);
    }
    let took = began.elapsed();
    // Twelve surveys would take twelve seconds.
    assert!(took < Duration::from_secs(9), "{took:?}");
    open.batch_execute("COMMIT").expect("committed");
    receiver.wait_for(13);
    end(&relay);
}

/// Commits messages after random times, some in transactions that take a while, and rolls some back.
fn produce(
    database: &Database,
    seed: u64,
    until: Instant,
    committed: &Mutex<HashMap<String, Instant>>,
) {
    let mut random = Random(seed * 7919 + 1);
    let outbox = database.outbox();
    let mut conn = database.connect();
    while Instant::now() < until {
        // Now and then all producers are quiet for long enough that the relays fall asleep.
        let most = if random.below(10) == 0 {
            120_000
        } else {
            4_000
        };
        std::thread::sleep(Duration::from_micros(random.below(most)));
        let topic = format!("topic-{}", random.below(4));
        let message = NewMessage::new(topic, &json!({ "seed": seed })).expect("JSON");
        let id = message.message_id().to_string();
        let (before, after) = (random.below(3_000), random.below(8_000));
        let is_kept = random.below(8) != 0;
        let result = conn.transaction::<(), diesel::result::Error, _>(|conn| {
            std::thread::sleep(Duration::from_micros(before));
            outbox.enqueue(conn, message).expect("enqueued");
            std::thread::sleep(Duration::from_micros(after));
            if !is_kept {
                return Err(diesel::result::Error::RollbackTransaction);
            }
            // As late as possible: a relay may be faster than the line after the commit.
            let mut committed = committed.lock().expect("no panic holds it");
            committed.insert(id, Instant::now());
            Ok(())
        });
        assert_eq!(result.is_ok(), is_kept);
    }
}

/// Pseudo-random numbers that are the same in each run: xorshift64.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

/// R9, R11: a relay that has no room, or has reached its limit, waits for a sender instead of polling.
#[test]
fn a_relay_that_can_claim_nothing_does_not_spin() {
    for command in [
        vec!["run"],
        vec!["drain", "--quiet", "--max-messages", "40"],
    ] {
        let database = Database::new();
        // No request gets a response until the sender is dropped.
        let (_held, answer) = crossbeam_channel::bounded::<()>(0);
        let receiver = Receiver::start(move |_, stream| {
            let _ = answer.recv();
            stream.write_all(&status(200))
        });
        database.enqueue_many(3000);
        let mut relay = database.binary(&command);
        relay
            .env("OUTBOX_URL", receiver.url())
            .env("OUTBOX_POLL_INTERVAL", "500ms")
            .env("OUTBOX_SEND_TIMEOUT", "60s")
            .env("OUTBOX_LEASE", "300s")
            .env("OUTBOX_CONCURRENCY", "4");
        let relay = Running::start(relay);
        receiver.wait_for(4);
        // Long enough for the next sweep, a claim from the start of a lane's index, to have passed.
        std::thread::sleep(Duration::from_secs(2));
        let (before, began) = (relay.cpu(), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        let (used, took) = (relay.cpu() - before, began.elapsed());
        assert!(
            u128::from(used) < took.as_millis() / 100,
            "{command:?}: {used} hundredths of a second in {took:?}"
        );
    }
}
