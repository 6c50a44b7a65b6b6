//! Consumers of feeds: the reader, `feed::consume`, `listen --feed` and the example in Python (R74).

use std::collections::HashMap;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::sql_types::{BigInt, Text};
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::Backoff;
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::feed::{self, After, ConsumeError, ReadError, Reader};
use diesel_outbox::receive::CloudEvent;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::fresh::FreshDatabase;
use crate::page::Page;
use crate::proxy::{ConnectProxy, tunnel};
use crate::support::{Database, File, Receiver, Request, Running, eventually, finish, status};

// --- A feed served by the program ---------------------------------------------------------

/// A feed, and the program that fills and serves it.
struct Feed {
    database: Database,
    page: Page,
    token: String,
}

impl Feed {
    fn new() -> Self {
        let database = Database::new();
        let conn = &mut database.connect();
        let feed = Endpoint::feed("crm").topics(["order.*"]);
        database.outbox().endpoints().put(conn, &feed).expect("put");
        let made = finish(database.binary(&["feed", "token", "crm"])).code(0);
        let page = Page::start(program(&database));
        Self {
            database,
            page,
            token: made.stdout.trim().to_owned(),
        }
    }

    fn url(&self) -> String {
        format!("http://{}/api/v1/feeds/crm/events", self.page.address)
    }

    fn reader(&self) -> Reader {
        reader(&self.url(), &self.token).wait(Duration::from_secs(2))
    }

    /// Enqueues `{"key": k, "n": n}` for these numbers in one transaction, with `keys` ordering keys.
    fn enqueue(&self, numbers: std::ops::Range<usize>, keys: usize) {
        let (first, last) = (numbers.start, numbers.end - 1);
        self.database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, ordering_key)
             SELECT 'order.paid', json_build_object('key', n % {keys}, 'n', n), 'k' || n % {keys}
               FROM generate_series({first}, {last}) AS n ORDER BY n"
        ));
    }

    fn stored(&self) -> i64 {
        self.database.number("SELECT count(*) FROM {o}_feed_event")
    }

    /// The cursor behind this event.
    fn cursor(&self, position: i64) -> String {
        let micros = format!(
            "SELECT (extract(epoch FROM stored_at - timestamptz '2000-01-01Z') * 1000000)::bigint
               FROM {{o}}_feed_event WHERE position = {position}"
        );
        let stored_at = self.database.number(&micros);
        let id = format!("SELECT message_id FROM {{o}}_feed_event WHERE position = {position}");
        let id = self.database.text(&id).expect("an event");
        format!("{position}.{id}.{stored_at}")
    }

    /// Removes the events up to this position, as the retention does.
    fn expire(&self, position: i64) {
        self.database.execute(&format!(
            "UPDATE {{o}}_feed SET base = {position},
                    (base_id, base_stored_at) = (SELECT message_id, stored_at FROM {{o}}_feed_event WHERE position = {position})"
        ));
        let old = format!("DELETE FROM {{o}}_feed_event WHERE position <= {position}");
        self.database.execute(&old);
    }
}

fn program(database: &Database) -> Command {
    let mut command = database.binary(&["run"]);
    command.env("OUTBOX_ENDPOINT_THREADS", "2");
    command
}

/// A reader that retries soon.
fn reader(url: &str, token: &str) -> Reader {
    let soon = Backoff::Table(vec![Duration::from_millis(20)]);
    let reader = Reader::new(url, token.into()).expect("a reader");
    reader.backoff(soon).wait(Duration::ZERO)
}

fn positions(page: &feed::Page) -> Vec<i64> {
    page.events
        .iter()
        .filter_map(CloudEvent::position)
        .collect()
}

// --- The reader ---------------------------------------------------------------------------

/// R73: pages continue each other, and a long poll ends with the next event.
#[test]
fn a_reader_reads_each_event_once_and_waits_for_the_next_one() {
    let feed = Feed::new();
    let reader = feed.reader().limit(7);
    let empty = reader.page(After::Begin).expect("an empty page");
    assert_eq!((positions(&empty), empty.next.position()), (vec![], 0));
    feed.enqueue(0..20, 3);
    let (mut after, mut all) = (After::Cursor(empty.next), Vec::new());
    while all.len() < 20 {
        let page = reader.page(after).expect("a page");
        assert!(page.events.len() <= 7);
        all.extend(positions(&page));
        after = After::Cursor(page.next);
    }
    assert_eq!(all, (1..=20).collect::<Vec<_>>());

    let began = Instant::now();
    let patient = reader.clone().wait(Duration::from_secs(30));
    let end = patient.page(After::End).expect("the end");
    assert_eq!((positions(&end), After::Cursor(end.next)), (vec![], after));
    std::thread::scope(|scope| {
        let polled = scope.spawn(|| patient.page(after));
        std::thread::sleep(Duration::from_millis(300));
        feed.enqueue(20..21, 3);
        let page = polled.join().expect("no panic").expect("a page");
        assert_eq!(positions(&page), [21]);
        assert_eq!(page.events[0].json(), Some(r#"{"key" : 2, "n" : 20}"#));
        assert_eq!(page.events[0].ordering_key(), Some("k2"));
    });
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
}

/// R73: 401, 409 and 410 of the server are errors with a type.
#[test]
fn a_position_that_cannot_be_continued_has_an_error_of_its_own() {
    let feed = Feed::new();
    feed.enqueue(0..10, 1);
    eventually("the events are stored", || feed.stored() == 10);
    let reader = feed.reader();
    let at = |position| feed.cursor(position).parse().expect("a cursor");
    let (third, sixth) = (After::Cursor(at(3)), After::Cursor(at(6)));
    let ahead = format!("400.{}", Uuid::now_v7()).parse().expect("a cursor");
    let changed = reader.page(After::Cursor(ahead)).expect_err("ahead");
    assert_eq!(changed, ReadError::Changed { last_position: 10 });

    feed.expire(6);
    let expired = reader.page(third).expect_err("too old");
    assert_eq!(expired, ReadError::Expired { first_position: 7 });
    for after in [sixth, After::Begin] {
        let page = reader.page(after).expect("a page");
        assert_eq!(positions(&page), [7, 8, 9, 10]);
    }

    let stranger = self::reader(&feed.url(), "wrong");
    let refused = stranger.page(After::Begin).expect_err("no token");
    let ReadError::Refused {
        status: 401,
        detail,
    } = &refused
    else {
        panic!("{refused:?}");
    };
    assert!(detail.contains("token of this feed"), "{detail}");
}

/// A server of a feed whose pages are written by hand.
/// R73: a consumer inside a network that reaches others only through its proxy, which looks up their names.
#[test]
fn a_reader_reaches_its_server_through_a_proxy() {
    let feed = Feed::new();
    feed.enqueue(0..3, 1);
    eventually("the events are stored", || feed.stored() == 3);
    let away = feed.url().replace("127.0.0.1", "feed.invalid");
    let through = |proxy: &str| {
        let reader = reader(&away, &feed.token).retry_for(Duration::ZERO);
        reader.proxy(proxy.replace("//", "//user:pa%73s@").into())
    };
    let proxy = ConnectProxy::treating(tunnel);
    let reader = through(&proxy.url()).expect("a proxy");
    let page = reader.page(After::Begin).expect("a page");
    assert_eq!(positions(&page), [1, 2, 3]);
    let head = proxy.heads()[0].to_lowercase();
    assert!(head.starts_with("connect feed.invalid:"), "{head}");
    assert!(
        head.contains("proxy-authorization: basic dxnlcjpwyxnz"),
        "{head}"
    );
    assert!(!head.contains(&feed.token.to_lowercase()), "{head}");

    let refuses = ConnectProxy::answering("HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n");
    let refused = through(&refuses.url()).expect("a proxy");
    let refused = refused.page(After::Begin).expect_err("no tunnel");
    assert!(
        matches!(refused, ReadError::Unavailable { .. }),
        "{refused:?}"
    );
    for url in ["socks5://proxy:1080", "https://proxy:3128", ""] {
        let error = feed.reader().proxy(url.into()).expect_err(url);
        assert_eq!(error.key(), "proxy", "{url}");
    }
}

fn server(answer: impl Fn(&Request) -> Vec<u8> + Send + Sync + 'static) -> Receiver {
    Receiver::start(move |request, stream| stream.write_all(&answer(request)))
}

fn id(position: i64) -> Uuid {
    Uuid::from_u128(u128::try_from(position).expect("a position"))
}

fn cursor(position: i64) -> After {
    format!("{position}.{}", id(position))
        .parse()
        .expect("a cursor")
}

fn batch(positions: &[i64], next: i64) -> Vec<u8> {
    let event = |position: &i64| {
        json!({
            "specversion": "1.0", "id": id(*position), "source": "/", "type": "t", "position": position.to_string(),
            "data": position,
        })
    };
    let body = Value::from_iter(positions.iter().map(event)).to_string();
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/cloudevents-batch+json\r\noutbox-feed-next: {}\r\ncontent-length: {}\r\n\r\n{body}",
        cursor(next),
        body.len()
    )
    .into_bytes()
}

fn head(status: u16, headers: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} Reason\r\n{headers}content-length: 0\r\n\r\n").into_bytes()
}

/// The error of one page behind the position 3, and the number of requests.
fn error(answer: Vec<u8>) -> (ReadError, usize) {
    let server = server(move |_| answer.clone());
    let error = reader(&server.url(), "t")
        .page(cursor(3))
        .expect_err("an error");
    (error, server.count())
}

/// R73: a page that does not continue its cursor is an error, whoever is at fault, and nothing of it is used.
#[test]
fn a_page_with_a_hole_is_refused() {
    for (positions, next, expected, found) in [
        (vec![5, 6], 6, 4, 5),
        (vec![4, 6], 6, 5, 6),
        (vec![4, 4], 4, 5, 4),
        (vec![3, 4], 4, 4, 3),
    ] {
        let (error, requests) = error(batch(&positions, next));
        assert_eq!(
            (error, requests),
            (ReadError::Hole { expected, found }, 1),
            "{positions:?}"
        );
    }
    let other = String::from_utf8(batch(&[4], 4)).expect("UTF-8");
    for answer in [
        batch(&[4], 5),
        batch(&[], 4),
        status(200),
        other.replace("outbox-feed-next", "another-header").into(),
        other.replace("\"position\"", "\"positiox\"").into(),
        other.replace("[{", "{{").into(),
        other.replace("cloudevents-batch+json", "json").into(),
    ] {
        let (error, requests) = error(answer);
        assert!(matches!(error, ReadError::NotAPage { .. }), "{error:?}");
        assert_eq!(requests, 1);
    }
    let good = server(|_| batch(&[4, 5], 5));
    let page = reader(&good.url(), "t").page(cursor(3)).expect("a page");
    assert_eq!(positions(&page), [4, 5]);
    let request = &good.requests()[0];
    assert_eq!(request.header("authorization"), Some("Bearer t"));
    assert!(
        request.line.starts_with("GET /events?after=3.")
            && request.line.contains("&limit=500&wait=0s "),
        "{}",
        request.line
    );
}

/// R66: an answer that a retry cannot change is an error at once, and the token goes to no other server.
#[test]
fn a_refusal_is_not_retried_and_a_redirect_not_followed() {
    let elsewhere = Receiver::ok();
    let location = format!("location: {}\r\n", elsewhere.url());
    for status in [301, 302, 307, 400, 401, 403, 404, 409, 410] {
        let (error, requests) = error(head(status, &location));
        assert!(
            matches!(error, ReadError::Refused { status: found, .. } if found == status),
            "{error:?}"
        );
        assert_eq!(requests, 1);
    }
    assert_eq!(elsewhere.count(), 0);
}

/// R66: 429 and 5xx are retried, not before the server wants it; so is a connection that ends early.
#[test]
fn a_failure_is_retried_after_the_time_that_the_server_asks_for() {
    let tries = AtomicUsize::new(0);
    let server = Receiver::start(
        move |_, stream| match tries.fetch_add(1, Ordering::Relaxed) {
            0 => stream.write_all(&head(429, "retry-after: 1\r\n")),
            1 => stream.write_all(&head(503, "")),
            2 => {
                let page = batch(&[4], 4);
                stream.write_all(&page[..page.len() - 5])?;
                Err(std::io::ErrorKind::Other.into())
            }
            _ => stream.write_all(&batch(&[4], 4)),
        },
    );
    let page = reader(&server.url(), "t").page(cursor(3)).expect("a page");
    assert_eq!(positions(&page), [4]);
    let requests = server.requests();
    assert_eq!(requests.len(), 4);
    assert!(requests[1].at - requests[0].at >= Duration::from_secs(1));
}

/// Every wait has a bound: a server that accepts and says nothing, one that sends a byte now and then, one that is not
/// there, one that asks to wait for an hour, and one whose page has no end.
#[test]
fn a_server_that_stalls_is_given_up() {
    let unavailable = |reader: Reader| {
        let began = Instant::now();
        let reader = reader
            .timeout(Duration::from_millis(500))
            .retry_for(Duration::from_millis(600));
        let error = reader.page(cursor(3)).expect_err("no page");
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "{:?}",
            began.elapsed()
        );
        let ReadError::Unavailable { reason } = error else {
            panic!("{error:?}");
        };
        reason
    };
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/", silent.local_addr().expect("an address"));
    let reason = unavailable(reader(&url, "t"));
    assert_eq!(reason, "no whole response within 500ms");
    drop(silent);
    let reason = unavailable(reader(&url, "t"));
    assert!(reason.contains("refused"), "{reason}");

    let drops = Receiver::start(|_, stream| {
        let page = batch(&[4], 4);
        page.chunks(1).try_for_each(|byte| {
            std::thread::sleep(Duration::from_millis(100));
            stream.write_all(byte)
        })
    });
    let reason = unavailable(reader(&drops.url(), "t"));
    assert_eq!(reason, "no whole response within 500ms");

    let later = server(|_| head(503, "retry-after: 3600\r\n"));
    unavailable(reader(&later.url(), "t"));
    assert_eq!(later.count(), 1);

    let endless = Receiver::start(|_, stream: &mut TcpStream| {
        let page = batch(&[4], 4);
        let text = String::from_utf8_lossy(&page);
        let (start, _) = text.split_once("content-length").expect("a head");
        stream.write_all(format!("{start}content-length: 99999999999\r\n\r\n").as_bytes())?;
        let spaces = vec![b' '; 1024 * 1024];
        loop {
            stream.write_all(&spaces)?;
        }
    });
    let error = reader(&endless.url(), "t")
        .page(cursor(3))
        .expect_err("too large");
    assert!(
        matches!(&error, ReadError::NotAPage { reason } if reason.contains("64 MiB")),
        "{error:?}"
    );
}

#[test]
fn a_url_that_cannot_be_that_of_events_is_refused() {
    for (url, token, key) in [
        ("shop", "t", "url"),
        ("ftp://shop/events", "t", "url"),
        ("http://me:pw@shop/events", "t", "url"),
        ("http://shop/events?after=1", "t", "url"),
        ("http://shop/events", "a\nb", "token"),
    ] {
        let error = Reader::new(url, token.into()).expect_err(url);
        assert_eq!(error.key(), key, "{url}");
    }
    let secret = reader("http://shop/events", "s3cret");
    assert!(!format!("{secret:?}").contains("s3cret"));
}

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

const PROCESS: &str = "feed_readers::r74_the_process_of_a_consumer";
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

// --- listen --feed ------------------------------------------------------------------------

fn listen(feed: &Feed, token: &File, arguments: &[&str]) -> Running {
    // The log has both outputs.
    let mut command = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_diesel-outbox");
    command.args(["-c", r#"exec "$0" "$@" >&2"#, program, "listen", "--feed"]);
    command
        .args([&feed.url(), "--token-file", token.path()])
        .args(arguments);
    Running::start(command)
}

#[test]
fn listen_prints_what_arrives_in_a_feed() {
    let feed = Feed::new();
    let token = File::new(&format!("{}\n", feed.token));
    feed.enqueue(0..3, 2);
    let mut listening = listen(&feed, &token, &[]);
    listening.wait_for_log("3  order.paid  key=k0  {\"key\" : 0, \"n\" : 2}");
    feed.enqueue(3..5, 2);
    listening.wait_for_log("5  order.paid");
    listening.signal("INT");
    assert_eq!(listening.wait().code(), Some(0));
    let log = listening.log();
    assert!(
        log.contains("5 events at the positions 1 to 5 without a gap, 0 repeated, 0 out of order"),
        "{log}"
    );
    let next = feed.cursor(5);
    assert!(
        log.contains(&format!("to continue: --after {next}")),
        "{log}"
    );

    feed.enqueue(5..6, 2);
    let mut continued = listen(&feed, &token, &["--json", "--after", &next]);
    continued.wait_for_log("\"position\":6");
    continued.signal("TERM");
    assert_eq!(continued.wait().code(), Some(0));
    assert!(
        continued.log().contains("1 event at the positions 6 to 6"),
        "{}",
        continued.log()
    );

    // A server that is away is no quiet feed.
    let away = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
    let away = format!("http://{}/events", away.expect("a port"));
    let mut waits =
        feed.database
            .binary(&["listen", "--feed", &away, "--token-file", token.path()]);
    waits.env_remove("RUST_LOG");
    let mut waits = Running::start(waits);
    waits.wait_for_log("Connection refused");
    waits.signal("INT");
    assert_eq!(waits.wait().code(), Some(0));

    feed.expire(3);
    let third = format!("3.{}", Uuid::now_v7());
    for (arguments, says) in [
        (["--after", &third], "its database was restored"),
        (
            ["--after", "0"],
            "the first one that is kept has the position 4",
        ),
        (["--after", "soon"], "is not begin, end, a cursor or a time"),
        (["--port", "80"], "cannot be used with"),
    ] {
        let mut failed = listen(&feed, &token, &arguments);
        assert_ne!(failed.wait().code(), Some(0));
        assert!(failed.log().contains(says), "{}", failed.log());
    }
}

/// A server, or something before it, that lost an event.
#[test]
fn listen_finds_a_hole_and_disorder_in_a_feed() {
    let event = |position: i64, sequence: i64| {
        json!({
            "specversion": "1.0", "id": id(position % 3), "source": "/", "type": "t", "position": position.to_string(),
            "sequence": sequence.to_string(), "partitionkey": "k", "data": position,
        })
    };
    let first = json!([event(1, 7), event(2, 9), event(3, 8)]).to_string();
    let pages = AtomicUsize::new(0);
    let server = server(move |_| {
        match pages.fetch_add(1, Ordering::Relaxed) {
        0 => format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/cloudevents-batch+json\r\noutbox-feed-next: 3.{}\r\ncontent-length: {}\r\n\r\n{first}",
            id(0),
            first.len()
        )
        .into_bytes(),
        _ => batch(&[5], 5),
    }
    });
    let token = File::new("t");
    let mut command = crate::support::binary(&[
        "listen",
        "--feed",
        &server.url(),
        "--token-file",
        token.path(),
    ]);
    command.env("RUST_BACKTRACE", "0");
    let failed = finish(command);
    assert_ne!(failed.status.code(), Some(0));
    assert!(
        failed.stdout.contains("3  t  key=k  3  OUT OF ORDER"),
        "{}",
        failed.stdout
    );
    assert!(
        failed
            .stderr
            .contains("3 events at the positions 1 to 3 without a gap, 0 repeated, 1 out of order"),
        "{}",
        failed.stderr
    );
    assert!(
        failed.stderr.contains("expected the position 4, found 5"),
        "{}",
        failed.stderr
    );
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
    eventually("all events have it again", || effects().len() >= 2000);
    // What the server refuses ends the program.
    feed.database.execute("DELETE FROM {o}_feed_reader");
    feed.enqueue(1000..1001, 10);
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
