//! Consumers of feeds: the reader, `feed::consume`, `listen --feed` and the example in Python (R74).

mod consumers;

use std::collections::HashMap;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::sql_types::{BigInt, Text};
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::feed::{self, After, ConsumeError, ReadError, Reader};
use diesel_outbox::receive::CloudEvent;
use diesel_outbox::{Backoff, inbox};
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

    let token = File::new(&feed.token);
    let mut command = listening(&away, &token, &[]);
    command.env("OUTBOX_PROXY", proxy.url());
    Running::start(command).wait_for_log("3  order.paid");

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

// --- listen --feed ------------------------------------------------------------------------

fn listen(feed: &Feed, token: &File, arguments: &[&str]) -> Running {
    Running::start(listening(&feed.url(), token, arguments))
}

fn listening(url: &str, token: &File, arguments: &[&str]) -> Command {
    // The log has both outputs.
    let mut command = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_diesel-outbox");
    command.args(["-c", r#"exec "$0" "$@" >&2"#, program, "listen", "--feed"]);
    command
        .args([url, "--token-file", token.path()])
        .args(arguments);
    command
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
