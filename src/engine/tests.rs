//! Dispatchers for unit tests, and tests of relays whose outbox has too many rows or dead index entries for one
//! statement. The tests use a small statement limit instead of a huge outbox.

use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::{PgConnection, RunQueryDsl, sql_query};

use super::claim::doubt::RanBy;
use super::host::RelayHandle;
use super::lease::sql::backend::Backend;
use crate::builder::{Dispatchers, Relay};
use crate::config::Config;
use crate::dispatch::{Dispatcher, Outcome, Response};
use crate::handlers::{Connections, HandlerGroup, Handlers, no_connection};
use crate::message::Message;
use crate::sql::tests::Outbox;
use crate::testing::RecordingDispatcher;

/// Longer than ordinary claims, which take a few milliseconds.
const LIMIT: Duration = Duration::from_millis(60);
/// More rows than a server reads in that time, with a few rows on each page.
const MANY: usize = 80_000;
const WIDE: &str = "to_json(repeat('x', 1500))";
const PATIENCE: Duration = Duration::from_secs(120);

impl Dispatchers {
    /// Dispatchers that send nothing: one for each destination or, without destinations, one for all messages. Groups
    /// without handlers.
    pub(crate) fn idle(config: &Config) -> Self {
        struct Idle;
        impl Dispatcher for Idle {
            fn dispatch(&self, _: &Message) -> Outcome {
                Outcome::Delivered(Response::default())
            }
        }
        let idle = || -> Arc<dyn Dispatcher> { Arc::new(Idle) };
        let urls: Vec<_> = config.all_destinations().iter().map(|_| idle()).collect();
        Self {
            rest: urls.is_empty().then(idle),
            urls,
            groups: (config.in_process.iter())
                .map(|group| Arc::new(without_handlers(&group.name)))
                .collect(),
            clients: None,
        }
    }
}

fn without_handlers(name: &str) -> HandlerGroup {
    let pool = || Err(no_connection("there is no pool"));
    let connections = Connections::new(Arc::new(pool), metrics::Gauge::noop());
    let (inbox, timeout) = (name.to_owned(), LIMIT);
    HandlerGroup::new(name, inbox, timeout, Handlers::new(), Arc::new(connections))
}

struct Ground {
    outbox: Outbox,
    conn: PgConnection,
    receiver: RecordingDispatcher,
}

impl Ground {
    fn new() -> Self {
        let outbox = Outbox::new();
        let mut conn = outbox.connect();
        conn.batch_execute("SET statement_timeout = '120s'")
            .expect("a limit");
        Self {
            conn,
            outbox,
            receiver: RecordingDispatcher::new(),
        }
    }

    fn relay(&self) -> RelayHandle {
        let builder = Relay::builder(self.outbox.url.clone())
            .outbox(&self.outbox.name.to_string())
            .dispatcher(self.receiver.clone())
            .poll_interval(Duration::from_millis(50))
            .claim_limit(LIMIT);
        builder.start().expect("a relay")
    }

    fn run(&mut self, sql: &str) {
        let sql = sql.replace("{outbox}", &self.outbox.name.outbox());
        self.conn.batch_execute(&sql).expect("a statement");
    }

    fn arrived(&self, topic: &str) -> usize {
        let messages = self.receiver.messages();
        messages.iter().filter(|one| one.topic == topic).count()
    }

    fn wait(&self, topic: &str, count: usize) {
        let began = Instant::now();
        while self.arrived(topic) < count {
            let arrived = self.arrived(topic);
            assert!(
                began.elapsed() < PATIENCE,
                "{arrived} of {count} {topic} have arrived"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(self.arrived(topic), count, "{topic}: none twice");
    }
}

/// R13: the messages of a claim whose result was lost are found in an outbox of any size, and claims continue
/// meanwhile.
#[test]
fn messages_of_a_lost_answer_are_released_however_large_the_outbox_is() {
    let mut ground = Ground::new();
    ground.run(&format!(
        "INSERT INTO {{outbox}} (topic, payload, available_at)
         SELECT 'later', {WIDE}, now() + interval '1 day' FROM generate_series(1, {MANY})"
    ));
    let relay = ground.relay();
    let lease = relay.shared().lease.current().expect("a lease");
    ground.run(&format!(
        "INSERT INTO {{outbox}} (topic, payload, locked_by, locked_at)
         SELECT 'lost', '1', {lease}, now() FROM generate_series(1, 100)"
    ));
    // A server process that no longer exists.
    let backend = Backend {
        pid: i32::MAX,
        started: 0,
    };
    let ran_by = RanBy::from(Some(backend));
    relay.shared().custody.begin_doubt(lease, ran_by);
    ground.run(
        "INSERT INTO {outbox} (topic, payload) SELECT 'new', '1' FROM generate_series(1, 100)",
    );
    ground.wait("new", 100);
    ground.wait("lost", 100);
    assert!(relay.wait_until_idle(PATIENCE), "nothing is left");
    assert_eq!(relay.shared().custody.doubt(), None);
    assert_eq!(relay.shared().lease.current(), Some(lease));
    relay.shutdown(PATIENCE).expect("an end");
    let left = sql_query(format!(
        "SELECT FROM {} WHERE topic <> 'later' OR attempts > 0 OR locked_by IS NOT NULL",
        ground.outbox.name.outbox()
    ));
    assert_eq!(left.execute(&mut ground.conn), Ok(0));
}

/// G2, R9: because of an old snapshot, surveys, sweeps and the walk read dead index entries for longer than a statement
/// may take. Messages of new and old topics still arrive, including late messages.
#[test]
fn messages_arrive_where_no_statement_gets_past_dead_entries() {
    let mut ground = Ground::new();
    ground.run(&format!(
        "INSERT INTO {{outbox}} (topic, ordering_key, payload)
         SELECT 'busy', CASE WHEN n % 3 = 0 THEN 'key-' || n END, {WIDE} FROM generate_series(1, {MANY}) n"
    ));
    let mut old = ground.outbox.connect();
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        .expect("a snapshot");
    let late = format!(
        "BEGIN; INSERT INTO {} (topic, payload) SELECT 'late', '1' FROM generate_series(1, 10)",
        ground.outbox.name.outbox()
    );
    let mut producer = ground.outbox.connect();
    producer.batch_execute(&late).expect("inserted");
    ground.run("DELETE FROM {outbox}");
    let insert = "INSERT INTO {outbox} (topic, ordering_key, payload)
        SELECT topic, CASE WHEN is_keyed THEN 'key-' || n END, '1'
          FROM generate_series(1, 50) n, unnest(ARRAY['busy', 'above', 'yet-another']) topic,
               unnest(ARRAY[true, false]) is_keyed";
    ground.run(insert);
    let relay = ground.relay();
    for topic in ["busy", "above", "yet-another"] {
        ground.wait(topic, 100);
    }
    ground.run(insert);
    for topic in ["busy", "above", "yet-another"] {
        ground.wait(topic, 200);
    }
    producer.batch_execute("COMMIT").expect("committed");
    ground.wait("late", 10);
    assert!(relay.wait_until_idle(PATIENCE), "nothing is left");
    relay.shutdown(PATIENCE).expect("an end");
    old.batch_execute("COMMIT").expect("the snapshot's end");
}

/// R14: other relays shorten the lease, but their commit is slow. Until the commit, a check does not see the change.
#[test]
fn a_relay_that_comes_back_sends_nothing_while_others_are_about_to_shorten_its_lease() {
    let mut ground = Ground::new();
    let builder = Relay::builder(ground.outbox.url.clone())
        .outbox(&ground.outbox.name.to_string())
        .dispatcher(ground.receiver.clone())
        .lease(Duration::from_secs(24))
        .send_timeout(Duration::from_secs(1));
    let relay = builder.start().expect("a relay");
    let lease = relay.shared().lease.current().expect("a lease");
    let table = ground.outbox.name.lease();
    let mut other = ground.outbox.connect();
    let has_lock = format!("SELECT FROM {table} WHERE takeover_after IS NOT NULL");
    until("the relay's session holds the lock", || {
        sql_query(&has_lock).execute(&mut other) == Ok(1)
    });
    // The same as the survey of another relay, without the commit.
    let shorten =
        format!("BEGIN; UPDATE {table} SET expires_at = clock_timestamp() + takeover_after");
    other.batch_execute(&shorten).expect("shortened");
    ground.run(&format!(
        "SELECT pg_terminate_backend(pid) FROM pg_locks
          WHERE locktype = 'advisory' AND (classid::bigint << 32) + objid::bigint = {lease}"
    ));
    // A check is valid for a twelfth of the lease (2 s). The next renewal is due after 8 s.
    let began = Instant::now();
    until("the relay starts no send", || {
        relay.shared().lease.left().is_zero()
    });
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "later than the validity of a check"
    );
    other.batch_execute("COMMIT").expect("an end");
    relay.shutdown(PATIENCE).expect("an end");
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(
            began.elapsed() < PATIENCE,
            "not within {PATIENCE:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
