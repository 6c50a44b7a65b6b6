//! The effect of an open transaction, which keeps vacuum from removing settled rows, on the relay.

use anyhow::{Context, Result};
use diesel::PgConnection;
use diesel::connection::SimpleConnection;
use diesel_outbox::Relay;
use serde_json::{Value, json};

use super::delivery::{Delivery, deliver, deliver_behind, mean_of, rate_of};
use super::ground::{Fill, Ground};
use super::report::{Column, OWN_CPU, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages settled while the transaction is open
    #[arg(long, default_value_t = 1_000_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    settled: u64,
    /// Messages measured after these: delivered by the same relay, and again by a relay that has
    /// just started
    #[arg(long, default_value_t = 200_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Number of rounds; each round measures every run once
    #[arg(long, default_value_t = 1, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
}

/// The owner of the open transaction.
#[derive(Debug, Clone, Copy)]
enum Holder {
    Nobody,
    /// A reader with an old snapshot.
    OldReader,
    /// A writer that does not commit.
    IdleWriter,
}

const HOLDERS: [Holder; 3] = [Holder::Nobody, Holder::OldReader, Holder::IdleWriter];

impl Holder {
    fn name(self) -> &'static str {
        match self {
            Self::Nobody => "nobody",
            Self::OldReader => "old_reader",
            Self::IdleWriter => "idle_writer",
        }
    }

    /// Opens the transaction.
    fn hold(self, ground: &Ground) -> Result<Option<PgConnection>> {
        let begin = match self {
            Self::Nobody => return Ok(None),
            Self::OldReader => "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1",
            Self::IdleWriter => "BEGIN; SELECT txid_current()",
        };
        let mut conn = ground.connect()?;
        conn.batch_execute("SET idle_in_transaction_session_timeout = 0")?;
        conn.batch_execute(begin)?;
        Ok(Some(conn))
    }
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let mut measured = HOLDERS.map(Measured::new);
    for round in 1..=options.rounds {
        for of_holder in &mut measured {
            ground.say(format_args!("round {round}: {}", of_holder.holder.name()));
            of_holder.once_more(options, ground)?;
        }
    }
    let [nobody, ..] = &measured;
    let (free, free_after_start) = (rate_of(&nobody.going_on), rate_of(&nobody.anew));
    let run = |measured: &Measured| {
        let (going_on, anew) = (&measured.going_on, &measured.anew);
        json!({
            "holder": measured.holder.name(),
            "messages_per_second": rate_of(going_on),
            "ratio_without_holder": rate_of(going_on) / free,
            "claim_ms": mean_of(going_on, Delivery::claim_ms),
            "claim_p99_ms": mean_of(going_on, Delivery::claim_p99_ms),
            "claim_max_ms": mean_of(going_on, Delivery::claim_max_ms),
            "own_cpu_us_per_message": mean_of(going_on, Delivery::cpu_us_per_message),
            "messages_per_second_after_start": rate_of(anew),
            "ratio_without_holder_after_start": rate_of(anew) / free_after_start,
        })
    };
    Ok(json!({
        "settled": options.settled,
        "messages": options.messages,
        "rounds": options.rounds,
        "runs": measured.iter().map(run).collect::<Vec<_>>(),
    }))
}

/// The measurements with one holder.
struct Measured {
    holder: Holder,
    /// Deliveries by the relay that settled all messages before.
    going_on: Vec<Delivery>,
    /// Deliveries by a relay that has just started.
    anew: Vec<Delivery>,
}

impl Measured {
    fn new(holder: Holder) -> Self {
        Self {
            holder,
            going_on: Vec::new(),
            anew: Vec::new(),
        }
    }

    fn once_more(&mut self, options: &Options, ground: &mut Ground) -> Result<()> {
        ground.fresh()?;
        let held = self.holder.hold(ground)?;
        ground.fill(&Fill::plain(options.settled + options.messages))?;
        ground.quiet()?;
        let relay = Relay::from_config(ground.config.clone());
        let going_on = deliver_behind(ground, relay, options.settled, options.messages)?;
        ground.fill(&Fill::plain(options.messages))?;
        ground.quiet()?;
        self.anew.push(deliver(ground, options.messages)?);
        self.going_on.push(going_on);
        if let Some(mut conn) = held {
            conn.batch_execute("COMMIT").with_context(|| {
                format!(
                    "the transaction of {} ended before the measurement",
                    self.holder.name()
                )
            })?;
        }
        Ok(())
    }
}

pub(super) const COLUMNS: &[Column] = &[
    ("open transaction of", "holder", Unit::Word),
    ("delivered/s", "messages_per_second", Unit::Count),
    ("ratio to nobody", "ratio_without_holder", Unit::Ratio),
    (
        "ratio after a start",
        "ratio_without_holder_after_start",
        Unit::Ratio,
    ),
    ("mean claim", "claim_ms", Unit::Millis),
    ("p99 claim", "claim_p99_ms", Unit::Millis),
    ("max claim", "claim_max_ms", Unit::Millis),
    OWN_CPU,
];
