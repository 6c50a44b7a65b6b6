//! The enqueue rate of one client: message by message, in batches, and all at once.

use std::time::Instant;

use anyhow::Result;
use diesel::{Connection, PgConnection};
use diesel_outbox::{Event, Outbox};
use serde_json::{Value, json};

use super::ground::{Ground, TOPIC, payload};
use super::measures::Wal;
use super::report::{Column, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages per run; a fiftieth of them for `enqueue`, which sends a statement per message
    #[arg(long, default_value_t = 100_000, value_name = "NUMBER", value_parser = whole(50..=MOST_MESSAGES))]
    messages: u64,
    /// Number of rounds; each round measures every run once
    #[arg(long, default_value_t = 3, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
}

/// Messages of a batch.
const BATCH: u64 = 1000;
/// `enqueue` is slower, so its run has this many times fewer messages.
const FEWER: u64 = 50;

#[derive(Debug, Clone, Copy)]
enum Way {
    Enqueue,
    Batch,
    Bulk,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Enqueue => "enqueue",
            Self::Batch => "enqueue_batch",
            Self::Bulk => "enqueue_bulk",
        }
    }

    fn messages(self, options: &Options) -> u64 {
        match self {
            Self::Enqueue => options.messages / FEWER,
            Self::Batch | Self::Bulk => options.messages,
        }
    }

    /// Enqueues `messages` messages in one transaction.
    fn enqueue(
        self,
        conn: &mut PgConnection,
        outbox: &Outbox,
        messages: u64,
        event: &Filled,
    ) -> Result<()> {
        let new = |count: u64| (0..count).map(|_| event);
        conn.transaction(|conn| {
            match self {
                Self::Enqueue => {
                    for event in new(messages) {
                        outbox.enqueue(conn, event)?;
                    }
                }
                Self::Batch => {
                    for first in (0..messages).step_by(BATCH as usize) {
                        outbox.enqueue_batch(conn, new(BATCH.min(messages - first)))?;
                    }
                }
                Self::Bulk => {
                    outbox.enqueue_bulk(conn, new(messages))?;
                }
            }
            Ok(())
        })
    }
}

#[derive(serde::Serialize)]
struct Filled(Value);

impl Event for Filled {
    const TOPIC: &'static str = TOPIC;
}

struct Run {
    way: Way,
    messages: u64,
    seconds: f64,
    wal_bytes: f64,
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let event = Filled(payload(ground.payload_bytes));
    let mut runs = [Way::Enqueue, Way::Batch, Way::Bulk].map(|way| Run {
        way,
        messages: 0,
        seconds: 0.0,
        wal_bytes: 0.0,
    });
    for round in 1..=options.rounds {
        for run in &mut runs {
            ground.say(format_args!("round {round}: {}", run.way.name()));
            ground.fresh()?;
            ground.quiet()?;
            let outbox = Outbox::from(ground.config.table.clone());
            let messages = run.way.messages(options);
            let before = Wal::now(&mut ground.conn)?;
            let began = Instant::now();
            run.way
                .enqueue(&mut ground.conn, &outbox, messages, &event)?;
            run.seconds += began.elapsed().as_secs_f64();
            run.wal_bytes += Wal::now(&mut ground.conn)?.since(&before).bytes;
            run.messages += messages;
        }
    }
    let shown = |run: &Run| {
        json!({
            "by": run.way.name(),
            "messages_per_second": run.messages as f64 / run.seconds,
            "wal_bytes_per_message": run.wal_bytes / run.messages as f64,
        })
    };
    Ok(json!({
        "messages": options.messages,
        "rounds": options.rounds,
        "runs": runs.iter().map(shown).collect::<Vec<_>>(),
    }))
}

pub(super) const COLUMNS: &[Column] = &[
    ("by", "by", Unit::Word),
    ("enqueued/s", "messages_per_second", Unit::Count),
    ("WAL per message", "wal_bytes_per_message", Unit::Bytes),
];
