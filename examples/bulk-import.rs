//! Imports many rows with one message each: all or none. A second run adds nothing.
//!
//! ```sh
//! scripts/with-postgres cargo run --example bulk-import
//! scripts/with-postgres cargo run --example bulk-import -- members.csv
//! ```
//!
//! Rows are read one by one, so a file may be larger than memory. Without a file, the example generates
//! 100,000 rows.

#![allow(clippy::print_stdout, reason = "the example prints its result")]

use std::error::Error;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::time::Instant;

use diesel::prelude::*;
use diesel_outbox::{Event, Outbox};
use serde::Serialize;

const MADE_UP_ROWS: u64 = 100_000;
/// Rows between two progress reports.
const PROGRESS_EVERY: u64 = 25_000;

#[derive(Serialize)]
struct MemberImported {
    member_id: u64,
    name: String,
}

impl Event for MemberImported {
    const TOPIC: &'static str = "member.imported";

    /// One message per member, however often the file is imported.
    fn idempotency_key(&self) -> Option<String> {
        Some(format!("member-{}-imported", self.member_id))
    }
}

/// A row: `7,Ada Lovelace`.
fn parse(line: &str) -> Result<MemberImported, Box<dyn Error>> {
    let (member_id, name) = line.split_once(',').ok_or("no comma")?;
    Ok(MemberImported {
        member_id: member_id.trim().parse()?,
        name: name.trim().to_owned(),
    })
}

/// Imports all lines and returns how many messages were new. The first invalid line ends the import and rolls
/// it back.
fn import(
    conn: &mut PgConnection,
    outbox: &Outbox,
    lines: impl Iterator<Item = std::io::Result<String>>,
) -> Result<u64, Box<dyn Error>> {
    conn.transaction(|conn| {
        let mut failure = None;
        let rows = (1..).zip(lines).map_while(|(number, line)| {
            if number % PROGRESS_EVERY == 0 {
                println!("{number} rows");
            }
            let row = line.map_err(Into::into).and_then(|line| parse(&line));
            row.map_err(|error| failure = Some(format!("line {number}: {error}")))
                .ok()
        });
        // An application would also write its own tables here, in the same transaction.
        let new = outbox.enqueue_bulk(conn, rows)?;
        match failure {
            Some(failure) => Err(failure.into()),
            None => Ok(new),
        }
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let database_url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL, or run this with scripts/with-postgres")?;
    let mut conn = PgConnection::establish(&database_url)?;
    let outbox = Outbox::new("outbox")?;
    diesel_outbox::migrate(&mut conn, outbox.name())?;

    for run in ["first", "second"] {
        let began = Instant::now();
        let new = match std::env::args().nth(1) {
            Some(file) => import(
                &mut conn,
                &outbox,
                BufReader::new(File::open(file)?).lines(),
            )?,
            None => import(
                &mut conn,
                &outbox,
                (0..MADE_UP_ROWS).map(|id| Ok(format!("{id},Member {id}"))),
            )?,
        };
        println!("{run} run: {new} new messages in {:.1?}", began.elapsed());
    }
    Ok(())
}
