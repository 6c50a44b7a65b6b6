//! The table of the inbox: how it is created, and when messages are forgotten.

use std::time::Duration;

use diesel::PgConnection;
use diesel::connection::SimpleConnection;
use diesel::result::QueryResult;
use diesel_outbox::inbox::{self, Once};
use uuid::Uuid;

use crate::fresh::FreshDatabase;
use crate::support::{Receiver, Running, binary, end, eventually};

/// A database whose inbox has `count` messages handled two days ago, and one handled just now.
fn with_old_messages(count: usize) -> FreshDatabase {
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    diesel_outbox::migrate(conn, &"outbox".parse().expect("a name")).expect("migrations run");
    add_old(&database, count);
    inbox::once(conn, "young", 1, |_| QueryResult::Ok(())).expect("handled");
    database
}

fn add_old(database: &FreshDatabase, count: usize) {
    database.execute(&format!(
        "INSERT INTO outbox_inbox SELECT 'old', n, now() - interval '2 days' - n * interval '1 ms'
           FROM generate_series(1, {count}) n"
    ));
}

fn rows(database: &FreshDatabase, source: &str) -> i64 {
    database.number(&format!(
        "SELECT count(*) FROM outbox_inbox WHERE source = '{source}'"
    ))
}

const DAY: Duration = Duration::from_secs(24 * 3600);

/// R33.
#[test]
fn old_messages_are_forgotten_and_younger_ones_never() {
    let database = with_old_messages(2500);
    let conn = &mut database.connect();
    assert_eq!(inbox::clean(conn, 3 * DAY), Ok(0));
    assert_eq!(inbox::clean(conn, Duration::MAX), Ok(0));
    assert_eq!(inbox::clean(conn, DAY), Ok(2500));
    assert_eq!(inbox::clean(conn, DAY), Ok(0));
    assert_eq!((rows(&database, "old"), rows(&database, "young")), (0, 1));

    // A forgotten message is new, a kept message is a duplicate.
    let again = |conn: &mut PgConnection, source| {
        inbox::once(conn, source, 1, |_| QueryResult::Ok(())).expect("a database")
    };
    assert_eq!(again(conn, "old"), Once::Handled(()));
    assert_eq!(again(conn, "young"), Once::Duplicate);
}

/// R33.
#[test]
fn the_relay_cleans_the_inbox_when_a_retention_is_set() {
    let database = with_old_messages(1500);
    let old_ledger_row = |key: &str| {
        database.execute(&format!(
            "INSERT INTO outbox_ledger (part, idempotency_key, destination, sequence, message_id, topic, digest, status, attempts, created_at, settled_at)
             VALUES (coalesce((SELECT part FROM outbox_part WHERE opened_at IS NOT NULL AND closed_at IS NULL), 0), '{key}', '', 1, gen_random_uuid(), 't', '', 'delivered', 1, now(), now() - interval '9 days')"
        ));
        eventually("the ledger is cleaned", || {
            database.number("SELECT count(*) FROM outbox_ledger") == 0
        });
    };
    let receiver = Receiver::ok();
    let relay = |retention: Option<Duration>| {
        let builder = diesel_outbox::Relay::builder(&database.url)
            .retention(Some(Duration::from_secs(1)))
            .url(&receiver.url());
        let builder = match retention {
            Some(retention) => builder.configure(|config| config.inbox_retention = Some(retention)),
            None => builder,
        };
        builder.start().expect("a relay")
    };
    let end = |relay: diesel_outbox::RelayHandle| {
        end(&relay);
    };

    let keeping = relay(None);
    // The cleaner has finished one round and begun another.
    old_ledger_row("a");
    old_ledger_row("b");
    assert_eq!(rows(&database, "old"), 1500);
    end(keeping);

    // A relay cleans again after half of a short retention. Whatever the machine does, the young row stays younger.
    database.execute(
        "UPDATE outbox_inbox SET handled_at = now() + interval '1 day' WHERE source = 'young'",
    );
    let cleaning = relay(Some(Duration::from_secs(4)));
    eventually("the inbox is cleaned", || rows(&database, "old") == 0);
    add_old(&database, 1);
    eventually("the inbox is cleaned again", || rows(&database, "old") == 0);
    assert_eq!(rows(&database, "young"), 1);
    assert!(cleaning.is_healthy());
    end(cleaning);
}

/// The binary as a relay that cleans the inbox, connected as `role` if given.
fn cleaning_relay(database: &FreshDatabase, receiver: &Receiver, role: Option<&str>) -> Running {
    let mut relay = binary(&["run"]);
    let url = match role {
        Some(role) => format!("{}?options=-c%20role%3D{role}", database.url),
        None => database.url.clone(),
    };
    relay
        .env("DATABASE_URL", url)
        .env("OUTBOX_URL", receiver.url())
        .env("OUTBOX_INBOX_RETENTION", "1s")
        .env("OUTBOX_POLL_INTERVAL", "50ms");
    Running::start(relay)
}

/// The relay reports once what is missing, delivers, and cleans as soon as `mend` was run.
fn says_so_once_and_continues(
    database: &FreshDatabase,
    role: Option<&str>,
    said: &str,
    mend: &str,
) {
    let receiver = Receiver::ok();
    let relay = cleaning_relay(database, &receiver, role);
    relay.wait_for_log(said);
    for count in 1..=2 {
        database.execute("INSERT INTO outbox (topic, payload) VALUES ('a', '1')");
        receiver.wait_for(count);
    }
    database.execute(mend);
    eventually("the inbox is cleaned", || rows(database, "old") == 0);
    let log = relay.log();
    assert_eq!(log.matches("cannot clean the inbox").count(), 1, "{log}");
    assert!(!log.contains("the database failed"), "{log}");
}

#[test]
fn a_relay_that_cannot_clean_the_inbox_says_so_once_and_delivers() {
    let database = with_old_messages(1);
    database.execute("ALTER TABLE outbox_inbox RENAME TO away");
    let said = "there is no table outbox_inbox";
    says_so_once_and_continues(
        &database,
        None,
        said,
        "ALTER TABLE away RENAME TO outbox_inbox",
    );

    add_old(&database, 1);
    let role = format!("relay_{}", Uuid::now_v7().simple());
    database.execute(&format!(
        "CREATE ROLE {role}; GRANT USAGE ON SCHEMA public TO {role};
         GRANT ALL ON ALL TABLES IN SCHEMA public TO {role};
         GRANT EXECUTE ON FUNCTION outbox_rotate(interval), outbox_blank(timestamptz, timestamptz, integer), outbox_feed_rotate(interval, bigint) TO {role};
         REVOKE DELETE ON outbox_inbox FROM {role}"
    ));
    let said = "needs SELECT and DELETE on outbox_inbox";
    let mend = format!(
        "GRANT DELETE ON outbox_inbox TO {role}; REVOKE UPDATE ON outbox_inbox FROM {role}"
    );
    says_so_once_and_continues(&database, Some(&role), said, &mend);
    database.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

// --- The table ----------------------------------------------------------------------------

/// R33.
#[test]
fn a_database_without_an_outbox_can_have_an_inbox() {
    let database = FreshDatabase::new();
    let before = database.objects();
    let create = |_| {
        let mut conn = database.connect();
        std::thread::spawn(move || inbox::create(&mut conn))
    };
    // Two creations at once, and a third.
    for creation in [0, 1, 2].map(create) {
        creation.join().expect("no panic").expect("created");
    }
    let conn = &mut database.connect();
    inbox::create(conn).expect("it is there");
    // The table, its primary key and its index; the positions in feeds, and their primary key.
    assert_eq!(database.objects(), before + 5);
    inbox::once(conn, "a", 1, |_| QueryResult::Ok(())).expect("handled");

    // A later outbox adopts the inbox with its content.
    let done = diesel_outbox::migrate(conn, &"outbox".parse().expect("a name"));
    let done = done.expect("migrations run").join("\n");
    assert!(done.contains("found 2026-11-21-000003_inbox"), "{done}");
    assert_eq!(rows(&database, "a"), 1);

    let other = FreshDatabase::new();
    let sql = inbox::migration_sql;
    use diesel_outbox::Direction::{Down, Up};
    other.execute(sql(Up));
    inbox::once(&mut other.connect(), "a", 1, |_| QueryResult::Ok(())).expect("handled");
    other.execute(sql(Down));
    assert_eq!(other.objects(), before);
}

#[test]
fn the_table_takes_what_the_library_takes() {
    let database = with_old_messages(1);
    for values in [
        "'', 'a'",
        "'a', ''",
        "repeat('x', 1025), 'a'",
        "'a', repeat('x', 1025)",
    ] {
        let error = database
            .connect()
            .batch_execute(&format!(
                "INSERT INTO outbox_inbox (source, message_id) VALUES ({values})"
            ))
            .expect_err(values);
        assert!(error.to_string().contains("has_a_length"), "{error}");
    }
}

/// The pages of the inbox and its indexes that were read.
const PAGES: &str = "SELECT heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read
    FROM pg_statio_user_tables WHERE relname = 'outbox_inbox'";
/// The entries of the index by time that were read.
const ENTRIES: &str =
    "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'outbox_inbox_handled'";

/// How much of this statistic `work` adds.
fn read(database: &FreshDatabase, what: &str, work: impl FnOnce(&mut PgConnection)) -> i64 {
    let before = database.statistic(what);
    work(&mut database.connect());
    database.statistic(what) - before
}

/// R33.
#[test]
fn finding_nothing_old_reads_a_handful_of_pages() {
    let database = with_old_messages(20_000);
    let forgotten = |conn: &mut PgConnection| inbox::clean(conn, DAY).expect("a database");
    let pages = read(&database, PAGES, |conn| assert_eq!(forgotten(conn), 20_000));
    assert!(pages > 20_000, "{pages}");
    // After a retention period, younger rows take the place of the old ones.
    database.execute("VACUUM outbox_inbox");
    database.execute(
        "INSERT INTO outbox_inbox SELECT 'young', n, now() FROM generate_series(2, 20000) n",
    );
    database.execute("VACUUM ANALYZE outbox_inbox");
    let size = database.number("SELECT pg_relation_size('outbox_inbox') / 8192");
    assert!(size > 100, "{size} pages");
    let pages = read(&database, PAGES, |conn| assert_eq!(forgotten(conn), 0));
    assert!(pages <= 10, "{pages} of {size} pages");
}

/// R33.
#[test]
fn an_old_row_is_read_once_also_while_a_snapshot_keeps_all_of_them() {
    let database = with_old_messages(10_000);
    database.execute("ANALYZE outbox_inbox");
    let reader = &mut database.connect();
    reader
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        .expect("a snapshot");
    let entries = read(&database, ENTRIES, |conn| {
        assert_eq!(inbox::clean(conn, DAY), Ok(10_000));
    });
    assert!((10_000..10_100).contains(&entries), "{entries}");
}
