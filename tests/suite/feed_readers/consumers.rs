//! Consumers: each event has its effect once, whenever the process ends.

use super::*;

// --- consume ------------------------------------------------------------------------------

/// A consumer's table of effects, in the schema of the feed. No constraint hides a repeat.
struct Consumer<'a> {
    feed: &'a Feed,
    name: String,
}

impl<'a> Consumer<'a> {
    fn new(feed: &'a Feed) -> Self {
        let schema = feed.database.schema();
        feed.database.execute(&format!(
            "CREATE TABLE {schema}.effect (number bigserial, position bigint, data json)"
        ));
        Self {
            feed,
            // The table of positions is that of the database.
            name: schema.to_owned(),
        }
    }

    fn effects(&self) -> i64 {
        let count = format!("SELECT count(*) FROM {}.effect", self.name);
        self.feed.database.number(&count)
    }

    fn position(&self) -> Option<String> {
        self.feed.database.text(&format!(
            "SELECT max(cursor) FROM outbox_feed_position WHERE consumer = '{}'",
            self.name
        ))
    }

    /// Consumes until so many effects are there.
    fn consume_until(&self, effects: i64) -> Result<(), ConsumeError> {
        let conn = &mut self.feed.database.connect();
        let keep_going = || self.effects() < effects;
        let effect =
            |conn: &mut PgConnection, event: &CloudEvent<'_>| effect(conn, &self.name, event);
        feed::consume(conn, &self.feed.reader(), &self.name, keep_going, effect)
    }

    /// Each event has its effect once, in order of the keys.
    fn is_exact(&self, events: usize) {
        let database = &self.feed.database;
        assert_eq!(
            self.effects(),
            i64::try_from(events).expect("a small number")
        );
        let schema = &self.name;
        for (what, wrong) in [
            (
                "repeats",
                format!("SELECT count(*) - count(DISTINCT data->>'n') FROM {schema}.effect"),
            ),
            (
                "disorder of positions",
                format!(
                    "SELECT count(*) FROM (SELECT position - lag(position, 1, 0::bigint) OVER (ORDER BY number) AS step FROM {schema}.effect) e WHERE step <> 1"
                ),
            ),
            (
                "disorder of a key",
                format!(
                    "SELECT count(*) FROM (SELECT (data->>'n')::int < lag((data->>'n')::int) OVER (PARTITION BY data->>'key' ORDER BY number) AS is_wrong FROM {schema}.effect) e WHERE is_wrong"
                ),
            ),
        ] {
            assert_eq!(database.number(&wrong), 0, "{what}");
        }
    }
}

fn effect(conn: &mut PgConnection, schema: &str, event: &CloudEvent<'_>) -> QueryResult<()> {
    sql_query(format!(
        "INSERT INTO {schema}.effect (position, data) VALUES ($1, $2::json)"
    ))
    .bind::<BigInt, _>(event.position().unwrap_or_default())
    .bind::<Text, _>(event.json().unwrap_or_default())
    .execute(conn)
    .map(drop)
}

/// R74: a message that comes again, because the consumer continues from a time or somebody sends it again, has no second
/// effect if its id was written down.
#[test]
fn r74_inbox_once_knows_what_comes_again() {
    let feed = Feed::new();
    let consumer = Consumer::new(&feed);
    feed.enqueue(0..5, 2);
    eventually("the events are stored", || feed.stored() == 5);
    let (conn, name) = (&mut feed.database.connect(), consumer.name.as_str());
    let (reader, mut events) = (feed.reader(), 0);
    let mut consume_to = |conn: &mut PgConnection, position: i64| {
        let is_before = || consumer.position() != Some(feed.cursor(position));
        feed::consume(conn, &reader, name, is_before, |conn, event| {
            events += 1;
            inbox::once(conn, name, &event.id, |conn| effect(conn, name, event)).map(drop)
        })
    };
    consume_to(conn, 5).expect("five events");
    consumer.is_exact(5);
    feed::set_position(
        conn,
        &feed.reader(),
        name,
        After::Time(SystemTime::UNIX_EPOCH),
    )
    .expect("set");
    consume_to(conn, 5).expect("five events");
    // As a replay or "send again" does.
    feed.database.execute(
        "INSERT INTO {o} (message_id, idempotency_key, topic, payload, ordering_key)
         SELECT message_id, 'again', topic, payload, ordering_key FROM {o}_feed_event WHERE position = 2",
    );
    eventually("it is an event again", || feed.stored() == 6);
    consume_to(conn, 6).expect("one more event");
    assert_eq!(events, 5 + 5 + 1);
    consumer.is_exact(5);
}

/// R74: the position and the work are in one transaction.
#[test]
fn r74_work_that_fails_leaves_the_position_where_it_was() {
    let feed = Feed::new();
    let consumer = Consumer::new(&feed);
    feed.enqueue(0..10, 2);
    eventually("the events are stored", || feed.stored() == 10);
    let (conn, reader) = (&mut feed.database.connect(), feed.reader());
    let name = consumer.name.as_str();

    let failed = feed::consume(
        conn,
        &reader,
        name,
        || true,
        |conn, event| {
            effect(conn, name, event)?;
            match event.position() {
                Some(4) => Err("the order is unknown".into()),
                _ => Ok::<_, Box<dyn std::error::Error + Send + Sync>>(()),
            }
        },
    );
    let failed = failed.expect_err("work fails");
    assert!(
        matches!(failed, ConsumeError::Work { position: 4, .. }),
        "{failed:?}"
    );
    assert!(
        failed.to_string().contains("the order is unknown"),
        "{failed}"
    );
    assert_eq!(
        (consumer.effects(), consumer.position()),
        (3, Some(feed.cursor(3)))
    );

    // A statement fails, and the work ignores it: PostgreSQL would commit nothing.
    let ignored = feed::consume(
        conn,
        &reader,
        name,
        || true,
        |conn, event| {
            effect(conn, name, event)?;
            let _ = sql_query("SELECT 1 / 0").execute(conn);
            QueryResult::Ok(())
        },
    );
    let ignored = ignored.expect_err("nothing is committed");
    assert!(matches!(ignored, ConsumeError::Database(_)), "{ignored:?}");
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        feed::consume(
            conn,
            &reader,
            name,
            || true,
            |conn, event| {
                effect(conn, name, event)?;
                panic!("a mistake");
                #[allow(unreachable_code)]
                QueryResult::Ok(())
            },
        )
    }));
    assert!(panicked.is_err());
    assert_eq!(
        (consumer.effects(), consumer.position()),
        (3, Some(feed.cursor(3)))
    );

    // A page is one transaction, too.
    let pages = feed::consume_pages(
        conn,
        &reader.clone().limit(4),
        name,
        || true,
        |conn, events| {
            events
                .iter()
                .try_for_each(|event| effect(conn, name, event))?;
            match events.iter().any(|event| event.position() == Some(9)) {
                true => Err(Error::RollbackTransaction),
                false => Ok(()),
            }
        },
    );
    assert!(
        matches!(pages, Err(ConsumeError::Work { position: 8, .. })),
        "{pages:?}"
    );
    assert_eq!(
        (consumer.effects(), consumer.position()),
        (7, Some(feed.cursor(7)))
    );

    consumer.consume_until(10).expect("the rest");
    consumer.is_exact(10);

    // Nothing would be committed inside another transaction.
    let open = conn.transaction(|conn| {
        Ok::<_, Error>(feed::consume(
            conn,
            &reader,
            name,
            || true,
            |_, _| QueryResult::Ok(()),
        ))
    });
    let open = open.expect("a transaction");
    assert!(
        matches!(
            open,
            Err(ConsumeError::Database(Error::AlreadyInTransaction))
        ),
        "{open:?}"
    );
    // Names are bounded.
    let long = feed::consume(
        conn,
        &reader,
        &"x".repeat(1025),
        || true,
        |_, _| QueryResult::Ok(()),
    );
    assert!(
        matches!(
            long,
            Err(ConsumeError::Database(Error::DatabaseError(
                DatabaseErrorKind::CheckViolation,
                _
            )))
        ),
        "{long:?}"
    );
}

/// R74: where a consumer begins, and how it continues behind what was removed.
#[test]
fn r74_a_consumer_begins_where_it_was_said() {
    let feed = Feed::new();
    let consumer = Consumer::new(&feed);
    feed.enqueue(0..5, 1);
    eventually("the events are stored", || feed.stored() == 5);
    let (conn, name) = (&mut feed.database.connect(), consumer.name.as_str());
    let mut first = None;
    let mut consume = |reader: &Reader, mut pages: usize| {
        let keep_going = || {
            pages = pages.saturating_sub(1);
            pages > 0
        };
        feed::consume(conn, reader, name, keep_going, |_, event| {
            first.get_or_insert(event.position());
            QueryResult::Ok(())
        })
    };
    // The end becomes a cursor at once: what comes after a restart is not skipped.
    let reader = feed.reader().begin(After::End).wait(Duration::ZERO);
    consume(&reader, 4).expect("nothing to do");
    assert_eq!(consumer.position(), Some(feed.cursor(5)));
    feed.enqueue(5..8, 1);
    eventually("the events are stored", || feed.stored() == 8);
    consume(&reader, 4).expect("some events");
    assert_eq!(first, Some(Some(6)));

    // Another name of the feed is another position; that of a consumer that is far behind.
    let other = feed.reader().name("the crm of the shop");
    feed::set_position(
        &mut feed.database.connect(),
        &other,
        name,
        feed.cursor(2).parse().expect("a place"),
    )
    .expect("set");
    feed.expire(4);
    let (conn, mut first) = (&mut feed.database.connect(), None);
    let mut note = |_: &mut PgConnection, event: &CloudEvent<'_>| {
        first.get_or_insert(event.position());
        QueryResult::Ok(())
    };
    let expired = feed::consume(conn, &other, name, || true, &mut note).expect_err("too old");
    assert!(
        matches!(
            expired,
            ConsumeError::Read(ReadError::Expired { first_position: 5 })
        ),
        "{expired:?}"
    );
    feed::set_position(conn, &other, name, After::Begin).expect("set");
    let mut steps = 0..4;
    feed::consume(conn, &other, name, || steps.next().is_some(), &mut note).expect("some events");
    assert_eq!(first, Some(Some(5)));

    feed.database.execute(&format!(
        "UPDATE outbox_feed_position SET cursor = 'soon' WHERE consumer = '{name}'"
    ));
    let bad = feed::consume(conn, &other, name, || true, |_, _| QueryResult::Ok(()));
    let bad = bad.expect_err("no position");
    assert!(matches!(bad, ConsumeError::BadPosition(_)), "{bad:?}");
}

/// R74: processes of one name share a position: one works, and another takes over.
#[test]
fn r74_two_consumers_of_one_name_do_each_work_once() {
    let feed = Feed::new();
    let consumer = Consumer::new(&feed);
    let start = Barrier::new(3);
    std::thread::scope(|scope| {
        let consume = || {
            start.wait();
            consumer.consume_until(600).expect("events");
        };
        scope.spawn(consume);
        scope.spawn(consume);
        start.wait();
        for part in 0..6 {
            feed.enqueue(part * 100..part * 100 + 100, 7);
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    consumer.is_exact(600);

    // Another process hangs in its work: this one neither works nor waits for the lock.
    feed.enqueue(600..601, 7);
    let conn = &mut feed.database.connect();
    let has_ended = AtomicBool::new(false);
    conn.transaction(|conn| {
        sql_query(format!(
            "SELECT FROM outbox_feed_position WHERE consumer = '{}' FOR UPDATE",
            consumer.name
        ))
        .execute(conn)?;
        std::thread::scope(|scope| {
            let stands_by = scope.spawn(|| {
                let conn = &mut feed.database.connect();
                feed::consume(
                    conn,
                    &feed.reader(),
                    &consumer.name,
                    || !has_ended.load(Ordering::Acquire),
                    |conn, event| effect(conn, &consumer.name, event),
                )
            });
            eventually("the event is stored", || feed.stored() == 601);
            std::thread::sleep(Duration::from_millis(1500));
            has_ended.store(true, Ordering::Release);
            stands_by.join().expect("no panic").expect("it ends");
        });
        QueryResult::Ok(())
    })
    .expect("locked");
    assert_eq!(consumer.effects(), 600);
    consumer.consume_until(601).expect("the last event");
    consumer.is_exact(601);
}

const PROCESS: &str = "feed_readers::consumers::r74_the_process_of_a_consumer";

const SETTINGS: &str = "R74_CONSUMER";

/// A number from the environment, for longer runs: `R74_EVENTS=20000 R74_KILLS=200`.
fn configured(variable: &str, usual: usize) -> usize {
    std::env::var(variable).map_or(usual, |text| text.parse().expect(variable))
}

/// The program that the next test kills. Alone it does nothing.
#[test]
fn r74_the_process_of_a_consumer() {
    let Ok(settings) = std::env::var(SETTINGS) else {
        return;
    };
    let settings: Value = serde_json::from_str(&settings).expect("JSON");
    let text = |name: &str| settings[name].as_str().expect(name);
    let mut conn = PgConnection::establish(text("database")).expect("PostgreSQL is there");
    let reader = reader(text("url"), text("token"))
        .wait(Duration::from_secs(2))
        .limit(100);
    let schema = text("consumer");
    let by_page = settings["by_page"] == true;
    let ended = match by_page {
        false => feed::consume(
            &mut conn,
            &reader,
            schema,
            || true,
            |conn, event| effect(conn, schema, event),
        ),
        true => feed::consume_pages(
            &mut conn,
            &reader,
            schema,
            || true,
            |conn, events| {
                events
                    .iter()
                    .try_for_each(|event| effect(conn, schema, event))
            },
        ),
    };
    panic!("it consumes until it is killed: {ended:?}");
}

/// R74: a consumer that is killed again and again does the work of each event once. Every third time, a second process of
/// its name has stood by and takes over.
#[test]
fn r74_kills_of_a_consumer_lose_no_effect_and_repeat_none() {
    let events = configured("R74_EVENTS", 3_000);
    let kills = configured("R74_KILLS", 40);
    let feed = Feed::new();
    let consumer = Consumer::new(&feed);
    let start = |number: usize| {
        let settings = json!({
            "database": feed.database.url, "url": feed.url(), "token": feed.token, "consumer": consumer.name,
            "by_page": number % 4 == 3,
        });
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", PROCESS, "--nocapture"]);
        Running::start({
            command.env(SETTINGS, settings.to_string());
            command
        })
    };
    let mut works = start(0);
    let mut killed_at_work = 0;
    for kill in 0..kills {
        let before = consumer.effects();
        let part = events / kills;
        let to = if kill + 1 == kills {
            events
        } else {
            part * (kill + 1)
        };
        feed.enqueue(part * kill..to, 50);
        let stands_by = (kill % 3 == 0).then(|| start(kill + 1));
        eventually("the consumer works", || consumer.effects() > before);
        // Any moment: between two events, within one, or during a request.
        std::thread::sleep(Duration::from_millis(fastrand::u64(..30)));
        works.kill();
        killed_at_work += usize::from(consumer.effects() < i64::try_from(to).expect("small"));
        works = stands_by.unwrap_or_else(|| start(kill + 1));
    }
    let all = i64::try_from(events).expect("small");
    let mut done = consumer.effects();
    while done < all {
        eventually("the consumer continues", || consumer.effects() > done);
        done = consumer.effects();
    }
    works.kill();
    consumer.is_exact(events);
    eprintln!("{killed_at_work} of {kills} kills came before the work was done");
    assert!(killed_at_work > kills / 4, "{killed_at_work} of {kills}");
}

// --- Python -------------------------------------------------------------------------------

/// R74: the example in Python is killed, and each event has its effect once.
#[test]
fn r74_the_example_in_python_does_each_work_once() {
    const SELECT: &str = "import json, sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=5)
try:
    print(json.dumps([json.loads(event) for (event,) in db.execute('SELECT event FROM orders ORDER BY number')]))
except sqlite3.OperationalError:
    print([])";
    let feed = Feed::new();
    let token = File::new(&format!("{}\n", feed.token));
    let path =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.db", feed.database.schema()));
    let example = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../examples/feed-reader/feed_reader.py"
    );
    let start = || {
        let mut command = Command::new("python3");
        command
            .args([example, &feed.url(), token.path()])
            .arg(&path);
        Running::start(command)
    };
    let effects = || -> Vec<Value> {
        let mut command = Command::new("python3");
        command.args(["-c", SELECT]).arg(&path);
        serde_json::from_str(&finish(command).code(0).stdout).expect("JSON")
    };
    for kill in 0..5 {
        let process = start();
        for part in 0..4 {
            let first = kill * 200 + part * 50;
            feed.enqueue(first..first + 50, 10);
            std::thread::sleep(Duration::from_millis(fastrand::u64(..100)));
        }
        eventually("the example works", || !effects().is_empty());
        process.kill();
    }
    let mut last = start();
    eventually("all events have their effect", || effects().len() >= 1000);
    let all = effects();
    let positions: Vec<i64> = all
        .iter()
        .filter_map(|event| event["position"].as_str()?.parse().ok())
        .collect();
    assert_eq!(positions, (1..=1000).collect::<Vec<_>>());
    let mut keys = HashMap::<String, i64>::new();
    for event in &all {
        let key = event["partitionkey"].as_str().expect("a key").to_owned();
        let n = event["data"]["n"].as_i64().expect("a number");
        assert!(keys.insert(key, n).is_none_or(|before| before < n));
    }
    // From a time, as after a 409.
    last.kill();
    let mut command = Command::new("python3");
    command
        .args(["-c", "import sqlite3, sys; sqlite3.connect(sys.argv[1], isolation_level=None).execute(\"UPDATE feed_position SET cursor = '2026-01-01T00:00:00Z'\")"])
        .arg(&path);
    finish(command).code(0);
    last = start();
    feed.enqueue(1000..1001, 10);
    eventually("the next event has its effect", || effects().len() > 1000);
    assert_eq!(effects().len(), 1001, "ids are known");
    // What the server refuses ends the program.
    feed.database.execute("DELETE FROM {o}_feed_reader");
    feed.enqueue(1001..1002, 10);
    assert_eq!(last.wait().code(), Some(1));
    assert!(last.log().contains("401"), "{}", last.log());
    std::fs::remove_file(&path).expect("removed");
}

/// The tables of a consumer's database that has no outbox.
#[test]
fn the_positions_are_created_with_the_inbox() {
    let database = FreshDatabase::new();
    diesel_outbox::inbox::create(&mut database.connect()).expect("created");
    assert_eq!(
        database.number("SELECT count(*) FROM outbox_feed_position"),
        0
    );
    let down = diesel_outbox::inbox::migration_sql(diesel_outbox::Direction::Down);
    database.execute(down);
    assert_eq!(database.objects(), 0);
}
