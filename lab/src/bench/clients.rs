//! Clients that write to the outbox, each on a connection and a thread of its own.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use diesel::{Connection, PgConnection};
use diesel_outbox::{NewMessage, Outbox};
use serde_json::Value;

use super::ground::{Ground, TOPIC, payload};

/// A client that commits one message after another.
pub(super) struct Client {
    conn: PgConnection,
    outbox: Outbox,
    payload: Value,
    first: Duration,
    interval: Duration,
}

impl Client {
    /// `first`: until its first commit. `interval`: between two commits; zero: as fast as it can.
    pub(super) fn new(ground: &Ground, first: Duration, interval: Duration) -> Result<Self> {
        Ok(Self {
            conn: ground.connect()?,
            outbox: Outbox::from(ground.config.table.clone()),
            payload: payload(ground.payload_bytes),
            first,
            interval,
        })
    }

    fn commit_until(mut self, has_ended: &AtomicBool, committed: &AtomicU64) -> Result<()> {
        let mut due = Instant::now() + self.first;
        while !has_ended.load(Ordering::Relaxed) {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let message = NewMessage::new(TOPIC, &self.payload)?;
            self.conn
                .transaction(|conn| self.outbox.enqueue(conn, message))?;
            committed.fetch_add(1, Ordering::Relaxed);
            due += self.interval;
        }
        Ok(())
    }
}

/// Runs the clients beside this work, which sees the number of commits. Returns the number at the end, too.
pub(super) fn beside<T>(
    clients: Vec<Client>,
    work: impl FnOnce(&AtomicU64) -> Result<T>,
) -> Result<(T, u64)> {
    let (has_ended, committed) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let result = std::thread::scope(|scope| {
        let clients: Vec<_> = clients
            .into_iter()
            .map(|client| scope.spawn(move || client.commit_until(has_ended, committed)))
            .collect();
        let result = work(committed);
        has_ended.store(true, Ordering::Relaxed);
        for client in clients {
            let done = client.join().ok().context("a client panicked")?;
            done.context("a client failed")?;
        }
        result
    })?;
    Ok((result, committed.load(Ordering::Relaxed)))
}
