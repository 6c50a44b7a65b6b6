//! Relays that have nothing to do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{TryRecvError, bounded};
use diesel::Connection;
use diesel::connection::SimpleConnection;
use diesel_outbox::{NewMessage, Relay};
use serde_json::json;

use crate::support::{Database, Receiver, Running, end, eventually};
use crate::wake::Proxy;

/// A poll interval that nothing may wait for.
const NEVER: Duration = Duration::from_secs(600);

/// The listeners of relays that are awake.
const AWAKE: &str = "SELECT count(*) FROM pg_locks
    WHERE locktype = 'advisory' AND classid = '{o}'::regclass::oid AND objid <> 1 AND objsubid = 2
      AND mode = 'ShareLock' AND granted";

/// R62: an idle relay asks little: at each poll for streams, and for all else in one statement.
#[test]
fn an_idle_relay_makes_few_statements() {
    const SECONDS: u64 = 10;
    let default = Duration::from_millis(500);
    for (poll_interval, most) in [(default, 60), (Duration::from_secs(30), 12)] {
        let database = Database::new();
        let proxy = Proxy::start(&database);
        let relay = Relay::builder(&proxy.url).outbox(&database.name());
        let relay = relay
            .poll_interval(poll_interval)
            .lease(Duration::from_secs(60));
        let relay = database.sleeper(relay.url("http://127.0.0.1:9/"));
        // A rate needs an interval. The first is that of the start, and some work is done once a minute.
        let mut counts = (0..4).map(|_| {
            let before = proxy.statements();
            std::thread::sleep(Duration::from_secs(SECONDS));
            proxy.statements() - before
        });
        let is_little = |count: usize| (3..=most).contains(&count);
        assert!(
            counts.any(is_little),
            "more than {most} in each {SECONDS} s"
        );
        end(&relay);
    }
}

/// R62: nobody rings a relay that sleeps, so its heartbeat must see that the lease of another ends.
#[test]
fn a_relay_that_never_polls_takes_over_from_a_killed_one() {
    let database = Database::new();
    let (held, _gate) = Receiver::held();
    let receiver = Receiver::ok();
    let mut killed = database.binary(&["run"]);
    killed
        .env("OUTBOX_LEASE", "12s")
        .env("OUTBOX_URL", held.url());
    let killed = Running::start(killed);
    eventually("the first relay sleeps", || database.is_relay_asleep());
    database.enqueue("t", json!(1));
    held.wait_for(1);
    let relay = database.relay().url(&receiver.url()).poll_interval(NEVER);
    let relay = relay
        .lease(Duration::from_secs(12))
        .start()
        .expect("the relay starts");
    eventually("the lease of the first is locked", || {
        database.number("SELECT count(*) FROM {o}_lease WHERE takeover_after IS NOT NULL") == 2
    });
    killed.kill();
    receiver.wait_for(1);
    eventually("the message is settled", || {
        database.count("delivered") == 1
    });
    end(&relay);
}

/// R62: a relay that is frozen, whenever that is, makes inserts notify for no longer than its lease. So its lease names
/// the session that another relay must end before that session has the lock.
#[test]
fn a_relay_falls_asleep_only_when_its_lease_names_the_listener() {
    let database = Database::new();
    let relay = database.sleeper(database.relay().url("http://127.0.0.1:9/"));
    let mut operator = database.connect();
    let hold = format!("BEGIN; SELECT FROM {}_lease FOR UPDATE", database.name());
    operator.batch_execute(&hold).expect("the row is locked");
    let named = database.number("SELECT listener_pid FROM {o}_lease");
    database.execute(&format!("SELECT pg_terminate_backend({named})"));
    // A session that ends tells its client so before its locks go.
    eventually(
        "a new listener is connected, and the old session is gone",
        || {
            database.number(&format!(
            "SELECT coalesce(min(pid), {named}) FROM pg_stat_activity
              WHERE application_name = 'diesel-outbox listener' AND query LIKE '%' || '{{o}}'::regclass::oid || '%'"
        )) != named
            && database.number(&format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {named}")) == 0
        },
    );
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        assert!(!database.is_relay_asleep(), "the lease names {named} still");
    }
    operator.batch_execute("COMMIT").expect("the row is free");
    eventually("the relay sleeps", || database.is_relay_asleep());
    let is_named = "SELECT count(*) FROM {o}_lease l JOIN pg_locks k ON k.pid = l.listener_pid
        WHERE k.locktype = 'advisory' AND k.classid = '{o}'::regclass::oid AND k.objid = 1 AND k.objsubid = 2";
    assert_eq!(database.number(is_named), 1);
    end(&relay);
}

/// R62: of relays that serve the same, none makes inserts notify while another is awake.
#[test]
fn a_relay_sleeps_quietly_while_another_is_awake() {
    let database = Database::new();
    // Slower than the feeding, so that there is always work.
    let receiver = Receiver::answering(|_| {
        std::thread::sleep(Duration::from_millis(2));
        200
    });
    let start = || database.sleeper(database.relay().url(&receiver.url()).concurrency(1));
    let relays = [start(), start()];
    // Dropped by a failure, too: the feeding ends.
    let (feeds, ended) = bounded::<()>(0);
    std::thread::scope(|scope| {
        let feeds = feeds;
        scope.spawn(|| {
            while ended.try_recv() == Err(TryRecvError::Empty) {
                if database.number("SELECT count(*) FROM {o}") < 2_000 {
                    database.enqueue_many(500);
                }
            }
        });
        eventually("a relay is at work, and inserts do not notify", || {
            database.number(AWAKE) >= 1 && !database.is_relay_asleep()
        });
        drop(feeds);
    });
    let is_empty = || database.number("SELECT count(*) FROM {o}") == 0;
    eventually("both sleep", || {
        database.number(AWAKE) == 0 && database.is_relay_asleep() && is_empty()
    });
    database.enqueue("t", json!(1));
    eventually("a commit wakes one", is_empty);
    relays.iter().for_each(end);
}

/// R62: commits that notify wait for one another. Three relays serve the same and sleep, or stand by, beside one that
/// delivers what 16 clients write.
#[test]
fn commits_of_sixteen_clients_do_not_notify_beside_a_busy_relay() {
    for stands_by in [false, true] {
        let database = Database::new();
        let receiver = Receiver::ok();
        let start = || {
            let mut relay = database.binary(&["run"]);
            relay
                .env("OUTBOX_URL", receiver.url())
                .env("OUTBOX_POLL_INTERVAL", "600s")
                .env("OUTBOX_SINGLE_ACTIVE", stands_by.to_string());
            Running::start(relay)
        };
        let _relays = [(); 4].map(|()| start());
        let oid = database.number("SELECT '{o}'::regclass::oid::bigint");
        let mut listening = database.connect();
        let listen = format!("LISTEN outbox_{oid}");
        listening.batch_execute(&listen).expect("listening");
        let mut heard = || {
            listening.batch_execute("SELECT 1").expect("it answers");
            listening.notifications_iter().count()
        };
        let commits = AtomicUsize::new(0);
        let (works, ended) = bounded::<()>(0);
        std::thread::scope(|scope| {
            let works = works;
            for _ in 0..16 {
                scope.spawn(|| {
                    let (ended, conn, outbox) =
                        (ended.clone(), &mut database.connect(), database.outbox());
                    while ended.try_recv() == Err(TryRecvError::Empty) {
                        let message = NewMessage::new("t", &json!(1)).expect("JSON");
                        let enqueued = conn.transaction(|conn| outbox.enqueue(conn, message));
                        enqueued.expect("enqueued");
                        commits.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            // While a sleeping relay holds the lock, each commit notifies.
            eventually("500 commits in a row notify nobody", || {
                let (before, _) = (commits.load(Ordering::SeqCst), heard());
                eventually("500 commits", || {
                    commits.load(Ordering::SeqCst) >= before + 500
                });
                let awake = database.number(AWAKE);
                heard() == 0 && (1..4).contains(&awake)
            });
            drop(works);
        });
    }
}
