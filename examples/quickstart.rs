//! The whole path in one file: an order is paid, and another system receives the message.
//!
//! ```sh
//! scripts/with-postgres cargo run --example quickstart
//! ```

#![allow(clippy::print_stdout, reason = "the example prints its result")]

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_outbox::{EnqueueError, Event, Outbox, Relay};
use serde::Serialize;

#[derive(Serialize)]
struct OrderPaid {
    order_id: i32,
    euro: i32,
}

impl Event for OrderPaid {
    const TOPIC: &'static str = "order.paid";

    /// Messages about the same order are delivered in order.
    fn ordering_key(&self) -> Option<String> {
        Some(format!("order-{}", self.order_id))
    }
}

/// Marks an order as paid and enqueues its message in one transaction: both happen, or neither.
fn pay(conn: &mut PgConnection, outbox: &Outbox, order_id: i32) -> Result<(), EnqueueError> {
    conn.transaction(|conn| {
        diesel::sql_query("UPDATE orders SET paid = true WHERE id = $1")
            .bind::<diesel::sql_types::Integer, _>(order_id)
            .execute(conn)?;
        outbox.enqueue(conn, &OrderPaid { order_id, euro: 42 })?;
        Ok(())
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let database_url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL, or run this with scripts/with-postgres")?;
    let mut conn = PgConnection::establish(&database_url)?;
    conn.batch_execute(
        "DROP TABLE IF EXISTS orders;
         CREATE TABLE orders (id int PRIMARY KEY, paid bool NOT NULL DEFAULT false);
         INSERT INTO orders VALUES (7)",
    )?;
    let outbox = Outbox::new("outbox")?;
    diesel_outbox::migrate(&mut conn, outbox.name())?;

    let (receiver, received) = start_receiver()?;
    let relay = Relay::builder(&database_url).url(&receiver).start()?;

    pay(&mut conn, &outbox, 7)?;
    println!(
        "received: {}",
        received.recv_timeout(Duration::from_secs(10))?
    );

    relay.shutdown(Duration::from_secs(30))?;
    Ok(())
}

/// The other system: accepts one request and passes its body on.
fn start_receiver() -> Result<(String, std::sync::mpsc::Receiver<String>), Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}/events", listener.local_addr()?);
    let (body_out, body_in) = std::sync::mpsc::channel();
    std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n")?;
        // If `main` no longer listens, the example has ended.
        let _ = body_out.send(String::from_utf8_lossy(&body).into_owned());
        Ok(())
    });
    Ok((url, body_in))
}
