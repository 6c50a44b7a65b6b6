//! Pages while the database is slow or away.

use super::*;

#[derive(QueryableByName)]
struct LastQuery {
    #[diesel(sql_type = Nullable<Text>)]
    at: Option<String>,
}

/// R32: a page that an operator keeps reloading costs the database next to nothing.
#[test]
fn pages_share_what_one_of_them_has_seen() {
    let database = outbox_alone();
    let page = open_alone(&database);
    let mut conn = database.connect();
    let began = Instant::now();
    let mut looks = BTreeSet::new();
    for _ in 0..100 {
        assert_eq!(page.get("/").status, 200);
        let last = sql_query(
            "SELECT max(query_start)::text AS at FROM pg_stat_activity
              WHERE pid <> pg_backend_pid() AND datname = current_database()",
        );
        looks.insert(last.get_result::<LastQuery>(&mut conn).expect("a row").at);
    }
    // One query every two seconds for the pages, the sampler's queries, and readings in the middle of a query.
    let most = 20 + 2 * began.elapsed().as_secs();
    assert!(looks.len() as u64 <= most, "{} queries", looks.len());
}

/// R60: also if many ask for the slow page, and if a change waits for a lock.
#[test]
fn a_slow_page_and_a_slow_change_delay_no_others() {
    let database = Database::new();
    database.execute("INSERT INTO {o}_endpoint (name, url) VALUES ('acme', 'https://a.example')");
    bury(&database, "order.paid", 1, 1);
    let page = open(&database);
    let token = page.get("/dead").form_token();
    let form = |fields: &str| format!("form_token={token}&{fields}");
    let (mut other, name) = (database.connect(), database.name());
    other
        .batch_execute(&format!(
            "BEGIN; LOCK TABLE {name}_attempt; SELECT FROM {name}_endpoint FOR UPDATE"
        ))
        .expect("locks");
    let waiting = || {
        database.number("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE '%admin%'")
    };
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| page.get("/messages?q=1"));
        }
        threads.spawn(|| {
            page.post(
                "/endpoint/disable",
                "",
                &form("name=acme&reason=they+asked"),
            )
        });
        eventually("a page and a change wait for the locks", || waiting() >= 2);
        for path in ["/", "/audit", "/ledger", "/dead"] {
            let began = Instant::now();
            assert_eq!(page.get(path).status, 200, "{path}");
            assert!(
                began.elapsed() < Duration::from_secs(1),
                "{path}: {:?}",
                began.elapsed()
            );
        }
        let pause = form("kind=topic&name=order.paid&reason=stop");
        let began = Instant::now();
        assert_eq!(page.post("/pause", "", &pause).status, 303);
        assert!(
            began.elapsed() < Duration::from_secs(1),
            "{:?}",
            began.elapsed()
        );
        other.batch_execute("COMMIT").expect("unlocked");
    });
}

/// An open page does not repeat a search that takes seconds.
#[test]
fn a_slow_search_runs_once() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 1);
    let page = open(&database);
    let paths = ["/messages?q=1", "/dead?q=1"];
    for path in paths {
        assert!(page.get(path).body.contains("data-live"), "{path}");
    }
    for path in paths {
        let mut other = database.connect();
        let lock = format!(
            "BEGIN; LOCK TABLE {0}; SELECT pg_sleep(1); COMMIT",
            database.name()
        );
        let holding = std::thread::spawn(move || other.batch_execute(&lock).expect("a lock"));
        eventually("the table is locked", || {
            database.number(
                "SELECT count(*) FROM pg_locks
                  WHERE relation = '{o}'::regclass AND mode = 'AccessExclusiveLock' AND granted",
            ) == 1
        });
        let answer = page.get(path);
        assert_eq!(answer.status, 200);
        assert!(!answer.body.contains("data-live"), "{path}");
        holding.join().expect("no panic");
    }
}

/// A database with only an outbox in it.
fn outbox_alone() -> FreshDatabase {
    let database = FreshDatabase::new();
    let name = "outbox".parse().expect("a name");
    diesel_outbox::migrate(&mut database.connect(), &name).expect("an outbox");
    database
}

fn open_alone(database: &FreshDatabase) -> Page {
    let mut command = binary(&["admin"]);
    command.env("DATABASE_URL", &database.url);
    Page::start(command)
}

#[test]
fn without_a_database_pages_say_so_and_come_back_with_it() {
    let database = outbox_alone();
    let page = open_alone(&database);
    assert_eq!(page.get("/").status, 200);

    database.close();
    eventually("the overview reports the outage", || {
        page.get("/").status == 503
    });
    let body = page.get("/").body;
    assert!(
        body.contains("Status unknown: the outbox cannot be read."),
        "{body}"
    );
    assert!(
        body.contains("when the database last responded") && body.contains("Topics"),
        "{body}"
    );
    for path in ["/dead", "/ledger", "/keys", "/relays", "/messages?q=1"] {
        let answer = page.get(path);
        assert_eq!(answer.status, 503, "{path}");
        let reason = "not currently accepting connections";
        assert!(answer.body.contains(reason), "{}", answer.body);
    }
    database.open();
    eventually("the overview is back", || page.get("/").status == 200);
    assert_eq!(page.get("/dead").status, 200);
}

#[test]
fn an_error_of_the_database_shows_no_password() {
    let mut command = binary(&["admin"]);
    command.env("DATABASE_URL", "postgres://ann:hunter2@127.0.0.1:9/shop");
    let page = Page::start(command);
    for path in ["/", "/dead", "/relays"] {
        let answer = page.get(path);
        assert_eq!(answer.status, 503, "{path}");
        assert!(!answer.body.contains("hunter2"), "{}", answer.body);
    }
    page.process.wait_for_log("admin_look_failed");
    assert!(!page.process.log().contains("hunter2"));
}

#[cfg(target_os = "linux")]
#[test]
fn it_ends_at_once_with_its_sampler() {
    let database = Database::new();
    let mut page = open(&database);
    let tasks = format!("/proc/{}/task", page.process.pid());
    let has_sampler = || {
        let threads = std::fs::read_dir(&tasks).expect("its threads");
        threads.flatten().any(|thread| {
            std::fs::read_to_string(thread.path().join("comm"))
                .is_ok_and(|name| name.trim() == "admin-sampler")
        })
    };
    eventually("the sampler is at work", has_sampler);
    let began = Instant::now();
    page.process.signal("TERM");
    assert!(page.process.wait().success());
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
}
