//! Handles messages inside the process: a club greets its new members and counts them.
//!
//! ```sh
//! scripts/with-postgres cargo run --example handlers
//! ```
//!
//! Each group of handlers gets every message and counts its own attempts, so a failing mail server does not
//! delay the statistics. Handlers of one group share its threads.

#![allow(clippy::print_stdout, reason = "the example prints its result")]

use std::error::Error;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_outbox::handlers::{Context, HandlerError, Handlers, PooledContext};
use diesel_outbox::{Backoff, Event, Outbox, Relay};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct MemberJoined {
    member_id: i32,
    mail: String,
}

impl Event for MemberJoined {
    const TOPIC: &'static str = "member.joined";
}

/// Sends a mail. Like everything outside the database, a mail can be sent twice; the id of the message lets the
/// mail server recognise the repeat.
fn greet(event: MemberJoined, context: &Context<'_>) -> Result<(), HandlerError> {
    if !event.mail.contains('@') {
        // A retry would not help.
        return Err(HandlerError::dead("no mail address"));
    }
    if context.attempt() == 1 {
        // Any error returned by `?` is a failed attempt, too.
        return Err(HandlerError::retry("the mail server is busy"));
    }
    println!("greeted member {}", event.member_id);
    Ok(())
}

/// Counts in the database: once per message, even if the handler runs again.
fn count(_: MemberJoined, context: &PooledContext<'_>) -> Result<(), HandlerError> {
    context.once(|conn| {
        diesel::sql_query("UPDATE club SET members = members + 1").execute(conn)?;
        Ok(())
    })?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let database_url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL, or run this with scripts/with-postgres")?;
    let pool = Pool::new(ConnectionManager::<PgConnection>::new(&database_url))?;
    let outbox = Outbox::new("outbox")?;
    let mut conn = pool.get()?;
    diesel_outbox::migrate(&mut conn, outbox.name())?;
    conn.batch_execute(
        "DROP TABLE IF EXISTS club;
         CREATE TABLE club (members int NOT NULL);
         INSERT INTO club VALUES (0)",
    )?;

    let relay = Relay::builder(&database_url)
        .handlers("mail", Handlers::new().on::<MemberJoined>(greet))
        .handlers(
            "statistics",
            Handlers::new().on_pooled::<MemberJoined>(count),
        )
        .backoff(Backoff::Table(vec![Duration::from_millis(200)]))
        .start()?;

    conn.transaction(|conn| {
        for (member_id, mail) in [(1, "ada@club.example"), (2, "nobody")] {
            let mail = mail.to_owned();
            outbox.enqueue(conn, MemberJoined { member_id, mail })?;
        }
        Ok::<(), diesel_outbox::EnqueueError>(())
    })?;
    drop(conn);

    // Two members are counted. One is greeted at the second attempt; the other has no mail address.
    while relay.stats().processed() < 4 {
        relay.wait_until_idle(Duration::from_secs(1));
        std::thread::sleep(Duration::from_millis(10));
    }
    let members: i32 = diesel::dsl::sql::<diesel::sql_types::Integer>("SELECT members FROM club")
        .get_result(&mut pool.get()?)?;
    let stats = relay.stats();
    println!(
        "{members} members; delivered {}, retried {}, dead {}",
        stats.delivered, stats.retried, stats.dead
    );
    relay.shutdown(Duration::from_secs(30))?;
    Ok(())
}
