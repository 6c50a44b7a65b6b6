//! Work that handlers do exactly once, in the database.

use diesel::connection::SimpleConnection;

use super::*;

fn pool_of(database: &Database) -> Pool<ConnectionManager<PgConnection>> {
    Pool::builder()
        .max_size(4)
        .build(ConnectionManager::<PgConnection>::new(&database.url))
        .expect("a pool")
}

/// Creates a table that counts members.
fn club(database: &Database) -> String {
    let club = format!("{}.club", database.schema());
    database.execute(&format!("CREATE TABLE {club} (members bigint)"));
    database.execute(&format!("INSERT INTO {club} VALUES (0)"));
    club
}

/// R33
#[test]
fn the_work_of_a_handler_is_done_once_even_if_it_is_called_again() {
    let database = Database::new();
    let club = club(&database);
    let (pool, calls) = (pool_of(&database), Arc::new(AtomicUsize::new(0)));
    let duplicates = Arc::new(AtomicUsize::new(0));
    let (counted, repeated) = (Arc::clone(&calls), Arc::clone(&duplicates));
    let add = format!("UPDATE {club} SET members = members + 1");
    let group = || {
        let (add, counted, repeated) = (add.clone(), counted.clone(), repeated.clone());
        Handlers::new().on_pooled::<MemberJoined>(move |event, context| {
            counted.fetch_add(1, Ordering::SeqCst);
            let once = context.once(|conn| {
                sql_query(&add).execute(conn)?;
                if event.member_id == 1 && context.attempt() == 1 {
                    return Err(HandlerError::retry("rolled back"));
                }
                Ok(())
            })?;
            if once.is_duplicate() {
                repeated.fetch_add(1, Ordering::SeqCst);
            }
            assert!(
                event.member_id != 2 || context.attempt() > 2,
                "a failure after the commit"
            );
            Ok(())
        })
    };
    let relay = database
        .relay()
        .connections(move || pool.get())
        .handlers("first", group())
        .handlers("second", group())
        .start()
        .expect("a relay");
    for member_id in 0..3 {
        join(&database, member_id);
    }
    eventually("both groups have all messages", || {
        database.count("delivered") == 6
    });
    assert_eq!(
        database.number(&format!("SELECT members FROM {club}")),
        6,
        "each group counts each member once"
    );
    // Member 0 takes one call, member 1 two, member 2 three. The last two calls of member 2 find the work done.
    assert_eq!(calls.load(Ordering::SeqCst), 2 * (1 + 2 + 3));
    assert_eq!(duplicates.load(Ordering::SeqCst), 2 * 2);
    end(&relay);
}

/// R33, R45
#[test]
fn a_call_behind_another_relays_transaction_waits_until_its_limit_and_returns_its_connection() {
    let database = Database::new();
    let pool = Pool::builder()
        .max_size(1)
        .build(ConnectionManager::<PgConnection>::new(&database.url));
    let pool = pool.expect("a pool");
    let handlers = Handlers::new()
        .timeout(Duration::from_millis(300))
        .on_pooled::<MemberJoined>(move |_, context| {
            context.once(|conn| Ok(sql_query("SELECT 1").execute(conn)?))?;
            Ok(())
        });
    let relay = database
        .relay()
        .connections(move || pool.get())
        .handlers("members", handlers)
        .max_attempts(1000)
        .enabled(false);
    // A relay that has lost its lease and still works on the message.
    let first = join(&database, 1);
    let id = database.text(&format!(
        "SELECT message_id FROM {{o}} WHERE sequence = {first}"
    ));
    let id = id.expect("an id");
    let mut other = database.connect();
    let source = format!("{}/members", database.name());
    other
        .batch_execute(&format!(
            "BEGIN; INSERT INTO outbox_inbox (source, message_id) VALUES ('{source}', '{id}')"
        ))
        .expect("inserted");
    let relay = relay.enabled(true).start().expect("a relay");
    eventually("the message was tried again", || {
        database.number("SELECT coalesce(max(attempts), 0) FROM {o}") >= 2
    });
    for member_id in 2..6 {
        join(&database, member_id);
    }
    eventually(
        "the other messages are handled on the only connection",
        || database.count("delivered") == 4,
    );
    other.batch_execute("COMMIT").expect("committed");
    eventually("the duplicate is settled", || {
        database.count("delivered") == 5
    });
    end(&relay);
}

/// R33
#[test]
fn a_second_once_in_one_call_is_an_error_and_not_taken_for_done() {
    let database = Database::new();
    let club = club(&database);
    let pool = pool_of(&database);
    let add = format!("UPDATE {club} SET members = members + 1");
    let (heard, hear) = mpsc::channel();
    let relay = database
        .relay()
        .max_attempts(1)
        .connections(move || pool.get())
        .on_pooled::<MemberJoined>(move |_, context| {
            // A call that fails is rolled back and does not count.
            let failed = context.once(|_| Err::<(), _>(HandlerError::retry("not this way")));
            assert!(failed.is_err());
            let first = context.once(|conn| Ok(sql_query(&add).execute(conn)?))?;
            let mut is_called = false;
            let second = context.once(|conn| {
                is_called = true;
                Ok(sql_query(&add).execute(conn)?)
            });
            heard.send((first, format!("{second:?}"), is_called))?;
            second?;
            Ok(())
        })
        .start()
        .expect("a relay");
    join(&database, 1);
    let (first, second, is_called) = hear.recv_timeout(PATIENCE).expect("the handler is called");
    assert_eq!(first.handled(), Some(1));
    assert!(
        second.starts_with("Err(") && second.contains("a second time"),
        "{second}"
    );
    assert!(!is_called);
    eventually("the message is dead-lettered, not delivered", || {
        database.count("dead") == 1
    });
    assert_eq!(database.count("delivered"), 0);
    assert_eq!(database.number(&format!("SELECT members FROM {club}")), 1);
    end(&relay);
}

/// R33, R45
#[test]
fn a_late_handlers_once_commits_for_the_message_is_still_its_own() {
    let database = Database::new();
    let club = club(&database);
    let pool = pool_of(&database);
    let (gate, pass) = Gate::new();
    let (began, begin) = mpsc::channel();
    let add = format!("UPDATE {club} SET members = members + 1");
    let handlers = Handlers::new()
        .timeout(Duration::from_millis(200))
        .on_pooled::<MemberJoined>(move |_, context| {
            context.once(|conn| {
                began.send(())?;
                pass();
                assert!(context.remaining().is_zero());
                Ok(sql_query(&add).execute(conn)?)
            })?;
            Ok(())
        });
    let relay = database
        .relay()
        .connections(move || pool.get())
        .handlers("members", handlers)
        .start()
        .expect("a relay");
    join(&database, 1);
    begin.recv_timeout(PATIENCE).expect("the handler is called");
    eventually("the handler's limit is exceeded", || {
        relay
            .health()
            .to_string()
            .contains("longer than their limit")
    });
    drop(gate);
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(database.number(&format!("SELECT members FROM {club}")), 1);
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 1);
    end(&relay);
}
