//! Events that settles write, readers read and retention empties, each at any moment.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::connection::SimpleConnection;
use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Timestamptz};
use diesel::{PgConnection, RunQueryDsl};
use uuid::Uuid;

use super::keeping;
use super::read::{self, FeedRow};
use super::store::{EventLog, make};
use super::token;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::settle::sql::into_feeds::store;
use crate::engine::settle::sql::log::Log;
use crate::engine::settle::sql::settle::{Claim, Delivered};
use crate::feed::Cursor;
use crate::feed::page::{After, Discontinued, FeedEvent, FeedPage, page};
use crate::name::OutboxName;
use crate::schema::values::system_time;
use crate::sql::statement::statement;
use crate::sql::tests::Outbox;

const LEASE: LeaseId = LeaseId(1);
const NEVER: Duration = Duration::from_secs(3600);

/// Registers an endpoint that is a feed.
fn register(conn: &mut PgConnection, outbox: &Outbox, feed: &str) -> FeedRow {
    let name = &outbox.name;
    let put = format!("INSERT INTO {name}_endpoint (name, kind) VALUES ('{feed}', 'feed')");
    conn.batch_execute(&put).expect("registered");
    let found = row(conn, outbox, feed);
    // As its first settle does.
    make(conn, name, &[feed], &[found.registration]).expect("made");
    row(conn, outbox, feed)
}

fn row(conn: &mut PgConnection, outbox: &Outbox, feed: &str) -> FeedRow {
    let found = read::feed(conn, &outbox.name, feed).expect("read");
    found.expect("the feed is there")
}

/// Enqueues and claims messages.
fn claim(conn: &mut PgConnection, outbox: &Outbox, count: usize) -> Vec<Claim> {
    let rows: Vec<(i64, PgTimestamp)> = statement(format!(
        "INSERT INTO {} (topic, payload, locked_by, locked_at)
         SELECT 'a', '1', 1, clock_timestamp() FROM generate_series(1, {count}) RETURNING sequence, locked_at",
        outbox.name.outbox()
    ))
    .giving::<(BigInt, Timestamptz)>()
    .load(conn)
    .expect("claimed");
    let claim = |(sequence, at): (i64, PgTimestamp)| Claim { sequence, at: at.0 };
    rows.into_iter().map(claim).collect()
}

fn delivered(claim: Claim, feed: &str, registration: Option<Uuid>) -> Delivered {
    Delivered {
        claim,
        destination: feed.into(),
        registration,
        http_status: None,
        response: None,
    }
}

/// Settles messages. Returns how many became events.
fn settle(conn: &mut PgConnection, outbox: &Outbox, messages: &[Delivered]) -> usize {
    let settled = store(conn, (&outbox.name, LEASE), messages, false, &EventLog);
    settled.expect("settled").len()
}

/// Stores so many events in the feed.
fn add(conn: &mut PgConnection, outbox: &Outbox, feed: &FeedRow, count: usize) {
    let claims = claim(conn, outbox, count).into_iter();
    let messages = claims.map(|claim| delivered(claim, &feed.name, feed.registration));
    let messages: Vec<Delivered> = messages.collect();
    assert_eq!(settle(conn, outbox, &messages), count);
}

fn number(conn: &mut PgConnection, query: &str) -> i64 {
    let number = statement(query.to_owned()).giving::<BigInt>();
    number.get_result(conn).expect("a number")
}

fn rotate(
    conn: &mut PgConnection,
    outbox: &Outbox,
    keep: Duration,
    most: Option<u64>,
) -> (i32, bool) {
    let done = keeping::rotate(conn, &outbox.name, keep, most).expect("rotated");
    done.expect("the outbox has feeds")
}

fn read_page(
    conn: &mut PgConnection,
    outbox: &Outbox,
    feed: &FeedRow,
    after: After,
) -> Result<FeedPage, Discontinued> {
    page((conn, &outbox.name), feed, after, 1000).expect("a page")
}

fn stored_at(event: &FeedEvent) -> SystemTime {
    system_time(PgTimestamp(event.stored_at))
}

fn positions(page: &FeedPage) -> Vec<i64> {
    page.events.iter().map(|event| event.position).collect()
}

/// R73: parts of fan-outs have the places of their messages. The comparison of the simulation hardly ever has two of a key.
#[test]
fn events_have_the_order_of_the_messages_that_were_fanned_out() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let feed = register(conn, &outbox, "a");
    let claims = claim(conn, &outbox, 4);
    let name = outbox.name.outbox();
    // The parts were placed in the reverse order; the last message is no part.
    let placed = format!("UPDATE {name} SET split_from = 10 - sequence WHERE sequence < 4");
    conn.batch_execute(&placed).expect("parts");
    let sequences: Vec<i64> = claims.iter().map(|claim| claim.sequence).collect();
    let messages = claims
        .into_iter()
        .map(|claim| delivered(claim, "a", feed.registration));
    assert_eq!(settle(conn, &outbox, &messages.collect::<Vec<_>>()), 4);
    let all = read_page(conn, &outbox, &feed, After::Begin).expect("all");
    let stored: Vec<i64> = all.events.iter().map(|event| event.sequence).collect();
    assert_eq!((sequences, stored), (vec![1, 2, 3, 4], vec![4, 3, 2, 1]));
}

/// R73
#[test]
fn old_events_are_emptied_and_positions_continue_behind_them() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let (a, b) = (register(conn, &outbox, "a"), register(conn, &outbox, "b"));
    let beginning = Cursor::START;
    add(conn, &outbox, &a, 10);
    add(conn, &outbox, &b, 3);
    let all = read_page(conn, &outbox, &a, After::Begin).expect("all");
    assert_eq!(positions(&all), (1..=10).collect::<Vec<_>>());
    let fifth = all.events[4].cursor();

    // The first call opens a part, the second one closes it.
    assert_eq!(rotate(conn, &outbox, NEVER, None), (0, false));
    assert_eq!(rotate(conn, &outbox, Duration::ZERO, None), (0, false));
    assert_eq!(rotate(conn, &outbox, NEVER, None), (0, false));
    assert_eq!(
        read_page(conn, &outbox, &a, After::Begin)
            .expect("all")
            .events
            .len(),
        10
    );

    // While somebody reads the part, it is left, and so are the rows of the feeds.
    let reader = &mut outbox.connect();
    reader
        .batch_execute(&format!("BEGIN; TABLE {}_feed_event", outbox.name))
        .expect("reads");
    assert_eq!(rotate(conn, &outbox, Duration::ZERO, None), (0, true));
    assert_eq!(row(conn, &outbox, "a").base, beginning);
    // So they are while a settle holds a feed.
    reader.batch_execute("ROLLBACK; BEGIN").expect("ended");
    let claims = claim(reader, &outbox, 1);
    settle(
        reader,
        &outbox,
        &[delivered(claims[0], "b", b.registration)],
    );
    assert_eq!(rotate(conn, &outbox, Duration::ZERO, None), (0, true));
    assert_eq!(row(conn, &outbox, "a").base, beginning);
    reader.batch_execute("ROLLBACK").expect("ended");

    assert_eq!(rotate(conn, &outbox, Duration::ZERO, None), (1, false));
    let emptied = row(conn, &outbox, "a");
    assert_eq!(emptied.base, all.next, "position and id of the last event");
    assert_eq!(row(conn, &outbox, "b").base.position(), 3);
    let none = read_page(conn, &outbox, &emptied, After::Cursor(all.next)).expect("caught up");
    assert_eq!((positions(&none), none.next), (Vec::new(), all.next));
    assert_eq!(
        read::last(conn, &outbox.name, &a).expect("last"),
        all.next,
        "with a row read before"
    );

    add(conn, &outbox, &a, 2);
    // Also with a row that was read before the events were emptied.
    for feed in [&a, &emptied] {
        let next = read_page(conn, &outbox, feed, After::Cursor(all.next)).expect("continues");
        assert_eq!(positions(&next), [11, 12]);
        assert_eq!(
            positions(&read_page(conn, &outbox, feed, After::Begin).expect("begins")),
            [11, 12]
        );
        let times = [UNIX_EPOCH, stored_at(&all.events[9])];
        let times = times.into_iter().map(After::Time);
        for after in [fifth, beginning]
            .map(After::Cursor)
            .into_iter()
            .chain(times)
        {
            let expired = read_page(conn, &outbox, feed, after);
            let first_position = 11;
            assert_eq!(
                expired.err(),
                Some(Discontinued::Expired { first_position })
            );
        }
    }
    // What was stored behind the last removed event is all there.
    let since = After::Time(stored_at(&all.events[9]) + Duration::from_micros(1));
    let since = read_page(conn, &outbox, &emptied, since).expect("continues");
    assert_eq!(positions(&since), [11, 12]);
    add(conn, &outbox, &b, 1);
    let b = row(conn, &outbox, "b");
    assert_eq!(
        positions(&read_page(conn, &outbox, &b, After::Begin).expect("begins")),
        [4]
    );
}

/// R73
#[test]
fn the_oldest_events_are_emptied_while_all_have_too_many_bytes() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let feed = register(conn, &outbox, "a");
    add(conn, &outbox, &feed, 3);
    let (few, many) = (Some(1), Some(1 << 30));
    assert_eq!(rotate(conn, &outbox, NEVER, few), (0, false));
    // Closes the part.
    assert_eq!(rotate(conn, &outbox, NEVER, few), (0, false));
    add(conn, &outbox, &feed, 3);
    assert_eq!(rotate(conn, &outbox, NEVER, many), (0, false));
    assert_eq!(
        read_page(conn, &outbox, &feed, After::Begin)
            .expect("all")
            .events
            .len(),
        6
    );
    assert_eq!(rotate(conn, &outbox, NEVER, few), (1, false));
    let feed = row(conn, &outbox, "a");
    let left = read_page(conn, &outbox, &feed, After::Begin).expect("the rest");
    assert_eq!(positions(&left), [4, 5, 6]);
    assert_eq!(feed.base.position(), 3);
}

/// R73: of the same state, the next settle would give positions twice: each part has an index of its own.
#[test]
fn positions_continue_if_the_parts_are_no_longer_known() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let feed = register(conn, &outbox, "a");
    add(conn, &outbox, &feed, 4);
    let (event, part) = (outbox.name.feed_event(), outbox.name.feed_part());
    // The ring has gone round: the first part has later events than another one, or earlier ones.
    for (later, earlier) in [(0, 3), (3, 0)] {
        let damage = format!(
            "UPDATE {event} SET part = CASE WHEN position <= 2 THEN {earlier} ELSE {later} END; DELETE FROM {part}"
        );
        conn.batch_execute(&damage).expect("damaged");
        add(conn, &outbox, &feed, 1);
        assert_eq!(rotate(conn, &outbox, NEVER, None), (0, false));
        let unknown =
            format!("SELECT count(*) FROM {part} WHERE (closed_at IS NULL) <> (part = 1)");
        assert_eq!(number(conn, &unknown), 5, "the parts 2 and 4 to 7");
        add(conn, &outbox, &feed, 1);
    }
    // A part with events that counts as never opened.
    let damage = format!("UPDATE {part} SET opened_at = NULL, closed_at = NULL WHERE part = 3");
    conn.batch_execute(&damage).expect("damaged");
    assert_eq!(rotate(conn, &outbox, NEVER, None), (0, false));
    let closed = format!("SELECT count(closed_at) FROM {part} WHERE part = 3");
    assert_eq!(number(conn, &closed), 1);
    add(conn, &outbox, &feed, 1);
    let all = read_page(conn, &outbox, &feed, After::Begin).expect("all");
    assert_eq!(positions(&all), (1..=9).collect::<Vec<_>>());
}

/// R73: a search by time needs this.
#[test]
fn times_of_events_do_not_fall_with_the_clock() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let feed = register(conn, &outbox, "a");
    add(conn, &outbox, &feed, 2);
    let event = outbox.name.feed_event();
    let ahead =
        format!("UPDATE {event} SET stored_at = stored_at + interval '1 hour' WHERE position = 2");
    conn.batch_execute(&ahead).expect("the clock was ahead");
    add(conn, &outbox, &feed, 2);
    // Also if that event was emptied.
    assert_eq!(rotate(conn, &outbox, NEVER, None), (0, false));
    assert_eq!(rotate(conn, &outbox, Duration::ZERO, None), (0, false));
    assert_eq!(rotate(conn, &outbox, Duration::ZERO, None), (1, false));
    let feed = row(conn, &outbox, "a");
    add(conn, &outbox, &feed, 1);
    let next = read_page(conn, &outbox, &feed, After::Begin).expect("the next one");
    assert_eq!(next.events[0].cursor().position(), 5);
    assert!(stored_at(&next.events[0]) > SystemTime::now() + Duration::from_secs(1800));
}

/// R73, R67: what one tenant was given does not open what another one gets.
#[test]
fn tokens_end_with_the_registration() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let name = &outbox.name;
    let endpoint = name.endpoint();
    let changes = [
        format!("UPDATE {endpoint} SET tenant_id = gen_random_uuid() WHERE name = 'a'"),
        format!(
            "DELETE FROM {endpoint} WHERE name = 'a'; INSERT INTO {endpoint} (name, kind) VALUES ('a', 'feed')"
        ),
    ];
    register(conn, &outbox, "a");
    for change in changes {
        token::add(conn, name, "a", "secret", NEVER).expect("a token");
        let rename = format!("UPDATE {endpoint} SET topics = ARRAY['b'] WHERE name = 'a'");
        conn.batch_execute(&rename).expect("changed");
        assert!(token::is_valid(conn, name, "a", "secret").expect("known"));
        conn.batch_execute(&change).expect("changed");
        assert!(
            !token::is_valid(conn, name, "a", "secret").expect("known"),
            "{change}"
        );
    }
    // An endpoint takes the name of a feed of the settings.
    make(conn, name, &["b"], &[None]).expect("made");
    token::add(conn, name, "b", "secret", NEVER).expect("a token");
    let put = format!("INSERT INTO {endpoint} (name, kind) VALUES ('b', 'feed')");
    conn.batch_execute(&put).expect("registered");
    assert!(!token::is_valid(conn, name, "b", "secret").expect("known"));
}

#[test]
fn the_row_of_a_removed_feed_goes_with_its_last_event() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let feed = register(conn, &outbox, "a");
    register(conn, &outbox, "b");
    make(conn, &outbox.name, &["c"], &[None]).expect("made");
    add(conn, &outbox, &feed, 2);
    let gone = format!("DELETE FROM {} WHERE name = 'a'", outbox.name.endpoint());
    conn.batch_execute(&gone).expect("removed");
    let rows = format!("SELECT count(*) FROM {}", outbox.name.feed());
    for (retention, emptied, left) in [
        (NEVER, 0, 3),
        (Duration::ZERO, 0, 3),
        (Duration::ZERO, 1, 2),
    ] {
        assert_eq!(rotate(conn, &outbox, retention, None), (emptied, false));
        assert_eq!(number(conn, &rows), left);
    }
}

/// A settle asks for the ends of its feeds once, not for each message: that took two thirds of its time.
#[test]
fn the_ends_of_feeds_are_asked_for_once() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let feeds = [register(conn, &outbox, "a"), register(conn, &outbox, "b")];
    let claims = claim(conn, &outbox, 20).into_iter().enumerate();
    let messages = claims.map(|(number, claim)| {
        let feed = &feeds[number % 2];
        delivered(claim, &feed.name, feed.registration)
    });
    let messages: Vec<Delivered> = messages.collect();
    conn.batch_execute("SET track_functions = 'pl'; BEGIN")
        .expect("counted");
    assert_eq!(settle(conn, &outbox, &messages), 20);
    let calls = statement(
        "SELECT calls FROM pg_stat_xact_user_functions WHERE funcname LIKE '%\\_feed\\_ends'"
            .to_owned(),
    );
    let calls: Vec<i64> = calls.giving::<BigInt>().load(conn).expect("the calls");
    assert_eq!(calls, [1]);
    conn.batch_execute("COMMIT").expect("settled");
}

/// R73: a transaction that may not see the last events of a name cannot give the name to somebody else.
#[test]
fn a_name_is_registered_again_only_where_its_last_event_is_seen() {
    let outbox = Outbox::new();
    let (conn, other) = (&mut outbox.connect(), &mut outbox.connect());
    let feed = register(conn, &outbox, "a");
    add(conn, &outbox, &feed, 2);
    let again = format!(
        "DELETE FROM {endpoint} WHERE name = 'a';
         INSERT INTO {endpoint} (name, kind, topics) VALUES ('a', 'feed', ARRAY['*'])",
        endpoint = outbox.name.endpoint(),
    );
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let begin = format!("BEGIN ISOLATION LEVEL {level}; SELECT 1");
        other.batch_execute(&begin).expect("a snapshot");
        add(conn, &outbox, &feed, 1);
        let refused = other.batch_execute(&again).expect_err("an old snapshot");
        assert!(
            refused.to_string().contains("in READ COMMITTED"),
            "{refused}"
        );
        other.batch_execute("ROLLBACK").expect("ended");
    }
    other.batch_execute("BEGIN; SELECT 1").expect("begun");
    add(conn, &outbox, &feed, 1);
    other.batch_execute(&again).expect("registered");
    other.batch_execute("COMMIT").expect("committed");
    assert_eq!(row(conn, &outbox, "a").base.position(), 5);
}

/// R73: a new primary that lacks the last commits stores the same event at the same position, behind another one.
#[test]
fn an_event_that_was_stored_again_does_not_continue_the_cursor_of_the_first_time() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let feed = register(conn, &outbox, "a");
    add(conn, &outbox, &feed, 3);
    let before = read_page(conn, &outbox, &feed, After::Begin).expect("all");
    let again = format!(
        "UPDATE {events} SET message_id = gen_random_uuid() WHERE position = 2;
         UPDATE {events} SET stored_at = clock_timestamp() WHERE position > 1",
        events = outbox.name.feed_event(),
    );
    conn.batch_execute(&again).expect("stored again");
    let after = read_page(conn, &outbox, &feed, After::Begin).expect("all");
    assert_eq!(
        before.events[2].message_id, after.events[2].message_id,
        "the same event"
    );
    let is_changed = |conn: &mut PgConnection, feed: &FeedRow, last_position| {
        let old = read_page(conn, &outbox, feed, After::Cursor(before.next));
        assert_eq!(old.err(), Some(Discontinued::Changed { last_position }));
        let new = read_page(conn, &outbox, feed, After::Cursor(after.next));
        let new = new.expect("continues");
        assert_eq!(positions(&new), (4..=last_position).collect::<Vec<_>>());
    };
    is_changed(conn, &feed, 3);
    // Also once the event was emptied.
    rotate(conn, &outbox, NEVER, None);
    rotate(conn, &outbox, Duration::ZERO, None);
    assert_eq!(rotate(conn, &outbox, Duration::ZERO, None), (1, false));
    let feed = row(conn, &outbox, "a");
    assert_eq!(feed.base, after.next);
    is_changed(conn, &feed, 3);
    add(conn, &outbox, &feed, 2);
    is_changed(conn, &feed, 5);
}

/// R73: a settle that is rolled back leaves no gap, and the next one waits for its end.
#[test]
fn a_rolled_back_settle_leaves_no_gap() {
    let outbox = Outbox::new();
    let (conn, other) = (&mut outbox.connect(), &mut outbox.connect());
    let feed = register(conn, &outbox, "a");
    for (ends, expected) in [("ROLLBACK", 1..=2), ("COMMIT", 1..=5)] {
        conn.batch_execute("BEGIN").expect("begun");
        add(conn, &outbox, &feed, 1);
        std::thread::scope(|scope| {
            let added = scope.spawn(|| add(other, &outbox, &feed, 2));
            let name = outbox.name.to_string();
            let schema = name.split('.').next().expect("a schema");
            let waits = format!(
                "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity s USING (pid)
                  WHERE NOT l.granted AND s.query LIKE '%{schema}%'",
            );
            let mut looks = outbox.connect();
            loop {
                let waiting: i64 = statement(waits.clone())
                    .giving::<BigInt>()
                    .get_result(&mut looks)
                    .expect("a number");
                if waiting > 0 {
                    break;
                }
                assert!(!added.is_finished(), "nobody waits");
            }
            conn.batch_execute(ends).expect("ended");
            added.join().expect("stored");
        });
        let all = read_page(conn, &outbox, &feed, After::Begin).expect("all");
        assert_eq!(positions(&all), expected.collect::<Vec<_>>());
    }
}

/// R73
#[test]
fn a_name_that_is_registered_again_does_not_show_earlier_events() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let first = register(conn, &outbox, "a");
    add(conn, &outbox, &first, 4);
    let late = claim(conn, &outbox, 1).remove(0);
    let read = read_page(conn, &outbox, &first, After::Begin).expect("all");
    let (second, third) = (read.events[1].cursor(), read.events[2].cursor());

    let gone = format!("DELETE FROM {}_endpoint WHERE name = 'a'", outbox.name);
    conn.batch_execute(&gone).expect("removed");
    assert!(read::feed(conn, &outbox.name, "a").expect("read").is_none());
    let again = register(conn, &outbox, "a");
    assert_ne!(again.registration, first.registration);
    let none = read_page(conn, &outbox, &again, After::Begin).expect("none");
    assert_eq!((positions(&none), none.next), (Vec::new(), read.next));
    // Nor by a cursor or a time of the earlier registration.
    for cursor in [second, third, Cursor::START] {
        let expired = read_page(conn, &outbox, &again, After::Cursor(cursor));
        assert_eq!(
            expired.err(),
            Some(Discontinued::Expired { first_position: 5 })
        );
    }
    let since = read_page(conn, &outbox, &again, After::Time(UNIX_EPOCH));
    let first_position = 5;
    assert_eq!(since.err(), Some(Discontinued::Expired { first_position }));
    let since = read_page(conn, &outbox, &again, After::Time(SystemTime::now())).expect("none");
    assert!(since.events.is_empty());

    // A message that was claimed for the earlier registration is no event of this one.
    let late = delivered(late, "a", first.registration);
    assert_eq!(settle(conn, &outbox, std::slice::from_ref(&late)), 0);
    let free = format!(
        "SELECT count(*) FROM {} WHERE locked_by IS NULL",
        outbox.name
    );
    assert_eq!(number(conn, &free), 1, "another claim finds out");
    // That a feed of the settings has the name of an endpoint is for people to mend.
    let of_settings = EventLog.mend(conn, &outbox.name, &[("a", None)]);
    assert!(of_settings.is_err());

    // A page that began before the name was registered again ends without the events of others.
    add(conn, &outbox, &again, 2);
    for after in [After::Begin, After::Cursor(read.next), After::Cursor(third)] {
        let page = read_page(conn, &outbox, &first, after).expect("a page");
        assert_eq!(positions(&page), Vec::<i64>::new(), "{after:?}");
    }
    let own = read_page(conn, &outbox, &again, After::Begin).expect("all");
    assert_eq!(positions(&own), [5, 6]);
}

/// The log of a relay that always comes too late to make a row.
#[derive(Debug)]
struct Late<'a>(&'a Outbox);

impl Log for Late<'_> {
    fn locks(&self, name: &OutboxName) -> String {
        EventLog.locks(name)
    }

    fn stores(&self, name: &OutboxName) -> String {
        EventLog.stores(name)
    }

    fn locked(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        feeds: &[&str],
    ) -> QueryResult<Vec<String>> {
        EventLog.locked(conn, name, feeds)
    }

    fn mend(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        feeds: &[(&str, Option<Uuid>)],
    ) -> QueryResult<()> {
        EventLog.mend(&mut self.0.connect(), name, feeds)?;
        EventLog.mend(conn, name, feeds)
    }
}

/// R73: otherwise they are locked until the relay ends.
#[test]
fn messages_become_events_if_another_relay_makes_the_row_of_the_feed() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let put = format!(
        "INSERT INTO {} (name, kind) VALUES ('b', 'feed')",
        outbox.name.endpoint()
    );
    conn.batch_execute(&put).expect("registered");
    let registration = row(conn, &outbox, "b").registration;
    for (feed, registration) in [("a", None), ("b", registration)] {
        let claims = claim(conn, &outbox, 2).into_iter();
        let messages = claims.map(|claim| delivered(claim, feed, registration));
        let messages: Vec<Delivered> = messages.collect();
        let log = Late(&outbox);
        let stored = store(conn, (&outbox.name, LEASE), &messages, false, &log);
        assert_eq!(stored.expect("stored").len(), 2);
    }
}

/// R73: whoever changes the endpoint moves only a row that is there. Its messages would be stored for nobody, and the later
/// ones never.
#[test]
fn a_row_is_made_only_for_the_registration_that_is_there() {
    let outbox = Outbox::new();
    let (conn, other) = (&mut outbox.connect(), &mut outbox.connect());
    let endpoint = outbox.name.endpoint();
    let put = format!("INSERT INTO {endpoint} (name, kind) VALUES ('a', 'feed')");
    conn.batch_execute(&put).expect("registered");
    let first = row(conn, &outbox, "a").registration;
    let message = delivered(claim(conn, &outbox, 1).remove(0), "a", first);
    // Another tenant gets it, and this is not committed yet.
    other
        .batch_execute(&format!(
            "BEGIN; UPDATE {endpoint} SET tenant_id = gen_random_uuid()"
        ))
        .expect("changed");
    conn.batch_execute("SET lock_timeout = '50ms'")
        .expect("set");
    let message = std::slice::from_ref(&message);
    let waited = store(conn, (&outbox.name, LEASE), message, false, &EventLog);
    assert!(waited.is_err(), "it is not known whose it is");
    let locked = EventLog.locked(conn, &outbox.name, &["a", "b"]);
    assert_eq!(locked, Ok(vec!["a".to_owned()]));
    other.batch_execute("COMMIT").expect("changed");
    assert_eq!(settle(conn, &outbox, message), 0);
    let free = format!(
        "SELECT count(*) FROM {} WHERE locked_by IS NULL",
        outbox.name
    );
    assert_eq!(number(conn, &free), 1, "another claim finds out");
    let rows = format!("SELECT count(*) FROM {}", outbox.name.feed());
    assert_eq!(number(conn, &rows), 0);
    let second = row(conn, &outbox, "a");
    assert_ne!(second.registration, first);
    add(conn, &outbox, &second, 1);
    // A row that names another registration all the same is for people.
    let wrong = format!(
        "UPDATE {} SET registration = gen_random_uuid()",
        outbox.name.feed()
    );
    conn.batch_execute(&wrong).expect("changed");
    let message = delivered(claim(conn, &outbox, 1).remove(0), "a", second.registration);
    let message = std::slice::from_ref(&message);
    let refused = store(conn, (&outbox.name, LEASE), message, false, &EventLog);
    assert!(refused.is_err());
}

/// R73, R67: also if somebody has deleted the row of the feed.
#[test]
fn a_feed_without_a_row_shows_no_earlier_events() {
    let outbox = Outbox::new();
    let conn = &mut outbox.connect();
    let feed = register(conn, &outbox, "a");
    add(conn, &outbox, &feed, 3);
    let emptied = format!(
        "DELETE FROM {} WHERE position = 1",
        outbox.name.feed_event()
    );
    let gone = format!("DELETE FROM {}", outbox.name.feed());
    let again = format!(
        "DELETE FROM {endpoint}; INSERT INTO {endpoint} (name, kind) VALUES ('a', 'feed')",
        endpoint = outbox.name.endpoint()
    );
    for change in [emptied + ";" + &gone, again] {
        conn.batch_execute(&change).expect("changed");
        let now = row(conn, &outbox, "a");
        let none = read_page(conn, &outbox, &now, After::Begin).expect("a page");
        assert_eq!((positions(&none), none.next.position()), (Vec::new(), 3));
    }
    let now = row(conn, &outbox, "a");
    add(conn, &outbox, &now, 1);
    let own = read_page(conn, &outbox, &now, After::Begin).expect("a page");
    assert_eq!(positions(&own), [4]);
}

/// R73: settlers that take the same feeds in any order do not lock each other out, and leave no gap.
#[test]
fn settlers_of_many_feeds_at_once_do_not_lock_one_another_out() {
    const SETTLERS: usize = 4;
    const ROUNDS: usize = 12;
    for feeds in [1, 200] {
        let outbox = Outbox::new();
        let conn = &mut outbox.connect();
        let names: Vec<String> = (0..feeds).map(|number| format!("feed-{number}")).collect();
        let all: Vec<&str> = names.iter().map(String::as_str).collect();
        make(conn, &outbox.name, &all, &vec![None; feeds]).expect("feeds");
        let settler = |number: usize| {
            let (conn, names) = (&mut outbox.connect(), &names);
            let mut rng = fastrand::Rng::with_seed(number as u64);
            for _ in 0..ROUNDS {
                let claims = claim(conn, &outbox, 50);
                let to = |claim| delivered(claim, &names[rng.usize(..feeds)], None);
                let messages: Vec<Delivered> = claims.into_iter().map(to).collect();
                assert_eq!(settle(conn, &outbox, &messages), messages.len());
            }
        };
        std::thread::scope(|scope| {
            let settlers = (0..SETTLERS).map(|number| scope.spawn(move || settler(number)));
            let settlers: Vec<_> = settlers.collect();
            settlers
                .into_iter()
                .for_each(|one| one.join().expect("no deadlock"));
        });
        let mut count = 0;
        for name in &names {
            let feed = row(conn, &outbox, name);
            let page = read_page(conn, &outbox, &feed, After::Begin).expect("all");
            let last = i64::try_from(page.events.len()).expect("a count");
            assert_eq!(positions(&page), (1..=last).collect::<Vec<_>>());
            count += page.events.len();
        }
        // A page has at most 1,000 events.
        let most = SETTLERS * ROUNDS * 50;
        assert_eq!(count, if feeds == 1 { 1000 } else { most });
        let live = statement(format!("SELECT count(*) FROM {}", outbox.name.outbox()));
        assert_eq!(live.giving::<BigInt>().get_result::<i64>(conn), Ok(0));
    }
}

/// R73: readers that read while others store and empty events have no gap and no event twice, and are told 410 at most.
#[test]
fn readers_have_no_gap_while_events_are_stored_and_emptied() {
    const EVENTS: usize = 200;
    let outbox = Outbox::new();
    let feed = register(&mut outbox.connect(), &outbox, "a");
    let (ends, expired, pages) = (
        AtomicBool::new(false),
        AtomicUsize::new(0),
        AtomicUsize::new(0),
    );
    let last = i64::try_from(EVENTS).expect("a count");
    let has_all = |after: After| matches!(after, After::Cursor(at) if at.position() >= last);
    let reader = |seed: u64| {
        let conn = &mut outbox.connect();
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut after, mut ids) = (After::Begin, BTreeMap::new());
        while !has_all(after) {
            let feed = row(conn, &outbox, "a");
            // The rest of the page is read after what happens meanwhile.
            let stored = || read::last(&mut outbox.connect(), &outbox.name, &feed).expect("last");
            let before = stored();
            while rng.u8(..3) > 0 && before == stored() && before.position() < last {}
            match page((&mut *conn, &outbox.name), &feed, after, 5).expect("a page") {
                Ok(page) => {
                    let mut next = match after {
                        After::Cursor(at) => Some(at.position() + 1),
                        _ => None,
                    };
                    for event in &page.events {
                        assert!(
                            next.is_none_or(|next| next == event.position),
                            "{next:?}: {event:?}"
                        );
                        assert!(ids.insert(event.message_id, event.position).is_none());
                        next = Some(event.position + 1);
                    }
                    after = After::Cursor(page.next);
                }
                Err(Discontinued::Expired { first_position }) => {
                    assert!(
                        matches!(after, After::Cursor(at) if at.position() < first_position - 1)
                    );
                    expired.fetch_add(1, Ordering::Relaxed);
                    after = After::Begin;
                }
                Err(changed) => panic!("nothing was restored: {changed:?}"),
            }
            pages.fetch_add(1, Ordering::Relaxed);
        }
        ids.len()
    };
    std::thread::scope(|scope| {
        let reader = &reader;
        let readers: Vec<_> = (0..2)
            .map(|seed| scope.spawn(move || reader(seed)))
            .collect();
        let cleaner = scope.spawn(|| {
            let conn = &mut outbox.connect();
            let mut parts = 0;
            while !ends.load(Ordering::Relaxed) {
                let before = pages.load(Ordering::Relaxed);
                parts += rotate(conn, &outbox, Duration::ZERO, None).0;
                while pages.load(Ordering::Relaxed) == before && !ends.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
            }
            parts
        });
        let conn = &mut outbox.connect();
        for _ in 0..EVENTS / 4 {
            add(conn, &outbox, &feed, 4);
        }
        for reader in readers {
            assert!(reader.join().expect("no gap") > 0, "it has read something");
        }
        ends.store(true, Ordering::Relaxed);
        assert!(cleaner.join().expect("emptied") > 1);
    });
    assert!(
        expired.into_inner() > 0,
        "events were emptied behind a reader"
    );
}
