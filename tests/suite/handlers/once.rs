//! What handlers do once, in the database.

use super::*;

fn pool_of(database: &Database) -> Pool<ConnectionManager<PgConnection>> {
    Pool::builder()
        .max_size(4)
        .build(ConnectionManager::<PgConnection>::new(&database.url))
        .expect("a pool")
}

/// A table that counts members.
fn club(database: &Database) -> String {
    let club = format!("{}.club", database.schema());
    database.execute(&format!("CREATE TABLE {club} (members bigint)"));
    database.execute(&format!("INSERT INTO {club} VALUES (0)"));
    club
}

/// R33
#[test]
fn what_a_handler_does_once_is_done_once_also_where_it_is_called_again() {
    let database = Database::new();
    let club = club(&database);
    let (pool, calls) = (pool_of(&database), Arc::new(AtomicUsize::new(0)));
    let duplicates = Arc::new(AtomicUsize::new(0));
    let (counted, repeated) = (Arc::clone(&calls), Arc::clone(&duplicates));
    let add = format!("UPDATE {club} SET members = members + 1");
    let group = || {
        let (add, counted, repeated) = (add.clone(), counted.clone(), repeated.clone());
        Handlers::new().on::<MemberJoined>(move |event, context| {
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
                "after the commit"
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
    eventually("both groups have all", || database.count("delivered") == 6);
    assert_eq!(
        database.number(&format!("SELECT members FROM {club}")),
        6,
        "each group once for each member"
    );
    // Member 0 once, 1 twice, 2 three times, of which two find it done.
    assert_eq!(calls.load(Ordering::SeqCst), 2 * (1 + 2 + 3));
    assert_eq!(duplicates.load(Ordering::SeqCst), 2 * 2);
    stop(relay);
}

/// R17, R33
#[test]
fn calls_behind_one_that_is_stuck_in_once_give_their_connections_back() {
    let database = Database::new();
    let pool = Pool::builder()
        .max_size(2)
        .build(ConnectionManager::<PgConnection>::new(&database.url));
    let pool = pool.expect("a pool");
    let (gate, opened) = mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    let handlers = Handlers::new()
        .timeout(Duration::from_millis(300))
        .on::<MemberJoined>(move |event, context| {
            context.once(|conn| {
                // Nothing is ever sent: this ends when the gate is dropped.
                if event.member_id == 1 && context.attempt() == 1 {
                    let _ = opened.lock().unwrap_or_else(PoisonError::into_inner).recv();
                }
                Ok(sql_query("SELECT 1").execute(conn)?)
            })?;
            Ok(())
        });
    let relay = database
        .relay()
        .connections(move || pool.get())
        .handlers("members", handlers)
        .max_attempts(1000)
        .start()
        .expect("a relay");
    join(&database, 1);
    // More calls for it than the pool has connections.
    eventually("it was tried often", || {
        database.number("SELECT coalesce(max(attempts), 0) FROM {o}") >= 4
    });
    for member_id in 2..6 {
        join(&database, member_id);
    }
    eventually("the others are handled", || {
        database.count("delivered") == 4
    });
    drop(gate);
    eventually("it is handled", || database.count("delivered") == 5);
    stop(relay);
}

/// R33
#[test]
fn a_second_once_in_one_call_is_an_error_and_not_taken_for_done() {
    let database = Database::new();
    let club = club(&database);
    let pool = pool_of(&database);
    let add = format!("UPDATE {club} SET members = members + 1");
    let relay = database
        .relay()
        .connections(move || pool.get())
        .on::<MemberJoined>(move |_, context| {
            if context.attempt() == 1 {
                let failed = context.once(|_| Err::<(), _>(HandlerError::retry("not this way")));
                assert!(failed.is_err());
            }
            context.once(|conn| Ok(sql_query(&add).execute(conn)?))?;
            if context.attempt() < 3 {
                context.once(|_| Ok(()))?;
            }
            Ok(())
        })
        .start()
        .expect("a relay");
    join(&database, 1);
    eventually("it is told", || {
        let told =
            "SELECT count(*) FROM {o} WHERE last_error LIKE '%all of its work belongs into one'";
        database.number(told) == 1 || database.count("delivered") == 1
    });
    eventually("the third call is right", || {
        database.count("delivered") == 1
    });
    assert_eq!(database.number(&format!("SELECT members FROM {club}")), 1);
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 3);
    stop(relay);
}

/// R17, R33
#[test]
fn a_late_handler_commits_nothing_and_the_one_that_took_over_does() {
    let database = Database::new();
    let club = club(&database);
    let pool = pool_of(&database);
    let (gate, opened) = mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    let (ended, late) = mpsc::channel();
    let add = format!("UPDATE {club} SET members = members + 1");
    let handlers = Handlers::new()
        .timeout(Duration::from_millis(200))
        .on::<MemberJoined>(move |_, context| {
            if context.attempt() > 1 {
                context.once(|conn| Ok(sql_query(&add).execute(conn)?))?;
                return Ok(());
            }
            let error = context.once(|conn| {
                // Nothing is ever sent: this ends when the gate is dropped.
                let _ = opened.lock().unwrap_or_else(PoisonError::into_inner).recv();
                Ok(sql_query(&add).execute(conn)?)
            });
            ended.send(format!("{error:?}"))?;
            Ok(())
        });
    let relay = database
        .relay()
        .connections(move || pool.get())
        .handlers("members", handlers)
        .start()
        .expect("a relay");
    join(&database, 1);
    // The second call waits for the first one's transaction, and takes too long for it.
    eventually("it was handed over", || {
        database.number("SELECT coalesce(max(attempts), 0) FROM {o}") >= 1
    });
    drop(gate);
    let late = late.recv_timeout(PATIENCE).expect("it ends");
    assert!(late.contains("what it did was rolled back"), "{late}");
    eventually("another call does it", || database.count("delivered") == 1);
    assert_eq!(database.number(&format!("SELECT members FROM {club}")), 1);
    stop(relay);
}
