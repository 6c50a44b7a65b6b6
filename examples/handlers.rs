//! Messages that are worked on inside the process: a club greets its new members and counts them.
//!
//! ```sh
//! scripts/with-postgres cargo run --example handlers
//! ```
//!
//! Each group of handlers gets every message, with attempts of its own: the mail server's bad day is
//! nothing to those who count. Two handlers of one group would share its threads.

#![allow(clippy::print_stdout, reason = "it is what the example shows")]

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

/// Sends a mail. It can come twice, as anything that leaves the database: the message's id lets the
/// mail server recognise it.
fn greet(event: MemberJoined, context: &Context<'_>) -> Result<(), HandlerError> {
    if !event.mail.contains('@') {
        // No attempt would help.
        return Err(HandlerError::dead("no mail address"));
    }
    if context.attempt() == 1 {
        // Any error from `?` is a failed attempt as well.
        return Err(HandlerError::retry("the mail server is busy"));
    }
    println!("greeted member {}", event.member_id);
    Ok(())
}

/// Counts in the database: once, also when it is called again.
fn count(_: MemberJoined, context: &PooledContext<'_>) -> Result<(), HandlerError> {
    context.once(|conn| {
        diesel::sql_query("UPDATE club SET members = members + 1").execute(conn)?;
        Ok(())
    })?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let database_url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL, or run this by scripts/with-postgres")?;
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
        .connections({
            let pool = pool.clone();
            move || pool.get()
        })
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

    // Two are counted; one is greeted, at the second attempt, and one never can be.
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
