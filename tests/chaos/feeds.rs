//! Feeds while relays are killed, their sessions end, and producers roll back (R73).

use std::collections::{BTreeMap, HashSet};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use diesel::connection::{AnsiTransactionManager, TransactionManager};
use diesel::prelude::{QueryableByName, RunQueryDsl};
use diesel::result::Error;
use diesel::sql_types::{BigInt, Text};
use diesel::{Connection, sql_query};
use diesel_outbox::NewMessage;
use diesel_outbox::endpoints::Endpoint;
use serde_json::{Value, json};

use crate::ground::alone;
use crate::page::Page;
use crate::support::{Database, PATIENCE, Running, eventually, finish};

/// For longer runs: `FEED_MESSAGES=100000 FEED_KILLS=40`.
fn setting(name: &str, usual: usize) -> usize {
    let value = std::env::var(name).ok();
    value.map_or(usual, |value| value.parse().expect(name))
}

const FEEDS: [&str; 3] = ["a", "b", "c"];
const PRODUCERS: usize = 3;
const KEYS: usize = 4;

fn feeds(database: &Database) {
    let conn = &mut database.connect();
    for feed in FEEDS {
        let feed = Endpoint::feed(feed).topics(["order.*"]);
        database.outbox().endpoints().put(conn, &feed).expect("put");
    }
}

fn relay(database: &Database) -> Command {
    let mut command = database.binary(&["run"]);
    command
        .env("OUTBOX_ENDPOINT_THREADS", "1")
        .env("OUTBOX_LEASE", "2s")
        .env("OUTBOX_SEND_TIMEOUT", "500ms")
        .env("OUTBOX_ENDPOINT_TIMEOUT", "500ms")
        .env("OUTBOX_BATCH", "50");
    command
}

/// What a reader has of a feed.
#[derive(Debug, QueryableByName)]
struct Event {
    #[diesel(sql_type = BigInt)]
    position: i64,
    #[diesel(sql_type = Text)]
    key: String,
    #[diesel(sql_type = BigInt)]
    n: i64,
}

/// The events of a feed behind a position, over SQL.
fn over_sql(database: &Database, feed: &str) -> impl FnMut(i64) -> Vec<Event> {
    let mut conn = database.connect();
    let events = format!(
        "SELECT position, ordering_key AS key, (payload->>'n')::bigint AS n FROM {}_feed_event
          WHERE feed = '{feed}' AND position > $1 ORDER BY position LIMIT 100",
        database.name()
    );
    move |after| {
        let events = sql_query(&events).bind::<BigInt, _>(after);
        events.load(&mut conn).expect("events")
    }
}

/// The same over HTTP, with cursors.
fn over_http(database: &Database, page: &Page, feed: &str) -> impl FnMut(i64) -> Vec<Event> {
    let token = finish(database.binary(&["feed", "token", feed])).code(0);
    let authorization = format!("authorization: Bearer {}", token.stdout.trim());
    let mut after = "begin".to_owned();
    move |_| {
        let path = format!("GET /api/v1/feeds/{feed}/events?after={after}&limit=100&wait=1s");
        let answer = page.request(&path, &[&authorization], "");
        // Its session may have been ended.
        if answer.status == 503 {
            return Vec::new();
        }
        assert_eq!(answer.status, 200, "{answer:?}");
        answer
            .header("outbox-feed-next")
            .expect("a cursor")
            .clone_into(&mut after);
        let events: Vec<Value> = serde_json::from_str(&answer.body).expect("JSON");
        let event = |event: Value| Event {
            position: event["position"]
                .as_str()
                .and_then(|at| at.parse().ok())
                .expect("a position"),
            key: event["partitionkey"].as_str().expect("a key").to_owned(),
            n: event["data"]["n"].as_i64().expect("a number"),
        };
        events.into_iter().map(event).collect()
    }
}

/// Reads until there are as many events as were committed in the end. Each is at the next position, and the next of its key.
fn read(mut page: impl FnMut(i64) -> Vec<Event>, all: &AtomicUsize) -> usize {
    let (mut last, mut of_key) = (0, BTreeMap::new());
    let mut read_at = Instant::now();
    while usize::try_from(last).expect("a position") < all.load(Ordering::Relaxed) {
        let events = page(last);
        match events.is_empty() {
            true => assert!(read_at.elapsed() < PATIENCE, "nothing behind {last}"),
            false => read_at = Instant::now(),
        }
        for Event { position, key, n } in events {
            assert_eq!(position, last + 1, "a gap, or an event that comes late");
            last = position;
            let before = of_key.insert(key.clone(), n).unwrap_or(0);
            assert_eq!(n, before + 1, "the order of {key}");
        }
    }
    usize::try_from(last).expect("a position")
}

/// Enqueues messages in transactions of which some are rolled back. Numbers the committed ones of each key.
fn produce(database: &Database, number: usize, count: usize, committed: &AtomicUsize) {
    let (conn, outbox) = (&mut database.connect(), database.outbox());
    let mut rng = fastrand::Rng::with_seed(number as u64);
    let (mut left, mut numbers) = (count, [0_i64; KEYS]);
    while left > 0 {
        let (mut next, size) = (numbers, rng.usize(1..20).min(left));
        let messages: Vec<NewMessage> = (0..size)
            .map(|_| {
                let key = rng.usize(..KEYS);
                next[key] += 1;
                let message = NewMessage::new("order.paid", &json!({ "n": next[key] }));
                message
                    .expect("JSON")
                    .ordering_key(format!("{number}-{key}"))
            })
            .collect();
        let rolls_back = rng.u8(..7) == 0;
        let ended = conn.transaction(|conn| {
            outbox.enqueue_batch(conn, messages).expect("enqueued");
            match rolls_back {
                true => Err(Error::RollbackTransaction),
                false => Ok(()),
            }
        });
        if ended.is_ok() {
            (numbers, left) = (next, left - size);
            committed.fetch_add(size, Ordering::Relaxed);
        }
    }
}

/// R73: whatever happens to relays, each feed has each committed message once, in the order of its key, and a reader never
/// sees a gap.
#[test]
fn r73_feeds_have_each_message_once_and_readers_see_no_gap() {
    let _alone = alone();
    let (messages, kills) = (setting("FEED_MESSAGES", 3000), setting("FEED_KILLS", 4));
    let database = Database::new();
    feeds(&database);
    let page = Page::start(relay(&database));
    let start = || Running::start(relay(&database));
    let mut relays = [start(), start()];
    let (committed, all) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let count = messages / PRODUCERS;
    let stored = || {
        let least = "SELECT coalesce(min(n), 0) FROM (SELECT (SELECT count(*) FROM {o}_feed_event e WHERE e.feed = f.name) AS n FROM {o}_feed f) f";
        usize::try_from(database.number(least)).expect("a count")
    };
    std::thread::scope(|scope| {
        let (database, all, page, committed) = (&database, &all, &page, &committed);
        let of_sql = FEEDS.map(|feed| scope.spawn(move || read(over_sql(database, feed), all)));
        let of_http = scope.spawn(move || read(over_http(database, page, FEEDS[0]), all));
        let producers: Vec<_> = (0..PRODUCERS)
            .map(|number| scope.spawn(move || produce(database, number, count, committed)))
            .collect();
        for kill in 1..=kills {
            let moment = count * PRODUCERS * kill / (kills + 1);
            eventually("events are stored", || {
                stored() >= moment.min(committed.load(Ordering::Relaxed))
            });
            database.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'diesel-outbox%'",
            );
            let victim = kill % relays.len();
            std::mem::replace(&mut relays[victim], start()).kill();
        }
        producers
            .into_iter()
            .for_each(|one| one.join().expect("all are enqueued"));
        all.store(committed.load(Ordering::Relaxed), Ordering::Relaxed);
        for reader in of_sql.into_iter().chain([of_http]) {
            assert_eq!(reader.join().expect("no gap"), count * PRODUCERS);
        }
    });
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    let each = i64::try_from(count * PRODUCERS).expect("a count");
    for feed in FEEDS {
        let of_feed = |what: &str| {
            database.number(&format!(
                "SELECT {what} FROM {{o}}_feed_event WHERE feed = '{feed}'"
            ))
        };
        assert_eq!(of_feed("count(DISTINCT message_id)"), each);
        assert_eq!(
            (of_feed("count(*)"), of_feed("max(position)")),
            (each, each)
        );
    }
    let delivered = "SELECT count(*) FROM {o}_ledger WHERE status = 'delivered'";
    assert_eq!(database.number(delivered), 3 * each);
    assert_eq!(database.number("SELECT count(*) FROM {o}_dead"), 0);
}

/// R73: while a producer's transaction is open, the feed has all other messages. The held ones come behind them.
#[test]
fn r73_an_open_transaction_holds_up_nothing_and_is_not_skipped() {
    let _alone = alone();
    let database = Database::new();
    feeds(&database);
    let _relay = Running::start(relay(&database));
    let enqueue = |conn: &mut _, from: i64, count: i64, key: &str| {
        let message = |n| {
            let message = NewMessage::new("order.paid", &json!({ "n": n })).expect("JSON");
            message.ordering_key(key)
        };
        let messages = (from..from + count).map(message);
        database
            .outbox()
            .enqueue_batch(conn, messages)
            .expect("enqueued");
    };
    let (held, conn) = (&mut database.connect(), &mut database.connect());
    AnsiTransactionManager::begin_transaction(held).expect("begun");
    enqueue(held, 1, 5, "held");
    let mut pages = FEEDS.map(|feed| (over_sql(&database, feed), 0));
    let mut seen = HashSet::new();
    let mut read = |key: &str, to: i64| {
        for (page, last) in &mut pages {
            eventually("the feed has them", || {
                for event in page(*last) {
                    assert_eq!((event.position, event.key.as_str()), (*last + 1, key));
                    *last = event.position;
                    seen.insert((event.key, event.n));
                }
                *last == to
            });
        }
        seen.len()
    };
    for round in 0..20 {
        enqueue(conn, 1 + 10 * round, 10, "other");
        read("other", 10 * (round + 1));
    }
    AnsiTransactionManager::commit_transaction(held).expect("committed");
    assert_eq!(read("held", 205), 205);
}
