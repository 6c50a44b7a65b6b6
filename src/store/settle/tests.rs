//! Many at once.

use diesel::connection::SimpleConnection;

use super::*;
use crate::store::model::database::Outbox;

/// So many that comparing each with each takes many seconds.
const MANY: i64 = 6000;

/// Claims as many messages, and returns when.
fn claim_all(conn: &mut PgConnection, outbox: &Outbox) -> Vec<(i64, i64)> {
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
    let claims = rows.into_iter().map(|row| (row.sequence, row.locked_at.0));
    // In no order: the statements put it into theirs.
    claims.rev().collect()
}

fn failed((sequence, claimed_at): (i64, i64)) -> Failed {
    Failed {
        sequence,
        code: ReasonCode::Timeout,
        error: format!("of {sequence}"),
        http_status: Some(500),
        response: None,
        delay: Duration::ZERO,
        before: 0,
        counted: 1,
        claimed_at,
        blocks_key: false,
    }
}

#[test]
fn what_is_written_down_of_many_is_that_of_each_and_takes_no_time() {
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
    let late = claims.iter().map(|(sequence, at)| (*sequence, at - 1));
    let late: Vec<(i64, i64)> = late.collect();
    let done = release(&mut conn, name, lease, &late).expect("none");
    assert!(done.is_empty());
    let done = release(&mut conn, name, lease, &claims).expect("released");
    assert_eq!(done.len(), all);

    let claims = claim_all(&mut conn, &outbox);
    let failures: Vec<Failed> = claims.into_iter().map(failed).collect();
    let done = retry(&mut conn, name, lease, &failures).expect("to be tried again");
    assert_eq!(done.len(), all);
    let of_others = format!(
        "SELECT sequence FROM {} WHERE last_error <> 'of ' || sequence OR attempts <> 1",
        name.outbox()
    );
    let of_others: Vec<SequenceRow> = statement(of_others).load(&mut conn).expect("rows");
    assert!(of_others.is_empty());

    let claims = claim_all(&mut conn, &outbox);
    let failures: Vec<Failed> = claims.into_iter().map(failed).collect();
    let done = dead(&mut conn, name, lease, &failures, false).expect("dead");
    assert_eq!(done.len(), all);
    let of_others = format!(
        "SELECT sequence FROM {} WHERE last_error <> 'of ' || sequence OR attempts <> 2",
        name.dead()
    );
    let of_others: Vec<SequenceRow> = statement(of_others).load(&mut conn).expect("rows");
    assert!(of_others.is_empty());
}
