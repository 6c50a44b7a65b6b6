//! Runs the example as a process: one commit pays an order and writes its message.

use std::process::Command;

use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};

#[derive(Debug, PartialEq, QueryableByName)]
struct Written {
    #[diesel(sql_type = Bool)]
    paid: bool,
    #[diesel(sql_type = Text)]
    topic: String,
    #[diesel(sql_type = Text)]
    payload: String,
    /// One transaction wrote both rows.
    #[diesel(sql_type = Bool)]
    together: bool,
}

#[test]
fn an_order_is_paid_and_its_message_waits_in_one_transaction() {
    let url = std::env::var("DATABASE_URL").expect("DATABASE_URL is set: run `make examples`");
    let run = Command::new(env!("CARGO_BIN_EXE_async-shop"))
        .output()
        .expect("the program runs");
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{error}");
    let printed = String::from_utf8_lossy(&run.stdout);
    assert!(
        printed.starts_with("order 7 is paid: message "),
        "{printed}"
    );

    let mut conn = PgConnection::establish(&url).expect("PostgreSQL is reachable");
    let written: Vec<Written> = diesel::sql_query(
        "SELECT paid, topic, payload::text, o.xmin = m.xmin AS together FROM orders o, outbox m",
    )
    .load(&mut conn)
    .expect("rows");
    let paid = Written {
        paid: true,
        topic: "order.paid".to_owned(),
        payload: r#"{"order_id":7}"#.to_owned(),
        together: true,
    };
    assert_eq!(written, [paid]);
}
