//! Settles of many messages at once, and of reused sequences.

use diesel::connection::SimpleConnection;

use super::*;
use crate::engine::settle::sql::split::{Parts, Piece, Split, split};
use crate::sql::tests::Outbox;

/// Enough messages that comparing each with each would take many seconds.
const MANY: i64 = 6000;

/// Claims all messages, and returns the claims.
fn claim_all(conn: &mut PgConnection, outbox: &Outbox) -> Vec<Claim> {
    #[derive(diesel::QueryableByName)]
    struct Row {
        #[diesel(sql_type = BigInt)]
        sequence: i64,
        #[diesel(sql_type = Timestamptz)]
        locked_at: PgTimestamp,
    }
    let rows: Vec<Row> = statement(format!(
        "UPDATE {} SET locked_by = 1, locked_at = clock_timestamp() RETURNING sequence, locked_at",
        outbox.name.outbox()
    ))
    .load(conn)
    .expect("claimed");
    let claims = rows.into_iter().map(|row| Claim {
        sequence: row.sequence,
        at: row.locked_at.0,
    });
    // Out of order: the statements must sort the claims.
    claims.rev().collect()
}

/// Claims of the same sequences at another time.
fn of_others(claims: &[Claim]) -> Vec<Claim> {
    let earlier = |claim: &Claim| Claim {
        at: claim.at - 1,
        ..*claim
    };
    claims.iter().map(earlier).collect()
}

fn delivered_by(claim: Claim) -> Delivered {
    Delivered {
        claim,
        destination: "there".into(),
        registration: None,
        http_status: Some(200),
        response: Some(format!("of {}", claim.sequence)),
    }
}

fn failed(claim: Claim) -> Failed {
    Failed {
        claim,
        destination: "there".into(),
        names: "".into(),
        registration: None,
        code: ReasonCode::Timeout,
        error: format!("of {}", claim.sequence),
        http_status: Some(500),
        response: None,
        took: Duration::from_millis(7),
        delay: Duration::ZERO,
        attempt: Attempt::Counted,
        expires_after: None,
        blocks_key: false,
    }
}

#[test]
fn many_results_are_recorded_as_each_alone_and_quickly() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect(), &outbox.name);
    conn.batch_execute(&format!(
        "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off;
         SET enable_mergejoin = off; SET statement_timeout = '4s';
         INSERT INTO {} (topic, payload) SELECT 'a', '1' FROM generate_series(1, {MANY})",
        name.outbox()
    ))
    .expect("messages");
    let (lease, all) = (LeaseId(1), usize::try_from(MANY).expect("a count"));
    let claims = claim_all(&mut conn, &outbox);
    let done = release(&mut conn, name, lease, &claims).expect("released");
    assert_eq!(done.len(), all);

    let claims = claim_all(&mut conn, &outbox);
    let failures: Vec<Failed> = claims.into_iter().map(failed).collect();
    let done = retry(&mut conn, name, lease, &failures).expect("retried");
    assert_eq!(done.len(), all);
    let of_others = format!(
        "SELECT sequence FROM {} WHERE last_error <> 'of ' || sequence OR attempts <> 1",
        name.outbox()
    );
    let of_others = statement(of_others).giving::<BigInt>();
    let of_others: Vec<i64> = of_others.load(&mut conn).expect("rows");
    assert!(of_others.is_empty());

    let claims = claim_all(&mut conn, &outbox);
    let failures: Vec<Failed> = claims.into_iter().map(failed).collect();
    let done = dead(&mut conn, name, lease, &failures, false).expect("dead");
    assert_eq!(done.len(), all);
    let of_others = format!(
        "SELECT sequence FROM {} WHERE last_error <> 'of ' || sequence OR attempts <> 2",
        name.dead()
    );
    let of_others = statement(of_others).giving::<BigInt>();
    let of_others: Vec<i64> = of_others.load(&mut conn).expect("rows");
    assert!(of_others.is_empty());

    conn.batch_execute(&format!(
        "INSERT INTO {} (topic, payload) SELECT 'a', '1' FROM generate_series(1, {MANY})",
        name.outbox()
    ))
    .expect("messages");
    let claims = claim_all(&mut conn, &outbox);
    let all_delivered: Vec<Delivered> = claims.into_iter().map(delivered_by).collect();
    let done = delivered(
        &mut conn,
        name,
        lease,
        &all_delivered,
        Status::Delivered,
        false,
    )
    .expect("delivered");
    assert_eq!(done.len(), all);
    let of_others = format!(
        "SELECT sequence FROM {} WHERE status = 'delivered' AND response <> 'of ' || sequence",
        name.ledger()
    );
    let of_others = statement(of_others).giving::<BigInt>();
    let of_others: Vec<i64> = of_others.load(&mut conn).expect("rows");
    assert!(of_others.is_empty());
}

/// G2, G4: a sequence may be given twice, and the same lease may also have claimed the new message.
#[test]
fn no_settle_changes_another_message_that_has_the_sequence() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect(), &outbox.name);
    conn.batch_execute(&format!(
        "INSERT INTO {} (topic, payload) SELECT 'a', '1' FROM generate_series(1, 3)",
        name.outbox()
    ))
    .expect("messages");
    let lease = LeaseId(1);
    let claims = claim_all(&mut conn, &outbox);
    let settle_all = |conn: &mut PgConnection, claims: &[Claim]| {
        let delivered_them: Vec<Delivered> = claims.iter().copied().map(delivered_by).collect();
        let failures: Vec<Failed> = claims.iter().copied().map(failed).collect();
        let parts = Parts::from(vec!["a".to_owned(), "b".to_owned()]);
        let to_split: Vec<Split<'_>> = claims.iter().map(|one| (*one, &parts)).collect();
        let repeats: Vec<(Claim, i64)> = claims.iter().map(|claim| (*claim, 1)).collect();
        let mut changed = vec![
            delivered(conn, name, lease, &delivered_them, Status::Delivered, false),
            deduplicated(conn, name, lease, &repeats),
            retry(conn, name, lease, &failures),
            dead(conn, name, lease, &failures, false),
            release(conn, name, lease, claims),
        ];
        let done = split(conn, name, lease, &to_split, Piece::WHOLE).expect("a split");
        assert!(done.in_conflict.is_empty());
        changed.push(Ok(done.changed));
        let changed = changed.into_iter().map(|one| one.expect("a settle").len());
        changed.collect::<Vec<_>>()
    };
    assert_eq!(settle_all(&mut conn, &of_others(&claims)), [0; 6]);
    // The first settle leaves no message for the others.
    assert_eq!(settle_all(&mut conn, &claims), [3, 0, 0, 0, 0, 0]);
}

/// An UPDATE of the application, a setting or a handler may write any number: each outcome is recorded all the same.
#[test]
fn numbers_that_are_out_of_range_hold_up_no_outcome() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect(), &outbox.name);
    conn.batch_execute(&format!(
        "INSERT INTO {0} (topic, payload) SELECT 'a', '1' FROM generate_series(1, 8);
         UPDATE {0} SET attempts = CASE sequence % 2 WHEN 0 THEN 2147483647 ELSE -2147483648 END",
        name.outbox()
    ))
    .expect("messages");
    let lease = LeaseId(1);
    let claims = claim_all(&mut conn, &outbox);
    let [delivered_them, retried, buried, split_them] = [0, 2, 4, 6].map(|n| &claims[n..n + 2]);
    let of: Vec<Delivered> = delivered_them.iter().copied().map(delivered_by).collect();
    delivered(&mut conn, name, lease, &of, Status::Delivered, false).expect("delivered");
    let of = |claims: &[Claim]| -> Vec<Failed> {
        let late = |claim: Claim| Failed {
            delay: Duration::MAX,
            expires_after: Some(Duration::MAX),
            ..failed(claim)
        };
        claims.iter().copied().map(late).collect()
    };
    retry(&mut conn, name, lease, &of(retried)).expect("retried");
    dead(&mut conn, name, lease, &of(buried), false).expect("dead");
    let parts = Parts::from(vec!["a".to_owned(), "b".to_owned()]);
    let to_split: Vec<Split<'_>> = split_them.iter().map(|one| (*one, &parts)).collect();
    let done = split(&mut conn, name, lease, &to_split, Piece::WHOLE).expect("a split");
    assert_eq!(done.changed.len(), 2);
}

/// The ledger may have another message of the same key, even with the same sequence.
#[test]
fn the_ledger_does_not_take_another_message_for_a_settled_one() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect(), &outbox.name);
    let (ours, other) = (Uuid::now_v7(), Uuid::now_v7());
    conn.batch_execute(&format!(
        "INSERT INTO {} (message_id, topic, payload, idempotency_key) VALUES ('{other}', 'a', '1', 'key')",
        name.outbox()
    ))
    .expect("a message");
    let claims = claim_all(&mut conn, &outbox);
    delivered(
        &mut conn,
        name,
        LeaseId(1),
        &[delivered_by(claims[0])],
        Status::Delivered,
        false,
    )
    .expect("delivered");
    let trace = |message_id, at| Trace {
        claim: Claim { at, ..claims[0] },
        message_id,
    };
    let at = claims[0].at;
    let found = settled(&mut conn, name, &[trace(ours, at)]).expect("an answer");
    assert!(found.is_empty());
    let found = settled(&mut conn, name, &[trace(other, at)]).expect("an answer");
    assert_eq!(found, [claims[0].sequence]);
    // Settled under an earlier claim, for example before the message was requeued.
    let later = at + 3_600_000_000;
    let found = settled(&mut conn, name, &[trace(other, later)]).expect("an answer");
    assert!(found.is_empty());
}

/// R65: a release keeps what is known, compares claims, and waits for no row that a person has locked.
#[test]
fn unknown_messages_are_released_beside_known_ones_and_locked_ones_later() {
    let outbox = Outbox::new();
    let (conn, person) = (&mut outbox.connect(), &mut outbox.connect());
    let table = outbox.name.outbox();
    conn.batch_execute(&format!(
        "INSERT INTO {table} (topic, payload) SELECT 'a', '1' FROM generate_series(1, 6)"
    ))
    .expect("inserted");
    let mut claims = claim_all(conn, &outbox);
    claims.sort_unstable();
    // The claim of the second one is another, under an earlier time.
    claims[1].at -= 1;
    let known = &claims[..3];
    let lock = format!("BEGIN; SELECT FROM {table} WHERE sequence = 5 FOR UPDATE");
    person.batch_execute(&lock).expect("locked");
    let mut release = |lease, range| {
        let released = release_unknown(conn, &outbox.name, LeaseId(lease), known, range);
        let Released {
            messages,
            are_some_locked,
        } = released.expect("no wait");
        let held: Vec<i64> = outbox::table(&table)
            .filter(outbox::locked_by.eq(1))
            .order(outbox::sequence)
            .select(outbox::sequence)
            .load(conn)
            .expect("the held ones");
        (messages, are_some_locked, held)
    };
    assert_eq!(release(2, Range::ALL), (0, false, vec![1, 2, 3, 4, 5, 6]));
    let (after, upto) = (0, 4);
    let first = Range { after, upto };
    assert_eq!(release(1, first), (2, false, vec![1, 3, 5, 6]));
    assert_eq!(release(1, Range::ALL), (1, true, vec![1, 3, 5]));
    person.batch_execute("ROLLBACK").expect("unlocked");
    assert_eq!(release(1, Range::ALL), (1, false, vec![1, 3]));
}
