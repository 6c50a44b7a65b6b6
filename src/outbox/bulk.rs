//! Writes any number of messages, in batches.

use diesel::connection::LoadConnection;
use diesel::pg::Pg;

use super::sql::enqueue::{NewRow, insert_all};
use super::{add, insert_each};
use crate::error::EnqueueError;
use crate::metrics::Enqueues;
use crate::name::OutboxName;

/// The maximum number of messages, and of bytes, in one statement. Large enough to make the cost of round
/// trips and savepoints negligible, small enough to hold a few copies in memory.
const BULK_MESSAGES: usize = 5000;
const BULK_BYTES: usize = 4 * 1024 * 1024;

/// A bulk in progress, with the rows that wait for the next statement.
pub(super) struct PendingBulk<'a> {
    name: &'a OutboxName,
    rows: Vec<NewRow>,
    bytes: usize,
    new: u64,
    /// A key was taken, so further keys may be taken, too.
    repeats: bool,
    enqueues: Enqueues,
}

impl<'a> PendingBulk<'a> {
    pub(super) fn new(name: &'a OutboxName) -> Self {
        Self {
            name,
            rows: Vec::new(),
            bytes: 0,
            new: 0,
            repeats: false,
            enqueues: Enqueues::default(),
        }
    }

    pub(super) fn push(
        &mut self,
        conn: &mut impl LoadConnection<Backend = Pg>,
        row: NewRow,
    ) -> Result<(), EnqueueError> {
        self.bytes += row.bytes();
        self.rows.push(row);
        if self.rows.len() < BULK_MESSAGES && self.bytes < BULK_BYTES {
            return Ok(());
        }
        self.write(conn)
    }

    fn write(&mut self, conn: &mut impl LoadConnection<Backend = Pg>) -> Result<(), EnqueueError> {
        self.repeats = self.repeats || !insert_all(conn, self.name, &self.rows)?;
        let new = if self.repeats {
            let outcomes = insert_each(conn, self.name, &self.rows)?;
            add(&mut self.enqueues, &self.rows, &outcomes);
            outcomes.iter().filter(|outcome| outcome.is_new).count()
        } else {
            for row in &self.rows {
                self.enqueues.add(row.topic(), true);
            }
            self.rows.len()
        };
        self.new += new as u64;
        self.rows.clear();
        self.bytes = 0;
        Ok(())
    }

    pub(super) fn finish(
        mut self,
        conn: &mut impl LoadConnection<Backend = Pg>,
    ) -> Result<(u64, Enqueues), EnqueueError> {
        if !self.rows.is_empty() {
            self.write(conn)?;
        }
        Ok((self.new, self.enqueues))
    }
}
